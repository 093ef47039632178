"""Write the tables of settings, as docs/reference/settings.md shows them, to standard output."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, Field, fields
from enum import Enum
from typing import Any, Final

import msgspec

from callyard.dispatch.config import DispatcherConfig
from callyard.host.config import HostConfig, JobQueueConfig
from callyard.host.ledger import OwnerLimits
from callyard.transport.port import CoreHwmOptions
from callyard.worker.config import ENVIRONMENT, PoolConfig, WorkerConfig, setting_range

HEAD: Final = """# Settings

By name to `Worker(…, name=value)`, `Yard(…)` and `callyard.run(…)`; the command line also reads the variables. A value
outside its range is refused with the range. Names in `_ms` are milliseconds, in `_bytes` bytes.

A budget is no setting: a call has none, and may run as long as it likes, unless its function (`budget_ms`) or the call
(`budget_ms=`, `--budget`) gives one. `call_deadline_ms` limits no call; the stall timeout is worked out from it.
"""
COLUMNS: Final = """
| setting | meaning | default | range | variable |
| --- | --- | --- | --- | --- |
"""
FIRST: Final = {
    "executor_count": "processes that run calls; 0: the CPUs this process may use (affinity and cgroup quota)",
    "executor_max_inflight": "calls at one executor at once; they take turns, and only one computes at a time",
    "default_max_attempts": "most attempts of a call that may be retried",
    "executor_memory_high_watermark": "an executor above this resident size, in bytes, takes no more calls; 0: off",
    "executor_nice": "how far executors step back behind other processes (`nice`); `callyard serve` says 5",
    "executor_python": (
        "the interpreter of executors: a path, a virtual environment, a command, or `auto`, with which commands begin "
        "(`$VIRTUAL_ENV`, else `.venv` in the target's project, else our own); empty: that of the worker"
    ),
    "start_timeout_ms": "time to import the functions' file",
    "audit_timeout_ms": "time of one try of an audit policy; without a verdict it is tried twice more",
    "drain_deadline_ms": "what running calls get when the worker closes, before they are cancelled",
    "capture_locals": "a failure also carries the local variables of the code that raised",
}
OTHERS: Final = {
    "spare_executors": "processes kept started and idle, to take a lost one's place at once",
    "executor_spawn_mode": "how executors are started: `process`, or `sandbox`",
    "link_mode": "how executors are connected: `socketpair`, inherited, or `path`, a socket in the run's folder",
    "executor_max_runnable": "calls at one executor that are not waiting; one that has as many takes no more",
    "executor_selection_sample_size": "executors compared when a call is placed; 0: all",
    "task_max_inflight_calls": "calls of one list that are at executors at once",
    "call_deadline_ms": "the budget that the stall timeout allows for; limits no call itself",
    "scheduler_stall_timeout_ms": (
        "an executor blocked so long by code that nothing interrupts is killed; derived: `call_deadline_ms` + 5,000;"
        " longer for larger budgets, off while a call without a budget runs there"
    ),
    "heartbeat_timeout_ms": "an executor silent this long is killed; at least the stall timeout + 5,000",
    "heartbeat_interval_ms": "time between an executor's heartbeats",
    "max_subcall_depth": "calls below a call of a list; a call of the deepest makes no further one",
    "base_backoff_ms": "the wait before a first retry; it grows with each, and is random",
    "instance_fairness": "not in use yet",
    "instance_fairness_quantum": "not in use yet",
    "max_collected_output_bytes": "results of one list that the worker may hold; above it the list ends early; 0: off",
    "executor_task_slots": "call lists that run at once; more wait",
    "stream_build_enabled": "not in use yet: every list is streamed",
    "max_outstanding_batches": "batches of one list that were read and are not done",
    "batch_rows": "most rows read at a time",
    "batch_args_bytes": "most bytes of arguments read at a time",
    "batch_max_rows": "most rows that the scheduler takes as one batch",
    "batch_max_args_bytes": "most bytes of arguments that the scheduler takes as one batch",
    "reorder_bytes_max": "results that wait for an earlier one, in bytes",
    "outbox_frames_max": "messages that wait to be written to one executor",
    "outbox_bytes_max": "an executor that leaves more bytes than this unread is lost",
    "inbox_events_max": "events that wait for the scheduler before links are read no further",
    "restart_delay_ms": "the wait before an executor that ended is replaced by a new process",
    "max_restarts": "restarts within `restart_window_ms`, after which `backoff_ms` is the wait",
    "restart_window_ms": "the time in which restarts are counted",
    "backoff_ms": "the wait after too many restarts",
    "attach_timeout_ms": "time for a new process to connect",
    "no_executor_timeout_ms": "without any executor for so long, calls end as `unavailable`",
    "sandbox": (
        "`bwrap`, `landlock`, `auto` (the strongest here) or `off`;"
        " by default `auto` in spawn mode `sandbox`, else `off`"
    ),
    "sandbox_min": "the least that `auto` may come to; by default `landlock`",
    "sandbox_memory_bytes": "memory of a sandboxed executor; 0: no limit",
    "sandbox_tmp_bytes": "size of its own /tmp; 0: no limit",
    "sandbox_processes": "threads and processes in it; 0: no limit",
    "sandbox_open_files": "open files of each of its processes; 0: no limit",
    "sandbox_cpu_percent": "CPU that it may use, 100 for one; 0: no limit",
    "sandbox_subprocesses": "whether functions in it may start programs",
    "executors_max": "processes while `exclusive` calls wait for one of their own; 0: four times the CPUs",
    "after_interrupt": (
        "an executor in which a call was interrupted is replaced, and ends its others beside the next one (`recycle`),"
        " or goes on (`keep`)"
    ),
    "cancel_grace_ms": "a cancelled call that does not stop within it costs its executor",
    "pools": "named pools of executors, by name: see below",
}
POOLS: Final = """
## Named pools

Fields of `PoolConfig`, for `Worker(…, pools={"gpu": PoolConfig(executors=1)})`. Those without a default are the
worker's own settings of that name, unless given.

| field | meaning | default |
| --- | --- | --- |
"""
OF_POOLS: Final = {
    "executors": "processes that run its calls, all from the start",
    "executors_max": "processes while `exclusive` calls wait for one of their own; 0: no more than `executors`",
    "spare_executors": "processes kept started and idle; none where the environment names `{slot}`",
    "environment": "variables of its processes; `{slot}` is the number of a process's place, from 0",
}
DISPATCHER: Final = """
## Dispatcher

Fields of `DispatcherConfig`: by name to `Dispatcher(…, name=value)`, or `Yard(…, dispatching=DispatcherConfig(…))`.
`RetryPolicy` is in `callyard.policy.retry`, `BreakerPolicy` in `callyard.policy.breaker`.

| setting | meaning | default |
| --- | --- | --- |
"""
OF_DISPATCHERS: Final = {
    "timeout_ms": "time for one attempt, where neither the call nor the tool says",
    "retry": "a `RetryPolicy`, where the tool does not say: attempts, and the waits between them",
    "breaker": "a `BreakerPolicy` for each tool; None: no circuit breaker",
    "slots": "calls that run at once, nested ones aside; with a worker no more than its executors take",
    "queued_max": "calls that wait for a turn, a seat or a slot; one more is `unavailable`",
    "queue_wait_ms_max": "longest wait before the first attempt",
    "attempt_min_ms": "no attempt starts with less time left than this",
    "ask_timeout_ms": "how long a question to the caller's client stays open; no other time of its call runs meanwhile",
    "key_joiners_max": "calls that wait for one key's run; one more is `unavailable`",
    "cancel_grace_ms": "code that was told to stop has so long until its call is answered all the same",
    "drain_deadline_ms": "what calls under way get when the dispatcher closes, before they are stopped",
    "ttl_ms": "how long the end of a keyed call answers later ones",
    "unknown_ttl_ms": "the same where the outcome is unknown",
    "lost_ttl_ms": "how long the end of a call without a key is kept under its call id, when its connection was lost",
    "tenant_running": "calls of one tenant that run at once",
    "tenant_queued": "calls of one tenant that wait; one more is `unavailable`",
    "tenant_bytes": "bytes of arguments of one tenant's calls that wait",
}

HOST: Final = """
## Host

Fields of `HostConfig`: by name to `Host(…, name=value)`, those of `JobQueueConfig` too. All are in
`callyard.host.config`, but `OwnerLimits` in `callyard.host.ledger` and `CoreHwmOptions` in `callyard.transport.port`.

| setting | meaning | default |
| --- | --- | --- |
"""
OF_HOSTS: Final = {
    "jobs": "a `JobQueueConfig`: see below",
    "core_hwm": "`CoreHwmOptions`, handed to what makes the transport: see below",
    "owners": "`OwnerLimits`, of each spot: see below",
    "spots_max": "spots that are there at once",
    "send_timeout_ms": "how long a send waits for room",
    "send_timeouts_ms": "the same by `SendFamily`, for those that differ",
    "outbound_waiter_slots": "sends of each family that wait for room; one more is DEADLINE_EXCEEDED at once",
    "request_timeout_ms": "time for a request, where it does not say",
    "requests_max": "requests without an answer, and answers that were not taken; error replies on their way",
    "shutdown_timeout_ms": "what was accepted gets so long when the host closes",
}
OF_PARTS: Final[dict[type, dict[str, str]]] = {
    JobQueueConfig: {
        "profile": "a `JobProfile`: `COMPACT` 32, `LOW_LATENCY` 64, `BALANCED` 128, `THROUGHPUT` 256 for each CPU",
        "jobs_max": "messages received whose turn has not begun, whatever the profile says; 1 … 2,147,483,647",
        "pause_percent": "of that in use: peers are told to pause; 1 … 100",
        "resume_percent": "of that in use: to go on; 0 … 99, below `pause_percent`",
    },
    OwnerLimits: {
        "application_items_max": "messages that a spot has accepted and not finished",
        "application_bytes_max": "their bytes, with `fixed_work_bytes` for each",
        "lifecycle_items_max": "the same of the host's own work for a spot: to make it",
        "lifecycle_bytes_max": "the same",
        "fixed_work_bytes": "what a message counts beside its payload",
        "lifecycle_burst_max": "so much of the host's own work in a row, then a message is due",
        "owner_budget_ms": "a spot gives its place to others after so long, between two turns",
    },
    CoreHwmOptions: {
        "memory_limit_bytes": "the memory that the transport reckons with",
        "budget_bytes": "the bytes that its queues get, exactly; goes before the limit",
        "profile": "a `CoreHwmProfile`, of the same four names; no relation to the one of the jobs",
    },
}


def build_table() -> str:
    known = {field.name: field for field in fields(WorkerConfig)}
    assert known.keys() == FIRST.keys() | OTHERS.keys(), "each setting has one meaning here"
    first = _rows((known[name], meaning) for name, meaning in FIRST.items())
    others = _rows((known[name], meaning) for name, meaning in OTHERS.items())
    workers = f"{HEAD}\n## First\n{COLUMNS}{first}\n## The others\n{COLUMNS}{others}"
    return f"{workers}{POOLS}{_pool_rows()}{DISPATCHER}{_dispatcher_rows()}{HOST}{_host_rows()}"


def _pool_rows() -> str:
    rows = ""
    for field in fields(PoolConfig):
        meaning = OF_POOLS.get(field.name, "as the worker's")
        default = "" if field.default is None else "none" if field.default is MISSING else f"{field.default:,}"
        rows += f"| `{field.name}` | {meaning} | {default} |\n"
    return rows


def _dispatcher_rows() -> str:
    known = {field.name: field.default for field in msgspec.structs.fields(DispatcherConfig)}
    assert known.keys() == OF_DISPATCHERS.keys(), "each setting has one meaning here"
    return "".join(
        f"| `{name}` | {meaning} | {_show_default(known[name])} |\n" for name, meaning in OF_DISPATCHERS.items()
    )


def _host_rows() -> str:
    rows = _described(HostConfig, OF_HOSTS)
    for kind, meanings in OF_PARTS.items():
        rows += f"\n| `{kind.__name__}` | meaning | default |\n| --- | --- | --- |\n{_described(kind, meanings)}"
    return rows


def _described(kind: type, meanings: dict[str, str]) -> str:
    known = {field.name: field.default for field in fields(kind)}
    assert known.keys() == meanings.keys(), "each setting has one meaning here"
    return "".join(f"| `{name}` | {meaning} | {_show_plain(known[name])} |\n" for name, meaning in meanings.items())


def _show_plain(value: Any) -> str:
    if value is None or value is MISSING:
        return ""
    return f"`{value.name}`" if isinstance(value, Enum) else f"{value:,}"


def _show_default(value: Any) -> str:
    if value is None:
        return "no limit"
    if isinstance(value, msgspec.Struct):  # a policy
        return ", ".join(f"`{name}` {part:,}" for name, part in msgspec.structs.asdict(value).items())
    return f"{value:,}"


def _rows(meanings: Iterable[tuple[Field[Any], str]]) -> str:
    variables = {name: f"`CALLYARD_{variable}`" for variable, name in ENVIRONMENT.items()}
    rows = ""
    for field, meaning in meanings:
        low_high = setting_range(field.name)
        shown = "" if low_high is None else f"{low_high[0]:,} … {low_high[1]:,}"
        default = field.default
        if default is None:
            default = "derived"
        elif default is MISSING:
            default = "none"
        elif _is_number(default):
            default = f"{default:,}"
        rows += f"| `{field.name}` | {meaning} | {default} | {shown} | {variables.get(field.name, '')} |\n"
    return rows


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


if __name__ == "__main__":
    print(build_table(), end="")
