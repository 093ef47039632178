"""The pools: one executor process per slot, watched, and replaced when lost.

A lost executor is dead before anything is told of its calls: its group is killed and reaped, its socket read to the
end, then its begun-marks. Only then the scheduler hears of the loss. The slot is filled again at once, from a spare
where there is one; only starts that led to nothing are throttled. A process that will be replaced ends its calls beside
its slot, which is filled at once. Source: call-execution X37, X38, X44, X45, X47, X62, X63, X71, X72, X74, X92.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import platform
import resource
import secrets
import shutil
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

import callyard
from callyard.clock import Clock
from callyard.errors import ErrorKind, UsageError
from callyard.executor.archive import PART_BYTES, read_parts
from callyard.ids import CallId, Digest, ExecutorId, RequestId
from callyard.policy.restart import RestartThrottle
from callyard.policy.stall import StallLimits, compute_limits, is_stalled
from callyard.scheduler import events as e
from callyard.scheduler.executors import ExecutorSnapshot
from callyard.scheduler.placement import DEFAULT_POOL, Placement, PoolName
from callyard.scheduler.statistics import Demand
from callyard.wire.arena import GRAIN_BYTES
from callyard.wire.messages import (
    CODE_PART,
    PROTOCOL_VERSION,
    CallEvent,
    CallWaiting,
    Describe,
    Described,
    DescribedPayload,
    DescribePayload,
    HeartbeatAck,
    HeartbeatAckPayload,
    HeartbeatPayload,
    ResumeCall,
    ResumeCallPayload,
    WaitKind,
    WireError,
    WorkerMessage,
)
from callyard.worker.actor import Actor, IoAsked
from callyard.worker.arena import Arena
from callyard.worker.code_view import PATIENCE_MS, Standing, choose_replaced
from callyard.worker.config import PoolConfig, WorkerConfig
from callyard.worker.io.hub import IoHub
from callyard.worker.link import ExecutorLink, LinkEvent
from callyard.worker.marks import MarkPage
from callyard.worker.run_folder import RunFolder
from callyard.worker.spawner import ExecutorProcess, OutputCallback, Spawner, SpawnOrder, describe_exit, open_socketpair

_PLANNED: Final = frozenset({"shutdown", "recycled", "stopped", "refused", "attach_timeout"})
"""Ends of an executor that its calls have no part in."""
TICK_MS: Final = 500
LATE_TICK_MS: Final = 1_000
"""A tick later than this judges nobody: it was our own loop that stood still."""
LATE_CHECK_MS: Final = 50
"""The same for the end of a cancel's grace: the answer may have come by now, and wait to be read."""
LAST_OUTPUT_WAIT_S: Final = 0.5
LOOK_DELAY_S: Final = 0.005
"""Between a change and the look at who should serve what: a look costs what the placements that wait are, and a tenth
of what a start takes is soon enough."""


class SlotState(StrEnum):
    RUNNING = "RUNNING"
    WAITING = "WAITING"
    BACKOFF = "BACKOFF"
    STOPPED = "STOPPED"


@dataclass(slots=True, kw_only=True, eq=False)
class Executor:
    """One process with its link, in a slot or spare."""

    executor_id: ExecutorId
    pool: NamedPool
    process: ExecutorProcess
    link: ExecutorLink
    marks: MarkPage
    started_at_ms: int
    slot: Slot | None = None  # None: a spare, or it ends its calls beside the slots
    heartbeat: HeartbeatPayload | None = None  # None: not attached yet
    heartbeat_at_ms: int = 0
    posted_seq: int = 0  # of the last heartbeat the scheduler was told of
    limits: StallLimits | None = None
    cpu_ticks: int = 0
    stopped_ticks: int = 0  # ticks in a row that saw it in process state T
    losing: bool = False
    retiring: str = ""  # why it will be replaced once its calls are done
    in_place: bool = False  # its slot waits until they are
    aside: bool = False  # it has left its slot
    attached: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    token: str = ""
    loss_message: str = ""
    described: Digest | None = None  # the bundle that it loaded to describe it
    apart: bool = False  # started to describe a bundle, and never to run calls

    @property
    def memory_bytes(self) -> int:
        """Resident size by its last heartbeat, and what lies in its arena; 0: no heartbeat came."""
        return 0 if self.heartbeat is None else self.heartbeat.memory_bytes + self.link.arena_bytes


@dataclass(slots=True, eq=False)
class Slot:
    """A supervised place in a pool."""

    pool: NamedPool
    index: int
    throttle: RestartThrottle
    state: SlotState = SlotState.WAITING
    executor: Executor | None = None
    timer: asyncio.TimerHandle | None = None
    seated: int = 0  # executors that it has had


@dataclass(slots=True, kw_only=True, eq=False)
class NamedPool:
    """One pool: its settings, its slots and spares. The worker's own is named `default`."""

    name: PoolName
    config: WorkerConfig  # with what is its own
    own: PoolConfig | None  # None: the worker's
    spawner: Spawner
    slots: list[Slot] = field(default_factory=list)
    spares: list[Executor] = field(default_factory=list)
    ready_at_ms: int = 0  # when an executor last could take calls, or the pool started
    last_loss: str = ""
    unmet_since_ms: dict[Placement, int] = field(default_factory=dict)  # placements that no executor may serve now
    restarts: int = 0  # executors that took the place of another

    def environment_of(self, place: int) -> Mapping[str, str]:
        return {} if self.own is None else self.own.environment_of(place)

    def add_slot(self) -> Slot:
        slot = Slot(self, len(self.slots), RestartThrottle(self.config.restart_policy))
        self.slots.append(slot)
        return slot


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotView:
    """What `Worker.statistics` shows of a slot."""

    pool: str = DEFAULT_POOL
    index: int
    state: str
    executor_id: str
    pid: int
    inflight: int
    memory_bytes: int
    is_attached: bool = False  # it takes calls


CodePlace = tuple[Digest, Path, str]
"""A bundle: its digest, its folder here, and its module."""


class Pool:
    """Owns every executor process of a worker."""

    def __init__(
        self,
        config: WorkerConfig,
        spawners: Mapping[PoolName, Spawner],
        actor: Actor,
        clock: Clock,
        folder: RunFolder,
        on_output: OutputCallback,
        find_bundle: Callable[[Digest], tuple[Path, str] | None],
        io: IoHub,
        on_unavailable: Callable[[PoolName, str], None],
        environment: Mapping[str, str],
        shared_fd: int | None = None,
    ) -> None:
        """`spawners` by pool: there is one for the worker's own, and one for each named pool of the settings.
        `environment`: of every executor. `shared_fd`: what they read shared values from."""
        self._shared_fd = shared_fd
        self._config = config
        self._environment = environment
        self._actor = actor
        self._clock = clock
        self._folder = folder
        self._on_output = on_output
        self._io = io
        self._find_bundle = find_bundle
        """The folder and the module of a bundle that a task is allowed to run."""
        self._on_unavailable = on_unavailable
        self._loop = asyncio.get_running_loop()
        self._pools = {
            name: NamedPool(name=name, config=config.of_pool(name), own=config.pools.get(name), spawner=spawner)
            for name, spawner in spawners.items()
        }
        for pool in self._pools.values():
            for _ in range(pool.config.executors):
                pool.add_slot()
        self._executors: dict[ExecutorId, Executor] = {}
        """Every process that is not gone."""
        self._counts_calls = any(pool.config.recycle_after_calls for pool in self._pools.values())
        self._started = 0
        self._stopping = False
        self._losses: set[asyncio.Task[None]] = set()
        self._tick_timer: asyncio.TimerHandle | None = None
        self._tick_due_ms = 0
        self._last_loss = ""
        self._change = asyncio.Event()
        self._describing: dict[RequestId, asyncio.Future[DescribedPayload]] = {}
        self._listeners: dict[ExecutorId, asyncio.Server] = {}
        self._looking = False
        self.may_exchange: Callable[[], bool] = lambda: False
        self.find_code: Callable[[], CodePlace | None] = lambda: None
        self._preloads = False
        """Executors load the code before they take calls, the first ones too."""
        """What every executor runs, while that is one bundle."""
        """Whether there was more than one bundle, or tenant of a sandbox: else there is nothing to exchange."""

    # --- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        for pool in self._pools.values():
            pool.ready_at_ms = self._clock.now_ms()
        self._arm_tick()
        for slot in self._all_slots():
            await asyncio.shield(self._keep(self._fill(slot)))  # half a start could not be undone
        if not self._executors and not self._stopping:
            raise UsageError(f"executors do not start: {self._last_loss}")

    def _all_slots(self) -> list[Slot]:
        return [slot for pool in self._pools.values() for slot in pool.slots]

    async def wait_attached(self) -> Executor:
        """One executor of each pool has attached. Returns the first of the worker's own; raises UsageError when every
        start fails or the time is up."""
        own, *_ = [await self._wait_attached(pool) for pool in self._pools.values()]
        return own

    async def _wait_attached(self, pool: NamedPool) -> Executor:
        whose = "" if pool.own is None else f" of pool {pool.name!r}"
        deadline_s = self._loop.time() + self._config.start_timeout_ms / 1_000
        while True:
            self._check_not_stopping()
            for slot in pool.slots:
                if slot.executor is not None and slot.executor.attached.is_set() and not slot.executor.losing:
                    return slot.executor
            if any(slot.state is SlotState.BACKOFF for slot in pool.slots):
                raise UsageError(f"executors{whose} do not start: {pool.last_loss}")
            if (left := deadline_s - self._loop.time()) <= 0:
                raise UsageError(
                    f"no executor{whose} started within start_timeout_ms={self._config.start_timeout_ms}"
                    f"{': ' + pool.last_loss if pool.last_loss else ''}"
                )
            self._change.clear()
            try:
                async with asyncio.timeout(min(left, 1.0)):
                    await self._change.wait()
            except TimeoutError:
                continue

    def _check_not_stopping(self) -> None:
        if self._stopping:
            raise UsageError("the worker was closed while it started")

    async def stop(self) -> None:
        """Kill and reap every process. Calls still running have been stopped before, or are lost here."""
        self._stopping = True
        self._change.set()
        if self._tick_timer is not None:
            self._tick_timer.cancel()
        for slot in self._all_slots():
            slot.state = SlotState.STOPPED
            if slot.timer is not None:
                slot.timer.cancel()
        for executor in list(self._executors.values()):
            self.lose(executor, "shutdown", "the worker stopped")
        while self._losses:
            await asyncio.gather(*self._losses, return_exceptions=True)

    # --- filling slots ------------------------------------------------------------------------------------------

    async def _fill(self, slot: Slot) -> None:
        """Give the slot a spare, or a new process; then see that there are spares again."""
        if self._stopping or slot.executor is not None or slot.state is SlotState.STOPPED:
            return
        spare = self._take_spare(slot.pool)
        if spare is not None:
            self._seat(spare, slot)
            self._keep(self._prepare(spare))
            return
        try:
            await self._spawn(slot.pool, slot)
        except OSError as error:  # no descriptors, processes, memory or disk now: there may be later
            self._note_loss(slot.pool, f"an executor could not be started: {error}")
            self._fill_later(slot, made_progress=False)

    def _take_spare(self, pool: NamedPool) -> Executor | None:
        """A spare that is attached, whose place is filled again; None: there is none now."""
        ready = [spare for spare in pool.spares if spare.attached.is_set() and not spare.losing]
        if not ready:
            return None
        pool.spares.remove(ready[0])
        self._keep(self._fill_spares(pool))
        return ready[0]

    def _note_loss(self, pool: NamedPool, text: str) -> None:
        self._last_loss = pool.last_loss = text

    def _fill_later(self, slot: Slot, *, made_progress: bool) -> None:
        """At once, or after the delay that starts without progress have earned (X45)."""
        delay_ms, backing_off = slot.throttle.record_exit(self._clock.now_ms(), made_progress=made_progress)
        if delay_ms == 0:
            self._keep(self._fill(slot))
            return
        slot.state = SlotState.BACKOFF if backing_off else SlotState.WAITING
        slot.timer = self._loop.call_later(delay_ms / 1_000, lambda: self._keep(self._fill(slot)))
        self._change.set()

    async def _fill_spares(self, pool: NamedPool) -> None:
        """Spares start only once the slots have their processes: they must not slow the first calls down."""
        while (
            not self._stopping
            and len(pool.spares) < pool.config.spare_executors
            and all(slot.executor is not None and slot.executor.attached.is_set() for slot in pool.slots)
        ):
            try:
                await self._spawn(pool, None)
            except OSError:
                return  # no room for a spare; the next executor that attaches tries again

    async def _spawn(self, pool: NamedPool, slot: Slot | None, *, apart: bool = False) -> Executor:
        """Start a process for the slot, or as a spare. It has its place before anything can be awaited, so that its
        loss is never missed. Raises OSError, and leaves nothing behind, when there can be no process."""
        self._started += 1
        executor_id = ExecutorId(f"exec-{self._started}")
        with ExitStack() as undo:
            marks = MarkPage(self._folder.path / "marks" / executor_id, pool.config.mark_slots)
            undo.callback(marks.close)
            arena = self._open_arena(executor_id)
            if arena is not None:
                undo.callback(arena.close)
            link = ExecutorLink(
                executor_id,
                self,
                marks,
                self._clock,
                self._config.outbox_frames_max,
                self._config.outbox_bytes_max,
                arena,
            )
            if self._config.link_mode == "path":
                executor = self._spawn_on_path(executor_id, pool, marks, link, slot, apart)
                undo.pop_all()
                return executor
            ours, theirs = open_socketpair()
            undo.callback(ours.close)
            with theirs:
                order = self._order(executor_id, pool, slot, marks, link, theirs.fileno(), None, "")
                process = pool.spawner.spawn(order, self._on_output)
            undo.pop_all()
        executor = self._register(executor_id, pool, process, link, marks, "", slot, apart)
        await self._open(executor, ours)
        return executor

    def _open_arena(self, executor_id: ExecutorId) -> Arena | None:
        """None: the settings, or this process's limit on the size of files, allow none, and frames carry all."""
        size = self._config.arena_bytes_max
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if limit != resource.RLIM_INFINITY:
            size = min(size, limit)
        return Arena(size, self._folder.path, executor_id) if size >= 2 * GRAIN_BYTES else None

    def _seat(self, executor: Executor, slot: Slot) -> None:
        executor.slot = slot
        slot.executor = executor
        slot.state = SlotState.RUNNING
        slot.pool.restarts += slot.seated > 0
        slot.seated += 1

    def _order(
        self,
        executor_id: ExecutorId,
        pool: NamedPool,
        slot: Slot | None,
        marks: MarkPage,
        link: ExecutorLink,
        socket_fd: int | None,
        path: Path | None,
        token: str,
    ) -> SpawnOrder:
        return SpawnOrder(
            executor_id=executor_id,
            environment={**self._environment, **pool.environment_of(0 if slot is None else slot.index)},
            executor_max_inflight=pool.config.executor_max_inflight,
            executor_max_runnable=pool.config.executor_max_runnable,
            heartbeat_interval_ms=self._config.heartbeat_interval_ms,
            capture_locals=self._config.capture_locals,
            nice=self._config.executor_nice,
            mark_fd=marks.fd,
            arena_fd=None if link.arena is None else link.arena.fd,
            shared_fd=self._shared_fd,
            socket_fd=socket_fd,
            socket_path=path,
            token=token,
        )

    def _register(
        self,
        executor_id: ExecutorId,
        pool: NamedPool,
        process: ExecutorProcess,
        link: ExecutorLink,
        marks: MarkPage,
        token: str,
        slot: Slot | None,
        apart: bool,
    ) -> Executor:
        executor = Executor(
            executor_id=executor_id,
            pool=pool,
            process=process,
            link=link,
            marks=marks,
            started_at_ms=self._clock.now_ms(),
            token=token,
            apart=apart,
        )
        self._executors[executor_id] = executor
        if slot is not None:
            self._seat(executor, slot)
        elif not apart:
            pool.spares.append(executor)
        process.on_exit(lambda: self.lose(executor, "exited", ""))
        return executor

    def _spawn_on_path(
        self,
        executor_id: ExecutorId,
        pool: NamedPool,
        marks: MarkPage,
        link: ExecutorLink,
        slot: Slot | None,
        apart: bool,
    ) -> Executor:
        """The executor dials: a folder of its own (0700), the uid checked, a one-time token, one connection (X32)."""
        folder = self._folder.path / "links" / executor_id
        folder.mkdir(mode=0o700)
        path = folder / "link"
        token = secrets.token_hex(16)
        with ExitStack() as undo:
            listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listener.bind(str(path))
            listener.listen(8)
            listener.setblocking(False)
            order = self._order(executor_id, pool, slot, marks, link, None, path, token)
            process = pool.spawner.spawn(order, self._on_output)
            undo.pop_all()
        executor = self._register(executor_id, pool, process, link, marks, token, slot, apart)

        def accept() -> None:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            if executor.losing or link.is_connected or not _same_user(sock):
                sock.close()  # a second connection for a slot, or a stranger's
                return
            sock.setblocking(False)
            self._keep(self._open(executor, sock))

        self._loop.add_reader(listener, accept)

        async def close_listener() -> None:
            await executor.gone.wait()
            self._loop.remove_reader(listener)
            listener.close()
            shutil.rmtree(folder, ignore_errors=True)

        self._keep(close_listener())
        return executor

    async def _open(self, executor: Executor, sock: socket.socket) -> None:
        try:
            await executor.link.open(sock)
        except OSError as error:
            sock.close()
            self.lose(executor, "refused", f"its link could not be opened: {error}")

    def _keep(self, work: Awaitable[None]) -> asyncio.Task[None]:
        """Run beside the loop; `stop` waits for it."""
        aio_task = asyncio.ensure_future(work)
        assert isinstance(aio_task, asyncio.Task)
        self._losses.add(aio_task)
        aio_task.add_done_callback(self._finish_kept)
        return aio_task

    def _finish_kept(self, aio_task: asyncio.Task[None]) -> None:
        self._losses.discard(aio_task)
        if not aio_task.cancelled() and (error := aio_task.exception()) is not None:
            self._loop.call_exception_handler({"message": "the pool failed", "exception": error})

    # --- what links tell ----------------------------------------------------------------------------------------

    def on_events(self, link: ExecutorLink, events: list[LinkEvent]) -> None:
        self._actor.post_from(link, events)
        self.look_at_placements_soon()
        if self._counts_calls:
            executor = self._executors.get(link.executor_id)
            limit = 0 if executor is None else executor.pool.config.recycle_after_calls
            if executor is not None and 0 < limit <= link.finished_calls:
                self._recycle(executor, f"it ended {link.finished_calls} calls, recycle_after_calls={limit}")

    def on_heartbeat(self, link: ExecutorLink, heartbeat: HeartbeatPayload) -> None:
        executor = self._executors.get(link.executor_id)
        if executor is None:
            return
        first = executor.heartbeat is None
        if first and (refusal := self._check_first(executor, heartbeat)):
            self.lose(executor, "refused", refusal)
            return
        executor.heartbeat = heartbeat
        executor.heartbeat_at_ms = self._clock.now_ms()
        if link.send(HeartbeatAck(HeartbeatAckPayload(heartbeat.heartbeat_seq))):
            self._actor.touch(link)
        if first:
            executor.attached.set()
            self._keep(self._prepare(executor))
            self._change.set()
            self._keep(self._fill_spares(executor.pool))
        elif heartbeat.draining and not executor.retiring:
            self.retire(executor, heartbeat.draining)
        elif limit := self._outgrown(executor, heartbeat.memory_bytes):
            self._recycle(executor, f"it held {heartbeat.memory_bytes} bytes, {limit}")

    def _outgrown(self, executor: Executor, memory_bytes: int) -> str:
        """The setting for which it is replaced at that size; empty: none.

        Above the watermark no call comes to it (X8): without one nothing makes it smaller any more. If it never ended
        any, the next process would be as large.
        """
        config = executor.pool.config
        if 0 < config.recycle_above_rss < memory_bytes:
            return f"recycle_above_rss={config.recycle_above_rss}"
        is_used_up = executor.link.finished_calls and not executor.link.seats
        if is_used_up and 0 < config.executor_memory_high_watermark <= memory_bytes:
            return f"executor_memory_high_watermark={config.executor_memory_high_watermark}"
        return ""

    def _recycle(self, executor: Executor, why: str) -> None:
        """For code that leaks (X47): no fault of what runs there now."""
        if not (executor.retiring or executor.losing or executor.apart):
            self.retire(executor, why)

    def _check_first(self, executor: Executor, heartbeat: HeartbeatPayload) -> str:
        """Why an executor is refused, or nothing."""
        if heartbeat.executor_id != executor.executor_id:
            return f"its first heartbeat named {heartbeat.executor_id!r}"
        if executor.token and not hmac.compare_digest(executor.token, heartbeat.token):
            return "its first heartbeat did not carry the slot's token"
        if heartbeat.protocol != PROTOCOL_VERSION:
            return (
                f"it speaks protocol {heartbeat.protocol} (callyard {heartbeat.callyard_version}), this worker"
                f" {PROTOCOL_VERSION}; run: pip install callyard=={callyard.__version__}"
            )
        return ""

    async def _prepare(self, executor: Executor) -> None:
        """An attached executor in a slot takes calls, in place of another one once it has loaded the code: calls wait
        for it already, and one that is bound where the code still loads can neither begin nor be stopped in time."""
        slot = executor.slot
        if slot is not None and (slot.seated > 1 or self._preloads):
            await self._load(executor)
        self._hand_over(executor)

    async def _load(self, executor: Executor) -> None:
        place = self.find_code()
        if place is None or executor.described is not None:
            return
        try:
            await self.describe(executor, *place, only_load=True)
        except UsageError as error:  # it died, or takes long: its calls will tell
            self._note_loss(executor.pool, str(error))

    async def preload(self) -> None:
        """Have every executor load the code now, and those to come before they take calls."""
        self._preloads = True
        here = [executor for executor in self._executors.values() if executor.slot is not None and executor.posted_seq]
        await asyncio.gather(*(self._load(executor) for executor in here))

    def _hand_over(self, executor: Executor) -> None:
        """An attached executor in a slot takes calls from now on."""
        if executor.slot is None or executor.losing or executor.posted_seq:
            return
        self._actor.add_link(executor.link)
        executor.limits = self._limits(executor)
        snapshot = self._snapshot(executor)
        executor.posted_seq = snapshot.heartbeat_seq
        pool = executor.pool
        pool.ready_at_ms = self._clock.now_ms()
        self._actor.post(e.ExecutorAttached(snapshot, pool.name, pool.config.executor_memory_high_watermark))

    def on_waiting(self, link: ExecutorLink, message: CallWaiting, sidecar: bytes | None) -> None:
        """Answer what needs no scheduling; every wait gets an answer, else its call would hang (X78)."""
        payload = message.payload
        if payload.wait_kind == WaitKind.FUNCTION_CODE and payload.function_code is not None:
            digest = payload.function_code.digest
            # Only its own bundle: what runs in it may ask for another one's code.
            bound = self._actor.find_placement(link.executor_id)
            found = self._find_bundle(digest) if bound is not None and bound.digest == digest else None
            if found is not None:
                path, module = found
                shown = "" if self._sends_code(link) else str(path)
                result = msgspec.Raw(msgspec.json.encode({"path": shown, "module": module}))
                answer = ResumeCallPayload(WaitKind.FUNCTION_CODE, payload.attempt_seq, result)
                self._send_after_code(link, path, ResumeCall(message.call_id, message.request_id, answer))
                return
            error = WireError(ErrorKind.NOT_FOUND, f"no bundle {digest[:12]} for this executor")
        elif payload.wait_kind == WaitKind.IO:
            # An executor that does not keep up with its answers is given no more to read.
            link.when_room(partial(self._ask_io, link, message, sidecar))
            return
        else:
            error = WireError(ErrorKind.DENIED, f"this worker answers no wait of kind {payload.wait_kind!r}")
        kind = WaitKind(payload.wait_kind) if payload.wait_kind in list(WaitKind) else WaitKind.IO
        self._resume(link, message, kind, error=error)

    def _sends_code(self, link: ExecutorLink) -> bool:
        executor = self._executors.get(link.executor_id)
        return executor is not None and executor.pool.spawner.sends_code

    def _send_after_code(self, link: ExecutorLink, path: Path, last: WorkerMessage) -> None:
        """Send `last`, and before it the bundle in `path` where the executor cannot read that folder: part by part, the
        next one once the transport took the one before, so that the outbox holds one at most."""
        part_bytes = min(PART_BYTES, self._config.outbox_bytes_max // 2)
        parts = enumerate(read_parts(path, part_bytes) if self._sends_code(link) else ())

        def send_next() -> None:
            try:
                number, part = next(parts, (0, b""))
            except OSError as error:
                self.on_broken(link, "refused", f"its bundle could not be read: {error}")
                return
            if part:
                payload = ResumeCallPayload(WaitKind.FUNCTION_CODE, 0)
                message = ResumeCall(CallId(""), RequestId(f"{CODE_PART}{number}"), payload)
                link.send(message, send_next, part)
            else:
                link.send(last)
            self._actor.touch(link)

        send_next()

    def _resume(
        self,
        link: ExecutorLink,
        message: CallWaiting,
        kind: WaitKind,
        *,
        result: msgspec.Raw | None = None,
        error: WireError | None = None,
    ) -> None:
        """Answer a wait that the scheduler knows nothing of."""
        seq = message.payload.attempt_seq
        payload = ResumeCallPayload(kind, seq, error=error) if result is None else ResumeCallPayload(kind, seq, result)
        if link.send(ResumeCall(message.call_id, message.request_id, payload)):
            self._actor.touch(link)

    def _ask_io(self, link: ExecutorLink, message: CallWaiting, sidecar: bytes | None) -> None:
        """Have the hub perform a request of an attempt that holds a seat here (X42, X65)."""
        payload = message.payload
        assert payload.io is not None, message
        call_id, request_id, seq = message.call_id, message.request_id, payload.attempt_seq
        budget_ms = self._actor.begin_io(link, call_id, seq)
        if budget_ms is not None:  # else the attempt is over
            answer = IoAsked(self._actor, link, call_id, seq, request_id)
            self._io.submit(payload.task_id, call_id, seq, request_id, payload.io, sidecar, answer, budget_ms)

    def on_interrupted(self, link: ExecutorLink) -> None:
        """Half a transaction may be left in a connection, or a lock held: nobody else should find it."""
        executor = self._executors.get(link.executor_id)
        if executor is not None and executor.pool.config.after_interrupt == "recycle" and not executor.losing:
            self.retire(executor, "a call was interrupted", by_fault=True)

    def on_call_event(self, link: ExecutorLink, message: CallEvent) -> None:
        self._actor.tell_call_event(message)

    def on_described(self, link: ExecutorLink, message: Described) -> None:
        future = self._describing.pop(message.request_id, None)
        if future is not None and not future.done():
            future.set_result(message.payload)

    def takes_binary(self, call_id: CallId) -> bool:
        return self._actor.takes_binary(call_id)

    def on_broken(self, link: ExecutorLink, cause: str, message: str) -> None:
        executor = self._executors.get(link.executor_id)
        if executor is not None:
            self.lose(executor, cause, message)

    def on_cancel_sent(self, link: ExecutorLink) -> None:
        self._check_cancelled_in(link, self._config.cancel_grace_ms)

    def _check_cancelled_in(self, link: ExecutorLink, delay_ms: int) -> None:
        due_ms = self._clock.now_ms() + delay_ms + 1
        self._loop.call_later((delay_ms + 1) / 1_000, self._check_cancelled, link, due_ms)

    def _check_cancelled(self, link: ExecutorLink, due_ms: int) -> None:
        """No terminal frame within the grace: the process pays (D41)."""
        executor = self._executors.get(link.executor_id)
        if executor is None or not link.cancelled_at_ms:
            return
        oldest = min(link.cancelled_at_ms.values())
        left_ms = oldest + self._config.cancel_grace_ms - self._clock.now_ms()
        if left_ms > 0:
            self._check_cancelled_in(link, left_ms)
        elif self._clock.now_ms() - due_ms > LATE_CHECK_MS:
            self._check_cancelled_in(link, LATE_CHECK_MS)
        else:
            self.lose(executor, "cancel_grace", "it did not stop a cancelled call in time")

    # --- describing ---------------------------------------------------------------------------------------------

    async def describe(
        self,
        executor: Executor,
        digest: Digest,
        path: Path,
        module: str,
        *,
        only_load: bool = False,
        names: Sequence[str] = (),
    ) -> DescribedPayload:
        """Have an executor load a bundle and say what is in it (D6). Raises UsageError when it dies or is too slow.

        `names`: callables of its module that are wanted, declared or not."""
        request_id = RequestId(f"describe-{digest[:12]}-{executor.executor_id}")
        answer: asyncio.Future[DescribedPayload] = self._loop.create_future()
        self._describing[request_id] = answer
        executor.described = digest
        shown = "" if executor.pool.spawner.sends_code else str(path)
        wanted = Describe(request_id, DescribePayload(digest, shown, module, only_load, list(names)))
        self._send_after_code(executor.link, path, wanted)
        gone = asyncio.ensure_future(executor.gone.wait())
        try:
            timeout_s = self._config.start_timeout_ms / 1_000
            ends: set[asyncio.Future[Any]] = {answer, gone}
            await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            self._describing.pop(request_id, None)
        if answer.done():
            return answer.result()
        last = "\n".join(executor.process.tail)
        self._check_not_stopping()
        if executor.gone.is_set():
            raise UsageError(
                f"importing {module!r} ended its process: it {describe_exit(executor.process.returncode)}"
                f"{_indented(last)}\nThe module must be importable without ending the process."
            )
        raise UsageError(
            f"importing {module!r} took longer than start_timeout_ms={self._config.start_timeout_ms}{_indented(last)}\n"
            "Move slow work out of the module's top level, or raise it: --start-timeout 5m."
        )

    async def describe_apart(
        self, digest: Digest, path: Path, module: str, *, names: Sequence[str] = ()
    ) -> DescribedPayload:
        """The same in a process that serves nothing else, and ends with it. Raises UsageError."""
        self._check_not_stopping()
        pool = self._pools[DEFAULT_POOL]
        executor = self._take_spare(pool)
        if executor is not None:
            executor.apart = True
        else:
            try:
                executor = await self._spawn(pool, None, apart=True)
            except OSError as error:
                raise UsageError(f"no executor can be started to describe {module!r}: {error}") from error
        try:
            return await self.describe(executor, digest, path, module, names=names)
        finally:
            self.lose(executor, "recycled", "it described a bundle")

    # --- who serves what ----------------------------------------------------------------------------------------

    async def retire_bundle(self, digest: Digest) -> None:
        """Replace the executors that serve a bundle which nobody may call any more; returns when they are gone."""
        bound = self._actor.demand().bound
        serving = []
        for executor in self._executors.values():
            placement = bound.get(executor.executor_id)
            served = None if placement is None else placement.digest
            if digest in (executor.described, served) and not executor.apart:
                serving.append(executor)
        for executor in serving:
            self._give_way(executor, "its bundle went out of force")
        for executor in serving:
            await executor.gone.wait()

    def free_described(self) -> None:
        """Replace executors that loaded a bundle to describe it, and have run nothing of it: the scheduler takes them
        for bound to nothing. Call it before calls of a second bundle are posted."""
        bound = self._actor.demand().bound
        for executor in list(self._executors.values()):
            if executor.described is not None and not executor.apart and bound.get(executor.executor_id) is None:
                self._give_way(executor, "it described another bundle")

    def _give_way(self, executor: Executor, why: str) -> None:
        """Its slot is wanted for another placement: the pool keeps its size, so the slot waits for its calls."""
        if not executor.losing and not executor.retiring:
            executor.in_place = True
            self.retire(executor, why)

    def look_at_placements_soon(self) -> None:
        """A little later, see whether an executor must change what it serves (X92)."""
        if not self._looking and (self.may_exchange() or self._actor.has_strays):
            self._looking = True
            self._loop.call_later(LOOK_DELAY_S, self._look_at_placements)

    def _look_at_placements(self) -> None:
        self._looking = False
        if self._stopping:
            return
        for executor in list(self._executors.values()):
            self._replace_if_idle(executor)
        demand = self._actor.demand()
        for pool in self._pools.values():
            self._exchange(pool, demand)

    def _exchange(self, pool: NamedPool, demand: Demand) -> None:
        """Find an executor for each placement of this pool that has none."""
        now_ms = self._clock.now_ms()
        stranded = [placement for placement in demand.stranded if placement.pool == pool.name]
        wanted = {placement for placement in demand.unmet if placement.pool == pool.name}.union(stranded)
        since = pool.unmet_since_ms
        pool.unmet_since_ms = {placement: since.get(placement, now_ms) for placement in wanted}
        if not wanted:
            return
        standings: list[Standing] = []
        coming = free = 0
        for slot in pool.slots:
            seated = slot.executor
            if seated is None or seated.losing or seated.executor_id not in demand.bound:
                coming += seated is not None or slot.state is SlotState.RUNNING
                free += slot.state is SlotState.RUNNING
            elif seated.retiring:
                coming += 1
            else:
                placement = demand.bound[seated.executor_id]
                free += placement is None
                standings.append(Standing(seated.executor_id, placement, len(seated.link.seats)))
        waited_ms = {placement: now_ms - at_ms for placement, at_ms in pool.unmet_since_ms.items()}
        for executor_id in choose_replaced(standings, waited_ms, coming, frozenset(stranded)):
            self._give_way(self._executors[executor_id], "calls of another placement wait")
            free += not self._executors[executor_id].link.seats
        for placement in stranded:
            if free == 0 and waited_ms[placement] >= PATIENCE_MS:
                self._make_room(pool)
            free = max(0, free - 1)

    def _make_room(self, pool: NamedPool) -> None:
        """A slot for subcalls that no executor may ever take: what holds them all may wait for these subcalls."""
        seated = [slot.executor for slot in pool.slots if slot.executor is not None and not slot.executor.losing]
        if seated:
            executor = min(seated, key=lambda one: (not one.retiring, len(one.link.seats), one.executor_id))
            if not executor.retiring:
                executor.retiring = "subcalls of another placement wait"
                self._actor.post(e.ExecutorSealed(executor.executor_id))
            self._step_aside(executor)

    # --- losing -------------------------------------------------------------------------------------------------

    def retire(self, executor: Executor, why: str, *, by_fault: bool = False) -> None:
        """Take no more calls; replace it now, and let it end those it holds beside its slot."""
        executor.retiring = why
        self._actor.post(e.ExecutorSealed(executor.executor_id, by_fault))
        self._replace_if_idle(executor)

    def _replace_if_idle(self, executor: Executor) -> None:
        if not executor.retiring or executor.losing:
            return
        if not executor.link.seats:
            self.lose(executor, "recycled", f"replaced after {executor.retiring}")
        elif executor.slot is not None and not executor.in_place:
            pool = executor.pool
            beside = sum(other.aside and other.pool is pool for other in self._executors.values())
            if beside < len(pool.slots):  # else its slot waits, so that long calls do not pile up processes
                self._step_aside(executor)

    def _step_aside(self, executor: Executor) -> None:
        """Leave the slot to another process, and end here what is under way."""
        slot = executor.slot
        assert slot is not None
        executor.slot = slot.executor = None
        executor.aside = True
        self._keep(self._fill(slot))

    def lose_by_id(self, executor_id: ExecutorId, cause: str, message: str) -> None:
        executor = self._executors.get(executor_id)
        if executor is not None:
            self.lose(executor, cause, message)

    def lose(
        self,
        executor: Executor,
        cause: str,
        message: str,
        charged: CallId | None = None,
    ) -> None:
        """Begin the end of an executor. A second time changes nothing."""
        if executor.losing:
            return
        executor.losing = True
        if cause == "eof" and executor.process.is_exiting():
            cause = "exited"
        self._actor.post(e.ExecutorSealed(executor.executor_id, cause not in _PLANNED))
        executor.link.seal()
        executor.process.kill()
        self._keep(self._bury(executor, cause, message, charged))

    async def _bury(self, executor: Executor, cause: str, message: str, charged: CallId | None) -> None:
        process, link = executor.process, executor.link
        await process.wait_exited()
        await link.read_to_end()
        begun = link.begun_calls()
        self._actor.note_begun(begun)
        if cause in ("eof", "exited"):
            await process.wait_output_ended(LAST_OUTPUT_WAIT_S)
        executor.loss_message = self._describe_loss(executor, cause, message)
        if executor.posted_seq:
            self._actor.post(self._loss_event(executor, cause, begun, charged))
            # The link stays known until the scheduler heard of the loss: seats are released through it.
        self._actor.remove_link(link)
        for call_id, attempt_seq in link.io_attempts:
            self._io.cancel_call(call_id, attempt_seq)
        link.io_attempts.clear()
        self._forget(executor, cause)

    def _describe_loss(self, executor: Executor, cause: str, message: str) -> str:
        process = executor.process
        text = f"{executor.executor_id} {describe_exit(process.returncode)}" if cause == "exited" else message
        if not executor.posted_seq and process.tail:  # it died before it could take calls: the lines say why
            text += _indented("\n".join(process.tail))
        return text

    def _loss_event(
        self, executor: Executor, cause: str, begun: frozenset[CallId], charged: CallId | None
    ) -> e.ExecutorLost:
        code = executor.process.returncode
        details: dict[str, Any] = {}
        if cause == "exited" and code is not None:
            cause = "exited" if code >= 0 else "signal"
            details = {"exit_code": code} if code >= 0 else {"signal": -code}
        return e.ExecutorLost(
            executor_id=executor.executor_id,
            cause=cause,
            message=executor.loss_message,
            begun=begun,
            charged=charged,
            details=details,
        )

    def _forget(self, executor: Executor, cause: str) -> None:
        executor.marks.close()
        executor.link.close_arena()
        del self._executors[executor.executor_id]
        executor.gone.set()
        self._change.set()
        if executor in executor.pool.spares:
            executor.pool.spares.remove(executor)
        if cause not in ("shutdown", "recycled"):
            self._note_loss(executor.pool, executor.loss_message)
        slot = executor.slot
        if slot is None or self._stopping or slot.state is SlotState.STOPPED:
            return
        slot.executor = None
        asked_for = cause not in ("exited", "eof", "refused", "attach_timeout")
        progress = asked_for or (executor.attached.is_set() and executor.link.finished_calls > 0)
        self._fill_later(slot, made_progress=progress)

    # --- the tick -----------------------------------------------------------------------------------------------

    def _arm_tick(self) -> None:
        self._tick_due_ms = self._clock.now_ms() + TICK_MS
        self._tick_timer = self._loop.call_later(TICK_MS / 1_000, self.tick)

    def tick(self) -> None:
        """Every 500 ms: heartbeats to the scheduler, then judge who is wedged, silent, stopped or not reading (X37)."""
        if self._tick_timer is not None:
            self._tick_timer.cancel()
        now_ms = self._clock.now_ms()
        judge = now_ms - self._tick_due_ms <= LATE_TICK_MS
        for pool in self._pools.values():
            self._fit_slots(pool)
        for executor in list(self._executors.values()):
            if executor.losing:
                continue
            if executor.heartbeat is not None:
                executor.limits = self._limits(executor)
                if executor.posted_seq and executor.heartbeat.heartbeat_seq > executor.posted_seq:
                    executor.posted_seq = executor.heartbeat.heartbeat_seq
                    self._actor.post(e.SnapshotUpdated(self._snapshot(executor)))
                self._replace_if_idle(executor)
            if judge:
                self._judge(executor, now_ms)
        for pool in self._pools.values():
            self._judge_pool(pool, now_ms)
        self.look_at_placements_soon()
        self._arm_tick()

    def _fit_slots(self, pool: NamedPool) -> None:
        """While exclusive calls wait there are more slots, up to `executors_max`; idle ones go again (X90)."""
        waiting = self._actor.exclusive_waiting(pool.name)
        least = pool.config.executors
        room = pool.config.slots_max - len(pool.slots)
        for _ in range(min(waiting, room)):
            self._keep(self._fill(pool.add_slot()))
        if waiting == 0 and len(pool.slots) > least:
            last = pool.slots[-1]
            if last.executor is None or not (last.executor.link.seats or last.executor.losing):
                pool.slots.pop()
                self._leave_slot(last)

    def _leave_slot(self, slot: Slot) -> None:
        slot.state = SlotState.STOPPED
        if slot.timer is not None:
            slot.timer.cancel()
        if slot.executor is not None:
            self.lose(slot.executor, "recycled", "no exclusive call needs it any more")

    def _limits(self, executor: Executor) -> StallLimits:
        largest, unlimited = executor.link.largest_begun_budget_ms()
        return compute_limits(
            self._config.stall_timeout_ms, self._config.silence_timeout_ms, largest, unlimited=unlimited
        )

    def _judge(self, executor: Executor, now_ms: int) -> None:
        """Kill what is wedged, silent, stopped, not reading, or never attached (X37, X38, X68, X71)."""
        heartbeat, limits = executor.heartbeat, executor.limits
        executor.stopped_ticks = executor.stopped_ticks + 1 if executor.process.is_stopped() else 0
        if executor.stopped_ticks >= 2:
            self.lose(executor, "stopped", f"{executor.executor_id} was stopped by a signal")
            return
        if heartbeat is None or limits is None:
            if now_ms - executor.started_at_ms > self._config.attach_timeout_ms:
                limit = f"attach_timeout_ms={self._config.attach_timeout_ms}"
                self.lose(executor, "attach_timeout", f"{executor.executor_id} did not attach within {limit}")
            return
        cpu_ticks = executor.process.cpu_ticks()
        cpu_rises, executor.cpu_ticks = cpu_ticks > executor.cpu_ticks, cpu_ticks
        silent_ms = now_ms - executor.heartbeat_at_ms
        blocked_at_ms = executor.link.write_blocked_since_ms
        if silent_ms > limits.heartbeat_ms and not (limits.heartbeat_needs_idle_cpu and cpu_rises):
            message = f"{executor.executor_id} sent no heartbeat for {silent_ms} ms"
            self.lose(executor, "heartbeat", message, self._find_running(executor, heartbeat))
        elif is_stalled(
            limits.stall_ms, bool(heartbeat.running_call_id), heartbeat.last_scheduler_active_at_ms, now_ms
        ):
            stalled_ms = now_ms - heartbeat.last_scheduler_active_at_ms
            message = f"{executor.executor_id} was blocked for {stalled_ms} ms by code that cannot be interrupted"
            self.lose(executor, "wedge", message, self._find_running(executor, heartbeat))
        elif blocked_at_ms is not None and now_ms - blocked_at_ms > limits.heartbeat_ms:
            message = f"{executor.executor_id} read nothing for {now_ms - blocked_at_ms} ms"
            self.lose(executor, "not_reading", message)

    def _find_running(self, executor: Executor, heartbeat: HeartbeatPayload) -> CallId | None:
        """Whose code blocks a process (X38). Its page is newer than the last heartbeat: none leaves while C code holds
        the GIL."""
        return executor.link.running_call() or heartbeat.running_call_id or None

    def _judge_pool(self, pool: NamedPool, now_ms: int) -> None:
        """With no executor for too long, calls that wait for one end `unavailable` with the reason (X71).

        One that loads the code has its time for that, but is no executor yet: it may die of it each time anew.
        """
        here = [slot.executor for slot in pool.slots if slot.executor is not None]
        loading_ms = self._config.start_timeout_ms if any(executor.attached.is_set() for executor in here) else 0
        if any(executor.posted_seq for executor in here):
            pool.ready_at_ms = now_ms
        elif now_ms - pool.ready_at_ms > self._config.no_executor_timeout_ms + loading_ms:
            whose = "" if pool.own is None else f" of pool {pool.name!r}"
            self._on_unavailable(
                pool.name,
                f"no executor{whose} for no_executor_timeout_ms={self._config.no_executor_timeout_ms}; the last one:"
                f" {pool.last_loss or 'did not start'}",
            )

    def _snapshot(self, executor: Executor) -> ExecutorSnapshot:
        heartbeat, limits = executor.heartbeat, executor.limits
        assert heartbeat is not None
        assert limits is not None
        return ExecutorSnapshot(
            executor_id=executor.executor_id,
            heartbeat_seq=heartbeat.heartbeat_seq,
            received_at_ms=executor.heartbeat_at_ms,
            runnable_count=heartbeat.runnable_count,
            inflight_count=heartbeat.inflight_count,
            available_contexts=heartbeat.available_contexts,
            memory_bytes=executor.memory_bytes,
            running=bool(heartbeat.running_call_id),
            last_scheduler_active_at_ms=heartbeat.last_scheduler_active_at_ms,
            wants_replacement=bool(heartbeat.draining),
            stall_ms=limits.stall_ms,
            heartbeat_timeout_ms=None if limits.heartbeat_needs_idle_cpu else limits.heartbeat_ms,
        )

    # --- looking ------------------------------------------------------------------------------------------------

    @property
    def last_loss(self) -> str:
        """How the last executor ended that ended by itself; empty: none did."""
        return self._last_loss

    def begun(self) -> list[tuple[CallId, ExecutorId]]:
        """Calls that have begun and not ended, the one sent first first."""
        found = [
            (number, call_id, executor.executor_id)
            for executor in self._executors.values()
            if not executor.losing
            for number, call_id in executor.link.begun_numbers().items()
        ]
        return [(call_id, executor_id) for _, call_id, executor_id in sorted(found)]

    def restarts(self) -> dict[str, int]:
        """Executors that took the place of another, by pool."""
        return {str(pool.name): pool.restarts for pool in self._pools.values()}

    def slots(self) -> list[SlotView]:
        views = []
        for slot in self._all_slots():
            executor = slot.executor
            heartbeat = executor.heartbeat if executor is not None else None
            views.append(
                SlotView(
                    pool=slot.pool.name,
                    index=slot.index,
                    state=slot.state.value,
                    executor_id=executor.executor_id if executor is not None else "",
                    pid=executor.process.pid if executor is not None else 0,
                    inflight=len(executor.link.seats) if executor is not None else 0,
                    memory_bytes=executor.memory_bytes if executor is not None else 0,
                    is_attached=heartbeat is not None and executor is not None and not executor.losing,
                )
            )
        return views


def _same_user(sock: socket.socket) -> bool:
    """Whether the peer runs as our own user; where the system cannot say, the folder's mode has to do."""
    if platform.system() != "Linux":
        return True
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _pid, uid, _gid = struct.unpack("3i", data)
    return bool(uid == os.getuid())


def _indented(text: str) -> str:
    return "".join(f"\n    {line}" for line in text.splitlines()) if text else ""
