"""Python values to and from the form in which they cross: JSON, beside it what is binary.

`bytes`, numpy arrays and tables need no base64 and no lists of digits: they are taken out of the value, a null is left
in their place, and they follow as they are (`wire.values`). What holds none of them is plain JSON, as `encoding` writes
it. What cannot cross is a `ResultMisfit` with its place, in both directions in the same words.

A packed value may come from a hostile executor: its places, sizes, types and shapes are checked before anything is
made of it, nothing is unpickled, and each part is a copy of its own. Source: call-execution X95, tool-dispatch D26.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from os import urandom
from typing import Any, Final

import msgspec

from callyard.errors import ProtocolError
from callyard.functions import foreign
from callyard.functions.encoding import (
    Lifted,
    ResultMisfit,
    encode_canonical,
    encode_value,
    explain_refusal,
    misfit_at,
    named_parts,
    to_plain,
)
from callyard.functions.foreign import NotCrossing, NotReadable
from callyard.wire.frames import join_body
from callyard.wire.values import Part, is_packed, read_head, split_packed

_BYTES: Final = frozenset({bytes, bytearray, memoryview})
_PLAIN: Final = frozenset({str, int, float, bool, type(None)})
_CONTAINERS: Final = (list, tuple, set, frozenset)
_ENCODE: Final = msgspec.json.Encoder().encode

Buffer = memoryview | bytes | bytearray


def encode_crossing(value: object, *, canonical: bool = False, nan_null: bool = False) -> bytes:
    """A value as it crosses. `canonical`: equal values are equal bytes. Raises `ResultMisfit`."""
    if not holds_binary(value):
        return encode_canonical(value, nan_null=nan_null) if canonical else encode_value(value, nan_null=nan_null)
    try:
        plain = to_plain(value, canonical=canonical)
    except Exception as error:
        raise explain_refusal(value, error) from error
    parts: list[Part] = []
    buffers: list[Buffer] = []
    rest = _lift(plain, (), parts, buffers)
    inner = encode_canonical(rest, nan_null=nan_null) if canonical else encode_value(rest, nan_null=nan_null)
    head = _ENCODE({"value": msgspec.Raw(inner), "parts": parts})
    return join_body(head, *buffers)


def holds_binary(value: object) -> bool:
    """Whether bytes, an array or a table stand anywhere in a value. One look at each container's types, in C."""
    kind = type(value)
    if kind in _PLAIN:
        return False
    return kind in _BYTES or _holds_binary(value, set())


def _holds_binary(value: Any, seen: set[int]) -> bool:
    kind = type(value)
    children: Iterable[Any]
    if kind is dict:
        children = value.values()
    elif kind in _CONTAINERS:
        children = value
    elif isinstance(value, bytes | bytearray | memoryview) or foreign.library_of(value) is not None:
        return True
    elif isinstance(value, dict):
        children = dict.values(value)
    elif isinstance(value, _CONTAINERS):
        children = list(value)
    else:
        children = [part for _, part in named_parts(value)]
    kinds = set(map(type, children)) - _PLAIN
    if not kinds:
        return False
    if kinds & _BYTES:
        return True
    if id(value) in seen:  # it holds itself: the encoder says so
        return False
    seen.add(id(value))
    return any(_holds_binary(child, seen) for child in children if type(child) not in _PLAIN)


def _lift(node: Any, at: tuple[str | int, ...], parts: list[Part], buffers: list[Buffer]) -> Any:
    """`node` with null in the place of each binary value, which go to the two lists."""
    kind = type(node)
    if kind is dict:
        if not set(map(type, node.values())) - _PLAIN:
            return node
        return {key: _lift(part, (*at, key), parts, buffers) for key, part in node.items()}
    if kind is list or kind is tuple:
        if not set(map(type, node)) - _PLAIN:
            return node
        return [_lift(part, (*at, index), parts, buffers) for index, part in enumerate(node)]
    if kind in _BYTES:
        data = node if kind is bytes else memoryview(node).cast("B") if _is_flat(node) else bytes(node)
        parts.append(Part(at, len(data)))
    elif kind is Lifted:
        try:
            part, data = _to_part(node.value, at)
        except NotCrossing as error:
            raise misfit_at(str(error), at, node.value) from error
        parts.append(part)
    else:
        return node
    if data:
        buffers.append(data)
    return None


def _is_flat(data: bytearray | memoryview) -> bool:
    return isinstance(data, bytearray) or data.c_contiguous


def _to_part(value: object, at: tuple[str | int, ...]) -> tuple[Part, memoryview]:
    library = foreign.library_of(value)
    assert library is not None, type(value)
    if library == "numpy":
        dtype, shape, data = foreign.array_parts(value)
        return Part(at, len(data), "array", dtype, shape), data
    data = foreign.frame_bytes(value, library)
    return Part(at, len(data), "frame", library=library), data


# --- reading --------------------------------------------------------------------------------------------------------


class Packed:
    """A packed value that was read: JSON with nulls, and the parts that belong there, each in memory of its own."""

    def __init__(self, value: bytes, parts: list[Part], buffers: list[bytearray]) -> None:
        self.value: Final = value
        self.parts: Final = parts
        self._buffers = buffers

    @classmethod
    def read(cls, body: Buffer) -> Packed:
        """Of a value for which `is_packed` holds. Raises `ProtocolError`."""
        return cls.of(*split_packed(memoryview(body)))

    @classmethod
    def of(cls, head_json: bytes, raw: Buffer) -> Packed:
        """Of what a message carries: its JSON, and the sidecar of its frame. Raises `ProtocolError`."""
        head = read_head(head_json)
        buffers: list[bytearray] = []
        start = 0
        for part in head.parts:
            if part.size > len(raw) - start:
                raise ProtocolError(f"a packed value of {len(raw)} bytes names more in its parts")
            buffers.append(bytearray(raw[start : start + part.size]))
            start += part.size
        if start != len(raw):
            raise ProtocolError(f"a packed value names {start} bytes in its parts, and has {len(raw)}")
        return cls(bytes(head.value), head.parts, buffers)

    def objects(self) -> list[Crossed]:
        return [Crossed(part, data) for part, data in zip(self.parts, self._buffers, strict=True)]

    def decode(self) -> Any:
        """The value with its parts in place, each as what it was. Raises `NotReadable`."""
        try:
            root = msgspec.json.decode(self.value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise NotReadable(f"no JSON: {error}") from error
        return self.place(root, lambda index, crossed: crossed.to_python())

    def place(self, root: Any, make: Any) -> Any:
        """`root` with `make(index, crossed)` in the place of each part. Raises `NotReadable` where there is none."""
        holder = [root]
        for index, crossed in enumerate(self.objects()):
            owner: Any = holder
            last: str | int = 0
            for token in crossed.part.at:
                owner, last = _step(owner, last), token
            if _step(owner, last) is not None:
                raise NotReadable(f"part {index} of a packed value stands where another value is")
            owner[last] = make(index, crossed)
        return holder[0]


def _step(owner: Any, token: str | int) -> Any:
    fits = isinstance(owner, dict) if isinstance(token, str) else isinstance(owner, list)
    if not fits or (isinstance(token, str) and token not in owner):
        raise NotReadable("a part of a packed value has no place in it")
    if isinstance(token, int) and not 0 <= token < len(owner):
        raise NotReadable("a part of a packed value has no place in it")
    return owner[token]


class Crossed:
    """One binary part, not made into an object yet."""

    __slots__ = ("data", "part")

    def __init__(self, part: Part, data: bytearray) -> None:
        self.part = part
        self.data = data

    def describe(self) -> str:
        """In words, as `describe_value`."""
        part = self.part
        if part.kind == "array":
            return f"a numpy array ({part.dtype}, {' x '.join(map(str, part.shape)) or 'no'} values)"
        if part.kind == "frame":
            return f"a {part.library} table"
        return f"bytes ({len(self.data)})"

    def to_python(self) -> Any:
        """What it was. Raises `NotReadable`."""
        if self.part.kind == "array":
            return foreign.read_array(self.part.dtype, self.part.shape, self.data)
        if self.part.kind == "frame":
            if self.part.library not in foreign.FRAMES:
                raise NotReadable(f"a table of an unknown library {self.part.library[:40]!r}")
            return foreign.read_frame(self.data, self.part.library)
        return bytes(self.data)


class Tokens:
    """Parts of a packed value while a validator reads it: a text that nobody could guess stands for each.

    The validation context; `claim` gives the part behind a text.
    """

    def __init__(self, packed: Packed) -> None:
        self._prefix = f"callyard-{urandom(12).hex()}-"
        self._parts: dict[str, Crossed] = {}
        try:
            root = msgspec.json.decode(packed.value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise NotReadable(f"no JSON: {error}") from error
        self.json = _ENCODE(packed.place(root, self._token))

    def _token(self, index: int, crossed: Crossed) -> str:
        token = f"{self._prefix}{index}"
        self._parts[token] = crossed
        return token

    def claim(self, value: object) -> Crossed | None:
        """None: an ordinary value."""
        return self._parts.get(value) if type(value) is str else None

    def resolve(self, value: Any) -> Any:
        """`value`, plain JSON values, with each part as what it was."""
        found = self.claim(value)
        if found is not None:
            return found.to_python()
        if type(value) is dict:
            return {key: self.resolve(part) for key, part in value.items()}
        if type(value) is list:
            return [self.resolve(part) for part in value]
        return value

    def describe(self, text: str) -> str:
        """A message in which tokens are told as what they stand for."""
        if self._prefix not in text:
            return text
        for token, crossed in sorted(self._parts.items(), key=lambda item: -len(item[0])):
            text = text.replace(f'text ("{token}")', crossed.describe()).replace(token, crossed.describe())
        return text


def decode_crossing(value: bytes) -> Any:
    """The Python value of an encoded one, without a type to read it by. Raises `NotReadable`, `ProtocolError`."""
    return Packed.read(value).decode() if is_packed(value) else msgspec.json.decode(value)


def read_parts(value: bytes) -> Iterator[Part]:
    """Heads of the binary parts of a value; none for plain JSON. Raises `ProtocolError`."""
    if is_packed(value):
        head, _ = split_packed(memoryview(value))
        yield from read_head(head).parts


__all__ = [
    "Crossed",
    "NotReadable",
    "Packed",
    "ResultMisfit",
    "Tokens",
    "decode_crossing",
    "encode_crossing",
    "holds_binary",
    "is_packed",
    "read_parts",
]
