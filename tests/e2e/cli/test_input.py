"""Call lists that are not what they should be: each bad row is its own failure, each bad file a message."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.cli.shell import CALLYARD, ENVIRONMENT, TARGET, TIMEOUT_S, parse_lines, run, started
from tests.e2e.processes import wait_until

DOUBLE = f"{TARGET}:double"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.jsonl", "nowhere.jsonl does not exist: expected a file of rows, such as rows.jsonl or rows.csv"),
        ("folder", "folder is a folder: expected a file of rows"),
        ("utf16.jsonl", "utf16.jsonl is UTF-16 or UTF-32 text: save it as UTF-8"),
        ("no_function.csv", "rows of a table name no function"),
    ],
)
def test_a_file_that_is_no_call_list(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "utf16.jsonl").write_text('{"x": 1}\n', encoding="utf-16")
    (tmp_path / "no_function.csv").write_text("x\n1\n")
    target = TARGET if name == "no_function.csv" else DOUBLE
    done = run("run", target, name, "-o", "out.jsonl", cwd=tmp_path)
    assert (done.status, done.out) == (2, "")
    assert done.err.splitlines()[-1].startswith("error: ")
    assert message in done.err
    assert "Traceback" not in done.err


def test_an_empty_file_is_a_run_of_no_calls(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    done = run("run", DOUBLE, "rows.jsonl", "-o", "out.jsonl", cwd=tmp_path)
    assert done.status == 0
    assert "0 calls: 0 ok, 0 failed" in done.err
    assert (tmp_path / "out.jsonl").read_bytes() == b""


ROWS: list[tuple[bytes, int | tuple[str, ...] | None]] = [
    (b'\xef\xbb\xbf{"x": 1}\r\n', 2),  # a byte order mark, and a line end from elsewhere
    (b"\r\n", None),
    (b"  \t \n", None),
    (b"[2]\n", 4),
    (b'{"x": NaN}\n', ("line 5 is not JSON: ", "NaN and Infinity are not JSON: use null")),
    (b'{"x": -Infinity}\n', ("line 6 is not JSON: ", "NaN and Infinity are not JSON: use null")),
    (b'{"x": 1, "x": 2}\n', ('a key stands twice: "x"',)),
    (b'{"x": 123456789012345678901234567890}\n', 246913578024691357802469135780),
    (
        b"[1, 2]\n",
        (
            "/1: expected ",
            "1 argument (x), got 2",
        ),
    ),
    (b"{}\n", ("/x: required, but missing",)),
    (b'{"x": 1, "y": 2}\n', ("/y: unknown argument 'y'; known: x",)),
    (b'{"x": "\xe9"}\n', ("line 12 is not UTF-8: byte 0xe9 at byte ",)),
    (b'{"x": "two"}\n', ("/x: expected an integer, got text",)),
    (b"17\n", ("line 14: expected a JSON object (by name) or array (by position), got 17",)),
    (b'{"x": 1} {"x": 2}\n', ("line 15 is not JSON",)),
    (b"[" * 5_000 + b"\n", ("line 16",)),
    (b'{"x": 9}\n', 18),
    (
        b'{"x": 1',
        (
            "line 18 is not JSON: ",
            "the file ends inside this line: it was cut off",
        ),
    ),
]


@pytest.mark.requirement("X87")
def test_every_bad_row_is_its_own_failure_and_the_others_run(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b"".join(line for line, _ in ROWS))
    done = run("run", DOUBLE, "rows.jsonl", cwd=tmp_path)
    assert done.status == 1
    assert "Traceback" not in done.err
    expected = [outcome for _, outcome in ROWS if outcome is not None]
    assert [result["index"] for result in done.results] == list(range(len(expected)))
    for result, outcome in zip(done.results, expected, strict=True):
        if not isinstance(outcome, tuple):
            assert (result["ok"], result["output"]) == (True, outcome)
        else:
            error = result["error"]
            assert (error["kind"], error["outcome"], error["attempts"]) == ("schema", "not_run", 0)
            assert all(part in error["message"] for part in outcome), error["message"]
    assert f"{len(expected)} calls: 4 ok, {len(expected) - 4} failed" in done.err
    assert "call 4, line 7: a key stands twice" in done.err, "the line, though two blank ones came before"


def test_a_file_in_another_encoding_fails_line_by_line(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes("text\nné\nplain\nça\n".encode("latin-1"))
    done = run("run", f"{TARGET}:length", "rows.csv", cwd=tmp_path)
    assert done.status == 1
    assert [result["ok"] for result in done.results] == [False, True, False]
    assert "2 such as call 0: line 2 is not UTF-8: byte 0xe9 at byte 6 of the file" in done.err


def test_a_csv_file_with_line_numbers(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(b'\xef\xbb\xbfx,name\r\n1,"a\r\nb"\r\n\r\n3,c\r\n4\r\nfour,d\r\n')
    done = run("run", f"{TARGET}:third", "rows.csv", "--debug", cwd=tmp_path)
    assert done.status == 1
    first, raised, ragged, word = done.results
    assert first["output"] == 1
    assert raised["error"]["message"] == "ValueError: 3 of 'c' is divisible by 3"
    assert ragged["error"]["message"] == "line 6 has 1 cell, expected 2 (x, name)"
    assert word["error"]["details"]["pointer"] == "/x"
    assert "call 1, line 5: ValueError: 3 of 'c' is divisible by 3 (tests/e2e/cli/functions_file.py:" in done.err
    assert 'File "tests/e2e/cli/functions_file.py", line ' in done.err, "--debug shows the stack"
    assert "callyard-run-" not in done.err, "and paths as their author knows them"


@pytest.mark.slow
def test_a_line_of_100_mb_costs_no_memory(tmp_path: Path) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    with rows.open("wb") as file:
        file.write(b'["a"]\n["')
        for _ in range(100):
            file.write(b"x" * 1_000_000)
        file.write(b'"]\n["ccc"]\n')
    done = run("run", f"{TARGET}:length", rows, "-o", out)
    assert done.status == 1
    first, large, last = parse_lines(out.read_text())
    assert (first["output"], last["output"]) == (1, 3)
    assert large["error"]["message"].startswith("line 2 of 100000004 bytes exceeds line_bytes_max=")
    # By its own word: the system's (ru_maxrss) counts what it was before exec, a copy of this process of the tests.
    [peak] = re.findall(r"worker's peak memory ([\d.]+) MB$", done.err, re.M)
    assert 20 < float(peak) < 160


def test_the_peak_memory_is_the_command_s_own() -> None:
    """Not that of a large process which starts it."""
    code = (
        "import subprocess, sys; held = bytearray(300 << 20);"
        f"sys.exit(subprocess.run(['{CALLYARD}', 'run', '{TARGET}:double', '-'], input=b'[1]\\n').returncode)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    [peak] = re.findall(r"worker's peak memory ([\d.]+) MB$", done.stderr, re.M)
    assert 20 < float(peak) < 200


def test_rows_that_name_their_functions() -> None:
    rows = (
        '{"function": "double", "args": [4]}\n'
        '{"function": "nothing", "args": {}}\n'
        '{"x": 1}\n'
        '{"function": "double", "args": 4}\n'
        '{"function": "length", "args": {"text": "abc"}}\n'
    )
    done = run("run", TARGET, "-", stdin=rows)
    assert done.status == 1
    double, unknown, unnamed, no_args, length = done.results
    assert (double["output"], length["output"]) == (8, 3)
    assert unknown["error"]["kind"] == "not_found"
    assert "no function 'nothing'; there are count_to, die, double," in unknown["error"]["message"]
    assert 'line 3: expected {"function": name, "args": object or array}' in unnamed["error"]["message"]
    assert "line 4: expected a JSON object (by name) or array (by position) in args" in no_args["error"]["message"]


def test_results_appear_as_rows_come() -> None:
    """Each row is written only after the result of the one before was read."""
    with started("run", DOUBLE, "-", "-o", "-", "--quiet") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for x in range(4):
            process.stdin.write(f"[{x}]\n")
            process.stdin.flush()
            assert process.stdout.readline() == f'{{"index":{x},"ok":true,"output":{2 * x}}}\n'
        process.stdin.close()
        assert process.wait(TIMEOUT_S) == 0
        assert process.stderr is not None
        assert process.stderr.read() == "", "--quiet"


def test_a_result_is_not_kept_back_for_the_next_one(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    (tmp_path / "rows.jsonl").write_text('["", "quick"]\n["", "quick"]\n["begun", "sleep"]\n')
    with started("run", f"{TARGET}:wait_here", "rows.jsonl", "-o", out, cwd=tmp_path) as process:
        wait_until(lambda: out.exists() and out.read_bytes().count(b"\n") == 2, "two results beside a call that runs")
        assert process.poll() is None


def test_limit_reads_no_further(tmp_path: Path) -> None:
    done = run("run", DOUBLE, "-", "--limit", "2", stdin="[1]\n[2]\nnot JSON\n")
    assert (done.status, [result["output"] for result in done.results]) == (0, [2, 4])


def test_a_closed_standard_input_is_said() -> None:
    done = run("run", DOUBLE, "-", stdin=b"", preexec_fn=lambda: os.close(0))
    assert (done.status, done.err) == (2, "error: standard input is closed: give a file\n")


def test_rows_that_forgot_the_function_or_the_format() -> None:
    no_name = run("run", TARGET, "-", stdin='{"x": 1}\n').results[0]["error"]["message"]
    assert no_name == (
        'line 1: expected {"function": name, "args": object or array} on each line,'
        f' since {TARGET} has several functions, or name one: {TARGET}:NAME; got {{"x": 1}}'
    )
    csv = run("run", DOUBLE, "-", stdin="x,y\n1,2\n").results[0]["error"]["message"]
    assert csv.endswith("; CSV on standard input needs --format csv")
