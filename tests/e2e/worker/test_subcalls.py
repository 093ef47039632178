"""Calls inside calls, with real executors."""

from __future__ import annotations

import importlib.util
import io
import os
import signal
from pathlib import Path

import pytest

from callyard.errors import CallError, ErrorKind, Outcome
from callyard.worker.builders import IterableSource, JsonlSource
from callyard.worker.outputs import MemoryOutput
from callyard.worker.results import CallEvent, printed_of
from callyard.worker.worker import Worker

FUNCTIONS = '''
import os
import sys
import time
from pathlib import Path

from typing_extensions import TypedDict

from callyard import CallError, ToolError, TransientError
from callyard import acall, acall_many, call, call_many, function, log, progress, sleep


@function
def chain(depth: int) -> int:
    return 1 + call(chain, depth=depth - 1) if depth else 0


@function
async def achain(depth: int) -> int:
    return 1 + await acall(achain, depth=depth - 1) if depth else 0


@function(pure=True)
def counted(path: str, n: int) -> int:
    with open(path, "a") as file:
        file.write(f"{n}\\n")
    return n * n


@function(pure=True)
def sum_of_squares(path: str, numbers: list[int]) -> int:
    return sum(call_many(counted, [{"path": path, "n": n} for n in numbers]))


@function
def fails(text: str) -> None:
    raise ValueError(text)


@function
def tells_how_it_failed() -> list[str]:
    try:
        call(fails, "as planned")
    except Exception as error:
        return [type(error).__name__, str(error)]
    return []


@function(idempotent=True)
def charges(path: str) -> None:
    call(charge, path=path)
    os.kill(os.getpid(), 9)


@function
def charge(path: str) -> None:
    with open(path, "a") as file:
        file.write("charged\\n")


@function(pure=True)
def a(n: int) -> int:
    return call(b, n=n)


@function(pure=True)
def b(n: int) -> int:
    return call(a, n=n)


@function(pure=True)
def not_so_pure(path: str) -> None:
    call(charge, path=path)


@function
def spreads(n: int) -> list[int]:
    """This process, and those of its subcalls."""
    return [os.getpid(), *sorted(set(call_many(where, [{"n": i} for i in range(n)], spread=True)))]


@function
def spreads_naps(n: int) -> list[float]:
    return call_many(naps, [[60.0]] * n, spread=True)


@function
def where(n: int) -> int:
    sleep(0.2)
    return os.getpid()


class Order(TypedDict):
    item: str
    count: int


@function
def weigh(order: Order) -> int:
    return 10 * order["count"]


@function
def ship(order: Order) -> int:
    return call(weigh, order=order) + call("weigh", {"order": order})


@function
def tells(n: int) -> int:
    for i in range(n):
        progress(i + 1, n)
    print("printed")
    log("logged", answer=42)
    return n


@function
def raises(how: str) -> None:
    if how == "transient":
        raise TransientError("later")
    if how == "tool":
        raise ToolError("never")
    if how == "exit":
        sys.exit(7)
    if how == "memory":
        raise MemoryError
    raise ValueError("odd")


@function
def hands_on(how: str) -> None:
    call(raises, how)


@function(idempotent=True)
def hands_on_further(how: str) -> None:
    call(hands_on, how)


@function
def sees(how: str) -> list[dict[str, object]]:
    """What an exception looks like to those that call."""
    seen: list[dict[str, object]] = []
    for called in (raises, hands_on, hands_on_further):
        try:
            call(called, how)
        except CallError as error:
            one = error.failure
            seen.append(
                {
                    "kind": one.kind,
                    "message": one.message,
                    "retryable": one.retryable,
                    "attempts": one.attempts,
                    "outcome": one.outcome,
                    "path": one.details.get("path"),
                }
            )
    return seen


@function(idempotent=True, budget_ms=300)
def overrun() -> None:
    call(busy_again)


@function(idempotent=True)
def busy_again() -> None:
    busy()


@function
def naps(seconds: float) -> float:
    sleep(seconds)
    return seconds


@function(budget_ms=2_000)
def parent_of_busy() -> None:
    call(busy)


@function
def busy() -> None:
    while True:
        pass
'''


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    return file


@pytest.mark.requirement("X26")
@pytest.mark.requirement("X80")
@pytest.mark.parametrize("max_inflight", [1, 128])
@pytest.mark.parametrize("function", ["chain", "achain"])
async def test_nested_calls_never_wait_for_a_place(path: Path, max_inflight: int, function: str) -> None:
    """The deadlock of process pools: each place is taken by a call that waits for another one."""
    async with Worker(path, executors=1, executor_max_inflight=max_inflight) as worker:
        results = [result async for result in worker.map(function, [{"depth": 8}] * 128)]
    assert [result.unwrap() for result in results] == [8] * 128


@pytest.mark.requirement("X25")
async def test_too_deep_is_refused_with_the_setting_s_name(path: Path) -> None:
    async with Worker(path, executors=1) as worker:
        with pytest.raises(CallError, match="max_subcall_depth") as caught:
            await worker.call("chain", {"depth": 9})
    assert caught.value.failure.attempts == 1


@pytest.mark.requirement("X15")
@pytest.mark.requirement("X16")
async def test_equal_pure_subcalls_of_a_whole_list_run_once(path: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    rows = [{"path": str(ran), "numbers": [1, 2, 3, i % 4]} for i in range(200)]
    async with Worker(path, executors=2) as worker:
        results = [result.unwrap() async for result in worker.map("sum_of_squares", rows)]
    assert results == [14 + (i % 4) ** 2 for i in range(200)]
    assert sorted(ran.read_text().split()) == ["0", "1", "2", "3"]


@pytest.mark.requirement("X28")
async def test_a_row_s_function_may_call_one_that_would_take_a_row(path: Path) -> None:
    """An object is a whole row for the call of a list alone; a subcall's arguments are by name."""
    async with Worker(path, executors=1) as worker:
        results = [result.unwrap() async for result in worker.map("ship", [{"item": "tea", "count": 2}])]
    assert results == [40]


@pytest.mark.requirement("X28")
async def test_a_subcall_s_failure_is_raised_in_its_parent(path: Path) -> None:
    async with Worker(path, executors=1) as worker:
        name, text = await worker.call("tells_how_it_failed")
    assert name == "CallError"
    assert "as planned" in text


@pytest.mark.requirement("X28")
@pytest.mark.parametrize("how", ["odd", "transient", "tool", "exit", "memory"])
async def test_a_failure_looks_the_same_in_an_executor_and_outside(path: Path, how: str) -> None:
    """A test of the user's, in plain Python, sees what a call sees."""
    spec = importlib.util.spec_from_file_location("functions_of_a_user", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    async with Worker(path, executors=1) as worker:
        inside = await worker.call("sees", {"how": how})
    assert inside == module.sees(how)
    assert [one["path"] for one in inside] == [
        None,
        ["hands_on", "raises"],
        ["hands_on_further", "hands_on", "raises"],
    ]


@pytest.mark.requirement("X28")
async def test_a_failure_that_is_handed_on_says_its_reason_first(path: Path) -> None:
    async with Worker(path, executors=1) as worker:
        with pytest.raises(CallError) as caught:
            await worker.call("hands_on_further", {"how": "odd"})
    failure = caught.value.failure
    assert failure.message == "ValueError: odd (in hands_on_further → hands_on → raises)"
    assert failure.details["cause"] == {
        "kind": "internal",
        "message": "ValueError: odd",
        "details": {"function": "raises"},
    }
    assert 'raise ValueError("odd")' in failure.stack


@pytest.mark.requirement("X64")
async def test_a_parent_that_charged_is_not_run_again(path: Path, tmp_path: Path) -> None:
    charged = tmp_path / "charged"
    async with Worker(path, executors=1) as worker:
        with pytest.raises(CallError) as caught:
            await worker.call("charges", {"path": str(charged)})
    failure = caught.value.failure
    assert (failure.kind, failure.outcome, failure.attempts) == (ErrorKind.CRASHED, Outcome.UNKNOWN, 1)
    assert charged.read_text() == "charged\n"


@pytest.mark.requirement("X64")
async def test_a_pure_function_may_call_only_pure_ones(path: Path, tmp_path: Path) -> None:
    charged = tmp_path / "charged"
    async with Worker(path, executors=1) as worker:
        with pytest.raises(CallError, match="pure"):
            await worker.call("not_so_pure", {"path": str(charged)})
    assert not charged.exists()


@pytest.mark.requirement("X67")
@pytest.mark.requirement("X25")
async def test_a_ring_of_waiters_ends_with_the_cycle_s_error(path: Path) -> None:
    async with Worker(path, executors=2) as worker:
        for _ in range(5):
            sink = MemoryOutput()
            lines = io.BytesIO(b'{"function":"a","args":{"n":1}}\n{"function":"b","args":{"n":1}}\n')
            await worker.run(None, JsonlSource("-", named=True, stream=lines), sink)
            assert ["waits for itself" in str(result.failure) for result in sink.results] == [True, True]


@pytest.mark.requirement("X30")
async def test_spread_subcalls_use_the_other_executors(path: Path) -> None:
    async with Worker(path, executors=3) as worker:
        parent, *children = await worker.call("spreads", {"n": 16})
    assert len(children) == 2
    assert parent not in children


@pytest.mark.requirement("X27")
@pytest.mark.requirement("X85")
async def test_a_subcall_runs_on_its_parent_s_budget(path: Path) -> None:
    async with Worker(path, executors=1) as worker:
        with pytest.raises(CallError, match="budget"):
            await worker.call("parent_of_busy")


@pytest.mark.requirement("X27")
async def test_an_overrun_below_an_idempotent_parent_stays_one(path: Path) -> None:
    """Once it was `transient`, or `timeout`, as one millisecond had it."""
    async with Worker(path, executors=1, after_interrupt="keep") as worker:
        with pytest.raises(CallError) as caught:
            await worker.call("overrun", max_attempts=1)
        assert caught.value.kind is ErrorKind.TIMEOUT
        assert caught.value.failure.details["limit"] == "budget_ms"


@pytest.mark.requirement("X58")
async def test_capture_gives_each_result_what_its_call_printed(path: Path) -> None:
    sink = MemoryOutput()
    expected = ["printed\nlogged\n".replace("logged", "info: logged answer=42")] * 2
    async with Worker(path, executors=1, on_output=lambda *_: None) as worker:
        mapped = [result async for result in worker.map("tells", [[1], [2]], capture=True)]
        one = await worker.call_result("tells", [1], capture=True)
        await worker.run("tells", IterableSource([[1], [2]]), sink, capture=True)
        without = [result async for result in worker.map("tells", [[1]])]
    assert [result.printed and result.printed.text for result in mapped] == expected
    assert one.printed is not None
    assert one.printed.text == expected[0]
    ran = [printed_of(result) for result in sink.results]
    assert [printed and printed.text for printed in ran] == expected
    assert without[0].printed is None


@pytest.mark.requirement("X58")
@pytest.mark.requirement("X59")
async def test_progress_log_and_output_arrive_while_a_call_runs(path: Path) -> None:
    seen: list[CallEvent] = []
    async with Worker(path, executors=1, on_output=lambda *_: None) as worker:
        assert [result.unwrap() async for result in worker.map("tells", [[3]], on_event=seen.append)] == [3]
    kinds = {event.kind.value for event in seen}
    assert kinds == {"progress", "log", "output"}
    assert [event.value for event in seen if event.kind == "progress"][-1] == {"done": 3, "total": 3}
    assert [(event.text, event.value) for event in seen if event.kind == "log"] == [("logged", {"answer": 42})]
    assert "".join(event.text for event in seen if event.kind == "output") == "printed\n"


@pytest.mark.requirement("X29")
async def test_a_parent_s_end_takes_its_subcalls_along(path: Path) -> None:
    async with Worker(path, executors=2) as worker:
        with pytest.raises(CallError, match="deadline"):
            await worker.call("spreads_naps", {"n": 1_000}, deadline_ms=300)
        assert await worker.call("chain", {"depth": 3}) == 3
        worker._running().check_invariants()
        assert worker.statistics().calls == 0


async def test_a_thousand_plain_functions_wait_side_by_side(path: Path) -> None:
    async with Worker(path, executors=2, executor_max_inflight=512) as worker:
        results = [result.unwrap() async for result in worker.map("naps", [[0.05]] * 1_000)]
    assert results == [0.05] * 1_000


@pytest.mark.requirement("X29")
async def test_a_lost_executor_ends_the_subcalls_below_its_calls(path: Path) -> None:
    async with Worker(path, executors=2) as worker:
        pids = await worker.call("spreads", {"n": 8})
        os.kill(pids[0], signal.SIGKILL)
        assert await worker.call("chain", {"depth": 2}) == 2
