"""Runs to a file that are ended at each of their write boundaries, and go on."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from callyard.errors import ErrorKind, UsageError
from callyard.testing.cut_disk import Cut, CutDisk
from callyard.wire.messages import ExecuteCall
from callyard.worker import file_run as module
from callyard.worker import parquet_output
from callyard.worker.begun import BegunRows
from callyard.worker.builders import open_source
from callyard.worker.disk import DISK, Disk
from callyard.worker.file_run import FileRun, Rerun
from callyard.worker.journal import Notes, read_journal
from callyard.worker.outputs import OutputError
from callyard.worker.results import RunSummary
from callyard.worker.run_input import is_stored

from .conftest import MakeWorker
from .fakes import FakeProcess, FakeSpawner

ROWS = 40
FRESH = Rerun()
AGAIN = Rerun(resume=True)


@pytest.fixture(autouse=True)
def settle_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """More boundaries: each batch is settled by itself."""
    monkeypatch.setattr(module, "SETTLE_AFTER_S", 0.0)
    monkeypatch.setattr(module, "COMMIT_AFTER_S", 0.0)


class Executors(FakeSpawner):
    """They answer with twice the argument, and count what was called; rows in `failing` fail."""

    def __init__(self) -> None:
        super().__init__(answers=self._answer)
        self.called: Counter[int] = Counter()
        self.failing: set[int] = set()
        self.stopping: tuple[int, Any] | None = None
        self.on_call: Callable[[int], None] = lambda row: None

    def _answer(self, process: FakeProcess, execute: ExecuteCall) -> None:
        (value,) = msgspec.json.decode(execute.payload.args)
        self.called[value] += 1
        self.on_call(value)
        if self.stopping is not None and value >= self.stopping[0]:
            self.stopping[1]()
        if value in self.failing:
            process.fail(execute.call_id, execute.payload.attempt_seq, ErrorKind.INTERNAL, f"no {value}")
        else:
            process.complete(execute, b"%d" % (2 * value))


class Place:
    """A folder with a call list, and what runs there."""

    def __init__(self, folder: Path, make_worker: MakeWorker) -> None:
        self.rows = folder / "rows.jsonl"
        self.out = folder / "out.jsonl"
        self.state = folder / "out.jsonl.state"
        self.executors = Executors()
        self._folder = folder
        self._make_worker = make_worker
        self.write_rows(range(ROWS))

    def write_rows(self, values: Iterable[int]) -> None:
        self.rows.write_text("".join(f"[{value}]\n" for value in values))

    @property
    def called(self) -> Counter[int]:
        return self.executors.called

    async def run(
        self,
        rerun: Rerun = FRESH,
        disk: Disk = DISK,
        *,
        function: str = "safe",
        shape: object = "",
        stop_at: int = -1,
        batches: int = 2,
    ) -> RunSummary:
        """From the file to the file, once. Raises what it ends by. `batches`: so many are outstanding at once, few
        enough that the first rows are settled before the last are opened."""
        spawner = Executors()
        spawner.called, spawner.failing = self.executors.called, self.executors.failing
        spawner.on_call = self.executors.on_call
        file_run = FileRun.prepare(self.out, rerun, source=self.rows, disk=disk)
        assert file_run is not None
        try:
            limits = {"batch_rows": 4, "executor_max_inflight": 4, "max_outstanding_batches": batches}
            async with self._make_worker(spawner, **limits) as worker:
                rows, sink = await file_run.begin(worker, open_source(self.rows), function, {"option": shape})
                run = worker.open_run(function, rows, sink, file_run=file_run)
                if stop_at >= 0:
                    spawner.stopping = stop_at, run.stop
                summary: RunSummary = await run.wait()
                return summary
        finally:
            file_run.close()

    @property
    def results(self) -> list[dict[str, Any]]:
        return [msgspec.json.decode(line) for line in self.out.read_bytes().splitlines()]

    def clear(self) -> None:
        for file in self._folder.glob("out.jsonl*"):
            file.unlink()
        self.called.clear()

    @property
    def files(self) -> list[str]:
        return sorted(file.name for file in self._folder.glob("out.jsonl*"))


@pytest.fixture
def place(tmp_path: Path, make_worker: MakeWorker) -> Place:
    return Place(tmp_path, make_worker)


async def count_operations(place: Place, rerun: Rerun = FRESH) -> list[str]:
    disk = CutDisk(1_000_000)
    await place.run(rerun, disk)
    return disk.operations


async def cut_off_late(place: Place) -> int:
    """Run until the disk goes when some rows are settled, and not all; how many."""
    for at in range(10, 200):
        place.clear()
        assert await cut_off(place, at, Cut.NOTHING)
        notes = read_journal(place.state)
        if notes is not None and notes.settled_place[1] >= 8:
            assert notes.settled_place[1] < ROWS
            return notes.settled_place[1]
    raise AssertionError("nothing was ever settled")


async def cut_off(place: Place, at: int, cut: Cut, rerun: Rerun = FRESH, **options: Any) -> bool:
    """Run until the disk goes; whether it went."""
    disk = CutDisk(at, cut)
    try:
        await place.run(rerun, disk, **options)
    except (OSError, UsageError):
        assert disk.is_gone
    return disk.is_gone


class Watched(Disk):
    """Checks at each write what must be on disk by then."""

    def __init__(self, place: Place) -> None:
        self.opened = self.synced_bytes = self.settled = 0
        self._place = place
        self._unsynced_open = 0

    def write(self, fd: int, data: bytes | memoryview) -> int:
        if self._name(fd).startswith("out.jsonl.state"):
            for line in bytes(data).splitlines():
                notes = msgspec.json.decode(line[18:], type=Notes)
                self._unsynced_open = max(self._unsynced_open, notes.open_row or 0)
                if notes.settled is not None:
                    self.settled = notes.settled[0]
                    assert self.settled <= self.synced_bytes, "settled_after_synced"
        return super().write(fd, data)

    def sync(self, fd: int) -> None:
        super().sync(fd)
        if self._name(fd).startswith("out.jsonl.state"):
            self.opened = self._unsynced_open
        elif self._name(fd) == "out.jsonl":
            self.synced_bytes = os.fstat(fd).st_size

    def check_call(self, row: int) -> None:
        assert row < self.opened, "open_before_sent"

    @staticmethod
    def _name(fd: int) -> str:
        return Path(os.readlink(f"/proc/self/fd/{fd}")).name


@pytest.mark.requirement("X88")
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="files have no names here")
async def test_rows_are_open_on_disk_before_they_are_sent_and_settled_after_their_results_are(place: Place) -> None:
    disk = Watched(place)
    problems: list[str] = []

    def check(row: int) -> None:
        try:
            disk.check_call(row)
        except AssertionError as error:
            problems.append(str(error))

    place.executors.on_call = check
    await place.run(disk=disk)
    assert not problems
    assert (disk.opened, disk.settled) == (ROWS, place.out.stat().st_size)


@pytest.mark.requirement("X88")
@pytest.mark.parametrize("cut", Cut)
async def test_cut_at_every_write_and_resumed_it_has_the_bytes_of_an_uncut_run(place: Place, cut: Cut) -> None:
    operations = await count_operations(place)
    whole = place.out.read_bytes()
    assert len(operations) >= 20
    assert {"write", "sync", "truncate", "replace", "remove"} <= {*operations}
    assert place.files == ["out.jsonl"]
    for at in range(2 * len(operations)):  # how often it settles is not always the same
        place.clear()
        gone = await cut_off(place, at, cut)
        if gone and place.out.exists() and (place.state.exists() or not place.out.read_bytes()):
            await place.run(AGAIN)
        elif gone:  # nothing was begun, or all was done, its journal gone
            assert not place.out.exists() or place.out.read_bytes() == whole
        assert not gone or not place.out.exists() or place.out.read_bytes() == whole, at
        if not gone:
            break
    else:
        raise AssertionError("the run never came to its end")


@pytest.mark.requirement("X88")
async def test_cut_again_and_again_it_comes_to_its_end(place: Place) -> None:
    """Each resume is cut, a little later in its life; one after another they add up to the whole."""
    await place.run()
    whole = place.out.read_bytes()
    place.clear()
    at, cuts = 5, 0
    await cut_off(place, at, Cut.HALF)
    while place.state.exists():
        at += 1
        cuts += await cut_off(place, at, Cut.HALF, AGAIN)
    assert place.out.read_bytes() == whole
    assert cuts >= 3


@pytest.mark.requirement("X88")
async def test_a_call_without_a_promise_begins_once_whatever_is_cut(place: Place) -> None:
    """A disk that is gone tells of no begun-marks, as a power cut: what was open and has no result is `crashed`."""
    for at in range(200):
        place.clear()
        gone = await cut_off(place, at, Cut.HALF, function="effect")
        if place.state.exists() or (place.out.exists() and not place.out.read_bytes()):
            await place.run(AGAIN, function="effect")
        if not place.out.exists():
            continue
        assert max(place.called.values()) == 1
        assert [result["index"] for result in place.results] == list(range(ROWS))
        for result in place.results:
            if result["ok"]:
                assert result["output"] == 2 * result["index"]
                assert place.called[result["index"]] == 1
            else:
                assert (result["error"]["kind"], result["error"]["outcome"]) == ("crashed", "unknown")
        if not gone:
            return
    raise AssertionError("the run never came to its end")


@pytest.mark.requirement("X88")
@pytest.mark.parametrize("cut", [Cut.HALF, Cut.ALL])
async def test_a_retry_that_is_cut_anywhere_loses_nothing(place: Place, cut: Cut) -> None:
    """What stands behind the first failed row lies beside the journal while it is not in the output."""
    place.executors.failing |= {3, 17, 18, 39}
    await place.run()
    failed = {file.name: file.read_bytes() for file in place.out.parent.glob("out.jsonl*")}
    place.executors.failing.clear()
    await place.run(Rerun(retry_failed=True))
    whole = place.out.read_bytes()
    assert place.files == ["out.jsonl"]
    for at in range(200):
        place.clear()
        for name, data in failed.items():
            (place.out.parent / name).write_bytes(data)
        gone = await cut_off(place, at, cut, Rerun(retry_failed=True))
        if place.state.exists():
            await place.run(Rerun(resume=True, retry_failed=True))
        assert place.out.read_bytes() == whole, at
        assert {*place.called} <= {3, 17, 18, 39} | set(range(ROWS))
        if not gone:
            return
    raise AssertionError("the run never came to its end")


@pytest.mark.requirement("X88")
@pytest.mark.parametrize("failing", [(), (3, 17, 18, 39)], ids=["whole", "retried"])
async def test_parts_that_are_cut_anywhere_add_up_to_the_whole(
    place: Place, monkeypatch: pytest.MonkeyPatch, failing: tuple[int, ...]
) -> None:
    """Of Parquet: a part that is not whole never was, and what a retry moves lies beside the journal."""
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(parquet_output, "PART_ROWS", 16)
    folder = place.out.parent
    place.out, place.state = folder / "out.parquet", folder / "out.parquet.state"
    before = folder / "before"
    before.mkdir()
    rerun, again = FRESH, AGAIN
    if failing:
        place.executors.failing |= {*failing}
        await place.run()
        place.executors.failing.clear()
        shutil.copytree(place.out, before / place.out.name)
        shutil.copy(place.state, before)
        rerun, again = Rerun(retry_failed=True), Rerun(resume=True, retry_failed=True)

    def read() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = parquet.read_table(place.out).to_pylist()
        return found

    await place.run(rerun)
    whole = read()
    assert [(result["index"], result["output"]) for result in whole] == [(row, str(2 * row)) for row in range(ROWS)]
    for at in range(200):
        shutil.rmtree(place.out)
        for file in folder.glob("out.parquet.*"):
            file.unlink()
        shutil.copytree(before, folder, dirs_exist_ok=True)
        gone = await cut_off(place, at, Cut.HALF, rerun)
        if place.state.exists() or not any(place.out.glob("*.parquet")):
            await place.run(again)
        assert read() == whole, at
        if not gone:
            return
    raise AssertionError("the run never came to its end")


@pytest.mark.requirement("X88")
async def test_only_what_failed_or_was_missing_runs_again(place: Place) -> None:
    place.executors.failing |= {2, 5}
    settled = await cut_off_late(place)
    place.called.clear()
    place.executors.failing.clear()
    await place.run(Rerun(resume=True, retry_failed=True))
    assert place.called == Counter([2, 5, *range(settled, ROWS)])
    assert all(result["ok"] for result in place.results)
    assert place.files == ["out.jsonl"]


@pytest.mark.requirement("X88")
async def test_failed_rows_that_run_again_stand_before_rows_that_were_lost(place: Place) -> None:
    """The lost ones are known long before the others have run."""
    place.executors.failing |= {2, 5}
    settled = 0
    for at in range(10, 200):  # until some rows are settled, and others were sent
        place.clear()
        assert await cut_off(place, at, Cut.NOTHING, function="effect")
        notes = read_journal(place.state)
        settled = 0 if notes is None else notes.settled_place[1]
        if settled >= 8 and notes is not None and notes.opened > settled:
            break
    place.executors.failing.clear()
    await place.run(Rerun(resume=True, retry_failed=True), function="effect")
    assert [result["index"] for result in place.results] == list(range(ROWS))
    assert place.results[2]["ok"]
    assert place.results[5]["ok"]
    assert {result["index"] for result in place.results if not result["ok"]} >= {settled}


class SlowToBegin(Disk):
    """The first record of a journal takes until it is let go."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.let_go = threading.Event()

    def replace(self, old: Path, new: Path) -> None:
        self.begun.set()
        self.let_go.wait(30)
        super().replace(old, new)


@pytest.mark.requirement("X88")
async def test_a_run_that_is_cancelled_while_its_journal_is_made_can_go_on(place: Place) -> None:
    """What it kept of the run before stays: the new journal names it."""
    place.executors.failing |= {2, 5}
    await place.run()
    place.executors.failing.clear()
    disk = SlowToBegin()
    running = asyncio.ensure_future(place.run(Rerun(retry_failed=True), disk))
    assert await asyncio.to_thread(disk.begun.wait, 30)
    later = threading.Timer(1.0, disk.let_go.set)
    later.start()
    running.cancel()
    await asyncio.wait({running})
    await asyncio.to_thread(later.join)
    await place.run(Rerun(retry_failed=True, resume=True))
    assert [result["output"] for result in place.results] == [2 * row for row in range(ROWS)]
    assert place.files == ["out.jsonl"]


@pytest.mark.requirement("X88")
async def test_a_run_goes_on_where_begun_rows_cannot_be_noted(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(rows: BegunRows, number: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(BegunRows, "_map_file", full)
    await place.run(function="effect")
    assert place.called == Counter(range(ROWS))
    assert place.files == ["out.jsonl"]


@pytest.mark.requirement("X88")
async def test_of_failed_rows_alone_the_missing_ones_stay_missing(place: Place) -> None:
    place.executors.failing |= {2}
    await cut_off_late(place)
    place.called.clear()
    place.executors.failing.clear()
    await place.run(Rerun(retry_failed=True))
    assert place.called == Counter([2])
    missing = set(range(ROWS)) - {result["index"] for result in place.results}
    assert missing
    assert place.state.exists()
    place.called.clear()
    await place.run(AGAIN)
    assert place.called == Counter(missing)
    assert place.files == ["out.jsonl"]


@pytest.mark.requirement("X87", "X88")
async def test_a_run_that_was_stopped_goes_on(place: Place) -> None:
    summary = await place.run(stop_at=20, batches=ROWS)
    assert summary.stop_reason is not None
    stopped = [result["index"] for result in place.results if not result["ok"]]
    assert stopped
    place.called.clear()
    summary = await place.run(AGAIN)
    assert set(place.called) == set(range(ROWS)) - ({result["index"] for result in place.results} - set(place.called))
    assert [result["output"] for result in place.results] == [2 * row for row in range(ROWS)]
    assert summary.standing + summary.calls == ROWS


@pytest.mark.requirement("X88")
async def test_another_input_or_another_code_is_refused_with_the_reason(place: Place) -> None:
    await cut_off(place, 16, Cut.NOTHING)
    place.write_rows(range(1, ROWS + 1))
    with pytest.raises(UsageError, match=r"cannot be resumed: .*rows.jsonl has .* bytes and had .*--accept-changes"):
        await place.run(AGAIN)
    place.write_rows([0, *range(2, 10), 1, *range(10, ROWS)])
    with pytest.raises(UsageError, match=r"rows.jsonl (has another content|was written to since)"):
        await place.run(AGAIN)
    place.write_rows(range(ROWS))
    with pytest.raises(UsageError, match="option was  and is x"):
        await place.run(AGAIN, shape="x")
    with pytest.raises(UsageError, match="it called safe, not quick"):
        await place.run(AGAIN, function="quick")
    place.write_rows(range(ROWS + 5))
    await place.run(Rerun(resume=True, accept_changes=True))
    assert [result["output"] for result in place.results] == [2 * row for row in range(ROWS + 5)]


@pytest.mark.requirement("X88")
async def test_options_of_several_values_are_the_same_ones_when_a_run_goes_on(place: Place) -> None:
    await place.run(shape=("a", "b"), stop_at=8)
    with pytest.raises(UsageError, match=r"option was a,b and is a\."):
        await place.run(AGAIN, shape=("a",))
    with pytest.raises(UsageError, match="option was a,b and is given"):
        await place.run(AGAIN, shape=True)
    await place.run(AGAIN, shape=("a", "b"))
    assert [result["output"] for result in place.results] == [2 * row for row in range(ROWS)]


@pytest.mark.requirement("X88")
async def test_rows_from_a_named_pipe_all_run(place: Place) -> None:
    """Nobody but the run reads from it: what another reader takes is gone."""
    assert is_stored(place.rows)
    rows = place.rows.read_bytes()
    place.rows.unlink()
    os.mkfifo(place.rows)
    assert not is_stored(place.rows)
    writer = threading.Thread(target=place.rows.write_bytes, args=(rows,), daemon=True)
    writer.start()
    await place.run()
    assert [result["output"] for result in place.results] == [2 * row for row in range(ROWS)]


@pytest.mark.requirement("X88")
async def test_an_output_has_one_journal_and_one_lock_by_all_its_links(place: Place) -> None:
    real = place.out
    link = real.parent / "links" / "there.jsonl"
    link.parent.mkdir()
    link.symlink_to(real)
    place.out = link
    unused = FileRun.prepare(link, FRESH, source=place.rows)
    assert unused is not None
    unused.close()
    assert link.is_symlink(), "what was made for nothing is removed, and not the link to it"
    assert not real.exists()
    await place.run(stop_at=8)
    assert place.files == ["out.jsonl", "out.jsonl.state"]
    assert [file.name for file in link.parent.iterdir()] == ["there.jsonl"]
    held = FileRun.prepare(link, AGAIN, source=place.rows)
    assert held is not None
    with pytest.raises(UsageError, match="another run writes"):
        FileRun.prepare(real, AGAIN, source=place.rows)
    held.close()
    with pytest.raises(UsageError, match=r"out\.jsonl\.state is there"):
        await place.run()
    place.out = real
    with pytest.raises(UsageError, match="has a run that was not finished, which --append would leave so"):
        await place.run(Rerun(existing="append"))
    await place.run(AGAIN)
    assert [result["output"] for result in place.results] == [2 * row for row in range(ROWS)]
    assert place.files == ["out.jsonl"]


@pytest.mark.requirement("X88")
async def test_what_was_added_behind_a_run_that_ended_is_not_lost(place: Place) -> None:
    await place.run(stop_at=8)
    with place.out.open("ab") as file:
        file.write(b'{"mine":1}\n')
    with pytest.raises(UsageError, match="is not as its run left it: 11 bytes were added behind its last result"):
        await place.run(AGAIN)
    assert place.out.read_bytes().endswith(b'{"mine":1}\n')


@pytest.mark.requirement("X88")
async def test_the_code_may_change_when_failed_rows_run_again(place: Place, target: Path) -> None:
    place.executors.failing |= {2}
    await place.run()
    target.write_text("def effect(): return 1\n")
    with pytest.raises(UsageError, match=r"the functions' files have changed.*--retry-failed to go on"):
        await place.run(AGAIN)
    place.executors.failing.clear()
    await place.run(Rerun(resume=True, retry_failed=True))
    assert place.files == ["out.jsonl"]


@pytest.mark.requirement("X88")
async def test_one_run_at_a_time(place: Place) -> None:
    first = FileRun.prepare(place.out, Rerun(), source=place.rows)
    assert first is not None
    with pytest.raises(UsageError, match=r"another run writes .*out.jsonl: wait for its end"):
        FileRun.prepare(place.out, Rerun(existing="overwrite"), source=place.rows)
    first.close()
    assert place.files == []
    await place.run()


@pytest.mark.requirement("X88")
async def test_an_output_that_was_edited_is_not_resumed(place: Place) -> None:
    place.executors.failing |= {2}
    await place.run()
    place.out.write_bytes(place.out.read_bytes().replace(b'"index":7,', b'"index":8,'))
    with pytest.raises(UsageError, match="is not as its run left it: line 9: index 8 after 8"):
        await place.run(AGAIN)


@pytest.mark.requirement("X88")
async def test_an_output_that_is_removed_while_it_is_written_ends_its_run(place: Place) -> None:
    """Its results would be nowhere."""
    place.executors.on_call = lambda row: place.out.unlink(missing_ok=True) if row == 20 else None
    with pytest.raises(OutputError, match=r"out.jsonl was removed while its run wrote it"):
        await place.run()


@pytest.mark.requirement("X88")
async def test_an_output_that_was_cut_is_refused_with_what_it_had(place: Place) -> None:
    await cut_off_late(place)
    place.out.write_bytes(b"")
    with pytest.raises(UsageError, match=r"out.jsonl is not as its run left it: it has 0 bytes, and had \d+"):
        await place.run(AGAIN)


@pytest.mark.requirement("X88")
async def test_what_has_nothing_to_go_on_with(place: Place) -> None:
    await place.run(AGAIN)  # a run that had not begun begins
    assert len(place.results) == ROWS
    with pytest.raises(UsageError, match=r"has no out.jsonl.state, so there is nothing to resume"):
        await place.run(AGAIN)
    with pytest.raises(UsageError, match=r"exists and is not empty: give --force .* there is no out.jsonl.state"):
        await place.run()
    await place.run(Rerun(existing="append"))
    assert [result["index"] for result in place.results] == [*range(ROWS)] * 2
    with pytest.raises(UsageError, match="existing cannot say otherwise"):
        Rerun(existing="append", resume=True)


@pytest.mark.requirement("X88")
async def test_an_appended_run_goes_on_behind_what_was_there(place: Place) -> None:
    await place.run()
    before = place.out.read_bytes()
    await cut_off(place, 14, Cut.HALF, Rerun(existing="append"))
    assert read_journal(place.state) is not None
    with pytest.raises(UsageError, match="has a run that was not finished, which --append would leave so"):
        await place.run(Rerun(existing="append"))
    await place.run(AGAIN)
    assert place.out.read_bytes() == before * 2


@pytest.mark.requirement("X88")
async def test_rows_of_no_file_are_compared_as_they_come(tmp_path: Path, make_worker: MakeWorker) -> None:
    out = tmp_path / "out.jsonl"

    async def run(rows: list[list[int]], rerun: Rerun, disk: Disk = DISK) -> None:
        await run_rows(make_worker, rows, out, rerun, disk)

    rows = [[row] for row in range(2_000)]
    for at in range(20, 1_000, 5):
        with pytest.raises((OSError, UsageError)):
            await run(rows, Rerun(), CutDisk(at))
        notes = read_journal(tmp_path / "out.jsonl.state")
        if notes is not None and notes.rows_digest is not None:
            break
        out.unlink()
        (tmp_path / "out.jsonl.state").unlink(missing_ok=True)
    with pytest.raises(UsageError, match=r"the first [\d,]+ rows of rows are not those that the run began with"):
        await run([[5], *rows[1:]], AGAIN)
    await run(rows, AGAIN)
    assert [msgspec.json.decode(line)["output"] for line in out.read_bytes().splitlines()] == [
        2 * row for row in range(2_000)
    ]


@pytest.mark.requirement("X88")
async def test_a_few_rows_of_no_file_are_compared_too(tmp_path: Path, make_worker: MakeWorker) -> None:
    out = tmp_path / "out.jsonl"
    rows = [[0], [7], [2]]
    await run_rows(make_worker, rows, out, Rerun(), failing=[7])
    before = out.read_bytes()
    with pytest.raises(UsageError, match="the first 3 rows of rows are not those that the run began with"):
        await run_rows(make_worker, [[5], *rows[1:]], out, AGAIN)
    with pytest.raises(UsageError, match="rows has 2 rows, fewer than those that the run began with"):
        await run_rows(make_worker, rows[:2], out, AGAIN)
    assert out.read_bytes() == before
    with pytest.raises(UsageError, match="the first 3 rows"):
        await run_rows(make_worker, [[5], *rows[1:]], out, Rerun(retry_failed=True), failing=[7])  # row 1 has run again
    await run_rows(make_worker, [*rows, [3]], out, AGAIN, failing=[7])  # more of them may have come
    assert [msgspec.json.decode(line)["ok"] for line in out.read_bytes().splitlines()] == [True, False, True, True]


async def run_rows(
    make_worker: MakeWorker,
    rows: Iterable[object],
    out: Path,
    rerun: Rerun,
    disk: Disk = DISK,
    failing: Iterable[int] = (),
) -> None:
    from callyard.worker.builders import open_rows

    executors = Executors()
    executors.failing = set(failing)

    file_run = FileRun.prepare(out, rerun, disk=disk)
    assert file_run is not None
    try:
        async with make_worker(executors, batch_rows=64) as worker:
            source, sink = await file_run.begin(worker, open_rows(rows), "safe", {})
            await worker.run("safe", source, sink, file_run=file_run)
    finally:
        file_run.close()


async def test_the_seed_of_hashes_is_kept(place: Place) -> None:
    first = FileRun.prepare(place.out, Rerun())
    second = FileRun.prepare(place.out.with_name("other.jsonl"), Rerun())
    assert first is not None
    assert second is not None
    assert first.environment != second.environment
    first.close()
    second.close()
    await cut_off(place, 14, Cut.NOTHING)
    notes = read_journal(place.state)
    assert notes is not None
    resumed = FileRun.prepare(place.out, AGAIN, source=place.rows)
    assert resumed is not None
    assert resumed.environment == {"PYTHONHASHSEED": str(notes.run.hash_seed)}
    resumed.close()
