"""Functions for the tests of the command line. A target, never imported by a test."""

import asyncio
import os
import signal
import time

from callyard import function, sleep


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
