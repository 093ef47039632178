"""The steps of a call, in their order: of two causes that are present together the earlier one is reported, and what
comes after it is not touched (D8)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from itertools import pairwise
from typing import Any

import pytest

from callyard.dispatch.allowance import Allowance
from callyard.dispatch.dispatcher import Dispatcher
from callyard.dispatch.keys import fingerprint
from callyard.dispatch.outcomes import DispatchError
from callyard.dispatch.policies import Deny
from callyard.dispatch.stores.memory import MemoryKeyStore
from callyard.dispatch.stores.port import Claimed, KeyScope
from callyard.errors import ErrorKind, Outcome
from callyard.functions.registry import Registry
from callyard.ids import CallId, Tenant
from callyard.policy.breaker import BreakerPolicy
from callyard.testing.virtual_time import virtual_time
from tests.unit.dispatch.kit import VirtualTimers, add, assert_quiet, make, spin


class Scene:
    """A dispatcher, a tool that counts, and the options of a call for which each cause is arranged."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.ran = 0
        self.broken = False
        self.denying = False
        self.claimed_by_another = False
        self.gate: asyncio.Event = asyncio.Event()
        self.asked: list[Mapping[str, Any]] = []
        self.allowance = Allowance(calls=3)
        self.options: dict[str, Any] = {"key": "k", "owner": "o", "allowance": self.allowance}
        self.name = "tool"
        self.args: dict[str, Any] = {"n": 1}
        self.store = MemoryKeyStore(now_ms=VirtualTimers().now_ms)
        self.holding: list[asyncio.Task[Any]] = []
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
        self.registry.add_tool("tool", self.handle, input_schema=schema, rate="2/h", max_concurrency=1)
        add(self.registry, "hold", self.hold, max_concurrency=1)
        self.dispatcher: Dispatcher = make(
            self.registry,
            policy=self.decide,
            store=self.store,
            slots=1,
            breaker=BreakerPolicy(failures=1),
            drain_deadline_ms=0,
        )

    async def handle(self, arguments: Mapping[str, Any]) -> str:
        if self.broken:
            raise ValueError("so that the breaker opens")
        self.ran += 1
        return "ran"

    async def hold(self, arguments: Mapping[str, Any]) -> None:
        await self.gate.wait()

    def decide(self, tenant: Tenant, tool: str, arguments: Mapping[str, Any]) -> bool | Deny:
        self.asked.append(arguments)
        return Deny("by policy") if self.denying and tool == "tool" else True

    async def hold_on(self, name: str = "hold", **options: Any) -> None:
        self.holding.append(asyncio.ensure_future(self.dispatcher.dispatch(name, {}, **options)))
        await spin()


async def sealed(scene: Scene) -> None:
    await scene.dispatcher.close()


async def unknown(scene: Scene) -> None:
    scene.name = "nope"


async def misfit(scene: Scene) -> None:
    scene.args = {"n": "one"}


async def denied(scene: Scene) -> None:
    scene.denying = True


async def key_in_use(scene: Scene) -> None:
    await scene.dispatcher.__aenter__()  # a store in memory begins empty when it is opened
    scope = KeyScope(Tenant("default"), "tool", "k")
    claimed = await scene.store.claim(
        scope, fingerprint(b'{"n":2}'), CallId("other"), idempotent=False, unknown_ttl_ms=1_000
    )
    assert isinstance(claimed, Claimed)
    scene.claimed_by_another = True


async def owner_line_full(scene: Scene) -> None:
    """The wait of the call is cut by `queue_wait_ms_max`, set here: the line stays taken."""
    await scene.hold_on(owner="o")
    scene.options["deadline_ms"] = 50


async def breaker_open(scene: Scene) -> None:
    scene.broken = True
    failed = await scene.dispatcher.dispatch("tool", {})
    assert isinstance(failed, DispatchError)
    assert failed.kind is ErrorKind.INTERNAL
    scene.broken = False


async def nothing_left(scene: Scene) -> None:
    while scene.allowance.take(0):
        pass


async def over_the_rate(scene: Scene) -> None:
    limiter = scene.dispatcher.rates
    for _ in range(3):
        await scene.dispatcher.dispatch("tool", {})
    assert limiter._limiters


async def slot_taken(scene: Scene) -> None:
    await scene.hold_on()
    scene.options["deadline_ms"] = 50


CAUSES: list[tuple[str, Callable[[Scene], Awaitable[None]]]] = [
    ("shutting_down", sealed),
    ("not_found", unknown),
    ("schema", misfit),
    ("denied", denied),
    ("conflict", key_in_use),
    ("deadline/turn", owner_line_full),
    ("circuit_open", breaker_open),
    ("budget_exceeded", nothing_left),
    ("rate_limited", over_the_rate),
    ("deadline/slot", slot_taken),
]
PAIRS = list(pairwise(CAUSES))
"""Each cause with the next."""


async def assert_refused(scene: Scene, kind: str) -> DispatchError:
    before = (scene.ran, scene.allowance.taken, len(scene.asked))
    if kind == "rate_limited":
        scene.options.pop("deadline_ms", None)
    failed = await scene.dispatcher.dispatch(scene.name, scene.args, **scene.options)
    assert isinstance(failed, DispatchError), failed
    name, _, where = kind.partition("/")
    assert failed.kind.value == name, failed
    assert (failed.outcome, failed.attempts) == (Outcome.NOT_RUN, 0)
    assert where in failed.message
    assert (scene.ran, scene.allowance.taken) == before[:2]  # the handler was not touched, no call was taken
    asked = len(scene.asked) - before[2]
    assert asked == (0 if name in ("shutting_down", "not_found", "schema") else 1)
    return failed


async def assert_free(scene: Scene, kind: str) -> None:
    """Nothing is held, and the claim of the key went back."""
    scene.gate.set()
    await asyncio.gather(*scene.holding)
    await spin()
    assert_quiet(scene.dispatcher)
    if scene.claimed_by_another or kind == "shutting_down":  # its store is closed
        return
    scope = KeyScope(Tenant("default"), "tool", "k")
    claim = await scene.store.claim(
        scope, fingerprint(b'{"n":9}'), CallId("later"), idempotent=False, unknown_ttl_ms=1_000
    )
    assert isinstance(claim, Claimed)


@pytest.mark.requirement("D8")
@pytest.mark.parametrize(("kind", "arrange"), CAUSES, ids=[kind for kind, _ in CAUSES])
@virtual_time
async def test_each_cause_alone(kind: str, arrange: Callable[[Scene], Awaitable[None]]) -> None:
    scene = Scene()
    await arrange(scene)
    await assert_refused(scene, kind)
    await assert_free(scene, kind)


@pytest.mark.requirement("D8")
@pytest.mark.parametrize(("earlier", "later"), PAIRS, ids=[f"{one[0]}-{two[0]}" for one, two in PAIRS])
@virtual_time
async def test_of_two_neighbouring_causes_the_earlier_is_reported(
    earlier: tuple[str, Callable[[Scene], Awaitable[None]]], later: tuple[str, Callable[[Scene], Awaitable[None]]]
) -> None:
    scene = Scene()
    for name, arrange in sorted((earlier, later), key=lambda cause: _ARRANGED_LAST.index(cause[0])):
        assert name
        await arrange(scene)
    await assert_refused(scene, earlier[0])
    await assert_free(scene, earlier[0])


_ARRANGED_LAST = [
    "over the rate",
    "rate_limited",
    "circuit_open",
    "budget_exceeded",
    "deadline/slot",
    "deadline/turn",
    "conflict",
    "denied",
    "schema",
    "not_found",
    "shutting_down",
]
"""What needs calls that run is arranged before what stops all calls."""


@pytest.mark.requirement("D8")
@virtual_time
async def test_a_stored_answer_comes_before_the_breaker_and_costs_no_allowance() -> None:
    scene = Scene()
    first = await scene.dispatcher.dispatch("tool", {"n": 1}, key="k", allowance=scene.allowance)
    assert first.ok
    assert scene.allowance.taken == 1
    scene.broken = True
    await scene.dispatcher.dispatch("tool", {})
    await nothing_left(scene)
    again = await scene.dispatcher.dispatch("tool", {"n": 1}, key="k", allowance=scene.allowance)
    assert again.ok
    assert again.deduplicated
    assert again.call_id == first.call_id
    assert scene.ran == 1


@pytest.mark.requirement("D8", "D17")
@virtual_time
async def test_the_key_is_claimed_before_any_queueing() -> None:
    scene = Scene()
    await scene.hold_on()  # the one slot
    calls = [asyncio.ensure_future(scene.dispatcher.dispatch("tool", {"n": 1}, key="k")) for _ in range(3)]
    await spin()
    assert scene.dispatcher.statistics().queued == 1  # the run, not each caller
    scene.gate.set()
    done = await asyncio.gather(*calls)
    assert [one.value for one in done] == ["ran"] * 3
    assert scene.ran == 1


@pytest.mark.requirement("D8", "D28")
@virtual_time
async def test_each_attempt_takes_one_of_the_allowance_and_asks_the_breaker_again() -> None:
    from callyard.errors import TransientError

    registry, runs = Registry(), [0]

    async def flaky(arguments: dict[str, Any]) -> None:
        runs[0] += 1
        raise TransientError("later")

    add(registry, "flaky", flaky)
    dispatcher = make(registry, breaker=BreakerPolicy(failures=1))
    allowance = Allowance(calls=10)
    async with dispatcher:
        failed = await dispatcher.dispatch("flaky", allowance=allowance)
        assert isinstance(failed, DispatchError)
        assert failed.attempts == 3
        assert (runs[0], allowance.taken) == (3, 3)
        refused = await dispatcher.dispatch("flaky", allowance=allowance)
        assert isinstance(refused, DispatchError)
        assert refused.kind is ErrorKind.CIRCUIT_OPEN
        assert (runs[0], allowance.taken) == (3, 3)
