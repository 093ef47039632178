"""Calls by function object, with real executors: found in the bundle, arguments as written, values as annotated."""

from __future__ import annotations

import datetime
import importlib.util
from collections.abc import AsyncIterator, Awaitable, Callable
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import pytest_asyncio

from callyard import (
    CallError,
    DispatchError,
    ErrorKind,
    Ok,
    Outcome,
    ToolCall,
    UsageError,
    Worker,
    Yard,
    as_completed,
    bind,
)
from callyard.functions.function import Function
from tests.e2e import typed_file as f
from tests.e2e import typed_helpers

AT = datetime.datetime(2013, 1, 1, 5, 15)
HOUR = datetime.timedelta(hours=1)


def quiet(*_: object) -> None:
    """Drop what executors print."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def yard() -> AsyncIterator[Yard]:
    async with Yard(f.__file__, executors=1, spare_executors=0, on_output=quiet) as started:
        yield started


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize(
    ("function", "args", "value"),
    [
        (f.distance, ("JFK",), 6.0),
        (f.depart, (f.Flight("JFK", AT), HOUR), f.Flight("JFK", AT + HOUR)),
        (f.fare, (5,), f.Fare(cents=5)),
        (f.legs, (2,), [f.Leg(0.5), f.Leg(1.5)]),
        (f.point, (), f.Point(1, 2)),
        (f.row, (), {"km": 2.5}),
        (f.letters, ("abca",), frozenset("abc")),
        (f.data, (), b"\x00\xff"),
        (f.colour, (f.Colour.RED,), {f.Colour.RED: Decimal("1.10")}),
        (f.maybe, (0,), None),
        (f.maybe, (2,), f.Point(2, 2)),
        (f.untyped, ({"a": 1},), [{"a": 1}]),
        (typed_helpers.triple, (4,), 12),
        (typed_helpers.plus_one, (4,), 5),
        (f.distance.target, ("JFK", "SFO"), 6.0),
    ],
    ids=lambda part: getattr(part, "__name__", None),
)
@pytest.mark.parametrize("way", ["call", "bound", "result", "map", "dispatch"])
async def test_a_value_is_what_the_annotation_says(
    yard: Yard, way: str, function: Any, args: tuple[Any, ...], value: object
) -> None:
    if way == "call":
        got = await yard.call(function, *args)
    elif way == "bound":
        got = await yard.call(bind(function, *args), deadline_ms=60_000)
    elif way == "result":
        got = (await yard.call_result(function, *args)).unwrap()
    elif way == "map":
        (result,) = [result async for result in yard.map(function, [args])]
        got = result.value
    else:
        got = (await yard.dispatch(function, *args)).unwrap()
    assert (type(got), got) == (type(value), value)


async def test_by_name_values_are_plain_json(yard: Yard) -> None:
    assert await yard.call("fare", {"cents": 5}) == {"cents": 5}
    assert await yard.call("point", args=None) == [1, 2]
    assert (await yard.dispatch("fare", args={"cents": 5})).value == {"cents": 5}
    assert [result.value async for result in yard.map("fare", [{"cents": 5}])] == [{"cents": 5}]


async def test_a_function_has_the_names_of_options_for_itself(yard: Yard) -> None:
    assert await yard.call(f.options, key="k", timeout_ms=1, budget_ms=9) == ["k", 1, 3, 9]
    bound = bind(f.options, "k", 1, deadline_ms=7)
    assert await yard.call(bound, deadline_ms=60_000, tenant="t") == ["k", 1, 7, 4]
    done = await yard.dispatch(bound, key="mine", timeout_ms=60_000)
    again = await yard.dispatch(bound, key="mine")
    assert (done.value, again.value, again.ok and again.deduplicated) == (["k", 1, 7, 4], ["k", 1, 7, 4], True)
    assert repr(bound) == "options('k', 1, deadline_ms=7)"


async def test_a_result_that_is_not_what_was_annotated_is_a_failure(yard: Yard) -> None:
    says = "the result of liar is not what its annotation -> int says: Input should be a valid integer"
    with pytest.raises(CallError, match=says) as caught:
        await yard.call(f.liar, 3)
    assert (caught.value.kind, caught.value.failure.outcome) == (ErrorKind.RESULT, Outcome.RAN)
    assert await yard.call("liar", [3]) == "3"
    good, bad = [result async for result in yard.map(f.liar, [0, 3])]
    assert (good.ok, good.value, good.index, bad.ok, bad.index, bad.attempts, bad.raw) == (
        *(True, 0, 0),
        *(False, 1, 1, None),
    )
    assert bad.error is not None
    assert bad.error.kind is ErrorKind.RESULT
    with pytest.raises(CallError, match=says):
        bad.unwrap()
    done = await yard.dispatch(f.liar, 3)
    assert isinstance(done, DispatchError)
    assert done.kind is ErrorKind.RESULT


async def test_arguments_that_do_not_fit_are_type_errors_as_of_the_function(yard: Yard) -> None:
    wrong: list[tuple[Callable[[], Awaitable[object]], str]] = [
        (lambda: yard.call(f.distance), r"distance\(\) missing a required argument: 'origin'"),  # type: ignore[call-overload]
        (lambda: yard.dispatch(f.distance, 1, 2, 3), r"distance\(\) too many positional arguments"),  # type: ignore[call-overload]
        (
            lambda: yard.call(f.fare, 5, tenant="t"),  # type: ignore[call-overload]
            r"unexpected keyword argument 'tenant'; options stand beside a bound call: call\(bind\(fare, …\), tenant=…",
        ),
        (
            lambda: yard.dispatch(f.fare, 5, key="t"),  # type: ignore[call-overload]
            r"unexpected keyword argument 'key'; options stand beside a bound call: dispatch\(bind\(fare, …\), key=…",
        ),
        (lambda: yard.call("fare", 5, 6), "takes one mapping or sequence with the arguments"),  # type: ignore[call-overload]
        (lambda: yard.dispatch("fare", {"cents": 5}, 6), r"dispatch\('fare', …\) takes one mapping with the arguments"),  # type: ignore[call-overload]
        (lambda: yard.dispatch(bind(f.fare, 5), x=6), r"dispatch\(\) has no option 'x'; it has .*timeout_ms"),  # type: ignore[call-overload]
        (lambda: yard.call(bind(f.fare, 5), 6), "takes options by name only"),  # type: ignore[call-overload]
        (lambda: yard.dispatch(bind(f.fare, 5), 6), "takes options by name only"),  # type: ignore[call-overload]
        (lambda: yard.call("fare", [5], strings=True), r"call\(\) has no option 'strings'; it has max_attempts, "),  # type: ignore[call-overload]
        (lambda: yard.call("fare", x=5), r"call\(\) has no option 'x'; .*are one value: call\('fare', \{…\}\)"),  # type: ignore[call-overload]
        (lambda: yard.call_result(bind(f.fare, 5), x=1), r"call_result\(\) has no option 'x'"),  # type: ignore[call-overload]
        (lambda: anext(yard.map(f.fare, [5], x=1)), r"map\(\) has no option 'x'"),  # type: ignore[call-overload]
    ]
    for call, message in wrong:
        with pytest.raises(TypeError, match=message):
            await call()
    with pytest.raises(TypeError, match=r"fare\(\) missing a required argument"):
        bind(f.fare)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="bind takes a function"):
        bind("fare", 5)  # type: ignore[call-overload]


async def test_arguments_that_have_no_json_are_the_calls_own_failure(yard: Yard) -> None:
    thing: Any = object()
    with pytest.raises(CallError, match="arguments of untyped: /x: object has no JSON form") as caught:
        await yard.call(f.untyped, thing)
    assert (caught.value.kind, caught.value.failure.outcome) == (ErrorKind.SCHEMA, Outcome.NOT_RUN)
    done = await yard.dispatch(f.untyped, thing)
    assert (done.ok, done.error and done.error.kind) == (False, ErrorKind.SCHEMA)


def local() -> int:
    return 1


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (f.helper, r"helper of typed_file\.py is not among the functions .* declare it with @function .* there are: "),
        (typed_helpers.not_imported, r"not_imported of typed_helpers\.py is not among .* or import it, in typed_file"),
        (local, r"local is defined in .*test_typed_calls\.py, which is no part of typed_file\.py, the target here: st"),
        (lambda: 1, r"<lambda> has no name to be found by: write it as a def at the top of typed_file\.py"),
        (len, "len is written in C"),
        (7, "expected a function, or the name of one, got 7"),
    ],
)
async def test_a_function_that_is_not_the_workers_says_what_to_do(yard: Yard, function: Any, message: str) -> None:
    for call in (yard.call, yard.dispatch):
        if call == yard.dispatch and not callable(function):
            continue  # what is no name is no tool: a failure, and no mistake of the code
        with pytest.raises(UsageError, match=message):
            await call(function)
    with pytest.raises(UsageError, match=message):
        await anext(yard.map(function, []))


async def test_a_fan_out_takes_bound_calls_and_numbers_its_results(yard: Yard) -> None:
    calls = [ToolCall(bind(f.fare, 5)), ToolCall("fare", {"cents": "x"}), ToolCall(bind(f.point), deadline_ms=60_000)]
    first, second, third = await yard.dispatcher.gather_bounded(calls)
    assert (first.index, first.value, second.index, second.ok, third.index) == (0, f.Fare(cents=5), 1, False, 2)
    assert third.value == f.Point(1, 2)
    with pytest.raises(UsageError, match=r"fare\(5\) has its arguments"):
        await yard.dispatcher.gather_bounded([ToolCall(bind(f.fare, 5), {"cents": 5})])


async def test_results_as_they_end_know_their_place(yard: Yard, tmp_path: Path) -> None:
    gate, began = str(tmp_path / "gate"), str(tmp_path / "began")
    Path(f"{gate}1").touch()
    seen = []
    calls = [yard.call(f.wait_for, gate, began, 0), yard.call(f.wait_for, gate, began, 1), yard.call(f.liar, 2)]
    async for answer in as_completed(calls):
        seen.append((answer.index, answer.value if answer.ok else answer.error and answer.error.kind))
        if len(seen) == 2:
            Path(f"{gate}0").touch()
    assert sorted(seen[:2]) == [(1, 1), (2, ErrorKind.RESULT)]
    assert seen[2:] == [(0, 0)]


async def test_results_and_dispatches_as_they_end_are_what_they_are(yard: Yard) -> None:
    results = [result async for result in as_completed([yard.call_result(f.fare, n) for n in range(3)])]
    assert {result.index: result.value for result in results} == {n: f.Fare(cents=n) for n in range(3)}
    done = [result async for result in as_completed([yard.dispatch(f.fare, 1), yard.dispatch("nothing")])]
    assert {result.index: type(result).__mro__[1 - (not result.ok)] for result in done} == {0: Ok, 1: DispatchError}


async def test_a_list_in_the_order_of_ends(yard: Yard, tmp_path: Path) -> None:
    gate, began = str(tmp_path / "gate"), str(tmp_path / "began")
    for n in (1, 2):
        Path(f"{gate}{n}").touch()
    rows = [(gate, began, n) for n in range(3)]
    seen = []
    async for result in yard.map(f.wait_for, rows, ordered=False):
        seen.append((result.index, result.value))
        if len(seen) == 2:
            Path(f"{gate}0").touch()
    assert (sorted(seen[:2]), seen[2:]) == ([(1, 1), (2, 2)], [(0, 0)])


# --- what is imported here under another name -------------------------------------------------------------------------

SHOP = """
from callyard import function

@function
def price(item: str) -> int:
    return len(item)

renamed = function(lambda: 1) if False else price
"""


def load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_a_function_is_found_by_its_file_whatever_its_module_is_called_here(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "shop.py").write_text(SHOP)
    (tmp_path / "link").symlink_to(tmp_path)
    price: Function[[str], int] = load(tmp_path / "shop.py", "some.other.name").price
    twin: Function[[str], int] = load(tmp_path / "elsewhere" / "shop.py", "shop").price
    async with Worker(tmp_path / "link" / "shop.py", executors=1, spare_executors=0, on_output=quiet) as worker:
        assert await worker.call(price, "tea") == 3
        with pytest.raises(UsageError, match=r"no part of shop\.py"):
            await worker.call(twin, "tea")


async def test_a_function_by_object_is_found_anew_after_a_reload(tmp_path: Path) -> None:
    file = tmp_path / "shop.py"
    file.write_text(SHOP)
    price: Function[[str], int] = load(file, "shop_before").price
    async with Worker(file, executors=1, spare_executors=0, on_output=quiet) as worker:
        assert await worker.call(price, "tea") == 3
        file.write_text(
            SHOP.replace("len(item)", "10").replace("def price", "def cost").replace("else price", "else 0")
        )
        assert await worker.reload()
        with pytest.raises(UsageError, match=r"price of shop\.py is not among the functions .* there are: cost"):
            await worker.call(price, "tea")


async def test_a_plain_function_of_a_file_without_decorators(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("def add(a: int, *, b: int = 2) -> set[int]:\n    return {a, b}\n")
    add = load(tmp_path / "plain.py", "plain_here").add
    async with Yard(tmp_path / "plain.py", executors=1, spare_executors=0, on_output=quiet) as yard:
        assert await yard.call(add, 1, b=5) == {1, 5}
