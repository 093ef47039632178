"""The terminal frames of calls: one each, and what it says."""

from __future__ import annotations

from typing import Final

from msgspec import Raw

from callyard.errors import KIND_RULES, ErrorKind, Outcome, ProtocolError, may_retry
from callyard.executor import budget
from callyard.executor.budget import Stop
from callyard.executor.contexts import Call
from callyard.executor.failures import Fault
from callyard.executor.link import SETTLED_BYTES_MAX, Link
from callyard.functions.raised import MESSAGE_CHARACTERS_MAX, cut_text
from callyard.ids import CallId
from callyard.wire.arena import ArenaTooSmall
from callyard.wire.codec import encode_message
from callyard.wire.frames import FRAME_BYTES_MAX
from callyard.wire.messages import (
    RECALLED,
    CallCompleted,
    CallCompletedPayload,
    CallFailed,
    CallFailedPayload,
    ExecuteCallPayload,
    SettledCall,
    Timing,
)
from callyard.wire.values import is_packed

NO_TIMING: Final = Timing()


def put_completed(link: Link, call: Call, used_ns: int) -> None:
    """Answer with the call's output, or with a failure when no frame can hold it.

    Short ends of calls that came together leave together (X94). One without a promise is not held back with others.
    """
    payload = call.payload
    output = call.output
    if call.batched and call.notes is None and len(output) <= SETTLED_BYTES_MAX and not is_packed(output):
        used_ms = used_ns // 1_000_000
        end = SettledCall(call.call_id, payload.attempt_seq, Raw(output), None, used_ms, _timing(call, used_ns))
        link.put_settled(end, call.slot, call.run_ns)
        return
    try:
        placed = link.place(output)
    except (ArenaTooSmall, OSError) as error:
        details = {"limit": "arena_bytes_max", "size": len(output)}
        put_failed(link, call, Fault(ErrorKind.RESULT, f"the result is {error}", details=details), used_ns)
        return
    message = CallCompleted(
        call.call_id,
        CallCompletedPayload(
            payload.attempt_seq,
            placed.raw,
            payload.task_id,
            used_ns // 1_000_000,
            _timing(call, used_ns),
            call.notes or [],
            placed.at,
            -(-call.run_ns // 1_000),
        ),
    )
    try:
        frame = encode_message(message, placed.sidecar)
    except ProtocolError:
        put_failed(link, call, _too_large(len(output)), used_ns)
        return
    _put(link, call, frame)


def put_failed(link: Link, call: Call, fault: Fault, used_ns: int, *, retryable: bool | None = None) -> None:
    """Answer with a failure. `retryable`: None for what kind and promise say."""
    if retryable is None:
        retryable = may_retry(fault.kind, idempotent=call.payload.promises.idempotent, begun=call.begun)
    try:
        frame = encode_message(_failed(call, fault, used_ns, retryable))
    except ProtocolError:  # too large: tell what fits
        short = Fault(fault.kind, fault.message, fault.outcome)
        frame = encode_message(_failed(call, short, used_ns, retryable))
    _put(link, call, frame)


def put_recalled(link: Link, call_id: CallId, payload: ExecuteCallPayload, slot: int) -> None:
    """Hand back a call that has not begun: the worker sends it elsewhere, at no cost to it (X93)."""
    answer = CallFailedPayload(
        payload.attempt_seq, RECALLED, "it had not begun", True, Outcome.NOT_RUN, payload.task_id
    )
    link.put(encode_message(CallFailed(call_id, answer)), slot)


def stopped(call: Call, stop: Stop, used_ns: int) -> Fault:
    """The end of a call that was stopped, whatever it did afterwards."""
    if not call.begun:
        return Fault(stop.waiting_kind, stop.text, Outcome.NOT_RUN, _stop_details(stop))
    text, details = stop.text, _stop_details(stop)
    if stop is budget.BUDGET:
        allowed_ms, used_ms = call.budget_ns // 1_000_000, used_ns // 1_000_000
        text = f"ran out of its budget of {allowed_ms} ms (used {used_ms} ms)"
        details |= {"budget_ms": allowed_ms, "used_ms": used_ms}
    fault = call.fault or Fault(stop.begun_kind, "")
    return Fault(stop.begun_kind, text, Outcome.UNKNOWN, details, fault.stack, fault.local_variables)


def _failed(call: Call, fault: Fault, used_ns: int, retryable: bool) -> CallFailed:
    payload = CallFailedPayload(
        call.payload.attempt_seq,
        fault.kind,
        cut_text(fault.message, MESSAGE_CHARACTERS_MAX),
        retryable,
        fault.outcome or KIND_RULES[fault.kind].outcome,
        call.payload.task_id,
        fault.stack,
        fault.local_variables,
        fault.details,
        used_ns // 1_000_000,
        _timing(call, used_ns),
        call.notes or [],
    )
    return CallFailed(call.call_id, payload)


def _put(link: Link, call: Call, frame: bytes) -> None:
    if call.begun and not call.payload.promises.idempotent:
        link.unpromised_waiting = True
    link.put(frame, call.slot)


def _timing(call: Call, used_ns: int) -> Timing:
    """What is charged but not running is waiting."""
    if used_ns < 1_000_000 and call.queued_ns < 1_000_000:
        return NO_TIMING
    run_ns = call.run_ns
    return Timing(call.queued_ns // 1_000_000, run_ns // 1_000_000, max(0, used_ns - run_ns) // 1_000_000)


def _stop_details(stop: Stop) -> dict[str, str | int]:
    return {"limit": stop.limit} if stop.limit else {"reason": stop.reason}


def _too_large(size: int) -> Fault:
    return Fault(
        ErrorKind.RESULT,
        f"result of {size} bytes does not fit into a frame of frame_bytes_max={FRAME_BYTES_MAX}",
        details={"limit": "frame_bytes", "size": size, "frame_bytes_max": FRAME_BYTES_MAX},
    )
