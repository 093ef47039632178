"""The dispatcher's settings. Source: tool-dispatch D9, D12, D18, D20, D27, D28, D46, D55, D57, D58."""

from __future__ import annotations

from typing import Any, Self

import msgspec

from callyard.errors import UsageError
from callyard.functions.function import MILLISECONDS_MAX
from callyard.policy.breaker import BreakerPolicy
from callyard.policy.ranges import check_whole
from callyard.policy.retry import RetryPolicy


class DispatcherConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Raises ValueError for a value out of range. None, where it may be, is: no limit of that kind."""

    timeout_ms: int = 30_000
    """Of one attempt, where neither the call nor the tool says."""
    retry: RetryPolicy = RetryPolicy()
    """Where the tool does not say."""
    breaker: BreakerPolicy | None = BreakerPolicy()
    """None: no circuit breaker."""
    slots: int = 1_024
    """Most calls that run at once, nested ones aside."""
    queued_max: int = 10_000
    """Most calls that wait for a turn, a seat or a slot; one more is `unavailable`."""
    queue_wait_ms_max: int | None = None
    """Longest wait before the first attempt."""
    attempt_min_ms: int = 0
    """No attempt starts with less time than this."""
    ask_timeout_ms: int = 300_000
    """How long a question to the caller's client stays open; no other time runs meanwhile."""
    key_joiners_max: int = 256
    """Most calls that wait for one key's run, without a permit (R109)."""
    cancel_grace_ms: int = 250
    """How long code that was told to stop has until its call is answered all the same."""
    drain_deadline_ms: int = 30_000
    ttl_ms: int = 60_000
    """How long the end of a keyed call answers later ones."""
    unknown_ttl_ms: int = 30 * 86_400_000
    """The same where the outcome is unknown."""
    lost_ttl_ms: int = 900_000
    """How long the end of a call whose connection was lost is kept under its call id (D56)."""
    tenant_running: int | None = None
    tenant_queued: int | None = None
    tenant_bytes: int | None = None
    """Of arguments of one tenant's calls that wait."""

    def __post_init__(self) -> None:
        for name, low in _LOWEST.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                check_whole(name, value, low, MILLISECONDS_MAX)

    def with_settings(self, **settings: Any) -> Self:
        """The same with some settings changed. Raises UsageError."""
        unknown = settings.keys() - set(self.__struct_fields__)
        if unknown:
            known = ", ".join(self.__struct_fields__)
            raise UsageError(f"no setting {', '.join(sorted(unknown))}; there are: {known}")
        try:
            return msgspec.structs.replace(self, **settings) if settings else self
        except ValueError as error:
            raise UsageError(str(error)) from None


_OPTIONAL = {"queue_wait_ms_max", "tenant_running", "tenant_queued", "tenant_bytes"}
_LOWEST = {
    "timeout_ms": 1,
    "slots": 1,
    "queued_max": 0,
    "queue_wait_ms_max": 0,
    "attempt_min_ms": 0,
    "ask_timeout_ms": 1,
    "key_joiners_max": 0,
    "cancel_grace_ms": 0,
    "drain_deadline_ms": 0,
    "ttl_ms": 0,
    "unknown_ttl_ms": 1,
    "lost_ttl_ms": 0,
    "tenant_running": 1,
    "tenant_queued": 0,
    "tenant_bytes": 0,
}
