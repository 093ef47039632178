"""What the SDK does inside an executor: `callyard.sdk` calls it from whatever greenlet and thread user code is in."""

from __future__ import annotations

import _thread
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Final

from msgspec import Raw
from msgspec.json import decode

from callyard import sdk
from callyard.errors import KIND_RULES, CallError, CallFailure, Outcome, UsageError
from callyard.executor.capture import PROGRESS_CHARACTERS_MAX, to_json
from callyard.executor.code import NotUsable
from callyard.executor.contexts import RUNNING, Call, Context
from callyard.executor.requests import OPEN_MAX, Asked, Reply, Wait
from callyard.executor.seats import ancestry_of
from callyard.functions.raised import clean_text, cut_text
from callyard.ids import FunctionId
from callyard.sdk import Answer, Arguments, IoReply
from callyard.wire.messages import EMPTY, NULL, IoRequest, SubcallRequest, WireError

if TYPE_CHECKING:
    from callyard.executor.hub import Hub
    from callyard.functions.outgoing import Outgoing

_EXACT_MAX: Final = 1 << 53


class ExecutorRuntime:
    """An `sdk.Runtime`. Built in the main thread."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._main_thread: Final = _thread.get_ident()

    def sleep(self, seconds: float) -> None:
        """Suspend the call that runs here, and no other."""
        in_main_thread = _thread.get_ident() == self._main_thread
        context = self._hub.running
        if context is not None and in_main_thread:
            self._hub.suspend(context, seconds)
        elif in_main_thread and RUNNING.get(None) is not None:
            raise RuntimeError("sleep() in a callback of the event loop would hold up every call; use asyncio.sleep()")
        else:  # a thread of the user's, or the import of the bundle
            time.sleep(seconds)

    def call_info(self) -> sdk.CallInfo | None:
        call = RUNNING.get(None)
        if call is None:
            return None
        known = call.payload.context
        remaining_ms = known.deadline_remaining_ms
        if remaining_ms is not None:
            remaining_ms = max(0, remaining_ms - (monotonic_ns() - call.received_ns) // 1_000_000)
        budget_remaining_ms = None
        if call.budget_ns:
            used_ns = call.used_ns(monotonic_ns(), self._hub.busy_ns)
            budget_remaining_ms = max(0, (call.budget_ns - used_ns) // 1_000_000)
        return sdk.CallInfo(
            known.call_id or call.call_id,
            known.attempt,
            known.owner,
            known.tenant,
            known.tags,
            known.idempotency_key,
            remaining_ms,
            budget_remaining_ms,
            known.claims,
            known.headers,
            {} if known.meta is EMPTY else decode(known.meta),
        )

    # --- IO -------------------------------------------------------------------------------------------------------

    def io(self, provider: str, operation: str, request: bytes, body: bytes | None = None) -> IoReply:
        context = self._here(provider)
        wait = self._open_io(context.call, provider, operation, request, body)
        return _to_io_reply(provider, operation, self._hub.requests.wait_here(context, wait)[0])

    async def aio(self, provider: str, operation: str, request: bytes, body: bytes | None = None) -> IoReply:
        context = self._here(provider)
        wait = self._open_io(context.call, provider, operation, request, body)
        return _to_io_reply(provider, operation, (await self._wait(context, wait))[0])

    def _open_io(self, call: Call, provider: str, operation: str, request: bytes, body: bytes | None) -> Wait:
        self._hub.requests.grant_ms(call, 1)
        return self._hub.requests.open(call, [Asked(io=IoRequest(provider, operation, Raw(request)), body=body)])

    # --- subcalls -------------------------------------------------------------------------------------------------

    def read_rows(self, function: object, rows: Iterable[Any]) -> list[Arguments]:
        self._here("call_many()")
        outgoing = self._outgoing(function)
        return [outgoing.read_row(row) for row in rows]

    def subcalls(
        self, function: object, calls: Sequence[Arguments], *, spread: bool, lenient: bool
    ) -> list[Answer[Any]]:
        context = self._here("call()")
        batch = Batch(self._outgoing(function), calls, spread=spread, lenient=lenient)
        while batch.to_send:
            wait = self._open_subcalls(context.call, batch)
            batch.take(self._hub.requests.wait_here(context, wait))
        return batch.answers

    async def asubcalls(
        self, function: object, calls: Sequence[Arguments], *, spread: bool, lenient: bool
    ) -> list[Answer[Any]]:
        context = self._here("acall()")
        batch = Batch(self._outgoing(function), calls, spread=spread, lenient=lenient)
        while batch.to_send:
            wait = self._open_subcalls(context.call, batch)
            batch.take(await self._wait(context, wait))
        return batch.answers

    def _open_subcalls(self, call: Call, batch: Batch) -> Wait:
        """As many as may be open at once; the budget is shared by all that are still to be made."""
        grant_ms = self._hub.requests.grant_ms(call, len(batch.to_send))
        ancestry = ancestry_of(call.call_id)
        name = FunctionId(batch.outgoing.name)
        return self._hub.requests.open(
            call,
            [
                Asked(subcall=SubcallRequest(name, NULL, ancestry, grant_ms, batch.spread), args=args)
                for _, args in batch.to_send[:OPEN_MAX]
            ],
        )

    def _outgoing(self, function: object) -> Outgoing:
        try:
            return self._hub.code.outgoing(function)
        except NotUsable as failure:
            raise UsageError(failure.fault.message) from None

    # --- where user code stands -----------------------------------------------------------------------------------

    def _here(self, what: str) -> Context:
        """The context whose code calls us. `RuntimeError` where nothing could wait without holding up every call."""
        if _thread.get_ident() != self._main_thread:
            raise RuntimeError(
                f"{what} works in the call's own thread only, not in one that it started: make the request there, or "
                f"have several under way with call_many, or with acall in an async def"
            )
        context = self._hub.running
        if context is not None:
            return context
        if RUNNING.get(None) is not None:
            raise RuntimeError(f"{what} in a callback of the event loop would hold up every call; start a task there")
        raise RuntimeError(f"{what} needs a running call, and this file is only being imported: use it in a function")

    async def _wait(self, context: Context, wait: Wait) -> list[Reply]:
        """As a task of the call's. In a loop of a `def`'s own, by asyncio.run, only the whole call can wait."""
        if context.looped:
            return await self._hub.requests.wait_for(wait)
        return self._hub.requests.wait_here(context, wait)

    # --- telling --------------------------------------------------------------------------------------------------

    def progress(self, done: float, total: float | None, message: str) -> None:
        shown = cut_text(clean_text(message), PROGRESS_CHARACTERS_MAX)
        self._hub.teller.progress(_to_number(done), None if total is None else _to_number(total), shown)

    def log(self, level: str, message: str, fields: Mapping[str, Any]) -> None:
        """Where nobody listens it goes to stderr, so that nothing is lost."""
        if not self._hub.teller.log(level, message, fields):
            more = f" {to_json(fields).decode()}" if fields else ""
            sys.stderr.write(f"{level}: {message}{more}\n")


def _to_number(value: float) -> float:
    """What JSON holds, of whatever user code counts with."""
    return value if type(value) is int and value < _EXACT_MAX else float(value)


class Batch:
    """Subcalls that are made together: what is still to be sent, and what came of the others."""

    def __init__(self, outgoing: Outgoing, calls: Sequence[Arguments], *, spread: bool, lenient: bool) -> None:
        self.outgoing = outgoing
        self.spread = spread
        self.to_send: list[tuple[int, bytes]] = []
        """Places and arguments."""
        self._answers: list[Answer[Any] | None] = [None] * len(calls)
        for index, (args, kwargs) in enumerate(calls):
            try:
                self.to_send.append((index, outgoing.encode_call(args, kwargs, lenient=lenient)))
            except CallError as error:
                self._answers[index] = Answer(index, None, error.failure)

    def take(self, replies: Sequence[Reply]) -> None:
        """What was answered to the first of `to_send`."""
        answered, self.to_send = self.to_send[: len(replies)], self.to_send[len(replies) :]
        for (index, _), reply in zip(answered, replies, strict=True):
            self._answers[index] = self._read(index, reply)

    def _read(self, index: int, reply: Reply) -> Answer[Any]:
        if reply.error is not None:
            return Answer(index, None, _failure_of(reply.error, function=self.outgoing.name))
        try:
            return Answer(index, self.outgoing.decode(reply.result), None)
        except CallError as error:
            return Answer(index, None, error.failure)

    @property
    def answers(self) -> list[Answer[Any]]:
        """Once nothing is to be sent."""
        return [answer for answer in self._answers if answer is not None]


def _to_io_reply(provider: str, operation: str, reply: Reply) -> IoReply:
    if reply.error is not None:
        raise CallError(_failure_of(reply.error, provider=provider, operation=operation))
    assert isinstance(reply.result, bytes)
    return IoReply(reply.result, reply.body)


def _failure_of(error: WireError, **whose: str) -> CallFailure:
    """What the worker says of a request, with whose failure it is. `stack` of the details is the other call's."""
    details = {**whose, **error.details}
    stack = details.pop("stack", "")
    outcome = KIND_RULES[error.kind].outcome
    return CallFailure(
        error.kind,
        error.message,
        error.retryable,
        0 if outcome is Outcome.NOT_RUN else 1,
        outcome,
        details,
        stack if isinstance(stack, str) else "",
    )
