"""The port through which the dispatcher runs a call somewhere else: a worker satisfies it by shape.

The dispatcher owns timeouts, retries and keys (D39, D42); a runner makes one attempt. Source: tool-dispatch D38-D42.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from callyard.errors import CallFailure
from callyard.functions.registry import FunctionSpec
from callyard.ids import RequestId
from callyard.wire.messages import CallContext, CallEventPayload, CancelReason


class CallOutcome(msgspec.Struct, frozen=True, gc=False):
    """How one attempt ended: an output (JSON as the executor sent it) or a failure."""

    output: bytes | None
    failure: CallFailure | None
    budget_used_ms: int = 0

    @property
    def ok(self) -> bool:
        return self.failure is None


class CallRunner(Protocol):
    """Runs single attempts."""

    async def call(
        self,
        request_id: RequestId,
        spec: FunctionSpec,
        args: bytes,
        *,
        budget_ms: int,
        deadline_at_ms: int | None = None,
        context: CallContext | None = None,
        on_event: Callable[[CallEventPayload], None] | None = None,
    ) -> CallOutcome:
        """Make one attempt and return how it ended; a failed call does not raise.

        `spec` pins the code: its digest is the one that runs (D39). `args` is JSON, an object by name or an array by
        position, checked by the executor. `budget_ms` is running time, 0 for unlimited, without waiting for an
        executor; `deadline_at_ms` is an instant on CLOCK_MONOTONIC that covers waiting too (D40). `on_event` gets
        progress and log while it runs.

        A refusal before the call began never counts as an attempt: it is tried again inside (X62, X70). Cancelling the
        awaiting task is `cancel` with the reason `cancelled`, and raises at once.
        """
        ...

    def cancel(self, request_id: RequestId, reason: CancelReason) -> bool:
        """Stop a call that waits or runs; `call` then returns its outcome, at the confirmation or the kill (D41).

        Never waits. False: there is no such call, it has ended.
        """
        ...
