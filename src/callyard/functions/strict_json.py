"""JSON as strict as it is written: no duplicate key, no NaN or infinity, no number beyond a float, no lone surrogate.

What JSON libraries let pass is refused here, for the validators of both sides. Source: tool-dispatch D4, D26.

Cost: duplicate keys need a second parse, so they are looked for only when there can be some: an object whose colons are
no more than the keys that a validator is sure to demand has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import jiter
import msgspec

from callyard.functions.encoding import ResultMisfit, encode_value, find_non_finite, is_deeper_than
from callyard.functions.misfits import loose_json, misfit

ARGUMENTS_BYTES_MAX: Final = 4 * 1024 * 1024
"""Most bytes of the arguments of one call (D4)."""
ARGUMENTS_LEVELS_MAX: Final = 128

_SYNTAX: Final = msgspec.json.Decoder(msgspec.Raw)
_SHAPE: Final = bytes.maketrans(b"123456789E+", b"000000000e0")
_LONG_INTEGER: Final = b"0" * 309
"""An integer part that may exceed the largest float."""


def check_json(raw: bytes, keys_sure: int) -> bool:
    """Refuse what a validator would let pass. Raises `ArgumentsMisfit`.

    A validated object holds each of its `keys_sure` keys, so with no more colons than that no key stands twice. True:
    a number may be too large for a float, which shows when a parameter is one.
    """
    shape = raw.translate(_SHAPE)
    may_overflow = b"0e0" in shape or (len(raw) > len(_LONG_INTEGER) and _LONG_INTEGER in shape)
    if not may_overflow and raw.count(b":") <= keys_sure:
        if b"N" not in raw and b"I" not in raw:
            return False  # no NaN or Infinity either, and a validator's own parser refuses all else
        try:
            _SYNTAX.decode(raw)
        except (msgspec.DecodeError, RecursionError):
            pass  # the parser below says where
        else:
            return False
    decode_json(raw)
    return may_overflow


def decode_json(raw: bytes, *, floats: Literal["float", "decimal"] = "float") -> Any:
    """The value of strict JSON, integers of any size. Raises `ArgumentsMisfit`.

    `floats="decimal"`: numbers with a fraction keep all their digits.
    """
    try:
        value = jiter.from_json(raw, catch_duplicate_keys=True, allow_inf_nan=False, float_mode=floats)
    except ValueError as error:
        raise loose_json(raw, error) from None
    if _may_overflow(raw):
        refuse_non_finite(value if floats == "float" else jiter.from_json(raw))
    return value


def refuse_non_finite(value: Any) -> None:
    """For decoded JSON, a validated row, or validated arguments: a tuple with a dict after it."""
    parts = value if type(value) is tuple and len(value) == 2 and type(value[1]) is dict else (value,)
    for part in parts:
        pointer = find_non_finite(part)
        if pointer is not None:
            raise misfit("expected a finite number, got one that no float can hold", "type", pointer)


def encode_arguments(args: Mapping[str, Any]) -> bytes:
    """JSON of arguments given as Python values. Raises `ArgumentsMisfit` for what JSON cannot hold."""
    try:
        return encode_value(args if type(args) is dict else dict(args))
    except ResultMisfit as error:
        pointer = error.details.get("pointer", "")
        message = error.message.removeprefix(f"{pointer}: ")
        raise misfit(message, "json", pointer, expected="a value that JSON can hold") from None


def check_bounds(raw: bytes) -> None:
    """Refuse arguments beyond `ARGUMENTS_BYTES_MAX` or `ARGUMENTS_LEVELS_MAX`. Raises `ArgumentsMisfit`."""
    if len(raw) > ARGUMENTS_BYTES_MAX:
        raise misfit(
            f"arguments of {len(raw)} bytes exceed arguments_bytes_max={ARGUMENTS_BYTES_MAX}: send less",
            "too_large",
            expected=f"at most {ARGUMENTS_BYTES_MAX} bytes",
        )
    if is_deeper_than(raw, ARGUMENTS_LEVELS_MAX):
        raise misfit(
            f"nested too deeply: expected at most {ARGUMENTS_LEVELS_MAX} levels",
            "too_deep",
            expected=f"at most {ARGUMENTS_LEVELS_MAX} levels",
        )


def _may_overflow(raw: bytes) -> bool:
    shape = raw.translate(_SHAPE)
    return b"0e0" in shape or (len(raw) > len(_LONG_INTEGER) and _LONG_INTEGER in shape)
