"""Waiting for local capacity: order, places, and one terminal."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest

from callyard.host.config import SendFamily
from callyard.host.context import current_turn, enter_turn, infrastructure_context
from callyard.host.errors import HostError, HostErrorKind
from callyard.host.gates import Gate
from callyard.host.jobs import Permit
from callyard.host.waiters import Waiter, WaiterState
from tests.unit.host.world import Sent, World


def full_world(**settings: Any) -> World:
    """One spot; its lane is full with one item, which has not begun."""
    world = World(items_max=1, **settings)
    world.spot()
    assert world.send("first").outcome == "taken"
    return world


def finish_one(world: World) -> None:
    world.begin_turn()
    world.end_turn()


@pytest.mark.requirement("R85")
def test_room_within_the_deadline_admits_once() -> None:
    world = full_world()
    sent = world.send("second")
    assert sent.outcome is None
    world.timers.advance(500)
    finish_one(world)
    assert sent.outcome == "taken"
    world.run_all()
    world.timers.advance(5_000)
    assert world.ran == ["first", "second"]
    assert (len(world.waiters), world.timers.armed) == (0, 0)


@pytest.mark.requirement("R86")
def test_no_room_within_the_deadline_is_deadline_exceeded_and_never_delivered() -> None:
    world = full_world()
    sent = world.send("second")
    world.timers.advance(999)
    assert sent.outcome is None
    world.timers.advance(1)
    assert sent.outcome == "DEADLINE_EXCEEDED"
    world.timers.advance(100)
    world.run_all()
    assert world.ran == ["first"]


@pytest.mark.requirement("R86")
def test_a_late_timer_does_not_let_anybody_in_past_its_deadline() -> None:
    world = full_world()
    sent, next_sent = world.send("second"), world.send("third", timeout_ms=5_000)
    world.timers.late(1_000)
    finish_one(world)
    assert (sent.outcome, next_sent.outcome) == ("DEADLINE_EXCEEDED", "taken")
    world.run_all()
    assert world.ran == ["first", "third"]


@pytest.mark.requirement("R89")
def test_no_place_to_wait_is_deadline_exceeded_at_once() -> None:
    world = full_world(slots=3)
    waiting = [world.send(f"waits-{n}") for n in range(3)]
    refused = world.send("refused")
    assert refused.outcome == "DEADLINE_EXCEEDED"
    assert world.timers.now_ms() == 0
    assert [sent.outcome for sent in waiting] == [None] * 3
    status = world.waiters.status()[SendFamily.SPOT]
    assert (status.waiting, status.waits, status.refused, status.timed_out) == (3, 3, 1, 0)


@pytest.mark.requirement("R118")
def test_a_family_has_256_places_and_a_full_one_leaves_the_others_theirs() -> None:
    world = full_world()
    for n in range(256):
        assert world.send(f"waits-{n}").outcome is None
    assert world.send("one more").outcome == "DEADLINE_EXCEEDED"
    for family in SendFamily:
        expected = "DEADLINE_EXCEEDED" if family is SendFamily.SPOT else None
        assert world.send(f"by {family}", family=family).outcome == expected, family
    world.spot("other")
    assert world.send("to another", "other").outcome == "taken"
    world.check()


@pytest.mark.requirement("R85")
def test_oldest_first_and_no_newcomer_overtakes() -> None:
    world = full_world()
    sends = [world.send(name) for name in "abc"]
    finish_one(world)
    assert [sent.outcome for sent in sends] == ["taken", None, None]
    world.send("newcomer")
    world.run_all()
    assert world.ran == ["first", "a", "b", "c", "newcomer"]


@pytest.mark.requirement("R85")
def test_a_small_newcomer_stays_behind_a_large_one_that_waits() -> None:
    world = World(items_max=10, bytes_max=2_000)
    world.spot()
    world.send("first", size=1_000)
    large, small = world.send("large", size=1_000), world.send("small")
    assert (large.outcome, small.outcome) == (None, None)
    world.run_all()
    assert world.ran == ["first", "large", "small"]


def test_when_the_one_in_front_leaves_the_next_is_tried() -> None:
    for how in ("cancel", "deadline"):
        world = World(items_max=10, bytes_max=2_000)
        world.spot()
        world.send("first", size=1_000)
        large, small = world.send("large", size=1_500), world.send("small", timeout_ms=9_000)
        if how == "cancel":
            world.cancel(large)
        else:
            world.timers.advance(1_000)
        assert small.outcome == "taken", how
        world.check()


def by_room(world: World, sent: Sent) -> None:
    if not world.running and not world.begin_turn():
        return
    world.end_turn()


def by_deadline(world: World, sent: Sent) -> None:
    world.timers.advance(1_000)


def by_cancel(world: World, sent: Sent) -> None:
    world.cancel(sent)


def by_detach(world: World, sent: Sent) -> None:
    world.waiters.end_line("cart", HostErrorKind.UNAVAILABLE, "the peer is gone")


def by_shutdown(world: World, sent: Sent) -> None:
    world.waiters.close()


ENDS: dict[Callable[[World, Sent], None], str] = {
    by_room: "taken",
    by_deadline: "DEADLINE_EXCEEDED",
    by_cancel: "cancelled",
    by_detach: "UNAVAILABLE",
    by_shutdown: "SHUTTING_DOWN",
}


@pytest.mark.requirement("R81")
@pytest.mark.parametrize("ends", list(permutations(ENDS, 2)), ids=lambda ends: "-".join(end.__name__ for end in ends))
@pytest.mark.parametrize("in_line", [1, 3])
def test_the_first_terminal_wins(ends: tuple[Callable[[World, Sent], None], ...], in_line: int) -> None:
    """Each pair, in both orders: one outcome (`Sent` fails on a second), one delivery or none."""
    world = full_world()
    sent = world.send("second")
    others = [world.send(f"other-{n}") for n in range(in_line - 1)]
    for end in ends:
        end(world, sent)
        world.check()
    assert sent.outcome == ENDS[ends[0]]
    world.run_all()
    world.timers.advance(10_000)
    assert world.ran.count("second") == (ends[0] is by_room)
    assert all(world.ran.count(other.name) == (other.outcome == "taken") for other in others)
    assert (len(world.waiters), world.timers.armed) == (0, 0)


@pytest.mark.requirement("R81")
def test_a_waiter_that_was_admitted_cannot_be_cancelled() -> None:
    world = full_world()
    sent = world.send("second")
    finish_one(world)
    assert sent.waiter is not None
    assert (sent.waiter.cancel(), sent.waiter.state) == (False, WaiterState.ADMITTED)


def test_nobody_is_admitted_in_place_of_one_that_is_ended_by_shutdown() -> None:
    world = World(items_max=10, bytes_max=2_000)
    world.spot()
    world.send("first", size=1_000)
    sends = [world.send("large", size=1_500), world.send("small")]
    world.waiters.close()
    assert [sent.outcome for sent in sends] == ["SHUTTING_DOWN"] * 2
    assert world.send("large again", size=1_500).outcome == "SHUTTING_DOWN"
    world.check()


def test_an_admission_may_give_room_itself() -> None:
    """The step further out goes on: nobody is tried twice at once."""
    world = full_world()
    tried: list[str] = []

    def admit(name: str) -> Callable[[], bool]:
        def try_admit() -> bool:
            tried.append(name)
            world.waiters.admit("door")
            return True

        return try_admit

    def ended(error: HostError) -> None:
        raise AssertionError(error)

    for name in "abc":
        world.waiters.wait("door", SendFamily.MESH, 1_000, admit(name), ended)
    world.waiters.admit("door")
    assert tried == ["a", "b", "c"]
    world.check()


@pytest.mark.requirement("R88")
def test_a_waiter_references_no_gate_no_permit_and_no_turn() -> None:
    world = full_world()

    class Holder:
        owner = "sender"
        holds_gate = True
        is_over = False

    context = infrastructure_context()
    context.run(enter_turn, Holder())
    sent = context.run(world.send, "second")
    waiter = sent.waiter
    assert waiter is not None
    refers = {type(one) for name in Waiter.__slots__ for one in [getattr(waiter, name)]}
    seen: set[int] = set()
    todo: list[Any] = [getattr(waiter, name) for name in ("key", "family", "_ended", "_timer")]
    while todo:
        one = todo.pop()
        if id(one) not in seen and len(seen) < 2_000 and not isinstance(one, (type, World, dict)):
            seen.add(id(one))
            assert not isinstance(one, (Gate, Permit, Holder)), one
            todo += gc.get_referents(one)
    assert not refers & {Gate, Permit, Holder}


@pytest.mark.requirement("R88")
def test_admission_is_no_part_of_the_turn_that_gave_room() -> None:
    world = full_world()
    seen: list[object] = []

    class Holder:
        owner = "finisher"
        holds_gate = True
        is_over = False

    def try_admit() -> bool:
        seen.append(current_turn())
        return True

    world.waiters.wait("door", SendFamily.MESH, 1_000, try_admit, lambda error: None)
    context = infrastructure_context()
    context.run(enter_turn, Holder())
    context.run(world.waiters.admit, "door")
    assert seen == [None]


def test_what_is_counted_is_counted_anew_after_a_reset() -> None:
    world = full_world(slots=2)
    sends = [world.send("a"), world.send("b"), world.send("refused")]
    world.timers.advance(400)
    world.cancel(sends[0])
    finish_one(world)
    status = world.waiters.status()[SendFamily.SPOT]
    assert (status.waits, status.admitted, status.cancelled, status.refused, status.wait_ms) == (2, 1, 1, 1, 800)
    waiting = world.send("c")
    world.waiters.reset_metrics()
    status = world.waiters.status()[SendFamily.SPOT]
    assert (status.waiting, status.waits, status.wait_ms) == (1, 0, 0)
    world.cancel(waiting)
    world.check()
