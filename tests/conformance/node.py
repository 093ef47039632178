"""Where the pinned Node packages are: the conformance suite, the inspector, pyright, and the Node that they need."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ENVIRONMENT = "CALLYARD_NODE_DIR"
CALLYARD = [sys.executable, "-c", "from callyard.cli import main; main()"]
"""The command, in the Python of the tests."""
HERE = Path(__file__).parent
_DEFAULT = HERE.parent.parent / "build" / "node"


def find_packages() -> Path:
    """The folder `node_modules`. Skips the test where nobody installed it; where it was said to be it has to be."""
    said = os.environ.get(ENVIRONMENT)
    folder = Path(said) if said else _DEFAULT
    packages = folder / "node_modules"
    if not (packages / "node" / "bin" / "node").exists():
        where = f"no Node packages in {folder}: copy tests/conformance/package*.json and .npmrc there and run `npm ci`"
        if said:
            pytest.fail(where)
        pytest.skip(f"{where}, or say with {ENVIRONMENT} where they are")
    return packages


def node_command(packages: Path, program: str) -> list[str]:
    return [str(packages / "node" / "bin" / "node"), str(packages / ".bin" / program)]


def node_environment(home: Path) -> dict[str, str]:
    """`home`: what a Node program writes of its own goes there."""
    return {**os.environ, "HOME": str(home), "NO_COLOR": "1"}
