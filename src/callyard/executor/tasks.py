"""`async def` calls: asyncio tasks whose steps run in pooled greenlets (X52).

Imported only when the bundle has an async function. The loop waits in the hub's place and calls the hub's pump. A task
runs over a `Steps`, a coroutine object whose `send` and `throw` switch into a greenlet that drives the user's coroutine
and hand the future it waits for back to the task. So `current_task`, `timeout`, `TaskGroup` and `to_thread` work as
anywhere, while a step can be interrupted, quarantined and suspended by the SDK like a `def`.

Child tasks that user code makes are given the same form by the loop's task factory, and belong to their call: those
alive at its end are cancelled, and the call ends when they have. One that will not end costs the process (quarantine).

Interruption: a running step by the alarm, as a `def`; a waiting one by `Task.cancel`, since asyncio's own constructs
clean up on CancelledError alone. It is pressed again every 100 ms, and after the third time abandoned.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from time import monotonic_ns
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from callyard.executor import budget
from callyard.executor.budget import NEVER, RAISES_MAX, CallInterrupted
from callyard.executor.contexts import FINISHED, QUARANTINE, RUNNING, SLICE, Call, Context, Job, drive
from callyard.executor.threads import TO_THREAD_PREFIX

if TYPE_CHECKING:
    from callyard.executor.hub import Hub

T = TypeVar("T")

PRESS_AGAIN_NS: Final = 100_000_000
CLOSING_NS: Final = 1_000_000_000
"""How long cancelled child tasks may take to end after their call's function did."""
ALARM_LEAST_NS: Final = 10_000_000
_set_running_loop: Final = asyncio._set_running_loop


class Family:
    """The tasks of one async call."""

    __slots__ = (
        "busy_before_ns",
        "children",
        "closing",
        "coroutine",
        "free_before_ns",
        "free_since",
        "press_ns",
        "presses",
        "root",
        "waiting",
    )

    def __init__(self, root: Steps) -> None:
        self.root: Steps | None = root
        """None once the function has ended."""
        self.coroutine: Any = None
        """What the user's function returned, once it was called."""
        self.children: set[Steps] = set()
        """Child tasks that have not ended."""
        self.busy_before_ns = 0
        """The hub's `busy_ns` when the call began."""
        self.waiting = False
        """The root waits for a future."""
        self.closing = False
        """The function has ended, cancelled children have not."""
        self.press_ns = 0
        """When a stopping call is next cancelled, or a closing one given up."""
        self.presses = 0
        self.free_before_ns = 0
        """Waiting that was not charged: while requests were open, and nothing ran."""
        self.free_since: tuple[int, int] | None = None
        """When the first of the requests that are open now was opened, and the hub's running time then."""

    def begin_free(self, now: int, busy_ns: int) -> None:
        """The call waits for a request. `busy_ns`: the hub's, the present slice included."""
        self.free_since = (now, busy_ns)

    def end_free(self, now: int, busy_ns: int) -> None:
        """It waits for none any more."""
        self.free_before_ns = self.free_ns(now, busy_ns)
        self.free_since = None

    def free_ns(self, now: int, busy_ns: int) -> int:
        """Time that it has not to pay for, since it only waited for requests: they pay their own way."""
        if self.free_since is None:
            return self.free_before_ns
        since_ns, busy_before_ns = self.free_since
        return self.free_before_ns + max(0, now - since_ns - (busy_ns - busy_before_ns))


class Steps(Coroutine[Any, Any, Any]):
    """What a task runs over. One per task; the root's job is the call itself."""

    __slots__ = ("_call", "_context", "_coroutine", "_job", "_loop", "_variables", "task")

    task: asyncio.Task[Any] | None

    def __init__(
        self,
        loop: Loop,
        call: Call,
        coroutine: Coroutine[Any, Any, Any] | None,
        variables: contextvars.Context,
    ) -> None:
        """`coroutine`: a child's; None for the root."""
        self._loop = loop
        self._call = call
        self._coroutine = coroutine
        self._job: Job = call if coroutine is None else ChildJob(coroutine)
        self._variables = variables
        self._context: Context | None = None
        self.task = None

    def send(self, value: Any) -> Any:
        return self._step(None)

    def throw(self, typ: Any, val: Any = None, tb: Any = None) -> Any:
        error = val if isinstance(val, BaseException) else typ
        return self._step(error if isinstance(error, BaseException) else error())

    def close(self) -> None:
        if self._context is None and self._coroutine is not None:
            self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        raise TypeError("a task's steps are not awaited")

    # What debuggers and Task.get_stack look at.
    @property
    def cr_frame(self) -> FrameType | None:
        return getattr(self._coroutine, "cr_frame", None)

    @property
    def cr_running(self) -> bool:
        return bool(getattr(self._coroutine, "cr_running", False))

    def take_context(self) -> Context | None:
        """For an abandoned call: its suspended greenlet, never to be switched to again."""
        context, self._context = self._context, None
        return context

    def _step(self, error: BaseException | None) -> Any:
        try:
            ended_or_waiting = self._advance(error)
        except BaseException as bug:  # noqa: BLE001 - ours, not the user's: a task would keep it to itself
            self._loop.fail(bug)
            raise StopIteration from None
        if isinstance(ended_or_waiting, End):
            ended_or_waiting.deliver()
        return ended_or_waiting

    def _advance(self, error: BaseException | None) -> Any:
        """One step of the job: the future that it waits for, or its `End`."""
        call, loop = self._call, self._loop
        if call.over:
            self.close()
            return NOTHING
        family = call.family
        assert family is not None
        is_root = self._coroutine is None
        context = self._context
        if context is None:
            if error is not None:  # cancelled before its first step
                self.close()
                self._end(call)
                return End(error=error)
            if is_root:
                loop.mark_begun(call)
            context = self._context = loop.hub.pool.take(call, self._job, self._variables)
            context.looped = True
        elif is_root:
            loop.root_goes_on(family)
        outcome = loop.hub.enter(context, error)
        if outcome is FINISHED:
            self._context = None
            loop.hub.pool.give_back(context)
            self._end(call)
            return self._job.end if isinstance(self._job, ChildJob) else NOTHING
        if outcome is QUARANTINE:
            loop.abandon(call)
            return NOTHING
        if outcome is SLICE:
            if call.stop is not None:
                loop.press(call, later=is_root and call.raises > 0)
            return None  # as a bare yield: its task is called again after the others
        if is_root:
            loop.root_waits(family)
        if call.stop is not None:
            loop.press(call, later=is_root and call.raises > 0)
        return outcome

    def _end(self, call: Call) -> None:
        if self._coroutine is None:
            self._loop.root_ended(call)
        else:
            self._loop.child_ended(call, self)
        self.task = None


class End:
    """How a task's coroutine ended."""

    def __init__(self, value: Any = None, error: BaseException | None = None) -> None:
        self._value = value
        self._error = error

    def deliver(self) -> NoReturn:
        """Raise what a coroutine's `send` raises at its end."""
        error, self._error = self._error, None
        if error is None:
            raise StopIteration(self._value)
        try:
            raise error
        finally:
            del error


NOTHING: Final = End()


class ChildJob:
    """A child task's coroutine, run in a greenlet."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self.end = NOTHING

    def run(self) -> None:
        """An interruption ends the child as cancelled.

        Its call is being stopped anyway, and asyncio would report an exception that nobody fetches.
        """
        try:
            self.end = End(drive(self._coroutine))
        except CallInterrupted:
            self.end = End(error=asyncio.CancelledError())
        except BaseException as error:  # noqa: BLE001 - its task's to deliver
            self.end = End(error=error)


class CallThreads(ThreadPoolExecutor):
    """The loop's default executor: knows which call each job belongs to."""

    def __init__(self, hub: Hub, workers_max: int) -> None:
        super().__init__(workers_max, thread_name_prefix=TO_THREAD_PREFIX)
        self._hub = hub

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future = super().submit(fn, *args, **kwargs)
        call = RUNNING.get(None)
        if call is not None and not call.over:
            self._hub.threads.watch_job(call, future)
        return future


class Loop:
    """The asyncio loop that waits in the hub's place."""

    def __init__(self, hub: Hub, link_fd: int, threads_max: int) -> None:
        self.hub = hub
        self.started = False
        self._link_fd = link_fd
        self._aio_loop = asyncio.SelectorEventLoop()
        self._aio_loop.set_task_factory(self._make_task)
        self._aio_loop.set_default_executor(CallThreads(hub, threads_max))
        self._calls: set[Call] = set()
        """Begun async calls."""
        self._due_ns = NEVER
        """When `_check` has something to do next."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = NEVER
        self._turn_is_near = False
        self._fatal: BaseException | None = None
        hub.alarm.engine_files += (os.path.dirname(asyncio.__file__) + os.sep,)

    def run(self) -> None:
        """As `Hub.run`, which it takes over from. A stop of the loop, or SystemExit in a task, ends nothing."""
        self.started = True
        self._aio_loop.add_reader(self._link_fd, self._turn)
        self.turn_soon()
        while self._fatal is None:
            try:
                self._aio_loop.run_forever()
            except (SystemExit, KeyboardInterrupt):  # asyncio keeps it in its task and raises it here as well
                continue
        raise self._fatal

    def fail(self, bug: BaseException) -> None:
        """End `run` with what asyncio would log and go on from."""
        self._fatal = self._fatal or bug
        self._aio_loop.stop()

    # --- turns ----------------------------------------------------------------------------------------------------

    def turn_soon(self) -> None:
        """Have the pump called after what is ready in the loop now: it also flushes."""
        if not self._turn_is_near:
            self._turn_is_near = True
            self._aio_loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_is_near = False
        try:
            wake_ns = self.hub.turn()
            now = monotonic_ns()
            if now >= self._due_ns:
                self._check(now)
        except BaseException as error:  # noqa: BLE001 - asyncio would log it and go on; `run` raises it
            self.fail(error)
            return
        self._wake_at(self._due_ns if wake_ns is None else min(wake_ns, self._due_ns), now)

    def _wake_at(self, at_ns: int, now: int) -> None:
        if at_ns <= now:
            self.turn_soon()
        elif at_ns < self._timer_ns:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_ns = at_ns
            self._timer = self._aio_loop.call_later((at_ns - now) / 1e9, self._on_timer)

    def _on_timer(self) -> None:
        self._timer, self._timer_ns = None, NEVER
        self._turn()

    def hide(self) -> None:
        """While a `def` runs, so that asyncio.run works in it."""
        _set_running_loop(None)

    def show(self) -> None:
        _set_running_loop(self._aio_loop)

    # --- calls ----------------------------------------------------------------------------------------------------

    def begin(self, call: Call, variables: contextvars.Context) -> None:
        """Make the task; the call begins with its first step."""
        steps = Steps(self, call, None, variables)
        call.family = Family(steps)
        steps.task = asyncio.Task(steps, loop=self._aio_loop, context=variables)

    def has_others(self, call: Call) -> bool:
        """Tasks that may want to go on, while this call runs: of other calls, or its own."""
        own = call.family is not None
        return len(self._calls) > own or (call.family is not None and len(call.family.children) > 0)

    def mark_begun(self, call: Call) -> None:
        assert call.family is not None
        self.hub.mark_begun(call)
        call.family.busy_before_ns = self.hub.busy_ns
        self._calls.add(call)
        if call.budget_ns:
            self._due(call.begun_ns + call.budget_ns)

    def root_waits(self, family: Family) -> None:
        family.waiting = True
        self.hub.sleeping_count += 1

    def root_goes_on(self, family: Family) -> None:
        if family.waiting:
            family.waiting = False
            self.hub.sleeping_count -= 1

    def root_ended(self, call: Call) -> None:
        """The function is done; its call is when no child task is left."""
        family = call.family
        assert family is not None
        family.root = None
        if not family.children:
            self._finish(call)
            return
        names = ", ".join(sorted(child.task.get_name() for child in family.children if child.task is not None))
        call.note(f"child tasks were still there at its end and were cancelled: {names}")
        family.closing = True
        family.press_ns = monotonic_ns() + CLOSING_NS
        self._cancel(family)
        self._due(family.press_ns)

    def child_ended(self, call: Call, child: Steps) -> None:
        family = call.family
        assert family is not None
        family.children.discard(child)
        if family.closing and not family.children:
            self._finish(call)

    def _finish(self, call: Call) -> None:
        self.hub.finish(call)
        self.turn_soon()

    def forget(self, call: Call) -> None:
        """It has been answered."""
        self._calls.discard(call)
        assert call.family is not None
        self.root_goes_on(call.family)

    def _make_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        """The loop's task factory: a child task of the running call."""
        call = RUNNING.get(None)
        options.pop("eager_start", None)  # its first step would run in the greenlet of its parent
        if call is None or call.family is None:
            return asyncio.Task(coroutine, loop=loop, **options)
        if call.over:
            coroutine.close()
            raise RuntimeError(f"call {call.call_id} has ended: it can start no more tasks")
        variables = options.pop("context", None)
        if variables is None:
            variables = contextvars.copy_context()
        steps = Steps(self, call, coroutine, variables)
        task = asyncio.Task(steps, loop=loop, context=variables, **options)
        steps.task = task
        call.family.children.add(steps)
        return task

    def sleep(self, seconds: float) -> None:
        """Suspend the task that calls it, from inside its greenlet."""
        future = self._aio_loop.create_future()
        timer = self._aio_loop.call_later(seconds, _wake, future)
        future._asyncio_future_blocking = True
        try:
            self.hub.greenlet.switch(future)
        finally:
            timer.cancel()

    def make_future(self) -> asyncio.Future[None]:
        return self._aio_loop.create_future()

    # --- stopping -------------------------------------------------------------------------------------------------

    def charged(self, call: Call) -> None:
        """It has been charged for what a request used, or pays for its waiting again."""
        if call.stop is not None or not call.budget_ns:
            return
        now = monotonic_ns()
        left_ns = call.budget_ns - call.used_ns(now, self.hub.busy_ns)
        family = call.family
        if left_ns <= 0 or (family is not None and family.free_since is None):
            self._due(now + max(0, left_ns))

    def press(self, call: Call, *, later: bool) -> None:
        """Cancel the tasks of a stopping call: at the next turn, or a while after the alarm has interrupted it."""
        family = call.family
        assert family is not None
        if family.presses == 0:
            family.press_ns = monotonic_ns() + PRESS_AGAIN_NS if later else 0
        self._due(family.press_ns)
        self.turn_soon()

    def _due(self, at_ns: int) -> None:
        self._due_ns = min(self._due_ns, at_ns)
        self._wake_at(self._due_ns, monotonic_ns())

    def _check(self, now: int) -> None:
        """Budgets of waiting calls, and those that are stopping or closing."""
        due_ns = NEVER
        for call in tuple(self._calls):
            family = call.family
            assert family is not None
            if call.stop is None and call.budget_ns:
                left_ns = call.budget_ns - call.used_ns(now, self.hub.busy_ns)
                if left_ns > 0:
                    if family.free_since is None:  # else its answer looks again
                        due_ns = min(due_ns, now + left_ns)
                else:
                    call.stop = budget.BUDGET
                    family.press_ns = 0
            if call.stop is None and not family.closing:
                continue
            if now >= family.press_ns:
                if family.presses >= RAISES_MAX or call.stop is None:
                    self.abandon(call)
                    continue
                family.presses += 1
                call.raised_ns = now
                family.press_ns = now + PRESS_AGAIN_NS
                self._cancel(family)
            due_ns = min(due_ns, family.press_ns)
        self._due_ns = due_ns

    def _cancel(self, family: Family) -> None:
        for steps in (family.root,) if family.root is not None else tuple(family.children):
            if steps.task is not None:
                steps.task.cancel()

    def abandon(self, call: Call) -> None:
        """None of its tasks runs ever again."""
        family = call.family
        assert family is not None
        everyone = [*((family.root,) if family.root is not None else ()), *family.children]
        contexts = [context for steps in everyone if (context := steps.take_context()) is not None]
        self.hub.quarantine(call, contexts)
        self.turn_soon()

    def interrupt_callback(self, frame: FrameType | None) -> None:
        """The alarm rang in the hub's own greenlet: raise into a loop callback of a call that is over its budget."""
        call = RUNNING.get(None)
        now = monotonic_ns()
        if (
            call is not None
            and call in self._calls
            and call.budget_ns
            and call.used_ns(now, self.hub.busy_ns) >= call.budget_ns
            and not self.hub.alarm.is_engine(frame)
        ):
            call.stop = call.stop or budget.BUDGET
            self.press(call, later=False)
            self.hub.alarm.arm(now + ALARM_LEAST_NS)
            raise call.stop.error(call.stop.text)
        if self._due_ns != NEVER:
            self.hub.alarm.arm(max(self._due_ns, now + ALARM_LEAST_NS))


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
