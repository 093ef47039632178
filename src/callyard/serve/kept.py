"""Results too large for an answer: the answer has the beginning, and an id by which the whole can be read for a time.

Files in a folder of the server's own, by ids that cannot be guessed; what they are is known in memory only, so that a
restart begins with an empty folder and there is nothing to repair. When `bytes_max` is used up the oldest go of the
tenant that holds most, so that nobody pushes out what others keep. Only the tenant whose call it was reads it.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import os
import re
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from callyard.clock import Timer, Timers
from callyard.dispatch.outcomes import DispatchResult, Ok
from callyard.dispatch.refusals import unavailable
from callyard.errors import CallError, UsageError
from callyard.ids import CallId, Tenant
from callyard.serve.gateway import Caller
from callyard.timers import LoopTimers

PREVIEW_BYTES: Final = 1_024
JSON_TYPE: Final = "application/json"
ENTRIES_MAX: Final = 10_000
READING_BYTES_MAX: Final = 64 * 1024 * 1024
"""Of all answers that bring a kept result and are not read to their end; one tenant has at most half of it."""
_ID: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}", re.ASCII)
_SUFFIX: Final = ".json"
_log: Final = logging.getLogger("callyard.serve")


class Preview(msgspec.Struct, frozen=True, kw_only=True):
    """What is answered in place of a large result."""

    call_id: CallId
    text: str
    """The result's beginning, as JSON: most often cut in the middle."""
    size_bytes: int
    """Of the whole."""
    kept_id: str
    """By which the whole is read; empty: it could not be kept."""
    kept_ms: int
    """How long, from now."""


class Kept(msgspec.Struct, frozen=True):
    """One that was read again."""

    data: bytes
    mime_type: str
    name: str


class _Entry(msgspec.Struct, frozen=True, gc=False):
    tenant: Tenant
    size_bytes: int
    expires_at_ms: int
    mime_type: str
    name: str


class _Held:
    """What one tenant holds."""

    __slots__ = ("bytes", "ids")

    def __init__(self) -> None:
        self.bytes = 0
        """On disk, and just being written."""
        self.ids: OrderedDict[str, None] = OrderedDict()
        """The oldest first."""


class KeptResults:
    """One folder's, which nobody else may use. From one event loop."""

    def __init__(
        self,
        folder: Path,
        *,
        max_result_bytes: int,
        kept_ms: int,
        bytes_max: int,
        clock: Timers | None = None,
    ) -> None:
        self.max_result_bytes = max_result_bytes
        self.kept_ms = kept_ms
        self.bytes_max = bytes_max
        self.held_bytes = 0
        """What is on disk, and what is just being written."""
        self.reading_bytes = 0
        """In answers that are under way."""
        self._reading: Counter[Tenant] = Counter()
        self.dropped_total = 0
        """Kept results that went before their time, for newer ones."""
        self._folder = folder
        self._clock = clock or LoopTimers()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        """The oldest first, which is also the first to expire."""
        self._held: dict[Tenant, _Held] = {}
        self._timer: Timer | None = None
        self._is_open = False
        self._working: set[asyncio.Future[object]] = set()

    def __len__(self) -> int:
        return len(self._entries)

    async def open(self) -> None:
        """Make the folder, readable by its owner alone, and remove what an earlier process left. Raises UsageError."""
        try:
            await asyncio.to_thread(self._open_folder)
        except OSError as error:
            raise UsageError(f"kept results need a folder: {self._folder}: {error.strerror or error}") from error
        self._is_open = True

    async def close(self) -> None:
        """Forget all. Idempotent."""
        self._is_open = False
        names = list(self._entries)
        self._entries.clear()
        self._held.clear()
        self.held_bytes = 0
        self._arm()
        while self._working:
            await asyncio.wait(self._working)
        await asyncio.to_thread(self._remove, names)

    async def shorten(self, caller: Caller, result: DispatchResult) -> Preview | None:
        """None: it may be answered as it is. Raises nothing: what cannot be kept is shortened all the same."""
        if not isinstance(result, Ok) or len(result.output) <= self.max_result_bytes:
            return None
        kept_id = await self.put(caller, result.output)
        return Preview(
            call_id=result.call_id,
            text=result.output[:PREVIEW_BYTES].decode(errors="ignore"),
            size_bytes=len(result.output),
            kept_id=kept_id,
            kept_ms=self.kept_ms if kept_id else 0,
        )

    async def put(self, caller: Caller, data: bytes, mime_type: str = JSON_TYPE, name: str = "") -> str:
        """The id to read it by; empty: it could not be kept."""
        kept_id = secrets.token_hex(16)
        return kept_id if await self.keep(caller.tenant, kept_id, data, mime_type, name) else ""

    async def keep(
        self, tenant: Tenant, kept_id: str, output: bytes, mime_type: str = JSON_TYPE, name: str = ""
    ) -> bool:
        """False: there is no room for so much, or the disk refuses."""
        size = len(output)
        if not self._is_open or size > self.bytes_max or not _ID.fullmatch(kept_id) or kept_id in self._entries:
            return False
        entry = _Entry(tenant, size, self._clock.now_ms() + self.kept_ms, mime_type, name)
        self._hold(tenant, size)
        gone = self._make_room(tenant)
        if self.held_bytes > self.bytes_max:  # it is just being written, or of those who hold less
            self._hold(tenant, -size)
            self._drop_files(gone)
            return False
        try:
            await asyncio.shield(self._start(lambda: self._write(kept_id, output, gone)))
        except OSError as error:
            self._hold(tenant, -size)
            _log.warning("a result of %d bytes could not be kept: %s", size, error)
            return False
        except asyncio.CancelledError:  # nobody will learn its id; its file goes with its time
            self._add(kept_id, entry)
            raise
        self._add(kept_id, entry)
        return True

    def begin_reading(self, caller: Caller, kept_id: str) -> Callable[[], None]:
        """Room for one more answer with all of a result, however slowly it is read. Call what is returned once it is
        out; a second time changes nothing. Raises CallError, `unavailable`: others have all the room."""
        entry = self._entries.get(kept_id)
        size = entry.size_bytes if entry is not None and entry.tenant == caller.tenant else 0
        own = self._reading[caller.tenant]
        is_full = self.reading_bytes and self.reading_bytes + size > READING_BYTES_MAX
        if is_full or (own and own + size > READING_BYTES_MAX // 2):
            raise CallError(unavailable("large results are being read already", retry_after_ms=1_000))
        self._read_more(caller.tenant, size)

        def end() -> None:
            nonlocal size
            self._read_more(caller.tenant, -size)
            size = 0

        return end

    def _read_more(self, tenant: Tenant, size: int) -> None:
        self.reading_bytes += size
        self._reading[tenant] += size
        if not self._reading[tenant]:
            del self._reading[tenant]

    async def read(self, caller: Caller, kept_id: str) -> bytes | None:
        """The whole of a result. None: there is none of that id, or not for this caller."""
        found = await self.find(caller, kept_id)
        return None if found is None else found.data

    async def find(self, caller: Caller, kept_id: str) -> Kept | None:
        """As `read`, with what it is."""
        self._expire()
        entry = self._entries.get(kept_id)
        if entry is None or entry.tenant != caller.tenant:
            return None
        try:
            data = await asyncio.to_thread(self._path(kept_id).read_bytes)
        except OSError:
            return None  # it went meanwhile
        return Kept(data, entry.mime_type, entry.name)

    # --- inside -------------------------------------------------------------------------------------------------

    def _add(self, kept_id: str, entry: _Entry) -> None:
        if not self._is_open:
            self._drop_files([kept_id])
            return
        self._entries[kept_id] = entry
        self._held.setdefault(entry.tenant, _Held()).ids[kept_id] = None
        self._arm()

    def _hold(self, tenant: Tenant, size: int) -> None:
        """So many bytes more, or less, are this tenant's."""
        if not self._is_open:
            return  # all was forgotten
        self.held_bytes += size
        held = self._held.setdefault(tenant, _Held())
        held.bytes += size
        if not held.bytes and not held.ids:
            del self._held[tenant]

    def _forget(self, kept_id: str) -> None:
        entry = self._entries.pop(kept_id)
        del self._held[entry.tenant].ids[kept_id]
        self._hold(entry.tenant, -entry.size_bytes)

    def _make_room(self, newcomer: Tenant) -> list[str]:
        """What has to go for what is held now, one entry of `newcomer` among it; it has gone from the list. Nobody who
        holds less than that tenant makes room for it."""
        gone = self._take_expired()
        while self._entries and len(self._entries) >= ENTRIES_MAX:
            gone.append(self._drop_oldest_of(max(self._held.values(), key=lambda held: len(held.ids))))
        if self.held_bytes > self.bytes_max:
            holders = [(-held.bytes, tenant) for tenant, held in self._held.items() if held.ids]
            heapq.heapify(holders)
            while holders and self.held_bytes > self.bytes_max:
                tenant = holders[0][1]
                held = self._held[tenant]
                if held.bytes < self._held[newcomer].bytes:
                    break
                gone.append(self._drop_oldest_of(held))
                if held.ids:
                    heapq.heapreplace(holders, (-held.bytes, tenant))
                else:
                    heapq.heappop(holders)
        return gone

    def _drop_oldest_of(self, held: _Held) -> str:
        kept_id = next(iter(held.ids))
        self._forget(kept_id)
        self.dropped_total += 1
        return kept_id

    def _take_expired(self) -> list[str]:
        now_ms = self._clock.now_ms()
        gone: list[str] = []
        while self._entries:
            kept_id, entry = next(iter(self._entries.items()))
            if entry.expires_at_ms > now_ms:
                break
            self._forget(kept_id)
            gone.append(kept_id)
        return gone

    def _expire(self) -> None:
        gone = self._take_expired()
        if gone:
            self._drop_files(gone)
        self._arm()

    def _arm(self) -> None:
        """One timer, for the oldest."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._entries:
            first = next(iter(self._entries.values()))
            self._timer = self._clock.call_at(first.expires_at_ms, self._expire)

    def _drop_files(self, names: list[str]) -> None:
        self._start(lambda: self._remove(names))

    def _start(self, work: Callable[[], object]) -> asyncio.Future[object]:
        """Begin something in a thread that ends whether or not anybody waits for it."""
        future: asyncio.Future[object] = asyncio.ensure_future(asyncio.to_thread(work))
        self._working.add(future)
        future.add_done_callback(self._working.discard)
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return future

    # --- in a thread ----------------------------------------------------------------------------------------------

    def _path(self, kept_id: str) -> Path:
        return self._folder / f"{kept_id}{_SUFFIX}"

    def _open_folder(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in self._folder.iterdir():
            if path.suffix == _SUFFIX and path.is_file():
                path.unlink(missing_ok=True)

    def _write(self, kept_id: str, output: bytes, gone: list[str]) -> None:
        self._remove(gone)
        path = self._path(kept_id)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with open(fd, "wb") as file:
                file.write(output)
        except OSError:
            path.unlink(missing_ok=True)
            raise

    def _remove(self, names: list[str]) -> None:
        for name in names:
            self._path(name).unlink(missing_ok=True)


def encode_envelope(result: DispatchResult) -> bytes:
    """An answer as it is kept: `{"ok":true,"output":…}` or `{"ok":false,"error":{…}}`, as for a caller elsewhere."""
    if isinstance(result, Ok):
        return msgspec.json.encode({"ok": True, "call_id": result.call_id, "output": msgspec.Raw(result.output)})
    return msgspec.json.encode({"ok": False, "call_id": result.call_id, "error": result.to_json(remote=True)})
