"""The job queue beside a naive model, with callbacks that call back: each does to both what was drawn for it.

The model is told first, so that it is right also inside a step. `jobs_faults.py` plants faults, and each is found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from callyard.host.errors import HostError, HostErrorKind
from callyard.host.jobs import JobQueue, JobWaiter, Permit, PermitState, Transition, WaiterState
from callyard.testing.clock import FakeClock
from callyard.transport.port import FlowState
from tests.property.jobs_faults import FAULTS

KEYS = "ABCDEFGH"
ACTIONS = ("nothing", "release", "cancel", "try_acquire", "wait", "queue")


class Model:
    """Permits as a list, the line as a list, pressure looked at after each change."""

    def __init__(self, limit: int, pause_percent: int, resume_percent: int) -> None:
        self.limit, self.pause, self.resume = limit, 0, limit * resume_percent // 100
        while self.pause * 100 < limit * pause_percent:
            self.pause += 1
        self.reserved = self.queued = 0
        self.line: list[str] = []
        self.pending: list[str] = []
        """Granted, not told."""
        self.is_closed = False
        self.transitions: list[Transition] = []
        self.peak = 0
        self.now_ms = 0
        self.paused_at_ms = 0
        self.pauses: list[tuple[int, int]] = []
        self.reset_at_ms = 0
        self.began: dict[str, int] = {}
        self.waits: list[tuple[int, int]] = []
        """Of those that are over: from, to."""
        self.waits_begun: list[int] = []
        self.resets = 0
        self.counted_transitions = 0

    @property
    def in_use(self) -> int:
        return self.reserved + self.queued

    @property
    def state(self) -> FlowState:
        return self.transitions[-1].state if self.transitions else FlowState.RUNNING

    @property
    def has_room(self) -> bool:
        return not self.is_closed and not self.line and self.in_use < self.limit

    def reserve(self) -> None:
        self.reserved += 1
        self.look()

    def release(self, state: PermitState) -> None:
        if state is PermitState.QUEUED:
            self.queued -= 1
        else:
            self.reserved -= 1
        if self.line:
            self.reserved += 1
            self.pending.append(self.end_wait(self.line[0]))
        self.look()

    def end_wait(self, key: str) -> str:
        self.line.remove(key)
        self.waits.append((self.began.pop(key), self.now_ms))
        return key

    def look(self) -> None:
        self.peak = max(self.peak, self.in_use)
        number = len(self.transitions) + 1
        if self.state is FlowState.RUNNING and self.in_use >= self.pause:
            self.transitions.append(Transition(number, FlowState.PAUSED))
            self.paused_at_ms = self.now_ms
        elif self.state is FlowState.PAUSED and self.in_use <= self.resume:
            self.transitions.append(Transition(number, FlowState.RUNNING))
            self.pauses.append((self.paused_at_ms, self.now_ms))

    def reset(self) -> None:
        self.resets += 1
        self.reset_at_ms, self.peak = self.now_ms, self.in_use
        self.waits, self.waits_begun = [], []
        self.began = dict.fromkeys(self.began, -1)
        self.counted_transitions = len(self.transitions)

    def paused_ms(self) -> int:
        pauses = list(self.pauses)
        if self.state is FlowState.PAUSED:
            pauses.append((self.paused_at_ms, self.now_ms))
        return sum(max(0, end - max(begin, self.reset_at_ms)) for begin, end in pauses)


class Jobs(RuleBasedStateMachine):
    make: Callable[..., JobQueue] = JobQueue

    @initialize(limit=st.integers(1, 5), pause=st.integers(1, 100), data=st.data())
    def start(self, limit: int, pause: int, data: st.DataObject) -> None:
        resume = data.draw(st.integers(0, pause - 1))
        self.clock = FakeClock()
        self.told: list[Transition] = []
        self.jobs = type(self).make(
            limit, pause_percent=pause, resume_percent=resume, clock=self.clock, on_transition=self.told.append
        )
        self.model = Model(limit, pause, resume)
        self.held: list[Permit] = []
        self.waiters: dict[str, JobWaiter] = {}
        self.closed: list[str] = []
        self.steps_left = 0

    @rule(data=st.data(), action=st.sampled_from(ACTIONS[1:]))
    def act(self, data: st.DataObject, action: str) -> None:
        self.data = data
        self.steps_left = 6  # what callbacks may do, all together
        self.do(action)

    @rule(data=st.data(), waiters=st.integers(1, 4))
    def fill(self, data: st.DataObject, waiters: int) -> None:
        """What else takes many rules to come to: all permits out, and somebody in line."""
        self.data, self.steps_left = data, 6
        while self.model.has_room:
            self.do("try_acquire")
        for _ in range(waiters):
            self.do("wait")

    @rule(ms=st.integers(1, 50))
    def time_passes(self, ms: int) -> None:
        self.model.now_ms = self.clock.advance(ms)

    @rule()
    def reset(self) -> None:
        self.model.reset()
        self.jobs.reset_metrics()

    @rule(data=st.data(), really=st.integers(0, 9))
    def close(self, data: st.DataObject, really: int) -> None:
        if really:
            return
        self.data, self.steps_left = data, 6
        model = self.model
        if not model.is_closed:
            model.is_closed = True
            expected = list(model.line)
            for key in expected:
                model.end_wait(key)
            self.closed.clear()
            self.jobs.close()
            assert self.closed == expected
            self.waiters.clear()
        self.jobs.close()

    def do(self, action: str) -> None:
        getattr(self, f"_{action}")()

    def pick(self, items: list[Any]) -> Any:
        return self.data.draw(st.sampled_from(items)) if items else None

    def _nothing(self) -> None:
        pass

    def _release(self) -> None:
        permit = self.pick(self.held)
        if permit is not None:
            self.held.remove(permit)
            self.model.release(permit.state)
            permit.release()
            permit.release()  # a second time changes nothing

    def _queue(self) -> None:
        permit = self.pick([permit for permit in self.held if permit.state is PermitState.RESERVED])
        if permit is not None:
            self.model.reserved -= 1
            self.model.queued += 1
            permit.to_queued()

    def _try_acquire(self) -> None:
        expected = self.model.has_room
        if expected:
            self.model.reserve()
        permit = self.jobs.try_acquire()
        assert (permit is not None) is expected, f"no barging: {permit}"
        if permit is not None:
            self.held.append(permit)

    def _wait(self) -> None:
        key, model = self.pick(list(KEYS)), self.model

        def granted(permit: Permit) -> None:
            assert model.pending[:1] == [key], f"oldest_first: {key} is told, before {model.pending}"
            model.pending.pop(0)
            self.waiters.pop(key, None)
            assert permit.state is PermitState.RESERVED
            self.held.append(permit)
            for _ in range(2):
                if self.steps_left:
                    self.steps_left -= 1
                    self.do(self.pick([*ACTIONS, "release", "cancel"]))

        if model.is_closed:
            with pytest.raises(HostError) as refused:
                self.jobs.wait(key, granted)
            assert refused.value.kind is HostErrorKind.SHUTTING_DOWN
            return
        is_known = key in model.line or key in model.pending
        if not is_known:
            if model.has_room:
                model.pending.append(key)
                model.reserve()
            else:
                model.line.append(key)
                model.began[key] = model.now_ms
                model.waits_begun.append(model.now_ms)
        waiter = self.jobs.wait(key, granted, closed=lambda: self.closed.append(key))
        if is_known:
            assert waiter is self.waiters[key]
        elif waiter.state in (WaiterState.WAITING, WaiterState.GRANTED):
            self.waiters[key] = waiter

    def _cancel(self) -> None:
        granted = [key for key in self.model.pending if key in self.waiters]
        key = self.pick(granted or sorted(self.waiters))
        if key is None:
            return
        waiter, model = self.waiters.pop(key), self.model
        if key in model.line:
            model.end_wait(key)
        else:
            model.pending.remove(key)
            model.release(PermitState.RESERVED)
        assert waiter.cancel()
        assert not waiter.cancel()

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "jobs"):
            return
        self.jobs.check_invariants()
        model, status = self.model, self.jobs.status()
        assert not model.pending
        assert (status.reserved, status.queued, status.in_use) == (model.reserved, model.queued, len(self.held))
        assert status.in_use == status.reserved + status.queued <= status.limit == model.limit
        assert list(self.jobs._line) == model.line
        assert status.waiters == len(model.line)
        assert self.told == model.transitions
        assert status.transition == (model.transitions or [Transition(0, FlowState.RUNNING)])[-1]
        new = model.transitions[model.counted_transitions :]
        assert status.to_paused == sum(each.state is FlowState.PAUSED for each in new)
        assert status.to_running == sum(each.state is FlowState.RUNNING for each in new)
        assert (status.peak, status.epoch) == (model.peak, model.resets)
        assert status.pause_current_ms == (model.now_ms - model.paused_at_ms if model.state is FlowState.PAUSED else 0)
        assert status.pause_cumulative_ms == model.paused_ms()
        assert status.waits == len(model.waits_begun)
        assert status.wait_ms == sum(end - begin for begin, end in model.waits if begin >= 0)

    def teardown(self) -> None:
        """All come home: nothing is in use, nobody waits, and the last state is RUNNING."""
        if not hasattr(self, "jobs"):
            return
        self.steps_left = 0
        while self.held:
            permit = self.held.pop()
            self.model.release(permit.state)
            permit.release()
            self.agree()
        assert (self.jobs.in_use, self.jobs.waiters, self.jobs.pressure) == (0, 0, FlowState.RUNNING)


TestJobs = Jobs.TestCase
TestJobs.settings = settings(max_examples=150, stateful_step_count=50)
TestJobs.pytestmark = [pytest.mark.requirement("R5", "R6", "R16", "R48", "R63", "R68", "R73")]


@pytest.mark.requirement("R16", "R48", "R63", "R71", "R73")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found(fault: type[JobQueue]) -> None:
    class Faulty(Jobs):
        make = fault

    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            Faulty,
            settings=settings(
                max_examples=2_000,
                stateful_step_count=50,
                phases=[Phase.generate],
                database=None,
                derandomize=True,
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
