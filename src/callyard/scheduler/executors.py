"""What the scheduler knows of executors, and the choice among them.

The choice is the smallest `(runnable, local_inflight, -headroom, executor_id)` among the eligible. A heap with lazy
deletion finds it: an executor that changed enters anew under a new version, and entries of older versions are dropped
when they surface, so a choice costs a few heap steps however many executors there are. What depends on the clock is
checked on the entry that surfaces: one that the clock rules out leaves the heap, and comes back with the next change of
its executor (a heartbeat, a released reservation) or when its block ends. With a sample size the same heap holds the
order of entry instead of the score, and the first N are scored. What an executor has not begun is its *line*, which is
held short (`policy.lookahead`). Source: call-execution X8-X10, X23, X91.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

import msgspec

from callyard.ids import CallId, ExecutorId, FunctionId
from callyard.policy.lookahead import Lookahead
from callyard.policy.stall import is_stalled
from callyard.scheduler.config import SchedulerConfig
from callyard.scheduler.placement import DEFAULT_POOL, Placement, PoolName

if TYPE_CHECKING:
    from callyard.scheduler.calls import Call


class ExecutorSnapshot(msgspec.Struct, frozen=True, gc=False):
    """One heartbeat as the shell hands it over, with the limits that hold for this executor now (X74)."""

    executor_id: ExecutorId
    heartbeat_seq: int
    received_at_ms: int
    runnable_count: int = 0
    inflight_count: int = 0
    available_contexts: int = 0
    memory_bytes: int = 0
    running: bool = False
    """A call is running on its only thread right now."""
    last_scheduler_active_at_ms: int = 0
    wants_replacement: bool = False
    stall_ms: int | None = None
    """None: the stall check is off."""
    heartbeat_timeout_ms: int | None = None
    """None: silence is not judged now."""


@dataclass(eq=False, slots=True)
class ExecutorState:
    """One executor process as the scheduler sees it."""

    executor_id: ExecutorId
    snapshot: ExecutorSnapshot
    pool: PoolName = DEFAULT_POOL
    placement: Placement | None = None
    """What it is bound to, of its own pool; None: nothing yet."""
    memory_high_watermark: int | None = None
    """None: the setting."""
    live: dict[CallId, int] = field(default_factory=dict)
    """Live reservations: call id to attempt_seq."""
    draining: set[tuple[CallId, int]] = field(default_factory=set)
    """Reservations of cancelled attempts, by call id and attempt_seq, that wait for their terminal frame."""
    draining_subcalls: set[tuple[CallId, int]] = field(default_factory=set)
    """Those among `draining` that hold no root call's context."""
    live_roots: int = 0
    """Root calls among `live`: `local_inflight`."""
    unbegun: int = 0
    """Root calls among `live` of which nothing shows that they have begun: its line."""
    lookahead: Lookahead = field(default_factory=lambda: Lookahead(0))
    code_runs: bool = True
    """By its page when it was last read, and since then something was bound: a call's code runs there."""
    waiting: int = 0
    """Calls among `live` that are WAITING."""
    hidden: int = 0
    """Calls that the last heartbeat showed suspended though the worker saw no request of theirs (sleep), less those
    that ended since."""
    sealed: bool = False
    """Takes no more calls: its loss is under way, or it wants to be replaced."""
    last_tool: FunctionId | None = None
    """Whose tool call left it last."""
    blamed: bool = False
    """Who brought it down is noted."""
    refusals: int = 0
    """Refused binds or sends since its last frame."""
    blocked_until_ms: int = 0
    """After a refusal; a freed context lifts it."""
    has_served: bool = False
    """A frame of a call came from it: it was sent one, and is bound to its placement for good."""
    wake_at_ms: int = 0
    """The last end of a block that the index was told to wait for."""
    version: int = 0
    """Of its entry in the index; older entries are dropped when they surface."""
    touched: bool = False
    """Changed since its last entry."""
    closed: bool = False
    """Takes no root call: an exclusive one is there, or will be once it is empty (X90)."""
    subcalls: deque[Call] = field(default_factory=deque)
    """READY subcalls whose home this is; those that ended where they stand are no longer `queued`."""
    in_ring: bool = False
    """Has its turn among executors with subcalls to bind."""
    subcall_args_bytes: int = 0
    """Of all subcalls that its calls asked for and that have not ended."""

    @property
    def is_free(self) -> bool:
        """It has nothing to run: no calls, or calls that only wait."""
        nothing_runs = self.runnable == 0 or not self.code_runs
        return nothing_runs and not self.unbegun and not self.draining

    @property
    def is_idle(self) -> bool:
        return not self.live and not self.draining

    def fits(self, placement: Placement) -> bool:
        """The one rule: what a call is placed on is of its pool, and bound to its placement or to nothing yet."""
        return self.placement == placement if self.placement is not None else self.pool == placement.pool

    @property
    def runnable(self) -> int:
        seen = len(self.live) - self.waiting
        return seen - self.hidden if self.hidden < seen else 0

    def take_heartbeat(self, snapshot: ExecutorSnapshot) -> None:
        """What it shows suspended beyond the calls whose requests the worker knows; stopped ones may be among them."""
        suspended = snapshot.inflight_count - snapshot.runnable_count
        self.hidden = max(0, suspended - self.waiting - len(self.draining))
        self.snapshot = snapshot
        self.sealed = self.sealed or snapshot.wants_replacement

    def take_limits(self, snapshot: ExecutorSnapshot) -> None:
        """The worker's own limits change between heartbeats; a heartbeat seen before changes nothing (X10, X74)."""
        self.snapshot = msgspec.structs.replace(
            self.snapshot, stall_ms=snapshot.stall_ms, heartbeat_timeout_ms=snapshot.heartbeat_timeout_ms
        )

    def usable_contexts(self, max_inflight: int) -> int:
        """Contexts for root calls by its last heartbeat, less those that cancelled calls still hold."""
        snapshot = self.snapshot
        total = snapshot.inflight_count + snapshot.available_contexts
        if total > max_inflight:
            total = max_inflight
        return total - (len(self.draining) - len(self.draining_subcalls)) if self.draining else total


_Score = tuple[int, int, int, ExecutorId]


def is_eligible(ex: ExecutorState, config: SchedulerConfig, placement: Placement, now_ms: int) -> bool:
    """The whole filter of X8, clock included. Also the model that the index is tested against."""
    return score(ex, config) is not None and ex.fits(placement) and is_current(ex, now_ms)


def score(ex: ExecutorState, config: SchedulerConfig, *, past_line: bool = False) -> _Score | None:
    """Smaller is better (X9); None: it has no room for another call (X8), or, unless `past_line`, its line has none
    (X91)."""
    inflight = ex.live_roots
    headroom = ex.usable_contexts(config.executor_max_inflight) - inflight
    runnable = ex.runnable
    watermark = ex.memory_high_watermark
    if watermark is None:
        watermark = config.executor_memory_high_watermark
    if (
        ex.sealed
        or ex.closed
        or headroom <= 0
        or inflight >= config.executor_max_inflight
        or runnable >= config.executor_max_runnable
        or (watermark and ex.snapshot.memory_bytes >= watermark)
        or (ex.unbegun >= ex.lookahead.limit and not past_line)
    ):
        return None
    return runnable, inflight, -headroom, ex.executor_id


def is_current(ex: ExecutorState, now_ms: int) -> bool:
    """The part of the filter that depends on the clock."""
    snapshot = ex.snapshot
    timeout = snapshot.heartbeat_timeout_ms
    return (
        now_ms >= ex.blocked_until_ms
        and (timeout is None or now_ms - snapshot.received_at_ms <= timeout)
        and not (snapshot.running and is_stalled(snapshot.stall_ms, True, snapshot.last_scheduler_active_at_ms, now_ms))
    )


_Entry = tuple[int, int, int, ExecutorId, int, ExecutorState]


class ExecutorIndex:
    """All executors, and the best eligible one for a placement."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._sample_size = config.executor_selection_sample_size
        self.executors: dict[ExecutorId, ExecutorState] = {}
        self._heaps: dict[Placement | PoolName, list[_Entry]] = {}
        """By what they are bound to; those bound to nothing by their pool."""
        self._touched: list[ExecutorState] = []
        """Executors whose entry is out of date; entered anew before the next choice, so that many changes in one turn
        cost one entry."""
        self._blocked: list[tuple[int, ExecutorId, ExecutorState]] = []
        """A heap of executors that surfaced while blocked, by the end of their block."""
        self._entered = 0
        """Entries so far: the order of entry, which is the cursor of sampling."""
        self.crowded: dict[ExecutorId, ExecutorState] = {}
        """Where a call waits behind one that runs, as far as the worker knows; this and `held` are true after
        `refresh_if_crowded`, `refresh` and a choice."""
        self.held: dict[ExecutorId, ExecutorState] = {}
        """Those of them that take no call for their line alone."""

    def add(self, ex: ExecutorState) -> None:
        self.executors[ex.executor_id] = ex
        self.touch(ex)

    def remove(self, executor_id: ExecutorId) -> ExecutorState | None:
        """Forget an executor and every entry of it. Rare, so it may cost a pass over the heaps."""
        ex = self.executors.pop(executor_id, None)
        if ex is None:
            return None
        ex.sealed = True
        self.crowded.pop(executor_id, None)
        self.held.pop(executor_id, None)
        if ex.touched:
            self._touched.remove(ex)
        ex.touched = True  # what still changes in it is of no interest here
        ex.version += 1
        for key in list(self._heaps):
            self._prune(key)
        self._blocked = [entry for entry in self._blocked if entry[2] is not ex]
        heapify(self._blocked)
        return ex

    def touch(self, ex: ExecutorState) -> None:
        """Call after every change that the filter or the score can see."""
        if not ex.touched:
            ex.touched = True
            self._touched.append(ex)

    def select(self, placement: Placement, now_ms: int) -> ExecutorState | None:
        """The best eligible executor, or None. Takes nothing: the caller reserves and calls `touch`."""
        blocked = self._blocked
        while blocked and blocked[0][0] <= now_ms:
            self.touch(heappop(blocked)[2])
        if self._touched:
            self.refresh()
        if self._sample_size:
            return self._select_sampled(placement, now_ms)
        return self._first(placement, now_ms)

    def refresh_if_crowded(self) -> None:
        """Make `crowded` and `held` true; at little cost where nobody is crowded, as with one call after the other."""
        for ex in self._touched:
            if self.crowded or (ex.unbegun and len(ex.live) > 1):
                self.refresh()
                return

    def refresh(self) -> None:
        """Take in what changed since the last choice."""
        for ex in self._touched:
            self._enter(ex)
        self._touched.clear()

    def select_other(self, placement: Placement, now_ms: int, ex: ExecutorState) -> ExecutorState | None:
        """The usual choice among the others (X30); where they have room but for their lines, the best of those: what
        is placed so cannot wait."""
        closed, ex.closed = ex.closed, True
        self.touch(ex)
        found = self.select(placement, now_ms)
        if found is None and self.held:
            fit = (other for other in self.held.values() if other.fits(placement) and is_current(other, now_ms))
            found = min(fit, key=lambda one: score(one, self._config, past_line=True) or (), default=None)
        ex.closed = closed
        self.touch(ex)
        return found

    def _first(self, placement: Placement, now_ms: int) -> ExecutorState | None:
        """The eligible executor whose entry is smallest, bound to the placement or to nothing yet."""
        bound = self._peek(placement, now_ms)
        if placement.pool not in self._heaps:
            return None if bound is None else bound[5]
        free = self._peek(placement.pool, now_ms)
        if bound is None or free is None:
            best = bound or free
            return None if best is None else best[5]
        return bound[5] if bound[:4] < free[:4] else free[5]

    def _enter(self, ex: ExecutorState) -> None:
        ex.touched = False
        ex.version += 1
        standing = score(ex, self._config)
        crowded = ex.unbegun > 0 and len(ex.live) - ex.waiting > 1  # a call waits there behind one that runs
        if crowded != (ex.executor_id in self.crowded):
            self._list(self.crowded, ex, crowded)
        held = standing is None and ex.unbegun >= ex.lookahead.limit
        if held or ex.executor_id in self.held:
            self._list(self.held, ex, held and score(ex, self._config, past_line=True) is not None)
        if standing is None:
            return
        key = ex.pool if ex.placement is None else ex.placement
        heap = self._heaps.get(key)
        if heap is None:
            heap = self._heaps[key] = []
        if self._sample_size:
            self._entered += 1
            heappush(heap, (self._entered, 0, 0, ex.executor_id, ex.version, ex))
        else:
            heappush(heap, (*standing, ex.version, ex))
        if len(heap) > 64 + 4 * len(self.executors):
            self._prune(key)

    @staticmethod
    def _list(executors: dict[ExecutorId, ExecutorState], ex: ExecutorState, belongs: bool) -> None:
        if belongs:
            executors[ex.executor_id] = ex
        else:
            executors.pop(ex.executor_id, None)

    def _prune(self, key: Placement | PoolName) -> None:
        heap = [entry for entry in self._heaps[key] if entry[4] == entry[5].version]
        if heap:
            heapify(heap)
            self._heaps[key] = heap
        else:
            del self._heaps[key]

    def _peek(self, key: Placement | PoolName, now_ms: int) -> _Entry | None:
        heap = self._heaps.get(key)
        if heap is None:
            return None
        while heap:
            entry = heap[0]
            ex = entry[5]
            if entry[4] == ex.version:
                if is_current(ex, now_ms):
                    return entry
                if now_ms < ex.blocked_until_ms != ex.wake_at_ms:
                    ex.wake_at_ms = ex.blocked_until_ms
                    heappush(self._blocked, (ex.blocked_until_ms, ex.executor_id, ex))
            heappop(heap)
        del self._heaps[key]
        return None

    def _select_sampled(self, placement: Placement, now_ms: int) -> ExecutorState | None:
        """Score the next N eligible executors and send them to the back, so that all get their share."""
        best: ExecutorState | None = None
        best_score: _Score | None = None
        for _ in range(self._sample_size):
            ex = self._first(placement, now_ms)
            if ex is None:
                break
            ex.version += 1
            self.touch(ex)
            standing = score(ex, self._config)
            if standing is not None and (best_score is None or standing < best_score):
                best, best_score = ex, standing
        return best
