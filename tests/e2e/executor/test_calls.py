"""Calls: arguments and results, contexts, both kinds of functions, and what the SDK says and does (X52)."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from callyard.errors import Outcome
from callyard.ids import Digest, RequestId, Tenant
from callyard.wire.messages import (
    BatchedCall,
    CallCompleted,
    CallContext,
    CallFailed,
    Describe,
    Described,
    DescribePayload,
    ExecuteCalls,
    ExecuteCallsPayload,
    Promises,
)
from tests.e2e.executor.driver import Driver, output_of

PLAIN = """
import time, contextvars, decimal
from callyard.sdk import context, sleep

variable = contextvars.ContextVar("variable", default="unset")
decimal.getcontext().prec = 50
alive = 0
most = 0

def add(a: int, b: int = 10) -> int:
    return a + b

def nap(seconds: float) -> float:
    global alive, most
    alive += 1
    most = max(most, alive)
    sleep(seconds)
    alive -= 1
    return seconds

def spin(seconds: float) -> float:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    return seconds

def most_alive() -> int:
    return most

def order(name: str) -> list[str]:
    seen = [variable.get()]
    variable.set(name)
    sleep(0.05)
    seen.append(variable.get())
    return seen

def precision() -> int:
    return decimal.getcontext().prec

def info() -> dict:
    told = context()
    return {"call_id": told.call_id, "attempt": told.attempt, "owner": told.owner, "tenant": told.tenant,
            "tags": dict(told.tags), "key": told.idempotency_key, "left": told.deadline_remaining_ms}

def negative() -> None:
    sleep(-1)

def nap_in_thread() -> str:
    import threading
    told = []
    def body():
        sleep(0.01)
        told.append(context().call_id)
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return told[0]

def nested_greenlet() -> list[int]:
    # As libraries do that bridge async and plain code: a greenlet of the user's own sleeps inside a call.
    from greenlet import greenlet, getcurrent
    out = []
    def inner():
        for i in range(3):
            sleep(0.01)
            getcurrent().parent.switch(i)
    child = greenlet(inner)
    for _ in range(3):
        out.append(child.switch())
        sleep(0.01)
    return out
"""

NESTED = (
    PLAIN
    + """
import asyncio

def run_inside(seconds: float) -> str:
    async def body():
        await asyncio.sleep(0.01)
        sleep(seconds)                    # suspends the whole call, its inner loop included
        assert asyncio.current_task() is not None
        await asyncio.sleep(0.01)
        return context().call_id
    return asyncio.run(body())

def sees_no_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return True
    return False
"""
)

ASYNC = (
    NESTED
    + """

async def a_add(a: int, b: int) -> int:
    await asyncio.sleep(0.01)
    return a + b

async def a_nap(seconds: float) -> float:
    sleep(seconds)
    return seconds

async def family() -> dict:
    names, current = [], asyncio.current_task()
    async def child(i):
        sleep(0.02)                       # the SDK's sleep blocks this child only
        await asyncio.sleep(0.01)
        variable.set(f"child {i}")
        names.append((i, context().call_id, asyncio.current_task() is not current))
        return i
    async with asyncio.timeout(30):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(child(i)) for i in range(4)]
    gathered = await asyncio.gather(*(child(i) for i in range(4, 6)))
    return {"results": [t.result() for t in tasks] + gathered, "names": sorted(names), "variable": variable.get()}

async def overtime() -> str:
    try:
        async with asyncio.timeout(0.05):
            await asyncio.Event().wait()
    except TimeoutError:
        return "timed out"
    return "not"

async def waited() -> str:
    try:
        await asyncio.wait_for(asyncio.Event().wait(), 0.05)
    except TimeoutError:
        return "timed out"
    return "not"

async def in_thread() -> list[str]:
    def body():
        sleep(0.01)
        return context().call_id
    return [await asyncio.to_thread(body), await asyncio.to_thread(body)]

async def callback() -> str:
    done = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(lambda: done.set_result(context().call_id))
    return await done

async def sleeping_callback() -> str:
    done = asyncio.get_running_loop().create_future()
    def body():
        try:
            sleep(0.01)
        except RuntimeError as error:
            done.set_result(str(error))
    asyncio.get_running_loop().call_soon(body)
    return await done

async def left() -> int:
    async def forever():
        await asyncio.Event().wait()
    task = asyncio.create_task(forever(), name="the forgotten one")
    await asyncio.sleep(0)
    return 1

async def child_that_exits() -> str:
    async def child():
        raise SystemExit(4)
    try:
        await asyncio.create_task(child())
    except SystemExit as error:
        return f"child exited {error.code}"
    return "not"

async def stops_the_loop() -> int:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.01)
    return 1

async def generators() -> list[int]:
    async def numbers():
        for i in range(3):
            await asyncio.sleep(0)
            yield i
    return [i async for i in numbers()]

async def cancels_itself() -> None:
    asyncio.current_task().cancel()
    await asyncio.sleep(1)
"""
)


@pytest.fixture(scope="module", params=["plain", "loop"])
def either(request: pytest.FixtureRequest) -> Iterator[Driver]:
    """The same plain functions with and without an event loop as the hub's way to wait."""
    with Driver(PLAIN if request.param == "plain" else ASYNC) as driver:
        yield driver


@pytest.fixture(scope="module")
def looped() -> Iterator[Driver]:
    with Driver(ASYNC) as driver:
        yield driver


def test_arguments_in_result_out(either: Driver) -> None:
    assert either.value("add", 1, 2) == 3
    assert either.value("add", raw=b'{"a": 1}') == 11
    assert either.value("add", raw=b'{"a": "4", "b": "5"}', strings=True) == 9
    end = either.run("add", 1, 2)
    assert isinstance(end, CallCompleted)
    assert (end.payload.task_id, end.payload.attempt_seq, end.payload.notes) == ("task-1", 1, [])
    assert end.payload.timing is not None


def test_misfit_is_schema_and_not_run(either: Driver) -> None:
    failed = either.failure("add", "x").payload
    assert (failed.error_kind, failed.outcome, failed.retryable) == ("schema", Outcome.NOT_RUN, False)
    assert failed.details["pointer"] == "/0"
    assert failed.error_stack == ""


@pytest.mark.requirement("X94")
def test_a_batch_is_answered_call_by_call(either: Driver) -> None:
    first = either.make_call("add", 0)
    shared = first.payload
    calls = [
        BatchedCall(either.make_call("add").call_id, 3, msgspec.Raw(b"[%d]" % i if i != 2 else b'["x"]'))
        for i in range(5)
    ]
    either.send(
        ExecuteCalls(
            ExecuteCallsPayload(
                shared.task_id,
                shared.function_id,
                shared.function_code_digest,
                calls,
                entry_selector=shared.entry_selector,
                promises=Promises(idempotent=True),
            )
        )
    )
    ends = [either.wait_end(call.call_id) for call in calls]
    assert [output_of(end) for i, end in enumerate(ends) if i != 2] == [10, 11, 13, 14]
    assert isinstance(ends[2], CallFailed)
    assert {end.payload.attempt_seq for end in ends} == {3}
    assert sum(either.settled_frames) == 4


@pytest.mark.requirement("X94")
@pytest.mark.requirement("X62")
def test_ends_of_a_batch_leave_together_unless_they_carry_no_promise(either: Driver) -> None:
    first = either.make_call("add", 0).payload
    for promises, expected in ((Promises(idempotent=True), 3), (Promises(), 0)):
        calls = [BatchedCall(either.make_call("add").call_id, 1, msgspec.Raw(b"[1]")) for _ in range(3)]
        payload = ExecuteCallsPayload(
            first.task_id,
            first.function_id,
            first.function_code_digest,
            calls,
            entry_selector=first.entry_selector,
            promises=promises,
        )
        either.settled_frames.clear()
        either.send(ExecuteCalls(payload))
        assert [output_of(either.wait_end(call.call_id)) for call in calls] == [11] * 3
        assert sum(either.settled_frames) == expected


@pytest.mark.requirement("X52")
def test_128_calls_wait_in_one_process_at_once() -> None:
    with Driver(PLAIN) as driver:
        calls = [driver.start("nap", 1) for _ in range(128)]
        for call in calls:
            assert output_of(driver.wait_end(call)) == 1
        assert driver.value("most_alive") == 128


@pytest.mark.requirement("X52")
def test_128_async_calls_wait_in_one_process_at_once(looped: Driver) -> None:
    calls = [looped.start(name, 1) for _ in range(64) for name in ("nap", "a_nap")]
    ends = [looped.wait_end(call) for call in calls]
    assert [output_of(end) for end in ends] == [1] * 128
    # Slept side by side: had they slept one after another, the last would have waited for two minutes.
    assert max(end.payload.timing.queued_ms for end in ends if end.payload.timing) < 30_000


def test_one_call_too_many_is_handed_back() -> None:
    with Driver(PLAIN) as driver:
        calls = [driver.start("nap", 0.1) for _ in range(129)]  # the code is not there yet, so all are held
        end = driver.wait_end(calls[-1])
        assert isinstance(end, CallFailed)
        assert (end.payload.error_kind, end.payload.outcome) == ("recalled", Outcome.NOT_RUN)
        assert output_of(driver.wait_end(calls[0])) == 0.1


def test_a_stream_of_short_calls_starves_nobody(either: Driver) -> None:
    """A sleeper wakes, and a bundle is described, though the next call is always there already."""
    sleeper = either.start("nap", 0.05)
    either.send(Describe(RequestId("r-1"), DescribePayload(Digest("d" * 64), str(either.bundle), "functions")))
    stream = [either.start("spin", 0.002) for _ in range(60)]
    for oldest in stream:
        either.wait_end(oldest)
        if sleeper in either.ends and either.others:
            break
        assert len(stream) < 5_000, "starved"
        stream.append(either.start("spin", 0.002))
    either.wait_other(Described)
    for call in stream:
        either.wait_end(call)


def test_each_call_has_its_own_context_variables(either: Driver) -> None:
    calls = {name: either.start("order", name) for name in "abc"}
    for name, call in calls.items():
        assert output_of(either.wait_end(call)) == ["unset", name]


def test_context_variables_set_at_import_are_seen(either: Driver) -> None:
    assert either.value("precision") == 50


def test_a_call_knows_itself(either: Driver) -> None:
    known = CallContext(
        tags={"a": "b"}, owner="o", tenant=Tenant("t"), idempotency_key="k", attempt=3, deadline_remaining_ms=60_000
    )
    told = either.value("info", context=known, call_id="task-1-self")
    left = told.pop("left")
    assert told == {
        "call_id": "task-1-self",
        "attempt": 3,
        "owner": "o",
        "tenant": "t",
        "tags": {"a": "b"},
        "key": "k",
    }
    assert 0 <= left <= 60_000


def test_sleep_refuses_what_is_no_duration(either: Driver) -> None:
    assert "ValueError: sleep length" in either.failure("negative").payload.error_message


def test_sleep_in_a_thread_of_the_users_sleeps_there(either: Driver) -> None:
    # Threads that user code starts inherit no context variables.
    assert either.value("nap_in_thread") == ""


def test_sleep_in_a_greenlet_of_the_users_own(either: Driver) -> None:
    assert either.value("nested_greenlet") == [0, 1, 2]


@pytest.mark.requirement("X52")
def test_async_def_awaits_and_sleeps(looped: Driver) -> None:
    assert looped.value("a_add", 1, 2) == 3
    assert looped.value("a_nap", 0.05) == 0.05
    assert looped.value("generators") == [0, 1, 2]


@pytest.mark.requirement("X52")
def test_task_group_timeout_and_current_task_work_as_usual(looped: Driver) -> None:
    told = looped.value("family", call_id="task-1-family")
    assert told["results"] == [0, 1, 2, 3, 4, 5]
    assert told["names"] == [[i, "task-1-family", True] for i in range(6)]
    assert told["variable"] == "unset"  # a child's context is a copy
    assert looped.value("overtime") == "timed out"
    assert looped.value("waited") == "timed out"


@pytest.mark.requirement("X52")
def test_running_call_is_known_in_threads_and_callbacks(looped: Driver) -> None:
    assert looped.value("in_thread", call_id="task-1-thread") == ["task-1-thread"] * 2
    assert looped.value("callback", call_id="task-1-callback") == "task-1-callback"
    assert "asyncio.sleep()" in looped.value("sleeping_callback")
    assert looped.is_draining() == ""


@pytest.mark.requirement("X52")
def test_child_tasks_left_are_cancelled_and_noted(looped: Driver) -> None:
    end = looped.run("left")
    assert output_of(end) == 1
    assert ["the forgotten one" in note for note in end.payload.notes] == [True]


@pytest.mark.requirement("X52")
@pytest.mark.requirement("X57")
def test_nothing_in_a_task_ends_the_loop(looped: Driver) -> None:
    assert looped.value("child_that_exits") == "child exited 4"
    assert looped.value("stops_the_loop") == 1
    failed = looped.failure("cancels_itself").payload
    assert (failed.error_kind, failed.error_message) == ("internal", "CancelledError")
    assert looped.value("a_add", 1, 2) == 3


@pytest.mark.requirement("X52")
def test_asyncio_run_works_inside_a_def(looped: Driver) -> None:
    assert looped.value("sees_no_loop") is True
    # Several at once, each suspended inside its own loop.
    calls = [looped.start("run_inside", 0.1) for _ in range(5)]
    assert [output_of(looped.wait_end(call)) for call in calls] == calls


@pytest.mark.requirement("X52")
def test_asyncio_run_works_inside_a_def_without_a_loop_of_ours() -> None:
    with Driver(NESTED) as driver:
        calls = [driver.start("run_inside", 0.1) for _ in range(5)]
        assert [output_of(driver.wait_end(call)) for call in calls] == calls


@pytest.mark.requirement("X52")
def test_plain_and_async_calls_share_the_process(looped: Driver) -> None:
    calls = [
        looped.start("a_add", i, 1) if i % 2 else looped.start("run_inside", 0.01) if i % 4 else looped.start("add", i)
        for i in range(60)
    ]
    for i, call in enumerate(calls):
        assert output_of(looped.wait_end(call)) == (i + 1 if i % 2 else call if i % 4 else i + 10)


def test_polling_ends_with_the_calls(either: Driver) -> None:
    """Calls that follow each other closely are polled for; an executor that waits for long uses no CPU."""

    def cpu_ms() -> int:
        last = either.heartbeats[-1].payload
        return last.cpu_user_ms + last.cpu_system_ms

    for i in range(50):
        assert either.value("add", i) == 10 + i
    seen = len(either.heartbeats)
    either.wait_until(lambda: len(either.heartbeats) > seen, "a heartbeat")
    before = cpu_ms()
    either.wait_until(lambda: len(either.heartbeats) > seen + 3, "three more heartbeats")
    assert cpu_ms() - before < 300  # of 1,500 or more that passed


@pytest.mark.requirement("X78")
def test_a_call_that_is_read_after_its_slice_began_has_queued_for_no_time() -> None:
    """The link is read between two calls; one that follows a call that cannot begin is no older than that look."""
    with Driver(PLAIN, mark_slots=8) as driver:
        assert driver.value("add", 1) == 11
        first, unknown = driver.make_call("spin", 0.5), driver.make_call("nothing")
        driver.send(first, unknown)
        driver.wait_until(lambda: first.payload.call_number in driver.marks(), "mark")
        last = driver.make_call("spin", 0.05)
        driver.send(last)
        end = driver.wait_end(last.call_id)  # a negative number would be no message
        assert output_of(end) == 0.05
        assert isinstance(driver.wait_end(unknown.call_id), CallFailed)
