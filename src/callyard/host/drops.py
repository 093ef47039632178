"""What was lost after its call had ended: nobody is told, so it is counted. Source: job-queue §8, R87, R114."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import Final, NamedTuple

from callyard.host.errors import HostErrorKind


class DropReason(StrEnum):
    NO_HANDLER = "no_handler"
    DECODE_ERROR = "decode_error"
    BACKPRESSURE = "backpressure"
    """A bound of the one who was to take it: an owner's queue, a socket's bytes, slots, time."""
    STALE_TARGET = "stale_target"
    """Whom it was for has gone, or moved on, since it was sent."""
    SHUTDOWN = "shutdown"


class Dropped(NamedTuple):
    """One series of `messages.dropped`; both enums are few, so are the series."""

    message_kind: str
    """A `RecordKind` or an `OutgoingKind`."""
    reason: DropReason


DROP_REASONS: Final = {
    HostErrorKind.NOT_FOUND: DropReason.STALE_TARGET,
    HostErrorKind.UNAVAILABLE: DropReason.STALE_TARGET,
    HostErrorKind.CAPACITY_EXCEEDED: DropReason.BACKPRESSURE,
    HostErrorKind.DEADLINE_EXCEEDED: DropReason.BACKPRESSURE,
    HostErrorKind.REJECTED: DropReason.BACKPRESSURE,
    HostErrorKind.SHUTTING_DOWN: DropReason.SHUTDOWN,
    HostErrorKind.NOT_CONFIGURED: DropReason.NO_HANDLER,
    HostErrorKind.PROTOCOL_ERROR: DropReason.DECODE_ERROR,
}
"""Of the kinds that a message without a waiting caller ends with; of the others: `stale_target`."""


class Drops:
    """Counted since the last reset."""

    def __init__(self) -> None:
        self.counts: Counter[Dropped] = Counter()

    def count(self, message_kind: str, reason: DropReason) -> None:
        self.counts[Dropped(message_kind, reason)] += 1

    def count_error(self, message_kind: str, kind: HostErrorKind) -> None:
        self.count(message_kind, DROP_REASONS.get(kind, DropReason.STALE_TARGET))

    def of(self, reason: DropReason) -> int:
        return sum(count for dropped, count in self.counts.items() if dropped.reason is reason)

    def reset_metrics(self) -> None:
        self.counts.clear()
