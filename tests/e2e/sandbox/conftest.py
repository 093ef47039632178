"""Levels that this machine allows, and the people who may run the tests."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from callyard.worker.config import WorkerConfig
from callyard.worker.sandbox.levels import Level
from callyard.worker.sandbox.machine import try_level

USER_UIDS = range(50_000, 59_000)
"""Each test process has one of its own: limits count per user."""


@pytest.fixture(params=["bwrap", "landlock"])
def level(request: pytest.FixtureRequest) -> str:
    """Each level; skipped, with the reason, where this machine does not allow it."""
    name = str(request.param)
    trial = try_level(Level(name), WorkerConfig().sandbox_limits)
    if not trial.works:
        pytest.skip(f"{name}: {trial.reason}")
    return name


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can reach, unlike `tmp_path`."""
    folder = Path(tempfile.mkdtemp(prefix="callyard-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def user_uid() -> int:
    return USER_UIDS[os.getpid() % len(USER_UIDS)]
