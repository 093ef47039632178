"""What the scheduler knows of executors, and the choice among them.

The choice is the smallest `(runnable, local_inflight, -headroom, executor_id)` among the eligible. A heap with lazy
deletion finds it: an executor that changed enters anew under a new version, and entries of older versions are dropped
when they surface, so a choice costs a few heap steps however many executors there are. What depends on the clock
(heartbeat, stall, refusals) is checked on the entry that surfaces. Source: call-execution X8-X10, X23.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import msgspec

from callyard.ids import CallId, Digest, ExecutorId
from callyard.policy.stall import is_stalled
from callyard.scheduler.config import SchedulerConfig


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


class ExecutorState(msgspec.Struct, eq=False):
    """One executor process as the scheduler sees it."""

    executor_id: ExecutorId
    snapshot: ExecutorSnapshot
    digest: Digest | None = None
    """The bundle it is bound to; None: none yet."""
    live: dict[CallId, int] = {}
    """Live reservations: call id to attempt_seq."""
    draining: set[tuple[CallId, int]] = set()
    """Reservations of cancelled attempts, by call id and attempt_seq, that wait for their terminal frame."""
    live_roots: int = 0
    """Root calls among `live`: `local_inflight`."""
    waiting: int = 0
    """Calls among `live` that are WAITING."""
    hidden: int = 0
    """Calls that the last heartbeat showed suspended though the worker saw no request of theirs (sleep)."""
    sealed: bool = False
    """Takes no more calls: its loss is under way, or it wants to be replaced."""
    refusals: int = 0
    """Refused binds or sends since the last accepted one."""
    blocked_until_ms: int = 0
    version: int = 0
    """Of its entry in the index; older entries are dropped when they surface."""
    touched: bool = False
    """Changed since its last entry."""

    @property
    def runnable(self) -> int:
        seen = len(self.live) - self.waiting
        return seen - self.hidden if self.hidden < seen else 0

    def usable_contexts(self, max_inflight: int) -> int:
        """Contexts for root calls by its last heartbeat, less those that cancelled calls still hold."""
        snapshot = self.snapshot
        total = snapshot.inflight_count + snapshot.available_contexts
        return (max_inflight if total > max_inflight else total) - len(self.draining)


def is_eligible(ex: ExecutorState, config: SchedulerConfig, digest: Digest, now_ms: int) -> bool:
    """The whole filter of X8, clock included. Also the model that the index is tested against."""
    return _has_room(ex, config) and (ex.digest is None or ex.digest == digest) and _is_current(ex, now_ms)


def _has_room(ex: ExecutorState, config: SchedulerConfig) -> bool:
    watermark = config.executor_memory_high_watermark
    return (
        not ex.sealed
        and ex.live_roots < config.executor_max_inflight
        and ex.usable_contexts(config.executor_max_inflight) > ex.live_roots
        and ex.runnable < config.executor_max_runnable
        and (watermark == 0 or ex.snapshot.memory_bytes < watermark)
    )


def _is_current(ex: ExecutorState, now_ms: int) -> bool:
    snapshot = ex.snapshot
    timeout = snapshot.heartbeat_timeout_ms
    return (
        now_ms >= ex.blocked_until_ms
        and (timeout is None or now_ms - snapshot.received_at_ms <= timeout)
        and not is_stalled(snapshot.stall_ms, snapshot.running, snapshot.last_scheduler_active_at_ms, now_ms)
    )


def score(ex: ExecutorState, config: SchedulerConfig) -> tuple[int, int, int, ExecutorId]:
    """Smaller is better: X9."""
    inflight = ex.live_roots
    headroom = ex.usable_contexts(config.executor_max_inflight) - inflight
    return ex.runnable, inflight, -headroom, ex.executor_id


_Entry = tuple[int, int, int, ExecutorId, int, ExecutorState]


class ExecutorIndex:
    """All executors, and the best eligible one for a bundle."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.executors: dict[ExecutorId, ExecutorState] = {}
        self._heaps: dict[Digest | None, list[_Entry]] = {}
        self._touched: list[ExecutorState] = []
        """Executors whose entry is out of date; entered anew before the next choice, so that many changes in one turn
        cost one entry."""
        self._cursor = 0

    def add(self, ex: ExecutorState) -> None:
        self.executors[ex.executor_id] = ex
        self.touch(ex)

    def remove(self, executor_id: ExecutorId) -> ExecutorState | None:
        ex = self.executors.pop(executor_id, None)
        if ex is not None:
            ex.sealed = True
            self.touch(ex)
        return ex

    def touch(self, ex: ExecutorState) -> None:
        """Call after every change that the filter or the score can see."""
        if not ex.touched:
            ex.touched = True
            self._touched.append(ex)

    def select(self, digest: Digest, now_ms: int) -> ExecutorState | None:
        """The best eligible executor, or None. Takes nothing: the caller reserves and calls `touch`."""
        if self._config.executor_selection_sample_size:
            return self._select_sampled(digest, now_ms)
        if self._touched:
            touched, self._touched = self._touched, []
            for ex in touched:
                self._enter(ex)
        bound = self._peek(digest, now_ms)
        free = self._peek(None, now_ms)
        if bound is None or free is None:
            best = bound or free
            return None if best is None else best[5]
        return bound[5] if bound[:4] < free[:4] else free[5]

    def _enter(self, ex: ExecutorState) -> None:
        ex.touched = False
        ex.version += 1
        if not _has_room(ex, self._config):
            return
        heap = self._heaps.get(ex.digest)
        if heap is None:
            heap = self._heaps[ex.digest] = []
        heappush(heap, (*score(ex, self._config), ex.version, ex))
        if len(heap) > 64 + 4 * len(self.executors):
            heap[:] = [entry for entry in heap if entry[4] == entry[5].version]
            heapify(heap)

    def _peek(self, digest: Digest | None, now_ms: int) -> _Entry | None:
        heap = self._heaps.get(digest)
        while heap:
            entry = heap[0]
            ex = entry[5]
            if entry[4] == ex.version:
                if _is_current(ex, now_ms):
                    return entry
                self.touch(ex)  # the clock rules it out now; the next choice looks again
            heappop(heap)
        return None

    def _select_sampled(self, digest: Digest, now_ms: int) -> ExecutorState | None:
        """Score the next N eligible executors from a cursor that moves on, so that all get their share."""
        ring = list(self.executors.values())
        best: ExecutorState | None = None
        left = self._config.executor_selection_sample_size
        for step in range(len(ring)):
            ex = ring[(self._cursor + step) % len(ring)]
            if not is_eligible(ex, self._config, digest, now_ms):
                continue
            if best is None or score(ex, self._config) < score(best, self._config):
                best = ex
            left -= 1
            if left == 0:
                self._cursor = (self._cursor + step + 1) % len(ring)
                break
        return best
