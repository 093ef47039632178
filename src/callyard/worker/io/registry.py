"""Which providers a worker has: those that come with Callyard, and those of installed packages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from callyard.errors import UsageError
from callyard.functions.current import ASK_PROVIDER
from callyard.worker.io.client import ClientProvider
from callyard.worker.io.config import IoConfig
from callyard.worker.io.files import FilesProvider
from callyard.worker.io.http import HttpProvider
from callyard.worker.io.jsonrpc import JsonRpcProvider
from callyard.worker.io.port import Provider
from callyard.worker.io.sql import SqlProvider

ENTRY_POINTS: Final = "callyard.io"


def build_providers(config: IoConfig, *, sandboxed: bool) -> dict[str, Provider]:
    """By name. Others' are loaded only when their section is there. Raises `UsageError`."""
    providers: dict[str, Provider] = {
        "http": HttpProvider(config.http, sandboxed=sandboxed),
        "files": FilesProvider(config.files),
        "sql": SqlProvider(config.sql),
        "jsonrpc": JsonRpcProvider(config.jsonrpc),
        ASK_PROVIDER: ClientProvider(),
    }
    installed = find_installed() if config.others else {}
    for name, settings in config.others.items():
        providers[name] = _load(name, settings, installed)
    return providers


def find_installed() -> dict[str, EntryPoint]:
    """Providers of installed packages, by name; none of them is imported."""
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}


def advise(name: str) -> str:
    """What to say of a provider that is not there."""
    if name in find_installed():
        return f"the IO provider {name!r} is installed but not configured; whoever runs the worker may add: [io.{name}]"
    return f"no IO provider {name!r}; there are http, files, sql, jsonrpc, and those of the table [io]"


def _load(name: str, settings: Mapping[str, Any], installed: Mapping[str, EntryPoint]) -> Provider:
    entry = installed.get(name)
    if entry is None:
        known = ", ".join(sorted(installed)) or "none"
        raise UsageError(
            f"io.{name}: no such IO provider; there are http, files, sql, jsonrpc, and of installed packages: {known}"
        )
    where = f"io.{name}: the provider {entry.value}" + (f" of {entry.dist.name}" if entry.dist else "")
    try:
        factory: Callable[[Mapping[str, Any]], Provider] = entry.load()
        provider = factory(settings)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
    missing = [member for member in ("perform", "is_read_only", "open", "close") if not hasattr(provider, member)]
    if missing:
        raise UsageError(f"{where} made {type(provider).__name__}, which has no {', '.join(missing)}")
    return provider
