"""The options of a dispatch: what is out of range is the caller's mistake, told before anything begins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from callyard.dispatch.allowance import Allowance
from callyard.dispatch.keys import check_key
from callyard.errors import UsageError
from callyard.functions.function import MILLISECONDS_MAX

NAMES_MAX: Final = 256
"""Characters of a tenant, an owner, a tool's name or a call's own id."""


def check_options(
    timeout_ms: int | None, deadline_ms: int | None, allowance: Allowance | None, owner: str | None, tenant: str
) -> None:
    """Raises UsageError."""
    if timeout_ms is not None:
        _check_ms("timeout_ms", timeout_ms, 1)
    if deadline_ms is not None:
        _check_ms("deadline_ms", deadline_ms, -MILLISECONDS_MAX)
    if allowance is not None and not isinstance(allowance, Allowance):
        raise UsageError(f"allowance is an Allowance(calls=…, wall_ms=…), got {allowance!r}")
    if owner is not None:
        check_name("owner", owner)
    if tenant != "default":
        check_name("tenant", tenant)


def check_name(name: str, value: object) -> None:
    """Raises UsageError."""
    if not isinstance(value, str) or not 1 <= len(value) <= NAMES_MAX or not value.isprintable():
        raise UsageError(f"{name} must be printable text of 1 to {NAMES_MAX} characters, got {value!r}")


def check_texts(name: str, value: object) -> dict[str, str]:
    """Raises UsageError."""
    if isinstance(value, Mapping):
        texts = dict(value)
        if all(_is_text(key) and _is_text(text) for key, text in texts.items()):
            return texts
    raise UsageError(f"{name} must be texts by name, got {value!r}")


def _is_text(value: object) -> bool:
    """What UTF-8 can carry: not a lone surrogate."""
    try:
        return isinstance(value, str) and (value.isascii() or bool(value.encode()))
    except UnicodeEncodeError:
        return False


def one_key(idempotency_key: str | None, key: str | None) -> str:
    """The key of a dispatch, by either name; empty: none. Raises UsageError."""
    if idempotency_key is not None and key is not None and key != idempotency_key:
        raise UsageError("key= is short for idempotency_key=: give one of them")
    given = idempotency_key if key is None else key
    return "" if given is None else check_key(given)


def _check_ms(name: str, value: object, low: int) -> None:
    if type(value) is not int or not low <= value <= MILLISECONDS_MAX:
        raise UsageError(f"{name} must be a whole number from {low} to {MILLISECONDS_MAX}, got {value!r}")
