"""Where there are no executors: the client and the inline dispatcher work, and the rest says what to do.

A process stands in for Windows: what only POSIX has cannot be imported in it, or is not there.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WINDOWS = """
import asyncio, concurrent.futures, ctypes, logging, multiprocessing, pathlib, shutil, signal, socket, sqlite3, ssl
import os, subprocess, sys, sysconfig, tempfile, threading, typing, zipfile
import greenlet, jiter, jsonschema_rs, msgspec, pydantic, rich.console, typer.main  # they know Windows themselves
import fcntl

class Msvcrt:
    # its lock, by one that we have
    LK_NBLCK = 2

    @staticmethod
    def locking(fd, mode, count, flock=fcntl.flock, flags=fcntl.LOCK_EX | fcntl.LOCK_NB):
        assert os.lseek(fd, 0, os.SEEK_CUR) == 1 << 30, "beyond what is read"
        try:
            flock(fd, flags)
        except BlockingIOError as error:
            raise PermissionError(13, "Permission denied") from error

sys.modules["msvcrt"] = Msvcrt
sysconfig.get_config_vars()  # the standard library's own look at the platform is kept
for name in ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "uvloop"):
    sys.modules[name] = None
for name in ("SIGHUP", "SIGKILL", "SIGCHLD", "SIGALRM", "SIGSTOP", "SIGUSR1", "setitimer", "pthread_sigmask"):
    if hasattr(signal, name):
        delattr(signal, name)
for name in ("fork", "geteuid", "getuid", "killpg", "sched_getaffinity", "memfd_create", "posix_spawn", "O_CLOEXEC",
             "O_NONBLOCK", "pread"):
    if hasattr(os, name):
        delattr(os, name)
sys.platform = "win32"
"""
INLINE = """
import callyard
from callyard import Dispatcher, DispatcherConfig, Registry, RetryPolicy, ToolCall, derive_key, function
from callyard.dispatch.exporters.audit import AuditExporter

registry = Registry()
ran = []

@registry.tool(idempotent=True)
async def add(a: int, b: int) -> int:
    ran.append(a)
    return a + b

@registry.tool
def shout(text: str) -> str:
    return text.upper()

async def main(folder):
    audit = AuditExporter(folder / "audit.jsonl", required=True)
    async with Dispatcher(registry, store=folder / "keys.db") as dispatcher:
        try:
            async with Dispatcher(registry, store=folder / "keys.db"):
                pass
        except callyard.UsageError as error:
            print(f"is in use by process {os.getpid()}" in str(error))
        dispatcher.subscribe(audit)
        dispatcher.require(audit.admits)
        done = await dispatcher.dispatch("add", {"a": 2, "b": 3}, key="k")
        again = await dispatcher.dispatch("add", {"a": 2, "b": 3}, key="k")
        wrong = await dispatcher.dispatch("add", {"a": "x", "b": 3})
        loud = await dispatcher.dispatch("shout", {"text": "hey"})
    audit.close()
    print(done.value, again.value, len(ran), wrong.error.kind, loud.value)
    print(len((folder / "audit.jsonl").read_text().splitlines()))

asyncio.run(main(pathlib.Path(sys.argv[1])))
"""
EXECUTORS = """
import callyard

for name in ("Worker", "Yard", "run"):
    try:
        getattr(callyard, name)
    except callyard.UsageError as error:
        print(name, error)
try:
    callyard.Registry.load("functions.py")
except callyard.UsageError as error:
    print("load", error)
"""
COMMAND = """
sys.argv = ["callyard", *sys.argv[1:]]
from callyard.cli import main
main()
"""


def on_windows(code: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WINDOWS + code, *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_an_inline_dispatcher_runs(tmp_path: Path) -> None:
    done = on_windows(INLINE, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n5 5 1 schema HEY\n4\n"


def test_executors_say_what_to_do() -> None:
    done = on_windows(EXECUTORS)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["Worker", "Yard", "run", "load"]
    for line in lines:
        assert line.partition(" ")[2].startswith("executors need Linux or macOS; on Windows use WSL2")


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["--version"]], ids=" ".join)
def test_help_is_there(words: list[str]) -> None:
    done = on_windows(COMMAND, *words)
    assert done.returncode == 0, done.stderr
    assert "callyard" in done.stdout


@pytest.mark.parametrize(
    "words", [["run", "f.py", "-"], ["call", "f.py:f"], ["list", "f.py"], ["serve", "f.py"], ["doctor"]], ids=" ".join
)
def test_a_command_that_needs_executors_says_what_to_do(words: list[str]) -> None:
    done = on_windows(COMMAND, *words)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: executors need Linux or macOS; on Windows use WSL2")
