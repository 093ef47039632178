"""What one seed gives the scheduler to do, and what goes wrong while it does it."""

from __future__ import annotations

from random import Random

import msgspec

from callyard.errors import ErrorKind, fail
from callyard.ids import Digest, FunctionId, TaskId, Tenant
from callyard.policy.credit import CreditWindow, ReorderBuffer
from callyard.scheduler.calls import CallResult, FunctionTarget, NewCall
from callyard.scheduler.commands import ConvergeTaskCalls
from callyard.scheduler.config import SchedulerConfig
from callyard.scheduler.tasks import TaskPlan
from callyard.testing.executors import Script


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
    )


def draw_job(number: int, digests: list[Digest], faults: Faults, rng: Random) -> Job:
    plan = TaskPlan(
        task_id=TaskId(f"task-{number}"),
        tenant=Tenant(f"tenant-{rng.randint(0, 2)}"),
        max_attempts=rng.randint(1, 4),
        base_backoff_ms=rng.choice((None, 0, 50)),
        streaming=rng.random() < 0.7,
        uses_slot=rng.random() < 0.8,
    )
    return Job(
        plan=plan,
        rows=[_draw_row(index, digests, faults, rng) for index in range(rng.choice((0, 1, 7, 40, 250)))],
        batch_rows=rng.choice((1, 3, 8)),
        window=CreditWindow(rng.randint(1, 6)),
        reorder=ReorderBuffer(rng.choice((0, 4_000, 1 << 20)), ordered=rng.random() < 0.8),
    )


def _draw_row(index: int, digests: list[Digest], faults: Faults, rng: Random) -> NewCall:
    if rng.random() < faults.bad_row:
        return NewCall(index, None, b"", failure=fail(ErrorKind.SCHEMA, "a bad line"))
    target = FunctionTarget(FunctionId("f"), rng.choice(digests), "m:f", idempotent=rng.random() < 0.5)
    return NewCall(index, target, b"[]")


def draw_script(faults: Faults, rng: Random) -> Script:
    """What one attempt does."""
    stretches = tuple(rng.choice((0, 1, 5, 30)) for _ in range(rng.choice((1, 1, 1, 2, 3))))
    script = Script(stretches_ms=stretches, requests=rng.choice((1, 1, 3)), output=b"x" * rng.choice((1, 10)))
    change = msgspec.structs.replace
    if rng.random() < faults.fails:
        kinds = (ErrorKind.TRANSIENT, ErrorKind.TIMEOUT, ErrorKind.INTERNAL, ErrorKind.SCHEMA, ErrorKind.RESULT)
        script = change(script, output=None, kind=rng.choice(kinds))
    if script.never_begins:
        script = change(script, stretches_ms=stretches[:1])
    else:
        script = change(script, hangs=rng.random() < faults.hangs, dies=rng.random() < faults.dies)
    return change(script, ignores_cancel=rng.random() < faults.ignores_cancel)
