"""Replies kept for one task: least recently used first out, bounded by entries and by bytes.

A key is the BLAKE2b-128 of everything that makes two requests equal, byte for byte; nothing is decoded. Equal meaning
in other bytes is a miss, never a wrong hit. Source: call-execution X15, X42.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import Final

from callyard.worker.io.port import Reply

KEY_BYTES: Final = 16
ENTRY_BYTES: Final = 256
"""What an entry costs beside its bytes, roughly: key, reply, links."""


def make_key(provider: str, operation: str, request: bytes, body: bytes | None) -> bytes:
    """Parts are hashed with their lengths before them, so that no two splits are the same bytes."""
    key = blake2b(digest_size=KEY_BYTES)
    for part in (provider.encode(), operation.encode(), request):
        key.update(len(part).to_bytes(8, "big"))
        key.update(part)
    if body is not None:
        key.update(body)
        key.update(b"body")  # no body is not an empty one
    return key.digest()


class ReplyCache:
    """Not shared between tasks: what one tenant read, another never gets."""

    __slots__ = ("_entries", "_entries_max", "bytes_held", "bytes_max")

    def __init__(self, entries_max: int, bytes_max: int) -> None:
        self._entries: OrderedDict[bytes, Reply] = OrderedDict()
        self._entries_max = entries_max
        self.bytes_max = bytes_max
        self.bytes_held = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> Reply | None:
        reply = self._entries.get(key)
        if reply is not None:
            self._entries.move_to_end(key)
        return reply

    def put(self, key: bytes, reply: Reply) -> None:
        """Keep it, and let go of the longest unused; one larger than the whole cache is not kept."""
        size = _size_of(reply)
        if size > self.bytes_max or self._entries_max < 1:
            return
        self._remove(key)
        self._entries[key] = reply
        self.bytes_held += size
        while len(self._entries) > self._entries_max or self.bytes_held > self.bytes_max:
            self._remove(next(iter(self._entries)))

    def _remove(self, key: bytes) -> None:
        reply = self._entries.pop(key, None)
        if reply is not None:
            self.bytes_held -= _size_of(reply)


def _size_of(reply: Reply) -> int:
    return len(reply.result) + len(reply.body or b"") + ENTRY_BYTES
