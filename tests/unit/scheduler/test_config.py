"""Settings are checked when built."""

from __future__ import annotations

from dataclasses import fields

import pytest

from callyard.ids import Tenant
from callyard.scheduler import SchedulerConfig

OFF_AT_ZERO = {
    "executor_selection_sample_size",
    "executor_memory_high_watermark",
    "waiting_tasks_max",
    "base_backoff_ms",
    "max_collected_output_bytes",
    "instance_fairness_quantum",
    "queue_ahead_ms",
}
NUMBERS = [one.name for one in fields(SchedulerConfig) if one.name not in ("instance_fairness", "tenant_weights")]


@pytest.mark.requirement("X73")
@pytest.mark.parametrize("name", NUMBERS)
def test_ranges(name: str) -> None:
    SchedulerConfig(**{name: 1})
    with pytest.raises(ValueError, match=f"{name} must be at least [01], got -1"):
        SchedulerConfig(**{name: -1})
    if name in OFF_AT_ZERO:
        SchedulerConfig(**{name: 0})
    else:
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            SchedulerConfig(**{name: 0})


@pytest.mark.requirement("X17")
def test_a_weight_is_at_least_1() -> None:
    SchedulerConfig(tenant_weights={Tenant("a"): 1})
    with pytest.raises(ValueError, match="the weight of tenant 'a' must be at least 1, got 0"):
        SchedulerConfig(tenant_weights={Tenant("a"): 0})


@pytest.mark.requirement("X73")
def test_defaults_are_those_of_the_specification() -> None:
    assert {field.name: getattr(SchedulerConfig(), field.name) for field in fields(SchedulerConfig)} == {
        "executor_max_inflight": 128,
        "executor_max_runnable": 128,
        "executor_selection_sample_size": 0,
        "executor_memory_high_watermark": 0,
        "task_max_inflight_calls": 1_024,
        "executor_task_slots": 32,
        "waiting_tasks_max": 1_024,
        "instance_fairness": False,
        "instance_fairness_quantum": 0,
        "tenant_weights": {},
        "queue_ahead_ms": 0,
        "base_backoff_ms": 10,
        "refusal_delay_ms_max": 1_000,
        "max_collected_output_bytes": 0,
        "open_requests_max": 1_024,
        "max_subcall_depth": 8,
        "subcall_args_bytes_max": 1 << 30,
        "cache_entries": 65_536,
        "cache_bytes_max": 32 * 1024 * 1024,
        "batch_max_rows": 8_192,
        "batch_max_args_bytes": 32 * 1024 * 1024,
    }
