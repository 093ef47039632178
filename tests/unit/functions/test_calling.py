"""Where a function of this process stands in a bundle, and what is said of one that stands nowhere."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel, Field

from callyard import BoundCall, UsageError, bind
from callyard.functions.bundle import Bundle
from callyard.functions.calling import find_home
from callyard.functions.encoding import encode_value
from callyard.functions.loading import load_bundle
from callyard.functions.outgoing import Outgoing
from callyard.functions.packing import Packed, encode_crossing
from callyard.functions.registry import Registry
from callyard.functions.signature import Invocable
from callyard.wire.messages import DescribedPayload
from tests.unit.functions.conftest import WriteFiles

pytestmark = pytest.mark.usefixtures("forgetful")

FILES = {
    "shop/__init__.py": "from shop.models import score, Point\nfrom callyard import function\nhere = function(score)\n",
    "shop/models.py": "class Point:\n    def __init__(self, x: int) -> None:\n        self.x = x\n\n"
    "def score(x: int) -> set[int]:\n    return {x}\n\ndef unused() -> int:\n    return 1\n",
}


def run(path: Path, name: str) -> ModuleType:
    """A module of this process, under a name of its own."""
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = str(path)
    exec(compile(path.read_text(), str(path), "exec"), vars(module))
    return module


@pytest.mark.parametrize(
    ("file", "home"),
    [
        ("m.py", "m:score"),
        ("pkg/m.py", "pkg.m:score"),
        ("pkg/__init__.py", "pkg:score"),
    ],
)
def test_a_function_stands_where_its_file_is_below_the_root(file: str, home: str, tmp_path: Path) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text("def score():\n    return 1\n")
    function = run(path, "whatever").score
    assert find_home(function, tmp_path, Bundle("m", {file: path.read_bytes()})) == home


def test_without_a_file_below_the_root_the_modules_name_counts(tmp_path: Path) -> None:
    path = tmp_path / "m.py"
    path.write_text("def score():\n    return 1\n")
    score = run(path, "whatever").score
    bundle = Bundle("n", {"n.py": b""})
    assert find_home(score, tmp_path / "elsewhere", bundle) == find_home(score, None, None) == "whatever:score"
    assert find_home(len, tmp_path, bundle) == "builtins:len"


def test_a_file_is_the_same_one_by_whatever_link_it_is_reached(tmp_path: Path) -> None:
    real = tmp_path / "real" / "other.py"
    real.parent.mkdir()
    real.write_text("def score():\n    return 1\n")
    (tmp_path / "m.py").symlink_to(real)
    bundle = Bundle("m", {"m.py": real.read_bytes()})
    by_link, by_file = run(tmp_path / "m.py", "by_link").score, run(real, "by_file").score
    assert find_home(by_link, tmp_path, bundle) == find_home(by_file, tmp_path, bundle) == "m:score"


def test_another_copy_under_the_same_module_name_is_no_part_of_the_target(project: WriteFiles, tmp_path: Path) -> None:
    source = "from callyard import function\n@function\ndef score() -> int:\n    return 1\n"
    registry = describe(project, "shop", [])
    copy = tmp_path / "copy" / "models.py"
    copy.parent.mkdir()
    copy.write_text(source)
    module = run(copy, "shop.models")
    with pytest.raises(UsageError, match=r"score is defined in .*models\.py, which is no part of __init__\.py"):
        registry.outgoing(module.score)


def test_code_that_was_made_here_is_not_what_its_module_has(project: WriteFiles) -> None:
    registry = describe(project, "shop", [])
    models = run(Path(registry.path or "").parent / "models.py", "shop.models")
    assert registry.outgoing(models.score).name == "here"
    exec("def score(x: int) -> set[int]:\n    return {-x}\n", vars(models))
    with pytest.raises(UsageError, match=r"score was defined in a notebook cell or at a prompt"):
        registry.outgoing(models.score)


def test_functions_that_a_decorator_made_alike_are_told_apart_by_their_names(project: WriteFiles) -> None:
    files = {
        "alike.py": "from callyard import function\ndef bare(f):\n    def inner(x: int) -> int:\n        return f(x)\n"
        "    return inner\n@function\n@bare\ndef first(x: int) -> int:\n    return 1\n"
        "@function\n@bare\ndef second(x: int) -> int:\n    return 2\n"
    }
    root = project(files)
    registry = Registry.for_target(root / "alike.py")
    functions, _ = load_bundle(registry.bundle.write_to(root / "bundles"), "alike").describe([])
    registry.adopt(DescribedPayload(registry.bundle.digest, functions))
    here = run(root / "alike.py", "alike")
    assert registry.outgoing(here.second).name == "second"
    assert registry.outgoing(here.first).name == "first"
    del here.first
    other = run(root / "alike.py", "alike_once_more")
    del sys.modules["alike_once_more"]
    with pytest.raises(
        UsageError, match=r"first and second are all defined as bare\.<locals>\.inner.*functools\.wraps"
    ):
        registry.outgoing(other.first)


def test_what_is_no_function_is_told_apart() -> None:
    def score(x: int) -> int:
        return x

    with pytest.raises(UsageError, match=r"got a partial of it: write bind\(score, …\)"):
        Registry().outgoing(functools.partial(score, 1))
    with pytest.raises(UsageError, match=r"its arguments as rows, got the bound call of one: score\(1\)"):
        Registry().outgoing(bind(score, 1))
    with pytest.raises(UsageError, match=r"dumps is of an installed package \(.*json"):
        Registry(Bundle("m", {"m.py": b""})).outgoing(json.dumps)


def describe(files: WriteFiles, target: str, names: list[str]) -> Registry:
    """A registry of a target as a worker has it, and the bundle as an executor loads it."""
    root = files(FILES)
    registry = Registry.for_target(root / target)
    bundle = registry.bundle
    functions, _ = load_bundle(bundle.write_to(root / "bundles"), bundle.module).describe(names)
    registry.adopt(DescribedPayload(bundle.digest, functions))
    return registry


def test_a_function_is_found_under_the_name_that_the_target_gave_it(project: WriteFiles) -> None:
    registry = describe(project, "shop", ["Point"])
    models = run(Path(registry.path or "").parent / "models.py", "imported_here")
    score, point = registry.outgoing(models.score), registry.outgoing(models.Point)
    assert (score.name, score.encode_call((5,), {}), score.decode(b"[5]")) == ("here", b'{"x":5}', {5})
    assert (point.name, point.encode_call((5,), {})) == ("Point", b'{"x":5}')
    assert registry.outgoing(models.score) is score
    with pytest.raises(UsageError, match=r"unused of models\.py is not among the functions .* there are: here"):
        registry.outgoing(models.unused)
    registry.add_function(models.unused)
    assert registry.outgoing(models.unused).name == "unused"
    assert registry.outgoing(models.score) is not score, "names may have changed"


def test_of_a_bundle_without_a_place_the_modules_name_counts() -> None:
    source = b"def score() -> int:\n    return 1\n"
    bundle = Bundle("m", {"m.py": source})
    assert bundle.has_module("m")
    assert not bundle.has_module("n")
    with pytest.raises(UsageError, match=r"score was defined in a notebook cell or at a prompt"):
        Registry(bundle).outgoing(_made(source, "m").score)


def _made(source: bytes, name: str) -> ModuleType:
    module = ModuleType(name)
    exec(compile(source, "<ipython-input-1>", "exec"), vars(module))
    return module


def test_tools_of_this_process_are_found_by_the_object() -> None:
    registry = Registry()

    class Desk:
        def ask(self, x: int) -> set[int]:
            return {x}

    def plain(x: int) -> int:
        return x

    desk: Any = Desk()
    registry.add_function(desk.ask, name="asked")
    registry.add_tool("raw", plain, input_schema={"type": "object"})
    assert registry.outgoing(desk.ask).name == "asked"
    assert registry.outgoing(desk.ask).decode(b"[1]") == {1}
    with pytest.raises(UsageError, match=r"tool 'raw' has a schema and no signature: call it by its name"):
        registry.outgoing(plain)
    with pytest.raises(UsageError, match=r"describe is none of the tools here: add it with @registry\.tool; there are"):
        registry.outgoing(describe)
    with pytest.raises(UsageError, match=r"expected a function, or the name of one, got 7"):
        registry.outgoing(7)


def test_a_bound_call_is_checked_where_it_is_written() -> None:
    def f(x: int, *, key: str = "") -> int:
        return x

    bound = bind(f, 1, key="k")
    assert (type(bound), bound.args, bound.kwargs, repr(bound)) == (BoundCall, (1,), {"key": "k"}, "f(1, key='k')")
    with pytest.raises(TypeError, match=r"f\(\) too many positional arguments"):
        bind(f, 1, "k")  # type: ignore[call-overload]
    assert bind(sys.getsizeof, 1).args == (1,)


class Leg(BaseModel):
    """Read and written as `from`, for those who speak JSON; `origin` in Python and in results."""

    origin: str = Field(alias="from")
    data: bytes = b""


class Written(BaseModel):
    """Written by another name than it is read."""

    origin: str = Field(serialization_alias="start")


class Trip(BaseModel):
    legs: list[Leg]


def first_leg(trip: Trip, others: list[Leg], written: Written) -> dict[str, Leg]:
    return {"first": trip.legs[0], "other": others[0], "written": Leg(**{"from": written.origin})}


@pytest.mark.parametrize("data", [b"", b"ship"], ids=["json", "binary"])
def test_models_go_in_by_their_aliases_and_come_out_by_their_names(data: bytes) -> None:
    invocable = Invocable("first_leg", first_leg)
    outgoing = Outgoing("first_leg", invocable, typed=True)
    leg = Leg(**{"from": "JFK"}, data=data)
    trip, others, written = Trip(legs=[leg]), [leg], Written(origin="LAX")
    sent = outgoing.encode_call((trip, others, written), {}, binary=bool(data))
    args, kwargs = invocable.bind_packed(Packed.read(sent)) if data else invocable.bind(sent)
    result = first_leg(*args, **kwargs)
    assert result == first_leg(trip, others, written)
    assert outgoing.decode(encode_crossing(result)) == result
    assert json.loads(encode_value(result))["first"]["origin"] == "JFK"
