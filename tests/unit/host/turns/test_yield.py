"""Gates shared by several owners, turns that yield, and waiting for oneself."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from callyard.host.errors import HostError, HostErrorKind
from callyard.host.turns import Turn
from callyard.testing.virtual_time import virtual_time
from tests.unit.host.turns.kit import Gatekeeper, World, rest


@virtual_time
async def test_owners_of_one_gate_never_overlap_and_others_do() -> None:
    world = World(jobs_max=100)
    shared, alone = Gatekeeper(), Gatekeeper()
    gate = world.owners.new_gate()
    for key in ("spot", "actor 1", "actor 2"):
        world.add(key, shared, gate=gate)
    for key in ("x", "y"):
        world.add(key, alone)
    for key in ("spot", "actor 1", "actor 2", "x", "y"):
        world.send(key, key.encode())
        world.send(key, key.encode())
    await rest()
    assert (shared.inside, alone.inside) == (1, 2)
    shared.let_go()
    alone.let_go()
    await rest()
    assert shared.inside_max == 1
    assert shared.ended == [b"spot", b"actor 1", b"actor 2"] * 2  # the gate goes to who waited longest
    world.check_empty()


@virtual_time
async def test_a_turn_that_yields_comes_in_again_at_the_tail_as_a_new_one() -> None:
    world = World(jobs_max=100)
    order: list[str] = []
    numbers: list[int] = []
    inside = 0

    async def handler(turn: Turn, value: bytes) -> str:
        nonlocal inside
        name = value.decode()
        inside += 1
        assert inside == 1
        order.append(f"{name} in")
        numbers.append(turn.number)
        if name == "yields":
            inside -= 1
            got = await turn.yield_while(asyncio.sleep(1.5, "got"))
            inside += 1
            assert inside == 1
            assert got == "got"
            assert turn.is_current
            numbers.append(turn.number)
        else:
            await asyncio.sleep(1)
        order.append(f"{name} out")
        inside -= 1
        return name

    gate = world.owners.new_gate()
    for key in ("a", "b"):
        world.add(key, handler, gate=gate)
    world.ask("a", b"yields", operation_id=1)
    world.ask("a", b"behind it", operation_id=2)
    world.send("b", b"b1")
    world.send("b", b"b2")
    await asyncio.sleep(0.1)
    assert order == ["yields in", "b1 in"]  # its claim on `a` is kept: what is behind it does not begin
    await asyncio.sleep(20)
    assert order == ["yields in", "b1 in", "b1 out", "b2 in", "b2 out", "yields out", "behind it in", "behind it out"]
    assert len(set(numbers)) == len(numbers)
    assert numbers == sorted(numbers)
    world.check_empty()


@virtual_time
async def test_a_yield_of_an_owner_with_its_own_gate_lets_its_next_work_in() -> None:
    world = World()
    order: list[str] = []

    async def handler(turn: Turn, value: bytes) -> None:
        order.append(f"{value.decode()} in")
        if value == b"1":
            await turn.yield_while(asyncio.sleep(1))
        order.append(f"{value.decode()} out")

    world.add("a", handler)
    world.send("a", b"1")
    world.send("a", b"2")
    await asyncio.sleep(5)
    assert order == ["1 in", "2 in", "2 out", "1 out"]
    world.check_empty()


@pytest.mark.parametrize("fault", ["raises", "cancelled", "removed", "may not", "twice"])
@virtual_time
async def test_yields_that_go_wrong(fault: str) -> None:
    world = World()
    seen: list[Any] = []

    async def wait() -> None:
        await asyncio.sleep(1)
        if fault == "raises":
            raise ValueError("from inside")
        if fault == "cancelled":
            raise asyncio.CancelledError

    async def handler(turn: Turn, value: bytes) -> None:
        if value == b"other":
            await asyncio.sleep(3)
            return
        try:
            if fault == "twice":
                await turn.yield_while(turn.yield_while(wait()))
            else:
                await turn.yield_while(wait())
        except ValueError:
            seen.append(turn.holds_gate)
        except asyncio.CancelledError:
            seen.append(turn.holds_gate)
            raise
        except HostError as error:
            seen.append(error.kind)

    gate = world.owners.new_gate(may_yield=fault != "may not")
    world.add("a", handler, gate=gate)
    world.add("b", handler, gate=gate)
    world.send("a", b"yields")
    world.send("b", b"other")
    await asyncio.sleep(0.5)
    if fault == "removed":
        world.owners.remove("a")
    await asyncio.sleep(10)
    invalid = HostErrorKind.INVALID_OPERATION
    expected = {"removed": HostErrorKind.NOT_FOUND, "may not": invalid, "twice": invalid}
    assert seen == [expected.get(fault, True)]
    world.check_empty()


@virtual_time
async def test_a_turn_cancelled_while_it_waits_for_its_gate_again() -> None:
    world = World()
    seen: list[Any] = []
    tasks: list[asyncio.Task[Any]] = []

    async def yields(turn: Turn, value: bytes) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        try:
            await turn.yield_while(asyncio.sleep(1))
        finally:
            seen.append(turn.holds_gate)

    keeper = Gatekeeper()
    gate = world.owners.new_gate()
    world.add("a", yields, gate=gate)
    world.add("b", keeper, gate=gate)
    world.ask("a", operation_id=1)
    world.send("b")
    await asyncio.sleep(5)
    tasks[0].cancel()
    await rest()
    assert seen == [False]
    assert world.replies.sent == [(1, HostErrorKind.INTERNAL_FAILURE)]
    world.check()
    keeper.let_go()
    await rest()
    world.check_empty()


@virtual_time
async def test_waiting_for_oneself_is_an_error_before_anything_is_submitted() -> None:
    world = World()
    seen: dict[str, Any] = {}

    def attempt(name: str, key: str) -> None:
        try:
            world.turns.forbid_waiting_for_itself(key)
        except HostError as error:
            seen[name] = error.kind.name
        else:
            seen[name] = "may"

    async def handler(turn: Turn, value: bytes) -> None:
        attempt("itself", "a")
        attempt("same gate", "b")
        attempt("another", "c")
        attempt("unknown", "d")

        async def inside() -> None:
            attempt("itself, yielding", "a")
            attempt("same gate, yielding", "b")

        await turn.yield_while(inside())
        children.append(asyncio.create_task(later()))

    async def later() -> None:
        await asyncio.sleep(1)
        attempt("itself, over", "a")

    children: list[asyncio.Task[None]] = []
    gate = world.owners.new_gate()
    world.add("a", handler, gate=gate)
    world.add("b", handler, gate=gate)
    world.add("c", handler)
    attempt("outside", "a")
    world.send("a")
    await asyncio.sleep(5)
    assert seen == {
        "outside": "may",
        "itself": "INVALID_OPERATION",
        "same gate": "INVALID_OPERATION",
        "another": "may",
        "unknown": "may",
        "itself, yielding": "INVALID_OPERATION",  # its claim is kept
        "same gate, yielding": "may",
        "itself, over": "may",
    }
    world.check_empty()


@pytest.mark.requirement("R88")
@virtual_time
async def test_work_that_a_handler_leaves_waiting_holds_no_authority() -> None:
    """A one-way to a full target is left to wait: its sender's owner serves requests meanwhile, its gate is free."""
    world = World()
    left: list[asyncio.Task[None]] = []
    room = asyncio.Event()

    async def send_later() -> None:
        await room.wait()
        assert turns[0].is_over
        assert not turns[0].holds_gate

    turns: list[Turn] = []

    async def handler(turn: Turn, value: bytes) -> str:
        if value == b"leaves":
            turns.append(turn)
            left.append(asyncio.create_task(send_later()))
        return value.decode()

    world.add("s", handler)
    world.send("s", b"leaves")
    await rest()
    world.ask("s", b"request", operation_id=1)
    await rest()
    assert not left[0].done()
    assert world.replies.sent == [(1, "request")]
    world.check_empty()
    room.set()
    await left[0]
