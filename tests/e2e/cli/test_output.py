"""Where results go: files that must not be lost, disks that are full, readers that go away."""

from __future__ import annotations

import os
import resource
import subprocess
from pathlib import Path

import pytest

from tests.e2e.cli.shell import CALLYARD, ENVIRONMENT, TARGET, TIMEOUT_S, finish, parse_lines, run, started
from tests.e2e.processes import wait_until

DOUBLE = f"{TARGET}:double"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("[1]\n[2]\n")
    return path


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("nowhere/out.jsonl", "there is no folder nowhere for out.jsonl: make it first"),
        ("full.jsonl", "full.jsonl exists and is not empty: give --force to replace it, --append to add to it, or"),
        ("rows.jsonl", "rows.jsonl is the input too: write to another file"),
        ("symlink.jsonl", "symlink.jsonl is the input too"),
        ("hardlink.jsonl", "hardlink.jsonl is the input too"),
    ],
)
def test_an_output_that_must_not_be_written(tmp_path: Path, rows: Path, output: str, message: str) -> None:
    (tmp_path / "full.jsonl").write_text("precious\n")
    (tmp_path / "symlink.jsonl").symlink_to(rows)
    (tmp_path / "hardlink.jsonl").hardlink_to(rows)
    words = [] if output == "full.jsonl" else ["--force"]
    done = run("run", DOUBLE, "rows.jsonl", "-o", output, *words, cwd=tmp_path)
    assert done.status == 2
    assert message in done.err
    assert "Traceback" not in done.err
    assert rows.read_text() == "[1]\n[2]\n"
    assert (tmp_path / "full.jsonl").read_text() == "precious\n"


def test_the_input_by_way_of_standard_input_is_not_written_either(tmp_path: Path, rows: Path) -> None:
    with rows.open() as stdin, started("run", DOUBLE, "-", "-o", rows, "--append", stdin=stdin) as process:
        done = finish(process)
    assert (done.status, rows.read_text()) == (2, "[1]\n[2]\n")
    assert "is the input too" in done.err


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_folder_that_forbids_writing(tmp_path: Path, rows: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o555)
    done = run("run", DOUBLE, rows, "-o", folder / "out.jsonl")
    assert done.status == 2
    assert "Permission denied" in done.err


def test_force_replaces_and_append_adds_whole_lines(tmp_path: Path, rows: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text('{"index":0,"ok":true,"output":7}\n{"index":1,"ok":tr')  # cut off by a kill
    assert run("run", DOUBLE, rows, "-o", out, "--append").status == 0
    assert [result["output"] for result in parse_lines(out.read_text())] == [7, 2, 4]
    assert run("run", DOUBLE, rows, "-o", out, "--force").status == 0
    assert [result["output"] for result in parse_lines(out.read_text())] == [2, 4]
    both = run("run", DOUBLE, rows, "-o", out, "--force", "--append")
    assert (both.status, both.err) == (2, "error: --force and --append exclude each other: give one of them\n")


@pytest.mark.parametrize("target", ["broken.py:double", f"{TARGET}:duoble"])
def test_a_command_that_cannot_start_leaves_the_old_output(tmp_path: Path, rows: Path, target: str) -> None:
    (tmp_path / "broken.py").write_text("def double(x):\n")
    out = tmp_path / "out.jsonl"
    out.write_text("precious\n")
    done = run("run", target, rows, "-o", out, "--force", cwd=tmp_path)
    assert (done.status, out.read_text()) == (2, "precious\n")


def test_a_full_disk_is_said() -> None:
    done = run("run", DOUBLE, "-", "-o", "/dev/full", stdin="[1]\n")
    assert done.status == 2
    assert "error: cannot write /dev/full: No space left on device; it holds 0 results" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("words", [["call", DOUBLE, "x=2"], ["list", str(TARGET)]])
def test_a_full_standard_output_is_said(words: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = run(*words, stdout=full, stderr=subprocess.PIPE)
    assert (done.status, done.err) == (2, "error: cannot write standard output: No space left on device\n")


@pytest.mark.parametrize("words", [["run", DOUBLE, "-"], ["call", DOUBLE, "x=2"], ["list", str(TARGET)]])
def test_a_closed_standard_output_is_said(words: list[str]) -> None:
    done = run(*words, preexec_fn=lambda: os.close(1))
    assert done.status == 2
    assert done.err.startswith("error: standard output is closed")


def test_a_disk_that_fills_up_leaves_whole_lines(tmp_path: Path) -> None:
    """A limit on the file's size, which fails a write in the middle, as a full disk does."""
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows.write_text("".join(f"[{x}]\n" for x in range(20_000)))
    limit = 400_001
    done = run(
        "run", DOUBLE, rows, "-o", out, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    )
    assert done.status == 2
    results = parse_lines(out.read_text())
    assert out.stat().st_size <= limit
    assert [(result["index"], result["output"]) for result in results] == [(x, 2 * x) for x in range(len(results))]
    assert f"error: cannot write {out}: File too large; it holds {len(results)} results, each line whole" in done.err


def test_a_reader_that_has_seen_enough_ends_the_run_quietly(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f"[{x}]\n" for x in range(200_000)))
    with started("run", DOUBLE, rows) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == '{"index":0,"ok":true,"output":0}\n'
        process.stdout.close()
        assert process.wait(TIMEOUT_S) == 0
        assert process.stderr is not None
        assert process.stderr.read() == "1 executor, no budget unless the function names one\n"


def test_nobody_reads_the_messages(tmp_path: Path, rows: Path) -> None:
    """The work goes on, and the exit status tells."""
    out = tmp_path / "out.jsonl"
    with started("run", f"{TARGET}:say", "-", "-o", out) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stderr.close()
        for x in range(3):
            process.stdin.write(f'["{x}"]\n')
            process.stdin.flush()
            wait_until(lambda x=x: out.exists() and out.read_bytes().count(b"\n") == x + 1, "the result")  # type: ignore[misc]
        process.stdin.close()
        assert process.wait(TIMEOUT_S) == 0


def test_closed_streams_do_not_become_sockets(tmp_path: Path, rows: Path) -> None:
    out = tmp_path / "out.jsonl"
    status = subprocess.run(
        [CALLYARD, "run", DOUBLE, rows, "-o", out],
        env=ENVIRONMENT,
        preexec_fn=lambda: [os.close(fd) for fd in range(3)],
        timeout=TIMEOUT_S,
        check=False,
    ).returncode
    assert status == 0
    assert [result["output"] for result in parse_lines(out.read_text())] == [2, 4]
