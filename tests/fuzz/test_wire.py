"""Any bytes are accepted or raise ProtocolError, and nothing else: from nothing, and from vectors gone wrong.

`HYPOTHESIS_PROFILE=long` makes it look much longer, and elsewhere each time.
"""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from callyard.errors import ProtocolError
from callyard.wire.codec import UnknownMessage, encode_message
from callyard.wire.frames import FrameReader, encode_frame
from tests.wire.golden import DECODERS, load_bytes, names, read

SENDERS = st.sampled_from(sorted(DECODERS))
SEEDS = [load_bytes(folder, name) for folder in ("valid", "invalid") for name in names(folder)]
PIECES = [
    *(b"BXB1", b"\x00", b"\xff\xff\xff\xff", b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\", b"\\u", b"\xc3", b"-"),
    *(b"null", b"1e309", b"NaN", b"true", b"{}", b'"payload":', b'"message_type":"', b"9" * 40, b"[" * 2_000),
]


def check(sender: str, data: bytes) -> None:
    """Read `data` as a connection would: until it ends, or breaks the protocol."""
    problem = "none"
    try:
        for message, sidecar in read(sender, [data], FrameReader()):
            assert isinstance(message, UnknownMessage) or encode_message(message, sidecar)
    except ProtocolError as error:
        problem = str(error)
    assert 0 < len(problem) < 500


@pytest.mark.requirement("X48", "X50")
@given(SENDERS, st.binary(max_size=300))
def test_any_stream(sender: str, data: bytes) -> None:
    check(sender, data)


@pytest.mark.requirement("X48", "X50")
@given(SENDERS, st.binary(min_size=1, max_size=300) | st.lists(st.sampled_from(PIECES), min_size=1).map(b"".join))
@example("executor", b"BXB1\x00\x00\x00\x02{}")
def test_any_body(sender: str, body: bytes) -> None:
    check(sender, encode_frame(body))


@st.composite
def mutated_vectors(draw: st.DrawFn) -> bytes:
    """A vector with some bytes changed, cut out, doubled or put in; its length prefix mended half of the time."""
    data = bytearray(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(len(data), start + 12)))
        data[start:end] = draw(st.binary(max_size=4) | st.sampled_from([*PIECES, bytes(data[start:end]) * 2]))
    if draw(st.booleans()) and len(data) > 4:
        data[:4] = (len(data) - 4).to_bytes(4, "big")
    return bytes(data)


@pytest.mark.requirement("X48", "X50")
@given(SENDERS, mutated_vectors())
def test_vectors_gone_wrong(sender: str, data: bytes) -> None:
    check(sender, data)
