"""Whose interpreter runs the functions: chosen, checked, named, and shown inside the sandbox."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from callyard.worker.config import WorkerConfig
from callyard.worker.sandbox.levels import Level
from callyard.worker.sandbox.machine import try_level
from tests.e2e.projects.conftest import CopyProject, RunIn
from tests.e2e.projects.environments import make_environment, site_packages
from tests.e2e.projects.test_projects import assert_promised

WHERE = """
import sys
import msgspec, numbers


def where() -> dict[str, str]:
    import callyard
    return {"python": sys.executable, "prefix": sys.prefix, "callyard": callyard.__file__}
"""


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "where.py"
    path.write_text(WHERE)
    return path


def test_the_small_environment_runs_functions_with_this_callyard(
    target: Path, callyard: RunIn, small_environment: Path
) -> None:
    for words, env in ((["--python", small_environment], {}), ([], {"VIRTUAL_ENV": str(small_environment.parents[1])})):
        done = callyard(target.parent, "run", "where.py", "-", *words, rows="[]\n", **env)
        value = done.results[0].get("output")
        assert value["python"] == str(small_environment), done.err
        assert value["callyard"].endswith("src/callyard/__init__.py")
        assert f"executors run {small_environment} (Python " in done.err


def test_a_setting_of_the_environment_and_of_the_worker_chooses_it(
    target: Path, callyard: RunIn, small_environment: Path
) -> None:
    env = {"CALLYARD_EXECUTOR_PYTHON": str(small_environment.parents[1])}
    done = callyard(target.parent, "run", "where.py", "-", rows="[]\n", **env)
    assert done.results[0]["output"]["python"] == str(small_environment), done.err


async def test_a_worker_in_a_program_runs_its_own_interpreter_unless_told(
    target: Path, small_environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from callyard import Worker

    monkeypatch.setenv("VIRTUAL_ENV", str(small_environment.parents[1]))
    async with Worker(target, executors=1, spare_executors=0) as worker:
        assert (await worker.call("where"))["python"] == sys.executable
    async with Worker(target, executors=1, spare_executors=0, executor_python="auto") as worker:
        assert (await worker.call("where"))["python"] == str(small_environment)
        assert not worker.interpreter.is_own


def test_the_environment_beside_the_project_is_taken(copy_project: CopyProject, callyard: RunIn) -> None:
    project = copy_project("src_layout")
    make_environment(project / ".venv")
    (project / "src/shop/where.py").write_text(WHERE)
    done = callyard(project.parent, "run", project / "src/shop/where.py", "-", rows="[]\n")
    assert done.results[0]["output"]["python"] == str(project / ".venv/bin/python"), done.err


def test_the_environment_of_code_that_is_confined_or_audited_is_not(copy_project: CopyProject, callyard: RunIn) -> None:
    project = copy_project("flat")
    (project / ".venv/bin").mkdir(parents=True)
    python = project / ".venv/bin/python"
    python.write_text("#!/bin/sh\ntouch ran\n")
    python.chmod(0o755)
    done = callyard(project, "run", "scores.py", "-", "--audit", "ast: allow=scale", rows='["Bo", 5]\n')
    assert done.results[0].get("output") == "Bo: 25 %", done.err
    assert not (project / "ran").exists()


def test_an_interpreter_that_lacks_something_is_told_with_the_command(
    tmp_path: Path, target: Path, callyard: RunIn
) -> None:
    python = make_environment(tmp_path / "lacking", without=["greenlet", "msgspec"])
    old = next(site_packages(tmp_path / "lacking").glob("pydantic-*.dist-info"))
    metadata = (old / "METADATA").read_text()
    (old / "METADATA").write_text(
        "\n".join("Version: 1.10" if line.startswith("Version:") else line for line in metadata.split("\n"))
    )
    done = callyard(target.parent, "run", "where.py", "-", "--python", python, rows="[]\n")
    assert done.status == 2
    assert_promised(done.err, PYTHON=python, LIST="greenlet, msgspec")
    assert "its pydantic is 1.10, older than 2.14" in done.err
    assert f"uv pip install --python {python} 'greenlet>=3.5' 'msgspec>=0.23' 'pydantic>=2.14'" in done.err


def test_an_interpreter_that_is_none(tmp_path: Path, target: Path, callyard: RunIn) -> None:
    missing = callyard(target.parent, "run", "where.py", "-", "--python", tmp_path / "nowhere")
    assert missing.status == 2
    assert "no such interpreter: expected a path, a virtual environment, or a command" in missing.err
    other = callyard(target.parent, "run", "where.py", "-", "--python", "/bin/false")
    assert (other.status, "is no Python that runs" in other.err) == (2, True)
    gone = callyard(target.parent, "run", "where.py", "-", VIRTUAL_ENV=str(tmp_path / "gone"))
    assert (gone.status, "there is no bin/python" in gone.err) == (2, True)


def test_another_callyard_installed_there_is_told_and_not_used(tmp_path: Path, target: Path, callyard: RunIn) -> None:
    python = make_environment(tmp_path / "other")
    packages = site_packages(tmp_path / "other")
    (packages / "callyard").mkdir()
    (packages / "callyard/__init__.py").write_text("raise ImportError('the wrong one')\n")
    (packages / "callyard-0.0.1.dist-info").mkdir()
    (packages / "callyard-0.0.1.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: callyard\nVersion: 0.0.1\n"
    )
    done = callyard(target.parent, "run", "where.py", "-", "--python", python, rows="[]\n")
    assert done.results[0].get("ok"), done.err
    assert "not its callyard 0.0.1, but this one" in done.err


SPAWNS = """
import multiprocessing

from callyard import function


def in_child(x: int) -> int:
    return x + 1


@function
def spawn(x: int) -> int:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(in_child, (x,))
"""


def test_processes_that_functions_spawn_find_callyard_there(
    tmp_path: Path, callyard: RunIn, small_environment: Path
) -> None:
    (tmp_path / "spawns.py").write_text(SPAWNS)
    done = callyard(tmp_path, "run", "spawns.py:spawn", "-", "--python", small_environment, rows="[1]\n")
    assert done.results[0].get("output") == 2, done.err


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can reach."""
    folder = Path(tempfile.mkdtemp(prefix="callyard-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("level", ["bwrap", "landlock"])
def test_the_sandbox_shows_the_chosen_interpreter(level: str, open_folder: Path, callyard: RunIn) -> None:
    trial = try_level(Level(level), WorkerConfig().sandbox_limits)
    if not trial.works:
        pytest.skip(f"{level}: {trial.reason}")
    python = make_environment(open_folder / "environment")
    project = open_folder / "project"
    project.mkdir()
    (project / "where.py").write_text(WHERE)
    done = callyard(project, "run", "where.py", "-", "--python", python, "--sandbox", level, rows="[]\n")
    value = done.results[0].get("output")
    assert value is not None, (done.results, done.err)
    assert value["prefix"] == str(open_folder / "environment")


def test_the_list_of_files_shows_the_bundle_and_what_it_imports(copy_project: CopyProject, callyard: RunIn) -> None:
    project = copy_project("broken")
    done = callyard(project, "list", "--files", "jobs.py", "--include", "plugins/*.py")
    assert done.status == 0, done.err
    sizes = {line.split()[1]: line.split()[0] for line in done.out.splitlines()[:2]}
    assert sizes == {name: str((project / name).stat().st_size) for name in ("jobs.py", "plugins/reverse.py")}
    assert f"neither here nor installed for {sys.executable}: nowhere_under_test" in done.out
    import msgspec

    listed = msgspec.json.decode(callyard(project, "list", "--files", "--json", "jobs.py").out)
    assert listed["missing"] == ["nowhere_under_test"]
    assert [file["path"] for file in listed["files"]] == ["jobs.py"]
    numbers = copy_project("extension")
    assert "imports numpy==" in callyard(numbers, "list", "--files", "stats.py").out
