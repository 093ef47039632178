"""Reading below a root: what is there, and that nothing leads out. Both ways of opening give the same answers."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from callyard.errors import UsageError
from callyard.ids import TaskId, Tenant
from callyard.worker.io import beneath
from callyard.worker.io.beneath import Escape, has_openat2, open_beneath
from callyard.worker.io.config import RootConfig
from callyard.worker.io.files import FilesProvider
from callyard.worker.io.port import IoFailure, IoScope, Reply

Ask = Callable[..., Awaitable[Reply]]


@pytest.fixture(params=["kernel", "walk"])
def _opener(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test of this file by openat2, where there is one, and by walking."""
    if request.param == "walk":
        monkeypatch.setattr(beneath, "has_openat2", lambda: False)
    elif not has_openat2():
        pytest.skip("no openat2 here")


pytestmark = pytest.mark.usefixtures("_opener")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """`outside/secret` beside the root; in the root files, folders, and links that stay and that leave."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret")
    root = tmp_path / "root"
    (root / "sub" / "deep").mkdir(parents=True)
    (root / "a.txt").write_bytes(b"hello world")
    (root / "sub" / "b.txt").write_text("b")
    (root / "inside").symlink_to("sub/b.txt")
    (root / "sub" / "deep" / "back").symlink_to("../../a.txt")
    (root / "folder").symlink_to("sub")
    (root / "chain").symlink_to("inside")
    (root / "absolute").symlink_to(tmp_path / "outside" / "secret")
    (root / "to_self").symlink_to(root / "a.txt")
    (root / "up").symlink_to("../outside/secret")
    (root / "sub" / "up").symlink_to("../../outside")
    (root / "parent").symlink_to("..")
    (root / "loop").symlink_to("loop")
    (root / "proc").symlink_to("/proc/self/root")
    os.mkfifo(root / "fifo")
    return root


@pytest.fixture
async def provider(root: Path) -> AsyncIterator[FilesProvider]:
    provider = FilesProvider({"data": RootConfig(path=root, max_bytes=20, entries_max=50)})
    await provider.open()
    yield provider
    await provider.close()


@pytest.fixture
def ask(provider: FilesProvider) -> Ask:
    def perform(operation: str, names: tuple[str, ...] | None = None, **request: Any) -> Awaitable[Reply]:
        scope = IoScope(task_id=TaskId("t"), tenant=Tenant("x"), names=names)
        return provider.perform(operation, msgspec.json.encode(request), None, scope)

    return perform


async def refusal(awaitable: Awaitable[Reply]) -> IoFailure:
    with pytest.raises(IoFailure) as caught:
        await awaitable
    return caught.value


@pytest.mark.requirement("X42")
@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("data/a.txt", b"hello world"),
        ("data//./a.txt", b"hello world"),
        ("data/sub/b.txt", b"b"),
        ("data/inside", b"b"),
        ("data/chain", b"b"),
        ("data/folder/b.txt", b"b"),
        ("data/sub/deep/back", b"hello world"),
        ("data/folder/deep/back", b"hello world"),
    ],
)
async def test_what_is_below_is_read(ask: Ask, path: str, content: bytes) -> None:
    assert (await ask("read", path=path)).body == content


@pytest.mark.requirement("X42")
@pytest.mark.parametrize(
    "path",
    [
        *("data/../outside/secret", "data/sub/../a.txt", "data/..", "data//etc/../../outside/secret"),
        *("data/absolute", "data/up", "data/sub/up/secret", "data/parent/outside/secret", "data/to_self"),
        *("data/loop", "data/proc/etc/hostname", "data/fifo"),
    ],
)
async def test_nothing_leads_out(ask: Ask, path: str) -> None:
    assert (await refusal(ask("read", path=path))).kind == "denied"


@pytest.mark.requirement("X42")
@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/etc/passwd", "not_found"),
        ("etc/passwd", "not_found"),
        ("", "not_found"),
        ("..", "not_found"),
        ("data/nothing", "not_found"),
        ("data/a.txt/more", "not_found"),
        ("data//etc/passwd", "not_found"),
        ("data/a\0b", "schema"),
        ("data/sub", "schema"),
        ("data", "schema"),
        ("data/" + "x" * 300, "schema"),
        ("data/" + "x/" * 300, "schema"),
    ],
)
async def test_what_cannot_be_read(ask: Ask, path: str, kind: str) -> None:
    assert (await refusal(ask("read", path=path))).kind == kind


async def test_a_root_not_configured_is_refused_with_the_line_to_add(ask: Ask) -> None:
    failure = await refusal(ask("read", path="logs/x"))
    assert '[io.files] logs = "/…"' in failure.message
    assert failure.details == {"roots": ["data"]}


async def test_a_task_may_have_fewer_roots(ask: Ask) -> None:
    assert (await refusal(ask("read", names=("other",), path="data/a.txt"))).kind == "denied"
    assert (await ask("read", names=("*",), path="data/a.txt")).body == b"hello world"
    assert (await ask("list", names=("other",), path="")).result == b"[]"


@pytest.mark.parametrize(
    ("offset", "length", "content"),
    [(0, 5, b"hello"), (6, None, b"world"), (6, 2, b"wo"), (6, 20, b"world"), (100, None, b""), (0, 0, b"")],
)
async def test_parts(ask: Ask, offset: int, length: int | None, content: bytes) -> None:
    reply = await ask("read", path="data/a.txt", offset=offset, **({} if length is None else {"length": length}))
    assert (reply.body, reply.result) == (content, b'{"size":11}')


@pytest.mark.requirement("X42")
async def test_a_file_above_the_cap_is_read_in_parts_or_not_at_all(ask: Ask, root: Path) -> None:
    (root / "big").write_bytes(b"0123456789" * 3)
    failure = await refusal(ask("read", path="data/big"))
    assert (failure.kind, failure.details["limit"], failure.details["size"]) == ("result", "max_bytes", 30)
    assert "offset and length" in failure.message
    assert (await ask("read", path="data/big", offset=20)).body == b"0123456789"
    assert (await refusal(ask("read", path="data/big", length=21))).kind == "schema"


async def test_listing(ask: Ask) -> None:
    entries = {entry["name"]: entry["kind"] for entry in msgspec.json.decode((await ask("list", path="data")).result)}
    assert list(entries) == sorted(entries)
    assert (entries["a.txt"], entries["sub"], entries["up"], entries["fifo"]) == ("file", "folder", "link", "other")
    roots = msgspec.json.decode((await ask("list", path="")).result)
    assert [(entry["name"], entry["kind"]) for entry in roots] == [("data", "folder")]
    inner = msgspec.json.decode((await ask("list", path="data/folder")).result)
    assert "b.txt" in [entry["name"] for entry in inner]
    assert (await refusal(ask("list", path="data/parent"))).kind == "denied"
    assert (await refusal(ask("list", path="data/a.txt"))).kind == "schema"


async def test_a_long_listing_is_refused(ask: Ask, root: Path) -> None:
    for number in range(60):
        (root / "sub" / f"n{number}").touch()
    failure = await refusal(ask("list", path="data/sub"))
    assert (failure.kind, failure.details["limit"]) == ("result", "entries_max")


async def test_names_that_are_no_utf8_are_listed(ask: Ask, root: Path) -> None:
    try:
        (root / "sub" / os.fsdecode(b"bad\xff")).touch()
    except OSError:
        pytest.skip("this file system takes UTF-8 only")
    entries = msgspec.json.decode((await ask("list", path="data/sub")).result)
    assert "bad\N{REPLACEMENT CHARACTER}" in [entry["name"] for entry in entries]


async def test_stat(ask: Ask) -> None:
    about = msgspec.json.decode((await ask("stat", path="data/inside")).result)
    assert (about["name"], about["kind"], about["size"]) == ("inside", "file", 1)
    assert (await refusal(ask("stat", path="data/up"))).kind == "denied"


@pytest.mark.parametrize("request_", [{}, {"path": 3}, {"path": "data/a.txt", "offset": -1}, {"path": "x", "more": 1}])
async def test_requests_that_do_not_fit(ask: Ask, request_: dict[str, Any]) -> None:
    assert (await refusal(ask("read", **request_))).kind == "schema"
    assert (await refusal(ask("write", **request_))).kind == "schema"


async def test_a_root_that_is_not_there(tmp_path: Path) -> None:
    provider = FilesProvider({"data": RootConfig(path=tmp_path / "nothing")})
    with pytest.raises(UsageError, match=r"io\.files\.data: expected a folder"):
        await provider.open()


@pytest.mark.requirement("X42")
def test_a_folder_swapped_for_a_link_while_it_is_opened_leads_nowhere(root: Path) -> None:
    """A writer swaps `swap` between a folder with a harmless `secret` and a link to the one outside."""
    (root / "plain").mkdir()
    (root / "plain" / "secret").write_text("harmless")
    (root / "out").symlink_to("../outside")
    (root / "swap").symlink_to("plain")
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            for target in ("out", "plain", "../outside", "sub"):
                (root / "next").symlink_to(target)
                (root / "next").rename(root / "swap")

    folder = os.open(root, os.O_RDONLY)
    swapper = threading.Thread(target=swap)
    swapper.start()
    seen: dict[str, int] = {}
    try:
        for _ in range(3_000):
            try:
                found = open_beneath(folder, "swap/secret")
            except Escape:
                text = "escape"
            except FileNotFoundError:
                text = "missing"
            else:
                text = os.read(found, 100).decode()
                os.close(found)
            seen[text] = seen.get(text, 0) + 1
    finally:
        stop.set()
        swapper.join()
        os.close(folder)
    assert set(seen) <= {"escape", "missing", "harmless"}


async def test_no_descriptor_is_left(ask: Ask, provider: FilesProvider) -> None:
    def count() -> int:
        gc.collect()  # of tests before this one
        return len(os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"))

    await ask("read", path="data/a.txt")
    before = count()
    for path in ("data/a.txt", "data/chain", "data/up", "data/loop", "data/nothing/x", "data/fifo", "data/sub"):
        await asyncio.gather(ask("read", path=path), ask("stat", path=path), return_exceptions=True)
    assert count() == before
