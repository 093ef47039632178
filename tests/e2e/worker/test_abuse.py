"""What hostile callers and hostile functions do: each test once broke something."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from callyard import ErrorKind, Outcome, Result, UsageError, Worker
from callyard.functions.bundle import Bundle
from callyard.ids import ExecutorId
from callyard.worker import run_folder
from callyard.worker.audit_gate import AuditGate
from callyard.worker.code_view import BundleShelf
from callyard.worker.io.hub import IoHub
from callyard.worker.pool import Pool
from callyard.worker.run_folder import RunFolder
from callyard.worker.spawner import ExecutorProcess, OutputCallback, ProcessSpawner, SpawnOrder
from tests.e2e.processes import WAIT_S, children_of, kill

FUNCTIONS = """
import io, signal, sys, time
from callyard import function, sleep

@function
def echo(value: int) -> int:
    return value

@function
def nap(seconds: float) -> float:
    sleep(seconds)
    return seconds

@function
def spin() -> None:
    while True:
        pass

@function
def block_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())

@function
def close_buffer() -> None:
    sys.stdout.buffer.close()

@function
def detach() -> None:
    for stream in (sys.stdout, sys.stdout.buffer):
        try:
            stream.detach()
        except io.UnsupportedOperation:
            continue

@function
def say(text: str) -> None:
    print(text)

class LyingClass(Exception):
    @property
    def __class__(self):
        raise RuntimeError("no class")

class NoAttributes(Exception):
    def __getattribute__(self, name):
        raise KeyboardInterrupt

class Nameless(type):
    @property
    def __name__(cls):
        raise ValueError("no name")

class HasNameless(Exception, metaclass=Nameless):
    pass

@function
def raise_odd(name: str) -> None:
    raise {"LyingClass": LyingClass, "NoAttributes": NoAttributes, "HasNameless": HasNameless}[name]()
"""


def quiet(*_: object) -> None:
    """Drop what executors print."""


async def until(condition: Callable[[], bool]) -> None:
    """Poll, with the loop free to go on."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "abuse.py"
    path.write_text(FUNCTIONS)
    return path


# --- options ----------------------------------------------------------------------------------------------------------

BAD_OPTIONS: Sequence[dict[str, Any]] = [
    {"budget_ms": -1},
    {"budget_ms": 1 << 63},
    {"budget_ms": 1.5},
    {"budget_ms": True},
    {"max_attempts": 0},
    {"max_attempts": "1"},
    {"deadline_ms": "1"},
    {"deadline_ms": float("nan")},
    {"deadline_ms": 1 << 70},
    {"tenant": ""},
    {"tenant": "\ud800"},
    {"tenant": 5},
    {"tenant": "x" * 1_000},
]


@pytest.mark.requirement("X73")
async def test_an_option_out_of_range_is_refused_and_harms_nobody(target: Path) -> None:
    """Once, max_attempts=0 ended the worker for all its callers, and budget_ms=-1 one executor after the other."""
    async with Worker(target, executors=1, spare_executors=0, on_output=quiet) as worker:
        before = worker.slots()[0].executor_id
        for options in BAD_OPTIONS:
            with pytest.raises(UsageError, match=next(iter(options))):
                await worker.call("echo", [1], **options)
            with pytest.raises(UsageError, match=next(iter(options))):
                await anext(worker.map("echo", [1], **options))
        late = await worker.call_result("echo", [1], deadline_ms=-5)
        assert late.error is not None
        assert late.error.kind is ErrorKind.DEADLINE
        assert await worker.call("echo", [7]) == 7
        assert worker.slots()[0].executor_id == before


@pytest.mark.requirement("X73")
@pytest.mark.parametrize("value", [1.5, "2", True, None])
def test_a_setting_that_is_no_whole_number_is_refused(target: Path, value: object) -> None:
    with pytest.raises(UsageError, match="executor_max_inflight"):
        Worker(target, executor_max_inflight=value)


# --- the host's own loop stands still ---------------------------------------------------------------------------------


@pytest.mark.requirement("X63")
async def test_a_cancelled_call_that_ended_in_time_costs_nobody_though_the_host_blocked_its_loop(target: Path) -> None:
    """Once, the answer waited unread while the host computed, and the executor was killed with all its calls."""
    async with Worker(target, executors=1, spare_executors=0, on_output=quiet) as worker:
        neighbour = asyncio.ensure_future(worker.call_result("nap", [2.0]))
        cancelled = asyncio.ensure_future(worker.call_result("nap", [60.0]))
        await until(lambda: len(worker.running()) == 2)
        cancelled.cancel()
        for _ in range(3):
            await asyncio.sleep(0)  # the CancelCall leaves
        time.sleep(worker.config.cancel_grace_ms * 3 / 1_000)  # the point
        result = await neighbour
        assert result.ok, result.error


# --- start and end ----------------------------------------------------------------------------------------------------


START_STEPS = [
    (IoHub, "open"),
    (BundleShelf, "put"),
    (Pool, "start"),
    (AuditGate, "admit"),
    (Pool, "wait_attached"),
    (Pool, "describe"),
]


@pytest.mark.requirement("X44")
@pytest.mark.parametrize("when", ["before", "during", "after"])
@pytest.mark.parametrize(("part", "step"), START_STEPS)
async def test_closing_while_it_starts_ends_the_start(
    target: Path, monkeypatch: pytest.MonkeyPatch, part: type, step: str, when: str
) -> None:
    """At each of its steps. Once, the start went on waiting for start_timeout_ms; and once it succeeded, when the last
    answer came from a process that was killed."""
    before = set(children_of(os.getpid()))
    worker = Worker(target, executors=2, on_output=quiet)
    closing: list[asyncio.Future[None]] = []
    real = getattr(part, step)

    async def close_in_it(*args: Any, **named: Any) -> Any:
        if closing:
            return await real(*args, **named)
        if when == "after":
            result = await real(*args, **named)
        closing.append(asyncio.ensure_future(worker.close()))
        if when == "during":
            return await real(*args, **named)
        await asyncio.sleep(0)
        return result if when == "after" else await real(*args, **named)

    monkeypatch.setattr(part, step, close_in_it)
    starting = asyncio.ensure_future(worker.start())
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(UsageError, match="closed"):
            await starting
        await closing[0]
    assert set(children_of(os.getpid())) <= before
    assert worker._folder is None


@pytest.mark.requirement("X44")
async def test_a_close_waits_for_a_bundle_that_is_being_written(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it removed the folder from under the writer: the start ended with an error of its, or the folder stayed."""
    real, writing, go_on = Bundle.write_to, threading.Event(), threading.Event()

    def write_late(bundle: Bundle, folder: Path) -> Path:
        writing.set()
        assert go_on.wait(WAIT_S)
        return real(bundle, folder)

    monkeypatch.setattr(Bundle, "write_to", write_late)
    worker = Worker(target, executors=1, on_output=quiet)
    starting = asyncio.ensure_future(worker.start())
    await until(writing.is_set)
    assert worker._folder is not None
    folder = worker._folder.path
    closing = asyncio.ensure_future(worker.close())
    for _ in range(20):  # turns of the loop: far more than a close takes that waits for nothing
        await asyncio.sleep(0)
    assert folder.exists()
    go_on.set()
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(UsageError, match="closed"):
            await starting
        await closing
    assert not folder.exists()


@pytest.mark.requirement("X44")
async def test_a_start_ends_though_its_last_answer_comes_from_a_process_that_is_killed(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(target, executors=1, on_output=quiet)
    closing: list[asyncio.Future[None]] = []
    real = Pool.on_described

    def close_then_hear(pool: Pool, *args: Any) -> None:
        closing.append(asyncio.ensure_future(worker.close()))
        real(pool, *args)

    monkeypatch.setattr(Pool, "on_described", close_then_hear)
    with pytest.raises(UsageError, match="closed"):
        await worker.start()
    await closing[0]


@pytest.mark.requirement("X44")
def test_a_run_folder_that_another_worker_took_for_abandoned_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one starts just between the making of the folder and its lock."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    real, made = fcntl.flock, []

    def lock(fd: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX and not made:
            made.append(fd)
            run_folder._remove_abandoned(tmp_path)
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", lock)
    folder = RunFolder()
    assert made
    assert (folder.path / "bundles").is_dir()
    assert [path.name for path in tmp_path.iterdir()] == [folder.path.name]
    folder.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.requirement("X44")
@pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.05])
async def test_a_cancelled_start_leaves_no_process(target: Path, delay_s: float) -> None:
    before = set(children_of(os.getpid()))
    starting = asyncio.ensure_future(Worker(target, executors=2, on_output=quiet).start())
    await asyncio.sleep(delay_s)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert set(children_of(os.getpid())) <= before


@pytest.mark.requirement("X44")
@pytest.mark.parametrize("delay_s", [0.0, 0.2])
async def test_a_cancelled_close_leaves_no_process(target: Path, delay_s: float) -> None:
    """Once, it left all of them to the end of the host."""
    before = set(children_of(os.getpid()))
    worker = Worker(target, executors=2, on_output=quiet)
    await worker.start()
    call = asyncio.ensure_future(worker.call_result("nap", [60.0]))
    await until(lambda: len(worker.running()) == 1)
    closing = asyncio.ensure_future(worker.close())
    await asyncio.sleep(delay_s)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert set(children_of(os.getpid())) <= before
    result = await call
    assert not result.ok


@pytest.mark.requirement("X44")
async def test_closing_twice_at_once_is_closing(target: Path) -> None:
    worker = Worker(target, executors=1, on_output=quiet)
    await worker.start()
    await asyncio.gather(worker.close(), worker.close(drain=False))
    await worker.close()


class Failing(ProcessSpawner):
    """Cannot start a process while `fails`, as with no descriptor or process left."""

    fails = False

    def spawn(self, order: SpawnOrder, on_output: OutputCallback) -> ExecutorProcess:
        if self.fails:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return super().spawn(order, on_output)


@pytest.mark.requirement("X45")
async def test_a_slot_whose_process_cannot_be_started_is_filled_later(target: Path) -> None:
    """Once, such a slot stayed empty for good."""
    spawner = Failing()
    async with Worker(
        target, executors=1, spare_executors=0, restart_delay_ms=20, spawner=spawner, on_output=quiet
    ) as worker:
        descriptors = len(os.listdir("/dev/fd"))
        spawner.fails = True
        kill(worker.slots()[0].pid, 9)
        await until(lambda: "could not be started" in worker.last_loss)
        assert len(os.listdir("/dev/fd")) < descriptors
        call = asyncio.ensure_future(worker.call("echo", [3]))
        spawner.fails = False
        async with asyncio.timeout(30):
            assert await call == 3


@pytest.mark.requirement("X45")
async def test_a_start_for_which_there_is_no_process_is_a_usage_error(target: Path) -> None:
    spawner = Failing()
    spawner.fails = True
    with pytest.raises(UsageError, match=r"could not be started.*unavailable"):
        async with Worker(target, executors=2, spawner=spawner, on_output=quiet):
            pass


# --- functions --------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X57")
async def test_an_exception_that_cannot_be_looked_at_is_that_calls_failure(target: Path) -> None:
    """Once, each of these ended the executor."""
    async with Worker(target, executors=1, spare_executors=0, on_output=quiet) as worker:
        before = worker.slots()[0].executor_id
        for name in ("LyingClass", "NoAttributes", "HasNameless"):
            result = await worker.call_result("raise_odd", [name])
            assert result.error is not None
            assert (result.error.kind, result.error.outcome) == (ErrorKind.INTERNAL, Outcome.RAN)
            assert name in result.error.message
        assert worker.slots()[0].executor_id == before


@pytest.mark.requirement("X53")
@pytest.mark.requirement("X57")
async def test_blocked_signals_are_put_back_before_a_neighbour_needs_its_budget(target: Path) -> None:
    async with Worker(target, executors=1, spare_executors=0, on_output=quiet) as worker:
        blocking: Result = await worker.call_result("block_signals")
        assert any("signal mask" in note for note in blocking.notes)
        result = await worker.call_result("spin", budget_ms=200)
        assert result.error is not None
        assert result.error.kind is ErrorKind.TIMEOUT


@pytest.mark.requirement("X57")
@pytest.mark.parametrize("way", ["close_buffer", "detach"])
async def test_no_call_closes_its_neighbours_standard_output(target: Path, way: str) -> None:
    lines: list[str] = []

    def listen(_executor_id: ExecutorId, line: str) -> None:
        lines.append(line)

    async with Worker(target, executors=1, spare_executors=0, on_output=listen) as worker:
        await worker.call(way)
        await worker.call("say", ["still here"])
        await until(lambda: "still here" in lines)


@pytest.mark.requirement("X57")
async def test_a_listener_that_raises_loses_no_line_but_its_own(target: Path) -> None:
    """Once, the rest of what had been read with that line was dropped."""
    lines: list[str] = []
    complaints: list[object] = []

    def listen(_executor_id: ExecutorId, line: str) -> None:
        lines.append(line)
        if line == "first":
            raise ValueError(line)

    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: complaints.append(context["exception"]))
    async with Worker(target, executors=1, spare_executors=0, on_output=listen) as worker:
        await worker.call("say", ["first\nsecond\nthird"])
        await until(lambda: "third" in lines)
    assert lines == ["first", "second", "third"]
    assert [type(error) for error in complaints] == [ValueError]


SPIN = """
from callyard import function

@function
def spin() -> None:
    while True:
        pass
"""


@pytest.mark.requirement("X53")
@pytest.mark.parametrize("where", ["the bundle", "the host"])
async def test_a_budget_holds_whoever_blocked_its_signal(tmp_path: Path, where: str) -> None:
    """Once, a mask set by the imported file, or inherited from the host's thread, turned every budget off."""
    target = tmp_path / "masked.py"
    if where == "the bundle":
        target.write_text("import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n" + SPIN)
    else:
        target.write_text(SPIN)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGALRM,) if where == "the host" else ())
    try:
        async with Worker(target, executors=1, spare_executors=0, on_output=quiet) as worker:
            result = await worker.call_result("spin", budget_ms=200)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert result.error is not None
    assert result.error.kind is ErrorKind.TIMEOUT
