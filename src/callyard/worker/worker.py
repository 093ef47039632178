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
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import aclosing
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any, Final, TypeVar, cast, get_args

import msgspec

from callyard.clock import SYSTEM_CLOCK, Clock
from callyard.errors import CallFailure, CallyardError, ErrorKind, UsageError
from callyard.functions.audit.log import AuditLog
from callyard.functions.audit.policies import AllowPolicy, BundleView, to_policy
from callyard.functions.function import MILLISECONDS_MAX, Nan
from callyard.functions.loading import refuse_while_importing
from callyard.functions.ports import AskCallback, SubcallEvent
from callyard.functions.registry import FunctionSpec, Registry, UnknownFunction
from callyard.functions.script import read_script
from callyard.functions.shared import Shared
from callyard.ids import Digest, ExecutorId, FunctionId, TaskId, Tenant
from callyard.scheduler import CallResult, FunctionTarget, NewCall, StopReason, TaskPlan
from callyard.scheduler.placement import DEFAULT_POOL, PoolName
from callyard.scheduler.statistics import SchedulerStatistics
from callyard.scheduler.tasks import CachePolicy
from callyard.wire.messages import CallContext, CallEventPayload
from callyard.wire.values import is_packed
from callyard.worker.actor import Actor, describe_missing_function
from callyard.worker.attempts import AttemptRunner
from callyard.worker.audit_gate import Admission, AuditGate, AuditRefused
from callyard.worker.builders import CallSource, Row, open_rows
from callyard.worker.calls import AskedCall, Calls, wants_null
from callyard.worker.code_view import BundleShelf, CodeView
from callyard.worker.columns import Extra, FittedRows
from callyard.worker.config import WorkerConfig
from callyard.worker.failure_limit import FailureLimit
from callyard.worker.feeds import InlineFeed, ThreadFeed
from callyard.worker.file_run import FileRun
from callyard.worker.interpreter import Interpreter, choose_interpreter, own_interpreter
from callyard.worker.io.config import IoConfig
from callyard.worker.io.hub import IoHub, IoStatistics
from callyard.worker.io.registry import advise, build_providers
from callyard.worker.link import ExecutorLink
from callyard.worker.outputs import OutputSink
from callyard.worker.pool import CodePlace, Executor, Pool, SlotView
from callyard.worker.results import EventCallback, FailureGroup, Result, RunningCall, RunProgress, RunSummary
from callyard.worker.run_folder import RunFolder
from callyard.worker.sandbox.levels import OFF, Sandbox
from callyard.worker.sandbox.spawner import open_spawner
from callyard.worker.shared import SharedMemory
from callyard.worker.spawner import OutputCallback, Spawner
from callyard.worker.tables import FrameSource, check_free, hold, with_results
from callyard.worker.task_run import AttemptCall, SingleCall, TaskRun

FLUSH_INTERVAL_S: Final = 0.5
MAX_ATTEMPTS_RANGE: Final = (1, 1_000_000)
TENANT_CHARACTERS_MAX: Final = 256
_TASK_NUMBERS: Final = itertools.count(1)
T = TypeVar("T")
Frame = TypeVar("Frame")
"""A DataFrame or a Table, of whatever library."""


def print_output(executor_id: ExecutorId, line: str) -> None:
    """What an executor printed, to standard error."""
    print(f"{executor_id} | {line}", file=sys.stderr, flush=True)


class Worker(Calls):
    """Runs calls of one registry. Use it as an async context manager, from one event loop.

    `registry` may be a target: a Python file, a module or a folder, with or without `:function`. `executors` is the
    number of processes (default: the CPUs this process may use); every other setting of `WorkerConfig` may be given
    by name. `on_output` is called with each line that user code prints; by default it goes to standard error. `audit`
    accepts or refuses the code before any of it is described or sent: "allow", "ast", "cmd: …", a policy, a callable
    that takes a `BundleView`, or a command as a list; `audit_log` is the JSONL file that gets a line per verdict.
    `io` says what functions may reach through the worker, in the shape of the table `[io]` of a settings file.
    `pools` are named pools of executors, `{"gpu": PoolConfig(executors=1)}`, for functions that name one:
    `@function(pool="gpu")`. `environment` is what executors get beside this process's own variables.
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
        audit: object = None,
        audit_log: str | Path | None = None,
        io: IoConfig | Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        refuse_while_importing()
        self.registry = registry if isinstance(registry, Registry) else Registry.for_target(registry)
        if executors is not None:
            settings["executor_count"] = executors
        self.config = (config or WorkerConfig()).with_settings(**settings)
        self._on_output = on_output
        self._environment = dict(environment or {})
        self._spawner = spawner
        self._interpreter = own_interpreter()
        self._sandboxes: dict[PoolName, Sandbox] = {}
        self._confined = {
            name
            for name in (DEFAULT_POOL, *map(PoolName, self.config.pools))
            if self.config.of_pool(name).sandbox_choice != "off"
        }
        """Pools in which an executor serves one tenant (X92)."""
        self._tenant: str | None = None
        self._has_tenants = False
        """There was more than one, and there is a pool that keeps them apart."""
        self._clock = clock
        self._rng = rng
        self._folder: RunFolder | None = None
        self._actor: Actor | None = None
        self._pool: Pool | None = None
        self._policy = to_policy(audit) or (None if audit_log is None else AllowPolicy())
        self._audit_log = None if audit_log is None else AuditLog(audit_log)
        self._gate: AuditGate | None = None
        self._io_config = io if isinstance(io, IoConfig) else IoConfig.from_mapping(io or {})
        self._io: IoHub | None = None
        self._shared: SharedMemory | None = None
        """None: not started, closed, the settings want none, or the system gives none."""
        self._no_shared = "this worker shares no values: shared_bytes_max is 0"
        """Why there is none."""
        self._shelf: BundleShelf | None = None
        self._view = CodeView(self.registry.bundle.digest, {})
        self._reloading = asyncio.Lock()
        self._runner = AttemptRunner(self)
        self._runs: set[TaskRun | SingleCall] = set()
        self._pinned: dict[TaskRun | SingleCall, CodeView] = {}
        """The view of each task that has not ended."""
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

    async def start(self, *, only_describe: bool = False) -> None:
        """Start the executors, and have one of them describe the bundle. Raises UsageError when that fails, or when a
        function runs in a pool that is not configured. `only_describe`: the worker is asked nothing more than what
        the functions are, and starts no named pool."""
        if self._pool is not None or self._closing:
            raise UsageError("this worker was started, or closed, before; make a new one")
        spawners: dict[PoolName, Spawner] = {}
        if self._spawner is None and self.config.executor_python:
            self._interpreter = await asyncio.to_thread(self._choose_interpreter)
            self._check_starting()
        for name in (DEFAULT_POOL, *map(PoolName, () if only_describe else self.config.pools)):
            if self._spawner is not None:
                spawners[name] = self._spawner
            else:
                spawners[name], self._sandboxes[name] = await open_spawner(self.config.of_pool(name), self._interpreter)
            self._check_starting()
        self._folder = RunFolder()
        try:
            providers = build_providers(self._io_config, sandboxed=bool(self._confined))
            io = self._io = IoHub(providers, self._clock, self._io_config.limits, advise)
            await io.open()
            self._check_starting()
            self._actor = Actor(
                self.config.scheduler,
                self._clock,
                inbox_events_max=self.config.inbox_events_max,
                on_protocol_error=self._on_protocol_error,
                on_cancel_sent=self._on_cancel_sent,
                on_failed=self._on_actor_failed,
                io=io,
                describe_missing=self._describe_missing,
                rng=self._rng,
                debug=asyncio.get_running_loop().get_debug(),
            )
            if self.config.shared_bytes_max:
                size = self.config.shared_bytes_max
                try:
                    self._shared = SharedMemory(size, self._folder.path, sealed=bool(self._confined))
                except OSError as error:  # a kernel without such seals, or a limit on the size of files
                    self._no_shared = f"this system gives no memory to share with executors: {error}"
            self._pool = Pool(
                self.config,
                spawners,
                self._actor,
                self._clock,
                self._folder,
                self._on_output,
                self._find_bundle,
                io,
                self._on_unavailable,
                self._environment,
                None if self._shared is None else self._shared.reading_fd,
            )
            bundle = self.registry.bundle
            shelf = self._shelf = BundleShelf(self._folder.path / "bundles", self._pool.retire_bundle)
            self._pool.may_exchange = lambda: len(shelf) > 1 or self._has_tenants
            self._gate = AuditGate(
                self._policy,
                self._audit_log,
                timeout_ms=self.config.audit_timeout_ms,
                base_backoff_ms=self.config.base_backoff_ms,
                name=bundle.name,
            )
            path = await shelf.put(bundle)
            self._check_starting()
            await self._pool.start()
            admission = await self._gate.admit(BundleView.of(bundle, path))
            if admission.refusal is not None and not self.registry.is_described:
                raise AuditRefused(admission.refusal)
            executor = await self._pool.wait_attached()
            self._check_memory(executor)
            if not self.registry.is_described:
                described = await self._pool.describe(
                    executor, bundle.digest, path, bundle.module, names=self.registry.named
                )
                self.registry.adopt(described)
            self._check_starting()  # the answer may be the last thing that a process sent
            if not only_describe:
                self._check_pools(self.registry)
            self._view = self._new_view(self.registry, admission)
            self._pool.find_code = self._find_code
        except BaseException:
            await self.close(drain=False)
            raise

    def _choose_interpreter(self) -> Interpreter:
        bundle = self.registry.bundle
        trusted = not self._confined and self._policy is None
        script = read_script(bundle.source, bundle.name)
        return choose_interpreter(self.config.executor_python, self.registry.path, script, trusted=trusted)

    @property
    def interpreter(self) -> Interpreter:
        """What executors run; known once it was started."""
        return self._interpreter

    def _check_starting(self) -> None:
        """After each wait but those in the pool, which asks the same."""
        if self._closing:
            raise UsageError("the worker was closed while it started")

    async def reload(self) -> bool:
        """Read the functions' files again. Tasks that run go on with what they began with; the next ones get the new
        version. Returns False when nothing had changed.

        The new version is audited and described first. Raises UsageError, with the old version still in force, when it
        cannot be read, does not load (the message has the file and line), or is refused (AuditRefused).
        """
        self._running()
        async with self._reloading:
            if self._closing:
                raise UsageError("the worker is closing and reloads nothing")
            fresh = await asyncio.to_thread(self.registry.read_again)
            if fresh.bundle.digest == self._view.digest:
                return False
            await self._switch_to(fresh)
            return True

    async def _switch_to(self, fresh: Registry) -> None:
        assert self._shelf is not None
        assert self._gate is not None
        assert self._pool is not None
        bundle = fresh.bundle
        path = await self._shelf.put(bundle)
        try:
            admission = await self._gate.admit(BundleView.of(bundle, path))
            if admission.refusal is not None:
                raise AuditRefused(admission.refusal)
            fresh.adopt(await self._pool.describe_apart(bundle.digest, path, bundle.module, names=fresh.named))
            self._check_pools(fresh)
            if self._closing:
                raise UsageError("the worker was closed while it reloaded")
        except BaseException:
            self._shelf.unpin(bundle.digest)
            raise
        self._pool.free_described()
        old, self._view = self._view, self._new_view(fresh, admission)
        self.registry.become(fresh)
        self._shelf.unpin(old.digest)

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
                if self._gate is not None:
                    await self._gate.close()
                await self._pool.stop()
            await asyncio.sleep(0)  # the turn that hears of the last losses
            await self._wait_idle(1_000)
            self._actor.close()
        async with self._reloading:  # what a reload still writes ends before its folder does
            pass
        if self._io is not None:
            await self._io.close()
        if self._shelf is not None:
            await self._shelf.wait_idle()  # a start that was under way may still write
        if self._shared is not None:
            self._shared.close()
            self._shared, self._no_shared = None, "the worker is closed"
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

    # --- attempts of dispatched calls -----------------------------------------------------------------------------

    @property
    def runner(self) -> AttemptRunner:
        """What a `Dispatcher` runs its attempts by."""
        return self._runner

    @property
    def capacity(self) -> int:
        """How many calls its executors hold at once."""
        return self.config.executors * self.config.executor_max_inflight

    @property
    def is_closing(self) -> bool:
        return self._closing

    def pin_view(self) -> tuple[CodeView, Callable[[], None]]:
        """The functions as they are now, and what lets go of them: until then their code stays."""
        self._running()
        assert self._shelf is not None
        view, shelf = self._view, self._shelf
        shelf.pin(view.digest)
        return view, lambda: shelf.unpin(view.digest)

    def open_attempt(
        self,
        view: CodeView,
        call: NewCall,
        context: CallContext,
        budget_ms: int,
        on_event: Callable[[CallEventPayload], None] | None,
        on_subcall: Callable[[SubcallEvent], None] | None,
        on_ask: AskCallback | None = None,
    ) -> AttemptCall:
        """Begin one attempt. `budget_ms` is for a function that names none. Raises UsageError while closing, and
        CallyardError when the worker has failed."""
        plan, _ = self._plan(1, None, context.tenant, streaming=False)
        plan = msgspec.structs.replace(plan, default_budget_ms=budget_ms)
        left_ms = context.deadline_remaining_ms if on_ask is None else None
        deadline_at_ms = None if left_ms is None else self._clock.now_ms() + left_ms
        attempt = AttemptCall(
            self._running(), plan, view, call, context, deadline_at_ms, on_event, on_subcall, on_ask, self._on_run_end
        )
        self._pin(attempt, view)
        self._runs.add(attempt)
        return attempt

    # --- calls --------------------------------------------------------------------------------------------------

    def _callee(self) -> Worker:
        return self

    @property
    def started_registry(self) -> Registry:
        """Raises UsageError before the start, when functions are not known yet."""
        self._running()
        return self.registry

    async def call_asked(self, asked: AskedCall) -> Result[Any]:
        """Run one call. Raises UsageError for an option out of range."""
        return Result(await self.begin_call(asked).wait(), asked.outgoing)

    def begin_call(self, asked: AskedCall) -> SingleCall:
        """As `call_asked`, without waiting for its end."""
        return self._begin_call(asked, **asked.options)

    def _begin_call(
        self,
        asked: AskedCall,
        *,
        strings: bool = False,
        max_attempts: int | None = None,
        budget_ms: int | None = None,
        deadline_ms: int | None = None,
        tenant: str = "default",
        on_event: EventCallback | None = None,
        capture: bool = False,
        nan: Nan = "refuse",
        binary: bool = True,
        row: bool = False,
    ) -> SingleCall:
        self._spec(asked.name)
        _check_whole("deadline_ms", deadline_ms, -MILLISECONDS_MAX, MILLISECONDS_MAX)
        plan, view = self._plan(max_attempts, budget_ms, tenant, streaming=False, row=row, binary=binary, nan=nan)
        call = NewCall(0, view[asked.name], asked.args, strings, view.refusal or self._keep_shared(plan, asked.args))
        single = SingleCall(self._running(), plan, view, call, self._on_run_end, on_event, capture=capture)
        self._pin(single, view)
        self._runs.add(single)
        timer = self._arm_deadline(single, deadline_ms)
        if timer is not None:
            single.done.add_done_callback(lambda _: timer.cancel())
        return single

    async def map_batches(
        self,
        function: str | Callable[..., Any],
        rows: Iterable[Any],
        *,
        ordered: bool = True,
        max_attempts: int | None = None,
        budget_ms: int | None = None,
        deadline_ms: int | None = None,
        tenant: str = "default",
        fail_fast: bool = False,
        cache: CachePolicy = "promised",
        columns: Sequence[str] | None = None,
        extra: Extra = "refuse",
        on_event: EventCallback | None = None,
        capture: bool = False,
        nan: Nan = "refuse",
    ) -> AsyncGenerator[list[Result[Any]], None]:
        """`map`, several results at a time: as many as came together."""
        if isinstance(function, str):
            name, outgoing = function, None
        else:
            outgoing = self.started_registry.outgoing(function)
            name = outgoing.name
        spec = self._spec(name)
        _check_whole("deadline_ms", deadline_ms, -MILLISECONDS_MAX, MILLISECONDS_MAX)
        source: CallSource = open_rows(rows, nan_null=wants_null(nan))
        if isinstance(source, FrameSource) or columns is not None or extra != "refuse":
            source = FittedRows(source, spec, columns=columns, extra=extra)
        run = self._open_run(
            name,
            ordered,
            max_attempts,
            budget_ms,
            tenant,
            fail_fast=fail_fast,
            cache=cache,
            on_event=on_event,
            capture=capture,
            binary=True,
            nan=nan,
        )
        timer: asyncio.TimerHandle | None = None
        try:
            self._start_run(run, source)
            timer = self._arm_deadline(run, deadline_ms)
            async with aclosing(run.batches()) as batches:
                async for batch in batches:
                    yield [Result(result, outgoing) for result in batch]
            self._check_alive()
        finally:
            run.stop(StopReason.CANCELLED)
            if timer is not None:
                timer.cancel()

    def shared(self, value: T) -> Shared[T]:
        """Keep a large value that many calls read, and give what stands for it in their arguments, at any depth.

            with worker.shared(matrix) as shared:
                async for result in worker.map(score, ({"row": row, "matrix": shared} for row in rows)):
                    ...

        It is copied once, now, into memory that every executor of this worker can read, whoever's calls it runs, and
        none can write. A function gets an array as a view of that memory, which cannot be written to; anything else
        is made once in each executor, by the parameter's type, and the same object is given to each of its calls.
        The value goes when the Shared was closed, or is held by nobody, and no call or map that was given it is left.
        Raises UsageError for a value that cannot cross, and above `shared_bytes_max`.
        """
        self._running()
        if self._shared is None:
            raise UsageError(self._no_shared)
        return self._shared.add(value)

    @property
    def shared_bytes(self) -> int:
        """Memory that shared values take up."""
        return 0 if self._shared is None else self._shared.used_bytes

    async def map_frame(
        self, function: str | Callable[..., Any], frame: Frame, *, into: str = "output", **options: Any
    ) -> Frame:
        """`map` over a frame, and the frame back with two more columns: the results, named `into`, and `into_error`,
        text where a call failed. It is of the library that it came from (of pyarrow for other Arrow tables).

        Results of types that one column does not hold are JSON text. The options are those of `map` but `ordered`. All
        results are held in memory.
        """
        frame = hold(frame)
        check_free(frame, into)
        values: list[Any] = []
        errors: list[str | None] = []
        async with aclosing(self.map(function, cast(Iterable[Any], frame), ordered=True, **options)) as results:
            async for result in results:
                failure = result.error
                values.append(None if failure is not None else result.value)
                errors.append(None if failure is None else f"{failure.kind.value}: {failure.message}")
        return cast(Frame, with_results(frame, values, errors, into))

    def open_run(
        self,
        function: str | None,
        source: CallSource,
        sink: OutputSink,
        *,
        max_attempts: int | None = None,
        budget_ms: int | None = None,
        deadline_ms: int | None = None,
        max_failures: int | str | FailureLimit | None = None,
        fail_fast: bool = False,
        cache: CachePolicy = "promised",
        tenant: str = "default",
        on_event: EventCallback | None = None,
        capture: bool = False,
        check_only: bool = False,
        file_run: FileRun | None = None,
        binary: bool = False,
        nan: Nan = "refuse",
    ) -> Run:
        """A call list from `source` to `sink`. `function` None: each row names its own.

        More than `max_failures` failed calls, a number or a share such as "5%", stop the run, and what runs then; a
        share counts from 100 ended calls on. With `fail_fast` the first one stops it, and calls that run still end.
        With `capture` the sink gets results with what their calls printed. With `check_only` nothing is called: a row
        whose arguments fit the function has the result null, another fails as it would. `file_run`, whose `begin` gave
        the source and the sink, makes the run one that can go on whatever ends it. `binary`: the sink takes results
        with bytes, arrays and tables beside their JSON. `nan`: what NaN and infinities in a result become.
        """
        if function is not None:
            self._spec(function)
        _check_whole("deadline_ms", deadline_ms, -MILLISECONDS_MAX, MILLISECONDS_MAX)
        limit = None if max_failures is None else FailureLimit.of(max_failures)
        task = self._open_run(
            function,
            True,
            max_attempts,
            budget_ms,
            tenant,
            fail_fast=fail_fast,
            cache="off" if check_only else cache,
            on_event=on_event,
            capture=capture,
            check_only=check_only,
            file_run=file_run,
            binary=binary,
            nan=nan,
        )
        return Run(self, task, source, sink, deadline_ms, limit, file_run)

    async def run(self, function: str | None, source: CallSource, sink: OutputSink, **options: Any) -> RunSummary:
        """Run a whole call list; see `open_run` for the options. Raises what the source or the sink raises."""
        return await self.open_run(function, source, sink, **options).wait()

    # --- looking ------------------------------------------------------------------------------------------------

    def functions(self) -> list[FunctionSpec]:
        """The functions of the newest bundle, in their order."""
        return self.registry.described()

    def slots(self) -> list[SlotView]:
        """The pool's slots with their processes and load."""
        return [] if self._pool is None else self._pool.slots()

    def statistics(self) -> SchedulerStatistics:
        return self._running().statistics()

    def io_statistics(self) -> dict[str, IoStatistics]:
        """By provider."""
        return {} if self._io is None else self._io.statistics()

    def restarts(self) -> dict[str, int]:
        """Executors that took the place of another, by pool."""
        return {} if self._pool is None else self._pool.restarts()

    def running(self) -> list[RunningCall]:
        """Calls that have begun and not ended, the one sent first first."""
        if self._pool is None or self._actor is None:
            return []
        found = ((executor_id, self._actor.find_call(call_id)) for call_id, executor_id in self._pool.begun())
        return [RunningCall(*call, executor_id) for executor_id, call in found if call is not None]

    @property
    def run_folder(self) -> RunFolder:
        """Raises UsageError before the start."""
        self._running()
        assert self._folder is not None
        return self._folder

    @property
    def sandbox(self) -> Sandbox:
        """What confines the executors, from `start` on; those of named pools: `sandboxes`."""
        return self._sandboxes.get(DEFAULT_POOL, OFF)

    @property
    def sandboxes(self) -> Mapping[str, Sandbox]:
        """What confines the executors of each pool, from `start` on; the worker's own is named `default`."""
        return {str(DEFAULT_POOL): OFF} | {str(name): sandbox for name, sandbox in self._sandboxes.items()}

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
        limit, used = executor.pool.config.executor_memory_high_watermark, executor.memory_bytes
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
        spec = self.registry.get(function)
        if function not in self._view:
            raise UnknownFunction(
                f"no function {function!r} in the version that this worker serves: call reload() for the newest"
            )
        return spec

    def _check_pools(self, registry: Registry) -> None:
        """Raises UsageError when a function runs in a pool that there is not."""
        wanted: dict[str, list[str]] = {}
        for spec in registry.described():
            wanted.setdefault(spec.promises.pool or DEFAULT_POOL, []).append(spec.name)
        if wrong := self.config.describe_pools(wanted):
            raise UsageError(wrong)

    def _new_view(self, registry: Registry, admission: Admission) -> CodeView:
        targets: dict[str, FunctionTarget] = {spec.name: _target(spec, self._confined) for spec in registry.described()}
        digest = registry.bundle.digest
        return CodeView(digest, targets, audit_id=admission.audit_id, refusal=admission.refusal)

    def _describe_missing(self, name: str) -> CallFailure:
        """Of what an executor called and has not. It cannot reach tools of the dispatcher's process (D48)."""
        if name in self.registry and self.registry.get(name).handler is not None:
            why = "it runs in the dispatcher's process, which no executor can call"
            return describe_missing_function(name, why, "not_in_executor")
        return describe_missing_function(name)

    async def preload(self) -> None:
        """Have every executor load the functions' file now, and later ones before they take calls: no call waits for
        an import."""
        self._running()
        assert self._pool is not None
        await self._pool.preload()

    def _find_bundle(self, digest: Digest) -> tuple[Path, str] | None:
        return None if self._shelf is None else self._shelf.find(digest)

    def _find_code(self) -> CodePlace | None:
        """The code that every executor runs, if there is but one."""
        assert self._shelf is not None
        digest = self._view.digest
        found = self._shelf.find(digest)
        if found is None or len(self._shelf) > 1 or self._view.refusal is not None:
            return None
        return (digest, *found)

    def _keep_shared(self, plan: TaskPlan, args: bytes) -> CallFailure | None:
        """What is shared in these arguments stays until the task has ended."""
        if self._shared is None or not is_packed(args):
            return None
        return self._shared.use(plan.task_id, args)

    def _pin(self, run: TaskRun | SingleCall, view: CodeView) -> None:
        """The task's code stays until the task has ended."""
        assert self._shelf is not None
        assert self._pool is not None
        self._shelf.pin(view.digest)
        self._pinned[run] = view
        self._pool.look_at_placements_soon()

    def _open_run(
        self,
        function: str | None,
        ordered: bool,
        max_attempts: int | None,
        budget_ms: int | None,
        tenant: str,
        *,
        fail_fast: bool,
        cache: CachePolicy,
        on_event: EventCallback | None,
        capture: bool,
        check_only: bool = False,
        file_run: FileRun | None = None,
        binary: bool,
        nan: Nan,
    ) -> TaskRun:
        if cache not in get_args(CachePolicy):
            raise UsageError(f"cache must be one of {', '.join(get_args(CachePolicy))}, got {cache!r}")
        plan, view = self._plan(max_attempts, budget_ms, tenant, streaming=True, row=True, binary=binary, nan=nan)
        if check_only:
            view = view.only_checking()
        plan = msgspec.structs.replace(plan, cache=cache, on_failure="fail_fast" if fail_fast else "continue")
        run = TaskRun(
            self._running(),
            self._clock,
            self.config,
            plan,
            view,
            function=function,
            ordered=ordered,
            gate=file_run,
            on_event=on_event,
            capture=capture,
            on_end=self._on_run_end,
            keep_shared=lambda run, args: self._keep_shared(run.plan, args),
        )
        self._pin(run, view)
        return run

    def _plan(
        self,
        max_attempts: int | None,
        budget_ms: int | None,
        tenant: str,
        *,
        streaming: bool,
        row: bool = False,
        binary: bool = False,
        nan: Nan = "refuse",
    ) -> tuple[TaskPlan, CodeView]:
        """A task's plan and its pinned view. Call lists take a task slot, single calls do not (D39).

        Raises UsageError for values out of range: they must not get as far as the scheduler or an executor.
        """
        _check_whole("max_attempts", max_attempts, *MAX_ATTEMPTS_RANGE)
        _check_whole("budget_ms", budget_ms, 0, MILLISECONDS_MAX)
        _check_tenant(tenant)
        if self._confined and tenant != self._tenant:
            self._has_tenants = self._tenant is not None
            self._tenant = self._tenant or tenant
        if self._closing:
            raise UsageError("the worker is closing and takes no new calls")
        plan = TaskPlan(
            task_id=TaskId(f"task-{next(_TASK_NUMBERS)}"),
            tenant=Tenant(tenant),
            max_attempts=self.config.default_max_attempts if max_attempts is None else max_attempts,
            default_budget_ms=0,
            streaming=streaming,
            uses_slot=streaming,
            takes_rows=row,
            binary=binary,
            nan_null=wants_null(nan),
        )
        view = self._view
        if budget_ms is not None:
            view = view.with_budget(budget_ms)
        return plan, view

    def _start_run(self, run: TaskRun, source: CallSource) -> None:
        refusal = self._pinned[run].refusal
        rows = iter(source.rows() if refusal is None else _deny(source.rows(), refusal))
        self._runs.add(run)
        run.start(lambda wake: ThreadFeed(rows, wake) if source.may_block else InlineFeed(rows))
        assert self._pool is not None
        self._pool.look_at_placements_soon()

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
        if self._shared is not None:
            self._shared.end_use(run.plan.task_id)
        view = self._pinned.pop(run, None)
        if view is not None and self._shelf is not None:
            self._shelf.unpin(view.digest)
        self._idle.set()

    def _on_protocol_error(self, executor_id: ExecutorId, message: str) -> None:
        if self._pool is not None:
            self._pool.lose_by_id(executor_id, "malformed_frame", message)

    def _on_cancel_sent(self, link: ExecutorLink) -> None:
        if self._pool is not None:
            self._pool.on_cancel_sent(link)

    def _on_unavailable(self, pool: PoolName, message: str) -> None:
        assert self._actor is not None
        waiting = self._actor.tasks_waiting_for(pool)
        for run in list(self._runs):
            if run.plan.task_id in waiting:
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
        failure_limit: FailureLimit | None,
        file_run: FileRun | None,
    ) -> None:
        self._worker = worker
        self._task = task
        self._source = source
        self._sink = sink
        self._deadline_ms = deadline_ms
        self._failure_limit = failure_limit
        self._file_run = file_run
        if file_run is not None:
            file_run.on_failed = self._end_by
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
            if self._file_run is None:
                self._sink.close()
            else:
                converged = self._task.converged
                await self._file_run.finish(stopped=converged is None or converged.stop_reason is not None)
        except BaseException:
            self._task.stop(StopReason.SINK_FAILED)
            if self._file_run is None:
                self._sink.abort()
            else:
                self._file_run.abort()
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
                self._end_by(error)
                return

    def _end_by(self, error: Exception) -> None:
        self._sink_error = error
        self._task.stop(StopReason.SINK_FAILED)

    def _take(self, batch: Sequence[CallResult]) -> None:
        if self._sink_error is not None:
            raise self._sink_error
        self._count(batch)
        self._sink.write(batch)
        if self._failure_limit is not None and self._failure_limit.is_exceeded(self._failed, self._calls):
            self._task.stop(StopReason.MAX_FAILURES)

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
        lost = () if self._file_run is None else self._file_run.lost_results
        self._count(lost)
        return RunSummary(
            calls=self._calls,
            failed=self._failed,
            failures=self._failures,
            elapsed_ms=self._clock.now_ms() - self._started_at_ms,
            stop_reason=None if converged is None else converged.stop_reason,
            peak_memory_bytes=peak_memory_bytes(),
            standing=0 if self._file_run is None else self._file_run.standing,
        )


def _check_whole(name: str, value: object, low: int, high: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UsageError(f"{name} must be a whole number from {low} to {high}, got {value!r}")


def _check_tenant(tenant: object) -> None:
    if not isinstance(tenant, str) or not 1 <= len(tenant) <= TENANT_CHARACTERS_MAX or not tenant.isprintable():
        raise UsageError(f"tenant must be a printable text of 1 to {TENANT_CHARACTERS_MAX} characters")


def peak_memory_bytes() -> int:
    """Largest resident size of this process so far."""
    try:
        # Not ru_maxrss on Linux: it counts what the process was before exec, a copy of the one that started it.
        status = Path("/proc/self/status").read_bytes()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1_024
    _, _, after = status.partition(b"VmHWM:")
    return int(after.split(maxsplit=1)[0]) * 1_024


def _deny(rows: Iterable[Row], refusal: CallFailure) -> Iterator[Row]:
    """Each row is a call that is refused; what is wrong with a row itself is told first."""
    for row in rows:
        yield row if row.failure is not None else msgspec.structs.replace(row, failure=refusal)


def _target(spec: FunctionSpec, confined: Set[PoolName]) -> FunctionTarget:
    pool = PoolName(spec.promises.pool or DEFAULT_POOL)
    return FunctionTarget(
        function_id=FunctionId(spec.name),
        digest=spec.digest,
        entry_selector=spec.entry_selector,
        idempotent=spec.promises.idempotent,
        budget_ms=spec.promises.budget_ms,
        pure=spec.promises.pure,
        exclusive=spec.promises.exclusive,
        max_concurrency=spec.promises.max_concurrency,
        takes_row=spec.takes_row,
        pool=pool,
        confined=pool in confined,
        binary=spec.binary,
    )
