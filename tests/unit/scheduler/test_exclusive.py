"""Calls that share an executor with no other call."""

from __future__ import annotations

import pytest

from callyard.errors import ErrorKind
from callyard.ids import Digest
from callyard.scheduler import StopReason
from callyard.scheduler import commands as c
from callyard.scheduler import events as e
from callyard.scheduler.exclusives import PASSED_MAX
from callyard.scheduler.placement import DEFAULT_POOL

from .harness import PLAIN, Harness, cancels, converged, dispatches, function, refused, resumes, rows

ALONE = function("alone", exclusive=True)


def unmet_digests(h: Harness) -> list[str]:
    return [placement.digest for placement in h.scheduler.demand().unmet]


def places(commands: list) -> dict[str, str]:
    return {sent.call_id: sent.executor_id for sent in dispatches(commands)}


@pytest.mark.requirement("X90")
def test_it_takes_an_executor_for_itself_and_holds_nobody_back() -> None:
    h = Harness(executors=2)
    commands = h.begin(ALONE, PLAIN, ALONE, PLAIN, PLAIN)
    sent = places(commands)
    assert sorted(sent) == ["t-0", "t-1", "t-3", "t-4"]
    alone = sent.pop("t-0")
    assert alone not in sent.values()
    assert h.scheduler.exclusive_waiting(DEFAULT_POOL) == h.scheduler.statistics().exclusive_waiting == 1


@pytest.mark.requirement("X90")
def test_it_waits_until_nothing_is_live_or_draining() -> None:
    h = Harness(executors=1)
    one, two = dispatches(h.begin(PLAIN, PLAIN))
    h.commit([row for row in rows(PLAIN, PLAIN, ALONE) if row.index == 2])
    assert places(h.turn()) == {}
    assert places(h.complete(one)) == {}
    h.post(e.CallSuspended(two.executor_id, two.call_id, 1, "r"))
    h.post(e.ResumeSendFailed(two.call_id, 1))
    assert h.scheduler.exclusive_waiting(DEFAULT_POOL) == 1
    assert places(h.fail(two, ErrorKind.CANCELLED)) == {"t-2": "exec-0"}
    assert h.scheduler.exclusive_waiting(DEFAULT_POOL) == 0


@pytest.mark.requirement("X90")
def test_its_executor_takes_others_again_once_it_is_released() -> None:
    h = Harness(executors=1)
    (sent,) = dispatches(h.begin(ALONE, PLAIN))
    assert sent.target is ALONE
    assert places(h.complete(sent)) == {"t-1": "exec-0"}


@pytest.mark.requirement("X90", "X26")
def test_its_subcalls_run_beside_it_and_keep_the_executor_until_they_are_gone() -> None:
    h = Harness(executors=1)
    (sent,) = dispatches(h.begin(ALONE, PLAIN))
    child = h.call(sent, PLAIN, b"1")
    same = h.call(child, ALONE, b"2")
    assert {child.executor_id, same.executor_id} == {"exec-0"}
    commands = h.complete(sent)
    assert (cancels(commands), places(commands)) == ([child.call_id, same.call_id], {})
    assert places(h.fail(same, ErrorKind.CANCELLED)) == {}
    assert places(h.fail(child, ErrorKind.CANCELLED)) == {"t-1": "exec-0"}


@pytest.mark.requirement("X90")
def test_below_a_call_that_shares_its_process_it_is_refused() -> None:
    h = Harness(executors=2)
    (parent,) = dispatches(h.begin(PLAIN))
    (resume,) = resumes(h.ask(parent, ALONE))
    assert (resume.failure.kind, resume.failure.details["reason"]) == (ErrorKind.DENIED, "exclusive")
    assert "make it exclusive" in resume.failure.message


@pytest.mark.requirement("X90")
@pytest.mark.parametrize("executors", [1, 2, 4])
def test_under_a_steady_stream_of_others_it_gets_its_turn(executors: int) -> None:
    h = Harness(executors=executors, contexts=4)
    h.open()
    sent = []
    h.commit(40)
    sent += dispatches(h.turn())
    h.commit(1, target=ALONE)
    ended = 0
    while not any(one.target is ALONE for one in sent):
        h.commit(1)
        sent += dispatches(h.complete(sent.pop(0)))
        ended += 1
        assert ended <= PASSED_MAX + 4 * executors + 41
    (alone,) = (one for one in sent if one.target is ALONE)
    assert [one for one in sent if one.executor_id == alone.executor_id] == [alone]


@pytest.mark.requirement("X90")
def test_a_steady_stream_of_them_does_not_starve_the_others() -> None:
    h = Harness(executors=1, contexts=2)
    h.open()
    h.commit(rows(*[ALONE] * 5, *[PLAIN] * 5))
    running = dispatches(h.turn())
    order = []
    while running:
        sent = running.pop(0)
        order.append(sent.target.function_id)
        running += dispatches(h.complete(sent))
    assert sorted(order) == ["alone"] * 5 + ["f"] * 5
    assert order[:2] == ["alone", "f"]
    assert "alone" in order[1:-1]


@pytest.mark.requirement("X90")
def test_a_new_executor_takes_it_and_the_reserved_one_is_given_up() -> None:
    h = Harness(executors=1, contexts=100)
    h.open()
    h.commit(1)
    (first,) = dispatches(h.turn())
    h.commit(1, target=ALONE)
    h.commit(PASSED_MAX + 8)
    bound = dispatches(h.turn())
    assert len(bound) == PASSED_MAX
    assert h.scheduler._exclusives.reserved
    h.attach("exec-9")
    after = dispatches(h.turn())
    assert (after[0].target, after[0].executor_id) == (ALONE, "exec-9")
    assert {sent.executor_id for sent in after[1:]} == {first.executor_id}
    assert len(after) == 9


@pytest.mark.requirement("X90")
def test_a_refused_bind_puts_it_back() -> None:
    h = Harness(executors=1)
    h.open()
    h.commit(1, target=ALONE)
    (bind,) = h.decide()
    h.handle(refused(bind))
    (sent,) = dispatches(h.turn())
    assert (sent.call_id, sent.attempt) == ("t-0", 1)


@pytest.mark.requirement("X90")
def test_a_lost_executor_is_not_kept_for_it() -> None:
    h = Harness(executors=1, contexts=100)
    h.open()
    h.commit(1)
    h.turn()
    h.commit(1, target=ALONE)
    h.commit(PASSED_MAX + 2)
    h.turn()
    assert h.scheduler._exclusives.reserved
    h.lose()
    assert not h.scheduler._exclusives.reserved
    h.attach("exec-1")
    assert dispatches(h.turn())[0].target is ALONE


@pytest.mark.requirement("X90", "X14")
def test_a_stop_ends_those_that_wait() -> None:
    h = Harness(executors=1)
    (sent,) = dispatches(h.begin(PLAIN, ALONE, ALONE, streaming=False))[:1]
    h.post(e.TaskStopped("t", StopReason.CANCELLED))
    commands = h.fail(sent, ErrorKind.CANCELLED) + h.stop_production()
    if h.scheduler._calls:
        for call in list(h.scheduler._calls.values()):
            if call.executor is not None:
                commands += h.post(e.AttemptFailed(call.executor.executor_id, call.call_id, 1, ErrorKind.CANCELLED, ""))
    assert converged(commands).failed_count == 3
    assert h.scheduler.exclusive_waiting(DEFAULT_POOL) == 0


# --- bundles that nobody can take -----------------------------------------------------------------------------------


@pytest.mark.requirement("X92")
def test_bundles_that_no_executor_could_ever_take() -> None:
    h = Harness(executors=1)
    other = function("f", digest=Digest("other"))
    h.begin(PLAIN, other)
    assert unmet_digests(h) == ["other"]
    h.attach("exec-1")
    h.turn()
    assert unmet_digests(h) == []
    h.post(e.ExecutorSealed("exec-0"))
    h.commit(3)
    assert unmet_digests(h) == ["d"]
    assert h.turn() == []


@pytest.mark.requirement("X92", "X90")
def test_exclusive_calls_count_among_them() -> None:
    h = Harness(executors=1)
    h.begin(PLAIN, function("alone", exclusive=True, digest=Digest("other")))
    assert unmet_digests(h) == ["other"]


@pytest.mark.requirement("X92")
def test_no_calls_no_hunger() -> None:
    h = Harness()
    assert unmet_digests(h) == []
    h.begin(PLAIN)
    assert unmet_digests(h) == ["d"]
    h.attach("exec-0")
    assert isinstance(h.turn()[0], c.BindCall)
