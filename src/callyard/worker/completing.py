"""`as_completed`: many calls at once, each result as soon as it is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Iterable, Sequence
from typing import Any, Final, Protocol, Self, TypeVar, overload, runtime_checkable

from callyard.errors import CallError, UsageError
from callyard.sdk import Answer

LIMIT: Final = 1_024
"""Calls under way at once, unless it is said otherwise."""

R = TypeVar("R")


@runtime_checkable
class Placed(Protocol):
    """A result that knows its place: `Result`, `Ok`, `DispatchError`."""

    @property
    def index(self) -> int: ...

    def at_index(self, index: int) -> Self: ...


P = TypeVar("P", bound=Placed)


@overload
def as_completed(  # type: ignore[overload-overlap]
    calls: Iterable[Awaitable[P]], *, limit: int = ...
) -> AsyncGenerator[P, None]: ...
@overload
def as_completed(calls: Iterable[Awaitable[R]], *, limit: int = ...) -> AsyncGenerator[Answer[R], None]: ...
async def as_completed(calls: Iterable[Awaitable[Any]], *, limit: int = LIMIT) -> AsyncGenerator[Any, None]:
    """Await many calls at once, and yield each result as it ends; its `index` is the call's place, from 0.

        async for answer in as_completed(worker.call(price, item) for item in items):
            print(answer.index, answer.value if answer.ok else answer.error)

    `calls` are awaitables of `call`, `call_result` or `dispatch`, of different functions if you like; what `call`
    gives, or the `CallError` it raises, comes as an `Answer`. They are taken from the iterable as there is room: at
    most `limit` are under way. Leaving the loop cancels the rest, and so does any other exception of theirs, which is
    raised.
    """
    if type(limit) is not int or limit < 1:
        raise UsageError(f"limit must be a whole number from 1, got {limit!r}")
    waiting = enumerate(calls)
    begun = 0
    under_way: dict[int, asyncio.Future[Any]] = {}
    ended: asyncio.Queue[int] = asyncio.Queue()
    try:
        while True:
            while len(under_way) < limit and (following := next(waiting, None)) is not None:
                index, call = following
                begun += 1
                under_way[index] = asyncio.ensure_future(call)
                under_way[index].add_done_callback(lambda _, index=index: ended.put_nowait(index))  # type: ignore[misc]
            if not under_way:
                return
            index = await ended.get()
            yield _to_result(index, under_way.pop(index))
    finally:
        for left in under_way.values():
            left.cancel()
        await asyncio.gather(*under_way.values(), return_exceptions=True)
        if isinstance(calls, Sequence):  # of those that never began: they would be warned about
            for never in calls[begun:]:
                if asyncio.iscoroutine(never):
                    never.close()


def _to_result(index: int, ended: asyncio.Future[Any]) -> Any:
    try:
        value = ended.result()
    except CallError as error:
        return Answer(index, None, error.failure, error.__cause__)
    return value.at_index(index) if isinstance(value, Placed) else Answer(index, value, None)
