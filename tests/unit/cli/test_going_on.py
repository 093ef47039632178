"""The command lines that a run says at its end."""

from __future__ import annotations

import shlex
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from callyard.cli.run import _describe_going_on


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
