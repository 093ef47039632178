"""A call may only be placed on an executor whose placement fits: its pool, its bundle, and there its tenant."""

from __future__ import annotations

import pytest

from callyard.errors import ErrorKind
from callyard.ids import Digest, TaskId, Tenant
from callyard.scheduler import StopReason
from callyard.scheduler import commands as c
from callyard.scheduler import events as e
from callyard.scheduler.placement import DEFAULT_POOL, Placement, PoolName

from .harness import DIGEST, PLAIN, Harness, dispatches, failed, function, refused, resumes, rows

GPU = PoolName("gpu")
FAR = function("far", pool=GPU)
KEPT = function("kept", confined=True)
KEPT_FAR = function("kept_far", pool=GPU, confined=True)


def places(commands: list) -> dict[str, str]:
    return {sent.call_id: sent.executor_id for sent in dispatches(commands)}


def two_pools(**config: int) -> Harness:
    """One executor each: `near` and `far`."""
    h = Harness(**config)
    h.attach("near")
    h.attach("far", pool=GPU)
    return h


# --- tenants --------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X92")
def test_an_executor_of_a_sandboxed_pool_serves_one_tenant_for_its_life() -> None:
    h = Harness(executors=1)
    (first,) = h.start(1, name="a", target=KEPT, tenant=Tenant("a"))
    h.complete(first)
    assert h.start(1, name="b", target=KEPT, tenant=Tenant("b")) == []
    assert h.scheduler.demand().unmet == [Placement(DEFAULT_POOL, DIGEST, Tenant("b"))]
    assert h.scheduler.find_placement("exec-0") == Placement(DEFAULT_POOL, DIGEST, Tenant("a"))
    h.attach("exec-1")
    assert places(h.turn()) == {"b-0": "exec-1"}
    assert [sent.executor_id for sent in h.start(1, name="a2", target=KEPT, tenant=Tenant("a"))] == ["exec-0"]


@pytest.mark.requirement("X92")
def test_in_process_mode_tenants_share() -> None:
    h = Harness(executors=1)
    sent = [h.start(1, name=name, tenant=Tenant(name))[0] for name in ("a", "b")]
    assert [one.executor_id for one in sent] == ["exec-0", "exec-0"]


@pytest.mark.requirement("X92")
def test_an_executor_that_was_sent_nothing_is_bound_to_nothing() -> None:
    h = Harness(executors=1)
    (first,) = h.start(1, name="a", target=KEPT, tenant=Tenant("a"))
    h.post(e.TaskStopped(TaskId("a"), StopReason.CANCELLED))
    h.post(refused(first))
    assert h.scheduler.find_placement("exec-0") is None
    assert len(h.start(1, name="b", target=KEPT, tenant=Tenant("b"))) == 1


@pytest.mark.requirement("X92")
def test_an_attempt_that_drains_keeps_its_executor_from_another_tenant() -> None:
    """Its arguments are there, though the scheduler has given the attempt up."""
    h = Harness(executors=1)
    (first,) = h.start(1, name="a", target=KEPT, tenant=Tenant("a"))
    h.post(e.CallSuspended(first.executor_id, first.call_id, 1, "r"))
    h.post(e.ResumeSendFailed(first.call_id, 1))
    assert h.start(1, name="b", target=KEPT, tenant=Tenant("b")) == []
    h.post(failed(first, ErrorKind.CANCELLED))
    assert h.turn() == []
    assert h.scheduler.find_placement("exec-0").tenant == "a"


# --- pools ----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X92")
def test_a_full_pool_holds_back_no_call_of_another_in_either_direction() -> None:
    for full, goes, where in ((FAR, PLAIN, "near"), (PLAIN, FAR, "far")):
        h = two_pools(executor_max_inflight=1)
        h.open()
        h.commit(rows(full, full, goes, full, goes))
        first = dispatches(h.turn())
        assert [sent.call_id for sent in first] == ["t-0", "t-2"]
        assert places(h.complete(first[1])) == {"t-4": where}
        assert places(h.complete(first[0])) == {"t-1": "far" if full is FAR else "near"}


@pytest.mark.requirement("X18")
def test_a_task_at_its_limit_goes_on_in_every_lane_once_one_of_its_calls_has_ended() -> None:
    h = two_pools(task_max_inflight_calls=1)
    h.open()
    h.commit(rows(PLAIN, FAR, PLAIN, FAR))
    (sent,) = dispatches(h.turn())
    order = [sent.call_id]
    for _ in range(3):
        (sent,) = dispatches(h.complete(sent))
        order.append(sent.call_id)
    assert sorted(order) == ["t-0", "t-1", "t-2", "t-3"]


@pytest.mark.requirement("X8")
def test_a_pool_has_a_memory_limit_of_its_own() -> None:
    h = Harness(executor_memory_high_watermark=100)
    h.attach("near", memory_bytes=50)
    h.attach("far", pool=GPU, watermark=40, memory_bytes=50)
    assert places(h.begin(PLAIN, FAR)) == {"t-0": "near"}


@pytest.mark.requirement("X90")
def test_exclusive_calls_are_counted_by_pool() -> None:
    h = two_pools()
    alone = function("alone", exclusive=True, pool=GPU)
    h.begin(alone, alone, FAR, PLAIN)
    assert h.scheduler.exclusive_waiting(GPU) == 1
    assert h.scheduler.exclusive_waiting(DEFAULT_POOL) == 0


@pytest.mark.requirement("X71")
def test_who_waits_for_a_pool() -> None:
    h = Harness(executors=1)
    h.begin(FAR, name="a")
    h.begin(PLAIN, name="b")
    (parent,) = dispatches(h.begin(PLAIN, name="c"))
    h.ask(parent, FAR, b"[1]")
    assert h.scheduler.tasks_waiting_for(GPU) == {"a", "c"}
    assert h.scheduler.tasks_waiting_for(DEFAULT_POOL) == set()


# --- subcalls from pool to pool ---------------------------------------------------------------------------------------


@pytest.mark.requirement("X24", "X26", "X80")
@pytest.mark.parametrize("inflight", [1, 128])
def test_eight_deep_from_pool_to_pool_with_one_executor_each(inflight: int) -> None:
    """Every place is taken by a call that waits; the next one gets in all the same, and at the same executor."""
    h = two_pools(executor_max_inflight=inflight)
    families = [[sent] for sent in dispatches(h.begin(*[PLAIN, FAR] * 5))]
    assert len(families) == (2 if inflight == 1 else 10)
    for depth in range(8):
        for family in families:
            here = PLAIN if family[-1].target is FAR else FAR
            family.append(h.call(family[-1], here, b"[%d]" % depth))
    for family in families:
        assert [sent.executor_id == "far" for sent in family] == [sent.target is FAR for sent in family]
        for above, below in zip(family[-2::-1], family[:0:-1], strict=True):
            (answer,) = resumes(h.complete(below))
            assert answer.call_id == above.call_id
            h.resume(answer)


@pytest.mark.requirement("X26")
def test_a_family_has_one_home_in_each_pool() -> None:
    h = Harness(executors=2)
    h.attach("far-1", "far-2", pool=GPU)
    (root,) = dispatches(h.begin(PLAIN))
    first = h.call(root, FAR, b"[1]")
    back = h.call(first, PLAIN, b"[2]")
    again = h.call(back, FAR, b"[3]")
    assert (back.executor_id, again.executor_id) == (root.executor_id, first.executor_id)


@pytest.mark.requirement("X80", "X92")
def test_a_stray_is_placed_past_the_filters_where_it_fits_and_only_there() -> None:
    h = two_pools(executor_max_inflight=1, executor_max_runnable=1)
    (full, parent) = dispatches(h.begin(FAR, PLAIN))
    assert full.executor_id == "far"
    assert h.call(parent, FAR, b"[1]").executor_id == "far"
    h.handle(e.ExecutorSealed("far"))
    h.attach("far-2", pool=GPU)
    assert h.call(parent, FAR, b"[2]").executor_id == "far-2", "not one that will be replaced, if there is another"


@pytest.mark.requirement("X70")
def test_a_stray_that_is_refused_waits_for_the_end_of_the_block() -> None:
    h = two_pools()
    (parent,) = dispatches(h.begin(PLAIN))
    sent = h.call(parent, FAR, b"[1]")
    (sent,) = dispatches(h.post(refused(sent)))
    assert dispatches(h.post(refused(sent))) == []
    assert h.scheduler.demand().stranded == [], "there is an executor that fits"
    h.now_ms += 10
    assert places(h.post(e.RetryDue(sent.call_id))) == {sent.call_id: "far"}


@pytest.mark.requirement("X80", "X92")
def test_a_stray_that_no_executor_fits_is_stranded_and_another_executor_ends_that() -> None:
    """Two tenants hold one executor each and wait for the other's: no end of a call would ever free one."""
    h = two_pools()
    (a,) = h.start(1, name="a", target=KEPT, tenant=Tenant("a"))
    (b,) = h.start(1, name="b", target=KEPT_FAR, tenant=Tenant("b"))
    assert h.ask(a, KEPT_FAR, b"[1]") == []
    assert h.ask(b, KEPT, b"[1]") == []
    stranded = h.scheduler.demand().stranded
    assert stranded == [Placement(GPU, DIGEST, Tenant("a")), Placement(DEFAULT_POOL, DIGEST, Tenant("b"))]
    h.attach("far-2", pool=GPU)
    assert list(places(h.turn()).values()) == ["far-2"]
    assert h.scheduler.demand().stranded == [Placement(DEFAULT_POOL, DIGEST, Tenant("b"))]


@pytest.mark.requirement("X90")
def test_a_stray_is_not_placed_beside_another_family_s_exclusive_call() -> None:
    h = two_pools()
    alone = function("alone", exclusive=True, pool=GPU)
    exclusive, parent = dispatches(h.begin(alone, PLAIN))
    assert exclusive.target is alone
    assert h.ask(parent, FAR, b"[1]") == []
    assert h.scheduler.demand().stranded == [Placement(GPU, DIGEST)]
    below = h.call(exclusive, PLAIN, b"[2]")
    assert h.call(below, FAR, b"[3]").executor_id == "far", "of its own family"


@pytest.mark.requirement("X90")
def test_an_exclusive_subcall_of_another_pool_than_its_root_s_is_refused() -> None:
    h = two_pools()
    (root,) = dispatches(h.begin(function("alone", exclusive=True)))
    (answer,) = resumes(h.ask(root, function("far alone", exclusive=True, pool=GPU)))
    assert answer.failure.details["reason"] == "exclusive"
    assert "pool default" in answer.failure.message


@pytest.mark.requirement("X29")
def test_a_stray_ends_where_it_stands_with_its_parent() -> None:
    h = Harness(executors=1)
    (parent,) = dispatches(h.begin(PLAIN))
    assert h.ask(parent, FAR, b"[1]") == []
    assert h.scheduler.demand().stranded == [Placement(GPU, DIGEST)]
    h.complete(parent)
    assert h.scheduler.demand().stranded == []
    h.attach("far", pool=GPU)
    assert h.turn() == []
    assert not h.scheduler.has_strays


@pytest.mark.requirement("X28", "X62")
def test_an_executor_that_is_lost_with_a_call_far_above() -> None:
    """The grandparent's process dies: what is below it ends too, also what another of them was about to be given."""
    h = two_pools()
    one = function("one", max_concurrency=1, pool=GPU, idempotent=True)
    (root,) = dispatches(h.begin(function("root", idempotent=True)))
    seated = h.call(root, one, b"[1]")
    back = h.call(seated, function("back", idempotent=True), b"[2]")
    h.lose("near", begun=[root.call_id, back.call_id])
    assert (h.state(root.call_id).attempt_count, h.state(root.call_id).executor) == (1, None)
    cancelled = h.post(failed(seated, ErrorKind.CANCELLED))
    assert [type(command) for command in cancelled] == [c.UnbindCall]


@pytest.mark.requirement("X24")
def test_a_subcall_of_another_bundle_is_refused_in_another_pool_too() -> None:
    h = two_pools()
    (root,) = dispatches(h.begin(PLAIN))
    (answer,) = resumes(h.ask(root, function("far", pool=GPU, digest=Digest("other"))))
    assert answer.failure.details["reason"] == "bundle"


@pytest.mark.requirement("X80", "X92")
def test_a_stray_goes_to_one_that_will_be_replaced_when_there_is_no_other_and_it_did_not_ask_for_it() -> None:
    """Its calls may wait for this one's family; a process that drains by its own wish would hand it back."""
    h = two_pools()
    parent, _busy = dispatches(h.begin(PLAIN, FAR))
    h.handle(e.ExecutorSealed("far"))
    assert h.call(parent, FAR, b"[1]").executor_id == "far"
    h.post(e.SnapshotUpdated(h.snapshot("far", seq=2, wants_replacement=True)))
    assert h.ask(parent, FAR, b"[2]") == []
    assert h.scheduler.demand().stranded == [Placement(GPU, DIGEST)]


@pytest.mark.requirement("X18")
def test_a_lane_that_gets_its_first_call_while_its_task_is_at_its_limit() -> None:
    h = two_pools(task_max_inflight_calls=1)
    (sent,) = h.start(1)
    h.commit([row for row in rows(PLAIN, FAR) if row.index == 1])
    assert h.turn() == []
    assert places(h.complete(sent)) == {"t-1": "far"}


@pytest.mark.requirement("X92")
def test_a_cancelled_call_that_has_not_answered_keeps_its_executor_bound() -> None:
    h = Harness(executors=1)
    sent, second = h.start(2, target=KEPT, tenant=Tenant("a"))
    h.handle(e.TaskStopped(TaskId("t"), StopReason.CANCELLED))
    h.post(refused(second))
    assert sent.call_id in {call_id for call_id, _ in h.scheduler._index.executors["exec-0"].draining}
    assert h.start(1, name="b", target=KEPT, tenant=Tenant("b")) == []
