"""One call, from what it waits for to its last attempt. Source: tool-dispatch D8, D12, D13, D28, D40, D46."""

from __future__ import annotations

import msgspec

from callyard.clock import Timers
from callyard.dispatch.admission import Admission
from callyard.dispatch.breakers import Breakers
from callyard.dispatch.call import Call
from callyard.dispatch.handlers import Handlers
from callyard.dispatch.plan import Limit
from callyard.dispatch.refusals import SHUTTING_DOWN, budget_exceeded, circuit_open
from callyard.dispatch.telling import Teller
from callyard.errors import CallFailure, ErrorKind, Outcome
from callyard.functions.ports import CallOutcome


class Attempts:
    """Brings a call in, and makes attempts until one succeeds, or none may follow."""

    def __init__(
        self, clock: Timers, admission: Admission, breakers: Breakers, handlers: Handlers, teller: Teller
    ) -> None:
        self._sealed = False
        self._clock = clock
        self._admission = admission
        self._breakers = breakers
        self._handlers = handlers
        self._teller = teller

    def seal(self) -> None:
        """No retry starts any more."""
        self._sealed = True

    def _may_go_on(self, call: Call) -> bool:
        return call.stopping is None and not self._sealed

    async def run(self, call: Call) -> CallOutcome:
        """Each attempt asks the breaker and takes one of the allowance; the call's verdict goes to the breaker, and
        whatever it took goes back."""
        plan, clock, allowance = call.plan, self._clock, call.allowance
        last: CallOutcome | None = None
        end: CallOutcome | None = None
        try:
            refusal = await self._admission.enter(call)
            if refusal is not None:
                return CallOutcome(None, refusal)
            while True:
                now_ms = clock.now_ms()
                limit = self._admit(call, now_ms)
                if type(limit) is CallFailure:
                    if last is None or limit.kind is ErrorKind.CANCELLED:
                        last = CallOutcome(None, _fold(limit, last))
                    break
                call.tries += 1
                call.limit = limit
                self._teller.attempt(call, now_ms)
                begun = plan.attempts
                try:
                    outcome = await self._handlers.attempt(call, limit)
                finally:
                    if call.held and call.client is not None:
                        call.client.end_attempt(call)
                    if plan.attempts > begun:
                        if call.caller is not None:
                            call.mark_effect()
                    elif allowance is not None:
                        allowance.give_back()  # it ended before it began
                failure = outcome.failure
                if failure is None:
                    last = outcome
                    break
                last = CallOutcome(None, _fold(failure, last))
                wait_ms = plan.next_wait_ms(failure, call.tries, clock.now_ms())
                if wait_ms is None or not self._may_go_on(call):
                    break
                self._teller.retry(call, failure, wait_ms)
                at_ms = clock.now_ms() + wait_ms
                while clock.now_ms() < at_ms and self._may_go_on(call):
                    await call.pause(at_ms)
            end = last
            return end
        finally:
            try:
                self._breakers.conclude(call, end)
            finally:
                self._admission.give_back(call)

    def _admit(self, call: Call, now_ms: int) -> Limit | CallFailure:
        """The limit of an attempt that begins now, or why none does. After one that failed its error is the call's,
        unless this is a cancellation."""
        if call.stopping is not None:
            return call.stopped()
        if self._sealed and call.tries > 0:
            return SHUTTING_DOWN
        limit = call.plan.limit(now_ms)
        if limit is None:
            return self._admission.waited_too_long(call, "its start")
        refused = self._breakers.ask(call, now_ms)
        if refused is not None:
            return circuit_open(call.spec.name, refused.retry_after_ms)
        if call.allowance is not None and not call.allowance.take(now_ms):
            return budget_exceeded(call.allowance.spent(now_ms) or "calls")
        return limit


def _fold(failure: CallFailure, last: CallOutcome | None) -> CallFailure:
    """The outcome of all attempts so far: what an earlier one may have done stays possible."""
    before = None if last is None else last.failure
    if before is not None and before.outcome is Outcome.UNKNOWN and failure.outcome is Outcome.NOT_RUN:
        return msgspec.structs.replace(failure, outcome=Outcome.UNKNOWN)
    return failure
