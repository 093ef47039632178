"""A seed repeats in every process, whatever its hash seed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

from callyard.testing import Simulation, World, run_world


def assert_repeats(
    world: Callable[[Simulation], World], seeds: int = 5, hash_seeds: tuple[str, ...] = ("1", "2")
) -> None:
    """Sets and dicts of text are ordered by a hash that each process draws: none of that may reach a command.

    `world`: a class at the top of its module.
    """
    module, name = world.__module__, world.__name__
    program = (
        "from callyard.testing import run_world\n"
        f"from {module} import {name}\n"
        f"print([run_world({name}, seed).trace_hash for seed in range({seeds})])"
    )
    traces = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            text=True,
            timeout=300,
        ).stdout
        for hash_seed in hash_seeds
    }
    assert traces == {f"{[run_world(world, seed).trace_hash for seed in range(seeds)]}\n"}
