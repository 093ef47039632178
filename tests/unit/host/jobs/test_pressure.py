"""Pressure: thresholds, hysteresis, and what a reset leaves."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from callyard.host.jobs import (
    JOBS_MAX,
    JobQueue,
    Permit,
    Transition,
    check_thresholds,
    count_pause_permits,
    count_resume_permits,
)
from callyard.testing.clock import FakeClock
from callyard.transport.port import FlowState

RUNNING, PAUSED = FlowState.RUNNING, FlowState.PAUSED


@pytest.mark.requirement("R61")
@given(limit=st.integers(1, JOBS_MAX), percents=st.sets(st.integers(0, 100), min_size=2, max_size=2))
@example(limit=1, percents={80, 60})
@example(limit=JOBS_MAX, percents={80, 60})
def test_thresholds_are_exact(limit: int, percents: set[int]) -> None:
    resume_percent, pause_percent = sorted(percents)
    pause, resume = count_pause_permits(limit, pause_percent), count_resume_permits(limit, resume_percent)
    assert (pause - 1) * 100 < limit * pause_percent <= pause * 100
    assert resume * 100 <= limit * resume_percent < (resume + 1) * 100
    assert 0 <= resume < pause <= limit


@pytest.mark.requirement("R61")
@pytest.mark.parametrize(
    ("limit", "pause_percent", "resume_percent", "pause", "resume"),
    [
        (10, 80, 60, 8, 6),
        (1, 80, 60, 1, 0),
        (3, 50, 33, 2, 0),
        (1_024, 80, 60, 820, 614),
        (1, 1, 0, 1, 0),
        (JOBS_MAX, 80, 60, 1_717_986_918, 1_288_490_188),
        (JOBS_MAX, 100, 99, JOBS_MAX, 2_126_008_810),
    ],
)
def test_thresholds_by_example(limit: int, pause_percent: int, resume_percent: int, pause: int, resume: int) -> None:
    jobs = JobQueue(limit, pause_percent=pause_percent, resume_percent=resume_percent, clock=FakeClock())
    assert (jobs.pause_permits, jobs.resume_permits) == (pause, resume)


@pytest.mark.requirement("R62")
@pytest.mark.parametrize(
    ("pause", "resume", "is_right"),
    [
        (80, 60, True),
        (100, 99, True),
        (1, 0, True),
        (0, 0, False),
        (101, 60, False),
        (80, -1, False),
        (100, 100, False),
        (60, 60, False),
        (60, 80, False),
        (80.0, 60, False),
        (True, 0, False),
    ],
)
def test_ranges_of_the_thresholds(pause: int, resume: int, is_right: bool) -> None:
    if is_right:
        check_thresholds(pause, resume)
    else:
        with pytest.raises(ValueError, match="_percent must be"):
            check_thresholds(pause, resume)
        with pytest.raises(ValueError, match="_percent must be"):
            JobQueue(10, pause_percent=pause, resume_percent=resume, clock=FakeClock())


@pytest.mark.parametrize("limit", [0, -1, JOBS_MAX + 1, 1.0, True, None])
def test_range_of_the_limit(limit: int) -> None:
    with pytest.raises(ValueError, match="limit must be a whole number from 1 to 2147483647"):
        JobQueue(limit, clock=FakeClock())


class Yard:
    """A queue of ten whose use is set to a number."""

    def __init__(self, limit: int = 10) -> None:
        self.clock = FakeClock()
        self.told: list[Transition] = []
        self.jobs = JobQueue(limit, clock=self.clock, on_transition=self.told.append)
        self.held: list[Permit] = []

    def use(self, count: int) -> FlowState:
        while len(self.held) < count:
            permit = self.jobs.try_acquire()
            assert permit is not None
            self.held.append(permit)
        while len(self.held) > count:
            self.held.pop().release()
        self.jobs.check_invariants()
        return self.jobs.pressure


@pytest.mark.requirement("R63")
def test_hysteresis_between_pause_and_resume() -> None:
    yard = Yard()
    assert [yard.use(count) for count in (7, 8, 7, 6, 7)] == [RUNNING, PAUSED, PAUSED, RUNNING, RUNNING]
    assert yard.told == [Transition(1, PAUSED), Transition(2, RUNNING)]


@pytest.mark.requirement("R63")
def test_filling_and_draining_are_one_transition_each() -> None:
    yard = Yard()
    yard.use(10)
    yard.use(0)
    assert [each.state for each in yard.told] == [PAUSED, RUNNING]


@pytest.mark.requirement("R68")
def test_the_state_is_there_as_the_count_changes() -> None:
    yard = Yard()
    yard.use(7)
    seen: list[FlowState] = []
    yard.jobs.wait("A", lambda permit: seen.append(yard.jobs.status().transition.state))
    assert (seen, yard.jobs.status().transition.state) == ([PAUSED], PAUSED)


@pytest.mark.requirement("R68")
def test_who_is_told_of_a_transition_sees_its_counts_and_may_act() -> None:
    clock = FakeClock()
    seen: list[tuple[Transition, int, FlowState]] = []
    held: list[Permit] = []

    def told(transition: Transition) -> None:
        seen.append((transition, jobs.in_use, jobs.pressure))
        if transition.state is PAUSED:
            held.pop().release()

    jobs = JobQueue(2, clock=clock, on_transition=told)
    for _ in range(2):
        permit = jobs.try_acquire()
        assert permit is not None
        held.append(permit)
    assert seen == [(Transition(1, PAUSED), 2, PAUSED), (Transition(2, RUNNING), 1, RUNNING)]


@pytest.mark.requirement("R70")
def test_swinging_above_the_resume_threshold_tells_once() -> None:
    yard = Yard()
    for _ in range(100):
        yard.use(10)
        yard.use(7)
    assert yard.told == [Transition(1, PAUSED)]


@pytest.mark.requirement("R63")
def test_a_full_queue_of_one_with_a_waiter_stays_paused() -> None:
    """The permit is handed on before pressure is looked at: no resume and no second pause."""
    yard = Yard(limit=1)
    yard.use(1)
    yard.jobs.wait("A", yard.held.append)
    yard.held.pop(0).release()
    assert (yard.told, yard.jobs.in_use) == ([Transition(1, PAUSED)], 1)
    yard.use(0)
    assert yard.told[1:] == [Transition(2, RUNNING)]


@pytest.mark.requirement("R73")
def test_a_reset_keeps_state_number_and_running_pause() -> None:
    yard = Yard()
    yard.use(10)
    yard.jobs.wait("old", yard.held.append)
    yard.clock.advance(5_000)
    yard.jobs.reset_metrics()
    yard.held.pop().release()
    yard.use(8)
    yard.clock.advance(2_000)
    status = yard.jobs.status()
    assert status.transition == Transition(1, PAUSED)
    assert (status.pause_current_ms, status.pause_cumulative_ms) == (7_000, 2_000)
    assert (status.in_use, status.peak) == (8, 10)
    assert (status.to_paused, status.to_running, status.waits, status.wait_ms) == (0, 0, 0, 0)
    assert status.epoch == 1
    yard.use(0)
    assert yard.told[-1] == Transition(2, RUNNING)
    status = yard.jobs.status()
    assert (status.pause_current_ms, status.pause_cumulative_ms, status.to_running) == (0, 2_000, 1)


@pytest.mark.requirement("R73")
def test_a_reset_sets_the_peak_to_what_is_in_use() -> None:
    yard = Yard()
    yard.use(9)
    yard.use(3)
    yard.jobs.reset_metrics()
    assert yard.jobs.status().peak == 3
