"""The reference pages say what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tools.settings_table import build_table

from callyard.dispatch.loop_event import LOOP_EVENTS, Replan
from callyard.dispatch.outcomes import DispatchError
from callyard.errors import KIND_RULES, ErrorKind, Retried, fail
from callyard.ids import CallId

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.requirement("D23")
@pytest.mark.requirement("D25")
def test_errors_page_holds_the_table() -> None:
    row = r"^\| `(\w+)` \| (.+?) \| (\w+) \| (\w+) \| (-\d+) \| (\d+) \| (\w+) \| (\w+) \|$"
    rows = re.findall(row, _read("errors.md"), re.M)
    assert [row[0] for row in rows] == [kind.value for kind in ErrorKind]
    for name, summary, outcome, retried, code, status, event, replan in rows:
        rule = KIND_RULES[ErrorKind(name)]
        assert (summary, outcome, retried) == (rule.summary, rule.outcome.value, rule.retried.value)
        assert (int(code), int(status)) == (rule.jsonrpc_code, rule.http_status)
        assert (event, replan) == LOOP_EVENTS[ErrorKind(name)]


@pytest.mark.requirement("D22")
def test_errors_page_names_the_fields_of_the_envelope() -> None:
    failure = fail(ErrorKind.TIMEOUT, "late", stack="Traceback …")
    envelope = DispatchError(CallId("c1"), failure, deduplicated=True).to_json(stack=True)
    section = _read("errors.md").partition("## Of a dispatch")[2].partition("| replan |")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.M) == list(envelope)


@pytest.mark.requirement("D25")
def test_errors_page_explains_every_word_of_the_table() -> None:
    page = _read("errors.md")
    for word in (*Retried, *Replan):
        assert re.search(rf"^\| `{word.value}` \|", page, re.M), word


@pytest.mark.requirement("X73")
def test_settings_page_is_the_generated_table() -> None:
    assert _read("settings.md") == build_table(), "run: python tools/settings_table.py > docs/reference/settings.md"


def _read(name: str) -> str:
    return (DOCS / "reference" / name).read_text()
