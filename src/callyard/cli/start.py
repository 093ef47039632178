"""What every command begins with: a worker with the environment's settings, and signals that end it cleanly."""

from __future__ import annotations

import asyncio
import gc
import os
import tomllib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from callyard.cli.interrupts import Interrupts
from callyard.cli.quantities import show_duration
from callyard.cli.screen import Screen
from callyard.errors import UsageError
from callyard.functions.registry import Registry
from callyard.worker.config import WorkerConfig
from callyard.worker.interpreter import package_finder
from callyard.worker.io.config import IoConfig
from callyard.worker.sandbox.report import summarize
from callyard.worker.worker import Worker
from callyard.yard import run_sync

SLOW_START_S: Final = 5.0
"""An import that takes longer is mentioned, and again after twice as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How a command's executors are started."""

    include: tuple[str, ...]
    settings: Mapping[str, Any]
    """Of `WorkerConfig`, over those of the environment."""
    quiet: bool = False
    audit: str | None = None
    """A policy in words; see `parse_policy`."""
    audit_log: Path | None = None
    io: Path | None = None
    """A TOML file with the table `[io]`."""

    def is_trusted(self, config: WorkerConfig) -> bool:
        """Whether the target may say what else is run: its environment, its packages."""
        return config.sandbox_choice == "off" and self.audit is None and self.audit_log is None


def run_command(work: Callable[[Interrupts], Coroutine[Any, Any, int]], screen: Screen) -> int:
    """The exit status of `work`, or that of the signal that ended it before there was anything to keep."""

    async def run() -> int:
        interrupts = Interrupts()
        return await interrupts.run(work(interrupts), lambda word: screen.say(word, style="yellow"))

    return run_sync(run())


@asynccontextmanager
async def started_worker(
    target: str | Path, setup: Setup, screen: Screen, *, only_describe: bool = False
) -> AsyncIterator[Worker]:
    """A worker on a target. Raises UsageError when the target, or a setting, is wrong."""
    config = WorkerConfig.from_environment(os.environ, **setup.settings)
    worker = Worker(
        registry_of(target, setup, config),
        config=config,
        on_output=screen.say_output,
        audit=setup.audit,
        audit_log=setup.audit_log,
        io=None if setup.io is None else read_io(setup.io),
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


def read_io(path: Path) -> IoConfig:
    """The table `[io]` of a TOML file; its relative paths start from the file's folder. Raises UsageError."""
    try:
        with path.open("rb") as file:
            settings = tomllib.load(file)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is no TOML: {error}") from error
    table = settings.get("io")
    if not isinstance(table, dict):
        raise UsageError(f"{path}: expected a table [io], such as [io.files] with a line data = '/srv/data'")
    try:
        return IoConfig.from_mapping(table, path.absolute().parent)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


async def _say_slow_start(screen: Screen, name: str, config: WorkerConfig) -> None:
    limit = show_duration(config.start_timeout_ms)
    passed_s = 0.0
    while True:
        wait_s = max(SLOW_START_S, passed_s)
        await asyncio.sleep(wait_s)
        passed_s += wait_s
        screen.say(f"still importing {name} after {passed_s:.0f} s; --start-timeout is {limit}", style="dim")
