"""Docstrings: the text about the function, and the texts about its parameters.

Google (`Args:`), NumPy (`Parameters` over a rule) and reST (`:param name:`) styles. Source: tool-dispatch D2.
"""

from __future__ import annotations

import inspect
import re
from typing import Final

import msgspec

_GOOGLE_SECTION: Final = re.compile(
    r"(Args|Arguments|Parameters|Returns?|Yields?|Raises|Examples?|Notes?|Attributes|See Also|Warnings?):\s*$"
)
_NUMPY_RULE: Final = re.compile(r"-{3,}\s*$")
_REST_PARAMETER: Final = re.compile(r":param\s+(?:[^:]*\s)?\*{0,2}(\w+)\s*:\s*(.*)$")
_REST_FIELD: Final = re.compile(r":(?:param|type|returns?|rtype|raises?|yields?|var|ivar)\b[^:]*:")
_GOOGLE_PARAMETER: Final = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
_NUMPY_PARAMETER: Final = re.compile(r"\*{0,2}(\w+(?:\s*,\s*\w+)*)\s*(?::.*)?$")
_OF_PARAMETERS: Final = frozenset({"Args", "Arguments", "Parameters", "Other Parameters"})


class Docstring(msgspec.Struct, frozen=True):
    summary: str = ""
    """All before the first section."""
    parameters: dict[str, str] = {}


def read_docstring(text: str | None) -> Docstring:
    """Take a docstring apart. What follows no known style is all summary."""
    if not text:
        return Docstring()
    lines = inspect.cleandoc(text).splitlines()
    summary: list[str] = []
    sections: dict[str, list[str]] = {}
    rest: list[str] = []
    section: str | None = None
    position = 0
    while position < len(lines):
        line = lines[position]
        google = _GOOGLE_SECTION.match(line)
        if google is not None:
            section = google[1]
        elif line.strip() and position + 1 < len(lines) and _NUMPY_RULE.match(lines[position + 1]):
            section = line.strip()
            position += 1
        elif _REST_FIELD.match(line):
            section = ":rest"
            rest.append(line)
        elif section is None:
            summary.append(line)
        elif section == ":rest":
            rest.append(line)
        else:
            sections.setdefault(section, []).append(line)
        position += 1
    parameters: dict[str, str] = {}
    for title in _OF_PARAMETERS & sections.keys():
        parameters |= _read_section(sections[title])
    return Docstring("\n".join(summary).strip(), parameters | _read_rest(rest))


def _read_section(lines: list[str]) -> dict[str, str]:
    """Google's entries are indented under their title, NumPy's are not; both indent the text that goes on."""
    written = [line for line in lines if line.strip()]
    if not written:
        return {}
    indent = len(written[0]) - len(written[0].lstrip())
    entry = _GOOGLE_PARAMETER if indent else _NUMPY_PARAMETER
    found: dict[str, list[str]] = {}
    names: list[str] = []
    for line in written:
        match = entry.match(line.strip()) if len(line) - len(line.lstrip()) == indent else None
        if match is not None:
            names = [name.strip() for name in match[1].split(",")]
            for name in names:
                found[name] = [match[2]] if indent and match[2] else []
        else:
            for name in names:
                found[name].append(line.strip())
    return {name: " ".join(words) for name, words in found.items() if words}


def _read_rest(lines: list[str]) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    name = ""
    for line in lines:
        match = _REST_PARAMETER.match(line)
        if match is not None:
            name = match[1]
            found[name] = [match[2]]
        elif _REST_FIELD.match(line) or not line.strip():
            name = ""
        elif name:
            found[name].append(line.strip())
    return {name: " ".join(words).strip() for name, words in found.items() if any(words)}
