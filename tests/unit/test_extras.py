"""A library that is not there: one sentence with the line that installs it, from every place that needs one."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from pathlib import Path

import pytest

from callyard.errors import UsageError
from callyard.extras import missing, needs, pip_line
from callyard.worker.io.config import DatabaseConfig
from callyard.worker.io.sql_duckdb import DuckdbDatabase
from callyard.worker.io.sql_postgres import PostgresDatabase
from callyard.worker.io.threads import Threads

ROOT = Path(__file__).parents[2]


def test_a_missing_library_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError) as refused, needs("parquet", "Parquet"):
        importlib.import_module("pyarrow.parquet")
    assert str(refused.value) == "Parquet needs pyarrow: pip install 'callyard[parquet]'"


def test_one_that_is_there_and_does_not_fit_is_told_apart() -> None:
    with pytest.raises(UsageError) as refused, needs("redis", "a key store"):
        raise ImportError("no name X", name="redis.asyncio")
    assert str(refused.value).endswith("pip install 'callyard[redis]' (there is one that does not fit: no name X)")


@pytest.mark.parametrize("error", [ModuleNotFoundError("x", name="callyard.none"), ImportError("x"), ValueError("x")])
def test_a_fault_of_ours_stays_what_it_is(error: Exception) -> None:
    with pytest.raises(type(error)), needs("serve", "it"):
        raise error


def test_databases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"io\.sql\.x needs duckdb: pip install 'callyard\[duckdb\]'"):
        DuckdbDatabase("x", DatabaseConfig(url="duckdb:x"), Threads("x", 1)).open()
    with pytest.raises(UsageError, match=r"io\.sql\.x needs psycopg: pip install 'callyard\[postgres\]'"):
        PostgresDatabase("x", DatabaseConfig(url="postgresql://h/d")).open()


@pytest.mark.parametrize(
    ("module", "library", "extra"),
    [("callyard.dispatch.exporters.otel", "opentelemetry", "otel"), ("callyard.mcp_tools", "mcp", "serve")],
)
def test_modules_that_stand_on_one(monkeypatch: pytest.MonkeyPatch, module: str, library: str, extra: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(UsageError, match=rf"needs {library}: pip install 'callyard\[{extra}\]'"):
        importlib.import_module(module)


def test_every_extra_that_is_named_is_there_and_named_by_the_helper_alone() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = set()
    for file in (ROOT / "src").rglob("*.py"):
        text = file.read_text()
        named |= set(re.findall(r"(?:needs|missing|pip_line)\(\s*[\"'](\w+)[\"']", text))
        if file.name != "extras.py":
            assert "pip install 'callyard[" not in text, f"{file}: say it by callyard.extras"
    assert named <= set(extras)
    assert {"parquet", "http", "redis", "duckdb", "postgres", "serve", "otel", "zstd", "sandbox"} <= named
    assert pip_line("http") == "pip install 'callyard[http]'"
    assert str(missing("zstd", "a", "b")) == "a needs b: pip install 'callyard[zstd]'"
