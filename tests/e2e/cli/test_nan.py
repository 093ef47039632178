"""NaN and infinities at the command line: a failure of their call, or null where somebody asked for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.cli.shell import TARGET, run

NOT_FINITE = f"{TARGET}:not_finite"
NULL = ("--nan", "null")


@pytest.mark.parametrize(
    ("form", "output"), [("list", [1.5, None, None]), ("array", [1.5, None]), ("bytes", ["eA==", None])]
)
def test_a_call_fails_or_gives_null(form: str, output: object) -> None:
    done = run("call", NOT_FINITE, f"form={form}")
    assert (done.status, done.out) == (1, "")
    assert "/1: nan is not JSON" in done.err
    done = run("call", NOT_FINITE, f"form={form}", *NULL)
    assert (done.status, json.loads(done.out)) == (0, output)


def test_a_run_fails_row_by_row_or_gives_null(tmp_path: Path) -> None:
    rows, out = tmp_path / "rows.csv", tmp_path / "out.jsonl"
    rows.write_text("form\nlist\nfinite\narray\n")
    done = run("run", NOT_FINITE, rows)
    assert done.status == 1
    assert [(one["ok"], one.get("error", {}).get("kind")) for one in done.results] == [
        (False, "result"),
        (True, None),
        (False, "result"),
    ]
    done = run("run", NOT_FINITE, rows, *NULL, "-o", out)
    assert (done.status, done.out) == (0, "")
    assert [json.loads(line)["output"] for line in out.read_text().splitlines()] == [
        [1.5, None, None],
        [1.5],
        [1.5, None],
    ]


def test_a_function_that_says_null_needs_no_option() -> None:
    done = run("call", f"{TARGET}:nan_as_null", "x=1")
    assert (done.status, done.out) == (0, "[1.0,null]\n")


@pytest.mark.parametrize("words", [(), NULL])
def test_it_is_no_argument_either_way(tmp_path: Path, words: tuple[str, ...]) -> None:
    """The option is about results: text that says NaN is not quietly another value."""
    done = run("call", f"{TARGET}:nan_as_null", "x=nan", *words)
    assert done.status == 1
    assert "/x: expected a finite number" in done.err
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"x": NaN}\n{"x": 2}\n')
    done = run("run", f"{TARGET}:nan_as_null", rows, *words)
    assert done.status == 1
    assert [one["ok"] for one in done.results] == [False, True]
    assert "NaN and Infinity are not JSON: use null" in done.out


def test_another_word_is_refused() -> None:
    done = run("call", NOT_FINITE, "form=list", "--nan", "zero")
    assert done.status == 2
    assert "expected one of refuse, null, got 'zero'" in done.err
