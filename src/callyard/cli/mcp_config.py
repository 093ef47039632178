"""`callyard mcp-config`: what an MCP client's settings must say so that it finds this target.

Clients start servers from a folder and with a PATH of their own, so every path is absolute. The formats, by each
client's own documentation:

| client | file | stdio | HTTP |
| --- | --- | --- | --- |
| claude | `claude_desktop_config.json`, the desktop app's; HTTP: `.mcp.json` | `mcpServers` | `type`, `url` |
| cursor | `~/.cursor/mcp.json` | `mcpServers` | `url` |
| vscode | `.vscode/mcp.json` of the project | `servers`, `type` | `type`, `url` |

A token is never written: the settings name the variable that holds it, or have the client ask for it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from callyard.cli.screen import Screen
from callyard.errors import UsageError
from callyard.extras import missing
from callyard.functions.target import INIT, find_target

CLIENTS: Final = ("claude", "cursor", "vscode")
FILE_BYTES_MAX: Final = 8 * 1024 * 1024
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)

Settings = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What was asked for. `options` are those of `callyard serve`."""

    target: str
    client: str
    name: str | None = None
    http: str | None = None
    token_env: str | None = None
    options: tuple[str, ...] = ()


def show_config(
    wanted: Wanted,
    screen: Screen,
    check_options: Callable[[Sequence[str]], list[str]],
    *,
    write: bool,
    file: Path | None,
) -> int:
    """Print the settings, or put them into the client's file. `check_options` takes the target and the options of
    `serve`, and gives them back with absolute paths. Raises UsageError."""
    settings = build_settings(wanted, check_options)
    if not write and file is None:
        print(msgspec.json.format(msgspec.json.encode(settings), indent=2).decode())
        return 0
    path = file or find_file(wanted.client, http=wanted.http is not None, environ=os.environ)
    backup = merge_into(path, settings)
    if backup is None:
        screen.say(f"{path} has it: restart {wanted.client} to see it", style="dim")
    else:
        screen.say(f"{path} has it now, what was there is in {backup}; restart {wanted.client} to see it", style="dim")
    return 0


def build_settings(wanted: Wanted, check_options: Callable[[Sequence[str]], list[str]]) -> Settings:
    """The whole of a settings file with this server alone. Raises UsageError."""
    path, own_name = _locate(wanted.target)
    name = wanted.name or re.sub(r"[^A-Za-z0-9_-]+", "-", own_name)[:64].strip("-") or "callyard"
    if not _NAME.fullmatch(name):
        raise UsageError(f"--name is 1 to 64 letters, digits, _ and -, got {name!r}")
    if wanted.http is None:
        if wanted.token_env is not None:
            raise UsageError("--token-env goes with --http: on stdio the client starts the server, and needs no token")
        if find_spec("mcp") is None:
            raise missing("serve", "callyard serve", "mcp")
        entry: Settings = {
            "command": str(find_callyard()),
            "args": ["serve", *check_options((str(path), *wanted.options))],
        }
        if wanted.client == "vscode":
            entry = {"type": "stdio", **entry}
        return {_table(wanted.client): {name: entry}}
    if wanted.options:
        raise UsageError(f"with --http the server is started by you, and {wanted.options[0]} goes to it")
    entry = {} if wanted.client == "cursor" else {"type": "http"}
    entry["url"] = check_url(wanted.http)
    settings: Settings = {_table(wanted.client): {name: entry}}
    if wanted.token_env is not None:
        if not _VARIABLE.fullmatch(wanted.token_env):
            raise UsageError(f"--token-env is the name of a variable, got {wanted.token_env!r}")
        entry["headers"] = {"Authorization": f"Bearer {_refer_to(wanted.client, wanted.token_env)}"}
        if wanted.client == "vscode":
            settings["inputs"] = [
                {
                    "type": "promptString",
                    "id": wanted.token_env,
                    "description": f"The token of {name}",
                    "password": True,
                }
            ]
    return settings


def _locate(given: str) -> tuple[Path, str]:
    """Where the target is, whatever folder its server is started in, and what to call it. Raises UsageError."""
    target = find_target(given)
    if target.function is not None:
        raise UsageError(f"all of {target.given} is served: which of its functions a caller sees is up to its token")
    path = target.folder or target.path
    again = find_target(path)
    if (again.root, again.module) != (target.root, target.module):
        raise UsageError(
            f"{given} is found from {target.root} only, and clients start servers elsewhere: put an {INIT} into its"
            " folders, or name a file that imports it"
        )
    return path, target.name.removesuffix(".py")


def check_url(url: str) -> str:
    """Raises UsageError for what is no address of a server's MCP; one without a path gets it."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise UsageError(f"--http is where the server listens, such as http://127.0.0.1:8700/mcp, got {url!r}")
    if parts.username is not None or parts.password is not None:
        raise UsageError("--http holds no password: give the name of a variable with --token-env")
    return parts._replace(path="/mcp").geturl() if parts.path in ("", "/") else url


def find_callyard() -> Path:
    """The command of the interpreter that runs this. Raises UsageError."""
    for folder in (Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))):
        path = folder.absolute() / "callyard"
        if os.access(path, os.X_OK):
            return path
    found = shutil.which("callyard")
    if found is None:
        raise UsageError(f"no command callyard beside {sys.executable}: is the package installed there?")
    return Path(found).absolute()


def find_file(client: str, *, http: bool, environ: Mapping[str, str], platform: str = sys.platform) -> Path:
    """Where the client reads its settings."""
    home = Path(environ.get("HOME") or "~").expanduser()
    if client == "vscode":
        return Path(".vscode/mcp.json").absolute()
    if client == "cursor":
        return home / ".cursor" / "mcp.json"
    if http:
        return Path(".mcp.json").absolute()
    if platform == "darwin":
        return home / "Library" / "Application Support" / "Claude" / "claude_desktop_config.json"
    return Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "Claude" / "claude_desktop_config.json"


def merge_into(path: Path, settings: Settings) -> Path | None:
    """Put them into the file; what else is there stays. The copy of what was there; None: there was nothing, or nothing
    had to change. Raises UsageError, and then nothing was changed."""
    path = path.resolve()
    try:
        before = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    merged = _merge(_parse(path, before), settings, path)
    if before.strip() and merged == _parse(path, before):
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        backup = _keep_copy(path) if before else None
        _replace(path, msgspec.json.format(msgspec.json.encode(merged), indent=2) + b"\n")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    return backup


def _parse(path: Path, text: bytes) -> Settings:
    if len(text) > FILE_BYTES_MAX:
        raise UsageError(f"{path} has {len(text):,} bytes: that is no settings file")
    if not text.strip():
        return {}
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UsageError(
            f"{path} is left alone: it is not plain JSON, which has no comments ({error}); leave out --write, and put"
            " there by hand what is printed"
        ) from error
    if not isinstance(found, dict):
        raise UsageError(f"{path} is left alone: expected a JSON object in it")
    return found


def _merge(before: Settings, settings: Settings, path: Path) -> Settings:
    merged = dict(before)
    for key, value in settings.items():
        if key == "inputs":
            wanted = {one["id"] for one in value}
            there = merged.get(key, [])
            if not isinstance(there, list):
                raise UsageError(f"{path} is left alone: expected a list as its {key!r}")
            merged[key] = [one for one in there if not (isinstance(one, dict) and one.get("id") in wanted)] + value
        else:
            there = merged.get(key, {})
            if not isinstance(there, dict):
                raise UsageError(f"{path} is left alone: expected an object as its {key!r}")
            merged[key] = {**there, **value}
    return merged


def _keep_copy(path: Path) -> Path:
    """Beside it, under a name that is free."""
    number = 0
    while True:
        number += 1
        backup = path.with_name(f"{path.name}.bak" if number == 1 else f"{path.name}.bak-{number}")
        try:
            with backup.open("xb"):
                pass
        except FileExistsError:
            continue
        shutil.copy2(path, backup)
        return backup


def _replace(path: Path, content: bytes) -> None:
    """Whole or not at all, with the mode that it had."""
    file, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(file, "wb") as stream:
            stream.write(content)
        if path.exists():
            shutil.copymode(path, name)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _table(client: str) -> str:
    return "servers" if client == "vscode" else "mcpServers"


def _refer_to(client: str, variable: str) -> str:
    """How the client's settings name what they do not hold."""
    return {"claude": "${%s}", "cursor": "${env:%s}", "vscode": "${input:%s}"}[client] % variable
