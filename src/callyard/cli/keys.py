"""`callyard keys`: what is kept under idempotency keys, and the word on calls of unknown outcome."""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from callyard.cli.print_config import show_server
from callyard.cli.screen import Screen
from callyard.dispatch.stores import open_key_store
from callyard.dispatch.stores.sqlite import SqliteKeyStore
from callyard.errors import UsageError
from callyard.functions.audit.log import time_text
from callyard.functions.target import find_target
from callyard.serve.config import MEMORY, SQLITE, ServeConfig, default_state_dir
from callyard.serve.keys import KeyView, list_keys, resolve_key, scope_of, view_of
from callyard.serve.state_folder import KEYS_FILE, folders_of
from callyard.settings import Given
from callyard.worker.settings_file import SettingsFile, find_settings_file
from callyard.yard import run_sync

LOOKED_AT: Final = 10_000
"""Of a tenant's keys, to say why one cannot be resolved."""


def show_settings(target: str | None, state_dir: Path | None, config: Path | None) -> str:
    """What --print-config prints: the server's settings, of which `state_dir`, `store` and `audit_file` count here.
    Raises UsageError."""
    config, settings = _read_settings(target, config)
    given = {} if state_dir is None else {"state_dir": Given(state_dir, "--state-dir")}
    if state_dir is not None:
        settings = settings.with_settings(state_dir=state_dir)
    return show_server(None if config is None else SettingsFile.load(config), settings, given)


def _read_settings(target: str | None, config: Path | None) -> tuple[Path | None, ServeConfig]:
    """`config`: the settings file that was named; None: the one that the server finds."""
    config = config or find_settings_file(target)
    return config, ServeConfig() if config is None else ServeConfig.read(config)


class Place:
    """Where the keys of a server are. Raises UsageError."""

    def __init__(self, target: str | None, state_dir: Path | None, config: Path | None) -> None:
        config, settings = _read_settings(target, config)
        self.audit_file = settings.audit_file
        folder = state_dir or settings.state_dir
        self.url = ""
        if state_dir is None and settings.store not in (SQLITE, MEMORY):
            if "://" in settings.store:
                self.url, self.files = settings.store, []
            else:
                self.files = [Path(settings.store)]
            return
        if folder is not None:
            self.files = [folder / KEYS_FILE]
        elif target is not None:
            own = default_state_dir(_find_file(target), os.environ)
            self.files = [path / KEYS_FILE for path in folders_of(own) if (path / KEYS_FILE).is_file()]
            if not self.files:
                raise UsageError(f"no server of {target} has kept keys in {own}: give the server's --state-dir")
        else:
            said = "" if config is None else f" ({config} names no state_dir)"
            raise UsageError(f"whose keys? Give the server's FILE.py (resolve: --target FILE.py) or --state-dir{said}")


def _find_file(target: str) -> Path:
    try:
        return find_target(target).path
    except UsageError:  # it is gone, or moved: its keys may be there all the same
        return Path(target)


def list_all(place: Place, screen: Screen, *, unknown: bool, tenant: str | None, limit: int, as_json: bool) -> int:
    """Raises UsageError."""
    if place.url:
        if not unknown:
            raise UsageError("of keys in Redis those of unknown outcome can be listed: --unknown")
        found = run_sync(_list_elsewhere(place.url, tenant, limit))
    else:
        found = [key for file in place.files for key in list_keys(file, unknown=unknown, tenant=tenant, limit=limit)]
        found = found[:limit]
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n")
        return 0
    if not found:
        screen.say("no key of unknown outcome" if unknown else "no keys", style="dim")
        return 0
    rows = [("TENANT", "TOOL", "KEY", "STATE", "ENDED", "FORGOTTEN", "CALL")]
    rows += [
        (key.tenant, key.tool, key.key, key.state, _show_ms(key.ended_at_ms), _show_ms(key.expires_at_ms), key.call_id)
        for key in found
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        line = "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        print("".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in line))
    if len(found) == limit:
        screen.say(f"the first {limit}; --limit shows more", style="dim")
    return 0


def resolve_one(
    place: Place,
    screen: Screen,
    tenant: str,
    tool: str,
    key: str,
    *,
    retry: bool,
    result: str | None,
    audit: Path | None,
    as_json: bool,
) -> int:
    """0: resolved, 1: nothing unknown is kept there. Raises UsageError."""
    if retry == (result is not None):
        raise UsageError("say how it ended with --result JSON, or that it may run again with --retry: one of them")
    value: Any = None
    if result is not None:
        try:
            value = msgspec.json.decode(result)
        except msgspec.DecodeError as error:
            raise UsageError(f"--result must be JSON, a text in quotes: {error}") from error
    resolved = run_sync(_resolve(place, tenant, tool, key, value, retry=retry, audit=audit or place.audit_file))
    if as_json:
        sys.stdout.write(msgspec.json.encode({"resolved": resolved}).decode() + "\n")
    elif resolved:
        screen.say(f"{key}: it may run again" if retry else f"{key}: that is its result from now on", style="dim")
    else:
        runs = any(
            (one.tool, one.key, one.state) == (tool, key, "running")
            for file in place.files
            for one in list_keys(file, tenant=tenant, limit=LOOKED_AT)
        )
        why = ": its call is still running" if runs else ""
        screen.say(f"nothing of unknown outcome is kept for {tenant}, {tool}, {key!r}{why}", style="yellow")
    return 0 if resolved else 1


async def _resolve(
    place: Place, tenant: str, tool: str, key: str, value: Any, *, retry: bool, audit: Path | None
) -> bool:
    stores = [open_key_store(place.url)] if place.url else [SqliteKeyStore(file, owner=False) for file in place.files]
    for store in stores:
        assert store is not None
        await store.open()
        try:
            by = f"callyard keys resolve, user {os.getuid()}"
            if await resolve_key(store, scope_of(tenant, tool, key), value, retry=retry, by=by, audit_file=audit):
                return True
        finally:
            await store.close()
    return False


async def _list_elsewhere(url: str, tenant: str | None, limit: int) -> list[KeyView]:
    store = open_key_store(url)
    assert store is not None
    await store.open()
    try:
        records = await store.unknown(None if tenant is None else scope_of(tenant, "", "").tenant, limit)
    finally:
        await store.close()
    return [view_of(record) for record in records]


def _show_ms(wall_ms: int | None) -> str:
    return "-" if wall_ms is None else time_text(datetime.fromtimestamp(wall_ms / 1_000, UTC))[:-5] + "Z"
