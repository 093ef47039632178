"""One snapshot: its names, that its figures agree, what a reset leaves, and that bytes drive no jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from callyard.host.config import CoreHwmProfile, HostConfig, JobProfile, JobQueueConfig, ProcessorFigures
from callyard.host.drops import DropReason, Drops
from callyard.host.flow import FlowTargets
from callyard.host.jobs import JobQueue, Permit
from callyard.host.requests import RequestTable
from callyard.host.states import HostLife, HostState
from callyard.host.status import CORE_METRICS, Metric, MetricKind, StatusBoard
from callyard.testing.virtual_time import VirtualTimers, virtual_time
from callyard.transport.port import CoreHwmOptions, FlowResult
from tests.unit.host.flow.sockets import Socket

NAMES = Path(__file__).with_name("names.txt")


class Yard:
    def __init__(self, config: HostConfig | None = None) -> None:
        self.timers = VirtualTimers()
        self.config = config or HostConfig(jobs=JobQueueConfig(jobs_max=10))
        self.limits = self.config.resolve(ProcessorFigures(logical=2))
        self.flow = FlowTargets(self.timers)
        self.jobs = JobQueue(
            self.limits.jobs_max,
            pause_percent=self.config.jobs.pause_percent,
            resume_percent=self.config.jobs.resume_percent,
            clock=self.timers,
            on_transition=self.flow.publish,
        )
        self.life = HostLife()
        self.drops = Drops()
        self.requests = RequestTable(self.timers)
        self.core: dict[str, float] = {}
        self.board = StatusBoard(
            clock=self.timers,
            limits=self.limits,
            jobs=self.jobs,
            flow=self.flow,
            life=self.life,
            drops=self.drops,
            requests=self.requests,
            core_snapshot=lambda: self.core,
            mesh_name="yard",
        )
        self.held: list[Permit] = []

    def use(self, count: int) -> None:
        while len(self.held) < count:
            permit = self.jobs.try_acquire()
            assert permit is not None
            self.held.append(permit)
        while len(self.held) > count:
            self.held.pop().release()

    def metrics(self) -> dict[str, float]:
        return {name_of(metric): metric.value for metric in self.board.metrics()}


QUEUE = "callyard.host.application_job_queue"


def name_of(metric: Metric) -> str:
    labels = ",".join(f"{name}={value}" for name, value in metric.labels)
    return f"{metric.name}{{{labels}}}" if labels else metric.name


def paths_of(value: Any, before: str = "") -> Iterator[str]:
    for field in value.__struct_fields__:
        inner = getattr(value, field)
        if isinstance(inner, msgspec.Struct):
            yield from paths_of(inner, f"{before}{field}.")
        else:
            yield f"{before}{field}"


@pytest.mark.requirement("R115")
@virtual_time
async def test_every_name_is_there_and_no_other() -> None:
    yard = Yard()
    yard.core = dict.fromkeys(CORE_METRICS, 1)
    for reason in DropReason:
        yard.drops.count("one_way", reason)
    found = [f"status {path}" for path in paths_of(yard.board.status())]
    found += [f"metric {name_of(metric)}" for metric in yard.board.metrics()]
    listed = NAMES.read_text(encoding="utf-8").splitlines()
    assert sorted(found) == sorted(listed)
    assert len(set(listed)) == len(listed)


@pytest.mark.requirement("R115")
@virtual_time
async def test_the_figures_of_a_busy_host() -> None:
    yard, socket = Yard(), Socket()
    await yard.flow.register(socket)
    yard.life.move_to(HostState.SERVING)
    yard.use(10)
    for permit in yard.held[:3]:
        permit.to_queued()
    yard.jobs.wait("A", yard.held.append)
    yard.jobs.wait("B", yard.held.append)
    await asyncio.sleep(2)
    yard.held.pop(0).release()
    snapshot = yard.board.snapshot()
    assert msgspec.json.decode(msgspec.json.encode(snapshot.status)) == {
        "taken_at_ms": 2_000,
        "epoch": 0,
        "state": "serving",
        "ready": True,
        "accepting_work": True,
        "capacity": {
            "configured_profile": "balanced",
            "configured_manual_max": 10,
            "configured_pause_threshold_percent": 80,
            "configured_resume_threshold_percent": 60,
            "effective_processor_count": 2,
            "effective_max_queued_application_jobs": 10,
            "pause_permit_count": 8,
            "resume_permit_count": 6,
            "reserved_supply_permits": 8,
            "queued_application_jobs": 2,
            "permits_in_use": 10,
            "peak_permits_in_use": 10,
            "pressure_state": "paused",
            "current_pause_duration_ms": 2_000,
            "capacity_waiters": 1,
            "capacity_wait_count": 2,
            "capacity_wait_duration_ms": 2_000,
        },
        "core_hwm": {},
        "receive_flow_states": {"mesh": "paused"},
    }
    values = {name_of(metric): metric.value for metric in yard.board.read_metrics(snapshot)}
    assert values[f"{QUEUE}.jobs{{state=reserved}}"] + values[f"{QUEUE}.jobs{{state=queued}}"] == 10
    assert values[f"{QUEUE}.jobs{{state=in_use}}"] == values[f"{QUEUE}.limit"] == 10
    assert values[f"{QUEUE}.pressure_transitions{{state=paused}}"] == 1
    assert values[f"{QUEUE}.pause_duration{{state=cumulative}}"] == 2_000
    await yard.flow.close(timeout_ms=1_000)


@pytest.mark.requirement("R115")
@virtual_time
async def test_exactly_one_state_of_pressure_is_shown() -> None:
    yard = Yard()
    for count, state in ((7, "running"), (8, "paused"), (7, "paused"), (6, "running")):
        yard.use(count)
        metrics = yard.metrics()
        shown = {each: metrics[f"{QUEUE}.pressure_state{{state={each}}}"] for each in ("running", "paused")}
        assert shown == {"running": 0, "paused": 0, state: 1}


@pytest.mark.requirement("R115")
@virtual_time
async def test_a_socket_that_refuses_is_shown_as_unknown() -> None:
    yard, socket = Yard(), Socket()
    await yard.flow.register(socket)
    socket.results = [FlowResult.FAILED]
    yard.use(8)
    await asyncio.sleep(1)
    assert yard.board.status().receive_flow_states == {"mesh": None}
    assert yard.metrics()[f"{QUEUE}.flow_state_config_failures"] == 1
    await yard.flow.close(timeout_ms=1_000)


@pytest.mark.requirement("R115")
@virtual_time
async def test_no_series_is_made_by_a_name_from_outside() -> None:
    yard = Yard()
    for number in range(50):
        await yard.flow.register(Socket(f"socket-{number}"))
    yard.core = {f"peer-{number}": number for number in range(50)}
    before = len(Yard().board.metrics())
    assert len(yard.board.metrics()) == before
    assert {name for metric in yard.board.metrics() for name, _ in metric.labels} <= {
        *("state", "mesh_name", "surface", "message_kind", "reason")
    }
    await yard.flow.close(timeout_ms=1_000)


@pytest.mark.requirement("R68")
@virtual_time
async def test_status_says_paused_directly_after_the_acquire() -> None:
    yard = Yard()
    yard.use(7)
    assert yard.board.status().capacity.pressure_state == "running"
    yard.use(8)
    assert yard.board.status().capacity.pressure_state == "paused"


@pytest.mark.requirement("R73")
@virtual_time
async def test_a_reset_keeps_what_is_and_forgets_what_was() -> None:
    yard, socket = Yard(), Socket()
    await yard.flow.register(socket)
    socket.results = [FlowResult.FAILED]
    yard.use(10)
    yard.jobs.wait("old", yard.held.append)
    yard.drops.count("one_way", DropReason.BACKPRESSURE)
    await asyncio.sleep(5)
    before = yard.board.status()
    yard.board.reset_capacity_metrics()
    await asyncio.sleep(2)
    yard.held.pop().release()
    yard.use(9)
    after = yard.board.snapshot()
    capacity = after.status.capacity
    assert after.status.epoch == before.epoch + 1
    assert (capacity.pressure_state, capacity.current_pause_duration_ms) == ("paused", 7_000)
    assert after.cumulative_pause_duration_ms == 2_000
    assert (capacity.capacity_wait_count, capacity.capacity_wait_duration_ms) == (0, 0)
    assert (capacity.permits_in_use, capacity.peak_permits_in_use) == (9, 10)
    assert after.transitions == {"running": 0, "paused": 0}
    assert after.flow_state_config_failures == 0
    assert after.status.receive_flow_states == before.receive_flow_states
    assert sum(after.messages_dropped.values()) == 1  # no figure of capacity
    for name in capacity.__struct_fields__:
        if name.startswith(("configured", "effective", "pause_permit", "resume_permit")):
            assert getattr(capacity, name) == getattr(before.capacity, name)
    yard.board.reset_capacity_metrics()
    assert yard.board.status().capacity.peak_permits_in_use == 9
    yard.use(0)
    await asyncio.sleep(1)
    assert socket.state is not None
    assert yard.board.snapshot().transitions == {"running": 1, "paused": 0}
    await yard.flow.close(timeout_ms=1_000)


@pytest.mark.requirement("R13")
@virtual_time
async def test_the_transports_figures_drive_nothing_and_cannot_be_changed_here() -> None:
    yard = Yard()
    before = yard.board.status().capacity
    yard.core = {"effective_budget": 1_000, "applied": 1_000, "accounted": 1_000, "blocked_ratio": 1.0}
    status = yard.board.status()
    assert (status.capacity, status.core_hwm) == (before, yard.core)
    assert status.capacity.pressure_state == "running"
    assert yard.metrics()["callyard.host.core_hwm.blocked_ratio"] == 1.0
    assert isinstance(status.core_hwm, dict)
    status.core_hwm["accounted"] = 0  # the snapshot is a copy
    assert yard.core["accounted"] == 1_000


@pytest.mark.requirement("R1")
@virtual_time
async def test_each_setting_moves_its_own_fields_only() -> None:
    plain = HostConfig(jobs=JobQueueConfig(profile=JobProfile.BALANCED))
    before = Yard(plain).board.status()
    for options in (
        CoreHwmOptions(memory_limit_bytes=1 << 30),
        CoreHwmOptions(budget_bytes=1 << 20),
        CoreHwmOptions(profile=CoreHwmProfile.COMPACT),
    ):
        changed = Yard(replace(plain, core_hwm=options)).board.status()
        assert msgspec.json.encode(changed.capacity) == msgspec.json.encode(before.capacity)
    for jobs in (
        JobQueueConfig(profile=JobProfile.COMPACT),
        JobQueueConfig(jobs_max=3),
        JobQueueConfig(pause_percent=70, resume_percent=10),
    ):
        yard = Yard(replace(plain, jobs=jobs))
        assert yard.board.status().core_hwm == before.core_hwm
        assert yard.board.status().capacity != before.capacity


@pytest.mark.requirement("R120")
@virtual_time
async def test_state_and_accepting_work_are_shown_apart() -> None:
    yard = Yard()
    seen = []

    def look() -> None:
        status = yard.board.status()
        seen.append((status.state.value, status.ready, status.accepting_work))

    look()
    yard.life.move_to(HostState.SERVING)
    look()
    yard.life.seal()
    look()
    yard.life.move_to(HostState.DRAINING)
    look()
    assert seen == [
        ("preparing", False, False),
        ("serving", True, True),
        ("serving", True, False),
        ("draining", False, False),
    ]


@pytest.mark.requirement("R92")
@virtual_time
async def test_a_full_job_queue_shows_in_its_own_series_only() -> None:
    yard = Yard()
    quiet = yard.metrics()
    yard.use(10)
    yard.jobs.wait("A", yard.held.append)
    busy = yard.metrics()
    changed = {name for name in busy if busy[name] != quiet[name]}
    assert f"{QUEUE}.capacity_waits" in changed
    assert f"{QUEUE}.capacity_waiters" in changed
    assert all(name.startswith(QUEUE) for name in changed)


@virtual_time
async def test_requests_are_read_in_the_same_snapshot() -> None:
    yard = Yard()
    request = yard.requests.reserve("b", 10_000, lambda outcome: True)
    yard.requests.reserve("b", 10_000, lambda outcome: True)
    await asyncio.sleep(3)
    yard.requests.settle(request.operation_id, "done")
    metrics = {metric.name: metric for metric in yard.board.metrics()}
    assert metrics["callyard.mesh_node.requests.inflight"].value == 1
    duration = metrics["callyard.mesh_node.request.duration"]
    assert (duration.kind, duration.value, duration.count, duration.unit) == (MetricKind.SUM, 3_000, 1, "ms")
    yard.requests.close()
