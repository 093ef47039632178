"""The port through which the dispatcher runs a call somewhere else: a worker satisfies it by shape.

The dispatcher owns timeouts, retries and keys (D39, D42); a runner makes one attempt. Source: tool-dispatch D38-D42.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import msgspec

from callyard.errors import CallFailure, CallyardError, ErrorKind
from callyard.functions.registry import FunctionSpec
from callyard.ids import FunctionId, RequestId
from callyard.wire.messages import EMPTY, CallContext, CallEventKind, CallEventPayload, CancelReason

__all__ = [
    "EMPTY",
    "AskCallback",
    "AskRefused",
    "AttemptFailed",
    "CallContext",
    "CallEventKind",
    "CallEventPayload",
    "CallOutcome",
    "CallRunner",
    "CancelReason",
    "HasRunner",
    "SubcallEvent",
]


AskCallback = Callable[[str, Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""Puts a question of a running call to its client: what is asked (`elicit`, `sample`, `list_roots`) and its parameters,
to the client's answer. Raises `AskRefused`. The caller cancels it when the call ends first."""


class AskRefused(CallyardError):
    """A question that got no answer, with the kind that the asking function sees."""

    def __init__(self, kind: ErrorKind, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.retryable = retryable


class AttemptFailed(CallyardError):
    """Raised by a handler that stands for a tool elsewhere: how its attempt ended, `attempts` 0 if it never began."""

    def __init__(self, failure: CallFailure) -> None:
        super().__init__(str(failure))
        self.failure = failure


def nobody_to_ask(kind: str) -> AskRefused:
    return AskRefused(
        ErrorKind.DENIED,
        f"{kind}: there is nobody to ask; a call can ask its client when it came by a gate whose clients answer "
        "questions, such as MCP, or was dispatched with on_ask",
    )


class CallOutcome(msgspec.Struct, frozen=True, gc=False):
    """How one attempt ended: an output (JSON as the executor sent it) or a failure."""

    output: bytes | None
    failure: CallFailure | None
    budget_used_ms: int = 0

    @property
    def ok(self) -> bool:
        return self.failure is None


class SubcallEvent(msgspec.Struct, frozen=True, gc=False):
    """A call that an attempt made where it runs was asked for, or has ended (D48)."""

    path: str
    """Its place below the attempt: `2` for the second one that the attempt made, `2/1` for the first that this made."""
    function: FunctionId
    arguments: bytes = b""
    """JSON; empty at the end."""
    ended: bool = False
    failure: CallFailure | None = None
    """At the end; None: it succeeded."""


class CallRunner(Protocol):
    """Runs single attempts."""

    @property
    def capacity(self) -> int:
        """How many it can run at once."""
        ...

    def pin(self, name: str) -> tuple[FunctionSpec, Callable[[], None]]:
        """The function as it is now, and what lets go of it: until then its code stays, whatever is reloaded (D39).

        Raises `UnknownFunction`, or another `CallyardError` when nothing can run.
        """
        ...

    async def call(
        self,
        request_id: RequestId,
        spec: FunctionSpec,
        args: bytes,
        *,
        budget_ms: int,
        context: CallContext | None = None,
        on_event: Callable[[CallEventPayload], None] | None = None,
        on_subcall: Callable[[SubcallEvent], None] | None = None,
        on_ask: AskCallback | None = None,
    ) -> CallOutcome:
        """Make one attempt and return how it ended; a failed call does not raise.

        `spec` is pinned: its digest is the one that runs (D39). `args` is JSON, an object by name or an array by
        position, checked by the executor. `budget_ms` is running time, without waiting for an executor, for a function
        that names none; whoever keeps the time of the attempt cancels it with the reason `deadline` (D40). `on_event`
        gets progress and log while it runs, `on_subcall` the calls that it makes in turn, `on_ask` its questions;
        with it the time of the whole call is the caller's to keep, for what a person takes to answer does not count.

        A refusal before the call began never counts as an attempt: it is tried again inside (X62, X70). Cancelling the
        awaiting task is `cancel` with the reason `cancelled`, and raises at once: `when_ended` tells of the end.

        A failure with `details.effect_below` is of an attempt that must not be made again, whatever the function
        promises: it had begun a call that must not run twice (X64).
        """
        ...

    def cancel(self, request_id: RequestId, reason: CancelReason) -> bool:
        """Stop a call that waits or runs; `call` then returns its outcome, at the confirmation or the kill (D41).

        Never waits. False: there is no such call, it has ended.
        """
        ...

    def when_ended(self, request_id: RequestId, then: Callable[[], None]) -> bool:
        """Have `then` called when a call whose awaiting task was cancelled has ended: its code runs no more (D41).

        False: there is no such call, it has ended.
        """
        ...


class HasRunner(Protocol):
    """A worker, as the dispatcher sees it."""

    @property
    def runner(self) -> CallRunner: ...
