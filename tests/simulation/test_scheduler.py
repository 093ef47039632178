"""The scheduler's simulation. For long runs: `python -m callyard.testing.simulate --seeds 1000..2000`."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import pytest

from callyard.policy.credit import CreditWindow
from callyard.scheduler import NewCall, Scheduler, SchedulerConfig, TaskPlan, executors, prepare_batch
from callyard.scheduler.tenants import TenantTurns
from callyard.testing import Simulation, SimulationFailed, run_world
from callyard.testing import simulate as command
from callyard.testing.scheduler_workload import Faults
from callyard.testing.scheduler_world import SchedulerWorld
from tests.simulation.repeats import assert_repeats

SEEDS = 200
CHUNK = 25


@pytest.mark.requirement(
    "X3", "X5", "X13", "X17", "X19", "X20", "X62", "X63", "X69", "X75", "X76", "X77", "X83", "X91", "X93"
)
@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_seeds(first: int) -> None:
    for seed in range(first, first + CHUNK):
        run_world(SchedulerWorld, seed)


@pytest.mark.parametrize("name", Faults.__struct_fields__)
def test_each_fault_alone(name: str) -> None:
    """One kind of fault at a high rate, and nothing else."""

    def world(simulation: Simulation) -> SchedulerWorld:
        return SchedulerWorld(simulation, Faults(**{name: 0.4}))

    for seed in range(5):
        run_world(world, seed)


def test_without_any_fault_every_call_succeeds_at_its_first_attempt() -> None:
    worlds: list[SchedulerWorld] = []

    def world(simulation: Simulation) -> SchedulerWorld:
        worlds.append(SchedulerWorld(simulation, Faults()))
        return worlds[-1]

    for seed in range(10):
        run_world(world, seed)
        for job in worlds[-1].jobs:
            job.results.sort(key=lambda result: result.index)
            if job.converged is not None and job.converged.stop_reason is None:
                for row, result in zip(job.rows, job.results, strict=True):
                    assert result.ok
                    shared = row.target.pure or job.plan.cache == "all"
                    assert result.attempts == 1 or (shared and result.attempts == 0)


@pytest.mark.requirement("X1")
@pytest.mark.parametrize("seed", [3, 17, 42, 99])
def test_one_seed_gives_one_trace(seed: int) -> None:
    assert run_world(SchedulerWorld, seed) == run_world(SchedulerWorld, seed)


@pytest.mark.requirement("X1")
def test_seeds_differ() -> None:
    assert len({run_world(SchedulerWorld, seed).trace_hash for seed in range(10)}) == 10


@pytest.mark.requirement("X1")
def test_the_trace_does_not_depend_on_the_process() -> None:
    assert_repeats(SchedulerWorld, 12, ("1", "2", "3"))


class _Recorder:
    """Stands before a scheduler and writes down what goes in and what comes out."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.tape: list[tuple[str, tuple[Any, ...], str]] = []

    def __getattr__(self, name: str) -> Any:
        target = getattr(self._scheduler, name)
        if name not in ("handle", "commit_task", "flush_dirty_tasks", "try_dispatch_next"):
            return target

        def record(*arguments: Any) -> Any:
            answer = target(*arguments)
            self.tape.append((name, arguments, repr(answer)))
            return answer

        return record

    def commit_batch(self, prepared: Any) -> bool:
        batch = prepared.batch
        calls = {call.index: call for call in batch.calls}
        rows = [
            NewCall(index, calls[index].target, calls[index].args)
            if index in calls
            else NewCall(index, None, b"", failure=batch.results[index - batch.first_index].failure)
            for index in range(batch.first_index, batch.first_index + len(batch.results))
        ]
        answer = self._scheduler.commit_batch(prepared)
        self.tape.append(("commit_batch", (prepared.task_id, batch.index, batch.first_index, rows), repr(answer)))
        return answer


@pytest.mark.requirement("X1", "X22")
@pytest.mark.parametrize("seed", [5, 8, 43])
def test_the_list_of_its_inputs_is_a_full_recording(seed: int) -> None:
    """Same events, same seed, same commands: a run plays again from what went in, with nothing else around it."""
    recorders: list[_Recorder] = []
    configs: list[SchedulerConfig] = []

    def world(simulation: Simulation) -> SchedulerWorld:
        built = SchedulerWorld(simulation)
        recorders.append(_Recorder(built.scheduler))
        configs.append(built.config)
        built.scheduler = recorders[-1]  # type: ignore[assignment]
        return built

    run_world(world, seed)
    tape = recorders[0].tape
    assert len(tape) > 100
    again = Scheduler(configs[0], Simulation(seed).stream("scheduler"))
    plans: dict[str, TaskPlan] = {}
    for name, arguments, answer in tape:
        if name == "commit_batch":
            task_id, index, first, rows = arguments
            got: Any = again.commit_batch(prepare_batch(plans[task_id], index, first, rows))
        else:
            got = getattr(again, name)(*arguments)
        if name == "commit_task":
            plans[arguments[0].task_id] = arguments[0]
        assert repr(got) == answer


# --- the machinery itself: a simulation that cannot fail shows nothing ---------------------------------------------


def broken(change: Any) -> Any:
    def world(simulation: Simulation) -> SchedulerWorld:
        built = SchedulerWorld(simulation, Faults(fails=0.5, crash=0.3, resume_lost=0.3, given_back=0.2))
        change(built)
        return built

    return world


def lose_a_result(world: SchedulerWorld) -> None:
    settle = world._settle
    world._settle = (
        lambda command: settle(  # type: ignore[method-assign]
            msgspec.structs.replace(command, results=command.results[1:])
        )
    )


def free_a_credit_too_many(world: SchedulerWorld) -> None:
    class Leaky(CreditWindow):
        def take(self) -> None:
            self.outstanding += 1

        @property
        def is_open(self) -> bool:
            return True

    for job in world.jobs:
        job.window = Leaky(1)


def run_a_call_twice(world: SchedulerWorld) -> None:
    world.effects.effects.update(f"task-{job}-{index}" for job in range(9) for index in range(300) for _ in range(2))


def forget_an_event(world: SchedulerWorld) -> None:
    post = world.post
    seen: list[int] = []

    def drop(event: Any) -> None:
        seen.append(1)
        if type(event).__name__ != "CallCompleted" or len(seen) % 10:
            post(event)

    world.post = drop  # type: ignore[method-assign]


@pytest.mark.parametrize("change", [lose_a_result, free_a_credit_too_many, run_a_call_twice, forget_an_event])
def test_what_is_broken_is_found_and_the_failure_names_its_seed(change: Any) -> None:
    failures: list[SimulationFailed] = []
    for seed in range(6):
        try:
            run_world(broken(change), seed, steps_max=50_000, quiet_ms_max=100_000)
        except SimulationFailed as failure:
            failures.append(failure)
    assert len(failures) >= 3
    for failure in failures:
        assert f"seed {failure.seed}, step " in str(failure)
        assert "the last of its trace:" in str(failure)


def grow_lines(patch: pytest.MonkeyPatch) -> None:
    whole = executors.score
    patch.setattr(executors, "score", lambda ex, config, **_: whole(ex, config, past_line=True))


def take_nothing_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_ask_back", lambda *_: [])


def forget_a_tenants_end(patch: pytest.MonkeyPatch) -> None:
    count = TenantTurns.count
    patch.setattr(TenantTurns, "count", lambda self, tenant, change: count(self, tenant, max(change, 0)))


def forget_who_has_begun(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_prove_begun", lambda self, call, ex, now_ms: setattr(call, "begun", True))


PLANTED = {
    grow_lines: "line_is_short",
    take_nothing_back: "nothing_waits_beside_an_idle_one",
    forget_a_tenants_end: "tenant_inflight",
    forget_who_has_begun: "unbegun_counts",
}


@pytest.mark.requirement("X17", "X91")
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_what_is_broken_in_turns_and_lines_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    heard: list[str] = []
    for seed in range(SEEDS):
        try:
            run_world(SchedulerWorld, seed, steps_max=50_000, quiet_ms_max=100_000)
        except SimulationFailed as failure:
            heard.append(str(failure).partition("\n")[0])
            if PLANTED[plant] in heard[-1]:
                return
    pytest.fail(f"not found in {SEEDS} seeds; what was: {heard[:5]}")


def test_actions_run_in_order_of_time_and_of_asking() -> None:
    simulation = Simulation(1)
    seen: list[tuple[str, int]] = []
    for name, delay_ms in (("b", 5), ("c", 5), ("a", 0), ("d", 7)):
        simulation.after(delay_ms, lambda name=name: seen.append((name, simulation.clock.now_ms())))
    while simulation.step():
        pass
    assert seen == [("a", 0), ("b", 5), ("c", 5), ("d", 7)]
    assert simulation.step() is False


def test_streams_of_chance_are_independent() -> None:
    one, other = Simulation(1), Simulation(1)
    one.stream("a").random()
    assert one.stream("b").random() == other.stream("b").random()
    assert one.stream("a").random() != one.stream("b").random()
    assert isinstance(one.stream("a"), Random)


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert command.main(["--seeds", "0..4", "--world", "scheduler"]) == 0
    assert capsys.readouterr().out.startswith("5 seeds, ")
    assert command.main(["--seeds", "7"]) == 0
    for wrong in ("5..1", "x", "1.."):
        with pytest.raises(SystemExit) as exit_info:
            command.main(["--seeds", wrong])
        assert exit_info.value.code == 2
    monkeypatch.setattr(command, "WORLDS", {"scheduler": broken(run_a_call_twice)})
    assert command.main(["--seeds", "0..5", "--keep-going"]) == 1
    assert "effects without a promise" in capsys.readouterr().err
