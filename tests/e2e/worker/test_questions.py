"""A running call asks whoever made it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from callyard.errors import ErrorKind, Outcome
from callyard.functions.ports import AskCallback, AskRefused, CallOutcome, CancelReason
from callyard.ids import RequestId
from callyard.wire.messages import CallContext
from callyard.worker.worker import Worker
from tests.e2e.processes import WAIT_S

TARGET = Path(__file__).parents[1] / "asking_file.py"
_ANSWERS: dict[str, Mapping[str, Any]] = {
    "elicit": {"action": "accept", "content": {"name": "Ann", "size": "large"}},
    "sample": {"role": "assistant", "content": {"type": "text", "text": "Done."}, "model": "m"},
    "list_roots": {"roots": [{"uri": "file:///here"}]},
}


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    async with Worker(TARGET, executors=1) as worker:
        yield worker


async def run(
    worker: Worker, name: str, ask: AskCallback | None = None, context: CallContext | None = None
) -> CallOutcome:
    spec, release = worker.runner.pin(name)
    try:
        call = worker.runner.call(RequestId(name), spec, b"{}", budget_ms=10_000, context=context, on_ask=ask)
        return await asyncio.wait_for(call, WAIT_S)
    finally:
        release()


def value_of(outcome: CallOutcome) -> Any:
    assert outcome.output is not None, outcome.failure
    return json.loads(outcome.output)


async def test_a_person_fills_in_a_form(worker: Worker) -> None:
    asked: list[tuple[str, Mapping[str, Any]]] = []

    async def ask(kind: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        asked.append((kind, params))
        return _ANSWERS[kind]

    assert value_of(await run(worker, "order", ask)) == {"name": "Ann", "size": "LARGE", "type": "Order"}
    [(kind, params)] = asked
    assert (kind, params["message"]) == ("elicit", "What would you like?")
    fields = params["requestedSchema"]["properties"]
    assert list(fields) == ["name", "count", "size"], "as the class has them"
    assert [fields[name]["type"] for name in fields] == ["string", "integer", "string"]
    assert fields["size"]["enum"] == ["small", "large"], "a form has no references"


@pytest.mark.parametrize("action", ["decline", "cancel"])
async def test_a_person_says_no(worker: Worker, action: str) -> None:
    async def ask(kind: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"action": action}

    assert value_of(await run(worker, "order", ask)) == {"action": action}


async def test_an_answer_that_does_not_fit_is_a_failure(worker: Worker) -> None:
    async def ask(kind: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"action": "accept", "content": {"name": "Ann", "size": "huge"}}

    failure = (await run(worker, "order", ask)).failure
    assert failure is not None
    assert failure.details["cause"]["kind"] == ErrorKind.SCHEMA
    assert "size" in failure.message


async def test_questions_asked_together_are_open_together(worker: Worker) -> None:
    open_now: set[str] = set()
    all_open = asyncio.Event()

    async def ask(kind: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        open_now.add(kind)
        if len(open_now) == 3:
            all_open.set()
        await all_open.wait()
        if kind == "elicit":
            assert list(params["requestedSchema"]["properties"]) == ["z", "a"], "in the order that was given"
            return {"action": "accept", "content": {"z": "1"}}
        return _ANSWERS[kind]

    assert value_of(await run(worker, "everything", ask)) == [{"z": "1"}, "Done.", "m", ["file:///here"]]


@pytest.mark.requirement("X85")
async def test_what_a_person_takes_costs_no_budget(worker: Worker) -> None:
    async def ask(kind: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        await asyncio.sleep(0.3)  # longer than the whole budget, 200 ms
        return {"action": "accept", "content": {}}

    left_ms = value_of(await run(worker, "patient", ask))
    assert 0 < left_ms <= 150, "the sleep before was charged, the wait was not"


async def test_without_a_client_the_question_is_denied(worker: Worker) -> None:
    assert value_of(await run(worker, "refused")) == ErrorKind.DENIED


@pytest.mark.requirement("D38")
async def test_a_question_that_was_denied_and_not_caught_is_no_fault_of_the_function(worker: Worker) -> None:
    outcome = await run(worker, "trusting")
    assert outcome.failure is not None
    assert (outcome.failure.kind, outcome.failure.outcome) == (ErrorKind.DENIED, Outcome.RAN)
    assert "nobody to ask" in outcome.failure.message


async def test_a_client_that_cannot_be_asked(worker: Worker) -> None:
    async def ask(kind: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        raise AskRefused(ErrorKind.UNAVAILABLE, "it has left")

    assert value_of(await run(worker, "refused", ask)) == ErrorKind.UNAVAILABLE


async def test_a_question_ends_with_its_call(worker: Worker) -> None:
    asked, given_up = asyncio.Event(), asyncio.Event()

    async def ask(kind: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()
        raise AssertionError

    running = asyncio.create_task(run(worker, "order", ask))
    await asyncio.wait_for(asked.wait(), WAIT_S)
    assert worker.runner.cancel(RequestId("order"), CancelReason.CANCELLED)
    failure = (await running).failure
    assert failure is not None
    assert failure.kind is ErrorKind.CANCELLED
    await asyncio.wait_for(given_up.wait(), WAIT_S)


async def test_what_a_call_knows_of_its_request(worker: Worker) -> None:
    context = CallContext(claims={"role": "admin"}, headers={"x-team": "b"}, meta=msgspec.Raw(b'{"a":[1]}'))
    assert value_of(await run(worker, "about", context=context)) == {
        "claims": {"role": "admin"},
        "headers": {"x-team": "b"},
        "meta": {"a": [1]},
    }
