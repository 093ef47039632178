"""The lines with a star in the specification: each maps to exactly one named test, which exists and carries the line.

`starred.txt` has a row for each: the line, and the test that stands for it. Other tests may carry the line as well.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent.parent
MANIFEST = Path(__file__).with_name("starred.txt")
STARRED = [
    6,
    10,
    15,
    19,
    23,
    25,
    26,
    33,
    43,
    52,
    53,
    56,
    57,
    60,
    61,
    63,
    64,
    71,
    75,
    80,
    87,
    88,
    89,
    92,
    *range(102, 107),
]
"""Of job-queue §10."""
NEEDS_A_WIRE = frozenset({"R25", "R26", "R57", "R64", "R102", "R106"})
"""Shown with the sockets, until which their row says `later`."""


def rows() -> list[tuple[str, str]]:
    return [(line, test) for line, test in (row.split() for row in MANIFEST.read_text(encoding="utf-8").splitlines())]


def lines_of(test_id: str) -> set[str]:
    """What the test with this id carries, its class's and module's marks aside. Raises LookupError: there is none."""
    path, *names = test_id.split("::")
    file = ROOT / path
    if not file.is_file():
        raise LookupError(f"{path} is no file")
    found = [
        node
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and [node.name] == names
    ]
    if len(found) != 1:
        raise LookupError(f"{path} has {len(found)} tests of the name {'::'.join(names)}")
    return {
        argument.value
        for mark in found[0].decorator_list
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.requirement"
        for argument in mark.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    }


@pytest.mark.requirement("R105")
def test_each_starred_line_has_one_named_test() -> None:
    assert [line for line, _ in rows()] == [f"R{number}" for number in STARRED]
    named = [test for _, test in rows() if test != "later"]
    assert [test for test, times in Counter(named).items() if times > 1] == []
    wrong: list[str] = []
    for line, test in rows():
        if test == "later":
            wrong += [] if line in NEEDS_A_WIRE else [f"{line} needs no wire: name its test"]
            continue
        try:
            carried = lines_of(test)
        except LookupError as error:
            wrong.append(f"{line}: {error}")
        else:
            wrong += [] if line in carried else [f"{line}: {test} carries {sorted(carried)}"]
    assert wrong == []


def test_what_is_not_there_is_seen() -> None:
    here = "tests/unit/host/test_starred.py"
    assert lines_of(f"{here}::test_each_starred_line_has_one_named_test") == {"R105"}
    for wrong in ("tests/none.py::test_x", f"{here}::test_none", here):
        with pytest.raises(LookupError):
            lines_of(wrong)
