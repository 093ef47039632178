"""What user functions import: `sleep` and `context`.

Outside an executor (a test, a script, a notebook) each has a plain meaning of its own, so that a functions file can be
imported and its functions called anywhere. Importing this module costs next to nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

import msgspec

from callyard.ids import CallId


class CallInfo(msgspec.Struct, frozen=True):
    """What a running call may know of itself. Outside an executor every field has its default."""

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


class Runtime(Protocol):
    """What an executor gives this module."""

    def sleep(self, seconds: float) -> None: ...

    def call_info(self) -> CallInfo | None: ...


_runtime: Runtime | None = None


def set_runtime(runtime: Runtime | None) -> None:
    """For the executor: what `sleep` and `context` do from now on; None: as outside an executor."""
    global _runtime
    _runtime = runtime


def sleep(seconds: float) -> None:
    """Wait without holding up other calls of the process; in a `def` and in an `async def` alike.

    The time counts against the call's budget, and ends with it. In an `async def` it blocks the task that calls it, and
    no other. Raises `ValueError` for a negative duration.
    """
    if not seconds >= 0:
        raise ValueError(f"sleep length must be a number from 0, got {seconds!r}")
    if _runtime is None:
        time.sleep(seconds)
    else:
        _runtime.sleep(seconds)


def context() -> CallInfo:
    """The call that is running here; in its child tasks and `asyncio.to_thread` too."""
    found = None if _runtime is None else _runtime.call_info()
    return CallInfo() if found is None else found
