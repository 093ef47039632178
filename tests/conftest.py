"""What every test shares: Hypothesis profiles, and the lines of the specification that tests carry.

`@pytest.mark.requirement("X12")` says that a test shows line X12 to be true; `--requirement X12` runs those tests
only. A test with an id that no line has fails: a typo would leave its line without a test, unseen.
"""

from __future__ import annotations

import gc
import os
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

SPEC_LINES = Path(__file__).parent.parent / "tools" / "spec_lines.txt"

# Examples are drawn the same way each time, so that a green run stays green; `long` looks for new ones.
settings.register_profile(
    "ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("long", settings.get_profile("ci"), derandomize=False, max_examples=5_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# Hundreds of executors are started: they share bytecode, also where the environment says to write none.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("PYTHONPYCACHEPREFIX", str(Path(__file__).parent.parent / "build" / "bytecode"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--requirement",
        action="append",
        default=[],
        metavar="ID",
        help="run only the tests that carry this line of the specification (may be given several times)",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = set(config.getoption("--requirement"))
    for item in items:
        # User properties go with each report, from xdist's workers too; tools/requirements.py reads them there.
        item.user_properties.extend(("requirement", line_id) for line_id in sorted(requirements_of(item)))
    if wanted:
        kept = [item for item in items if requirements_of(item) & wanted]
        config.hook.pytest_deselected(items=[item for item in items if not requirements_of(item) & wanted])
        items[:] = kept


def pytest_collection_finish() -> None:
    """What was imported stays: no collection of garbage has to walk it, and tests make many."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    unknown = requirements_of(item) - known_lines()
    if unknown:
        pytest.fail(f"{SPEC_LINES.name} has no line {', '.join(sorted(unknown))}", pytrace=False)


@cache
def known_lines() -> frozenset[str]:
    return frozenset(line.split()[0] for line in SPEC_LINES.read_text(encoding="utf-8").splitlines())


def requirements_of(item: pytest.Item) -> set[str]:
    return {line_id for marker in item.iter_markers("requirement") for line_id in marker.args}
