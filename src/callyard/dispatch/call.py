"""One call under way: what it holds, what it waits for, and how it is told to look again or to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextvars import Context, ContextVar
from typing import Final

from callyard.clock import Timers
from callyard.dispatch.allowance import Allowance
from callyard.dispatch.lines import Party
from callyard.dispatch.plan import NEVER, AttemptPlan
from callyard.errors import CallFailure, ErrorKind, Outcome, fail
from callyard.functions.checking import CheckedArguments
from callyard.functions.registry import FunctionSpec
from callyard.ids import CallId, Owner, Tenant
from callyard.policy.breaker import Allowed

ProgressCallback = Callable[[float, float | None, str], None]
"""Called with done, total (None: unknown) and a message."""


_NOT_CHECKED: Final = CheckedArguments(b"{}")


class Alarm:
    """Something to wait for: to be woken, or an instant. One waits at a time."""

    _waiter: asyncio.Future[None] | None = None

    def __init__(self, timers: Timers) -> None:
        self._timers = timers

    def wake(self, _source: object = None) -> None:
        """Whoever pauses looks again. The argument is the task or future that calls back."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def pause(self, until_ms: int = NEVER) -> None:
        """Until somebody wakes it, or the instant: whoever pauses looks again, and pauses again."""
        waiter = self._waiter = asyncio.get_running_loop().create_future()
        timer = self._timers.call_at(until_ms, self.wake) if until_ms < NEVER else None
        try:
            await waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()


class Call(Alarm, Party):
    """Everything about one dispatch that outlives a step of it. What few calls have is a default of the class."""

    plan: AttemptPlan
    checked: CheckedArguments = _NOT_CHECKED
    tenant: Tenant = Tenant("default")
    owner: Owner = Owner("")
    key: str = ""
    asked_timeout_ms: int | None = None
    """What the caller gave, not the tool's own."""
    tags: Mapping[str, str] = {}
    trace: Mapping[str, str] = {}
    """W3C trace context: `traceparent`, `tracestate`."""
    allowance: Allowance | None = None
    on_progress: ProgressCallback | None = None
    tries: int = 0
    """Attempts that were started; those of an executor may have been refused before they began."""
    unpin: Callable[[], None] | None = None
    """Lets go of the version of the code that its attempts run."""
    admission: Allowed | None = None
    """What the tool's breaker gave it."""
    stopping: ErrorKind | None = None
    on_stop: Callable[[], None] | None = None
    """Asks whoever runs the attempt elsewhere to stop it."""
    ended: bool = False
    adrift: bool = False
    """Its caller has gone, and its run goes on for its key."""
    adrift_below: int = 0
    """Such runs among those nested in it, however deep: they share its places, which it keeps until they have ended."""
    holds_on: bool = False
    """It has ended, and keeps its places for them."""
    enforced: bool = True
    """False: it runs in a thread, which no limit can stop."""
    lingering: bool = False
    """It was answered, and holds what it holds until its code has ended."""
    context: Context | None = None
    """Its caller's, where it runs in another task than its caller's."""

    def __init__(self, call_id: CallId, spec: FunctionSpec, timers: Timers, parent: Call | None) -> None:
        self.parent = parent
        self.inside = []
        self._timers = timers
        self.id = call_id
        self.caller = parent
        """The call whose handler dispatched it."""
        self.spec = spec
        self.started_ms = timers.now_ms()

    @property
    def has_begun(self) -> bool:
        return self.plan.attempts > 0

    def new_context(self) -> Context | None:
        """A copy for one attempt; None: the present one's."""
        return None if self.context is None else self.context.copy()

    def deadline_remaining_ms(self, now_ms: int) -> int | None:
        at_ms = self.plan.deadline_at_ms
        return None if at_ms >= NEVER else max(0, at_ms - now_ms)

    def mark_effect(self) -> None:
        """It has begun. Where it may not run twice, and has no key that would see to it, the calls that it is nested in
        may not either, whatever they promised (X64)."""
        above = self.caller
        if above is None or self.spec.promises.idempotent or self.key:
            return
        while above is not None:
            above.plan.idempotent = False
            above = above.caller

    def stop(self, kind: ErrorKind) -> None:
        """Come to an end: `cancelled` or `shutting_down`. What runs is interrupted, what waits waits no more."""
        if self.stopping is None and not self.ended:
            self.stopping = kind
            if self.on_stop is not None:
                self.on_stop()
            self.wake()

    def stopped(self) -> CallFailure:
        """What it ends with when it is stopped before it has begun."""
        assert self.stopping is not None
        cancelled = self.stopping is ErrorKind.CANCELLED
        message = "cancelled before it ran" if cancelled else "shutting down: it did not run"
        return fail(self.stopping, message, outcome=Outcome.NOT_RUN)


CURRENT: Final[ContextVar[Call | None]] = ContextVar("callyard_call", default=None)
"""The call whose handler runs here."""
