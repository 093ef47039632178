"""What a call tells while it runs: what it prints and logs, and its progress (X58, X59, X79).

Only for calls whose ExecuteCall asks for it (`events`); for the others, and for calls that tell nothing, nothing is
kept. What is written to `sys.stdout` and `sys.stderr` goes where it always goes, too; what C code writes to the
descriptors, and what a thread writes that does not inherit the call (`asyncio.to_thread` does), goes only there. What
is logged, by `log()` or by `logging`, goes only to who listens: what the handlers of `logging` write to the two streams
of a record that was told is left out, so that whoever shows it decides by its level.

Of all that one call prints and logs the first 32 KiB are told while it runs and the last 32 KiB at its end, with a
count of what was cut between. Frames leave at most 20 times a second and call: from the call's own code, when it tells
the next thing; at a turn of the hub; and by the watch thread from within a long slice. What is left leaves before the
terminal frame.

Two locks, the link's before ours: whoever takes something out to send it holds the link's until it is sent, so that
nothing is sent after its call's terminal frame. Ours is reentrant, since a signal handler of the user's may print.
"""

from __future__ import annotations

import _thread
import contextvars
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Raw

from callyard.executor.budget import NEVER
from callyard.executor.contexts import RUNNING, Call
from callyard.executor.link import Link
from callyard.functions.raised import cut_text, name_of
from callyard.wire.codec import encode_message
from callyard.wire.messages import NULL, CallEvent, CallEventKind, CallEventPayload

if TYPE_CHECKING:
    from logging import LogRecord

    from callyard.executor.guards import KeptOpen

HEAD_BYTES: Final = 32 * 1024
TAIL_BYTES: Final = 32 * 1024
EVERY_NS: Final = 50_000_000
"""20 times a second."""
LOG_CHARACTERS_MAX: Final = 8 * 1024
"""Of one log message; and of its fields, as JSON."""
LOG_OVERHEAD_BYTES: Final = 64
"""What a log entry counts beside its text: each is a frame of its own."""
PROGRESS_CHARACTERS_MAX: Final = 1000
_QUIET: Final[contextvars.ContextVar[bool]] = contextvars.ContextVar("callyard_logging", default=False)
"""A log record that was told as such is being written by its handlers: to the two streams it is not."""


class Entry:
    """Something printed, or one log message."""

    __slots__ = ("data", "kind", "level", "size", "value")

    def __init__(self, kind: CallEventKind, level: str, data: bytes, value: bytes = b"null") -> None:
        self.kind = kind
        self.level = level
        """Of a log message; `stdout` or `stderr` for what was printed."""
        self.data = bytearray(data)
        self.value = value
        self.size = len(data) if kind is CallEventKind.OUTPUT else len(data) + len(value) + LOG_OVERHEAD_BYTES

    def joins(self, other: Entry) -> bool:
        return self.kind is other.kind is CallEventKind.OUTPUT and self.level == other.level

    def extend(self, other: Entry) -> None:
        self.data += other.data
        self.size += other.size

    def split(self, size: int) -> Entry:
        """Take the first `size` bytes of something printed off, as an entry of their own."""
        first = Entry(self.kind, self.level, bytes(self.data[:size]))
        del self.data[:size]
        self.size -= size
        return first


class Told:
    """What one call has told and was not sent yet."""

    __slots__ = ("cut_bytes", "due_ns", "head_left", "live", "progress", "sent_ns", "tail", "tail_bytes")

    def __init__(self, now: int) -> None:
        self.progress: tuple[float, float | None, str] | None = None
        self.live: list[Entry] = []
        """Of the head: to be sent while the call runs."""
        self.head_left = HEAD_BYTES
        self.tail: deque[Entry] = deque()
        """What came after the head, the last of it; sent at the end."""
        self.tail_bytes = 0
        self.cut_bytes = 0
        """Between the two."""
        self.sent_ns = now
        """From the beginning on: a short call sends all it has at its end."""
        self.due_ns = NEVER

    def add(self, entry: Entry) -> bool:
        """True: it is to be sent while the call runs."""
        if self.head_left:
            if entry.size <= self.head_left:
                self.head_left -= entry.size
                self._append(self.live, entry)
                return True
            if entry.kind is CallEventKind.OUTPUT:
                self._append(self.live, entry.split(self.head_left))
            self.head_left = 0
        self._append(self.tail, entry)
        self.tail_bytes += entry.size
        while self.tail_bytes > TAIL_BYTES:
            self._cut(self.tail_bytes - TAIL_BYTES)
        return bool(self.live)

    def _append(self, entries: list[Entry] | deque[Entry], entry: Entry) -> None:
        if entries and entries[-1].joins(entry):
            entries[-1].extend(entry)
        else:
            entries.append(entry)

    def _cut(self, size: int) -> None:
        first = self.tail[0]
        may_split = first.kind is CallEventKind.OUTPUT and first.size > size
        cut = first.split(size) if may_split else self.tail.popleft()
        self.tail_bytes -= cut.size
        self.cut_bytes += cut.size

    def take(self, call: Call, *, at_end: bool) -> list[bytes]:
        """Frames of what is to be sent now."""
        frames: list[bytes] = []
        if self.progress is not None:
            done, total, message = self.progress
            self.progress = None
            value = {"done": done, "total": total, "message": message}
            shown = {name: part for name, part in value.items() if part is not None and part != ""}
            frames.append(_frame(call, CallEventKind.PROGRESS, msgspec.json.encode(shown)))
        entries, self.live = self.live, []
        frames += [_frame_of(call, entry, 0) for entry in entries]
        if at_end:
            cut_bytes = [self.cut_bytes] + [0] * len(self.tail)
            frames += [_frame_of(call, entry, cut) for entry, cut in zip(self.tail, cut_bytes, strict=False)]
        return frames


def _frame_of(call: Call, entry: Entry, cut_count: int) -> bytes:
    text = entry.data.decode("utf-8", "ignore")  # a cut may have hit a character
    return _frame(call, entry.kind, entry.value, entry.level, text, cut_count)


def _frame(call: Call, kind: CallEventKind, value: bytes, level: str = "", text: str = "", cut_count: int = 0) -> bytes:
    payload = call.payload
    raw = NULL if value == b"null" else Raw(value)
    event = CallEventPayload(payload.attempt_seq, kind, payload.task_id, raw, level, text, cut_count)
    return encode_message(CallEvent(call.call_id, event))


class Teller:
    """All calls' telling. Its methods may be called from any thread but for `end` and `close_in_child`."""

    def __init__(self, link: Link) -> None:
        self.calls: Final[dict[Call, Told]] = {}
        """Those that have told something."""
        self.due_ns = NEVER
        """When something is next to be sent."""
        self._link = link
        self._lock = _thread.RLock()
        self._is_off = False

    # --- where it comes from --------------------------------------------------------------------------------------

    def watch_streams(self, streams: Iterable[KeptOpen]) -> None:
        for stream in streams:
            stream.is_told = self._make_listener("stderr" if stream.fileno() == 2 else "stdout")

    def _make_listener(self, name: str) -> Callable[[str], bool]:
        def hear(text: str) -> bool:
            if _QUIET.get():
                return True
            call = self._listening_call()
            if call is not None:
                self._add(call, Entry(CallEventKind.OUTPUT, name, _to_bytes(text)))
            return False

        return hear

    def watch_logging(self) -> None:
        """Take log records as such, if `logging` is loaded. It is not loaded for it."""
        logging = sys.modules.get("logging")
        if logging is None or getattr(logging.Logger.callHandlers, "callyard", False):
            return
        real = logging.Logger.callHandlers
        formatter = logging.Formatter()

        def call_handlers(logger: Any, record: LogRecord) -> None:
            call = self._listening_call()
            if call is None:
                real(logger, record)
                return
            try:
                text = formatter.format(record)
            except Exception as error:  # noqa: BLE001 - its arguments are user code; the handlers tell it their way
                text = f"<formatting the message raised {name_of(error)}>"
            self.log(record.levelname.lower(), text, {"logger": record.name})
            token = _QUIET.set(True)
            try:
                real(logger, record)
            finally:
                _QUIET.reset(token)

        call_handlers.callyard = True  # type: ignore[attr-defined]
        logging.Logger.callHandlers = call_handlers
        _let_errors_be_seen(logging.Handler)

    def log(self, level: str, message: str, fields: Mapping[str, Any]) -> bool:
        """False: nobody wants to hear it."""
        call = self._listening_call()
        if call is None:
            return False
        value = to_json(fields) if fields else b"null"
        text = cut_text(message, LOG_CHARACTERS_MAX)
        self._add(call, Entry(CallEventKind.LOG, level, _to_bytes(text), value))
        return True

    def progress(self, done: float, total: float | None, message: str) -> None:
        call = self._listening_call()
        if call is None:
            return
        now = monotonic_ns()
        with self._lock:
            told = self.calls.get(call) or self._open(call, now)
            told.progress = (done, total, message)
            self._becomes_due(told)
        if now >= self.due_ns:
            self._send_if_free(now)

    def _listening_call(self) -> Call | None:
        """The running call, if somebody wants to hear of it."""
        call = RUNNING.get(None)
        if call is None or not call.payload.events or call.over or self._is_off:
            return None
        return call

    def _open(self, call: Call, now: int) -> Told:
        told = self.calls[call] = Told(now)
        return told

    def _add(self, call: Call, entry: Entry) -> None:
        now = monotonic_ns()
        with self._lock:
            told = self.calls.get(call) or self._open(call, now)
            if told.add(entry):
                self._becomes_due(told)
        if now >= self.due_ns:
            self._send_if_free(now)

    def _becomes_due(self, told: Told) -> None:
        if told.due_ns == NEVER:
            told.due_ns = told.sent_ns + EVERY_NS
            self.due_ns = min(self.due_ns, told.due_ns)

    # --- where it goes --------------------------------------------------------------------------------------------

    def send_due(self, now: int) -> None:
        """Send what is due. Waits for the link."""
        with self._link.lock:
            self._send_locked(now)

    def _send_if_free(self, now: int) -> None:
        """From user code: never waits for another thread, and never for itself, below a signal handler."""
        if self._link.lock.acquire(blocking=False):
            try:
                self._send_locked(now)
            finally:
                self._link.lock.release()

    def _send_locked(self, now: int) -> None:
        frames: list[bytes] = []
        with self._lock:
            due_ns = NEVER
            for call, told in self.calls.items():
                if told.due_ns <= now:
                    told.due_ns, told.sent_ns = NEVER, now
                    frames += told.take(call, at_end=False)
                due_ns = min(due_ns, told.due_ns)
            self.due_ns = due_ns
        if frames:
            self._link.send_locked(b"".join(frames))

    def end(self, call: Call) -> None:
        """Put what is left before the call's terminal frame. The hub only."""
        with self._lock:
            told = self.calls.pop(call, None)
            if told is None:
                return
            frames = told.take(call, at_end=True)
            self.due_ns = min((other.due_ns for other in self.calls.values()), default=NEVER)
        for frame in frames:
            self._link.put(frame)

    def close_in_child(self) -> None:
        """In a fork that user code made: nobody listens to it."""
        self._is_off = True
        self._lock = _thread.RLock()
        self.calls.clear()
        self.due_ns = NEVER


def _let_errors_be_seen(handler_class: Any) -> None:
    """What a handler tells of its own failure is not the record, and is shown."""
    real = handler_class.handleError

    def handle_error(handler: Any, record: LogRecord) -> None:
        token = _QUIET.set(False)
        try:
            real(handler, record)
        finally:
            _QUIET.reset(token)

    handler_class.handleError = handle_error


def _to_bytes(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


def to_json(fields: Mapping[str, Any]) -> bytes:
    """What JSON cannot hold is told by its repr, and what is too long by its beginning."""
    from callyard.functions.encoding import ResultMisfit, encode_value

    try:
        value = encode_value(fields)
    except ResultMisfit:
        value = encode_value({name: _shorten(part) for name, part in fields.items()})
    if len(value) > LOG_CHARACTERS_MAX:
        return encode_value({"cut": value[:LOG_CHARACTERS_MAX].decode("utf-8", "ignore")})
    return value


def _shorten(part: object) -> object:
    if part is None or isinstance(part, bool | int):
        return part
    try:
        text = part if isinstance(part, str) else repr(part)
    except Exception as error:  # noqa: BLE001 - __repr__ is user code
        text = f"<its __repr__ raised {name_of(error)}>"
    return cut_text(_to_bytes(text).decode(), LOG_CHARACTERS_MAX)
