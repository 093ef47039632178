"""Long runs of the simulations from the command line.

    python -m callyard.testing.simulate --seeds 1000..2000
    python -m callyard.testing.simulate --seeds 1234 --world dispatch

Prints what failed with its seed; exit status 0: all held, 1: some seed failed, 2: the command itself was wrong.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from typing import Final

from callyard.testing.dispatch_world import DispatchWorld
from callyard.testing.fairness_world import FairnessWorld
from callyard.testing.host_world import HostWorld
from callyard.testing.scheduler_world import SchedulerWorld
from callyard.testing.simulation import Simulation, SimulationFailed, World, run_world

WORLDS: Final[Mapping[str, Callable[[Simulation], World]]] = {
    "dispatch": DispatchWorld,
    "fairness": FairnessWorld,
    "host": HostWorld,
    "scheduler": SchedulerWorld,
}
"""Every core that joined, by name."""


def parse_seeds(text: str) -> range:
    """`1000..2000` includes both ends; a single number is one seed."""
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected seeds like 1000..2000 or 7, got {text!r}")
    first = int(match[1])
    last = first if match[2] is None else int(match[2])
    if last < first:
        raise argparse.ArgumentTypeError(f"seeds {text} end before they start")
    return range(first, last + 1)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m callyard.testing.simulate", description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=parse_seeds, default=range(100), help="1000..2000, or one number")
    parser.add_argument("--world", choices=sorted(WORLDS), action="append", help="which core; all by default")
    parser.add_argument("--keep-going", action="store_true", help="do not end at the first seed that fails")
    options = parser.parse_args(arguments)
    failed = steps = 0
    for name in options.world or sorted(WORLDS):
        for seed in options.seeds:
            try:
                steps += run_world(WORLDS[name], seed).steps
            except SimulationFailed as failure:
                print(failure, file=sys.stderr)
                failed += 1
                if not options.keep_going:
                    return 1
    print(f"{len(options.seeds)} seeds, {steps} steps, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
