"""`PoolExecutor`: a `concurrent.futures.Executor` on Callyard's executors."""

from __future__ import annotations

import itertools
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import closing
from multiprocessing.context import BaseContext
from types import TracebackType
from typing import Any, Final, ParamSpec, TypeVar

from callyard.errors import UsageError
from callyard.futures.engine import Codec, Engine, PoolPromises
from callyard.futures.json_codec import JsonCodec
from callyard.futures.setup import CodecName
from callyard.settings import suggest
from callyard.worker.config import WORKER_SETTINGS, WorkerConfig, count_available_cpus

P = ParamSpec("P")
T = TypeVar("T")
_OWN: Final = ("max_workers", "mp_context", "initializer", "initargs", "max_tasks_per_child", "codec", "on_output")
_ELSEWHERE: Final[Mapping[str, str]] = dict.fromkeys(
    ("n_jobs", "processes", "num_workers", "max_processes"), "max_workers"
)
"""What other pools call one of ours."""


class PoolExecutor(Executor):
    """Runs calls in processes of its own; to be used as `concurrent.futures.ProcessPoolExecutor` is.

        with PoolExecutor() as pool:
            for page in pool.map(fetch, urls, chunksize=20):
                ...

    `codec="pickle"` sends functions and arguments as they are, lambdas, closures and what a notebook defines included.
    `codec="json"` pickles nothing: functions are found by module and name, and `submit` refuses what would arrive as
    something else. `initializer(*initargs)` runs in each process before its first call; when it raises, the pool is
    broken. `max_tasks_per_child`: a process is replaced after so many calls. `mp_context`: None, or one that starts
    processes anew, as is done here anyway. `settings` are those of `WorkerConfig`, and `on_output`, which gets each
    line that is printed in an executor (default: to standard output).

    Unlike the standard one: a future that runs can be cancelled, and stops; a process that dies costs the call that
    ran in it (`ExecutorCrashed`), and no other; nothing is imported again as `__main__`. Processes start with the
    first call.
    """

    def __init__(
        self,
        max_workers: int | None = None,
        mp_context: BaseContext | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        *,
        max_tasks_per_child: int | None = None,
        codec: CodecName = "pickle",
        **settings: Any,
    ) -> None:
        """Raises ValueError, TypeError or UsageError for what cannot be."""
        if max_workers is not None and not isinstance(max_workers, int):
            raise TypeError(f"max_workers must be an integer, got {max_workers!r}")
        if max_workers is not None and max_workers <= 0:
            raise ValueError(f"max_workers must be greater than 0, got {max_workers}")
        if initializer is not None and not callable(initializer):
            raise TypeError(f"initializer must be a callable, got {initializer!r}")
        _check_context(mp_context)
        if max_tasks_per_child is not None:
            if not isinstance(max_tasks_per_child, int):
                raise TypeError(f"max_tasks_per_child must be an integer, got {max_tasks_per_child!r}")
            if max_tasks_per_child <= 0:
                raise ValueError(f"max_tasks_per_child must be >= 1, got {max_tasks_per_child}")
            # Exact as in the standard one: with a second call there already, that one would run in the old process.
            settings = {"executor_max_inflight": 1, **settings, "recycle_after_calls": max_tasks_per_child}
        on_output = settings.pop("on_output", print_line)
        for name in settings:
            if name not in WORKER_SETTINGS:
                raise UsageError(
                    f"no setting {name!r}; {suggest(_ELSEWHERE.get(name, name), (*_OWN, *WORKER_SETTINGS))}"
                )
        config = WorkerConfig().with_settings(**{"spare_executors": 0, **settings})
        self._max_workers = int(max_workers or count_available_cpus())
        self._engine = Engine(
            _make_codec(codec, config),
            self._max_workers,
            None if initializer is None else (initializer, initargs, {}),
            {"config": config, "on_output": on_output},
        )
        weakref.finalize(self, self._engine.close_soon).atexit = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """A future of `fn(*args, **kwargs)`.

        With `codec="json"` raises TypeError or ValueError for what would not arrive as it is. With "pickle" what cannot
        be pickled is the future's exception.
        """
        return self._engine.submit((fn, args, kwargs), PoolPromises(fn))

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
    ) -> Iterator[T]:
        """The results of `fn` for each of the arguments, in their order; `fn` gets one of each iterable.

        `chunksize` arguments are one call: fewer calls of more work each. With `buffersize` the iterables are read as
        results are taken, so that at most so many chunks were submitted and not taken; else all at once. `timeout`, in
        seconds from now, raises TimeoutError. Leaving early cancels the rest, also what runs.
        """
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1.")
        if buffersize is not None:
            if not isinstance(buffersize, int):
                raise TypeError("buffersize must be an integer or None")
            if buffersize < 1:
                raise ValueError("buffersize must be None or > 0")
        end = None if timeout is None else time.monotonic() + timeout
        rows = zip(*iterables, strict=False)
        calls = self._submit_each(fn, rows) if chunksize == 1 else self._submit_chunks(fn, rows, chunksize)
        futures = deque(calls if buffersize is None else itertools.islice(calls, buffersize))
        chunks = _results(futures, calls, end)
        return chunks if chunksize == 1 else _join(chunks)

    def _submit_each(self, fn: Callable[..., Any], rows: Iterator[tuple[Any, ...]]) -> Iterator[Future[Any]]:
        for args in rows:
            yield self.submit(fn, *args)  # that of a subclass, as in `concurrent.futures`

    def _submit_chunks(
        self, fn: Callable[..., Any], rows: Iterator[tuple[Any, ...]], size: int
    ) -> Iterator[Future[Any]]:
        promises = PoolPromises(fn, size)
        while chunk := list(itertools.islice(rows, size)):
            yield self._engine.submit(self._engine.codec.make_chunk(fn, chunk), promises)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls, and end when those submitted have ended; `cancel_futures`: all that do not run yet are
        cancelled. `wait`: return when no process is left; Ctrl-C meanwhile cancels all. Idempotent."""
        self._engine.close_soon(cancel_pending=cancel_futures)
        if wait:
            try:
                self._engine.join()
            except KeyboardInterrupt:
                self._engine.close_soon(cancel_all=True)
                raise

    def terminate_workers(self) -> None:
        """Shut down without waiting for calls: what is pending is cancelled, what runs raises BrokenProcessPool. It is
        interrupted where it stands, as by `cancel`, and a process that does not end by that is killed. Does not wait
        either; of no effect where nothing runs any more."""
        self._engine.end_now("terminate_workers() ended its processes", kill=False)

    def kill_workers(self) -> None:
        """As `terminate_workers`, but every process is killed at once: no `finally` and no cleanup runs in it."""
        self._engine.end_now("kill_workers() killed its processes", kill=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """As `shutdown`; Ctrl-C does not wait for calls, it cancels them."""
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self._engine.close_soon(cancel_all=True)
        self.shutdown()


def _results(
    futures: deque[Future[Any]], calls: Iterator[Future[Any]], end: float | None
) -> Generator[Any, None, None]:
    try:
        while futures:
            value = futures[0].result(None if end is None else end - time.monotonic())
            futures.popleft()
            if (following := next(calls, None)) is not None:
                futures.append(following)
            yield value
    finally:
        for future in futures:
            future.cancel()


def _join(chunks: Generator[list[Any], None, None]) -> Iterator[Any]:
    with closing(chunks):
        for chunk in chunks:
            yield from chunk


def _make_codec(name: CodecName, config: WorkerConfig) -> Codec:
    if name == "json":
        return JsonCodec()
    if name != "pickle":
        raise ValueError(f"codec must be 'pickle' or 'json', got {name!r}")
    if config.sandbox_choice != "off":
        raise UsageError(
            "codec='pickle' has no sandbox: this process unpickles what executors send, which could be anything."
            " Use codec='json', or a Worker, for code that is not trusted"
        )
    from callyard.futures.pickling import PickleCodec  # only here is cloudpickle needed

    return PickleCodec()


def _check_context(context: BaseContext | None) -> None:
    if context is not None and context.get_start_method() == "fork":
        raise ValueError(
            "mp_context: processes start anew here, as with 'spawn', and 'fork' would share the caller's globals:"
            " leave it out, and hand what calls need to an initializer"
        )


def print_line(_executor_id: Any, line: str) -> None:
    """What a call printed, as if it had been printed here."""
    print(line, file=sys.stdout, flush=True)
