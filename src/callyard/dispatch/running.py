"""One attempt, as its code sees it: what `callyard.context()` and `callyard.progress()` find. Source: D7, D42."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import msgspec

from callyard.dispatch.call import Call
from callyard.functions.current import RUNNING, CallInfo
from callyard.functions.ports import CallEventKind, CallEventPayload

_log: Final = logging.getLogger("callyard.dispatch")


class _Progress(msgspec.Struct):
    """As an executor sends it."""

    done: int | float
    total: int | float | None = None
    message: str = ""


_PROGRESS: Final = msgspec.json.Decoder(_Progress)


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
        )

    def progress(self, done: float, total: float | None, message: str) -> None:
        """From any thread; told in the loop's own, before what the attempt ends with."""
        if self.call.on_progress is None or self.over:
            return
        if asyncio._get_running_loop() is self.loop:
            self._tell(done, total, message)
        else:
            try:
                self.loop.call_soon_threadsafe(self._tell, done, total, message)
            except RuntimeError:  # the loop is closed: nobody listens
                return

    def on_event(self, event: CallEventPayload) -> None:
        """What a `CallRunner` tells of the attempt. What is no progress is dropped: nobody checked it."""
        if event.event_kind is not CallEventKind.PROGRESS:
            return
        try:
            told = _PROGRESS.decode(event.value)
        except msgspec.DecodeError:
            return
        self._tell(told.done, told.total, told.message)

    def _tell(self, done: float, total: float | None, message: str) -> None:
        tell = self.call.on_progress
        if tell is None or self.over:
            return
        try:
            tell(done, total, message)
        except Exception:  # noqa: BLE001 - the listener's fault, which is no fault of the tool's (D29)
            _log.exception("on_progress of call %s failed", self.call.id)


def current_call() -> Call | None:
    """The call whose handler runs here."""
    running = RUNNING.get()
    return running.call if type(running) is Running else None
