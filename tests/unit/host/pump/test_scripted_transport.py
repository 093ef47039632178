"""The scripted transport itself: what it says, what it records, and how it can go wrong on purpose."""

from __future__ import annotations

import asyncio

import pytest

from callyard.testing.scripted_transport import FRAME_COST_BYTES, HOLD, Call, ScriptedTransport
from callyard.transport.port import (
    Completion,
    FlowResult,
    FlowState,
    HeadKind,
    Outgoing,
    OutgoingKind,
    Record,
    RecordKind,
    SourceId,
    SourceKind,
    Transport,
    TransportRefused,
)

SEND = Outgoing(kind=OutgoingKind.ONE_WAY, target="cart/42")


def attached() -> tuple[ScriptedTransport, list[str]]:
    transport = ScriptedTransport()
    told: list[str] = []
    as_port: Transport = transport  # it is one: a type checker says so here
    as_port.attach(lambda source: told.append(f"readable {source}"), lambda source: told.append(f"closed {source}"))
    return transport, told


@pytest.mark.parametrize("kind", list(SourceKind))
def test_records_come_out_in_the_order_in_which_they_were_pushed(kind: SourceKind) -> None:
    transport, told = attached()
    source = transport.add_source("a", kind)
    assert transport.head_kind(source.id) is HeadKind.NONE
    source.one_way("s", b"1")
    source.request("s", operation_id=9)
    source.control()
    source.malformed(operation_id=4)
    source.publish("news")
    assert told == ["readable a"] * 5
    taken = [transport.take(source.id) for _ in range(5)]
    assert [record.kind for record in taken] == ["one_way", "request", "control", "malformed", "publish"]
    assert [record.sequence for record in taken] == [1, 2, 3, 4, 5]
    assert [record.operation_id for record in taken] == [0, 9, 0, 4, 0]
    assert {record.source for record in taken} == {"a"}
    assert transport.head_kind(source.id) is HeadKind.NONE
    assert transport.kind_of(source.id) is kind
    assert (transport.takes("a"), transport.counts["take"], source.taken) == (5, 5, 5)


@pytest.mark.parametrize("kind", list(SourceKind))
def test_completions_have_a_line_of_their_own_on_mesh_peers_only(kind: SourceKind) -> None:
    transport, _ = attached()
    source = transport.add_source("a", kind)
    source.one_way()
    source.complete(7, error="unavailable", message="gone")
    if kind is SourceKind.MESH:
        assert transport.head_kind(source.id) is HeadKind.COMPLETION
    else:
        assert transport.head_kind(source.id) is HeadKind.ORDINARY
        transport.take(source.id)
    completion = transport.take_completion(source.id)
    assert (completion.operation_id, completion.error, completion.message) == (7, "unavailable", "gone")


def test_taking_what_is_not_at_the_head_is_a_mistake() -> None:
    transport, _ = attached()
    source = transport.add_source("a", SourceKind.CLIENT_SERVER)
    with pytest.raises(ValueError, match="none stands at its head"):
        transport.take(source.id)
    source.one_way()
    with pytest.raises(ValueError, match="ordinary stands at its head"):
        transport.take_completion(source.id)
    source.close()
    with pytest.raises(LookupError, match="no source 'a'"):
        transport.take(source.id)
    assert transport.head_kind(source.id) is HeadKind.NONE


def test_an_endless_source_makes_each_record_as_it_gets_to_the_head() -> None:
    transport, told = attached()
    source = transport.add_source("a")
    made: list[int] = []

    def make(n: int) -> Record:
        made.append(n)
        return source.record(target=f"s{n}")

    source.endless(make, count=3)
    assert (told, made) == (["readable a"], [])
    assert transport.head_kind(source.id) is HeadKind.ORDINARY
    assert made == [0]
    assert [transport.take(source.id).target for _ in range(3)] == ["s0", "s1", "s2"]
    assert transport.head_kind(source.id) is HeadKind.NONE
    source.endless(lambda n: Completion(operation_id=n + 1))
    assert [transport.take_completion(source.id).operation_id for _ in range(100)][-1] == 100


def test_signals_can_be_repeated_and_swallowed() -> None:
    transport, told = attached()
    source = transport.add_source("a")
    transport.signals_per_push = 3
    source.one_way()
    assert len(told) == 3
    transport.on_signal = lambda source: 0
    source.one_way()
    source.signal(10)
    assert len(told) == 3
    transport.on_signal = lambda source: 2
    source.signal()
    assert len(told) == 5
    source.push(source.record(), signal=False)
    assert len(told) == 5


def test_a_source_that_closes_takes_what_it_had_with_it() -> None:
    transport, told = attached()
    source = transport.add_source("a")
    source.one_way(count=3)
    source.close()
    source.close()
    assert told == ["readable a", "closed a"]
    assert (transport.discarded, source.unread, transport.sources()) == (3, 0, [])
    with pytest.raises(LookupError):
        source.one_way()
    assert transport.add_source("a").unread == 0
    with pytest.raises(ValueError, match="is there already"):
        transport.add_source("a")


def test_every_call_is_on_record_before_it_does_anything() -> None:
    transport, _ = attached()
    source = transport.add_source("a")
    source.one_way()
    seen: list[tuple[Call, int]] = []
    transport.before_call = lambda call: seen.append((call, source.unread))
    transport.head_kind(source.id)
    transport.take(source.id)
    transport.snapshot()
    assert seen == [(Call("head_kind", "a"), 1), (Call("take", "a"), 1), (Call("snapshot"), 0)]
    assert list(transport.calls)[-3:] == [call for call, _ in seen]


def test_snapshot_counts_what_lies_unread() -> None:
    transport, _ = attached()
    a, b = transport.add_source("a"), transport.add_source("b", SourceKind.CLIENT_SERVER)
    a.one_way(payload=bytes(100))
    a.complete(1, bytes(10))
    b.complete(2)
    assert transport.snapshot()["accounted"] == 100 + 2 * FRAME_COST_BYTES
    assert transport.snapshot()["completion_accounted"] == 10 + FRAME_COST_BYTES
    transport.take_completion(a.id)
    transport.take(a.id)
    assert transport.snapshot()["accounted"] == FRAME_COST_BYTES
    assert transport.snapshot()["completion_accounted"] == 0
    transport.figures["accounted"] = 1 << 30
    transport.figures["blocked_ratio"] = 100
    assert transport.snapshot()["accounted"] == 1 << 30
    assert transport.snapshot()["blocked_ratio"] == 100


async def test_an_operation_is_accepted_refused_or_held() -> None:
    transport, _ = attached()
    await transport.start(SEND)
    transport.on_start = lambda outgoing: "not_connected"
    with pytest.raises(TransportRefused, match="not_connected"):
        await transport.start(SEND)
    transport.on_start = lambda outgoing: HOLD
    held, later = transport.start(SEND), transport.start(SEND)
    assert [started.outcome for started in transport.started] == ["accepted", "not_connected", "running", "running"]
    transport.started[2].accept()
    transport.started[2].refuse("timeout")
    await held
    transport.started[3].refuse("timeout")
    with pytest.raises(TransportRefused, match="timeout"):
        await later
    assert len(transport.accepted()) == 2
    assert transport.counts["start"] == 4


async def test_an_operation_outlives_the_wait_of_its_caller() -> None:
    transport, _ = attached()
    transport.on_start = lambda outgoing: HOLD

    async def send() -> None:
        await transport.start(SEND)

    caller = asyncio.create_task(send())
    while not transport.started:
        await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert transport.started[0].outcome == "running"
    transport.started[0].accept()
    assert transport.accepted() == [SEND]


async def test_closing_ends_sources_and_operations() -> None:
    transport, told = attached()
    transport.add_source("a")
    transport.on_start = lambda outgoing: HOLD
    waiting = transport.start(SEND)
    await transport.close()
    await transport.close()
    assert told == ["closed a"]
    for operation in (waiting, transport.start(SEND)):
        with pytest.raises(TransportRefused, match="terminated"):
            await operation


async def test_flow_targets_can_be_slow_fail_call_back_and_hang() -> None:
    transport, _ = attached()
    target = transport.add_flow_target("mesh")
    assert [each.name for each in transport.flow_targets()] == ["mesh"]
    assert await target.set_receive_flow_state(FlowState.RUNNING) is FlowResult.OK
    target.on_set = lambda state: FlowResult.NOT_SUPPORTED
    assert await target.set_receive_flow_state(FlowState.PAUSED) is FlowResult.NOT_SUPPORTED

    def fail(state: FlowState) -> FlowResult:
        raise OSError("no such socket")

    target.on_set = fail
    with pytest.raises(OSError, match="no such socket"):
        await target.set_receive_flow_state(FlowState.PAUSED)
    gate: asyncio.Future[FlowResult] = asyncio.get_running_loop().create_future()
    target.on_set = lambda state: gate
    slow = asyncio.create_task(target.set_receive_flow_state(FlowState.PAUSED))
    while len(target.calls) < 4:
        await asyncio.sleep(0)
    assert target.applied == [FlowState.RUNNING]
    gate.set_result(FlowResult.OK)
    assert await slow is FlowResult.OK
    assert target.applied == [FlowState.RUNNING, FlowState.PAUSED]
    assert transport.counts["set_receive_flow_state"] == 4
    transport.remove_flow_target("mesh")
    assert transport.flow_targets() == []


def test_nothing_is_told_before_the_attach() -> None:
    transport = ScriptedTransport()
    source = transport.add_source("a")
    source.one_way()
    source.close()
    assert transport.sources() == []


def test_record_kinds_are_those_of_the_port() -> None:
    transport, _ = attached()
    source = transport.add_source("a")
    for kind in RecordKind:
        source.push(source.record(kind))
    assert [transport.take(SourceId("a")).kind for _ in RecordKind] == list(RecordKind)
