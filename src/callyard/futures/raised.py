"""What a call raised, on its way back: as itself where that can be, else as a `RemoteError` that tells of it.

Nothing here knows a codec; both ends of a pool use it, and an executor loads no more than this.
"""

from __future__ import annotations

import builtins
from types import TracebackType
from typing import Any, Final

import msgspec

from callyard.errors import CallyardError
from callyard.functions.raised import cut_text, stack_of, text_of

MESSAGE_CHARACTERS_MAX = 64 * 1024
VALUE: Final = 0
RAISED: Final = 1
INITIALIZER_RAISED: Final = 2
"""What an answer holds: a value, or an exception."""


class RemoteTraceback(Exception):
    """The cause of an exception that came from another process: where it was raised there."""

    def __init__(self, traceback: str) -> None:
        super().__init__(traceback)
        self.traceback = traceback

    def __str__(self) -> str:
        return f'\n"""\n{self.traceback}"""'


class RemoteError(CallyardError):
    """A function in another process raised what cannot come back as itself.

    `type` is the name of its class with the module, `message` its text, `traceback` what was printed there.
    """

    def __init__(self, type: str, message: str, traceback: str) -> None:
        super().__init__(type, message, traceback)
        self.type = type
        self.message = message
        self.traceback = traceback

    def __str__(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type


class Raised(msgspec.Struct, frozen=True):
    """An exception as it travels."""

    type: str
    """Name of its class, with the module unless that is `builtins`."""
    message: str
    traceback: str
    body: bytes = b""
    """The exception itself, as the codec writes it; empty: it cannot."""

    @classmethod
    def of(cls, error: BaseException, body: bytes = b"") -> Raised:
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        return cls(name, cut_text(text_of(error), MESSAGE_CHARACTERS_MAX), stack_of(error), body)

    def to_exception(self, found: BaseException | None) -> BaseException:
        """`found`, what the codec read of `body`, or a `RemoteError` in its place; the traceback is its cause."""
        error = found if found is not None else RemoteError(self.type, self.message, self.traceback)
        error.__cause__ = RemoteTraceback(self.traceback)
        return error


def skip_frame(error: BaseException) -> None:
    """Drop the outermost line of its traceback: the one that called the user's function."""
    trace: TracebackType | None = error.__traceback__
    if trace is not None:
        error.__traceback__ = trace.tb_next


def builtin_exception(name: str) -> type[BaseException] | None:
    found: Any = getattr(builtins, name, None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None
