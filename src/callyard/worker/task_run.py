"""The life of one task: rows become batches, batches settle, results leave in order.

The credit window bounds what is built, the reorder buffer what is parked; a consumer that stops taking stops the
production. A batch holds about `BATCH_SPAN_MS` of the task's own throughput, so that slow calls are answered one by
one and fast ones share the cost of a batch. Source: call-execution X20, X43, X75, X76, X77.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Final, Protocol

from callyard.clock import Clock
from callyard.errors import CallError, CallFailure, ErrorKind, fail
from callyard.functions.function import RESULT_BYTES_MAX
from callyard.functions.ports import AskCallback, SubcallEvent
from callyard.policy.credit import CreditWindow, ReorderBuffer
from callyard.scheduler import CallResult, FunctionTarget, NewCall, StopReason, TaskPlan, prepare_batch
from callyard.scheduler import commands as c
from callyard.scheduler import events as e
from callyard.scheduler.batches import PreparedBatch
from callyard.scheduler.statistics import TaskProgress
from callyard.wire.messages import JSON_FORM, CallContext, CallEventPayload, ResultForm
from callyard.wire.values import is_packed
from callyard.worker.actor import DEFAULT_CONTEXT, Actor, BatchPrepared, CallSubmitted, TaskOpened
from callyard.worker.begun import BegunRows
from callyard.worker.builders import Row
from callyard.worker.code_view import CodeView
from callyard.worker.config import WorkerConfig
from callyard.worker.feeds import RowFeed
from callyard.worker.io.hub import TaskIoOptions
from callyard.worker.results import EventCallback, ToldCalls, with_echo
from callyard.worker.subcall_trail import SubcallTrail

BATCH_SPAN_MS: Final = 20
OUTSTANDING_PARTS: Final = 32
"""A batch holds at least this part of the rows that are outstanding."""
ATTEMPT_FORM: Final = ResultForm(bytes_max=RESULT_BYTES_MAX)
"""Of a tool call: JSON, and no more than a gate hands on (D26)."""
BATCHES_PER_SLICE: Final = 16
"""Batches built before the loop gets its turn again."""
_ARGS_OF: Final = attrgetter("args")


class BatchGate(Protocol):
    """What a batch passes before it is sent."""

    @property
    def begun(self) -> BegunRows | None: ...

    def admit(self, end_row: int, send: Callable[[], None]) -> None:
        """Call `send` on the loop, in the order of the batches, once calls of rows before `end_row` may be sent."""
        ...


class TaskRun:
    """One call list from its first row to its convergence. Satisfies `TaskListener`."""

    __slots__ = (  # read for every call: above 30 attributes without slots each read is a search
        "_actor",
        "_building",
        "_clock",
        "_config",
        "_echoes",
        "_ended",
        "_failure",
        "_feed",
        "_function",
        "_gate",
        "_gated",
        "_keep_shared",
        "_mean_output_bytes",
        "_next_batch",
        "_on_end",
        "_opened",
        "_rate_at_ms",
        "_rate_rows",
        "_reorder",
        "_rest",
        "_rows_built",
        "_rows_per_ms",
        "_rows_settled",
        "_shut",
        "_source_ended",
        "_told",
        "_told_end",
        "_view",
        "_wake",
        "_weights",
        "_window",
        "audits",
        "begun",
        "context",
        "converged",
        "plan",
        "result_form",
        "source_error",
        "takes_rows",
        "wants_events",
    )

    trail: SubcallTrail | None = None
    io_options: TaskIoOptions | None = None
    deadline_at_ms: int | None = None

    def __init__(
        self,
        actor: Actor,
        clock: Clock,
        config: WorkerConfig,
        plan: TaskPlan,
        view: CodeView,
        *,
        function: str | None,
        ordered: bool = True,
        gate: BatchGate | None = None,
        on_event: EventCallback | None = None,
        capture: bool = False,
        on_end: Callable[[TaskRun | SingleCall], None],
        keep_shared: Callable[[TaskRun, bytes], CallFailure | None] = lambda _, __: None,
    ) -> None:
        """`keep_shared`: called with the arguments of each row that has binary parts; a failure is the row's."""
        self.plan = plan
        self.takes_rows = plan.takes_rows
        self.context = _context_of(plan)
        self.audits = view.audits
        self.result_form = form_of(plan)
        self._told = ToldCalls(on_event, capture=capture)
        self.wants_events = self._told.wanted
        self.converged: c.ConvergeTaskCalls | None = None
        self.source_error: BaseException | None = None
        """What the source raised; re-raised by `batches` once the results before it were handed out."""
        self._actor = actor
        self._clock = clock
        self._config = config
        self._view = view
        self._function = function
        self._on_end = on_end
        self._keep_shared = keep_shared
        self._feed: RowFeed | None = None
        self._echoes: dict[int, bytes] = {}
        """By index, of rows that were taken and are not settled: what their results repeat."""
        self.begun = None if gate is None else gate.begun
        self._gate = gate
        self._gated = 0
        """Batches at the gate."""
        self._shut = False
        """What is at the gate is not sent any more."""
        self._told_end = False
        """The scheduler was told that no more batches come."""
        self._rest: deque[Row] = deque()
        """Rows that were taken and are behind a gap: they begin another batch."""
        self._window = CreditWindow(config.max_outstanding_batches, config.outstanding_bytes_max)
        self._weights: dict[int, int] = {}
        """Of each outstanding batch: its arguments and what its outputs may come to, then its outputs, in bytes."""
        self._mean_output_bytes = 0.0
        """Of the rows that settled last."""
        self._reorder: ReorderBuffer[CallResult] = ReorderBuffer(config.reorder_bytes_max, ordered=ordered)
        self._next_batch = 0
        self._rows_built = 0
        self._ended = False
        """No more batches will be built."""
        self._source_ended = False
        self._building = False
        self._opened = False
        self._wake = asyncio.Event()
        self._failure: Exception | None = None
        """Why there will be no convergence: not admitted, or the worker failed."""
        self._rows_settled = 0
        self._rate_at_ms = 0
        self._rate_rows = 0
        self._rows_per_ms = 0.0

    # --- production ---------------------------------------------------------------------------------------------

    def start(self, open_feed: Callable[[Callable[[], None]], RowFeed]) -> None:
        """Open the task and begin to build. `open_feed` is given the callback for rows that come late."""
        self._opened = True
        self._actor.post(TaskOpened(self.plan, self))
        self._rate_at_ms = self._clock.now_ms()
        self._feed = open_feed(self.produce)
        self.produce()

    def produce(self) -> None:
        """Build batches while there are credits and rows; come back when there are again."""
        if self._ended or self._building or self._feed is None:
            return
        self._building = True
        try:
            for _ in range(BATCHES_PER_SLICE):
                if not self._window.is_open:
                    return
                if not self._build_batch(self._feed):
                    return
            asyncio.get_running_loop().call_soon(self.produce)
        except Exception as error:  # noqa: BLE001  # the source's own: raised where the results are taken
            self.source_error = error
            self._end_production()
        finally:
            self._building = False

    def _build_batch(self, feed: RowFeed) -> bool:
        """Whether there may be more. The rows of a batch follow one another."""
        ended = False
        if not self._rest:
            taken = feed.take(self._batch_rows(), self._config.batch_args_bytes)
            self._rest.extend(taken.rows)
            ended = taken.ended
        rows = self._take_following()
        if rows:
            size = sum(map(len, map(_ARGS_OF, rows))) + int(self._mean_output_bytes * len(rows))
            self._window.take(size)
            self._weights[self._next_batch] = size
            prepared = prepare_batch(self.plan, self._next_batch, rows[0].index, map(self._new_call, rows))
            self._next_batch += 1
            self._rows_built += len(rows)
            if self._gate is None:
                self._actor.post(BatchPrepared(prepared))
            else:
                self._gated += 1
                self._gate.admit(rows[-1].index + 1, partial(self._send, prepared))
        self._source_ended |= ended
        if self._source_ended and not self._rest:
            self._end_production()
            return False
        return bool(rows)

    def _take_following(self) -> list[Row]:
        rest = self._rest
        if rest and rest[-1].index - rest[0].index == len(rest) - 1:  # there is no gap
            rows = list(rest)
            rest.clear()
            return rows
        rows = []
        while rest and (not rows or rest[0].index == rows[-1].index + 1):
            rows.append(rest.popleft())
        return rows

    def _send(self, prepared: PreparedBatch) -> None:
        """A batch comes out of the gate."""
        if self._shut:
            return
        self._gated -= 1
        self._actor.post(BatchPrepared(prepared))
        self._tell_end()

    def _batch_rows(self) -> int:
        """Rows of the next batch: about `BATCH_SPAN_MS` of the throughput seen so far, and no less than a small part of
        what is outstanding, so that many slow calls do not use up the window by ones."""
        outstanding = self._rows_built - self._rows_settled
        rows = max(1, int(self._rows_per_ms * BATCH_SPAN_MS), outstanding // OUTSTANDING_PARTS)
        return min(self._config.batch_rows, rows)

    def _measure(self, rows: int) -> None:
        self._rows_settled += rows
        now_ms = self._clock.now_ms()
        passed_ms = now_ms - self._rate_at_ms
        if passed_ms >= BATCH_SPAN_MS or self._rows_settled - self._rate_rows >= self._config.batch_rows:
            rate = (self._rows_settled - self._rate_rows) / max(1, passed_ms)
            self._rows_per_ms = rate if self._rows_per_ms == 0 else (self._rows_per_ms + rate) / 2
            self._rate_at_ms, self._rate_rows = now_ms, self._rows_settled

    def _new_call(self, row: Row) -> NewCall:
        name = row.function or self._function
        failure = row.failure
        target = None
        if row.echo:
            self._echoes[row.index] = row.echo
        if failure is None and is_packed(row.args):
            failure = self._keep_shared(self, row.args)
        if failure is None:
            target = self._view.get(name) if name is not None else None
            if target is None:
                failure = fail(ErrorKind.NOT_FOUND, self._not_found(name))
        return NewCall(row.index, target, row.args, row.strings, failure)

    def _not_found(self, name: str | None) -> str:
        return f"no function {name!r}; there are {', '.join(sorted(self._view)) or 'none'}"

    def _end_production(self, *, shut: bool = False) -> None:
        """Build no more; with `shut` what is still at the gate stays there."""
        if shut:
            self._shut = True
            self._rest.clear()
        if not self._ended:
            self._ended = True
            if self._feed is not None:
                self._feed.close()
        self._tell_end()

    def _tell_end(self) -> None:
        if self._ended and not self._told_end and (self._shut or not self._gated):
            self._told_end = True
            self._actor.post(e.ProductionEnded(self.plan.task_id))

    def stop(self, reason: StopReason, *, cancel_running: bool = True, message: str = "") -> None:
        """Dispatch nothing more; with `cancel_running` also stop what runs. Convergence follows."""
        if not self._opened:
            self._close()  # nobody was told of it: there is nothing to converge
        elif self.converged is None:
            self._actor.post(e.TaskStopped(self.plan.task_id, reason, cancel_running, message))
            self._end_production(shut=True)

    def progress(self) -> TaskProgress:
        """The counts now, or the final ones."""
        converged = self.converged
        if converged is not None:
            return TaskProgress(converged.total_count, converged.total_count, converged.failed_count, 0)
        return self._actor.progress(self.plan.task_id) or TaskProgress(0, 0, 0, 0)

    # --- what the actor tells -----------------------------------------------------------------------------------

    def find_target(self, name: str) -> FunctionTarget | None:
        return self._view.get(name)

    def on_rejected(self, failure: CallFailure) -> None:
        self.fail(CallError(failure), None)

    def fail(self, error: Exception, cause: BaseException | None) -> None:
        """There will be no convergence: everybody who waits for this task gets `error`."""
        error.__cause__ = cause
        self._failure = error
        self._close()

    def on_call_event(self, index: int, event: CallEventPayload) -> None:
        self._told.hear(index, event)

    def on_batch_committed(self, accepted: bool) -> None:
        """A task that takes no more batches is told to end: what came too late holds its credit to no harm."""

    def on_batch_settled(self, command: c.BatchSettled) -> None:
        self._measure(len(command.results))
        results, told_bytes = self._told.attach(command.results)
        if self._echoes:
            echoes = [self._echoes.pop(result.index, b"") for result in results]
            results = [with_echo(result, echo) for result, echo in zip(results, echoes, strict=True)]
            told_bytes += sum(map(len, echoes))
        size = command.output_bytes + told_bytes
        self._mean_output_bytes = (self._mean_output_bytes + size / max(1, len(results))) / 2
        if self._reorder.settle(command.batch_index, results, size):
            self._window.give_back(self._weights.pop(command.batch_index))
        else:
            self._window.weigh(self._weights[command.batch_index], size)
            self._weights[command.batch_index] = size
        self.produce()
        self._wake.set()

    def on_stop_production(self, reason: StopReason) -> None:
        self._end_production(shut=True)

    def on_converged(self, command: c.ConvergeTaskCalls) -> None:
        self.converged = command
        self._close()

    def _close(self) -> None:
        self._ended = True
        if self._feed is not None:
            self._feed.close()
        self._wake.set()
        self._on_end(self)

    # --- results ------------------------------------------------------------------------------------------------

    async def batches(self) -> AsyncGenerator[Sequence[CallResult], None]:
        """Settled batches for one consumer. Asking for the next one says that the last was taken.

        Ends with the task. Raises CallError when the task was not admitted, and what its source raised. Leaving
        early stops the task and waits for its end.
        """
        try:
            while True:
                ready = self._reorder.pop_ready()
                if ready is None:
                    if self._failure is not None:
                        raise self._failure
                    if self.converged is not None:
                        break
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                index, results, credit_out = ready
                yield results
                self._taken(index, credit_out)
            if self.source_error is not None:
                raise self.source_error
        finally:
            if self.converged is None and self._failure is None:
                self.stop(StopReason.CANCELLED)
                await self._discard_rest()

    def _taken(self, index: int, credit_out: bool) -> None:
        self._actor.post(e.BatchTaken(self.plan.task_id, index))
        if credit_out:
            self._window.give_back(self._weights.pop(index))
            self.produce()

    async def _discard_rest(self) -> None:
        while self.converged is None and self._failure is None:
            while (ready := self._reorder.pop_ready()) is not None:
                self._taken(ready[0], ready[2])
            self._wake.clear()
            await self._wake.wait()


class SingleCall:
    """A task of one root call, for `Worker.call`: no window, no order, one future. Satisfies `TaskListener`."""

    trail: SubcallTrail | None = None
    io_options: TaskIoOptions | None = None
    deadline_at_ms: int | None = None
    begun: BegunRows | None = None

    def __init__(
        self,
        actor: Actor,
        plan: TaskPlan,
        view: CodeView,
        call: NewCall,
        on_end: Callable[[TaskRun | SingleCall], None],
        on_event: EventCallback | None = None,
        *,
        capture: bool = False,
    ) -> None:
        self.plan = plan
        self.takes_rows = plan.takes_rows
        self.context = _context_of(plan)
        self.audits = view.audits
        self.result_form = form_of(plan)
        self._told = ToldCalls(on_event, capture=capture)
        self.wants_events = self._told.wanted
        self._actor = actor
        self._view = view
        self._on_end = on_end
        self.done: asyncio.Future[CallResult] = asyncio.get_running_loop().create_future()
        """Its end; CallError when it was not admitted."""
        self._ended = False
        """It converged, or never will."""
        actor.post(CallSubmitted(plan, self, prepare_batch(plan, 0, 0, (call,))))

    async def wait(self) -> CallResult:
        """The call's end. Cancelling the wait stops the call. Raises CallError when the call was not admitted."""
        try:
            return await self.done
        except asyncio.CancelledError:
            self.stop(StopReason.CANCELLED)
            raise

    def stop(self, reason: StopReason, *, message: str = "") -> None:
        if not self._ended:
            self._actor.post(e.TaskStopped(self.plan.task_id, reason, True, message))

    def fail(self, error: Exception, cause: BaseException | None) -> None:
        error.__cause__ = cause
        self._end()
        if not self.done.done():
            self.done.set_exception(error)

    def _end(self) -> None:
        self._ended = True
        self._on_end(self)

    def find_target(self, name: str) -> FunctionTarget | None:
        return self._view.get(name)

    def on_rejected(self, failure: CallFailure) -> None:
        self.fail(CallError(failure), None)

    def on_call_event(self, index: int, event: CallEventPayload) -> None:
        self._told.hear(index, event)

    def on_batch_committed(self, accepted: bool) -> None:
        """A single call is committed with its task; nobody waits for this."""

    def on_batch_settled(self, command: c.BatchSettled) -> None:
        raise AssertionError("a task that is not streaming settles no batch by itself")

    def on_stop_production(self, reason: StopReason) -> None:
        """Its production ended when it began."""

    def on_converged(self, command: c.ConvergeTaskCalls) -> None:
        self._end()
        if not self.done.done():  # a caller that was cancelled waits no more
            results, _ = self._told.attach(command.results[:1])
            self.done.set_result(results[0])


class AttemptCall(SingleCall):
    """One attempt of a dispatched call (D39). Its events go out as they came, and its subcalls are told of (D48)."""

    def __init__(
        self,
        actor: Actor,
        plan: TaskPlan,
        view: CodeView,
        call: NewCall,
        context: CallContext,
        deadline_at_ms: int | None,
        on_event: Callable[[CallEventPayload], None] | None,
        on_subcall: Callable[[SubcallEvent], None] | None,
        on_ask: AskCallback | None,
        on_end: Callable[[TaskRun | SingleCall], None],
    ) -> None:
        super().__init__(actor, plan, view, call, on_end)
        if on_ask is not None:
            self.io_options = TaskIoOptions(ask=on_ask)
        self._waiting: list[Callable[[], object]] = []
        if on_subcall is not None:
            self.trail = SubcallTrail(on_subcall)
        self.context = context
        self.deadline_at_ms = deadline_at_ms
        self.wants_events = on_event is not None
        self._on_event = on_event
        self.result_form = ATTEMPT_FORM

    def on_call_event(self, index: int, event: CallEventPayload) -> None:
        if self._on_event is not None:
            self._on_event(event)

    def when_ended(self, then: Callable[[], object]) -> None:
        """Call `then` when it has ended: its code runs no more, and its reservation is free."""
        if self._ended:
            then()
        else:
            self._waiting.append(then)

    def _end(self) -> None:
        super()._end()
        if self.trail is not None:
            self.trail.close()
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            then()


def form_of(plan: TaskPlan) -> ResultForm:
    """What the results of a task's root calls are to be."""
    return ResultForm(plan.binary, plan.nan_null) if plan.binary or plan.nan_null else JSON_FORM


def _context_of(plan: TaskPlan) -> CallContext:
    return DEFAULT_CONTEXT if plan.tenant == DEFAULT_CONTEXT.tenant else CallContext(tenant=plan.tenant)
