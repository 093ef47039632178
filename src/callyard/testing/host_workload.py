"""What is drawn from the seed for a simulated host: limits, owners, sources, what goes wrong; and names of messages."""

from __future__ import annotations

from enum import StrEnum
from random import Random
from typing import Final, NamedTuple

import msgspec

from callyard.host.config import HostConfig, JobQueueConfig
from callyard.host.ledger import OwnerLimits
from callyard.transport.port import SourceKind

PADDING_BYTES_MAX: Final = 300
HOPS_MAX: Final = 2
"""How far a handler's sends go on sending."""
SHUTDOWN_MS: Final = 2_000


class Faults(msgspec.Struct, frozen=True):
    """Chances, each 0..1."""

    raises: float = 0
    waits: float = 0
    """A handler waits for something."""
    hangs: float = 0
    """It never ends by itself."""
    stubborn: float = 0
    """It swallows its cancellation for a while."""
    cancels_itself: float = 0
    calls_itself: float = 0
    relays: float = 0
    """It sends to others of its host, and waits for some of them."""
    strays: float = 0
    """It leaves a task behind that goes on to send."""
    acquires: float = 0
    """It asks for a permit under its gate, which is forbidden."""
    unreadable: float = 0
    """A payload that the codec cannot read."""
    malformed: float = 0
    floods: float = 0
    closes: float = 0
    """A source goes away, and comes back."""
    destroys: float = 0
    """An owner is removed, wherever it stands, and made anew."""
    moves: float = 0
    """An owner is sealed and moved, well or not."""
    jumps: float = 0
    """The clock jumps, or somebody burns the time."""
    held: float = 0
    """An operation waits in the transport."""
    refused: float = 0
    unanswered: float = 0
    """A reply does not come, comes late, or comes twice."""
    setters: float = 0
    """A socket's setter hangs, fails or is slow."""
    signals: float = 0
    """Readable signals come again and again, and for nothing."""
    leaves: float = 0
    """A caller is cancelled."""

    @classmethod
    def draw(cls, rng: Random) -> Faults:
        """Some of them, each as likely as the seed says."""
        return cls(**{name: rng.choice((0, 0, 0.05, 0.3)) for name in cls.__struct_fields__})


class Place(msgspec.Struct, frozen=True):
    """An owner that is there from the start."""

    key: str
    gate: int | None
    """Of which shared gate; None: of its own."""
    is_async: bool


class Setting(msgspec.Struct, frozen=True):
    """What of a seed stays the same."""

    jobs_max: int
    pause_percent: int
    resume_percent: int
    limits: OwnerLimits
    slots: int
    requests_max: int
    send_timeout_ms: int
    request_timeout_ms: int
    places: tuple[Place, ...]
    sources: tuple[SourceKind, ...]
    sockets: int
    """Those that take a flow state."""
    acts: int
    """Of peers and users outside."""
    ends_early: bool
    """It is stopped in the middle of everything."""

    @classmethod
    def draw(cls, rng: Random) -> Setting:
        gates = rng.randint(0, 2)
        pause_percent = rng.choice((100, 80, 50, 1))
        return cls(
            jobs_max=rng.choice((1, 1, 2, 3, 10)),
            pause_percent=pause_percent,
            resume_percent=rng.choice([percent for percent in (0, 33, 60, 99) if percent < pause_percent]),
            limits=OwnerLimits(
                application_items_max=rng.choice((1, 2, 8, 50)),
                application_bytes_max=rng.choice((600, 2_000, 1 << 20)),
                lifecycle_items_max=rng.choice((1, 3, 50)),
                lifecycle_burst_max=rng.choice((1, 2, 8)),
                owner_budget_ms=rng.choice((1, 10)),
            ),
            slots=rng.choice((1, 2, 256)),
            requests_max=rng.choice((1, 3, 4_096)),
            send_timeout_ms=rng.choice((50, 1_000)),
            request_timeout_ms=rng.choice((100, 5_000)),
            places=tuple(
                Place(
                    key=f"spot-{number}",
                    gate=rng.randrange(gates) if gates and rng.random() < 0.5 else None,
                    is_async=rng.random() < 0.7,
                )
                for number in range(rng.randint(1, 5))
            ),
            sources=tuple(rng.choice(tuple(SourceKind)) for _ in range(rng.randint(1, 5))),
            sockets=rng.randint(0, 2),
            acts=rng.randint(20, 120),
            ends_early=rng.random() < 0.3,
        )

    @property
    def config(self) -> HostConfig:
        return HostConfig(
            owners=self.limits,
            jobs=JobQueueConfig(
                jobs_max=self.jobs_max, pause_percent=self.pause_percent, resume_percent=self.resume_percent
            ),
            send_timeout_ms=self.send_timeout_ms,
            outbound_waiter_slots=self.slots,
            request_timeout_ms=self.request_timeout_ms,
            requests_max=self.requests_max,
            shutdown_timeout_ms=SHUTDOWN_MS,
        )


class CargoKind(StrEnum):
    ONE_WAY = "one_way"
    REQUEST = "request"
    PUBLISH = "publish"


class Cargo(NamedTuple):
    """What a payload says: which message it is, and how far its handler may go on."""

    stream: str
    """Who sent it. What one stream sends to one owner arrives in order."""
    number: int
    hops: int
    kind: CargoKind

    @property
    def name(self) -> str:
        return f"{self.stream}#{self.number}"

    def pack(self, padding_bytes: int = 0, *, readable: bool = True) -> bytes:
        text = f"{self.stream} {self.number} {self.hops} {self.kind} ".encode() + b"." * padding_bytes
        return text if readable else b"!" + text

    @classmethod
    def read(cls, payload: bytes) -> Cargo:
        """Raises ValueError for what is not readable."""
        if payload.startswith(b"!"):
            raise ValueError("not readable")
        return cls.peek(payload)

    @classmethod
    def peek(cls, payload: bytes) -> Cargo:
        stream, number, hops, kind, _ = payload.removeprefix(b"!").decode().split(" ")
        return cls(stream, int(number), int(hops), CargoKind(kind))
