"""The folder of one server's state: made for its owner alone, and used by one process at a time."""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path
from typing import Final

from callyard.dispatch.stores.port import Claim, KeyScope, StoreUnavailable
from callyard.dispatch.stores.sqlite import SqliteKeyStore
from callyard.errors import UsageError
from callyard.ids import CallId

_log: Final = logging.getLogger("callyard.serve")
LOCK_FILE: Final = "server.lock"
KEYS_FILE: Final = "keys.db"
KEPT_FOLDER: Final = "kept"
FOLDERS_MAX: Final = 64
"""Servers of one target that keep their state by themselves."""


class StateFolder:
    """Held until `release`, or until this process ends, however it ends."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock: int | None = lock
        self._keys: os.stat_result | None = None

    @classmethod
    def take(cls, path: Path) -> StateFolder:
        """Raises UsageError for one that is in use, or cannot be used."""
        found = _try_take(path)
        if isinstance(found, StateFolder):
            return found
        raise UsageError(
            f"{path} is in use by another server{_show_pid(found)}: stop that one, or give this one a folder of its "
            "own with --state-dir"
        )

    @classmethod
    def take_next(cls, path: Path) -> StateFolder:
        """This one, or the first of `<path>~2`, `<path>~3`, … that no server uses: each client of a program on stdio
        starts a server of its own. Raises UsageError."""
        for candidate in folders_of(path):
            found = _try_take(candidate)
            if isinstance(found, StateFolder):
                return found
        raise UsageError(f"{FOLDERS_MAX} servers use {path} and its like already: give this one another --state-dir")

    @property
    def keys(self) -> Path:
        return self.path / KEYS_FILE

    @property
    def kept(self) -> Path:
        return self.path / KEPT_FOLDER

    def remember_keys(self) -> None:
        """The file of keys is there from now on."""
        self._keys = self.keys.stat()

    def find_loss(self) -> str:
        """What was removed or replaced of it while it was in use, by its name alone, since callers are told; empty:
        nothing. What goes on without that writes where nobody will ever look, beside a server that took the folder's
        name meanwhile."""
        if self._lock is None:
            return ""
        held = [(self.path / LOCK_FILE, os.fstat(self._lock))]
        if self._keys is not None:
            held.append((self.keys, self._keys))
        for path, known in held:
            try:
                now = path.stat()
            except OSError:
                return f"{path.name} has gone"
            if (now.st_dev, now.st_ino) != (known.st_dev, known.st_ino):
                return f"{path.name} is another file"
        return ""

    def release(self) -> None:
        """Idempotent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class FolderKeyStore(SqliteKeyStore):
    """The keys in a server's folder. Raises `StoreUnavailable` for a claim once the folder, or the file, was taken from
    under it: nobody would find that claim again, and who comes back with the key would be charged twice."""

    def __init__(self, folder: StateFolder) -> None:
        super().__init__(folder.keys)
        self._folder = folder
        self._is_told = False

    async def open(self) -> None:
        await super().open()
        self._folder.remember_keys()

    async def claim(
        self, scope: KeyScope, fingerprint: str, call_id: CallId, *, idempotent: bool, unknown_ttl_ms: int
    ) -> Claim:
        loss = self._folder.find_loss()
        if loss:
            if not self._is_told:
                self._is_told = True
                _log.error("%s: %s; no call with a key runs until a new start", self._folder.path, loss)
            raise StoreUnavailable(f"{loss} from the server's state folder: it must be started anew")
        return await super().claim(scope, fingerprint, call_id, idempotent=idempotent, unknown_ttl_ms=unknown_ttl_ms)


def folders_of(path: Path) -> list[Path]:
    """Where servers of one target may keep their state."""
    return [path, *(path.with_name(f"{path.name}~{number}") for number in range(2, FOLDERS_MAX + 1))]


def _try_take(path: Path) -> StateFolder | int:
    """The folder, or the number of the process that has it (0: not known)."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(
            f"the folder for keys and kept results cannot be used: {path}: {error.strerror}. Give one that this user "
            "may write to with --state-dir"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        text = os.pread(lock, 20, 0).decode(errors="replace").strip()
        os.close(lock)
        return int(text) if text.isascii() and text.isdigit() else 0
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return StateFolder(path, lock)


def _show_pid(pid: int) -> str:
    return f" (process {pid})" if pid else ""
