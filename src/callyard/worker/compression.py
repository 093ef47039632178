"""Compressed call lists, by name: gzip and zstd of the standard library, zstd before Python 3.14 of its backport."""

from __future__ import annotations

import gzip
import importlib
import zlib
from typing import IO, Any, Final, cast

from callyard.extras import missing

COMPRESSIONS: Final = {"gz": "gzip", "gzip": "gzip", "zst": "zstd", "zstd": "zstd"}
_ZSTD_MODULES: Final = ("compression.zstd", "backports.zstd")


def split_format(name: str) -> tuple[str, str | None]:
    """The format and the compression that a file's name says: `trips.csv.gz` is `csv` and `gzip`."""
    suffixes = name.lower().split(".")[1:]
    compression = COMPRESSIONS.get(suffixes[-1]) if suffixes else None
    if compression is not None:
        suffixes.pop()
    return suffixes[-1] if suffixes else "", compression


def open_compressed(name: str, file: IO[bytes], compression: str) -> IO[bytes]:
    """The text in `file`, unpacked as it is read. Raises UsageError when the library for it is missing."""
    if compression == "gzip":
        return cast(IO[bytes], gzip.GzipFile(fileobj=file, mode="rb"))
    zstd = _find_zstd()
    if zstd is None:
        raise missing("zstd", f"{name}: zstd", "backports.zstd before Python 3.14")
    return cast(IO[bytes], zstd.ZstdFile(file))


def broken_data(error: Exception) -> str | None:
    """What is wrong with a file that raised this when it was read; None: it is no such error."""
    if isinstance(error, EOFError):
        return "its compressed data end too early: it was cut off; the rows before were taken"
    if isinstance(error, gzip.BadGzipFile | zlib.error) or type(error).__name__ == "ZstdError":
        return f"its compressed data are damaged, or are not what its name says: {error}"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return None


def _find_zstd() -> Any:
    for module in _ZSTD_MODULES:
        try:
            return importlib.import_module(module)
        except ImportError:
            continue
    return None
