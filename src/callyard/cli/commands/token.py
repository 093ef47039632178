"""`callyard token`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from callyard.cli.options import Debug, guard

if TYPE_CHECKING:
    from callyard.cli.screen import Screen

EPILOG = """\
Examples:
  callyard token new --tenant acme --config serve.toml
  callyard token new --tenant acme --tools 'read_*' --tools search --rate 10/s
"""


def token_new_command(
    tenant: Annotated[str, typer.Option("--tenant", metavar="NAME", help="Whose calls these are.")],
    tools: Annotated[
        list[str] | None,
        typer.Option("--tools", metavar="GLOB", help="What it may call; may be repeated. Default: everything."),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", metavar="NAME", help="What the token is called.")] = None,
    owner: Annotated[
        str, typer.Option("--owner", metavar="NAME", help="Its calls run one at a time, in order, as this owner's.")
    ] = "",
    rate: Annotated[str, typer.Option("--rate", metavar="10/s", help="Of all its calls. Default: no limit.")] = "",
    running_max: Annotated[
        int | None,
        typer.Option("--running-max", metavar="N", min=1, help="Calls of it that run at once. Default: no limit."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE.toml", help="Put its table into this file, which may be new."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Make a token and print it, once. Only its hash is kept, in the file that `callyard serve --config` reads."""

    def work(screen: Screen) -> int:
        from callyard.cli.token import make_token

        return make_token(
            screen,
            tenant=tenant,
            tools=tools or ["*"],
            name=name,
            owner=owner,
            rate=rate,
            running_max=running_max,
            config=config,
        )

    guard(work, debug=debug)
