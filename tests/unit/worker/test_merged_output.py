"""Old results, lost rows and new ones: each at its place, whichever comes to be known first."""

from __future__ import annotations

from collections import deque
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
from callyard.worker.outputs import JsonlOutput, format_line
from callyard.worker.results import ToldResult


def succeeded(row: int) -> CallResult:
    return ToldResult(row, b'"new"', None, 1)


def lost(row: int) -> CallResult:
    return ToldResult(row, None, fail(ErrorKind.CRASHED, "lost", attempts=1, outcome=Outcome.UNKNOWN), 1)


def merge(folder: Path, rows: str) -> tuple[list[int], MergedOutput]:
    """`rows`, by index: `s` stands, `r` is replaced, `u` was to be replaced and is not, `l` is lost, `n` is new."""
    kept = KeptFile(folder / "kept", DISK)
    for row, state in enumerate(rows):
        if state in "sru":
            kept.add(format_line(succeeded(row) if state == "s" else lost(row)), stands=state == "s")
    kept.finish()
    output = JsonlOutput(folder / "out.jsonl", existing="overwrite")
    known = deque(lost(row) for row, state in enumerate(rows) if state == "l")  # as one who reads far ahead knows them
    merged = MergedOutput(output, output, folder / "kept", known, lambda: None)
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
