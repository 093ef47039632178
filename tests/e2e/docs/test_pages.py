"""The README's tour and the tutorial, typed as written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent


def blocks(page: str, kind: str) -> list[str]:
    """The fenced blocks of a kind, in order."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)


def commands(page: str) -> list[str]:
    """What the page has the reader type, without the set-up by make."""
    lines = [line[2:] for block in blocks(page, "console") for line in block.splitlines() if line.startswith("$ ")]
    return [line.partition("#")[0].strip() for line in lines if "make " not in line]


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "XDG_STATE_HOME": str(folder / ".state")}
    return subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def lines_of(path: Path) -> list[dict[str, object]]:
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


def test_readme_tour(tmp_path: Path) -> None:
    functions, script, agent = blocks("README.md", "python")
    (tmp_path / "prices.py").write_text(functions)
    (tmp_path / "orders.csv").write_text(blocks("README.md", "text")[0])
    *first, again = commands("README.md")
    listed, called, ran, shown = (shell(command, tmp_path) for command in first)
    assert "total(item: str, cents: int, quantity: int = 1)" in listed.stdout
    assert "idempotent" in listed.stdout
    assert msgspec.json.decode(called.stdout) == {"item": "tea", "total": 250}
    assert ran.returncode == 1
    assert "4 calls: 2 ok, 2 failed" in ran.stderr
    results = lines_of(tmp_path / "totals.jsonl")
    assert [result["ok"] for result in results] == [True, True, False, False]
    assert [result["error"]["kind"] for result in results[2:]] == ["internal", "schema"]  # type: ignore[index]
    assert shown.stdout.count('"ok":false') == 2
    mended = (tmp_path / "orders.csv").read_text().replace("80,-1", "80,1").replace("twelve", "12")
    (tmp_path / "orders.csv").write_text(mended)
    rerun = shell(again, tmp_path)
    assert rerun.returncode == 0, rerun.stderr
    assert "2 calls: 2 ok, 0 failed" in rerun.stderr
    assert [result["ok"] for result in lines_of(tmp_path / "totals.jsonl")] == [True] * 4
    (tmp_path / "main.py").write_text(script)
    done = shell(f"{sys.executable} main.py", tmp_path)
    assert done.stdout == "0 {'item': 'tea', 'total': 250}\n1 {'item': 'salt', 'total': 80}\n"
    (tmp_path / "agent.py").write_text(agent)
    total = "{'item': 'tea', 'total': 1000}"
    refused = '/quantity: expected an integer, got text ("four")'
    asked = shell(f"{sys.executable} agent.py", tmp_path)
    assert asked.stdout == f"{total} False\n{total} True\n{refused} False\n", asked.stderr


def test_tutorial(tmp_path: Path) -> None:
    functions, guard, script = blocks("docs/tutorial.md", "python")
    (tmp_path / "trips.py").write_text(functions)
    (tmp_path / "trips.csv").write_text(blocks("docs/tutorial.md", "text")[0])
    typed = commands("docs/tutorial.md")
    listed, called, ran = (shell(command, tmp_path) for command in typed[:3])
    assert "price(trip: Trip)" in listed.stdout
    assert "What a trip costs, in euros." in listed.stdout
    assert called.stdout == blocks("docs/tutorial.md", "console")[0].splitlines()[-1] + "\n"
    assert ran.returncode == 1
    results = lines_of(tmp_path / "prices.jsonl")
    assert [result["ok"] for result in results] == [True, False, False, True]
    ben, cy = (result["error"] for result in results[1:3])
    assert (ben["kind"], ben["outcome"]) == ("internal", "ran")  # type: ignore[index]
    assert cy["kind"] == "schema"  # type: ignore[index]
    assert cy["message"] == '/minutes: expected a number, got text ("thirty")'  # type: ignore[index]
    mended = functions.replace("    speed =", guard + "    speed =").replace(
        "import function", "import ToolError, function"
    )
    (tmp_path / "trips.py").write_text(mended)
    (tmp_path / "trips.csv").write_text((tmp_path / "trips.csv").read_text().replace("thirty", "30"))
    (rerun,) = typed[4:]
    again = shell(rerun, tmp_path)
    assert again.returncode == 0, again.stderr
    assert "2 failed rows run again" in again.stderr
    results = lines_of(tmp_path / "prices.jsonl")
    assert [result["ok"] for result in results] == [True, False, True, True]
    assert results[1]["error"]["message"] == "cancelled trip"  # type: ignore[index]
    (tmp_path / "price_trips.py").write_text(script)
    assert (
        shell(f"{sys.executable} price_trips.py", tmp_path).stdout == "{'rider': 'ada', 'fare': 10.42, 'speed': 28.8}\n"
    )
