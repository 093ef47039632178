"""What crosses to executors and back: every kind of value, any size, and what cannot."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from callyard import CallError, Result, SyncYard, UsageError, Worker
from callyard.errors import ErrorKind
from tests.e2e import crossing_file as f
from tests.e2e.crossing_table import TABLE, Crossing, same, to_line

MIB = 1024 * 1024
GUIDE = Path(__file__).parents[3] / "docs/guides/what-can-cross.md"


def quiet(*_: object) -> None:
    """Drop what executors print."""


@pytest.fixture(scope="module")
def yard() -> Iterator[SyncYard]:
    with SyncYard(f.__file__, executors=1, spare_executors=0, on_output=quiet, arena_bytes_max=256 * MIB) as started:
        yield started


def result_of(yard: SyncYard, function: Any, *args: Any, **options: Any) -> Result[Any]:
    return yard._thread.run(yard._yard.call_result(function, *args, **options))


@pytest.mark.requirement("X95")
@pytest.mark.requirement("D26")
@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.name}: {row.written}")
def test_what_crosses_arrives(yard: SyncYard, row: Crossing) -> None:
    takes: Any = getattr(f, row.name)
    assert same(yard.call(takes, row.value), row.arrives)
    if row.beside and row.name not in ("photo", "record", "pandas_frame", "raw_array"):
        assert same(yard.call(row.name, {"x": row.value}), row.arrives), "by name as by function"
    shown = result_of(yard, row.name, {"x": row.value}, binary=False)
    if row.json == "a failure":
        assert shown.error is not None
        assert (shown.error.kind, shown.error.message) == (
            ErrorKind.RESULT,
            "/0: nan is not JSON: use None, or text, instead; nan='null' makes it null",
        )
        return
    raw = shown.raw
    assert raw is not None
    if row.json:
        assert raw.decode() == row.json
        takes_json = result_of(yard, row.name, {"x": shown.value}, binary=False)
        assert takes_json.raw == raw, "what it is as JSON is also what it may be given as"


def test_the_guide_has_the_table() -> None:
    page = GUIDE.read_text()
    lines = {line for line in page.splitlines() if line.startswith("| `")}
    wanted = {to_line(row) for row in TABLE}
    missing = sorted(wanted - lines)
    assert not missing, "\n".join(missing)
    assert not [line for line in lines - wanted if " | as it is | " in line or " | as JSON | " in line], "an old line"
    for written in f.CANNOT:
        assert f"| `{written}` | " in page or f"| {written} | " in page, written


@pytest.mark.requirement("X95")
@pytest.mark.parametrize("written", f.CANNOT)
def test_what_cannot_cross_says_so_in_the_same_words_both_ways(yard: SyncYard, written: str) -> None:
    """Going in it fails at submit, coming back the call fails with kind `result`."""
    with pytest.raises(UsageError) as caught:
        yard.call("anything", {"x": f.CANNOT[written]()})
    failed = result_of(yard, "make", {"key": written})
    assert failed.error is not None
    assert failed.error.kind is ErrorKind.RESULT
    place, text = failed.error.details["pointer"], failed.error.message
    words = text.removeprefix(f"{place}: ")
    assert str(caught.value) == f"args cannot cross: /x{place}: {words}"
    assert "0x" not in text, "no addresses"


@pytest.mark.requirement("D26")
def test_nan_is_a_failure_or_null(yard: SyncYard) -> None:
    with pytest.raises(CallError, match=r"/1: nan is not JSON"):
        yard.call("nan_list")
    assert yard.call("nan_list", nan="null") == [1.0, None]
    assert yard.call("nan_null") == [1.0, None]
    assert yard.call("anything", {"x": float("nan")}, nan="null") is None
    assert [r.value for r in yard.map("anything", [[float("inf")], [b"x"]], nan="null")] == [None, b"x"]
    with pytest.raises(UsageError, match="nan must be one of refuse, null, got 'drop'"):
        yard.call("nan_list", nan="drop")  # type: ignore[call-overload]


@pytest.mark.requirement("X95")
@pytest.mark.parametrize("size", [MIB // 8 - 100, MIB // 8, 3 * MIB])
def test_an_array_of_any_size(yard: SyncYard, size: int) -> None:
    """At 8 bytes each: below 1 MiB in a frame, above it by the arena."""
    array = np.arange(size, dtype="f8")
    back = yard.call(f.double, array)
    assert array[1] == 1, "the function had its own"
    assert same(back, np.arange(size, dtype="f8") * 2)
    back += 1  # and so has its caller


@pytest.mark.requirement("X95")
def test_large_text_and_bytes(yard: SyncYard) -> None:
    assert yard.call("length", {"data": b"x" * (30 * MIB)}) == 30 * MIB
    assert yard.call(f.blob, 30 * MIB) == b"x" * (30 * MIB)
    text = yard.call(f.repeated, "añ", 10 * MIB)
    assert (len(text), text[:4]) == (20 * MIB, "añañ")
    assert yard.call("anything", {"x": [0] * 3 * MIB}) == [0] * 3 * MIB


@pytest.mark.requirement("X95")
def test_more_than_the_arena_holds_is_refused_with_the_setting(yard: SyncYard) -> None:
    big = result_of(yard, "length", {"data": b"x" * (129 * MIB)})
    assert big.error is not None
    assert (big.error.kind, big.error.attempts) == (ErrorKind.SCHEMA, 0)
    assert "raise arena_bytes_max" in big.error.message
    out = result_of(yard, "blob", {"size": 129 * MIB})
    assert out.error is not None
    assert (out.error.kind, out.error.details["limit"]) == (ErrorKind.RESULT, "arena_bytes_max")
    assert yard.call("blob", {"size": 5}) == b"x" * 5


@pytest.mark.requirement("X95")
def test_more_calls_than_the_arena_has_room_for_take_turns(yard: SyncYard) -> None:
    rows = [{"x": np.full(2 * MIB, float(number))} for number in range(20)]  # 16 MiB each, 128 in the half
    assert [int(r.value[0]) for r in yard.map(f.double, rows)] == [2 * number for number in range(20)]
    worker = yard._yard.worker
    arenas = [executor.link.arena for executor in worker._pool._executors.values()]  # type: ignore[union-attr]
    assert [arena.room.live for arena in arenas if arena is not None] == [{}], "all was given back"


@pytest.mark.requirement("X95")
def test_subcalls_pass_large_values(yard: SyncYard) -> None:
    assert yard.call(f.family, 2 * MIB, 12) == [2 * number for number in range(12)]  # more than the half holds
    assert yard.call(f.by_name, 10) == "bytes"
    assert yard.call(f.by_name, 2 * MIB) == "bytes"
    assert same(yard.call(f.double_async, np.ones(MIB)), np.full(MIB, 2.0))


@pytest.mark.requirement("X95")
async def test_a_killed_executor_gives_its_arena_back() -> None:
    async with Worker(f.__file__, executors=1, spare_executors=0, on_output=quiet, restart_delay_ms=1) as worker:
        (executor,) = worker._pool._executors.values()  # type: ignore[union-attr]
        waiting = [asyncio.ensure_future(worker.call_result(f.hold, np.ones(MIB), 600.0)) for _ in range(3)]
        async with asyncio.timeout(120):
            while len(worker.running()) < 3:
                await asyncio.sleep(0.01)
        lost = await worker.call_result(f.die_holding, np.ones(MIB))
        assert lost.error is not None
        assert lost.error.kind is ErrorKind.CRASHED
        assert [(await one).ok for one in waiting] == [False] * 3
        assert executor.link.arena is None
        assert executor.link.arena_bytes == 0
        assert int((await worker.call(f.double, np.ones(MIB)))[0]) == 2


@pytest.mark.requirement("X95")
@pytest.mark.requirement("X46")
async def test_in_the_sandbox() -> None:
    try:
        worker = Worker(
            f.__file__, executors=1, spare_executors=0, on_output=quiet, sandbox="auto", sandbox_tmp_bytes=MIB
        )
        await worker.start()
    except UsageError as error:
        pytest.skip(f"no sandbox here: {error}")
    try:
        array = np.ones(4 * MIB)
        assert same(await worker.call(f.double, array), array * 2)
        frame = pd.DataFrame({"a": np.arange(MIB)})
        assert same(await worker.call("anything", {"x": frame}), frame)
    finally:
        await worker.close()
