"""What a run shows on a terminal, and elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.cli.shell import ENVIRONMENT, TARGET, Terminal, finish, parse_lines, run, wait_for_file
from tests.e2e.processes import wait_until

HURRIED = """
import callyard.cli.progress as progress
progress.SLOW_NOTE_MS, progress.LINE_INTERVAL_MS = 300, 100
from callyard.cli import main
main()
"""
"""The command with shorter intervals: nobody waits half a minute in a test."""


@pytest.mark.requirement("X89")
def test_a_call_that_never_ends_is_named(tmp_path: Path) -> None:
    begun, other = tmp_path / "begun", tmp_path / "go"
    rows = tmp_path / "rows.jsonl"
    rows.write_text((json.dumps([str(begun), str(other)]) + "\n") * 3)
    command = [sys.executable, "-c", HURRIED, "run", f"{TARGET}:until_file", str(rows)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        try:
            assert process.stderr is not None
            seen = []
            while not seen or "no call has ended" not in seen[-1]:
                seen.append(process.stderr.readline())
                assert seen[-1], seen
            wait_for_file(begun, lines=3)
            while "3 of until_file run" not in seen[-1]:
                seen.append(process.stderr.readline())
                assert seen[-1], seen
            other.touch()
            done = finish(process)
        finally:
            process.kill()
    assert done.status == 0
    assert "; the longest is call 0 (until_file, exec-1). --budget 30s would end such calls" in seen[-1]
    assert any("0 ok" in line and "load 3" in line for line in seen), "plain lines elsewhere than on a terminal"
    assert "\x1b" not in "".join(seen)


def test_the_bar_and_the_lines_of_functions_do_not_tear_each_other(tmp_path: Path) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    begun, other = tmp_path / "begun", tmp_path / "go"
    words = [f"number {x} " + "long " * 30 for x in range(50)]
    calls = [{"function": "say", "args": [text]} for text in words]
    calls.append({"function": "until_file", "args": [str(begun), str(other)]})
    rows.write_text("".join(json.dumps(call) + "\n" for call in calls))
    terminal = Terminal(["run", TARGET, rows, "-o", out])
    wait_until(lambda: "50 ok" in terminal.raw, "the bar shows the finished calls")
    wait_until(lambda: terminal.raw.count("says number") == 50, "what they printed")
    other.touch()
    assert terminal.wait() == 0
    lines = terminal.lines
    assert lines[0].startswith("1 executor, no budget unless the function names one; each row names its function: ")
    said = [line for line in lines if "says" in line]
    assert sorted(said) == sorted(f"exec-1 | says {text}".rstrip() for text in words)
    assert "━" in terminal.raw
    assert "load 1" in terminal.raw
    assert not any("━" in line for line in lines), "the bar is gone in the end"
    assert lines[-2].startswith("51 calls: 51 ok, 0 failed in ")
    assert "\x1b[?25l" not in terminal.raw, "the cursor is never hidden"
    assert len(parse_lines(out.read_text())) == 51


def test_results_on_the_terminal_are_whole_lines_without_a_bar(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f"[{x}]\n" for x in range(1, 300)))
    terminal = Terminal(["run", f"{TARGET}:third", rows], columns=60)
    assert terminal.wait() == 1
    results = [json.loads(line) for line in terminal.lines if line.startswith("{")]
    assert [result["index"] for result in results] == list(range(299))
    assert "━" not in terminal.raw


@pytest.mark.parametrize("to_file", [True, False])
def test_a_bar_only_where_nothing_else_is_printed(tmp_path: Path, to_file: bool) -> None:
    """Results in a pipe may end on this very terminal: plain lines there."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("[1]\n")
    words = ["run", f"{TARGET}:double", rows]
    if to_file:
        with (tmp_path / "out.jsonl").open("wb") as stdout:
            terminal = Terminal(words, stdout=stdout)
            assert terminal.wait() == 0
    else:
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
            terminal = Terminal(words, stdout=reader.stdin)
            assert terminal.wait() == 0
            out, _ = reader.communicate()
        assert json.loads(out) == {"index": 0, "ok": True, "output": 2}
    assert ("━" in terminal.raw) == to_file


def test_a_dumb_terminal_and_a_forced_colour_get_no_bar(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("[1]\n")
    terminal = Terminal(["run", f"{TARGET}:double", rows, "-o", tmp_path / "out.jsonl"], TERM="dumb")
    assert terminal.wait() == 0
    assert "\x1b" not in terminal.raw
    forced = run("run", f"{TARGET}:double", rows, "-o", tmp_path / "other.jsonl", env={"FORCE_COLOR": "1"})
    assert "1 call: 1 ok" in forced.err
    assert "━" not in forced.err


def test_failures_that_are_alike_are_one_line(tmp_path: Path) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows.write_text("".join(f'[{x}, "n{x}"]\n' for x in range(1, 301)) + '["four"]\n')
    done = run("run", f"{TARGET}:third", rows, "-o", out)
    assert done.status == 1
    start, summary, internal, alike, schema, other, hint, again = done.err.splitlines()
    assert start == "1 executor, no budget unless the function names one"
    assert summary.startswith("301 calls: 200 ok, 101 failed in ")
    assert "worker's peak memory" in summary
    assert internal == "  100 internal: the function raised"
    assert alike.startswith("      100 such as call 2, line 3: ValueError: 3 of 'n3' is divisible by 3 (")
    assert schema == "  1 schema: arguments do not fit the function"
    assert other == '      call 300, line 301: /0: expected an integer, got text ("four")'
    assert hint == f"all of them: grep '\"ok\":false' {out}"
    assert again == f"run again what failed: callyard run {TARGET}:third {rows} -o {out} --retry-failed"


def test_quiet_says_nothing_but_errors() -> None:
    done = run("run", f"{TARGET}:third", "-", "--quiet", stdin="[1]\n[3]\n")
    assert (done.status, done.err) == (1, "")
    assert [result["ok"] for result in done.results] == [True, False]
