"""What a user may name as a target, and what it comes to."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from callyard import function
from callyard.errors import UsageError
from callyard.functions.bundle import Bundle
from callyard.functions.registry import Registry
from callyard.functions.target import Target, find_target, split_target
from tests.unit.functions.conftest import WriteFiles

FUNCTION = "def f(): ...\n"


def place(target: Target) -> tuple[str, str, str | None]:
    return target.module, target.path.relative_to(target.root).as_posix(), target.function


@pytest.fixture
def shop(project: WriteFiles, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = project(
        {
            "functions.py": FUNCTION,
            "shop/__init__.py": FUNCTION,
            "shop/jobs.py": "from . import tax\n" + FUNCTION,
            "shop/tax.py": "",
            "shop/plugins/one.py": "import numpy\n",
            "shop/data.csv": "a\n",
            "shop/.secret": "x",
            "shop/__pycache__/x.pyc": b"",
            "src/inner/__init__.py": "",
            "src/inner/mod.py": FUNCTION,
            "spaces/deep/mod.py": FUNCTION,
        }
    )
    monkeypatch.chdir(root)
    return root


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("functions.py", ("functions", "functions.py", None)),
        ("functions.py:f", ("functions", "functions.py", "f")),
        ("functions", ("functions", "functions.py", None)),
        ("shop/jobs.py:_any", ("shop.jobs", "shop/jobs.py", "_any")),
        ("shop.jobs", ("shop.jobs", "shop/jobs.py", None)),
        ("shop.jobs:f", ("shop.jobs", "shop/jobs.py", "f")),
        ("shop", ("shop", "shop/__init__.py", None)),
        ("shop/:f", ("shop", "shop/__init__.py", "f")),
        ("inner.mod:f", ("inner.mod", "inner/mod.py", "f")),
        ("spaces.deep.mod", ("spaces.deep.mod", "spaces/deep/mod.py", None)),
        ("spaces/deep/mod.py", ("mod", "mod.py", None)),
        ("spaces/deep", ("mod", "mod.py", None)),
    ],
)
def test_files_modules_and_folders(shop: Path, given: str, found: tuple[str, str, str | None]) -> None:
    assert place(find_target(given)) == found
    assert place(find_target(Path(given))) == found


@pytest.mark.requirement("X86")
def test_a_folder_brings_all_of_its_files_and_the_digest_covers_them(shop: Path) -> None:
    bundle = Bundle.collect("shop")
    names = ["shop/__init__.py", "shop/data.csv", "shop/jobs.py", "shop/plugins/one.py", "shop/tax.py"]
    assert list(bundle.files) == names
    assert bundle.imports == ("numpy",)
    assert list(Bundle.collect("shop.jobs").files) == ["shop/__init__.py", "shop/jobs.py", "shop/tax.py"]
    (shop / "shop/data.csv").write_text("b\n")
    assert Bundle.collect("shop").digest != bundle.digest


def test_a_folder_of_a_project_stands_for_the_one_thing_in_it(project: WriteFiles) -> None:
    root = project({"setup.py": "", "tests/__init__.py": "", "src/pkg/__init__.py": FUNCTION, "src/pkg/a.txt": "a"})
    assert list(Bundle.collect(root).files) == ["pkg/__init__.py", "pkg/a.txt"]
    (root / "src/other.py").write_text(FUNCTION)
    with pytest.raises(UsageError, match=r"several targets in it: name one of .*src/other\.py, .*src/pkg$"):
        Bundle.collect(root)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("shop.nothing", "no module 'shop.nothing': shop is in .*, but there is no shop/nothing.py"),
        ("nowhere_at_all.x", "no module 'nowhere_at_all' in .*, nor installed"),
        ("spaces.deep", r"spaces.deep is a namespace package, .* such as spaces.deep.mod"),
        ("msgspec.json:encode", r"is installed .*: write a file with `from msgspec.json import encode`, and give"),
        ("json.tool", "is installed"),
        ("cells.ipynb", "does not exist"),
        ("src/inner", r"inner/__init__.py is empty.*; name a module of the package: mod.py"),
        ("shop/plugins/gone.py:f", "does not exist"),
        ("functions.py:not a name", "expected FILE.py or FILE.py:FUNCTION"),
    ],
)
def test_what_is_no_target_says_what_to_do(shop: Path, given: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Bundle.collect(given)


def test_a_package_elsewhere_is_found_by_the_interpreter_that_runs_it(shop: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "ledger"
    other.mkdir(parents=True)
    (other / "entries.py").write_text(FUNCTION)
    asked = []

    def find(top: str) -> list[str]:
        asked.append(top)
        return [str(tmp_path / "other")]

    found = find_target("ledger.entries:f", find_package=find)
    assert (place(found), asked) == (("ledger.entries", "ledger/entries.py", "f"), ["ledger"])
    assert Registry.for_target("ledger.entries:f", find_package=find).named == ["f"]


def test_an_object_is_refused_with_the_file_to_name() -> None:
    @function
    def declared() -> None: ...

    here = r"tests/unit/functions/test_target\.py:"
    for given, message in (
        (declared, f"executors find declared by its file, not by the object: give '{here}declared'"),
        (find_target, r"find find_target by its file, .*give '.*target\.py:find_target'"),
        (lambda: 1, "a lambda has no name"),
        (functools.partial(declared), "expected a Python file, such as functions.py, a module"),
        (3, "got 3"),
    ):
        with pytest.raises(UsageError, match=message):
            find_target(given)
    scope: dict[str, object] = {}
    exec(compile("def cell(): ...", "<ipython-input-1>", "exec"), scope)
    with pytest.raises(UsageError, match=r"cell was defined in a notebook cell .*PoolExecutor takes functions as"):
        Registry.for_target(scope["cell"])  # type: ignore[arg-type]


def test_the_function_is_what_stands_after_the_last_colon() -> None:
    assert split_target("a.py:f") == (Path("a.py"), "f")
    assert split_target("pkg.mod:f") == (Path("pkg.mod"), "f")
    assert split_target("a.py") == (Path("a.py"), None)


# --- modules that an executor did not find --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (
            "shop.plugins.one",
            "shop/plugins/one.py is there, but no import statement names it: --include shop/plugins/one.py",
        ),
        ("spaces", r"spaces/\*\*/\*.py is there, but no import statement names it: --include 'spaces/\*\*/\*.py'"),
        ("inner.mod", r"src/inner/mod.py is there, but no import"),
        ("nowhere", ""),
    ],
)
def test_a_module_that_is_on_this_disk_is_named(shop: Path, missing: str, message: str) -> None:
    from callyard.errors import ErrorKind
    from callyard.wire.messages import DescribedPayload, WireError

    registry = Registry.for_target("functions.py")
    wrong = WireError(ErrorKind.INTERNAL, "ModuleNotFoundError", details={"missing_module": missing})
    with pytest.raises(UsageError, match=message or r"^ModuleNotFoundError$"):
        registry.adopt(DescribedPayload(registry.bundle.digest, error=wrong))


def test_a_module_of_the_project_that_is_outside_the_root_is_named(project: WriteFiles) -> None:
    from callyard.functions.target import explain_unbundled

    root = project({"pyproject.toml": "", "scripts/run.py": FUNCTION, "lib/core.py": FUNCTION})
    said = explain_unbundled(find_target(root / "scripts/run.py"), root / "lib/core.py")
    assert f"-m pip install -e {root}" in said


def test_a_file_that_imports_by_the_name_of_its_own_folder_is_told_of_the_one_above(project: WriteFiles) -> None:
    from callyard.functions.target import explain_unbundled

    root = project({"plug/two.py": FUNCTION})
    said = explain_unbundled(find_target(root / "plug/two.py"), root / "plug")
    assert said == (
        "plug is the folder itself, where imports of two.py start: from the folder above it, name the module plug.two"
    )


@pytest.mark.parametrize("given", ["", ":score"])
def test_an_empty_target_is_not_the_current_folder(given: str, shop: Path) -> None:
    with pytest.raises(UsageError, match=r"expected a Python file, such as functions\.py, a module, or a folder, got"):
        find_target(given)
