"""The circuit breaker of a tool, seen from the calls."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from callyard.dispatch.allowance import Allowance
from callyard.dispatch.dispatcher import Dispatcher
from callyard.dispatch.outcomes import DispatchError, DispatchResult
from callyard.errors import CallFailure, ErrorKind, Outcome, TransientError, fail
from callyard.functions.registry import Registry
from callyard.policy.breaker import COUNTED, BreakerPolicy, BreakerState
from callyard.policy.retry import RetryPolicy
from callyard.testing.virtual_time import virtual_time
from tests.unit.dispatch.kit import (
    FakeRunner,
    add,
    add_described,
    assert_quiet,
    ending,
    hear,
    make,
    now_ms,
    spin,
    told,
)

STEADY = RetryPolicy(jitter=0)


class Patient:
    """A tool that is well or not, and slow."""

    def __init__(self, wait_ms: int = 0) -> None:
        self.well = False
        self.wait_ms = wait_ms
        self.runs = 0

    async def __call__(self, arguments: dict[str, Any]) -> str:
        self.runs += 1
        if self.wait_ms:
            await asyncio.sleep(self.wait_ms / 1_000)
        if not self.well:
            raise ValueError("not well")
        return "well"


def scene(patient: Patient, **settings: Any) -> Dispatcher:
    registry = Registry()
    add(registry, "tool", patient)
    return make(registry, **settings)


async def fail_it(dispatcher: Dispatcher, times: int = 5) -> None:
    for _ in range(times):
        failed = await dispatcher.dispatch("tool")
        assert isinstance(failed, DispatchError)
        assert failed.kind is ErrorKind.INTERNAL


def kinds(results: list[DispatchResult]) -> list[str]:
    return [result.kind.value if isinstance(result, DispatchError) else "ok" for result in results]


@pytest.mark.requirement("D28")
@virtual_time
async def test_five_failures_within_thirty_seconds_open_it_and_calls_are_refused_at_once() -> None:
    patient = Patient()
    dispatcher = scene(patient)
    await fail_it(dispatcher)
    assert dispatcher.breaker_state("tool") is BreakerState.OPEN
    allowance = Allowance(5)
    refused = await dispatcher.dispatch("tool", allowance=allowance)
    assert isinstance(refused, DispatchError)
    assert (refused.kind, refused.outcome, refused.attempts) == (ErrorKind.CIRCUIT_OPEN, Outcome.NOT_RUN, 0)
    assert refused.details["retry_after_ms"] == 10_000
    assert patient.runs == 5
    assert allowance.taken == 0
    assert now_ms() == 0
    assert_quiet(dispatcher)


@pytest.mark.requirement("D28")
@virtual_time
async def test_failures_that_lie_apart_do_not_open_it() -> None:
    patient = Patient()
    dispatcher = scene(patient)
    for _ in range(10):
        await fail_it(dispatcher, 1)
        await asyncio.sleep(8)
    assert dispatcher.breaker_state("tool") is BreakerState.CLOSED


@pytest.mark.requirement("D28")
@virtual_time
async def test_half_open_of_ten_callers_one_is_the_probe_and_nine_are_refused() -> None:
    patient = Patient(wait_ms=500)
    dispatcher = scene(patient)
    await asyncio.gather(*(dispatcher.dispatch("tool") for _ in range(5)))
    await asyncio.sleep(10)
    patient.well, before = True, patient.runs
    ends = await asyncio.gather(*(dispatcher.dispatch("tool") for _ in range(10)))
    assert sorted(kinds(ends)) == ["circuit_open"] * 9 + ["ok"]
    assert patient.runs == before + 1
    refused = next(end for end in ends if isinstance(end, DispatchError))
    assert refused.details["retry_after_ms"] > 0
    assert dispatcher.breaker_state("tool") is BreakerState.CLOSED
    assert all(end.ok for end in await asyncio.gather(*(dispatcher.dispatch("tool") for _ in range(10))))
    assert_quiet(dispatcher)


@pytest.mark.requirement("D28")
@virtual_time
async def test_the_probe_is_claimed_at_its_first_attempt_not_when_it_queues() -> None:
    """Ten queue for a slot when its cool-down is over: the first to begin is the probe, the others come after it."""
    patient, gate = Patient(wait_ms=100), asyncio.Event()
    registry = Registry()
    add(registry, "tool", patient)
    add(registry, "hold", lambda arguments: gate.wait(), isolation="inline")
    dispatcher = make(registry, slots=1)
    await fail_it(dispatcher)
    holding = asyncio.ensure_future(dispatcher.dispatch("hold"))
    await asyncio.sleep(10)
    patient.well = True
    calls = [asyncio.ensure_future(dispatcher.dispatch("tool")) for _ in range(10)]
    await spin()
    assert dispatcher.statistics().queued == 10  # none is the probe yet
    gate.set()
    assert kinds(await asyncio.gather(*calls)) == ["ok"] * 10
    await holding
    assert_quiet(dispatcher)


@pytest.mark.requirement("D28")
@virtual_time
async def test_a_failed_probe_doubles_the_cool_down_up_to_the_bound_and_a_success_resets_it() -> None:
    patient = Patient()
    dispatcher = scene(patient)
    await fail_it(dispatcher)
    for cool_down_s in (10, 20, 40, 80, 160, 300, 300):
        await asyncio.sleep(cool_down_s - 0.001)
        assert kinds([await dispatcher.dispatch("tool")]) == ["circuit_open"]
        await asyncio.sleep(0.001)
        assert kinds([await dispatcher.dispatch("tool")]) == ["internal"]  # the probe
    await asyncio.sleep(300)
    patient.well = True
    assert kinds([await dispatcher.dispatch("tool")]) == ["ok"]
    patient.well = False
    await fail_it(dispatcher)
    refused = await dispatcher.dispatch("tool")
    assert isinstance(refused, DispatchError)
    assert refused.details["retry_after_ms"] == 10_000


async def _cancel_the_caller(dispatcher: Dispatcher) -> None:
    call = asyncio.ensure_future(dispatcher.dispatch("tool"))
    await asyncio.sleep(0.1)
    call.cancel()
    await asyncio.wait([call])


async def _cancel_the_call(dispatcher: Dispatcher) -> None:
    call = asyncio.ensure_future(dispatcher.dispatch("tool", call_id="c"))
    await asyncio.sleep(0.1)
    dispatcher.cancel("c")  # type: ignore[arg-type]
    await call


@pytest.mark.requirement("D28")
@pytest.mark.parametrize("cancel", [_cancel_the_caller, _cancel_the_call])
@virtual_time
async def test_cancellations_do_not_count_and_a_cancelled_probe_is_given_back(cancel: Any) -> None:
    patient = Patient(wait_ms=1_000)
    dispatcher = scene(patient)
    for _ in range(10):
        await cancel(dispatcher)
    assert dispatcher.breaker_state("tool") is BreakerState.CLOSED
    await fail_it(dispatcher)
    await asyncio.sleep(10)
    await cancel(dispatcher)  # the probe
    assert dispatcher.breaker_state("tool") is BreakerState.HALF_OPEN
    patient.well = True
    assert kinds([await dispatcher.dispatch("tool")]) == ["ok"]  # the next is the probe
    assert dispatcher.breaker_state("tool") is BreakerState.CLOSED


@pytest.mark.requirement("D28")
@pytest.mark.parametrize("cancel", [_cancel_the_caller, _cancel_the_call])
@virtual_time
async def test_a_cancellation_between_attempts_does_not_count_the_attempt_before_it(cancel: Any) -> None:
    registry, worker = Registry(), FakeRunner()
    lost = fail(ErrorKind.CRASHED, "lost", attempts=1, retry_after_ms=60_000)
    add_described(registry, worker, "tool", ending(lost), idempotent=True)
    dispatcher = make(registry, worker=worker, breaker=BreakerPolicy(failures=1))
    await cancel(dispatcher)
    assert len(worker.contexts) == 1
    assert dispatcher.breaker_state("tool") is BreakerState.CLOSED


@pytest.mark.requirement("D28")
@pytest.mark.parametrize("kind", ErrorKind)
@virtual_time
async def test_which_ends_count(kind: ErrorKind) -> None:
    registry, worker = Registry(), FakeRunner()
    add_described(registry, worker, "tool", ending(fail(kind, "so", attempts=1)))
    dispatcher = make(registry, worker=worker, breaker=BreakerPolicy(failures=1))
    await dispatcher.dispatch("tool")
    expected = {"timeout", "crashed", "internal", "resource_limit", "transient"}
    assert {counted.value for counted in COUNTED} == expected
    opened = dispatcher.breaker_state("tool") is BreakerState.OPEN
    assert opened is (kind.value in expected)


@pytest.mark.requirement("D28")
@virtual_time
async def test_final_ends_count_not_attempts() -> None:
    registry = Registry()

    async def flaky(arguments: dict[str, Any]) -> None:
        raise TransientError

    add(registry, "tool", flaky)
    dispatcher = make(registry, breaker=BreakerPolicy(failures=2))
    await dispatcher.dispatch("tool")  # three attempts
    assert dispatcher.breaker_state("tool") is BreakerState.CLOSED
    await dispatcher.dispatch("tool")
    assert dispatcher.breaker_state("tool") is BreakerState.OPEN


@pytest.mark.requirement("D28")
@virtual_time
async def test_joiners_do_not_count() -> None:
    patient = Patient(wait_ms=100)
    dispatcher = scene(patient, breaker=BreakerPolicy(failures=2))
    ends = await asyncio.gather(*(dispatcher.dispatch("tool", key="k") for _ in range(10)))
    assert kinds(ends) == ["internal"] * 10
    assert patient.runs == 1
    assert dispatcher.breaker_state("tool") is BreakerState.CLOSED


@pytest.mark.requirement("D28")
@virtual_time
async def test_opening_between_attempts_ends_the_retries_with_the_last_error() -> None:
    registry = Registry()
    runs = []

    async def tool(arguments: dict[str, Any]) -> None:
        runs.append(now_ms())
        if arguments.get("hard"):
            raise ValueError("hard")
        raise TransientError("busy")

    add(registry, "tool", tool, retry=STEADY)
    dispatcher = make(registry, breaker=BreakerPolicy(failures=1))
    events = hear(dispatcher)
    soft = asyncio.ensure_future(dispatcher.dispatch("tool"))
    await asyncio.sleep(0.05)
    await dispatcher.dispatch("tool", {"hard": True})
    failed = await soft
    assert isinstance(failed, DispatchError)
    assert (failed.kind, failed.attempts) == (ErrorKind.TRANSIENT, 1)
    assert runs == [0, 50]
    assert now_ms() == 100
    assert "circuit.opened" in told(events)


@pytest.mark.requirement("D28", "D12")
@virtual_time
async def test_a_probe_stays_the_probe_through_its_retries() -> None:
    registry, runs = Registry(), [0]

    async def tool(arguments: dict[str, Any]) -> str:
        runs[0] += 1
        if runs[0] < 4:
            raise TransientError("busy")
        return "well"

    add(registry, "tool", tool, retry=STEADY)
    dispatcher = make(registry, breaker=BreakerPolicy(failures=1))
    await dispatcher.dispatch("tool")
    await asyncio.sleep(10)
    runs[0] = 1
    probe = asyncio.ensure_future(dispatcher.dispatch("tool"))
    await asyncio.sleep(0.05)
    assert kinds([await dispatcher.dispatch("tool")]) == ["circuit_open"]
    assert kinds([await probe]) == ["ok"]
    assert dispatcher.breaker_state("tool") is BreakerState.CLOSED


@pytest.mark.requirement("D28")
@virtual_time
async def test_the_probe_is_given_back_by_each_end_without_a_verdict() -> None:
    """A probe that has no tool calls left, one past its deadline, one whose result cannot be sent."""
    patient = Patient()
    registry, state = Registry(), {"answer": patient}

    async def tool(arguments: dict[str, Any]) -> Any:
        return await state["answer"](arguments)

    async def misfit(arguments: dict[str, Any]) -> Any:
        return float("nan")

    add(registry, "tool", tool)
    dispatcher = make(registry)
    await fail_it(dispatcher)
    await asyncio.sleep(10)
    assert kinds([await dispatcher.dispatch("tool", allowance=Allowance(0))]) == ["budget_exceeded"]
    assert kinds([await dispatcher.dispatch("tool", deadline_ms=0)]) == ["deadline"]
    state["answer"] = misfit  # type: ignore[assignment]
    assert kinds([await dispatcher.dispatch("tool")]) == ["result"]
    state["answer"] = patient
    patient.well = True
    assert kinds([await dispatcher.dispatch("tool")]) == ["ok"]
    assert dispatcher.breaker_state("tool") is BreakerState.CLOSED


@pytest.mark.requirement("D28")
@virtual_time
async def test_without_a_breaker_nothing_else_changes() -> None:
    ends, events = [], []
    for breaker in (BreakerPolicy(failures=1_000), None):
        patient = Patient()
        dispatcher = scene(patient, breaker=breaker)
        heard = hear(dispatcher)
        results = [await dispatcher.dispatch("tool") for _ in range(20)]
        ends.append([result.to_json() for result in results if isinstance(result, DispatchError)])
        events.append(heard)
        assert dispatcher.breaker_state("tool") is BreakerState.CLOSED
        assert patient.runs == 20
    assert ends[0] == ends[1]
    assert events[0] == events[1]
    assert len(ends[0]) == 20


@pytest.mark.requirement("D28")
@virtual_time
async def test_each_tool_has_its_own() -> None:
    registry = Registry()
    add(registry, "tool", Patient())
    well = Patient()
    well.well = True
    add(registry, "other", well)
    dispatcher = make(registry)
    await fail_it(dispatcher)
    assert kinds([await dispatcher.dispatch("other")]) == ["ok"]


@pytest.mark.requirement("D28", "D29")
@virtual_time
async def test_the_circuits_events() -> None:
    patient = Patient()
    dispatcher = scene(patient)
    events = hear(dispatcher)
    await fail_it(dispatcher)
    await asyncio.sleep(10)
    patient.well = True
    await dispatcher.dispatch("tool")
    circuit = [event for event in events if event.name.startswith("circuit")]
    assert [(event.name, event.at_ms, event.tool) for event in circuit] == [
        ("circuit.opened", 0, "tool"),
        ("circuit.half_open", 10_000, "tool"),
        ("circuit.closed", 10_000, "tool"),
    ]


@pytest.mark.requirement("D28")
@virtual_time
async def test_a_timeout_that_never_began_says_nothing_of_the_tool() -> None:
    queued: CallFailure = fail(ErrorKind.TIMEOUT, "it queued", outcome=Outcome.NOT_RUN)
    registry, worker = Registry(), FakeRunner()
    add_described(registry, worker, "tool", ending(queued))
    dispatcher = make(registry, worker=worker, breaker=BreakerPolicy(failures=1))
    await dispatcher.dispatch("tool")
    await spin()
    assert dispatcher.breaker_state("tool") is BreakerState.CLOSED


@pytest.mark.requirement("D28")
@virtual_time
async def test_what_a_caller_brought_about_says_nothing_of_the_tool() -> None:
    """Else one caller could have it refused to all."""
    patient = Patient(wait_ms=500)
    patient.well = True
    dispatcher = scene(patient)
    for _ in range(5):
        assert isinstance(await dispatcher.dispatch("tool", timeout_ms=50), DispatchError)
        assert isinstance(await dispatcher.dispatch("tool", deadline_ms=50), DispatchError)
    assert dispatcher.breaker_state("tool") is BreakerState.CLOSED
    assert (await dispatcher.dispatch("tool")).ok
    registry, worker = Registry(), FakeRunner()
    refused = fail(ErrorKind.INTERNAL, "nobody answers", attempts=1, cause={"details": {"provider": "client"}})
    add_described(registry, worker, "asks", ending(refused))
    asking = make(registry, worker=worker, breaker=BreakerPolicy(failures=1))
    await asking.dispatch("asks")
    assert asking.breaker_state("asks") is BreakerState.CLOSED


@pytest.mark.requirement("D28")
@pytest.mark.requirement("D44")
@virtual_time
async def test_what_one_tenant_brings_about_has_the_tool_refused_to_nobody_else() -> None:
    async def divide(arguments: dict[str, Any]) -> float:
        value: float = 1 / arguments["by"]
        return value

    registry = Registry()
    add(registry, "divide", divide)
    dispatcher = make(registry)
    events = hear(dispatcher)
    for _ in range(5):
        await dispatcher.dispatch("divide", {"by": 0}, tenant="careless")
    refused = await dispatcher.dispatch("divide", {"by": 1}, tenant="careless")
    assert isinstance(refused, DispatchError)
    assert refused.kind is ErrorKind.CIRCUIT_OPEN
    assert (await dispatcher.dispatch("divide", {"by": 2}, tenant="careful")).value == 0.5
    states = [dispatcher.breaker_state("divide", tenant) for tenant in ("careless", "careful", None)]
    assert states == [BreakerState.OPEN, BreakerState.CLOSED, BreakerState.OPEN]
    assert [(event.name, event.tenant) for event in events if event.name.startswith("circuit")] == [
        ("circuit.opened", "careless")
    ]
    await asyncio.sleep(11)
    assert (await dispatcher.dispatch("divide", {"by": 2}, tenant="careless")).ok
    assert dispatcher.breaker_state("divide") is BreakerState.CLOSED
    assert_quiet(dispatcher)


@pytest.mark.requirement("D28")
@virtual_time
async def test_breakers_are_bounded_whatever_tenants_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("callyard.dispatch.breakers.BREAKERS_MAX", 4)
    patient = Patient()
    dispatcher = scene(patient, breaker=BreakerPolicy(failures=2))
    held = dispatcher._breakers
    for number in range(20):  # each has failed once: none may be forgotten, and the fifth and later ones share one
        await dispatcher.dispatch("tool", tenant=f"t{number}")
    assert held._count == sum(map(len, held._breakers.values())) == 5
    own = [dispatcher.breaker_state("tool", f"t{number}") for number in range(4)]
    assert own == [BreakerState.CLOSED] * 4
    refused = await dispatcher.dispatch("tool", tenant="another")
    assert isinstance(refused, DispatchError)
    assert refused.kind is ErrorKind.CIRCUIT_OPEN
    await asyncio.sleep(31)  # nothing of it is remembered any more, but that the shared one is open
    patient.well = True
    assert (await dispatcher.dispatch("tool", tenant="another")).ok
    assert held._count == sum(map(len, held._breakers.values())) == 2


@pytest.mark.requirement("D28")
@pytest.mark.requirement("D44")
@virtual_time
async def test_who_came_before_the_bound_keeps_a_breaker_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it remembers is not forgotten for those who come later, and what these bring about is told as nobody's."""
    monkeypatch.setattr("callyard.dispatch.breakers.BREAKERS_MAX", 4)
    dispatcher = scene(Patient(), breaker=BreakerPolicy(failures=2))
    events = hear(dispatcher)
    for number in (*range(12), 0):
        await dispatcher.dispatch("tool", tenant=f"t{number}")
    assert [event.tenant for event in events if event.name == "circuit.opened"] == ["", "t0"]
    assert dispatcher.breaker_state("tool", "t1") is BreakerState.CLOSED
