"""`Worker`: a registry's functions on a pool of executors.

    async with Worker("functions.py", executors=4) as worker:
        km = await worker.call("distance", {"origin": "JFK", "dest": "LAX"})
        async for result in worker.map("assess", rows):
            ...

The worker's process never imports the user's code: an executor describes the bundle, and the worker keeps the answer.
Source: call-execution X31, X43, X44.
"""

from __future__ import annotations

import asyncio
import itertools
import resource
import sys
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any, Final

import msgspec

from callyard.clock import SYSTEM_CLOCK, Clock
from callyard.errors import CallyardError, ErrorKind, UsageError
from callyard.functions.encoding import ResultMisfit, encode_canonical
from callyard.functions.function import MILLISECONDS_MAX
from callyard.functions.loading import refuse_while_importing
from callyard.functions.registry import FunctionSpec, Registry
from callyard.ids import Digest, ExecutorId, FunctionId, TaskId, Tenant
from callyard.scheduler import CallResult, FunctionTarget, NewCall, StopReason, TaskPlan
from callyard.scheduler.core import SchedulerStatistics
from callyard.worker.actor import Actor
from callyard.worker.builders import CallSource, IterableSource
from callyard.worker.config import WorkerConfig
from callyard.worker.feeds import InlineFeed, ThreadFeed
from callyard.worker.link import ExecutorLink
from callyard.worker.outputs import OutputSink
from callyard.worker.pool import Executor, Pool, SlotView
from callyard.worker.results import FailureGroup, Result, RunningCall, RunProgress, RunSummary
from callyard.worker.run_folder import RunFolder
from callyard.worker.spawner import OutputCallback, ProcessSpawner, Spawner
from callyard.worker.task_run import SingleCall, TaskRun

FLUSH_INTERVAL_S: Final = 0.5
MAX_ATTEMPTS_RANGE: Final = (1, 1_000_000)
TENANT_CHARACTERS_MAX: Final = 256
_TASK_NUMBERS: Final = itertools.count(1)


def print_output(executor_id: ExecutorId, line: str) -> None:
    """What an executor printed, to standard error."""
    print(f"{executor_id} | {line}", file=sys.stderr, flush=True)


class Worker:
    """Runs calls of one registry. Use it as an async context manager, from one event loop.

    `registry` may be the path of a Python file. `executors` is the number of processes (default: the CPUs this process
    may use); every other setting of `WorkerConfig` may be given by name. `on_output` is called with each line that user
    code prints; by default it goes to standard error.
    """

    def __init__(
        self,
        registry: Registry | str | Path,
        *,
        executors: int | None = None,
        config: WorkerConfig | None = None,
        on_output: OutputCallback = print_output,
        spawner: Spawner | None = None,
        clock: Clock = SYSTEM_CLOCK,
        rng: Random | None = None,
        **settings: Any,
    ) -> None:
        refuse_while_importing()
        self.registry = registry if isinstance(registry, Registry) else Registry.for_target(registry)
        if executors is not None:
            settings["executor_count"] = executors
        self.config = (config or WorkerConfig()).with_settings(**settings)
        self._on_output = on_output
        self._spawner = spawner or ProcessSpawner()
        self._clock = clock
        self._rng = rng
        self._folder: RunFolder | None = None
        self._actor: Actor | None = None
        self._pool: Pool | None = None
        self._bundles: dict[Digest, tuple[Path, str]] = {}
        self._view: Mapping[str, FunctionTarget] = {}
        self._runs: set[TaskRun | SingleCall] = set()
        self._idle = asyncio.Event()
        self._closing = False
        self._hurried = False
        """Nothing is waited for any more: the one who closes was cancelled."""
        self._ending: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None

    # --- life ---------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Worker:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(drain=error is None)

    async def start(self) -> None:
        """Start the executors, and have one of them describe the bundle. Raises UsageError when that fails."""
        if self._pool is not None or self._closing:
            raise UsageError("this worker was started, or closed, before; make a new one")
        self._folder = RunFolder()
        try:
            self._actor = Actor(
                self.config.scheduler,
                self._clock,
                inbox_events_max=self.config.inbox_events_max,
                on_protocol_error=self._on_protocol_error,
                on_cancel_sent=self._on_cancel_sent,
                on_failed=self._on_actor_failed,
                rng=self._rng,
                debug=asyncio.get_running_loop().get_debug(),
            )
            self._pool = Pool(
                self.config,
                self._spawner,
                self._actor,
                self._clock,
                self._folder,
                self._on_output,
                self._bundles.get,
                self._on_unavailable,
            )
            bundle = self.registry.bundle
            path = bundle.write_to(self._folder.path / "bundles")
            self._bundles[bundle.digest] = (path, bundle.module)
            await self._pool.start()
            executor = await self._pool.wait_attached()
            self._check_memory(executor)
            if not self.registry.is_described:
                self.registry.adopt(await self._pool.describe(executor, bundle.digest, path, bundle.module))
            self._view = {spec.name: _target(spec) for spec in self.registry.specs()}
        except BaseException:
            await self.close(drain=False)
            raise

    async def close(self, *, drain: bool = True) -> None:
        """Take no new work; let running tasks end within `drain_deadline_ms`, then cancel, then kill. Idempotent.

        Cancelled, it kills at once and returns when no process is left.
        """
        self._closing = True
        try:
            if drain and self._ending is None:
                await self._wait_idle(self.config.drain_deadline_ms)
            await asyncio.shield(self._end())
        except asyncio.CancelledError:
            self._hurried = True
            self._idle.set()
            await asyncio.wait({self._end()})
            raise

    def _end(self) -> asyncio.Task[None]:
        """The one task that ends everything, however many close and whoever of them is cancelled."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._stop_all())
        return self._ending

    async def _stop_all(self) -> None:
        if self._pool is not None and self._actor is not None:
            for run in list(self._runs):
                run.stop(StopReason.SHUTTING_DOWN)
            try:
                await self._wait_idle(self.config.cancel_grace_ms * 4 + 1_000)
            finally:
                await self._pool.stop()
            await asyncio.sleep(0)  # the turn that hears of the last losses
            await self._wait_idle(1_000)
            self._actor.close()
        if self._folder is not None:
            self._folder.remove()
            self._folder = None

    async def _wait_idle(self, timeout_ms: int) -> None:
        """Until no task runs, or the time is up."""
        try:
            async with asyncio.timeout(timeout_ms / 1_000):
                while self._runs and self._failure is None and not self._hurried:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            return

    # --- calls --------------------------------------------------------------------------------------------------

    async def call(
        self,
        function: str,
        args: Mapping[str, Any] | Sequence[Any] | None = None,
        *,
        max_attempts: int | None = None,
        budget_ms: int | None = None,
        deadline_ms: int | None = None,
        tenant: str = "default",
    ) -> Any:
        """Run one call and return its JSON value. A mapping is keywords, a sequence positional arguments.

        Raises CallError when the call fails. `deadline_ms` is a duration from now for queueing and running together.
        """
        result = await self.call_result(
            function,
            args,
            max_attempts=max_attempts,
            budget_ms=budget_ms,
            deadline_ms=deadline_ms,
            tenant=tenant,
        )
        return result.value

    async def call_result(
        self,
        function: str,
        args: Mapping[str, Any] | Sequence[Any] | None = None,
        *,
        strings: bool = False,
        max_attempts: int | None = None,
        budget_ms: int | None = None,
        deadline_ms: int | None = None,
        tenant: str = "default",
    ) -> Result:
        """Like `call`, but a failed call is a Result that is not ok. Cancelling the caller cancels the call.

        With `strings` the values are text, parsed by each parameter's type.
        """
        self._spec(function)
        _check_whole("deadline_ms", deadline_ms, -MILLISECONDS_MAX, MILLISECONDS_MAX)
        plan, view = self._plan(max_attempts, budget_ms, tenant, streaming=False)
        call = NewCall(0, view[function], _encode_args(args), strings)
        single = SingleCall(self._running(), plan, view, call, self._on_run_end)
        self._runs.add(single)
        timer = self._arm_deadline(single, deadline_ms)
        try:
            return Result(await single.wait())
        finally:
            if timer is not None:
                timer.cancel()

    async def map(
        self,
        function: str,
        rows: Iterable[Any],
        *,
        ordered: bool = True,
        max_attempts: int | None = None,
        budget_ms: int | None = None,
        deadline_ms: int | None = None,
        tenant: str = "default",
    ) -> AsyncGenerator[Result, None]:
        """Run one call per row and yield each Result, in the order of the rows unless `ordered` is False.

        A row is a mapping (keywords, or the whole row for a function with one object parameter), a list or tuple
        (positional), or any other value (the only argument). Memory is bounded however long the list: rows are read
        as results are taken. Leaving the loop early cancels the rest. Raises what `rows` raises.
        """
        self._spec(function)
        _check_whole("deadline_ms", deadline_ms, -MILLISECONDS_MAX, MILLISECONDS_MAX)
        source = IterableSource(rows)
        run = self._open_run(function, ordered, max_attempts, budget_ms, tenant)
        timer: asyncio.TimerHandle | None = None
        try:
            self._start_run(run, source)
            timer = self._arm_deadline(run, deadline_ms)
            async with aclosing(run.batches()) as batches:
                async for batch in batches:
                    for result in batch:
                        yield Result(result)
            self._check_alive()
        finally:
            run.stop(StopReason.CANCELLED)
            if timer is not None:
                timer.cancel()

    def open_run(
        self,
        function: str | None,
        source: CallSource,
        sink: OutputSink,
        *,
        max_attempts: int | None = None,
        budget_ms: int | None = None,
        deadline_ms: int | None = None,
        max_failures: int | None = None,
        fail_fast: bool = False,
        tenant: str = "default",
    ) -> Run:
        """A call list from `source` to `sink`. `function` None: each row names its own.

        More than `max_failures` failed calls stop the run, with `fail_fast` the first one does.
        """
        if function is not None:
            self._spec(function)
        _check_whole("deadline_ms", deadline_ms, -MILLISECONDS_MAX, MILLISECONDS_MAX)
        task = self._open_run(function, True, max_attempts, budget_ms, tenant)
        return Run(self, task, source, sink, deadline_ms, 0 if fail_fast else max_failures)

    async def run(self, function: str | None, source: CallSource, sink: OutputSink, **options: Any) -> RunSummary:
        """Run a whole call list; see `open_run` for the options. Raises what the source or the sink raises."""
        return await self.open_run(function, source, sink, **options).wait()

    # --- looking ------------------------------------------------------------------------------------------------

    def functions(self) -> list[FunctionSpec]:
        """The functions of the bundle, in their order."""
        return list(self.registry.specs())

    def slots(self) -> list[SlotView]:
        """The pool's slots with their processes and load."""
        return [] if self._pool is None else self._pool.slots()

    def statistics(self) -> SchedulerStatistics:
        return self._running().statistics()

    def running(self) -> list[RunningCall]:
        """Calls that have begun and not ended, the one sent first first."""
        if self._pool is None or self._actor is None:
            return []
        found = ((executor_id, self._actor.find_call(call_id)) for call_id, executor_id in self._pool.begun())
        return [RunningCall(*call, executor_id) for executor_id, call in found if call is not None]

    @property
    def last_loss(self) -> str:
        """How the last executor ended that ended by itself; empty: none did."""
        return "" if self._pool is None else self._pool.last_loss

    # --- inside -------------------------------------------------------------------------------------------------

    def _running(self) -> Actor:
        self._check_alive()
        if self._actor is None:
            raise UsageError("the worker is not started: use `async with Worker(…) as worker`")
        return self._actor

    def _check_memory(self, executor: Executor) -> None:
        """A limit that an idle executor is above already would leave every call waiting for ever."""
        limit, used = self.config.executor_memory_high_watermark, executor.memory_bytes
        if 0 < limit <= used:
            raise UsageError(
                f"executor_memory_high_watermark is {limit:,} bytes, but an idle executor uses {used:,} already:"
                " give it more, or 0 for no limit"
            )

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise CallyardError("the worker failed by a fault of its own") from self._failure

    def _spec(self, function: str) -> FunctionSpec:
        self._running()
        return self.registry.get(function)

    def _open_run(
        self, function: str | None, ordered: bool, max_attempts: int | None, budget_ms: int | None, tenant: str
    ) -> TaskRun:
        plan, view = self._plan(max_attempts, budget_ms, tenant, streaming=True)
        return TaskRun(
            self._running(),
            self._clock,
            self.config,
            plan,
            view,
            function=function,
            ordered=ordered,
            on_end=self._on_run_end,
        )

    def _plan(
        self, max_attempts: int | None, budget_ms: int | None, tenant: str, *, streaming: bool
    ) -> tuple[TaskPlan, Mapping[str, FunctionTarget]]:
        """A task's plan and its pinned view. Call lists take a task slot, single calls do not (D39).

        Raises UsageError for values out of range: they must not get as far as the scheduler or an executor.
        """
        _check_whole("max_attempts", max_attempts, *MAX_ATTEMPTS_RANGE)
        _check_whole("budget_ms", budget_ms, 0, MILLISECONDS_MAX)
        _check_tenant(tenant)
        if self._closing:
            raise UsageError("the worker is closing and takes no new calls")
        plan = TaskPlan(
            task_id=TaskId(f"task-{next(_TASK_NUMBERS)}"),
            tenant=Tenant(tenant),
            max_attempts=self.config.default_max_attempts if max_attempts is None else max_attempts,
            default_budget_ms=0,
            streaming=streaming,
            uses_slot=streaming,
        )
        view = self._view
        if budget_ms is not None:
            view = {name: msgspec.structs.replace(target, budget_ms=budget_ms) for name, target in view.items()}
        return plan, view

    def _start_run(self, run: TaskRun, source: CallSource) -> None:
        rows = iter(source.rows())
        self._runs.add(run)
        run.start(lambda wake: ThreadFeed(rows, wake) if source.may_block else InlineFeed(rows))

    def _arm_deadline(self, run: TaskRun | SingleCall, deadline_ms: int | None) -> asyncio.TimerHandle | None:
        """After the run was started: a deadline that has passed lets nothing of it run (D11)."""
        if deadline_ms is None:
            return None
        if deadline_ms <= 0:
            run.stop(StopReason.DEADLINE)
            return None
        loop = asyncio.get_running_loop()
        return loop.call_later(max(0, deadline_ms) / 1_000, run.stop, StopReason.DEADLINE)

    def _on_run_end(self, run: TaskRun | SingleCall) -> None:
        self._runs.discard(run)
        self._idle.set()

    def _on_protocol_error(self, executor_id: ExecutorId, message: str) -> None:
        if self._pool is not None:
            self._pool.lose_by_id(executor_id, "malformed_frame", message)

    def _on_cancel_sent(self, link: ExecutorLink) -> None:
        if self._pool is not None:
            self._pool.on_cancel_sent(link)

    def _on_unavailable(self, message: str) -> None:
        for run in list(self._runs):
            run.stop(StopReason.UNAVAILABLE, message=message)

    def _on_actor_failed(self, error: BaseException) -> None:
        """A bug of ours: nobody carries on, and everybody who waits hears of it."""
        self._failure = error
        for run in list(self._runs):
            run.fail(CallyardError("the worker failed by a fault of its own"), error)
        self._runs.clear()
        self._idle.set()


class Run:
    """One call list on its way to its sink."""

    def __init__(
        self,
        worker: Worker,
        task: TaskRun,
        source: CallSource,
        sink: OutputSink,
        deadline_ms: int | None,
        failures_max: int | None,
    ) -> None:
        self._worker = worker
        self._task = task
        self._source = source
        self._sink = sink
        self._deadline_ms = deadline_ms
        self._failures_max = failures_max
        self._clock = worker._clock
        self._started_at_ms = self._clock.now_ms()
        self._calls = 0
        self._failed = 0
        self._sink_error: Exception | None = None
        self._failures: dict[ErrorKind, FailureGroup] = {}

    def stop(self, *, cancel_running: bool = True) -> None:
        """End early: dispatch nothing more, and with `cancel_running` stop what runs. `wait` returns soon after."""
        self._task.stop(StopReason.CANCELLED, cancel_running=cancel_running)

    def progress(self) -> RunProgress:
        """The counts now, by call and not by batch."""
        live = self._task.progress()
        return RunProgress(
            committed=live.total_count,
            finished=live.terminal_count,
            failed=live.failed_count,
            inflight=live.inflight,
            total=self._source.total,
            read_fraction=self._source.read_fraction,
            elapsed_ms=self._clock.now_ms() - self._started_at_ms,
        )

    async def wait(self) -> RunSummary:
        """Run to the end. The sink is closed on every way out; a failure of the sink stops the run and is raised."""
        timer: asyncio.TimerHandle | None = None
        self._started_at_ms = self._clock.now_ms()
        flushing = asyncio.ensure_future(self._flush_when_quiet())
        try:
            self._worker._start_run(self._task, self._source)
            timer = self._worker._arm_deadline(self._task, self._deadline_ms)
            async with aclosing(self._task.batches()) as batches:
                async for batch in batches:
                    self._take(batch)
            self._worker._check_alive()
            if self._sink_error is not None:
                raise self._sink_error
            self._sink.close()
        except BaseException:
            self._task.stop(StopReason.SINK_FAILED)
            self._sink.abort()
            raise
        finally:
            flushing.cancel()
            if timer is not None:
                timer.cancel()
        return self._summary()

    async def _flush_when_quiet(self) -> None:
        """Hand on what the sink buffers when no results came for a while: slow calls are seen as they end."""
        seen = 0
        while True:
            await asyncio.sleep(FLUSH_INTERVAL_S)
            if self._calls == seen:
                continue
            seen = self._calls
            try:
                self._sink.flush()
            except Exception as error:  # noqa: BLE001  # the sink's own: raised by `wait`
                self._sink_error = error
                self._task.stop(StopReason.SINK_FAILED)
                return

    def _take(self, batch: Sequence[CallResult]) -> None:
        if self._sink_error is not None:
            raise self._sink_error
        self._count(batch)
        self._sink.write(batch)
        if self._failures_max is not None and self._failed > self._failures_max:
            self._task.stop(StopReason.FAIL_FAST if self._failures_max == 0 else StopReason.MAX_FAILURES)

    def _count(self, batch: Sequence[CallResult]) -> None:
        self._calls += len(batch)
        for result in batch:
            failure = result.failure
            if failure is None:
                continue
            self._failed += 1
            group = self._failures.get(failure.kind)
            self._failures[failure.kind] = (
                FailureGroup(1, result.index, failure)
                if group is None
                else FailureGroup(group.count + 1, group.example_index, group.example)
            )

    def _summary(self) -> RunSummary:
        converged = self._task.converged
        return RunSummary(
            calls=self._calls,
            failed=self._failed,
            failures=self._failures,
            elapsed_ms=self._clock.now_ms() - self._started_at_ms,
            stop_reason=None if converged is None else converged.stop_reason,
            peak_memory_bytes=peak_memory_bytes(),
        )


def _check_whole(name: str, value: object, low: int, high: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UsageError(f"{name} must be a whole number from {low} to {high}, got {value!r}")


def _check_tenant(tenant: object) -> None:
    if not isinstance(tenant, str) or not 1 <= len(tenant) <= TENANT_CHARACTERS_MAX or not tenant.isprintable():
        raise UsageError(f"tenant must be a printable text of 1 to {TENANT_CHARACTERS_MAX} characters")


def _encode_args(args: Mapping[str, Any] | Sequence[Any] | None) -> bytes:
    """Arguments as canonical JSON. Raises UsageError for what is neither a mapping nor a sequence, or has no JSON."""
    if args is None:
        return b"[]"
    if not isinstance(args, list | dict) and (
        isinstance(args, str | bytes) or not isinstance(args, Mapping | Sequence)
    ):
        raise UsageError(f"args must be a mapping or a sequence of arguments, got {type(args).__name__}")
    try:
        return encode_canonical(args)
    except ResultMisfit as error:
        raise UsageError(f"args have no JSON: {error.message}") from error


def peak_memory_bytes() -> int:
    """Largest resident size of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1_024


def _target(spec: FunctionSpec) -> FunctionTarget:
    return FunctionTarget(
        function_id=FunctionId(spec.name),
        digest=spec.digest,
        entry_selector=spec.entry_selector,
        idempotent=spec.promises.idempotent,
        budget_ms=spec.promises.budget_ms,
    )
