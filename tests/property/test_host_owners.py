"""Owners beside a naive model: lists and counts, one event at a time, no tasks.

Owners with gates of their own and shared ones; records, local and lifecycle work of several sizes come, turns begin,
wait, yield, come in again, end; owners are sealed, opened, removed; requests are cancelled; time passes. After each
step the ledgers, the permits and who is inside which gate are the model's; in the end all has run, in order, once.
Source: job-queue R36, R38, R39, R41, R43, R45, R94-R98, R107, R117.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from callyard.host.errors import HostError, HostErrorKind
from callyard.host.gates import Gate
from callyard.host.ledger import Lane, OwnerLimits
from callyard.host.owners import Callback, Condition, Item, Owner, OwnerKey, Owners, Work
from callyard.transport.port import Record, RecordKind, SourceId
from tests.unit.host.owners.kit import Bench, record

KEYS = ["own 1", "own 2", "shared 1", "shared 2", "shared 3"]
LIMITS = OwnerLimits(
    application_items_max=5,
    application_bytes_max=3_000,
    lifecycle_items_max=12,
    lifecycle_bytes_max=5_000,
    lifecycle_burst_max=3,
)
JOBS_MAX = 12
keys = st.sampled_from(KEYS)
sizes = st.sampled_from([0, 0, 10, 700, 2_000])


class ModelWork:
    def __init__(self, number: int, charge: int, has_permit: bool) -> None:
        self.number = number
        self.charge = charge
        self.has_permit = has_permit


class ModelOwner:
    def __init__(self) -> None:
        self.queued: dict[Lane, list[ModelWork]] = {Lane.APPLICATION: [], Lane.LIFECYCLE: []}
        self.running: dict[Lane, list[ModelWork]] = {Lane.APPLICATION: [], Lane.LIFECYCLE: []}
        self.accepted = 0
        self.lifecycle_run = 0
        self.is_sealed = False

    def has_room(self, lane: Lane, charge: int) -> bool:
        items_max, bytes_max = {
            Lane.APPLICATION: (LIMITS.application_items_max, LIMITS.application_bytes_max),
            Lane.LIFECYCLE: (LIMITS.lifecycle_items_max, LIMITS.lifecycle_bytes_max),
        }[lane]
        held = self.queued[lane] + self.running[lane]
        return len(held) < items_max and sum(work.charge for work in held) + charge <= bytes_max


class OwnersMachine(RuleBasedStateMachine):
    owners_type: type[Owners] = Owners

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(LIMITS, jobs_max=JOBS_MAX, owners_type=self.owners_type)
        self.gate = self.bench.owners.new_gate()
        self.model: dict[OwnerKey, ModelOwner] = {}
        self.numbers = count(1)
        self.now_ms = 0
        self.turns: dict[Work, tuple[ModelOwner, Lane, ModelWork]] = {}
        self.inside: dict[Gate, Work] = {}
        self.yielded: list[Work] = []
        self.last: Work | None = None
        self.dropped: list[int] = []
        for key in KEYS:
            self.make(key)

    def make(self, key: OwnerKey) -> None:
        self.bench.add(key, gate=self.gate if key.startswith("shared") else None)
        self.model[key] = ModelOwner()

    def submit(self, key: OwnerKey, item: Item, lane: Lane, size: int, is_received: bool) -> None:
        number = int(item.payload[:6]) if isinstance(item, Record) else item.run(None)
        model = self.model.get(key)
        permit = self.bench.jobs.try_acquire() if is_received else None
        if is_received:
            if permit is None:
                return
            assert isinstance(item, Record)
            kind = self.bench.owners.commit(item, permit)
            if kind is not None:
                permit.release()
        else:
            kind = self.bench.owners.submit_local(key, item, lane)
        charge = size + LIMITS.fixed_work_bytes
        if model is None:
            assert kind is HostErrorKind.NOT_FOUND
        elif model.is_sealed and lane is Lane.APPLICATION:
            assert kind is HostErrorKind.UNAVAILABLE
        elif not model.has_room(lane, charge):
            assert kind is HostErrorKind.CAPACITY_EXCEEDED
        else:
            assert kind is None
            model.accepted += 1
            model.queued[lane].append(ModelWork(number, charge, is_received))

    def make_record(self, key: OwnerKey, size: int, kind: RecordKind = RecordKind.ONE_WAY) -> tuple[Record, int]:
        number = next(self.numbers)
        payload = f"{number:06}".encode() + bytes(size)
        return record(key, payload, kind, operation_id=number), len(payload)

    @rule(key=keys, size=sizes, is_received=st.booleans(), is_request=st.booleans())
    def come(self, key: OwnerKey, size: int, is_received: bool, is_request: bool) -> None:
        item, size = self.make_record(key, size, RecordKind.REQUEST if is_request else RecordKind.ONE_WAY)
        self.submit(key, item, Lane.APPLICATION, size, is_received)

    @rule(key=keys, size=sizes)
    def come_as_lifecycle(self, key: OwnerKey, size: int) -> None:
        number = next(self.numbers)
        self.submit(key, Callback(lambda turn: number, bytes=size), Lane.LIFECYCLE, size, False)

    @rule()
    def begin(self) -> None:
        if self.last is not None and self.last in self.turns:  # one runner: it ended, or it waits
            self.bench.owners.detach(self.last)
        work = self.last = self.bench.owners.begin_next(self.now_ms)
        if work is None:
            for key, waiting in self.model.items():
                owner = self.bench.owners.get(key)
                assert owner is not None
                has_work = waiting.queued[Lane.LIFECYCLE] or (
                    waiting.queued[Lane.APPLICATION] and not waiting.is_sealed
                )
                assert not has_work or owner.gate in self.inside or any(w.owner is owner for w in self.turns), key
            return
        key = work.owner.key
        model = self.model[key]
        application, lifecycle = model.queued[Lane.APPLICATION], model.queued[Lane.LIFECYCLE]
        may_run = bool(application) and not model.is_sealed
        is_owed = model.lifecycle_run >= LIMITS.lifecycle_burst_max and may_run
        expected = Lane.APPLICATION if not lifecycle or is_owed else Lane.LIFECYCLE
        assert work.lane is expected
        model.lifecycle_run = model.lifecycle_run + 1 if expected is Lane.LIFECYCLE else 0
        assert model.queued[expected]
        mine = model.queued[expected].pop(0)
        item = work.item
        assert (int(item.payload[:6]) if isinstance(item, Record) else item.run(None)) == mine.number  # type: ignore[union-attr]
        model.running[expected].append(mine)
        assert work.owner.gate not in self.inside
        assert work.hold is not None
        assert work.hold.is_current
        self.inside[work.owner.gate] = work
        if work.permit is not None:
            work.permit.release()
        mine.has_permit = False
        self.turns[work] = (model, expected, mine)

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.finish(data.draw(st.sampled_from(list(self.inside.values()))))

    def finish(self, work: Work) -> None:
        model, lane, mine = self.turns.pop(work)
        del self.inside[work.owner.gate]
        self.bench.owners.end(work, self.now_ms)
        model.running[lane].remove(mine)
        self.look_inside()

    def look_inside(self) -> None:
        """Whom the gate went to, of those that had yielded."""
        for work in list(self.yielded):
            if work.hold is not None:
                self.yielded.remove(work)
                assert work.owner.gate not in self.inside
                self.inside[work.owner.gate] = work

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def yields(self, data: st.DataObject) -> None:
        work = data.draw(st.sampled_from(list(self.inside.values())))
        del self.inside[work.owner.gate]
        self.bench.owners.release_gate(work)
        self.yielded.append(work)
        self.look_inside()

    @precondition(lambda self: any(work.waiter is None for work in self.yielded))
    @rule(data=st.data())
    def reenter(self, data: st.DataObject) -> None:
        work = data.draw(st.sampled_from([work for work in self.yielded if work.waiter is None]))
        if work.owner.condition is Condition.REMOVED:
            self.yielded.remove(work)  # its turn is told, and ends without the gate
            model, lane, mine = self.turns.pop(work)
            self.bench.owners.end(work, self.now_ms)
            model.running[lane].remove(mine)
            return
        self.bench.owners.reenter(work, lambda: None)
        self.look_inside()

    @rule(key=keys, is_sealed=st.booleans())
    def seal(self, key: OwnerKey, is_sealed: bool) -> None:
        if key in self.model:
            self.bench.owners.set_condition(key, Condition.SEALED if is_sealed else Condition.OPEN)
            self.model[key].is_sealed = is_sealed

    @precondition(lambda self: any(model.is_sealed for model in self.model.values()))
    @rule(data=st.data())
    def take_queued(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from([key for key, model in self.model.items() if model.is_sealed]))
        taken: list[Any] = self.bench.owners.take_queued(key)
        queued = self.model[key].queued[Lane.APPLICATION]
        assert [int(item.payload[:6]) for item, _ in taken] == [work.number for work in queued]
        queued.clear()

    @rule(key=keys)
    def remove_or_make(self, key: OwnerKey) -> None:
        if key not in self.model:
            self.make(key)
            return
        model = self.model.pop(key)
        before = len(self.bench.events.dropped)
        assert self.bench.owners.remove(key)
        dropped = self.bench.events.dropped[before:]
        numbers = [int(item.payload[:6]) if isinstance(item, Record) else item.run(None) for item, _ in dropped]
        assert numbers == [work.number for lane in (Lane.LIFECYCLE, Lane.APPLICATION) for work in model.queued[lane]]
        self.look_inside()

    @rule(number=st.integers(1, 60))
    def cancel(self, number: int) -> None:
        is_found = self.bench.owners.cancel(SourceId("peer"), number)
        for model in self.model.values():
            for work in model.queued[Lane.APPLICATION]:
                if work.number == number and is_found:
                    model.queued[Lane.APPLICATION].remove(work)
                    self.look_inside()
                    return
        assert not is_found

    @rule(duration_ms=st.integers(1, 15))
    def pass_time(self, duration_ms: int) -> None:
        self.now_ms += duration_ms

    @invariant()
    def is_as_the_model_has_it(self) -> None:
        self.bench.check()
        queued_permits = 0
        for key, model in self.model.items():
            owner = self.bench.owners.get(key)
            assert owner is not None
            assert owner.accepted_sequence == model.accepted
            for lane in Lane:
                ledger = owner.ledger.lanes[lane]
                for column, works in ((ledger.mailbox, model.queued[lane]), (ledger.execution, model.running[lane])):
                    assert column == (len(works), sum(work.charge for work in works))
                queued_permits += sum(work.has_permit for work in model.queued[lane])
        status = self.bench.jobs.status()
        assert (status.reserved, status.queued) == (0, queued_permits)
        for gate, work in self.inside.items():
            assert gate.holder is work.hold

    def teardown(self) -> None:
        """Everybody may go on: everything that was accepted runs."""
        for key, model in self.model.items():
            self.bench.owners.set_condition(key, Condition.OPEN)
            model.is_sealed = False
        for _ in range(1_000):
            for work in list(self.inside.values()):
                self.finish(work)
            for work in [work for work in self.yielded if work.waiter is None]:
                if work.owner.condition is Condition.REMOVED:
                    self.yielded.remove(work)
                    model, lane, mine = self.turns.pop(work)
                    self.bench.owners.end(work, self.now_ms)
                    model.running[lane].remove(mine)
                else:
                    self.bench.owners.reenter(work, lambda: None)
                    self.look_inside()
            self.begin()
            if not self.turns and not self.bench.owners.has_next:
                break
        assert not self.turns
        assert not any(model.queued[lane] for model in self.model.values() for lane in Lane)
        assert self.bench.jobs.in_use == 0
        assert self.bench.owners.is_quiet
        self.bench.check()


OwnersMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50)
TestOwners = pytest.mark.requirement(
    *("R36", "R38", "R39", "R41", "R43", "R45", "R94", "R95", "R96", "R97", "R98", "R107", "R117")
)(OwnersMachine.TestCase)


class RunsInPlaceWhenFull(Owners):
    """A real one: what did not fit was put in front, beyond the cap."""

    def submit_local(self, key: OwnerKey, item: Item, lane: Lane = Lane.APPLICATION, *, replay: bool = False) -> Any:
        kind = super().submit_local(key, item, lane, replay=replay)
        if kind is HostErrorKind.CAPACITY_EXCEEDED:
            owner = self._by_key[key]
            owner.lines[lane].append(Work(owner, item, lane, 0, None, 0))
            return None
        return kind


class AddsThenRemoves(Owners):
    """A refused record used up a sequence number."""

    def commit(self, record: Record, permit: Any, *, replay: bool = False) -> HostErrorKind | None:
        kind = super().commit(record, permit, replay=replay)
        owner = self._by_key.get(record.target)
        if kind is HostErrorKind.CAPACITY_EXCEEDED and owner is not None:
            owner.accepted_sequence += 1
        return kind


class ChargesTwice(Owners):
    """Once in the mailbox, once more at the claim."""

    def begin_next(self, now_ms: int) -> Work | None:
        work = super().begin_next(now_ms)
        if work is not None:
            work.owner.lines[work.lane].bytes += work.charge
        return work


class GivesBackAtTheClaim(Owners):
    """The reservation ended when the handler began."""

    def begin_next(self, now_ms: int) -> Work | None:
        work = super().begin_next(now_ms)
        if work is not None:
            work.owner.lines[work.lane].give_back(work.charge, claimed=True)
        return work

    def end(self, work: Work, now_ms: int) -> None:
        work.owner.lines[work.lane].try_reserve(work.charge)
        work.owner.lines[work.lane].claim(work.charge)
        super().end(work, now_ms)


class KeepsPermitsOfTheDropped(Owners):
    def _free(self, work: Work) -> None:
        work.permit = None
        super()._free(work)


class ForgetsTheDebt(Owners):
    """It did not outlive giving up the place."""

    def _put_down(self, owner: Owner) -> None:
        owner.lifecycle_run = 0
        super()._put_down(owner)


class LosesWhoHasWorkLeft(Owners):
    """An owner with work left was not put back."""

    def _make_ready(self, owner: Owner) -> None: ...


class KeepsTheGateOfTheRemoved(Owners):
    """An owner that was removed with the gate in its hand took it along."""

    def _rest(self, owner: Owner) -> None:
        owner.hold = None
        super()._rest(owner)


class BeginsSealedWork(Owners):
    """A sealed owner's queue ran on."""

    def set_condition(self, key: OwnerKey, condition: Condition) -> None:
        super().set_condition(key, Condition.REPLAYING if condition is Condition.SEALED else condition)


class AnswersTheWrongRequest(Owners):
    """The index kept what had begun, and a late cancellation took it out of the queue."""

    def _forget_request(self, work: Work) -> None: ...


FAULTS = [
    *(RunsInPlaceWhenFull, AddsThenRemoves, ChargesTwice, GivesBackAtTheClaim, KeepsPermitsOfTheDropped),
    *(ForgetsTheDebt, LosesWhoHasWorkLeft, KeepsTheGateOfTheRemoved, BeginsSealedWork, AnswersTheWrongRequest),
]
FAULTY = settings(
    max_examples=600,
    stateful_step_count=50,
    phases=[Phase.generate],
    database=None,
    derandomize=True,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.requirement("R43", "R94", "R95", "R98", "R107", "R117")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found(fault: type[Owners]) -> None:
    faulty = type("Faulty", (OwnersMachine,), {"owners_type": fault})
    with pytest.raises((AssertionError, KeyError, HostError)):
        run_state_machine_as_test(faulty, settings=FAULTY)
