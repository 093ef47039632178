"""Which executor: the filters, the score, the counts behind them."""

from __future__ import annotations

from typing import Any

import pytest

from callyard.errors import ErrorKind
from callyard.ids import Digest, ExecutorId, FunctionId
from callyard.scheduler import FunctionTarget, StopReason
from callyard.scheduler import events as e

from .harness import IDEMPOTENT, PLAIN, Harness, dispatches, refused, resumed, suspended, unbind


def chosen(h: Harness, calls: int = 1) -> list[str]:
    """Where the next calls go."""
    if "t" not in h.plans:
        h.open()
    h.commit(calls)
    return [sent.executor_id for sent in dispatches(h.turn())]


# --- filters -----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X8")
@pytest.mark.parametrize(
    ("fields", "config"),
    [
        pytest.param({"wants_replacement": True}, {}, id="asks to be replaced"),
        pytest.param({"received_at_ms": 499, "heartbeat_timeout_ms": 500}, {}, id="heartbeat overdue"),
        pytest.param({"running": True, "last_scheduler_active_at_ms": 499, "stall_ms": 500}, {}, id="stalled"),
        pytest.param({"contexts": 0}, {}, id="no headroom"),
        pytest.param({"memory_bytes": 100}, {"executor_memory_high_watermark": 100}, id="memory at the watermark"),
    ],
)
def test_filter_refuses(fields: dict[str, Any], config: dict[str, int]) -> None:
    h = Harness(**config)
    h.attach("exec-0", **fields)
    assert chosen(h) == []


@pytest.mark.requirement("X8")
@pytest.mark.parametrize(
    ("fields", "config"),
    [
        pytest.param({"received_at_ms": 500, "heartbeat_timeout_ms": 500}, {}, id="heartbeat just in time"),
        pytest.param({"received_at_ms": 0}, {}, id="silence is not judged"),
        pytest.param({"running": True, "last_scheduler_active_at_ms": 500, "stall_ms": 500}, {}, id="not yet stalled"),
        pytest.param({"running": True, "last_scheduler_active_at_ms": 0}, {}, id="stall check off"),
        pytest.param({"last_scheduler_active_at_ms": 0, "stall_ms": 500}, {}, id="idle is not stalled"),
        pytest.param({"contexts": 1}, {}, id="one context"),
        pytest.param({"memory_bytes": 99}, {"executor_memory_high_watermark": 100}, id="memory below the watermark"),
        pytest.param({"memory_bytes": 1 << 60}, {}, id="watermark off"),
    ],
)
def test_filter_accepts(fields: dict[str, Any], config: dict[str, int]) -> None:
    h = Harness(**config)
    h.attach("exec-0", **fields)
    assert chosen(h) == ["exec-0"]


@pytest.mark.requirement("X8")
def test_nothing_is_bound_without_executors() -> None:
    assert chosen(Harness()) == []


@pytest.mark.requirement("X8")
def test_inflight_is_bounded_by_the_setting_and_by_contexts() -> None:
    h = Harness(executor_max_inflight=3)
    h.attach("exec-0", contexts=128)
    h.attach("exec-1", contexts=2)
    where = chosen(h, 20)
    assert (where.count("exec-0"), where.count("exec-1")) == (3, 2)


@pytest.mark.requirement("X8")
def test_runnable_is_bounded_and_waiting_calls_make_room() -> None:
    h = Harness(executors=1, contexts=8, executor_max_runnable=2)
    sent = h.start(4)
    assert len(sent) == 2
    third = dispatches(h.post(suspended(sent[0])))
    assert [call.call_id for call in third] == ["t-2"]
    assert h.post(resumed(sent[0])) == []  # three runnable, one above the bound, and that is how it may be


@pytest.mark.requirement("X8")
def test_usable_contexts_count_the_inflight_ones_of_the_heartbeat_once() -> None:
    """contexts = inflight + available: a heartbeat that shows 2 running and 1 free still means 3 in all."""
    h = Harness(executors=1, contexts=3)
    h.start(2)
    h.handle(e.SnapshotUpdated(h.snapshot("exec-0", seq=2, inflight_count=2, runnable_count=2, contexts=1)))
    assert chosen(h, 5) == ["exec-0"]


@pytest.mark.requirement("X8")
def test_draining_reservations_take_their_contexts_until_confirmed() -> None:
    h = Harness(executors=1, contexts=2)
    sent = h.start(2)
    h.handle(suspended(sent[0]))
    h.handle(e.ResumeSendFailed(sent[0].call_id, 1))  # its old attempt drains
    h.open("u")
    h.commit(2, name="u")
    assert h.turn() == []
    late = h.post(e.CallCompleted(sent[0].executor_id, sent[0].call_id, 1, b"1"))
    assert late[0] == unbind(sent[0])
    assert [call.call_id for call in dispatches(late)] == ["u-0"]


@pytest.mark.requirement("X8")
def test_a_sealed_executor_takes_no_more_but_answers() -> None:
    h = Harness(executors=1)
    (sent,) = h.start(1)
    assert h.post(e.ExecutorSealed(sent.executor_id)) == []
    assert chosen(h) == []
    assert h.complete(sent)[0] == unbind(sent)


@pytest.mark.requirement("X8")
def test_a_stall_ends_with_a_fresh_heartbeat() -> None:
    h = Harness()
    h.attach("exec-0", running=True, last_scheduler_active_at_ms=0, stall_ms=500)
    assert chosen(h) == []
    for _ in range(3):
        assert h.turn() == []
    beat = h.snapshot("exec-0", seq=2, running=True, last_scheduler_active_at_ms=900, stall_ms=500)
    assert [call.executor_id for call in dispatches(h.post(e.SnapshotUpdated(beat)))] == ["exec-0"]


@pytest.mark.requirement("X8", "X74")
def test_new_limits_count_between_heartbeats() -> None:
    """The worker judges a stall by the largest budget begun there, which changes without a heartbeat."""
    h = Harness()
    h.attach("exec-0", running=True, last_scheduler_active_at_ms=0, stall_ms=500)
    assert chosen(h) == []
    same = h.snapshot("exec-0", running=True, last_scheduler_active_at_ms=0, stall_ms=None)
    assert [call.executor_id for call in dispatches(h.post(e.SnapshotUpdated(same)))] == ["exec-0"]


# --- bundles -----------------------------------------------------------------------------------------------------


def test_an_executor_serves_the_bundle_it_was_first_sent() -> None:
    h = Harness(executors=1)
    (sent,) = h.start()
    h.complete(sent)
    other = FunctionTarget(FunctionId("f"), Digest("other"), "m:f")
    assert h.start(name="u", target=other) == []
    h.attach("exec-1")
    assert [call.executor_id for call in dispatches(h.turn())] == ["exec-1"]


def test_an_executor_that_was_sent_nothing_is_bound_to_no_bundle() -> None:
    """Refused and rejected attempts never left: a denied bundle must not keep an executor for itself."""
    h = Harness(executors=1)
    (sent,) = h.start()
    h.handle(e.DispatchRejected(sent.call_id, 1, ErrorKind.DENIED, "no"))
    other = FunctionTarget(FunctionId("f"), Digest("other"), "m:f")
    (second,) = h.start(name="u", target=other)
    assert second.executor_id == "exec-0"
    h.handle(refused(second))
    (third,) = h.start(name="v")
    assert third.executor_id == "exec-0"


# --- score -------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X9")
def test_lower_runnable_first() -> None:
    h = Harness(executors=2)
    (busy,) = h.start(1)
    assert busy.executor_id == "exec-0"
    assert chosen(h) == ["exec-1"]


@pytest.mark.requirement("X9")
def test_then_lower_inflight() -> None:
    h = Harness(executors=2)
    (waiting,) = h.start(1)
    h.handle(suspended(waiting))  # 0 runnable each, 1 in flight against 0
    h.commit(1)
    (second,) = dispatches(h.turn())
    assert second.executor_id == "exec-1"


@pytest.mark.requirement("X9")
def test_then_higher_headroom() -> None:
    h = Harness()
    h.attach("exec-0", contexts=2)
    h.attach("exec-1", contexts=5)
    assert chosen(h) == ["exec-1"]


@pytest.mark.requirement("X9")
def test_headroom_is_cut_to_the_setting() -> None:
    h = Harness(executor_max_inflight=4)
    h.attach("exec-0", contexts=4)
    h.attach("exec-1", contexts=500)
    assert chosen(h) == ["exec-0"]  # equal headroom: the id decides


@pytest.mark.requirement("X9")
def test_then_the_id() -> None:
    h = Harness()
    h.attach("exec-2", "exec-10", "exec-1")
    assert chosen(h) == ["exec-1"]


@pytest.mark.requirement("X9")
def test_a_sample_scores_that_many_and_its_cursor_moves_on() -> None:
    h = Harness(executors=10, contexts=128, executor_selection_sample_size=2)
    where = chosen(h, 100)
    assert {where.count(f"exec-{number}") for number in range(10)} <= set(range(5, 16))
    assert len(set(where[:5])) == 5  # two are looked at a time, so five choices pass all ten


@pytest.mark.requirement("X9")
def test_a_sample_takes_the_better_of_those_it_looks_at() -> None:
    h = Harness(executor_selection_sample_size=2)
    h.attach("exec-0", contexts=1)
    h.attach("exec-1", contexts=8)
    h.attach("exec-2", contexts=128)
    assert chosen(h) == ["exec-1"]


@pytest.mark.requirement("X9")
def test_a_sample_looks_past_the_ineligible() -> None:
    h = Harness(executors=6, contexts=4, executor_selection_sample_size=2)
    for number in range(5):
        h.handle(e.ExecutorSealed(ExecutorId(f"exec-{number}")))
    assert chosen(h, 4) == ["exec-5"] * 4


# --- runnable ----------------------------------------------------------------------------------------------------


def runnable(h: Harness, executor: str = "exec-0") -> int:
    return h.scheduler._index.executors[ExecutorId(executor)].runnable


@pytest.mark.requirement("X10")
def test_runnable_comes_from_the_workers_own_events() -> None:
    h = Harness(executors=1)
    sent = h.start(3)
    assert runnable(h) == 3
    h.handle(suspended(sent[0]))
    assert runnable(h) == 2
    h.handle(resumed(sent[0]))
    assert runnable(h) == 3
    h.handle(e.CallCompleted(sent[0].executor_id, sent[0].call_id, 1, b"1"))
    assert runnable(h) == 2


@pytest.mark.requirement("X10")
def test_a_heartbeat_corrects_what_the_worker_cannot_see() -> None:
    """Four in flight, one waits for IO, one runs: the other two sleep."""
    h = Harness(executors=1)
    sent = h.start(4)
    h.handle(suspended(sent[0]))
    h.handle(e.SnapshotUpdated(h.snapshot("exec-0", seq=2, inflight_count=4, runnable_count=1, contexts=4)))
    assert runnable(h) == 1
    h.handle(e.SnapshotUpdated(h.snapshot("exec-0", seq=3, inflight_count=4, runnable_count=3, contexts=4)))
    assert runnable(h) == 3


@pytest.mark.requirement("X10")
def test_sleepers_that_ended_hide_no_new_calls() -> None:
    """Else an executor whose sleepers all ended would look idle until the next heartbeat, and take everything."""
    h = Harness(executors=1)
    sent = h.start(4)
    h.handle(e.SnapshotUpdated(h.snapshot("exec-0", seq=2, inflight_count=4, runnable_count=0, contexts=4)))
    assert runnable(h) == 0
    for call in sent:
        h.handle(e.CallCompleted(call.executor_id, call.call_id, 1, b"1"))
    h.commit(3)
    h.turn()
    assert runnable(h) == 3


@pytest.mark.requirement("X10")
def test_stopped_calls_are_not_taken_for_sleepers() -> None:
    h = Harness(executors=1)
    h.start(2)
    h.handle(e.TaskStopped(h.plans["t"].task_id, StopReason.CANCELLED))
    h.start(1, name="u")
    h.handle(e.SnapshotUpdated(h.snapshot("exec-0", seq=2, inflight_count=3, runnable_count=1, contexts=5)))
    assert runnable(h) == 1


@pytest.mark.requirement("X10")
def test_an_older_heartbeat_changes_nothing() -> None:
    h = Harness(executors=1)
    h.start(4)
    h.handle(e.SnapshotUpdated(h.snapshot("exec-0", seq=5, inflight_count=4, runnable_count=4, contexts=4)))
    executor = h.scheduler._index.executors[ExecutorId("exec-0")]
    before = executor.snapshot
    old = h.snapshot("exec-0", seq=4, inflight_count=4, contexts=0, memory_bytes=9, wants_replacement=True)
    assert h.handle(e.SnapshotUpdated(old)) == []
    assert (executor.snapshot, runnable(h), executor.sealed) == (before, 4, False)
    assert h.scheduler.statistics().stale == 1


@pytest.mark.requirement("X10")
def test_the_same_heartbeat_again_changes_the_workers_limits_only() -> None:
    h = Harness(executors=1)
    h.start(4)
    executor = h.scheduler._index.executors[ExecutorId("exec-0")]
    before = executor.snapshot
    same = h.snapshot("exec-0", inflight_count=4, contexts=0, memory_bytes=9, stall_ms=7, heartbeat_timeout_ms=8)
    h.handle(e.SnapshotUpdated(same))
    assert (executor.snapshot.stall_ms, executor.snapshot.heartbeat_timeout_ms) == (7, 8)
    assert executor.snapshot.available_contexts == before.available_contexts
    assert (executor.snapshot.memory_bytes, runnable(h)) == (0, 4)


def test_a_heartbeat_of_an_unknown_executor_is_ignored() -> None:
    h = Harness()
    assert h.handle(e.SnapshotUpdated(h.snapshot("exec-9"))) == []


def test_promises_do_not_matter_to_the_choice() -> None:
    h = Harness(executors=2)
    h.start(1, target=IDEMPOTENT)
    (second,) = h.start(1, name="u", target=PLAIN)
    assert second.executor_id == "exec-1"
