"""The codec against the golden vectors: whole, byte by byte, and in chunks that split every frame somewhere else."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from callyard.errors import ProtocolError
from callyard.wire.codec import UnknownMessage, encode_message
from callyard.wire.frames import FrameReader
from callyard.wire.messages import ExecutorMessage, WorkerMessage
from tests.wire import golden

VALID = golden.names("valid")
INVALID = golden.names("invalid")
CHUNK_BYTES = [1, 3, 7, 64, 1 << 20]


@pytest.mark.requirement("X48", "X49", "X78")
@pytest.mark.parametrize("name", VALID)
@pytest.mark.parametrize("chunk_bytes", CHUNK_BYTES)
def test_valid_vector_decodes_to_its_description(name: str, chunk_bytes: int) -> None:
    vector = golden.load_valid(name)
    reader = FrameReader()
    chunks = golden.chunked(golden.load_bytes("valid", name), chunk_bytes)

    decoded = [
        {"message": golden.describe(message), "sidecar": None if sidecar is None else sidecar.hex()}
        for message, sidecar in golden.read(vector.sender, chunks, reader)
    ]

    assert decoded == vector.frames
    assert reader.pending_bytes == vector.pending_bytes


@pytest.mark.requirement("X49", "X78")
@pytest.mark.parametrize("name", [name for name in VALID if golden.load_valid(name).encoder_writes_this])
def test_encoder_writes_the_vector(name: str) -> None:
    data = golden.load_bytes("valid", name)
    ((message, sidecar),) = golden.read(golden.load_valid(name).sender, [data], FrameReader())

    assert not isinstance(message, UnknownMessage)
    assert encode_message(message, sidecar) == data


@pytest.mark.requirement("X48", "X50")
@pytest.mark.parametrize("name", INVALID)
@pytest.mark.parametrize("chunk_bytes", CHUNK_BYTES)
def test_invalid_vector_is_a_protocol_error(name: str, chunk_bytes: int) -> None:
    vector = golden.load_invalid(name)
    chunks = golden.chunked(golden.load_bytes("invalid", name), chunk_bytes)
    before: list[golden.Decoded] = []

    with pytest.raises(ProtocolError) as caught:
        before.extend(golden.read(vector.sender, chunks, FrameReader("exec-3")))

    assert str(caught.value).startswith(vector.error)
    assert vector.place in str(caught.value)
    assert len(before) == vector.frames_before


def set_fields(value: Any, seen: dict[str, set[str]]) -> None:
    """Add to `seen` the fields of each Struct in `value` that are not at their defaults."""
    if isinstance(value, msgspec.Struct):
        described = {
            field.name
            for field in msgspec.structs.fields(value)
            if field.required or getattr(value, field.name) != field.default
        }
        seen.setdefault(type(value).__name__, set()).update(described)
        for field in msgspec.structs.fields(value):
            set_fields(getattr(value, field.name), seen)
    elif isinstance(value, list):
        for item in value:
            set_fields(item, seen)


@pytest.mark.requirement("X78")
def test_vectors_set_every_field_of_every_message() -> None:
    seen: dict[str, set[str]] = {}
    for name in VALID:
        data = golden.load_bytes("valid", name)
        for message, _sidecar in golden.read(golden.load_valid(name).sender, [data], FrameReader()):
            if not isinstance(message, UnknownMessage):
                set_fields(message, seen)

    def walk(kind: Any) -> None:
        """Check `kind` and all Structs that its fields name."""
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            fields = msgspec.structs.fields(kind)
            assert {field.name for field in fields} == seen.get(kind.__name__), kind.__name__
            for field in fields:
                walk(field.type)
        else:
            for argument in get_args(kind):
                walk(argument)

    walk(WorkerMessage | ExecutorMessage)


@pytest.mark.requirement("X49")
def test_every_message_has_a_vector_with_only_what_it_must_hold() -> None:
    fewest: dict[str, int] = {}
    for name in VALID:
        for frame in golden.load_valid(name).frames:
            message = frame["message"]
            if "unknown" not in message:
                count = len(message.get("payload", {}))
                fewest[message["message_type"]] = min(count, fewest.get(message["message_type"], 99))

    required = {
        kind.__struct_config__.tag: sum(
            inner.required
            for field in msgspec.structs.fields(kind)
            if field.name == "payload"
            for inner in msgspec.structs.fields(field.type)
        )
        for kind in (*get_args(WorkerMessage), *get_args(ExecutorMessage))
    }
    assert fewest == required
