"""What calls tell while they run, on the screen: log lines above the bar, the progress of one call below it.

One way for each line. What functions write to their streams, by `print` or by C code, comes through the executor's
output (`exec-1 | …`, `Screen.say_output`): complete, and also from before and after a call. What they log, by `log()`
or by `logging`, goes to no stream and comes as events, under one level. Events of printed text are therefore not shown
here: they are what the tail of a failed call is made of. Source: call-execution X58, X59.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec
from rich.console import RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from callyard.cli.screen import Screen
from callyard.cli.streams import clean
from callyard.sdk import LEVELS
from callyard.wire.messages import CallEventKind
from callyard.worker.results import TAIL_LINES, CallEvent, RunningCall, show_log

BAR_INTERVAL_S: Final = 0.1
AMOUNT_MAX: Final = 1e15
"""What a call may tell as its progress; beyond it is no amount of anything."""


class Amount(msgspec.Struct, frozen=True):
    """How far a call says it is."""

    done: float
    total: float | None
    message: str

    @classmethod
    def of(cls, value: Any) -> Amount | None:
        """From an event's value, which is the executor's word; None: it is no progress."""
        if not isinstance(value, dict):
            return None
        done, total, message = _read_amount(value.get("done")), value.get("total"), value.get("message", "")
        if done is None or not isinstance(message, str):
            return None
        return cls(done, _read_amount(total), " ".join(clean(message).split()))

    @property
    def fraction(self) -> float | None:
        return min(1.0, self.done / self.total) if self.total else None

    def __str__(self) -> str:
        """`340 of 1,000 (34%), reading`."""
        text = _show_number(self.done)
        if self.total is not None:
            text += f" of {_show_number(self.total)}"
        if self.fraction is not None:
            text += f" ({self.fraction:.0%})"
        return f"{text}, {self.message}" if self.message else text


def _read_amount(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < AMOUNT_MAX:
        return None
    return value


def _show_number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else f"{value:,.2f}"


class Live:
    """The events of a command's calls. `prefixed`: lines name their call. Holds an `Amount` for each call that runs."""

    def __init__(self, screen: Screen, level: str, *, prefixed: bool, keeps_amounts: bool) -> None:
        self.amounts: dict[int, Amount] = {}
        """The latest by call index; of calls that ended until the next look of `describe_longest`."""
        self.told = asyncio.Event()
        """There is an amount."""
        self.hidden: deque[str] = deque(maxlen=TAIL_LINES)
        """The last lines logged below the level."""
        self._screen = screen
        self._level = LEVELS[level]
        self._prefixed = prefixed
        self._keeps_amounts = keeps_amounts

    def on_event(self, event: CallEvent) -> None:
        if event.kind is CallEventKind.PROGRESS:
            amount = Amount.of(event.value) if self._keeps_amounts else None
            if amount is not None:
                self.amounts[event.index] = amount
                self.told.set()
        elif event.kind is CallEventKind.LOG:
            lines = show_log(event).split("\n")
            if LEVELS.get(event.level, LEVELS["info"]) < self._level:
                self.hidden.extend(lines)
                return
            prefix = f"call {event.index} | " if self._prefixed else ""
            for line in lines:
                self._screen.say_line(f"{prefix}{line}")

    def describe_longest(self, running: Sequence[RunningCall]) -> str:
        """`call 12: 340 of 1,000 (34%)`: of those that tell their progress, the call that has run longest."""
        if not self.amounts:
            return ""
        indexes = [call.index for call in running if call.index in self.amounts]
        self.amounts = {index: self.amounts[index] for index in indexes}
        return f"call {indexes[0]}: {self.amounts[indexes[0]]}" if indexes else ""


class NotedProgress(Progress):
    """A bar with a line below it."""

    note = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.note:
            yield Text(self.note, style="dim", no_wrap=True, overflow="ellipsis")


@asynccontextmanager
async def shown_beside(show: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Show something while the body runs; raises what the showing raised, if it ended by itself."""
    shown = asyncio.ensure_future(show)
    try:
        yield
    finally:
        shown.cancel()
        await asyncio.wait([shown])
    if not shown.cancelled():
        shown.result()


@asynccontextmanager
async def shown_amount(screen: Screen, live: Live) -> AsyncIterator[None]:
    """A bar for the one call that the body waits for, from its first word of progress on; on a terminal only."""
    if not screen.is_terminal:
        yield
        return
    async with shown_beside(_show_amount(screen, live)):
        yield


async def _show_amount(screen: Screen, live: Live) -> None:
    await live.told.wait()
    bar = Progress(
        BarColumn(bar_width=16),
        TextColumn("{task.description}", markup=False),
        console=screen.console,
        transient=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with bar:
        row = bar.add_task("", total=None)
        screen.hold_output(True)
        try:
            while True:
                screen.show_held()
                amount = live.amounts[0]
                bar.update(
                    row,
                    total=None if amount.fraction is None else 1.0,
                    completed=amount.fraction or 0,
                    description=str(amount),
                    refresh=True,
                )
                await asyncio.sleep(BAR_INTERVAL_S)
        finally:
            screen.hold_output(False)
