"""An executor process in fake time: one thread, a few contexts, begun-marks, and a log of what really happened.

Root calls share its contexts; a subcall always finds one. A root call that finds none is given back, as by a real one.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from callyard.errors import CallFailure, ErrorKind, Outcome
from callyard.ids import CallId, ExecutorId, RequestId
from callyard.scheduler.calls import FunctionTarget
from callyard.scheduler.events import AttemptFailed, CallCompleted, CallSuspended, SubcallRequested
from callyard.scheduler.executors import ExecutorSnapshot
from callyard.testing.simulation import Simulation

Frame = CallCompleted | AttemptFailed | CallSuspended | SubcallRequested


class Ask(msgspec.Struct, frozen=True):
    """One subcall that a script makes."""

    target: FunctionTarget | None
    args: bytes
    granted_budget_ms: int = 0
    spread: bool = False


class Script(msgspec.Struct, frozen=True):
    """What one attempt does: stretches of running, with requests to wait for between them, and an end."""

    stretches_ms: tuple[int, ...] = (1,)
    """Running time of each stretch; after each but the last it waits for `requests` answers, and those of `asks`."""
    requests: int = 1
    asks: tuple[Ask, ...] = ()
    hands_on: bool = False
    """A subcall's failure is its own."""
    idempotent: bool = False
    output: bytes | None = b"null"
    """The result; None: it fails with `kind`."""
    kind: ErrorKind = ErrorKind.INTERNAL
    outcome: Outcome | None = None
    hangs: bool = False
    """Its last stretch never ends: only the death of the process ends it."""
    dies: bool = False
    """It takes its process down at the end of its last stretch."""
    ignores_cancel: bool = False

    @property
    def never_begins(self) -> bool:
        """Its arguments do not fit: no user code runs."""
        return self.output is None and self.kind is ErrorKind.SCHEMA

    @property
    def has_effect(self) -> bool:
        """`transient` says that nothing was done."""
        return not (self.never_begins or (self.output is None and self.kind is ErrorKind.TRANSIENT))


class SideEffects:
    """What really ran, by call, over all executors: the truth that results are held against."""

    def __init__(self) -> None:
        self.begun: Counter[CallId] = Counter()
        self.effects: Counter[CallId] = Counter()


class Attempt(msgspec.Struct, eq=False):
    """One attempt that an executor holds."""

    call_id: CallId
    attempt_seq: int
    script: Script
    is_subcall: bool = False
    stretch: int = 0
    begun: bool = False
    open_requests: set[RequestId] = set()
    failed: CallFailure | None = None
    """Of the first subcall of it that failed."""


class FakeExecutor:
    """Runs scripts one at a time and emits frames, in order.

    `emit` takes each frame; `on_death` is called when a script takes the process down. A dead executor does nothing.
    """

    def __init__(
        self,
        simulation: Simulation,
        executor_id: ExecutorId,
        *,
        contexts: int,
        effects: SideEffects,
        emit: Callable[[Frame], None],
        on_death: Callable[[], None],
    ) -> None:
        self.executor_id = executor_id
        self.alive = True
        self.contexts = contexts
        self._simulation = simulation
        self._effects = effects
        self._emit = emit
        self._on_death = on_death
        self.held: dict[tuple[CallId, int], Attempt] = {}
        self._runnable: deque[Attempt] = deque()
        self._running: Attempt | None = None
        self._active_at_ms = simulation.clock.now_ms()
        self._heartbeats = 0

    # --- what the worker sends --------------------------------------------------------------------------------

    def execute(self, call_id: CallId, attempt_seq: int, script: Script, *, is_subcall: bool = False) -> None:
        if not self.alive:
            return
        assert len(script.stretches_ms) == 1 or not script.never_begins, "what never begins asks for nothing"
        assert (call_id, attempt_seq) not in self.held, f"{call_id} attempt {attempt_seq} executed twice"
        attempt = Attempt(call_id, attempt_seq, script, is_subcall)
        if not is_subcall and self.root_count == self.contexts:
            self._emit_recalled(attempt)
            return
        self.held[call_id, attempt_seq] = attempt
        self._runnable.append(attempt)
        self._turn()

    def resume(
        self, call_id: CallId, attempt_seq: int, request_id: RequestId, failure: CallFailure | None = None
    ) -> None:
        attempt = self.held.get((call_id, attempt_seq))
        if not self.alive or attempt is None or request_id not in attempt.open_requests:
            return
        attempt.open_requests.remove(request_id)
        attempt.failed = attempt.failed or failure
        if not attempt.open_requests:
            self._runnable.append(attempt)
            self._turn()

    def cancel(self, call_id: CallId, attempt_seq: int) -> None:
        """Stop an attempt where it stands; unknown: it ended before."""
        attempt = self.held.get((call_id, attempt_seq))
        if not self.alive or attempt is None or attempt.script.ignores_cancel or attempt is self._hanging():
            return
        self._fail(attempt, ErrorKind.CANCELLED, None if attempt.begun else Outcome.NOT_RUN)

    def give_back(self, call_id: CallId, attempt_seq: int) -> None:
        """Answer a recall: only a call that has not begun goes back."""
        attempt = self.held.get((call_id, attempt_seq))
        if self.alive and attempt is not None and not attempt.begun:
            self._drop(attempt)
            self._emit_recalled(attempt)

    def _emit_recalled(self, attempt: Attempt) -> None:
        key = (self.executor_id, attempt.call_id, attempt.attempt_seq)
        self._emit(AttemptFailed(*key, ErrorKind.CANCELLED, "", Outcome.NOT_RUN, recalled=True))

    # --- what the worker sees ---------------------------------------------------------------------------------

    @property
    def root_count(self) -> int:
        return sum(not attempt.is_subcall for attempt in self.held.values())

    def heartbeat(self) -> ExecutorSnapshot:
        now_ms = self._simulation.clock.now_ms()
        if self._hanging() is None:
            self._active_at_ms = now_ms
        self._heartbeats += 1
        runnable = len(self._runnable) + (self._running is not None)
        return ExecutorSnapshot(
            executor_id=self.executor_id,
            heartbeat_seq=self._heartbeats,
            received_at_ms=now_ms,
            runnable_count=runnable,
            inflight_count=len(self.held),
            available_contexts=self.contexts - self.root_count,
            running=self._running is not None,
            last_scheduler_active_at_ms=self._active_at_ms,
        )

    def begun_marks(self) -> set[tuple[CallId, int]]:
        """The page: attempts that have begun and not ended. Readable after death."""
        return {key for key, attempt in self.held.items() if attempt.begun}

    def running_call(self) -> CallId | None:
        return None if self._running is None else self._running.call_id

    def die(self) -> None:
        self.alive = False

    # --- inside -----------------------------------------------------------------------------------------------

    def _hanging(self) -> Attempt | None:
        attempt = self._running
        if attempt is not None and attempt.script.hangs and self._is_last(attempt):
            return attempt
        return None

    @staticmethod
    def _is_last(attempt: Attempt) -> bool:
        return attempt.stretch == len(attempt.script.stretches_ms) - 1

    def _turn(self) -> None:
        if self._running is not None or not self._runnable or not self.alive:
            return
        attempt = self._running = self._runnable.popleft()
        script = attempt.script
        self._active_at_ms = self._simulation.clock.now_ms()
        if not attempt.begun and not script.never_begins:
            attempt.begun = True
            self._effects.begun[attempt.call_id] += 1
            self._effects.effects[attempt.call_id] += script.has_effect
        if self._hanging() is None:
            self._simulation.after(script.stretches_ms[attempt.stretch], lambda: self._pause(attempt))

    def _pause(self, attempt: Attempt) -> None:
        """A stretch is over, unless the attempt was stopped meanwhile."""
        if not self.alive or self._running is not attempt:
            return
        script = attempt.script
        if not self._is_last(attempt):
            attempt.stretch += 1
            self._running = None
            key = (self.executor_id, attempt.call_id, attempt.attempt_seq)
            prefix = f"{attempt.attempt_seq}.{attempt.stretch}"
            asked = {RequestId(f"{prefix}.a{number}"): ask for number, ask in enumerate(script.asks)}
            names = [RequestId(f"{prefix}.{number}") for number in range(script.requests)]
            attempt.open_requests = {*names, *asked}
            for name in names:
                self._emit(CallSuspended(*key, name))
            for name, ask in asked.items():
                self._emit(SubcallRequested(*key, name, ask.target, ask.args, ask.granted_budget_ms, ask.spread))
            self._turn()
        elif attempt.failed is not None and script.hands_on:
            again = script.idempotent and attempt.failed.retryable
            kind = ErrorKind.TRANSIENT if again else ErrorKind.INTERNAL
            self._fail(attempt, kind, None, {"cause": {"kind": attempt.failed.kind.value}})
        elif script.dies:
            self.die()
            self._on_death()
        elif script.output is None:
            self._fail(attempt, script.kind, script.outcome)
        else:
            self._drop(attempt)
            key = (self.executor_id, attempt.call_id, attempt.attempt_seq)
            self._emit(CallCompleted(*key, script.output, budget_used_ms=sum(script.stretches_ms)))

    def _fail(
        self, attempt: Attempt, kind: ErrorKind, outcome: Outcome | None, details: Mapping[str, Any] | None = None
    ) -> None:
        self._drop(attempt)
        key = (self.executor_id, attempt.call_id, attempt.attempt_seq)
        used_ms = sum(attempt.script.stretches_ms[: attempt.stretch])
        self._emit(AttemptFailed(*key, kind, "as scripted", outcome, details=details or {}, budget_used_ms=used_ms))

    def _drop(self, attempt: Attempt) -> None:
        del self.held[attempt.call_id, attempt.attempt_seq]
        if attempt in self._runnable:
            self._runnable.remove(attempt)
        if self._running is attempt:
            self._running = None
        self._simulation.after(0, self._turn)
