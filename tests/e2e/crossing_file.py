"""Functions that give back what they were given, and say what it was; and values that cannot cross."""

from __future__ import annotations

import datetime as dt
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from typing import Any, NamedTuple, TypedDict
from uuid import UUID

import msgspec
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import BaseModel

from callyard import call, call_many, function, sleep


class Colour(Enum):
    RED = "red"


class Point(NamedTuple):
    x: int
    y: int


class Named(TypedDict):
    name: str


@dataclass
class Photo:
    name: str
    data: bytes
    pixels: np.ndarray


class Model(BaseModel):
    km: float


class Record(msgspec.Struct):
    data: bytes


def echo(name: str, annotation: Any, returned: Any = None) -> None:
    def give_back(x: Any) -> Any:
        return x

    give_back.__name__ = give_back.__qualname__ = name
    give_back.__annotations__ = {"x": annotation, "return": returned or annotation}
    globals()[name] = function(give_back)


for key, kind in {
    "none": None,
    "truth": bool,
    "whole": int,
    "number": float,
    "text": str,
    "raw": bytes,
    "raw_array": bytearray,
    "items": list[int],
    "pair": tuple[int, str],
    "unique": set[int],
    "mapping": dict[str, Any],
    "instant": dt.datetime,
    "day": dt.date,
    "clock": dt.time,
    "span": dt.timedelta,
    "decimal": Decimal,
    "uuid": UUID,
    "colour": Colour,
    "point": Point,
    "named": Named,
    "photo": Photo,
    "model": Model,
    "record": Record,
    "array": np.ndarray,
    "floats": NDArray[np.float32],
    "pandas_frame": pd.DataFrame,
    "polars_frame": pl.DataFrame,
    "arrow_table": pa.Table,
    "anything": Any,
}.items():
    echo(key, kind)


def cycle() -> list[Any]:
    items: list[Any] = [1]
    items.append(items)
    return items


CANNOT: dict[str, Callable[[], Any]] = {
    "float('nan')": lambda: {"x": [1.5, float("nan")]},
    "float('inf')": lambda: {"x": float("inf")},
    "pandas.NaT": lambda: {"x": pd.NaT},
    "'\\ud800'": lambda: {"x": "\ud800"},
    "1j": lambda: {"x": 1j},
    "(n for n in [])": lambda: {"x": (n for n in [])},
    "len": lambda: {"x": len},
    "object()": lambda: {"rows": [1, {"when": {"tz": object()}}]},
    "threading.Lock()": lambda: {"x": threading.Lock()},
    "{(1, 2): 3}": lambda: {"x": {(1, 2): 3}},
    "a list that holds itself": lambda: {"x": cycle()},
    "numpy.array([object()])": lambda: {"x": np.array([object()])},
    "numpy.ma.masked_array([1], [True])": lambda: {"x": np.ma.masked_array([1], [True])},
    "pandas.Series([1])": lambda: {"x": pd.Series([1])},
    "polars.LazyFrame()": lambda: {"x": pl.LazyFrame()},
    "pandas.DataFrame({'a': [object()]})": lambda: {"x": pd.DataFrame({"a": [object()]})},
    "pandas.DataFrame([[1, 2]], columns=[0, 'a'])": lambda: {"x": pd.DataFrame([[1, 2]], columns=[0, "a"])},
    "polars.DataFrame({'a': [object()]})": lambda: {"x": pl.DataFrame({"a": [object()]})},
}


@function
def make(key: str) -> Any:
    return CANNOT[key]()


@function
def nan_list() -> list[float]:
    return [1.0, float("nan")]


@function(nan="null")
def nan_null() -> list[float]:
    return [1.0, float("inf")]


@function(idempotent=True)
def double(x: np.ndarray) -> np.ndarray:
    x *= 2  # an argument is the function's own
    return x


@function
def length(data: bytes) -> int:
    return len(data)


@function
def blob(size: int) -> bytes:
    return b"x" * size


@function
def blob_by_name(size: int):
    return b"x" * size


@function
def repeated(text: str, times: int) -> str:
    return text * times


@function
def family(size: int, count: int) -> list[int]:
    """Arguments and results of subcalls, all through the arena."""
    rows = [{"x": np.full(size, float(number))} for number in range(count)]
    return [int(array[0]) for array in call_many(double, rows)]


@function
def by_name(size: int) -> str:
    return type(call("blob_by_name", {"size": size})).__name__


@function
def die_holding(x: np.ndarray) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@function
async def double_async(x: np.ndarray) -> np.ndarray:
    return call(double, x)


@function
def hold(x: np.ndarray, seconds: float) -> int:
    sleep(seconds)
    return int(x.sum())


@function
def hog(seconds: float) -> None:
    time.sleep(seconds)
