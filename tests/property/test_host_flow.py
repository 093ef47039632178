"""Sockets that come, go and stand in their setters, while pressure turns: the latest state wins, and nothing is late.

Each setter stands until it is let go; `flow_faults.py` plants faults, and each is found.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from callyard.clock import Timer
from callyard.host.errors import HostError
from callyard.host.flow import FlowTargets
from callyard.host.jobs import Transition
from callyard.testing.clock import FakeClock
from callyard.testing.stepped_loop import SteppedLoop
from callyard.transport.port import FlowResult, FlowState
from tests.property.flow_faults import FAULTS


class NoTimers(FakeClock):
    def call_at(self, at_ms: int, callback: Callable[[], None], /) -> Timer:
        raise AssertionError("nothing here waits for time")


class Socket:
    def __init__(self, machine: Flow, name: str) -> None:
        self.machine = machine
        self.name = name
        self.go: asyncio.Future[FlowResult] | None = None
        self.state: FlowState | None = None
        """What it is set to; a setter that failed may have had its effect."""
        self.last: FlowState | None = None
        """What the last setter said OK to, since it was registered; None: none did, or the last one failed."""
        self.taken = 0
        """Setters that ended well."""
        self.is_in = False
        """Between the begin of `register` and that of `deregister`."""
        self.is_new = False
        """Registered, and not told since."""

    async def set_receive_flow_state(self, state: FlowState) -> FlowResult:
        if self.is_new:
            self.is_new, self.last = False, None
        wrong = {  # kept, not raised: whoever calls a setter takes what it raises for the setter's failure
            "is told inside the step that changed the pressure": self.machine.in_publish,
            "is told while its setter stands": self.go is not None,
            "is told after it left": not self.is_in,
            "is told again": self.last is state,
            "is told what is over": state is not self.machine.latest.state,
        }
        self.machine.found += [f"{self.name} {what}: {state.name}" for what, is_so in wrong.items() if is_so]
        self.go = asyncio.get_running_loop().create_future()
        try:
            result = await self.go
        finally:
            self.go = None
        self.state = state
        self.last = state if result is FlowResult.OK else None
        self.taken += result is FlowResult.OK
        return result


class Flow(RuleBasedStateMachine):
    make: Callable[..., FlowTargets] = FlowTargets

    @initialize()
    def start(self) -> None:
        self.loop = SteppedLoop()
        self.flow = type(self).make(NoTimers())
        self.latest = Transition(0, FlowState.RUNNING)
        self.in_publish = False
        self.found: list[str] = []
        self.sockets = {name: Socket(self, name) for name in "ab"}
        self.tasks: list[asyncio.Task[None]] = []

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(self.loop.create_task(work))

    @rule()
    def settle(self) -> None:
        self.loop.settle()
        self.check_tasks()

    def check_tasks(self) -> None:
        for task in [task for task in self.tasks if task.done()]:
            self.tasks.remove(task)
            task.result()

    def publish(self, transition: Transition) -> None:
        self.in_publish = True
        try:
            self.flow.publish(transition)
        finally:
            self.in_publish = False

    @rule(settles=st.booleans())
    def pressure_turns(self, settles: bool) -> None:
        self.latest = Transition(self.latest.number + 1, FlowState(1 - self.latest.state))
        self.publish(self.latest)
        if settles:
            self.loop.settle()

    @rule(back=st.integers(0, 3))
    def a_stale_transition_comes(self, back: int) -> None:
        number = max(0, self.latest.number - back)
        self.publish(Transition(number, FlowState(1 - self.latest.state)))

    def of(self, is_meant: Callable[[Socket], bool]) -> list[Socket]:
        return [socket for socket in self.sockets.values() if is_meant(socket)]

    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        out = self.of(lambda socket: not socket.is_in)
        if out:
            socket = data.draw(st.sampled_from(out))
            socket.is_in = socket.is_new = True
            self.spawn(self.registering(socket))
            self.loop.settle()

    async def registering(self, socket: Socket) -> None:
        taken = socket.taken
        try:
            await self.flow.register(socket)
        except HostError:
            assert socket.last is None, f"{socket.name} was refused, though it had taken {socket.last}"
            socket.is_in = False
            return
        assert socket.taken > taken, f"{socket.name} is registered, and took nothing"
        assert not socket.is_in or socket.name in self.flow.states()

    @rule(data=st.data())
    def deregister(self, data: st.DataObject) -> None:
        listed = self.of(lambda socket: socket.is_in and socket.name in self.flow.states())
        if listed:
            self.spawn(self.deregistering(data.draw(st.sampled_from(listed))))
            self.loop.settle()

    async def deregistering(self, socket: Socket) -> None:
        socket.is_in = False
        stands = socket.go
        await self.flow.deregister(socket)
        assert stands is None or stands.done(), f"{socket.name} has left, and its setter stands"

    def standing(self) -> list[asyncio.Future[FlowResult]]:
        return [socket.go for socket in self.sockets.values() if socket.go is not None and not socket.go.done()]

    @rule(data=st.data(), is_well=st.booleans(), settles=st.booleans())
    def let_go(self, data: st.DataObject, is_well: bool, settles: bool) -> None:
        standing = self.standing()
        if standing:
            data.draw(st.sampled_from(standing)).set_result(FlowResult.OK if is_well else FlowResult.FAILED)
            if settles:
                self.loop.settle()

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "flow"):
            return
        assert not self.found
        self.flow.check_invariants()
        self.check_tasks()
        for name, state in self.flow.states().items():
            socket = self.sockets[name]
            assert socket.taken, f"{name} is listed, and took nothing"
            assert state is socket.last or socket.go is not None, f"{name}: status says {state}, it has {socket.last}"

    def teardown(self) -> None:
        """Every setter ends well: then all that are registered have the latest state."""
        if not hasattr(self, "flow"):
            return
        try:
            self.loop.settle()
            while standing := self.standing():
                for setter in standing:
                    setter.set_result(FlowResult.OK)
                self.loop.settle()
            self.agree()
            assert not self.tasks, "somebody waits for ever"
            for name, state in self.flow.states().items():
                assert state in (self.latest.state, None)
                assert self.sockets[name].state is self.latest.state, f"{name} is left {self.sockets[name].state}"
        finally:
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.loop.settle()
            self.loop.close()


TestFlow = Flow.TestCase
TestFlow.settings = settings(max_examples=100, stateful_step_count=40)
TestFlow.pytestmark = [pytest.mark.requirement("R69", "R70", "R71", "R75", "R76")]


@pytest.mark.requirement("R70", "R71", "R75", "R76", "R77")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found(fault: type[FlowTargets]) -> None:
    class Faulty(Flow):
        make = fault

    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            Faulty,
            settings=settings(
                max_examples=2_000,
                stateful_step_count=40,
                phases=[Phase.generate],
                database=None,
                derandomize=True,
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
