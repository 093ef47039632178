"""The provider `files`: reading below folders that the operator named. A path's first part is the root's name."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Final

import msgspec
from msgspec import Meta

from callyard.errors import ErrorKind, UsageError
from callyard.worker.io.beneath import Escape, open_beneath
from callyard.worker.io.config import RootConfig
from callyard.worker.io.port import IoFailure, IoScope, Provider, Reply, decode_request
from callyard.worker.io.threads import Threads

THREADS: Final = 8
Natural = Annotated[int, Meta(ge=0, le=2**62)]


class _ReadRequest(msgspec.Struct, forbid_unknown_fields=True):
    path: str
    offset: Natural = 0
    length: Natural | None = None
    """None: to the end."""


class _PathRequest(msgspec.Struct, forbid_unknown_fields=True):
    path: str


class _Entry(msgspec.Struct):
    name: str
    kind: str
    """`file`, `folder`, `link` or `other`."""
    size: int
    modified_s: float
    """Seconds since 1970."""


class _Folder:
    """A root's descriptor, which stays the folder that was named when its path is moved or replaced.

    Closed with its last user: a thread may outlive the provider.
    """

    def __init__(self, path: Path) -> None:
        self.fd = -1
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class FilesProvider(Provider):
    read_only: ClassVar[frozenset[str]] = frozenset({"read", "list", "stat"})

    def __init__(self, roots: Mapping[str, RootConfig]) -> None:
        self._roots = roots
        self._folders: dict[str, _Folder] = {}
        self._threads = Threads("files", THREADS)

    async def open(self) -> None:
        for name, root in self._roots.items():
            try:
                self._folders[name] = _Folder(root.path)
            except OSError as error:
                await self.close()
                raise UsageError(
                    f"io.files.{name}: expected a folder that can be read, {root.path}: {error.strerror}"
                ) from error

    async def close(self) -> None:
        self._threads.close()
        self._folders.clear()

    async def perform(self, operation: str, request: bytes, body: bytes | None, scope: IoScope) -> Reply:
        if operation == "read":
            asked = decode_request(request, _ReadRequest, operation)
            return await self._at(
                asked.path, scope, lambda root, fd: _read(root, fd, asked.path, asked.offset, asked.length)
            )
        if operation not in self.read_only:
            raise IoFailure(ErrorKind.SCHEMA, f"files has {', '.join(sorted(self.read_only))}, not {operation!r}")
        path = decode_request(request, _PathRequest, operation).path
        if operation == "list" and not path.strip("/"):
            names = sorted(name for name in self._folders if scope.permits(name))
            return Reply(msgspec.json.encode([_Entry(name, "folder", 0, 0) for name in names]))
        if operation == "list":
            return await self._at(path, scope, lambda root, fd: _list(root, fd, path))
        return await self._at(path, scope, lambda _root, fd: Reply(msgspec.json.encode(_entry(path, os.fstat(fd)))))

    async def _at(self, path: str, scope: IoScope, act: Callable[[RootConfig, int], Reply]) -> Reply:
        """`act` in a thread with the root and a descriptor of the path."""
        name, _, below = path.partition("/")
        folder = self._folders.get(name)
        if folder is None:
            message = f'no root {name!r}; whoever runs the worker may add it: [io.files] {name or "data"} = "/…"'
            raise IoFailure(ErrorKind.NOT_FOUND, message, roots=sorted(self._folders))
        if not scope.permits(name):
            raise IoFailure(ErrorKind.DENIED, f"this task may not use the root {name!r}")

        def work() -> Reply:
            try:
                found = open_beneath(folder.fd, below.lstrip("/"))
                try:
                    return act(self._roots[name], found)
                finally:
                    os.close(found)
            except (OSError, ValueError) as error:
                raise _explain(error, path) from error

        return await self._threads.run(work)


def _read(root: RootConfig, found: int, path: str, offset: int, length: int | None) -> Reply:
    about = os.fstat(found)
    if stat.S_ISDIR(about.st_mode):
        raise IoFailure(ErrorKind.SCHEMA, f"{path} is a folder: list it, or name a file in it")
    if not stat.S_ISREG(about.st_mode):
        raise IoFailure(ErrorKind.DENIED, f"{path} is no plain file")
    wanted = max(0, about.st_size - offset) if length is None else length
    if wanted > root.max_bytes and length is None:
        message = (
            f"{path}: {wanted} bytes, more than max_bytes={root.max_bytes}; read it in parts, with offset and length"
        )
        raise IoFailure(ErrorKind.RESULT, message, limit="max_bytes", max_bytes=root.max_bytes, size=about.st_size)
    if wanted > root.max_bytes:
        raise IoFailure(ErrorKind.SCHEMA, f"length {wanted} is more than max_bytes={root.max_bytes}", limit="max_bytes")
    parts: list[bytes] = []
    while wanted > 0 and (part := os.pread(found, wanted, offset)):
        parts.append(part)
        offset += len(part)
        wanted -= len(part)
    return Reply(b'{"size":%d}' % about.st_size, b"".join(parts))


def _list(root: RootConfig, found: int, path: str) -> Reply:
    if not stat.S_ISDIR(os.fstat(found).st_mode):
        raise IoFailure(ErrorKind.SCHEMA, f"{path} is no folder")
    entries: list[_Entry] = []
    with os.scandir(found) as names:
        for one in names:
            if len(entries) == root.entries_max:
                message = f"{path}: more than entries_max={root.entries_max} entries"
                raise IoFailure(ErrorKind.RESULT, message, limit="entries_max")
            try:
                entries.append(_entry(one.name, one.stat(follow_symlinks=False)))
            except FileNotFoundError:  # gone since it was listed
                continue
    entries.sort(key=lambda entry: entry.name)
    return Reply(msgspec.json.encode(entries))


def _entry(path: str, about: os.stat_result) -> _Entry:
    mode = about.st_mode
    kinds = ((stat.S_ISREG, "file"), (stat.S_ISDIR, "folder"), (stat.S_ISLNK, "link"))
    kind = next((name for is_kind, name in kinds if is_kind(mode)), "other")
    name = path.rstrip("/").rpartition("/")[2].encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return _Entry(name, kind, about.st_size, about.st_mtime)


def _explain(error: OSError | ValueError, path: str) -> IoFailure:
    if isinstance(error, Escape):
        return IoFailure(ErrorKind.DENIED, f"{path} {error.strerror}")
    if not isinstance(error, OSError):  # a NUL, a lone surrogate
        return IoFailure(ErrorKind.SCHEMA, f"{path!r} is no path")
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return IoFailure(ErrorKind.NOT_FOUND, f"{path}: no such file or folder")
    if error.errno in (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENXIO):
        return IoFailure(ErrorKind.DENIED, f"{path}: {error.strerror}")
    if error.errno == errno.ENAMETOOLONG:
        return IoFailure(ErrorKind.SCHEMA, f"{path[:80]}…: {error.strerror}")
    return IoFailure(
        ErrorKind.UNAVAILABLE, f"{path}: {error.strerror}", cause=errno.errorcode.get(error.errno or 0, "")
    )
