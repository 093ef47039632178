"""Ctrl-C, SIGTERM, a closed terminal, kill -9: what was finished is kept, and no process is left."""

from __future__ import annotations

import array
import fcntl
import gzip
import json
import os
import select
import signal
import subprocess
import sys
import termios
from collections import deque
from pathlib import Path
from typing import IO, Any

import pytest

from tests.e2e.cli.shell import (
    TARGET,
    TIMEOUT_S,
    Terminal,
    executors_of,
    finish,
    nothing_left,
    parse_lines,
    run,
    started,
    wait_for_file,
)
from tests.e2e.processes import children_of, kill, wait_gone, wait_until

SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


def write_rows(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.requirement("X87")
@pytest.mark.requirement("X44")
@pytest.mark.parametrize("how", ["block", "spin", "swallow", "async"])
def test_two_presses_stop_whatever_runs(tmp_path: Path, how: str) -> None:
    """A call that sleeps, blocks, computes, or catches every exception; the finished ones before it are kept."""
    begun, out = tmp_path / "begun", tmp_path / "out.jsonl"
    rows = write_rows(tmp_path / "rows.jsonl", ["", how], ["", how], [str(begun), how], ["", how])
    function = "wait_async" if how == "async" else "wait_here"
    with started("run", f"{TARGET}:{function}", rows, "-o", out) as process:
        wait_for_file(begun)
        wait_for_file(out, lines=2)
        with nothing_left(process):
            process.send_signal(signal.SIGINT)
            wait_for_words(process, "stopping: running calls get 3 s to finish; once more stops them now\n")
            press_until_heard(process)
            wait_for_words(process, "stopping now\n")
            done = finish(process)
    assert done.status == 130
    assert "stopped early: interrupted" in done.err
    assert "Traceback" not in done.err
    first, second, stopped, *rest = parse_lines(out.read_text())
    assert (first["output"], second["output"]) == (how, how)
    assert (stopped["error"]["kind"], stopped["error"]["outcome"]) == ("cancelled", "unknown")
    for result in rest:  # beside a call that waits it may have run
        assert result["ok"] or (result["error"]["kind"], result["error"]["outcome"]) == ("cancelled", "not_run")


def press_until_heard(process: subprocess.Popen[str]) -> None:
    """Presses close to each other are one: press until it says something."""
    assert process.stderr is not None
    while not select.select([process.stderr], [], [], 0.05)[0]:
        process.send_signal(signal.SIGINT)


def wait_for_words(process: subprocess.Popen[str], words: str) -> None:
    """Read its messages until these come."""
    assert process.stderr is not None
    seen = ""
    while not seen.endswith(words):
        line = process.stderr.readline()
        assert line, f"it ended after {seen!r}"
        seen += line


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_running_calls_may_finish_and_waiting_ones_are_told(tmp_path: Path, number: signal.Signals) -> None:
    begun, other, out = tmp_path / "begun", tmp_path / "go", tmp_path / "out.jsonl"
    rows = write_rows(tmp_path / "rows.jsonl", *[[str(begun), str(other)]] * 30_000)  # more than the window holds
    environment = {"CALLYARD_EXECUTOR_MAX_INFLIGHT": "2"}
    with started("run", f"{TARGET}:until_file", rows, "-o", out, env=environment) as process:
        wait_for_file(begun, lines=2)
        with nothing_left(process):
            process.send_signal(number)
            wait_for_words(process, "once more stops them now\n")
            other.touch()
            done = finish(process)
    assert done.status == SIGNALS[number]
    results = parse_lines(out.read_text())
    assert [result["ok"] for result in results] == [True, True] + [False] * (len(results) - 2)
    assert [result["index"] for result in results] == list(range(len(results)))
    for result in results[2:]:
        error = result["error"]
        assert (error["kind"], error["outcome"], error["attempts"]) == ("cancelled", "not_run", 0)
    assert begun.read_text() == "begun\n" * 2
    assert f"rows from call {len(results)} on were not run and have no line" in done.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_end_while_gigabytes_unpack_to_no_row(tmp_path: Path, number: signal.Signals) -> None:
    """A few megabytes of gzip that hold an hour of blank lines keep neither the run's calls nor its end."""
    begun, rows = tmp_path / "begun", tmp_path / "rows.jsonl.gz"
    blank = gzip.compress(b"\n" * 64_000_000, 1)
    with rows.open("wb") as file:
        file.write(gzip.compress(json.dumps([str(begun), "sleep"]).encode() + b"\n"))
        for _ in range(200):
            file.write(blank)
    with started("run", f"{TARGET}:wait_async", rows) as process:
        wait_for_file(begun)
        with nothing_left(process):
            process.send_signal(number)
            wait_for_words(process, "once more stops them now\n")
            done = finish(process)
    assert done.status == SIGNALS[number]
    assert "stopped early: interrupted" in done.err


def test_an_end_while_standard_input_is_idle() -> None:
    """The thread that reads it waits for ever, and must not keep the process, nor bring it down."""
    with (
        started("run", f"{TARGET}:third", "-", "--fail-fast") as failing,
        started("run", f"{TARGET}:third", "-") as pressed,
    ):
        for process in (failing, pressed):
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("[1]\n")
            process.stdin.flush()
            assert process.stdout.readline() == '{"index":0,"ok":true,"output":1}\n'
        pressed.send_signal(signal.SIGINT)
        assert failing.stdin is not None
        failing.stdin.write("[3]\n")
        failing.stdin.flush()
        assert pressed.wait(TIMEOUT_S) == 130
        assert failing.wait(TIMEOUT_S) == 1
        for process in (failing, pressed):
            assert process.stderr is not None
            assert "stopped early" in (err := process.stderr.read())
            assert "Fatal" not in err


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_before_the_first_call(tmp_path: Path, number: signal.Signals) -> None:
    begun, out = tmp_path / "begun", tmp_path / "out.jsonl"
    (tmp_path / "m.py").write_text(
        f"import time\nopen({str(begun)!r}, 'w').write('begun\\n')\ntime.sleep(600)\ndef f(x: int) -> int: return x\n"
    )
    with started("run", "m.py:f", "-", "-o", out, cwd=tmp_path) as process:
        wait_for_file(begun)
        with nothing_left(process):
            process.send_signal(number)
            done = finish(process)
    assert (done.status, done.out) == (SIGNALS[number], "")
    assert done.err == ("interrupted\n" if number is signal.SIGINT else "terminated\n")
    assert not out.exists()


def test_a_signal_while_python_still_imports() -> None:
    """Nothing has begun, so it ends at once and without a traceback."""
    program = "from callyard.cli import main\nimport os, signal, sys\nsys.meta_path.insert(0, Press())\nmain()\n"
    press = (
        "class Press:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'callyard.cli.app':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "import sys\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", press + program, "--help"], capture_output=True, timeout=TIMEOUT_S, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


@pytest.mark.parametrize("end", ["rows", "output"])
def test_a_signal_while_a_named_pipe_has_no_other_end(tmp_path: Path, end: str) -> None:
    """To open it is what waits, on the thread of the loop: the first press ends the command all the same."""
    pipe, rows = tmp_path / "pipe", write_rows(tmp_path / "rows.jsonl", [1])
    os.mkfifo(pipe)
    words = [str(pipe), "--format", "jsonl"] if end == "rows" else [str(rows), "-o", str(pipe)]
    program = (
        "import os, signal, sys\n"
        f"sys.argv = ['callyard', 'run', {f'{TARGET}:third'!r}, *{words!r}]\n"
        "def press(event, args):\n"
        f"    if event == 'open' and str(args[0]) == {str(pipe)!r}:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.addaudithook(press)\n"
        "from callyard.cli import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=TIMEOUT_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


@pytest.mark.parametrize("command", ["call", "list"])
def test_a_signal_during_a_single_call_or_a_listing(tmp_path: Path, command: str) -> None:
    begun = tmp_path / "begun"
    (tmp_path / "m.py").write_text(
        f"import sys, time\ndef f():\n    open({str(begun)!r}, 'w').write('begun\\n')\n    time.sleep(600)\n"
        + ("f()\n" if command == "list" else "")
    )
    with started(command, "m.py" if command == "list" else "m.py:f", cwd=tmp_path) as process:
        wait_for_file(begun)
        with nothing_left(process):
            process.send_signal(signal.SIGINT)
            done = finish(process)
    assert (done.status, done.out, done.err) == (130, "", "interrupted\n")


def test_a_stalled_reader_does_not_keep_it_from_stopping(tmp_path: Path) -> None:
    """The loop stands in a write that nobody takes: the second signal, later than a second, ends it."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f"[{x}]\n" for x in range(100_000)))
    with started("run", f"{TARGET}:double", rows) as process:
        pids = executors_of(process)
        seen: deque[int] = deque(maxlen=30)

        def is_full() -> bool:
            """The command could write more, and does not."""
            seen.append(unread_bytes(process.stdout))
            return len(seen) == 30 and seen[0] > 0 and len(set(seen)) == 1

        wait_until(is_full, "the pipe is full")
        process.send_signal(signal.SIGINT)

        def press() -> bool:
            process.send_signal(signal.SIGINT)
            return process.poll() is not None

        wait_until(press, "the end")
    assert process.returncode == 130
    wait_gone(pids)


def unread_bytes(pipe: IO[str] | None) -> int:
    assert pipe is not None
    count = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return count[0]


def test_ignored_signals_stay_ignored(tmp_path: Path) -> None:
    """As for nohup, and for jobs that a script puts in the background."""
    begun, other = tmp_path / "begun", tmp_path / "go"
    rows = write_rows(tmp_path / "rows.jsonl", [str(begun), str(other)])

    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    with started("run", f"{TARGET}:until_file", rows, "--quiet", preexec_fn=ignore) as process:
        wait_for_file(begun)
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGINT)
        other.touch()
        done = finish(process)
    assert (done.status, done.err) == (0, "")
    assert done.results[0]["output"] == "done"


@pytest.mark.requirement("X44")
@pytest.mark.requirement("X87")
def test_kill_9_of_the_command_leaves_whole_lines_and_no_process(tmp_path: Path) -> None:
    begun, out = tmp_path / "begun", tmp_path / "out.jsonl"
    rows = write_rows(tmp_path / "rows.jsonl", ["", "spin"], [str(begun), "spin"])
    with started("run", f"{TARGET}:wait_here", rows, "-o", out) as process:
        wait_for_file(begun)
        wait_for_file(out)
        with nothing_left(process):
            process.kill()
            assert process.wait(TIMEOUT_S) == -signal.SIGKILL
    assert parse_lines(out.read_text()) == [{"index": 0, "ok": True, "output": "spin"}]


@pytest.mark.requirement("X45")
@pytest.mark.requirement("X62")
def test_kill_9_of_an_executor_costs_the_calls_it_had_begun(tmp_path: Path) -> None:
    begun, other = tmp_path / "begun", tmp_path / "go"
    rows = write_rows(tmp_path / "rows.jsonl", *[[str(begun), str(other)]] * 6)
    environment = {"CALLYARD_EXECUTOR_MAX_INFLIGHT": "2", "CALLYARD_EXECUTOR_RESTART_DELAY_MS": "1"}
    with started("run", f"{TARGET}:until_file", rows, env=environment) as process:
        wait_for_file(begun, lines=2)
        for pid in children_of(process.pid):
            kill(pid, signal.SIGKILL)
        other.touch()
        done = finish(process)
    assert [result["ok"] for result in done.results] == [False, False, True, True, True, True]
    assert begun.read_text() == "begun\n" * 6, "each ran once"
    for result in done.results[:2]:
        error = result["error"]
        assert (error["kind"], error["outcome"], error["details"]["signal"]) == ("crashed", "unknown", 9)
        assert "was killed by SIGKILL" in error["message"]
    assert done.status == 1


def test_a_stopped_command_goes_on(tmp_path: Path) -> None:
    """Ctrl-Z, then fg. In a process group of its own, as a shell gives it one: one whose parents are all outside the
    session is never stopped."""
    begun, other = tmp_path / "begun", tmp_path / "go"
    rows = write_rows(tmp_path / "rows.jsonl", [str(begun), str(other)])
    with started("run", f"{TARGET}:until_file", rows, process_group=0) as process:
        wait_for_file(begun)
        process.send_signal(signal.SIGTSTP)
        wait_until(lambda: stat_letter(process.pid) == "T", "it is stopped")
        other.touch()
        process.send_signal(signal.SIGCONT)
        done = finish(process)
    assert (done.status, done.results[0]["output"]) == (0, "done")


def stat_letter(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_function_that_always_ends_its_process_ends_the_run(tmp_path: Path) -> None:
    """Each such call costs one start, the rest of the list runs, and a pause of the pool is explained."""
    rows = write_rows(tmp_path / "rows.jsonl", *[[1]] * 6, [-1])
    environment = {
        "CALLYARD_EXECUTOR_RESTART_DELAY_MS": "1",
        "CALLYARD_EXECUTOR_MAX_RESTARTS": "2",
        "CALLYARD_EXECUTOR_BACKOFF_MS": "1500",
    }
    done = run("run", f"{TARGET}:die", rows, env=environment)
    assert done.status == 1
    assert [result["ok"] for result in done.results] == [False] * 6 + [True]
    assert "6 crashed: its process died" in done.err
    assert "6 such as call 0, line 1: exec-1 was killed by SIGKILL" in done.err
    assert "1 of 1 executors pause before they start again: they keep ending before they finish a call." in done.err
    assert "was killed by SIGKILL. (--max-failures N stops a run that fails too often)" in done.err


def test_max_failures_and_fail_fast(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [3], [6], *[[1]] * 50_000)
    within = run("run", f"{TARGET}:third", rows, "--limit", "9", "--max-failures", "2")
    assert (within.status, len(within.results)) == (0, 9)
    assert "9 calls: 7 ok, 2 failed" in within.err
    beyond = run("run", f"{TARGET}:third", rows, "--max-failures", "1")
    fast = run("run", f"{TARGET}:third", rows, "--fail-fast")
    assert beyond.status == fast.status == 1
    assert 2 <= len(beyond.results) < 50_000
    assert 1 <= len(fast.results) < 50_000
    assert "stopped early: more calls failed than --max-failures allows; rows from call " in beyond.err
    assert "stopped early: a call failed, and --fail-fast was given; rows from call " in fast.err


@pytest.mark.requirement("X14")
def test_fail_fast_lets_running_calls_end_and_max_failures_does_not(tmp_path: Path) -> None:
    def results(seconds: float, why: str, *words: str) -> list[dict[str, Any]]:
        folder = tmp_path / words[0]
        folder.mkdir()
        rows = "".join(f'["{folder}", {x}, {seconds}]\n' for x in range(2))
        done = run("run", f"{TARGET}:fails_once_both_run", "-", "--executors", "1", *words, stdin=rows)
        assert done.status == 1
        assert f"stopped early: {why}" in done.err
        return done.results

    failed, ended = results(1.0, "a call failed, and --fail-fast was given", "--fail-fast")
    assert failed["error"]["message"] == "ValueError: the first"
    assert ended == {"index": 1, "ok": True, "output": 1}
    _, stopped = results(600.0, "more calls failed than --max-failures allows", "--max-failures", "0")
    assert stopped["error"]["kind"] == "cancelled"


@pytest.mark.requirement("X44")
def test_ctrl_c_on_a_terminal_reaches_the_command_alone(tmp_path: Path) -> None:
    """The executors are in sessions of their own: a call that runs may finish."""
    begun, other, out = tmp_path / "begun", tmp_path / "go", tmp_path / "out.jsonl"
    rows = write_rows(tmp_path / "rows.jsonl", [str(begun), str(other)])
    terminal = Terminal(["run", f"{TARGET}:until_file", rows, "-o", out])
    wait_for_file(begun)
    assert all(os.getsid(pid) == pid for pid in children_of(terminal.process.pid))
    terminal.press(b"\x03")
    wait_until(lambda: "once more stops them now" in terminal.raw, "it was heard")
    other.touch()
    assert terminal.wait() == 130
    assert parse_lines(out.read_text()) == [{"index": 0, "ok": True, "output": "done"}]


def test_a_closed_terminal_ends_it(tmp_path: Path) -> None:
    begun, other, out = tmp_path / "begun", tmp_path / "go", tmp_path / "out.jsonl"
    rows = write_rows(tmp_path / "rows.jsonl", [str(begun), str(other)])
    terminal = Terminal(["run", f"{TARGET}:until_file", rows, "-o", out])
    wait_for_file(begun)
    pids = children_of(terminal.process.pid)
    terminal.hang_up()
    other.touch()
    assert terminal.process.wait(TIMEOUT_S) == SIGNALS[signal.SIGHUP]
    wait_gone(pids)
    assert [result["output"] for result in parse_lines(out.read_text())] == ["done"]
