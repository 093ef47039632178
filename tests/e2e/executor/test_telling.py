"""What a call tells while it runs: progress, log, what it prints (X58, X59, X79)."""

from __future__ import annotations

import msgspec
import pytest

from callyard.wire.messages import CallEvent
from tests.e2e.executor.driver import output_of
from tests.e2e.executor.family import FamilyDriver

SOURCE = '''
import contextvars, logging, os, sys, threading, time
from callyard import call, function, log, progress, sleep

def prints(text: str, times: int = 1) -> int:
    for _ in range(times):
        print(text)
    return times

def both(path: str) -> None:
    print("out", end="")
    print("err", file=sys.stderr)
    sys.stdout.write("more ")
    sys.stdout.writelines(["and ", "more"])

def prints_until(path: str, text: str) -> str:
    """In a tight loop that never suspends."""
    while not os.path.exists(path):
        print(text)
        time.sleep(0.001)
    return "seen"

def prints_then_waits(path: str) -> str:
    print("here I am")
    while not os.path.exists(path):
        pass
    return "seen"

def prints_then_sleeps(path: str) -> str:
    print("here I am")
    while not os.path.exists(path):
        sleep(0.5)
    return "seen"

def counts(path: str) -> int:
    n = 0
    while not os.path.exists(path):
        n += 1
        progress(n, 10 ** 9, "counting")
    return n

def counts_fast(n: int) -> int:
    for i in range(n):
        progress(i + 1)
    return n

def logs() -> None:
    log("plain")
    log("with fields", "warning", row=7, what=object())
    logging.getLogger("mine").warning("by %s", "logging")
    try:
        1 / 0
    except ZeroDivisionError:
        logging.getLogger("mine").exception("failed")
    logging.getLogger("mine").warning("bad %d", "argument")

def surrogates() -> None:
    log("a \\udc80 b", why="\\udc81")
    sys.stdout.reconfigure(errors="replace")
    print("x \\udc80 y")

def fails_after_printing() -> None:
    print("last words")
    raise ValueError("dead")

def prints_and_sleeps(name: str) -> None:
    for i in range(3):
        print(name, i)
        sleep(0.01)

def floods(lines: int) -> str:
    for i in range(lines):
        print(f"{i:07}")
    return "done"

def floods_log(lines: int) -> str:
    for i in range(lines):
        log(str(i))
    return "done"

def forks() -> int:
    print("parent")
    pid = os.fork()
    if pid == 0:
        for _ in range(100):
            print("child")
            progress(1)
            time.sleep(0.001)
        os._exit(0)
    return os.waitpid(pid, 0)[1]

def wrong(which: str) -> str:
    try:
        {"level": lambda: log("x", "loud"), "done": lambda: progress(-1), "nan": lambda: progress(float("nan")),
         "total": lambda: progress(1, float("inf"))}[which]()
    except ValueError as error:
        return str(error)
    return ""

def prints_forever() -> None:
    while True:
        print("again")
'''
ASYNC = (
    SOURCE
    + """
import asyncio

async def from_tasks_and_threads() -> None:
    async def child():
        await asyncio.sleep(0)
        print("from a task")
    await asyncio.gather(child(), asyncio.to_thread(print, "from a thread"))
"""
)


@pytest.fixture(params=[SOURCE, ASYNC], ids=["hub waits", "loop waits"])
def source(request: pytest.FixtureRequest) -> str:
    assert isinstance(request.param, str)
    return request.param


def texts(events: list[CallEvent]) -> list[tuple[str, str]]:
    return [(one.payload.level, one.payload.text) for one in events]


@pytest.mark.requirement("X58")
def test_what_is_printed_is_told_on_request_and_goes_where_it_goes(source: str) -> None:
    with FamilyDriver(source) as driver:
        driver.value("prints", "unheard")
        assert driver.events == []
        call_id = driver.start("prints", "héard", 2, events=True)
        driver.wait_end(call_id)
        assert texts(driver.told(call_id)) == [("stdout", "héard\nhéard\n")]
        call_id = driver.start("both", "", events=True)
        driver.wait_end(call_id)
        assert texts(driver.told(call_id)) == [
            ("stdout", "out"),
            ("stderr", "err\n"),
            ("stdout", "more and more"),
        ]
        payload = driver.told(call_id)[0].payload
        assert (payload.event_kind, payload.task_id, payload.attempt_seq, payload.cut_count) == (
            "output",
            "task-1",
            1,
            0,
        )
        assert driver.read_stdout() == "unheard\nhéard\nhéard\noutmore and more"
        assert driver.read_stderr() == "err\n"


@pytest.mark.requirement("X58")
def test_each_call_is_told_what_is_its_own(source: str) -> None:
    with FamilyDriver(source) as driver:
        calls = {name: driver.start("prints_and_sleeps", name, events=True) for name in "abc"}
        for name, call_id in calls.items():
            driver.wait_end(call_id)
            told = "".join(one.payload.text for one in driver.told(call_id))
            assert told == f"{name} 0\n{name} 1\n{name} 2\n"


@pytest.mark.requirement("X52", "X58")
def test_child_tasks_and_to_thread_belong_to_their_call() -> None:
    with FamilyDriver(ASYNC) as driver:
        call_id = driver.start("from_tasks_and_threads", events=True)
        driver.wait_end(call_id)
        told = "".join(text for _, text in texts(driver.told(call_id)))
        assert "from a task" in told
        assert "from a thread" in told


@pytest.mark.requirement("X58")
def test_a_failure_comes_after_the_last_words(source: str) -> None:
    with FamilyDriver(source) as driver:
        call_id = driver.start("fails_after_printing", events=True)
        driver.wait_end(call_id)  # the driver refuses what comes after it
        assert texts(driver.told(call_id)) == [("stdout", "last words\n")]


@pytest.mark.requirement("X58", "X59")
@pytest.mark.parametrize("function", ["prints_then_waits", "prints_then_sleeps"])
def test_output_arrives_while_the_call_runs(source: str, function: str) -> None:
    """Held back for a moment, it leaves though the call tells nothing more: running or waiting."""
    with FamilyDriver(source) as driver:
        stop = driver.folder / "stop"
        call_id = driver.start(function, str(stop), events=True)
        driver.wait_until(lambda: driver.told(call_id), "the output")
        assert call_id not in driver.ends
        stop.touch()
        assert output_of(driver.wait_end(call_id)) == "seen"
        assert texts(driver.told(call_id)) == [("stdout", "here I am\n")]


@pytest.mark.requirement("X59", "X79")
def test_progress_from_a_tight_loop(source: str) -> None:
    with FamilyDriver(source) as driver:
        stop = driver.folder / "stop"
        call_id = driver.start("counts", str(stop), events=True)
        driver.wait_until(lambda: len(driver.told(call_id, "progress")) >= 3, "progress while it runs")
        assert call_id not in driver.ends
        stop.touch()
        count = output_of(driver.wait_end(call_id))
        values = [msgspec.json.decode(one.payload.value) for one in driver.told(call_id, "progress")]
        assert values[-1] == {"done": count, "total": 10**9, "message": "counting"}
        assert [value["done"] for value in values] == sorted({value["done"] for value in values})
        assert len(values) < count


@pytest.mark.requirement("X79")
def test_only_the_latest_progress_is_told(source: str) -> None:
    with FamilyDriver(source) as driver:
        call_id = driver.start("counts_fast", 100_000, events=True)
        end = driver.wait_end(call_id)
        values = [msgspec.json.decode(one.payload.value) for one in driver.told(call_id)]
        assert values[-1] == {"done": 100_000}
        assert len(values) <= 2 + end.payload.budget_used_ms // 50  # at most 20 a second
        assert driver.value("counts_fast", 10) == 10  # nobody listens


@pytest.mark.requirement("X59")
def test_log_and_logging(source: str) -> None:
    with FamilyDriver(source) as driver:
        call_id = driver.start("logs", events=True)
        driver.wait_end(call_id)
        told = driver.told(call_id)
        printed = "".join(one.payload.text for one in told if one.payload.event_kind == "output")
        assert printed.startswith("--- Logging error ---"), "and nothing that handlers wrote of the records"
        told = [one for one in told if one.payload.event_kind == "log"]
        assert texts(told)[:3] == [("info", "plain"), ("warning", "with fields"), ("warning", "by logging")]
        assert msgspec.json.decode(told[0].payload.value) is None
        fields = msgspec.json.decode(told[1].payload.value)
        assert fields["row"] == 7
        assert fields["what"].startswith("<object object")
        assert msgspec.json.decode(told[2].payload.value) == {"logger": "mine"}
        assert told[3].payload.level == "error"
        assert told[3].payload.text.startswith("failed\nTraceback")
        assert told[4].payload.text == "<formatting the message raised TypeError>"
        assert driver.read_stderr() == printed


@pytest.mark.requirement("X59")
def test_a_log_that_nobody_listens_to_goes_to_stderr(source: str) -> None:
    with FamilyDriver(source) as driver:
        driver.value("logs")
        assert driver.events == []
        assert driver.read_stderr().startswith('info: plain\nwarning: with fields {"row":7,"what":"<object object')


def test_text_that_is_no_unicode_is_told_all_the_same(source: str) -> None:
    with FamilyDriver(source) as driver:
        call_id = driver.start("surrogates", events=True)
        driver.wait_end(call_id)
        assert texts(driver.told(call_id)) == [("info", "a \\udc80 b"), ("stdout", "x \\udc80 y\n")]
        assert msgspec.json.decode(driver.told(call_id)[0].payload.value) == {"why": "\\udc81"}


@pytest.mark.requirement("X58", "X79")
def test_a_flood_is_cut_in_the_middle(source: str) -> None:
    with FamilyDriver(source) as driver:
        call_id = driver.start("floods", 100_000, events=True)
        assert output_of(driver.wait_end(call_id)) == "done"
        told = driver.told(call_id)
        head = "".join(one.payload.text for one in told[:-1])
        assert len(head) == len(told[-1].payload.text) == 32 * 1024
        assert head.startswith("0000000\n0000001\n")
        assert told[-1].payload.text.endswith("0099999\n")
        assert sum(one.payload.cut_count for one in told[:-1]) == 0
        assert told[-1].payload.cut_count == 100_000 * 8 - 64 * 1024
        assert len(driver.read_stdout()) == 800_000


@pytest.mark.requirement("X79")
def test_a_flood_of_logs_is_cut_in_the_middle(source: str) -> None:
    with FamilyDriver(source) as driver:
        call_id = driver.start("floods_log", 20_000, events=True)
        assert output_of(driver.wait_end(call_id)) == "done"
        told = driver.told(call_id)
        assert (told[0].payload.text, told[-1].payload.text) == ("0", "19999")
        assert len(told) < 1100
        assert [one.payload.cut_count > 0 for one in told].count(True) == 1


def test_a_forked_child_tells_nothing(source: str) -> None:
    with FamilyDriver(source) as driver:
        call_id = driver.start("forks", events=True)
        assert output_of(driver.wait_end(call_id)) == 0
        assert "child" not in "".join(text for _, text in texts(driver.told(call_id)))
        assert driver.told(call_id, "progress") == []


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("level", "level must be one of debug, info, warning, error, critical, got 'loud'"),
        ("done", "done must be a number from 0, got -1"),
        ("nan", "done must be a number from 0, got nan"),
        ("total", "total must be a number from 0, got inf"),
    ],
)
def test_what_means_nothing_is_refused(which: str, message: str) -> None:
    with FamilyDriver(SOURCE) as driver:
        assert message in driver.value("wrong", which)


@pytest.mark.requirement("X53", "X58")
@pytest.mark.parametrize("events", [False, True])
def test_endless_printing_is_interrupted(source: str, events: bool) -> None:
    with FamilyDriver(source) as driver:
        failed = driver.failure("prints_forever", budget_ms=100, events=events).payload
        assert (failed.error_kind, failed.details["limit"]) == ("timeout", "budget_ms")
        assert driver.value("prints", "well") == 1
        assert driver.is_draining() == ""
