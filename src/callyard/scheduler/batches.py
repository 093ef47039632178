"""Rows into calls, without side effects: whatever prepares may run anywhere, and only `commit_batch` writes (X22)."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from callyard.errors import ErrorKind, fail
from callyard.ids import CallId, TaskId
from callyard.scheduler.calls import Call, CallResult, FunctionTarget, NewCall, Ties
from callyard.scheduler.placement import Placement
from callyard.scheduler.tasks import Batch, Task, TaskPlan


class PreparedBatch(msgspec.Struct):
    """Rows turned into calls, not yet known to the scheduler."""

    task_id: TaskId
    batch: Batch
    failed_rows: int
    args_bytes: int
    """Of all rows but the last, which may have arguments of any size."""


def prepare_batch(plan: TaskPlan, batch_index: int, first_index: int, rows: Iterable[NewCall]) -> PreparedBatch:
    """Build a batch's calls. No side effects: may run anywhere (X22). `commit_batch` is the only writer.

    Rows are numbered without gaps from `first_index`. A row that came as a failure, or names no function, is that
    index's failure and becomes no call (X84).
    """
    batch = Batch(index=batch_index, results=[], first_index=first_index, remaining=0, calls=[])
    results = batch.results
    calls = batch.calls
    prefix = f"{plan.task_id}-"
    failed = args_bytes = last_bytes = 0
    known: FunctionTarget | None = None
    placement: Placement | None = None
    tied = keyed = False
    budget_ms = 0
    for index, row in enumerate(rows, first_index):
        assert row.index == index, f"row {row.index} of {plan.task_id} at the place of {index}"
        target = row.target
        if target is None or row.failure is not None:
            failure = row.failure or fail(ErrorKind.NOT_FOUND, "the row names no function")
            results.append(CallResult(row.index, None, failure))
            failed += 1
            continue
        if target is not known:
            known, keyed, placement = target, is_keyed(plan, target), target.place(plan.tenant)
            budget_ms = plan.default_budget_ms if target.budget_ms is None else target.budget_ms
            tied = keyed or target.exclusive or target.max_concurrency is not None
        assert placement is not None
        results.append(None)
        args_bytes += last_bytes
        last_bytes = len(row.args)
        call = Call(  # by position: this runs for every call
            CallId(f"{prefix}{index}"),
            _UNCOMMITTED,
            batch,
            index,
            target,
            placement,
            row.args,
            row.strings,
            plan.max_attempts,
            budget_ms,
        )
        if tied:
            call.ties = Ties(keyed=keyed)
        calls.append(call)
    batch.remaining = len(calls)
    return PreparedBatch(plan.task_id, batch, failed, args_bytes)


def is_keyed(plan: TaskPlan, target: FunctionTarget) -> bool:
    """Whether results of the function are cached and shared in this task: it takes the promise, or the task's word."""
    return plan.cache == "all" or (target.pure and plan.cache == "promised")


_UNCOMMITTED = Task(plan=TaskPlan(task_id=TaskId("")), batches={})
