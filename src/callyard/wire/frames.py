"""Frames: a 4-byte big-endian length, then a body.

A body is JSON, or `BXB1` + a 4-byte big-endian JSON length + JSON + raw bytes (the sidecar). No JSON text
starts with `B`, so the magic is never taken for it. Source: call-execution X48.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Final

from callyard.errors import ProtocolError

FRAME_BYTES_MAX: Final = 16 * 1024 * 1024
"""Most bytes of a frame's body, on both sides."""
LENGTH_BYTES: Final = 4
SIDECAR_MAGIC: Final = b"BXB1"
SIDECAR_HEAD_BYTES: Final = len(SIDECAR_MAGIC) + LENGTH_BYTES

_LENGTH: Final = Struct(">I")
_pack_length: Final = _LENGTH.pack
_unpack_length: Final = _LENGTH.unpack_from


def check_frame_bytes(size: int, peer: str = "peer") -> None:
    """Raise `ProtocolError` for a body that no frame can hold."""
    if size > FRAME_BYTES_MAX:
        raise ProtocolError(f"frame of {size} bytes exceeds frame_bytes_max={FRAME_BYTES_MAX} ({peer})")
    if size == 0:
        raise ProtocolError(f"frame of 0 bytes: expected a JSON body ({peer})")


def encode_frame(json_body: bytes, sidecar: bytes | None = None) -> bytes:
    """One whole frame. Raises `ProtocolError` above the cap, before anything is sent."""
    if sidecar is None:
        size = len(json_body)
        if not 0 < size <= FRAME_BYTES_MAX:
            check_frame_bytes(size)
        return _pack_length(size) + json_body
    size = SIDECAR_HEAD_BYTES + len(json_body) + len(sidecar)
    check_frame_bytes(size)
    return _pack_length(size) + join_body(json_body, sidecar)


def join_body(json_part: bytes, *raw: bytes | bytearray | memoryview) -> bytes:
    """A body of JSON and a sidecar: the inverse of `split_body`."""
    return b"".join((SIDECAR_MAGIC, _pack_length(len(json_part)), json_part, *raw))


def split_body(body: bytes) -> tuple[bytes, bytes | None]:
    """The JSON part and the sidecar (None: there is none). Raises `ProtocolError`."""
    if not body.startswith(SIDECAR_MAGIC):
        return body, None
    if len(body) < SIDECAR_HEAD_BYTES:
        raise ProtocolError(f"sidecar frame of {len(body)} bytes: expected a head of {SIDECAR_HEAD_BYTES} bytes")
    (json_bytes,) = _unpack_length(body, len(SIDECAR_MAGIC))
    end = SIDECAR_HEAD_BYTES + json_bytes
    if json_bytes == 0 or end > len(body):
        raise ProtocolError(f"sidecar frame of {len(body)} bytes names {json_bytes} bytes of JSON")
    return body[SIDECAR_HEAD_BYTES:end], body[end:]


class FrameReader:
    """Cuts a byte stream into frame bodies.

    It holds at most one unfinished frame, and refuses a length above the cap once it has those four bytes.
    Each body is a copy of its own: a `Raw` decoded from it keeps that one frame alive, never the whole read
    it came in (and slices of bytes cost a third of what memoryviews do).
    """

    __slots__ = ("_needed_bytes", "_peer", "_pending")

    def __init__(self, peer: str = "peer") -> None:
        self._peer = peer
        self._pending = bytearray()
        """The unfinished frame from its length prefix on; empty: the stream stands at a frame's start."""
        self._needed_bytes = LENGTH_BYTES
        """How long `_pending` must be to be looked at again: not every chunk of a frame copies it."""

    @property
    def pending_bytes(self) -> int:
        """Bytes of the frame that is not whole yet; more than 0 at the end of a stream: it was cut."""
        return len(self._pending)

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[bytes]:
        """Yield each body that `data` completes; iterate to the end, or close the stream.

        Raises `ProtocolError` at the first impossible length, after the whole frames before it.
        """
        if self._pending:
            self._pending += data
            if len(self._pending) < self._needed_bytes:
                return
            whole = bytes(self._pending)
            self._pending.clear()
        else:
            whole = bytes(data)
        start, end = LENGTH_BYTES, len(whole)  # start: of a body whose length prefix is whole
        self._needed_bytes = LENGTH_BYTES
        while start <= end:
            (size,) = _unpack_length(whole, start - LENGTH_BYTES)
            if not 0 < size <= FRAME_BYTES_MAX:
                check_frame_bytes(size, self._peer)
            body_end = start + size
            if body_end > end:
                self._needed_bytes = LENGTH_BYTES + size
                break
            yield whole[start:body_end]
            start = body_end + LENGTH_BYTES
        self._pending += whole[start - LENGTH_BYTES :]
