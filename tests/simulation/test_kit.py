"""The public test kit's own parts."""

from __future__ import annotations

import pytest

from callyard.clock import Clock
from callyard.errors import ErrorKind, Outcome, fail
from callyard.ids import CallId, ExecutorId, RequestId
from callyard.scheduler.events import AttemptFailed, CallCompleted, CallSuspended
from callyard.testing import Ask, FakeClock, FakeExecutor, Script, SideEffects, Simulation

A, B = CallId("a"), CallId("b")


class Bench:
    """One fake executor, and what it sent by when."""

    def __init__(self, contexts: int = 4) -> None:
        self.simulation = Simulation(1)
        self.effects = SideEffects()
        self.sent: list[tuple[int, str, str]] = []
        self.deaths = 0
        self.executor = FakeExecutor(
            self.simulation,
            ExecutorId("exec-0"),
            contexts=contexts,
            effects=self.effects,
            emit=self.emit,
            on_death=self.died,
        )

    def emit(self, frame: CallCompleted | AttemptFailed | CallSuspended) -> None:
        text = frame.kind.value if isinstance(frame, AttemptFailed) else getattr(frame, "request_id", "completed")
        self.sent.append((self.simulation.clock.now_ms(), frame.call_id, str(text)))
        self.last = frame

    def died(self) -> None:
        self.deaths += 1

    def run(self) -> None:
        while self.simulation.step():
            pass


def test_the_clock_moves_only_forward() -> None:
    clock: Clock = FakeClock(5)
    assert clock.now_ms() == 5
    fake = FakeClock()
    assert (fake.advance(10), fake.move_to(10), fake.now_ms()) == (10, 10, 10)
    with pytest.raises(ValueError, match="stands at 10 ms and cannot go back to 9 ms"):
        fake.move_to(9)


def test_one_call_runs_at_a_time_and_waiting_makes_room() -> None:
    bench = Bench()
    bench.executor.execute(A, 1, Script(stretches_ms=(10, 5)))
    bench.executor.execute(B, 1, Script(stretches_ms=(7,)))
    assert bench.executor.begun_marks() == {(A, 1)}
    bench.run()
    assert bench.sent == [(10, "a", "1.1.0"), (17, "b", "completed")]
    bench.executor.resume(A, 1, RequestId("1.1.0"))
    bench.executor.resume(A, 1, RequestId("1.1.0"))
    bench.run()
    assert bench.sent[-1] == (22, "a", "completed")
    assert (bench.effects.begun, bench.effects.effects) == ({A: 1, B: 1}, {A: 1, B: 1})


def test_what_never_begins_leaves_no_mark_and_no_effect() -> None:
    bench = Bench()
    bench.executor.execute(A, 1, Script(output=None, kind=ErrorKind.SCHEMA))
    bench.executor.execute(B, 1, Script(output=None, kind=ErrorKind.TRANSIENT))
    bench.run()
    assert (bench.effects.begun[A], bench.effects.begun[B]) == (0, 1)
    assert sum(bench.effects.effects.values()) == 0


def test_a_cancel_says_whether_it_had_begun() -> None:
    bench = Bench()
    bench.executor.execute(A, 1, Script(stretches_ms=(10,)))
    bench.executor.execute(B, 1, Script())
    bench.executor.cancel(B, 1)
    assert bench.last.outcome is Outcome.NOT_RUN
    bench.executor.cancel(A, 1)
    assert bench.last.outcome is None
    bench.executor.cancel(A, 1)
    bench.run()
    assert [text for _, _, text in bench.sent] == ["cancelled", "cancelled"]
    assert bench.executor.heartbeat().available_contexts == 4


def test_only_what_has_not_begun_goes_back() -> None:
    bench = Bench()
    bench.executor.execute(A, 1, Script(stretches_ms=(10,)))
    bench.executor.execute(B, 1, Script())
    bench.executor.give_back(A, 1)
    bench.executor.give_back(B, 1)
    assert (len(bench.sent), bench.last.call_id, bench.last.recalled) == (1, B, True)


def test_the_dead_say_nothing_and_keep_their_marks() -> None:
    bench = Bench()
    bench.executor.execute(A, 1, Script(stretches_ms=(10,), dies=True))
    bench.executor.execute(B, 1, Script())
    bench.run()
    assert (bench.deaths, bench.executor.alive, bench.sent) == (1, False, [])
    bench.executor.cancel(A, 1)
    bench.executor.execute(CallId("c"), 1, Script())
    bench.run()
    assert (bench.sent, bench.executor.begun_marks()) == ([], {(A, 1)})


def test_a_hanging_call_shows_in_the_heartbeat() -> None:
    bench = Bench()
    bench.executor.execute(A, 1, Script(hangs=True))
    bench.executor.cancel(A, 1)
    bench.simulation.clock.advance(5_000)
    beat = bench.executor.heartbeat()
    assert (beat.running, beat.last_scheduler_active_at_ms, beat.inflight_count) == (True, 0, 1)
    assert bench.executor.running_call() == A


def test_a_full_executor_gives_roots_back_and_takes_subcalls() -> None:
    bench = Bench(contexts=1)
    bench.executor.execute(A, 1, Script(stretches_ms=(10,)))
    bench.executor.execute(B, 1, Script())
    assert (bench.last.call_id, bench.last.recalled) == (B, True)
    bench.executor.execute(CallId("a/sub-1"), 1, Script(), is_subcall=True)
    assert (bench.executor.heartbeat().inflight_count, bench.executor.heartbeat().available_contexts) == (2, 0)
    bench.run()
    assert bench.effects.begun == {A: 1, CallId("a/sub-1"): 1}


def test_a_script_asks_for_subcalls_and_may_hand_their_failure_on() -> None:
    bench = Bench()
    asks = (Ask(None, b"[]"), Ask(None, b"[1]"))
    bench.executor.execute(A, 1, Script(stretches_ms=(1, 1), requests=0, asks=asks, hands_on=True))
    bench.run()
    assert [sent[2] for sent in bench.sent] == ["1.1.a0", "1.1.a1"]
    bench.executor.resume(A, 1, RequestId("1.1.a0"))
    bench.executor.resume(A, 1, RequestId("1.1.a1"), fail(ErrorKind.NOT_FOUND, "none"))
    bench.run()
    assert (bench.last.kind, bench.last.details) == (ErrorKind.INTERNAL, {"cause": {"kind": "not_found"}})
