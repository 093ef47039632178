"""`callyard doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from callyard.cli.options import ConfigFile, Debug, PrintConfig, Sets, build_setup, guard, show_settings
from callyard.cli.quantities import parse_sandbox_min

if TYPE_CHECKING:
    from callyard.cli.screen import Screen


def doctor_command(
    sandbox_min: Annotated[
        str,
        typer.Option(
            "--sandbox-min",
            parser=parse_sandbox_min,
            metavar="bwrap|landlock|off",
            help="Exit with 1 when this machine does not allow at least this level. Default: landlock.",
        ),
    ] = "landlock",
    as_json: Annotated[bool, typer.Option("--json", help="Everything as one JSON object.")] = False,
    config: ConfigFile = None,
    sets: Sets = None,
    print_config: PrintConfig = False,
    debug: Debug = False,
) -> None:
    """Say what this machine can enforce: sandbox levels, limits, versions."""

    def work(_: Screen) -> int:
        setup = build_setup(config=config, sets=sets)
        if print_config:
            return show_settings(setup, None)
        from callyard.cli.doctor import examine
        from callyard.worker.sandbox.levels import Level

        return examine(setup.read(None).config, Level(sandbox_min), as_json=as_json)

    guard(work, debug=debug)
