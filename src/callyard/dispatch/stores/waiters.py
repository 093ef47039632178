"""Who waits for a claim to end, and the one place where they are woken."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterator
from contextlib import contextmanager


class Waiters:
    """Futures by what they wait for. A claim is named by its key and its fence."""

    def __init__(self) -> None:
        self._futures: dict[Hashable, set[asyncio.Future[None]]] = {}

    def __len__(self) -> int:
        return len(self._futures)

    @contextmanager
    def waiting(self, claim: Hashable) -> Iterator[asyncio.Future[None]]:
        """Enter, look whether the claim still stands, and only then await: what ends in between is not missed."""
        future = asyncio.get_running_loop().create_future()
        futures = self._futures.setdefault(claim, set())
        futures.add(future)
        try:
            yield future
        finally:
            futures.discard(future)
            if not future.cancel() and not future.cancelled():
                future.exception()  # seen, also when nobody came to await it
            if not futures and self._futures.get(claim) is futures:
                del self._futures[claim]

    def wake(self, claim: Hashable) -> None:
        for future in self._futures.pop(claim, ()):
            if not future.done():
                future.set_result(None)

    def fail_all(self, error: Exception) -> None:
        """Nobody will wake them: each gets the error."""
        for futures in self._futures.values():
            for future in futures:
                if not future.done():
                    future.set_exception(error)
        self._futures.clear()
