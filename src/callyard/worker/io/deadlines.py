"""`asyncio.timeout` for many waits of a few lengths: one timer of the loop for each length, not one for each wait.

Waits of one length end in the order in which they began, so that a queue needs to know when its first one is over only.
Most waits end long before: leaving is one removal from a dict.
"""

from __future__ import annotations

import asyncio
from types import TracebackType


class Deadlines:
    """Used on one loop."""

    def __init__(self) -> None:
        self._queues: dict[int, _Queue] = {}

    def within(self, timeout_ms: int) -> Deadline:
        """A block of the running aio task that may take as long; then it is cut short, with TimeoutError."""
        queue = self._queues.get(timeout_ms)
        if queue is None:
            queue = self._queues[timeout_ms] = _Queue(self._queues, timeout_ms)
        return Deadline(queue)

    def close(self) -> None:
        """No block is running."""
        for queue in self._queues.values():
            queue.close()
        self._queues.clear()


class Deadline:
    """`with deadline:`, once."""

    __slots__ = ("_aio_task", "_cancelling", "_is_cut", "_queue", "at_s")

    def __init__(self, queue: _Queue) -> None:
        self._queue = queue
        self._is_cut = False
        self.at_s = 0.0

    def __enter__(self) -> None:
        aio_task = asyncio.current_task()
        assert aio_task is not None, "to be used in an aio task"
        self._aio_task = aio_task
        self._cancelling = aio_task.cancelling()
        self._queue.add(self)

    def cut(self) -> None:
        self._is_cut = True
        self._aio_task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._is_cut:
            self._queue.remove(self)
        elif self._aio_task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:  # nobody else did it
            raise TimeoutError from error


class _Queue:
    """Blocks of one length, the first to end first."""

    __slots__ = ("_loop", "_queues", "_timeout_ms", "_timer", "_waiting")

    def __init__(self, queues: dict[int, _Queue], timeout_ms: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._queues = queues
        self._timeout_ms = timeout_ms
        self._waiting: dict[Deadline, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, deadline: Deadline) -> None:
        deadline.at_s = self._loop.time() + self._timeout_ms / 1_000
        self._waiting[deadline] = None
        if self._timer is None:
            self._queues[self._timeout_ms] = self  # it may have been let go of since
            self._timer = self._loop.call_at(deadline.at_s, self._look)

    def remove(self, deadline: Deadline) -> None:
        del self._waiting[deadline]

    def _look(self) -> None:
        now_s = self._loop.time()
        while self._waiting:
            first = next(iter(self._waiting))
            if first.at_s > now_s:
                self._timer = self._loop.call_at(first.at_s, self._look)
                return
            del self._waiting[first]
            first.cut()
        self._timer = None
        del self._queues[self._timeout_ms]

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
