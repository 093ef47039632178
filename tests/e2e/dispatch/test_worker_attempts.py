"""Attempts in real executors: how many, of which version, under which key, and what a crash leaves."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from callyard.dispatch.config import DispatcherConfig
from callyard.dispatch.outcomes import DispatchError
from callyard.errors import ErrorKind, Outcome
from callyard.policy.retry import RetryPolicy
from callyard.worker.loading import Registry
from tests.e2e.dispatch.yards import ONCE, QUICK, hear, lines, open_yard, wait_for
from tests.e2e.processes import kill


@pytest.mark.requirement("D12")
@pytest.mark.requirement("D52")
async def test_a_crash_of_what_is_safe_to_run_again_is_retried(tmp_path: Path) -> None:
    effects = tmp_path / "effects"
    async with open_yard() as yard:
        done = await yard.dispatch("dies_at_first", {"path": str(effects)})
        assert done.unwrap() == 2
        assert done.attempts == 2
    assert lines(effects) == ["1", "2"]


@pytest.mark.requirement("D12")
@pytest.mark.requirement("D52")
async def test_a_crash_of_what_made_no_promise_is_not(tmp_path: Path) -> None:
    async with open_yard() as yard:
        events = hear(yard.dispatcher)
        done = await yard.dispatch("dies")
        assert isinstance(done, DispatchError)
        assert (done.kind, done.outcome, done.attempts) == (ErrorKind.CRASHED, Outcome.UNKNOWN, 1)
        assert not done.retryable
        raised = await yard.dispatch("raises_timeout")
        assert isinstance(raised, DispatchError)
        assert (raised.kind, raised.outcome, raised.attempts) == (ErrorKind.INTERNAL, Outcome.RAN, 1)
    assert "dispatch.retry" not in [event.name for event in events]


@pytest.mark.requirement("D12")
@pytest.mark.requirement("D48")
@pytest.mark.requirement("X64")
@pytest.mark.parametrize("tool", ["charges_and_dies", "charges_and_spins"])
async def test_a_promise_does_not_cover_the_effects_of_what_it_called(tool: str, tmp_path: Path) -> None:
    """The parent is idempotent, the charge below it is not: no second attempt, and the key keeps the unknown end."""
    effects = tmp_path / "effects"
    async with open_yard() as yard:
        done = await yard.dispatch(tool, {"path": str(effects)}, key="k")
        assert isinstance(done, DispatchError)
        assert done.outcome is Outcome.UNKNOWN
        assert done.attempts == 1
        assert not done.retryable
        assert done.details["effect_below"] is True
        again = await yard.dispatch(tool, {"path": str(effects)}, key="k")
        assert isinstance(again, DispatchError)
        assert again.deduplicated
        assert again.call_id == done.call_id
    assert len(lines(effects)) == 1


@pytest.mark.requirement("D12")
@pytest.mark.requirement("D52")
async def test_what_had_not_begun_when_its_process_died_costs_no_attempt(tmp_path: Path) -> None:
    """X62 inside one attempt of the dispatcher: sent, never begun, sent again, whatever the promise."""
    gate, held, effects = tmp_path / "gate", tmp_path / "held", tmp_path / "effects"
    async with open_yard(dispatching=DispatcherConfig(retry=ONCE), spare_executors=0, queue_ahead_ms=0) as yard:
        holder = asyncio.ensure_future(yard.dispatch("hold", {"path": str(held), "gate": str(gate)}))
        await wait_for(lambda: lines(held), "the holder runs")
        sent = [
            asyncio.ensure_future(yard.dispatch("marks", {"path": str(effects), "text": str(n)})) for n in range(20)
        ]
        await wait_for(lambda: yard.worker.statistics().inflight == 21, "they are sent")
        kill(yard.worker.slots()[0].pid, signal.SIGKILL)
        ended = await asyncio.gather(*sent)
        lost = await holder
        assert isinstance(lost, DispatchError)
        assert (lost.kind, lost.attempts) == (ErrorKind.CRASHED, 1)
        assert all(done.ok and done.attempts == 1 for done in ended)
    assert sorted(lines(effects), key=int) == [str(n) for n in range(20)], "each once"


@pytest.mark.requirement("D42")
@pytest.mark.requirement("D17")
async def test_one_key_over_a_timeout_a_retry_and_a_success(tmp_path: Path) -> None:
    effects = tmp_path / "effects"
    async with open_yard(executors=2) as yard:
        ended = await asyncio.gather(
            *(yard.dispatch("slow_at_first", {"path": str(effects)}, key="order-7") for _ in range(4))
        )
        assert [done.unwrap() for done in ended] == [[2, "order-7"]] * 4
        assert {done.call_id for done in ended} == {ended[0].call_id}
        assert {done.attempts for done in ended} == {2}
        assert sorted(done.deduplicated for done in ended) == [False, True, True, True]
    assert lines(effects) == ["1 order-7", "2 order-7"]


@pytest.mark.requirement("D19")
@pytest.mark.requirement("D42")
async def test_a_charge_whose_process_was_killed_stays_unknown_and_is_not_made_again(tmp_path: Path) -> None:
    effects, gate = tmp_path / "effects", tmp_path / "gate"
    args = {"path": str(effects), "gate": str(gate)}
    async with open_yard() as yard:
        charging = asyncio.ensure_future(yard.dispatch("charge", args, key="order-7"))
        await wait_for(lambda: lines(effects), "it charges")
        os.kill(int(lines(effects)[0]), signal.SIGKILL)
        first = await charging
        assert isinstance(first, DispatchError)
        assert (first.kind, first.outcome, first.attempts) == (ErrorKind.CRASHED, Outcome.UNKNOWN, 1)
        again = await yard.dispatch("charge", args, key="order-7")
        assert isinstance(again, DispatchError)
        assert (again.failure, again.call_id, again.deduplicated) == (first.failure, first.call_id, True)
        assert len(lines(effects)) == 1, "no second run"
        gate.touch()
        assert await yard.dispatcher.resolve("default", "charge", "order-7", retry=True)
        assert (await yard.dispatch("charge", args, key="order-7")).unwrap() == 500
    assert len(lines(effects)) == 2


VERSION = """
import os
from callyard import function, sleep, context

VERSION = {version!r}

def note(path, text):
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, (text + "\\n").encode())
    os.close(fd)

@function(idempotent=True, timeout_ms=3_000)
def look(path: str = "", gate: str = "") -> str:
    if path:
        note(path, VERSION)
        if context().attempt == 1:
            while not os.path.exists(gate):
                sleep(0.005)
            sleep(600)
    return VERSION
"""


@pytest.mark.requirement("D39")
async def test_a_reload_reaches_the_next_dispatch_and_not_a_retry_of_the_running_one(tmp_path: Path) -> None:
    target, effects, gate = tmp_path / "tools.py", tmp_path / "effects", tmp_path / "gate"
    target.write_text(VERSION.format(version="one"))
    async with open_yard(target) as yard:
        running = asyncio.ensure_future(yard.dispatch("look", {"path": str(effects), "gate": str(gate)}))
        await wait_for(lambda: lines(effects), "the first attempt runs")
        target.write_text(VERSION.format(version="two"))
        assert await yard.reload()
        gate.touch()
        assert (await yard.dispatch("look")).unwrap() == "two"
        done = await running
        assert done.unwrap() == "one"
        assert done.attempts >= 2
        assert (await yard.dispatch("look")).unwrap() == "two"
    assert set(lines(effects)) == {"one"}


@pytest.mark.requirement("D39")
async def test_what_a_reload_took_away_is_not_found(tmp_path: Path) -> None:
    target = tmp_path / "tools.py"
    target.write_text(VERSION.format(version="one"))
    async with open_yard(target) as yard:
        target.write_text("from callyard import function\n@function\ndef other() -> int: return 1\n")
        assert await yard.reload()
        done = await yard.dispatch("look")
        assert isinstance(done, DispatchError)
        assert (done.kind, done.outcome, done.attempts) == (ErrorKind.NOT_FOUND, Outcome.NOT_RUN, 0)
        assert (await yard.dispatch("other")).unwrap() == 1


@pytest.mark.requirement("D7")
@pytest.mark.requirement("D39")
async def test_what_a_worker_does_not_serve_is_not_found(tmp_path: Path) -> None:
    """Another worker of the same registry reloaded it, or a tool of this process took the name."""
    target = tmp_path / "tools.py"
    target.write_text(VERSION.format(version="one"))
    registry = Registry.for_target(target)
    async with open_yard(registry) as yard, open_yard(registry) as other:
        target.write_text(VERSION.format(version="two"))
        assert await other.reload()
        assert (await other.dispatch("look")).unwrap() == "two"
        done = await yard.dispatch("look")
        assert isinstance(done, DispatchError)
        assert (done.kind, done.outcome, done.attempts) == (ErrorKind.NOT_FOUND, Outcome.NOT_RUN, 0)
        assert "reload" in done.message


@pytest.mark.requirement("D39")
async def test_waiting_tool_calls_take_no_task_slot(tmp_path: Path) -> None:
    """200 at once beside two call lists that hold the only two task slots."""
    gate, effects = tmp_path / "gate", tmp_path / "effects"
    rows = [{"path": str(tmp_path / "lists"), "gate": str(gate), "value": 0}]
    async with open_yard(executors=2, executor_task_slots=2) as yard:

        async def run_list() -> list[int]:
            return [result.value async for result in yard.map("until", rows)]

        lists = [asyncio.ensure_future(run_list()) for _ in range(2)]
        await wait_for(lambda: len(lines(tmp_path / "lists")) == 2, "the lists hold both slots")
        calls = [
            asyncio.ensure_future(yard.dispatch("until", {"path": str(effects), "gate": str(gate), "value": n}))
            for n in range(200)
        ]
        await wait_for(lambda: len(lines(effects)) == 200, "all 200 have begun")
        assert yard.dispatcher.statistics().running == 200
        gate.touch()
        ended = await asyncio.gather(*calls)
        assert [done.unwrap() for done in ended] == list(range(200))
        assert await asyncio.gather(*lists) == [[0], [0]]


@pytest.mark.requirement("D39")
async def test_two_dispatches_share_no_cache(tmp_path: Path) -> None:
    """A `pure` function runs for each: sharing is what keys are for."""
    effects = tmp_path / "effects"
    async with open_yard() as yard:
        ended = await asyncio.gather(*(yard.dispatch("counted", {"path": str(effects)}) for _ in range(3)))
        assert all(done.unwrap() == 1 for done in ended)
    assert len(lines(effects)) == 3


@pytest.mark.requirement("D39")
async def test_two_dispatches_share_no_io_cache(tmp_path: Path) -> None:
    """What a file holds now, not what it held for the call before."""
    data = tmp_path / "data"
    data.mkdir()
    target = tmp_path / "tools.py"
    target.write_text(
        "from callyard import files, function\n"
        "@function\n"
        "def read_twice() -> list:\n"
        "    return [files.read_text('data/it.txt'), files.read_text('data/it.txt')]\n"
    )
    async with open_yard(target, io={"files": {"data": {"path": str(data)}}}) as yard:
        for text in ("one", "two"):
            (data / "it.txt").write_text(text)
            assert (await yard.dispatch("read_twice")).unwrap() == [text, text]


@pytest.mark.requirement("D30")
@pytest.mark.requirement("D44")
@pytest.mark.requirement("D42")
async def test_what_a_call_is_told_of_itself() -> None:
    trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "x=1"}
    heard: list[tuple[float, float | None, str]] = []
    async with open_yard() as yard:
        tasks: list[str] = []
        opened = yard.worker.open_attempt

        def watch(view, call, context, *rest):  # type: ignore[no-untyped-def]
            attempt = opened(view, call, context, *rest)
            tasks.append(attempt.plan.tenant)
            assert context.trace == trace
            return attempt

        yard.worker.open_attempt = watch  # type: ignore[method-assign]
        done = await yard.dispatch(
            "seen",
            key="k",
            owner="me",
            tenant="acme",
            tags={"a": "b"},
            trace=trace,
            deadline_ms=60_000,
            on_progress=lambda *told: heard.append(told),
        )
        known = done.unwrap()
        left = known.pop("left")
        assert known.pop("call_id") == done.call_id
        assert known == {"attempt": 1, "owner": "me", "tenant": "acme", "tags": {"a": "b"}, "key": "k"}
        assert 0 < left <= 60_000
        assert tasks == ["acme"], "fairness is by tenant"
        assert heard == [(1, 2, "half")]
        plain = (await yard.dispatch("seen", trace=trace)).unwrap()
        del plain["call_id"]
        assert plain == {"attempt": 1, "owner": "", "tenant": "default", "tags": {}, "key": "", "left": None}


@pytest.mark.requirement("D16")
@pytest.mark.requirement("D44")
async def test_two_tenants_with_one_key_and_owner_are_strangers(tmp_path: Path) -> None:
    gate, effects = tmp_path / "gate", tmp_path / "effects"
    async with open_yard() as yard:
        args = {"path": str(effects), "gate": str(gate)}
        both = [
            asyncio.ensure_future(yard.dispatch("until", args, key="k", owner="me", tenant=tenant))
            for tenant in ("red", "blue")
        ]
        await wait_for(lambda: len(lines(effects)) == 2, "neither waits for the other")
        gate.touch()
        ended = await asyncio.gather(*both)
        assert not any(done.deduplicated for done in ended)
        assert len({done.call_id for done in ended}) == 2


@pytest.mark.requirement("D32")
@pytest.mark.requirement("D39")
async def test_a_thousand_at_once_and_nothing_left() -> None:
    """All answered, over two executors, with no asyncio task per call, and nothing remembered of them."""
    count = 1_000
    async with open_yard(executors=2, dispatching=DispatcherConfig(retry=QUICK)) as yard:
        assert (await yard.dispatch("add", {"a": 0, "b": 0})).ok
        before = len(asyncio.all_tasks())
        calls = [asyncio.ensure_future(yard.dispatch("add", {"a": n, "b": 1})) for n in range(count)]
        await asyncio.sleep(0)
        peak = 0
        while not all(call.done() for call in calls):
            own = len(asyncio.all_tasks()) - sum(not call.done() for call in calls)
            peak = max(peak, own)
            await asyncio.sleep(0)
        assert [call.result().unwrap() for call in calls] == [n + 1 for n in range(count)]
        assert peak <= before + 5, f"{peak} tasks besides the callers' own, {before} before"
        await wait_for(lambda: len(asyncio.all_tasks()) <= before, "no task left")


@pytest.mark.slow
@pytest.mark.requirement("D12")
@pytest.mark.requirement("D17")
@pytest.mark.requirement("D42")
async def test_every_call_is_answered_while_executors_are_killed(tmp_path: Path) -> None:
    """Promised calls succeed; a charge is made at most once, and whoever asks again hears the same."""
    rng, count = Random(7), 300
    patient = RetryPolicy(max_attempts=100, base_ms=5, factor=1)
    config = DispatcherConfig(retry=patient, breaker=None)
    async with open_yard(executors=2, dispatching=config) as yard:

        async def kill_now_and_then() -> None:
            while True:
                await asyncio.sleep(rng.uniform(0.05, 0.3))
                pids = [slot.pid for slot in yard.worker.slots() if slot.pid]
                if pids:
                    kill(rng.choice(pids), signal.SIGKILL)

        killing = asyncio.ensure_future(kill_now_and_then())
        try:
            for round in range(4):
                safe = [yard.dispatch("add", {"a": n, "b": round}) for n in range(count)]
                path = tmp_path / f"effects-{round}"
                charges = [
                    yard.dispatch("marks", {"path": str(path), "text": str(n // 2)}, key=f"{round}-{n // 2}")
                    for n in range(count)
                ]
                sums, ends = await asyncio.gather(asyncio.gather(*safe), asyncio.gather(*charges))
                assert [done.unwrap() for done in sums] == [n + round for n in range(count)]
                made = Counter(lines(path))
                assert not made or max(made.values()) == 1, "no charge twice"
                for n in range(0, count, 2):
                    one, other = ends[n], ends[n + 1]
                    assert one.ok == other.ok
                    assert one.call_id == other.call_id
                    assert made[str(n // 2)] == 1 or isinstance(one, DispatchError)
                    if isinstance(one, DispatchError):
                        assert (one.kind, one.outcome) == (ErrorKind.CRASHED, Outcome.UNKNOWN)
                        again = await yard.dispatch(
                            "marks", {"path": str(path), "text": str(n // 2)}, key=f"{round}-{n // 2}"
                        )
                        assert again.call_id == one.call_id
                assert Counter(lines(path)) == made, "and asking again made none"
        finally:
            killing.cancel()
