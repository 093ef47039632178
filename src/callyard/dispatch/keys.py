"""Idempotency keys: their form, one way to derive them, and the fingerprint of the arguments they stand for.

A key is the caller's name for one effect; nothing here is called unless a caller asks, and no key is ever made up for
one that brings none. Source: tool-dispatch D15, D16.

Canonical JSON is RFC 8785 with two differences, so that any language can derive the same keys: integers keep all their
digits, and keys are sorted by code point. No spaces, UTF-8, escapes only where JSON needs them. A number is its value
as a double in the shortest text that reads back: `1`, `1.0` and `1e0` are one number, as they are to JSON Schema and to
most planners, and so are `0` and `-0.0`; text that looks like a number stays text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from callyard.errors import UsageError
from callyard.functions.encoding import ResultMisfit, encode_canonical

KEY_CHARACTERS_MAX: Final = 256
_HASH_CHARACTERS: Final = 16
_FINGERPRINT_BYTES: Final = 32
_SHOWN: Final = 40


def derive_key(step_id: str, name: str, args: Mapping[str, Any] | Sequence[Any]) -> str:
    """The key of one step's call: `{step_id}:{name}:{first 16 hex of the SHA-256 of the canonical arguments}`.

    The same on every Python, machine and run. `step_id` is the caller's name for the step, of any form that a key may
    have: two steps that make the same call are two effects. Raises UsageError for arguments that JSON cannot hold and
    for a key out of form. Source: tool-dispatch D15.
    """
    import hashlib  # brings OpenSSL: not for those who derive no keys

    try:
        canonical = _canonicalise(encode_canonical(args))
    except ResultMisfit as misfit:
        raise UsageError(f"a key is derived from arguments that JSON can hold: {misfit}") from misfit
    return check_key(f"{step_id}:{name}:{hashlib.sha256(canonical).hexdigest()[:_HASH_CHARACTERS]}")


def fingerprint(args: bytes) -> str:
    """What the arguments of a keyed call are compared by: equal values, equal text. `args`: JSON.

    Raises UsageError for what is not JSON. Source: tool-dispatch D16.
    """
    from hashlib import blake2b  # as above

    return blake2b(_canonicalise(args), digest_size=_FINGERPRINT_BYTES).hexdigest()


def check_key(key: str) -> str:
    """The key, if its form is good: 1 to 256 printable characters. Raises UsageError. Source: tool-dispatch D15."""
    if not isinstance(key, str):
        raise UsageError(f"an idempotency key is text, not {type(key).__name__}")
    if not 1 <= len(key) <= KEY_CHARACTERS_MAX:
        raise UsageError(
            f"an idempotency key has 1 to {KEY_CHARACTERS_MAX} characters, this one {len(key)}: {_shorten(key)}"
        )
    if not key.isprintable():
        place = next(index for index, character in enumerate(key) if not character.isprintable())
        raise UsageError(
            f"an idempotency key has printable characters only, not U+{ord(key[place]):04X} (character {place + 1}): "
            f"{_shorten(key)}"
        )
    return key


def _shorten(key: str) -> str:
    return ascii(key if len(key) <= _SHOWN else key[:_SHOWN] + "…")


def _canonicalise(args: bytes) -> bytes:
    try:
        return _ENCODER.encode(_DECODER.decode(args))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"arguments are JSON that can be read: {error}") from error


def _read_number(text: str) -> msgspec.Raw:
    """A number with a point or an exponent, as ECMAScript writes it, which RFC 8785 asks for."""
    value = float(text)
    if not math.isfinite(value):
        raise UsageError(f"the number {text[:_SHOWN]} is larger than a double")
    mantissa, _, exponent = f"{abs(value)!r}".partition("e")
    whole, _, part = mantissa.partition(".")
    padded = whole + part
    point = len(whole) + int(exponent or 0) - (len(padded) - len(padded.lstrip("0")))  # 0.digits * 10**point
    digits = padded.strip("0")
    if not digits:
        return msgspec.Raw(b"0")
    if len(digits) <= point <= 21:
        shown = digits + "0" * (point - len(digits))
    elif 0 < point <= 21:
        shown = f"{digits[:point]}.{digits[point:]}"
    elif -6 < point <= 0:
        shown = f"0.{'0' * -point}{digits}"
    else:
        fraction = f".{digits[1:]}" if len(digits) > 1 else ""
        shown = f"{digits[0]}{fraction}e{point - 1:+d}"
    return msgspec.Raw(f"-{shown}" if value < 0 else shown)


_DECODER: Final = msgspec.json.Decoder(float_hook=_read_number)
_ENCODER: Final = msgspec.json.Encoder(order="sorted")
