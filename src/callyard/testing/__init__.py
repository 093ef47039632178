"""The public test kit: a fake clock, executor and transport, and seeded simulations of the real cores."""

from callyard.testing.clock import FakeClock
from callyard.testing.executors import Ask, FakeExecutor, Script, SideEffects
from callyard.testing.scripted_transport import ScriptedSource, ScriptedTransport
from callyard.testing.simulation import Simulation, SimulationFailed, SimulationReport, World, run_world

__all__ = [
    "Ask",
    "FakeClock",
    "FakeExecutor",
    "Script",
    "ScriptedSource",
    "ScriptedTransport",
    "SideEffects",
    "Simulation",
    "SimulationFailed",
    "SimulationReport",
    "World",
    "run_world",
]
