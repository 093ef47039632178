"""Functions for the tests of inputs and outputs. A target, never imported by a test."""

import os
from dataclasses import dataclass

from pydantic import BaseModel, field_validator

from callyard import function


@dataclass
class Trip:
    rider: str
    km: float
    tip: float = 0


@dataclass
class Fare:
    rider: str
    fare: float


class Checked(BaseModel):
    km: float

    @field_validator("km")
    @classmethod
    def is_positive(cls, km: float) -> float:
        if km < 0:
            raise ValueError("km below zero")
        return km


def note() -> None:
    if path := os.environ.get("TABLES_CALLED"):
        with open(path, "a") as file:
            file.write("called\n")


@function(pure=True)
def price(trip: Trip) -> Fare:
    note()
    if trip.km < 0:
        raise ValueError("km below zero")
    return Fare(trip.rider, trip.km * 2 + trip.tip)


@function
async def checked(row: Checked) -> float:
    note()
    return row.km


@function(exclusive=True, max_concurrency=1)
def odd_one(x: int) -> int:
    note()
    if x % 2 == 0:
        raise ValueError("even")
    return x
