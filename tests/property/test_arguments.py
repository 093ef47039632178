"""Arguments and results for any JSON, any bytes, any Python value: right, or refused with a place; nothing else."""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from callyard.functions.encoding import ResultMisfit, encode_canonical, encode_value
from callyard.functions.signature import ArgumentsMisfit, Invocable
from callyard.worker.builders import CHUNK_BYTES, CsvSource, IterableSource, JsonlSource


@dataclass
class Leg:
    origin: str
    km: float
    stops: list[str]
    gate: int | None = None


def take(origin: str, km: float, count: int = 1, gate: int | None = None) -> Any:
    return origin, km, count, gate


def of_leg(leg: Leg) -> Leg:
    return leg


def of_any(value: Any) -> Any:
    return value


TAKE, OF_LEG, OF_ANY = Invocable("take", take), Invocable("of_leg", of_leg), Invocable("of_any", of_any)

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


def dump(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def misfit_of(invocable: Invocable, raw: bytes, *, row: bool, strings: bool) -> ArgumentsMisfit | None:
    try:
        invocable.bind(raw, row=row, strings=strings)
    except ArgumentsMisfit as misfit:
        return misfit
    return None


def value_at(pointer: str, value: Any) -> Any:
    for token in pointer.split("/")[1:]:
        name = token.replace("~1", "/").replace("~0", "~")
        value = value[int(name)] if isinstance(value, list) else value[name]
    return value


@given(TEXT, NUMBERS, st.integers(), st.none() | st.integers(), st.booleans())
def test_what_fits_arrives_as_it_was_sent(origin: str, km: float, count: int, gate: int | None, named: bool) -> None:
    if math.isfinite(_float(km)):
        args = {"origin": origin, "km": km, "count": count, "gate": gate}
        positional, keywords = TAKE.bind(dump(args if named else list(args.values())))
        assert take(*positional, **keywords) == (origin, float(km), count, gate)


def _float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf


@given(JSON)
def test_any_json_arrives_in_an_untyped_parameter(value: Any) -> None:
    assert OF_ANY.bind(dump([value])) == ((value,), {})
    assert OF_ANY.bind(dump({"value": value}), row=True) == ((), {"value": value})


@pytest.mark.requirement("D4")
@given(st.sampled_from([TAKE, OF_LEG]), JSON, st.booleans(), st.booleans())
@example(TAKE, {"origin": "a", "km": True, "count": 1.0, "gate": "5"}, False, False)
@example(OF_LEG, {"origin": 1, "km": 1e308, "stops": ["a", None], "gate": {}}, True, False)
def test_any_json_fits_or_is_refused_with_a_place_in_it(
    invocable: Invocable, value: Any, row: bool, strings: bool
) -> None:
    misfit = misfit_of(invocable, dump(value), row=row, strings=strings)
    if misfit is None:
        return
    errors = misfit.details["errors"]
    assert 1 <= len(errors) <= 100
    assert misfit.details["pointer"] == errors[0]["pointer"]
    for error in errors:
        assert error["message"]
        assert error["expected"]
        if error["keyword"] != "required" and not strings and "argument" not in error["expected"]:
            value_at(error["pointer"], value)


@given(
    st.dictionaries(st.sampled_from(["origin", "km", "stops", "gate", "more"]), JSON),
    st.booleans(),
)
def test_rows_with_the_right_names(row: dict[str, Any], strings: bool) -> None:
    try:
        positional, keywords = OF_LEG.bind(dump(row), row=True, strings=strings)
    except ArgumentsMisfit:
        return
    leg = of_leg(*positional, **keywords)
    assert isinstance(leg.origin, str)
    assert type(leg.km) is float
    assert math.isfinite(leg.km)
    assert all(type(stop) is str for stop in leg.stops)
    assert leg.gate is None or type(leg.gate) is int


@given(
    st.binary()
    | st.lists(st.sampled_from([*'{}[]":,\\eE+-.019 \n', "NaN", "Infinity", "true", "null", '"a"', "1e999"])).map(
        lambda parts: "".join(parts).encode()
    ),
    st.booleans(),
    st.booleans(),
)
@example(b'[{"a":1,"a":1}]', False, False)
@example(b"[1e999]", False, False)
@example(b"[NaN]", True, True)
def test_any_bytes_are_strict_json_or_refused(raw: bytes, row: bool, strings: bool) -> None:
    """The reference is the standard library's parser, told to refuse what strict JSON has not."""
    for invocable in (OF_ANY, TAKE, OF_LEG):
        if misfit_of(invocable, raw, row=row, strings=strings) is None:
            assert isinstance(parse_strictly(raw), dict | list)


def parse_strictly(raw: bytes) -> Any:
    def refuse(text: str) -> Any:
        raise AssertionError(f"{text} passed")

    def no_duplicates(pairs: list[tuple[str, Any]]) -> Any:
        assert max(Counter(name for name, _ in pairs).values(), default=1) == 1, f"{pairs} passed"
        return dict(pairs)

    value = json.loads(raw, parse_constant=refuse, object_pairs_hook=no_duplicates)
    assert find_infinite(value) is False
    return value


def find_infinite(value: Any) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, dict):
        return any(map(find_infinite, value.values()))
    return isinstance(value, list) and any(map(find_infinite, value))


@pytest.mark.requirement("D26")
@given(st.dictionaries(st.sampled_from(["origin", "km", "stops", "gate"]), JSON, min_size=1), st.data())
def test_a_key_that_stands_twice_never_passes(args: dict[str, Any], data: st.DataObject) -> None:
    twice = data.draw(st.sampled_from(sorted(args)))
    value = data.draw(JSON)
    raw = dump(args)[:-1] + b"," + dump({twice: value})[1:]
    for invocable in (TAKE, OF_LEG):
        with pytest.raises(ArgumentsMisfit):
            invocable.bind(raw, row=True)
    with pytest.raises(ArgumentsMisfit, match="a key stands twice"):
        OF_ANY.bind(b"[" + raw + b"]")


# --- results --------------------------------------------------------------------------------------------------------


@given(JSON)
def test_json_values_are_encoded_as_they_are(value: Any) -> None:
    assert json.loads(encode_value(value)) == value
    assert json.loads(encode_canonical(value)) == value


KEYS = st.none() | st.booleans() | st.integers() | st.text() | st.tuples(st.integers())
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.complex_numbers()
    | st.dates()
    | st.decimals(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(
            st.none() | st.booleans() | st.integers() | st.text() | st.tuples(st.integers()), inner, max_size=3
        )
    ),
    max_leaves=15,
)


@pytest.mark.requirement("D26")
@given(VALUES)
@example({"a": [float("nan"), None]})
@example({True: {None: 1}})
def test_any_value_is_encoded_without_loss_or_refused_with_a_place(value: Any) -> None:
    if is_plain(value):
        output = encode_value(value)
        assert output.count(b"null") >= count_nones(value)
        json.loads(output)
    else:
        with pytest.raises(ResultMisfit) as caught:
            encode_value(value)
        assert set(caught.value.details) == {"pointer", "type"}


def is_plain(value: Any) -> bool:
    """Whether JSON can hold it, by D26."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, str):
        return not any("\ud800" <= character <= "\udfff" for character in value)
    if isinstance(value, complex):
        return False
    if isinstance(value, dict):
        keys = all(isinstance(key, str | int) and not isinstance(key, bool) and is_plain(key) for key in value)
        return keys and all(map(is_plain, value.values()))
    return not isinstance(value, list | tuple) or all(map(is_plain, value))


def count_nones(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(count_nones, value.values()))
    return sum(map(count_nones, value)) if isinstance(value, list | tuple) else int(value is None)


# --- rows -----------------------------------------------------------------------------------------------------------


class Pieces(io.RawIOBase):
    """A stream that gives its bytes in pieces of the sizes drawn."""

    def __init__(self, content: bytes, sizes: list[int]) -> None:
        self._content = content
        self._sizes = sizes

    def read(self, size: int = -1) -> bytes:
        step = self._sizes.pop() if self._sizes else CHUNK_BYTES
        part, self._content = self._content[:step], self._content[step:]
        return part


SIZES = st.lists(st.integers(1, 9), max_size=40)


@given(st.lists(st.lists(JSON, max_size=3) | st.dictionaries(TEXT, JSON, max_size=3)), SIZES, st.data())
def test_lines_come_back_as_rows(values: list[Any], sizes: list[int], data: st.DataObject) -> None:
    end = st.sampled_from([b"\n", b"\r\n", b"\n\n", b"\n \t\n"])
    content = data.draw(st.sampled_from([b"", b"\xef\xbb\xbf"])) + b"".join(dump(v) + data.draw(end) for v in values)
    rows = list(JsonlSource("rows", stream=Pieces(content, sizes)).rows())  # type: ignore[arg-type]
    assert [row.index for row in rows] == list(range(len(values)))
    assert [row.args for row in rows] == [dump(value) for value in values]


@given(st.binary(max_size=200), SIZES, st.booleans())
@example(b"\xff\n[1]\n", [1, 1], False)
def test_any_bytes_are_rows_or_failures_of_rows(content: bytes, sizes: list[int], named: bool) -> None:
    content = b"\n" + content  # else the first bytes may be those of a file of another kind
    rows = list(JsonlSource("rows", named=named, stream=Pieces(content, sizes)).rows())  # type: ignore[arg-type]
    lines = [line for line in content.split(b"\n") if line.strip()]
    assert len(rows) == len(lines)
    for row, line in zip(rows, lines, strict=True):
        assert row.failure is not None or row.args in line


CELLS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)


@given(st.lists(st.tuples(CELLS, CELLS), max_size=8), SIZES)
def test_cells_come_back_as_text(table: list[tuple[str, str]], sizes: list[int]) -> None:
    out = io.StringIO(newline="")
    writer = csv.writer(out)
    writer.writerows([("first", "second"), *table])
    source = CsvSource("rows.csv", delimiter=",", stream=Pieces(out.getvalue().encode(), sizes))  # type: ignore[arg-type]
    rows = [msgspec.json.decode(row.args) for row in source.rows() if row.failure is None]
    assert rows == [{"first": first, "second": second} for first, second in table]


@given(st.lists(JSON))
def test_values_come_back_as_rows(values: list[Any]) -> None:
    rows = list(IterableSource(values).rows())
    expected = [value if isinstance(value, dict | list) else [value] for value in values]
    assert [json.loads(row.args) for row in rows] == expected
