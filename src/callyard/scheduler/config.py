"""The scheduler's settings. The worker builds them from its own; see `callyard.worker.config` for defaults' sources."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    executor_max_inflight: int = 128  # root calls reserved at one executor
    executor_max_runnable: int = 128  # calls at one executor that are not waiting
    executor_selection_sample_size: int = 0  # eligible executors scored for a choice; 0: all
    executor_memory_high_watermark: int = 0  # resident bytes from which an executor takes no more; 0: off
    task_max_inflight_calls: int = 1_024  # root calls RUNNING or WAITING, per task
    executor_task_slots: int = 32  # tasks in the call phase at once
    waiting_tasks_max: int = 1_024  # tasks that wait for a slot; more end `unavailable`
    base_backoff_ms: int = 10
    refusal_delay_ms_max: int = 1_000
    max_collected_output_bytes: int = 0  # per task, held by the worker; 0: off
    open_requests_max: int = 1_024  # per call
    max_subcall_depth: int = 8  # calls below a root call
    cache_entries: int = 65_536  # results cached per task
    cache_bytes_max: int = 32 * 1024 * 1024  # of them, per task
    batch_max_rows: int = 8_192
    batch_max_args_bytes: int = 32 * 1024 * 1024

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 0 if field.name in _MAY_BE_ZERO else 1
            if value < least:
                raise ValueError(f"{field.name} must be at least {least}, got {value}")


_MAY_BE_ZERO = frozenset(
    {
        "executor_selection_sample_size",
        "executor_memory_high_watermark",
        "waiting_tasks_max",
        "base_backoff_ms",
        "max_collected_output_bytes",
    }
)
