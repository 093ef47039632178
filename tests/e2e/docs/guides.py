"""A page as a reader uses it: its files made, its commands typed, what they print compared."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

_FILE = re.compile(r"^`(?P<name>[\w./-]+)`[^\n]*:\n\n```\w+\n(?P<text>.*?)^```$", re.M | re.S)
_CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.M | re.S)
_COMMAND = re.compile(r"^\$ (?P<command>.*)\n(?P<printed>(?:(?!\$ ).*\n)*)", re.M)
_BLOCK = re.compile(r"^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.M | re.S)


class Typed(NamedTuple):
    command: str
    printed: str
    """All that it prints to stdout, as the page says."""


def make_files(page: str, folder: Path) -> list[str]:
    """Every block under a line that begins with its file's name and ends with a colon; their names."""
    names = []
    for match in _FILE.finditer(page):
        path = folder / match["name"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(match["text"])
        names.append(match["name"])
    return names


def find_commands(page: str) -> list[Typed]:
    found = (match for block in _CONSOLE.findall(page) for match in _COMMAND.finditer(block))
    return [Typed(match["command"].partition("  #")[0].strip(), match["printed"]) for match in found]


def find_blocks(page: str, kind: str) -> list[str]:
    return [match["text"] for match in _BLOCK.finditer(page) if match["kind"] == kind]
