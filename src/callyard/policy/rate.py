"""So many calls in so much time, per key, by the generic cell rate algorithm.

A key is one number: the instant at which all that it took would have been taken at an even pace. It may run ahead of
the clock by as much as `count` calls take (the burst). Instants are held in units of 1/count ms, in which every sum is
whole: nothing drifts, however long it runs. In any interval: places used <= count + count x interval / per_ms.
Source: tool-dispatch D58.
"""

from __future__ import annotations

import re
from bisect import bisect_right, insort
from collections.abc import Hashable
from typing import Final

import msgspec

from callyard.policy.ranges import check_whole

COUNT_MAX: Final = 1_000_000
PER_MS_MAX: Final = 86_400_000
KEYS_MAX: Final = 100_000
_UNITS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000}
_RATE: Final = re.compile(r"([0-9]{1,9})\s*/\s*([0-9]{0,9})\s*(ms|s|min|m|h)", re.ASCII)


class Rate(msgspec.Struct, frozen=True):
    """`count` calls in each `per_ms`; as many may come at once."""

    count: int
    per_ms: int

    def __post_init__(self) -> None:
        check_whole("count", self.count, 1, COUNT_MAX)
        check_whole("per_ms", self.per_ms, 1, PER_MS_MAX)

    @classmethod
    def parse(cls, text: str) -> Rate:
        """Of `10/s`, `100/m`, `1000/h`, `5/10s`. Raises ValueError."""
        match = _RATE.fullmatch(str(text).strip())
        if match is None:
            raise ValueError(f'expected a rate such as "10/s", "100/m", "1000/h" or "5/10s", got {text!r}')
        try:
            return cls(int(match[1]), int(match[2] or 1) * _UNITS_MS[match[3]])
        except ValueError as error:
            raise ValueError(f"the rate {text!r} is out of range: {error}") from None

    def __str__(self) -> str:
        for unit in ("h", "m", "s"):
            times, rest = divmod(self.per_ms, _UNITS_MS[unit])
            if not rest:
                return f"{self.count}/{times if times > 1 else ''}{unit}"
        return f"{self.count}/{self.per_ms}ms"


class _Key:
    """What is remembered of one key that is not idle."""

    __slots__ = ("freed_at_ms", "full_at")

    def __init__(self) -> None:
        self.full_at = 0
        """When its burst is whole again, in units of 1/count ms: then it is idle and may be forgotten."""
        self.freed_at_ms: list[int] = []
        """Rising: places to come whose takers went away. The next taker gets the first of them."""


class RateLimiter:
    """One rate for many keys.

    Where several rates hold for one call, ask the narrowest first and wait for each before asking the next (token,
    tenant, function): a caller over its own rate then takes nothing of what others share.
    """

    def __init__(self, rate: Rate, *, keys_max: int = KEYS_MAX) -> None:
        """When `keys_max` keys are busy at once, a further one waits until one of them is idle."""
        check_whole("keys_max", keys_max, 1, 1 << 31)
        self.rate = rate
        self._keys_max = keys_max
        self._keys: dict[Hashable, _Key] = {}
        self._tidy_above = min(64, keys_max - 1)
        """Idle keys are looked for when there are more keys than this, so that a key costs the same in the long run
        however many there are."""
        self._full_until_ms = 0
        """No key is idle before this instant, as far as is known."""
        self._lead = rate.per_ms * (rate.count - 1)

    def __len__(self) -> int:
        """Keys that are remembered."""
        return len(self._keys)

    def peek(self, key: Hashable, now_ms: int) -> int:
        """How long a call of this key would wait. Takes nothing."""
        return self._place(self._keys.get(key), now_ms) - now_ms

    def ask(self, key: Hashable, now_ms: int, wait_ms_max: int = 0) -> int:
        """Take a place: how long to wait for it; 0: go on. More than `wait_ms_max`: over the rate, none was taken.

        Places are handed out in the order of asking: who waited that long goes on and need not ask again.
        """
        state = self._keys.get(key)
        at_ms = self._place(state, now_ms)
        if at_ms - now_ms > wait_ms_max:
            return at_ms - now_ms
        if state is None:
            busy_ms = self._make_room(now_ms)
            if busy_ms > 0:
                return max(busy_ms, wait_ms_max + 1)  # more than it would wait: nothing was taken
            state = self._keys[key] = _Key()
        freed_at_ms = state.freed_at_ms
        if freed_at_ms:
            del freed_at_ms[: bisect_right(freed_at_ms, now_ms - 1)]
        if freed_at_ms and freed_at_ms[0] <= at_ms:
            del freed_at_ms[0]
        else:
            count = self.rate.count
            state.full_at = max(state.full_at, now_ms * count) + self.rate.per_ms
        return at_ms - now_ms

    def give_back(self, key: Hashable, at_ms: int, now_ms: int) -> None:
        """The place taken for `at_ms` will not be used. One whose time has come is spent all the same."""
        state = self._keys.get(key)
        if state is None or at_ms <= now_ms:
            return
        freed_at_ms = state.freed_at_ms
        insort(freed_at_ms, at_ms)
        while freed_at_ms and freed_at_ms[-1] == self._at_ms(state.full_at - self.rate.per_ms):
            state.full_at -= self.rate.per_ms  # the last place of all: as if it had never been taken
            freed_at_ms.pop()

    def _at_ms(self, full_at: int) -> int:
        """The place that is next for a key that is `full_at`."""
        return -((self._lead - full_at) // self.rate.count)

    def _place(self, state: _Key | None, now_ms: int) -> int:
        """The first instant at which there is a place."""
        if state is None:
            return now_ms
        at_ms = max(now_ms, self._at_ms(state.full_at))
        for freed_at_ms in state.freed_at_ms:
            if freed_at_ms >= now_ms:
                return min(at_ms, freed_at_ms)
        return at_ms

    def _make_room(self, now_ms: int) -> int:
        """Forget idle keys where there are many. Returns how long there is no room for one more; 0: there is."""
        if len(self._keys) <= self._tidy_above:
            return 0
        if now_ms < self._full_until_ms:
            return self._full_until_ms - now_ms
        now = now_ms * self.rate.count
        self._keys = {key: state for key, state in self._keys.items() if state.full_at > now}
        self._tidy_above = min(max(64, 2 * len(self._keys)), self._keys_max - 1)
        if len(self._keys) < self._keys_max:
            return 0
        first = min(state.full_at for state in self._keys.values())
        self._full_until_ms = -(-first // self.rate.count)
        return self._full_until_ms - now_ms
