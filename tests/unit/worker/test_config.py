"""Settings: defaults, variables, refused values."""

from __future__ import annotations

import pytest

from callyard.errors import UsageError
from callyard.scheduler.placement import PoolName
from callyard.worker.config import PoolConfig, WorkerConfig, count_available_cpus

TABLE = [
    ("executor_count", "EXECUTOR_COUNT", 0, -1),
    ("executor_max_inflight", "EXECUTOR_MAX_INFLIGHT", 128, 0),
    ("executor_max_runnable", "EXECUTOR_MAX_RUNNABLE", 128, 0),
    ("executor_selection_sample_size", "EXECUTOR_SELECTION_SAMPLE_SIZE", 0, -1),
    ("executor_memory_high_watermark", "EXECUTOR_MEMORY_HIGH_WATERMARK", 0, -1),
    ("task_max_inflight_calls", "TASK_MAX_INFLIGHT_CALLS", 1_024, 0),
    ("call_deadline_ms", "CALL_DEADLINE_MS", 5_000, -1),
    ("heartbeat_timeout_ms", "HEARTBEAT_TIMEOUT_MS", 10_000, 0),
    ("max_subcall_depth", "MAX_SUBCALL_DEPTH", 8, 0),
    ("base_backoff_ms", "BASE_BACKOFF_MS", 10, 0),
    ("default_max_attempts", "CALL_RETRY_MAX_ATTEMPTS", 3, 0),
    ("instance_fairness_quantum", "DISPATCH_INSTANCE_FAIRNESS_QUANTUM", 0, -1),
    ("max_collected_output_bytes", "MAX_COLLECTED_OUTPUT_BYTES", 0, -1),
    ("executor_task_slots", "EXECUTOR_TASK_SLOTS", 32, 0),
    ("max_outstanding_batches", "STREAM_BUILD_MAX_OUTSTANDING_BATCHES", 256, 0),
    ("batch_rows", "STREAM_BUILD_BATCH_MAX_ROWS", 64, 0),
    ("batch_args_bytes", "STREAM_BUILD_BATCH_MAX_ARGS_BYTES", 1 << 20, 0),
    ("restart_delay_ms", "EXECUTOR_RESTART_DELAY_MS", 1_000, -1),
    ("max_restarts", "EXECUTOR_MAX_RESTARTS", 10, -1),
    ("restart_window_ms", "EXECUTOR_RESTART_WINDOW", 60_000, 0),
    ("backoff_ms", "EXECUTOR_BACKOFF_MS", 30_000, -1),
]


@pytest.mark.requirement("X73")
@pytest.mark.parametrize(("name", "variable", "default", "refused"), TABLE)
def test_default_variable_and_refused_value(name: str, variable: str, default: int, refused: int) -> None:
    given = default + 1
    assert getattr(WorkerConfig(), name) == default
    assert getattr(WorkerConfig.from_environment({f"CALLYARD_{variable}": str(given)}), name) == given
    with pytest.raises(UsageError, match=name):
        WorkerConfig(**{name: refused})
    with pytest.raises(UsageError, match=rf"CALLYARD_{variable} must be a .*whole [a-z]+, got 'many'"):
        WorkerConfig.from_environment({f"CALLYARD_{variable}": "many"})


@pytest.mark.requirement("X73")
def test_booleans_modes_and_overrides() -> None:
    environ = {
        "CALLYARD_DISPATCH_INSTANCE_FAIRNESS": "true",
        "CALLYARD_STREAM_BUILD_ENABLED": "1",
        "CALLYARD_EXECUTOR_SPAWN_MODE": "process",
        "CALLYARD_EXECUTOR_COUNT": "3",
        "CALLYARD_SOMETHING_ELSE": "x",
    }
    config = WorkerConfig.from_environment(environ, executor_count=5)
    assert config.instance_fairness is True
    assert config.stream_build_enabled is True
    assert config.executors == 5, "an option goes before the environment"
    for variable, value in (("DISPATCH_INSTANCE_FAIRNESS", "maybe"), ("EXECUTOR_SPAWN_MODE", "magic")):
        with pytest.raises(UsageError, match=variable):
            WorkerConfig.from_environment({f"CALLYARD_{variable}": value})


@pytest.mark.requirement("X73")
@pytest.mark.requirement("X38")
@pytest.mark.parametrize(
    ("call_deadline_ms", "explicit", "stall", "silence"),
    [
        (5_000, None, 10_000, 15_000),
        (5_000, 6_000, 10_000, 15_000),
        (5_000, 6_001, 6_001, 11_001),
        (0, None, 5_000, 10_000),
    ],
)
def test_stall_and_silence_are_derived(call_deadline_ms: int, explicit: int | None, stall: int, silence: int) -> None:
    config = WorkerConfig(call_deadline_ms=call_deadline_ms, scheduler_stall_timeout_ms=explicit)
    assert config.stall_timeout_ms == stall
    assert config.silence_timeout_ms == silence


def test_an_unknown_setting_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"no setting 'executers'; did you mean executors or executors_max\?"):
        WorkerConfig().with_settings(executers=2)
    with pytest.raises(UsageError, match=r"no setting 'speed'; there are \d+, such as executors, "):
        WorkerConfig().with_settings(speed=2)


def test_executors_default_to_the_cpus() -> None:
    assert WorkerConfig().executors == count_available_cpus() >= 1


def test_a_variable_out_of_range_is_named_as_it_was_given() -> None:
    with pytest.raises(UsageError, match=r"^CALLYARD_EXECUTOR_COUNT must be from 0 to 1024, got 9999"):
        WorkerConfig.from_environment({"CALLYARD_EXECUTOR_COUNT": "9999"})
    assert WorkerConfig.from_environment({"CALLYARD_EXECUTOR_COUNT": "9999"}, executor_count=2).executors == 2


# --- named pools ----------------------------------------------------------------------------------------------------


def test_a_pool_has_its_own_settings_and_the_worker_s_others() -> None:
    gpu = PoolConfig(executors=2, sandbox="bwrap", executor_memory_high_watermark=7, after_interrupt="keep")
    config = WorkerConfig(
        executor_count=5, spare_executors=3, sandbox_tmp_bytes=9, sandbox="landlock", pools={"gpu": gpu}
    )
    own = config.of_pool(PoolName("gpu"))
    assert (own.executors, own.slots_max, own.spare_executors, own.sandbox_choice) == (2, 2, 0, "bwrap")
    assert (own.executor_memory_high_watermark, own.after_interrupt, own.sandbox_tmp_bytes) == (7, "keep", 9)
    assert config.of_pool(PoolName("default")) is config
    assert PoolConfig(executors=2, executors_max=6).executors_max == 6


def test_slots_have_numbers() -> None:
    gpu = PoolConfig(executors=2, environment={"CUDA_VISIBLE_DEVICES": "{slot}", "NAME": "gpu-{slot}", "PLAIN": "1"})
    assert gpu.environment_of(1) == {"CUDA_VISIBLE_DEVICES": "1", "NAME": "gpu-1", "PLAIN": "1"}
    assert gpu.environment_of(2)["CUDA_VISIBLE_DEVICES"] == "0", "there is no third"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"executors": 0}, "executors of a pool must be from 1"),
        ({"executors": True}, "whole number"),
        ({"spare_executors": 1, "environment": {"A": "{slot}"}}, "has no spares"),
        ({"environment": {"A": 1}}, "names and texts"),
        ({"environment": {"A=B": "1"}}, "names and texts"),
        ({"environment": {"A": "sesame\0"}}, "got 'A': a text$"),
        ({"environment": "TOKEN=sesame"}, "environment of a pool must be a table, got str$"),
    ],
)
def test_what_is_no_pool(wrong: dict, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        PoolConfig(**wrong)


@pytest.mark.parametrize(
    ("pools", "told"),
    [
        ({"default": PoolConfig()}, "the worker's own"),
        ({"a b": PoolConfig()}, "letters, digits"),
        ({"gpu": 2}, "must be a PoolConfig"),
        ({"gpu": {"environment": {"TOKEN": "sesame"}}}, "pool 'gpu' must be a PoolConfig, got dict$"),
        ([PoolConfig(environment={"TOKEN": "sesame"})], "^pools must be a table, got list$"),
        ({"gpu": PoolConfig(sandbox="bwarp")}, "pool 'gpu': sandbox must be one of"),  # type: ignore[arg-type]
        ({"gpu": PoolConfig(sandbox_open_files=-1)}, "pool 'gpu': sandbox_open_files must be from"),
        ({"gpu": PoolConfig(executor_max_inflight=129)}, "at most the worker's, 128"),
    ],
)
def test_what_a_worker_takes_for_no_pool(pools: dict, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        WorkerConfig(pools=pools)


@pytest.mark.requirement("X17", "X73")
def test_shares_of_tenants() -> None:
    config = WorkerConfig(instance_fairness=True, tenant_weights={"acme": 3})
    assert config.scheduler.tenant_weights == {"acme": 3}
    for weights in ({"acme": 0}, {"acme": True}, {"acme": 1.5}, {7: 1}, {"acme": 1_000_001}):
        with pytest.raises(UsageError, match="tenant_weights must be names and whole numbers from 1 to 1,000,000"):
            WorkerConfig(tenant_weights=weights)  # type: ignore[arg-type]
