"""Which files belong to a target, and under which digest."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
import threading
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from callyard.errors import UsageError
from callyard.functions import bundle as bundle_module
from callyard.functions.bundle import Bundle, compute_digest, remove_tree
from tests.unit.functions.conftest import WriteFiles

FUNCTION = "def f(): ...\n"


def names(bundle: Bundle) -> list[str]:
    return list(bundle.files)


# --- what belongs to it ---------------------------------------------------------------------------------------------


def test_a_single_file(project: WriteFiles) -> None:
    root = project({"flights.py": FUNCTION, "other.py": FUNCTION, "data.csv": "a\n"})
    bundle = Bundle.collect(root / "flights.py")
    assert (bundle.module, names(bundle), bundle.imports) == ("flights", ["flights.py"], ())
    assert bundle.files["flights.py"] == FUNCTION.encode()


def test_imports_are_followed_absolute_relative_and_inside_functions(project: WriteFiles) -> None:
    root = project(
        {
            "flights.py": """
                import geo
                from tools import units as u, missing_attribute
                import json, numpy.linalg
                def f():
                    from tools.deep.lake import water
            """,
            "geo.py": "import msgspec\nfrom spaces.inner import plain\n",
            "tools/__init__.py": "from .extra import *\n",
            "tools/extra.py": "",
            "tools/units.py": "from . import constants\nfrom .deep import lake\nfrom .. import nowhere\n",
            "tools/constants.py": "",
            "tools/unused.py": "",
            "tools/deep/__init__.py": "",
            "tools/deep/lake.py": "from ..constants import one\nfrom ...beyond import two\n",
            "spaces/inner/plain.py": "from . import beside\n",
            "spaces/inner/beside.py": "",
            "spaces/inner/unused.py": "",
            "unused.py": "",
        }
    )
    bundle = Bundle.collect(root / "flights.py")
    assert names(bundle) == [
        *("flights.py", "geo.py", "spaces/inner/beside.py", "spaces/inner/plain.py"),
        *("tools/__init__.py", "tools/constants.py", "tools/deep/__init__.py", "tools/deep/lake.py"),
        *("tools/extra.py", "tools/units.py"),
    ]
    assert bundle.imports == ("msgspec", "numpy")


def test_a_target_inside_a_package_has_the_folder_above_as_its_root(project: WriteFiles) -> None:
    root = project(
        {
            "app/__init__.py": "from .settings import one\n",
            "app/settings.py": "",
            "app/jobs/__init__.py": "",
            "app/jobs/flights.py": "from ..shared import x\nimport app.extra\nimport top\n",
            "app/shared.py": "",
            "app/extra.py": "",
            "top.py": "",
        }
    )
    bundle = Bundle.collect(root / "app" / "jobs" / "flights.py")
    assert bundle.module == "app.jobs.flights"
    assert names(bundle) == [
        *("app/__init__.py", "app/extra.py", "app/jobs/__init__.py", "app/jobs/flights.py", "app/settings.py"),
        *("app/shared.py", "top.py"),
    ]
    package = Bundle.collect(root / "app" / "__init__.py")
    assert (package.module, names(package)) == ("app", ["app/__init__.py", "app/settings.py"])


def test_installed_packages_and_environments_are_outside(project: WriteFiles) -> None:
    root = project(
        {
            "flights.py": "import venv, env.tool, callyard, build, node_modules\nfrom __pycache__ import x\n",
            "venv/pyvenv.cfg": "",
            "venv/__init__.py": "",
            "env/pyvenv.cfg": "",
            "env/tool.py": "",
            "__pycache__/x.py": "",
            "node_modules/__init__.py": "",
            "callyard/__init__.py": "",
            "build/__init__.py": "",
        }
    )
    assert names(Bundle.collect(root / "flights.py")) == ["build/__init__.py", "flights.py"]


def test_extension_modules_belong_to_it(project: WriteFiles) -> None:
    suffix = EXTENSION_SUFFIXES[0]
    root = project({"flights.py": "import fast\n", f"fast{suffix}": b"\x7fELF"})
    assert names(Bundle.collect(root / "flights.py")) == [f"fast{suffix}", "flights.py"]


def test_include_globs_add_files_below_the_root(project: WriteFiles) -> None:
    root = project(
        {
            "flights.py": FUNCTION,
            "data/airports.csv": "a\n",
            "data/.hidden.csv": "a\n",
            "data/deep/more.csv": "b\n",
            ".git/config.csv": "c\n",
            "plugins/one.py": "import helper\n",
            "helper.py": "",
        }
    )
    bundle = Bundle.collect(root / "flights.py", ["data/**/*.csv", "plugins/*.py"])
    assert names(bundle) == ["data/airports.csv", "data/deep/more.csv", "flights.py", "helper.py", "plugins/one.py"]


@pytest.mark.parametrize("pattern", ["/etc/*", "../*", "data/../../*", "", " "])
def test_an_include_outside_the_root_is_refused(project: WriteFiles, pattern: str) -> None:
    root = project({"flights.py": FUNCTION})
    with pytest.raises(UsageError, match="expected a glob below the project root"):
        Bundle.collect(root / "flights.py", [pattern])


def test_an_include_that_matches_nothing_is_refused(project: WriteFiles) -> None:
    root = project({"flights.py": FUNCTION, ".hidden/a.csv": "x"})
    for pattern in ("*.csv", ".hidden/*"):
        with pytest.raises(UsageError, match="matches no file below"):
            Bundle.collect(root / "flights.py", [pattern])


@pytest.mark.parametrize(
    ("folder", "pattern", "meant"),
    [
        (".", "src/shop/data/*.csv", ": did you mean 'shop/data/*.csv'?"),
        ("src/shop", "data/*.csv", ": did you mean 'shop/data/*.csv'?"),
        (".", "src/shop/data/*.txt", ""),
        (".", "lib/*.csv", ""),
    ],
)
def test_an_include_from_the_current_folder_is_guessed(
    project: WriteFiles, monkeypatch: pytest.MonkeyPatch, folder: str, pattern: str, meant: str
) -> None:
    root = project(
        {"src/shop/__init__.py": "", "src/shop/prices.py": FUNCTION, "src/shop/data/a.csv": "x", "lib/b.csv": "x"}
    )
    monkeypatch.chdir(root / folder)
    with pytest.raises(UsageError) as caught:
        Bundle.collect(root / "src/shop/prices.py", [pattern])
    assert str(caught.value) == f"include {pattern!r} matches no file below {root / 'src'}, where imports start{meant}"


def test_too_much_is_refused(project: WriteFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    root = project({"flights.py": FUNCTION, "big.bin": b"x" * 2_000})
    monkeypatch.setattr(bundle_module, "BUNDLE_BYTES_MAX", 1_000)
    with pytest.raises(UsageError, match=r"exceed 1000 bytes or 10000 files at big\.bin: include less"):
        Bundle.collect(root / "flights.py", ["*.bin"])


def test_a_broken_sibling_is_left_to_its_import(project: WriteFiles) -> None:
    root = project(
        {"flights.py": "try:\n    import old\nexcept SyntaxError:\n    old = None\n", "old.py": "print 'x'\n"}
    )
    assert names(Bundle.collect(root / "flights.py")) == ["flights.py", "old.py"]


def test_nothing_is_imported_and_later_edits_change_nothing(project: WriteFiles) -> None:
    root = project({"flights.py": "raise SystemExit('imported')\n"})
    bundle = Bundle.collect(root / "flights.py")
    (root / "flights.py").write_text("edited")
    assert bundle.files["flights.py"] == b"raise SystemExit('imported')\n"


def test_invalid_escapes_in_a_source_warn_nobody(project: WriteFiles) -> None:
    root = project({"flights.py": b'PATTERN = "\\d"\n'})
    assert Bundle.collect(root / "flights.py").module == "flights"


# --- targets that are none ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("flights.py", "def f(:\n    pass\n", r"flights\.py:1: SyntaxError: .*\n    def f\(:\n +\^"),
        ("flights.py", "x = 1\nif x:\n    y = (1\n", r"flights\.py:3: SyntaxError: '\(' was never closed"),
        ("flights.py", "if 1:\nx = 1\n", r"flights\.py:2: IndentationError: expected an indented block"),
        ("flights.py", b"x = '\xe9'\n", r"flights\.py:1: not UTF-8 \(byte 0xe9 at 5\): save it as UTF-8"),
        ("flights.py", b"a = 1\nb = 2\nc = 3\nd = '\xff'\n", r"flights\.py:4: not UTF-8 \(byte 0xff at 23\)"),
        ("flights.py", "x = 1\n".encode("utf-16"), r"flights\.py:1: not UTF-8 \(byte 0xff at 0\)"),
        ("flights.py", "# coding: klingon\n", r"flights\.py: unknown encoding: klingon"),
        ("flights.py", b"x = 1\0\n", r"flights\.py.*null bytes"),
        ("flights.py", "", r"flights\.py is empty: expected a Python file with at least one function"),
        ("flights.py", " \n\n", r"flights\.py is empty"),
        ("flights.py", "x = " + "(" * 5_000, r"flights\.py"),
        ("flights.txt", FUNCTION, r"flights\.txt does not end in \.py: expected a Python file"),
        ("flights", FUNCTION, r"flights does not end in \.py"),
        ("my.flights.py", FUNCTION, r"a dot in a module's name means a package: call it my_flights\.py"),
    ],
)
def test_a_file_that_is_no_source_text(project: WriteFiles, name: str, content: str | bytes, message: str) -> None:
    root = project({name: content})
    with pytest.raises(UsageError, match=message):
        Bundle.collect(root / name)


def test_a_target_that_is_no_file(project: WriteFiles) -> None:
    root = project({"flights.py": FUNCTION, "pkg/__init__.py": FUNCTION})
    with pytest.raises(UsageError, match=r"flight\.py does not exist: expected a Python file.*there are flights\.py"):
        Bundle.collect(root / "flight.py")
    with pytest.raises(UsageError, match=r"there is no folder .*nowhere"):
        Bundle.collect(root / "nowhere" / "flights.py")
    with pytest.raises(UsageError, match=r"is a folder with several targets in it: name one of .*flights\.py, .*pkg"):
        Bundle.collect(root)
    with pytest.raises(UsageError, match="is no file name"):
        Bundle.collect("fli\0ghts.py")
    with pytest.raises(UsageError, match="Not a directory"):
        Bundle.collect(root / "flights.py" / "f.py")
    fifo = root / "pipe.py"
    os.mkfifo(fifo)
    with pytest.raises(UsageError, match="is not a regular file"):
        Bundle.collect(fifo)


def test_other_encodings_marks_and_names_work(project: WriteFiles) -> None:
    root = project(
        {
            "latin.py": b"# -*- coding: latin-1 -*-\nx = '\xe9'\n",
            "marked.py": b"\xef\xbb\xbfimport geo\r\n",
            "my-flights.py": "import geo\n",
            "geo.py": "",
        }
    )
    assert Bundle.collect(root / "latin.py").module == "latin"
    assert names(Bundle.collect(root / "marked.py")) == ["geo.py", "marked.py"]
    assert Bundle.collect(root / "my-flights.py").module == "my-flights"


def test_a_relative_path_and_a_link_work(project: WriteFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    root = project({"flights.py": "import geo\n", "geo.py": "", "elsewhere/x.txt": ""})
    monkeypatch.chdir(root)
    assert names(Bundle.collect("flights.py")) == ["flights.py", "geo.py"]
    assert names(Bundle.collect("./elsewhere/../flights.py")) == ["flights.py", "geo.py"]
    (root / "link.py").symlink_to(root / "flights.py")
    assert names(Bundle.collect("link.py")) == ["geo.py", "link.py"]


# --- digest ---------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X86")
def test_the_digest_is_over_sorted_paths_and_contents_with_their_lengths() -> None:
    expected = hashlib.blake2b(digest_size=32)
    for part in (b"a/b.py", b"import c\n", b"c.py", b"", "é.csv".encode(), b"\x00\xff"):
        expected.update(len(part).to_bytes(8, "big") + part)
    files = {"é.csv": b"\x00\xff", "c.py": b"", "a/b.py": b"import c\n"}
    assert compute_digest(files) == expected.hexdigest()
    assert Bundle("c", files).digest == expected.hexdigest()


@pytest.mark.requirement("X86")
def test_a_digest_that_never_changes() -> None:
    """The golden vector: a change of the rule would orphan every stored result."""
    files = {"flights.py": b"def f(): ...\n", "geo.py": b""}
    assert compute_digest(files) == GOLDEN


GOLDEN = "07c5df9a3741471d84625a3afa9d8c0d281e895256deccac1022df62852c0cca"


@pytest.mark.requirement("X86")
def test_neither_a_moved_border_nor_a_name_gives_the_same_digest() -> None:
    digests = {
        compute_digest(files)
        for files in (
            {"a": b"bc"},
            {"ab": b"c"},
            {"a": b"b", "c": b""},
            {"a": b"", "b": b"c"},
            {},
            {"a": b"bc", "b": b""},
        )
    }
    assert len(digests) == 6


@pytest.mark.requirement("X86")
def test_same_bytes_same_digest_wherever_they_lie(project: WriteFiles, tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {
        "flights.py": "import tools.units\n",
        "tools/__init__.py": "",
        "tools/units.py": "x = 1\n",
    }
    first = project(files)
    second = tmp_path / "elsewhere" / "deep"
    for name in reversed(files):
        (second / name).parent.mkdir(parents=True, exist_ok=True)
        (second / name).write_bytes((first / name).read_bytes())
    other = first / "unrelated.py"
    other.write_text("not imported")
    one, two = Bundle.collect(first / "flights.py"), Bundle.collect(second / "flights.py")
    assert one.digest == two.digest
    (second / "tools" / "units.py").write_text("x = 2\n")
    assert Bundle.collect(second / "flights.py").digest != one.digest


# --- on disk --------------------------------------------------------------------------------------------------------


def test_it_is_written_once_and_read_only(project: WriteFiles, tmp_path: Path) -> None:
    root = project({"flights.py": "import tools.units\n", "tools/__init__.py": "", "tools/units.py": "x = 1\n"})
    bundle = Bundle.collect(root / "flights.py")
    bundles = tmp_path / "bundles"
    path = bundle.write_to(bundles)
    assert path == bundles / bundle.digest
    assert {p.relative_to(path).as_posix(): p.read_bytes() for p in path.rglob("*") if p.is_file()} == bundle.files
    modes = {stat.S_IMODE(p.stat().st_mode) for p in path.rglob("*") if p.is_file()}
    folder_modes = {stat.S_IMODE(p.stat().st_mode) for p in (path, *path.rglob("*")) if p.is_dir()}
    assert (modes, folder_modes) == ({0o444}, {0o555})
    before = path.stat()
    assert bundle.write_to(bundles) == path
    assert path.stat().st_ino == before.st_ino
    assert os.listdir(bundles) == [bundle.digest]
    remove_tree(path)
    assert os.listdir(bundles) == []
    remove_tree(path)


def test_several_writers_at_once(project: WriteFiles, tmp_path: Path) -> None:
    bundle = Bundle.collect(project({"flights.py": FUNCTION}) / "flights.py")
    bundles = tmp_path / "bundles"
    start = threading.Barrier(8)
    paths: list[Path] = []

    def write() -> None:
        start.wait(timeout=30)
        paths.append(bundle.write_to(bundles))

    threads = [threading.Thread(target=write) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert paths == [bundles / bundle.digest] * 8
    assert os.listdir(bundles) == [bundle.digest]


def test_a_failed_write_leaves_nothing(project: WriteFiles, tmp_path: Path) -> None:
    bundle = Bundle("a", {"a.py": b"", "a.py/b.py": b""})
    with pytest.raises(OSError, match=r"a\.py"):
        bundle.write_to(tmp_path / "bundles")
    assert os.listdir(tmp_path / "bundles") == []


def test_the_written_bundle_is_what_python_imports(project: WriteFiles, tmp_path: Path) -> None:
    root = project(
        {
            "app/__init__.py": "",
            "app/flights.py": """
                from pathlib import Path
                from . import units
                from app.deep.lake import water
                here = Path(__file__).parent / "data.csv"
            """,
            "app/units.py": "",
            "app/deep/lake.py": "water = 1\n",
            "app/data.csv": "a,b\n",
        }
    )
    path = Bundle.collect(root / "app" / "flights.py", ["app/*.csv"]).write_to(tmp_path / "bundles")
    code = "import app.flights as f; print(f.__name__, f.water, f.here.read_text().strip())"
    done = subprocess.run(
        [sys.executable, "-B", "-c", code],
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert done.stdout.strip() == "app.flights 1 a,b"


@pytest.mark.parametrize("place", ["target", "helper"])
def test_a_file_that_hides_a_module_of_python_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "asyncio.py").write_text("def f(): ...\n")
    (tmp_path / "m.py").write_text("import asyncio\n\n\ndef f(): ...\n")
    with pytest.raises(UsageError, match=r"asyncio\.py would hide Python's own module 'asyncio'"):
        Bundle.collect(tmp_path / ("asyncio.py" if place == "target" else "m.py"))
