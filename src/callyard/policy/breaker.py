"""A circuit breaker for one tool: enough failed calls in a window open it, one successful probe closes it.

```text
            `failures` within window_ms            cooled down, and a call asks
    CLOSED ----------------------------> OPEN ------------------------------> HALF_OPEN
      ^                                    ^                                   |    |  ^
      |                                    +---- the probe failed: longer -----+    |  | given back: no probe is out,
      +---------------------- the probe succeeded ----------------------------------+--+ the next call is one
```

What it counts are final ends of calls, not attempts. Each admission belongs to one *epoch*, the time between two moves
of the breaker, and a verdict counts in its own epoch alone: the success of a call that began before the breaker opened
does not close it, and its failure does not keep it open for longer. Time goes in as `now_ms`; what comes out is the
answer and the state that was entered, if one was.
Source: tool-dispatch D28.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from typing import Final, final

import msgspec

from callyard.errors import CallFailure, ErrorKind, Outcome
from callyard.policy.ranges import check_number, check_whole

DAY_MS: Final = 86_400_000
PROBE_RETRY_AFTER_MS: Final = 1_000
"""What a call is told while a probe is out, which may end at any moment."""

COUNTED: Final = frozenset(
    {ErrorKind.TIMEOUT, ErrorKind.CRASHED, ErrorKind.INTERNAL, ErrorKind.RESOURCE_LIMIT, ErrorKind.TRANSIENT}
)
"""The kinds that say that the tool is not well. The tool's own answer (`tool_error`), a result that cannot be sent and
a cancellation say nothing of it."""


def is_failure(failure: CallFailure) -> bool:
    """Whether this end of a call counts against its tool.

    One of a kind that is counted, unless the call never began (a timeout in the queue says nothing of the tool). A
    `transient` end is one whose attempts are used up: the tool said each time that nothing was done.
    """
    kind = failure.kind
    return kind in COUNTED and (failure.outcome is not Outcome.NOT_RUN or kind is ErrorKind.TRANSIENT)


class BreakerPolicy(msgspec.Struct, frozen=True, kw_only=True):
    failures: int = 5
    window_ms: int = 30_000
    open_ms: int = 10_000
    factor: float = 2
    """Each failed probe makes the next cool-down this many times longer."""
    open_ms_max: int = 300_000

    def __post_init__(self) -> None:
        check_whole("failures", self.failures, 1, 1_000)
        check_whole("window_ms", self.window_ms, 1, DAY_MS)
        check_whole("open_ms", self.open_ms, 1, DAY_MS)
        check_number("factor", self.factor, 1, 100)
        check_whole("open_ms_max", self.open_ms_max, self.open_ms, DAY_MS)


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


_CLOSED: Final = BreakerState.CLOSED  # looking a member up in its enum costs more than the rest of a question
_OPEN: Final = BreakerState.OPEN
_HALF_OPEN: Final = BreakerState.HALF_OPEN


class Allowed(msgspec.Struct, frozen=True, gc=False):
    """One call may go on; it hands this back with its verdict."""

    epoch: int
    probe: bool = False
    entered: BreakerState | None = None
    """HALF_OPEN when this very question moved the breaker there."""


@final
class Refused(msgspec.Struct, frozen=True, gc=False):
    retry_after_ms: int


class Breaker:
    """One tool's breaker. Holds at most `policy.failures` instants, however many calls there are.

    A call asks `peek` before it queues, then `ask` at each attempt, with what it holds from the attempt before. It ends
    with exactly one of `succeeded`, `failed` and `give_back` if it holds anything.
    """

    __slots__ = (
        "_allowed",
        "_cool_down_ms",
        "_epoch",
        "_failed_at_ms",
        "_open_until_ms",
        "_policy",
        "_probing",
        "state",
    )

    def __init__(self, policy: BreakerPolicy) -> None:
        self._policy = policy
        self.state = _CLOSED
        self._epoch = 0
        self._allowed = Allowed(0)
        """What every call of a closed epoch gets: nothing is built for it."""
        self._failed_at_ms: deque[int] = deque(maxlen=policy.failures)
        """Of this closed epoch: the latest failures."""
        self._cool_down_ms = policy.open_ms
        self._open_until_ms = 0
        self._probing = False
        """HALF_OPEN only: a probe is out, and its epoch is the present one."""

    def is_at_rest(self, now_ms: int) -> bool:
        """Whether a new one in its place would answer the same."""
        failed_at_ms = self._failed_at_ms
        is_quiet = not failed_at_ms or failed_at_ms[-1] <= now_ms - self._policy.window_ms
        return self.state is _CLOSED and is_quiet

    def peek(self, now_ms: int) -> Refused | None:
        """Whether a call would be refused now. Claims nothing: of those that queue, the first to begin is the probe."""
        if self.state is _CLOSED:
            return None
        if self.state is _OPEN:
            left_ms = self._open_until_ms - now_ms
            return Refused(left_ms) if left_ms > 0 else None
        return Refused(min(PROBE_RETRY_AFTER_MS, self._policy.open_ms)) if self._probing else None

    def ask(self, now_ms: int, held: Allowed | None = None) -> Allowed | Refused:
        """Ask for one attempt. `held`: what the attempt before it was given; a probe stays one through its retries."""
        if self.state is _CLOSED:
            return self._allowed
        if self._probing and held is not None and held.epoch == self._epoch:
            return Allowed(self._epoch, True)
        refused = self.peek(now_ms)
        if refused is not None:
            return refused
        entered = None if self.state is _HALF_OPEN else _HALF_OPEN
        self.state = _HALF_OPEN
        self._probing = True
        self._epoch += 1
        return Allowed(self._epoch, True, entered)

    def succeeded(self, held: Allowed) -> BreakerState | None:
        """The call succeeded. Returns CLOSED when it was the probe."""
        if held.epoch != self._epoch or self.state is _CLOSED:
            return None
        self.state = _CLOSED
        self._probing = False
        self._cool_down_ms = self._policy.open_ms
        self._epoch += 1
        self._allowed = Allowed(self._epoch)
        return _CLOSED

    def failed(self, held: Allowed, now_ms: int) -> BreakerState | None:
        """The call ended with a failure that counts (`is_failure`). Returns OPEN when that opened the breaker."""
        if held.epoch != self._epoch:
            return None
        policy = self._policy
        if self.state is _CLOSED:
            failed_at_ms = self._failed_at_ms
            failed_at_ms.append(now_ms)
            if len(failed_at_ms) < policy.failures or failed_at_ms[0] <= now_ms - policy.window_ms:
                return None
        else:
            self._cool_down_ms = min(policy.open_ms_max, round(self._cool_down_ms * policy.factor))
        self.state = _OPEN
        self._probing = False
        self._failed_at_ms.clear()
        self._open_until_ms = now_ms + self._cool_down_ms
        self._epoch += 1
        return _OPEN

    def give_back(self, held: Allowed) -> None:
        """The call ended without a verdict: if it was the probe, the next call that asks is one."""
        if self._probing and held.epoch == self._epoch:
            self._probing = False
            self._epoch += 1
