"""The one way a gate makes a call: a permit, what the caller may do, one deadline, one answer.

    permit = await gateway.admit(connection)
    try:
        request = ToolRequest(tool="add", args=await read_body(), caller=caller)
        result = await gateway.call(request, permit)
    finally:
        permit.release()  # a second time changes nothing

Cancelling whoever awaits `call` says that its connection is gone (D56); a message that cancels is `cancel` (D41).
Source: tool-dispatch D41, D44, D46, D47, D56-D58; job-queue R16, R108-R110, R125, R126.
"""

from __future__ import annotations

import asyncio
import difflib
import fnmatch
import logging
import re
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping
from functools import cached_property, lru_cache, partial
from typing import Any, Final

import msgspec

from callyard.clock import Timers
from callyard.dispatch.call import Alarm
from callyard.dispatch.dispatcher import Dispatcher
from callyard.dispatch.events import DispatchEvent, EventHub, Subscriber
from callyard.dispatch.options import NAMES_MAX, check_name
from callyard.dispatch.outcomes import DispatchError, DispatchResult
from callyard.dispatch.refusals import deadline_passed, unavailable
from callyard.errors import CallError, CallFailure, ErrorKind, Outcome, UsageError, fail
from callyard.functions.function import MILLISECONDS_MAX
from callyard.functions.ports import AskCallback
from callyard.functions.raised import clean_text, cut_text
from callyard.functions.registry import FunctionSpec, Registry
from callyard.host.jobs import JobQueue, JobWaiter, Permit
from callyard.ids import CallId, Owner, Tenant
from callyard.policy.ranges import check_whole
from callyard.timers import LoopTimers

JOBS_MAX: Final = 256
DEADLINE_MS: Final = 55_000
QUEUE_WAIT_MS_MAX: Final = 10_000
LANE_MAX: Final = 1_024
LOST_MAX: Final = 10_000
"""Of so many calls whose connection is gone it is known which tool they called."""
SHUTTING_DOWN: Final = fail(ErrorKind.SHUTTING_DOWN, "the server is shutting down and takes no new calls")
_CANCELLED: Final = fail(ErrorKind.CANCELLED, "cancelled before it ran", outcome=Outcome.NOT_RUN)
_OURS: Final = fail(ErrorKind.INTERNAL, "it failed inside the server", outcome=Outcome.UNKNOWN)
_EVERYTHING: Final = ("*",)
_OUR_ID: Final = re.compile(r"[0-9a-f]{10}-[0-9]{1,15}", re.ASCII)
"""What `next_id` makes."""
_TEXTS: Final[Mapping[str, str]] = {}
_log: Final = logging.getLogger("callyard.serve")

TellProgress = Callable[[float, float | None, str], None]
"""Called with done, total (None: unknown) and a message."""
TellLog = Callable[[str, str, Mapping[str, Any]], None]
"""Called with a level, a message and fields."""


class Caller(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Who calls, as the gate found out: never as the payload says. Source: D44."""

    tenant: Tenant = Tenant("default")
    token: str = ""
    """The name of its token, never the token itself; empty: none was asked for."""
    tools: tuple[str, ...] = _EVERYTHING
    """Names and patterns (`read_*`) of the functions that it sees; for it there are no others. Case matters."""
    owner: str = ""
    """Whose calls these are where a request does not say; empty: nobody's, so that they have no order."""
    claims: Mapping[str, Any] = {}
    """What is known of it, for the functions that it calls."""
    rate: str = ""
    """Of all its calls together, `10/s`; empty: no limit."""
    running_max: int | None = None
    """Most calls of it that run at once; None: no limit."""

    def sees(self, name: str) -> bool:
        return self._globs is None or (len(name) <= NAMES_MAX and self._globs.match(name) is not None)

    @property
    def is_limited(self) -> bool:
        """There may be functions that it does not see."""
        return self._globs is not None

    @cached_property
    def _globs(self) -> re.Pattern[str] | None:
        return None if "*" in self.tools else _compile_globs(self.tools)


class ToolRequest(msgspec.Struct, kw_only=True):
    """One call, as a gate read it. What the client says of key, owner, times, tags and trace is checked by `call`."""

    tool: str
    caller: Caller
    args: bytes | Mapping[str, Any] | None = None
    """JSON of an object, or values by name."""
    key: str | None = None
    owner: str | None = None
    deadline_ms: int | None = None
    """A duration from receipt; None: the gates' own (D57)."""
    timeout_ms: int | None = None
    """Of each attempt, in place of the function's."""
    received_at_ms: int | None = None
    """`Gateway.now_ms` when the request came; None: now."""
    call_id: CallId | None = None
    """From `Gateway.next_id`, for a gate that may have to cancel it; never what a client made up."""
    trace: Mapping[str, str] = _TEXTS
    tags: Mapping[str, str] = _TEXTS
    headers: Mapping[str, str] = _TEXTS
    """Those that functions may see."""
    meta: Mapping[str, Any] = {}
    on_progress: TellProgress | None = None
    on_log: TellLog | None = None
    on_ask: AskCallback | None = None


class GatewayStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot. At rest every number but the totals is 0."""

    permits: int
    """Out, of `jobs_max`."""
    waiting: int
    """Connections in line for one."""
    calls: int
    """Under way, those included that nobody waits for."""
    adrift: int
    """Of these: their connection is gone, and they run on (D56)."""
    lanes: int
    """Owners with calls under way."""
    refused_total: int
    """By the gateway itself, before the dispatcher."""
    lost_total: int
    """Calls whose connection went before their answer."""


class Gateway:
    """What every gate shares. Use it from one event loop.

    `jobs_max` is M: calls that were taken in and have not begun (R108). `clock` is for tests.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        *,
        jobs_max: int = JOBS_MAX,
        deadline_ms: int = DEADLINE_MS,
        queue_wait_ms_max: int = QUEUE_WAIT_MS_MAX,
        owner_max: int | None = None,
        clock: Timers | None = None,
    ) -> None:
        """`owner_max`: calls of one owner under way; None: min(1024, M/4), so that no owner holds every permit (R126).
        As many calls of one token may wait for its rate or its running ones. Raises ValueError."""
        check_whole("deadline_ms", deadline_ms, 1, 2**31 - 1)
        check_whole("queue_wait_ms_max", queue_wait_ms_max, 0, 2**31 - 1)
        self._clock = clock = clock or LoopTimers()
        self.jobs = JobQueue(jobs_max, clock=clock)
        self.dispatcher = dispatcher
        self.deadline_ms = deadline_ms
        self.queue_wait_ms_max = queue_wait_ms_max
        self.owner_max = max(1, min(LANE_MAX, jobs_max // 4)) if owner_max is None else owner_max
        check_whole("owner_max", self.owner_max, 1, 2**31 - 1)
        self.is_draining = False
        self._line: dict[Hashable, _Connection] = {}
        self._inside: dict[CallId, _Inside] = {}
        self._adrift: set[_Inside] = set()
        self._lanes: dict[tuple[Tenant, str], int] = {}
        self._shares: dict[tuple[Tenant, str], _Share] = {}
        self._changed: dict[object, Callable[[], None]] = {}
        self._events = EventHub()
        self._idle = asyncio.Event()
        self._refused_total = 0
        self.refused_by_status: Counter[int] = Counter()
        """Requests that ended at an HTTP gate, before there was a call."""
        self._lost_total = 0
        self._lost_tools: dict[CallId, str] = {}
        """Of the newest of those calls: where to look for their ends."""

    # --- what there is --------------------------------------------------------------------------------------------

    @property
    def registry(self) -> Registry:
        """As it is now: a reload changes what is in it."""
        return self.dispatcher.registry

    def functions(self, caller: Caller, role: str = "tool") -> list[FunctionSpec]:
        """What this caller may see, in the order of the file."""
        return [spec for spec in self.registry if _role_of(spec) == role and caller.sees(spec.name)]

    def find(self, caller: Caller, name: str) -> FunctionSpec | None:
        """None: there is none, or none that this caller may see."""
        return self.registry.get(name) if name in self.registry and caller.sees(name) else None

    def on_changed(self, then: Callable[[], None]) -> Callable[[], None]:
        """Have `then` called, on the loop, when the list of functions has changed. Returns what ends it."""
        seat = object()
        self._changed[seat] = then

        def unsubscribe() -> None:
            self._changed.pop(seat, None)

        return unsubscribe

    def tell_changed(self) -> None:
        """The list of functions has changed."""
        for then in list(self._changed.values()):
            try:
                then()
            except Exception:  # noqa: BLE001 - logged: the others hear of it all the same
                _log.exception("who was to hear of changed functions failed: %r", then)

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Hear the dispatcher's events, and of the calls that the gateway itself refuses. Returns what ends it."""
        ends = (self.dispatcher.subscribe(subscriber), self._events.subscribe(subscriber))

        def unsubscribe() -> None:
            for end in ends:
                end()

        return unsubscribe

    def statistics(self) -> GatewayStatistics:
        return GatewayStatistics(
            permits=self.jobs.in_use,
            waiting=len(self._line),
            calls=len(self._inside),
            adrift=len(self._adrift),
            lanes=len(self._lanes),
            refused_total=self._refused_total,
            lost_total=self._lost_total,
        )

    def now_ms(self) -> int:
        return self._clock.now_ms()

    def next_id(self) -> CallId:
        """A name for one call."""
        return self.dispatcher.next_id()

    # --- a permit -------------------------------------------------------------------------------------------------

    async def admit(self, connection: Hashable) -> Permit:
        """Wait for room for one call, before its body is read. Whoever has the permit gives it back, once `call` has
        returned or was never made.

        Connections take turns: each has one place in the line, however many of its requests wait (R16, R110). Raises
        CallError, `shutting_down`, once the server drains.
        """
        if self.is_draining:
            raise CallError(SHUTTING_DOWN)
        permit = self.jobs.try_acquire()
        if permit is not None:
            return permit
        place: asyncio.Future[Permit] = asyncio.get_running_loop().create_future()
        waiting = self._line.get(connection)
        if waiting is not None:
            waiting.places.append(place)
        else:
            self._line[connection] = waiting = _Connection(place)
            self._stand(connection, waiting)
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                place.result().release()  # granted, and not taken
            elif place in waiting.places:
                waiting.places.remove(place)
                if not waiting.places:
                    self._forget(connection, waiting)
            raise

    def _stand(self, connection: Hashable, waiting: _Connection) -> None:
        waiting.waiter = self.jobs.wait(
            connection,
            partial(self._on_granted, connection, waiting),
            closed=partial(self._on_closed, connection, waiting),
        )

    def _on_granted(self, connection: Hashable, waiting: _Connection, permit: Permit) -> None:
        while waiting.places:
            place = waiting.places.popleft()
            if not place.done():
                place.set_result(permit)
                break
        else:
            permit.release()
        if waiting.places:
            self._stand(connection, waiting)
        else:
            self._forget(connection, waiting)

    def _on_closed(self, connection: Hashable, waiting: _Connection) -> None:
        self._forget(connection, waiting)
        while waiting.places:
            place = waiting.places.popleft()
            if not place.done():
                place.set_exception(CallError(SHUTTING_DOWN))

    def _forget(self, connection: Hashable, waiting: _Connection) -> None:
        if self._line.get(connection) is waiting:
            del self._line[connection]
        if waiting.waiter is not None:
            waiting.waiter.cancel()

    # --- a call ---------------------------------------------------------------------------------------------------

    async def call(self, request: ToolRequest, permit: Permit) -> DispatchResult:
        """Make the call; what fails is a `DispatchError`. The permit goes back when its first attempt begins, or when
        it ends before that.

        Cancelled, it returns at once: the connection is lost, and the call stops or runs on as D56 says. Raises
        UsageError for a `call_id` that is in use.
        """
        inside = self._enter(request, permit)
        task = inside.task = asyncio.create_task(self._run(inside), name=f"call {inside.id}")
        task.add_done_callback(partial(self._leave, inside))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():
                self._lose(inside)
            raise

    def cancel(self, caller: Caller, call_id: CallId) -> bool:
        """Stop a call of this caller's tenant, whatever it promises; its answer is `cancelled`. False: there is none.

        Source: D41.
        """
        inside = self._inside.get(call_id)
        if inside is None or self.find_running(caller, call_id) is None:
            return False
        if inside.is_dispatched:
            return self.dispatcher.cancel(call_id)
        inside.is_cancelled = True
        inside.wake()
        return True

    def find_running(self, caller: Caller, call_id: CallId) -> ToolRequest | None:
        """A call that is under way, also one whose connection is gone. None: there is none, or not for this caller."""
        inside = self._inside.get(call_id)
        if inside is None or inside.request.caller.tenant != caller.tenant or not caller.sees(inside.request.tool):
            return None
        return inside.request

    async def find_end(self, caller: Caller, call_id: str) -> DispatchResult | None:
        """How a call ended whose connection was lost (D56). None: it is not known, or not for this caller. Raises
        StoreUnavailable."""
        if not _OUR_ID.fullmatch(call_id):
            return None
        tool = self._lost_tools.get(CallId(call_id))
        if tool is not None:
            tools = [tool]
        elif call_id.startswith(self.dispatcher.id_prefix) and self._lost_total <= LOST_MAX:
            return None
        else:  # of an earlier process, or of long ago
            tools = self.registry.names()
        tools = [name for name in tools if caller.sees(name)]
        found = await asyncio.gather(*(self.dispatcher.find_end(caller.tenant, name, call_id) for name in tools))
        return next((end for end in found if end is not None and end.call_id == call_id), None)

    # --- its end --------------------------------------------------------------------------------------------------

    def seal(self) -> None:
        """Take no new calls: from now on whoever asks, or waits in line, is told `shutting_down`. Source: D46."""
        self.is_draining = True
        self.jobs.close()
        for inside in self._inside.values():
            inside.wake()  # those that wait for their token's share

    async def wait_idle(self, timeout_ms: int) -> bool:
        """Until no call is under way. False: it took longer."""
        until_ms = self._clock.now_ms() + timeout_ms
        while self._inside:
            if self._clock.now_ms() >= until_ms:
                return False
            self._idle.clear()
            timer = self._clock.call_at(until_ms, self._idle.set)
            try:
                await self._idle.wait()
            finally:
                timer.cancel()
        return True

    def abort(self) -> None:
        """Let go of what is still under way: nothing waits for it any more."""
        for inside in list(self._inside.values()):
            inside.is_gone = True
            assert inside.task is not None
            inside.task.cancel()

    # --- steps ----------------------------------------------------------------------------------------------------

    def _enter(self, request: ToolRequest, permit: Permit) -> _Inside:
        call_id = request.call_id or self.dispatcher.next_id()
        if call_id in self._inside:
            raise UsageError(f"a call {call_id!r} is under way: take each name from next_id()")
        inside = _Inside(self._clock, request, permit, call_id)
        now_ms = self._clock.now_ms()
        inside.received_at_ms = now_ms if request.received_at_ms is None else min(now_ms, request.received_at_ms)
        request.received_at_ms = inside.received_at_ms
        self._inside[call_id] = inside
        return inside

    async def _run(self, inside: _Inside) -> DispatchResult:
        """One answer, whatever happens."""
        try:
            refusal = self._refuse(inside)
            if refusal is None and inside.request.caller.token:
                refusal = await self._wait_for_share(inside)
            if refusal is not None:
                return self._tell_refused(inside, refusal)
            inside.is_dispatched = True
            return await self._dispatch(inside)
        except UsageError as error:  # of what the client said: a key, an owner, a time out of range
            return self._tell_refused(inside, fail(ErrorKind.SCHEMA, str(error)))
        except Exception:  # noqa: BLE001 - ours, and logged: whoever waits is answered all the same
            _log.exception("call %s of %s failed inside the server", inside.id, inside.request.tool)
            return DispatchError(inside.id, _OURS)
        finally:
            inside.permit.release()

    async def _dispatch(self, inside: _Inside) -> DispatchResult:
        request = inside.request
        return await self.dispatcher.dispatch(
            request.tool,
            request.args,
            tenant=request.caller.tenant,
            owner=inside.owner or None,
            key=request.key or None,
            deadline_ms=inside.deadline_at_ms - self._clock.now_ms(),
            timeout_ms=request.timeout_ms,
            call_id=inside.id,
            tags=request.tags or None,
            trace=request.trace or None,
            on_progress=None if request.on_progress is None else inside.tell_progress,
            on_begin=inside.begin,
            on_log=None if request.on_log is None else inside.tell_log,
            on_ask=request.on_ask,
            claims=_to_texts(request.caller.claims) or None,
            headers=request.headers or None,
            meta=request.meta or None,
        )

    def _lose(self, inside: _Inside) -> None:
        """Its connection is gone: nothing more is sent to it. What becomes of it is the dispatcher's rule (D56)."""
        self._lost_total += 1
        self._lost_tools[inside.id] = inside.request.tool
        if len(self._lost_tools) > LOST_MAX:
            del self._lost_tools[next(iter(self._lost_tools))]
        inside.is_gone = True
        assert inside.task is not None
        if inside.is_dispatched:
            self.dispatcher.disconnect(inside.id)
        else:
            inside.task.cancel()
        if not inside.task.done():
            self._adrift.add(inside)

    def _leave(self, inside: _Inside, task: asyncio.Task[DispatchResult]) -> None:
        """The one place where a call gives back what it took, also one that was cancelled before its first step."""
        inside.permit.release()
        if inside.running is not None:
            inside.running.release()
        if inside.lane is not None:
            left = self._lanes[inside.lane] - 1
            if left:
                self._lanes[inside.lane] = left
            else:
                del self._lanes[inside.lane]
        del self._inside[inside.id]
        self._adrift.discard(inside)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("call %s ended with what no call may end with", inside.id, exc_info=error)
        if not self._inside:
            self._idle.set()

    def _refuse(self, inside: _Inside) -> CallFailure | None:
        """What can be said without waiting. None: it may go on. Raises UsageError."""
        request = inside.request
        if self.is_draining:
            return SHUTTING_DOWN
        if request.caller.is_limited and self.find(request.caller, request.tool) is None:
            return self._not_found(request)
        deadline_ms = self.deadline_ms if request.deadline_ms is None else request.deadline_ms
        if type(deadline_ms) is not int or not 1 <= deadline_ms <= MILLISECONDS_MAX:
            expected = f"deadline_ms must be a whole number from 1 to {MILLISECONDS_MAX}"
            return fail(ErrorKind.SCHEMA, f"{expected}, got {deadline_ms!r}"[:300])
        inside.deadline_at_ms = inside.received_at_ms + deadline_ms
        inside.owner = request.caller.owner if request.owner is None else request.owner
        if inside.owner:
            check_name("owner", inside.owner)
            lane = (request.caller.tenant, inside.owner)
            held = self._lanes.get(lane, 0)
            if held >= self.owner_max:
                return unavailable(f"{held} calls of this owner are under way already, which is as many as may be")
            self._lanes[lane] = held + 1
            inside.lane = lane
        return None

    def _not_found(self, request: ToolRequest) -> CallFailure:
        """As if it were not there: names that the caller may not see are not suggested either."""
        seen = [spec.name for spec in self.functions(request.caller)]
        close = difflib.get_close_matches(request.tool[:NAMES_MAX], seen, n=3)
        hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
        name = cut_text(clean_text(request.tool), NAMES_MAX)
        return fail(ErrorKind.NOT_FOUND, f"no function {name!r}{hint}", tool=name)

    async def _wait_for_share(self, inside: _Inside) -> CallFailure | None:
        """The token's rate, then its running calls. None: it may go on. Source: D58."""
        caller = inside.request.caller
        if not caller.rate and caller.running_max is None:
            return None
        share = self._share_of(caller)
        limit_ms = min(inside.deadline_at_ms, inside.received_at_ms + self.queue_wait_ms_max)
        if share.rate and (refusal := await self._wait_for_rate(inside, share, limit_ms)):
            return refusal
        if share.running is not None:
            return await self._wait_for_running(inside, share.running, limit_ms)
        return None

    async def _wait_for_rate(self, inside: _Inside, share: _Share, limit_ms: int) -> CallFailure | None:
        now_ms = self._clock.now_ms()
        patience_ms = max(0, limit_ms - now_ms) if share.waiting < self.owner_max else 0
        caller = inside.request.caller
        place = await self.dispatcher.rates.take(
            *("token", caller.token, caller.tenant, share.rate, patience_ms, inside),
            lambda: self._ended(inside) is not None or self._clock.now_ms() >= limit_ms,
            limit_ms,
        )
        if place.give_back is None:
            if (ended := self._ended(inside)) is not None:
                return ended
            message = f"over the token's rate of {share.rate}"
            return fail(ErrorKind.RATE_LIMITED, message, rate=share.rate, retry_after_ms=max(1, place.wait_ms))
        at_ms = self._clock.now_ms() + place.wait_ms
        share.waiting += 1
        try:
            while self._clock.now_ms() < at_ms:
                if (ended := self._ended(inside)) is not None:
                    return ended
                await inside.pause(at_ms)
        finally:
            share.waiting -= 1
            if self._clock.now_ms() < at_ms:
                place.give_back()
        return None

    async def _wait_for_running(self, inside: _Inside, running: JobQueue, limit_ms: int) -> CallFailure | None:
        if running.waiters >= self.owner_max:
            return unavailable(f"{running.waiters} calls of this token wait already, which is as many as may")
        waiter = running.wait(inside, inside.take_running)
        try:
            while inside.running is None:
                if (ended := self._ended(inside)) is not None:
                    return ended
                if self._clock.now_ms() >= limit_ms:
                    if limit_ms >= inside.deadline_at_ms:
                        return deadline_passed(" while it waited for the token's other calls")
                    message = (
                        f"waited longer than queue_wait_ms_max={self.queue_wait_ms_max} for the token's other calls"
                    )
                    return fail(ErrorKind.DEADLINE, message, limit="queue_wait_ms_max", retry_after_ms=1_000)
                await inside.pause(limit_ms)
        finally:
            waiter.cancel()  # told already: this does nothing
        return None

    def _ended(self, inside: _Inside) -> CallFailure | None:
        if inside.is_cancelled:
            return _CANCELLED
        return SHUTTING_DOWN if self.is_draining else None

    def _share_of(self, caller: Caller) -> _Share:
        key = (caller.tenant, caller.token)
        share = self._shares.get(key)
        if share is None or (share.rate, share.running_max) != (caller.rate, caller.running_max):
            share = self._shares[key] = _Share(caller, self._clock)
        return share

    def _tell_refused(self, inside: _Inside, failure: CallFailure) -> DispatchError:
        self._refused_total += 1
        if self._events.wanted:
            now_ms = self._clock.now_ms()
            self._events.emit(
                DispatchEvent(
                    "dispatch.error",
                    now_ms,
                    inside.request.tool[:NAMES_MAX],
                    call_id=inside.id,
                    tenant=inside.request.caller.tenant,
                    owner=Owner(inside.owner),
                    duration_ms=now_ms - inside.received_at_ms,
                    kind=failure.kind,
                    outcome=failure.outcome,
                    message=failure.message,
                )
            )
        return DispatchError(inside.id, failure)


class _Connection:
    """A connection in line for permits: one place there, and its own requests in order."""

    __slots__ = ("places", "waiter")

    def __init__(self, place: asyncio.Future[Permit]) -> None:
        self.places: deque[asyncio.Future[Permit]] = deque((place,))
        self.waiter: JobWaiter | None = None


class _Share:
    """What the calls of one token share."""

    __slots__ = ("rate", "running", "running_max", "waiting")

    def __init__(self, caller: Caller, clock: Timers) -> None:
        self.rate = caller.rate
        self.running_max = caller.running_max
        self.running = None if caller.running_max is None else JobQueue(caller.running_max, clock=clock)
        self.waiting = 0
        """For the rate."""


class _Inside(Alarm):
    """One call from its request to its answer."""

    task: asyncio.Task[DispatchResult] | None = None
    received_at_ms: int = 0
    deadline_at_ms: int = 0
    owner: str = ""
    lane: tuple[Tenant, str] | None = None
    """The owner's, in which it counts."""
    running: Permit | None = None
    """Of its token's running calls."""
    is_dispatched: bool = False
    has_begun: bool = False
    is_cancelled: bool = False
    is_gone: bool = False
    """Nothing more is sent: nobody is there."""

    def __init__(self, timers: Timers, request: ToolRequest, permit: Permit, call_id: CallId) -> None:
        super().__init__(timers)
        self.request = request
        self.permit = permit
        self.id = call_id

    def begin(self) -> None:
        """Its first attempt begins. Source: R108."""
        self.has_begun = True
        self.permit.release()

    def take_running(self, permit: Permit) -> None:
        self.running = permit
        self.wake()

    def tell_progress(self, done: float, total: float | None, message: str) -> None:
        if not self.is_gone and self.request.on_progress is not None:
            self.request.on_progress(done, total, message)

    def tell_log(self, level: str, message: str, fields: Mapping[str, Any]) -> None:
        if not self.is_gone and self.request.on_log is not None:
            self.request.on_log(level, message, fields)


def _to_texts(claims: Mapping[str, Any]) -> dict[str, str]:
    """As functions see them: what is no text, as JSON."""
    return {
        name: value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()
        for name, value in claims.items()
    }


def _role_of(spec: FunctionSpec) -> str:
    """What a function is offered as: a tool, a prompt, a resource."""
    role: str = getattr(spec, "role", "tool")
    return role


@lru_cache(maxsize=1_024)
def _compile_globs(globs: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(fnmatch.translate(glob) for glob in globs) or r"(?!)")
