"""A cache bounded by entries and by bytes: the least recently used goes first. Source: call-execution X15, X42."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

V = TypeVar("V")


class LruCache(Generic[V]):
    """At most `entries_max` values of together `bytes_max` bytes, by `size_of`, which says what an entry costs."""

    def __init__(self, entries_max: int, bytes_max: int, size_of: Callable[[V], int]) -> None:
        self._entries_max = entries_max
        self.bytes_max = bytes_max
        self._size_of = size_of
        self.entries: OrderedDict[bytes, V] = OrderedDict()
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self.entries)

    def get(self, key: bytes) -> V | None:
        value = self.entries.get(key)
        if value is not None:
            self.entries.move_to_end(key)
        return value

    def put(self, key: bytes, value: V) -> None:
        """Keep it, and let go of the longest unused; one larger than the whole cache is not kept."""
        size = self._size_of(value)
        if size > self.bytes_max:
            return
        self._remove(key)
        self.entries[key] = value
        self.held_bytes += size
        while self.held_bytes > self.bytes_max or len(self.entries) > self._entries_max:
            self._remove(next(iter(self.entries)))

    def _remove(self, key: bytes) -> None:
        value = self.entries.pop(key, None)
        if value is not None:
            self.held_bytes -= self._size_of(value)
