"""`callyard run`: a call list from a file to a file."""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from callyard.cli.calls import STOPPED_KINDS, CallList, RefusedRows, Tally, summarise
from callyard.cli.interrupts import Interrupts, exit_status
from callyard.cli.live import Live, shown_beside
from callyard.cli.progress import show_progress
from callyard.cli.quantities import show_duration, show_size
from callyard.cli.screen import Screen, is_plain_file
from callyard.cli.start import Setup, run_command, started_worker
from callyard.errors import UsageError
from callyard.functions.registry import FunctionSpec
from callyard.functions.target import split_target
from callyard.scheduler import StopReason
from callyard.scheduler.tasks import CachePolicy
from callyard.worker.builders import JsonlSource, open_source
from callyard.worker.columns import Extra, FittedRows
from callyard.worker.failure_limit import FailureLimit
from callyard.worker.outputs import Existing, JsonlOutput, OutputClosed, OutputSink, check_output, open_output
from callyard.worker.results import RunSummary
from callyard.worker.worker import Run, Worker
from callyard.yard import only_function

INTERRUPT_GRACE_S: Final = 3.0
"""How long running calls may finish after the first Ctrl-C."""
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
    existing: Existing
    budget_ms: int | None
    max_attempts: int | None
    max_failures: FailureLimit | None
    fail_fast: bool
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
    source = open_source(options.calls, options.format)
    check_output(options.output, existing=options.existing, source=options.calls)
    async with started_worker(options.target, options.setup, screen) as worker:
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
        output = RefusedRows(JsonlOutput("-")) if options.dry_run else _open_output(options, spec, fitted)
        tally = Tally(output, calls)
        live = Live(screen, options.log_level, prefixed=True, keeps_amounts=_has_bar(options, screen))
        run = worker.open_run(
            name,
            calls,
            tally,
            max_attempts=options.max_attempts,
            budget_ms=options.budget_ms,
            max_failures=options.max_failures,
            fail_fast=options.fail_fast,
            cache=options.cache,
            on_event=None if options.setup.quiet else live.on_event,
            capture=options.with_output,
            check_only=options.dry_run,
        )
        interrupts.handler = _Stopper(run, screen, interrupts, quiet=options.setup.quiet)
        try:
            async with _shown(options, screen, worker, run, name, live):
                summary = await run.wait()
        except OutputClosed:  # the reader of our output has seen enough, or the same Ctrl-C ended it
            return exit_status(interrupts.number) if interrupts.number else 0
        number = interrupts.number
    if not options.setup.quiet:
        show_summary(screen, summary, tally, calls, options)
    if number:
        return exit_status(number)
    limit = options.max_failures or FailureLimit(0)
    too_many = limit.is_exceeded(summary.failed, summary.calls, at_end=True)
    return 1 if too_many or summary.stop_reason is not None else 0


def _open_output(options: RunOptions, spec: FunctionSpec | None, rows: FittedRows) -> OutputSink:
    return open_output(
        options.output,
        existing=options.existing,
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


def show_summary(screen: Screen, summary: RunSummary, tally: Tally, calls: CallList, options: RunOptions) -> None:
    """Calls, failures that are alike with an example each, time, rate, peak memory."""
    count = "1 call" if summary.calls == 1 else f"{summary.calls:,} calls"
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
        done = calls.is_done(summary.calls)
        rest = "" if done else f"; rows from call {summary.calls} on were not run and have no line"
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
