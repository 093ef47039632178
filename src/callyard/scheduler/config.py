"""The scheduler's settings. The worker builds them from its own; see `callyard.worker.config` for defaults' sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from callyard.ids import Tenant

QUANTUM_MAX = 1_024


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    executor_max_inflight: int = 128  # root calls reserved at one executor
    executor_max_runnable: int = 128  # calls at one executor that are not waiting
    executor_selection_sample_size: int = 0  # eligible executors scored for a choice; 0: all
    executor_memory_high_watermark: int = 0  # resident bytes from which an executor takes no more; 0: off
    task_max_inflight_calls: int = 1_024  # root calls RUNNING or WAITING, per task
    executor_task_slots: int = 32  # tasks in the call phase at once
    waiting_tasks_max: int = 1_024  # tasks that wait for a slot; more end `unavailable`
    instance_fairness: bool = False  # the tenant with the fewest calls in flight is next; else tasks take turns
    instance_fairness_quantum: int = 0  # binds of one tenant in a row; 0 and 1: chosen anew for each, at most 1024
    tenant_weights: Mapping[Tenant, int] = field(default_factory=dict)  # shares of tenants; 1 for the others
    queue_ahead_ms: int = 0  # work queued ahead at an executor, by observed time; 0: no limit
    base_backoff_ms: int = 10
    refusal_delay_ms_max: int = 1_000
    max_collected_output_bytes: int = 0  # per task, held by the worker; 0: off
    open_requests_max: int = 1_024  # per call
    max_subcall_depth: int = 8  # calls below a root call
    subcall_args_bytes_max: int = 1 << 30  # arguments of the subcalls that calls of one executor wait for
    cache_entries: int = 65_536  # results cached per task
    cache_bytes_max: int = 32 * 1024 * 1024  # of them, per task
    batch_max_rows: int = 8_192
    batch_max_args_bytes: int = 32 * 1024 * 1024

    def __post_init__(self) -> None:
        for one in fields(self):
            value, least = getattr(self, one.name), 0 if one.name in _MAY_BE_ZERO else 1
            if isinstance(value, int) and value < least:
                raise ValueError(f"{one.name} must be at least {least}, got {value}")
        for tenant, weight in self.tenant_weights.items():
            if weight < 1:
                raise ValueError(f"the weight of tenant {tenant!r} must be at least 1, got {weight}")


_MAY_BE_ZERO = frozenset(
    {
        "executor_selection_sample_size",
        "instance_fairness",
        "instance_fairness_quantum",
        "queue_ahead_ms",
        "executor_memory_high_watermark",
        "waiting_tasks_max",
        "base_backoff_ms",
        "max_collected_output_bytes",
    }
)
