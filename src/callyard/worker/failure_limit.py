"""When a run is hopeless: so many failed calls, or so many of a hundred."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from callyard.errors import UsageError

JUDGED_FROM_CALLS: Final = 100
"""A share means something only of so many ended calls; of a run that is over, of any number."""
_FORM: Final = re.compile(r"(\d{1,15})|(\d{1,3}(?:\.\d{1,6})?)%")


class FailureLimit(msgspec.Struct, frozen=True):
    """`count` failures are allowed, or `percent` of the calls (0 … 100)."""

    count: int | None = None
    percent: float = 0.0

    @classmethod
    def of(cls, value: int | str | FailureLimit) -> FailureLimit:
        """From a number or from text, `20` or `5%`. Raises UsageError."""
        if isinstance(value, FailureLimit):
            return value
        match = _FORM.fullmatch(str(value).strip()) if not isinstance(value, bool) else None
        if match is None or (match[2] is not None and float(match[2]) > 100):
            raise UsageError(f"max_failures must be a whole number or a share such as '5%', got {value!r}")
        return cls(count=int(match[1])) if match[1] is not None else cls(percent=float(match[2]))

    def is_exceeded(self, failed: int, calls: int, *, at_end: bool = False) -> bool:
        """Whether `failed` of `calls` that ended are too many."""
        if self.count is not None:
            return failed > self.count
        return (at_end or calls >= JUDGED_FROM_CALLS) and failed * 100 > self.percent * calls
