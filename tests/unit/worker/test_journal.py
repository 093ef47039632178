"""The journal's file: read strictly, cut off anywhere, small for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from callyard.errors import UsageError
from callyard.worker import journal as module
from callyard.worker.journal import InputMark, Journal, Notes, RunHeader, encode_record, read_journal, to_ranges

HEADER = RunHeader(
    run_id="a1",
    generation=1,
    function="double",
    digest="d1",
    shape={"id": None, "limit": 7},
    input=InputMark(size=10, modified_ns=123),
    hash_seed=42,
    boot="b1",
    folder="callyard-run-x",
    base=0,
    start=(0, 0),
)
RECORDS = [
    Notes(open_row=64),
    Notes(settled=(1_000, 40), rows_digest=(40, "ab")),
    Notes(open_row=128, settled=(2_000, 64)),
    Notes(effects=True),
    Notes(begun=((64, 70), (90, 91)), ended=True, complete=False),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl.state"


def write(path: Path, records: list[Notes]) -> None:
    journal = Journal(path, HEADER)
    for record in records:
        journal.append(record)
    journal.close()


def expect(records: list[Notes]) -> Notes:
    notes = Notes(version=1, header=HEADER)
    for record in records:
        notes.update(record)
    return notes


@pytest.mark.requirement("X88")
def test_what_was_noted_last_is_read(path: Path) -> None:
    assert read_journal(path) is None
    write(path, RECORDS)
    notes = read_journal(path)
    assert notes == expect(RECORDS)
    assert notes is not None
    assert (notes.settled_place, notes.opened) == ((2_000, 64), 128)


@pytest.mark.requirement("X88")
def test_cut_off_at_any_byte_it_says_what_was_whole(path: Path) -> None:
    write(path, RECORDS)
    data = path.read_bytes()
    ends = [position + 1 for position, byte in enumerate(data) if byte == ord("\n")]
    for size in range(ends[0], len(data) + 1):
        path.write_bytes(data[:size])
        whole = sum(end <= size for end in ends) - 1
        assert read_journal(path) == expect(RECORDS[:whole]), size
    path.write_bytes(data[: ends[2]] + b"\0" * 4_096)  # a power cut: the file had grown, and its data had not come
    assert read_journal(path) == expect(RECORDS[:2])


@pytest.mark.requirement("X88")
def test_a_damaged_journal_says_so_and_what_to_do(path: Path) -> None:
    write(path, RECORDS)
    data = path.read_bytes()
    last = data[:-1].rindex(b"\n") + 1
    for position in range(last):
        path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        with pytest.raises(UsageError, match=r"is damaged: .*--force"):
            read_journal(path)
    path.write_bytes(b"")
    with pytest.raises(UsageError, match="is damaged: it has no header"):
        read_journal(path)


@pytest.mark.parametrize("text", [b'{"no_such":1}', b'{"open_row":"x"}', b"[]", b"{"])
def test_a_record_of_another_form_is_refused(path: Path, text: bytes) -> None:
    import zlib

    write(path, RECORDS)
    with path.open("ab") as file:
        file.write(b"%08x %08x %b\n" % (len(text), zlib.crc32(text), text))
    with pytest.raises(UsageError, match="is damaged: the record at byte"):
        read_journal(path)


def test_another_version_is_named(path: Path) -> None:
    import zlib

    text = b'{"version":2,"header":{"new":true}}'
    path.write_bytes(b"%08x %08x %b\n" % (len(text), zlib.crc32(text), text))
    with pytest.raises(UsageError, match="is of version 2, and this Callyard reads version 1"):
        read_journal(path)


@pytest.mark.requirement("X88")
def test_it_stays_small(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPACT_BYTES", 2_000)
    journal = Journal(path, HEADER)
    largest = 0
    for row in range(300):
        journal.append(Notes(open_row=row * 64, settled=(row * 1_000, row * 60)))
        largest = max(largest, path.stat().st_size)
    journal.close()
    assert largest < 2_200
    assert read_journal(path) == journal.notes
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_ranges() -> None:
    assert to_ranges([]) == []
    assert to_ranges([1, 2, 3, 7, 9, 10]) == [(1, 4), (7, 8), (9, 11)]


def test_a_record_is_one_line() -> None:
    assert encode_record(Notes(open_row=64)) == b'0000000f 79bd592c {"open_row":64}\n'
