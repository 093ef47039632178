"""`@function` and its promises."""

from __future__ import annotations

import functools
import inspect
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import msgspec
import pytest

from callyard.functions.function import MILLISECONDS_MAX, Function, Promises, function


@function
def bare(number: int) -> int:
    """Doubles."""
    return number * 2


@function(pure=True, budget_ms=500, tags=("math",))
async def promised(number: int) -> int:
    return number


def test_calling_a_declared_function_runs_the_plain_one() -> None:
    assert bare(4) == 8
    assert bare.target is inspect.unwrap(bare)
    assert (bare.__name__, bare.__doc__, str(inspect.signature(bare))) == (
        "bare",
        "Doubles.",
        "(number: 'int') -> 'int'",
    )
    assert bare.promises == Promises()
    assert inspect.iscoroutinefunction(promised.target)


def test_defaults_are_the_safe_ones() -> None:
    promises = Promises()
    assert [promises.idempotent, promises.pure, promises.exclusive, promises.preempt] == [False] * 4
    assert msgspec.json.encode(promises) == b"{}"


def test_pure_implies_idempotent_however_it_was_built() -> None:
    assert promised.promises.idempotent
    assert Promises(pure=True, idempotent=False).idempotent
    assert msgspec.json.decode(b'{"pure":true}', type=Promises).idempotent


def test_promises_travel_as_json() -> None:
    promises = Promises(idempotent=True, timeout_ms=2_000, budget_ms=0, isolation="executor", tags=("a", "b"))
    encoded = msgspec.json.encode(promises)
    assert msgspec.json.decode(encoded, type=Promises) == promises
    assert msgspec.json.decode(encoded)["tags"] == ["a", "b"]


@pytest.mark.parametrize(
    ("promises", "error", "message"),
    [
        ({"timeout_ms": 0}, ValueError, "timeout_ms must be in 1.."),
        ({"timeout_ms": MILLISECONDS_MAX + 1}, ValueError, "timeout_ms must be in 1.."),
        ({"timeout_ms": 2.5}, TypeError, "timeout_ms must be a whole number, got 2.5"),
        ({"timeout_ms": True}, TypeError, "timeout_ms must be a whole number"),
        ({"budget_ms": -1}, ValueError, "budget_ms must be in 0.."),
        ({"max_concurrency": 0}, ValueError, "max_concurrency must be in 1.."),
        ({"max_result_bytes": 0}, ValueError, "max_result_bytes must be in 1.."),
        ({"isolation": "process"}, ValueError, "isolation must be one of executor, inline, thread, got 'process'"),
        ({"idempotent": 1}, TypeError, "idempotent must be True or False, got 1"),
        ({"pure": "yes"}, TypeError, "pure must be True or False"),
        ({"tags": "math"}, TypeError, "tags must be a tuple of texts, got 'math'"),
        ({"tags": ("",)}, TypeError, "tags must be a tuple of texts"),
        ({"tags": tuple(map(str, range(33)))}, ValueError, "tags must be at most 32, got 33"),
        ({"timeout": 5}, TypeError, "does not know timeout; it knows idempotent, pure, read_only"),
    ],
)
def test_a_promise_that_means_nothing_is_refused_at_the_decorator(
    promises: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        function(**promises)


def test_decoded_promises_are_checked_too() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"timeout_ms must be in 1\.\."):
        msgspec.json.decode(b'{"timeout_ms":0}', type=Promises)


class Tools:
    def method(self) -> None: ...


def generator() -> Any:
    yield 1


async def async_generator() -> Any:
    yield 1


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (Tools.method, "not methods: .*Tools.method"),
        (Tools, "takes a plain function"),
        (len, "takes a plain function"),
        (functools.partial(generator), "takes a plain function"),
        (5, "takes a plain function.*got 5"),
        (bare, "takes a plain function"),
        (generator, "not generators: .*generator"),
        (async_generator, "not generators: .*async_generator"),
    ],
)
def test_what_is_no_function_at_the_top_of_a_module_is_refused(target: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        function(target)


def test_a_cached_function_can_be_declared() -> None:
    calls: list[int] = []

    @function
    @functools.cache
    def square(number: int) -> int:
        calls.append(number)
        return number**2

    assert [square(3), square(3)] == [9, 9]
    assert calls == [3]


def test_a_declared_function_is_pickled_by_reference() -> None:
    assert pickle.loads(pickle.dumps(bare)) is bare  # noqa: S301 - a reference, made on the line itself


def test_importing_it_is_light() -> None:
    """User files import it: neither pydantic nor an event loop may come with it."""
    code = (
        "import sys, callyard.functions.function; print(sorted({'pydantic', 'asyncio', 'uvloop'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_type_checkers_see_the_signature(tmp_path: Path) -> None:
    file = tmp_path / "declared.py"
    file.write_text(
        textwrap.dedent("""
        from callyard.functions.function import function

        @function
        def bare(number: int) -> str: ...
        @function(pure=True)
        def promised(number: int, *, name: str = "") -> float: ...
        @function(timeout_ms=5)
        async def later() -> bytes: ...

        reveal_type(bare(1))
        reveal_type(promised(1, name="x"))
        reveal_type(later)
        bare("x")
        promised(1, 2)
        function(timeout=5)
        """)
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", "--cache-dir", str(tmp_path / "cache"), file.name],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    found = [line.split(": ", 1)[1] for line in done.stdout.splitlines() if line.startswith(file.name)]
    assert 'note: Revealed type is "str"' in found
    assert 'note: Revealed type is "float"' in found
    assert any("Function[[], typing.Coroutine[Any, Any, bytes]]" in line for line in found), found
    assert any('Argument 1 to "__call__" of "Function" has incompatible type "str"' in line for line in found)
    assert any("Too many positional arguments" in line for line in found)
    assert any('Unexpected keyword argument "timeout"' in line for line in found)


def test_a_declared_function_shows_its_promises() -> None:
    assert "pure=True" in repr(promised)
    assert isinstance(promised, Function)
