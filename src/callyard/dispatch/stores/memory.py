"""Keys in this process's memory: bounded, and forgotten when it ends.

Three structures over one dictionary of records. `_expiries` is a heap of (instant, fence, scope): a record is expired
when it comes to the top, so that no call looks at more than what is due; an entry whose record has gone or was dated
anew is skipped, and the heap is rebuilt when most of it is such. `_evictable` holds, oldest first, the ends that may be
forgotten early: those of idempotent tools. Everything else stays until it expires, since a key forgotten early is a
double effect. Source: tool-dispatch D18-D20.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from itertools import count
from typing import Final

from callyard.dispatch.stores.port import Claim, Claimed, Conflicting, Full, InFlight, Kept, KeyEnd, KeyRecord, KeyScope
from callyard.dispatch.stores.records import OUTPUT_BYTES_MAX, decode_end, encode_end, is_too_large, is_unknown, wall_ms
from callyard.dispatch.stores.waiters import Waiters
from callyard.errors import UsageError
from callyard.ids import CallId, Tenant

_RECORD_BYTES: Final = 768
"""What a record costs beside its text and its end: objects, dictionary and heap entries (measured, rounded up)."""
_RETRY_AFTER_MS: Final = 1_000
"""When nothing expires because all that is held is in flight."""
_HEAP_SLACK: Final = 64


class _Record:
    """One key. In flight while `ended` is None."""

    __slots__ = (
        *("call_id", "ended", "ended_at_ms", "expires_at_ms", "fence"),
        *("fingerprint", "idempotent", "size", "unknown"),
    )

    def __init__(self, fingerprint: str, call_id: CallId, fence: int, idempotent: bool, size: int) -> None:
        self.fingerprint = fingerprint
        self.call_id = call_id
        self.fence = fence
        self.idempotent = idempotent
        self.size = size
        """Bytes that it counts for, its end included."""
        self.ended: bytes | None = None
        self.unknown = False
        self.ended_at_ms = 0
        self.expires_at_ms = 0


class MemoryKeyStore:
    """At most `entries_max` keys of together about `bytes_max` bytes.

    New keys are refused (`Full`) at either bound. The end of a run that is under way is kept even when it passes
    `bytes_max`: by no more than `output_bytes_max` for each key in flight.
    """

    def __init__(
        self,
        *,
        entries_max: int = 10_000,
        bytes_max: int = 64 << 20,
        output_bytes_max: int = OUTPUT_BYTES_MAX,
        now_ms: Callable[[], int] = wall_ms,
    ) -> None:
        if entries_max < 1 or bytes_max < 1 or output_bytes_max < 0:
            raise UsageError(
                f"a key store needs room: entries_max={entries_max}, bytes_max={bytes_max}, "
                f"output_bytes_max={output_bytes_max}"
            )
        self._entries_max = entries_max
        self._bytes_max = bytes_max
        self._output_bytes_max = min(output_bytes_max, bytes_max)
        self._now_ms = now_ms
        self._records: dict[KeyScope, _Record] = {}
        self._evictable: OrderedDict[KeyScope, None] = OrderedDict()
        self._expiries: list[tuple[int, int, KeyScope]] = []
        self._fences = count(1)
        self._waiters = Waiters()
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def claim(
        self, scope: KeyScope, fingerprint: str, call_id: CallId, *, idempotent: bool, unknown_ttl_ms: int
    ) -> Claim:
        self._expire()
        record = self._records.get(scope)
        if record is not None:
            if record.fingerprint != fingerprint:
                return Conflicting(record.call_id)
            if record.ended is None:
                return InFlight(record.call_id, record.fence)
            return Kept(decode_end(record.call_id, record.ended))
        size = _RECORD_BYTES + len(scope.key) + len(scope.tenant)
        if not self._make_room(size):
            return Full(self._retry_after_ms())
        fence = next(self._fences)
        self._records[scope] = _Record(fingerprint, call_id, fence, idempotent, size)
        self.held_bytes += size
        return Claimed(fence)

    async def settle(self, scope: KeyScope, fence: int, end: KeyEnd | None, ttl_ms: int) -> bool:
        record = self._records.get(scope)
        if record is None or record.fence != fence or record.ended is not None:
            return False
        self._put_end(scope, record, end, ttl_ms)
        if self._waiters:
            self._waiters.wake((scope, fence))
        return True

    async def wait(self, scope: KeyScope, fence: int) -> None:
        record = self._records.get(scope)
        if record is not None and record.fence == fence and record.ended is None:
            with self._waiters.waiting((scope, fence)) as woken:
                await woken

    async def resolve(self, scope: KeyScope, end: KeyEnd | None, ttl_ms: int) -> bool:
        self._expire()
        record = self._records.get(scope)
        if record is None or not record.unknown:
            return False
        self._put_end(scope, record, end, ttl_ms)
        return True

    async def find(self, scope: KeyScope) -> KeyEnd | None:
        self._expire()
        record = self._records.get(scope)
        return None if record is None or record.ended is None else decode_end(record.call_id, record.ended)

    async def unknown(self, tenant: Tenant | None = None, limit: int = 1_000) -> list[KeyRecord]:
        self._expire()
        found = [
            (record.ended_at_ms, record.fence, scope, record)
            for scope, record in self._records.items()
            if record.unknown and tenant in (None, scope.tenant)
        ]
        return [
            KeyRecord(scope, decode_end(record.call_id, record.ended or b""), ended_at_ms, record.expires_at_ms)
            for ended_at_ms, _, scope, record in heapq.nsmallest(limit, found)
        ]

    def _put_end(self, scope: KeyScope, record: _Record, end: KeyEnd | None, ttl_ms: int) -> None:
        if end is None or (record.idempotent and is_too_large(end, self._output_bytes_max)):
            self._remove(scope)
            return
        encoded = encode_end(end, self._output_bytes_max)
        grown = len(encoded) - len(record.ended or b"")
        now_ms = self._now_ms()
        record.call_id = end.call_id
        record.ended = encoded
        record.unknown = is_unknown(end)
        record.ended_at_ms = now_ms
        record.expires_at_ms = now_ms + ttl_ms
        record.size += grown
        self.held_bytes += grown
        heapq.heappush(self._expiries, (record.expires_at_ms, record.fence, scope))
        if record.idempotent and not record.unknown:
            self._evictable[scope] = None
        while self.held_bytes > self._bytes_max and self._evictable:
            self._evict_oldest()
        if len(self._expiries) > 2 * len(self._records) + _HEAP_SLACK:
            self._expiries = [entry for entry in self._expiries if self._is_current(entry)]
            heapq.heapify(self._expiries)

    def _make_room(self, size: int) -> bool:
        while len(self._records) >= self._entries_max or self.held_bytes + size > self._bytes_max:
            if not self._evictable:
                return False
            self._evict_oldest()
        return True

    def _evict_oldest(self) -> None:
        scope, _ = self._evictable.popitem(last=False)
        self._remove(scope)

    def _remove(self, scope: KeyScope) -> None:
        self.held_bytes -= self._records.pop(scope).size
        self._evictable.pop(scope, None)

    def _expire(self) -> None:
        if not self._expiries:
            return
        now_ms = self._now_ms()
        while self._expiries and self._expiries[0][0] <= now_ms:
            entry = heapq.heappop(self._expiries)
            if self._is_current(entry):
                self._remove(entry[2])

    def _is_current(self, entry: tuple[int, int, KeyScope]) -> bool:
        expires_at_ms, fence, scope = entry
        record = self._records.get(scope)
        return record is not None and record.fence == fence and record.expires_at_ms == expires_at_ms

    def _retry_after_ms(self) -> int:
        while self._expiries and not self._is_current(self._expiries[0]):
            heapq.heappop(self._expiries)
        return self._expiries[0][0] - self._now_ms() if self._expiries else _RETRY_AFTER_MS
