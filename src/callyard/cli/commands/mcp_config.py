"""`callyard mcp-config`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from callyard.cli.help import PlainCommand
from callyard.cli.options import Debug, guard
from callyard.errors import UsageError

if TYPE_CHECKING:
    from callyard.cli.screen import Screen

EPILOG = """\
Examples:
  callyard mcp-config tools.py --client claude
  callyard mcp-config tools.py --client vscode --write -- --executors 2 --sandbox auto
  callyard mcp-config tools.py --client cursor --http http://127.0.0.1:8700 --token-env CALLYARD_TOKEN
"""


class McpConfigCommand(PlainCommand):
    """Options of `serve` are easily given without the `--` before them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if hasattr(error, "option_name") and hasattr(error, "message"):
                error.message += "; options of `callyard serve` go after a --"
            raise


def mcp_config_command(
    target: Annotated[str, typer.Argument(metavar="FILE.py", help="Whose functions are served.")],
    options: Annotated[
        list[str] | None, typer.Argument(metavar="-- OPTION", help="Options of `callyard serve`, after a --.")
    ] = None,
    client: Annotated[str, typer.Option("--client", metavar="claude|cursor|vscode", help="Whose settings.")] = "claude",
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="The server's name there. Default: the file's.")
    ] = None,
    http: Annotated[
        str | None,
        typer.Option("--http", metavar="URL", help="Of a server that you start. Default: the client does, on stdio."),
    ] = None,
    token_env: Annotated[
        str | None,
        typer.Option("--token-env", metavar="VARIABLE", help="Where the client finds the token, for --http."),
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Put it into the client's file; what is there stays, and is copied first.")
    ] = False,
    file: Annotated[Path | None, typer.Option("--file", metavar="FILE.json", help="Into this file instead.")] = None,
    debug: Debug = False,
) -> None:
    """Print what an MCP client's settings must say to find FILE.py."""

    def work(screen: Screen) -> int:
        from callyard.cli.mcp_config import CLIENTS, Wanted, show_config

        if client not in CLIENTS:
            raise UsageError(f"--client must be one of {', '.join(CLIENTS)}, got {client!r}")
        wanted = Wanted(
            target=target, client=client, name=name, http=http, token_env=token_env, options=tuple(options or ())
        )
        return show_config(wanted, screen, _check_serve_options, write=write, file=file)

    guard(work, debug=debug)


def _check_serve_options(words: Sequence[str]) -> list[str]:
    """FILE.py and options of `serve`, with absolute paths. Raises UsageError for what `serve` would refuse."""
    from callyard.cli.app import find_command
    from callyard.cli.commands.serve import serve_command

    command = find_command("serve")
    hints = get_type_hints(serve_command)
    paths = {name for option in command.params if Path in get_args(hints[option.name]) for name in option.opts}
    checked = list(words)
    for place, word in enumerate(checked):
        option, has_value, value = word.partition("=")
        if option == "--http":
            raise UsageError("the client starts this server, on stdio: for one that listens give its URL to mcp-config")
        if option in paths and has_value:
            checked[place] = f"{option}={Path(value).absolute()}"
        elif option in paths and place + 1 < len(checked):
            checked[place + 1] = str(Path(checked[place + 1]).absolute())
    try:
        command.make_context("serve", list(checked))
    except Exception as error:
        message = getattr(error, "message", None)  # of the parser's own errors
        if message is None:
            raise
        raise UsageError(f"options of serve: {message}") from error
    return checked
