"""`Yard`: registry, worker and dispatcher with one close; `SyncYard` and `run` for code without `await`."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack, overload

from callyard.dispatch.dispatching import Dispatching, DispatchOptions
from callyard.errors import UsageError
from callyard.functions.calling import BoundCall
from callyard.functions.registry import Registry
from callyard.functions.shared import Shared
from callyard.functions.target import split_target
from callyard.worker.builders import CallSource, IterableSource, open_rows, open_source
from callyard.worker.calls import CallOptions, Calls, MapOptions, NamedArguments, check_options
from callyard.worker.columns import Extra, FittedRows
from callyard.worker.file_run import FileRun, Rerun
from callyard.worker.loop_thread import LoopThread, has_running_loop, new_event_loop
from callyard.worker.outputs import Existing, MemoryOutput, OutputSink, open_output
from callyard.worker.results import Result, RunSummary
from callyard.worker.worker import Frame, Worker

if TYPE_CHECKING:
    from callyard.dispatch.config import DispatcherConfig
    from callyard.dispatch.dispatcher import Dispatcher
    from callyard.dispatch.outcomes import DispatchResult
    from callyard.dispatch.policies import Policy
    from callyard.dispatch.stores.port import KeyStore

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")


class Yard(Calls, Dispatching):
    """Functions of a file, ready to be called. Use it as an async context manager.

    The file is imported by executors only, never here. `executors` is the number of processes; the other settings are
    those of `callyard.worker.config.WorkerConfig`. `store`, `policy` and `dispatching` are the dispatcher's: where it
    keeps idempotency keys, who may call what, and its `DispatcherConfig`.
    """

    def __init__(
        self,
        registry: Registry | str | Path,
        *,
        executors: int | None = None,
        store: KeyStore | str | Path = "memory",
        policy: Policy | None = None,
        dispatching: DispatcherConfig | None = None,
        **settings: Any,
    ) -> None:
        from callyard.dispatch.dispatcher import Dispatcher  # call lists do without it

        self.worker = Worker(registry, executors=executors, **settings)
        self.dispatcher = Dispatcher(
            self.worker.registry, worker=self.worker, store=store, policy=policy, config=dispatching
        )

    @property
    def registry(self) -> Registry:
        return self.worker.registry

    async def __aenter__(self) -> Yard:
        await self.worker.start()
        try:
            await self.dispatcher.__aenter__()
        except BaseException:
            await self.worker.close(drain=False)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.dispatcher.__aexit__(kind, error, trace)
        finally:
            await self.worker.close(drain=error is None)

    async def reload(self) -> bool:
        """Read the functions' files again, for the calls to come; see `Worker.reload`."""
        return await self.worker.reload()

    async def map_frame(
        self, function: str | Callable[..., Any], frame: Frame, *, into: str = "output", **options: Any
    ) -> Frame:
        """A frame back, with the results of its rows; see `Worker.map_frame`."""
        return await self.worker.map_frame(function, frame, into=into, **options)

    def shared(self, value: T) -> Shared[T]:
        """Keep a large value that many calls read; see `Worker.shared`."""
        return self.worker.shared(value)

    def _callee(self) -> Worker:
        return self.worker

    def _dispatcher(self) -> Dispatcher:
        return self.dispatcher


class SyncYard:
    """A `Yard` for code without `await`: a script, or a notebook, whose own event loop does not matter.

        with SyncYard("tools.py") as yard:
            total = yard.call("add", {"a": 2, "b": 3})
            for result in yard.map(score, rows):
                print(result.index, result.value if result.ok else result.error)

    It is started when it is made, and ends with `close`, by `with`, or with the process. It takes what `Yard` takes.
    Its calls block the thread that makes them, and no other; Ctrl-C cancels the one that is waited for.
    """

    def __init__(self, registry: Registry | str | Path, *, executors: int | None = None, **settings: Any) -> None:
        self._yard = Yard(registry, executors=executors, **settings)
        self._thread = LoopThread()
        try:
            self._thread.run(self._yard.__aenter__())
        except BaseException:
            self._thread.stop()
            raise
        self._close = weakref.finalize(self, _close, self._thread, self._yard)

    def __enter__(self) -> SyncYard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(drain=error is None)

    def close(self, *, drain: bool = True) -> None:
        """End calls and executors; `drain` lets calls of other threads end first. Idempotent."""
        self._thread.check_waits()
        if self._close.detach() is not None:
            _close(self._thread, self._yard, drain=drain)

    @property
    def registry(self) -> Registry:
        return self._yard.registry

    def reload(self) -> bool:
        """Read the functions' files again, for the calls to come; see `Worker.reload`."""
        return self._thread.run(self._yard.reload())

    def shared(self, value: T) -> Shared[T]:
        """Keep a large value that many calls read; see `Worker.shared`."""

        async def share() -> Shared[T]:
            return self._yard.shared(value)

        return self._thread.run(share())

    @overload
    def call(self, function: BoundCall[R], /, **options: Unpack[CallOptions]) -> R: ...
    @overload
    def call(self, function: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def call(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def call(self, function: str, /, args: NamedArguments | None = None, **options: Unpack[CallOptions]) -> Any: ...
    def call(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run one call and return its value; see `Worker.call`. Raises CallError when it fails."""
        return self._thread.run(self._yard.call(function, *args, **kwargs))

    @overload
    def dispatch(self, tool: BoundCall[R], /, **options: Unpack[DispatchOptions]) -> DispatchResult[R]: ...
    @overload
    def dispatch(
        self, tool: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> DispatchResult[R]: ...
    @overload
    def dispatch(self, tool: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> DispatchResult[R]: ...
    @overload
    def dispatch(
        self, tool: str, /, args: Mapping[str, Any] | bytes | None = None, **options: Unpack[DispatchOptions]
    ) -> DispatchResult[Any]: ...
    def dispatch(self, tool: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a tool with retries, a key, a deadline; see `Dispatcher.dispatch`. A call that failed does not raise."""
        return self._thread.run(self._yard.dispatch(tool, *args, **kwargs))

    @overload
    def map(
        self, function: Callable[..., Coroutine[Any, Any, R]], rows: Iterable[Any], **options: Unpack[MapOptions]
    ) -> Generator[Result[R], None, None]: ...
    @overload
    def map(
        self, function: Callable[..., R], rows: Iterable[Any], **options: Unpack[MapOptions]
    ) -> Generator[Result[R], None, None]: ...
    @overload
    def map(
        self, function: str, rows: Iterable[Any], **options: Unpack[MapOptions]
    ) -> Generator[Result[Any], None, None]: ...
    def map(self, function: Any, rows: Iterable[Any], **options: Any) -> Generator[Result[Any], None, None]:
        """Run one call per row, streaming and in order; see `Worker.map`. Leaving the loop cancels the rest.

        `rows` are read on a thread of Callyard's.
        """
        check_options("map", options, MapOptions.__annotations__)
        batches = self._yard.worker.map_batches(function, rows, **options)
        try:
            while (batch := self._thread.run(_following(batches))) is not None:
                yield from batch
        finally:
            if self._thread.is_current:  # collected there, and not left
                self._thread.start(_end(batches))
            elif self._thread.is_here and not self._thread.is_stopped:
                self._thread.run(_end(batches))

    def map_frame(
        self, function: str | Callable[..., Any], frame: Frame, *, into: str = "output", **options: Any
    ) -> Frame:
        """A frame back, with the results of its rows; see `Worker.map_frame`."""
        return self._thread.run(self._yard.map_frame(function, frame, into=into, **options))


async def _following(batches: AsyncGenerator[T, None]) -> T | None:
    return await anext(batches, None)


async def _end(batches: AsyncGenerator[Any, None]) -> None:
    await batches.aclose()


def _close(thread: LoopThread, yard: Yard, *, drain: bool = True) -> None:
    async def close() -> None:
        try:
            await yard.dispatcher.close(drain_deadline_ms=None if drain else 0)
        finally:
            await yard.worker.close(drain=drain)
            thread.stop_soon()

    if thread.is_current:  # it was collected there, and not closed
        thread.start(close())
    elif thread.is_here:
        try:
            thread.run(close())
        finally:
            thread.stop()


@overload
def run(
    target: str | Path,
    rows: str | Path | Iterable[Any],
    output: None = None,
    *,
    executors: int | None = None,
    max_attempts: int | None = None,
    budget_ms: int | None = None,
    max_failures: int | str | None = None,
    columns: Sequence[str] | None = None,
    extra: Extra = "refuse",
    id: str | None = None,
    with_args: bool = False,
    **settings: Any,
) -> list[Result]: ...


@overload
def run(
    target: str | Path,
    rows: str | Path | Iterable[Any],
    output: str | Path | OutputSink,
    *,
    existing: Existing = "refuse",
    resume: bool = False,
    retry_failed: bool = False,
    accept_changes: bool = False,
    executors: int | None = None,
    max_attempts: int | None = None,
    budget_ms: int | None = None,
    max_failures: int | str | None = None,
    columns: Sequence[str] | None = None,
    extra: Extra = "refuse",
    id: str | None = None,
    with_args: bool = False,
    **settings: Any,
) -> RunSummary: ...


def run(
    target: str | Path,
    rows: str | Path | Iterable[Any],
    output: str | Path | OutputSink | None = None,
    *,
    existing: Existing = "refuse",
    resume: bool = False,
    retry_failed: bool = False,
    accept_changes: bool = False,
    executors: int | None = None,
    max_attempts: int | None = None,
    budget_ms: int | None = None,
    max_failures: int | str | None = None,
    columns: Sequence[str] | None = None,
    extra: Extra = "refuse",
    id: str | None = None,
    with_args: bool = False,
    **settings: Any,
) -> list[Result] | RunSummary:
    """Run a call list to its end, from plain synchronous code.

        results = callyard.run("functions.py:assess", [{"origin": "JFK"}, …])
        summary = callyard.run("functions.py:assess", "flights.jsonl", "out.jsonl")

    `target` is `file.py:function`, `package.module:function`, or a folder. `rows` is an iterable of rows, a frame (see
    `Worker.map`), or the path of a JSONL, CSV, TSV, JSON or Parquet file. Without an `output` the results come back as
    a list, in order; with one, a summary does. A file that is not empty is refused unless `existing` is "overwrite" or
    "append", or the run goes on with it: `resume` runs the rows that have no result there, `retry_failed` those that
    failed; `accept_changes` lets them, though the rows or the functions are not those that the run began with. A column
    that the function has no place for is an error before the first call, unless `columns` names those to take, or
    `extra` is "ignore". Each line of an output repeats the column `id`, and with `with_args` its row.
    `max_failures`: see `Worker.open_run`. Guard the call with `if __name__ == "__main__"` when the script is its own
    target. Raises UsageError for a bad target, file or setting.
    """
    _, function = split_target(target)
    path = rows if isinstance(rows, str | Path) else None
    source = open_source(rows) if isinstance(rows, str | Path) else open_rows(rows)
    rerun = Rerun(existing=existing, resume=resume, retry_failed=retry_failed, accept_changes=accept_changes)
    file_run = FileRun.prepare(output, rerun, source=path) if isinstance(output, str | Path) else None
    if rerun.goes_on and file_run is None:
        raise UsageError("resume and retry_failed go on with an output: give the path of its file")
    if file_run is not None:
        settings["environment"] = {**file_run.environment, **settings.get("environment", {})}
    memory = MemoryOutput()

    async def work() -> RunSummary:
        async with Worker(target, executors=executors, **settings) as worker:
            name = function or only_function(worker)
            spec = None if name is None else worker.registry.get(name)
            fitted: CallSource = source
            options = columns is not None or extra != "refuse" or id is not None or with_args
            if options or not isinstance(source, IterableSource):
                fitted = FittedRows(source, spec, columns=columns, extra=extra, id=id, with_args=with_args)
            repeated = fitted.repeated if isinstance(fitted, FittedRows) else ()
            sink: OutputSink = memory
            if file_run is not None:
                shape = {
                    "id": id,
                    "with_args": with_args,
                    "with_output": False,
                    "columns": None if columns is None else list(columns),
                    "extra": extra,
                }
                fitted, sink = await file_run.begin(worker, fitted, name, shape, repeated=repeated)
            elif isinstance(output, str | Path):
                schema = b"{}" if spec is None else bytes(spec.output_schema)
                sink = open_output(output, existing=existing, source=path, output_schema=schema, repeated=repeated)
            elif output is not None:
                sink = output
            return await worker.run(
                name,
                fitted,
                sink,
                binary=output is None,
                max_attempts=max_attempts,
                budget_ms=budget_ms,
                max_failures=max_failures,
                file_run=file_run,
            )

    with nullcontext() if file_run is None else closing(file_run):
        summary = run_sync(work())
    return summary if output is not None else [Result(result) for result in memory.results]


def only_function(worker: Worker) -> str | None:
    """The bundle's function when it has just one; None: rows name theirs."""
    functions = [spec for spec in worker.functions() if spec.role != "completer"]
    return functions[0].name if len(functions) == 1 else None


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on a loop of its own; beside a running loop, on a thread of its own. Ctrl-C cancels
    it, and is raised when that has ended."""
    if not has_running_loop():
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(work)
    thread = LoopThread()
    try:
        return thread.run(work)
    finally:
        thread.stop()
