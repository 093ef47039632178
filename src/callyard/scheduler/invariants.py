"""What must hold between any two events, by name. The names are those of docs/design/scheduler.md.

A full scan: for tests and simulations only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from callyard.ids import CallId, ExecutorId, FunctionId, TaskId, Tenant
from callyard.policy.waits import find_stuck
from callyard.scheduler.cache import KEY_BYTES
from callyard.scheduler.calls import DONE, READY, RUNNING, WAITING, Call
from callyard.scheduler.placement import PoolName
from callyard.scheduler.seats import Seat, ancestors
from callyard.scheduler.subcalls import home_of
from callyard.scheduler.tasks import Task
from callyard.scheduler.waits import groups_of

if TYPE_CHECKING:
    from callyard.scheduler.core import Scheduler


def check(scheduler: Scheduler) -> None:
    """Raise AssertionError, with the invariant's name, when the state contradicts itself."""
    calls: dict[TaskId, list[Call]] = {task_id: [] for task_id in scheduler._tasks}
    for call in scheduler._calls.values():
        assert scheduler._tasks.get(call.task.task_id) is call.task, f"call_has_task: {call.call_id}"
        calls[call.task.task_id].append(call)
        _check_call(call)
        _check_family(scheduler, call)
    _check_executors(scheduler)
    _check_subcall_queues(scheduler)
    _check_seats(scheduler)
    _check_exclusives(scheduler)
    _check_shares(scheduler)
    for task in scheduler._tasks.values():
        _check_task(scheduler, task, calls[task.task_id])
        _check_sharing(scheduler, task, calls[task.task_id])
    slots = sum(task.active and task.plan.uses_slot for task in scheduler._tasks.values())
    assert slots == scheduler._slots.taken <= scheduler._config.executor_task_slots, "slots"
    waiting = [task for queue in scheduler._slots.waiting.values() for task in queue]
    assert len(waiting) == sum(not task.active for task in scheduler._tasks.values()), "waiting_iff_inactive"
    assert len(waiting) <= scheduler._config.waiting_tasks_max, "waiting_tasks_max"
    assert all(scheduler._slots.waiting.values()), "no_empty_queue"
    in_rings = [lane.task for ring in scheduler._turns.rings.values() for lane in ring]
    assert all(scheduler._turns.rings.values()), "no_empty_ring"
    assert all(scheduler._tasks.get(task.task_id) is task for task in in_rings), "ring_tasks_live"
    _check_tenants(scheduler)
    dirty = [task for task in scheduler._tasks.values() if task.dirty]
    assert {id(task) for task in dirty} <= {id(task) for task in scheduler._epilogue.dirty}, "dirty_listed"
    stuck = find_stuck({call: groups_of(call) for call in scheduler._calls.values()})
    assert not stuck, f"no_ring_of_waits: {sorted(call.call_id for call in stuck)}"


def _check_call(call: Call) -> None:
    ex = call.executor
    assert (call.state in (RUNNING, WAITING)) == (ex is not None), f"reservation_iff_running: {call.call_id}"
    assert (call.state is WAITING) == bool(call.open_requests), f"waiting_iff_open: {call.call_id}"
    assert not call.queued or call.state is READY, f"queued_is_ready: {call.call_id}"
    aside = call.is_set_aside
    assert not (call.queued and aside), f"aside_or_queued: {call.call_id}"
    backoff = call.attempt_seq > 0
    assert call.queued or aside or call.state is not READY or backoff, f"unqueued_waits: {call.call_id}"
    assert 0 <= call.attempt_count <= call.max_attempts, f"attempts_bounded: {call.call_id}"
    assert call.attempt_count <= call.attempt_seq, f"seq_covers_count: {call.call_id}"
    if ex is not None:
        drains = (call.call_id, call.attempt_seq) in ex.draining
        assert (ex.live.get(call.call_id) == call.attempt_seq) != drains, f"reservation_is_current: {call.call_id}"
        assert (call.stopping is not None) == drains, f"stopping_iff_draining: {call.call_id}"


def _check_family(scheduler: Scheduler, call: Call) -> None:
    ties, parent = call.ties, call.parent
    for child_id, child in () if ties is None else ties.children.items():
        assert child.parent is call, f"child_knows_parent: {child_id}"
        assert child.ties is not None, f"child_knows_parent: {child_id}"
        assert scheduler._calls.get(child_id) is child, f"child_is_known: {child_id}"
        assert not child.ties.orphaned, f"child_is_waited_for: {child_id}"
        assert child.ties.request_id in (call.open_requests or ()), f"child_has_request: {child_id}"
        assert call.stopping is None, f"stopped_has_no_child: {call.call_id}"
    if parent is None or ties is None:
        assert parent is None, f"subcall_has_ties: {call.call_id}"
        return
    assert call.call_id.startswith(f"{parent.call_id}/sub-"), f"subcall_id: {call.call_id}"
    assert call.state is not DONE, f"ended_subcall_is_gone: {call.call_id}"
    assert call.max_attempts == 1, f"subcall_has_one_attempt: {call.call_id}"
    assert (call.batch, call.task) == (parent.batch, parent.task), f"subcall_inherits: {call.call_id}"
    assert ties.depth == len(list(ancestors(call))) <= scheduler._config.max_subcall_depth, f"depth: {call.call_id}"
    if ties.orphaned:
        assert call.stopping is not None, f"orphan_drains: {call.call_id}"
    else:
        assert parent.ties is not None, f"child_is_listed: {call.call_id}"
        assert parent.ties.children.get(call.call_id) is call, f"child_is_listed: {call.call_id}"
        assert parent.state is WAITING, f"child_has_live_parent: {call.call_id}"
        spent = parent.ties.charged_ms
        free = parent.budget_ms == 0 or 0 < call.budget_ms <= parent.budget_ms
        assert free, f"granted_within_budget: {call.call_id}: {call.budget_ms} of {parent.budget_ms}, {spent} charged"


def _check_executors(scheduler: Scheduler) -> None:
    asked: Counter[ExecutorId] = Counter()
    held: Counter[ExecutorId] = Counter()
    roots: Counter[ExecutorId] = Counter()
    unbegun: Counter[ExecutorId] = Counter()
    waiting: Counter[ExecutorId] = Counter()
    for call in scheduler._calls.values():
        if call.ties is not None and call.ties.asked_by is not None:
            asked[call.ties.asked_by.executor_id] += len(call.args)
        if call.executor is not None and call.stopping is None:
            held[call.executor.executor_id] += 1
            roots[call.executor.executor_id] += call.parent is None
            unbegun[call.executor.executor_id] += call.parent is None and not call.begun
            waiting[call.executor.executor_id] += call.state is WAITING
    executors = scheduler._index.executors
    assert held.keys() <= executors.keys(), "reservations_on_known_executors"
    for executor_id, ex in executors.items():
        assert len(ex.live) == held[executor_id], f"live_counts: {executor_id}"
        assert ex.live_roots == roots[executor_id], f"live_roots: {executor_id}"
        assert ex.unbegun == unbegun[executor_id], f"unbegun_counts: {executor_id}"
        assert ex.live_roots <= scheduler._config.executor_max_inflight, f"executor_max_inflight: {executor_id}"
        assert ex.waiting == waiting[executor_id], f"waiting_counts: {executor_id}"
        assert ex.subcall_args_bytes == asked[executor_id], f"subcall_args_are_counted: {executor_id}"
        assert ex.draining_subcalls <= ex.draining, f"draining_subcalls: {executor_id}"
        assert ex.placement is not None or not (ex.live or ex.draining), f"bound_iff_used: {executor_id}"
        for call_id in ex.live:
            call = scheduler._calls[call_id]
            wanted = call.target.place(call.task.plan.tenant)
            assert call.placement == ex.placement == wanted, f"placement_fits: {call_id} at {executor_id}"
        assert ex.placement is None or ex.placement.pool == ex.pool, f"placement_fits: {executor_id}"


def _check_tenants(scheduler: Scheduler) -> None:
    tenants, rings = scheduler._turns.tenants, scheduler._turns.rings
    if tenants is None:
        return
    inflight: Counter[Tenant] = Counter()
    for task in scheduler._tasks.values():
        inflight[task.plan.tenant] += task.inflight
    known = tenants.standings
    assert {name: one.inflight for name, one in known.items() if one.inflight} == +inflight, "tenant_inflight"
    assert {ring for one in known.values() for ring in one.rings} == rings.keys(), "rings_by_tenant"
    assert all(ring[2] == name for name, one in known.items() for ring in one.rings), "rings_by_tenant"
    assert all(one.rings or one.inflight for one in known.values()), "tenant_has_calls"


def _check_subcall_queues(scheduler: Scheduler) -> None:
    queued: set[CallId] = set()
    blocked = scheduler._subcalls._blocked
    for executor_id, ex in scheduler._index.executors.items():
        assert ex.in_ring == (ex in scheduler._subcalls.ring), f"in_subcall_ring: {executor_id}"
        here = [call for call in ex.subcalls if call.queued]
        for call in here:
            assert call.parent is not None, f"queued_at_home: {call.call_id}"
            assert home_of(call) is ex, f"queued_at_home: {call.call_id}"
        assert not here or ex.in_ring or ex in blocked, f"queued_subcalls_take_turns: {executor_id}"
        queued |= {call.call_id for call in here}
    for placement, strays in scheduler._subcalls.strays.items():
        for call in strays:
            if call.queued:
                assert call.placement == placement, f"stray_by_placement: {call.call_id}"
                assert home_of(call) is None, f"stray_has_no_home: {call.call_id}"
                queued.add(call.call_id)
    known = {call.call_id for call in scheduler._calls.values() if call.parent is not None and call.queued}
    assert queued == known, "queued_at_home"


def _seats_in_use(scheduler: Scheduler) -> Iterator[Seat]:
    for call in scheduler._calls.values():
        if call.ties is not None and call.ties.seat is not None:
            assert call.executor is not None, f"seated_is_bound: {call.call_id}"
            yield call.ties.seat
    yield from scheduler._seats.draining.values()


def _check_seats(scheduler: Scheduler) -> None:
    seats = scheduler._seats
    users = Counter(id(seat) for seat in _seats_in_use(scheduler))
    for key, line in seats.lines.items():
        assert len(line.taken) <= line.limit, f"max_concurrency: {key}"
        assert all(seat.users == users.pop(id(seat), 0) > 0 for seat in line.taken), f"seat_users: {key}"
        for called_id, called in (line.called_roots | line.called_subcalls).items():
            assert scheduler._calls.get(called_id) is called, f"called_is_ready: {called_id}"
            assert called.state is READY, f"called_is_ready: {called_id}"
            assert called.ties is not None, f"called_is_ready: {called_id}"
            assert called.ties.called is line, f"called_is_ready: {called_id}"
        assert line.taken or line.called_roots or line.called_subcalls or line.waiting, f"no_empty_line: {key}"
        full = len(line.taken) + len(line.called_subcalls) >= line.limit
        assert full or not line.subcalls, f"line_waits_for_seats: {key}"
    assert not users, "seats_are_known"
    for call in scheduler._calls.values():
        if call.ties is not None and call.ties.line is not None:
            line = call.ties.line
            stands = call in line.roots if call.parent is None else line.subcalls.get(call.call_id) is call
            assert stands, f"stands_in_line: {call.call_id}"
        if call.executor is not None and call.target.max_concurrency is not None:
            assert call.ties is not None, f"limited_has_seat: {call.call_id}"
            assert call.ties.seat is not None, f"limited_has_seat: {call.call_id}"


def _check_shares(scheduler: Scheduler) -> None:
    standing: Counter[tuple[PoolName, FunctionId, ExecutorId]] = Counter()
    for call in scheduler._calls.values():
        ex = call.executor
        if ex is not None and call.parent is None and not call.task.plan.uses_slot:
            standing[ex.pool, call.target.function_id, ex.executor_id] += 1
    held = {(*key, ex_id): count for key, calls in scheduler._shares.held.items() for ex_id, count in calls.items()}
    assert held == standing, "shares_count_tool_calls"
    assert all(scheduler._shares.held.values()), "shares_count_tool_calls"


def _check_exclusives(scheduler: Scheduler) -> None:
    exclusives, executors = scheduler._exclusives, scheduler._index.executors
    waiting = [call for call in scheduler._calls.values() if call.ties is not None and call.ties.awaits_executor]
    assert exclusives.count() == len(waiting), "exclusive_waiting"
    assert all(call in exclusives.waiting[call.placement] for call in waiting), "exclusive_waiting"
    assert exclusives.reserved.keys() <= exclusives.waiting.keys(), "reserved_for_waiting"
    for placement, ex in exclusives.reserved.items():
        assert executors.get(ex.executor_id) is ex, f"reserved_is_known: {placement}"
        assert ex.closed, f"reserved_is_closed: {placement}"
    for call in scheduler._calls.values():
        holder = call.executor
        if holder is not None and call.parent is None and call.target.exclusive:
            assert holder.closed, f"exclusive_is_closed: {call.call_id}"
            assert holder.live_roots <= 1, f"exclusive_alone: {call.call_id}"


def _check_task(scheduler: Scheduler, task: Task, calls: list[Call]) -> None:
    name = task.task_id
    roots = [call for call in calls if call.parent is None]
    inflight = sum(call.executor is not None for call in roots)
    maximum = scheduler._config.task_max_inflight_calls
    assert task.inflight == inflight <= maximum, f"task_max_inflight_calls: {name}"
    standing = [call for lane in task.lanes.values() for call in lane.calls]
    assert all(call.queued for call in standing), f"ready_is_queued: {name}"
    assert len(standing) == sum(call.queued for call in roots), f"queued_is_ready: {name}"
    for placement, lane in task.lanes.items():
        assert (lane.task, lane.placement) == (task, placement), f"lane_is_its_task_s: {name}"
        assert all(call.placement == placement for call in lane.calls), f"one_lane: {name}"
        here = [ring for ring in scheduler._turns.rings.values() if lane in ring]
        own = [scheduler._turns.rings[scheduler._turns.ring_of(lane)]] if lane.in_ring else []
        assert here == own, f"in_one_ring: {name}"
        if task.active and lane.calls and task.stop_reason is None and inflight < maximum:
            assert lane.in_ring, f"ready_takes_turns: {name}"
    unended = sum(batch.remaining for batch in task.batches.values())
    assert task.total_count - task.terminal_count == unended, f"remaining: {name}"
    assert task.failed_count <= task.terminal_count, f"failed_are_terminal: {name}"
    below = Counter(call.batch.index for call in calls if call.parent is not None)
    for batch in task.batches.values():
        assert batch.remaining == sum(result is None for result in batch.results), f"one_result_per_end: {name}"
        assert batch.subcalls == below.pop(batch.index, 0), f"subcalls_of_batch: {name}"
    assert not below, f"batch_outlives_subcalls: {name}"
    held = sum(batch.output_bytes for batch in task.batches.values()) + sum(task.untaken.values())
    held += sum(len(result.output or b"") for result in task.results)
    assert task.held_output_bytes == held, f"held_output_bytes: {name}"


def _check_sharing(scheduler: Scheduler, task: Task, calls: list[Call]) -> None:
    name, sharing = task.task_id, task.sharing
    in_flight = {call.call_id for call in calls if call.ties is not None and call.ties.flight is not None}
    if sharing is None:
        assert not in_flight, f"flights_are_known: {name}"
        return
    cache = sharing.cache
    assert cache.held_bytes == sum(KEY_BYTES + len(output) for output in cache.entries.values()), f"cached: {name}"
    assert cache.held_bytes <= scheduler._config.cache_bytes_max, f"cache_bytes_max: {name}"
    assert len(cache.entries) <= scheduler._config.cache_entries, f"cache_entries: {name}"
    members: set[CallId] = set()
    for key, flight in sharing.flights.items():
        waiters = [*flight.roots.values(), *flight.subcalls.values()]
        for call in (flight.leader, *waiters):
            assert call.ties is not None, f"one_flight: {call.call_id}"
            assert (call.ties.flight, call.ties.key) == (flight, key), f"one_flight: {call.call_id}"
            members.add(call.call_id)
        assert all(call.state is READY for call in waiters), f"waiters_are_ready: {name}"
        leads = flight.leader.executor is not None or flight.leader.parent is not None
        assert leads or not flight.subcalls, f"subcalls_wait_for_bound: {flight.leader.call_id}"
    assert members == in_flight, f"flights_are_known: {name}"
