"""How long a failed attempt waits before the next one."""

from __future__ import annotations

from random import Random

JITTER_PERCENT = 5


def compute_backoff_ms(attempt: int, base_ms: int, rng: Random) -> int:
    """Delay in whole milliseconds between failed attempt `attempt` (from 1) and the next one.

    `base_ms` doubled for each earlier attempt, plus up to `JITTER_PERCENT`, so that calls that failed together do not
    return together. An attempt below 1 is a ValueError. Source: call-execution X12.
    """
    if attempt < 1:
        raise ValueError(f"attempts count from 1, got {attempt}")
    delay = base_ms << min(attempt - 1, 40)
    return delay + round(delay * rng.random() * JITTER_PERCENT / 100)


def compute_refusal_delay_ms(refusals: int, base_ms: int, delay_ms_max: int = 1_000) -> int:
    """Delay after the `refusals`-th refusal in a row (from 1): at once the first time, then doubling up to the maximum.

    Source: call-execution X70.
    """
    if refusals <= 1:
        return 0
    return min(delay_ms_max, base_ms << min(refusals - 2, 40))
