"""What a call is told of its caller, and its caller of it: claims, headers, meta; log records."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from callyard import UsageError, log
from callyard.functions.ports import CallContext, CallEventKind, CallEventPayload, CallOutcome
from callyard.functions.registry import Registry
from callyard.testing.virtual_time import virtual_time
from tests.unit.dispatch.kit import FakeRunner, add, add_described, ending, make


@pytest.mark.requirement("X78")
@virtual_time
async def test_an_executor_is_told_claims_headers_and_meta() -> None:
    registry, worker = Registry(), FakeRunner()
    add_described(registry, worker, "tool", ending(b"1"))
    async with make(registry, worker=worker) as dispatcher:
        await dispatcher.dispatch("tool", claims={"sub": "a"}, headers={"x-y": "z"}, meta={"a": [1]})
        context = worker.contexts[0]
        assert (context.claims, context.headers) == ({"sub": "a"}, {"x-y": "z"})
        assert bytes(context.meta) == b'{"a":[1]}'


@pytest.mark.parametrize(
    "option", [{"claims": {"a": 1}}, {"headers": ["a"]}, {"meta": [1]}, {"meta": {"a": {1: "\ud800"}}}]
)
@virtual_time
async def test_what_cannot_be_handed_on_is_the_callers_mistake(option: Any) -> None:
    registry = Registry()
    add(registry, "tool", lambda arguments: 1)
    async with make(registry) as dispatcher:
        with pytest.raises(UsageError, match=next(iter(option))):
            await dispatcher.dispatch("tool", **option)


@virtual_time
async def test_what_a_handler_logs_goes_to_its_caller_else_to_logging(caplog: pytest.LogCaptureFixture) -> None:
    registry, told = Registry(), []

    async def tool(arguments: dict[str, Any]) -> None:
        log("no fuel left", "warning", row=7)

    add(registry, "tool", tool)
    async with make(registry) as dispatcher:
        await dispatcher.dispatch("tool", on_log=lambda *record: told.append(record))
        assert told == [("warning", "no fuel left", {"row": 7})]
        assert "no fuel" not in caplog.text
        await dispatcher.dispatch("tool")
        assert "no fuel left row=7" in caplog.text


@virtual_time
async def test_what_an_executor_tells_of_its_log_goes_to_the_caller() -> None:
    registry, worker, told = Registry(), FakeRunner(), []
    kinds = CallEventKind

    async def script(runner: FakeRunner, args: bytes, context: CallContext) -> CallOutcome:
        assert runner.on_event is not None
        for event in (
            CallEventPayload(1, kinds.LOG, value=msgspec.Raw(b'{"row":7}'), level="warning", text="no fuel"),
            CallEventPayload(1, kinds.LOG, level="info", text="plain"),
            CallEventPayload(1, kinds.LOG, value=msgspec.Raw(b"[]"), level="info", text="of another form"),
            CallEventPayload(1, kinds.OUTPUT, level="stdout", text="printed"),
        ):
            runner.on_event(event)
        return CallOutcome(b"1", None)

    add_described(registry, worker, "tool", script)
    async with make(registry, worker=worker) as dispatcher:
        await dispatcher.dispatch("tool", on_log=lambda *record: told.append(record))
        assert told == [("warning", "no fuel", {"row": 7}), ("info", "plain", {})]
        await dispatcher.dispatch("tool", on_progress=lambda *told: None)  # and nobody listens to the log
