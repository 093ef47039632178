"""The dispatcher's world: the real `Dispatcher` with its attempt plan, breakers, lines and memory store, on a loop that
has no time of its own.

One or two dispatchers share a store. Callers come with keys, owners, deadlines, and go, or have their calls stopped;
handlers fail, hang, swallow their cancellation, and dispatch to one another; the store is slow and fails. What is
checked: one run per key, no attempt that must not be, answers that say what ran, lines within their bounds and nobody
waiting for a free place, one probe in a half-open breaker; and in the end that nobody waits and nothing is left.
"""

from __future__ import annotations

import asyncio
import gc
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from callyard import sdk
from callyard.dispatch.dispatcher import Dispatcher
from callyard.dispatch.events import DispatchEvent
from callyard.dispatch.stores.memory import MemoryKeyStore
from callyard.dispatch.stores.port import Claim, KeyEnd, KeyScope, StoreUnavailable
from callyard.errors import TransientError
from callyard.functions.registry import Registry
from callyard.ids import CallId, Tenant
from callyard.testing.dispatch_checks import Book, check_now
from callyard.testing.dispatch_workload import (
    GRACE_MS,
    STORE_MS_MAX,
    TTL_MS,
    UNKNOWN_TTL_MS,
    Asked,
    Faults,
    Run,
    Setting,
    Tool,
)
from callyard.testing.simulation import Simulation
from callyard.testing.stepped_loop import SimulatedTimers, SteppedLoop

DEPTH_MAX = 3
CANCELS_MAX = 10


class _MoodyStore(MemoryKeyStore):
    """Slow, and out of reach, as the world says. An end that it could not take it takes by itself, later."""

    def __init__(self, world: DispatchWorld) -> None:
        super().__init__(entries_max=world.setting.entries_max, now_ms=world.timers.now_ms)
        self._world = world

    async def _step(self) -> None:
        world = self._world
        if world.chance.random() < world.faults.store_slow:
            await world.timers.sleep(world.chance.randint(1, STORE_MS_MAX // 2))
        if world.chance.random() < world.faults.store_fails:
            raise StoreUnavailable("no answer")

    async def claim(self, scope: KeyScope, *args: Any, **options: Any) -> Claim:
        await self._step()
        return await super().claim(scope, *args, **options)

    async def settle(self, scope: KeyScope, fence: int, end: KeyEnd | None, ttl_ms: int) -> bool:
        try:
            await self._step()
        except StoreUnavailable:
            again = partial(super().settle, scope, fence, end, ttl_ms)
            self._world.timers.after(300, lambda: asyncio.ensure_future(again()))
            raise
        return await super().settle(scope, fence, end, ttl_ms)


class DispatchWorld:
    """See the module. `faults` may be given to try one thing alone."""

    def __init__(self, simulation: Simulation, faults: Faults | None = None) -> None:
        self.simulation = simulation
        rng = simulation.stream("setting")
        self.setting = Setting.draw(rng)
        self.faults = Faults.draw(rng) if faults is None else faults
        self.faults_until_ms = rng.choice((3_000, 20_000))
        self.chance = simulation.stream("store")
        self._callers = simulation.stream("callers")
        self._work = simulation.stream("work")
        self.loop = SteppedLoop()
        self.loop.set_exception_handler(lambda _, context: self.noise.append(str(context.get("message"))))
        self.timers = SimulatedTimers(simulation, self.loop)
        self.noise: list[str] = []
        self.book = Book()
        self.active: dict[Run, None] = {}
        """Attempts whose code has not ended."""
        self.circuits: dict[str, int] = defaultdict(int)
        """Moves of each breaker."""
        self.broken: list[str] = []
        """Checks that failed inside a handler, where the dispatcher contains them."""
        self._unasked = self.setting.calls
        self._resolving: asyncio.Task[None] | None = None
        self.store = _MoodyStore(self)
        self.dispatchers = [self._build(number) for number in range(self.setting.dispatchers)]

    def _build(self, number: int) -> Dispatcher:
        registry = Registry()
        for tool in self.setting.tools:
            registry.add_function(self._handler(tool, number), name=tool.name, **tool.promises)
        dispatcher = Dispatcher(
            registry,
            store=self.store,
            clock=self.timers,
            rng=self.simulation.stream(f"dispatcher-{number}"),
            slots=self.setting.slots,
            breaker=self.setting.breaker,
            cancel_grace_ms=GRACE_MS,
            ttl_ms=TTL_MS,
            unknown_ttl_ms=UNKNOWN_TTL_MS,
        )
        dispatcher.subscribe(partial(self._hear, number))
        return dispatcher

    def _hear(self, number: int, event: DispatchEvent) -> None:
        if event.name.startswith("circuit."):
            self.circuits[f"{number} {event.tool} {event.tenant}"] += 1
        self.simulation.note((number, event.name, event.tool, event.call_id, event.attempt, event.kind))

    # --- the world's course -----------------------------------------------------------------------------------

    def start(self) -> None:
        for number in range(self.setting.calls):
            at_ms = self._callers.randint(0, self._callers.choice((500, self.faults_until_ms)))
            self.timers.after(at_ms, partial(self._ask, number))
        self.timers.after(1_000, self._resolve)

    def stop_faults(self) -> None:
        self.faults = Faults()

    def is_over(self) -> bool:
        waiting = any(asked.task is not None and not asked.task.done() for asked in self.book.asked.values())
        flights = any(dispatcher.statistics().flights for dispatcher in self.dispatchers)
        return not (self._unasked or waiting or flights or self.active)

    def _ask(self, number: int) -> None:
        rng, setting = self._callers, self.setting
        self._unasked -= 1
        of = rng.randrange(setting.dispatchers)
        tool = rng.choice(setting.tools)
        call_id = CallId(f"{of}-{number}")
        options = self._options(tool)
        asked = self._note_asked(call_id, tool, options)
        asked.task = asyncio.ensure_future(self._dispatch(of, asked, options))
        if rng.random() < self.faults.leaves:
            self.timers.after(rng.randint(0, 1_500), partial(self._leave, asked))
        if rng.random() < self.faults.cancelled:
            self.timers.after(rng.randint(0, 1_500), lambda: self.dispatchers[of].cancel(call_id))

    def _options(self, tool: Tool) -> dict[str, Any]:
        rng, setting = self._callers, self.setting
        keyed, owned = rng.random() < 0.7, setting.owners > 0 and rng.random() < 0.5
        return {
            "n": rng.randrange(8) // 7,
            "key": f"key-{rng.randrange(setting.keys)}" if keyed else None,
            "tenant": rng.choice(("default", "default", "b")),
            "owner": f"owner-{rng.randrange(setting.owners)}" if owned else None,
            "deadline_ms": rng.choice((None, None, 100, 2_000, 20_000)),
            "timeout_ms": rng.choice((None, None, 300)),
        }

    def _note_asked(self, call_id: CallId, tool: Tool, options: dict[str, Any]) -> Asked:
        key = options["key"]
        scope = None if key is None else KeyScope(Tenant(options["tenant"]), tool.name, key)
        asked = Asked(tool, call_id, scope, options["n"], options["deadline_ms"], self.timers.now_ms())
        self.book.asked[call_id] = asked
        return asked

    async def _dispatch(self, of: int, asked: Asked, options: dict[str, Any]) -> Any:
        given = {name: value for name, value in options.items() if name != "n"}
        try:
            result = await self.dispatchers[of].dispatch(
                asked.tool.name, {"n": asked.n}, call_id=asked.call_id, **given
            )
        except asyncio.CancelledError:
            asked.gone = True
            raise
        asked.result = result
        self.simulation.note((asked.call_id, result.ok, result.deduplicated, result.call_id))
        with self._checking():
            self.book.answer(asked, self.timers.now_ms())
        return result

    @contextmanager
    def _checking(self) -> Iterator[None]:
        try:
            yield
        except AssertionError as error:
            self.broken.append(str(error))
            raise

    def _leave(self, asked: Asked) -> None:
        if asked.task is not None:
            asked.task.cancel()

    def _resolve(self) -> None:
        """Now and then somebody says how an unknown call ended."""
        self._resolving = asyncio.ensure_future(self._resolve_one())
        if not self.is_over():
            self.timers.after(1_000, self._resolve)

    async def _resolve_one(self) -> None:
        rng = self._callers
        for record in await self.store.unknown(limit=1):
            scope = record.scope
            retry, value = rng.random() < 0.5, f"resolved-{rng.randrange(1_000)}"
            self.book.free_at_ms[scope] = self.timers.now_ms() + (0 if retry else TTL_MS)
            if not retry:
                self.book.resolved[scope].add(value)
            done = await self.dispatchers[0].resolve(scope.tenant, scope.tool, scope.key, value, retry=retry)
            assert done, f"{scope} is unknown, and was not resolved"

    # --- what handlers do -----------------------------------------------------------------------------------------

    def _handler(self, tool: Tool, of: int) -> Any:
        async def handler(n: int) -> str:
            info = sdk.context()
            tenant, key = Tenant(info.tenant), info.idempotency_key
            run = Run(
                tool=tool,
                dispatcher=of,
                call_id=info.call_id,
                attempt=info.attempt,
                scope=KeyScope(tenant, tool.name, key) if key else None,
                owner=(tenant, info.owner) if info.owner else None,
                n=n,
                begun_at_ms=self.timers.now_ms(),
                tenant=tenant,
                circuit=self.circuits[f"{of} {tool.name} {tenant}"],
            )
            with self._checking():
                self.book.begin(run, self.timers.now_ms())
            self.active[run] = None
            try:
                return await self._run(run, of)
            finally:
                del self.active[run]
                run.ended_at_ms = self.timers.now_ms()

        return handler

    async def _run(self, run: Run, of: int) -> str:
        rng, faults = self._work, self.faults
        chances = [rng.random() for _ in range(4)]
        work_ms = rng.choice((0, 10, 100, 400))
        try:
            await self.timers.sleep(3_600_000 if chances[0] < faults.hangs else work_ms)
            if rng.random() < self.setting.nests and run.call_id.count("/") < DEPTH_MAX:
                await self._nest(run, of)
        except asyncio.CancelledError:
            run.told_to_stop = True
            if chances[1] >= faults.stubborn:
                run.end = "cancelled"
                raise
            await self.timers.sleep(rng.choice((100, 700)))  # it goes on as if nothing had been said
        if chances[2] < faults.transient:
            run.end = "transient"
            raise TransientError("busy")
        if chances[3] < faults.raises:
            run.end = "raised"
            raise ValueError("no")
        run.end = "ok"
        return run.value

    async def _nest(self, run: Run, of: int) -> None:
        tool = self._work.choice(self.setting.tools)
        children = sum(call_id.startswith(f"{run.call_id}/") for call_id in self.book.asked)
        options = self._options(tool)
        options["tenant"] = "default" if run.scope is None and run.owner is None else options["tenant"]
        call_id = CallId(f"{run.call_id}/{children}")
        tenant = sdk.context().tenant
        asked = self._note_asked(call_id, tool, options | {"tenant": tenant})
        await self._dispatch(of, asked, options)

    # --- checks ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        assert not self.broken, self.broken
        active = [run for run in self.active if run.is_active]
        check_now(self.dispatchers, self.setting.slots, active, self.circuits)
        assert len(self.store) <= self.setting.entries_max
        for asked in self.book.asked.values():
            if asked.task is not None and asked.task.done():
                if not asked.task.cancelled():
                    asked.task.result()
                asked.task = None
        if self._resolving is not None and self._resolving.done():
            self._resolving.result()
            self._resolving = None

    def check_end(self) -> None:
        for asked in self.book.asked.values():
            assert asked.result is not None or asked.gone, f"no_waiter_left: {asked.call_id} was never answered"
        for dispatcher in self.dispatchers:
            closing = self.loop.create_task(dispatcher.close())
            self.loop.settle()
            assert closing.done(), "nothing is under way, yet it does not close"
            closing.result()
            statistics = dispatcher.statistics()
            assert (statistics.calls, statistics.running, statistics.queued) == (0, 0, 0), statistics
            assert (statistics.flights, statistics.owners, len(statistics.stragglers)) == (0, 0, 0), statistics
            assert not any(line.holders for line in dispatcher._admission._seats.values()), "slots_return"
        assert not asyncio.all_tasks(self.loop), "tasks are left"
        gc.collect()
        assert not self.noise, self.noise

    def close(self) -> None:
        for _ in range(CANCELS_MAX):  # code may swallow its cancellation, and a failed world may have lost its tasks
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.settle()
        self.loop.close()
