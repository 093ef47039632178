"""The settings file: where it is found, and what is said of what does not fit, with its line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from callyard.errors import UsageError
from callyard.worker import settings_file
from callyard.worker.settings_file import SettingsFile, find_settings_file, folders_of

pytestmark = pytest.mark.requirement("X73")
OURS = "[worker]\nspare_executors = 2\n"
PYPROJECT = '[project]\nname = "shop"\n[tool.callyard.worker]\nstart_timeout = "2m"\n[tool.callyard.pools.gpu]\n'


def put(path: Path, text: str = OURS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A file two folders below its project's own."""
    put(tmp_path / "shop" / "setup.cfg", "")
    put(tmp_path / "shop" / "src" / "callyard.txt", "")
    return put(tmp_path / "shop" / "src" / "jobs" / "score.py", "")


def test_it_is_found_beside_the_target_or_above_it_up_to_the_project(target: Path, tmp_path: Path) -> None:
    project = tmp_path / "shop"
    put(tmp_path / "callyard.toml")
    assert folders_of(target) == [target.parent, project / "src", project]
    assert find_settings_file(target) is None, "above the project nothing is looked for"
    in_project = put(project / "pyproject.toml", PYPROJECT)
    assert find_settings_file(target) == in_project
    nearer = put(project / "src" / "callyard.toml")
    assert find_settings_file(f"{target}:price") == nearer
    assert find_settings_file(target.parent) == nearer, "a folder is a target too"
    nearest = put(target.parent / "callyard.toml")
    assert find_settings_file(target) == nearest


def test_without_a_target_it_is_looked_for_from_here(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(target.parents[2] / "callyard.toml")
    monkeypatch.chdir(target.parents[2])
    assert find_settings_file(None) == Path("callyard.toml"), "and is named as one would from here"
    assert find_settings_file("shop.jobs:score") == Path("callyard.toml"), "a module starts here as well"


def test_without_a_project_only_the_folder_counts(tmp_path: Path) -> None:
    target = put(tmp_path / "a" / "b" / "f.py", "")
    put(tmp_path / "a" / "callyard.toml")
    assert folders_of(target) == [target.parent]
    assert find_settings_file(target) is None


def test_two_in_one_folder_are_refused(target: Path) -> None:
    put(target.parent / "callyard.toml")
    put(target.parent / "pyproject.toml", PYPROJECT)
    with pytest.raises(UsageError, match=r"both have settings: keep one of them"):
        find_settings_file(target)


def test_a_pyproject_without_our_table_is_none(target: Path) -> None:
    path = put(target.parent / "pyproject.toml", "[tool.other]\n")
    assert find_settings_file(target) is None
    with pytest.raises(UsageError, match=r"pyproject\.toml has no table \[tool\.callyard\]$"):
        SettingsFile.load(path)


def test_both_say_the_same_under_the_same_names(tmp_path: Path) -> None:
    tables = (
        '[{0}worker]\nstart_timeout = "2m"\nmax_restarts = 3\n[{0}pools.gpu]\nexecutors = 2\n[{0}io.files]\nx = "x"\n'
    )
    ours = SettingsFile.load(put(tmp_path / "callyard.toml", tables.format("")))
    theirs = SettingsFile.load(put(tmp_path / "pyproject.toml", "[project]\n" + tables.format("tool.callyard.")))
    assert ours.worker == theirs.worker == {"start_timeout_ms": 120_000, "max_restarts": 3}
    assert ours.pools == theirs.pools
    assert ours.pools["gpu"].executors == 2
    assert ours.io is not None
    assert ours.io == theirs.io
    assert ours.io.files["x"].path == tmp_path / "x"
    assert ours.origin("worker", "start_timeout_ms") == f"{ours.path}:2"
    assert theirs.origin("worker", "start_timeout_ms") == f"{theirs.path}:3"


def test_relative_paths_start_from_the_file(tmp_path: Path) -> None:
    file = SettingsFile.load(put(tmp_path / "callyard.toml", '[worker]\nexecutor_python = ".venv/bin/python"\n'))
    assert file.worker["executor_python"] == str(tmp_path / ".venv/bin/python")
    file = SettingsFile.load(put(tmp_path / "callyard.toml", '[worker]\nexecutor_python = "python3.12"\n'))
    assert file.worker["executor_python"] == "python3.12", "a command is no path"


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("[worker]\n\nexecuter_count = 2\n", 3, "no setting 'worker.executer_count'; did you mean executor_count?"),
        ("[worker]\nexecutor_count = 2000\n", 2, "executor_count must be from 0 to 1024, got 2000"),
        ("[worker]\nstart_timeout = '9ms'\n", 2, "start_timeout must be from 100ms to 24h, got 9ms"),
        ("[worker]\nstart_timeout = 500\nstart_timeout_ms = 5\n", 3, "is there twice"),
        ("[worker]\nbatch_rows = 64\nbatch_max_rows = 5\n", 1, "need batch_rows <= batch_max_rows"),
        ("[worker]\npools = {}\n", 2, "no setting 'worker.pools'"),
        ("[worker]\nsandbox = 'magic'\n", 2, "sandbox must be one of auto, bwrap, landlock, off"),
        ("max_restarts = 5\n", 1, "it is a setting of the table [worker]"),
        ("[wroker]\n", 1, "no setting 'wroker'; did you mean worker?"),
        ("worker = 3\n", 1, "worker must be a table: [worker]"),
        ("[pools]\ngpu = 2\n", 2, "pools.gpu must be a table"),
        ("[pools.gpu]\nexecutors = 0\n", 2, "executors must be from 1 to 1024, got 0"),
        ("[pools.gpu]\nexecutor = 1\n", 2, "no setting 'pools.gpu.executor'; did you mean executors"),
        ("[pools.gpu]\nenvironment = 'TOKEN=sesame'\n", 2, "environment must be a table, got str"),
        ("[pools.gpu]\nenvironment = { A = 1 }\n", 2, "must be names and texts, got 'A': int"),
        ("[pools.'a b']\nexecutors = 1\n", 1, "pool must be 1 to 64 letters"),
        ("[pools.default]\nexecutors = 1\n", 1, "pool 'default' is the worker's own"),
        ("[[worker]]\nmax_restarts = 1\n", 1, "worker must be a table: [worker]"),
        ("[io]\nspeed = 1\n", 1, "io.speed"),
        ("[worker\n", None, "is no TOML"),
    ],
)
@pytest.mark.parametrize("in_pyproject", [False, True])
def test_what_does_not_fit(tmp_path: Path, text: str, line: int | None, says: str, in_pyproject: bool) -> None:
    path = tmp_path / ("pyproject.toml" if in_pyproject else "callyard.toml")
    if in_pyproject:
        if text.startswith("["):
            text = re.sub(r"^\[+", r"\g<0>tool.callyard.", text)
        else:
            text, line = f"[tool.callyard]\n{text}", 2
    put(path, text)
    with pytest.raises(UsageError) as refused:
        SettingsFile.load(path)
    assert str(refused.value).startswith(f"{path}:{line}: " if line else str(path))
    assert says in str(refused.value)


def test_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*none\.toml: No such file"):
        SettingsFile.load(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b"\xe9 = 1")
    with pytest.raises(UsageError, match="is no TOML"):
        SettingsFile.load(tmp_path / "latin.toml")
    monkeypatch.setattr(settings_file, "FILE_BYTES_MAX", 10)
    with pytest.raises(UsageError, match="has more than 10 bytes"):
        SettingsFile.load(put(tmp_path / "callyard.toml"))


def test_a_mark_of_the_editor_before_the_text_is_nothing(tmp_path: Path) -> None:
    path = put(tmp_path / "callyard.toml", f"\N{ZERO WIDTH NO-BREAK SPACE}{OURS}")
    assert SettingsFile.load(path).worker == {"spare_executors": 2}


def test_what_is_called_so_and_is_none_is_told_of(target: Path) -> None:
    link = target.parent / "callyard.toml"
    link.symlink_to("nowhere")
    assert find_settings_file(target) == link
    with pytest.raises(UsageError, match=r"cannot read .*: No such file"):
        SettingsFile.load(link)
    link.unlink()
    for text in ("[tool]\ncallyard = 3\n", "\n[[tool.callyard]]\n"):
        put(target.parent / "pyproject.toml", text)
        with pytest.raises(UsageError, match=r"pyproject\.toml:2: tool\.callyard must be a table"):
            find_settings_file(target)


def test_an_empty_name_is_no_file() -> None:
    with pytest.raises(UsageError, match="expected a settings file"):
        SettingsFile.load(Path())


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    file = SettingsFile.load(put(tmp_path / "callyard.toml", ""))
    assert (file.worker, file.pools, file.io) == ({}, {}, None)
    assert SettingsFile.load(Path("/dev/null")).worker == {}
