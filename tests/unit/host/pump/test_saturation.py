"""With every permit in use nothing is taken, kept aside, polled or lost."""

from __future__ import annotations

import gc
import types
from collections import deque
from contextvars import Context

import pytest

from callyard.host.errors import HostErrorKind
from callyard.host.jobs import Permit
from callyard.testing.scripted_transport import ScriptedTransport
from callyard.testing.stepped_loop import SteppedLoop
from callyard.transport.port import Completion, Record
from tests.unit.host.pump.kit import FakeIngress, World, per_source, world

PUSHED = 100_000
SOURCES = 4


class LeanIngress(FakeIngress):
    """Keeps what is queued, and counts the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.begun_count = 0
        self.controlled_count = 0

    def commit(self, record: Record, permit: Permit) -> HostErrorKind | None:
        permit.to_queued()
        self.queued.append((record, permit))
        return None

    def control(self, record: Record) -> None:
        self.controlled_count += 1


def census(w: World) -> int:
    """Entries of all containers that the pump, the job queue and the owners' queues hold, and records beside them."""
    seen: set[int] = set()
    todo: list[object] = [w.pump, w.jobs, w.ingress]
    total = 0
    skipped = (ScriptedTransport, SteppedLoop, Context, type, types.ModuleType, types.FunctionType, types.CodeType)
    while todo:
        found = todo.pop()
        if id(found) in seen or isinstance(found, skipped):
            continue
        seen.add(id(found))
        if isinstance(found, (dict, list, set, deque)):
            total += len(found)
        elif isinstance(found, (Record, Completion)):
            total += 1
        todo.extend(gc.get_referents(found))
    return total


@pytest.mark.requirement("R35", "R93", "R32")
@pytest.mark.parametrize("jobs_max", [1, 100])
def test_a_hundred_thousand_records_wait_in_the_transport(jobs_max: int) -> None:
    with world(jobs_max, ingress=LeanIngress()) as w:
        sources = w.add(*"abcd")
        for source in sources:
            source.signal()
        w.settle()
        idle = census(w)
        for source in sources:
            source.one_way(count=PUSHED // SOURCES)
        w.settle()
        taken = w.transport.counts["take"]
        assert taken == len(w.ingress.queued) == jobs_max - w.in_use[0]
        # One job is a record, and its entry in the owner's queue; a source is an entry, a waiter, a place in the line.
        bound = idle + 2 * jobs_max + 8 * SOURCES
        assert census(w) <= bound
        delivered: set[tuple[str, int]] = set()
        rounds = 0
        while w.ingress.queued:
            assert w.transport.counts["take"] - len(delivered) <= jobs_max
            for record, permit in [w.ingress.queued.popleft() for _ in range(len(w.ingress.queued))]:
                assert (record.source, record.sequence) not in delivered
                delivered.add((record.source, record.sequence))
                permit.release()
            w.loop.settle()
            rounds += 1
            if rounds % 5_000 == 1:
                assert census(w) <= bound
            if jobs_max == 1 and rounds == 5_000:
                break  # enough of one at a time
        if jobs_max > 1:
            assert len(delivered) == PUSHED
        assert sum(source.unread for source in sources) == PUSHED - len(delivered) - len(w.ingress.queued)
        assert w.ingress.refusals == []


@pytest.mark.requirement("R114", "R35", "R30")
def test_control_has_no_queue_of_its_own() -> None:
    ingress = LeanIngress()
    with world(jobs_max=1, ingress=ingress) as w:
        (held,) = w.hold(1)
        (source,) = w.add("a")
        source.signal()
        w.settle()
        idle = census(w)
        source.control(count=10_000)
        w.settle()
        assert census(w) <= idle + 8
        held.release()
        w.turn()
        assert ingress.controlled_count == 64
        assert census(w) <= idle + 8
        w.settle()
        assert ingress.controlled_count == 10_000
        assert w.jobs.in_use == 0


@pytest.mark.requirement("R34")
def test_a_saturated_pump_is_not_scheduled() -> None:
    with world(jobs_max=1) as w:
        w.hold(1)
        for source in w.add("a", "b", "c"):
            source.one_way(count=3)
        w.turn()
        wakes, counts = w.pump.statistics().wakes, w.transport.counts.copy()
        for _ in range(20):
            w.turn()
        assert w.pump.statistics().wakes == wakes
        assert w.transport.counts == counts
        assert w.ingress.refusals == []


@pytest.mark.requirement("R56", "R16")
def test_one_source_among_a_thousand_floods_is_served_in_its_turn() -> None:
    with world(jobs_max=1) as w:
        floods = w.add(*(f"flood-{n}" for n in range(1_000)))
        for flood in floods:
            flood.endless(lambda n, flood=flood: flood.record())  # type: ignore[misc]
        w.settle()
        (session,) = w.add("session", kind=w.transport.kind_of(floods[0].id))
        session.one_way()
        w.settle()
        for _ in range(1_001):
            w.begin()
            w.loop.settle()
        assert per_source(w.ingress.committed)["session"] == 1
