"""`callyard call`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

import typer

from callyard.cli.options import (
    ONE_EXECUTOR,
    Audit,
    AuditLogFile,
    Budget,
    ConfigFile,
    Debug,
    Include,
    Io,
    LogLevel,
    NanChoice,
    Pools,
    PrintConfig,
    Python,
    Sandbox,
    SandboxMin,
    Sets,
    StartTimeout,
    build_setup,
    guard,
    show_settings,
)

if TYPE_CHECKING:
    from callyard.cli.screen import Screen
    from callyard.functions.function import Nan

EPILOG = """\
Examples:
  callyard call functions.py:distance origin=JFK dest=LAX
  callyard call functions.py:assess --json '{"flight": {"origin": "JFK", "dest": "LAX"}}'
"""


def call_command(
    target: Annotated[str, typer.Argument(metavar="TARGET[:FUNCTION]", help="What to call.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME=VALUE", help="Arguments, read as the parameters' types say."),
    ] = None,
    json_arguments: Annotated[
        str | None, typer.Option("--json", metavar="JSON", help="The arguments as a JSON object or array.")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Where the value goes: the bytes of an image or a file, else JSON; a folder for several.",
        ),
    ] = None,
    budget: Budget = None,
    nan: NanChoice = "refuse",
    include: Include = None,
    python: Python = None,
    start_timeout: StartTimeout = None,
    io: Io = None,
    pools: Pools = None,
    sandbox: Sandbox = None,
    sandbox_min: SandboxMin = None,
    audit: Audit = None,
    audit_log: AuditLogFile = None,
    log_level: LogLevel = "info",
    config: ConfigFile = None,
    sets: Sets = None,
    print_config: PrintConfig = False,
    debug: Debug = False,
) -> None:
    """Run one call and print its value as JSON."""

    def work(screen: Screen) -> int:
        setup = build_setup(
            include,
            config=config,
            sets=sets,
            fixed=("callyard call", ONE_EXECUTOR),
            executor_python=python,
            start_timeout_ms=start_timeout,
            sandbox=sandbox,
            sandbox_min=sandbox_min,
            audit=audit,
            audit_log=audit_log,
            io=io,
            pools=pools,
        )
        if print_config:
            return show_settings(setup, target)
        from callyard.cli.call import call_once

        wanted = cast("Nan", nan)
        return call_once(target, arguments or [], json_arguments, output, budget, wanted, log_level, setup, screen)

    guard(work, debug=debug)
