"""docs/reference/cli.md names every option of the server, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from callyard.cli.app import app

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "cli.md").read_text()


def section(name: str) -> str:
    return PAGE.partition(f"\n## `{name}`\n")[2].partition("\n## ")[0]


def options_of(*command: str) -> set[str]:
    found = typer.main.get_command(app)
    for word in command:
        found = found.commands[word]  # type: ignore[attr-defined]
    return {name for option in found.params for name in option.opts if name.startswith("--")} - {"--help"}


def options_in(text: str) -> set[str]:
    return set(re.findall(r"--[a-z][a-z-]*", text))


def test_serve() -> None:
    assert options_in(section("serve").partition("### ")[0]) == options_of("serve")


def test_token_and_keys() -> None:
    known = options_of("token", "new") - {"--debug"}
    assert options_in(section("token new")) == known
    known = (options_of("keys", "list") | options_of("keys", "resolve")) - {"--debug"}
    assert options_in(section("keys")) == known
