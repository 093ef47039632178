"""Frames at their limits: what no vector file should hold."""

from __future__ import annotations

import pytest
from msgspec import Raw

from callyard.errors import ProtocolError
from callyard.ids import CallId
from callyard.wire import frames
from callyard.wire.codec import decode_executor_message, encode_message
from callyard.wire.frames import FRAME_BYTES_MAX, FrameReader, encode_frame
from callyard.wire.messages import CallCompleted, CallCompletedPayload

OVER = "frame of 16777217 bytes exceeds frame_bytes_max=16777216 (peer)"


def completed(output: bytes) -> CallCompleted:
    return CallCompleted(CallId("run-1-0"), CallCompletedPayload(attempt_seq=1, output=Raw(output)))


def text_of_size(size: int) -> bytes:
    """JSON text of `size` bytes that makes the frame's body of `completed` that long."""
    head_bytes = len(encode_message(completed(b'""'))) - frames.LENGTH_BYTES - 2
    return b'"' + b"x" * (size - head_bytes - 2) + b'"'


@pytest.mark.requirement("X48")
def test_frame_at_the_cap_passes_both_sides() -> None:
    frame = encode_message(completed(text_of_size(FRAME_BYTES_MAX)))

    (body,) = FrameReader().feed(frame)
    message, sidecar = decode_executor_message(body)

    assert len(body) == FRAME_BYTES_MAX
    assert isinstance(message, CallCompleted)
    assert sidecar is None


@pytest.mark.requirement("X48")
def test_frame_over_the_cap_is_refused_by_the_sender() -> None:
    with pytest.raises(ProtocolError) as caught:
        encode_message(completed(text_of_size(FRAME_BYTES_MAX + 1)))
    assert str(caught.value) == OVER


@pytest.mark.requirement("X48")
def test_sidecar_counts_in_the_cap() -> None:
    room = FRAME_BYTES_MAX - frames.SIDECAR_HEAD_BYTES - 2

    (body,) = FrameReader().feed(encode_frame(b"{}", bytes(room)))
    assert len(body) == FRAME_BYTES_MAX

    with pytest.raises(ProtocolError) as caught:
        encode_frame(b"{}", bytes(room + 1))
    assert str(caught.value) == OVER


@pytest.mark.requirement("X48")
def test_empty_body_is_refused_by_the_sender() -> None:
    with pytest.raises(ProtocolError, match="frame of 0 bytes: expected a JSON body"):
        encode_frame(b"")


@pytest.mark.requirement("X48", "X50")
def test_impossible_length_is_refused_before_anything_is_kept() -> None:
    reader = FrameReader("exec-3")
    for byte in (FRAME_BYTES_MAX + 1).to_bytes(4, "big")[:3]:
        assert list(reader.feed(bytes([byte]))) == []

    with pytest.raises(ProtocolError, match=r"exceeds frame_bytes_max=16777216 \(exec-3\)"):
        list(reader.feed(b"\x01"))
    assert reader.pending_bytes == 0


@pytest.mark.requirement("X48")
def test_chunks_of_a_large_frame_are_kept_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    unpack = frames._unpack_length

    def counted(data: bytes, offset: int) -> tuple[int, ...]:
        nonlocal looks
        looks += 1
        return unpack(data, offset)

    monkeypatch.setattr(frames, "_unpack_length", counted)
    frame = encode_frame(b"x" * FRAME_BYTES_MAX)
    reader = FrameReader()

    bodies = [body for start in range(0, len(frame), 4096) for body in reader.feed(frame[start : start + 4096])]

    assert bodies == [frame[frames.LENGTH_BYTES :]]
    assert looks == 2  # the first chunk's, and the one that makes it whole; each look may copy what is pending


@pytest.mark.requirement("X48")
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bodies_stay_when_the_read_buffer_is_used_again(kind: type) -> None:
    buffer = bytearray(encode_frame(b'{"a":1}') + encode_frame(b'{"b":2}'))
    bodies = list(FrameReader().feed(kind(buffer)))
    buffer[:] = bytes(len(buffer))
    assert bodies == [b'{"a":1}', b'{"b":2}']
