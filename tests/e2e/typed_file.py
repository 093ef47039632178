"""A bundle target that tests import as well, to call its functions by their objects."""

import datetime
import os
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from typing import NamedTuple, TypedDict

import msgspec
from pydantic import BaseModel

from callyard import function, sleep
from tests.e2e.typed_helpers import plus_one  # noqa: F401 - offered here
from tests.e2e.typed_helpers import triple as thrice  # noqa: F401 - offered here, under another name


@dataclass
class Flight:
    origin: str
    at: datetime.datetime


class Fare(BaseModel):
    cents: int


class Leg(msgspec.Struct):
    km: float


class Point(NamedTuple):
    x: int
    y: int


class Row(TypedDict):
    km: float


class Colour(Enum):
    RED = "red"


@function(pure=True)
def distance(origin: str, dest: str = "LAX") -> float:
    return float(len(origin + dest))


@function
def depart(flight: Flight, late: datetime.timedelta) -> Flight:
    return Flight(flight.origin, flight.at + late)


@function
async def fare(cents: int) -> Fare:
    return Fare(cents=cents)


@function
def legs(count: int) -> list[Leg]:
    return [Leg(0.5 + n) for n in range(count)]


@function
def point() -> Point:
    return Point(1, 2)


@function
def row() -> Row:
    return {"km": 2.5}


@function
def letters(text: str) -> frozenset[str]:
    return frozenset(text)


@function
def data() -> bytes:
    return b"\x00\xff"


@function
def colour(like: Colour) -> dict[Colour, Decimal]:
    return {like: Decimal("1.10")}


@function
def maybe(x: int) -> Point | None:
    return Point(x, x) if x else None


@function
def untyped(x):  # type: ignore[no-untyped-def]
    return [x]


@function
def liar(x: int) -> int:
    return str(x) if x else 0  # type: ignore[return-value]


@function(idempotent=True)
def options(key: str, timeout_ms: int, deadline_ms: int = 3, budget_ms: int = 4) -> list[str | int]:
    """Its parameters have the names of options."""
    return [key, timeout_ms, deadline_ms, budget_ms]


@function
def wait_for(gate: str, began: str, x: int) -> int:
    """Leave a line, and end when the gate is there."""
    fd = os.open(began, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, b"%d\n" % x)
    os.close(fd)
    while not os.path.exists(f"{gate}{x}"):
        sleep(0.005)
    return x


def helper() -> int:
    return 1
