"""Arguments that nearly fit: refused as they are, made to fit when that is asked for, and nothing else touched."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from callyard.functions.misfits import ArgumentsMisfit
from callyard.functions.registry import FunctionSpec, Registry
from callyard.functions.repairs import Repair

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "whole": {"type": "integer"},
        "number": {"type": "number"},
        "text": {"type": "string"},
        "flag": {"type": "boolean"},
        "list": {"type": "array", "items": {"type": "integer"}},
        "object": {
            "type": "object",
            "properties": {"n": {"type": "integer"}, "must": {"type": "integer"}},
            "required": ["must"],
        },
        "either": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "form": {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
                    "required": ["b"],
                },
                {"type": "array", "items": {"type": "number"}},
            ]
        },
        "mixed": {"type": ["integer", "string"]},
        "small": {"type": "integer", "maximum": 3},
    },
    "required": ["whole"],
}


@dataclass
class Point:
    x: int
    y: int = 0


def spec_of_schema() -> FunctionSpec:
    return Registry().add_tool("tool", lambda args: args, input_schema=SCHEMA)


def spec_of_signature() -> FunctionSpec:
    def tool(
        whole: int,
        number: float = 0,
        text: str = "",
        flag: bool = False,
        list: list[int] = [],  # noqa: B006
        either: int | None = None,
        mixed: int | str = 0,
        point: Point | None = None,
        price: Decimal = Decimal(0),
    ) -> None: ...

    return Registry().add_function(tool)


def repaired(spec: FunctionSpec, **args: Any) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    full = {"whole": 1, **args}
    with pytest.raises(ArgumentsMisfit):
        spec.check(full)
    checked = spec.check(full, repair=True)
    assert msgspec.json.decode(checked.raw) == checked.value
    value = dict(checked.value)
    if "whole" not in args:
        assert value.pop("whole") == 1
    return value, [(repair.pointer, repair.kind) for repair in checked.repairs]


BOTH = pytest.mark.parametrize("spec", [spec_of_schema(), spec_of_signature()], ids=["schema", "signature"])


@pytest.mark.requirement("D5")
@BOTH
@pytest.mark.parametrize(
    ("args", "expected", "repairs"),
    [
        ({"whole": "5"}, {"whole": 5}, [("/whole", "number_from_text")]),
        ({"whole": " 5 "}, {"whole": 5}, [("/whole", "number_from_text")]),
        ({"whole": "-7e1"}, {"whole": -70}, [("/whole", "number_from_text")]),
        ({"whole": "9" * 30}, {"whole": int("9" * 30)}, [("/whole", "number_from_text")]),
        ({"number": "0.1"}, {"number": 0.1}, [("/number", "number_from_text")]),
        ({"list": "[1, 2]"}, {"list": [1, 2]}, [("/list", "json_from_text")]),
        ({"list": ["1", 2]}, {"list": [1, 2]}, [("/list/0", "number_from_text")]),
        (
            {"list": '["1", 2]'},
            {"list": [1, 2]},
            [("/list", "json_from_text"), ("/list/0", "number_from_text")],
        ),
        ({"either": "5"}, {"either": 5}, [("/either", "number_from_text")]),
        ({"text": None}, {}, [("/text", "absent_from_null")]),
        (
            {"number": None, "flag": None, "list": None},
            {},
            [("/number", "absent_from_null"), ("/flag", "absent_from_null"), ("/list", "absent_from_null")],
        ),
    ],
)
def test_the_repairs(
    spec: FunctionSpec, args: dict[str, Any], expected: dict[str, Any], repairs: list[tuple[str, str]]
) -> None:
    value, made = repaired(spec, **args)
    assert value == expected
    assert sorted(made) == sorted(repairs)


@pytest.mark.requirement("D5")
def test_repairs_inside_objects_and_forms() -> None:
    spec = spec_of_schema()
    assert repaired(spec, object='{"must": "1"}') == (
        {"object": {"must": 1}},
        [("/object", "json_from_text"), ("/object/must", "number_from_text")],
    )
    assert repaired(spec, object={"must": 1, "n": None})[0] == {"object": {"must": 1}}
    assert repaired(spec, form='{"a": "5", "b": "5"}')[0] == {"form": {"a": 5, "b": "5"}}
    assert repaired(spec, form=["1", 2.5])[0] == {"form": [1, 2.5]}
    assert repaired(spec_of_signature(), point={"x": "1", "y": None})[0] == {"point": {"x": 1}}
    assert repaired(spec_of_signature(), point='{"x": 1}')[0] == {"point": {"x": 1}}


@pytest.mark.requirement("D5")
@BOTH
@pytest.mark.parametrize("text", ["5", "null", '{"a":1}', "[1]", "true", " 1.5", ""])
@pytest.mark.parametrize("repair", [False, True])
def test_a_text_parameter_keeps_any_text(spec: FunctionSpec, text: str, repair: bool) -> None:
    for name in ("text", "mixed"):
        checked = spec.check({"whole": 1, name: text}, repair=repair)
        assert checked.value == {"whole": 1, name: text}
        assert checked.repairs == ()


@pytest.mark.requirement("D5")
@BOTH
@pytest.mark.parametrize(
    "args",
    [
        *({"whole": "five"}, {"whole": "1.5"}, {"whole": ""}, {"whole": "0x5"}, {"whole": "1_000"}, {"whole": "NaN"}),
        *(
            {"whole": "1e999"},
            {"whole": "1e999999999"},
            {"whole": None},
            {"whole": True},
            {"whole": [5]},
            {"whole": "true"},
            {"flag": "true"},
        ),
        *({"flag": 1}, {"list": "{}"}, {"list": "1,2"}, {"list": [None]}, {"text": 5}, {"list": "[1,"}),
        *({"list": 5}, {"number": '"5"'}, {"other": 1}, {"list": '[1, 1, "a"]'}, {"either": "x"}),
    ],
    ids=str,
)
def test_there_are_no_other_repairs(spec: FunctionSpec, args: dict[str, Any]) -> None:
    for repair in (False, True):
        with pytest.raises(ArgumentsMisfit):
            spec.check({"whole": 1, **args}, repair=repair)


@pytest.mark.requirement("D5")
def test_null_of_what_must_be_there_is_left() -> None:
    with pytest.raises(ArgumentsMisfit, match="/object/must: expected an integer, got null"):
        spec_of_schema().check({"whole": 1, "object": {"must": None}}, repair=True)


@pytest.mark.requirement("D5")
def test_a_repair_that_is_not_enough_is_told_as_what_is_left() -> None:
    with pytest.raises(ArgumentsMisfit, match="/small: expected a number less than or equal to 3"):
        spec_of_schema().check({"whole": 1, "small": "5"}, repair=True)


@pytest.mark.requirement("D5")
def test_each_repair_is_listed_with_what_was_and_what_is() -> None:
    checked = spec_of_schema().check({"whole": "5", "text": None}, repair=True)
    assert set(checked.repairs) == {
        Repair("/whole", "number_from_text", "5", 5),
        Repair("/text", "absent_from_null", None, None),
    }


@pytest.mark.requirement("D5")
@BOTH
def test_what_fits_is_not_touched(spec: FunctionSpec) -> None:
    raw = b'{ "whole":1, "number":1.50, "text":"5" }'
    assert spec.check(raw, repair=True).raw == raw
    assert spec.check(raw, repair=True).repairs == ()


@pytest.mark.requirement("D5")
def test_numbers_beside_a_repair_keep_their_digits() -> None:
    raw = b'{"whole":"1","price":0.12345678901234567890123456789}'
    checked = spec_of_signature().check(raw, repair=True)
    assert checked.raw == b'{"whole":1,"price":0.12345678901234567890123456789}'


@pytest.mark.requirement("D5")
def test_nothing_is_repaired_beside_a_key_without_text() -> None:
    """Errors below it have no exact place, so that a repair could hit a value that fits."""
    inner = {"type": "object", "properties": {"a": {"type": "integer"}}}
    schema = {"type": "object", "properties": {"": inner, "a": {"type": "string"}, "b": {"type": "integer"}}}
    spec = Registry().add_tool("tool", print, input_schema=schema)
    assert spec.check({"b": "5"}, repair=True).value == {"b": 5}
    with pytest.raises(ArgumentsMisfit):
        spec.check({"": {"a": "5"}, "a": "5"}, repair=True)


@pytest.mark.requirement("D5")
def test_many_misfits_are_repaired_within_bounds() -> None:
    checked = spec_of_schema().check({"whole": 1, "list": [str(n) for n in range(500)]}, repair=True)
    assert checked.value["list"] == list(range(500))
    assert len(checked.repairs) == 500
