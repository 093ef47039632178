"""How many attempts a tool call has, and how long each failed one waits before the next. Source: tool-dispatch D12."""

from __future__ import annotations

from random import Random
from typing import Final

import msgspec

from callyard.policy.ranges import check_number, check_whole

WAIT_MS_MAX: Final = 300_000
"""No call waits longer between two attempts: it holds a slot meanwhile."""


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Data on a tool's record. By default attempts 2 and 3 come after 0.1 s and 0.4 s, each times 1 to 1.5."""

    max_attempts: int = 3
    base_ms: int = 100
    factor: float = 4
    jitter: float = 0.5
    """The share of the wait that a random number adds, so that calls that failed together do not return together."""

    def __post_init__(self) -> None:
        check_whole("max_attempts", self.max_attempts, 1, 100)
        check_whole("base_ms", self.base_ms, 0, WAIT_MS_MAX)
        check_number("factor", self.factor, 1, 100)
        check_number("jitter", self.jitter, 0, 1)

    def delay_ms(self, after_attempt: int, rng: Random, retry_after_ms: int | None = None) -> int | None:
        """Whole milliseconds between failed attempt `after_attempt` (from 1) and the next one.

        `retry_after_ms` is what the tool asked for: the wait is no shorter, and jitter comes on top. None: it asked
        for more than `WAIT_MS_MAX`, so there is no next attempt in this call; the answer carries its wish instead.
        An attempt below 1 is a ValueError.
        """
        if after_attempt < 1:
            raise ValueError(f"attempts count from 1, got {after_attempt}")
        wait = min(self.base_ms * self.factor ** (after_attempt - 1), WAIT_MS_MAX)
        jitter = wait * self.jitter * rng.random()
        if retry_after_ms is not None:
            if retry_after_ms > WAIT_MS_MAX:
                return None
            wait = max(wait, retry_after_ms)
        return round(wait + jitter)


def read_retry_after_ms(value: object) -> int | None:
    """What a tool gave as `retry_after_ms`, rounded up to whole milliseconds; None for what is no duration.

    It comes from code that nobody checked: text, a bool, NaN or a negative number is no wish at all.
    """
    if type(value) not in (int, float) or not 0 <= value < 1 << 53:  # type: ignore[operator]
        return None
    return -int(-value // 1)  # type: ignore[operator]
