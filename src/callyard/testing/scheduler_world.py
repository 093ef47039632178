"""The scheduler's world: the real core, CreditWindow and ReorderBuffer among fake executors, links, builders, sinks.

`SchedulerWorld` plays the worker's actor and its adapter. Everything that may go wrong between them and an executor
does, as the seed draws it: see `Faults`. What is checked: the scheduler's invariants after each turn (sampled), that
the epilogue left nothing to settle, that core and adapter hold the same reservations, that credits stay within their
window, that what really runs keeps to `max_concurrency`, `exclusive` and X64, that no line is longer than it may be and
none stands still for long beside a free executor (X91); and in the end one result per index in
order, that results say what the executors' log says of attempts and effects, that equal calls have equal outputs, and
that nothing is left behind. Calls call others, to the depth that is allowed; some of them close rings. There may be
bundles, a named pool, and pools that keep tenants apart: what an executor is sent is of one placement.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import assert_never

import msgspec

from callyard.errors import ErrorKind
from callyard.ids import CallId, ExecutorId, TaskId
from callyard.scheduler import commands as c
from callyard.scheduler import events as e
from callyard.scheduler.batches import prepare_batch
from callyard.scheduler.calls import CallResult, FunctionTarget, StopReason
from callyard.scheduler.core import Scheduler
from callyard.scheduler.executors import ExecutorSnapshot
from callyard.scheduler.placement import DEFAULT_POOL, Placement, PoolName
from callyard.testing.executors import FakeExecutor, Frame, SideEffects
from callyard.testing.scheduler_checks import (
    check_core,
    check_end,
    check_line,
    check_nothing_waits_beside,
    check_what_runs,
    find_free,
)
from callyard.testing.scheduler_workload import FAR, Faults, Job, Offer, draw_config, draw_job, draw_script
from callyard.testing.simulation import Simulation

TICK_MS = 500
CANCEL_GRACE_MS = 250
STALL_MS = 3_000
HEARTBEAT_TIMEOUT_MS = 4_000


class _Link(msgspec.Struct, eq=False):
    """One executor as the adapter sees it. Frames keep their order in each direction, not between executors."""

    executor: FakeExecutor
    latest: ExecutorSnapshot
    pool: PoolName
    aside: bool = False
    """It ends its calls beside its slot, which another has taken."""
    served: Placement | None = None
    """Of the first call that was sent there."""
    attached: bool = False
    lost: bool = False
    """Its loss is under way."""
    inward_at_ms: int = 0
    outward_at_ms: int = 0
    refuses_until_ms: int = 0
    silent_until_ms: int = 0
    idle_ticks: int = 0
    reserved: dict[tuple[CallId, int], bool] = {}
    """Reservations by call and attempt; True: it drains."""


class SchedulerWorld:
    """See the module. `faults` may be given to try one thing alone."""

    def __init__(self, simulation: Simulation, faults: Faults | None = None) -> None:
        self.simulation = simulation
        self._now_ms = simulation.clock.now_ms
        self._rng = simulation.stream("world")
        self._latency = simulation.stream("latency")
        self._scripts = simulation.stream("scripts")
        rng = simulation.stream("setting")
        self.faults = Faults.draw(rng) if faults is None else faults
        self.faults_until_ms = rng.choice((2_000, 8_000, 30_000))
        self._contexts = rng.choice((1, 2, 8))
        self._slots = {DEFAULT_POOL: rng.randint(1, 4), FAR: rng.randint(1, 2)}
        self._latency_ms_max = rng.choice((1, 5, 40))
        self.offer = Offer.draw(rng)
        self._stranded_ticks: dict[Placement, int] = {}
        self.config = draw_config(rng)
        self.scheduler = Scheduler(self.config, simulation.stream("scheduler"))
        self.effects = SideEffects()
        self.targets: dict[CallId, FunctionTarget] = {}
        """Of every call that was ever dispatched."""
        self.tainted: set[tuple[CallId, int]] = set()
        """Attempts below which something began that must not run twice, unless their own word excuses them (X64)."""
        self._links: dict[ExecutorId, _Link] = {}
        self._spawned = 0
        self.jobs = [draw_job(number, self.offer, self.faults, rng) for number in range(rng.randint(1, 8))]
        self._looking = False
        self._sent_at_ms: dict[tuple[CallId, int], int] = {}
        self._asked_back: set[tuple[CallId, int]] = set()
        """Attempts that were recalled before they were sent."""
        self._free: set[ExecutorId] = set()
        """Executors that had nothing to run and could take calls at the last tick."""
        self._turns = 0
        self._checked_turn = 0

    # --- the world's course -----------------------------------------------------------------------------------

    def start(self) -> None:
        for pool in self.offer.pools:
            for _ in range(self._slots[pool]):
                self._spawn(pool)
        for job in self.jobs:
            self.simulation.after(self._rng.choice((0, 0, 300, 3_000)), partial(self._open, job))
        self.simulation.after(TICK_MS, self._tick)

    def stop_faults(self) -> None:
        self.faults = Faults()
        for link in self._links.values():
            link.refuses_until_ms = link.silent_until_ms = 0

    def is_over(self) -> bool:
        done = all(
            job.converged is not None and not (job.building or job.writing or len(job.reorder)) for job in self.jobs
        )
        return done and not any(link.reserved or link.lost for link in self._links.values())

    def _open(self, job: Job) -> None:
        failure = self.scheduler.commit_task(job.plan)
        self.simulation.note(("task", job.plan.task_id, failure))
        if failure is not None:
            assert failure.kind is ErrorKind.UNAVAILABLE
            self.jobs.remove(job)
            return
        if self._rng.random() < self.faults.stopped:
            for _ in range(self._rng.randint(1, 2)):
                reason = self._rng.choice(list(StopReason))
                stop = e.TaskStopped(job.plan.task_id, reason, cancel_running=self._rng.random() < 0.6)
                within_ms = self._rng.choice((20, 200, 3_000))
                self.simulation.after(self._rng.randint(0, within_ms), partial(self.post, stop))
        self._build(job)
        self._turn([])

    def _delay_ms(self) -> int:
        return self._latency.randint(0, self._latency_ms_max)

    def _later(self, action: Callable[[], None]) -> None:
        self.simulation.after(self._delay_ms(), action)

    # --- the actor --------------------------------------------------------------------------------------------

    def post(self, event: e.SchedulerEvent) -> None:
        """One turn of the actor with this event."""
        text = sorted(event.begun) if isinstance(event, e.ExecutorLost) else event
        self.simulation.note((type(event).__name__, text))
        self._turn(self.scheduler.handle(event, self._now_ms()))

    def _turn(self, commands: list[c.SchedulerCommand]) -> None:
        """Carry out, settle and decide until nothing moves."""
        self._turns += 1
        while True:
            for command in commands:
                self._carry_out(command)
            now_ms = self._now_ms()
            commands = self.scheduler.flush_dirty_tasks(now_ms) + self.scheduler.try_dispatch_next(now_ms)
            if not commands and self.scheduler.is_settled:
                break
        if self.scheduler.wants_marks and not self._looking:
            self._looking = True
            self.simulation.after(self._rng.choice((1, 5, 20)), self._look)

    def _carry_out(self, command: c.SchedulerCommand) -> None:
        self.simulation.note(command)
        match command:
            case c.BindCall():
                self._bind(command)
            case c.UnbindCall():
                link = self._links.get(command.executor_id)
                if link is not None:
                    link.reserved.pop((command.call_id, command.attempt_seq), None)
            case c.DispatchCall():
                self._note_dispatch(command)
                self._later(lambda: self._send(command))
            case c.ResumeParent():
                self._later(lambda: self._answer(command))
            case c.CancelCall():
                self._cancel(command)
            case c.ArmCallRetry():
                delay_ms = command.due_at_ms - self._now_ms()
                self.simulation.after(delay_ms, lambda: self.post(e.RetryDue(command.call_id)))
                if self._rng.random() < self.faults.repeated:  # a timer that nobody armed
                    self._later(lambda: self.post(e.RetryDue(command.call_id)))
            case c.BatchSettled():
                self._settle(command)
            case c.StopCallProduction():
                self._end_production(self._job(command.task_id))
            case c.ConvergeTaskCalls():
                self._converge(command)
            case c.CompleteCallFromCache():
                pass
            case _:
                assert_never(command)

    # --- the adapter: worker to executor ----------------------------------------------------------------------

    def _bind(self, command: c.BindCall) -> None:
        link = self._links[command.executor_id]
        if self._rng.random() < self.faults.bind_refused:
            answer: e.SchedulerEvent = e.CallRefused(command.call_id, command.attempt_seq, "no context")
        else:
            link.reserved[command.call_id, command.attempt_seq] = False
            answer = e.ExecutorBound(command.call_id)
            check_line(self.scheduler, command)
        self.simulation.note(answer)
        for more in self.scheduler.handle(answer, self._now_ms()):
            self._carry_out(more)

    def _send(self, command: c.DispatchCall) -> None:
        """The step that puts the frame into the outbox: alive and draining are checked here (X68)."""
        link = self._links.get(command.executor_id)
        key = (command.call_id, command.attempt_seq)
        if link is None or link.lost or link.reserved.get(key, True):
            self.post(e.CallRefused(*key, "not alive, or stopped"))
        elif self._now_ms() < link.refuses_until_ms:
            self.post(e.CallRefused(*key, "outbox full"))
        elif self._rng.random() < self.faults.rejected:
            self.post(e.DispatchRejected(*key, ErrorKind.DENIED, "outside the pinned view"))
        else:
            depth = command.call_id.count("/")
            script = draw_script(self.faults, self._scripts, command.target, command.args, depth, self.offer)
            self._note_placement(link, command)
            self._sent_at_ms[key] = self._now_ms()
            executor, below = link.executor, bool(command.parent_call_id)
            self._outward(
                link, lambda: executor.execute(command.call_id, command.attempt_seq, script, is_subcall=below)
            )
            if self._rng.random() < self.faults.given_back or key in self._asked_back:
                self._outward(link, lambda: executor.give_back(*key))

    def _note_dispatch(self, command: c.DispatchCall) -> None:
        """X64: no attempt follows one below which something unpromised was sent, but by the function's own word."""
        self.targets[command.call_id] = command.target
        earlier = {(command.call_id, seq) for seq in range(1, command.attempt_seq)}
        assert not earlier & self.tainted, f"{command.call_id}: its earlier attempt made a call that has no promise"
        if command.parent_call_id and not command.target.may_run_again:
            above = self.scheduler.find_call(command.parent_call_id)
            while above is not None:
                self.tainted.add((above.call_id, above.attempt_seq))
                above = above.parent

    def _note_placement(self, link: _Link, command: c.DispatchCall) -> None:
        """X92: an executor is sent calls of one bundle, one pool, and where tenants are kept apart of one tenant."""
        target = command.target
        tenant = self._job(command.task_id).plan.tenant if target.pool in self.offer.confined else None
        wanted = Placement(target.pool, target.digest, tenant)
        link.served = link.served or wanted
        assert link.pool == target.pool, f"placement_fits: {command.call_id} at {command.executor_id} of {link.pool}"
        assert link.served == wanted, f"placement_fits: {command.call_id} at {command.executor_id} of {link.served}"

    def _cancel(self, command: c.CancelCall) -> None:
        key = (command.call_id, command.attempt_seq)
        link = self._links[command.executor_id]
        if command.reason is None:
            if key in self._sent_at_ms:
                self._outward(link, lambda: link.executor.give_back(*key))
            else:  # an executor is sent things in the order in which they were commanded
                self._asked_back.add(key)
            return
        if key in link.reserved:
            link.reserved[key] = True
        self._outward(link, lambda: link.executor.cancel(*key))
        self.simulation.after(CANCEL_GRACE_MS, lambda: self._judge_cancel(link, key))

    def _judge_cancel(self, link: _Link, key: tuple[CallId, int]) -> None:
        if key in link.reserved and not link.lost:
            self._lose(link, "cancel_grace")

    def _outward(self, link: _Link, action: Callable[[], None]) -> None:
        link.outward_at_ms = max(link.outward_at_ms, self._now_ms() + self._delay_ms())
        self.simulation.after(link.outward_at_ms - self._now_ms(), action)

    # --- the adapter: executor to worker ----------------------------------------------------------------------

    def _inward(self, link: _Link, action: Callable[[], None]) -> None:
        link.inward_at_ms = max(link.inward_at_ms, self._now_ms() + self._delay_ms())
        self.simulation.after(link.inward_at_ms - self._now_ms(), action)

    def _receive(self, link: _Link, frame: Frame) -> None:
        self._inward(link, lambda: self._read(link, frame))
        if self._rng.random() < self.faults.repeated:
            delay_ms = self._rng.choice((0, 50, 5_000))
            self.simulation.after(delay_ms, lambda: self._inward(link, lambda: self._read(link, frame)))

    def _read(self, link: _Link, frame: Frame) -> None:
        if isinstance(frame, e.AttemptFailed) and frame.kind is ErrorKind.TRANSIENT and not frame.details:
            self.tainted.discard((frame.call_id, frame.attempt_seq))
        self.post(frame)
        if isinstance(frame, e.CallSuspended):
            self.simulation.after(self._latency.choice((0, 3, 200)), lambda: self._resume(link, frame))

    def _resume(self, link: _Link, frame: e.CallSuspended) -> None:
        key = (frame.call_id, frame.attempt_seq)
        if key not in link.reserved or link.lost:
            return
        if self._rng.random() < self.faults.resume_lost:
            self.post(e.ResumeSendFailed(*key))
            return
        self._outward(link, lambda: link.executor.resume(*key, frame.request_id))
        self._later(lambda: self.post(e.CallResumed(*key, frame.request_id)))  # may come after what follows it

    def _answer(self, command: c.ResumeParent) -> None:
        link = self._links.get(command.executor_id)
        key = (command.call_id, command.attempt_seq)
        if link is None or key not in link.reserved or link.lost:
            return
        if self._rng.random() < self.faults.resume_lost:
            self.post(e.ResumeSendFailed(*key))
            return
        executor = link.executor
        self._outward(link, lambda: executor.resume(*key, command.request_id, command.failure))
        self._later(lambda: self.post(e.CallResumed(*key, command.request_id)))

    # --- the pool ---------------------------------------------------------------------------------------------

    def _spawn(self, pool: PoolName) -> None:
        executor_id = ExecutorId(f"exec-{self._spawned}")
        self._spawned += 1
        executor = FakeExecutor(
            self.simulation,
            executor_id,
            contexts=self._contexts,
            effects=self.effects,
            emit=lambda frame: self._receive(link, frame),
            on_death=lambda: self._later(lambda: self._lose(link, "exited")),
        )
        link = self._links[executor_id] = _Link(executor, executor.heartbeat(), pool)
        self._later(lambda: self._beat(link))

    def _beat(self, link: _Link) -> None:
        """The executor's heartbeat thread."""
        if not link.executor.alive:
            return
        if self._now_ms() >= link.silent_until_ms:
            beat = link.executor.heartbeat()
            self._inward(link, lambda: self._take_beat(link, beat))
        self.simulation.after(TICK_MS, lambda: self._beat(link))

    def _take_beat(self, link: _Link, beat: ExecutorSnapshot) -> None:
        old, link.latest = link.latest, self._with_limits(beat)
        if link.lost:
            return
        if not link.attached:
            link.attached = True
            self.post(e.ExecutorAttached(link.latest, link.pool))
        elif self._rng.random() < self.faults.repeated:
            self.post(e.SnapshotUpdated(old))

    def _with_limits(self, beat: ExecutorSnapshot) -> ExecutorSnapshot:
        received_at_ms = self._now_ms()
        return msgspec.structs.replace(
            beat, received_at_ms=received_at_ms, stall_ms=STALL_MS, heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS
        )

    def _tick(self) -> None:
        rng, faults, now_ms = self._rng, self.faults, self._now_ms()
        for link in list(self._links.values()):
            if link.lost or not link.attached:
                continue
            self.post(e.SnapshotUpdated(link.latest))
            beat = link.latest
            if now_ms - beat.received_at_ms > HEARTBEAT_TIMEOUT_MS:
                self._lose(link, "heartbeat")
            elif beat.running and now_ms - beat.last_scheduler_active_at_ms > STALL_MS:
                self._lose(link, "wedge", link.executor.running_call())
            elif rng.random() < faults.crash:
                link.executor.die()
                self._later(partial(self._lose, link, "signalled"))
            elif not link.reserved and (link.aside or (link.idle_ticks > 4 and self.offer.is_shared)):
                self._lose(link, "recycled")  # it may be bound to what nobody asks for
            link.idle_ticks = 0 if link.reserved else link.idle_ticks + 1
            if rng.random() < faults.full_outbox:
                link.refuses_until_ms = now_ms + rng.choice((100, 3_000))
            if rng.random() < faults.silence:
                link.silent_until_ms = now_ms + rng.choice((1_000, 6_000))
        self._make_room()
        self._check_lines()
        if not self.is_over():
            self.simulation.after(TICK_MS, self._tick)

    def _check_lines(self) -> None:
        """X91: no call stands in a line for long while another executor stays free for it."""
        now_ms = self._now_ms()
        waiting = {
            key
            for link in self._links.values()
            for key, attempt in link.executor.held.items()
            if not (attempt.begun or attempt.is_subcall or link.lost) and now_ms - self._sent_at_ms[key] > 2 * TICK_MS
        }
        free = find_free(self.scheduler, now_ms)
        if self.config.queue_ahead_ms:
            check_nothing_waits_beside(self.scheduler, waiting, self._free & free)
        self._free = free

    def _look(self) -> None:
        """What the pages show, when the scheduler would see it."""
        self._looking = False
        marks = [
            e.ExecutorMarks(
                executor_id,
                tuple(attempt for attempt in link.executor.begun_marks() if attempt in link.reserved),
                link.executor.running_call() is not None,
            )
            for executor_id, link in self._links.items()
            if link.attached and not link.lost
        ]
        self.post(e.MarksRead(tuple(marks)))

    def _make_room(self) -> None:
        """For subcalls that no executor may ever take, one leaves its slot to another process."""
        stranded = self.scheduler.demand().stranded
        ticks = self._stranded_ticks
        self._stranded_ticks = {placement: ticks.get(placement, 0) + 1 for placement in stranded}
        for placement, count in self._stranded_ticks.items():
            here = [link for link in self._links.values() if link.pool == placement.pool and not link.aside]
            if count > 2 and here and all(link.attached and link.reserved and not link.lost for link in here):
                link = self._rng.choice(here)
                link.aside = True
                self.post(e.ExecutorSealed(link.executor.executor_id))
                self._spawn(link.pool)

    def _lose(self, link: _Link, cause: str, charged: CallId | None = None) -> None:
        """Lost means dead: killed and reaped, its frames read to the end, then told (X63)."""
        if link.lost:
            return
        link.lost = True
        link.executor.die()
        if link.attached and self._rng.random() < 0.5:
            self.post(e.ExecutorSealed(link.executor.executor_id))
        self._inward(link, lambda: self._tell_loss(link, cause, charged))

    def _tell_loss(self, link: _Link, cause: str, charged: CallId | None) -> None:
        executor_id = link.executor.executor_id
        current = dict(link.reserved.keys())  # the later of two attempts; the other only drains
        begun = frozenset(call_id for call_id, seq in link.executor.begun_marks() if current.get(call_id) == seq)
        del self._links[executor_id]
        lost = e.ExecutorLost(executor_id, cause, f"{executor_id}: {cause}", begun, charged)
        self.post(lost)
        if self._rng.random() < self.faults.repeated:
            self.post(lost)
        if not link.aside:
            self.simulation.after(self._rng.choice((0, 100)), partial(self._spawn, link.pool))

    # --- builders and sinks -----------------------------------------------------------------------------------

    def _job(self, task_id: TaskId) -> Job:
        return next(job for job in self.jobs if job.plan.task_id == task_id)

    def _build(self, job: Job) -> None:
        """Take a credit and build the next batch, or end production."""
        if job.production_ended or job.building or not job.window.is_open:
            return
        if job.next_row == len(job.rows):
            self._end_production(job)
            return
        if job.plan.streaming:
            job.window.take()
        job.building = True
        self._later(lambda: self._commit(job))

    def _commit(self, job: Job) -> None:
        job.building = False
        rows = job.rows[job.next_row : job.next_row + job.batch_rows]
        prepared = prepare_batch(job.plan, job.next_batch, job.next_row, rows)
        committed = self.scheduler.commit_batch(prepared)
        self.simulation.note(("batch", job.plan.task_id, job.next_batch, committed))
        if not committed:
            if job.plan.streaming:
                job.window.give_back()
            self._end_production(job)
            return
        job.next_batch += 1
        job.next_row += len(rows)
        self._turn([])
        self._build(job)

    def _end_production(self, job: Job) -> None:
        if not job.production_ended:
            job.production_ended = True
            self._later(lambda: self.post(e.ProductionEnded(job.plan.task_id)))

    def _settle(self, command: c.BatchSettled) -> None:
        job = self._job(command.task_id)
        if job.reorder.settle(command.batch_index, command.results, command.output_bytes):
            job.window.give_back()
            self._later(lambda: self._build(job))
        self._later(lambda: self._write(job))

    def _write(self, job: Job) -> None:
        """The sink: one batch at a time."""
        ready = None if job.writing else job.reorder.pop_ready()
        if ready is None:
            return
        job.writing = True
        batch_index, results, owes_credit = ready
        duration_ms = 2_000 if self._rng.random() < self.faults.slow_sink else self._delay_ms()
        self.simulation.after(duration_ms, lambda: self._taken(job, batch_index, list(results), owes_credit))

    def _taken(self, job: Job, batch_index: int, results: list[CallResult], owes_credit: bool) -> None:
        job.writing = False
        job.results += results
        if owes_credit:
            job.window.give_back()
        self.post(e.BatchTaken(job.plan.task_id, batch_index))
        if self._rng.random() < self.faults.repeated:
            self.post(e.BatchTaken(job.plan.task_id, batch_index))
        self._build(job)
        self._write(job)

    def _converge(self, command: c.ConvergeTaskCalls) -> None:
        job = self._job(command.task_id)
        assert job.converged is None, f"{command.task_id} converged twice"
        job.converged = command
        if not job.plan.streaming:
            job.results = command.results

    # --- checks -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        if self._checked_turn == self._turns:
            return
        self._checked_turn = self._turns
        for job in self.jobs:
            assert job.window.outstanding <= job.window.credits_max, f"credits: {job.plan.task_id}"
        if self._turns % 16 == 0 or self._turns < 16:
            self._check_core()

    def _check_core(self) -> None:
        reserved = {executor_id: link.reserved for executor_id, link in self._links.items()}
        check_core(self.scheduler, self.jobs, reserved, self._now_ms())
        check_what_runs([link.executor for link in self._links.values() if link.executor.alive], self.targets)

    def check_end(self) -> None:
        self._check_core()
        check_end(self.scheduler, self.jobs, self.effects)
