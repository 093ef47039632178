"""Libraries that come with an extra: what is said when one is not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from callyard.errors import UsageError


def pip_line(extra: str) -> str:
    """What installs it."""
    return f"pip install 'callyard[{extra}]'"


def missing(extra: str, what: str, library: str) -> UsageError:
    """Why `what` cannot be had, and what mends it."""
    return UsageError(f"{what} needs {library}: {pip_line(extra)}")


@contextmanager
def needs(extra: str, what: str) -> Iterator[None]:
    """Around the imports that `what` cannot do without: a library that is not there is a UsageError."""
    try:
        yield
    except ImportError as error:
        library = (error.name or "").partition(".")[0]
        if not library or library == "callyard":
            raise
        broken = "" if isinstance(error, ModuleNotFoundError) else f" (there is one that does not fit: {error})"
        raise UsageError(f"{missing(extra, what, library)}{broken}") from error
