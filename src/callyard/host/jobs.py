"""The job budget: how many records may be received or queued before their handlers begin, who waits for room, pressure.

A permit is taken before a record is received, goes with the record to its turn, and comes back directly before the
handler's first instruction, or when the record ends earlier. In use is reserved + queued; who waits has none.
When one comes back, the oldest live waiter has it in the same step, and only then is pressure looked at: the total is
what it was, so a full queue with somebody in line neither resumes nor pauses again.

Everything here is one synchronous step of one thread. What others are to be told (a grant, a transition) goes through
an outbox that the outermost step empties once the counts are right; so callbacks may call anything here, and a
thousand waiters are no recursion. Each waiter's callback runs in the context in which it began to wait, not in that of
the handler whose permit it inherits. Source: job-queue §3, §5, R5, R6, R16, R27, R48, R50, R61-R63, R68.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from contextvars import copy_context
from enum import StrEnum
from typing import Final

import msgspec

from callyard.clock import Clock
from callyard.host.errors import HostError, HostErrorKind
from callyard.policy.ranges import check_whole
from callyard.transport.port import FlowState

JOBS_MAX: Final = 2**31 - 1
PAUSE_PERCENT: Final = 80
RESUME_PERCENT: Final = 60


def count_pause_permits(limit: int, pause_percent: int) -> int:
    """Permits in use from which on the state is PAUSED: ceil(M * P / 100), in whole numbers. Source: R61."""
    return -(-limit * pause_percent // 100)


def count_resume_permits(limit: int, resume_percent: int) -> int:
    """Permits in use down to which the state goes back to RUNNING: floor(M * R / 100). Source: R61."""
    return limit * resume_percent // 100


def check_thresholds(pause_percent: int, resume_percent: int) -> None:
    """Raises ValueError. Source: R62."""
    check_whole("pause_percent", pause_percent, 1, 100)
    check_whole("resume_percent", resume_percent, 0, 99)
    if resume_percent >= pause_percent:
        raise ValueError(
            f"resume_percent must be below pause_percent, got resume_percent={resume_percent} and "
            f"pause_percent={pause_percent}: without a gap the state would flap"
        )


class Transition(msgspec.Struct, frozen=True):
    """A change of pressure. Its number rises by one each time, for as long as the host lives; 0 is the start."""

    number: int
    state: FlowState


class JobQueueStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The queue at one instant. Counters (`peak`, `waits`, `to_*`, cumulative) are since the last reset."""

    limit: int
    pause_permits: int
    resume_permits: int
    reserved: int
    queued: int
    in_use: int
    peak: int
    transition: Transition
    pause_current_ms: int
    """Since the state last became PAUSED, whatever was reset meanwhile; 0 while RUNNING."""
    pause_cumulative_ms: int
    to_running: int
    to_paused: int
    waiters: int
    waits: int
    """Acquires that had to wait, and began to since the reset."""
    wait_ms: int
    """How long those of them waited that have ended."""
    epoch: int
    """How often the counters were reset."""


class PermitState(StrEnum):
    RESERVED = "reserved"
    QUEUED = "queued"
    RELEASED = "released"


# Looking a member up in its enum costs as much as the rest of a step.
_RESERVED: Final = PermitState.RESERVED
_QUEUED: Final = PermitState.QUEUED
_RELEASED: Final = PermitState.RELEASED
_RUNNING: Final = FlowState.RUNNING
_PAUSED: Final = FlowState.PAUSED


class Permit:
    """Room for one job. Whoever holds it gives it back, once; a second time changes nothing."""

    __slots__ = ("_jobs", "state")

    def __init__(self, jobs: JobQueue) -> None:
        self._jobs = jobs
        self.state = _RESERVED

    def to_queued(self) -> None:
        """Its record stands in an owner's queue now. The total stays as it is. Source: R6."""
        assert self.state is _RESERVED, f"only a reserved permit goes into a queue, this one is {self.state}"
        self.state = _QUEUED
        self._jobs._reserved -= 1
        self._jobs._queued += 1

    def release(self) -> None:
        """Give it back; the oldest waiter has it before this returns."""
        if self.state is not _RELEASED:
            self._jobs._take_back(self)

    def __repr__(self) -> str:
        return f"<Permit {self.state}>"


class WaiterState(StrEnum):
    WAITING = "waiting"
    GRANTED = "granted"
    """It has a permit, and is told of it as soon as the step that it was granted in is done."""
    TOLD = "told"
    """The permit is its callback's."""
    CANCELLED = "cancelled"
    CLOSED = "closed"
    """The queue was closed while it waited."""


class JobWaiter:
    """One place in the line. It ends once: told, cancelled or closed."""

    __slots__ = ("_began_at_ms", "_closed", "_context", "_epoch", "_granted", "_jobs", "_permit", "key", "state")

    def __init__(
        self,
        jobs: JobQueue,
        key: Hashable,
        granted: Callable[[Permit], None],
        closed: Callable[[], None] | None,
        began_at_ms: int,
    ) -> None:
        self.key = key
        self.state = WaiterState.WAITING
        self._jobs = jobs
        self._granted = granted
        self._closed = closed
        self._context = copy_context()
        self._permit: Permit | None = None
        self._began_at_ms = began_at_ms
        self._epoch = jobs._epoch

    def cancel(self) -> bool:
        """Leave the line, or give back a permit that was granted and not told yet. Nobody is called back for it.

        Returns whether this ended the wait; once told, the permit is the callback's and this does nothing.
        Source: R31, R48.
        """
        return self._jobs._cancel(self)

    def _tell(self) -> None:
        permit = self._permit
        assert permit is not None, f"a grant without a permit: {self}"
        self.state, self._permit = WaiterState.TOLD, None
        self._context.run(self._granted, permit)

    def __repr__(self) -> str:
        return f"<JobWaiter {self.key!r} {self.state}>"


class JobQueue:
    """At most `limit` permits (M) out at once; thresholds in percent of it.

    `on_transition` is called for each change of pressure, in order, after the counts have changed and outside of them.
    `may_wait` raises where nobody may acquire: under a gate, in a receive callback. Source: R50.
    """

    __slots__ = (
        *("_clock", "_line", "_may_wait", "_on_transition", "_queued", "_reserved"),
        *("_cumulative_from_ms", "_cumulative_ms", "_epoch", "_paused_at_ms", "_peak"),
        *("_granted", "_is_telling", "_outbox", "_to_paused", "_to_running", "_wait_ms", "_waits"),
        *("is_closed", "limit", "pause_permits", "resume_permits", "transition"),
    )

    def __init__(
        self,
        limit: int,
        *,
        pause_percent: int = PAUSE_PERCENT,
        resume_percent: int = RESUME_PERCENT,
        clock: Clock,
        on_transition: Callable[[Transition], None] | None = None,
        may_wait: Callable[[], None] | None = None,
    ) -> None:
        check_whole("limit", limit, 1, JOBS_MAX)
        check_thresholds(pause_percent, resume_percent)
        self.limit = limit
        self.pause_permits = count_pause_permits(limit, pause_percent)
        self.resume_permits = count_resume_permits(limit, resume_percent)
        self.is_closed = False
        self.transition = Transition(0, _RUNNING)
        """The last one."""
        self._clock = clock
        self._on_transition = on_transition
        self._may_wait = may_wait
        self._reserved = 0
        self._queued = 0
        self._line: OrderedDict[Hashable, JobWaiter] = OrderedDict()
        """Who waits, oldest first. Not empty only while all permits are out."""
        self._granted: dict[Hashable, JobWaiter] = {}
        """Who has a permit and was not told. Its permits are counted as reserved."""
        self._outbox: deque[JobWaiter | Transition] = deque()
        self._is_telling = False
        self._epoch = 0
        self._peak = 0
        self._waits = 0
        self._wait_ms = 0
        self._to_running = 0
        self._to_paused = 0
        self._paused_at_ms: int | None = None
        self._cumulative_from_ms = 0
        """While PAUSED: from when on the time is not in `_cumulative_ms` yet."""
        self._cumulative_ms = 0

    @property
    def in_use(self) -> int:
        return self._reserved + self._queued

    @property
    def waiters(self) -> int:
        return len(self._line)

    @property
    def pressure(self) -> FlowState:
        return self.transition.state

    def is_in_line(self, key: Hashable) -> bool:
        """Whether `key` waits, or has been granted a permit that it was not told of yet."""
        return key in self._line or key in self._granted

    # --- taking ---

    def try_acquire(self) -> Permit | None:
        """A permit if one is free now and nobody waits for it; never waits. Raises what `may_wait` raises."""
        if self._may_wait is not None:
            self._may_wait()
        if self._line or self._reserved + self._queued >= self.limit or self.is_closed:
            return None
        permit = self._reserve()
        if self._outbox:
            self._tell_all()
        return permit

    def wait(
        self, key: Hashable, granted: Callable[[Permit], None], *, closed: Callable[[], None] | None = None
    ) -> JobWaiter:
        """Stand in line for one permit, or have it at once when one is free and nobody waits.

        `granted` owns the permit that it is given. It may be called before this returns, else out of whoever gives
        a permit back; `closed` is called instead if the queue is closed first. A key has one place: while it is in
        line, a second wait is answered with the first one, and its callbacks are not kept. Source: R16, R27.
        Raises `HostError`: SHUTTING_DOWN once closed, and what `may_wait` raises.
        """
        if self._may_wait is not None:
            self._may_wait()
        if self.is_closed:
            raise HostError(HostErrorKind.SHUTTING_DOWN, f"the host takes no more jobs: no permit for {key!r}")
        waiter = self._line.get(key) or self._granted.get(key)
        if waiter is not None:
            return waiter
        now_ms = self._clock.now_ms()
        waiter = JobWaiter(self, key, granted, closed, now_ms)
        if self._line or self._reserved + self._queued >= self.limit:
            self._line[key] = waiter
            self._waits += 1
        else:
            self._grant(waiter)
            self._tell_all()
        return waiter

    # --- giving back ---

    def close(self) -> None:
        """End every wait, once; whoever comes later is refused. Permits that are out come back as ever."""
        if self.is_closed:
            return
        self.is_closed = True
        ended = [*self._granted.values(), *self._line.values()]
        self._line.clear()
        self._granted.clear()
        for waiter in ended:
            if waiter.state is WaiterState.WAITING:
                self._count_wait(waiter)
                self._outbox.append(waiter)  # who was granted is in there
            waiter.state = WaiterState.CLOSED
            if waiter._permit is not None:
                waiter._permit.release()
        self._tell_all()

    def reset_metrics(self) -> None:
        """Start the counters anew. Keeps the state, its number, the running pause and what is held. Source: R73."""
        self._epoch += 1
        self._peak = self.in_use
        self._waits = self._wait_ms = self._to_running = self._to_paused = self._cumulative_ms = 0
        self._cumulative_from_ms = self._clock.now_ms()

    # --- seeing ---

    def status(self) -> JobQueueStatus:
        now_ms = self._clock.now_ms()
        paused_at_ms = self._paused_at_ms
        is_paused = paused_at_ms is not None
        return JobQueueStatus(
            limit=self.limit,
            pause_permits=self.pause_permits,
            resume_permits=self.resume_permits,
            reserved=self._reserved,
            queued=self._queued,
            in_use=self.in_use,
            peak=self._peak,
            transition=self.transition,
            pause_current_ms=now_ms - paused_at_ms if paused_at_ms is not None else 0,
            pause_cumulative_ms=self._cumulative_ms + (now_ms - self._cumulative_from_ms if is_paused else 0),
            to_running=self._to_running,
            to_paused=self._to_paused,
            waiters=len(self._line),
            waits=self._waits,
            wait_ms=self._wait_ms,
            epoch=self._epoch,
        )

    def check_invariants(self) -> None:
        """Between steps, by the names of the design page."""
        in_use = self._reserved + self._queued
        assert self._reserved >= 0, f"permit_once: {self._reserved} reserved"
        assert self._queued >= 0, f"permit_once: {self._queued} queued"
        assert in_use <= self.limit, f"permits_bounded: {in_use} of {self.limit} in use"
        assert in_use <= self._peak, f"permits_bounded: {in_use} in use above the peak of {self._peak}"
        assert not self._line or in_use == self.limit, f"oldest_first: {len(self._line)} wait beside {in_use} in use"
        assert not (self._line.keys() & self._granted.keys()), "oldest_first: a key waits twice"
        for waiter in self._line.values():
            assert waiter.state is WaiterState.WAITING, f"oldest_first: {waiter} in line"
        if self.transition.state is _PAUSED:
            assert in_use > self.resume_permits, f"hysteresis: paused at {in_use}, resume at {self.resume_permits}"
        else:
            assert in_use < self.pause_permits, f"hysteresis: running at {in_use}, pause at {self.pause_permits}"
        assert self._is_telling or not (self._outbox or self._granted), "permit_once: somebody was not told"
        assert not (self.is_closed and self._line), "permit_once: somebody waits at a closed queue"

    # --- steps ---

    def _reserve(self) -> Permit:
        self._reserved += 1
        in_use = self._reserved + self._queued
        if in_use > self._peak:
            self._peak = in_use
        if in_use >= self.pause_permits and self.transition.state is _RUNNING:
            self._turn_to(_PAUSED)
        return Permit(self)

    def _grant(self, waiter: JobWaiter) -> None:
        waiter._permit = self._reserve()
        waiter.state = WaiterState.GRANTED
        self._granted[waiter.key] = waiter
        self._outbox.append(waiter)

    def _take_back(self, permit: Permit) -> None:
        if permit.state is _QUEUED:
            self._queued -= 1
        else:
            self._reserved -= 1
        permit.state = _RELEASED
        if self._line:
            _, waiter = self._line.popitem(last=False)
            self._count_wait(waiter)
            self._grant(waiter)
        elif self._reserved + self._queued <= self.resume_permits and self.transition.state is _PAUSED:
            self._turn_to(_RUNNING)
        if self._outbox:
            self._tell_all()

    def _cancel(self, waiter: JobWaiter) -> bool:
        if waiter.state is WaiterState.WAITING:
            del self._line[waiter.key]
            self._count_wait(waiter)
            waiter.state = WaiterState.CANCELLED
            return True
        if waiter.state is WaiterState.GRANTED:
            del self._granted[waiter.key]
            waiter.state, permit = WaiterState.CANCELLED, waiter._permit
            assert permit is not None, f"a grant without a permit: {waiter}"
            permit.release()
            return True
        return False

    def _count_wait(self, waiter: JobWaiter) -> None:
        if waiter._epoch == self._epoch:
            self._wait_ms += self._clock.now_ms() - waiter._began_at_ms

    def _turn_to(self, state: FlowState) -> None:
        now_ms = self._clock.now_ms()
        if state is _PAUSED:
            self._paused_at_ms = self._cumulative_from_ms = now_ms
            self._to_paused += 1
        else:
            self._paused_at_ms = None
            self._cumulative_ms += now_ms - self._cumulative_from_ms
            self._to_running += 1
        self.transition = Transition(self.transition.number + 1, state)
        if self._on_transition is not None:
            self._outbox.append(self.transition)

    def _tell_all(self) -> None:
        """Empty the outbox, unless a step further out is at it."""
        if self._is_telling:
            return
        self._is_telling = True
        try:
            while self._outbox:
                self._tell(self._outbox.popleft())
        finally:
            self._is_telling = False
            if self._outbox:  # one callback raised: that is no reason for the others not to hear
                self._tell_all()

    def _tell(self, news: JobWaiter | Transition) -> None:
        if isinstance(news, Transition):
            if self._on_transition is not None:
                self._on_transition(news)
        elif news.state is WaiterState.GRANTED:
            del self._granted[news.key]
            news._tell()
        elif news.state is WaiterState.CLOSED and news._closed is not None:
            news._context.run(news._closed)
