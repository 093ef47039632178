"""docs/reference/cli.md names every option there is, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from callyard.cli.app import app

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "cli.md").read_text()


def options_of(command: str) -> set[str]:
    found = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    return {name for option in found.params for name in option.opts if name.startswith("--")} - {"--help"}


def test_run() -> None:
    table = PAGE.partition("## Options of `run`")[2].partition("\n`call` takes")[0]
    first_cells = re.findall(r"^\| (`--.*?) \|", table, re.MULTILINE)
    assert {name for cell in first_cells for name in re.findall(r"--[a-z-]+", cell)} == options_of("run")


def test_call_and_list() -> None:
    sentence = PAGE.partition("\n`call` takes")[2].partition("\n\n")[0]
    call, _, listing = sentence.partition("`list` takes")
    assert set(re.findall(r"--[a-z-]+", call)) == options_of("call")
    assert set(re.findall(r"--[a-z-]+", listing)) == options_of("list")


def test_doctor() -> None:
    paragraph = PAGE.partition("\n`doctor` takes")[2].partition("\n\n")[0]
    assert set(re.findall(r"--[a-z-]+", paragraph)) | {"--debug"} == options_of("doctor")


def test_mcp_config() -> None:
    table = PAGE.partition("## `mcp-config`")[2].partition("\n## ")[0]
    first_cells = re.findall(r"^\| (`--.*?) \|", table, re.MULTILINE)
    named = {name for cell in first_cells for name in re.findall(r"--[a-z-]+", cell)}
    assert named | {"--debug"} == options_of("mcp-config")
