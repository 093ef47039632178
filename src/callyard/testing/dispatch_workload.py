"""What one seed gives a dispatcher to do, and what goes wrong while it does it."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any, Final, Literal

import msgspec

from callyard.dispatch.outcomes import DispatchResult
from callyard.dispatch.stores.port import KeyScope
from callyard.ids import CallId, Tenant
from callyard.policy.breaker import BreakerPolicy

GRACE_MS: Final = 250
TTL_MS: Final = 5_000
UNKNOWN_TTL_MS: Final = 30 * 86_400_000
STORE_MS_MAX: Final = 400
"""Longest time that the store takes for one step."""


class Tool(msgspec.Struct, frozen=True):
    name: str
    idempotent: bool
    max_concurrency: int | None
    timeout_ms: int
    on_abandon: Literal["cancel", "finish"] | None

    @property
    def promises(self) -> dict[str, Any]:
        return {
            "idempotent": self.idempotent,
            "max_concurrency": self.max_concurrency,
            "timeout_ms": self.timeout_ms,
            "on_abandon": self.on_abandon,
        }


class Faults(msgspec.Struct, frozen=True):
    """Chances, each 0..1."""

    raises: float = 0
    transient: float = 0
    hangs: float = 0
    """The handler never ends by itself."""
    stubborn: float = 0
    """It swallows its cancellation for a while."""
    leaves: float = 0
    """The caller is cancelled."""
    cancelled: float = 0
    """Somebody asks to stop the call."""
    store_slow: float = 0
    store_fails: float = 0

    @classmethod
    def draw(cls, rng: Random) -> Faults:
        """Some of them, each as likely as the seed says."""
        return cls(**{name: rng.choice((0, 0, 0.05, 0.3)) for name in cls.__struct_fields__})


class Setting(msgspec.Struct, frozen=True):
    """What of a seed stays the same."""

    tools: tuple[Tool, ...]
    dispatchers: int
    """They share the store."""
    slots: int
    entries_max: int
    breaker: BreakerPolicy | None
    keys: int
    owners: int
    calls: int
    nests: float

    @classmethod
    def draw(cls, rng: Random) -> Setting:
        tools = tuple(
            Tool(
                name=f"tool-{number}",
                idempotent=rng.random() < 0.5,
                max_concurrency=rng.choice((None, None, 1, 2)),
                timeout_ms=rng.choice((200, 1_000, 5_000)),
                on_abandon=rng.choice((None, None, "cancel", "finish")),
            )
            for number in range(rng.randint(1, 4))
        )
        breaker = BreakerPolicy(failures=rng.randint(1, 4), window_ms=5_000, open_ms=1_000, open_ms_max=4_000)
        return cls(
            tools=tools,
            dispatchers=rng.choice((1, 1, 2)),
            slots=rng.choice((1, 2, 8)),
            entries_max=rng.choice((8, 1_000)),
            breaker=rng.choice((None, breaker)),
            keys=rng.choice((2, 10)),
            owners=rng.choice((0, 2)),
            calls=rng.randint(10, 80),
            nests=rng.choice((0, 0.3)),
        )


class Run(msgspec.Struct, eq=False):
    """One attempt, as the handler sees it."""

    tool: Tool
    dispatcher: int
    call_id: CallId
    attempt: int
    scope: KeyScope | None
    owner: tuple[str, str] | None
    n: int
    begun_at_ms: int
    tenant: Tenant
    circuit: int
    """How often the tool's breaker had moved, that of the tenant."""
    told_to_stop: bool = False
    end: Literal["", "ok", "raised", "transient", "cancelled"] = ""
    ended_at_ms: int = 0

    @property
    def root(self) -> str:
        """The call that it is nested in, however deep."""
        return self.call_id.partition("/")[0]

    @property
    def is_active(self) -> bool:
        return not self.end and not self.told_to_stop

    @property
    def value(self) -> str:
        return f"{self.call_id}#{self.attempt}"


class Asked(msgspec.Struct, eq=False):
    """One dispatch, as its caller sees it."""

    tool: Tool
    call_id: CallId
    scope: KeyScope | None
    n: int
    deadline_ms: int | None
    started_ms: int
    task: asyncio.Task[DispatchResult] | None = None
    result: DispatchResult | None = None
    gone: bool = False
    """Its caller was cancelled."""
