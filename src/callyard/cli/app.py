"""The commands and their options."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

import callyard
from callyard.cli.quantities import parse_duration_ms, parse_size_bytes
from callyard.errors import CallyardError, UsageError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="callyard",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Run function calls on a pool of isolated Python executors.",
)
_errors = Console(stderr=True)

Executors = Annotated[
    int | None,
    typer.Option("--executors", "-x", min=1, help="Executor processes. Default: the CPUs this process may use."),
]
StartTimeout = Annotated[
    int | None,
    typer.Option(
        "--start-timeout", parser=parse_duration_ms, metavar="DURATION", help="Time to import the file. Default: 60s."
    ),
]
Budget = Annotated[
    int | None,
    typer.Option(
        "--budget",
        parser=parse_duration_ms,
        metavar="DURATION",
        help="Running time of one attempt, over what the function says (2s, 5m; 0s: unlimited).",
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show Callyard's own tracebacks and the failures' stacks.")]
Include = Annotated[
    list[str] | None,
    typer.Option("--include", metavar="GLOB", help="Data files the functions need, relative to the file's folder."),
]


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
    """Function calls, admitted when there is room, sorted fairly, run on isolated Python executors."""


@app.command("run")
def run_command(
    target: Annotated[str, typer.Argument(metavar="FILE.py[:FUNCTION]", help="What to call.")],
    calls: Annotated[str, typer.Argument(metavar="CALLS", help="A .jsonl or .csv file of calls, or - for stdin.")],
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Where results go; - is stdout.")] = "-",
    executors: Executors = None,
    budget: Budget = None,
    max_attempts: Annotated[
        int | None, typer.Option("--max-attempts", min=1, help="Most attempts of a call that may be retried.")
    ] = None,
    max_failures: Annotated[
        int | None,
        typer.Option("--max-failures", min=0, metavar="N", help="Stop after more than N failures; within N, exit 0."),
    ] = None,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop at the first failed call.")] = False,
    limit: Annotated[int | None, typer.Option("--limit", min=0, metavar="N", help="Only the first N calls.")] = None,
    format: Annotated[
        str | None, typer.Option("--format", metavar="jsonl|csv|tsv", help="Of CALLS, when its name does not say.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an output that is not empty.")] = False,
    append: Annotated[bool, typer.Option("--append", help="Add to an output that is not empty.")] = False,
    include: Include = None,
    start_timeout: StartTimeout = None,
    memory_watermark: Annotated[
        int | None,
        typer.Option(
            "--executor-memory",
            parser=parse_size_bytes,
            metavar="SIZE",
            help="Resident memory from which an executor takes no more calls (512MiB).",
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no summary.")] = False,
    debug: Debug = False,
) -> None:
    """Run one call per line of CALLS and write one result per line, in order.

    A line is the arguments of one call: an object (keywords, or the whole row for a function with one object parameter)
    or an array. When FILE.py names no function and has several, a line is {"function": …, "args": …}.
    """
    from callyard.cli.run import RunOptions, run_list

    options = RunOptions(
        target=target,
        calls=calls,
        output=output,
        budget_ms=budget,
        max_attempts=max_attempts,
        max_failures=max_failures,
        fail_fast=fail_fast,
        limit=limit,
        format=format,
        existing="overwrite" if force else "append" if append else "refuse",
        include=tuple(include or ()),
        settings=_settings(
            executor_count=executors, start_timeout_ms=start_timeout, executor_memory_high_watermark=memory_watermark
        ),
        quiet=quiet,
        debug=debug,
    )
    _guard(debug, lambda: run_list(options, _errors))


@app.command("call")
def call_command(
    target: Annotated[str, typer.Argument(metavar="FILE.py:FUNCTION", help="What to call.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME=VALUE]…", help="Arguments, parsed by the parameters' types.")
    ] = None,
    json_arguments: Annotated[
        str | None, typer.Option("--json", metavar="JSON", help="The arguments as a JSON object or array.")
    ] = None,
    budget: Budget = None,
    include: Include = None,
    start_timeout: StartTimeout = None,
    debug: Debug = False,
) -> None:
    """Run one call and print its value as JSON."""
    from callyard.cli.call import call_once

    settings = _settings(executor_count=1, spare_executors=0, start_timeout_ms=start_timeout)
    _guard(
        debug,
        lambda: call_once(
            target, arguments or [], json_arguments, budget, tuple(include or ()), settings, _errors, debug=debug
        ),
    )


@app.command("list")
def list_command(
    target: Annotated[Path, typer.Argument(metavar="FILE.py", help="Whose functions to list.")],
    as_json: Annotated[bool, typer.Option("--json", help="Everything, with JSON Schemas, as one JSON array.")] = False,
    include: Include = None,
    start_timeout: StartTimeout = None,
    debug: Debug = False,
) -> None:
    """List a file's functions: names, signatures, promises."""
    from callyard.cli.listing import list_functions

    settings = _settings(executor_count=1, spare_executors=0, start_timeout_ms=start_timeout)
    _guard(debug, lambda: list_functions(target, tuple(include or ()), settings, as_json=as_json))


def _settings(**settings: Any) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def _guard(debug: bool, work: Any) -> NoReturn:
    """Run a command; turn what it raises into a message and an exit status."""
    try:
        status = work()
    except KeyboardInterrupt:
        _errors.print("interrupted", style="yellow")
        status = EXIT_INTERRUPTED
    except CallyardError as error:
        if debug:
            traceback.print_exc()
        _errors.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        status = EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED
    sys.exit(status)


def main() -> None:
    """The `callyard` command."""
    app()
