"""A confined executor from its start to its end: the code it gets, how it ends, what it leaves (nothing)."""

from __future__ import annotations

import asyncio
import glob
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from callyard import CallError, ErrorKind, UsageError, Worker
from callyard.functions.registry import Registry
from callyard.worker.config import WorkerConfig
from callyard.worker.sandbox.cgroups import find_home
from callyard.worker.sandbox.plan import TMP_PREFIX
from callyard.worker.sandbox.spawner import open_spawner
from callyard.worker.sandbox.view import python_paths
from callyard.worker.spawner import ChildProcess
from tests.e2e.processes import WAIT_S, children_of, is_alive, kill, wait_gone, wait_until

SOURCE = Path(__file__).parent / "functions_file.py"
MIB = 1 << 20


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "functions_file.py"
    path.write_text(SOURCE.read_text())
    return path


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No folder and no control group of this process stays behind."""
    yield
    pattern = f"{TMP_PREFIX}{os.getpid()}-*"
    wait_until(lambda: not glob.glob(os.path.join(tempfile.gettempdir(), pattern)), "tmp folders removed")
    wait_until(lambda: not glob.glob(f"/sys/fs/cgroup/**/callyard-{os.getpid()}-*", recursive=True), "groups removed")


def quiet(*_: object) -> None:
    pass


def sandboxed(target: Path | Registry, level: str, **settings: Any) -> Worker:
    settings = {"executors": 1, "spare_executors": 0, "on_output": quiet, "sandbox": level, **settings}
    return Worker(target, **settings)


def on_the_way(folder: str) -> set[str]:
    """Names in `folder` that lead to the interpreter: a project may lie below /tmp."""
    return {Path(path).relative_to(folder).parts[0] for path in python_paths() if Path(path).is_relative_to(folder)}


def descendants(pid: int) -> list[int]:
    found = children_of(pid)
    return found + [other for child in found for other in descendants(child)]


SECRET = "tenant-a-has-a-password"


@pytest.mark.requirement("X92")
@pytest.mark.parametrize("spares", [0, 1])
async def test_no_tenant_finds_another_s_arguments(level: str, spares: int, target: Path) -> None:
    async with sandboxed(target, level, spare_executors=spares) as worker:
        kept = [await worker.call("keep", [{"password": SECRET}], tenant="a") for _ in range(2)]
        assert kept == [1, 2], "a tenant's own executor goes on"
        assert await worker.call("search", [["tenant-a-", "has"]], tenant="a") == [SECRET]
        first = worker.slots()[0].pid
        assert await worker.call("search", [["tenant-a-", "has"]], tenant="b") == []
        assert worker.slots()[0].pid != first
        assert await worker.call("keep", [{}], tenant="a") == 1, "nor does it come back to the first"


@pytest.mark.requirement("X92")
async def test_in_process_mode_tenants_share_memory(target: Path) -> None:
    """What the test above would find."""
    async with sandboxed(target, "off") as worker:
        await worker.call("keep", [{"password": SECRET}], tenant="a")
        assert await worker.call("search", [["tenant-a-", "has"]], tenant="b") == [SECRET]


@pytest.mark.requirement("X92")
async def test_a_tenant_s_many_calls_do_not_keep_another_out(level: str, target: Path) -> None:
    """After a second one of the executors is drained for whoever has none."""
    async with sandboxed(target, level, executor_max_inflight=1) as worker:

        async def flood() -> None:
            async for _ in worker.map("wait", ([0.05] for _ in range(10_000)), tenant="a"):
                pass

        flooding = asyncio.create_task(flood())
        await worker.call("wait", [0.01], tenant="a")
        async with asyncio.timeout(WAIT_S):
            assert await worker.call("wait", [0.01], tenant="b")
        flooding.cancel()
        await asyncio.gather(flooding, return_exceptions=True)


@pytest.mark.requirement("X46")
async def test_code_comes_over_the_link(level: str, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    (target.parent / "ballast.bin").write_bytes(os.urandom(3 * MIB))  # several parts
    registry = Registry.for_target(target, include=["ballast.bin"])
    async with sandboxed(registry, level) as worker:
        found = await worker.call("who")
        assert found["ballast"] == 3 * MIB
        assert found["tmp"] == sorted({"bundle", *(on_the_way(found["folder"]) if level == "bwrap" else ())})
        assert found["file"] == f"{found['folder']}/bundle/functions_file.py"
        assert "API_KEY" not in found["variables"]
        if os.getuid() == 0 and level == "bwrap":
            assert found["uid"] not in (0, os.getuid())
        assert await worker.call("wait_async", [3]) == 3
        assert worker.sandbox.level == level


@pytest.mark.requirement("X46")
async def test_a_bundle_without_room_is_an_error_that_names_the_setting(level: str, target: Path) -> None:
    (target.parent / "ballast.bin").write_bytes(os.urandom(3 * MIB))
    registry = Registry.for_target(target, include=["ballast.bin"])
    with pytest.raises(UsageError, match=r"no room for the bundle.*sandbox_tmp_bytes"):
        async with sandboxed(registry, level, sandbox_tmp_bytes=MIB):
            pass


@pytest.mark.requirement("X46")
async def test_ordinary_functions_go_on_working(level: str, target: Path) -> None:
    async with sandboxed(target, level) as worker:
        assert await worker.call("use_files") == "text"
        assert await worker.call("use_libraries") == ["6", "2", '{"a": "1.10"}', "UTC", "MainThread", "random"]


@pytest.mark.requirement("X46")
@pytest.mark.requirement("X45")
@pytest.mark.parametrize(
    ("function", "argument", "told"),
    [("leave", 7, "exited with status 7"), ("kill_self", signal.SIGSEGV, "was killed by SIGSEGV")],
)
async def test_how_it_ended_is_told(level: str, target: Path, function: str, argument: int, told: str) -> None:
    async with sandboxed(target, level, executors=2) as worker:
        with pytest.raises(CallError, match=told):
            await worker.call(function, [int(argument)], max_attempts=1)
        assert await worker.call("wait_async", [1]) == 1


@pytest.mark.requirement("X92")
@pytest.mark.requirement("X46")
async def test_a_new_executor_finds_nothing_of_the_one_before(level: str, target: Path) -> None:
    async with sandboxed(target, level) as worker:
        await worker.call("remember", ["the tenant's own"])
        assert await worker.call("recall") == ["left", "left_behind"]
        (before,) = worker.slots()
        kill(before.pid, signal.SIGKILL)
        async with asyncio.timeout(WAIT_S):
            while worker.slots()[0].executor_id in ("", before.executor_id):
                await asyncio.sleep(0.01)
        assert await worker.call("recall") == []


@pytest.mark.requirement("X46")
@pytest.mark.requirement("X44")
async def test_lost_means_that_every_process_of_it_is_dead(level: str, target: Path) -> None:
    async with sandboxed(target, level, sandbox_subprocesses=True) as worker:
        await worker.call("start_program", [600.0])
        (slot,) = worker.slots()
        inside = [slot.pid, *descendants(slot.pid)]
        assert len(inside) >= (4 if level == "bwrap" else 2)
        process = next(iter(worker._pool._executors.values())).process  # type: ignore[union-attr]
        assert isinstance(process, ChildProcess)
        process.kill()
        await process.wait_exited()
        if level == "bwrap" or find_home(WorkerConfig().sandbox_limits).parents:
            assert [pid for pid in inside if is_alive(pid)] == []
        else:
            for pid in inside[1:]:
                kill(pid, signal.SIGKILL)


@pytest.mark.requirement("X44")
@pytest.mark.requirement("X46")
def test_kill_9_of_the_worker_ends_everything(level: str, target: Path) -> None:
    program = f"""
import asyncio, sys
from callyard import Worker
async def main():
    async with Worker({str(target)!r}, executors=2, sandbox={level!r}) as worker:
        calls = [asyncio.ensure_future(worker.call("wait", [600.0])) for _ in range(4)]
        while len(worker.running()) < 4:
            await asyncio.sleep(0.01)
        print("ready", flush=True)
        await asyncio.gather(*calls)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
        inside = descendants(worker.pid)
        assert len(inside) >= (6 if level == "bwrap" else 2)
        worker.kill()
    wait_gone(inside)
    # What it left on disk goes with the next worker's start.
    left = glob.glob(os.path.join(tempfile.gettempdir(), f"{TMP_PREFIX}{worker.pid}-*")) + glob.glob(
        f"/sys/fs/cgroup/*/**/callyard-{worker.pid}-*"
    )
    asyncio.run(start_and_stop(target, level))
    assert [path for path in left if os.path.exists(path)] == []


async def start_and_stop(target: Path, level: str) -> None:
    async with sandboxed(target, level):
        pass


@pytest.mark.requirement("X46")
async def test_programs_run_where_they_are_allowed(level: str, target: Path) -> None:
    async with sandboxed(target, level, sandbox_subprocesses=True) as worker:
        assert await worker.call("run_program") == "ran\n"
    async with sandboxed(target, level) as worker:
        with pytest.raises(CallError, match="PermissionError"):
            await worker.call("run_program")


@pytest.mark.requirement("X46")
async def test_programs_share_one_memory_limit(level: str, target: Path) -> None:
    limits = WorkerConfig(sandbox_memory_bytes=256 * MIB, sandbox_tmp_bytes=16 * MIB)
    if "memory" not in find_home(limits.sandbox_limits).parents:
        pytest.skip("no control group for memory can be made here")
    lines: list[str] = []
    async with sandboxed(
        target,
        level,
        sandbox_subprocesses=True,
        sandbox_memory_bytes=256 * MIB,
        sandbox_tmp_bytes=16 * MIB,
        on_output=lambda _, line: lines.append(line),
    ) as worker:
        result = await worker.call_result("fill_memory", [4, 150], max_attempts=1)
    if result.ok:
        assert result.value.count(-signal.SIGKILL) > 0
    else:
        assert result.error is not None
        assert result.error.kind is ErrorKind.CRASHED
        assert any("over the memory limit of its sandbox" in line for line in lines)


@pytest.mark.requirement("X46")
async def test_the_cpu_limit_is_on_the_executors_group(level: str, target: Path) -> None:
    config = WorkerConfig(sandbox=level, sandbox_cpu_percent=50)  # type: ignore[arg-type]
    home = find_home(config.sandbox_limits)
    if "cpu" not in home.parents:
        pytest.skip("no control group for CPU can be made here")
    async with sandboxed(target, level, sandbox_cpu_percent=50) as worker:
        assert "cpu" in {limit.name for limit in worker.sandbox.limits}
        (slot,) = worker.slots()
        (group,) = home.parents["cpu"].glob(f"callyard-{os.getpid()}-*")
        members = [int(pid) for pid in (group / "cgroup.procs").read_text().split()]
        assert set(members) <= {slot.pid, *descendants(slot.pid)}
        assert members
        quota = (group / ("cpu.max" if home.version == 2 else "cpu.cfs_quota_us")).read_text()
        assert quota.split()[0] == "50000"


@pytest.mark.requirement("X46")
async def test_off_is_a_plain_process(target: Path) -> None:
    spawner, sandbox = await open_spawner(WorkerConfig())
    assert not spawner.sends_code
    assert sandbox.level == "off"
    async with sandboxed(target, "off") as worker:
        assert (await worker.call("who"))["uid"] == os.getuid()
