"""When an attempt must end, and whether another follows: pure rules of one call. Source: D9-D14, D40, D57."""

from __future__ import annotations

from random import Random
from typing import Final

import msgspec

from callyard.errors import CallFailure, Outcome, may_retry
from callyard.policy.retry import RetryPolicy, read_retry_after_ms

NEVER: Final = 1 << 62
"""An instant that does not come."""


class Limit(msgspec.Struct, eq=False, gc=False):
    """When an attempt must have ended, and what says so: `timeout_ms`, `deadline_ms` or `allowance_wall_ms`."""

    at_ms: int
    """`NEVER` while a question is open; then later by as long."""
    name: str


class AttemptPlan(msgspec.Struct, eq=False, gc=False):
    """The attempts of one call."""

    retry: RetryPolicy
    rng: Random
    idempotent: bool
    """The tool's promise; False from when an attempt had begun a subcall that must not run twice (X64)."""
    timeout_ms: int
    attempt_min_ms: int = 0
    """No attempt starts with less time than this."""
    deadline_at_ms: int = NEVER
    wall_at_ms: int = NEVER
    attempts: int = 0
    """Those that had begun."""

    def limit(self, now_ms: int) -> Limit | None:
        """Of an attempt that starts now: the first of its timeout, the deadline and the allowance's wall limit. None:
        it has no time left, and does not start."""
        needed_ms = now_ms + self.attempt_min_ms
        if needed_ms >= self.deadline_at_ms or needed_ms >= self.wall_at_ms:
            return None
        at_ms, name = now_ms + self.timeout_ms, "timeout_ms"
        if self.deadline_at_ms <= at_ms:
            at_ms, name = self.deadline_at_ms, "deadline_ms"
        if self.wall_at_ms < at_ms:
            at_ms, name = self.wall_at_ms, "allowance_wall_ms"
        return Limit(at_ms, name)

    def put_off(self, by_ms: int) -> None:
        """The call's limits, by as long as it waited for an answer of its client."""
        if self.deadline_at_ms < NEVER:
            self.deadline_at_ms += by_ms
        if self.wall_at_ms < NEVER:
            self.wall_at_ms += by_ms

    def next_wait_ms(self, failure: CallFailure, tries: int, now_ms: int) -> int | None:
        """How long to wait after this failure of the `tries`-th try; None: it was the last.

        A retry whose wait would pass the deadline does not start.
        """
        begun = failure.outcome is not Outcome.NOT_RUN
        if tries >= self.retry.max_attempts:
            return None
        if not may_retry(failure.kind, idempotent=self.idempotent, begun=begun):
            return None
        asked = read_retry_after_ms(failure.details.get("retry_after_ms"))
        wait_ms = self.retry.delay_ms(tries, self.rng, asked)
        return None if wait_ms is None or self.limit(now_ms + wait_ms) is None else wait_ms
