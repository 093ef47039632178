"""The one writer of the scheduler: an inbox of events, handled in turns.

Everybody else posts and returns. A turn takes a bounded number of events, settles until nothing moves, carries out the
commands, and flushes the links it wrote to. Bind and unbind happen inside the turn; the transport sends outside it.
Source: call-execution X2, X6, X19, X31, X39, X82, X83.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from heapq import heappop, heappush
from random import Random
from typing import Final, Protocol, assert_never

import msgspec

from callyard.clock import Clock
from callyard.errors import KIND_RULES, CallFailure, ErrorKind, InvalidTransition, Outcome, ProtocolError, fail
from callyard.ids import CallId, CallNumber, Digest, ExecutorId, FunctionId, RequestId, TaskId, task_of
from callyard.scheduler import Scheduler, SchedulerConfig, StopReason, TaskPlan
from callyard.scheduler import commands as c
from callyard.scheduler import events as e
from callyard.scheduler.batches import PreparedBatch
from callyard.scheduler.calls import FunctionTarget
from callyard.scheduler.commands import SchedulerCommand
from callyard.scheduler.events import SchedulerEvent
from callyard.scheduler.placement import Placement, PoolName
from callyard.scheduler.statistics import Demand, SchedulerStatistics, TaskProgress
from callyard.scheduler.subcalls import budget_left_ms, ties_of
from callyard.wire.arena import ArenaTooSmall
from callyard.wire.codec import encode_message
from callyard.wire.messages import (
    JSON_FORM,
    NULL,
    BatchedCall,
    CallContext,
    CallEvent,
    CallEventPayload,
    CancelCall,
    CancelCallPayload,
    CancelReason,
    ExecuteCall,
    ExecuteCallPayload,
    Promises,
    ResultForm,
    ResumeCall,
    ResumeCallPayload,
    Stored,
    WaitKind,
    WireError,
)
from callyard.wire.values import is_packed, json_of
from callyard.worker.begun import BegunRows
from callyard.worker.io.hub import IoAnswer, IoHub, TaskIoOptions
from callyard.worker.link import IDEMPOTENT, ExecutorLink, LinkEvent, SubcallAsked
from callyard.worker.subcall_trail import SubcallTrail

TURN_EVENTS_MAX: Final = 1_024
BATCHED_ARGS_BYTES_MAX: Final = 8 * 1024
"""A call with longer arguments travels in a frame of its own."""
_CANCEL_REASONS: Final = {
    StopReason.DEADLINE: CancelReason.DEADLINE,
    StopReason.SHUTTING_DOWN: CancelReason.SHUTTING_DOWN,
}
DEFAULT_CONTEXT: Final = CallContext()
LOOK_S_MIN: Final = 0.001
LOOK_S_MAX: Final = 0.02
"""Between two looks at the begun-marks: the shortest while looks let calls go on, doubled while they do not."""
_SUBCALL_NUMBERS: Final = itertools.count(1)
"""One sequence for the whole process, so that no two subcalls have one name (X24)."""
_UNPROMISED: Final = Promises()
_SUBCALL_FORM: Final = ResultForm(binary=True)
"""Of a subcall: its parent is Python. Where a result is never binary it is JSON, which roots may share (X15)."""


class TaskListener(Protocol):
    """What the actor tells of one task; calls come inside a turn and must not wait."""

    def find_target(self, name: str) -> FunctionTarget | None:
        """The function in the task's pinned view."""
        ...

    def on_call_event(self, index: int, event: CallEventPayload) -> None:
        """Progress, log or output of a call, or of a subcall of it, that runs."""
        ...

    def on_rejected(self, failure: CallFailure) -> None: ...
    def on_batch_committed(self, accepted: bool) -> None: ...
    def on_batch_settled(self, command: c.BatchSettled) -> None: ...
    def on_stop_production(self, reason: StopReason) -> None: ...
    def on_converged(self, command: c.ConvergeTaskCalls) -> None: ...

    @property
    def takes_rows(self) -> bool: ...
    @property
    def wants_events(self) -> bool:
        """Somebody listens to `on_call_event`."""
        ...

    @property
    def result_form(self) -> ResultForm:
        """Of its root calls."""
        ...

    @property
    def audits(self) -> Mapping[Digest, str]:
        """The audit's verdict on each bundle of the view, by its id."""
        ...

    @property
    def trail(self) -> SubcallTrail | None:
        """Who hears of the subcalls of its calls; None: nobody."""
        ...

    @property
    def io_options(self) -> TaskIoOptions | None: ...

    @property
    def context(self) -> CallContext:
        """Of the first attempt of its root calls; `DEFAULT_CONTEXT` itself when there is nothing to say."""
        ...

    @property
    def deadline_at_ms(self) -> int | None: ...

    @property
    def begun(self) -> BegunRows | None:
        """Where it is noted which of its calls have begun, for whoever comes after a kill (X88); None: nowhere."""
        ...


class TaskOpened(msgspec.Struct, frozen=True):
    """A task wants to begin."""

    plan: TaskPlan
    listener: TaskListener


class BatchPrepared(msgspec.Struct, frozen=True):
    """A batch wants to be committed."""

    prepared: PreparedBatch


class CallSubmitted(msgspec.Struct, frozen=True):
    """A task of one call: opened, committed and closed in one step."""

    plan: TaskPlan
    listener: TaskListener
    prepared: PreparedBatch


Post = SchedulerEvent | SubcallAsked | TaskOpened | BatchPrepared | CallSubmitted


class IoAsked:
    """An attempt that waits for IO: called with the answer, it sends it. No closure, since thousands of them wait."""

    __slots__ = ("_actor", "_attempt_seq", "_call_id", "_link", "_request_id")

    def __init__(
        self, actor: Actor, link: ExecutorLink, call_id: CallId, attempt_seq: int, request_id: RequestId
    ) -> None:
        self._actor = actor
        self._link = link
        self._call_id = call_id
        self._attempt_seq = attempt_seq
        self._request_id = request_id

    def __call__(self, answer: IoAnswer) -> None:
        self._actor.resume(
            self._link,
            self._call_id,
            self._request_id,
            WaitKind.IO,
            self._attempt_seq,
            msgspec.Raw(answer.result),
            answer.error,
            body=answer.body,
            budget_used_ms=answer.budget_used_ms,
        )


class Actor:
    """Owns the scheduler. `post` is its only entrance; with `debug` a guard raises for anybody else's."""

    def __init__(
        self,
        config: SchedulerConfig,
        clock: Clock,
        *,
        inbox_events_max: int,
        on_protocol_error: Callable[[ExecutorId, str], None],
        on_cancel_sent: Callable[[ExecutorLink], None],
        on_failed: Callable[[BaseException], None],
        io: IoHub,
        describe_missing: Callable[[str], CallFailure] | None = None,
        rng: Random | None = None,
        debug: bool = False,
    ) -> None:
        """`describe_missing` says why there is no function of a name that a call asked for."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._in_turn = False
        guard = self._check_writer if debug else None
        self._scheduler = Scheduler(config, rng or Random(), guard=guard, numbers=_SUBCALL_NUMBERS)
        self._io = io
        self._describe_missing = describe_missing or describe_missing_function
        self._io_tasks: set[TaskId] = set()
        """Tasks a call of which has asked for IO."""
        self._clock = clock
        self._inbox: deque[Post] = deque()
        self._inbox_events_max = inbox_events_max
        self._scheduled = False
        self._failed = False
        self._links: dict[ExecutorId, ExecutorLink] = {}
        self._touched: set[ExecutorLink] = set()
        self._paused: set[ExecutorLink] = set()
        """Links whose reading waits for the inbox to empty."""
        self._listeners: dict[TaskId, TaskListener] = {}
        self._noted: dict[TaskId, BegunRows] = {}
        """Of tasks whose begun calls are noted."""
        self._next_number = 0
        self._retries: list[tuple[int, int, CallId]] = []
        """Heap of due retries: instant, tie-breaker, call. They share one timer (X39)."""
        self._retry_timer: asyncio.TimerHandle | None = None
        self._retry_count = 0
        self._look_timer: asyncio.TimerHandle | None = None
        """The next look at the begun-marks (X91)."""
        self._look_delay_s = LOOK_S_MIN
        self._bound_before_look = 0
        """Calls bound when the pages were read last."""
        self._on_protocol_error = on_protocol_error
        self._on_cancel_sent = on_cancel_sent
        self._on_failed = on_failed

    # --- from outside -------------------------------------------------------------------------------------------

    def post(self, event: Post) -> None:
        """Tell the actor a fact. Returns at once; the turn comes on the loop."""
        self._inbox.append(event)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def post_from(self, link: ExecutorLink, events: list[LinkEvent]) -> None:
        """The facts of one read; the link's reading pauses while the inbox is over its bound (X82)."""
        self._inbox.extend(events)
        if len(self._inbox) > self._inbox_events_max and link.is_open:
            link.pause_reading()
            self._paused.add(link)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def add_link(self, link: ExecutorLink) -> None:
        self._links[link.executor_id] = link

    def remove_link(self, link: ExecutorLink) -> None:
        self._links.pop(link.executor_id, None)
        self._touched.discard(link)
        self._paused.discard(link)

    def touch(self, link: ExecutorLink) -> None:
        """Flush this link at the end of the turn that runs or comes."""
        self._touched.add(link)
        if not self._scheduled and not self._in_turn:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def statistics(self) -> SchedulerStatistics:
        return self._scheduler.statistics()

    def progress(self, task_id: TaskId) -> TaskProgress | None:
        return self._scheduler.progress(task_id)

    def find_call(self, call_id: CallId) -> tuple[int, FunctionId] | None:
        """A call's place in its list and its function; None: it is gone."""
        call = self._scheduler.find_call(call_id)
        return None if call is None else (call.index, call.target.function_id)

    def takes_binary(self, call_id: CallId) -> bool:
        """Whether whoever asked for this call can read a result with binary parts."""
        call = self._scheduler.find_call(call_id)
        if call is None:
            return True  # it is over: nobody looks at what it says
        return call.target.binary if call.parent is not None else call.task.plan.binary

    def exclusive_waiting(self, pool: PoolName) -> int:
        """Ready calls that wait for an executor of their own."""
        return self._scheduler.exclusive_waiting(pool)

    @property
    def has_strays(self) -> bool:
        """Subcalls wait for an executor of another pool than their parent's."""
        return self._scheduler.has_strays

    def demand(self) -> Demand:
        """Which placements lack executors, and which executor is bound to which."""
        return self._scheduler.demand()

    def find_placement(self, executor_id: ExecutorId) -> Placement | None:
        """What an executor is bound to; None: nothing yet."""
        return self._scheduler.find_placement(executor_id)

    def tasks_waiting_for(self, pool: PoolName) -> set[TaskId]:
        """Tasks with calls that wait for an executor of this pool."""
        return self._scheduler.tasks_waiting_for(pool)

    def begin_io(self, link: ExecutorLink, call_id: CallId, attempt_seq: int) -> int | None:
        """Before a request is submitted: the budget its call has left, 0 for unlimited; None: the call is gone."""
        call = self._scheduler.find_call(call_id)
        if call is None or call.attempt_seq != attempt_seq:
            return None
        task_id = call.task.task_id
        if task_id not in self._io_tasks:
            self._io_tasks.add(task_id)
            self._io.start_task(task_id, call.task.plan.tenant, self._listeners[task_id].io_options)
        link.io_attempts.add((call_id, attempt_seq))
        return max(1, budget_left_ms(call)) if call.budget_ms else 0

    def tell_call_event(self, message: CallEvent) -> None:
        """Hand on what a running call tells, under its root's place in the list."""
        call = self._scheduler.find_call(message.call_id)
        if call is not None:
            self._listeners[call.task.task_id].on_call_event(call.index, message.payload)

    def note_begun(self, calls: Iterable[CallId]) -> None:
        """These had begun in an executor whose marks go now."""
        if self._noted:
            for call_id in calls:
                self._note_begun(call_id)

    def _note_end(self, event: e.CallCompleted | e.AttemptFailed) -> None:
        """Before its context is free: then the mark may be overwritten."""
        if isinstance(event, e.AttemptFailed):
            outcome = KIND_RULES[event.kind].outcome if event.outcome is None else event.outcome
            if event.recalled or outcome is Outcome.NOT_RUN:
                return
        self._note_begun(event.call_id)

    def _note_begun(self, call_id: CallId) -> None:
        begun = self._noted.get(task_of(call_id))
        call = None if begun is None else self._scheduler.find_call(call_id)
        if begun is not None and call is not None and call.parent is None and not call.target.may_run_again:
            begun.end(call.index)

    def _note_sent(self, command: c.DispatchCall, number: CallNumber) -> None:
        """A call without a promise is about to be sent; a subcall's root must not run again by its own (X64)."""
        begun = self._noted.get(command.task_id)
        call = None if begun is None else self._scheduler.find_call(command.call_id)
        if begun is None or call is None:
            return
        if call.parent is None:
            begun.bind(call.index, number)
        else:
            begun.note_effect(call.index)

    def check_invariants(self) -> None:
        self._scheduler.check_invariants()

    def close(self) -> None:
        """No more turns."""
        self._failed = True
        self._inbox.clear()
        for timer in (self._retry_timer, self._look_timer):
            if timer is not None:
                timer.cancel()

    # --- the turn -----------------------------------------------------------------------------------------------

    def _check_writer(self) -> None:
        if not self._in_turn or threading.get_ident() != self._thread:
            raise InvalidTransition("only the actor's turn may change the scheduler; post an event instead")

    def _turn(self) -> None:
        self._scheduled = False
        if self._failed:
            return
        self._in_turn = True
        try:
            now_ms = self._clock.now_ms()
            inbox = self._inbox
            for _ in range(min(len(inbox), TURN_EVENTS_MAX)):
                self._take(inbox.popleft(), now_ms)
            self._settle(now_ms)
            if self._look_timer is None and self._scheduler.wants_marks:
                self._look_later()
        except Exception as error:  # noqa: BLE001  # a bug of ours: fail loudly, carry nothing on
            self._failed = True
            self._on_failed(error)
            return
        finally:
            self._in_turn = False
        if self._touched:
            touched, self._touched = self._touched, set()
            for link in touched:
                link.flush()
        if self._paused and len(inbox) <= self._inbox_events_max // 2:
            paused, self._paused = self._paused, set()
            for link in paused:
                link.resume_reading()
        if inbox and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _look_later(self) -> None:
        """Read the pages soon. A look that let several calls go on is followed by the next at once: calls that only
        wait show nothing but their marks."""
        helped = self._next_number - self._bound_before_look > len(self._links)
        self._look_delay_s = LOOK_S_MIN if helped else min(2 * self._look_delay_s, LOOK_S_MAX)
        self._look_timer = self._loop.call_later(self._look_delay_s, self._look)

    def _look(self) -> None:
        self._look_timer = None
        self._bound_before_look = self._next_number
        marks = [
            e.ExecutorMarks(executor_id, link.begun_attempts(), link.marks.running() is not None)
            for executor_id, link in self._links.items()
            if link.seats
        ]
        if marks:
            self.post(e.MarksRead(tuple(marks)))

    def _settle(self, now_ms: int) -> None:
        scheduler = self._scheduler
        while True:
            while commands := scheduler.flush_dirty_tasks(now_ms):
                self._execute(commands, now_ms)
            while commands := scheduler.try_dispatch_next(now_ms):
                self._execute(commands, now_ms)
            if scheduler.is_settled:
                return

    def _take(self, post: Post, now_ms: int) -> None:
        if isinstance(post, e.Event):
            if self._noted and isinstance(post, e.CallCompleted | e.AttemptFailed):
                self._note_end(post)
            try:
                self._execute(self._scheduler.handle(post, now_ms), now_ms)
            except ProtocolError as error:
                if not isinstance(post, e.CallSuspended | e.SubcallRequested | e.AttemptFailed):
                    raise
                self._on_protocol_error(post.executor_id, str(error))
        elif isinstance(post, SubcallAsked):
            self._take(self._resolve(post), now_ms)
        elif isinstance(post, BatchPrepared):
            accepted = self._scheduler.commit_batch(post.prepared)
            listener = self._listeners.get(post.prepared.task_id)
            if listener is not None:
                listener.on_batch_committed(accepted)
        elif isinstance(post, CallSubmitted):
            if self._open(post.plan, post.listener):
                self._scheduler.commit_batch(post.prepared)
                self._scheduler.handle(e.ProductionEnded(post.plan.task_id), now_ms)
        else:
            self._open(post.plan, post.listener)

    def _resolve(self, asked: SubcallAsked) -> e.SubcallRequested:
        """Find the function in the pinned view of the parent's task (X84)."""
        subcall = asked.subcall
        listener = self._listeners.get(task_of(asked.call_id))
        target = None
        if listener is not None:
            target = listener.find_target(subcall.function_id)
            if listener.trail is not None:
                self._trace(asked, listener.trail)
        failure = None
        if target is None:
            failure = self._describe_missing(subcall.function_id)
        return e.SubcallRequested(
            executor_id=asked.executor_id,
            call_id=asked.call_id,
            attempt_seq=asked.attempt_seq,
            request_id=asked.request_id,
            target=target,
            args=asked.args,
            granted_budget_ms=subcall.granted_budget_ms,
            spread=subcall.spread,
            failure=failure,
        )

    def _trace(self, asked: SubcallAsked, trail: SubcallTrail) -> None:
        """Tell of a subcall, before the scheduler decides on it: a refusal is told, too."""
        parent = self._scheduler.find_call(asked.call_id)
        if parent is None or parent.attempt_seq != asked.attempt_seq:
            return
        above = None
        if parent.parent is not None:
            above = (parent.parent.call_id, ties_of(parent).request_id)
        subcall = asked.subcall
        trail.begin((asked.call_id, asked.request_id), above, subcall.function_id, json_of(asked.args))

    def _open(self, plan: TaskPlan, listener: TaskListener) -> bool:
        failure = self._scheduler.commit_task(plan)
        if failure is not None:
            listener.on_rejected(failure)
            return False
        self._listeners[plan.task_id] = listener
        if listener.begun is not None:
            self._noted[plan.task_id] = listener.begun
        return True

    def _execute(self, commands: list[SchedulerCommand], now_ms: int) -> None:
        for command in commands:
            match command:
                case c.UnbindCall():
                    link = self._links.get(command.executor_id)
                    if link is not None:
                        if link.io_attempts:
                            self._end_io(link, command.call_id, command.attempt_seq)
                        link.release(command.call_id, command.attempt_seq)
                case c.BindCall():
                    self._bind(command, now_ms)
                case c.BatchSettled():
                    self._listeners[command.task_id].on_batch_settled(command)
                case c.ArmCallRetry():
                    self._arm_retry(command, now_ms)
                case c.CancelCall():
                    self._cancel(command, now_ms)
                case c.ConvergeTaskCalls():
                    if command.task_id in self._io_tasks:
                        self._io_tasks.remove(command.task_id)
                        self._io.end_task(command.task_id)
                    self._noted.pop(command.task_id, None)
                    self._listeners.pop(command.task_id).on_converged(command)
                case c.StopCallProduction():
                    self._listeners[command.task_id].on_stop_production(command.reason)
                case c.DispatchCall():
                    raise AssertionError("a DispatchCall answers an ExecutorBound, in _bind")
                case c.CompleteCallFromCache():
                    pass  # its result is in the batch
                case c.ResumeParent():
                    self._resume_parent(command)
                case _:
                    assert_never(command)

    def _bind(self, command: c.BindCall, now_ms: int) -> None:
        """Seat the attempt at its link and send it, in one step: nothing can come between."""
        link = self._links.get(command.executor_id)
        self._next_number += 1
        number = CallNumber(self._next_number)
        if link is None or not link.reserve(command.call_id, command.attempt_seq, number, command.budget_ms):
            refused = e.CallRefused(command.call_id, command.attempt_seq, "bind")
            self._execute(self._scheduler.handle(refused, now_ms), now_ms)
            return
        for dispatch in self._scheduler.handle(e.ExecutorBound(command.call_id), now_ms):
            assert isinstance(dispatch, c.DispatchCall), f"a bound call is dispatched, not {dispatch}"
            if self._noted and not dispatch.target.may_run_again:
                self._note_sent(dispatch, number)
            self._dispatch(dispatch, link, number, now_ms)

    def _dispatch(self, command: c.DispatchCall, link: ExecutorLink, number: CallNumber, now_ms: int) -> None:
        target = command.target
        listener = self._listeners[command.task_id]
        if listener.find_target(target.function_id) is not target:
            message = f"function {target.function_id!r} is not in the task's view of bundle {target.digest[:12]}"
            self._reject(command, ErrorKind.NOT_FOUND, message, now_ms)
            return
        context = listener.context
        if context is not DEFAULT_CONTEXT or command.attempt != 1:
            context = _context_of(command, listener, now_ms)
        elif (
            target.idempotent
            and not command.parent_call_id
            and len(command.args) <= BATCHED_ARGS_BYTES_MAX
            and not is_packed(command.args)
        ):
            if link.send_with_others(
                command.task_id,
                target,
                listener.takes_rows,
                command.strings,
                command.budget_ms,
                listener.audits.get(target.digest, ""),
                listener.wants_events,
                listener.result_form,
                BatchedCall(command.call_id, command.attempt_seq, msgspec.Raw(command.args), number),
            ):
                self._touched.add(link)
            else:
                self._refuse(command, now_ms)
            return
        try:
            placed = link.place(command.args, command.call_id, command.attempt_seq)
        except ArenaTooSmall as error:
            self._reject(command, ErrorKind.SCHEMA, f"its arguments are {error}", now_ms)
            return
        except OSError as error:
            self._reject(command, ErrorKind.RESOURCE_LIMIT, f"no memory for its arguments: {error}", now_ms)
            return
        if placed is None:
            self._refuse(command, now_ms)
            return
        payload = ExecuteCallPayload(  # by position: this runs for every call
            command.task_id,
            target.function_id,
            target.digest,
            command.attempt_seq,
            placed.raw,
            number,
            listener.takes_rows and not command.parent_call_id,
            command.strings,
            target.entry_selector,
            command.parent_call_id,
            command.budget_ms,
            listener.audits.get(target.digest, ""),
            IDEMPOTENT if target.idempotent else _UNPROMISED,
            context,
            listener.wants_events,
            target.check_only,
            listener.result_form if not command.parent_call_id else _SUBCALL_FORM if target.binary else JSON_FORM,
            placed.at,
        )
        try:
            frame = encode_message(ExecuteCall(command.call_id, payload), placed.sidecar)
        except ProtocolError as error:
            self._reject(command, ErrorKind.SCHEMA, f"it cannot be sent: {error}", now_ms)
            return
        if link.send_nowait(frame):
            self._touched.add(link)
        else:
            self._refuse(command, now_ms)

    def _refuse(self, command: c.DispatchCall, now_ms: int) -> None:
        refused = e.CallRefused(command.call_id, command.attempt_seq, "outbox")
        self._execute(self._scheduler.handle(refused, now_ms), now_ms)

    def _reject(self, command: c.DispatchCall, kind: ErrorKind, message: str, now_ms: int) -> None:
        event = e.DispatchRejected(command.call_id, command.attempt_seq, kind, message)
        self._execute(self._scheduler.handle(event, now_ms), now_ms)

    def _resume_parent(self, command: c.ResumeParent) -> None:
        """Answer a call's request with the end of its subcall (X28)."""
        listener = self._listeners.get(task_of(command.call_id))
        if listener is not None and listener.trail is not None:
            listener.trail.end((command.call_id, command.request_id), command.failure)
        link = self._links.get(command.executor_id)
        if link is not None:  # else its loss is on its way, and ends the call
            self._answer_subcall(command, link)

    def _answer_subcall(self, command: c.ResumeParent, link: ExecutorLink) -> None:
        ids = (command.call_id, command.request_id, WaitKind.SUBCALL, command.attempt_seq)
        if command.failure is not None:
            self.resume(link, *ids, NULL, wire_error(command.failure))
            return
        try:
            placed = link.place(command.output or b"null", command.call_id, command.attempt_seq)
        except ArenaTooSmall as error:
            self.resume(link, *ids, NULL, WireError(ErrorKind.RESULT, f"the result is {error}"))
            return
        except OSError as error:
            self.resume(link, *ids, NULL, WireError(ErrorKind.RESULT, f"no memory for the result: {error}"))
            return
        if placed is None:
            link.when_arena_has_room(partial(self._answer_late, command, link))
            return
        self.resume(link, *ids, placed.raw, None, body=placed.sidecar, result_at=placed.at)

    def _answer_late(self, command: c.ResumeParent, link: ExecutorLink) -> None:
        if (command.call_id, command.attempt_seq) in link.seats:  # else nobody waits for it any more
            self._answer_subcall(command, link)

    def resume(
        self,
        link: ExecutorLink,
        call_id: CallId,
        request_id: RequestId,
        kind: WaitKind,
        attempt_seq: int,
        result: msgspec.Raw,
        error: WireError | None,
        *,
        body: bytes | None = None,
        budget_used_ms: int = 0,
        result_at: Stored | None = None,
    ) -> None:
        """Send a ResumeCall; the scheduler hears of it once it was flushed, or that it could not be sent (X66)."""
        charged_ms = budget_used_ms if kind is WaitKind.IO else 0
        tell_resumed = partial(self.post, e.CallResumed(call_id, attempt_seq, request_id, charged_ms))
        payload = ResumeCallPayload(kind, attempt_seq, result, error, budget_used_ms, result_at)
        try:
            sent = link.send_when_room(ResumeCall(call_id, request_id, payload), tell_resumed, body)
        except ProtocolError as too_large:
            error = WireError(ErrorKind.RESULT, f"the answer is too large to send: {too_large}")
            payload = ResumeCallPayload(kind, attempt_seq, NULL, error, budget_used_ms)
            sent = link.send(ResumeCall(call_id, request_id, payload), tell_resumed)
        if sent:
            self.touch(link)
        else:
            self.post(e.ResumeSendFailed(call_id, attempt_seq))

    def _end_io(self, link: ExecutorLink, call_id: CallId, attempt_seq: int) -> None:
        """What an attempt that ends, or is told to, still has open is cancelled (X42)."""
        if (call_id, attempt_seq) in link.io_attempts:
            link.io_attempts.discard((call_id, attempt_seq))
            self._io.cancel_call(call_id, attempt_seq)

    def _cancel(self, command: c.CancelCall, now_ms: int) -> None:
        link = self._links.get(command.executor_id)
        if link is None:
            return  # its loss is on its way, and ends the call
        if command.reason is None:
            if link.send(CancelCall(command.call_id, CancelCallPayload(CancelReason.RECALL, command.attempt_seq))):
                self._touched.add(link)
            return
        reason = _CANCEL_REASONS.get(command.reason, CancelReason.CANCELLED)
        payload = CancelCallPayload(reason, command.attempt_seq)
        if link.send(CancelCall(command.call_id, payload)):
            link.cancelled_at_ms[command.call_id, command.attempt_seq] = now_ms
            self._end_io(link, command.call_id, command.attempt_seq)
            self._touched.add(link)
            self._on_cancel_sent(link)

    def _arm_retry(self, command: c.ArmCallRetry, now_ms: int) -> None:
        self._retry_count += 1
        heappush(self._retries, (command.due_at_ms, self._retry_count, command.call_id))
        if self._retries[0][1] == self._retry_count:
            self._set_retry_timer(now_ms)

    def _set_retry_timer(self, now_ms: int) -> None:
        if self._retry_timer is not None:
            self._retry_timer.cancel()
            self._retry_timer = None
        if self._retries:
            delay_s = max(0, self._retries[0][0] - now_ms) / 1_000
            self._retry_timer = self._loop.call_later(delay_s, self._fire_retries)

    def _fire_retries(self) -> None:
        now_ms = self._clock.now_ms()
        while self._retries and self._retries[0][0] <= now_ms:
            self.post(e.RetryDue(heappop(self._retries)[2]))
        self._retry_timer = None
        self._set_retry_timer(now_ms)


def describe_missing_function(name: str, why: str = "", reason: str = "") -> CallFailure:
    """Of a subcall to what is not in the bundle."""
    message = f"no function {name!r} in this bundle"
    if not reason:
        return fail(ErrorKind.NOT_FOUND, message)
    return fail(ErrorKind.NOT_FOUND, f"{message}: {why}", reason=reason)


def wire_error(failure: CallFailure) -> WireError:
    """A failed subcall as its parent is told of it."""
    details = dict(failure.details)
    if failure.stack:
        details["stack"] = failure.stack
    return WireError(failure.kind, failure.message, failure.retryable, details)


def _context_of(command: c.DispatchCall, listener: TaskListener, now_ms: int) -> CallContext:
    """What the attempt may know of itself. The worker's own retries, and subcalls, count from 1 by themselves. A key is
    the name of one effect: two subcalls that handed their call's on would pass for one (D48)."""
    context = listener.context
    below = bool(command.parent_call_id)
    attempt = context.attempt if command.attempt == 1 and not below else command.attempt
    deadline_at_ms = listener.deadline_at_ms
    return msgspec.structs.replace(
        context,
        attempt=attempt,
        idempotency_key="" if below else context.idempotency_key,
        call_id=CallId("") if below else context.call_id,
        deadline_remaining_ms=None if deadline_at_ms is None else max(0, deadline_at_ms - now_ms),
    )
