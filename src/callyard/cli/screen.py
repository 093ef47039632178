"""What a command says: lines on standard error, and on a terminal a bar below them."""

from __future__ import annotations

import os
import stat
import sys
from typing import Final, TextIO, cast

from rich.console import Console

from callyard.cli.streams import StandardError, clean
from callyard.ids import ExecutorId

HELD_LINES_MAX: Final = 10_000
"""Lines of user code that wait for the bar's next turn; the oldest of more are counted and dropped."""


class _Console(Console):
    """Rich's console, but it never hides the cursor: a process killed in between would leave it hidden."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


class Screen:
    """Standard error. Nothing it does raises because nobody reads it."""

    def __init__(self) -> None:
        assert sys.stderr is not None
        self.console: Console = _Console(
            file=cast(TextIO, StandardError(sys.stderr)), markup=False, highlight=False, emoji=False, soft_wrap=True
        )
        self.is_terminal = sys.stderr.isatty() and not self.console.is_dumb_terminal
        """A bar can be drawn. Not by the environment: FORCE_COLOR is no terminal."""
        self._holding = False
        self._held: list[str] = []
        self._dropped = 0

    def say(self, text: str, style: str | None = None) -> None:
        self.console.print(clean(text), style=style)

    def say_output(self, executor_id: ExecutorId, line: str) -> None:
        """A line that user code printed."""
        self.say_line(f"{executor_id} | {line}")

    def say_line(self, line: str) -> None:
        """A line of user code. Beside a bar it waits for the bar's next turn."""
        text = clean(line)
        if not self._holding:
            self.console.file.write(f"{text}\n")
            return
        if len(self._held) == HELD_LINES_MAX:
            self._held.clear()
            self._dropped += HELD_LINES_MAX
        self._held.append(text)

    def hold_output(self, holding: bool) -> None:
        """While a bar is shown, lines of user code are written by `show_held`."""
        self._holding = holding
        self.show_held()

    def show_held(self) -> None:
        if self._dropped:
            self.say(f"({self._dropped:,} lines that the functions printed are not shown)", style="dim")
            self._dropped = 0
        if self._held:
            self.console.print("\n".join(self._held))
            self._held.clear()


def is_plain_file(file: int | str) -> bool:
    """A file, or /dev/null, by path or descriptor: nothing that would appear on a terminal beside a bar."""
    info = os.stat(file)
    return stat.S_ISREG(info.st_mode) or os.path.samestat(info, os.stat(os.devnull))
