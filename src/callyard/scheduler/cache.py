"""Results kept for equal calls of one task, and the key that says which calls are equal.

A key is a digest of the function and the bytes of the arguments as they are sent: nothing is decoded, so that equal
arguments written otherwise miss a hit and are never wrong. The same results for roots and subcalls. Source: X15.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import Final

from callyard.scheduler.calls import Call

KEY_BYTES: Final = 16


def key_of(call: Call) -> bytes:
    """BLAKE2b-128 over function id, digest, arguments, and how the arguments are to be read."""
    target = call.target
    whole = call.parent is None and call.task.plan.takes_rows and target.takes_row
    head = f"{len(target.function_id)} {len(target.digest)} {call.strings:d}{whole:d} "
    return blake2b(f"{head}{target.function_id}{target.digest}".encode() + call.args, digest_size=KEY_BYTES).digest()


class ResultCache:
    """At most `entries_max` outputs of together `bytes_max` bytes; the least recently used goes first."""

    def __init__(self, entries_max: int, bytes_max: int) -> None:
        self._entries_max = entries_max
        self._bytes_max = bytes_max
        self.outputs: OrderedDict[bytes, bytes] = OrderedDict()
        self.held_bytes = 0
        """Keys and outputs."""

    def get(self, key: bytes) -> bytes | None:
        output = self.outputs.get(key)
        if output is not None:
            self.outputs.move_to_end(key)
        return output

    def put(self, key: bytes, output: bytes) -> None:
        """Keep an output; one that is larger than all there may be is not kept."""
        size = KEY_BYTES + len(output)
        if size > self._bytes_max:
            return
        old = self.outputs.pop(key, None)
        if old is not None:
            self.held_bytes -= KEY_BYTES + len(old)
        self.outputs[key] = output
        self.held_bytes += size
        while self.held_bytes > self._bytes_max or len(self.outputs) > self._entries_max:
            _, oldest = self.outputs.popitem(last=False)
            self.held_bytes -= KEY_BYTES + len(oldest)
