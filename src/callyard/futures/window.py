"""How many calls of a pool are with its worker at once. Pure.

What is with the worker is written already and counts as running; what is not can be cancelled at no cost, and takes no
memory beside its arguments. So the window is small: two calls an executor, as `concurrent.futures` has them, and beside
those as many as end within `AHEAD_MS`, so that executors with short calls never wait for the caller's threads. Large
calls are held to `BYTES_MAX` together.
"""

from __future__ import annotations

from typing import Final

AHEAD_MS: Final = 20
BYTES_MAX: Final = 64 * 1024 * 1024


class Window:
    def __init__(self, executors: int) -> None:
        self._least: Final = 2 * executors
        self._limit = self._least
        self._inflight = 0
        self._bytes = 0
        self._since_ns = 0
        self._ended = 0

    @property
    def inflight(self) -> int:
        return self._inflight

    def has_room(self) -> bool:
        if self._inflight < self._least:
            return True
        return self._inflight < self._limit and self._bytes < BYTES_MAX

    def enter(self, size: int) -> None:
        self._inflight += 1
        self._bytes += size

    def leave(self, size: int, now_ns: int) -> None:
        """A call ended. The rate of ends is looked at every `AHEAD_MS`, or when the window was empty."""
        self._inflight -= 1
        self._bytes -= size
        assert self._inflight >= 0, self._inflight
        self._ended += 1
        spent_ms = (now_ns - self._since_ns) / 1_000_000
        if spent_ms >= AHEAD_MS:
            self._limit = self._least + int(self._ended * AHEAD_MS / spent_ms)
            self._since_ns, self._ended = now_ns, 0
