"""Whose turn is next: the ready set, occupancy, and what is owed between lanes."""

from __future__ import annotations

from itertools import groupby

import pytest

from callyard.host.ledger import OwnerLimits
from callyard.host.owners import Condition, OwnerState
from tests.unit.host.owners.kit import Bench, record


def lanes(ran: list[tuple[str, str]]) -> str:
    return "".join("L" if what == "lifecycle" else "A" for _, what in ran)


def fill(bench: Bench, key: str, count: int) -> None:
    for number in range(count):
        assert bench.owners.submit_local(key, record(key, str(number).encode())) is None


@pytest.mark.requirement("R117")
@pytest.mark.parametrize(
    ("application", "lifecycle", "expected"),
    [
        (3, 2, "LLAAA"),
        (3, 8, "LLLLLLLLAAA"),
        (3, 20, "LLLLLLLLALLLLLLLLALLLLA"),
        (0, 20, "L" * 20),
        (2, 0, "AA"),
        (1, 9, "LLLLLLLLAL"),
    ],
)
def test_lifecycle_first_and_after_eight_an_application_turn(application: int, lifecycle: int, expected: str) -> None:
    bench = Bench()
    bench.add("a")
    fill(bench, "a", application)
    bench.lifecycle("a", lifecycle)
    assert lanes(bench.run()) == expected


@pytest.mark.requirement("R117")
def test_the_debt_outlives_giving_up_the_place() -> None:
    bench = Bench()
    bench.add("a")
    bench.add("b")
    fill(bench, "a", 2)
    fill(bench, "b", 4)
    bench.lifecycle("a", 20)
    ran = bench.run(turn_ms=5)  # two turns, then the tail
    assert lanes([turn for turn in ran if turn[0] == "a"]) == "LLLLLLLLALLLLLLLLALLLL"
    assert "".join(key for key, _ in ran[:8]) == "aabbaabb"


@pytest.mark.requirement("R117")
def test_the_debt_dies_with_its_owner() -> None:
    bench = Bench()
    bench.add("a")
    bench.lifecycle("a", 8)
    assert lanes(bench.run()) == "L" * 8
    owner = bench.owners.get("a")
    assert owner is not None
    assert owner.lifecycle_run == 8
    bench.owners.remove("a")
    bench.add("a")
    fill(bench, "a", 1)
    bench.lifecycle("a", 1)
    assert lanes(bench.run()) == "LA"


@pytest.mark.requirement("R117")
@pytest.mark.parametrize(("turn_ms", "in_a_row"), [(1, 10), (3, 4), (5, 2), (10, 1), (50, 1)])
def test_a_place_is_kept_for_ten_milliseconds_of_turns(turn_ms: int, in_a_row: int) -> None:
    bench = Bench()
    for key in "abc":
        bench.add(key)
        fill(bench, key, 2 * in_a_row)
    runs = [(key, len(list(turns))) for key, turns in groupby(key for key, _ in bench.run(turn_ms=turn_ms))]
    assert runs == [(key, in_a_row) for key in "abcabc"]


@pytest.mark.requirement("R38")
def test_a_thousand_items_left_all_run_in_order() -> None:
    bench = Bench(OwnerLimits(application_items_max=2_000))
    bench.add("a")
    bench.add("b")
    fill(bench, "a", 1_000)
    fill(bench, "b", 3)
    ran = bench.run(turn_ms=10)
    assert [what for key, what in ran if key == "a"] == [str(number) for number in range(1_000)]
    assert [number for number, (key, _) in enumerate(ran) if key == "b"] == [1, 3, 5]


def test_a_handler_that_waits_gives_the_place_up_and_keeps_the_gate() -> None:
    bench = Bench()
    bench.add("a")
    bench.add("b")
    fill(bench, "a", 2)
    fill(bench, "b", 1)
    work = bench.begin()
    bench.owners.detach(work)
    other = bench.begin()
    assert other.owner.key == "b"
    bench.end(other)
    assert bench.owners.begin_next(0) is None
    bench.end(work)
    assert bench.begin().owner.key == "a"


def test_who_waits_for_a_gate_has_it_before_its_holder_goes_on() -> None:
    bench = Bench()
    gate = bench.owners.new_gate()
    for key in "abc":
        bench.add(key, gate=gate)
        fill(bench, key, 3)
    first = bench.begin()
    bench.owners.detach(first)
    assert bench.owners.begin_next(0) is None  # b and c stand at the gate
    states = [owner.state for key in "abc" if (owner := bench.owners.get(key)) is not None]
    assert states == [OwnerState.RUNNING, OwnerState.WAITING, OwnerState.WAITING]
    bench.check()
    bench.end(first)
    assert [key for key, _ in bench.run()] == ["b", "c", "a"] * 2 + ["b", "c"]
    bench.check()


@pytest.mark.parametrize("place", ["ready", "with the gate in its hand", "at the gate", "between two turns"])
def test_an_owner_removed_wherever_it_stands_leaves_nothing_behind(place: str) -> None:
    bench = Bench()
    gate = bench.owners.new_gate()
    for key in "abc":
        bench.add(key, gate=gate)
    fill(bench, "b", 2)
    fill(bench, "c", 1)
    if place == "between two turns":
        bench.owners.remove("c")
        bench.end(bench.begin())
    elif place != "ready":
        fill(bench, "a", 1)
        bench.owners._ready.move_to_end(next(reversed(bench.owners._ready)), last=False)
        first = bench.begin()
        bench.owners.detach(first)
        assert bench.owners.begin_next(0) is None
        if place == "with the gate in its hand":
            bench.end(first)
    bench.owners.remove("b")
    bench.check()
    if place == "at the gate":
        bench.end(first)
    assert [key for key, _ in bench.run()] == ([] if place == "between two turns" else ["c"])
    assert gate.holder is None
    assert bench.owners.is_quiet
    bench.check()


def test_sealing_lets_lifecycle_work_run_and_tells_when_no_turn_does() -> None:
    bench = Bench()
    bench.add("a")
    fill(bench, "a", 2)
    work = bench.begin()
    told: list[str] = []
    bench.owners.set_condition("a", Condition.SEALED)
    bench.owners.when_quiet("a", lambda: told.append("quiet"))
    bench.lifecycle("a", 1)
    assert told == []
    bench.end(work)
    assert told == ["quiet"]
    assert bench.run() == [("a", "lifecycle")]
    bench.owners.when_quiet("a", lambda: told.append("at once"))
    assert told == ["quiet", "at once"]
    bench.events.rooms.clear()
    bench.owners.set_condition("a", Condition.OPEN)
    assert bench.events.rooms == ["a"]
    assert bench.run() == [("a", "1")]
    bench.check()
