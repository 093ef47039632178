"""Many dispatches at once, a bounded number of them at a time. Source: tool-dispatch D27."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from callyard.dispatch.allowance import Allowance
from callyard.dispatch.options import check_name, check_options, one_key
from callyard.dispatch.outcomes import DispatchError, DispatchResult
from callyard.errors import ErrorKind, Outcome, UsageError, fail
from callyard.functions.calling import BoundCall
from callyard.ids import CallId

if TYPE_CHECKING:
    from callyard.dispatch.dispatcher import Dispatcher


class ToolCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call of a fan-out: what `Dispatcher.dispatch` takes, as a value."""

    name: str | BoundCall[Any]
    """Of a tool; or a function with its arguments, by `bind`."""
    args: Mapping[str, Any] | bytes | None = None
    timeout_ms: int | None = None
    idempotency_key: str | None = None
    key: str | None = None
    """Short for `idempotency_key`."""
    allowance: Allowance | None = None
    owner: str | None = None
    deadline_ms: int | None = None
    tenant: str = "default"
    repair: bool = False
    call_id: str | None = None

    def options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__struct_fields__ if name not in ("name", "args")}


async def gather_bounded(
    dispatcher: Dispatcher, calls: Iterable[ToolCall], *, limit: int, fail_fast: bool
) -> list[DispatchResult]:
    """See `Dispatcher.gather_bounded`."""
    if type(limit) is not int or limit < 1:
        raise UsageError(f"limit must be a whole number from 1, got {limit!r}")
    todo = list(calls)
    _check(todo)
    results: list[DispatchResult | None] = [None] * len(todo)
    under_way: dict[CallId, None] = {}
    numbered = iter(enumerate(todo))
    failed = False

    async def take(numbered: Iterator[tuple[int, ToolCall]]) -> None:
        nonlocal failed
        for index, call in numbered:  # shared by all takers: each call is taken once
            call_id = dispatcher.next_id() if call.call_id is None else CallId(call.call_id)
            options = call.options() | {"call_id": call_id}
            if failed:
                message = "not begun: another call of the fan-out failed"
                failure = fail(ErrorKind.CANCELLED, message, outcome=Outcome.NOT_RUN)
                results[index] = DispatchError(call_id, failure, index=index)
                continue
            under_way[call_id] = None
            args = () if isinstance(call.name, BoundCall) else (call.args,)
            result = await dispatcher.dispatch(call.name, *args, **options)
            del under_way[call_id]
            results[index] = result.at_index(index)
            if fail_fast and not result.ok and not failed:
                failed = True
                for other in under_way:
                    dispatcher.cancel(other)

    if todo:
        await _all([asyncio.ensure_future(take(numbered)) for _ in range(min(limit, len(todo)))])
    return [result for result in results if result is not None]


def _check(calls: list[ToolCall]) -> None:
    """All of them, before any begins. Raises UsageError."""
    named: set[str] = set()
    for call in calls:
        if not isinstance(call, ToolCall):
            raise UsageError(f"a fan-out takes ToolCall(name, args, …), got {call!r}")
        if isinstance(call.name, BoundCall) and call.args is not None:
            raise UsageError(f"{call.name!r} has its arguments: a ToolCall of a bound call takes no others")
        check_options(call.timeout_ms, call.deadline_ms, call.allowance, call.owner, call.tenant)
        one_key(call.idempotency_key, None)
        if call.call_id is not None:
            check_name("call_id", call.call_id)
            if call.call_id in named:
                raise UsageError(f"two calls of one fan-out have the call_id {call.call_id!r}")
            named.add(call.call_id)


async def _all(takers: list[asyncio.Task[None]]) -> None:
    """Until each has ended. Raises what one of them did: a call_id that is under way by now. A `TaskGroup` would cancel
    them in no order at all, which no seed repeats (D51)."""
    try:
        await asyncio.wait(takers)
    except asyncio.CancelledError:
        for taker in takers:
            taker.cancel()
        await asyncio.wait(takers)
        raise
    for taker in takers:
        taker.result()
