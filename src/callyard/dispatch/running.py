"""One attempt, as its code sees it: what `callyard.context()` and `callyard.progress()` find. Source: D7, D42."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from callyard.dispatch.call import Call
from callyard.errors import CallError, ErrorKind, UsageError, fail
from callyard.functions.current import ASK_PROVIDER, RUNNING, CallInfo
from callyard.functions.encoding import ResultMisfit, encode_value
from callyard.functions.ports import EMPTY, AskRefused, CallEventKind, CallEventPayload, nobody_to_ask

_log: Final = logging.getLogger("callyard.dispatch")


class _Progress(msgspec.Struct):
    """As an executor sends it."""

    done: int | float
    total: int | float | None = None
    message: str = ""


_PROGRESS: Final = msgspec.json.Decoder(_Progress)
_FIELDS: Final = msgspec.json.Decoder(dict[str, Any] | None)


class Running(msgspec.Struct, eq=False):
    """What an attempt and the task or thread that runs its code share. Satisfies `RunningCall`."""

    call: Call
    number: int
    """Of the attempt, from 1."""
    loop: asyncio.AbstractEventLoop
    begun: bool = False
    told_to_stop: bool = False
    over: bool = False
    """It was answered, or its code has ended: nothing more is told of it."""

    def call_info(self) -> CallInfo:
        call = self.call
        return CallInfo(
            call.id,
            self.number,
            call.owner,
            call.tenant,
            call.tags,
            call.key,
            call.deadline_remaining_ms(call.timers.now_ms()),
            None,
            call.claims,
            call.headers,
            {} if call.meta is EMPTY else msgspec.json.decode(call.meta),
        )

    def progress(self, done: float, total: float | None, message: str) -> None:
        """From any thread; told in the loop's own, before what the attempt ends with."""
        if self.call.on_progress is not None and not self.over:
            self._in_loop(self._tell, done, total, message)

    def log(self, level: str, message: str, fields: Mapping[str, Any]) -> bool:
        """From any thread, as `progress`. False: nobody listens."""
        if self.call.on_log is None or self.over:
            return False
        self._in_loop(self._tell_log, level, message, fields)
        return True

    def ask(self, kind: str, params: bytes) -> bytes:
        """From a thread of the handler's: it waits. Raises CallError, and UsageError in the loop's own thread."""
        if asyncio._get_running_loop() is self.loop:
            raise UsageError(f"{kind} would hold up the event loop that its answer comes by: await a{kind} instead")
        try:
            return asyncio.run_coroutine_threadsafe(self.aask(kind, params), self.loop).result()
        except concurrent.futures.CancelledError:
            raise CallError(fail(ErrorKind.CANCELLED, f"{kind}: its call has ended")) from None

    async def aask(self, kind: str, params: bytes) -> bytes:
        """The answer, as JSON. Raises CallError."""
        client = self.call.client
        try:
            if client is None:
                raise nobody_to_ask(kind)
            if self.over:
                raise AskRefused(ErrorKind.CANCELLED, f"{kind}: its call has ended")
            return encode_value(await client.ask(self.call, kind, msgspec.json.decode(params)))
        except AskRefused as refused:
            failure = fail(refused.kind, str(refused), retryable=refused.retryable, provider=ASK_PROVIDER)
            raise CallError(failure) from None
        except ResultMisfit as misfit:
            raise CallError(fail(ErrorKind.RESULT, f"{kind}: the client's answer: {misfit}")) from None

    def on_event(self, event: CallEventPayload) -> None:
        """What a `CallRunner` tells of the attempt. What is of another form is dropped: nobody checked it."""
        try:
            if event.event_kind is CallEventKind.PROGRESS:
                told = _PROGRESS.decode(event.value)
                self._tell(told.done, told.total, told.message)
            elif event.event_kind is CallEventKind.LOG:
                self._tell_log(event.level, event.text, _FIELDS.decode(event.value) or {})
        except msgspec.DecodeError:
            return

    def _in_loop(self, tell: Callable[..., None], *told: Any) -> None:
        if asyncio._get_running_loop() is self.loop:
            tell(*told)
            return
        try:
            self.loop.call_soon_threadsafe(tell, *told)
        except RuntimeError:  # the loop is closed: nobody listens
            return

    def _tell(self, done: float, total: float | None, message: str) -> None:
        if self.call.on_progress is not None and not self.over:
            self._tell_to(self.call.on_progress, done, total, message)

    def _tell_log(self, level: str, message: str, fields: Mapping[str, Any]) -> None:
        if self.call.on_log is not None and not self.over:
            self._tell_to(self.call.on_log, level, message, fields)

    def _tell_to(self, listener: Callable[..., None], *told: Any) -> None:
        try:
            listener(*told)
        except Exception:  # noqa: BLE001 - the listener's fault, which is no fault of the tool's (D29)
            _log.exception("%r, which was told of call %s, failed", listener, self.call.id)


def current_call() -> Call | None:
    """The call whose handler runs here."""
    running = RUNNING.get()
    return running.call if type(running) is Running else None
