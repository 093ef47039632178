"""Arguments as JSON: what a function takes, and what it says of what it does not take."""

from __future__ import annotations

import datetime as dt
import enum
import sys
import typing
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import pytest
import typing_extensions
from pydantic import BaseModel, Field, field_validator

from callyard.functions.function import function
from callyard.functions.misfits import ERRORS_MAX
from callyard.functions.signature import ArgumentsMisfit, Invocable, UnfitSignature


def call(target: Callable[..., Any], args: bytes, **options: bool) -> Any:
    positional, keywords = Invocable("f", target).bind(args, **options)
    return target(*positional, **keywords)


def misfit_of(target: Callable[..., Any], args: bytes, **options: bool) -> ArgumentsMisfit:
    with pytest.raises(ArgumentsMisfit) as caught:
        Invocable("f", target).bind(args, **options)
    return caught.value


def route(origin: str, dest: str) -> str:
    return f"{origin}-{dest}"


def count(number: int, times: int = 1) -> int:
    return number * times


def ratio(value: float, limit: float | None = None) -> tuple[float, float | None]:
    return value, limit


def anything(value: Any) -> Any:
    return value


def nothing() -> str:
    return "ran"


@dataclass
class Leg:
    origin: str
    dest: str
    km: float
    stops: list[str] = field(default_factory=list)
    gate: str | None = None


class LegDict(typing.TypedDict):
    origin: str
    legs: typing.NotRequired[list[LegDict]]


class ModernDict(typing_extensions.TypedDict, total=False):
    origin: typing_extensions.Required[str]
    km: float


class LegModel(BaseModel):
    origin: str
    km: float = 0.0

    @field_validator("origin")
    @classmethod
    def check_origin(cls, value: str) -> str:
        if value == "???":
            raise ValueError("no such airport")
        if value == "!!!":
            raise LookupError("the airports are gone")
        return value


class LegStruct(msgspec.Struct):
    origin: str
    km: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    at: dt.datetime | None = None


class LegTuple(NamedTuple):
    origin: str
    km: float = 0.0


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


# --- forms ----------------------------------------------------------------------------------------------------------


def test_an_object_is_by_name_and_an_array_by_position() -> None:
    assert call(route, b'{"dest":"LAX","origin":"JFK"}') == "JFK-LAX"
    assert call(route, b'["JFK","LAX"]') == "JFK-LAX"
    assert call(route, b' \n{ "origin" : "JFK" , "dest" : "LAX" }\r\n') == "JFK-LAX"
    assert call(count, b"[3]") == 3
    assert call(count, b'{"number":3,"times":2}') == 6
    assert call(route, bytes(msgspec.Raw(b'["JFK","LAX"]'))) == "JFK-LAX"
    assert Invocable("f", route).bind(msgspec.Raw(b'["JFK","LAX"]')) == (("JFK", "LAX"), {})


@pytest.mark.parametrize("args", [b"[]", b"{}", b" [ ] "])
def test_a_function_without_parameters(args: bytes) -> None:
    assert call(nothing, args) == "ran"


def everything(first: int, /, second: str = "s", *rest: int, third: float, fourth: bool = False, **more: str) -> Any:
    return first, second, rest, third, fourth, more


def variadic(*numbers: int) -> int:
    return sum(numbers)


def positional(first: int, second: int = 2, /) -> tuple[int, int]:
    return first, second


def untyped(first, second=2, *, third=3):  # type: ignore[no-untyped-def]
    return first, second, third


def test_every_kind_of_parameter() -> None:
    assert call(everything, b'{"first":1,"third":2}') == (1, "s", (), 2.0, False, {})
    assert call(everything, b'{"first":1,"second":"x","third":2.5,"fourth":true,"other":"y"}') == (
        *(1, "x", (), 2.5, True),
        {"other": "y"},
    )
    assert call(variadic, b"[1,2,3]") == 6
    assert call(variadic, b"[]") == 0
    assert call(positional, b'{"first":1}') == (1, 2)
    assert call(positional, b"[1]") == (1, 2)
    assert call(positional, b'{"second":5,"first":1}') == (1, 5)
    assert call(untyped, b'{"first":[1],"third":{"a":null}}') == ([1], 2, {"a": None})


def test_a_declared_and_an_async_function() -> None:
    @function(pure=True)
    async def later(number: int) -> int:
        return number

    invocable = Invocable("later", later.target, later.promises)
    assert invocable.is_async
    assert invocable.bind(b"[1]") == ((1,), {})
    assert not Invocable("route", route).is_async


# --- strict types ---------------------------------------------------------------------------------------------------


@pytest.mark.requirement("D4")
@pytest.mark.parametrize(
    ("target", "args", "pointer", "message"),
    [
        (route, b'{"origin":5,"dest":"LAX"}', "/origin", "expected a string, got a number (5)"),
        (route, b'{"origin":null,"dest":"LAX"}', "/origin", "expected a string, got null"),
        (route, b'["JFK",["LAX"]]', "/1", "expected a string, got an array of 1"),
        (route, b'["JFK",{"a":1}]', "/1", "expected a string, got an object of 1"),
        (count, b'{"number":"5"}', "/number", 'expected an integer, got text ("5")'),
        (count, b'{"number":true}', "/number", "expected an integer, got a boolean (true)"),
        (count, b'{"number":5.0}', "/number", "expected an integer, got a number (5.0)"),
        (count, b'{"number":1e2}', "/number", "expected an integer, got a number (100.0)"),
        (ratio, b'{"value":"1.5"}', "/value", 'expected a number, got text ("1.5")'),
        (ratio, b'{"value":false}', "/value", "expected a number, got a boolean (false)"),
        (route, b'{"origin":"JFK"}', "/dest", "required, but missing"),
        (nothing, b'{"a/b~c":1}', "/a~1b~0c", "unknown argument 'a/b~c'; the function takes no arguments"),
        (
            count,
            b'{"number":1,"tmes":2}',
            "/tmes",
            "unknown argument 'tmes' (did you mean times?); known: number, times",
        ),
        (route, b'["JFK"]', "", "expected 2 arguments (origin, dest), got 1; missing: dest"),
        (route, b'["JFK","LAX","SFO"]', "/2", "expected 2 arguments (origin, dest), got 3"),
        (count, b"[]", "", "expected at least 1 argument (number), got 0; missing: number"),
        (count, b"[1,2,3,4]", "/2", "expected at most 2 arguments (number, times), got 4"),
        (nothing, b"[1]", "/0", "expected no arguments, got 1"),
        (positional, b'{"second":1}', "/first", "required, but missing"),
        (route, b"5", "", "expected an object (keywords) or an array (positional), got a number (5)"),
        (route, b"null", "", "expected an object (keywords) or an array (positional), got null"),
        (route, b'"JFK"', "", 'expected an object (keywords) or an array (positional), got text ("JFK")'),
    ],
)
def test_a_misfit_names_the_place_what_was_expected_and_what_came(
    target: Callable[..., Any], args: bytes, pointer: str, message: str
) -> None:
    found = misfit_of(target, args)
    assert found.details["pointer"] == pointer
    error = found.details["errors"][0]
    assert error == {**error, "pointer": pointer, "message": message}
    assert error.keys() == {"pointer", "keyword", "message", "expected"}
    assert error["keyword"]
    assert error["expected"]
    assert found.message == (f"{pointer}: {message}" if pointer else message)


@pytest.mark.requirement("D4")
def test_all_errors_are_reported_an_unknown_name_first() -> None:
    found = misfit_of(route, b'{"orign":"JFK","dest":5}')
    assert [error["pointer"] for error in found.details["errors"]] == ["/orign", "/origin", "/dest"]
    assert found.message == (
        "/orign: unknown argument 'orign' (did you mean origin?); known: origin, dest;"
        " /origin: required, but missing; /dest: expected a string, got a number (5)"
    )


@pytest.mark.requirement("D4")
def test_at_most_a_hundred_errors_are_listed() -> None:
    def texts(values: list[str]) -> None: ...

    found = misfit_of(texts, b"[[" + b",".join([b"1"] * 250) + b"]]")
    assert len(found.details["errors"]) == ERRORS_MAX == 100
    assert found.details["errors_total"] == 250
    assert found.message == "/0/0: expected a string, got a number (1) (and 249 more)"
    many = misfit_of(texts, b"[[" + b",".join([b"1"] * 30_000) + b"]]")
    assert many.message == "30000 values do not fit: too many to list"


def test_the_branches_of_a_union_are_one_error() -> None:
    def union(value: int | list[int] | None) -> None: ...

    assert misfit_of(union, b'{"value":"a"}').message == '/value: expected an integer or an array, got text ("a")'


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        (dt.datetime, '"2013-01-01T05:00:00Z"', dt.datetime(2013, 1, 1, 5, tzinfo=dt.UTC)),
        (dt.date, '"2013-01-31"', dt.date(2013, 1, 31)),
        (dt.time, '"05:15:00"', dt.time(5, 15)),
        (dt.timedelta, '"PT90S"', dt.timedelta(seconds=90)),
        (uuid.UUID, '"6ec57f84-c680-4d3a-b778-57ee6a3d3b9c"', uuid.UUID("6ec57f84-c680-4d3a-b778-57ee6a3d3b9c")),
        (Decimal, '"1.50"', Decimal("1.50")),
        (bytes, '"YWJj"', b"abc"),
        (bytearray, '"YWJj"', bytearray(b"abc")),
        (Colour, '"red"', Colour.RED),
        (Literal["a", 1], "1", 1),
        (tuple[int, str], '[1,"a"]', (1, "a")),
        (set[int], "[1,2,2]", {1, 2}),
        (frozenset[str], '["a"]', frozenset("a")),
        (dict[str, list[int]], '{"a":[1]}', {"a": [1]}),
        (Mapping[str, int], '{"a":1}', {"a": 1}),
        (int | str, '"5"', "5"),
        (int | str, "5", 5),
        (float, "3", 3.0),
        (Any, '{"a":[1,null,true,"x",1.5]}', {"a": [1, None, True, "x", 1.5]}),
        (Annotated[int, Field(ge=1)], "1", 1),
        (int, "123456789012345678901234567890", 123456789012345678901234567890),
        (Any, "-99999999999999999999999", -99999999999999999999999),
        (Leg, '{"origin":"JFK","dest":"LAX","km":3}', Leg("JFK", "LAX", 3.0)),
        (LegDict, '{"origin":"JFK","legs":[{"origin":"LAX"}]}', {"origin": "JFK", "legs": [{"origin": "LAX"}]}),
        (ModernDict, '{"origin":"JFK"}', {"origin": "JFK"}),
        (LegModel, '{"origin":"JFK","km":1}', LegModel(origin="JFK", km=1)),
        (
            LegStruct,
            '{"origin":"JFK","at":"2013-01-01T00:00:00Z"}',
            LegStruct("JFK", 0.0, dt.datetime(2013, 1, 1, tzinfo=dt.UTC)),
        ),
        (list[LegStruct | None], '[{"origin":"JFK"},null]', [LegStruct("JFK"), None]),
        (LegTuple, '{"origin":"JFK"}', LegTuple("JFK")),
    ],
    ids=str,
)
@pytest.mark.requirement("D2")
def test_types_of_parameters(annotation: Any, text: str, value: Any) -> None:
    def take(parameter: Any) -> Any:
        return parameter

    take.__annotations__["parameter"] = annotation
    result = call(take, f'{{"parameter":{text}}}'.encode())
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    ("annotation", "text", "message"),
    [
        (
            Annotated[int, Field(ge=1)],
            "0",
            "/parameter: expected a number greater than or equal to 1, got a number (0)",
        ),
        (Literal["a", 1], '"b"', "/parameter: expected 'a' or 1, got text (\"b\")"),
        (Colour, '"green"', "/parameter: expected 'red' or 'blue', got text (\"green\")"),
        (Leg, '{"origin":"JFK"}', "/parameter/dest: required, but missing; /parameter/km: required, but missing"),
        (
            LegDict,
            '{"origin":"JFK","legs":[{"origin":1}]}',
            "/parameter/legs/0/origin: expected a string, got a number (1)",
        ),
        (LegModel, '{"origin":"???"}', "/parameter/origin: no such airport"),
        (LegModel, '{"origin":"!!!"}', "checking the arguments raised LookupError: the airports are gone"),
        (LegStruct, '{"origin":1}', "/parameter/origin: expected a string, got a number (1)"),
        (LegStruct, '{"origin":"JFK","km":-1}', "/parameter/km: expected a number >= 0.0, got a number (-1)"),
        (
            list[LegStruct],
            '[{"origin":"a"},{}]',
            "/parameter/1: object missing required field origin, got an object of 0",
        ),
    ],
    ids=str,
)
def test_misfits_inside_typed_parameters(annotation: Any, text: str, message: str) -> None:
    def take(parameter: Any) -> None: ...

    take.__annotations__["parameter"] = annotation
    assert misfit_of(take, f'{{"parameter":{text}}}'.encode()).message == message


# --- rows -----------------------------------------------------------------------------------------------------------


def of_leg(leg: Leg) -> Leg:
    return leg


def of_leg_and_unit(leg: Leg, unit: str = "km") -> tuple[Leg, str]:
    return leg, unit


def of_keyword_leg(*, leg: Leg | None) -> Leg | None:
    return leg


def of_dict(row: dict) -> dict:  # type: ignore[type-arg]
    return row


def of_mapping(row: Mapping[str, float]) -> Mapping[str, float]:
    return row


def of_typed_dict(row: LegDict) -> LegDict:
    return row


def of_struct(row: Annotated[LegStruct, "a row"]) -> LegStruct:
    return row


def of_model(row: LegModel) -> LegModel:
    return row


def of_named_tuple(row: LegTuple) -> LegTuple:
    return row


def of_either(row: LegStruct | LegModel) -> LegStruct | LegModel:
    return row


def of_optional(row: Leg = Leg("a", "b", 1.0)) -> Leg:  # noqa: B008 - a default like any other
    return row


LEG = b'{"origin":"JFK","dest":"LAX","km":3983}'


@pytest.mark.parametrize(
    ("target", "args", "result"),
    [
        (of_leg, LEG, Leg("JFK", "LAX", 3983.0)),
        (of_leg, b" " + LEG, Leg("JFK", "LAX", 3983.0)),
        (of_leg, b"[" + LEG + b"]", Leg("JFK", "LAX", 3983.0)),
        (of_leg_and_unit, LEG, (Leg("JFK", "LAX", 3983.0), "km")),
        (of_keyword_leg, LEG, Leg("JFK", "LAX", 3983.0)),
        (of_dict, LEG, {"origin": "JFK", "dest": "LAX", "km": 3983}),
        (of_mapping, b'{"a":1}', {"a": 1.0}),
        (of_typed_dict, b'{"origin":"JFK","other":1}', {"origin": "JFK"}),
        (of_struct, b'{"origin":"JFK","other":1}', LegStruct("JFK")),
        (of_model, b'{"origin":"JFK","other":1}', LegModel(origin="JFK")),
        (of_named_tuple, b'{"origin":"JFK","km":2}', LegTuple("JFK", 2.0)),
        (of_optional, LEG, Leg("JFK", "LAX", 3983.0)),
        (route, b'{"origin":"JFK","dest":"LAX"}', "JFK-LAX"),
    ],
)
def test_a_row_is_by_name_or_the_one_object(target: Callable[..., Any], args: bytes, result: Any) -> None:
    assert call(target, args, row=True) == result


@pytest.mark.parametrize(
    ("target", "takes_row"),
    [
        *((of_leg, True), (of_leg_and_unit, True), (of_keyword_leg, True), (of_dict, True), (of_mapping, True)),
        *((of_typed_dict, True), (of_struct, True), (of_model, True), (of_named_tuple, True), (of_either, True)),
        *((of_optional, True), (route, False), (count, False), (untyped, False), (anything, False)),
        *((nothing, False), (variadic, False), (everything, False)),
    ],
)
def test_which_functions_take_a_whole_row(target: Callable[..., Any], takes_row: bool) -> None:
    assert Invocable("f", target).takes_row is takes_row


def test_without_row_an_object_is_by_name_also_for_one_object_parameter() -> None:
    assert call(of_leg, b'{"leg":' + LEG + b"}") == Leg("JFK", "LAX", 3983.0)
    assert misfit_of(of_leg, LEG).details["pointer"] == "/origin"


@pytest.mark.parametrize(
    ("annotation", "text", "message"),
    [
        (dt.date, "31.12.2024", "a date such as 2024-05-31 (invalid character in year)"),
        (dt.date, "2024-13-01", "a date such as 2024-05-31 (month value is outside expected range of 1-12)"),
        (dt.datetime, "yesterday", "a date and time such as 2024-05-31T08:30:00 (input is too short)"),
        (dt.time, "noon", "a time such as 08:30:00 (input is too short)"),
        (dt.timedelta, "5 minutes", "a duration such as PT5M or 00:05:00 (invalid character in hour)"),
    ],
)
def test_a_date_that_is_none_is_told_how_one_looks(annotation: type, text: str, message: str) -> None:
    def on(when):  # type: ignore[no-untyped-def]
        return when

    on.__annotations__["when"] = annotation
    misfit = misfit_of(on, f'{{"when":"{text}"}}'.encode())
    assert misfit.message == f'/when: expected {message}, got text ("{text}")'
    assert misfit.details["errors"][0]["expected"] == message


def test_without_row_fields_of_the_one_object_parameter_are_told_their_place() -> None:
    assert (
        "unknown argument 'origin'; known: leg (an object, with its fields in it: {\"leg\": {…}})"
        in misfit_of(of_leg, LEG).message
    )


def test_a_misfit_in_a_row_points_into_the_row() -> None:
    assert misfit_of(of_leg, b'{"origin":"JFK","dest":"LAX","km":"far"}', row=True).message == (
        '/km: expected a number, got text ("far")'
    )
    assert misfit_of(of_leg, b'{"origin":"JFK"}', row=True).details["pointer"] == "/dest"


def test_an_untyped_parameter_does_not_swallow_a_row_and_says_what_would() -> None:
    def score(row):  # type: ignore[no-untyped-def]
        return row

    assert (
        "unknown argument 'km'; known: row (write row: dict to take a whole row)"
        in misfit_of(score, b'{"km":1}', row=True).message
    )


# --- loose JSON -----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("D26")
@pytest.mark.parametrize(
    ("target", "args", "message"),
    [
        (route, b'{"origin":"a","dest":"b","origin":"c"}', 'a key stands twice: "origin" at line 1'),
        (count, b'{"number":1,"number":2}', 'a key stands twice: "number" at line 1'),
        (count, b'{"number":1,"\\u006eumber":2}', 'a key stands twice: "number" at line 1'),
        (of_dict, b'{"row":{"a":1,"a":2}}', 'a key stands twice: "a" at line 1'),
        (anything, b'{"value":[{"a":{"b":1,"b":2}}]}', 'a key stands twice: "b" at line 1'),
        (ratio, b'{"value":NaN}', "NaN and Infinity are not JSON: use null"),
        (ratio, b'{"value":Infinity}', "NaN and Infinity are not JSON: use null"),
        (anything, b"[-Infinity]", "NaN and Infinity are not JSON: use null"),
        (ratio, b'{"value":1e999}', "/value: expected a finite number"),
        (ratio, b"[-1E+400]", "/0: expected a finite number"),
        (ratio, b'{"value":1' + b"0" * 400 + b"}", "/value: expected a finite number"),
        (anything, b'{"value":[{"a":1e309}]}', "/value/0/a: expected a finite number"),
        (anything, b'{"value":1' + b"0" * 400 + b".0}", "/value: expected a finite number"),
        (anything, b"[" * 300 + b"]" * 300, "nested too deeply"),
        (of_leg, b"[" * 100_000, "nested too deeply"),
        (route, b'{"origin":"JFK","dest":"LA', "not JSON: EOF while parsing a string at line 1 column 26"),
        (route, b'{"origin":"JFK","dest":"LAX"} {}', "not JSON: trailing characters"),
        (route, b"", "expected JSON, got nothing"),
        (route, b"  ", "expected JSON, got nothing"),
        (route, b'["\xff","LAX"]', "not JSON: invalid unicode code point"),
        (route, b'["\\ud800","LAX"]', "not JSON: "),
        (route, b"['JFK','LAX']", "not JSON: "),
        (route, b'["JFK","LAX",]', "not JSON: trailing comma"),
    ],
    ids=lambda value: value[:30] if isinstance(value, bytes) else None,
)
def test_loose_json_is_refused(target: Callable[..., Any], args: bytes, message: str) -> None:
    assert message in misfit_of(target, args).message


@pytest.mark.requirement("D26")
@pytest.mark.parametrize(
    ("target", "args"),
    [
        (of_dict, b'{"a":1,"b":2,"a":3}'),
        (of_leg, b'{"origin":"a","dest":"b","km":1,"gate":"x","gate":"y"}'),
        (of_leg, b'{"origin":"a","dest":"b","km":1,"km":1}'),
        (of_typed_dict, b'{"origin":"a","origin":"a"}'),
        (of_model, b'{"origin":"a","km":1,"km":1}'),
        (of_struct, b'{"origin":"a","km":1,"km":1}'),
    ],
)
def test_duplicate_keys_of_a_row_are_refused(target: Callable[..., Any], args: bytes) -> None:
    assert "a key stands twice" in misfit_of(target, args, row=True).message


def test_large_but_finite_numbers_pass() -> None:
    assert call(ratio, b'{"value":1.7976931348623157e308}') == (1.7976931348623157e308, None)
    assert call(ratio, b'{"value":1e-400}') == (0.0, None)
    assert call(anything, b'["1e999 is text, NaN too"]') == "1e999 is text, NaN too"


# --- what cannot be called ------------------------------------------------------------------------------------------


class Connection:
    """No type of JSON's."""


def test_a_parameter_that_json_cannot_carry_is_named() -> None:
    def store(number: int, link: Connection) -> None: ...

    with pytest.raises(UnfitSignature, match=r"store: parameter link: Connection has no JSON form"):
        Invocable("store", store)


def test_an_annotation_that_does_not_exist_at_run_time_is_named() -> None:
    def absent(value: Absent) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(UnfitSignature, match=r"absent: name 'Absent' is not defined; .* not only under TYPE_CHECKING"):
        Invocable("absent", absent)


def test_a_struct_with_a_field_that_msgspec_cannot_read_is_refused_at_once() -> None:
    class Broken(msgspec.Struct):
        link: Annotated[int, msgspec.Meta(min_length=1)]

    def take(value: Broken) -> None: ...

    take.__annotations__["value"] = Broken
    with pytest.raises(UnfitSignature, match=r"take: parameter value: .*Broken has no JSON form \(Can only set"):
        Invocable("take", take)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="pydantic takes typing.TypedDict from 3.12 on")
def test_a_rebuilt_typed_dict_stays_the_class_that_it_was() -> None:
    Invocable("f", of_typed_dict)
    assert of_typed_dict.__annotations__["row"] in ("LegDict", LegDict)
    assert LegDict(origin="JFK") == {"origin": "JFK"}
    assert typing.is_typeddict(LegDict)
