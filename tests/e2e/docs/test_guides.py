"""Every guide's example, made and run as written."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from callyard import IoConfig, UsageError, WorkerConfig
from callyard.worker.sandbox.machine import choose
from tests.e2e.docs.guides import find_blocks, find_commands, make_files
from tests.e2e.docs.test_pages import ROOT, shell

GUIDES = [*sorted((ROOT / "docs/guides").glob("*.md")), ROOT / "docs/tutorial-mcp.md"]
PAGES = [*GUIDES, *sorted((ROOT / "docs/reference").glob("*.md")), ROOT / "README.md", ROOT / "docs/tutorial.md"]


def choose_or_none() -> object | None:
    try:
        return choose(WorkerConfig(sandbox="auto"))[0]
    except UsageError:
        return None


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_a_guide_as_written(guide: Path, tmp_path: Path) -> None:
    page = guide.read_text()
    assert make_files(page, tmp_path), "a guide has a complete example"
    commands = find_commands(page)
    assert any(typed.printed for typed in commands), "and shows what it prints"
    for typed in commands:
        if "confine" in typed.command and choose_or_none() is None:
            continue  # this machine has no sandbox: the guide says that the worker would not start
        done = shell(typed.command, tmp_path)
        assert (done.returncode, done.stdout) == (0, typed.printed), done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_python_and_links_of_a_page(page: Path) -> None:
    text = page.read_text()
    for code in find_blocks(text, "python"):
        if not code.startswith(" "):  # lines to be put into a function
            compile(code, page.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    for target, anchor in re.findall(r"\]\(([^)#:]+)(?:#([^)]+))?\)", text):
        linked = page.parent / target
        assert linked.is_file(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.M)
            assert anchor in [heading.lower().replace(" ", "-") for heading in headings], f"{page.name}: #{anchor}"


@pytest.mark.requirement("X42")
def test_the_io_settings_of_the_guide_are_right(tmp_path: Path) -> None:
    _, settings, _ = (tomllib.loads(block) for block in find_blocks((ROOT / "docs/guides/io.md").read_text(), "toml"))
    config = IoConfig.from_mapping(settings["io"], tmp_path)
    assert config.http.allow == ("api.example.com", "*.example.org")
    assert config.files["logs"].max_bytes == 1 << 20
    assert config.sql["sales"].timeout_ms == 5_000
    assert config.jsonrpc["prices"].read_only == frozenset({"quote"})


ASK = """
import callyard

if __name__ == "__main__":
    for result in callyard.run("ticking.py:tick", [[], []], executors=1, io={"clock": {}}):
        print(type(result.unwrap()).__name__)
"""
TICKING = """
from callyard import function
from callyard.sdk_io import ask


@function
def tick() -> int:
    return ask("clock", "now")[0]
"""


@pytest.mark.requirement("X42")
def test_the_provider_of_the_guide_answers(tmp_path: Path) -> None:
    page = (ROOT / "docs/guides/io.md").read_text()
    make_files(page, tmp_path)
    group = tomllib.loads(find_blocks(page, "toml")[-1])["project"]["entry-points"]
    installed = tmp_path / "clockwork-1.dist-info"  # what installing the package leaves
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: clockwork\nVersion: 1\n")
    (installed / "entry_points.txt").write_text(
        "".join(f"[{name}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()) for name, entries in group.items())
    )
    (tmp_path / "ticking.py").write_text(TICKING)
    (tmp_path / "ask.py").write_text(ASK)
    done = subprocess.run(
        [sys.executable, "ask.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.split() == ["int", "int"], done.stderr
