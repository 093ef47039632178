"""The worker's settings: one frozen record, checked when built.

Each field says what its setting is, and how it may be given elsewhere follows from that (`callyard.settings`); only the
command line and the service read variables and files. What follows from other settings is a property, so that the two
cannot disagree. Source: call-execution X73.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, Literal, get_args

from callyard.cpus import read_cpu_quota
from callyard.errors import UsageError
from callyard.functions.function import check_pool_name
from callyard.ids import Tenant
from callyard.policy.restart import RestartPolicy
from callyard.policy.stall import MARGIN_MS, derive_stall_timeout_ms
from callyard.scheduler import SchedulerConfig
from callyard.scheduler.placement import DEFAULT_POOL, PoolName
from callyard.settings import DAY_MS, Misfit, Setting, read_variables, setting, settings_of, suggest
from callyard.worker.sandbox.levels import CHOICES, LEVELS, Level, Limits, SandboxChoice, check_choice

MIB: Final = 1024 * 1024
_MEMORY_MAX: Final = 1 << 50
_WEIGHT_MAX: Final = 1_000_000


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


def check_named_pool(name: str) -> None:
    """Raises UsageError for what no named pool can be called."""
    try:
        check_pool_name(name)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from None
    if name == DEFAULT_POOL:
        raise UsageError(f"pool {name!r} is the worker's own: its settings are those of the worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """A named pool: what is its own. What it leaves None is the worker's."""

    executors: int = setting(1, "processes that run its calls, all from the start", low=1, high=1_024)
    executors_max: int = setting(
        0, "processes while `exclusive` calls wait for one of their own; 0: no more than `executors`", high=4_096
    )
    spare_executors: int = setting(
        0, "processes kept started and idle; none where the environment names `{slot}`", high=64
    )
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
    recycle_after_calls: int | None = None
    recycle_above_rss: int | None = None
    environment: Mapping[str, str] = setting(
        dict, "variables of its processes; `{slot}` is the number of a process's place, from 0"
    )

    def __post_init__(self) -> None:
        for name, one in POOL_SETTINGS.items():
            if not one.is_optional:  # the others are checked as the worker's
                one.check(getattr(self, name), f"{name} of a pool")
        environment: Mapping[Any, Any] = self.environment
        for name, value in environment.items():
            is_text = isinstance(name, str) and isinstance(value, str)
            if not is_text or not name or "=" in name or "\0" in name + value:
                kind = "a text" if isinstance(value, str) else type(value).__name__  # the value may be a secret
                raise Misfit(
                    ("environment", str(name)), f"environment of a pool must be names and texts, got {name!r}: {kind}"
                )
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
    executor_count: int = setting(
        0,
        "processes that run calls; 0: the CPUs this process may use (affinity and cgroup quota)",
        high=1_024,
        also="executors",
    )
    executor_max_inflight: int = setting(
        128, "calls at one executor at once; they take turns, and only one computes at a time", low=1, high=4_096
    )
    default_max_attempts: int = setting(
        3, "most attempts of a call that may be retried", low=1, high=100, variable="CALL_RETRY_MAX_ATTEMPTS"
    )
    executor_memory_high_watermark: int = setting(
        0,
        "an executor above this resident size takes no more calls, and is replaced once it has none; 0: off",
        high=_MEMORY_MAX,
        size=True,
    )
    executor_nice: int = setting(
        0, "how far executors step back behind other processes (`nice`); `callyard serve` says 5", high=19
    )
    executor_python: str = setting(
        "",
        "the interpreter of executors: a path, a virtual environment, a command, or `auto`, with which commands begin "
        "(`$VIRTUAL_ENV`, else `.venv` in the target's project, else our own); empty: that of the worker",
    )
    start_timeout_ms: int = setting(60_000, "time to import the functions' file", low=100, high=DAY_MS)
    audit_timeout_ms: int = setting(
        10_000, "time of one try of an audit policy; without a verdict it is tried twice more", low=10, high=DAY_MS
    )
    drain_deadline_ms: int = setting(
        30_000, "what running calls get when the worker closes, before they are cancelled", high=DAY_MS
    )
    capture_locals: bool = setting(False, "a failure also carries the local variables of the code that raised")
    spare_executors: int = setting(1, "processes kept started and idle, to take a lost one's place at once", high=64)
    executor_spawn_mode: ExecutorSpawnMode = setting(
        ExecutorSpawnMode.PROCESS, "how executors are started: `process`, or `sandbox`", choices=ExecutorSpawnMode
    )
    link_mode: LinkMode = setting(
        "socketpair",
        "how executors are connected: `socketpair`, inherited, or `path`, a socket in the run's folder",
        choices=get_args(LinkMode),
    )
    executor_max_runnable: int = setting(
        128, "calls at one executor that are not waiting; one that has as many takes no more", low=1, high=4_096
    )
    executor_selection_sample_size: int = setting(0, "executors compared when a call is placed; 0: all", high=1_024)
    task_max_inflight_calls: int = setting(
        1_024, "calls of one list that are at executors at once", low=1, high=1_000_000
    )
    call_deadline_ms: int = setting(
        5_000, "the budget that the stall timeout allows for; limits no call itself", high=DAY_MS
    )
    scheduler_stall_timeout_ms: int | None = setting(
        None,
        "an executor blocked so long by code that nothing interrupts is killed; derived: `call_deadline_ms` + 5,000;"
        " longer for larger budgets, off while a call without a budget runs there",
        low=1,
        high=DAY_MS,
    )
    heartbeat_timeout_ms: int = setting(
        10_000, "an executor silent this long is killed; at least the stall timeout + 5,000", low=1_000, high=DAY_MS
    )
    heartbeat_interval_ms: int = setting(500, "time between an executor's heartbeats", low=50, high=60_000)
    max_subcall_depth: int = setting(
        8, "calls below a call of a list; a call of the deepest makes no further one", low=1, high=64
    )
    subcall_args_bytes_max: int = setting(
        1_024 * MIB,
        "arguments of all the subcalls that the calls of one executor wait for; more end as `resource_limit`",
        low=64 * 1_024,
        high=1 << 40,
    )
    base_backoff_ms: int = setting(
        10, "the wait before a first retry; it grows with each, and is random", low=1, high=60_000
    )
    instance_fairness: bool = setting(
        False,
        "the tenant with the fewest calls in flight is next; else call lists take turns, whoever's they are",
        variable="DISPATCH_INSTANCE_FAIRNESS",
    )
    instance_fairness_quantum: int = setting(
        0,
        "calls of the chosen tenant that are placed in a row; 0 and 1: one, above 1,024: 1,024",
        high=1 << 31,
        variable="DISPATCH_INSTANCE_FAIRNESS_QUANTUM",
    )
    tenant_weights: Mapping[str, int] = setting(
        dict, "with it, shares of tenants by name, 1 for the others: calls in flight count by them"
    )
    queue_ahead_ms: int = setting(
        5,
        "work queued ahead at an executor, by the observed time of a call; one call at the least; 0: no limit",
        high=60_000,
    )
    max_collected_output_bytes: int = setting(
        0, "results of one list that the worker may hold; above it the list ends early; 0: off", high=_MEMORY_MAX
    )
    executor_task_slots: int = setting(32, "call lists that run at once; more wait", low=1, high=100_000)
    stream_build_enabled: bool = setting(False, "changes nothing here: every list is streamed, short ones too")
    max_outstanding_batches: int = setting(
        256,
        "batches of one list that were read and are not done",
        low=1,
        high=65_536,
        variable="STREAM_BUILD_MAX_OUTSTANDING_BATCHES",
    )
    batch_rows: int = setting(64, "most rows read at a time", low=1, high=8_192, variable="STREAM_BUILD_BATCH_MAX_ROWS")
    batch_args_bytes: int = setting(
        MIB,
        "most bytes of arguments read at a time",
        low=1_024,
        high=32 * MIB,
        variable="STREAM_BUILD_BATCH_MAX_ARGS_BYTES",
    )
    batch_max_rows: int = setting(8_192, "most rows that the scheduler takes as one batch", low=1, high=65_536)
    batch_max_args_bytes: int = setting(
        32 * MIB, "most bytes of arguments that the scheduler takes as one batch", low=1_024, high=1 << 31
    )
    outstanding_bytes_max: int = setting(
        64 * MIB,
        "arguments and results of the batches under way; from there on no further one is begun; 0: off",
        high=1 << 40,
    )
    reorder_bytes_max: int = setting(64 * MIB, "results that wait for an earlier one", high=1 << 40)
    outbox_frames_max: int = setting(256, "messages that wait to be written to one executor", low=1, high=65_536)
    outbox_bytes_max: int = setting(
        8 * MIB, "an executor that leaves more than this unread is lost", low=64 * 1_024, high=1 << 31
    )
    arena_bytes_max: int = setting(
        1_024 * MIB,
        "an executor's arena, in which values above 1 MiB travel: half of it to the executor, half back; 0: none,"
        " and 16 MiB is the largest value",
        high=1 << 40,
    )
    shared_bytes_max: int = setting(
        4_096 * MIB,
        "the values that a worker keeps for many calls (`shared`), all together; 0: none",
        high=1 << 40,
    )
    inbox_events_max: int = setting(
        4_096, "events that wait for the scheduler before links are read no further", low=64, high=1 << 20
    )
    restart_delay_ms: int = setting(
        1_000,
        "the wait before an executor that ended is replaced by a new process",
        high=DAY_MS,
        variable="EXECUTOR_RESTART_DELAY_MS",
    )
    max_restarts: int = setting(
        10,
        "restarts within `restart_window_ms`, after which `backoff_ms` is the wait",
        high=1_000_000,
        variable="EXECUTOR_MAX_RESTARTS",
    )
    restart_window_ms: int = setting(
        60_000, "the time in which restarts are counted", low=1, high=DAY_MS, variable="EXECUTOR_RESTART_WINDOW"
    )
    backoff_ms: int = setting(30_000, "the wait after too many restarts", high=DAY_MS, variable="EXECUTOR_BACKOFF_MS")
    attach_timeout_ms: int = setting(30_000, "time for a new process to connect", low=100, high=DAY_MS)
    no_executor_timeout_ms: int = setting(
        60_000, "without any executor for so long, calls end as `unavailable`", low=100, high=DAY_MS
    )
    sandbox: SandboxChoice | None = setting(
        None,
        "`bwrap`, `landlock`, `auto` (the strongest here) or `off`;"
        " by default `auto` in spawn mode `sandbox` or where a minimum is given, else `off`",
        choices=CHOICES,
    )
    sandbox_min: str | None = setting(None, "the least that `auto` may come to; by default `landlock`", choices=LEVELS)
    sandbox_memory_bytes: int = setting(2_048 * MIB, "memory of a sandboxed executor; 0: no limit", high=_MEMORY_MAX)
    sandbox_tmp_bytes: int = setting(128 * MIB, "size of its own /tmp; 0: no limit", high=_MEMORY_MAX)
    sandbox_processes: int = setting(64, "threads and processes in it; 0: no limit", high=1 << 20)
    sandbox_open_files: int = setting(256, "open files of each of its processes; 0: no limit", high=1 << 20)
    sandbox_cpu_percent: int = setting(0, "CPU that it may use, 100 for one; 0: no limit", high=102_400)
    sandbox_subprocesses: bool = setting(False, "whether functions in it may start programs")
    executors_max: int = setting(
        0, "processes while `exclusive` calls wait for one of their own; 0: four times the CPUs", high=4_096
    )
    after_interrupt: AfterInterrupt = setting(
        "recycle",
        "an executor in which a call was interrupted is replaced, and ends its others beside the next one (`recycle`),"
        " or goes on (`keep`)",
        choices=get_args(AfterInterrupt),
    )
    recycle_after_calls: int = setting(
        0, "an executor that has ended so many calls is replaced, for code that leaks; 0: off", high=1 << 40
    )
    recycle_above_rss: int = setting(
        0, "an executor above this resident size is replaced, for code that leaks; 0: off", high=_MEMORY_MAX, size=True
    )
    cancel_grace_ms: int = setting(250, "a cancelled call that does not stop within it costs its executor", high=DAY_MS)
    pools: Mapping[str, PoolConfig] = setting(dict, "named pools of executors, by name: see below")

    def __post_init__(self) -> None:
        for name, one in WORKER_SETTINGS.items():
            one.check(getattr(self, name), name)
        check_choice(self.sandbox, self.sandbox_min)
        if self.sandbox_choice != "off" and self.link_mode == "path":
            raise UsageError("link_mode=path has no sandbox: its link is inherited, link_mode=socketpair")
        self._check_weights(self.tenant_weights)
        for name, pool in self.pools.items():
            self._check_pool(name, pool)
        if self.batch_rows > self.batch_max_rows:
            raise UsageError(f"need batch_rows <= batch_max_rows, got {self.batch_rows} > {self.batch_max_rows}")

    def _check_weights(self, weights: Mapping[Any, Any]) -> None:
        for tenant, weight in weights.items():
            fits = isinstance(weight, int) and not isinstance(weight, bool) and 1 <= weight <= _WEIGHT_MAX
            if not isinstance(tenant, str) or not fits:
                text = f"tenant_weights must be names and whole numbers from 1 to {_WEIGHT_MAX:,}"
                raise Misfit(("tenant_weights", str(tenant)), f"{text}, got {tenant!r}: {weight!r}")

    def _check_pool(self, name: str, pool: PoolConfig) -> None:
        check_named_pool(name)
        if not isinstance(pool, PoolConfig):
            raise UsageError(f"pool {name!r} must be a PoolConfig, got {type(pool).__name__}")
        try:
            own = self.of_pool(PoolName(name))
        except UsageError as error:
            raise UsageError(f"pool {name!r}: {error}") from None
        for one in ("executor_max_inflight", "executor_max_runnable"):
            if getattr(own, one) > getattr(self, one):
                raise UsageError(f"pool {name!r}: {one} is at most the worker's, {getattr(self, one)}")

    def of_pool(self, name: PoolName) -> WorkerConfig:
        """The settings in force in a pool."""
        if name == DEFAULT_POOL:
            return self
        pool = self.pools[name]
        own = {one: value for one in _OF_POOL if (value := getattr(pool, one)) is not None}
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
        wants_one = self.executor_spawn_mode == ExecutorSpawnMode.SANDBOX or self.sandbox_min not in (None, Level.OFF)
        return "auto" if wants_one else "off"

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
            instance_fairness=self.instance_fairness,
            instance_fairness_quantum=self.instance_fairness_quantum,
            tenant_weights={Tenant(name): weight for name, weight in self.tenant_weights.items()},
            queue_ahead_ms=self.queue_ahead_ms,
            base_backoff_ms=self.base_backoff_ms,
            max_collected_output_bytes=self.max_collected_output_bytes,
            max_subcall_depth=self.max_subcall_depth,
            subcall_args_bytes_max=self.subcall_args_bytes_max,
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
    def from_environment(
        cls, environ: Mapping[str, str], *, file: Mapping[str, Any] | None = None, **overrides: Any
    ) -> WorkerConfig:
        """Defaults (executor_python: auto), then those of a file, then `CALLYARD_…` variables, then `overrides`.

        A value that does not parse is a UsageError.
        """
        variables = read_variables(WORKER_SETTINGS, environ, skip=overrides)
        given = {name: one.value for name, one in variables.items()}
        return cls(**{**OF_COMMANDS, **(file or {}), **given, **overrides})

    def with_settings(self, **settings: Any) -> WorkerConfig:
        for name in settings:
            if name not in WORKER_SETTINGS:
                raise UsageError(f"no setting {name!r}; {suggest(name, ['executors', *sorted(WORKER_SETTINGS)])}")
        return replace(self, **settings)


OF_COMMANDS: Final[Mapping[str, Any]] = {"executor_python": "auto"}
"""Defaults of commands: they stand beside the user's project, not in it."""
WORKER_SETTINGS: Final[Mapping[str, Setting]] = settings_of(WorkerConfig)
"""The table: what `Worker(…)`, `--set`, the variables and the settings file take. Source: call-execution X73."""
POOL_SETTINGS: Final[Mapping[str, Setting]] = settings_of(PoolConfig, WORKER_SETTINGS)
_OF_POOL: Final = tuple(name for name in POOL_SETTINGS if name in WORKER_SETTINGS and name != "executors_max")
"""Settings that a named pool may have of its own, under the same names."""
