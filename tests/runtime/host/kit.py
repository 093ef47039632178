"""Hosts in virtual time, with the messages that tests send."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from callyard.host.errors import HostError, HostErrorKind
from callyard.host.host import Host
from callyard.host.spots import States
from callyard.testing.scripted_transport import ScriptedTransport
from callyard.testing.virtual_time import VirtualTimers
from callyard.transport.port import Transport, TransportFactory


class Add(msgspec.Struct):
    count: int


class Total(msgspec.Struct):
    pass


class Fail(msgspec.Struct):
    why: str = "bad"


class Wait(msgspec.Struct):
    ms: int = 1_000


class Counter:
    """A spot's object: what it was sent, in order."""

    def __init__(self, spot: str = "counter") -> None:
        self.spot = spot
        self.seen: list[int] = []
        self.gate: asyncio.Event | None = None
        """While it is set to one, adding waits for it."""

    @Host.handler
    async def add(self, message: Add) -> int:
        self.seen.append(message.count)
        if self.gate is not None:
            await self.gate.wait()
        return sum(self.seen)

    @Host.handler
    def total(self, message: Total) -> int:
        return sum(self.seen)

    @Host.handler
    def fail(self, message: Fail) -> None:
        raise ValueError(message.why)

    @Host.handler
    async def wait(self, message: Wait) -> str:
        await asyncio.sleep(message.ms / 1_000)
        return "waited"

    def dump(self) -> list[int]:
        return self.seen

    def load(self, state: list[int]) -> None:
        self.seen = state


def make_host(
    transport: Transport | TransportFactory | None = None, *, states: States | None = None, **settings: Any
) -> Host:
    return Host(transport=transport, states=states, clock=VirtualTimers(), **settings)


@asynccontextmanager
async def serving(
    transport: ScriptedTransport | None = None, *, states: States | None = None, **settings: Any
) -> AsyncIterator[Host]:
    """A host that is checked when it is closed: nothing may be left of anything."""
    host = make_host(transport, states=states, **settings)
    async with host:
        yield host
        host.parts.check_invariants()
    host.assert_empty()


async def kind_of(awaitable: Awaitable[Any]) -> HostErrorKind | None:
    """How a call ended; None: well."""
    try:
        await awaitable
    except HostError as error:
        return error.kind
    return None


async def until(condition: Callable[[], bool], *, steps: int = 1_000) -> None:
    """Let everything run, with the time standing still, until it is so."""
    for _ in range(steps):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not come to be so")


def add(count: int = 1) -> bytes:
    return msgspec.json.encode(Add(count))


def drops(host: Host) -> dict[tuple[str, str], int]:
    return {(dropped.message_kind, dropped.reason.value): n for dropped, n in host.parts.drops.counts.items()}
