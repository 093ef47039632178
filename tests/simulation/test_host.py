"""The host's simulation. Longer: `python -m callyard.testing.simulate --world host --seeds 0..2000`."""

from __future__ import annotations

from functools import partial

import pytest

from callyard.testing import Simulation, run_world
from callyard.testing import simulate as command
from callyard.testing.host_workload import Faults
from callyard.testing.host_world import HostWorld
from tests.simulation.repeats import assert_repeats

SEEDS = 200
CHUNK = 50


@pytest.mark.requirement("R16", "R22", "R29", "R32", "R43", "R48", "R69", "R71", "R81", "R86", "R93", "R94", "R107")
@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_seeds(first: int) -> None:
    for seed in range(first, first + CHUNK):
        run_world(HostWorld, seed)


@pytest.mark.parametrize("name", Faults.__struct_fields__)
def test_each_fault_alone(name: str) -> None:
    """One kind of fault at a high rate, and nothing else."""
    for seed in range(10):
        run_world(lambda simulation: HostWorld(simulation, Faults(**{name: 0.4})), seed)


@pytest.mark.requirement("R31", "R48")
@pytest.mark.parametrize("seed", [2, 5, 11])
def test_stopped_after_each_step(seed: int) -> None:
    steps = run_world(HostWorld, seed).steps
    for step in range(1, steps):
        run_world(partial(HostWorld, stop_at_step=step), seed)


def test_a_seed_repeats_exactly() -> None:
    assert_repeats(HostWorld)


def test_the_trace_tells_seeds_apart() -> None:
    assert len({run_world(HostWorld, seed).trace_hash for seed in range(5)}) == 5


def test_the_command_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--seeds", "0..2", "--world", "host"]) == 0
    assert capsys.readouterr().out.startswith("3 seeds, ")


def test_the_faults_happen() -> None:
    """A workload in which nothing goes wrong shows little: each fate and each end has its share."""
    fates: set[str] = set()
    outcomes: set[str] = set()
    worlds: list[HostWorld] = []

    def build(simulation: Simulation) -> HostWorld:
        worlds.append(HostWorld(simulation))
        return worlds[-1]

    for seed in range(40):
        run_world(build, seed)
        fates |= set(worlds[-1].book.fates.values())
        outcomes |= {operation.outcome for operation in worlds[-1].book.operations.values()}
    assert fates == {"begun", "unread", "dropped", "refused", "held", "taken", "control", "discarded", "cancelled"}
    assert outcomes >= {"done", "cancelled", "DEADLINE_EXCEEDED", "CAPACITY_EXCEEDED", "NOT_FOUND", "SHUTTING_DOWN"}
    assert sum(world.parts.moves.status().done for world in worlds) > 10
    assert sum(world.parts.moving.status().replayed for world in worlds) > 100
    assert sum(len(world.book.transitions) for world in worlds) > 100
    assert sum(family.admitted for world in worlds for family in world.parts.waiters.status().values()) > 10
