"""What a host asks of a transport. Records come by sources; operations go out one at a time; a flow state is absolute.

A transport knows bytes and no jobs, a host knows jobs and no bytes. Source: job-queue §11.1, R2, R14.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum, StrEnum
from typing import NewType, Protocol

import msgspec

SourceId = NewType("SourceId", str)
"""One connection or peer pipe, a session's pull, a subscriber: what a record comes from."""


class SourceKind(StrEnum):
    MESH = "mesh"
    CLIENT_SERVER = "client_server"
    FANOUT = "fanout"
    SERVICE = "service"
    STREAM = "stream"


class HeadKind(StrEnum):
    """What stands at the physical head of a source's queue."""

    NONE = "none"
    COMPLETION = "completion"
    """A reply or error reply to an operation of this side: it needs no permit."""
    ORDINARY = "ordinary"


class FlowState(IntEnum):
    RUNNING = 0
    PAUSED = 1


class RecordKind(StrEnum):
    ONE_WAY = "one_way"
    REQUEST = "request"
    PUBLISH = "publish"
    CONTROL = "control"
    """Heartbeat, topology, relocation, SendReady: handled by the host, in order with all else."""
    MALFORMED = "malformed"


class Record(msgspec.Struct, frozen=True, eq=False):
    """One received record. Its payload is not decoded: that is for the turn which has its gate."""

    kind: RecordKind
    source: SourceId
    target: str = ""
    """The spot's id, or the channel or pattern of a publish."""
    message_type: str = ""
    payload: bytes = b""
    content_type: str = "json"
    operation_id: int = 0
    """Of a request: what its reply names."""
    sequence: int = 0
    """Rising per source."""
    deadline_at_ms: int | None = None


class Completion(msgspec.Struct, frozen=True, eq=False):
    """The end of a request that this side sent."""

    operation_id: int
    payload: bytes = b""
    error: str = ""
    """An error reply's kind, by its name; empty: a reply."""
    message: str = ""


class OutgoingKind(StrEnum):
    ONE_WAY = "one_way"
    REQUEST = "request"
    PUBLISH = "publish"
    REPLY = "reply"


class Outgoing(msgspec.Struct, frozen=True, eq=False):
    """One operation. It is started once, at one target."""

    kind: OutgoingKind
    target: str
    message_type: str = ""
    payload: bytes = b""
    operation_id: int = 0
    deadline_at_ms: int | None = None
    error: str = ""
    """Of an error reply."""


class FlowResult(StrEnum):
    OK = "ok"
    INVALID_STATE = "invalid_state"
    """The socket is closing: expected, and not counted."""
    NOT_SUPPORTED = "not_supported"
    FAILED = "failed"


class FlowTarget(Protocol):
    """A socket that takes a receive-flow state: mesh ROUTER and ClientServer sockets, no other."""

    @property
    def name(self) -> str: ...

    async def set_receive_flow_state(self, state: FlowState) -> FlowResult: ...


class CoreHwmProfile(Enum):
    """How much memory the transport's queues may take. No text and no other profile equals one of these."""

    COMPACT = "compact"
    LOW_LATENCY = "low_latency"
    BALANCED = "balanced"
    THROUGHPUT = "throughput"


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreHwmOptions:
    """The transport's byte figures. A host hands them over as they are, and computes nothing of them. Source: R12."""

    memory_limit_bytes: int | None = None
    budget_bytes: int | None = None
    """Exact, and goes before the limit."""
    profile: CoreHwmProfile = CoreHwmProfile.BALANCED

    def __post_init__(self) -> None:
        for name in ("memory_limit_bytes", "budget_bytes"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} must be a positive whole number of bytes, or None, got {value!r}")
        if not isinstance(self.profile, CoreHwmProfile):
            raise ValueError(f"profile of the byte limits must be a CoreHwmProfile, got {self.profile!r}")


class Transport(Protocol):
    """One for a host. All calls on the loop's thread."""

    def attach(self, on_readable: Callable[[SourceId], None], on_closed: Callable[[SourceId], None]) -> None:
        """Tell of sources with something to read, at least once after each time that they were found empty."""

    def sources(self) -> list[SourceId]: ...

    def kind_of(self, source: SourceId) -> SourceKind: ...

    def head_kind(self, source: SourceId) -> HeadKind:
        """Without taking anything."""
        ...

    def take(self, source: SourceId) -> Record:
        """The ordinary record at the head. Its bytes are then no longer the transport's."""
        ...

    def take_completion(self, source: SourceId) -> Completion: ...

    def start(self, outgoing: Outgoing) -> Awaitable[None]:
        """Start one operation: done when the transport's queue took it. Waiting for bytes or a paused peer is inside.

        Raises `TransportRefused`.
        """
        ...

    def flow_targets(self) -> list[FlowTarget]: ...

    def snapshot(self) -> Mapping[str, float]:
        """Byte figures for status, which nothing here reads. Those that have series: `callyard.host.status`.

        All are bytes, but `blocked_ratio` (0..1): which part of the connections cannot send.
        """
        ...

    async def close(self) -> None: ...


TransportFactory = Callable[[CoreHwmOptions], Transport]


class TransportRefused(Exception):
    """An operation was not taken: `not_found`, `not_connected`, `timeout` or `terminated`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
