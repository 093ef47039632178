"""Every message survives the wire, however the bytes are cut."""

from __future__ import annotations

import types
from enum import Enum
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from callyard.errors import ProtocolError
from callyard.wire.codec import UnknownMessage, encode_message
from callyard.wire.frames import FrameReader, encode_frame
from callyard.wire.messages import ExecutorMessage, WorkerMessage
from tests.wire.golden import DECODERS, Message, read

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def raw_json(draw: st.DrawFn) -> msgspec.Raw:
    """JSON text with spacing that no encoder of ours would write."""
    text = msgspec.json.format(msgspec.json.encode(draw(VALUES)), indent=draw(st.sampled_from([-1, 0, 1, 3])))
    return msgspec.Raw(text)


def strategy_for(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type, from the bounds that the type itself declares."""
    origin, arguments = get_origin(kind), get_args(kind)
    if hasattr(kind, "__supertype__"):
        return strategy_for(kind.__supertype__)
    if origin is Annotated:
        meta = arguments[1]
        if meta.ge is not None:
            return st.integers(meta.ge, meta.le)
        return strategy_for(arguments[0]).filter(lambda value: len(value) >= meta.min_length)
    if origin in (Union, types.UnionType):
        return st.one_of([strategy_for(argument) for argument in arguments])
    if origin is list:
        return st.lists(strategy_for(arguments[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(strategy_for(arguments[0]), strategy_for(arguments[1]), max_size=3)
    if kind is Any:
        return VALUES
    if kind is msgspec.Raw:
        return raw_json()
    if isinstance(kind, type) and issubclass(kind, Enum):
        return st.sampled_from(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return st.deferred(
            lambda: st.builds(kind, **{field.name: strategy_for(field.type) for field in msgspec.structs.fields(kind)})
        )
    return {str: TEXT, bool: st.booleans(), type(None): st.none()}[kind]


MESSAGES = st.tuples(st.just("worker"), strategy_for(WorkerMessage)) | st.tuples(
    st.just("executor"), strategy_for(ExecutorMessage)
)
SIDECARS = st.none() | st.binary(max_size=40)


@st.composite
def streams(draw: st.DrawFn) -> tuple[str, list[tuple[Message, bytes | None]], bytes]:
    sender = draw(st.sampled_from(["worker", "executor"]))
    messages = strategy_for(WorkerMessage if sender == "worker" else ExecutorMessage)
    sent = draw(st.lists(st.tuples(messages, SIDECARS), max_size=4))
    return sender, sent, b"".join(encode_message(message, sidecar) for message, sidecar in sent)


@st.composite
def cut(draw: st.DrawFn, data: bytes) -> list[bytes]:
    places = sorted(draw(st.lists(st.integers(0, len(data)), max_size=8)))
    return [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True)]


@pytest.mark.requirement("X48", "X49", "X78")
@given(MESSAGES, SIDECARS)
def test_message_comes_back_as_it_was_sent(sent: tuple[str, Message], sidecar: bytes | None) -> None:
    sender, message = sent
    assert not isinstance(message, UnknownMessage)
    frame = encode_message(message, sidecar)

    ((decoded, decoded_sidecar),) = read(sender, [frame], FrameReader())

    assert decoded == message
    assert decoded_sidecar == sidecar
    assert not isinstance(decoded, UnknownMessage)
    assert encode_message(decoded, sidecar) == frame


@pytest.mark.requirement("X48")
@given(st.data(), streams())
def test_every_cut_of_a_stream_gives_the_same_messages(
    data: st.DataObject, stream: tuple[str, list[tuple[Message, bytes | None]], bytes]
) -> None:
    sender, sent, whole = stream
    reader = FrameReader()
    assert list(read(sender, data.draw(cut(whole)), reader)) == sent
    assert reader.pending_bytes == 0


def frames_until_error(chunks: list[bytes]) -> tuple[list[bytes], str, int]:
    reader, bodies, error = FrameReader(), [], ""
    try:
        for chunk in chunks:
            for body in reader.feed(chunk):
                bodies.append(body)
    except ProtocolError as caught:
        error = str(caught)
    return bodies, error, 0 if error else reader.pending_bytes


@pytest.mark.requirement("X48", "X50")
@given(st.data(), st.lists(st.binary(min_size=1, max_size=9).map(encode_frame), max_size=4), st.binary(max_size=12))
def test_every_cut_of_any_bytes_gives_the_same_frames_and_the_same_error(
    data: st.DataObject, frames: list[bytes], junk: bytes
) -> None:
    whole = b"".join(frames) + junk
    assert frames_until_error(data.draw(cut(whole))) == frames_until_error([whole])


@pytest.mark.requirement("X49")
@given(MESSAGES, st.dictionaries(TEXT.map("x_{}".format), VALUES, min_size=1, max_size=3))
def test_unknown_fields_change_nothing(sent: tuple[str, Message], extra: dict[str, Any]) -> None:
    sender, message = sent
    decode = DECODERS[sender]
    assert not isinstance(message, UnknownMessage)
    body = encode_message(message)[4:]
    more = msgspec.json.encode(extra)[:-1] + b"," + body[1:]
    if b'"payload":{' in more and not body.endswith(b'"payload":{}}'):
        more = more.replace(b'"payload":{', b'"payload":' + msgspec.json.encode(extra)[:-1] + b",", 1)
    assert decode(more) == (message, None)
