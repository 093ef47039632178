from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from aiohttp import web

from callyard.worker.io.config import IoConfig
from callyard.worker.io.jsonrpc import JsonRpcProvider

from .conftest import Serve, perform, refusal


class Endpoint:
    """A JSON-RPC server of the test's making: `answer` is what it says, the request's id filled in."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.status = 200
        self.answer: Any = {"jsonrpc": "2.0", "result": [1, {"a": None}]}
        self.location = ""

    async def handle(self, request: web.Request) -> web.Response:
        self.headers.append(dict(request.headers))
        asked = msgspec.json.decode(await request.read())
        self.seen.append(asked)
        answer = self.answer
        if isinstance(answer, dict) and "id" not in answer:
            answer = {**answer, "id": asked.get("id")}
        body = answer if isinstance(answer, bytes) else msgspec.json.encode(answer)
        headers = {"Location": self.location} if self.location else {}
        return web.Response(status=self.status, body=body, headers=headers)


@pytest.fixture
def endpoint() -> Endpoint:
    return Endpoint()


@pytest.fixture
async def rpc(serve: Serve, endpoint: Endpoint) -> AsyncIterator[JsonRpcProvider]:
    server = await serve(endpoint.handle)
    settings = {
        "url": f"http://127.0.0.1:{server.port}/rpc",
        "read_only": ["get"],
        "headers": {"Authorization": "Bearer secret"},
        "timeout": "20s",
        "max_bytes": "64KiB",
    }
    provider = JsonRpcProvider(IoConfig.from_mapping({"jsonrpc": {"e": settings}}).jsonrpc)
    yield provider
    await provider.close()


@pytest.mark.requirement("X42")
async def test_a_call(rpc: JsonRpcProvider, endpoint: Endpoint) -> None:
    reply = await perform(rpc, "call", {"endpoint": "e", "method": "get", "params": {"x": 1}})
    assert reply.result == b'[1,{"a":null}]'
    assert endpoint.seen == [{"jsonrpc": "2.0", "method": "get", "params": {"x": 1}, "id": 1}]
    assert endpoint.headers[0]["Authorization"] == "Bearer secret"
    await perform(rpc, "call", {"endpoint": "e", "method": "get"})
    assert endpoint.seen[1] == {"jsonrpc": "2.0", "method": "get", "id": 2}


async def test_a_notification(rpc: JsonRpcProvider, endpoint: Endpoint) -> None:
    endpoint.answer, endpoint.status = b"", 204
    assert (await perform(rpc, "notify", {"endpoint": "e", "method": "log", "params": [1]})).result == b"null"
    assert endpoint.seen == [{"jsonrpc": "2.0", "method": "log", "params": [1]}]
    endpoint.status = 500
    assert (await refusal(perform(rpc, "notify", {"endpoint": "e", "method": "log"}))).kind == "unavailable"


@pytest.mark.requirement("X42")
def test_only_listed_methods_are_read_only() -> None:
    config = IoConfig.from_mapping({"jsonrpc": {"e": {"url": "http://h", "read_only": ["get"]}}}).jsonrpc
    rpc = JsonRpcProvider(config)
    assert rpc.is_read_only("call", b'{"endpoint":"e","method":"get"}')
    for operation, request in [
        ("call", b'{"endpoint":"e","method":"set"}'),
        ("call", b'{"endpoint":"f","method":"get"}'),
        ("notify", b'{"endpoint":"e","method":"get"}'),
        ("call", b"not json"),
    ]:
        assert not rpc.is_read_only(operation, request)


async def test_the_methods_own_error(rpc: JsonRpcProvider, endpoint: Endpoint) -> None:
    endpoint.answer = {"jsonrpc": "2.0", "error": {"code": -32000, "message": "no such flight", "data": {"id": 3}}}
    failure = await refusal(perform(rpc, "call", {"endpoint": "e", "method": "get"}))
    assert (failure.kind, failure.details) == ("tool_error", {"code": -32000, "data": {"id": 3}})
    assert "no such flight" in failure.message


@pytest.mark.parametrize(
    ("answer", "status", "kind"),
    [
        (b"<html>", 200, "result"),
        (b"<html>", 502, "unavailable"),
        ({"result": 1, "id": 99}, 200, "result"),
        ({"id": 1}, 200, "result"),
        ([1], 200, "result"),
        ({"result": "x" * 70_000}, 200, "result"),
    ],
)
async def test_what_is_no_answer(rpc: JsonRpcProvider, endpoint: Endpoint, answer: Any, status: int, kind: str) -> None:
    endpoint.answer, endpoint.status = answer, status
    failure = await refusal(perform(rpc, "call", {"endpoint": "e", "method": "get"}))
    assert failure.kind == kind
    assert "secret" not in failure.message


async def test_a_redirect_is_not_followed(rpc: JsonRpcProvider, endpoint: Endpoint) -> None:
    endpoint.status, endpoint.location, endpoint.answer = 307, "http://10.0.0.1/", b""
    assert (await refusal(perform(rpc, "call", {"endpoint": "e", "method": "get"}))).kind == "unavailable"
    assert len(endpoint.seen) == 1


@pytest.mark.parametrize(
    ("operation", "request_", "kind"),
    [
        ("call", {"endpoint": "f", "method": "get"}, "not_found"),
        ("call", {"endpoint": "e", "method": "get", "params": 3}, "schema"),
        ("call", {"endpoint": "e"}, "schema"),
        ("call", {"endpoint": "e", "method": "get", "url": "http://h"}, "schema"),
        ("batch", {"endpoint": "e", "method": "get"}, "schema"),
    ],
)
async def test_requests_that_are_refused(
    rpc: JsonRpcProvider, endpoint: Endpoint, operation: str, request_: Any, kind: str
) -> None:
    failure = await refusal(perform(rpc, operation, request_))
    assert failure.kind == kind
    assert endpoint.seen == []
    if kind == "not_found":
        assert "[io.jsonrpc] f =" in failure.message


async def test_a_task_may_have_fewer_endpoints(rpc: JsonRpcProvider) -> None:
    assert (await refusal(perform(rpc, "call", {"endpoint": "e", "method": "get"}, names=("x",)))).kind == "denied"
