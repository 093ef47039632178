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

Each field says what its setting is (`callyard.settings`). Source: tool-dispatch D36, D46, D47, D55, D57, D58; job-queue
R126.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final, NamedTuple

from callyard.dispatch.config import DispatcherConfig
from callyard.errors import UsageError
from callyard.functions.function import MILLISECONDS_MAX
from callyard.functions.target import INIT
from callyard.policy.breaker import BreakerPolicy
from callyard.serve.gateway import DEADLINE_MS, JOBS_MAX, QUEUE_WAIT_MS_MAX, Gateway
from callyard.serve.tokens import HashedToken, read_token
from callyard.settings import (
    DAY_MS,
    Given,
    Kind,
    Misfit,
    Setting,
    find_name,
    names_of,
    read_named,
    read_pairs,
    setting,
    settings_of,
    within,
)
from callyard.worker.config import PoolConfig, WorkerConfig
from callyard.worker.io.config import IoConfig
from callyard.worker.settings_file import SettingsFile

HTTP_PORT: Final = 8_700
PORT_MAX: Final = 65_535
KIB: Final = 1_024
MIB: Final = 1_024 * KIB
BYTES_MAX: Final = 1 << 40
MEMORY: Final = "memory"
SQLITE: Final = "sqlite"
EXECUTOR_NICE: Final = 5
"""Executors step back behind the loop, so that health and refusals are answered while all of them compute."""


class Address(NamedTuple):
    host: str
    port: int

    @classmethod
    def parse(cls, text: str, *, port: int | None = None) -> Address:
        """Of `127.0.0.1:8700`, `[::1]:8700`, `localhost:0`; where `port` is given also of a host alone. Raises
        UsageError."""
        match = _ADDRESS.fullmatch(text.strip())
        number = port if match is None or match["port"] is None else int(match["port"])
        if match is None or number is None:
            hint = "; a file goes before the option" if text.endswith(".py") else ""
            raise UsageError(f"expected an address such as 127.0.0.1:{HTTP_PORT} or [::1]:0, got {text!r}{hint}")
        if number > PORT_MAX:
            raise UsageError(f"expected an address with a port from 0 to {PORT_MAX}, got {text!r}")
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

    http: Address | None = setting(
        None, "where HTTP and MCP over HTTP listen; `true` is 127.0.0.1:8700; none: MCP on stdio", kind=Kind.TEXT
    )
    admin: Address | None = setting(None, "where health and metrics are; none: nowhere", kind=Kind.TEXT)
    tls_cert: Path | None = setting(None, "a certificate chain, for `http`; with its key", kind=Kind.TEXT)
    tls_key: Path | None = setting(None, "the key of it", kind=Kind.TEXT)
    state_dir: Path | None = setting(
        None, "keys and kept results; by default a folder of the user's, by target", kind=Kind.TEXT
    )
    store: str = setting(
        SQLITE, "of idempotency keys: `sqlite`, in `state_dir`; `memory`; the path of a SQLite file, or a redis:// URL"
    )
    tokens: Mapping[str, HashedToken] = field(default_factory=dict)
    jobs_max: int = setting(
        JOBS_MAX, "calls taken in that have not begun; further ones stay unread", low=1, high=2**31 - 1
    )
    owner_max: int | None = setting(
        None, "calls of one owner under way; by default min(1024, `jobs_max`/4)", low=1, high=2**31 - 1
    )
    deadline_ms: int = setting(
        DEADLINE_MS, "over queue and all attempts, where a call does not say", low=1, high=MILLISECONDS_MAX
    )
    queue_wait_ms_max: int = setting(QUEUE_WAIT_MS_MAX, "longest wait before a call begins", high=MILLISECONDS_MAX)
    attempt_min_ms: int = setting(1_000, "no attempt starts with less time left", high=MILLISECONDS_MAX)
    timeout_ms: int = setting(
        30_000, "of one attempt, where neither the call nor the function says", low=1, high=MILLISECONDS_MAX
    )
    slots: int = setting(1_024, "calls that run at once, if the executors take so many", low=1, high=1 << 20)
    breaker_failures: int = setting(
        5, "failed calls of one tool within 30 s, after which its calls are refused for a while; 0: never", high=1_000
    )
    tenant_running: int | None = setting(
        None, "of one tenant: calls that run at once; by default no limit", low=1, high=1 << 20
    )
    tenant_queued: int | None = setting(
        None, "of one tenant: calls that wait, one more is `unavailable`; by default no limit", high=1 << 20
    )
    tenant_bytes: int | None = setting(
        None, "of one tenant: the arguments of calls that wait; by default no limit", high=BYTES_MAX
    )
    drain_deadline_ms: int = setting(30_000, "what running calls get when the server stops", high=3_600_000)
    max_result_bytes: int = setting(MIB, "a larger result becomes a preview, and is kept", low=1_024, high=64 * MIB)
    kept_ms: int = setting(15 * 60_000, "how long it is kept", low=1_000, high=30 * DAY_MS)
    key_ttl_ms: int = setting(
        60_000,
        "so long the end of a keyed call answers later ones; an unknown outcome stands 30 days",
        high=30 * DAY_MS,
    )
    kept_bytes_max: int = setting(256 * MIB, "kept results of all", high=BYTES_MAX)
    body_bytes_max: int = setting(4 * MIB, "of a request", low=1_024, high=64 * MIB)
    headers_bytes_max: int = setting(32 * KIB, "of a request", low=1_024, high=MIB)
    receive_ms_max: int = setting(10_000, "for a request's headers, and again for its body", low=100, high=600_000)
    connections_max: int = setting(1_024, "open at once", low=1, high=1 << 20)
    batch_max: int = setting(100, "calls in one JSON-RPC batch", low=1, high=10_000)
    allowed_hosts: tuple[str, ...] = setting(
        (), "of the header Host, beside the address itself and, on loopback, localhost", kind=Kind.LIST
    )
    allowed_origins: tuple[str, ...] = setting(
        (), "of the header Origin, beside those of this machine while on loopback", kind=Kind.LIST
    )
    headers: tuple[str, ...] = setting((), "names of request headers that functions may read", kind=Kind.LIST)
    owner_by_session: bool = setting(False, "calls of one MCP session are one owner's, where they name none")
    audit_file: Path | None = setting(None, "a JSON line for each call, as `--calls-log`", kind=Kind.TEXT)
    audit_required: bool = setting(False, "no call runs that could not be written there")
    worker: Mapping[str, Any] = field(default_factory=dict)  # settings of WorkerConfig
    pools: Mapping[str, PoolConfig] = field(default_factory=dict)
    io: IoConfig | None = None
    file: Path | None = None  # what it was read from

    def __post_init__(self) -> None:
        for name, one in SERVE_SETTINGS.items():
            if name not in _SPECIAL:
                one.check(getattr(self, name), name)
        if self.http is not None and not self.http.is_loopback and not self.tokens:
            raise UsageError(
                f"{self.http} can be reached from other machines, and there is no token: whoever finds the port could "
                "call every function. Make one with `callyard token new --tenant NAME --config FILE`, and give that "
                "file with --config; or listen on 127.0.0.1"
            )
        if self.http is not None and self.http == self.admin and self.http.port:
            raise UsageError(f"http and admin are both {self.http}: give each an address of its own")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UsageError("TLS needs both a certificate and its key: tls_cert and tls_key")
        if self.audit_required and self.audit_file is None:
            raise UsageError("audit_required needs audit_file: the file without which no call runs")
        if not self.store:
            raise UsageError("store must be sqlite, memory, the path of a SQLite file, or a redis:// URL")

    def with_settings(self, **settings: Any) -> ServeConfig:
        """The same with some settings changed. Raises UsageError."""
        for name in settings:
            find_name(name, [one.name for one in fields(self)], ())
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
            breaker=BreakerPolicy(failures=self.breaker_failures) if self.breaker_failures else None,
            tenant_running=self.tenant_running,
            tenant_queued=self.tenant_queued,
            tenant_bytes=self.tenant_bytes,
        )

    @property
    def worker_defaults(self) -> dict[str, Any]:
        """Settings of the worker that are the server's where nothing else says them."""
        return {"drain_deadline_ms": self.drain_deadline_ms, "executor_nice": EXECUTOR_NICE}

    def worker_config(self, environ: Mapping[str, str], **given: Any) -> WorkerConfig:
        """The server's own, then the file's, then the environment's, then those that were given. Raises UsageError."""
        file = {**self.worker_defaults, **self.worker, "pools": self.pools}
        if self.pools and "pools" in given:
            given["pools"] = {**self.pools, **given["pools"]}
        return WorkerConfig.from_environment(environ, file=file, **given)

    @classmethod
    def read(cls, path: Path, settings: Mapping[str, Any] | None = None) -> ServeConfig:
        """Of a settings file. `settings` go before the file's. Raises UsageError, with file and line."""
        file = SettingsFile.load(path)

        def build() -> ServeConfig:
            own = _read_serve(file.tables.get("serve", {}), file.base)
            others = {"worker": file.worker, "pools": file.pools, "io": file.io, "file": path}
            return cls(**{**own, **others, **(settings or {})})

        return file.read(build)


def default_state_dir(target: Path, environ: Mapping[str, str]) -> Path:
    """`$XDG_STATE_HOME/callyard/functions-1a2b3c4d`: by the name of the target's file, and by its path, so that two of
    one name do not share their keys, and one has the same however it was named."""
    home = environ.get("XDG_STATE_HOME", "")
    base = Path(home) if home.startswith("/") else Path(environ.get("HOME") or "~").expanduser() / ".local" / "state"
    path = target.absolute()
    mark = hashlib.blake2b(os.fsencode(path.resolve()), digest_size=4).hexdigest()
    name = path.parent.name if path.name == INIT else path.stem
    return base / "callyard" / f"{name}-{mark}"


# --- reading ------------------------------------------------------------------------------------------------------


Reader = Callable[..., Any]
"""Of a value, the setting's name as it is shown, and `base`. Raises UsageError."""


def _read_serve(table: Mapping[str, Any], base: Path) -> dict[str, Any]:
    def read(name: str, value: Any, written: str) -> Any:
        if name == "tokens":
            return _read_tokens(value)
        shown = f"serve.{written}"
        return _SPECIAL[name](value, shown, base=base) if name in _SPECIAL else SERVE_SETTINGS[name].read(value, shown)

    return read_named({**names_of(SERVE_SETTINGS), "tokens": "tokens"}, table, ("serve",), read)


def read_serve_pairs(pairs: Iterable[str], option: str) -> dict[str, Given]:
    """`NAME=VALUE` of the command line; relative paths start from the current folder. Raises UsageError."""

    def parse(name: str, text: str, shown: str) -> Any:
        one = SERVE_SETTINGS[name]
        if name not in _SPECIAL:
            return one.parse(text, shown)
        value = one.parse(text, shown) if one.kind is Kind.LIST else text
        if name == "http":
            value = {"true": True, "false": False}.get(text, text)  # as in the file
        return _SPECIAL[name](value, shown, base=Path.cwd())

    return read_pairs(names_of(SERVE_SETTINGS), pairs, option, parse)


def _read_tokens(value: Any) -> dict[str, HashedToken]:
    if not isinstance(value, Mapping):
        raise UsageError("serve.tokens must be tables: [serve.tokens.NAME]")
    tokens: dict[str, HashedToken] = {}
    names: dict[bytes, str] = {}
    for name, table in value.items():
        if not isinstance(table, Mapping):
            raise Misfit((name,), f"serve.tokens.{name} must be a table: [serve.tokens.{name}]")
        token = tokens[name] = within((name,), partial(read_token, name, table))
        other = names.setdefault(token.digest, name)
        if other != name:
            raise Misfit((name, "hash"), f"serve.tokens.{name} is the same token as serve.tokens.{other}")
    return tokens


def _http(value: Any, where: str, base: Path) -> Address | None:
    if isinstance(value, bool):
        return HTTP if value else None
    return Address.parse(_text(value, where), port=HTTP_PORT)


def _address(value: Any, where: str, base: Path) -> Address:
    return Address.parse(_text(value, where))


def _path(value: Any, where: str, base: Path) -> Path:
    return base / Path(_text(value, where)).expanduser()


def _store(value: Any, where: str, base: Path) -> str:
    text = _text(value, where)
    return text if text in (SQLITE, MEMORY) or "://" in text else str(_path(text, where, base))


def _texts(value: Any, where: str, base: Path) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise UsageError(f"{where}: expected a list of texts, got {value!r}")
    return tuple(_text(one, where) for one in value)


def _names(value: Any, where: str, base: Path) -> tuple[str, ...]:
    return tuple(text.lower() for text in _texts(value, where, base))


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{where}: expected text, got {value!r}")
    return value


SERVE_SETTINGS: Final[Mapping[str, Setting]] = settings_of(ServeConfig)
_SPECIAL: Final[Mapping[str, Reader]] = {
    "http": _http,
    "admin": _address,
    "tls_cert": _path,
    "tls_key": _path,
    "state_dir": _path,
    "store": _store,
    "allowed_hosts": _texts,
    "allowed_origins": _texts,
    "headers": _names,
    "audit_file": _path,
}
"""How those are read whose value is no plain number, text or flag. Relative paths start at `base`."""


def gateway_of(config: ServeConfig, dispatcher: Any) -> Gateway:
    """A gateway with these settings."""
    return Gateway(
        dispatcher,
        jobs_max=config.jobs_max,
        deadline_ms=config.deadline_ms,
        queue_wait_ms_max=config.queue_wait_ms_max,
        owner_max=config.owner_max,
    )
