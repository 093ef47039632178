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
    """BLAKE2b-128 over function id, digest, arguments, how the arguments are to be read, and the form of the result."""
    target, plan = call.target, call.task.plan
    is_root = call.parent is None
    whole = is_root and plan.takes_rows and target.takes_row
    form = f"{target.binary and (not is_root or plan.binary):d}{is_root and plan.nan_null:d}"
    head = f"{len(target.function_id)} {len(target.digest)} {call.strings:d}{whole:d}{form} "
    return blake2b(f"{head}{target.function_id}{target.digest}".encode() + call.args, digest_size=KEY_BYTES).digest()


class ResultCache(LruCache[bytes]):
    """Outputs by key; an entry costs its key and its output."""

    def __init__(self, entries_max: int, bytes_max: int) -> None:
        super().__init__(entries_max, bytes_max, lambda output: KEY_BYTES + len(output))
