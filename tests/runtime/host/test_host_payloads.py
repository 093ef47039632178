"""Large payloads cost bytes and no more jobs; control records change nothing but what they are for."""

from __future__ import annotations

import asyncio
import gc

import msgspec
import pytest

from callyard.host.config import CoreHwmProfile, JobProfile, JobQueueConfig
from callyard.host.host import Host
from callyard.testing.scripted_transport import HOLD, ScriptedTransport
from callyard.testing.virtual_time import virtual_time
from callyard.transport.port import CoreHwmOptions, Record
from tests.runtime.host.kit import Add, Counter, add, drops, make_host, serving, until

BIG = b'{"count":1,"padding":"' + b"x" * (8 << 20) + b'"}'


@pytest.mark.requirement("R99")
@pytest.mark.parametrize("payload", [b"", BIG], ids=["empty", "8 MiB"])
def test_any_payload_is_one_job(payload: bytes) -> None:
    @virtual_time
    async def run() -> None:
        transport = ScriptedTransport()
        source = transport.add_source("peer")
        counter = Counter()
        counter.gate = asyncio.Event()
        async with serving(transport, jobs_max=4) as host:
            host.spot("a", counter)
            await host.send("a", Add(0))
            await until(lambda: counter.seen == [0])
            source.one_way("a", payload, message_type="Add")
            await until(lambda: transport.takes("peer") == 1)
            assert host.status().capacity.permits_in_use == 1
            counter.gate.set()
            await until(lambda: host.status().capacity.permits_in_use == 0)

    run()


@pytest.mark.requirement("R1")
@pytest.mark.requirement("R101")
@pytest.mark.parametrize("core", CoreHwmProfile)
@pytest.mark.parametrize("jobs", JobProfile)
def test_the_profile_of_the_bytes_and_that_of_the_jobs_stay_apart_under_large_payloads(
    core: CoreHwmProfile, jobs: JobProfile
) -> None:
    @virtual_time
    async def run() -> tuple[int, int, int, CoreHwmOptions]:
        given: list[CoreHwmOptions] = []
        transport = ScriptedTransport()

        def make(options: CoreHwmOptions) -> ScriptedTransport:
            given.append(options)
            return transport

        options = CoreHwmOptions(profile=core, budget_bytes=1)  # far below what lies there
        source = transport.add_source("peer")
        host = Host(transport=make, core_hwm=options, jobs=JobQueueConfig(profile=jobs, jobs_max=3))
        counter = Counter()
        counter.gate = asyncio.Event()
        host.spot("a", counter)
        async with host:
            source.one_way("a", BIG, message_type="Add", count=6)
            await until(lambda: host.status().capacity.capacity_waiters == 1)
            capacity = host.status().capacity
            counter.gate.set()
            await until(lambda: len(counter.seen) == 6)
        return (
            capacity.permits_in_use,
            capacity.effective_max_queued_application_jobs,
            transport.takes("peer"),
            given[0],
        )

    in_use, jobs_max, taken, options = run()
    assert (in_use, jobs_max, taken) == (3, 3, 6)
    assert options == CoreHwmOptions(profile=core, budget_bytes=1)


@pytest.mark.requirement("R82")
@virtual_time
async def test_the_services_send_ready_is_a_control_record_and_readies_no_send() -> None:
    transport = ScriptedTransport()
    source = transport.add_source("peer")
    transport.on_start = lambda outgoing: HOLD
    async with serving(transport, jobs_max=1) as host:
        sending = host.send("far", Add(1))
        source.control("send_ready", target="far")
        await until(lambda: transport.takes("peer") == 1)
        await asyncio.sleep(0.1)
        assert sending.state == "under_way"
        assert len(transport.started) == 1, "and none is started again"
        assert host.statistics().pump is not None
        assert host.statistics().pump.control == 1  # type: ignore[union-attr]
        assert host.status().capacity.permits_in_use == 0
        transport.started[0].accept()
        await sending


@pytest.mark.slow
@pytest.mark.requirement("R35")
@virtual_time
async def test_a_hundred_thousand_records_at_saturation_are_nowhere_but_in_the_transport() -> None:
    transport = ScriptedTransport()
    source = transport.add_source("peer")
    gate = asyncio.Event()
    seen = 0
    async with serving(transport, jobs_max=8) as host:

        @host.on("a", Add)
        async def count(message: Add) -> None:
            nonlocal seen
            await gate.wait()
            seen += message.count

        payload = add()
        gc.collect()
        before = sum(isinstance(each, Record) for each in gc.get_objects())
        source.endless(lambda number: source.record(target="a", payload=payload, message_type="Add"), count=100_000)
        await until(lambda: host.status().capacity.capacity_waiters == 1)
        for _ in range(1_000):
            source.signal()
            await asyncio.sleep(0)
        gc.collect()
        alive = sum(isinstance(each, Record) for each in gc.get_objects()) - before
        assert transport.takes("peer") == 9, "eight permits, and the one that went back as the first began"
        assert 8 <= alive <= 10, "one runs, eight are queued, one stands at the transport's head"
        gate.set()
        await until(lambda: seen == 100_000, steps=1_000_000)
        assert drops(host) == {}


@virtual_time
async def test_a_reply_that_cannot_be_sent_is_an_error_and_no_silence() -> None:
    transport = ScriptedTransport()
    source = transport.add_source("peer")
    async with make_host(transport) as host:

        @host.on("a")
        def answer(message: object) -> object:
            return object()

        source.request("a", b"1", operation_id=2)
        await until(lambda: bool(transport.accepted()))
        (reply,) = transport.accepted()
        assert reply.error == "type_mismatch"
        assert b"cannot be sent as JSON" in reply.payload
        assert msgspec.json.encode(await _error_of(host)) == b'"TYPE_MISMATCH"'


async def _error_of(host: Host) -> str:
    from callyard.host.errors import HostError

    try:
        await host.request("a", 1)
    except HostError as error:
        return error.kind.name
    return ""
