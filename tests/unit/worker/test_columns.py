"""Columns that a function has no place for, and what a result repeats of its row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import msgspec
import pytest
from pydantic import BaseModel, ConfigDict, Field

from callyard import Registry, UsageError
from callyard.functions.registry import FunctionSpec
from callyard.worker.builders import IterableSource, Row, open_source
from callyard.worker.columns import FittedRows, names_taken


@dataclass
class Trip:
    rider: str
    km: float
    tip: float = 0


class Loose(BaseModel):
    model_config = ConfigDict(extra="allow")
    rider: str


class Aliased(BaseModel):
    model_config = ConfigDict(populate_by_name=True)
    rider: str = Field(alias="Rider")


class Typed(TypedDict):
    rider: str


class Packed(msgspec.Struct):
    rider: str


@dataclass
class Linked:
    rider: str
    next: Linked | None = field(default=None)


def spec_of(target: Any) -> FunctionSpec:
    return Registry().add_function(target)


def by_name(rider: str, km: float, tip: float = 0) -> None: ...
def by_any_name(rider: str, **others: str) -> None: ...
def whole(trip: Trip) -> None: ...
def whole_or_none(trip: Trip | None) -> None: ...
def one_of_two(trip: Trip | Packed) -> None: ...
def with_default(trip: Trip, currency: str = "EUR") -> None: ...
def loose(trip: Loose) -> None: ...
def aliased(trip: Aliased) -> None: ...
def typed(trip: Typed) -> None: ...
def packed(trip: Packed) -> None: ...
def linked(trip: Linked) -> None: ...
def mapping(trip: dict[str, float]) -> None: ...
def unannotated(trip) -> None: ...  # type: ignore[no-untyped-def]


@pytest.mark.parametrize(
    ("target", "names"),
    [
        (by_name, ("rider", "km", "tip")),
        (by_any_name, None),
        (whole, ("rider", "km", "tip")),
        (whole_or_none, ("rider", "km", "tip")),
        (one_of_two, ("rider", "km", "tip")),
        (with_default, ("rider", "km", "tip")),
        (loose, None),
        (aliased, None),
        (typed, ("rider",)),
        (packed, ("rider",)),
        (linked, ("rider", "next")),
        (mapping, None),
        (unannotated, ("trip",)),
    ],
)
def test_which_names_a_function_takes(target: Any, names: tuple[str, ...] | None) -> None:
    assert names_taken(spec_of(target)) == names


def fitted(source: Any, target: Any = whole, **options: Any) -> list[Row]:
    return list(FittedRows(source, spec_of(target), **options).rows())


def args(rows: Sequence[Row]) -> list[Any]:
    return [msgspec.json.decode(row.args) for row in rows]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "trips.csv"
    path.write_text("id,rider,km,tipp\nA1,ada,7,1\nA2,ben,3,\n")
    return path


@pytest.mark.requirement("X43")
def test_all_unknown_columns_of_a_header_are_one_error_before_any_row(table: Path) -> None:
    with pytest.raises(UsageError) as caught:
        FittedRows(open_source(table), spec_of(whole))
    text = str(caught.value)
    assert text.startswith(
        f"{table}: unknown columns id, tipp: whole takes rider, km, tip; is 'tipp' meant to be 'tip'?"
    )
    assert "nothing was run" in text
    assert "--columns rider,km" in text
    assert "--extra=ignore" in text


def test_a_column_in_upper_case_is_recognised(tmp_path: Path) -> None:
    path = tmp_path / "trips.csv"
    path.write_text("RIDER,KM\nada,7\n")
    with pytest.raises(
        UsageError, match="is 'RIDER' meant to be 'rider'\\? is 'KM' meant to be 'km'\\? nothing was run"
    ):
        FittedRows(open_source(path), spec_of(whole))


def test_columns_that_fit_pass_untouched(tmp_path: Path) -> None:
    path = tmp_path / "trips.csv"
    path.write_text("rider,km\nada,7\n")
    assert fitted(open_source(path)) == [Row(0, b'{"rider":"ada","km":"7"}', None, True)]


@pytest.mark.parametrize("options", [{"columns": ["rider", "km"]}, {"extra": "ignore"}])
def test_the_two_ways_out(table: Path, options: dict[str, Any]) -> None:
    assert args(fitted(open_source(table), **options)) == [{"rider": "ada", "km": "7"}, {"rider": "ben", "km": "3"}]


def test_an_id_need_not_be_an_argument_and_is_one_where_it_is_taken(table: Path) -> None:
    rows = fitted(open_source(table), columns=["rider", "km"], id="id")
    assert [row.echo for row in rows] == [b'"id":"A1"', b'"id":"A2"']
    assert args(rows)[0] == {"rider": "ada", "km": "7"}
    rows = fitted(open_source(table), extra="ignore", id="rider")
    assert [row.echo for row in rows] == [b'"id":"ada"', b'"id":"ben"']
    assert args(rows)[0] == {"rider": "ada", "km": "7"}
    with pytest.raises(UsageError, match="unknown column tipp"):  # and not the id
        fitted(open_source(table), id="id")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"id": "idd"}, "there is no column 'idd' for id; is 'idd' meant to be 'id'\\? it has id, rider, km, tipp"),
        ({"columns": ["rider", "kms"]}, "there is no column 'kms' for columns"),
        ({"columns": ["id", "rider"]}, "unknown column id: whole takes"),
        ({"columns": []}, "columns must be a list of one name or more"),
        ({"columns": "rider"}, "columns must be a list"),
        ({"extra": "drop"}, "extra must be 'refuse' or 'ignore'"),
    ],
)
def test_options_that_fit_nothing(table: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        FittedRows(open_source(table), spec_of(whole), **options)


def test_the_first_json_row_stands_for_all(tmp_path: Path) -> None:
    path = tmp_path / "trips.jsonl"
    path.write_text('not json\n{"rider":"ada","kmm":1}\n')
    with pytest.raises(UsageError, match=r"trips\.jsonl: unknown column kmm"):
        fitted(open_source(path))
    path.write_text('{"rider":"ada","km":1}\n{"rider":"ada","kmm":1}\n[{"rider":"x","km":2}]\n')
    assert [row.args for row in fitted(open_source(path))] == path.read_bytes().splitlines()
    rows = fitted(open_source(path), extra="ignore")
    assert args(rows) == [{"rider": "ada", "km": 1}, {"rider": "ada"}, [{"rider": "x", "km": 2}]]


def test_numbers_of_json_rows_stay_as_they_were_written() -> None:
    source = IterableSource([{"rider": "a", "km": 12345678901234567890, "note": 1}])
    assert [row.args for row in fitted(source, extra="ignore")] == [b'{"km":12345678901234567890,"rider":"a"}']


def test_what_a_result_repeats(tmp_path: Path) -> None:
    path = tmp_path / "trips.json"
    path.write_text('[{"rider": "ada",\n "km": 1, "id": 7},\n{"rider": "ben", "km": 2}]')
    rows = fitted(open_source(path), id="id", with_args=True)
    assert rows[0].echo == b'"id":7,"args":{"rider":"ada","km":1}'
    assert rows[1].echo == b'"id":null,"args":{"rider": "ben", "km": 2}'
    assert not any(b"\n" in row.echo for row in rows)


def test_arrays_have_no_columns(tmp_path: Path) -> None:
    path = tmp_path / "trips.jsonl"
    path.write_text('["ada", 1]\n')
    assert args(fitted(open_source(path), by_name)) == [["ada", 1]]
    with pytest.raises(UsageError, match="id names a column, but the first row is an array"):
        fitted(open_source(path), by_name, id="id")


def test_a_bad_row_stays_the_failure_that_it_is(tmp_path: Path) -> None:
    path = tmp_path / "trips.csv"
    path.write_text("rider,km\nada\nben,2\n")
    first, second = fitted(open_source(path), id="rider")
    assert first.failure is not None
    assert second.echo == b'"id":"ben"'
