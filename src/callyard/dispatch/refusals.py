"""The ends that the dispatcher itself gives a call. Source: tool-dispatch D8, D11, D13, D14, D28, D43, D46."""

from __future__ import annotations

from typing import Final

from callyard.errors import CallFailure, ErrorKind, Outcome, fail

SHUTTING_DOWN: Final = fail(ErrorKind.SHUTTING_DOWN, "the dispatcher is shutting down and takes no new calls")
NOBODY_WAITS: Final = fail(ErrorKind.CANCELLED, "nobody waits for it", outcome=Outcome.NOT_RUN)


def deadline_passed(when: str = " before it ran") -> CallFailure:
    return fail(ErrorKind.DEADLINE, f"the deadline passed{when}", limit="deadline_ms")


def budget_exceeded(limit: str) -> CallFailure:
    message = "no tool calls left" if limit == "calls" else "the allowance's time is over"
    return fail(ErrorKind.BUDGET_EXCEEDED, message, limit=limit)


def circuit_open(tool: str, retry_after_ms: int) -> CallFailure:
    message = f"{tool} failed too often of late: its circuit is open"
    return fail(ErrorKind.CIRCUIT_OPEN, message, retry_after_ms=retry_after_ms)


def conflict(why: str) -> CallFailure:
    return fail(ErrorKind.CONFLICT, f"the key is in use: {why}")


def cycle(what: str) -> CallFailure:
    message = f"it would wait for ever: whoever has {what} waits for a call that this one is nested in"
    return fail(ErrorKind.DENIED, message, reason="cycle")


def unavailable(message: str, retry_after_ms: int = 1_000) -> CallFailure:
    return fail(ErrorKind.UNAVAILABLE, message, retry_after_ms=retry_after_ms)
