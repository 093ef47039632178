"""Lines at executors are short, and what stands in one behind a long call is asked back for an idle executor."""

from __future__ import annotations

import pytest

from callyard.ids import CallId, ExecutorId
from callyard.scheduler import commands as c
from callyard.scheduler import events as e

from .harness import IDEMPOTENT, Commands, Harness, dispatches, failed

pytestmark = pytest.mark.requirement("X91")


def marks(executor: str = "exec-0", *begun: tuple[str, int], runs: bool = True) -> e.ExecutorMarks:
    return e.ExecutorMarks(ExecutorId(executor), tuple((CallId(call_id), seq) for call_id, seq in begun), runs)


def asked_back(commands: Commands) -> list[str]:
    return [one.call_id for one in commands if isinstance(one, c.CancelCall) and one.reason is None]


def recalled(sent: c.DispatchCall) -> e.AttemptFailed:
    return failed(sent, recalled=True)


def slow(h: Harness, executor: str = "exec-0") -> None:
    """Calls there run for a second, as far as is known."""
    h.scheduler._index.executors[ExecutorId(executor)].lookahead.per_call_us = 1e6
    h.scheduler._index.executors[ExecutorId(executor)].lookahead.limit = 2


def test_the_line_is_as_long_as_calls_are_short() -> None:
    h = Harness(executors=1, contexts=128, queue_ahead_ms=5)
    first = h.start(500)
    assert len(first) == 17, "one that begins, and a few more while nothing is known"
    for sent in first[:16]:
        h.post(e.CallCompleted(sent.executor_id, sent.call_id, 1, b"1", run_us=1_000))
    assert len(h.scheduler._index.executors[ExecutorId("exec-0")].live) == 6
    assert h.scheduler.wants_marks


def test_ends_that_come_together_count_as_many() -> None:
    """The last of them tells the running time of all."""
    h = Harness(executors=1, contexts=128, queue_ahead_ms=5)
    *sent, last = h.start(16)
    for one in sent:
        h.complete(one)
    h.complete(last, run_us=1_600)
    assert h.scheduler._index.executors[ExecutorId("exec-0")].lookahead.per_call_us == 100


def test_an_end_moves_the_line() -> None:
    """So nothing is asked back for as long as a line may take: the call behind it begins now."""
    h = Harness(executors=2, queue_ahead_ms=5)
    sent = h.start(5)
    h.now_ms += 50
    for one in sent:
        if one.executor_id == "exec-1":
            h.complete(one)
    h.complete(sent[0])
    assert asked_back(h.post(e.MarksRead(()))) == []
    h.now_ms += 5
    assert asked_back(h.post(e.MarksRead(()))) == ["t-4", "t-2"]


def test_a_look_is_wanted_as_soon_as_a_call_stands_behind_another() -> None:
    h = Harness(executors=2, queue_ahead_ms=5)
    h.start(2)
    assert not h.scheduler.wants_marks
    h.start(1, name="u")
    assert h.scheduler.wants_marks


def test_one_call_stands_ahead_however_long_calls_are() -> None:
    h = Harness(executors=1, queue_ahead_ms=5)
    slow(h)
    assert len(h.start(8)) == 2
    assert len(dispatches(h.post(e.MarksRead((marks("exec-0", ("t-0", 1)),))))) == 1


def test_calls_that_wait_do_not_stand_in_the_line() -> None:
    """128 of them go to one executor: their requests, or their marks, show that they have begun."""
    h = Harness(executors=1, contexts=128, queue_ahead_ms=5)
    sent = h.start(200)
    looks = 0
    while len(sent) < 128:
        looks += 1
        assert h.scheduler.wants_marks
        h.now_ms += 1
        begun = [(call.call_id, 1) for call in sent]
        sent += dispatches(h.post(e.MarksRead((marks("exec-0", *begun, runs=False),))))
    assert looks <= 3


def test_a_mark_of_another_attempt_proves_nothing() -> None:
    h = Harness(executors=1, queue_ahead_ms=5)
    slow(h)
    h.start(8)
    assert dispatches(h.post(e.MarksRead((marks("exec-0", ("t-0", 2)),)))) == []


def test_what_waits_behind_a_long_call_is_asked_back_for_an_idle_executor() -> None:
    h = Harness(executors=2, queue_ahead_ms=5)
    sent = h.start(6, target=IDEMPOTENT)
    there = [call for call in sent if call.executor_id == "exec-0"]
    for call in sent:
        if call.executor_id == "exec-1":
            h.complete(call)
    assert h.scheduler.wants_marks
    h.now_ms += 4
    look = e.MarksRead((marks("exec-0", (there[0].call_id, 1)),))
    assert asked_back(h.post(look)) == [], "it moved just now"
    h.now_ms += 5
    asked = h.post(e.MarksRead((marks("exec-0", (there[0].call_id, 1)),)))
    assert asked_back(asked) == [there[2].call_id, there[1].call_id], "the last first"
    h.now_ms += 5
    assert asked_back(h.post(look)) == [], "once"
    (again,) = dispatches(h.post(recalled(there[2])))
    assert (again.executor_id, again.attempt_seq, again.attempt) == ("exec-1", 2, 1)


def test_a_call_that_has_begun_goes_on_though_it_was_asked_back() -> None:
    h = Harness(executors=2, queue_ahead_ms=5)
    sent = h.start(4)
    there = [call for call in sent if call.executor_id == "exec-0"]
    for call in sent:
        if call.executor_id == "exec-1":
            h.complete(call)
    look = e.MarksRead((marks("exec-0", (there[0].call_id, 1)),))
    h.post(look)
    h.now_ms += 50
    assert asked_back(h.post(look)) == [there[1].call_id]
    assert h.complete(there[1])[0] == c.UnbindCall(there[1].call_id, ExecutorId("exec-0"), 1)
    h.complete(there[0])
    assert h.scheduler.statistics().inflight == 0


def test_nothing_is_asked_back_while_others_are_ready_or_nobody_is_idle() -> None:
    h = Harness(executors=2, queue_ahead_ms=5)
    slow(h)
    slow(h, "exec-1")
    h.start(4)
    h.now_ms += 100
    both = e.MarksRead((marks("exec-0", ("t-0", 1)), marks("exec-1", ("t-1", 1))))
    assert asked_back(h.post(both)) == []
    h = Harness(executors=2, queue_ahead_ms=0)
    h.start(4)
    assert not h.scheduler.wants_marks


def test_what_is_ready_goes_first_to_an_executor_that_has_become_free() -> None:
    """Nothing is asked back for it then: the line would only go round."""
    h = Harness(executors=2, queue_ahead_ms=5)
    slow(h)
    slow(h, "exec-1")
    sent = h.start(9)
    at_0, at_1 = ([(c.call_id, 1) for c in sent if c.executor_id == name] for name in ("exec-0", "exec-1"))
    h.post(e.MarksRead((marks("exec-0", at_0[0]),)))
    assert h.ready_count() == 4
    h.now_ms += 50
    seen = h.post(e.MarksRead((marks("exec-0", at_0[0]), marks("exec-1", *at_1, runs=False))))
    assert asked_back(seen) == []
    assert {call.executor_id for call in dispatches(seen)} == {"exec-1"}


def test_nothing_is_asked_back_for_an_executor_that_may_not_have_it() -> None:
    h = Harness(executors=1, queue_ahead_ms=5)
    h.attach("other", pool="gpu")
    h.start(3)
    look = e.MarksRead((marks("exec-0", ("t-0", 1)),))
    h.post(look)
    h.now_ms += 50
    assert h.scheduler.wants_marks
    assert asked_back(h.post(look)) == []
    h.attach("exec-1")
    assert asked_back(h.post(look)) == ["t-2", "t-1"]


@pytest.mark.parametrize(("queue_ahead_ms", "asked"), [(5, ["t-2", "t-1"]), (0, [])])
def test_a_sealed_executor_gives_its_line_back(queue_ahead_ms: int, asked: list[str]) -> None:
    h = Harness(executors=1, queue_ahead_ms=queue_ahead_ms)
    h.start(3)
    h.post(e.MarksRead((marks("exec-0", ("t-0", 1)),)))
    assert asked_back(h.post(e.ExecutorSealed(ExecutorId("exec-0")))) == asked


def test_an_executor_whose_calls_all_wait_counts_as_idle() -> None:
    h = Harness(executors=2, queue_ahead_ms=5)
    h.start(4)
    h.now_ms += 10
    look = e.MarksRead((marks("exec-0", ("t-0", 1)), marks("exec-1", ("t-1", 1), ("t-3", 1), runs=False)))
    h.post(look)
    h.now_ms += 5
    assert asked_back(h.post(look)) == ["t-2"]


def test_a_single_call_is_worth_no_look() -> None:
    h = Harness(executors=2, queue_ahead_ms=5)
    h.start(1)
    assert not h.scheduler.wants_marks


def test_subcalls_that_are_spread_find_a_place_past_the_lines() -> None:
    """They cannot wait in a ready queue: full lines are as good as others then, and the parent's own no better."""
    h = Harness(executors=2, contexts=64, queue_ahead_ms=5)
    (parent,) = h.start(1)
    slow(h, "exec-1")
    h.start(4, name="other")
    places = [h.call(parent, IDEMPOTENT, b"[%d]" % n, spread=True).executor_id for n in range(3)]
    assert places == ["exec-1"] * 3
