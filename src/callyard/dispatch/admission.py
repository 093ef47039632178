"""What a call waits for before its first attempt, and gives back after its last. Source: tool-dispatch D8, D14, D27,
D31, D45, D57, D58."""

from __future__ import annotations

import msgspec

from callyard.clock import Timers
from callyard.dispatch.breakers import Breakers
from callyard.dispatch.call import Call
from callyard.dispatch.config import DispatcherConfig
from callyard.dispatch.lines import Line, Lines, can_wait, find_turn, is_inside_above
from callyard.dispatch.plan import NEVER
from callyard.dispatch.rates import NO_PLACE, Rates
from callyard.dispatch.refusals import budget_exceeded, circuit_open, cycle, deadline_passed, unavailable
from callyard.errors import CallFailure, ErrorKind, fail
from callyard.functions.registry import FunctionSpec
from callyard.ids import Tenant


class TenantUse(msgspec.Struct, frozen=True, gc=False):
    """What of a tenant waits."""

    queued: int
    queued_bytes: int


class Admission:
    """Owner lines, seats, tenants' shares, rates and slots: taken in one order, and all given back at once."""

    def __init__(self, config: DispatcherConfig, slots: int, clock: Timers, breakers: Breakers, rates: Rates) -> None:
        self.config = config
        self.queued = 0
        self.slots = Line(slots)
        self.turns: Lines[object] = Lines(1)
        self.lingering: dict[Call, None] = {}
        """Calls whose callers have gone: they hold what they hold until their code has ended."""
        self._clock = clock
        self._breakers = breakers
        self._seats: dict[str, Line] = {}
        self.rates = rates
        self._tenants: Lines[Tenant] | None = None if config.tenant_running is None else Lines(config.tenant_running)
        self._tenant_use: dict[Tenant, TenantUse] = {}

    async def enter(self, call: Call) -> CallFailure | None:
        """Owner line, breaker, allowance, rate, seat, the tenant's share, slot."""
        spec, clock, allowance = call.spec, self._clock, call.allowance
        promises = spec.promises
        refusal: CallFailure | None
        if call.owner:
            turn = (call.tenant, call.owner)
            line = find_turn(call, turn, self.turns)
            call.turn_of = turn
            if not line.try_enter(call) and (refusal := await self._wait_in(call, line, "the owner's turn")):
                return refusal
        if (refused := self._breakers.peek(call)) is not None:
            return circuit_open(spec.name, refused.retry_after_ms)
        if allowance is not None:
            if (spent := allowance.spent(clock.now_ms())) is not None:
                return budget_exceeded(spent)
            if allowance.ends_at_ms is not None:
                call.plan.wall_at_ms = allowance.ends_at_ms
        if promises.rate is not None and (refusal := await self._wait_for_rate(call, promises.rate)):
            return refusal
        if promises.max_concurrency is not None:
            seat = self._seat(spec)
            is_free = is_inside_above(call, seat) or seat.try_enter(call)
            if not is_free and (refusal := await self._wait_in(call, seat, f"a seat of {spec.name}")):
                return refusal
        if call.parent is None:
            if self._tenants is not None:
                share = self._tenants.get(call.tenant)
                if not share.try_enter(call) and (refusal := await self._wait_in(call, share, "the tenant's share")):
                    return refusal
            if not self.slots.try_enter(call) and (refusal := await self._wait_in(call, self.slots, "a slot")):
                return refusal
        return None

    async def _wait_in(self, call: Call, line: Line, what: str) -> CallFailure | None:
        """Wait in a line. None: it is inside."""
        if not can_wait(call, line):
            return cycle(what)
        refusal = self._queue(call)
        if refusal is not None:
            return refusal
        limit_ms = self.queue_limit_ms(call)
        line.wait(call)
        try:
            while call not in line.holders:
                if call.stopping is not None:
                    return call.stopped()
                if self._clock.now_ms() >= limit_ms:
                    return self.waited_too_long(call, what)
                await call.pause(limit_ms)
            return None
        finally:
            self._unqueue(call)
            line.stop_waiting(call)

    def _queue(self, call: Call) -> CallFailure | None:
        """Take a place among those that wait, for whatever: there are so many."""
        if self.queued >= self.config.queued_max:
            return unavailable(f"{self.queued} calls wait already")
        if not self._take_place(call):
            return unavailable(f"too much of tenant {call.tenant} waits already")
        self.queued += 1
        return None

    def _unqueue(self, call: Call) -> None:
        self.queued -= 1
        self._leave_place(call)

    def queue_limit_ms(self, call: Call) -> int:
        limit_ms = min(call.plan.deadline_at_ms, call.plan.wall_at_ms)
        wait_ms_max = self.config.queue_wait_ms_max
        return limit_ms if wait_ms_max is None else min(limit_ms, call.started_ms + wait_ms_max)

    def waited_too_long(self, call: Call, what: str) -> CallFailure:
        now_ms = self._clock.now_ms()
        needed_ms = now_ms + self.config.attempt_min_ms
        if needed_ms >= call.plan.deadline_at_ms:
            return deadline_passed(f" while it waited for {what}")
        if needed_ms >= call.plan.wall_at_ms:
            return budget_exceeded("wall_ms")
        waited_ms = now_ms - call.started_ms
        message = f"waited {waited_ms} ms for {what}, more than queue_wait_ms_max={self.config.queue_wait_ms_max}"
        return fail(ErrorKind.DEADLINE, message, limit="queue_wait_ms_max", retry_after_ms=1_000)

    async def _wait_for_rate(self, call: Call, text: str) -> CallFailure | None:
        """Over its rate a call waits up to its deadline, else it ends at once (D58)."""
        clock = self._clock
        name = call.spec.name
        wait_ms_max = self._rate_wait_ms_max(call, clock.now_ms())
        limit_ms = self.queue_limit_ms(call)

        def is_over() -> bool:
            return call.stopping is not None or clock.now_ms() >= limit_ms

        place = await self.rates.take("tool", name, call.tenant, text, wait_ms_max, call, is_over, limit_ms)
        if place is NO_PLACE:
            return self.waited_too_long(call, f"the rate of {name}") if call.stopping is None else call.stopped()
        if place.give_back is None:
            message = f"{name} is over its rate of {text}"
            return fail(ErrorKind.RATE_LIMITED, message, rate=text, retry_after_ms=place.wait_ms)
        if place.wait_ms == 0:
            return None
        at_ms = clock.now_ms() + place.wait_ms
        refusal = self._queue(call)
        if refusal is not None:
            place.give_back()
            return refusal
        try:
            while clock.now_ms() < at_ms:
                if call.stopping is not None:
                    return call.stopped()
                await call.pause(at_ms)
        finally:
            self._unqueue(call)
            if clock.now_ms() < at_ms:
                place.give_back()
        return None

    def _rate_wait_ms_max(self, call: Call, now_ms: int) -> int:
        """So long a call may wait and still begin; 0: it has no deadline that says."""
        limit_ms = self.queue_limit_ms(call)
        if limit_ms >= NEVER:
            return 0
        last_ms = min(call.plan.deadline_at_ms, call.plan.wall_at_ms) - self.config.attempt_min_ms
        return max(0, min(limit_ms, last_ms) - now_ms - 1)

    def give_back(self, call: Call) -> None:
        """All that a call holds, once: its lines and its version of the code. While its own code goes on without its
        caller, or runs that are nested in it do, that goes back when those have ended."""
        if call.lingering:
            self.lingering[call] = None
            return
        if self.lingering:
            self.lingering.pop(call, None)
        if call.adrift_below > 0:
            call.holds_on = True
            return
        if call.unpin is not None:
            call.unpin()
            call.unpin = None
        inside = call.inside
        while inside:
            inside[-1].leave(call)
        if call.owner:
            self.turns.tidy((call.tenant, call.owner))
        if self._tenants is not None:
            self._tenants.tidy(call.tenant)

    def _seat(self, spec: FunctionSpec) -> Line:
        capacity = spec.promises.max_concurrency
        assert capacity is not None
        line = self._seats.get(spec.name)
        if line is None:
            line = self._seats[spec.name] = Line(capacity)
        elif line.capacity != capacity:  # another version of the function says otherwise
            line.capacity = capacity
            line.admit_waiting()
        return line

    def _take_place(self, call: Call) -> bool:
        """A place among those of its tenant that wait."""
        count_max, bytes_max = self.config.tenant_queued, self.config.tenant_bytes
        if count_max is None and bytes_max is None:
            return True
        size = len(call.checked.raw)
        use = self._tenant_use.get(call.tenant, TenantUse(0, 0))
        if count_max is not None and use.queued >= count_max:
            return False
        if bytes_max is not None and use.queued_bytes + size > bytes_max:
            return False
        self._tenant_use[call.tenant] = TenantUse(use.queued + 1, use.queued_bytes + size)
        return True

    def _leave_place(self, call: Call) -> None:
        use = self._tenant_use.get(call.tenant)
        if use is None:
            return
        if use.queued == 1:
            del self._tenant_use[call.tenant]
        else:
            self._tenant_use[call.tenant] = TenantUse(use.queued - 1, use.queued_bytes - len(call.checked.raw))
