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

from callyard.clock import Clock
from callyard.errors import ErrorKind, ProtocolError
from callyard.ids import CallId, CallNumber, ExecutorId
from callyard.scheduler.events import AttemptFailed, CallCompleted, CallSuspended, SchedulerEvent
from callyard.wire.codec import UnknownMessage, decode_executor_message, encode_message
from callyard.wire.frames import FrameReader
from callyard.wire.messages import (
    RECALLED,
    CallEvent,
    CallFailed,
    CallFailedPayload,
    CallsSettled,
    CallWaiting,
    Described,
    ExecutorMessage,
    Heartbeat,
    HeartbeatPayload,
    WaitKind,
    WorkerMessage,
)
from callyard.wire.messages import CallCompleted as CallCompletedFrame
from callyard.worker.marks import MarkPage

FRAMES_PER_FLUSH: Final = 64
WRITE_HIGH_WATER_BYTES: Final = 256 * 1024


class Seat(msgspec.Struct, frozen=True, gc=False):
    """One attempt that this executor holds."""

    number: CallNumber
    budget_ms: int


class LinkOwner(Protocol):
    """What a link tells; all calls come on the loop."""

    def on_events(self, link: ExecutorLink, events: list[SchedulerEvent]) -> None: ...
    def on_heartbeat(self, link: ExecutorLink, heartbeat: HeartbeatPayload) -> None: ...
    def on_waiting(self, link: ExecutorLink, message: CallWaiting, sidecar: bytes | None) -> None: ...
    def on_described(self, link: ExecutorLink, message: Described) -> None: ...
    def on_broken(self, link: ExecutorLink, cause: str, message: str) -> None: ...


class ExecutorLink(asyncio.Protocol):
    """An asyncio protocol over the socket to one executor."""

    def __init__(
        self,
        executor_id: ExecutorId,
        owner: LinkOwner,
        marks: MarkPage,
        clock: Clock,
        outbox_frames_max: int,
        outbox_bytes_max: int,
    ) -> None:
        self.executor_id = executor_id
        self.marks = marks
        self.seats: dict[tuple[CallId, int], Seat] = {}
        self.cancelled_at_ms: dict[tuple[CallId, int], int] = {}
        """Attempts told to stop that have not answered."""
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
        events: list[SchedulerEvent] = []
        try:
            for body in self._reader.feed(data):
                message, sidecar = decode_executor_message(body)
                self._take(message, sidecar, events)
        except ProtocolError as error:
            self._deaf = True
            self._break("malformed_frame", str(error))
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

    def _take(
        self, message: ExecutorMessage | UnknownMessage, sidecar: bytes | None, events: list[SchedulerEvent]
    ) -> None:
        match message:
            case CallCompletedFrame():
                self.finished_calls += 1
                payload = message.payload
                events.append(
                    CallCompleted(
                        self.executor_id,
                        message.call_id,
                        payload.attempt_seq,
                        bytes(payload.output),
                        tuple(payload.notes) if payload.notes else (),
                    )
                )
            case CallFailed():
                self.finished_calls += 1
                events.append(self._attempt_failed(message.call_id, message.payload))
            case CallsSettled():
                self.finished_calls += len(message.payload.calls)
                for call in message.payload.calls:
                    if call.failure is not None:
                        events.append(self._attempt_failed(call.call_id, call.failure))
                    else:
                        output = bytes(call.output)
                        events.append(CallCompleted(self.executor_id, call.call_id, call.attempt_seq, output))
            case CallWaiting():
                if message.payload.wait_kind in (WaitKind.IO, WaitKind.SUBCALL):
                    seq = message.payload.attempt_seq
                    events.append(CallSuspended(self.executor_id, message.call_id, seq, message.request_id))
                self._owner.on_waiting(self, message, sidecar)
            case Heartbeat():
                self._owner.on_heartbeat(self, message.payload)
            case CallEvent():
                pass  # nobody listens yet: progress and captured output have no consumer in this version
            case Described():
                self._owner.on_described(self, message)
            case UnknownMessage():
                self.dropped_messages += 1
            case _:
                assert_never(message)

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
        if self.cancelled_at_ms:
            self.cancelled_at_ms.pop((call_id, attempt_seq), None)

    def send_nowait(self, frame: bytes) -> bool:
        """Put an ExecuteCall into the outbox, or refuse: it never waits (X34)."""
        if self._sealed or len(self._outbox) >= self._frames_max:
            return False
        self._outbox.append(frame)
        self._outbox_bytes += len(frame)
        return True

    def send(
        self, message: WorkerMessage, on_flushed: Callable[[], None] | None = None, sidecar: bytes | None = None
    ) -> bool:
        """Put a frame of a running call, or of the link itself, into the outbox; False when the link is broken.

        `on_flushed` is called once the transport took the frame. A peer that lets more than `outbox_bytes_max` pile
        up has stopped reading, and is lost.
        """
        if self._sealed:
            return False
        frame = encode_message(message, sidecar)
        self._outbox.append(frame)
        self._outbox_bytes += len(frame)
        if on_flushed is not None:
            self._flushed.append((len(self._outbox), on_flushed))
        if self._outbox_bytes > self._bytes_max:
            self._break("not_reading", f"it left {self._outbox_bytes} bytes unread, outbox_bytes_max={self._bytes_max}")
            return False
        return True

    def flush(self) -> None:
        """Hand the outbox to the transport, up to 64 frames at a time, while the transport has room."""
        outbox, transport = self._outbox, self._transport
        if transport is None or self._sealed:
            return
        while outbox and not self._write_paused:
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

    def begun_calls(self) -> frozenset[CallId]:
        """Seated calls whose begun-mark is set. Of two attempts of a call the later counts: the other only drains."""
        begun = self.marks.begun()
        latest = {call_id: seat for (call_id, _), seat in self.seats.items()}
        return frozenset(call_id for call_id, seat in latest.items() if seat.number in begun)

    def begun_numbers(self) -> dict[CallNumber, CallId]:
        """The begun calls by their numbers."""
        begun = self.marks.begun()
        return {seat.number: call_id for (call_id, _), seat in self.seats.items() if seat.number in begun}

    def largest_begun_budget_ms(self) -> tuple[int, bool]:
        """The largest budget among begun calls, and whether one of them has none (X74)."""
        begun = self.marks.begun()
        budgets = [seat.budget_ms for seat in self.seats.values() if seat.number in begun]
        return max(budgets, default=0), 0 in budgets
