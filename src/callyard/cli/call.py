"""`callyard call`: one call, its value on stdout."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from callyard.cli import contents
from callyard.cli.calls import summarise
from callyard.cli.interrupts import Interrupts
from callyard.cli.live import Live, shown_amount
from callyard.cli.screen import Screen
from callyard.cli.setup import Setup
from callyard.cli.start import run_command, started_worker
from callyard.cli.streams import check_stdout, write_stdout
from callyard.errors import CallFailure, Outcome, UsageError
from callyard.functions.function import Nan
from callyard.functions.registry import Registry
from callyard.functions.target import split_target
from callyard.worker.columns import row_parameter
from callyard.yard import only_function


def call_once(
    target: str,
    arguments: Sequence[str],
    json_arguments: str | None,
    output: str | None,
    budget_ms: int | None,
    nan: Nan,
    log_level: str,
    setup: Setup,
    screen: Screen,
) -> int:
    """Run it; the exit status: 0, or 1 when the call failed. Raises UsageError when the command itself was wrong."""
    path, function = split_target(target)
    strings = json_arguments is None
    args = parse_arguments(arguments) if json_arguments is None else parse_json(json_arguments, arguments)
    if output is None or output == "-":
        check_stdout()
    if output is not None:
        contents.check_target(output)

    async def work(_: Interrupts) -> int:
        async with started_worker(target, setup, screen) as worker:
            name = function or only_function(worker)
            if name is None:
                names = ", ".join(worker.registry.names())
                raise UsageError(f"{path} has several functions: write {path}:NAME with one of {names}")
            live = Live(screen, log_level, prefixed=False, keeps_amounts=screen.is_terminal)
            async with shown_amount(screen, live):
                result = await worker.call_result(
                    name,
                    args,
                    strings=strings,
                    row=_is_row(args, worker.registry, name),
                    binary=False,
                    nan=nan,
                    budget_ms=budget_ms,
                    on_event=live.on_event,
                )
        if result.raw is not None:
            _show(result.raw, output, screen)
            return 0
        assert result.error is not None
        for line in live.hidden:  # the other lines of its last ones stand above
            screen.say(line, style="dim")
        _show_failure(result.error, screen)
        return 1

    return run_command(work, screen)


def _is_row(args: Any, registry: Registry, name: str) -> bool:
    """Whether the names are fields of the function's one object parameter, as a row's are, and not its own."""
    parameter = row_parameter(registry.get(name)) if name in registry and isinstance(args, dict) else None
    return parameter is not None and parameter not in args


def _show(raw: bytes, output: str | None, screen: Screen) -> None:
    """The value to where it was asked for; on a terminal, of contents what they are."""
    if output is not None:
        try:
            lines = contents.save(raw, output)
        except UsageError:  # the call was made: its result is not to be lost
            if sys.stdout is not None:
                write_stdout(raw + b"\n")
            raise
        for line in lines:
            screen.say(line, style="dim")
        return
    shown = contents.describe(raw) if sys.stdout is not None and sys.stdout.isatty() else None
    write_stdout(raw + b"\n" if shown is None else "".join(f"{line}\n" for line in shown).encode(errors="replace"))


def _show_failure(failure: CallFailure, screen: Screen) -> None:
    """The function's own traceback, then the kind in words and the message."""
    if failure.stack:
        screen.say(failure.stack.rstrip(), style="dim")
    screen.say(f"{failure.kind.value} ({summarise(failure)}): {failure.message}", style="red")
    if failure.outcome is Outcome.UNKNOWN:
        screen.say("the outcome is unknown: what it had begun to do may be done", style="dim")


def parse_arguments(arguments: Sequence[str]) -> dict[str, str]:
    """`NAME=VALUE` words into texts by name. Raises UsageError."""
    parsed: dict[str, str] = {}
    for word in arguments:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"expected NAME=VALUE, got {word!r}; for other arguments use --json '[…]'")
        if name in parsed:
            raise UsageError(f"argument {name!r} is given twice")
        parsed[name] = value
    return parsed


def parse_json(text: str, arguments: Sequence[str]) -> Any:
    """The object or array of `--json`. Raises UsageError."""
    if arguments:
        raise UsageError("give the arguments as NAME=VALUE words or by --json, not both")
    try:
        args = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise UsageError(f"--json is no JSON: {error}; expected an object or an array, got {text!r}") from error
    if not isinstance(args, dict | list):
        raise UsageError(f"--json must be an object (by name) or an array (by position), got {text!r}")
    return args
