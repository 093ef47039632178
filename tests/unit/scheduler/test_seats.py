"""`max_concurrency`, kept over tasks, roots and subcalls."""

from __future__ import annotations

import pytest

from callyard.errors import ErrorKind, Outcome
from callyard.scheduler import StopReason
from callyard.scheduler import commands as c
from callyard.scheduler import events as e

from .harness import DIGEST, PLAIN, Harness, converged, dispatches, function, refused, resumes, rows, settled

LIMITED = function("limited", max_concurrency=1)
TWO = function("two", max_concurrency=2)


def runs(commands: list) -> list[str]:
    return [sent.call_id for sent in dispatches(commands)]


@pytest.mark.requirement("X81")
def test_so_many_at_once_and_nobody_else_is_held_back() -> None:
    h = Harness(executors=2)
    commands = h.begin(TWO, TWO, TWO, TWO, PLAIN, PLAIN)
    assert runs(commands) == ["t-0", "t-1", "t-4", "t-5"]
    sent = dispatches(commands)
    assert runs(h.complete(sent[1])) == ["t-2"]
    assert runs(h.complete(sent[2])) == []
    assert runs(h.fail(sent[0])) == ["t-3"]
    assert not any(call.ties and call.ties.line for call in h.scheduler._calls.values())


@pytest.mark.requirement("X81")
def test_the_limit_is_over_all_tasks_and_tasks_take_turns() -> None:
    h = Harness(executors=1)
    (first,) = dispatches(h.begin(*[LIMITED] * 4, name="t"))
    assert runs(h.begin(*[LIMITED] * 2, name="u")) == []
    order = []
    while first is not None:
        order.append(first.call_id)
        following = dispatches(h.complete(first))
        first = following[0] if following else None
    assert order == ["t-0", "t-1", "u-0", "t-2", "u-1", "t-3"]


@pytest.mark.requirement("X81")
def test_another_version_has_seats_of_its_own() -> None:
    h = Harness(executors=2)
    other = function("limited", max_concurrency=1, digest="other")
    assert sorted(runs(h.begin(LIMITED, other))) == ["t-0", "t-1"]


@pytest.mark.requirement("X81")
def test_one_that_is_refused_gives_its_seat_back() -> None:
    h = Harness(executors=1)
    h.open()
    h.commit(rows(LIMITED, LIMITED))
    (bind,) = h.decide()
    h.handle(refused(bind))
    assert runs(h.turn()) == ["t-0"]
    assert h.scheduler._seats.lines["limited", DIGEST].waiting == 1


@pytest.mark.requirement("X81")
def test_a_call_below_one_of_the_same_function_shares_its_seat() -> None:
    h = Harness(executors=1)
    (parent,) = dispatches(h.begin((LIMITED, b"[1]"), (LIMITED, b"[9]")))
    between = h.call(parent, PLAIN)
    below = h.call(between, LIMITED, b"[2]")
    assert runs(h.fail(parent)) == []  # what it shares is still in use
    assert runs(h.fail(between, ErrorKind.CANCELLED)) == []
    assert runs(h.fail(below, ErrorKind.CANCELLED)) == ["t-1"]


@pytest.mark.requirement("X81")
def test_a_subcall_waits_for_a_seat_and_goes_before_roots() -> None:
    h = Harness(executors=1)
    holder, parent = dispatches(h.begin(LIMITED, PLAIN, LIMITED))
    assert h.ask(parent, LIMITED, b"[2]") == []
    (child,) = dispatches(h.complete(holder))
    assert child.parent_call_id == "t-1"
    assert runs(h.complete(child)) == ["t-2"]


@pytest.mark.requirement("X81", "X29")
def test_a_subcall_that_waits_for_a_seat_ends_with_its_parent() -> None:
    h = Harness(executors=1)
    holder, parent = dispatches(h.begin(LIMITED, PLAIN))
    h.ask(parent, LIMITED, b"[2]")
    h.complete(parent)
    assert runs(h.complete(holder)) == []
    assert not h.scheduler._seats.lines


@pytest.mark.requirement("X81")
def test_two_functions_that_call_each_other_close_no_ring() -> None:
    """a calls b and b calls a, max_concurrency 1 each, both at once: the second is refused at once."""
    a, b = function("a", max_concurrency=1), function("b", max_concurrency=1)
    h = Harness(executors=1)
    one, two = dispatches(h.begin(a, b, streaming=False))
    assert h.ask(one, b, b"[1]") == []
    (resume,) = resumes(h.ask(two, a, b"[2]"))
    failure = resume.failure
    assert (failure.kind, failure.details["reason"], failure.outcome) == (
        ErrorKind.DENIED,
        "cycle",
        Outcome.NOT_RUN,
    )
    h.resume(resume)
    (child,) = dispatches(h.fail(two))
    (resume,) = resumes(h.complete(child))
    h.resume(resume)
    done = converged(h.complete(one) + h.stop_production())
    assert [result.ok for result in done.results] == [True, False]


@pytest.mark.requirement("X81")
def test_a_ring_needs_all_the_holders() -> None:
    """Of two seats one holder can end by itself: the wait is no ring."""
    a, b = function("a", max_concurrency=2), function("b", max_concurrency=1)
    h = Harness(executors=1)
    one, two, _free = dispatches(h.begin((a, b"[1]"), (b, b"[1]"), (a, b"[2]")))
    assert h.ask(one, b, b"[3]") == []
    assert h.ask(two, a, b"[4]") == []


@pytest.mark.requirement("X81")
def test_a_root_that_is_called_for_a_seat_which_a_subcall_took_ends_no_ring() -> None:
    """It counted as a holder that can end, and the ring of the others closed beside it."""
    a, b = function("a", max_concurrency=1), function("b", max_concurrency=1)
    h = Harness(executors=1)
    one, two, holder = dispatches(h.begin(a, PLAIN, b, b))
    h.post(e.ExecutorSealed("exec-0"))
    h.begin(PLAIN, name="u")  # in turn before t-3, which nobody looks at so
    assert runs(h.complete(holder)) == []  # t-3 is called, and no executor takes it
    below_two = h.call(two, b, b"[2]")
    assert h.ask(one, b, b"[3]") == []
    (resume,) = resumes(h.ask(below_two, a, b"[4]"))
    assert resume.failure.details["reason"] == "cycle"


@pytest.mark.requirement("X81", "X36")
def test_a_seat_that_drains_is_no_part_of_a_ring() -> None:
    """Its owner waits in line for a seat itself, behind the attempt that it gave up."""
    a, b = function("a", max_concurrency=1), function("b", idempotent=True, max_concurrency=1)
    h = Harness(executors=1)
    one, owner = dispatches(h.begin(a, b, base_backoff_ms=1))
    h.post(e.CallSuspended(owner.executor_id, owner.call_id, 1, "r"))
    h.post(e.ResumeSendFailed(owner.call_id, 1))
    h.now_ms += 10
    assert dispatches(h.post(e.RetryDue(owner.call_id))) == []
    assert h.ask(one, b, b"[2]") == []  # it waits, and is not refused
    (child,) = dispatches(h.fail(owner, ErrorKind.CANCELLED))  # the old attempt has drained
    assert child.parent_call_id == one.call_id


@pytest.mark.requirement("X81", "X36")
def test_a_seat_that_drains_is_waited_for_though_its_owner_has_another() -> None:
    """And waits there for the one who comes now."""
    a, b = function("a", max_concurrency=1), function("b", idempotent=True, max_concurrency=2)
    h = Harness(executors=1)
    one, owner = dispatches(h.begin(a, b, base_backoff_ms=1))
    h.post(e.CallSuspended(owner.executor_id, owner.call_id, 1, "r"))
    h.post(e.ResumeSendFailed(owner.call_id, 1))
    h.now_ms += 10
    (again,) = dispatches(h.post(e.RetryDue(owner.call_id)))
    assert h.ask(again, a, b"[3]") == []
    assert h.ask(one, b, b"[2]") == []  # it waits, and is not refused
    (child,) = dispatches(h.fail(owner, ErrorKind.CANCELLED))  # the old attempt has drained
    assert child.parent_call_id == one.call_id


@pytest.mark.requirement("X81", "X67")
def test_a_ring_through_a_seat_and_an_equal_call() -> None:
    """`p` waits for a seat of `limited`, whose holder would wait for `p`."""
    p = function("p", pure=True)
    limited = function("limited", pure=True, max_concurrency=1)
    h = Harness(executors=2)
    one, two = dispatches(h.begin(p, (limited, b"[1]")))
    assert h.ask(one, limited, b"[2]") == []
    assert dispatches(h.ask(two, p))  # it runs on its own instead of waiting
    assert h.scheduler.statistics().shared == 0


@pytest.mark.requirement("X81", "X36")
def test_a_seat_stays_with_code_that_may_still_run() -> None:
    h = Harness(executors=1)
    limited = function("limited", idempotent=True, max_concurrency=1)
    (sent,) = dispatches(h.begin(limited, limited, base_backoff_ms=500))
    h.post(e.CallSuspended(sent.executor_id, sent.call_id, 1, "r"))
    commands = h.post(e.ResumeSendFailed(sent.call_id, 1))
    assert runs(commands) == []
    assert runs(h.fail(sent, ErrorKind.CANCELLED)) == ["t-1"]  # the old attempt has drained


@pytest.mark.requirement("X81", "X63")
def test_a_lost_executor_frees_its_seats() -> None:
    h = Harness(executors=2)
    (sent,) = dispatches(h.begin(LIMITED, LIMITED))
    assert runs(h.lose(sent.executor_id, begun=[sent.call_id])) == ["t-1"]


@pytest.mark.requirement("X81", "X14")
def test_a_stop_empties_the_line_of_its_task_only() -> None:
    h = Harness(executors=1)
    (sent,) = dispatches(h.begin(*[LIMITED] * 3, name="t", streaming=False))
    h.begin(*[LIMITED] * 2, name="u")
    h.post(e.TaskStopped("t", StopReason.CANCELLED))
    assert runs(h.fail(sent, ErrorKind.CANCELLED)) == ["u-0"]
    done = converged(h.stop_production("t"))
    assert [result.attempts for result in done.results] == [1, 0, 0]


@pytest.mark.requirement("X81", "X15")
def test_a_call_that_is_called_and_needs_no_seat_after_all_passes_it_on() -> None:
    limited = function("limited", pure=True, max_concurrency=1)
    h = Harness(executors=1)
    (sent,) = dispatches(h.begin((limited, b"[1]"), (limited, b"[2]"), (limited, b"[2]"), (limited, b"[3]")))
    (second,) = dispatches(h.complete(sent))
    assert second.call_id == "t-1"
    commands = h.complete(second, b"2")
    assert [command.call_id for command in commands if isinstance(command, c.CompleteCallFromCache)] == ["t-2"]
    assert runs(commands) == ["t-3"]


def test_no_executor_keeps_the_order() -> None:
    h = Harness()
    assert h.begin(LIMITED, LIMITED, PLAIN) == []
    h.attach("exec-0", contexts=1)
    (sent,) = dispatches(h.turn())
    assert sent.call_id == "t-0"
    assert runs(h.complete(sent)) == ["t-1"]
    assert settled(h.flush()) == []
