# pyright: strict
"""Every way to call a function by its object, and what it gives."""

from collections.abc import Coroutine
from typing import Any, assert_type

from callyard import (
    Answer,
    BoundCall,
    Dispatcher,
    DispatchError,
    ErrorKind,
    Ok,
    Registry,
    Result,
    SyncYard,
    ToolCall,
    Worker,
    Yard,
    acall,
    acall_many,
    as_completed,
    bind,
    call,
    call_many,
)
from tests.typing.functions import Flight, distance, fare, land, maybe, plain, plain_async


def here() -> None:
    assert_type(distance("JFK"), float)
    assert_type(distance.target("JFK"), float)
    begun: Coroutine[Any, Any, dict[str, int]] = fare(5)
    begun.close()
    assert_type(bind(distance, "JFK", dest="SFO"), BoundCall[float])
    assert_type(bind(fare, 5, key="k"), BoundCall[dict[str, int]])
    assert_type(bind(plain_async, 5), BoundCall[set[int]])


def inside() -> None:
    assert_type(call(distance, "JFK", dest="SFO"), float)
    assert_type(call(fare, cents=5), dict[str, int])
    assert_type(call("distance", {"origin": "JFK"}), Any)
    assert_type(call_many(land, [Flight("JFK", 1.0)]), list[Flight])
    assert_type(call_many(fare, [1, 2], return_errors=True), list[Answer[dict[str, int]]])


async def inside_async() -> None:
    assert_type(await acall(fare, 5), dict[str, int])
    assert_type(await acall(distance, "JFK"), float)
    assert_type(await acall_many(maybe, [1]), list[Flight | None])


async def of_a_worker(worker: Worker) -> None:
    assert_type(await worker.call(distance, "JFK", dest="SFO"), float)
    assert_type(await worker.call(land, Flight("JFK", 1.0), late=True), Flight)
    assert_type(await worker.call(fare, 5, key="its own"), dict[str, int])
    assert_type(await worker.call(maybe, 1), Flight | None)
    assert_type(await worker.call(plain, 1), set[int])
    assert_type(await worker.call(plain_async, 1), set[int])
    assert_type(await worker.call(bind(fare, 5, key="its own"), deadline_ms=500, tenant="t"), dict[str, int])
    assert_type(await worker.call("distance", {"origin": "JFK"}, max_attempts=2), Any)
    assert_type(await worker.call("distance", ["JFK"]), Any)
    assert_type(await worker.call_result(land, Flight("JFK", 1.0)), Result[Flight])
    assert_type(await worker.call_result(bind(fare, 5), capture=True), Result[dict[str, int]])
    assert_type((await worker.call_result(distance, "JFK")).unwrap(), float)
    async for result in worker.map(fare, [1, 2], ordered=False, budget_ms=50):
        assert_type(result, Result[dict[str, int]])
        assert_type(result.value, dict[str, int])
        assert_type(result.index, int)
    async for any_result in worker.map("fare", [1, 2]):
        assert_type(any_result.value, Any)


async def of_a_yard(yard: Yard, dispatcher: Dispatcher) -> None:
    assert_type(await yard.call(distance, "JFK"), float)
    done = await yard.dispatch(land, Flight("JFK", 1.0))
    assert_type(done, Ok[Flight] | DispatchError)
    print(done.value.origin if done.ok else done.error.kind)
    if done.ok is True:
        assert_type(done, Ok[Flight])
        assert_type(done.value.origin, str)
    else:
        assert_type(done.error.kind, ErrorKind)
    assert_type((await yard.dispatch(bind(fare, 5), key="order-7", timeout_ms=50)).unwrap(), dict[str, int])
    assert_type(await dispatcher.dispatch(fare, 5, key="its own"), Ok[dict[str, int]] | DispatchError)
    assert_type((await dispatcher.dispatch("fare", {"cents": 5}, owner="ann")).unwrap(), Any)
    await dispatcher.gather_bounded([ToolCall(bind(fare, 5), key="a"), ToolCall("fare", {"cents": 5})])
    async for answer in as_completed(yard.call(fare, cents) for cents in range(3)):
        assert_type(answer, Answer[dict[str, int]])
    async for result in as_completed([yard.call_result(fare, 1)]):
        assert_type(result, Result[dict[str, int]])
    async for each in as_completed([yard.dispatch(fare, 1)], limit=2):
        assert_type(each, Ok[dict[str, int]] | DispatchError)


def without_await() -> None:
    with SyncYard("functions.py", executors=1) as yard:
        assert_type(yard.call(distance, "JFK"), float)
        assert_type(yard.call(fare, 5), dict[str, int])
        assert_type(yard.call(bind(fare, 5), deadline_ms=50), dict[str, int])
        assert_type(yard.dispatch(land, Flight("JFK", 1.0), late=True), Ok[Flight] | DispatchError)
        for result in yard.map(land, [Flight("JFK", 1.0)], fail_fast=True):
            assert_type(result, Result[Flight])


def annotated(result: Result, done: Ok) -> None:
    """Without a parameter, as by name."""
    assert_type(result.value, Any)
    assert_type(done.value, Any)


registry = Registry()


@registry.tool(idempotent=True)
async def search(query: str) -> list[str]:
    return [query]


async def of_this_process(dispatcher: Dispatcher) -> None:
    assert_type(await dispatcher.dispatch(search, "ferries"), Ok[list[str]] | DispatchError)
