"""What `callyard serve` can be told: the table `[serve]` of a TOML file, and the command line's options over it.

    [serve]
    http = "127.0.0.1:8700"
    deadline = "55s"                 # a field `deadline_ms` is written without its unit, with one in the value
    [serve.tokens.ci]                # as `callyard token new` prints it
    hash = "sha256:…"
    tenant = "acme"
    tools = ["read_*"]
    [worker]                         # settings of the worker, by their names
    [pools.gpu]                      # named pools
    [io]                             # what functions may reach

Source: tool-dispatch D36, D46, D47, D55, D57, D58; job-queue R126.
"""

from __future__ import annotations

import hashlib
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final, NamedTuple

from callyard.dispatch.config import DispatcherConfig
from callyard.errors import UsageError
from callyard.functions.function import MILLISECONDS_MAX
from callyard.quantities import read_duration_ms, read_size_bytes
from callyard.serve.gateway import DEADLINE_MS, JOBS_MAX, QUEUE_WAIT_MS_MAX, Gateway
from callyard.serve.tokens import HashedToken, Misfit, read_token
from callyard.worker.config import PoolConfig, WorkerConfig
from callyard.worker.io.config import IoConfig

HTTP_PORT: Final = 8_700
KIB: Final = 1_024
MIB: Final = 1_024 * KIB
BYTES_MAX: Final = 1 << 40
MEMORY: Final = "memory"
SQLITE: Final = "sqlite"


class Address(NamedTuple):
    host: str
    port: int

    @classmethod
    def parse(cls, text: str, *, port: int | None = None) -> Address:
        """Of `127.0.0.1:8700`, `[::1]:8700`, `localhost:0`; where `port` is given also of a host alone. Raises
        UsageError."""
        match = _ADDRESS.fullmatch(text.strip())
        number = port if match is None or match["port"] is None else int(match["port"])
        if match is None or number is None or number > 65_535:
            hint = "; a file goes before the option" if text.endswith(".py") else ""
            raise UsageError(f"expected an address such as 127.0.0.1:{HTTP_PORT} or [::1]:0, got {text!r}{hint}")
        return cls(match["ipv6"] or match["host"], number)

    @property
    def is_loopback(self) -> bool:
        """Only this machine can reach it. A name is looked up by whoever listens: `localhost` alone is trusted."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


_ADDRESS: Final = re.compile(
    r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]{2,45})\]|(?P<host>[A-Za-z0-9._-]{1,253}))(?::(?P<port>[0-9]{1,5}))?", re.ASCII
)
HTTP: Final = Address("127.0.0.1", HTTP_PORT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Checked when built. Times are milliseconds, sizes bytes."""

    http: Address | None = None  # where HTTP and MCP over HTTP listen; None: MCP on stdio
    admin: Address | None = None  # where health and metrics are; None: nowhere
    tls_cert: Path | None = None  # of `http`; with its key
    tls_key: Path | None = None
    state_dir: Path | None = None  # keys and kept results; None: a folder of the user's, by target
    store: str = SQLITE  # of idempotency keys: sqlite, under state_dir; memory; or a place, as Dispatcher(store=…)
    tokens: Mapping[str, HashedToken] = field(default_factory=dict)
    jobs_max: int = JOBS_MAX  # M: calls that were taken in and have not begun
    owner_max: int | None = None  # calls of one owner under way; None: min(1024, M/4)
    deadline_ms: int = DEADLINE_MS  # over queue and all attempts, where a call does not say
    queue_wait_ms_max: int = QUEUE_WAIT_MS_MAX
    attempt_min_ms: int = 1_000  # no attempt starts with less time left
    timeout_ms: int = 30_000  # of one attempt, where neither the call nor the function says
    slots: int = 1_024  # calls that run at once, if the executors take so many
    tenant_running: int | None = None  # of one tenant: calls that run at once
    tenant_queued: int | None = None
    tenant_bytes: int | None = None
    drain_deadline_ms: int = 30_000
    max_result_bytes: int = MIB  # a larger one becomes a preview, and is kept
    kept_ms: int = 15 * 60_000
    key_ttl_ms: int = 60_000  # so long the end of a keyed call answers later ones; an unknown outcome stands 30 days
    kept_bytes_max: int = 256 * MIB
    body_bytes_max: int = 4 * MIB
    headers_bytes_max: int = 32 * KIB
    receive_ms_max: int = 10_000  # for a request's headers, and again for its body
    connections_max: int = 1_024
    batch_max: int = 100  # calls in one JSON-RPC batch
    allowed_hosts: tuple[str, ...] = ()  # of the header Host, beside the address itself and, on loopback, localhost
    allowed_origins: tuple[str, ...] = ()  # of the header Origin, beside those of this machine while on loopback
    headers: tuple[str, ...] = ()  # names of request headers that functions may read
    owner_by_session: bool = False  # calls of one MCP session are one owner's, where they name none
    audit_file: Path | None = None  # a JSON line for each call
    audit_required: bool = False  # no call runs that could not be written there
    worker: Mapping[str, Any] = field(default_factory=dict)  # settings of WorkerConfig
    pools: Mapping[str, PoolConfig] = field(default_factory=dict)
    io: IoConfig | None = None
    file: Path | None = None  # what it was read from

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if type(value) is not int or not low <= value <= high:
                raise UsageError(f"{name} must be a whole number from {low} to {high}, got {value!r}")
        if self.http is not None and not self.http.is_loopback and not self.tokens:
            raise UsageError(
                f"{self.http} can be reached from other machines, and there is no token: whoever finds the port could "
                "call every function. Make one with `callyard token new --tenant NAME --config FILE`, and give that "
                "file with --config; or listen on 127.0.0.1"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UsageError("TLS needs both a certificate and its key: tls_cert and tls_key")
        if self.audit_required and self.audit_file is None:
            raise UsageError("audit_required needs audit_file: the file without which no call runs")
        if not self.store:
            raise UsageError("store must be sqlite, memory, the path of a SQLite file, or a redis:// URL")

    def with_settings(self, **settings: Any) -> ServeConfig:
        """The same with some settings changed. Raises UsageError."""
        _refuse_unknown(settings, [setting.name for setting in fields(self)], "")
        return replace(self, **settings)

    def folder_of(self, target: Path, environ: Mapping[str, str]) -> Path:
        """Where state is kept."""
        return default_state_dir(target, environ) if self.state_dir is None else self.state_dir

    def dispatcher(self) -> DispatcherConfig:
        return DispatcherConfig(
            timeout_ms=self.timeout_ms,
            slots=self.slots,
            queue_wait_ms_max=self.queue_wait_ms_max,
            attempt_min_ms=self.attempt_min_ms,
            drain_deadline_ms=self.drain_deadline_ms,
            lost_ttl_ms=self.kept_ms,
            ttl_ms=self.key_ttl_ms,
            tenant_running=self.tenant_running,
            tenant_queued=self.tenant_queued,
            tenant_bytes=self.tenant_bytes,
        )

    def worker_config(self, environ: Mapping[str, str], **given: Any) -> WorkerConfig:
        """The environment's settings, then the file's, then those that were given. Raises UsageError."""
        own: dict[str, Any] = {"pools": dict(self.pools)} if self.pools else {}
        own |= {"drain_deadline_ms": self.drain_deadline_ms, **self.worker, **given}
        if self.pools and "pools" in given:
            own["pools"] = {**self.pools, **given["pools"]}
        _refuse_unknown(own, [setting.name for setting in fields(WorkerConfig)], "worker.")
        return WorkerConfig.from_environment(environ, **own)

    @classmethod
    def read(cls, path: Path, settings: Mapping[str, Any] | None = None) -> ServeConfig:
        """Of a TOML file; its relative paths start from the file's folder. `settings` go before the file's. Raises
        UsageError, with file and line."""
        try:
            text = path.read_bytes().decode()
            tables = tomllib.loads(text)
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError(f"{path} is no TOML: {error}") from error
        try:
            return cls(**{**_read_tables(tables, path.absolute().parent), "file": path, **(settings or {})})
        except UsageError as error:
            line = find_line(text, error.setting) if isinstance(error, Misfit) else None
            raise UsageError(f"{path}:{line}: {error}" if line else f"{path}: {error}") from error


def default_state_dir(target: Path, environ: Mapping[str, str]) -> Path:
    """`$XDG_STATE_HOME/callyard/functions-1a2b3c4d`: by the target's name, and by its path, so that two of one name do
    not share their keys."""
    home = environ.get("XDG_STATE_HOME", "")
    base = Path(home) if home.startswith("/") else Path(environ.get("HOME") or "~").expanduser() / ".local" / "state"
    path = target.absolute()
    mark = hashlib.blake2b(os.fsencode(path.resolve()), digest_size=4).hexdigest()
    return base / "callyard" / f"{path.stem}-{mark}"


def find_line(text: str, setting: Iterable[str]) -> int | None:
    """Where a setting such as `("serve", "tokens", "ci", "tenant")` stands in a TOML text, or else the table that it is
    in; None: it cannot be told."""
    wanted = tuple(setting)
    table: tuple[str, ...] = ()
    best: int | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if (header := _HEADER.fullmatch(line)) is not None:
            table = _split_key(header[1])
            if wanted and table == wanted[: len(table)]:
                best = number
        elif (pair := _PAIR.match(line)) is not None:
            name = (*table, *_split_key(pair[1]))
            if name and name == wanted[: len(name)]:
                return number
    return best


_HEADER: Final = re.compile(r"\s*\[([^\[\]]+)\]\s*(?:#.*)?")
_PAIR: Final = re.compile(
    r"\s*((?:[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*'))*)\s*="
)
_KEY_PART: Final = re.compile(r"\"([^\"]*)\"|'([^']*)'|([A-Za-z0-9_-]+)")


def _split_key(text: str) -> tuple[str, ...]:
    return tuple(match[1] or match[2] or match[3] or "" for match in _KEY_PART.finditer(text))


# --- reading ------------------------------------------------------------------------------------------------------


Reader = Callable[[Any, str], Any]
"""Of a value and the setting's name as it is shown. Raises UsageError."""


def _read_tables(tables: Mapping[str, Any], base: Path) -> dict[str, Any]:
    _refuse_unknown(tables, ("serve", "worker", "pools", "io"), "")
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise Misfit((name,), f"{name} must be a table: [{name}]")
    settings = _read_serve(tables.get("serve", {}), base)
    if "worker" in tables:
        known = [
            setting.name for setting in fields(WorkerConfig) if setting.name not in ("pools", "executor_spawn_mode")
        ]
        _refuse_unknown(tables["worker"], known, "worker")
        settings["worker"] = tables["worker"]
        _within(("worker",), lambda: WorkerConfig(**tables["worker"]))
    pools: dict[str, PoolConfig] = {}
    for name, table in tables.get("pools", {}).items():
        if not isinstance(table, Mapping):
            raise Misfit(("pools", name), f"pools.{name} must be a table: [pools.{name}]")
        _refuse_unknown(table, [setting.name for setting in fields(PoolConfig)], f"pools.{name}")
        pools[name] = _within(("pools", name), partial(PoolConfig, **table))
    settings["pools"] = pools
    if "io" in tables:
        settings["io"] = _within(("io",), lambda: IoConfig.from_mapping(tables["io"], base))
    return settings


def _read_serve(table: Mapping[str, Any], base: Path) -> dict[str, Any]:
    readers = _readers(base)
    shown = {name.removesuffix("_ms"): name for name in readers if name.endswith("_ms")}
    shown |= {name.replace("_ms_", "_"): name for name in readers if "_ms_" in name}
    shown |= {name.replace("_bytes", ""): name for name in readers if "_bytes" in name and name != "tenant_bytes"}
    _refuse_unknown(table, [*readers, "tokens"], "serve", also=shown)
    settings: dict[str, Any] = {}
    for name, value in table.items():
        field_name = shown.get(name, name)
        if field_name in settings:
            raise Misfit(("serve", name), f"serve.{name} is there twice: {field_name} is the same setting")
        if name == "tokens":
            settings["tokens"] = _read_tokens(value)
        else:
            read = readers[field_name]
            settings[field_name] = _within(("serve", name), partial(read, value, f"serve.{name}"))
    return settings


def _read_tokens(value: Any) -> dict[str, HashedToken]:
    if not isinstance(value, Mapping):
        raise Misfit(("serve", "tokens"), "serve.tokens must be tables: [serve.tokens.NAME]")
    tokens: dict[str, HashedToken] = {}
    names: dict[bytes, str] = {}
    for name, table in value.items():
        at = ("serve", "tokens", name)
        if not isinstance(table, Mapping):
            raise Misfit(at, f"serve.tokens.{name} must be a table: [serve.tokens.{name}]")
        token = tokens[name] = _within(at, partial(read_token, name, table))
        other = names.setdefault(token.digest, name)
        if other != name:
            raise Misfit((*at, "hash"), f"serve.tokens.{name} is the same token as serve.tokens.{other}")
    return tokens


def _within(setting: tuple[str, ...], build: Callable[[], Any]) -> Any:
    """What does not fit of what is built does not fit there."""
    try:
        return build()
    except UsageError as error:
        inner = error.setting if isinstance(error, Misfit) else ()
        raise Misfit((*setting, *inner), str(error)) from error


def _refuse_unknown(table: Mapping[str, Any], known: Iterable[str], where: str, *, also: Iterable[str] = ()) -> None:
    known = list(known)
    for name in table:
        if name not in known and name not in also:
            shown = f"{where}.{name}" if where else name
            setting = (*where.split("."), name) if where else (name,)
            raise Misfit(setting, f"no setting {shown!r}; there are: {', '.join(known)}")


def _readers(base: Path) -> dict[str, Reader]:
    """How each setting of `[serve]` is read, in the order of the fields."""

    def path(value: Any, where: str) -> Path:
        return base / Path(_text(value, where)).expanduser()

    def store(value: Any, where: str) -> str:
        text = _text(value, where)
        return text if text in (SQLITE, MEMORY) or "://" in text else str(path(text, where))

    special: dict[str, Reader] = {
        "http": _http,
        "admin": lambda value, where: Address.parse(_text(value, where)),
        "tls_cert": path,
        "tls_key": path,
        "state_dir": path,
        "store": store,
        "allowed_hosts": _texts,
        "allowed_origins": _texts,
        "headers": lambda value, where: tuple(text.lower() for text in _texts(value, where)),
        "owner_by_session": _flag,
        "audit_file": path,
        "audit_required": _flag,
    }
    readers: dict[str, Reader] = {}
    for setting in fields(ServeConfig):
        name = setting.name
        if name in special:
            readers[name] = special[name]
        elif name in _RANGES:
            readers[name] = _duration if "_ms" in name else _size if "_bytes" in name else _whole
    return readers


def _http(value: Any, where: str) -> Address | None:
    if isinstance(value, bool):
        return HTTP if value else None
    return Address.parse(_text(value, where), port=HTTP_PORT)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{where}: expected text, got {value!r}")
    return value


def _texts(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise UsageError(f"{where}: expected a list of texts, got {value!r}")
    return tuple(_text(one, where) for one in value)


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{where}: expected true or false, got {value!r}")
    return value


def _whole(value: Any, where: str) -> int:
    if type(value) is not int:
        raise UsageError(f"{where}: expected a whole number, got {value!r}")
    return value


def _duration(value: Any, where: str) -> int:
    """Milliseconds as a number, or a text with its unit."""
    read = float(value) if type(value) is int else read_duration_ms(value) if isinstance(value, str) else None
    if read is None:
        raise UsageError(f"{where}: expected a duration such as 500ms, 30s or 15m, got {value!r}")
    return round(read)


def _size(value: Any, where: str) -> int:
    read = float(value) if type(value) is int else read_size_bytes(value) if isinstance(value, str) else None
    if read is None:
        raise UsageError(f"{where}: expected a size such as 512KiB or 4MiB, got {value!r}")
    return round(read)


_OPTIONAL: Final = frozenset({"owner_max", "tenant_running", "tenant_queued", "tenant_bytes"})
_RANGES: Final[Mapping[str, tuple[int, int]]] = {
    "jobs_max": (1, 2**31 - 1),
    "owner_max": (1, 2**31 - 1),
    "deadline_ms": (1, MILLISECONDS_MAX),
    "queue_wait_ms_max": (0, MILLISECONDS_MAX),
    "attempt_min_ms": (0, MILLISECONDS_MAX),
    "timeout_ms": (1, MILLISECONDS_MAX),
    "slots": (1, 1 << 20),
    "tenant_running": (1, 1 << 20),
    "tenant_queued": (0, 1 << 20),
    "tenant_bytes": (0, BYTES_MAX),
    "drain_deadline_ms": (0, 3_600_000),
    "max_result_bytes": (1_024, 64 * MIB),
    "kept_ms": (1_000, 30 * 86_400_000),
    "key_ttl_ms": (0, 30 * 86_400_000),
    "kept_bytes_max": (0, BYTES_MAX),
    "body_bytes_max": (1_024, 64 * MIB),
    "headers_bytes_max": (1_024, MIB),
    "receive_ms_max": (100, 600_000),
    "connections_max": (1, 1 << 20),
    "batch_max": (1, 10_000),
}


def gateway_of(config: ServeConfig, dispatcher: Any) -> Gateway:
    """A gateway with these settings."""
    return Gateway(
        dispatcher,
        jobs_max=config.jobs_max,
        deadline_ms=config.deadline_ms,
        queue_wait_ms_max=config.queue_wait_ms_max,
        owner_max=config.owner_max,
    )
