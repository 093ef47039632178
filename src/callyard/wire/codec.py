"""Messages to frames and back.

Decoding is strict about what a message must hold and lenient about what it may hold besides: a missing or
wrongly typed field is a `ProtocolError`, an unknown field is ignored, an unknown message type comes back as
`UnknownMessage` so that the reader can count and drop it. Source: call-execution X48-X50, X78.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeVar, get_args

import msgspec

from callyard.errors import ProtocolError
from callyard.wire.frames import encode_frame, split_body
from callyard.wire.messages import ExecutorMessage, WorkerMessage

T = TypeVar("T")

_ENCODER: Final = msgspec.json.Encoder()
_WORKER_DECODER: Final[msgspec.json.Decoder[WorkerMessage]] = msgspec.json.Decoder(WorkerMessage)
_EXECUTOR_DECODER: Final[msgspec.json.Decoder[ExecutorMessage]] = msgspec.json.Decoder(ExecutorMessage)
_CAUSE_CHARS_MAX: Final = 300
"""A cause may quote what the peer sent, and a peer may send 16 MiB of it."""


class UnknownMessage(msgspec.Struct, frozen=True, gc=False):
    """A well-formed envelope of a type that this version does not know."""

    message_type: Annotated[str, msgspec.Meta(max_length=128)]
    call_id: str = ""
    request_id: str = ""


_ENVELOPE_DECODER: Final = msgspec.json.Decoder(UnknownMessage)
_KNOWN_TYPES: Final = frozenset(
    member.__struct_config__.tag for member in (*get_args(WorkerMessage), *get_args(ExecutorMessage))
)


def encode_message(message: WorkerMessage | ExecutorMessage, sidecar: bytes | None = None) -> bytes:
    """One whole frame. Raises `ProtocolError` when the frame would exceed the cap, or a text in it has no UTF-8."""
    try:
        body = _ENCODER.encode(message)
    except UnicodeEncodeError as error:
        raise ProtocolError(f"a text that UTF-8 cannot carry: {error}") from error
    return encode_frame(body, sidecar)


def decode_worker_message(body: bytes) -> tuple[WorkerMessage | UnknownMessage, bytes | None]:
    """What a worker sent: the message and its sidecar. Raises `ProtocolError`."""
    return _decode(_WORKER_DECODER, body)


def decode_executor_message(body: bytes) -> tuple[ExecutorMessage | UnknownMessage, bytes | None]:
    """What an executor sent: the message and its sidecar. Raises `ProtocolError`."""
    return _decode(_EXECUTOR_DECODER, body)


def _decode(decoder: msgspec.json.Decoder[T], body: bytes) -> tuple[T | UnknownMessage, bytes | None]:
    json_part, sidecar = split_body(body)
    try:
        if not json_part.isascii():
            json_part.decode()  # a Raw is passed on unread: bytes that are not UTF-8 must stop here
        return decoder.decode(json_part), sidecar
    except UnicodeDecodeError as error:
        raise _malformed(body, error) from error
    except (msgspec.DecodeError, RecursionError) as error:
        unknown = _decode_unknown(json_part)
        if unknown is not None:
            return unknown, sidecar
        raise _malformed(body, error) from error


def _malformed(body: bytes, cause: Exception) -> ProtocolError:
    return ProtocolError(f"malformed message of {len(body)} bytes: {str(cause)[:_CAUSE_CHARS_MAX]}")


def _decode_unknown(json_part: bytes) -> UnknownMessage | None:
    try:
        envelope = _ENVELOPE_DECODER.decode(json_part)
    except (msgspec.DecodeError, RecursionError):
        return None
    return None if envelope.message_type in _KNOWN_TYPES else envelope
