"""The rows of a call list that a run which goes on still has to run. Source: call-execution X62, X64, X88."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

from callyard.errors import ErrorKind, Outcome, UsageError, fail
from callyard.scheduler import CallResult
from callyard.worker.builders import CallSource, Row
from callyard.worker.feeds import close_rows
from callyard.worker.journal import Range
from callyard.worker.kept import read_kept
from callyard.worker.outputs import index_of
from callyard.worker.results import ToldResult
from callyard.worker.resume_plan import Plan, Promising

CHECKED_ROWS: Final = 256
"""Of rows in no file the digest is taken after each so many, and after each of the first so many."""
LOST_MESSAGE: Final = "the run was ended while it ran, or before its result was on disk; it was not run again"


class RemainingRows:
    """The rows of a call list that are to run. A `CallSource`; read by one thread, which may be another one."""

    def __init__(
        self,
        rows: CallSource,
        plan: Plan,
        lost: deque[CallResult],
        *,
        in_ranges: tuple[Ranges, Ranges],
        may_run_again: Promising,
        function: str | None,
        only_failed: bool,
        hashed: bool,
        expected: tuple[int, str] | None,
    ) -> None:
        self.name = rows.name
        known = plan.before + plan.kept_standing
        self.total = None if rows.total is None else max(0, rows.total - known)
        skips = plan.start[1] > 0 or plan.kept is not None
        self.may_block = rows.may_block or skips  # rows that are passed over come without end
        self.ended = False
        self.passed_over = 0
        """Rows without a result, when only those that failed run."""
        self.skipped = 0
        """Rows that have one."""
        self._rows = rows
        self._plan = plan
        self._lost_results = lost
        self._lost, self._doubtful = in_ranges
        self._may_run_again = may_run_again
        self._function = function
        self._only_failed = only_failed
        self._hash = hashlib.blake2b(digest_size=16) if hashed else None
        self._digests: deque[tuple[int, str]] = deque()
        self._expected = expected

    @property
    def read_fraction(self) -> float | None:
        return self._rows.read_fraction

    def rows(self) -> Iterator[Row]:
        rows = self._rows.rows()
        kept = self._plan.kept
        known = iter(()) if kept is None else ((stands, index_of(line)) for stands, line in read_kept(kept))
        stands, known_index = next(known, (False, -1))
        start, count = self._plan.start[1], 0
        try:
            for row in rows:
                index, count = row.index, row.index + 1
                if self._hash is not None:
                    self._check(row, self._hash)
                if index < start:
                    self.skipped += 1
                    continue
                while 0 <= known_index < index:
                    stands, known_index = next(known, (False, -1))
                if known_index == index:
                    if stands:
                        self.skipped += 1
                    else:
                        yield row
                elif row.failure is None and self._is_lost(row):
                    self._lost_results.append(_lost_result(row))
                elif self._only_failed:
                    self.passed_over += 1
                else:
                    yield row
            if self._expected is not None and count < self._expected[0]:
                raise self._other_rows(f"{self.name} has {count:,} rows, fewer than those")
            self.ended = True
        finally:
            close_rows(rows)

    def _is_lost(self, row: Row) -> bool:
        if self._lost.holds(row.index):
            return True
        name = row.function or self._function
        return self._doubtful.holds(row.index) and name is not None and not self._may_run_again(name)

    def _check(self, row: Row, rows_hash: hashlib.blake2b) -> None:
        text = row.args if row.failure is None else row.failure.message.encode()
        rows_hash.update(b"%d %b " % (len(text), (row.function or "").encode()))
        rows_hash.update(text)
        count, expected = row.index + 1, self._expected
        if expected is not None and count == expected[0] and rows_hash.hexdigest() != expected[1]:
            raise self._other_rows(f"the first {count:,} rows of {self.name} are not those")
        if expected is not None and count <= expected[0]:
            return  # what is known of them stays so, whatever these turn out to be
        if count < CHECKED_ROWS or count % CHECKED_ROWS == 0:
            self._digests.append((count, rows_hash.hexdigest()))

    def _other_rows(self, problem: str) -> UsageError:
        return UsageError(
            f"{problem} that the run began with: give --accept-changes to go on all the same, or --force to start anew"
            ' (in Python: accept_changes=True, existing="overwrite")'
        )

    def digest_before(self, row: int) -> tuple[int, str] | None:
        """The last one that was taken of rows before that one only."""
        found = None
        while self._digests and self._digests[0][0] <= row:
            found = self._digests.popleft()
        return found


class Ranges:
    """Whether a row is in one of some ranges; asked for rising rows."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        self._ranges = deque(sorted(ranges))

    def holds(self, row: int) -> bool:
        while self._ranges and self._ranges[0][1] <= row:
            self._ranges.popleft()
        return bool(self._ranges) and self._ranges[0][0] <= row


def _lost_result(row: Row) -> CallResult:
    failure = fail(ErrorKind.CRASHED, LOST_MESSAGE, attempts=1, outcome=Outcome.UNKNOWN, cause="run_ended")
    return ToldResult(row.index, None, failure, 1, (), None, row.echo)
