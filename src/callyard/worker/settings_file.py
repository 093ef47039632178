"""`callyard.toml`, or `[tool.callyard]` of pyproject.toml: found beside the target, read with lines in its errors.

    [worker]                # settings of WorkerConfig, by their names
    executor_count = 4
    start_timeout = "2m"
    [pools.gpu]             # named pools
    [io]                    # what functions may reach
    [serve]                 # of `callyard serve` alone, which reads this table itself

In pyproject.toml the same tables stand below `tool.callyard`. Source: call-execution X73; tool-dispatch D57.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from callyard.errors import UsageError
from callyard.functions.target import find_project, split_target
from callyard.settings import Misfit, find_line, names_of, read_table, shorten, suggest, within
from callyard.worker.config import POOL_SETTINGS, WORKER_SETTINGS, PoolConfig, WorkerConfig, check_named_pool
from callyard.worker.io.config import IoConfig

FILE: Final = "callyard.toml"
PYPROJECT: Final = "pyproject.toml"
TABLES: Final = ("worker", "pools", "io", "serve")
FILE_BYTES_MAX: Final = 1 << 20
_IN_PYPROJECT: Final = ("tool", "callyard")
_OF_WORKER: Final = {name: one for name, one in WORKER_SETTINGS.items() if name != "pools"}
"""Pools have a table of their own."""
_NAMES: Final = {"worker": names_of(_OF_WORKER)}
"""By table. Of others a name and a short one is all there is."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsFile:
    path: Path
    """As it was given, or found."""
    text: str
    prefix: tuple[str, ...]
    """Below which its tables stand."""
    tables: Mapping[str, Any]
    worker: Mapping[str, Any]
    pools: Mapping[str, PoolConfig]
    io: IoConfig | None

    @property
    def base(self) -> Path:
        """Where its relative paths start."""
        return self.path.absolute().parent

    def origin(self, table: str, name: str) -> str:
        """File and line of a setting, however it is written there."""
        names = _NAMES.get(table, {})
        own = names.get(name, shorten(name))
        written = next((one for one in self.tables.get(table, {}) if names.get(one, shorten(one)) == own), name)
        line = find_line(self.text, (*self.prefix, table, written))
        return f"{self.path}:{line}" if line else str(self.path)

    def read(self, build: Callable[[], T]) -> T:
        """What does not fit is told with its line. Raises UsageError."""
        return _located(self.path, self.text, self.prefix, build)

    @classmethod
    def load(cls, path: Path) -> SettingsFile:
        """Raises UsageError, with file and line."""
        if path == Path():
            raise UsageError("expected a settings file, such as callyard.toml, got the current folder")
        text, tables = _load(path)
        prefix: tuple[str, ...] = ()
        if path.name == PYPROJECT:
            prefix = _IN_PYPROJECT
            found = _find_ours(path, text, tables)
            if found is None:
                raise UsageError(f"{path} has no table [tool.callyard]")
            tables = found
        base = path.absolute().parent

        def build() -> SettingsFile:
            _check_tables(tables)
            return cls(
                path=path,
                text=text,
                prefix=prefix,
                tables=tables,
                worker=_read_worker(tables.get("worker", {}), base),
                pools={name: _read_pool(name, table) for name, table in tables.get("pools", {}).items()},
                io=within(("io",), lambda: IoConfig.from_mapping(tables["io"], base)) if "io" in tables else None,
            )

        return _located(path, text, prefix, build)


def find_settings_file(target: str | Path | None, *, trusted: bool = True) -> Path | None:
    """The one of a target, or of the current folder: in its folder, or above it up to the project's own folder. None:
    there is none. Raises UsageError for two in one folder.

    `trusted`: False where it will not be read, only told of: nothing of it is parsed.
    """
    for folder in folders_of(target):
        own, project = folder / FILE, folder / PYPROJECT
        has_own = own.is_file() or own.is_symlink()  # one that leads nowhere is told when it is read
        in_project = project.is_file() and _is_ours(project, trusted)
        if has_own and in_project and trusted:
            raise UsageError(f"{own} and [tool.callyard] in {project} both have settings: keep one of them")
        if has_own or in_project:
            return _from_here(own if has_own else project)
    return None


def _is_ours(project: Path, trusted: bool) -> bool:
    """Whether a pyproject.toml has settings. Of one that is not trusted, whether it looks so: a parser's time can be
    used up by what it is given."""
    if not trusted:
        return b"tool.callyard" in _read(project, whole=False)
    return _find_ours(project, *_load(project)) is not None


def folders_of(target: str | Path | None) -> list[Path]:
    """Those that are looked at, the nearest first."""
    folder = Path.cwd()
    if target is not None:
        path = Path(target) if os.path.exists(target) else split_target(target)[0]
        if path.exists():
            folder = path.absolute() if path.is_dir() else path.absolute().parent
    top = find_project(folder / FILE)
    above = [] if top is None else [parent for parent in folder.parents if parent.is_relative_to(top)]
    return [folder, *above]


def _from_here(path: Path) -> Path:
    """As somebody in the current folder would write it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _read(path: Path, *, whole: bool = True) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    if whole and len(data) > FILE_BYTES_MAX:
        raise UsageError(f"{path} has more than {FILE_BYTES_MAX:,} bytes: expected a file with settings")
    return data


def _load(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = _read(path).decode("utf-8-sig")  # some editors put a mark before it
        return text, tomllib.loads(text)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is no TOML: {error}") from error


def _located(path: Path, text: str, prefix: tuple[str, ...], build: Callable[[], T]) -> T:
    try:
        return build()
    except UsageError as error:
        line = find_line(text, (*prefix, *error.setting)) if isinstance(error, Misfit) else None
        raise UsageError(f"{path}:{line}: {error}" if line else f"{path}: {error}") from error


def _find_ours(path: Path, text: str, tables: Mapping[str, Any]) -> dict[str, Any] | None:
    """The table [tool.callyard]; None: there is none. Raises UsageError, with the line, for what is there instead."""
    found: Any = tables
    for name in _IN_PYPROJECT:
        found = found.get(name) if isinstance(found, Mapping) else None
    if found is None or isinstance(found, dict):
        return found

    def refuse() -> None:
        raise Misfit((), "tool.callyard must be a table: [tool.callyard.worker] and the like")

    return _located(path, text, _IN_PYPROJECT, refuse)


def _check_tables(tables: Mapping[str, Any]) -> None:
    for name, table in tables.items():
        if name not in TABLES:
            if name in _OF_WORKER:
                raise Misfit((name,), f"no table {name!r}; it is a setting of the table [worker]")
            raise Misfit((name,), f"no setting {name!r}; {suggest(name, TABLES)}")
        if not isinstance(table, Mapping):
            raise Misfit((name,), f"{name} must be a table: [{name}]")


def _read_worker(table: Mapping[str, Any], base: Path) -> dict[str, Any]:
    values = read_table(_OF_WORKER, table, ("worker",))
    python = values.get("executor_python", "")
    if os.sep in python:
        values["executor_python"] = str(base / Path(python).expanduser())
    within(("worker",), partial(WorkerConfig, **values))
    return values


def _read_pool(name: str, table: Any) -> PoolConfig:
    place = ("pools", name)
    within(place, partial(check_named_pool, name))
    if not isinstance(table, Mapping):
        raise Misfit(place, f"pools.{name} must be a table: [pools.{name}]")
    values = read_table(POOL_SETTINGS, table, place)
    pool: PoolConfig = within(place, partial(PoolConfig, **values))
    return pool
