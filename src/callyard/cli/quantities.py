"""Durations and sizes as people write them: `250ms`, `2s`, `5m`, `64MiB`."""

from __future__ import annotations

import re
from typing import Final

import typer

_QUANTITY: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")
_DURATIONS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000}
_SIZES: Final = {
    "": 1, "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9,
    "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30,
}


def parse_duration_ms(text: str) -> int:
    """Whole milliseconds of `250ms`, `2s`, `1.5m`, `1h`. Raises typer.BadParameter."""
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or match[2] not in _DURATIONS_MS:
        raise typer.BadParameter(f"expected a duration such as 250ms, 2s or 5m, got {text!r}")
    return round(float(match[1]) * _DURATIONS_MS[match[2]])


def parse_size_bytes(text: str) -> int:
    """Bytes of `64MiB`, `1GB`, `512`. Raises typer.BadParameter."""
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or match[2] not in _SIZES:
        raise typer.BadParameter(f"expected a size such as 64MiB or 1GB, got {text!r}")
    return round(float(match[1]) * _SIZES[match[2]])


def show_duration(milliseconds: float) -> str:
    """`0.84 s`, `12.3 s`, `4 min 05 s`, `1 h 02 min`."""
    seconds = milliseconds / 1_000
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def show_size(size: int) -> str:
    """`812 kB`, `64.2 MB`, `3.1 GB`."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1_000 or unit == "GB":
            return f"{value:.0f} {unit}" if unit in ("B", "kB") else f"{value:.1f} {unit}"
        value /= 1_000
    raise AssertionError("unreachable")
