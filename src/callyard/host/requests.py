"""The table of requests that this side sent: whoever removes an entry owns its outcome.

A request has its place before anything is sent, and keeps it until its caller has been told: so unresolved requests
and undelivered outcomes together are bounded, and a full table refuses before it sends. Reply, error reply, refused
operation, deadline, cancellation, detach and shutdown all go through one removal; what comes second finds nothing, and
is counted. Ids are never given twice. Source: job-queue §3, R81, R103, R119.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from functools import partial
from typing import Any

import msgspec

from callyard.clock import Timer, Timers
from callyard.host.config import REQUESTS_MAX
from callyard.host.errors import HostError, HostErrorKind

Deliver = Callable[[Any], bool]
"""Takes the outcome, a value or a `HostError`; False: its caller has gone."""


class RequestState(StrEnum):
    IN_FLIGHT = "in_flight"
    UNDELIVERED = "undelivered"
    """It has its outcome, and its caller has not run yet."""
    GONE = "gone"


class RequestsStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The table at one instant. All but the first two are counted since the last reset."""

    in_flight: int
    undelivered: int
    refused: int
    """There was no place: CapacityExceeded, and nothing was sent."""
    settled: int
    """Requests that got an outcome, timeouts among them."""
    timeouts: int
    withdrawn: int
    """Their callers did not wait for an outcome."""
    late: int
    """Outcomes that came when nobody waited for them any more."""
    duration_ms: int
    """Of the settled ones, together."""
    duration_ms_max: int


class Request:
    """One entry. Its caller ends it by `release`, whatever else has happened."""

    __slots__ = (
        *("_deliver", "_table", "_timer", "deadline_at_ms", "is_local"),
        *("operation_id", "started_at_ms", "state", "target"),
    )

    def __init__(
        self,
        table: RequestTable,
        operation_id: int,
        target: str,
        started_at_ms: int,
        deadline_at_ms: int,
        deliver: Deliver,
        is_local: bool,
    ) -> None:
        self.operation_id = operation_id
        self.target = target
        self.started_at_ms = started_at_ms
        self.deadline_at_ms = deadline_at_ms
        self.is_local = is_local
        """It was sent to nobody outside, so nobody outside answers it."""
        self.state = RequestState.IN_FLIGHT
        self._table = table
        self._deliver = deliver
        self._timer: Timer | None = None

    def release(self) -> None:
        """Give its place back: told, or not waited for any more. A second time changes nothing."""
        self._table._release(self)

    def __repr__(self) -> str:
        return f"<Request {self.operation_id} to {self.target!r} {self.state}>"


class RequestTable:
    """At most `limit` requests that are in flight or undelivered; one for a host."""

    def __init__(self, timers: Timers, limit: int = REQUESTS_MAX) -> None:
        self.limit = limit
        self._timers = timers
        self._in_flight: dict[int, Request] = {}
        self._undelivered: dict[int, Request] = {}
        self._last_id = 0
        self._closed: HostErrorKind | None = None
        self.reset_metrics()

    def __len__(self) -> int:
        return len(self._in_flight) + len(self._undelivered)

    def reserve(self, target: str, deadline_at_ms: int, deliver: Deliver, *, is_local: bool = False) -> Request:
        """A place for a request that is sent next. `deliver` is called once, unless it is released before.

        Raises `HostError`: CAPACITY_EXCEEDED without a place, and what the table was closed with.
        """
        if self._closed is not None:
            raise HostError(self._closed, f"the host is closing: no request to {target!r}")
        if len(self) >= self.limit:
            self._refused += 1
            raise HostError(
                HostErrorKind.CAPACITY_EXCEEDED,
                f"{self.limit} requests are unresolved or undelivered: nothing was sent to {target!r}",
            )
        self._last_id += 1
        now_ms = self._timers.now_ms()
        request = Request(self, self._last_id, target, now_ms, deadline_at_ms, deliver, is_local)
        self._in_flight[request.operation_id] = request
        self._arm(request)
        return request

    def settle(self, operation_id: int, outcome: Any, *, is_received: bool = False) -> bool:
        """End a request, by a value or a `HostError`; False: it had ended, and this is dropped and counted.

        `is_received`: by what a peer sent, which ends no request that was not sent to peers, whatever its number.
        """
        request = self._in_flight.get(operation_id)
        if request is None or (is_received and request.is_local):
            self._late += 1
            return False
        del self._in_flight[operation_id]
        self._settle(request, outcome)
        return True

    def end_target(self, target: str, error: HostError) -> int:
        """End all that are under way to one target, which has been detached; how many."""
        ended = [request for request in self._in_flight.values() if request.target == target]
        return sum(self.settle(request.operation_id, error) for request in ended)

    def close(self, kind: HostErrorKind = HostErrorKind.SHUTTING_DOWN) -> None:
        """End all that are in flight, and refuse what comes. A second time changes nothing."""
        if self._closed is None:
            self._closed = kind
            for operation_id in list(self._in_flight):
                self.settle(operation_id, HostError(kind, "the host was closed before an answer came"))

    def is_in_flight(self, operation_id: int) -> bool:
        return operation_id in self._in_flight

    def status(self) -> RequestsStatus:
        return RequestsStatus(
            in_flight=len(self._in_flight),
            undelivered=len(self._undelivered),
            refused=self._refused,
            settled=self._settled,
            timeouts=self._timeouts,
            withdrawn=self._withdrawn,
            late=self._late,
            duration_ms=self._duration_ms,
            duration_ms_max=self._duration_ms_max,
        )

    def reset_metrics(self) -> None:
        self._refused = self._settled = self._timeouts = self._withdrawn = self._late = 0
        self._duration_ms = self._duration_ms_max = 0

    def check_invariants(self) -> None:
        """Between steps, by the names of the design page."""
        assert len(self) <= self.limit, f"requests_bounded: {len(self)} of {self.limit}"
        for requests, state in (
            (self._in_flight, RequestState.IN_FLIGHT),
            (self._undelivered, RequestState.UNDELIVERED),
        ):
            for request in requests.values():
                assert request.state is state, f"first_terminal: {request} among {state}"
                has_timer = request._timer is not None
                assert has_timer == (state is RequestState.IN_FLIGHT), f"first_terminal: {request} timer"
        assert self._closed is None or not self._in_flight, f"first_terminal: {len(self._in_flight)} outlive the table"

    def _settle(self, request: Request, outcome: Any) -> None:
        duration_ms = self._timers.now_ms() - request.started_at_ms
        self._settled += 1
        self._duration_ms += duration_ms
        self._duration_ms_max = max(self._duration_ms_max, duration_ms)
        self._disarm(request)
        request.state = RequestState.UNDELIVERED
        self._undelivered[request.operation_id] = request
        if not request._deliver(outcome):
            self._late += 1

    def _release(self, request: Request) -> None:
        if request.state is RequestState.GONE:
            return
        if self._in_flight.pop(request.operation_id, None) is not None:
            self._withdrawn += 1
            self._disarm(request)
        else:
            del self._undelivered[request.operation_id]
        request.state = RequestState.GONE

    def _arm(self, request: Request) -> None:
        request._timer = self._timers.call_at(request.deadline_at_ms, partial(self._look_at_deadline, request))

    def _disarm(self, request: Request) -> None:
        if request._timer is not None:
            request._timer.cancel()
            request._timer = None

    def _look_at_deadline(self, request: Request) -> None:
        if request.state is not RequestState.IN_FLIGHT:
            return
        if self._timers.now_ms() < request.deadline_at_ms:  # no timer of a loop runs for weeks
            self._arm(request)
            return
        self._timeouts += 1
        waited_ms = request.deadline_at_ms - request.started_at_ms
        self.settle(
            request.operation_id,
            HostError(HostErrorKind.DEADLINE_EXCEEDED, f"no answer from {request.target!r} within {waited_ms} ms"),
        )
