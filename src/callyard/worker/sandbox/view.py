"""What a confined executor sees of this machine: the interpreter, its packages, our own package, and the libraries.

Nothing of the user's: not the working folder, not the project, not the home folder. The bundle comes over the link.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from callyard.errors import UsageError
from callyard.worker.interpreter import Interpreter, own_interpreter

SYSTEM: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/gnu/store")
SETTINGS: Final = (
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/alternatives",
    "/etc/localtime",
    "/etc/mime.types",
)
"""What libraries read of /etc; no accounts, no keys, no names of other machines."""
KEPT_VARIABLES: Final = (
    "LANG",
    "LANGUAGE",
    "TZ",
    "PYTHONHASHSEED",
    "PYTHONUTF8",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
"""Variables of the worker's environment that executors get, beside `LC_…`."""


def python_paths(interpreter: Interpreter | None = None) -> list[str]:
    """Files and folders of an interpreter, its packages and our own; none lies in another. Raises UsageError.

    `interpreter`: None is the one that runs this process.
    """
    chosen = interpreter or own_interpreter()
    found = [*chosen.prefixes, str(Path(__file__).parents[2]), *_links(chosen.path)]
    if chosen.user_site:
        found.append(chosen.user_site)
    found += [os.path.realpath(path) for path in found]
    visible = list(_outermost(path for path in found if os.path.exists(path)))
    home = os.path.expanduser("~")
    for path in visible:
        if path == "/" or (home != "/" and Path(home).is_relative_to(path) and path not in SYSTEM):
            raise UsageError(
                f"the sandbox would show {path}, which holds the home folder, since the interpreter is installed there:"
                " use a virtual environment in a folder of its own"
            )
    return visible


def bytecode_paths(interpreter: Interpreter | None = None) -> list[str]:
    """The parts of a bytecode cache (PYTHONPYCACHEPREFIX) that belong to those paths."""
    prefix = _bytecode_prefix()
    paths = [os.path.join(prefix, path.lstrip("/")) for path in python_paths(interpreter)] if prefix else []
    return [path for path in paths if os.path.isdir(path)]


def build_environment(tmp: str, given: Mapping[str, str], interpreter: Interpreter | None = None) -> dict[str, str]:
    """The whole environment of an executor; `given` was meant for it by name."""
    kept = {name: value for name, value in os.environ.items() if name in KEPT_VARIABLES or name.startswith("LC_")}
    own = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": tmp,
        "TMPDIR": tmp,
        "USER": "callyard",
        "LOGNAME": "callyard",
        "MALLOC_ARENA_MAX": "2",  # each arena takes address space, which is limited
    }
    chosen = interpreter or own_interpreter()
    if chosen.user_site:
        own["PYTHONUSERBASE"] = chosen.user_base
    if prefix := _bytecode_prefix():
        own["PYTHONPYCACHEPREFIX"] = prefix
    return {"LANG": "C.UTF-8", **kept, **own, **given}


def closed_folder(paths: Iterable[str]) -> str:
    """The first folder on the way to any of `paths` that other users may not enter; empty: there is none."""
    for path in paths:
        for place in (*reversed(Path(path).parents), Path(path)):
            mode = os.stat(place).st_mode
            if not mode & 0o001 or (place == Path(path) and not mode & 0o004):
                return str(place)
    return ""


def _bytecode_prefix() -> str:
    """As executors would get it; empty: bytecode lies beside its source."""
    prefix = os.environ.get("PYTHONPYCACHEPREFIX") or sys.pycache_prefix
    return os.path.abspath(prefix) if prefix else ""


def _links(path: str) -> Iterator[str]:
    """Each symbolic link on the way from `path` to its file."""
    for _ in range(40):
        yield path
        if not os.path.islink(path):
            return
        path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))


def _outermost(paths: Iterable[str]) -> Iterator[str]:
    kept: list[str] = []
    for path in sorted({os.path.abspath(path) for path in paths}, key=lambda path: (path.count("/"), path)):
        if not any(Path(path).is_relative_to(other) for other in kept):
            kept.append(path)
            yield path
