"""What an exclusive call changes in its process stays over its waits, and what it calls runs without it."""

from __future__ import annotations

import pytest

from callyard.wire.messages import CallFailed
from tests.e2e.executor.driver import output_of
from tests.e2e.executor.family import FamilyDriver

SOURCE = """
import asyncio
import os
import signal
import time

from callyard import acall, call, function, sdk, sleep

def look() -> list:
    with open("/proc/self/status") as file:
        umask = next(line for line in file if line.startswith("Umask")).split()[1]
    return [os.getcwd(), os.environ.get("CALLYARD_TEST"), umask, signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN]

def change() -> None:
    os.chdir("/usr")
    os.environ["CALLYARD_TEST"] = "1"
    os.umask(0o77)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)

@function
def seen() -> list:
    return look()

@function(exclusive=True)
def keeps(how: str) -> list:
    change()
    mine = look()
    below = None
    if how == "sleep":
        sleep(0.01)
    elif how == "io":
        sdk.runtime().io("http", "get", b"{}")
    elif how == "subcall":
        below = call(seen)
    elif how == "nested":
        below = call(changes_too, "call")
    elif how == "sleeping subcall":
        below = call(changes_too, "sleep")
    now = look()
    os.environ["CALLYARD_TEST"] = "2"
    sleep(0.01)
    return [mine, now, below, os.environ["CALLYARD_TEST"]]

@function(exclusive=True)
def changes_too(how: str) -> list:
    before = look()
    os.chdir("/tmp")
    if how == "call":
        between = call(seen)
    else:
        sleep(0.01)
        between = before
    return [before, between, os.getcwd()]

@function(exclusive=True)
async def akeeps(how: str) -> list:
    change()
    mine = look()
    below = None
    if how == "sleep":
        await asyncio.sleep(0.01)
    elif how == "subcall":
        below = await acall(seen)
    elif how == "child task":
        await asyncio.create_task(asyncio.sleep(0.01))
    now = look()
    os.environ["CALLYARD_TEST"] = "2"
    await asyncio.sleep(0.01)
    return [mine, now, below, os.environ["CALLYARD_TEST"]]

@function(exclusive=True)
def fails_after_a_wait() -> None:
    change()
    sleep(0.01)
    raise ValueError("no")

@function(exclusive=True)
def runs_after_a_wait() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    change()
    sleep(0.01)
    while True:
        pass

@function
def no_promise() -> list:
    change()
    sleep(0.01)
    return look()
"""
PLAIN = (
    SOURCE[: SOURCE.index("@function(exclusive=True)\nasync def")]
    + SOURCE[SOURCE.index("@function(exclusive=True)\ndef fails") :]
)
CHANGED = ["/usr", "1", "0077", True]


@pytest.mark.requirement("X57")
@pytest.mark.parametrize(
    ("source", "function", "how"),
    [
        *[(PLAIN, "keeps", how) for how in ("nothing", "sleep", "io", "subcall", "nested", "sleeping subcall")],
        *[(SOURCE, "keeps", how) for how in ("sleep", "nested")],
        *[(SOURCE, "akeeps", how) for how in ("nothing", "sleep", "subcall", "child task")],
    ],
)
def test_an_exclusive_call_finds_its_changes_after_a_wait(source: str, function: str, how: str) -> None:
    with FamilyDriver(source) as driver:
        clean = driver.value("seen")
        call_id = driver.start(function, how)
        if how == "io":
            driver.wait_until(lambda: len(driver.waiting) == 1, "its request")
            driver.resume(driver.waiting[0], b"1")
        end = driver.wait_end(call_id)
        mine, now, below, later = output_of(end)
        assert mine == now == CHANGED
        assert later == "2"
        if how == "subcall":
            assert below == clean
        elif how in ("nested", "sleeping subcall"):
            assert below == [clean, clean, "/tmp"]
        assert sorted(note.partition(":")[0] for note in end.payload.notes) == [
            "changed the environment variable CALLYARD_TEST",
            "changed the handler of SIGUSR1",
            "changed the umask to 0o77",
            "changed the working directory to '/usr'",
        ]
        assert all(note.endswith("put back") for note in end.payload.notes)
        assert driver.value("seen") == clean


@pytest.mark.requirement("X57")
def test_its_end_puts_everything_back_however_it_ends() -> None:
    with FamilyDriver(PLAIN) as driver:
        clean = driver.value("seen")
        failed = driver.run("fails_after_a_wait")
        assert isinstance(failed, CallFailed)
        assert len(failed.payload.notes) == 4
        assert driver.value("seen") == clean
        stopped = driver.run("runs_after_a_wait", budget_ms=300)
        assert isinstance(stopped, CallFailed)
        assert stopped.payload.error_kind == "timeout", "the executor's own timer is not the call's to keep"
        assert driver.value("seen") == clean
        assert driver.value("no_promise") == clean


@pytest.mark.requirement("X38")
def test_the_page_names_the_running_call() -> None:
    source = """
import os
from callyard import sleep

def spin(path: str) -> None:
    while not os.path.exists(path):
        pass

def nap(path: str) -> None:
    while not os.path.exists(path):
        sleep(0.01)
"""
    with FamilyDriver(source, mark_slots=256) as driver:
        go = driver.folder / "go"
        waiting = driver.make_call("nap", str(driver.folder / "never"))
        driver.send(waiting)
        driver.wait_until(lambda: waiting.payload.call_number in driver.marks(), "it began")
        running = driver.make_call("spin", str(go))
        driver.send(running)
        driver.wait_until(lambda: driver.running_mark() == running.payload.call_number, "its mark")
        go.touch()
        driver.wait_end(running.call_id)
        driver.wait_until(lambda: driver.running_mark() == 0, "nobody's, between two naps")
