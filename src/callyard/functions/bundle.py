"""The files of a target: what is sent to an executor, under the digest of its bytes.

A bundle is the target module, the modules that it imports from under its project root, and what include globs add.
Its bytes are read once, so that a later edit changes nothing. The worker collects it without importing any of it.

Never part of it: installed packages, hidden folders, `__pycache__`, virtual environments.
Source: call-execution Decisions ("Bundle and digest"), X40, X86.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable, Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Final

from callyard.errors import UsageError
from callyard.functions.imports import Import, decode_source, list_imports, parse_source
from callyard.functions.target import INIT, Target, find_target
from callyard.ids import Digest

BUNDLE_BYTES_MAX: Final = 64 * 1024 * 1024
BUNDLE_FILES_MAX: Final = 10_000
_MODULE_SUFFIXES: Final = (".py", *EXTENSION_SUFFIXES)
_HARMLESS_NAMES: Final = frozenset({"test", "this", "antigravity", "idlelib", "turtledemo"})
"""Modules of the standard library that no other module imports."""
_OUTSIDE: Final = frozenset({"__pycache__", "site-packages", "dist-packages", "node_modules"})
_OWN_NAME: Final = "callyard"


class Bundle:
    """Files by path relative to the project root, POSIX style. Immutable once collected."""

    def __init__(self, module: str, files: Mapping[str, bytes], imports: Iterable[str] = (), name: str = "") -> None:
        self.module = module
        """Dotted name of the target."""
        self.files: Mapping[str, bytes] = MappingProxyType(dict(sorted(files.items())))
        self.imports: tuple[str, ...] = tuple(sorted(imports))
        """Top-level names that it imports from installed packages; the standard library is not listed."""
        self.name = name or f"{module.rpartition('.')[2]}.py"
        """The target's file name, for messages."""
        self.digest = compute_digest(self.files)

    @classmethod
    def collect(cls, target: str | os.PathLike[str] | Target, include: Iterable[str] = ()) -> Bundle:
        """Read `target` (see `find_target`) and what belongs to it. `include`: globs relative to its project root.

        Raises `UsageError` for what is no usable target, saying what was expected and what to do.
        """
        found = target if isinstance(target, Target) else find_target(target)
        collector = _Collector(found.root)
        collector.add_target(found)
        for pattern in include:
            collector.add_glob(pattern)
        return cls(found.module, collector.files, collector.outside, name=found.path.name)

    @property
    def source(self) -> bytes:
        """The target's own text."""
        path = self.module.replace(".", "/")
        return self.files.get(f"{path}.py") or self.files.get(f"{path}/__init__.py", b"")

    def has_module(self, module: str) -> bool:
        """Whether a module of that dotted name is in it."""
        path = module.replace(".", "/")
        return any(f"{path}{end}" in self.files for end in (*_MODULE_SUFFIXES, f"/{INIT}"))

    def write_to(self, folder: Path) -> Path:
        """Write the files once to `folder/<digest>`, read-only, and return that path.

        A reader never sees half of it: it is written beside and renamed. Somebody else writing the same is no harm.
        `remove_tree` takes it away again.
        """
        final = folder / self.digest
        if final.is_dir():
            return final
        folder.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder))
        try:
            for name, content in self.files.items():
                path = draft / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
                path.chmod(0o444)
            for parent, _, _ in os.walk(draft, topdown=False):
                os.chmod(parent, 0o555)
            try:
                draft.rename(final)
            except OSError:
                if not final.is_dir():  # else another writer was first, with the same bytes
                    raise
        finally:
            if draft.exists():
                remove_tree(draft)
        return final


def compute_digest(files: Mapping[str, bytes]) -> Digest:
    """BLAKE2b-256 of the sorted files: each path in UTF-8 and each content, with its length in 8 bytes before it.

    Source: X86.
    """
    digest = hashlib.blake2b(digest_size=32)
    for name, content in sorted((name.encode(), content) for name, content in files.items()):
        for part in (name, content):
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
    return Digest(digest.hexdigest())


def remove_tree(folder: Path) -> None:
    """Remove a folder of bundles, read-only as they are. What is gone already is no error."""
    for parent, _, _ in os.walk(folder):
        with contextlib.suppress(OSError):
            os.chmod(parent, stat.S_IRWXU)
    shutil.rmtree(folder, ignore_errors=True)


class _Collector:
    """Gathers files under one root; reads each file once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: dict[str, bytes] = {}
        self.outside: set[str] = set()
        self._bytes = 0
        self._waiting: list[tuple[str, str]] = []
        """Python files to walk: relative path and module name."""

    def add_target(self, target: Target) -> None:
        path, shown = target.path, Path(target.given)
        if not shown.is_file():  # the name of a folder or a module
            shown = path.relative_to(target.root)
        content = self._read(path)
        if not content.strip():
            raise UsageError(f"{shown} is empty: expected a Python file with at least one function{_modules_in(path)}")
        _check_source(shown, content)
        self._add(path, content, target.module)
        self._add_parents(target.module)
        self._walk()
        if target.folder is not None:
            self._add_folder(target.folder)

    def _add_folder(self, folder: Path) -> None:
        """Every file below it."""
        for parent, folders, names in os.walk(folder):
            folders[:] = sorted(name for name in folders if not self._is_outside(Path(parent, name, "_")))
            for path in (Path(parent, name) for name in sorted(names)):
                if path.is_file() and not self._is_outside(path) and self._name(path) not in self.files:
                    self._add(path, self._read(path), self._module_of(path))
        self._walk()

    def add_glob(self, pattern: str) -> None:
        if Path(pattern).is_absolute() or ".." in PurePosixPath(pattern).parts or not pattern.strip():
            raise UsageError(
                f"include {pattern!r}: expected a glob below the project root {self.root}, such as data/*.csv"
            )
        found = False
        for path in sorted(self.root.glob(pattern)):
            if path.is_file() and not self._is_outside(path):
                found = True
                if self._name(path) not in self.files:
                    self._add(path, self._read(path), self._module_of(path))
        if not found:
            raise UsageError(
                f"include {pattern!r} matches no file below {self.root}, where imports start{self._guess(pattern)}"
            )
        self._walk()

    def _guess(self, pattern: str) -> str:
        """What somebody may have meant who wrote the glob from the current folder."""
        there = Path(os.path.relpath(Path.cwd() / pattern, self.root)).as_posix()
        if there == pattern or there.startswith("../") or not any(path.is_file() for path in self.root.glob(there)):
            return ""
        return f": did you mean {there!r}?"

    def _walk(self) -> None:
        while self._waiting:
            name, module = self._waiting.pop()
            try:
                tree = parse_source(self.files[name], name)
            except (SyntaxError, ValueError):
                continue  # its own import says so in the executor, if it is imported at all
            for wanted in list_imports(tree, module, is_package=name.endswith(INIT)):
                self._follow(wanted)

    def _follow(self, wanted: Import) -> None:
        top = wanted.module.partition(".")[0]
        if top == _OWN_NAME:
            return
        if not self._add_module(wanted.module):
            if not self._exists(top) and top not in sys.stdlib_module_names:
                self.outside.add(top)
            return
        for name in wanted.names:
            if name != "*":
                self._add_module(f"{wanted.module}.{name}")

    def _add_module(self, module: str) -> bool:
        """Add a module of the project with the packages around it; False: there is none of that name."""
        place = self.root.joinpath(*module.split("."))
        found = self._find(place)
        if found is None and not (place.is_dir() and not self._is_outside(place)):
            return False
        self._add_parents(module)
        if found is not None and self._name(found) not in self.files:
            self._add(found, self._read(found), module)
        return True

    def _add_parents(self, module: str) -> None:
        parts = module.split(".")
        for end in range(1, len(parts)):
            init = self.root.joinpath(*parts[:end], INIT)
            if init.is_file() and self._name(init) not in self.files:
                self._add(init, self._read(init), ".".join(parts[:end]))

    def _find(self, place: Path) -> Path | None:
        """The file of a module: a package's `__init__`, an extension, or a source file, in Python's order."""
        candidates = [place / INIT, *(place.with_name(place.name + suffix) for suffix in (*EXTENSION_SUFFIXES, ".py"))]
        return next((path for path in candidates if path.is_file() and not self._is_outside(path)), None)

    def _exists(self, top: str) -> bool:
        place = self.root / top
        return self._find(place) is not None or (place.is_dir() and not self._is_outside(place))

    def _add(self, path: Path, content: bytes, module: str) -> None:
        name = self._name(path)
        top = module.partition(".")[0]
        if path.suffix in _MODULE_SUFFIXES and top in sys.stdlib_module_names and top not in _HARMLESS_NAMES:
            raise UsageError(
                f"{name} would hide Python's own module {top!r} from everything in its process: rename the file"
            )
        self._bytes += len(content)
        if self._bytes > BUNDLE_BYTES_MAX or len(self.files) >= BUNDLE_FILES_MAX:
            raise UsageError(
                f"the files of {self.root} that belong to the target exceed {BUNDLE_BYTES_MAX} bytes"
                f" or {BUNDLE_FILES_MAX} files at {name}: include less"
            )
        self.files[name] = content
        if path.suffix == ".py":
            self._waiting.append((name, module))

    def _read(self, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from error

    def _name(self, path: Path) -> str:
        name = path.relative_to(self.root).as_posix()
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"the name of {os.fsencode(path)!r} is not UTF-8: rename it") from error
        return name

    def _module_of(self, path: Path) -> str:
        parts = path.relative_to(self.root).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def _is_outside(self, path: Path) -> bool:
        """Whether a path below the root is in a folder that is never part of a bundle."""
        parts = path.relative_to(self.root).parts
        folder = self.root
        for position, part in enumerate(parts):
            if part.startswith(".") or part in _OUTSIDE:
                return True
            folder = folder / part
            if position < len(parts) - 1 and (folder / "pyvenv.cfg").exists():
                return True
        return False


def _modules_in(path: Path) -> str:
    """What to name instead of a package whose `__init__` has nothing in it; empty: it is none."""
    if path.name != INIT:
        return ""
    modules = sorted(entry.name for entry in path.parent.glob("*.py") if entry.name != INIT)
    return f"; name a module of the package: {', '.join(modules[:5])}" if modules else ""


def _check_source(path: Path, content: bytes) -> None:
    """Raise `UsageError` where the target is no Python source text."""
    advice = "save it as UTF-8, or name its encoding in the first line"
    try:
        decode_source(content)
    except (SyntaxError, UnicodeDecodeError) as error:
        bad = _find_bad_byte(content) if isinstance(error, SyntaxError) else error.start
        if bad is None:
            raise UsageError(f"{path}: {error}: {advice}") from error
        line = content.count(b"\n", 0, bad) + 1
        raise UsageError(f"{path}:{line}: not UTF-8 (byte 0x{content[bad]:02x} at {bad}): {advice}") from error
    try:
        parse_source(content, str(path))
    except SyntaxError as error:
        raise UsageError(f"{path}:{error.lineno or 1}: {type(error).__name__}: {error.msg}{_show(error)}") from error
    except ValueError as error:
        raise UsageError(f"{path}: {error}: expected Python source text") from error


def _find_bad_byte(content: bytes) -> int | None:
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return error.start
    return None


def _show(error: SyntaxError) -> str:
    if not error.text:
        return ""
    text = error.text.rstrip("\n")
    bare = text.lstrip()
    mark = max(0, (error.offset or 1) - 1 - (len(text) - len(bare)))
    return f"\n    {bare}\n    {' ' * mark}^"
