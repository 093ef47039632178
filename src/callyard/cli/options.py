"""Options that several commands have, and what every command does with what goes wrong."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from callyard.cli.help import EXIT_USAGE
from callyard.cli.quantities import (
    PoolSize,
    parse_duration_ms,
    parse_executors,
    parse_level,
    parse_nan,
    parse_pool,
    parse_sandbox,
    parse_sandbox_min,
    parse_start_timeout_ms,
)
from callyard.errors import CallyardError, UsageError

if TYPE_CHECKING:
    from callyard.cli.screen import Screen
    from callyard.cli.setup import Setup

EXIT_FAILED: Final = 1

EXECUTORS: Final = "Executors"
STOPPING: Final = "When calls fail"
OUTPUT: Final = "Input and output"
GATES: Final = "Who may call"
STATE: Final = "What is kept"
SETTINGS: Final = "Settings"
OPTIONS: Final[Mapping[str, str]] = {
    "executor_count": "--executors",
    "executor_memory_high_watermark": "--executor-memory",
    "executor_python": "--python",
    "start_timeout_ms": "--start-timeout",
    "sandbox": "--sandbox",
    "sandbox_min": "--sandbox-min",
    "pools": "--pool",
}
"""Settings of the worker that have an option of their own."""
ONE_EXECUTOR: Final[Mapping[str, Any]] = {"executor_count": 1, "spare_executors": 0}
"""What a command settles that needs no second process."""

Budget = Annotated[
    int | None,
    typer.Option(
        "--budget",
        parser=parse_duration_ms,
        metavar="DURATION",
        help="End an attempt that runs longer (2s, 5m; 0s: never). Default: what the function says.",
        rich_help_panel=STOPPING,
    ),
]
NanChoice = Annotated[
    str,
    typer.Option(
        "--nan",
        parser=parse_nan,
        metavar="refuse|null",
        help="NaN and infinities in a result, which JSON has not: the call's failure, or null.",
        rich_help_panel=STOPPING,
    ),
]
Executors = Annotated[
    int | None,
    typer.Option(
        "--executors",
        "-x",
        parser=parse_executors,
        metavar="N",
        help="Executor processes. Default: the CPUs this process may use.",
        rich_help_panel=EXECUTORS,
    ),
]
Include = Annotated[
    list[str] | None,
    typer.Option(
        "--include",
        metavar="GLOB",
        help="Data files that the functions read, relative to where imports start: the file's folder, or the one above"
        " its package. May be repeated.",
        rich_help_panel=EXECUTORS,
    ),
]
StartTimeout = Annotated[
    int | None,
    typer.Option(
        "--start-timeout",
        parser=parse_start_timeout_ms,
        metavar="DURATION",
        help="Time to import the file. Default: 60s.",
        rich_help_panel=EXECUTORS,
    ),
]
Python = Annotated[
    str | None,
    typer.Option(
        "--python",
        metavar="PATH",
        help="The interpreter that runs the functions: a path, or a virtual environment. Default: $VIRTUAL_ENV, else"
        " .venv in the target's project, else Callyard's own.",
        rich_help_panel=EXECUTORS,
    ),
]
Audit = Annotated[
    str | None,
    typer.Option(
        "--audit",
        metavar="POLICY",
        help="Who may run: allow, ast, 'ast: deny=NAMES allow=NAMES', or 'cmd: PROGRAM'. Default: everything.",
        rich_help_panel=EXECUTORS,
    ),
]
Sandbox = Annotated[
    str | None,
    typer.Option(
        "--sandbox",
        parser=parse_sandbox,
        metavar="auto|bwrap|landlock|off",
        help="Confine the functions: no network, no files of yours. auto: as strongly as this machine allows."
        " Default: off.",
        rich_help_panel=EXECUTORS,
    ),
]
SandboxMin = Annotated[
    str | None,
    typer.Option(
        "--sandbox-min",
        parser=parse_sandbox_min,
        metavar="bwrap|landlock|off",
        help="The least that --sandbox auto may come to. Default: landlock.",
        rich_help_panel=EXECUTORS,
    ),
]
AuditLogFile = Annotated[
    Path | None,
    typer.Option(
        "--audit-log",
        metavar="FILE.jsonl",
        help="Where each verdict of the policy is noted.",
        rich_help_panel=EXECUTORS,
    ),
]
Io = Annotated[
    Path | None,
    typer.Option(
        "--io",
        metavar="FILE.toml",
        help="What functions may reach through the worker (http, files, sql, jsonrpc): the file's table io.",
        rich_help_panel=EXECUTORS,
    ),
]
Pools = Annotated[
    list[PoolSize] | None,
    typer.Option(
        "--pool",
        parser=parse_pool,
        metavar="NAME=SIZE",
        help="A named pool of so many processes, for functions that name it; may be repeated.",
        rich_help_panel=EXECUTORS,
    ),
]
LogLevel = Annotated[
    str,
    typer.Option(
        "--log-level",
        parser=parse_level,
        metavar="LEVEL",
        help="Show what functions log, by log() or logging, from here on: debug, info, warning, error or critical.",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE.toml",
        help="The settings file: a callyard.toml, or a pyproject.toml with [tool.callyard]. Default: the one beside the"
        " target, or above it in its project.",
        rich_help_panel=SETTINGS,
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Any other setting of the worker, such as max_restarts=3 or start_timeout=2m; may be repeated.",
        rich_help_panel=SETTINGS,
    ),
]
PrintConfig = Annotated[
    bool,
    typer.Option(
        "--print-config",
        help="Print each setting, its value and where it came from, as TOML; do nothing else.",
        rich_help_panel=SETTINGS,
    ),
]
StateDir = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        metavar="FOLDER",
        help="Where keys and kept results are. Default: a folder of yours, by FILE.py.",
        rich_help_panel=STATE,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON, on stdout.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks, Callyard's own as well.")]


def build_setup(
    include: list[str] | None = None,
    *,
    config: Path | None,
    sets: Iterable[str] | None,
    quiet: bool = False,
    audit: str | None = None,
    audit_log: Path | None = None,
    io: Path | None = None,
    pools: list[PoolSize] | None = None,
    fixed: tuple[str, Mapping[str, Any]] = ("", {}),
    **options: Any,
) -> Setup:
    """`options`: settings, by name; None: it was not given. `fixed`: those that the command settles, after its name.
    Raises UsageError where executors cannot run."""
    from callyard.system import check_system

    check_system()
    from callyard.cli.setup import Setup
    from callyard.settings import Given

    if pools:
        from callyard.worker.config import PoolConfig

        options["pools"] = {pool.name: PoolConfig(executors=pool.size) for pool in pools}
    command, settled = fixed
    return Setup(
        include=tuple(include or ()),
        options={name: Given(value, OPTIONS[name]) for name, value in options.items() if value is not None},
        sets=tuple(sets or ()),
        fixed={name: Given(value, command) for name, value in settled.items()},
        config=config,
        quiet=quiet,
        audit=audit,
        audit_log=audit_log,
        io=io,
    )


def show_settings(setup: Setup, target: str | None) -> int:
    """What --print-config prints."""
    from callyard.cli.print_config import show_worker
    from callyard.cli.streams import write_stdout

    write_stdout(show_worker(setup.read(target)).encode())
    return 0


def refuse_both(one: str, has_one: bool, other: str, has_other: bool) -> None:
    if has_one and has_other:
        raise UsageError(f"{one} and {other} exclude each other: give one of them")


def guard(work: Callable[[Screen], int], *, debug: bool) -> NoReturn:
    """Run a command; turn what it raises into a message and an exit status."""
    from callyard.cli.screen import Screen

    screen = Screen()
    try:
        status = work(screen)
    except Exception as error:  # noqa: BLE001  # the last place where a message can be made of it
        if debug:
            screen.say(traceback.format_exc().rstrip(), style="dim")
        screen.say(f"error: {_explain(error)}", style="red")
        status = EXIT_USAGE if isinstance(error, UsageError | OSError) else EXIT_FAILED
    sys.exit(status)


def _explain(error: Exception) -> str:
    if isinstance(error, CallyardError | OSError):
        return str(error)
    return f"{type(error).__name__}: {error} (a fault of Callyard; --debug shows where)"
