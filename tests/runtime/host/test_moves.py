"""Moving a unit inside a host: seal, dump, load, cutover, replay, on real turns; and whatever goes wrong between."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from callyard.host.errors import HostErrorKind
from callyard.host.jobs import Permit
from callyard.host.owners import Condition, Owner
from callyard.host.pump import Pump
from callyard.transport.port import Completion, Record, RecordKind, SourceId, SourceKind
from tests.runtime.host.outbound_world import OutboundWorld, hosted, kind_of


class Counter:
    """A unit: its state is a list, its handler adds to it."""

    def __init__(self, world: OutboundWorld, key: str = "cart", state: list[str] | None = None) -> None:
        self.world = world
        self.key = key
        self.state = state or []
        self.steps: list[str] = []
        """What a move has done, before which the next step of a test may happen."""
        self.before: Callable[[str], Awaitable[None]] | None = None
        self.taken_over: Counter | None = None

    def handle(self, turn: Any, name: str) -> str:
        self.state.append(name)
        self.world.ran.append(name)
        return f"{name} of {len(self.state)}"

    async def _step(self, name: str) -> None:
        self.steps.append(name)
        if self.before is not None:
            await self.before(name)

    async def dump(self) -> list[str]:
        await self._step("dump")
        return list(self.state)

    async def load(self, state: list[str]) -> Counter:
        await self._step("load")
        return Counter(self.world, self.key, list(state))

    def cut_over(self, loaded: Counter) -> None:
        owner = owner_of(self.world, self.key)
        assert not list(owner.application), "the old owner has work left"
        owner.handler = loaded.handle
        self.taken_over = loaded


def owner_of(world: OutboundWorld, key: str = "cart") -> Owner:
    owner = world.owners.get(key)
    assert owner is not None
    return owner


def counter(world: OutboundWorld) -> Counter:
    unit = Counter(world)
    world.spot("cart", unit.handle)
    return unit


def receive(world: OutboundWorld, name: str, key: str = "cart") -> HostErrorKind | None:
    permit = world.jobs.try_acquire()
    assert permit is not None
    refused = world.moving.commit(Record(RecordKind.ONE_WAY, SourceId("peer"), key, name), permit)
    if refused is not None:
        permit.release()
    return refused


@pytest.mark.requirement("R22")
@hosted
async def test_state_and_backlog_are_handed_over_in_order() -> None:
    world = OutboundWorld(jobs_max=2, items_max=100)
    unit = counter(world)
    await world.send("cart", "before")
    await world.settle()
    in_use: list[int] = []

    async def before(step: str) -> None:
        for n in range(5):
            receive(world, f"{step}-{n}")
        in_use.append(world.jobs.in_use)

    unit.before = before
    await world.moves.move(["cart"], unit)
    assert (in_use, world.jobs.in_use <= 2) == ([0, 0], True)
    receive_after = asyncio.ensure_future(world.request("cart", "after"))
    assert await receive_after == "after of 12"
    expected = ["before", *(f"dump-{n}" for n in range(5)), *(f"load-{n}" for n in range(5)), "after"]
    assert unit.taken_over is not None
    assert (unit.state, unit.taken_over.state) == (["before"], expected)
    status = world.moves.status()
    assert (status.done, status.failed) == (1, 0)
    world.assert_quiet()


@hosted
async def test_a_turn_that_runs_ends_first_and_what_is_queued_goes_along() -> None:
    world = OutboundWorld(items_max=100)
    unit = counter(world)
    gate = asyncio.Event()

    async def slow(turn: Any, name: str) -> None:
        await gate.wait()
        unit.handle(turn, name)

    owner_of(world).handler = slow
    await world.send("cart", "running")
    await world.settle()
    await world.send("cart", "queued")
    moving = asyncio.ensure_future(world.moves.move(["cart"], unit))
    await asyncio.sleep(1)
    assert unit.steps == []
    gate.set()
    await moving
    await world.settle()
    assert unit.taken_over is not None
    assert unit.taken_over.state == ["running", "queued"]
    assert world.moves.status().cutover_ms_max == 1_000
    world.assert_quiet()


@pytest.mark.parametrize("step", ["dump", "load"])
@pytest.mark.parametrize("how", ["raises", "cancelled"])
def test_whatever_goes_wrong_the_old_owner_goes_on(step: str, how: str) -> None:
    @hosted
    async def run() -> None:
        world = OutboundWorld(items_max=100)
        unit = counter(world)

        async def before(at: str) -> None:
            receive(world, f"during-{at}")
            if at == step:
                if how == "raises":
                    raise ValueError("no such state")
                await asyncio.sleep(3_600)

        unit.before = before
        with pytest.raises(ValueError if how == "raises" else TimeoutError):
            async with asyncio.timeout(10):
                await world.moves.move(["cart"], unit)
        await world.settle()
        assert unit.state == [f"during-{at}" for at in unit.steps]
        assert owner_of(world).condition is Condition.OPEN
        assert (world.moves.status().done, world.moves.status().failed) == (0, 1)
        world.assert_quiet()

    run()


@pytest.mark.requirement("R40")
@pytest.mark.parametrize("flip", ["move", "remove"])
@pytest.mark.parametrize("at", range(8))
def test_a_flip_of_ownership_at_any_yield_point(flip: str, at: int) -> None:
    """Records come one a step of the loop, and the owner changes in between: the old queue never has one of those."""

    @hosted
    async def run() -> None:
        world = OutboundWorld(jobs_max=100, items_max=100)
        unit = counter(world)
        old = owner_of(world)
        refused: dict[str, HostErrorKind | None] = {}
        changing: asyncio.Task[None] | None = None
        for n in range(8):
            if n == at and flip == "move":
                changing = asyncio.ensure_future(world.moves.move(["cart"], unit))
            elif n == at:
                world.owners.remove("cart")
            refused[f"record-{n}"] = receive(world, f"record-{n}")
            if owner_of_or_none(world) is not old or old.condition is Condition.SEALED:
                assert list(old.application) == []
            await asyncio.sleep(0)
        if changing is not None:
            await changing
        await world.settle(100)
        ran = world.ran
        if flip == "move":
            assert set(refused.values()) == {None}
            assert ran == list(refused)
            assert unit.taken_over is not None
            assert unit.taken_over.state == ran
        else:
            assert [name for name, kind in refused.items() if kind is HostErrorKind.NOT_FOUND] == list(refused)[at:]
            assert set(ran) <= set(list(refused)[:at])
        world.assert_quiet()

    run()


def owner_of_or_none(world: OutboundWorld) -> Owner | None:
    return world.owners.get("cart")


@pytest.mark.requirement("R49")
@hosted
async def test_a_handler_moves_another_unit_with_one_permit_in_all() -> None:
    world = OutboundWorld(jobs_max=1, items_max=100)
    unit = counter(world)

    async def before(step: str) -> None:
        receive(world, step)

    unit.before = before

    async def handler(turn: Any, name: str) -> str:
        await world.moves.move(["cart"], unit)
        return "moved"

    world.spot("mover", handler)
    assert await world.request("mover", "move it") == "moved"
    await world.settle()
    assert world.ran == ["dump", "load"]
    world.assert_quiet()


@hosted
async def test_a_turn_of_the_unit_itself_cannot_move_it() -> None:
    world = OutboundWorld()
    unit = Counter(world)
    kinds: list[HostErrorKind | None] = []

    async def handler(turn: Any, name: str) -> None:
        kinds.append(await kind_of(world.moves.move(["other", "cart"], unit)))

    world.spot("cart", handler)
    world.spot("other")
    await world.request("cart", "move yourself")
    assert kinds == [HostErrorKind.INVALID_OPERATION]
    assert owner_of(world).condition is owner_of(world, "other").condition is Condition.OPEN
    assert world.moves.status().failed == 0


@hosted
async def test_one_move_at_a_time_and_only_of_owners_that_are_there() -> None:
    world = OutboundWorld()
    unit = counter(world)

    async def before(step: str) -> None:
        assert await kind_of(world.moves.move(["cart"], Counter(world))) is HostErrorKind.INVALID_OPERATION

    unit.before = before
    await world.moves.move(["cart"], unit)
    assert unit.taken_over is not None
    assert await kind_of(world.moves.move(["cart", "nobody"], unit)) is HostErrorKind.NOT_FOUND
    assert owner_of(world).condition is Condition.OPEN


@hosted
async def test_a_unit_that_is_removed_while_it_moves() -> None:
    world = OutboundWorld()
    unit = counter(world)

    async def before(step: str) -> None:
        if step == "dump":
            assert receive(world, "held") is None
            world.owners.remove("cart")

    unit.before = before
    assert await kind_of(world.moves.move(["cart"], unit)) is HostErrorKind.UNAVAILABLE
    assert (unit.taken_over, world.ran, sum(world.drops.counts.values())) == (None, [], 1)
    world.assert_quiet()


@hosted
async def test_a_request_to_a_unit_that_moves_is_answered_by_the_new_owner() -> None:
    world = OutboundWorld()
    unit = counter(world)
    asking: list[asyncio.Future[Any]] = []

    async def before(step: str) -> None:
        asking.append(asyncio.ensure_future(world.request("cart", step)))
        await asyncio.sleep(0)

    unit.before = before
    await world.moves.move(["cart"], unit)
    assert await asyncio.gather(*asking) == ["dump of 1", "load of 2"]
    world.assert_quiet()


@pytest.mark.requirement("R116")
@hosted
async def test_a_request_to_a_sealed_unit_ends_with_its_own_deadline() -> None:
    world = OutboundWorld()
    counter(world)
    world.moving.seal("cart")
    assert await kind_of(world.request("cart", "question", timeout_ms=300)) is HostErrorKind.DEADLINE_EXCEEDED
    assert (world.timers.now_ms(), world.moving.held("cart")) == (300, 0)
    world.moving.open("cart")
    await world.settle()
    assert world.ran == []
    world.assert_quiet()


class Ingress:
    """A pump's other side, as far as these tests need it."""

    def __init__(self, world: OutboundWorld) -> None:
        self.world = world

    def commit(self, record: Record, permit: Permit) -> HostErrorKind | None:
        return self.world.moving.commit(record, permit)

    def targets_of(self, record: Record) -> list[str]:
        return []

    def control(self, record: Record) -> None: ...

    def complete(self, completion: Completion) -> None:
        self.world.outbound.complete(completion)

    def refused(self, record: Record, kind: HostErrorKind) -> None:
        self.world.drops.count_error(record.kind, kind)

    def lost(self, source: SourceId) -> None: ...


@pytest.mark.requirement("R23")
@hosted
async def test_with_every_permit_out_a_reply_completes_its_request() -> None:
    world = OutboundWorld(jobs_max=1)
    peer = world.transport.add_source("peer", SourceKind.MESH)
    pump = Pump(world.transport, world.jobs, Ingress(world), world.timers)
    pump.start()
    permit = world.jobs.try_acquire()
    assert permit is not None
    asking = asyncio.ensure_future(world.request_remote("peer"))
    await world.settle()
    peer.one_way("nobody")
    peer.complete(world.transport.started[0].outgoing.operation_id, b"reply")
    assert (await asking).payload == b"reply"
    assert (world.timers.now_ms(), peer.taken, world.jobs.status().waits) == (0, 0, 1)
    pump.close()
    permit.release()
    world.assert_quiet()


@pytest.mark.requirement("R103")
@hosted
async def test_a_reply_behind_data_comes_when_a_permit_is_free_too_late() -> None:
    """ClientServer: one FIFO, so the reply waits behind a record that has no permit; the timeout ends it once."""
    world = OutboundWorld(jobs_max=1)
    server = world.transport.add_source("server", SourceKind.CLIENT_SERVER)
    pump = Pump(world.transport, world.jobs, Ingress(world), world.timers)
    pump.start()
    permit = world.jobs.try_acquire()
    assert permit is not None
    asking = asyncio.ensure_future(kind_of(world.request_remote("server")))
    await world.settle()
    server.one_way("nobody")
    server.complete(world.transport.started[0].outgoing.operation_id, b"late")
    assert await asking is HostErrorKind.DEADLINE_EXCEEDED
    assert (world.timers.now_ms(), server.completions_taken) == (5_000, 0)
    permit.release()
    await world.settle()
    assert (server.taken, server.completions_taken, world.requests.status().late) == (1, 1, 1)
    pump.close()
    world.assert_quiet()
