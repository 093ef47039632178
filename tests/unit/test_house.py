"""The house itself: locks that install anywhere, files that name no registry, the list of the specification's lines."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from callyard.errors import ErrorKind

ROOT = Path(__file__).parent.parent.parent
LOCKS = ["requirements-dev.lock", "requirements-demo.lock"]
MARKER = r"""\(?[a-z_]+\ [<>=!]+\ '[\w.]+'\)?"""
LOCK_LINE = re.compile(
    rf"""[a-z0-9]+(-[a-z0-9]+)*==[\w.]+\ (;\ {MARKER}(\ (and|or)\ {MARKER})*\ )?\\
    |\ {{4}}--hash=sha256:[0-9a-f]{{64}}(\ \\)?""",
    re.VERBOSE,
)
REGISTRY_HOST = re.compile(r"(?:pypi|pythonhosted|npmjs|debian|anaconda|conda)\.(?:org|com|io|net)", re.IGNORECASE)


@pytest.mark.parametrize("name", LOCKS)
def test_lock_holds_pins_and_hashes_only(name: str) -> None:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    assert lines
    assert [line for line in lines if not LOCK_LINE.fullmatch(line)] == []


def project_files() -> list[Path]:
    """What version control tracks, or would; in an unpacked archive, what lies outside build folders."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True
    )
    if listed.returncode == 0:
        files = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    else:
        files = [
            path
            for folder in ("src", "tests", "tools", "docs", "bench", "examples")
            for path in (ROOT / folder).rglob("*")
        ]
        files += ROOT.glob("*")
    return [path for path in files if path.is_file() and "__pycache__" not in path.parts]


def test_no_file_names_a_registry_host() -> None:
    files = project_files()
    assert ROOT / "Makefile" in files
    found = [
        str(path.relative_to(ROOT))
        for path in files
        if REGISTRY_HOST.search(path.read_bytes().decode(errors="replace"))
    ]
    assert found == []


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("requirements_tool", ROOT / "tools" / "requirements.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_line_of_the_specification_is_listed_once(tool: ModuleType) -> None:
    lines = tool.load_lines()
    assert list(lines) == [
        f"{letter}{number}" for letter, count in (("X", 95), ("D", 58), ("R", 126)) for number in range(1, count + 1)
    ]
    assert len((ROOT / "tools" / "spec_lines.txt").read_text(encoding="utf-8").splitlines()) == 279
    assert all(1 <= len(title.split()) <= 8 for title in lines.values())


def test_ranges_name_lines(tool: ModuleType) -> None:
    lines = tool.load_lines()
    assert tool.select(lines, []) == list(lines)
    assert tool.select(lines, ["X48", "X1-X3", "D58"]) == ["X1", "X2", "X3", "X48", "D58"]
    assert tool.select(lines, ["R9-11"]) == ["R9", "R10", "R11"]
    for wrong in ("X0", "X96", "Q1", "12", "X1-D2"):
        with pytest.raises(ValueError, match=wrong.split("-")[0]):
            tool.select(lines, [wrong])


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        ([], "none"),
        (["passed"], "passes"),
        (["passed", "skipped"], "passes"),
        (["skipped"], "skipped"),
        (["passed", "failed"], "fails"),
        (["skipped", "failed"], "fails"),
    ],
)
def test_verdict_of_a_line(tool: ModuleType, outcomes: list[str], verdict: str) -> None:
    assert tool.verdict({f"test_{n}": outcome for n, outcome in enumerate(outcomes)}) == verdict


SAMPLE = """
import pytest

@pytest.mark.requirement("X1", "X2")
def test_good(): pass

@pytest.mark.requirement("X2")
@pytest.mark.parametrize("n", [1, 2])
def test_sometimes(n): assert n == 1

@pytest.mark.requirement("X3")
def test_skipped(): pytest.skip("not here")

@pytest.mark.requirement("X4")
def test_broken_fixture(nothing): pass

def test_other(): assert False
"""


def run_sample(tmp_path: Path, source: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """tools/requirements.py on a project of one test file, with our conftest and list of lines."""
    for folder in ("tests", "tools"):
        (tmp_path / folder).mkdir()
    (tmp_path / "tests" / "test_sample.py").write_text(source)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = requirement(id): a line\nasyncio_mode = auto\n")
    for name in ("tests/conftest.py", "tools/requirements.py", "tools/spec_lines.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    return subprocess.run(
        [sys.executable, tmp_path / "tools" / "requirements.py", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_tool_reports_each_line(tmp_path: Path) -> None:
    done = run_sample(tmp_path, SAMPLE, ["X1-X5"])
    rows = {row.split()[0]: row for row in done.stdout.splitlines() if re.match(r"X\d ", row)}
    assert done.returncode == 1, done.stdout + done.stderr
    assert {line_id: re.findall(r" (passes|fails|skipped|none) ", row)[0] for line_id, row in rows.items()} == {
        "X1": "passes",
        "X2": "fails",
        "X3": "skipped",
        "X4": "fails",
        "X5": "none",
    }
    assert "test_sample.py::test_good" in rows["X1"]
    assert "test_other" not in done.stdout
    assert "5 lines: 1 pass, 2 fail, 1 with skipped tests only, 1 with no test yet" in done.stdout


def test_tool_is_content_when_what_is_covered_passes(tmp_path: Path) -> None:
    done = run_sample(tmp_path, SAMPLE, ["X1", "X9"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 lines: 1 pass, 0 fail, 0 with skipped tests only, 1 with no test yet" in done.stdout


def test_a_test_that_carries_an_unknown_line_fails(tmp_path: Path) -> None:
    done = run_sample(tmp_path, SAMPLE.replace('"X1", "X2"', '"X1", "X222"'), ["X1"])
    assert done.returncode == 1
    assert "spec_lines.txt has no line X222" in done.stdout + done.stderr


def test_unknown_argument_of_the_tool(tmp_path: Path) -> None:
    done = run_sample(tmp_path, SAMPLE, ["X200"])
    assert done.returncode == 2
    assert done.stderr == "requirements: the specification has no line X200\n"


def test_kinds_only_grow() -> None:
    """Removing or renaming a kind breaks every stored record and client; add it here when one is added."""
    assert len(ErrorKind) == 18
