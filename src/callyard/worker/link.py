"""The worker's end of one executor's connection: bytes to events, frames to bytes.

One reader, one writer. The outbox holds at most `outbox_frames_max` frames; an ExecuteCall that finds it full is
refused, other frames wait in it. A flush hands up to 64 frames to the transport at once; while the transport is over
its high-water mark nothing is flushed. Seats say which attempts this executor holds, so that marks can be read as
calls. Source: call-execution X32-X36, X48-X50, X68.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol, assert_never, cast

import msgspec
from msgspec import Raw

from callyard.clock import Clock
from callyard.errors import ErrorKind, Outcome, ProtocolError
from callyard.ids import CallId, CallNumber, ExecutorId, RequestId, TaskId, task_of
from callyard.scheduler.calls import FunctionTarget
from callyard.scheduler.events import AttemptFailed, CallCompleted, CallSuspended, SchedulerEvent
from callyard.wire.arena import ARENA_VALUE_BYTES
from callyard.wire.codec import UnknownMessage, decode_executor_message, encode_message
from callyard.wire.frames import FrameReader
from callyard.wire.messages import (
    EXECUTE_CALLS_MAX,
    NULL,
    RECALLED,
    ArenaReleased,
    ArenaReleasedPayload,
    BatchedCall,
    CallEvent,
    CallFailed,
    CallFailedPayload,
    CallsSettled,
    CallWaiting,
    Described,
    ExecuteCall,
    ExecuteCallPayload,
    ExecuteCalls,
    ExecuteCallsPayload,
    ExecutorMessage,
    Heartbeat,
    HeartbeatPayload,
    Promises,
    ResultForm,
    Stored,
    SubcallRequest,
    WaitKind,
    WorkerMessage,
)
from callyard.wire.messages import CallCompleted as CallCompletedFrame
from callyard.wire.values import check_value, from_wire, is_packed, to_wire
from callyard.worker.arena import Arena
from callyard.worker.marks import MarkPage

FRAMES_PER_FLUSH: Final = 64
WRITE_HIGH_WATER_BYTES: Final = 256 * 1024
_STOPPED_KINDS: Final = frozenset({ErrorKind.TIMEOUT, ErrorKind.CANCELLED, ErrorKind.DEADLINE})
LARGE_PARTS: Final = 16
"""An answer above this part of `outbox_bytes_max` is large: it waits for room."""
HELD_OUTBOXES: Final = 64
"""How many times `outbox_bytes_max` the waiting answers may be together."""
IDEMPOTENT: Final = Promises(idempotent=True)


class Seat(msgspec.Struct, frozen=True, gc=False):
    """One attempt that this executor holds."""

    number: CallNumber
    budget_ms: int


class Placed(msgspec.Struct, frozen=True, gc=False):
    """A value in the form of a message: its JSON and a sidecar, or its place in the arena."""

    raw: Raw
    sidecar: bytes | None
    at: Stored | None


class SubcallAsked(msgspec.Struct, frozen=True, gc=False):
    """A CallWaiting of kind subcall, whose function is still a name."""

    executor_id: ExecutorId
    call_id: CallId
    """The parent."""
    request_id: RequestId
    attempt_seq: int
    subcall: SubcallRequest
    args: bytes
    """Its encoded arguments."""


LinkEvent = SchedulerEvent | SubcallAsked


class OpenBatch(msgspec.Struct):
    """Calls that leave in one frame at the next flush: all of one function and task (X94)."""

    task_id: TaskId
    target: FunctionTarget
    row: bool
    strings: bool
    budget_ms: int
    audit: str
    events: bool
    result_form: ResultForm
    calls: list[BatchedCall]


class LinkOwner(Protocol):
    """What a link tells; all calls come on the loop."""

    def on_events(self, link: ExecutorLink, events: list[LinkEvent]) -> None: ...
    def on_heartbeat(self, link: ExecutorLink, heartbeat: HeartbeatPayload) -> None: ...
    def on_waiting(self, link: ExecutorLink, message: CallWaiting, sidecar: bytes | None) -> None: ...
    def on_call_event(self, link: ExecutorLink, message: CallEvent) -> None: ...
    def on_interrupted(self, link: ExecutorLink) -> None:
        """A call that had begun was stopped in the middle of its code."""
        ...

    def on_described(self, link: ExecutorLink, message: Described) -> None: ...
    def on_broken(self, link: ExecutorLink, cause: str, message: str) -> None: ...
    def takes_binary(self, call_id: CallId) -> bool:
        """Whether whoever asked for this call can read a result with binary parts."""
        ...


class ExecutorLink(asyncio.Protocol):
    """An asyncio protocol over the socket to one executor."""

    __slots__ = (  # read for every call: above 30 attributes without slots each read is a search
        "_asking",
        "_batch",
        "_bytes_max",
        "_clock",
        "_deaf",
        "_flushed",
        "_for_room",
        "_frames_max",
        "_granted",
        "_held",
        "_held_bytes",
        "_lost",
        "_outbox",
        "_outbox_bytes",
        "_owner",
        "_read_bytes",
        "_read_grants",
        "_reader",
        "_sealed",
        "_tail_socket",
        "_transport",
        "_write_paused",
        "arena",
        "cancelled_at_ms",
        "dropped_messages",
        "executor_id",
        "finished_calls",
        "io_attempts",
        "marks",
        "seats",
        "write_blocked_since_ms",
    )

    def __init__(
        self,
        executor_id: ExecutorId,
        owner: LinkOwner,
        marks: MarkPage,
        clock: Clock,
        outbox_frames_max: int,
        outbox_bytes_max: int,
        arena: Arena | None = None,
    ) -> None:
        """`arena`: for values that are too large for a frame; None: frames carry all."""
        self.arena = arena
        self._granted: dict[tuple[CallId, int], list[int]] = {}
        """What an attempt has in the arena, or had: it goes with its seat at the latest."""
        self._read_grants: list[int] = []
        """What was copied out of the arena, and is to be told."""
        self._read_bytes = 0
        """How much that was: together it had room there."""
        self._for_room: deque[Callable[[], None]] = deque()
        """What waits for room in the arena."""
        self.executor_id = executor_id
        self.marks = marks
        self.seats: dict[tuple[CallId, int], Seat] = {}
        self.cancelled_at_ms: dict[tuple[CallId, int], int] = {}
        """Attempts told to stop that have not answered."""
        self.io_attempts: set[tuple[CallId, int]] = set()
        """Attempts that asked for IO: what is open of it ends with them."""
        self.finished_calls = 0
        self.dropped_messages = 0
        """Messages of a type this version does not know."""
        self.write_blocked_since_ms: int | None = None
        self._owner = owner
        self._clock = clock
        self._frames_max = outbox_frames_max
        self._bytes_max = outbox_bytes_max
        self._outbox: deque[bytes] = deque()
        self._outbox_bytes = 0
        self._batch: OpenBatch | None = None
        self._held: deque[tuple[bytes, Callable[[], None] | None]] = deque()
        """Answers that wait for an empty outbox."""
        self._held_bytes = 0
        self._asking: deque[Callable[[], None]] = deque()
        """What waits until no answer does."""
        self._reader = FrameReader(executor_id)
        self._transport: asyncio.Transport | None = None
        self._write_paused = False
        self._sealed = False
        """Nothing more is sent."""
        self._deaf = False
        """Its bytes are not believed any more."""
        self._lost = asyncio.Event()
        self._tail_socket: socket.socket | None = None
        self._flushed: deque[tuple[int, Callable[[], None]]] = deque()
        """Callbacks of frames still in the outbox, by how many frames must leave before they are called."""

    async def open(self, sock: socket.socket) -> None:
        """Take over a connected socket that does not block.

        A duplicate of it stays with the link: the transport closes its own at the first failed write, and what a dying
        executor had sent before would be lost with it.
        """
        self._tail_socket = sock.dup()  # raises OSError when no descriptor is left
        self._tail_socket.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=sock)

    # --- asyncio.Protocol ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)
        self.flush()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        events: list[LinkEvent] = []
        try:
            for body in self._reader.feed(data):
                message, sidecar = decode_executor_message(body)
                self._take(message, sidecar, events)
        except ProtocolError as error:
            self._deaf = True
            self._break("malformed_frame", str(error))
        if self._read_grants:
            grants, self._read_grants, self._read_bytes = self._read_grants, [], 0
            if self.send(ArenaReleased(ArenaReleasedPayload(grants))):
                self.flush()
        if events:
            self._owner.on_events(self, events)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost.set()
        self._break("eof", "its connection ended" if exc is None else f"its connection broke: {exc}")

    def pause_writing(self) -> None:
        self._write_paused = True
        self.write_blocked_since_ms = self._clock.now_ms()

    def resume_writing(self) -> None:
        self._write_paused = False
        self.write_blocked_since_ms = None
        self.flush()

    # --- reading ------------------------------------------------------------------------------------------------

    def _take(self, message: ExecutorMessage | UnknownMessage, sidecar: bytes | None, events: list[LinkEvent]) -> None:
        match message:
            case CallCompletedFrame():
                self.finished_calls += 1
                payload = message.payload
                self._check_task(message.call_id, payload.task_id)
                events.append(
                    CallCompleted(
                        self.executor_id,
                        message.call_id,
                        payload.attempt_seq,
                        self._read_output(message, sidecar),
                        tuple(payload.notes) if payload.notes else (),
                        payload.budget_used_ms,
                        payload.run_us,
                    )
                )
            case CallFailed():
                self.finished_calls += message.payload.error_kind != RECALLED
                self._check_task(message.call_id, message.payload.task_id)
                if message.payload.error_kind in _STOPPED_KINDS and message.payload.outcome is Outcome.UNKNOWN:
                    self._owner.on_interrupted(self)
                events.append(self._attempt_failed(message.call_id, message.payload))
            case CallsSettled():
                calls = message.payload.calls
                self.finished_calls += len(calls)
                for call in calls:
                    if call.failure is not None:
                        events.append(self._attempt_failed(call.call_id, call.failure))
                    else:
                        output = bytes(call.output)
                        seq, used_ms = call.attempt_seq, call.budget_used_ms
                        events.append(CallCompleted(self.executor_id, call.call_id, seq, output, (), used_ms))
                if calls:
                    events[-1] = msgspec.structs.replace(events[-1], run_us=message.payload.run_us)
            case CallWaiting():
                self._take_waiting(message, sidecar, events)
            case Heartbeat():
                self._owner.on_heartbeat(self, message.payload)
            case CallEvent():
                self._check_task(message.call_id, message.payload.task_id)
                if (message.call_id, message.payload.attempt_seq) in self.seats:
                    self._owner.on_call_event(self, message)
            case Described():
                self._owner.on_described(self, message)
            case ArenaReleased():
                self._take_back(message.payload.grants)
            case UnknownMessage():
                self.dropped_messages += 1
            case _:
                assert_never(message)

    def _take_waiting(self, message: CallWaiting, sidecar: bytes | None, events: list[LinkEvent]) -> None:
        payload = message.payload
        call_id, seq = message.call_id, payload.attempt_seq
        self._check_task(call_id, payload.task_id)
        if payload.wait_kind == WaitKind.SUBCALL:
            if payload.subcall is None:
                raise ProtocolError(f"CallWaiting of kind subcall without a subcall ({self.executor_id})")
            args = self._read_value(payload.subcall.args, sidecar, payload.subcall.args_at, (call_id, seq))
            events.append(SubcallAsked(self.executor_id, call_id, message.request_id, seq, payload.subcall, args))
            return
        if payload.wait_kind == WaitKind.IO:
            if payload.io is None:
                raise ProtocolError(f"CallWaiting of kind io without a request ({self.executor_id})")
            events.append(CallSuspended(self.executor_id, call_id, seq, message.request_id))
            if (call_id, seq) not in self.seats or (call_id, seq) in self.cancelled_at_ms:
                return  # of an attempt that is over: nobody waits for the answer
        self._owner.on_waiting(self, message, sidecar)

    def _read_output(self, message: CallCompletedFrame, sidecar: bytes | None) -> bytes:
        """What a call returned. Binary parts come only to whoever can read them: others take it for JSON."""
        payload = message.payload
        if sidecar is None and payload.output_at is None:
            return bytes(payload.output)
        attempt = (message.call_id, payload.attempt_seq)
        output = self._read_value(payload.output, sidecar, payload.output_at, attempt)
        if is_packed(output) and not self._owner.takes_binary(message.call_id):
            raise ProtocolError(f"a binary result for {message.call_id}, which asked for JSON ({self.executor_id})")
        return output

    def _read_value(self, raw: Raw, sidecar: bytes | None, at: Stored | None, attempt: tuple[CallId, int]) -> bytes:
        """A value that an attempt sent, whole and checked. Raises `ProtocolError`."""
        if at is None:
            return from_wire(raw, sidecar)
        if self.arena is None:
            raise ProtocolError(f"a value in the arena of {self.executor_id}, which has none")
        self._read_grants.append(at.grant)
        self._read_bytes += at.length
        self.arena.check(at, self._read_bytes)
        if attempt not in self.seats:
            return b"null"  # it is over: nobody looks at what it says, and it may say much
        value = self.arena.take(at)
        check_value(value)
        return value

    def _take_back(self, grants: list[int]) -> None:
        """The executor has read these values of ours, or says so: only its own arena is at stake."""
        if self.arena is None:
            return
        for grant in grants:
            self.arena.release(grant)
        for resume in [self._for_room.popleft() for _ in range(len(self._for_room))]:
            resume()

    def _check_task(self, call_id: CallId, task_id: TaskId) -> None:
        """What an executor says of whose call it is must be so (X65): another tenant's cache lies behind a task id."""
        if task_id and task_id != task_of(call_id):
            raise ProtocolError(f"{self.executor_id} took call {call_id} for one of {task_id}")

    def _attempt_failed(self, call_id: CallId, payload: CallFailedPayload) -> AttemptFailed:
        recalled = payload.error_kind == RECALLED
        try:
            kind = ErrorKind.CANCELLED if recalled else ErrorKind(payload.error_kind)
        except ValueError:
            raise ProtocolError(f"unknown error_kind {payload.error_kind!r} ({self.executor_id})") from None
        return AttemptFailed(
            executor_id=self.executor_id,
            call_id=call_id,
            attempt_seq=payload.attempt_seq,
            kind=kind,
            message=payload.error_message,
            outcome=payload.outcome,
            recalled=recalled,
            details=payload.details,
            stack=payload.error_stack,
            local_variables=payload.local_variables,
            notes=tuple(payload.notes),
            budget_used_ms=payload.budget_used_ms,
            run_us=0 if payload.timing is None else payload.timing.run_ms * 1_000,
        )

    def pause_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    # --- writing ------------------------------------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        """Has, or had, a connection."""
        return self._tail_socket is not None or self._transport is not None

    @property
    def is_open(self) -> bool:
        return not self._sealed

    def reserve(self, call_id: CallId, attempt_seq: int, number: CallNumber, budget_ms: int) -> bool:
        """Seat an attempt; False when the link is closed or its outbox is full."""
        if self._sealed or len(self._outbox) >= self._frames_max:
            return False
        self.seats[call_id, attempt_seq] = Seat(number, budget_ms)
        return True

    def release(self, call_id: CallId, attempt_seq: int) -> None:
        """Free the seat. Idempotent."""
        self.seats.pop((call_id, attempt_seq), None)
        if self._granted and (grants := self._granted.pop((call_id, attempt_seq), None)) is not None:
            self._take_back(grants)
        if self.cancelled_at_ms:
            self.cancelled_at_ms.pop((call_id, attempt_seq), None)

    def place(self, value: bytes, call_id: CallId, attempt_seq: int) -> Placed | None:
        """An encoded value for this attempt as a message carries it; None: there is no room in the arena now.

        Raises `ArenaTooSmall` for one that the arena can never hold, `OSError` when there is no memory.
        """
        if self.arena is None or len(value) <= ARENA_VALUE_BYTES:
            return Placed(*to_wire(value), None)
        stored = self.arena.store(value)
        if stored is None:
            return None
        self._granted.setdefault((call_id, attempt_seq), []).append(stored.grant)
        return Placed(NULL, None, stored)

    def when_arena_has_room(self, resume: Callable[[], None]) -> None:
        """Try again once something was taken out of the arena. Dropped with the link."""
        self._for_room.append(resume)

    @property
    def arena_bytes(self) -> int:
        """Memory that values for the executor take up."""
        return 0 if self.arena is None else self.arena.room.used_bytes

    def send_nowait(self, frame: bytes) -> bool:
        """Put an ExecuteCall into the outbox, or refuse: it never waits (X34)."""
        if self._sealed or len(self._outbox) >= self._frames_max:
            return False
        if self._batch is not None:
            self._close_batch(self._batch)
        self._outbox.append(frame)
        self._outbox_bytes += len(frame)
        return True

    def send_with_others(
        self,
        task_id: TaskId,
        target: FunctionTarget,
        row: bool,
        strings: bool,
        budget_ms: int,
        audit: str,
        events: bool,
        result_form: ResultForm,
        call: BatchedCall,
    ) -> bool:
        """`send_nowait` of an idempotent call that may share a frame with its neighbours (X94)."""
        if self._sealed or len(self._outbox) >= self._frames_max:
            return False
        batch = self._batch
        if (
            batch is not None
            and batch.target is target
            and batch.task_id == task_id
            and batch.strings is strings
            and batch.budget_ms == budget_ms
            and len(batch.calls) < EXECUTE_CALLS_MAX
        ):
            batch.calls.append(call)
            return True
        if batch is not None:
            self._close_batch(batch)
        self._batch = OpenBatch(task_id, target, row, strings, budget_ms, audit, events, result_form, [call])
        return True

    def _close_batch(self, batch: OpenBatch) -> None:
        """Put the calls that gathered into the outbox: before any other frame, so that none of theirs overtakes it."""
        self._batch = None
        target, calls = batch.target, batch.calls
        message: ExecuteCall | ExecuteCalls
        if len(calls) == 1:
            (call,) = calls
            payload = ExecuteCallPayload(
                batch.task_id,
                target.function_id,
                target.digest,
                call.attempt_seq,
                call.args,
                call.call_number,
                batch.row,
                batch.strings,
                target.entry_selector,
                call_budget_ms=batch.budget_ms,
                audit=batch.audit,
                promises=IDEMPOTENT,
                events=batch.events,
                check_only=target.check_only,
                result_form=batch.result_form,
            )
            message = ExecuteCall(call.call_id, payload)
        else:
            message = ExecuteCalls(
                ExecuteCallsPayload(
                    batch.task_id,
                    target.function_id,
                    target.digest,
                    calls,
                    batch.row,
                    batch.strings,
                    target.entry_selector,
                    batch.budget_ms,
                    batch.audit,
                    IDEMPOTENT,
                    batch.events,
                    target.check_only,
                    batch.result_form,
                )
            )
        frame = encode_message(message)
        self._outbox.append(frame)
        self._outbox_bytes += len(frame)

    def send(
        self, message: WorkerMessage, on_flushed: Callable[[], None] | None = None, sidecar: bytes | None = None
    ) -> bool:
        """Put a frame of a running call, or of the link itself, into the outbox; False when the link is broken.

        `on_flushed` is called once the transport took the frame. A peer that lets more than `outbox_bytes_max` pile
        up has stopped reading, and is lost.
        """
        return not self._sealed and self._put(encode_message(message, sidecar), on_flushed)

    def _put(self, frame: bytes, on_flushed: Callable[[], None] | None) -> bool:
        if self._batch is not None:
            self._close_batch(self._batch)
        self._outbox.append(frame)
        self._outbox_bytes += len(frame)
        if on_flushed is not None:
            self._flushed.append((len(self._outbox), on_flushed))
        if self._outbox_bytes > self._bytes_max and len(self._outbox) > 1:  # one large frame alone is no pile
            self._break("not_reading", f"it left {self._outbox_bytes} bytes unread, outbox_bytes_max={self._bytes_max}")
            return False
        return True

    def send_when_room(
        self, message: WorkerMessage, on_flushed: Callable[[], None] | None = None, sidecar: bytes | None = None
    ) -> bool:
        """`send` for an answer that may be large: it waits here, in order, while the outbox has no room for it.

        The executor asked for each of them, so that a few at once are no sign that it has stopped reading; that shows
        in how long the transport is blocked. One that asks for more than `HELD_OUTBOXES` has room for and reads none
        is lost as `send` says: the worker holds no more for it.
        """
        if self._sealed:
            return False
        frame = encode_message(message, sidecar)
        is_large = len(frame) > self._bytes_max // LARGE_PARTS
        if not self._held and not (is_large and self._outbox and self._outbox_bytes + len(frame) > self._bytes_max):
            return self._put(frame, on_flushed)
        self._held.append((frame, on_flushed))
        self._held_bytes += len(frame)
        if self._held_bytes > HELD_OUTBOXES * self._bytes_max:
            self._break("not_reading", f"it asked for {self._held_bytes} bytes and left them unread")
            return False
        return True

    def when_room(self, ask: Callable[[], None]) -> None:
        """Do what will make a large answer: now, or once no answer waits any more. Dropped with the link."""
        if self._held:
            self._asking.append(ask)
        else:
            ask()

    def flush(self) -> None:
        """Hand the outbox to the transport, up to 64 frames at a time, while the transport has room."""
        outbox, transport = self._outbox, self._transport
        if transport is None or self._sealed:
            return
        if self._batch is not None:
            self._close_batch(self._batch)
        while (outbox or self._held) and not self._write_paused:
            if not outbox:
                frame, on_flushed = self._held.popleft()
                self._held_bytes -= len(frame)
                self._put(frame, on_flushed)
            if len(outbox) <= FRAMES_PER_FLUSH:
                count, data = len(outbox), b"".join(outbox)
                outbox.clear()
            else:
                count = FRAMES_PER_FLUSH
                data = b"".join([outbox.popleft() for _ in range(count)])
            self._outbox_bytes -= len(data)
            transport.write(data)
            if self._flushed:
                self._report_flushed(count)
        while self._asking and not self._held:
            self._asking.popleft()()

    def _report_flushed(self, count: int) -> None:
        waiting = deque((left - count, callback) for left, callback in self._flushed)
        self._flushed = waiting
        while waiting and waiting[0][0] <= 0:
            waiting.popleft()[1]()

    # --- the end ------------------------------------------------------------------------------------------------

    def _break(self, cause: str, message: str) -> None:
        if not self._sealed:
            self.seal()
            self._owner.on_broken(self, cause, message)

    def seal(self) -> None:
        """Send nothing more; go on reading until the executor's end."""
        self._sealed = True
        self._batch = None
        self._held.clear()
        self._held_bytes = 0
        self._asking.clear()
        self._for_room.clear()
        self._outbox.clear()
        self._outbox_bytes = 0
        self._flushed.clear()
        if not self._lost.is_set():
            self.resume_reading()

    async def read_to_end(self) -> None:
        """Read what the dead executor had still sent, so that a finished call counts as finished (X62), and close."""
        self.seal()
        if self._transport is not None:
            self._transport.abort()
            await self._lost.wait()
        tail, self._tail_socket = self._tail_socket, None
        if tail is None:
            return
        with tail:
            while not self._deaf:
                try:
                    data = tail.recv(256 * 1024)
                except OSError:  # nothing more, or a reset
                    break
                if not data:
                    break
                self.data_received(data)

    def close_arena(self) -> None:
        """The executor is dead, and what it had sent was read."""
        if self.arena is not None:
            self.arena.close()
            self.arena = None
        self._granted.clear()

    def begun_calls(self) -> frozenset[CallId]:
        """Seated calls whose begun-mark is set. Of two attempts of a call the later counts: the other only drains."""
        begun = self.marks.begun()
        latest = {call_id: seat for (call_id, _), seat in self.seats.items()}
        return frozenset(call_id for call_id, seat in latest.items() if seat.number in begun)

    def begun_attempts(self) -> tuple[tuple[CallId, int], ...]:
        """Seated attempts whose begun-mark is set."""
        begun = self.marks.begun()
        return tuple(attempt for attempt, seat in self.seats.items() if seat.number in begun)

    def begun_numbers(self) -> dict[CallNumber, CallId]:
        """The begun calls by their numbers."""
        begun = self.marks.begun()
        return {seat.number: call_id for (call_id, _), seat in self.seats.items() if seat.number in begun}

    def running_call(self) -> CallId | None:
        """The call whose code runs now, as the executor's page says; None: none, or one that has ended."""
        number = self.marks.running()
        return next((call_id for (call_id, _), seat in self.seats.items() if seat.number == number), None)

    def largest_begun_budget_ms(self) -> tuple[int, bool]:
        """The largest budget among begun calls, and whether one of them has none (X74)."""
        begun = self.marks.begun()
        budgets = [seat.budget_ms for seat in self.seats.values() if seat.number in begun]
        return max(budgets, default=0), 0 in budgets
