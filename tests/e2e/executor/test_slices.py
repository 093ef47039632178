"""Time slices: a call of a function with `preempt` gives way to others after 20 ms of running (X61)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from callyard.wire.messages import CallFailed, ExecuteCall
from tests.e2e.executor.driver import Driver, output_of

pytestmark = pytest.mark.requirement("X61")

PLAIN = """
import asyncio, random, time
from callyard import function, sleep

def spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass

@function
def quick() -> str:
    return "quick"

@function(pure=True)
def keeps_on(seconds: float) -> str:
    spin(seconds)
    return "done"

@function(preempt=True)
def gives_way(seconds: float) -> str:
    spin(seconds)
    return "done"

@function(preempt=True)
def begins(file: str, seconds: float) -> str:
    open(file, "w").close()
    spin(seconds)
    return "done"

@function(preempt=True)
def total(count: int) -> int:
    return sum(number * (number % 7) for number in range(count))

@function(preempt=True)
def sorts(count: int) -> bool:
    def key(number):
        return -number
    return sorted(range(count), key=key) == list(range(count))[::-1]

@function(preempt=True)
def for_ever() -> None:
    while True:
        pass

@function(preempt=True)
def draw(seed: int) -> float:
    random.seed(seed)
    spin(0.3)
    return random.random()

@function
def draw_whole(seed: int) -> float:
    random.seed(seed)
    spin(0.3)
    return random.random()

@function(preempt=True)
def imports() -> int:
    import slow
    return slow.LATE

@function(preempt=True)
def nested(seconds: float) -> str:
    async def work() -> str:
        await asyncio.sleep(0)
        spin(seconds)
        await asyncio.sleep(0)
        return "nested"
    return asyncio.run(work())

class Closing:
    def __del__(self) -> None:
        spin(0.2)

@function(preempt=True)
def drops(order: list) -> str:
    Closing()
    return "dropped"
"""
WITH_ASYNC = (
    PLAIN
    + """
@function(preempt=True)
async def agives_way(seconds: float) -> str:
    await asyncio.sleep(0)
    spin(seconds)
    await asyncio.sleep(0)
    return "done"

@function
async def aquick() -> str:
    await asyncio.sleep(0)
    return "quick"

@function(preempt=True)
async def with_child() -> list:
    seen = []
    async def child() -> None:
        for _ in range(3):
            seen.append("child")
            await asyncio.sleep(0)
    task = asyncio.create_task(child())
    spin(0.3)
    seen.append("parent")
    await task
    return seen
"""
)
SLOW = """
import time
end = time.monotonic() + 0.3
while time.monotonic() < end:
    pass
LATE = 7
"""


@pytest.fixture(params=["blocking hub", "event loop"])
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    """Both ways of waiting have the same slices."""
    with Driver(PLAIN if request.param == "blocking hub" else WITH_ASYNC) as driver:
        (driver.bundle / "slow.py").write_text(SLOW, encoding="utf-8")
        yield driver


def order_of(driver: Driver, *calls: ExecuteCall) -> list[str]:
    """The functions in the order in which their calls ended; sent at once."""
    names = {call.call_id: str(call.payload.function_id) for call in calls}
    driver.send(*calls)
    for call in calls:
        driver.wait_end(call.call_id)
    return [names[call_id] for call_id in driver.ends if call_id in names]


def test_a_call_that_has_run_for_a_slice_goes_behind_the_others(driver: Driver) -> None:
    ends = order_of(driver, driver.make_call("gives_way", 0.5), driver.make_call("quick"), driver.make_call("quick"))
    assert ends == ["quick", "quick", "gives_way"]


def test_without_the_promise_it_goes_on_to_its_end(driver: Driver) -> None:
    """`pure` does not imply it."""
    assert order_of(driver, driver.make_call("keeps_on", 0.2), driver.make_call("quick")) == ["keeps_on", "quick"]


def test_a_call_that_comes_while_it_runs_is_others_too(driver: Driver) -> None:
    long = driver.make_call("begins", str(driver.folder / "begun"), 2.0)
    driver.send(long)
    driver.wait_file(driver.folder / "begun")
    short = driver.make_call("quick")
    driver.send(short)
    assert output_of(driver.wait_end(short.call_id)) == "quick"
    assert long.call_id not in driver.ends
    assert output_of(driver.wait_end(long.call_id)) == "done"


def test_interleaved_calls_come_to_the_right_ends(driver: Driver) -> None:
    calls = [driver.make_call("total", 800_000) for _ in range(3)] + [driver.make_call("sorts", 200_000)]
    driver.send(*calls)
    right = sum(number * (number % 7) for number in range(800_000))
    assert [output_of(driver.wait_end(call.call_id)) for call in calls] == [right, right, right, True]


def test_a_seeded_global_generator_is_shared_by_calls_that_interleave(driver: Driver) -> None:
    """The wrong answer that the promise makes possible: equal seeds, different draws."""
    for name, is_same in (("draw", False), ("draw_whole", True)):
        calls = [driver.make_call(name, 7) for _ in range(2)]
        driver.send(*calls)
        first, second = (output_of(driver.wait_end(call.call_id)) for call in calls)
        assert (first == second) is is_same, name


def test_never_inside_an_import(driver: Driver) -> None:
    """Else the second one would find a module without its last line."""
    calls = [driver.make_call("imports") for _ in range(2)]
    driver.send(*calls)
    assert [output_of(driver.wait_end(call.call_id)) for call in calls] == [7, 7]


def test_never_in_a_finalizer(driver: Driver) -> None:
    assert order_of(driver, driver.make_call("drops", []), driver.make_call("quick")) == ["drops", "quick"]


def test_budgets_hold_for_each(driver: Driver) -> None:
    calls = [driver.make_call("for_ever", budget_ms=200) for _ in range(2)]
    driver.send(*calls)
    for call in calls:
        end = driver.wait_end(call.call_id)
        assert isinstance(end, CallFailed)
        assert end.payload.error_kind == "timeout"
        assert 200 <= end.payload.budget_used_ms < 2_000


def test_a_call_that_waits_for_its_turn_is_cancelled(driver: Driver) -> None:
    files = [driver.folder / "first", driver.folder / "second"]
    calls = [driver.make_call("begins", str(file), 600) for file in files]
    driver.send(*calls)
    for file in files:
        driver.wait_file(file)
    for call in calls:
        driver.cancel(call.call_id)
    for call in calls:
        end = driver.wait_end(call.call_id)
        assert isinstance(end, CallFailed)
        assert end.payload.error_kind == "cancelled"


def test_a_loop_of_its_own_is_set_aside(driver: Driver) -> None:
    calls = [driver.make_call("nested", 0.1) for _ in range(2)]
    driver.send(*calls)
    assert [output_of(driver.wait_end(call.call_id)) for call in calls] == ["nested", "nested"]


def test_async_calls_give_way_too() -> None:
    with Driver(WITH_ASYNC) as driver:
        ends = order_of(driver, driver.make_call("agives_way", 0.5), driver.make_call("aquick"))
        assert ends == ["aquick", "agives_way"]
        child = driver.make_call("with_child")
        driver.send(child)
        assert output_of(driver.wait_end(child.call_id))[:2] == ["child", "child"]
