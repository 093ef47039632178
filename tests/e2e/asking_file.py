"""Functions that ask their client. A bundle target, never imported by a test."""

import asyncio
import dataclasses
import enum
from typing import Any

from callyard import CallError, aelicit, alist_roots, asample, context, elicit, function, sleep


class Size(enum.Enum):
    SMALL = "small"
    LARGE = "large"


@dataclasses.dataclass
class Order:
    name: str
    count: int | None = None
    size: Size = Size.SMALL


@function
def order() -> dict[str, Any]:
    got = elicit("What would you like?", Order)
    if got.value is None:
        return {"action": got.action}
    return {"name": got.value.name, "size": got.value.size.name, "type": type(got.value).__name__}


@function
async def everything() -> list[Any]:
    form = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "string"}}}
    answered, written, roots = await asyncio.gather(aelicit("First?", form), asample("Write."), alist_roots())
    return [answered.value, written.text, written.model, [root.uri for root in roots]]


@function(budget_ms=200)
def patient() -> int | None:
    sleep(0.05)
    elicit("Still there?")
    return context().budget_remaining_ms


@function
def trusting() -> str:
    return elicit("Anybody?").action


@function
def refused() -> str:
    try:
        elicit("Anybody?")
    except CallError as error:
        return error.failure.kind
    return "answered"


@function
def about() -> dict[str, Any]:
    here = context()
    return {"claims": dict(here.claims), "headers": dict(here.headers), "meta": dict(here.meta)}
