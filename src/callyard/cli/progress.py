"""How a run shows itself while it goes on: a bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import asyncio
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

from callyard.cli.quantities import show_duration
from callyard.worker.results import RunProgress
from callyard.worker.worker import Run, Worker

BAR_INTERVAL_S: Final = 0.1
LINE_INTERVAL_S: Final = 5.0
SLOW_NOTE_S: Final = 30.0
"""After this long without any end, the bar says so."""


async def show_progress(console: Console, worker: Worker, run: Run) -> None:
    """Show the run until cancelled. On a terminal a bar, elsewhere a line every `LINE_INTERVAL_S`."""
    if console.is_terminal:
        await _show_bar(console, worker, run)
    else:
        while True:
            await asyncio.sleep(LINE_INTERVAL_S)
            console.print(_line(run.progress(), worker), soft_wrap=True, highlight=False, markup=False)


async def _show_bar(console: Console, worker: Worker, run: Run) -> None:
    columns = (
        SpinnerColumn(),
        BarColumn(bar_width=None),
        TaskProgressColumn(),
        TextColumn("{task.fields[counts]}"),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[load]}", style="dim"),
    )
    with Progress(*columns, console=console, transient=True, refresh_per_second=10) as bar:
        row = bar.add_task("", total=None, counts="starting", load="")
        while True:
            progress = run.progress()
            fraction = _fraction(progress)
            bar.update(
                row,
                total=None if fraction is None else 1.0,
                completed=0 if fraction is None else fraction,
                counts=_counts(progress),
                load=_load(worker),
            )
            await asyncio.sleep(BAR_INTERVAL_S)


def _fraction(progress: RunProgress) -> float | None:
    """Part done, 0..1: by rows where their number is known, else by the bytes read of the rows that ended."""
    if progress.total:
        return progress.finished / progress.total
    if progress.read_fraction is None or not progress.committed:
        return None
    return progress.read_fraction * progress.finished / progress.committed


def _counts(progress: RunProgress) -> str:
    ok = progress.finished - progress.failed
    rate = progress.finished * 1_000 / progress.elapsed_ms if progress.elapsed_ms else 0.0
    failed = f" [red]{progress.failed:,} failed[/red]" if progress.failed else ""
    return f"{ok:,} ok{failed} · {rate:,.0f}/s"


def _load(worker: Worker) -> str:
    """Calls at each executor, and slots that have none."""
    return "load " + " ".join(str(slot.inflight) if slot.executor_id else slot.state.lower() for slot in worker.slots())


def _line(progress: RunProgress, worker: Worker) -> str:
    ok = progress.finished - progress.failed
    rate = progress.finished * 1_000 / progress.elapsed_ms if progress.elapsed_ms else 0.0
    fraction = _fraction(progress)
    part = "" if fraction is None else f" ({fraction:.0%})"
    return (
        f"{show_duration(progress.elapsed_ms)}: {ok:,} ok, {progress.failed:,} failed{part}, {rate:,.0f}/s,"
        f" {_load(worker)}"
    )
