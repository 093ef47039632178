"""The demo's functions, called as plain Python; `make demo` runs them on every flight."""

from __future__ import annotations

import csv
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from callyard.functions.signature import Invocable

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
HEADER = (
    "year,month,day,dep_time,sched_dep_time,dep_delay,arr_time,sched_arr_time,arr_delay,"
    "carrier,flight,tailnum,origin,dest,air_time,distance,hour,minute,time_hour"
)


@pytest.fixture
def flights() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("example_flights", EXAMPLES / "flights.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # type hints are looked up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


# The miles are those of the data, whose Earth is not quite a sphere.
KM_PER_MILE = 1.609344
NEAR = 0.005


@pytest.mark.parametrize(
    ("origin", "dest", "miles"),
    [("JFK", "LAX", 2475), ("EWR", "HNL", 4963), ("LGA", "BOS", 184), ("JFK", "SJU", 1598), ("JFK", "JFK", 0)],
)
def test_distance(flights: ModuleType, origin: str, dest: str, miles: int) -> None:
    assert flights.distance(origin, dest) == pytest.approx(miles * KM_PER_MILE, rel=NEAR)


FLOWN = "2013,1,1,517,515,2,830,819,11,UA,1545,N14228,EWR,IAH,227,1400,5,15,2013-01-01T10:00:00Z"
LATE = "2013,1,1,848,1835,853,1001,1950,851,MQ,3944,N942MQ,JFK,BWI,41,184,18,35,2013-01-01T23:00:00Z"
DIVERTED = "2013,1,1,1525,1530,-5,1934,1805,NA,MQ,4525,N719MQ,LGA,XNA,NA,1147,15,30,2013-01-01T20:00:00Z"
CANCELLED = "2013,1,1,NA,1630,NA,NA,1815,NA,EV,4308,NA,EWR,RDU,NA,416,16,30,2013-01-01T21:00:00Z"


@pytest.mark.parametrize(
    ("row", "outcome", "on_time", "delay", "miles_per_minute"),
    [
        (FLOWN, "flown", True, "on_time", 1400 / 227),
        (LATE, "flown", False, "very_late", 184 / 41),
        (DIVERTED, "diverted", False, None, None),
        (CANCELLED, "cancelled", False, None, None),
    ],
)
def test_assess_of_a_row(
    flights: ModuleType, row: str, outcome: str, on_time: bool, delay: str | None, miles_per_minute: float | None
) -> None:
    (cells,) = csv.DictReader([HEADER, row])
    invocable = Invocable("assess", flights.assess.target, flights.assess.promises)

    args, kwargs = invocable.bind(json.dumps(cells).encode(), row=True, strings=True)
    found = flights.assess(*args, **kwargs)

    assert (found.outcome, found.on_time, found.delay) == (outcome, on_time, delay)
    if miles_per_minute is None:
        assert found.speed_kmh is None
    else:
        assert found.speed_kmh == pytest.approx(miles_per_minute * 60 * KM_PER_MILE, rel=NEAR)


@pytest.mark.parametrize(
    ("minutes", "word"),
    [(-1, "early"), (0, "on_time"), (14, "on_time"), (15, "late"), (59, "late"), (60, "very_late")],
)
def test_bounds_of_the_delay_classes(flights: ModuleType, minutes: int, word: str) -> None:
    assert flights.classify(minutes) == word
