"""PostgreSQL, by read-only transactions of one query each.

A query runs as the body of a cursor, by the extended protocol: that is one statement, it must be a query, and it cannot
end the transaction that holds it. What it may read is for the role in the URL to say; give it one that may read only
what functions may see. A connection goes back to the pool after ROLLBACK and DISCARD ALL, so that nothing that one
query set is there for the next.
"""

from __future__ import annotations

import asyncio
import importlib.util
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from callyard.errors import ErrorKind, UsageError
from callyard.extras import missing
from callyard.worker.io.config import DatabaseConfig
from callyard.worker.io.port import IoFailure
from callyard.worker.io.sql_rows import FETCH_ROWS, Parameters, RowWriter

if TYPE_CHECKING:
    import psycopg

IDLE_MAX: Final = 4
CONNECT_TIMEOUT_S: Final = 10
CANCEL_TIMEOUT_S: Final = 2.0
APPLICATION: Final = "callyard"


class PostgresDatabase:
    def __init__(self, name: str, config: DatabaseConfig) -> None:
        self._name = name
        self._config = config
        self._idle: list[psycopg.AsyncConnection[Any]] = []
        self._closed = False

    def open(self) -> None:
        if importlib.util.find_spec("psycopg") is None:
            raise missing("postgres", f"io.sql.{self._name}", "psycopg")
        try:
            urlsplit(self._config.url).port  # noqa: B018 - reading it checks it
        except ValueError as error:
            raise UsageError(f"io.sql.{self._name}: expected postgresql://user@host:port/database; {error}") from error

    async def close(self) -> None:
        self._closed = True
        while self._idle:
            await self._idle.pop().close()

    async def query(self, sql: str, parameters: Parameters, rows_max: int) -> bytes:
        import psycopg

        if isinstance(parameters, dict):
            raise IoFailure(ErrorKind.SCHEMA, "PostgreSQL takes parameters by position: $1, $2, … and a list")
        try:
            async with asyncio.timeout(self._config.timeout_ms / 1_000):
                connection = await self._connect()
                try:
                    result = await self._run(connection, sql, parameters, rows_max)
                    await connection.rollback()
                    await _clean(connection)
                except BaseException:
                    await asyncio.shield(_discard(connection))
                    raise
        except psycopg.Error as error:
            raise self._explain(error) from error
        if self._closed or len(self._idle) >= IDLE_MAX:
            await connection.close()
        else:
            self._idle.append(connection)
        return result

    async def _connect(self) -> psycopg.AsyncConnection[Any]:
        import psycopg

        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        connection = await psycopg.AsyncConnection.connect(
            self._config.url,
            connect_timeout=CONNECT_TIMEOUT_S,
            application_name=APPLICATION,
            options=f"-c default_transaction_read_only=on -c statement_timeout={self._config.timeout_ms}",
        )
        await connection.set_read_only(True)
        connection.prepare_threshold = None
        return connection

    async def _run(
        self, connection: psycopg.AsyncConnection[Any], sql: str, parameters: list[Any], rows_max: int
    ) -> bytes:
        import psycopg

        rows = RowWriter(rows_max, self._config.max_bytes)
        async with psycopg.AsyncRawCursor(connection) as cursor:
            # `binary` makes it the extended protocol, which takes one statement; `$1` are its own placeholders.
            declare = b"DECLARE callyard NO SCROLL CURSOR FOR " + sql.encode()
            await cursor.execute(declare, parameters, binary=True)
            columns: list[str] = []
            while True:
                await cursor.execute(b"FETCH %d FROM callyard" % FETCH_ROWS)
                columns = [column.name for column in cursor.description or ()]
                part = await cursor.fetchall()
                rows.add(part)
                if len(part) < FETCH_ROWS:
                    return rows.finish(columns)

    def _explain(self, error: psycopg.Error) -> IoFailure:
        state = error.sqlstate or ""
        diagnosis = error.diag.message_primary
        text = f"PostgreSQL: {diagnosis or error}"
        if state == "57014":  # query_canceled
            return IoFailure(ErrorKind.TIMEOUT, text, retryable=True, limit="timeout_ms")
        if state in ("25006", "42501") or "DECLARE CURSOR" in text:  # read_only_sql_transaction, insufficient_privilege
            return IoFailure(ErrorKind.DENIED, f"{text}; only reading is allowed", sqlstate=state)
        # 08P01, protocol_violation, is a wrong number of parameters.
        if not state or (state.startswith(("08", "53", "57")) and state != "08P01"):
            # Without a state it is libpq's own text, which may show the URL's user and host, never the password.
            message = text if diagnosis else f"PostgreSQL: cannot reach the database {self._name!r}"
            return IoFailure(ErrorKind.UNAVAILABLE, message, retryable=True, sqlstate=state)
        return IoFailure(ErrorKind.TOOL_ERROR, text, sqlstate=state)


async def _clean(connection: psycopg.AsyncConnection[Any]) -> None:
    await connection.set_autocommit(True)  # DISCARD ALL cannot run inside a transaction
    await connection.execute("DISCARD ALL")
    await connection.set_autocommit(False)


async def _discard(connection: psycopg.AsyncConnection[Any]) -> None:
    """Stop what still runs there, and close it."""
    await connection.cancel_safe(timeout=CANCEL_TIMEOUT_S)
    await connection.close()
