"""What an IO provider is: the port that `http`, `files`, `sql` and `jsonrpc` implement, and that others may.

A provider performs requests of user functions on their behalf, in the worker's process and on its loop. It trusts
nothing in a request: the executor that sent it may be hostile. It keeps no state of one request for another, holds no
cache (the hub does), and ends at once when its `perform` is cancelled.
Source: call-execution X42.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final, Protocol, TypeVar

import msgspec

from callyard.errors import CallyardError, ErrorKind
from callyard.functions.ports import AskCallback
from callyard.ids import TaskId, Tenant
from callyard.wire.frames import FRAME_BYTES_MAX

ENVELOPE_BYTES_MAX: Final = 64 * 1024
"""Left free in a ResumeCall's frame for all but the reply itself."""
REPLY_BYTES_MAX: Final = FRAME_BYTES_MAX - ENVELOPE_BYTES_MAX
"""Most bytes of a reply, result and body together; no `max_bytes` may be above it."""

T = TypeVar("T")


class Reply(msgspec.Struct, frozen=True, gc=False):
    """What a provider answers."""

    result: bytes = b"null"
    """JSON, UTF-8."""
    body: bytes | None = None
    """Raw bytes beside the result; they travel as the frame's sidecar."""
    keep: bool = True
    """May be kept for the task when the operation is read-only. An HTTP 503 is a reply, but not to be kept."""


class IoFailure(CallyardError):
    """A request that failed, with the kind the function sees. Raised by providers; never leaves the hub."""

    def __init__(self, kind: ErrorKind, message: str, *, retryable: bool = False, **details: Any) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.retryable = retryable
        """The same request may well succeed later, and asking again does nothing twice."""
        self.details = details


class IoScope(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """On whose behalf a request is performed."""

    task_id: TaskId
    tenant: Tenant
    names: tuple[str, ...] | None = None  # hosts, roots, databases, endpoints this task may use; None: all configured
    ask: AskCallback | None = None
    """Puts a question to whoever made the call; None: nobody there answers questions."""

    def permits(self, name: str) -> bool:
        return self.names is None or "*" in self.names or name in self.names


class Provider(Protocol):
    """An IO provider. Subclass it for the defaults, or satisfy it by shape.

    A third party names a factory, `(settings: Mapping[str, Any]) -> Provider`, as an entry point of the group
    `callyard.io`; it is loaded when the section `[io.NAME]` is configured, and handed that section.
    """

    read_only: ClassVar[frozenset[str]] = frozenset()
    """Operations that change nothing: their replies are kept for the task, and equal ones in flight are joined."""

    is_interactive: ClassVar[bool] = False
    """It waits for people: what it takes is charged to no budget, and only the waiters' bound holds at its gate."""

    def is_read_only(self, operation: str, request: bytes) -> bool:
        """For a provider that can only tell from the request. Must be quick; anything may be in `request`."""
        return operation in self.read_only

    async def open(self) -> None:
        """Called once before the first request, when the worker starts. Raises UsageError for settings that cannot be
        right: a file that is not there, a library that is not installed."""
        return

    async def close(self) -> None:
        """Called once, after every `perform` has ended."""
        return

    async def perform(self, operation: str, request: bytes, body: bytes | None, scope: IoScope) -> Reply:
        """Do it. `request` is JSON as the executor sent it.

        Raises `IoFailure`; a TimeoutError counts as kind `timeout`, anything else as `internal`, a bug. Is cancelled
        when nobody waits for the reply any more.
        """
        ...


def decode_request(request: bytes, shape: type[T], operation: str) -> T:
    """Raises `IoFailure` of kind `schema` that names the field."""
    try:
        return msgspec.json.decode(request, type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise IoFailure(ErrorKind.SCHEMA, f"request of {operation!r}: {error}") from error
