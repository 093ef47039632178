"""The SQLite store on a real disk: killed processes, one owner at a time, files that are not its own, a full disk."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from callyard.dispatch.stores import group_commit
from callyard.dispatch.stores.port import Claimed, Full, InFlight, Kept, StoreUnavailable
from callyard.dispatch.stores.sqlite import SCHEMA_VERSION, SqliteKeyStore
from callyard.errors import Outcome, UsageError
from tests.contract.key_stores import (
    BOUND_S,
    MINUTE_MS,
    MONTH_MS,
    FakeWall,
    claim,
    scope,
    success,
    unknown_end,
)

PREAMBLE = """
import asyncio, sys
from callyard.dispatch.stores.port import Claimed, KeyEnd, KeyScope
from callyard.dispatch.stores.sqlite import SqliteKeyStore

END = KeyEnd("c-0", 1, output=b"9")

async def claim(store, key, idempotent=False, call_id="c-0"):
    scope = KeyScope("default", "charge", key)
    return await store.claim(scope, "f", call_id, idempotent=idempotent, unknown_ttl_ms=60_000_000)
"""


def child(program: str, *args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(program), *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=BOUND_S)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.db"


async def opened(path: Path, **options: Any) -> SqliteKeyStore:
    store = SqliteKeyStore(path, **{"lock_wait_ms": 0, **options})
    await store.open()
    return store


@pytest.mark.requirement("D21", "D19")
async def test_killed_while_it_runs(path: Path) -> None:
    """The claim that `claim` returned is on disk, whatever becomes of the process."""
    process = child(
        """
        async def main():
            store = SqliteKeyStore(sys.argv[1])
            await store.open()
            await claim(store, "charge", False, "c-1")
            await claim(store, "look-up", True, "c-2")
            done = await claim(store, "done", False, "c-3")
            await store.settle(KeyScope("default", "charge", "done"), done.fence, END, 60_000_000)
            print("claimed", flush=True)
            await asyncio.Event().wait()
        asyncio.run(main())
        """,
        path,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "claimed\n"
        process.send_signal(signal.SIGKILL)
        process.wait(BOUND_S)
    finally:
        finish(process)
    store = await opened(path)
    got = await claim(store, scope("charge"))
    assert isinstance(got, Kept)
    assert got.end.call_id == "c-1"
    assert got.end.failure is not None
    assert got.end.failure.outcome is Outcome.UNKNOWN
    assert isinstance(await claim(store, scope("look-up")), Claimed)
    done = await claim(store, scope("done"))
    assert isinstance(done, Kept)
    assert done.end.output == b"9"
    await store.close()


@pytest.mark.requirement("D21")
async def test_killed_while_it_claims(path: Path) -> None:
    """Each key that was told to be ours is there afterwards; the file is whole."""
    process = child(
        """
        async def one(store, number):
            got = await claim(store, f"k{number}")
            print(f"k{number}", flush=True)
            if number % 3 == 0:
                await store.settle(KeyScope("default", "charge", f"k{number}"), got.fence, END, 60_000_000)

        async def main():
            store = SqliteKeyStore(sys.argv[1])
            await store.open()
            first = 0
            while True:
                await asyncio.gather(*(one(store, number) for number in range(first, first + 20)))
                first += 20
        asyncio.run(main())
        """,
        path,
    )
    told = []
    try:
        assert process.stdout is not None
        while len(told) < 150:
            told.append(process.stdout.readline().strip())
        process.kill()
        told += [line.strip() for line in process.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
    finally:
        finish(process)
    store = await opened(path)
    for key in told:
        assert isinstance(await claim(store, scope(key)), Kept), key
    await store.close()
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


@pytest.mark.requirement("D21")
async def test_one_process_claims_at_a_time(path: Path) -> None:
    process = child(
        """
        async def main():
            store = SqliteKeyStore(sys.argv[1])
            await store.open()
            print("open", flush=True)
            sys.stdin.readline()
        asyncio.run(main())
        """,
        path,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        with pytest.raises(UsageError, match=rf"in use by process {process.pid}.*Redis"):
            await opened(path)
        waiting = asyncio.create_task(opened(path, lock_wait_ms=BOUND_S * 1_000))
        process.kill()
        store = await waiting
        await store.close()
    finally:
        finish(process)


@pytest.mark.requirement("D55")
async def test_another_process_lists_and_resolves_beside_the_owner(path: Path) -> None:
    store = await opened(path)
    for key in ("a", "b"):
        got = await claim(store, scope(key))
        assert isinstance(got, Claimed)
        await store.settle(scope(key), got.fence, unknown_end(), MONTH_MS)
    running = await claim(store, scope("running"))
    assert isinstance(running, Claimed)
    process = child(
        """
        async def main():
            store = SqliteKeyStore(sys.argv[1], owner=False)
            await store.open()
            keys = [record.scope.key for record in await store.unknown()]
            resolved = await store.resolve(KeyScope("default", "charge", "a"), END, 60_000_000)
            freed = await store.resolve(KeyScope("default", "charge", "b"), None, 0)
            refused = await store.resolve(KeyScope("default", "charge", "running"), None, 0)
            await store.close()
            print(keys, resolved, freed, refused)
        asyncio.run(main())
        """,
        path,
    )
    told, _ = await asyncio.to_thread(process.communicate, timeout=BOUND_S)
    assert told == "['a', 'b'] True True False\n"
    got = await claim(store, scope("a"))
    assert isinstance(got, Kept)
    assert got.end.output == b"9"
    assert isinstance(await claim(store, scope("b")), Claimed)
    assert isinstance(await claim(store, scope("running")), InFlight), "the owner lives: its run is not lost"
    await store.close()


@pytest.mark.requirement("D55")
async def test_an_operator_without_owner_sees_what_the_dead_one_left(path: Path) -> None:
    store = await opened(path)
    await claim(store, scope("lost"))
    await store.close()
    operator = await opened(path, owner=False)
    assert [record.scope for record in await operator.unknown()] == [scope("lost")]
    with pytest.raises(UsageError, match="owner=False"):
        await claim(operator, scope("x"))
    store = await opened(path)  # beside it: the operator holds no lock
    assert await operator.resolve(scope("lost"), None, 0)
    assert isinstance(await claim(store, scope("lost"), "g"), Claimed)
    await operator.close()
    await store.close()


@pytest.mark.requirement("D55")
async def test_an_operator_needs_a_store(path: Path) -> None:
    with pytest.raises(UsageError, match="no key store at"):
        await opened(path, owner=False)
    assert not path.exists()


@pytest.mark.requirement("D21")
async def test_what_an_owner_in_the_same_process_holds_is_locked_too(path: Path) -> None:
    store = await opened(path)
    with pytest.raises(UsageError, match="in use"):
        await opened(path)
    await store.close()
    again = await opened(path)
    await again.close()


def other_database(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE theirs (x)")
    connection.commit()
    connection.close()


def newer_store(path: Path) -> None:
    asyncio.run(create_store(path))
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.commit()
    connection.close()


def damaged_store(path: Path) -> None:
    asyncio.run(create_store(path))
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xa5" * (len(content) - 4096)
    path.write_bytes(content)


async def create_store(path: Path) -> None:
    store = await opened(path)
    for number in range(50):
        await claim(store, scope(f"k{number}"))
    await store.close()


@pytest.mark.requirement("D21")
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda path: path.write_bytes(b"name,amount\n" * 500), "not a database"),
        (lambda path: path.write_bytes(b"x"), "not a database"),
        (lambda path: path.write_bytes(b"y" * 101), "not a database"),
        (other_database, "another program"),
        (newer_store, f"format {SCHEMA_VERSION + 1}"),
        (damaged_store, "damaged|malformed"),
    ],
    ids=["text", "one byte", "short", "other database", "newer", "damaged"],
)
@pytest.mark.parametrize("owner", [True, False])
def test_a_file_that_is_not_its_own_is_left_as_it_is(path: Path, make: Any, told: str, owner: bool) -> None:
    make(path)
    before = path.read_bytes()
    with pytest.raises(UsageError, match=told) as refused:
        asyncio.run(opened(path, owner=owner))
    assert str(path) in str(refused.value)
    assert path.read_bytes() == before
    assert not Path(f"{path}-wal").exists()


@pytest.mark.requirement("D21")
async def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="folder must exist"):
        await opened(tmp_path / "none" / "keys.db")
    with pytest.raises(UsageError, match="cannot be opened"):
        await opened(tmp_path)


@pytest.mark.requirement("D21")
async def test_an_empty_file_becomes_a_store(path: Path) -> None:
    """Such as a process leaves that is killed between making the file and its first transaction."""
    path.touch()
    store = await opened(path)
    assert isinstance(await claim(store, scope()), Claimed)
    await store.close()


@pytest.mark.requirement("D55")
async def test_files_are_for_their_user_only(path: Path) -> None:
    before = os.umask(0)
    try:
        store = await opened(path)
        await claim(store, scope())
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    finally:
        os.umask(before)
    await store.close()
    assert modes == {"keys.db": 0o600, "keys.db-wal": 0o600, "keys.db-shm": 0o600, "keys.db.lock": 0o600}


@pytest.mark.requirement("D20")
async def test_a_full_store_takes_no_new_key(path: Path) -> None:
    wall = FakeWall()
    store = await opened(path, bytes_max=200_000, now_ms=wall.now_ms)
    kept = 0
    while True:
        got = await claim(store, scope(f"k{kept}"), idempotent=True)
        if not isinstance(got, Claimed):
            break
        assert await store.settle(scope(f"k{kept}"), got.fence, success(output=b"1" * 20_000), MINUTE_MS + kept)
        kept += 1
    assert got == Full(retry_after_ms=MINUTE_MS)
    assert 5 <= kept <= 11
    assert isinstance(await claim(store, scope("k0")), Kept), "what is kept is answered"
    for number in range(100):  # what expires is taken away, and its room used again
        wall.ms += MINUTE_MS + kept
        got = await claim(store, scope(f"again {number}"), idempotent=True)
        assert isinstance(got, Claimed), number
        assert await store.settle(scope(f"again {number}"), got.fence, success(output=b"1" * 20_000), MINUTE_MS)
    assert path.stat().st_size < 400_000
    await store.close()


@pytest.mark.requirement("D20", "D21")
def test_a_full_disk_makes_it_unavailable_and_loses_no_key(path: Path) -> None:
    """A limit on file sizes stands for the disk: writes fail at the same place, for every user."""
    process = child(
        """
        import resource, signal
        from callyard.dispatch.stores.port import Kept, StoreUnavailable

        async def main():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            store = SqliteKeyStore(sys.argv[1])
            await store.open()
            held = await claim(store, "held")
            scope = KeyScope("default", "charge", "held")
            end = KeyEnd("c-0", 1, output=b"1" * 100_000)
            resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
            for work in (store.settle(scope, held.fence, end, 60_000), claim(store, "x" * 250 + "1")):
                try:
                    while True:
                        await work
                        work = claim(store, "x" * 250 + str(id(work)))
                except StoreUnavailable as error:
                    print("unavailable:", error)
            try:
                print("held:", await claim(store, "held"))
            except StoreUnavailable as error:
                print("unavailable:", error)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            assert isinstance(await claim(store, "held"), Kept), "not lost: written when it is asked for"
            await store.close()
            print("fine")
        asyncio.run(main())
        """,
        path,
    )
    told, _ = process.communicate(timeout=BOUND_S)
    lines = told.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["unavailable", "unavailable", "unavailable", "fine"], told


@pytest.mark.requirement("D21")
async def test_what_is_asked_meanwhile_shares_a_commit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[int] = []
    commit = group_commit.GroupCommit._commit

    def counted(self: Any, group: list[Any]) -> Any:
        groups.append(len(group))
        return commit(self, group)

    monkeypatch.setattr(group_commit.GroupCommit, "_commit", counted)
    store = await opened(path)
    answers = await asyncio.gather(*(claim(store, scope(f"k{number}")) for number in range(200)))
    await store.close()
    assert all(isinstance(answer, Claimed) for answer in answers)
    assert sum(groups) == 200
    assert len(groups) < 150


@pytest.mark.requirement("D21")
async def test_one_that_fails_fails_alone(path: Path) -> None:
    store = await opened(path)
    bad = scope("\ud800")
    answers = await asyncio.gather(
        *(claim(store, bad if number == 5 else scope(f"k{number}")) for number in range(10)), return_exceptions=True
    )
    assert [isinstance(answer, Claimed) for answer in answers] == [number != 5 for number in range(10)]
    assert isinstance(answers[5], UnicodeEncodeError)
    await store.close()


@pytest.mark.requirement("D21")
async def test_a_closed_store_is_unavailable(path: Path) -> None:
    store = SqliteKeyStore(path)
    with pytest.raises(StoreUnavailable, match="not open"):
        await claim(store, scope())
    await store.open()
    await store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        await claim(store, scope())


@pytest.mark.requirement("D21")
async def test_what_was_asked_before_close_is_done(path: Path) -> None:
    store = await opened(path)
    asked = [asyncio.ensure_future(claim(store, scope(f"k{number}"))) for number in range(50)]
    await asyncio.sleep(0)
    await store.close()
    assert all(isinstance(answer, Claimed) for answer in await asyncio.gather(*asked))


@pytest.mark.requirement("D21")
async def test_opening_that_is_cancelled_leaves_no_lock(path: Path) -> None:
    task = asyncio.create_task(SqliteKeyStore(path).open())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    store = await opened(path, lock_wait_ms=BOUND_S * 1_000)
    await store.close()


@pytest.mark.requirement("D21")
async def test_commits_wait_for_the_disk(path: Path) -> None:
    """What a test cannot do is cut the power; what SQLite promises for it hangs on these."""
    store = await opened(path)
    names = ("journal_mode", "synchronous", "fullfsync")
    modes = await store._submit(lambda connection: [connection.execute(f"PRAGMA {n}").fetchone()[0] for n in names])
    await store.close()
    assert modes == ["wal", 2, 1]
