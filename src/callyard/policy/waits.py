"""Who waits for whom, followed to the end: those of a set who would wait for ever.

Whoever waits, waits for groups: of each group one must end. Source: call-execution X67, X81; tool-dispatch D14.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

W = TypeVar("W")

Groups = Sequence[Sequence[W]]
"""Of each group one must end; no group: it can end by itself."""


def collect_waits(start: Iterable[W], groups_of: Callable[[W], Groups[W]], waits: dict[W, Groups[W]]) -> None:
    """Add to `waits` what these wait for, and what that waits for, and so on."""
    found = list(start)
    while found:
        one = found.pop()
        if one not in waits:
            groups = waits[one] = groups_of(one)
            found += [other for group in groups for other in group]


def find_stuck(waits: dict[W, Groups[W]]) -> set[W]:
    """Those who would wait for ever."""
    stuck = dict.fromkeys(reversed(waits))
    freed = True
    while freed:
        freed = False
        for one in list(stuck):
            if all(any(other not in stuck for other in group) for group in waits[one]):
                del stuck[one]
                freed = True
    return set(stuck)


def can_end(waiter: W, any_of: Sequence[W], groups_of: Callable[[W], Groups[W]]) -> bool:
    """Whether `waiter` comes to its end if it waits for any one of these. Cheap when one can end by itself."""
    if any(not groups_of(one) for one in any_of):
        return True
    waits: dict[W, Groups[W]] = {waiter: (any_of,)}
    collect_waits(any_of, groups_of, waits)
    return waiter not in find_stuck(waits)
