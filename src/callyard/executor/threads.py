"""Threads that user code leaves behind (X57).

A call that starts no thread pays one read of a counter per slice. A new thread belongs to the call in whose slice the
counter was seen to rise.
"""

from __future__ import annotations

import _thread
import sys
from collections.abc import Iterable
from typing import Any, Final, Protocol

from callyard.executor.contexts import Call

TO_THREAD_PREFIX: Final = "callyard-to-thread"
"""Names of the event loop's own threads, whose work is watched job by job."""
count_threads: Final = _thread._count


class ThreadJob(Protocol):
    """Work handed to a thread of the event loop's executor: a concurrent.futures.Future."""

    def done(self) -> bool: ...

    def cancel(self) -> bool: ...


class Left:
    """What a call leaves behind: what to tell, and whether the process must be replaced for it."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.must_recycle = False


class ThreadWatch:
    def __init__(self) -> None:
        self.seen_count = 0
        """Threads of the process when it was last looked at. `count_threads()` differs now: call `attribute`."""
        self._known: set[Any] = set()
        self.start()

    def start(self) -> None:
        """What is there now, the bundle's own threads included, is nobody's leaving."""
        self.seen_count = count_threads()
        self._known = set(_living_threads())

    def attribute(self, call: Call) -> None:
        """Give the threads that are new to `call`, whose slice has just ended."""
        self.seen_count = count_threads()
        living = set(_living_threads())
        new = living - self._known
        self._known = living
        if new:
            call.threads = [*(call.threads or ()), *new]

    def watch_job(self, call: Call, job: ThreadJob) -> None:
        call.jobs = [*(one for one in call.jobs or () if not one.done()), job]

    def left_by(self, call: Call) -> Left:
        """What of a finished call still runs. Jobs that have not started are called off."""
        left = Left()
        for thread in call.threads or ():
            if not thread.is_alive():
                continue
            if thread.daemon:
                left.notes.append(f"left the daemon thread {thread.name!r} running")
            else:
                left.notes.append(f"left the thread {thread.name!r} running: this process will be replaced")
                left.must_recycle = True
        for job in call.jobs or ():
            if not job.done() and not job.cancel():
                left.notes.append("left a function in asyncio.to_thread running: this process will be replaced")
                left.must_recycle = True
        return left


def _living_threads() -> Iterable[Any]:
    threading = sys.modules.get("threading")
    if threading is None:
        return ()
    return (thread for thread in threading.enumerate() if not thread.name.startswith(TO_THREAD_PREFIX))
