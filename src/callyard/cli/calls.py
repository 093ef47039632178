"""The call list and its results as `run` sees them: which line a call is from, and which failures are alike."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from callyard.errors import KIND_RULES, CallFailure, ErrorKind, Outcome
from callyard.scheduler import CallResult
from callyard.worker.builders import FileSource, Row
from callyard.worker.columns import FittedRows
from callyard.worker.outputs import OutputSink
from callyard.worker.results import printed_of

STOPPED_KINDS: Final = frozenset({ErrorKind.CANCELLED, ErrorKind.DEADLINE, ErrorKind.SHUTTING_DOWN})
"""Not failures of a function: the run was ended before or while it ran."""
PATTERNS_MAX: Final = 100
"""Different messages told apart for one kind; the rest are counted together."""
_PATTERN_CHARACTERS: Final = 300
_VARYING: Final = re.compile(r"'[^']*'|\"[^\"]*\"|\b0x[0-9a-f]+|\d[\d.,_]*")
"""The parts of a message that differ from call to call: quoted text and numbers."""
_PLACE: Final = re.compile(r'^  File "([^"<]+)", line (\d+)', re.MULTILINE)


def summarise(*failures: CallFailure) -> str:
    """Failures of one kind in plain words: what never ran did not raise."""
    kind = failures[0].kind
    if kind is ErrorKind.INTERNAL and all(failure.outcome is Outcome.NOT_RUN for failure in failures):
        return "the function could not be run"
    return KIND_RULES[kind].summary


class CallList:
    """A source, cut off at `limit` rows, that remembers at which line each row began.

    Of the lines only the changes of the distance between line and index are kept, and those only until the results of
    the rows before were written.
    """

    def __init__(self, source: FileSource | FittedRows, limit: int | None) -> None:
        self.name = source.name
        self.total = source.total
        self.may_block = source.may_block
        self._source = source
        self._limit = limit
        self._taken = 0
        self._ended = False
        self._starts: deque[tuple[int, int]] = deque()
        """From this index on, a row's line is its index and this much."""

    @property
    def read_fraction(self) -> float | None:
        read = self._source.read_fraction
        if self._limit is None:
            return read
        return max(read or 0.0, min(1.0, self._taken / self._limit) if self._limit else 1.0)

    def rows(self) -> Iterator[Row]:
        source, limit = self._source, self._limit
        rows = source.rows()
        distance = 0
        try:
            while limit is None or self._taken < limit:
                row = next(rows, None)
                if row is None:
                    break
                if source.line_number and source.line_number - row.index != distance:
                    distance = source.line_number - row.index
                    self._starts.append((row.index, distance))
                self._taken += 1
                yield row
            self._ended = True
        finally:
            source.close()

    def close(self) -> None:
        """Its rows are not asked for."""
        self._source.close()

    def is_done(self, count: int) -> bool:
        """Whether these first rows are all that were wanted."""
        return self._ended and count == self._taken

    def find_line(self, index: int) -> int | None:
        """The line of a row whose result was not written yet; None: not known."""
        found = None
        for first, distance in tuple(self._starts):  # a thread may append meanwhile
            if first > index:
                break
            found = index + distance
        return found

    def forget_before(self, index: int) -> None:
        starts = self._starts
        while len(starts) > 1 and starts[1][0] <= index:
            starts.popleft()


class Alike(msgspec.Struct):
    """Failures of one kind whose messages differ in numbers and quoted text only."""

    count: int
    index: int
    """The first such call."""
    line: int | None
    failure: CallFailure
    tail: tuple[str, ...] = ()
    """The last lines that this call printed and logged."""

    @property
    def where(self) -> str:
        """`call 3, line 5`; the message of a bad line names the line itself."""
        known = self.line is not None and "line" not in self.failure.details
        return f"call {self.index}, line {self.line}" if known else f"call {self.index}"

    @property
    def message(self) -> str:
        """With the place in the user's code that raised, where there is one."""
        places = _PLACE.findall(self.failure.stack)
        if not places:
            return self.failure.message
        file, line = next((place for place in reversed(places) if not os.path.isabs(place[0])), places[-1])
        return f"{self.failure.message} ({file}:{line})"


class RefusedRows:
    """A sink in front of another one, which gets what failed only: of a dry run the rest says nothing."""

    def __init__(self, sink: OutputSink) -> None:
        self._sink = sink
        self.flush = sink.flush
        self.close = sink.close
        self.abort = sink.abort

    def write(self, results: Sequence[CallResult]) -> None:
        refused = [result for result in results if result.failure is not None]
        if refused:
            self._sink.write(refused)


class Tally:
    """A sink in front of the output that counts the failures that are alike.

    Arguments that do not fit are told with their line, which only the call list knows.
    """

    def __init__(self, sink: OutputSink, calls: CallList) -> None:
        self.kinds: dict[ErrorKind, dict[str, Alike]] = {}
        self.others: dict[ErrorKind, int] = {}
        """Failures beyond `PATTERNS_MAX`."""
        self.cancelled = 0
        """Calls that had begun when the run was stopped."""
        self.not_run = 0
        """Calls that had not."""
        self._sink = sink
        self._calls = calls
        self.flush = sink.flush
        self.close = sink.close
        self.abort = sink.abort

    def write(self, results: Sequence[CallResult]) -> None:
        placed: list[CallResult] = []
        for result in results:
            failure = result.failure
            if failure is not None:
                self._count(result, failure)
                if failure.kind is ErrorKind.SCHEMA and "line" not in failure.details:
                    result = self._with_line(result, failure)
            placed.append(result)
        self._sink.write(placed)
        if results:
            self._calls.forget_before(results[-1].index + 1)

    def _with_line(self, result: CallResult, failure: CallFailure) -> CallResult:
        line = self._calls.find_line(result.index)
        if line is None:
            return result
        failure = msgspec.structs.replace(failure, details={**failure.details, "line": line})
        return msgspec.structs.replace(result, failure=failure)

    def _count(self, result: CallResult, failure: CallFailure) -> None:
        if failure.kind in STOPPED_KINDS:
            if failure.outcome is Outcome.NOT_RUN:
                self.not_run += 1
            else:
                self.cancelled += 1
        alike = self.kinds.setdefault(failure.kind, {})
        pattern = _VARYING.sub("#", failure.message[:_PATTERN_CHARACTERS])
        known = alike.get(pattern)
        if known is not None:
            known.count += 1
        elif len(alike) < PATTERNS_MAX:
            printed = printed_of(result)
            tail = () if printed is None else printed.tail
            alike[pattern] = Alike(1, result.index, self._calls.find_line(result.index), failure, tail)
        else:
            self.others[failure.kind] = self.others.get(failure.kind, 0) + 1

    def count(self, kind: ErrorKind) -> int:
        return sum(alike.count for alike in self.kinds[kind].values()) + self.others.get(kind, 0)

    def most_frequent(self, kind: ErrorKind, shown_max: int) -> tuple[list[Alike], int]:
        """The groups with most failures, in the order of their first, and how many failures are in none of them."""
        ordered = sorted(self.kinds[kind].values(), key=lambda alike: -alike.count)[:shown_max]
        rest = self.count(kind) - sum(alike.count for alike in ordered)
        return ordered, rest
