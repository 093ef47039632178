"""Results kept for equal calls of one task, and the key that says which calls are equal.

A key is a digest of the function and the bytes of the arguments as they are sent: nothing is decoded, so that equal
arguments written otherwise miss a hit and are never wrong. The same results for roots and subcalls. Source: X15.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

from callyard.policy.lru import LruCache
from callyard.scheduler.calls import Call

KEY_BYTES: Final = 16


def key_of(call: Call) -> bytes:
    """BLAKE2b-128 over function id, digest, arguments, and how the arguments are to be read."""
    target = call.target
    whole = call.parent is None and call.task.plan.takes_rows and target.takes_row
    head = f"{len(target.function_id)} {len(target.digest)} {call.strings:d}{whole:d} "
    return blake2b(f"{head}{target.function_id}{target.digest}".encode() + call.args, digest_size=KEY_BYTES).digest()


class ResultCache(LruCache[bytes]):
    """Outputs by key; an entry costs its key and its output."""

    def __init__(self, entries_max: int, bytes_max: int) -> None:
        super().__init__(entries_max, bytes_max, lambda output: KEY_BYTES + len(output))
