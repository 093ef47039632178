"""Replies kept for one task: least recently used first out, bounded by entries and by bytes.

A key is the BLAKE2b-128 of everything that makes two requests equal, byte for byte; nothing is decoded. Equal meaning
in other bytes is a miss, never a wrong hit. Source: call-execution X15, X42.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

from callyard.policy.lru import LruCache
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


class ReplyCache(LruCache[Reply]):
    """Not shared between tasks: what one tenant read, another never gets."""

    def __init__(self, entries_max: int, bytes_max: int) -> None:
        super().__init__(entries_max, bytes_max, _size_of)


def _size_of(reply: Reply) -> int:
    return len(reply.result) + len(reply.body or b"") + ENTRY_BYTES
