"""The host's world: the real parts of `callyard.host` in their own wiring, on a loop that has no time of its own and a
transport that does as the seed says.

Peers send one-ways, requests, publishes, control and rubbish, flood, go away and come back; users and handlers send,
request and publish, and wait or do not; handlers raise, hang, swallow their cancellation, cancel themselves, call
themselves, yield, leave tasks behind; owners are removed, made anew, sealed and moved; sockets do not take their flow
state; the clock jumps; and some seeds stop the host in the middle of it. What is checked, after each step: every
invariant of the design page, by the parts themselves and against `host_checks`, and that whoever could go on does; in
the end that each message had one fate, each operation one outcome, and that nothing is left.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final

from callyard.host import wiring
from callyard.host.config import ProcessorFigures, SendFamily
from callyard.host.drops import Dropped, DropReason
from callyard.host.errors import HostError, HostErrorKind
from callyard.host.jobs import Transition
from callyard.host.ledger import Lane
from callyard.host.outbound import Sending, SendingState
from callyard.host.owners import Callback, Condition, Owner, OwnerKey
from callyard.host.pump import RotationLimits
from callyard.host.states import HostState
from callyard.host.turns import Turn
from callyard.host.wiring import CANCEL, LOCAL, HostParts, Ingress
from callyard.testing.host_checks import HostBook, Operation, WatchedJobs, WatchedMoving, WatchedOwners
from callyard.testing.host_workload import (
    HOPS_MAX,
    PADDING_BYTES_MAX,
    SHUTDOWN_MS,
    Cargo,
    CargoKind,
    Faults,
    Place,
    Setting,
)
from callyard.testing.scripted_transport import HOLD, Call, Hold, ScriptedSource, ScriptedTransport, Started
from callyard.testing.simulation import Simulation
from callyard.testing.stepped_loop import SimulatedTimers, SteppedLoop
from callyard.transport.port import (
    FlowResult,
    FlowState,
    FlowTarget,
    HeadKind,
    Outgoing,
    OutgoingKind,
    Record,
    RecordKind,
    SourceId,
    SourceKind,
)

JUMP_MS_MAX: Final = 3_000
CANCELS_MAX: Final = 10


class HostWorld:
    """See the module. `faults` may be given to try one thing alone; `stop_at_step`: when the host is stopped."""

    def __init__(self, simulation: Simulation, faults: Faults | None = None, stop_at_step: int | None = None) -> None:
        self.simulation = simulation
        rng = simulation.stream("setting")
        self.setting = Setting.draw(rng)
        self.faults = Faults.draw(rng) if faults is None else faults
        self.faults_until_ms = rng.choice((500, 5_000, 20_000))
        self._stop_at_step = stop_at_step
        self._rng = simulation.stream("acts")
        self._work = simulation.stream("work")
        self._peer = simulation.stream("peers")
        self._log = logging.getLogger("callyard.host")
        self._log_level = self._log.level
        self._log.setLevel(logging.CRITICAL + 1)  # what handlers do wrong is meant
        self.loop = SteppedLoop()
        self.noise: list[str] = []
        self.loop.set_exception_handler(lambda _, context: self.noise.append(f"{context.get('message')} {context}"))
        self.timers = SimulatedTimers(simulation, self.loop)
        self.book = HostBook(self.timers, self.setting.limits)
        self._build()
        self._unacted = self.setting.acts
        self._numbers: Counter[str] = Counter()
        self._generations: Counter[str] = Counter()
        self._operation_ids = 0
        self._asked_out: list[int] = []
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._loose: list[tuple[Operation, Sending]] = []
        self._hung: dict[asyncio.Future[Any], Any] = {}
        """What waits for ever, and what it is given when the faults stop."""
        self._sources: dict[str, ScriptedSource | None] = {}
        self._told: dict[int, FlowState] = {}
        """By socket: what it took last, and knows."""
        self._gone: list[FlowTarget] = []
        """Sockets that were taken out."""
        self._unwatched: set[SourceId] = set()
        """Their wait was cancelled."""
        self._is_calm = False
        self.stopping: asyncio.Task[None] | None = None
        self.is_stopped = False

    def _build(self) -> None:
        """The host's own wiring, with a look at each step."""
        setting, book = self.setting, self.book
        self.transport = ScriptedTransport()
        self.transport.on_start = self._on_start
        self.transport.before_call = self._before_call
        limits = setting.config.resolve(ProcessorFigures())
        with _watched_parts():
            parts = self.parts = HostParts(setting.config, limits, self.timers, self.transport, self)
        assert isinstance(parts.jobs, WatchedJobs)
        assert isinstance(parts.owners, WatchedOwners)
        assert isinstance(parts.moving, WatchedMoving)
        assert parts.pump is not None
        self.jobs, self.owners, self.moving, self.pump = parts.jobs, parts.owners, parts.moving, parts.pump
        parts.jobs.broken = book.broken
        parts.jobs._on_transition = self._turn_to
        parts.owners.book = parts.moving.book = book
        parts.turns._on_lost = self._on_lost
        parts.pump._ingress = _WatchedIngress(parts, book)
        parts.pump._limits = RotationLimits(bytes_max=1_000)
        self.gates = {place.gate: self.owners.new_gate() for place in setting.places if place.gate is not None}

    def _turn_to(self, transition: Transition) -> None:
        self.book.turn_to(transition)
        self.parts.flow.publish(transition)

    def _on_lost(self, record: Record, error: HostError) -> None:
        self.book.lost(record, error.kind)
        self.parts._on_lost(record, error)

    def _before_call(self, call: Call) -> None:
        if call.name == "take":
            with self._checking():
                assert self.jobs._reserved, f"permits_bounded: a record of {call.about} is taken without a permit"
            self._burn(1)
        elif call.name == "close":
            for source in self._sources.values():
                if source is not None:
                    self._discard(source)

    # `SpotTable`

    def why_not(self, spot: str) -> str:
        return f"there is no spot {spot!r}"

    def prepare(self, spot: str) -> HostErrorKind | None:
        place = self._place(spot)
        if place is None or self.stopping is not None or self._rng.random() < 0.5:
            return HostErrorKind.NOT_FOUND
        self._restore(place)
        return None

    def matching(self, pattern: str) -> Sequence[str]:
        return [place.key for number, place in enumerate(self.setting.places) if int(pattern) >> number & 1]

    def decode(self, record: Record) -> Cargo:
        return Cargo.read(record.payload)

    def gone(self, spot: str) -> None: ...

    def give_places(self) -> None: ...

    async def _stop(self) -> None:
        """As the specification has it: seal, stop receiving, finish what was accepted, end the rest."""
        parts = self.parts
        parts.life.seal()
        parts.life.move_to(HostState.DRAINING)
        self.pump.stop_receiving()
        parts.outbound.seal()
        self.moving.close()
        await parts.turns.stop(self.timers.now_ms() + SHUTDOWN_MS)
        for close in self._rng.sample([self.pump.close, self.jobs.close], 2):
            close()
        parts.outbound.close()
        await parts.flow.close(timeout_ms=100)
        await self.transport.close()
        parts.life.move_to(HostState.STOPPED)
        self.is_stopped = True

    # --- the world's course ---------------------------------------------------------------------------------------

    def start(self) -> None:
        self.timers.act(self._open)
        self.check()
        self.timers.after(self.faults_until_ms, lambda: None)
        for _ in range(self.setting.acts):
            at_ms = self._rng.randint(0, self._rng.choice((50, 500, self.faults_until_ms)))
            self.timers.after(at_ms, self._act)
        if self.setting.ends_early and self._stop_at_step is None:
            self.timers.after(self._rng.randint(0, self.faults_until_ms), self._begin_stop)

    def _open(self) -> None:
        for number, kind in enumerate(self.setting.sources):
            self._open_source(f"peer-{number}", kind)
        for place in self.setting.places:
            self._add_owner(place)
        for number in range(self.setting.sockets):
            self._add_socket(number)
        for _ in range(self._rng.randrange(3)):
            self._peer_sends()  # before anybody listens
        self.parts.life.move_to(HostState.SERVING)
        self.parts.turns.start()
        self.pump.start()

    def stop_faults(self) -> None:
        self.faults = Faults()
        self._is_calm = True
        self.transport.on_signal = lambda source: 1
        self.timers.after(0, self._release_all)

    def _release_all(self) -> None:
        for future, answer in list(self._hung.items()):
            if not future.done():
                future.set_result(answer)
        for source in sorted(self._unwatched):
            self.pump.look(source)
        self._unwatched.clear()

    def is_over(self) -> bool:
        if self._unacted or self.simulation.clock.now_ms() < self.faults_until_ms:
            return False
        if self.stopping is not None:
            return self.is_stopped and not asyncio.all_tasks(self.loop)
        waiting = self.jobs.in_use or self.jobs.waiters or len(self.parts.waiters) or len(self.parts.requests)
        held = any(self.moving.held(place.key) for place in self.setting.places)
        return not (
            waiting or held or self._tasks or self._hung or self.parts.outbound.operations or self.owners.active
        )

    def _begin_stop(self) -> None:
        if self.stopping is None:
            self.stopping = asyncio.ensure_future(self._stop())

    def _act(self) -> None:
        self._unacted -= 1
        rng, faults = self._rng, self.faults
        self._noise_signals()
        if rng.random() < 0.05:
            self.parts.board.reset_capacity_metrics()
        for chance, act in (
            (faults.closes, self._close_source),
            (faults.destroys, self._destroy),
            (faults.moves, self._move),
            (faults.setters, self._change_sockets),
            (faults.leaves, self._leave),
            (faults.jumps, lambda: self._burn(JUMP_MS_MAX)),
        ):
            if rng.random() < chance / 2:
                act()
        roll = rng.random()
        if roll < 0.6:
            self._peer_sends()
        elif roll < 0.85:
            stream = f"user{self._next('user')}"
            self._spawn(self._say(stream, HOPS_MAX, rng.choice(("send", "send", "request", "publish", "remote"))))
        else:
            self._submit_lifecycle()

    def _next(self, stream: str) -> int:
        self._numbers[stream] += 1
        return self._numbers[stream]

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.ensure_future(work)
        self._tasks[task] = None
        return task

    def _burn(self, ms_max: int) -> None:
        """Time goes by while nothing else can run."""
        if self._work.random() < self.faults.jumps:
            ms = self._work.randint(1, ms_max)
            self.book.jumped_ms += ms
            self.simulation.clock.advance(ms)

    def _leave(self) -> None:
        if self._tasks:
            self._rng.choice(list(self._tasks)).cancel()

    # --- peers ----------------------------------------------------------------------------------------------------

    def _open_source(self, name: str, kind: SourceKind) -> ScriptedSource:
        self._generations[name] += 1
        source = self._sources[name] = self.transport.add_source(name, kind)
        return source

    def _source(self) -> ScriptedSource | None:
        """One of them; a closed one comes back. None: the transport is closed."""
        if self.transport.closed:
            return None
        number = self._peer.randrange(len(self.setting.sources))
        name, kind = f"peer-{number}", self.setting.sources[number]
        source = self._sources.get(name)
        return source if source is not None and not source.closed else self._open_source(name, kind)

    def _close_source(self) -> None:
        source = self._source()
        if source is not None:
            self._discard(source)
            self._unwatched.discard(source.id)
            source.close()

    def _discard(self, source: ScriptedSource) -> None:
        """What it takes with it."""
        for item in source._fifo:
            if isinstance(item, Record):
                self.book.end(Cargo.peek(item.payload), _target_of(item), "discarded")

    def _noise_signals(self) -> None:
        if self._peer.random() >= self.faults.signals:
            return
        self.transport.on_signal = lambda source: self._peer.randint(1, 3)
        source = self._source()
        if source is None:
            return
        if self._peer.random() < 0.3:
            self.pump.cancel_wait(source.id)
            self._unwatched.add(source.id)
        else:
            self._unwatched.discard(source.id)
            source.signal()

    def _cargo(self, stream: str, kind: CargoKind, hops: int = 0) -> Cargo:
        return Cargo(stream, self._next(stream), hops, kind)

    def _record(self, source: ScriptedSource, kind: RecordKind, **fields: Any) -> Record:
        """Of one peer: each with an id of its own, and due."""
        rng = self._peer
        asks = kind is RecordKind.REQUEST
        kind_sent = CargoKind.REQUEST if asks else CargoKind.ONE_WAY
        cargo = self._cargo(f"{source.id}.{self._generations[source.id]}", kind_sent)
        payload = cargo.pack(rng.randrange(PADDING_BYTES_MAX), readable=rng.random() >= self.faults.unreadable)
        fields.setdefault("target", rng.choice([*self.setting.places]).key if rng.random() < 0.95 else "nobody")
        if asks:
            self._operation_ids += 1
            fields["operation_id"] = self._operation_ids
            fields["deadline_at_ms"] = rng.choice((None, self.timers.now_ms() + rng.randrange(500)))
        record = source.record(kind, fields.pop("target"), payload=payload, **fields)
        target = _target_of(record)
        self.book.expect(cargo, target)
        self._unwatched.discard(source.id)
        if record.operation_id and kind is not RecordKind.CONTROL:
            self.book.asked[source.id, record.operation_id] = (cargo.name, target)
        return record

    def _peer_sends(self) -> None:
        source = self._source()
        if source is None:
            return
        rng = self._peer
        if rng.random() < self.faults.malformed:
            fields: dict[str, Any] = {"target": ""}
            if rng.random() < 0.5:
                self._operation_ids += 1
                fields["operation_id"] = self._operation_ids
            source.push(self._record(source, RecordKind.MALFORMED, **fields))
        if rng.random() < self.faults.floods / 2 and source._make is None:
            source.endless(lambda number: self._record(source, RecordKind.ONE_WAY), rng.choice((10, 100)))
            return
        kind = rng.choice((RecordKind.ONE_WAY, RecordKind.ONE_WAY, RecordKind.REQUEST, *list(RecordKind)[2:4]))
        count = rng.choice((1, 1, 3)) if kind is not RecordKind.CONTROL else 1
        if kind is RecordKind.PUBLISH:
            mask = str(rng.getrandbits(len(self.setting.places)))
            source.push(*[self._record(source, kind, target=mask) for _ in range(count)])
        else:
            records = [self._record(source, kind) for _ in range(count)]
            if kind is RecordKind.REQUEST and rng.random() < self.faults.leaves:
                fields = {"message_type": CANCEL, "operation_id": records[-1].operation_id}
                records.append(self._record(source, RecordKind.CONTROL, **fields))
            source.push(*records)

    # --- the transport --------------------------------------------------------------------------------------------

    def _on_start(self, outgoing: Outgoing) -> str | Hold | None:
        rng, faults = self._peer, self.faults
        if outgoing.kind is OutgoingKind.REPLY:
            self.book.reply(outgoing)
        if outgoing.kind is OutgoingKind.REQUEST:
            self._answer_later(outgoing.operation_id)
        if rng.random() < faults.refused:
            return rng.choice(("not_found", "not_connected", "timeout", "terminated"))
        if rng.random() < faults.held:
            self._end_later(self.transport.started[-1])
            return HOLD
        return None

    def _end_later(self, started: Started) -> None:
        """It waits inside the transport, which takes it, or ends it at its deadline."""
        delay_ms, deadline_at_ms = self._peer.choice((0, 1, 300)), started.outgoing.deadline_at_ms
        if deadline_at_ms is None or self.timers.now_ms() + delay_ms < deadline_at_ms:
            self.timers.after(delay_ms, started.accept)
        else:
            self.timers.after(deadline_at_ms - self.timers.now_ms(), partial(started.refuse, "timeout"))

    def _answer_later(self, operation_id: int) -> None:
        rng = self._peer
        times = rng.choice((0, 1, 2)) if rng.random() < self.faults.unanswered else 1
        for _ in range(times):
            delay_ms = rng.choice((0, 10, 10_000 if rng.random() < self.faults.unanswered else 20))
            self.timers.after(delay_ms, partial(self._complete, operation_id))

    def _complete(self, operation_id: int) -> None:
        source = self._source()
        if source is not None:
            error = self._peer.choice(("", "", "unavailable", "nonsense"))
            source.complete(operation_id, b"done", error=error)

    # --- sockets --------------------------------------------------------------------------------------------------

    def _add_socket(self, number: int) -> None:
        target = self.transport.add_flow_target(f"socket-{number}")
        target.on_set = partial(self._set, target)
        self._spawn(self._register(target))

    async def _register(self, target: Any) -> None:
        try:
            await self.parts.flow.register(target)
        except HostError:
            pass  # it did not take its state: it is not told again

    async def _deregister(self, target: FlowTarget) -> None:
        await self.parts.flow.deregister(target)
        self._gone.append(target)

    def _set(self, target: FlowTarget, state: FlowState) -> FlowResult | Awaitable[FlowResult]:
        rng = self._peer
        with self._checking():
            is_gone = target in self._gone or self.is_stopped
            assert not is_gone, f"latest_state: {target.name} is told {state.name} after it had left"
            assert self._told.pop(id(target), None) is not state, f"latest_state: {target.name} is told it again"
        if rng.random() >= self.faults.setters:
            self._told[id(target)] = state
            return FlowResult.OK
        roll = rng.randrange(5)
        if roll == 0:
            raise OSError("gone")
        if roll == 1:
            return rng.choice((FlowResult.FAILED, FlowResult.INVALID_STATE, FlowResult.NOT_SUPPORTED))
        if roll == 2:
            permit = self.jobs.try_acquire()  # it calls back
            self.jobs.status()
            if permit is not None:
                permit.release()
            return FlowResult.OK
        if roll == 3:
            return self._hang(FlowResult.OK)
        return self._late(FlowResult.OK, rng.randrange(300))

    def _change_sockets(self) -> None:
        targets = self.transport.flow_targets()
        if targets and self._peer.random() < 0.5:
            target = self._peer.choice(targets)
            self.transport.remove_flow_target(target.name)
            self._spawn(self._deregister(target))
        elif len(targets) < 4:
            taken = {target.name for target in targets}
            self._add_socket(next(number for number in range(5) if f"socket-{number}" not in taken))

    def _hang(self, answer: Any) -> asyncio.Future[Any]:
        """Something that ends when the faults stop, or by its cancellation."""
        future = self.loop.create_future()
        if self._is_calm:
            future.set_result(answer)
            return future
        self._hung[future] = answer
        future.add_done_callback(lambda done: self._hung.pop(done, None))
        return future

    async def _late(self, answer: Any, delay_ms: int) -> Any:
        await self.timers.sleep(delay_ms)
        return answer

    # --- owners ---------------------------------------------------------------------------------------------------

    def _place(self, key: str) -> Place | None:
        return next((place for place in self.setting.places if place.key == key), None)

    def _add_owner(self, place: Place, condition: Condition = Condition.OPEN) -> Owner:
        gate = None if place.gate is None else self.gates[place.gate]
        return self.owners.add(place.key, self._handler(place), gate=gate, condition=condition)

    def _handler(self, place: Place) -> Callable[[Turn, Cargo], Any]:
        return lambda turn, cargo: self._turn(place.is_async, turn, cargo)

    def _destroy(self) -> None:
        place = self._rng.choice(self.setting.places)
        if self.owners.remove(place.key) and self._rng.random() < 0.8:
            self.timers.after(self._rng.choice((0, 50, 500)), partial(self._restore, place))

    def _restore(self, place: Place) -> None:
        if place.key in self.owners or self.stopping is not None:
            return
        condition = self._rng.choice((Condition.OPEN, Condition.CREATING, Condition.NOT_CONNECTED))
        self._add_owner(place, condition)
        if condition is not Condition.OPEN:
            self.timers.after(self._rng.choice((0, 30, 300)), partial(self.moving.open, place.key))

    def _move(self) -> None:
        rng = self._rng
        places = rng.sample(self.setting.places, min(len(self.setting.places), rng.choice((1, 1, 2))))
        self._spawn(self._move_all(places))

    async def _move_all(self, places: list[Place]) -> None:
        try:
            await self.parts.moves.move([place.key for place in places], _Unit(self, places))
        except HostError:
            pass  # the one is moved already, or gone

    def _submit_lifecycle(self) -> None:
        place = self._rng.choice(self.setting.places)
        for _ in range(self._rng.choice((1, 1, 10))):
            self._submit_callback(self._cargo(f"life-{place.key}", CargoKind.ONE_WAY), place)

    def _submit_callback(self, cargo: Cargo, place: Place) -> None:
        def ended(outcome: Any) -> None:
            if (cargo.name, place.key) not in self.book.fates:
                self.book.end(cargo, place.key, "dropped")
                with self._checking():
                    assert isinstance(outcome, HostError), f"first_terminal: {cargo.name} is done, and did not begin"

        run = partial(self._turn, place.is_async, cargo=cargo)
        callback = Callback(run, bytes=self._work.randrange(PADDING_BYTES_MAX), on_end=ended)
        if self.moving.submit(place.key, callback, Lane.LIFECYCLE) is None:
            self.book.expect(cargo, place.key)

    # --- what handlers do -----------------------------------------------------------------------------------------

    @contextmanager
    def _checking(self) -> Iterator[None]:
        try:
            yield
        except AssertionError as error:
            self.book.broken.append(str(error))
            raise

    def _turn(self, is_async: bool, turn: Turn, cargo: Cargo) -> Any:
        """The first instruction of every handler here."""
        rng, faults = self._work, self.faults
        self.book.start(turn._work, cargo, self.jobs)
        self.simulation.note((turn.owner, cargo.name, cargo.kind))
        with self._checking():
            assert turn.holds_gate, f"one_turn: {cargo.name} runs without its gate"
        self._burn(30)
        if rng.random() < faults.acquires:
            with self._checking():
                self._acquire()
        if rng.random() < faults.destroys / 4:
            self._destroy()
        if is_async or rng.random() < faults.waits:
            return self._run(turn, cargo)
        if rng.random() < faults.raises:
            raise ValueError("no")
        return cargo.name

    def _acquire(self) -> None:
        try:
            self.jobs.try_acquire()
        except HostError:
            return
        raise AssertionError("no_wait_under_gate: a permit in a turn")

    async def _run(self, turn: Turn, cargo: Cargo) -> str:
        rng, faults = self._work, self.faults
        try:
            if rng.random() < faults.waits:
                await self.timers.sleep(rng.choice((0, 1, 20, 200)))
            if rng.random() < faults.relays and cargo.hops < HOPS_MAX:
                await self._relay(turn, cargo)
            if rng.random() < faults.calls_itself:
                self._call_itself(turn, cargo)
            if rng.random() < faults.waits and turn.holds_gate and turn._work.owner.gate.may_yield:
                await turn.yield_while(self.timers.sleep(rng.choice((0, 5, 100))))
            if rng.random() < faults.strays and cargo.hops < HOPS_MAX:
                self._spawn(self._stray(cargo))
            if rng.random() < faults.hangs:
                await self._hang(None)
            if rng.random() < faults.cancels_itself:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            if rng.random() >= faults.stubborn:
                raise
            await self.timers.sleep(rng.choice((10, 3_000)))  # it goes on as if nothing had been said
        if rng.random() < faults.raises:
            raise ValueError("no")
        if cargo.kind is CargoKind.REQUEST and turn.record is not None and rng.random() < 0.2:
            await turn.reply("early")
        return cargo.name

    async def _relay(self, turn: Turn, cargo: Cargo) -> None:
        rng = self._work
        stream = f"{turn.owner}/{self._next(turn.owner)}"
        for _ in range(rng.randint(1, 3)):
            await self._say(
                stream, cargo.hops + 1, rng.choice(("send", "loose", "loose", "request", "publish", "remote"))
            )

    async def _stray(self, cargo: Cargo) -> None:
        stream = f"stray-{self._next('stray')}"
        await self.timers.sleep(self._work.choice((0, 50)))
        await self._say(stream, cargo.hops + 1, self._work.choice(("send", "request")))

    def _call_itself(self, turn: Turn, cargo: Cargo) -> None:
        with self._checking():
            was_forbidden = False
            held = turn.holds_gate
            try:
                self.parts.turns.forbid_waiting_for_itself(turn.owner)
            except HostError:
                was_forbidden = True
            # Removed, or made anew behind another gate: then it is not itself that it calls.
            is_here = self.owners.get(turn.owner) is turn._work.owner
            assert was_forbidden or not (held and is_here), f"one_turn: {cargo.name} may wait for itself"

    async def _say(self, stream: str, hops: int, how: str) -> None:
        """One operation of this host, seen to its end."""
        rng = self._work
        key = rng.choice(self.setting.places).key if rng.random() < 0.95 else "nobody"
        self.simulation.note((stream, how, key))
        match how:
            case "send" | "loose":
                operation, sending = self._send(self._cargo(stream, CargoKind.ONE_WAY, hops), key)
                if how == "send":
                    await self._see(operation, sending)
                else:
                    self._loose.append((operation, sending))
            case "publish":
                await self._publish(self._cargo(f"{stream}p", CargoKind.PUBLISH, hops))
            case "request":
                await self._request(self._cargo(f"{stream}q", CargoKind.REQUEST, hops), key)
            case _:
                await self._call_remote(self._cargo(f"{stream}r", CargoKind.REQUEST, hops))

    async def _see(self, operation: Operation, operation_end: Awaitable[Any]) -> None:
        try:
            await operation_end
        except HostError as error:
            self.book.finish(operation, error.kind.name)
        except asyncio.CancelledError:
            self.book.finish(operation, "cancelled")
            raise
        else:
            self.book.finish(operation, "done")

    def _send(self, cargo: Cargo, key: OwnerKey) -> tuple[Operation, Sending]:
        timeout_ms = min(self.setting.send_timeout_ms, self._work.choice((10, 1_000)))
        operation = self.book.begin(cargo, key, timeout_ms)
        payload = cargo.pack(self._work.randrange(PADDING_BYTES_MAX))
        record = Record(RecordKind.ONE_WAY, LOCAL, key, payload=payload)

        def submit(deadline_at_ms: int) -> HostErrorKind | None:
            refused = self.parts.submit(key, record)
            if refused is None:
                self.book.admit(operation)
            return refused

        family = self._work.choice((SendFamily.SPOT, SendFamily.CHANNEL))
        sending = self.parts.outbound.send(family, key, submit, timeout_ms=timeout_ms)
        if sending.state is SendingState.UNDER_WAY:
            self.book.wait(operation, sending)
        return operation, sending

    async def _publish(self, cargo: Cargo) -> None:
        def submit(key: OwnerKey, deadline_at_ms: int) -> HostErrorKind | None:
            record = Record(RecordKind.PUBLISH, LOCAL, key, payload=cargo.pack())
            refused = self.parts.submit(key, record)
            if refused is None:
                self.book.expect(cargo, key)
            return refused

        keys = [place.key for place in self.setting.places if self._work.random() < 0.5]
        operation = self.book.begin(cargo, "", self.setting.send_timeout_ms)
        operation.admitted = True
        await self._see(
            operation, self.parts.outbound.publish(SendFamily.MULTICAST, [partial(submit, key) for key in keys])
        )

    async def _request(self, cargo: Cargo, key: OwnerKey) -> None:
        try:
            self.parts.turns.forbid_waiting_for_itself(key)
        except HostError:
            return
        operation = self.book.begin(cargo, key, self.setting.request_timeout_ms)

        def submit(operation_id: int, deadline_at_ms: int) -> HostErrorKind | None:
            payload = cargo.pack(self._work.randrange(PADDING_BYTES_MAX))
            record = Record(
                RecordKind.REQUEST,
                LOCAL,
                key,
                payload=payload,
                operation_id=operation_id,
                deadline_at_ms=deadline_at_ms,
            )
            refused = self.parts.submit(key, record)
            if refused is None:
                self.book.admit(operation)
            return refused

        await self._see(operation, self.parts.outbound.request(key, submit))

    async def _call_remote(self, cargo: Cargo) -> None:
        operation = self.book.begin(cargo, "", self.setting.request_timeout_ms)
        is_request = self._work.random() < 0.6

        def submit(operation_id: int, deadline_at_ms: int) -> Awaitable[None]:
            kind = OutgoingKind.REQUEST if is_request else OutgoingKind.ONE_WAY
            self.book.admit(operation)
            return self.transport.start(
                Outgoing(kind, "there", payload=cargo.pack(), operation_id=operation_id, deadline_at_ms=deadline_at_ms)
            )

        if is_request:
            await self._see(operation, self.parts.outbound.request("there", submit))
        else:
            operation.deadline_at_ms = self.timers.now_ms() + self.setting.send_timeout_ms
            await self._see(operation, self.parts.outbound.send(SendFamily.MESH, "there", partial(submit, 0)))

    # --- checks ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        if self._stop_at_step is not None and self.simulation.steps >= self._stop_at_step and self.stopping is None:
            self.timers.act(self._begin_stop)
        assert not self.book.broken, self.book.broken[0]
        assert self.pump.failure is None, f"the pump failed: {self.pump.failure!r}"
        assert not self.noise, self.noise[0]
        self.parts.check_invariants()
        self.book.check_queued(self.jobs)
        self.book.check_pause(self.jobs.status())
        for owner in list(self.book.ledger):
            self.book.check_ledger(owner)
        self._check_settings()
        self._check_progress()
        self._collect()

    def _check_settings(self) -> None:
        """Each option configures something."""
        setting, parts = self.setting, self.parts
        assert self.jobs.limit == setting.jobs_max, f"permits_bounded: {self.jobs.limit} of {setting.jobs_max}"
        assert len(parts.requests) <= setting.requests_max, f"first_terminal: {len(parts.requests)} requests"
        for family, status in parts.waiters.status().items():
            assert status.waiting <= setting.slots, f"first_terminal: {status.waiting} sends of {family} wait"

    def _check_progress(self) -> None:
        """Whoever could go on has gone on: nothing is left to run once the loop has settled."""
        statistics = self.pump.statistics()
        kept = self.moving.status().permits
        assert self.jobs._reserved == kept, f"permit_once: {self.jobs._reserved} are reserved, {kept} by holds"
        assert statistics.granted == 0, f"oldest_first: {statistics.granted} have permits and do not go on"
        for key in self.parts.waiters._lines:
            assert not self._has_room(key), f"nobody waits for room that is there: {key}"
        if self.stopping is None:
            assert not self.owners.has_next, "ready_once: somebody is ready, and nobody runs"
            for source in self.transport._sources:
                head = self.transport.head_kind(source)
                assert head is not HeadKind.COMPLETION, f"a completion at the head of {source} is not taken"
                if head is HeadKind.ORDINARY and source not in self._unwatched:
                    in_line = self.pump._entries.get(source) in self.pump._line
                    assert in_line, f"oldest_first: a record at the head of {source}, which has no place in the line"

    def _has_room(self, key: Any) -> bool:
        """Whether the largest item there is would find room now."""
        owner = self.owners.get(key)
        if owner is None or owner.condition is not Condition.OPEN:
            return False
        lane, limits = owner.ledger.application, self.setting.limits
        largest = owner.ledger.charge(PADDING_BYTES_MAX + 100)
        return lane.items < limits.application_items_max and lane.bytes + largest <= limits.application_bytes_max

    def _collect(self) -> None:
        for task in [task for task in self._tasks if task.done()]:
            del self._tasks[task]
            if not task.cancelled():
                task.result()
        loose, self._loose = self._loose, []
        for operation, sending in loose:
            if sending.state is SendingState.UNDER_WAY:
                self._loose.append((operation, sending))
            else:
                error = sending._error
                self.book.finish(operation, "done" if error is None else error.kind.name)

    def check_end(self) -> None:
        if self.stopping is None:
            self._check_quiet()
        self.timers.act(self._begin_stop)
        while not self.is_stopped or asyncio.all_tasks(self.loop):
            assert self.simulation.step(), f"the host does not stop: {self.stopping}"
            self.check()
        assert self.stopping is not None
        self.stopping.result()
        self.check()
        self.book.check_end(self.parts.drops.counts[Dropped(OutgoingKind.REPLY, DropReason.BACKPRESSURE)])
        self.parts.assert_empty()
        assert not self.parts.flow._cells, "latest_state: sockets are left"
        gc.collect()
        assert not self.noise, self.noise[0]

    def _check_quiet(self) -> None:
        """No faults any more, and nothing under way."""
        for name, state in self.parts.flow.states().items():
            assert state in (None, self.jobs.pressure), f"latest_state: {name} was told {state}"
        assert self.jobs.pressure is FlowState.RUNNING, "hysteresis: paused, and nothing is in use"
        for owner in self.owners._by_key.values():
            assert owner.ledger.is_empty, f"one_charge: {owner.key} has {owner.ledger.application.items} items"

    def close(self) -> None:
        for _ in range(CANCELS_MAX):  # code may swallow its cancellation, and a failed world may have lost its tasks
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            with suppress(AssertionError):  # it spins
                self.loop.settle()
        self.loop.close()
        self._log.setLevel(self._log_level)


class _WatchedIngress(Ingress):
    def __init__(self, parts: HostParts, book: HostBook) -> None:
        super().__init__(parts)
        self._book = book

    def targets_of(self, record: Record) -> Sequence[str]:
        cargo = Cargo.peek(record.payload)
        self._book.end(cargo, "", "taken")
        targets = super().targets_of(record)
        for key in targets:
            self._book.expect(cargo, key)
        return targets

    def control(self, record: Record) -> None:
        self._book.end(Cargo.peek(record.payload), "", "control")
        super().control(record)

    def refused(self, record: Record, kind: HostErrorKind) -> None:
        target = "" if record.kind is RecordKind.MALFORMED else record.target
        self._book.end(Cargo.peek(record.payload), target, "refused")
        super().refused(record, kind)


@contextmanager
def _watched_parts() -> Iterator[None]:
    """The wiring builds its parts with the recorder mixed in, whatever kind they are: also one with a planted fault."""
    watches: dict[str, type] = {"JobQueue": WatchedJobs, "Owners": WatchedOwners, "Moving": WatchedMoving}
    before = {name: getattr(wiring, name) for name in watches}
    for name, watch in watches.items():
        setattr(wiring, name, type(watch.__name__, (watch, before[name]), {}))
    try:
        yield
    finally:
        for name, kind in before.items():
            setattr(wiring, name, kind)


class _Unit:
    """One move."""

    def __init__(self, world: HostWorld, places: list[Place]) -> None:
        self._world = world
        self._places = places

    async def dump(self) -> None:
        world = self._world
        if world._work.random() < world.faults.hangs:
            await world._hang(None)
        await world.timers.sleep(world._work.choice((0, 20, 300)))

    def load(self, state: None) -> None:
        if self._world._work.random() < self._world.faults.raises:
            raise HostError(HostErrorKind.REJECTED, "no")

    def cut_over(self, loaded: None) -> None:
        for place in self._places:
            owner = self._world.owners.get(place.key)
            assert owner is not None, "a moved owner is not there"
            owner.handler = self._world._handler(place)


def _target_of(record: Record) -> OwnerKey:
    """Whom one received record is for, as the book has it; a publish is for nobody until it is taken."""
    return record.target if record.kind in (RecordKind.ONE_WAY, RecordKind.REQUEST) else ""
