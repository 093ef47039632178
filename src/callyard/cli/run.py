"""`callyard run`: a call list from a file to a file."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from rich.console import Console

from callyard.cli.progress import show_progress
from callyard.cli.quantities import show_duration, show_size
from callyard.errors import KIND_RULES
from callyard.functions.registry import Registry
from callyard.ids import ExecutorId
from callyard.scheduler import StopReason
from callyard.worker.builders import CallSource, Row, open_source
from callyard.worker.config import WorkerConfig
from callyard.worker.outputs import Existing, OutputClosed, open_output
from callyard.worker.results import RunSummary
from callyard.worker.worker import Run, Worker
from callyard.yard import only_function, run_sync, split_target

INTERRUPT_GRACE_S: Final = 3.0
"""How long running calls may finish after the first Ctrl-C."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    target: str
    calls: str
    output: str
    budget_ms: int | None
    max_attempts: int | None
    max_failures: int | None
    fail_fast: bool
    limit: int | None
    format: str | None
    existing: Existing
    include: tuple[str, ...]
    settings: Mapping[str, Any]
    quiet: bool
    debug: bool


def run_list(options: RunOptions, console: Console) -> int:
    """Run it; the exit status. Raises UsageError when the command itself was wrong."""
    return run_sync(_run_list(options, console))


class _Interrupts:
    """Ctrl-C and SIGTERM: first let running calls finish for a moment, then stop them; during the start, leave."""

    def __init__(self, console: Console) -> None:
        self.signal_number = 0
        self.run: Run | None = None
        self._console = console
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        again = self.signal_number != 0
        self.signal_number = number
        if self.run is None:
            assert self._task is not None
            self._task.cancel()
        elif again:
            self.run.stop()
        else:
            self._console.print(
                f"stopping: running calls get {INTERRUPT_GRACE_S:.0f} s to finish; once more stops them now",
                style="yellow",
            )
            self.run.stop(cancel_running=False)
            self._loop.call_later(INTERRUPT_GRACE_S, self.run.stop)

    def close(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(number)


async def _run_list(options: RunOptions, console: Console) -> int:
    interrupts = _Interrupts(console)
    try:
        return await _run(options, console, interrupts)
    except asyncio.CancelledError:
        if not interrupts.signal_number:
            raise
        console.print("interrupted before the first call", style="yellow")
        return 128 + interrupts.signal_number
    finally:
        interrupts.close()


async def _run(options: RunOptions, console: Console, interrupts: _Interrupts) -> int:
    path, function = split_target(options.target)
    config = WorkerConfig.from_environment(os.environ, **options.settings)
    registry = Registry.for_target(path, include=options.include)

    def show_output(executor_id: ExecutorId, line: str) -> None:
        console.print(f"{executor_id} | {line}", markup=False, highlight=False, soft_wrap=True)

    async with Worker(registry, config=config, on_output=show_output) as worker:
        name = function or only_function(worker)
        source = open_source(options.calls, format=options.format, named=name is None)
        sink = open_output(options.output, existing=options.existing, source=options.calls)
        limited: CallSource = source if options.limit is None else _Limited(source, options.limit)
        run = worker.open_run(
            name,
            limited,
            sink,
            max_attempts=options.max_attempts,
            budget_ms=options.budget_ms,
            max_failures=options.max_failures,
            fail_fast=options.fail_fast,
        )
        interrupts.run = run
        if not options.quiet:
            budget = "no budget" if options.budget_ms is None else f"budget {show_duration(options.budget_ms)}"
            console.print(f"{len(worker.slots())} executors, {budget} unless a function names one", style="dim")
        shown = asyncio.ensure_future(show_progress(console, worker, run)) if not options.quiet else None
        try:
            summary = await run.wait()
        except OutputClosed:
            return 0  # the reader of our output has seen enough
        finally:
            if shown is not None:
                shown.cancel()
                await asyncio.wait([shown])
        interrupts.run = None if summary.stop_reason is None else run
    if not options.quiet:
        show_summary(console, summary, debug=options.debug)
    if interrupts.signal_number:
        return 128 + interrupts.signal_number
    allowed = options.max_failures or 0
    return 0 if summary.failed <= allowed and summary.stop_reason is None else 1


class _Limited:
    """The first rows of a source."""

    def __init__(self, source: CallSource, limit: int) -> None:
        self.name = source.name
        self.total: int | None = limit if source.total is None else min(limit, source.total)
        self.may_block = source.may_block
        self._source = source

    @property
    def read_fraction(self) -> float | None:
        return None  # of the whole source, which will not be read

    def rows(self) -> Iterator[Row]:
        return islice(self._source.rows(), self.total)


def show_summary(console: Console, summary: RunSummary, *, debug: bool) -> None:
    """Calls, failures by kind with an example each, time, rate, peak memory."""
    console.print(
        f"{summary.calls:,} calls: {summary.ok:,} ok, {summary.failed:,} failed in {show_duration(summary.elapsed_ms)}"
        f" ({summary.calls_per_second:,.0f}/s), worker's peak memory {show_size(summary.peak_memory_bytes)}",
        style="bold",
        highlight=False,
    )
    if summary.stop_reason is not None:
        console.print(f"stopped early: {_STOPPED[summary.stop_reason]}", style="yellow", highlight=False)
    for kind, group in sorted(summary.failures.items(), key=lambda item: -item[1].count):
        failure = group.example
        console.print(f"  {group.count:,} {kind.value}: {KIND_RULES[kind].summary}", style="red", highlight=False)
        line = failure.details.get("line")
        where = f"call {group.example_index}" + (f", line {line}" if line is not None else "")
        console.print(f"      {where}: {failure.message}", markup=False, highlight=False, soft_wrap=True)
        if debug and failure.stack:
            console.print(failure.stack, markup=False, highlight=False, soft_wrap=True)


_STOPPED: Final[Mapping[StopReason, str]] = {
    StopReason.CANCELLED: "interrupted; the calls that ran are in the output",
    StopReason.DEADLINE: "the deadline passed",
    StopReason.SHUTTING_DOWN: "the worker was shut down",
    StopReason.FAIL_FAST: "a call failed, and --fail-fast was given",
    StopReason.MAX_FAILURES: "more calls failed than --max-failures allows",
    StopReason.OUTPUT_BYTES_EXCEEDED: "the outputs held exceeded max_collected_output_bytes",
    StopReason.SINK_FAILED: "the output could not be written",
    StopReason.UNAVAILABLE: "no executor",
}
