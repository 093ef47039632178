"""Threads for plain functions that run in this process. One cannot be stopped, so none holds up the exit."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Final

IDLE_S: Final = 30.0
"""How long a thread waits for its next job before it ends."""


class Job:
    """Something to be done once. Until a thread took it, it can be taken back."""

    __slots__ = ("_taken", "work")

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self._taken = threading.Lock()

    def take(self) -> bool:
        """True for the first who asks."""
        return self._taken.acquire(blocking=False)


class Threads:
    """As many as there are jobs at once: whoever gives jobs bounds them. Idle ones are used again, then end."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._started = 0
        self._closed = False

    def submit(self, work: Callable[[], None]) -> Job:
        """`work` must not raise."""
        job = Job(work)
        with self._lock:
            if self._idle > 0:
                self._idle -= 1
                self._jobs.put(job)
                return job
            self._started += 1
            number = self._started
        threading.Thread(target=self._serve, args=(job,), name=f"{self._name}-{number}", daemon=True).start()
        return job

    def close(self) -> None:
        """Idle threads end; those at work end after it."""
        with self._lock:
            self._closed = True
            for _ in range(self._idle):
                self._jobs.put(None)
            self._idle = 0

    def _serve(self, job: Job | None) -> None:
        while job is not None:
            if job.take():
                job.work()
            del job
            with self._lock:
                if self._closed:
                    return
                self._idle += 1
            try:
                job = self._jobs.get(timeout=IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._idle > 0:  # else a job was just given to an idle thread: this one
                        self._idle -= 1
                        return
                job = self._jobs.get()
