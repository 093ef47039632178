"""A disk that a process loses: at one operation, chosen by its number, and at every later one.

What was done before stays; of a write at the cut a part may be there. So a test can end a run at each of its write
boundaries, without a process for each. Source: call-execution X88.
"""

from __future__ import annotations

import errno
from enum import StrEnum
from pathlib import Path

from callyard.worker.disk import Disk


class Cut(StrEnum):
    """What is left of the operation at which the disk goes."""

    NOTHING = "nothing"
    HALF = "half"
    """Of a write its first half; of others nothing."""
    ALL = "all"
    """It was done, and nobody heard of it."""


class CutDisk(Disk):
    """Goes at operation `at`, from 0. `operations` says what was asked for up to there."""

    def __init__(self, at: int, cut: Cut = Cut.NOTHING) -> None:
        self.operations: list[str] = []
        self._at = at
        self._cut = cut

    @property
    def is_gone(self) -> bool:
        return len(self.operations) > self._at

    def write(self, fd: int, data: bytes | memoryview) -> int:
        if self._begin("write"):
            size = {Cut.NOTHING: 0, Cut.HALF: len(data) // 2, Cut.ALL: len(data)}[self._cut]
            if size:
                super().write(fd, data[:size])
            raise self._gone()
        return super().write(fd, data)

    def truncate(self, fd: int, size: int) -> None:
        cut = self._begin("truncate")
        if not cut or self._cut is Cut.ALL:
            super().truncate(fd, size)
        if cut:
            raise self._gone()

    def sync(self, fd: int) -> None:
        if self._begin("sync"):
            raise self._gone()
        super().sync(fd)

    def replace(self, old: Path, new: Path) -> None:
        cut = self._begin("replace")
        if not cut or self._cut is Cut.ALL:
            super().replace(old, new)
        if cut:
            raise self._gone()

    def remove(self, path: Path) -> None:
        cut = self._begin("remove")
        if not cut or self._cut is Cut.ALL:
            super().remove(path)
        if cut:
            raise self._gone()

    def _begin(self, name: str) -> bool:
        """Whether this is the operation at which the disk goes. Raises OSError when it is gone."""
        if self.is_gone:
            raise self._gone()
        self.operations.append(name)
        return self.is_gone

    @staticmethod
    def _gone() -> OSError:
        return OSError(errno.EIO, "the disk is gone")
