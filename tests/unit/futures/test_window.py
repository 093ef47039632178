from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from callyard.futures.window import AHEAD_MS, BYTES_MAX, Window

MS = 1_000_000


def fill(window: Window, size: int = 1) -> int:
    count = 0
    while window.has_room():
        window.enter(size)
        count += 1
    return count


def test_at_first_and_with_long_calls_two_an_executor() -> None:
    window = Window(3)
    assert fill(window) == 6
    for second in range(1, 20):
        window.leave(1, second * 1_000 * MS)
        assert fill(window) == 1


def test_short_calls_get_as_many_as_end_within_the_time() -> None:
    window = Window(2)
    now = 0
    for _ in range(1_000):
        fill(window)
        now += MS // 10  # ten a millisecond
        window.leave(1, now)
    assert fill(window) + window.inflight > 4 + AHEAD_MS * 10 * 0.9
    assert window.inflight <= 4 + AHEAD_MS * 10 * 1.1
    for _ in range(window.inflight):
        now += 10_000 * MS
        window.leave(1, now)
    assert fill(window) == 4, "then they take long"


def test_large_calls_are_held_to_bytes() -> None:
    window = Window(1)
    now = 0
    for _ in range(1_000):
        fill(window)
        now += MS // 10
        window.leave(1, now)
    while window.inflight:
        window.leave(1, now)
    assert fill(window, BYTES_MAX // 8) == 8
    while window.inflight:
        window.leave(BYTES_MAX // 8, now)
    assert fill(window, 10 * BYTES_MAX) == 2, "each executor has one, and one ahead"


@given(st.lists(st.tuples(st.booleans(), st.integers(0, BYTES_MAX), st.integers(0, 100 * MS))))
def test_it_never_has_less_than_two_an_executor(steps: list[tuple[bool, int, int]]) -> None:
    window = Window(2)
    sizes: list[int] = []
    now = 0
    for enters, size, passed in steps:
        now += passed
        if enters and window.has_room():
            window.enter(size)
            sizes.append(size)
        elif sizes:
            window.leave(sizes.pop(), now)
        assert window.inflight == len(sizes)
        assert window.has_room() or window.inflight >= 4
