"""What a simulated dispatcher must show: as each attempt begins, as each call is answered, and at every instant."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from callyard.dispatch.dispatcher import Dispatcher
from callyard.dispatch.outcomes import DispatchError
from callyard.errors import ErrorKind, Outcome
from callyard.ids import CallId
from callyard.policy.breaker import BreakerState
from callyard.testing.dispatch_workload import GRACE_MS, STORE_MS_MAX, TTL_MS, Asked, Run

ATTEMPTS_MAX = 3


class Book:
    """Everything that ever ran, and was answered."""

    def __init__(self) -> None:
        self.runs: dict[CallId, list[Run]] = defaultdict(list)
        self.of_key: dict[object, list[Run]] = defaultdict(list)
        self.asked: dict[CallId, Asked] = {}
        self.resolved: dict[object, set[str]] = defaultdict(set)
        """Results that were put in place of an unknown one."""
        self.free_at_ms: dict[object, int] = {}
        """From when a key that was resolved may run again."""

    def begin(self, run: Run, now_ms: int) -> None:
        before = self.runs[run.call_id]
        name = f"{run.call_id} attempt {run.attempt} of {run.tool.name}"
        assert len(before) == run.attempt - 1 < ATTEMPTS_MAX, f"{name}: {len(before)} began before it"
        if before and not run.tool.idempotent:
            assert before[-1].end == "transient", f"{name}: not idempotent, and run again after {before[-1].end!r}"
        asked = self.asked.get(run.call_id)
        if asked is not None and asked.result is not None:
            assert run.scope is not None, f"{name} began after its answer"
            assert asked.result.error is None or asked.result.error.outcome is not Outcome.NOT_RUN, (
                f"{name} began, though its caller was told that it did not run"
            )
        if run.scope is not None:
            self._begin_keyed(run, name, now_ms)
        before.append(run)

    def _begin_keyed(self, run: Run, name: str, now_ms: int) -> None:
        others = self.of_key[run.scope]
        active = [other.value for other in others if other.is_active]
        assert not active, f"one_run: {name} began under {run.scope} beside {active}"
        free_at_ms = self.free_at_ms.pop(run.scope, None)
        if others and not run.tool.idempotent and (free_at_ms is None or now_ms < free_at_ms):
            last = others[-1]
            known = last.end in ("ok", "raised") and now_ms >= last.ended_at_ms + TTL_MS
            assert known or last.end == "transient", f"one_run: {name} began under {run.scope} after {last}"
        others.append(run)

    def answer(self, asked: Asked, now_ms: int) -> None:
        result = asked.result
        assert result is not None
        name = f"{asked.call_id} of {asked.tool.name}"
        if asked.deadline_ms is not None:
            late_ms = now_ms - asked.started_ms - asked.deadline_ms
            slack_ms = STORE_MS_MAX if asked.scope is not None else 0  # its end is kept before it is given
            assert late_ms <= GRACE_MS + slack_ms, f"answered: {name} {late_ms} ms after its deadline"
        assert result.deduplicated or result.call_id == asked.call_id, f"{name}: {result}"
        runs = self.runs[result.call_id]
        if asked.scope is None:
            assert not result.deduplicated, f"{name} has no key, and another's answer: {result}"
        elif runs:
            assert {run.scope for run in runs} == {asked.scope}, f"{name}: the answer of another key: {result}"
            assert not result.deduplicated or {run.n for run in runs} == {asked.n}, f"{name}: of other arguments"
        if isinstance(result, DispatchError):
            self._check_error(name, result, runs)
            return
        if asked.scope is not None and result.value in self.resolved[asked.scope]:
            return
        assert runs, f"{name}: a result of nothing"
        last = runs[-1]
        assert (last.end, last.value) == ("ok", result.value), f"{name}: {result.value}, but its run is {last}"
        assert result.attempts == len(runs), f"{name}: {result.attempts} attempts told, {len(runs)} made"

    def _check_error(self, name: str, result: DispatchError, runs: list[Run]) -> None:
        left = result.kind is ErrorKind.CANCELLED and result.attempts < len(runs)  # its run went on for others
        assert left or result.attempts == len(runs), f"{name}: {result.attempts} attempts told, {len(runs)} made"
        assert result.kind is not ErrorKind.INTERNAL or "dispatcher" not in result.message, f"{name}: {result.message}"
        if result.outcome is Outcome.NOT_RUN:
            assert all(run.end == "transient" for run in runs), f"{name}: it ran, but was told that it did not"
        if result.outcome is Outcome.RAN:
            assert runs, f"{name}: told that it ran"


def check_now(dispatchers: Iterable[Dispatcher], slots: int, active: Iterable[Run], circuits: dict[str, int]) -> None:
    """`active`: attempts whose code runs and was not told to stop."""
    for dispatcher in dispatchers:
        line = dispatcher._admission.slots
        for each in (line, *dispatcher._admission._seats.values(), *dispatcher._admission.turns._lines.values()):
            assert len(each.holders) <= each.capacity, "slots_return: more inside than there is room"
            waits = each.waiters and len(each.holders) < each.capacity
            assert not waits, "slots_return: somebody waits for a free place"
    roots: dict[int, set[str]] = defaultdict(set)
    seats: dict[tuple[int, str], set[str]] = defaultdict(set)
    turns: dict[tuple[int, object], set[str]] = defaultdict(set)
    probes: dict[tuple[int, str, str], list[str]] = defaultdict(list)
    all_dispatchers = list(dispatchers)
    for run in active:
        if run.call_id == run.root:
            roots[run.dispatcher].add(run.root)
        if run.tool.max_concurrency is not None:
            seats[run.dispatcher, run.tool.name].add(run.root)
            assert len(seats[run.dispatcher, run.tool.name]) <= run.tool.max_concurrency, f"max_concurrency: {run}"
        if run.owner is not None:
            turns[run.dispatcher, run.owner].add(run.root)
            assert len(turns[run.dispatcher, run.owner]) == 1, f"owner order: {run}"
        half_open = all_dispatchers[run.dispatcher].breaker_state(run.tool.name, run.tenant) is BreakerState.HALF_OPEN
        if half_open and run.circuit == circuits[f"{run.dispatcher} {run.tool.name} {run.tenant}"]:
            tried = probes[run.dispatcher, run.tool.name, run.tenant]
            tried.append(run.value)
            assert len(tried) == 1, f"one_probe: {probes}"
    for number, running in roots.items():
        assert len(running) <= slots, f"slots: {sorted(running)} run in dispatcher {number}"
