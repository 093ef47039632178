"""A queue with a bound, and the one thread that empties it: what every exporter that writes elsewhere stands on.

Offering never waits. What does not fit is dropped and counted. Source: tool-dispatch D54.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from callyard.policy.ranges import check_whole

T = TypeVar("T")

ITEMS_MAX: Final = 10_000
BYTES_MAX: Final = 64 * 1024 * 1024
ITEM_BYTES: Final = 512
"""What an item weighs beside its payload."""
_BATCH_MAX: Final = 256
_RETRY_S: Final = 1.0
_LOG_EVERY_S: Final = 60.0

_log = logging.getLogger("callyard.dispatch")


class BoundedWriter(Generic[T]):
    """Hands batches of what was offered to `write`, in order, on a thread of its own.

    When `write` raises, the batch is dropped and counted; with `keeps` it is offered to `write` again every second.
    The thread does not keep the process alive: `close` writes what is left.
    """

    def __init__(
        self,
        name: str,
        write: Callable[[list[T]], None],
        *,
        items_max: int = ITEMS_MAX,
        bytes_max: int = BYTES_MAX,
        keeps: bool = False,
        gather_s: float = 0.0,
    ) -> None:
        """`name` goes to the log and to the thread. `gather_s`: how long it waits for more after the first item: each
        time that it wakes, it takes the interpreter from the loop."""
        check_whole("items_max", items_max, 1, 10_000_000)
        check_whole("bytes_max", bytes_max, ITEM_BYTES, 1 << 40)
        self.items_max = items_max
        self.bytes_max = bytes_max
        self.held_bytes = 0
        """Of what is queued or being written."""
        self.dropped = 0
        self.failures = 0
        self.is_failing = False
        """The latest write raised."""
        self._name = name
        self._write = write
        self._keeps = keeps
        self._gather_s = gather_s
        self._items: deque[tuple[T, int]] = deque()
        self._writing = 0
        """How many items at the head are being written; they leave the queue when they are."""
        self._changed = threading.Condition()
        self._closed = False
        self._logged_at_s = float("-inf")
        self._thread = threading.Thread(target=self._run, name=f"callyard-{name}", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Items that are queued or being written."""
        return len(self._items)

    def offer(self, item: T, payload_bytes: int = 0) -> bool:
        """Queue it. False: there is no room, or the writer is closed; it was dropped. Safe from any thread."""
        cost = payload_bytes + ITEM_BYTES
        with self._changed:
            if self._closed or len(self._items) >= self.items_max or self.held_bytes + cost > self.bytes_max:
                self.dropped += 1
                return False
            self._items.append((item, cost))
            self.held_bytes += cost
            if len(self._items) == 1:
                self._changed.notify_all()
            return True

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until the queue was empty once. False: it was not within `timeout_s`. Blocks: not for the event loop."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._items, timeout_s)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Take nothing more and write what is left, for at most `timeout_s`. Returns whether all of it was written.

        Idempotent. A `write` that hangs holds up this call for `timeout_s`, and the process not at all.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and not self.is_failing

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items or self._closed)
                if not self._items:
                    return
                if self._gather_s and len(self._items) < _BATCH_MAX:
                    self._changed.wait_for(lambda: self._closed, self._gather_s)
                batch = [self._items[index] for index in range(min(len(self._items), _BATCH_MAX))]
            try:
                self._write([item for item, _ in batch])
                self.is_failing = False
            except BaseException as error:  # noqa: BLE001 whatever it is, the thread goes on and the log says it
                self._tell(error, len(batch))
                with self._changed:
                    self.failures += 1
                    self.is_failing = True
                    if self._keeps and not self._closed:
                        self._changed.wait_for(lambda: self._closed, _RETRY_S)
                        continue
                    self.dropped += len(batch)
            with self._changed:
                for _, cost in batch:
                    self._items.popleft()
                    self.held_bytes -= cost
                self._changed.notify_all()

    def _tell(self, error: BaseException, items: int) -> None:
        now_s = time.monotonic()
        if now_s - self._logged_at_s < _LOG_EVERY_S:
            return
        self._logged_at_s = now_s
        what = "tried again every second" if self._keeps else "dropped"
        _log.error("%s: %d records could not be written and are %s", self._name, items, what, exc_info=error)
