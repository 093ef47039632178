"""How a wait ends: cancelled, closed, lost, shut down; and that nothing but the wait ends."""

from __future__ import annotations

import itertools
from contextvars import copy_context

import pytest

from callyard.host.context import Place, current_marker, enter_turn
from callyard.host.errors import HostErrorKind
from callyard.testing.scripted_transport import Call
from callyard.transport.port import HeadKind, Record, SourceKind
from tests.unit.host.pump.kit import World, names, sequences, world


@pytest.mark.requirement("R31")
def test_a_cancelled_wait_leaves_the_record_where_it_is() -> None:
    with world(jobs_max=1) as w:
        (held,) = w.hold(1)
        (source,) = w.add("a")
        source.one_way()
        w.settle()
        w.pump.cancel_wait(source.id)
        assert w.jobs.status().waiters == 0
        held.release()
        w.settle()
        assert source.unread == 1
        assert w.ingress.refusals == []
        assert w.jobs.in_use == 0
        w.pump.look(source.id)
        w.drain()
        assert sequences(w.ingress.begun, "a") == [1]


@pytest.mark.requirement("R31")
def test_stop_receiving_ends_every_wait_and_replies_still_come() -> None:
    with world(jobs_max=1) as w:
        (held,) = w.hold(1)
        a, b = w.add("a", "b")
        a.one_way()
        b.one_way()
        w.settle()
        w.pump.stop_receiving()
        assert w.jobs.status().waiters == 0
        held.release()
        a.complete(11)
        b.one_way()
        w.settle()
        assert [completion.operation_id for completion in w.ingress.completed] == [11]
        assert w.transport.counts["take"] == 0
        assert (a.unread, b.unread) == (1, 2)
        assert w.ingress.refusals == []


@pytest.mark.requirement("R31")
@pytest.mark.parametrize("how", ["stop_receiving", "close", "jobs"])
def test_a_permit_in_hand_goes_back_when_the_pump_stops(how: str) -> None:
    with world(jobs_max=2) as w:
        (source,) = w.add("a")
        source.one_way(count=3)
        w.loop.call_soon(w.pump.look, source.id)
        w.turn()
        w.begin(2)  # hands a permit to the source, which waits for its rotation with it
        assert w.in_use == (1, 0)
        end = {"stop_receiving": w.pump.stop_receiving, "close": w.pump.close, "jobs": w.jobs.close}[how]
        end()
        w.settle()
        if how == "jobs":  # what was granted is used: it was told
            w.begin(1)
        assert w.in_use == (0, 0)
        assert source.unread + len(w.ingress.committed) == 3
        assert w.ingress.refusals == []


@pytest.mark.requirement("R31", "R48")
def test_a_closed_job_queue_ends_every_wait() -> None:
    with world(jobs_max=1) as w:
        w.hold(1)
        for source in w.add("a", "b"):
            source.one_way()
        w.settle()
        w.jobs.close()
        w.settle()
        assert w.pump.statistics().waiting == 0
        for source in (w.transport.source("a"), w.transport.source("b")):
            source.signal()
            assert source.unread == 1
        w.settle()
        assert w.ingress.refusals == []


@pytest.mark.requirement("R111")
@pytest.mark.parametrize("kind", list(SourceKind))
def test_a_lost_source_ends_its_waiter_without_a_permit(kind: SourceKind) -> None:
    with world(jobs_max=1) as w:
        (held,) = w.hold(1)
        a, b = w.add("a", "b", kind=kind)
        a.one_way()
        b.one_way()
        w.settle()
        assert w.jobs.status().waiters == 2
        a.close()
        # Inside the transport's callback: no time goes by, no turn of the loop, and the permit is still held.
        assert w.jobs.status().waiters == 1
        assert w.ingress.lost_sources == ["a"]
        held.release()
        w.drain()
        assert names(w.ingress.begun) == ["b"]


@pytest.mark.requirement("R111")
def test_a_cancel_message_waits_its_turn() -> None:
    with world(jobs_max=1) as w:
        (held,) = w.hold(1)
        (source,) = w.add("a")
        source.control("cancel", operation_id=3)
        w.settle()
        assert w.ingress.controlled == []
        held.release()
        w.settle()
        assert [record.message_type for record in w.ingress.controlled] == ["cancel"]


@pytest.mark.requirement("R48")
@pytest.mark.parametrize("order", list(itertools.permutations(["grant", "cancel", "close", "stop"])))
def test_ends_in_any_order_leave_nothing_behind(order: tuple[str, ...]) -> None:
    with world(jobs_max=1) as w:
        (held,) = w.hold(1)
        a, b = w.add("a", "b")
        a.one_way()
        b.one_way()
        w.settle()
        ends = {
            "grant": held.release,
            "cancel": lambda: w.pump.cancel_wait(a.id),
            "close": a.close,
            "stop": w.pump.stop_receiving,
        }
        for name in order:
            ends[name]()
            w.jobs.check_invariants()
            w.pump.check_invariants()
        w.settle()
        w.begin(9)
        assert w.in_use == (0, 0)
        assert w.jobs.status().waiters == 0
        assert w.ingress.refusals == []


def close_at(w: World, source: str, name: str, nth: int) -> None:
    """Close a source inside the nth call of a method for another source."""
    seen = 0

    def close(call: Call) -> None:
        nonlocal seen
        if call.name == name:
            seen += 1
            if seen == nth and source in w.transport.sources():
                w.transport.source(source).close()

    w.transport.before_call = close


@pytest.mark.requirement("R48", "R53")
@pytest.mark.parametrize("victim", ["a", "b", "c"])
@pytest.mark.parametrize("nth", range(1, 12))
def test_a_source_may_close_at_any_moment(victim: str, nth: int) -> None:
    with world(jobs_max=4) as w:
        sources = w.add("a", "b", "c")
        close_at(w, victim, "head_kind", nth)
        for source in sources:
            source.push(source.record("control"), source.record(), source.record(), signal=False)
        for source in sources:
            if not source.closed:
                source.signal()
        w.drain()
        taken = sum(source.taken for source in sources)
        assert taken == len(w.ingress.begun) + len(w.ingress.controlled)
        assert taken + w.transport.discarded == 9
        for source in sources:
            assert source.unread == 0
        assert w.in_use == (0, 0)
        assert w.jobs.status().waiters == 0


def test_a_source_may_close_itself_while_its_record_is_handled() -> None:
    with world() as w:
        a, b = w.add("a", "b")
        w.ingress.on_control = lambda record: a.close()
        a.push(a.record("control"), a.record())
        b.one_way()
        w.settle()
        assert names(w.ingress.committed) == ["b"]
        assert w.pump.statistics().sources == 1
        assert w.ingress.lost_sources == ["a"]


def test_a_source_of_the_same_name_begins_anew() -> None:
    with world(jobs_max=1) as w:
        (held,) = w.hold(1)
        (old,) = w.add("a")
        old.one_way(count=3)
        w.settle()
        old.close()
        (new,) = w.add("a")
        new.one_way("new")
        w.settle()
        assert w.jobs.status().waiters == 1
        held.release()
        w.drain()
        assert [record.target for record in w.ingress.begun] == ["new"]


def test_the_ingress_may_close_the_pump() -> None:
    with world() as w:
        w.ingress.on_control = lambda record: w.pump.close()
        a, b = w.add("a", "b")
        a.push(a.record("control"), a.record())
        b.one_way()
        w.settle()
        assert w.transport.counts["take"] == 1
        assert w.in_use == (0, 0)
        assert w.pump.failure is None


def test_what_came_before_the_start_is_seen() -> None:
    with world(started=False) as w:
        (source,) = w.add("a")
        source.one_way(count=2)
        w.start()
        assert sequences(w.ingress.committed, "a") == [1, 2]


def test_a_pump_is_started_once() -> None:
    with world() as w:
        with pytest.raises(RuntimeError, match="started once"):
            w.pump.start()
        w.pump.close()
        w.pump.close()


@pytest.mark.parametrize("where", ["commit", "control", "complete", "refused", "targets_of"])
def test_a_bug_in_the_ingress_is_loud_and_keeps_no_permit(where: str) -> None:
    with world(jobs_max=3) as w:
        told: list[Exception] = []
        w.pump._on_failure = told.append
        a, b = w.add("a", "b")

        def fail(*args: object) -> None:
            raise ZeroDivisionError(where)

        setattr(w.ingress, where, fail)
        match where:
            case "commit":
                a.one_way()
            case "control":
                a.control()
            case "complete":
                a.complete(1)
            case "refused":
                a.malformed()
            case _:
                a.publish()
        b.one_way()
        w.settle()
        assert isinstance(w.pump.failure, ZeroDivisionError)
        assert told == [w.pump.failure]
        assert [error["exception"] for error in w.errors] == [w.pump.failure]
        w.errors.clear()
        w.begin(9)
        assert w.in_use == (0, 0)
        assert w.jobs.status().waiters == 0
        taken = w.transport.counts["take"]
        b.one_way()
        w.settle()
        assert w.transport.counts["take"] == taken


@pytest.mark.requirement("R59")
def test_the_ingress_runs_as_a_receive_callback() -> None:
    with world() as w:
        seen: dict[str, object] = {}

        def watch(name: str) -> None:
            real = getattr(w.ingress, name)

            def call(*args: object) -> object:
                seen[name] = current_marker()
                return real(*args)

            setattr(w.ingress, name, call)

        for name in ("commit", "control", "complete", "refused", "targets_of", "lost"):
            watch(name)
        (source,) = w.add("a")
        source.push(source.record(), source.record("control"), source.record("malformed"), source.record("publish"))
        source.complete(1)
        w.settle()
        source.close()
        assert seen == dict.fromkeys(
            ["commit", "control", "complete", "refused", "targets_of", "lost"], Place.RECEIVE_CALLBACK
        )
        assert current_marker() is Place.INFRASTRUCTURE


class Turn:
    owner = "cart/42"
    holds_gate = True
    is_over = False


@pytest.mark.requirement("R50", "R59")
def test_a_rotation_never_runs_in_the_context_of_who_woke_the_pump() -> None:
    markers: list[object] = []
    with world(jobs_max=2, may_wait=lambda: markers.append(current_marker())) as w:
        a, b = w.add("a", "b")
        a.one_way(count=4)
        w.settle()

        def turn() -> None:
            """A handler sends to this very host, and another one's permit goes back out of it."""
            enter_turn(Turn())
            b.one_way()
            w.begin()

        markers.clear()
        w.loop.call_soon(turn, context=copy_context())
        w.drain()
        assert len(w.ingress.begun) == 5
        assert markers
        assert set(markers) == {Place.INFRASTRUCTURE}


@pytest.mark.requirement("R92")
def test_saturation_and_a_full_owner_look_different() -> None:
    with world(jobs_max=1) as w:
        (held,) = w.hold(1)
        (source,) = w.add("a")
        source.one_way()
        w.settle()
        saturated = w.jobs.status()
        assert (saturated.waits, len(w.ingress.refusals)) == (1, 0)
        w.ingress.verdict = lambda record: HostErrorKind.CAPACITY_EXCEEDED
        held.release()
        w.settle()
        w.jobs.reset_metrics()
        source.request(operation_id=4)
        w.settle()
        assert w.jobs.status().waits == 0
        assert [(record.operation_id, kind) for record, kind in w.ingress.refusals] == [
            (0, HostErrorKind.CAPACITY_EXCEEDED),
            (4, HostErrorKind.CAPACITY_EXCEEDED),
        ]
        assert w.pump.statistics().refused == 2
        assert w.in_use == (0, 0)


def test_head_kind_is_asked_before_every_take() -> None:
    with world(jobs_max=8) as w:
        (source,) = w.add("a", kind=SourceKind.CLIENT_SERVER)
        source.one_way(count=2)
        source.complete(1)
        w.settle()
        asked = False
        for call in w.transport.calls:
            if call.name.startswith("take"):
                assert asked
            asked = call.name == "head_kind"
        assert w.transport.head_kind(source.id) is HeadKind.NONE
        assert all(isinstance(record, Record) for record in w.ingress.committed)
