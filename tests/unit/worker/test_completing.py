"""`as_completed`, by awaitables that end as the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from callyard import Answer, CallError, DispatchError, ErrorKind, Ok, Result, UsageError, as_completed
from callyard.errors import fail
from callyard.ids import CallId
from callyard.scheduler import CallResult


class Gates:
    """Calls that wait to be let through, and what becomes of them."""

    def __init__(self) -> None:
        self.open: dict[int, asyncio.Future[object]] = {}
        self.cancelled: list[int] = []
        self.begun: list[int] = []

    async def call(self, index: int) -> object:
        self.begun.append(index)
        self.open[index] = asyncio.get_running_loop().create_future()
        try:
            return await self.open[index]
        except asyncio.CancelledError:
            self.cancelled.append(index)
            raise

    async def let(self, index: int, value: object = None) -> None:
        while index not in self.open:
            await asyncio.sleep(0)
        if isinstance(value, BaseException):
            self.open[index].set_exception(value)
        else:
            self.open[index].set_result(value)


FAILURE = fail(ErrorKind.TRANSIENT, "later")


async def test_results_come_as_they_end_and_know_their_place() -> None:
    gates = Gates()
    answers = as_completed([gates.call(n) for n in range(3)])
    taken: list[Answer[object]] = []
    for index, end in ((2, "two"), (0, CallError(FAILURE)), (1, None)):
        following = asyncio.ensure_future(anext(answers))
        await gates.let(index, end)
        taken.append(await following)
    assert [(answer.index, answer.ok) for answer in taken] == [(2, True), (0, False), (1, True)]
    assert (taken[0].unwrap(), taken[1].error, taken[2].value) == ("two", FAILURE, None)
    with pytest.raises(StopAsyncIteration):
        await anext(answers)


@pytest.mark.parametrize(
    "value",
    [Result(CallResult(0, b"1", None)), Ok(CallId("c"), b"1"), DispatchError(CallId("c"), FAILURE)],
    ids=lambda value: type(value).__name__,
)
async def test_what_is_a_result_itself_gets_its_place(value: Result[int] | Ok[int] | DispatchError) -> None:
    async def give() -> Result[int] | Ok[int] | DispatchError:
        return value

    results = [result async for result in as_completed([give(), give(), give()])]
    assert {type(result) for result in results} == {type(value)}
    assert sorted(result.index for result in results) == [0, 1, 2]
    assert value.index == 0


async def test_calls_are_taken_as_there_is_room() -> None:
    gates = Gates()

    def endless() -> Iterator[asyncio.Future[object]]:
        index = 0
        while True:
            yield asyncio.ensure_future(gates.call(index))
            index += 1

    answers = as_completed(endless(), limit=3)
    for index in range(5):
        following = asyncio.ensure_future(anext(answers))
        await gates.let(index)
        assert (await following).index == index
        assert len(gates.begun) <= index + 3
    await answers.aclose()
    assert gates.cancelled == [5, 6]


async def test_leaving_cancels_what_is_under_way_and_never_begins_the_rest() -> None:
    gates = Gates()
    answers = as_completed([gates.call(n) for n in range(6)], limit=4)
    following = asyncio.ensure_future(anext(answers))
    await gates.let(1)
    await following
    await answers.aclose()
    assert (gates.begun, sorted(gates.cancelled)) == ([0, 1, 2, 3], [0, 2, 3])


@pytest.mark.parametrize("limit", [0, -1, True, 1.5])
async def test_a_limit_that_is_none_is_refused(limit: int) -> None:
    with pytest.raises(UsageError, match="limit must be a whole number from 1"):
        await anext(as_completed([], limit=limit))


async def test_any_other_exception_ends_it_and_cancels_the_rest() -> None:
    gates = Gates()
    answers = as_completed([gates.call(n) for n in range(3)])
    following = asyncio.ensure_future(anext(answers))
    await gates.let(1, ValueError("mine"))
    with pytest.raises(ValueError, match="mine"):
        await following
    assert sorted(gates.cancelled) == [0, 2]


async def test_an_iterable_that_raises_passes_through() -> None:
    gates = Gates()

    def breaks() -> Iterator[AsyncIterator[object]]:
        yield gates.call(0)  # type: ignore[misc]
        raise LookupError("of the iterable")

    with pytest.raises(LookupError, match="of the iterable"):
        await anext(as_completed(breaks()))  # type: ignore[call-overload]


async def test_nothing_gives_nothing() -> None:
    nothing: list[Callable[[], object]] = []
    assert [answer async for answer in as_completed(nothing)] == []  # type: ignore[call-overload]
