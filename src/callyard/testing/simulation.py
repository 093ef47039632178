"""Seeded simulation: one seed, one fake clock, one heap of due actions, one trace.

A core joins with a *world*: a class that builds the real core, plays everything around it (peers, links, users, time)
by actions on the heap, draws all chance from `Simulation.stream`, and checks the core. `run_world` drives it: faults
for a while, then none, then everything must come to its end. One seed always gives one trace, whatever the process's
hash seed; a failure names its seed and shows the last of the trace.

    class MyWorld:
        def __init__(self, simulation: Simulation) -> None: ...
        ...
    report = run_world(MyWorld, seed=7)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from heapq import heappop, heappush
from random import Random
from typing import Final, Protocol, runtime_checkable

import msgspec

from callyard.testing.clock import FakeClock

TAIL_LINES: Final = 40
Action = Callable[[], None]


class Simulation:
    """The time and the chance of one run. Actions due at the same instant run in the order they were asked for."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.clock = FakeClock()
        self.steps = 0
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._due: list[tuple[int, int, Action]] = []
        self._asked = 0
        self._trace = blake2b(digest_size=16)

    def stream(self, name: str) -> Random:
        """A random source of its own for one part, so that a draw more in one part shifts no other."""
        return Random(f"{self.seed}/{name}")

    def after(self, delay_ms: int, action: Action) -> int:
        """Run `action` in `delay_ms`; returns when that is."""
        due_ms = self.clock.now_ms() + max(0, delay_ms)
        self._asked += 1
        heappush(self._due, (due_ms, self._asked, action))
        return due_ms

    def note(self, line: object) -> None:
        """A line of the trace. Its text must not depend on addresses or hash seeds."""
        text = f"{self.clock.now_ms()} {line!r}"
        self.tail.append(text)
        self._trace.update(text.encode())

    def step(self) -> bool:
        """Run the next action, moving the clock to it unless that has passed. False: nothing is due any more."""
        if not self._due:
            return False
        due_ms, _, action = heappop(self._due)
        self.clock.move_to(max(due_ms, self.clock.now_ms()))  # an action may have burnt time beyond it
        self.steps += 1
        action()
        return True

    @property
    def trace_hash(self) -> str:
        return self._trace.copy().hexdigest()


class World(Protocol):
    """What a core brings to be simulated."""

    faults_until_ms: int
    """Until then faults happen."""

    def start(self) -> None:
        """Put the first actions on the heap."""

    def stop_faults(self) -> None:
        """From now on everything works: what still waits must come to its end."""

    def is_over(self) -> bool:
        """Whether everything came to its end."""

    def check(self) -> None:
        """Raise AssertionError when something is wrong now; called after each action."""

    def check_end(self) -> None:
        """Raise AssertionError when the outcome is wrong, or something was left behind."""


@runtime_checkable
class ClosableWorld(Protocol):
    """A world that holds something of the process's: a loop, a file."""

    def close(self) -> None:
        """Let go of it; called in the end, whatever became of the world."""


class SimulationReport(msgspec.Struct, frozen=True):
    seed: int
    trace_hash: str
    steps: int
    ended_at_ms: int


class SimulationFailed(AssertionError):
    """A world failed its checks. The message has the seed, and the last lines of the trace."""

    def __init__(self, simulation: Simulation, world: str, reason: str) -> None:
        tail = "\n  ".join(simulation.tail)
        super().__init__(
            f"{world} seed {simulation.seed}, step {simulation.steps}, {simulation.clock.now_ms()} ms: {reason}\n"
            f"the last of its trace:\n  {tail}"
        )
        self.seed = simulation.seed


def run_world(
    build: Callable[[Simulation], World], seed: int, *, steps_max: int = 200_000, quiet_ms_max: int = 3_600_000
) -> SimulationReport:
    """Run one seed to its end. Raises `SimulationFailed` for a failed check, or when the world does not end within
    `steps_max` actions, or within `quiet_ms_max` of fake time after the faults stopped."""
    simulation = Simulation(seed)
    name = getattr(build, "__name__", "world")
    world: World | None = None
    try:
        world = build(simulation)
        world.start()
        calm = False
        while not world.is_over():
            if not calm and simulation.clock.now_ms() >= world.faults_until_ms:
                calm = True
                world.stop_faults()
            assert simulation.step(), "nothing is due any more, yet the world is not over"
            world.check()
            assert simulation.steps < steps_max, f"not over after {steps_max} steps"
            late_ms = simulation.clock.now_ms() - world.faults_until_ms
            assert late_ms < quiet_ms_max, f"not over {late_ms} ms after the faults stopped"
        world.check_end()
    except Exception as error:
        raise SimulationFailed(simulation, name, f"{type(error).__name__}: {error}") from error
    finally:
        if isinstance(world, ClosableWorld):
            world.close()
    return SimulationReport(seed, simulation.trace_hash, simulation.steps, simulation.clock.now_ms())
