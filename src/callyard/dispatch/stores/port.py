"""What the dispatcher asks of a store of idempotency keys. Every store passes one suite of contract tests.

A key's life: free, in flight (claimed, with a fence), kept (an end that answers later callers). A fence is a number
that only grows: what an old holder writes after it lost its claim is refused. An end reads back equal to what was
settled, but for a failure's local variables, which are not kept, and for what is above the store's size limits.
Source: tool-dispatch D16-D21, D55.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec

from callyard.errors import CallFailure, CallyardError
from callyard.ids import CallId, Tenant
from callyard.policy.rate import Rate


class StoreUnavailable(CallyardError):
    """What the store stands on does not answer, or refuses: calls with a key end `unavailable`, and nothing runs."""


class KeyScope(msgspec.Struct, frozen=True):
    """What a key belongs to: two tenants, or two tools, never share one."""

    tenant: Tenant
    tool: str
    key: str


class KeyEnd(msgspec.Struct, frozen=True):
    """How the run of a key ended: an output or a failure."""

    call_id: CallId
    attempts: int
    output: bytes | None = None
    failure: CallFailure | None = None


class Claimed(msgspec.Struct, frozen=True):
    """The key is ours: run, then `settle` under this fence."""

    fence: int


class InFlight(msgspec.Struct, frozen=True):
    """Another holder runs it: `wait`, then claim again."""

    call_id: CallId
    fence: int


class Kept(msgspec.Struct, frozen=True):
    """It ended, and this is its end."""

    end: KeyEnd


class Conflicting(msgspec.Struct, frozen=True):
    """The key stands for other arguments."""

    call_id: CallId


class Full(msgspec.Struct, frozen=True):
    """No room, and nothing that may be forgotten."""

    retry_after_ms: int


Claim = Claimed | InFlight | Kept | Conflicting | Full


class KeyRecord(msgspec.Struct, frozen=True):
    """A key as operators see it."""

    scope: KeyScope
    end: KeyEnd
    ended_at_ms: int
    """Wall clock, milliseconds since 1970."""
    expires_at_ms: int


class SharedPlace(msgspec.Struct, frozen=True):
    """What a shared rate gave, or when it would have."""

    wait_ms: int
    is_taken: bool
    name: str = ""
    mark: str = ""
    """What the store knows it by."""


@runtime_checkable
class SharedRates(Protocol):
    """A store that several processes share keeps their rates, too (D58). By the server's clock."""

    async def take_place(self, name: str, tenant: Tenant, rate: Rate, wait_ms_max: int) -> SharedPlace:
        """A place of the tenant's under that rate: `wait_ms` is how long to wait for it. More than `wait_ms_max`:
        none is taken."""
        ...

    async def give_place_back(self, place: SharedPlace) -> None:
        """It will not be used. Only the newest comes back; an earlier one is spent all the same."""
        ...


class KeyStore(Protocol):
    """Raises `StoreUnavailable` from each method when what it stands on is out of reach."""

    async def open(self) -> None:
        """Find what an earlier process left in flight: unknown, or free where the tool is idempotent."""

    async def claim(
        self, scope: KeyScope, fingerprint: str, call_id: CallId, *, idempotent: bool, unknown_ttl_ms: int
    ) -> Claim:
        """Take a free key, or say why not. `idempotent` and `unknown_ttl_ms` go with the claim: what becomes of it when
        its holder dies. A claim whose caller is cancelled meanwhile is given back."""

    async def settle(self, scope: KeyScope, fence: int, end: KeyEnd | None, ttl_ms: int) -> bool:
        """Keep the end for `ttl_ms` from now, or free the key (None). False: the claim was lost, nothing is written.

        After StoreUnavailable the claim still stands and the store tries again by itself: nobody has to.
        """

    async def wait(self, scope: KeyScope, fence: int) -> None:
        """Until this claim is settled or lost; at once if it is so already. For claims of another process, or of
        another dispatcher over the same store: a dispatcher knows its own runs."""

    async def resolve(self, scope: KeyScope, end: KeyEnd | None, ttl_ms: int) -> bool:
        """Put an end in place of an unknown one, or free the key (None). False: nothing unknown is kept there."""

    async def find(self, scope: KeyScope) -> KeyEnd | None:
        """The end that is kept under a key. None: it is free, in flight, or forgotten."""

    async def unknown(self, tenant: Tenant | None = None, limit: int = 1_000) -> list[KeyRecord]:
        """The kept ends whose outcome is unknown, oldest first."""

    async def close(self) -> None:
        """Idempotent. Claims that are still held stay as they are."""
