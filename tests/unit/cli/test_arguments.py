"""The words after `callyard call FILE.py:FUNCTION`."""

from __future__ import annotations

import pytest

from callyard import UsageError
from callyard.cli.call import parse_arguments, parse_json


def test_words() -> None:
    assert parse_arguments(["x=1", "name=a=b", "empty="]) == {"x": "1", "name": "a=b", "empty": ""}
    assert parse_arguments([]) == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["x"], "expected NAME=VALUE, got 'x'; for other arguments use --json"),
        (["=1"], "expected NAME=VALUE, got '=1'"),
        (["a-b=1"], "expected NAME=VALUE, got 'a-b=1'"),
        (["x=1", "x=2"], "argument 'x' is given twice"),
    ],
)
def test_words_that_are_no_arguments(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_arguments(words)


@pytest.mark.parametrize(("text", "args"), [('{"x": 1}', {"x": 1}), ("[1, null]", [1, None])])
def test_json(text: str, args: object) -> None:
    assert parse_json(text, []) == args


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "--json is no JSON: .*; expected an object or an array, got '{'"),
        ("[" * 100_000, "--json is no JSON"),
        ("\udcff", "--json is no JSON"),
        ("3", r"--json must be an object \(by name\) or an array \(by position\), got '3'"),
    ],
)
def test_json_that_is_no_arguments(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_json(text, [])


def test_words_and_json_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="as NAME=VALUE words or by --json, not both"):
        parse_json("{}", ["x=1"])
