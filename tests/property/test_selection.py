"""The executor that the index finds is the one that a full scan finds, whatever changed in between."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from callyard.ids import CallId, Digest, ExecutorId, Tenant
from callyard.scheduler import SchedulerConfig
from callyard.scheduler.executors import ExecutorIndex, ExecutorSnapshot, ExecutorState
from callyard.scheduler.placement import Placement, PoolName

POOLS = [PoolName("default"), PoolName("gpu")]
PLACEMENTS = [
    Placement(POOLS[0], Digest("a")),
    Placement(POOLS[0], Digest("b")),
    Placement(POOLS[0], Digest("a"), Tenant("t")),
    Placement(POOLS[1], Digest("a")),
]


def may_take(ex: ExecutorState, config: SchedulerConfig, placement: Placement, now_ms: int) -> bool:
    """X8, read from the specification line by line."""
    snapshot = ex.snapshot
    silent = (
        snapshot.heartbeat_timeout_ms is not None and now_ms - snapshot.received_at_ms > snapshot.heartbeat_timeout_ms
    )
    busy_ms = now_ms - snapshot.last_scheduler_active_at_ms
    stalled = snapshot.stall_ms is not None and snapshot.running and busy_ms > snapshot.stall_ms
    return (
        not ex.sealed
        and not silent
        and not stalled
        and headroom(ex, config) > 0
        and runnable(ex) < config.executor_max_runnable
        and len(ex.live) < config.executor_max_inflight
        and not (0 < config.executor_memory_high_watermark <= snapshot.memory_bytes)
        and ex.pool == placement.pool
        and ex.placement in (None, placement)
        and now_ms >= ex.blocked_until_ms
    )


def headroom(ex: ExecutorState, config: SchedulerConfig) -> int:
    usable = min(ex.snapshot.inflight_count + ex.snapshot.available_contexts, config.executor_max_inflight)
    return usable - len(ex.draining) - len(ex.live)


def runnable(ex: ExecutorState) -> int:
    return max(0, len(ex.live) - ex.waiting - ex.hidden)


def full_scan(index: ExecutorIndex, config: SchedulerConfig, placement: Placement, now_ms: int) -> ExecutorState | None:
    eligible = [ex for ex in index.executors.values() if may_take(ex, config, placement, now_ms)]
    return min(
        eligible,
        key=lambda ex: (runnable(ex), len(ex.live), -headroom(ex, config), ex.executor_id),
        default=None,
    )


small = st.integers(0, 6)
maybe_ms = st.none() | st.integers(0, 50)


class Selection(RuleBasedStateMachine):
    """Everything that the filter and the score can see changes in any order; each choice is a full scan's."""

    @initialize(
        inflight=st.sampled_from([1, 3, 128]),
        runnable=st.sampled_from([1, 3, 128]),
        watermark=st.sampled_from([0, 3]),
        sample=st.sampled_from([0, 0, 1, 2]),
        executors=st.integers(0, 4),
    )
    def start(self, inflight: int, runnable: int, watermark: int, sample: int, executors: int) -> None:
        self.config = SchedulerConfig(
            executor_max_inflight=inflight,
            executor_max_runnable=runnable,
            executor_memory_high_watermark=watermark,
            executor_selection_sample_size=sample,
        )
        self.index = ExecutorIndex(self.config)
        self.now_ms = 100
        self.spawned = 0
        self.calls = 0
        for number in range(executors):
            self.attach(number + 1)

    def pick(self, number: int) -> ExecutorState | None:
        executors = list(self.index.executors.values())
        return executors[number % len(executors)] if executors else None

    @rule(contexts=small, pool=st.sampled_from(POOLS))
    def attach(self, contexts: int, pool: PoolName = POOLS[0]) -> None:
        self.spawned += 1
        executor_id = ExecutorId(f"exec-{self.spawned % 7}-{self.spawned}")
        snapshot = ExecutorSnapshot(executor_id, 1, self.now_ms, available_contexts=contexts)
        self.index.add(ExecutorState(executor_id=executor_id, snapshot=snapshot, pool=pool))

    @rule(number=small)
    def lose(self, number: int) -> None:
        ex = self.pick(number)
        if ex is not None:
            assert self.index.remove(ex.executor_id) is ex
            self.index.touch(ex)  # its calls are released after it left
            assert self.index.remove(ex.executor_id) is None

    @rule(
        number=small,
        inflight=small,
        available=small,
        memory=small,
        running=st.booleans(),
        active_ago_ms=st.integers(0, 60),
        received_ago_ms=st.integers(0, 60),
        stall_ms=maybe_ms,
        heartbeat_timeout_ms=maybe_ms,
        hidden=small,
    )
    def beat(
        self,
        number: int,
        inflight: int,
        available: int,
        memory: int,
        running: bool,
        active_ago_ms: int,
        received_ago_ms: int,
        stall_ms: int | None,
        heartbeat_timeout_ms: int | None,
        hidden: int,
    ) -> None:
        ex = self.pick(number)
        if ex is None:
            return
        ex.snapshot = msgspec.structs.replace(
            ex.snapshot,
            received_at_ms=self.now_ms - received_ago_ms,
            inflight_count=inflight,
            available_contexts=available,
            memory_bytes=memory,
            running=running,
            last_scheduler_active_at_ms=self.now_ms - active_ago_ms,
            stall_ms=stall_ms,
            heartbeat_timeout_ms=heartbeat_timeout_ms,
        )
        ex.hidden = hidden
        self.index.touch(ex)

    @rule(number=small, placement=st.sampled_from([None, *PLACEMENTS]))
    def rebind(self, number: int, placement: Placement | None) -> None:
        ex = self.pick(number)
        if ex is not None and not ex.live and (placement is None or placement.pool == ex.pool):
            ex.placement = placement
            self.index.touch(ex)

    @rule(number=small, for_ms=st.integers(0, 40))
    def block(self, number: int, for_ms: int) -> None:
        ex = self.pick(number)
        if ex is not None:
            ex.blocked_until_ms = self.now_ms + for_ms
            self.index.touch(ex)

    @rule(number=small)
    def seal(self, number: int) -> None:
        ex = self.pick(number)
        if ex is not None:
            ex.sealed = True
            self.index.touch(ex)

    @rule(number=small, what=st.sampled_from(["free", "wait", "drain", "confirm", "unblock"]))
    def change(self, number: int, what: str) -> None:
        ex = self.pick(number)
        if ex is None:
            return
        match what:
            case "free" if ex.live:
                ex.live.popitem()
                ex.live_roots -= 1
                ex.waiting = min(ex.waiting, len(ex.live))
            case "wait" if ex.waiting < len(ex.live):
                ex.waiting += 1
            case "drain" if ex.live:
                ex.draining.add(ex.live.popitem())
                ex.live_roots -= 1
                ex.waiting = min(ex.waiting, len(ex.live))
            case "confirm" if ex.draining:
                ex.draining.pop()
            case "unblock":
                ex.blocked_until_ms = 0
        self.index.touch(ex)

    @rule(passed_ms=st.integers(0, 30))
    def wait(self, passed_ms: int) -> None:
        """Time alone changes the choice: looked at just before and just after."""
        for step_ms in (0, passed_ms):
            self.now_ms += step_ms
            for placement in PLACEMENTS:
                self.agree(placement)

    def agree(self, placement: Placement) -> ExecutorState | None:
        expected = full_scan(self.index, self.config, placement, self.now_ms)
        chosen = self.index.select(placement, self.now_ms)
        if self.config.executor_selection_sample_size == 0:
            assert chosen is expected
        else:  # some eligible one, and one whenever there is any
            assert (chosen is None) == (expected is None)
            assert chosen is None or may_take(chosen, self.config, placement, self.now_ms)
        return chosen

    @rule(placements=st.lists(st.sampled_from(PLACEMENTS), min_size=1, max_size=6))
    def choose(self, placements: list[Placement]) -> None:
        for placement in placements:
            chosen = self.agree(placement)
            if chosen is not None:
                self.calls += 1
                chosen.live[CallId(f"c{self.calls}")] = 1
                chosen.live_roots += 1
                chosen.placement = placement
                self.index.touch(chosen)

    @invariant()
    def no_entry_of_a_gone_executor(self) -> None:
        if not hasattr(self, "index"):
            return
        index = self.index
        known = set(map(id, index.executors.values()))
        entries = [entry[5] for heap in index._heaps.values() for entry in heap]
        entries += index._touched + [entry[2] for entry in index._blocked]
        assert {id(ex) for ex in entries} <= known


TestSelection = Selection.TestCase
TestSelection.settings = settings(max_examples=150, stateful_step_count=60)
TestSelection.pytestmark = [pytest.mark.requirement("X8", "X9", "X23")]


@pytest.mark.requirement("X9")
@given(executors=st.integers(1, 20), sample=st.integers(1, 5), rounds=st.integers(1, 5))
def test_a_sample_s_cursor_passes_everybody(executors: int, sample: int, rounds: int) -> None:
    """Equal executors, nothing ends: after enough choices each has its share."""
    config = SchedulerConfig(executor_selection_sample_size=sample)
    index = ExecutorIndex(config)
    for number in range(executors):
        executor_id = ExecutorId(f"exec-{number}")
        snapshot = ExecutorSnapshot(executor_id, 1, 0, available_contexts=128)
        index.add(ExecutorState(executor_id=executor_id, snapshot=snapshot, placement=PLACEMENTS[0]))
    for call in range(executors * rounds):
        ex = index.select(PLACEMENTS[0], 0)
        assert ex is not None
        ex.live[CallId(f"c{call}")] = 1
        ex.live_roots += 1
        index.touch(ex)
    shares = [len(ex.live) for ex in index.executors.values()]
    assert max(shares) - min(shares) <= max(2, rounds)
    if sample == 1:
        assert set(shares) == {rounds}
