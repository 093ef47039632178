"""The circuit breakers of a dispatcher's tools. Source: tool-dispatch D28."""

from __future__ import annotations

from typing import Final

from callyard.clock import Timers
from callyard.dispatch.call import Call
from callyard.dispatch.telling import Teller
from callyard.errors import CallFailure, ErrorKind
from callyard.functions.current import ASK_PROVIDER
from callyard.functions.ports import CallOutcome
from callyard.policy.breaker import Allowed, Breaker, BreakerPolicy, BreakerState, Refused, is_failure

_CLOSED: Final = BreakerState.CLOSED
_TIMEOUT: Final = ErrorKind.TIMEOUT


class Breakers:
    """One per tool that was ever called. With no policy there is none."""

    def __init__(self, policy: BreakerPolicy | None, clock: Timers, teller: Teller, timeout_ms: int) -> None:
        """`timeout_ms`: of one attempt, where the tool does not say."""
        self._policy = policy
        self._timeout_ms = timeout_ms
        self._clock = clock
        self._teller = teller
        self._breakers: dict[str, Breaker] = {}

    def get(self, tool: str) -> Breaker | None:
        breaker = self._breakers.get(tool)
        if breaker is None and self._policy is not None:
            breaker = self._breakers[tool] = Breaker(self._policy)
        return breaker

    def state(self, tool: str) -> BreakerState:
        breaker = self._breakers.get(tool)
        return BreakerState.CLOSED if breaker is None else breaker.state

    def peek(self, tool: str) -> Refused | None:
        """Whether a call would be refused now."""
        breaker = self._breakers.get(tool)
        if breaker is None or breaker.state is _CLOSED:
            return None
        return breaker.peek(self._clock.now_ms())

    def ask(self, call: Call, now_ms: int) -> Refused | None:
        """Whether the call's next attempt may begin; what it was given stays with the call."""
        breaker = self._breakers.get(call.spec.name) or self.get(call.spec.name)
        if breaker is None:
            return None
        answer = breaker.ask(now_ms, call.admission)
        if type(answer) is Refused:
            return answer
        call.admission = answer
        if answer.entered is not None:
            self._teller.circuit(call.spec.name, answer.entered)
        return None

    def conclude(self, call: Call, end: CallOutcome | None) -> None:
        """The call's verdict on its tool, once. None: its caller gave it up, which says nothing, whatever an attempt
        before said."""
        held, call.admission = call.admission, None
        if held is None:
            return
        breaker = self._breakers[call.spec.name]
        if breaker.state is _CLOSED and (end is None or end.failure is None):
            return
        if end is not None and end.failure is not None and _is_the_callers(call, end.failure, self._timeout_ms):
            breaker.give_back(held)
            return
        entered = _judge(breaker, held, self._clock.now_ms(), end)
        if entered is not None:
            self._teller.circuit(call.spec.name, entered)


def _is_the_callers(call: Call, failure: CallFailure, timeout_ms: int) -> bool:
    """It says nothing of the tool: the time that it ran out of was its caller's, or its client was asked and would not
    answer. Else any caller could have the tool refused to all others."""
    if failure.kind is _TIMEOUT:
        limit, asked_ms = failure.details.get("limit"), call.asked_timeout_ms
        own_ms = call.spec.promises.timeout_ms or timeout_ms
        return limit == "deadline_ms" or (limit == "timeout_ms" and asked_ms is not None and asked_ms < own_ms)
    cause = failure.details.get("cause")
    details = cause.get("details") if isinstance(cause, dict) else None
    return isinstance(details, dict) and details.get("provider") == ASK_PROVIDER


def _judge(breaker: Breaker, held: Allowed, now_ms: int, end: CallOutcome | None) -> BreakerState | None:
    failure = None if end is None else end.failure
    if end is not None and failure is None:
        return breaker.succeeded(held)
    if failure is not None and is_failure(failure):
        return breaker.failed(held, now_ms)
    breaker.give_back(held)
    return None
