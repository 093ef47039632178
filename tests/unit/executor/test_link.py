from __future__ import annotations

import _socket
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from callyard.errors import ProtocolError
from callyard.executor.link import FLUSH_BYTES, FLUSH_FRAMES, PEEK_BYTES, Link, LinkClosed
from callyard.executor.marks import NO_CALL, MarkPage
from callyard.ids import CallId, CallNumber
from callyard.wire.codec import decode_executor_message, encode_message
from callyard.wire.frames import FrameReader
from callyard.wire.messages import CallsSettled, CancelCall, CancelCallPayload, CancelReason, HeartbeatAck, SettledCall

CANCEL = encode_message(CancelCall(CallId("c-1"), CancelCallPayload(CancelReason.RECALL, 1)))
ACK = encode_message(HeartbeatAck())


class Ends(NamedTuple):
    worker: socket.socket
    link: Link
    marks: MarkPage


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    file = tmp_path / "marks"
    file.write_bytes(bytes(5 * 8))
    marks = MarkPage(os.open(file, os.O_RDWR))
    worker, theirs = socket.socketpair()
    raw = _socket.socket(fileno=theirs.detach())
    with worker:
        yield Ends(worker, Link(raw, marks), marks)
        raw.close()
    marks.close()


def received(worker: socket.socket) -> bytes:
    worker.setblocking(False)
    try:
        return worker.recv(1 << 20)
    except BlockingIOError:
        return b""


def test_everything_that_has_come_is_read(ends: Ends) -> None:
    assert ends.link.read(block=False) == []
    ends.worker.sendall(CANCEL * 2_000 + CANCEL[:10])
    messages: list[object] = []
    while len(messages) < 2_000:
        messages += ends.link.read(block=True)
    assert len(messages) == 2_000
    ends.worker.sendall(CANCEL[10:])
    assert len(ends.link.read(block=True)) == 1


@pytest.mark.requirement("X91")
@pytest.mark.parametrize(("run_ns", "run_us"), [((400, 1_700), 3), ((1, 0), 1), ((0, 0), 0)])
def test_ends_that_leave_together_tell_their_running_time_rounded_up(
    ends: Ends, run_ns: tuple[int, ...], run_us: int
) -> None:
    """None at all would say that others tell it."""
    for number, own_ns in enumerate(run_ns):
        ends.link.put_settled(SettledCall(CallId(f"c-{number}"), 1), number, own_ns)
    ends.link.flush()
    (body,) = FrameReader().feed(received(ends.worker))
    message, _ = decode_executor_message(body)
    assert isinstance(message, CallsSettled)
    assert (len(message.payload.calls), message.payload.run_us) == (len(run_ns), run_us)


def test_end_and_nonsense(ends: Ends) -> None:
    ends.worker.sendall(b"\0\0\0\0")
    with pytest.raises(ProtocolError):
        ends.link.read(block=True)
    assert not ends.link.is_gone()
    ends.worker.close()
    assert ends.link.is_gone()
    with pytest.raises(LinkClosed) as caught:
        ends.link.read(block=True)
    assert caught.value.clean


def test_frames_leave_together_at_a_flush(ends: Ends) -> None:
    ends.link.put(b"a")
    ends.link.put(b"b")
    assert received(ends.worker) == b""
    ends.link.unpromised_waiting = True
    ends.link.flush()
    assert received(ends.worker) == b"ab"
    assert not ends.link.unpromised_waiting


@pytest.mark.parametrize(("frame", "count"), [(b"x", FLUSH_FRAMES), (b"x" * (FLUSH_BYTES // 2 + 1), 2)])
def test_a_full_buffer_flushes_itself(ends: Ends, frame: bytes, count: int) -> None:
    for _ in range(count - 1):
        ends.link.put(frame)
    assert received(ends.worker) == b""
    ends.link.put(frame)
    assert received(ends.worker) == frame * count


def test_the_watch_threads_flush_leaves_the_order_to_the_hub(ends: Ends) -> None:
    # Only the hub may say that nothing without a promise waits: it alone adds to the buffer.
    ends.link.unpromised_waiting = True
    ends.link.put(b"a")
    ends.link.flush_late()
    assert received(ends.worker) == b"a"
    assert ends.link.unpromised_waiting


@pytest.mark.requirement("X62")
def test_a_slot_comes_back_with_the_flush_of_its_frame(ends: Ends) -> None:
    first, second = ends.marks.take(), ends.marks.take()
    assert {first, second} == {0, 1}
    assert ends.marks.take() is None
    assert first is not None
    ends.marks.mark(first, CallNumber(41))
    ends.link.put(b"end", first)
    assert ends.marks.take() is None
    ends.link.flush()
    third = ends.marks.take()
    assert third is not None
    assert third not in (first, second)  # its mark stays a while
    assert ends.marks.take() is None


@pytest.mark.requirement("X38")
def test_the_last_number_of_the_page_is_the_running_call_s(ends: Ends, tmp_path: Path) -> None:
    ends.marks.mark(1, CallNumber(41))
    ends.marks.set_running(CallNumber(42))
    assert struct.unpack("=5Q", (tmp_path / "marks").read_bytes()) == (0, 41, 0, 0, 42)
    ends.marks.set_running(NO_CALL)
    assert struct.unpack("=5Q", (tmp_path / "marks").read_bytes()) == (0, 41, 0, 0, 0)
    ends.marks.close()
    ends.marks.set_running(CallNumber(43))  # in a forked child: the page is its parent's
    assert struct.unpack("=5Q", (tmp_path / "marks").read_bytes()) == (0, 41, 0, 0, 0)


@pytest.mark.requirement("X54")
def test_only_what_may_be_a_cancellation_is_worth_a_signal(ends: Ends) -> None:
    assert not ends.link.has_cancel()
    ends.worker.sendall(ACK)
    assert not ends.link.has_cancel()
    ends.worker.sendall(CANCEL)
    assert ends.link.has_cancel()
    assert len(ends.link.read(block=False)) == 2
    assert not ends.link.has_cancel()
    # A frame of which a part has been read may be one, whatever its rest looks like.
    ends.worker.sendall(CANCEL[:40])
    assert ends.link.read(block=False) == []
    assert not ends.link.has_cancel()
    ends.worker.sendall(CANCEL[40:])
    assert ends.link.has_cancel()
    assert len(ends.link.read(block=False)) == 1
    # And so may what lies behind more than is looked at.
    ends.worker.sendall(ACK * (PEEK_BYTES // len(ACK) + 1))
    assert ends.link.has_cancel()
