"""Credits and parked batches, in any order of building, settling and taking."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from callyard.policy.credit import ITEM_BYTES, CreditWindow, ReorderBuffer


class Credit(RuleBasedStateMachine):
    """Beside it a naive model: which batches are unsettled, in the buffer, taken; which gave their credit back."""

    @initialize(credits=st.integers(1, 6), parked=st.sampled_from([0, 1_000, 1 << 30]), ordered=st.booleans())
    def start(self, credits: int, parked: int, ordered: bool) -> None:
        self.window = CreditWindow(credits)
        self.buffer: ReorderBuffer[int] = ReorderBuffer(parked, ordered=ordered)
        self.ordered = ordered
        self.produced = 0
        self.unsettled: list[int] = []
        self.held: dict[int, int] = {}
        self.given_back: set[int] = set()
        self.order: list[int] = []

    def in_line(self) -> bool:
        """Whether something waits for the sink alone."""
        return bool(self.held) if not self.ordered else len(self.order) in self.held

    @precondition(lambda self: self.window.is_open)
    @rule()
    def build(self) -> None:
        self.window.take()
        self.unsettled.append(self.produced)
        self.produced += 1

    @precondition(lambda self: self.unsettled)
    @rule(data=st.data(), size=st.integers(0, 500))
    def settle(self, data: st.DataObject, size: int) -> None:
        index = self.unsettled.pop(data.draw(st.integers(0, len(self.unsettled) - 1)))
        waits_for_sink = self.in_line() or index == len(self.order) or not self.ordered
        parked = self.buffer.settle(index, [index], size)
        self.held[index] = size + ITEM_BYTES
        if parked:
            assert not waits_for_sink
            self.given_back.add(index)
            self.window.give_back()

    @rule()
    def take(self) -> None:
        ready = self.buffer.pop_ready()
        assert (ready is not None) == self.in_line()
        if ready is None:
            return
        index, items, owes = ready
        assert (index, list(items)) == (index, [index])
        assert owes == (index not in self.given_back)
        assert not self.ordered or index == len(self.order)
        self.order.append(index)
        del self.held[index]
        if owes:
            self.window.give_back()

    @invariant()
    def bounds(self) -> None:
        if not hasattr(self, "window"):
            return
        out = len(self.unsettled) + len(self.held.keys() - self.given_back)
        assert self.window.outstanding == out <= self.window.credits_max
        parked = sum(size for index, size in self.held.items() if index in self.given_back)
        assert self.buffer.parked_bytes == parked <= self.buffer.parked_bytes_max
        assert len(self.buffer) == len(self.held)

    def teardown(self) -> None:
        """Everything settles and is taken: every batch once, every credit home."""
        if not hasattr(self, "window"):
            return
        for index in list(self.unsettled):
            self.unsettled.remove(index)
            self.held[index] = ITEM_BYTES
            if self.buffer.settle(index, [index], 0):
                self.given_back.add(index)
                self.window.give_back()
        while self.in_line():
            self.take()
        assert sorted(self.order) == list(range(self.produced))
        assert (self.window.outstanding, len(self.buffer), self.buffer.parked_bytes) == (0, 0, 0)


TestCredit = Credit.TestCase
TestCredit.settings = settings(max_examples=150, stateful_step_count=60)
TestCredit.pytestmark = [pytest.mark.requirement("X20", "X76")]
