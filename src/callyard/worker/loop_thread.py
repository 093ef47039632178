"""An event loop on a thread of its own, for synchronous code: scripts, and notebooks whose own loop runs already."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from callyard.errors import UsageError

try:
    import uvloop
except ImportError:  # no wheel for this system
    new_event_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
else:
    new_event_loop = uvloop.new_event_loop

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for threads that wait for them. `stop` ends it; it does not outlive the process."""

    def __init__(self) -> None:
        started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(target=_serve, args=(started,), name="callyard-loop", daemon=True)
        self._thread.start()
        self._loop, self._stopped = started.result()
        self._stopping = False
        self._lock = threading.RLock()
        """What is posted under it is posted before the loop's end, and so ends with it."""
        self._pid = os.getpid()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` to its end and give what it gives. From any thread but the loop's own, and several at once.

        What is raised while waiting, above all Ctrl-C, cancels the work, and is raised again once that has ended; a
        second Ctrl-C does not wait. Raises UsageError where it cannot run.
        """
        try:
            self.check_waits()
        except UsageError:
            work.close()
            raise
        end: Future[T] = Future()
        begun: list[asyncio.Task[T]] = []

        def begin() -> None:
            begun.append(self._loop.create_task(work))
            begun[0].add_done_callback(lambda aio_task: _hand_over(aio_task, end))

        with _interruptible():
            self._begin(begin, work)
            try:
                return end.result()
            except BaseException:
                if not end.done():
                    self._loop.call_soon_threadsafe(lambda: begun[0].cancel())
                    end.exception()
                raise

    def check_waits(self) -> None:
        """Raises UsageError in the loop's own thread."""
        if self.is_current:
            raise UsageError("a callback cannot wait for the loop that called it")

    def start(self, work: Coroutine[Any, Any, object]) -> None:
        """Run `work` without waiting for it: from the loop's own thread too, where a finalizer may find itself."""
        tasks: list[asyncio.Task[object]] = []  # a loop keeps no task alive

        def begin() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(lambda _: tasks.clear())

        self._begin(begin, work)

    def _begin(self, begin: Callable[[], None], work: Coroutine[Any, Any, object]) -> None:
        if not self.is_here:
            work.close()
            raise UsageError("it was made before this process was forked off another: make one here")
        with self._lock:
            if not self._stopping:
                self._loop.call_soon_threadsafe(begin)
                return
        work.close()
        raise UsageError("it is closed")

    def post(self, callback: Callable[[], object]) -> None:
        """Call `callback` in the loop's thread, soon, and do not wait for it. From any thread, until `stop`."""
        self._loop.call_soon_threadsafe(callback)

    def stop(self) -> None:
        """End the loop and its thread; what still runs in it is cancelled. Idempotent."""
        self.stop_soon()
        self._thread.join()

    def stop_soon(self) -> None:
        """As `stop`, without waiting: from any thread, the loop's own too."""
        with self._lock:
            if not self._stopping:
                self._stopping = True
                self._loop.call_soon_threadsafe(self._stopped.set)

    def join(self) -> None:
        """Wait for the thread's end. In that thread itself it returns at once."""
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def is_stopped(self) -> bool:
        return self._stopping

    @property
    def is_here(self) -> bool:
        """A process forked off this one has the object, and not the thread."""
        return os.getpid() == self._pid

    @property
    def is_current(self) -> bool:
        """Whether this is the loop's own thread."""
        return threading.current_thread() is self._thread


def _serve(started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
    async def wait() -> None:
        stopped = asyncio.Event()
        with suppress(RuntimeError):  # at exit: what needs a thread says so
            await asyncio.to_thread(int)  # its thread is there from now on: Python before 3.12.2 starts none at exit
        started.set_result((asyncio.get_running_loop(), stopped))
        await stopped.wait()

    runner = asyncio.Runner(loop_factory=new_event_loop)
    try:
        runner.run(wait())
    finally:
        with suppress(RuntimeError):  # there is none to wait in for those of `to_thread`, which end without it
            runner.close()


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt here, although a loop runs in this thread: its own handler only asks the loop,
    which is held up."""
    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not has_running_loop() or before is None or before is signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def has_running_loop() -> bool:
    """In this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _hand_over(aio_task: asyncio.Task[T], end: Future[T]) -> None:
    error = asyncio.CancelledError() if aio_task.cancelled() else aio_task.exception()
    if error is not None:
        end.set_exception(error)
    else:
        end.set_result(aio_task.result())
