"""The pump: one line of sources, one permit for each record before it is received, and short rotations.

Theory of operation. A source with an ordinary record at its head stands in one line, once: first among the waiters of
the job queue (`JobQueue.wait`, oldest first), then, with a permit in its hand, among the granted. A rotation serves the
granted from the head of that line: a source takes its batch and goes to the tail, by the same wait as everybody else.
So the head of the line is the cursor: what a rotation did not reach is where the next one begins.

    readable -> signalled -> (completion at the head) completing -> taken without a permit
                          -> (record at the head) waiter in the job queue -> granted -> batch -> the tail, or idle

A batch ends with the rotation (64 items, 1 MiB, 2 ms), with the source's records, or with the permits: the first one
came through the line, each further one is taken only if it is free and nobody waits. Control and malformed records give
theirs back when they are handled, others when their handler starts; a publish takes one for each of its targets, one
after the other, and waits for the next one at its source's place in the line.

Nothing polls: without a permit, a source's records stay in the transport and the pump is not scheduled at all. It is
woken by a signal, a grant, or by itself when a rotation was cut; between two rotations the loop serves all else.

Source: job-queue §2.2, §3, §4, R15, R16, R23-R35, R51-R56, R112, R123.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import msgspec

from callyard.clock import Clock
from callyard.host.context import infrastructure_context, receive_callback
from callyard.host.errors import HostErrorKind
from callyard.host.jobs import JobQueue, JobWaiter, Permit
from callyard.transport.port import Completion, HeadKind, Record, RecordKind, SourceId, Transport

ROTATION_ITEMS_MAX: Final = 64
"""Fixed, the same for all kinds of sources. Source: job-queue §2.2."""


# Enum members by name: looking them up costs as much as a step of a record's way.
_ONE_WAY: Final = RecordKind.ONE_WAY
_REQUEST: Final = RecordKind.REQUEST
_COMPLETION: Final = HeadKind.COMPLETION
_NONE: Final = HeadKind.NONE


class Ingress(Protocol):
    """Where the pump puts what it took. No method waits, raises on bad input, or calls a handler.

    All run as receive callbacks, in which no gate can be entered (`callyard.host.context`): work that they start and
    that outlives them needs a context of its own.
    """

    def commit(self, record: Record, permit: Permit) -> HostErrorKind | None:
        """Append a one-way, a request, or a publish to one owner.

        None: the permit is now the owner's, as queued. Else nothing has changed, and the permit stays the pump's.
        """
        ...

    def targets_of(self, record: Record) -> Sequence[str]:
        """The owners that a publish is for, now: each gets it with its own id as `target`.

        Empty: the record ends here, and it is the ingress that counts it.
        """
        ...

    def control(self, record: Record) -> None:
        """Handle it now, to the end."""
        ...

    def complete(self, completion: Completion) -> None: ...

    def refused(self, record: Record, kind: HostErrorKind) -> None:
        """A record that reaches no handler: count it, and answer it if it has an operation id."""
        ...

    def lost(self, source: SourceId) -> None:
        """A source is gone, and its wait has ended. At any time, inside the transport's callback (R111)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RotationLimits:
    """What cuts a rotation beside 64 items. One item always passes, whatever its size."""

    bytes_max: int = 1 << 20
    """Payload bytes, from 1."""
    duration_ms_max: int = 2
    """From 1."""

    def __post_init__(self) -> None:
        if self.bytes_max < 1 or self.duration_ms_max < 1:
            raise ValueError(f"a rotation needs bytes_max >= 1 and duration_ms_max >= 1, got {self}")


class PumpStatistics(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Gauges of now, and counts since the start."""

    sources: int
    """Known: they were readable once and are not closed."""
    waiting: int
    """In the line without a permit."""
    granted: int
    """In the line with a permit."""
    publishing: int
    """Records taken that wait for permits for further targets; at most one for each source."""
    wakes: int
    taken: int
    completions: int
    committed: int
    control: int
    malformed: int
    refused: int
    """Commits that were refused."""


class _FanOut:
    """A publish that has targets left; never empty."""

    __slots__ = ("record", "targets")

    def __init__(self, record: Record, targets: Sequence[str]) -> None:
        self.record = record
        self.targets = deque(targets)

    def next_record(self) -> Record:
        return msgspec.structs.replace(self.record, target=self.targets.popleft())


class _Entry:
    """One source. It is in the line exactly while it has a waiter, a permit, or is being served."""

    __slots__ = ("closed", "fan_out", "permit", "source", "waiter")

    def __init__(self, source: SourceId) -> None:
        self.source = source
        self.waiter: JobWaiter | None = None
        self.permit: Permit | None = None
        self.fan_out: _FanOut | None = None
        self.closed = False


class _Rotation:
    """What one rotation may still do."""

    __slots__ = ("_bytes_left", "_clock", "_ends_at_ms", "_items_left")

    def __init__(self, limits: RotationLimits, clock: Clock) -> None:
        self._clock = clock
        self._items_left = ROTATION_ITEMS_MAX
        self._bytes_left = limits.bytes_max
        self._ends_at_ms = clock.now_ms() + limits.duration_ms_max

    def add(self, payload: bytes) -> None:
        self._items_left -= 1
        self._bytes_left -= len(payload)

    @property
    def is_cut(self) -> bool:
        if self._items_left == ROTATION_ITEMS_MAX:
            return False
        return self._items_left <= 0 or self._bytes_left <= 0 or self._clock.now_ms() >= self._ends_at_ms


class Pump:
    """Takes records from a transport, one permit each, and hands them to the ingress. All calls on the loop's thread.

    An exception out of the ingress is a bug of ours: the pump closes, `failure` holds it, `on_failure` is told, and the
    loop's exception handler gets it.
    """

    def __init__(
        self,
        transport: Transport,
        jobs: JobQueue,
        ingress: Ingress,
        clock: Clock,
        *,
        limits: RotationLimits | None = None,
        on_failure: Callable[[Exception], None] | None = None,
    ) -> None:
        self._transport = transport
        self._jobs = jobs
        self._ingress = ingress
        self._clock = clock
        self._limits = limits or RotationLimits()
        self._on_failure = on_failure
        self.failure: Exception | None = None

        self._entries: dict[SourceId, _Entry] = {}
        """Sources that were readable and are not closed."""
        self._signalled: dict[_Entry, None] = {}
        """To be looked at, in the order of their signals. Subset of the entries."""
        self._completing: dict[_Entry, None] = {}
        """A completion stood at the head. Subset of the entries."""
        self._line: dict[_Entry, None] = {}
        """Waiting, granted, or being served. Beside entries: closed sources with a publish under way."""
        self._granted: dict[_Entry, None] = {}
        """Those of the line that hold a permit; the first is the cursor."""

        self._receiving = False
        self._closed = False
        self._wake_handle: asyncio.Handle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context = contextvars.Context()
        """Of every step: who wakes the pump may be inside a handler's turn, with its marker."""
        self._receive_context = contextvars.Context()
        self._wakes = self._taken = self._completions = self._committed = 0
        self._control = self._malformed = self._refused = 0

    def start(self) -> None:
        """Attach to the transport, and look at every source: what came before the attach is not lost."""
        if self._loop is not None or self._closed:
            raise RuntimeError("a pump is started once")
        self._loop = asyncio.get_running_loop()
        self._context = infrastructure_context()
        with receive_callback():
            self._receive_context = contextvars.copy_context()
        self._receiving = True
        self._transport.attach(self._on_readable, self._on_closed)
        for source in self._transport.sources():
            self._on_readable(source)

    def stop_receiving(self) -> None:
        """End every wait for a permit, once each. Records stay in the transport; completions are still taken.

        A publish that has begun goes on to its other targets.
        """
        self._receiving = False
        for entry in list(self._line):
            if entry.fan_out is None:
                self._leave(entry)

    def close(self) -> None:
        """End all; permits in hand go back. The targets that a publish has left are refused as shutting down.

        Safe at any point, also out of the ingress.
        """
        if self._closed:
            return
        self._closed = True
        self._receiving = False
        if self._wake_handle is not None:
            self._wake_handle.cancel()
            self._wake_handle = None
        line = list(self._line)
        for entry in line:
            self._leave(entry)
        self._entries.clear()
        self._signalled.clear()
        self._completing.clear()
        for entry in line:
            self._abandon(entry)

    def cancel_wait(self, source: SourceId) -> None:
        """End a source's wait, and nothing else: its records stay where they are until `look`, or its next signal."""
        entry = self._entries.get(source)
        if entry is not None and entry.fan_out is None:
            self._leave(entry)

    def look(self, source: SourceId) -> None:
        """Look at a source again, as after a readable signal."""
        self._on_readable(source)

    def statistics(self) -> PumpStatistics:
        return PumpStatistics(
            sources=len(self._entries),
            waiting=sum(1 for entry in self._line if entry.waiter is not None),
            granted=len(self._granted),
            publishing=sum(1 for entry in self._line if entry.fan_out is not None),
            wakes=self._wakes,
            taken=self._taken,
            completions=self._completions,
            committed=self._committed,
            control=self._control,
            malformed=self._malformed,
            refused=self._refused,
        )

    def check_invariants(self) -> None:
        """Between two rotations. Raises AssertionError."""
        for entry in self._line:
            in_hand = entry.permit is not None
            assert (entry.waiter is not None) != in_hand, f"oldest_first: {entry.source} has not exactly one place"
            assert in_hand == (entry in self._granted), f"oldest_first: {entry.source} is lost between two lines"
            assert not entry.closed or entry.fan_out is not None, f"{entry.source} is closed and still waits"
            assert entry.fan_out is None or entry.fan_out.targets, f"{entry.source} publishes to nobody"
        assert self._granted.keys() <= self._line.keys()
        known = set(self._entries.values())
        assert self._signalled.keys() | self._completing.keys() <= known, "a closed source is still looked at"
        for entry in known:
            if entry not in self._line:
                assert (entry.waiter, entry.permit, entry.fan_out) == (None, None, None), f"{entry.source}: no place"
        work = self._signalled or self._completing or self._granted
        assert not work or self._closed or self._wake_handle is not None, "there is work and no wake"

    # The transport's callbacks: they take note and return (R58).

    def _on_readable(self, source: SourceId) -> None:
        if self._closed:
            return
        entry = self._entries.get(source)
        if entry is None:
            entry = self._entries[source] = _Entry(source)
        elif entry in self._line and self._transport.head_kind(source) is not HeadKind.COMPLETION:
            return  # its turn comes, and whoever serves it looks again
        self._signalled[entry] = None
        self._wake()

    def _on_closed(self, source: SourceId) -> None:
        entry = self._entries.pop(source, None)
        if entry is not None:
            entry.closed = True
            self._signalled.pop(entry, None)
            self._completing.pop(entry, None)
            if entry.fan_out is None:
                self._leave(entry)
        if not self._closed:
            with receive_callback():
                self._ingress.lost(source)

    # The line.

    def _line_up(self, entry: _Entry) -> None:
        if self._closed or self._jobs.is_closed:
            self._abandon(entry)
            return
        if entry in self._line or not (self._receiving or entry.fan_out is not None):
            return
        self._line[entry] = None
        waiter = self._jobs.wait(entry, partial(self._grant, entry), closed=partial(self._end_wait, entry))
        if entry.permit is None:  # not granted inside the call
            entry.waiter = waiter

    def _grant(self, entry: _Entry, permit: Permit) -> None:
        assert entry in self._line, f"a permit for {entry.source}, which does not wait"
        entry.waiter = None
        entry.permit = permit
        self._granted[entry] = None
        self._wake()

    def _end_wait(self, entry: _Entry) -> None:
        """The job queue was closed."""
        entry.waiter = None
        self._line.pop(entry)
        self._abandon(entry)

    def _abandon(self, entry: _Entry) -> None:
        """What its publish has not reached ends here, seen by the ingress: the record was taken, it cannot go back."""
        fan_out, entry.fan_out = entry.fan_out, None
        while fan_out is not None and fan_out.targets:
            self._refuse(fan_out.next_record(), HostErrorKind.SHUTTING_DOWN)

    def _leave(self, entry: _Entry) -> None:
        """Out of the line, wherever in it the source stands. One that is being served leaves when its batch ends."""
        if entry.waiter is not None:
            waiter, entry.waiter = entry.waiter, None
            self._line.pop(entry)
            waiter.cancel()
        elif entry.permit is not None:
            permit, entry.permit = entry.permit, None
            self._line.pop(entry)
            self._granted.pop(entry)
            permit.release()

    # Rotations.

    def _wake(self) -> None:
        if self._wake_handle is None and not self._closed:
            assert self._loop is not None
            self._wake_handle = self._loop.call_soon(self._step, context=self._context)

    def _step(self) -> None:
        self._wakes += 1
        try:
            signalled, self._signalled = self._signalled, {}
            for entry in signalled:
                self._look_at(entry)
            self._rotate(self._completing, self._serve_completions)
            self._rotate(self._granted, self._serve)
        except Exception as error:
            self.failure = error
            self.close()
            if self._on_failure is not None:
                self._on_failure(error)
            raise
        # Only now: until here whatever gave a permit back or signalled found a wake under way.
        self._wake_handle = None
        if self._signalled or self._completing or self._granted:
            self._wake()

    def _rotate(self, line: dict[_Entry, None], serve: Callable[[_Entry, _Rotation], None]) -> None:
        rotation = _Rotation(self._limits, self._clock)
        while line and not rotation.is_cut:
            entry = next(iter(line))
            del line[entry]
            serve(entry, rotation)

    def _look_at(self, entry: _Entry) -> None:
        """Put a source where its head belongs."""
        if entry.closed or self._closed:
            return
        match self._transport.head_kind(entry.source):
            case HeadKind.COMPLETION:
                self._completing[entry] = None
            case HeadKind.ORDINARY:
                self._line_up(entry)
            case HeadKind.NONE:
                pass

    def _serve_completions(self, entry: _Entry, rotation: _Rotation) -> None:
        while not rotation.is_cut and self._head_of(entry) is HeadKind.COMPLETION:
            self._complete(entry, rotation)
        self._look_at(entry)

    def _serve(self, entry: _Entry, rotation: _Rotation) -> None:
        """One batch of one source. It stays in the line meanwhile, so that its signals change nothing."""
        permit, entry.permit = entry.permit, None
        assert permit is not None
        try:
            while not rotation.is_cut:
                if entry.fan_out is None:
                    head = self._head_of(entry)
                    if head is _COMPLETION:
                        self._complete(entry, rotation)
                        continue
                    if head is _NONE or not self._receiving:
                        break
                if permit is None and (permit := self._jobs.try_acquire()) is None:
                    break
                in_use, permit = permit, None
                self._use(entry, in_use, rotation)
        finally:
            self._line.pop(entry, None)
            if permit is not None:
                permit.release()
        if entry.fan_out is not None:
            self._line_up(entry)
        self._look_at(entry)  # a completion does not wait for the targets of a publish before it

    def _head_of(self, entry: _Entry) -> HeadKind:
        return _NONE if entry.closed or self._closed else self._transport.head_kind(entry.source)

    def _complete(self, entry: _Entry, rotation: _Rotation) -> None:
        completion = self._transport.take_completion(entry.source)
        self._completions += 1
        rotation.add(completion.payload)
        self._receive_context.run(self._ingress.complete, completion)

    def _use(self, entry: _Entry, permit: Permit, rotation: _Rotation) -> None:
        """Take one record, or one more target of a publish, for one permit."""
        committed = False
        try:
            if entry.fan_out is None:
                record = self._transport.take(entry.source)
                self._taken += 1
                rotation.add(record.payload)
                committed = self._receive_context.run(self._receive, entry, record, permit)
            else:
                rotation.add(b"")
                committed = self._receive_context.run(self._publish_next, entry, entry.fan_out, permit)
        finally:
            if not committed:
                permit.release()

    def _receive(self, entry: _Entry, record: Record, permit: Permit) -> bool:
        """By the header alone. Returns whether the ingress now owns the permit."""
        if record.kind is _ONE_WAY or record.kind is _REQUEST:
            return self._commit(record, permit)
        match record.kind:
            case RecordKind.CONTROL:
                self._control += 1
                self._ingress.control(record)
                return False
            case RecordKind.MALFORMED:
                self._malformed += 1
                self._ingress.refused(record, HostErrorKind.PROTOCOL_ERROR)
                return False
            case RecordKind.PUBLISH:
                targets = self._ingress.targets_of(record)
                if not targets:
                    return False
                entry.fan_out = _FanOut(record, targets)
                return self._publish_next(entry, entry.fan_out, permit)
            case _:
                raise AssertionError(f"a record of kind {record.kind!r} from {entry.source}")

    def _publish_next(self, entry: _Entry, fan_out: _FanOut, permit: Permit) -> bool:
        record = fan_out.next_record()
        if not fan_out.targets:
            entry.fan_out = None
        return self._commit(record, permit)

    def _commit(self, record: Record, permit: Permit) -> bool:
        kind = self._ingress.commit(record, permit)
        if kind is None:
            self._committed += 1
            return True
        self._refuse(record, kind)
        return False

    def _refuse(self, record: Record, kind: HostErrorKind) -> None:
        self._refused += 1
        self._ingress.refused(record, kind)
