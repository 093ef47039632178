"""The one socket to the worker: frames in, frames out.

Only the hub reads. Frames out are collected and leave in one `sendall` per flush, under a lock that the watch thread
shares: it sends heartbeats, and results that would otherwise wait behind a long call. Losing the link is losing the
worker, and ends the process (X63): there is no reconnect.
"""

from __future__ import annotations

import _socket
import _thread
import errno
import os
import select
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import TYPE_CHECKING, Final

from msgspec import Raw, Struct

from callyard.errors import ProtocolError
from callyard.executor.arena import Arena
from callyard.executor.marks import NO_SLOT, Marks
from callyard.executor.shared import SharedValues
from callyard.ids import CallId, RequestId
from callyard.wire.arena import ARENA_VALUE_BYTES
from callyard.wire.codec import UnknownMessage, decode_worker_message, encode_message
from callyard.wire.frames import FrameReader
from callyard.wire.messages import (
    EXECUTE_CALLS_MAX,
    NULL,
    ArenaReleased,
    ArenaReleasedPayload,
    CallsSettled,
    CallsSettledPayload,
    ExecuteCall,
    ResumeCall,
    SettledCall,
    Stored,
    WorkerMessage,
)
from callyard.wire.values import to_wire

if TYPE_CHECKING:
    from callyard.functions.packing import Packed

READ_BYTES: Final = 64 * 1024
PEEK_BYTES: Final = 64 * 1024
POLL_NS: Final = 250_000
"""About twice what a worker takes to answer one call with the next."""
FLUSH_BYTES: Final = 64 * 1024
FLUSH_FRAMES: Final = 64
SETTLED_BYTES_MAX: Final = 8 * 1024
"""A larger output travels in a frame of its own."""
_GONE: Final = select.POLLHUP | select.POLLERR | select.POLLNVAL | getattr(select, "POLLRDHUP", 0)
_CANCEL_TAG: Final = b'"CancelCall"'


class Placed(Struct, frozen=True, gc=False):
    """A value in the form of a message: its JSON and a sidecar, or its place in the arena."""

    raw: Raw
    sidecar: bytes | None
    at: Stored | None


class LinkClosed(Exception):
    """The worker's end is closed, or ours was taken away; `clean` when it was simply closed."""

    def __init__(self, reason: str, *, clean: bool) -> None:
        super().__init__(reason)
        self.clean = clean


class Link:
    def __init__(
        self, sock: _socket.socket, marks: Marks, arena: Arena | None = None, shared: SharedValues | None = None
    ) -> None:
        """Owns `sock` from now on, in blocking mode. `arena`: for large values; None: frames carry them all."""
        sock.setblocking(True)
        self.fd: Final = sock.fileno()
        os.set_inheritable(self.fd, False)
        self.lock: Final = _thread.allocate_lock()
        self.unpromised_waiting = False
        """A finished call without a promise may still be in the buffer (X62). Only the hub's thread writes it."""
        self.sidecars: Final[dict[RequestId, bytes]] = {}
        """Raw bytes that came beside a ResumeCall, by its request; whoever takes the message pops them."""
        self.args_sidecars: Final[dict[CallId, bytes]] = {}
        """Those that came beside an ExecuteCall."""
        self.arena: Final = arena
        self.shared: Final = shared
        self.await_room: Callable[[], None] = self.flush
        """Let the worker read, and read what it says; until then there is no room in the arena."""
        self._sock = sock
        self._marks = marks
        self._reader = FrameReader("worker")
        self._waits_are_short = False
        """The last wait for input took less than `POLL_NS`."""
        self._frames: deque[tuple[bytes, int]] = deque()
        self._settled: deque[tuple[SettledCall, int, int]] = deque()
        """Ends that leave together, in one frame (X94)."""
        self._buffered_bytes = 0
        self._readable = select.poll()
        self._readable.register(self.fd, select.POLLIN)
        self._watched = select.poll()
        self._watched.register(self.fd, select.POLLIN | getattr(select, "POLLRDHUP", 0))

    # --- in: the hub only -----------------------------------------------------------------------------------------

    def wait_readable(self, timeout_ms: int) -> None:
        """Wait for input for at most `timeout_ms`, whole milliseconds."""
        self._readable.poll(timeout_ms)

    def read(self, *, block: bool) -> list[WorkerMessage | UnknownMessage]:
        """Everything that has arrived; with `block` at least one read.

        Raises `LinkClosed` at EOF, `ProtocolError` for what is no message.
        """
        messages: list[WorkerMessage | UnknownMessage] = []
        flags = 0 if block else _socket.MSG_DONTWAIT
        started_ns = monotonic_ns() if block else 0
        if block and self._waits_are_short:
            self._poll_until(started_ns + POLL_NS)
        while True:
            try:
                data = self._sock.recv(READ_BYTES, flags)
            except BlockingIOError:
                return messages
            except OSError as error:
                raise _closed(error) from error
            if not data:
                raise LinkClosed("the worker closed the link", clean=True)
            if started_ns:
                self._waits_are_short = monotonic_ns() - started_ns < POLL_NS
                started_ns = 0
            for body in self._reader.feed(data):
                message, sidecar = decode_worker_message(body)
                messages.append(message)
                if sidecar is not None:
                    if type(message) is ResumeCall:
                        self.sidecars[message.request_id] = sidecar
                    elif type(message) is ExecuteCall:
                        self.args_sidecars[message.call_id] = sidecar
            if len(data) < READ_BYTES:
                return messages
            flags = _socket.MSG_DONTWAIT

    def _poll_until(self, until_ns: int) -> None:
        """Look for input again and again, giving way to whoever else wants this CPU.

        To wake a sleeping CPU takes longer than many a call: where one call follows the other, this is the larger part
        of a call's time. Where they do not, nothing is polled: only after a wait that was short itself.
        """
        poll = self._readable.poll
        while not poll(0) and monotonic_ns() < until_ns:
            os.sched_yield()

    # --- out ------------------------------------------------------------------------------------------------------

    def put(self, frame: bytes, slot: int = NO_SLOT) -> None:
        """Collect one frame for the next flush, which gives `slot` back. The hub's thread only."""
        self._frames.append((frame, slot))
        self._buffered_bytes += len(frame)
        if self._buffered_bytes > FLUSH_BYTES or len(self._frames) >= FLUSH_FRAMES:
            self.flush()

    def put_settled(self, end: SettledCall, slot: int, run_ns: int) -> None:
        """Collect the end of a call for the frame that the next flush makes of all of them. The hub's thread only."""
        self._settled.append((end, slot, run_ns))
        self._buffered_bytes += len(end.output)
        if self._buffered_bytes > FLUSH_BYTES or len(self._settled) >= EXECUTE_CALLS_MAX:
            self.flush()

    def flush(self) -> None:
        """Send what was collected; on return it has left. The hub's thread only.

        The lock is taken though the buffer may be empty: the watch thread may be sending its content just now.
        """
        with self.lock:
            self.unpromised_waiting = False
            self._send_collected()

    def flush_late(self) -> None:
        """As `flush`, from the watch thread."""
        with self.lock:
            self._send_collected()

    def send_locked(self, frame: bytes) -> None:
        """Send one frame past the collected ones. The caller holds `lock`."""
        self._send(frame)

    def _send_collected(self) -> None:
        frames, settled = self._frames, self._settled
        if not (frames or settled):
            return
        self._buffered_bytes = 0
        parts: list[bytes] = []
        slots: list[int] = []
        while frames:
            frame, slot = frames.popleft()
            parts.append(frame)
            if slot != NO_SLOT:
                slots.append(slot)
        if settled:
            ends: list[SettledCall] = []
            run_ns = 0
            while settled:
                end, slot, own_ns = settled.popleft()
                ends.append(end)
                slots.append(slot)
                run_ns += own_ns
            parts.append(encode_message(CallsSettled(CallsSettledPayload(ends, -(-run_ns // 1_000)))))
        self._send(parts[0] if len(parts) == 1 else b"".join(parts))
        if slots:
            self._marks.give_back(slots)

    def _send(self, data: bytes) -> None:
        try:
            self._sock.sendall(data)
        except OSError as error:
            raise _closed(error) from error

    # --- values ---------------------------------------------------------------------------------------------------

    def is_for_arena(self, value: bytes) -> bool:
        return self.arena is not None and len(value) > ARENA_VALUE_BYTES

    def place(self, value: bytes) -> Placed:
        """An encoded value as a message carries it. Waits for room in the arena if need be.

        Raises `ArenaTooSmall` for one that the arena can never hold.
        """
        if not self.is_for_arena(value):
            raw, sidecar = to_wire(value)
            return Placed(raw, sidecar, None)
        assert self.arena is not None
        stored = self.arena.store(value)
        while stored is None:
            self.await_room()
            stored = self.arena.store(value)
        return Placed(NULL, None, stored)

    def open_value(self, raw: Raw, sidecar: bytes | None, at: Stored | None) -> bytes | Packed:
        """What a message carries, in memory of its own; its place in the arena is given back."""
        if sidecar is None and at is None:
            return bytes(raw)
        from callyard.functions.packing import Packed, is_packed

        open_shared = None if self.shared is None else self.shared.open
        if at is None:
            return Packed.of(bytes(raw), sidecar or b"", open_shared)
        if self.arena is None:
            raise ProtocolError("a value in the arena came to an executor that has none")
        with self.arena.open(at) as view:
            value = Packed.read(view, open_shared) if is_packed(view) else bytes(view)
        self.say_released(at)
        return value

    def say_released(self, at: Stored) -> None:
        """A value of the worker's is needed no more."""
        self.put(encode_message(ArenaReleased(ArenaReleasedPayload([at.grant]))))

    def take_back(self, grants: Sequence[int]) -> None:
        """The worker has read these values of ours."""
        if self.arena is not None:
            for grant in grants:
                self.arena.release(grant)

    # --- the watch thread -----------------------------------------------------------------------------------------

    def is_gone(self) -> bool:
        """The worker's end is closed (whatever is still to be read), or our descriptor is."""
        return any(event & _GONE for _, event in self._watched.poll(0))

    def has_cancel(self) -> bool:
        """Something to be read may be a CancelCall: worth a signal into running user code.

        Other frames are not, since C code that does not retry after EINTR breaks under a signal (X53). True as well
        when the answer cannot be seen without reading: a frame begun, or more input than is peeked at.
        """
        try:
            seen = self._sock.recv(PEEK_BYTES, _socket.MSG_PEEK | _socket.MSG_DONTWAIT)
        except OSError:
            return False
        return bool(seen) and (_CANCEL_TAG in seen or len(seen) == PEEK_BYTES or self._reader.pending_bytes > 0)

    # --- a forked child of user code ------------------------------------------------------------------------------

    def close_in_child(self, close: Callable[[int], None]) -> None:
        """Close the descriptor by `close` (the real `os.close`): the link is the parent's alone."""
        self._frames.clear()
        self._settled.clear()
        if self.arena is not None:
            self.arena.close_in_child(close)
        if self.shared is not None:
            self.shared.close_in_child(close)
        close(self._sock.detach())


def _closed(error: OSError) -> LinkClosed:
    clean = error.errno in (errno.EPIPE, errno.ECONNRESET)
    return LinkClosed(f"the link to the worker is unusable: {error}", clean=clean)


def open_socket(fd: int, path: str) -> _socket.socket:
    """The inherited descriptor, or a new connection to `path`. Raises `OSError`."""
    if fd >= 0:
        return _socket.socket(fileno=fd)
    sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    sock.connect(path)
    return sock
