"""An executor process in fake time: one thread, a few contexts, begun-marks, and a log of what really happened."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

import msgspec

from callyard.errors import ErrorKind, Outcome
from callyard.ids import CallId, ExecutorId, RequestId
from callyard.scheduler.events import AttemptFailed, CallCompleted, CallSuspended
from callyard.scheduler.executors import ExecutorSnapshot
from callyard.testing.simulation import Simulation

Frame = CallCompleted | AttemptFailed | CallSuspended


class Script(msgspec.Struct, frozen=True):
    """What one attempt does: stretches of running, with requests to wait for between them, and an end."""

    stretches_ms: tuple[int, ...] = (1,)
    """Running time of each stretch; after each but the last it waits for `requests` answers."""
    requests: int = 1
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


class _Attempt(msgspec.Struct, eq=False):
    call_id: CallId
    attempt_seq: int
    script: Script
    stretch: int = 0
    begun: bool = False
    open_requests: set[RequestId] = set()


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
        self._held: dict[tuple[CallId, int], _Attempt] = {}
        self._runnable: deque[_Attempt] = deque()
        self._running: _Attempt | None = None
        self._active_at_ms = simulation.clock.now_ms()
        self._heartbeats = 0

    # --- what the worker sends --------------------------------------------------------------------------------

    def execute(self, call_id: CallId, attempt_seq: int, script: Script) -> None:
        if not self.alive:
            return
        assert len(script.stretches_ms) == 1 or not script.never_begins, "what never begins asks for nothing"
        assert (call_id, attempt_seq) not in self._held, f"{call_id} attempt {attempt_seq} executed twice"
        assert len(self._held) < self.contexts, f"{self.executor_id} has no context left for {call_id}"
        attempt = _Attempt(call_id, attempt_seq, script)
        self._held[call_id, attempt_seq] = attempt
        self._runnable.append(attempt)
        self._turn()

    def resume(self, call_id: CallId, attempt_seq: int, request_id: RequestId) -> None:
        attempt = self._held.get((call_id, attempt_seq))
        if not self.alive or attempt is None or request_id not in attempt.open_requests:
            return
        attempt.open_requests.remove(request_id)
        if not attempt.open_requests:
            self._runnable.append(attempt)
            self._turn()

    def cancel(self, call_id: CallId, attempt_seq: int) -> None:
        """Stop an attempt where it stands; unknown: it ended before."""
        attempt = self._held.get((call_id, attempt_seq))
        if not self.alive or attempt is None or attempt.script.ignores_cancel or attempt is self._hanging():
            return
        self._fail(attempt, ErrorKind.CANCELLED, None if attempt.begun else Outcome.NOT_RUN)

    def give_back(self, call_id: CallId, attempt_seq: int) -> None:
        """Answer a recall: only a call that has not begun goes back."""
        attempt = self._held.get((call_id, attempt_seq))
        if self.alive and attempt is not None and not attempt.begun:
            self._drop(attempt)
            self._emit(
                AttemptFailed(
                    self.executor_id, call_id, attempt_seq, ErrorKind.CANCELLED, "", Outcome.NOT_RUN, recalled=True
                )
            )

    # --- what the worker sees ---------------------------------------------------------------------------------

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
            inflight_count=len(self._held),
            available_contexts=self.contexts - len(self._held),
            running=self._running is not None,
            last_scheduler_active_at_ms=self._active_at_ms,
        )

    def begun_marks(self) -> set[tuple[CallId, int]]:
        """The page: attempts that have begun and not ended. Readable after death."""
        return {key for key, attempt in self._held.items() if attempt.begun}

    def running_call(self) -> CallId | None:
        return None if self._running is None else self._running.call_id

    def die(self) -> None:
        self.alive = False

    # --- inside -----------------------------------------------------------------------------------------------

    def _hanging(self) -> _Attempt | None:
        attempt = self._running
        if attempt is not None and attempt.script.hangs and self._is_last(attempt):
            return attempt
        return None

    @staticmethod
    def _is_last(attempt: _Attempt) -> bool:
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

    def _pause(self, attempt: _Attempt) -> None:
        """A stretch is over, unless the attempt was stopped meanwhile."""
        if not self.alive or self._running is not attempt:
            return
        script = attempt.script
        if not self._is_last(attempt):
            attempt.stretch += 1
            self._running = None
            names = [f"{attempt.attempt_seq}.{attempt.stretch}.{number}" for number in range(script.requests)]
            attempt.open_requests = {RequestId(name) for name in names}
            for name in names:
                self._emit(CallSuspended(self.executor_id, attempt.call_id, attempt.attempt_seq, RequestId(name)))
            self._turn()
        elif script.dies:
            self.die()
            self._on_death()
        elif script.output is None:
            self._fail(attempt, script.kind, script.outcome)
        else:
            self._drop(attempt)
            self._emit(CallCompleted(self.executor_id, attempt.call_id, attempt.attempt_seq, script.output))

    def _fail(self, attempt: _Attempt, kind: ErrorKind, outcome: Outcome | None) -> None:
        self._drop(attempt)
        self._emit(AttemptFailed(self.executor_id, attempt.call_id, attempt.attempt_seq, kind, "as scripted", outcome))

    def _drop(self, attempt: _Attempt) -> None:
        del self._held[attempt.call_id, attempt.attempt_seq]
        if attempt in self._runnable:
            self._runnable.remove(attempt)
        if self._running is attempt:
            self._running = None
        self._simulation.after(0, self._turn)
