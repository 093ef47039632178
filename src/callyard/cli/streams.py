"""The three standard streams of a command, of which any may be closed, full, or lose its reader."""

from __future__ import annotations

import os
import sys
from typing import Any, Final, TextIO

from callyard.errors import UsageError

_CONTROL: Final = {code: f"\\x{code:02x}" for code in (*range(32), 127, *range(128, 160)) if chr(code) not in "\t\n"}


def open_missing_streams() -> None:
    """Put /dev/null where a descriptor 0, 1 or 2 is closed: the next socket or pipe must not become one of them.

    `sys.stdin` and `sys.stdout` stay None, so that a command that needs them can say so.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is fd
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  # for the life of the process


def clean(text: str) -> str:
    """Foreign text for a terminal: no control characters but tab and newline."""
    return text.translate(_CONTROL)


class StandardError:
    """`sys.stderr` that never raises: where nobody reads the messages, the work goes on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except (OSError, ValueError):
            _point_to_null(2)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            _point_to_null(2)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def check_stdout() -> None:
    """Raises UsageError when a value could not be shown."""
    if sys.stdout is None:
        raise UsageError("standard output is closed, and the value goes there: redirect it to a file, or to /dev/null")


def write_stdout(data: bytes) -> None:
    """Write a value. A reader that went away has seen enough; anything else that is wrong is a UsageError."""
    check_stdout()
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        _point_to_null(1)
    except OSError as error:
        _point_to_null(1)
        raise UsageError(f"cannot write standard output: {error.strerror}") from error


def _point_to_null(fd: int) -> None:
    """What is still buffered goes nowhere, else the interpreter complains at its exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, fd)
    os.close(null)
