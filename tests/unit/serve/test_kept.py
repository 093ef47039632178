"""Results too large for an answer: the beginning at once, the whole for a time, for its tenant alone."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from callyard.dispatch.outcomes import DispatchError, Ok
from callyard.errors import CallError, ErrorKind, UsageError, fail
from callyard.ids import CallId, Tenant
from callyard.serve import kept as module
from callyard.serve.gateway import Caller
from callyard.serve.kept import KeptResults, encode_envelope
from callyard.timers import LoopTimers

ACME, OTHER = Caller(tenant=Tenant("acme")), Caller(tenant=Tenant("other"))


class ManualTimers(LoopTimers):
    """The loop's, plus what the test adds."""

    def __init__(self) -> None:
        self.added_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.added_ms


@asynccontextmanager
async def opened(folder: Path, **settings: Any) -> AsyncIterator[KeptResults]:
    kept = KeptResults(folder, **{"max_result_bytes": 1_000, "kept_ms": 60_000, "bytes_max": 10_000, **settings})
    await kept.open()
    try:
        yield kept
    finally:
        await kept.close()


def ok(size: int, letter: str = "x") -> Ok:
    return Ok(CallId("c-1"), msgspec.json.encode(letter * (size - 2)))


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def wait_for_files(folder: Path, count: int) -> None:
    async with asyncio.timeout(20):
        while len(files(folder)) != count:
            await asyncio.sleep(0.01)


async def test_a_small_result_and_a_failure_are_answered_as_they_are(tmp_path: Path) -> None:
    async with opened(tmp_path / "kept") as kept:
        assert await kept.shorten(ACME, ok(1_000)) is None
        assert await kept.shorten(ACME, DispatchError(CallId("c"), fail(ErrorKind.INTERNAL, "m" * 5_000))) is None
        assert len(kept) == 0


async def test_a_large_one_has_a_preview_and_can_be_read_by_its_tenant(tmp_path: Path) -> None:
    async with opened(tmp_path / "kept") as kept:
        result = ok(3_000, "é"[0])
        preview = await kept.shorten(ACME, result)
        assert preview is not None
        assert preview.size_bytes == len(result.output)
        assert len(preview.text.encode()) in (1_023, 1_024)  # never half a letter
        assert result.output.decode().startswith(preview.text)
        assert preview.kept_ms == 60_000
        assert await kept.read(ACME, preview.kept_id) == result.output
        for kept_id in ("", "../kept", preview.kept_id + "x", "a/b", preview.kept_id.upper()):
            assert await kept.read(ACME, kept_id) is None
        assert await kept.read(OTHER, preview.kept_id) is None
        image = await kept.put(ACME, b"\x89PNG", "image/png", "a.png")
        found = await kept.find(ACME, image)
        assert found is not None
        assert (found.data, found.mime_type, found.name) == (b"\x89PNG", "image/png", "a.png")


async def test_files_are_their_owners_alone(tmp_path: Path) -> None:
    async with opened(tmp_path / "kept") as kept:
        await kept.shorten(ACME, ok(2_000))
        (name,) = files(tmp_path / "kept")
        assert stat.S_IMODE((tmp_path / "kept").stat().st_mode) == 0o700
        assert stat.S_IMODE((tmp_path / "kept" / name).stat().st_mode) == 0o600


async def test_the_oldest_go_when_the_room_is_used_up(tmp_path: Path) -> None:
    async with opened(tmp_path / "kept", bytes_max=5_000) as kept:
        previews = [await kept.shorten(ACME, ok(2_000)) for _ in range(4)]
        ids = [preview.kept_id for preview in previews if preview is not None]
        assert [await kept.read(ACME, kept_id) is not None for kept_id in ids] == [False, False, True, True]
        assert (kept.held_bytes, kept.dropped_total) == (4_000, 2)
        assert len(files(tmp_path / "kept")) == 2
        too_large = await kept.shorten(ACME, ok(6_000))
        assert too_large is not None
        assert (too_large.kept_id, too_large.kept_ms) == ("", 0)
        assert len(kept) == 2


@pytest.mark.requirement("D44")
async def test_no_tenant_pushes_out_what_another_keeps(tmp_path: Path) -> None:
    async with opened(tmp_path / "kept", bytes_max=10_000) as kept:
        small = [await kept.put(OTHER, b"1" * 1_000) for _ in range(3)]
        flood = [await kept.put(ACME, b"2" * 2_000) for _ in range(20)]
        assert [await kept.read(OTHER, kept_id) is not None for kept_id in small] == [True] * 3
        assert [await kept.read(ACME, kept_id) is not None for kept_id in flood] == [False] * 17 + [True] * 3
        third = Caller(tenant=Tenant("third"))
        more = [await kept.put(third, b"3" * 3_000) for _ in range(2)]  # its part is taken from who has most
        assert [await kept.read(third, kept_id) is not None for kept_id in more] == [False, True]
        assert [await kept.read(OTHER, kept_id) is not None for kept_id in small] == [True] * 3
        assert kept.held_bytes <= 10_000
        assert kept.held_bytes == sum(held.bytes for held in kept._held.values())
        empty = await kept.put(third, b"")
        assert await kept.read(third, empty) == b""
        assert len(files(tmp_path / "kept")) == len(kept)


async def test_nor_by_one_that_is_larger_than_its_part(tmp_path: Path) -> None:
    async with opened(tmp_path) as kept:
        small = await kept.put(OTHER, b"x" * 4_000)
        assert await kept.put(ACME, b"x" * 9_000) == ""
        assert (await kept.read(OTHER, small), kept.held_bytes) == (b"x" * 4_000, 4_000)
        assert await kept.put(ACME, b"x" * 6_000)
        assert await kept.put(OTHER, b"x" * 1_000)  # who holds most makes room
        assert await kept.read(OTHER, small)
        assert (len(kept), kept.held_bytes) == (2, 5_000)


async def test_nor_by_their_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENTRIES_MAX", 5)
    async with opened(tmp_path / "kept") as kept:
        theirs = await kept.put(OTHER, b"1")
        ours = [await kept.put(ACME, b"2") for _ in range(20)]
        assert await kept.read(OTHER, theirs) == b"1"
        assert [await kept.read(ACME, kept_id) is not None for kept_id in ours] == [False] * 16 + [True] * 4


async def test_what_is_just_being_written_has_its_room(tmp_path: Path) -> None:
    async with opened(tmp_path / "kept", bytes_max=5_000) as kept:
        ids = await asyncio.gather(*(kept.put(ACME, b"1" * 2_000) for _ in range(5)))
        assert sum(map(bool, ids)) == 2
        assert (kept.held_bytes, len(kept)) == (4_000, 2)


async def test_what_is_over_its_time_is_gone_from_disk(tmp_path: Path) -> None:
    clock = ManualTimers()
    async with opened(tmp_path / "kept", clock=clock) as kept:
        preview = await kept.shorten(ACME, ok(2_000))
        assert preview is not None
        clock.added_ms = 60_001
        assert await kept.read(ACME, preview.kept_id) is None
        await wait_for_files(tmp_path / "kept", 0)
        assert kept.held_bytes == 0


async def test_time_runs_out_although_nobody_asks(tmp_path: Path) -> None:
    async with opened(tmp_path / "kept", kept_ms=30) as kept:
        await kept.shorten(ACME, ok(2_000))
        await wait_for_files(tmp_path / "kept", 0)
        assert len(kept) == 0


async def test_a_start_removes_what_a_killed_server_left_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    (folder / "0123.json").write_text("left")
    (folder / "notes.txt").write_text("somebody's")
    async with opened(folder) as kept:
        assert await kept.read(ACME, "0123") is None
        assert files(folder) == ["notes.txt"]
        await kept.shorten(ACME, ok(2_000))
    assert files(folder) == ["notes.txt"]


async def test_a_disk_that_refuses_leaves_the_preview(tmp_path: Path) -> None:
    async with opened(tmp_path / "kept") as kept:
        os.rmdir(tmp_path / "kept")
        preview = await kept.shorten(ACME, ok(2_000))
        assert preview is not None
        assert preview.kept_id == ""
        assert (len(kept), kept.held_bytes) == (0, 0)


async def test_a_folder_that_cannot_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="kept results need a folder"):
        async with opened(tmp_path / "file" / "kept"):
            pass


async def test_a_writer_that_is_cancelled_leaves_nothing_that_is_not_counted(tmp_path: Path) -> None:
    async with opened(tmp_path / "kept") as kept:
        for turns in range(4):
            keeping = asyncio.ensure_future(kept.shorten(ACME, ok(2_000)))
            for _ in range(turns):
                await asyncio.sleep(0)
            keeping.cancel()
            await asyncio.wait({keeping})
        assert kept.held_bytes == 2_000 * len(kept)
    assert files(tmp_path / "kept") == []


def test_envelopes_say_no_more_than_a_caller_may_read() -> None:
    assert msgspec.json.decode(encode_envelope(ok(10))) == {"ok": True, "call_id": "c-1", "output": "x" * 8}
    failed = DispatchError(CallId("c-2"), fail(ErrorKind.INTERNAL, "KeyError: /home/secret", stack="private"))
    told = msgspec.json.decode(encode_envelope(failed))
    assert (told["ok"], told["error"]["kind"]) == (False, "internal")
    assert "secret" not in str(told)
    assert "private" not in str(told)


@pytest.mark.requirement("D36")
async def test_answers_under_way_have_room_and_give_it_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READING_BYTES_MAX", 5_000)
    async with opened(tmp_path) as kept:
        kept_id = await kept.put(ACME, b"1" * 3_000)
        end = kept.begin_reading(ACME, kept_id)
        with pytest.raises(CallError) as refused:
            kept.begin_reading(ACME, kept_id)
        assert refused.value.failure.kind is ErrorKind.UNAVAILABLE
        kept.begin_reading(OTHER, kept_id)()  # there is none for it: it takes no room
        end()
        end()
        assert kept.reading_bytes == 0
        kept.begin_reading(ACME, kept_id)()


@pytest.mark.requirement("D44")
async def test_one_tenant_reads_at_most_half_of_it_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READING_BYTES_MAX", 8_000)
    async with opened(tmp_path) as kept:
        ours, theirs = await kept.put(ACME, b"1" * 3_000), await kept.put(OTHER, b"2" * 3_000)
        ends = [kept.begin_reading(ACME, ours)]
        with pytest.raises(CallError):
            kept.begin_reading(ACME, ours)
        ends.append(kept.begin_reading(OTHER, theirs))
        for end in ends:
            end()
        assert (kept.reading_bytes, len(kept._reading)) == (0, 0)


async def test_one_larger_than_all_room_is_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READING_BYTES_MAX", 1_000)
    async with opened(tmp_path) as kept:
        end = kept.begin_reading(ACME, await kept.put(ACME, b"1" * 3_000))
        assert kept.reading_bytes == 3_000
        end()
