"""What calls print, log and tell of their progress, as `run` and `call` show it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.e2e.cli.shell import TARGET, TIMEOUT_S, Terminal, parse_lines, run, started, wait_for_file
from tests.e2e.processes import wait_until

LOGGED_OF_1 = ["warning: fuel low row=1", "debug: fine detail", "warning: by logging"]
TAIL_OF_1 = [*(f"line {number} of 1" for number in range(13, 30)), *LOGGED_OF_1]
"""Of 30 lines printed and three records, in their order."""


@pytest.mark.requirement("X58")
@pytest.mark.requirement("X59")
def test_a_run_shows_the_last_lines_beside_the_failure_and_each_line_once(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    done = run("run", f"{TARGET}:tell", "-", "-o", out, stdin="[0]\n[1]\n[2]\n[3]\n")
    assert done.status == 1
    live, summary = done.err.split("4 calls: 2 ok, 2 failed")
    example = summary.splitlines().index("  2 internal: the function raised") + 1
    assert summary.splitlines()[example].startswith("      2 such as call 1, line 2: ValueError: 1 is odd (")
    assert summary.splitlines()[example + 1 : example + 21] == [f"        | {line}" for line in TAIL_OF_1]
    assert summary.count(" | ") == 20, "one example for each kind"
    lines = live.splitlines()
    for x in range(4):
        assert lines.count(f"exec-1 | line 29 of {x}") == 1
        assert lines.count(f"call {x} | warning: fuel low row={x}") == 1
        assert lines.count(f"call {x} | warning: by logging") == 1
    assert sum("by logging" in line for line in lines) == 4, "as an event, and not again by its handler"
    assert "fine detail" not in live, "below --log-level"
    assert not any("printed" in result for result in parse_lines(out.read_text()))


@pytest.mark.requirement("X58")
@pytest.mark.parametrize("quiet", [True, False])
def test_with_output_adds_what_a_call_printed_to_every_result(quiet: bool) -> None:
    words = ["run", f"{TARGET}:tell", "-", "--with-output", *(["--quiet"] if quiet else [])]
    done = run(*words, stdin="[1]\n[2]\n")
    failed, other = done.results
    assert (failed["ok"], other["ok"]) == (False, True)
    assert failed["printed"].splitlines() == [*(f"line {number} of 1" for number in range(30)), *LOGGED_OF_1]
    assert other["printed"] == failed["printed"].replace("of 1", "of 2").replace("row=1", "row=2")
    assert "cut_bytes" not in failed
    assert ("fuel low" in done.err) is not quiet


@pytest.mark.requirement("X58")
@pytest.mark.requirement("X59")
def test_call_shows_each_line_once_and_those_below_the_level_when_it_failed() -> None:
    done = run("call", f"{TARGET}:tell", "x=1")
    assert (done.status, done.out) == (1, "")
    lines = done.err.splitlines()
    printed = [line for line in lines if line.startswith("exec-1 | ")]
    assert printed == [f"exec-1 | line {number} of 1" for number in range(30)]
    assert lines.count("warning: fuel low row=1") == lines.count("warning: by logging") == 1
    assert lines.count("debug: fine detail") == 1
    assert lines.index("debug: fine detail") < lines.index("Traceback (most recent call last):")
    assert lines[-1] == "internal (the function raised): ValueError: 1 is odd"


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("debug", ["warning: fuel low row=2", "debug: fine detail", "warning: by logging"]),
        ("info", ["warning: fuel low row=2", "warning: by logging"]),
        ("error", []),
    ],
)
def test_the_log_level_is_one_for_log_and_logging(level: str, shown: list[str]) -> None:
    done = run("call", f"{TARGET}:tell", "x=2", "--log-level", level)
    assert (done.status, done.out) == (0, "2\n")
    assert [line for line in done.err.splitlines() if not line.startswith("exec-1 | line ")] == shown


def test_options_that_are_none_of_the_choices(tmp_path: Path) -> None:
    level = run("call", f"{TARGET}:tell", "x=2", "--log-level", "loud")
    cache = run("run", f"{TARGET}:tell", "-", "--cache", "some")
    assert (level.status, cache.status) == (2, 2)
    assert "expected one of debug, info, warning, error, critical, got 'loud'" in _flat(level.err)
    assert "expected one of promised, all, off, got 'some'" in _flat(cache.err)


def _flat(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


@pytest.mark.requirement("X59")
def test_the_progress_of_the_longest_call_stands_below_the_bar(tmp_path: Path) -> None:
    rows, out, go = tmp_path / "rows.jsonl", tmp_path / "out.jsonl", tmp_path / "go"
    rows.write_text("".join(f'[{total}, "{go}"]\n' for total in (1000, 4)))
    terminal = Terminal(["run", f"{TARGET}:count_to", rows, "-o", out])
    wait_until(lambda: "call 0: 500 of 1,000 (50%), counting up" in terminal.raw, "its progress")
    wait_until(lambda: terminal.raw.count("so much is done") == 2, "what they printed")
    go.touch()
    assert terminal.wait() == 0
    lines = terminal.lines
    assert not any("━" in line or "counting" in line for line in lines), "gone in the end"
    assert sorted(line for line in lines if " | " in line) == [
        "call 0 | info: half of it",
        "call 1 | info: half of it",
        "exec-1 | so much is done",
        "exec-1 | so much is done",
    ]
    assert "call 1: " not in terminal.raw, "one call only, the one that runs longest"


@pytest.mark.requirement("X59")
def test_call_has_a_bar_on_a_terminal_only(tmp_path: Path) -> None:
    go = tmp_path / "go"
    words = ["call", f"{TARGET}:count_to", "total=1000", f"path={go}"]
    terminal = Terminal(words)
    wait_until(lambda: "500 of 1,000 (50%), counting up" in terminal.raw, "its progress")
    wait_until(lambda: "so much is done" in terminal.raw, "what it printed")
    go.touch()
    assert terminal.wait() == 0
    assert "━" in terminal.raw
    assert sorted(line for line in terminal.lines if line) == ["1000", "exec-1 | so much is done", "info: half of it"]
    elsewhere = run(*words)
    assert (elsewhere.status, elsewhere.out) == (0, "1000\n")
    assert sorted(elsewhere.err.splitlines()) == ["exec-1 | so much is done", "info: half of it"]


@pytest.mark.requirement("X79")
def test_a_flood_delays_nobody_and_grows_nothing(tmp_path: Path) -> None:
    """On the one executor where the flood comes from, with the others' calls sent while it floods."""
    out, begun, dam = tmp_path / "out.jsonl", tmp_path / "begun", tmp_path / "dam"
    calls: list[tuple[str, list[int | str]]] = [("double", [0]), ("flood", [str(begun), str(dam)])]
    calls += [("double", [x]) for x in range(200)]
    lines = [json.dumps({"function": name, "args": args}) + "\n" for name, args in calls]
    with started("run", TARGET, "-", "-o", out, "--with-output", stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write("".join(lines[:2]))
        process.stdin.flush()
        wait_for_file(begun)
        before = _peak_kb(process.pid)
        process.stdin.write("".join(lines[2:]))
        process.stdin.close()
        counts = ""
        while "201 ok" not in counts:  # a plain line of counts: all but the flood have ended
            line = process.stderr.readline()
            assert line, "it ended"
            counts = line if "flood" not in line else counts
        assert "load 1" in counts, "the flood goes on"
        after = _peak_kb(process.pid)
        dam.touch()
        while process.stderr.readline():
            pass
        assert process.wait(TIMEOUT_S) == 1
    results = parse_lines(out.read_text())
    assert [result["index"] for result in results if not result["ok"]] == [1]
    assert len(results) == len(calls)
    assert len(results[1]["printed"]) <= 64 * 1024
    assert results[1]["cut_bytes"] > 0
    assert after - before < 64 * 1024, "kB"


def _peak_kb(pid: int) -> int:
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1])


@pytest.mark.requirement("X42")
def test_io_of_a_settings_file(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/a.txt").write_text("hello")
    settings = tmp_path / "yard.toml"
    settings.write_text('[worker]\nmax_restarts = 1\n[io.files]\nnotes = "notes"\n')
    called = run("call", f"{TARGET}:read_note", "name=notes/a.txt", "--io", settings)
    assert (called.status, called.out) == (0, '"hello"\n')
    listed = run("run", f"{TARGET}:read_note", "-", "--io", settings, stdin='["notes/a.txt"]\n')
    assert [result["output"] for result in listed.results] == ["hello"]
    without = run("call", f"{TARGET}:read_note", "name=notes/a.txt")
    assert without.status == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read {path}: No such file or directory"),
        ("[io", "{path} is no TOML: "),
        ("", "{path}: expected a table [io], such as [io.files] with a line data = '/srv/data'"),
        ("[http]\n", "{path}:1: no setting 'http'; there are: worker, pools, io, serve"),
        ("[io]\nspeed = 1\n", "{path}:1: io.speed: no such setting; there are http, files, sql, jsonrpc"),
    ],
)
def test_a_settings_file_that_is_none(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "yard.toml"
    if text is not None:
        path.write_text(text)
    done = run("call", f"{TARGET}:double", "x=1", "--io", path)
    assert (done.status, done.out) == (2, "")
    assert message.format(path=path) in done.err


@pytest.mark.requirement("X15")
@pytest.mark.parametrize(
    ("function", "cache", "times"),
    [("runs_if_pure", None, 1), ("runs", None, 3), ("runs", "all", 1), ("runs_if_pure", "off", 3)],
)
def test_the_cache(tmp_path: Path, function: str, cache: str | None, times: int) -> None:
    noted = tmp_path / "noted"
    words = [] if cache is None else ["--cache", cache]
    done = run("run", f"{TARGET}:{function}", "-", *words, stdin=json.dumps([str(noted)]) + "\n" + f'["{noted}"]\n' * 2)
    assert sorted(result["output"] for result in done.results) == list(range(1, times + 1)) * (3 // times)
    assert noted.read_bytes().count(b"\n") == times
