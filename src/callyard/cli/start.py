"""What every command begins with: a worker with the environment's settings, and signals that end it cleanly."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from callyard.cli.interrupts import Interrupts
from callyard.cli.quantities import show_duration
from callyard.cli.screen import Screen
from callyard.cli.setup import Setup
from callyard.functions.registry import Registry
from callyard.worker.config import WorkerConfig
from callyard.worker.interpreter import package_finder
from callyard.worker.sandbox.report import summarize
from callyard.worker.worker import Worker
from callyard.yard import run_sync

SLOW_START_S: Final = 5.0
"""An import that takes longer is mentioned, and again after twice as long."""


def run_command(work: Callable[[Interrupts], Coroutine[Any, Any, int]], screen: Screen) -> int:
    """The exit status of `work`, or that of the signal that ended it before there was anything to keep."""

    async def run() -> int:
        interrupts = Interrupts()
        return await interrupts.run(work(interrupts), lambda word: screen.say(word, style="yellow"))

    return run_sync(run())


@asynccontextmanager
async def started_worker(
    target: str | Path,
    setup: Setup,
    screen: Screen,
    *,
    only_describe: bool = False,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[Worker]:
    """A worker on a target. Raises UsageError when the target, or a setting, is wrong."""
    settings = setup.read(target)
    config = settings.config
    if settings.found.note and not setup.quiet:
        screen.say(settings.found.note, style="dim")
    worker = Worker(
        registry_of(target, setup, config),
        config=config,
        on_output=screen.say_output,
        environment=environment,
        audit=setup.audit,
        audit_log=setup.audit_log,
        io=settings.io,
    )
    slow = None if setup.quiet else asyncio.ensure_future(_say_slow_start(screen, worker.registry.bundle.name, config))
    try:
        await worker.start(only_describe=only_describe)
    finally:
        if slow is not None:
            slow.cancel()
    if not worker.interpreter.is_own and not setup.quiet:
        screen.say(worker.interpreter.summarize(), style="dim")
    if config.sandbox_choice != "off" and not setup.quiet:
        screen.say(summarize(worker.sandbox), style="dim")
    gc.freeze()  # what is loaded stays: no full collection has to walk it while calls wait
    try:
        yield worker
    except BaseException:
        await worker.close(drain=False)
        raise
    finally:
        gc.unfreeze()
    await worker.close()


def registry_of(target: str | Path, setup: Setup, config: WorkerConfig) -> Registry:
    """The files of a target, as its interpreter would find them. Raises UsageError."""
    find = package_finder(config.executor_python, trusted=setup.is_trusted(config))
    return Registry.for_target(target, include=setup.include, find_package=find)


async def _say_slow_start(screen: Screen, name: str, config: WorkerConfig) -> None:
    limit = show_duration(config.start_timeout_ms)
    passed_s = 0.0
    while True:
        wait_s = max(SLOW_START_S, passed_s)
        await asyncio.sleep(wait_s)
        passed_s += wait_s
        screen.say(f"still importing {name} after {passed_s:.0f} s; --start-timeout is {limit}", style="dim")
