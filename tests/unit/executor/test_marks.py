"""The begun-mark page, as the executor uses it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from callyard.executor.marks import MARK_BYTES, MarkPage
from callyard.ids import CallNumber


@pytest.fixture
def page(tmp_path: Path) -> MarkPage:
    path = tmp_path / "page"
    path.write_bytes(bytes(MARK_BYTES * 9))  # four calls at once
    return MarkPage(os.open(path, os.O_RDWR))


def test_there_are_no_more_calls_than_half_of_the_slots(page: MarkPage) -> None:
    assert page.slot_count == 4
    slots = [page.take() for _ in range(5)]
    assert slots[4] is None
    assert slots[0] is not None
    page.give_back([slots[0]])
    assert page.take() not in slots


@pytest.mark.requirement("X62", "X88")
def test_slots_are_used_in_turn(page: MarkPage) -> None:
    """A mark is overwritten only after as many calls came as are here at once: by then the worker has heard of the end
    of the call that left it, so a page that is found after a kill lacks none."""
    used: list[int] = []
    for number in range(1, 25):
        slot = page.take()
        assert slot is not None
        page.mark(slot, CallNumber(number))
        used.append(slot)
        page.give_back([slot])
    for place, slot in enumerate(used):
        assert slot not in used[place + 1 : place + 1 + page.slot_count]
