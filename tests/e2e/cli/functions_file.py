"""Functions for the tests of the command line. A target, never imported by a test."""

import asyncio
import logging
import os
import signal
import sys
import time

from callyard import files, function, log, progress, sleep


def note(path: str) -> None:
    """One line for each begun call, in one write."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, b"begun\n")
    os.close(fd)


@function(pure=True)
def double(x: int) -> int:
    """Twice as much.

    Nobody needs more.
    """
    return 2 * x


@function
def third(x: int, name: str = "nobody") -> int:
    if x % 3 == 0:
        raise ValueError(f"{x} of {name!r} is divisible by 3")
    return x


@function
def say(text: str) -> str:
    print("says", text)
    return text


@function
def wait_here(path: str, how: str) -> str:
    """Note that it began, then hold on in one of many ways, far longer than any test waits."""
    if not path:
        return how
    note(path)
    end = time.monotonic() + 600
    while time.monotonic() < end:
        if how == "spin":
            continue
        if how == "sleep":
            sleep(600)
        elif how == "block":
            time.sleep(600)
        elif how == "swallow":
            try:
                time.sleep(600)
            except BaseException:  # noqa: BLE001  # that is the point
                continue
    return how


@function
async def wait_async(path: str, how: str) -> str:
    if path:
        note(path)
        await asyncio.sleep(600)
    return how


@function
def until_file(path: str, other: str) -> str:
    """Note that it began, and return once the other file is there."""
    note(path)
    while not os.path.exists(other):
        sleep(0.01)
    return "done"


@function
def die(x: int) -> int:
    if x >= 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return x


@function(idempotent=True)
def length(text: str) -> int:
    return len(text)


@function
def tell(x: int) -> int:
    """Print and log more than is shown of it, then fail if odd."""
    for number in range(30):
        print(f"line {number} of {x}")
    log("fuel low", "warning", row=x)
    log("fine detail", "debug")
    logging.getLogger("tower").warning("by logging")
    if x % 2:
        raise ValueError(f"{x} is odd")
    return x


@function
def count_to(total: int, path: str) -> int:
    """Tell how far it is, half of it, and go on once the file is there."""
    for done in range(total // 2 + 1):
        progress(done, total, "counting\nup")
    log("half of it")
    print("so much is done")
    while not os.path.exists(path):
        sleep(0.01)
    return total


@function
def fails_once_both_run(folder: str, x: int, seconds: float) -> int:
    """The first of two fails then, and the other one goes on for a while."""
    note(f"{folder}/begun-{x}")
    while not os.path.exists(f"{folder}/begun-{1 - x}"):
        sleep(0.01)
    if x == 0:
        raise ValueError("the first")
    sleep(seconds)
    return x


@function
def flood(begun: str, path: str) -> str:
    """Print, log and tell progress without end until the file is there; let others run now and then."""
    n = 0
    note(begun)
    while not os.path.exists(path):
        for _ in range(100):
            n += 1
            sys.stdout.write("flood " * 20 + "\n")
            log("flood", row=n)
            progress(n, None, "flood")
        sleep(0.001)
    raise ValueError("dammed")


@function
def read_note(name: str) -> str:
    return files.read_text(name)


def _count_run(path: str) -> int:
    note(path)
    return os.stat(path).st_size // len("begun\n")


@function(pure=True)
def runs_if_pure(path: str) -> int:
    """How often it ran by now."""
    return _count_run(path)


@function
def runs(path: str) -> int:
    return _count_run(path)


@function
def not_finite(form: str) -> object:
    values: dict[str, object] = {
        "list": [1.5, float("nan"), float("inf")],
        "bytes": [b"x", float("nan")],
        "finite": [1.5],
    }
    if form == "array":
        import numpy as np

        return np.array([1.5, np.nan])
    return values[form]


@function(nan="null")
def nan_as_null(x: float) -> list[float]:
    return [x, x * float("inf")]
