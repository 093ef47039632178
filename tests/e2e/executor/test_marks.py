"""Begun or not: the mark page, the order of results and begins, and taking calls back (X62, X93)."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from callyard.errors import Outcome
from callyard.wire.messages import CallFailed, CancelReason
from tests.e2e.executor.driver import Driver, output_of

SOURCE = """
import os, time
from typing import Annotated
from pydantic import AfterValidator
from callyard.sdk import sleep

def note(path: str, text: str) -> str:
    with open(path, "a") as file:
        file.write(text + "\\n")
    return text

def note_then_die(path: str, text: str, last: str) -> str:
    note(path, text)
    if text == last:
        os.kill(os.getpid(), 9)
    return text

def hang(path: str) -> None:
    note(path, "begun")
    while True:
        pass

def read_page(path: str) -> list[int]:
    import struct
    with open(path, "rb") as file:
        data = file.read()
    return [n for n in struct.unpack(f"={len(data) // 8}Q", data) if n]

def checked(page: Annotated[str, AfterValidator(lambda page: str(read_page(page)))]) -> str:
    return page

def nap(seconds: float) -> None:
    sleep(seconds)

async def a_read_page(path: str) -> list[int]:
    return read_page(path)
"""
PLAIN = SOURCE.partition("async def")[0]


@pytest.mark.requirement("X62")
@pytest.mark.parametrize("function", ["read_page", "a_read_page", "checked"])
def test_mark_before_run(function: str) -> None:
    # A validator is the user's code too, so the mark is there before the arguments are looked at.
    with Driver(SOURCE, mark_slots=128) as driver:
        call = driver.make_call(function, str(driver.mark_file))
        driver.send(call)
        seen = output_of(driver.wait_end(call.call_id))
        assert str(call.payload.call_number) in str(seen)


@pytest.mark.requirement("X62")
def test_calls_that_wait_for_a_turn_are_not_marked(tmp_path: Path) -> None:
    with Driver(PLAIN, mark_slots=128) as driver:
        file = tmp_path / "log"
        hog = driver.make_call("hang", str(file))
        waiting = [driver.make_call("note", str(file), "no") for _ in range(20)]
        driver.send(hog, *waiting)
        driver.wait_file(file, "begun")
        assert [number for number in driver.marks() if number] == [hog.payload.call_number]


@pytest.mark.requirement("X62")
def test_unpromised_results_first(tmp_path: Path) -> None:
    """128 calls without a promise, SIGKILL in the middle of the 60th: exactly the last one is unaccounted for."""
    with Driver(PLAIN, mark_slots=128) as driver:
        file = tmp_path / "log"
        calls = [
            driver.make_call("note_then_die", str(file), f"call {i}", "call 60", idempotent=False)
            for i in range(1, 129)
        ]
        driver.send(*calls)
        while driver.pump(60):
            pass
        assert driver.wait_exit() == -signal.SIGKILL
        ran = file.read_text().split("\n")[:-1]
        assert ran == [f"call {i}" for i in range(1, 61)]
        answered = {call.call_id for call in calls if call.call_id in driver.ends}
        begun = {call.call_id for call in calls if call.payload.call_number in driver.marks()}
        assert answered == {call.call_id for call in calls[:59]}
        assert begun - answered == {calls[59].call_id}


@pytest.mark.requirement("X62")
def test_a_mark_outlives_its_result_in_the_buffer(tmp_path: Path) -> None:
    """Whenever the process dies: each call that ran is answered or marked. Promised results may lie in the buffer."""
    with Driver(PLAIN, mark_slots=128) as driver:
        file = tmp_path / "log"
        calls = [driver.make_call("note_then_die", str(file), f"call {i}", "call 50") for i in range(1, 101)]
        driver.send(*calls)
        while driver.pump(60):
            pass
        driver.wait_exit()
        ran = set(file.read_text().split("\n")[:-1])
        told = {
            f"call {i}"
            for i, call in enumerate(calls, 1)
            if call.call_id in driver.ends or call.payload.call_number in driver.marks()
        }
        assert ran == told


@pytest.mark.requirement("X62")
def test_more_calls_than_slots_are_handed_back() -> None:
    with Driver(PLAIN, mark_slots=2) as driver:
        first, second, third = [driver.start("nap", 1) for _ in range(3)]
        end = driver.wait_end(third)
        assert isinstance(end, CallFailed)
        assert end.payload.error_kind == "recalled"
        for call in (first, second):
            assert output_of(driver.wait_end(call)) is None
        # And slots come back: many more calls than slots, one after another.
        for _ in range(10):
            assert output_of(driver.run("nap", 0)) is None


@pytest.mark.requirement("X93")
def test_recall_takes_back_what_has_not_begun(tmp_path: Path) -> None:
    with Driver(PLAIN, mark_slots=128) as driver:
        file = tmp_path / "log"
        hog = driver.make_call("hang", str(file))
        queued = [driver.make_call("note", str(file), f"call {i}") for i in range(10)]
        driver.send(hog, *queued)
        driver.wait_file(file, "begun")
        for call in [hog, *queued[::2]]:
            driver.cancel(call.call_id, CancelReason.RECALL)
        for call in queued[::2]:
            end = driver.wait_end(call.call_id)  # while the other one runs
            assert isinstance(end, CallFailed)
            assert (end.payload.error_kind, end.payload.outcome) == ("recalled", Outcome.NOT_RUN)
            assert end.payload.attempt_seq == 1
        assert hog.call_id not in driver.ends
        driver.cancel(hog.call_id)
        for call in queued[1::2]:
            assert output_of(driver.wait_end(call.call_id))
        assert file.read_text().split("\n")[1:-1] == [f"call {i}" for i in range(1, 10, 2)]
        assert not {call.payload.call_number for call in queued[::2]} & set(driver.marks())
        # The same call may come again.
        again = driver.make_call("note", str(file), "again", call_id=queued[0].call_id, attempt_seq=2)
        del driver.ends[again.call_id]
        driver.send(again)
        assert output_of(driver.wait_end(again.call_id)) == "again"


@pytest.mark.requirement("X93")
def test_recall_of_what_has_begun_is_ignored() -> None:
    with Driver(SOURCE, mark_slots=8) as driver:
        execute = driver.make_call("nap", 0.5)
        call, call_number = execute.call_id, execute.payload.call_number
        driver.send(execute)
        driver.wait_until(lambda: call_number in driver.marks(), "mark")
        driver.cancel(call, CancelReason.RECALL)
        assert output_of(driver.wait_end(call)) is None


@pytest.mark.requirement("X93")
def test_recall_of_calls_that_wait_for_code() -> None:
    with Driver(PLAIN) as driver:
        driver.answer_code_requests = False
        first, second = driver.start("nap", 0), driver.start("nap", 0)
        driver.wait_until(lambda: driver.code_requests, "request for code")
        driver.cancel(first, CancelReason.RECALL)
        end = driver.wait_end(first)
        assert isinstance(end, CallFailed)
        assert end.payload.error_kind == "recalled"
        request = driver.code_requests[0]
        driver.answer_code(request.request_id, request.call_id)
        assert output_of(driver.wait_end(second)) is None


def test_the_page_is_the_workers_file_and_survives(tmp_path: Path) -> None:
    with Driver(PLAIN, mark_slots=4) as driver:
        call = driver.make_call("nap", 600, idempotent=False)
        driver.send(call)
        driver.wait_until(lambda: call.payload.call_number in driver.marks(), "mark")
        os.kill(driver.process.pid, signal.SIGKILL)
        driver.wait_exit()
        assert driver.marks().count(call.payload.call_number) == 1
