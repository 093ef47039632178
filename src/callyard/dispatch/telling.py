"""From what happens to a call to events. Source: tool-dispatch D29."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import msgspec

from callyard.clock import Timers
from callyard.dispatch.call import NOBODY, Call
from callyard.dispatch.events import DispatchEvent, EventHub, EventName, Subscriber, Tracing, Unsubscribe
from callyard.errors import CallFailure, Outcome
from callyard.functions.ports import SubcallEvent
from callyard.ids import CallId, Owner, RequestId, Tenant
from callyard.policy.breaker import BreakerState

_CIRCUIT_EVENTS: Final[Mapping[BreakerState, EventName]] = {
    BreakerState.OPEN: "circuit.opened",
    BreakerState.HALF_OPEN: "circuit.half_open",
    BreakerState.CLOSED: "circuit.closed",
}


class Teller:
    """Builds events, when somebody listens."""

    def __init__(self, clock: Timers) -> None:
        self.hub = EventHub()
        self.tracing: Tracing | None = None
        self._clock = clock

    def subscribe(self, subscriber: Subscriber) -> Unsubscribe:
        unsubscribe = self.hub.subscribe(subscriber)
        if not isinstance(subscriber, Tracing):
            return unsubscribe
        self.tracing = subscriber

        def unsubscribe_tracing() -> None:
            unsubscribe()
            if self.tracing is subscriber:
                self.tracing = None

        return unsubscribe_tracing

    def within(self, call: Call, target: Callable[..., Any]) -> Callable[..., Any]:
        """`target`, inside the call's span."""
        tracing = self.tracing
        return target if tracing is None else partial(_enter, tracing, call.id, target)

    def carrier(self, call: Call) -> dict[str, str]:
        """What the caller gave; else that of the call's span."""
        if call.trace or self.tracing is None:
            return dict(call.trace)
        return self.tracing.carrier(call.id)

    def start(self, call: Call, arguments: bytes) -> None:
        if self.hub.wanted:
            told = DispatchEvent(
                "dispatch.start",
                call.started_ms,
                call.spec.name,
                call.id,
                call.tenant,
                call.owner,
                call.caller_id,
                arguments=arguments,
            )
            self.hub.emit(told)

    def attempt(self, call: Call, now_ms: int) -> None:
        if self.hub.wanted:
            self.hub.emit(_at(call, "dispatch.attempt", now_ms, call.tries, now_ms - call.started_ms))

    def retry(self, call: Call, failure: CallFailure, wait_ms: int) -> None:
        if self.hub.wanted:
            told = _at(call, "dispatch.retry", self._clock.now_ms(), call.tries + 1, wait_ms)
            self.hub.emit(_with_failure(told, failure))

    def end(self, call: Call, failure: CallFailure | None, attempts: int, *, deduplicated: bool = False) -> None:
        if self.hub.wanted:
            now_ms = self._clock.now_ms()
            told = _at(call, "dispatch.success", now_ms, attempts, now_ms - call.started_ms)
            if failure is not None:
                told = _with_failure(told, failure, name="dispatch.error")
            if deduplicated:
                told = msgspec.structs.replace(told, name="dispatch.deduplicated", deduplicated=True)
            self.hub.emit(told)

    def hear_subcalls(self, call: Call, request_id: RequestId) -> Callable[[SubcallEvent], None] | None:
        """Who tells of the calls that an attempt makes in its executor, as children of their call (D48); None: nobody
        listens. Their ids are the attempt's with their path below it."""
        if not self.hub.wanted:
            return None
        started_ms: dict[str, int] = {}

        def hear(subcall: SubcallEvent) -> None:
            path, now_ms = subcall.path, self._clock.now_ms()
            above = path.rpartition("/")[0]
            told = DispatchEvent(
                "dispatch.start",
                now_ms,
                subcall.function,
                CallId(f"{request_id}/{path}"),
                call.tenant,
                call.owner,
                CallId(f"{request_id}/{above}") if above else call.id,
                arguments=subcall.arguments,
            )
            if not subcall.ended:
                started_ms[path] = now_ms
                self.hub.emit(told)
                return
            failure = subcall.failure
            duration_ms = now_ms - started_ms.pop(path, now_ms)
            ended = msgspec.structs.replace(told, name="dispatch.success", attempt=1, duration_ms=duration_ms)
            if failure is not None:
                attempt = int(failure.outcome is not Outcome.NOT_RUN)
                ended = _with_failure(ended, failure, name="dispatch.error", attempt=attempt)
            self.hub.emit(ended)

        return hear

    def rejected(
        self, call_id: CallId, tool: str, tenant: Tenant, owner: Owner, parent: Call | None, failure: CallFailure
    ) -> None:
        """A call that no record stands for: start and end."""
        if not self.hub.wanted:
            return
        above = NOBODY if parent is None else parent.id
        told = DispatchEvent("dispatch.start", self._clock.now_ms(), tool, call_id, tenant, owner, above)
        self.hub.emit(told)
        self.hub.emit(_with_failure(told, failure, name="dispatch.error"))

    def circuit(self, tool: str, tenant: Tenant, entered: BreakerState) -> None:
        if self.hub.wanted:
            self.hub.emit(DispatchEvent(_CIRCUIT_EVENTS[entered], self._clock.now_ms(), tool, tenant=tenant))


def _at(call: Call, name: EventName, at_ms: int, attempt: int, duration_ms: int) -> DispatchEvent:
    return DispatchEvent(
        name, at_ms, call.spec.name, call.id, call.tenant, call.owner, call.caller_id, attempt, duration_ms
    )


def _with_failure(told: DispatchEvent, failure: CallFailure, **fields: Any) -> DispatchEvent:
    kind, outcome, message = failure.kind, failure.outcome, failure.message
    return msgspec.structs.replace(told, kind=kind, outcome=outcome, message=message, **fields)


def _enter(tracing: Tracing, call_id: CallId, target: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    tracing.enter(call_id)
    return target(*args, **kwargs)
