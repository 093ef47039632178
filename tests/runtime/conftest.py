from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from callyard.clock import MonotonicClock
from callyard.worker.worker import Worker

from .fakes import FakeSpawner

MakeWorker = Callable[..., Any]


class ManualClock:
    """The system's clock plus what the test adds."""

    def __init__(self) -> None:
        self._clock = MonotonicClock()
        self.added_ms = 0

    def now_ms(self) -> int:
        return self._clock.now_ms() + self.added_ms


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A file to bundle; fake processes describe functions of their own and never read it."""
    path = tmp_path / "m.py"
    path.write_text("def effect(): ...\n")
    return path


@pytest.fixture
def make_worker(target: Path) -> MakeWorker:
    """A started Worker whose executors are fakes: `async with make_worker(spawner, executors=1) as worker`."""

    @asynccontextmanager
    async def make(spawner: FakeSpawner, **settings: Any) -> AsyncIterator[Worker]:
        settings = {"executors": 1, "spare_executors": 0, "drain_deadline_ms": 0, "restart_delay_ms": 1, **settings}
        worker = Worker(target, spawner=spawner, on_output=lambda *_: None, **settings)
        await worker.start()
        try:
            yield worker
            if worker._failure is None:
                worker._running().check_invariants()
        finally:
            await worker.close(drain=False)

    return make
