"""`shared`: a value that is copied once, for many calls of one worker, and that no executor can write."""

from __future__ import annotations

import asyncio
import datetime as dt
import errno
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from callyard import CallError, Dispatcher, Shared, SyncYard, UsageError, Worker, Yard
from callyard.errors import ErrorKind, ProtocolError
from callyard.executor.shared import SharedValues
from callyard.functions.packing import NotReadable, encode_crossing
from callyard.functions.shared import SharedPlace
from callyard.wire.arena import GRAIN_BYTES, SHARED_WINDOW_BYTES
from callyard.wire.values import check_value
from tests.e2e import shared_file as f

MIB = 1024 * 1024
pytestmark = pytest.mark.requirement("X95")


def quiet(*_: object) -> None:
    """Drop what executors print."""


def open_worker(**settings: Any) -> Worker:
    return Worker(f.__file__, executors=1, spare_executors=0, on_output=quiet, **settings)


@pytest.fixture(scope="module")
def yard() -> Iterator[SyncYard]:
    with SyncYard(f.__file__, executors=1, spare_executors=0, on_output=quiet) as started:
        yield started


async def wait_until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.01)


def test_an_array_is_a_view_that_cannot_be_written_to(yard: SyncYard) -> None:
    array = np.arange(MIB, dtype="f8")
    with yard.shared(array) as big:
        assert yard.call(f.at, big, 5) == [5.0, False, False, True], "typed as the array, it fits its parameter"
        assert yard.call("at", {"x": big, "index": 7})[0] == 7.0
        assert [r.value[0] for r in yard.map(f.at, [{"x": big, "index": n} for n in range(50)])] == list(range(50))
        assert yard.call(f.hand_on, big) == 1.0, "a subcall gets it as any array"
        with pytest.raises(CallError, match="read-only"):
            yard.call(f.write_to, big)
        assert yard.call(f.at, big, 0)[0] == 0.0


def test_it_is_sent_once(yard: SyncYard) -> None:
    """The arguments say where it lies, in some bytes, however large it is."""
    shared = yard.shared(np.zeros(8 * MIB))
    assert len(encode_crossing({"x": shared})) < 300
    assert yard._yard.worker.shared_bytes >= 64 * MIB
    shared.close()


def test_anything_else_is_made_once(yard: SyncYard) -> None:
    for name, argument, value, seen in [
        ("raw", "data", b"abc" * MIB, [3 * MIB, "abc"]),
        ("mapping", "table", {"a": [1, 2], "b": list(range(10_000))}, [[1, 2]]),
        ("untyped", "x", {"a": [1, 2]}, ["dict"]),
        ("untyped", "x", [b"a", np.zeros(3)], ["list"]),
        ("frame", "sales", pd.DataFrame({"sold": [1, 2]}), [3]),
    ]:
        with yard.shared(value) as shared:
            first, second = (yard.call(name, {argument: shared}) for _ in range(2))
        assert first == second, "the same object"
        assert first[: len(seen)] == seen, name


def test_the_annotation_says_what_it_is(yard: SyncYard) -> None:
    cities = [f.City(name, dt.date(1900, 1, 1), np.ones(7, "u1")) for name in ("Rome", "Oslo")]
    with yard.shared(cities[0]) as one, yard.shared(cities) as both, yard.shared("añ" * MIB) as words:
        first, second = yard.call(f.city, one, both), yard.call(f.city, one)
        assert first[:4] == ["Rome", 1900, 7, False]
        assert (first[4], first[5]) == (second[4], 2)
        assert yard.call(f.city, cities[1], both)[::5] == ["Oslo", 2], "beside what is its own"
        assert yard.call("cities", {"named": {"a": one, "b": cities[1]}}) == ["Rome", "Oslo"]
        assert yard.call(f.text, words) == 2 * MIB
        with pytest.raises(CallError, match="/table: a shared value: Input should be an object"):
            yard.call("mapping", {"table": both})
        with yard.shared({"a": [1, "x"]}) as bad, pytest.raises(CallError, match="in the shared value, at /a/1: Input"):
            yard.call("mapping", {"table": bad})
        with pytest.raises(CallError, match="/x: a shared value: expected an array, got text"):
            yard.call("at", {"x": words, "index": 0})
        with pytest.raises(CallError, match="got a numpy array"), yard.shared(np.zeros(2)) as array:
            yard.call("mapping", {"table": array})


def test_inside_of_arguments_and_behind_odd_bytes(yard: SyncYard) -> None:
    with yard.shared(np.full(10, 4.0)) as big, yard.shared({"odd": b"x", "x": np.full(3, 2.0)}) as both:
        assert yard.call(f.inside, [big, np.full(1, 5.0), big]) == [4.0, 5.0, 4.0]
        assert yard.call("untyped", {"x": both})[0] == "dict"
        rows: list[dict[str, Any]] = [{"x": big, "index": 0, "more": 1}]
        assert [r.value[0] for r in yard.map("at", rows, columns=["x", "index"])] == [4.0], "columns are taken"
        with yard.shared(b"12") as data:
            assert [r.value for r in yard.map(f.whole, [("a", data), {"name": "b", "data": data}])] == [3, 3]


def test_what_cannot_be_shared_says_so(yard: SyncYard) -> None:
    with pytest.raises(UsageError, match=r"the value cannot cross: /x: object has no JSON form"):
        yard.shared({"x": object()})
    with yard.shared([1]) as inner, pytest.raises(UsageError, match="cannot be shared in another"):
        yard.shared({"x": inner})


def test_a_closed_one_and_that_of_another_worker(yard: SyncYard) -> None:
    shared = yard.shared(np.zeros(9))
    shared.close()
    shared.close()
    assert repr(shared).endswith(": closed>")
    with pytest.raises(UsageError, match="args cannot cross: /x: this Shared is closed, or its worker is"):
        yard.call("at", {"x": shared, "index": 0})
    with SyncYard(f.__file__, executors=1, spare_executors=0, on_output=quiet) as other:
        strange: Any = other.shared(np.zeros(9))
        with pytest.raises(CallError, match="/x: this Shared is of another worker") as caught:
            yard.call(f.at, strange, 0)
        assert caught.value.failure.kind is ErrorKind.SCHEMA
        (row,) = yard.map(f.at, [(strange, 0)])
        assert row.error is not None
        assert "/0: this Shared is of another worker" in row.error.message
    with pytest.raises(CallError, match="its worker is"):
        yard.call(f.at, strange, 0)


async def test_a_tool_call_takes_none() -> None:
    async with Yard(f.__file__, executors=1, spare_executors=0, on_output=quiet) as yard:
        assert isinstance(yard.dispatcher, Dispatcher)
        with yard.shared(np.zeros(9)) as big, pytest.raises((CallError, UsageError), match="only calls and maps of"):
            (await yard.dispatch(f.at, big, 0)).unwrap()


async def test_its_memory_goes_with_the_last_that_uses_it(tmp_path: Path) -> None:
    """Closed or collected; a call that was given it still has it, though nothing else does."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    async with open_worker() as worker:
        shared: Shared[Any] | None = worker.shared(np.full(MIB, 3.0))
        assert shared is not None
        calls = asyncio.ensure_future(worker.call("wait_for", {"x": shared, "path": str(pipe)}))
        await wait_until(lambda: bool(worker.running()))
        shared.close()
        other = worker.shared(b"x")
        await asyncio.sleep(0)
        memory = worker._shared
        assert memory is not None
        assert worker.shared_bytes > 8 * MIB, "the call has it still"
        assert os.fstat(memory.reading_fd).st_blocks * 512 >= 8 * MIB
        await asyncio.to_thread(pipe.write_bytes, b"")
        assert await calls == 3.0
        await wait_until(lambda: worker.shared_bytes < MIB)
        assert os.fstat(memory.reading_fd).st_blocks * 512 < MIB, "and the system has its memory back"
        del other
        gc.collect()
        await wait_until(lambda: worker.shared_bytes == 0)
        rows = ([worker.shared(np.full(9, float(n))), 0] for n in range(3))  # held by nobody once it was read
        assert [r.value[0] async for r in worker.map(f.at, rows)] == [0.0, 1.0, 2.0]
        gc.collect()
        await wait_until(lambda: worker.shared_bytes == 0)


async def test_it_is_bounded() -> None:
    async with open_worker(shared_bytes_max=MIB) as worker:
        first = worker.shared(bytes(MIB - 4_096))
        with pytest.raises(UsageError, match=r"take up 1,048,576 of 1,048,576: close one .* raise shared_bytes_max"):
            worker.shared(b"x")
        first.close()
        await wait_until(lambda: worker.shared_bytes == 0)
        assert await worker.call("raw", {"data": worker.shared(b"abcd")}) is not None
    async with open_worker(shared_bytes_max=0) as worker:
        with pytest.raises(UsageError, match="shared_bytes_max is 0"):
            worker.shared(b"x")
    with pytest.raises(UsageError):
        worker.shared(b"x")


def test_an_executor_cannot_write_it(yard: SyncYard) -> None:
    with yard.shared(np.zeros(MIB)) as big:
        assert yard.call(f.at, big, 0)[0] == 0.0
        assert yard.call(f.attack) == []
        assert yard.call(f.at, big, 0)[0] == 0.0


async def test_nor_can_a_confined_one() -> None:
    try:
        worker = open_worker(sandbox="auto")
        await worker.start()
    except UsageError as error:
        pytest.skip(f"no sandbox here: {error}")
    try:
        big = worker.shared(np.arange(MIB, dtype="f8"))
        assert (await worker.call("at", {"x": big, "index": 3}))[:2] == [3.0, False]
        assert await worker.call(f.reopen) in ("PermissionError", "not found", "FileNotFoundError")
        assert (await worker.call("at", {"x": big, "index": 0}))[0] == 0.0
        memory = worker._shared
        assert memory is not None
        with pytest.raises(PermissionError), open(f"/proc/self/fd/{memory._fd}", "r+b", buffering=0) as again:
            again.write(b"x")  # nor can the worker's own user, not even root
        for number in range(20):  # its places are used again, and nobody gets another value than its own
            other = worker.shared(np.full(MIB, float(number)))
            assert (await worker.call("at", {"x": other, "index": 9}))[0] == number
            other.close()
        await wait_until(lambda: worker.shared_bytes < 9 * MIB)
        assert os.fstat(memory.reading_fd).st_blocks * 512 < 60 * MIB
    finally:
        await worker.close()


async def test_another_executor_and_a_new_one_have_it() -> None:
    async with Worker(f.__file__, executors=2, spare_executors=0, on_output=quiet) as worker:
        big = worker.shared(np.arange(9.0))
        for slot in worker.slots():
            assert slot.pid is not None
            os.kill(slot.pid, 9)
        found = [r.value[0] async for r in worker.map(f.at, [(big, n) for n in range(9)], max_attempts=5)]
        assert found == list(range(9))


def test_a_place_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "shared"
    path.write_bytes(b"[1]".ljust(65_536, b" ") + bytes(65_536))
    values = SharedValues(os.open(path, os.O_RDONLY))
    kept = values.open((1, 0, 3))
    assert kept.decode() == [1]
    assert values.open((1, 0, 3)) is kept
    for offset, length in [(0, 131_073), (131_072, 1), (65_536, 65_537), (1, 1), (0, 0), (2**62, 2**62)]:
        with pytest.raises(NotReadable, match=f"no shared value is at {offset}"):
            values.open((2, offset, length))
    path.write_bytes(bytes(131_072))
    values.open((3, 65_536, 5))
    assert (1, 0, 3) not in values._kept, "what was freed is let go of"
    os.close(values.fd)


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are told by /proc")
def test_many_small_ones_take_few_descriptors(tmp_path: Path) -> None:
    """A mapping holds one, and an executor, a confined one above all, has few."""
    path = tmp_path / "shared"
    count, window = 300, SHARED_WINDOW_BYTES
    with path.open("wb") as file:
        for number in range(count):
            file.seek(number * GRAIN_BYTES)
            file.write(b"%03d" % (number + 100))
        file.seek(2 * window - 100_000 // GRAIN_BYTES * GRAIN_BYTES)
        file.write(b"[" + b" " * 200_000 + b"]")
        file.truncate(3 * window)
    values = SharedValues(os.open(path, os.O_RDONLY))

    def held() -> int:
        """Descriptors of the file in this process, whatever else it opens and closes meanwhile."""
        found = 0
        for fd in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                found += os.readlink(f"/proc/self/fd/{fd}") == str(path)
        return found

    kept = [values.open((number, number * GRAIN_BYTES, 3)) for number in range(count)]
    across = values.open((count, 2 * window - 100_000 // GRAIN_BYTES * GRAIN_BYTES, 200_002))
    assert [one.decode() for one in kept] == list(range(100, 100 + count))
    assert across.decode() == []
    assert held() == 1 + 3
    path.write_bytes(bytes(3 * window))
    kept.clear()
    del across
    values.open((count + 1, 2 * window, 3))
    gc.collect()
    assert held() == 1 + 1, "a mapping goes with the last value in it"
    os.close(values.fd)


async def test_a_worker_that_is_closed_says_so() -> None:
    async with open_worker() as worker:
        pass
    with pytest.raises(UsageError, match="the worker is closed"):
        worker.shared(1)


def test_an_executor_shares_nothing() -> None:
    value = encode_crossing([Shared(SharedPlace(1, 0, 3), quiet)])
    with pytest.raises(ProtocolError, match="only a worker shares"):
        check_value(value)


async def test_a_system_without_such_memory_refuses_shared_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("callyard.worker.worker.SharedMemory", refuse_memory)
    async with open_worker() as worker:
        assert await worker.call("text", {"words": "two"}) == 3
        with pytest.raises(UsageError, match=r"no memory to share with executors: .*Invalid argument"):
            worker.shared(b"x")
        assert worker.shared_bytes == 0


def refuse_memory(*_: object, **__: object) -> None:
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
