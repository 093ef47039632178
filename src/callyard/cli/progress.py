"""How a run shows itself while it goes on: a bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

from rich.progress import BarColumn, TextColumn

from callyard.cli.live import BAR_INTERVAL_S, NotedProgress
from callyard.cli.quantities import show_duration
from callyard.cli.screen import Screen
from callyard.worker.pool import SlotState, SlotView
from callyard.worker.results import RunningCall, RunProgress

LOOK_INTERVAL_S: Final = 0.5
LINE_INTERVAL_MS: Final = 5_000
SLOW_NOTE_MS: Final = 30_000
"""After this long without any completion a line names what runs; the next after twice as long. Source: X89."""
RATE_WINDOW_MS: Final = 5_000
SLOTS_SHOWN_MAX: Final = 8


class WorkerView(Protocol):
    """What is shown of a worker."""

    def slots(self) -> Sequence[SlotView]: ...
    def running(self) -> Sequence[RunningCall]: ...
    @property
    def last_loss(self) -> str: ...


class RunView(Protocol):
    """What is shown of a run."""

    def progress(self) -> RunProgress: ...


class Watch:
    """Says what goes on where counts alone would not: nothing ends, or executors keep dying."""

    def __init__(self, worker: WorkerView) -> None:
        self._worker = worker
        self._finished = -1
        self._quiet_from_ms = 0
        self._next_note_ms = SLOW_NOTE_MS
        self._told_of_pause = False

    def look(self, progress: RunProgress) -> Iterator[str]:
        """What to say now, if anything."""
        if note := self._find_pause():
            yield note
        if progress.finished != self._finished or progress.inflight == 0:
            self._finished = progress.finished
            self._quiet_from_ms = progress.elapsed_ms
            self._next_note_ms = SLOW_NOTE_MS
        elif progress.elapsed_ms - self._quiet_from_ms >= self._next_note_ms:
            self._next_note_ms *= 2
            yield self._describe_quiet(progress.elapsed_ms - self._quiet_from_ms)

    def _find_pause(self) -> str:
        slots = self._worker.slots()
        paused = sum(slot.state == SlotState.BACKOFF for slot in slots)
        told, self._told_of_pause = self._told_of_pause, paused > 0
        if not paused or told:
            return ""
        return (
            f"{paused} of {len(slots)} executors pause before they start again: they keep ending before they finish a"
            f" call. The last one: {self._worker.last_loss}. (--max-failures N stops a run that fails too often)"
        )

    def _describe_quiet(self, quiet_ms: int) -> str:
        running = self._worker.running()
        text = f"no call has ended for {show_duration(quiet_ms)}: "
        if not running:
            return text + "none runs yet"
        names = Counter(call.function for call in running)
        calls = ", ".join(f"{count:,} of {name}" for name, count in names.most_common(3))
        oldest = running[0]
        return (
            f"{text}{calls} run; the longest is call {oldest.index} ({oldest.function}, {oldest.executor_id})."
            " --budget 30s would end such calls; Ctrl-C ends the run"
        )


class Pace:
    """Completions a second over the last `RATE_WINDOW_MS`."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, int]] = deque()

    def measure(self, progress: RunProgress) -> float:
        seen = self._seen
        seen.append((progress.elapsed_ms, progress.finished))
        while len(seen) > 2 and seen[1][0] <= progress.elapsed_ms - RATE_WINDOW_MS:
            seen.popleft()
        (from_ms, before), (to_ms, now) = seen[0], seen[-1]
        return (now - before) * 1_000 / (to_ms - from_ms) if to_ms > from_ms else 0.0


def find_fraction(progress: RunProgress) -> float | None:
    """Part done, 0..1: by rows where their number is known, else by the bytes read of the rows that ended."""
    if progress.total:
        return progress.finished / progress.total
    if progress.read_fraction is None or not progress.committed:
        return None
    return progress.read_fraction * progress.finished / progress.committed


def describe_counts(progress: RunProgress, rate: float) -> str:
    """`12,345 ok, 67 failed, 8,900/s, about 12 s left`."""
    parts = [f"{progress.finished - progress.failed:,} ok"]
    if progress.failed:
        parts.append(f"{progress.failed:,} failed")
    parts.append(f"{rate:,.0f}/s" if rate >= 10 or rate == 0 else f"{rate:.1f}/s")
    fraction = find_fraction(progress)
    if rate and fraction and fraction < 1:
        left_s = math.ceil(progress.elapsed_ms * (1 - fraction) / fraction / 1_000)
        parts.append(f"about {show_duration(left_s * 1_000)} left")
    return ", ".join(parts)


def describe_load(slots: Sequence[SlotView]) -> str:
    """`load 128 97`: calls at each executor; slots that wait for a new process are counted."""
    loads = [slot.inflight for slot in slots if slot.executor_id]
    shown = " ".join(map(str, loads)) if len(loads) <= SLOTS_SHOWN_MAX else f"{sum(loads):,} at {len(loads)} executors"
    paused = sum(slot.state == SlotState.BACKOFF for slot in slots)
    starting = len(slots) - len(loads) - paused
    parts = [f"load {shown}"] if loads else []
    parts += [f"{starting} restarting"] if starting else []
    parts += [f"{paused} paused"] if paused else []
    return ", ".join(parts)


Describe = Callable[[Sequence[RunningCall]], str]
"""What to say of the calls that run, the one that has run longest first."""


async def show_progress(
    screen: Screen, worker: WorkerView, run: RunView, *, bar: bool, lines: bool, describe: Describe
) -> None:
    """Show the run until cancelled: a bar, with `describe` below it, or a plain line now and then, or neither but what
    `Watch` has to say."""
    if bar:
        await _show_bar(screen, worker, run, describe)
        return
    watch, pace = Watch(worker), Pace()
    pace.measure(run.progress())
    line_at_ms = LINE_INTERVAL_MS
    while True:
        await asyncio.sleep(LOOK_INTERVAL_S)
        progress = run.progress()
        for note in watch.look(progress):
            screen.say(note, style="yellow")
        if lines and progress.elapsed_ms >= line_at_ms:
            line_at_ms = progress.elapsed_ms + LINE_INTERVAL_MS
            fraction = find_fraction(progress)
            part = "" if fraction is None else f" ({fraction:.0%})"
            counts = describe_counts(progress, pace.measure(progress))
            screen.say(f"{show_duration(progress.elapsed_ms)}{part}: {counts}; {describe_load(worker.slots())}")


async def _show_bar(screen: Screen, worker: WorkerView, run: RunView, describe: Describe) -> None:
    watch, pace = Watch(worker), Pace()
    columns = (
        BarColumn(bar_width=16),
        TextColumn("{task.fields[part]}"),
        TextColumn("{task.fields[counts]}"),
        TextColumn("{task.fields[load]}", style="dim"),
    )
    with NotedProgress(
        *columns,
        console=screen.console,
        transient=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as bar:
        row = bar.add_task("", total=None, part="", counts="", load="")
        screen.hold_output(True)
        try:
            while True:
                progress = run.progress()
                for note in watch.look(progress):
                    screen.say(note, style="yellow")
                screen.show_held()
                fraction = find_fraction(progress)
                bar.note = describe(worker.running())
                bar.update(
                    row,
                    total=None if fraction is None else 1.0,
                    completed=fraction or 0,
                    part="" if fraction is None else f"{fraction:4.0%}",
                    counts=describe_counts(progress, pace.measure(progress)),
                    load=describe_load(worker.slots()),
                    refresh=True,
                )
                await asyncio.sleep(BAR_INTERVAL_S)
        finally:
            screen.hold_output(False)
