"""Single attempts for the dispatcher: `CallRunner` on a worker.

Each is a task of one root call with one attempt, so that it has a cache and an IO cache of its own and takes no task
slot. Retries, timeouts and keys are the dispatcher's. Source: tool-dispatch D38-D42.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from callyard.errors import CallError, CallFailure, CallyardError, ErrorKind, Outcome, fail
from callyard.functions.ports import AskCallback, CallOutcome, SubcallEvent
from callyard.functions.registry import FunctionSpec, UnknownFunction
from callyard.ids import Digest, RequestId
from callyard.scheduler import NewCall, StopReason
from callyard.wire.messages import CallContext, CallEventPayload, CancelReason
from callyard.worker.code_view import CodeView
from callyard.worker.task_run import AttemptCall

if TYPE_CHECKING:
    from callyard.worker.worker import Worker

RETRY_AFTER_MS: Final = 1_000
"""When to come again, to a caller for whom there is no executor."""
_REASONS: Final = {
    CancelReason.CANCELLED: StopReason.CANCELLED,
    CancelReason.DEADLINE: StopReason.DEADLINE,
    CancelReason.SHUTTING_DOWN: StopReason.SHUTTING_DOWN,
    CancelReason.RECALL: StopReason.CANCELLED,
}


class AttemptRunner:
    """Satisfies `callyard.functions.ports.CallRunner`."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._pinned: dict[Digest, _Pinned] = {}
        self._running: dict[RequestId, AttemptCall] = {}

    @property
    def capacity(self) -> int:
        return self._worker.capacity

    def pin(self, name: str) -> tuple[FunctionSpec, Callable[[], None]]:
        worker = self._worker
        spec = worker.registry.get(name)
        view, release = worker.pin_view()
        if spec.digest != view.digest:  # replaced by a tool of this process, or reloaded by another worker
            release()
            raise UnknownFunction(
                f"this worker does not serve the version of {name!r} that the registry has: reload it"
            )
        pinned = self._pinned.get(view.digest)
        if pinned is None:
            pinned = self._pinned[view.digest] = _Pinned(view)
        pinned.count += 1

        def let_go() -> None:
            pinned.count -= 1
            if pinned.count == 0:
                del self._pinned[view.digest]
            release()

        return spec, let_go

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
        view = self._pinned[spec.digest].view
        call = NewCall(0, view[spec.name], args, False, view.refusal)
        try:
            attempt = self._worker.open_attempt(
                view, call, context or CallContext(), budget_ms, on_event, on_subcall, on_ask
            )
        except CallyardError as error:
            kind = ErrorKind.SHUTTING_DOWN if self._worker.is_closing else ErrorKind.UNAVAILABLE
            return CallOutcome(None, _told(fail(kind, str(error))))
        self._running[request_id] = attempt
        attempt.when_ended(lambda: self._forget(request_id, attempt))
        try:
            result = await attempt.wait()
        except CallError as error:  # it was not admitted
            return CallOutcome(None, _told(error.failure))
        except CallyardError as error:  # the worker failed, and what its executors did nobody knows
            return CallOutcome(None, fail(ErrorKind.INTERNAL, str(error), attempts=1, outcome=Outcome.UNKNOWN))
        return CallOutcome(result.output, None if result.failure is None else _told(result.failure))

    def _forget(self, request_id: RequestId, attempt: AttemptCall) -> None:
        if self._running.get(request_id) is attempt:  # else another call of that name has begun meanwhile
            del self._running[request_id]

    def cancel(self, request_id: RequestId, reason: CancelReason) -> bool:
        attempt = self._running.get(request_id)
        if attempt is None:
            return False
        attempt.stop(_REASONS[reason])
        return True

    def when_ended(self, request_id: RequestId, then: Callable[[], None]) -> bool:
        attempt = self._running.get(request_id)
        if attempt is None:
            return False
        attempt.when_ended(then)
        return True


def _told(failure: CallFailure) -> CallFailure:
    """The worker's word for it in the dispatcher's table (D23): where they differ."""
    if failure.kind is ErrorKind.UNAVAILABLE and "retry_after_ms" not in failure.details:
        return msgspec.structs.replace(failure, details={**failure.details, "retry_after_ms": RETRY_AFTER_MS})
    stopped = failure.kind is ErrorKind.CANCELLED and failure.details.get("reason") == StopReason.SHUTTING_DOWN
    if stopped and failure.attempts == 0:
        return fail(ErrorKind.SHUTTING_DOWN, "the worker was closed before it ran")
    return failure


class _Pinned(msgspec.Struct, eq=False):
    view: CodeView
    count: int = 0
