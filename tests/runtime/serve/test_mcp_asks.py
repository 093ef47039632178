"""A running call asks its client: on the session up to 2025-11-25, by rounds of one suspended call from 2026-07-28.

Source: tool-dispatch D33; the multi-round requests of MCP 2026-07-28.
"""

from __future__ import annotations

import asyncio
from typing import Any

import mcp_types as types
import pytest
from mcp import Client
from mcp.client.context import ClientRequestContext
from mcp.shared.exceptions import MCPError

from callyard.errors import ErrorKind
from callyard.functions.ports import AskRefused
from callyard.serve.gateway import ToolRequest
from callyard.serve.mcp_calls import suspended_max_of
from tests.runtime.serve.mcp_world import LEGACY, MODERN, Failed, Script, serving, until

both = pytest.mark.parametrize("mode", [LEGACY, MODERN])
NAME = {
    "message": "What is your name?",
    "requestedSchema": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
}
PROMPT = {"messages": [{"role": "user", "content": {"type": "text", "text": "Greet"}}], "maxTokens": 10}


async def ask(request: ToolRequest, kind: str, **params: Any) -> Any:
    asks: Any = request.on_ask
    return await asks(kind, params)


def asks_once(runs: list[str] | None = None) -> Script:
    async def asks(request: ToolRequest) -> str:
        if runs is not None:
            runs.append("begun")
        answer = await ask(request, "elicit", **NAME, name="user_name")
        return f"Hello, {answer['content']['name']}!" if answer["action"] == "accept" else answer["action"]

    return asks


async def answer_elicit(context: ClientRequestContext, params: types.ElicitRequestParams) -> types.ElicitResult:
    return types.ElicitResult(action="accept", content={"name": "Ada"})


async def answer_sample(
    context: ClientRequestContext, params: types.CreateMessageRequestParams
) -> types.CreateMessageResult:
    return types.CreateMessageResult(
        role="assistant", content=types.TextContent(text="Good day"), model="test", stop_reason="endTurn"
    )


async def answer_roots(context: ClientRequestContext) -> types.ListRootsResult:
    return types.ListRootsResult(roots=[types.Root(uri="file:///work", name="work")])  # type: ignore[arg-type]


ANSWERS: dict[str, Any] = {
    "elicitation_callback": answer_elicit,
    "sampling_callback": answer_sample,
    "list_roots_callback": answer_roots,
}


def text_of(result: Any) -> str:
    text: str = result.content[0].text
    return text


async def call_by_hand(client: Client, tool: str, **more: Any) -> Any:
    return await client.session.call_tool(tool, {}, allow_input_required=True, **more)


def accept(name: str) -> dict[str, Any]:
    return {"user_name": types.ElicitResult(action="accept", content={"name": name})}


@both
@pytest.mark.requirement("D33")
async def test_a_client_answers_and_the_same_call_goes_on(mode: str) -> None:
    runs: list[str] = []
    async with serving(scripts={"asks": asks_once(runs)}) as world, world.client(mode, **ANSWERS) as client:
        result = await client.call_tool("asks", {})
    assert text_of(result) == "Hello, Ada!"
    assert runs == ["begun"]


@both
@pytest.mark.requirement("D33")
async def test_all_kinds_are_asked_at_once(mode: str) -> None:
    async def asks(request: ToolRequest) -> list[Any]:
        person, model, roots = await asyncio.gather(
            ask(request, "elicit", **NAME), ask(request, "sample", **PROMPT), ask(request, "list_roots")
        )
        return [person["content"]["name"], model["content"]["text"], roots["roots"][0]["uri"]]

    async with serving(scripts={"asks": asks}) as world, world.client(mode, **ANSWERS) as client:
        result = await client.call_tool("asks", {})
        if mode == MODERN:
            first = await call_by_hand(client, "asks")
            assert set(first.input_requests) == {"elicit", "sample", "list_roots"}
    assert text_of(result) == '["Ada","Good day","file:///work"]'


@pytest.mark.requirement("D33")
async def test_rounds_follow_each_other_in_one_run() -> None:
    async def asks(request: ToolRequest) -> list[str]:
        return [(await ask(request, "elicit", **NAME, name=f"step{n}"))["content"]["name"] for n in range(3)]

    async with serving(scripts={"asks": asks}) as world, world.client(MODERN, **ANSWERS) as client:
        states = []
        result = await call_by_hand(client, "asks")
        for n in range(3):
            assert list(result.input_requests) == [f"step{n}"]
            states.append(result.request_state)
            responses = {f"step{n}": types.ElicitResult(action="accept", content={"name": str(n)})}
            result = await call_by_hand(client, "asks", input_responses=responses, request_state=result.request_state)
        assert text_of(result) == '["0","1","2"]'
        assert len(set(states)) == 3
        assert len(world.gateway.requests) == 1
        assert not world.gate.calls.runs


@pytest.mark.requirement("D33")
async def test_what_is_missing_or_does_not_fit_is_asked_again() -> None:
    runs: list[str] = []
    async with serving(scripts={"asks": asks_once(runs)}) as world, world.client(MODERN, **ANSWERS) as client:
        result = await call_by_hand(client, "asks")
        for wrong in (
            {},
            {"somebody": types.ElicitResult(action="decline")},
            {"user_name": types.ElicitResult(action="accept", content={})},
            {"user_name": types.ListRootsResult(roots=[])},
        ):
            result = await call_by_hand(client, "asks", input_responses=wrong, request_state=result.request_state)
            assert result.result_type == "input_required", wrong
            assert list(result.input_requests) == ["user_name"]
        result = await call_by_hand(client, "asks", input_responses=accept("Bob"), request_state=result.request_state)
    assert text_of(result) == "Hello, Bob!"
    assert runs == ["begun"]


@pytest.mark.requirement("D33")
async def test_an_answer_may_come_before_its_question() -> None:
    async with serving(scripts={"asks": asks_once()}) as world, world.client(MODERN, **ANSWERS) as client:
        extra = {**accept("Eve"), "nobody_asked": types.ElicitResult(action="decline")}
        result = await call_by_hand(client, "asks", input_responses=extra)
    assert text_of(result) == "Hello, Eve!"


@pytest.mark.requirement("D33")
async def test_a_decline_reaches_the_function() -> None:
    async with serving(scripts={"asks": asks_once()}) as world, world.client(MODERN, **ANSWERS) as client:
        result = await call_by_hand(client, "asks")
        responses = {"user_name": types.ElicitResult(action="decline")}
        result = await call_by_hand(client, "asks", input_responses=responses, request_state=result.request_state)
    assert text_of(result) == "decline"


@pytest.mark.requirement("D33")
async def test_a_state_that_is_used_tampered_with_or_somebody_elses_is_refused() -> None:
    async with (
        serving(scripts={"asks": asks_once(), "other": asks_once()}) as world,
        world.client(MODERN, "one", **ANSWERS) as client,
        world.client(MODERN, "two", **ANSWERS) as thief,
    ):
        result = await call_by_hand(client, "asks")
        state = result.request_state
        for who, tool, wrong in (
            (client, "asks", state + "x"),
            (client, "asks", "1 made-up"),
            (client, "other", state),  # of another tool's call
            (thief, "asks", state),
        ):
            with pytest.raises(MCPError, match="Invalid or expired requestState") as caught:
                await call_by_hand(who, tool, input_responses=accept("Eve"), request_state=wrong)
            assert caught.value.error.code == -32602
        good = await call_by_hand(client, "asks", input_responses=accept("Ada"), request_state=state)
        assert text_of(good) == "Hello, Ada!"
        with pytest.raises(MCPError, match="has ended"):
            await call_by_hand(client, "asks", input_responses=accept("Ada"), request_state=state)
    assert [request.tool for request in world.gateway.requests] == ["asks"]


@pytest.mark.requirement("D33")
async def test_an_earlier_round_cannot_be_played_again() -> None:
    async def asks(request: ToolRequest) -> list[str]:
        return [(await ask(request, "elicit", **NAME, name="user_name"))["action"] for _ in range(2)]

    async with serving(scripts={"asks": asks}) as world, world.client(MODERN, **ANSWERS) as client:
        first = await call_by_hand(client, "asks")
        second = await call_by_hand(client, "asks", input_responses=accept("Ada"), request_state=first.request_state)
        assert list(second.input_requests) == ["user_name_2"]
        with pytest.raises(MCPError, match="used already"):
            await call_by_hand(client, "asks", input_responses=accept("Ada"), request_state=first.request_state)


@pytest.mark.requirement("D33")
async def test_a_call_that_nobody_comes_back_for_ends_and_gives_all_back() -> None:
    told: list[str] = []

    async def asks(request: ToolRequest) -> str:
        try:
            await ask(request, "elicit", **NAME)
        except AskRefused as refused:
            told.append(str(refused))
            raise Failed(ErrorKind.DEADLINE, str(refused)) from None
        return "answered"

    async with (
        serving(scripts={"asks": asks}, ask_wait_s=0.05, kept_s=0.05, jobs_max=1) as world,
        world.client(MODERN, **ANSWERS) as client,
    ):
        result = await call_by_hand(client, "asks")
        await until(lambda: world.gateway.ended)
        await until(lambda: not world.gate.calls.runs)
        with pytest.raises(MCPError, match="has ended"):
            await call_by_hand(client, "asks", request_state=result.request_state)
        await until(lambda: not world.gateway.statistics().permits)
    assert told == ["elicitation/create was not answered in 0.05 s"]


@pytest.mark.requirement("D33")
async def test_who_comes_back_after_the_end_still_gets_it() -> None:
    async def asks(request: ToolRequest) -> str:
        try:
            await ask(request, "elicit", **NAME)
        except AskRefused:
            return "went on without"
        return "answered"

    async with serving(scripts={"asks": asks}, ask_wait_s=0.05) as world, world.client(MODERN, **ANSWERS) as client:
        result = await call_by_hand(client, "asks")
        await until(lambda: world.gateway.ended)
        result = await call_by_hand(client, "asks", request_state=result.request_state)
    assert text_of(result) == "went on without"


@both
@pytest.mark.requirement("D33")
async def test_a_client_that_cannot_be_asked_is_told_what_it_lacks(mode: str) -> None:
    told: list[str] = []

    async def catches(request: ToolRequest) -> str:
        try:
            await ask(request, "sample", **PROMPT)
        except AskRefused as refused:
            told.append(f"{refused.kind}: {refused}")
        return "did without"

    async with serving(scripts={"asks": asks_once(), "catches": catches}) as world, world.client(mode) as client:
        assert text_of(await client.call_tool("catches", {})) == "did without"
        assert told[0].startswith("denied: the client did not declare the capability 'sampling'")
        if mode == LEGACY:
            assert (await client.call_tool("asks", {})).is_error
        else:
            with pytest.raises(MCPError) as caught:
                await client.call_tool("asks", {})
            assert caught.value.error.code == -32021
            assert caught.value.error.data == {"requiredCapabilities": {"elicitation": {}}}


@pytest.mark.requirement("D33")
async def test_a_client_that_refuses_is_told_of_to_the_function() -> None:
    async def refuse(context: ClientRequestContext, params: Any) -> types.ErrorData:
        return types.ErrorData(code=-1, message="User rejected it")

    told: list[str] = []

    async def asks(request: ToolRequest) -> str:
        try:
            await ask(request, "sample", **PROMPT)
        except AskRefused as refused:
            told.append(str(refused))
        return "did without"

    async with serving(scripts={"asks": asks}) as world, world.client(LEGACY, sampling_callback=refuse) as client:
        await client.call_tool("asks", {})
    assert told == ["the client refused sampling/createMessage: User rejected it"]


@pytest.mark.requirement("D33")
async def test_a_question_that_is_none_is_refused() -> None:
    told: list[str] = []

    async def asks(request: ToolRequest) -> str:
        for kind, params in (("elicit", {}), ("telepathy", {})):
            try:
                await ask(request, kind, **params)
            except AskRefused as refused:
                told.append(str(refused))
        return "did without"

    async with serving(scripts={"asks": asks}) as world, world.client(MODERN, **ANSWERS) as client:
        await client.call_tool("asks", {})
    assert "elicitation/create cannot be asked so" in told[0]
    assert "'telepathy'" in told[1]


@pytest.mark.requirement("D33")
async def test_suspended_calls_have_a_cap() -> None:
    told: list[str] = []

    async def asks(request: ToolRequest) -> str:
        try:
            await ask(request, "elicit", **NAME)
        except AskRefused as refused:
            told.append(str(refused))
        return "did without"

    async with serving(scripts={"asks": asks}, suspended_max=1) as world, world.client(MODERN, **ANSWERS) as client:
        assert (await call_by_hand(client, "asks")).result_type == "input_required"
        assert text_of(await call_by_hand(client, "asks")) == "did without"
        world.gate.calls.close()  # the server stops: nobody is asked any more
        await until(lambda: len(world.gateway.ended) == 2)
    assert [one.partition(":")[0] for one in told] == [
        "1 calls wait for answers of clients already",
        "the server is shutting down and asks no more",
    ]


@pytest.mark.requirement("D41")
async def test_a_call_whose_client_leaves_while_it_goes_on_is_lost() -> None:
    hang = asyncio.Event()

    async def asks(request: ToolRequest) -> None:
        await ask(request, "elicit", **NAME, name="user_name")
        await hang.wait()

    async with serving(scripts={"asks": asks}) as world, world.client(MODERN, **ANSWERS) as client:
        result = await call_by_hand(client, "asks")
        going_on = asyncio.ensure_future(
            call_by_hand(client, "asks", input_responses=accept("Ada"), request_state=result.request_state)
        )
        await until(lambda: any(run.teller for run in world.gate.calls.runs.values()))
        going_on.cancel()
        await until(lambda: world.gateway.lost)


@both
@pytest.mark.requirement("D33", "D44")
async def test_one_token_leaves_others_their_turn_to_ask(mode: str) -> None:
    """Each question holds a place in an executor until it is answered."""
    silent = asyncio.Event()
    told: list[str] = []

    async def never(context: ClientRequestContext, params: types.ElicitRequestParams) -> types.ElicitResult:
        await silent.wait()
        return types.ElicitResult(action="decline")

    async def asks(request: ToolRequest) -> str:
        try:
            await ask(request, "elicit", **NAME)
        except AskRefused as refused:
            told.append(str(refused))
            return "refused"
        return "answered"

    async with serving(scripts={"asks": asks}, suspended_max=8) as world:
        async with (
            world.client(mode, "one", elicitation_callback=never) as one,
            world.client(mode, "two", **ANSWERS) as two,
        ):
            waiting = [asyncio.ensure_future(call_by_hand(one, "asks")) for _ in range(2)]
            await until(lambda: sum(len(x) for x in (world.gate.calls.runs, world.gate.calls._asking)) == 2)
            assert text_of(await call_by_hand(one, "asks")) == "refused"
            theirs = await call_by_hand(two, "asks")
            assert theirs.result_type == "input_required" if mode == MODERN else text_of(theirs) == "answered"
            silent.set()
            await asyncio.wait(waiting)
            if mode == LEGACY:
                assert world.gate.calls._asking == {}
        world.gate.calls.close()
    assert told[0] == "2 calls of this token wait for answers already"


@pytest.mark.requirement("D33")
def test_questions_leave_half_of_the_places_to_calls_that_run() -> None:
    assert [suspended_max_of(capacity, 1_024) for capacity in (1, 128, 256, 10_000)] == [1, 64, 128, 256]
    assert suspended_max_of(10_000, 10) == 5
