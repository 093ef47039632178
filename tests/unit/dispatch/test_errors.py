"""Whatever a tool raises or returns, its caller gets one envelope."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import dataclass
from typing import Any

import pytest

from callyard.dispatch.outcomes import DispatchError, Ok
from callyard.errors import KIND_RULES, CallError, ErrorKind, Outcome, ToolError, TransientError, UsageError, fail
from callyard.functions.registry import Registry
from callyard.ids import CallId
from callyard.testing.virtual_time import run_virtual, virtual_time
from tests.unit.dispatch.kit import add, add_work, assert_quiet, make, spin


class NoText(Exception):
    pass


class AngryText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")


class NotText(Exception):
    def __str__(self) -> Any:  # type: ignore[override]
        return 5


class Uncopyable(Exception):
    def __init__(self, first: object, second: object) -> None:
        super().__init__(f"holds {second}")
        self.lock = first

    def __reduce__(self) -> Any:
        raise TypeError("cannot be copied")

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("cannot be copied")


def _too_deep(n: int = 0) -> int:
    return _too_deep(n + 1) + 1


def _recursion() -> BaseException:
    try:
        _too_deep()
    except RecursionError as error:
        return error
    raise AssertionError


RAISED: dict[str, tuple[BaseException, str, str]] = {
    "without text": (NoText(), "internal", "NoText"),
    "with text": (ValueError("it broke"), "internal", "ValueError: it broke"),
    "str raises": (AngryText(), "internal", "AngryText: <its __str__ raised RuntimeError>"),
    "str is no text": (NotText(), "internal", "NotText: <its __str__ raised TypeError>"),
    "uncopyable": (Uncopyable(object(), "a lock"), "internal", "Uncopyable: holds a lock"),
    "a lone surrogate": (ValueError("\ud800"), "internal", "ValueError: \\ud800"),
    "exit": (SystemExit(3), "internal", "SystemExit: 3"),
    "generator exit": (GeneratorExit(), "internal", "GeneratorExit"),
    "recursion": (_recursion(), "internal", "RecursionError: maximum recursion depth exceeded"),
    "memory": (MemoryError(), "resource_limit", "MemoryError"),
    "stop iteration": (StopAsyncIteration(), "internal", "StopAsyncIteration"),
    "its own cancellation": (asyncio.CancelledError(), "internal", "CancelledError"),
    "a tool error": (ToolError("No flight LH-1 on 3 May."), "tool_error", "No flight LH-1 on 3 May."),
    "a tool error without text": (ToolError(), "tool_error", "ToolError"),
    "a transient error": (TransientError("the line is busy"), "transient", "the line is busy"),
    "a failed subcall": (CallError(fail(ErrorKind.TOOL_ERROR, "no such row")), "tool_error", "no such row"),
}


@pytest.mark.requirement("D24", "D52", "D38")
@pytest.mark.parametrize("what", RAISED)
@virtual_time
async def test_any_exception_becomes_an_envelope(what: str) -> None:
    error, kind, message = RAISED[what]
    registry = Registry()

    async def handler(arguments: dict[str, Any]) -> None:
        raise error

    add(registry, "tool", handler)
    async with make(registry, breaker=None) as dispatcher:
        failed = await dispatcher.dispatch("tool")
        assert isinstance(failed, DispatchError)
        assert (failed.kind.value, failed.message) == (kind, message) or (
            what == "recursion" and failed.message.startswith(message)
        )
        assert failed.outcome is KIND_RULES[failed.kind].outcome
        assert failed.attempts == (3 if kind == "transient" else 1)
        import json

        json.dumps(failed.to_json(stack=True)).encode()  # plain values, Unicode
        assert_quiet(dispatcher)


@pytest.mark.requirement("D24")
@virtual_time
async def test_an_exception_group_names_its_first_leaf_and_lists_the_rest() -> None:
    registry = Registry()

    async def handler(arguments: dict[str, Any]) -> None:
        raise ExceptionGroup(
            "outer",
            [ExceptionGroup("inner", [ValueError("first"), KeyError("second")]), AngryText(), OSError()],
        )

    async def deep(arguments: dict[str, Any]) -> None:
        group: Exception = ValueError("leaf")
        for _ in range(5_000):
            group = ExceptionGroup("one more", [group])
        raise group

    add(registry, "tool", handler)
    add(registry, "deep", deep)
    async with make(registry) as dispatcher:
        failed = await dispatcher.dispatch("tool")
        assert isinstance(failed, DispatchError)
        assert (failed.kind, failed.message) == (ErrorKind.INTERNAL, "ValueError: first (and 3 more)")
        assert failed.details["exceptions"] == [
            "ValueError: first",
            "KeyError: 'second'",
            "AngryText: <its __str__ raised RuntimeError>",
            "OSError",
        ]
        assert (await dispatcher.dispatch("deep")).message == "ValueError: leaf"  # type: ignore[union-attr]


@pytest.mark.requirement("D24")
@virtual_time
async def test_exit_recursion_and_memory_errors_end_nothing_but_their_call() -> None:
    registry = Registry()

    async def exits(arguments: dict[str, Any]) -> None:
        raise SystemExit(1)

    async def recurs(arguments: dict[str, Any]) -> int:
        return _too_deep()

    add(registry, "exits", exits)
    add(registry, "recurs", recurs)
    work = add_work(registry)
    async with make(registry) as dispatcher:
        beside = asyncio.ensure_future(dispatcher.dispatch("work"))
        for name in ("exits", "recurs"):
            assert not (await dispatcher.dispatch(name)).ok
        assert (await beside).ok
        assert work.ended == 1


@pytest.mark.requirement("D24")
def test_a_keyboard_interrupt_passes() -> None:
    registry = Registry()

    async def handler(arguments: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    add(registry, "tool", handler)

    async def main() -> None:
        dispatcher = make(registry)
        await dispatcher.dispatch("tool")

    with pytest.raises(KeyboardInterrupt):
        run_virtual(main())


@pytest.mark.requirement("D24")
@virtual_time
async def test_the_callers_own_cancellation_passes_though_the_handler_raises() -> None:
    registry = Registry()

    async def handler(arguments: dict[str, Any]) -> None:
        try:
            await asyncio.sleep(10)
        finally:
            raise ValueError("while it was cancelled")

    add(registry, "tool", handler)
    async with make(registry) as dispatcher:
        caller = asyncio.ensure_future(dispatcher.dispatch("tool"))
        await spin()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        await spin()
        assert_quiet(dispatcher)


@pytest.mark.requirement("D24")
def test_no_exception_was_never_retrieved(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry()

    async def raises(arguments: dict[str, Any]) -> None:
        try:
            await asyncio.sleep(arguments.get("s", 0))
        finally:
            raise ValueError("late")

    add(registry, "raises", raises)

    async def main() -> None:
        async with make(registry, cancel_grace_ms=0) as dispatcher:
            await dispatcher.dispatch("raises")
            await dispatcher.dispatch("raises", {"s": 10}, timeout_ms=5)
            for options in ({}, {"key": "k"}):
                caller = asyncio.ensure_future(dispatcher.dispatch("raises", {"s": 10}, **options))
                await spin()
                caller.cancel()
                await asyncio.wait([caller])
            await asyncio.sleep(30)
            assert_quiet(dispatcher)

    run_virtual(main())
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


SECRET = "/srv/secret/db.internal:5432"


@pytest.mark.requirement("D24")
@pytest.mark.parametrize(
    ("error", "kind", "shown"),
    [
        (OSError(SECRET), "internal", "OSError"),
        (ExceptionGroup("g", [OSError(SECRET), KeyError(SECRET)]), "internal", "OSError"),
        (SystemExit(SECRET), "internal", "SystemExit"),
        (MemoryError(SECRET), "resource_limit", "MemoryError"),
        (AngryText(), "internal", "AngryText"),
        (CallError(fail(ErrorKind.INTERNAL, SECRET, path=SECRET)), "internal", "the function raised"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else value,
)
@virtual_time
async def test_a_remote_caller_sees_class_and_reference_of_what_was_not_meant_for_it(
    error: BaseException, kind: str, shown: str
) -> None:
    registry = Registry()

    async def handler(arguments: dict[str, Any]) -> None:
        raise error

    add(registry, "tool", handler)
    async with make(registry) as dispatcher:
        failed = await dispatcher.dispatch("tool")
        assert isinstance(failed, DispatchError)
        assert failed.kind.value == kind
        remote = failed.to_json(remote=True, stack=True)
        assert SECRET not in repr(remote)
        assert shown in remote["message"]
        assert failed.call_id in remote["message"]
        assert remote["details"]["reference"] == failed.call_id
        assert "stack" not in remote
        assert {name: remote[name] for name in ("kind", "outcome", "attempts", "jsonrpc_code")} == {
            name: failed.to_json()[name] for name in ("kind", "outcome", "attempts", "jsonrpc_code")
        }
        if not isinstance(error, AngryText):
            assert SECRET in repr(failed.to_json())  # who is in this process reads it all


@pytest.mark.requirement("D24")
@pytest.mark.parametrize("error", [ToolError("No such row."), TransientError("busy", retry_after_ms=5)], ids=repr)
@virtual_time
async def test_what_a_tool_says_on_purpose_is_shown_as_written(error: Exception) -> None:
    registry = Registry()

    async def handler(arguments: dict[str, Any]) -> None:
        raise error

    add(registry, "tool", handler)
    async with make(registry) as dispatcher:
        failed = await dispatcher.dispatch("tool")
        assert isinstance(failed, DispatchError)
        assert failed.to_json(remote=True)["message"] == str(error)
        assert failed.to_json(remote=True) == failed.to_json()


@pytest.mark.requirement("D24")
def test_an_internal_message_that_names_no_class_is_not_shown_either() -> None:
    failed = DispatchError(CallId("c-1"), fail(ErrorKind.INTERNAL, f"could not open {SECRET}"))
    assert SECRET not in repr(failed.to_json(remote=True))


@dataclass
class Point:
    x: float


def _cycle() -> list[Any]:
    value: list[Any] = [1]
    value.append(value)
    return value


def _levels(count: int) -> Any:
    value: Any = 1
    for _ in range(count):
        value = [value]
    return value


class RaisingMapping(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("no items")

    def __iter__(self) -> Any:
        raise RuntimeError("no keys")


MISFITS: dict[str, tuple[Any, str | None]] = {
    "NaN": ({"a": [1, float("nan")]}, "/a/1"),
    "infinity": (Point(float("inf")), "/x"),
    "a lone surrogate": ({"t": "\ud800"}, "/t"),
    "a cycle": (_cycle(), "/1"),
    "513 levels": (_levels(513), None),
    "20 000 levels": (_levels(20_000), None),
    "a tuple as key": ({(1, 2): 3}, None),
    "None as key": ({None: 3}, None),
    "an object": ([object()], "/0"),
    "a coroutine's name": (print, ""),
    "a generator": ((n for n in range(3)), ""),
}


@pytest.mark.requirement("D26")
@pytest.mark.parametrize("what", MISFITS)
@virtual_time
async def test_a_result_that_json_cannot_hold(what: str) -> None:
    value, pointer = MISFITS[what]
    registry = Registry()

    async def handler(arguments: dict[str, Any]) -> Any:
        return value

    add(registry, "tool", handler, idempotent=True)
    async with make(registry) as dispatcher:
        failed = await dispatcher.dispatch("tool")
        assert isinstance(failed, DispatchError)
        assert (failed.kind, failed.outcome, failed.attempts) == (ErrorKind.RESULT, Outcome.RAN, 1)
        if pointer is not None:
            assert failed.details["pointer"] == pointer
        failed.to_json()
        assert_quiet(dispatcher)


FITS: dict[str, tuple[Any, Any]] = {
    "a set": ({3}, [3]),
    "a tuple": ((1, "a"), [1, "a"]),
    "bytes": (b"ab", "YWI="),
    "a large integer": (10**30, 10**30),
    "512 levels": (_levels(512), _levels(512)),
    "a number as key": ({1: "a"}, {"1": "a"}),
    "None": (None, None),
    "a dataclass": (Point(1.5), {"x": 1.5}),
}


@pytest.mark.requirement("D26")
@pytest.mark.parametrize("what", FITS)
@virtual_time
async def test_a_result_that_has_a_json_form(what: str) -> None:
    value, expected = FITS[what]
    registry = Registry()

    async def handler(arguments: dict[str, Any]) -> Any:
        return value

    add(registry, "tool", handler)
    async with make(registry) as dispatcher:
        done = await dispatcher.dispatch("tool")
        assert isinstance(done, Ok), done
        if what == "a large integer":
            assert done.output == str(expected).encode()
        else:
            assert done.value == expected


class Descriptor:
    """Raises whatever is asked of it."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


class ExitingProperty:
    def __getattribute__(self, name: str) -> Any:
        raise SystemExit(4)


@pytest.mark.requirement("D24", "D26")
@pytest.mark.parametrize("kind", [Descriptor, ExitingProperty, RaisingMapping])
@virtual_time
async def test_code_of_the_result_itself_that_raises_is_contained(kind: type) -> None:
    registry = Registry()

    async def handler(arguments: dict[str, Any]) -> Any:
        return [kind()]

    add(registry, "tool", handler)
    async with make(registry) as dispatcher:
        ended = await dispatcher.dispatch("tool")
        assert ended.ok or (ended.kind is ErrorKind.RESULT and ended.outcome is Outcome.RAN)
        assert_quiet(dispatcher)


@pytest.mark.requirement("D26")
@virtual_time
async def test_a_result_of_30_mb() -> None:
    registry = Registry()

    async def big(arguments: dict[str, Any]) -> str:
        return "x" * 30_000_000

    add(registry, "big", big)
    add(registry, "small", big, max_result_bytes=100)
    async with make(registry) as dispatcher:
        failed = await dispatcher.dispatch("big")
        assert isinstance(failed, DispatchError)
        assert (failed.kind, failed.outcome) == (ErrorKind.RESULT, Outcome.RAN)
        assert failed.details["size"] == 30_000_002
        assert failed.details["limit"] == 8 * 1024 * 1024
        assert failed.details["head"] == '"' + "x" * 1_023
        assert len(repr(failed.to_json())) < 3_000
        failed = await dispatcher.dispatch("small")
        assert isinstance(failed, DispatchError)
        assert failed.details["limit"] == 100


@pytest.mark.requirement("D26")
@virtual_time
async def test_a_result_that_breaks_its_output_schema() -> None:
    registry = Registry()
    add(registry, "tool", lambda arguments: {"n": "text"}, isolation="inline",
        output_schema={"type": "object", "properties": {"n": {"type": "integer"}}})  # fmt: skip
    async with make(registry) as dispatcher:
        failed = await dispatcher.dispatch("tool")
        assert isinstance(failed, DispatchError)
        assert (failed.kind, failed.details["pointer"]) == (ErrorKind.RESULT, "/n")


@pytest.mark.requirement("D20", "D26")
@virtual_time
async def test_one_callers_change_of_a_result_is_never_anothers() -> None:
    registry = Registry()
    kept = {"rows": [1, 2]}

    async def handler(arguments: dict[str, Any]) -> Any:
        return kept

    add(registry, "tool", handler)
    async with make(registry) as dispatcher:
        first = await dispatcher.dispatch("tool", key="k")
        first.value["rows"].append(99)
        kept["rows"].clear()
        assert first.value == {"rows": [1, 2]}
        assert (await dispatcher.dispatch("tool", key="k")).value == {"rows": [1, 2]}


@pytest.mark.requirement("D49", "D24")
@pytest.mark.parametrize(
    "error", [ValueError("bad"), KeyError("k"), RuntimeError(), SystemExit(2), TransientError("x")], ids=repr
)
@virtual_time
async def test_a_validator_of_the_users_that_raises_ends_its_call_before_it_ran(error: BaseException) -> None:
    registry = Registry()
    ran = []

    @dataclass
    class Row:
        n: int

        def __post_init__(self) -> None:
            raise error

    async def tool(row: Row) -> None:
        ran.append(row)

    tool.__annotations__["row"] = Row
    registry.add_function(tool)
    async with make(registry) as dispatcher:
        failed = await dispatcher.dispatch("tool", {"row": {"n": 1}})
        assert isinstance(failed, DispatchError)
        assert (failed.kind, failed.outcome, failed.attempts) == (ErrorKind.SCHEMA, Outcome.NOT_RUN, 0)
        assert not ran
        assert_quiet(dispatcher)


@pytest.mark.requirement("D26")
@virtual_time
async def test_a_resolved_result_must_be_json_too() -> None:
    add_work(registry := Registry())
    async with make(registry) as dispatcher:
        with pytest.raises(UsageError):
            await dispatcher.resolve("default", "work", "k", float("nan"))
