"""`callyard serve`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from callyard.cli.help import PlainCommand
from callyard.cli.options import (
    GATES,
    SETTINGS,
    STATE,
    STOPPING,
    Audit,
    AuditLogFile,
    ConfigFile,
    Debug,
    Executors,
    Include,
    Io,
    Pools,
    PrintConfig,
    Python,
    Sandbox,
    SandboxMin,
    StartTimeout,
    StateDir,
    build_setup,
    guard,
)
from callyard.cli.quantities import parse_duration_ms, parse_level, parse_log_format

if TYPE_CHECKING:
    from callyard.cli.screen import Screen

HELP = """\
Serve the functions of FILE.py to agents and programs: MCP on stdio, or MCP and JSON-RPC over HTTP.

Functions run in processes of their own: what hangs, crashes or prints in them harms no other call.
"""
EPILOG = """\
Examples:
  callyard serve functions.py
  callyard serve functions.py --http --admin 127.0.0.1:8701 --reload
  callyard serve functions.py --http 0.0.0.0:8700 --config serve.toml

Signals:
  SIGTERM and Ctrl-C let running calls end within --drain; a second one stops them. SIGHUP takes new code and tokens.

Exit status:
  0 its client has gone · 1 it failed · 2 the command was wrong · 130 interrupted · 143 terminated
"""

_SERVE = "serve."
_ADDRESS = re.compile(r"[^/\s]*:[^/\s]*|\d+(\.\d+\.\d+\.\d+)?|localhost")
"""Also a port alone: no file has such a name, and what is wrong with it is told."""


class ServeCommand(PlainCommand):
    """`--http` may stand without a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        for place, word in enumerate(given):
            following = given[place + 1] if place + 1 < len(given) else ""
            if word == "--":
                break
            if word == "--http" and not _ADDRESS.fullmatch(following):
                given[place] = "--http=127.0.0.1:8700"
        return super().parse_args(ctx, given)


def serve_command(
    target: Annotated[str, typer.Argument(metavar="FILE.py", help="Whose functions to serve.")],
    http: Annotated[
        str | None,
        typer.Option(
            "--http",
            metavar="[HOST:PORT]",
            help="Listen for MCP (/mcp), JSON-RPC (/rpc) and plain HTTP (/tools/NAME); alone on 127.0.0.1:8700."
            " Default: MCP on stdio.",
            rich_help_panel=GATES,
        ),
    ] = None,
    admin: Annotated[
        str | None,
        typer.Option(
            "--admin", metavar="HOST:PORT", help="Listen for /livez, /readyz, /metrics.", rich_help_panel=GATES
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option("--tls-cert", metavar="FILE", help="Of --http: a certificate chain.", rich_help_panel=GATES),
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option("--tls-key", metavar="FILE", help="The key of it.", rich_help_panel=GATES)
    ] = None,
    config: ConfigFile = None,
    reload: Annotated[
        bool, typer.Option("--reload", help="Take new code when a file of the target changes; SIGHUP does so too.")
    ] = False,
    drain: Annotated[
        int | None,
        typer.Option(
            "--drain",
            parser=parse_duration_ms,
            metavar="DURATION",
            help="What running calls get when the server stops. Default: 30s.",
            rich_help_panel=STOPPING,
        ),
    ] = None,
    deadline: Annotated[
        int | None,
        typer.Option(
            "--deadline",
            parser=parse_duration_ms,
            metavar="DURATION",
            help="For a call with all that it waits for, where it does not say. Default: 55s.",
            rich_help_panel=STOPPING,
        ),
    ] = None,
    state_dir: StateDir = None,
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            metavar="sqlite|memory|PLACE",
            help="Where idempotency keys are kept: in the state folder, in memory, or a redis:// URL.",
            rich_help_panel=STATE,
        ),
    ] = None,
    calls_log: Annotated[
        Path | None,
        typer.Option(
            "--calls-log",
            metavar="FILE.jsonl",
            help="A line for each call, with masked arguments.",
            rich_help_panel=STATE,
        ),
    ] = None,
    executors: Executors = None,
    include: Include = None,
    python: Python = None,
    start_timeout: StartTimeout = None,
    io: Io = None,
    pools: Pools = None,
    sandbox: Sandbox = None,
    sandbox_min: SandboxMin = None,
    audit: Audit = None,
    audit_log: AuditLogFile = None,
    log_format: Annotated[
        str | None,
        typer.Option(
            "--log-format",
            parser=parse_log_format,
            metavar="json|text",
            help="Of what goes to stderr. Default: text on a terminal, else json.",
        ),
    ] = None,
    log_level: Annotated[
        str,
        typer.Option(
            "--log-level",
            parser=parse_level,
            metavar="LEVEL",
            help="What goes to stderr of the server's log, and of what functions log, from here on: debug, info,"
            " warning, error or critical.",
        ),
    ] = "info",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors.")] = False,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Any other setting of the worker, or serve.NAME=VALUE of the server; may be repeated.",
            rich_help_panel=SETTINGS,
        ),
    ] = None,
    print_config: PrintConfig = False,
    debug: Debug = False,
) -> None:
    def work(screen: Screen) -> int:
        of_server = [pair.removeprefix(_SERVE) for pair in sets or () if pair.startswith(_SERVE)]
        setup = build_setup(
            include,
            config=config,
            sets=[pair for pair in sets or () if not pair.startswith(_SERVE)],
            executor_count=executors,
            executor_python=python,
            start_timeout_ms=start_timeout,
            sandbox=sandbox,
            sandbox_min=sandbox_min,
            quiet=quiet,
            audit=audit,
            audit_log=audit_log,
            io=io,
            pools=pools,
        )
        from callyard.cli.serve import ServeOptions, read_settings, serve_target

        given = read_settings(
            of_server,
            http=http,
            admin=admin,
            tls_cert=tls_cert,
            tls_key=tls_key,
            drain_deadline_ms=drain,
            deadline_ms=deadline,
            state_dir=state_dir,
            store=store,
            audit_file=calls_log,
        )
        settings = setup.read(target)
        options = ServeOptions(
            target=target,
            settings={name: one.value for name, one in given.items()},
            config=None if settings.found.file is None else settings.found.file.path,
            note=settings.found.note,
            reload=reload,
            setup=setup,
            log_format=log_format,
            log_level=log_level,
        )
        if print_config:
            from callyard.cli.print_config import show_serve
            from callyard.cli.streams import write_stdout

            write_stdout(show_serve(settings, options.read(), given).encode())
            return 0
        return serve_target(options, screen)

    guard(work, debug=debug)
