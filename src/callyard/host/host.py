"""The host: spots that take messages one at a time, in order, and are never sent more than they have room for.

    host = Host()

    @host.spots("cart/*", idle_ms=60_000)
    class Cart:
        def __init__(self, spot: str) -> None: ...

        @Host.handler
        def add(self, message: AddItem) -> int: ...

    async with host:
        await host.send("cart/42", AddItem("tea"))
        count = await host.request("cart/42", AddItem("salt"), int)

Source: job-queue §1, §3, §8, §11.3.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import fields, replace
from functools import partial
from inspect import isfunction
from types import TracebackType
from typing import Any, Final, TypeVar, get_type_hints, overload

import msgspec

from callyard.clock import Timers
from callyard.host.config import (
    TIMEOUT_MS_MAX,
    HostConfig,
    JobQueueConfig,
    ProcessorFigures,
    SendFamily,
    whole_timeout_ms,
)
from callyard.host.context import forbid_in_turn, infrastructure_context
from callyard.host.errors import HostError, HostErrorKind
from callyard.host.flow import wait_until_done
from callyard.host.messages import F, decode_reply, encode, mark, name_of, read_handler, read_object
from callyard.host.moves import MovesStatus
from callyard.host.moving import MovingStatus
from callyard.host.outbound import Sending, Submit, Submitted
from callyard.host.owners import Callback
from callyard.host.processors import read_processors
from callyard.host.pump import PumpStatistics
from callyard.host.spot_life import SpotLife
from callyard.host.spots import (
    Factory,
    Kind,
    Spot,
    States,
    check_factory,
    check_pattern,
    check_spot_id,
    shown_factory,
)
from callyard.host.states import HostState
from callyard.host.status import HostStatus, Metric
from callyard.host.ticks import SpotTimer, SpotTimers
from callyard.host.turns import Turn, TurnsStatistics
from callyard.host.waiters import FamilyStatus
from callyard.host.wiring import LOCAL, HostParts
from callyard.timers import LoopTimers
from callyard.transport.port import Completion, Outgoing, OutgoingKind, Record, RecordKind, Transport, TransportFactory

_log: Final = logging.getLogger("callyard.host")

C = TypeVar("C", bound=Callable[..., Any])
T = TypeVar("T")

TEARDOWN_MS: Final = 1_000
"""The least that sockets and transport get to close in, also when a close has no time left."""


class SpotTurn:
    """What a handler that asks for it is given: `def add(self, turn: SpotTurn, message: AddItem)`."""

    __slots__ = ("_spot", "_turn", "host")

    def __init__(self, host: Host, spot: Spot, turn: Turn) -> None:
        self.host = host
        self._spot = spot
        self._turn = turn

    @property
    def spot(self) -> str:
        """The id of the spot whose turn this is."""
        return self._spot.id

    @property
    def state(self) -> Any:
        """The spot's object; None without one."""
        return self._spot.state

    @property
    def number(self) -> int:
        """Rises from turn to turn of a host."""
        return self._turn.number

    @property
    def is_current(self) -> bool:
        """Whether the turn may still change its spot: it has not yielded or ended, and the spot is there."""
        return self._turn.is_current

    async def reply(self, value: Any) -> None:
        """Answer a request before the handler returns; what it returns is then nobody's.

        Raises `HostError(INVALID_OPERATION)` for a second answer, or when nobody asked.
        """
        await self._turn.reply(value)

    async def yield_while(self, awaitable: Awaitable[T]) -> T:
        """Wait with the spot open to other turns, and go on as a new one behind those that wait by then.

        The spot may have changed meanwhile. Raises what `awaitable` raises, and `HostError(NOT_FOUND)` when the spot
        is gone.
        """
        value: T = await self._turn.yield_while(awaitable)
        return value

    def after_ms(self, after_ms: float, message: Any) -> SpotTimer:
        """Send this spot a message later: `Host.after_ms`."""
        return self.host.after_ms(self.spot, after_ms, message)

    def every_ms(self, every_ms: float, message: Any) -> SpotTimer:
        """Send this spot a message again and again: `Host.every_ms`."""
        return self.host.every_ms(self.spot, every_ms, message)


class HostStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What the parts of a host say of themselves, at one instant."""

    spots: int
    kept: int
    """Spots that were put away in memory: they have a place, too."""
    ready: int
    """Spots with work that no turn has begun on."""
    timers: int
    operations: int
    """At the transport, and not taken yet."""
    turns: TurnsStatistics
    moving: MovingStatus
    moves: MovesStatus
    waiting: dict[SendFamily, FamilyStatus]
    pump: PumpStatistics | None
    """None without a transport."""


class Host:
    """One for a process, on one event loop; an async context manager.

    Messages to spots of its own stay in this process; to all others they go by the transport, if there is one: given
    ready, or as what makes it of the byte limits (`HostConfig.core_hwm`). `states` keeps what spots put away: in
    memory, unless you give a store of yours. Each setting of `HostConfig`, and of its `jobs`, may be given by name.
    `clock` and `processors` are for tests.

    Raises ValueError for a setting out of range.
    """

    def __init__(
        self,
        config: HostConfig | None = None,
        *,
        transport: Transport | TransportFactory | None = None,
        states: States | None = None,
        clock: Timers | None = None,
        processors: ProcessorFigures | None = None,
        **settings: Any,
    ) -> None:
        config = HostConfig() if config is None else config
        if not isinstance(config, HostConfig):
            raise ValueError(f"config must be a HostConfig, got {config!r}: settings are given by name")
        if processors is not None and not isinstance(processors, ProcessorFigures):
            raise ValueError(f"processors must be ProcessorFigures, got {processors!r}")
        self.config = config = _with_settings(config, settings)
        limits = config.resolve(read_processors() if processors is None else processors)
        made = transport(config.core_hwm) if callable(transport) else transport
        for name, given, protocol in (
            ("transport", made, Transport),
            ("states", states, States),
            ("clock", clock, Timers),
        ):
            if given is not None:
                _check_methods(name, given, protocol)
        self._clock = LoopTimers() if clock is None else clock
        self._life = SpotLife(self._clock, states, config.spots_max, partial(SpotTurn, self))
        self._timers = SpotTimers(self._clock)
        self._life.on_gone = self._timers.end
        self.parts = self._life.parts = HostParts(config, limits, self._clock, made, self._life)
        """For gates and tests."""
        self._ticking: set[asyncio.Task[None]] = set()
        """Messages of timers on their way to their spots' queues."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """That it was started on."""
        self._starting: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    # --- life ---

    async def __aenter__(self) -> Host:
        try:
            await self.start()
        except BaseException:
            await self.close(drain_deadline_ms=0)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(drain_deadline_ms=0 if error is not None else None)

    async def start(self) -> None:
        """Tell the sockets the pressure, then take records. Once. Raises `HostError(SHUTTING_DOWN)` if closed first."""
        if self._starting is not None or self._closing is not None:
            raise HostError(HostErrorKind.INVALID_OPERATION, "a host is started once, and not after it was closed")
        self._loop = asyncio.get_running_loop()
        starting = self._starting = self._spawn(self.parts.start())
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            if starting.cancelled():
                raise HostError(HostErrorKind.SHUTTING_DOWN, "the host was closed while it started") from None
            raise

    async def close(self, *, drain_deadline_ms: float | None = None) -> None:
        """Take nothing new, let what was accepted run until the deadline (default: the setting), then end it.

        Who comes second waits for the first. Cancelled, it goes on closing. Raises `HostError(INVALID_OPERATION)` in a
        handler, which would wait for itself; ValueError for a deadline that is no number of milliseconds from 0 on.
        """
        forbid_in_turn("closing the host")
        self._check_loop()
        drain_ms = self.config.shutdown_timeout_ms if drain_deadline_ms is None else drain_deadline_ms
        if type(drain_ms) not in (int, float) or not 0 <= drain_ms <= TIMEOUT_MS_MAX:
            raise ValueError(f"drain_deadline_ms must be milliseconds, 0 to {TIMEOUT_MS_MAX}, got {drain_ms!r}")
        if self._closing is None:
            self._closing = self._spawn(self._close(self._clock.now_ms() + int(drain_ms)))
        await asyncio.shield(self._closing)

    async def _close(self, deadline_at_ms: int) -> None:
        parts = self.parts
        parts.life.seal()
        self._timers.close()
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.wait([self._starting])
        if parts.life.state is not HostState.ERROR:
            parts.life.move_to(HostState.DRAINING)
        if parts.pump is not None:
            parts.pump.stop_receiving()
        parts.outbound.seal()
        await self._life.stop(deadline_at_ms)
        await parts.turns.stop(deadline_at_ms)
        parts.moving.close()
        parts.owners.drop_all(HostErrorKind.SHUTTING_DOWN)  # what the hold gave back when room came of dropping
        await self._life.save_all(deadline_at_ms)
        parts.outbound.close()
        await parts.flow.close(timeout_ms=self._left_ms(deadline_at_ms))
        if parts.pump is not None:
            parts.pump.close()
        parts.jobs.close()
        if parts.transport is not None:
            await self._within(deadline_at_ms, parts.transport.close(), "closing the transport")
        parts.drops.say_rest()
        parts.life.move_to(HostState.STOPPED)

    def _left_ms(self, deadline_at_ms: int) -> int:
        return max(deadline_at_ms - self._clock.now_ms(), TEARDOWN_MS)

    async def _within(self, deadline_at_ms: int, work: Awaitable[None], what: str) -> None:
        """See it to its end, but not for ever: then it is cancelled, and left alone."""
        task = asyncio.ensure_future(_run(work))
        if not await wait_until_done([task], self._clock, self._clock.now_ms() + self._left_ms(deadline_at_ms)):
            task.cancel()
            task.add_done_callback(lambda late: late.cancelled() or late.exception())  # nobody is told any more
            _log.warning("%s was not over in time: it is left behind", what)
        elif not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s failed", what, exc_info=error)

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work, context=infrastructure_context())

    # --- spots ---

    @staticmethod
    @overload
    def handler(function: F, /) -> F: ...

    @staticmethod
    @overload
    def handler(message_type: Any, /) -> Callable[[F], F]: ...

    @staticmethod
    def handler(what: Any, /) -> Any:
        """Mark a method as what handles messages of a type: of its annotation, or `@Host.handler(AddItem)`.

        It takes `(self, message)` or `(self, turn, message)`, plain or async. What it returns answers a request.
        """
        if isfunction(what):
            return mark(what, None)
        if isinstance(what, (staticmethod, classmethod, property, partial)):
            raise ValueError(f"@Host.handler is for a plain method, or takes a message type, got {what!r}")
        return lambda function: mark(function, what)

    def spot(self, spot: str, what: Any) -> None:
        """A spot that is there from now on: an object with handlers, or one function that handles all it can read.

        Raises ValueError for an id or handlers that are none, `HostError(ALREADY_EXISTS)`.
        """
        check_spot_id(spot)
        if isinstance(what, type):
            raise ValueError(f"a spot has an object, {what.__name__} is a class: host.spots({spot!r}, {what.__name__})")
        routes = read_object(type(what))
        is_object = bool(routes)
        if not is_object and callable(what):
            routes = read_handler(what)
        if not routes:
            raise ValueError(f"{type(what).__name__} has no method marked with @Host.handler, and is no function")
        if spot in self._life.spots or self._life.kinds.get(spot) is not None:
            raise HostError(HostErrorKind.ALREADY_EXISTS, f"there is a spot {spot!r} already")
        kind = Kind(spot, routes)
        self._life.kinds.put(kind)
        self._life.add(spot, kind, what if is_object else None)

    @overload
    def spots(self, pattern: str, factory: Factory, *, idle_ms: float | None = None) -> None: ...

    @overload
    def spots(self, pattern: str, *, idle_ms: float | None = None) -> Callable[[C], C]: ...

    def spots(self, pattern: str, factory: Factory | None = None, *, idle_ms: float | None = None) -> Any:
        """Spots that are made on their first message: by a class, or a function of the id that returns an object.

        `*` in the pattern stands for any text. After `idle_ms` without a message a spot is forgotten; if its object
        has `dump()`, what that returns is kept, and given to the next one's `load(state)`. Without `factory` it
        decorates one. A function says what it makes by its return type. Raises ValueError.
        """
        check_pattern(pattern)
        if factory is None:
            return partial(self._decorate_spots, pattern, idle_ms)
        check_factory(f"host.spots({pattern!r}, ...)", factory)
        made = factory if isinstance(factory, type) else _made_type(factory)
        routes = read_object(made)
        known = self._life.kinds.get(pattern)
        if not routes and (known is None or not known.routes):
            raise ValueError(
                f"{made.__name__} has no method marked with @Host.handler, so nothing would handle a message of "
                f"{pattern!r}: mark one, or give `@host.on({pattern!r})` first"
            )
        idle = None if idle_ms is None else whole_timeout_ms("idle_ms", idle_ms)
        kind = self._life.kinds.of_pattern(pattern)
        if kind.factory is not None or any(spot.kind is kind for spot in self._life.spots.values()):
            raise ValueError(f"spots of {pattern!r} are made by something else already, or were made without an object")
        kind.add(routes)
        kind.factory = factory
        kind.idle_ms = idle
        return None

    def _decorate_spots(self, pattern: str, idle_ms: float | None, factory: C) -> C:
        self.spots(pattern, factory, idle_ms=idle_ms)
        return factory

    def on(self, pattern: str, message_type: Any = None) -> Callable[[F], F]:
        """Decorate a function `(message)` or `(turn, message)` that handles messages to spots of a pattern.

        Of `message_type`, or what its last parameter is annotated with; without either it takes what nothing else does.
        """
        check_pattern(pattern)

        def add(function: F) -> F:
            routes = read_handler(function, message_type)
            self._life.kinds.of_pattern(pattern).add(routes)
            return function

        return add

    def remove(self, spot: str) -> bool:
        """Forget a spot, its timers, and what was kept of it in memory; a store of yours keeps what it has.

        A turn that runs goes on, what has not begun ends NOT_FOUND. False: there was nothing to forget.
        """
        check_spot_id(spot)
        self._check_loop()
        self._timers.end(spot)
        return self._life.remove(spot)

    async def move(self, spot: str, make: Factory | None = None) -> None:
        """Give a spot a new object, of `make` or its own factory: the old one's `dump()` goes into the new one's
        `load(state)`. A turn that runs ends on the old one; what is queued, and what comes meanwhile, runs on the new
        one, in order.

        Whatever fails, the old one stays. Raises `HostError`: NOT_FOUND; INVALID_OPERATION in a turn of that spot,
        while it is being made or moved, and without a `dump`, a factory and a `load`; and what `dump` and `load` raise.
        """
        check_spot_id(spot)
        if make is not None:
            check_factory("host.move", make)
        self._check_loop()
        await self._life.move(spot, make)

    # --- messages ---

    def send(self, spot: str, message: Any, *, timeout_ms: float | None = None) -> Sending:
        """Send one way. It begins in this call: await it to know that it is in the spot's queue, or the transport's.

        Without room there it waits, for `timeout_ms` but no longer than the send timeout. Awaiting raises `HostError`:
        DEADLINE_EXCEEDED, NOT_FOUND, REJECTED, SHUTTING_DOWN, UNAVAILABLE. What fails when nobody awaits is counted as
        dropped, and logged now and then.
        """
        self._check_loop()
        name, payload = name_of(type(message)), encode(message)
        submit: Submit
        if self._is_local(spot):
            record = Record(RecordKind.ONE_WAY, LOCAL, spot, name, payload)
            submit = partial(self._submit_local, spot, record)
        else:
            submit = partial(self._start, OutgoingKind.ONE_WAY, spot, name, payload, 0)
        return self.parts.outbound.send(SendFamily.SPOT, spot, submit, timeout_ms=timeout_ms)

    @overload
    async def request(self, spot: str, message: Any, reply: type[T], *, timeout_ms: float | None = None) -> T: ...

    @overload
    async def request(self, spot: str, message: Any, *, timeout_ms: float | None = None) -> Any: ...

    async def request(self, spot: str, message: Any, reply: Any = Any, *, timeout_ms: float | None = None) -> Any:
        """Send, and wait for what the handler returns, read as `reply`; without it, as plain JSON.

        It never waits for room: without it, the answer comes at once. Cancelled before its turn, it has none. Raises
        `HostError`: CAPACITY_EXCEEDED (no room here), UNAVAILABLE (no room there), NOT_FOUND, DEADLINE_EXCEEDED,
        PROTOCOL_ERROR, SHUTTING_DOWN, INTERNAL_FAILURE for a handler that failed; INVALID_OPERATION in a turn of the
        same spot, which would wait for itself.
        """
        self._check_loop()
        name, payload = name_of(type(message)), encode(message)
        if not self._is_local(spot):
            start = partial(self._start_request, spot, name, payload)
            outcome = await self.parts.outbound.request(spot, start, timeout_ms=timeout_ms)
        else:
            self.parts.turns.forbid_waiting_for_itself(spot)
            sent: list[int] = []
            submit = partial(self._submit_request, sent, spot, name, payload)
            try:
                outcome = await self.parts.outbound.request(spot, submit, timeout_ms=timeout_ms, is_local=True)
            except asyncio.CancelledError:
                for operation_id in sent:
                    self.parts.moving.cancel(LOCAL, operation_id)
                raise
        return decode_reply(outcome.payload if isinstance(outcome, Completion) else outcome, reply, spot)

    def publish(self, pattern: str, message: Any) -> Sending:
        """Send to every spot of a pattern that is here now, and once to the transport's peers. Await it as a send.

        Once begun it does not fail: a spot without room is left out, and that is counted.
        """
        check_pattern(pattern)
        self._check_loop()
        name, payload = name_of(type(message)), encode(message)
        targets: list[Submit] = [
            partial(self._submit_once, spot, Record(RecordKind.PUBLISH, LOCAL, spot, name, payload))
            for spot in self._life.matching(pattern)
        ]
        if self.parts.transport is not None:
            targets.append(partial(self._start, OutgoingKind.PUBLISH, pattern, name, payload, 0))
        return self.parts.outbound.publish(SendFamily.MULTICAST, targets, pattern)

    def after_ms(self, spot: str, after_ms: float, message: Any) -> SpotTimer:
        """Send a spot of this host a message later; it comes as a turn. Raises `HostError`: see `every_ms`."""
        return self._arm(spot, whole_timeout_ms("after_ms", after_ms), None, message)

    def every_ms(self, spot: str, every_ms: float, message: Any) -> SpotTimer:
        """Send a spot of this host a message every so often; a tick is left out while the one before is under way.

        It goes on until it is cancelled, or the spot is removed. Raises `HostError`: NOT_FOUND, CAPACITY_EXCEEDED for
        more than 1,024 of a spot, SHUTTING_DOWN.
        """
        interval_ms = whole_timeout_ms("every_ms", every_ms)
        return self._arm(spot, interval_ms, interval_ms, message)

    # --- seeing ---

    @property
    def is_ready(self) -> bool:
        return self.parts.life.is_ready

    def status(self) -> HostStatus:
        return self.parts.board.status()

    def metrics(self) -> list[Metric]:
        return self.parts.board.metrics()

    def reset_metrics(self) -> None:
        """Begin a new epoch of the capacity metrics; settings, state and what is held stay."""
        self.parts.board.reset_capacity_metrics()

    def statistics(self) -> HostStatistics:
        parts = self.parts
        return HostStatistics(
            spots=len(self._life.spots),
            kept=self._life.kept,
            ready=parts.owners.ready,
            timers=len(self._timers),
            operations=parts.outbound.operations,
            turns=parts.turns.statistics(),
            moving=parts.moving.status(),
            moves=parts.moves.status(),
            waiting=dict(parts.waiters.status()),
            pump=None if parts.pump is None else parts.pump.statistics(),
        )

    def assert_empty(self) -> None:
        """For tests: nothing is in use, queued, held or waited for. Raises AssertionError."""
        self.parts.assert_empty()

    # --- steps ---

    def _check_loop(self) -> None:
        """Raises `HostError(INVALID_OPERATION)` in another thread, or on another loop, than it was started in."""
        if self._loop is not None and _running_loop() is not self._loop:
            raise HostError(
                HostErrorKind.INVALID_OPERATION,
                "a host is used on the event loop that it was started on: from a thread, hand the call over by "
                "`loop.call_soon_threadsafe` or `asyncio.run_coroutine_threadsafe`",
            )

    def _is_local(self, spot: str) -> bool:
        if type(spot) is str and spot in self._life.spots:
            return True
        check_spot_id(spot)
        return self.parts.transport is None or self._life.is_here(spot)

    def _submit_local(self, spot: str, item: Record | Callback, deadline_at_ms: int) -> HostErrorKind | None:
        refused = self.parts.submit(spot, item)
        if refused is None or refused is HostErrorKind.CAPACITY_EXCEEDED:  # that one waits
            return refused
        raise HostError(refused, self.parts.explain(spot, refused, item))

    def _submit_once(self, spot: str, item: Record, deadline_at_ms: int) -> HostErrorKind | None:
        refused = self.parts.submit(spot, item)
        if refused is None:
            return None
        raise HostError(refused, self.parts.explain(spot, refused, item))

    def _submit_request(
        self, sent: list[int], spot: str, name: str, payload: bytes, operation_id: int, deadline_at_ms: int
    ) -> HostErrorKind | None:
        record = Record(
            RecordKind.REQUEST, LOCAL, spot, name, payload, operation_id=operation_id, deadline_at_ms=deadline_at_ms
        )
        sent.append(operation_id)
        return self._submit_once(spot, record, deadline_at_ms)

    def _start(
        self, kind: OutgoingKind, target: str, name: str, payload: bytes, operation_id: int, deadline_at_ms: int
    ) -> Submitted:
        transport = self.parts.transport
        assert transport is not None, f"{target!r} is not here, and there is no transport"
        return transport.start(Outgoing(kind, target, name, payload, operation_id, deadline_at_ms))

    def _start_request(self, spot: str, name: str, payload: bytes, operation_id: int, deadline_at_ms: int) -> Submitted:
        return self._start(OutgoingKind.REQUEST, spot, name, payload, operation_id, deadline_at_ms)

    async def _tick(self, spot: str, submit: Submit, over: Callable[[], None]) -> None:
        try:
            await self.parts.outbound.send(SendFamily.SPOT, spot, submit)
        except HostError as error:
            self.parts.drops.count_error(RecordKind.ONE_WAY, error, spot)
            over()

    def _keep(self, work: Any) -> None:
        task = self._spawn(work)
        self._ticking.add(task)
        task.add_done_callback(self._ticking.discard)

    def _arm(self, spot: str, after_ms: int, every_ms: int | None, message: Any) -> SpotTimer:
        check_spot_id(spot)
        self._check_loop()
        if not self._life.is_here(spot):
            raise HostError(HostErrorKind.NOT_FOUND, f"there is no spot {spot!r} here to have a timer")
        name, payload = name_of(type(message)), encode(message)

        def take(turn: Turn) -> Any:
            found = self._life.spots[turn.owner]
            return found.handle(turn, self._life.read(found, name, payload))

        def tick(over: Callable[[], None]) -> None:
            item = Callback(take, bytes=len(payload), on_end=lambda outcome: over())
            self._keep(self._tick(spot, partial(self._submit_local, spot, item), over))

        return self._timers.arm(spot, after_ms, every_ms, tick)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


async def _run(work: Awaitable[None]) -> None:
    await work


def _check_methods(name: str, given: object, protocol: type) -> None:
    """Raises ValueError for what is none of a protocol."""
    methods = [each for each in dir(protocol) if isfunction(getattr(protocol, each)) and not each.startswith("_")]
    lacking = [each for each in methods if not callable(getattr(given, each, None))]
    if lacking or isinstance(given, type):
        has = f"is a class: give one of it, {given.__name__}()" if isinstance(given, type) else f"has no `{lacking[0]}`"
        raise ValueError(f"{name} must have the methods {', '.join(methods)}: {given!r} {has}")


def _made_type(factory: Factory) -> type:
    """What a factory says that it makes. Raises ValueError."""
    label = shown_factory(factory)
    try:
        made = get_type_hints(factory).get("return")
    except (NameError, TypeError) as error:
        raise ValueError(f"the return type of {label} cannot be read: {error}") from None
    if not isinstance(made, type):
        raise ValueError(f"{label} makes the objects of spots: annotate the class that it returns")
    return made


def _with_settings(config: HostConfig, settings: dict[str, Any]) -> HostConfig:
    """Raises ValueError for a name that is no setting."""
    of_jobs = {each.name for each in fields(JobQueueConfig)}
    of_host = {each.name for each in fields(HostConfig)}
    unknown = settings.keys() - of_jobs - of_host
    if unknown:
        raise ValueError(f"a host has no setting {sorted(unknown)[0]!r}: there are {sorted(of_host | of_jobs)}")
    if not isinstance(settings.get("jobs", config.jobs), JobQueueConfig):
        raise ValueError(f"jobs must be of class JobQueueConfig, got {settings['jobs']!r}")
    jobs = {name: value for name, value in settings.items() if name in of_jobs}
    others = {name: value for name, value in settings.items() if name in of_host}
    if jobs:
        others["jobs"] = replace(others.get("jobs", config.jobs), **jobs)
    return replace(config, **others)
