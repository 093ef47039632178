"""The design page says what the code does."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/design/scheduler.md").read_text(encoding="utf-8")


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_states", ROOT / "tools/draw_states.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.requirement("X4")
def test_the_diagram_is_the_table() -> None:
    tool = load_tool()
    for name, (first, table) in tool.PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        assert tool.put(text, tool.draw(first, table)) == text, "run: python tools/draw_states.py --write"
    assert "    RUNNING --> WAITING: suspended\n" in PAGE
    with pytest.raises(ValueError, match="expected <!-- states"):
        tool.put("a page without marks", "")


def test_every_invariant_has_its_name_on_the_page_and_no_other() -> None:
    code = (ROOT / "src/callyard/scheduler/invariants.py").read_text(encoding="utf-8")
    names = set(re.findall(r'assert .*?, f?"([a-z_0-9]+)', code))
    section = PAGE.partition("## Invariants")[2].partition("\nBeside them")[0]
    rows = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    on_page = {name for row in rows for name in re.findall(r"`([a-z_0-9]+)`", row)}
    assert on_page == names
