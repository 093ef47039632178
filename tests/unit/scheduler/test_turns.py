"""Tasks with ready calls take turns, one bind each; placements likewise."""

from __future__ import annotations

from callyard.ids import Digest, FunctionId, TaskId
from callyard.scheduler import FunctionTarget, NewCall
from callyard.scheduler import events as e

from .harness import PLAIN, Harness, dispatches, refused

OTHER = FunctionTarget(FunctionId("f"), Digest("other"), "m:f")


def order_of(commands) -> list[str]:
    return [call.task_id for call in dispatches(commands)]


def test_one_bind_each() -> None:
    h = Harness()
    for name, rows in (("a", 5), ("b", 2), ("c", 3)):
        h.start(rows, name=name)
    h.attach("exec-0", contexts=10)
    assert order_of(h.turn()) == ["a", "b", "c", "a", "b", "c", "a", "c", "a", "a"]


def test_a_small_task_is_not_behind_a_big_one() -> None:
    h = Harness(executors=1, contexts=1)
    (running,) = h.start(1_000, name="big")
    h.start(3, name="small")
    served = []
    for _ in range(6):
        (running,) = dispatches(h.complete(running))
        served.append(running.task_id)
    assert served.count("small") == 3


def test_a_task_that_comes_back_goes_to_the_end() -> None:
    h = Harness(executors=1, contexts=1)
    (running,) = h.start(1, name="a")
    h.start(3, name="b")
    h.start(3, name="c")
    h.commit(2, name="a")
    order = []
    for _ in range(8):
        (running,) = dispatches(h.complete(running))
        order.append(running.task_id)
    assert order == ["b", "c", "a", "b", "c", "a", "b", "c"]


def test_calls_of_a_task_run_in_their_order() -> None:
    h = Harness(executors=1, contexts=3)
    h.open()
    h.commit(2)
    h.commit(2)
    assert [call.call_id for call in dispatches(h.turn())] == ["t-0", "t-1", "t-2"]


def test_bundles_take_turns() -> None:
    """An executor free for any bundle: neither bundle's tasks wait for all of the other's."""
    h = Harness()
    h.start(4, name="a")
    h.start(4, name="b", target=OTHER)
    for number in range(4):
        h.attach(f"exec-{number}", contexts=1)
    assert order_of(h.turn()) == ["a", "b", "a", "b"]


def test_a_bundle_without_executor_does_not_hold_back_another() -> None:
    h = Harness(executors=1)
    h.start(1, name="mine")
    h.start(5, name="stuck", target=OTHER)
    h.start(2, name="goes")
    assert len(h.scheduler._index.executors["exec-0"].live) == 3


def test_no_call_of_a_task_waits_behind_one_of_another_bundle() -> None:
    h = Harness()
    h.open("mixed")
    targets = [PLAIN, OTHER, OTHER, PLAIN, OTHER, PLAIN]
    h.commit([NewCall(index, target, b"[]") for index, target in enumerate(targets)], name="mixed")
    h.start(2, name="other", target=OTHER)
    h.attach("exec-0", contexts=10)
    assert [call.call_id for call in dispatches(h.turn())] == ["mixed-0", "mixed-3", "mixed-5"]
    h.attach("exec-1", contexts=10)
    assert order_of(h.turn()) == ["mixed", "other", "mixed", "other", "mixed"]


def test_a_call_of_another_bundle_that_comes_back_to_the_head() -> None:
    h = Harness()
    h.attach("exec-0", contexts=1)
    h.open()
    h.commit([NewCall(0, OTHER, b"[]"), NewCall(1, PLAIN, b"[]"), NewCall(2, PLAIN, b"[]")])
    (first,) = dispatches(h.turn())
    h.handle(refused(first))
    h.handle(refused(first))
    h.handle(e.ExecutorSealed(first.executor_id))
    assert h.turn() == []
    h.attach("exec-1", "exec-2", contexts=3)
    sent = dispatches(h.turn())
    assert sorted(call.call_id for call in sent) == ["t-0", "t-1", "t-2"]
    homes = [{call.executor_id for call in sent if call.target is target} for target in (PLAIN, OTHER)]
    assert [len(home) for home in homes] == [1, 1]
    assert not homes[0] & homes[1]


def test_progress_counts() -> None:
    h = Harness(executors=1, contexts=2)
    first, second = h.start(5)
    h.complete(first)
    h.fail(second)
    progress = h.scheduler.progress(TaskId("t"))
    assert (progress.total_count, progress.terminal_count, progress.failed_count, progress.inflight) == (5, 2, 1, 2)
