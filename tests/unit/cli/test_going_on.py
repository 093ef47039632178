"""The command lines that a run says at its end."""

from __future__ import annotations

import shlex
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from callyard.cli.run import _describe_going_on, _describe_resume


def describe(*, failed: int, not_run: int, is_complete: bool = False) -> list[str]:
    run = SimpleNamespace(is_finished=False, is_complete=is_complete, failed=failed)
    return _describe_going_on(cast(Any, run), not_run).splitlines()


@pytest.mark.requirement("X88")
@pytest.mark.parametrize(
    ("given", "again"),
    [
        ("run f.py rows.jsonl -o 'an out.jsonl' --force", "run f.py rows.jsonl -o 'an out.jsonl' --resume"),
        ("run -o out.jsonl --resume -- f.py -", "run -o out.jsonl --resume -- f.py -"),
    ],
)
def test_they_can_be_typed(monkeypatch: pytest.MonkeyPatch, given: str, again: str) -> None:
    monkeypatch.setattr(sys, "argv", ["callyard", *shlex.split(given)])
    assert describe(failed=0, not_run=0) == [f"go on with it: callyard {again}"]


def test_rows_that_a_stop_kept_from_running_have_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["callyard", "run", "f.py", "r.jsonl"])
    assert describe(failed=5, not_run=5) == ["go on with it: callyard run f.py r.jsonl --resume"]
    assert describe(failed=6, not_run=5)[1:] == [
        "run again what failed: callyard run f.py r.jsonl --resume --retry-failed"
    ]
    assert describe(failed=1, not_run=0, is_complete=True) == [
        "run again what failed: callyard run f.py r.jsonl --retry-failed"
    ]


@pytest.mark.parametrize(
    ("limit", "text"),
    [(None, "43 failed rows run again"), (3, "43 failed rows, those among the first 3 rows, run again")],
)
def test_failed_rows_behind_a_limit_do_not_run_again(limit: int | None, text: str) -> None:
    plan = SimpleNamespace(failed_before=0, kept_failed=0, again=43, again_unknown=0)
    run = SimpleNamespace(path="out.jsonl", standing=387, plan=plan)
    said = _describe_resume(cast(Any, run), limit)
    assert said == f"going on with out.jsonl: 387 results there stay, {text}"
