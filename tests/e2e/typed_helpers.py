"""What `typed_file` imports."""

from callyard import function


@function
def triple(x: int) -> int:
    return 3 * x


@function
def plus_one(x: int) -> int:
    return x + 1


@function
def not_imported(x: int) -> int:
    return x
