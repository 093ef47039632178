"""The simulation of tenants: `python -m callyard.testing.simulate --world fairness --seeds 1000..2000`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from callyard.scheduler.tenants import Standing, TenantTurns
from callyard.testing import SimulationFailed, run_world
from callyard.testing.fairness_world import FairnessWorld

pytestmark = pytest.mark.requirement("X17")
SEEDS = 30


@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_seeds(first: int) -> None:
    for seed in range(first, first + 10):
        run_world(FairnessWorld, seed)


def test_one_seed_gives_one_trace() -> None:
    assert run_world(FairnessWorld, 3) == run_world(FairnessWorld, 3)


def serve_whoever_has_most(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Standing, "order", property(lambda one: (-one.inflight, one.served_at, one.tenant)))


def forget_the_longest_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("callyard.scheduler.tenants.AGED_TURNS", 1 << 40)


def keep_the_turn(patch: pytest.MonkeyPatch) -> None:
    whole = TenantTurns.pass_on
    patch.setattr(TenantTurns, "pass_on", lambda self, ring: (whole(self, ring), setattr(self, "_left", 9))[0])


@pytest.mark.parametrize("plant", [serve_whoever_has_most, forget_the_longest_wait, keep_the_turn])
def test_what_is_broken_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    for seed in range(4 * SEEDS):
        try:
            run_world(FairnessWorld, seed)
        except SimulationFailed as failure:
            said = str(failure).partition("\n")[0]
            break
    else:
        pytest.fail("not found")
    assert "bounded_wait" in said
