"""`instance_fairness`: the tenant with the fewest calls in flight is next, and nobody waits for long."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from callyard.ids import TaskId, Tenant
from callyard.scheduler import NewCall, Scheduler, SchedulerConfig, TaskPlan, prepare_batch, tenants
from callyard.scheduler import commands as c
from callyard.scheduler import events as e
from callyard.scheduler.executors import ExecutorSnapshot
from callyard.scheduler.tenants import AGED_TURNS

from .harness import PLAIN, Harness, dispatches

pytestmark = pytest.mark.requirement("X17")


def start(h: Harness, calls: int, *, task: str, tenant: str) -> None:
    h.open(task, tenant=Tenant(tenant))
    assert h.commit(calls, name=task)


def order_of(h: Harness, commands: list[c.SchedulerCommand]) -> str:
    return "".join(h.plans[call.task_id].tenant for call in dispatches(commands))


def test_the_tenant_with_the_fewest_in_flight_is_next() -> None:
    h = Harness(instance_fairness=True)
    start(h, 9, task="one", tenant="a")
    h.attach("exec-0", contexts=4)
    assert order_of(h, h.turn()) == "aaaa"
    start(h, 9, task="two", tenant="b")
    h.attach("exec-1", contexts=8)
    assert order_of(h, h.turn()) == "bbbbabab"


def test_ties_go_to_the_least_recently_served() -> None:
    h = Harness(executors=1, contexts=1, instance_fairness=True)
    start(h, 1, task="a1", tenant="a")
    (running,) = dispatches(h.turn())
    start(h, 1, task="b1", tenant="b")
    (running,) = dispatches(h.complete(running))  # a was served, then b, who still runs
    for name in ("b", "a", "c"):
        start(h, 2, task=f"{name}2", tenant=name)
    order = ""
    for _ in range(6):
        (running,) = dispatches(h.complete(running))
        order += h.plans[running.task_id].tenant
    assert order == "cabcab", "who was never served goes first"


def test_tasks_of_a_tenant_take_turns() -> None:
    h = Harness(instance_fairness=True)
    for task, tenant in (("a1", "a"), ("a2", "a"), ("b1", "b")):
        start(h, 4, task=task, tenant=tenant)
    h.attach("exec-0", contexts=8)
    assert [call.task_id for call in dispatches(h.turn())] == ["a1", "b1", "a2", "b1", "a1", "b1", "a2", "b1"]


def test_without_it_tasks_take_turns_whoever_they_belong_to() -> None:
    h = Harness()
    for task, tenant in (("a1", "a"), ("a2", "a"), ("b1", "b")):
        start(h, 4, task=task, tenant=tenant)
    h.attach("exec-0", contexts=6)
    assert order_of(h, h.turn()) == "aabaab"


@pytest.mark.parametrize(
    ("quantum", "order"), [(0, "abababab"), (1, "abababab"), (2, "aabbaabb"), (3, "aaabbbaa"), (4, "aaaabbbb")]
)
def test_a_turn_is_a_quantum_of_binds(quantum: int, order: str) -> None:
    h = Harness(instance_fairness=True, instance_fairness_quantum=quantum)
    for tenant in ("a", "b"):
        start(h, 8, task=tenant, tenant=tenant)
    h.attach("exec-0", contexts=8)
    assert order_of(h, h.turn()) == order


def test_a_quantum_above_1024_is_1024() -> None:
    crowd = Crowd(1, 5_000, tenants=2, contexts=1_200)
    for name in crowd.names:
        crowd.commit(name, 2_000)
    crowd.quantum = 1_024
    while crowd.decide():
        pass
    assert {name: len(calls) for name, calls in crowd.inflight.items()} == {"t0": 1_024, "t1": 176}


def test_weights_are_shares_of_what_is_in_flight() -> None:
    h = Harness(instance_fairness=True, tenant_weights={Tenant("a"): 3})
    for tenant in ("a", "b"):
        start(h, 16, task=tenant, tenant=tenant)
    h.attach("exec-0", contexts=16)
    assert Counter(order_of(h, h.turn())) == {"a": 12, "b": 4}


def test_long_calls_do_not_keep_their_tenant_out_for_ever() -> None:
    """a holds five calls; b's end at once, so that it never has as many in flight."""
    h = Harness(executors=1, contexts=6, instance_fairness=True)
    start(h, 50, task="a", tenant="a")
    held = dispatches(h.turn())
    (running,) = held[:1]
    start(h, 500, task="b", tenant="b")
    order = ""
    for _ in range(3 * AGED_TURNS):
        (running,) = dispatches(h.complete(running))
        order += h.plans[running.task_id].tenant
    assert 2 <= order.count("a") <= 3


def test_what_is_known_of_tenants_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many come and go, and however many calls one of them has."""
    monkeypatch.setattr(tenants, "IDLE_MAX", 10)
    h = Harness(executors=1, instance_fairness=True)
    for number in range(50):
        (sent,) = h.start(1, name=f"task-{number}", tenant=Tenant(f"t{number}"), end=True)
        h.complete(sent)
    known = h.scheduler._turns.tenants
    assert known is not None
    assert known.standings == {}
    assert list(known._idle) == [f"t{number}" for number in range(40, 50)], "the newest"
    start(h, 300, task="many", tenant="a")
    sents = dispatches(h.turn())
    while sents:
        sents += dispatches(h.complete(sents.pop()))
        assert len(known._heap) <= 64 + 4 * len(known._ready) + 1


class Crowd:
    """Tenants with lists of any length, calls that end in any order, and the waits of all of them."""

    def __init__(self, seed: int, quantum: int, tenants: int, contexts: int) -> None:
        self.rng = Random(seed)
        self.scheduler = Scheduler(
            SchedulerConfig(
                instance_fairness=True,
                instance_fairness_quantum=quantum,
                executor_max_inflight=4_096,
                executor_max_runnable=4_096,
                task_max_inflight_calls=4_096,
                executor_task_slots=100,
            ),
            Random(seed),
        )
        snapshot = ExecutorSnapshot("exec-0", 1, 0, available_contexts=contexts)  # type: ignore[arg-type]
        self.scheduler.handle(e.ExecutorAttached(snapshot), 0)
        self.names = [f"t{number}" for number in range(tenants)]
        self.rows = dict.fromkeys(self.names, 0)
        self.plans = {name: TaskPlan(TaskId(name), Tenant(name)) for name in self.names}
        for plan in self.plans.values():
            self.scheduler.commit_task(plan)
        self.batches = dict.fromkeys(self.names, 0)
        self.ready = dict.fromkeys(self.names, 0)
        self.inflight: dict[str, list[c.DispatchCall]] = {name: [] for name in self.names}
        self.waited: dict[str, int] = {}
        """Binds of others since a tenant with nothing in flight has had a ready call."""
        self.seen: dict[str, set[str]] = {}
        """Tenants with ready calls in that time."""
        self.quantum = max(1, quantum)

    def commit(self, name: str, calls: int) -> None:
        first = self.rows[name]
        rows = [NewCall(index, PLAIN, b"[]") for index in range(first, first + calls)]
        prepared = prepare_batch(self.plans[name], self.batches[name], first, rows)
        assert self.scheduler.commit_batch(prepared)
        self.rows[name] += calls
        self.batches[name] += 1
        self.ready[name] += calls

    def note_waits(self) -> None:
        for name in self.names:
            if self.ready[name] and not self.inflight[name]:
                self.waited.setdefault(name, 0)
                self.seen.setdefault(name, set()).update(one for one in self.names if self.ready[one])
            else:
                self.waited.pop(name, None)
                self.seen.pop(name, None)

    def decide(self) -> bool:
        self.note_waits()
        commands = self.scheduler.try_dispatch_next(0)
        if not commands:
            return False
        (bind,) = commands
        assert isinstance(bind, c.BindCall)
        (sent,) = self.scheduler.handle(e.ExecutorBound(bind.call_id), 0)
        assert isinstance(sent, c.DispatchCall)
        name = str(sent.task_id)
        self.ready[name] -= 1
        self.inflight[name].append(sent)
        for other in self.waited:
            if other != name:
                self.waited[other] += 1
                bound = len(self.seen[other]) * self.quantum
                assert self.waited[other] <= bound, f"{other} waited for {self.waited[other]} binds, {bound} allowed"
        self.note_waits()
        return True

    def end_one(self) -> None:
        running = [name for name in self.names if self.inflight[name]]
        if running:
            calls = self.inflight[self.rng.choice(running)]
            sent = calls.pop(self.rng.randrange(len(calls)))
            self.scheduler.handle(e.CallCompleted(sent.executor_id, sent.call_id, sent.attempt_seq, b"1"), 0)
            self.scheduler.flush_dirty_tasks(0)


@pytest.mark.parametrize("quantum", [0, 1, 3, 7])
@pytest.mark.parametrize("seed", range(5))
def test_who_has_nothing_in_flight_waits_for_tenants_times_quantum_binds_at_most(seed: int, quantum: int) -> None:
    crowd = Crowd(seed, quantum, tenants=crowd_size(seed), contexts=1 + 4 * seed)
    for _ in range(1_500):
        if crowd.rng.random() < 0.1:
            crowd.commit(crowd.rng.choice(crowd.names), crowd.rng.choice((1, 1, 3, 40)))
        elif not crowd.decide() or crowd.rng.random() < 0.5:
            crowd.end_one()
    crowd.scheduler.check_invariants()


def crowd_size(seed: int) -> int:
    return (2, 3, 5, 12, 40)[seed]


def test_ten_calls_beside_a_million() -> None:
    """Each of the ten begins within 2 times the quantum of binds of the other tenant's."""
    quantum = 4
    crowd = Crowd(1, quantum, tenants=2, contexts=64)
    for _ in range(123):
        crowd.commit("t0", 8_130)
    while crowd.decide():
        pass
    between: list[int] = []
    for _ in range(10):
        crowd.commit("t1", 1)
        others = 0
        while not crowd.inflight["t1"]:
            calls = crowd.inflight["t0"]
            sent = calls.pop(0)
            crowd.scheduler.handle(e.CallCompleted(sent.executor_id, sent.call_id, sent.attempt_seq, b"1"), 0)
            assert crowd.decide()
            others += not crowd.inflight["t1"]
        between.append(others)
        (sent,) = crowd.inflight["t1"]
        crowd.inflight["t1"] = []
        crowd.scheduler.handle(e.CallCompleted(sent.executor_id, sent.call_id, sent.attempt_seq, b"1"), 0)
    assert crowd.rows["t0"] >= 1_000_000 - 10
    assert max(between) <= 2 * quantum
