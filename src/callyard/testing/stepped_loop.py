"""An event loop that runs what can run and then returns: time, and what happens next, are the simulation's.

    loop = SteppedLoop()
    task = loop.create_task(work())
    loop.settle()

No timer of the loop's own is ever armed: what waits for time asks `SimulatedTimers`, or a future that an action ends.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from typing import Any, Final

from callyard.testing.simulation import Simulation


class _Settled(Exception):
    """Nothing can run."""


STRETCH_MAX: Final = 20_000
"""Rounds of the loop without anything that takes time: more is somebody who spins."""


class _SettlingSelector(selectors.DefaultSelector):
    rounds = 0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if ready or timeout == 0:
            self.rounds += 1
            assert self.rounds < STRETCH_MAX, f"somebody spins: {self.rounds} rounds of the loop, and no end"
            return ready
        assert timeout is None, "a timer was armed beside the simulation's clock"
        raise _Settled


class SteppedLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._settling = _SettlingSelector()
        super().__init__(self._settling)

    def settle(self) -> None:
        """Until nothing can run."""
        self._settling.rounds = 0
        try:
            self.run_forever()
        except _Settled:
            return


class _Timer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self._callback = None

    def fire(self) -> None:
        if self._callback is not None:
            self._callback()


class SimulatedTimers:
    """`callyard.clock.Timers`: each timer is an action of the simulation, after which the loop settles."""

    def __init__(self, simulation: Simulation, loop: SteppedLoop) -> None:
        self._simulation = simulation
        self._loop = loop

    def now_ms(self) -> int:
        return self._simulation.clock.now_ms()

    def call_at(self, at_ms: int, callback: Callable[[], None], /) -> _Timer:
        timer = _Timer(callback)
        self.after(at_ms - self.now_ms(), timer.fire)
        return timer

    def after(self, delay_ms: int, action: Callable[[], object]) -> None:
        """Do `action` in `delay_ms`, and let the loop settle."""
        self._simulation.after(delay_ms, lambda: self.act(action))

    def act(self, action: Callable[[], object]) -> None:
        self._loop.call_soon(action)
        self._loop.settle()

    async def sleep(self, delay_ms: int) -> None:
        """Cancelling it is safe."""
        future = self._loop.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        self.after(delay_ms, wake)
        await future
