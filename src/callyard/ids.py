"""Names of things, as types: a call id is never taken for an executor id by accident."""

from typing import NewType

CallId = NewType("CallId", str)
"""One invocation, one id for life: `{task_id}-{index}`, and `{parent}/sub-{n}` for a subcall."""

CallNumber = NewType("CallNumber", int)
"""A call's number in its worker, from 1, written to the begun-mark page as one u64."""

TaskId = NewType("TaskId", str)
ExecutorId = NewType("ExecutorId", str)
"""One executor process, `exec-{n}`. A replaced process never gives its id to the next one."""

FunctionId = NewType("FunctionId", str)
"""A function's name in its bundle."""

Digest = NewType("Digest", str)
"""A bundle's content, as hexadecimal BLAKE2b-256."""

RequestId = NewType("RequestId", str)
Tenant = NewType("Tenant", str)
Owner = NewType("Owner", str)


def task_of(call_id: CallId) -> TaskId:
    """The task that a call belongs to: calls are named `{task}-{index}`, their subcalls `{call}/sub-{n}`."""
    return TaskId(call_id.partition("/")[0].rpartition("-")[0])
