"""What a user names to be called: a Python file, a module, or a folder, with or without a function of it.

    functions.py            functions.py:assess          a file; the part after the colon is one function
    shop.jobs.score         shop.jobs.score:assess       a module, as an import statement names it
    shop/                   shop/:assess                 a folder: a package, or a project with one thing in it

Only names and files are looked at: nothing is imported. Source: call-execution Decisions ("Bundle and digest").
"""

from __future__ import annotations

import importlib.util
import keyword
import os
import shlex
import stat
import sys
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from callyard.errors import UsageError

INIT: Final = "__init__.py"
EXPECTED: Final = "expected a Python file, such as functions.py"
FindPackage = Callable[[str], Iterable[str]]
"""The folders in which an interpreter finds a top-level name; none: it does not."""
_PREFERRED: Final = "functions.py"
_NO_CANDIDATES: Final = frozenset({"setup.py", "conftest.py", "noxfile.py", "tests", "test", "docs", "examples"})
_SHOWN_MAX: Final = 5
_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})
_MARKS: Final = ("pyproject.toml", "setup.py", "setup.cfg", ".git")
"""What a project's own folder has in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A target that was found."""

    given: str
    """As the user wrote it, without the function."""
    path: Path
    """Its file; absolute."""
    root: Path
    """The folder that its imports start from."""
    module: str
    """Its dotted name, from the root."""
    function: str | None = None
    """The one that was named."""
    folder: Path | None = None
    """All of its files belong to the target, data too; None: only what is imported, or included."""

    @property
    def name(self) -> str:
        """What to call it: `jobs.py`, `shop`, `shop.jobs`."""
        if self.folder is not None:
            return self.folder.name
        return self.path.name if _is_path(self.given, Path(self.given)) else self.given


def find_target(given: object, *, find_package: FindPackage | None = None) -> Target:
    """`find_package`: where the interpreter that will run it finds a package that is in no folder of ours; None: this
    one. Raises `UsageError` for what is no usable target, saying what was expected and what to do.
    """
    if not isinstance(given, str | os.PathLike):
        raise UsageError(explain_object(given))
    text = os.fspath(given)
    if not text or text.startswith(":"):  # of a variable of the shell that is not set; it would be the current folder
        raise UsageError(f"{EXPECTED}, a module, or a folder, got {text!r}")
    path, function = Path(text), None
    if not _exists(path):
        path, function = split_target(text)
        text = str(path)
    if _is_path(text, path):
        return _from_path(path, text, function)
    return _from_module(text, function, find_package or find_package_here)


def split_target(target: object) -> tuple[Path, str | None]:
    """`TARGET:function` into its parts; no function: None. Raises UsageError for anything else."""
    if not isinstance(target, str | os.PathLike):
        raise UsageError(explain_object(target))
    text = os.fspath(target)
    path, colon, function = text.rpartition(":")
    if not colon or (len(path) == 1 and path.isalpha()):  # no colon, or a drive letter's
        return Path(text), None
    if not function.isidentifier():
        raise UsageError(f"expected FILE.py or FILE.py:FUNCTION, got {text!r}")
    return Path(path), function


def explain_object(given: object) -> str:
    """Why an object is no target, and what to write instead: its code is found by name, never sent."""
    plain: Any = getattr(given, "target", given)
    name = getattr(plain, "__name__", "")
    if not callable(plain) or not name:
        return f"{EXPECTED}, a module, such as shop.jobs, or a folder; got {given!r}"
    code = getattr(plain, "__code__", None)
    file = getattr(code, "co_filename", "")
    if name == "<lambda>":
        return "a lambda has no name to be found by: write it as a def in a file, and give FILE.py:NAME"
    if not os.path.isfile(file) or "ipykernel" in file:
        return (
            f"{name} was defined in a notebook cell or at a prompt, where executors cannot find it: put it into a file"
            f" (in a notebook: %%writefile functions.py) and give 'functions.py:{name}'. callyard.PoolExecutor takes"
            " functions as objects"
        )
    where = " (the script that runs, as __main__)" if getattr(plain, "__module__", "") == "__main__" else ""
    return (
        f"executors find {name} by its file{where}, not by the object: give '{os.path.relpath(file)}:{name}'."
        " callyard.PoolExecutor takes functions as objects"
    )


def find_project(path: Path) -> Path | None:
    """The folder of the project that a file lies in: the nearest one with a pyproject.toml or the like."""
    return next((folder for folder in path.parents if any((folder / mark).exists() for mark in _MARKS)), None)


def explain_unbundled(target: Target, file: Path) -> str:
    """`file`, or folder, is the module that `target` needed and did not have in its bundle: how to bring it."""
    if file == target.root:
        return (
            f"{file.name} is the folder itself, where imports of {target.path.name} start: from the folder above it,"
            f" name the module {file.name}.{target.module}"
        )
    if file.is_relative_to(target.root):
        name = file.relative_to(target.root).as_posix() + ("/**/*.py" if file.is_dir() else "")
        return f"{name} is there, but no import statement names it: --include {shlex.quote(name)}"
    project = find_project(file)
    if project is not None and any((project / mark).is_file() for mark in _MARKS[:3]):
        return (
            f"{file} is outside {target.root}, where imports of {target.path.name} start: install its project for the"
            f" executors' Python (-m pip install -e {shlex.quote(str(project))}), or move the file beside it"
        )
    return f"{file} is outside {target.root}, where imports of {target.path.name} start: move one of the two"


def find_module(root: Path, parts: list[str]) -> Path | None:
    """Where a module lies below `root`: its file, or the folder of a namespace package."""
    place = root.joinpath(*parts)
    return module_file(root, parts) or (place if place.is_dir() else None)


def is_installed(path: str | Path) -> bool:
    """Whether a file belongs to an installed package, or to Python itself."""
    parts = Path(path).parts
    return not _INSTALLED.isdisjoint(parts) or Path(path).is_relative_to(sysconfig.get_path("stdlib"))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _is_path(text: str, path: Path) -> bool:
    has_separator = os.sep in text or bool(os.altsep and os.altsep in text)
    if has_separator or path.suffix in (".py", ".ipynb") or _exists(path) or not text:
        return True
    return not all(part.isidentifier() and not keyword.iskeyword(part) for part in text.split("."))


# --- a file, or a folder --------------------------------------------------------------------------------------------


def _from_path(path: Path, given: str, function: str | None) -> Target:
    if _exists(path) and path.is_dir():
        return _from_folder(path, given, function)
    file = _check_file(path)
    root, module = _locate(file)
    return Target(given=given, path=file, root=root, module=module, function=function)


def _from_folder(path: Path, given: str, function: str | None) -> Target:
    folder = path.absolute()
    found = folder / INIT if (folder / INIT).is_file() else _choose(folder, path)
    own = found.parent if found.name == INIT else folder
    root, module = _locate(found)
    return Target(given=given, path=found, root=root, module=module, function=function, folder=own)


def _choose(folder: Path, shown: Path) -> Path:
    """The one thing in a folder that is no package itself: a file, or a package. Raises `UsageError`."""
    source = folder / "src"
    candidates = _candidates(source) or _candidates(folder)
    preferred = next((path for path in candidates if path.name == _PREFERRED), None)
    if preferred is not None or len(candidates) == 1:
        return preferred or candidates[0]
    if not candidates:
        raise UsageError(f"{shown} is a folder without a Python file of its own: {EXPECTED}")
    names = [str(shown / (path.parent if path.name == INIT else path).relative_to(folder)) for path in candidates]
    more = f" and {len(names) - _SHOWN_MAX} more" if len(names) > _SHOWN_MAX else ""
    raise UsageError(
        f"{shown} is a folder with several targets in it: name one of {', '.join(names[:_SHOWN_MAX])}{more}"
    )


def _candidates(folder: Path) -> list[Path]:
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return []
    found = []
    for entry in entries:
        if entry.name in _NO_CANDIDATES or entry.name.startswith((".", "_", "test_")):
            continue
        if entry.is_dir() and (entry / INIT).is_file():
            found.append(entry / INIT)
        elif entry.suffix == ".py" and entry.is_file():
            found.append(entry)
    return found


def _check_file(path: Path) -> Path:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist: {EXPECTED}{_nearby(path)}") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # a NUL in the name
        raise UsageError(f"{str(path)!r} is no file name: {EXPECTED}") from error
    if not stat.S_ISREG(mode):
        raise UsageError(f"{path} is not a regular file: {EXPECTED}")
    if path.suffix == ".ipynb":
        raise UsageError(
            f"{path} is a notebook: {EXPECTED}. A cell that begins with %%writefile functions.py writes one"
        )
    if path.suffix != ".py":
        raise UsageError(f"{path} does not end in .py: {EXPECTED}")
    if "." in path.stem:
        advice = path.stem.replace(".", "_")
        raise UsageError(
            f"{path} cannot be imported, since a dot in a module's name means a package: call it {advice}.py"
        )
    return path.absolute()


def _nearby(path: Path) -> str:
    try:
        names = sorted(entry.name for entry in path.parent.iterdir() if entry.suffix == ".py")
    except OSError:
        return f" (there is no folder {path.parent})"
    return f" (in {path.parent} there are {', '.join(names[:_SHOWN_MAX])})" if names else ""


def _locate(path: Path) -> tuple[Path, str]:
    """Project root and dotted module name: the root is the first folder that is no package."""
    parts = [] if path.name == INIT else [path.stem]
    folder = path.parent
    while (folder / INIT).is_file() and "." not in folder.name and folder.parent != folder:
        parts.insert(0, folder.name)
        folder = folder.parent
    if not parts:
        raise UsageError(f"{path} is the __init__.py of a folder whose name is no module name: rename {folder.name}")
    return folder, ".".join(parts)


# --- a module -------------------------------------------------------------------------------------------------------


def _from_module(text: str, function: str | None, find_package: FindPackage) -> Target:
    parts = text.split(".")
    here = Path.cwd()
    looked: list[Path] = []
    for root in (here, here / "src"):
        if _has_top(root, parts[0]):
            return _in_root(text, parts, root, function)
        looked.append(root)
    roots = [Path(root) for root in find_package(parts[0])]
    for root in roots:
        top = root / parts[0]
        if is_installed(top) or root == Path(sysconfig.get_path("stdlib")):
            raise UsageError(
                f"{text} is installed ({root}), and no project of yours: write a file with"
                f" `from {text} import {function or 'NAME'}`, and give FILE.py:{function or 'NAME'}"
            )
    if roots:
        root = next((root for root in roots if module_file(root, parts) is not None), roots[0])
        return _in_root(text, parts, root, function)
    beside = " or ".join(map(str, looked))
    raise UsageError(
        f"no module {parts[0]!r} in {beside}, nor installed: {EXPECTED}, or a module that `import` would find from here"
    )


def _in_root(text: str, parts: list[str], root: Path, function: str | None) -> Target:
    file = module_file(root, parts)
    place = root.joinpath(*parts)
    if file is not None:
        return Target(given=text, path=file, root=root, module=text, function=function)
    if place.is_dir():
        inside = ", ".join(f"{text}.{path.stem}" for path in _candidates(place) if path.name != INIT)
        raise UsageError(
            f"{text} is a namespace package, a folder without {INIT}: name a module in it"
            + (f", such as {inside}" if inside else "")
        )
    raise UsageError(f"no module {text!r}: {parts[0]} is in {root}, but there is no {place.relative_to(root)}.py")


def _has_top(root: Path, top: str) -> bool:
    return (root / f"{top}.py").is_file() or (root / top).is_dir()


def module_file(root: Path, parts: list[str]) -> Path | None:
    place = root.joinpath(*parts)
    return next((path for path in (place / INIT, place.with_name(place.name + ".py")) if path.is_file()), None)


def find_package_here(top: str) -> Iterable[str]:
    """Where this interpreter finds a top-level name; to find it is not to import it."""
    if top == "__main__":
        return []
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        return [os.path.dirname(place) for place in spec.submodule_search_locations]
    if spec.origin and os.path.isfile(spec.origin):
        return [os.path.dirname(spec.origin)]
    return [sysconfig.get_path("stdlib")] if top in sys.stdlib_module_names else []
