"""`callyard token new`: a token for a caller, and what the server is told of it."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import sys
import tempfile
from pathlib import Path

from callyard.cli.screen import Screen
from callyard.errors import UsageError
from callyard.serve.config import ServeConfig
from callyard.serve.tokens import build_caller, check_token_name, new_token, show_table
from callyard.worker.settings_file import PYPROJECT


def make_token(
    screen: Screen,
    *,
    tenant: str,
    tools: list[str],
    name: str | None,
    owner: str,
    rate: str,
    running_max: int | None,
    config: Path | None,
) -> int:
    """The token goes to stdout, once; its table to stderr, or into the file. Raises UsageError."""
    if name is None:
        name = f"{re.sub(r'[^A-Za-z0-9_-]+', '-', tenant)[:40]}-{secrets.token_hex(2)}"
    check_token_name(name)
    caller = build_caller(
        "token", name=name, tenant=tenant, tools=tools, owner=owner, rate=rate, running_max=running_max
    )
    token = new_token()
    table = show_table(token, caller)
    if config is None:
        screen.say("add this to the file that --config names; the token itself is not shown again:", style="dim")
        sys.stderr.write(table)
    else:
        append_table(config, table, name)
        screen.say(f"{name} stands in {config} now; the token is not shown again", style="dim")
    print(token, flush=True)
    return 0


def append_table(path: Path, table: str, name: str) -> None:
    """Put a token's table at the end of a file, whole or not at all, with the file's own mode. Raises UsageError, and
    leaves the file, when the result would not be one that a server takes."""
    if path.name == PYPROJECT:
        raise UsageError(f"tokens are put into a file of their own, such as callyard.toml, not into {path}")
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        mode = path.stat().st_mode & 0o7777 if path.exists() else 0o600
        if before and name in ServeConfig.read(path).tokens:
            raise UsageError(f"{path} has a token {name!r} already: give another --name")
        folder = path.resolve().parent
        handle, draft = tempfile.mkstemp(prefix=f".{path.name}-", suffix=".toml", dir=folder)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(f"{before.rstrip()}\n\n{table}" if before.strip() else table)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(draft, mode)
            ServeConfig.read(Path(draft))
            os.replace(draft, path.resolve())
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft)
            raise
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot write {path}: {error}") from error
