"""The dispatcher beside a naive model: lists, one event at a time, no tasks.

Two tools, keys, one or two slots, a breaker; callers come, leave, and have their calls stopped; time passes. After each
step every caller has exactly the answer that the model has for it, or none; the same runs are under way; and nothing
else is held. Source: tool-dispatch D8, D11, D16-D19, D27, D28, D43.
"""

from __future__ import annotations

import asyncio
from functools import partial
from random import Random
from typing import Any, Literal, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from callyard import sdk
from callyard.dispatch.dispatcher import Dispatcher
from callyard.dispatch.outcomes import DispatchResult
from callyard.dispatch.stores.memory import MemoryKeyStore
from callyard.errors import TransientError
from callyard.functions.registry import Registry
from callyard.ids import Tenant
from callyard.policy.breaker import BreakerPolicy
from callyard.policy.retry import RetryPolicy
from callyard.testing.simulation import Simulation
from callyard.testing.stepped_loop import SimulatedTimers, SteppedLoop

TIMEOUT_MS = 1_000
TTL_MS = 5_000
OPEN_MS = 2_000
FAILURES = 2
How = Literal["ok", "raises", "transient"]


class End(NamedTuple):
    """What a caller is told: `ok` or a kind, the outcome, and whose run it was."""

    kind: str
    outcome: str
    run: str


class ModelCall:
    def __init__(self, name: str, tool: str, key: str | None, n: int, deadline_at_ms: int | None) -> None:
        self.name, self.tool, self.key, self.n, self.deadline_at_ms = name, tool, key, n, deadline_at_ms
        self.begun_at_ms: int | None = None
        self.epoch = -1


class ModelFlight:
    def __init__(self, holder: ModelCall) -> None:
        self.n = holder.n
        self.holder = holder
        self.waiting = [holder]


class Model:
    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.now_ms = 0
        self.answers: dict[str, End] = {}
        self.running: list[ModelCall] = []
        self.queue: list[ModelCall] = []
        self.flights: dict[tuple[str, str], ModelFlight] = {}
        self.kept: dict[tuple[str, str], tuple[int, End, int | None]] = {}
        """The arguments, the end, and when it expires; None: not in this test's time."""
        self.state: Literal["closed", "open", "half"] = "closed"
        self.open_until_ms = 0
        self.epoch = 0
        self.failures = 0
        self.probe: ModelCall | None = None

    # --- what happens -----------------------------------------------------------------------------------------

    def arrive(self, call: ModelCall) -> None:
        scope = self.scope(call)
        if scope is None:
            self.start(call)
            return
        self.expire()
        if scope in self.kept:
            n, end, _ = self.kept[scope]
            self.answers[call.name] = end if n == call.n else End("conflict", "not_run", call.name)
        elif scope not in self.flights:
            self.flights[scope] = ModelFlight(call)
            self.start(call)
        elif self.flights[scope].n != call.n:
            self.answers[call.name] = End("conflict", "not_run", call.name)
        else:
            self.flights[scope].waiting.append(call)

    def finish(self, call: ModelCall, how: How) -> None:
        kind, outcome = {
            "ok": ("ok", "ran"),
            "raises": ("internal", "ran"),
            "transient": ("transient", "not_run"),
        }[how]
        self.end_run(call, End(kind, outcome, call.name))

    def leave(self, call: ModelCall, *, told: bool = False) -> None:
        """Its caller goes; `told`: somebody asked to stop it, and its caller hears of it."""
        scope = self.scope(call)
        flight = None if scope is None else self.flights.get(scope)
        if flight is None or call not in flight.waiting:
            self.stop(call, told=told)
            return
        alone = flight.waiting == [call]
        holder = flight.holder
        if told and alone:
            if holder is not call:
                self.answers[call.name] = End("cancelled", "unknown", call.name)
                flight.waiting.remove(call)
            self.stop(holder, told=True)
            return
        flight.waiting.remove(call)
        if told:
            self.answers[call.name] = End("cancelled", "unknown", call.name)
        if holder.begun_at_ms is None:
            if holder is call:
                self.queue.remove(call)
                self.hand_on(scope, flight)
        elif not flight.waiting and call.tool == "search":
            self.stop(holder, told=False)

    def stop(self, call: ModelCall, *, told: bool) -> None:
        if call in self.queue:
            self.queue.remove(call)
            self.end_unbegun(call, End("cancelled", "not_run", call.name) if told else None)
        else:
            self.end_run(call, End("cancelled", "unknown", call.name), told=told)

    def pass_time(self, to_ms: int) -> None:
        while True:
            due = sorted(
                (at_ms, order, call.name) for order, (at_ms, call) in enumerate(self.timers()) if at_ms <= to_ms
            )
            if not due:
                break
            at_ms, order, _ = due[0]
            call = self.timers()[order][1]
            self.now_ms = max(self.now_ms, at_ms)
            self.ring(call)
        self.now_ms = to_ms

    def timers(self) -> list[tuple[int, ModelCall]]:
        found = []
        for call in self.running:
            assert call.begun_at_ms is not None
            limits = [call.begun_at_ms + TIMEOUT_MS]
            limits += [] if call.deadline_at_ms is None else [call.deadline_at_ms]
            found.append((min(limits), call))
        waiting = self.queue + [
            call for flight in self.flights.values() for call in flight.waiting if call is not flight.holder
        ]
        return found + [(call.deadline_at_ms, call) for call in waiting if call.deadline_at_ms is not None]

    def ring(self, call: ModelCall) -> None:
        if call in self.running:
            self.end_run(call, End("timeout", "unknown", call.name))
        elif call in self.queue:
            self.queue.remove(call)
            self.end_unbegun(call, End("deadline", "not_run", call.name))
        else:
            self.answers[call.name] = End("deadline", "unknown", call.name)
            self.leave(call)

    # --- how a run goes ---------------------------------------------------------------------------------------

    def start(self, call: ModelCall) -> None:
        if self.refuses():
            self.end_unbegun(call, End("circuit_open", "not_run", call.name))
        elif call.deadline_at_ms is not None and call.deadline_at_ms <= self.now_ms:
            self.end_unbegun(call, End("deadline", "not_run", call.name))
        elif self.queue or len(self.running) >= self.slots:
            self.queue.append(call)
        else:
            self.begin(call)

    def begin(self, call: ModelCall) -> None:
        """It has a slot."""
        if self.refuses():
            self.end_unbegun(call, End("circuit_open", "not_run", call.name))
            return
        if self.state != "closed":
            self.state, self.probe, self.epoch = "half", call, self.epoch + 1
        call.epoch, call.begun_at_ms = self.epoch, self.now_ms
        self.running.append(call)

    def refuses(self) -> bool:
        return (self.state == "open" and self.now_ms < self.open_until_ms) or (
            self.state == "half" and self.probe is not None
        )

    def judge(self, call: ModelCall, end: End) -> None:
        if call.epoch != self.epoch:
            return
        if end.kind == "ok":
            if self.state == "half":
                self.state, self.probe, self.epoch, self.failures = "closed", None, self.epoch + 1, 0
        elif end.kind in ("internal", "timeout", "transient") and not self.is_cut_short(call, end):
            self.failures += 1
            if self.state == "half" or self.failures >= FAILURES:
                self.state, self.probe, self.epoch, self.failures = "open", None, self.epoch + 1, 0
                self.open_until_ms = self.now_ms + OPEN_MS
        elif self.probe is call:
            self.probe, self.epoch = None, self.epoch + 1

    def is_cut_short(self, call: ModelCall, end: End) -> bool:
        """By its caller's deadline, which says nothing of the tool."""
        if end.kind != "timeout" or call.deadline_at_ms is None:
            return False
        assert call.begun_at_ms is not None
        return call.deadline_at_ms < call.begun_at_ms + TIMEOUT_MS

    def end_run(self, call: ModelCall, end: End, *, told: bool = True) -> None:
        self.running.remove(call)
        self.judge(call, end)
        scope = self.scope(call)
        flight = None if scope is None else self.flights.get(scope)
        if scope is None or flight is None:
            if told:
                self.answers[call.name] = end
        else:
            del self.flights[scope]
            for waiter in flight.waiting:
                self.answers[waiter.name] = end
            if end.kind == "ok" or (call.tool == "charge" and end.outcome != "not_run"):
                self.kept[scope] = (call.n, end, None if end.outcome == "unknown" else self.now_ms + TTL_MS)
        self.admit()

    def end_unbegun(self, call: ModelCall, end: End | None) -> None:
        if end is not None:
            self.answers[call.name] = end
        scope = self.scope(call)
        if scope is not None:
            flight = self.flights[scope]
            flight.waiting.remove(call)
            self.hand_on(scope, flight)
        self.admit()

    def hand_on(self, scope: Any, flight: ModelFlight) -> None:
        if flight.waiting:
            flight.holder = flight.waiting[0]
            self.start(flight.holder)
        else:
            del self.flights[scope]

    def admit(self) -> None:
        while self.queue and len(self.running) < self.slots:
            self.begin(self.queue.pop(0))

    def expire(self) -> None:
        for scope, (_, _, at_ms) in list(self.kept.items()):
            if at_ms is not None and at_ms <= self.now_ms:
                del self.kept[scope]

    def resolve(self, scope: tuple[str, str], *, retry: bool) -> bool:
        self.expire()
        if scope not in self.kept or self.kept[scope][1].outcome != "unknown":
            return False
        n = self.kept.pop(scope)[0]
        if not retry:
            self.kept[scope] = (n, End("ok", "ran", "resolved"), self.now_ms + TTL_MS)
        return True

    @staticmethod
    def scope(call: ModelCall) -> tuple[str, str] | None:
        return None if call.key is None else (call.tool, call.key)


TOOLS = ("charge", "search")
KEYS = (None, "a", "b")


class DispatcherMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = SteppedLoop()
        self.simulation = Simulation(0)
        self.timers = SimulatedTimers(self.simulation, self.loop)
        self.noise: list[Any] = []
        self.loop.set_exception_handler(lambda _, context: self.noise.append(context))
        self.calls: dict[str, ModelCall] = {}
        self.tasks: dict[str, asyncio.Task[DispatchResult]] = {}
        self.gates: dict[str, asyncio.Future[How]] = {}
        """Runs under way, by call."""
        self.begun: list[str] = []
        self.left: set[str] = set()

    @initialize(slots=st.integers(1, 2))
    def open(self, slots: int) -> None:
        registry = Registry()
        for tool in TOOLS:
            promises: dict[str, Any] = {
                "idempotent": tool == "search",
                "timeout_ms": TIMEOUT_MS,
                "retry": RetryPolicy(max_attempts=1),
            }
            registry.add_function(self.handler, name=tool, **promises)
        self.store = MemoryKeyStore(now_ms=self.timers.now_ms)
        # Both tools share one breaker: the model has one, and it opens sooner.
        self.dispatcher = Dispatcher(
            registry,
            clock=self.timers,
            rng=Random(0),
            store=self.store,
            slots=slots,
            ttl_ms=TTL_MS,
            breaker=BreakerPolicy(failures=FAILURES, window_ms=86_400_000, open_ms=OPEN_MS, factor=1),
        )
        shared = self.dispatcher._breakers.get("charge", Tenant("default"))
        assert shared is not None
        self.dispatcher._breakers._breakers["search"] = {Tenant("default"): shared}
        self.model = Model(slots)

    async def handler(self, n: int) -> str:
        name = sdk.context().call_id
        gate = self.gates[name] = self.loop.create_future()
        self.begun.append(name)
        try:
            how = await gate
        finally:
            del self.gates[name]
        if how == "raises":
            raise ValueError("no")
        if how == "transient":
            raise TransientError("busy")
        return name

    # --- steps ------------------------------------------------------------------------------------------------

    @rule(
        tool=st.sampled_from(TOOLS),
        key=st.sampled_from(KEYS),
        n=st.sampled_from((0, 0, 0, 1)),
        deadline_ms=st.sampled_from((None, None, 300, 1_500)),
    )
    def call(self, tool: str, key: str | None, n: int, deadline_ms: int | None) -> None:
        self.start(tool, key, n, deadline_ms)

    def start(self, tool: str, key: str | None, n: int, deadline_ms: int | None) -> None:
        number = len(self.calls)
        name = f"c-{number}"
        if deadline_ms is not None:
            deadline_ms += number * 7 % 100  # hardly ever two at one instant
        deadline_at_ms = None if deadline_ms is None else self.timers.now_ms() + deadline_ms
        call = self.calls[name] = ModelCall(name, tool, key, n, deadline_at_ms)
        dispatch = self.dispatcher.dispatch(tool, {"n": n}, key=key, deadline_ms=deadline_ms, call_id=name)
        self.tasks[name] = self.loop.create_task(dispatch)
        self.loop.settle()
        self.model.arrive(call)

    @rule(tool=st.sampled_from(TOOLS), deadlines=st.lists(st.sampled_from((None, 300, 1_500)), min_size=2, max_size=4))
    def join(self, tool: str, deadlines: list[int | None]) -> None:
        """Several equal calls, one after another."""
        for deadline_ms in deadlines:
            self.start(tool, "a", 0, deadline_ms)

    @precondition(lambda self: bool(self.gates))
    @rule(data=st.data(), how=st.sampled_from(("ok", "ok", "raises", "transient")))
    def finish(self, data: st.DataObject, how: How) -> None:
        name = data.draw(st.sampled_from(sorted(self.gates)))
        self.gates[name].set_result(how)
        self.loop.settle()
        self.model.finish(self.calls[name], how)

    @precondition(lambda self: bool(self.waiting()))
    @rule(data=st.data(), told=st.booleans())
    def go(self, data: st.DataObject, told: bool) -> None:
        name = data.draw(st.sampled_from(self.waiting()))
        if told:
            self.timers.act(lambda: self.dispatcher.cancel(name))  # type: ignore[arg-type]
        else:
            self.left.add(name)
            self.tasks[name].cancel()
            self.loop.settle()
        self.model.leave(self.calls[name], told=told)

    @rule(ms=st.sampled_from((1, 50, 299, 400, 700, 2_000, 5_000)))
    def wait(self, ms: int) -> None:
        at_ms = self.timers.now_ms() + ms
        for delay_ms in (ms, 0, 0):  # what was armed meanwhile for the same instant is due as well
            over: list[bool] = []
            self.simulation.after(delay_ms, partial(over.append, True))
            while not over:
                self.simulation.step()
        self.model.pass_time(at_ms)

    @rule(tool=st.sampled_from(TOOLS), key=st.sampled_from(KEYS[1:]), retry=st.booleans())
    def resolve(self, tool: str, key: str, retry: bool) -> None:
        task = self.loop.create_task(self.dispatcher.resolve("default", tool, key, "resolved", retry=retry))
        self.loop.settle()
        assert task.result() is self.model.resolve((tool, key), retry=retry)

    def waiting(self) -> list[str]:
        return [name for name, task in self.tasks.items() if not task.done()]

    # --- what must hold ---------------------------------------------------------------------------------------

    @invariant()
    def everybody_is_told_what_the_model_says(self) -> None:
        for name, task in self.tasks.items():
            expected = self.model.answers.get(name)
            if name in self.left:
                assert task.cancelled()
            elif not task.done():
                assert expected is None, f"no_waiter_left: {name} should have {expected}"
            else:
                assert self.read(task.result()) == expected, name

    def read(self, result: DispatchResult) -> End:
        if result.ok:
            return End("ok", "ran", result.value)
        return End(result.kind.value, result.outcome.value, result.call_id)

    @invariant()
    def the_same_runs_are_under_way(self) -> None:
        if not hasattr(self, "model"):
            return
        assert sorted(self.gates) == sorted(call.name for call in self.model.running)
        assert len(self.begun) == len(set(self.begun)), "one attempt each"

    @invariant()
    def nothing_is_held_beside_them(self) -> None:
        if not hasattr(self, "model"):
            return
        statistics, model = self.dispatcher.statistics(), self.model
        assert (statistics.running, statistics.queued) == (len(model.running), len(model.queue)), "slots_return"
        assert statistics.flights == len(model.flights), "one_run"
        assert statistics.calls == len(self.waiting())
        assert not self.noise

    @invariant()
    def a_half_open_breaker_has_one_probe(self) -> None:
        if hasattr(self, "model"):
            names = {"closed": "closed", "open": "open", "half": "half_open"}
            assert self.dispatcher.breaker_state("charge").value == names[self.model.state]
            probes = [call for call in self.model.running if self.model.state == "half" and call is self.model.probe]
            assert len(probes) <= 1, "one_probe"

    def teardown(self) -> None:
        if hasattr(self, "model"):
            closing = self.loop.create_task(self.dispatcher.close(drain_deadline_ms=0))
            while not closing.done():
                self.loop.settle()
                if not closing.done():
                    assert self.simulation.step(), "close waits for nothing"
            closing.result()
            statistics = self.dispatcher.statistics()
            assert (statistics.calls, statistics.running, statistics.queued, statistics.flights) == (0, 0, 0, 0)
            self.loop.settle()
            assert not asyncio.all_tasks(self.loop)
        self.loop.close()
        assert not self.noise


TestDispatcher = pytest.mark.requirement("D8", "D11", "D16", "D17", "D18", "D19", "D27", "D28", "D43", "D51")(
    DispatcherMachine.TestCase
)
TestDispatcher.settings = settings(max_examples=150, stateful_step_count=40)
