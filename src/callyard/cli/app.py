"""The commands, by name. What each one takes is in `commands/`; what it does is imported when it runs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

import callyard
from callyard.cli.commands.call import EPILOG as CALL_EPILOG
from callyard.cli.commands.call import call_command
from callyard.cli.commands.doctor import doctor_command
from callyard.cli.commands.keys import EPILOG as KEYS_EPILOG
from callyard.cli.commands.keys import keys_list_command, keys_resolve_command
from callyard.cli.commands.listing import list_command
from callyard.cli.commands.mcp_config import EPILOG as MCP_CONFIG_EPILOG
from callyard.cli.commands.mcp_config import McpConfigCommand, mcp_config_command
from callyard.cli.commands.run import EPILOG as RUN_EPILOG
from callyard.cli.commands.run import HELP as RUN_HELP
from callyard.cli.commands.run import run_command
from callyard.cli.commands.serve import EPILOG as SERVE_EPILOG
from callyard.cli.commands.serve import HELP as SERVE_HELP
from callyard.cli.commands.serve import ServeCommand, serve_command
from callyard.cli.commands.token import EPILOG as TOKEN_EPILOG
from callyard.cli.commands.token import token_new_command
from callyard.cli.help import WIDTH_MAX, PlainCommand, PlainGroup

_EPILOG = """\
Examples:
  callyard list functions.py
  callyard call functions.py:distance origin=JFK dest=LAX
  callyard run functions.py:assess flights.jsonl -o out.jsonl
  callyard serve functions.py --http
"""


def _new_app(name: str, help: str, **options: Any) -> typer.Typer:
    return typer.Typer(
        name=name,
        cls=PlainGroup,
        help=help,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDTH_MAX},
        **options,
    )


app = _new_app("callyard", "Run function calls on a pool of isolated Python executors.", epilog=_EPILOG)
_token = _new_app("token", "Make tokens for callers of `callyard serve`.")
_keys = _new_app("keys", "See idempotency keys, and settle unknown outcomes.")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"callyard {callyard.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and leave.")
    ] = False,
) -> None:
    pass


app.command("run", cls=PlainCommand, help=RUN_HELP, epilog=RUN_EPILOG)(run_command)
app.command("call", cls=PlainCommand, epilog=CALL_EPILOG)(call_command)
app.command("list", cls=PlainCommand)(list_command)
app.command("doctor", cls=PlainCommand)(doctor_command)
app.command("serve", cls=ServeCommand, help=SERVE_HELP, epilog=SERVE_EPILOG)(serve_command)
app.command("mcp-config", cls=McpConfigCommand, epilog=MCP_CONFIG_EPILOG)(mcp_config_command)
_token.command("new", cls=PlainCommand, epilog=TOKEN_EPILOG)(token_new_command)
_keys.command("list", cls=PlainCommand)(keys_list_command)
_keys.command("resolve", cls=PlainCommand, epilog=KEYS_EPILOG)(keys_resolve_command)
app.add_typer(_token)
app.add_typer(_keys)


def find_command(*words: str) -> Any:
    """The parser of a command."""
    found: Any = typer.main.get_command(app)
    for word in words:
        found = found.commands[word]
    return found
