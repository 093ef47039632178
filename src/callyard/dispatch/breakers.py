"""The circuit breakers of a dispatcher's tools, each tenant's its own: what one tenant's arguments bring about has the
tool refused to nobody else. Source: tool-dispatch D28, D44.
"""

from __future__ import annotations

from typing import Final

from callyard.clock import Timers
from callyard.dispatch.call import Call
from callyard.dispatch.telling import Teller
from callyard.errors import CallFailure, ErrorKind
from callyard.functions.current import ASK_PROVIDER
from callyard.functions.ports import CallOutcome
from callyard.ids import Tenant
from callyard.policy.breaker import Allowed, Breaker, BreakerPolicy, BreakerState, Refused, is_failure

BREAKERS_MAX: Final = 10_000
"""Of all tools and tenants; for whom there is no place more, the tool's tenants beyond share one."""
_SWEEP_MS: Final = 1_000
_SHARED: Final = Tenant("")
"""No tenant has an empty name."""
_CLOSED: Final = BreakerState.CLOSED
_OPEN: Final = BreakerState.OPEN
_TIMEOUT: Final = ErrorKind.TIMEOUT


class Breakers:
    """One per tool and tenant. With no policy there is none."""

    def __init__(self, policy: BreakerPolicy | None, clock: Timers, teller: Teller, timeout_ms: int) -> None:
        """`timeout_ms`: of one attempt, where the tool does not say."""
        self._policy = policy
        self._timeout_ms = timeout_ms
        self._clock = clock
        self._teller = teller
        self._breakers: dict[str, dict[Tenant, Breaker]] = {}
        self._count = 0
        self._swept_at_ms: int | None = None

    def get(self, tool: str, tenant: Tenant) -> Breaker | None:
        of_tool = self._breakers.get(tool)
        breaker = None if of_tool is None else of_tool.get(tenant)
        if breaker is None and self._policy is not None:
            if self._count >= BREAKERS_MAX and not self._sweep():
                tenant = _SHARED
            of_tool = self._breakers.setdefault(tool, {})
            breaker = of_tool.get(tenant)
            if breaker is None:
                breaker = of_tool[tenant] = Breaker(self._policy)
                self._count += 1
        return breaker

    def _sweep(self) -> bool:
        """Forget those that remember nothing. False: there is no place."""
        now_ms = self._clock.now_ms()
        if self._swept_at_ms is None or now_ms - self._swept_at_ms >= _SWEEP_MS:
            self._swept_at_ms = now_ms
            for tool, of_tool in list(self._breakers.items()):
                kept = {tenant: breaker for tenant, breaker in of_tool.items() if not breaker.is_at_rest(now_ms)}
                self._count -= len(of_tool) - len(kept)
                if kept:
                    self._breakers[tool] = kept
                else:
                    del self._breakers[tool]
        return self._count < BREAKERS_MAX

    def state(self, tool: str, tenant: Tenant | None = None) -> BreakerState:
        """A tenant's; None: of all tenants' the one that lets the least through."""
        of_tool = self._breakers.get(tool, {})
        if tenant is not None:
            breaker = of_tool.get(tenant)
            return _CLOSED if breaker is None else breaker.state
        states = {breaker.state for breaker in of_tool.values()} - {_CLOSED}
        return _OPEN if _OPEN in states else next(iter(states), _CLOSED)

    def peek(self, call: Call) -> Refused | None:
        """Whether a call would be refused now."""
        breaker = call.breaker = self.get(call.spec.name, call.tenant)
        if breaker is None or breaker.state is _CLOSED:
            return None
        return breaker.peek(self._clock.now_ms())

    def ask(self, call: Call, now_ms: int) -> Refused | None:
        """Whether the call's next attempt may begin; what it was given stays with the call."""
        breaker = call.breaker or self.get(call.spec.name, call.tenant)
        if breaker is None:
            return None
        call.breaker = breaker
        answer = breaker.ask(now_ms, call.admission)
        if type(answer) is Refused:
            return answer
        call.admission = answer
        if answer.entered is not None:
            self._tell(call, breaker, answer.entered)
        return None

    def conclude(self, call: Call, end: CallOutcome | None) -> None:
        """The call's verdict on its tool, once. None: its caller gave it up, which says nothing, whatever an attempt
        before said."""
        held, call.admission = call.admission, None
        breaker = call.breaker
        if held is None or breaker is None:
            return
        if breaker.state is _CLOSED and (end is None or end.failure is None):
            return
        if end is not None and end.failure is not None and _is_the_callers(call, end.failure, self._timeout_ms):
            breaker.give_back(held)
            return
        entered = _judge(breaker, held, self._clock.now_ms(), end)
        if entered is not None:
            self._tell(call, breaker, entered)

    def _tell(self, call: Call, breaker: Breaker, entered: BreakerState) -> None:
        is_own = self._breakers.get(call.spec.name, {}).get(call.tenant) is breaker
        self._teller.circuit(call.spec.name, call.tenant if is_own else _SHARED, entered)


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
