"""Keys as operators see them: what is kept under each, and the word on one whose outcome is unknown.

Source: tool-dispatch D19, D21, D55.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from callyard.dispatch.config import DispatcherConfig
from callyard.dispatch.keys import check_key
from callyard.dispatch.stores.port import KeyEnd, KeyRecord, KeyScope, KeyStore
from callyard.dispatch.stores.records import wall_ms
from callyard.dispatch.stores.sqlite import APPLICATION_ID, SCHEMA_VERSION
from callyard.errors import UsageError
from callyard.functions.audit.log import append_whole, now_text, opened_to_append
from callyard.functions.encoding import ResultMisfit, encode_value
from callyard.ids import CallId, Tenant
from callyard.serve.state_folder import LOCK_FILE

RESOLVED_MS: Final = DispatcherConfig().unknown_ttl_ms
"""How long an operator's word answers for a key: as long as the question would have stood."""

State = Literal["running", "ended", "unknown"]


class KeyView(msgspec.Struct, frozen=True):
    """One key."""

    tenant: str
    tool: str
    key: str
    state: State
    call_id: str
    ended_at_ms: int | None = None
    """Wall clock, milliseconds since 1970."""
    expires_at_ms: int | None = None


class _Resolved(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the audit file."""

    time: str
    event: str
    tenant: str
    tool: str
    key: str
    by: str
    retry: bool = False


def list_keys(path: Path, *, unknown: bool = False, tenant: str | None = None, limit: int = 1_000) -> list[KeyView]:
    """What a SQLite store holds, oldest first; also while a server uses it. Raises UsageError."""
    if not path.is_file():
        raise UsageError(f"no key store at {path}: name the server's target, or its --state-dir")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5)) as connection:
            found = [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
            if found != [APPLICATION_ID, SCHEMA_VERSION]:
                raise UsageError(f"{path} is no key store of this version of Callyard")
            is_used = _is_used(path.parent)
            rows = connection.execute(_LIST, (is_used, unknown, is_used, tenant, tenant, wall_ms(), limit)).fetchall()
    except sqlite3.Error as error:
        raise UsageError(f"the key store {path} cannot be read: {error}") from error
    return [KeyView(tenant, tool, key, *rest) for tenant, tool, key, *rest in rows]


_LIST: Final = (
    "SELECT tenant, tool, key, CASE WHEN unknown OR (ended_at_ms IS NULL AND NOT idempotent AND NOT ?) THEN 'unknown' "
    "WHEN ended_at_ms IS NULL THEN 'running' ELSE 'ended' END, call_id, ended_at_ms, expires_at_ms FROM keys "
    "WHERE (NOT ? OR unknown OR (ended_at_ms IS NULL AND NOT idempotent AND NOT ?)) AND (? IS NULL OR tenant = ?) "
    "AND (expires_at_ms IS NULL OR expires_at_ms > ?) ORDER BY fence LIMIT ?"
)


def _is_used(folder: Path) -> bool:
    """A server has the folder, as far as can be told: else what it shows as running runs no more. Its lock is not
    tried, for a server that starts in that moment would be refused."""
    try:
        os.kill(int((folder / LOCK_FILE).read_text()), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError, OverflowError):
        return True
    return True


async def resolve_key(
    store: KeyStore, scope: KeyScope, result: Any = None, *, retry: bool, by: str, audit_file: Path | None
) -> bool:
    """Say how a call of unknown outcome ended: `result` answers its key from now on; with `retry` the key is free.

    False: nothing unknown is kept under that key. The audit file, where there is one, gets a line; one that cannot be
    written is found out first, and then nothing is resolved. Raises UsageError, and what the store raises.
    """
    check_key(scope.key)
    try:
        end = None if retry else KeyEnd(CallId(f"resolved-{secrets.token_hex(5)}"), 0, encode_value(result))
    except ResultMisfit as misfit:
        raise UsageError(f"expected a result that JSON can hold: {misfit}") from misfit
    if audit_file is not None:
        _append(audit_file, b"")
    resolved = await store.resolve(scope, end, RESOLVED_MS)
    if resolved and audit_file is not None:
        line = _Resolved(now_text(), "key.resolved", scope.tenant, scope.tool, scope.key, by, retry)
        _append(audit_file, msgspec.json.encode(line) + b"\n")
    return resolved


class ServedKeys:
    """The keys of a running server, for its gates: a tenant sees and resolves its own."""

    def __init__(self, store: KeyStore, audit_file: Path | None) -> None:
        self._store = store
        self._audit_file = audit_file

    async def list_unknown(self, tenant: Tenant, limit: int = 1_000) -> list[dict[str, Any]]:
        """Oldest first, as `KeyView`. Raises `StoreUnavailable`."""
        return [msgspec.to_builtins(view_of(record)) for record in await self._store.unknown(tenant, limit)]

    async def resolve(
        self, tenant: Tenant, tool: str, key: str, *, result: Any = None, retry: bool = False, by: str = "http"
    ) -> bool:
        """As `resolve_key`."""
        scope = KeyScope(tenant, tool, key)
        return await resolve_key(self._store, scope, result, retry=retry, by=by, audit_file=self._audit_file)


def view_of(record: KeyRecord) -> KeyView:
    """Of one whose outcome is unknown."""
    scope = record.scope
    return KeyView(
        scope.tenant, scope.tool, scope.key, "unknown", record.end.call_id, record.ended_at_ms, record.expires_at_ms
    )


def scope_of(tenant: str, tool: str, key: str) -> KeyScope:
    return KeyScope(Tenant(tenant), tool, key)


def _append(path: Path, line: bytes) -> None:
    with opened_to_append(path) as fd:
        if line:
            append_whole(fd, line)
