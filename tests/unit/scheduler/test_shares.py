"""No function holds more than half of the executors while another has calls."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from callyard.ids import Tenant
from callyard.scheduler import FunctionTarget
from callyard.scheduler import commands as c
from callyard.scheduler import events as e
from callyard.scheduler.shares import RECENT_MS

from .harness import Harness, dispatches, function

SPIN = function("spin")
HEALTHY = function("healthy")


class Tools(Harness):
    """Each call is a task of its own, as a dispatcher makes them."""

    number = 0

    def call(self, target: FunctionTarget) -> list[c.DispatchCall]:
        self.number += 1
        return self.start(1, name=f"{target.function_id}-{self.number}", target=target, uses_slot=False, end=True)


def places(calls: Iterable[c.DispatchCall]) -> set[str]:
    return {call.executor_id for call in calls}


@pytest.mark.parametrize(("executors", "half"), [(2, 1), (3, 1), (4, 2), (8, 4)])
def test_half_of_the_executors(executors: int, half: int) -> None:
    h = Tools(executors=executors)
    h.call(HEALTHY)
    spinning = [call for _ in range(4 * half) for call in h.call(SPIN)]
    assert len(spinning) == 4 * half, "they share those they have"
    assert len(places(spinning)) == half
    assert places(h.call(HEALTHY)).isdisjoint(places(spinning))


def test_alone_it_has_them_all() -> None:
    h = Tools(executors=4)
    assert len(places(call for _ in range(4) for call in h.call(SPIN))) == 4


@pytest.mark.parametrize(("confined", "instance_fairness"), [(False, True), (True, False), (True, True)])
def test_alone_it_has_them_all_whoever_calls_it(confined: bool, instance_fairness: bool) -> None:
    """Tenants have rings of their own with `instance_fairness`, and in a sandboxed pool: they are no other function."""
    spin = function("spin", confined=confined)
    h = Tools(instance_fairness=instance_fairness)
    for tenant in ("a", "b", "c"):
        h.open(tenant, tenant=Tenant(tenant), uses_slot=False)
        h.commit(1, name=tenant, target=spin)
    h.attach("exec-0", "exec-1", contexts=1)
    assert places(dispatches(h.turn())) == {"exec-0", "exec-1"}


def test_what_others_hold_of_a_sandboxed_pool_is_not_waited_for() -> None:
    """An executor is one tenant's there: another's call of the same function could never run on it."""
    spin, healthy = function("spin", confined=True), function("healthy", confined=True)
    h = Tools(executors=4)

    def call(target: FunctionTarget, name: str, tenant: str) -> set[str]:
        h.open(name, tenant=Tenant(tenant), uses_slot=False)
        h.commit(1, name=name, target=target)
        return places(dispatches(h.turn()))

    held = call(spin, "1", "a") | call(spin, "2", "a")
    (own,) = call(healthy, "3", "b")
    assert held.isdisjoint({own})
    (first,) = call(spin, "4", "b")
    assert first not in held
    assert call(spin, "5", "b") == {first}, "among its own it holds to the rule"


def test_alone_again_after_a_while() -> None:
    h = Tools(executors=2)
    (healthy,) = h.call(HEALTHY)
    h.complete(healthy)
    (first,) = h.call(SPIN)
    h.now_ms += RECENT_MS
    assert places(h.call(SPIN)) == {first.executor_id}
    h.now_ms += 1
    assert len(places(h.call(SPIN))) == 1
    assert len(h.scheduler._shares.held[next(iter(h.scheduler._shares.held))]) == 2


def test_one_executor_is_for_all() -> None:
    h = Tools(executors=1)
    h.call(HEALTHY)
    assert len([call for _ in range(3) for call in h.call(SPIN)]) == 3


def test_where_its_half_is_full_it_waits_and_others_do_not() -> None:
    h = Tools(executors=2, contexts=2)
    (healthy,) = h.call(HEALTHY)
    spinning = [call for _ in range(5) for call in h.call(SPIN)]
    assert len(spinning) == 2
    assert len(h.call(HEALTHY)) == 1, "not behind those that wait"
    (next_one,) = [call for call in h.complete(spinning[0]) if isinstance(call, c.DispatchCall)]
    assert next_one.executor_id == spinning[0].executor_id
    assert healthy.executor_id != next_one.executor_id


def test_functions_with_waiting_calls_take_turns() -> None:
    h = Tools(executors=1, contexts=1)
    (running,) = h.call(SPIN)
    for _ in range(10):
        assert h.call(SPIN) == []
    assert h.call(HEALTHY) == []
    order = []
    for _ in range(3):
        (running,) = [call for call in h.complete(running) if isinstance(call, c.DispatchCall)]
        order.append(running.target.function_id)
    assert order.count(HEALTHY.function_id) == 1


def test_call_lists_share_nothing() -> None:
    h = Harness(executors=2, contexts=8)
    h.start(2, name="a", target=HEALTHY)
    assert len(places(h.start(8, name="b", target=SPIN))) == 2


def test_what_it_brought_down_it_holds_until_another_has_come() -> None:
    h = Tools(executors=2)
    (healthy,) = h.call(HEALTHY)
    h.complete(healthy)
    (crashing,) = h.call(SPIN)
    h.handle(e.ExecutorSealed(crashing.executor_id, by_fault=True))
    h.lose(crashing.executor_id, begun=[crashing.call_id])
    assert h.call(SPIN) == [], "the executor that is left is for others"
    assert len(h.call(HEALTHY)) == 1
    h.attach("exec-9")
    (bound,) = [one for one in h.turn() if isinstance(one, c.DispatchCall)]
    assert bound.executor_id == "exec-9"


def test_alone_it_may_have_what_is_left() -> None:
    h = Tools(executors=2)
    (healthy,) = h.call(HEALTHY)
    h.complete(healthy)
    (crashing,) = h.call(SPIN)
    h.handle(e.ExecutorSealed(crashing.executor_id, by_fault=True))
    h.lose(crashing.executor_id, begun=[crashing.call_id])
    h.now_ms += RECENT_MS + 1
    assert len(h.call(SPIN)) == 1


def test_what_was_interrupted_there_before_brought_it_down() -> None:
    h = Tools(executors=2)
    (healthy,) = h.call(HEALTHY)
    h.complete(healthy)
    (spinning,) = h.call(SPIN)
    h.fail(spinning)
    h.handle(e.ExecutorSealed(spinning.executor_id, by_fault=True))
    assert h.call(SPIN) == []
    assert len(h.call(HEALTHY)) == 1


def test_an_executor_that_is_replaced_by_plan_is_nobody_s_fault() -> None:
    h = Tools(executors=2)
    (healthy,) = h.call(HEALTHY)
    h.complete(healthy)
    (spinning,) = h.call(SPIN)
    h.complete(spinning)
    h.handle(e.ExecutorSealed(spinning.executor_id))
    assert len(h.call(SPIN)) == 1
