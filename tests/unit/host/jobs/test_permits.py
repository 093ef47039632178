"""Permits: what is counted, who is next, and what comes back."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from itertools import permutations

import pytest

from callyard.host.context import enter_turn, forbid_under_gate, infrastructure_context
from callyard.host.errors import HostError, HostErrorKind
from callyard.host.jobs import JobQueue, Permit, PermitState, WaiterState
from callyard.testing.clock import FakeClock


def make(limit: int, clock: FakeClock | None = None) -> JobQueue:
    return JobQueue(limit, clock=clock or FakeClock())


def take(jobs: JobQueue) -> Permit:
    permit = jobs.try_acquire()
    assert permit is not None
    return permit


def nobody(permit: Permit) -> None:
    raise AssertionError(f"{permit} was granted")


@pytest.mark.requirement("R5")
def test_waiters_are_not_in_use() -> None:
    jobs = make(2)
    take(jobs), take(jobs)
    for key in "ABC":
        jobs.wait(key, nobody)
    status = jobs.status()
    assert (status.in_use, status.waiters) == (2, 3)
    jobs.check_invariants()


@pytest.mark.requirement("R6")
def test_only_the_return_lowers_the_total() -> None:
    jobs = make(3)
    permit = take(jobs)
    seen = [(jobs.status().reserved, jobs.status().queued, jobs.status().in_use)]
    permit.to_queued()
    seen.append((jobs.status().reserved, jobs.status().queued, jobs.status().in_use))
    permit.release()
    seen.append((jobs.status().reserved, jobs.status().queued, jobs.status().in_use))
    assert seen == [(1, 0, 1), (0, 1, 1), (0, 0, 0)]
    permit.release()
    assert jobs.in_use == 0
    with pytest.raises(AssertionError, match="released"):
        permit.to_queued()


@pytest.mark.requirement("R16")
def test_oldest_live_source_first_and_no_newcomer_before_it() -> None:
    jobs = make(1)
    order: list[str] = []
    held = [take(jobs)]

    def granted(key: str, permit: Permit) -> None:
        order.append(key)
        held.append(permit)
        if key == "A":  # a newcomer, while the permit is being handed on
            assert jobs.try_acquire() is None
            jobs.wait("D", partial(granted, "D"))

    waiters = {key: jobs.wait(key, partial(granted, key)) for key in "ABC"}
    assert waiters["B"].cancel()
    while held:
        held.pop().release()
        jobs.check_invariants()
    assert order == ["A", "C", "D"]
    assert waiters["B"].state is WaiterState.CANCELLED


@pytest.mark.requirement("R16")
def test_a_free_permit_is_given_at_once() -> None:
    jobs = make(2)
    got: list[Permit] = []
    waiter = jobs.wait("A", got.append)
    assert [permit.state for permit in got] == [PermitState.RESERVED]
    assert waiter.state is WaiterState.TOLD
    assert not waiter.cancel()
    assert jobs.in_use == 1
    assert jobs.status().waits == 0


@pytest.mark.requirement("R27")
def test_a_source_has_one_waiter_however_often_it_signals() -> None:
    jobs = make(1)
    permit = take(jobs)
    got: list[Permit] = []
    waiters = {id(jobs.wait("busy", got.append)) for _ in range(100)}
    assert len(waiters) == jobs.waiters == jobs.status().waits == 1
    permit.release()
    assert len(got) == 1
    got.pop().release()
    assert jobs.in_use == 0
    assert not jobs.is_in_line("busy")


@pytest.mark.requirement("R31")
def test_cancelling_ends_only_the_wait() -> None:
    """The same source waits again later, and has its permit then."""
    jobs = make(1)
    permit = take(jobs)
    got: list[Permit] = []
    assert jobs.wait("A", got.append).cancel()
    permit.release()
    assert (got, jobs.in_use, jobs.waiters) == ([], 0, 0)
    jobs.wait("A", got.append)
    assert len(got) == 1


@pytest.mark.requirement("R31", "R48")
def test_close_ends_every_wait_once_and_refuses_later_ones() -> None:
    jobs = make(1)
    permit = take(jobs)
    ended: list[str] = []
    waiters = [jobs.wait(key, nobody, closed=partial(ended.append, key)) for key in "AB"]
    jobs.close()
    jobs.close()
    assert ended == ["A", "B"]
    assert [waiter.state for waiter in waiters] == [WaiterState.CLOSED] * 2
    assert not waiters[0].cancel()
    assert jobs.try_acquire() is None
    with pytest.raises(HostError) as refused:
        jobs.wait("C", nobody)
    assert refused.value.kind is HostErrorKind.SHUTTING_DOWN
    permit.to_queued()
    permit.release()
    assert jobs.in_use == 0


@pytest.mark.requirement("R48")
@pytest.mark.parametrize("order", list(permutations(["grant", "cancel", "close"])), ids="-".join)
def test_grant_cancel_and_close_in_any_order(order: tuple[str, ...]) -> None:
    jobs = make(1)
    permit = take(jobs)
    outcomes: list[str] = []

    def granted(permit: Permit) -> None:
        outcomes.append("granted")
        permit.release()

    waiter = jobs.wait("A", granted, closed=partial(outcomes.append, "closed"))

    def cancel() -> None:
        if waiter.cancel():
            outcomes.append("cancelled")

    steps: dict[str, Callable[[], None]] = {"grant": permit.release, "cancel": cancel, "close": jobs.close}
    for name in order:
        steps[name]()
        jobs.check_invariants()
    assert outcomes == [{"grant": "granted", "cancel": "cancelled", "close": "closed"}[order[0]]]
    assert (jobs.in_use, jobs.waiters) == (0, 0)


@pytest.mark.requirement("R48")
@pytest.mark.parametrize("end", ["cancel", "close"])
def test_a_permit_that_was_granted_and_not_told_goes_back_once(end: str) -> None:
    """A's callback frees the permit that B then has, and ends B's wait before B is told."""
    jobs = make(2)
    first, second = take(jobs), take(jobs)
    outcomes: list[str] = []

    def a_granted(permit: Permit) -> None:
        second.release()
        assert waiter_b.state is WaiterState.GRANTED
        assert jobs.is_in_line("B")
        if end == "cancel":
            assert waiter_b.cancel()
        else:
            jobs.close()
        permit.release()

    jobs.wait("A", a_granted)
    waiter_b = jobs.wait("B", nobody, closed=partial(outcomes.append, "B closed"))
    jobs.wait("C", lambda permit: (outcomes.append("C granted"), permit.release())[0])
    first.release()
    assert outcomes == (["C granted"] if end == "cancel" else ["B closed"])
    assert (jobs.in_use, jobs.waiters) == (0, 0)
    jobs.check_invariants()


@pytest.mark.requirement("R48")
def test_a_callback_that_raises_holds_nobody_up() -> None:
    jobs = make(2)
    first, second = take(jobs), take(jobs)
    got: list[Permit] = []

    def broken(permit: Permit) -> None:
        second.release()  # B is granted, and told after this
        permit.release()
        raise RuntimeError("a bug")

    jobs.wait("A", broken)
    jobs.wait("B", got.append)
    with pytest.raises(RuntimeError, match="a bug"):
        first.release()
    assert (len(got), jobs.in_use) == (1, 1)
    jobs.check_invariants()


def test_a_long_line_of_callbacks_that_release_is_no_recursion() -> None:
    jobs = make(1)
    permit = take(jobs)
    told: list[int] = []
    for number in range(5_000):
        jobs.wait(number, lambda permit, number=number: (told.append(number), permit.release())[0])
    permit.release()
    assert told == list(range(5_000))
    assert jobs.in_use == 0


class Turn:
    owner = "cart/42"
    is_over = False

    def __init__(self, *, holds_gate: bool) -> None:
        self.holds_gate = holds_gate


@pytest.mark.requirement("R50")
def test_whoever_holds_a_gate_cannot_acquire() -> None:
    jobs = JobQueue(1, clock=FakeClock(), may_wait=partial(forbid_under_gate, "waiting for a permit"))

    def in_turn(turn: Turn) -> None:
        enter_turn(turn)
        for acquire in (jobs.try_acquire, lambda: jobs.wait("A", nobody)):
            with pytest.raises(HostError) as refused:
                acquire()
            assert refused.value.kind is HostErrorKind.INVALID_OPERATION
            assert "cart/42" in str(refused.value)
        turn.holds_gate = False
        permit = jobs.try_acquire()
        assert permit is not None
        permit.release()

    infrastructure_context().run(in_turn, Turn(holds_gate=True))
    assert (jobs.in_use, jobs.waiters) == (0, 0)


MARK: ContextVar[str] = ContextVar("mark", default="host")


@pytest.mark.requirement("R50")
def test_who_waited_is_called_back_in_its_own_context() -> None:
    """Not in that of the handler whose permit it has: else the handler's marker would forbid it to go on."""
    jobs = JobQueue(1, clock=FakeClock(), may_wait=partial(forbid_under_gate, "waiting for a permit"))
    permit = take(jobs)
    seen: list[tuple[str, Permit | None]] = []
    jobs.wait("A", lambda permit: seen.append((MARK.get(), jobs.try_acquire())))

    def handler() -> None:
        enter_turn(Turn(holds_gate=True))
        MARK.set("handler")
        permit.release()

    infrastructure_context().run(handler)
    assert seen == [("host", None)]


@pytest.mark.requirement("R92")
def test_a_wait_for_jobs_shows_as_a_wait_and_as_nothing_else() -> None:
    clock = FakeClock()
    jobs = make(2, clock)
    held = [take(jobs), take(jobs)]
    jobs.wait("A", held.append)
    clock.advance(700)
    status = jobs.status()
    assert (status.waiters, status.waits, status.wait_ms) == (1, 1, 0)
    held.pop(0).release()
    status = jobs.status()
    assert (status.waiters, status.waits, status.wait_ms, status.in_use) == (0, 1, 700, 2)


@pytest.mark.requirement("R100")
def test_a_job_is_one_permit_whatever_it_weighs() -> None:
    """The limit is in jobs: bytes at saturation follow the payload's size, and halve when the limit does."""

    def saturate(limit: int, payload: bytes) -> tuple[int, int]:
        jobs = make(limit)
        held: list[tuple[Permit, bytes]] = []
        while (permit := jobs.try_acquire()) is not None:
            held.append((permit, payload))
        return jobs.in_use, sum(len(each) for _, each in held)

    assert saturate(8, b"") == (8, 0)
    assert saturate(8, bytes(1 << 20)) == (8, 8 << 20)
    assert saturate(4, bytes(1 << 20)) == (4, 4 << 20)
