"""Who may call what."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from callyard.dispatch.policies import Allow, Deny, Policy, allow_tools, ask_policy
from callyard.errors import CallFailure, ErrorKind, Outcome
from callyard.ids import Tenant

TENANT = Tenant("acme")


async def ask(policy: Policy, tool: str = "pay", arguments: Mapping[str, Any] | None = None) -> CallFailure | None:
    return await ask_policy(policy, TENANT, tool, arguments or {})


def answering(answer: Any) -> Policy:
    return lambda tenant, tool, arguments: answer


@pytest.mark.requirement("D47")
@pytest.mark.parametrize("answer", [True, Allow()])
async def test_allowed(answer: Any) -> None:
    assert await ask(answering(answer)) is None


@pytest.mark.requirement("D47")
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        *[(Deny("not on Sundays"), "not on Sundays"), ("not on Sundays", "not on Sundays")],
        *[(False, "not_allowed"), ("", "not_allowed"), (Deny(), "not_allowed"), (Deny(""), "not_allowed")],
        ("x" * 5_000, "x" * 1_000),
    ],
)
async def test_denied_with_its_reason(answer: Any, reason: str) -> None:
    failure = await ask(answering(answer))
    assert failure is not None
    assert (failure.kind, failure.outcome, failure.attempts) == (ErrorKind.DENIED, Outcome.NOT_RUN, 0)
    assert failure.details == {"reason": reason}
    assert failure.message == f"pay is denied: {reason}"


@pytest.mark.requirement("D47")
async def test_it_sees_tenant_tool_and_arguments_and_may_be_async() -> None:
    seen = []

    async def policy(tenant: Tenant, tool: str, arguments: Mapping[str, Any]) -> bool:
        await asyncio.sleep(0)
        seen.append((tenant, tool, arguments))
        return arguments["cents"] <= 500

    assert await ask(policy, arguments={"cents": 500}) is None
    assert await ask(policy, arguments={"cents": 501}) is not None
    assert seen == [("acme", "pay", {"cents": 500}), ("acme", "pay", {"cents": 501})]


@pytest.mark.requirement("D47")
@pytest.mark.parametrize("error", [ValueError("db://secret@host"), asyncio.CancelledError("db://secret@host")])
@pytest.mark.parametrize("is_async", [False, True])
async def test_one_that_raises_denies_and_the_caller_learns_nothing(
    error: BaseException, is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def policy(tenant: Tenant, tool: str, arguments: Mapping[str, Any]) -> bool:
        raise error

    async def slow_policy(tenant: Tenant, tool: str, arguments: Mapping[str, Any]) -> bool:
        return policy(tenant, tool, arguments)

    failure = await ask(slow_policy if is_async else policy)
    assert failure is not None
    assert failure.details == {"reason": "policy_failed"}
    assert "secret" not in str(failure)
    assert "the policy failed on pay for tenant acme" in caplog.text
    assert "db://secret@host" in caplog.text


@pytest.mark.requirement("D47")
@pytest.mark.parametrize("answer", [None, 1, {"allow": True}, Allow])
async def test_an_answer_that_is_none_denies(answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    failure = await ask(answering(answer))
    assert failure is not None
    assert failure.details["reason"] == "policy_failed"
    assert "a policy answers Allow(), Deny(reason), a bool or a reason as text" in caplog.text


@pytest.mark.requirement("D47", "D7")
async def test_the_callers_own_cancellation_passes(caplog: pytest.LogCaptureFixture) -> None:
    asked = asyncio.Event()

    async def policy(tenant: Tenant, tool: str, arguments: Mapping[str, Any]) -> bool:
        asked.set()
        await asyncio.Event().wait()
        return True

    task = asyncio.create_task(ask(policy))
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert caplog.record_tuples == []


@pytest.mark.requirement("D47")
async def test_allow_tools() -> None:
    policy = allow_tools("search", "files.*", "a?")
    names = ("search", "files.read", "a1", "searches", "Search", "files", "a12", "search\n")
    assert [await ask(policy, name) is None for name in names] == [True, True, True, *[False] * 5]
    assert await ask(allow_tools(), "search") is not None
    assert await ask(allow_tools("*"), "search") is None


@pytest.mark.parametrize("globs", [(["search", "files.*"],), ("",), (None,)])
def test_allow_tools_says_how_it_is_called(globs: Any) -> None:
    with pytest.raises(TypeError, match=r"one by one, got "):
        allow_tools(*globs)
