"""What the bench of large values calls: in an executor, and in a process of the standard library's pool."""

from __future__ import annotations

import base64

import numpy as np

from callyard import function


def add_one(x: np.ndarray) -> np.ndarray:
    return x + 1


@function
def array_in_and_out(x: np.ndarray) -> np.ndarray:
    return add_one(x)


@function
def one_of(x: np.ndarray, index: int) -> float:
    return float(x[index])


@function
def text_in_and_out(x: str) -> str:
    array = np.frombuffer(base64.b64decode(x), "f8")
    return base64.b64encode(add_one(array).tobytes()).decode()
