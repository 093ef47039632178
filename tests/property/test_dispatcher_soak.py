"""The dispatcher under crowds of random calls, in virtual time: whatever happens, its invariants hold.

A seed draws everything: tools that sleep, fail, nest and will not stop, callers that go away, deadlines, keys, owners,
a stop in the middle. One seed gives one trace. The names of the invariants are those of docs/design/dispatch.md.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random
from typing import Any

import pytest

from callyard.dispatch.allowance import Allowance
from callyard.dispatch.dispatcher import Dispatcher
from callyard.dispatch.events import ENDS, DispatchEvent
from callyard.dispatch.fan_out import ToolCall
from callyard.dispatch.outcomes import DispatchError, DispatchResult
from callyard.dispatch.running import current_call
from callyard.errors import ErrorKind, Outcome, ToolError, TransientError
from callyard.functions.registry import Registry
from callyard.policy.breaker import BreakerPolicy
from callyard.testing.virtual_time import VirtualTimers, run_virtual

GRACE_MS = 50
SLOTS = 12
SEATS = 2
TIMEOUT_MS = 400
ANY = {"type": "object"}
LEAVES = ("quick", "seated", "charge", "flaky", "stubborn", "broken", "rated")
TOOLS = (*LEAVES, "nest", "nest_seated")


class Crowd:
    """One seed's registry, dispatcher, callers, and what was seen."""

    def __init__(self, seed: int, calls: int) -> None:
        self.rng = Random(seed)
        self.calls = calls
        self.now_ms = VirtualTimers().now_ms
        self.begun: Counter[str] = Counter()
        """Attempts, by call."""
        self.inside: Counter[Any] = Counter()
        self.peak: Counter[Any] = Counter()
        self.charges: dict[tuple[str, str], list[str]] = {}
        """Of each (tenant, key): how the runs of the tool that must not run twice ended."""
        self.ends: list[tuple[str, DispatchResult, int, int | None]] = []
        """Of each root call: its id, its end, how long it took, its deadline."""
        self.allowances = [Allowance(calls=self.rng.randrange(1, 60)) for _ in range(5)]
        self.tasks: list[asyncio.Task[None]] = []
        self.number = 0
        self.events: list[DispatchEvent] = []
        self.running_max = 0
        self.dispatcher = self._build()

    def _build(self) -> Dispatcher:
        registry = Registry()
        promises: dict[str, dict[str, Any]] = {
            "quick": {"idempotent": True},
            "seated": {"max_concurrency": SEATS},
            "nest_seated": {"max_concurrency": 1},
            "rated": {"rate": "3/s", "idempotent": True},
        }
        for name in TOOLS:
            handler = getattr(self, name)
            limits = {"timeout_ms": TIMEOUT_MS, **promises.get(name, {})}
            registry.add_tool(name, handler, input_schema=ANY, **limits)
        dispatcher = Dispatcher(
            registry,
            clock=VirtualTimers(),
            rng=Random(self.rng.random()),
            slots=SLOTS,
            queued_max=self.rng.choice((5, 40)),
            tenant_running=9,
            cancel_grace_ms=GRACE_MS,
            drain_deadline_ms=self.rng.choice((0, 300, 5_000)),
            breaker=self.rng.choice((None, BreakerPolicy(failures=4, open_ms=200))),
            policy=self.rng.choice((None, self.policy)),
        )
        dispatcher.subscribe(self.hear)
        return dispatcher

    def hear(self, event: DispatchEvent) -> None:
        self.events.append(event)
        self.running_max = max(self.running_max, len(self.dispatcher._admission.slots.holders))

    async def policy(self, tenant: str, tool: str, arguments: Any) -> bool:
        if self.rng.random() < 0.1:
            await asyncio.sleep(self.rng.random() * 0.2)
        return self.rng.random() < 0.95

    # --- tools ----------------------------------------------------------------------------------------------------

    async def _work(self, group: Any = None) -> None:
        """Some time, now and then more than there is; in `group` at most so many at once."""
        call = current_call()
        assert call is not None
        assert not call.ended
        self.begun[call.id] += 1
        groups = [group] if group is not None else []
        if call.owner and call.parent is None:
            groups.append((call.tenant, call.owner))
        for one in groups:
            self.inside[one] += 1
            self.peak[one] = max(self.peak[one], self.inside[one])
        try:
            if self.rng.random() < 0.8:
                await asyncio.sleep(self.rng.random() * 0.1)
            elif self.rng.random() < 0.5:
                await asyncio.sleep(1)
        finally:
            for one in groups:
                self.inside[one] -= 1

    async def quick(self, arguments: dict[str, Any]) -> int:
        await self._work()
        return 1

    async def rated(self, arguments: dict[str, Any]) -> int:
        await self._work()
        return 1

    async def seated(self, arguments: dict[str, Any]) -> int:
        await self._work("seated")
        return 1

    async def charge(self, arguments: dict[str, Any]) -> int:
        call = current_call()
        assert call is not None
        ends = self.charges.setdefault((call.tenant, call.key or call.id), [])
        ends.append("under way")
        try:
            await self._work(("charge", call.tenant, call.key or call.id))
            if self.rng.random() < 0.3:
                ends[-1] = "not done"
                raise TransientError("busy")
            ends[-1] = "done"
        finally:
            if ends[-1] == "under way":
                ends[-1] = "unknown"
        return 1

    async def flaky(self, arguments: dict[str, Any]) -> int:
        await self._work()
        if self.rng.random() < 0.6:
            raise TransientError("busy", retry_after_ms=self.rng.choice((None, 50, 1_000)))
        return 1

    async def broken(self, arguments: dict[str, Any]) -> Any:
        await self._work()
        raise self.rng.choice((ValueError("x"), ToolError("no"), SystemExit(1), MemoryError(), TimeoutError()))

    async def stubborn(self, arguments: dict[str, Any]) -> int:
        call = current_call()
        assert call is not None
        self.begun[call.id] += 1
        until = asyncio.get_running_loop().time() + self.rng.random()
        while (left := until - asyncio.get_running_loop().time()) > 0:
            try:
                await asyncio.sleep(left)
            except asyncio.CancelledError:
                continue
        return 1

    async def nest(self, arguments: dict[str, Any]) -> int:
        await self._work()
        below = arguments.get("below", ())
        if arguments.get("together"):
            await asyncio.gather(*(self.dispatcher.dispatch(name, args, **options) for name, args, options in below))
        else:
            for name, args, options in below:
                await self.dispatcher.dispatch(name, args, **options)
        return 1

    nest_seated = nest

    # --- callers --------------------------------------------------------------------------------------------------

    def draw(self, depth: int = 0) -> tuple[str, dict[str, Any], dict[str, Any]]:
        rng = self.rng
        name = rng.choice(TOOLS if depth < 3 else LEAVES)
        arguments: dict[str, Any] = {}
        options: dict[str, Any] = {}
        if name.startswith("nest"):
            arguments["below"] = [self.draw(depth + 1) for _ in range(rng.randrange(4))]
            arguments["together"] = rng.random() < 0.5
        if rng.random() < 0.3:
            options["owner"] = f"o{rng.randrange(3)}"
        if rng.random() < (0.6 if name == "charge" else 0.2):
            options["key"] = f"k{rng.randrange(20)}"
        if rng.random() < 0.1:
            options["timeout_ms"] = rng.randrange(1, 200)
        return name, arguments, options

    async def call(self, call_id: str) -> None:
        rng = self.rng
        name, arguments, options = self.draw()
        options |= {"call_id": call_id, "tenant": rng.choice("ab")}
        if rng.random() < 0.5:
            options["deadline_ms"] = rng.choice((0, 30, 200, 1_000))
        if rng.random() < 0.2:
            options["allowance"] = rng.choice(self.allowances)
        began_ms = self.now_ms()
        result = await self.dispatcher.dispatch(name, arguments, **options)
        self.ends.append((call_id, result, self.now_ms() - began_ms, options.get("deadline_ms")))

    async def fan_out(self) -> None:
        calls = []
        for _ in range(self.rng.randrange(6)):
            name, arguments, options = self.draw()
            calls.append(ToolCall(name, arguments, idempotency_key=options.get("key"), owner=options.get("owner")))
        await self.dispatcher.gather_bounded(calls, limit=3, fail_fast=self.rng.random() < 0.5)

    async def run(self) -> None:
        rng, dispatcher = self.rng, self.dispatcher
        async with dispatcher:
            stop_after = self.calls if rng.random() < 0.7 else rng.randrange(self.calls)
            pause_share = rng.choice((0.1, 0.3))
            for number in range(self.calls):
                if rng.random() < pause_share:
                    await asyncio.sleep(rng.random() * 0.15)
                call_id = f"c{number}"
                if rng.random() < 0.02:
                    self.tasks.append(asyncio.ensure_future(self.fan_out()))
                else:
                    self.tasks.append(asyncio.ensure_future(self.call(call_id)))
                if rng.random() < 0.1:
                    rng.choice(self.tasks).cancel()
                if rng.random() < 0.1:
                    dispatcher.cancel(f"c{rng.randrange(number + 1)}")  # type: ignore[arg-type]
                if number == stop_after:
                    self.tasks.append(asyncio.ensure_future(dispatcher.close()))
            await asyncio.wait(self.tasks)
        self.check_quiet()
        await asyncio.sleep(2)  # the stubborn end
        assert dispatcher.statistics().stragglers == ()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    # --- invariants -----------------------------------------------------------------------------------------------

    def check_quiet(self) -> None:
        """slots_return, no_waiter_left, bounded."""
        seen = self.dispatcher.statistics()
        assert (seen.calls, seen.running, seen.queued, seen.flights, seen.owners) == (0, 0, 0, 0, 0), seen
        admission = self.dispatcher._admission
        assert all(line.is_empty for line in admission._seats.values())
        assert admission._tenants is not None
        assert len(admission._tenants) == 0
        assert not admission._tenant_use
        assert not self.dispatcher._handlers._running or seen.stragglers

    def check(self) -> None:
        for task in self.tasks:
            if not task.cancelled():
                task.result()  # no call raises
        self.check_ends()
        self.check_events()
        assert self.running_max <= SLOTS
        assert self.peak["seated"] <= SEATS
        for group, peak in self.peak.items():  # one_run, and one at a time per owner
            assert peak <= (SEATS if group == "seated" else 1), group
        for (tenant, key), ends in self.charges.items():
            kept = [end for end in ends if end != "not done"]
            assert kept == ends[len(ends) - len(kept) :][:1], (tenant, key, ends)  # one, and none after it
        for allowance in self.allowances:
            assert allowance.calls is not None
            assert 0 <= allowance.taken <= allowance.calls

    def check_ends(self) -> None:
        """answered; and what an end says of the attempts is what the code saw."""
        for call_id, end, took_ms, deadline_ms in self.ends:
            if deadline_ms is not None:
                assert took_ms <= deadline_ms + GRACE_MS, (call_id, end)
            if end.deduplicated or end.call_id != call_id:
                continue
            assert end.attempts == self.begun[call_id] or not end.ok, (call_id, end, self.begun[call_id])
            if isinstance(end, DispatchError):
                not_run = end.outcome is Outcome.NOT_RUN
                assert not (not_run and end.attempts and end.kind not in _SAID_NOT_DONE), end
                assert not_run or end.attempts or end.kind in _OF_JOINERS, end

    def check_events(self) -> None:
        """Each call has one start and one end; an attempt has an end in time."""
        open_at_ms: dict[str, int] = {}
        starts, ends = Counter[str](), Counter[str]()
        for event in self.events:
            if event.name == "dispatch.start":
                starts[event.call_id] += 1
            elif event.name in ENDS:
                ends[event.call_id] += 1
            if event.call_id in open_at_ms:
                assert event.at_ms - open_at_ms.pop(event.call_id) <= TIMEOUT_MS + GRACE_MS, event
            if event.name == "dispatch.attempt":
                open_at_ms[event.call_id] = event.at_ms
        assert starts == ends
        assert set(starts.values()) == {1}


_SAID_NOT_DONE = {ErrorKind.TRANSIENT, ErrorKind.CANCELLED, ErrorKind.SHUTTING_DOWN, ErrorKind.TIMEOUT}
"""Kinds that may end a call whose attempts have all said that nothing was done."""

_OF_JOINERS = {ErrorKind.TIMEOUT, ErrorKind.DEADLINE, ErrorKind.CANCELLED}
"""Kinds of one that gave up waiting for the run of its key, which goes on."""


@pytest.mark.requirement("D14", "D17", "D27", "D31", "D41", "D46", "D51")
@pytest.mark.parametrize("seed", range(50))
def test_a_crowd_of_random_calls(seed: int) -> None:
    crowds: list[Crowd] = []

    async def main() -> None:
        crowds.append(Crowd(seed, calls=1_000))
        await crowds[0].run()

    run_virtual(main())
    crowds[0].check()


@pytest.mark.requirement("D51")
def test_one_seed_gives_one_trace() -> None:
    traces = []
    for _ in range(2):
        crowds: list[Crowd] = []

        async def main(crowds: list[Crowd] = crowds) -> None:
            crowds.append(Crowd(3, calls=100))
            await crowds[0].run()

        run_virtual(main())
        traces.append(crowds[0].events)
    assert traces[0] == traces[1]
