"""Settings of a command: options, variables and the file beside the target, in force and as they are printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.cli.shell import run

pytestmark = pytest.mark.requirement("X73")
FUNCTIONS = """\
import os


def environment(name: str) -> str:
    return os.environ.get(name, "")


def add(a: int, b: int) -> int:
    return a + b
"""
POOLED = """\
import os
from callyard import function


@function(pool="gpu")
def device() -> str:
    return os.environ["DEVICE"]
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text('[tool.callyard.pools.gpu]\nenvironment = { DEVICE = "gpu{slot}" }\n')
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "f.py").write_text(FUNCTIONS)
    (tmp_path / "src" / "pooled.py").write_text(POOLED)
    return tmp_path


def test_the_file_of_the_project_is_in_force(project: Path) -> None:
    done = run("call", "src/pooled.py:device", cwd=project)
    assert (done.status, done.out) == (0, '"gpu0"\n')
    assert done.err == "settings of pyproject.toml\n", "what was found is told"
    other = project / "other.toml"
    other.write_text('[pools.gpu]\nenvironment = { DEVICE = "other" }\n')
    named = run("call", "src/pooled.py:device", "--config", other, cwd=project)
    assert (named.out, named.err) == ('"other"\n', "")
    none = run("call", "src/pooled.py:device", "--config", "/dev/null", cwd=project)
    assert none.status == 2
    assert "runs in pool 'gpu', which is not configured" in none.err


def test_a_wrong_file_stops_the_command_with_its_line(project: Path) -> None:
    (project / "src" / "callyard.toml").write_text("[worker]\n# how often\nmax_restart = 3\n")
    done = run("call", "src/f.py:add", "a=1", "b=2", cwd=project)
    assert (done.status, done.out) == (2, "")
    assert done.err == ("error: src/callyard.toml:3: no setting 'worker.max_restart'; did you mean max_restarts?\n")


def test_set_reaches_the_worker(project: Path) -> None:
    slow = project / "src" / "slow.py"
    slow.write_text("import time\ntime.sleep(60)\n\n\ndef f() -> int:\n    return 1\n")
    done = run("call", slow, "--set", "start_timeout=200ms")
    assert done.status == 2
    assert "took longer than start_timeout_ms=200" in done.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--set", "max_restarts"], "--set expects NAME=VALUE"),
        (["--set", "max_restart=3"], "--set: no setting 'max_restart'; did you mean max_restarts?"),
        (["--set", "max_restarts=-1"], "--set max_restarts must be from 0 to 1000000, got -1"),
        (["--set", "pools=x"], "--set pools is a table, which only a file can give"),
        (["--config", "none.toml"], "cannot read none.toml"),
    ],
)
def test_what_does_not_fit(project: Path, words: list[str], says: str) -> None:
    done = run("call", "src/f.py:add", "a=1", "b=2", *words, cwd=project)
    assert done.status == 2
    assert says in done.err


@pytest.mark.parametrize("command", ["call", "list"])
def test_a_command_that_needs_one_executor_has_one(project: Path, command: str) -> None:
    refused = run(command, "src/f.py", "--set", "executors=2", cwd=project)
    assert refused.status == 2
    assert f"--set executors: that is settled by callyard {command}" in refused.err
    shown = run(command, "src/f.py", "--print-config", cwd=project, env={"CALLYARD_EXECUTOR_COUNT": "2"})
    assert f"executor_count = 1  # callyard {command}\n" in shown.out
    assert f"spare_executors = 0  # callyard {command}\n" in shown.out


def test_a_variable_that_is_nearly_one_is_refused(project: Path) -> None:
    done = run("call", "src/f.py:add", "a=1", "b=2", cwd=project, env={"CALLYARD_MAX_RESTRATS": "3"})
    assert done.status == 2
    assert "CALLYARD_MAX_RESTRATS is no setting; did you mean CALLYARD_MAX_RESTARTS?" in done.err


@pytest.mark.parametrize("command", ["run", "call", "list", "serve", "doctor"])
def test_each_command_prints_its_settings_with_and_without_a_target(project: Path, command: str) -> None:
    given = ["--set", "max_restarts=7", "--print-config"]
    here = run(command, *given, cwd=project)
    assert here.status == 0, here.err
    assert here.out.startswith("# settings file: pyproject.toml\n\n[worker]\n")
    assert "max_restarts = 7  # --set max_restarts\n" in here.out
    assert "[pools.gpu]  # pyproject.toml\n" in here.out
    assert ("[serve]" in here.out) is (command == "serve")
    if command != "doctor":
        target = "src/f.py"
        assert run(command, target, *given, cwd=project).out == here.out


def test_the_server_s_own_settings(project: Path) -> None:
    (project / "pyproject.toml").write_text('[tool.callyard.serve]\ndeadline = "20s"\nbody_max = "2MiB"\n')
    words = ["--drain", "3s", "--set", "serve.body_bytes_max=3MiB", "--set", "serve.http=127.0.0.1:0"]
    done = run("serve", "src/f.py", *words, "--print-config", cwd=project)
    lines = done.out.splitlines()
    assert 'deadline_ms = "20s"  # pyproject.toml:2' in lines
    assert 'body_bytes_max = "3MiB"  # --set body_bytes_max' in lines
    assert lines.count('drain_deadline_ms = "3s"  # --drain') == 2, "the worker drains as long as its server"
    assert 'http = "127.0.0.1:0"  # --set http' in lines
    for words, says in (
        (["--set", "serve.bodymax=1"], "--set: no setting 'bodymax'; did you mean body_max?"),
        (["--http", ":0", "--set", "serve.http=127.0.0.1:0"], "expected an address"),
        (
            ["--drain", "3s", "--set", "serve.drain_deadline=3s"],
            "--set drain_deadline and --drain are the same setting",
        ),
        (["--http", "127.0.0.1:99999"], "expected an address with a port from 0 to 65535, got '127.0.0.1:99999'"),
    ):
        refused = run("serve", "src/f.py", *words, cwd=project)
        assert refused.status == 2
        assert says in refused.err


def test_the_file_of_a_project_is_the_server_s_too(project: Path) -> None:
    (project / "pyproject.toml").write_text('[tool.callyard.serve]\nhttp = "0.0.0.0:1"\nstate_dir = "state"\n')
    done = run("serve", "src/f.py", cwd=project)
    assert done.status == 2
    assert done.err.startswith("error: pyproject.toml: 0.0.0.0:1 can be reached from other machines")
    (project / "pyproject.toml").write_text('[tool.callyard.serve]\nstate_dir = "state"\n')
    keys = run("keys", "list", "src/f.py", cwd=project)
    assert keys.status == 2
    assert str(project / "state") in keys.err, "its keys are where the server keeps them"
    token = run("token", "new", "--tenant", "acme", "--config", "pyproject.toml", cwd=project)
    assert token.status == 2
    assert "not into pyproject.toml" in token.err
