"""`callyard list`: what a file offers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from callyard.errors import UsageError
from callyard.functions.registry import FunctionSpec, Registry
from callyard.worker.worker import Worker
from callyard.yard import run_sync, split_target


def list_functions(target: Path, include: tuple[str, ...], settings: Mapping[str, Any], *, as_json: bool) -> int:
    """Print the functions; exit status 0."""
    path, function = split_target(target)
    if function is not None:
        raise UsageError(f"list takes a file, not a function: callyard list {path}")

    async def describe() -> list[FunctionSpec]:
        async with Worker(Registry.for_target(path, include=include), **settings) as worker:
            return worker.functions()

    specs = run_sync(describe())
    if as_json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(specs)) + b"\n")
        return 0
    console = Console(highlight=False)
    if not specs:
        console.print(f"{path} has no functions: mark one with @function")
        return 0
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("function", "promises", "description"):
        table.add_column(column, overflow="fold")
    for spec in specs:
        table.add_row(spec.signature, _promises(spec), spec.description.strip().partition("\n")[0])
    console.print(table)
    return 0


def _promises(spec: FunctionSpec) -> str:
    declared = msgspec.to_builtins(spec.promises)
    if declared.get("pure"):
        declared.pop("idempotent", None)
    shown = [name if value is True else f"{name}={value}" for name, value in declared.items() if value not in ((), [])]
    return ", ".join(shown) or "none"
