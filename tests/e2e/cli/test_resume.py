"""Runs that are killed, stopped, changed, and go on."""

from __future__ import annotations

import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from callyard.worker.journal import read_journal
from tests.e2e.cli.shell import ENVIRONMENT, Done, finish, parse_lines, run, started, wait_for_file
from tests.e2e.processes import wait_until

ROWS = 600
EXECUTORS = {"CALLYARD_EXECUTOR_COUNT": "2"}


class Runs:
    """A folder with a target and a call list."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "out.jsonl"
        self.state = folder / "out.jsonl.state"
        shutil.copy(Path(__file__).with_name("resumed_file.py"), folder / "f.py")
        (folder / "rows.jsonl").write_text("".join(f"[{row}]\n" for row in range(ROWS)))

    def words(self, function: str, *more: str) -> list[str]:
        return ["run", f"f.py:{function}", "rows.jsonl", "-o", "out.jsonl", *more]

    def run(self, function: str, *more: str) -> Done:
        return run(*self.words(function, *more), cwd=self.folder, env=EXECUTORS)

    def kill_when(self, condition: Callable[[], bool], function: str, *more: str) -> None:
        """Run, and kill -9 once that is so, or it has ended."""
        with started(*self.words(function, *more), cwd=self.folder, env=EXECUTORS) as process:
            wait_until(lambda: condition() or process.poll() is not None, "the moment to kill it")
            process.send_signal(signal.SIGKILL)
            finish(process)

    def open(self, *gates: str) -> None:
        """Let rows go on that wait for these."""
        for gate in gates:
            (self.folder / gate).touch()

    @property
    def settled(self) -> int:
        """Rows whose results are on disk, as the journal says."""
        notes = read_journal(self.state)
        return 0 if notes is None else notes.settled_place[1]

    def count(self, name: str) -> int:
        try:
            return (self.folder / name).read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def noted(self, name: str) -> Counter[int]:
        path = self.folder / name
        return Counter(map(int, path.read_text().split())) if path.exists() else Counter()

    @property
    def results(self) -> list[dict[str, Any]]:
        return parse_lines(self.out.read_text())

    @property
    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("out.jsonl*"))


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def kinds(results: Sequence[dict[str, Any]]) -> Counter[str]:
    return Counter("ok" if result["ok"] else result["error"]["kind"] for result in results)


@pytest.mark.requirement("X88", "X62")
@pytest.mark.parametrize("seed", range(3))
def test_killed_at_random_and_resumed_nothing_runs_twice(runs: Runs, seed: int) -> None:
    """Begun and without a result: `crashed`. Not begun: run. Whatever else starts on the machine meanwhile."""
    rng = random.Random(seed)
    moments = sorted(rng.sample(range(20, ROWS), 2))
    print("killed when so many had begun:", moments)
    for begun in moments:
        more = ["--resume"] if runs.state.exists() else []
        runs.kill_when(lambda: runs.count("effects") >= begun, "effect", *more)  # noqa: B023
    assert run("list", "f.py", cwd=runs.folder).status == 0  # it clears up behind workers that are gone
    if runs.state.exists():
        done = runs.run("effect", "--resume")
        assert done.status == 1, done.err
    assert [result["index"] for result in runs.results] == list(range(ROWS))
    effects = runs.noted("effects")
    assert max(effects.values()) == 1
    for result in runs.results:
        row = result["index"]
        if not result["ok"] and result["error"]["kind"] == "crashed":
            assert result["error"]["outcome"] == "unknown"
        else:
            assert effects[row] == 1
            assert result["ok"] is (row % 50 != 7)
    assert kinds(runs.results)["crashed"] < ROWS  # not simply all of them


@pytest.mark.requirement("X88")
def test_killed_with_promises_it_has_the_bytes_of_a_run_that_was_not(runs: Runs) -> None:
    """The sets, the walks through them and the messages too: one seed of hashes, no addresses."""
    for rows, gate in ((90, "first"), (250, "second"), (400, "mended")):
        runs.kill_when(lambda: runs.settled >= rows, "words", *(["--resume"] if runs.state.exists() else []))  # noqa: B023
        assert rows <= runs.settled < rows + 80
        runs.open(gate)
    notes = read_journal(runs.state)
    assert notes is not None
    assert notes.run.generation == 3
    assert runs.run("words", "--resume").status == 1
    out = runs.out.read_bytes()
    seed = {"PYTHONHASHSEED": str(notes.run.hash_seed)}
    whole = run(*runs.words("words", "--force"), cwd=runs.folder, env={**EXECUTORS, **seed})
    assert whole.status == 1
    assert runs.out.read_bytes() == out
    assert b"no <object object at 0x\xe2\x80\xa6>" in out


@pytest.mark.requirement("X88")
def test_killed_late_mended_and_only_what_failed_or_was_missing_runs(runs: Runs) -> None:
    """A command line that was not prepared for it, and the same one with two more words."""
    runs.open("first", "second")
    runs.kill_when(lambda: runs.settled >= 400, "words")
    settled = runs.settled
    assert 400 <= settled <= 480
    runs.open("mended")
    failed = {result["index"] for result in runs.results[:settled] if not result["ok"]}
    assert failed
    (runs.folder / "effects").unlink()
    text = (runs.folder / "f.py").read_text()
    (runs.folder / "f.py").write_text(text.replace("x % 50 == 7", "x < 0"))
    refused = runs.run("words", "--resume")
    assert refused.status == 2
    assert (
        "out.jsonl cannot be resumed: the functions' files have changed. Give --accept-changes or, after" in refused.err
    )
    done = runs.run("words", "--resume", "--retry-failed")
    assert done.status == 0, done.err
    assert runs.noted("effects") == Counter([*failed, *range(settled, ROWS)])
    assert kinds(runs.results) == {"ok": ROWS}
    assert runs.files == ["out.jsonl"]
    assert f"{settled - len(failed):,} results there stay, {len(failed)} failed rows run again" in done.err


@pytest.mark.requirement("X88", "X64")
def test_a_promise_does_not_cover_what_a_subcall_has_done(runs: Runs) -> None:
    runs.kill_when(lambda: runs.count("charged") >= ROWS // 2, "order")
    charges = runs.noted("charges")
    runs.open("mended")
    done = runs.run("order", "--resume")
    assert done.status == 1, done.err
    assert max(runs.noted("charges").values()) == 1
    lost = {result["index"] for result in runs.results if not result["ok"]}
    assert 30 in lost
    assert lost <= set(charges) | set(runs.noted("orders"))
    assert runs.noted("charges").keys() >= set(range(ROWS)) - lost


@pytest.mark.requirement("X87", "X88")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_it_so_that_it_goes_on(runs: Runs, number: int, status: int) -> None:
    with started(*runs.words("effect"), cwd=runs.folder, env=EXECUTORS) as process:
        wait_until(lambda: runs.count("effects") >= 60, "60 calls begun")
        process.send_signal(number)
        done = finish(process)
    assert done.status == status
    assert "cancelled" in kinds(runs.results)
    line = re.search(r"^go on with it: callyard (run .* --resume)$", done.err, re.M)
    assert line, done.err
    done = run(*shlex.split(line[1]), cwd=runs.folder, env=EXECUTORS)
    assert done.status == 1
    assert set(kinds(runs.results)) == {"ok", "internal"}
    assert runs.noted("effects") == Counter(range(ROWS))
    again = run(*shlex.split(line[1]), cwd=runs.folder, env=EXECUTORS)
    assert again.status == 1
    assert f"{ROWS:,} results there stay, {kinds(runs.results)['internal']:,} of them failed" in again.err
    runs.open("mended")
    line = re.search(r"^run again what failed: callyard (run .* --retry-failed)$", done.err, re.M)
    assert line, done.err
    done = run(*shlex.split(line[1]), cwd=runs.folder, env=EXECUTORS)
    assert (done.status, kinds(runs.results), runs.files) == (0, {"ok": ROWS}, ["out.jsonl"])


@pytest.mark.requirement("X88")
def test_an_output_goes_on_from_another_folder(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> None:
    runs.kill_when(lambda: runs.settled >= 90, "words")
    runs.open("first", "second", "mended")
    other = tmp_path_factory.mktemp("other")
    for path in runs.folder.iterdir():
        shutil.move(path, other / path.name)
    done = run(
        *("run", other / "f.py:words", other / "rows.jsonl", "-o", other / "out.jsonl", "--resume"),
        cwd=other,
        env=EXECUTORS,
    )
    assert done.status == 1, done.err
    assert len(parse_lines((other / "out.jsonl").read_text())) == ROWS


@pytest.mark.requirement("X88")
def test_a_second_run_to_the_same_output_is_refused(runs: Runs) -> None:
    with started(*runs.words("order"), cwd=runs.folder, env=EXECUTORS) as process:
        wait_for_file(runs.folder / "orders")
        second = runs.run("order", "--force")
        process.kill()
        finish(process)
    assert (second.status, second.out) == (2, "")
    assert second.err == "error: another run writes out.jsonl: wait for its end, or write to another output\n"


@pytest.mark.requirement("X88")
def test_words_that_exclude_each_other(runs: Runs) -> None:
    for word in ("--resume", "--retry-failed"):
        done = runs.run("effect", "--force", word)
        assert (done.status, done.err) == (2, f"error: --force and {word} exclude each other: give one of them\n")


@pytest.mark.requirement("X88")
def test_parquet_goes_on_behind_its_last_part(runs: Runs) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    script = runs.folder / "small.py"  # small parts, so that some are whole at the kill
    script.write_text(
        "from callyard.worker import parquet_output\nparquet_output.PART_ROWS = 50\n"
        "from callyard.cli import main\nmain()\n"
    )
    words = ["run", "f.py:words", "rows.jsonl", "-o", "out.parquet", "--with-args"]
    runs.open("first")

    def start(*more: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, script, *words, *more],
            cwd=runs.folder,
            env={**ENVIRONMENT, **EXECUTORS},
            stderr=subprocess.PIPE,
        )

    with start() as process:
        wait_until(lambda: len(list(runs.folder.glob("out.parquet/part-*"))) >= 3, "three parts")
        process.kill()
    runs.open("second", "mended")
    parts = {path.name: path.read_bytes() for path in runs.folder.glob("out.parquet/part-*")}
    with start("--resume") as process:
        _, err = process.communicate(timeout=90)
    assert process.returncode == 1, err
    table = parquet.read_table(runs.folder / "out.parquet")
    assert table.column("index").to_pylist() == list(range(ROWS))
    first = sorted(parts)[0]
    assert (runs.folder / "out.parquet" / first).read_bytes() == parts[first]
    text = (runs.folder / "f.py").read_text()
    (runs.folder / "f.py").write_text(text.replace("x % 50 == 7", "x < 0"))
    (runs.folder / "effects").unlink()
    with start("--retry-failed") as process:
        _, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    again = parquet.read_table(runs.folder / "out.parquet")
    assert again.column("index").to_pylist() == list(range(ROWS))
    assert all(again.column("ok").to_pylist())
    assert runs.noted("effects") == Counter(range(7, ROWS, 50))
    before = table.to_pylist()
    assert [row for row in again.to_pylist() if row["index"] % 50 != 7] == [row for row in before if row["ok"]]
    assert not os.path.exists(runs.folder / "out.parquet.state")


@pytest.mark.requirement("X88")
def test_from_python_it_goes_on_too(runs: Runs) -> None:
    """What the command began and was killed in."""
    runs.kill_when(lambda: runs.settled >= 90, "words")
    runs.open("first", "second", "mended")
    (runs.folder / "go_on.py").write_text(
        "import callyard\n"
        "if __name__ == '__main__':\n"
        "    done = callyard.run('f.py:words', 'rows.jsonl', 'out.jsonl', executors=2, resume=True)\n"
        "    print(done.standing, done.calls, done.failed)\n"
    )
    settled = runs.settled
    done = subprocess.run(
        [sys.executable, "go_on.py"], cwd=runs.folder, capture_output=True, text=True, timeout=90, check=False
    )
    failed = sum(row % 50 == 7 for row in range(settled, ROWS))
    assert done.stdout == f"{settled} {ROWS - settled} {failed}\n", done.stderr
    assert [result["index"] for result in runs.results] == list(range(ROWS))
