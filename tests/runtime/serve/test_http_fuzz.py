"""The OpenAPI document against the server that gave it: whatever fits is answered as described, whatever does not is
refused, and no request brings the server down."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import pytest
import schemathesis
from annotated_types import Ge, Le, MaxLen
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from callyard.errors import ToolError
from callyard.functions.registry import Registry

from .http_world import World, served

EXAMPLES = 40
"""Of each tool and mode."""


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Node:
    name: Annotated[str, MaxLen(20)]
    children: list[Node]
    colour: Colour = Colour.RED


def tools() -> Registry:
    registry = Registry()

    @registry.tool(idempotent=True)
    async def add(a: int, b: int = 1) -> int:
        return a + b

    @registry.tool()
    async def bounded(
        n: Annotated[int, Ge(0), Le(10)], text: Annotated[str, MaxLen(5)] | None = None
    ) -> dict[str, int]:
        return {"n": n}

    @registry.tool()
    async def grow(root: Node, ratio: float = 0.5) -> Node:
        return root

    @registry.tool(name="with.dots-1")
    async def dotted(values: list[str | int], by_name: dict[str, bool] | None = None) -> list[str | int]:
        return values

    @registry.tool()
    async def refuses(why: str) -> None:
        raise ToolError(why)

    return registry


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """A server on a loop of its own, since the client that fuzzes is a blocking one."""
    started: Future[World] = Future()
    stop: Future[asyncio.Event] = Future()

    async def serve() -> None:
        event = asyncio.Event()
        stop.set_result(event)
        try:
            async with served(tools()) as one:
                started.set_result(one)
                await event.wait()
        except BaseException as error:
            if not started.done():
                started.set_exception(error)
            raise

    failures: list[BaseException] = []

    def run() -> None:
        try:
            with asyncio.Runner() as runner:
                loops.set_result(runner.get_loop())
                runner.run(serve())
        except BaseException as error:  # noqa: BLE001 - told to the test below
            failures.append(error)

    loops: Future[asyncio.AbstractEventLoop] = Future()
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield started.result(30)
    finally:
        loops.result(30).call_soon_threadsafe(stop.result(30).set)
        thread.join(30)
    assert not thread.is_alive()
    assert failures == []


@pytest.mark.slow
@pytest.mark.requirement("D36", "D23", "D24")
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("tool", ["add", "bounded", "grow", "with.dots-1", "refuses"])
def test_each_tool_answers_as_its_document_says(world: World, tool: str, mode: GenerationMode) -> None:
    document = schemathesis.openapi.from_url(f"{world.listener.url}/openapi.json", wait_for_schema=10)
    operation = document[f"/tools/{tool}"]["POST"]
    seen: list[int] = []

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def fuzz(case: schemathesis.Case) -> None:
        response = case.call()
        seen.append(response.status_code)
        case.validate_response(response, excluded_checks=_OURS)
        check_status(case, response.status_code)

    fuzz()
    assert len(seen) >= EXAMPLES // 2
    if mode is GenerationMode.POSITIVE:
        assert set(seen) & {200, 400}, seen  # it was reached
    else:
        assert 422 in seen


_OURS = [not_a_server_error, positive_data_acceptance]
"""What `check_status` says more exactly."""


def check_status(case: schemathesis.Case, status: int) -> None:
    """A limit that the request asked for may have passed; and 2.0 is no integer for us, as it is for JSON Schema."""
    limits = {"X-Callyard-Deadline-Ms", "X-Callyard-Timeout-Ms"} & set(case.headers or {})
    assert status < 500 or (status == 504 and limits), status
    if case.meta is not None and case.meta.generation.mode is GenerationMode.POSITIVE and status == 422:
        assert ".0" in json.dumps(case.body), case.body


@pytest.mark.requirement("D36")
@settings(max_examples=200, derandomize=True, database=None, deadline=None)
@given(
    method=st.sampled_from(["GET", "POST", "DELETE", "PUT", "HEAD", "OPTIONS"]),
    path=st.text(st.characters(codec="ascii", categories=("L", "N", "P")), max_size=20),
    body=st.binary(max_size=50),
    headers=st.dictionaries(
        st.sampled_from(["Idempotency-Key", "X-Callyard-Owner", "X-Callyard-Deadline-Ms", "Accept", "traceparent"]),
        st.text(st.characters(min_codepoint=33, max_codepoint=255), max_size=300),
        max_size=3,
    ),
)
def test_any_request_has_an_answer(world: World, method: str, path: str, body: bytes, headers: dict[str, str]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", world.listener.port, timeout=30)
    try:
        for place in ("/rpc", "/tools/add", f"/tools/{path}", f"/calls/{path}", f"/{path}"):
            clean = place.replace("\\", "/")
            connection.request(
                method,
                clean,
                body if method in ("POST", "PUT") else None,
                {"content-type": "application/json", **{name: value.strip() for name, value in headers.items()}},
            )
            response = connection.getresponse()
            response.read()
            assert 200 <= response.status < 500, (method, clean, body, response.status)
    finally:
        connection.close()
