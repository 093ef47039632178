"""Help as plain text, by subject. Rich would draw it too, but takes longer to import than all the rest of a command."""

from __future__ import annotations

from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

EXIT_USAGE: Final = 2
PRINT_CONFIG: Final = "--print-config"
WIDTH_MAX: Final = 120
_ARGUMENTS: Final = "Arguments"
_OPTIONS: Final = "Options"


class PlainCommand(TyperCommand):
    """Its options stand under the heading that each one names (`rich_help_panel`)."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if PRINT_CONFIG in args:  # settings can be shown of no target in particular
            for parameter in self.params:
                parameter.required = False
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [parameter for parameter in self.get_params(ctx) if parameter.param_type_name == "argument"]
        shown = [(_name_of(argument), argument.required) for argument in arguments]
        return ["[OPTIONS]", *(name if required else f"[{name}]" for name, required in shown)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_parameters(self, ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        _write_epilog(self, formatter)


class PlainGroup(TyperGroup):
    """Commands, then options. Without a word more: its help, and the status of a command that was wrong."""

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False  # that it was not given typer would learn by pydantic, and import it for the purpose
        return option

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args:
            typer.echo(ctx.get_help())
            ctx.exit(EXIT_USAGE)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.format_commands(ctx, formatter)
        _write_parameters(self, ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        _write_epilog(self, formatter)


def _write_parameters(command: TyperCommand | TyperGroup, ctx: Any, formatter: Any) -> None:
    sections: dict[str, list[tuple[str, str]]] = {_ARGUMENTS: []}
    others: list[tuple[str, str]] = []
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is None:
            continue
        if parameter.param_type_name == "argument":
            sections[_ARGUMENTS].append((_name_of(parameter), record[1].removesuffix("  [required]")))
        elif (heading := getattr(parameter, "rich_help_panel", None)) is None:
            others.append(record)
        else:
            sections.setdefault(heading, []).append(record)
    sections[_OPTIONS if len(sections) == 1 else f"Other {_OPTIONS.lower()}"] = others
    for heading, records in sections.items():
        if records:
            with formatter.section(heading):
                formatter.write_dl(records)


def _name_of(argument: Any) -> str:
    return str(argument.metavar or argument.name)


def _write_epilog(command: TyperCommand | TyperGroup, formatter: Any) -> None:
    """Line by line: examples are not wrapped."""
    if command.epilog:
        formatter.write(f"\n{command.epilog}")
