"""What the benchmarks call; imported by executors only."""

from callyard import function


@function(idempotent=True)
def no_op(value: int) -> int:
    return value


@function
def no_op_unpromised(value: int) -> int:
    return value
