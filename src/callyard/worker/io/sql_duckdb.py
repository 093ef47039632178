"""DuckDB files, opened read-only, without access to anything else on the machine."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any, Final

from callyard.errors import ErrorKind, UsageError
from callyard.extras import missing
from callyard.worker.io.config import DatabaseConfig
from callyard.worker.io.port import IoFailure
from callyard.worker.io.sql_rows import FETCH_ROWS, Parameters, RowWriter
from callyard.worker.io.threads import Threads

SETTINGS: Final[dict[str, str | bool | int | float | list[str]]] = {
    "enable_external_access": "false",  # no files, no network, no ATTACH, no extensions
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "python_enable_replacements": "false",  # else a table's name finds the worker's own Python variables
    "temp_directory": "",  # what does not fit fails, and fills no disk
    "memory_limit": "512MiB",
    "threads": "2",
    "lock_configuration": "true",
}
STATEMENTS: Final = frozenset({"SELECT", "EXPLAIN"})


class DuckdbDatabase:
    """One instance, opened at the first query, in a thread; a cursor, which is a connection, per query."""

    def __init__(self, name: str, config: DatabaseConfig, threads: Threads) -> None:
        self._name = name
        self._config = config
        self._path = Path(config.url.removeprefix("duckdb:"))
        self._threads = threads
        self._instance: Any = None
        self._opening = asyncio.Lock()

    def open(self) -> None:
        if importlib.util.find_spec("duckdb") is None:
            raise missing("duckdb", f"io.sql.{self._name}", "duckdb")
        if not self._path.is_file():
            raise UsageError(f"io.sql.{self._name}: expected a DuckDB file, {self._path} is none")

    async def close(self) -> None:
        instance, self._instance = self._instance, None
        if instance is not None:
            instance.close()

    async def query(self, sql: str, parameters: Parameters, rows_max: int) -> bytes:
        async with self._opening:
            if self._instance is None:
                self._instance = await self._threads.run(lambda: _open(self._path))
        cursor = self._instance.cursor()
        rows = RowWriter(rows_max, self._config.max_bytes)
        return await self._threads.run(
            lambda: _run(cursor, sql, parameters, rows), lambda: _interrupt(cursor), self._config.timeout_ms
        )


def _open(path: Path) -> Any:
    import duckdb

    try:
        return duckdb.connect(str(path), read_only=True, config=SETTINGS)
    except duckdb.Error as error:
        raise IoFailure(ErrorKind.UNAVAILABLE, f"DuckDB: {error}") from error


def _run(cursor: Any, sql: str, parameters: Parameters, rows: RowWriter) -> bytes:
    import duckdb

    try:
        statements = cursor.extract_statements(sql)
        if len(statements) != 1 or statements[0].type.name not in STATEMENTS:
            kinds = ", ".join(statement.type.name for statement in statements) or "nothing"
            raise IoFailure(ErrorKind.DENIED, f"DuckDB: expected one SELECT, got {kinds}; only reading is allowed")
        cursor.execute(statements[0], parameters or None)
        columns = [column[0] for column in cursor.description or ()]
        while part := cursor.fetchmany(FETCH_ROWS):
            rows.add(part)
        return rows.finish(columns)
    except duckdb.Error as error:
        raise _explain(error) from error
    finally:
        cursor.close()


def _interrupt(cursor: Any) -> None:
    import duckdb

    try:
        cursor.interrupt()
    except duckdb.ConnectionException:  # it ended and closed the cursor meanwhile
        pass


def _explain(error: Exception) -> IoFailure:
    import duckdb

    if isinstance(error, duckdb.InterruptException):
        return IoFailure(ErrorKind.CANCELLED, "DuckDB: the statement was stopped")
    if isinstance(error, duckdb.PermissionException):
        return IoFailure(ErrorKind.DENIED, f"DuckDB: {error}")
    if isinstance(error, duckdb.OutOfMemoryException):
        return IoFailure(ErrorKind.RESOURCE_LIMIT, f"DuckDB: {error}")
    return IoFailure(ErrorKind.TOOL_ERROR, f"DuckDB: {error}")
