"""Rows on demand: how a task asks its source for the next ones without ever waiting on the loop.

A file is read inline, a bounded piece at a time. What may keep the loop waiting (standard input, somebody's generator,
compressed data, of which a few bytes may be gigabytes without a row) is read by a thread of its own, at most
`AHEAD_ROWS_MAX` rows and about `AHEAD_BYTES_MAX` of arguments ahead.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, Protocol

import msgspec

from callyard.worker.builders import Row

AHEAD_ROWS_MAX: Final = 2_048
AHEAD_BYTES_MAX: Final = 16 * 1024 * 1024
"""Of arguments: from here on no further row is read, so it is passed by one row at most."""


class Taken(msgspec.Struct):
    """What a feed has right now."""

    rows: list[Row]
    ended: bool
    """No more rows will come."""


class RowFeed(Protocol):
    """Where a task's rows come from."""

    def take(self, rows_max: int, bytes_max: int) -> Taken:
        """Up to `rows_max` rows, or fewer with `bytes_max` of arguments. Empty and not ended: not yet.

        Raises what the source raised, once the rows before it were taken.
        """
        ...

    def close(self) -> None: ...


class InlineFeed:
    """Reads the source when asked."""

    def __init__(self, rows: Iterator[Row]) -> None:
        self._rows = rows

    def take(self, rows_max: int, bytes_max: int) -> Taken:
        taken: list[Row] = []
        size = 0
        for row in self._rows:
            taken.append(row)
            size += len(row.args)
            if len(taken) >= rows_max or size >= bytes_max:
                return Taken(taken, ended=False)
        return Taken(taken, ended=True)

    def close(self) -> None:
        close_rows(self._rows)


class ThreadFeed:
    """A thread reads ahead; `on_ready` is called on the loop when an empty feed has rows again."""

    def __init__(self, rows: Iterator[Row], on_ready: Callable[[], None]) -> None:
        self._rows = rows
        self._on_ready = on_ready
        self._loop = asyncio.get_running_loop()
        self._ahead: deque[Row] = deque()
        self._ahead_bytes = 0
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        """Told when rows were taken, or nobody takes any more."""
        self._ended = False
        self._error: BaseException | None = None
        self._hungry = True
        """`take` found too little; the next row wakes the loop."""
        self._closed = False
        threading.Thread(target=self._read, name="callyard-rows", daemon=True).start()

    def take(self, rows_max: int, bytes_max: int) -> Taken:
        taken: list[Row] = []
        size = 0
        with self._lock:
            while self._ahead and len(taken) < rows_max and size < bytes_max:
                row = self._ahead.popleft()
                taken.append(row)
                size += len(row.args)
            self._ahead_bytes -= size
            ended = self._ended and not self._ahead
            self._hungry = not self._ahead and not ended
            error = self._error
            if taken:
                self._room.notify()
        if not taken and ended and error is not None:
            raise error
        return Taken(taken, ended and (error is None))

    def close(self) -> None:
        """The thread ends at its next row; one that waits for input forever is left to the end of the process."""
        with self._lock:
            self._closed = True
            self._room.notify()

    def _read(self) -> None:
        error: BaseException | None = None
        try:
            for row in self._rows:
                with self._lock:
                    while not self._closed and (
                        len(self._ahead) >= AHEAD_ROWS_MAX or self._ahead_bytes >= AHEAD_BYTES_MAX
                    ):
                        self._room.wait()
                    if self._closed:
                        break
                    self._ahead.append(row)
                    self._ahead_bytes += len(row.args)
                    hungry, self._hungry = self._hungry, False
                if hungry:
                    self._wake()
            close_rows(self._rows)  # here: a generator that runs cannot be closed by others
        except BaseException as raised:  # noqa: BLE001  # handed to the task, which raises it where the rows are asked
            error = raised
        with self._lock:
            self._error = error
            self._ended = True
        self._wake()

    def _wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._on_ready)
        except RuntimeError:
            self._closed = True  # the loop is closed: nobody takes rows any more


def close_rows(rows: object) -> None:
    """Rows that are not read to their end: a generator lets go of its file now."""
    close = getattr(rows, "close", None)
    if close is not None:
        close()
