"""Rows to JSON within caps, and what every kind of database shares.

A result is `{"columns": ["a", …], "rows": [[1, …], …]}`. Dates, decimals, UUIDs and whole numbers beyond 64 bits become
text, bytes base64, NaN and the infinities the texts `NaN`, `Infinity`, `-Infinity`: JSON has none of them, and null
would be a lie.
"""

from __future__ import annotations

import datetime
import decimal
import math
import uuid
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from callyard.errors import ErrorKind
from callyard.worker.io.port import IoFailure

Parameters = list[Any] | dict[str, Any]

SQL_CHARACTERS_MAX: Final = 1_000_000
PARAMETERS_MAX: Final = 10_000
FETCH_ROWS: Final = 256
BYTES_KEY: Final = "$bytes"
"""A parameter `{"$bytes": "<base64>"}` is bytes."""

_PLAIN: Final = frozenset({str, int, bool, type(None)})
_INT_MIN, _INT_MAX = -(2**63), 2**63 - 1


class Database(Protocol):
    """One configured database. Reads only, whatever the statement says."""

    def open(self) -> None:
        """Check what can be checked without a query. Raises UsageError."""

    async def close(self) -> None: ...

    async def query(self, sql: str, parameters: Parameters, rows_max: int) -> bytes:
        """A result as JSON. Raises `IoFailure`; when cancelled, the statement is stopped."""
        ...


class RowWriter:
    """Collects rows as JSON and refuses what is more than the caps: a part would look like the whole."""

    def __init__(self, rows_max: int, max_bytes: int) -> None:
        self._rows_max = rows_max
        self._max_bytes = max_bytes
        self._rows: list[bytes] = []
        self._bytes = 0

    def add(self, rows: Iterable[Sequence[Any]]) -> None:
        """Raises `IoFailure`."""
        for row in rows:
            if len(self._rows) == self._rows_max:
                raise _too_much("rows_max", self._rows_max)
            encoded = msgspec.json.encode([to_json(value) for value in row])
            self._rows.append(encoded)
            self._bytes += len(encoded) + 1
            if self._bytes > self._max_bytes:
                raise _too_much("max_bytes", self._max_bytes)

    def finish(self, columns: Sequence[str]) -> bytes:
        return b'{"columns":%b,"rows":[%b]}' % (msgspec.json.encode(list(columns)), b",".join(self._rows))


def _too_much(limit: str, value: int) -> IoFailure:
    message = f"the result is larger than {limit}={value}; ask for less, with WHERE, LIMIT or fewer columns"
    return IoFailure(ErrorKind.RESULT, message, limit=limit, value=value)


def to_json(value: Any) -> Any:
    """What msgspec writes as this module says."""
    kind = type(value)
    if kind is int:
        return value if _INT_MIN <= value <= _INT_MAX else str(value)
    if kind in _PLAIN:
        return value
    if kind is float:
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, bytes | bytearray | memoryview):
        return b64encode(value).decode()
    if isinstance(value, list | tuple):
        return [to_json(one) for one in value]
    if isinstance(value, Mapping):
        return {str(key): to_json(one) for key, one in value.items()}
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | uuid.UUID | datetime.timedelta):
        return str(value)
    return str(value)


def read_parameters(parameters: Parameters) -> Parameters:
    """With bytes as bytes. Raises `IoFailure`."""
    if len(parameters) > PARAMETERS_MAX:
        raise IoFailure(ErrorKind.SCHEMA, f"{len(parameters)} parameters, more than {PARAMETERS_MAX}")
    if isinstance(parameters, list):
        return [_read_parameter(value) for value in parameters]
    return {name: _read_parameter(value) for name, value in parameters.items()}


def _read_parameter(value: Any) -> Any:
    if isinstance(value, dict):
        text = value.get(BYTES_KEY)
        if len(value) == 1 and isinstance(text, str):
            try:
                return b64decode(text, validate=True)
            except ValueError as error:
                raise IoFailure(ErrorKind.SCHEMA, f"a parameter's {BYTES_KEY} is no base64") from error
        raise IoFailure(
            ErrorKind.SCHEMA, "a parameter must be null, a boolean, number, text, bytes or a list, not an object"
        )
    if isinstance(value, list):
        return [_read_parameter(one) for one in value]
    return value
