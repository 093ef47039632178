"""A permit before a record, what becomes of it by kind, and completions without one."""

from __future__ import annotations

import pytest

from callyard.host.errors import HostErrorKind
from callyard.host.jobs import JobQueue, JobQueueStatus, Permit
from callyard.host.pump import Ingress, Pump, PumpStatistics
from callyard.transport.port import Record, RecordKind, SourceKind
from tests.unit.host.pump.kit import names, sequences, world

EVERY_KIND = list(SourceKind)
CONTROL_TYPES = ["heartbeat", "topology", "relocation", "send_ready", "handshake", "bind", "unbind"]


@pytest.mark.requirement("R15", "R93")
def test_without_a_permit_nothing_is_received() -> None:
    with world(jobs_max=1) as w:
        (held,) = w.hold(1)
        (source,) = w.add("a")
        source.one_way(count=5)
        w.settle()
        assert w.transport.counts["take"] == 0
        assert source.unread == 5
        assert w.jobs.status().waiters == 1
        held.release()
        w.settle()
        assert w.transport.counts["take"] == 1
        w.drain()
        assert sequences(w.ingress.begun, "a") == [1, 2, 3, 4, 5]


@pytest.mark.requirement("R20", "R54")
@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("record_kind", list(RecordKind))
def test_every_record_of_every_source_waits_for_a_permit(kind: SourceKind, record_kind: RecordKind) -> None:
    with world(jobs_max=1) as w:
        (held,) = w.hold(1)
        w.ingress.subscribers = ["spot"]
        (source,) = w.add("a", kind=kind)
        source.push(source.record(record_kind, "spot", operation_id=7))
        w.settle()
        assert w.transport.counts["take"] == 0
        held.release()
        w.settle()
        assert w.transport.counts["take"] == 1
        seen = [*w.ingress.committed, *w.ingress.controlled, *(record for record, _ in w.ingress.refusals)]
        assert [record.kind for record in seen] == [record_kind]


@pytest.mark.requirement("R17")
def test_application_record_carries_its_permit_into_the_owners_queue() -> None:
    with world(jobs_max=2) as w:
        (source,) = w.add("a")
        source.one_way()
        w.settle()
        assert w.in_use == (0, 1)
        w.begin()
        assert w.in_use == (0, 0)


@pytest.mark.requirement("R18")
@pytest.mark.parametrize("what", ["control", "malformed", "refused"])
def test_what_reaches_no_turn_gives_its_permit_back(what: str) -> None:
    with world(jobs_max=1) as w:
        (source,) = w.add("a")
        if what == "control":
            source.control()
        elif what == "malformed":
            source.malformed()
        else:
            w.ingress.verdict = lambda record: HostErrorKind.NOT_FOUND if record.target == "nobody" else None
            source.one_way("nobody")
        source.one_way("spot")
        w.settle()
        assert w.jobs.in_use == 1
        assert [record.target for record in w.ingress.committed] == ["spot"]
        w.begin()
        assert w.in_use == (0, 0)


@pytest.mark.requirement("R18")
def test_permit_of_control_is_held_while_it_is_handled_and_gone_after() -> None:
    with world(jobs_max=1) as w:
        seen: list[tuple[int, int]] = []
        w.ingress.on_control = lambda record: seen.append(w.in_use)
        (source,) = w.add("a")
        source.control(count=3)
        w.settle()
        assert seen == [(1, 0)] * 3
        assert w.in_use == (0, 0)


@pytest.mark.requirement("R60")
@pytest.mark.parametrize("operation_id", [0, 9])
def test_malformed_record_is_refused_and_never_committed(operation_id: int) -> None:
    with world() as w:
        (source,) = w.add("a")
        source.malformed(operation_id=operation_id)
        w.settle()
        ((record, kind),) = w.ingress.refusals
        # Who asked has an operation id and is answered; of the others nothing but the record is left.
        assert (record.kind, record.operation_id, kind) == (
            RecordKind.MALFORMED,
            operation_id,
            HostErrorKind.PROTOCOL_ERROR,
        )
        assert w.ingress.committed == []
        assert w.pump.statistics().malformed == 1


@pytest.mark.requirement("R23")
@pytest.mark.parametrize("kind", [SourceKind.MESH, SourceKind.CLIENT_SERVER, SourceKind.SERVICE])
def test_completion_at_the_head_needs_no_permit(kind: SourceKind) -> None:
    with world(jobs_max=1) as w:
        w.hold(1)
        (source,) = w.add("a", kind=kind)
        source.complete(11)
        source.complete(12, error="unavailable")
        w.settle()
        assert [completion.operation_id for completion in w.ingress.completed] == [11, 12]
        assert w.jobs.status().waits == 0
        assert w.transport.counts["take"] == 0


@pytest.mark.requirement("R23")
def test_completion_of_a_mesh_peer_passes_its_waiting_records() -> None:
    with world(jobs_max=1) as w:
        (held,) = w.hold(1)
        (peer,) = w.add("a", kind=SourceKind.MESH)
        peer.one_way(count=2)
        w.settle()
        peer.complete(11)
        w.settle()
        assert [completion.operation_id for completion in w.ingress.completed] == [11]
        assert w.transport.counts["take"] == 0
        assert w.jobs.status().waiters == 1
        held.release()
        w.drain()
        assert sequences(w.ingress.begun, "a") == [1, 2]


@pytest.mark.requirement("R23")
def test_completion_behind_a_record_keeps_its_place() -> None:
    with world(jobs_max=1) as w:
        (held,) = w.hold(1)
        (peer,) = w.add("a", kind=SourceKind.CLIENT_SERVER)
        peer.one_way()
        peer.complete(11)
        peer.one_way()
        w.settle()
        assert w.ingress.completed == []
        assert w.transport.counts["take"] == 0
        held.release()
        w.settle()
        taken = [call.name for call in w.transport.calls if call.name.startswith("take")]
        assert taken == ["take", "take_completion"]  # at the head now, though the one permit is in use
        w.drain()
        assert sequences(w.ingress.begun, "a") == [1, 2]


@pytest.mark.requirement("R24")
def test_reply_that_shows_only_after_an_ordinary_receive_takes_a_permit() -> None:
    with world(jobs_max=1) as w:
        (held,) = w.hold(1)
        completed: list[int] = []
        w.ingress.on_control = lambda record: completed.append(record.operation_id)
        (source,) = w.add("a")
        source.control("reply", operation_id=11)
        w.settle()
        assert completed == []
        assert w.jobs.status().waits == 1
        held.release()
        w.settle()
        assert completed == [11]
        assert w.in_use == (0, 0)


@pytest.mark.requirement("R30", "R114")
@pytest.mark.parametrize("message_type", CONTROL_TYPES)
def test_control_is_received_in_its_place_only(message_type: str) -> None:
    with world(jobs_max=1) as w:
        (held,) = w.hold(1)
        order: list[str] = []
        w.ingress.on_control = lambda record: order.append(record.message_type)
        w.ingress.verdict = lambda record: order.append(record.target)  # type: ignore[func-returns-value]
        (source,) = w.add("a")
        source.one_way("first")
        source.control(message_type)
        source.one_way("second")
        w.settle()
        assert order == []
        assert w.ingress.completed == []
        held.release()
        w.drain()
        assert order == ["first", message_type, "second"]


@pytest.mark.requirement("R99")
@pytest.mark.parametrize("size", [0, 8 << 20])
def test_a_record_is_one_job_whatever_its_size(size: int) -> None:
    with world() as w:
        (source,) = w.add("a")
        source.one_way(payload=bytes(size))
        w.settle()
        assert w.in_use == (0, 1)
        assert len(w.ingress.committed[0].payload) == size


@pytest.mark.requirement("R27")
@pytest.mark.parametrize("times", [1, 100])
def test_a_source_has_one_waiter(times: int) -> None:
    with world(jobs_max=1) as w:
        (held,) = w.hold(1)
        (source,) = w.add("a")
        source.one_way(count=3)
        for _ in range(times):
            source.signal()
            w.settle()
        assert w.jobs.status().waiters == 1
        wakes = w.pump.statistics().wakes
        source.signal(100)
        assert not w.pump.statistics().wakes - wakes
        held.release()
        w.drain()
        assert sequences(w.ingress.begun, "a") == [1, 2, 3]


@pytest.mark.requirement("R16")
def test_the_oldest_waiting_source_is_first_and_nobody_passes() -> None:
    with world(jobs_max=1) as w:
        (held,) = w.hold(1)
        sources = w.add("a", "b", "c")
        for source in sources:
            source.one_way()
            w.settle()
        assert w.jobs.status().waiters == 3
        sources[1].close()
        (late,) = w.add("d")
        w.loop.call_soon(late.one_way)  # arrives with the permit that comes back
        w.loop.call_soon(held.release)
        w.drain()
        assert names(w.ingress.begun) == ["a", "c", "d"]


@pytest.mark.requirement("R29")
def test_a_batch_takes_as_many_as_there_are_permits() -> None:
    with world(jobs_max=5) as w:
        w.hold(2)
        (source,) = w.add("a")
        source.one_way(count=10)
        w.settle()
        assert len(w.ingress.committed) == 3
        assert source.unread == 7


@pytest.mark.requirement("R29")
def test_extra_permits_are_not_taken_before_who_waits() -> None:
    with world(jobs_max=4) as w:
        held = w.hold(4)
        a, b = w.add("a", "b")
        a.one_way(count=4)
        b.one_way(count=4)
        w.settle()
        for permit in held[:2]:
            permit.release()
        w.settle()
        assert names(w.ingress.committed) == ["a", "b"]


@pytest.mark.requirement("R51")
def test_one_wake_takes_all_that_is_ready() -> None:
    with world(jobs_max=64) as w:
        wakes = w.pump.statistics().wakes
        (source,) = w.add("a")
        source.one_way(count=40)
        w.settle()
        assert w.pump.statistics().wakes - wakes == 1
        assert w.in_use == (0, 40)


@pytest.mark.requirement("R58")
def test_a_readable_signal_takes_note_and_returns() -> None:
    with world() as w:
        (source,) = w.add("a")
        before = w.transport.counts.copy()
        source.one_way()
        assert w.transport.counts == before
        assert w.in_use == (0, 0)
        w.settle()
        assert w.in_use == (0, 1)


@pytest.mark.requirement("R33")
def test_what_was_taken_is_no_longer_the_transports() -> None:
    with world() as w:
        (source,) = w.add("a")
        source.one_way(payload=bytes(1 << 20), count=3)
        assert w.transport.snapshot()["accounted"] > 3 << 20
        w.settle()
        assert w.in_use == (0, 3)  # their turns have not begun
        assert w.transport.snapshot()["accounted"] == 0


@pytest.mark.requirement("R33")
def test_records_and_permits_know_of_no_lease_and_no_bytes_on_sockets() -> None:
    public = {
        f"{kind.__name__}.{name}"
        for kind in (Record, Permit, JobQueue, JobQueueStatus, Pump, PumpStatistics, Ingress)
        for name in dir(kind)
        if not name.startswith("_")
    }
    words = {"lease", "retain", "hwm", "bytes", "credit", "ack"}
    assert [name for name in sorted(public) if words & set(name.partition(".")[2].split("_"))] == []


@pytest.mark.requirement("R2", "R33")
def test_the_pump_asks_a_transport_for_records_only() -> None:
    with world(jobs_max=3) as w:
        sources = w.add("a", "b")
        for source in sources:
            source.one_way(count=5)
            source.complete(1)
        w.drain()
        sources[0].close()
        assert set(w.transport.counts) == {"attach", "sources", "head_kind", "take", "take_completion"}
