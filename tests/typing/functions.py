"""The functions that the cases call."""

from dataclasses import dataclass

from callyard import function


@dataclass
class Flight:
    origin: str
    km: float


@function(pure=True)
def distance(origin: str, dest: str = "LAX") -> float:
    return float(len(origin + dest))


@function
def land(flight: Flight, *, late: bool = False) -> Flight:
    return flight


@function(idempotent=True)
async def fare(cents: int, key: str = "") -> dict[str, int]:
    return {key: cents}


@function
def maybe(x: int) -> Flight | None:
    return None


def plain(x: int) -> set[int]:
    return {x}


async def plain_async(x: int) -> set[int]:
    return {x}
