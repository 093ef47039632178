"""What leaves a handler: sends, publishes, requests, replies.

A send has three stages. It is submitted at once; if this host has no room for it, it waits in its place's line up to
its family's send timeout; then it is submitted once more, in the step that gave room. A submission that the transport
took is one operation at one target: nothing here picks another or starts a second one, and its waiting for bytes or a
paused peer is inside it. A send is complete when the queue beside this side has it; what fails later is counted.
A request never waits for room. Source: job-queue §7, §8, R78-R90, R92, R103, R119.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Generator, Hashable, Iterable
from enum import StrEnum
from functools import partial
from typing import Any, Final, TypeAlias

from callyard.clock import Timers
from callyard.host.config import HostConfig, SendFamily, whole_timeout_ms
from callyard.host.context import infrastructure_context
from callyard.host.drops import Drops
from callyard.host.errors import HostError, HostErrorKind
from callyard.host.requests import RequestTable
from callyard.host.waiters import Waiter, Waiters
from callyard.transport.port import Completion, OutgoingKind, TransportRefused

_log: Final = logging.getLogger("callyard.host")

Submitted: TypeAlias = HostErrorKind | Awaitable[None] | None
"""What became of a submission: refused, so nothing changed; an operation that runs; None: it is where it should be.

CAPACITY_EXCEEDED says that this host has no room for it now."""

Submit: TypeAlias = Callable[[int], Submitted]
"""One plain function of the deadline, an instant in ms. It may look for its target each time: only a start fixes it.

It may raise `HostError` for what it refuses, to say why.
"""

SubmitRequest: TypeAlias = Callable[[int, int], Submitted]
"""The same of the operation's id and the deadline."""

REFUSED_KINDS: Final = {
    "not_found": HostErrorKind.NOT_FOUND,
    "not_connected": HostErrorKind.UNAVAILABLE,
    "timeout": HostErrorKind.DEADLINE_EXCEEDED,
    "terminated": HostErrorKind.SHUTTING_DOWN,
}


def read_error(completion: Completion) -> HostError:
    """The error of an error reply. A kind that nobody knows is a malformed reply: PROTOCOL_ERROR."""
    kind = HostErrorKind.__members__.get(completion.error.upper())
    if kind is None:
        return HostError(
            HostErrorKind.PROTOCOL_ERROR, f"an error reply of unknown kind {completion.error!r}: {completion.message}"
        )
    return HostError(kind, completion.message or "the other side answered so, without a word why")


def operation_error(operation: asyncio.Future[None]) -> HostError | None:
    """How an operation ended; None: well. Told by type, never by text."""
    if operation.cancelled():
        return HostError(HostErrorKind.SHUTTING_DOWN, "the transport gave the operation up")
    raised = operation.exception()
    return None if raised is None else error_of(raised)


def error_of(raised: BaseException) -> HostError:
    if isinstance(raised, HostError):
        return raised
    if isinstance(raised, TransportRefused):
        kind = REFUSED_KINDS.get(raised.reason, HostErrorKind.INTERNAL_FAILURE)
        error = HostError(kind, f"the transport did not take the operation: {raised.reason}")
    else:
        _log.error("an operation failed", exc_info=raised)
        error = HostError(HostErrorKind.INTERNAL_FAILURE, f"the operation failed: {type(raised).__name__}")
    error.__cause__ = raised
    return error


class SendingState(StrEnum):
    UNDER_WAY = "under_way"
    """It waits for room, or its operation runs."""
    ENDED = "ended"
    CANCELLED = "cancelled"
    """While it waited for room."""


class Sending:
    """A send that has begun. Await it once, or leave it: what fails with nobody waiting is counted as dropped, and
    logged now and then. Of one that failed in its very call, who awaits it within that step of the loop, or hands it to
    a task there, is in time.

    Cancelling who awaits it ends a wait for room, so that it is never sent; once it is submitted that ends only the
    caller's wait.
    """

    __slots__ = ("_drops", "_error", "_future", "_is_awaited", "_is_begun", "_kind", "_state", "_waiter", "target")

    def __init__(self, drops: Drops, kind: OutgoingKind, target: str) -> None:
        self._drops = drops
        self._kind = kind
        self.target = target
        """A spot's id, or what else its place is called."""
        self._state = SendingState.UNDER_WAY
        self._error: HostError | None = None
        self._future: _Wait | None = None
        self._waiter: Waiter | None = None
        self._is_begun = False
        """The call that made it has returned."""
        self._is_awaited = False
        """Somebody is told, or was."""

    @property
    def state(self) -> SendingState:
        return self._state

    def cancel(self) -> bool:
        """Whether this ended a wait for room: it will never be sent, and awaiting it raises CancelledError."""
        if self._waiter is None or not self._waiter.cancel():
            return False
        self._state = SendingState.CANCELLED
        if self._future is not None:
            self._future.cancel()
        return True

    def __await__(self) -> Generator[Any, None, None]:
        if self._future is not None:
            raise HostError(
                HostErrorKind.INVALID_OPERATION, "a send is awaited by one at a time, and another awaits it"
            )
        self._is_awaited = True
        if self._state is SendingState.CANCELLED:
            raise asyncio.CancelledError
        if self._state is SendingState.ENDED:
            if self._error is not None:
                raise self._error
            return
        self._future = _Wait(self)
        try:
            yield from self._future
        finally:
            self._future = None

    def _end(self, error: HostError | None) -> None:
        assert self._state is SendingState.UNDER_WAY, f"first_terminal: a send that is {self._state} ends"
        self._state, self._error = SendingState.ENDED, error
        future = self._future
        if future is not None and not future.done():
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
        elif error is not None and self._is_begun:
            self._drops.count_error(self._kind, error, self.target)

    def _begun(self) -> None:
        """The call that made it returns."""
        self._is_begun = True
        if self._error is None:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # nobody can await it here
            self._count_unless_awaited()
            return
        # A task that is made in this step has begun by the second turn of the loop.
        context = infrastructure_context()
        loop.call_soon(partial(loop.call_soon, self._count_unless_awaited, context=context), context=context)

    def _count_unless_awaited(self) -> None:
        if not self._is_awaited and self._error is not None:
            self._drops.count_error(self._kind, self._error, self.target)


class _Wait(asyncio.Future[None]):
    """What awaits a send. A cancellation counts from the call of `cancel`, not from when its task runs next: between
    the two there may be room.
    """

    def __init__(self, sending: Sending) -> None:
        super().__init__(loop=asyncio.get_running_loop())
        self._sending = sending

    def cancel(self, msg: Any | None = None) -> bool:
        is_cancelled = super().cancel(msg)
        if is_cancelled:
            self._sending.cancel()
        return is_cancelled


class Outbound:
    """One for a host; on its loop."""

    def __init__(
        self, config: HostConfig, timers: Timers, waiters: Waiters, requests: RequestTable, drops: Drops
    ) -> None:
        self._config = config
        self._timers = timers
        self._waiters = waiters
        self._requests = requests
        self._drops = drops
        self._operations: set[asyncio.Future[None]] = set()
        """What the transport has not taken yet; kept, so that none is lost."""
        self._closed: HostErrorKind | None = None

    @property
    def operations(self) -> int:
        return len(self._operations)

    def send(
        self,
        family: SendFamily,
        key: Hashable,
        submit: Submit,
        *,
        timeout_ms: float | None = None,
        kind: OutgoingKind = OutgoingKind.ONE_WAY,
    ) -> Sending:
        """Begin a one-way send, or a publish to one socket queue; `key` names what has the room.

        It begins in this call, so sends are in the order of their calls, awaited or not. A shorter `timeout_ms` wins
        over the family's. Awaiting raises `HostError`: DEADLINE_EXCEEDED, SHUTTING_DOWN, and what `submit` says.
        """
        sending = Sending(self._drops, kind, str(key))
        try:
            self._check_open(sending.target)
            deadline_at_ms = self._timers.now_ms() + self._send_timeout_ms(family, timeout_ms)
            if self._waiters.has_line(key) or not self._try(sending, submit, deadline_at_ms):
                sending._waiter = self._waiters.wait(
                    key, family, deadline_at_ms, partial(self._try, sending, submit, deadline_at_ms), sending._end
                )
        except HostError as error:
            sending._end(error)
        sending._begun()
        return sending

    def publish(self, family: SendFamily, targets: Iterable[Submit], target: str = "") -> Sending:
        """Begin a publish to many: one attempt each, at the targets as they are now.

        It has started with the first attempt and cannot fail any more: a target without room is left out, and counted.
        Complete when every attempt has ended. Awaiting raises `HostError`: SHUTTING_DOWN.
        """
        sending = Sending(self._drops, OutgoingKind.PUBLISH, target)
        if self._closed is not None:
            sending._end(_closing_error(self._closed, target))
            sending._begun()
            return sending
        deadline_at_ms = self._timers.now_ms() + self._config.send_timeout_of(family)
        under_way: set[asyncio.Future[None]] = set()
        for submit in targets:
            try:
                submitted = submit(deadline_at_ms)
            except Exception as raised:  # noqa: BLE001 - the transport's; told by its kind
                self._drops.count_error(OutgoingKind.PUBLISH, error_of(raised), target)
                continue
            if isinstance(submitted, HostErrorKind):
                self._drops.count_error(OutgoingKind.PUBLISH, submitted, target)
            elif submitted is not None:
                under_way.add(operation := self._run(submitted))
                operation.add_done_callback(partial(self._end_of_attempt, sending, under_way))
        if not under_way:
            sending._end(None)
        sending._begun()
        return sending

    async def request(
        self, target: str, submit: SubmitRequest, *, timeout_ms: float | None = None, is_local: bool = False
    ) -> Any:
        """Send a request and wait for its outcome: the `Completion` of a reply, or what a local owner returned.

        Its place in the table comes first: without one nothing is sent. No room, here or there, is an answer at once.
        Cancelling it takes it out of the table; a reply that comes later is dropped. `is_local`: no transport brings
        its answer. Raises `HostError`.
        """
        self._check_open(target)
        now_ms = self._timers.now_ms()
        if timeout_ms is None:
            timeout_ms = self._config.request_timeout_ms
        deadline_at_ms = now_ms + whole_timeout_ms("timeout_ms", timeout_ms)
        outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        request = self._requests.reserve(target, deadline_at_ms, partial(deliver, outcome), is_local=is_local)
        try:
            try:
                submitted = submit(request.operation_id, deadline_at_ms)
            except HostError:
                raise
            except Exception as raised:
                raise error_of(raised) from raised
            if isinstance(submitted, HostErrorKind):
                raise HostError(submitted, f"{target!r} did not take the request")
            if submitted is not None:
                self._run(submitted).add_done_callback(partial(self._end_of_request_start, request.operation_id))
            return await outcome
        finally:
            request.release()

    def complete(self, completion: Completion) -> bool:
        """A reply or an error reply came; False: nobody waits for it any more, and it is counted."""
        outcome = read_error(completion) if completion.error else completion
        return self._requests.settle(completion.operation_id, outcome, is_received=True)

    def reply(self, start: Callable[[], Awaitable[None]]) -> asyncio.Future[None] | None:
        """Start a reply, and see its operation to its end, whoever waits for that: if it fails, it is counted.

        None: it has failed. Raises nothing.
        """
        try:
            operation = self._run(start())
        except Exception as raised:  # noqa: BLE001 - the transport's
            self._drops.count_error(OutgoingKind.REPLY, error_of(raised))
            return None
        operation.add_done_callback(self._end_of_reply)
        return operation

    def detach(self, key: Hashable, target: str) -> None:
        """A target is gone: who waits for its room or its answers ends UNAVAILABLE."""
        self._waiters.end_line(key, HostErrorKind.UNAVAILABLE, f"{target!r} went away before there was room")
        self._requests.end_target(target, HostError(HostErrorKind.UNAVAILABLE, f"{target!r} went away"))

    def seal(self, kind: HostErrorKind = HostErrorKind.SHUTTING_DOWN) -> None:
        """Take no more sends and requests, and end the waits for room. What is under way goes on; replies go out."""
        if self._closed is None:
            self._closed = kind
            self._waiters.close(kind)

    def close(self) -> None:
        """Seal, and end the requests without an answer. Operations end with the transport, which is closed next."""
        self.seal()
        self._requests.close()

    def _try(self, sending: Sending, submit: Submit, deadline_at_ms: int) -> bool:
        """Submit once; False: there is no room, and nothing has changed."""
        try:
            submitted = submit(deadline_at_ms)
        except Exception as raised:  # noqa: BLE001 - the transport's: an attempt is made once, however it ends
            submitted = None
            sending._end(error_of(raised))
        else:
            if submitted is HostErrorKind.CAPACITY_EXCEEDED:
                return False
            if submitted is None:
                sending._end(None)
            elif isinstance(submitted, HostErrorKind):
                sending._end(HostError(submitted, f"{sending.target!r} did not take the send"))
            else:
                self._run(submitted).add_done_callback(partial(self._end_of_send, sending))
        return True

    def _run(self, operation: Awaitable[None]) -> asyncio.Future[None]:
        # A coroutine becomes a task of the host's: it is no part of the turn that sent, or gave room.
        future = infrastructure_context().run(asyncio.ensure_future, operation)
        self._operations.add(future)
        future.add_done_callback(self._operations.discard)
        return future

    def _end_of_send(self, sending: Sending, operation: asyncio.Future[None]) -> None:
        sending._end(operation_error(operation))

    def _end_of_attempt(
        self, sending: Sending, under_way: set[asyncio.Future[None]], operation: asyncio.Future[None]
    ) -> None:
        error = operation_error(operation)
        if error is not None:
            self._drops.count_error(OutgoingKind.PUBLISH, error, sending.target)
        under_way.discard(operation)
        if not under_way:
            sending._end(None)

    def _end_of_request_start(self, operation_id: int, operation: asyncio.Future[None]) -> None:
        error = operation_error(operation)
        if error is not None and self._requests.is_in_flight(operation_id):
            self._requests.settle(operation_id, error)

    def _end_of_reply(self, operation: asyncio.Future[None]) -> None:
        error = operation_error(operation)
        if error is not None:
            self._drops.count_error(OutgoingKind.REPLY, error)

    def _send_timeout_ms(self, family: SendFamily, timeout_ms: float | None) -> int:
        family_ms = self._config.send_timeout_of(family)
        return family_ms if timeout_ms is None else min(family_ms, whole_timeout_ms("timeout_ms", timeout_ms))

    def _check_open(self, target: str) -> None:
        if self._closed is not None:
            raise _closing_error(self._closed, target)


def _closing_error(kind: HostErrorKind, target: str) -> HostError:
    return HostError(kind, f"the host is closing: nothing more goes to {target!r}")


def deliver(outcome: asyncio.Future[Any], value: Any) -> bool:
    """Hand an outcome to who awaits it; False: the caller was cancelled."""
    if outcome.done():
        return False
    if isinstance(value, HostError):
        outcome.set_exception(value)
    else:
        outcome.set_result(value)
    return True
