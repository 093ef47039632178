"""Text values: CSV cells and `key=value`, parsed by the type of each parameter."""

from __future__ import annotations

import datetime as dt
import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Literal, TypedDict
from uuid import UUID

import msgspec
import pytest
from pydantic import BaseModel, Field

from callyard.functions.cells import Columns
from callyard.functions.signature import ArgumentsMisfit, Invocable


class Level(enum.Enum):
    LOW = 1
    HIGH = 2


class Word(enum.StrEnum):
    YES = "yes"


def cells(target: Callable[..., Any], *, row: bool = False, **texts: str) -> Any:
    positional, keywords = Invocable("f", target).bind(msgspec.json.encode(texts), row=row, strings=True)
    return target(*positional, **keywords)


def misfit_of(target: Callable[..., Any], *, row: bool = False, **texts: str) -> str:
    with pytest.raises(ArgumentsMisfit) as caught:
        cells(target, row=row, **texts)
    return caught.value.message


def take(annotation: Any) -> Callable[..., Any]:
    def identity(value: Any) -> Any:
        return value

    identity.__annotations__["value"] = annotation
    return identity


@pytest.mark.requirement("D49")
@pytest.mark.parametrize("annotation", [int, int | None])
def test_a_thousand_with_a_point_is_no_one(annotation: Any) -> None:
    assert cells(take(annotation), value="5.0") == 5
    for text in ("1.000", "-12.00"):
        assert f'expected an integer, got text ("{text}")' in misfit_of(take(annotation), value=text)
    assert cells(take(float), value="1.000") == 1.0


def test_where_no_column_is_whole_a_price_is_not_looked_at() -> None:
    raw = b'{"price":"12.00","name":"a"}'
    prices = Columns({"properties": {"price": {"type": "number"}, "name": {"type": "string"}}})
    assert prices.prepare(raw) is raw


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        (int, "5", 5),
        (int, " 12 ", 12),
        (int, "123456789012345678901234567890", 123456789012345678901234567890),
        (float, "1.5", 1.5),
        (float, "1e3", 1000.0),
        (bool, "true", True),
        (bool, "no", False),
        (bool, "1", True),
        (str, "5", "5"),
        (str, "null", "null"),
        (str, '{"a":1}', '{"a":1}'),
        (str, "nan", "nan"),
        (str, "1e999", "1e999"),
        (str, ' "quoted"\n', ' "quoted"\n'),
        (str, "", ""),
        (str | None, "", None),
        (int | None, "", None),
        (int | None, "7", 7),
        (Decimal, "1.50", Decimal("1.50")),
        (Decimal | None, "1.50", Decimal("1.50")),
        (dt.date, "2013-01-31", dt.date(2013, 1, 31)),
        (dt.datetime | None, "2013-01-01T05:00:00Z", dt.datetime(2013, 1, 1, 5, tzinfo=dt.UTC)),
        (UUID, "6ec57f84-c680-4d3a-b778-57ee6a3d3b9c", UUID("6ec57f84-c680-4d3a-b778-57ee6a3d3b9c")),
        (Level, "2", Level.HIGH),
        (Word, "yes", Word.YES),
        (Literal[1, "a"], "1", 1),
        (Literal[1, "a"], "a", "a"),
        (int | str, "5", 5),
        (int | str, "007", "007"),
        (int | str, "five", "five"),
        (bool | str, "true", True),
        (bool | str, "tree", "tree"),
        (list[int], "[1,2]", [1, 2]),
        (list[str] | None, '["a"]', ["a"]),
        (dict[str, float], '{"a": 1}', {"a": 1.0}),
        (list[int] | str, "[1", "[1"),
        (Annotated[int, Field(ge=1)], "3", 3),
        (Any, "5", "5"),
    ],
    ids=str,
)
def test_a_cell_by_type(annotation: Any, text: str, value: Any) -> None:
    result = cells(take(annotation), value=text)
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    ("annotation", "text", "message"),
    [
        (int, "", "/value: required, but its value is empty"),
        (int, "five", '/value: expected an integer, got text ("five")'),
        (bool, "maybe", '/value: expected true or false, got text ("maybe")'),
        (list[int], "1,2", '/value: expected an array, got text ("1,2")'),
        (Level, "3", "/value: expected 1 or 2, got a number (3)"),
        (float, "nan", "/value: expected a finite number, got one that no float can hold"),
        (float, "-Infinity", "/value: expected a finite number, got one that no float can hold"),
        (float, "1e999", "/value: expected a finite number, got one that no float can hold"),
        (list[float], "[1e999]", "/value/0: expected a finite number, got one that no float can hold"),
        (dict[str, int], '{"a":1,"a":2}', 'a key stands twice: "a" at line 1 column 21'),
    ],
    ids=str,
)
def test_a_cell_that_does_not_fit(annotation: Any, text: str, message: str) -> None:
    assert misfit_of(take(annotation), value=text) == message


def test_an_empty_cell_of_a_required_column_is_said() -> None:
    def total(price: float, name: Annotated[str, Field(min_length=1)]) -> float:
        return price

    message = misfit_of(total, row=True, price="", name="")
    assert message.startswith("/price: required, but the cell is empty; /name: string should have at least 1 character")


def test_texts_beside_any_number_of_others() -> None:
    def f(a: int, *args: int, k: int = 1, **more: int) -> tuple[object, ...]:
        return a, args, k, more

    assert cells(f, a="1", k="", z="2") == (1, (), 1, {"z": 2})


def test_an_empty_cell_is_an_absent_argument_with_a_default() -> None:
    def defaults(number: int = 3, unit: str = "km", limit: int | None = 5) -> tuple[int, str, int | None]:
        return number, unit, limit

    assert cells(defaults, number="", unit="", limit="") == (3, "km", 5)
    assert cells(defaults, number="1", unit="m") == (1, "m", 5)


def test_unknown_names_are_errors() -> None:
    assert (
        misfit_of(take(int), value="1", valu="") == "/valu: unknown argument 'valu' (did you mean value?); known: value"
    )


@dataclass
class LegRow:
    origin: str
    km: float
    gate: str | None
    stops: list[str]
    unit: str = "km"


class LegDict(TypedDict):
    origin: str
    km: float | None


class LegModel(BaseModel):
    origin: str = Field(alias="from")
    km: float | None
    level: Level = Level.LOW


class LegStruct(msgspec.Struct):
    origin: str
    km: float | None
    stops: list[str] = []


def of_row(row: LegRow) -> LegRow:
    return row


def of_dict(row: LegDict) -> LegDict:
    return row


def of_model(row: LegModel) -> LegModel:
    return row


def of_struct(row: LegStruct) -> LegStruct:
    return row


def of_texts(row: dict[str, str]) -> dict[str, str]:
    return row


def of_anything(row: dict) -> dict:  # type: ignore[type-arg]
    return row


def of_numbers(row: Mapping[str, float]) -> Mapping[str, float]:
    return row


@pytest.mark.parametrize(
    ("target", "texts", "result"),
    [
        (of_row, {"origin": "JFK", "km": "5", "gate": "", "stops": "[]", "unit": ""}, LegRow("JFK", 5.0, None, [])),
        (of_row, {"origin": "", "km": "5", "gate": "B2", "stops": '["x"]', "more": "z"}, LegRow("", 5.0, "B2", ["x"])),
        (of_dict, {"origin": "JFK", "km": ""}, {"origin": "JFK", "km": None}),
        (of_model, {"from": "JFK", "km": "", "level": "2"}, LegModel(**{"from": "JFK"}, km=None, level=Level.HIGH)),
        (of_struct, {"origin": "JFK", "km": "", "stops": '["a"]'}, LegStruct("JFK", None, ["a"])),
        (of_texts, {"origin": "JFK", "km": ""}, {"origin": "JFK", "km": ""}),
        (of_anything, {"origin": "JFK", "km": "5", "gate": ""}, {"origin": "JFK", "km": "5", "gate": ""}),
        (of_numbers, {"a": "1", "b": ""}, {"a": 1.0}),
    ],
)
def test_a_row_of_cells(target: Callable[..., Any], texts: dict[str, str], result: Any) -> None:
    assert cells(target, row=True, **texts) == result


def test_a_misfit_in_a_row_of_cells() -> None:
    message = misfit_of(of_row, row=True, origin="JFK", km="far", gate="", stops="[]")
    assert message == '/km: expected a number, got text ("far")'
    assert misfit_of(of_row, row=True, origin="JFK", km="nan", gate="", stops="[]").startswith("/km: expected a finite")
    assert misfit_of(of_model, row=True, **{"from": "JFK", "km": "1e400"}).startswith("/km: expected a finite number")
    assert misfit_of(of_struct, row=True, origin="JFK", km="inf").startswith("/km: expected a finite number")


def test_a_whole_object_can_be_one_text() -> None:
    """`callyard call f.py:g row='{"origin": …}'`."""
    args = msgspec.json.encode({"row": '{"origin":"JFK","km":null}'})
    assert Invocable("f", of_dict).bind(args, strings=True) == ((), {"row": {"origin": "JFK", "km": None}})


def test_texts_by_position() -> None:
    def add(first: int, second: int = 2) -> int:
        return first + second

    positional, keywords = Invocable("add", add).bind(b'["1","5"]', strings=True)
    assert add(*positional, **keywords) == 6
