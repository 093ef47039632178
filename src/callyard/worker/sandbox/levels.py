"""The levels of the sandbox, what it limits, and the record of what is in force."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

from callyard.errors import UsageError


class Level(StrEnum):
    OFF = "off"
    LANDLOCK = "landlock"
    BWRAP = "bwrap"

    @property
    def strength(self) -> int:
        return list(Level).index(self)


SandboxChoice = Literal["auto", "bwrap", "landlock", "off"]
"""`auto`: the strongest level that this machine allows."""
LEVELS: Final = tuple(str(level) for level in reversed(Level))
CHOICES: Final = ("auto", *LEVELS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one executor. 0: none."""

    memory_bytes: int
    tmp_bytes: int
    processes: int
    open_files: int
    cpu_percent: int  # 100: one CPU
    subprocesses: bool  # user code may start programs


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitInForce:
    name: str
    value: str
    by: str
    """What enforces it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """What confines a worker's executors; every line of it was tried on this machine."""

    level: Level
    asked: SandboxChoice
    user: str = ""
    network: str = ""
    files: str = ""
    limits: tuple[LimitInForce, ...] = ()
    gaps: tuple[str, ...] = ()
    """What stays open at this level, on this machine."""
    passed_over: tuple[str, ...] = ()
    """Stronger levels that this machine does not allow, each with the reason."""


OFF: Final = Sandbox(level=Level.OFF, asked="off")


def check_choice(sandbox: str | None, sandbox_min: str | None) -> None:
    """Raise UsageError for what is no level, or a level below its own minimum."""
    if sandbox is not None and sandbox not in CHOICES:
        raise UsageError(f"sandbox must be one of {', '.join(CHOICES)}, got {sandbox!r}")
    if sandbox_min is not None and sandbox_min not in LEVELS:
        raise UsageError(f"sandbox_min must be one of {', '.join(LEVELS)}, got {sandbox_min!r}")
    if sandbox in (None, "auto") or sandbox_min is None:
        return
    if Level(sandbox).strength < Level(sandbox_min).strength:
        raise UsageError(f"sandbox={sandbox} is below sandbox_min={sandbox_min}: raise the one or lower the other")
