"""Durations and sizes as people write them: `250ms`, `2s`, `1.5h`, `64MiB`, `64M`, `1GB`.

What may be written is said here, once; each caller has its own bounds, and its own words for what lies outside them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

_QUANTITY: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-z]*)", re.ASCII)
_DURATIONS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000}
_BINARY: Final = (1 << 10, 1 << 20, 1 << 30)
_SIZES: Final = {
    **dict.fromkeys(("", "b"), 1),
    **dict(zip(("k", "m", "g"), _BINARY, strict=True)),
    **dict(zip(("kib", "mib", "gib"), _BINARY, strict=True)),
    **dict(zip(("kb", "mb", "gb"), (10**3, 10**6, 10**9), strict=True)),
}
"""By lower-case unit; a bare letter is binary, as in `docker run --memory 512m`."""


def read_duration_ms(text: str) -> float | None:
    """Milliseconds, perhaps a part of one; None: it is no duration. Only 0 needs no unit, and units are lower-case."""
    found = _read(text, _DURATIONS_MS)
    return 0.0 if found is None and _read(text, {"": 1}) == 0 else found


def read_size_bytes(text: str) -> float | None:
    """Bytes, perhaps a part of one; None: it is no size. Units in any case; none: bytes."""
    return _read(text.lower(), _SIZES)


def _read(text: str, units: Mapping[str, int]) -> float | None:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or match[2] not in units:
        return None
    return float(match[1]) * units[match[2]]
