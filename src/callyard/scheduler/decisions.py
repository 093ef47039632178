"""Which call is bound next, and where; or that it needs no run, or may not have one yet.

Subcalls go first, past every filter, strays after those at home; then exclusive calls that wait for an executor; then
the head of the next lane. A tied call is looked at before an executor is: a cached result ends it, an equal call that
runs or a function at its limit set it aside. Source: call-execution X7, X15-X17, X23, X26, X30, X67, X80, X81, X90.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from callyard.ids import FunctionId
from callyard.scheduler import commands as c
from callyard.scheduler.cache import key_of
from callyard.scheduler.calls import BOUND, Call, CallResult, Ties
from callyard.scheduler.commands import SchedulerCommand
from callyard.scheduler.executors import ExecutorState, is_eligible, score
from callyard.scheduler.flights import Sharing
from callyard.scheduler.lives import NO_COMMANDS, CallLives
from callyard.scheduler.placement import Placement
from callyard.scheduler.subcalls import describe_ring, home_of, mark_disturbed
from callyard.scheduler.tasks import Lane
from callyard.scheduler.tenants import Ring
from callyard.scheduler.waits import can_end

PASS_MAX: Final = 64
"""Calls that one decision may set aside before it is asked again."""


class Decisions(CallLives):
    """The middle of three layers."""

    def try_dispatch_next(self, now_ms: int) -> list[SchedulerCommand]:
        """One admission decision: the BindCall of the next call in turn, or its end without a run, or nothing.

        Nothing means that there is nothing to decide, unless `is_settled` says otherwise. Cost does not grow with the
        number of ready calls (X7, X23).
        """
        if self._guard is not None:
            self._guard()
        turns = self._turns
        subcalls, strays, exclusives = self._subcall_ring, self._strays, self._waiting_exclusives
        self._unfinished = False
        while True:
            entered = turns.entries + self._subcalls.strayed
            if subcalls or exclusives or strays:
                commands = self._decide_out_of_turn(now_ms)
                if commands:
                    return commands
            for ring in turns.order():
                placement = ring[0]
                lane = turns.head(ring)
                if lane is None:
                    continue
                call = lane.calls[0]
                if call.ties is not None:
                    commands, lane = self._pass_tied(ring, now_ms)
                    if commands:
                        return commands
                    if lane is None:
                        continue
                    call = lane.calls[0]
                ex = self._index.select(placement, now_ms)
                if ex is not None and lane.function is not None:
                    ex = self._share(call.target.function_id, placement, ex, now_ms)
                if ex is None:
                    continue
                lane.calls.popleft()
                turns.pass_on(ring)
                if exclusives:
                    self._exclusives.pass_over(placement)
                return [self._bind(call, ex, now_ms)]
            if self._unfinished:
                return []
            # What was set aside let others go on: look there too.
            if turns.entries + self._subcalls.strayed == entered and not subcalls:
                return self._decide_exclusive(now_ms, insists=True) if exclusives else []

    def _share(
        self, function: FunctionId, placement: Placement, best: ExecutorState, now_ms: int
    ) -> ExecutorState | None:
        """Where a tool call goes: the best executor, or, where its function holds half of them and is not alone, the
        best of those; None: they are full."""
        pool = placement.pool
        held = self._shares.held.get((pool, function), {})
        missing = self._shares.missing(pool, now_ms)
        if best.executor_id in held or not (held or missing):
            return best
        executors = self._index.executors
        own = [ex for executor_id in held if (ex := executors.get(executor_id)) is not None and not ex.sealed]
        count = len(own) + missing.count(function)
        size = len(missing) + sum(ex.pool == pool and not ex.sealed for ex in executors.values())
        if not count or count < size // 2:
            return best
        is_alone = self._shares.is_alone(pool, function, now_ms)
        if is_alone and not any(other[1] != function and other[0].pool == pool for other in self._turns.rings):
            return best
        if own and not any(ex.fits(placement) for ex in own):  # they are other tenants': it would wait for those
            return best
        open_to_it = [ex for ex in own if is_eligible(ex, self._config, placement, now_ms)]
        return min(open_to_it, key=lambda ex: score(ex, self._config) or (), default=None)

    def _pass_tied(self, ring: Ring, now_ms: int) -> tuple[list[SchedulerCommand], Lane | None]:
        """Take calls that are not to be bound in turn off the heads of a ring's lanes (X7).

        Returns the commands of the first that ends so, or the lane whose head needs an executor now.
        """
        turns = self._turns
        for _ in range(PASS_MAX):
            lane = turns.head(ring) if ring in turns.rings else None
            if lane is None:
                return [], None
            call = lane.calls.popleft()
            commands = NO_COMMANDS if call.ties is None else self._look_ahead(call)
            if call.ties is None or (commands is None and not call.target.exclusive):
                lane.calls.appendleft(call)
                return [], lane
            call.queued = False
            if commands is None:
                self._exclusives.add(call)
                commands = self._decide_exclusive(now_ms)
            if commands:
                turns.pass_on(ring)
                return list(commands), None
        self._unfinished = True
        return [], None

    def _decide_out_of_turn(self, now_ms: int) -> list[SchedulerCommand]:
        """Subcalls, which no filter holds back (X80), then exclusive calls that wait for an executor."""
        subcalls = self._subcalls
        while (call := subcalls.head(now_ms)) is not None:
            subcalls.pop()
            commands = self._look_ahead(call)
            if commands is None:
                return [self._bind(call, self._place(call, now_ms), now_ms)]
            if commands:
                return list(commands)
        for placement in list(self._strays) if self._strays else ():
            while (call := subcalls.stray(placement)) is not None and (ex := self._place_stray(call, now_ms)):
                subcalls.pop_stray(placement)
                commands = self._look_ahead(call)
                if commands is None:
                    return [self._bind(call, ex, now_ms)]
                if commands:
                    return list(commands)
        return self._decide_exclusive(now_ms)

    def _decide_exclusive(self, now_ms: int, *, insists: bool = False) -> list[SchedulerCommand]:
        while (found := self._exclusives.head(now_ms, insists=insists)) is not None:
            call, ex = found
            commands = self._look_ahead(call)
            if commands is None:
                return [self._bind(call, ex, now_ms)]
            if commands:
                return list(commands)
        return []

    def _place(self, call: Call, now_ms: int) -> ExecutorState:
        """Where a subcall runs: at its home, which always passes, or spread (X26, X30)."""
        home = home_of(call)
        assert home is not None
        if call.ties is not None and call.ties.spread:
            return self._index.select_other(call.placement, now_ms, home) or home
        return home

    def _place_stray(self, call: Call, now_ms: int) -> ExecutorState | None:
        """The usual choice; else the best of those that fit, past every filter but the block after a refusal."""
        ex = self._index.select(call.placement, now_ms)
        if ex is not None:
            return ex
        open_to_it = [ex for ex in self._candidates(call.placement) if now_ms >= ex.blocked_until_ms]
        return min(
            open_to_it,
            key=lambda ex: (ex.sealed, ex.closed, ex.runnable, ex.live_roots, ex.executor_id),
            default=None,
        )

    def _candidates(self, placement: Placement) -> list[ExecutorState]:
        """Executors that a stray may be bound to: not beside another family's exclusive call, and of those that will
        be replaced the ones that have calls to end, and did not ask for it."""
        return [
            ex
            for ex in self._index.executors.values()
            if ex.fits(placement)
            and not self._exclusives.hold(ex)
            and (not ex.sealed or (ex.live and not ex.snapshot.wants_replacement))
        ]

    def _stranded(self) -> list[Placement]:
        """Placements of strays that no executor fits: another one must come, since no end of a call is sure to free
        one. What holds those of their pool may wait for them."""
        return [
            placement
            for placement, calls in self._strays.items()
            if any(call.queued for call in calls) and not self._candidates(placement)
        ]

    def _look_ahead(self, call: Call) -> Sequence[SchedulerCommand] | None:
        """None: the call needs an executor now. Else it was ended, or set aside until something happens."""
        ties = call.ties
        assert ties is not None
        if ties.keyed:
            commands = self._look_for_equal(call, ties)
            if commands is not None:
                return commands
        if call.target.max_concurrency is not None and not self._seats.has_room(call):
            line = self._seats.line_of(call)
            if call.parent is not None and not (line.drains or can_end(call, line.holders)):
                mark_disturbed(call)
                return self._fail(call, describe_ring(call), ())
            self._seats.wait(call)
            return NO_COMMANDS
        return None

    def _look_for_equal(self, call: Call, ties: Ties) -> Sequence[SchedulerCommand] | None:
        """A cached result, or an equal call that runs (X15, X16)."""
        task = call.task
        sharing = task.sharing
        if sharing is None:
            sharing = task.sharing = Sharing(self._config.cache_entries, self._config.cache_bytes_max)
        key = ties.key
        if key is None:
            key = ties.key = key_of(call)
        output = sharing.cache.get(key)
        if output is not None:
            return self._finish_shared(call, CallResult(call.index, output, None, call.attempt_count))
        flight = sharing.flights.get(key)
        if flight is None or flight.leader is call:
            return None
        if call.parent is not None:
            leader = flight.leader
            if leader.parent is None and leader.executor is None:
                sharing.take_over(flight, call)
                return None
            if not can_end(call, (leader,)):
                return None
        flight.join(call)
        self._enqueue_all(self._seats.forget(call))
        return NO_COMMANDS

    def _bind(self, call: Call, ex: ExecutorState, now_ms: int) -> c.BindCall:
        call.apply(BOUND)
        call.queued = False
        call.attempt_seq += 1
        call.attempt_count += 1
        call.executor = ex
        call.begun = call.asked_back = False
        ex.live[call.call_id] = call.attempt_seq
        ex.code_runs = True
        if call.parent is None:
            self._turns.take(call.task)
            ex.live_roots += 1
            if not ex.unbegun:
                ex.lookahead.move(now_ms)
            ex.unbegun += 1
            if not call.task.plan.uses_slot:
                self._shares.take(ex.pool, call.target.function_id, ex.executor_id, now_ms)
        if ex.placement is None:
            ex.placement = call.placement
        self._index.touch(ex)
        if call.ties is not None:
            self._tie(call, call.ties, ex)
        return c.BindCall(call.call_id, ex.executor_id, call.attempt_seq, call.budget_ms)

    def _tie(self, call: Call, ties: Ties, ex: ExecutorState) -> None:
        """A new attempt: nothing is below it yet, and what it needs is taken."""
        assert not ties.children, f"{call.call_id} has subcalls of an earlier attempt"
        ties.used_ms = ties.charged_ms = 0
        ties.effect_below = ties.disturbed = False
        if ties.keyed:
            assert call.task.sharing is not None
            call.task.sharing.lead(call)
        if call.target.max_concurrency is not None:
            self._seats.take(call)
        if call.target.exclusive and call.parent is None:
            self._exclusives.begin(call, ex)
