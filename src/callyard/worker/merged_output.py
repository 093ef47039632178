"""Results of earlier generations of a run between those of this one, each at its place. Source: call-execution X88."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from callyard.errors import Outcome
from callyard.scheduler import CallResult
from callyard.worker.kept import STOPPED, read_kept, read_result
from callyard.worker.outputs import DurableOutput, OutputSink, index_of

SPLICED_ROWS: Final = 1_024
"""Kept results that are written in one go."""


class MergedOutput:
    """Puts results of earlier generations, and rows that are lost, between the new results, each at its place."""

    def __init__(
        self,
        output: DurableOutput,
        in_front: Callable[[OutputSink], OutputSink],
        kept: Path | None,
        lost: deque[CallResult],
        on_written: Callable[[], None],
    ) -> None:
        """`in_front` gives a sink before the output, which sees new results and not those that stand."""
        self.failed = 0
        """New failures, lost rows among them, and old ones that were to be replaced and were not."""
        self.lost_results: list[CallResult] = []
        self.wrote = False
        self._unreplaced = Unreplaced(output)
        sink = in_front(self._unreplaced)
        self.flush = sink.flush
        self.close = sink.close
        self.abort = sink.abort
        self._sink = sink
        self._output = output
        self._lost = lost
        self._on_written = on_written
        self._kept: Iterator[tuple[bool, bytes]] = iter(()) if kept is None else read_kept(kept)
        self._next: tuple[int, bool, bytes] | None = None
        self._advance()

    def _advance(self) -> None:
        found = next(self._kept, None)
        self._next = None if found is None else (index_of(found[1]), *found)

    def write(self, results: Sequence[CallResult]) -> None:
        if not results:
            return
        self.wrote = True
        if self._next is None and not self._lost:
            self._write(results)
        else:
            fresh: list[CallResult] = []
            for result in results:
                if self._comes_before(result.index):
                    self._write(fresh)
                    fresh = []
                    for _ in self._splice_before(result.index):
                        pass
                if self._next is not None and self._next[0] == result.index:
                    self._unreplaced.choose(result, self._next[2])
                    self._advance()
                fresh.append(result)
            self._write(fresh)
        self._on_written()

    def _write(self, results: Sequence[CallResult]) -> None:
        if results:
            self.failed += sum(result.failure is not None for result in results)
            self._sink.write(results)

    @property
    def unreplaced(self) -> int:
        """New results that say only that the run was stopped, in whose place the old ones stay."""
        return self._unreplaced.count

    def splice_rest(self) -> Iterator[None]:
        """Write all that is left, a piece at each step."""
        return self._splice_before(None)

    def _comes_before(self, row: int | None) -> bool:
        return self._is_lost_before(row) or (self._next is not None and (row is None or self._next[0] < row))

    def _is_lost_before(self, row: int | None) -> bool:
        return bool(self._lost) and (row is None or self._lost[0].index < row)

    def _splice_before(self, row: int | None) -> Iterator[None]:
        while self._comes_before(row):
            is_lost = self._is_lost_before(row)
            end = self._lost[0].index if is_lost else row
            lines: list[bytes] = []
            while self._next is not None and len(lines) < SPLICED_ROWS and (end is None or self._next[0] < end):
                _, stands, line = self._next
                self.failed += not stands
                lines.append(line)
                self._advance()
            if lines:
                self._output.write_kept(lines)
            elif is_lost:
                self.lost_results.append(self._lost.popleft())
                self._write(self.lost_results[-1:])
            yield


class Unreplaced:
    """The sink right before the output. A row that was to run again, and that a stop kept from it, keeps the result
    that it had: that one says whether the call may have had its effect."""

    def __init__(self, output: OutputSink) -> None:
        self.count = 0
        self.flush = output.flush
        self.close = output.close
        self.abort = output.abort
        self._output = output
        self._old: dict[int, CallResult] = {}
        """By row, until they are written."""

    def choose(self, result: CallResult, old_line: bytes) -> None:
        """Of a result that comes next, and the one that it was to replace."""
        if _is_kept_from_running(result):
            old = read_result(old_line)
            if not _is_kept_from_running(old):
                self._old[result.index] = old
                self.count += 1

    def write(self, results: Sequence[CallResult]) -> None:
        if self._old:
            results = [self._old.pop(result.index, result) for result in results]
        self._output.write(results)


def _is_kept_from_running(result: CallResult) -> bool:
    failure = result.failure
    return failure is not None and failure.kind in STOPPED and failure.outcome is Outcome.NOT_RUN
