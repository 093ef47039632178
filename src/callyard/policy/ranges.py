"""One check for all settings that are numbers with a range."""

from __future__ import annotations


def check_whole(name: str, value: object, low: int, high: int) -> None:
    """Raises ValueError unless `value` is an int from `low` to `high`. A bool is no number."""
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} must be a whole number from {low} to {high}, got {value!r}")


def check_number(name: str, value: object, low: float, high: float) -> None:
    """Raises ValueError unless `value` is an int or a float from `low` to `high`. Neither NaN nor a bool is."""
    if type(value) not in (int, float) or not low <= value <= high:  # type: ignore[operator]
        raise ValueError(f"{name} must be a number from {low} to {high}, got {value!r}")
