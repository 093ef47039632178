from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callyard.ids import TaskId, Tenant
from callyard.worker.io.gate import Gate


class One:
    def __init__(self, name: str, tenant: str = "a", task: str = "t", size_bytes: int = 1) -> None:
        self.name = name
        self.tenant = Tenant(tenant)
        self.task_id = TaskId(task)
        self.size_bytes = size_bytes

    def __repr__(self) -> str:
        return self.name


def take_all(gate: Gate[One]) -> list[str]:
    """Names in the order of their turns, each ended before the next."""
    taken = []
    while (one := gate.next()) is not None:
        taken.append(one.name)
        gate.leave(one)
    return taken


@pytest.mark.requirement("X42")
def test_tenants_take_turns_and_tasks_within_a_tenant() -> None:
    gate: Gate[One] = Gate(1, 100, 1_000)
    for name, tenant, task in [
        *((f"a{n}", "a", "t") for n in range(4)),
        *((f"b{n}", "b", "u") for n in range(2)),
        *((f"c{n}", "a", "v") for n in range(2)),
    ]:
        assert gate.enter(One(name, tenant, task)) is None
    assert take_all(gate) == ["a0", "b0", "c0", "b1", "a1", "c1", "a2", "a3"]
    assert (gate.waiting, gate.bytes_held) == (0, 0)


@pytest.mark.requirement("X82")
def test_a_full_queue_makes_room_for_a_tenant_with_fewer() -> None:
    gate: Gate[One] = Gate(1, 4, 1_000)
    gate.enter(One("running"))
    assert gate.next() is not None
    flood = [One(f"a{n}") for n in range(4)]
    assert [gate.enter(one) for one in flood] == [None] * 4
    late = One("late")
    assert gate.enter(late) is late
    assert gate.enter(One("b0", "b")) is flood[3]
    assert gate.enter(One("b1", "b")) is flood[2]
    even = One("b2", "b")
    assert gate.enter(even) is even
    assert gate.waiting == 4


def test_a_free_place_needs_no_room_in_the_queue() -> None:
    gate: Gate[One] = Gate(1, 0, 10)
    first, second = One("first"), One("second")
    assert gate.enter(first) is None
    assert gate.next() is first
    assert gate.enter(second) is second


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("enter"), st.sampled_from("ab"), st.sampled_from("tu"), st.integers(1, 30)),
            st.just(("next",)),
            st.tuples(st.just("leave"), st.integers(0, 50)),
        ),
        max_size=80,
    )
)
def test_bounds_hold_and_nobody_is_lost(steps: list[tuple[object, ...]]) -> None:
    gate: Gate[One] = Gate(2, 5, 100)
    inside: list[One] = []
    for number, step in enumerate(steps):
        if step[0] == "enter":
            one = One(str(number), str(step[1]), f"{step[1]}{step[2]}", int(str(step[3])))
            refused = gate.enter(one)
            inside.append(one)
            if refused is not None:
                inside.remove(refused)
        elif step[0] == "next":
            taken = gate.next()
            waiting = [one for one in inside if one not in gate.running]
            assert taken is None or taken in inside
            assert taken is not None or not waiting or len(gate.running) == 2
        elif inside:
            gate.leave(inside.pop(int(str(step[1])) % len(inside)))
        while gate.waiting and len(gate.running) < 2:  # as the hub does: a free place is never left free
            gate.next()
        assert gate.running <= set(inside)
        assert all(one in gate for one in inside)
        assert gate.waiting == len(inside) - len(gate.running) <= 5
        assert gate.bytes_held == sum(one.size_bytes for one in inside) <= 100
