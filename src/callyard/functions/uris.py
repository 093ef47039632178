"""URIs of resources, and templates of them: `test://items/{id}/data`, RFC 6570 level 1.

A variable stands for one or more characters other than `/`, `?` and `#`, percent-decoded. Between two variables there
is text, so a match is one walk from left to right: the leftmost place of each text is as good as any other, since what
a variable may hold does not depend on which one it is. Nothing is tried twice, so the time is linear.
"""

from __future__ import annotations

import functools
import re
import urllib.parse
from typing import Final

import msgspec

URI_CHARACTERS_MAX: Final = 8 * 1024
_TEMPLATES_KEPT_MAX: Final = 1_024
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:[^\s\x00-\x1f\x7f]+")
_EXPRESSION: Final = re.compile(r"\{([^{}]*)\}")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_VALUE: Final = re.compile(r"(?:[^/?#%\s\x00-\x1f\x7f]|%[0-9A-Fa-f]{2})+")


class UriTemplate(msgspec.Struct, frozen=True):
    """`texts[0] {names[0]} texts[1] {names[1]} … texts[-1]`."""

    texts: tuple[str, ...]
    names: tuple[str, ...]

    def match(self, uri: str) -> dict[str, str] | None:
        """The variables' values, decoded; None: `uri` is none of this template."""
        if not uri.startswith(self.texts[0]) or len(uri) > URI_CHARACTERS_MAX:
            return None
        at, end = len(self.texts[0]), len(uri)
        if not self.names:
            return {} if at == end else None
        values: dict[str, str] = {}
        for name, text in zip(self.names, self.texts[1:], strict=True):
            is_last = name == self.names[-1]
            stop = uri.find(text, at + 1) if not is_last else end - len(text) if uri.endswith(text) else -1
            if stop <= at:
                return None
            value = _decode(uri[at:stop])
            if value is None:
                return None
            values[name] = value
            at = stop + len(text)
        return values


@functools.lru_cache(_TEMPLATES_KEPT_MAX)
def parse_uri(text: str) -> UriTemplate:
    """A URI or a template of URIs. Raises `ValueError` for what is neither."""
    if len(text) > URI_CHARACTERS_MAX:
        raise ValueError(f"a URI has at most {URI_CHARACTERS_MAX} characters, got {len(text)}")
    parts = _EXPRESSION.split(text)  # text, name, text, …
    texts, names = tuple(parts[::2]), tuple(parts[1::2])
    for name in names:
        if not _NAME.fullmatch(name):
            raise ValueError(f"expected {{name}} of a parameter in the URI, got {{{name}}}: {text}")
    if any("{" in part or "}" in part for part in texts):
        raise ValueError(f"a brace without its other in the URI {text}")
    if len(set(names)) < len(names):
        raise ValueError(f"a parameter stands twice in the URI {text}")
    if any(not part for part in texts[1:-1]):
        raise ValueError(f"two parameters need text between them in the URI {text}")
    if not _SCHEME.fullmatch(text):
        raise ValueError(f"expected a URI such as config://app, got {text!r}")
    if names and not _SCHEME.match(texts[0] + "x"):
        raise ValueError(f"the scheme of a URI cannot be a parameter: {text}")
    return UriTemplate(texts, names)


def match_uri(template: str, uri: str) -> dict[str, str] | None:
    """The values of the template's variables in `uri`; None: it does not match. Linear in the length of `uri`."""
    return parse_uri(template).match(uri)


def _decode(value: str) -> str | None:
    if not _VALUE.fullmatch(value):
        return None
    try:
        return urllib.parse.unquote(value, errors="strict")
    except UnicodeDecodeError:
        return None
