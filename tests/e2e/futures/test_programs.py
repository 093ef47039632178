"""Programs as they are written for `ProcessPoolExecutor`, with nothing changed but the import."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = sorted((Path(__file__).parent / "programs").glob("*.py"))
OURS = "from callyard import PoolExecutor as ProcessPoolExecutor\n"


def with_our_import(text: str) -> str:
    changed = re.sub(r"^(from concurrent\.futures import .*?)ProcessPoolExecutor,? ?", r"\1", text, flags=re.M)
    changed = re.sub(r"^    ProcessPoolExecutor,\n", "", changed, flags=re.M)
    changed = re.sub(r"^from concurrent\.futures import *\n", "", changed, flags=re.M)
    changed = changed.replace("concurrent.futures.ProcessPoolExecutor", "ProcessPoolExecutor")
    assert "ProcessPoolExecutor" in changed, "the program uses a pool"
    doc, _, rest = changed.partition('"""\n\n')
    return f'{doc}"""\n\n{OURS}{rest}'


def run(program: Path, folder: Path) -> str:
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, program, str(folder), "x"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


@pytest.mark.requirement("X89")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_runs_unchanged_but_for_the_import(program: Path, tmp_path: Path) -> None:
    ours = tmp_path / program.name
    ours.write_text(with_our_import(program.read_text()))
    assert "concurrent.futures.process" not in ours.read_text()
    printed = run(ours, tmp_path / "ours")
    assert printed
    assert printed == run(program, tmp_path / "theirs")
