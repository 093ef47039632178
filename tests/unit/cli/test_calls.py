"""Line numbers of a call list, and failures that are alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from callyard.cli.calls import PATTERNS_MAX, CallList, Tally, summarise
from callyard.errors import CallFailure, ErrorKind, Outcome, fail
from callyard.scheduler import CallResult
from callyard.worker.builders import open_source
from callyard.worker.outputs import MemoryOutput


def open_list(path: Path, text: str, limit: int | None = None) -> CallList:
    path.write_text(text)
    return CallList(open_source(path), limit)


@pytest.fixture
def no_calls(tmp_path: Path) -> CallList:
    calls = open_list(tmp_path / "none.jsonl", "")
    assert list(calls.rows()) == []  # which closes the file
    return calls


def failed(index: int, message: str, kind: ErrorKind = ErrorKind.INTERNAL, stack: str = "") -> CallResult:
    return CallResult(index, None, fail(kind, message, attempts=1, stack=stack))


def test_lines_beside_blank_ones_and_rows_of_many_lines(tmp_path: Path) -> None:
    calls = open_list(tmp_path / "a.csv", 'x,y\n1,"a\nb"\n\n2,c\n3,d\n\n\n4,e\n')
    assert [row.index for row in calls.rows()] == [0, 1, 2, 3]
    assert [calls.find_line(index) for index in range(4)] == [2, 5, 6, 9]
    calls.forget_before(2)
    assert [calls.find_line(index) for index in (2, 3)] == [6, 9]


def test_what_is_remembered_is_bounded_by_the_rows_on_their_way(tmp_path: Path) -> None:
    calls = open_list(tmp_path / "a.jsonl", "[1]\n\n" * 10_000)
    sink = Tally(MemoryOutput(), calls)
    for row in calls.rows():
        sink.write([CallResult(row.index, b"1", None)])
        assert len(calls._starts) <= 2


def test_a_limit_takes_no_row_more(tmp_path: Path) -> None:
    calls = open_list(tmp_path / "a.jsonl", "[1]\n" * 100, limit=4)
    rows = calls.rows()
    assert [next(rows).index for _ in range(2)] == [0, 1]
    assert calls.read_fraction is not None
    assert calls.read_fraction >= 0.5
    assert not calls.is_done(2)
    assert len(list(rows)) == 2
    assert (calls.read_fraction, calls.is_done(4), calls.is_done(3)) == (1.0, True, False)
    assert list(open_list(tmp_path / "a.jsonl", "[1]\n", limit=0).rows()) == []


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("ValueError: 3 is odd", "ValueError: 1,234.5 is odd", True),
        ("KeyError: 'a'", "KeyError: 'b c'", True),
        ('/x: expected an integer, got text ("two")', '/x: expected an integer, got text ("three")', True),
        ("object at 0x7f12ab", "object at 0x7f12cd", True),
        ("KeyError: 'a'", "IndexError: 'a'", False),
        ("/x: expected an integer", "/y: expected an integer", False),
    ],
)
def test_messages_that_differ_in_numbers_and_quoted_text_only(
    no_calls: CallList, one: str, other: str, alike: bool
) -> None:
    tally = Tally(MemoryOutput(), no_calls)
    tally.write([failed(0, one), failed(1, other)])
    groups, rest = tally.most_frequent(ErrorKind.INTERNAL, 5)
    assert [group.count for group in groups] == ([2] if alike else [1, 1])
    assert (groups[0].index, groups[0].failure.message, rest) == (0, one, 0)


def test_the_most_frequent_are_shown_and_the_rest_counted(no_calls: CallList) -> None:
    tally = Tally(MemoryOutput(), no_calls)
    names = [f"{chr(97 + n // 26)}{chr(97 + n % 26)}" for n in range(PATTERNS_MAX + 20)]
    tally.write([failed(index, f"no {name}") for index, name in enumerate(names)])
    tally.write([failed(900 + n, "no ab") for n in range(3)] + [failed(990, "gone", ErrorKind.CRASHED)])
    groups, rest = tally.most_frequent(ErrorKind.INTERNAL, 2)
    assert [(group.count, group.failure.message) for group in groups] == [(4, "no ab"), (1, "no aa")]
    assert (tally.count(ErrorKind.INTERNAL), rest) == (PATTERNS_MAX + 23, PATTERNS_MAX + 18)
    assert tally.count(ErrorKind.CRASHED) == 1


STACK = """Traceback (most recent call last):
  File "m.py", line 4, in f
    return g(x)
  File "lib/deep.py", line 9, in g
    return json.loads(x)
  File "/usr/lib/python3/json/__init__.py", line 346, in loads
    return _default_decoder.decode(s)
ValueError: no
"""


def test_where_it_happened(tmp_path: Path) -> None:
    calls = open_list(tmp_path / "a.jsonl", "\n[1]\nno\n")
    tally = Tally(MemoryOutput(), calls)
    rows = list(calls.rows())
    bad = rows[1].failure
    assert isinstance(bad, CallFailure)
    tally.write([failed(0, "ValueError: no", stack=STACK), CallResult(1, None, bad)])
    (raised,), _ = tally.most_frequent(ErrorKind.INTERNAL, 5)
    assert (raised.where, raised.message) == ("call 0, line 2", "ValueError: no (lib/deep.py:9)")
    (misfit,), _ = tally.most_frequent(ErrorKind.SCHEMA, 5)
    assert misfit.where == "call 1"
    assert misfit.message.startswith("line 3 is not JSON")


def test_results_reach_the_sink_as_they_are(no_calls: CallList) -> None:
    memory = MemoryOutput()
    results = [CallResult(0, b"1", None), failed(1, "no")]
    Tally(memory, no_calls).write(results)
    assert memory.results == results


def test_what_was_stopped_is_counted_apart(no_calls: CallList) -> None:
    tally = Tally(MemoryOutput(), no_calls)
    stopped = [
        CallResult(n, None, fail(ErrorKind.CANCELLED, "cancelled", outcome=outcome))
        for n, outcome in enumerate([Outcome.UNKNOWN, Outcome.NOT_RUN, Outcome.NOT_RUN])
    ]
    tally.write([*stopped, failed(3, "no")])
    assert (tally.cancelled, tally.not_run) == (1, 2)


def test_what_never_ran_did_not_raise() -> None:
    assert summarise(fail(ErrorKind.INTERNAL, "a")) == "the function raised"
    assert summarise(fail(ErrorKind.INTERNAL, "a", outcome=Outcome.NOT_RUN)) == "the function could not be run"
