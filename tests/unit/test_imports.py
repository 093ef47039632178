"""Arrows between folders run one way, and pure folders do no IO.

Reads every import of the package, those inside functions and under TYPE_CHECKING included. import-linter keeps the
same contract in `make lint`; this test also says which line to change.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).parent.parent.parent / "src"
PACKAGE = SOURCE / "callyard"

ANYTHING = frozenset({"*"})
BASE = frozenset({"errors", "ids", "clock"})
CHILD = frozenset({"errors", "ids", "policy", "wire", "functions"})

# What a folder (or top module) may import of ours; itself always. "": the package's own __init__.
ALLOWED = {
    "errors": frozenset(),
    "ids": frozenset(),
    "clock": frozenset(),
    "timers": frozenset({"clock"}),
    "quantities": frozenset(),
    "settings": frozenset({"errors", "quantities"}),
    "extras": frozenset({"errors"}),
    "locks": frozenset(),
    "system": frozenset({"errors"}),
    "cpus": frozenset(),
    "policy": BASE,
    "wire": BASE,
    "functions": BASE | {"locks", "policy", "wire"},
    "scheduler": frozenset({"errors", "ids", "policy"}),
    "sdk": CHILD,
    "sdk_io": CHILD | {"sdk"},
    "sdk_client": CHILD | {"sdk", "sdk_io"},
    "executor": CHILD | {"sdk"},
    "worker": BASE | CHILD | {"cpus", "extras", "quantities", "settings", "system", "scheduler", "executor", "sdk"},
    "futures": CHILD | {"executor", "scheduler", "settings", "worker"},
    "dispatch": BASE | {"extras", "locks", "timers", "policy", "functions"},
    "mcp_tools": frozenset({"errors", "extras", "functions"}),
    "transport": BASE | {"policy"},
    "host": BASE | {"cpus", "timers", "policy", "transport"},
    # Assemblies, and what nothing below them imports.
    **dict.fromkeys(["", "__main__", "yard", "testing", "serve", "cluster", "cli"], ANYTHING),
}

PURE = ["policy", "scheduler", "wire"]
IO = frozenset({"asyncio", "socket", "time", "os", "logging", "threading"})
PURE_CASES = [
    pytest.param(folder, marks=pytest.mark.requirement("X1")) if folder == "scheduler" else folder for folder in PURE
]


class Import(NamedTuple):
    file: Path
    line: int
    module: str
    """Dotted and absolute; for `from a import b` both `a` and `a.b` are listed."""

    def __str__(self) -> str:
        return f"{self.file.relative_to(SOURCE)}:{self.line} imports {self.module}"


def folder_of(file: Path) -> str:
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


def imports_of(file: Path) -> Iterator[Import]:
    package = file.relative_to(SOURCE).parent.parts
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name != "callyard":  # what is then taken from it is seen as an attribute, below
                    yield Import(file, node.lineno, alias.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "callyard":
            yield Import(file, node.lineno, f"callyard.{node.attr}")
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            if module != "callyard":  # `from callyard import x` reaches callyard.x only
                yield Import(file, node.lineno, module)
            for alias in node.names:
                yield Import(file, node.lineno, f"{module}.{alias.name}")


def ours_of(imported: Import) -> str | None:
    """The folder of ours that an import reaches ("": the package's __init__); None: it is not ours."""
    parts = imported.module.split(".")
    if parts[0] != "callyard":
        return None
    name = ".".join(parts[1:2])
    return name if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file() else ""


FILES = sorted(PACKAGE.rglob("*.py"))
FOLDERS = sorted({folder_of(file) for file in FILES})


@pytest.mark.parametrize("folder", FOLDERS)
def test_arrows_run_as_the_table_says(folder: str) -> None:
    assert folder in ALLOWED, f"add {folder!r} to the table, here and in the layers of pyproject.toml"
    allowed = ALLOWED[folder] | {folder}
    wrong = [
        str(imported)
        for file in FILES
        if folder_of(file) == folder
        for imported in imports_of(file)
        if (target := ours_of(imported)) is not None
        and target not in allowed
        and allowed.isdisjoint(ANYTHING)
        # The version is a constant of the package; its other names are the assembly's.
        and imported.module != "callyard.__version__"
    ]
    assert wrong == []


@pytest.mark.parametrize("folder", PURE_CASES)
def test_pure_folder_does_no_io(folder: str) -> None:
    files = [file for file in FILES if folder_of(file) == folder]
    assert files, f"no source in {folder}"
    wrong = [str(imported) for file in files for imported in imports_of(file) if imported.module.split(".")[0] in IO]
    assert wrong == []


def pure_modules_of_the_host() -> set[str]:
    """As the host's design page has them."""
    rows = (SOURCE.parent / "docs" / "design" / "host.md").read_text(encoding="utf-8").splitlines()
    names = [row.split("|")[1].strip(" `") for row in rows if "| yes |" in row]
    return {f"callyard.{name}" if name.startswith("transport.") else f"callyard.host.{name}" for name in names}


def test_pure_modules_of_the_host_do_no_io_and_the_contract_has_each() -> None:
    modules = pure_modules_of_the_host()
    assert {"callyard.transport.port", "callyard.host.jobs", "callyard.host.owners"} <= modules
    settings = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = {each["name"]: each for each in settings["tool"]["importlinter"]["contracts"]}
    listed = set(contracts["The host's pure modules do no IO"]["source_modules"])
    assert modules <= listed
    files = {".".join(file.relative_to(SOURCE).with_suffix("").parts): file for file in FILES}
    wrong = [
        str(imported)
        for module in listed
        for imported in imports_of(files[module])
        if imported.module.split(".")[0] in IO
    ]
    assert wrong == []


def test_table_has_no_cycle() -> None:
    def reach(folder: str, path: tuple[str, ...]) -> None:
        assert folder not in path, " -> ".join([*path, folder])
        for target in ALLOWED[folder] - ANYTHING:
            reach(target, (*path, folder))

    for folder in ALLOWED:
        reach(folder, ())


def test_reader_of_imports_sees_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SOURCE", tmp_path)
    file = tmp_path / "callyard" / "scheduler" / "core.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "import os.path\nfrom ..policy import backoff\nfrom . import calls\n"
        "def f():\n    from time import sleep\n"
        "import callyard\ncallyard.worker\n"
    )
    assert {imported.module for imported in imports_of(file)} == {
        *("os.path", "callyard.policy", "callyard.policy.backoff"),
        *("callyard.scheduler", "callyard.scheduler.calls", "time", "time.sleep", "callyard.worker"),
    }
