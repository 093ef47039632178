"""The registry of sockets that are told of pressure: order of registration, late and stale states, failures, close."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from callyard.host.context import current_turn, enter_turn
from callyard.host.errors import HostError, HostErrorKind
from callyard.host.flow import FlowTargets
from callyard.host.jobs import JobQueue, Permit, Transition
from callyard.testing.virtual_time import VirtualTimers, virtual_time
from callyard.transport.port import FlowResult, FlowState
from tests.unit.host.flow.sockets import Socket

RUNNING, PAUSED = FlowState.RUNNING, FlowState.PAUSED


class Yard:
    """A job queue of ten and its registry."""

    def __init__(self) -> None:
        self.timers = VirtualTimers()
        self.flow = FlowTargets(self.timers)
        self.jobs = JobQueue(10, clock=self.timers, on_transition=self.flow.publish)
        self.held: list[Permit] = []

    def use(self, count: int) -> None:
        while len(self.held) < count:
            permit = self.jobs.try_acquire()
            assert permit is not None
            self.held.append(permit)
        while len(self.held) > count:
            self.held.pop().release()
        self.jobs.check_invariants()
        self.flow.check_invariants()


async def settle() -> None:
    """Until nothing runs any more: virtual time moves only then."""
    await asyncio.sleep(1)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to be")


@pytest.mark.requirement("R14", "R70")
@virtual_time
async def test_a_full_cycle_is_three_calls() -> None:
    yard, socket = Yard(), Socket()
    await yard.flow.register(socket)
    for count in (10, 0):
        yard.use(count)
        await settle()
    assert socket.calls == [RUNNING, PAUSED, RUNNING]
    assert yard.flow.states() == {"mesh": RUNNING}
    await yard.flow.close(timeout_ms=1_000)


@pytest.mark.requirement("R75")
@virtual_time
async def test_the_current_state_is_applied_before_the_socket_is_listed() -> None:
    yard, socket = Yard(), Socket(held=True)
    yard.use(8)
    registering = asyncio.ensure_future(yard.flow.register(socket))
    await settle()
    assert (socket.calls, yard.flow.states(), registering.done()) == ([PAUSED], {}, False)
    socket.let_go()
    await registering
    assert (socket.calls, yard.flow.states()) == ([PAUSED], {"mesh": PAUSED})
    await yard.flow.close(timeout_ms=1_000)


@pytest.mark.requirement("R75")
@virtual_time
async def test_a_transition_during_the_first_setter_is_applied_before_listing() -> None:
    yard, socket = Yard(), Socket(held=True)
    registering = asyncio.ensure_future(yard.flow.register(socket))
    await settle()
    yard.use(8)
    await settle()
    assert (socket.calls, yard.flow.states()) == ([RUNNING], {})
    seen: list[object] = []

    async def look(state: FlowState) -> None:
        seen.append((state, yard.flow.states()))

    socket.on_call = look
    socket.let_go()
    await registering
    assert seen == [(PAUSED, {})]
    assert yard.flow.states() == {"mesh": PAUSED}
    await yard.flow.close(timeout_ms=1_000)


@pytest.mark.requirement("R75")
@virtual_time
async def test_closing_takes_it_out_first_and_waits_for_the_setter_under_way() -> None:
    yard, socket = Yard(), Socket()
    await yard.flow.register(socket)
    socket.held = True
    yard.use(8)
    await settle()
    leaving = asyncio.ensure_future(yard.flow.deregister(socket))
    await settle()
    assert (yard.flow.states(), leaving.done()) == ({}, False)
    yard.use(0)
    socket.let_go()
    await leaving
    yard.use(8)
    await settle()
    assert socket.calls == [RUNNING, PAUSED]
    await yard.flow.deregister(socket)
    await yard.flow.close(timeout_ms=1_000)


@virtual_time
async def test_a_socket_that_idles_leaves_at_once() -> None:
    yard, socket = Yard(), Socket()
    await yard.flow.register(socket)
    before_ms = yard.timers.now_ms()
    await yard.flow.deregister(socket)
    assert (yard.flow.states(), yard.timers.now_ms()) == ({}, before_ms)
    await settle()
    assert not yard.flow._tasks


@pytest.mark.requirement("R69")
@virtual_time
async def test_sockets_that_come_and_go_during_an_apply() -> None:
    yard = Yard()
    first, second, third = Socket("a"), Socket("b"), Socket("c")
    await yard.flow.register(first)
    await yard.flow.register(second)
    first.held = True
    yard.use(8)
    await settle()  # a stands in its setter
    await yard.flow.deregister(second)
    await yard.flow.register(third)
    yard.use(0)
    first.let_go()
    await settle()
    assert (first.calls, second.calls, third.calls) == (
        [RUNNING, PAUSED, RUNNING],
        [RUNNING, PAUSED],
        [PAUSED, RUNNING],
    )
    await yard.flow.close(timeout_ms=1_000)


@pytest.mark.requirement("R69")
@virtual_time
async def test_one_slow_socket_holds_up_no_other() -> None:
    yard, slow, quick = Yard(), Socket("slow"), Socket("quick")
    await yard.flow.register(slow)
    await yard.flow.register(quick)
    slow.held = True
    for count in (8, 0, 8):
        yard.use(count)
        await settle()
    assert (slow.calls, quick.calls) == ([RUNNING, PAUSED], [RUNNING, PAUSED, RUNNING, PAUSED])
    slow.let_go()
    await settle()
    assert (slow.calls, slow.state) == ([RUNNING, PAUSED], PAUSED)  # as it is wanted: not told again
    await yard.flow.close(timeout_ms=1_000)


@pytest.mark.requirement("R70")
@virtual_time
async def test_swinging_above_resume_is_one_call() -> None:
    yard, socket = Yard(), Socket()
    await yard.flow.register(socket)
    for _ in range(100):
        yard.use(10)
        yard.use(7)
        await settle()
    assert socket.calls == [RUNNING, PAUSED]
    await yard.flow.close(timeout_ms=1_000)


@pytest.mark.requirement("R71")
@virtual_time
async def test_a_setter_that_was_held_up_does_not_leave_the_old_state() -> None:
    yard, socket = Yard(), Socket()
    await yard.flow.register(socket)
    socket.held = True
    yard.use(8)
    await settle()
    yard.use(0)
    await settle()
    assert socket.calls == [RUNNING, PAUSED]
    socket.let_go()
    await settle()
    assert (socket.calls, socket.state) == ([RUNNING, PAUSED, RUNNING], RUNNING)
    await yard.flow.close(timeout_ms=1_000)


@pytest.mark.requirement("R71")
@virtual_time
async def test_an_older_or_equal_transition_is_ignored() -> None:
    yard, socket = Yard(), Socket()
    await yard.flow.register(socket)
    for number, state in ((5, PAUSED), (4, RUNNING), (5, RUNNING), (0, RUNNING)):
        yard.flow.publish(Transition(number, state))
        await settle()
    assert (socket.calls, socket.state) == ([RUNNING, PAUSED], PAUSED)
    late = Socket("late")
    await yard.flow.register(late)
    assert late.calls == [PAUSED]
    await yard.flow.close(timeout_ms=1_000)


@pytest.mark.requirement("R72")
@virtual_time
async def test_close_waits_for_no_last_apply() -> None:
    yard, socket = Yard(), Socket()
    await yard.flow.register(socket)
    socket.held = True
    yard.use(8)
    await settle()
    before_ms = yard.timers.now_ms()
    await yard.flow.close(timeout_ms=30_000)
    assert (yard.timers.now_ms(), yard.flow.states(), socket.inside) == (before_ms, {}, 0)
    yard.use(0)
    await settle()
    assert socket.calls == [RUNNING, PAUSED]


@pytest.mark.requirement("R72")
@virtual_time
async def test_close_is_over_in_time_beside_a_setter_that_never_returns(caplog: pytest.LogCaptureFixture) -> None:
    yard, socket = Yard(), Socket()
    await yard.flow.register(socket)
    free = asyncio.Event()

    async def ignore_everything(state: FlowState) -> None:
        while not free.is_set():
            try:
                await free.wait()
            except asyncio.CancelledError:
                pass

    socket.on_call = ignore_everything
    yard.use(8)
    await settle()
    before_ms = yard.timers.now_ms()
    await yard.flow.close(timeout_ms=3_000)
    assert yard.timers.now_ms() == before_ms + 3_000
    assert "left behind at close, after 3000 ms: flow state of mesh" in caplog.text
    free.set()
    await settle()
    assert not yard.flow._tasks


@pytest.mark.requirement("R72")
@virtual_time
async def test_a_registration_that_is_under_way_at_close_is_refused() -> None:
    yard, socket = Yard(), Socket(held=True)
    registering = asyncio.ensure_future(yard.flow.register(socket))
    await settle()
    await yard.flow.close(timeout_ms=1_000)
    for again in (registering, yard.flow.register(Socket("later"))):
        with pytest.raises(HostError) as refused:
            await again
        assert refused.value.kind is HostErrorKind.SHUTTING_DOWN
    await yard.flow.close(timeout_ms=1_000)


@pytest.mark.requirement("R76")
@virtual_time
async def test_a_setter_may_call_anything() -> None:
    """It runs outside of every step: of the queue, of the registry, of a callback."""
    yard, socket, other = Yard(), Socket("a"), Socket("b")
    await yard.flow.register(socket)
    probes: list[bool] = []

    async def call_back(state: FlowState) -> None:
        probes.append(yard.jobs._is_telling)
        yard.jobs.check_invariants()
        yard.jobs.status()
        yard.flow.states()
        permit = yard.jobs.try_acquire()
        assert permit is not None
        permit.release()
        await yard.flow.register(other)
        await yard.flow.register(socket)
        yard.jobs.reset_metrics()
        if state is RUNNING:
            await yard.flow.deregister(socket)

    socket.on_call = call_back
    yard.use(8)
    assert socket.calls == [RUNNING]  # not in that step
    await settle()
    assert probes == [False]
    yard.use(0)
    await settle()
    assert (probes, yard.flow.states()) == ([False, False], {"b": RUNNING})
    await yard.flow.close(timeout_ms=1_000)


@pytest.mark.requirement("R76")
@virtual_time
async def test_a_first_setter_that_registers_itself_is_told_that_it_would_wait_for_itself() -> None:
    yard, socket = Yard(), Socket()
    raised: list[HostErrorKind] = []

    async def register_again(state: FlowState) -> None:
        try:
            await yard.flow.register(socket)
        except HostError as error:
            raised.append(error.kind)

    socket.on_call = register_again
    await yard.flow.register(socket)
    assert raised == [HostErrorKind.INVALID_OPERATION]
    await yard.flow.close(timeout_ms=1_000)


@pytest.mark.requirement("R76")
@virtual_time
async def test_a_setter_runs_in_no_handlers_context() -> None:
    yard, socket = Yard(), Socket()
    turns: list[object] = []

    class Turn:
        owner = "cart/42"
        holds_gate = True
        is_over = False

    async def look(state: FlowState) -> None:
        turns.append(current_turn())

    async def handler() -> None:
        enter_turn(Turn())
        await yard.flow.register(socket)

    socket.on_call = look
    await asyncio.ensure_future(handler())
    yard.use(8)
    await settle()
    assert turns == [None, None]
    await yard.flow.close(timeout_ms=1_000)


@pytest.mark.requirement("R77")
@pytest.mark.parametrize("bad", [FlowResult.NOT_SUPPORTED, FlowResult.FAILED, RuntimeError("broken pipe")], ids=str)
def test_a_failure_is_counted_and_logged(bad: FlowResult | BaseException, caplog: pytest.LogCaptureFixture) -> None:
    @virtual_time
    async def run() -> None:
        yard, socket = Yard(), Socket()
        await yard.flow.register(socket)
        socket.results = [bad]
        yard.use(8)
        await settle()
        assert (yard.flow.config_failures, yard.flow.states()) == (1, {"mesh": None})
        assert "socket 'mesh' did not take PAUSED" in caplog.text
        assert socket.calls == [RUNNING, PAUSED]  # nothing polls: it is told again with the next transition
        yard.use(0)
        await settle()
        assert (socket.calls, yard.flow.config_failures) == ([RUNNING, PAUSED, RUNNING], 1)
        assert yard.flow.states() == {"mesh": RUNNING}
        yard.flow.reset_metrics()
        assert yard.flow.config_failures == 0
        await yard.flow.close(timeout_ms=1_000)

    run()


@pytest.mark.requirement("R77")
@virtual_time
async def test_a_socket_that_is_closing_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    yard, socket = Yard(), Socket()
    await yard.flow.register(socket)
    socket.results = [FlowResult.INVALID_STATE]
    yard.use(8)
    await settle()
    await yard.flow.deregister(socket)
    assert (yard.flow.config_failures, caplog.text) == (0, "")
    await yard.flow.close(timeout_ms=1_000)


@pytest.mark.requirement("R75", "R77")
@pytest.mark.parametrize(
    ("bad", "kind", "failures"),
    [
        (FlowResult.NOT_SUPPORTED, HostErrorKind.INVALID_OPERATION, 1),
        (FlowResult.FAILED, HostErrorKind.INTERNAL_FAILURE, 1),
        (OSError("gone"), HostErrorKind.INTERNAL_FAILURE, 1),
        (asyncio.CancelledError(), HostErrorKind.INTERNAL_FAILURE, 1),
        (FlowResult.INVALID_STATE, HostErrorKind.UNAVAILABLE, 0),
    ],
    ids=str,
)
def test_a_first_apply_that_fails_lists_nothing(
    bad: FlowResult | BaseException, kind: HostErrorKind, failures: int
) -> None:
    @virtual_time
    async def run() -> None:
        yard, socket = Yard(), Socket()
        socket.results = [bad]
        with pytest.raises(HostError) as refused:
            await yard.flow.register(socket)
        assert refused.value.kind is kind
        assert (yard.flow.config_failures, yard.flow.states()) == (failures, {})
        yard.use(8)
        await settle()
        assert socket.calls == [RUNNING]
        await yard.flow.register(socket)  # it may try again
        assert yard.flow.states() == {"mesh": PAUSED}
        await yard.flow.close(timeout_ms=1_000)

    run()


@virtual_time
async def test_a_setter_that_cancels_itself_is_a_failure_and_the_next_state_is_told() -> None:
    yard, socket = Yard(), Socket()
    await yard.flow.register(socket)

    async def cancel_itself(state: FlowState) -> None:
        socket.on_call = None
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    socket.on_call = cancel_itself
    yard.use(8)
    await settle()
    assert (yard.flow.config_failures, yard.flow.states()) == (1, {"mesh": None})
    yard.use(0)
    await settle()
    assert socket.state is RUNNING
    await yard.flow.close(timeout_ms=1_000)


@pytest.mark.requirement("R75")
@virtual_time
async def test_registered_twice_is_listed_and_told_once() -> None:
    yard, socket = Yard(), Socket(held=True)
    both = [asyncio.ensure_future(yard.flow.register(socket)) for _ in range(2)]
    await settle()
    socket.let_go()
    await asyncio.gather(*both)
    await yard.flow.register(socket)
    assert socket.calls == [RUNNING]
    with pytest.raises(HostError) as refused:
        await yard.flow.register(Socket("mesh"))
    assert refused.value.kind is HostErrorKind.ALREADY_EXISTS
    await yard.flow.deregister(Socket("mesh"))  # another socket of that name: not this one
    assert yard.flow.states() == {"mesh": RUNNING}
    await yard.flow.close(timeout_ms=1_000)


@pytest.mark.requirement("R75")
@virtual_time
async def test_registered_anew_while_its_last_setter_stands() -> None:
    """The old setter comes to its end before the new first one: it cannot overwrite it."""
    yard, socket = Yard(), Socket()
    await yard.flow.register(socket)
    socket.held = True
    yard.use(8)
    await settle()
    leaving = asyncio.ensure_future(yard.flow.deregister(socket))
    await settle()
    again = asyncio.ensure_future(yard.flow.register(socket))
    yard.use(0)
    await settle()
    assert not again.done()
    socket.let_go()
    await asyncio.gather(leaving, again)
    assert (socket.calls, socket.state, yard.flow.states()) == ([RUNNING, PAUSED, RUNNING], RUNNING, {"mesh": RUNNING})
    await yard.flow.close(timeout_ms=1_000)


@pytest.mark.requirement("R75")
@virtual_time
async def test_a_registration_that_is_cancelled_lists_nothing() -> None:
    yard, socket = Yard(), Socket(held=True)
    one, other = (asyncio.ensure_future(yard.flow.register(socket)) for _ in range(2))
    await settle()
    one.cancel()
    await settle()
    assert not other.done()
    other.cancel()
    await settle()
    socket.let_go()
    await settle()
    assert (yard.flow.states(), yard.flow._tasks, yard.flow._leaving) == ({}, set(), {})
    yard.use(8)
    await settle()
    assert socket.calls == [RUNNING]


@pytest.mark.requirement("R72")
@virtual_time
async def test_an_idle_registry_arms_no_timer_and_wakes_for_nothing() -> None:
    yard, socket = Yard(), Socket()
    await yard.flow.register(socket)
    await settle()
    loop = asyncio.get_running_loop()
    assert loop._scheduled == []  # type: ignore[attr-defined]
    await until(lambda: socket.inside == 0)
    await yard.flow.close(timeout_ms=1_000)


@pytest.mark.requirement("R75")
@virtual_time
async def test_deregistered_while_it_waits_for_the_one_before_it_is_never_told() -> None:
    """Found by the simulation: it was registered after it had left, and told from then on."""
    flow = FlowTargets(VirtualTimers())
    first, second = Socket(held=True), Socket()
    registering = asyncio.ensure_future(flow.register(first))
    await asyncio.sleep(0)
    leaving = asyncio.ensure_future(flow.deregister(first))
    await asyncio.sleep(0)
    waiting = asyncio.ensure_future(flow.register(second))
    await asyncio.sleep(0)
    gone = asyncio.ensure_future(flow.deregister(second))
    await asyncio.sleep(0)
    first.let_go()
    await asyncio.gather(leaving, gone)
    with pytest.raises(HostError) as caught:
        await waiting
    assert caught.value.kind is HostErrorKind.UNAVAILABLE
    with pytest.raises(HostError):
        await registering
    assert (second.calls, flow.states()) == ([], {})
    await flow.close(timeout_ms=0)
