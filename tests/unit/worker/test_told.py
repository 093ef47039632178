"""What is kept of what calls tell, and what a result takes along."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from callyard.errors import ErrorKind, ProtocolError, fail
from callyard.scheduler import CallResult
from callyard.wire.messages import NULL, CallEventKind, CallEventPayload
from callyard.worker.outputs import format_line, format_line_with_printed
from callyard.worker.results import (
    CAPTURE_BYTES_MAX,
    TAIL_BYTES_MAX,
    TAIL_LINES,
    TOLD_BYTES_MAX,
    CallEvent,
    Printed,
    Result,
    ToldCalls,
)


def output(text: str, cut_count: int = 0) -> CallEventPayload:
    return CallEventPayload(1, CallEventKind.OUTPUT, level="stdout", text=text, cut_count=cut_count)


def logged(text: str, level: str = "info", **fields: Any) -> CallEventPayload:
    value = msgspec.Raw(msgspec.json.encode(fields)) if fields else NULL
    return CallEventPayload(1, CallEventKind.LOG, value=value, level=level, text=text)


def ended(index: int, *, ok: bool = True) -> CallResult:
    return CallResult(index, b"1", None, 1) if ok else CallResult(index, None, fail(ErrorKind.INTERNAL, "no"), 1)


def attach(told: ToldCalls, result: CallResult) -> Result:
    [attached], _ = told.attach([result])
    return Result(attached)


@pytest.mark.requirement("X58")
def test_a_failed_call_has_its_last_lines_and_an_ok_one_nothing() -> None:
    told = ToldCalls(lambda _: None, capture=False)
    for index in range(2):
        told.hear(index, output("".join(f"line {number}\n" for number in range(30)) + "half"))
        told.hear(index, logged("low", "warning", row=7))
        told.hear(index, logged("from logging", "error", logger="mine"))
        told.hear(index, output(" a line\n"))
    ok, failed = attach(told, ended(0)), attach(told, ended(1, ok=False))
    assert (ok.printed, ok.tail, ok.unwrap()) == (None, (), 1)
    assert len(failed.tail) == TAIL_LINES
    assert failed.tail[-5:] == ("line 29", "half", "warning: low row=7", "error: from logging", " a line")
    assert failed.printed is not None
    assert failed.printed.cut_bytes == len("".join(f"line {number}\n" for number in range(14)))
    assert told.held_bytes == 0
    assert attach(told, ended(2, ok=False)).printed is None, "it told nothing"


@pytest.mark.requirement("X58")
def test_capture_attaches_all_with_the_cuts_marked_and_counted() -> None:
    told = ToldCalls(None, capture=True)
    assert told.wanted
    told.hear(0, output("head"))
    told.hear(0, output("tail\n", cut_count=1_234))
    printed = attach(told, ended(0)).printed
    assert printed == Printed("head\n[1,234 bytes cut]\ntail\n", 1_234)
    for _ in range(300):
        told.hear(1, output("x" * 1_023 + "\n"))
    long = attach(told, ended(1)).printed
    assert long is not None
    cut = 300 * 1_024 - CAPTURE_BYTES_MAX
    assert long == Printed(f"[{cut:,} bytes cut]\n" + ("x" * 1_023 + "\n") * 64, cut)


@pytest.mark.requirement("X79")
def test_what_is_held_is_bounded_by_call_and_by_task() -> None:
    told = ToldCalls(lambda _: None, capture=False)
    for _ in range(10_000):
        told.hear(0, output("flood " * 100))
    assert told.held_bytes <= 2 * TAIL_BYTES_MAX
    told = ToldCalls(None, capture=True)
    for index in range(2_000):
        told.hear(index, output(f"{index:05} " * 10_000))
        assert told.held_bytes <= TOLD_BYTES_MAX
    first, last = attach(told, ended(0)).printed, attach(told, ended(1_999)).printed
    assert first == Printed("[60,000 bytes cut]\n", 60_000), "the first to tell loses it, and it is counted"
    assert last == Printed("01999 " * 10_000)


@pytest.mark.requirement("X79")
def test_what_is_attached_counts_as_bytes_of_the_result() -> None:
    told = ToldCalls(None, capture=True)
    told.hear(3, output("12345"))
    results, added = told.attach([ended(2), ended(3)])
    assert (len(results), added) == (2, 5)
    assert told.attach([ended(4)]) == ([ended(4)], 0)


@pytest.mark.parametrize(
    ("text", "tail"),
    [("", ()), ("\n", ("",)), ("a", ("a",)), ("a\r\nb\n", ("a", "b")), (" 10%\r 90%\r100%\n", ("100%",))],
)
def test_the_tail_of_a_text(text: str, tail: tuple[str, ...]) -> None:
    assert Printed(text).tail == tail


async def test_a_listener_that_raises_is_told_of_and_costs_nothing() -> None:
    def listen(event: CallEvent) -> None:
        raise ValueError(event.text)

    seen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context))
    told = ToldCalls(listen, capture=True)
    told.hear(5, output("a\n"))
    assert [context["message"] for context in seen] == ["on_event failed for output of call 5"]
    assert attach(told, ended(5)).tail == ("a",)


@pytest.mark.requirement("X58")
def test_the_line_of_a_result_with_what_it_printed() -> None:
    told = ToldCalls(None, capture=True)
    told.hear(0, output('say "hi"\n'))
    told.hear(1, output("b", cut_count=3))
    results, _ = told.attach([ended(0), ended(1, ok=False), ended(2)])
    lines = [msgspec.json.decode(format_line_with_printed(result)) for result in results]
    assert lines[0] == {"index": 0, "ok": True, "output": 1, "printed": 'say "hi"\n'}
    assert (lines[1]["ok"], lines[1]["printed"], lines[1]["cut_bytes"]) == (False, "[3 bytes cut]\nb", 3)
    assert format_line_with_printed(results[2]) == format_line(results[2])
    assert b"printed" not in format_line(results[0])


@pytest.mark.requirement("X49")
@pytest.mark.parametrize("text", [b"1e999", b"1" * 100_000])
def test_a_value_that_python_has_no_room_for_breaks_the_protocol(text: bytes) -> None:
    told = ToldCalls(lambda _: None, capture=False)
    with pytest.raises(ProtocolError, match="an event of a call: no JSON"):
        told.hear(0, CallEventPayload(1, CallEventKind.PROGRESS, value=msgspec.Raw(text)))
