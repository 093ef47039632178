"""The commands and their options."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, cast, get_args, get_type_hints

import typer
from typer.core import TyperCommand

import callyard
from callyard.cli.quantities import (
    PoolSize,
    parse_attempts,
    parse_cache,
    parse_count,
    parse_duration_ms,
    parse_executors,
    parse_extra,
    parse_failure_limit,
    parse_level,
    parse_log_format,
    parse_names,
    parse_pool,
    parse_sandbox,
    parse_sandbox_min,
    parse_size_bytes,
    parse_start_timeout_ms,
)
from callyard.cli.screen import Screen
from callyard.cli.start import Setup
from callyard.errors import CallyardError, UsageError
from callyard.worker.failure_limit import FailureLimit

if TYPE_CHECKING:
    from callyard.scheduler.tasks import CachePolicy
    from callyard.worker.columns import Extra

EXIT_FAILED = 1
EXIT_USAGE = 2

_EXECUTORS = "Executors"
_STOPPING = "When calls fail"
_OUTPUT = "Input and output"
_GATES = "Who may call"
_STATE = "What is kept"

# A blank line between the lines of an epilog keeps them apart.
_EPILOG = """\
[bold]Examples[/bold]

callyard list functions.py

callyard call functions.py:distance origin=JFK dest=LAX

callyard run functions.py:assess flights.jsonl -o out.jsonl

callyard serve functions.py --http
"""
_RUN_HELP = """\
Run one call per row of CALLS and write one result per row, in order.

A row is the arguments of one call: a JSON object (by name, or the whole row for a function with one object \
parameter), a JSON array (by position), or a row of a table (by column). When FILE.py has several functions and none \
is named, a row is {"function": …, "args": …}.

A result is {"index":0,"ok":true,"output":…} or {"index":0,"ok":false,"error":{"kind":…,"message":…,"attempts":…}}.
"""
_RUN_EPILOG = """\
[bold]Examples[/bold]

callyard run prices.py:total orders.csv -o totals.jsonl

callyard run prices.py:total orders.csv -o totals.jsonl --force --budget 30s --max-failures 100

zcat calls.jsonl.gz | callyard run functions.py:assess - | jq .output

[bold]Exit status[/bold]

0 all succeeded (or at most --max-failures failed) · 1 some failed · 2 the command was wrong · 130 interrupted · \
143 terminated
"""
_CALL_EPILOG = """\
[bold]Examples[/bold]

callyard call functions.py:distance origin=JFK dest=LAX

callyard call functions.py:assess --json '{"flight": {"origin": "JFK", "dest": "LAX"}}'
"""

_SERVE_HELP = """\
Serve the functions of FILE.py to agents and programs: MCP on stdio, or MCP and JSON-RPC over HTTP.

Functions run in processes of their own: what hangs, crashes or prints in them harms no other call.
"""
_SERVE_EPILOG = """\
[bold]Examples[/bold]

callyard serve functions.py

callyard serve functions.py --http --admin 127.0.0.1:8701 --reload

callyard serve functions.py --http 0.0.0.0:8700 --config serve.toml

[bold]Signals[/bold]

SIGTERM and Ctrl-C let running calls end within --drain; a second one stops them. SIGHUP takes new code and tokens.

[bold]Exit status[/bold]

0 its client has gone · 1 it failed · 2 the command was wrong · 130 interrupted · 143 terminated
"""
_TOKEN_EPILOG = """\
[bold]Examples[/bold]

callyard token new --tenant acme --config serve.toml

callyard token new --tenant acme --tools 'read_*' --tools search --rate 10/s
"""
_KEYS_EPILOG = """\
[bold]Examples[/bold]

callyard keys resolve acme charge order-7 --result '{"paid": true}' --target functions.py

callyard keys resolve acme charge order-7 --retry --state-dir /var/lib/callyard
"""


class _ServeCommand(TyperCommand):
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


class _McpConfigCommand(TyperCommand):
    """Options of `serve` are easily given without the `--` before them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if hasattr(error, "option_name") and hasattr(error, "message"):
                error.message += "; options of `callyard serve` go after a --"
            raise


_ADDRESS = re.compile(r"[^/\s]*:[^/\s]*|\d+(\.\d+\.\d+\.\d+)?|localhost")
"""Also a port alone: no file has such a name, and what is wrong with it is told."""

_MCP_CONFIG_EPILOG = """\
[bold]Examples[/bold]

callyard mcp-config tools.py --client claude

callyard mcp-config tools.py --client vscode --write -- --executors 2 --sandbox auto

callyard mcp-config tools.py --client cursor --http http://127.0.0.1:8700 --token-env CALLYARD_TOKEN
"""

app = typer.Typer(
    name="callyard",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Run function calls on a pool of isolated Python executors.",
    epilog=_EPILOG,
)
_token_app = typer.Typer(name="token", no_args_is_help=True, help="Make tokens for callers of `callyard serve`.")
_keys_app = typer.Typer(name="keys", no_args_is_help=True, help="See idempotency keys, and settle unknown outcomes.")

Budget = Annotated[
    int | None,
    typer.Option(
        "--budget",
        parser=parse_duration_ms,
        metavar="DURATION",
        help="End an attempt that runs longer (2s, 5m; 0s: never). Default: what the function says.",
        rich_help_panel=_STOPPING,
    ),
]
Include = Annotated[
    list[str] | None,
    typer.Option(
        "--include",
        metavar="GLOB",
        help="Data files that the functions read, relative to the file's folder. May be repeated.",
        rich_help_panel=_EXECUTORS,
    ),
]
StartTimeout = Annotated[
    int | None,
    typer.Option(
        "--start-timeout",
        parser=parse_start_timeout_ms,
        metavar="DURATION",
        help="Time to import the file. Default: 60s.",
        rich_help_panel=_EXECUTORS,
    ),
]
Python = Annotated[
    str | None,
    typer.Option(
        "--python",
        metavar="PATH",
        help="The interpreter that runs the functions: a path, or a virtual environment. Default: $VIRTUAL_ENV, else"
        " .venv in the target's project, else Callyard's own.",
        rich_help_panel=_EXECUTORS,
    ),
]
Audit = Annotated[
    str | None,
    typer.Option(
        "--audit",
        metavar="POLICY",
        help="Who may run: allow, ast, 'ast: deny=NAMES allow=NAMES', or 'cmd: PROGRAM'. Default: everything.",
        rich_help_panel=_EXECUTORS,
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
        rich_help_panel=_EXECUTORS,
    ),
]
SandboxMin = Annotated[
    str | None,
    typer.Option(
        "--sandbox-min",
        parser=parse_sandbox_min,
        metavar="bwrap|landlock|off",
        help="The least that --sandbox auto may come to. Default: landlock.",
        rich_help_panel=_EXECUTORS,
    ),
]
AuditLogFile = Annotated[
    Path | None,
    typer.Option(
        "--audit-log",
        metavar="FILE.jsonl",
        help="Where each verdict of the policy is noted.",
        rich_help_panel=_EXECUTORS,
    ),
]
Io = Annotated[
    Path | None,
    typer.Option(
        "--io",
        metavar="FILE.toml",
        help="What functions may reach through the worker (http, files, sql, jsonrpc): the file's table io.",
        rich_help_panel=_EXECUTORS,
    ),
]
Pools = Annotated[
    list[PoolSize] | None,
    typer.Option(
        "--pool",
        parser=parse_pool,
        metavar="NAME=SIZE",
        help="A named pool of so many processes, for functions that name it; may be repeated.",
        rich_help_panel=_EXECUTORS,
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
        help="Settings of the server: the tables serve, worker, pools, io. Options go before them.",
    ),
]
StateDir = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        metavar="FOLDER",
        help="Where keys and kept results are. Default: a folder of yours, by FILE.py.",
        rich_help_panel=_STATE,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON, on stdout.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks, Callyard's own as well.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"callyard {callyard.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and leave.")
    ] = False,
) -> None:
    pass


@app.command("run", help=_RUN_HELP, epilog=_RUN_EPILOG)
def run_command(
    target: Annotated[str, typer.Argument(metavar="TARGET[:FUNCTION]", help="What to call.")],
    calls: Annotated[
        str,
        typer.Argument(
            metavar="CALLS",
            help="The rows: a .jsonl, .csv, .tsv, .json or .parquet file, text also as .gz or .zst; - for stdin.",
        ),
    ],
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE.jsonl",
            help="Where results go; - is stdout. FOLDER.parquet: as Parquet, a file for each batch.",
            rich_help_panel=_OUTPUT,
        ),
    ] = "-",
    force: Annotated[
        bool, typer.Option("--force", help="Replace an output that is not empty.", rich_help_panel=_OUTPUT)
    ] = False,
    append: Annotated[
        bool, typer.Option("--append", help="Add to an output that is not empty.", rich_help_panel=_OUTPUT)
    ] = False,
    with_output: Annotated[
        bool,
        typer.Option(
            "--with-output",
            help='Add "printed" to each result: what its call printed and logged, 64 KiB of it.',
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    with_args: Annotated[
        bool,
        typer.Option("--with-args", help='Add "args" to each result: its row.', rich_help_panel=_OUTPUT),
    ] = False,
    id: Annotated[
        str | None,
        typer.Option(
            "--id",
            metavar="COLUMN",
            help='Add "id" to each result: this column of its row, which need not be an argument.',
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            "--columns", metavar="A,B", help="Of CALLS, only these columns are arguments.", rich_help_panel=_OUTPUT
        ),
    ] = None,
    extra: Annotated[
        str,
        typer.Option(
            "--extra",
            parser=parse_extra,
            metavar="refuse|ignore",
            help="Columns that the function does not take: end the run before its first call, or leave them out.",
            rich_help_panel=_OUTPUT,
        ),
    ] = "refuse",
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Only check the rows: nothing is called or written, and stdout gets a line for each that would fail.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            parser=parse_count,
            metavar="N",
            help="Only the first N rows.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="jsonl|csv|tsv|json|parquet[.gz|.zst]",
            help="Of CALLS, when its name does not say.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    budget: Budget = None,
    max_failures: Annotated[
        FailureLimit | None,
        typer.Option(
            "--max-failures",
            parser=parse_failure_limit,
            metavar="N|P%",
            help="Stop after more than N failed calls, or P of a hundred; with no more the exit status is 0.",
            rich_help_panel=_STOPPING,
        ),
    ] = None,
    fail_fast: Annotated[
        bool,
        typer.Option(
            "--fail-fast",
            help="Stop at the first failed call; those that run already still end.",
            rich_help_panel=_STOPPING,
        ),
    ] = False,
    max_attempts: Annotated[
        int | None,
        typer.Option(
            "--max-attempts",
            parser=parse_attempts,
            metavar="N",
            help="Most attempts of a call that may be retried. Default: 3.",
            rich_help_panel=_STOPPING,
        ),
    ] = None,
    executors: Annotated[
        int | None,
        typer.Option(
            "--executors",
            "-x",
            parser=parse_executors,
            metavar="N",
            help="Executor processes. Default: the CPUs this process may use.",
            rich_help_panel=_EXECUTORS,
        ),
    ] = None,
    executor_memory: Annotated[
        int | None,
        typer.Option(
            "--executor-memory",
            parser=parse_size_bytes,
            metavar="SIZE",
            help="An executor above this resident size takes no more calls (512MiB). Default: no limit.",
            rich_help_panel=_EXECUTORS,
        ),
    ] = None,
    include: Include = None,
    python: Python = None,
    start_timeout: StartTimeout = None,
    io: Io = None,
    pools: Pools = None,
    cache: Annotated[
        str,
        typer.Option(
            "--cache",
            parser=parse_cache,
            metavar="promised|all|off",
            help="Which equal calls share one result: those of pure functions, all, or none.",
            rich_help_panel=_EXECUTORS,
        ),
    ] = "promised",
    sandbox: Sandbox = None,
    sandbox_min: SandboxMin = None,
    audit: Audit = None,
    audit_log: AuditLogFile = None,
    log_level: LogLevel = "info",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, log lines and summary.")] = False,
    debug: Debug = False,
) -> None:
    from callyard.cli.run import RunOptions, run_list

    def work(screen: Screen) -> int:
        _refuse_both("--force", force, "--append", append)
        _refuse_both("--fail-fast", fail_fast, "--max-failures", max_failures is not None)
        options = RunOptions(
            target=target,
            calls=calls,
            output=output,
            format=format,
            limit=limit,
            existing="overwrite" if force else "append" if append else "refuse",
            budget_ms=budget,
            max_attempts=max_attempts,
            max_failures=max_failures,
            fail_fast=fail_fast,
            cache=cast("CachePolicy", cache),
            with_output=with_output,
            with_args=with_args,
            id=id,
            columns=parse_names("--columns", columns),
            extra=cast("Extra", extra),
            dry_run=dry_run,
            log_level=log_level,
            setup=_setup(
                include,
                executor_count=executors,
                executor_python=python,
                start_timeout_ms=start_timeout,
                executor_memory_high_watermark=executor_memory,
                sandbox=sandbox,
                sandbox_min=sandbox_min,
                quiet=quiet,
                audit=audit,
                audit_log=audit_log,
                io=io,
                pools=pools,
            ),
            debug=debug,
        )
        return run_list(options, screen)

    _guard(work, debug=debug)


@app.command("call", epilog=_CALL_EPILOG)
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
    debug: Debug = False,
) -> None:
    """Run one call and print its value as JSON."""
    from callyard.cli.call import call_once

    setup = _setup(
        include,
        executor_count=1,
        spare_executors=0,
        executor_python=python,
        start_timeout_ms=start_timeout,
        sandbox=sandbox,
        sandbox_min=sandbox_min,
        audit=audit,
        audit_log=audit_log,
        io=io,
        pools=pools,
    )
    _guard(
        lambda screen: call_once(target, arguments or [], json_arguments, output, budget, log_level, setup, screen),
        debug=debug,
    )


@app.command("list")
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
    debug: Debug = False,
) -> None:
    """List a target's functions: names, signatures, promises."""
    from callyard.cli.listing import list_functions

    setup = _setup(
        include,
        executor_count=1,
        spare_executors=0,
        executor_python=python,
        start_timeout_ms=start_timeout,
        sandbox=sandbox,
        sandbox_min=sandbox_min,
        audit=audit,
        audit_log=audit_log,
    )
    _guard(lambda screen: list_functions(target, setup, screen, as_json=as_json, files=files), debug=debug)


@app.command("doctor")
def doctor_command(
    sandbox_min: Annotated[
        str,
        typer.Option(
            "--sandbox-min",
            parser=parse_sandbox_min,
            metavar="bwrap|landlock|off",
            help="Exit with 1 when this machine does not allow at least this level. Default: landlock.",
        ),
    ] = "landlock",
    as_json: Annotated[bool, typer.Option("--json", help="Everything as one JSON object.")] = False,
    debug: Debug = False,
) -> None:
    """Say what this machine can enforce: sandbox levels, limits, versions."""
    from callyard.cli.doctor import examine
    from callyard.worker.sandbox.levels import Level

    _guard(lambda _: examine(Level(sandbox_min), as_json=as_json), debug=debug)


@app.command("serve", cls=_ServeCommand, help=_SERVE_HELP, epilog=_SERVE_EPILOG)
def serve_command(
    target: Annotated[str, typer.Argument(metavar="FILE.py", help="Whose functions to serve.")],
    http: Annotated[
        str | None,
        typer.Option(
            "--http",
            metavar="[HOST:PORT]",
            help="Listen for MCP (/mcp), JSON-RPC (/rpc) and plain HTTP (/tools/NAME); alone on 127.0.0.1:8700."
            " Default: MCP on stdio.",
            rich_help_panel=_GATES,
        ),
    ] = None,
    admin: Annotated[
        str | None,
        typer.Option(
            "--admin", metavar="HOST:PORT", help="Listen for /livez, /readyz, /metrics.", rich_help_panel=_GATES
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option("--tls-cert", metavar="FILE", help="Of --http: a certificate chain.", rich_help_panel=_GATES),
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option("--tls-key", metavar="FILE", help="The key of it.", rich_help_panel=_GATES)
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
            rich_help_panel=_STOPPING,
        ),
    ] = None,
    deadline: Annotated[
        int | None,
        typer.Option(
            "--deadline",
            parser=parse_duration_ms,
            metavar="DURATION",
            help="For a call with all that it waits for, where it does not say. Default: 55s.",
            rich_help_panel=_STOPPING,
        ),
    ] = None,
    state_dir: StateDir = None,
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            metavar="sqlite|memory|PLACE",
            help="Where idempotency keys are kept: in the state folder, in memory, or a redis:// URL.",
            rich_help_panel=_STATE,
        ),
    ] = None,
    calls_log: Annotated[
        Path | None,
        typer.Option(
            "--calls-log",
            metavar="FILE.jsonl",
            help="A line for each call, with masked arguments.",
            rich_help_panel=_STATE,
        ),
    ] = None,
    executors: Annotated[
        int | None,
        typer.Option(
            "--executors",
            "-x",
            parser=parse_executors,
            metavar="N",
            help="Executor processes. Default: the CPUs this process may use.",
            rich_help_panel=_EXECUTORS,
        ),
    ] = None,
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
    debug: Debug = False,
) -> None:
    def work(screen: Screen) -> int:
        from callyard.cli.serve import ServeOptions, read_settings, serve_target

        setup = _setup(
            include,
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
        settings = read_settings(
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
        options = ServeOptions(
            target=target,
            settings=settings,
            config=config,
            reload=reload,
            setup=setup,
            log_format=log_format,
            log_level=log_level,
        )
        return serve_target(options, screen)

    _guard(work, debug=debug)


@_token_app.command("new", epilog=_TOKEN_EPILOG)
def token_new_command(
    tenant: Annotated[str, typer.Option("--tenant", metavar="NAME", help="Whose calls these are.")],
    tools: Annotated[
        list[str] | None,
        typer.Option("--tools", metavar="GLOB", help="What it may call; may be repeated. Default: everything."),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", metavar="NAME", help="What the token is called.")] = None,
    owner: Annotated[
        str, typer.Option("--owner", metavar="NAME", help="Its calls run one at a time, in order, as this owner's.")
    ] = "",
    rate: Annotated[str, typer.Option("--rate", metavar="10/s", help="Of all its calls. Default: no limit.")] = "",
    running_max: Annotated[
        int | None,
        typer.Option("--running-max", metavar="N", min=1, help="Calls of it that run at once. Default: no limit."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE.toml", help="Put its table into this file, which may be new."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Make a token and print it, once. Only its hash is kept, in the file that `callyard serve --config` reads."""

    def work(screen: Screen) -> int:
        from callyard.cli.token import make_token

        return make_token(
            screen,
            tenant=tenant,
            tools=tools or ["*"],
            name=name,
            owner=owner,
            rate=rate,
            running_max=running_max,
            config=config,
        )

    _guard(work, debug=debug)


@_keys_app.command("list")
def keys_list_command(
    target: Annotated[str | None, typer.Argument(metavar="FILE.py", help="Whose server's keys.")] = None,
    unknown: Annotated[bool, typer.Option("--unknown", help="Only those of calls whose outcome nobody knows.")] = False,
    tenant: Annotated[str | None, typer.Option("--tenant", metavar="NAME", help="Only this tenant's.")] = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="Only the first N.")] = 1_000,
    state_dir: StateDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List idempotency keys, oldest first; also while the server runs."""

    def work(screen: Screen) -> int:
        from callyard.cli.keys import Place, list_all

        place = Place(target, state_dir, config)
        return list_all(place, screen, unknown=unknown, tenant=tenant, limit=limit, as_json=as_json)

    _guard(work, debug=debug)


@_keys_app.command("resolve", epilog=_KEYS_EPILOG)
def keys_resolve_command(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Whose call it was.")],
    tool: Annotated[str, typer.Argument(metavar="TOOL", help="The function's name.")],
    key: Annotated[str, typer.Argument(metavar="KEY", help="The key that it was called with.")],
    retry: Annotated[bool, typer.Option("--retry", help="It did not happen: the key may run again.")] = False,
    result: Annotated[
        str | None, typer.Option("--result", metavar="JSON", help="It happened, and this is its result.")
    ] = None,
    target: Annotated[str | None, typer.Option("--target", metavar="FILE.py", help="Whose server's keys.")] = None,
    state_dir: StateDir = None,
    config: ConfigFile = None,
    calls_log: Annotated[
        Path | None,
        typer.Option("--calls-log", metavar="FILE.jsonl", help="Note it there. Default: audit_file of --config."),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Say how a call of unknown outcome ended; also while the server runs."""

    def work(screen: Screen) -> int:
        from callyard.cli.keys import Place, resolve_one

        place = Place(target, state_dir, config)
        return resolve_one(
            place, screen, tenant, tool, key, retry=retry, result=result, audit=calls_log, as_json=as_json
        )

    _guard(work, debug=debug)


@app.command("mcp-config", cls=_McpConfigCommand, epilog=_MCP_CONFIG_EPILOG)
def mcp_config_command(
    target: Annotated[str, typer.Argument(metavar="FILE.py", help="Whose functions are served.")],
    options: Annotated[
        list[str] | None, typer.Argument(metavar="-- OPTION", help="Options of `callyard serve`, after a --.")
    ] = None,
    client: Annotated[str, typer.Option("--client", metavar="claude|cursor|vscode", help="Whose settings.")] = "claude",
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="The server's name there. Default: the file's.")
    ] = None,
    http: Annotated[
        str | None,
        typer.Option("--http", metavar="URL", help="Of a server that you start. Default: the client does, on stdio."),
    ] = None,
    token_env: Annotated[
        str | None,
        typer.Option("--token-env", metavar="VARIABLE", help="Where the client finds the token, for --http."),
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Put it into the client's file; what is there stays, and is copied first.")
    ] = False,
    file: Annotated[Path | None, typer.Option("--file", metavar="FILE.json", help="Into this file instead.")] = None,
    debug: Debug = False,
) -> None:
    """Print what an MCP client's settings must say to find FILE.py."""

    def work(screen: Screen) -> int:
        from callyard.cli.mcp_config import CLIENTS, Wanted, show_config

        if client not in CLIENTS:
            raise UsageError(f"--client must be one of {', '.join(CLIENTS)}, got {client!r}")
        wanted = Wanted(
            target=target, client=client, name=name, http=http, token_env=token_env, options=tuple(options or ())
        )
        return show_config(wanted, screen, _check_serve_options, write=write, file=file)

    _guard(work, debug=debug)


def _check_serve_options(words: Sequence[str]) -> list[str]:
    """FILE.py and options of `serve`, with absolute paths. Raises UsageError for what `serve` would refuse."""
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    hints = get_type_hints(serve_command)
    paths = {name for option in command.params if Path in get_args(hints[option.name]) for name in option.opts}
    checked = list(words)
    for place, word in enumerate(checked):
        option, has_value, value = word.partition("=")
        if option == "--http":
            raise UsageError("the client starts this server, on stdio: for one that listens give its URL to mcp-config")
        if option in paths and has_value:
            checked[place] = f"{option}={Path(value).absolute()}"
        elif option in paths and place + 1 < len(checked):
            checked[place + 1] = str(Path(checked[place + 1]).absolute())
    try:
        command.make_context("serve", list(checked))
    except Exception as error:
        message = getattr(error, "message", None)  # of the parser's own errors
        if message is None:
            raise
        raise UsageError(f"options of serve: {message}") from error
    return checked


app.add_typer(_token_app)
app.add_typer(_keys_app)


def _setup(
    include: list[str] | None,
    *,
    quiet: bool = False,
    audit: str | None = None,
    audit_log: Path | None = None,
    io: Path | None = None,
    pools: list[PoolSize] | None = None,
    **settings: Any,
) -> Setup:
    given = {name: value for name, value in settings.items() if value is not None}
    if pools:
        from callyard.worker.config import PoolConfig

        given["pools"] = {pool.name: PoolConfig(executors=pool.size) for pool in pools}
    return Setup(include=tuple(include or ()), settings=given, quiet=quiet, audit=audit, audit_log=audit_log, io=io)


def _refuse_both(one: str, has_one: bool, other: str, has_other: bool) -> None:
    if has_one and has_other:
        raise UsageError(f"{one} and {other} exclude each other: give one of them")


def _guard(work: Callable[[Screen], int], *, debug: bool) -> NoReturn:
    """Run a command; turn what it raises into a message and an exit status."""
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
