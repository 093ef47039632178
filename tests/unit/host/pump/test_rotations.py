"""What cuts a rotation, where the next one begins, and what runs between two."""

from __future__ import annotations

from itertools import pairwise

import pytest

from callyard.host.pump import ROTATION_ITEMS_MAX, RotationLimits
from callyard.testing.scripted_transport import Call
from callyard.transport.port import Completion, SourceKind
from tests.unit.host.pump.kit import names, per_source, runs, sequences, world

MIB = 1 << 20
EVERY_KIND = list(SourceKind)


@pytest.mark.requirement("R52")
def test_items_cut_a_rotation() -> None:
    with world(jobs_max=1_000) as w:
        (source,) = w.add("a")
        source.one_way(count=100)
        w.turn()
        assert len(w.ingress.committed) == 64
        w.turn()
        assert len(w.ingress.committed) == 100


@pytest.mark.requirement("R52")
def test_bytes_cut_a_rotation_after_the_record_that_reaches_them() -> None:
    with world(jobs_max=1_000, limits=RotationLimits(bytes_max=MIB)) as w:
        (source,) = w.add("a")
        source.one_way(payload=bytes(300 << 10), count=5)
        w.turn()
        assert len(w.ingress.committed) == 4


@pytest.mark.requirement("R52", "R99")
def test_one_large_record_always_gets_through() -> None:
    with world(limits=RotationLimits(bytes_max=1)) as w:
        (source,) = w.add("a")
        source.one_way(payload=bytes(8 * MIB), count=2)
        w.turn()
        assert len(w.ingress.committed) == 1
        w.turn()
        assert len(w.ingress.committed) == 2


@pytest.mark.requirement("R52")
def test_time_cuts_a_rotation() -> None:
    with world(jobs_max=1_000, limits=RotationLimits(duration_ms_max=2)) as w:
        (source,) = w.add("a")
        source.one_way(count=10)

        def each_take_lasts_a_millisecond(call: Call) -> None:
            if call.name == "take":
                w.clock.advance(1)

        w.transport.before_call = each_take_lasts_a_millisecond
        w.turn()
        assert len(w.ingress.committed) == 2
        w.settle()
        assert len(w.ingress.committed) == 10


@pytest.mark.requirement("R52")
def test_a_clock_that_jumps_before_the_first_record_does_not_stop_it() -> None:
    with world() as w:
        w.transport.before_call = lambda call: w.clock.advance(60_000) and None
        (source,) = w.add("a")
        source.one_way(count=3)
        w.settle()
        assert len(w.ingress.committed) == 3


@pytest.mark.requirement("R52")
@pytest.mark.parametrize("limits", [{"bytes_max": 0}, {"duration_ms_max": 0}, {"bytes_max": -1}])
def test_a_rotation_without_room_is_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="a rotation needs"):
        RotationLimits(**limits)


@pytest.mark.requirement("R53")
def test_the_next_rotation_begins_with_the_neighbour_of_who_was_cut() -> None:
    with world(jobs_max=10_000) as w:
        a, b, c = w.add("a", "b", "c")
        a.one_way(count=40)
        b.one_way(count=100)
        c.one_way(count=10)
        w.turn()
        assert runs(w.ingress.committed) == [("a", 40), ("b", 24)]
        w.turn()
        assert runs(w.ingress.committed)[2:] == [("c", 10), ("b", 54)]


@pytest.mark.requirement("R53")
def test_a_source_that_closes_at_the_cursor_does_not_reset_it() -> None:
    with world(jobs_max=10_000) as w:
        sources = w.add("a", "b", "c", "d")
        for source in sources:
            source.one_way(count=100)
        w.turn()
        assert runs(w.ingress.committed) == [("a", 64)]
        sources[1].close()
        w.turn()
        assert runs(w.ingress.committed) == [("a", 64), ("c", 64)]


@pytest.mark.requirement("R28")
def test_two_floods_with_few_permits_take_turns() -> None:
    with world(jobs_max=4) as w:
        a, b = w.add("a", "b")
        a.endless(lambda n: a.record())
        b.endless(lambda n: b.record())
        w.settle()
        for _ in range(40):
            w.begin()
            w.settle()
        steady = names(w.ingress.committed)[8:]
        assert steady == ["a", "b"] * (len(steady) // 2) or steady == ["b", "a"] * (len(steady) // 2)


@pytest.mark.requirement("R28")
def test_two_floods_with_permits_enough_take_turns_by_whole_batches() -> None:
    with world(jobs_max=100_000) as w:
        a, b = w.add("a", "b")
        a.endless(lambda n: a.record())
        b.endless(lambda n: b.record())
        for _ in range(6):
            w.turn()
        assert runs(w.ingress.committed) == [("a", 64), ("b", 64)] * 3


@pytest.mark.requirement("R55")
def test_leftover_work_goes_on_without_a_new_arrival() -> None:
    with world(jobs_max=1_000) as w:
        (source,) = w.add("a")
        source.one_way(count=200)
        w.transport.on_signal = lambda source: pytest.fail("a new arrival")
        w.settle()
        assert sequences(w.ingress.committed, "a") == list(range(1, 201))


@pytest.mark.requirement("R55")
def test_leftover_work_goes_on_as_permits_come_back() -> None:
    with world(jobs_max=3) as w:
        (source,) = w.add("a")
        source.one_way(count=200)
        w.drain()
        assert sequences(w.ingress.begun, "a") == list(range(1, 201))


@pytest.mark.requirement("R54", "R56")
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_flood_delays_another_source_by_one_rotation(kind: SourceKind) -> None:
    with world(jobs_max=100_000) as w:
        flood, other = w.add("a", "b", kind=kind)
        flood.endless(lambda n: flood.record())
        w.turn()
        before = w.transport.takes("a")
        other.one_way()
        while not w.transport.takes("b"):
            w.turn()
        assert w.transport.takes("a") - before <= 2 * ROTATION_ITEMS_MAX


@pytest.mark.requirement("R56")
def test_a_flood_at_saturation_leaves_others_their_turn() -> None:
    with world(jobs_max=2) as w:
        flood, other = w.add("a", "b")
        flood.endless(lambda n: flood.record())
        w.settle()
        other.one_way()
        w.settle()
        w.begin(2)
        w.settle()
        w.begin(2)
        w.settle()
        assert per_source(w.ingress.committed)["b"] == 1


@pytest.mark.requirement("R56")
def test_a_flood_of_control_leaves_others_their_turn() -> None:
    with world(jobs_max=1) as w:
        flood, other = w.add("a", "b")
        flood.endless(lambda n: flood.record(kind="control"))
        w.turn()
        other.one_way()
        w.turn()
        assert per_source(w.ingress.committed)["b"] == 1


@pytest.mark.requirement("R112")
@pytest.mark.parametrize("kind", [SourceKind.MESH, SourceKind.CLIENT_SERVER])
def test_a_flood_delays_a_reply_elsewhere_by_one_rotation(kind: SourceKind) -> None:
    with world(jobs_max=100_000) as w:
        flood, other = w.add("a", "b", kind=kind)
        flood.endless(lambda n: flood.record())
        w.turn()
        taken = w.transport.takes("a")
        other.complete(11)
        w.turn()
        assert [completion.operation_id for completion in w.ingress.completed] == [11]
        assert w.transport.takes("a") - taken <= ROTATION_ITEMS_MAX


@pytest.mark.requirement("R112")
def test_other_work_of_the_loop_runs_between_two_rotations() -> None:
    with world(jobs_max=100_000) as w:
        (flood,) = w.add("a")
        flood.endless(lambda n: flood.record())
        seen: list[int] = []

        def look() -> None:
            seen.append(len(w.ingress.committed))
            if len(seen) < 5:
                w.loop.call_soon(look)

        w.loop.call_soon(look)
        for _ in range(5):
            w.turn()
        assert [after - before for before, after in pairwise(seen)] == [64] * 4


@pytest.mark.requirement("R112", "R56")
def test_a_flood_of_replies_leaves_records_their_turn() -> None:
    with world(jobs_max=128) as w:
        flood, other, third = w.add("a", "b", "c")
        flood.endless(lambda n: Completion(operation_id=n + 1))
        w.turn()
        assert len(w.ingress.completed) == ROTATION_ITEMS_MAX
        other.one_way()
        third.complete(1 << 40)
        w.turn()
        w.turn()
        assert per_source(w.ingress.committed)["b"] == 1
        assert (1 << 40) in [completion.operation_id for completion in w.ingress.completed]


@pytest.mark.requirement("R123")
def test_one_line_gives_oldest_first_fair_batches_and_the_cursor() -> None:
    """R16, R28 and R53 on one run: many permits first, then one at a time."""
    with world(jobs_max=192) as w:
        a, b, c = w.add("a", "b", "c")
        for source in (a, b, c):
            source.endless(lambda n, source=source: source.record())  # type: ignore[misc]
        for _ in range(3):
            w.turn()
        # Whole batches, and each rotation begins with the neighbour of the one that was cut.
        # Two permits are in the hands of those that wait for their turn meanwhile: they have one record each of it.
        assert runs(w.ingress.committed) == [("a", 64), ("b", 64), ("c", 62), ("a", 1), ("b", 1)]
        w.settle()
        already = len(w.ingress.committed)
        assert w.jobs.status().waiters == 3
        for _ in range(12):
            w.begin()
            w.settle()
        # Saturated: the oldest waiter has each permit, and goes to the tail.
        order = names(w.ingress.committed[already:])
        assert order[3:] == order[:-3]
        assert set(order[:3]) == {"a", "b", "c"}
        for name in "abc":
            found = sequences(w.ingress.committed, name)
            assert found == sorted(found)
