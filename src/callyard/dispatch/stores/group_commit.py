"""One thread that owns an SQLite connection and commits together what is asked at the same time.

A commit waits for the disk; operations that arrive meanwhile are taken together by the next one. One that fails fails
alone: its group is rolled back and the others are done again, each in a transaction of its own.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar

from callyard.dispatch.stores.port import StoreUnavailable

GROUP_MAX: Final = 512

T = TypeVar("T")
Operation = Callable[[sqlite3.Connection], Any]
_Asked = tuple[Operation, "asyncio.Future[Any]"]
_Answered = tuple["asyncio.Future[Any]", Any, Exception | None]


class GroupCommit:
    """Takes over `connection`, which is in autocommit mode, and closes it at the end. Belongs to the running loop."""

    def __init__(self, connection: sqlite3.Connection, name: str) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._asked: SimpleQueue[_Asked | None] = SimpleQueue()
        self._closed = False
        self._ended: asyncio.Future[None] = self._loop.create_future()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, operation: Callable[[sqlite3.Connection], T]) -> asyncio.Future[T]:
        """The operation's result, once it is on disk. It may run twice, the first time undone; cancelling the future
        does not stop it. Fails with StoreUnavailable where SQLite does, and after `close`."""
        future: asyncio.Future[T] = self._loop.create_future()
        if self._closed:
            future.set_exception(StoreUnavailable("the key store is closed"))
        else:
            self._asked.put((operation, future))
        return future

    async def close(self) -> None:
        """Does what was asked before, then ends. May be called again."""
        if not self._closed:
            self._closed = True
            self._asked.put(None)
        await asyncio.shield(self._ended)

    def _run(self) -> None:
        closing = False
        while not closing:
            group, closing = self._take()
            if group:
                self._post(self._deliver, self._commit(group))
        self._connection.close()
        self._post(self._ended.set_result, None)

    def _take(self) -> tuple[list[_Asked], bool]:
        """Waits for the first, then takes what is there."""
        group: list[_Asked] = []
        try:
            asked = self._asked.get()
            while asked is not None:
                group.append(asked)
                if len(group) == GROUP_MAX:
                    return group, False
                asked = self._asked.get_nowait()
        except Empty:
            return group, False
        return group, True

    def _commit(self, group: list[_Asked]) -> list[_Answered]:
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            answers: list[_Answered] = [(future, operation(connection), None) for operation, future in group]
            connection.execute("COMMIT")
        except Exception as error:  # noqa: BLE001 - each goes to the caller whose operation it was
            if len(group) > 1 and not _is_for_all(error):
                self._roll_back()
                return [answer for asked in group for answer in self._commit([asked])]
            self._roll_back()
            return [(future, None, error) for _, future in group]
        return answers

    def _roll_back(self) -> None:
        if self._connection.in_transaction:  # a full disk may have ended it already
            self._connection.rollback()

    def _deliver(self, answers: list[_Answered]) -> None:
        for future, result, error in answers:
            if future.done():
                continue
            if error is None:
                future.set_result(result)
            elif isinstance(error, sqlite3.Error):
                unavailable = StoreUnavailable(f"the key store's file cannot be used: {error}")
                unavailable.__cause__ = error
                future.set_exception(unavailable)
            else:
                future.set_exception(error)

    def _post(self, callback: Callable[[Any], object], argument: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, argument)
        except RuntimeError:  # the loop was closed before the store: nobody waits any more
            pass


def _is_for_all(error: Exception) -> bool:
    """Another process holds the file: asking again for each would wait again for each."""
    return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
