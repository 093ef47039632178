"""The arena between a worker and an executor that is a fake, honest or not."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from callyard.errors import ErrorKind, ProtocolError
from callyard.functions.packing import encode_crossing
from callyard.ids import CallId, ExecutorId, FunctionId, RequestId
from callyard.wire.arena import GRAIN_BYTES
from callyard.wire.codec import encode_message
from callyard.wire.messages import (
    ArenaReleased,
    ArenaReleasedPayload,
    CallCompleted,
    CallCompletedPayload,
    CallWaiting,
    CallWaitingPayload,
    ExecuteCall,
    ResumeCall,
    Stored,
    SubcallRequest,
    WaitKind,
)
from callyard.wire.values import to_wire
from callyard.worker.arena import Arena

from .conftest import MakeWorker
from .fakes import FakeProcess, FakeSpawner, begin

HALF = 4 * 1024 * 1024
LARGE = b'"' + b"x" * (2 * 1024 * 1024) + b'"'


def put(process: FakeProcess, value: bytes, offset: int = HALF) -> None:
    """Write as the executor does. Its descriptor is the worker's own here."""
    assert process.order.arena_fd is not None
    os.pwrite(process.order.arena_fd, value, offset)


def complete_at(process: FakeProcess, execute: ExecuteCall, at: Stored) -> None:
    process.mark(execute)
    payload = CallCompletedPayload(execute.payload.attempt_seq, msgspec.Raw(b"null"), output_at=at)
    process.send(CallCompleted(execute.call_id, payload))


def grants_told(process: FakeProcess) -> list[int]:
    return [g for message in process.received if isinstance(message, ArenaReleased) for g in message.payload.grants]


@pytest.mark.requirement("X95")
async def test_a_large_output_is_read_and_its_place_given_back(make_worker: MakeWorker) -> None:
    def answer(process: FakeProcess, execute: ExecuteCall) -> None:
        put(process, LARGE, HALF + GRAIN_BYTES)
        complete_at(process, execute, Stored(5, HALF + GRAIN_BYTES, len(LARGE)))

    spawner = FakeSpawner(answers=answer)
    async with make_worker(spawner, arena_bytes_max=2 * HALF) as worker:
        assert await worker.call("effect") == "x" * (len(LARGE) - 2)
        process = spawner.processes[0]
        await process.wait_for(lambda: grants_told(process) == [5])


BAD_PLACES = {
    "in the worker's half": Stored(1, 0, 100),
    "across the border": Stored(1, HALF - 10, 100),
    "across the end": Stored(1, 2 * HALF - 10, 100),
    "beyond the end": Stored(1, 1 << 50, 100),
    "of no length": Stored(1, HALF, 0),
    "too long": Stored(1, HALF, 2**63 - 1),
}


@pytest.mark.requirement("X95")
@pytest.mark.requirement("X65")
@pytest.mark.parametrize("where", BAD_PLACES)
async def test_a_place_that_is_not_its_own_costs_the_executor(make_worker: MakeWorker, where: str) -> None:
    spawner = FakeSpawner(answers=lambda process, execute: complete_at(process, execute, BAD_PLACES[where]))
    async with make_worker(spawner, arena_bytes_max=2 * HALF) as worker:
        result = await worker.call_result("effect")
    assert result.error is not None
    assert (result.error.kind, result.error.details["cause"]) == (ErrorKind.CRASHED, "malformed_frame")


@pytest.mark.requirement("X95")
@pytest.mark.requirement("X65")
async def test_one_place_that_is_named_often_costs_the_executor(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would be a copy of its own: a few bytes in a frame, and half the arena in the worker's memory."""
    taken: list[int] = []
    take = Arena.take
    monkeypatch.setattr(Arena, "take", lambda arena, at: taken.append(at.length) or take(arena, at))

    def answer(process: FakeProcess, execute: ExecuteCall) -> None:
        put(process, LARGE)
        process.mark(execute)
        messages = [
            CallCompleted(
                execute.call_id,
                CallCompletedPayload(
                    execute.payload.attempt_seq, msgspec.Raw(b"null"), output_at=Stored(grant, HALF, len(LARGE))
                ),
            )
            for grant in range(200)
        ]
        process.send_bytes(b"".join(map(encode_message, messages)))

    async with make_worker(FakeSpawner(answers=answer), arena_bytes_max=2 * HALF) as worker:
        result = await worker.call_result("effect")
        assert sum(taken) <= HALF
    assert result.ok or result.error.details["cause"] == "malformed_frame"


@pytest.mark.requirement("X95")
async def test_what_was_given_back_counts_no_more(make_worker: MakeWorker) -> None:
    """Two of them are more than the half holds at one time."""

    def answer(process: FakeProcess, execute: ExecuteCall) -> None:
        put(process, LARGE)
        complete_at(process, execute, Stored(execute.payload.call_number, HALF, len(LARGE)))

    async with make_worker(FakeSpawner(answers=answer), arena_bytes_max=2 * HALF) as worker:
        for _ in range(3):
            assert await worker.call("effect") == "x" * (len(LARGE) - 2)


def in_arena(value: bytes) -> Callable[[FakeProcess, ExecuteCall], None]:
    def answer(process: FakeProcess, execute: ExecuteCall) -> None:
        put(process, value)
        complete_at(process, execute, Stored(1, HALF, len(value)))

    return answer


def in_frame(value: bytes) -> Callable[[FakeProcess, ExecuteCall], None]:
    def answer(process: FakeProcess, execute: ExecuteCall) -> None:
        process.mark(execute)
        raw, sidecar = to_wire(value)
        message = CallCompleted(execute.call_id, CallCompletedPayload(execute.payload.attempt_seq, raw))
        process.send_bytes(encode_message(message, sidecar))

    return answer


PACKED = encode_crossing(b"abc")
BAD_VALUES = {
    "text that is no JSON": in_arena(b"hello"),
    "two values": in_arena(b"1 2"),
    "NaN": in_arena(b"[NaN]"),
    "no UTF-8": in_arena(b'"\xff"'),
    "zeros": in_arena(bytes(100)),
    "parts that are too long": in_arena(PACKED.replace(b'"size":3', b'"size":4')),
    "a sidecar that is too short": in_frame(PACKED[:-1]),
    "a sidecar without a head": in_frame(PACKED.replace(b'"parts"', b'"party"')),
}


@pytest.mark.requirement("X95")
@pytest.mark.requirement("X49")
@pytest.mark.parametrize("what", BAD_VALUES)
async def test_a_value_that_is_none_costs_the_executor(make_worker: MakeWorker, what: str) -> None:
    async with make_worker(FakeSpawner(answers=BAD_VALUES[what]), arena_bytes_max=2 * HALF) as worker:
        result = await worker.call_result("effect")
    assert result.error is not None
    assert (result.error.kind, result.error.details["cause"]) == (ErrorKind.CRASHED, "malformed_frame")


@pytest.mark.requirement("X95")
@pytest.mark.parametrize("send", [in_arena, in_frame])
async def test_who_asked_for_json_is_never_given_binary_parts(
    make_worker: MakeWorker, send: Callable[[bytes], Callable[[FakeProcess, ExecuteCall], None]]
) -> None:
    async with make_worker(FakeSpawner(answers=send(PACKED)), arena_bytes_max=2 * HALF) as worker:
        assert await worker.call("effect") == b"abc"
        result = await worker.call_result("effect", binary=False)
    assert result.error is not None
    assert result.error.details["cause"] == "malformed_frame"


@pytest.mark.requirement("X95")
async def test_an_end_that_nobody_waits_for_is_not_read(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would cost memory for nothing. Its place is given back all the same."""
    taken: list[Stored] = []
    take = Arena.take
    monkeypatch.setattr(Arena, "take", lambda arena, at: taken.append(at) or take(arena, at))
    spawner = FakeSpawner(answers=in_arena(b"1"))
    async with make_worker(spawner, arena_bytes_max=2 * HALF) as worker:
        assert await worker.call("effect") == 1
        process = spawner.processes[0]
        (execute,) = process.executes
        complete_at(process, execute, Stored(9, HALF, 1))
        stranger = CallCompletedPayload(1, msgspec.Raw(b"null"), output_at=Stored(10, HALF, 1))
        process.send(CallCompleted(CallId("task-99-0"), stranger))
        await process.wait_for(lambda: grants_told(process) == [1, 9, 10])
        assert await worker.call("effect") == 1
    assert [at.grant for at in taken] == [1, 1]


@pytest.mark.requirement("X95")
async def test_arguments_wait_for_room_and_go_with_their_seat(make_worker: MakeWorker) -> None:
    """An executor that never says what it has read holds its half until its calls end, and no more than that."""
    spawner = FakeSpawner()
    value = ["x" * (HALF // 2 - GRAIN_BYTES)]
    async with make_worker(spawner, arena_bytes_max=2 * HALF, base_backoff_ms=1) as worker:
        process = spawner.processes[0]
        calls = [asyncio.ensure_future(worker.call_result("effect", value)) for _ in range(5)]
        await process.wait_executes(2)
        link = next(iter(worker._pool._executors.values())).link
        assert len(link.arena.room.live) == 2
        assert HALF // 2 < link.arena_bytes <= HALF
        for number in range(5):
            execute = (await process.wait_executes(number + 1))[number]
            assert execute.payload.args_at is not None
            assert execute.payload.args_at.length == len(msgspec.json.encode(value))
            assert len(link.arena.room.live) <= 2
            process.complete(execute)
        assert [(await call).ok for call in calls] == [True] * 5
        assert link.arena.room.live == {}
        process.send(ArenaReleased(ArenaReleasedPayload([1, 77, 2**40])))  # long gone, and never there
        again = asyncio.ensure_future(worker.call("effect"))
        process.complete((await process.wait_executes(6))[5])
        assert await again == 1


@pytest.mark.requirement("X95")
@pytest.mark.requirement("X94")
async def test_arguments_with_binary_parts_share_no_frame(make_worker: MakeWorker) -> None:
    """Their sidecar is the frame's, also where the function's other calls go together."""
    spawner = FakeSpawner(answers=lambda process, execute: process.complete(execute))
    async with make_worker(spawner) as worker:
        rows = [[1], [b"abc"], [2], [b"abc"]]
        assert [result.value async for result in worker.map("safe", rows)] == [1] * 4
        seen = [bytes(execute.payload.args) for execute in spawner.processes[0].executes]
    assert sorted(seen) == sorted([b"[1]", b"[2]", *[bytes(to_wire(encode_crossing([b"abc"]))[0])] * 2])


@pytest.mark.requirement("X95")
async def test_arguments_that_never_fit_are_refused_at_once(make_worker: MakeWorker) -> None:
    spawner = FakeSpawner()
    async with make_worker(spawner, arena_bytes_max=2 * HALF) as worker:
        result = await worker.call_result("effect", ["x" * HALF])
    assert result.error is not None
    assert (result.error.kind, result.error.attempts) == (ErrorKind.SCHEMA, 0)
    assert result.error.message.startswith(
        "its arguments are a value of 4,194,308 bytes, and the arena holds 4,194,304"
    )
    assert spawner.processes[0].executes == []


def ask(process: FakeProcess, execute: ExecuteCall) -> None:
    """The call makes a subcall."""
    process.mark(execute)
    asked = SubcallRequest(FunctionId("effect"), msgspec.Raw(b'["deeper"]'))
    payload = CallWaitingPayload(WaitKind.SUBCALL, execute.payload.task_id, 1, subcall=asked)
    process.send(CallWaiting(execute.call_id, RequestId("r"), payload))


@pytest.mark.requirement("X95")
@pytest.mark.parametrize("is_full", [False, True])
async def test_a_subcall_s_result_that_finds_no_place_is_told(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    """It can never be held, or there is no memory for it: its parent's request fails, and nothing else does."""

    def store(arena: Arena, value: bytes) -> Stored | None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    spawner = FakeSpawner()
    async with make_worker(spawner, arena_bytes_max=2 * HALF) as worker:
        call, process, execute = await begin(worker, spawner)
        ask(process, execute)
        _, child = await process.wait_executes(2)
        if is_full:
            monkeypatch.setattr(Arena, "store", store)
            in_arena(LARGE)(process, child)
        else:
            await asyncio.to_thread(process.complete, child, b'"' + b"x" * HALF + b'"')
        await process.wait_for(lambda: isinstance(process.received[-1], ResumeCall))
        resume = process.received[-1]
        assert isinstance(resume, ResumeCall)
        error = resume.payload.error
        assert error is not None
        assert error.kind == ErrorKind.RESULT
        why = "no memory for the result: " if is_full else "the result is a value of 4,194,306 bytes, and the arena"
        assert why in error.message
        process.complete(execute)
        assert await call == 1


@pytest.mark.requirement("X95")
async def test_a_subcall_s_result_waits_for_room(make_worker: MakeWorker) -> None:
    spawner = FakeSpawner()
    async with make_worker(spawner, arena_bytes_max=2 * HALF) as worker:
        call = asyncio.ensure_future(worker.call("effect", ["x" * (HALF // 2)]))
        process = spawner.processes[0]
        (execute,) = await process.wait_executes(1)
        assert execute.payload.args_at is not None
        ask(process, execute)
        _, child = await process.wait_executes(2)
        in_arena(LARGE)(process, child)
        link = next(iter(worker._pool._executors.values())).link
        await process.wait_for(lambda: link._for_room)
        assert not any(isinstance(message, ResumeCall) for message in process.received)
        process.send(ArenaReleased(ArenaReleasedPayload([execute.payload.args_at.grant])))
        await process.wait_for(lambda: isinstance(process.received[-1], ResumeCall))
        resume = process.received[-1]
        assert isinstance(resume, ResumeCall)
        assert resume.payload.result_at is not None
        assert resume.payload.result_at.length == len(LARGE)
        process.complete(execute)
        assert await call == 1


# --- the file -------------------------------------------------------------------------------------------------------


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    return Arena(2 * HALF, tmp_path, ExecutorId("exec-1"))


def blocks(arena: Arena) -> int:
    return os.fstat(arena.fd).st_blocks


@pytest.mark.requirement("X95")
def test_the_file_is_sparse_sealed_and_has_no_name(arena: Arena, tmp_path: Path) -> None:
    assert os.fstat(arena.fd).st_size == 2 * HALF
    assert blocks(arena) == 0
    assert list(tmp_path.iterdir()) == []
    if hasattr(os, "memfd_create"):
        for size in (0, 4 * HALF):
            with pytest.raises(PermissionError):
                os.ftruncate(arena.fd, size)
        assert fcntl.fcntl(arena.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL
    arena.close()
    arena.close()


@pytest.mark.requirement("X95")
def test_what_is_released_is_a_hole_again(arena: Arena) -> None:
    first, second = arena.store(LARGE), arena.store(b"y" * 100)
    assert first is not None
    assert second is not None
    assert os.pread(arena.fd, len(LARGE), first.offset) == LARGE
    held = blocks(arena)
    assert held > 0
    arena.release(first.grant)
    arena.release(first.grant)
    if hasattr(os, "memfd_create"):
        assert 0 < blocks(arena) < held
        assert os.pread(arena.fd, 5, first.offset) == bytes(5)
    assert os.pread(arena.fd, 100, second.offset) == b"y" * 100
    arena.release(second.grant)
    if hasattr(os, "memfd_create"):
        assert blocks(arena) == 0
    arena.close()


def test_without_memfd_it_is_a_file_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS: such a file can be cut, which is a short read here and no signal."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.delattr(fcntl, "F_ADD_SEALS", raising=False)
    arena = Arena(2 * HALF, tmp_path, ExecutorId("exec-1"))
    assert list(tmp_path.iterdir()) == []
    os.pwrite(arena.fd, LARGE, HALF)
    assert arena.take(Stored(1, HALF, len(LARGE))) == LARGE
    os.ftruncate(arena.fd, HALF + 10)
    with pytest.raises(ProtocolError, match="ends before byte"):
        arena.take(Stored(1, HALF, len(LARGE)))
    arena.close()
