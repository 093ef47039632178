"""What lies where in an arena, against a model that remembers every byte's owner."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from callyard.wire.arena import GRAIN_BYTES, ArenaTooSmall, Room, halves

GRAINS = 16
START = 3 * GRAIN_BYTES


class RoomMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.room = Room(START, GRAINS * GRAIN_BYTES)
        self.owners: dict[int, int] = {}
        """By grain of the half: the grant that has it."""
        self.seen: set[int] = set()

    def longest_free(self) -> int:
        longest = run = 0
        for grain in range(GRAINS):
            run = 0 if grain in self.owners else run + 1
            longest = max(longest, run)
        return longest

    @rule(length=st.integers(1, (GRAINS + 1) * GRAIN_BYTES))
    def allocate(self, length: int) -> None:
        grains = -(-length // GRAIN_BYTES)
        if grains > GRAINS:
            with pytest.raises(ArenaTooSmall, match="raise arena_bytes_max"):
                self.room.allocate(length)
            return
        stored = self.room.allocate(length)
        assert (stored is None) == (self.longest_free() < grains), "it is refused when there is no room, and only then"
        if stored is None:
            return
        assert stored.length == length
        assert stored.grant not in self.seen, "a grant is never given twice"
        self.seen.add(stored.grant)
        first, rest = divmod(stored.offset - START, GRAIN_BYTES)
        assert rest == 0
        for grain in range(first, first + grains):
            assert 0 <= grain < GRAINS, "within its half"
            assert grain not in self.owners, "no two overlap"
            self.owners[grain] = stored.grant

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        grant = data.draw(st.sampled_from(sorted({0, *self.seen})))
        grains = sorted(grain for grain, owner in self.owners.items() if owner == grant)
        place = self.room.release(grant)
        if not grains:
            assert place is None, "once"
            return
        assert place == (START + grains[0] * GRAIN_BYTES, len(grains) * GRAIN_BYTES)
        for grain in grains:
            del self.owners[grain]

    @invariant()
    def agrees(self) -> None:
        self.room.check_invariants()
        assert self.room.used_bytes == len(self.owners) * GRAIN_BYTES

    def teardown(self) -> None:
        for grant in list(self.room.live):
            self.room.release(grant)
        self.room.check_invariants()
        assert self.room.used_bytes == 0
        whole = self.room.allocate(GRAINS * GRAIN_BYTES)
        assert whole is not None, "all is free, and one piece again"


TestRoom = pytest.mark.requirement("X95")(RoomMachine.TestCase)


@pytest.mark.requirement("X95")
def test_the_halves_neither_overlap_nor_leave_the_file() -> None:
    for size in (0, 1, GRAIN_BYTES, 2 * GRAIN_BYTES, 3 * GRAIN_BYTES, 1 << 30):
        (first, half), (second, other) = halves(size)
        assert (first, second, half) == (0, half, other)
        assert second + other <= size
