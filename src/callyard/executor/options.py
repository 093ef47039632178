"""The command line of an executor (X51), and what its exit statuses mean.

Parsed by hand: the caller is a program of ours, and argparse would cost every start its import.
"""

from __future__ import annotations

import sys
from typing import Final

import msgspec

from callyard import __version__
from callyard.errors import CallyardError, UsageError
from callyard.ids import ExecutorId
from callyard.wire.messages import PROTOCOL_VERSION

EXIT_USAGE: Final = 64
"""The command line was wrong."""
EXIT_SOFTWARE: Final = 70
"""A bug of ours; the traceback is on stderr."""
EXIT_PROTOCOL: Final = 76
"""The worker broke the protocol, or the link became unusable."""
EXIT_VERSION: Final = 78
"""Worker and executor speak different protocols."""
EXECUTOR_MAX: Final = 65_536
"""Most contexts that one process is asked for."""


class VersionMismatch(CallyardError):
    """The worker speaks another protocol than this package."""


class Options(msgspec.Struct, frozen=True):
    executor_id: ExecutorId
    protocol: int
    max_inflight: int = 128
    """Calls held at once, begun or not."""
    max_runnable: int = 128
    """The worker's threshold (X8); an executor only reports its runnable count."""
    socket_fd: int = -1
    socket_path: str = ""
    mark_fd: int = -1
    arena_fd: int = -1
    """The file for values that are too large for a frame; -1: there is none."""
    shared_fd: int = -1
    """The file of what the worker shares, for reading; -1: there is none."""
    lifeline_fd: int = -1
    """A pipe whose other end only the worker holds."""
    heartbeat_interval_ms: int = 500
    capture_locals: bool = False
    nice: int = 0
    """How far it steps back behind other processes."""
    confine: str = ""
    """What the process takes away from itself, as JSON (`executor.confine`)."""


_NUMBERS: Final[dict[str, tuple[str, int, int]]] = {
    "--executor-max-inflight": ("max_inflight", 1, EXECUTOR_MAX),
    "--executor-max-runnable": ("max_runnable", 1, EXECUTOR_MAX),
    "--protocol": ("protocol", 0, 1 << 31),
    "--socket-fd": ("socket_fd", 0, 1 << 20),
    "--mark-fd": ("mark_fd", 0, 1 << 20),
    "--arena-fd": ("arena_fd", 0, 1 << 20),
    "--shared-fd": ("shared_fd", 0, 1 << 20),
    "--lifeline-fd": ("lifeline_fd", 0, 1 << 20),
    "--heartbeat-interval-ms": ("heartbeat_interval_ms", 10, 60_000),
    "--nice": ("nice", 0, 19),
}
_TEXTS: Final = {"--executor-id": "executor_id", "--socket-path": "socket_path", "--confine": "confine"}


def parse_options(argv: list[str]) -> Options:
    """Read `argv` (without the program's name).

    Raises `VersionMismatch` before it complains of anything else, since a worker of another version may well pass flags
    unknown here, and `UsageError` for the rest.
    """
    words = _split(argv)
    _check_protocol(words)
    given: dict[str, object] = {}
    for flag, text in words:
        if flag == "--capture-locals" and text is None:
            given["capture_locals"] = True
        elif text is None:
            raise UsageError(f"{flag}: expected a value after it, or no such flag")
        elif flag in _TEXTS:
            given[_TEXTS[flag]] = text
        elif flag in _NUMBERS:
            name, least, most = _NUMBERS[flag]
            given[name] = _number(flag, text, least, most)
        else:
            raise UsageError(f"unknown flag {flag}")
    for flag, name in (("--executor-id", "executor_id"), ("--protocol", "protocol")):
        if not given.get(name):
            raise UsageError(f"{flag} is missing")
    if ("socket_fd" in given) == ("socket_path" in given):
        raise UsageError("expected exactly one of --socket-fd and --socket-path")
    return msgspec.convert(given, Options)


def _split(argv: list[str]) -> list[tuple[str, str | None]]:
    words: list[tuple[str, str | None]] = []
    rest = iter(argv)
    for word in rest:
        flag, equals, value = word.partition("=")
        if not flag.startswith("--"):
            raise UsageError(f"expected a flag, got {word!r}")
        if equals:
            words.append((flag, value))
        elif flag == "--capture-locals":
            words.append((flag, None))
        else:
            words.append((flag, next(rest, None)))
    return words


def _check_protocol(words: list[tuple[str, str | None]]) -> None:
    for flag, text in words:
        if flag == "--protocol" and text is not None and _is_number(text) and int(text) != PROTOCOL_VERSION:
            raise VersionMismatch(
                f"the worker speaks executor protocol {int(text)}, but callyard {__version__} of {sys.executable} "
                f"speaks {PROTOCOL_VERSION}. Give this interpreter the worker's callyard (its version: "
                f"`callyard --version` where the worker runs):\n"
                f"    {sys.executable} -m pip install 'callyard==VERSION'"
            )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def _number(flag: str, text: str, least: int, most: int) -> int:
    if not _is_number(text) or not least <= int(text) <= most:
        raise UsageError(f"{flag}: expected a whole number from {least} to {most}, got {text!r}")
    return int(text)
