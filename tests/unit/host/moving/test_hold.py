"""The ingress hold: what is held, for how long, and how it comes back in order."""

from __future__ import annotations

from collections.abc import Callable
from inspect import iscoroutinefunction
from typing import Any

import pytest

from callyard.host.drops import Dropped, DropReason
from callyard.host.errors import HostError, HostErrorKind
from callyard.host.jobs import Permit
from callyard.host.moving import Moving
from callyard.host.owners import Condition, Owners
from callyard.host.states import HostState
from callyard.transport.port import RecordKind, SourceId
from tests.unit.host.world import World, name_of


def sealed_world(**settings: Any) -> World:
    world = World(**settings)
    world.spot()
    world.moving.seal("cart")
    return world


def names(count: int, prefix: str = "held") -> list[str]:
    return [f"{prefix}-{n}" for n in range(count)]


@pytest.mark.requirement("R22")
def test_held_records_give_their_permits_back_and_take_a_fresh_one_for_each_turn() -> None:
    world = sealed_world(jobs_max=2, items_max=100)
    for name in names(10):
        assert world.receive(name) is None
    assert (world.jobs.in_use, world.moving.held("cart")) == (0, 10)
    world.in_use_max = 0
    world.moving.open("cart")
    world.check()
    assert world.jobs.in_use == 2
    world.run_all()
    assert (world.ran, world.in_use_max, world.jobs.in_use) == (names(10), 2, 0)
    assert world.owners.get("cart").condition is Condition.OPEN  # type: ignore[union-attr]


@pytest.mark.requirement("R22")
def test_what_the_owner_had_not_begun_is_backlog_ahead_of_what_comes() -> None:
    world = World(jobs_max=4, items_max=100)
    world.spot()
    world.receive("running")
    world.begin_turn()
    world.receive("queued-0")
    world.send("queued-1")
    world.moving.seal("cart")
    assert (world.jobs.in_use, world.moving.held("cart")) == (0, 2)
    assert world.owners.get("cart").ledger.application.items == 1  # type: ignore[union-attr] # the running one
    world.receive("held")
    world.end_turn()
    assert not world.begin_turn()
    world.moving.open("cart")
    world.run_all()
    assert world.ran == ["running", "queued-0", "queued-1", "held"]


def test_sends_that_wait_for_room_are_taken_by_the_hold_when_the_unit_is_sealed() -> None:
    world = World(items_max=2)
    world.spot()
    world.send("queued-0")
    world.send("queued-1")
    waiting = [world.send("waited-0"), world.send("waited-1")]
    world.moving.seal("cart")
    assert [sent.outcome for sent in waiting] == ["taken", "taken"]
    world.timers.advance(60_000)  # nothing of it has a deadline
    world.moving.open("cart")
    world.run_all()
    assert world.ran == ["queued-0", "queued-1", "waited-0", "waited-1"]


def test_what_comes_during_a_replay_goes_behind_it() -> None:
    world = sealed_world(jobs_max=2, items_max=100)
    for name in names(4):
        world.receive(name)
    world.moving.open("cart")
    world.begin_turn()  # its permit goes to the next of the hold
    assert world.moving.held("cart") == 1
    world.send("local newcomer")
    world.run_all()
    assert world.ran == [*names(4), "local newcomer"]


def test_a_record_lends_its_permit_to_the_head_and_takes_the_tail() -> None:
    """With every permit out, its own is the only one that a source has: the hold must not grow by it."""
    world = sealed_world(jobs_max=2, items_max=100)
    for name in names(3):
        world.receive(name)
    other = [world.jobs.try_acquire(), world.jobs.try_acquire()]
    world.moving.open("cart")
    assert world.moving.held("cart") == 3
    permit = other.pop()
    assert permit is not None
    assert world.moving.commit(world.record("newcomer"), permit) is None
    assert world.moving.held("cart") == 3
    world.check()
    assert other[0] is not None
    other[0].release()
    world.run_all()
    assert world.ran == [*names(3), "newcomer"]


def test_a_full_owner_stops_the_replay_until_it_gives_room() -> None:
    world = sealed_world(jobs_max=8, items_max=2)
    for name in names(5):
        world.receive(name)
    world.moving.open("cart")
    world.check()
    assert (world.jobs.in_use, world.moving.held("cart")) == (2, 3)
    assert world.receive("newcomer") is HostErrorKind.CAPACITY_EXCEEDED
    assert (world.jobs.in_use, world.moving.held("cart")) == (2, 3)
    world.run_all()
    assert world.ran == names(5)


def test_the_last_of_a_hold_expires_and_a_newcomer_is_queued_as_ever() -> None:
    world = sealed_world(jobs_max=1)
    world.receive("held", deadline_at_ms=10)
    permit = world.jobs.try_acquire()
    assert permit is not None
    world.moving.open("cart")
    world.timers.late(10)
    assert world.moving.commit(world.record("newcomer"), permit) is None
    world.check()
    assert world.owners.get("cart").condition is Condition.OPEN  # type: ignore[union-attr]
    world.run_all()
    assert world.ran == ["newcomer"]


def test_sealed_again_while_it_replays() -> None:
    world = sealed_world(jobs_max=1)
    for name in names(3):
        world.receive(name)
    world.moving.open("cart")
    world.moving.seal("cart")
    world.check()
    assert (world.moving.held("cart"), world.jobs.in_use, world.jobs.waiters) == (3, 0, 0)
    world.moving.open("cart")
    world.run_all()
    assert world.ran == names(3)


def test_only_an_open_unit_is_sealed() -> None:
    world = sealed_world()
    with pytest.raises(HostError) as refused:
        world.moving.seal("cart")
    assert refused.value.kind is HostErrorKind.INVALID_OPERATION
    with pytest.raises(HostError) as unknown:
        world.moving.seal("nobody")
    assert unknown.value.kind is HostErrorKind.NOT_FOUND
    world.moving.open("cart")
    world.moving.open("cart")
    world.moving.open("nobody")
    world.check()


@pytest.mark.requirement("R114")
def test_a_one_way_dropped_at_cutover_was_sent_well_and_is_counted() -> None:
    world = sealed_world(jobs_max=4)
    sent = world.send("local one-way")
    world.receive("received one-way")
    world.receive("request", kind=RecordKind.REQUEST)
    assert sent.outcome == "taken"
    world.owners.remove("cart")
    world.moving.open("cart")
    assert sent.outcome == "taken"
    assert world.drops.counts == {Dropped("one_way", DropReason.STALE_TARGET): 2}
    assert world.answers == [("request", HostErrorKind.NOT_FOUND)]
    assert (world.ran, world.jobs.in_use, world.timers.armed) == ([], 0, 0)
    world.check()


@pytest.mark.requirement("R114")
def test_a_shutdown_ends_what_is_held() -> None:
    world = sealed_world(jobs_max=4)
    world.receive("one-way")
    world.receive("request", kind=RecordKind.REQUEST)
    world.moving.close()
    assert world.drops.of(DropReason.SHUTDOWN) == 1
    assert world.answers == [("request", HostErrorKind.SHUTTING_DOWN)]


def sealed(world: World) -> None:
    world.spot()
    world.moving.seal("cart")


def creating(world: World) -> None:
    world.owners.add("cart", lambda turn, value: None, condition=Condition.CREATING)


def connecting(world: World) -> None:
    world.owners.add("cart", lambda turn, value: None, condition=Condition.NOT_CONNECTED)


KINDS = [RecordKind.ONE_WAY, RecordKind.REQUEST, RecordKind.PUBLISH]


@pytest.mark.requirement("R116", "R39")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("begin", [sealed, creating, connecting])
def test_what_comes_for_a_unit_that_is_not_open(begin: Callable[[World], None], kind: RecordKind) -> None:
    """Condition by kind of call. Nothing is appended; what is held ends with its own deadline, or is taken."""
    for opens in (False, True):
        world = World(jobs_max=4)
        begin(world)
        refused = world.receive("record", kind=kind, deadline_at_ms=300)
        if begin is connecting and kind is RecordKind.REQUEST:
            assert refused is HostErrorKind.UNAVAILABLE
            continue
        assert refused is None
        owner = world.owners.get("cart")
        assert owner is not None
        assert (owner.ledger.application.items, owner.accepted_sequence, world.owners.ready) == (0, 0, 0)
        assert (world.jobs.in_use, world.moving.held("cart")) == (0, 1)
        world.timers.advance(299)
        assert world.moving.held("cart") == 1
        if opens:
            world.moving.open("cart")
        world.timers.advance(1)
        world.moving.open("cart")
        world.run_all()
        assert world.ran == (["record"] if opens else [])
        if kind is RecordKind.REQUEST:
            assert world.answers == ([] if opens else [("record", HostErrorKind.DEADLINE_EXCEEDED)])
        else:
            assert world.drops.of(DropReason.STALE_TARGET) == (0 if opens else 1)
        world.check()


@pytest.mark.requirement("R116")
@pytest.mark.parametrize("opens", [True, False])
def test_a_local_one_way_to_a_session_without_a_connection_waits_as_any_send(opens: bool) -> None:
    world = World()
    connecting(world)
    sent = world.send("one-way")
    assert sent.outcome is None
    world.timers.advance(999)
    if opens:
        world.moving.open("cart")
    world.timers.advance(1)
    world.run_all()
    assert (sent.outcome, world.ran) == (("taken", ["one-way"]) if opens else ("DEADLINE_EXCEEDED", []))


@pytest.mark.requirement("R116", "R118")
def test_received_one_ways_for_such_sessions_wait_the_send_timeout_in_as_many_places() -> None:
    world = World(slots=2)
    connecting(world)
    for name in names(2):
        assert world.receive(name) is None
    assert world.receive("one more") is HostErrorKind.DEADLINE_EXCEEDED
    world.check()
    world.timers.advance(1_000)
    assert (world.moving.held("cart"), world.drops.of(DropReason.STALE_TARGET)) == (0, 2)
    assert world.receive("now") is None
    world.moving.open("cart")
    world.run_all()
    assert world.ran == ["now"]


@pytest.mark.requirement("R116")
def test_a_record_past_its_deadline_is_not_held() -> None:
    world = sealed_world()
    world.timers.advance(100)
    assert world.receive("late", deadline_at_ms=100) is HostErrorKind.DEADLINE_EXCEEDED
    assert (world.moving.held("cart"), world.jobs.in_use) == (0, 0)


def test_of_local_work_a_unit_holds_as_much_as_a_lane() -> None:
    world = sealed_world(items_max=3)
    sends = [world.send(name) for name in names(5)]
    assert [sent.outcome for sent in sends] == ["taken"] * 3 + [None] * 2
    world.check()
    world.moving.open("cart")
    world.run_all()
    assert world.ran == names(5)
    world = sealed_world(items_max=30, bytes_max=1_000)
    assert [world.send(name, size=300).outcome for name in names(2)] == ["taken", None]


@pytest.mark.requirement("R39")
@pytest.mark.parametrize("state", [HostState.DRAINING, HostState.RELOCATED])
def test_the_host_s_state_comes_before_the_hold(state: HostState) -> None:
    world = sealed_world()
    if state is HostState.RELOCATED:
        world.life.move_to(HostState.RELOCATING)
    world.life.move_to(state)
    expected = HostErrorKind.SHUTTING_DOWN if state is HostState.DRAINING else HostErrorKind.UNAVAILABLE
    assert world.receive("record") is expected
    assert world.moving.held("cart") == 0


@pytest.mark.requirement("R39")
def test_the_span_is_of_plain_functions() -> None:
    for function in (Moving.commit, Moving.submit, Moving.hold, Moving.seal, Moving.open, Owners.commit):
        assert not iscoroutinefunction(function)


@pytest.mark.requirement("R40")
@pytest.mark.parametrize("flip", ["sealed", "removed", "replaced"])
@pytest.mark.parametrize("at", range(6))
def test_an_owner_that_changes_at_any_yield_point_gets_nothing_of_what_came_after(flip: str, at: int) -> None:
    """Six records, and the change between any two: those after it are held or refused, and the old queue is empty."""
    world = World(jobs_max=100, items_max=100)
    world.spot()
    old = world.owners.get("cart")
    assert old is not None
    outcomes: dict[str, HostErrorKind | None] = {}
    for n, name in enumerate(names(6)):
        if n == at:
            if flip == "removed":
                world.owners.remove("cart")
            else:
                world.moving.seal("cart")
            if flip == "replaced":
                world.owners.remove("cart")
                world.owners.add("cart", lambda turn, value: None, condition=Condition.SEALED)
        outcomes[name] = world.receive(name)
        if n >= at:
            assert (old.ledger.application.items, list(old.application)) == (0, []), name
    after = names(6)[at:]
    expected = HostErrorKind.NOT_FOUND if flip == "removed" else None
    assert [outcomes[name] for name in after] == [expected] * len(after)
    world.moving.open("cart")
    world.run_all()
    ended = [name for name, _ in world.answers] + [name for name, _ in world.refused]
    if flip == "sealed":
        assert world.ran == names(6)
    elif flip == "replaced":
        assert world.ran == after
    else:
        assert world.ran == []
        assert set(ended) == set(names(6))
    assert world.jobs.in_use == 0


def test_the_end_of_a_host_s_jobs_is_the_end_of_a_replay() -> None:
    for is_early in (True, False):
        world = sealed_world(jobs_max=1)
        world.receive("held")
        permit: Permit | None = world.jobs.try_acquire()
        if is_early:
            world.jobs.close()
            world.moving.open("cart")
        else:
            world.moving.open("cart")
            world.jobs.close()
        assert world.drops.of(DropReason.SHUTDOWN) == 1
        assert permit is not None
        permit.release()
        assert world.jobs.in_use == 0


def test_a_held_request_whose_caller_has_gone_is_forgotten() -> None:
    world = sealed_world(jobs_max=4, items_max=1)
    for name in names(3):
        world.receive(name, kind=RecordKind.REQUEST)
    assert world.moving.cancel(SourceId("peer"), 2)
    assert not world.moving.cancel(SourceId("peer"), 2)
    world.moving.open("cart")  # the first is queued, and the third finds no room
    assert world.moving.cancel(SourceId("peer"), 3)
    world.check()
    assert world.owners.get("cart").condition is Condition.OPEN  # type: ignore[union-attr]
    assert world.moving.cancel(SourceId("peer"), 1)
    world.run_all()
    assert (world.ran, world.answers, world.jobs.in_use) == ([], [], 0)


def test_what_is_counted() -> None:
    world = sealed_world(jobs_max=4)
    for name, deadline_at_ms in (("a", None), ("b", 10), ("c", None)):
        world.receive(name, deadline_at_ms=deadline_at_ms)
    status = world.moving.status()
    assert (status.units, status.held) == (1, 3)
    world.timers.advance(10)
    world.moving.open("cart")
    status = world.moving.status()
    assert (status.units, status.held, status.replayed, status.expired, status.dropped) == (0, 0, 2, 1, 0)
    world.moving.reset_metrics()
    assert world.moving.status().replayed == 0
    assert [name_of(work.item) for work in world.owners.get("cart").application if work.item] == ["a", "c"]  # type: ignore[union-attr]
