"""IO through the worker as user code sees it: `Runtime.io` and `aio`, which the facades use (X42, X78)."""

from __future__ import annotations

import msgspec
import pytest

from callyard.errors import ErrorKind
from callyard.wire.messages import CallCompleted, WireError
from tests.e2e.executor.driver import output_of
from tests.e2e.executor.family import FamilyDriver

SOURCE = """
import asyncio, json, time
from callyard import CallError, sdk

def ask(n: int) -> list:
    reply = sdk.runtime().io("http", "get", json.dumps({"n": n}).encode(), b"\\x00\\xff" * n)
    return [json.loads(reply.result), None if reply.body is None else list(reply.body)]

def ask_and_catch() -> dict:
    try:
        sdk.runtime().io("http", "get", b"{}")
    except CallError as error:
        failure = error.failure
        return {"kind": failure.kind, "message": failure.message, "retryable": failure.retryable,
                "details": dict(failure.details)}
    return {}

def send_too_much() -> str:
    try:
        sdk.runtime().io("http", "post", b"{}", bytes(17 << 20))
    except CallError as error:
        return f"{error.kind} {error.outcome} {error.failure.message}"
    return ""

def nap(seconds: float) -> None:
    sdk.sleep(seconds)

def spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
"""
ASYNC = (
    SOURCE
    + """
async def ask_all(n: int) -> list[int]:
    async def one(i):
        reply = await sdk.runtime().aio("sql", "query", json.dumps(i).encode())
        return json.loads(reply.result)
    return await asyncio.gather(*(one(i) for i in range(n)))

async def ask_beside_work(n: int) -> int:
    async def work():
        for _ in range(n):
            spin(0.01)
            await asyncio.sleep(0)
    _, reply = await asyncio.gather(work(), sdk.runtime().aio("sql", "query", b"1"))
    return json.loads(reply.result)
"""
)


@pytest.fixture(params=[SOURCE, ASYNC], ids=["hub waits", "loop waits"])
def source(request: pytest.FixtureRequest) -> str:
    assert isinstance(request.param, str)
    return request.param


@pytest.mark.requirement("X42", "X78")
def test_request_and_answer_with_bodies(source: str) -> None:
    with FamilyDriver(source) as driver:
        call_id = driver.start("ask", 2)
        (request,) = driver.wait_requests(1)
        asked = request.payload.io
        assert asked is not None
        assert (asked.provider, asked.operation, bytes(asked.request)) == ("http", "get", b'{"n": 2}')
        assert driver.bodies == [b"\x00\xff\x00\xff"]
        driver.resume(request, {"status": 200}, body=b"\x01\x02", used_ms=30)
        end = driver.wait_end(call_id)
        assert output_of(end) == [{"status": 200}, [1, 2]]
        assert isinstance(end, CallCompleted)
        assert end.payload.budget_used_ms >= 30

        call_id = driver.start("ask", 0)
        (request,) = driver.wait_requests(1)
        driver.resume(request, 5)
        assert output_of(driver.wait_end(call_id)) == [5, None]


@pytest.mark.requirement("X42")
def test_a_providers_failure_is_a_call_error(source: str) -> None:
    with FamilyDriver(source) as driver:
        call_id = driver.start("ask_and_catch")
        (request,) = driver.wait_requests(1)
        error = WireError(ErrorKind.UNAVAILABLE, "connection refused", True, {"retry_after_ms": 20})
        driver.resume(request, error=error)
        assert output_of(driver.wait_end(call_id)) == {
            "kind": "unavailable",
            "message": "connection refused",
            "retryable": True,
            "details": {"provider": "http", "operation": "get", "retry_after_ms": 20},
        }


@pytest.mark.requirement("X48")
def test_what_no_frame_can_hold_is_refused_here(source: str) -> None:
    with FamilyDriver(source) as driver:
        told = driver.value("send_too_much")
        assert told.startswith("resource_limit not_run http: frame of 178")
        assert driver.waiting == []


@pytest.mark.requirement("X52", "X66")
def test_many_requests_of_one_async_call_answered_in_any_order() -> None:
    with FamilyDriver(ASYNC) as driver:
        call_id = driver.start("ask_all", 50)
        for request in reversed(driver.wait_requests(50)):
            assert request.payload.io is not None
            driver.resume(request, msgspec.json.decode(request.payload.io.request) * 2)
        assert output_of(driver.wait_end(call_id)) == [2 * i for i in range(50)]


@pytest.mark.requirement("X53", "X85")
def test_an_async_call_pays_for_its_work_beside_a_wait() -> None:
    with FamilyDriver(ASYNC) as driver:
        call_id = driver.start("ask_beside_work", 20, budget_ms=3000)
        (request,) = driver.wait_requests(1)
        driver.run("nap", 2.5)  # were the wait charged, too, it would be over its budget
        driver.resume(request, 7, used_ms=1000)
        end = driver.wait_end(call_id)
        assert isinstance(end, CallCompleted), end
        assert end.payload.budget_used_ms >= 1200
