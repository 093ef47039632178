"""What a script says of itself in its comments: the block `# /// script` (PEP 723), with the packages that it needs."""

from __future__ import annotations

import re
import tomllib
from typing import Final

import msgspec

from callyard.errors import UsageError
from callyard.functions.imports import decode_source

_BLOCK: Final = re.compile(r"(?m)^# /// script$\s(?P<content>(?:^#(?:| .*)$\s)+?)^# ///$")


class Script(msgspec.Struct, frozen=True):
    """`dependencies` as pip takes them."""

    dependencies: tuple[str, ...] = ()
    requires_python: str = ""


def read_script(source: bytes, name: str) -> Script:
    """The block of a source text; empty where there is none. `name`: of the file. Raises `UsageError`."""
    try:
        text = decode_source(source).replace("\r\n", "\n")
    except (SyntaxError, UnicodeDecodeError):
        return Script()  # its own import says so
    found = list(_BLOCK.finditer(text if text.endswith("\n") else f"{text}\n"))
    if not found:
        return Script()
    if len(found) > 1:
        raise UsageError(f"{name} has {len(found)} blocks `# /// script`: expected one")
    lines = found[0]["content"].splitlines()
    try:
        table = tomllib.loads("\n".join(line.removeprefix("#").removeprefix(" ") for line in lines))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{name}: the block `# /// script` is no TOML: {error}") from error
    wanted, python = table.get("dependencies", []), table.get("requires-python", "")
    is_list = isinstance(wanted, list) and all(isinstance(item, str) and item.strip() for item in wanted)
    if not is_list or not isinstance(python, str):
        raise UsageError(f"{name}: in `# /// script`, expected dependencies = [texts] and requires-python = a text")
    return Script(tuple(item.strip() for item in wanted), python)
