"""Tools that real executors run in the dispatcher's end-to-end tests. A bundle target, never imported by a test."""

import ctypes
import math
import os
import signal
import socket
import stat
import time
from typing import Annotated, Any

from pydantic import AfterValidator

from callyard import CallError, ToolError, TransientError, call, context, function, progress, sleep


def note(path: str, text: str) -> None:
    """One line, in one write."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, f"{text}\n".encode())
    os.close(fd)


@function(idempotent=True)
def add(a: int, b: int) -> int:
    return a + b


@function(idempotent=True)
def pid() -> int:
    return os.getpid()


# --- code that does not end ------------------------------------------------------------------------------------------


@function
def spin(path: str) -> None:
    """Python code, with an effect on each turn."""
    while True:
        note(path, "turn")
        time.sleep(0.001)


@function
def nap(path: str) -> None:
    """Waits in the executor's own sleep, with an effect after it."""
    note(path, "begun")
    sleep(600)
    note(path, "woke")


@function
def block(path: str) -> None:
    """C code that no interrupt reaches: each tick is a C function's, called by a C function."""
    note(path, str(os.getpid()))
    libc = ctypes.CDLL(None)
    for _ in range(10_000):
        libc.pause()


@function
def grind(path: str) -> int:
    """A C loop that holds the interpreter."""
    note(path, str(os.getpid()))
    return sum(range(10**15))


@function
def until(path: str, gate: str, value: int = 0) -> int:
    """Ends once there is a file at `gate`."""
    note(path, f"{value}")
    while not os.path.exists(gate):
        sleep(0.005)
    return value


@function
def long_nap(seconds: float) -> float:
    sleep(seconds)
    return seconds


@function(budget_ms=60_000)
def with_budget() -> str:
    return "done"


# --- how they end -----------------------------------------------------------------------------------------------------


@function
def transient() -> None:
    raise TransientError("later", retry_after_ms=7)


@function
def tool_error() -> None:
    raise ToolError("there is no such flight")


@function
def raises() -> None:
    raise ValueError("no fuel")


@function(idempotent=True)
def raises_timeout() -> None:
    raise TimeoutError("its own")


@function
def exits() -> None:
    raise SystemExit(4)


def _even(n: int) -> int:
    if n % 2:
        raise ValueError("odd")
    return n


@function
def wants_even(n: Annotated[int, AfterValidator(_even)], path: str = "") -> int:
    note(path, "ran")
    return n


@function(budget_ms=50)
def overruns() -> None:
    while True:
        pass


@function
def leaves() -> None:
    os._exit(3)


@function
def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _sockets() -> list[int]:
    found = []
    for fd in range(3, 64):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                found.append(fd)
        except OSError:
            continue
    return found


@function
def hangs_up() -> None:
    for fd in _sockets():
        try:
            socket.socket(fileno=os.dup(fd)).shutdown(socket.SHUT_RDWR)
        except OSError:
            continue
    time.sleep(600)


@function
def babbles() -> None:
    for fd in _sockets():
        try:
            os.write(fd, b"\xff" * 64)
        except OSError:
            continue
    time.sleep(600)


@function
def no_memory() -> None:
    raise MemoryError("no more")


@function
def no_json() -> Any:
    return object()


@function
def not_a_number() -> float:
    return math.nan


@function(max_result_bytes=1_000)
def too_large() -> str:
    return "x" * 2_000


@function
def too_deep(depth: int = 0) -> int:
    return int(call("too_deep", {"depth": depth + 1}))


@function
def in_a_ring() -> int:
    return int(call("in_a_ring", {}))


@function
def calls(name: str) -> Any:
    return call(name, {})


# --- attempts ---------------------------------------------------------------------------------------------------------


@function(idempotent=True, timeout_ms=1_500)
def slow_at_first(path: str) -> list[Any]:
    """Too slow the first time, then well: what each attempt saw of itself."""
    seen = context()
    note(path, f"{seen.attempt} {seen.idempotency_key}")
    if seen.attempt == 1:
        sleep(600)
    return [seen.attempt, seen.idempotency_key]


@function(idempotent=True)
def dies_at_first(path: str) -> int:
    note(path, str(context().attempt))
    if context().attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return context().attempt


@function
def charge(path: str, gate: str = "") -> int:
    """The effect that must not happen twice; with a gate it then waits there to be killed."""
    note(path, str(os.getpid()))
    while gate and not os.path.exists(gate):
        time.sleep(0.005)
    return 500


@function(idempotent=True)
def charges_and_dies(path: str) -> None:
    call("charge", {"path": path})
    os.kill(os.getpid(), signal.SIGKILL)


@function(idempotent=True, timeout_ms=3_000)
def charges_and_spins(path: str) -> None:
    call("charge", {"path": path})
    while True:
        pass


@function
def seen() -> dict[str, Any]:
    it = context()
    progress(1, 2, "half")
    return {
        "call_id": it.call_id,
        "attempt": it.attempt,
        "owner": it.owner,
        "tenant": it.tenant,
        "tags": dict(it.tags),
        "key": it.idempotency_key,
        "left": it.deadline_remaining_ms,
    }


# --- calls inside calls -----------------------------------------------------------------------------------------------


@function
def leaf(n: int) -> int:
    if n < 0:
        raise ToolError("below zero")
    return n


@function
def branch(n: int) -> int:
    return call(leaf, n=n) + call(leaf, n=n + 1)


@function
def tree() -> list[Any]:
    ends: list[Any] = [call(branch, n=1), call(leaf, n=5)]
    try:
        call(leaf, n=-1)
    except CallError as error:
        ends.append(str(error))
    return ends


@function(pure=True)
def counted(path: str) -> int:
    note(path, "ran")
    return 1


@function(isolation="inline")
def wants_to_be_inline() -> int:
    return os.getpid()


@function(isolation="inline", idempotent=True)
async def wants_to_be_inline_too() -> int:
    return os.getpid()


# --- for limits -------------------------------------------------------------------------------------------------------


@function
def slow_python() -> str:
    """Runs longer than a short `call_deadline_ms`."""
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        pass
    return "done"


@function
def hold(path: str, gate: str) -> None:
    """Runs, and does not wait, until there is a file at `gate`."""
    note(path, "held")
    while not os.path.exists(gate):
        time.sleep(0.005)


@function(budget_ms=400)
def within_budget() -> str:
    return "within"


@function(idempotent=True)
def spin_again(path: str) -> None:
    while True:
        note(path, "turn")
        time.sleep(0.001)


@function(idempotent=True)
def until_again(path: str, gate: str, value: int) -> int:
    note(path, str(value))
    while not os.path.exists(gate):
        sleep(0.005)
    return value


@function
def unwinds(path: str) -> None:
    """Pieces of C code that no interrupt cuts short, with an effect after each."""
    note(path, "begun")
    while True:
        try:
            sum(range(6_000_000))
        finally:
            note(path, "left")


@function
def marks(path: str, text: str) -> None:
    note(path, text)


@function
def overruns_not() -> None:
    sleep(600)
