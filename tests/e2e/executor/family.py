"""A driver that plays the worker's part in subcalls: sends each to the same executor, and resumes its parent."""

from __future__ import annotations

from typing import Any

import msgspec

from callyard.errors import ErrorKind
from callyard.ids import CallId, RequestId
from callyard.wire.messages import (
    CallCompleted,
    CallEvent,
    CallFailed,
    CallWaiting,
    ResumeCall,
    ResumeCallPayload,
    WaitKind,
    WireError,
)
from tests.e2e.executor.driver import Driver


class FamilyDriver(Driver):
    """`waiting` is every request seen; `events` every CallEvent."""

    def __init__(self, source: str = "", *flags: str, **options: Any) -> None:
        self.waiting: list[CallWaiting] = []
        self.events: list[CallEvent] = []
        self.serves_subcalls = True
        self.bodies: list[bytes | None] = []
        """What came beside each request of IO."""
        self._parents: dict[CallId, CallWaiting] = {}
        self._subcall_number = 0
        super().__init__(source, *flags, **options)

    def _take(self, message: Any) -> None:
        match message:
            case CallEvent():
                assert message.call_id not in self.ends, f"told after its end: {message}"
                self.events.append(message)
            case CallWaiting(payload=payload) if payload.wait_kind == WaitKind.SUBCALL:
                self.waiting.append(message)
                if self.serves_subcalls:
                    self.start_subcall(message)
            case CallWaiting(payload=payload) if payload.wait_kind == WaitKind.IO:
                self.waiting.append(message)
                self.bodies.append(self.last_sidecar)
            case CallCompleted() | CallFailed() if message.call_id in self._parents:
                super()._take(message)
                self._resume_parent(self._parents.pop(message.call_id), message)
            case _:
                super()._take(message)

    def start_subcall(self, waiting: CallWaiting) -> CallId:
        asked = waiting.payload.subcall
        assert asked is not None
        self._subcall_number += 1
        call = self.make_call(
            asked.function_id,
            raw=bytes(asked.args),
            budget_ms=asked.granted_budget_ms,
            call_id=f"{waiting.call_id}/sub-{self._subcall_number}",
            parent=waiting.call_id,
        )
        self._parents[call.call_id] = waiting
        self.send(call)
        return call.call_id

    def _resume_parent(self, waiting: CallWaiting, end: CallCompleted | CallFailed) -> None:
        used_ms = end.payload.budget_used_ms
        if isinstance(end, CallCompleted):
            self.resume(waiting, result=bytes(end.payload.output), used_ms=used_ms)
        else:
            failed = end.payload
            error = WireError(ErrorKind(failed.error_kind), failed.error_message, failed.retryable, failed.details)
            self.resume(waiting, error=error, used_ms=used_ms)

    def resume(
        self,
        waiting: CallWaiting,
        value: Any = None,
        *,
        result: bytes | None = None,
        error: WireError | None = None,
        used_ms: int = 0,
        body: bytes | None = None,
        request_id: str = "",
    ) -> None:
        raw = msgspec.Raw(msgspec.json.encode(value) if result is None else result)
        payload = ResumeCallPayload(
            WaitKind(waiting.payload.wait_kind), waiting.payload.attempt_seq, raw, error, used_ms
        )
        message = ResumeCall(waiting.call_id, RequestId(request_id or waiting.request_id), payload)
        self.send_with_body(message, body)

    def wait_requests(self, count: int) -> list[CallWaiting]:
        """The next `count` requests, taken out."""
        self.wait_until(lambda: len(self.waiting) >= count, f"{count} requests")
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        return taken

    def told(self, call_id: CallId, kind: str = "") -> list[CallEvent]:
        return [one for one in self.events if one.call_id == call_id and kind in ("", one.payload.event_kind)]
