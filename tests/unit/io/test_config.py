from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from callyard.errors import UsageError
from callyard.worker.io import registry
from callyard.worker.io.config import ANYWHERE, IoConfig
from callyard.worker.io.port import REPLY_BYTES_MAX, Provider

MIB = 1024 * 1024


def test_everything_that_can_be_set(tmp_path: Path) -> None:
    config = IoConfig.from_mapping(
        {
            "requests_at_once": 8,
            "cache_bytes_max": "1MiB",
            "http": {
                "allow": ["API.example.com"],
                "allow_private": ["10.0.0.0/8"],
                "max_bytes": "4MiB",
                "timeout": "2s",
            },
            "files": {"data": "in", "big": {"path": "/srv", "max_bytes": 5, "entries_max": 7}},
            "sql": {"db": "sqlite:x.db", "pg": {"url": "postgresql://u:secret@h/d", "rows_max": 3, "timeout": "1m"}},
            "jsonrpc": {
                "p": {"url": "https://h/rpc", "read_only": ["get"], "headers": {"Authorization": "secret"}},
                "q": "http://h",
            },
            "redis": {"url": "x"},
        },
        tmp_path,
    )
    assert (config.limits.requests_at_once, config.limits.cache_bytes_max, config.limits.waiters_max) == (8, MIB, 1_024)
    assert config.http.allow == ("api.example.com",)
    assert [str(network) for network in config.http.allow_private] == ["10.0.0.0/8"]
    assert (config.http.max_bytes, config.http.timeout_ms) == (4 * MIB, 2_000)
    assert config.files["data"].path == tmp_path / "in"
    assert (config.files["big"].path, config.files["big"].max_bytes, config.files["big"].entries_max) == (
        Path("/srv"),
        5,
        7,
    )
    assert config.sql["db"].url == f"sqlite:{tmp_path / 'x.db'}"
    assert (config.sql["pg"].rows_max, config.sql["pg"].timeout_ms) == (3, 60_000)
    assert config.jsonrpc["p"].read_only == {"get"}
    assert config.others == {"redis": {"url": "x"}}
    assert "secret" not in repr(config)


@pytest.mark.requirement("X42")
def test_who_is_reached_without_configuration() -> None:
    config = IoConfig.from_mapping({})
    assert config.http.hosts(sandboxed=False).permits("example.com", 443)
    assert not config.http.hosts(sandboxed=True).permits("example.com", 443)
    listed = IoConfig.from_mapping({"http": {"allow": ["example.com"]}}).http
    for sandboxed in (False, True):
        assert listed.hosts(sandboxed=sandboxed).permits("example.com", 443)
        assert not listed.hosts(sandboxed=sandboxed).permits("example.org", 443)
    assert config.http.allow_private == ()
    assert IoConfig.from_mapping({"http": {"allow_private": True}}).http.allow_private == ANYWHERE
    assert (config.files, config.sql, config.jsonrpc) == ({}, {}, {})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"requests_at_once": "many"}, "io.requests_at_once: expected a whole number"),
        ({"request_at_once": 3}, "io.request_at_once: no such setting; there are http, files, sql, jsonrpc"),
        ({"http": 3}, "io.http: expected a table"),
        ({"http": {"allow": "example.com"}}, "io.http.allow: expected a list of texts"),
        ({"http": {"allow": ["https://example.com"]}}, "io.http.allow: expected a host"),
        ({"http": {"allow_private": ["10.0.0.0/99"]}}, "io.http.allow_private: .*networks such as"),
        ({"http": {"deny": []}}, "io.http.deny: no such setting; there are allow, allow_private"),
        ({"http": {"max_bytes": "1GiB"}}, f"io.http.max_bytes: expected a size .* at most {REPLY_BYTES_MAX}"),
        ({"http": {"max_bytes": 0}}, "io.http.max_bytes"),
        ({"http": {"timeout": 3}}, "io.http.timeout: expected a duration"),
        ({"http": {"timeout": "2h"}}, "at most 1h"),
        ({"files": {"a/b": "/x"}}, "io.files: expected a name of letters"),
        ({"files": {"a": ""}}, "io.files.a.path: expected text"),
        ({"files": {"a": {"max_bytes": 3}}}, "io.files.a: path is missing"),
        ({"sql": {"a": "mysql://h"}}, "io.sql.a.url: expected sqlite:PATH"),
        ({"sql": {"a": "sqlite:"}}, "io.sql.a.url: expected sqlite:PATH"),
        ({"jsonrpc": {"a": "ftp://h"}}, "io.jsonrpc.a.url: expected http"),
    ],
)
def test_what_cannot_be_right(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        IoConfig.from_mapping(settings)


# --- providers of packages --------------------------------------------------------------------------------------------


class FromPackage(Provider):
    def __init__(self, settings: Any) -> None:
        if settings.get("broken"):
            raise RuntimeError("no server")
        self.settings = settings


def without_members(settings: Any) -> object:
    return object()


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"good": f"{__name__}:FromPackage", "gone": "no_such_module:x", "odd": f"{__name__}:without_members"}
    found = [EntryPoint(name, value, registry.ENTRY_POINTS) for name, value in values.items()]
    monkeypatch.setattr(registry, "entry_points", lambda group: found)


@pytest.mark.requirement("X42")
@pytest.mark.usefixtures("_installed")
def test_a_package_brings_a_provider() -> None:
    config = IoConfig.from_mapping({"good": {"url": "x"}})
    providers = registry.build_providers(config, sandboxed=False)
    assert sorted(providers) == ["client", "files", "good", "http", "jsonrpc", "sql"]
    assert isinstance(providers["good"], FromPackage)
    assert providers["good"].settings == {"url": "x"}


@pytest.mark.requirement("X42")
@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"unheard": {}}, "io.unheard: no such IO provider; .* of installed packages: gone, good, odd"),
        ({"gone": {}}, "io.gone: the provider no_such_module:x cannot be loaded: ModuleNotFoundError"),
        ({"good": {"broken": True}}, "cannot be loaded: RuntimeError: no server"),
        ({"odd": {}}, "io.odd: .* made object, which has no perform, is_read_only, open, close"),
    ],
)
def test_a_provider_that_cannot_be_loaded(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        registry.build_providers(IoConfig.from_mapping(settings), sandboxed=False)


@pytest.mark.usefixtures("_installed")
def test_advice_for_a_provider_that_is_not_there() -> None:
    assert r"may add: [io.good]" in registry.advise("good")
    assert "there are http, files, sql, jsonrpc" in registry.advise("unheard")
