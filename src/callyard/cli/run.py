"""`callyard run`: a call list from a file to a file."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from callyard.cli.calls import STOPPED_KINDS, CallList, RefusedRows, Tally, summarise
from callyard.cli.interrupts import Interrupts, exit_status
from callyard.cli.live import Live, shown_beside
from callyard.cli.progress import show_progress
from callyard.cli.quantities import show_duration, show_size
from callyard.cli.screen import Screen, is_plain_file
from callyard.cli.setup import Setup
from callyard.cli.start import run_command, started_worker
from callyard.errors import UsageError
from callyard.functions.function import Nan
from callyard.functions.registry import FunctionSpec
from callyard.functions.target import split_target
from callyard.scheduler import StopReason
from callyard.scheduler.tasks import CachePolicy
from callyard.worker.builders import CallSource, FileSource, JsonlSource, open_source
from callyard.worker.columns import Extra, FittedRows
from callyard.worker.failure_limit import FailureLimit
from callyard.worker.file_run import FileRun, Rerun
from callyard.worker.outputs import JsonlOutput, OutputClosed, OutputSink, check_output, open_output
from callyard.worker.results import RunSummary
from callyard.worker.worker import Run, Worker
from callyard.yard import only_function

INTERRUPT_GRACE_S: Final = 3.0
"""How long running calls may finish after the first Ctrl-C."""
RERUN_WORDS: Final = frozenset({"--force", "--append", "--resume", "--retry-failed", "--accept-changes"})
"""What a command line says about an output that is there."""
LEAVE_AFTER_S: Final = 2.0
"""Stopping takes well under a second; a press so long after the second one ends what does not stop."""
ALIKE_SHOWN_MAX: Final = 5
"""Groups of failures shown for one kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    target: str
    calls: str
    output: str
    format: str | None
    limit: int | None
    rerun: Rerun
    budget_ms: int | None
    max_attempts: int | None
    max_failures: FailureLimit | None
    fail_fast: bool
    nan: Nan
    cache: CachePolicy
    with_output: bool
    with_args: bool
    id: str | None
    columns: tuple[str, ...] | None
    extra: Extra
    dry_run: bool
    log_level: str
    setup: Setup
    debug: bool


def run_list(options: RunOptions, screen: Screen) -> int:
    """Run it; the exit status. Raises UsageError when the command itself was wrong."""
    return run_command(lambda interrupts: _run(options, screen, interrupts), screen)


async def _run(options: RunOptions, screen: Screen, interrupts: Interrupts) -> int:
    path, function = split_target(options.target)
    source = interrupts.leaving(lambda: open_source(options.calls, options.format))
    file_run = None
    if options.dry_run:
        existing = "append" if options.rerun.goes_on else options.rerun.existing
        check_output(options.output, existing=existing, source=options.calls)
    else:
        file_run = FileRun.prepare(options.output, options.rerun, source=options.calls)
    with nullcontext() if file_run is None else closing(file_run):
        return await _run_list(options, screen, interrupts, source, path, function, file_run)


async def _run_list(
    options: RunOptions,
    screen: Screen,
    interrupts: Interrupts,
    source: FileSource,
    path: Path,
    function: str | None,
    file_run: FileRun | None,
) -> int:
    environment = {} if file_run is None else file_run.environment
    async with started_worker(options.target, options.setup, screen, environment=environment) as worker:
        name = function or only_function(worker)
        if name is not None:
            worker.registry.get(name)  # a wrong name must not cost the old output
        elif isinstance(source, JsonlSource):
            source.named = True
            source.named_hint = f", since {path} has several functions, or name one: {path}:NAME"
        else:
            raise UsageError(
                f"{options.calls}: rows of a table name no function, and {path} has several:"
                f" write {path}:NAME with one of {', '.join(worker.registry.names())}"
            )
        spec = None if name is None else worker.registry.get(name)
        fitted = FittedRows(
            source,
            spec,
            columns=options.columns,
            extra=options.extra,
            id=options.id,
            with_args=options.with_args,
        )
        calls = CallList(fitted, options.limit)
        rows: CallSource = calls
        if file_run is None:
            output = interrupts.leaving(lambda: _open_plain(options, spec, fitted))
            tally = Tally(output, calls)
            sink: OutputSink = tally
        else:
            tally, rows, sink = await _begin(file_run, options, worker, calls, name, fitted)
            if file_run.is_resumed and not options.setup.quiet:
                screen.say(_describe_resume(file_run, options.limit), style="dim")
        live = Live(screen, options.log_level, prefixed=True, keeps_amounts=_has_bar(options, screen))
        run = worker.open_run(
            name,
            rows,
            sink,
            max_attempts=options.max_attempts,
            budget_ms=options.budget_ms,
            max_failures=options.max_failures,
            fail_fast=options.fail_fast,
            nan=options.nan,
            cache=options.cache,
            on_event=None if options.setup.quiet else live.on_event,
            capture=options.with_output,
            check_only=options.dry_run,
            file_run=file_run,
        )
        interrupts.handler = _Stopper(run, screen, interrupts, quiet=options.setup.quiet)
        try:
            async with _shown(options, screen, worker, run, name, live):
                summary = await run.wait()
        except OutputClosed:  # the reader of our output has seen enough, or the same Ctrl-C ended it
            return exit_status(interrupts.number) if interrupts.number else 0
        except UsageError:
            if file_run is not None and file_run.can_go_on and not options.setup.quiet:
                screen.say(f"when that is mended, {_describe_going_on(file_run, file_run.failed)}", style="dim")
            raise
        number = interrupts.number
    if not options.setup.quiet:
        show_summary(screen, summary, tally, calls, options, file_run)
    if number:
        return exit_status(number)
    limit = options.max_failures or FailureLimit(0)
    failed = summary.failed if file_run is None else file_run.failed
    too_many = limit.is_exceeded(failed, summary.calls + summary.standing, at_end=True)
    return 1 if too_many or summary.stop_reason is not None else 0


async def _begin(
    file_run: FileRun, options: RunOptions, worker: Worker, calls: CallList, function: str | None, fitted: FittedRows
) -> tuple[Tally, CallSource, OutputSink]:
    tallies: list[Tally] = []

    def count(output: OutputSink) -> Tally:
        tallies.append(Tally(output, calls))
        return tallies[0]

    shape = {
        "id": options.id,
        "with_args": options.with_args,
        "with_output": options.with_output,
        "columns": options.columns,
        "extra": options.extra,
        "limit": options.limit,
        "format": options.format,
        "nan": None if options.nan == "refuse" else options.nan,
    }
    rows, sink = await file_run.begin(
        worker,
        calls,
        function,
        shape,
        repeated=fitted.repeated,
        with_printed=options.with_output,
        in_front=count,
    )
    return tallies[0], rows, sink


def _describe_resume(file_run: FileRun, limit: int | None) -> str:
    plan = file_run.plan
    text = f"going on with {file_run.path}: {_count(file_run.standing, 'result')} there stay"
    if failed := plan.failed_before + plan.kept_failed:
        text += f", {failed:,} of them failed"
    if plan.again:
        unknown = f" ({plan.again_unknown:,} of them may have had their effect)" if plan.again_unknown else ""
        among = "" if limit is None else f", those among the first {_count(limit, 'row')},"
        text += f", {_count(plan.again, 'failed row')}{among} run again{unknown}"
    return text


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def _describe_going_on(file_run: FileRun, not_run: int) -> str:
    """The command lines that go on with a run; empty: there is nothing left of it. `not_run`: of its failures, those
    that --resume runs."""
    if file_run.is_finished:
        return ""
    lines = []
    if not file_run.is_complete:
        lines.append(f"go on with it: {_again_with('--resume')}")
    if file_run.failed > not_run:
        also = () if file_run.is_complete else ("--resume",)
        lines.append(f"run again what failed: {_again_with(*also, '--retry-failed')}")
    return "\n".join(lines)


def _again_with(*more: str) -> str:
    """This command line, with other words about its output."""
    words = [word for word in sys.argv[1:] if word not in RERUN_WORDS]
    end = words.index("--") if "--" in words else len(words)  # behind it a word is no option
    return f"callyard {shlex.join([*words[:end], *more, *words[end:]])}"


def _open_plain(options: RunOptions, spec: FunctionSpec | None, rows: FittedRows) -> OutputSink:
    """An output without a journal."""
    if options.dry_run:
        return RefusedRows(JsonlOutput("-"))
    return open_output(
        options.output,
        existing=options.rerun.existing,
        source=options.calls,
        with_printed=options.with_output,
        output_schema=b"{}" if spec is None else bytes(spec.output_schema),
        repeated=rows.repeated,
    )


def _has_bar(options: RunOptions, screen: Screen) -> bool:
    """A bar needs the terminal for itself: results on it, or in a pipe to what prints there, would tear it."""
    stdout = options.output == "-" or options.dry_run
    alone = is_plain_file(1) if stdout else os.path.isdir(options.output) or is_plain_file(options.output)
    return screen.is_terminal and alone and not options.setup.quiet


class _Stopper:
    """Signals during a run: first let running calls finish for a moment, then stop them, and if need be leave."""

    def __init__(self, run: Run, screen: Screen, interrupts: Interrupts, *, quiet: bool) -> None:
        self._run = run
        self._screen = screen
        self._quiet = quiet
        self._interrupts = interrupts
        self._stopped_at_s = 0.0

    def __call__(self, count: int) -> None:
        loop = asyncio.get_running_loop()
        if count == 1:
            self._run.stop(cancel_running=False)
            loop.call_later(INTERRUPT_GRACE_S, self._run.stop)
            self._say(f"stopping: running calls get {INTERRUPT_GRACE_S:.0f} s to finish; once more stops them now")
        elif count == 2:
            self._stopped_at_s = loop.time()
            self._say("stopping now")
            self._run.stop()
        elif loop.time() - self._stopped_at_s > LEAVE_AFTER_S:  # a key that is hammered must not cost the results
            self._interrupts.leave()

    def _say(self, text: str) -> None:
        if not self._quiet:
            self._screen.say(text, style="yellow")


@asynccontextmanager
async def _shown(
    options: RunOptions, screen: Screen, worker: Worker, run: Run, function: str | None, live: Live
) -> AsyncIterator[None]:
    """Show the run while the body waits for it. A fault of the display is raised when the run is over."""
    if options.setup.quiet:
        yield
        return
    budget = "no budget unless the function names one"
    if options.budget_ms:
        budget = f"budget {show_duration(options.budget_ms)} a call"
    elif options.budget_ms == 0:
        budget = "no budget"
    named = "" if function is not None else f"; each row names its function: {', '.join(worker.registry.names())}"
    count = len(worker.slots())
    screen.say(f"{'1 executor' if count == 1 else f'{count} executors'}, {budget}{named}", style="dim")
    if options.calls == "-" and os.isatty(0):
        screen.say("reading rows from the terminal; Ctrl-D ends them", style="dim")
    scrolling = (options.output == "-" or options.dry_run) and os.isatty(1)
    bar = _has_bar(options, screen)
    progress = show_progress(screen, worker, run, bar=bar, lines=not scrolling, describe=live.describe_longest)
    async with shown_beside(progress):
        yield


def show_summary(
    screen: Screen,
    summary: RunSummary,
    tally: Tally,
    calls: CallList,
    options: RunOptions,
    file_run: FileRun | None,
) -> None:
    """Calls, failures that are alike with an example each, time, rate, peak memory."""
    count = _count(summary.calls, "call")
    if options.dry_run:
        count = f"dry run, nothing was called: {count}"
    cancelled = f", {tally.cancelled:,} cancelled" if tally.cancelled else ""
    not_run = f", {tally.not_run:,} not run" if tally.not_run else ""
    failed = summary.failed - tally.cancelled - tally.not_run
    screen.say(
        f"{count}: {summary.ok:,} ok, {failed:,} failed{cancelled}{not_run} in {show_duration(summary.elapsed_ms)}"
        f" ({summary.calls_per_second:,.0f}/s), worker's peak memory {show_size(summary.peak_memory_bytes)}",
        style="bold",
    )
    if summary.stop_reason is not None:
        done = calls.is_done(summary.calls) if file_run is None else file_run.has_all_rows
        next_row = summary.calls if file_run is None else file_run.next_row
        rest = "" if done else f"; rows from call {next_row} on were not run and have no line"
        screen.say(f"stopped early: {_STOPPED[summary.stop_reason]}{rest}", style="yellow")
    for kind in sorted(tally.kinds, key=lambda kind: (kind in STOPPED_KINDS, -tally.count(kind))):
        groups, rest_count = tally.most_frequent(kind, ALIKE_SHOWN_MAX)
        screen.say(f"  {tally.count(kind):,} {kind.value}: {summarise(*(g.failure for g in groups))}", style="red")
        for number, alike in enumerate(groups):
            many = f"{alike.count:,} such as " if alike.count > 1 else ""
            screen.say(f"      {many}{alike.where}: {alike.message}")
            if options.debug and alike.failure.stack:
                screen.say(alike.failure.stack, style="dim")
            if number == 0:
                for line in alike.tail:
                    screen.say(f"        | {line}", style="dim")
        if rest_count:
            screen.say(f"      {rest_count:,} with other messages")
    if summary.failed and not options.dry_run and os.path.isfile(options.output):
        screen.say(f"all of them: grep '\"ok\":false' {shlex.quote(options.output)}", style="dim")
    if file_run is not None and (line := _describe_going_on(file_run, tally.not_run - file_run.unreplaced)):
        screen.say(line, style="dim")


_STOPPED: Final[Mapping[StopReason, str]] = {
    StopReason.CANCELLED: "interrupted",
    StopReason.DEADLINE: "the deadline passed",
    StopReason.SHUTTING_DOWN: "the worker was shut down",
    StopReason.FAIL_FAST: "a call failed, and --fail-fast was given",
    StopReason.MAX_FAILURES: "more calls failed than --max-failures allows",
    StopReason.OUTPUT_BYTES_EXCEEDED: "the outputs held exceeded max_collected_output_bytes",
    StopReason.SINK_FAILED: "the output could not be written",
    StopReason.UNAVAILABLE: "no executor",
}
