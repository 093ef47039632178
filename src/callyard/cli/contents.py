"""Results that are more than JSON, on the command line: their bytes into a file, or what they are on a terminal."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from callyard.cli.quantities import show_size
from callyard.cli.streams import clean, write_stdout
from callyard.errors import UsageError
from callyard.functions.contents import Block, extension_of, read_contents, read_messages

_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._ -]|^[.-]+")
_NAME_CHARACTERS_MAX: Final = 100


def check_target(output: str) -> None:
    """Before the call runs: its result must have a place to go. Raises UsageError."""
    if output == "-":
        return
    path = Path(output)
    folder = path if path.is_dir() else path.parent
    if not folder.is_dir():
        raise UsageError(f"{output}: there is no folder {folder}")
    if not os.access(path if path.is_file() else folder, os.W_OK):
        raise UsageError(f"{output}: not writable")


def save(raw: bytes, output: str) -> list[str]:
    """Write a result to `output`, a file, a folder, or `-`; a line for each file that was written.

    Contents leave as their own bytes, anything else as JSON. Raises UsageError.
    """
    blocks = _blocks(raw)
    if blocks is None:
        return _write(output, raw + b"\n", "JSON")
    held = [block for block in blocks if block.type != "resource_link"]
    files = [block for block in held if block.type != "text"] or held
    if not files:
        raise UsageError(f"the result holds links only, nothing to write to {output}")
    if Path(output).is_dir():
        return [line for name, block in _name(files) for line in _write(str(Path(output, name)), block.to_bytes(), "")]
    if len(files) > 1:
        shown = ", ".join(name for name, _ in _name(files))
        raise UsageError(f"the result has {len(files)} files ({shown}): give a folder that is there with -o")
    return _write(output, files[0].to_bytes(), files[0].mime_type or "text")


def describe(raw: bytes) -> list[str] | None:
    """What a result holds, for a terminal: texts as they are, a line for anything else. None: plain JSON."""
    messages = read_messages(raw)
    if messages is not None:
        return [line for message in messages for line in (f"{message.role}:", *_describe([message.content]))]
    blocks = read_contents(raw)
    if blocks is None:
        return None
    lines = _describe(blocks)
    files = [block for block in blocks if block.data is not None]
    if files:
        target = next(iter(_name(files)))[0] if len(files) == 1 else "FOLDER"
        lines.append(f"save with: -o {target}")
    return lines


def _blocks(raw: bytes) -> Sequence[Block] | None:
    messages = read_messages(raw)
    return read_contents(raw) if messages is None else [message.content for message in messages]


def _describe(blocks: Sequence[Block]) -> list[str]:
    lines: list[str] = []
    for block in blocks:
        if block.text is not None:
            lines.append(clean(block.text))
        elif block.type == "resource_link":
            lines.append(clean(f"[link {block.uri}]"))
        else:
            named = f" {block.name}" if block.name else ""
            lines.append(clean(f"[{block.type}{named}, {block.mime_type}, {show_size(len(block.to_bytes()))}]"))
    return lines


def _name(blocks: Sequence[Block]) -> list[tuple[str, Block]]:
    """A file name for each: its own, made safe since the function chose it, else by its type; no two alike."""
    named: list[tuple[str, Block]] = []
    taken: set[str] = set()
    for number, block in enumerate(blocks, 1):
        own = _UNSAFE.sub("_", block.name.rpartition("/")[2])[-_NAME_CHARACTERS_MAX:].strip()
        name = own or f"{block.type}-{number}{extension_of(block.mime_type or 'text/plain')}"
        if name.casefold() in taken:
            name = f"{number}-{name}"
        taken.add(name.casefold())
        named.append((name, block))
    return named


def _write(output: str, data: bytes, kind: str) -> list[str]:
    if output == "-":
        write_stdout(data)
        return []
    try:
        Path(output).write_bytes(data)
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror}") from error
    return [f"{output}: {show_size(len(data))}" + (f", {kind}" if kind else "")]
