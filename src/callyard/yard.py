"""`Yard`: registry and worker with one close; and `run` for scripts that have no event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, overload

from callyard.functions.registry import Registry
from callyard.functions.target import split_target
from callyard.worker.builders import CallSource, IterableSource, open_rows, open_source
from callyard.worker.columns import Extra, FittedRows
from callyard.worker.outputs import Existing, MemoryOutput, OutputSink, check_output, open_output
from callyard.worker.results import Result, RunSummary
from callyard.worker.worker import Worker

if TYPE_CHECKING:
    from callyard.dispatch.config import DispatcherConfig
    from callyard.dispatch.outcomes import DispatchResult
    from callyard.dispatch.policies import Policy
    from callyard.dispatch.stores.port import KeyStore

try:
    import uvloop
except ImportError:  # no wheel for this system
    new_event_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
else:
    new_event_loop = uvloop.new_event_loop

T = TypeVar("T")


class Yard:
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

    async def call(self, function: str, args: Mapping[str, Any] | Sequence[Any] | None = None, **options: Any) -> Any:
        """Run one call and return its value; see `Worker.call`. Raises CallError when it fails."""
        return await self.worker.call(function, args, **options)

    async def dispatch(
        self, tool: str, args: Mapping[str, Any] | bytes | None = None, **options: Any
    ) -> DispatchResult:
        """Call a tool with retries, a key, a deadline; see `Dispatcher.dispatch`. A call that failed does not raise."""
        return await self.dispatcher.dispatch(tool, args, **options)

    def map(self, function: str, rows: Iterable[Any], **options: Any) -> AsyncGenerator[Result, None]:
        """Run one call per row, streaming and in order; see `Worker.map`."""
        return self.worker.map(function, rows, **options)


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
    "append". A column that the function has no place for is an error before the first call, unless `columns` names
    those to take, or `extra` is "ignore". Each line of an output repeats the column `id`, and with `with_args` its row.
    `max_failures`: see `Worker.open_run`. Guard the call with `if __name__ == "__main__"` when the script is its own
    target. Raises UsageError for a bad target, file or setting.
    """
    _, function = split_target(target)
    path = rows if isinstance(rows, str | Path) else None
    source = open_source(rows) if isinstance(rows, str | Path) else open_rows(rows)
    if isinstance(output, str | Path):
        check_output(output, existing=existing, source=path)
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
            if isinstance(output, str | Path):
                schema = b"{}" if spec is None else bytes(spec.output_schema)
                sink = open_output(output, existing=existing, source=path, output_schema=schema, repeated=repeated)
            elif output is not None:
                sink = output
            return await worker.run(
                name, fitted, sink, max_attempts=max_attempts, budget_ms=budget_ms, max_failures=max_failures
            )

    summary = run_sync(work())
    return summary if output is not None else [Result(result) for result in memory.results]


def only_function(worker: Worker) -> str | None:
    """The bundle's function when it has just one; None: rows name theirs."""
    functions = [spec for spec in worker.functions() if spec.role != "completer"]
    return functions[0].name if len(functions) == 1 else None


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on a loop of its own; beside a running loop, on a thread of its own."""
    if not _has_running_loop():
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(work)
    results: list[T] = []
    errors: list[BaseException] = []

    def in_thread() -> None:
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                results.append(runner.run(work))
        except BaseException as error:  # noqa: BLE001  # raised again in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=in_thread, name="callyard-run")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _has_running_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
