"""Functions that real executors run in the end-to-end tests. A bundle target, never imported by a test."""

import os
import signal
import subprocess
import time

from callyard import TransientError, function, sleep


@function(pure=True)
def double(x: int) -> int:
    return 2 * x


@function(idempotent=True)
def safe_nap(x: int, seconds: float = 0.002) -> int:
    sleep(seconds)
    return x


@function
def effect(x: int, path: str) -> int:
    """Leave one line for each run, in one write."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, b"%d\n" % x)
    os.close(fd)
    sleep(0.001)
    return x


@function
def nap(seconds: float) -> float:
    sleep(seconds)
    return seconds


@function
def spin(seconds: float) -> float:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    return seconds


@function
def boom(x: int) -> int:
    if x % 3 == 0:
        raise ValueError(f"{x} is divisible by 3")
    return x


@function
def die(x: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return x


@function
def moody(path: str) -> str:
    """Transient the first time, then well."""
    if not os.path.exists(path):
        with open(path, "w") as file:
            file.write("tried")
        raise TransientError("not yet")
    return "well"


@function
def program(seconds: float) -> int:
    """Wait for a program of its own."""
    return subprocess.run(["sleep", str(seconds)], check=False).returncode


@function
def say(text: str) -> str:
    print("printed:", text)
    return text


def plain(x: int) -> int:
    return x
