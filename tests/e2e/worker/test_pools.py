"""Named pools with real executors: their own size, environment and limits; calls from pool to pool."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from callyard.errors import CallError, ErrorKind, UsageError
from callyard.worker.config import PoolConfig
from callyard.worker.loading import Registry
from callyard.worker.worker import Worker
from tests.e2e.processes import WAIT_S, is_alive, kill

FUNCTIONS = """
import os
import time
from pathlib import Path

from callyard import call, function, sleep


@function
def near() -> int:
    return os.getpid()


@function(pool="gpu")
def device() -> tuple[int, str]:
    return os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES", "")


@function(pool="gpu")
def device_of_two(folder: str) -> str:
    Path(folder, str(os.getpid())).touch()
    while len(os.listdir(folder)) < 2:
        sleep(0.01)
    return os.environ["CUDA_VISIBLE_DEVICES"]


@function(pool="gpu")
def hold(path: str) -> int:
    Path(path).touch()
    while Path(path).exists():
        sleep(0.01)
    return os.getpid()


@function
def hold_near(path: str) -> int:
    Path(path).touch()
    while Path(path).exists():
        sleep(0.01)
    return os.getpid()


@function
def ping(depth: int) -> list[int]:
    return [os.getpid(), *(call(pong, depth=depth - 1) if depth else [])]


@function(pool="gpu")
def pong(depth: int) -> list[int]:
    return [os.getpid(), *(call(ping, depth=depth - 1) if depth else [])]


@function
def ping_later(depth: int) -> int:
    sleep(0.3)
    return call(pong_later, depth=depth - 1) if depth else 0


@function(pool="gpu")
def pong_later(depth: int) -> int:
    sleep(0.3)
    return call(ping_later, depth=depth - 1) if depth else 0


@function(budget_ms=100)
def spins() -> None:
    while True:
        pass
"""


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "pools.py"
    path.write_text(FUNCTIONS)
    return path


def quiet(*_: object) -> None:
    pass


def start(target: Path | Registry, **settings: Any) -> Worker:
    settings.setdefault("pools", {"gpu": PoolConfig(environment={"CUDA_VISIBLE_DEVICES": "{slot}"})})
    return Worker(target, **{"executors": 1, "spare_executors": 0, "on_output": quiet, **settings})


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.requirement("X92")
async def test_each_pool_has_its_own_processes_and_environment(target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    two = PoolConfig(executors=2, executor_max_inflight=1, environment={"CUDA_VISIBLE_DEVICES": "{slot}"})
    async with start(target, pools={"gpu": two}) as worker:
        assert [(slot.pool, slot.index) for slot in worker.slots()] == [("default", 0), ("gpu", 0), ("gpu", 1)]
        pids = {(slot.pool, slot.pid) for slot in worker.slots()}
        assert ("default", await worker.call("near")) in pids
        assert ("gpu", (await worker.call("device"))[0]) in pids
        seen = await asyncio.gather(*(worker.call("device_of_two", [str(folder)]) for _ in range(2)))
        assert sorted(seen) == ["0", "1"]


@pytest.mark.requirement("X37", "X92")
async def test_an_executor_s_successor_has_its_number(target: Path) -> None:
    async with start(target) as worker:
        pid, number = await worker.call("device")
        kill(pid, signal.SIGKILL)
        await until(lambda: not is_alive(pid))
        again, same = await worker.call("device")
        assert (again != pid, number, same) == (True, "0", "0")


@pytest.mark.requirement("X92")
async def test_a_full_pool_stops_nobody_else(target: Path, tmp_path: Path) -> None:
    async with start(target, executor_max_inflight=1) as worker:
        for full, free in (("hold", "near"), ("hold_near", "device")):
            held = tmp_path / full
            calls = [asyncio.create_task(worker.call(full, [str(held)])) for _ in range(3)]
            await until(held.exists)
            async with asyncio.timeout(WAIT_S):
                for _ in range(3):
                    await worker.call(free)
            while not all(call.done() for call in calls):
                held.unlink(missing_ok=True)
                await asyncio.sleep(0.01)
            await asyncio.gather(*calls)


@pytest.mark.requirement("X24", "X80")
@pytest.mark.parametrize("inflight", [1, 128])
async def test_eight_deep_from_pool_to_pool(inflight: int, target: Path) -> None:
    """One executor in each; with one place every caller holds the only one of its pool."""
    async with start(target, executor_max_inflight=inflight) as worker, asyncio.timeout(WAIT_S):
        calls = [worker.call(name, [8]) for name in ("ping", "pong") for _ in range(8)]
        for pids in await asyncio.gather(*calls):
            assert len(pids) == 9
            assert [len(set(pids[::2])), len(set(pids[1::2]))] == [1, 1]


@pytest.mark.requirement("X80", "X92")
async def test_tenants_that_hold_what_the_other_waits_for(target: Path) -> None:
    """Each family's root holds the only executor of one pool, kept for its tenant, and needs the other pool's."""
    pools = {"gpu": PoolConfig(sandbox="auto")}
    try:
        worker = start(target, pools=pools, sandbox="auto")
        await worker.start()
    except UsageError as error:
        pytest.skip(str(error))
    async with asyncio.timeout(WAIT_S):
        one = worker.call("ping_later", [4], tenant="a")
        two = worker.call("pong_later", [4], tenant="b")
        assert await asyncio.gather(one, two) == [0, 0]
    await worker.close()


@pytest.mark.requirement("X92")
async def test_a_pool_that_is_not_configured_is_told_at_start_and_at_reload(target: Path) -> None:
    with pytest.raises(UsageError, match=r"device, .* runs? in pool 'gpu', .* not configured.*none besides") as caught:
        async with start(target, pools={}):
            pass
    assert "Worker(…, pools={'gpu': PoolConfig(executors=1)})" in str(caught.value)
    async with start(target) as worker:
        target.write_text(FUNCTIONS + '\n@function(pool="tpu")\ndef other() -> int:\n    return 1\n')
        with pytest.raises(UsageError, match=r"other runs in pool 'tpu'.*the named pools are: 'gpu'"):
            await worker.reload()
        assert await worker.call("near"), "the old version is still in force"
        assert "other" not in worker.registry.names()


async def test_what_a_file_holds_can_be_known_without_its_pools(target: Path) -> None:
    registry = await Registry.aload(target)
    assert registry.get("device").promises.pool == "gpu"
    async with start(registry) as worker:
        assert await worker.call("near")


@pytest.mark.requirement("X71")
async def test_a_pool_that_does_not_start_is_told(target: Path) -> None:
    broken = PoolConfig(environment={"PYTHONHOME": "/nowhere"})
    with pytest.raises(UsageError, match="of pool 'gpu'"):
        async with start(target, pools={"gpu": broken}, start_timeout_ms=20_000, max_restarts=0, backoff_ms=60_000):
            pass


@pytest.mark.requirement("X47", "X57")
async def test_an_interrupted_call_s_executor_ends_its_others_beside_its_slot(target: Path, tmp_path: Path) -> None:
    """The next process takes the slot at once, however long the calls beside the interrupted one take."""
    held = tmp_path / "held"
    async with start(target) as worker:
        old = await worker.call("near")
        long = asyncio.create_task(worker.call("hold_near", [str(held)]))
        await until(held.exists)
        with pytest.raises(CallError) as caught:
            await worker.call("spins")
        assert caught.value.kind is ErrorKind.TIMEOUT
        async with asyncio.timeout(WAIT_S):
            assert await worker.call("near") != old
        assert is_alive(old)
        held.unlink()
        assert await long == old
        await until(lambda: not is_alive(old))
    assert os.getpid() != old
