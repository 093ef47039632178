"""The public test kit: a fake clock, a fake executor, and seeded simulations of the real cores."""

from callyard.testing.clock import FakeClock
from callyard.testing.executors import Ask, FakeExecutor, Script, SideEffects
from callyard.testing.simulation import Simulation, SimulationFailed, SimulationReport, World, run_world

__all__ = [
    "Ask",
    "FakeClock",
    "FakeExecutor",
    "Script",
    "SideEffects",
    "Simulation",
    "SimulationFailed",
    "SimulationReport",
    "World",
    "run_world",
]
