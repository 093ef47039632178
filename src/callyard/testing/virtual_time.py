"""An event loop whose clock jumps: what waits for an hour is over at once, in the same order every time.

    @virtual_time
    async def test_a_deadline() -> None: ...

Time stands still while anything can run, and jumps to the next timer when nothing can. When there is no timer either,
everybody waits for ever: that is a `Deadlock`, not a test that hangs. Threads have no place in it.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from callyard.clock import Timer

P = ParamSpec("P")
T = TypeVar("T")


class Deadlock(AssertionError):
    """Every task waits, and no timer is armed."""


class _JumpingSelector(selectors.DefaultSelector):
    """Never waits: it reports that the time asked for has gone by."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise Deadlock("every task waits, and no timer is armed: nothing will ever happen")
        self.now_s += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Starts at 0 s."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


class VirtualTimers:
    """`callyard.clock.Timers` on the loop that runs here."""

    def now_ms(self) -> int:
        return round(asyncio.get_running_loop().time() * 1_000)

    def call_at(self, at_ms: int, callback: Callable[[], None], /) -> Timer:
        return asyncio.get_running_loop().call_at(at_ms / 1_000, callback)


def run_virtual(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)


def virtual_time(test: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Make a plain function of a coroutine function that runs in virtual time."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return run_virtual(test(*args, **kwargs))

    return run
