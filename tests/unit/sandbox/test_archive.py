"""A bundle over the link: the digest's own bytes, and nothing else ever becomes a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callyard.errors import ProtocolError
from callyard.executor.archive import Unpacker, read_parts
from callyard.functions.bundle import Bundle, compute_digest, remove_tree
from callyard.ids import Digest

FILES = {"functions.py": b"x = 1\n", "data/a.bin": bytes(range(256)) * 40, "data/empty": b"", "z.py": b""}


def piece(data: bytes) -> bytes:
    return len(data).to_bytes(8, "big") + data


def archive(*files: tuple[bytes, bytes]) -> bytes:
    return b"".join(piece(name) + piece(content) for name, content in files)


@pytest.mark.requirement("X86")
@pytest.mark.requirement("X46")
@pytest.mark.parametrize("part_bytes", [1, 7, 4_096, 1 << 20])
def test_what_comes_out_is_what_went_in(tmp_path: Path, part_bytes: int) -> None:
    bundle = Bundle("functions", FILES)
    folder = bundle.write_to(tmp_path / "bundles")
    parts = list(read_parts(folder, part_bytes))
    assert {len(part) for part in parts[:-1]} <= {part_bytes}
    unpacker = Unpacker(tmp_path / "here")
    for part in parts:
        unpacker.feed(part)
    unpacker.finish(bundle.digest)
    found = {
        path.relative_to(tmp_path / "here").as_posix(): path.read_bytes()
        for path in (tmp_path / "here").rglob("*")
        if path.is_file()
    }
    assert found == FILES
    assert all(path.stat().st_mode & 0o222 == 0 for path in (tmp_path / "here").rglob("*.py"))
    remove_tree(tmp_path / "bundles")


@pytest.mark.requirement("X46")
@pytest.mark.parametrize(
    "name",
    [b"../out.py", b"/etc/out", b"a/../../out", b"a//b", b"./a", b"a/.", b"", b"a\0b", b"a" * 5_000],
)
def test_a_path_that_leads_elsewhere_is_refused(tmp_path: Path, name: bytes) -> None:
    unpacker = Unpacker(tmp_path / "here")
    with pytest.raises(ProtocolError, match="code archive"):
        unpacker.feed(archive((name, b"x")))
    assert list(tmp_path.rglob("*")) == [tmp_path / "here"]


@pytest.mark.requirement("X46")
@pytest.mark.parametrize(
    "files",
    [[(b"a.py", b""), (b"a.py", b"")], [(b"b.py", b""), (b"a.py", b"")], [(b"a", b""), (b"a/b", b"")]],
    ids=["twice", "out of order", "a file and a folder"],
)
def test_files_that_no_bundle_has_are_refused(tmp_path: Path, files: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(ProtocolError, match="code archive"):
        Unpacker(tmp_path / "here").feed(archive(*files))


@pytest.mark.requirement("X46")
def test_a_size_above_a_bundles_is_refused_before_it_comes(tmp_path: Path) -> None:
    unpacker = Unpacker(tmp_path / "here")
    with pytest.raises(ProtocolError, match="at most"):
        unpacker.feed(piece(b"a.py") + (1 << 40).to_bytes(8, "big"))


@pytest.mark.requirement("X46")
def test_half_an_archive_and_another_one_are_refused(tmp_path: Path) -> None:
    whole = archive((b"a.py", b"x"))
    digest = compute_digest({"a.py": b"x"})
    cut = Unpacker(tmp_path / "cut")
    cut.feed(whole[:-1])
    with pytest.raises(ProtocolError, match="in the middle"):
        cut.finish(digest)
    other = Unpacker(tmp_path / "other")
    other.feed(archive((b"a.py", b"y")))
    with pytest.raises(ProtocolError, match="is another"):
        other.finish(digest)
    good = Unpacker(tmp_path / "good")
    good.feed(whole)
    good.finish(digest)


def test_the_folder_must_be_new(tmp_path: Path) -> None:
    os.symlink(tmp_path, tmp_path / "here")
    with pytest.raises(FileExistsError):
        Unpacker(tmp_path / "here")


@pytest.mark.requirement("X46")
@given(parts=st.lists(st.binary(max_size=60) | st.sampled_from([piece(b"a"), piece(b"b/c"), piece(b".."), piece(b"")])))
def test_any_bytes_are_files_inside_or_refused(tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]) -> None:
    folder = tmp_path_factory.mktemp("any")
    unpacker = Unpacker(folder / "here")
    try:
        for part in parts:
            unpacker.feed(part)
        unpacker.finish(Digest("0" * 64))
    except ProtocolError:
        pass
    assert [path.name for path in folder.iterdir()] == ["here"]
    assert not any(path.is_symlink() for path in folder.rglob("*"))
