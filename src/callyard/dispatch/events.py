"""What is told of calls while they go: one struct, its subscribers, and the queue between them. Source: D29, D54."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from typing import Final, Literal, Protocol, runtime_checkable

import msgspec

from callyard.errors import ErrorKind, Outcome
from callyard.ids import CallId, Owner, Tenant

EventName = Literal[
    "dispatch.start",
    "dispatch.attempt",
    "dispatch.retry",
    "dispatch.success",
    "dispatch.error",
    "dispatch.deduplicated",
    "circuit.opened",
    "circuit.half_open",
    "circuit.closed",
]
"""A call is told of with one `dispatch.start` and then exactly one of `ENDS`; a refusal may come as an end alone.
`dispatch.deduplicated` is the end of a call that got another's answer, a failure when its `kind` is set."""

ENDS: Final = frozenset({"dispatch.success", "dispatch.error", "dispatch.deduplicated"})


class DispatchEvent(msgspec.Struct, frozen=True, gc=False):
    """One fact about one call, or about a tool's breaker."""

    name: EventName
    at_ms: int
    """On the dispatcher's clock."""
    tool: str
    call_id: CallId = CallId("")
    tenant: Tenant = Tenant("default")
    owner: Owner = Owner("")
    parent_id: CallId = CallId("")
    """Of a nested dispatch, or of a call that one in an executor made: the call that made it."""
    attempt: int = 0
    """Of `attempt` and `retry`: which one; of an end: how many had begun."""
    duration_ms: int = 0
    """Of an end: since the start; of `retry`: how long until the next attempt."""
    kind: ErrorKind | None = None
    outcome: Outcome | None = None
    message: str = ""
    deduplicated: bool = False
    arguments: bytes = b""
    """JSON, of `dispatch.start` alone. Exporters mask it."""


Subscriber = Callable[[DispatchEvent], None]
"""Called on the loop; it must not wait. What it raises is counted and changes nothing."""

Unsubscribe = Callable[[], None]


@runtime_checkable
class Tracing(Protocol):
    """A subscriber whose spans go on inside the handlers (D30)."""

    def __call__(self, event: DispatchEvent, /) -> None: ...

    def enter(self, call_id: CallId) -> None:
        """In the context of a handler, before its first instruction."""
        ...

    def carrier(self, call_id: CallId) -> dict[str, str]:
        """The call's trace context, for a handler in another process."""
        ...


_log = logging.getLogger("callyard.dispatch")
_LOG_EVERY_MS: Final = 60_000


class _Seat:
    """One subscription."""

    __slots__ = ("logged_at_ms", "subscriber")

    def __init__(self, subscriber: Subscriber) -> None:
        self.subscriber = subscriber
        self.logged_at_ms: int | None = None


class EventHub:
    """Tells subscribers, in the order in which they came.

    Who has something to tell asks `wanted` first, and builds nothing when it is False.
    """

    __slots__ = ("_seats", "subscriber_failures", "wanted")

    def __init__(self) -> None:
        self.wanted = False
        """There is a subscriber."""
        self.subscriber_failures = 0
        self._seats: tuple[_Seat, ...] = ()

    def subscribe(self, subscriber: Subscriber) -> Unsubscribe:
        """Call `subscriber` with each event from now on, until what is returned is called (again: no effect)."""
        if inspect.iscoroutinefunction(subscriber) or inspect.iscoroutinefunction(type(subscriber).__call__):
            raise TypeError(f"a subscriber is called and not awaited: give a plain function, not async {subscriber!r}")
        seat = _Seat(subscriber)
        self._seats = (*self._seats, seat)
        self.wanted = True

        def unsubscribe() -> None:
            self._seats = tuple(other for other in self._seats if other is not seat)
            self.wanted = bool(self._seats)

        return unsubscribe

    def emit(self, event: DispatchEvent) -> None:
        """Tell every subscriber. Raises nothing of theirs: not even a cancellation or an exit is theirs to order."""
        for seat in self._seats:
            try:
                seat.subscriber(event)
            except (Exception, asyncio.CancelledError, SystemExit, GeneratorExit) as error:  # noqa: BLE001 logged below
                self.subscriber_failures += 1
                self._log_failure(seat, event, error)

    def _log_failure(self, seat: _Seat, event: DispatchEvent, error: BaseException) -> None:
        """Once a minute per subscriber: one that fails with each event must not fill the log."""
        if seat.logged_at_ms is not None and event.at_ms - seat.logged_at_ms < _LOG_EVERY_MS:
            return
        seat.logged_at_ms = event.at_ms
        _log.error(
            "a subscriber failed at %s of %s: %r",
            event.name,
            event.call_id or event.tool,
            seat.subscriber,
            exc_info=error,
        )
