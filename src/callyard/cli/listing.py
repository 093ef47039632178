"""`callyard list`: what a file offers."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable

import msgspec
from rich.console import Console
from rich.text import Text

from callyard.cli.interrupts import Interrupts
from callyard.cli.screen import Screen
from callyard.cli.setup import Setup
from callyard.cli.start import registry_of, run_command, started_worker
from callyard.cli.streams import check_stdout, clean, write_stdout
from callyard.errors import UsageError
from callyard.functions.registry import FunctionSpec, Registry
from callyard.functions.script import read_script
from callyard.functions.target import split_target
from callyard.worker.interpreter import list_packages, locate_python


class Listing(msgspec.Struct, frozen=True):
    """What `list --json` prints."""

    file: str
    digest: str
    installed_packages: tuple[str, ...]
    """Distributions outside the bundle that it imports, as `name==version`."""
    functions: list[FunctionSpec]


class BundledFile(msgspec.Struct, frozen=True):
    path: str
    """From the project root."""
    bytes: int


class FileListing(msgspec.Struct, frozen=True):
    """What `list --files --json` prints."""

    module: str
    root: str
    digest: str
    files: list[BundledFile]
    python: str
    """The interpreter that executors run."""
    installed_packages: list[str]
    """Distributions that the files import, as `name==version`."""
    missing: list[str]
    """Modules that they import, and that are neither among them nor installed for `python`."""
    dependencies: tuple[str, ...]
    """What the script itself says it needs (PEP 723)."""


def list_functions(target: str, setup: Setup, screen: Screen, *, as_json: bool, files: bool = False) -> int:
    """Print the functions, or with `files` the bundle; exit status 0. Raises UsageError when it is no target."""
    path, function = split_target(target)
    if function is not None:
        raise UsageError(f"list takes a file, not a function: callyard list {path}")
    check_stdout()
    if files:
        listed = read_files(target, setup)
        write_stdout(_to_json(listed) if as_json else render(_describe_files(listed)))
        return 0

    async def work(_: Interrupts) -> int:
        async with started_worker(target, setup, screen, only_describe=True) as worker:
            registry = worker.registry
        if as_json:
            listing = Listing(str(path), registry.bundle.digest, registry.installed_packages, registry.specs())
            write_stdout(_to_json(listing))
        else:
            write_stdout(render(_describe(registry)))
        return 0

    return run_command(work, screen)


def read_files(target: str, setup: Setup) -> FileListing:
    """The bundle, and what it imports. Runs nothing of it, so a target that does not load is listed as well."""
    config = setup.read(target).config
    registry = registry_of(target, setup, config)
    bundle, found = registry.bundle, registry.target
    assert found is not None
    python = sys.executable
    if config.executor_python:
        python, _ = locate_python(config.executor_python, found.path.parent, trusted=setup.is_trusted(config))
    packages = list_packages(python, bundle.imports)
    return FileListing(
        module=bundle.module,
        root=str(found.root),
        digest=bundle.digest,
        files=[BundledFile(name, len(content)) for name, content in bundle.files.items()],
        python=python,
        installed_packages=sorted({package for names in packages.values() for package in names}),
        missing=sorted(name for name, names in packages.items() if not names),
        dependencies=read_script(bundle.source, bundle.name).dependencies,
    )


def _describe_files(listed: FileListing) -> Iterable[Text]:
    width = max(len(f"{file.bytes:,}") for file in listed.files)
    for file in listed.files:
        yield Text(f"{file.bytes:>{width},}  {clean(file.path)}")
    count = "1 file" if len(listed.files) == 1 else f"{len(listed.files)} files"
    yield Text(f"{count} of {clean(listed.root)}, module {listed.module}, digest {listed.digest[:16]}", style="dim")
    if listed.installed_packages:
        yield Text(f"imports {', '.join(listed.installed_packages)}", style="dim")
    if listed.dependencies:
        yield Text(f"needs {clean(', '.join(listed.dependencies))} (PEP 723)", style="dim")
    if listed.missing:
        yield Text(f"neither here nor installed for {listed.python}: {', '.join(listed.missing)}", style="yellow")


def _to_json(listing: Listing | FileListing) -> bytes:
    return msgspec.json.format(msgspec.json.encode(listing)) + b"\n"


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
