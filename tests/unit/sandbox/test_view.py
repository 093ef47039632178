"""What a confined executor sees, and who it is."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import callyard
from callyard.errors import UsageError
from callyard.executor.confine import Confinement, parse_confinement
from callyard.worker.sandbox import view
from callyard.worker.sandbox.bwrap import build_arguments
from callyard.worker.sandbox.uids import FIRST_UID, UIDS, UidClaim
from callyard.worker.sandbox.view import build_environment, closed_folder, python_paths


def shows(paths: list[str], place: str) -> bool:
    return any(Path(place).is_relative_to(path) for path in paths)


@pytest.mark.requirement("X46")
def test_the_interpreter_and_its_packages_are_shown_and_nothing_else() -> None:
    paths = python_paths()
    for needed in (sys.executable, os.__file__, callyard.__file__ or "", pytest.__file__):
        assert shows(paths, needed), needed
    for hidden in (os.getcwd(), os.path.expanduser("~"), __file__, "/etc", "/var", "/tmp"):
        assert not shows(paths, hidden), hidden


@pytest.mark.requirement("X46")
def test_an_interpreter_that_would_show_the_home_folder_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(UsageError, match="holds the home folder"):
        python_paths()


@pytest.mark.requirement("X46")
def test_the_environment_is_made_of_named_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"API_KEY": "secret", "LC_ALL": "C", "TZ": "UTC", "PYTHONPATH": "/x", "LD_PRELOAD": "x"}.items():
        monkeypatch.setenv(name, value)
    found = build_environment("/tmp", {"GIVEN": "1"})
    assert {"API_KEY", "PYTHONPATH", "LD_PRELOAD"}.isdisjoint(found)
    assert (found["LC_ALL"], found["TZ"], found["GIVEN"], found["HOME"]) == ("C", "UTC", "1", "/tmp")


@pytest.mark.requirement("X46")
def test_bytecode_of_other_projects_is_not_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path))
    for place in (sys.prefix, "/somebody/else"):
        (tmp_path / place.lstrip("/")).mkdir(parents=True)
    assert view.bytecode_paths() == [str(tmp_path / sys.prefix.lstrip("/"))]
    assert build_environment("/tmp", {})["PYTHONPYCACHEPREFIX"] == str(tmp_path)


def test_a_folder_closed_to_others_is_found(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "a" / "b").mkdir(parents=True)
    above = closed_folder([str(tmp_path / "a" / "b")])
    (tmp_path / "a").chmod(0o700)
    assert closed_folder([str(tmp_path / "a" / "b")]) == (above or str(tmp_path / "a"))
    assert closed_folder(["/usr/bin"]) == ""


@pytest.mark.requirement("X46")
def test_bubblewraps_command_line(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    as_root = build_arguments("bwrap", as_root=True, tmp_bytes=1_000, visible=[str(tmp_path)], info_fd=9)
    as_user = build_arguments("bwrap", as_root=False, tmp_bytes=1_000, visible=[str(tmp_path)])
    for words in (as_root, as_user):
        text = " ".join(words)
        for part in (
            "--unshare-net",
            "--unshare-pid",
            "--unshare-ipc",
            "--die-with-parent",
            "--size 1000 --tmpfs /tmp",
        ):
            assert part in text
        assert f"--ro-bind {tmp_path} {tmp_path}" in text
        assert text.index("--tmpfs /tmp") < text.index(f"--ro-bind {tmp_path}"), "else the mount would hide it"
        assert "--remount-ro /" in text
        assert "--bind " not in text.replace("--ro-bind ", "")
        assert words[-1] == "--"
    assert "--unshare-user" not in as_root, "its root would be root outside"
    assert "--cap-add" not in as_user
    assert "--unshare-user --disable-userns" in " ".join(as_user)
    assert as_root[as_root.index("--info-fd") + 1] == "9"


@pytest.mark.requirement("X92")
def test_no_two_executors_have_one_user() -> None:
    claims = [UidClaim() for _ in range(5)]
    assert len({claim.uid for claim in claims}) == 5
    assert all(FIRST_UID <= claim.uid < FIRST_UID + UIDS for claim in claims)
    for claim in claims:
        claim.release()
    again = UidClaim()
    assert again.uid in {claim.uid for claim in claims}, "given back"
    again.release()


def test_a_confinement_that_cannot_be_read_is_refused() -> None:
    assert parse_confinement('{"level":"bwrap","tmp":"/tmp"}') == Confinement(level="bwrap", tmp="/tmp")
    for text in ("", "{}", '{"level":1,"tmp":"/"}', "[]"):
        with pytest.raises(UsageError, match="--confine"):
            parse_confinement(text)
