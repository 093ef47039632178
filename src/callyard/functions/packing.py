"""Python values to and from the form in which they cross: JSON, beside it what is binary.

`bytes`, numpy arrays and tables need no base64 and no lists of digits: they are taken out of the value, a null is left
in their place, and they follow as they are (`wire.values`). What holds none of them is plain JSON, as `encoding` writes
it. What cannot cross is a `ResultMisfit` with its place, in both directions in the same words.

A packed value may come from a hostile executor: its places, sizes, types and shapes are checked before anything is
made of it, nothing is unpickled, and each part is a copy of its own. Source: call-execution X95, tool-dispatch D26.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from os import urandom
from typing import Any, Final

import msgspec

from callyard.errors import ProtocolError
from callyard.functions import foreign
from callyard.functions.encoding import (
    Lifted,
    ResultMisfit,
    encode_canonical,
    encode_flat,
    encode_value,
    explain_refusal,
    kinds_within,
    misfit_at,
    to_plain,
)
from callyard.functions.foreign import NotCrossing, NotReadable
from callyard.functions.shared import Shared, SharedPlace
from callyard.wire.frames import SIDECAR_HEAD_BYTES, join_body
from callyard.wire.values import Part, is_packed, read_head, split_packed

_BYTES: Final = frozenset({bytes, bytearray, memoryview})
_BESIDE: Final = frozenset({*_BYTES, Shared})
_ALIGNED_BYTES: Final = 64
"""Where the parts of a shared value begin: arrays are used where they lie."""
_PLAIN: Final = frozenset({str, int, float, bool, type(None)})
_ENCODE: Final = msgspec.json.Encoder().encode

Buffer = memoryview | bytes | bytearray


def encode_crossing(value: object, *, canonical: bool = False, nan_null: bool = False, aligned: bool = False) -> bytes:
    """A value as it crosses. `canonical`: equal values are equal bytes. `aligned`: it is used where it lies. Raises
    `ResultMisfit`."""
    flat = encode_flat(value, canonical=canonical)
    if flat is not None:
        return flat
    try:
        kinds = kinds_within(value)
        if not any(map(_is_binary, kinds)):
            if canonical:
                return encode_canonical(value, nan_null=nan_null)
            return encode_value(value, nan_null=nan_null, kinds=kinds)
        parts: list[Part] = []
        buffers: list[Buffer] = []
        rest = _lift(to_plain(value, canonical=canonical, kinds=kinds), (), parts, buffers)
    except (MemoryError, ResultMisfit):
        raise
    except Exception as error:
        raise explain_refusal(value, error) from error
    inner = encode_canonical(rest, nan_null=nan_null) if canonical else encode_value(rest, nan_null=nan_null)
    head = _ENCODE({"value": msgspec.Raw(inner), "parts": parts})
    if aligned:
        head += b" " * (-(SIDECAR_HEAD_BYTES + len(head)) % _ALIGNED_BYTES)
    return join_body(head, *buffers)


def _is_binary(kind: type) -> bool:
    """Whether it is bytes, an array, a table or a Shared."""
    return kind in _BESIDE or issubclass(kind, bytes | bytearray) or foreign.library_of_type(kind) is not None


def _lift(node: Any, at: tuple[str | int, ...], parts: list[Part], buffers: list[Buffer]) -> Any:
    """`node` with null in the place of each binary value, which go to the two lists.

    Loops, since a comprehension is a second frame for each level: there may be `LEVELS_MAX` of them.
    """
    kind = type(node)
    if kind is dict:
        if _PLAIN.issuperset(map(type, node.values())):
            return node
        named = {}
        for key, part in node.items():
            named[key] = _lift(part, (*at, key), parts, buffers)
        return named
    if kind is list or kind is tuple:
        if _PLAIN.issuperset(map(type, node)):
            return node
        listed = []
        for index, part in enumerate(node):
            listed.append(_lift(part, (*at, index), parts, buffers))
        return listed
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
    return isinstance(data, bytearray) or (data.c_contiguous and data.nbytes > 0)  # a shape with a zero has no cast


def _to_part(value: object, at: tuple[str | int, ...]) -> tuple[Part, memoryview]:
    if isinstance(value, Shared):
        place = value.place
        if place.closed:
            raise NotCrossing("this Shared is closed, or its worker is: share the value again")
        return Part(at, 0, "shared", place=(place.number, place.offset, place.length)), memoryview(b"")
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

    def __init__(
        self, value: bytes, parts: list[Part], buffers: list[bytearray | memoryview], open_shared: OpenShared | None
    ) -> None:
        self.value: Final = value
        self.parts: Final = parts
        self._buffers = buffers
        self._open_shared = open_shared

    @classmethod
    def read(cls, body: Buffer, open_shared: OpenShared | None = None, *, copy: bool = True) -> Packed:
        """Of a value for which `is_packed` holds. Raises `ProtocolError`."""
        return cls.of(*split_packed(memoryview(body)), open_shared, copy=copy)

    @classmethod
    def of(cls, head_json: bytes, raw: Buffer, open_shared: OpenShared | None = None, *, copy: bool = True) -> Packed:
        """Of what a message carries: its JSON, and the sidecar of its frame. `open_shared`: reads what the worker
        shares; None: nothing is. Without `copy` the parts stay where they lie. Raises `ProtocolError`."""
        head = read_head(head_json)
        buffers: list[bytearray | memoryview] = []
        start = 0
        for part in head.parts:
            if part.size > len(raw) - start:
                raise ProtocolError(f"a packed value of {len(raw)} bytes names more in its parts")
            data = raw[start : start + part.size]
            buffers.append(bytearray(data) if copy else memoryview(data))
            start += part.size
        if start != len(raw):
            raise ProtocolError(f"a packed value names {start} bytes in its parts, and has {len(raw)}")
        return cls(bytes(head.value), head.parts, buffers, open_shared)

    @property
    def has_shared(self) -> bool:
        return any(part.kind == "shared" for part in self.parts)

    def objects(self) -> list[Crossed]:
        """Raises `NotReadable` for a shared value that is none."""
        return [self._object(part, data) for part, data in zip(self.parts, self._buffers, strict=True)]

    def _object(self, part: Part, data: bytearray | memoryview) -> Crossed:
        if part.kind != "shared":
            return Crossed(part, data)
        if part.place is None:
            raise NotReadable("a shared value that is nowhere")
        if self._open_shared is None:
            return Crossed(part, data)
        kept = self._open_shared(part.place)
        inner, data = kept.whole or (Part((), 0, "shared"), data)
        return Crossed(msgspec.structs.replace(inner, at=part.at), data, kept)

    def decode(self) -> Any:
        """The value with its parts in place, each as what it was. Raises `NotReadable`."""
        return self.place(decode_json(self.value), lambda index, crossed: crossed.to_python())

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
    """One binary part, not made into an object yet, or a shared value, of which the object is made once."""

    __slots__ = ("data", "kept", "part")

    def __init__(self, part: Part, data: bytearray | memoryview, kept: Kept | None = None) -> None:
        self.part = part
        self.data = data
        self.kept = kept

    def describe(self) -> str:
        """In words, as `describe_value`."""
        part = self.part
        if part.kind == "array":
            return f"a numpy array ({part.dtype}, {' x '.join(map(str, part.shape)) or 'no'} values)"
        if part.kind == "frame":
            return f"a {part.library} table"
        if part.kind == "shared":
            return "a shared value"
        return f"bytes ({len(self.data)})"

    def to_python(self) -> Any:
        """What it was. Raises `NotReadable`."""
        return self._make() if self.kept is None else self.kept.once("", self._make)

    def to_frame(self, library: foreign.Library) -> Any:
        """The table as one of `library`. Raises `NotReadable`."""
        if self.kept is None:
            return foreign.read_frame(self.data, library)
        return self.kept.once(library, lambda: foreign.read_frame(self.data, library))

    def _make(self) -> Any:
        if self.part.kind == "shared":
            if self.kept is not None:
                return self.kept.decode()
            assert self.part.place is not None
            return Shared(SharedPlace(*self.part.place), _keep)  # at the worker, to be passed on
        if self.part.kind == "array":
            return foreign.read_array(self.part.dtype, self.part.shape, self.data)
        if self.part.kind == "frame":
            if self.part.library not in foreign.FRAMES:
                raise NotReadable(f"a table of an unknown library {self.part.library[:40]!r}")
            return foreign.read_frame(self.data, self.part.library)
        return bytes(self.data)


def _keep(_: SharedPlace) -> None:
    """It is another handle's to close."""


class Kept:
    """A shared value in an executor: used where it lies, and what is made of it is made once."""

    def __init__(self, view: memoryview) -> None:
        """Of its encoded form, read-only. Raises `ProtocolError`."""
        self._view = view
        self._packed = Packed.read(view, copy=False) if is_packed(view) else None
        self._made: dict[object, Any] = {}
        self.whole: tuple[Part, bytearray | memoryview] | None = None
        """The one binary part that it is; None: a value of JSON, with or without parts in it."""
        if self._packed is not None and self._packed.parts[0].at == ():
            self.whole = (self._packed.parts[0], self._packed.objects()[0].data)

    def once(self, key: object, make: Callable[[], Any]) -> Any:
        """What `make` gave the first time for this key."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def decode(self) -> Any:
        """Raises `NotReadable`."""
        return msgspec.json.decode(self._view) if self._packed is None else self._packed.decode()

    def fill(self, fill: Callable[[Packed], Any]) -> Any:
        """The value of its JSON, anew; `fill` puts what stands for its parts into it."""
        return msgspec.json.decode(self._view) if self._packed is None else fill(self._packed)

    def read(self, validate: Callable[[bytes, Tokens | None], Any]) -> Any:
        """The value by `validate`, of JSON and its context. Raises `NotReadable`, and what it raises."""
        if self._packed is None:
            return validate(bytes(self._view), None)
        tokens = Tokens(self._packed)
        return validate(tokens.json, tokens)


OpenShared = Callable[[tuple[int, int, int]], Kept]
"""By number, offset and length. Raises `NotReadable`."""


class Tokens:
    """Parts of a packed value while a validator reads it: a text that nobody could guess stands for each.

    The validation context; `claim` gives the part behind a text.
    """

    def __init__(self, packed: Packed, whole: Container[tuple[str | int, ...]] = ()) -> None:
        """`whole`: places at which a text stands for a shared value that is no binary one; elsewhere such a value
        stands there itself."""
        self._prefix = f"callyard-{urandom(12).hex()}-"
        self._parts: dict[str, Crossed] = {}
        self._whole = whole
        self.json = _ENCODE(self._fill(packed))

    def _fill(self, packed: Packed) -> Any:
        return packed.place(decode_json(packed.value), self._token)

    def _token(self, _: int, crossed: Crossed) -> Any:
        if crossed.kept is not None and crossed.kept.whole is None and crossed.part.at not in self._whole:
            return crossed.kept.fill(self._fill)
        token = f"{self._prefix}{len(self._parts)}"
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
    return Packed.read(value).decode() if is_packed(value) else decode_json(value)


def decode_json(value: bytes | memoryview) -> Any:
    """Raises `NotReadable`: what is passed on unread may hold a number that Python has no room for, or be too deep."""
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError) as error:
        raise NotReadable(f"no JSON: {error}") from error


def read_parts(value: bytes) -> Iterator[Part]:
    """Heads of the binary parts of a value; none for plain JSON. Raises `ProtocolError`."""
    if is_packed(value):
        head, _ = split_packed(memoryview(value))
        yield from read_head(head).parts


__all__ = [
    "Crossed",
    "Kept",
    "NotReadable",
    "OpenShared",
    "Packed",
    "ResultMisfit",
    "Tokens",
    "decode_crossing",
    "decode_json",
    "encode_crossing",
    "is_packed",
    "read_parts",
]
