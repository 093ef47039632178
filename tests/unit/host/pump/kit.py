"""A pump on a scripted transport, a real job queue, and a plain ingress: owners' queues are one list."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from callyard.host.errors import HostErrorKind
from callyard.host.jobs import JobQueue, Permit
from callyard.host.pump import Pump, RotationLimits
from callyard.testing.clock import FakeClock
from callyard.testing.scripted_transport import ScriptedSource, ScriptedTransport
from callyard.testing.stepped_loop import SteppedLoop
from callyard.transport.port import Completion, Record, SourceId, SourceKind

PUMP_TYPE: Final[ContextVar[type[Pump]]] = ContextVar("pump_type", default=Pump)
"""What worlds are made with: tests of the tests put in a pump that has a fault."""


class FakeIngress:
    """Keeps what was committed until the test begins its turn."""

    def __init__(self) -> None:
        self.queued: deque[tuple[Record, Permit]] = deque()
        self.committed: list[Record] = []
        self.begun: list[Record] = []
        self.controlled: list[Record] = []
        self.completed: list[Completion] = []
        self.refusals: list[tuple[Record, HostErrorKind]] = []
        self.lost_sources: list[SourceId] = []
        self.verdict: Callable[[Record], HostErrorKind | None] = lambda record: None
        self.subscribers: Sequence[str] = ()
        self.on_control: Callable[[Record], None] = lambda record: None

    def commit(self, record: Record, permit: Permit) -> HostErrorKind | None:
        kind = self.verdict(record)
        if kind is None:
            permit.to_queued()
            self.queued.append((record, permit))
            self.committed.append(record)
        return kind

    def targets_of(self, record: Record) -> Sequence[str]:
        return self.subscribers

    def control(self, record: Record) -> None:
        self.on_control(record)
        self.controlled.append(record)

    def complete(self, completion: Completion) -> None:
        self.completed.append(completion)

    def refused(self, record: Record, kind: HostErrorKind) -> None:
        self.refusals.append((record, kind))

    def lost(self, source: SourceId) -> None:
        self.lost_sources.append(source)


class World:
    """All parts, on a loop that runs only when told to."""

    def __init__(
        self,
        jobs_max: int = 128,
        *,
        limits: RotationLimits | None = None,
        ingress: FakeIngress | None = None,
        may_wait: Callable[[], None] | None = None,
    ) -> None:
        self.loop = SteppedLoop()
        self.clock = FakeClock()
        self.transport = ScriptedTransport()
        self.jobs = JobQueue(jobs_max, clock=self.clock, may_wait=may_wait)
        self.ingress = ingress or FakeIngress()
        self.errors: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda loop, context: self.errors.append(context))
        self.pump = PUMP_TYPE.get()(self.transport, self.jobs, self.ingress, self.clock, limits=limits)

    def start(self) -> None:
        self.do(self.pump.start)

    def do(self, action: Callable[[], object]) -> None:
        """Call inside the loop, and let it come to rest."""
        self.loop.call_soon(action)
        self.settle()

    def settle(self) -> None:
        """Until nothing can run."""
        self.loop.settle()
        if self.pump.failure is None:
            self.pump.check_invariants()
        self.jobs.check_invariants()

    def turn(self) -> None:
        """One iteration of the loop: what is ready now, and nothing that it brings about."""
        self.loop.call_soon(self.loop.stop)
        self.loop.run_forever()

    def add(self, *names: str, kind: SourceKind = SourceKind.MESH) -> list[ScriptedSource]:
        return [self.transport.add_source(name, kind) for name in names]

    def hold(self, count: int) -> list[Permit]:
        """Take permits away, as jobs do whose handlers do not begin."""
        return [permit for _ in range(count) if (permit := self.jobs.try_acquire()) is not None]

    def begin(self, count: int = 1) -> list[Record]:
        """Begin the oldest turns that are queued: their permits go back."""
        begun = []
        for _ in range(min(count, len(self.ingress.queued))):
            record, permit = self.ingress.queued.popleft()
            self.ingress.begun.append(record)
            begun.append(record)
            permit.release()
        return begun

    def drain(self) -> None:
        """Begin whatever there is until nothing is left; a flood without an end would never return."""
        self.settle()
        while self.ingress.queued:
            self.begin()
            self.settle()

    @property
    def in_use(self) -> tuple[int, int]:
        """Reserved, queued."""
        status = self.jobs.status()
        return status.reserved, status.queued


@contextmanager
def world(jobs_max: int = 128, *, started: bool = True, **options: Any) -> Iterator[World]:
    made = World(jobs_max, **options)
    try:
        if started:
            made.start()
        yield made
        assert made.errors == []
    finally:
        made.pump.close()
        made.loop.close()


def names(records: Iterable[Record]) -> list[str]:
    return [str(record.source) for record in records]


def runs(records: Iterable[Record]) -> list[tuple[str, int]]:
    """Neighbours of one source, as (source, how many)."""
    found: list[tuple[str, int]] = []
    for name in names(records):
        if found and found[-1][0] == name:
            found[-1] = (name, found[-1][1] + 1)
        else:
            found.append((name, 1))
    return found


def per_source(records: Iterable[Record]) -> Counter[str]:
    return Counter(names(records))


def sequences(records: Iterable[Record], source: str) -> list[int]:
    return [record.sequence for record in records if record.source == source]
