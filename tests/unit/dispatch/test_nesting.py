"""Calls that handlers make: what they inherit, what they share, and the rings of waits that are refused (D14)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from callyard.dispatch.allowance import Allowance
from callyard.dispatch.dispatcher import Dispatcher
from callyard.dispatch.outcomes import DispatchError, DispatchResult
from callyard.errors import ErrorKind
from callyard.functions.registry import Registry
from callyard.testing.virtual_time import virtual_time
from tests.unit.dispatch.kit import add, add_work, assert_quiet, hear, make, now_ms, spin


class Tree:
    """A tool `node` per name, which dispatches what its arguments say: `{"calls": [[name, arguments, options], …]}`,
    one after the other or, with `"together"`, at once; `"meet"` waits first until so many stand there."""

    def __init__(self, **settings: Any) -> None:
        self.registry = Registry()
        self.settings = settings
        self.ends: list[tuple[str, DispatchResult]] = []
        self.standing = 0
        self.all_stand = asyncio.Event()
        self.inside: dict[str, int] = {}
        self.peak: dict[str, int] = {}

    def tool(self, name: str, **promises: Any) -> None:
        async def handler(arguments: dict[str, Any]) -> str:
            self.inside[name] = self.inside.get(name, 0) + 1
            self.peak[name] = max(self.peak.get(name, 0), self.inside[name])
            try:
                await self._meet(arguments.get("meet", 0))
                calls = [self._call(*call) for call in arguments.get("calls", ())]
                if arguments.get("together"):
                    await asyncio.gather(*calls)
                else:
                    for call in calls:
                        await call
                if "sleep" in arguments:
                    await asyncio.sleep(arguments["sleep"])
                return name
            finally:
                self.inside[name] -= 1

        add(self.registry, name, handler, **promises)

    async def _meet(self, count: int) -> None:
        """Stand until `count` do."""
        if count:
            self.standing += 1
            if self.standing >= count:
                self.all_stand.set()
            await self.all_stand.wait()

    async def _call(self, name: str, arguments: dict[str, Any], options: dict[str, Any]) -> None:
        self.ends.append((name, await self.dispatcher.dispatch(name, arguments, **options)))

    def build(self) -> Dispatcher:
        self.dispatcher = make(self.registry, **self.settings)
        return self.dispatcher

    def cycles(self) -> list[str]:
        return [name for name, end in self.ends if isinstance(end, DispatchError) and is_cycle(end)]


def is_cycle(end: DispatchError) -> bool:
    return end.kind is ErrorKind.DENIED and end.details.get("reason") == "cycle"


@pytest.mark.requirement("D14")
@virtual_time
async def test_two_tools_that_call_each_other_end_without_a_timer() -> None:
    """a → b and b → a, one seat each. No timeout ends it: in virtual time the clock would have moved."""
    tree = Tree()
    for name in "ab":
        tree.tool(name, max_concurrency=1)
    dispatcher = tree.build()
    ends = await asyncio.gather(
        dispatcher.dispatch("a", {"meet": 2, "calls": [["b", {}, {}]]}),
        dispatcher.dispatch("b", {"meet": 2, "calls": [["a", {}, {}]]}),
    )
    assert all(end.ok for end in ends)
    assert now_ms() == 0
    assert len(tree.ends) == 2
    assert len(tree.cycles()) == 1
    assert [name for name, end in tree.ends if end.ok] != tree.cycles()
    assert_quiet(dispatcher)


@pytest.mark.requirement("D14")
@virtual_time
async def test_eight_parents_in_eight_slots_each_nesting() -> None:
    tree = Tree(slots=8)
    tree.tool("parent")
    tree.tool("child")
    dispatcher = tree.build()
    arguments = {"meet": 8, "calls": [["child", {"calls": [["child", {}, {}]]}, {}]] * 3, "together": True}
    ends = await asyncio.gather(*(dispatcher.dispatch("parent", arguments) for _ in range(8)))
    assert all(end.ok for end in ends)
    assert all(end.ok for _, end in tree.ends)
    assert now_ms() == 0
    assert len(tree.ends) == 8 * 6
    assert_quiet(dispatcher)


@pytest.mark.requirement("D14")
@virtual_time
async def test_a_seat_that_an_ancestor_holds_is_shared() -> None:
    tree = Tree()
    tree.tool("a", max_concurrency=1)
    tree.tool("between")
    dispatcher = tree.build()
    end = await dispatcher.dispatch("a", {"calls": [["between", {"calls": [["a", {}, {}]]}, {}], ["a", {}, {}]]})
    assert end.ok
    assert all(end.ok for _, end in tree.ends)
    assert len(tree.ends) == 3
    assert_quiet(dispatcher)


@pytest.mark.requirement("D14", "D31")
@virtual_time
async def test_two_owners_that_call_each_other() -> None:
    tree = Tree()
    tree.tool("t")
    dispatcher = tree.build()
    ends = await asyncio.gather(
        dispatcher.dispatch("t", {"meet": 2, "calls": [["t", {}, {"owner": "B"}]]}, owner="A"),
        dispatcher.dispatch("t", {"meet": 2, "calls": [["t", {}, {"owner": "A"}]]}, owner="B"),
    )
    assert all(end.ok for end in ends)
    assert now_ms() == 0
    assert len(tree.ends) == 2
    assert len(tree.cycles()) == 1
    assert_quiet(dispatcher)


@pytest.mark.requirement("D14", "D16")
@virtual_time
async def test_two_keys_that_wait_for_each_other() -> None:
    tree = Tree()
    tree.tool("x")
    tree.tool("y")
    dispatcher = tree.build()
    inner: dict[str, Any] = {}
    x = {"meet": 2, "calls": [["y", inner, {"key": "ky"}]]}
    y = {"meet": 2, "calls": [["x", inner, {"key": "kx"}]]}
    ends = await asyncio.gather(
        dispatcher.dispatch("x", x, key="kx"),
        dispatcher.dispatch("y", y, key="ky"),
    )
    assert all(end.ok for end in ends)
    assert now_ms() == 0
    kinds = [end.kind for _, end in tree.ends if isinstance(end, DispatchError)]
    assert kinds == [ErrorKind.CONFLICT, ErrorKind.CONFLICT]  # other arguments: no wait at all
    assert_quiet(dispatcher)


@pytest.mark.requirement("D14", "D43")
@virtual_time
async def test_a_ring_over_a_key_and_a_seat() -> None:
    """`holder` of the key waits for the seat of `seated`, which joins the key."""
    tree = Tree()
    tree.tool("keyed")
    tree.tool("seated", max_concurrency=1)
    dispatcher = tree.build()
    keyed = {"meet": 2, "calls": [["seated", {}, {}]]}
    ends = await asyncio.gather(
        dispatcher.dispatch("keyed", keyed, key="k"),
        dispatcher.dispatch("seated", {"meet": 2, "calls": [["keyed", keyed, {"key": "k"}]]}),
    )
    assert all(end.ok for end in ends)
    assert now_ms() == 0
    assert len(tree.cycles()) == 1
    assert_quiet(dispatcher)


@pytest.mark.requirement("D14", "D43")
@virtual_time
async def test_a_root_whose_wait_would_close_a_ring_is_refused() -> None:
    """The root with owner `o` waits for the seat; who has the seat waits, in a nested call, for the turn of `o`."""
    tree = Tree()
    tree.tool("seated", max_concurrency=1)
    tree.tool("leaf")
    tree.tool("gate")
    dispatcher = tree.build()
    order: list[asyncio.Task[DispatchResult]] = []

    async def first_in_turn(arguments: dict[str, Any]) -> None:
        await tree.all_stand.wait()

    add(tree.registry, "first", first_in_turn)
    order.append(asyncio.ensure_future(dispatcher.dispatch("first", owner="o")))  # has the turn
    await spin()
    order.append(asyncio.ensure_future(dispatcher.dispatch("seated", {}, owner="o")))  # next in the turn, then the seat
    await spin()
    # Has the seat, and asks for the turn, behind the second.
    order.append(asyncio.ensure_future(dispatcher.dispatch("seated", {"calls": [["leaf", {}, {"owner": "o"}]]})))
    await spin()
    tree.all_stand.set()
    ends = await asyncio.gather(*order)
    assert now_ms() == 0
    refused = [end for end in [*ends, *(end for _, end in tree.ends)] if not end.ok]
    assert len(refused) == 1
    assert is_cycle(refused[0])
    assert_quiet(dispatcher)


@pytest.mark.requirement("D14", "D43")
@virtual_time
async def test_a_holder_of_a_key_that_waits_for_a_seat_is_seen_in_the_ring() -> None:
    """As before, with the root's call under a key: who waits is the task of the key, not the caller."""
    tree = Tree()
    tree.tool("seated", max_concurrency=1)
    tree.tool("keyed", max_concurrency=1)
    dispatcher = tree.build()
    parked = asyncio.ensure_future(dispatcher.dispatch("keyed", {"meet": 2}))  # has the seat of `keyed`
    await spin()
    arguments: dict[str, Any] = {}
    root = asyncio.ensure_future(dispatcher.dispatch("keyed", arguments, key="k", owner="o"))  # waits for that seat
    await spin()
    # Has a seat of `seated`, and joins the key; the parked one then asks for a seat of `seated`.
    joined = {"calls": [["keyed", arguments, {"key": "k"}]]}
    seated = asyncio.ensure_future(dispatcher.dispatch("seated", joined))
    await spin()
    asked = asyncio.ensure_future(dispatcher.dispatch("seated", {"meet": 2}, deadline_ms=60_000))
    await spin()
    assert dispatcher.statistics().queued == 2
    tree.standing = 2
    tree.all_stand.set()
    ends = await asyncio.gather(parked, root, seated, asked)
    assert all(end.ok for end in ends)
    assert now_ms() == 0
    assert_quiet(dispatcher)


@pytest.mark.requirement("D14", "D43")
@virtual_time
async def test_a_ring_through_a_keyed_run_that_queues() -> None:
    """root(key k) waits for the seat of s; the one in s nests a joiner of k: it waits for a run that waits for it."""
    tree = Tree()
    tree.tool("s", max_concurrency=1)
    dispatcher = tree.build()
    inner: dict[str, Any] = {"sleep": 0}
    outer = {"meet": 2, "calls": [["s", inner, {"key": "k"}]]}
    holder = asyncio.ensure_future(dispatcher.dispatch("s", outer))
    await spin()
    root = asyncio.ensure_future(dispatcher.dispatch("s", inner, key="k"))
    await spin()
    assert dispatcher.statistics().queued == 1
    tree.standing = 2
    tree.all_stand.set()
    ends = await asyncio.gather(holder, root)
    assert all(end.ok for end in ends)
    assert now_ms() == 0
    assert tree.cycles() == ["s"]
    assert_quiet(dispatcher)


@pytest.mark.requirement("D14")
@pytest.mark.parametrize("length", [3, 4, 7])
@virtual_time
async def test_a_long_ring_over_seats_and_owners_mixed(length: int) -> None:
    tree = Tree()
    for index in range(length):
        tree.tool(f"t{index}", **({"max_concurrency": 1} if index % 2 == 0 else {}))
    dispatcher = tree.build()

    def options(index: int) -> dict[str, Any]:
        return {"owner": f"o{index}"} if index % 2 else {}

    def call(index: int) -> list[Any]:
        index %= length
        return [f"t{index}", {}, options(index)]

    ends = await asyncio.gather(
        *(
            dispatcher.dispatch(f"t{index}", {"meet": length, "calls": [call(index + 1)]}, **options(index))
            for index in range(length)
        )
    )
    assert all(end.ok for end in ends)
    assert now_ms() == 0
    assert len(tree.ends) == length
    assert len(tree.cycles()) == 1
    assert_quiet(dispatcher)


@pytest.mark.requirement("D14")
@virtual_time
async def test_a_deep_ring_below_the_holders() -> None:
    """The waits are made by grandchildren of those who hold."""
    tree = Tree()
    for name in "abc":
        tree.tool(name, max_concurrency=1)
    tree.tool("mid")
    dispatcher = tree.build()

    def below(name: str) -> dict[str, Any]:
        return {"meet": 3, "calls": [["mid", {"calls": [["mid", {"calls": [[name, {}, {}]]}, {}]]}, {}]]}

    ends = await asyncio.gather(
        dispatcher.dispatch("a", below("b")), dispatcher.dispatch("b", below("c")), dispatcher.dispatch("c", below("a"))
    )
    assert all(end.ok for end in ends)
    assert now_ms() == 0
    assert len(tree.cycles()) == 1
    assert_quiet(dispatcher)


@pytest.mark.requirement("D14")
@virtual_time
async def test_a_wait_that_ends_is_no_ring() -> None:
    """With two seats one of which comes free by itself, nobody is refused."""
    tree = Tree()
    tree.tool("a", max_concurrency=2)
    tree.tool("b", max_concurrency=1)
    dispatcher = tree.build()
    ends = await asyncio.gather(
        dispatcher.dispatch("a", {"meet": 2, "calls": [["b", {}, {}]]}),
        dispatcher.dispatch("b", {"meet": 2, "calls": [["a", {}, {}]]}),
        dispatcher.dispatch("a", {"sleep": 1}),
    )
    assert all(end.ok for end in ends)
    assert not tree.cycles()
    assert now_ms() == 1_000
    assert all(end.ok for _, end in tree.ends)


@pytest.mark.requirement("D14")
@virtual_time
async def test_siblings_that_wait_for_each_others_seat_in_turn_are_no_ring() -> None:
    tree = Tree()
    tree.tool("parent")
    tree.tool("a", max_concurrency=1)
    dispatcher = tree.build()
    end = await dispatcher.dispatch("parent", {"together": True, "calls": [["a", {"sleep": 1}, {}]] * 4})
    assert end.ok
    assert not tree.cycles()
    assert now_ms() == 4_000
    assert tree.peak["a"] == 1
    assert_quiet(dispatcher)


@pytest.mark.requirement("D14", "D13")
@virtual_time
async def test_a_nested_call_shares_the_callers_allowance() -> None:
    tree = Tree()
    tree.tool("t")
    dispatcher = tree.build()
    allowance = Allowance(calls=3)
    end = await dispatcher.dispatch("t", {"calls": [["t", {}, {}]] * 4}, allowance=allowance)
    assert end.ok
    assert allowance.left == 0
    assert [end.ok for _, end in tree.ends] == [True, True, False, False]
    last = tree.ends[-1][1]
    assert isinstance(last, DispatchError)
    assert last.kind is ErrorKind.BUDGET_EXCEEDED


@pytest.mark.requirement("D14", "D44")
@virtual_time
async def test_a_nested_call_is_its_parents_tenants_whatever_the_handler_says() -> None:
    tree = Tree()
    tree.tool("t")
    dispatcher = tree.build()
    events = hear(dispatcher)
    calls = [["t", {}, {}], ["t", {}, {"tenant": "other"}], ["nope", {}, {"tenant": "other"}]]
    await dispatcher.dispatch("t", {"calls": calls}, tenant="acme")
    assert {event.tenant for event in events} == {"acme"}


@pytest.mark.requirement("D44", "D31")
@virtual_time
async def test_one_owner_and_key_of_two_tenants_neither_wait_nor_answer_for_each_other() -> None:
    registry = Registry()
    work = add_work(registry)
    async with make(registry) as dispatcher:
        ends = await asyncio.gather(
            *(dispatcher.dispatch("work", owner="o", key="k", tenant=tenant) for tenant in ("a", "b"))
        )
        assert work.peak == 2
        assert work.ended == 2
        assert now_ms() == 1_000
        assert len({end.call_id for end in ends}) == 2


@pytest.mark.requirement("D43", "D14")
@virtual_time
async def test_a_nested_call_under_a_key_that_an_ancestor_holds_is_a_conflict() -> None:
    tree = Tree()
    tree.tool("t")
    dispatcher = tree.build()
    inner: dict[str, Any] = {"n": 1}

    async def same(arguments: dict[str, Any]) -> str:
        tree.ends.append(("same", await dispatcher.dispatch("same", arguments, key="k")))
        return "outer"

    add(tree.registry, "same", same)
    assert (await dispatcher.dispatch("same", inner, key="k")).ok
    (end,) = (end for _, end in tree.ends)
    assert isinstance(end, DispatchError)
    assert end.kind is ErrorKind.CONFLICT
    assert now_ms() == 0


@pytest.mark.requirement("D48", "D29")
@virtual_time
async def test_an_inline_handler_nests_through_the_dispatcher_with_all_its_rules() -> None:
    tree = Tree()
    tree.tool("t")
    dispatcher = tree.build()
    events = hear(dispatcher)
    outer = await dispatcher.dispatch("t", {"calls": [["t", {}, {"key": "k"}], ["t", {}, {"key": "k"}], ["t", 5, {}]]})
    first, again, misfit = (end for _, end in tree.ends)
    assert first.ok
    assert again.ok
    assert again.deduplicated
    assert again.call_id == first.call_id
    assert isinstance(misfit, DispatchError)
    assert misfit.kind is ErrorKind.SCHEMA
    starts = [event for event in events if event.name == "dispatch.start"]
    assert [event.parent_id for event in starts] == ["", *[outer.call_id] * 3]
    assert len([event for event in events if event.name == "dispatch.deduplicated"]) == 1


@pytest.mark.requirement("D14")
@virtual_time
async def test_nested_calls_take_no_slot_and_no_share_of_the_tenants() -> None:
    tree = Tree(slots=1, tenant_running=1)
    tree.tool("t")
    dispatcher = tree.build()
    end = await dispatcher.dispatch("t", {"together": True, "calls": [["t", {"calls": [["t", {}, {}]]}, {}]] * 5})
    assert end.ok
    assert len(tree.ends) == 10
    assert all(end.ok for _, end in tree.ends)
    assert now_ms() == 0
    assert_quiet(dispatcher)


@pytest.mark.requirement("D12")
@pytest.mark.parametrize("key", [None, "k"])
@virtual_time
async def test_a_charge_below_is_not_made_twice_by_a_retry_above(key: str | None) -> None:
    """The outer tool promises that it may run again, and makes a call that may not."""
    registry, charged, tried = Registry(), [], []

    @registry.tool
    async def charge() -> str:
        charged.append(1)
        return "done"

    @registry.tool(idempotent=True, timeout_ms=100)
    async def order() -> str:
        tried.append(1)
        done = await dispatcher.dispatch("charge", key=key)
        if len(tried) < 3:
            await asyncio.sleep(60)
        return str(done.unwrap())

    dispatcher = make(registry)
    done = await dispatcher.dispatch("order")
    assert len(charged) == 1
    if key is None:
        assert isinstance(done, DispatchError)
        assert (done.kind, done.attempts, done.retryable, len(tried)) == (ErrorKind.TIMEOUT, 1, False, 1)
    else:
        assert (done.ok, len(tried)) == (True, 3), "its key sees to it"
    assert_quiet(dispatcher)
