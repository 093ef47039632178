"""What the tests have executors run."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from callyard import function

loaded: list[str] = []


class WantsMore(Exception):
    """Cannot be made again from its `args`."""

    def __init__(self, name: str, place: int) -> None:
        super().__init__(f"{name} at {place}")


class OfItsOwn(Exception):
    def __init__(self, name: str, place: int) -> None:
        super().__init__(name, place)
        self.place = place


class Unwritable(Exception):
    def __reduce__(self) -> NoReturn:
        raise RuntimeError("not me")


class ExitsWhenWritten:
    def __reduce__(self) -> NoReturn:
        raise SystemExit(3)


class ExitsWhenRead:
    def __reduce__(self) -> Any:
        return sys.exit, (3,)


RAISES: dict[str, BaseException] = {
    "value": ValueError("bad", 3),
    "key": KeyError("k"),
    "os": FileNotFoundError(2, "No such file", "/nowhere"),
    "own": OfItsOwn("x", 7),
    "wants more": WantsMore("x", 7),
    "unwritable": Unwritable("u"),
    "group": ExceptionGroup("several", [ValueError("one"), KeyError("two")]),
    "exit": SystemExit(4),
    "interrupt": KeyboardInterrupt("by itself"),
}


def echo(value: Any) -> Any:
    return value


def fail(name: str) -> None:
    raise RAISES[name]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def append(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(f"{line}\n")


def note_and_die(path: Path) -> None:
    append(path, "die")
    die()


def note(path: Path, number: int) -> int:
    append(path, str(number))
    return number


@function(idempotent=True)
def die_once(path: Path) -> str:
    """Its first attempt dies."""
    append(path, "begun")
    if len(path.read_text().splitlines()) == 1:
        die()
    return "done"


@function(budget_ms=200)
def spin() -> NoReturn:
    while True:
        pass


def mark_and_spin(path: Path) -> NoReturn:
    path.write_text(str(os.getpid()))
    while True:
        pass


def mark_and_sleep(path: Path, seconds: float) -> None:
    path.write_text(str(os.getpid()))
    time.sleep(seconds)


def mark_and_clean(path: Path, cleaned: Path) -> None:
    append(path, str(os.getpid()))
    try:
        time.sleep(1_000)
    finally:
        append(cleaned, "done")


def mark_and_stay(path: Path) -> NoReturn:
    """Whatever interrupts it."""
    append(path, str(os.getpid()))
    while True:
        with suppress(BaseException):
            time.sleep(1_000)


def pid(_: object = None) -> int:
    return os.getpid()


def load(name: str) -> None:
    loaded.append(name)


def get_loaded() -> list[str]:
    return loaded


def fail_to_load() -> NoReturn:
    raise LookupError("no model here")


def make_lock() -> Any:
    import threading

    return threading.Lock()


def make_exiting() -> ExitsWhenRead:
    return ExitsWhenRead()


def pair(value: Any) -> Any:
    return (value, value)


def where() -> tuple[str, list[str]]:
    return os.getcwd(), sys.argv


def forbidden(value: Any) -> Any:
    """What JSON would change in a result."""
    return {"tuple": (1, 2), "keys": {1: 2}, "nan": float("nan"), "set": {1}}[value]
