"""SQLite files, opened read-only, with an authorizer that knows reading only."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from callyard.errors import ErrorKind, UsageError
from callyard.worker.io.config import DatabaseConfig
from callyard.worker.io.port import IoFailure
from callyard.worker.io.sql_rows import FETCH_ROWS, SQL_CHARACTERS_MAX, Parameters, RowWriter
from callyard.worker.io.threads import Threads

BUSY_TIMEOUT_S: Final = 5.0
OPCODES_PER_LOOK: Final = 20_000
"""How often a running statement is asked whether to go on; about a millisecond."""

_RECURSIVE: Final = 33  # SQLITE_RECURSIVE, which the module does not name before Python 3.13
_READING: Final = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, _RECURSIVE})
_PRAGMAS: Final = frozenset({"table_info", "table_xinfo", "table_list", "index_list", "index_info", "foreign_key_list"})
_FUNCTIONS_REFUSED: Final = frozenset({"load_extension", "fts3_tokenizer", "readfile", "writefile", "edit"})
_NUMBERED: Final = re.compile(r"\$[0-9]")


class SqliteDatabase:
    """A connection per query: nothing of one tenant's is left for the next, and a file can be replaced at any time."""

    def __init__(self, name: str, config: DatabaseConfig, threads: Threads) -> None:
        self._name = name
        self._config = config
        self._path = Path(config.url.removeprefix("sqlite:"))
        self._threads = threads

    def open(self) -> None:
        if not self._path.is_file():
            raise UsageError(f"io.sql.{self._name}: expected an SQLite file, {self._path} is none")

    async def close(self) -> None:
        pass

    async def query(self, sql: str, parameters: Parameters, rows_max: int) -> bytes:
        job = _Job()
        config = self._config
        return await self._threads.run(
            lambda: _run(self._path, sql, parameters, RowWriter(rows_max, config.max_bytes), config.max_bytes, job),
            job.stop,
            config.timeout_ms,
        )


class _Job:
    """Tells the thread that nobody waits: SQLite asks from within the statement."""

    def __init__(self) -> None:
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True

    def is_stopped(self) -> bool:
        return self.stopped


def _run(path: Path, sql: str, parameters: Parameters, rows: RowWriter, max_bytes: int, job: _Job) -> bytes:
    bound: Any = parameters
    if isinstance(parameters, list) and _NUMBERED.search(sql):
        bound = {str(number): value for number, value in enumerate(parameters, 1)}  # $1 is a name to SQLite
    try:
        uri = f"file:{quote(str(path))}?mode=ro"
        connection = sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        try:
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, max(max_bytes, SQL_CHARACTERS_MAX))
            connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
            connection.setlimit(sqlite3.SQLITE_LIMIT_WORKER_THREADS, 0)
            connection.set_progress_handler(job.is_stopped, OPCODES_PER_LOOK)
            connection.set_authorizer(_authorize)
            cursor = connection.execute(sql, bound)
            while part := cursor.fetchmany(FETCH_ROWS):
                rows.add(part)
            return rows.finish([column[0] for column in cursor.description or ()])
        finally:
            connection.close()
    except (sqlite3.Error, sqlite3.Warning, OverflowError, ValueError, TypeError) as error:
        raise _explain(error) from error


def _authorize(action: int, first: str | None, second: str | None, _database: str | None, _source: str | None) -> int:
    if action == sqlite3.SQLITE_FUNCTION and second in _FUNCTIONS_REFUSED:
        return sqlite3.SQLITE_DENY
    if action in _READING:
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_PRAGMA and first in _PRAGMAS:
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY


def _explain(error: Exception) -> IoFailure:
    text = str(error)
    name = getattr(error, "sqlite_errorname", "")
    if name == "SQLITE_AUTH" or name.startswith("SQLITE_READONLY") or "not authorized" in text:
        return IoFailure(ErrorKind.DENIED, f"SQLite: {text}; only reading is allowed")
    if name == "SQLITE_INTERRUPT":
        return IoFailure(ErrorKind.CANCELLED, "SQLite: the statement was stopped")
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return IoFailure(ErrorKind.UNAVAILABLE, f"SQLite: {text}", retryable=True)
    if name.startswith(("SQLITE_CANTOPEN", "SQLITE_IOERR", "SQLITE_NOTADB", "SQLITE_CORRUPT")):
        return IoFailure(ErrorKind.UNAVAILABLE, f"SQLite: {text}")
    return IoFailure(ErrorKind.TOOL_ERROR, f"SQLite: {text}")
