"""Any callable, named by its target, becomes a function that JSON can reach."""

from __future__ import annotations

import pytest

from callyard.functions.loading import LoadFailure, load_bundle
from tests.unit.functions.conftest import WriteFiles

pytestmark = pytest.mark.usefixtures("forgetful")

SOURCE = """
from __future__ import annotations
import functools
from dataclasses import dataclass
from math import sqrt
from pydantic import BaseModel
from callyard import function

@dataclass
class Point:
    '''A point.'''
    x: int
    y: int = 2

class Model(BaseModel):
    a: int

class Scaler:
    def __init__(self, by: int) -> None:
        self.by = by
    def __call__(self, x: int) -> int:
        return self.by * x
    async def later(self, x: int) -> int:
        return x

def _private(x: int) -> int:
    return x + 1

def helper(x: int) -> int:
    return x

def yields():
    yield 1

@function(pure=True)
def declared() -> int:
    return 1

double = Scaler(2)
method = double.__call__
later = double.later
power = functools.partial(pow, 2)
number = 3
"""


@pytest.mark.parametrize(
    ("name", "args", "value"),
    [
        ("Point", b'{"x": 1}', b'{"x":1,"y":2}'),
        ("Model", b'{"a": 1}', b'{"a":1}'),
        ("double", b"[4]", b"8"),
        ("method", b'{"x": 4}', b"8"),
        ("power", b"[5]", b"32"),
        ("sqrt", b"[9]", b"3.0"),
        ("_private", b"[1]", b"2"),
        ("helper", b"[1]", b"1"),
    ],
)
def test_a_named_callable_runs_undecorated(project: WriteFiles, name: str, args: bytes, value: bytes) -> None:
    path = project({"things_under_test.py": SOURCE})
    bundle = load_bundle(path, "things_under_test")
    assert bundle.names() == ["declared"]
    found = bundle.get(f"things_under_test:{name}")  # an executor that did not describe it finds it as well
    bound, keywords = found.bind(args)
    assert found.encode(found.target(*bound, **keywords)) == value
    assert not found.promises.idempotent


def test_only_what_was_named_is_described_beside_what_is_declared(project: WriteFiles) -> None:
    path = project({"things_under_test.py": SOURCE})
    bundle = load_bundle(path, "things_under_test")
    described, _ = bundle.describe(["Point", "later", "number", "nowhere"])
    assert [(one.name, one.is_async) for one in described] == [("declared", False), ("Point", False), ("later", True)]
    assert described[1].signature.startswith("Point(x: int, y: int = 2)")


def test_a_named_callable_that_cannot_be_called_once_for_a_value_says_why(project: WriteFiles) -> None:
    path = project({"things_under_test.py": SOURCE})
    with pytest.raises(LoadFailure, match="yields is a generator function: return a list"):
        load_bundle(path, "things_under_test").describe(["yields"])


def test_a_package_offers_the_functions_of_its_own_modules(project: WriteFiles) -> None:
    files = {
        "pkg_under_test/__init__.py": "from json import dumps\nfrom .jobs import job\n",
        "pkg_under_test/jobs.py": "def job() -> int:\n    return 1\n",
    }
    described, _ = load_bundle(project(files), "pkg_under_test").describe()
    assert [one.name for one in described] == ["job"]
