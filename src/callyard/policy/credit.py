"""The credit window of a streaming call list, and the order in which its batches reach the sink.

Both bound memory: a batch needs a credit before it is built, and gives it back when the sink has taken its outputs, or
when they are parked behind an earlier batch that has not settled, and the park still has room. What waits for the sink
alone is not parked: its credit stays out, so that a slow reader stops production. Source: call-execution X20, X76.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Generic, TypeVar

T = TypeVar("T")

ITEM_BYTES: Final = 256
"""What a parked item costs beside its payload: its object, its number, a failure's text. Without it, a park full of
failures, or of outputs of a byte each, would weigh nothing."""


class CreditWindow:
    """At most `credits_max` batches outstanding, and no further one while they weigh `bytes_max` or more together.

    What a batch weighs is the caller's to say: its arguments while it runs, its outputs from then on. One batch alone
    may weigh anything. `bytes_max` 0: they are not weighed.
    """

    __slots__ = ("bytes_max", "credits_max", "held_bytes", "outstanding")

    def __init__(self, credits_max: int, bytes_max: int = 0) -> None:
        if credits_max < 1:
            raise ValueError(f"need at least one credit, got {credits_max}")
        self.credits_max = credits_max
        self.bytes_max = bytes_max
        self.outstanding = 0
        self.held_bytes = 0

    @property
    def is_open(self) -> bool:
        if self.bytes_max and self.held_bytes >= self.bytes_max and self.outstanding:
            return False
        return self.outstanding < self.credits_max

    def take(self, size_bytes: int = 0) -> None:
        """Reserve the credit of a batch that is about to be built."""
        if self.outstanding >= self.credits_max:
            raise ValueError(f"no credit left: {self.outstanding} of {self.credits_max} outstanding")
        self.outstanding += 1
        self.held_bytes += size_bytes

    def weigh(self, before_bytes: int, size_bytes: int) -> None:
        """An outstanding batch weighs something else now."""
        self.held_bytes += size_bytes - before_bytes

    def give_back(self, size_bytes: int = 0) -> None:
        if self.outstanding < 1:
            raise ValueError("a credit came back that nobody holds")
        self.outstanding -= 1
        self.held_bytes -= size_bytes


class ReorderBuffer(Generic[T]):
    """Parks batches that settled early until the ones before them have settled.

    A batch gives its credit back at parking only while the sink keeps up (it has nothing to take) and no more than
    `parked_bytes_max` are parked; else the credit stays out until the sink has taken it. So a sink that stops holds up
    production after at most the window's batches, however early they settle. With `ordered=False` nothing is parked.
    """

    __slots__ = ("_next_index", "_parked", "ordered", "parked_bytes", "parked_bytes_max")

    def __init__(self, parked_bytes_max: int, *, ordered: bool = True) -> None:
        self.parked_bytes_max = parked_bytes_max
        self.parked_bytes = 0
        self.ordered = ordered
        self._next_index = 0
        self._parked: dict[int, tuple[Sequence[T], int, bool]] = {}

    def settle(self, batch_index: int, items: Sequence[T], size_bytes: int) -> bool:
        """Take a settled batch whose payloads have `size_bytes`. Returns whether its credit comes back now, at parking.

        A batch that is next in line is not parked: its credit comes back when `pop_ready` hands it out and the sink
        has taken it.
        """
        if batch_index in self._parked or (self.ordered and batch_index < self._next_index):
            raise ValueError(f"batch {batch_index} settled twice")
        size_bytes += len(items) * ITEM_BYTES
        parked = (
            self.ordered
            and batch_index != self._next_index
            and self._next_index not in self._parked
            and self.parked_bytes + size_bytes <= self.parked_bytes_max
        )
        if parked:
            self.parked_bytes += size_bytes
        self._parked[batch_index] = (items, size_bytes, parked)
        return parked

    def pop_ready(self) -> tuple[int, Sequence[T], bool] | None:
        """The next batch for the sink: its index, its items, and whether its credit is still out. None: wait."""
        if self.ordered:
            index = self._next_index
            if index not in self._parked:
                return None
            self._next_index += 1
        elif self._parked:
            index = next(iter(self._parked))
        else:
            return None
        items, size_bytes, parked = self._parked.pop(index)
        if parked:
            self.parked_bytes -= size_bytes
        return index, items, not parked

    def __len__(self) -> int:
        return len(self._parked)
