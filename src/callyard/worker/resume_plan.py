"""Where a run goes on: read from its output, what an earlier generation kept, and its journal.

It goes on at the first row that has no result, or one that is to be replaced. What is behind that place is copied to a
file of its own, beside the journal, so that the output can be written on from there. Source: call-execution X88.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from callyard.errors import CallFailure, ErrorKind, Outcome
from callyard.worker.disk import Disk
from callyard.worker.journal import Notes, RunHeader
from callyard.worker.kept import STOPPED, KeptFile, OldResult, read_kept, read_lines, read_result, refuse_edited
from callyard.worker.outputs import Place, index_of


class Promising(Protocol):
    """Whether a function may run again."""

    def __call__(self, name: str) -> bool: ...


class Plan(msgspec.Struct, kw_only=True):
    """Where a generation goes on, and with what."""

    start: Place = (0, 0)
    before: int = 0
    """Results before it."""
    failed_before: int = 0
    kept: Path | None = None
    kept_standing: int = 0
    kept_failed: int = 0
    """Of those that stand."""
    again: int = 0
    """Failed rows that run again."""
    again_unknown: int = 0
    """Of them, those that may have had their effect."""


class Planner:
    """Reads what is known of a run that ended."""

    def __init__(
        self,
        path: Path,
        kept: Path,
        notes: Notes,
        disk: Disk,
        *,
        is_parquet: bool,
        output_schema: bytes,
        repeated: Sequence[str],
        with_printed: bool,
        resume: bool,
        retry_failed: bool,
        function: str | None,
        may_run_again: Promising,
    ) -> None:
        """`path`: the output; `kept`: the file for what stands behind the place where it goes on."""
        self._path = path
        self._kept = kept
        self._notes = notes
        self._disk = disk
        self._is_parquet = is_parquet
        self._output_schema = output_schema
        self._repeated = repeated
        self._with_printed = with_printed
        self._resume = resume
        self._retry_failed = retry_failed
        self._function = function
        self._may_run_again = may_run_again
        self._plan = Plan(start=notes.settled_place)

    def plan(self) -> Plan:
        """Waits for the disk. Raises UsageError for an output that is not as its run left it, and OSError."""
        kept = KeptFile(self._kept, self._disk)
        try:
            splits = self._sort(kept)
            kept.finish()
        except BaseException:
            kept.close()
            self._disk.remove(self._kept)
            raise
        if splits:
            self._plan.kept = self._kept
        else:
            self._disk.remove(self._kept)
        return self._plan

    def _sort(self, kept: KeptFile) -> bool:
        """Count what stands before the place, copy what is behind it. Whether anything is."""
        plan, expected, splits = self._plan, 0, False
        group: list[OldResult] = []
        """Results that begin at one place: a line, or a part."""
        for result in self._read():
            replaced = self._is_again(result)
            if not splits and group and result.at != group[0].at:
                self._count_before(group)
            if not splits and (replaced or not result.fits or result.index != expected or result.at < 0):
                splits = True
                if result.at >= 0:
                    plan.start = (result.at, group[0].index if group else expected)
                for one in group:
                    self._keep(kept, one, stands=True)
            if splits:
                self._keep(kept, result, stands=not replaced)
            else:
                group.append(result)
            expected = result.index + 1
        if not splits:
            self._count_before(group)
            plan.start = (plan.start[0], max(expected, plan.start[1]))
        return splits

    def _count_before(self, group: list[OldResult]) -> None:
        self._plan.before += len(group)
        self._plan.failed_before += sum(result.failure is not None for result in group)
        group.clear()

    def _keep(self, kept: KeptFile, result: OldResult, *, stands: bool) -> None:
        kept.add(result.line, stands=stands)
        self._plan.kept_standing += stands
        self._plan.kept_failed += stands and result.failure is not None

    def _is_again(self, result: OldResult) -> bool:
        failure = result.failure
        if failure is None:
            return False
        if self._retry_failed:
            self._plan.again += 1
            self._plan.again_unknown += failure.outcome is Outcome.UNKNOWN
            return True
        return self._resume and is_stopped(failure, self._function, self._may_run_again)

    def _read(self) -> Iterator[OldResult]:
        """All results that are known, by their rows."""
        last = -1
        for result in self._read_output(self._notes.run, self._notes.settled_place[0]):
            last = result.index
            yield result
        kept = self._notes.run.kept
        if kept and not self._notes.ended:
            for _, line in read_kept(self._kept.with_name(kept)):
                index = index_of(line)
                if index > last:
                    yield OldResult(index, read_result(line).failure, line, -1)

    def _read_output(self, header: RunHeader, settled: int) -> Iterator[OldResult]:
        name, ended = str(self._path), self._notes.ended
        if self._is_parquet:
            from callyard.worker.parquet_output import has_part, read_parts

            if ended and has_part(self._path, settled):
                raise refuse_edited(name, "it has a part behind its last one")
            for number, line, fits in read_parts(
                self._path,
                header.base,
                settled,
                self._output_schema,
                self._repeated,
                with_printed=self._with_printed,
            ):
                yield OldResult(index_of(line), read_result(line).failure, line, number, fits)
            return
        with self._path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size < settled:
                raise refuse_edited(name, f"it has {size:,} bytes, and had {settled:,}")
            if ended and size > settled:
                raise refuse_edited(name, f"{size - settled:,} bytes were added behind its last result")
            yield from read_lines(stream, name, header.base, settled)


def is_stopped(failure: CallFailure, function: str | None, may_run_again: Promising) -> bool:
    """Whether a call failed since its run ended, and may run now."""
    if failure.kind not in STOPPED or (
        failure.kind is ErrorKind.TIMEOUT and failure.details.get("limit") != "deadline_ms"
    ):
        return False
    if failure.outcome is Outcome.NOT_RUN:
        return True
    promised = function is not None and may_run_again(function)
    return promised and not failure.details.get("effect_below")
