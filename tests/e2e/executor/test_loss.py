"""An executor that loses its worker ends at once, whatever its calls are doing (X44, X63)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.executor.driver import WAIT_S, Driver

SOURCE = """
import asyncio, hashlib, os, subprocess, sys, time
from callyard.sdk import sleep

def started(path: str, text: str = "") -> None:
    with open(path + ".new", "w") as file:
        file.write(text or str(os.getpid()))
    os.rename(path + ".new", path)

def idle(path: str):
    started(path)

def loop(path: str):
    started(path)
    while True:
        pass

def sleeping(path: str):
    started(path)
    sleep(600)

def real_sleep(path: str):
    started(path)
    time.sleep(600)

def without_gil(path: str):
    started(path)
    while True:
        hashlib.pbkdf2_hmac("sha256", b"x", b"y", 300_000)

def swallowing(path: str):
    started(path)
    while True:
        try:
            time.sleep(600)
        except BaseException:
            pass

def holding_the_gil(path: str):
    started(path)
    sum(range(10**14))

def with_child(path: str):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    started(path, f"{os.getpid()} {child.pid}")
    child.wait()

def with_fork(path: str):
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
        os._exit(0)
    started(path, f"{os.getpid()} {pid}")
    time.sleep(600)

def close_link(path: str):
    import socket, stat
    for fd in range(3, 20):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                socket.socket(fileno=fd).close()
        except OSError:
            pass
"""
ASYNC = SOURCE + "\nasync def waiting(path: str):\n    started(path)\n    await asyncio.Event().wait()\n"

FUNCTIONS = ["idle", "loop", "sleeping", "real_sleep", "without_gil", "swallowing", "with_child", "with_fork"]


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def is_over(pid: int) -> bool:
    return not is_running(pid)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, f"not in {WAIT_S} s: {what}"
        time.sleep(0.02)


@pytest.mark.requirement("X63")
@pytest.mark.requirement("X44")
@pytest.mark.parametrize(("source", "function"), [(SOURCE, name) for name in FUNCTIONS] + [(ASYNC, "waiting")])
def test_end_of_the_link_is_the_end(source: str, function: str, tmp_path: Path) -> None:
    file = tmp_path / "started"
    with Driver(source) as driver:
        driver.start(function, str(file))
        pids = [int(pid) for pid in driver.wait_file(file).split()]
        driver._socket.close()
        driver.wait_exit()
        for pid in pids:
            wait_for(partial(is_over, pid), f"end of process {pid}")


@pytest.mark.requirement("X63")
def test_a_link_that_user_code_closes_is_a_lost_link() -> None:
    with Driver(SOURCE) as driver:
        driver.start("close_link", "")
        while driver.pump(WAIT_S):
            pass
        assert driver.wait_exit() != 0


WORKER = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.e2e.executor.driver import Driver
driver = Driver({source!r}, folder=Path({folder!r}))
driver.start({function!r}, {file!r})
driver.wait_file(Path({file!r}))
print(driver.process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.requirement("X44")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the parent-death signal is Linux's")
@pytest.mark.parametrize("function", ["loop", "holding_the_gil", "with_fork"])
def test_kill_9_of_the_worker_leaves_nothing(function: str, tmp_path: Path) -> None:
    """Also when C code holds the GIL, so that no thread of the executor's can see the link end."""
    file = tmp_path / "started"
    root = str(Path(__file__).parent.parent.parent.parent)
    script = textwrap.dedent(WORKER).format(
        root=root, source=SOURCE, folder=str(tmp_path), function=function, file=str(file)
    )
    worker = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    try:
        executor = int(worker.stdout.readline())
        pids = {executor, *(int(pid) for pid in file.read_text().split())}
        assert all(is_running(pid) for pid in pids)
        worker.kill()
        worker.wait()
        wait_for(lambda: not any(is_running(pid) for pid in pids), f"end of {pids}")
    finally:
        worker.kill()
        worker.wait()
        worker.stdout.close()


@pytest.mark.requirement("X63")
def test_ctrl_c_does_not_reach_calls() -> None:
    with Driver("from callyard.sdk import sleep\ndef nap():\n    sleep(1)\n    return 1") as driver:
        call = driver.start("nap")
        driver.wait_until(lambda: driver.code_requests, "request for code")
        os.killpg(driver.process.pid, signal.SIGINT)
        assert driver.wait_end(call).call_id == call
        assert driver.process.poll() is None
