"""Calls as structured log lines, through `logging`. Source: tool-dispatch D29.

Each line is `event key=value …` for people, and carries the same keys as attributes of the record for formatters that
write JSON. Arguments are never logged.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping
from typing import Any, Final

from callyard.dispatch.events import ENDS, DispatchEvent, EventName
from callyard.dispatch.exporters.writer import ITEMS_MAX, BoundedWriter
from callyard.errors import Outcome

_LEVELS: Final[Mapping[EventName, int]] = {
    "dispatch.start": logging.DEBUG,
    "dispatch.attempt": logging.DEBUG,
    "dispatch.retry": logging.WARNING,
    "dispatch.success": logging.INFO,
    "dispatch.error": logging.ERROR,
    "dispatch.deduplicated": logging.INFO,
    "circuit.opened": logging.WARNING,
    "circuit.half_open": logging.INFO,
    "circuit.closed": logging.INFO,
}
_TEXT_CHARS_MAX: Final = 2_000
_PLAIN: Final = re.compile(r"[\w.:/+-]+", re.ASCII)


def level_of(event: DispatchEvent) -> int:
    """A call that was refused before it ran is a warning, one that ran and failed an error."""
    if event.name in ENDS and event.kind is not None:
        return logging.WARNING if event.outcome is Outcome.NOT_RUN else logging.ERROR
    return _LEVELS[event.name]


def fields_of(event: DispatchEvent) -> dict[str, Any]:
    """What the event says, as JSON values; what it does not say is left out. No key is one of `LogRecord`'s own."""
    fields: dict[str, Any] = {"event": event.name, "tool": event.tool[:_TEXT_CHARS_MAX], "at_ms": event.at_ms}
    for key in ("call_id", "tenant", "owner", "parent_id", "attempt", "duration_ms"):
        value = getattr(event, key)
        if value or (key == "duration_ms" and event.name in ENDS):
            fields[key] = value
    if event.kind is not None:
        fields["kind"] = event.kind.value
    if event.outcome is not None:
        fields["outcome"] = event.outcome.value
    if event.deduplicated:
        fields["deduplicated"] = True
    if event.message:
        fields["error"] = event.message[:_TEXT_CHARS_MAX]
    return fields


def line_of(fields: Mapping[str, Any]) -> str:
    """One line whatever a tool's name or message contains: text that is not plain is quoted as JSON."""
    parts = [str(fields["event"])]
    for key, value in fields.items():
        if key not in ("event", "at_ms"):
            text = str(value)
            plain = not isinstance(value, str) or _PLAIN.fullmatch(text)
            parts.append(f"{key}={text if plain else json.dumps(text)}")
    return " ".join(parts)


class LogExporter:
    """A subscriber that logs, from a thread of its own: a slow log handler holds up no call."""

    def __init__(self, logger: str = "callyard.calls", *, items_max: int = ITEMS_MAX) -> None:
        self._logger = logging.getLogger(logger)
        self.writer: BoundedWriter[tuple[float, DispatchEvent]] = BoundedWriter("log", self._write, items_max=items_max)

    def __call__(self, event: DispatchEvent) -> None:
        if self._logger.isEnabledFor(level_of(event)):
            self.writer.offer((time.time(), event), len(event.message) + len(event.arguments))

    def close(self, timeout_s: float = 5.0) -> bool:
        """As `BoundedWriter.close`."""
        return self.writer.close(timeout_s)

    def _write(self, batch: list[tuple[float, DispatchEvent]]) -> None:
        for created_s, event in batch:
            fields = fields_of(event)
            record = self._logger.makeRecord(
                self._logger.name, level_of(event), "", 0, line_of(fields), (), None, extra=fields
            )
            record.created = created_s  # when it happened, not when this thread came to it
            record.msecs = int(created_s % 1 * 1_000)
            self._logger.handle(record)
