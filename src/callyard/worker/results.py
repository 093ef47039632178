"""What callers get: a result per call, and a summary per run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Final, Generic, Self, cast

import msgspec

from callyard.errors import CallError, CallFailure, ErrorKind, ProtocolError, fail
from callyard.functions.calling import R_co
from callyard.functions.packing import NotReadable, decode_crossing, decode_json
from callyard.scheduler import CallResult, StopReason
from callyard.wire.messages import CallEventKind, CallEventPayload

if TYPE_CHECKING:
    from callyard.functions.outgoing import Outgoing

TAIL_LINES: Final = 20
TAIL_BYTES_MAX: Final = 8 * 1024
CAPTURE_BYTES_MAX: Final = 64 * 1024
"""Of a call and its subcalls together; an executor sends as much of each of them (X79)."""
TOLD_BYTES_MAX: Final = 32 * 1024 * 1024
"""Of all calls of one task whose results did not leave yet."""
_UNREAD: Final = object()


class Printed(msgspec.Struct, frozen=True, gc=False):
    """What a call printed and logged, in order; a log record is a line such as `warning: no fuel left row=7`."""

    text: str
    """Where something was cut out of it, a line such as `[1,234 bytes cut]` stands instead."""
    cut_bytes: int = 0
    """Everything that was dropped."""

    @property
    def tail(self) -> tuple[str, ...]:
        """The last `TAIL_LINES` lines, as a terminal would leave them: what a carriage return overwrote is gone."""
        lines = self.text.removesuffix("\n").split("\n") if self.text else []
        return tuple(line.rstrip("\r").rpartition("\r")[2] for line in lines[-TAIL_LINES:])


class ToldResult(CallResult, frozen=True, gc=False):
    """A result with what its call told on the way."""

    printed: Printed | None = None
    echo: bytes = b""
    """JSON members that its line repeats of its row."""


def printed_of(result: CallResult) -> Printed | None:
    """What is attached to a result; None: nothing, because the call told nothing or nobody asked."""
    return result.printed if isinstance(result, ToldResult) else None


def echo_of(result: CallResult) -> bytes:
    """JSON members for its line, such as `"id":"A7"`; empty: none."""
    return result.echo if isinstance(result, ToldResult) else b""


def with_echo(result: CallResult, echo: bytes) -> ToldResult:
    return ToldResult(
        result.index, result.output, result.failure, result.attempts, result.notes, printed_of(result), echo
    )


class Result(Generic[R_co]):
    """How one call ended. `value` is decoded from JSON when it is asked for."""

    __slots__ = ("_index", "_result", "_value")

    def __init__(self, result: CallResult, outgoing: Outgoing | None = None) -> None:
        """`outgoing`: of a call by function object; an output that is not what its annotation says is a failure."""
        self._value: Any = _UNREAD
        if outgoing is not None and result.output is not None:
            try:
                self._value = outgoing.decode(result.output)
            except CallError as error:
                failure = msgspec.structs.replace(error.failure, attempts=result.attempts)
                result = msgspec.structs.replace(result, output=None, failure=failure)
        self._result = result
        self._index = result.index

    def at_index(self, index: int) -> Self:
        """The same, as the one of that place."""
        twin = copy(self)
        twin._index = index
        return twin

    @property
    def index(self) -> int:
        """The call's place in its list, from 0."""
        return self._index

    @property
    def ok(self) -> bool:
        return self._result.failure is None

    @property
    def value(self) -> R_co:
        """What the function returned: as its annotation says where it was called by its object, else as JSON, decoded
        anew each time. Raises CallError when the call failed."""
        output = self._result.output
        if output is None:
            raise CallError(self._failure())
        if self._value is not _UNREAD:
            return cast(R_co, self._value)
        try:
            return cast(R_co, decode_crossing(output))
        except NotReadable as error:
            raise CallError(fail(ErrorKind.RESULT, str(error), attempts=self.attempts)) from None

    @property
    def error(self) -> CallFailure | None:
        return self._result.failure

    @property
    def attempts(self) -> int:
        """Attempts that had begun."""
        return self._result.attempts

    @property
    def notes(self) -> tuple[str, ...]:
        """What the call changed in its process and was put back, or left behind there."""
        return self._result.notes

    @property
    def printed(self) -> Printed | None:
        """What the call printed and logged. With `capture` all of it within 64 KiB; with `on_event` alone only the last
        lines, and only of a call that failed; else, and of a call that told nothing, None. Source: X58."""
        return printed_of(self._result)

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines, at most 20, of `printed`."""
        printed = self.printed
        return () if printed is None else printed.tail

    @property
    def raw(self) -> bytes | None:
        """The output as its executor sent it: JSON, or where a result holds bytes, arrays or tables, JSON beside them
        in a form of its own (`binary=False` asks for JSON). None: the call failed."""
        return self._result.output

    def unwrap(self) -> R_co:
        """The value, or CallError: `value` as a call."""
        return self.value

    def _failure(self) -> CallFailure:
        failure = self._result.failure
        assert failure is not None, f"result {self.index} has neither output nor failure"
        return failure

    def __repr__(self) -> str:
        if self.ok:
            return f"Result(index={self.index}, ok=True, value={self.value!r})"
        return f"Result(index={self.index}, ok=False, error={self._failure().kind.value}: {self._failure().message})"


class CallEvent(msgspec.Struct, frozen=True):
    """Something a running call told: its progress, a log record, or what it printed."""

    index: int
    """The call's place in its list; a subcall's events come under its root's."""
    kind: CallEventKind
    """`progress`, `log` or `output`."""
    text: str = ""
    """The log message, or the piece of output."""
    level: str = ""
    """Of a log record; `stdout` or `stderr` of output."""
    value: Any = None
    """Of progress: `{"done", "total"?, "message"?}`; of a log record: its further fields."""
    cut_bytes: int = 0
    """Bytes just before this that were dropped: a call tells at most 64 KiB."""

    @classmethod
    def of(cls, index: int, event: CallEventPayload) -> CallEvent:
        """Raises `ProtocolError` for a value that Python has no room for."""
        try:
            value = decode_json(event.value)
        except NotReadable as error:
            raise ProtocolError(f"an event of a call: {error}") from error
        return cls(index, event.event_kind, event.text, event.level, value, event.cut_count)


EventCallback = Callable[[CallEvent], None]
"""Called on the loop while the call runs; it must not wait."""


def show_log(event: CallEvent) -> str:
    """A log record as text: `warning: no fuel left row=7`. It may have several lines."""
    fields = event.value if isinstance(event.value, dict) else {}
    if list(fields) == ["logger"]:  # a record of `logging`: the name of its logger is no field of the user's
        fields = {}
    return " ".join([f"{event.level}: {event.text}", *(f"{name}={value!r}" for name, value in fields.items())])


class _Told:
    """What one call told so far: at most about twice the bytes that are kept in the end."""

    __slots__ = ("cut_bytes", "data", "dropped_bytes")

    def __init__(self) -> None:
        self.data = bytearray()
        self.dropped_bytes = 0
        """Here, before `data`."""
        self.cut_bytes = 0
        """Everywhere; those that the executor cut are marked in the text."""

    def add(self, event: CallEvent) -> None:
        if event.cut_bytes:
            self.cut_bytes += event.cut_bytes
            self._add_line(f"[{event.cut_bytes:,} bytes cut]")
        if event.kind is CallEventKind.LOG:
            self._add_line(show_log(event))
        else:
            self.data += event.text.encode("utf-8", "backslashreplace")

    def _add_line(self, text: str) -> None:
        if self.data and not self.data.endswith(b"\n"):
            self.data += b"\n"
        self.data += text.encode("utf-8", "backslashreplace") + b"\n"

    def keep(self, size: int) -> None:
        """Drop the beginning."""
        count = len(self.data) - size
        if count > 0:
            del self.data[:count]
            self.dropped_bytes += count
            self.cut_bytes += count


class ToldCalls:
    """What the calls of one task tell: handed to the listener, and kept until the call's result takes it along.

    Of a call's text the last 8 KiB are kept, for the lines beside a failure; with `capture` the last 64 KiB. Calls of a
    task hold `TOLD_BYTES_MAX` together at most: beyond it the call that began to tell first loses what it told so far.
    Source: X58, X59, X79.
    """

    def __init__(self, on_event: EventCallback | None, *, capture: bool) -> None:
        self.wanted = on_event is not None or capture
        """Executors are to send what calls tell."""
        self._on_event = on_event
        self._capture = capture
        self._kept_max = CAPTURE_BYTES_MAX if capture else TAIL_BYTES_MAX
        self._calls: dict[int, _Told] = {}
        self._bytes = 0

    def hear(self, index: int, payload: CallEventPayload) -> None:
        event = CallEvent.of(index, payload)
        if event.kind is not CallEventKind.PROGRESS:
            self._keep(event)
        if self._on_event is None:
            return
        try:
            self._on_event(event)
        except Exception as error:  # noqa: BLE001  # the listener's own: told, and the call goes on
            message = f"on_event failed for {event.kind.value} of call {index}"
            asyncio.get_running_loop().call_exception_handler({"message": message, "exception": error})

    def _keep(self, event: CallEvent) -> None:
        told = self._calls.get(event.index)
        if told is None:
            told = self._calls[event.index] = _Told()
        before = len(told.data)
        told.add(event)
        if len(told.data) > 2 * self._kept_max:  # not at each byte too many: cutting moves all the rest
            told.keep(self._kept_max)
        self._bytes += len(told.data) - before
        while self._bytes > TOLD_BYTES_MAX:
            index = next(iter(self._calls))
            oldest = self._calls[index] = self._calls.pop(index)
            self._bytes -= len(oldest.data)
            oldest.keep(0)

    def attach(self, results: Sequence[CallResult]) -> tuple[Sequence[CallResult], int]:
        """These results with what their calls told, where that is wanted, and the bytes that this adds to them."""
        if not self._calls:
            return results, 0
        added = 0
        taken: list[CallResult] = []
        for result in results:
            told = self._calls.pop(result.index, None)
            if told is not None:
                self._bytes -= len(told.data)
                if self._capture or result.failure is not None:
                    printed = self._finish(told)
                    added += len(printed.text)
                    result = _with_printed(result, printed)
            taken.append(result)
        return tuple(taken), added

    def _finish(self, told: _Told) -> Printed:
        told.keep(self._kept_max)
        text = told.data.decode("utf-8", "ignore")  # a cut may have hit a character
        if self._capture:
            mark = f"[{told.dropped_bytes:,} bytes cut]\n" if told.dropped_bytes else ""
            return Printed(mark + text, told.cut_bytes)
        tail = "".join(f"{line}\n" for line in Printed(text).tail)
        return Printed(tail, told.cut_bytes + max(0, len(told.data) - len(tail.encode())))

    @property
    def held_bytes(self) -> int:
        return self._bytes


def _with_printed(result: CallResult, printed: Printed) -> ToldResult:
    return ToldResult(result.index, result.output, result.failure, result.attempts, result.notes, printed)


class FailureGroup(msgspec.Struct, frozen=True):
    """The failures of one kind in a run."""

    count: int
    example_index: int
    """The first call of the list, in the order of output, that failed so."""
    example: CallFailure


class RunningCall(msgspec.Struct, frozen=True):
    """A call that has begun and not ended."""

    index: int
    function: str
    executor_id: str


class RunProgress(msgspec.Struct, frozen=True):
    """A run's counts at one moment."""

    committed: int
    """Rows read so far."""
    finished: int
    failed: int
    inflight: int
    total: int | None
    """Rows in all; None: not known yet."""
    read_fraction: float | None
    """Part of the source's bytes read, 0..1; None: not known."""
    elapsed_ms: int


class RunSummary(msgspec.Struct, frozen=True):
    """How a run ended."""

    calls: int
    failed: int
    failures: Mapping[ErrorKind, FailureGroup]
    elapsed_ms: int
    stop_reason: StopReason | None
    """Why it ended early; None: it did not."""
    peak_memory_bytes: int
    """Largest resident size of the worker process so far."""
    standing: int = 0
    """Results that were in the output before, of a run that went on; `calls` does not count them."""

    @property
    def ok(self) -> int:
        return self.calls - self.failed

    @property
    def calls_per_second(self) -> float:
        return self.calls * 1_000 / self.elapsed_ms if self.elapsed_ms else 0.0
