"""Functions of runs that are killed. A target, never imported by a test."""

import os
import time

from callyard import call, function, sleep


def note(name: str, x: int) -> None:
    """One line for each begun call, in one write, which a kill does not cut."""
    fd = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, b"%d\n" % x)
    os.close(fd)


@function
def effect(x: int) -> int:
    note("effects", x)
    time.sleep(0.001)
    if x % 50 == 7 and not os.path.exists("mended"):
        raise ValueError(f"no {x}")
    return 2 * x


@function(idempotent=True)
def words(x: int) -> dict[str, object]:
    """Its sets, and the order in which they are walked, are to be the same after a kill.

    From row 160, 320 and 480 on it waits for a file, so that there is time for a kill.
    """
    note("effects", x)
    gate = ("", "first", "second", "mended")[x // 160]
    while gate and not os.path.exists(gate):
        sleep(0.01)
    names = {f"name{x}", f"word{x}", None, f"item{x}"}
    if x % 50 == 7:
        raise ValueError(f"no {object()}")
    return {"set": names - {None}, "walked": [str(hash(f"name{x}")), *(name for name in names if name)], "b": 1, "a": 2}


@function
def charge(x: int) -> int:
    note("charges", x)
    return x


@function(idempotent=True)
def order(x: int) -> int:
    """A call with a promise that makes one without."""
    note("orders", x)
    charged: int = call(charge, x=x)
    note("charged", x)
    while x == 30 and not os.path.exists("mended"):
        sleep(0.01)
    return charged
