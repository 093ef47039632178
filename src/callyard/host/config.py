"""A host's settings: frozen records, checked when built, before anything is bound.

Jobs and bytes share nothing: `JobQueueConfig` is the host's, `CoreHwmOptions` goes to the transport as it is. What
follows from settings and machine is in `JobLimits`. Source: job-queue §0, §3, §5, R1, R10-R12, R62, R118, R119.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import Final

from callyard.host.jobs import (
    JOBS_MAX,
    PAUSE_PERCENT,
    RESUME_PERCENT,
    check_thresholds,
    count_pause_permits,
    count_resume_permits,
)
from callyard.host.ledger import OwnerLimits
from callyard.policy.ranges import check_whole
from callyard.transport.port import CoreHwmOptions
from callyard.transport.port import CoreHwmProfile as CoreHwmProfile

TIMEOUT_MS_MAX: Final = 2**31 - 1
SEND_TIMEOUT_MS: Final = 1_000
OUTBOUND_WAITER_SLOTS: Final = 256
REQUEST_TIMEOUT_MS: Final = 5_000
REQUESTS_MAX: Final = 4_096
SHUTDOWN_TIMEOUT_MS: Final = 30_000
SPOTS_MAX: Final = 1_000_000


class JobProfile(Enum):
    """How many jobs a processor has in line. No text and no other profile equals one of these."""

    COMPACT = "compact"
    LOW_LATENCY = "low_latency"
    BALANCED = "balanced"
    THROUGHPUT = "throughput"


JOBS_PER_PROCESSOR: Final[Mapping[JobProfile, int]] = {
    JobProfile.COMPACT: 32,
    JobProfile.LOW_LATENCY: 64,
    JobProfile.BALANCED: 128,
    JobProfile.THROUGHPUT: 256,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorFigures:
    """What is known of the machine; None: not known. Only the assembly reads it from the system."""

    logical: int | None = None
    """The runtime's count."""
    affinity: int | None = None
    """CPUs that this process is bound to: its affinity, or cpuset."""
    quota_us: int | None = None
    period_us: int | None = None
    """Running time that the cgroup allows in each period, over all CPUs."""
    executors_max: int | None = None
    """Set by the user."""

    @property
    def effective(self) -> int:
        """The least of the figures that are known and positive; 1 if there is none."""
        figures = [self.logical, self.affinity, self.executors_max]
        if self.quota_us is not None and self.period_us is not None and self.quota_us > 0 < self.period_us:
            figures.append(max(1, self.quota_us // self.period_us))
        return min((figure for figure in figures if figure is not None and figure > 0), default=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobQueueConfig:
    profile: JobProfile = JobProfile.BALANCED
    jobs_max: int | None = None
    """M itself, 1 to 2³¹-1, whatever the profile would make it. There is no "unlimited"."""
    pause_percent: int = PAUSE_PERCENT
    """1..100; of M."""
    resume_percent: int = RESUME_PERCENT
    """0..99, below `pause_percent`."""

    def __post_init__(self) -> None:
        if not isinstance(self.profile, JobProfile):
            raise ValueError(f"profile of the job queue must be one of {_members(JobProfile)}, got {self.profile!r}")
        if self.jobs_max is not None:
            check_whole("jobs_max", self.jobs_max, 1, JOBS_MAX)
        check_thresholds(self.pause_percent, self.resume_percent)

    def resolve(self, processors: ProcessorFigures) -> JobLimits:
        """Fixed from the start on. Raises ValueError if profile and processors come to more than 2³¹-1."""
        count = processors.effective
        jobs_max = JOBS_PER_PROCESSOR[self.profile] * count if self.jobs_max is None else self.jobs_max
        if jobs_max > JOBS_MAX:
            raise ValueError(
                f"{JOBS_PER_PROCESSOR[self.profile]} jobs for each of {count} processors are {jobs_max}, "
                f"more than {JOBS_MAX}: set jobs_max"
            )
        return JobLimits(config=self, processor_count=count, jobs_max=jobs_max)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLimits:
    """What a job queue is built of, and status shows."""

    config: JobQueueConfig
    processor_count: int
    jobs_max: int
    """M: what holds."""

    @property
    def pause_permits(self) -> int:
        return count_pause_permits(self.jobs_max, self.config.pause_percent)

    @property
    def resume_permits(self) -> int:
        return count_resume_permits(self.jobs_max, self.config.resume_percent)


class SendFamily(StrEnum):
    """Operations that share a send timeout, and their places to wait for local capacity."""

    MESH = "mesh"
    CHANNEL = "channel"
    SPOT = "spot"
    """Spots and actors."""
    CLIENT_SERVER = "client_server"
    MULTICAST = "multicast"
    """For each remote target."""
    FANOUT = "fanout"
    BOUND_SESSION = "bound_session"
    STREAM = "stream"


def _members(known: type[Enum]) -> str:
    return ", ".join(f"{known.__name__}.{each.name}" for each in known)


def whole_timeout_ms(name: str, timeout_ms: float) -> int:
    """A timeout in whole milliseconds, rounded up: 1 to 2³¹-1.

    Raises ValueError if it is no number, not positive, not finite, or more than that. Source: R118.
    """
    if type(timeout_ms) in (int, float) and 0 < timeout_ms <= TIMEOUT_MS_MAX:  # neither NaN nor a bool is
        return math.ceil(timeout_ms)
    raise ValueError(
        f"{name} must be a number of milliseconds above 0 and up to {TIMEOUT_MS_MAX}, got {timeout_ms!r}: "
        "no wait is without an end"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostConfig:
    jobs: JobQueueConfig = field(default_factory=JobQueueConfig)
    core_hwm: CoreHwmOptions = field(default_factory=CoreHwmOptions)
    """Handed to the transport's factory, this very record."""
    owners: OwnerLimits = field(default_factory=OwnerLimits)
    """Of each spot: items and bytes of its queues, the time that it keeps its place."""
    spots_max: int = SPOTS_MAX
    """Spots that are there at once. A message that would make one more is refused: CAPACITY_EXCEEDED."""
    send_timeout_ms: float = SEND_TIMEOUT_MS
    """Of each family that `send_timeouts_ms` does not name."""
    send_timeouts_ms: Mapping[SendFamily, float] = field(default_factory=dict)
    outbound_waiter_slots: int = OUTBOUND_WAITER_SLOTS
    """Of each family: sends that wait for local capacity. One more ends in DEADLINE_EXCEEDED at once."""
    request_timeout_ms: float = REQUEST_TIMEOUT_MS
    requests_max: int = REQUESTS_MAX
    """Requests without an answer, and answers that were not taken."""
    shutdown_timeout_ms: float = SHUTDOWN_TIMEOUT_MS

    def __post_init__(self) -> None:
        for name, kind in (("jobs", JobQueueConfig), ("core_hwm", CoreHwmOptions), ("owners", OwnerLimits)):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name} must be of class {kind.__name__}, got {getattr(self, name)!r}")
        for name in ("send_timeout_ms", "request_timeout_ms", "shutdown_timeout_ms"):
            object.__setattr__(self, name, whole_timeout_ms(name, getattr(self, name)))
        if not isinstance(self.send_timeouts_ms, Mapping):
            raise ValueError(f"send_timeouts_ms has timeouts by SendFamily, got {self.send_timeouts_ms!r}")
        timeouts: dict[SendFamily, float] = {}
        for family, timeout_ms in self.send_timeouts_ms.items():
            if not isinstance(family, SendFamily):
                raise ValueError(f"send_timeouts_ms has timeouts by {_members(SendFamily)}, got {family!r}")
            timeouts[family] = whole_timeout_ms(f"send_timeouts_ms of {family}", timeout_ms)
        object.__setattr__(self, "send_timeouts_ms", MappingProxyType(timeouts))
        check_whole("outbound_waiter_slots", self.outbound_waiter_slots, 1, 1 << 20)
        check_whole("requests_max", self.requests_max, 1, 1 << 20)
        check_whole("spots_max", self.spots_max, 1, 1 << 31)

    def send_timeout_of(self, family: SendFamily) -> int:
        """In whole milliseconds."""
        return whole_timeout_ms(family, self.send_timeouts_ms.get(family, self.send_timeout_ms))

    def resolve(self, processors: ProcessorFigures, *, memory_hard_limit_bytes: int | None = None) -> JobLimits:
        """Check the settings against the machine; before anything is bound.

        Raises ValueError if a byte figure is above the memory there is, or the jobs come to too many.
        """
        for name in ("memory_limit_bytes", "budget_bytes"):
            value = getattr(self.core_hwm, name)
            if value is not None and memory_hard_limit_bytes is not None and value > memory_hard_limit_bytes:
                raise ValueError(f"{name}={value} is above the hard limit of {memory_hard_limit_bytes} bytes")
        return self.jobs.resolve(processors)
