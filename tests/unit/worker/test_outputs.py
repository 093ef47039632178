"""Where results go, and what is said when they cannot."""

from __future__ import annotations

import io
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from callyard.errors import CallFailure, ErrorKind, Outcome, UsageError, fail
from callyard.worker import outputs
from callyard.worker.outputs import (
    BUFFER_BYTES,
    CallableOutput,
    CallResult,
    JsonlOutput,
    MemoryOutput,
    OutputClosed,
    OutputError,
    OutputSink,
    format_line,
    open_output,
)


def good(index: int, output: bytes = b'{"km": 5.0}') -> CallResult:
    return CallResult(index, output, None, 1)


def bad(index: int, failure: CallFailure) -> CallResult:
    return CallResult(index, None, failure, failure.attempts)


CRASHED = fail(ErrorKind.CRASHED, "its process died", attempts=2, cause="signal 9", exit_code=-9)


# --- lines ----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X87")
@pytest.mark.parametrize(
    ("result", "line"),
    [
        (good(0), b'{"index":0,"ok":true,"output":{"km": 5.0}}\n'),
        (good(7, b"null"), b'{"index":7,"ok":true,"output":null}\n'),
        (good(1, b'[1,\n 2,\r\n "a\\nb"]'), b'{"index":1,"ok":true,"output":[1,  2,   "a\\nb"]}\n'),
        (
            bad(3, CRASHED),
            b'{"index":3,"ok":false,"error":{"kind":"crashed","message":"its process died","attempts":2,'
            b'"outcome":"unknown","details":{"cause":"signal 9","exit_code":-9}}}\n',
        ),
        (
            bad(4, fail(ErrorKind.CANCELLED, "the run was stopped", outcome=Outcome.NOT_RUN)),
            b'{"index":4,"ok":false,"error":{"kind":"cancelled","message":"the run was stopped","attempts":0,'
            b'"outcome":"not_run"}}\n',
        ),
        (
            bad(5, fail(ErrorKind.INTERNAL, 'KeyError: "a"\nline', attempts=1, stack="File …", value={1, 2} - {2})),
            b'{"index":5,"ok":false,"error":{"kind":"internal","message":"KeyError: \\"a\\"\\nline","attempts":1,'
            b'"outcome":"ran","details":{"value":[1]}}}\n',
        ),
    ],
    ids=lambda value: str(value.index) if isinstance(value, CallResult) else "",
)
def test_one_line_per_result(result: CallResult, line: bytes) -> None:
    assert format_line(result) == line
    assert line.count(b"\n") == 1
    assert msgspec.json.decode(line)["index"] == result.index


@pytest.mark.requirement("X87")
def test_results_stand_in_the_order_in_which_they_come(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    sink: OutputSink = JsonlOutput(file)
    sink.write([good(0), bad(1, CRASHED)])
    sink.write([])
    sink.write([good(2, b'"x"')])
    sink.close()
    sink.close()
    lines = [msgspec.json.decode(line) for line in file.read_bytes().splitlines()]
    assert [(line["index"], line["ok"]) for line in lines] == [(0, True), (1, False), (2, True)]


def test_an_empty_run_leaves_an_empty_file(tmp_path: Path) -> None:
    JsonlOutput(tmp_path / "out.jsonl").close()
    assert (tmp_path / "out.jsonl").read_bytes() == b""


# --- buffer ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No flush because of time: the machine may be slow."""
    monkeypatch.setattr(outputs, "FLUSH_AFTER_S", 3_600)


@pytest.mark.usefixtures("patient")
@pytest.mark.requirement("X87")
def test_the_file_holds_whole_lines_only_at_any_time(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    sink = JsonlOutput(file)
    sink.write([good(0)])
    assert file.read_bytes() == b""
    text = msgspec.json.encode("x" * (BUFFER_BYTES // 3))
    for index in range(1, 9):
        sink.write([good(index, text)])
        content = file.read_bytes()
        assert content == b"" or content.endswith(b"\n")
        assert content.count(b"\n") == sink.lines
    assert sink.lines > 0
    sink.close()
    assert file.read_bytes().count(b"\n") == sink.lines == 9


@pytest.mark.usefixtures("patient")
def test_flush_hands_on_what_is_held(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    sink = JsonlOutput(file)
    sink.write([good(0)])
    sink.flush()
    assert file.read_bytes() == format_line(good(0))
    sink.flush()
    sink.close()


def test_slow_results_are_not_held_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "FLUSH_AFTER_S", 0.0)
    file = tmp_path / "out.jsonl"
    sink = JsonlOutput(file)
    sink.write([good(0)])
    assert file.read_bytes() == format_line(good(0))
    sink.close()


@pytest.mark.usefixtures("patient")
def test_abort_keeps_what_was_taken_and_never_raises(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    sink = JsonlOutput(file)
    sink.write([good(0), good(1)])
    sink.abort()
    sink.abort()
    assert file.read_bytes() == format_line(good(0)) + format_line(good(1))
    full = JsonlOutput("/dev/full")
    full.write([good(0)])
    full.abort()


# --- paths that cannot be an output ---------------------------------------------------------------------------------


def test_what_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"is a folder: expected a file, such as .*out\.jsonl"):
        JsonlOutput(tmp_path)
    with pytest.raises(OutputError, match=r"there is no folder .*gone for out\.jsonl: make it first"):
        JsonlOutput(tmp_path / "gone" / "out.jsonl")
    with pytest.raises(OutputError, match="File name too long"):
        JsonlOutput(tmp_path / ("x" * 300))
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(OutputError, match="Not a directory"):
        JsonlOutput(file / "out.jsonl")
    with pytest.raises(OutputError, match=r"null (byte|character)"):
        JsonlOutput("out\0.jsonl")
    assert issubclass(OutputError, UsageError)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="Permission denied"):
        JsonlOutput(tmp_path / "out.jsonl")


@pytest.mark.parametrize("existing", ["refuse", "overwrite", "append"])
def test_the_input_is_never_the_output(tmp_path: Path, existing: Any) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b"[1]\n")
    (tmp_path / "link.jsonl").symlink_to(rows)
    os.link(rows, tmp_path / "hard.jsonl")
    for name in ("rows.jsonl", "link.jsonl", "hard.jsonl", "../" + tmp_path.name + "/rows.jsonl"):
        with pytest.raises(OutputError, match="is the input too: write to another file"):
            JsonlOutput(tmp_path / name, existing=existing, source=rows)
    assert rows.read_bytes() == b"[1]\n"


def test_standard_input_from_the_output_file_is_refused(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b"[1]\n")
    code = (
        "import sys\nfrom callyard.worker.outputs import JsonlOutput, OutputError\n"
        "try:\n    JsonlOutput(sys.argv[1], existing='overwrite', source='-')\n"
        "except OutputError as error:\n    print(error)\n"
    )
    with rows.open("rb") as stdin:
        done = subprocess.run(
            [sys.executable, "-c", code, str(rows)], stdin=stdin, capture_output=True, text=True, check=True
        )
    assert "is the input too" in done.stdout
    assert rows.read_bytes() == b"[1]\n"


def test_another_input_is_fine(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.touch()
    (tmp_path / "out.jsonl").touch()
    JsonlOutput(tmp_path / "out.jsonl", source=rows).close()
    JsonlOutput(tmp_path / "out.jsonl", source=tmp_path / "gone").close()
    JsonlOutput("/dev/null", source="/dev/null").close()


def test_what_becomes_of_an_existing_file(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    file.write_bytes(b"old\n")
    with pytest.raises(OutputError, match=r"not empty: give --force to replace it, --append to add to it"):
        JsonlOutput(file)
    assert file.read_bytes() == b"old\n"
    sink = JsonlOutput(file, existing="append")
    sink.write([good(1)])
    sink.close()
    assert file.read_bytes() == b"old\n" + format_line(good(1))
    sink = JsonlOutput(file, existing="overwrite")
    sink.write([good(2)])
    sink.close()
    assert file.read_bytes() == format_line(good(2))
    file.write_bytes(b"")
    JsonlOutput(file).close()


@pytest.mark.parametrize("rest", [b"", b'{"index":1,"o', b"x" * (2 * BUFFER_BYTES)])
def test_appending_takes_away_a_line_that_a_kill_cut_off(tmp_path: Path, rest: bytes) -> None:
    for whole in (b"", b"one\n", b"one\n" + b"y" * BUFFER_BYTES + b"\n"):
        file = tmp_path / "out.jsonl"
        file.write_bytes(whole + rest)
        sink = JsonlOutput(file, existing="append")
        sink.write([good(1)])
        sink.close()
        assert file.read_bytes() == whole + format_line(good(1))


# --- a disk that is full, a reader that leaves ----------------------------------------------------------------------


def test_a_full_disk_is_told_with_what_to_do() -> None:
    sink = JsonlOutput("/dev/full")
    with pytest.raises(OutputError) as caught:
        sink.write([good(0)] * 10_000)
    message = "cannot write /dev/full: No space left on device; it holds 0 results, each line whole: "
    assert str(caught.value) == message + "make room, or write elsewhere"
    sink.abort()


def test_after_a_failed_write_the_file_ends_with_its_last_whole_line(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk: part of a write succeeds."""
    code = (
        "import resource, sys\n"
        "from callyard.worker.outputs import CallResult, JsonlOutput, OutputError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))\n"
        "sink = JsonlOutput(sys.argv[1])\n"
        "try:\n"
        "    for index in range(10):\n"
        "        sink.write([CallResult(index, b'\"' + b'x' * 3_000 + b'\"', None, 1)])\n"
        "        sink.flush()\n"
        "except OutputError as error:\n"
        "    sink.abort()\n"
        "    print(error)\n"
    )
    file = tmp_path / "out.jsonl"
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True)
    content = file.read_bytes()
    assert [msgspec.json.decode(line)["index"] for line in content.splitlines()] == [0, 1, 2]
    assert content.endswith(b"\n")
    assert "File too large; it holds 3 results, each line whole: the file may not grow further" in done.stdout


def test_lines_of_a_failed_write_that_are_whole_stay(tmp_path: Path) -> None:
    code = (
        "import resource, sys\n"
        "from callyard.worker.outputs import CallResult, JsonlOutput, OutputError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))\n"
        "sink = JsonlOutput(sys.argv[1])\n"
        "sink.write([CallResult(index, b'\"' + b'x' * 3_000 + b'\"', None, 1) for index in range(10)])\n"
        "try:\n    sink.close()\n"
        "except OutputError as error:\n    print(error, sink.place)\n"
    )
    file = tmp_path / "out.jsonl"
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True)
    assert [msgspec.json.decode(line)["index"] for line in file.read_bytes().splitlines()] == [0, 1, 2]
    assert "it holds 3 results" in done.stdout
    assert done.stdout.endswith(f"({file.stat().st_size}, 3)\n"), "a run that goes on knows of them"


def test_a_reader_that_leaves_ends_it_quietly() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb", buffering=0) as stream:
        sink = JsonlOutput(stream)
        with pytest.raises(OutputClosed, match="the reader of"):
            sink.write([good(0)] * 10_000)
        sink.abort()


def test_a_stream_that_takes_only_part_gets_the_rest_too() -> None:
    taken = bytearray()

    class Narrow(io.RawIOBase):
        def write(self, data: Any) -> int:
            part = bytes(data[:7])
            taken.extend(part)
            return len(part)

    sink = JsonlOutput(Narrow())  # type: ignore[arg-type]
    sink.write([good(0), good(1)])
    sink.close()
    assert bytes(taken) == format_line(good(0)) + format_line(good(1))


def test_a_stream_that_cannot_take_anything_now_is_an_output_error() -> None:
    class Full(io.RawIOBase):
        def write(self, data: Any) -> None:
            return None

    sink = JsonlOutput(Full())  # type: ignore[arg-type]
    sink.write([good(0)])
    with pytest.raises(OutputError, match="Resource temporarily unavailable"):
        sink.close()


def test_head_on_standard_output_makes_no_noise(tmp_path: Path) -> None:
    code = (
        "from callyard.worker.outputs import CallResult, JsonlOutput, OutputClosed\n"
        "sink = JsonlOutput('-')\n"
        "try:\n"
        "    for index in range(1_000_000):\n"
        "        sink.write([CallResult(index, b'1', None, 1)])\n"
        "except OutputClosed:\n"
        "    sink.abort()\n"
    )
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdout is not None
    assert run.stderr is not None
    assert run.stdout.readline() == format_line(good(0, b"1"))
    run.stdout.close()
    errors = run.stderr.read()
    run.stderr.close()
    assert run.wait(timeout=60) == 0
    assert errors == b""


def test_a_stream_that_was_closed_is_an_output_error() -> None:
    stream = io.BytesIO()
    sink = JsonlOutput(stream)
    sink.write([good(0)])
    stream.close()
    with pytest.raises(OutputError, match="closed file"):
        sink.close()
    sink.abort()


def test_a_stream_of_the_callers_stays_open() -> None:
    stream = io.BytesIO()
    sink = JsonlOutput(stream)
    sink.write([good(0)])
    sink.close()
    assert stream.getvalue() == format_line(good(0))


def test_standard_output(capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    sink = open_output("-")
    sink.write([good(0)])
    sink.close()
    assert capfdbinary.readouterr().out == format_line(good(0))
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(OutputError, match="standard output is closed"):
        open_output("-")


# --- the others -----------------------------------------------------------------------------------------------------


def test_in_memory() -> None:
    sink = MemoryOutput()
    port: OutputSink = sink
    port.write([good(0)])
    port.flush()
    port.write([bad(1, CRASHED)])
    port.close()
    port.abort()
    assert [result.ok for result in sink.results] == [True, False]


def test_to_a_callable() -> None:
    taken: list[int] = []

    def take(result: CallResult) -> None:
        taken.append(result.index)
        if result.index == 2:
            raise LookupError("enough")

    sink: OutputSink = CallableOutput(take)
    sink.write([good(0), good(1)])
    with pytest.raises(LookupError, match="enough"):
        sink.write([good(2), good(3)])
    sink.flush()
    sink.close()
    sink.abort()
    assert taken == [0, 1, 2]


def test_the_suffix_or_the_format_chooses(tmp_path: Path) -> None:
    for name, format in (("a.jsonl", None), ("a.NDJSON", None), ("a.out", "jsonl"), ("b", "ndjson")):
        open_output(tmp_path / name, format).close()
        assert (tmp_path / name).is_file()
    open_output("/dev/null").close()
    for name, format in (("a.csv", None), ("a", None), ("a.jsonl", "xml")):
        with pytest.raises(OutputError, match=r"unknown output format '.*': expected \.jsonl, \.ndjson or \.parquet"):
            open_output(tmp_path / name, format)
    assert not (tmp_path / "a.csv").exists()


def test_memory_of_the_sink_is_its_buffer(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sink = JsonlOutput(tmp_path / "out.jsonl")
    text = msgspec.json.encode("x" * 1_000)
    for index in range(50_000):
        sink.write([good(index, text)])
    sink.close()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * 1_024 < 100 * BUFFER_BYTES  # the results are twice that
