"""Keys in a file: they survive a restart, and what was in flight when the process died is found.

One process claims keys, under an advisory lock on a file beside it (`<path>.lock`); others may list and resolve unknown
ones meanwhile. Nothing is remembered outside the file. A claim is on disk before `claim` returns, so before the handler
runs, whatever happens then: WAL with synchronous=FULL, one commit for all that are asked at the same time.
Source: tool-dispatch D20, D21, D55.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from callyard.dispatch.stores.group_commit import GroupCommit
from callyard.dispatch.stores.port import (
    Claim,
    Claimed,
    Conflicting,
    Full,
    InFlight,
    Kept,
    KeyEnd,
    KeyRecord,
    KeyScope,
    StoreUnavailable,
)
from callyard.dispatch.stores.records import (
    LOST_END,
    OUTPUT_BYTES_MAX,
    decode_end,
    encode_end,
    is_too_large,
    is_unknown,
    wall_ms,
)
from callyard.dispatch.stores.waiters import Waiters
from callyard.errors import UsageError
from callyard.ids import CallId, Tenant
from callyard.locks import try_lock

APPLICATION_ID: Final = 0x43594B59
"""In the file's header: a key store of ours."""
SCHEMA_VERSION: Final = 1
BUSY_TIMEOUT_S: Final = 5
_HEADER_BYTES: Final = 100
_LOCK_POLL_S: Final = 0.02
_RETRY_AFTER_MS: Final = 1_000
_PURGED_PER_CLAIM: Final = 8
"""More than a claim adds, so that what has expired goes, and few, so that no claim pays for many."""

# The fence is the row's number: AUTOINCREMENT never gives one out again, whatever was deleted.
_SCHEMA: Final = (
    """CREATE TABLE keys (
        fence INTEGER PRIMARY KEY AUTOINCREMENT,
        tenant TEXT NOT NULL,
        tool TEXT NOT NULL,
        key TEXT NOT NULL,
        fingerprint TEXT NOT NULL,
        call_id TEXT NOT NULL,
        idempotent INTEGER NOT NULL,
        unknown_ttl_ms INTEGER NOT NULL,
        unknown INTEGER NOT NULL DEFAULT 0,
        ended_at_ms INTEGER,    -- NULL while in flight, as the next two
        expires_at_ms INTEGER,
        ended BLOB,
        UNIQUE (tenant, tool, key)
    ) STRICT""",
    "CREATE INDEX keys_by_expiry ON keys (expires_at_ms) WHERE expires_at_ms IS NOT NULL",
    "CREATE INDEX keys_in_flight ON keys (fence) WHERE ended_at_ms IS NULL",
    "CREATE INDEX keys_unknown ON keys (ended_at_ms, fence) WHERE unknown = 1",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)
_FIND: Final = "SELECT fence, fingerprint, call_id, ended, expires_at_ms FROM keys WHERE tenant=? AND tool=? AND key=?"
_INSERT: Final = (
    "INSERT INTO keys (tenant, tool, key, fingerprint, call_id, idempotent, unknown_ttl_ms) "
    "VALUES (?, ?, ?, ?, ?, ?, ?)"
)
_PURGE: Final = (
    f"DELETE FROM keys WHERE fence IN (SELECT fence FROM keys WHERE expires_at_ms <= ? LIMIT {_PURGED_PER_CLAIM})"
)
_KEEP: Final = "UPDATE keys SET call_id=?, unknown=?, ended_at_ms=?, expires_at_ms=?, ended=? WHERE fence=?"
_LIST: Final = (
    "SELECT tenant, tool, key, call_id, ended, ended_at_ms, expires_at_ms FROM keys "
    "WHERE unknown=1 AND expires_at_ms > ? AND (? IS NULL OR tenant = ?) ORDER BY ended_at_ms, fence LIMIT ?"
)
_LOSE: Final = (
    "UPDATE keys SET unknown=1, ended_at_ms=?, expires_at_ms=? + unknown_ttl_ms, ended=? WHERE ended_at_ms IS NULL"
)

T = TypeVar("T")
_EndRow = tuple[bool, tuple[CallId, bool, int, int, bytes]]
"""Whether the output was too large to keep; what `_KEEP` sets."""


class SqliteKeyStore:
    """`owner=False`: for a process that lists and resolves beside the one that claims, or when none runs.

    A new key is refused (`Full`) while the file holds `bytes_max`; nothing is forgotten before it expires.
    `lock_wait_ms`: how long `open` waits for a process that is just closing the file. The clock is called in the loop's
    thread only.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        owner: bool = True,
        bytes_max: int = 1 << 30,
        output_bytes_max: int = OUTPUT_BYTES_MAX,
        lock_wait_ms: int = 1_000,
        now_ms: Callable[[], int] = wall_ms,
    ) -> None:
        if bytes_max < 1 or output_bytes_max < 0:
            raise UsageError(f"a key store needs room: bytes_max={bytes_max}, output_bytes_max={output_bytes_max}")
        self._path = Path(path)
        self._owner = owner
        self._bytes_max = bytes_max
        self._output_bytes_max = output_bytes_max
        self._lock_wait_ms = lock_wait_ms
        self._now_ms = now_ms
        self._commits: GroupCommit | None = None
        self._lock: int | None = None
        self._waiters = Waiters()
        self._unsettled: dict[KeyScope, tuple[int, _EndRow | None]] = {}
        """Fences and ends that could not be written: no more than there were runs when the disk was full."""

    async def open(self) -> None:
        """Raises UsageError for a file that is not ours, is damaged, or belongs to a running process; such a file is
        left as it is."""
        if self._commits is not None:
            return
        opening = asyncio.ensure_future(asyncio.to_thread(self._open_file, self._now_ms()))
        try:
            connection = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(self._undo_opening)
            raise
        self._commits = GroupCommit(connection, "callyard-keys")

    async def close(self) -> None:
        if self._commits is not None:
            for scope in list(self._unsettled):
                self._start_settling(scope, *self._unsettled.pop(scope))
            await self._commits.close()
        self._unlock()

    async def claim(
        self, scope: KeyScope, fingerprint: str, call_id: CallId, *, idempotent: bool, unknown_ttl_ms: int
    ) -> Claim:
        if not self._owner:
            raise UsageError("a key store opened with owner=False lists and resolves; it claims no keys")
        row = (scope.tenant, scope.tool, scope.key, fingerprint, call_id, idempotent, unknown_ttl_ms)
        await self._settle_again(scope)
        claiming = self._submit(partial(_claim, row, self._now_ms(), self._bytes_max))
        try:
            return await asyncio.shield(claiming)
        except asyncio.CancelledError:
            claiming.add_done_callback(partial(self._give_back, scope))
            raise

    async def settle(self, scope: KeyScope, fence: int, end: KeyEnd | None, ttl_ms: int) -> bool:
        return await asyncio.shield(self._start_settling(scope, fence, self._end_row(end, ttl_ms)))

    async def wait(self, scope: KeyScope, fence: int) -> None:
        await self._settle_again(scope)
        with self._waiters.waiting((scope, fence)) as woken:
            if await self._submit(partial(_is_held, scope, fence)):
                await woken

    async def resolve(self, scope: KeyScope, end: KeyEnd | None, ttl_ms: int) -> bool:
        return await self._submit(partial(_resolve, scope, self._now_ms(), self._end_row(end, ttl_ms)))

    async def find(self, scope: KeyScope) -> KeyEnd | None:
        return await self._submit(partial(_find, scope, self._now_ms()))

    async def unknown(self, tenant: Tenant | None = None, limit: int = 1_000) -> list[KeyRecord]:
        return await self._submit(partial(_list_unknown, self._now_ms(), tenant, limit))

    def _submit(self, operation: Callable[[sqlite3.Connection], T]) -> asyncio.Future[T]:
        if self._commits is None:
            raise StoreUnavailable("the key store is not open")
        return self._commits.submit(operation)

    def _start_settling(self, scope: KeyScope, fence: int, row: _EndRow | None) -> asyncio.Future[bool]:
        def finish(settling: asyncio.Future[bool]) -> None:
            if isinstance(settling.exception(), StoreUnavailable):
                self._unsettled[scope] = (fence, row)
            self._waiters.wake((scope, fence))

        settling = self._submit(partial(_settle, scope, fence, row))
        settling.add_done_callback(finish)
        return settling

    async def _settle_again(self, scope: KeyScope) -> None:
        """Of an end that could not be written the next to ask for its key finds out whether it can be now. Raises
        StoreUnavailable if not: the claim that stands has nobody who would end it."""
        if scope in self._unsettled:
            await asyncio.shield(self._start_settling(scope, *self._unsettled.pop(scope)))

    def _end_row(self, end: KeyEnd | None, ttl_ms: int) -> _EndRow | None:
        if end is None:
            return None
        now_ms = self._now_ms()
        large = is_too_large(end, self._output_bytes_max)
        columns = (end.call_id, is_unknown(end), now_ms, now_ms + ttl_ms, encode_end(end, self._output_bytes_max))
        return large, columns

    def _give_back(self, scope: KeyScope, claiming: asyncio.Future[Claim]) -> None:
        """The caller of a claim was cancelled while it was on its way to disk: its run never began."""
        if claiming.cancelled() or claiming.exception() is not None:
            return
        claim = claiming.result()
        if isinstance(claim, Claimed) and self._commits is not None:
            self._start_settling(scope, claim.fence, None)

    # ---- opening: in a thread, before the connection has its own

    def _open_file(self, now_ms: int) -> sqlite3.Connection:
        try:
            if self._owner:
                self._take_lock(self._lock_wait_ms)
                _create_empty(self._path)
            elif not self._path.is_file():
                raise UsageError(f"no key store at {self._path}: name the file that the serving process uses")
            connection = _connect(self._path)
            try:
                if self._owner:
                    _lose_in_flight(connection, now_ms)
                elif self._take_lock(0, required=False):  # nobody runs: what it left in flight is unknown
                    _lose_in_flight(connection, now_ms)
                    self._unlock()
            except BaseException:
                connection.close()
                raise
        except OSError as error:
            self._unlock()
            raise UsageError(
                f"the key store {self._path} cannot be opened: {error.strerror or error}. Its folder must exist, and "
                "the file must be one that this user may read and write"
            ) from error
        except sqlite3.Error as error:
            self._unlock()
            raise UsageError(
                f"the key store {self._path} cannot be opened: {error}. It was left as it is: put it aside, or name "
                "another file; the keys in it are forgotten by that"
            ) from error
        except BaseException:
            self._unlock()
            raise
        return connection

    def _undo_opening(self, opening: asyncio.Future[sqlite3.Connection]) -> None:
        if not opening.cancelled() and opening.exception() is None:
            opening.result().close()
            self._unlock()

    def _take_lock(self, wait_ms: int, *, required: bool = True) -> bool:
        """The lock is the open file's, not the process's: closing another handle of it changes nothing. The file stays:
        removing it would let two processes lock two files of one name."""
        lock = os.open(f"{self._path}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        give_up_at_s = time.monotonic() + wait_ms / 1_000
        while not try_lock(lock):
            if time.monotonic() < give_up_at_s:
                time.sleep(_LOCK_POLL_S)
                continue
            os.lseek(lock, 0, os.SEEK_SET)
            holder = os.read(lock, 20).decode(errors="replace").strip()
            os.close(lock)
            if required:
                raise UsageError(
                    f"the key store {self._path} is in use{f' by process {holder}' if holder else ''}: one process "
                    "at a time may claim keys in a file. Stop that one, name another file, or use Redis "
                    "(redis://…) for several processes"
                )
            return False
        os.ftruncate(lock, 0)
        os.lseek(lock, 0, os.SEEK_SET)
        os.write(lock, f"{os.getpid()}\n".encode())
        self._lock = lock
        return True

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _create_empty(path: Path) -> None:
    """With mode 0600 from the start; SQLite gives its other files the same. Its name is on disk before the first claim
    is."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return
    if sys.platform == "win32":  # a folder cannot be opened there
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _connect(path: Path) -> sqlite3.Connection:
    """A connection to a file that is ours and sound, or was empty and now is ours."""
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=rw",
        uri=True,
        timeout=BUSY_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,  # opened in one thread, then used in another one only
    )
    try:
        _check_file(connection, path)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA fullfsync = ON")  # where plain fsync stops at the drive's cache
        connection.execute("BEGIN IMMEDIATE")
        if _read_pragma(connection, "application_id") == 0:
            for statement in _SCHEMA:
                connection.execute(statement)
        connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


def _check_file(connection: sqlite3.Connection, path: Path) -> None:
    """Only reads."""
    size = path.stat().st_size
    if 0 < size < _HEADER_BYTES:  # SQLite takes a file of one byte for an empty one
        raise sqlite3.DatabaseError("file is not a database")
    application = _read_pragma(connection, "application_id")
    version = _read_pragma(connection, "user_version")
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if application == 0 and version == 0 and tables == 0:
        return
    if application != APPLICATION_ID:
        raise UsageError(
            f"{path} is an SQLite file of another program (application id {application:#x}), not a key store: name "
            "another file. It was left as it is"
        )
    if version != SCHEMA_VERSION:
        raise UsageError(
            f"the key store {path} has format {version}, this Callyard reads format {SCHEMA_VERSION}: use the Callyard "
            "that wrote it, or name another file. It was left as it is"
        )
    fault = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if fault != "ok":
        raise UsageError(
            f"the key store {path} is damaged ({fault}): restore it, or put it aside; the keys in it are forgotten by "
            "that. It was left as it is"
        )


def _read_pragma(connection: sqlite3.Connection, name: str) -> int:
    value: int = connection.execute(f"PRAGMA {name}").fetchone()[0]
    return value


def _lose_in_flight(connection: sqlite3.Connection, now_ms: int) -> None:
    """Their holder is dead: free where running again is safe, unknown elsewhere."""
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("DELETE FROM keys WHERE ended_at_ms IS NULL AND idempotent")
    connection.execute(_LOSE, (now_ms, now_ms, LOST_END))
    connection.execute("COMMIT")


# ---- operations: in the store's thread, inside a transaction


def _claim(
    row: tuple[Tenant, str, str, str, CallId, bool, int], now_ms: int, bytes_max: int, connection: sqlite3.Connection
) -> Claim:
    connection.execute(_PURGE, (now_ms,))
    found = connection.execute(_FIND, row[:3]).fetchone()
    if found is not None:
        fence, fingerprint, call_id, ended, expires_at_ms = found
        if ended is None or expires_at_ms > now_ms:
            if fingerprint != row[3]:
                return Conflicting(call_id)
            return InFlight(call_id, fence) if ended is None else Kept(decode_end(call_id, ended))
        connection.execute("DELETE FROM keys WHERE fence=?", (fence,))
    used_pages = _read_pragma(connection, "page_count") - _read_pragma(connection, "freelist_count")
    if used_pages * _read_pragma(connection, "page_size") > bytes_max:
        first = connection.execute("SELECT min(expires_at_ms) FROM keys WHERE expires_at_ms IS NOT NULL").fetchone()[0]
        return Full(_RETRY_AFTER_MS if first is None else max(1, first - now_ms))
    fence = connection.execute(_INSERT, row).lastrowid
    assert fence is not None
    return Claimed(fence)


def _settle(scope: KeyScope, fence: int, end: _EndRow | None, connection: sqlite3.Connection) -> bool:
    held = connection.execute(
        "SELECT idempotent FROM keys WHERE fence=? AND tenant=? AND tool=? AND key=? AND ended_at_ms IS NULL",
        (fence, scope.tenant, scope.tool, scope.key),
    ).fetchone()
    if held is None:
        return False
    _put_end(fence, held[0], end, connection)
    return True


def _resolve(scope: KeyScope, now_ms: int, end: _EndRow | None, connection: sqlite3.Connection) -> bool:
    found = connection.execute(
        "SELECT fence, idempotent FROM keys WHERE tenant=? AND tool=? AND key=? AND unknown=1 AND expires_at_ms > ?",
        (scope.tenant, scope.tool, scope.key, now_ms),
    ).fetchone()
    if found is None:
        return False
    _put_end(found[0], found[1], end, connection)
    return True


def _find(scope: KeyScope, now_ms: int, connection: sqlite3.Connection) -> KeyEnd | None:
    found = connection.execute(_FIND, (scope.tenant, scope.tool, scope.key)).fetchone()
    if found is None or found[3] is None or found[4] <= now_ms:
        return None
    return decode_end(CallId(found[2]), found[3])


def _put_end(fence: int, idempotent: bool, end: _EndRow | None, connection: sqlite3.Connection) -> None:
    if end is None or (end[0] and idempotent):
        connection.execute("DELETE FROM keys WHERE fence=?", (fence,))
    else:
        connection.execute(_KEEP, (*end[1], fence))


def _is_held(scope: KeyScope, fence: int, connection: sqlite3.Connection) -> bool:
    return (
        connection.execute(
            "SELECT 1 FROM keys WHERE fence=? AND tenant=? AND tool=? AND key=? AND ended_at_ms IS NULL",
            (fence, scope.tenant, scope.tool, scope.key),
        ).fetchone()
        is not None
    )


def _list_unknown(now_ms: int, tenant: Tenant | None, limit: int, connection: sqlite3.Connection) -> list[KeyRecord]:
    rows = connection.execute(_LIST, (now_ms, tenant, tenant, limit)).fetchall()
    return [
        KeyRecord(KeyScope(Tenant(owner), tool, key), decode_end(CallId(call_id), ended), ended_at_ms, expires_at_ms)
        for owner, tool, key, call_id, ended, ended_at_ms, expires_at_ms in rows
    ]
