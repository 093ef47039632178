"""Old results, lost rows and new ones: each at its place, whichever comes to be known first."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from callyard.errors import ErrorKind, Outcome, fail
from callyard.scheduler import CallResult
from callyard.worker.disk import DISK
from callyard.worker.kept import KeptFile
from callyard.worker.merged_output import MergedOutput
from callyard.worker.outputs import JsonlOutput, OutputSink, format_line
from callyard.worker.results import ToldResult


def succeeded(row: int) -> CallResult:
    return ToldResult(row, b'"new"', None, 1)


def lost(row: int) -> CallResult:
    return ToldResult(row, None, fail(ErrorKind.CRASHED, "lost", attempts=1, outcome=Outcome.UNKNOWN), 1)


def stopped(row: int) -> CallResult:
    return ToldResult(row, None, fail(ErrorKind.CANCELLED, "cancelled before it ran", outcome=Outcome.NOT_RUN), 0)


def merge(folder: Path, rows: str) -> tuple[list[int], MergedOutput]:
    """`rows`, by index: `s` stands, `r` is replaced, `u` was to be replaced and is not, `l` is lost, `n` is new."""
    kept = KeptFile(folder / "kept", DISK)
    for row, state in enumerate(rows):
        if state in "sru":
            kept.add(format_line(succeeded(row) if state == "s" else lost(row)), stands=state == "s")
    kept.finish()
    output = JsonlOutput(folder / "out.jsonl", existing="overwrite")
    known = deque(lost(row) for row, state in enumerate(rows) if state == "l")  # as one who reads far ahead knows them
    merged = MergedOutput(output, lambda sink: sink, folder / "kept", known, lambda: None)
    for row, state in enumerate(rows):
        if state in "rn":
            merged.write([succeeded(row)])
    for _ in merged.splice_rest():
        pass
    merged.close()
    lines = (folder / "out.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line)["index"] for line in lines], merged


@pytest.mark.requirement("X88")
@pytest.mark.parametrize("rows", ["rssrssnnlnn", "rlsr", "lsu", "snl", ""])
def test_in_order(tmp_path: Path, rows: str) -> None:
    found, merged = merge(tmp_path, rows)
    assert found == list(range(len(rows)))
    assert [result.index for result in merged.lost_results] == [row for row, state in enumerate(rows) if state == "l"]
    assert merged.failed == rows.count("l") + rows.count("u")


@pytest.mark.requirement("X88")
@given(rows=st.text("srunl", max_size=20))
def test_in_order_whatever_they_are(tmp_path_factory: pytest.TempPathFactory, rows: str) -> None:
    found, merged = merge(tmp_path_factory.mktemp("merged"), rows)
    assert found == list(range(len(rows)))
    assert merged.failed == rows.count("l") + rows.count("u")


@pytest.mark.requirement("X88", "X62")
def test_a_row_that_a_stop_kept_from_running_again_keeps_what_it_had(tmp_path: Path) -> None:
    """Whether it may have had its effect is said by the old result; the new one says only that the run was stopped."""
    old = [lost(0), stopped(1), ToldResult(2, None, fail(ErrorKind.INTERNAL, "it raised"), 1, (), None, b'"id":"A7"')]
    kept = KeptFile(tmp_path / "kept", DISK)
    for result in old:
        kept.add(format_line(result), stands=False)
    kept.finish()
    seen: list[CallResult] = []

    class Counting:
        def __init__(self, sink: OutputSink) -> None:
            self.flush, self.close, self.abort = sink.flush, sink.close, sink.abort
            self._sink = sink

        def write(self, results: Sequence[CallResult]) -> None:
            seen.extend(results)
            self._sink.write(results)

    output = JsonlOutput(tmp_path / "out.jsonl", existing="overwrite")
    merged = MergedOutput(output, Counting, tmp_path / "kept", deque(), lambda: None)
    new = [stopped(0), stopped(1), stopped(2), stopped(3)]
    merged.write(new)
    merged.close()
    assert (tmp_path / "out.jsonl").read_bytes() == b"".join(map(format_line, [*old, stopped(3)]))
    assert seen == new  # what counts them is told what this run did
    assert (merged.failed, merged.unreplaced) == (4, 2)
