"""The way of every IO request through the worker: found by its task, kept or joined, queued, performed, answered.

    submit ─▶ refused? ─▶ kept? ─▶ in flight? ─▶ gate ─▶ provider.perform ─▶ answer to every ticket, reply kept
                │            │         │ joined                │
                └────────────┴─ answer, charged 0              └─ the ticket that began it pays the running time

A *ticket* is one open request of one call. A *flight* is one request on its way to a provider, with the tickets that
wait for it: one, or several when the operation is read-only. A flight nobody waits for any more is cancelled. All of it
runs on the loop; nothing here waits. Source: call-execution X42, X65, X82, X85.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextvars import copy_context
from dataclasses import dataclass
from typing import Final

import msgspec

from callyard.clock import Clock
from callyard.errors import ErrorKind
from callyard.functions.ports import AskCallback
from callyard.ids import CallId, RequestId, TaskId, Tenant
from callyard.wire.messages import IoRequest, WireError
from callyard.worker.io.cache import ReplyCache, make_key
from callyard.worker.io.gate import Gate
from callyard.worker.io.port import REPLY_BYTES_MAX, IoFailure, IoScope, Provider, Reply

MIB: Final = 1024 * 1024
FRESH: Final = ".fresh"
"""`GET.fresh` is GET, neither answered from the cache nor joined: for code that polls."""
MESSAGE_CHARACTERS_MAX: Final = 4_096
DETAILS_BYTES_MAX: Final = 16 * 1024
CLOSE_TIMEOUT_S: Final = 5.0
REQUEST_BYTES: Final = 1_024
"""What a request costs beside its bytes, roughly."""

_log = logging.getLogger("callyard.worker.io")


@dataclass(frozen=True, slots=True, kw_only=True)
class IoLimits:
    requests_at_once: int = 64  # performed at once, per provider
    waiters_max: int = 1_024  # requests that wait for their turn, per provider; more: `unavailable`
    joined_max: int = 16_384  # tickets that wait for another's read, per provider; more: `unavailable`
    request_bytes_max: int = 64 * MIB  # of requests running and waiting, per provider; more: `unavailable`
    cache_entries: int = 65_536  # replies kept, per task
    cache_bytes_max: int = 32 * MIB  # per task


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskIoOptions:
    """What one task may use of what the worker has: by provider, names of hosts, roots, databases, endpoints.

    None: all that is configured. A provider that is not named is refused; `("*",)` stands for all names. It narrows
    what is configured and never adds to it.
    """

    allow: Mapping[str, tuple[str, ...]] | None = None
    ask: AskCallback | None = None
    """Where the provider `client` puts its questions."""


class IoAnswer(msgspec.Struct, frozen=True, gc=False):
    """What a ResumeCall carries: a result and perhaps a body, or an error."""

    result: bytes = b"null"
    body: bytes | None = None
    error: WireError | None = None
    budget_used_ms: int = 0
    """The provider's running time, for the ticket that began the flight; 0 for a reply kept or shared (X85)."""


class IoStatistics(msgspec.Struct, frozen=True, gc=False):
    """Of one provider: `running`, `waiting`, `joined` now; the rest since the start."""

    running: int
    waiting: int
    joined: int
    performed: int
    hits: int
    joins: int
    refused: int
    failed: int


class _Task:
    """One task's requests."""

    __slots__ = ("cache", "flights", "options", "task_id", "tenant", "tickets")

    def __init__(self, task_id: TaskId, tenant: Tenant, options: TaskIoOptions, limits: IoLimits) -> None:
        self.task_id = task_id
        self.tenant = tenant
        self.options = options
        self.cache = ReplyCache(limits.cache_entries, limits.cache_bytes_max)
        self.flights: dict[bytes, _Flight] = {}
        """Reads on their way, by key: those that may still be joined."""
        self.tickets: dict[_Ticket, None] = {}
        """Open requests."""


class _Ticket:
    __slots__ = ("attempt", "budget_ms", "flight", "on_done", "pays", "request_id", "task", "timer")

    def __init__(
        self,
        task: _Task | None,
        attempt: tuple[CallId, int],
        request_id: RequestId,
        on_done: Callable[[IoAnswer], None],
        budget_ms: int,
    ) -> None:
        self.task = task
        self.attempt = attempt
        self.request_id = request_id
        self.on_done = on_done
        self.budget_ms = budget_ms
        self.flight: _Flight | None = None
        self.pays = False
        """It began the flight."""
        self.timer: asyncio.TimerHandle | None = None


class _Flight:
    __slots__ = (
        *("aio_task", "body", "key", "operation", "request"),
        *("size_bytes", "started_at_ms", "station", "task", "tickets"),
    )

    def __init__(
        self, task: _Task, station: _Station, operation: str, request: bytes, body: bytes | None, key: bytes | None
    ) -> None:
        self.task = task
        self.station = station
        self.operation = operation
        self.request = request
        self.body = body
        self.key = key
        """None: neither kept nor joined."""
        self.size_bytes = len(request) + len(body or b"") + REQUEST_BYTES
        self.tickets: dict[_Ticket, None] = {}
        self.aio_task: asyncio.Task[Reply] | None = None
        """None while it waits at the gate."""
        self.started_at_ms = 0

    def land(self, done: asyncio.Task[Reply]) -> None:
        self.station.on_landed(self, done)

    @property
    def tenant(self) -> Tenant:
        return self.task.tenant

    @property
    def task_id(self) -> TaskId:
        return self.task.task_id


class _Station:
    """One provider with its gate and counts."""

    __slots__ = (
        *("failed", "gate", "hits", "is_interactive", "joined", "joins", "name"),
        *("on_landed", "performed", "provider", "refused"),
    )

    def __init__(
        self,
        name: str,
        provider: Provider,
        limits: IoLimits,
        on_landed: Callable[[_Flight, asyncio.Task[Reply]], None],
    ) -> None:
        self.name = name
        self.on_landed = on_landed
        self.provider = provider
        self.is_interactive = getattr(provider, "is_interactive", False)
        at_once = limits.waiters_max if self.is_interactive else limits.requests_at_once
        self.gate: Gate[_Flight] = Gate(at_once, limits.waiters_max, limits.request_bytes_max)
        self.joined = 0
        self.performed = self.hits = self.joins = self.refused = self.failed = 0


class IoHub:
    """All of a worker's IO. Every method but `open` and `close` is synchronous and to be called on the loop.

    `advise(name)` is the message for a provider that is not there.
    """

    def __init__(
        self,
        providers: Mapping[str, Provider],
        clock: Clock,
        limits: IoLimits | None = None,
        advise: Callable[[str], str] | None = None,
    ) -> None:
        self._limits = limits or IoLimits()
        self._stations = {
            name: _Station(name, provider, self._limits, self._landed) for name, provider in providers.items()
        }
        self._clock = clock
        self._advise = advise or self._say_unknown
        self._tasks: dict[TaskId, _Task] = {}
        self._open: dict[tuple[CallId, int], dict[RequestId, _Ticket]] = {}
        """Every open request, by attempt: what `cancel_call` ends."""
        self._opened: list[_Station] = []
        self._context = copy_context()
        """What flights land in: else each would keep a copy of its own."""
        self._closing = False
        self.repeated_requests = 0
        """Request ids that were open already; dropped (X66)."""

    # --- life ---------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Open every provider; when one cannot be, close the others and raise its error."""
        try:
            for station in self._stations.values():
                await station.provider.open()
                self._opened.append(station)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End every request, unanswered, and close the providers. A second time changes nothing."""
        self._closing = True
        running = [flight.aio_task for station in self._stations.values() for flight in station.gate.running]
        for task_id in list(self._tasks):
            self.end_task(task_id)
        waited = [aio_task for aio_task in running if aio_task is not None]
        if waited:
            _, stuck = await asyncio.wait(waited, timeout=CLOSE_TIMEOUT_S)
            for aio_task in stuck:
                _log.error("an IO request did not end %g s after it was cancelled: %r", CLOSE_TIMEOUT_S, aio_task)
        opened, self._opened = self._opened, []
        for station in reversed(opened):
            try:
                await station.provider.close()
            except Exception:  # noqa: BLE001 - another's code; the other providers are still to be closed
                _log.exception("IO provider %r failed to close", station.name)

    def start_task(self, task_id: TaskId, tenant: Tenant, options: TaskIoOptions | None = None) -> None:
        """Requests of the task's calls are taken from now on."""
        assert task_id not in self._tasks, task_id
        self._tasks[task_id] = _Task(task_id, tenant, options or TaskIoOptions(), self._limits)

    def end_task(self, task_id: TaskId) -> None:
        """Cancel what is open, forget what is kept. Idempotent."""
        task = self._tasks.pop(task_id, None)
        if task is not None:
            for ticket in list(task.tickets):
                self._drop(ticket)

    # --- requests -----------------------------------------------------------------------------------------------

    def submit(
        self,
        task_id: TaskId,
        call_id: CallId,
        attempt_seq: int,
        request_id: RequestId,
        io: IoRequest,
        body: bytes | None,
        on_done: Callable[[IoAnswer], None],
        budget_ms: int = 0,
    ) -> None:
        """Take a request. `on_done` is called once, later on the loop, unless the call, its task or the hub ends first.

        The caller has checked that `task_id` is that of the call (X65). `budget_ms`: running time the call has left; a
        request that takes longer ends with `timeout`. 0: unlimited.
        """
        attempt = (call_id, attempt_seq)
        open_requests = self._open.setdefault(attempt, {})
        if request_id in open_requests:
            self.repeated_requests += 1
            return
        task = self._tasks.get(task_id)
        ticket = _Ticket(task, attempt, request_id, on_done, budget_ms)
        open_requests[request_id] = ticket
        if task is not None:
            task.tickets[ticket] = None
        try:
            answer = self._place(ticket, task, io, body)
        except IoFailure as failure:
            station = self._stations.get(io.provider)
            if station is not None:
                station.refused += 1
            answer = _failed(failure)
        if answer is not None:
            asyncio.get_running_loop().call_soon(self._answer, ticket, answer)

    def cancel_call(self, call_id: CallId, attempt_seq: int) -> None:
        """Drop the open requests of an attempt that ended; what arrives for them later goes nowhere. Idempotent."""
        for ticket in list(self._open.get((call_id, attempt_seq), {}).values()):
            self._drop(ticket)

    def statistics(self) -> dict[str, IoStatistics]:
        return {
            name: IoStatistics(
                running=len(station.gate.running),
                waiting=station.gate.waiting,
                joined=station.joined,
                performed=station.performed,
                hits=station.hits,
                joins=station.joins,
                refused=station.refused,
                failed=station.failed,
            )
            for name, station in self._stations.items()
        }

    # --- a request's way ----------------------------------------------------------------------------------------

    def _place(self, ticket: _Ticket, task: _Task | None, io: IoRequest, body: bytes | None) -> IoAnswer | None:
        """An answer at once, or None: the ticket waits for a flight. Raises `IoFailure` for a refusal."""
        if self._closing:
            raise IoFailure(ErrorKind.SHUTTING_DOWN, "the worker is shutting down")
        if task is None:
            raise IoFailure(ErrorKind.CANCELLED, "its task has ended")
        station = self._stations.get(io.provider)
        if station is None:
            raise IoFailure(ErrorKind.NOT_FOUND, self._advise(io.provider))
        allow = task.options.allow
        if allow is not None and io.provider not in allow:
            allowed = ", ".join(sorted(allow)) or "none"
            raise IoFailure(ErrorKind.DENIED, f"this task may not use {io.provider!r}; it may use: {allowed}")
        fresh = io.operation.endswith(FRESH)
        operation = io.operation.removesuffix(FRESH)
        request = bytes(io.request)  # a Raw keeps its whole frame alive
        key = None
        if not fresh and self._is_read_only(station, operation, request):
            key = make_key(station.name, operation, request, body)
            kept = task.cache.get(key)
            if kept is not None:
                station.hits += 1
                return IoAnswer(kept.result, kept.body)
            flight = task.flights.get(key)
            if flight is not None:
                if station.joined >= self._limits.joined_max:
                    raise _no_room(station.name, f"{station.joined} requests wait for equal reads")
                station.joins += 1
                station.joined += 1
                self._board(ticket, flight)
                return None
        flight = _Flight(task, station, operation, request, body, key)
        refused = station.gate.enter(flight)
        if refused is not None:
            failure = _no_room(station.name, f"{station.gate.waiting} requests wait, {station.gate.bytes_held} bytes")
            if refused is flight:
                raise failure
            station.refused += 1
            self._close_to_joins(refused)
            asyncio.get_running_loop().call_soon(self._finish, refused, _failed(failure))
        if key is not None:
            task.flights[key] = flight
        ticket.pays = True
        self._board(ticket, flight)
        self._start_next(station)
        return None

    def _is_read_only(self, station: _Station, operation: str, request: bytes) -> bool:
        try:
            return station.provider.is_read_only(operation, request)
        except Exception as error:
            raise _bug(station.name, error) from error

    def _board(self, ticket: _Ticket, flight: _Flight) -> None:
        ticket.flight = flight
        flight.tickets[ticket] = None

    def _start_next(self, station: _Station) -> None:
        loop = asyncio.get_running_loop()
        while (flight := station.gate.next()) is not None:
            station.performed += 1
            flight.started_at_ms = self._clock.now_ms()
            flight.aio_task = loop.create_task(self._perform(flight))
            # Not a `finally` in the coroutine: that does not run when the task is cancelled before its first step.
            flight.aio_task.add_done_callback(flight.land, context=self._context)
            for ticket in flight.tickets:
                if ticket.pays and ticket.budget_ms and not station.is_interactive:
                    ticket.timer = loop.call_later(ticket.budget_ms / 1_000, self._overrun, ticket)

    async def _perform(self, flight: _Flight) -> Reply:
        task, station = flight.task, flight.station
        names = None if task.options.allow is None else tuple(task.options.allow[station.name])
        scope = IoScope(task_id=task.task_id, tenant=task.tenant, names=names, ask=task.options.ask)
        return await station.provider.perform(flight.operation, flight.request, flight.body, scope)

    def _landed(self, flight: _Flight, done: asyncio.Task[Reply]) -> None:
        station = flight.station
        station.gate.leave(flight)
        if flight.tickets:
            self._finish(flight, *self._read_result(flight, done))
        elif not done.cancelled():
            done.exception()  # late: dropped, whatever it is
        self._start_next(station)

    def _read_result(self, flight: _Flight, done: asyncio.Task[Reply]) -> tuple[IoAnswer, int]:
        """The answer, and the running time to charge."""
        station = flight.station
        charged_ms = 0 if station.is_interactive else max(0, self._clock.now_ms() - flight.started_at_ms)
        try:
            reply = _check_reply(station.name, done.result())
        except asyncio.CancelledError:
            answer = _failed(_bug(station.name, RuntimeError("it cancelled itself")))  # tickets wait: it was not us
        except IoFailure as failure:
            answer = _failed(failure)
        except TimeoutError:
            answer = _failed(IoFailure(ErrorKind.TIMEOUT, f"{station.name} took too long"))
        except Exception as error:  # noqa: BLE001 - a provider may be another's code
            answer = _failed(_bug(station.name, error))
        else:
            if reply.keep and flight.key is not None:
                flight.task.cache.put(flight.key, reply)
            return IoAnswer(reply.result, reply.body), charged_ms
        station.failed += 1
        return answer, charged_ms

    def _finish(self, flight: _Flight, answer: IoAnswer, charged_ms: int = 0) -> None:
        """Answer every ticket of a flight that has left the gate."""
        self._close_to_joins(flight)
        charged = msgspec.structs.replace(answer, budget_used_ms=charged_ms) if charged_ms else answer
        for ticket in list(flight.tickets):
            self._answer(ticket, charged if ticket.pays else answer)

    def _overrun(self, ticket: _Ticket) -> None:
        """The call's budget ended while the provider worked for it. Those who joined wait on."""
        assert ticket.flight is not None
        used_ms = max(ticket.budget_ms, self._clock.now_ms() - ticket.flight.started_at_ms)
        message = f"{ticket.flight.station.name} took longer than the {ticket.budget_ms} ms the call had left"
        failure = IoFailure(ErrorKind.TIMEOUT, message, limit="budget_ms", budget_ms=ticket.budget_ms)
        ticket.flight.station.failed += 1
        self._answer(ticket, msgspec.structs.replace(_failed(failure), budget_used_ms=used_ms))

    def _answer(self, ticket: _Ticket, answer: IoAnswer) -> None:
        if self._drop(ticket):
            ticket.on_done(answer)

    def _drop(self, ticket: _Ticket) -> bool:
        """Close an open request, in the one place that does; False: it was closed."""
        open_requests = self._open.get(ticket.attempt, {})
        if open_requests.get(ticket.request_id) is not ticket:
            return False
        del open_requests[ticket.request_id]
        if not open_requests:
            del self._open[ticket.attempt]
        if ticket.task is not None:
            ticket.task.tickets.pop(ticket, None)
        if ticket.timer is not None:
            ticket.timer.cancel()
        flight = ticket.flight
        if flight is not None:
            del flight.tickets[ticket]
            if not ticket.pays:
                flight.station.joined -= 1
            if not flight.tickets:
                self._abandon(flight)
        return True

    def _abandon(self, flight: _Flight) -> None:
        """Nobody waits for it any more. One that landed or was refused is past this."""
        self._close_to_joins(flight)
        if flight.aio_task is not None:
            flight.aio_task.cancel()
        elif flight in flight.station.gate:
            flight.station.gate.leave(flight)

    def _close_to_joins(self, flight: _Flight) -> None:
        if flight.key is not None and flight.task.flights.get(flight.key) is flight:
            del flight.task.flights[flight.key]

    def _say_unknown(self, name: str) -> str:
        return f"no IO provider {name!r}; there are: {', '.join(sorted(self._stations)) or 'none'}"


def _check_reply(provider: str, reply: Reply) -> Reply:
    """The result is spliced into a frame as it is: what is no JSON would cost the executor its link."""
    size = len(reply.result) + len(reply.body or b"")
    if size > REPLY_BYTES_MAX:
        message = f"the reply of {provider} has {size} bytes, more than the {REPLY_BYTES_MAX} that one frame can carry"
        raise IoFailure(ErrorKind.RESULT, message, limit="reply_bytes_max", bytes=size)
    try:
        str(reply.result, "utf-8")
        msgspec.json.decode(reply.result, type=msgspec.Raw)
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        raise _bug(provider, ValueError(f"its result is not JSON: {error}")) from error
    return reply


def _no_room(provider: str, found: str) -> IoFailure:
    return IoFailure(ErrorKind.UNAVAILABLE, f"too many requests to {provider}: {found}", retryable=True)


def _bug(provider: str, error: BaseException) -> IoFailure:
    _log.error("IO provider %r failed", provider, exc_info=error)
    return IoFailure(ErrorKind.INTERNAL, f"the IO provider {provider} raised {type(error).__name__}: {error}")


def _failed(failure: IoFailure) -> IoAnswer:
    message = failure.message
    if len(message) > MESSAGE_CHARACTERS_MAX:
        message = message[: MESSAGE_CHARACTERS_MAX - 1] + "…"
    message = message.encode("utf-8", "replace").decode()  # a lone surrogate is no UTF-8
    error = WireError(failure.kind, message, failure.retryable, _small_json(failure.details))
    return IoAnswer(error=error)


def _small_json(details: dict[str, object]) -> dict[str, object]:
    """Details as they can travel; what cannot is left out."""
    try:
        fits = len(msgspec.json.encode(details)) <= DETAILS_BYTES_MAX
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.EncodeError):
        fits = False
    return details if fits else {"details": "left out: too large, or no JSON"}
