"""Which interpreter executors run."""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path

import pytest

from callyard.errors import UsageError
from callyard.functions.script import Script
from callyard.worker import environments
from callyard.worker.config import WorkerConfig
from callyard.worker.interpreter import AUTO, NEEDS, ask, choose_interpreter, is_own, list_packages, locate_python

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def inactive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)


def make_python(folder: Path) -> Path:
    """Something that can be started where an interpreter would be."""
    path = folder / "bin" / "python"
    path.parent.mkdir(parents=True)
    path.symlink_to("/bin/true")
    return path


def test_what_executors_need_is_what_the_project_depends_on() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    versions = dict(line.partition(";")[0].strip().split(">=") for line in wanted)
    assert {name: versions[name] for name in NEEDS} == NEEDS
    assert set(versions) - set(NEEDS) == {"cloudpickle", "rich", "typer", "uvloop"}, "what executors do without"


def test_the_active_environment_goes_before_the_projects_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = make_python(tmp_path / "project" / ".venv")
    (tmp_path / "project" / "pyproject.toml").touch()
    deep = tmp_path / "project" / "src" / "pkg"
    deep.mkdir(parents=True)
    assert locate_python(AUTO, deep) == (str(own), f"of {tmp_path / 'project/.venv'}")
    assert locate_python(AUTO, deep, trusted=False)[0] == sys.executable
    active = make_python(tmp_path / "active")
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "active"))
    assert locate_python(AUTO, deep) == (str(active), "of $VIRTUAL_ENV")
    assert locate_python(str(tmp_path / "project/.venv"), deep)[0] == str(own)
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "gone"))
    with pytest.raises(UsageError, match=r"where there is no bin/python"):
        locate_python(AUTO, deep)


def test_an_environment_above_the_project_is_not_its_own(tmp_path: Path) -> None:
    make_python(tmp_path / ".venv")
    folder = tmp_path / "project" / "scripts"
    folder.mkdir(parents=True)
    assert locate_python(AUTO, folder)[0] == sys.executable  # no project: only the target's own folder
    (tmp_path / "project" / "pyproject.toml").touch()
    assert locate_python(AUTO, folder)[0] == sys.executable
    assert locate_python(AUTO, tmp_path)[0] == str(tmp_path / ".venv/bin/python")


def test_our_own_is_asked_nothing(tmp_path: Path) -> None:
    for setting in ("", AUTO, sys.executable):
        found = choose_interpreter(setting, tmp_path / "f.py")
        assert (found.path, found.is_own) == (sys.executable, True)
    assert not is_own("/bin/true")


def test_a_way_up_in_its_path_is_walked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = make_python(tmp_path / "env")
    (tmp_path / "far" / "work").mkdir(parents=True)
    (tmp_path / "near").symlink_to("far/work")  # whose .. is far
    (tmp_path / "far" / "env").symlink_to("../env")
    monkeypatch.chdir(tmp_path / "far")
    upwards = str(tmp_path / "near/../env")
    for setting in ("../env", "../env/bin/python", upwards, f"{upwards}/bin/python"):
        assert locate_python(setting, None)[0] == str(python)
    monkeypatch.setenv("VIRTUAL_ENV", upwards)
    assert locate_python(AUTO, None)[0] == str(python)
    monkeypatch.setattr(sys, "executable", f"{upwards}/bin/python")
    assert choose_interpreter("").path == str(python)


def test_commands_look_for_an_environment_and_workers_do_not() -> None:
    assert WorkerConfig().executor_python == ""
    assert WorkerConfig.from_environment({}).executor_python == AUTO
    assert WorkerConfig.from_environment({"CALLYARD_EXECUTOR_PYTHON": "/x"}).executor_python == "/x"
    assert WorkerConfig.from_environment({}, executor_python="/y").executor_python == "/y"
    with pytest.raises(UsageError, match="executor_python must be a text"):
        WorkerConfig(executor_python="a\0b")


def test_what_an_interpreter_has_is_asked_of_it() -> None:
    assert ask(sys.executable)["missing"] == []
    found = list_packages(sys.executable, ["msgspec", "typing_extensions", "nowhere_at_all"])
    assert found["msgspec"][0].startswith("msgspec==")
    assert found["typing_extensions"][0].lower().replace("-", "_").startswith("typing_extensions==")
    assert found["nowhere_at_all"] == []


def test_uv_makes_an_environment_once_and_what_failed_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\nif [ -e {tmp_path}/fails ]; then echo "no such package" >&2; exit 1; fi\n'
        'if [ "$1" = venv ]; then for last; do :; done; mkdir -p "$last/bin"; ln -s /bin/true "$last/bin/python"; fi\n'
    )
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", f"{uv.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    script = Script(("b", "a>=1"), ">=3.12")
    (tmp_path / "fails").touch()
    with pytest.raises(UsageError, match=r"uv could not make an environment for f\.py:\n    no such package"):
        environments.prepare_environment(script, "f.py")
    (tmp_path / "fails").unlink()
    log.unlink()
    python, origin = environments.prepare_environment(script, "f.py")
    assert origin == "with the packages that f.py names"
    again, _ = environments.prepare_environment(Script(("a>=1", "b"), ">=3.12"), "g.py")
    assert again == python, "the order of the list does not matter"
    made, installed = log.read_text().splitlines()
    assert made.startswith("venv --quiet --python >=3.12 ")
    assert installed.startswith(f"pip install --quiet --python {python} -- b a>=1 greenlet>=")
    other, _ = environments.prepare_environment(Script(("a>=2",), ">=3.12"), "f.py")
    assert other != python
