"""What was lost after its call had ended: nobody is told, so it is counted, and said in the log now and then.

Source: job-queue §8, R87, R114.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from typing import Final, NamedTuple

from callyard.host.errors import HostError, HostErrorKind

LINE_MS: Final = 1_000
"""Between two lines of one series; what came in between is a number in the next one."""
TARGET_MAX: Final = 300
"""Characters of a target's name, and of why, in a line."""
ANSWERED: Final = "request"
"""The kind of message that somebody waits for an answer to: it is counted, and its sender is told."""


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


class _Lines:
    """What was said of one series."""

    __slots__ = ("next_at_ms", "target", "unsaid", "why")

    def __init__(self) -> None:
        self.next_at_ms = 0
        self.unsaid = 0
        self.target = self.why = ""
        """Of the last one."""


class Drops:
    """Counted since the last reset.

    `say` is told in words of what no sender is told: of the first one of a series, then once a second at most with
    how many there were, and of the rest by `say_rest`.
    """

    def __init__(self, say: Callable[[str], None] | None = None, now_ms: Callable[[], int] = lambda: 0) -> None:
        self.counts: Counter[Dropped] = Counter()
        self._say = say
        self._now_ms = now_ms
        self._lines: dict[Dropped, _Lines] = {}

    def count(self, message_kind: str, reason: DropReason, target: str = "", why: str = "") -> None:
        dropped = Dropped(message_kind, reason)
        self.counts[dropped] += 1
        if self._say is None or message_kind == ANSWERED:
            return
        lines = self._lines.get(dropped)
        now_ms = self._now_ms()
        is_first = lines is None
        if lines is None:
            lines = self._lines[dropped] = _Lines()
        lines.unsaid += 1
        lines.target, lines.why = target, why
        if is_first or now_ms >= lines.next_at_ms:
            lines.next_at_ms = now_ms + LINE_MS
            self._say_of(dropped, lines)

    def count_error(self, message_kind: str, error: HostError | HostErrorKind, target: str = "") -> None:
        kind, why = (error.kind, error.message) if isinstance(error, HostError) else (error, error.name)
        self.count(message_kind, DROP_REASONS.get(kind, DropReason.STALE_TARGET), target, why)

    def say_rest(self) -> None:
        """Of what was counted since the last lines."""
        for dropped, lines in self._lines.items():
            if lines.unsaid:
                self._say_of(dropped, lines)

    def _say_of(self, dropped: Dropped, lines: _Lines) -> None:
        count, lines.unsaid = lines.unsaid, 0
        if self._say is None:
            return
        what = (
            f"a {dropped.message_kind} message was" if count == 1 else f"{count} {dropped.message_kind} messages were"
        )
        where = f"{'' if count == 1 else ', the last one'} for {lines.target[:TARGET_MAX]!r}" if lines.target else ""
        why = f": {lines.why[:TARGET_MAX]}" if lines.why else ""
        self._say(f"{what} lost ({dropped.reason}){where}{why}")

    def of(self, reason: DropReason) -> int:
        return sum(count for dropped, count in self.counts.items() if dropped.reason is reason)

    def reset_metrics(self) -> None:
        self.counts.clear()
