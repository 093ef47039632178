"""What one call tells, cut in the middle (X79)."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import Raw

from callyard.executor.capture import HEAD_BYTES, TAIL_BYTES, Entry, Told
from callyard.executor.contexts import Call
from callyard.ids import CallId, Digest, FunctionId, TaskId
from callyard.wire.codec import decode_executor_message
from callyard.wire.messages import CallEvent, CallEventKind, CallEventPayload, ExecuteCallPayload

CALL = Call(CallId("c"), ExecuteCallPayload(TaskId("t"), FunctionId("f"), Digest("d"), 3, Raw(b"[]")), -1, 0)


def printed(text: str, stream: str = "stdout") -> Entry:
    return Entry(CallEventKind.OUTPUT, stream, text.encode())


def logged(text: str) -> Entry:
    return Entry(CallEventKind.LOG, "info", text.encode())


def take(told: Told, *, at_end: bool) -> list[CallEventPayload]:
    found = []
    for frame in told.take(CALL, at_end=at_end):
        message, _ = decode_executor_message(frame[4:])
        assert isinstance(message, CallEvent)
        assert (message.call_id, message.payload.attempt_seq, message.payload.task_id) == ("c", 3, "t")
        found.append(message.payload)
    return found


@pytest.mark.requirement("X58")
def test_writes_to_one_stream_become_one_event() -> None:
    told = Told(0)
    for text in ("a", "b", "\n"):
        assert told.add(printed(text))
    told.add(printed("!", "stderr"))
    told.add(printed("c"))
    assert [(one.level, one.text) for one in take(told, at_end=False)] == [
        ("stdout", "ab\n"),
        ("stderr", "!"),
        ("stdout", "c"),
    ]
    assert take(told, at_end=True) == []


@pytest.mark.requirement("X79")
def test_head_and_tail_and_what_was_cut_between() -> None:
    told = Told(0)
    text = "".join(f"{n:07}\n" for n in range(20_000))
    for start in range(0, len(text), 1000):
        told.add(printed(text[start : start + 1000]))
    head = "".join(one.text for one in take(told, at_end=False))
    (tail,) = take(told, at_end=True)
    assert head == text[:HEAD_BYTES]
    assert tail.text == text[-TAIL_BYTES:]
    assert tail.cut_count == len(text) - HEAD_BYTES - TAIL_BYTES


@pytest.mark.requirement("X79")
def test_one_write_larger_than_everything() -> None:
    told = Told(0)
    told.add(printed("a" * 100 + "b" * 200_000 + "c" * 100))
    head, tail = take(told, at_end=True)
    assert (len(head.text), len(tail.text)) == (HEAD_BYTES, TAIL_BYTES)
    assert (head.text[:101], tail.text[-101:]) == ("a" * 100 + "b", "b" + "c" * 100)
    assert tail.cut_count == 200_200 - HEAD_BYTES - TAIL_BYTES


@pytest.mark.requirement("X79")
def test_a_cut_never_leaves_half_a_character() -> None:
    told = Told(0)
    told.add(printed("x" + "é" * 100_000))
    head, tail = take(told, at_end=True)
    assert set(head.text) == {"x", "é"}
    assert set(tail.text) == {"é"}


@pytest.mark.requirement("X79")
def test_log_entries_are_cut_whole() -> None:
    told = Told(0)
    for n in range(5000):
        told.add(logged(str(n)))
    payloads = take(told, at_end=True)
    numbers = [int(one.text) for one in payloads]
    gap = next(i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1] + 1)
    assert numbers == [*range(gap), *range(numbers[gap], 5000)]
    assert [i for i, one in enumerate(payloads) if one.cut_count] == [gap]
    assert len(numbers) * 64 < HEAD_BYTES + TAIL_BYTES


@pytest.mark.requirement("X79")
def test_the_latest_progress_comes_first() -> None:
    told = Told(0)
    told.add(printed("a"))
    told.progress = (1, None, "")
    told.progress = (2, 4, "half")
    first, second = take(told, at_end=False)
    assert first.event_kind is CallEventKind.PROGRESS
    assert msgspec.json.decode(first.value) == {"done": 2, "total": 4, "message": "half"}
    assert second.text == "a"
    assert take(told, at_end=True) == []
