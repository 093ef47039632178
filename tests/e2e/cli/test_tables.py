"""Call lists as people have them: columns that fit or not, dry runs, formats, what an output line repeats."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.e2e.cli.shell import Done, parse_lines, run

TARGET = Path(__file__).with_name("tables_file.py")
PRICE = f"{TARGET}:price"
TRIPS = "id,rider,km,tip\nA1,ada,7,1\nA2,ben,x,\nA3,cy,-1,\n"


@pytest.fixture
def trips(tmp_path: Path) -> Path:
    path = tmp_path / "trips.csv"
    path.write_text(TRIPS)
    return path


def called(tmp_path: Path) -> dict[str, str]:
    return {"TABLES_CALLED": str(tmp_path / "called")}


@pytest.mark.requirement("X43")
@pytest.mark.parametrize("stdin", [False, True])
def test_an_unknown_column_stops_the_run_before_its_first_call_and_costs_no_old_output(
    trips: Path, tmp_path: Path, stdin: bool
) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text('{"old":1}\n')
    words = ["-", "--format", "csv"] if stdin else [trips]
    text = TRIPS if stdin else ""
    done = run("run", PRICE, *words, "-o", out, "--force", stdin=text, env=called(tmp_path))
    assert (done.status, done.out) == (2, "")
    assert "unknown column id: price takes rider, km, tip; nothing was run" in done.err
    assert "--columns rider,km,tip" in done.err
    assert "--extra=ignore" in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "called").exists()
    assert out.read_text() == '{"old":1}\n'


@pytest.mark.parametrize("words", [["--extra=ignore"], ["--columns", "rider, km,tip"], ["--id", "id"]])
def test_ways_out(trips: Path, words: list[str]) -> None:
    done = run("run", PRICE, trips, *words)
    assert done.status == 1
    first, second, third = done.results
    assert first["output"] == {"rider": "ada", "fare": 15.0}
    assert second["error"]["message"] == '/km: expected a number, got text ("x")'
    assert second["error"]["details"]["line"] == 3
    assert third["error"]["message"] == "ValueError: km below zero"
    assert "call 1, line 3" in done.err
    assert [result.get("id") for result in done.results] == (["A1", "A2", "A3"] if "--id" in words else [None] * 3)


def test_what_a_line_repeats(trips: Path) -> None:
    done = run("run", PRICE, trips, "--id", "id", "--with-args", "-q")
    assert list(done.results[0]) == ["index", "id", "args", "ok", "output"]
    assert done.results[0]["args"] == {"rider": "ada", "km": "7", "tip": "1"}
    assert [result["id"] for result in done.results] == ["A1", "A2", "A3"]
    missing = run("run", PRICE, trips, "--id", "idd")
    assert missing.status == 2
    assert "there is no column 'idd' for id; is 'idd' meant to be 'id'?" in missing.err


def dry(words: list[Any], tmp_path: Path, **options: Any) -> tuple[Done, Done]:
    """The run without and with `--dry-run`."""
    real = run("run", *words, **options)
    return real, run("run", *words, "--dry-run", env=called(tmp_path), **options)


@pytest.mark.parametrize(
    ("function", "rows"),
    [
        ("price", "rider,km\nada,7\nben,x\ncy\n"),
        ("checked", "km\n1\n-1\nx\n"),
        ("odd_one", "x\n1\n\n1.5\n3\n"),
    ],
)
def test_a_dry_run_calls_nothing_and_says_what_the_run_would(tmp_path: Path, function: str, rows: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(rows)
    real, checked = dry([f"{TARGET}:{function}", path], tmp_path)
    assert not (tmp_path / "called").exists()
    assert checked.status == real.status == 1
    assert checked.results == [result for result in real.results if not result["ok"]]
    assert checked.results
    assert "dry run, nothing was called: " in checked.err
    fits, failed = sum(result["ok"] for result in real.results), len(checked.results)
    assert f"{fits} ok, {failed} failed" in checked.err


def test_a_dry_run_writes_no_output_and_has_the_status_of_the_run(trips: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    words = [PRICE, trips, "--extra=ignore", "-o", out]
    done = run("run", *words, "--dry-run", "--max-failures", "40%")
    assert (done.status, out.exists()) == (0, False)  # one of three
    assert [result["index"] for result in done.results] == [1]
    assert run("run", *words, "--dry-run", "--max-failures", "30%").status == 1
    assert run("run", PRICE, trips, "--dry-run").status == 2
    out.write_text("{}\n")
    refused = run("run", *words, "--dry-run")
    assert (refused.status, out.read_text()) == (2, "{}\n")
    assert "exists and is not empty: give --force" in refused.err


def test_a_dry_run_of_effects_and_failures_of_the_function_is_clean(tmp_path: Path) -> None:
    done = run("run", PRICE, "-", "--dry-run", stdin='{"rider":"cy","km":-1}\n', env=called(tmp_path))
    assert (done.status, done.out) == (0, "")
    assert not (tmp_path / "called").exists()


@pytest.mark.requirement("X43")
def test_the_same_rows_in_every_format(tmp_path: Path) -> None:
    rows = [{"rider": "ada", "km": 7, "tip": 1.0}, {"rider": "ben", "km": 2, "tip": None}]
    for row in rows[1:]:
        row.pop("tip")
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    files = {
        "a.jsonl": lines,
        "a.ndjson.gz": gzip.compress(lines),
        "a.json": json.dumps(rows, indent=2).encode(),
        "a.json.gz": gzip.compress(json.dumps(rows).encode()),
        "a.csv": b"rider,km,tip\nada,7,1\nben,2,\n",
        "a.tsv": b"rider\tkm\ttip\nada\t7\t1\nben\t2\t\n",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    pq.write_table(pa.table({"rider": ["ada", "ben"], "km": [7.0, 2.0], "tip": [1.0, 0.0]}), tmp_path / "a.parquet")
    expected = [{"rider": "ada", "fare": 15.0}, {"rider": "ben", "fare": 4.0}]
    for name in (*files, "a.parquet"):
        done = run("run", PRICE, tmp_path / name, "-q")
        assert [result.get("output") for result in done.results] == expected, name
    for format, name in (("json", "a.json"), ("csv", "a.csv"), ("jsonl.gz", "a.ndjson.gz")):
        done = run("run", PRICE, "-", "--format", format, "-q", stdin=(tmp_path / name).read_bytes())
        assert [result.get("output") for result in done.results] == expected, format


def test_parquet_to_parquet(tmp_path: Path) -> None:
    folder = tmp_path / "out.parquet"
    pq.write_table(pa.table({"id": [1, 2], "rider": ["ada", "ben"], "km": [7.0, -1.0]}), tmp_path / "in.parquet")
    done = run("run", PRICE, tmp_path / "in.parquet", "-o", folder, "--id", "id", "--max-failures", "50%")
    assert (done.status, done.out) == (0, ""), done.err
    rows = pq.read_table(folder).to_pylist()
    assert [row["id"] for row in rows] == ["1", "2"]
    assert rows[0]["output"] == {"rider": "ada", "fare": 14.0}
    assert rows[1]["error"]["kind"] == "internal"
    again = run("run", PRICE, tmp_path / "in.parquet", "-o", folder, "--id", "id")
    assert again.status == 2
    assert "is not empty: give --force to replace its parts" in again.err


def test_a_share_of_failures_stops_a_hopeless_run(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"[{x}]\n" for x in range(20_000)))
    done = run("run", f"{TARGET}:odd_one", path, "--max-failures", "10%")
    assert done.status == 1
    assert 100 <= len(done.results) < 20_000
    assert "stopped early: more calls failed than --max-failures allows" in done.err
    for word in ("101%", "-1", "5 %", "many"):
        refused = run("run", f"{TARGET}:odd_one", path, f"--max-failures={word}")
        assert refused.status == 2
        assert "expected a whole number, or a share from 0% to 100%" in refused.err.replace("│", "").replace("\n", "")


def test_append_goes_on_and_force_replaces(trips: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    words = ["run", PRICE, trips, "--id", "id", "-q", "-o", out]
    assert run(*words).status == 1
    assert run(*words).status == 2
    assert run(*words, "--append").status == 1
    assert len(parse_lines(out.read_text())) == 6
    assert run(*words, "--force").status == 1
    assert len(parse_lines(out.read_text())) == 3


def test_a_file_that_breaks_off_keeps_the_results_before(tmp_path: Path) -> None:
    path, out = tmp_path / "a.jsonl.gz", tmp_path / "out.jsonl"
    lines = "".join(f'{{"rider":"r{n * 7919 % 10007}","km":{n * 31 % 997}}}\n' for n in range(60_000))
    packed = gzip.compress(lines.encode())
    path.write_bytes(packed[: len(packed) // 2])
    done = run("run", PRICE, path, "-o", out)
    assert done.status == 2
    assert "its compressed data end too early: it was cut off" in done.err
    assert len(parse_lines(out.read_text())) > 1_000
