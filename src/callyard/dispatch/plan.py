"""When an attempt must end, and whether another follows: pure rules of one call. Source: D9-D14, D40, D57."""

from __future__ import annotations

from random import Random
from typing import Final

import msgspec

from callyard.errors import CallFailure, Outcome, may_retry
from callyard.policy.retry import RetryPolicy, read_retry_after_ms

NEVER: Final = 1 << 62
"""An instant that does not come."""


class Limit(msgspec.Struct, frozen=True, gc=False):
    """When an attempt must have ended, and what says so: `timeout_ms`, `deadline_ms` or `allowance_wall_ms`."""

    at_ms: int
    name: str


class AttemptPlan:
    """The attempts of one call. `attempts` counts those that had begun."""

    attempts: int = 0

    def __init__(
        self,
        retry: RetryPolicy,
        rng: Random,
        *,
        idempotent: bool,
        timeout_ms: int,
        deadline_at_ms: int = NEVER,
        wall_at_ms: int = NEVER,
        attempt_min_ms: int = 0,
    ) -> None:
        """`attempt_min_ms`: no attempt starts with less time than this."""
        self._retry = retry
        self._rng = rng
        self.idempotent = idempotent
        """The tool's promise; False from when an attempt had begun a subcall that must not run twice (X64)."""
        self.timeout_ms = timeout_ms
        self._attempt_min_ms = attempt_min_ms
        self.deadline_at_ms = deadline_at_ms
        self.wall_at_ms = wall_at_ms

    def limit(self, now_ms: int) -> Limit:
        """Of an attempt that starts now: the first of its timeout, the deadline and the allowance's wall limit."""
        at_ms, name = now_ms + self.timeout_ms, "timeout_ms"
        if self.deadline_at_ms <= at_ms:
            at_ms, name = self.deadline_at_ms, "deadline_ms"
        if self.wall_at_ms < at_ms:
            at_ms, name = self.wall_at_ms, "allowance_wall_ms"
        return Limit(at_ms, name)

    def has_time(self, now_ms: int) -> bool:
        """Whether an attempt that starts now has any left."""
        needed_ms = now_ms + self._attempt_min_ms
        return needed_ms < self.deadline_at_ms and needed_ms < self.wall_at_ms

    def next_wait_ms(self, failure: CallFailure, tries: int, now_ms: int) -> int | None:
        """How long to wait after this failure of the `tries`-th try; None: it was the last.

        A retry whose wait would pass the deadline does not start.
        """
        begun = failure.outcome is not Outcome.NOT_RUN
        if tries >= self._retry.max_attempts:
            return None
        if not may_retry(failure.kind, idempotent=self.idempotent, begun=begun):
            return None
        asked = read_retry_after_ms(failure.details.get("retry_after_ms"))
        wait_ms = self._retry.delay_ms(tries, self._rng, asked)
        return wait_ms if wait_ms is not None and self.has_time(now_ms + wait_ms) else None
