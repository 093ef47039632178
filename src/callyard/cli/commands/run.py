"""`callyard run`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

import typer

from callyard.cli.options import (
    EXECUTORS,
    OUTPUT,
    STOPPING,
    Audit,
    AuditLogFile,
    Budget,
    ConfigFile,
    Debug,
    Executors,
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
    refuse_both,
    show_settings,
)
from callyard.cli.quantities import (
    parse_attempts,
    parse_cache,
    parse_count,
    parse_extra,
    parse_failure_limit,
    parse_names,
    parse_size_bytes,
)
from callyard.worker.failure_limit import FailureLimit

if TYPE_CHECKING:
    from callyard.cli.screen import Screen
    from callyard.functions.function import Nan
    from callyard.scheduler.tasks import CachePolicy
    from callyard.worker.columns import Extra

HELP = """\
Run one call per row of CALLS and write one result per row, in order.

A row is the arguments of one call: a JSON object (by name, or the whole row for a function with one object \
parameter), a JSON array (by position), or a row of a table (by column). When FILE.py has several functions and none \
is named, a row is {"function": …, "args": …}.

A result is {"index":0,"ok":true,"output":…} or {"index":0,"ok":false,"error":{"kind":…,"message":…,"attempts":…}}.
"""
EPILOG = """\
Examples:
  callyard run prices.py:total orders.csv -o totals.jsonl
  callyard run prices.py:total orders.csv -o totals.jsonl --force --budget 30s --max-failures 100
  zcat calls.jsonl.gz | callyard run functions.py:assess - | jq .output

Exit status:
  0 all succeeded, or at most --max-failures failed · 1 some failed · 2 the command was wrong · 130 interrupted ·
  143 terminated
"""


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
            rich_help_panel=OUTPUT,
        ),
    ] = "-",
    force: Annotated[
        bool, typer.Option("--force", help="Replace an output that is not empty.", rich_help_panel=OUTPUT)
    ] = False,
    append: Annotated[
        bool, typer.Option("--append", help="Add to an output that is not empty.", rich_help_panel=OUTPUT)
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with an output whose run was ended, however: run the rows that have no result.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    retry_failed: Annotated[
        bool,
        typer.Option(
            "--retry-failed",
            help="Run the rows of an output again that failed, also after a change of the code.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    accept_changes: Annotated[
        bool,
        typer.Option(
            "--accept-changes",
            help="Go on though CALLS or the functions are not those that the run began with.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    with_output: Annotated[
        bool,
        typer.Option(
            "--with-output",
            help='Add "printed" to each result: what its call printed and logged, 64 KiB of it.',
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    with_args: Annotated[
        bool,
        typer.Option("--with-args", help='Add "args" to each result: its row.', rich_help_panel=OUTPUT),
    ] = False,
    id: Annotated[
        str | None,
        typer.Option(
            "--id",
            metavar="COLUMN",
            help='Add "id" to each result: this column of its row, which need not be an argument.',
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            "--columns", metavar="A,B", help="Of CALLS, only these columns are arguments.", rich_help_panel=OUTPUT
        ),
    ] = None,
    extra: Annotated[
        str,
        typer.Option(
            "--extra",
            parser=parse_extra,
            metavar="refuse|ignore",
            help="Columns that the function does not take: end the run before its first call, or leave them out.",
            rich_help_panel=OUTPUT,
        ),
    ] = "refuse",
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Only check the rows: nothing is called or written, and stdout gets a line for each that would fail.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            parser=parse_count,
            metavar="N",
            help="Only the first N rows.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="jsonl|csv|tsv|json|parquet[.gz|.zst]",
            help="Of CALLS, when its name does not say.",
            rich_help_panel=OUTPUT,
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
            rich_help_panel=STOPPING,
        ),
    ] = None,
    fail_fast: Annotated[
        bool,
        typer.Option(
            "--fail-fast",
            help="Stop at the first failed call; those that run already still end.",
            rich_help_panel=STOPPING,
        ),
    ] = False,
    nan: NanChoice = "refuse",
    max_attempts: Annotated[
        int | None,
        typer.Option(
            "--max-attempts",
            parser=parse_attempts,
            metavar="N",
            help="Most attempts of a call that may be retried. Default: 3.",
            rich_help_panel=STOPPING,
        ),
    ] = None,
    executors: Executors = None,
    executor_memory: Annotated[
        int | None,
        typer.Option(
            "--executor-memory",
            parser=parse_size_bytes,
            metavar="SIZE",
            help="An executor above this resident size takes no more calls, and is replaced once idle (512MiB). "
            "Default: no limit.",
            rich_help_panel=EXECUTORS,
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
            rich_help_panel=EXECUTORS,
        ),
    ] = "promised",
    sandbox: Sandbox = None,
    sandbox_min: SandboxMin = None,
    audit: Audit = None,
    audit_log: AuditLogFile = None,
    log_level: LogLevel = "info",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, log lines and summary.")] = False,
    config: ConfigFile = None,
    sets: Sets = None,
    print_config: PrintConfig = False,
    debug: Debug = False,
) -> None:
    def work(screen: Screen) -> int:
        setup = build_setup(
            include,
            config=config,
            sets=sets,
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
        )
        if print_config:
            return show_settings(setup, target)
        from callyard.cli.run import RunOptions, run_list
        from callyard.worker.file_run import Rerun

        refuse_both("--force", force, "--append", append)
        for name, given in (("--resume", resume), ("--retry-failed", retry_failed)):
            refuse_both("--force", force, name, given)
            refuse_both("--append", append, name, given)
        refuse_both("--fail-fast", fail_fast, "--max-failures", max_failures is not None)
        options = RunOptions(
            target=target,
            calls=calls,
            output=output,
            format=format,
            limit=limit,
            rerun=Rerun(
                existing="overwrite" if force else "append" if append else "refuse",
                resume=resume,
                retry_failed=retry_failed,
                accept_changes=accept_changes,
            ),
            budget_ms=budget,
            max_attempts=max_attempts,
            max_failures=max_failures,
            fail_fast=fail_fast,
            nan=cast("Nan", nan),
            cache=cast("CachePolicy", cache),
            with_output=with_output,
            with_args=with_args,
            id=id,
            columns=parse_names("--columns", columns),
            extra=cast("Extra", extra),
            dry_run=dry_run,
            log_level=log_level,
            setup=setup,
            debug=debug,
        )
        return run_list(options, screen)

    guard(work, debug=debug)
