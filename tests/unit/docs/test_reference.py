"""The reference pages say what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tools.settings_table import build_table

from callyard.errors import KIND_RULES, ErrorKind

DOCS = Path(__file__).parents[3] / "docs"


def test_errors_page_holds_the_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (\w+) \| (\w+) \| (-\d+) \| (\d+) \|$", _read("errors.md"), re.M)
    assert [row[0] for row in rows] == [kind.value for kind in ErrorKind]
    for name, summary, outcome, retried, code, status in rows:
        rule = KIND_RULES[ErrorKind(name)]
        assert (summary, outcome, retried) == (rule.summary, rule.outcome.value, rule.retried.value)
        assert (int(code), int(status)) == (rule.jsonrpc_code, rule.http_status)


@pytest.mark.requirement("X73")
def test_settings_page_is_the_generated_table() -> None:
    assert _read("settings.md") == build_table(), "run: python tools/settings_table.py > docs/reference/settings.md"


def _read(name: str) -> str:
    return (DOCS / "reference" / name).read_text()
