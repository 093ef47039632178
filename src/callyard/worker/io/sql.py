"""The provider `sql`: one reading statement with parameters, at databases that the operator named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final

import msgspec
from msgspec import Meta

from callyard.errors import ErrorKind
from callyard.worker.io.config import DatabaseConfig
from callyard.worker.io.port import IoFailure, IoScope, Provider, Reply, decode_request
from callyard.worker.io.sql_rows import SQL_CHARACTERS_MAX, Database, Parameters, read_parameters
from callyard.worker.io.threads import Threads

THREADS: Final = 16


class _Request(msgspec.Struct, forbid_unknown_fields=True):
    database: str
    sql: Annotated[str, Meta(max_length=SQL_CHARACTERS_MAX)]
    params: Parameters = []
    rows_max: Annotated[int, Meta(ge=0)] | None = None
    """Narrows the database's."""


class SqlProvider(Provider):
    read_only: ClassVar[frozenset[str]] = frozenset({"query"})

    def __init__(self, databases: Mapping[str, DatabaseConfig]) -> None:
        self._configs = databases
        self._threads = Threads("sql", THREADS)
        self._databases = {name: self._make(name, config) for name, config in databases.items()}

    def _make(self, name: str, config: DatabaseConfig) -> Database:
        """Each kind is imported when a database of it is named: most workers have none."""
        scheme = config.url.partition(":")[0]
        if scheme == "sqlite":
            from callyard.worker.io.sql_sqlite import SqliteDatabase

            return SqliteDatabase(name, config, self._threads)
        if scheme == "duckdb":
            from callyard.worker.io.sql_duckdb import DuckdbDatabase

            return DuckdbDatabase(name, config, self._threads)
        assert scheme in ("postgresql", "postgres"), scheme  # the configuration was checked
        from callyard.worker.io.sql_postgres import PostgresDatabase

        return PostgresDatabase(name, config)

    async def open(self) -> None:
        for database in self._databases.values():
            database.open()

    async def close(self) -> None:
        self._threads.close()
        for database in self._databases.values():
            await database.close()

    async def perform(self, operation: str, request: bytes, body: bytes | None, scope: IoScope) -> Reply:
        if operation != "query":
            raise IoFailure(ErrorKind.SCHEMA, f"sql has query, not {operation!r}")
        asked = decode_request(request, _Request, operation)
        name = asked.database
        database = self._databases.get(name)
        if database is None:
            message = f'no database {name!r}; whoever runs the worker may add it: [io.sql] {name} = "sqlite:…"'
            raise IoFailure(ErrorKind.NOT_FOUND, message, databases=sorted(self._databases))
        if not scope.permits(name):
            raise IoFailure(ErrorKind.DENIED, f"this task may not use the database {name!r}")
        config = self._configs[name]
        rows_max = config.rows_max if asked.rows_max is None else min(config.rows_max, asked.rows_max)
        try:
            return Reply(await database.query(asked.sql, read_parameters(asked.params), rows_max))
        except TimeoutError as error:
            message = f"{name}: the query took longer than {config.timeout_ms} ms"
            raise IoFailure(ErrorKind.TIMEOUT, message, retryable=True, limit="timeout_ms") from error
