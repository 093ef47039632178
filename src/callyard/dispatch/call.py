"""One call under way: what it holds, what it waits for, and how it is told to look again or to stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextvars import Context
from typing import TYPE_CHECKING, Any, Final

import msgspec

from callyard.clock import Timers
from callyard.dispatch.allowance import Allowance
from callyard.dispatch.lines import Party
from callyard.dispatch.plan import NEVER, AttemptPlan, Limit
from callyard.errors import CallFailure, ErrorKind, Outcome, fail
from callyard.functions.checking import CheckedArguments
from callyard.functions.ports import EMPTY
from callyard.functions.registry import FunctionSpec
from callyard.ids import CallId, Owner, Tenant
from callyard.policy.breaker import Allowed, Breaker

if TYPE_CHECKING:
    from callyard.dispatch.client import Client
    from callyard.dispatch.keyed import LostRun

ProgressCallback = Callable[[float, float | None, str], None]
"""Called with done, total (None: unknown) and a message."""
LogCallback = Callable[[str, str, Mapping[str, Any]], None]
"""Called with a level, a message and fields."""

_log: Final = logging.getLogger("callyard.dispatch")
NOBODY: Final = CallId("")
_NOT_CHECKED: Final = CheckedArguments(b"{}")
_DEFAULT_TENANT: Final = Tenant("default")
_NO_OWNER: Final = Owner("")
_NO_TEXTS: Final[Mapping[str, str]] = {}


class Alarm:
    """Something to wait for: to be woken, or an instant. One waits at a time."""

    __slots__ = ("timers", "waiter")

    def __init__(self, timers: Timers) -> None:
        self.timers = timers
        self.waiter: asyncio.Future[None] | None = None

    def wake(self, _source: object = None) -> None:
        """Whoever pauses looks again. The argument is the task or future that calls back."""
        waiter = self.waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def pause(self, until_ms: int = NEVER) -> None:
        """Until somebody wakes it, or the instant: whoever pauses looks again, and pauses again."""
        waiter = self.waiter = asyncio.get_running_loop().create_future()
        timer = self.timers.call_at(until_ms, self.wake) if until_ms < NEVER else None
        try:
            await waiter
        finally:
            self.waiter = None
            if timer is not None:
                timer.cancel()


class Call(Alarm, Party):
    """Everything about one dispatch that outlives a step of it."""

    __slots__ = (
        "admission",
        "adrift",
        "adrift_below",
        "allowance",
        "breaker",
        "caller",
        "caller_id",
        "checked",
        "context",
        "ended",
        "enforced",
        "held",
        "id",
        "inside",
        "key",
        "limit",
        "lingering",
        "lost",
        "on_begin",
        "on_progress",
        "owner",
        "parent",
        "plan",
        "spec",
        "started_ms",
        "stopping",
        "tags",
        "tenant",
        "trace",
        "tries",
        "unpin",
    )

    plan: AttemptPlan
    # What few calls have is made when it is needed; the others cost nothing for it.
    asked_timeout_ms: int | None = None
    """What the caller gave, not the tool's own."""
    on_stop: Callable[[], None] | None = None
    """Asks whoever runs the attempt elsewhere to stop it."""
    holds_on: bool = False
    """It has ended, and keeps its places for those below it that are adrift."""
    on_log: LogCallback | None = None
    client: Client | None = None
    """Whom its questions go to."""
    claims: Mapping[str, str] = _NO_TEXTS
    headers: Mapping[str, str] = _NO_TEXTS
    meta: msgspec.Raw = EMPTY
    """A JSON object."""
    held_at_ms: int = 0
    held_limit: tuple[Limit, int] | None = None
    """The limit that was lifted meanwhile, and the instant that it named."""
    waited_ms: int = 0
    """For answers, in all."""

    def __init__(self, call_id: CallId, spec: FunctionSpec, timers: Timers, parent: Call | None) -> None:
        self.parent = parent
        self.inside = []
        self.timers = timers
        self.waiter = None
        self.id = call_id
        self.caller = parent
        """The call whose handler dispatched it."""
        self.caller_id = NOBODY if parent is None else parent.id
        self.spec = spec
        self.started_ms = timers.now_ms()
        self.checked = _NOT_CHECKED
        self.tenant = _DEFAULT_TENANT
        self.owner = _NO_OWNER
        self.key = ""
        self.tags: Mapping[str, str] = _NO_TEXTS
        self.trace: Mapping[str, str] = _NO_TEXTS
        """W3C trace context: `traceparent`, `tracestate`."""
        self.allowance: Allowance | None = None
        self.on_progress: ProgressCallback | None = None
        self.on_begin: Callable[[], None] | None = None
        """Told once, when its first attempt begins, or when it waits for another's run (R108, R109)."""
        self.held = 0
        """Open questions, of its own and of the calls nested in it: while there are any, its time does not run."""
        self.lost: LostRun | None = None
        """Its connection is gone, and it runs on without a key."""
        self.limit: Limit | None = None
        """Of the attempt that runs, or ran last."""
        self.tries = 0
        """Attempts that were started; those of an executor may have been refused before they began."""
        self.unpin: Callable[[], None] | None = None
        """Lets go of the version of the code that its attempts run."""
        self.breaker: Breaker | None = None
        """Its tool's, for its tenant."""
        self.admission: Allowed | None = None
        """What the tool's breaker gave it."""
        self.stopping: ErrorKind | None = None
        self.ended = False
        self.adrift = False
        """Its caller has gone, and its run goes on for its key."""
        self.adrift_below = 0
        """Such runs among those nested in it, however deep: they share its places, which it keeps until they have
        ended."""
        self.enforced = True
        """False: it runs in a thread, which no limit can stop."""
        self.lingering = False
        """It was answered, and holds what it holds until its code has ended."""
        self.context: Context | None = None
        """Its caller's, where it runs in another task than its caller's. Each attempt has a copy."""

    @property
    def has_begun(self) -> bool:
        return self.plan.attempts > 0

    def deadline_remaining_ms(self, now_ms: int) -> int | None:
        at_ms = self.plan.deadline_at_ms
        if at_ms >= NEVER:
            return None
        return max(0, at_ms - (self.held_at_ms if self.held else now_ms))

    def begin(self) -> None:
        """Tell that it has begun; a second time nothing is told."""
        then, self.on_begin = self.on_begin, None
        if then is not None:
            try:
                then()
            except Exception:  # noqa: BLE001 - the listener's fault: the call begins all the same
                _log.exception("on_begin of call %s failed", self.id)

    def hold(self, now_ms: int) -> None:
        """A question is open: from now on neither the attempt's time runs nor the call's (D40)."""
        self.held += 1
        if self.held > 1:
            return
        self.held_at_ms = now_ms
        if self.limit is not None:
            self.held_limit = self.limit, self.limit.at_ms
            self.limit.at_ms = NEVER
            self.wake()

    def go_on(self, now_ms: int) -> None:
        """It was answered: what was left is left, later by as long as it waited."""
        self.held -= 1
        if self.held:
            return
        waited_ms = now_ms - self.held_at_ms
        self.waited_ms += waited_ms
        self.plan.put_off(waited_ms)
        if self.held_limit is not None:
            limit, at_ms = self.held_limit
            limit.at_ms = at_ms + waited_ms
            self.held_limit = None
            self.wake()

    def silence(self) -> None:
        """Its caller has gone: nothing more is told or asked."""
        self.on_begin = self.on_log = self.on_progress = None
        if self.client is not None and self.caller is None:
            self.client.leave()

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
