"""A bundle in its executor: imported, described, or refused with file and line."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import msgspec
import pytest

from callyard.errors import ErrorKind, UsageError
from callyard.functions import loading
from callyard.functions.function import Promises
from callyard.functions.loading import LoadFailure, load_bundle, refuse_while_importing
from callyard.wire.messages import WireError
from tests.unit.functions.conftest import WriteFiles

pytestmark = pytest.mark.usefixtures("forgetful")


def failure_of(path: Path, module: str = "flights_under_test") -> WireError:
    with pytest.raises(LoadFailure) as caught:
        load_bundle(path, module).describe()
    return caught.value.error


# --- what can be called ---------------------------------------------------------------------------------------------


def test_declared_functions_are_what_can_be_called(project: WriteFiles) -> None:
    path = project(
        {
            "flights_under_test.py": '''
                from callyard.functions.function import function
                from geo_under_test import distance, plain, distance as again

                @function(idempotent=True, timeout_ms=2000)
                async def assess(flight: dict) -> str:
                    """Whether it flew."""
                    return flight["origin"]

                @function
                def _hidden(x: int) -> int:
                    return x

                def helper(connection): ...
            ''',
            "geo_under_test.py": """
                from callyard.functions.function import function

                @function(pure=True)
                def distance(origin: str, dest: str = "LAX") -> float:
                    return 1.5

                def plain(): ...
            """,
        }
    )
    bundle = load_bundle(path, "flights_under_test")
    described, installed = bundle.describe()
    assert [d.entry_selector for d in described] == [f"flights_under_test:{d.name}" for d in described]
    assert [(d.name, d.signature, d.description, d.takes_row, d.is_async) for d in described] == [
        ("distance", "distance(origin: str, dest: str = 'LAX') -> float", "", False, False),
        ("assess", "assess(flight: dict) -> str", "Whether it flew.", True, True),
        ("_hidden", "_hidden(x: int) -> int", "", False, False),
    ]
    assert [msgspec.json.decode(d.promises, type=Promises) for d in described] == [
        Promises(pure=True),
        Promises(idempotent=True, timeout_ms=2_000),
        Promises(),
    ]
    assert msgspec.json.decode(described[0].input_schema)["required"] == ["origin"]
    assert msgspec.json.decode(described[0].output_schema) == {"type": "number"}
    assert described[2].line == 10
    assert installed == []
    assert bundle.has_async


def test_without_declarations_the_public_functions_of_the_module_are_called(project: WriteFiles) -> None:
    path = project(
        {
            "flights_under_test.py": """
                import sqlite3
                from os.path import join
                from textwrap import dedent as other

                def first(x: int) -> int: return x
                def second(*, y: str = "") -> str: return y
                def _private(): ...
                def streaming(): yield 1
                def helper(link: sqlite3.Connection) -> None: ...
                class Thing:
                    def method(self): ...
                alias = first
            """,
        }
    )
    bundle = load_bundle(path, "flights_under_test")
    described, _ = bundle.describe()
    assert [d.name for d in described] == ["first", "second", "alias"]
    assert not bundle.has_async
    invocable = bundle.get("flights_under_test:first")
    assert bundle.get("flights_under_test:first") is invocable
    args, keywords = invocable.bind(b"[5]")
    assert invocable.encode(invocable.target(*args, **keywords)) == b"5"


def test_functions_of_installed_packages_are_not_the_bundles(project: WriteFiles, tmp_path: Path) -> None:
    """A decorated function that a third party ships is imported, not offered."""
    other = tmp_path / "installed"
    other.mkdir()
    (other / "third_party_under_test.py").write_text(
        "from callyard.functions.function import function\n@function\ndef foreign(x: int) -> int: ...\n"
    )
    sys.path.insert(0, str(other))
    path = project(
        {"flights_under_test.py": "from third_party_under_test import foreign\ndef own(x: int) -> int: ...\n"}
    )
    described, _ = load_bundle(path, "flights_under_test").describe()
    assert [d.name for d in described] == ["own"]


def test_the_module_keeps_its_real_name_and_place(project: WriteFiles) -> None:
    path = project(
        {
            "app_under_test/__init__.py": "",
            "app_under_test/flights.py": """
                from pathlib import Path
                from . import units
                def where() -> str: return __name__ + Path(__file__).with_name("data.txt").read_text() + units.KM
            """,
            "app_under_test/units.py": "KM = 'km'\n",
            "app_under_test/data.txt": "!",
        }
    )
    bundle = load_bundle(path, "app_under_test.flights")
    assert sys.path[0] == str(path)
    assert bundle.get("app_under_test.flights:where").target() == "app_under_test.flights!km"
    assert not list(path.rglob("__pycache__"))


@pytest.mark.requirement("X86")
def test_imported_packages_are_listed(project: WriteFiles) -> None:
    path = project(
        {
            "flights_under_test.py": """
                import json, msgspec, geo_under_test
                from callyard.functions.function import function
                def f() -> int:
                    import numpy.linalg
                    import nowhere_to_be_found
                    return 1
            """,
            "geo_under_test.py": "from markdown_it import MarkdownIt\n",
        }
    )
    _, installed = load_bundle(path, "flights_under_test").describe()
    assert installed == [f"{name}=={metadata.version(name)}" for name in ("markdown-it-py", "msgspec", "numpy")]


# --- what cannot be loaded ------------------------------------------------------------------------------------------


@pytest.mark.requirement("X84")
@pytest.mark.parametrize(
    ("source", "line", "message"),
    [
        ("x = 1\ny = missing\n", 2, "flights_under_test.py:2: NameError: name 'missing' is not defined"),
        ("def f():\n    1 / 0\nf()\n", 2, "flights_under_test.py:2: ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit(3)\n", 2, "flights_under_test.py:2: SystemExit: 3; it ends when imported: guard that"),
        ("raise KeyboardInterrupt\n", 1, "flights_under_test.py:1: KeyboardInterrupt"),
        ("raise BaseException('no')\n", 1, "flights_under_test.py:1: BaseException: no"),
        ("class E(Exception):\n    __str__ = 1\nraise E\n", 3, "flights_under_test.py:3: E: (its text cannot be read)"),
        ("def f():\n    f()\nf()\n", 2, "flights_under_test.py:2: RecursionError: maximum recursion depth exceeded"),
        ("x = 1\ndef f(:\n", 2, "flights_under_test.py:2: SyntaxError: "),
        ("x = 1\nimport helper_under_test\n", 3, "helper_under_test.py:3: SyntaxError: "),
        ("x = 1\n\nimport broken_under_test\n", 2, "broken_under_test.py:2: NameError: name 'gone' is not defined"),
        ("import nowhere.at.all\n", 1, f"(nowhere is neither in the bundle nor installed for {sys.executable}; if "),
        ("from broken_twice_under_test import x\n", 1, "flights_under_test.py:1: ImportError: cannot import name 'x'"),
        (
            "from pathlib import Path\nPath(__file__).with_name('a.csv').read_text()\n",
            2,
            "'a.csv' (data files are sent along only when they are included: --include a.csv)",
        ),
    ],
)  # fmt: skip
def test_what_happens_at_import_is_told_with_file_and_line(
    project: WriteFiles, source: str, line: int, message: str
) -> None:
    path = project(
        {
            "flights_under_test.py": source,
            "helper_under_test.py": "a = 1\n\nb = = 2\n",
            "broken_under_test.py": "import json\njson.loads('1', object_hook=gone)\n",
            "broken_twice_under_test.py": "",
        }
    )
    error = failure_of(path)
    assert message in error.message
    assert error.details["line"] == line
    assert error.details["file"] == error.message.partition(":")[0]
    assert str(path) not in error.message + error.details["stack"]


def test_the_stack_begins_with_the_bundles_own_code(project: WriteFiles) -> None:
    path = project({"flights_under_test.py": "import json\n\ndef f():\n    json.loads('{')\n\nf()\n"})
    stack = failure_of(path).details["stack"].splitlines()
    assert stack[0] == '  File "flights_under_test.py", line 6, in <module>'
    assert stack[2:4] == ['  File "flights_under_test.py", line 4, in f', "    json.loads('{')"]
    assert stack[-1].startswith("JSONDecodeError: ")
    assert not any("importlib" in line for line in stack)


def test_a_declared_function_that_json_cannot_reach_is_a_failure(project: WriteFiles) -> None:
    path = project(
        {
            "flights_under_test.py": """
                import sqlite3
                from callyard.functions.function import function

                @function
                def store(link: sqlite3.Connection) -> None: ...
                @function
                def fine() -> None: ...
            """
        }
    )
    error = failure_of(path)
    assert error.message.startswith("flights_under_test.py:5: store: parameter link: ")
    assert error.details == {"file": "flights_under_test.py", "line": 5}
    assert load_bundle(path, "flights_under_test").get("flights_under_test:fine").name == "fine"


def test_a_module_without_functions_is_a_failure(project: WriteFiles) -> None:
    error = failure_of(project({"flights_under_test.py": "x = 1\n"}))
    assert error.kind is ErrorKind.NOT_FOUND
    assert error.message.startswith("flights_under_test.py: no functions: define one with def")


def test_a_module_of_helpers_that_json_cannot_reach_is_a_failure(project: WriteFiles) -> None:
    path = project({"flights_under_test.py": "import sqlite3\ndef f(link: sqlite3.Connection): ...\n"})
    assert failure_of(path).message.startswith("flights_under_test.py:2: f: parameter link")


@pytest.mark.parametrize(
    "selector", ["flights_under_test:gone", "flights_under_test:_os", "os:getcwd", "f", "", "flights_under_test:f.x"]
)
@pytest.mark.requirement("X84")
def test_an_unknown_entry_is_not_found(project: WriteFiles, selector: str) -> None:
    path = project({"flights_under_test.py": "import os as _os\ndef f(): ...\ndef g(): ...\n"})
    with pytest.raises(LoadFailure, match="there are: f, g") as caught:
        load_bundle(path, "flights_under_test").get(selector)
    assert caught.value.error.kind is ErrorKind.NOT_FOUND


@pytest.mark.parametrize("name", ["json", "time", "msgspec"])
def test_a_name_that_is_taken_is_refused(project: WriteFiles, name: str) -> None:
    path = project({f"{name}.py": "def f(): ...\n"})
    error = failure_of(path, name)
    assert error.message.startswith(f"the module name {name!r} is taken by ")
    assert error.message.endswith("rename the file or folder")


# --- user code that starts Callyard ---------------------------------------------------------------------------------


def test_starting_callyard_during_the_import_fails_there(project: WriteFiles) -> None:
    path = project(
        {
            "flights_under_test.py": """
                from callyard.functions.loading import refuse_while_importing
                def f(): ...
                refuse_while_importing()  # as Worker does
            """
        }
    )
    error = failure_of(path)
    assert error.message.startswith("flights_under_test.py:4: UsageError: this file starts Callyard while an executor")
    assert 'under `if __name__ == "__main__":`' in error.message


def test_it_is_allowed_before_and_after(project: WriteFiles) -> None:
    refuse_while_importing()
    path = project({"flights_under_test.py": "def f(): ...\n", "broken_under_test.py": "raise SystemExit\n"})
    load_bundle(path, "flights_under_test")
    refuse_while_importing()
    with pytest.raises(LoadFailure):
        load_bundle(path, "broken_under_test")
    refuse_while_importing()


def test_the_worker_can_ask_without_loading_pydantic() -> None:
    code = "import sys, callyard.functions.loading, callyard.functions.registry; print('pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_usage_errors_are_what_it_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_importing", True)
    with pytest.raises(UsageError, match="under `if __name__"):
        refuse_while_importing()
