"""The provider `sql` against real databases: reading, and nothing else."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import socket
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from callyard.errors import UsageError
from callyard.worker.io.config import IoConfig
from callyard.worker.io.port import Reply
from callyard.worker.io.sql import SqlProvider

from .conftest import perform, refusal

WAIT_S = 30.0
LIMITS = {"rows_max": 100, "max_bytes": "64KiB", "timeout": "20s"}


def make(url: str, **limits: Any) -> SqlProvider:
    return SqlProvider(IoConfig.from_mapping({"sql": {"db": {"url": url, **LIMITS, **limits}}}).sql)


def table(reply: Reply) -> tuple[list[str], list[list[Any]]]:
    found = msgspec.json.decode(reply.result)
    return found["columns"], found["rows"]


async def rows(provider: SqlProvider, sql: str, params: Any = ()) -> list[list[Any]]:
    return table(await perform(provider, "query", {"database": "db", "sql": sql, "params": params}))[1]


async def kind_of(provider: SqlProvider, sql: str, params: Any = ()) -> str:
    return (await refusal(perform(provider, "query", {"database": "db", "sql": sql, "params": params}))).kind


# --- SQLite -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def sqlite_file(tmp_path: Path) -> Path:
    path = tmp_path / "odd name ?#%.db"
    connection = sqlite3.connect(path)
    connection.execute("create table flight (id integer primary key, origin text, km real, raw blob)")
    rows = [(1, "JFK", 3983.5, b"\0\xff"), (2, "LHR", None, None), (3, "it's", 1e300, b"")]
    connection.executemany("insert into flight values (?, ?, ?, ?)", rows)
    connection.execute("create index by_origin on flight (origin)")
    connection.commit()
    connection.close()
    return path


@pytest.fixture
async def sqlite(sqlite_file: Path) -> AsyncIterator[SqlProvider]:
    provider = make(f"sqlite:{sqlite_file}")
    await provider.open()
    yield provider
    await provider.close()


@pytest.mark.requirement("X42")
async def test_sqlite_values(sqlite: SqlProvider) -> None:
    reply = await perform(sqlite, "query", {"database": "db", "sql": "select * from flight order by id"})
    assert table(reply) == (
        ["id", "origin", "km", "raw"],
        [[1, "JFK", 3983.5, "AP8="], [2, "LHR", None, None], [3, "it's", 1e300, ""]],
    )
    assert await rows(sqlite, "select 9e999, -9e999, 9223372036854775807") == [["Infinity", "-Infinity", 2**63 - 1]]
    assert await rows(sqlite, "select 1 where 0") == []


@pytest.mark.requirement("X42")
@pytest.mark.parametrize(
    ("sql", "params"),
    [
        ("select id from flight where origin = ? and id = ?", ["JFK", 1]),
        ("select id from flight where origin = $1 and id = $2", ["JFK", 1]),
        ("select id from flight where id = $2 and origin = $1", ["JFK", 1]),
        ("select id from flight where origin = :o and id = :i", {"o": "JFK", "i": 1}),
        ("select id from flight where raw = ?", [{"$bytes": "AP8="}]),
        ("select id from flight where id = 1 and ? is null and ?", [None, True]),
    ],
)
async def test_sqlite_parameters(sqlite: SqlProvider, sql: str, params: Any) -> None:
    assert await rows(sqlite, sql, params) == [[1]]


@pytest.mark.requirement("X42")
async def test_a_parameter_is_never_sql(sqlite: SqlProvider) -> None:
    assert await rows(sqlite, "select id from flight where origin = ?", ["x' or '1'='1"]) == []
    assert await rows(sqlite, "select id from flight where origin = ?", ["it's"]) == [[3]]


@pytest.mark.requirement("X42")
@pytest.mark.parametrize(
    "sql",
    [
        *("insert into flight values (9, '', 0, null)", "update flight set km = 0", "delete from flight"),
        *("drop table flight", "create table t (a)", "create temp table t (a)", "alter table flight add column x"),
        *("attach database '/tmp/x.db' as x", "attach ':memory:' as x", "detach database main", "vacuum into '/tmp/x'"),
        *("pragma journal_mode = wal", "pragma query_only = 0", "pragma writable_schema = 1", "pragma database_list"),
        *("begin", "commit", "savepoint x", "reindex", "analyze", "select load_extension('x')"),
        "with x as (select 1) insert into flight select 9, '', 0, null from x",
        "create virtual table v using fts5(x)",
    ],
)
async def test_sqlite_only_reads(sqlite: SqlProvider, sqlite_file: Path, sql: str) -> None:
    before = sqlite_file.read_bytes()
    assert await kind_of(sqlite, sql) == "denied"
    assert sqlite_file.read_bytes() == before


@pytest.mark.parametrize(
    ("sql", "params", "kind"),
    [
        ("selec", [], "tool_error"),
        ("select * from nothing", [], "tool_error"),
        ("select 1; select 2", [], "tool_error"),
        ("select ?", [], "tool_error"),
        ("select :a", {"b": 1}, "tool_error"),
        ("select ?", [[1]], "tool_error"),
        ("select ?", [2**70], "tool_error"),
        ("select ?", [{"a": 1}], "schema"),
        ("select ?", [{"$bytes": "no base64!"}], "schema"),
        ("select zeroblob(10000000)", [], "tool_error"),
    ],
)
async def test_sqlite_mistakes(sqlite: SqlProvider, sql: str, params: Any, kind: str) -> None:
    assert await kind_of(sqlite, sql, params) == kind


@pytest.mark.requirement("X42")
async def test_caps_of_rows_and_bytes(sqlite: SqlProvider) -> None:
    numbers = "with recursive n(i) as (select 1 union all select i + 1 from n limit {}) select i from n"
    assert len(await rows(sqlite, numbers.format(100))) == 100
    failure = await refusal(perform(sqlite, "query", {"database": "db", "sql": numbers.format(101)}))
    assert (failure.kind, failure.details) == ("result", {"limit": "rows_max", "value": 100})
    fewer = {"database": "db", "sql": numbers.format(10), "rows_max": 9}
    assert (await refusal(perform(sqlite, "query", fewer))).kind == "result"
    more = {"database": "db", "sql": numbers.format(101), "rows_max": 1_000}
    assert (await refusal(perform(sqlite, "query", more))).kind == "result"
    wide = "with recursive n(i) as (select 1 union all select i + 1 from n limit 90) select hex(zeroblob(500)) from n"
    assert (await refusal(perform(sqlite, "query", {"database": "db", "sql": wide}))).details["limit"] == "max_bytes"


ENDLESS = "with recursive n(i) as (select 1 union all select i + 1 from n) select count(*) from n"


@pytest.mark.requirement("X42")
async def test_an_endless_sqlite_statement_ends_with_its_time(sqlite_file: Path) -> None:
    provider = make(f"sqlite:{sqlite_file}", timeout="100ms")
    provider._threads._count = 1
    failure = await refusal(perform(provider, "query", {"database": "db", "sql": ENDLESS}))
    assert (failure.kind, failure.details["limit"]) == ("timeout", "timeout_ms")
    assert await rows(provider, "select 1") == [[1]]
    await provider.close()


@pytest.mark.requirement("X42")
async def test_a_cancelled_sqlite_statement_is_stopped(sqlite: SqlProvider) -> None:
    sqlite._threads._count = 1
    query = asyncio.create_task(perform(sqlite, "query", {"database": "db", "sql": ENDLESS}))
    async with asyncio.timeout(WAIT_S):
        while sqlite._threads._pool is None or sqlite._threads._pool._work_queue.qsize():
            await asyncio.sleep(0)
        query.cancel()
        with pytest.raises(asyncio.CancelledError):
            await query
        assert await rows(sqlite, "select 5") == [[5]]  # its only thread is free again


async def test_a_file_that_is_not_there_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"io\.sql\.db: expected an SQLite file"):
        await make(f"sqlite:{tmp_path / 'none.db'}").open()
    assert list(tmp_path.iterdir()) == []


async def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "x.db").write_text("not a database" * 100)
    assert await kind_of(make(f"sqlite:{tmp_path / 'x.db'}"), "select * from sqlite_master") == "unavailable"


@pytest.mark.parametrize(
    ("request_", "kind"),
    [
        ({"database": "other", "sql": "select 1"}, "not_found"),
        ({"database": "db"}, "schema"),
        ({"database": "db", "sql": "select 1", "params": "x"}, "schema"),
        ({"database": "db", "sql": "x" * 1_000_001}, "schema"),
        ({"database": "db", "sql": "select 1", "params": [0] * 10_001}, "schema"),
    ],
)
async def test_requests_that_do_not_fit(sqlite: SqlProvider, request_: Any, kind: str) -> None:
    failure = await refusal(perform(sqlite, "query", request_))
    assert failure.kind == kind
    if kind == "not_found":
        assert '[io.sql] other = "sqlite:…"' in failure.message
    assert (await refusal(perform(sqlite, "execute", request_))).kind == "schema"


async def test_a_task_may_have_fewer_databases(sqlite: SqlProvider) -> None:
    request = perform(sqlite, "query", {"database": "db", "sql": "select 1"}, names=("x",))
    assert (await refusal(request)).kind == "denied"


# --- DuckDB -----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def duck(tmp_path: Path) -> AsyncIterator[SqlProvider]:
    duckdb = pytest.importorskip("duckdb")
    with duckdb.connect(str(tmp_path / "x.duckdb")) as connection:
        connection.execute("create table t (a integer, d date, x decimal(10, 2), h hugeint, l integer[], b blob)")
        connection.execute(
            "insert into t values (1, '2024-01-02', 1.50, 170141183460469231731687303715884105727, [1, 2], 'a'::blob)"
        )
        connection.execute("create sequence s")
    provider = make(f"duckdb:{tmp_path / 'x.duckdb'}")
    await provider.open()
    yield provider
    await provider.close()


@pytest.mark.requirement("X42")
async def test_duckdb_values_and_parameters(duck: SqlProvider) -> None:
    assert await rows(duck, "select * from t") == [[1, "2024-01-02", "1.50", str(2**127 - 1), [1, 2], "YQ=="]]
    assert await rows(duck, "select {'a': 1, 'b': [date '2024-01-02']}, 'nan'::double, 'inf'::double") == [
        [{"a": 1, "b": ["2024-01-02"]}, "NaN", "Infinity"]
    ]
    assert await rows(duck, "select a from t where d = ? and x = ?", ["2024-01-02", 1.5]) == [[1]]
    assert await rows(duck, "select a from t where d = $1", ["2024-01-02"]) == [[1]]
    assert await rows(duck, "select a from t where d = $day", {"day": "2024-01-02"}) == [[1]]
    assert await rows(duck, "select octet_length(?)", [{"$bytes": "AP8="}]) == [[2]]
    assert len(await rows(duck, "explain select 1")) == 1


@pytest.mark.requirement("X42")
@pytest.mark.parametrize(
    "sql",
    [
        *(
            "insert into t (a) values (2)",
            "update t set a = 2",
            "delete from t",
            "drop table t",
            "create table u (a int)",
        ),
        *(
            "create temp table u (a int)",
            "attach ':memory:' as m",
            "attach '/tmp/y.duckdb' as m",
            "copy t to '/tmp/y.csv'",
        ),
        *("set threads = 8", "reset threads", "pragma database_list", "call pragma_version()", "install httpfs"),
        *("load httpfs", "select 1; select 2", "export database '/tmp/y'", "select * from read_csv('/etc/passwd')"),
        *("select * from read_text('/etc/passwd')", "select * from glob('/etc/*')", "begin", "checkpoint", ""),
        "select * from read_parquet('https://example.com/x.parquet')",
    ],
)
async def test_duckdb_only_reads_its_file(duck: SqlProvider, sql: str) -> None:
    assert await kind_of(duck, sql) in ("denied", "tool_error")


@pytest.mark.requirement("X42")
async def test_duckdb_sees_no_python_variables(duck: SqlProvider) -> None:
    duckdb = pytest.importorskip("duckdb")
    leak = duckdb.sql("select 42")
    assert leak is not None
    assert await kind_of(duck, "select * from leak") == "tool_error"


@pytest.mark.requirement("X42")
async def test_duckdb_caps_and_time(duck: SqlProvider, tmp_path: Path) -> None:
    assert await kind_of(duck, "select * from range(101)") == "result"
    assert await kind_of(duck, "select * from range(1000000000) order by hash(range)") in (
        "resource_limit",
        "tool_error",
    )
    slow = make(f"duckdb:{tmp_path / 'x.duckdb'}", timeout="100ms")
    assert (
        await kind_of(slow, "select count(*) from range(100000) a, range(100000) b where hash(a.range + b.range) = 1")
        == "timeout"
    )
    assert await rows(slow, "select 1") == [[1]]
    await slow.close()


async def test_duckdb_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"callyard\[duckdb\]"):
        await make(f"duckdb:{tmp_path / 'x'}").open()
    with pytest.raises(UsageError, match=r"callyard\[postgres\]"):
        await make("postgresql://h/d").open()


# --- PostgreSQL -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def postgres_url() -> Iterator[str]:
    """A server of our own in a folder of our own, without durability; skipped where there is none installed."""
    pytest.importorskip("psycopg")
    binary = shutil.which("pg_ctl")
    if binary is None or shutil.which("initdb") is None:
        pytest.skip("no PostgreSQL server is installed")
    run_as: dict[str, Any] = {}
    folder = Path(tempfile.mkdtemp(prefix="pg"))
    if os.geteuid() == 0:  # it refuses to run as root
        try:
            account = pwd.getpwnam("postgres")
        except KeyError:
            pytest.skip("no account to run PostgreSQL with")
        os.chown(folder, account.pw_uid, account.pw_gid)
        run_as = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"cwd": folder, "check": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **run_as}
    data = folder / "data"
    try:
        subprocess.run(["initdb", "-A", "trust", "-U", "postgres", "-N", "-D", data], timeout=120, **common)
        options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c fsync=off"
        subprocess.run(
            [binary, "-D", data, "-o", options, "-l", folder / "log", "-w", "-t", "60", "start"], timeout=120, **common
        )
        try:
            yield f"postgresql://postgres@127.0.0.1:{port}/postgres"
        finally:
            subprocess.run([binary, "-D", data, "-m", "immediate", "-w", "stop"], timeout=60, **common)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
async def postgres(postgres_url: str) -> AsyncIterator[SqlProvider]:
    import psycopg

    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as connection:
        await connection.execute("drop table if exists t")
        await connection.execute("create table t (a int, d date, x numeric, l int[], b bytea, j jsonb, u uuid)")
        await connection.execute(
            "insert into t values (1, '2024-01-02', 1.50, '{1,2}', '\\x00ff', '{\"k\": [1]}',"
            " '12345678-1234-1234-1234-123456789abc')"
        )
    provider = make(postgres_url)
    await provider.open()
    yield provider
    await provider.close()


@pytest.mark.requirement("X42")
async def test_postgres_values_and_parameters(postgres: SqlProvider) -> None:
    for _ in range(2):  # the second by a connection from the pool
        assert await rows(postgres, "select * from t") == [
            [1, "2024-01-02", "1.50", [1, 2], "AP8=", {"k": [1]}, "12345678-1234-1234-1234-123456789abc"]
        ]
    assert await rows(
        postgres, "select a from t where d = $1 and x = $2 and b = $3", ["2024-01-02", 1.5, {"$bytes": "AP8="}]
    ) == [[1]]
    assert await rows(postgres, "select a from t where a = any($1)", [[1, 2]]) == [[1]]
    assert await rows(postgres, "select 'NaN'::float8, 'infinity'::float8, 10::numeric ^ 30, '%s'") == [
        ["NaN", "Infinity", "1000000000000000000000000000000.0000000000000000", "%s"]
    ]
    assert len(await rows(postgres, "select * from generate_series(1, 100)")) == 100
    assert await rows(postgres, "values (1), (2)") == [[1], [2]]
    assert await rows(postgres, "with x as (select 1) select * from x") == [[1]]
    assert await rows(postgres, "select 1 as a where false") == []


@pytest.mark.requirement("X42")
@pytest.mark.parametrize(
    "sql",
    [
        *("insert into t (a) values (2)", "update t set a = 2", "delete from t", "drop table t", "truncate t"),
        *("create table u (a int)", "create temp table u (a int)", "select * into u from t", "copy t to '/tmp/y'"),
        *(
            "begin",
            "commit",
            "rollback",
            "set transaction read write",
            "set session default_transaction_read_only = off",
        ),
        *("do $$ begin delete from t; end $$", "call nothing()", "vacuum", "listen x", "lock table t", "show all"),
        *("select 1; delete from t", "select 1; commit; delete from t", "select 1; rollback; drop table t", ""),
        "with x as (delete from t returning a) select * from x",
        "select set_config('transaction_read_only', 'off', false)",
        "select setval('q', 5)",
        "select nextval('q')",
    ],
)
async def test_postgres_only_reads(postgres: SqlProvider, sql: str) -> None:
    assert await kind_of(postgres, sql) in ("denied", "tool_error")
    assert await rows(postgres, "select count(*) from t") == [[1]]


@pytest.mark.requirement("X42")
async def test_what_a_function_of_postgres_writes_is_rolled_back(postgres: SqlProvider) -> None:
    request = perform(postgres, "query", {"database": "db", "sql": "select lo_create(0)"})
    await asyncio.gather(request, return_exceptions=True)  # refused from version 16 on
    assert await rows(postgres, "select count(*) from pg_largeobject_metadata") == [[0]]


@pytest.mark.requirement("X42")
async def test_what_one_query_sets_is_gone_for_the_next(postgres: SqlProvider) -> None:
    assert await rows(postgres, "select set_config('application_name', 'mine', false), pg_try_advisory_lock(5)") == [
        ["mine", True]
    ]
    first = await rows(
        postgres,
        "select current_setting('application_name'), (select count(*) from pg_locks where locktype = 'advisory')",
    )
    assert first == [["callyard", 0]]
    assert await rows(postgres, "select current_setting('default_transaction_read_only')") == [["on"]]


@pytest.mark.requirement("X42")
async def test_postgres_caps_time_and_cancelling(postgres: SqlProvider, postgres_url: str) -> None:
    assert await kind_of(postgres, "select * from generate_series(1, 101)") == "result"
    assert await kind_of(postgres, "select repeat('x', 70000)") == "result"
    slow = make(postgres_url, timeout="200ms")
    assert await kind_of(slow, "select pg_sleep(60)") == "timeout"
    await slow.close()
    query = asyncio.create_task(perform(postgres, "query", {"database": "db", "sql": "select pg_sleep(3600)"}))
    active = "from pg_stat_activity where query like 'FETCH%' and state = 'active' and pid <> pg_backend_pid()"
    watched = f"select count(*) {active}"
    await until_rows(postgres, watched, [[1]])
    query.cancel()
    with pytest.raises(asyncio.CancelledError):
        await query
    await until_rows(postgres, watched, [[0]])


async def until_rows(provider: SqlProvider, sql: str, expected: list[list[Any]]) -> None:
    end = time.monotonic() + WAIT_S
    while await rows(provider, sql) != expected:
        assert time.monotonic() < end, f"not within {WAIT_S} s: {sql} gives {expected}"
        await asyncio.sleep(0.02)


async def test_postgres_mistakes(postgres: SqlProvider) -> None:
    assert await kind_of(postgres, "select * from nothing") == "tool_error"
    assert await kind_of(postgres, "select $1::int", ["x"]) == "tool_error"
    assert await kind_of(postgres, "select $1, $2", [1]) == "tool_error"
    assert await kind_of(postgres, "select $1", {"a": 1}) == "schema"


async def test_postgres_out_of_reach_shows_no_password() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        pytest.importorskip("psycopg")
        provider = make(f"postgresql://u:secret@127.0.0.1:{free.getsockname()[1]}/d")
        failure = await refusal(perform(provider, "query", {"database": "db", "sql": "select 1"}))
    assert (failure.kind, failure.retryable) == ("unavailable", True)
    assert "secret" not in failure.message + repr(failure.details)
