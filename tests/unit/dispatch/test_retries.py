"""Which failures are tried again, after what waits, and what is left when they end."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from callyard.dispatch.allowance import Allowance
from callyard.dispatch.outcomes import DispatchError
from callyard.errors import ErrorKind, Outcome, ToolError, TransientError, fail
from callyard.functions.registry import Registry
from callyard.policy.retry import RetryPolicy
from callyard.testing.virtual_time import virtual_time
from tests.unit.dispatch.kit import FakeRunner, add, add_described, assert_quiet, ending, hear, make, now_ms, spin, told

STEADY = RetryPolicy(jitter=0)


def add_failing(registry: Registry, error: BaseException, **promises: Any) -> list[int]:
    """A tool that raises each time; the instants of its runs."""
    runs: list[int] = []

    async def handler(arguments: dict[str, Any]) -> None:
        runs.append(now_ms())
        raise error

    add(registry, "tool", handler, **promises)
    return runs


@pytest.mark.requirement("D12")
@virtual_time
async def test_three_attempts_after_a_tenth_and_four_tenths_of_a_second() -> None:
    registry = Registry()
    runs = add_failing(registry, TransientError("busy"), retry=STEADY)
    async with make(registry) as dispatcher:
        failed = await dispatcher.dispatch("tool")
        assert isinstance(failed, DispatchError)
        assert (failed.kind, failed.attempts, failed.outcome) == (ErrorKind.TRANSIENT, 3, Outcome.NOT_RUN)
        assert runs == [0, 100, 500]


@pytest.mark.requirement("D12", "D51")
@virtual_time
async def test_by_default_the_waits_have_a_jitter_of_up_to_a_half_from_the_given_random_numbers() -> None:
    registry = Registry()
    runs = add_failing(registry, TransientError("busy"))
    async with make(registry, rng=Random(3)) as dispatcher:
        await dispatcher.dispatch("tool")
    rng = Random(3)
    rng.getrandbits(40)  # the dispatcher's prefix of call ids
    first, second = round(100 + 50 * rng.random()), round(400 + 200 * rng.random())
    assert runs == [0, first, first + second]


@pytest.mark.requirement("D12", "D52")
@pytest.mark.parametrize("idempotent", [False, True])
@pytest.mark.parametrize(
    "error", [ValueError("x"), ToolError("no"), MemoryError(), SystemExit(2), TimeoutError()], ids=repr
)
@virtual_time
async def test_what_a_tool_raises_is_not_tried_again_whatever_it_promises(
    error: BaseException, idempotent: bool
) -> None:
    registry = Registry()
    runs = add_failing(registry, error, idempotent=idempotent)
    async with make(registry) as dispatcher:
        failed = await dispatcher.dispatch("tool")
        assert isinstance(failed, DispatchError)
        assert len(runs) == failed.attempts == 1
        assert not failed.retryable


@pytest.mark.requirement("D12", "D23")
@pytest.mark.parametrize("kind", ErrorKind)
@pytest.mark.parametrize("idempotent", [False, True])
@virtual_time
async def test_only_timeout_and_crashed_of_an_idempotent_tool_and_transient(kind: ErrorKind, idempotent: bool) -> None:
    registry, worker = Registry(), FakeRunner()
    add_described(registry, worker, "tool", ending(fail(kind, "so", attempts=1)), idempotent=idempotent)
    async with make(registry, worker=worker) as dispatcher:
        await dispatcher.dispatch("tool")
    again = kind is ErrorKind.TRANSIENT or (idempotent and kind in (ErrorKind.TIMEOUT, ErrorKind.CRASHED))
    assert len(worker.contexts) == (3 if again else 1)


@pytest.mark.requirement("D12", "D23")
@virtual_time
async def test_an_attempt_that_had_not_begun_is_tried_again_for_any_tool_though_one_before_it_had() -> None:
    registry, worker = Registry(), FakeRunner()
    busy = fail(ErrorKind.TRANSIENT, "busy", attempts=1)
    queued = fail(ErrorKind.TIMEOUT, "never began", outcome=Outcome.NOT_RUN)
    add_described(registry, worker, "tool", ending(busy, queued, b"3"))
    async with make(registry, worker=worker) as dispatcher:
        done = await dispatcher.dispatch("tool")
        assert done.ok
        assert done.value == 3
        assert done.attempts == 2


@pytest.mark.requirement("D12")
@virtual_time
async def test_the_policy_is_data_on_the_record() -> None:
    registry = Registry()
    policy = RetryPolicy(max_attempts=5, base_ms=10, factor=2, jitter=0)
    runs = add_failing(registry, TransientError("busy"), retry=policy)
    async with make(registry) as dispatcher:
        assert (await dispatcher.dispatch("tool")).attempts == 5
        assert runs == [0, 10, 30, 70, 150]


@pytest.mark.requirement("D12")
@virtual_time
async def test_one_attempt_means_no_retry() -> None:
    registry = Registry()
    runs = add_failing(registry, TransientError("busy"), retry=RetryPolicy(max_attempts=1))
    async with make(registry) as dispatcher:
        assert (await dispatcher.dispatch("tool")).attempts == len(runs) == 1


@pytest.mark.requirement("D12")
@virtual_time
async def test_retry_after_of_the_tool_is_obeyed() -> None:
    registry = Registry()
    runs = add_failing(registry, TransientError("busy", retry_after_ms=7_000), retry=STEADY)
    async with make(registry) as dispatcher:
        failed = await dispatcher.dispatch("tool")
        assert isinstance(failed, DispatchError)
        assert failed.details["retry_after_ms"] == 7_000
        assert runs == [0, 7_000, 14_000]


@pytest.mark.requirement("D12", "D40")
@virtual_time
async def test_no_retry_whose_wait_would_pass_the_deadline() -> None:
    registry = Registry()
    runs = add_failing(registry, TransientError("busy", retry_after_ms=7_000), retry=STEADY)
    async with make(registry) as dispatcher:
        failed = await dispatcher.dispatch("tool", deadline_ms=7_000)
        assert isinstance(failed, DispatchError)
        assert failed.kind is ErrorKind.TRANSIENT
        assert runs == [0]
        assert now_ms() == 0
        failed = await dispatcher.dispatch("tool", deadline_ms=7_001)
        assert failed.attempts == 2


@pytest.mark.requirement("D12", "D24")
@virtual_time
async def test_a_timeout_of_an_idempotent_tool_then_a_success() -> None:
    registry, runs = Registry(), [0]

    async def handler(arguments: dict[str, Any]) -> int:
        runs[0] += 1
        await asyncio.sleep(10 if runs[0] == 1 else 0)
        return runs[0]

    add(registry, "tool", handler, idempotent=True, timeout_ms=200, retry=STEADY)
    async with make(registry) as dispatcher:
        done = await dispatcher.dispatch("tool")
        assert done.ok
        assert (done.value, done.attempts, now_ms()) == (2, 2, 300)


@pytest.mark.requirement("D12", "D22")
@virtual_time
async def test_what_an_earlier_attempt_may_have_done_stays_possible() -> None:
    registry, worker = Registry(), FakeRunner()
    lost = fail(ErrorKind.CRASHED, "lost", attempts=1)
    refused = fail(ErrorKind.UNAVAILABLE, "no executor")
    add_described(registry, worker, "tool", ending(lost, refused), idempotent=True)
    async with make(registry, worker=worker) as dispatcher:
        failed = await dispatcher.dispatch("tool")
        assert isinstance(failed, DispatchError)
        assert (failed.kind, failed.outcome, failed.attempts) == (ErrorKind.UNAVAILABLE, Outcome.UNKNOWN, 1)


@pytest.mark.requirement("D13")
@virtual_time
async def test_an_allowance_that_runs_out_between_attempts_ends_them_with_the_last_error() -> None:
    registry = Registry()
    runs = add_failing(registry, TransientError("busy"), retry=STEADY)
    allowance = Allowance(calls=2)
    async with make(registry) as dispatcher:
        failed = await dispatcher.dispatch("tool", allowance=allowance)
        assert isinstance(failed, DispatchError)
        assert (failed.kind, failed.attempts, len(runs), allowance.left) == (ErrorKind.TRANSIENT, 2, 2, 0)
        failed = await dispatcher.dispatch("tool", allowance=allowance)
        assert isinstance(failed, DispatchError)
        assert (failed.kind, failed.attempts, len(runs)) == (ErrorKind.BUDGET_EXCEEDED, 0, 2)
        assert failed.details["limit"] == "calls"


@pytest.mark.requirement("D13", "D52")
@virtual_time
async def test_an_attempt_that_never_began_costs_nothing() -> None:
    registry, worker = Registry(), FakeRunner()
    add_described(registry, worker, "tool", ending(fail(ErrorKind.UNAVAILABLE, "no executor")))
    allowance = Allowance(calls=5)
    async with make(registry, worker=worker) as dispatcher:
        failed = await dispatcher.dispatch("tool", allowance=allowance)
        assert (failed.attempts, allowance.taken) == (0, 0)


@pytest.mark.requirement("D41")
@virtual_time
async def test_a_call_cancelled_between_attempts_ends_cancelled_at_once() -> None:
    registry = Registry()
    runs = add_failing(registry, TransientError("busy", retry_after_ms=60_000))
    async with make(registry) as dispatcher:
        call = asyncio.ensure_future(dispatcher.dispatch("tool", call_id="c", allowance=Allowance(9)))
        await asyncio.sleep(1)
        assert dispatcher.cancel("c")  # type: ignore[arg-type]
        failed = await call
        assert isinstance(failed, DispatchError)
        assert (failed.kind, failed.outcome, failed.attempts) == (ErrorKind.CANCELLED, Outcome.NOT_RUN, 1)
        assert len(runs) == 1
        assert now_ms() == 1_000
        assert_quiet(dispatcher)


@pytest.mark.requirement("D41", "D22")
@virtual_time
async def test_cancelled_after_an_attempt_of_unknown_outcome_stays_unknown() -> None:
    registry, worker = Registry(), FakeRunner()
    add_described(
        registry,
        worker,
        "tool",
        ending(fail(ErrorKind.CRASHED, "lost", attempts=1, retry_after_ms=9_000)),
        idempotent=True,
    )
    async with make(registry, worker=worker) as dispatcher:
        call = asyncio.ensure_future(dispatcher.dispatch("tool", call_id="c"))
        await asyncio.sleep(1)
        dispatcher.cancel("c")  # type: ignore[arg-type]
        failed = await call
        assert isinstance(failed, DispatchError)
        assert (failed.kind, failed.outcome, failed.attempts) == (ErrorKind.CANCELLED, Outcome.UNKNOWN, 1)


@pytest.mark.requirement("D27", "D12")
@virtual_time
async def test_the_waits_between_attempts_keep_seat_and_slot() -> None:
    registry = Registry()
    runs = add_failing(registry, TransientError("busy"), retry=STEADY, max_concurrency=1)
    async with make(registry, slots=1) as dispatcher:
        calls = [asyncio.ensure_future(dispatcher.dispatch("tool")) for _ in range(2)]
        await asyncio.gather(*calls)
        assert runs == [0, 100, 500, 500, 600, 1_000]
        assert_quiet(dispatcher)


@pytest.mark.requirement("D29", "D12")
@virtual_time
async def test_events_of_attempts_and_retries() -> None:
    registry = Registry()
    add_failing(registry, TransientError("busy"), retry=STEADY)
    dispatcher = make(registry)
    events = hear(dispatcher)
    failed = await dispatcher.dispatch("tool")
    assert told(events) == [
        "dispatch.start",
        "dispatch.attempt",
        "dispatch.retry",
        "dispatch.attempt",
        "dispatch.retry",
        "dispatch.attempt",
        "dispatch.error",
    ]
    assert [event.attempt for event in events] == [0, 1, 2, 2, 3, 3, 3]
    assert [event.at_ms for event in events] == [0, 0, 0, 100, 100, 500, 500]
    assert [event.duration_ms for event in events if event.name == "dispatch.retry"] == [100, 400]
    assert {event.kind for event in events if event.kind} == {ErrorKind.TRANSIENT}
    assert {event.call_id for event in events} == {failed.call_id}
    await spin()
