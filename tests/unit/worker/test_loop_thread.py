"""A loop on a thread of its own: whoever waits for it hears how that ended, also of work given while it ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from callyard.errors import UsageError
from callyard.worker.loop_thread import LoopThread

T = TypeVar("T")
WAIT_S = 30.0


class Held:
    """The loop, as one sees it who is held up between his look at the thread and what he posts: meanwhile it ends."""

    def __init__(self, thread: LoopThread) -> None:
        self._loop, self._thread = thread._loop, thread
        self.ending = threading.Thread(target=thread.stop, daemon=True)

    def call_soon_threadsafe(self, callback: Callable[[], object]) -> None:
        if self.ending.ident is None:
            self.ending.start()
            self._thread._thread.join(0.5)  # it must not end; where it does, it does so at once
        self._loop.call_soon_threadsafe(callback)

    def create_task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return self._loop.create_task(work)


def test_what_is_given_to_it_while_it_ends_ends_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = LoopThread()
    held = Held(thread)
    monkeypatch.setattr(thread, "_loop", held)
    with pytest.raises(asyncio.CancelledError):
        thread.run(asyncio.sleep(WAIT_S))
    held.ending.join(WAIT_S)
    assert not held.ending.is_alive()


def test_work_that_is_started_is_not_waited_for() -> None:
    loop = LoopThread()
    began, go = threading.Event(), asyncio.Event()

    async def work() -> str:
        began.set()
        await go.wait()
        return "done"

    loop.start(work())
    assert began.wait(WAIT_S)
    loop.post(go.set)
    loop.stop()
    with pytest.raises(UsageError, match="it is closed"):
        loop.start(work())
