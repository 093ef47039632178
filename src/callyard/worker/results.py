"""What callers get: a result per call, and a summary per run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from callyard.errors import CallError, CallFailure, ErrorKind
from callyard.scheduler import CallResult, StopReason
from callyard.wire.messages import CallEventKind, CallEventPayload


class Result:
    """How one call ended. `value` is decoded from JSON when it is asked for."""

    __slots__ = ("_result",)

    def __init__(self, result: CallResult) -> None:
        self._result = result

    @property
    def index(self) -> int:
        """The call's place in its list, from 0."""
        return self._result.index

    @property
    def ok(self) -> bool:
        return self._result.failure is None

    @property
    def value(self) -> Any:
        """The JSON value the function returned. Raises CallError when the call failed."""
        output = self._result.output
        if output is None:
            raise CallError(self._failure())
        return msgspec.json.decode(output)

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
    def raw(self) -> bytes | None:
        """The output's JSON bytes as its executor sent them; None: the call failed."""
        return self._result.output

    def unwrap(self) -> Any:
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
        value = msgspec.json.decode(event.value)
        return cls(index, event.event_kind, event.text, event.level, value, event.cut_count)


EventCallback = Callable[[CallEvent], None]
"""Called on the loop while the call runs; it must not wait."""


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

    @property
    def ok(self) -> int:
        return self.calls - self.failed

    @property
    def calls_per_second(self) -> float:
        return self.calls * 1_000 / self.elapsed_ms if self.elapsed_ms else 0.0
