"""`callyard call`: one call, its value on stdout."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from rich.console import Console

from callyard.errors import KIND_RULES, UsageError
from callyard.functions.registry import Registry
from callyard.worker.worker import Worker
from callyard.yard import only_function, run_sync, split_target


def call_once(
    target: str,
    arguments: Sequence[str],
    json_arguments: str | None,
    budget_ms: int | None,
    include: tuple[str, ...],
    settings: Mapping[str, Any],
    console: Console,
    *,
    debug: bool,
) -> int:
    """Run it; the exit status: 0, or 1 when the call failed."""
    path, function = split_target(target)
    strings = json_arguments is None
    args = parse_arguments(arguments) if json_arguments is None else parse_json(json_arguments, arguments)

    async def work() -> int:
        async with Worker(Registry.for_target(path, include=include), **settings) as worker:
            name = function or only_function(worker)
            if name is None:
                names = ", ".join(spec.name for spec in worker.functions())
                raise UsageError(f"{path} has several functions: write {path}:NAME with one of {names}")
            result = await worker.call_result(name, args, strings=strings, budget_ms=budget_ms)
        if result.raw is not None:
            sys.stdout.buffer.write(result.raw + b"\n")
            sys.stdout.buffer.flush()
            return 0
        failure = result.error
        assert failure is not None
        console.print(
            f"{failure.kind.value}: {failure.message}", style="red", markup=False, highlight=False, soft_wrap=True
        )
        if failure.stack:
            console.print(failure.stack, markup=False, highlight=False, soft_wrap=True)
        elif debug:
            console.print(KIND_RULES[failure.kind].summary)
        return 1

    return run_sync(work())


def parse_arguments(arguments: Sequence[str]) -> dict[str, str]:
    """`NAME=VALUE` words into texts by name. Raises UsageError."""
    parsed: dict[str, str] = {}
    for word in arguments:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"expected NAME=VALUE, got {word!r}; for other arguments use --json")
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
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise UsageError(f"--json is no JSON: {error}") from error
    if not isinstance(args, dict | list):
        raise UsageError(f"--json must be an object or an array, got {text!r}")
    return args
