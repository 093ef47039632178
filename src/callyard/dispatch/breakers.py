"""The circuit breakers of a dispatcher's tools. Source: tool-dispatch D28."""

from __future__ import annotations

from typing import Final

from callyard.clock import Timers
from callyard.dispatch.call import Call
from callyard.dispatch.telling import Teller
from callyard.functions.ports import CallOutcome
from callyard.policy.breaker import Allowed, Breaker, BreakerPolicy, BreakerState, Refused, is_failure

_CLOSED: Final = BreakerState.CLOSED


class Breakers:
    """One per tool that was ever called. With no policy there is none."""

    def __init__(self, policy: BreakerPolicy | None, clock: Timers, teller: Teller) -> None:
        self._policy = policy
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
        entered = _judge(breaker, held, self._clock.now_ms(), end)
        if entered is not None:
            self._teller.circuit(call.spec.name, entered)


def _judge(breaker: Breaker, held: Allowed, now_ms: int, end: CallOutcome | None) -> BreakerState | None:
    failure = None if end is None else end.failure
    if end is not None and failure is None:
        return breaker.succeeded(held)
    if failure is not None and is_failure(failure):
        return breaker.failed(held, now_ms)
    breaker.give_back(held)
    return None
