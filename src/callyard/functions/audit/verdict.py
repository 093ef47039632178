"""A policy's answer."""

from __future__ import annotations

from typing import Final

import msgspec

REASONS_MAX: Final = 100
REASON_CHARACTERS_MAX: Final = 500


class Verdict(msgspec.Struct, frozen=True):
    """Whether a bundle may run, and why not. Reasons name the file and line where there is one: `tools.py:12: …`."""

    accepted: bool
    reasons: tuple[str, ...] = ()


class NoVerdict(Exception):
    """A policy was asked and gave no answer that can be used. It is asked again."""


def cut_reasons(reasons: tuple[str, ...]) -> tuple[str, ...]:
    """At most `REASONS_MAX` of at most `REASON_CHARACTERS_MAX` characters; says how many were left out."""
    kept = tuple(
        reason if len(reason) <= REASON_CHARACTERS_MAX else f"{reason[:REASON_CHARACTERS_MAX]}…"
        for reason in reasons[:REASONS_MAX]
    )
    more = len(reasons) - len(kept)
    return (*kept, f"and {more} more") if more else kept
