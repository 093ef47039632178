"""What a server logs: one line a record on standard error, as JSON or as text, and one record for each call.

    loop, threads --offer--> a queue with a bound --one thread--> format, write

Nobody who logs ever waits for who reads: what does not fit is dropped and counted. A line of JSON has `time` (RFC 3339,
UTC), `level`, `logger`, `message`, and where they are known `call_id`, `tool` and `tenant`; what else the record says
stands in `fields`. Fields whose names say that they are secret are masked at any depth, and so is what looks like a
token in any text. Arguments and results of calls are never logged. Source: tool-dispatch D29, D54.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final, Literal

import msgspec

from callyard.cli.streams import clean
from callyard.dispatch.events import DispatchEvent
from callyard.dispatch.exporters.log import fields_of, level_of, line_of
from callyard.dispatch.exporters.masking import MASK, mask_secrets
from callyard.dispatch.exporters.writer import BoundedWriter
from callyard.ids import ExecutorId

LogFormat = Literal["json", "text"]
FORMATS: Final[tuple[LogFormat, ...]] = ("json", "text")
LEVELS: Final = ("debug", "info", "warning", "error", "critical")
CALLS: Final = "callyard.calls"
OUTPUT: Final = "callyard.output"
LINES_MAX: Final = 10_000
GATHER_S: Final = 0.02
"""How long a line may wait for others to be written with."""
TEXT_CHARS_MAX: Final = 8_000
"""Of a message, and of a stack; a line is never much longer than two of them and its fields."""
DEPTH_MAX: Final = 6
ITEMS_MAX: Final = 100
"""Of a mapping or a list among the fields."""
_OWN: Final = ("call_id", "tool", "tenant")
"""Fields that stand beside the message."""
_RECORD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_TOKEN: Final = re.compile(r"(?i)\b(bearer\s+)[\w.~+/=-]{8,}|\bcy_[\w-]{20,}|(?<=://)[^/\s:@]*:[^/\s@]+(?=@)")

Item = tuple[float, int, str, str, Mapping[str, Any], str]
"""When (seconds since 1970), level, logger, message, fields, stack."""


def choose_format(asked: str | None, *, is_terminal: bool) -> LogFormat:
    """Text for people at a terminal, JSON for whatever else reads it."""
    if asked in FORMATS:
        return "json" if asked == "json" else "text"
    assert asked is None, asked
    return "text" if is_terminal else "json"


class Logs:
    """Takes what is logged in this process while it is open, and is a subscriber of a gateway's events.

    `write` gets whole lines, on a thread of its own, and may take as long as it likes; it raises OSError where nobody
    reads any more.
    """

    def __init__(
        self,
        form: LogFormat,
        level: str = "info",
        *,
        write: Callable[[bytes], None] | None = None,
        lines_max: int = LINES_MAX,
    ) -> None:
        self.form = form
        self.level = logging.getLevelNamesMapping()[level.upper()]
        self.writer: BoundedWriter[Item] = BoundedWriter(
            "log", self._write_batch, items_max=lines_max, gather_s=GATHER_S
        )
        self._write = write or _StandardError().write
        self._handler = _Handler(self)
        self._before: tuple[list[logging.Handler], int, int] | None = None

    @property
    def dropped(self) -> int:
        return self.writer.dropped

    def open(self) -> None:
        """Take what is logged from here on: ours from `level` on, of libraries what is a warning at least."""
        root, ours = logging.getLogger(), logging.getLogger("callyard")
        self._before = (list(root.handlers), root.level, ours.level)
        root.handlers = [self._handler]
        root.setLevel(max(logging.WARNING, self.level))
        ours.setLevel(self.level)

    def close(self, timeout_s: float = 2.0) -> bool:
        """Write what is left, for at most so long, and leave logging as it was. Idempotent. False: not all was written.

        Blocks: not for the event loop.
        """
        if self._before is not None:
            root, ours = logging.getLogger(), logging.getLogger("callyard")
            root.handlers, root_level, ours_level = self._before
            root.setLevel(root_level)
            ours.setLevel(ours_level)
            self._before = None
        return self.writer.close(timeout_s)

    # --- who tells it something -----------------------------------------------------------------------------------

    def __call__(self, event: DispatchEvent) -> None:
        """One line for each call, at its end; what happens to it before that at level debug, but retries."""
        level = level_of(event)
        if level >= self.level:
            fields = fields_of(event)
            del fields["at_ms"]
            self.tell(level, CALLS, "", fields)

    def say_output(self, executor_id: ExecutorId, line: str) -> None:
        """A line that user code printed."""
        self.tell(logging.INFO, OUTPUT, line, {"executor": executor_id})

    def say(self, line: str, level: int = logging.INFO) -> None:
        """What the server tells whoever started it."""
        self.tell(level, "callyard.serve", line, {})

    def tell(self, level: int, logger: str, message: str, fields: Mapping[str, Any], stack: str = "") -> None:
        """Never waits. `fields` belong to the log from here on."""
        if level >= self.level:
            text = message[:TEXT_CHARS_MAX]
            self.writer.offer((time.time(), level, logger, text, fields, stack), len(text) + len(stack))

    # --- the thread -----------------------------------------------------------------------------------------------

    def _write_batch(self, batch: list[Item]) -> None:
        show = show_json if self.form == "json" else show_text
        self._write(b"".join(show(item) for item in batch))


class _Handler(logging.Handler):
    """From `logging` into the queue."""

    def __init__(self, logs: Logs) -> None:
        super().__init__()
        self._logs = logs

    def emit(self, record: logging.LogRecord) -> None:
        """The message is made here: its arguments may have changed by the time that the thread comes to it."""
        try:
            message = record.getMessage()
        except Exception as error:  # noqa: BLE001 - a wrong format string: the line says so and nobody is held up
            message = f"{record.msg} (cannot be formatted: {error!r})"
        fields = {name: value for name, value in vars(record).items() if name not in _RECORD}
        stack = ""
        if record.exc_info and record.exc_info[0] is not None:
            stack = "".join(traceback.format_exception(*record.exc_info))[-TEXT_CHARS_MAX:]
        self._logs.tell(record.levelno, record.name, message, fields, stack)


class _StandardError:
    """The descriptor itself: whole lines in one write, whatever else writes there."""

    def __init__(self) -> None:
        self._file = 2 if sys.stderr is None else sys.stderr.fileno()

    def write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._file, left) :]
            except BlockingIOError:  # somebody made the terminal non-blocking
                time.sleep(0.01)


# --- forms --------------------------------------------------------------------------------------------------------


def show_json(item: Item) -> bytes:
    at_s, level, logger, message, given, stack = item
    fields = _masked(logger, given)
    line: dict[str, Any] = {
        "time": show_time(at_s),
        "level": logging.getLevelName(level).lower(),
        "logger": logger,
        "message": mask_text(message or str(fields.pop("event", ""))),
    }
    for name in _OWN:
        if name in fields:
            line[name] = fields.pop(name)
    if fields:
        line["fields"] = fields
    if stack:
        line["stack"] = mask_text(stack)
    return _ENCODER.encode(line) + b"\n"


def show_text(item: Item) -> bytes:
    """For people: the local time of day, and one line but for a stack."""
    at_s, level, logger, message, given, stack = item
    fields = _masked(logger, given)
    if logger == OUTPUT:
        return f"{fields.get('executor', '')} | {clean(mask_text(message))}\n".encode()
    text = line_of({"event": "", **fields}).strip() if "event" not in fields else line_of(fields)
    local = datetime.fromtimestamp(at_s)
    parts = [f"{local:%H:%M:%S}.{int(at_s % 1 * 1_000):03d}", logging.getLevelName(level).lower()]
    if logger != CALLS:
        parts.append(f"{logger}:")
    parts += [part for part in (clean(mask_text(message)).replace("\n", "\\n"), text) if part]
    lines = [" ".join(parts), *mask_text(stack).splitlines()]
    return ("\n    ".join(lines) + "\n").encode("utf-8", "replace")


def show_time(at_s: float) -> str:
    """RFC 3339 with milliseconds."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.") + f"{int(at_s % 1 * 1_000):03d}Z"


def mask_text(text: str) -> str:
    """Without what looks like a bearer token, a token of ours, or the user's part of a URL with a password; and without
    lone surrogates, which no file can hold."""
    return _TOKEN.sub(lambda match: f"{match[1] or ''}{MASK}", text.encode("utf-8", "replace").decode())


def _masked(logger: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """JSON values without secrets. Of a call's record the names are our own, so that only texts are looked at."""
    if logger == CALLS:
        return {name: mask_text(value) if isinstance(value, str) else value for name, value in given.items()}
    masked: dict[str, Any] = mask_secrets("", _plain(given))
    return masked


def _plain(value: Any, depth: int = 0) -> Any:
    """JSON values, bounded, of whatever a record was given; what looks like a token in texts is masked."""
    if isinstance(value, Mapping) and depth < DEPTH_MAX:
        return {mask_text(str(key)[:200]): _plain(one, depth + 1) for key, one in islice(value.items(), ITEMS_MAX)}
    if isinstance(value, list | tuple) and depth < DEPTH_MAX:
        return [_plain(one, depth + 1) for one in value[:ITEMS_MAX]]
    if value is None or isinstance(value, bool | int | float):
        return value
    return mask_text(str(value)[:TEXT_CHARS_MAX])


_ENCODER: Final = msgspec.json.Encoder(enc_hook=str)
