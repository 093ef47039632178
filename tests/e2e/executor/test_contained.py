"""User code cannot take its process down unnoticed: X57's two lists, with real processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from callyard.errors import Outcome
from callyard.wire.messages import CallCompleted, CallFailed
from tests.e2e.executor.driver import Driver, output_of

SOURCE = """
import asyncio, ctypes, gc, io, locale, os, signal, socket, subprocess, sys, threading, time
import multiprocessing
from callyard import ToolError, TransientError
from callyard.sdk import sleep

def quick() -> int:
    return 1

def nap(seconds: float) -> float:
    sleep(seconds)
    return seconds

# --- contained

def sys_exit():
    sys.exit(3)

def sys_exit_text():
    sys.exit("good bye")

def keyboard_interrupt():
    raise KeyboardInterrupt

def greenlet_exit():
    from greenlet import GreenletExit
    raise GreenletExit("out")

def base_exception():
    class Odd(BaseException):
        pass
    raise Odd("odd")

def generator_exit():
    raise GeneratorExit

def stop_iteration():
    raise StopIteration

def switch_to_the_hub():
    from greenlet import getcurrent
    getcurrent().parent.switch("hello")

def recursion():
    return recursion()

def memory():
    return bytearray(1 << 62)

def bad_str():
    class Bad(Exception):
        def __str__(self):
            raise ValueError("no text")
    raise Bad

def exiting_str():
    class Bad(Exception):
        def __str__(self):
            sys.exit(1)
    raise Bad

def endless_str():
    class Bad(Exception):
        def __str__(self):
            while True:
                pass
    raise Bad

def surrogates():
    raise ValueError("bad \\udc80 text")

def huge_message():
    raise ValueError("x" * 20_000_000)

def unserialisable() -> object:
    return object()

def cyclic() -> list:
    ring = []
    ring.append(ring)
    return ring

def bad_encoder() -> object:
    class Odd(dict):
        def items(self):
            raise RuntimeError("no items")
    import dataclasses
    @dataclasses.dataclass
    class Holder:
        inner: object
    return Holder(Odd(a=lambda: 1))

def nan() -> float:
    return float("nan")

def huge() -> str:
    return "x" * (17 << 20)

def close_everything() -> list:
    failed = []
    for fd in range(3, 64):
        try:
            os.close(fd)
        except OSError as error:
            if "belongs to the executor" in str(error):
                failed.append(fd)
    return failed

def close_range() -> int:
    os.closerange(0, 64)
    return 1

def close_stdout():
    os.close(1)

def close_sys_stdout() -> int:
    sys.stdout.close()
    print("still open")
    return 1

def cover_the_link(fds: list[int]):
    null = os.open("/dev/null", os.O_RDWR)
    try:
        for fd in fds:
            os.dup2(null, fd)
    finally:
        os.close(null)

def die(how: str):
    if how == "os._exit":
        os._exit(7)
    if how == "segfault":
        ctypes.string_at(0)
    if how == "sigkill":
        os.kill(os.getpid(), 9)
    if how == "abort":
        os.abort()

def print_protocol() -> int:
    print('{"message_type":"CallCompleted"}')
    sys.stderr.write("to stderr\\n")
    return 1

def transient():
    raise TransientError("busy", retry_after_ms=250)

def tool_error():
    raise ToolError("no such city: Atlantis")

# --- forks

def fork_and_exit() -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(5)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def fork_and_return() -> int:
    # The child comes back from the function as if it were the call.
    pid = os.fork()
    if pid == 0:
        return -1
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def fork_and_raise(how: str) -> int:
    pid = os.fork()
    if pid == 0:
        if how == "sys.exit":
            sys.exit(9)
        raise ValueError("in the child")
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def fork_and_sleep() -> list:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        sleep(0.05)
        os.write(write, b"slept")
        return 0
    os.waitpid(pid, 0)
    text = os.read(read, 10).decode()
    os.close(read)
    os.close(write)
    return [text]

def fork_in_a_thread() -> list:
    status = []
    def body():
        pid = os.fork()
        if pid == 0:
            os._exit(6)
        status.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return status

def triple(x):
    return 3 * x

def process_pool() -> list:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(triple, range(4))

def run_program() -> str:
    return subprocess.run([sys.executable, "-c", "print(1 + 1)"], capture_output=True, text=True).stdout

# --- noted and put back

def look() -> dict:
    return {
        "cwd": os.getcwd(),
        "umask": os.umask(os.umask(0o22)) if False else read_umask(),
        "variable": os.environ.get("CALLYARD_TEST"),
        "path": os.environ.get("PATH"),
        "real": real_environment(),
        "signal": str(signal.getsignal(signal.SIGUSR1)),
        "numeric": locale.setlocale(locale.LC_NUMERIC),
    }

def read_umask() -> str:
    with open("/proc/self/status") as file:
        return next(line for line in file if line.startswith("Umask")).split()[1]

def real_environment() -> object:
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    found = getenv(b"CALLYARD_TEST")
    return found.decode() if found else None

CHANGES = {
    "chdir": lambda: os.chdir("/usr"),
    "fchdir": lambda: (fd := os.open("/usr", os.O_RDONLY), os.fchdir(fd), os.close(fd)),
    "umask": lambda: os.umask(0o77),
    "environ": lambda: os.environ.__setitem__("CALLYARD_TEST", "1"),
    "putenv": lambda: os.putenv("CALLYARD_TEST", "1"),
    "delete": lambda: os.environ.pop("PATH"),
    "signal": lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN),
    "locale": lambda: locale.setlocale(locale.LC_NUMERIC, "C.UTF-8"),
}

def change(what: str) -> dict:
    before = look()
    CHANGES[what]()
    after = look()
    return {key: after[key] for key in after if after[key] != before[key]}

def change_and_sleep(what: str, until: str) -> list:
    before = look()
    CHANGES[what]()
    while not os.path.exists(until):
        sleep(0.01)
    return [key for key, value in look().items() if value != before[key]]

def change_and_undo() -> int:
    before, mask = os.getcwd(), os.umask(0o77)
    handler = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    os.chdir("/usr")
    os.chdir(before)
    os.umask(mask)
    signal.signal(signal.SIGUSR1, handler)
    return 1

def take_the_alarm(how: str) -> int:
    if how == "handler":
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    elif how == "ignore":
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
    elif how == "alarm":
        signal.alarm(1)
        signal.alarm(0)
    elif how == "timer":
        signal.setitimer(signal.ITIMER_REAL, 0)
    return 1

def loop():
    while True:
        pass

# --- threads

stop = threading.Event()

def start_and_join() -> int:
    threads = [threading.Thread(target=int) for _ in range(5)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    return 1

def leave_thread(daemon: bool) -> int:
    threading.Thread(target=stop.wait, daemon=daemon, name="left behind").start()
    return 1
"""
ASYNC = (
    SOURCE
    + """
async def a_change_and_wait(what: str, until: str) -> list:
    before = look()
    CHANGES[what]()
    while not os.path.exists(until):
        await asyncio.sleep(0.01)
    return [key for key, value in look().items() if value != before[key]]

async def to_thread() -> int:
    return await asyncio.to_thread(quick)

async def leave_to_thread() -> int:
    asyncio.ensure_future(asyncio.to_thread(stop.wait))
    await asyncio.sleep(0.05)
    return 1

async def a_fork_and_return() -> int:
    return fork_and_return()

async def a_sys_exit():
    sys.exit(3)
"""
)


@pytest.fixture(scope="module")
def shared() -> Iterator[Driver]:
    """One executor for all that is contained: it is the same process at the end."""
    with Driver(ASYNC) as driver:
        yield driver
        assert driver.process.poll() is None
        assert driver.is_draining() == ""


def check_alive(driver: Driver) -> None:
    assert driver.value("quick") == 1
    assert driver.process.poll() is None


@pytest.mark.requirement("X57")
@pytest.mark.parametrize(
    ("function", "kind", "told"),
    [
        ("sys_exit", "internal", "SystemExit: 3"),
        ("a_sys_exit", "internal", "SystemExit: 3"),
        ("sys_exit_text", "internal", "SystemExit: good bye"),
        ("keyboard_interrupt", "internal", "KeyboardInterrupt"),
        ("greenlet_exit", "internal", "GreenletExit: out"),
        ("generator_exit", "internal", "GeneratorExit"),
        ("stop_iteration", "internal", "StopIteration"),
        ("base_exception", "internal", "Odd: odd"),
        ("recursion", "internal", "RecursionError: maximum recursion depth exceeded"),
        ("memory", "resource_limit", "MemoryError"),
        ("bad_str", "internal", "Bad: <its __str__ raised ValueError>"),
        ("exiting_str", "internal", "Bad: <its __str__ raised SystemExit>"),
        ("surrogates", "internal", "ValueError: bad \\udc80 text"),
        ("unserialisable", "result", "object"),
        ("cyclic", "result", ""),
        ("bad_encoder", "result", ""),
        ("nan", "result", ""),
        ("huge", "result", ""),
        ("close_stdout", "internal", "descriptor 1 belongs to the executor"),
        ("transient", "transient", "busy"),
        ("tool_error", "tool_error", "no such city: Atlantis"),
    ],
)
def test_a_failing_call_fails_alone(shared: Driver, function: str, kind: str, told: str) -> None:
    neighbour = shared.start("nap", 0.05)
    failed = shared.failure(function, budget_ms=20_000).payload
    assert (failed.error_kind, told in failed.error_message) == (kind, True), failed
    assert failed.error_message if kind == "result" else True
    assert output_of(shared.wait_end(neighbour)) == 0.05
    check_alive(shared)


def test_what_the_user_says_is_told_as_written(shared: Driver) -> None:
    transient = shared.failure("transient").payload
    assert (transient.error_message, transient.details) == ("busy", {"retry_after_ms": 250})
    assert (transient.retryable, transient.outcome) == (True, Outcome.NOT_RUN)
    tool_error = shared.failure("tool_error").payload
    assert (tool_error.error_message, tool_error.retryable) == ("no such city: Atlantis", False)


@pytest.mark.requirement("X57")
def test_endless_str_runs_under_the_budget(shared: Driver) -> None:
    failed = shared.failure("endless_str", budget_ms=100).payload
    assert failed.error_kind == "timeout"
    check_alive(shared)


@pytest.mark.requirement("X57")
@pytest.mark.requirement("X56")
def test_huge_message_is_cut(shared: Driver) -> None:
    failed = shared.failure("huge_message").payload
    assert len(failed.error_message) < 10_000
    assert "more characters" in failed.error_message
    assert len(failed.error_stack.encode()) <= 16 * 1024


@pytest.mark.requirement("X57")
def test_switching_to_the_hub_costs_the_process_not_the_neighbours() -> None:
    with Driver(SOURCE) as driver:
        neighbour = driver.start("nap", 0.5)
        failed = driver.failure("switch_to_the_hub").payload
        assert (failed.error_kind, "executor's own greenlet" in failed.error_message) == ("internal", True)
        assert output_of(driver.wait_end(neighbour)) == 0.5
        driver.wait_until(driver.is_draining, "draining heartbeat")


@pytest.mark.requirement("X57")
@pytest.mark.parametrize(
    ("how", "status"),
    [("os._exit", 7), ("segfault", -signal.SIGSEGV), ("sigkill", -signal.SIGKILL), ("abort", -signal.SIGABRT)],
)
def test_death_is_seen_and_names_the_call(how: str, status: int) -> None:
    with Driver(SOURCE, mark_slots=16) as driver:
        finished = driver.run("quick", idempotent=False)
        doomed = driver.make_call("die", how, idempotent=False)
        waiting = driver.make_call("quick", idempotent=False)
        driver.send(doomed, waiting)
        assert driver.wait_exit() == status
        while driver.pump(1):
            pass
        assert driver.at_eof
        assert set(driver.ends) == {finished.call_id}
        assert doomed.payload.call_number in driver.marks()
        assert waiting.payload.call_number not in driver.marks()


@pytest.mark.requirement("X57")
def test_descriptors_of_the_executor_stay_open(shared: Driver) -> None:
    kept = shared.value("close_everything")
    assert len(kept) >= 1
    assert "belongs to the executor" in shared.failure("cover_the_link", kept).payload.error_message
    assert shared.value("close_sys_stdout") == 1
    check_alive(shared)
    shared.wait_until(lambda: "still open" in shared.read_stdout(), "print after close")


@pytest.mark.requirement("X57")
def test_closerange_spares_them() -> None:
    with Driver(SOURCE) as driver:
        assert driver.value("close_range") == 1
        check_alive(driver)


@pytest.mark.requirement("X57")
def test_print_goes_to_the_streams(shared: Driver) -> None:
    assert shared.value("print_protocol") == 1
    shared.wait_until(lambda: '{"message_type":"CallCompleted"}' in shared.read_stdout(), "the printed line")
    shared.wait_until(lambda: "to stderr" in shared.read_stderr(), "the line on stderr")


# --- forks ------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X57")
@pytest.mark.parametrize(
    ("function", "args", "value"),
    [
        ("fork_and_exit", [], 5),
        ("fork_and_return", [], 0),
        ("a_fork_and_return", [], 0),
        ("fork_and_raise", ["sys.exit"], 9),
        ("fork_and_raise", ["error"], 1),
        ("fork_and_sleep", [], ["slept"]),
        ("fork_in_a_thread", [], [6]),
        ("process_pool", [], [0, 3, 6, 9]),
        ("run_program", [], "2\n"),
    ],
)
def test_a_fork_cannot_speak_for_its_parent(shared: Driver, function: str, args: list[str], value: object) -> None:
    # A second answer to the call would fail in the driver.
    assert shared.value(function, *args) == value
    check_alive(shared)
    if args == ["error"]:
        assert "ValueError: in the child" in shared.read_stderr()


# --- noted and put back -----------------------------------------------------------------------------------------------

CHANGES = {
    "chdir": "working directory to '/usr'",
    "fchdir": "working directory to '/usr'",
    "umask": "umask to 0o77",
    "environ": "environment variable CALLYARD_TEST",
    "putenv": "environment variable CALLYARD_TEST",
    "delete": "environment variable PATH",
    "signal": "handler of SIGUSR1",
    "locale": "locale to 'C.UTF-8'",
}


@pytest.mark.requirement("X57")
@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_noted_and_put_back_at_the_end(shared: Driver, what: str) -> None:
    before = shared.value("look")
    end = shared.run("change", what)
    assert output_of(end), "it took effect"
    assert [CHANGES[what] in note and note.endswith("put back") for note in end.payload.notes] == [True]
    assert shared.value("look") == before
    assert shared.run("quick").payload.notes == []


@pytest.mark.requirement("X57")
@pytest.mark.parametrize("what", ["chdir", "umask", "environ", "signal"])
@pytest.mark.parametrize("function", ["change_and_sleep", "a_change_and_wait"])
def test_no_neighbour_runs_under_a_change(shared: Driver, function: str, what: str, tmp_path: Path) -> None:
    before = shared.value("look")
    call = shared.start(function, what, str(tmp_path / "go on"))
    seen = [shared.value("look") for _ in range(3)]
    assert call not in shared.ends
    assert seen == [before] * 3
    (tmp_path / "go on").touch()
    end = shared.wait_end(call)
    assert output_of(end) == []
    assert len(end.payload.notes) == 1


@pytest.mark.requirement("X57")
@pytest.mark.requirement("X53")
@pytest.mark.parametrize("how", ["handler", "ignore", "alarm", "timer"])
def test_the_alarm_is_taken_back(shared: Driver, how: str) -> None:
    end = shared.run("take_the_alarm", how, budget_ms=5_000)
    assert isinstance(end, CallCompleted)
    assert len(end.payload.notes) == 1
    assert shared.failure("loop", budget_ms=100).payload.error_kind == "timeout"


@pytest.mark.requirement("X57")
def test_what_user_code_puts_back_itself_is_not_worth_a_note(shared: Driver) -> None:
    assert shared.run("change_and_undo").payload.notes == []


def test_changes_at_import_stay(tmp_path: Path) -> None:
    source = f"import os\nos.environ['CALLYARD_TEST'] = '1'\nos.chdir({str(tmp_path)!r})\n" + SOURCE
    with Driver(source) as driver:
        assert driver.value("look")["variable"] == "1"
        end = driver.run("change", "chdir")
        assert isinstance(end, CallCompleted)
        assert driver.value("look")["cwd"] == os.path.realpath(tmp_path)


# --- threads ----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X57")
def test_joined_threads_are_nobodys_business(shared: Driver) -> None:
    assert shared.run("start_and_join").payload.notes == []
    assert shared.run("to_thread").payload.notes == []
    assert shared.run("quick").payload.notes == []


@pytest.mark.requirement("X57")
def test_a_left_daemon_thread_is_noted() -> None:
    with Driver(SOURCE, heartbeat_interval_ms=20) as driver:
        end = driver.run("leave_thread", True)
        assert output_of(end) == 1
        assert ["'left behind'" in note for note in end.payload.notes] == [True]
        assert driver.run("quick").payload.notes == []
        seen = len(driver.heartbeats)
        driver.wait_until(lambda: len(driver.heartbeats) > seen + 2, "heartbeats")
        assert driver.is_draining() == ""


@pytest.mark.requirement("X57")
@pytest.mark.parametrize(("function", "args"), [("leave_thread", [False]), ("leave_to_thread", [])])
def test_a_left_thread_recycles_the_executor_once_its_calls_are_done(function: str, args: list[bool]) -> None:
    with Driver(ASYNC) as driver:
        neighbour = driver.start("nap", 1)
        end = driver.run(function, *args)
        assert output_of(end) == 1
        assert any("will be replaced" in note for note in end.payload.notes)
        driver.wait_until(lambda: driver.is_draining() == "thread", "draining heartbeat")
        late = driver.run("quick")
        assert isinstance(late, CallFailed)
        assert late.payload.error_kind == "recalled"
        assert output_of(driver.wait_end(neighbour)) == 1
