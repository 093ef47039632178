"""What runs behind a `PoolExecutor`: a worker, and one thread in which its loop runs.

```text
 any thread          the loop's thread
 submit ──▶ inbox ──▶ pending ──window──▶ written (pickled) ──▶ Worker.begin_call ──▶ executor
 future ◀──── result, callbacks ◀── read (unpickled) ◀───────── its end ◀──────────────┘
```

Pickling and the callbacks of futures are code of the user's, and run in that thread too, as in a thread of
`concurrent.futures`: while they do, nothing else moves, and a worker whose own loop stood still judges nobody. A thread
of their own was tried: under one interpreter lock it cost half of all short calls.

An engine knows nothing of the `PoolExecutor` before it, which can be forgotten without a shutdown: what was submitted
still runs, and then all ends, at the latest with the process.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from concurrent.futures._base import PENDING, RUNNING
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from callyard.errors import CallError, CallFailure, ErrorKind, ProtocolError
from callyard.functions.bundle import Bundle
from callyard.functions.function import Function
from callyard.functions.loading import refuse_while_importing
from callyard.functions.packing import encode_crossing
from callyard.functions.registry import Registry
from callyard.futures.errors import ExecutorCrashed
from callyard.futures.raised import INITIALIZER_RAISED, VALUE
from callyard.futures.setup import SETUP_FILE, TARGET_MODULE, Call, CodecName, Setup, encode_setup
from callyard.futures.window import Window
from callyard.scheduler import CallResult, StopReason
from callyard.wire.values import is_packed, split_packed
from callyard.worker.calls import AskedCall
from callyard.worker.loop_thread import LoopThread
from callyard.worker.task_run import SingleCall
from callyard.worker.worker import Worker

T = TypeVar("T")


class Codec(Protocol):
    """The caller's end of a codec."""

    @property
    def name(self) -> CodecName: ...
    def admit(self, call: Call) -> Any:
        """In the caller's thread: what is kept of a call until it is written. May raise."""
        ...

    def make_chunk(self, called: Callable[..., Any], rows: list[tuple[Any, ...]]) -> Call:
        """Many calls as one, whose value is the list of theirs. May raise."""
        ...

    def write_call(self, kept: Any) -> bytes: ...
    def read_answer(self, answer: memoryview) -> tuple[int, Any]:
        """`VALUE` and a value, or another tag and an exception. May raise."""
        ...


class PoolFuture(Future[T]):
    """A future whose `cancel` also stops a call that runs."""

    _work: Work | None = None

    def cancel(self) -> bool:
        """Cancel the call, also one that runs: it is interrupted where it stands, and its executor replaced if need be.

        False when it has ended.
        """
        work = self._work
        if work is None:
            return super().cancel()
        with self._condition:
            was_running = self._state == RUNNING
            if was_running:
                self._state = PENDING
        if not super().cancel():
            return False
        if was_running:
            self.set_running_or_notify_cancel()
            work.engine.stop_call(work)
        return True


class Work:
    """One call, from its submission to its end."""

    __slots__ = ("call", "engine", "future", "kept", "name", "options", "size")

    def __init__(self, engine: Engine, future: PoolFuture[Any], kept: Any, promises: PoolPromises) -> None:
        self.engine = engine
        self.future = future
        self.kept = kept
        self.name = "run_again" if promises.idempotent else "run"
        self.options: dict[str, Any] = {} if not promises.budget_ms else {"budget_ms": promises.budget_ms}
        self.size = 0
        """Bytes, once it is written."""
        self.call: SingleCall | None = None
        """While it is with the worker."""


class PoolPromises:
    """What a function's `@function` says that holds in a pool."""

    __slots__ = ("budget_ms", "idempotent")

    def __init__(self, called: Callable[..., Any], calls: int = 1) -> None:
        """`calls`: how many of them are one call here."""
        declared = called.promises if isinstance(called, Function) else None
        self.idempotent = declared is not None and declared.idempotent
        self.budget_ms = (declared.budget_ms or 0) * calls if declared is not None else 0


class Engine:
    def __init__(self, codec: Codec, executors: int, initializer: Call | None, settings: Mapping[str, Any]) -> None:
        self.codec = codec
        self._settings = settings
        self._initializer = initializer
        self._executors = executors
        self._pid = os.getpid()
        self._lock = threading.RLock()  # the garbage collector may call `close_soon` in a thread that holds it
        """Of what decides whether a call is taken, and whether there is a loop: nothing is put into the inbox of a pool
        that has closed, or into a loop that has ended."""
        self._inbox: deque[Work] = deque()
        self._awake = False
        """A turn is on its way."""
        self._thread: LoopThread | None = None
        self._closing = False
        self._cancel_pending = False
        self._cancel_all = False
        self._broken: BaseException | None = None
        # The loop's thread alone:
        self._window = Window(executors)
        self._pending: deque[Work] = deque()
        self._running: set[Work] = set()
        """With the worker."""
        self._starting: asyncio.Task[None] | None = None
        self._worker: Worker | None = None
        """Once it is started."""
        self._finishing: asyncio.Task[None] | None = None
        self._killing = False
        """It was told not to wait: once."""

    # --- from any thread ------------------------------------------------------------------------------------------

    def submit(self, call: Call, promises: PoolPromises) -> PoolFuture[Any]:
        """Raises RuntimeError once it is shut down or broken, UsageError in an executor that imports the file of this
        line, and what the codec refuses."""
        if self._is_forked:
            raise RuntimeError("this pool belongs to the process that forked this one: make one here")
        kept = self.codec.admit(call)
        future: PoolFuture[Any] = PoolFuture()
        future._work = work = Work(self, future, kept, promises)
        with self._lock:
            self._check_open()
            if self._thread is None:
                refuse_while_importing()
                self._thread = LoopThread()
                _live.add(self)
            self._inbox.append(work)
            if not self._awake:
                self._awake = True
                self._thread.post(self._turn)
        return future

    def _check_open(self) -> None:
        if self._broken is not None:
            raise BrokenProcessPool(f"this pool is broken, and takes no new calls: {self._broken}") from self._broken
        if _exiting:
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")
        if self._closing:
            raise RuntimeError("cannot schedule new futures after shutdown")

    @property
    def _is_forked(self) -> bool:
        """This is a child of the pool's process: its threads are not here, and its lock may be held for ever."""
        return self._pid != os.getpid()

    def close_soon(self, *, cancel_pending: bool = False, cancel_all: bool = False) -> None:
        """Take nothing more, end when all has ended. May be asked again, for more."""
        if self._is_forked:
            return
        with self._lock:
            self._closing = True
            self._cancel_pending |= cancel_pending or cancel_all
            self._cancel_all |= cancel_all
        self._post(self._turn)

    def end_now(self, reason: str, *, kill: bool) -> None:
        """Take nothing more, cancel what is pending, break what runs: it is interrupted, or its process killed at once.
        May be asked again, to kill."""
        self.close_soon(cancel_pending=True)
        if not self._is_forked:
            self._post(partial(self._end_now, reason, kill))

    def join(self) -> None:
        """Wait until nothing of it is left. A callback of its own futures, which it waits for itself, does not wait."""
        if self._thread is not None and not self._is_forked:
            self._thread.join()

    def stop_call(self, work: Work) -> None:
        """Its future was cancelled while it ran."""
        if not self._is_forked:
            self._post(lambda: None if work.call is None else work.call.stop(StopReason.CANCELLED))

    def _post(self, callback: Callable[[], object]) -> None:
        """Have the loop's thread call it, unless there is none, or no more."""
        with self._lock:
            if self._thread is not None and not self._thread.is_stopped:
                self._thread.post(callback)

    # --- turns, in the loop's thread ------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Look at everything again. Whatever goes wrong here breaks the pool: nobody waits for ever."""
        self._awake = False
        try:
            while self._inbox:
                self._pending.append(self._inbox.popleft())
            if self._cancel_pending:
                self._drop_pending()
            if self._cancel_all:
                for work in tuple(self._running):
                    work.future.cancel()
            self._hand_over()
            ended = not (self._pending or self._inbox or self._running)
        except BaseException as error:  # noqa: BLE001 - a bug of ours, or SystemExit of a callback
            self._break(error)
            return
        if self._closing and (ended or self._cancel_all):
            self._finish_soon()

    def _hand_over(self) -> None:
        """Write pending calls for which the window has room, and give them to the worker."""
        while self._pending and self._window.has_room() and self._broken is None:
            if self._worker is None:
                if self._starting is None:
                    self._starting = asyncio.get_running_loop().create_task(self._start_worker())
                return
            work = self._pending.popleft()
            if not work.future.set_running_or_notify_cancel():
                continue
            try:
                written = self.codec.write_call(work.kept)
            except BaseException as error:  # noqa: BLE001 - the user's own: what cannot be pickled is its call's failure
                _end(work.future, error)
                continue
            finally:
                work.kept = None
            self._begin(self._worker, work, written)

    def _begin(self, worker: Worker, work: Work, written: bytes) -> None:
        self._running.add(work)
        work.size = len(written)
        work.call = worker.begin_call(AskedCall(work.name, encode_crossing([written]), None, work.options))
        self._window.enter(work.size)
        work.call.done.add_done_callback(partial(self._on_end, work))
        if work.future.cancelled():  # while it was written
            work.call.stop(StopReason.CANCELLED)

    def _on_end(self, work: Work, done: asyncio.Future[CallResult]) -> None:
        self._window.leave(work.size, time.monotonic_ns())
        work.call = None
        try:
            self._settle(work.future, done)
        except BaseException as error:  # noqa: BLE001 - a bug of ours, or SystemExit of a callback
            self._break(error)
            return
        finally:
            self._running.discard(work)
        if not self._awake:
            self._awake = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _settle(self, future: PoolFuture[Any], done: asyncio.Future[CallResult]) -> None:
        error = done.exception()
        if error is not None:
            _end(future, error)
            if not isinstance(error, CallError):
                self._break(error)
            return
        result = done.result()
        if future.cancelled():
            return
        if result.failure is not None:
            self._settle_failed(future, result.failure)
            return
        try:
            tag, value = self.codec.read_answer(_answer_of(result))
        except BaseException as unreadable:  # noqa: BLE001 - the user's own: its call's failure
            _end(future, unreadable)
            return
        if tag == INITIALIZER_RAISED:
            broken = BrokenProcessPool("the initializer raised, so that no call can run")
            broken.__cause__ = value
            _end(future, broken)
            self._break(broken)
        elif tag == VALUE:
            _end(future, value=value)
        else:
            _end(future, value)

    def _settle_failed(self, future: PoolFuture[Any], failure: CallFailure) -> None:
        if failure.kind is ErrorKind.CANCELLED:
            future.cancel()
        elif failure.kind is ErrorKind.CRASHED:
            _end(future, ExecutorCrashed(failure))
        else:
            _end(future, CallError(failure))

    def _drop_pending(self) -> None:
        while self._pending:
            future = self._pending.popleft().future
            future.cancel()
            future.set_running_or_notify_cancel()

    def _break(self, error: BaseException) -> None:
        """Nobody carries on: what waits and what runs ends with this error, and nothing more is taken."""
        with self._lock:
            self._broken = self._broken or error
            self._closing = self._cancel_all = True
        self._pending += self._inbox
        futures = [work.future for work in self._running if not work.future.done()]
        futures += [work.future for work in self._pending if work.future.set_running_or_notify_cancel()]
        self._inbox.clear()
        self._pending.clear()
        for future in futures:
            broken = BrokenProcessPool(f"the pool broke before this call had ended: {error}")
            broken.__cause__ = error
            with suppress(BaseException):  # SystemExit of a callback: it is broken already
                _end(future, broken)
        self._finish_soon()

    def _end_now(self, reason: str, kill: bool) -> None:
        self._break(BrokenProcessPool(reason))
        if kill and not self._killing:
            self._killing = True
            assert self._finishing is not None
            # It waits for the worker's end, which does not take its time once nobody does. Soon: after its first step.
            asyncio.get_running_loop().call_soon(self._finishing.cancel)

    # --- the worker -----------------------------------------------------------------------------------------------

    async def _start_worker(self) -> None:
        try:
            initializer = b""
            if self._initializer is not None:
                initializer = self.codec.write_call(self.codec.admit(self._initializer))
            path = [os.path.abspath(entry) for entry in sys.path]
            setup = Setup(self.codec.name, path, sys.argv, os.getcwd(), initializer)
            target = Path(__file__).with_name("target.py")  # not imported here
            files = {f"{TARGET_MODULE}.py": target.read_bytes(), SETUP_FILE: encode_setup(setup)}
            registry = Registry(Bundle(TARGET_MODULE, files, name="PoolExecutor"))
            worker = Worker(registry, executors=self._executors, **self._settings)
            await worker.start()
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - there is no pool, maybe by the user's own: everybody hears of it
            self._break(error)
        else:
            self._worker = worker
            self._turn()

    def _finish_soon(self) -> None:
        if self._finishing is None:
            self._finishing = asyncio.get_running_loop().create_task(self._finish())

    async def _finish(self) -> None:
        try:
            if self._starting is not None:
                await self._starting
            if self._worker is not None:
                await self._worker.close(drain=not self._cancel_all)
        finally:
            _live.discard(self)
            with self._lock:
                assert self._thread is not None
                self._thread.stop_soon()


def _answer_of(result: CallResult) -> memoryview:
    """The bytes that a function of `target` returned, not copied. Raises ProtocolError."""
    raw = result.output
    if raw is None or not is_packed(raw):
        raise ProtocolError("an executor of a pool answered with no bytes")
    return split_packed(memoryview(raw))[1]


def _end(future: PoolFuture[Any], error: BaseException | None = None, value: Any = None) -> None:
    try:
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)
    except InvalidStateError:  # it was cancelled this moment
        if not future.cancelled():
            raise
    future._work = None


# --- the end of the process -------------------------------------------------------------------------------------------

_live: Final[set[Engine]] = set()
"""Engines with threads, each until its worker is gone."""
_exiting = False


def _end_all() -> None:
    """At exit: what was submitted still runs, unless Ctrl-C ended the program."""
    global _exiting
    _exiting = True
    interrupted = getattr(sys, "last_type", None) is KeyboardInterrupt
    for engine in tuple(_live):
        engine.close_soon(cancel_all=interrupted)
    for engine in tuple(_live):
        engine.join()


def _forget_in_child() -> None:
    """A forked child has no threads but its own: nothing of its parent's pools runs there."""
    _live.clear()


os.register_at_fork(after_in_child=_forget_in_child)
# As `concurrent.futures` does, and for its reason: before threads can no longer be started.
threading._register_atexit(_end_all)  # type: ignore[attr-defined]
