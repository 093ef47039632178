"""What an agent's loop makes of a failed call: where to go next, and whether the same call may be made again.

Source: tool-dispatch D25.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, Literal

import msgspec

from callyard.dispatch.outcomes import DispatchError
from callyard.errors import CallFailure, ErrorKind, Outcome
from callyard.policy.retry import read_retry_after_ms

LoopEventName = Literal["on_error", "on_budget_exceeded", "stop"]


class Replan(StrEnum):
    """Whether the loop asks its planner for another step."""

    YES = "yes"
    """The same call would fail again."""
    BY_ATTEMPTS = "by_attempts"
    """The same call may succeed later: plan anew once it has failed too often."""
    NO = "no"


class Repeat(StrEnum):
    """Whether the same call, with the same arguments, may be made again."""

    NO = "no"
    SAME_KEY = "same_key"
    """It may have had its effect: only under the key that it had, and not at all if it had none."""
    YES = "yes"
    """It has had no effect: under any key, or none."""


class LoopEvent(msgspec.Struct, frozen=True):
    event: LoopEventName
    replan: Replan
    repeat: Repeat
    retry_after_ms: int | None = None
    """Not before so long; None: nobody said."""

    def wants_replan(self, failures: int, failures_max: int = 3) -> bool:
        """Whether to plan anew when the loop has seen this call fail `failures` times, this one included."""
        if self.replan is Replan.BY_ATTEMPTS and self.repeat is not Repeat.NO:
            return failures >= failures_max
        return self.replan is not Replan.NO


_REPLAN: Final = ("on_error", Replan.YES)
_LATER: Final = ("on_error", Replan.BY_ATTEMPTS)
_STOP: Final = ("stop", Replan.NO)

LOOP_EVENTS: Final[Mapping[ErrorKind, tuple[LoopEventName, Replan]]] = {
    ErrorKind.NOT_FOUND: _REPLAN,
    ErrorKind.SCHEMA: _REPLAN,
    ErrorKind.CONFLICT: _REPLAN,
    ErrorKind.DENIED: _REPLAN,
    ErrorKind.TOOL_ERROR: _REPLAN,
    ErrorKind.INTERNAL: _REPLAN,
    ErrorKind.RESULT: _REPLAN,
    ErrorKind.TIMEOUT: _LATER,
    ErrorKind.TRANSIENT: _LATER,
    ErrorKind.CRASHED: _LATER,
    ErrorKind.RESOURCE_LIMIT: _LATER,
    ErrorKind.CIRCUIT_OPEN: _LATER,
    ErrorKind.UNAVAILABLE: _LATER,
    ErrorKind.RATE_LIMITED: _LATER,
    ErrorKind.DEADLINE: _LATER,
    ErrorKind.BUDGET_EXCEEDED: ("on_budget_exceeded", Replan.NO),
    ErrorKind.CANCELLED: _STOP,
    ErrorKind.SHUTTING_DOWN: _STOP,
}


def loop_event(error: DispatchError | CallFailure) -> LoopEvent:
    """The loop's next state. After an unknown outcome the same call is never offered under another key."""
    failure = error.failure if isinstance(error, DispatchError) else error
    event, replan = LOOP_EVENTS[failure.kind]
    if replan is not Replan.BY_ATTEMPTS:
        return LoopEvent(event, replan, Repeat.NO)
    repeat = Repeat.YES if failure.outcome is Outcome.NOT_RUN else Repeat.SAME_KEY
    return LoopEvent(event, replan, repeat, read_retry_after_ms(failure.details.get("retry_after_ms")))
