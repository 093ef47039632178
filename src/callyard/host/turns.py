"""The turn runner, and the one place that calls user code.

One runner at a time has the *line*: it begins turn after turn in its task, and keeps going while handlers end without
waiting. The first time a handler waits, its runner becomes that turn's own task and another one takes the line: so each
turn that waits has a task to itself, and those that do not cost none. Each turn has a context of its own, so nothing
that a handler sets or spawns is the next one's. After 64 turns or an owner's budget of time the loop gets its turn,
too.

    over before it began? (deadline) -> decode -> permit back -> handler's first instruction: one synchronous stretch
    -> reply, in the same turn -> end: payload freed, charge and gate back

What a handler does wrong ends its own turn and no other: raising, cancelling itself, never returning (the stop abandons
it after its deadline), leaving things behind that go on. Source: job-queue §2.2, §11.3, R19, R21, R38, R44, R47,
R58-R60, R107.
"""

from __future__ import annotations

import asyncio
import logging
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import Context
from inspect import CORO_CLOSED, getcoroutinestate, isawaitable
from typing import Any, Final, Protocol

import msgspec

from callyard.clock import Timers
from callyard.host.context import (
    current_turn,
    enter_turn,
    forbid_in_turn,
    infrastructure,
    infrastructure_context,
)
from callyard.host.errors import HostError, HostErrorKind, text_of
from callyard.host.owners import Callback, Condition, Item, OwnerKey, Owners, Work, WorkState
from callyard.transport.port import Record, RecordKind

_log: Final = logging.getLogger("callyard.host")
_REQUEST: Final = RecordKind.REQUEST

STRETCH_TURNS_MAX: Final = 64
"""Turns in a row that do not wait, then everything else on the loop."""
ABANDON_MS: Final = 1_000
"""How long the stop waits for handlers that it has cancelled."""


class Replies(Protocol):
    def reply(self, record: Record, outcome: Any) -> Awaitable[None] | None:
        """Answer a request: a value, or a `HostError`. What it returns is waited for in the turn that replies."""
        ...


class TurnsStatistics(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Gauges of now, and counts since the last reset."""

    active: int
    begun: int
    """Handlers called."""
    failed: int
    """Handlers that raised, or were cancelled."""
    decode_errors: int
    expired: int
    """Requests whose deadline had passed before their turn."""
    abandoned: int
    """Turns that the stop could not end."""


class Turn:
    """What a handler is given: whose turn it is, what it is for, and what only a turn can do."""

    __slots__ = (
        "_context",
        "_is_answered",
        "_left",
        "_reentry",
        "_task",
        "_turns",
        "_work",
        "error",
        "number",
        "owner",
    )

    def __init__(self, turns: Turns, work: Work) -> None:
        assert work.hold is not None, "a turn without its gate"
        self.owner: OwnerKey = work.owner.key
        self.number = work.hold.number
        """Rises from turn to turn of a host; never used twice."""
        self.error: HostError | None = None
        """Why it is being stopped."""
        self._turns = turns
        self._work = work
        self._task: asyncio.Task[None] | None = None
        """Its own, from its first wait on."""
        self._left: _Left | None = None
        """What that task goes through."""
        self._is_answered = False
        self._context: Context | None = None
        self._reentry: asyncio.Future[None] | None = None

    @property
    def is_over(self) -> bool:
        return self._work.state is WorkState.ENDED

    @property
    def holds_gate(self) -> bool:
        hold = self._work.hold
        return hold is not None and hold.is_current

    @property
    def is_current(self) -> bool:
        """Whether it may still change its owner: it holds the gate, and the owner was not removed."""
        return self.holds_gate and self._work.owner.condition is not Condition.REMOVED

    @property
    def label(self) -> str:
        """What it is for, in a line of the log."""
        item = self._work.item
        if isinstance(item, Record):
            return f"{item.kind} {item.message_type or 'of a plain value'}"
        return "a callback"

    @property
    def record(self) -> Record | None:
        """What came; None in a callback of the host's, and once the turn is over."""
        item = self._work.item
        return item if isinstance(item, Record) else None

    async def reply(self, value: Any) -> None:
        """Answer before the handler returns; what it returns is then nobody's.

        Raises `HostError(INVALID_OPERATION)`: for a second answer, a turn that is over, or one that nobody asked for.
        """
        record = self.record
        if record is None or record.kind is not _REQUEST or self._is_answered:
            why = "it is over" if self.is_over else "it was answered" if self._is_answered else "it is for no request"
            raise HostError(HostErrorKind.INVALID_OPERATION, f"no reply from this turn of {self.owner!r}: {why}")
        waiting = self._turns._reply(self, record, value)
        if waiting is not None:
            await waiting

    async def yield_while(self, awaitable: Awaitable[Any]) -> Any:
        """Wait for something with the gate open to others, and go on as a new turn behind those who wait for it.

        What the state of the owner was before means nothing afterwards. Raises what `awaitable` raises, with the gate
        held again; `HostError`: INVALID_OPERATION without the gate or where turns cannot yield, NOT_FOUND when the
        owner was removed.
        """
        try:
            self._turns._owners.release_gate(self._work)
        except HostError:
            if isinstance(awaitable, Coroutine):
                awaitable.close()
            raise
        try:
            result = await awaitable
        except GeneratorExit:  # the loop is closed: there is no waiting any more
            raise
        except BaseException:
            await self._turns._reenter(self)
            raise
        await self._turns._reenter(self)
        return result


class Turns:
    """The runner of one host's turns: from `start` to `stop`, on one loop.

    `decode` turns a record into the value for its handler; it raises `HostError`, or anything for a payload that it
    cannot read. Satisfies `OwnerEvents` but for what `on_room` and `on_removed` are told.
    """

    def __init__(
        self,
        owners: Owners,
        *,
        decode: Callable[[Record], Any],
        replies: Replies,
        timers: Timers,
        on_room: Callable[[OwnerKey], None] | None = None,
        on_removed: Callable[[OwnerKey, HostError], None] | None = None,
        on_lost: Callable[[Record, HostError], None] | None = None,
        on_failure: Callable[[Exception], None] | None = None,
    ) -> None:
        """`on_lost` hears of records that ended before their handler, or whose payload could not be read: to count.

        An exception out of the queues is a bug of ours: no further turn begins, `failure` holds it, `on_failure` is
        told, and it goes to the loop's exception handler.
        """
        self._owners = owners
        self._decode = decode
        self._replies = replies
        self._timers = timers
        self._on_room = on_room
        self._on_removed = on_removed
        self._on_lost = on_lost
        self._on_failure = on_failure
        self.failure: Exception | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context: Context | None = None
        self._has_runner = False
        """Somebody has the line, or is about to."""
        self._is_stopped = False
        self._waiting: dict[Turn, None] = {}
        """Turns whose handlers have waited; each has a task of its own."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._quiet: asyncio.Future[None] | None = None
        self.now_ms = 0
        """When a turn last ended, or a stretch began, which is when one begins: so it costs one look at the clock."""
        self.left_behind: set[OwnerKey] = set()
        """Owners whose handlers may still change them although their turns are over."""
        self.reset_metrics()
        owners.events = self

    def reset_metrics(self) -> None:
        self._begun = self._failed = self._decode_errors = self._expired = self._abandoned = 0

    def statistics(self) -> TurnsStatistics:
        return TurnsStatistics(
            active=self._owners.active,
            begun=self._begun,
            failed=self._failed,
            decode_errors=self._decode_errors,
            expired=self._expired,
            abandoned=self._abandoned,
        )

    def start(self) -> None:
        """On the running loop. What was let in before begins now."""
        self._loop = asyncio.get_running_loop()
        self._context = infrastructure_context()
        self.on_ready()

    async def stop(self, deadline_at_ms: int) -> None:
        """Let what was accepted run until the deadline, then end the rest with SHUTTING_DOWN: first what has not begun,
        then, by cancellation, what runs. Handlers that do not end within a second of that are left behind, their turns
        over.

        Nobody may be let in meanwhile but lifecycle work: seal the host first. Not from inside of a handler.
        """
        forbid_in_turn("stop")
        await self._wait_quiet(deadline_at_ms)
        self._owners.drop_all(HostErrorKind.SHUTTING_DOWN)
        self._is_stopped = True
        for turn in list(self._waiting):
            turn.error = HostError(HostErrorKind.SHUTTING_DOWN, f"the host stopped before {turn.owner!r} was done")
            assert turn._task is not None
            turn._task.cancel()
        await self._wait_quiet(self._timers.now_ms() + ABANDON_MS)
        for turn in list(self._waiting):
            label = turn.label
            self._abandoned += 1
            waiting = self._answer(turn, turn.error)
            if waiting is not None:
                self._wait_aside(waiting)
            self._end(turn)
            self._abandon(turn, label)
        self._owners.drop_all(HostErrorKind.SHUTTING_DOWN)  # what those handlers still submitted

    def _abandon(self, turn: Turn, label: str) -> None:
        """Its handler did not let its cancellation through, and would keep the event loop from ending. So it is ended
        where it waits, as a coroutine that nobody awaits any more; only one that goes on even then is left behind.
        """
        left, task = turn._left, turn._task
        assert left is not None, "a turn that waits has what is left of it"
        assert task is not None, "a turn that waits has its task"
        is_closed = left.close()
        task.cancel()  # what it waited for is not what its task waits for now
        if is_closed:
            became = "it was closed where it waited"
        else:
            self.left_behind.add(turn.owner)
            became = "it is left behind, and may keep the event loop from ending"
        _log.warning(
            "a handler of %r did not end when it was cancelled, within %d ms: %s (%s). Let CancelledError through.",
            turn.owner,
            ABANDON_MS,
            became,
            label,
        )

    # What owners tell.

    def on_ready(self) -> None:
        if self._has_runner or self._is_stopped or self._loop is None:
            return
        self._start_runner()

    def on_room(self, key: OwnerKey) -> None:
        if self._on_room is not None:
            self._on_room(key)

    def on_removed(self, key: OwnerKey, error: HostError) -> None:
        if self._on_removed is not None:
            self._on_removed(key, error)

    def on_dropped(self, item: Item, error: HostError) -> None:
        if isinstance(item, Callback):
            self._tell(item, error)
            return
        if self._on_lost is not None:
            self._on_lost(item, error)
        if item.kind is _REQUEST:
            waiting = self._send_reply(item, error)
            if waiting is not None:
                self._wait_aside(waiting)

    def forbid_waiting_for_itself(self, key: OwnerKey) -> None:
        """Before a request is submitted. Raises `HostError(INVALID_OPERATION)` in a turn that has the gate which its
        answer needs.
        """
        turn = current_turn()
        if isinstance(turn, Turn) and self._owners.would_wait_for(turn._work, key):
            raise HostError(
                HostErrorKind.INVALID_OPERATION,
                f"a turn of {turn.owner!r} would wait for itself: {key!r} cannot answer while that turn has "
                "its gate. Send one way, or wait by `turn.yield_while`.",
            )

    # The line.

    def _start_runner(self) -> None:
        assert self._loop is not None
        assert self._context is not None
        self._has_runner = True
        # Never by the loop's task factory: an eager one would begin a turn inside the step that told of it.
        self._tasks.add(asyncio.Task(self._run(), loop=self._loop, context=self._context.copy()))

    async def _run(self) -> None:
        """Turns that do not wait, one after the other; at the first that does, this task is its own."""
        task = asyncio.current_task()
        assert task is not None
        turn: Turn | None = None
        turns_left, stretch_at_ms = STRETCH_TURNS_MAX, self._timers.now_ms()
        self.now_ms = stretch_at_ms
        try:
            while not self._is_stopped:
                if turns_left <= 0 or self.now_ms - stretch_at_ms >= self._owners.limits.owner_budget_ms:
                    turn = None  # and what it was for
                    await asyncio.sleep(0)
                    turns_left = STRETCH_TURNS_MAX
                    stretch_at_ms = self.now_ms = self._timers.now_ms()
                    continue
                try:
                    work = self._owners.begin_next(self.now_ms)
                except Exception as error:
                    self._fail(error)
                    raise
                if work is None:
                    break
                turn = Turn(self, work)
                del work
                left = self._take_turn(turn)
                if left is not None:
                    turn._task = task
                    self._hand_over(turn)
                    await self._finish_turn(turn, left)
                    return
                if task.cancelling():  # by its handler: another goes on
                    return
                turns_left -= 1
        finally:
            self._tasks.discard(task)
            if turn is None or turn._task is None:
                self._pass_line()

    def _fail(self, error: Exception) -> None:
        """Nobody else tries what would fail again."""
        self.failure = error
        self._is_stopped = True
        if self._on_failure is not None:
            self._on_failure(error)

    def _pass_line(self) -> None:
        """To another runner, if there is anything to run."""
        self._has_runner = False
        if self._owners.has_next and not self._is_stopped:
            self._start_runner()
        self._look_quiet()

    def _hand_over(self, turn: Turn) -> None:
        """The handler waits for the first time: the task is its turn's own from here on."""
        self._waiting[turn] = None
        self._owners.detach(turn._work)
        self._pass_line()

    # The invocation wrapper.

    def _take_turn(self, turn: Turn) -> _Left | None:
        """One turn, as far as it goes without waiting. None: to its end; else what is to be waited for, and then done.

        Raises nothing that a handler may raise; what ends a process goes on.
        """
        try:
            outcome = self._begin(turn)
            if type(outcome) is types.CoroutineType or (outcome is not None and isawaitable(outcome)):
                left = _Left(outcome, turn._context)
                if not left.advance():
                    return left
                outcome = left.value
        except BaseException as error:  # noqa: BLE001 - whatever user code raises is its turn's end
            return self._end_badly(turn, error)
        return self._end_with(turn, outcome)

    async def _finish_turn(self, turn: Turn, left: _Left) -> None:
        """The rest of a turn that waits, in a task of its own."""
        after: _Left | None = left
        while after is not None:
            turn._left = after
            try:
                await after
            except BaseException as error:
                if after.is_closed:
                    self._end(turn)
                    raise
                after = self._end_badly(turn, error)
            else:
                after = self._end_with(turn, after.value)

    def _end_badly(self, turn: Turn, error: BaseException) -> _Left | None:
        """What ends a process goes on; nothing else that a handler raises does."""
        if isinstance(error, asyncio.CancelledError):
            self._failed += 1
            if turn.error is not None:  # by the stop
                return self._end_with(turn, turn.error)
            _log.error("a handler of %r was cancelled (%s)", turn.owner, turn.label)
            what = f"a handler of {turn.owner!r} was cancelled"
            return self._end_with(turn, HostError(HostErrorKind.INTERNAL_FAILURE, what))
        if not isinstance(error, SystemExit | KeyboardInterrupt):
            return self._end_with(turn, self._explain(turn, error))
        self._failed += 1
        what = f"a handler of {turn.owner!r} ended by {type(error).__name__}"
        ended = HostError(HostErrorKind.INTERNAL_FAILURE, what)
        left = self._end_with(turn, ended)
        if left is not None:  # there is no waiting any more
            left.coroutine.close()
            self._end(turn)
        raise error

    def _end_with(self, turn: Turn, outcome: Any) -> _Left | None:
        """Answer, and end. What it returns is the answer that waits: the turn ends with it."""
        if not turn.is_over:  # else the stop has left it behind
            waiting = self._answer(turn, outcome)
            if waiting is not None:
                left = _Left(_contain(waiting), turn._context)
                if not left.advance():
                    return left
            self._end(turn)
        return None

    def _begin(self, turn: Turn) -> Any:
        """From the checks to the handler's first instruction, or to its coroutine, which is begun at once."""
        assert self._context is not None
        work = turn._work
        item, permit = work.item, work.permit
        context = turn._context = self._context.copy()
        if isinstance(item, Callback):
            self._begun += 1
            return context.run(_call, turn, item.run, turn)
        assert item is not None
        try:
            value = self._read(item)
        finally:
            if permit is not None:
                permit.release()
        self._begun += 1
        return context.run(_call, turn, work.owner.handler, turn, value)

    def _read(self, record: Record) -> Any:
        """Raises `_Unread`."""
        if record.kind is _REQUEST and record.deadline_at_ms is not None:
            late_ms = self._timers.now_ms() - record.deadline_at_ms
            if late_ms >= 0:
                self._expired += 1
                what = f"its deadline passed {late_ms} ms before its turn of {record.target!r}"
                raise _Unread(HostErrorKind.DEADLINE_EXCEEDED, what)
        try:
            return self._decode(record)
        except HostError as error:
            self._decode_errors += 1
            raise _Unread(error.kind, text_of(error)) from None
        except Exception as error:  # noqa: BLE001 - a codec's way to say that it cannot
            self._decode_errors += 1
            what = f"{record.target!r} could not read its payload"
            what = f"{what} as {record.message_type}" if record.message_type else what
            raise _Unread(HostErrorKind.PROTOCOL_ERROR, f"{what}: {text_of(error)}") from None

    def _explain(self, turn: Turn, error: BaseException) -> HostError:
        """What a caller is told of a failure; without its frames, which hold what the handler held."""
        record = turn.record
        if isinstance(error, _Unread):
            if self._on_lost is not None and record is not None:
                self._on_lost(record, error)
            return HostError(error.kind, text_of(error))
        self._failed += 1
        if isinstance(error, HostError):
            return HostError(error.kind, text_of(error))
        _log.error("a handler of %r failed (%s)", turn.owner, turn.label, exc_info=error)
        return HostError(
            HostErrorKind.INTERNAL_FAILURE,
            f"a handler of {turn.owner!r} failed: {type(error).__name__}: {text_of(error)}",
        )

    def _answer(self, turn: Turn, outcome: Any) -> Awaitable[None] | None:
        item = turn._work.item
        if isinstance(item, Callback):
            self._tell(item, outcome)
        elif item is not None and item.kind is _REQUEST and not turn._is_answered:
            return self._reply(turn, item, outcome)
        return None

    def _reply(self, turn: Turn, record: Record, outcome: Any) -> Awaitable[None] | None:
        turn._is_answered = True
        return self._send_reply(record, outcome)

    def _send_reply(self, record: Record, outcome: Any) -> Awaitable[None] | None:
        """A value that cannot be sent is answered by an error instead: nobody waits for an answer that never comes."""
        try:
            with infrastructure():
                return self._replies.reply(record, outcome)
        except Exception as error:  # noqa: BLE001 - the value's fault, or the port's: told below
            if isinstance(outcome, HostError):
                _log.exception("an error reply to %r was not sent", record.source)
                return None
            _log.error("a reply of %r was not sent", record.target, exc_info=error)
            kind = error.kind if isinstance(error, HostError) else HostErrorKind.INTERNAL_FAILURE
            what = f"the reply of {record.target!r} could not be sent: {text_of(error)}"
            return self._send_reply(record, HostError(kind, what))

    def _tell(self, callback: Callback, outcome: Any) -> None:
        if callback.on_end is None:
            return
        try:
            with infrastructure():
                callback.on_end(outcome)
        except Exception:  # noqa: BLE001 - the listener's fault, which ends no runner
            _log.exception("on_end of a callback failed")

    def _wait_aside(self, waiting: Awaitable[None]) -> None:
        """For a reply outside of any turn."""
        if self._loop is None or self._loop.is_closed():
            if isinstance(waiting, Coroutine):
                waiting.close()
            return
        task = self._loop.create_task(_contain(waiting), context=self._context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _end(self, turn: Turn) -> None:
        """The terminal: once, whoever comes first."""
        if turn.is_over:
            return
        self._waiting.pop(turn, None)
        turn._context = None
        self.now_ms = self._timers.now_ms()
        try:
            self._owners.end(turn._work, self.now_ms)
        except Exception as error:
            self._fail(error)
            raise
        if turn._reentry is not None and not turn._reentry.done():
            turn._reentry.set_result(None)
        self._look_quiet()

    async def _reenter(self, turn: Turn) -> None:
        """The gate again, behind those who wait for it."""
        reentry = turn._reentry = asyncio.get_running_loop().create_future()

        def granted() -> None:
            if not reentry.done():
                reentry.set_result(None)

        work = turn._work
        try:
            if not self._owners.reenter(work, granted):
                await reentry
        except asyncio.CancelledError:
            if work.waiter is not None:
                work.waiter.cancel()
                work.waiter = None
            raise
        finally:
            turn._reentry = None
        if work.hold is None:
            raise HostError(HostErrorKind.INVALID_OPERATION, f"this turn of {turn.owner!r} is over")
        turn.number = work.hold.number
        if work.owner.condition is Condition.REMOVED:
            raise HostError(HostErrorKind.NOT_FOUND, f"{turn.owner!r} was removed while a turn of it had yielded")

    async def _wait_quiet(self, deadline_at_ms: int) -> None:
        if self._owners.is_quiet or self._timers.now_ms() >= deadline_at_ms:
            return
        quiet = self._quiet = asyncio.get_running_loop().create_future()

        def wake() -> None:
            if not quiet.done():
                quiet.set_result(None)

        timer = self._timers.call_at(deadline_at_ms, wake)
        try:
            await quiet
        finally:
            timer.cancel()
            self._quiet = None

    def _look_quiet(self) -> None:
        if self._quiet is not None and not self._quiet.done() and self._owners.is_quiet:
            self._quiet.set_result(None)


class _Left:
    """What is left of a turn, or of its answer: a coroutine that runs in the turn's own context. Awaited after
    `advance`.
    """

    __slots__ = ("_waits_for", "context", "coroutine", "is_closed", "value")

    def __init__(self, awaitable: Awaitable[Any], context: Context | None) -> None:
        assert context is not None, "the turn is over"
        self.coroutine: Coroutine[Any, Any, Any] = (
            awaitable if isinstance(awaitable, types.CoroutineType) else _await(awaitable)
        )
        self.context = context
        self.value: Any = None
        """What it returned."""
        self.is_closed = False
        """There is no waiting any more: by whoever destroys the task, or by `close`."""
        self._waits_for: Any = None

    def advance(self) -> bool:
        """Its first stretch, at once, in the task that runs here. Returns whether it ended without waiting."""
        try:
            self._waits_for = self.context.run(self.coroutine.send, None)
        except StopIteration as done:
            self.value = done.value
            return True
        return False

    def close(self) -> bool:
        """End the coroutine where it waits, by GeneratorExit; False: it goes on waiting."""
        try:
            self.context.run(self.coroutine.close)
        except BaseException:  # noqa: BLE001 - the handler's last word
            _log.info("a handler raised when it was closed", exc_info=True)
        self.is_closed = getcoroutinestate(self.coroutine) == CORO_CLOSED
        return self.is_closed

    def __await__(self) -> Generator[Any, None, None]:
        thrown: BaseException | None = None
        waits_for, self._waits_for = self._waits_for, None
        while True:
            try:
                yield waits_for
            except BaseException as error:
                if self.is_closed:
                    raise
                self.is_closed = isinstance(error, GeneratorExit)
                thrown = error
            try:
                if thrown is None:
                    waits_for = self.context.run(self.coroutine.send, None)
                else:
                    waits_for = self.context.run(self.coroutine.throw, thrown)
            except StopIteration as done:
                self.value = done.value
                return
            finally:
                thrown = None  # it holds this frame


def _call(turn: Turn, function: Callable[..., Any], *arguments: Any) -> Any:
    """In the turn's context: whatever it does there is marked as the turn's."""
    enter_turn(turn)
    return function(*arguments)


class _Unread(HostError):
    """A record ended before its handler: expired, or not to be read."""


async def _await(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


async def _contain(waiting: Awaitable[None]) -> None:
    try:
        await waiting
    except Exception:  # noqa: BLE001 - a reply that was not sent: whoever waits for it has a deadline
        _log.warning("a reply was not sent", exc_info=True)
