"""The diagrams of the design pages, drawn from the tables that the code runs on.

    python tools/draw_states.py            prints them
    python tools/draw_states.py --write    puts each into its page, between the marks

A test compares the pages with the tables.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import TypeVar

from callyard.scheduler.calls import CALL_TRANSITIONS

State = TypeVar("State", bound=IntEnum)
Trigger = TypeVar("Trigger", bound=IntEnum)

ROOT = Path(__file__).parent.parent
PAGES = {"docs/design/scheduler.md": ("READY", CALL_TRANSITIONS)}
"""Page -> the first state and the table it shows."""
OPEN, CLOSE = "<!-- states: drawn by tools/draw_states.py -->", "<!-- /states -->"


def draw(first: str, table: Mapping[tuple[State, Trigger], State]) -> str:
    """A mermaid state diagram: an arrow for each pair of states, with all that moves it."""
    arrows: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (before, trigger), after in table.items():
        arrows[before.name, after.name].append(trigger.name.lower())
    ends = {after.name for after in table.values()} - {before.name for before, _ in table}
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {first}"]
    lines += [f"    {before} --> {after}: {', '.join(triggers)}" for (before, after), triggers in arrows.items()]
    lines += [f"    {end} --> [*]" for end in sorted(ends)]
    return "\n".join([*lines, "```"])


def put(text: str, diagram: str) -> str:
    """The page's text with its diagram replaced. Raises ValueError when it has no marks."""
    head, mark, rest = text.partition(OPEN)
    _, end_mark, tail = rest.partition(CLOSE)
    if not mark or not end_mark:
        raise ValueError(f"expected {OPEN} and {CLOSE} in the page")
    return f"{head}{OPEN}\n{diagram}\n{CLOSE}{tail}"


def main(arguments: list[str]) -> int:
    for name, (first, table) in PAGES.items():
        page, diagram = ROOT / name, draw(first, table)
        if arguments == ["--write"]:
            page.write_text(put(page.read_text(encoding="utf-8"), diagram), encoding="utf-8")
        else:
            print(f"{name}\n{diagram}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
