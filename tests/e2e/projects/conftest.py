"""Projects as people bring them, each in a folder of its own, and the command run from it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cli.shell import Done, run
from tests.e2e.projects.environments import make_environment

HERE = Path(__file__).parent
CopyProject = Callable[[str], Path]
RunIn = Callable[..., Done]


@pytest.fixture
def copy_project(tmp_path: Path) -> CopyProject:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(HERE / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__")))

    return copy


@pytest.fixture
def callyard(monkeypatch: pytest.MonkeyPatch) -> RunIn:
    """Run the command in a folder, with no environment active."""
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)

    def run_in(folder: Path, *words: str | Path, rows: str = "", **env: str) -> Done:
        # What `shell` took over when it was imported may still name one.
        options: dict[str, Any] = {"cwd": folder, "env": {"VIRTUAL_ENV": "", **env}}
        return run(*words, stdin=rows, **options)

    return run_in


@pytest.fixture(scope="session")
def small_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The interpreter of an environment with what executors import, and nothing else. Not to be changed."""
    folder = tmp_path_factory.mktemp("environments") / "small"
    yield make_environment(folder)
    shutil.rmtree(folder)
