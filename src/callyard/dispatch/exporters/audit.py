"""The audit file of calls: one JSON line per call, refusals too, with masked arguments.

A line is written when its call ends, by a thread of its own. With `required`, each call that was let in has its place
in the queue from the start: admission stops while there is none or the file cannot be written, so that no record of a
call that ran is lost. Source: tool-dispatch D29, D54.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from callyard.dispatch.events import ENDS, DispatchEvent
from callyard.dispatch.exporters.masking import Masking, mask_secrets
from callyard.dispatch.exporters.writer import BYTES_MAX, ITEM_BYTES, ITEMS_MAX, BoundedWriter
from callyard.functions.audit.log import append_whole, opened_to_append, read_at, time_text
from callyard.ids import CallId
from callyard.policy.ranges import check_whole

ARGUMENTS_BYTES_MAX: Final = 64 * 1024
_TEXT_CHARS_MAX: Final = 2_000
_RECORD_BYTES: Final = 4_096
"""What a record weighs beside its arguments, its texts included."""
_COST_BYTES: Final = _RECORD_BYTES + ITEM_BYTES


class CallRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line."""

    time: str
    """Of the end: UTC, RFC 3339."""
    call: str
    tool: str
    tenant: str
    ok: bool
    attempts: int
    """How many had begun."""
    duration_ms: int
    owner: str = ""
    parent: str = ""
    kind: str = ""
    outcome: str = ""
    message: str = ""
    deduplicated: bool = False
    arguments: Any = msgspec.UNSET
    """Masked. Left out: the call ended before they were looked at."""


class _Ended(msgspec.Struct, frozen=True, gc=False):
    at_ns: int
    event: DispatchEvent
    arguments: bytes | int
    """JSON as it came, or the size of what is too long to keep."""


class AuditExporter:
    """A subscriber that keeps the file. It appends to one that is there, and closes a line that was cut off.

    `admits` says whether one more call may be let in. The dispatcher asks right before or right after it tells of the
    call's start, with nothing in between.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        required: bool = False,
        fsync: bool = False,
        mask: Masking = mask_secrets,
        items_max: int = ITEMS_MAX,
        bytes_max: int = BYTES_MAX,
        arguments_bytes_max: int = ARGUMENTS_BYTES_MAX,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Open the file, or raise UsageError.

        `fsync`: a batch is on disk before the next one is written. Arguments of more than `arguments_bytes_max` are
        named by their size alone; where `mask` raises, they are left out.
        """
        check_whole("arguments_bytes_max", arguments_bytes_max, 0, 512 * 1024)
        check_whole("bytes_max", bytes_max, arguments_bytes_max + _COST_BYTES, 1 << 40)
        self.path = Path(path)
        self.required = required
        self.refusals_dropped = 0
        self.mask_failures = 0
        self._fsync = fsync
        self._mask = mask
        self._arguments_bytes_max = arguments_bytes_max
        self._wall_ns = wall_ns
        self._open: dict[CallId, bytes | int] = {}
        """Of calls that have not ended: their arguments, as in `_Ended`."""
        self._open_bytes = 0
        self._unplaced: CallId | None = None
        """The latest call for whose record there was no place; it must not be let in."""
        self._append(b"")
        self.writer: BoundedWriter[_Ended] = BoundedWriter(
            f"audit file {self.path}", self._write, items_max=items_max, bytes_max=bytes_max, keeps=required
        )

    @property
    def dropped(self) -> int:
        """Records that were not written and will not be."""
        return self.writer.dropped + self.refusals_dropped

    def admits(self) -> bool:
        """False: the file is required, and a further call might go unrecorded."""
        if not self.required:
            return True
        unplaced, self._unplaced = self._unplaced, None
        return unplaced is None and not self.writer.is_failing and self._has_room(self._arguments_bytes_max)

    def close(self, timeout_s: float = 5.0) -> bool:
        """As `BoundedWriter.close`."""
        return self.writer.close(timeout_s)

    def __call__(self, event: DispatchEvent) -> None:
        if event.name == "dispatch.start":
            size = len(event.arguments)
            arguments = event.arguments if size <= self._arguments_bytes_max else size
            if self._has_room(_size(arguments)):
                self._open[event.call_id] = arguments
                self._open_bytes += _size(arguments) + _COST_BYTES
            else:
                self._unplaced = event.call_id
        elif event.name in ENDS:
            if event.call_id == self._unplaced:
                self._unplaced = None
            held = self._open.pop(event.call_id, None)
            if held is not None:
                self._open_bytes -= _size(held) + _COST_BYTES
            elif not self._has_room(0):
                self.refusals_dropped += 1  # the places that are left belong to calls that were let in
                return
            if len(event.message) > _TEXT_CHARS_MAX:
                event = msgspec.structs.replace(event, message=event.message[:_TEXT_CHARS_MAX])
            arguments = held or b""
            self.writer.offer(_Ended(self._wall_ns(), event, arguments), _size(arguments) + _RECORD_BYTES)

    def _has_room(self, arguments_bytes: int) -> bool:
        """Whether one more record fits beside those that wait and those that are sure to come."""
        writer = self.writer
        return (
            len(writer) + len(self._open) < writer.items_max
            and writer.held_bytes + self._open_bytes + arguments_bytes + _COST_BYTES <= writer.bytes_max
        )

    def _write(self, batch: list[_Ended]) -> None:
        self._append(b"".join(msgspec.json.encode(self._record(ended)) + b"\n" for ended in batch))

    def _append(self, lines: bytes) -> None:
        with opened_to_append(self.path) as fd:
            size = os.fstat(fd).st_size
            if size and read_at(fd, 1, size - 1) != b"\n":
                lines = b"\n" + lines  # a lost machine left half a line: whoever reads the file sees it for what it is
            if lines:
                append_whole(fd, lines, fsync=self._fsync)

    def _record(self, ended: _Ended) -> CallRecord:
        event = ended.event
        return CallRecord(
            time=time_text(datetime.fromtimestamp(ended.at_ns / 1e9, UTC)),
            call=_text(event.call_id),
            tool=_text(event.tool),
            tenant=_text(event.tenant),
            ok=event.kind is None,
            attempts=event.attempt,
            duration_ms=event.duration_ms,
            owner=_text(event.owner),
            parent=_text(event.parent_id),
            kind="" if event.kind is None else event.kind.value,
            outcome="" if event.outcome is None else event.outcome.value,
            message=_text(event.message),
            deduplicated=event.deduplicated,
            arguments=self._masked(event.tool, ended.arguments) if ended.arguments else msgspec.UNSET,
        )

    def _masked(self, tool: str, arguments: bytes | int) -> Any:
        if isinstance(arguments, int):
            return {"omitted_bytes": arguments}
        try:
            masked = msgspec.json.encode(self._mask(tool, msgspec.json.decode(arguments)))
        except Exception:  # noqa: BLE001 counted: a mask of the user's, or arguments that are no JSON
            self.mask_failures += 1
            return {"omitted": "they could not be masked"}
        return msgspec.Raw(masked) if len(masked) <= self._arguments_bytes_max else {"omitted_bytes": len(masked)}


def _size(arguments: bytes | int) -> int:
    return len(arguments) if isinstance(arguments, bytes) else 0


def _text(value: str) -> str:
    """Cut, and with nothing that JSON cannot say."""
    return value[:_TEXT_CHARS_MAX].encode("utf-8", "replace").decode()
