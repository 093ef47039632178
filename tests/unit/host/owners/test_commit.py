"""The commit span: everything or nothing, whatever stands in the way."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from callyard.host import owners as owners_module
from callyard.host.errors import HostErrorKind
from callyard.host.jobs import Permit
from callyard.host.ledger import Lane, OwnerLimits
from callyard.host.owners import Callback, Condition, Item, OwnerKey, Owners, WorkLine, kind_for_reply
from callyard.host.states import HostLife, HostState
from callyard.transport.port import RecordKind, SourceId
from tests.unit.host.owners.kit import Bench, record

SMALL = OwnerLimits(application_items_max=3, application_bytes_max=2_000)
K = HostErrorKind


def draining(bench: Bench, life: HostLife) -> None:
    life.move_to(HostState.DRAINING)


def seal_host(bench: Bench, life: HostLife) -> None:
    life.seal()


def relocated(bench: Bench, life: HostLife) -> None:
    life.move_to(HostState.RELOCATING)
    life.move_to(HostState.RELOCATED)


def unknown(bench: Bench, life: HostLife) -> None:
    bench.owners._by_key["b"] = bench.owners._by_key.pop("a")


def condition(what: Condition) -> Callable[[Bench, HostLife], None]:
    return lambda bench, life: bench.owners.set_condition("a", what)


def items_full(bench: Bench, life: HostLife) -> None:
    for _ in range(2):
        assert bench.owners.submit_local("a", record("a")) is None


def bytes_full(bench: Bench, life: HostLife) -> None:
    assert bench.owners.submit_local("a", record("a", bytes(2_000 - 256 - 260))) is None


CASES = [
    pytest.param(draining, K.SHUTTING_DOWN, id="draining"),
    pytest.param(seal_host, K.SHUTTING_DOWN, id="shutdown"),
    pytest.param(relocated, K.UNAVAILABLE, id="relocated"),
    pytest.param(unknown, K.NOT_FOUND, id="unknown"),
    pytest.param(condition(Condition.SEALED), K.UNAVAILABLE, id="sealed"),
    pytest.param(condition(Condition.CREATING), K.UNAVAILABLE, id="creating"),
    pytest.param(condition(Condition.REPLAYING), K.UNAVAILABLE, id="replaying"),
    pytest.param(condition(Condition.NOT_CONNECTED), K.UNAVAILABLE, id="not connected"),
    pytest.param(items_full, K.CAPACITY_EXCEEDED, id="items"),
    pytest.param(bytes_full, K.CAPACITY_EXCEEDED, id="bytes"),
]


def world() -> tuple[Bench, HostLife]:
    life = HostLife()
    life.move_to(HostState.SERVING)
    bench = Bench(SMALL, admit=life.admit)
    bench.add("a")
    assert bench.commit(record("a", b"1")) is None
    return bench, life


def snapshot(bench: Bench, key: OwnerKey = "a") -> Any:
    owner = bench.owners.get(key) or bench.owners.get("b")
    assert owner is not None
    lanes = [
        (ledger.mailbox, ledger.execution, [work.sequence for work in owner.lines[lane]])
        for lane in Lane
        for ledger in [owner.ledger.lanes[lane]]
    ]
    return lanes, owner.accepted_sequence, owner.state, bench.owners.ready, bench.events.ready


@pytest.mark.requirement("R39", "R42")
@pytest.mark.parametrize("kind", [RecordKind.ONE_WAY, RecordKind.REQUEST])
@pytest.mark.parametrize(("stand_in_the_way", "expected"), CASES)
def test_each_condition_alone_prevents_the_append(
    stand_in_the_way: Callable[[Bench, HostLife], None], expected: HostErrorKind, kind: RecordKind
) -> None:
    bench, life = world()
    stand_in_the_way(bench, life)
    before = snapshot(bench)
    permit = bench.jobs.try_acquire()
    assert permit is not None
    reserved = bench.jobs.status()
    assert bench.owners.commit(record("a", b"next", kind, operation_id=9), permit) is expected
    assert snapshot(bench) == before
    assert bench.jobs.status() == reserved  # the permit is the pump's, as it was
    assert not bench.owners.cancel(SourceId("peer"), 9)
    assert bench.owners.submit_local("a", record("a", b"next", kind, operation_id=9)) is expected
    assert snapshot(bench) == before
    bench.check()


@pytest.mark.requirement("R43")
@pytest.mark.parametrize("stand_in_the_way", [items_full, bytes_full])
def test_a_failed_attempt_changes_nothing_and_the_next_is_as_if_it_had_not_been(
    stand_in_the_way: Callable[[Bench, HostLife], None],
) -> None:
    bench, life = world()
    stand_in_the_way(bench, life)
    before = snapshot(bench)
    for _ in range(5):
        assert bench.commit(record("a", b"refused")) is K.CAPACITY_EXCEEDED
        assert bench.owners.submit_local("a", record("a", b"refused")) is K.CAPACITY_EXCEEDED
    assert snapshot(bench) == before
    bench.end(bench.begin())
    last = before[1]
    assert bench.commit(record("a", b"2")) is None
    owner = bench.owners.get("a")
    assert owner is not None
    assert owner.application.tail is not None
    assert owner.application.tail.sequence == owner.accepted_sequence == last + 1


@pytest.mark.requirement("R41")
@pytest.mark.parametrize(("stand_in_the_way", "expected"), CASES)
def test_a_refused_record_never_shows(
    stand_in_the_way: Callable[[Bench, HostLife], None], expected: HostErrorKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, life = world()
    stand_in_the_way(bench, life)
    changes: list[str] = []
    for name in ("append", "remove"):
        real = getattr(WorkLine, name)
        monkeypatch.setattr(
            WorkLine, name, lambda line, work, real=real, name=name: (changes.append(name), real(line, work))
        )
    assert bench.commit(record("a")) is expected
    assert changes == []


@pytest.mark.requirement("R39", "R44")
def test_the_span_is_one_plain_function_without_foreign_code() -> None:
    for name in ("commit", "submit_local", "_append", "_hold_back"):
        assert inspect.isfunction(getattr(Owners, name))
        assert not inspect.iscoroutinefunction(getattr(Owners, name))
    tree = ast.parse(textwrap.dedent(inspect.getsource(Owners._append)))
    assert not [
        node for node in ast.walk(tree) if isinstance(node, ast.Await | ast.Yield | ast.YieldFrom | ast.AsyncWith)
    ]
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not {name for name in called if "decode" in name or "handler" in name or "events" in name}
    imported = {
        alias.name
        for node in ast.walk(ast.parse(inspect.getsource(owners_module)))
        for alias in getattr(node, "names", [])
    }
    assert not imported & {"asyncio", "threading", "logging", "time"}


def test_a_commit_inside_a_commit_is_found() -> None:
    bench = Bench()
    bench.add("a")
    bench.owners._admit = lambda asking: bench.owners.submit_local("a", record("a"))  # type: ignore[assignment, return-value]
    with pytest.raises(AssertionError, match="a commit inside a commit"):
        bench.owners.submit_local("a", record("a"))
    assert not bench.owners._in_span


@pytest.mark.requirement("R40")
@pytest.mark.parametrize("change", ["removed", "replaced", "sealed"])
@pytest.mark.parametrize("moment", ["before the take", "after the permit", "before the commit", "after the commit"])
def test_a_change_of_owner_never_lets_a_record_into_the_old_queue(change: str, moment: str) -> None:
    held: list[tuple[OwnerKey, Item]] = []

    def hold(key: OwnerKey, item: Item, lane: Lane, permit: Permit | None) -> None:
        held.append((key, item))
        assert permit is not None
        permit.release()

    bench = Bench(hold=hold)
    old = bench.add("a")
    came = record("a", b"x")

    def flip(now: str) -> None:
        if now != moment:
            return
        if change == "sealed":
            bench.owners.set_condition("a", Condition.SEALED)
            return
        bench.owners.remove("a")
        if change == "replaced":
            bench.add("a")

    flip("before the take")
    permit = bench.jobs.try_acquire()
    assert permit is not None
    flip("after the permit")
    target = came.target
    flip("before the commit")
    kind = bench.owners.commit(came, permit)
    flip("after the commit")
    assert target == "a"
    new = bench.owners.get("a")
    if moment == "after the commit":
        assert kind is None
        assert [item for item, _ in bench.events.dropped] == ([] if change == "sealed" else [came])
    else:
        assert (kind, held) == {
            "removed": (K.NOT_FOUND, []),
            "replaced": (None, []),
            "sealed": (None, [("a", came)]),
        }[change]
    if change != "sealed":
        assert old.application.head is None
        assert old.ledger.is_empty
        assert (new is not None) == (change == "replaced")
    bench.check()


@pytest.mark.requirement("R22")
def test_what_is_held_is_the_holds_with_its_permit() -> None:
    held: list[Item] = []
    refuse: list[HostErrorKind | None] = [None]

    def hold(key: OwnerKey, item: Item, lane: Lane, permit: Permit | None) -> HostErrorKind | None:
        if refuse[0] is None:
            held.append(item)
            assert permit is not None
            permit.release()
        return refuse[0]

    bench = Bench(jobs_max=2, hold=hold)
    bench.add("a")
    before = record("a", b"before")
    assert bench.commit(before) is None
    bench.owners.set_condition("a", Condition.SEALED)
    assert bench.owners.begin_next(0) is None
    assert bench.owners.take_queued("a") == [(before, True)]
    for number in range(10):
        assert bench.commit(record("a", str(number).encode())) is None
        assert bench.jobs.in_use == 0
    assert len(held) == 10
    refuse[0] = K.DEADLINE_EXCEEDED
    assert bench.commit(record("a")) is K.DEADLINE_EXCEEDED
    bench.owners.set_condition("a", Condition.REPLAYING)
    ran: list[Any] = []
    while held or bench.owners.has_next:
        while held and (permit := bench.jobs.try_acquire()) is not None:
            item = held.pop(0)
            assert not isinstance(item, Callback)
            assert bench.owners.commit(item, permit, replay=True) is None
            assert bench.jobs.in_use <= 2
        ran += bench.run()
    assert [payload for _, payload in ran] == [str(number) for number in range(10)]
    assert bench.jobs.in_use == 0
    bench.check()


@pytest.mark.requirement("R36", "R46")
def test_an_owner_is_ready_once_however_much_it_has() -> None:
    bench = Bench()
    bench.add("a")
    bench.add("b")
    for _ in range(100):
        assert bench.owners.submit_local("a", record("a")) is None
    assert (bench.owners.ready, bench.events.ready) == (1, 1)  # told at once, and once
    assert bench.owners.submit_local("b", record("b")) is None
    assert (bench.owners.ready, bench.events.ready) == (2, 2)
    work = bench.begin()
    for _ in range(100):
        assert bench.owners.submit_local("a", record("a")) is None
    assert bench.owners.ready == 1
    bench.end(work)
    bench.check()


@pytest.mark.requirement("R97", "R96")
def test_only_new_work_meets_a_full_owner() -> None:
    bench = Bench(OwnerLimits(application_items_max=12))
    bench.add("a")
    for _ in range(12):
        assert bench.commit(record("a")) is None
    running = [bench.begin()]
    bench.owners.release_gate(running[0])
    running.append(bench.begin())
    bench.owners.release_gate(running[1])
    for _ in range(10):  # two run, ten are claimed at the cap
        assert bench.owners.submit_local("a", record("a")) is K.CAPACITY_EXCEEDED
        assert bench.commit(record("a")) is K.CAPACITY_EXCEEDED
        work = bench.begin()
        owner = bench.owners.get("a")
        assert owner is not None
        assert owner.ledger.application.items == 12
        bench.owners.release_gate(work)
        running.append(work)
    for count, work in enumerate(running, 1):
        assert bench.owners.reenter(work, lambda: None)
        bench.end(work)
        assert owner.ledger.application.items == 12 - count
    assert bench.events.rooms == ["a"] * 12


@pytest.mark.requirement("R94")
def test_a_charge_stands_from_acceptance_to_the_handlers_terminal() -> None:
    bench = Bench()
    owner = bench.add("a")
    charge = 256 + 1_000

    def total() -> int:
        entry = owner.ledger.application
        return entry.mailbox.bytes + entry.execution.bytes

    assert bench.commit(record("a", bytes(1_000))) is None
    seen = [total()]
    work = bench.begin()
    seen.append(total())
    bench.owners.detach(work)
    seen.append(total())
    bench.owners.release_gate(work)
    seen.append(total())
    assert bench.owners.reenter(work, lambda: None)
    seen.append(total())
    bench.end(work)
    assert seen == [charge] * 5
    assert total() == 0
    with pytest.raises(AssertionError, match="ended twice"):
        bench.owners.end(work, 0)


@pytest.mark.requirement("R42", "R84")
def test_what_ran_out_here_is_unavailable_to_who_asked_from_elsewhere() -> None:
    assert {kind: kind_for_reply(kind) for kind in K if kind_for_reply(kind) is not kind} == {
        K.CAPACITY_EXCEEDED: K.UNAVAILABLE
    }


def test_a_key_is_taken_once() -> None:
    bench = Bench()
    bench.add("a")
    with pytest.raises(Exception, match="there is an owner 'a' already"):
        bench.add("a")
    assert bench.owners.remove("a")
    assert not bench.owners.remove("a")
    assert bench.events.removed == [("a", K.NOT_FOUND)]
    bench.add("a")


@pytest.mark.requirement("R107")
def test_removal_ends_what_waits_in_both_lanes_once() -> None:
    bench = Bench()
    bench.add("a")
    came = [record("a", b"1"), record("a", b"2", RecordKind.REQUEST, operation_id=4)]
    for each in came:
        assert bench.commit(each) is None
    bench.lifecycle("a")
    assert bench.jobs.in_use == 2
    bench.owners.remove("a")
    assert bench.jobs.in_use == 0
    assert [item for item, _ in bench.events.dropped if item in came] == came
    assert {kind for _, kind in bench.events.dropped} == {K.NOT_FOUND}
    assert len(bench.events.dropped) == 3
    assert (bench.owners.ready, bench.owners.begin_next(0)) == (0, None)
    assert not bench.owners.cancel(SourceId("peer"), 4)
    bench.check()


def test_a_cancelled_request_leaves_from_the_middle() -> None:
    bench = Bench()
    bench.add("a")
    for number in range(5):
        assert bench.commit(record("a", str(number).encode(), RecordKind.REQUEST, operation_id=number)) is None
    for number in (0, 2, 4):
        assert bench.owners.cancel(SourceId("peer"), number)
        bench.check()
    assert bench.jobs.in_use == 2
    assert bench.events.rooms == ["a"] * 3
    assert [payload for _, payload in bench.run()] == ["1", "3"]
    assert not bench.owners.cancel(SourceId("peer"), 1)
    assert bench.commit(record("a", b"", RecordKind.REQUEST, operation_id=9)) is None
    assert bench.owners.cancel(SourceId("peer"), 9)
    assert bench.owners.ready == 0
    bench.check()
