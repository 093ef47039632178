"""What one seed gives the scheduler to do, and what goes wrong while it does it."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any, Final

import msgspec

from callyard.errors import ErrorKind, fail
from callyard.ids import Digest, FunctionId, TaskId, Tenant
from callyard.policy.credit import CreditWindow, ReorderBuffer
from callyard.scheduler.calls import CallResult, FunctionTarget, NewCall
from callyard.scheduler.commands import ConvergeTaskCalls
from callyard.scheduler.config import SchedulerConfig
from callyard.scheduler.placement import DEFAULT_POOL, PoolName
from callyard.scheduler.tasks import TaskPlan
from callyard.testing.executors import Ask, Script

FAR: Final = PoolName("far")
"""The named pool, in seeds that have one."""
PROMISES: Final[Mapping[str, Mapping[str, Any]]] = {
    "plain": {},
    "idempotent": {"idempotent": True},
    "pure": {"pure": True, "idempotent": True},
    "single": {"max_concurrency": 1},
    "other": {"max_concurrency": 1},
    "few": {"max_concurrency": 2, "pure": True, "idempotent": True},
    "alone": {"exclusive": True},
    "far": {"pool": FAR},
    "far pure": {"pool": FAR, "pure": True, "idempotent": True},
    "far single": {"pool": FAR, "max_concurrency": 1},
    "far alone": {"pool": FAR, "exclusive": True},
}
"""The functions of every bundle."""
ARGS: Final = (b"[0]", b"[1]", b"[2]")
"""Few, so that there are equal calls and cycles."""


class Offer(msgspec.Struct, frozen=True):
    """What calls of one seed may be of."""

    digests: tuple[Digest, ...] = (Digest("digest-0"),)
    pools: tuple[PoolName, ...] = (DEFAULT_POOL,)
    confined: tuple[PoolName, ...] = ()
    """Those of the pools in which an executor serves one tenant."""

    @classmethod
    def draw(cls, rng: Random) -> Offer:
        pools = rng.choice(((DEFAULT_POOL,), (DEFAULT_POOL, FAR)))
        return cls(
            digests=tuple(Digest(f"digest-{n}") for n in range(rng.choice((1, 1, 2)))),
            pools=pools,
            confined=tuple(pool for pool in pools if rng.random() < 0.4),
        )

    @property
    def is_shared(self) -> bool:
        """There is more than one placement in a pool: executors must be exchanged."""
        return len(self.digests) > 1 or bool(self.confined)

    def names(self, among: tuple[str, ...] = tuple(PROMISES)) -> list[str]:
        return [name for name in among if PROMISES[name].get("pool", DEFAULT_POOL) in self.pools]

    def target(self, name: str, digest: Digest) -> FunctionTarget:
        pool = PROMISES[name].get("pool", DEFAULT_POOL)
        return FunctionTarget(FunctionId(name), digest, f"m:{name}", **PROMISES[name], confined=pool in self.confined)


class Faults(msgspec.Struct):
    """How often what goes wrong, 0..1; about half of them are off in any one seed."""

    crash: float = 0.0
    """A tick kills an executor."""
    dies: float = 0.0
    """An attempt takes its process down."""
    hangs: float = 0.0
    """An attempt never yields."""
    silence: float = 0.0
    """A tick starts a pause of an executor's heartbeats."""
    full_outbox: float = 0.0
    """A tick starts a time in which an executor's sends are refused."""
    bind_refused: float = 0.0
    rejected: float = 0.0
    """The shell cannot send an attempt at all."""
    given_back: float = 0.0
    """An executor gives back a call that it has not begun."""
    resume_lost: float = 0.0
    """A resume cannot be sent."""
    repeated: float = 0.0
    """A frame comes again, up to 5 s later."""
    ignores_cancel: float = 0.0
    fails: float = 0.0
    """An attempt fails, by any kind."""
    bad_row: float = 0.0
    stopped: float = 0.0
    """A task is stopped at some moment."""
    slow_sink: float = 0.0
    """A batch takes seconds to write."""

    @classmethod
    def draw(cls, rng: Random) -> Faults:
        return cls(
            **{name: rng.choice((0.0, rng.random())) * _RATE_MAX.get(name, 0.1) for name in cls.__struct_fields__}
        )


_RATE_MAX = {
    "crash": 0.3,
    "silence": 0.3,
    "full_outbox": 0.5,
    "given_back": 0.3,
    "resume_lost": 0.3,
    "fails": 0.6,
    "bad_row": 0.2,
    "stopped": 0.8,
}
"""The highest rate that a seed draws; 0.1 for the others."""


class Job(msgspec.Struct, eq=False):
    """One task as its builder and its sink see it."""

    plan: TaskPlan
    rows: list[NewCall]
    batch_rows: int
    window: CreditWindow
    reorder: ReorderBuffer[CallResult]
    next_row: int = 0
    next_batch: int = 0
    building: bool = False
    production_ended: bool = False
    writing: bool = False
    results: list[CallResult] = []
    converged: ConvergeTaskCalls | None = None


def draw_config(rng: Random) -> SchedulerConfig:
    """Bounds small enough to be met, in most seeds some of them."""
    return SchedulerConfig(
        executor_max_inflight=rng.choice((1, 2, 8, 128)),
        executor_max_runnable=rng.choice((1, 2, 8, 128)),
        executor_selection_sample_size=rng.choice((0, 0, 1, 2)),
        task_max_inflight_calls=rng.choice((1, 3, 1_024)),
        executor_task_slots=rng.choice((1, 2, 32)),
        waiting_tasks_max=rng.choice((1, 1_024)),
        max_collected_output_bytes=rng.choice((0, 0, 0, 200)),
        max_subcall_depth=rng.choice((1, 3, 8)),
        queue_ahead_ms=rng.choice((0, 5, 5)),
        instance_fairness=rng.random() < 0.5,
        instance_fairness_quantum=rng.choice((0, 1, 3)),
        tenant_weights=rng.choice(({}, {Tenant("tenant-1"): 3})),
        cache_entries=rng.choice((1, 65_536)),
        cache_bytes_max=rng.choice((30, 1 << 25)),
    )


def draw_job(number: int, offer: Offer, faults: Faults, rng: Random) -> Job:
    plan = TaskPlan(
        task_id=TaskId(f"task-{number}"),
        tenant=Tenant(f"tenant-{rng.randint(0, 2)}"),
        max_attempts=rng.randint(1, 4),
        base_backoff_ms=rng.choice((None, 0, 50)),
        streaming=rng.random() < 0.7,
        uses_slot=rng.random() < 0.8,
        default_budget_ms=rng.choice((0, 0, 40)),
        cache=rng.choice(("promised", "promised", "all", "off")),
        on_failure=rng.choice(("continue", "continue", "continue", "fail_fast")),
    )
    return Job(
        plan=plan,
        rows=[_draw_row(index, offer, faults, rng) for index in range(rng.choice((0, 1, 7, 40, 250)))],
        batch_rows=rng.choice((1, 3, 8)),
        window=CreditWindow(rng.randint(1, 6)),
        reorder=ReorderBuffer(rng.choice((0, 4_000, 1 << 20)), ordered=rng.random() < 0.8),
    )


def _draw_row(index: int, offer: Offer, faults: Faults, rng: Random) -> NewCall:
    if rng.random() < faults.bad_row:
        return NewCall(index, None, b"", failure=fail(ErrorKind.SCHEMA, "a bad line"))
    names = ("plain", "idempotent", "plain", "idempotent", *offer.names())
    return NewCall(index, offer.target(rng.choice(names), rng.choice(offer.digests)), draw_args(index, rng))


def draw_args(index: int, rng: Random) -> bytes:
    return rng.choice((*ARGS, b"[%d]" % (index + len(ARGS))))


def output_of(function_id: FunctionId, args: bytes) -> bytes:
    """What a function returns: the same for the same arguments, whether it promises that or not."""
    return f"{function_id}{args.decode()}".encode()


def draw_script(faults: Faults, rng: Random, target: FunctionTarget, args: bytes, depth: int, offer: Offer) -> Script:
    """What one attempt does."""
    stretches = tuple(rng.choice((0, 1, 5, 30)) for _ in range(rng.choice((1, 1, 1, 2, 3))))
    script = Script(
        stretches_ms=stretches,
        requests=rng.choice((1, 1, 3)),
        output=output_of(target.function_id, args),
        idempotent=target.may_run_again,
    )
    change = msgspec.structs.replace
    if rng.random() < (0.5, 0.5, 0.3)[min(depth, 2)]:
        asks = tuple(_draw_ask(target, offer, rng) for _ in range(rng.choice((1, 1, 1, 2, 4))))
        stretches = script.stretches_ms if len(script.stretches_ms) == 2 else (1, 1)
        script = change(script, stretches_ms=stretches, requests=rng.choice((0, 0, 1)), asks=asks)
        script = change(script, hands_on=rng.random() < faults.fails)
    if rng.random() < faults.fails:
        kinds = (ErrorKind.TRANSIENT, ErrorKind.TIMEOUT, ErrorKind.INTERNAL, ErrorKind.SCHEMA, ErrorKind.RESULT)
        script = change(script, output=None, kind=rng.choice(kinds))
    if script.never_begins:
        script = change(script, stretches_ms=script.stretches_ms[:1])
    else:
        script = change(script, hangs=rng.random() < faults.hangs, dies=rng.random() < faults.dies)
    return change(script, ignores_cancel=rng.random() < faults.ignores_cancel)


def _draw_ask(parent: FunctionTarget, offer: Offer, rng: Random) -> Ask:
    names = offer.names(("pure", "pure", "few", "few", "plain", "far pure") if parent.pure else tuple(PROMISES))
    target = None if rng.random() < 0.03 else offer.target(rng.choice(names), parent.digest)
    return Ask(target, rng.choice(ARGS), rng.choice((0, 0, 5, 1_000)), rng.random() < 0.3)
