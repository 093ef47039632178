"""What a worker's functions may reach, as one frozen record, built from a mapping of TOML's shape.

    [io]
    requests_at_once = 64                # limits, by the names of IoLimits
    [io.http]
    allow = ["api.example.com"]          # hosts; "*" any public one
    allow_private = ["10.1.0.0/16"]      # networks beside the public ones; true: all
    [io.files]
    data = "/srv/data"                   # a root, read as data/…
    [io.sql]
    flights = "sqlite:flights.db"        # or duckdb:…, postgresql://…; or a table with url and limits
    [io.jsonrpc]
    prices = { url = "https://…/rpc", read_only = ["quote"], headers = { Authorization = "…" } }
    [io.NAME]                            # settings of a provider that a package brings

What is not configured is refused, with the line to add. Two exceptions stand in `HttpConfig.hosts`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Final, TypeVar

from callyard.errors import UsageError
from callyard.quantities import read_duration_ms, read_size_bytes
from callyard.worker.io.addresses import HostRules, Network, normalize_pattern
from callyard.worker.io.hub import MIB, IoLimits
from callyard.worker.io.port import REPLY_BYTES_MAX

T = TypeVar("T")
MAX_BYTES: Final = 8 * MIB
TIMEOUT_MS: Final = 30_000
TIMEOUT_MS_MAX: Final = 3_600_000
ANYWHERE: Final[tuple[Network, ...]] = (ip_network("0.0.0.0/0"), ip_network("::/0"))

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    allow: tuple[str, ...] | None = None  # hosts; None: by `hosts`
    allow_private: tuple[Network, ...] = ()  # networks that may be reached though they are not public
    max_bytes: int = MAX_BYTES  # of a response's body, decompressed
    timeout_ms: int = TIMEOUT_MS  # of a request, redirects included, unless it names its own
    redirects_max: int = 10

    def hosts(self, *, sandboxed: bool) -> HostRules:
        """Whom functions may talk to when `allow` is not set.

        In `process` mode everyone public: the code can open connections of its own there, so that refusing would only
        look safe. Under a sandbox nobody: its point is that the code cannot send away what it sees.
        """
        if self.allow is not None:
            return HostRules(self.allow)
        return HostRules(() if sandboxed else ("*",))


@dataclass(frozen=True, slots=True, kw_only=True)
class RootConfig:
    path: Path
    max_bytes: int = MAX_BYTES  # of one read
    entries_max: int = 10_000  # of one listing


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseConfig:
    url: str = field(repr=False)  # may hold a password
    rows_max: int = 100_000
    max_bytes: int = MAX_BYTES  # of a result, as JSON
    timeout_ms: int = TIMEOUT_MS


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointConfig:
    url: str
    read_only: frozenset[str] = frozenset()  # methods that change nothing: kept for the task
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)  # secrets that functions never see
    max_bytes: int = MAX_BYTES
    timeout_ms: int = TIMEOUT_MS


@dataclass(frozen=True, slots=True, kw_only=True)
class IoConfig:
    limits: IoLimits = field(default_factory=IoLimits)
    http: HttpConfig = field(default_factory=HttpConfig)
    files: Mapping[str, RootConfig] = field(default_factory=dict)
    sql: Mapping[str, DatabaseConfig] = field(default_factory=dict)
    jsonrpc: Mapping[str, EndpointConfig] = field(default_factory=dict)
    others: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # settings by third party's provider

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any], base: Path | None = None) -> IoConfig:
        """`base`: the folder that relative paths start from; None: the current one. Raises `UsageError`."""
        base = Path.cwd() if base is None else base
        limits: dict[str, int] = {}
        sections: dict[str, Any] = {}
        others: dict[str, Mapping[str, Any]] = {}
        for name, value in settings.items():
            where = f"io.{name}"
            if name in _LIMITS:
                limits[name] = (_size if "bytes" in name else _count)(value, where)
            elif name in _SECTIONS:
                sections[name] = _SECTIONS[name](_table(value, where), base)
            elif isinstance(value, Mapping):
                others[_checked_name(name, "io")] = value
            else:
                known = ", ".join([*_SECTIONS, *sorted(_LIMITS)])
                raise UsageError(f"{where}: no such setting; there are {known}, and tables of other providers")
        return cls(limits=IoLimits(**limits), others=others, **sections)


# --- sections -----------------------------------------------------------------------------------------------------


def _read_http(table: Mapping[str, Any], _base: Path) -> HttpConfig:
    return HttpConfig(
        **_read(
            table,
            "io.http",
            {
                "allow": _hosts,
                "allow_private": _networks,
                "max_bytes": _max_bytes,
                "timeout": _timeout,
                "redirects_max": _count,
            },
        )
    )


def _read_files(table: Mapping[str, Any], base: Path) -> dict[str, RootConfig]:
    def path(value: object, where: str) -> Path:
        return base / Path(_text(value, where)).expanduser()

    kinds = {"path": path, "max_bytes": _max_bytes, "entries_max": _count}
    return {name: RootConfig(**_read_named(table, "io.files", name, "path", kinds)) for name in table}


def _read_sql(table: Mapping[str, Any], base: Path) -> dict[str, DatabaseConfig]:
    def url(value: object, where: str) -> str:
        text = _text(value, where)
        scheme, _, rest = text.partition(":")
        if scheme in ("sqlite", "duckdb") and rest:
            return f"{scheme}:{base / Path(rest.removeprefix('//')).expanduser()}"
        if scheme in ("postgresql", "postgres") and rest.startswith("//"):
            return text
        raise UsageError(f"{where}: expected sqlite:PATH, duckdb:PATH or postgresql://…, got {scheme!r}:…")

    kinds = {"url": url, "rows_max": _count, "max_bytes": _max_bytes, "timeout": _timeout}
    return {name: DatabaseConfig(**_read_named(table, "io.sql", name, "url", kinds)) for name in table}


def _read_jsonrpc(table: Mapping[str, Any], _base: Path) -> dict[str, EndpointConfig]:
    def url(value: object, where: str) -> str:
        text = _text(value, where)
        if not text.startswith(("http://", "https://")):
            raise UsageError(f"{where}: expected http://… or https://…, got {text!r}")
        return text

    kinds = {"url": url, "read_only": _names, "headers": _headers, "max_bytes": _max_bytes, "timeout": _timeout}
    return {name: EndpointConfig(**_read_named(table, "io.jsonrpc", name, "url", kinds)) for name in table}


_SECTIONS: Final[Mapping[str, Callable[[Mapping[str, Any], Path], Any]]] = {
    "http": _read_http,
    "files": _read_files,
    "sql": _read_sql,
    "jsonrpc": _read_jsonrpc,
}
_LIMITS: Final = frozenset(limit.name for limit in fields(IoLimits))


# --- values -------------------------------------------------------------------------------------------------------


def _read(table: Mapping[str, Any], where: str, kinds: Mapping[str, Callable[[Any, str], Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in kinds:
            raise UsageError(f"{where}.{key}: no such setting; there are {', '.join(kinds)}")
        values["timeout_ms" if key == "timeout" else key] = kinds[key](value, f"{where}.{key}")
    return values


def _read_named(
    table: Mapping[str, Any], where: str, name: str, main: str, kinds: Mapping[str, Callable[[Any, str], Any]]
) -> dict[str, Any]:
    """A name's settings: a table, or its main one alone."""
    _checked_name(name, where)
    value = table[name]
    inner = value if isinstance(value, Mapping) else {main: value}
    if main not in inner:
        raise UsageError(f"{where}.{name}: {main} is missing")
    return _read(inner, f"{where}.{name}", kinds)


def _checked_name(name: str, where: str) -> str:
    if not _NAME.fullmatch(name):
        raise UsageError(f"{where}: expected a name of letters, digits, _ and -, got {name!r}")
    return name


def _table(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{where}: expected a table, got {value!r}")
    return value


def _text(value: object, where: str) -> str:
    if isinstance(value, Path):
        return str(value)
    if not isinstance(value, str) or not value:
        raise UsageError(f"{where}: expected text, got {value!r}")
    return value


def _texts(value: object, where: str) -> list[str]:
    if isinstance(value, str) or not isinstance(value, list | tuple | set | frozenset):
        raise UsageError(f"{where}: expected a list of texts, got {value!r}")
    return [_text(one, where) for one in value]


def _names(value: object, where: str) -> frozenset[str]:
    return frozenset(_texts(value, where))


def _headers(value: object, where: str) -> tuple[tuple[str, str], ...]:
    table = _table(value, where)
    return tuple((name, _text(table[name], f"{where}.{name}")) for name in table)


def _hosts(value: object, where: str) -> tuple[str, ...]:
    try:
        return tuple(normalize_pattern(text) for text in _texts(value, where))
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from error


def _networks(value: object, where: str) -> tuple[Network, ...]:
    if isinstance(value, bool):
        return ANYWHERE if value else ()
    try:
        return tuple(ip_network(text, strict=False) for text in _texts(value, where))
    except ValueError as error:
        raise UsageError(f"{where}: {error}; expected true, false or networks such as 10.1.0.0/16") from error


def _count(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 1 << 40:
        raise UsageError(f"{where}: expected a whole number from 0, got {value!r}")
    return value


def _size(value: object, where: str) -> int:
    return _quantity(value, where, read_size_bytes, "a size such as 512KiB or 8MiB", 1 << 40)


def _max_bytes(value: object, where: str) -> int:
    expected = f"a size such as 8MiB, at most {REPLY_BYTES_MAX} bytes"
    return _quantity(value, where, read_size_bytes, expected, REPLY_BYTES_MAX)


def _timeout(value: object, where: str) -> int:
    return _quantity(value, where, read_duration_ms, "a duration such as 500ms or 30s, at most 1h", TIMEOUT_MS_MAX)


def _quantity(value: object, where: str, read: Callable[[str], float | None], expected: str, high: int) -> int:
    """A text, or a number where it needs no unit."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    number = read(str(value)) if is_number or isinstance(value, str) else None
    if number is None or not 1 <= number <= high:
        raise UsageError(f"{where}: expected {expected}, got {value!r}")
    return round(number)
