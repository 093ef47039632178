"""The arena: a file that a worker shares with one executor, for values that are too large for a frame.

It has two halves. The worker writes into the first and the executor into the second; each end alone says what lies
where in its own half (`Room`), and a message says of a value `Stored`: grant, offset, length. Who reads a value copies
it out and says `ArenaReleased`; the writer then takes the place back and punches a hole into the file. So no place is
ever written by two, and a peer that lies about a place can only be wrong about its own half (`check_within`).

Pure: who maps and writes are `worker.arena` and `executor.arena`. Source: call-execution X95.
"""

from __future__ import annotations

from bisect import insort
from typing import Final

from callyard.errors import ProtocolError
from callyard.wire.messages import Stored

ARENA_VALUE_BYTES: Final = 1024 * 1024
"""A value of more bytes goes by the arena."""
GRAIN_BYTES: Final = 64 * 1024
"""Places begin and end at multiples of it: every system's pages fit in."""
SHARED_WINDOW_BYTES: Final = 16 * 1024 * 1024
"""The file of shared values grows by multiples of it, and executors map it by such pieces."""


class ArenaTooSmall(Exception):
    """A value that this half could never hold. The text says how to give it more."""


class Room:
    """What lies where in the half that one end writes to. First fit, neighbours that are free become one."""

    def __init__(self, start: int, size: int) -> None:
        """Bytes from `start` on, both multiples of `GRAIN_BYTES`."""
        assert start % GRAIN_BYTES == 0, start
        assert size % GRAIN_BYTES == 0, size
        self.start: Final = start
        self.size: Final = size
        self.used_bytes = 0
        self.live: Final[dict[int, tuple[int, int]]] = {}
        """Grants that were not released: offset and size."""
        self._free: list[tuple[int, int]] = [(start, size)] if size else []
        """By offset; no two of them touch."""
        self._next_grant = 1

    def allocate(self, length: int) -> Stored | None:
        """A place for `length` bytes; None: there is none now. Raises `ArenaTooSmall` when there never can be."""
        self.check(length)
        size = round_up(max(1, length))
        index = next((at for at, (_, room) in enumerate(self._free) if room >= size), None)
        if index is None:
            return None
        offset, room = self._free[index]
        if room == size:
            del self._free[index]
        else:
            self._free[index] = (offset + size, room - size)
        grant, self._next_grant = self._next_grant, self._next_grant + 1
        self.live[grant] = (offset, size)
        self.used_bytes += size
        return Stored(grant, offset, length)

    def check(self, length: int) -> None:
        """Raises `ArenaTooSmall` for a value that can never be held."""
        if round_up(length) > self.size:
            raise ArenaTooSmall(
                f"a value of {length:,} bytes, and the arena holds {self.size:,} in each direction:"
                " raise arena_bytes_max, or pass the path of a file instead"
            )

    def release(self, grant: int) -> tuple[int, int] | None:
        """Take a place back: its offset and size, to be punched. None: it was released before."""
        place = self.live.pop(grant, None)
        if place is None:
            return None
        offset, size = place
        self.used_bytes -= size
        insort(self._free, place)
        index = self._free.index(place)
        if index + 1 < len(self._free) and offset + size == self._free[index + 1][0]:
            self._free[index] = (offset, size + self._free.pop(index + 1)[1])
        if index and sum(self._free[index - 1]) == offset:
            before, room = self._free[index - 1]
            self._free[index - 1] = (before, room + self._free.pop(index)[1])
        return place

    def check_invariants(self) -> None:
        """Places neither overlap nor leave the half, and what is not live is free."""
        places = sorted([*self.live.values(), *self._free])
        at = self.start
        for offset, size in places:
            assert offset == at, f"a hole or an overlap at {at}: {places}"
            assert size > 0, places
            at += size
        assert at == self.start + self.size, places
        assert self.used_bytes == sum(size for _, size in self.live.values()), places
        touching = [a for a, b in zip(self._free, self._free[1:], strict=False) if sum(a) == b[0]]
        assert not touching, touching


def halves(size: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Start and size of the worker's half and of the executor's, in a file of `size` bytes."""
    half = size // 2 // GRAIN_BYTES * GRAIN_BYTES
    return (0, half), (half, half)


def check_within(stored: Stored, half: tuple[int, int], peer: str) -> None:
    """Raise `ProtocolError` when a peer names a place that is not its own to fill."""
    start, size = half
    if stored.offset < start or stored.length == 0 or stored.offset + stored.length > start + size:
        raise ProtocolError(
            f"a value at {stored.offset} of {stored.length} bytes: expected it within {start}..{start + size} ({peer})"
        )


def round_up(length: int, to: int = GRAIN_BYTES) -> int:
    """The multiple of `to` that `length` bytes take up."""
    return -(-length // to) * to
