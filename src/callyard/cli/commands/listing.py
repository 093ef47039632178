"""`callyard list`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from callyard.cli.options import (
    ONE_EXECUTOR,
    Audit,
    AuditLogFile,
    ConfigFile,
    Debug,
    Include,
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


def list_command(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Whose functions to list.")],
    as_json: Annotated[bool, typer.Option("--json", help="Everything, with JSON Schemas, as one JSON object.")] = False,
    files: Annotated[
        bool,
        typer.Option(
            "--files",
            help="Instead: the files that are sent to executors, and the packages they import. Runs none of it.",
        ),
    ] = False,
    include: Include = None,
    python: Python = None,
    start_timeout: StartTimeout = None,
    sandbox: Sandbox = None,
    sandbox_min: SandboxMin = None,
    audit: Audit = None,
    audit_log: AuditLogFile = None,
    config: ConfigFile = None,
    sets: Sets = None,
    print_config: PrintConfig = False,
    debug: Debug = False,
) -> None:
    """List a target's functions: names, signatures, promises."""

    def work(screen: Screen) -> int:
        setup = build_setup(
            include,
            config=config,
            sets=sets,
            fixed=("callyard list", ONE_EXECUTOR),
            executor_python=python,
            start_timeout_ms=start_timeout,
            sandbox=sandbox,
            sandbox_min=sandbox_min,
            audit=audit,
            audit_log=audit_log,
        )
        if print_config:
            return show_settings(setup, target)
        from callyard.cli.listing import list_functions

        return list_functions(target, setup, screen, as_json=as_json, files=files)

    guard(work, debug=debug)
