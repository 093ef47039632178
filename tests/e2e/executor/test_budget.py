"""Budgets and cancellation: user code is stopped where it stands (X53, X54, X74)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from callyard.errors import Outcome
from callyard.wire.messages import CallCompleted, CallFailed, CancelReason
from tests.e2e.executor.driver import WAIT_S, Driver, output_of

SOURCE = """
import asyncio, os, re, signal, socket, threading, time, queue
from typing import Annotated
from pydantic import AfterValidator
from callyard.sdk import sleep

lock = threading.Lock()

def quick() -> int:
    return 1

def loop():
    while True:
        pass

def loop_in_try():
    for _ in iter(int, 1):
        try:
            while True:
                pass
        except Exception:
            pass
        finally:
            pass

def recursion():
    def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
    return fib(60)

def real_sleep():
    time.sleep(600)

def sdk_sleep():
    sleep(600)

def many_naps():
    while True:
        sleep(0.01)

def deadlock():
    lock.acquire()
    try:
        lock.acquire()
    finally:
        lock.release()

def wait_for_queue():
    queue.Queue().get()

def read_socket():
    a, b = socket.socketpair()
    a.recv(1)

def regex():
    re.match(r"(a+)+$", "a" * 64 + "b")

def sort_key():
    sorted(range(10**7), key=lambda x: [x] * 10)

def join_thread():
    thread = threading.Thread(target=time.sleep, args=(1.5,), daemon=True)
    thread.start()
    thread.join()

def run_inside():
    async def body():
        await asyncio.sleep(600)
    asyncio.run(body())

def overrun_then_return() -> int:
    # One C call that cannot be interrupted; it returns in its own time, over budget.
    sum(range(3 * 10**7))
    return 1

def flag_when_done(path: str, seconds: float):
    try:
        loop()
    finally:
        with open(path, "w") as file:
            file.write("cleaned up")

def swallow():
    def attempt():
        while True:
            pass
    while True:
        try:
            attempt()
        except BaseException:
            pass

def swallow_in_naps():
    while True:
        try:
            sleep(0.01)
        except BaseException:
            pass

def swallow_then_hang_on_lock():
    with lock:
        swallow()

def loop_in_check(x) -> int:
    while True:
        pass

def validated(x: Annotated[int, AfterValidator(loop_in_check)]) -> int:
    return x

def sleep_in_check(x) -> int:
    sleep(0.05)
    return x + 1

def napping_check(x: Annotated[int, AfterValidator(sleep_in_check)]) -> int:
    return x

def nap(seconds: float) -> float:
    sleep(seconds)
    return seconds

def spin(seconds: float) -> float:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    return seconds

def spin_holding_the_gil(path: str, count: int) -> int:
    open(path, "w").close()
    return sum(range(count))

def mark_start(path: str, how: str):
    open(path, "w").close()
    globals()[how]()
"""

ASYNC = (
    SOURCE
    + """
async def a_loop():
    await asyncio.sleep(0)
    while True:
        pass

async def a_wait():
    await asyncio.Event().wait()

async def a_sdk_sleep():
    sleep(600)

async def a_naps():
    while True:
        await asyncio.sleep(0.01)

async def a_group():
    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(a_wait())

async def a_child_loop():
    async with asyncio.TaskGroup() as group:
        group.create_task(a_wait())
        group.create_task(a_loop())

async def a_loose_child_loop():
    task = asyncio.create_task(a_loop())
    await a_wait()

async def a_callback_loop():
    asyncio.get_running_loop().call_soon(loop)
    await a_wait()

async def a_clean_up(path: str):
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)
        with open(path, "w") as file:
            file.write("cleaned up")

async def a_swallow():
    swallow()

async def a_swallow_waits():
    while True:
        try:
            await asyncio.Event().wait()
        except BaseException:
            pass

async def a_child_swallows():
    task = asyncio.create_task(a_swallow_waits())
    await asyncio.sleep(0.01)
    return 7

async def a_mark_start(path: str, how: str):
    open(path, "w").close()
    await globals()[how]()
"""
)

INTERRUPTED = [
    *("loop", "loop_in_try", "recursion", "real_sleep", "sdk_sleep", "many_naps", "deadlock", "wait_for_queue"),
    *("read_socket", "regex", "sort_key", "join_thread", "run_inside"),
]
INTERRUPTED_ASYNC = [
    *("a_loop", "a_wait", "a_sdk_sleep", "a_naps", "a_group", "a_child_loop", "a_loose_child_loop"),
    *("a_callback_loop", "loop", "real_sleep", "sdk_sleep", "run_inside"),
]


@pytest.fixture(scope="module")
def plain() -> Iterator[Driver]:
    with Driver(SOURCE) as driver:
        yield driver


@pytest.fixture(scope="module")
def looped() -> Iterator[Driver]:
    with Driver(ASYNC) as driver:
        yield driver


def check_overrun(driver: Driver, function: str) -> None:
    end = driver.failure(function, budget_ms=150).payload
    assert (end.error_kind, end.outcome, end.retryable) == ("timeout", Outcome.UNKNOWN, True)
    used_ms = end.details.pop("used_ms")
    assert end.details == {"limit": "budget_ms", "budget_ms": 150}
    assert used_ms >= 150
    assert f"budget of 150 ms (used {used_ms} ms)" in end.error_message
    assert end.budget_used_ms == used_ms
    assert driver.is_draining() == ""
    assert driver.value("quick") == 1  # the others go on


@pytest.mark.requirement("X53")
@pytest.mark.parametrize("function", INTERRUPTED)
def test_overrun_is_interrupted_where_it_stands(plain: Driver, function: str) -> None:
    check_overrun(plain, function)


@pytest.mark.requirement("X53")
@pytest.mark.requirement("X52")
@pytest.mark.parametrize("function", INTERRUPTED_ASYNC)
def test_overrun_is_interrupted_under_a_loop(looped: Driver, function: str) -> None:
    check_overrun(looped, function)


@pytest.mark.requirement("X53")
def test_validators_are_user_code_too(plain: Driver) -> None:
    failed = plain.failure("validated", 1, budget_ms=100).payload
    assert (failed.error_kind, failed.outcome) == ("timeout", Outcome.UNKNOWN)
    assert "in loop_in_check" in failed.error_stack
    # They may wait, too, side by side, in the middle of the validator's own frames.
    calls = [plain.start("napping_check", i) for i in range(5)]
    assert [output_of(plain.wait_end(call)) for call in calls] == [1, 2, 3, 4, 5]


@pytest.mark.requirement("X53")
def test_failure_says_where_it_was(plain: Driver) -> None:
    stack = plain.failure("loop", budget_ms=50).payload.error_stack
    assert "in loop" in stack
    assert "callyard/executor" not in stack


@pytest.mark.requirement("X53")
def test_clock_is_read_again_at_completion(plain: Driver) -> None:
    failed = plain.failure("overrun_then_return", budget_ms=1).payload
    assert (failed.error_kind, failed.details["limit"]) == ("timeout", "budget_ms")


@pytest.mark.requirement("X53")
def test_waiting_for_a_turn_is_not_charged(plain: Driver) -> None:
    # 20 calls of 50 ms each in one process, and one behind them that came with them.
    calls = [plain.make_call("spin", 0.05) for _ in range(20)]
    last = plain.make_call("nap", 0.01, budget_ms=20_000)
    plain.send(*calls, last)
    for call in [*calls, last]:
        plain.wait_end(call.call_id)
    end = plain.ends[last.call_id]
    assert isinstance(end, CallCompleted)
    assert end.payload.timing is not None
    assert end.payload.timing.queued_ms >= 999
    assert 10 <= end.payload.budget_used_ms < end.payload.timing.queued_ms


@pytest.mark.requirement("X53")
def test_sleep_and_running_are_charged(plain: Driver) -> None:
    slept = plain.run("nap", 0.2, budget_ms=20_000).payload
    assert slept.budget_used_ms >= 200
    assert slept.timing is not None
    assert slept.timing.wait_ms >= 200
    ran = plain.run("spin", 0.2, budget_ms=20_000).payload
    assert ran.budget_used_ms >= 199
    assert ran.timing is not None
    assert ran.timing.run_ms >= 199


@pytest.mark.requirement("X53")
@pytest.mark.requirement("X74")
def test_no_budget_is_no_limit(plain: Driver) -> None:
    # An earlier call's timer is still armed; it must not hit this one.
    plain.value("quick", budget_ms=100)
    assert plain.value("spin", 0.4, budget_ms=0) == 0.4
    assert plain.value("nap", 0.4, budget_ms=0) == 0.4


@pytest.mark.requirement("X53")
def test_finally_runs_when_interrupted(plain: Driver, tmp_path: Path) -> None:
    file = tmp_path / "flag"
    assert plain.failure("flag_when_done", str(file), 1, budget_ms=50).payload.error_kind == "timeout"
    assert file.read_text() == "cleaned up"


@pytest.mark.requirement("X53")
@pytest.mark.parametrize("function", ["swallow", "swallow_in_naps", "swallow_then_hang_on_lock", "a_swallow"])
def test_swallowing_code_is_quarantined_and_others_finish(function: str) -> None:
    with Driver(ASYNC if function.startswith("a_") else SOURCE) as driver:
        napping = [driver.start("nap", 2) for _ in range(10)]
        failed = driver.failure(function, budget_ms=100).payload
        assert (failed.error_kind, failed.details["limit"]) == ("timeout", "budget_ms")
        assert any("out of use" in note for note in failed.notes)
        assert "swallow" in failed.error_stack
        driver.wait_until(lambda: driver.is_draining() == "quarantine", "draining heartbeat")
        assert driver.heartbeats[-1].payload.available_contexts == 0
        # It takes nothing new, at no cost to it, and finishes what has begun.
        late = driver.failure("quick").payload
        assert (late.error_kind, late.outcome) == ("recalled", Outcome.NOT_RUN)
        assert [output_of(driver.wait_end(call)) for call in napping] == [2] * 10


@pytest.mark.requirement("X53")
def test_calls_not_begun_are_handed_back_by_a_quarantine() -> None:
    with Driver(SOURCE) as driver:
        assert driver.value("quick") == 1
        hog, *queued = [driver.make_call("swallow", budget_ms=100), *(driver.make_call("quick") for _ in range(5))]
        driver.send(hog, *queued)
        kinds = [driver.wait_end(call.call_id) for call in queued]
        assert {end.payload.error_kind for end in kinds if isinstance(end, CallFailed)} == {"recalled"}
        assert len(kinds) == 5
        assert driver.wait_end(hog.call_id).payload.attempt_seq == 1


@pytest.mark.requirement("X53")
def test_an_async_call_that_swallows_its_cancellation_is_given_up() -> None:
    with Driver(ASYNC) as driver:
        napping = driver.start("nap", 2)
        failed = driver.failure("a_swallow_waits", budget_ms=100).payload
        assert failed.error_kind == "timeout"
        assert "a_swallow_waits" in failed.error_stack
        driver.wait_until(lambda: driver.is_draining() == "quarantine", "draining heartbeat")
        assert output_of(driver.wait_end(napping)) == 2


@pytest.mark.requirement("X52")
def test_a_child_task_that_will_not_end_costs_the_process_not_the_call() -> None:
    with Driver(ASYNC) as driver:
        end = driver.run("a_child_swallows")
        assert output_of(end) == 7
        assert len(end.payload.notes) == 2
        driver.wait_until(lambda: driver.is_draining() == "quarantine", "draining heartbeat")


# --- cancellation -----------------------------------------------------------------------------------------------------

CANCELLED = ["loop", "real_sleep", "sdk_sleep", "many_naps", "deadlock", "run_inside"]
CANCELLED_ASYNC = ["a_loop", "a_wait", "a_sdk_sleep", "a_group", "a_child_loop"]


def check_cancel(driver: Driver, starter: str, function: str, file: Path) -> None:
    call = driver.start(starter, str(file), function)
    driver.wait_file(file)
    driver.cancel(call)
    failed = driver.wait_end(call)
    assert isinstance(failed, CallFailed)
    assert (failed.payload.error_kind, failed.payload.outcome) == ("cancelled", Outcome.UNKNOWN)
    assert failed.payload.details == {"reason": "cancelled"}
    assert driver.is_draining() == ""
    assert driver.value("quick") == 1


@pytest.mark.requirement("X54")
@pytest.mark.parametrize("function", CANCELLED)
def test_cancel_stops_a_running_or_waiting_call(plain: Driver, function: str, tmp_path: Path) -> None:
    check_cancel(plain, "mark_start", function, tmp_path / "started")


@pytest.mark.requirement("X54")
@pytest.mark.parametrize("function", CANCELLED_ASYNC)
def test_cancel_stops_an_async_call(looped: Driver, function: str, tmp_path: Path) -> None:
    check_cancel(looped, "a_mark_start", function, tmp_path / "started")


@pytest.mark.requirement("X54")
def test_cancel_of_a_call_that_has_not_begun(plain: Driver, tmp_path: Path) -> None:
    hog = plain.start("mark_start", str(tmp_path / "started"), "loop")
    plain.wait_file(tmp_path / "started")
    waiting = {reason: plain.start("quick") for reason in (CancelReason.CANCELLED, CancelReason.DEADLINE)}
    for reason, call in waiting.items():
        plain.cancel(call, reason)  # answered at once, while the other one runs
    kinds = []
    for call in waiting.values():
        end = plain.wait_end(call)
        assert isinstance(end, CallFailed)
        assert end.payload.outcome is Outcome.NOT_RUN
        kinds.append(end.payload.error_kind)
    assert kinds == ["cancelled", "deadline"]
    assert hog not in plain.ends
    plain.cancel(hog, CancelReason.SHUTTING_DOWN)
    end = plain.wait_end(hog)
    assert isinstance(end, CallFailed)
    assert (end.payload.error_kind, end.payload.details) == ("cancelled", {"reason": "shutting_down"})


@pytest.mark.requirement("X54")
@pytest.mark.requirement("X89")
def test_cancel_by_deadline_is_a_timeout_of_a_begun_call(plain: Driver, tmp_path: Path) -> None:
    call = plain.start("mark_start", str(tmp_path / "started"), "sdk_sleep")
    plain.wait_file(tmp_path / "started")
    plain.cancel(call, CancelReason.DEADLINE)
    end = plain.wait_end(call)
    assert isinstance(end, CallFailed)
    assert (end.payload.error_kind, end.payload.details) == ("timeout", {"limit": "deadline_ms"})
    assert end.payload.outcome is Outcome.UNKNOWN


@pytest.mark.requirement("X54")
def test_stale_cancels_change_nothing(plain: Driver) -> None:
    call = plain.start("nap", 0.5, attempt_seq=4)
    plain.cancel(call, attempt_seq=3)
    assert output_of(plain.wait_end(call)) == 0.5
    plain.cancel(call, attempt_seq=4)  # too late
    assert plain.value("quick") == 1


@pytest.mark.requirement("X54")
def test_cancelled_code_that_swallows_is_quarantined(tmp_path: Path) -> None:
    with Driver(SOURCE) as driver:
        call = driver.start("mark_start", str(tmp_path / "started"), "swallow")  # no budget
        driver.wait_file(tmp_path / "started")
        driver.cancel(call)
        end = driver.wait_end(call)
        assert isinstance(end, CallFailed)
        assert end.payload.error_kind == "cancelled"
        driver.wait_until(lambda: driver.is_draining() == "quarantine", "draining heartbeat")


@pytest.mark.requirement("X54")
def test_async_clean_up_may_wait_a_little(looped: Driver, tmp_path: Path) -> None:
    file = tmp_path / "flag"
    call = looped.start("a_clean_up", str(file))
    looped.wait_until(lambda: looped.value("quick") == 1, "its turn")
    looped.cancel(call)
    end = looped.wait_end(call)
    assert isinstance(end, CallFailed)
    assert end.payload.error_kind == "cancelled"
    assert file.read_text() == "cleaned up"


@pytest.mark.requirement("X54")
def test_cancel_finds_its_way_behind_many_frames(plain: Driver, tmp_path: Path) -> None:
    # More input than the watch thread peeks at lies before the cancellation.
    hog = plain.start("mark_start", str(tmp_path / "started"), "loop")
    plain.wait_file(tmp_path / "started")
    calls = [plain.make_call("quick", raw=b"[%s]" % (b" " * 2_000)) for _ in range(100)]
    plain.send(*calls)
    plain.cancel(hog)
    assert isinstance(plain.wait_end(hog), CallFailed)
    for call in calls:
        assert output_of(plain.wait_end(call.call_id)) == 1


def test_results_do_not_wait_behind_a_long_call(plain: Driver, tmp_path: Path) -> None:
    quick, hog = plain.make_call("quick"), plain.make_call("mark_start", str(tmp_path / "started"), "loop")
    plain.send(quick, hog)
    assert output_of(plain.wait_end(quick.call_id)) == 1
    plain.wait_file(tmp_path / "started")
    plain.cancel(hog.call_id)
    plain.wait_end(hog.call_id)


@pytest.mark.requirement("X55")
@pytest.mark.requirement("X74")
def test_heartbeats_during_a_loop_and_after_a_gil_holding_call(tmp_path: Path) -> None:
    with Driver(SOURCE, heartbeat_interval_ms=50) as driver:
        call = driver.start("mark_start", str(tmp_path / "started"), "loop")
        driver.wait_file(tmp_path / "started")
        seen = len(driver.heartbeats)
        driver.wait_until(lambda: len(driver.heartbeats) > seen + 3, "heartbeats")
        last, before = driver.heartbeats[-1].payload, driver.heartbeats[-3].payload
        assert last.running_call_id == call
        assert last.heartbeat_seq == before.heartbeat_seq + 2
        # The scheduler was last active when the loop was entered, and CPU time goes on.
        assert last.last_scheduler_active_at_ms == before.last_scheduler_active_at_ms
        assert 0 < last.last_scheduler_active_at_ms <= time.monotonic_ns() // 1_000_000
        driver.wait_until(
            lambda: driver.heartbeats[-1].payload.cpu_user_ms > last.cpu_user_ms + 100, "rising CPU time", WAIT_S
        )
        assert (last.inflight_count, last.runnable_count, last.available_contexts) == (1, 1, 127)
        assert last.memory_bytes > 1 << 20
        driver.cancel(call)
        driver.wait_end(call)
        file = tmp_path / "holding"
        assert driver.value("spin_holding_the_gil", str(file), 2 * 10**7) == sum(range(2 * 10**7))


@pytest.mark.requirement("X55")
def test_sleepers_are_not_runnable() -> None:
    with Driver(ASYNC, heartbeat_interval_ms=20) as driver:
        calls = [driver.start(name, 600) for name in ("nap", "nap")] + [driver.start("a_wait")]
        driver.wait_until(
            lambda: (
                driver.heartbeats
                and driver.heartbeats[-1].payload.inflight_count == 3
                and driver.heartbeats[-1].payload.runnable_count == 0
            ),
            "heartbeat with three waiting calls",
        )
        assert driver.heartbeats[-1].payload.running_call_id == ""
        for call in calls:
            driver.cancel(call)
        for call in calls:
            driver.wait_end(call)
        driver.wait_until(lambda: driver.heartbeats[-1].payload.inflight_count == 0, "heartbeat of an idle executor")
        assert driver.heartbeats[-1].payload.available_contexts == 128
