"""The hub: the main greenlet, which reads the link and runs everything else.

One pump serves two ways of waiting. A bundle of plain functions needs no event loop: the hub blocks on the socket, or
on it and the next sleeper. Once the bundle has an `async def`, an asyncio loop waits instead and calls the same pump
(`tasks.Loop`). Either way one job runs at a time, entered by `enter` and left by a switch back.

Invariants, by the names that the tests use:
- mark before run: the mark page names a call before the first instruction of the user's runs (X62);
- unpromised results first: no call without a promise begins while a finished one's result may still be here (X62);
- mark and answer are one step: whether a call had begun is decided in this greenlet only (X93);
- one terminal frame per call: `_close` is the only way out of `_calls`.
"""

from __future__ import annotations

import contextvars
import gc
import heapq
import os
import sys
from collections import deque
from collections.abc import Callable
from time import monotonic_ns
from types import FrameType
from typing import TYPE_CHECKING, Final, NoReturn, TextIO

from callyard import sdk
from callyard.errors import ErrorKind, Outcome
from callyard.executor import answers, budget, failures, nested_loops
from callyard.executor.binding import Binding, CodePlace, CodeRefused
from callyard.executor.budget import NEVER, RAISE_AGAIN_NS, RAISES_MAX, Alarm, Stop
from callyard.executor.capture import Teller
from callyard.executor.code import Code, NotUsable
from callyard.executor.contexts import (
    FINISHED,
    LOOK,
    QUARANTINE,
    SLEEPING,
    SLICE,
    Call,
    Context,
    Pool,
    this_greenlet,
)
from callyard.executor.failures import Fault
from callyard.executor.guards import Guards, open_descriptors
from callyard.executor.heartbeat import Watch
from callyard.executor.lifeline import flush_each, flush_streams
from callyard.executor.link import Link
from callyard.executor.marks import NO_CALL, NO_SLOT, Marks
from callyard.executor.requests import Requests
from callyard.executor.seats import Seats, ancestry_of
from callyard.executor.threads import ThreadWatch, count_threads
from callyard.ids import CallId, Digest
from callyard.wire.codec import UnknownMessage
from callyard.wire.messages import (
    ArenaReleased,
    BatchedCall,
    CancelCall,
    CancelReason,
    Describe,
    ExecuteCall,
    ExecuteCallPayload,
    ExecuteCalls,
    ExecuteCallsPayload,
    HeartbeatAck,
    ResumeCall,
    WorkerMessage,
)

if TYPE_CHECKING:
    from callyard.executor.tasks import Loop

ROOM_WAIT_MS: Final = 50
READ_AGAIN_NS: Final = 1_000_000
"""Between calls the link is read again when the last time is longer ago: a recall must not wait for a whole burst."""
TURN_NS: Final = 10_000_000
"""How long one turn of the pump may keep an event loop from its own work."""
DROPPED_KINDS_MAX: Final = 100
NO_PARENT: Final = CallId("")
STOPS: Final = {
    CancelReason.CANCELLED: budget.CANCELLED,
    CancelReason.DEADLINE: budget.DEADLINE,
    CancelReason.SHUTTING_DOWN: budget.SHUTTING_DOWN,
}


class Hub:
    """Built in the main thread, in the greenlet that then calls `run`."""

    def __init__(self, link: Link, marks: Marks, guards: Guards, *, max_inflight: int, with_locals: bool) -> None:
        self.greenlet: Final = this_greenlet()
        self.running: Context | None = None
        """The context that is switched to. None: the hub itself runs, or waits."""
        self.slice_number = 0
        self.active_ns = monotonic_ns()
        """When the hub last ran itself: at each turn and switch."""
        self.busy_ns = 0
        """Running time of all finished slices."""
        self.draining = ""
        """Why this process wants to be replaced; it begins nothing more."""
        self.dropped: dict[str, int] = {}
        """Messages that were counted and ignored, by what they were."""
        self.sleeping_count = 0
        """Begun calls that wait."""
        self.loop: Loop | None = None
        self.pool: Final = Pool(self.greenlet, max_inflight * 2)
        self.alarm: Final = Alarm(self)
        self.watch: Watch
        self._link = link
        self._marks = marks
        self._guards = guards
        guards.release_timer = self.alarm.disarm
        link.await_room = self._await_room
        self.threads = ThreadWatch()
        self.requests: Final = Requests(self, link)
        self.teller: Final = Teller(link)
        self._seats: Final = Seats(marks.slot_count - max_inflight - 1)  # one for the subcall that is just ending
        self._max_inflight = max_inflight
        self._with_locals = with_locals
        self._calls: dict[CallId, Call] = {}
        self._ready: deque[Call | Context] = deque()
        self._sleepers: list[tuple[int, int, Context]] = []
        self._sleep_number = 0
        self._loading = False
        self._binding = Binding(link, self._load)
        self._later: deque[Callable[[], None]] = deque()
        """Work that may run user code in the hub, so never while a call is only paused to look at the link."""
        self._variables = contextvars.copy_context()
        self._quarantined: list[Context] = []
        """Strong references: a dropped greenlet would be thrown GreenletExit, and run again."""
        self._read_ns = 0
        self.streams: list[TextIO] = []
        """Ours, on stdout and stderr: part of a line is shown once nothing else is to be done."""

    # --- what a heartbeat tells; read by the watch thread ---------------------------------------------------------

    @property
    def busy(self) -> bool:
        """User code may be running."""
        return self.running is not None or self._loading

    @property
    def running_call_id(self) -> CallId | None:
        call: Call | None = getattr(self.running, "call", None)
        return None if call is None else call.call_id

    @property
    def alarm_is_taken(self) -> bool:
        """User code has changed the handler of SIGALRM: the signal might kill the process now."""
        return self._guards.alarm_touched

    @property
    def inflight_count(self) -> int:
        return len(self._calls)

    @property
    def runnable_count(self) -> int:
        return max(0, len(self._calls) - self.sleeping_count)

    @property
    def available_contexts(self) -> int:
        """Room for root calls."""
        root_count = len(self._calls) - len(self._seats.calls)
        return 0 if self.draining else max(0, self._max_inflight - root_count)

    @property
    def code(self) -> Code:
        """The bundle's, of whose functions one is running."""
        code = self._binding.code
        assert code is not None
        return code

    # --- turns ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until the link ends. Raises `LinkClosed` and `ProtocolError`, never returns otherwise."""
        while self.loop is None:
            idle = not self._ready and not self._later
            wake_ns = self.turn(block=idle and not self._sleepers and self.teller.due_ns == NEVER)
            if wake_ns is not None and not self._later:
                wait_ns = wake_ns - monotonic_ns()
                if wait_ns > 0:
                    self._link.wait_readable(-(-wait_ns // 1_000_000))
        self.loop.run()

    def turn(self, *, block: bool = False) -> int | None:
        """Read, wake, run what is ready, flush.

        Returns when to be called again though nothing arrives, in monotonic nanoseconds; None: not at all. A turn in an
        event loop ends early, with `now`, when it has run for `TURN_NS`.
        """
        messages = self._link.read(block=block)
        now = self._read_ns = self.active_ns = monotonic_ns()
        for message in messages:
            self._handle(message)
        while self._later:
            self._later.popleft()()
        if self.loop is not None and not self.loop.started:
            self._link.flush()
            return now
        self._wake_sleepers(now)
        more = self._run_ready(now + TURN_NS if self.loop is not None else None)
        if not more:
            flush_each(self.streams)  # before the results: who has them may end this process
        self._link.flush()
        if more:
            return now
        wake_ns = self._sleepers[0][0] if self._sleepers else None
        if self.teller.due_ns == NEVER:
            return wake_ns
        if self.teller.due_ns <= self.active_ns:
            self.teller.send_due(self.active_ns)
        return self.teller.due_ns if wake_ns is None else min(wake_ns, self.teller.due_ns)

    def _run_ready(self, until_ns: int | None) -> bool:
        ready = self._ready
        while ready:
            item = ready.popleft()
            if type(item) is Call:
                if not item.over:
                    self._begin(item)
            else:
                assert isinstance(item, Context)
                self._resume(item)
            now = self.active_ns
            if until_ns is not None and now > until_ns:
                return bool(ready)
            if now - self._read_ns > READ_AGAIN_NS and ready:
                self.look()
                self._wake_sleepers(self._read_ns)
                if self._later:
                    return True
        return False

    def look(self) -> None:
        """Read and answer without running anything; also while a call is paused in the middle of its code."""
        self._read_ns = monotonic_ns()
        for message in self._link.read(block=False):
            self._handle(message)
        self._link.flush()

    def _await_room(self) -> None:
        """The arena is full of values that the worker has still to read. Called in whatever greenlet has another."""
        self._link.flush()
        self._link.wait_readable(ROOM_WAIT_MS)
        if this_greenlet() is self.greenlet:
            self.look()
        else:
            self.greenlet.switch(LOOK)

    # --- messages -------------------------------------------------------------------------------------------------

    def _handle(self, message: WorkerMessage | UnknownMessage) -> None:
        kind = type(message)
        if kind is ExecuteCall:
            assert isinstance(message, ExecuteCall)
            self._receive(message.call_id, message.payload)
            return
        match message:
            case ExecuteCalls():
                idempotent = message.payload.promises.idempotent
                for one in message.payload.calls:
                    self._receive(one.call_id, expand(message.payload, one), batched=idempotent)
            case CancelCall():
                self._cancel(message)
            case ResumeCall():
                self._resume_call(message)
            case Describe():
                self._later.append(lambda: self._describe(message))
            case ArenaReleased():
                self._link.take_back(message.payload.grants)
            case HeartbeatAck():
                pass
            case UnknownMessage():
                self._drop(f"message {message.message_type}"[:100])
            case ExecuteCall():
                raise AssertionError("handled above")

    def _drop(self, what: str) -> None:
        if what in self.dropped or len(self.dropped) < DROPPED_KINDS_MAX:
            self.dropped[what] = self.dropped.get(what, 0) + 1

    def _receive(self, call_id: CallId, payload: ExecuteCallPayload, *, batched: bool = False) -> None:
        """Take a call in, or hand it back as `recalled`: the worker then sends it elsewhere, at no cost to it."""
        sidecar = self._link.args_sidecars.pop(call_id, None) if self._link.args_sidecars else None
        if call_id in self._calls:
            self._drop("ExecuteCall of a call that is here")
            return
        if payload.parent_call_id:
            self._receive_subcall(call_id, payload, sidecar)
            return
        slot = None
        if not self.draining and len(self._calls) - len(self._seats.calls) < self._max_inflight:
            slot = self._marks.take()
            if slot is None:
                slot = self._take_slot()
        if slot is None:
            answers.put_recalled(self._link, call_id, payload, NO_SLOT)
            return
        call = self._calls[call_id] = Call(call_id, payload, slot, self._read_ns)
        call.batched = batched
        if sidecar is not None or payload.args_at is not None:
            self._fetch_later(call, sidecar)
        code = self._binding.code
        if code is not None and code.digest == payload.function_code_digest:
            self._ready.append(call)
        else:
            self._await_code(call)

    def _take_slot(self) -> int | None:
        slot = self._marks.take()
        if slot is None:  # results in the buffer hold some
            self._link.flush()
            slot = self._marks.take()
        return slot

    def _fetch_later(self, call: Call, sidecar: bytes | None) -> None:
        """Its arguments are made its own when it begins: until then they count for the arena."""
        payload = call.payload
        call.fetch = lambda: self._link.open_value(payload.args, sidecar, payload.args_at)

    def _receive_subcall(self, call_id: CallId, payload: ExecuteCallPayload, sidecar: bytes | None) -> None:
        """Never handed back while a call above it is here, not even by a process that drains: that one waits for it."""
        if self.draining and not any(above in self._calls for above in ancestry_of(call_id)[:-1]):
            answers.put_recalled(self._link, call_id, payload, NO_SLOT)
            return
        call = self._calls[call_id] = Call(call_id, payload, NO_SLOT, self._read_ns)
        if sidecar is not None or payload.args_at is not None:
            self._fetch_later(call, sidecar)
        if self._seats.admit(call):
            self._seat(call)
        elif self._seats.is_too_small:
            text = f"no room for subcalls: the begun-mark page has {self._marks.slot_count} slots"
            self._fail(call, Fault(ErrorKind.INTERNAL, text, Outcome.NOT_RUN))
        elif call.fetch is not None:  # whoever gives it its seat may wait for room in the arena
            value = call.fetch()
            call.fetch = lambda: value

    def _seat(self, call: Call) -> None:
        slot = self._take_slot()
        assert slot is not None, "a seat is a slot"
        call.slot = slot
        code = self._binding.code
        if code is not None and code.digest == call.payload.function_code_digest:
            self._ready.append(call)
        else:
            self._await_code(call)

    def _await_code(self, call: Call) -> None:
        fault = self._binding.admit(call)
        if fault is not None:
            self._fail(call, fault)

    def _cancel(self, message: CancelCall) -> None:
        call = self._calls.get(message.call_id)
        if call is None or call.payload.attempt_seq != message.payload.attempt_seq:
            self._drop("CancelCall of no call here")
            return
        reason = message.payload.reason
        if reason is not CancelReason.RECALL:
            self.stop(call, STOPS[reason])
        elif not call.begun:
            self._recall(call)

    def _resume_call(self, message: ResumeCall) -> None:
        if self._binding.takes_answer(message):
            self._later.append(lambda: self._take_code(message))
        elif not self.requests.answer(message):
            self._drop(f"ResumeCall of {message.payload.resume_kind}")

    # --- code -----------------------------------------------------------------------------------------------------

    def _take_code(self, message: ResumeCall) -> None:
        try:
            self._ready.extend(self._binding.take_code(message))
        except CodeRefused as refused:
            for call in refused.calls:
                self._fail(call, refused.fault, retryable=refused.retryable)

    def _describe(self, message: Describe) -> None:
        self._ready.extend(self._binding.describe(message))

    def _load(self, digest: Digest, place: CodePlace) -> Code:
        """Run the module's own code, here in the hub: no call is charged with it, and none runs beside it."""
        self._loading = self._guards.loading = True
        self.slice_number += 1
        if self.watch.parked:
            self.watch.unpark()
        try:
            code = Code(digest, place.path, place.module, with_locals=self._with_locals)
        finally:
            self._loading = self._guards.loading = False
            if self._guards.in_child:
                end_child(None)
        gc.freeze()  # what the module loaded stays: no full collection has to walk it while calls wait
        self._variables = contextvars.copy_context()
        self.threads.start()
        self.teller.watch_logging()
        self.alarm.install()
        self.active_ns = monotonic_ns()
        if code.has_async:
            from callyard.executor.tasks import Loop

            before = open_descriptors()
            self.loop = Loop(self, self._link.fd, self._max_inflight)
            self._guards.keep_open(open_descriptors() - before)
        return code

    # --- running --------------------------------------------------------------------------------------------------

    def _begin(self, call: Call) -> None:
        """From here on the call may have had an effect."""
        code = self._binding.code
        assert code is not None
        call.code = code
        try:
            invocable = call.invocable = code.find(call.payload.entry_selector)
        except NotUsable as failure:
            self._fail(call, failure.fault)
            return
        if invocable.is_async:
            assert self.loop is not None
            call.sliced = call.payload.entry_selector in code.sliced
            self.loop.begin(call, self._variables.copy())
            return
        self.mark_begun(call)
        if code.sliced:
            call.sliced = call.payload.entry_selector in code.sliced
        context = self.pool.take(call, call, self._variables.copy())
        self._after_slice(context, self._enter_plain(context, None))

    def mark_begun(self, call: Call) -> None:
        payload = call.payload
        if self._link.unpromised_waiting and not payload.promises.idempotent:
            self._link.flush()
        self._marks.mark(call.slot, payload.call_number)
        call.begun = True
        call.begun_ns = self.active_ns
        call.queued_ns = max(0, call.begun_ns - call.received_ns)  # it may have been read in between, by `look`

    def _resume(self, context: Context) -> None:
        """Switch back to a `def` that slept, throwing when it is being stopped."""
        call = context.call
        call.queued_ns += max(0, self.active_ns - context.sleep_from_ns)
        error: BaseException | None = None
        if call.stop is not None:
            call.raises += 1
            call.raised_ns = self.active_ns
            error = call.stop.error(call.stop.text)
        self._after_slice(context, self._enter_plain(context, error))

    def _enter_plain(self, context: Context, error: BaseException | None) -> object:
        """Enter a `def`: under an event loop, with that loop hidden, so that asyncio.run works in it."""
        if self.loop is None:
            return self.enter(context, error)
        self.loop.hide()
        outcome = self.enter(context, error)
        self.loop.show()
        return outcome

    def enter(self, context: Context, error: BaseException | None) -> object:
        """Switch to a context until it switches back, and account for the slice. Returns what it switched with."""
        call = context.call
        self.running = context
        self.slice_number += 1
        if self.watch.parked:
            self.watch.unpark()
        if self._guards.kept:
            self._note_all(call, self._guards.wear(call))
        self._marks.set_running(call.payload.call_number)
        now = call.slice_ns = self.active_ns = monotonic_ns()
        if call.stop is not None:
            self.alarm.arm(now + RAISE_AGAIN_NS)
        elif call.budget_ns:
            end_ns = now + call.budget_ns - call.used_ns(now, self.busy_ns)
            if end_ns < self.alarm.armed_ns:
                self.alarm.arm(end_ns)
        if call.sliced and call.stop is None:
            self.alarm.arm_slice(now)
        outcome = context.at.switch(context.job) if error is None else context.at.throw(error)
        while outcome is LOOK or outcome is SLICE:
            self.look()
            if outcome is SLICE:
                now = monotonic_ns()
                if self._others_can_run(call, now):
                    break
                self.alarm.arm_slice(now)
            outcome = context.at.switch()
        self._marks.set_running(NO_CALL)
        self.running = None
        now = self.active_ns = monotonic_ns()
        spent_ns = now - call.slice_ns
        call.slice_ns = 0
        call.run_ns += spent_ns
        self.busy_ns += spent_ns
        if self._guards.changed:
            self._put_back(call)
        if count_threads() != self.threads.seen_count:
            self.threads.attribute(call)
        return outcome

    def _others_can_run(self, call: Call, now: int) -> bool:
        self._wake_sleepers(now)
        return bool(self._ready) or (self.loop is not None and self.loop.has_others(call))

    def _after_slice(self, context: Context, outcome: object) -> None:
        call = context.call
        if outcome is FINISHED:
            self.pool.give_back(context)
            self.finish(call)
        elif outcome is SLEEPING:
            if call.stop is not None:
                self._press(context)
        elif outcome is SLICE:
            context.sleep_from_ns = self.active_ns  # from now on it waits for its turn
            self._ready.append(context)
        elif outcome is QUARANTINE:
            self.quarantine(call, [context])
        else:
            call.fault = Fault(ErrorKind.INTERNAL, "the function switched to the executor's own greenlet")
            self.quarantine(call, [context])

    def _press(self, context: Context) -> None:
        """Its call is to stop, and went to sleep all the same."""
        self.requests.take_context(context.call)
        self._end_sleep(context, monotonic_ns())
        if context.call.raises >= RAISES_MAX:
            self.quarantine(context.call, [context])
        else:
            self._ready.append(context)

    def _put_back(self, call: Call) -> None:
        if self._guards.in_child:
            end_child(call)
        self._note_all(call, self._guards.put_back(call if call.is_exclusive and not call.over else None))
        if self._guards.alarm_touched:
            self._guards.alarm_touched = False
            self.alarm.install()

    def _note_all(self, call: Call, notes: list[str]) -> None:
        for note in notes:
            call.note(note)

    # --- sleeping -------------------------------------------------------------------------------------------------

    def suspend(self, context: Context, seconds: float) -> None:
        """Put the running call to sleep; called in its greenlet. The sleep is cut at the end of the budget."""
        now = monotonic_ns()
        call = context.call
        context.at = this_greenlet()
        try:
            if context.looped:
                assert self.loop is not None
                self.loop.sleep(seconds)
                return
            due_ns = now + int(seconds * 1e9)
            if call.budget_ns:
                due_ns = min(due_ns, now + max(0, call.budget_ns - call.used_ns(now, self.busy_ns)))
            self._sleep_number += 1
            context.sleep_number, context.sleep_from_ns = self._sleep_number, now
            heapq.heappush(self._sleepers, (due_ns, self._sleep_number, context))
            self.give_way()
        finally:
            context.at = context.greenlet

    def give_way(self) -> None:
        """Let a `def` wait, until the hub resumes it; called in its greenlet. Whoever wakes it lowers the count."""
        self.sleeping_count += 1
        aside = nested_loops.set_aside()
        try:
            self.greenlet.switch(SLEEPING)
        finally:
            nested_loops.put_back(aside)

    def _wake_sleepers(self, now: int) -> None:
        sleepers = self._sleepers
        while sleepers and sleepers[0][0] <= now:
            due_ns, number, context = heapq.heappop(sleepers)
            if context.sleep_number != number:  # it was stopped while it slept
                continue
            self._end_sleep(context, due_ns)
            call = context.call
            if call.budget_ns and call.stop is None and call.used_ns(now, self.busy_ns) >= call.budget_ns:
                call.stop = budget.BUDGET
            self._ready.append(context)

    def wake(self, context: Context) -> None:
        """All that its call waited for is answered; it may have used up the budget."""
        now = monotonic_ns()
        self._end_sleep(context, now)
        call = context.call
        if call.budget_ns and call.stop is None and call.used_ns(now, self.busy_ns) >= call.budget_ns:
            call.stop = budget.BUDGET
        self._ready.append(context)

    def busy_at(self, now: int) -> int:
        """Running time of all slices, the present one included."""
        context = self.running
        return self.busy_ns + (now - context.call.slice_ns if context is not None else 0)

    def _end_sleep(self, context: Context, until_ns: int) -> None:
        if context.sleep_number:  # else it waited for requests, whose answers say what they cost
            context.sleep_number = 0
            context.call.wait_ns += max(0, until_ns - context.sleep_from_ns)
        context.sleep_from_ns = until_ns  # from now on it waits for its turn
        self.sleeping_count -= 1

    # --- stopping -------------------------------------------------------------------------------------------------

    def stop(self, call: Call, stop: Stop) -> None:
        """End a call wherever it is. A running one is interrupted by the alarm, whose handler asked us to look."""
        if call.stop is not None or call.over:
            return
        if not call.begun:
            self._fail(call, answers.stopped(call, stop, 0))
            return
        call.stop = stop
        if call.family is not None:
            assert self.loop is not None
            self.loop.press(call, later=call.raises > 0)
            return
        context = self._sleeping_context(call) or self.requests.take_context(call)
        if context is not None:
            self._end_sleep(context, monotonic_ns())
            self._ready.appendleft(context)

    def _sleeping_context(self, call: Call) -> Context | None:
        for _, number, context in self._sleepers:
            if context.sleep_number == number and context.call is call:
                return context
        return None

    def quarantine(self, call: Call, contexts: list[Context]) -> None:
        """These greenlets of a call never run again: the process is to be replaced once its others are done (X53)."""
        self._quarantined += contexts
        call.note("did not stop when interrupted: put out of use, with whatever locks it holds")
        if call.stop is not None and call.fault is None and contexts:
            call.fault = Fault(ErrorKind.INTERNAL, "", stack=failures.stack_of_suspended(call, contexts[0]))
        if self.loop is None:
            nested_loops.set_aside()
        self.finish(call)
        self.drain("quarantine")

    def drain(self, reason: str) -> None:
        """Begin nothing more, hand back what has not begun, finish the rest."""
        if self.draining:
            return
        self.draining = reason
        for call in list(self._calls.values()):
            if not call.begun and call.payload.parent_call_id not in self._calls:
                self._recall(call)
        self._link.flush()
        self.watch.beat()

    def interrupt_callback(self, frame: FrameType | None) -> None:
        """The alarm rang while no context runs: idle, or a loop callback of some call's is at it."""
        if self.loop is not None:
            self.loop.interrupt_callback(frame)

    # --- ends -----------------------------------------------------------------------------------------------------

    def finish(self, call: Call) -> None:
        """Its code has run to an end. The clock is read again here (X53)."""
        used_ns = call.used_ns(self.active_ns, self.busy_ns)
        if call.stop is None and call.budget_ns and used_ns > call.budget_ns:
            call.stop = budget.BUDGET
        if call.threads is not None or call.jobs is not None:
            self._tell_threads(call)
        if self._guards.kept:
            self._note_all(call, self._guards.give_up(call))
        self._close(call)
        if self.teller.calls:
            self.teller.end(call)
        if call.stop is not None:
            answers.put_failed(self._link, call, answers.stopped(call, call.stop, used_ns), used_ns)
        elif call.fault is not None:
            answers.put_failed(self._link, call, call.fault, used_ns)
        else:
            answers.put_completed(self._link, call, used_ns)

    def _fail(self, call: Call, fault: Fault, *, retryable: bool | None = None) -> None:
        """End a call that has not begun."""
        self._close(call)
        answers.put_failed(self._link, call, fault, 0, retryable=retryable)

    def _recall(self, call: Call) -> None:
        """Give back a call that has not begun. Mark and answer are one step (X93)."""
        self._close(call)
        answers.put_recalled(self._link, call.call_id, call.payload, call.slot)

    def _close(self, call: Call) -> None:
        """It is about to be answered."""
        assert not call.over, call.call_id
        call.over = True
        if call.family is not None and self.loop is not None:
            self.loop.forget(call)
        del self._calls[call.call_id]
        if self.requests.by_call and call in self.requests.by_call:
            self.requests.forget(call)
        if self._seats.calls and call in self._seats.calls:
            freed = self._seats.leave(call)
            if freed is not None:
                self._seat(freed)

    def _tell_threads(self, call: Call) -> None:
        left = self.threads.left_by(call)
        for text in left.notes:
            call.note(text)
        if left.must_recycle:
            self.drain("thread")

    # --- a fork that user code makes ------------------------------------------------------------------------------

    def forked(self) -> None:
        """In the child: it must neither speak for us nor mark our page."""
        self._link.close_in_child(self._guards.close)
        self._marks.close()
        self.teller.close_in_child()
        sdk.set_runtime(None)


def expand(shared: ExecuteCallsPayload, one: BatchedCall) -> ExecuteCallPayload:
    """One call of an ExecuteCalls, as if it had come alone."""
    return ExecuteCallPayload(  # by position: this runs for every call
        shared.task_id,
        shared.function_id,
        shared.function_code_digest,
        one.attempt_seq,
        one.args,
        one.call_number,
        shared.row,
        shared.strings,
        shared.entry_selector,
        NO_PARENT,
        shared.call_budget_ms,
        shared.audit,
        shared.promises,
        one.context,
        shared.events,
        shared.check_only,
        shared.result_form,
    )


def end_child(call: Call | None) -> NoReturn:
    """User code forked, and the child came back from it: it ends here, as a program would after its main function."""
    fault = call.fault if call is not None else None
    status = 0
    if fault is not None:
        status = fault.details.get("exit_code", 1)
        if "exit_code" not in fault.details:
            sys.stderr.write(fault.stack or fault.message + "\n")
    flush_streams()
    os._exit(status)
