"""Calls made by calls: their family, their refusals, their budget, their end."""

from __future__ import annotations

from itertools import count
from random import Random

import pytest

from callyard.errors import ErrorKind, Outcome, ProtocolError, fail
from callyard.ids import CallId, Digest, ExecutorId
from callyard.scheduler import CallState, Scheduler, SchedulerConfig, StopReason, TaskPlan
from callyard.scheduler import commands as c
from callyard.scheduler import events as e

from .harness import (
    IDEMPOTENT,
    PLAIN,
    PURE,
    Harness,
    cancels,
    converged,
    dispatches,
    function,
    refused,
    resumes,
    settled,
    unbind,
)


def parent_of(h: Harness, target=PLAIN, **plan) -> c.DispatchCall:
    (sent,) = dispatches(h.begin(target, **plan))
    return sent


# --- making one -----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X24", "X26", "X6")
def test_a_subcall_runs_at_its_parents_executor() -> None:
    h = Harness(executors=3)
    parent = parent_of(h)
    child = function("child")
    bind, sent = h.ask(parent, child, b"[1]", request="r1", granted_budget_ms=70)
    assert bind == c.BindCall("t-0/sub-1", parent.executor_id, 1, 70)
    assert sent == c.DispatchCall(
        "t-0/sub-1", "t", parent.executor_id, 1, 1, child, b"[1]", False, 70, parent_call_id="t-0"
    )
    assert h.state("t-0").state is CallState.WAITING
    assert h.state("t-0/sub-1").max_attempts == 1
    assert h.scheduler.progress("t").total_count == 1


@pytest.mark.requirement("X24")
def test_numbers_come_from_one_sequence() -> None:
    h = Harness(executors=1)
    parent = parent_of(h)
    first = h.call(parent, PLAIN, b"[1]")
    second = h.call(first, PLAIN, b"[2]")
    third = h.call(parent, PLAIN, b"[3]")
    assert [first.call_id, second.call_id, third.call_id] == ["t-0/sub-1", "t-0/sub-1/sub-2", "t-0/sub-3"]
    numbers = count(100)
    for _ in range(2):
        h = Harness(executors=1)
        h.scheduler = Scheduler(SchedulerConfig(), Random(1), numbers=numbers)
        h.attach("exec-0")
        h.call(parent_of(h), IDEMPOTENT)
    assert next(numbers) == 102


@pytest.mark.requirement("X28", "X27", "X83")
def test_its_result_resumes_the_parent_which_goes_on() -> None:
    h = Harness(executors=1)
    parent = parent_of(h)
    child = h.call(parent, IDEMPOTENT, request="r1")
    commands = h.complete(child, b"7", budget_used_ms=12)
    assert commands == [unbind(child), c.ResumeParent("t-0", "exec-0", 1, "r1", b"7", None, 12)]
    assert CallId(child.call_id) not in h.scheduler._calls
    assert h.state("t-0").state is CallState.WAITING  # until the frame is flushed
    assert h.resume(commands[1]) == []
    assert h.state("t-0").state is CallState.RUNNING
    assert settled(h.complete(parent, b"8"))[0].output == b"8"


@pytest.mark.requirement("X28")
@pytest.mark.parametrize(("promise", "retryable"), [(True, True), (False, False)])
def test_its_failure_resumes_the_parent_and_says_whether_it_may_run_again(promise: bool, retryable: bool) -> None:
    h = Harness(executors=1)
    child = h.call(parent_of(h), function("child", idempotent=promise))
    (resume,) = resumes(h.fail(child, ErrorKind.TIMEOUT, budget_used_ms=5))
    failure = resume.failure
    assert failure is not None
    assert (failure.kind, failure.retryable, failure.attempts) == (ErrorKind.TIMEOUT, retryable, 1)
    assert (resume.output, resume.budget_used_ms) == (None, 5)


@pytest.mark.requirement("X24")
def test_it_never_counts_in_totals_results_or_the_tasks_inflight() -> None:
    h = Harness(executors=1, task_max_inflight_calls=1)
    parent = parent_of(h, streaming=False)
    for number in range(3):
        h.resume(resumes(h.complete(h.call(parent, PLAIN, b"%d" % number)))[0])
    h.resume(resumes(h.fail(h.call(parent, PLAIN, b"x")))[0])
    h.complete(parent, b"9")
    done = converged(h.stop_production())
    assert (done.outputs, done.total_count, done.failed_count, done.success) == ([b"9"], 1, 0, True)
    statistics = h.scheduler.statistics()
    assert (statistics.finished, statistics.failed, statistics.subcalls) == (1, 0, 4)


@pytest.mark.requirement("X30", "X66")
def test_several_run_at_once_and_each_answers_its_own_request() -> None:
    h = Harness(executors=1)
    parent = parent_of(h)
    children = [h.call(parent, PLAIN, b"%d" % number, request=f"r{number}") for number in range(5)]
    ends = [resumes(h.complete(child, child.args))[0] for child in reversed(children)]
    assert [(end.request_id, end.output) for end in ends] == [(f"r{n}", b"%d" % n) for n in reversed(range(5))]
    for end in ends:
        assert h.state("t-0").state is CallState.WAITING
        h.resume(end)
    assert h.state("t-0").state is CallState.RUNNING


@pytest.mark.requirement("X66")
def test_a_request_that_is_open_already_makes_no_second_subcall() -> None:
    h = Harness(executors=1)
    parent = parent_of(h)
    h.call(parent, PLAIN, b"1", request="r1")
    assert h.ask(parent, PLAIN, b"2", request="r1") == []
    assert h.scheduler.statistics().dropped == 1
    assert len(h.state("t-0").ties.children) == 1


@pytest.mark.requirement("X66", "X82")
def test_too_many_open_requests_break_the_protocol() -> None:
    h = Harness(executors=1, open_requests_max=2)
    parent = parent_of(h)
    for number in range(2):
        h.call(parent, PLAIN, b"%d" % number)
    with pytest.raises(ProtocolError, match="2 open requests"):
        h.ask(parent, PLAIN, b"9")


# --- refusals -------------------------------------------------------------------------------------------------------


def refusal(commands: list) -> tuple[ErrorKind, str, str]:
    (resume,) = commands
    assert isinstance(resume, c.ResumeParent)
    assert (resume.output, resume.budget_used_ms) == (None, 0)
    failure = resume.failure
    assert failure is not None
    assert failure.outcome is Outcome.NOT_RUN
    assert not failure.retryable
    return failure.kind, failure.details.get("reason", ""), failure.message


@pytest.mark.requirement("X25")
def test_too_deep() -> None:
    h = Harness(executors=1, max_subcall_depth=3)
    sent = parent_of(h)
    for depth in range(3):
        sent = h.call(sent, PLAIN, b"%d" % depth)
    kind, reason, message = refusal(h.ask(sent, function("deep")))
    assert (kind, reason) == (ErrorKind.DENIED, "depth")
    assert message == "deep would be 4 calls deep, max_subcall_depth=3"


@pytest.mark.requirement("X95")
def test_arguments_that_wait_at_one_executor_are_bounded() -> None:
    """Those of all its calls together; what has ended counts no more."""
    h = Harness(executors=1, subcall_args_bytes_max=20)
    one, other = dispatches(h.begin((PLAIN, b"[1]"), (PLAIN, b"[2]")))
    first = h.call(one, IDEMPOTENT, b'["12345678"]')
    kind, _, message = refusal(h.ask(other, IDEMPOTENT, b'["123456789"]'))
    assert kind is ErrorKind.RESOURCE_LIMIT
    assert "would wait for subcalls with 25 bytes of arguments, subcall_args_bytes_max=20" in message
    h.complete(first)
    assert dispatches(h.ask(other, IDEMPOTENT, b'["123456789"]'))


@pytest.mark.requirement("X25")
@pytest.mark.parametrize("levels", [0, 1, 3])
def test_a_call_that_would_wait_for_itself(levels: int) -> None:
    h = Harness(executors=1)
    (sent,) = dispatches(h.begin((PLAIN, b"[1]")))
    for level in range(levels):
        sent = h.call(sent, IDEMPOTENT, b"%d" % level)
    kind, reason, message = refusal(h.ask(sent, PLAIN, b"[1]"))
    assert (kind, reason) == (ErrorKind.DENIED, "cycle")
    assert "t-0 waits for itself" in message
    assert dispatches(h.ask(sent, PLAIN, b"[2]"))  # other arguments: recursion is no cycle
    assert dispatches(h.ask(sent, function("other"), b"[1]"))


@pytest.mark.requirement("X84", "X28")
def test_an_unknown_function_resumes_the_parent_with_the_error() -> None:
    h = Harness(executors=1)
    parent = parent_of(h)
    told = fail(ErrorKind.NOT_FOUND, "no function 'x'; there are a, b")
    assert resumes(h.ask(parent, None, failure=told))[0].failure == told
    assert refusal(h.ask(parent, None))[0] is ErrorKind.NOT_FOUND


@pytest.mark.requirement("X25", "X13")
def test_a_request_of_an_old_attempt_or_a_foreign_executor_is_stale() -> None:
    h = Harness(executors=2)
    parent = parent_of(h)
    h.handle(e.AttemptFailed(parent.executor_id, parent.call_id, 1, ErrorKind.TRANSIENT, ""))
    h.now_ms += 1_000
    (again,) = dispatches(h.post(e.RetryDue(parent.call_id)))
    assert again.attempt_seq == 2
    late = e.SubcallRequested(parent.executor_id, parent.call_id, 1, "r", PLAIN, b"[]")
    foreign = e.SubcallRequested(ExecutorId("exec-9"), parent.call_id, 2, "r", PLAIN, b"[]")
    for event in (late, foreign):
        assert h.post(event) == []
    assert h.scheduler.statistics().stale == 2
    assert h.scheduler.statistics().subcalls == 0


@pytest.mark.requirement("X64")
def test_a_pure_call_may_only_call_pure_functions() -> None:
    h = Harness(executors=1)
    parent = parent_of(h, PURE)
    for target in (PLAIN, IDEMPOTENT):
        kind, reason, _ = refusal(h.ask(parent, target))
        assert (kind, reason) == (ErrorKind.DENIED, "purity")
    assert dispatches(h.ask(parent, function("other", pure=True)))


@pytest.mark.requirement("X92")
def test_a_function_of_another_bundle_has_no_executor_here() -> None:
    h = Harness(executors=2)
    kind, reason, _ = refusal(h.ask(parent_of(h), function("f", digest=Digest("other"))))
    assert (kind, reason) == (ErrorKind.DENIED, "bundle")


def test_a_call_that_is_being_stopped_begins_nothing() -> None:
    h = Harness(executors=1)
    parent = parent_of(h)
    h.post(e.TaskStopped("t", StopReason.CANCELLED))
    assert refusal(h.ask(parent, PLAIN, b"1"))[:2] == (ErrorKind.CANCELLED, "cancelled")


# --- budget ---------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X27", "X65", "X74", "X85")
@pytest.mark.parametrize(
    ("budget", "charged", "granted", "gets"),
    [
        (0, 0, 0, 0),
        (0, 50, 70, 70),
        (100, 0, 70, 70),
        (100, 0, 1_000_000, 100),  # a forged grant
        (100, 60, 70, 40),
        (100, 60, 0, 40),  # 0 is unlimited below an unlimited parent only
        (100, 100, 5, None),
        (100, 250, 5, None),
    ],
)
def test_a_grant_is_cut_to_what_the_parent_has_left(budget: int, charged: int, granted: int, gets: int | None) -> None:
    h = Harness(executors=1)
    parent = parent_of(h, default_budget_ms=budget)
    h.resume(resumes(h.complete(h.call(parent, IDEMPOTENT), budget_used_ms=charged))[0])
    commands = h.ask(parent, PLAIN, b"2", granted_budget_ms=granted)
    if gets is None:
        kind, _, message = refusal(commands)
        assert (kind, message) == (ErrorKind.TIMEOUT, "f was not called: f has used its 100 ms")
    else:
        assert dispatches(commands)[0].budget_ms == gets


@pytest.mark.requirement("X65", "X85")
def test_io_is_charged_too_and_a_new_attempt_begins_with_nothing_charged() -> None:
    h = Harness(executors=1)
    parent = parent_of(h, IDEMPOTENT, default_budget_ms=100)
    h.post(e.CallSuspended(parent.executor_id, parent.call_id, 1, "io"))
    h.post(e.CallResumed(parent.call_id, 1, "io", budget_used_ms=30))
    h.resume(resumes(h.complete(h.call(parent, PURE), budget_used_ms=20))[0])
    assert h.call(parent, IDEMPOTENT, b"1", granted_budget_ms=99).budget_ms == 50
    h.fail(parent, ErrorKind.TIMEOUT)
    h.now_ms += 1_000
    (again,) = dispatches(h.post(e.RetryDue(parent.call_id)))
    assert h.call(again, IDEMPOTENT, b"1", granted_budget_ms=99).budget_ms == 99


@pytest.mark.requirement("X85")
def test_a_chain_pays_upwards() -> None:
    h = Harness(executors=1)
    top = parent_of(h, default_budget_ms=100)
    middle = h.call(top, PLAIN, b"1", granted_budget_ms=80)
    leaf = h.call(middle, PLAIN, b"2", granted_budget_ms=60)
    (first,) = resumes(h.complete(leaf, budget_used_ms=10))
    h.resume(first)
    assert h.call(middle, PLAIN, b"3", granted_budget_ms=80).budget_ms == 70
    (second,) = resumes(h.complete(middle, budget_used_ms=45))
    assert second.budget_used_ms == 45  # its own count holds what it paid
    assert h.call(top, PLAIN, b"4").budget_ms == 55


# --- places ---------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X26", "X80")
@pytest.mark.parametrize("full", ["inflight", "runnable", "task", "stopped", "fail_fast", "sealed", "contexts"])
def test_nothing_that_is_full_holds_back_a_subcall(full: str) -> None:
    config = {
        "inflight": {"executor_max_inflight": 1},
        "runnable": {"executor_max_runnable": 1},
        "task": {"task_max_inflight_calls": 1},
    }
    h = Harness(executors=1, contexts=1 if full == "contexts" else 8, **config.get(full, {}))
    h.open(on_failure="fail_fast")
    h.commit(3)
    sent = dispatches(h.turn())
    parent = sent[0]
    if full == "stopped":
        h.post(e.TaskStopped("t", StopReason.MAX_FAILURES, cancel_running=False))
    elif full == "sealed":
        h.post(e.ExecutorSealed(parent.executor_id))
    elif full == "fail_fast":
        h.fail(sent[1])
    for depth in range(4):
        parent = h.call(parent, PLAIN, b"%d" % depth)
    assert parent.executor_id == sent[0].executor_id


@pytest.mark.requirement("X11", "X26", "X70")
def test_one_whose_bind_is_refused_is_parked_and_tried_again() -> None:
    h = Harness(executors=1)
    parent = parent_of(h)
    h.handle(e.SubcallRequested(parent.executor_id, parent.call_id, 1, "r", PLAIN, b"1"))
    (bind,) = h.decide()
    commands = h.handle(refused(bind))
    assert commands[1:] == [c.ArmCallRetry(bind.call_id, h.now_ms)]
    (bind,) = h.decide()  # at once the first time
    (_, armed) = h.handle(refused(bind))
    assert armed == c.ArmCallRetry(bind.call_id, h.now_ms + 10)
    assert h.decide() == []
    h.now_ms += 10
    (sent,) = dispatches(h.post(e.RetryDue(bind.call_id)))
    assert (sent.call_id, sent.attempt_seq, sent.attempt) == (bind.call_id, 3, 1)


@pytest.mark.requirement("X26", "X70")
@pytest.mark.parametrize("what", ["freed context", "snapshot", "the timer of another"])
def test_a_parked_one_is_looked_at_again(what: str) -> None:
    h = Harness(executors=1)
    parent, other = dispatches(h.begin(PLAIN, PLAIN))
    h.handle(e.SubcallRequested(parent.executor_id, parent.call_id, 1, "r", PLAIN, b"1"))
    for _ in range(3):
        (bind,) = h.decide()
        h.handle(refused(bind))
        h.now_ms += 20
        h.handle(e.RetryDue(bind.call_id))
    h.decide()
    h.handle(e.CallRefused("t-0/sub-1", 4, ""))
    assert h.decide() == []
    if what == "freed context":
        assert dispatches(h.complete(other))
        return
    h.now_ms += 1_000
    assert h.decide() == []
    event = e.RetryDue(other.call_id) if what == "the timer of another" else None
    assert dispatches(h.post(event or e.SnapshotUpdated(h.snapshot("exec-0", seq=2))))


@pytest.mark.requirement("X26")
def test_parked_ones_go_on_in_order() -> None:
    h = Harness(executors=1)
    parent = parent_of(h)
    for number in range(3):
        h.handle(e.SubcallRequested(parent.executor_id, parent.call_id, 1, f"r{number}", PLAIN, b"%d" % number))
    (bind,) = h.decide()
    h.handle(refused(bind))
    assert [sent.args for sent in dispatches(h.turn())] == [b"0", b"1", b"2"]


@pytest.mark.requirement("X30")
def test_spread_goes_to_others_and_comes_home_when_they_are_full() -> None:
    h = Harness(executors=3, contexts=8, executor_max_runnable=1)
    parent = parent_of(h)
    places = [h.call(parent, PLAIN, b"%d" % number, spread=True).executor_id for number in range(4)]
    assert sorted(places[:2]) == ["exec-1", "exec-2"]
    assert places[2:] == [parent.executor_id] * 2
    assert h.call(parent, PLAIN, b"x").executor_id == parent.executor_id


@pytest.mark.requirement("X30")
def test_spread_stays_within_the_bundle() -> None:
    h = Harness(executors=2)
    other = function("f", digest=Digest("other"))
    first, second = dispatches(h.begin(PLAIN, other))
    assert first.executor_id != second.executor_id
    assert h.call(first, PLAIN, b"1", spread=True).executor_id == first.executor_id


@pytest.mark.requirement("X80", "X26")
def test_the_nested_submit_that_deadlocks_process_pools() -> None:
    """One executor that takes one root call, and each call makes a subcall, to depth 8."""
    h = Harness(executors=1, contexts=1, executor_max_inflight=1)
    run_chains(h, calls=4, at_once=1)


@pytest.mark.requirement("X80", "X25")
def test_128_parents_with_chains_of_depth_8_on_one_executor() -> None:
    h = Harness(executors=1, contexts=128)
    run_chains(h, calls=128, at_once=128)


@pytest.mark.requirement("X80", "X14")
def test_chains_that_have_begun_end_after_fail_fast() -> None:
    h = Harness(executors=1, contexts=129, executor_max_inflight=129, executor_max_runnable=200)
    h.scheduler.check_invariants = lambda: None  # type: ignore[method-assign]
    h.open(on_failure="fail_fast", streaming=False)
    h.commit(200)
    bad, *parents = dispatches(h.turn())
    assert len(parents) == 128
    h.fail(bad)
    deepest = [deepen(h, parent) for parent in parents]
    for chain in deepest:
        unwind(h, chain)
    done = converged(h.stop_production())
    ends = [result.failure and (result.failure.kind, result.attempts) for result in done.results]
    assert ends == [(ErrorKind.INTERNAL, 1), *[None] * 128, *[(ErrorKind.CANCELLED, 0)] * 71]
    assert all(result.failure.outcome is Outcome.NOT_RUN for result in done.results[129:])
    assert done.stop_reason is StopReason.FAIL_FAST


def deepen(h: Harness, sent: c.DispatchCall) -> list[c.DispatchCall]:
    chain = [sent]
    for depth in range(8):
        chain.append(h.call(chain[-1], PLAIN, b"%d" % depth))
    return chain


def unwind(h: Harness, chain: list[c.DispatchCall]) -> None:
    """The deepest ends first; each end resumes the one above."""
    for sent in reversed(chain[1:]):
        (resume,) = resumes(h.complete(sent))
        h.resume(resume)
    h.post(e.CallCompleted(chain[0].executor_id, chain[0].call_id, 1, b"1"))


def run_chains(h: Harness, *, calls: int, at_once: int) -> None:
    h.scheduler.check_invariants = lambda: None  # type: ignore[method-assign]  # a scan per event: minutes
    h.open(streaming=False)
    h.commit(calls)
    waiting = dispatches(h.turn())
    assert len(waiting) == at_once
    finished = 0
    while waiting:
        chains = [deepen(h, sent) for sent in waiting]
        assert h.scheduler.statistics().inflight == 9 * at_once
        Scheduler.check_invariants(h.scheduler)
        for chain in chains:
            unwind(h, chain)
        finished += len(waiting)
        waiting = [
            c.DispatchCall(call.call_id, "t", call.executor.executor_id, 1, 1, call.target, call.args, False, 0)
            for call in h.scheduler._calls.values()
            if call.state is CallState.RUNNING
        ]
    Scheduler.check_invariants(h.scheduler)
    assert finished == calls
    assert converged(h.stop_production()).outputs == [b"1"] * calls


# --- ends -----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X29")
@pytest.mark.parametrize("how", ["completed", "failed", "retried", "stopped", "resume failed"])
def test_the_end_of_an_attempt_cancels_all_below_it(how: str) -> None:
    h = Harness(executors=2)
    parent = parent_of(h, IDEMPOTENT)
    child = h.call(parent, IDEMPOTENT, b"1")
    grandchild = h.call(child, PURE, spread=True)
    away = h.call(parent, IDEMPOTENT, b"2", spread=True)
    assert {grandchild.executor_id, away.executor_id} == {"exec-1"}
    match how:
        case "completed":
            commands = h.complete(parent)
        case "failed":
            commands = h.fail(parent)
        case "retried":
            commands = h.fail(parent, ErrorKind.TRANSIENT)
        case "stopped":
            commands = h.post(e.TaskStopped("t", StopReason.DEADLINE))
        case _:
            commands = h.post(e.ResumeSendFailed(parent.call_id, 1))
    told = [call_id for call_id in cancels(commands) if call_id != "t-0"]
    assert sorted(told) == sorted([child.call_id, grandchild.call_id, away.call_id])
    assert resumes(commands) == []
    assert not any(isinstance(command, c.BatchSettled) for command in commands)  # they drain first
    for sent in (grandchild, child, away):
        ends = h.fail(sent, ErrorKind.CANCELLED, outcome=Outcome.NOT_RUN)
        assert ends[0] == unbind(sent)
        assert resumes(ends) == []
    assert all(not ex.draining_subcalls for ex in h.scheduler._index.executors.values())
    assert all("/sub-" not in call_id for call_id in h.scheduler._calls)
    if how in ("completed", "failed"):
        assert "t-0" not in h.scheduler._calls


@pytest.mark.requirement("X29")
def test_those_never_bound_end_at_once() -> None:
    h = Harness(executors=1)
    parent = parent_of(h)
    h.handle(e.SubcallRequested(parent.executor_id, parent.call_id, 1, "r", PLAIN, b"1"))
    h.handle(e.CallCompleted(parent.executor_id, parent.call_id, 1, b"1"))
    assert h.scheduler.statistics().calls == 1
    assert [type(command) for command in h.turn()] == [c.BatchSettled]


@pytest.mark.requirement("X29", "X13")
def test_a_late_success_of_a_cancelled_subcall_is_told_to_nobody() -> None:
    h = Harness(executors=1)
    parent = parent_of(h)
    child = h.call(parent, PLAIN, b"1")
    h.complete(parent)
    commands = h.complete(child)
    assert [type(command) for command in commands] == [c.UnbindCall, c.BatchSettled]


@pytest.mark.requirement("X75")
def test_a_batch_settles_when_its_subcalls_are_gone() -> None:
    h = Harness(executors=1)
    h.open()
    h.commit(1)
    h.commit(1)
    one, two = dispatches(h.turn())
    child = h.call(one, PLAIN, b"1")
    assert not any(isinstance(command, c.BatchSettled) for command in h.complete(one))
    (settles,) = (command for command in h.complete(two) if isinstance(command, c.BatchSettled))
    assert settles.batch_index == 1
    h.stop_production()
    commands = h.lose(begun=[child.call_id])
    assert [command.batch_index for command in commands if isinstance(command, c.BatchSettled)] == [0]
    assert converged(commands).success


@pytest.mark.requirement("X29", "X62")
@pytest.mark.parametrize("begun", [True, False])
def test_a_spread_subcall_of_a_lost_executor(begun: bool) -> None:
    h = Harness(executors=2)
    parent = parent_of(h)
    child = h.call(parent, PLAIN, b"1", spread=True)
    below = h.call(child, PLAIN, b"2")
    home = h.call(below, PLAIN, b"3", spread=True)
    assert (child.executor_id, below.executor_id, home.executor_id) == ("exec-1", "exec-1", "exec-0")
    if begun:
        commands = h.lose("exec-1", begun=[child.call_id])
        (resume,) = resumes(commands)
        assert resume.call_id == "t-0"
        assert resume.failure.kind is ErrorKind.CRASHED
        assert cancels(commands) == [home.call_id]  # what it had spread elsewhere
        return
    lone = h.call(parent, PLAIN, b"4", spread=True)
    (again,) = dispatches(h.lose("exec-1"))[:1]
    assert (again.call_id, again.executor_id, again.attempt) == (lone.call_id, "exec-0", 1)


@pytest.mark.requirement("X29", "X63")
def test_a_lost_executor_takes_the_family_with_it() -> None:
    h = Harness(executors=2)
    parent = parent_of(h, PLAIN)
    child = h.call(parent, PLAIN, b"1")
    h.call(child, PLAIN, b"2")
    away = h.call(child, PLAIN, b"3", spread=True)
    commands = h.lose(parent.executor_id, begun=[parent.call_id, child.call_id])
    assert (cancels(commands), resumes(commands)) == ([away.call_id], [])
    assert settled(commands) == []
    (result,) = settled(h.fail(away, ErrorKind.CANCELLED))
    assert (result.failure.kind, result.failure.outcome) == (ErrorKind.CRASHED, Outcome.UNKNOWN)


@pytest.mark.requirement("X62")
def test_a_subcall_that_is_given_back_is_bound_again() -> None:
    h = Harness(executors=1)
    child = h.call(parent_of(h), PLAIN, b"1")
    commands = h.fail(child, ErrorKind.CANCELLED, outcome=Outcome.NOT_RUN, recalled=True)
    (again,) = dispatches(commands)
    assert (again.call_id, again.attempt_seq, again.attempt) == (child.call_id, 2, 1)


@pytest.mark.requirement("X84", "X28")
def test_a_subcall_that_cannot_be_sent_resumes_its_parent() -> None:
    h = Harness(executors=1)
    child = h.call(parent_of(h), PLAIN, b"1")
    (resume,) = resumes(h.post(e.DispatchRejected(child.call_id, 1, ErrorKind.DENIED, "audit")))
    assert (resume.failure.kind, resume.failure.attempts) == (ErrorKind.DENIED, 0)


# --- promises -------------------------------------------------------------------------------------------------------


def retried(commands: list) -> bool:
    return any(isinstance(command, c.ArmCallRetry) for command in commands)


@pytest.mark.requirement("X64")
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("how", ["lost", "overrun", "resume failed"])
def test_an_attempt_that_made_an_unpromised_subcall_is_not_retried(depth: int, ended: bool, how: str) -> None:
    """An idempotent parent calls charge(): it is charged once, and the parent ends crashed, outcome unknown."""
    h = Harness(executors=2)
    parent = parent_of(h, IDEMPOTENT)
    sent = parent
    for level in range(depth - 1):
        sent = h.call(sent, IDEMPOTENT, b"%d" % level)
    charge = h.call(sent, function("charge"))
    if ended:
        h.resume(resumes(h.complete(charge))[0])
    match how:
        case "lost":
            commands = h.lose(parent.executor_id, begun=[parent.call_id])
        case "overrun":
            commands = h.fail(parent, ErrorKind.TIMEOUT)
        case _:
            commands = h.post(e.ResumeSendFailed(parent.call_id, 1))
    assert not retried(commands)
    failure = h.state("t-0").batch.results[0].failure if "t-0" in h.scheduler._calls else settled(commands)[0].failure
    assert failure.outcome is Outcome.UNKNOWN
    assert not failure.retryable


@pytest.mark.requirement("X64")
@pytest.mark.parametrize("target", [IDEMPOTENT, PURE])
def test_promised_subcalls_leave_the_promise_whole(target) -> None:
    h = Harness(executors=1)
    parent = parent_of(h, IDEMPOTENT)
    h.call(parent, target, b"1")
    assert retried(h.lose(parent.executor_id, begun=[parent.call_id]))


@pytest.mark.requirement("X64")
def test_a_hit_ran_nothing() -> None:
    h = Harness(executors=2)
    charge = function("charge")
    first, parent = dispatches(h.begin((charge, b"[5]"), IDEMPOTENT, cache="all"))
    assert h.ask(parent, charge, b"[5]") == []  # it waits for the call that runs
    (resume,) = resumes(h.complete(first))
    h.resume(resume)
    (resume,) = resumes(h.ask(parent, charge, b"[5]"))
    h.resume(resume)
    assert retried(h.lose(parent.executor_id, begun=[parent.call_id]))


@pytest.mark.requirement("X64")
def test_the_users_own_word_that_nothing_was_done_is_believed_a_failure_handed_on_is_not() -> None:
    for details, again in (({}, True), ({"cause": {"kind": "crashed"}}, False)):
        h = Harness(executors=1)
        parent = parent_of(h, IDEMPOTENT)
        h.resume(resumes(h.complete(h.call(parent, PLAIN)))[0])
        commands = h.fail(parent, ErrorKind.TRANSIENT, details=details)
        assert retried(commands) is again
        if not again:
            assert settled(commands)[0].failure.outcome is Outcome.UNKNOWN


@pytest.mark.requirement("X64")
def test_a_new_attempt_is_judged_by_what_it_does_itself() -> None:
    h = Harness(executors=1)
    parent = parent_of(h, IDEMPOTENT)
    h.resume(resumes(h.complete(h.call(parent, PLAIN)))[0])
    assert retried(h.fail(parent, ErrorKind.TRANSIENT))
    h.now_ms += 1_000
    (again,) = dispatches(h.post(e.RetryDue(parent.call_id)))
    assert retried(h.fail(again, ErrorKind.TIMEOUT))


def test_the_tenant_and_the_place_are_the_parents() -> None:
    h = Harness(executors=1)
    h.open(tenant="acme")
    h.commit(3)
    sent = dispatches(h.turn())[2]
    child = h.call(sent, PLAIN, b"1")
    call = h.scheduler.find_call(child.call_id)
    assert (call.task.plan.tenant, call.index, call.batch.index) == ("acme", 2, 0)


def test_a_plan_of_old_fields_still_does() -> None:
    plan = TaskPlan("t")
    assert (plan.cache, plan.on_failure) == ("promised", "continue")
