"""Tenants side by side: the real scheduler with `instance_fairness`, one executor, lists of any length.

What is checked at each bind is the bound: a tenant with a ready call and nothing in flight waits for at most as many
binds of others as there are tenants with ready calls, times the quantum; and any tenant for at most 32 times that. In
the end every call has run. Source: call-execution X17.
"""

from __future__ import annotations

from functools import partial

from callyard.ids import Digest, ExecutorId, FunctionId, TaskId, Tenant
from callyard.scheduler import commands as c
from callyard.scheduler import events as e
from callyard.scheduler.batches import prepare_batch
from callyard.scheduler.calls import FunctionTarget, NewCall
from callyard.scheduler.config import SchedulerConfig
from callyard.scheduler.core import Scheduler
from callyard.scheduler.executors import ExecutorSnapshot
from callyard.scheduler.tasks import TaskPlan
from callyard.scheduler.tenants import AGED_TURNS
from callyard.testing.simulation import Simulation

TARGET = FunctionTarget(FunctionId("f"), Digest("d"), "m:f")
BATCH_ROWS = 8_000


class Wait:
    """Binds of others since a tenant waits, and who had ready calls meanwhile."""

    def __init__(self) -> None:
        self.binds = 0
        self.tenants: set[Tenant] = set()


class FairnessWorld:
    """`lists`: so many calls of each tenant; drawn by the seed when not given."""

    def __init__(self, simulation: Simulation, lists: dict[Tenant, int] | None = None) -> None:
        self.simulation = simulation
        self._rng = simulation.stream("world")
        rng = simulation.stream("setting")
        self.faults_until_ms = 0
        quantum = rng.choice((0, 1, 2, 5, 16))
        self._quantum = max(1, quantum)
        self._long_ms = rng.choice((1, 50, 1_000))
        contexts = rng.choice((1, 4, 32))
        if lists is None:
            tenants = rng.choice((2, 3, 8, 30))
            lists = {Tenant(f"tenant-{n}"): rng.choice((1, 1, 10, 200)) for n in range(tenants)}
            lists[Tenant("tenant-0")] = 2_000
        self._lists = lists
        self._slow = {str(tenant) for tenant in lists if lists[tenant] < 1_000 and rng.random() < 0.4}
        """Tenants whose calls take long."""
        self.config = SchedulerConfig(
            instance_fairness=True,
            instance_fairness_quantum=quantum,
            executor_max_inflight=contexts,
            task_max_inflight_calls=4_096,
            executor_task_slots=1_000,
        )
        self.scheduler = Scheduler(self.config, simulation.stream("scheduler"))
        snapshot = ExecutorSnapshot(ExecutorId("exec-0"), 1, 0, available_contexts=contexts)
        self.scheduler.handle(e.ExecutorAttached(snapshot), 0)
        self.ready = dict.fromkeys(lists, 0)
        self.inflight = dict.fromkeys(lists, 0)
        self.ended = dict.fromkeys(lists, 0)
        self._idle_waits: dict[Tenant, Wait] = {}
        """Of tenants with nothing in flight."""
        self._waits: dict[Tenant, Wait] = {}
        """Of all with ready calls, since their last bind."""

    def start(self) -> None:
        for tenant, calls in self._lists.items():
            self.simulation.after(self._rng.choice((0, 0, 20, 400)), partial(self._open, tenant, calls))

    def stop_faults(self) -> None:
        pass

    def is_over(self) -> bool:
        return self.ended == self._lists

    def check(self) -> None:
        if self.simulation.steps % 64 == 0 and sum(self.ready.values()) < 5_000:
            self.scheduler.check_invariants()

    def check_end(self) -> None:
        assert not any(self.ready.values()), "ready_is_bound"
        assert self.scheduler.statistics().inflight == 0, "nothing_in_flight"

    def _open(self, tenant: Tenant, calls: int) -> None:
        plan = TaskPlan(TaskId(str(tenant)), tenant)
        assert self.scheduler.commit_task(plan) is None
        for index, first in enumerate(range(0, calls, BATCH_ROWS)):
            rows = [NewCall(row, TARGET, b"[]") for row in range(first, min(first + BATCH_ROWS, calls))]
            assert self.scheduler.commit_batch(prepare_batch(plan, index, first, rows))
        self.ready[tenant] = calls
        self._decide()

    def _decide(self) -> None:
        now_ms = self.simulation.clock.now_ms()
        while True:
            self.scheduler.flush_dirty_tasks(now_ms)
            self._note_waits()
            commands = self.scheduler.try_dispatch_next(now_ms)
            if not commands:
                return
            for bind in commands:
                assert isinstance(bind, c.BindCall)
                (sent,) = self.scheduler.handle(e.ExecutorBound(bind.call_id), now_ms)
                assert isinstance(sent, c.DispatchCall)
                self._note_bind(Tenant(str(sent.task_id)))
                run_ms = self._long_ms if sent.task_id in self._slow else self._rng.choice((0, 1))
                self.simulation.after(run_ms, partial(self._end, sent))

    def _end(self, sent: c.DispatchCall) -> None:
        tenant = Tenant(str(sent.task_id))
        self.simulation.note(sent.call_id)
        done = e.CallCompleted(sent.executor_id, sent.call_id, sent.attempt_seq, b"1")
        self.scheduler.handle(done, self.simulation.clock.now_ms())
        self.inflight[tenant] -= 1
        self.ended[tenant] += 1
        self._decide()

    def _note_waits(self) -> None:
        ready = {tenant for tenant, count in self.ready.items() if count}
        for waits, among in (
            (self._waits, ready),
            (self._idle_waits, {tenant for tenant in ready if not self.inflight[tenant]}),
        ):
            for tenant in waits.keys() - among:
                del waits[tenant]
            for tenant in among:
                waits.setdefault(tenant, Wait()).tenants |= ready

    def _note_bind(self, bound: Tenant) -> None:
        self.ready[bound] -= 1
        self.inflight[bound] += 1
        for waits, times in ((self._idle_waits, 1), (self._waits, AGED_TURNS)):
            waits.pop(bound, None)
            for tenant, wait in waits.items():
                wait.binds += 1
                most = times * len(wait.tenants) * self._quantum
                assert wait.binds <= most, f"bounded_wait: {tenant} waits for the {wait.binds}th bind, {most} allowed"
