"""When a run is hopeless."""

from __future__ import annotations

from typing import Any

import pytest

from callyard.errors import UsageError
from callyard.worker.failure_limit import JUDGED_FROM_CALLS, FailureLimit


def test_a_number_is_exceeded_by_one_more() -> None:
    limit = FailureLimit.of(2)
    assert not limit.is_exceeded(2, 2)
    assert limit.is_exceeded(3, 1_000_000)
    assert FailureLimit.of("0").is_exceeded(1, 1)


def test_a_share_is_judged_from_a_number_of_calls_on_and_at_the_end() -> None:
    limit = FailureLimit.of("5%")
    assert not limit.is_exceeded(50, JUDGED_FROM_CALLS - 1)
    assert not limit.is_exceeded(5, 100)
    assert limit.is_exceeded(6, 100)
    assert limit.is_exceeded(1, 4, at_end=True)
    assert not limit.is_exceeded(0, 0, at_end=True)
    assert not FailureLimit.of("100%").is_exceeded(200, 200, at_end=True)
    assert FailureLimit.of("0.5%").is_exceeded(2, 200)


@pytest.mark.parametrize("value", ["", "-1", "5 %", "101%", "five", "1e3", True, 1.5, None])
def test_what_is_no_limit(value: Any) -> None:
    with pytest.raises(UsageError, match="max_failures must be a whole number or a share"):
        FailureLimit.of(value)
