"""As process 1 of a container: signals are handed on, orphans buried, and the exit status is the server's."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

FUNCTIONS = '''
import subprocess
import sys

from callyard import function

CHILD = "import os, time\\nif os.fork(): os._exit(0)\\ntime.sleep(0.05)"


@function
def leave_orphan() -> int:
    """Of a parent that ends at once: it becomes a child of process 1."""
    return subprocess.run([sys.executable, "-c", CHILD], check=True).returncode
'''
INIT = """
import ctypes, os, signal, sys, time
from callyard.cli.init import divide

assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # orphans come to this process, as to process 1
divide(os._exit)
WORK
"""
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="orphans go to process 1 only there")


def start(work: str) -> subprocess.Popen[str]:
    code = INIT.replace("WORK", work)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.02)


def children_of(pid: int) -> list[tuple[int, str]]:
    """Numbers and states."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            number, rest = path.read_text().split(" (", 1)
        except OSError:
            continue
        state, parent = rest.rpartition(")")[2].split()[:2]
        if int(parent) == pid:
            found.append((int(number), state))
    return found


@linux_only
def test_the_status_is_the_childs() -> None:
    for work, status in (
        ("sys.exit(7)", 7),
        ("sys.exit(0)", 0),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137),
    ):
        process = start(work)
        assert process.wait(60) == status
        process.communicate()


@linux_only
def test_signals_are_handed_on_to_the_child_alone() -> None:
    work = "signal.signal(signal.SIGHUP, lambda *_: print('hup', flush=True))\nprint('up', flush=True)\n"
    process = start(work + "while True: time.sleep(0.01)")
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    for _ in range(2):
        process.send_signal(signal.SIGHUP)
        assert process.stdout.readline() == "hup\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    process.communicate()


@linux_only
def test_orphans_are_buried_and_none_is_taken_from_the_child() -> None:
    work = (
        "import subprocess\n"
        "for _ in range(5):\n"
        "    code = 'import os, time\\nif os.fork(): os._exit(3)\\ntime.sleep(0.02)'\n"
        "    assert subprocess.run([sys.executable, '-c', code]).returncode == 3\n"
        "print('done', flush=True)\n"
        "signal.pause()"
    )
    process = start(work)
    assert process.stdout is not None
    assert process.stdout.readline() == "done\n"
    until(lambda: len(children_of(process.pid)) == 1)
    process.terminate()
    assert process.wait(60) == 143
    process.communicate()


def can_unshare() -> bool:
    program = shutil.which("unshare")
    if program is None:
        return False
    tried = subprocess.run([program, "-r", "-p", "-f", "--mount-proc", "true"], capture_output=True, check=False)
    return tried.returncode == 0


@pytest.mark.requirement("D46")
@pytest.mark.skipif(not can_unshare(), reason="no process namespaces here")
def test_a_server_as_process_one(tmp_path: Path) -> None:
    (tmp_path / "orphans.py").write_text(FUNCTIONS)
    command = [str(Path(sys.executable).with_name("callyard")), "serve", "orphans.py", "--http", "127.0.0.1:0"]
    command += ["--state-dir", str(tmp_path / "state"), "--executors", "1", "--log-format", "json"]
    unshared = ["unshare", "-r", "-p", "-f", "--mount-proc", "--kill-child", *command]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(unshared, cwd=tmp_path, stdin=subprocess.DEVNULL, stderr=log)
    try:
        lines = (tmp_path / "log").read_text
        until(lambda: "HTTP on http" in lines())
        (line,) = [line for line in lines().splitlines() if "HTTP on http" in line]
        url = json.loads(line)["message"].split()[2].rstrip(",")
        for _ in range(3):
            request = urllib.request.Request(
                f"{url}/tools/leave_orphan", b"{}", {"content-type": "application/json"}, method="POST"
            )
            with urllib.request.urlopen(request, timeout=60) as response:
                assert response.read() == b"0"
        ((one, _),) = children_of(process.pid)
        until(lambda: [state for _, state in children_of(one)] not in ([], ["Z"]) and len(children_of(one)) == 1)
        os.kill(one, signal.SIGTERM)
        assert process.wait(60) == 143, lines()
        assert children_of(one) == []
    finally:
        process.kill()
        process.wait(30)
