"""Values of options: read with errors that say what was expected, and durations and sizes as they are shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, get_args

import typer

from callyard.errors import UsageError
from callyard.functions.function import NANS, check_pool_name
from callyard.quantities import read_duration_ms, read_size_bytes
from callyard.worker.failure_limit import FailureLimit
from callyard.worker.sandbox.levels import CHOICES, LEVELS

DURATION_MS_MAX: Final = 30 * 24 * 3_600_000
SIZE_BYTES_MAX: Final = 1 << 50
_DIGITS_MAX: Final = 18


def parse_duration_ms(text: str) -> int:
    """Whole milliseconds of `250ms`, `2s`, `1.5m`, `1h`. Raises typer.BadParameter."""
    milliseconds = read_duration_ms(text)
    if milliseconds is None:
        raise typer.BadParameter(f"expected a duration such as 250ms, 2s, 5m or 1h, got {text!r}")
    if milliseconds > DURATION_MS_MAX:
        raise typer.BadParameter(f"expected at most {DURATION_MS_MAX // 3_600_000}h, got {text!r}")
    if 0 < milliseconds < 1:
        raise typer.BadParameter(f"expected at least 1ms, or 0s, got {text!r}")
    return round(milliseconds)


def parse_size_bytes(text: str) -> int:
    """Bytes of `64MiB`, `1GB`, `512`. Raises typer.BadParameter."""
    size = read_size_bytes(text)
    if size is None:
        raise typer.BadParameter(f"expected a size such as 512MiB or 1GB, got {text!r}")
    if size > SIZE_BYTES_MAX:
        raise typer.BadParameter(f"expected at most {SIZE_BYTES_MAX >> 30}GiB, got {text!r}")
    return round(size)


class PoolSize(NamedTuple):
    name: str
    size: int


def parse_pool(text: str) -> PoolSize:
    """`gpu=2`. Raises typer.BadParameter."""
    name, equals, size = text.partition("=")
    try:
        check_pool_name(name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not equals:
        raise typer.BadParameter(f"expected a name and a size such as gpu=2, got {text!r}")
    return PoolSize(name, parse_count(size, 1, 1_024))


def parse_start_timeout_ms(text: str) -> int:
    """As `parse_duration_ms`, within the setting's range."""
    milliseconds = parse_duration_ms(text)
    low, high = _range_of("start_timeout_ms")
    if not low <= milliseconds <= high:
        raise typer.BadParameter(f"expected from {show_duration(low)} to {high // 3_600_000} h, got {text!r}")
    return milliseconds


def parse_count(text: str, low: int = 0, high: int | None = None) -> int:
    """A whole number of at least `low`, at most `high`. Raises typer.BadParameter."""
    expected = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
    digits = text.strip().removeprefix("+")
    if not (digits.isascii() and digits.isdigit()) or len(digits) > _DIGITS_MAX:
        raise typer.BadParameter(f"expected {expected}, got {text!r}")
    number = int(digits)
    if number < low or (high is not None and number > high):
        raise typer.BadParameter(f"expected {expected}, got {text!r}")
    return number


def parse_executors(text: str) -> int:
    return parse_count(text, 1, _range_of("executor_count")[1])


def parse_attempts(text: str) -> int:
    from callyard.worker.worker import MAX_ATTEMPTS_RANGE

    return parse_count(text, *MAX_ATTEMPTS_RANGE)


def parse_level(text: str) -> str:
    """A level of `log`. Raises typer.BadParameter."""
    from callyard.sdk import LEVELS

    return _parse_choice(text, tuple(LEVELS))


def parse_log_format(text: str) -> str:
    """How log lines are written. Raises typer.BadParameter."""
    return _parse_choice(text, ("json", "text"))


def parse_cache(text: str) -> str:
    """Whose results are kept. Raises typer.BadParameter."""
    from callyard.scheduler.tasks import CachePolicy

    return _parse_choice(text, get_args(CachePolicy))


def parse_nan(text: str) -> str:
    """What NaN in a result becomes. Raises typer.BadParameter."""
    return _parse_choice(text, NANS)


def parse_extra(text: str) -> str:
    """What becomes of columns that a function does not take. Raises typer.BadParameter."""
    from callyard.worker.columns import Extra

    return _parse_choice(text, get_args(Extra))


def parse_failure_limit(text: str) -> FailureLimit:
    """`20` or `5%`. Raises typer.BadParameter."""
    try:
        return FailureLimit.of(text)
    except UsageError:
        raise typer.BadParameter(f"expected a whole number, or a share from 0% to 100%, got {text!r}") from None


def parse_names(option: str, text: str | None) -> tuple[str, ...] | None:
    """`a,b` as names, none of them empty. Raises UsageError."""
    if text is None:
        return None
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise UsageError(f"{option} expects names with commas between, such as {option} origin,dest, got {text!r}")
    return names


def parse_sandbox(text: str) -> str:
    return _parse_choice(text, CHOICES)


def parse_sandbox_min(text: str) -> str:
    return _parse_choice(text, LEVELS)


def _parse_choice(text: str, choices: Sequence[str]) -> str:
    word = text.strip().lower()
    if word not in choices:
        raise typer.BadParameter(f"expected one of {', '.join(choices)}, got {text!r}")
    return word


def _range_of(setting: str) -> tuple[int, int]:
    from callyard.worker.config import WORKER_SETTINGS  # not for --help

    found = WORKER_SETTINGS[setting]
    return found.low, found.high


def show_duration(milliseconds: float) -> str:
    """`840 ms`, `12.3 s`, `30 s`, `4 min 05 s`, `1 h 02 min`."""
    if round(milliseconds) < 1_000:
        return f"{milliseconds:.0f} ms"
    tenths = round(milliseconds / 100)
    if tenths < 600:
        return f"{tenths / 10:.1f}".removesuffix(".0") + " s"
    minutes, seconds = divmod(round(milliseconds / 1_000), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def show_size(size: int) -> str:
    """`812 kB`, `64.2 MB`, `3.1 GB`."""
    value = float(size)
    for unit in ("B", "kB", "MB"):
        if round(value) < 1_000:
            return f"{value:.1f} {unit}" if unit == "MB" else f"{value:.0f} {unit}"
        value /= 1_000
    return f"{value:.1f} GB"
