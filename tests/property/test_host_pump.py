"""The pump beside a naive model: for each source the list of what it sent, and how far it was taken.

Sources of every kind come, send, close and come back under their names; waits are cancelled; turns begin or do not; the
loop makes one step or comes to rest. At every moment what was taken is a beginning of what was sent, in order, and no
more is out than there are permits; at rest nobody is stuck.

Source: job-queue R15, R18, R23, R25, R27, R29, R31, R32, R48, R55.
"""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from callyard.host.errors import HostErrorKind
from callyard.host.pump import RotationLimits
from callyard.testing.scripted_transport import Item, ScriptedSource
from callyard.transport.port import Completion, HeadKind, Record, RecordKind, SourceKind
from tests.unit.host.pump.kit import FakeIngress, World

SUBSCRIBERS = ["s1", "s2", "s3"]
NAMES = st.sampled_from("abc")
WHAT = st.sampled_from(["one_way", "request", "control", "malformed", "publish", "completion", "refused"])


class LoggingIngress(FakeIngress):
    """Each call in the order in which it came, as the sequence number or operation id of what it was about."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Item] = []
        self.subscribers = SUBSCRIBERS
        self.verdict = lambda record: HostErrorKind.NOT_FOUND if record.target == "nobody" else None

    def refused(self, record: Record, kind: HostErrorKind) -> None:
        super().refused(record, kind)
        self.log.append(record)

    def control(self, record: Record) -> None:
        super().control(record)
        self.log.append(record)

    def complete(self, completion: Completion) -> None:
        super().complete(completion)
        self.log.append(completion)


class PumpMachine(RuleBasedStateMachine):
    @initialize(jobs_max=st.integers(1, 6), bytes_max=st.sampled_from([1, 100, 1 << 20]))
    def begin(self, jobs_max: int, bytes_max: int) -> None:
        self.jobs_max = jobs_max
        self.ingress = LoggingIngress()
        self.world = World(jobs_max, limits=RotationLimits(bytes_max=bytes_max), ingress=self.ingress)
        self.world.start()
        self.open: dict[str, ScriptedSource] = {}
        self.all: list[ScriptedSource] = []
        self.sent: dict[ScriptedSource, list[Item]] = {}
        self.operations: dict[int, ScriptedSource] = {}
        self.cancelled: set[str] = set()
        self.is_at_rest = True
        self.is_receiving = True
        self.next_id = 1

    # What happens.

    @rule(
        name=NAMES, kind=st.sampled_from(SourceKind), what=st.lists(WHAT, min_size=1, max_size=8), rests=st.booleans()
    )
    def send(self, name: str, kind: SourceKind, what: list[str], rests: bool) -> None:
        source = self.open.get(name)
        if source is None:
            source = self.open[name] = self.world.transport.add_source(name, kind)
            self.all.append(source)
            self.sent[source] = []
        for each in what:
            item: Item
            if each == "completion":
                item = Completion(operation_id=self.next_id)
            elif each == "refused":
                item = source.record(RecordKind.ONE_WAY, "nobody", operation_id=self.next_id)
            else:
                item = source.record(RecordKind(each), "spot", payload=bytes(40), operation_id=self.next_id)
            self.operations[self.next_id] = source
            self.next_id += 1
            self.sent[source].append(item)
            source.push(item, signal=False)
        source.signal()
        self.cancelled.discard(name)
        self.is_at_rest = False
        if rests:
            self.rest()

    @rule(name=NAMES, times=st.integers(1, 3))
    def signal(self, name: str, times: int) -> None:
        if name in self.open:
            self.open[name].signal(times)
            self.cancelled.discard(name)
            self.is_at_rest = False

    @rule(name=NAMES)
    def cancel(self, name: str) -> None:
        if name in self.open:
            self.world.pump.cancel_wait(self.open[name].id)
            self.cancelled.add(name)

    @rule(name=NAMES)
    def close(self, name: str) -> None:
        if name in self.open:
            self.open.pop(name).close()
            self.cancelled.discard(name)
            self.is_at_rest = False

    @rule(count=st.integers(1, 4))
    def begin_turns(self, count: int) -> None:
        self.world.begin(count)
        self.is_at_rest = False

    @rule()
    def step(self) -> None:
        self.world.turn()
        self.is_at_rest = False

    @rule()
    def rest(self) -> None:
        self.world.settle()
        self.is_at_rest = True

    @precondition(lambda self: self.is_receiving)
    @rule(chance=st.integers(0, 20))
    def stop_receiving(self, chance: int) -> None:
        if chance == 13:  # seldom: little happens afterwards
            self.world.pump.stop_receiving()
            self.is_receiving = False

    # What must hold.

    @invariant()
    def parts_agree_with_themselves(self) -> None:
        assert self.world.errors == []
        self.world.jobs.check_invariants()
        self.world.pump.check_invariants()

    @invariant()
    def no_more_is_out_than_there_are_permits(self) -> None:
        assert len(self.ingress.queued) <= self.world.jobs.in_use <= self.jobs_max
        status = self.world.pump.statistics()
        assert status.waiting + status.granted == len(self.world.pump._line)
        assert self.world.jobs.waiters <= len(self.open) + status.publishing

    @invariant()
    def what_was_taken_is_a_beginning_of_what_was_sent(self) -> None:
        for source, sent in self.sent.items():
            taken = source.taken + source.completions_taken
            if source.kind is SourceKind.MESH:
                records = [item for item in sent if isinstance(item, Record)]
                completions = [item for item in sent if isinstance(item, Completion)]
                expected = [*records[: source.taken], *completions[: source.completions_taken]]
            else:
                expected = sent[:taken]
            seen = self.seen_of(source)
            ids = [item.operation_id for item in expected]
            assert sorted(seen) == sorted(ids), f"{source.id}: handed on {seen}, taken {ids}"
            for kept in (self.ingress.committed, self.ingress.log):
                own = [item.operation_id for item in kept if item.operation_id in set(ids)]
                if source.kind is not SourceKind.MESH:
                    assert own == sorted(own), f"{source.id}: out of order"

    def seen_of(self, source: ScriptedSource) -> list[int]:
        """Operation ids that reached the ingress; a publish once, however many of its targets it has reached."""
        found = [item.operation_id for item in [*self.ingress.committed, *self.ingress.log]]
        return [each for each, _ in groupby(sorted(found)) if self.operations[each] is source]

    @invariant()
    def at_rest_nobody_is_stuck(self) -> None:
        if not self.is_at_rest:
            return
        for name, source in self.open.items():
            head = self.world.transport.head_kind(source.id)
            assert head is not HeadKind.COMPLETION, f"{name}: a completion waits"
            if head is HeadKind.ORDINARY and name not in self.cancelled and self.is_receiving:
                assert self.world.jobs.in_use == self.jobs_max, f"{name}: waits beside a free permit"

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        try:
            for name in self.cancelled:
                world.pump.look(self.open[name].id)
            world.drain()
            self.what_was_taken_is_a_beginning_of_what_was_sent()
            assert world.in_use == (0, 0)
            assert world.jobs.waiters == 0
            if self.is_receiving:
                assert all(source.unread == 0 for source in self.open.values())
            published = [record for record in self.ingress.begun if record.kind is RecordKind.PUBLISH]
            by_record = groupby(sorted(published, key=lambda record: record.operation_id), lambda r: r.operation_id)
            for _, children in by_record:
                assert [child.target for child in children] == SUBSCRIBERS
        finally:
            world.pump.close()
            world.loop.close()


TestPump = pytest.mark.requirement("R15", "R18", "R23", "R27", "R29", "R31", "R32", "R48", "R55")(PumpMachine.TestCase)
TestPump.settings = settings(settings.default, stateful_step_count=40)
