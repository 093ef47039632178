"""Control groups on a made-up file system: version 2, version 1, and none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from callyard.worker.sandbox.cgroups import Cgroup, CgroupHome, find_home
from callyard.worker.sandbox.levels import Limits

LIMITS = Limits(
    memory_bytes=1 << 30, tmp_bytes=1 << 20, processes=64, open_files=0, cpu_percent=150, subprocesses=False
)
V2_FILES = ("memory.max", "memory.swap.max", "memory.oom.group", "pids.max", "cpu.max", "cgroup.procs")
V1_FILES = {
    "memory": ("memory.limit_in_bytes",),
    "pids": ("pids.max",),
    "cpu": ("cpu.cfs_quota_us", "cpu.cfs_period_us"),
}


class FakeKernel:
    """A folder in which making a group also makes its files, as a cgroup file system does."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.mountinfo, self.membership = root / "mountinfo", root / "membership"
        self.made: list[Path] = []

    def write(self, mounts: list[str], groups: list[str]) -> None:
        self.mountinfo.write_text("\n".join(mounts))
        self.membership.write_text("\n".join(groups))

    def mkdir(self, path: Path) -> None:
        path.mkdir()
        self.made.append(path)
        controller = path.relative_to(self.root).parts[0]
        for name in (*V1_FILES.get(controller, V2_FILES), "cgroup.procs"):
            (path / name).write_text("")

    def find(self) -> CgroupHome:
        return find_home(LIMITS, mountinfo=self.mountinfo, membership=self.membership, mkdir=self.mkdir)


def mount(path: Path, kind: str, options: str, mounted: str = "/") -> str:
    return f"30 23 0:26 {mounted} {path} rw,nosuid shared:4 - {kind} {kind} {options}"


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    return FakeKernel(tmp_path)


def make_v2(kernel: FakeKernel, enabled: dict[str, str]) -> Path:
    root = kernel.root / "unified"
    for name, controllers in enabled.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name / "cgroup.subtree_control").write_text(controllers)
    kernel.write([mount(root, "cgroup2", "rw")], ["0::/slice/app"])
    return root


@pytest.mark.requirement("X46")
def test_version_2_below_the_own_group(kernel: FakeKernel) -> None:
    root = make_v2(kernel, {"slice": "", "slice/app": ""})
    control = root / "slice/app/cgroup.subtree_control"
    control.write_text("cpu memory pids")
    home = kernel.find()
    assert home.version == 2
    # The made-up file keeps what was written last; a kernel keeps all.
    assert set(home.parents.values()) == {root / "slice/app"}


@pytest.mark.requirement("X46")
def test_version_2_beside_the_own_group(kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual case: a group with processes of its own passes no controller on."""
    root = make_v2(kernel, {"slice": "", "slice/app": ""})
    monkeypatch.setattr("callyard.worker.sandbox.cgroups._enabled", enabled_at(root / "slice"))
    home = kernel.find()
    assert (home.version, dict(home.parents)) == (2, dict.fromkeys(("memory", "pids", "cpu"), root / "slice"))
    group = home.make(LIMITS)
    assert len(group.fds) == 1, "one folder for all"
    (folder,) = set(group.folders.values())
    assert folder.name.startswith(f"callyard-{os.getpid()}-")
    assert {name: (folder / name).read_text() for name in V2_FILES if (folder / name).read_text()} == {
        "memory.max": str((1 << 30) + (1 << 20)),
        "memory.swap.max": "0",
        "memory.oom.group": "1",
        "pids.max": "64",
        "cpu.max": "150000 100000",
    }
    group.close()
    assert group.fds == []


def enabled_at(place: Path) -> object:
    return lambda parent: ["memory", "pids", "cpu"] if parent == place else []


@pytest.mark.requirement("X46")
def test_version_1_controller_by_controller(kernel: FakeKernel) -> None:
    for name in ("memory/jobs", "pids", "cpu"):
        (kernel.root / name).mkdir(parents=True)
    unified = kernel.root / "unified"
    unified.mkdir()
    (unified / "cgroup.subtree_control").write_text("")
    kernel.write(
        [
            mount(unified, "cgroup2", "rw"),
            mount(kernel.root / "memory", "cgroup", "rw,memory"),
            mount(kernel.root / "pids", "cgroup", "rw,pids"),
            mount(kernel.root / "cpu", "cgroup", "rw,cpu,cpuacct"),
        ],
        ["4:memory:/jobs", "3:pids:/", "2:cpu,cpuacct:/", "0::/"],
    )
    home = kernel.find()
    assert home.version == 1
    assert dict(home.parents) == {
        "memory": kernel.root / "memory/jobs",
        "pids": kernel.root / "pids",
        "cpu": kernel.root / "cpu",
    }
    group = home.make(LIMITS)
    assert len(group.fds) == 3
    assert (group.folders["memory"] / "memory.limit_in_bytes").read_text() == str((1 << 30) + (1 << 20))
    assert (group.folders["cpu"] / "cpu.cfs_quota_us").read_text() == "150000"
    group.close()


@pytest.mark.requirement("X46")
def test_a_container_sees_its_own_group_as_the_root(kernel: FakeKernel) -> None:
    (kernel.root / "pids").mkdir()
    kernel.write([mount(kernel.root / "pids", "cgroup", "rw,pids", "/box/7")], ["3:pids:/box/7"])
    assert dict(kernel.find().parents) == {"pids": kernel.root / "pids"}


@pytest.mark.requirement("X46")
def test_what_may_not_be_made_is_left_out(kernel: FakeKernel) -> None:
    for name in ("memory", "pids"):
        (kernel.root / name).mkdir()
    kernel.write(
        [mount(kernel.root / name, "cgroup", f"rw,{name}") for name in ("memory", "pids")],
        ["4:memory:/", "3:pids:/"],
    )

    def refuse_memory(path: Path) -> None:
        if path.parent.name == "memory":
            raise PermissionError(13, "Permission denied")
        kernel.mkdir(path)

    home = find_home(LIMITS, mountinfo=kernel.mountinfo, membership=kernel.membership, mkdir=refuse_memory)
    assert list(home.parents) == ["pids"]
    missing = kernel.root / "nothing"
    assert not find_home(LIMITS, mountinfo=missing, membership=missing).parents


@pytest.mark.requirement("X46")
def test_a_group_half_made_is_taken_away(kernel: FakeKernel) -> None:
    for name in ("memory", "pids"):
        (kernel.root / name).mkdir()

    def fail_second(path: Path) -> None:
        if path.parent.name == "pids":
            raise OSError(28, "No space left on device")
        path.mkdir()

    parents = {name: kernel.root / name for name in ("memory", "pids")}
    with pytest.raises(OSError, match="No space"):
        CgroupHome(version=1, parents=parents, mkdir=fail_second).make(LIMITS)
    assert list((kernel.root / "memory").iterdir()) == []


def test_groups_of_workers_that_were_killed_are_removed(kernel: FakeKernel) -> None:
    pids = kernel.root / "pids"
    (pids / "callyard-4194999-1").mkdir(parents=True)  # above the largest process number
    (pids / f"callyard-{os.getpid()}-1").mkdir()
    (pids / "somebody-else").mkdir()
    kernel.write([mount(pids, "cgroup", "rw,pids")], ["3:pids:/"])
    kernel.find()
    kept = {path.name for path in pids.iterdir() if path not in kernel.made}
    assert kept == {f"callyard-{os.getpid()}-1", "somebody-else"}


@pytest.mark.parametrize(
    ("name", "text"), [("memory.events", "low 0\noom_kill 2\n"), ("memory.oom_control", "oom_kill 1\n")]
)
def test_out_of_memory_is_seen(tmp_path: Path, name: str, text: str) -> None:
    group = Cgroup(folders={"memory": tmp_path})
    assert not group.ran_out_of_memory()
    (tmp_path / name).write_text(text)
    assert group.ran_out_of_memory()
    (tmp_path / name).write_text("oom_kill 0\n")
    assert not group.ran_out_of_memory()
