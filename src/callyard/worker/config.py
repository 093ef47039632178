"""The worker's settings: one frozen record, checked when built.

The fields' names in the environment are `CALLYARD_` + the name in `ENVIRONMENT`; only the command line and the service
read it. What follows from other settings is a property, so that the two cannot disagree. Source: call-execution X73.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Final, Literal, get_args

from callyard.cpus import read_cpu_quota
from callyard.errors import UsageError
from callyard.functions.function import check_pool_name
from callyard.policy.restart import RestartPolicy
from callyard.policy.stall import MARGIN_MS, derive_stall_timeout_ms
from callyard.scheduler import SchedulerConfig
from callyard.scheduler.placement import DEFAULT_POOL, PoolName
from callyard.worker.sandbox.levels import Level, Limits, SandboxChoice, check_choice

MIB: Final = 1024 * 1024
SECOND_MS: Final = 1_000


class ExecutorSpawnMode(StrEnum):
    PROCESS = "process"
    SANDBOX = "sandbox"


LinkMode = Literal["socketpair", "path"]
AfterInterrupt = Literal["recycle", "keep"]
SLOT: Final = "{slot}"


def count_available_cpus() -> int:
    """CPUs that this process may use: its affinity, cut by a cgroup quota. Source: call-execution X89."""
    try:
        cpus = len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        cpus = os.cpu_count() or 1
    quota = read_cpu_quota()
    allowed = cpus if quota is None else -(-quota.quota_us // quota.period_us)
    return max(1, min(cpus, allowed))


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """A named pool: what is its own. What it leaves None is the worker's."""

    executors: int = 1  # processes that run its calls
    executors_max: int = 0  # while exclusive calls wait; 0: no more than `executors`
    spare_executors: int = 0
    executor_max_inflight: int | None = None
    executor_max_runnable: int | None = None
    executor_memory_high_watermark: int | None = None
    sandbox: SandboxChoice | None = None
    sandbox_min: str | None = None
    sandbox_memory_bytes: int | None = None
    sandbox_tmp_bytes: int | None = None
    sandbox_processes: int | None = None
    sandbox_open_files: int | None = None
    sandbox_cpu_percent: int | None = None
    sandbox_subprocesses: bool | None = None
    after_interrupt: AfterInterrupt | None = None
    environment: Mapping[str, str] = field(default_factory=dict)  # {slot}: the number of its place, from 0

    def __post_init__(self) -> None:
        for name, low, high in (("executors", 1, 1_024), ("executors_max", 0, 4_096), ("spare_executors", 0, 64)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise UsageError(f"{name} of a pool must be a whole number, got {value!r}")
            _check_range(f"{name} of a pool", value, low, high)
        environment: Mapping[Any, Any] = self.environment
        for name, value in environment.items():
            is_text = isinstance(name, str) and isinstance(value, str)
            if not is_text or not name or "=" in name or "\0" in name + value:
                raise UsageError(f"environment of a pool must be names and texts, got {name!r}: {value!r}")
        if self.names_slot and self.spare_executors:
            raise UsageError("a pool whose environment names {slot} has no spares: they start before they have a place")

    @property
    def names_slot(self) -> bool:
        return any(SLOT in value for value in self.environment.values())

    def environment_of(self, place: int) -> dict[str, str]:
        """Of the executor in that place; one that is there for a while only shares the number of another."""
        number = str(place % max(self.executors, self.executors_max))
        return {name: value.replace(SLOT, number) for name, value in self.environment.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    executor_count: int = 0  # processes that run calls; 0: the CPUs this process may use
    spare_executors: int = 1  # started and idle, to take a lost one's slot at once
    executor_spawn_mode: ExecutorSpawnMode = ExecutorSpawnMode.PROCESS
    sandbox: SandboxChoice | None = None  # goes before the spawn mode; None: auto in mode sandbox, off in mode process
    sandbox_min: str | None = None  # the least that auto may come to; None: landlock
    sandbox_memory_bytes: int = 2_048 * MIB  # 0: off; so are the others
    sandbox_tmp_bytes: int = 128 * MIB
    sandbox_processes: int = 64  # threads and processes
    sandbox_open_files: int = 256
    sandbox_cpu_percent: int = 0  # 100: one CPU
    sandbox_subprocesses: bool = False
    link_mode: LinkMode = "socketpair"
    executor_max_inflight: int = 128  # root calls at one executor
    executor_max_runnable: int = 128
    executor_selection_sample_size: int = 0  # 0: all
    executor_memory_high_watermark: int = 0  # bytes; 0: off
    task_max_inflight_calls: int = 1_024
    call_deadline_ms: int = 5_000  # what the stall timeout is derived from; `call`, `map` and `run` set no budget by it
    scheduler_stall_timeout_ms: int | None = None  # None: call_deadline_ms + 5000
    heartbeat_timeout_ms: int = 10_000  # raised to the stall timeout + 5000
    heartbeat_interval_ms: int = 500
    max_subcall_depth: int = 8
    base_backoff_ms: int = 10
    default_max_attempts: int = 3
    instance_fairness: bool = False
    instance_fairness_quantum: int = 0
    max_collected_output_bytes: int = 0  # 0: off
    executor_task_slots: int = 32
    stream_build_enabled: bool = False  # a list of more than batch_max_rows streams anyway
    max_outstanding_batches: int = 256
    batch_rows: int = 64
    batch_args_bytes: int = MIB
    batch_max_rows: int = 8_192
    batch_max_args_bytes: int = 32 * MIB
    reorder_bytes_max: int = 64 * MIB
    outbox_frames_max: int = 256
    outbox_bytes_max: int = 8 * MIB
    inbox_events_max: int = 4_096
    restart_delay_ms: int = 1_000
    max_restarts: int = 10
    restart_window_ms: int = 60_000
    backoff_ms: int = 30_000
    attach_timeout_ms: int = 30_000
    no_executor_timeout_ms: int = 60_000
    start_timeout_ms: int = 60_000  # loading a bundle
    audit_timeout_ms: int = 10_000  # one try of an audit policy; it has three
    cancel_grace_ms: int = 250
    drain_deadline_ms: int = 30_000
    executor_python: str = ""  # a path, a virtual environment, a command, or auto; empty: the interpreter of the worker
    executor_nice: int = 0  # how far executors step back behind other processes, 0..19; a server says 5
    capture_locals: bool = False
    executors_max: int = 0  # while exclusive calls wait; 0: four times the CPUs
    after_interrupt: AfterInterrupt = "recycle"  # what becomes of an executor in which a call was interrupted
    pools: Mapping[str, PoolConfig] = field(default_factory=dict)  # named pools, beside the worker's own

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise UsageError(f"{name} must be a whole number, got {value!r}")
            _check_range(name, value, low, high)
        if self.link_mode not in get_args(LinkMode):
            raise UsageError(f"link_mode must be one of {', '.join(get_args(LinkMode))}, got {self.link_mode!r}")
        _check_text("executor_python", self.executor_python)
        check_choice(self.sandbox, self.sandbox_min)
        if self.sandbox_choice != "off" and self.link_mode == "path":
            raise UsageError("link_mode=path has no sandbox: its link is inherited, link_mode=socketpair")
        if self.after_interrupt not in get_args(AfterInterrupt):
            raise UsageError(
                f"after_interrupt must be one of {', '.join(get_args(AfterInterrupt))}, got {self.after_interrupt!r}"
            )
        for name, pool in self.pools.items():
            self._check_pool(name, pool)
        if self.batch_rows > self.batch_max_rows:
            raise UsageError(f"need batch_rows <= batch_max_rows, got {self.batch_rows} > {self.batch_max_rows}")

    def _check_pool(self, name: str, pool: PoolConfig) -> None:
        try:
            check_pool_name(name)
        except (TypeError, ValueError) as error:
            raise UsageError(str(error)) from None
        if name == DEFAULT_POOL:
            raise UsageError(f"pool {name!r} is the worker's own: its settings are those of the worker")
        if not isinstance(pool, PoolConfig):
            raise UsageError(f"pool {name!r} must be a PoolConfig, got {pool!r}")
        try:
            own = self.of_pool(PoolName(name))
        except UsageError as error:
            raise UsageError(f"pool {name!r}: {error}") from None
        for setting in ("executor_max_inflight", "executor_max_runnable"):
            if getattr(own, setting) > getattr(self, setting):
                raise UsageError(f"pool {name!r}: {setting} is at most the worker's, {getattr(self, setting)}")

    def of_pool(self, name: PoolName) -> WorkerConfig:
        """The settings in force in a pool."""
        if name == DEFAULT_POOL:
            return self
        pool = self.pools[name]
        own = {setting: value for setting in _OF_POOL if (value := getattr(pool, setting)) is not None}
        executors_max = max(pool.executors, pool.executors_max)
        return replace(self, executor_count=pool.executors, executors_max=executors_max, pools={}, **own)

    def describe_pools(self, wanted: Mapping[str, Iterable[str]]) -> str:
        """What is wrong when functions want pools that there are not, by pool; empty: nothing."""
        missing = {name: list(functions) for name, functions in wanted.items() if name not in self.pools}
        missing.pop(DEFAULT_POOL, None)
        if not missing:
            return ""
        known = ", ".join(map(repr, self.pools)) or "none besides the worker's own"
        lines = [f"{', '.join(functions)} runs in pool {name!r}" for name, functions in missing.items()]
        name = next(iter(missing))
        return (
            f"{'; '.join(lines)}, which is not configured; the named pools are: {known}.\n"
            f"Give the worker one: Worker(…, pools={{{name!r}: PoolConfig(executors=1)}}), or on the command line"
            f" --pool {name}=1"
        )

    @property
    def executors(self) -> int:
        return self.executor_count or count_available_cpus()

    @property
    def sandbox_choice(self) -> SandboxChoice:
        if self.sandbox is not None:
            return self.sandbox
        return "auto" if self.executor_spawn_mode is ExecutorSpawnMode.SANDBOX else "off"

    @property
    def sandbox_least(self) -> Level:
        """Nobody who asks for a sandbox gets none without saying so."""
        return Level.LANDLOCK if self.sandbox_min is None else Level(self.sandbox_min)

    @property
    def sandbox_limits(self) -> Limits:
        return Limits(
            memory_bytes=self.sandbox_memory_bytes,
            tmp_bytes=self.sandbox_tmp_bytes,
            processes=self.sandbox_processes,
            open_files=self.sandbox_open_files,
            cpu_percent=self.sandbox_cpu_percent,
            subprocesses=self.sandbox_subprocesses,
        )

    @property
    def stall_timeout_ms(self) -> int:
        return derive_stall_timeout_ms(self.call_deadline_ms, self.scheduler_stall_timeout_ms)

    @property
    def silence_timeout_ms(self) -> int:
        """The heartbeat timeout in force: coupled to the stall timeout."""
        return max(self.heartbeat_timeout_ms, self.stall_timeout_ms + MARGIN_MS)

    @property
    def slots_max(self) -> int:
        return max(self.executors, self.executors_max or 4 * count_available_cpus())

    @property
    def mark_slots(self) -> int:
        """Begun-marks of one executor: its root calls, and a chain of subcalls below each (X80)."""
        return self.executor_max_inflight * (1 + self.max_subcall_depth)

    @property
    def scheduler(self) -> SchedulerConfig:
        return SchedulerConfig(
            executor_max_inflight=self.executor_max_inflight,
            executor_max_runnable=self.executor_max_runnable,
            executor_selection_sample_size=self.executor_selection_sample_size,
            executor_memory_high_watermark=self.executor_memory_high_watermark,
            task_max_inflight_calls=self.task_max_inflight_calls,
            executor_task_slots=self.executor_task_slots,
            base_backoff_ms=self.base_backoff_ms,
            max_collected_output_bytes=self.max_collected_output_bytes,
            max_subcall_depth=self.max_subcall_depth,
            batch_max_rows=self.batch_max_rows,
            batch_max_args_bytes=self.batch_max_args_bytes,
        )

    @property
    def restart_policy(self) -> RestartPolicy:
        return RestartPolicy(
            restart_delay_ms=self.restart_delay_ms,
            max_restarts=self.max_restarts,
            restart_window_ms=self.restart_window_ms,
            backoff_ms=self.backoff_ms,
        )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], **overrides: Any) -> WorkerConfig:
        """Defaults (executor_python: auto), then `CALLYARD_…` variables, then `overrides`.

        A value that does not parse is a UsageError.
        """
        kinds = {field.name: field.type for field in fields(cls)}
        values: dict[str, Any] = {"executor_python": "auto"}  # a command stands beside the user's project, not in it
        for variable, name in ENVIRONMENT.items():
            text = environ.get(f"CALLYARD_{variable}")
            if text is not None:
                values[name] = _parse(f"CALLYARD_{variable}", text, str(kinds[name]))
                if name in _RANGES and name not in overrides:
                    _check_range(f"CALLYARD_{variable}", values[name], *_RANGES[name])
        return cls(**{**values, **overrides})

    def with_settings(self, **settings: Any) -> WorkerConfig:
        known = {field.name for field in fields(self)}
        for name in settings:
            if name not in known:
                raise UsageError(f"no setting {name!r}; the settings are {', '.join(sorted(known))}")
        return replace(self, **settings)


def setting_range(name: str) -> tuple[int, int] | None:
    """Least and largest value of a setting; None: it is no number."""
    return _RANGES.get(name)


def _check_text(shown: str, value: object) -> None:
    if not isinstance(value, str) or "\0" in value:
        raise UsageError(f"{shown} must be a text, got {value!r}")


def _check_range(shown: str, value: int, low: int, high: int) -> None:
    """`shown`: the name under which it was given."""
    if not low <= value <= high:
        raise UsageError(f"{shown} must be from {low} to {high}, got {value}")


def _parse(variable: str, text: str, kind: str) -> Any:
    if kind == "bool":
        if text.lower() not in ("0", "1", "true", "false"):
            raise UsageError(f"{variable} must be true or false, got {text!r}")
        return text.lower() in ("1", "true")
    if kind.startswith("int"):
        try:
            return int(text)
        except ValueError:
            raise UsageError(f"{variable} must be a whole number, got {text!r}") from None
    if kind == "ExecutorSpawnMode":
        try:
            return ExecutorSpawnMode(text)
        except ValueError:
            names = ", ".join(ExecutorSpawnMode)
            raise UsageError(f"{variable} must be one of {names}, got {text!r}") from None
    return text


ENVIRONMENT: Final[Mapping[str, str]] = {
    **{
        name.upper(): name
        for name in (
            "executor_count",
            "executors_max",
            "after_interrupt",
            "executor_nice",
            "executor_python",
            "executor_spawn_mode",
            "sandbox",
            "sandbox_min",
            "sandbox_memory_bytes",
            "sandbox_tmp_bytes",
            "sandbox_processes",
            "sandbox_open_files",
            "sandbox_cpu_percent",
            "sandbox_subprocesses",
            "executor_max_inflight",
            "executor_max_runnable",
            "executor_selection_sample_size",
            "executor_memory_high_watermark",
            "task_max_inflight_calls",
            "call_deadline_ms",
            "scheduler_stall_timeout_ms",
            "heartbeat_timeout_ms",
            "max_subcall_depth",
            "base_backoff_ms",
            "max_collected_output_bytes",
            "executor_task_slots",
            "spare_executors",
            "start_timeout_ms",
            "audit_timeout_ms",
        )
    },
    "CALL_RETRY_MAX_ATTEMPTS": "default_max_attempts",
    "DISPATCH_INSTANCE_FAIRNESS": "instance_fairness",
    "DISPATCH_INSTANCE_FAIRNESS_QUANTUM": "instance_fairness_quantum",
    "STREAM_BUILD_ENABLED": "stream_build_enabled",
    "STREAM_BUILD_MAX_OUTSTANDING_BATCHES": "max_outstanding_batches",
    "STREAM_BUILD_BATCH_MAX_ROWS": "batch_rows",
    "STREAM_BUILD_BATCH_MAX_ARGS_BYTES": "batch_args_bytes",
    "EXECUTOR_RESTART_DELAY_MS": "restart_delay_ms",
    "EXECUTOR_MAX_RESTARTS": "max_restarts",
    "EXECUTOR_RESTART_WINDOW": "restart_window_ms",
    "EXECUTOR_BACKOFF_MS": "backoff_ms",
}
"""Variable (after `CALLYARD_`) to field."""

_OF_POOL: Final = (
    "spare_executors",
    "executor_max_inflight",
    "executor_max_runnable",
    "executor_memory_high_watermark",
    "sandbox",
    "sandbox_min",
    "sandbox_memory_bytes",
    "sandbox_tmp_bytes",
    "sandbox_processes",
    "sandbox_open_files",
    "sandbox_cpu_percent",
    "sandbox_subprocesses",
    "after_interrupt",
)
"""Settings that a named pool may have of its own, under the same names."""
_OPTIONAL: Final = frozenset({"scheduler_stall_timeout_ms"})
"""Settings that may be None: derived from others."""
_DAY_MS: Final = 24 * 3_600 * SECOND_MS
_RANGES: Final[Mapping[str, tuple[int, int]]] = {
    "executor_count": (0, 1_024),
    "spare_executors": (0, 64),
    "sandbox_memory_bytes": (0, 1 << 50),
    "sandbox_tmp_bytes": (0, 1 << 50),
    "sandbox_processes": (0, 1 << 20),
    "sandbox_open_files": (0, 1 << 20),
    "sandbox_cpu_percent": (0, 102_400),
    "executors_max": (0, 4_096),
    "executor_max_inflight": (1, 4_096),
    "executor_nice": (0, 19),
    "executor_max_runnable": (1, 4_096),
    "executor_selection_sample_size": (0, 1_024),
    "executor_memory_high_watermark": (0, 1 << 50),
    "task_max_inflight_calls": (1, 1_000_000),
    "call_deadline_ms": (0, _DAY_MS),
    "scheduler_stall_timeout_ms": (1, _DAY_MS),
    "heartbeat_timeout_ms": (1_000, _DAY_MS),
    "heartbeat_interval_ms": (50, 60_000),
    "max_subcall_depth": (1, 64),
    "base_backoff_ms": (1, 60_000),
    "default_max_attempts": (1, 100),
    "instance_fairness_quantum": (0, 1 << 31),
    "max_collected_output_bytes": (0, 1 << 50),
    "executor_task_slots": (1, 100_000),
    "max_outstanding_batches": (1, 65_536),
    "batch_rows": (1, 8_192),
    "batch_args_bytes": (1_024, 32 * MIB),
    "batch_max_rows": (1, 65_536),
    "batch_max_args_bytes": (1_024, 1 << 31),
    "reorder_bytes_max": (0, 1 << 40),
    "outbox_frames_max": (1, 65_536),
    "outbox_bytes_max": (64 * 1024, 1 << 31),
    "inbox_events_max": (64, 1 << 20),
    "restart_delay_ms": (0, _DAY_MS),
    "max_restarts": (0, 1_000_000),
    "restart_window_ms": (1, _DAY_MS),
    "backoff_ms": (0, _DAY_MS),
    "attach_timeout_ms": (100, _DAY_MS),
    "no_executor_timeout_ms": (100, _DAY_MS),
    "start_timeout_ms": (100, _DAY_MS),
    "audit_timeout_ms": (10, _DAY_MS),
    "cancel_grace_ms": (0, _DAY_MS),
    "drain_deadline_ms": (0, _DAY_MS),
}
