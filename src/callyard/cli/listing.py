"""`callyard list`: what a file offers."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from callyard.cli.interrupts import Interrupts
from callyard.cli.screen import Screen
from callyard.cli.start import Setup, run_command, started_worker
from callyard.cli.streams import check_stdout, clean, write_stdout
from callyard.errors import UsageError
from callyard.functions.registry import FunctionSpec, Registry
from callyard.yard import split_target


class Listing(msgspec.Struct, frozen=True):
    """What `list --json` prints."""

    file: str
    digest: str
    installed_packages: tuple[str, ...]
    """Distributions outside the bundle that it imports, as `name==version`."""
    functions: list[FunctionSpec]


def list_functions(target: Path, setup: Setup, screen: Screen, *, as_json: bool) -> int:
    """Print the functions; exit status 0. Raises UsageError when the file is no target."""
    path, function = split_target(target)
    if function is not None:
        raise UsageError(f"list takes a file, not a function: callyard list {path}")
    check_stdout()

    async def work(_: Interrupts) -> int:
        async with started_worker(path, setup, screen, only_describe=True) as worker:
            registry = worker.registry
        if as_json:
            listing = Listing(str(path), registry.bundle.digest, registry.installed_packages, registry.specs())
            write_stdout(msgspec.json.format(msgspec.json.encode(listing)) + b"\n")
        else:
            write_stdout(render(_describe(registry)))
        return 0

    return run_command(work, screen)


def _describe(registry: Registry) -> Iterable[Text]:
    """A line for each function, its role and promises behind, and its description below."""
    for spec in registry:
        said = ", ".join(filter(None, (_role(spec), _promises(spec))))
        yield Text.assemble((clean(spec.signature), "bold"), (f"  [{said}]" if said else "", "green"))
        if description := clean(spec.description or spec.title).strip().partition("\n")[0]:
            yield Text(f"    {description}")
    if registry.installed_packages:
        yield Text(f"imports {', '.join(registry.installed_packages)}", style="dim")


def render(lines: Iterable[Text]) -> bytes:
    """With colours where stdout is a terminal, and never wrapped: pipes need whole lines."""
    buffer = io.StringIO()
    console = Console(file=buffer, force_terminal=sys.stdout.isatty())
    for line in lines:
        console.print(line, soft_wrap=True)
    return buffer.getvalue().encode("utf-8", "backslashreplace")


def _role(spec: FunctionSpec) -> str:
    """Empty for a tool, as most are."""
    return clean(f"{spec.role} {spec.uri}".strip()) if spec.role != "tool" else ""


def _promises(spec: FunctionSpec) -> str:
    declared = msgspec.to_builtins(spec.promises)
    if declared.get("read_only"):
        declared.pop("idempotent", None)
    if declared.get("pure") or spec.role != "tool":  # implied
        declared.pop("read_only", None)
    if declared.get("isolation") not in (None, spec.isolation):
        declared["isolation"] = f"{declared['isolation']} (ignored: it runs in an {spec.isolation})"
    shown = [name if value is True else f"{name}={value}" for name, value in declared.items() if value not in ((), [])]
    return ", ".join(shown)
