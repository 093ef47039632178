"""Arguments as an audit file may show them. Source: tool-dispatch D29."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

MASK: Final = "***"

Masking = Callable[[str, Any], Any]
"""Called with the tool's name and its decoded arguments; returns what may be written, as JSON values."""

_SECRET: Final = re.compile(
    r"(password|passwd|passphrase|pwd|secret|token|authorization|credential|cookie|apikey|accesskey|privatekey|secretkey)s?"
)
_COUNTS: Final = re.compile(r"(max|min|num|total|input|output|prompt|completion|used?|count)\w*tokens")
"""How many, not which."""
_NAMES: Final = ("name", "key", "header")


def mask_secrets(tool: str, arguments: Any) -> Any:
    """The arguments with `***` in place of what the names of fields say is secret, at any depth.

    A name counts when it ends with such a word (`password`, `client_secret`, `authToken`, `X-Api-Key`), whatever its
    case and signs. `{"name": "Authorization", "value": …}` counts too. A secret inside other text is not seen.
    """
    if isinstance(arguments, dict):
        is_pair = "value" in arguments and any(is_secret(str(arguments.get(name, ""))) for name in _NAMES)
        return {
            key: MASK if is_secret(key) or (is_pair and key == "value") else mask_secrets(tool, value)
            for key, value in arguments.items()
        }
    if isinstance(arguments, list):
        return [mask_secrets(tool, item) for item in arguments]
    return arguments


def is_secret(name: str) -> bool:
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    match = _SECRET.search(plain)
    while match is not None and match.end() != len(plain):
        match = _SECRET.search(plain, match.start() + 1)
    return match is not None and not _COUNTS.fullmatch(plain)
