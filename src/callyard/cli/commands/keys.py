"""`callyard keys`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from callyard.cli.options import AsJson, ConfigFile, Debug, PrintConfig, StateDir, guard

if TYPE_CHECKING:
    from callyard.cli.screen import Screen

EPILOG = """\
Examples:
  callyard keys resolve acme charge order-7 --result '{"paid": true}' --target functions.py
  callyard keys resolve acme charge order-7 --retry --state-dir /var/lib/callyard
"""


def keys_list_command(
    target: Annotated[str | None, typer.Argument(metavar="FILE.py", help="Whose server's keys.")] = None,
    unknown: Annotated[bool, typer.Option("--unknown", help="Only those of calls whose outcome nobody knows.")] = False,
    tenant: Annotated[str | None, typer.Option("--tenant", metavar="NAME", help="Only this tenant's.")] = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="Only the first N.")] = 1_000,
    state_dir: StateDir = None,
    config: ConfigFile = None,
    print_config: PrintConfig = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List idempotency keys, oldest first; also while the server runs."""

    def work(screen: Screen) -> int:
        from callyard.cli.keys import Place, list_all

        if print_config:
            return _show_settings(target, state_dir, config)
        place = Place(target, state_dir, config)
        return list_all(place, screen, unknown=unknown, tenant=tenant, limit=limit, as_json=as_json)

    guard(work, debug=debug)


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
    print_config: PrintConfig = False,
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

        if print_config:
            return _show_settings(target, state_dir, config)
        place = Place(target, state_dir, config)
        return resolve_one(
            place, screen, tenant, tool, key, retry=retry, result=result, audit=calls_log, as_json=as_json
        )

    guard(work, debug=debug)


def _show_settings(target: str | None, state_dir: Path | None, config: Path | None) -> int:
    from callyard.cli.keys import show_settings
    from callyard.cli.streams import write_stdout

    write_stdout(show_settings(target, state_dir, config).encode())
    return 0
