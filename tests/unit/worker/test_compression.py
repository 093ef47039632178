"""Compressed call lists by name."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import msgspec
import pytest

from callyard.errors import UsageError
from callyard.worker import compression
from callyard.worker.builders import Row, open_source
from callyard.worker.compression import split_format

LINES = b"".join(b'{"x":%d}\n' % x for x in range(5_000))


def pack(data: bytes, suffix: str) -> bytes:
    if suffix == "gz":
        return gzip.compress(data)
    packed: bytes = compression._find_zstd().compress(data)
    return packed


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_compressed_file_is_read_as_what_its_name_says(tmp_path: Path, suffix: str) -> None:
    for name, content, first in (
        ("a.jsonl", LINES, {"x": 0}),
        ("a.csv", b"x\n7\n", {"x": "7"}),
        ("a.TSV", b"x\ty\n7\t8\n", {"x": "7", "y": "8"}),
        ("a.json", b"[[1]]", [1]),
    ):
        path = tmp_path / f"{name}.{suffix}"
        path.write_bytes(pack(content, suffix))
        source = open_source(path)
        rows = source.rows()
        assert msgspec.json.decode(next(rows).args) == first
        assert 0 < (source.read_fraction or 0) <= 1
        count = 1 + sum(1 for _ in rows)
        assert count == (5_000 if name == "a.jsonl" else 1)
        assert source.read_fraction == 1.0


def test_members_one_after_the_other_are_one_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"[1]\n[") + gzip.compress(b"2]\n"))
    assert [row.args for row in open_source(path).rows()] == [b"[1]", b"[2]"]


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_data_that_are_cut_off_or_damaged_are_said_after_the_rows_before(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl.{suffix}"
    lines = b"".join(b'{"x":%d}\n' % random.Random(x).getrandbits(60) for x in range(60_000))
    packed = pack(lines, suffix)
    path.write_bytes(packed[: len(packed) - 5_000])
    taken: list[Row] = []
    with pytest.raises(UsageError, match=r"its compressed data end too early: it was cut off"):
        taken.extend(open_source(path).rows())
    assert len(taken) > 1_000
    assert all(row.failure is None for row in taken)
    path.write_bytes(b"not compressed at all" * 20)
    with pytest.raises(UsageError, match=r"compressed data are damaged, or are not what its name says"):
        list(open_source(path).rows())


def test_a_missing_library_prints_its_pip_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "_ZSTD_MODULES", ("callyard.no_zstd",))
    path = tmp_path / "a.jsonl.zst"
    path.touch()
    with pytest.raises(UsageError, match=r"pip install 'callyard\[zstd\]'"):
        open_source(path)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("trips.csv.gz", ("csv", "gzip")),
        ("trips.2013.jsonl.zst", ("jsonl", "zstd")),
        ("trips.csv", ("csv", None)),
        ("trips.gz", ("", "gzip")),
        ("trips", ("", None)),
        (".csv.gzip", ("csv", "gzip")),
    ],
)
def test_what_a_name_says(name: str, found: tuple[str, str | None]) -> None:
    assert split_format(name) == found
