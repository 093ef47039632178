"""One attempt of one call: as a task of this loop, in a thread, or by a `CallRunner` elsewhere.

Each way ends with a value, never an exception but the caller's own cancellation, and at the latest `cancel_grace_ms`
after the attempt had to end. Code that is still running then is a *straggler*: counted, and shown until it ends.
Source: tool-dispatch D9, D10, D24, D30, D39-D42.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import sys
import types
from collections.abc import Awaitable, Callable, Generator, Mapping
from functools import partial
from types import CoroutineType
from typing import Any, Final

import msgspec

from callyard.clock import Timers
from callyard.dispatch.call import Call
from callyard.dispatch.plan import NEVER, Limit
from callyard.dispatch.refusals import budget_exceeded, deadline_passed, unavailable
from callyard.dispatch.running import Running
from callyard.dispatch.telling import Teller
from callyard.dispatch.threads import Threads
from callyard.errors import CallFailure, CallyardError, ErrorKind, Outcome, fail
from callyard.functions.current import RUNNING
from callyard.functions.encoding import ResultMisfit
from callyard.functions.misfits import ArgumentsMisfit
from callyard.functions.ports import (
    AttemptFailed,
    CallContext,
    CallOutcome,
    CallRunner,
    CancelReason,
)
from callyard.functions.raised import MESSAGE_CHARACTERS_MAX, clean_text, cut_text, judge, name_of, stack_of
from callyard.functions.registry import FunctionSpec, UnknownFunction
from callyard.ids import CallId, RequestId

_log: Final = logging.getLogger("callyard.dispatch")
STRAGGLERS_MAX: Final = 256
"""With so much code that cannot be stopped, plain functions are given no further threads."""
_STOP_REASONS: Final = {
    ErrorKind.CANCELLED: CancelReason.CANCELLED,
    ErrorKind.SHUTTING_DOWN: CancelReason.SHUTTING_DOWN,
}


class Raised:
    """A handler's exception, as a value: nobody has to fetch it for asyncio to be quiet."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


class Straggler(msgspec.Struct, frozen=True, eq=False):
    """Code of a call that goes on although the call was answered."""

    call_id: CallId
    tool: str
    since_ms: int
    isolation: str
    """`inline`: it swallowed its cancellation; `thread`: a thread cannot be stopped."""


class Handlers:
    """Runs attempts."""

    def __init__(
        self,
        timers: Timers,
        runner: CallRunner | None,
        cancel_grace_ms: int,
        release: Callable[[Call], None],
        teller: Teller,
    ) -> None:
        """`release` gives back what a call holds, once its code has ended."""
        self.stragglers: dict[Straggler, None] = {}
        self.stragglers_total = 0
        self.runner = runner
        self._timers = timers
        self._grace_ms = cancel_grace_ms
        self._threads = Threads("callyard-tool")
        self._warned: set[str] = set()
        self._release = release
        self._teller = teller
        self._running: set[asyncio.Future[Any]] = set()
        """Code that goes on although nobody waits for it: the loop keeps only weak references."""

    def close(self) -> None:
        self._threads.close()

    def attempt(self, call: Call, limit: Limit) -> Awaitable[CallOutcome]:
        """Run `call` once. A failure's `attempts` is what had begun in all, this attempt included."""
        if call.stopping is not None:  # by who was told of the attempt
            return _at_once(_failed(self._late(call, limit, begun=False)))
        handler = call.spec.handler
        if handler is None:
            return self._elsewhere(call, limit)
        try:
            args, kwargs = handler.bind(call.checked)
        except ArgumentsMisfit as misfit:  # the handler's own verdict is final (D49)
            attempts = call.plan.attempts
            return _at_once(_failed(fail(ErrorKind.SCHEMA, misfit.message, attempts=attempts, **misfit.details)))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - a validator of the user's (D24)
            message = f"checking the arguments raised {name_of(error)}"
            return _at_once(_failed(fail(ErrorKind.SCHEMA, message, attempts=call.plan.attempts)))
        if not handler.is_async:
            call.enforced = False
        target = handler.target if self._teller.tracing is None else self._teller.within(call, handler.target)
        if not handler.in_thread:
            if call.on_begin is not None:
                call.begin()
            return self._inline(call, limit, target, args, kwargs)
        if len(self.stragglers) >= STRAGGLERS_MAX:
            message = f"{len(self.stragglers)} calls that were answered still run: no thread is left for another"
            return _at_once(_failed(unavailable(message)))
        call.begin()
        return self._in_thread(call, limit, target, args, kwargs)

    # --- in this loop ---------------------------------------------------------------------------------------------

    async def _inline(
        self,
        call: Call,
        limit: Limit,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        begun: bool = False,
    ) -> CallOutcome:
        """`begun`: a part of it has run elsewhere."""
        state = Running(call, call.plan.attempts + 1, asyncio.get_running_loop(), begun)
        context = None if call.context is None else call.context.copy()
        task = _start(_contain(state, target, args, kwargs), loop=state.loop, context=context)
        try:
            if not _IS_EAGER:
                await _let_begin()
            if not task.done():  # most code ends in its first step, and needs no timer
                await self._wait_inline(call, limit, state, task)
        except asyncio.CancelledError:
            state.told_to_stop = state.over = True
            if not task.done():
                task.cancel()
                self._linger(call, task, "inline")
            elif not task.cancelled():
                task.exception()  # a KeyboardInterrupt, which the loop has raised already
            call.plan.attempts += state.begun
            raise
        if state.begun:
            call.plan.attempts += 1
        if not task.done():
            state.over = True
            self._watch(call, task, "inline")
        elif not task.cancelled():
            value = task.result()
            if not state.told_to_stop:  # what a handler makes of its cancellation is not its result
                return self._end(call, value)
        return _failed(self._late(call, limit, begun=state.begun))

    async def _wait_inline(self, call: Call, limit: Limit, state: Running, task: asyncio.Task[Any]) -> None:
        """Until the code has ended; at its limit it is told to stop, and waited for no longer than the grace."""
        timers = self._timers
        while not task.done() and call.stopping is None and timers.now_ms() < limit.at_ms:
            await call.pause(limit.at_ms)  # the code's last act is to wake the call
        if not task.done():
            state.told_to_stop = True
            task.add_done_callback(call.wake)  # it may never begin
            task.cancel()
            grace_at_ms = timers.now_ms() + self._grace_ms
            while not task.done() and timers.now_ms() < grace_at_ms:
                await call.pause(grace_at_ms)

    def _linger(self, call: Call, running: asyncio.Future[Any], isolation: str) -> None:
        """The caller was cancelled and waits no more. What the call holds goes back when its code has ended, or after
        the grace, when it is a straggler."""
        call.lingering = True

        def leave(_: object = None) -> None:
            if call.lingering:
                call.lingering = False
                timer.cancel()
                if not running.done():
                    self._watch(call, running, isolation)
                self._release(call)

        timer = self._timers.call_at(self._timers.now_ms() + self._grace_ms, leave)
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        running.add_done_callback(leave)

    def _watch(self, call: Call, task: asyncio.Future[Any], isolation: str) -> None:
        straggler = Straggler(call.id, call.spec.name, self._timers.now_ms(), isolation)
        self.stragglers[straggler] = None
        self.stragglers_total += 1
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda _: self.stragglers.pop(straggler, None))

    # --- in a thread ----------------------------------------------------------------------------------------------

    async def _in_thread(
        self, call: Call, limit: Limit, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CallOutcome:
        self._warn_once(call)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        state = Running(call, call.plan.attempts + 1, loop)
        context = contextvars.copy_context() if call.context is None else call.context.copy()

        def finish(value: Any) -> None:
            state.over = True
            if not done.done():
                done.set_result(value)

        def in_thread() -> None:
            state.begun = True
            value = context.run(_contained, state, target, args, kwargs)
            try:
                loop.call_soon_threadsafe(finish, value)
            except RuntimeError:  # the loop is closed: nobody waits
                return

        job = self._threads.submit(in_thread)
        done.add_done_callback(call.wake)
        timers = self._timers
        try:
            while not done.done() and call.stopping is None and timers.now_ms() < limit.at_ms:
                await call.pause(limit.at_ms)
        except asyncio.CancelledError:
            state.over = True
            if not job.take():
                call.plan.attempts += 1
                if not done.done():
                    self._linger(call, done, "thread")
            raise
        if not done.done():
            state.over = True
            if job.take():
                return _failed(self._late(call, limit, begun=False))
            call.plan.attempts += 1
            self._watch(call, done, "thread")
            return _failed(self._late(call, limit, begun=True, enforced=False))
        value = done.result()
        if inspect.isawaitable(value):  # a plain `def` that returned a coroutine: the rest of it belongs to the loop
            return await self._inline(call, limit, lambda: value, (), {}, begun=True)
        call.plan.attempts += 1
        return self._end(call, value)

    def _warn_once(self, call: Call) -> None:
        name = call.spec.name
        if name not in self._warned:
            self._warned.add(name)
            _log.warning(
                "%s runs in a thread, where no time limit can stop it: write it with async def, or let a worker run it",
                name,
            )

    # --- elsewhere ------------------------------------------------------------------------------------------------

    async def _elsewhere(self, call: Call, limit: Limit) -> CallOutcome:
        runner = self.runner
        assert runner is not None, "a dispatcher without a worker refuses described functions when it is built"
        plan, timers = call.plan, self._timers
        if call.unpin is None:  # the first attempt decides which version runs (D39)
            try:
                call.spec, call.unpin = runner.pin(call.spec.name)
            except UnknownFunction as error:  # a reload took it away while the call waited
                return _failed(fail(ErrorKind.NOT_FOUND, str(error)))
            except CallyardError as error:  # a worker that was not started, or has failed
                return _failed(fail(ErrorKind.UNAVAILABLE, str(error)))
        spec = call.spec
        request_id = RequestId(f"{call.id}#{call.tries}")
        state = Running(call, plan.attempts + 1, asyncio.get_running_loop())
        reasons: list[CancelReason] = []

        def cancel(reason: CancelReason) -> None:
            if not reasons:
                reasons.append(reason)
                runner.cancel(request_id, reason)

        def on_stop() -> None:
            assert call.stopping is not None
            cancel(_STOP_REASONS[call.stopping])

        def on_time() -> None:
            if timers.now_ms() >= limit.at_ms:  # else a question is open, or was
                cancel(CancelReason.DEADLINE)

        client = call.client
        now_ms = timers.now_ms()
        left_ms = limit.at_ms - now_ms
        timer = timers.call_at(limit.at_ms, on_time)

        async def ask(kind: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
            nonlocal timer
            assert client is not None
            try:
                return await client.ask(call, kind, params)
            finally:
                if not state.over and limit.at_ms < NEVER:
                    timer.cancel()
                    timer = timers.call_at(limit.at_ms, on_time)

        call.on_stop = on_stop
        call.begin()
        try:
            outcome = await runner.call(
                request_id,
                spec,
                call.checked.raw,
                budget_ms=max(1, left_ms),
                context=CallContext(
                    trace=self._teller.carrier(call),
                    tags=dict(call.tags),
                    owner=call.owner,
                    tenant=call.tenant,
                    idempotency_key=call.key,
                    attempt=plan.attempts + 1,
                    deadline_remaining_ms=call.deadline_remaining_ms(now_ms),
                    call_id=call.id,
                    claims=dict(call.claims),
                    headers=dict(call.headers),
                    meta=call.meta,
                ),
                on_event=None if call.on_progress is None and call.on_log is None else state.on_event,
                on_subcall=self._teller.hear_subcalls(call, request_id),
                on_ask=None if client is None else ask,
            )
        except asyncio.CancelledError:
            plan.attempts += 1  # whether it had begun nobody hears any more
            call.lingering = runner.when_ended(request_id, partial(self._let_go, call))
            raise
        finally:
            state.over = True
            call.on_stop = None
            timer.cancel()
        failure = outcome.failure
        if failure is None:
            plan.attempts += 1
            assert outcome.output is not None
            return self._checked(call, outcome.output)
        begun = failure.attempts > 0
        plan.attempts += begun
        if failure.details.get("effect_below"):
            plan.idempotent = False
        ours = reasons and failure.kind in (ErrorKind.CANCELLED, ErrorKind.DEADLINE, ErrorKind.TIMEOUT)
        if ours or _is_of_our_time(failure, spec, is_over=timers.now_ms() >= limit.at_ms - 1):
            late = self._late(call, limit, begun=begun, stack=failure.stack)
            if not plan.idempotent and "effect_below" in failure.details:
                late = msgspec.structs.replace(late, details={**late.details, "effect_below": True})
            return _failed(late)
        return _failed(msgspec.structs.replace(failure, attempts=plan.attempts))

    def _let_go(self, call: Call) -> None:
        """The code of a call whose caller has gone runs no more."""
        if call.lingering:
            call.lingering = False
            self._release(call)

    # --- ends -----------------------------------------------------------------------------------------------------

    def _end(self, call: Call, value: Any) -> CallOutcome:
        """The output of what a handler returned, or the failure that its exception means."""
        if isinstance(value, Raised):
            if isinstance(value.error, AttemptFailed):
                failure = value.error.failure
                call.plan.attempts -= failure.attempts == 0  # its code ran here; what it stands for never did
                message = cut_text(clean_text(failure.message), MESSAGE_CHARACTERS_MAX)
                return _failed(msgspec.structs.replace(failure, message=message, attempts=call.plan.attempts))
            verdict = judge(value.error, call.spec.name, idempotent=call.spec.promises.idempotent)
            message = cut_text(verdict.message, MESSAGE_CHARACTERS_MAX)
            return _failed(
                fail(
                    verdict.kind,
                    message,
                    attempts=call.plan.attempts,
                    outcome=verdict.outcome,
                    stack=stack_of(value.error),
                    **verdict.details,
                )
            )
        try:
            handler = call.spec.handler
            assert handler is not None
            output = handler.encode(value)
            if type(value) is not handler.plain_result:  # else its schema has nothing to add
                call.spec.check_result(output)
        except ResultMisfit as misfit:
            return _failed(fail(ErrorKind.RESULT, misfit.message, attempts=call.plan.attempts, **misfit.details))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - code of the value itself, and what memory it takes (D24)
            return _failed(fail(ErrorKind.RESULT, f"encoding it raised {name_of(error)}", attempts=call.plan.attempts))
        return CallOutcome(output, None)

    def _checked(self, call: Call, output: bytes) -> CallOutcome:
        try:
            call.spec.check_result(output)
        except ResultMisfit as misfit:
            return _failed(fail(ErrorKind.RESULT, misfit.message, attempts=call.plan.attempts, **misfit.details))
        return CallOutcome(output, None)

    def _late(self, call: Call, limit: Limit, *, begun: bool, stack: str = "", enforced: bool = True) -> CallFailure:
        """What an attempt ends with that did not end by itself."""
        if call.stopping is not None:
            kind = ErrorKind.CANCELLED if call.has_begun else call.stopping
            message = "cancelled while it ran" if begun else f"{call.stopping.value} before it ran"
            details: dict[str, Any] = {}
        elif limit.name != "timeout_ms" and not begun and not call.has_begun:  # it was queued, only not here (D11)
            return deadline_passed() if limit.name == "deadline_ms" else budget_exceeded("wall_ms")
        else:
            kind = ErrorKind.TIMEOUT
            message = f"ran out of time: {_LIMIT_WORDS[limit.name]}"
            details = {"limit": limit.name, "limit_ms": limit.at_ms - call.started_ms - call.waited_ms}
            if limit.name == "timeout_ms":
                details["limit_ms"] = call.plan.timeout_ms
                message = f"ran out of time: timeout_ms={call.plan.timeout_ms}"
        if not enforced:
            details["enforced"] = False
        outcome = None if begun else Outcome.NOT_RUN
        return fail(kind, message, attempts=call.plan.attempts, outcome=outcome, stack=stack, **details)


_LIMIT_WORDS: Final = {
    "timeout_ms": "the time for one attempt is over",
    "deadline_ms": "the deadline has passed",
    "allowance_wall_ms": "the allowance's wall limit has passed",
}


def _is_of_our_time(failure: CallFailure, spec: FunctionSpec, *, is_over: bool) -> bool:
    """Whether the executor was the first to see that the attempt's own time was over: a function without a budget of
    its own gets what is left of that, and its subcalls what it has left (D40). `is_over`: it is over by now."""
    if spec.promises.budget_ms:
        return False
    cause = failure.details.get("cause")
    if not isinstance(cause, Mapping):
        return failure.kind is ErrorKind.TIMEOUT and failure.details.get("limit") == "budget_ms"
    below = cause.get("details")
    used_up = isinstance(below, Mapping) and below.get("limit") == "budget_ms"
    return is_over and used_up and cause.get("kind") == ErrorKind.TIMEOUT


def _failed(failure: CallFailure) -> CallOutcome:
    return CallOutcome(None, failure)


_start: Callable[..., asyncio.Task[Any]] = asyncio.Task
_IS_EAGER: Final = sys.version_info >= (3, 12)
"""The first step runs at the start: code that never waits costs no turn of the loop."""
if sys.version_info >= (3, 12):
    _start = partial(asyncio.Task, eager_start=True)


@types.coroutine
def _let_begin() -> Generator[None]:
    """Behind what the loop was given before: one step of each task that was just created."""
    yield


async def _at_once(outcome: CallOutcome) -> CallOutcome:
    return outcome


async def _contain(state: Running, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a handler to its end, its exceptions as values. Only a KeyboardInterrupt, and the cancellation that it was
    told, pass."""
    state.begun = True
    RUNNING.set(state)
    try:
        value = target(*args, **kwargs)
        return await value if type(value) is CoroutineType or inspect.isawaitable(value) else value
    except asyncio.CancelledError as error:
        if state.told_to_stop:
            raise
        return Raised(error)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - contained: SystemExit in a tool ends nothing but its call (D24)
        return Raised(error)
    finally:
        state.over = True
        if state.call.waiter is not None:
            state.call.wake()


def _contained(state: Running, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As `_contain`, in a thread: an interrupt of the keyboard never comes here by itself."""
    RUNNING.set(state)
    try:
        return target(*args, **kwargs)
    except BaseException as error:  # noqa: BLE001 - contained (D24)
        return Raised(error)
