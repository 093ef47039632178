"""`--print-config`: each setting, its value and where it came from, as TOML that can be put into a settings file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from callyard.cli.setup import Settings
from callyard.dispatch.exporters.masking import MASK, is_secret
from callyard.serve.config import SERVE_SETTINGS, ServeConfig
from callyard.serve.tokens import table_lines
from callyard.settings import Given, Layer, Setting, show_key, show_toml
from callyard.worker.config import POOL_SETTINGS, WORKER_SETTINGS, PoolConfig
from callyard.worker.settings_file import SettingsFile

DEFAULT: Final = "default"
_PASSWORD: Final = re.compile(r"(://[^/@\s:]*:)\S+@")
"""Up to the last `@`: who writes a password with a `/` or `@` into an address shall not see it either."""
_ASSIGNED: Final = re.compile(
    r"((?:^|[?&;\s])[^=?&;\s]*(?:password|secret|token|key)[^=&;\s]*\s*=\s*)(?:'[^']*'|[^&;\s]+)", re.IGNORECASE
)
"""In a query, or in words as of a libpq connection: `host=h password=p`."""
_SECRET_NAMES: Final = frozenset({"key", "auth", "pat", "pass", "dsn", "creds"})
"""How names end, of variables and of what providers are told, beside the words that arguments have too."""


def show_worker(settings: Settings) -> str:
    """The tables worker, pools and io."""
    return "".join(f"{line}\n" for line in _worker_lines(settings))


def show_serve(settings: Settings, serve: ServeConfig, given: Layer) -> str:
    """The same, and the table serve. `given`: by the command line."""
    file = settings.found.file
    of_server = {
        name: Given(value, _serve_origin(name, file, given) if name in SERVE_SETTINGS else "callyard serve")
        for name, value in serve.worker_defaults.items()
    }
    lines = [*_worker_lines(settings.over(of_server)), "", *_serve_lines(file, serve, given)]
    return "".join(f"{line}\n" for line in lines)


def show_server(file: SettingsFile | None, serve: ServeConfig, given: Layer) -> str:
    """The table serve alone."""
    lines = [f"# settings file: {'none' if file is None else file.path}", "", *_serve_lines(file, serve, given)]
    return "".join(f"{line}\n" for line in lines)


def _worker_lines(settings: Settings) -> Iterator[str]:
    yield f"# settings file: {settings.found.why}"
    yield ""
    yield "[worker]"
    for name, one in WORKER_SETTINGS.items():
        if name != "pools":
            given = settings.given.get(name)
            yield _line(one, getattr(settings.config, name), DEFAULT if given is None else given.origin)
    for name, pool in settings.config.pools.items():
        yield ""
        yield from _pool_lines(name, pool, settings)
    file = settings.found.file
    if file is not None and "io" in file.tables:
        yield ""
        yield f"[io]  # {file.path}"
        yield from (f"{show_key(name)} = {show_toml(value)}" for name, value in mask(file.tables["io"]).items())


def _pool_lines(name: str, pool: PoolConfig, settings: Settings) -> Iterator[str]:
    yield f"[pools.{show_key(name)}]  # {settings.given['pools'].origin}"
    for one in POOL_SETTINGS.values():
        value = getattr(pool, one.name)
        if value is not None:
            yield f"{one.name} = {one.show(mask(dict(value)) if isinstance(value, Mapping) else value)}"


def _serve_lines(file: SettingsFile | None, serve: ServeConfig, given: Layer) -> Iterator[str]:
    yield "[serve]"
    for name, one in SERVE_SETTINGS.items():
        yield _line(one, getattr(serve, name), _serve_origin(name, file, given))
    for token in serve.tokens.values():
        caller = msgspec.structs.replace(token.caller, claims=mask(token.caller.claims))
        head, *lines = table_lines(MASK, caller)
        yield f"{head}  # {'' if file is None else file.path}"
        yield from lines


def _serve_origin(name: str, file: SettingsFile | None, given: Layer) -> str:
    if name in given:
        return given[name].origin
    if file is None or not {name, SERVE_SETTINGS[name].short_name} & file.tables.get("serve", {}).keys():
        return DEFAULT
    return file.origin("serve", name)


def _line(one: Setting, value: Any, origin: str) -> str:
    if value is None:
        return f"# {one.name} is not set"
    plain = isinstance(value, bool | int | list | tuple | Mapping) and not hasattr(value, "_fields")
    shown = value if plain else str(value)
    return f"{one.name} = {one.show(mask(shown))}  # {origin}"


def mask(value: Any, *, all_of_it: bool = False) -> Any:
    """`***` in place of passwords in addresses, of headers, and of what its name says is secret."""
    if isinstance(value, Mapping):
        return {
            name: mask(one, all_of_it=all_of_it or name == "headers" or is_secret(name) or _is_hidden(name))
            for name, one in value.items()
        }
    if isinstance(value, list | tuple):
        return [mask(one, all_of_it=all_of_it) for one in value]
    if all_of_it:
        return MASK
    return _ASSIGNED.sub(rf"\1{MASK}", _PASSWORD.sub(rf"\1{MASK}@", value)) if isinstance(value, str) else value


def _is_hidden(name: str) -> bool:
    return name.rpartition("_")[2].lower() in _SECRET_NAMES
