"""How a command's executors are started: its options go before variables, those before the settings file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from callyard.errors import UsageError
from callyard.settings import Given, Layer, names_of, read_pairs, read_variables
from callyard.worker.config import OF_COMMANDS, WORKER_SETTINGS, WorkerConfig
from callyard.worker.io.config import IoConfig
from callyard.worker.settings_file import FILE, SettingsFile, find_settings_file, folders_of

SET: Final = "--set"
_NAMES: Final = names_of(WORKER_SETTINGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What the command line says of the executors."""

    include: tuple[str, ...] = ()
    options: Layer = field(default_factory=dict)
    """Settings that have an option of their own."""
    sets: tuple[str, ...] = ()
    """`NAME=VALUE` of --set."""
    fixed: Layer = field(default_factory=dict)
    """What the command itself settles."""
    config: Path | None = None
    """The settings file that was named; None: one is looked for."""
    quiet: bool = False
    audit: str | None = None
    """A policy in words; see `parse_policy`."""
    audit_log: Path | None = None
    io: Path | None = None
    """A settings file of which the table `[io]` is taken."""

    @property
    def given(self) -> dict[str, Given]:
        """By an option or --set. Raises UsageError for a setting that is given twice, or is not the caller's."""
        pairs = read_pairs(_NAMES, map(_below_worker, self.sets), SET, _parse)
        for name, pair in pairs.items():
            if name in self.options:
                raise UsageError(f"{pair.origin} and {self.options[name].origin} are the same setting: keep one")
            if name in self.fixed:
                raise UsageError(f"{pair.origin}: that is settled by {self.fixed[name].origin}")
        return {**self.options, **pairs}

    def is_trusted(self, config: WorkerConfig) -> bool:
        """Whether the target may say what else is run: its environment, its packages, its settings file."""
        return config.sandbox_choice == "off" and self.audit is None and self.audit_log is None

    def read(self, target: str | Path | None, environ: Mapping[str, str] = os.environ) -> Settings:
        """Raises UsageError for what cannot be read, or does not fit."""
        given = self.given
        variables = read_variables(WORKER_SETTINGS, environ, skip=given)
        given |= self.fixed
        found = self._find(target, {**variables, **given})
        file = found.file
        values = {name: Given(value, "default of commands") for name, value in OF_COMMANDS.items()}
        pools = {} if file is None else dict(file.pools)
        if file is not None:
            values |= {name: Given(value, file.origin("worker", name)) for name, value in file.worker.items()}
            if pools:
                values["pools"] = Given(pools, str(file.path))
        values |= {**variables, **given}
        if pools and "pools" in given:
            values["pools"] = Given({**pools, **given["pools"].value}, given["pools"].origin)
        return Settings(
            config=WorkerConfig(**{name: one.value for name, one in values.items()}),
            given=values,
            found=found,
            io=read_io(self.io) if self.io is not None else None if file is None else file.io,
        )

    def _find(self, target: str | Path | None, given: Layer) -> Found:
        if self.config is not None:
            return Found(SettingsFile.load(self.config), f"{self.config}, by --config", "")
        if not self.is_trusted(WorkerConfig(**{name: one.value for name, one in given.items()})):
            beside = find_settings_file(target, trusted=False)
            why = f"{beside or FILE}, beside code that is not trusted, is not read: name it with --config"
            return Found(None, why, why if beside is not None else "")
        near = find_settings_file(target)
        if near is None:
            return Found(None, f"no {FILE} or [tool.callyard] in {' or '.join(map(str, folders_of(target)))}", "")
        return Found(SettingsFile.load(near), str(near), f"settings of {near}")


class Found(NamedTuple):
    """The settings file."""

    file: SettingsFile | None
    why: str
    """Which it is; or why there is none."""
    note: str
    """What a user should hear who did not name one; empty: nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What came of it."""

    config: WorkerConfig
    given: Layer
    """Each setting that is not the worker's default, and where it came from."""
    found: Found
    io: IoConfig | None

    def over(self, beneath: Layer) -> Settings:
        """The same, where `beneath` decides what nothing else does."""
        given = {**beneath, **self.given}
        return replace(self, config=WorkerConfig(**{name: one.value for name, one in given.items()}), given=given)


def _below_worker(pair: str) -> str:
    """What --set says, by the names of the worker's settings. Raises UsageError for those of another table."""
    table, dot, _ = pair.partition("=")[0].strip().partition(".")
    if dot and table == "serve":
        raise UsageError(f"{SET} {pair.partition('=')[0]}: it is a setting of the server, for callyard serve")
    if dot and table in ("pools", "io"):
        raise UsageError(f"{SET}: {table} is a table, which only a settings file can give: [{table}]")
    return pair.strip().removeprefix("worker.")


def _parse(name: str, text: str, shown: str) -> Any:
    return WORKER_SETTINGS[name].parse(text, shown)


def read_io(path: Path) -> IoConfig:
    """The table `[io]` of a settings file. Raises UsageError."""
    found = SettingsFile.load(path).io
    if found is None:
        raise UsageError(f"{path}: expected a table [io], such as [io.files] with a line data = '/srv/data'")
    return found
