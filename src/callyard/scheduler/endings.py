"""What the failures say that the scheduler itself finds: stops, losses, discarded outputs."""

from __future__ import annotations

import msgspec

from callyard.errors import CallFailure, ErrorKind, Outcome, fail
from callyard.scheduler.calls import Call, CallResult, StopReason
from callyard.scheduler.events import ExecutorLost


def describe_stop(call: Call, reason: StopReason, *, begun: bool) -> CallFailure:
    """Of a call that a stop ended; `begun` says whether it was running then."""
    attempts = call.attempt_count
    when = "while it ran" if begun else "before it could run again" if attempts else "before it ran"
    outcome = Outcome.UNKNOWN if begun or call.effect_unknown else Outcome.NOT_RUN
    message = "" if attempts else call.task.stop_message
    if reason is StopReason.UNAVAILABLE and not attempts:
        return fail(ErrorKind.UNAVAILABLE, message or "no executor")
    if reason is StopReason.DEADLINE:
        kind = ErrorKind.TIMEOUT if attempts else ErrorKind.DEADLINE
        message = message or f"the deadline passed {when}"
        return fail(kind, message, attempts=attempts, outcome=outcome, limit="deadline_ms")
    message = message or f"cancelled {when}"
    return fail(ErrorKind.CANCELLED, message, attempts=attempts, outcome=outcome, reason=reason.value)


def describe_loss(call: Call, event: ExecutorLost) -> CallFailure:
    """Of a call that had begun in a lost executor; a wedge is charged to the call that ran, not to its neighbours."""
    details = dict(event.details)
    charged = event.charged is None or event.charged == call.call_id
    details["cause"] = event.cause if charged else "neighbour"
    details["executor"] = event.executor_id
    kind = ErrorKind.RESOURCE_LIMIT if event.resource_limit and charged else ErrorKind.CRASHED
    message = event.message
    if not charged:
        details.pop("limit", None)
        message = f"lost with its process, which another call had blocked: {message}"
    return msgspec.structs.replace(fail(kind, message), details=details)


def discard_output(result: CallResult, bytes_max: int) -> CallResult:
    """A success whose output is not kept, since its task held too much (X21, X77)."""
    failure = fail(
        ErrorKind.RESULT,
        f"output discarded: the task held more than max_collected_output_bytes={bytes_max}",
        attempts=result.attempts,
        limit="max_collected_output_bytes",
    )
    return CallResult(result.index, None, failure, result.attempts)
