"""A bundle on its way to an executor that cannot read the worker's folder.

The bytes sent are those that the digest is made of: each path and each content with its length in 8 bytes before it,
the files in the order of their paths. So the archive needs no format of its own, holds nothing but files, and proves
itself: what was unpacked has the digest that was asked for. Source: call-execution X86, Decisions ("Bundle and
digest").
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from callyard.errors import ProtocolError
from callyard.ids import Digest

PART_BYTES: Final = 1024 * 1024
"""Of one sidecar frame."""
PATH_BYTES_MAX: Final = 4_096
_LENGTH_BYTES: Final = 8


def read_parts(folder: Path, part_bytes: int) -> Iterator[bytes]:
    """The archive of a bundle's folder, in parts of `part_bytes` and a shorter last one. Raises OSError."""
    part = bytearray()
    for piece in _read_pieces(folder):
        part += piece
        while len(part) >= part_bytes:
            yield bytes(part[:part_bytes])
            del part[:part_bytes]
    if part:
        yield bytes(part)


def _read_pieces(folder: Path) -> Iterator[bytes]:
    names = sorted(path.relative_to(folder).as_posix().encode() for path in folder.rglob("*") if path.is_file())
    for name in names:
        content = (folder / os.fsdecode(name)).read_bytes()
        for piece in (name, content):
            yield len(piece).to_bytes(_LENGTH_BYTES, "big")
            yield piece


class Unpacker:
    """Writes an archive's files below a folder of its own, as the parts come.

    Any sequence of bytes either becomes plain files below that folder, within the bounds of a bundle, or is refused
    with `ProtocolError`. A full disk is an OSError.
    """

    def __init__(self, folder: Path) -> None:
        """`folder` must not be there yet: whoever could have made it could have put a link into it."""
        folder.mkdir(mode=0o700)
        self.folder = folder
        self._digest = hashlib.blake2b(digest_size=32)
        self._pending = bytearray()
        self._name = ""
        """The file whose content comes next; empty: a name does."""
        self._last_name = b""
        self._file_bytes = 0
        self._files = 0

    def feed(self, part: bytes) -> None:
        self._digest.update(part)
        self._pending += part
        while (piece := self._take_piece()) is not None:
            if self._name:
                self._write(self._name, piece)
                self._name = ""
            else:
                self._name = self._check_name(piece)

    def finish(self, digest: Digest) -> None:
        """The last part has come. Raises `ProtocolError` when these are not the bytes of that digest."""
        if self._pending or self._name:
            raise ProtocolError(f"the code of bundle {digest[:12]} ends in the middle of a file")
        if self._digest.hexdigest() != digest:
            raise ProtocolError(
                f"the code that came for bundle {digest[:12]} is another: {self._digest.hexdigest()[:12]}"
            )

    def _take_piece(self) -> bytes | None:
        if len(self._pending) < _LENGTH_BYTES:
            return None
        size = int.from_bytes(self._pending[:_LENGTH_BYTES], "big")
        self._check_size(size)
        end = _LENGTH_BYTES + size
        if len(self._pending) < end:
            return None
        piece = bytes(self._pending[_LENGTH_BYTES:end])
        del self._pending[:end]
        return piece

    def _check_size(self, size: int) -> None:
        from callyard.functions.bundle import BUNDLE_BYTES_MAX

        most = BUNDLE_BYTES_MAX - self._file_bytes if self._name else PATH_BYTES_MAX
        if size > most:
            raise ProtocolError(f"code archive: a {'file' if self._name else 'path'} of {size} bytes, at most {most}")

    def _check_name(self, name: bytes) -> str:
        from callyard.functions.bundle import BUNDLE_FILES_MAX

        self._files += 1
        parts = name.split(b"/")
        if self._files > BUNDLE_FILES_MAX:
            raise ProtocolError(f"code archive: more than {BUNDLE_FILES_MAX} files")
        if b"\0" in name or any(part in (b"", b".", b"..") for part in parts) or name <= self._last_name:
            raise ProtocolError(f"code archive: expected relative paths in order, got {name[:100]!r}")
        self._last_name = name
        return os.fsdecode(name)

    def _write(self, name: str, content: bytes) -> None:
        path = self.folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o444)
        except (FileExistsError, NotADirectoryError) as error:
            raise ProtocolError(f"code archive: {name!r} is a file and a folder") from error
        with os.fdopen(fd, "wb") as file:
            file.write(content)
        self._file_bytes += len(content)
