"""Equal calls of a task: cached results, and one run for many."""

from __future__ import annotations

import msgspec
import pytest

from callyard.errors import ErrorKind, Outcome
from callyard.scheduler import FunctionTarget, StopReason
from callyard.scheduler import commands as c
from callyard.scheduler import events as e
from callyard.scheduler.cache import KEY_BYTES, ResultCache, key_of

from .harness import (
    IDEMPOTENT,
    PLAIN,
    PURE,
    Harness,
    cancels,
    converged,
    dispatches,
    function,
    resumes,
    rows,
    settled,
)


def hits(commands: list) -> list[str]:
    return [command.call_id for command in commands if isinstance(command, c.CompleteCallFromCache)]


def runs(commands: list) -> list[str]:
    return [sent.call_id for sent in dispatches(commands)]


# --- the promise ----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X15", "X16", "X7")
@pytest.mark.parametrize(
    ("target", "cache", "shared"),
    [
        (PURE, "promised", True),
        (PURE, "all", True),
        (PURE, "off", False),
        (PLAIN, "promised", False),
        (IDEMPOTENT, "promised", False),
        (PLAIN, "all", True),
    ],
)
def test_only_a_promise_or_the_tasks_word_shares_a_run(target: FunctionTarget, cache: str, shared: bool) -> None:
    """`charge(5)` twice in a list is two charges."""
    h = Harness(executors=1)
    commands = h.begin((target, b"[5]"), (target, b"[5]"), cache=cache)
    assert runs(commands) == (["t-0"] if shared else ["t-0", "t-1"])


# --- the cache ------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X15", "X6")
def test_a_result_once_known_ends_its_equals_without_a_run() -> None:
    h = Harness(executors=1)
    (sent,) = dispatches(h.begin(PURE))
    h.complete(sent, b"42")
    h.commit(1, target=PURE)
    commands = h.turn()
    assert hits(commands) == ["t-1"]
    assert dispatches(commands) == []
    (result,) = settled(commands)
    assert (result.output, result.attempts) == (b"42", 0)
    assert h.scheduler.statistics().shared == 1


@pytest.mark.requirement("X15", "X25")
def test_the_key_is_function_digest_and_the_bytes_as_sent() -> None:
    h = Harness()
    plan = h.open()
    twin = function("p", pure=True)
    calls = [
        (PURE, b"[1]"),
        (twin, b"[1]"),
        (PURE, b"[1 ]"),
        (PURE, b"[2]"),
        (function("pp", pure=True), b"[1]"),
        (function("p", pure=True, digest="dd"), b"[1]"),
    ]
    h.commit(rows(*calls))
    keys = [key_of(h.state(f"t-{index}")) for index in range(len(calls))]
    assert keys[0] == keys[1]
    assert len(set(keys)) == len(calls) - 1
    assert {len(key) for key in keys} == {KEY_BYTES} == {16}
    assert plan.cache == "promised"


@pytest.mark.requirement("X15")
def test_what_is_read_otherwise_has_another_key() -> None:
    """Cells of a CSV row are text to be parsed; a row may be the whole of a parameter."""
    takes_row = function("p", pure=True, takes_row=True)
    h = Harness()
    h.open("t", takes_rows=True)
    h.open("u")
    base = rows((takes_row, b'{"a":1}'), (PURE, b'{"a":1}'))
    cells = [msgspec.structs.replace(row, strings=True) for row in base]
    h.commit(base, name="t")
    h.commit(cells, name="u")
    row, plain, row_cells, cells_only = (key_of(h.state(name)) for name in ("t-0", "t-1", "u-0", "u-1"))
    assert len({row, plain, row_cells}) == 3
    assert row_cells == cells_only  # of another task: its rows are no whole parameters


@pytest.mark.requirement("X15")
@pytest.mark.parametrize(
    ("plan", "binary_shares", "plain_shares"),
    [
        ({}, False, True),
        ({"binary": True}, True, True),
        ({"nan_null": True}, False, False),
        ({"binary": True, "nan_null": True}, False, False),
    ],
)
def test_who_asks_for_another_form_of_the_result_has_a_run_of_its_own(
    plan: dict[str, bool], binary_shares: bool, plain_shares: bool
) -> None:
    """A subcall's result is for Python, and NaN in it stays: a root of the same arguments may be promised JSON."""
    binary = function("binary", pure=True, binary=True)
    h = Harness(executors=1)
    parent, *_ = dispatches(h.begin(PLAIN, (binary, b"[5]"), (PURE, b"[5]"), **plan))
    assert (dispatches(h.ask(parent, binary, b"[5]")) == []) is binary_shares
    assert (dispatches(h.ask(parent, PURE, b"[5]")) == []) is plain_shares


@pytest.mark.requirement("X15")
def test_only_successes_are_kept_and_only_in_their_task() -> None:
    h = Harness(executors=1)
    (sent,) = dispatches(h.begin(PURE))
    h.fail(sent)
    h.commit(1, target=PURE)
    (again,) = dispatches(h.turn())
    h.complete(again)
    assert runs(h.begin(PURE, name="u")) == ["u-0"]


@pytest.mark.requirement("X15", "X85")
def test_roots_and_subcalls_share_and_a_hit_is_free() -> None:
    h = Harness(executors=1)
    sent, parent = dispatches(h.begin(PURE, (PLAIN, b"[9]"), default_budget_ms=100))
    h.complete(sent, b"42", budget_used_ms=77)
    (resume,) = h.ask(parent, PURE, request="r")
    assert resume == c.ResumeParent("t-1", "exec-0", 1, "r", b"42", None, 0)
    h.resume(resume)
    assert h.state("t-1").ties.charged_ms == 0
    child = h.call(parent, PURE, b"[7]")
    h.complete(child, b"49")
    h.commit([msgspec.structs.replace(row, index=2) for row in rows((PURE, b"[7]"))])
    assert hits(h.turn()) == ["t-2"]


@pytest.mark.requirement("X15")
def test_the_least_recently_used_goes_first() -> None:
    cache = ResultCache(entries_max=3, bytes_max=1_000)
    for key in (b"a", b"b", b"c"):
        cache.put(key, key)
    assert cache.get(b"a") == b"a"
    cache.put(b"d", b"d")
    assert [cache.get(key) for key in (b"a", b"b", b"c", b"d")] == [b"a", None, b"c", b"d"]


@pytest.mark.requirement("X15")
def test_bytes_are_bounded_and_one_too_large_is_not_kept() -> None:
    cache = ResultCache(entries_max=100, bytes_max=100)
    cache.put(b"big", bytes(100 - KEY_BYTES + 1))
    assert (len(cache.entries), cache.held_bytes) == (0, 0)
    for number in range(20):
        cache.put(b"%d" % number, bytes(10))
        assert cache.held_bytes <= 100
    assert (len(cache.entries), cache.held_bytes) == (3, 78)
    cache.put(b"19", bytes(20))
    assert (len(cache.entries), cache.held_bytes) == (3, 88)


@pytest.mark.requirement("X15")
def test_the_settings_bound_it() -> None:
    h = Harness(executors=1, cache_entries=2)
    for sent in dispatches(h.begin(*((PURE, b"%d" % number) for number in range(5)))):
        h.complete(sent)
    assert len(h.scheduler._tasks["t"].sharing.cache.entries) == 2


# --- one run for many -----------------------------------------------------------------------------------------------


@pytest.mark.requirement("X16", "X7")
def test_a_run_of_equal_calls_waits_for_the_first() -> None:
    h = Harness(executors=1)
    commands = h.begin(PURE, PURE, (PURE, b"[2]"), PURE)
    assert runs(commands) == ["t-0", "t-2"]
    first, other = dispatches(commands)
    assert hits(h.complete(first, b"1")) == ["t-1", "t-3"]
    assert [result.attempts for result in settled(h.complete(other))] == [1, 0, 1, 0]


@pytest.mark.requirement("X16")
@pytest.mark.parametrize("kind", [ErrorKind.INTERNAL, ErrorKind.SCHEMA, ErrorKind.RESULT, ErrorKind.TOOL_ERROR])
def test_the_calls_own_failure_is_shared(kind: ErrorKind) -> None:
    h = Harness(executors=1)
    (sent,) = dispatches(h.begin(PURE, PURE, PURE, streaming=False))
    commands = h.fail(sent, kind)
    assert (hits(commands), dispatches(commands)) == (["t-1", "t-2"], [])
    results = converged(commands + h.stop_production()).results
    assert [result.failure.kind for result in results] == [kind] * 3
    counts = [(result.attempts, result.failure.attempts) for result in results]
    assert counts == [(0, 0) if kind is ErrorKind.SCHEMA else (1, 1), (0, 0), (0, 0)]


@pytest.mark.requirement("X16")
@pytest.mark.parametrize("kind", [ErrorKind.CRASHED, ErrorKind.TIMEOUT, ErrorKind.CANCELLED, ErrorKind.DEADLINE])
def test_after_another_failure_the_oldest_waiter_leads(kind: ErrorKind) -> None:
    h = Harness(executors=1)
    (sent,) = dispatches(h.begin(*[PURE] * 5, streaming=False, max_attempts=1))
    commands = h.fail(sent, kind, outcome=Outcome.UNKNOWN)
    assert (hits(commands), runs(commands)) == (["t-1", "t-2", "t-3", "t-4"], [])  # max_attempts leaders: one
    h = Harness(executors=1)
    (sent,) = dispatches(h.begin(*[PURE] * 5, streaming=False, max_attempts=2, base_backoff_ms=0))
    if kind in (ErrorKind.CRASHED, ErrorKind.TIMEOUT):  # its own retry comes first
        h.fail(sent, kind, outcome=Outcome.UNKNOWN)
        (sent,) = dispatches(h.post(e.RetryDue("t-0")))
    (second,) = dispatches(h.fail(sent, kind, outcome=Outcome.UNKNOWN))
    assert (second.call_id, second.attempt) == ("t-1", 1)
    if kind in (ErrorKind.CRASHED, ErrorKind.TIMEOUT):
        h.fail(second, kind, outcome=Outcome.UNKNOWN)
        (second,) = dispatches(h.post(e.RetryDue("t-1")))
    commands = h.fail(second, kind, outcome=Outcome.UNKNOWN)
    assert (hits(commands), dispatches(commands)) == (["t-2", "t-3", "t-4"], [])
    results = converged(commands + h.stop_production()).results
    assert {result.failure.kind for result in results} == {kind}
    assert [result.attempts for result in results[2:]] == [0, 0, 0]


@pytest.mark.requirement("X16")
def test_a_later_leader_resolves_the_rest() -> None:
    h = Harness(executors=1)
    (sent,) = dispatches(h.begin(PURE, PURE, PURE, base_backoff_ms=0, max_attempts=2, streaming=False))
    h.lose(begun=["t-0"])
    h.attach("exec-1")
    (sent,) = dispatches(h.post(e.RetryDue("t-0")))
    (second,) = dispatches(h.fail(sent, ErrorKind.TIMEOUT))
    commands = h.complete(second, b"5")
    assert hits(commands) == ["t-2"]
    done = converged(commands + h.stop_production())
    assert (done.outputs, [result.attempts for result in done.results]) == ([b"5", b"5"], [2, 1, 0])


@pytest.mark.requirement("X16")
def test_a_cancelled_waiter_leaves_the_rest_alone() -> None:
    h = Harness(executors=1)
    sent, one, two = dispatches(h.begin(PURE, (PLAIN, b"[1]"), (PLAIN, b"[2]")))
    assert h.ask(one, PURE) == []
    assert h.ask(two, PURE) == []
    commands = h.complete(one)
    assert (cancels(commands), resumes(commands)) == ([], [])
    (resume,) = resumes(h.complete(sent, b"3"))
    assert (resume.call_id, resume.output, resume.budget_used_ms) == ("t-2", b"3", 0)


@pytest.mark.requirement("X16", "X29")
def test_a_leader_whose_parent_ends_hands_on() -> None:
    """Its run is cancelled with its family: the one who still wants the result runs it."""
    h = Harness(executors=1)
    one, two = dispatches(h.begin((PLAIN, b"[1]"), (PLAIN, b"[2]")))
    leader = h.call(one, PURE)
    assert h.ask(two, PURE) == []
    assert cancels(h.complete(one)) == [leader.call_id]
    (second,) = dispatches(h.fail(leader, ErrorKind.CANCELLED))
    assert second.parent_call_id == "t-1"
    assert resumes(h.complete(second, b"3"))[0].output == b"3"


@pytest.mark.requirement("X16")
def test_a_late_success_of_a_cancelled_leader_still_counts() -> None:
    h = Harness(executors=1)
    one, two = dispatches(h.begin((PLAIN, b"[1]"), (PLAIN, b"[2]")))
    leader = h.call(one, PURE)
    h.ask(two, PURE)
    h.complete(one)
    assert [resume.call_id for resume in resumes(h.complete(leader, b"3"))] == ["t-1"]


@pytest.mark.requirement("X16", "X80")
def test_a_subcall_does_not_wait_for_a_root_that_holds_no_place() -> None:
    """One executor of one place: the root's only place is the one that the subcall's parent holds."""
    h = Harness(executors=2, contexts=1)
    leader, parent = dispatches(h.begin(PURE, (PLAIN, b"[1]")))
    h.lose(leader.executor_id)  # unbegun: it stands at the head of the queue, and no executor has room
    assert h.state("t-0").queued
    child = h.call(parent, PURE)
    commands = h.complete(child, b"3")
    assert (len(resumes(commands)), hits(commands)) == (1, ["t-0"])


@pytest.mark.requirement("X16", "X80")
def test_a_subcall_that_waits_goes_before_roots_when_a_leader_ends() -> None:
    h = Harness(executors=2, contexts=1)
    leader, parent = dispatches(h.begin(PURE, (PLAIN, b"[1]"), PURE, max_attempts=2, base_backoff_ms=0))
    assert h.ask(parent, PURE) == []
    (child,) = dispatches(h.lose(leader.executor_id, begun=["t-0"]))
    assert child.parent_call_id == "t-1"
    assert h.post(e.RetryDue("t-0")) == []  # it is an equal call like any other now
    assert hits(h.complete(child)) == ["t-2", "t-0"]


@pytest.mark.requirement("X16")
def test_what_a_leader_met_for_where_it_stands_is_no_answer_to_its_equals() -> None:
    """Too deep there is not too deep at the top."""
    h = Harness(executors=1, max_subcall_depth=1)
    parent, waiting = dispatches(h.begin((PLAIN, b"[1]"), (PLAIN, b"[2]"), max_attempts=2))
    leader = h.call(parent, PURE)
    assert h.ask(waiting, PURE) == []
    (refused,) = resumes(h.ask(leader, function("deeper", pure=True)))
    assert refused.failure.details["reason"] == "depth"
    h.resume(refused)
    (second,) = dispatches(h.fail(leader, ErrorKind.INTERNAL))
    assert second.parent_call_id == "t-1"
    h.complete(second, b"1")
    assert len(h.scheduler._tasks["t"].sharing.cache.entries) == 1


@pytest.mark.requirement("X16", "X95")
def test_what_a_leader_met_for_what_others_wait_for_is_no_answer_to_its_equals() -> None:
    """On another executor, or a moment later, there is room for its arguments."""
    h = Harness(executors=1, subcall_args_bytes_max=20)
    leader, other = dispatches(h.begin(PURE, (PLAIN, b"[2]"), PURE, max_attempts=2))
    held = h.call(other, PURE, b'["1234567890123"]')
    (refused,) = resumes(h.ask(leader, PURE, b'["123"]'))
    assert refused.failure.kind is ErrorKind.RESOURCE_LIMIT
    h.resume(refused)
    h.complete(held)
    (second,) = dispatches(h.fail(leader, ErrorKind.INTERNAL))
    assert second.call_id == "t-2"


@pytest.mark.requirement("X45", "X16")
def test_a_result_that_a_crash_has_shaped_is_not_kept() -> None:
    h = Harness(executors=2)
    (leader,) = dispatches(h.begin(PURE))
    child = h.call(leader, function("below", pure=True), spread=True)
    (resume,) = resumes(h.lose(child.executor_id, begun=[child.call_id]))
    h.resume(resume)
    h.complete(leader, b"a guess")
    assert not h.scheduler._tasks["t"].sharing.cache.entries


@pytest.mark.requirement("X23", "X7")
def test_a_million_equal_calls_are_set_aside_a_few_at_a_time() -> None:
    h = Harness(executors=1)
    h.open()
    h.commit(1_000, target=PURE)
    (bind,) = h.decide()
    h.handle(e.ExecutorBound(bind.call_id))
    left = []
    while h.decide() or not h.scheduler.is_settled:
        left.append(h.ready_count("t"))
        h.scheduler.flush_dirty_tasks(h.now_ms)
    assert left[0] == 999 - 64
    assert h.ready_count("t") == 0
    assert len(left) <= 17


# --- rings ----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X67", "X25")
@pytest.mark.parametrize("first", ["a", "b"])
def test_two_roots_that_call_each_other_end_with_the_cycle_and_need_no_timer(first: str) -> None:
    """a() calls b() and b() calls a(), both pure, at the same time on two executors."""
    a, b = function("a", pure=True), function("b", pure=True)
    h = Harness(executors=2, contexts=1)
    roots = {sent.target.function_id: sent for sent in dispatches(h.begin(a, b, streaming=False, max_attempts=1))}
    assert len({sent.executor_id for sent in roots.values()}) == 2
    second = "b" if first == "a" else "a"
    targets = {"a": a, "b": b}
    assert h.ask(roots[first], targets[second]) == []  # it waits for the root that runs
    alone = h.call(roots[second], targets[first])  # it would wait for itself: it runs on its own
    (refused,) = resumes(h.ask(alone, targets[second]))
    assert (refused.failure.kind, refused.failure.details["reason"]) == (ErrorKind.DENIED, "cycle")
    h.resume(refused)
    (resume,) = resumes(h.fail(alone, ErrorKind.INTERNAL, details={"cause": {"kind": "denied"}}))
    h.resume(resume)
    commands = h.fail(roots[second], ErrorKind.INTERNAL)
    (resume,) = resumes(commands)
    h.resume(resume)
    done = converged(h.fail(roots[first], ErrorKind.INTERNAL) + h.stop_production())
    assert [result.failure.kind for result in done.results] == [ErrorKind.INTERNAL] * 2


@pytest.mark.requirement("X67")
def test_a_ring_of_three_through_waiters() -> None:
    a, b, d = (function(name, pure=True) for name in "abd")
    h = Harness(executors=3, contexts=1)
    one, two, three = dispatches(h.begin(a, b, d))
    assert h.ask(one, b) == []
    assert h.ask(two, d) == []
    assert dispatches(h.ask(three, a))  # the third closes the ring


@pytest.mark.requirement("X67")
def test_a_wait_that_closes_no_ring_begins() -> None:
    a, b = function("a", pure=True), function("b", pure=True)
    h = Harness(executors=3, contexts=1)
    one, two, three = dispatches(h.begin(a, b, (PLAIN, b"[3]")))
    assert h.ask(one, b) == []
    assert h.ask(three, a) == []
    (resume,) = resumes(h.complete(two, b"2"))
    h.resume(resume)
    assert [resume.call_id for resume in resumes(h.complete(one, b"1"))] == ["t-2"]


# --- stops ----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X14", "X16", "X77")
@pytest.mark.parametrize("cancel_running", [True, False])
def test_a_stop_ends_waiters_as_never_run(cancel_running: bool) -> None:
    h = Harness(executors=1)
    (sent,) = dispatches(h.begin(*[PURE] * 4, streaming=False))
    h.post(e.TaskStopped("t", StopReason.CANCELLED, cancel_running=cancel_running))
    commands = h.fail(sent, ErrorKind.CANCELLED if cancel_running else ErrorKind.TIMEOUT)
    results = converged(commands + h.stop_production()).results
    ends = [(result.failure.kind, result.failure.outcome, result.attempts) for result in results[1:]]
    assert ends == [(ErrorKind.CANCELLED, Outcome.NOT_RUN, 0)] * 3


@pytest.mark.requirement("X80", "X16")
def test_a_waiting_subcall_of_a_stopped_task_leads_and_ends() -> None:
    h = Harness(executors=1)
    sent, parent = dispatches(h.begin(PURE, (PLAIN, b"[1]"), PURE))
    assert h.ask(parent, PURE) == []
    h.post(e.TaskStopped("t", StopReason.MAX_FAILURES, cancel_running=False))
    (child,) = dispatches(h.fail(sent, ErrorKind.TIMEOUT))
    assert child.parent_call_id == "t-1"


@pytest.mark.requirement("X83")
def test_the_order_at_the_terminal_frame_of_a_tied_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reservation released, state DONE, cache written, waiters resolved, subtree cancelled, task dirty, epilogue."""
    from callyard.scheduler.calls import Call, Trigger
    from callyard.scheduler.core import Scheduler
    from callyard.scheduler.epilogue import Epilogue

    h = Harness(executors=1)
    sent, parent = dispatches(h.begin(PURE, (PLAIN, b"[1]")))
    h.call(sent, function("below", pure=True))
    assert h.ask(parent, PURE) == []
    order: list[str] = []

    def record(owner: type, name: str, text: str) -> None:
        real = getattr(owner, name)

        def recorded(*args: object, **named: object) -> object:
            if name != "apply" or (args[1] is Trigger.FINISHED and args[0].call_id == "t-0"):
                order.append(text)
            return real(*args, **named)

        monkeypatch.setattr(owner, name, recorded)

    record(Scheduler, "_release", "released")
    record(Call, "apply", "done")
    record(ResultCache, "put", "cached")
    record(Scheduler, "_finish_shared", "waiter")
    record(Scheduler, "_cancel_subtree", "subtree")
    h.scheduler._mark_dirty = lambda task: (order.append("dirty"), h.scheduler._epilogue.mark(task))
    record(Epilogue, "flush", "epilogue")
    commands = h.handle(e.CallCompleted(sent.executor_id, sent.call_id, 1, b"1"))
    h.scheduler.flush_dirty_tasks(h.now_ms)
    own = [step for step in order if step not in ("subtree",) or order.index(step) > order.index("waiter")]
    assert [step for number, step in enumerate(own) if step not in own[:number]] == [
        "released",
        "done",
        "cached",
        "waiter",
        "subtree",
        "dirty",
        "epilogue",
    ]
    assert [type(command) for command in commands] == [c.UnbindCall, c.ResumeParent, c.CancelCall]
