"""Encoded values: what arguments and results are between the ends that know what is in them.

A value is bytes: JSON text, or *packed*, JSON beside binary parts. A packed value is laid out as the body of a frame
with a sidecar (`frames`), so no JSON text is taken for one. Its JSON is `{"value": …, "parts": […]}`: each part says
where in the value it belongs (a null stands there), what it is, and how many of the raw bytes are its own. Nothing in
between looks into a value; `callyard.functions.packing` makes and reads them.

In a message a value is a `Raw`, with the raw bytes as the frame's sidecar, or above `ARENA_VALUE_BYTES` a place in the
arena. Source: call-execution X48, X95.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Raw

from callyard.errors import ProtocolError
from callyard.wire.frames import SIDECAR_HEAD_BYTES, SIDECAR_MAGIC, join_body, split_body

PARTS_MAX: Final = 100_000
"""Most binary parts of one value."""
PartKind = Literal["bytes", "array", "frame", "shared"]

_Size = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Part(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One binary value within a packed one."""

    at: tuple[str | int, ...]
    """Keys and positions on the way to it."""
    size: _Size
    kind: PartKind = "bytes"
    dtype: str = ""
    """Of an array, as numpy writes it: `<f8`."""
    shape: tuple[_Size, ...] = ()
    """Of an array, in C order."""
    library: str = ""
    """Of a frame, an Arrow stream: what it was. `pandas`, `polars` or `pyarrow`."""
    place: tuple[_Size, _Size, _Size] | None = None
    """Of a shared value, which has no bytes here: its number, and offset and length in the worker's shared memory."""


class PackedHead(msgspec.Struct, frozen=True, gc=False):
    """The JSON of a packed value."""

    value: Raw
    parts: Annotated[list[Part], Meta(min_length=1, max_length=PARTS_MAX)]


_MAGIC_BYTES: Final = len(SIDECAR_MAGIC)
_HEAD: Final = msgspec.json.Decoder(PackedHead)
_ANY: Final = msgspec.json.Decoder(Raw)


def is_packed(value: bytes | memoryview) -> bool:
    return value[:_MAGIC_BYTES] == SIDECAR_MAGIC


def to_wire(value: bytes) -> tuple[Raw, bytes | None]:
    """A value as a message carries it: its JSON, and the sidecar of the frame (None: none)."""
    if value[:1] != b"B":
        return Raw(value), None
    head, raw = split_body(value)
    return Raw(head), raw


def from_wire(raw: Raw, sidecar: bytes | None) -> bytes:
    """The value of a message. Raises `ProtocolError` for a sidecar that is not what its JSON says."""
    if sidecar is None:
        return bytes(raw)
    head = bytes(raw)
    _check_sizes(read_head(head), len(sidecar))
    return join_body(head, sidecar)


def json_of(value: bytes) -> bytes:
    """JSON of a value for whoever looks at it from outside: binary parts are null. Raises `ProtocolError`."""
    return bytes(read_head(split_packed(memoryview(value))[0]).value) if is_packed(value) else value


def check_value(value: bytes) -> None:
    """Raise `ProtocolError` unless this is JSON, or a packed value whose sizes are true. Linear in its JSON."""
    if is_packed(value):
        head, raw = split_packed(memoryview(value))
        _check_sizes(read_head(head), len(raw))
        return
    try:
        if not value.isascii():
            value.decode()
        _ANY.decode(value)
    except (UnicodeDecodeError, msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"a value of {len(value)} bytes is not JSON: {str(error)[:300]}") from error


def split_packed(value: memoryview) -> tuple[bytes, memoryview]:
    """JSON and raw bytes of a packed value, the latter not copied. Raises `ProtocolError`."""
    start = SIDECAR_HEAD_BYTES
    end = start + int.from_bytes(value[_MAGIC_BYTES:start], "big")
    if not start < end <= len(value):
        raise ProtocolError(f"a packed value of {len(value)} bytes names {end - start} bytes of JSON")
    return bytes(value[start:end]), value[end:]


def read_head(head: bytes) -> PackedHead:
    """Raises `ProtocolError`."""
    try:
        if not head.isascii():
            head.decode()
        return _HEAD.decode(head)
    except (UnicodeDecodeError, msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed head of a packed value: {str(error)[:300]}") from error


def _check_sizes(head: PackedHead, raw_bytes: int) -> None:
    """Of what an executor sent: it shares nothing."""
    if any(part.kind == "shared" for part in head.parts):
        raise ProtocolError("a packed value from an executor names a shared one: only a worker shares")
    named = sum(part.size for part in head.parts)
    if named != raw_bytes:
        raise ProtocolError(f"a packed value names {named} bytes in {len(head.parts)} parts, and has {raw_bytes}")
