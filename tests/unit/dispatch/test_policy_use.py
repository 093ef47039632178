"""The policy of a dispatcher: asked between the check and the key, inside the deadline; and what must admit a call."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from callyard.dispatch.outcomes import DispatchError
from callyard.dispatch.policies import Deny, Policy, allow_tools
from callyard.errors import ErrorKind, Outcome
from callyard.functions.registry import Registry
from callyard.ids import Tenant
from callyard.testing.virtual_time import virtual_time
from tests.unit.dispatch.kit import Work, add, add_work, assert_quiet, hear, make, now_ms, spin, told


def scene(policy: Policy | None, **settings: Any) -> tuple[Any, Work]:
    registry = Registry()
    work = add_work(registry)
    return make(registry, policy=policy, **settings), work


@pytest.mark.requirement("D47")
@virtual_time
async def test_it_is_asked_with_tenant_tool_and_checked_arguments() -> None:
    asked: list[tuple[Any, ...]] = []

    def policy(tenant: Tenant, tool: str, arguments: Mapping[str, Any]) -> bool:
        asked.append((tenant, tool, dict(arguments)))
        return True

    dispatcher, _ = scene(policy)
    assert (await dispatcher.dispatch("work", b'{"mark": 3}', tenant="acme")).ok
    assert asked == [("acme", "work", {"mark": 3})]


@pytest.mark.requirement("D47")
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("answer", "reason"),
    [(Deny("not today"), "not today"), ("no", "no"), (False, "not_allowed"), (None, "policy_failed")],
)
@virtual_time
async def test_what_denies(answer: Any, reason: str, is_async: bool) -> None:
    def policy(tenant: Tenant, tool: str, arguments: Mapping[str, Any]) -> Any:
        return answer

    async def waits(tenant: Tenant, tool: str, arguments: Mapping[str, Any]) -> Any:
        await asyncio.sleep(0.1)
        return answer

    dispatcher, work = scene(waits if is_async else policy)
    failed = await dispatcher.dispatch("work", key="k")
    assert isinstance(failed, DispatchError)
    assert (failed.kind, failed.outcome, failed.attempts) == (ErrorKind.DENIED, Outcome.NOT_RUN, 0)
    assert failed.details["reason"] == reason
    assert work.begun == 0
    assert_quiet(dispatcher)


class Odd(BaseException):
    pass


@pytest.mark.requirement("D47")
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("error", [ValueError("db.internal"), SystemExit(1), asyncio.CancelledError(), Odd()], ids=repr)
@virtual_time
async def test_one_that_raises_denies_and_its_text_is_not_told(error: BaseException, is_async: bool) -> None:
    def policy(tenant: Tenant, tool: str, arguments: Mapping[str, Any]) -> Any:
        raise error

    async def waits(tenant: Tenant, tool: str, arguments: Mapping[str, Any]) -> Any:
        await asyncio.sleep(0.1)
        raise error

    dispatcher, work = scene(waits if is_async else policy)
    failed = await dispatcher.dispatch("work")
    assert isinstance(failed, DispatchError)
    assert (failed.kind, failed.details) == (ErrorKind.DENIED, {"reason": "policy_failed"})
    assert "internal" not in failed.message
    assert work.begun == 0
    assert_quiet(dispatcher)


@pytest.mark.requirement("D47")
@virtual_time
async def test_one_that_hangs_past_the_deadline_ends_the_call_there() -> None:
    left: list[str] = []

    async def policy(tenant: Tenant, tool: str, arguments: Mapping[str, Any]) -> bool:
        try:
            await asyncio.sleep(1_000)
        finally:
            left.append("cancelled")
        return True

    dispatcher, work = scene(policy)
    failed = await dispatcher.dispatch("work", deadline_ms=300)
    assert isinstance(failed, DispatchError)
    assert (failed.kind, failed.outcome, failed.attempts) == (ErrorKind.DEADLINE, Outcome.NOT_RUN, 0)
    assert now_ms() == 300
    assert work.begun == 0
    await spin()
    assert left == ["cancelled"]
    assert_quiet(dispatcher)


@pytest.mark.requirement("D47")
@virtual_time
async def test_one_that_will_not_be_cancelled_holds_nobody_up() -> None:
    release = asyncio.Event()

    async def policy(tenant: Tenant, tool: str, arguments: Mapping[str, Any]) -> bool:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                pass
        raise ValueError("long after")

    dispatcher, _ = scene(policy)
    failed = await dispatcher.dispatch("work", deadline_ms=300)
    assert isinstance(failed, DispatchError)
    assert failed.kind is ErrorKind.DEADLINE
    assert now_ms() == 300
    release.set()
    await spin()


@pytest.mark.requirement("D47", "D8")
@virtual_time
async def test_it_never_sees_a_call_that_failed_the_check_or_that_no_tool_is_there_for() -> None:
    asked: list[str] = []

    def policy(tenant: Tenant, tool: str, arguments: Mapping[str, Any]) -> bool:
        asked.append(tool)
        return False

    registry = Registry()
    registry.add_tool("strict", lambda arguments: None, input_schema={"type": "object", "required": ["n"]})
    dispatcher = make(registry, policy=policy)
    kinds = [(await dispatcher.dispatch(name, {})).kind for name in ("strict", "nope")]
    assert kinds == [ErrorKind.SCHEMA, ErrorKind.NOT_FOUND]
    assert asked == []


@pytest.mark.requirement("D47")
@virtual_time
async def test_what_it_does_to_the_arguments_does_not_reach_the_tool() -> None:
    def policy(tenant: Tenant, tool: str, arguments: Any) -> bool:
        arguments["mark"] = "changed"
        return True

    dispatcher, work = scene(policy)
    await dispatcher.dispatch("work", {"mark": "mine"})
    assert work.order == ["mine"]


@pytest.mark.requirement("D47", "D14")
@virtual_time
async def test_nested_calls_are_asked_for_too_as_their_parents_tenant() -> None:
    registry = Registry()
    work = add_work(registry)
    ends = []

    async def parent(arguments: dict[str, Any]) -> None:
        ends.append(await dispatcher.dispatch("work"))

    add(registry, "parent", parent)
    dispatcher = make(registry, policy=allow_tools("parent"))
    assert (await dispatcher.dispatch("parent")).ok
    assert ends[0].kind is ErrorKind.DENIED
    assert work.begun == 0


@pytest.mark.requirement("D47")
@virtual_time
async def test_by_default_all_is_allowed() -> None:
    dispatcher, work = scene(None)
    assert (await dispatcher.dispatch("work")).ok
    assert work.begun == 1


@pytest.mark.requirement("D54")
@virtual_time
async def test_calls_are_admitted_only_while_what_must_record_them_can() -> None:
    dispatcher, work = scene(None)
    events = hear(dispatcher)
    state = {"admits": True}
    dispatcher.require(lambda: state["admits"])
    dispatcher.require(lambda: True)
    assert (await dispatcher.dispatch("work")).ok
    state["admits"] = False
    refused = await dispatcher.dispatch("work", key="k")
    assert isinstance(refused, DispatchError)
    assert (refused.kind, refused.outcome, refused.attempts) == (ErrorKind.UNAVAILABLE, Outcome.NOT_RUN, 0)
    assert refused.retryable
    assert refused.details["retry_after_ms"] > 0
    assert work.begun == 1
    assert told(events)[-2:] == ["dispatch.start", "dispatch.error"]
    state["admits"] = True
    assert (await dispatcher.dispatch("work", key="k")).ok
    assert_quiet(dispatcher)


@pytest.mark.requirement("D54")
@virtual_time
async def test_what_cannot_say_whether_it_can_does_not_admit() -> None:
    dispatcher, work = scene(None)

    def admits() -> bool:
        raise OSError("disk")

    dispatcher.require(admits)
    refused = await dispatcher.dispatch("work")
    assert isinstance(refused, DispatchError)
    assert refused.kind is ErrorKind.UNAVAILABLE
    assert "disk" not in refused.message
    assert work.begun == 0
    assert_quiet(dispatcher)
