"""What calls wait for at the worker, IO and subcalls: open requests, and who goes on when they are answered.

A call may have many open at once: `call_many` opens its own together, tasks of an `async def` each theirs. A waiting
call has no timer and pays no wall time: it pays what each answer says was used. Opening, answering and giving up all
happen in the main thread and in the engine's frames, so nothing here is ever interrupted half-way.

Invariants, by the names that the tests use:
- a request is answered once: what is unknown, answered, or its ended call's is counted and dropped (X66);
- a bounded call never grants 0, which would mean unlimited (X74).
Source: call-execution X27, X30, X42, X54, X66, X85.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Final

import msgspec

from callyard.errors import CallError, ErrorKind, Outcome, ProtocolError, UsageError, fail
from callyard.executor import budget
from callyard.executor.contexts import Call, Context, this_greenlet
from callyard.executor.link import Link
from callyard.ids import RequestId
from callyard.wire.arena import ArenaTooSmall
from callyard.wire.codec import encode_message
from callyard.wire.messages import (
    CallWaiting,
    CallWaitingPayload,
    IoRequest,
    ResumeCall,
    SubcallRequest,
    WaitKind,
    WireError,
)

if TYPE_CHECKING:
    from callyard.executor.hub import Hub
    from callyard.functions.packing import Packed

OPEN_MAX: Final = 1024
"""Most open requests of one call: more would be a protocol error to the worker (X66)."""


class Asked(msgspec.Struct, frozen=True):
    """One request, before it is opened."""

    io: IoRequest | None = None
    subcall: SubcallRequest | None = None
    args: bytes = b""
    """Of a subcall: the encoded arguments."""
    body: bytes | None = None

    @property
    def kind(self) -> WaitKind:
        return WaitKind.IO if self.io is not None else WaitKind.SUBCALL


class Reply(msgspec.Struct, frozen=True):
    """What the worker answered to one request."""

    result: bytes | Packed
    body: bytes | None
    error: WireError | None


class Wait:
    """Requests that were opened together, and who goes on once all are answered."""

    __slots__ = ("call", "context", "future", "left", "replies")

    def __init__(self, call: Call, count: int) -> None:
        self.call = call
        self.left = count
        self.replies: list[Any] = [None] * count
        """A `Reply` for each request, in their order, once `left` is 0."""
        self.context: Context | None = None
        """A `def` that is suspended for it."""
        self.future: Any = None
        """What a task of the event loop waits for."""


class Request(msgspec.Struct, frozen=True):
    """One that is open."""

    wait: Wait
    index: int
    kind: WaitKind


class CallRequests:
    """What one call has open."""

    __slots__ = ("request_ids", "waits")

    def __init__(self) -> None:
        self.request_ids: set[RequestId] = set()
        """Those the caller has given up included: the worker has not answered them."""
        self.waits: set[Wait] = set()
        """What somebody still waits for."""


class Requests:
    def __init__(self, hub: Hub, link: Link) -> None:
        self.by_call: Final[dict[Call, CallRequests]] = {}
        """Only calls that have something open."""
        self._hub = hub
        self._link = link
        self._open: dict[RequestId, Request] = {}
        self._number = 0

    # --- opening --------------------------------------------------------------------------------------------------

    def grant_ms(self, call: Call, count: int) -> int:
        """What each of `count` requests may use of the running call's budget; 0: it has none.

        A call with nothing left, or that is being stopped, is interrupted here: it opens nothing more (X74).
        """
        now = monotonic_ns()
        left_ms = 0
        if call.budget_ns and call.stop is None:
            left_ms = (call.budget_ns - call.used_ns(now, self._hub.busy_ns)) // 1_000_000
            if left_ms <= 0:
                call.stop = budget.BUDGET
                call.raises += 1
                call.raised_ns = now
        if call.stop is not None:
            raise call.stop.error(call.stop.text)
        return max(1, left_ms // count) if call.budget_ns else 0

    def open(self, call: Call, asked: Sequence[Asked]) -> Wait:
        """Send requests of a running call. Nothing is sent when one of them cannot be: `UsageError`, `CallError`."""
        own = self.by_call.get(call)
        open_count = 0 if own is None else len(own.request_ids)
        if open_count + len(asked) > OPEN_MAX:
            raise UsageError(
                f"a call may wait for {OPEN_MAX} requests at once: {open_count} are open, {len(asked)} more were asked "
                f"for. Await some of them first, or use call_many, which sends as many at a time as may be"
            )
        self._check_room(asked)
        frames = [None if self._link.is_for_arena(one.args) else self._encode(call, one) for one in asked]
        if own is None:
            own = self.by_call[call] = CallRequests()
        wait = Wait(call, len(asked))
        if not own.waits and call.family is not None:
            now = monotonic_ns()
            call.family.begin_free(now, self._hub.busy_at(now))
        own.waits.add(wait)
        for index, (one, encoded) in enumerate(zip(asked, frames, strict=True)):
            # What goes by the arena waits for room there, so what came before it must be on its way.
            request_id, frame = encoded or self._encode(call, one)
            self._open[request_id] = Request(wait, index, one.kind)
            own.request_ids.add(request_id)
            self._link.put(frame)
        return wait

    def _check_room(self, asked: Sequence[Asked]) -> None:
        arena = self._link.arena
        if arena is None:
            return
        for one in asked:
            try:
                arena.room.check(len(one.args))
            except ArenaTooSmall as error:
                raise _too_large(one, str(error), "arena_bytes_max") from None

    def _encode(self, call: Call, asked: Asked) -> tuple[RequestId, bytes]:
        self._number += 1
        request_id = RequestId(str(self._number))
        subcall, body = asked.subcall, asked.body
        if subcall is not None:
            placed = self._link.place(asked.args)
            body = placed.sidecar
            subcall = msgspec.structs.replace(subcall, args=placed.raw, args_at=placed.at)
        payload = CallWaitingPayload(asked.kind, call.payload.task_id, call.payload.attempt_seq, asked.io, subcall)
        try:
            return request_id, encode_message(CallWaiting(call.call_id, request_id, payload), body)
        except ProtocolError as error:
            raise _too_large(asked, str(error), "frame_bytes") from None

    # --- waiting --------------------------------------------------------------------------------------------------

    def wait_here(self, context: Context, wait: Wait) -> list[Reply]:
        """Suspend what runs in `context`, a `def` or one task of an `async def`, until all is answered.

        Called in its greenlet. Whatever is thrown into it meanwhile gives the answers up.
        """
        hub = self._hub
        context.at = this_greenlet()
        try:
            if context.looped:
                assert hub.loop is not None
                wait.future = future = hub.loop.make_future()
                future._asyncio_future_blocking = True
                hub.loop.turn_soon()
                hub.greenlet.switch(future)
            else:
                wait.context = context
                hub.give_way()
        finally:
            context.at = context.greenlet
            self._leave(wait)
        return wait.replies

    async def wait_for(self, wait: Wait) -> list[Reply]:
        """As `wait_here`, for a task of an `async def`."""
        loop = self._hub.loop
        assert loop is not None
        wait.future = loop.make_future()
        loop.turn_soon()
        try:
            await wait.future
        finally:
            self._leave(wait)
        return wait.replies

    def _leave(self, wait: Wait) -> None:
        """Nobody waits for it any more; its answers, if they still come, are only paid for."""
        wait.context = wait.future = None
        own = self.by_call.get(wait.call)
        if own is None or wait not in own.waits:
            return
        own.waits.remove(wait)
        if not own.waits and wait.call.family is not None:
            now = monotonic_ns()
            wait.call.family.end_free(now, self._hub.busy_at(now))
            assert self._hub.loop is not None
            self._hub.loop.charged(wait.call)

    # --- answers: in the hub --------------------------------------------------------------------------------------

    def answer(self, message: ResumeCall) -> bool:
        """Take the answer to a request. False: there is no such request of such a call here."""
        body = self._link.sidecars.pop(message.request_id, None)
        payload = message.payload
        request = self._open.get(message.request_id)
        if request is None or request.kind is not payload.resume_kind or not _is_from(message, request.wait.call):
            if payload.result_at is not None:
                self._link.say_released(payload.result_at)
            return False
        wait = request.wait
        call = wait.call
        del self._open[message.request_id]
        own = self.by_call[call]
        own.request_ids.remove(message.request_id)
        call.wait_ns += payload.budget_used_ms * 1_000_000
        if request.kind is WaitKind.SUBCALL:
            result = self._link.open_value(payload.result, body, payload.result_at)
            wait.replies[request.index] = Reply(result, None, payload.error)
        else:
            wait.replies[request.index] = Reply(bytes(payload.result), body, payload.error)
        wait.left -= 1
        if wait.left == 0:
            self._wake(wait)
        if not own.request_ids:
            del self.by_call[call]
        if call.family is not None and payload.budget_used_ms:
            assert self._hub.loop is not None
            self._hub.loop.charged(call)
        return True

    def _wake(self, wait: Wait) -> None:
        context, future = wait.context, wait.future
        self._leave(wait)
        if context is not None:
            self._hub.wake(context)
        elif future is not None and not future.done():
            future.set_result(None)

    def take_context(self, call: Call) -> Context | None:
        """The suspended context of a `def` that is to be stopped: it goes on though not all is answered."""
        own = self.by_call.get(call)
        for wait in own.waits if own is not None else ():
            if wait.context is not None:
                context, wait.context = wait.context, None
                return context
        return None

    def forget(self, call: Call) -> None:
        """It has ended: what it had open is the worker's to cancel, and late answers are dropped."""
        own = self.by_call.pop(call)
        for request_id in own.request_ids:
            del self._open[request_id]


def _is_from(message: ResumeCall, call: Call) -> bool:
    """Whether an answer is for this attempt of the call."""
    return call.call_id == message.call_id and call.payload.attempt_seq == message.payload.attempt_seq


def _too_large(asked: Asked, text: str, limit: str) -> CallError:
    what = asked.subcall.function_id if asked.subcall is not None else f"{asked.io and asked.io.provider}"
    return CallError(fail(ErrorKind.RESOURCE_LIMIT, f"{what}: {text}", outcome=Outcome.NOT_RUN, limit=limit))
