"""A streaming list: batches in, batches out, and a core that does not grow."""

from __future__ import annotations

import copy

import pytest

from callyard.errors import ErrorKind, Outcome, fail
from callyard.ids import TaskId
from callyard.scheduler import NewCall, StopReason, TaskPlan, prepare_batch
from callyard.scheduler import commands as c
from callyard.scheduler import events as e

from .harness import PLAIN, Harness, converged, dispatches, settled


@pytest.mark.requirement("X20")
def test_a_batch_settles_when_its_calls_are_terminal_and_leaves_the_core() -> None:
    h = Harness(executors=1)
    h.open()
    h.commit(2)
    h.commit(1)
    first, second, third = dispatches(h.turn())
    assert settled(h.complete(second, b"2")) == []
    (_, batch) = h.complete(third, b"3")
    assert (batch.batch_index, [result.index for result in batch.results], batch.output_bytes) == (1, [2], 1)
    (_, batch) = h.complete(first, b"10")
    assert batch == c.BatchSettled(TaskId("t"), 0, batch.results, 3)
    assert [(result.index, result.output) for result in batch.results] == [(0, b"10"), (1, b"2")]
    assert h.scheduler._calls == {}


@pytest.mark.requirement("X20", "X75")
def test_memory_does_not_grow_with_the_list() -> None:
    """20 batches of 64 outstanding, 400 in all: the core never holds more than the window."""
    h = Harness(executors=2, contexts=128)
    h.open()
    batches, outstanding, most, results = 400, 0, 0, 0
    scheduler, open_calls = h.scheduler, []
    while results < batches * 64:
        while outstanding < 20 and h.batches["t"] < batches:
            plan = h.plans["t"]
            rows = [NewCall(index, PLAIN, b"[]") for index in range(h.rows["t"], h.rows["t"] + 64)]
            assert scheduler.commit_batch(prepare_batch(plan, h.batches["t"], h.rows["t"], rows))
            h.rows["t"] += 64
            h.batches["t"] += 1
            outstanding += 1
        commands = scheduler.flush_dirty_tasks(0) + scheduler.try_dispatch_next(0)
        for command in commands:
            if isinstance(command, c.BindCall):
                open_calls += scheduler.handle(e.ExecutorBound(command.call_id), 0)
            elif isinstance(command, c.BatchSettled):
                outstanding -= 1
                results += len(command.results)
                scheduler.handle(e.BatchTaken(command.task_id, command.batch_index), 0)
        most = max(most, len(scheduler._calls))
        if not commands:
            for sent in open_calls:
                scheduler.handle(e.CallCompleted(sent.executor_id, sent.call_id, 1, b"1"), 0)
            open_calls = []
    assert most == 20 * 64
    h.stop_production()
    assert (scheduler._calls, scheduler._tasks, scheduler._turns.rings, scheduler._epilogue.dirty) == ({}, {}, {}, [])


@pytest.mark.requirement("X22")
def test_prepare_changes_nothing() -> None:
    h = Harness(executors=1)
    plan = h.open()
    h.flush()
    before = h.scheduler.statistics()
    rows = [NewCall(0, PLAIN, b"[1]")]
    kept = copy.copy(rows)
    prepared = prepare_batch(plan, 0, 0, rows)
    assert h.scheduler.statistics() == before
    assert rows == kept
    assert (h.scheduler._calls, h.turn()) == ({}, [])
    assert h.scheduler.commit_batch(prepared)
    assert list(h.scheduler._calls) == ["t-0"]


@pytest.mark.requirement("X22")
def test_prepare_needs_no_scheduler_and_no_open_task() -> None:
    prepared = prepare_batch(TaskPlan(TaskId("later")), 0, 0, [NewCall(0, PLAIN, b"[]")])
    assert len(prepared.batch.calls) == 1
    assert Harness().scheduler.commit_batch(prepared) is False


@pytest.mark.requirement("X84")
def test_a_row_that_is_a_failure_is_that_index_s_failure() -> None:
    h = Harness(executors=1)
    h.open()
    bad = fail(ErrorKind.SCHEMA, "line 2: not JSON", line=2)
    h.commit(
        [
            NewCall(0, PLAIN, b"[]"),
            NewCall(1, None, b"", failure=bad),
            NewCall(2, None, b""),
            NewCall(3, PLAIN, b"[]", failure=bad),  # a known function, and arguments that cannot be sent
        ]
    )
    (sent,) = dispatches(h.turn())
    results = settled(h.complete(sent))
    assert [result.index for result in results] == [0, 1, 2, 3]
    assert results[0].ok
    assert results[1].failure == results[3].failure == bad
    assert results[2].failure.kind is ErrorKind.NOT_FOUND
    assert [result.attempts for result in results] == [1, 0, 0, 0]
    assert {result.failure.outcome for result in results[1:]} == {Outcome.NOT_RUN}
    done = converged(h.stop_production())
    assert (done.success, done.total_count, done.failed_count) == (False, 4, 3)
    assert (h.scheduler.statistics().finished, h.scheduler.statistics().failed) == (4, 3)


@pytest.mark.requirement("X84")
def test_a_batch_of_failed_rows_settles_without_any_executor() -> None:
    h = Harness()
    h.open()
    h.commit([NewCall(0, None, b""), NewCall(1, None, b"")])
    (batch,) = h.turn()
    assert [result.failure.kind for result in batch.results] == [ErrorKind.NOT_FOUND] * 2
    assert not converged(h.stop_production()).success


def test_an_empty_batch_settles_at_once() -> None:
    h = Harness()
    h.open()
    h.commit(0)
    assert h.turn() == [c.BatchSettled(TaskId("t"), 0, [], 0)]


def test_rows_are_numbered_without_gaps() -> None:
    plan = TaskPlan(TaskId("t"))
    with pytest.raises(AssertionError, match="row 7 of t at the place of 6"):
        prepare_batch(plan, 0, 5, [NewCall(5, PLAIN, b"[]"), NewCall(7, PLAIN, b"[]")])


def test_batches_come_in_order() -> None:
    h = Harness()
    plan = h.open()
    with pytest.raises(AssertionError, match="batch 1 out of order in t"):
        h.scheduler.commit_batch(prepare_batch(plan, 1, 0, []))


@pytest.mark.requirement("X20")
def test_a_batch_above_the_upper_limits_is_our_bug() -> None:
    h = Harness(batch_max_rows=2, batch_max_args_bytes=10)
    h.open()
    with pytest.raises(AssertionError, match="batch of 3 rows"):
        h.commit(3)
    with pytest.raises(AssertionError, match="batch of 11 bytes"):
        h.commit([NewCall(0, PLAIN, b"x" * 11), NewCall(1, PLAIN, b"x")])
    assert h.commit([NewCall(0, PLAIN, b"x" * 10), NewCall(1, PLAIN, b"x" * 1_000)])  # the last may be of any size


def test_nothing_is_committed_after_production_ended() -> None:
    h = Harness(executors=1)
    (sent,) = h.start(end=True)
    assert h.commit(1) is False
    assert converged(h.complete(sent)).total_count == 1


# --- outputs held --------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X21", "X77")
def test_outputs_above_the_limit_stop_a_streaming_task() -> None:
    h = Harness(executors=1, max_collected_output_bytes=10)
    h.open()
    for _ in range(3):
        h.commit(2)
    sent = dispatches(h.turn())
    h.complete(sent[0], b"x" * 5)
    (_, batch) = h.complete(sent[1], b"x" * 5)
    assert [result.ok for result in batch.results] == [True, True]  # 10 held, not above
    h.complete(sent[2], b"")
    (_, stopped, batch) = h.complete(sent[3], b"x")
    assert stopped == c.StopCallProduction(TaskId("t"), StopReason.OUTPUT_BYTES_EXCEEDED)
    assert [result.output for result in batch.results] == [None, None]
    assert batch.output_bytes == 0
    for result in batch.results:
        failure = result.failure
        assert (failure.kind, failure.outcome, failure.attempts) == (ErrorKind.RESULT, Outcome.RAN, 1)
        assert failure.details == {"limit": "max_collected_output_bytes"}
    h.complete(sent[4])
    h.complete(sent[5])
    done = converged(h.stop_production())
    assert (done.success, done.stop_reason) == (False, StopReason.OUTPUT_BYTES_EXCEEDED)
    assert (done.total_count, done.failed_count) == (6, 4)  # discarded ones are failures, each counted once


@pytest.mark.requirement("X21", "X76")
def test_only_outputs_that_the_worker_holds_count() -> None:
    """What the sink has taken is not held: a stream of any length passes."""
    h = Harness(executors=1, max_collected_output_bytes=10)
    h.open()
    for number in range(20):
        h.commit(1)
        (sent,) = dispatches(h.turn())
        h.complete(sent, b"x" * 9)
        for _ in range(2):  # told twice, counted once
            assert h.post(e.BatchTaken(TaskId("t"), number)) == []
    assert h.post(e.BatchTaken(TaskId("t"), 99)) == []
    assert h.scheduler._tasks["t"].held_output_bytes == 0
    assert converged(h.stop_production()).success
    assert h.post(e.BatchTaken(TaskId("t"), 19)) == []


@pytest.mark.requirement("X21", "X77")
def test_outputs_above_the_limit_stop_a_retained_task_and_are_discarded() -> None:
    h = Harness(executors=1, max_collected_output_bytes=10)
    h.open(streaming=False)
    h.commit(1)
    h.commit(2)
    h.commit(1)
    sent = dispatches(h.turn())
    for call in sent[:3]:
        h.complete(call, b"x" * 5)
    h.fail(sent[3])
    done = converged(h.stop_production())
    assert done.outputs == []
    assert [result.failure.kind for result in done.results] == [ErrorKind.RESULT] * 3 + [ErrorKind.INTERNAL]
    assert (done.total_count, done.failed_count, done.success) == (4, 4, False)


@pytest.mark.requirement("X21")
def test_an_earlier_stop_keeps_its_reason_and_its_outputs() -> None:
    h = Harness(executors=1, max_collected_output_bytes=1)
    (sent,) = h.start()
    h.post(e.TaskStopped(TaskId("t"), StopReason.CANCELLED, cancel_running=False))
    (result,) = settled(h.complete(sent, b"xxx"))
    assert result.output == b"xxx"


@pytest.mark.requirement("X21")
def test_zero_is_no_limit() -> None:
    h = Harness(executors=1)
    (sent,) = h.start(end=True)
    assert converged(h.complete(sent, b"x" * 1_000_000)).success
