"""Projects on disk, and an interpreter that forgets what a test imported."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

WriteFiles = Callable[[dict[str, str | bytes]], Path]


@pytest.fixture
def project(tmp_path: Path) -> WriteFiles:
    """Write files below a fresh folder and return it."""

    def write(files: dict[str, str | bytes]) -> Path:
        root = tmp_path / "project"
        for name, content in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else textwrap.dedent(content).encode())
        return root

    return write


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`load_bundle` puts nothing back, as an executor needs; a test process has further tests to run."""
    modules, path, bytecode = dict(sys.modules), list(sys.path), sys.dont_write_bytecode
    yield
    for name in sys.modules.keys() - modules.keys():
        if not name.startswith(("pydantic", "callyard", "numpy")):
            del sys.modules[name]
    sys.path[:] = path
    sys.dont_write_bytecode = bytecode
    importlib.invalidate_caches()
