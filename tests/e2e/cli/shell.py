"""The command as a shell runs it: a process of its own, its streams, its exit status, its terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests.e2e.processes import children_of, wait_gone, wait_until

CALLYARD = Path(sys.executable).with_name("callyard")
TARGET = Path(__file__).with_name("functions_file.py")
TIMEOUT_S = 90.0
_BYTECODE = tempfile.TemporaryDirectory(prefix="callyard-bytecode-")
"""Else an environment that forbids to write bytecode has every process compile every module: half of its time."""
ENVIRONMENT = {
    **{
        name: value
        for name, value in os.environ.items()
        if not name.startswith("CALLYARD_") and name != "PYTHONDONTWRITEBYTECODE"
    },
    "PYTHONPYCACHEPREFIX": _BYTECODE.name,
    "CALLYARD_SPARE_EXECUTORS": "0",
    "CALLYARD_EXECUTOR_COUNT": "1",
    "COLUMNS": "100",
}
"""One executor and no spare: most tests need no more, and processes are dear."""


@dataclass(frozen=True)
class Done:
    """A command that ended."""

    status: int
    out: str
    err: str

    @property
    def results(self) -> list[dict[str, Any]]:
        return parse_lines(self.out)


def parse_lines(text: str) -> list[dict[str, Any]]:
    """The results in an output, of which every line is whole."""
    assert not text or text.endswith("\n"), f"a line is cut off: {text[-80:]!r}"
    return [json.loads(line) for line in text.splitlines()]


def run(*words: str | Path, stdin: str | bytes = "", **options: Any) -> Done:
    """Run `callyard` with these words to its end."""
    environment = {**ENVIRONMENT, **options.pop("env", {})}
    done = subprocess.run(
        [CALLYARD, *map(str, words)],
        input=stdin.encode() if isinstance(stdin, str) else stdin,
        capture_output="stdout" not in options,
        timeout=TIMEOUT_S,
        env=environment,
        check=False,
        **options,
    )
    return Done(done.returncode, (done.stdout or b"").decode(), (done.stderr or b"").decode())


@contextmanager
def started(*words: str | Path, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A command at work, with pipes for all three streams unless `options` say otherwise; killed if it still runs."""
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    environment = {**ENVIRONMENT, **options.pop("env", {})}
    with subprocess.Popen([CALLYARD, *map(str, words)], text=True, env=environment, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def finish(process: subprocess.Popen[str]) -> Done:
    """Wait for its end."""
    out, err = process.communicate(timeout=TIMEOUT_S)
    return Done(process.returncode, out or "", err or "")


def executors_of(process: subprocess.Popen[str]) -> list[int]:
    """The command's child processes, once there is one."""
    wait_until(lambda: bool(children_of(process.pid)), "an executor runs")
    return children_of(process.pid)


@contextmanager
def nothing_left(process: subprocess.Popen[str]) -> Iterator[None]:
    """The executors there are now are gone after the body."""
    pids = executors_of(process)
    yield
    wait_gone(pids)


def wait_for_file(path: Path, lines: int = 1) -> None:
    """Until it has so many lines."""
    wait_until(lambda: path.exists() and path.read_bytes().count(b"\n") >= lines, f"{lines} lines in {path.name}")


class Terminal:
    """A command whose controlling terminal we hold. What it shows is read by a thread, so that it never waits."""

    def __init__(
        self, words: Sequence[str | Path], *, stdout: IO[bytes] | None = None, columns: int = 100, **env: str
    ) -> None:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        environment = {**ENVIRONMENT, "TERM": "xterm-256color", **env}
        for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _ON_TERMINAL, CALLYARD, *map(str, words)],
            stdin=theirs,
            stdout=stdout or theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
        )
        os.close(theirs)
        self._fd = ours
        self._data = b""
        self._hung_up = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while not self._hung_up:
            if select.select([self._fd], [], [], 0.05)[0]:
                try:
                    self._data += os.read(self._fd, 65_536)
                except OSError:  # the last process that had it open is gone
                    break
        os.close(self._fd)

    @property
    def raw(self) -> str:
        return self._data.decode()

    @property
    def lines(self) -> list[str]:
        """The lines as they stand on the screen in the end, without colours."""
        return render(self.raw)

    def press(self, keys: bytes) -> None:
        os.write(self._fd, keys)

    def hang_up(self) -> None:
        """Close the terminal, as a window or an ssh connection does."""
        self._hung_up = True
        self._reader.join(TIMEOUT_S)

    def wait(self) -> int:
        status = self.process.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        return status


_ON_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""The new session takes the terminal as its own, then becomes the command."""

_SEQUENCE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")


def render(text: str) -> list[str]:
    """A very small terminal: what is left on the screen. An escape sequence it does not know is an error."""
    rows, row, column, at = [""], 0, 0, 0
    while at < len(text):
        match = _SEQUENCE.match(text, at)
        if match:
            at = match.end()
            argument, command = match.groups()
            if command == "A":
                row -= int(argument or 1)
                assert row >= 0, "moved above what it wrote"
            elif command == "K":
                assert argument == "2", match[0]
                rows[row] = ""
            else:
                assert command == "m", f"unexpected sequence {match[0]!r}"
            continue
        character = text[at]
        at += 1
        if character == "\n":
            row += 1
            if row == len(rows):
                rows.append("")
        elif character == "\r":
            column = 0
        else:
            rows[row] = rows[row][:column].ljust(column) + character + rows[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in rows]
