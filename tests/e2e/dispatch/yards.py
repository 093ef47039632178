"""What the tests of dispatcher and worker share: both together, and waiting for what another process does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from callyard.dispatch.config import DispatcherConfig
from callyard.dispatch.dispatcher import Dispatcher
from callyard.dispatch.events import DispatchEvent
from callyard.policy.retry import RetryPolicy
from callyard.worker.worker import Worker
from callyard.yard import Yard

TOOLS = Path(__file__).parent / "tools_file.py"
WAIT_S = 60.0
QUICK = RetryPolicy(base_ms=10, factor=1)
ONCE = RetryPolicy(max_attempts=1)


def quiet(*_: object) -> None:
    """Drop what executors print."""


@asynccontextmanager
async def open_yard(
    target: Any = TOOLS, *, dispatching: DispatcherConfig | None = None, store: Any = "memory", **settings: Any
) -> AsyncIterator[Yard]:
    """A yard whose lost executors are replaced at once. Nothing is held when it is left."""
    settings = {"executors": 1, "restart_delay_ms": 1, "max_restarts": 1_000, "on_output": quiet, **settings}
    async with Yard(target, store=store, dispatching=dispatching or DispatcherConfig(retry=QUICK), **settings) as yard:
        yield yard
        await wait_quiet(yard.dispatcher)
        await wait_for(lambda: not busy(yard.worker), "the worker at rest")


def busy(worker: Worker) -> list[str]:
    """What a worker still holds of attempts."""
    runner = worker.runner
    held = [f"running {request_id}" for request_id in runner._running]
    held += [f"pinned {digest}" for digest in runner._pinned]
    held += [f"task {run.plan.task_id}" for run in worker._runs]
    now = worker.statistics()
    counts = {"tasks": now.tasks_active, "calls": now.calls, "inflight": now.inflight, "draining": now.draining}
    return held + [f"{count} {name}" for name, count in counts.items() if count]


async def wait_quiet(dispatcher: Dispatcher) -> None:
    def is_quiet() -> bool:
        now = dispatcher.statistics()
        lines = (now.calls, now.running, now.queued, now.flights, now.owners)
        return lines == (0, 0, 0, 0, 0) and not now.stragglers

    await wait_for(is_quiet, "the dispatcher at rest")


async def wait_for(condition: Callable[[], Any], what: str) -> None:
    try:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"not within {WAIT_S} s: {what}") from None


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


async def assert_still(path: Path, for_s: float = 0.5) -> None:
    """No effect comes any more."""
    before = len(lines(path))
    await asyncio.sleep(for_s)
    assert len(lines(path)) == before


def hear(dispatcher: Dispatcher) -> list[DispatchEvent]:
    events: list[DispatchEvent] = []
    dispatcher.subscribe(events.append)
    return events
