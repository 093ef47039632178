"""What the SDK does inside an executor: `callyard.sdk` calls it from whatever greenlet and thread user code is in."""

from __future__ import annotations

import _thread
import time
from time import monotonic_ns
from typing import TYPE_CHECKING, Final

from callyard import sdk
from callyard.executor.contexts import RUNNING

if TYPE_CHECKING:
    from callyard.executor.hub import Hub


class ExecutorRuntime:
    """An `sdk.Runtime`. Built in the main thread."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._main_thread: Final = _thread.get_ident()

    def sleep(self, seconds: float) -> None:
        """Suspend the call that runs here, and no other."""
        in_main_thread = _thread.get_ident() == self._main_thread
        context = self._hub.running
        if context is not None and in_main_thread:
            self._hub.suspend(context, seconds)
        elif in_main_thread and RUNNING.get(None) is not None:
            raise RuntimeError("sleep() in a callback of the event loop would hold up every call; use asyncio.sleep()")
        else:  # a thread of the user's, or the import of the bundle
            time.sleep(seconds)

    def call_info(self) -> sdk.CallInfo | None:
        call = RUNNING.get(None)
        if call is None:
            return None
        known = call.payload.context
        remaining_ms = known.deadline_remaining_ms
        if remaining_ms is not None:
            remaining_ms = max(0, remaining_ms - (monotonic_ns() - call.received_ns) // 1_000_000)
        return sdk.CallInfo(
            call.call_id,
            known.attempt,
            known.owner,
            known.tenant,
            known.tags,
            known.idempotency_key,
            remaining_ms,
        )
