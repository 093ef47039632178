"""One stop with one deadline, and cancelling a call at each of its steps: what was taken is given back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from callyard.dispatch.allowance import Allowance
from callyard.dispatch.outcomes import DispatchError, DispatchResult
from callyard.errors import ErrorKind, Outcome, TransientError, fail
from callyard.functions.registry import Registry
from callyard.ids import CallId
from callyard.testing.virtual_time import run_virtual, virtual_time
from tests.unit.dispatch.kit import (
    FakeRunner,
    add,
    add_described,
    add_work,
    assert_quiet,
    ending,
    hanging,
    hear,
    make,
    now_ms,
    spin,
)

LONG_MS = 1_000_000


class Stage:
    """Tools and calls, one for each place where a call can be when it is stopped."""

    def __init__(self, **settings: Any) -> None:
        self.registry, self.worker = Registry(), FakeRunner()
        self.work = add_work(self.registry, "work", LONG_MS, timeout_ms=LONG_MS)
        self.blocker = add_work(self.registry, "blocker", LONG_MS, timeout_ms=LONG_MS)
        self.seated = add_work(self.registry, "seated", LONG_MS, max_concurrency=1, timeout_ms=LONG_MS)
        self.rated = add_work(self.registry, "rated", LONG_MS, rate="1/h", timeout_ms=LONG_MS)
        self.flaky_runs = 0
        self.release = asyncio.Event()
        add(self.registry, "flaky", self._flaky)
        add(self.registry, "stubborn", self._stubborn, timeout_ms=LONG_MS)
        add(self.registry, "parent", self._parent, timeout_ms=LONG_MS)
        add_described(self.registry, self.worker, "elsewhere", hanging, timeout_ms=LONG_MS)
        self.policy_hangs = False
        self.dispatcher = make(
            self.registry,
            worker=self.worker,
            policy=self._policy,
            drain_deadline_ms=1_000,
            cancel_grace_ms=250,
            **settings,
        )
        self.allowance = Allowance(calls=100)
        self.calls: dict[str, asyncio.Task[DispatchResult]] = {}

    async def _flaky(self, arguments: dict[str, Any]) -> None:
        self.flaky_runs += 1
        raise TransientError("busy", retry_after_ms=200_000)

    async def _stubborn(self, arguments: dict[str, Any]) -> None:
        while not self.release.is_set():
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                pass

    async def _parent(self, arguments: dict[str, Any]) -> Any:
        return (await self.dispatcher.dispatch("work")).unwrap()

    async def _policy(self, tenant: str, tool: str, arguments: Any) -> bool:
        if self.policy_hangs:
            await asyncio.sleep(LONG_MS)
        return True

    def start(self, name: str, call_id: str, **options: Any) -> asyncio.Task[DispatchResult]:
        task = asyncio.ensure_future(self.dispatcher.dispatch(name, call_id=call_id, **options))
        self.calls[call_id] = task
        return task


async def in_policy(stage: Stage) -> None:
    stage.policy_hangs = True
    stage.start("work", "it", allowance=stage.allowance)


async def in_slot_line(stage: Stage) -> None:
    stage.start("blocker", "b")
    await spin()
    stage.start("work", "it", allowance=stage.allowance)


async def in_seat_line(stage: Stage) -> None:
    stage.dispatcher._admission.slots.capacity = 8
    stage.start("seated", "b")
    await spin()
    stage.start("seated", "it", allowance=stage.allowance)


async def in_owner_line(stage: Stage) -> None:
    stage.dispatcher._admission.slots.capacity = 8
    stage.start("blocker", "b", owner="o")
    await spin()
    stage.start("work", "it", owner="o", allowance=stage.allowance)


async def in_rate_wait(stage: Stage) -> None:
    stage.dispatcher._admission.slots.capacity = 8
    stage.start("rated", "b")
    await spin()
    stage.start("rated", "it", deadline_ms=30 * 86_400_000, allowance=stage.allowance)


async def keyed_in_slot_line(stage: Stage) -> None:
    stage.start("blocker", "b")
    await spin()
    stage.start("work", "it", key="k", allowance=stage.allowance)


async def in_attempt(stage: Stage) -> None:
    stage.start("work", "it", allowance=stage.allowance)


async def keyed_in_attempt(stage: Stage) -> None:
    stage.start("work", "it", key="k", allowance=stage.allowance)


async def in_stubborn_attempt(stage: Stage) -> None:
    stage.start("stubborn", "it", allowance=stage.allowance)


async def in_attempt_elsewhere(stage: Stage) -> None:
    stage.start("elsewhere", "it", allowance=stage.allowance)


async def in_nested(stage: Stage) -> None:
    stage.start("parent", "it", allowance=stage.allowance)


async def in_retry_wait(stage: Stage) -> None:
    stage.start("flaky", "it", allowance=stage.allowance)


async def keyed_in_retry_wait(stage: Stage) -> None:
    stage.start("flaky", "it", key="k", allowance=stage.allowance)


Where = Callable[[Stage], Awaitable[None]]
QUEUED: list[Where] = [in_policy, in_slot_line, in_seat_line, in_owner_line, in_rate_wait, keyed_in_slot_line]
BEGUN: list[Where] = [
    in_attempt,
    keyed_in_attempt,
    in_stubborn_attempt,
    in_attempt_elsewhere,
    in_nested,
    in_retry_wait,
    keyed_in_retry_wait,
]
TAKEN = {in_nested: 2}
"""Of the allowance, where it is not one."""


async def let_go(stage: Stage) -> None:
    """Stop what only stood in the way, and look whether anything is left."""
    stage.dispatcher.cancel(CallId("b"))
    stage.release.set()
    for task in stage.calls.values():
        await asyncio.wait([task])
    await asyncio.sleep(1)
    assert_quiet(stage.dispatcher)
    assert stage.worker.pins == 0
    for work in (stage.work, stage.blocker, stage.seated, stage.rated):
        assert work.inside == 0


async def assert_key_is_free(stage: Stage, *, kept: bool) -> None:
    """`kept`: what began may have had an effect, and its end is kept."""
    stage.policy_hangs = False
    again = asyncio.ensure_future(stage.dispatcher.dispatch("work", key="k", call_id="again"))
    await spin()
    if kept:
        end = await again
        assert isinstance(end, DispatchError)
        assert end.deduplicated
        assert end.outcome is Outcome.UNKNOWN
    else:
        assert not again.done()
        stage.dispatcher.cancel(CallId("again"))
        await again


@pytest.mark.requirement("D41", "D22")
@pytest.mark.parametrize("where", QUEUED, ids=lambda where: where.__name__)
@virtual_time
async def test_a_call_cancelled_before_it_ran_gives_back_all_that_it_took(where: Where) -> None:
    stage = Stage(slots=1)
    await where(stage)
    await spin()
    before_ms = now_ms()
    assert stage.dispatcher.cancel(CallId("it"))
    end = await stage.calls["it"]
    assert isinstance(end, DispatchError)
    assert (end.kind, end.outcome, end.attempts) == (ErrorKind.CANCELLED, Outcome.NOT_RUN, 0)
    assert now_ms() == before_ms
    assert stage.allowance.taken == 0
    assert not stage.dispatcher.cancel(CallId("it"))
    await let_go(stage)
    assert stage.work.begun == 0
    await assert_key_is_free(stage, kept=False)
    if where is in_rate_wait:  # its place in the rate is another's
        assert stage.dispatcher.rates._limiters["tool", "rated"][1].peek("default", now_ms()) <= 3_600_000


@pytest.mark.requirement("D41", "D22")
@pytest.mark.parametrize("where", BEGUN, ids=lambda where: where.__name__)
@virtual_time
async def test_a_call_cancelled_after_it_began_is_answered_within_the_grace(where: Where) -> None:
    stage = Stage(slots=1)
    await where(stage)
    await asyncio.sleep(0.1)
    assert stage.dispatcher.cancel(CallId("it"))
    end = await stage.calls["it"]
    assert isinstance(end, DispatchError)
    retry_wait = where in (in_retry_wait, keyed_in_retry_wait)
    outcome = Outcome.NOT_RUN if retry_wait else Outcome.UNKNOWN  # the tool said that nothing was done
    assert (end.kind, end.outcome, end.attempts) == (ErrorKind.CANCELLED, outcome, 1)
    assert now_ms() <= 100 + 250
    assert stage.allowance.taken == TAKEN.get(where, 1)
    await let_go(stage)
    await assert_key_is_free(stage, kept=where is keyed_in_attempt)
    if where is in_attempt_elsewhere:
        assert stage.worker.cancels == ["cancelled"]


@pytest.mark.requirement("D41", "D7")
@pytest.mark.parametrize("where", [*QUEUED, *BEGUN], ids=lambda where: where.__name__)
@virtual_time
async def test_a_cancelled_caller_is_gone_at_once_and_what_the_call_took_comes_back(where: Where) -> None:
    stage = Stage(slots=1)
    events = hear(stage.dispatcher)
    await where(stage)
    await asyncio.sleep(0.1)
    stage.calls["it"].cancel()
    with pytest.raises(asyncio.CancelledError):
        await stage.calls["it"]
    assert now_ms() == 100
    if where in QUEUED:
        assert stage.allowance.taken == 0
    ends = [event for event in events if event.call_id == "it" and event.name == "dispatch.error"]
    assert [event.kind for event in ends] == [ErrorKind.CANCELLED]
    if where in (keyed_in_attempt, keyed_in_retry_wait):  # the run goes on, for whoever asks next (D17)
        assert stage.dispatcher.statistics().flights == 1
        await stage.dispatcher.close(drain_deadline_ms=0)
    await let_go(stage)


@pytest.mark.requirement("D46")
@virtual_time
async def test_new_calls_are_refused_and_those_under_way_end_by_themselves() -> None:
    registry = Registry()
    work = add_work(registry, wait_ms=500)
    dispatcher = make(registry, slots=1)
    calls = [asyncio.ensure_future(dispatcher.dispatch("work")) for _ in range(3)]
    await spin()
    closing = asyncio.ensure_future(dispatcher.close())
    await spin()
    refused = await dispatcher.dispatch("work")
    assert isinstance(refused, DispatchError)
    assert (refused.kind, refused.outcome) == (ErrorKind.SHUTTING_DOWN, Outcome.NOT_RUN)
    await closing
    assert now_ms() == 1_500
    assert all(call.done() and call.result().ok for call in calls)
    assert work.ended == 3
    assert_quiet(dispatcher)
    await dispatcher.close()
    await asyncio.gather(dispatcher.close(), dispatcher.close())
    assert now_ms() == 1_500


@pytest.mark.requirement("D46")
@virtual_time
async def test_a_nested_call_is_taken_while_its_parent_drains() -> None:
    registry = Registry()
    add_work(registry, wait_ms=100)

    async def parent(arguments: dict[str, Any]) -> int:
        await asyncio.sleep(0.3)
        return int((await dispatcher.dispatch("work")).unwrap())

    add(registry, "parent", parent)
    dispatcher = make(registry)
    call = asyncio.ensure_future(dispatcher.dispatch("parent"))
    await spin()
    await dispatcher.close()
    assert (await call).ok
    assert now_ms() == 400


@pytest.mark.requirement("D46")
@virtual_time
async def test_no_retry_starts_once_it_closes() -> None:
    stage = Stage()
    await in_retry_wait(stage)
    await spin()
    await stage.dispatcher.close()
    end = await stage.calls["it"]
    assert isinstance(end, DispatchError)
    assert (end.kind, end.attempts, stage.flaky_runs) == (ErrorKind.TRANSIENT, 1, 1)
    assert now_ms() == 0


@pytest.mark.requirement("D46")
@pytest.mark.parametrize("where", [*QUEUED, *BEGUN], ids=lambda where: where.__name__)
@virtual_time
async def test_a_stop_at_each_point_leaves_nothing(where: Where) -> None:
    stage = Stage(slots=1)
    await where(stage)
    await spin()
    await stage.dispatcher.close()
    assert now_ms() <= 1_000 + 2_000  # the drain, and not much more
    await spin()
    for call in stage.calls.values():
        assert call.done()
    end = stage.calls["it"].result()
    assert isinstance(end, DispatchError)
    if where in QUEUED:
        assert (end.kind, end.outcome, end.attempts) == (ErrorKind.SHUTTING_DOWN, Outcome.NOT_RUN, 0)
    elif where in (in_retry_wait, keyed_in_retry_wait):
        assert end.kind is ErrorKind.TRANSIENT
    else:
        assert (end.kind, end.outcome, end.attempts) == (ErrorKind.CANCELLED, Outcome.UNKNOWN, 1)
    assert_quiet(stage.dispatcher, stragglers=1 if where is in_stubborn_attempt else 0)
    assert stage.worker.pins == 0
    stage.release.set()
    await spin()
    assert_quiet(stage.dispatcher)


@pytest.mark.requirement("D46")
@virtual_time
async def test_a_lingering_call_of_a_cancelled_caller_is_waited_for() -> None:
    """Its slot is still taken when the dispatcher closes: after the close it is not."""
    stage = Stage()
    await in_stubborn_attempt(stage)
    await spin()
    stage.calls["it"].cancel()
    await asyncio.wait([stage.calls["it"]])
    await stage.dispatcher.close()
    assert_quiet(stage.dispatcher, stragglers=1)
    stage.release.set()
    await spin()


@pytest.mark.requirement("D46")
@virtual_time
async def test_a_runner_that_never_confirms_does_not_hold_up_the_stop() -> None:
    stage = Stage()
    stage.worker.unconfirmed = True
    await in_attempt_elsewhere(stage)
    await spin()
    await stage.dispatcher.close()
    assert now_ms() <= 1_000 + 2_000


@pytest.mark.requirement("D46")
@virtual_time
async def test_a_failing_subscriber_and_a_hanging_policy_do_not_hold_up_the_stop() -> None:
    stage = Stage()

    def angry(event: Any) -> None:
        raise RuntimeError("no")

    stage.dispatcher.subscribe(angry)
    await in_policy(stage)
    await spin()
    await stage.dispatcher.close()
    assert now_ms() <= 1_000 + 2_000
    assert_quiet(stage.dispatcher)


@pytest.mark.requirement("D46")
@virtual_time
async def test_leaving_the_block_by_an_exception_stops_at_once() -> None:
    registry = Registry()
    work = add_work(registry, wait_ms=20_000)
    dispatcher = await make(registry).__aenter__()
    call = asyncio.ensure_future(dispatcher.dispatch("work"))
    await spin()
    error = RuntimeError("out")
    await dispatcher.__aexit__(RuntimeError, error, None)
    assert now_ms() == 0
    assert work.cancelled == 1
    end = await call
    assert isinstance(end, DispatchError)
    assert end.kind is ErrorKind.CANCELLED


@pytest.mark.requirement("D46", "D39")
@virtual_time
async def test_an_attempt_elsewhere_is_told_why_it_stops() -> None:
    stage = Stage()
    await in_attempt_elsewhere(stage)
    await spin()
    await stage.dispatcher.close()
    assert stage.worker.cancels == ["shutting_down"]


@pytest.mark.requirement("D46", "D22")
@virtual_time
async def test_a_stop_in_an_attempt_that_had_not_begun_after_one_that_had() -> None:
    """Not `shutting_down`, which says that nothing ran."""
    stage = Stage()

    async def script(runner: FakeRunner, args: bytes, context: Any) -> Any:
        if context.attempt == 1:
            return await ending(fail(ErrorKind.CRASHED, "lost", attempts=1))(runner, args, context)
        return await hanging(runner, args, context)

    add_described(stage.registry, stage.worker, "twice", script, idempotent=True, timeout_ms=LONG_MS)
    stage.start("twice", "it")
    await asyncio.sleep(1)
    closing = asyncio.ensure_future(stage.dispatcher.close(drain_deadline_ms=0))
    await closing
    end = stage.calls["it"].result()
    assert isinstance(end, DispatchError)
    assert (end.kind, end.outcome) == (ErrorKind.CANCELLED, Outcome.UNKNOWN)


@pytest.mark.requirement("D46", "D24")
def test_nothing_is_left_for_the_loop_to_complain_of(caplog: pytest.LogCaptureFixture) -> None:
    import gc

    async def main() -> None:
        for where in (*QUEUED, *BEGUN):
            stage = Stage(slots=1)
            await where(stage)
            await spin()
            await stage.dispatcher.close(drain_deadline_ms=0)
            stage.release.set()
            await spin()
            assert len(asyncio.all_tasks()) == 1, where

    run_virtual(main())
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


@pytest.mark.requirement("D29", "D41")
@virtual_time
async def test_every_call_has_one_start_and_one_end_whatever_ended_it() -> None:
    for where in (*QUEUED, *BEGUN):
        stage = Stage(slots=1)
        events = hear(stage.dispatcher)
        await where(stage)
        await asyncio.sleep(0.1)
        stage.dispatcher.cancel(CallId("it"))
        await asyncio.wait([stage.calls["it"]])
        names = [event.name for event in events if event.call_id == "it"]
        assert (names[0], names.count("dispatch.start")) == ("dispatch.start", 1), where
        assert (names[-1], names.count("dispatch.error")) == ("dispatch.error", 1), where
        await let_go(stage)
