"""Loads the golden vectors, and puts decoded messages into the form that the vectors describe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Raw

from callyard.wire.codec import UnknownMessage, decode_executor_message, decode_worker_message
from callyard.wire.frames import FrameReader
from callyard.wire.messages import ExecutorMessage, WorkerMessage

FOLDER: Final = Path(__file__).parent / "vectors"

Message = WorkerMessage | ExecutorMessage | UnknownMessage
Decoded = tuple[Message, bytes | None]
DECODERS: Final[dict[str, Callable[[bytes], Decoded]]] = {
    "worker": decode_worker_message,
    "executor": decode_executor_message,
}


class ValidVector(msgspec.Struct, forbid_unknown_fields=True):
    sender: str
    encoder_writes_this: bool
    frames: list[dict[str, Any]]
    pending_bytes: int


class InvalidVector(msgspec.Struct, forbid_unknown_fields=True):
    sender: str
    error: str
    place: str
    frames_before: int


def names(folder: str) -> list[str]:
    return sorted(path.stem for path in (FOLDER / folder).glob("*.frames"))


def load_bytes(folder: str, name: str) -> bytes:
    return (FOLDER / folder / f"{name}.frames").read_bytes()


def load_valid(name: str) -> ValidVector:
    return msgspec.json.decode((FOLDER / "valid" / f"{name}.json").read_bytes(), type=ValidVector)


def load_invalid(name: str) -> InvalidVector:
    return msgspec.json.decode((FOLDER / "invalid" / f"{name}.json").read_bytes(), type=InvalidVector)


def read(sender: str, chunks: list[bytes], reader: FrameReader) -> Iterator[Decoded]:
    """Every message in `chunks`, which arrive one after another."""
    for chunk in chunks:
        for body in reader.feed(chunk):
            yield DECODERS[sender](body)


def chunked(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


def describe(message: Message) -> dict[str, Any]:
    """The decoded form: without fields at their defaults, each `Raw` as its text."""
    if isinstance(message, UnknownMessage):
        return {"unknown": msgspec.structs.asdict(message)}
    tag = message.__struct_config__.tag
    return {"message_type": tag, **_describe(message)}


def _describe(value: Any) -> Any:
    if isinstance(value, Raw):
        return {"raw": bytes(value).decode()}
    if isinstance(value, msgspec.Struct):
        return {
            field.name: _describe(getattr(value, field.name))
            for field in msgspec.structs.fields(value)
            if not _is_default(field, getattr(value, field.name))
        }
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: _describe(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_describe(item) for item in value]
    return value


def _is_default(field: msgspec.structs.FieldInfo, value: Any) -> bool:
    if field.default is not msgspec.NODEFAULT:
        return bool(value == field.default)
    return field.default_factory is not msgspec.NODEFAULT and bool(value == field.default_factory())
