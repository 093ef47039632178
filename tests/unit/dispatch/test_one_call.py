"""`dispatch`: what comes back, what goes in, and what is refused as a mistake of the caller's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from callyard.dispatch.allowance import Allowance
from callyard.dispatch.dispatcher import Dispatcher
from callyard.dispatch.outcomes import DispatchError, Ok
from callyard.errors import KIND_RULES, CallError, CallFailure, ErrorKind, Outcome, UsageError, fail
from callyard.functions.registry import Registry
from callyard.testing.virtual_time import virtual_time
from tests.unit.dispatch.kit import (
    FakeRunner,
    add,
    add_described,
    add_work,
    assert_quiet,
    described,
    ending,
    make,
    spin,
)


def registry_of_add() -> Registry:
    registry = Registry()

    @registry.tool
    async def add_up(a: int, b: int = 2) -> int:
        return a + b

    return registry


@pytest.mark.requirement("D7")
@virtual_time
async def test_a_call_that_succeeds_is_an_ok() -> None:
    async with make(registry_of_add()) as dispatcher:
        done = await dispatcher.dispatch("add_up", {"a": 1})
        assert isinstance(done, Ok)
        assert done.ok
        assert done.error is None
        assert (done.value, done.unwrap(), done.output, done.attempts) == (3, 3, b"3", 1)
        assert (await dispatcher.dispatch("add_up", b'{"a":4,"b":5}')).value == 9
        assert_quiet(dispatcher)


@pytest.mark.requirement("D7")
@virtual_time
async def test_a_call_that_fails_is_a_value_that_raises_only_when_unwrapped() -> None:
    async with make(registry_of_add()) as dispatcher:
        failed = await dispatcher.dispatch("add_up", {"a": "one"})
        assert isinstance(failed, DispatchError)
        assert not failed.ok
        assert failed.error is failed
        assert failed.details["pointer"] == "/a"
        with pytest.raises(CallError) as caught:
            failed.unwrap()
        assert caught.value.kind is ErrorKind.SCHEMA
        with pytest.raises(CallError):
            _ = failed.value


class _Angry(Mapping[str, Any]):
    def __getitem__(self, name: str) -> Any:
        raise RuntimeError("not for you")

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("nor this")

    def __len__(self) -> int:
        return 1


def _nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def _cyclic() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["self"] = value
    return value


BAD_ARGUMENTS: dict[str, Any] = {
    "no object": [1],
    "text": "a",
    "a number": 5,
    "bytes that are no JSON": b"{",
    "bytes that are no text": b'{"a":"\xff"}',
    "a duplicate key": b'{"a":1,"a":2}',
    "NaN": {"a": float("nan")},
    "NaN in bytes": b'{"a":NaN}',
    "a lone surrogate": {"a": "\ud800"},
    "a cycle": _cyclic(),
    "10 000 levels": {"a": _nested(10_000)},
    "10 000 levels in bytes": b'{"a":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "no text as key": {1: 2, (1, 2): 3},
    "an unknown type": {"a": object()},
    "a mapping that raises": _Angry(),
}


@pytest.mark.requirement("D7", "D26")
@pytest.mark.parametrize("what", BAD_ARGUMENTS)
@virtual_time
async def test_no_arguments_make_it_raise(what: str) -> None:
    registry = Registry()
    ran: list[object] = []
    add(registry, "tool", ran.append)
    async with make(registry) as dispatcher:
        failed = await dispatcher.dispatch("tool", BAD_ARGUMENTS[what])
        assert isinstance(failed, DispatchError), failed
        assert (failed.kind, failed.outcome, failed.attempts) == (ErrorKind.SCHEMA, Outcome.NOT_RUN, 0)
        assert not ran
        assert_quiet(dispatcher)


@pytest.mark.requirement("D7")
@pytest.mark.parametrize("name", ["nope", "", "x" * 1_000_000, "\ud800", None, 5, ["add_up"], b"add_up"], ids=repr)
@virtual_time
async def test_no_name_makes_it_raise(name: Any) -> None:
    async with make(registry_of_add()) as dispatcher:
        failed = await dispatcher.dispatch(name, {"a": 1})
        assert isinstance(failed, DispatchError)
        assert (failed.kind, failed.outcome) == (ErrorKind.NOT_FOUND, Outcome.NOT_RUN)
        assert len(failed.message) < 1_000
        assert_quiet(dispatcher)


@pytest.mark.requirement("D7")
@pytest.mark.parametrize(
    "options",
    [
        {"timeout_ms": 0},
        {"timeout_ms": True},
        {"timeout_ms": 1.5},
        {"deadline_ms": "1"},
        {"allowance": 5},
        {"owner": ""},
        {"owner": "x" * 257},
        {"tenant": ""},
        {"tenant": None},
        {"idempotency_key": "a", "key": "b"},
        {"key": ""},
        {"call_id": ""},
        {"tags": 5},
        {"trace": "text"},
    ],
    ids=repr,
)
@virtual_time
async def test_an_option_out_of_range_is_the_callers_mistake_and_leaves_nothing(options: dict[str, Any]) -> None:
    async with make(registry_of_add()) as dispatcher:
        with pytest.raises(UsageError):
            await dispatcher.dispatch("add_up", {"a": 1}, **options)
        assert_quiet(dispatcher)


@pytest.mark.requirement("D7")
@virtual_time
async def test_a_cancelled_caller_is_cancelled_at_once() -> None:
    registry = Registry()
    work = add_work(registry)
    async with make(registry) as dispatcher:
        caller = asyncio.ensure_future(dispatcher.dispatch("work"))
        await spin()
        assert work.inside == 1
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        await spin()
        assert (work.cancelled, work.inside) == (1, 0)
        assert_quiet(dispatcher)


@pytest.mark.requirement("D7")
@virtual_time
async def test_the_callers_own_call_id_names_the_call() -> None:
    registry = Registry()
    add_work(registry)
    async with make(registry) as dispatcher:
        first = asyncio.ensure_future(dispatcher.dispatch("work", call_id="mine"))
        await spin()
        with pytest.raises(UsageError, match="under way"):
            await dispatcher.dispatch("work", call_id="mine")
        assert (await first).call_id == "mine"
        assert (await dispatcher.dispatch("work", call_id="mine")).ok  # free again


KINDS_FROM_TOOLS = {
    ErrorKind.CRASHED,
    ErrorKind.RESOURCE_LIMIT,
    ErrorKind.TRANSIENT,
    ErrorKind.TOOL_ERROR,
    ErrorKind.INTERNAL,
    ErrorKind.RESULT,
    ErrorKind.UNAVAILABLE,
    ErrorKind.NOT_FOUND,
    ErrorKind.DENIED,
    ErrorKind.SCHEMA,
}


@pytest.mark.requirement("D22", "D23", "D38")
@pytest.mark.parametrize("kind", sorted(KINDS_FROM_TOOLS))
@virtual_time
async def test_every_kind_of_a_lower_layer_comes_with_the_tables_codes(kind: ErrorKind) -> None:
    rule = KIND_RULES[kind]
    begun = 0 if rule.outcome is Outcome.NOT_RUN and kind is not ErrorKind.TRANSIENT else 1
    registry, worker = Registry(), FakeRunner()
    add_described(registry, worker, "tool", ending(fail(kind, "so it is", attempts=begun, cause="why")))
    async with make(registry, worker=worker) as dispatcher:
        failed = await dispatcher.dispatch("tool", {})
        assert isinstance(failed, DispatchError)
        assert failed.to_json() == {
            "kind": kind.value,
            "message": "so it is",
            "attempts": 3 if kind is ErrorKind.TRANSIENT else begun,
            "jsonrpc_code": rule.jsonrpc_code,
            "retryable": kind in (ErrorKind.TRANSIENT, ErrorKind.UNAVAILABLE),
            "outcome": rule.outcome.value,
            "details": {"cause": "why"},
            "call_id": failed.call_id,
        }
        assert_quiet(dispatcher)


@pytest.mark.requirement("D22", "D23")
@pytest.mark.parametrize("kind", ErrorKind)
def test_the_envelope_of_every_kind_has_the_tables_codes(kind: ErrorKind) -> None:
    from callyard.ids import CallId

    envelope = DispatchError(CallId("c-1"), fail(kind, "why", stack="Traceback")).to_json()
    assert envelope["jsonrpc_code"] == KIND_RULES[kind].jsonrpc_code
    assert envelope["outcome"] == KIND_RULES[kind].outcome.value
    assert "stack" not in envelope
    shown = DispatchError(CallId("c-1"), fail(kind, "why", stack="Traceback")).to_json(stack=True)
    assert shown["stack"] == "Traceback"


@pytest.mark.requirement("D23")
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("idempotent", [False, True])
@pytest.mark.parametrize("kind", [ErrorKind.TIMEOUT, ErrorKind.CRASHED, ErrorKind.TRANSIENT, ErrorKind.INTERNAL])
@virtual_time
async def test_retryable_says_whether_the_same_call_is_safe(kind: ErrorKind, idempotent: bool, begun: bool) -> None:
    outcome = None if begun else Outcome.NOT_RUN
    end = fail(kind, "so", attempts=int(begun), outcome=outcome)
    registry, worker = Registry(), FakeRunner()
    add_described(registry, worker, "tool", ending(end), idempotent=idempotent)
    async with make(registry, worker=worker) as dispatcher:
        failed = await dispatcher.dispatch("tool", {})
        assert isinstance(failed, DispatchError)
        safe = kind is not ErrorKind.INTERNAL and (idempotent or not begun or kind is ErrorKind.TRANSIENT)
        assert failed.retryable is safe
        assert len(worker.contexts) == (3 if safe else 1)
        assert failed.attempts == (len(worker.contexts) if begun else 0)


@pytest.mark.requirement("D50")
def test_described_functions_without_a_worker_are_refused_with_both_ways_out() -> None:
    registry = Registry()
    registry.add(described("tool"))
    with pytest.raises(UsageError, match=r"worker=worker.*from_module"):
        Dispatcher(registry)


@pytest.mark.requirement("D50")
@pytest.mark.parametrize("asked", ["inline", "thread", "executor", None])
@virtual_time
async def test_a_described_function_never_runs_in_this_process(asked: Any) -> None:
    registry, worker = Registry(), FakeRunner()
    add_described(registry, worker, "tool", ending(b'"from there"'), isolation=asked)
    assert registry.get("tool").isolation == "executor"
    async with make(registry, worker=worker) as dispatcher:
        assert (await dispatcher.dispatch("tool", {})).value == "from there"
        assert len(worker.contexts) == 1
        assert worker.pins == 0


@pytest.mark.requirement("D50")
def test_local_tools_run_inline_when_async_and_in_a_thread_when_not() -> None:
    registry = Registry()

    @registry.tool
    async def waits() -> None: ...

    @registry.tool
    def plain() -> None: ...

    @registry.tool(isolation="inline")
    def quick() -> None: ...

    @registry.tool(isolation="thread")
    def slow() -> None: ...

    isolations = {spec.name: spec.isolation for spec in registry}
    assert isolations == {"waits": "inline", "plain": "thread", "quick": "inline", "slow": "thread"}


@pytest.mark.requirement("D5", "D7")
@virtual_time
async def test_repairs_are_listed_with_the_result() -> None:
    async with make(registry_of_add()) as dispatcher:
        done = await dispatcher.dispatch("add_up", {"a": "4"}, repair=True)
        assert done.ok
        assert done.value == 6
        assert len(done.repairs) == 1
        assert not (await dispatcher.dispatch("add_up", {"a": "4"})).ok


@pytest.mark.requirement("D40", "D42", "D52")
@virtual_time
async def test_an_executor_is_told_of_the_call_and_its_attempt() -> None:
    registry, worker = Registry(), FakeRunner()
    crash: CallFailure = fail(ErrorKind.CRASHED, "gone", attempts=1)
    add_described(registry, worker, "tool", ending(crash, b"1"), idempotent=True)
    async with make(registry, worker=worker) as dispatcher:
        done = await dispatcher.dispatch(
            "tool",
            {},
            key="k",
            owner="o",
            tenant="t",
            tags={"step": "3"},
            trace={"traceparent": "00-1"},
            deadline_ms=9_000,
            timeout_ms=2_000,
            allowance=Allowance(5),
        )
        assert done.ok
        assert done.attempts == 2
    first, second = worker.contexts
    assert (first.idempotency_key, first.owner, first.tenant, first.attempt) == ("k", "o", "t", 1)
    assert (first.tags, first.trace) == ({"step": "3"}, {"traceparent": "00-1"})
    assert first.deadline_remaining_ms == 9_000
    assert (second.idempotency_key, second.attempt) == ("k", 2)
    assert second.deadline_remaining_ms is not None
    assert 8_800 < second.deadline_remaining_ms < 9_000
    assert worker.budgets == [2_000, 2_000]
    assert worker.pins == 0


@pytest.mark.requirement("D9", "D40")
@virtual_time
async def test_an_executor_call_ends_at_its_limit_by_a_cancel_with_that_reason() -> None:
    from tests.unit.dispatch.kit import hanging, now_ms

    registry, worker = Registry(), FakeRunner()
    add_described(registry, worker, "tool", hanging)
    async with make(registry, worker=worker) as dispatcher:
        failed = await dispatcher.dispatch("tool", {}, timeout_ms=300)
        assert isinstance(failed, DispatchError)
        assert (failed.kind, failed.outcome, failed.attempts) == (ErrorKind.TIMEOUT, Outcome.UNKNOWN, 1)
        assert failed.details == {"limit": "timeout_ms", "limit_ms": 300}
        assert worker.cancels == ["deadline"]
        assert now_ms() == 300
        assert_quiet(dispatcher)
