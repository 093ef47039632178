"""Where idempotency keys are kept. See `docs/design/dispatch-keys.md`."""

from __future__ import annotations

from pathlib import Path

from callyard.dispatch.stores.port import KeyStore
from callyard.errors import UsageError


def open_key_store(where: KeyStore | str | Path) -> KeyStore | None:
    """A store by its place: "memory", the path of a SQLite file (`keys.db`), or the URL of a Redis server.

    None: memory, on the clock of whoever asks. The clients of stores that nobody asks for are not imported. Raises
    UsageError.
    """
    if not isinstance(where, str | Path):
        return where
    text = str(where)
    if text == "memory":
        return None
    if text.startswith(("redis://", "rediss://", "unix://")):
        from callyard.dispatch.stores.redis import RedisKeyStore

        return RedisKeyStore(text)
    if "://" in text or not text:
        raise UsageError(f'a key store is "memory", the path of a SQLite file, or a redis:// URL, got {text!r}')
    from callyard.dispatch.stores.sqlite import SqliteKeyStore

    return SqliteKeyStore(text)
