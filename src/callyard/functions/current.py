"""The call that runs here, where no executor is: a dispatcher sets it around its own handlers. `callyard.context()`,
`progress()`, `log()` and the questions to the client look it up. Source: tool-dispatch D42; call-execution X30.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Final, Protocol

import msgspec

from callyard.ids import CallId

ASK_PROVIDER: Final = "client"
"""The IO provider that takes a call's questions, and whose name stands in the details of one that got no answer."""


class CallInfo(msgspec.Struct, frozen=True):
    """What a running call may know of itself. Outside an executor and a dispatcher every field has its default."""

    call_id: CallId = CallId("")
    attempt: int = 1
    """Which try of the call this is, from 1."""
    owner: str = ""
    tenant: str = "default"
    tags: Mapping[str, str] = {}
    idempotency_key: str = ""
    """The caller's name for the effect of this call; hand it on to services that take one."""
    deadline_remaining_ms: int | None = None
    """Time left for the whole call when `context()` was called; None: it has no deadline."""
    budget_remaining_ms: int | None = None
    """Running time left when `context()` was called; None: it has no budget."""
    claims: Mapping[str, str] = {}
    """What the caller's token says of the caller."""
    headers: Mapping[str, str] = {}
    """Those of the request that the server is told to hand on, names in lower case."""
    meta: Mapping[str, Any] = {}
    """What the request said of itself (MCP's `_meta`), the part that the server is told to hand on."""


class RunningCall(Protocol):
    """One attempt of a call, as its own code sees it. Any thread may ask."""

    def call_info(self) -> CallInfo: ...

    def progress(self, done: float, total: float | None, message: str) -> None:
        """Tell the caller; nothing once the attempt has ended."""

    def log(self, level: str, message: str, fields: Mapping[str, Any]) -> bool:
        """Tell the caller. False: it does not listen."""

    def ask(self, kind: str, params: bytes) -> bytes:
        """Put a question to the caller's client and wait: JSON to JSON. Raises CallError, and UsageError where the wait
        would hold up the loop."""

    async def aask(self, kind: str, params: bytes) -> bytes:
        """As `ask`, awaited."""


RUNNING: Final[ContextVar[RunningCall | None]] = ContextVar("callyard_running_call", default=None)
"""None: nothing of ours runs here. Child tasks and `asyncio.to_thread` inherit it."""
