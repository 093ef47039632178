"""What a host shows of itself: one snapshot, taken in one step, so that its figures agree with one another.

Nothing is pushed: who looks gets the latest, and who never looks costs nothing. Status and metrics are read from the
same snapshot; transition counts, the cumulative pause and setter failures are metrics only. There is no series for a
socket, an owner or a turn. The transport's byte figures are shown as they come, and drive nothing.
Source: job-queue §8, R13, R68, R73, R115, R120.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import Final, Literal

import msgspec

from callyard.clock import Clock
from callyard.host.config import JobLimits, JobProfile
from callyard.host.drops import Dropped, Drops
from callyard.host.flow import FlowTargets
from callyard.host.jobs import JobQueue
from callyard.host.requests import RequestsStatus, RequestTable
from callyard.host.states import HostLife, HostState
from callyard.transport.port import FlowState

PressureState = Literal["running", "paused"]
_PRESSURES: Final[Mapping[FlowState, PressureState]] = {FlowState.RUNNING: "running", FlowState.PAUSED: "paused"}


class CapacityStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The application job queue. Peak and `capacity_wait_*` count from the last reset on."""

    configured_profile: JobProfile
    configured_manual_max: int | None
    configured_pause_threshold_percent: int
    configured_resume_threshold_percent: int
    effective_processor_count: int
    effective_max_queued_application_jobs: int
    pause_permit_count: int
    resume_permit_count: int
    reserved_supply_permits: int
    queued_application_jobs: int
    permits_in_use: int
    peak_permits_in_use: int
    pressure_state: PressureState
    current_pause_duration_ms: int
    """Since the state became paused, whatever was reset meanwhile; 0 while running."""
    capacity_waiters: int
    capacity_wait_count: int
    """Waits that began since the reset."""
    capacity_wait_duration_ms: int
    """Of those among them that are over."""


class HostStatus(msgspec.Struct, frozen=True, kw_only=True):
    taken_at_ms: int
    epoch: int
    """How often the capacity metrics were reset; of the byte figures too."""
    state: HostState
    ready: bool
    """True while serving, and only then."""
    accepting_work: bool
    capacity: CapacityStatus
    core_hwm: Mapping[str, float]
    """The transport's byte figures, by its names."""
    receive_flow_states: Mapping[str, PressureState | None]
    """What each registered socket was told last; None: it did not take it, and nobody knows."""


class HostSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The status, and what of the same instant is in metrics only."""

    status: HostStatus
    transitions: Mapping[PressureState, int]
    """By the state that was turned to."""
    cumulative_pause_duration_ms: int
    flow_state_config_failures: int
    messages_dropped: Mapping[Dropped, int]
    requests: RequestsStatus


class MetricKind(StrEnum):
    GAUGE = "gauge"
    COUNTER = "counter"
    """Rises until it is reset."""
    SUM = "sum"
    """A sum of durations, with how many there were."""


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One series at one instant. Durations are in milliseconds, sizes in bytes."""

    name: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()
    kind: MetricKind = MetricKind.GAUGE
    unit: str = "1"
    count: int = 1
    """Of a sum."""


QUEUE: Final = "callyard.host.application_job_queue"
CORE: Final = "callyard.host.core_hwm"
NODE: Final = "callyard.mesh_node"

CORE_METRICS: Final[Mapping[str, tuple[str, tuple[tuple[str, str], ...]]]] = {
    "effective_budget": (f"{CORE}.effective_budget", ()),
    "applied": (f"{CORE}.applied", ()),
    "accounted": (f"{CORE}.accounted", (("state", "queued"),)),
    "in_flight": (f"{CORE}.accounted", (("state", "in_flight"),)),
    "completion_accounted": (f"{CORE}.completion_accounted", (("state", "queued"),)),
    "completion_in_flight": (f"{CORE}.completion_accounted", (("state", "in_flight"),)),
    "blocked_ratio": (f"{CORE}.blocked_ratio", ()),
}
"""From a figure of the transport's snapshot to its series. What it does not say has no series."""


class StatusBoard:
    """Takes the snapshots of one host. `mesh_name` and `surface` are labels of what was dropped."""

    def __init__(
        self,
        *,
        clock: Clock,
        limits: JobLimits,
        jobs: JobQueue,
        flow: FlowTargets,
        life: HostLife,
        drops: Drops,
        requests: RequestTable,
        core_snapshot: Callable[[], Mapping[str, float]],
        mesh_name: str = "",
        surface: str = "spot",
    ) -> None:
        self._clock = clock
        self._limits = limits
        self._jobs = jobs
        self._flow = flow
        self._life = life
        self._drops = drops
        self._requests = requests
        self._core_snapshot = core_snapshot
        self._of_drops = (("mesh_name", mesh_name), ("surface", surface))

    def status(self) -> HostStatus:
        return self.snapshot().status

    def metrics(self) -> list[Metric]:
        return self.read_metrics(self.snapshot())

    def snapshot(self) -> HostSnapshot:
        """All at once. Safe to call from anywhere on the loop's thread, handlers and setters included."""
        jobs, config = self._jobs.status(), self._limits.config
        status = HostStatus(
            taken_at_ms=self._clock.now_ms(),
            epoch=jobs.epoch,
            state=self._life.state,
            ready=self._life.is_ready,
            accepting_work=self._life.is_accepting_work,
            capacity=CapacityStatus(
                configured_profile=config.profile,
                configured_manual_max=config.jobs_max,
                configured_pause_threshold_percent=config.pause_percent,
                configured_resume_threshold_percent=config.resume_percent,
                effective_processor_count=self._limits.processor_count,
                effective_max_queued_application_jobs=jobs.limit,
                pause_permit_count=jobs.pause_permits,
                resume_permit_count=jobs.resume_permits,
                reserved_supply_permits=jobs.reserved,
                queued_application_jobs=jobs.queued,
                permits_in_use=jobs.in_use,
                peak_permits_in_use=jobs.peak,
                pressure_state=_PRESSURES[jobs.transition.state],
                current_pause_duration_ms=jobs.pause_current_ms,
                capacity_waiters=jobs.waiters,
                capacity_wait_count=jobs.waits,
                capacity_wait_duration_ms=jobs.wait_ms,
            ),
            core_hwm=dict(self._core_snapshot()),
            receive_flow_states={
                name: None if state is None else _PRESSURES[state] for name, state in self._flow.states().items()
            },
        )
        return HostSnapshot(
            status=status,
            transitions={"running": jobs.to_running, "paused": jobs.to_paused},
            cumulative_pause_duration_ms=jobs.pause_cumulative_ms,
            flow_state_config_failures=self._flow.config_failures,
            messages_dropped=dict(self._drops.counts),
            requests=self._requests.status(),
        )

    def reset_capacity_metrics(self) -> None:
        """Begin a new epoch: counters of waits, transitions, pauses and failures at 0, the peak at what is in use.

        Settings, state, the running pause and all gauges stay; so do drops and requests, which are no capacity.
        """
        self._jobs.reset_metrics()
        self._flow.reset_metrics()

    def read_metrics(self, snapshot: HostSnapshot) -> list[Metric]:
        return [
            *_queue_metrics(snapshot),
            *_core_metrics(snapshot.status.core_hwm),
            *self._node_metrics(snapshot),
        ]

    def _node_metrics(self, snapshot: HostSnapshot) -> Iterator[Metric]:
        for dropped, count in snapshot.messages_dropped.items():
            labels = (*self._of_drops, ("message_kind", dropped.message_kind), ("reason", dropped.reason))
            yield Metric(name=f"{NODE}.messages.dropped", value=count, labels=labels, kind=MetricKind.COUNTER)
        requests = snapshot.requests
        yield Metric(name=f"{NODE}.requests.inflight", value=requests.in_flight)
        yield _duration(f"{NODE}.request.duration", requests.duration_ms, requests.settled)
        yield _counter(f"{NODE}.request.timeouts", requests.timeouts)


def _queue_metrics(snapshot: HostSnapshot) -> Iterator[Metric]:
    capacity = snapshot.status.capacity
    yield Metric(name=f"{QUEUE}.limit", value=capacity.effective_max_queued_application_jobs)
    for state, value in (
        ("reserved", capacity.reserved_supply_permits),
        ("queued", capacity.queued_application_jobs),
        ("in_use", capacity.permits_in_use),
        ("peak", capacity.peak_permits_in_use),
    ):
        yield Metric(name=f"{QUEUE}.jobs", value=value, labels=(("state", state),))
    yield Metric(name=f"{QUEUE}.capacity_waiters", value=capacity.capacity_waiters)
    yield _counter(f"{QUEUE}.capacity_waits", capacity.capacity_wait_count)
    yield _counter(f"{QUEUE}.capacity_wait_duration", capacity.capacity_wait_duration_ms, unit="ms")
    for pressure in _PRESSURES.values():
        label = (("state", pressure),)
        is_now = int(capacity.pressure_state == pressure)
        yield Metric(name=f"{QUEUE}.pressure_state", value=is_now, labels=label)
        yield _counter(f"{QUEUE}.pressure_transitions", snapshot.transitions[pressure], labels=label)
    pause = f"{QUEUE}.pause_duration"
    yield Metric(name=pause, value=capacity.current_pause_duration_ms, labels=(("state", "current"),), unit="ms")
    cumulative_ms = snapshot.cumulative_pause_duration_ms
    yield _counter(pause, cumulative_ms, labels=(("state", "cumulative"),), unit="ms")
    yield _counter(f"{QUEUE}.flow_state_config_failures", snapshot.flow_state_config_failures)


def _core_metrics(figures: Mapping[str, float]) -> Iterator[Metric]:
    for figure, (name, labels) in CORE_METRICS.items():
        if figure in figures:
            unit = "1" if figure == "blocked_ratio" else "By"
            yield Metric(name=name, value=figures[figure], labels=labels, unit=unit)


def _counter(name: str, value: int, *, labels: tuple[tuple[str, str], ...] = (), unit: str = "1") -> Metric:
    return Metric(name=name, value=value, labels=labels, kind=MetricKind.COUNTER, unit=unit)


def _duration(name: str, sum_ms: int, count: int) -> Metric:
    return Metric(name=name, value=sum_ms, kind=MetricKind.SUM, unit="ms", count=count)
