"""What became of a flight: two functions for the call list of flights that `make demo` runs.

callyard run examples/flights.py:assess build/demo/flights.csv -o out/flights.jsonl --include airports.csv
callyard call examples/flights.py:distance origin=JFK dest=LAX --include airports.csv
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from datetime import datetime
from math import asin, cos, radians, sin, sqrt
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator

from callyard import function

EARTH_RADIUS_KM = 6371.0088
ON_TIME_MINUTES = 15
VERY_LATE_MINUTES = 60

# Read once, when an executor loads this file: code -> latitude and longitude in radians.
with Path(__file__).with_name("airports.csv").open(encoding="utf-8", newline="") as _rows:
    AIRPORTS = {row["code"]: (radians(float(row["lat"])), radians(float(row["lon"]))) for row in csv.DictReader(_rows)}

# In this file NA is what other files leave empty.
Maybe = BeforeValidator(lambda cell: None if cell == "NA" else cell)


@dataclass
class Flight:
    """One row. Times are hhmm in the airport's own zone, delays and air time minutes, the distance miles."""

    year: int
    month: int
    day: int
    sched_dep_time: int
    sched_arr_time: int
    carrier: str
    flight: int
    origin: str
    dest: str
    distance: int
    hour: int
    minute: int
    time_hour: datetime
    dep_time: Annotated[int | None, Maybe] = None
    dep_delay: Annotated[int | None, Maybe] = None
    arr_time: Annotated[int | None, Maybe] = None
    arr_delay: Annotated[int | None, Maybe] = None
    tailnum: Annotated[str | None, Maybe] = None
    air_time: Annotated[int | None, Maybe] = None


@dataclass
class Assessment:
    """`delay` and `speed_kmh` are None for a flight that did not arrive where it was to go."""

    flight: str
    outcome: Literal["flown", "diverted", "cancelled"]
    on_time: bool
    delay: Literal["early", "on_time", "late", "very_late"] | None
    distance_km: float
    speed_kmh: float | None


@function(pure=True)
def distance(origin: str, dest: str) -> float:
    """Great-circle distance between two airports, in kilometres."""
    (lat_a, lon_a), (lat_b, lon_b) = AIRPORTS[origin], AIRPORTS[dest]
    square = sin((lat_b - lat_a) / 2) ** 2 + cos(lat_a) * cos(lat_b) * sin((lon_b - lon_a) / 2) ** 2
    return 2 * EARTH_RADIUS_KM * asin(sqrt(square))


@function(idempotent=True)
def assess(flight: Flight) -> Assessment:
    """Whether a flight flew, how late it arrived, how far and how fast it went."""
    km = distance(flight.origin, flight.dest)
    outcome: Literal["flown", "diverted", "cancelled"] = "flown"
    if flight.dep_time is None:
        outcome = "cancelled"
    elif flight.arr_delay is None:
        outcome = "diverted"
    delay = None if flight.arr_delay is None else classify(flight.arr_delay)
    return Assessment(
        flight=f"{flight.carrier}{flight.flight} {flight.time_hour:%Y-%m-%d} {flight.origin}-{flight.dest}",
        outcome=outcome,
        on_time=delay in ("early", "on_time"),
        delay=delay,
        distance_km=round(km, 1),
        speed_kmh=round(km / (flight.air_time / 60), 1) if flight.air_time else None,
    )


def classify(arr_delay: int) -> Literal["early", "on_time", "late", "very_late"]:
    if arr_delay < 0:
        return "early"
    if arr_delay < ON_TIME_MINUTES:
        return "on_time"
    return "late" if arr_delay < VERY_LATE_MINUTES else "very_late"
