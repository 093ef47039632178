"""Write the tables of settings, as docs/reference/settings.md shows them, to standard output."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, fields
from enum import Enum
from typing import Any, Final

import msgspec

from callyard.dispatch.config import DispatcherConfig
from callyard.host.config import HostConfig, JobQueueConfig
from callyard.host.ledger import OwnerLimits
from callyard.serve.config import SERVE_SETTINGS
from callyard.settings import Kind, Setting, show_amount
from callyard.transport.port import CoreHwmOptions
from callyard.worker.config import POOL_SETTINGS, WORKER_SETTINGS

HEAD: Final = """# Settings

One table feeds every place where a setting can be given, under the same name:

| where | how | |
| --- | --- | --- |
| Python | `Worker(…, start_timeout_ms=2_000)`, `Yard(…)`, `callyard.run(…)` | the value itself; no file, no variables |
| an option | `--set start_timeout=2s`; some have one of their own, such as `--executors` | goes before all others |
| a variable | `CALLYARD_START_TIMEOUT_MS=2s` | goes before the file |
| the settings file | `start_timeout = "2s"` below `[worker]` | goes before the default |

Names in `_ms` are durations, in `_bytes` sizes: plain numbers are milliseconds and bytes. Outside of Python a value may
have its unit (`250ms`, `2s`, `5m`, `1h`; `64MiB`, `1GB`), and the name may do without. A value outside its range is
refused with the range and the place where it was given; a name that is no setting, with the one that was perhaps
meant. `executor_count` may be written `executors`, as calls in Python have it. `callyard COMMAND … --print-config`
shows each setting, its value and where it came from, with `***` for what looks like a secret.

The settings file is `callyard.toml`, or the same tables below `[tool.callyard]` in pyproject.toml
(`[tool.callyard.worker]`). Commands take the one in the target's folder, or in the nearest one above it up to the
project's own (the first with a pyproject.toml, setup.py, setup.cfg or .git); without a target they start from the
current folder. `--config FILE` names another. Beside code that is not trusted (`--sandbox`, `--audit`) none is read.

A budget is no setting: a call has none, and may run as long as it likes, unless its function (`budget_ms`) or the call
(`budget_ms=`, `--budget`) gives one. `call_deadline_ms` limits no call; the stall timeout is worked out from it.
"""
FIRST: Final = (
    "executor_count",
    "executor_max_inflight",
    "default_max_attempts",
    "executor_memory_high_watermark",
    "executor_nice",
    "executor_python",
    "start_timeout_ms",
    "audit_timeout_ms",
    "drain_deadline_ms",
    "capture_locals",
)
"""Settings of the worker that people ask for first."""
WORKERS: Final = """
| setting | meaning | default | range | variable |
| --- | --- | --- | --- | --- |
"""
SERVER: Final = """
## Server

Table `[serve]` of the settings file; by option `--set serve.NAME=VALUE`, or one of its own. Relative paths start from
the file's folder. Tokens are tables of their own, `[serve.tokens.NAME]`: see
[Securing a server](../guides/securing-a-server.md).

| setting | meaning | default | range |
| --- | --- | --- | --- |
"""
POOLS: Final = """
## Named pools

Fields of `PoolConfig`, for `Worker(…, pools={"gpu": PoolConfig(executors=1)})`; in the settings file tables
`[pools.NAME]`. Those without a default are the worker's own settings of that name, unless given.

| field | meaning | default |
| --- | --- | --- |
"""
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
    "breaker": "a `BreakerPolicy` for each tool and tenant; None: no circuit breaker",
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
    first = _rows(WORKER_SETTINGS[name] for name in FIRST)
    others = _rows(one for name, one in WORKER_SETTINGS.items() if name not in FIRST)
    workers = f"{HEAD}\n## First\n{WORKERS}{first}\n## The others\n{WORKERS}{others}"
    return f"{workers}{POOLS}{_pool_rows()}{SERVER}{_server_rows()}{DISPATCHER}{_dispatcher_rows()}{HOST}{_host_rows()}"


def _rows(settings: Iterable[Setting]) -> str:
    return "".join(
        f"| `{one.name}` | {one.why} | {_default_of(one)} | {_range_of(one)} | `{one.variables[0]}` |\n"
        if one.kind is not Kind.TABLE
        else f"| `{one.name}` | {one.why} | none | | |\n"
        for one in settings
    )


def _pool_rows() -> str:
    rows = ""
    for name, one in POOL_SETTINGS.items():
        why = "as the worker's" if one.default is None else one.why
        default = "" if one.default is None else "none" if one.kind is Kind.TABLE else f"{one.default:,}"
        rows += f"| `{name}` | {why} | {default} |\n"
    return rows


def _server_rows() -> str:
    return "".join(
        f"| `{one.name}` | {one.why} | {_default_of(one)} | {_range_of(one)} |\n" for one in SERVE_SETTINGS.values()
    )


def _default_of(one: Setting) -> str:
    if one.default is None:
        return "derived" if "derived" in one.why else ""
    if one.kind is Kind.LIST:
        return "none"
    if one.kind in (Kind.DURATION, Kind.SIZE):
        return show_amount(one.default, one.kind)
    return f"{one.default:,}" if one.kind is Kind.NUMBER else str(one.default).lower()


def _range_of(one: Setting) -> str:
    if not one.high:
        return ""
    if one.kind in (Kind.DURATION, Kind.SIZE):
        return f"{show_amount(one.low, one.kind)} … {show_amount(one.high, one.kind)}"
    return f"{one.low:,} … {one.high:,}"


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


if __name__ == "__main__":
    print(build_table(), end="")
