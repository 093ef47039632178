"""The thirteen kinds of the host's failures, and what they are in `callyard.errors`. Source: job-queue §4, D38."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Final

from callyard.errors import CallyardError, ErrorKind


class HostErrorKind(IntEnum):
    NOT_FOUND = 0
    ALREADY_EXISTS = 1
    TYPE_MISMATCH = 2
    NOT_CONFIGURED = 3
    REJECTED = 4
    UNAVAILABLE = 5
    CAPACITY_EXCEEDED = 6
    DEADLINE_EXCEEDED = 7
    SHUTTING_DOWN = 8
    PROTOCOL_ERROR = 9
    INVALID_OPERATION = 10
    DATA_LOST = 11
    INTERNAL_FAILURE = 12

    def __str__(self) -> str:
        return self.name

    def __format__(self, spec: str) -> str:
        return format(self.name, spec)


ERROR_KINDS: Final[Mapping[HostErrorKind, ErrorKind]] = {
    HostErrorKind.NOT_FOUND: ErrorKind.NOT_FOUND,
    HostErrorKind.ALREADY_EXISTS: ErrorKind.INTERNAL,
    HostErrorKind.TYPE_MISMATCH: ErrorKind.INTERNAL,
    HostErrorKind.NOT_CONFIGURED: ErrorKind.INTERNAL,
    HostErrorKind.REJECTED: ErrorKind.DENIED,
    HostErrorKind.UNAVAILABLE: ErrorKind.UNAVAILABLE,
    HostErrorKind.CAPACITY_EXCEEDED: ErrorKind.UNAVAILABLE,
    HostErrorKind.DEADLINE_EXCEEDED: ErrorKind.DEADLINE,
    HostErrorKind.SHUTTING_DOWN: ErrorKind.SHUTTING_DOWN,
    HostErrorKind.PROTOCOL_ERROR: ErrorKind.SCHEMA,
    HostErrorKind.INVALID_OPERATION: ErrorKind.INTERNAL,
    HostErrorKind.DATA_LOST: ErrorKind.INTERNAL,
    HostErrorKind.INTERNAL_FAILURE: ErrorKind.INTERNAL,
}


TEXT_MAX: Final = 2_048
"""Characters of an error's text that are told; an exception may hold a whole document."""


class HostError(CallyardError):
    """An operation of the host failed. Failures are told apart by `kind`, never by text.

    `message` says it without the kind, and names the spot; `str` puts the kind before it. Raises ValueError for a kind
    that is none.
    """

    def __init__(self, kind: HostErrorKind, message: str) -> None:
        super().__init__(kind, message)
        self.kind = HostErrorKind(kind)
        self.message = message

    def __str__(self) -> str:
        return f"{self.kind.name}: {self.message}"

    def __repr__(self) -> str:
        return f"HostError({self.kind.name}, {self.message!r})"


def text_of(error: BaseException) -> str:
    """What an exception says, whatever its `__str__` does: of bounded length, and UTF-8. Of a `HostError` its kind goes
    apart, so it is left out.
    """
    try:
        text = error.message if isinstance(error, HostError) else str(error)
    except Exception:  # noqa: BLE001 - of a user's own class
        text = "(its text cannot be read)"
    if len(text) > TEXT_MAX:
        text = f"{text[:TEXT_MAX]}..."
    return text.encode(errors="backslashreplace").decode()
