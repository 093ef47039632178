"""Environments for scripts that name their packages (PEP 723): made by `uv`, kept by the digest of what is in them.

Nothing here names an index: `uv` installs from where its own settings say. An environment is made once, under a lock,
and counts once its mark is there.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from callyard.errors import UsageError
from callyard.functions.script import Script
from callyard.worker.interpreter import NEEDS, VIRTUAL_ENV, pip_command, python_in

UV_S: Final = 600.0
TAIL_LINES: Final = 12
_MARK: Final = ".complete"


def prepare_environment(script: Script, name: str, *, trusted: bool = True) -> tuple[str, str]:
    """Path and origin of an interpreter that has what a script needs. Raises UsageError when it cannot be had.

    `name`: of the script. To install packages may run code of theirs: nobody's but a trusted script's.
    """
    wanted = ", ".join(script.dependencies)
    advice = pip_command("PYTHON", script.dependencies)
    if not trusted:
        raise UsageError(
            f"{name} names packages that it needs (PEP 723): {wanted}. For code that is confined or audited none are"
            f" installed: make an environment that has them ({advice}), and name it with --python"
        )
    uv = shutil.which("uv")
    if uv is None:
        raise UsageError(
            f"{name} names packages that it needs (PEP 723): {wanted}. Callyard gets them by uv, which is not installed"
            f" here: install uv, or make an environment that has them ({advice}), and name it with --python"
        )
    folder = cache_folder() / digest_of(script)
    with _locked(folder):
        if not (folder / _MARK).exists():
            _make(uv, script, name, folder)
    python = python_in(folder)
    if python is None:
        raise UsageError(f"{folder} has no bin/python any more: remove the folder, and it is made again")
    return python, f"with the packages that {name} names"


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "callyard" / "environments"


def digest_of(script: Script) -> str:
    """What an environment depends on: the packages, and the Python."""
    parts = [sorted(script.dependencies), script.requires_python or _own_python(), sorted(NEEDS.items())]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def _own_python() -> str:
    return os.path.realpath(sys.executable)


def _make(uv: str, script: Script, name: str, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    needs = [f"{package}>={version}" for package, version in NEEDS.items()]
    python = script.requires_python or _own_python()
    try:
        _run([uv, "venv", "--quiet", "--python", python, str(folder)], name)
        install = [uv, "pip", "install", "--quiet", "--python", str(folder / "bin" / "python")]
        _run([*install, "--", *script.dependencies, *needs], name)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    (folder / _MARK).touch()


def _run(command: list[str], name: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != VIRTUAL_ENV}
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, env=environment, timeout=UV_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"uv could not make an environment for {name}: {error}") from error
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()[-TAIL_LINES:]
        raise UsageError("\n    ".join([f"uv could not make an environment for {name}:", *said]))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process makes an environment; others wait for it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"no environment can be kept in {folder.parent}: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
