"""Which line of the specification which tests show to be true, and which has none yet.

    python tools/requirements.py              every line
    python tools/requirements.py X1-X13 X48   these lines, and only their tests are run

Runs the tests that carry a line (`@pytest.mark.requirement("X12")`) and prints the verdict of each line. Exit status:
0, or 1 when a line that has tests fails, or when the tests cannot be run at all.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from rich.console import Console
from rich.markup import escape
from rich.table import Table

ROOT = Path(__file__).parent.parent
SPEC_LINES = Path(__file__).with_name("spec_lines.txt")

Outcomes = dict[str, dict[str, str]]
"""Line id -> node id of a test -> "passed", "failed" or "skipped"."""


def load_lines() -> dict[str, str]:
    """Line id -> short title, in the specification's order."""
    return dict(row.split(maxsplit=1) for row in SPEC_LINES.read_text(encoding="utf-8").splitlines())


def select(known: Iterable[str], arguments: Iterable[str]) -> list[str]:
    """The ids that `X1-X13 X48` names, all without arguments. Raises `ValueError` for one that no line has."""
    known = list(known)
    chosen: list[str] = []
    for argument in arguments:
        match = re.fullmatch(r"([XDR])(\d+)(?:-\1?(\d+))?", argument)
        if match is None:
            raise ValueError(f"expected a line like X12 or a range like X1-X13, got {argument!r}")
        letter, first, last = match[1], int(match[2]), int(match[3] or match[2])
        chosen += [f"{letter}{number}" for number in range(first, last + 1)]
    unknown = [line_id for line_id in chosen if line_id not in known]
    if unknown:
        raise ValueError(f"the specification has no line {', '.join(unknown)}")
    return [line_id for line_id in known if not chosen or line_id in chosen]


class Collector:
    """A pytest plugin: the worst outcome of each test's phases, by the lines that the test carries."""

    def __init__(self) -> None:
        self.outcomes: Outcomes = defaultdict(dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        outcome = "skipped" if hasattr(report, "wasxfail") else report.outcome
        for name, line_id in report.user_properties:
            if name == "requirement":
                tests = self.outcomes[str(line_id)]
                if tests.get(report.nodeid) != "failed":
                    tests[report.nodeid] = outcome


def verdict(tests: Mapping[str, str]) -> str:
    """`fails` if any test of the line does; `passes` needs one that passed: a skipped test shows nothing."""
    outcomes = set(tests.values())
    if "failed" in outcomes:
        return "fails"
    return "passes" if "passed" in outcomes else "skipped" if outcomes else "none"


def name_tests(tests: Mapping[str, str]) -> list[str]:
    """One entry for each test function that passed, with the count of its cases; one for each case that did not."""
    passed = Counter(node_id.partition("[")[0] for node_id, outcome in tests.items() if outcome == "passed")
    good = [f"{name} ({count} cases)" if count > 1 else name for name, count in passed.items()]
    return sorted(good) + sorted(f"{name} {outcome}" for name, outcome in tests.items() if outcome != "passed")


STYLES = {"passes": "green", "fails": "bold red", "skipped": "yellow", "none": "dim"}


def show(console: Console, lines: Mapping[str, str], chosen: Iterable[str], outcomes: Outcomes) -> dict[str, int]:
    """Print a row for each line and a summary; the count of lines by verdict."""
    table = Table("line", "what it asks", "verdict", "tests", box=None, pad_edge=False)
    table.columns[3].overflow = "fold"
    counts = dict.fromkeys(STYLES, 0)
    for line_id in chosen:
        tests = outcomes.get(line_id, {})
        word = verdict(tests)
        counts[word] += 1
        table.add_row(line_id, escape(lines[line_id]), f"[{STYLES[word]}]{word}", escape("\n".join(name_tests(tests))))
    console.print(table)
    console.print(
        f"{sum(counts.values())} lines: {counts['passes']} pass, {counts['fails']} fail, "
        f"{counts['skipped']} with skipped tests only, {counts['none']} with no test yet"
    )
    return counts


def main(arguments: list[str]) -> int:
    lines = load_lines()
    try:
        chosen = select(lines, arguments)
    except ValueError as error:
        print(f"requirements: {error}", file=sys.stderr)
        return 2
    collector = Collector()
    # All lines asked for, whether or not the filter was given: tests that carry none are not run.
    filters = [f"--requirement={line_id}" for line_id in chosen]
    status = pytest.main(
        [f"--rootdir={ROOT}", f"--confcutdir={ROOT}", "-q", "-n", "auto", *filters, str(ROOT / "tests")],
        plugins=[collector],
    )
    console = Console(width=None if sys.stdout.isatty() else 200, soft_wrap=False)
    console.print()
    counts = show(console, lines, chosen, collector.outcomes)
    ran = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
    if status not in ran:
        console.print("[bold red]The tests could not be run: see above.")
        return 1
    return 1 if counts["fails"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
