"""What tells the input of a run from another one. Source: call-execution X88."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from pathlib import Path
from typing import Final

from callyard.worker.journal import InputMark, Notes

_READ_BYTES: Final = 1024 * 1024


def is_stored(source: str | os.PathLike[str]) -> bool:
    """Whether it can be read more than once. Of a pipe (`-`, `<(…)`, a FIFO) each byte comes to one reader only."""
    return str(source) != "-" and (os.path.isfile(source) or os.path.isdir(source))


class RunInput:
    """The file of a call list, or the folder of one. Its digest is made beside the run, by a thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stop = threading.Event()
        self._hashing: asyncio.Task[str] | None = None

    def begin(self) -> None:
        self._hashing = asyncio.ensure_future(self._hash())

    @property
    def digest(self) -> str | None:
        """None: not known yet, or not to be known."""
        hashing = self._hashing
        return None if hashing is None or not hashing.done() or hashing.cancelled() else hashing.result() or None

    async def wait(self) -> None:
        if self._hashing is not None:
            await asyncio.wait({self._hashing})

    def close(self) -> None:
        self._stop.set()
        if self._hashing is not None:
            self._hashing.cancel()

    def mark(self) -> InputMark:
        found = [file.stat() for file in self._files()]
        return InputMark(sum(info.st_size for info in found), max((info.st_mtime_ns for info in found), default=0))

    async def compare(self, before: InputMark, notes: Notes) -> str:
        """What is different about it from what a run began with; empty: nothing."""
        now = self.mark()
        if now.size != before.size:
            return f"{self.path} has {now.size:,} bytes and had {before.size:,}"
        if notes.input_digest is None:  # the run ended before it was known
            return "" if now == before else f"{self.path} was written to since"
        await self.wait()
        return "" if self.digest == notes.input_digest else f"{self.path} has another content"

    def _files(self) -> list[Path]:
        return sorted(self.path.glob("*.parquet")) if self.path.is_dir() else [self.path]

    async def _hash(self) -> str:
        """Empty: it cannot be read, or was not read to its end."""
        try:
            return await asyncio.to_thread(self._hash_files)
        except OSError:
            return ""  # who reads its rows says why

    def _hash_files(self) -> str:
        found = hashlib.sha256()
        for file in self._files():
            with file.open("rb", buffering=0) as stream:
                while data := stream.read(_READ_BYTES):
                    if self._stop.is_set():
                        return ""
                    found.update(data)
        return found.hexdigest()
