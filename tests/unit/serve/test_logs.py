"""What a server logs: one line a record, its own fields, no secrets, and nobody who logs ever waits."""

from __future__ import annotations

import io
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import pytest

from callyard.dispatch.events import DispatchEvent
from callyard.errors import ErrorKind, Outcome
from callyard.ids import CallId, ExecutorId, Tenant
from callyard.serve.logs import LogFormat, Logs, choose_format, mask_text, show_time
from tests.unit.serve.fakes_ops import opened_server


class Written:
    def __init__(self) -> None:
        self.file = io.BytesIO()

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file.getvalue().splitlines()]


@contextmanager
def logging_to(form: LogFormat = "json", level: str = "info") -> Iterator[tuple[Logs, Written]]:
    """What was logged inside is written after it."""
    written = Written()
    logs = Logs(form, level, write=lambda data: written.file.write(data) and None)
    logs.open()
    try:
        yield logs, written
    finally:
        assert logs.close(30)


def test_a_record_is_one_line_of_json() -> None:
    with logging_to() as (_, written):
        logging.getLogger("callyard.serve").warning(
            "line one\nline two %d", 7, extra={"call_id": "c1", "tool": "add", "tenant": "acme", "port": 8_700}
        )
        logging.getLogger("callyard.serve").info("later")
    first, second = written.lines()
    assert list(first) == ["time", "level", "logger", "message", "call_id", "tool", "tenant", "fields"]
    assert (first["level"], first["logger"], first["message"]) == ("warning", "callyard.serve", "line one\nline two 7")
    assert (first["call_id"], first["tool"], first["tenant"], first["fields"]) == ("c1", "add", "acme", {"port": 8_700})
    assert list(second) == ["time", "level", "logger", "message"]
    at = datetime.fromisoformat(first["time"])
    assert first["time"].endswith("Z")
    assert abs(at.timestamp() - time.time()) < 600


def test_times_are_rfc_3339() -> None:
    assert show_time(1_796_040_517.25) == "2026-11-30T12:08:37.250Z"
    assert show_time(0.0) == "1970-01-01T00:00:00.000Z"


@pytest.mark.requirement("D29")
async def test_one_line_for_each_call_and_no_arguments() -> None:
    with logging_to() as (logs, written):
        async with opened_server() as server:
            server.gateway.subscribe(logs)
            await server.call("add", {"a": 31_337, "b": 2})
            await server.call("fail")
            await server.call("nothing of the kind")
    calls = [line for line in written.lines() if line["logger"] == "callyard.calls"]
    assert [(line["message"], line["level"], line["tool"]) for line in calls] == [
        ("dispatch.success", "info", "add"),
        ("dispatch.error", "error", "fail"),
        ("dispatch.error", "warning", "nothing of the kind"),
    ]
    assert all(line["tenant"] == "default" and line["call_id"] for line in calls)
    assert calls[1]["fields"]["kind"] == "tool_error"
    assert calls[0]["fields"]["attempt"] == 1
    assert b"31337" not in written.file.getvalue()


async def test_at_level_debug_every_step_of_a_call_and_at_error_only_failures() -> None:
    for level, count in (("debug", 3), ("error", 0)):
        with logging_to(level=level) as (logs, written):
            async with opened_server() as server:
                server.gateway.subscribe(logs)
                await server.call("add", {"a": 1, "b": 2})
        assert len([line for line in written.lines() if line["logger"] == "callyard.calls"]) == count


def test_secrets_are_masked() -> None:
    with logging_to() as (_, written):
        logging.getLogger("callyard.x").error(
            "sent Authorization: Bearer abcdefgh12345678 to https://me:hunter2@db.example/x with cy_%s",
            "s" * 43,
            extra={
                "password": "hunter2",
                "headers": {"X-Api-Key": "hunter2", "accept": "json"},
                "pairs": [{"name": "Cookie", "value": "hunter2"}],
                "input_tokens": 5,
                "url": "redis://:hunter2@cache:6379",
            },
        )
    (line,) = written.lines()
    assert "hunter2" not in json.dumps(line)
    assert line["message"] == "sent Authorization: Bearer *** to https://***@db.example/x with ***"
    assert line["fields"]["headers"] == {"X-Api-Key": "***", "accept": "json"}
    assert line["fields"]["input_tokens"] == 5


def test_text_without_secrets_stays_as_it_is() -> None:
    for text in ("the bearer of news", "http://127.0.0.1:8700/mcp", "cy_short", "a@b.example"):
        assert mask_text(text) == text


def test_an_exception_has_its_stack_masked_and_bounded() -> None:
    with logging_to() as (_, written):
        try:
            raise ValueError("Bearer abcdefgh12345678")
        except ValueError:
            logging.getLogger("callyard.x").exception("it failed")
    (line,) = written.lines()
    assert line["stack"].splitlines()[-1] == "ValueError: Bearer ***"


def test_whatever_a_record_is_given_becomes_a_line() -> None:
    cyclic: dict[str, Any] = {}
    cyclic["self"] = cyclic
    with logging_to() as (_, written):
        log = logging.getLogger("callyard.x")
        log.error("wrong %d", "format")
        log.error("odd", extra={"cyclic": cyclic, "nan": float("nan"), "object": object(), "numbers": {1: b"\xff"}})
        log.error("long %s", "x" * 100_000, extra={"many": list(range(10_000)), "half": "\ud800"})
    wrong, odd, long = written.lines()
    assert wrong["message"].startswith("wrong %d (cannot be formatted")
    assert odd["fields"]["nan"] is None
    assert len(json.dumps(long)) < 20_000


def test_text_is_one_line_for_people() -> None:
    event = DispatchEvent(
        "dispatch.error", 5, "charge", call_id=CallId("c1"), tenant=Tenant("acme"), duration_ms=12, attempt=1,
        kind=ErrorKind.CRASHED, outcome=Outcome.UNKNOWN, message="exec-1 exited\nwith status 3",
    )  # fmt: skip
    with logging_to("text") as (logs, written):
        logs(event)
        logs.say("stopping")
        logs.say_output(ExecutorId("exec-2"), "printed \x1b[31mred")
    called, said, printed = written.file.getvalue().decode().splitlines()
    assert called.split(" ", 1)[1] == (
        "error dispatch.error tool=charge call_id=c1 tenant=acme attempt=1 duration_ms=12 kind=crashed outcome=unknown"
        ' error="exec-1 exited\\nwith status 3"'
    )
    assert said.endswith(" info callyard.serve: stopping")
    assert printed.startswith("exec-2 | printed ")
    assert "\x1b" not in printed


def test_text_where_a_person_reads_and_json_where_not() -> None:
    assert (choose_format(None, is_terminal=True), choose_format(None, is_terminal=False)) == ("text", "json")
    assert (choose_format("json", is_terminal=True), choose_format("text", is_terminal=False)) == ("json", "text")


def test_logging_is_as_it_was_afterwards() -> None:
    root, ours = logging.getLogger(), logging.getLogger("callyard")
    before = (list(root.handlers), root.level, ours.level)
    with logging_to(level="debug") as (logs, _):
        assert root.handlers != before[0]
    assert (list(root.handlers), root.level, ours.level) == before
    logs.close()


def test_libraries_are_heard_from_warnings_on() -> None:
    with logging_to(level="debug") as (_, written):
        logging.getLogger("elsewhere").info("chatter")
        logging.getLogger("elsewhere").warning("heard")
        logging.getLogger("callyard.x").debug("ours")
    assert [line["message"] for line in written.lines()] == ["heard", "ours"]


@pytest.mark.requirement("D54")
def test_nobody_waits_for_a_reader_and_what_is_dropped_is_counted() -> None:
    released, blocked = threading.Event(), threading.Event()

    def write(data: bytes) -> None:
        blocked.set()
        released.wait(60)

    logs = Logs("json", write=write, lines_max=10)
    logs.say("the first is being written")
    assert blocked.wait(30)
    for number in range(100):
        logs.say(f"line {number}")
    assert logs.dropped == 91
    assert not logs.close(0.05), "and the end waits so long only"
    released.set()
    assert logs.close(30)


def test_a_reader_that_has_gone_ends_nothing() -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    logs = Logs("json", write=lambda data: os.write(theirs, data) and None)
    logs.open()
    logging.getLogger("callyard.x").error("nobody reads this")
    assert logs.writer.flush(30)
    assert logs.dropped >= 1
    logs.close(30)
    os.close(theirs)
