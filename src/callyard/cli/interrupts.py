"""Ctrl-C, SIGTERM and a closed terminal: the first asks, the second stops, the next one leaves.

Until a command has something to lose, a signal ends the process at once. The handlers are Python's own and not the
event loop's: they run even while the loop stands in a write that nobody takes. Executors end with this process, however
it ends.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, Final, TypeVar

T = TypeVar("T")

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))
SAME_PRESS_S: Final = 0.2
"""Signals closer than this are one: `timeout` and terminals send it to the process and to its group."""
STUCK_S: Final = 1.0
"""The loop did not hear of a signal for so long: it waits in a write, and will not stop by itself."""


def leave_on_signals() -> None:
    """For the start-up. A signal that is ignored (nohup, a background job) stays so."""
    _install(_leave)


def exit_status(number: int) -> int:
    """As shells count: 130 for SIGINT, 143 for SIGTERM, 129 for SIGHUP."""
    return 128 + number


def _install(handler: Callable[[int, FrameType | None], None]) -> None:
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def _leave(number: int, _: FrameType | None) -> None:
    os._exit(exit_status(number))


class Interrupts:
    """Signals while a coroutine works. Without a handler of its own the first one cancels it, the second leaves."""

    def __init__(self) -> None:
        self.number = 0
        """The last signal; 0: there was none."""
        self.handler: Callable[[int], None] = self._cancel
        """Called on the loop with how many signals there were by now, from 1."""
        self._count = 0
        self._at_s = 0.0
        self._heard = True
        self._cancel_work: Callable[[], object] | None = None
        self._call_soon: Callable[[Callable[[], None]], object] | None = None

    async def run(self, work: Coroutine[Any, Any, int], on_cancelled: Callable[[str], None]) -> int:
        """The exit status of `work`, or that of the signal that cancelled it, which is told in a word."""
        import asyncio

        aio_task = asyncio.ensure_future(work)
        self._cancel_work = aio_task.cancel
        self._call_soon = asyncio.get_running_loop().call_soon_threadsafe
        _install(self._catch)
        try:
            return await aio_task
        except asyncio.CancelledError:
            if not self.number:
                raise
            on_cancelled("interrupted" if self.number == signal.SIGINT else "terminated")
            return exit_status(self.number)
        finally:
            _install(_leave)

    def leaving(self, work: Callable[[], T]) -> T:
        """`work` holds up the loop for as long as it likes, as to open a named pipe does that has no other end yet, and
        has nothing to lose: a signal ends the process at once."""
        _install(_leave)
        try:
            return work()
        finally:
            _install(self._catch)

    def _catch(self, number: int, _: FrameType | None) -> None:
        now_s = time.monotonic()
        passed_s = now_s - self._at_s
        if self._count and passed_s < (SAME_PRESS_S if self._heard else STUCK_S):
            return
        if not self._heard:
            self.leave()
        self._at_s, self.number, self._heard = now_s, number, False
        self._count += 1
        assert self._call_soon is not None
        self._call_soon(self._hear)

    def _hear(self) -> None:
        self._heard = True
        self.handler(self._count)

    def _cancel(self, count: int) -> None:
        if count > 1:
            self.leave()
        assert self._cancel_work is not None
        self._cancel_work()

    def leave(self) -> None:
        """End the process at once."""
        os._exit(exit_status(self.number))
