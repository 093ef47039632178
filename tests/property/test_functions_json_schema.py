"""Any JSON as a schema, and any JSON as arguments: used, or refused with a place; never anything else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from callyard.functions.json_schema import BadSchema, JsonSchema, normalize_schema
from callyard.functions.misfits import ArgumentsMisfit
from callyard.functions.registry import Registry

SLOW = settings(deadline=None, suppress_health_check=list(HealthCheck))
NAMES = st.sampled_from(["a", "b", "c", "a/b", "~", " ", "é"])
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 10)
    | st.floats(allow_nan=False, allow_infinity=False, width=16)
    | st.sampled_from(["", "a", "5", "null", "[1]", '{"a":1}', "x" * 5, "2020-01-01", "1.5"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
TYPES = st.sampled_from(["object", "array", "string", "number", "integer", "boolean", "null"])
NEAR_TYPES = st.sampled_from(["dict", "float", "any", "None", "Integer", "quux", "", None, 5])
KEYWORDS = st.sampled_from(
    [
        *(
            "type",
            "properties",
            "required",
            "items",
            "enum",
            "const",
            "minimum",
            "exclusiveMinimum",
            "maxLength",
            "anyOf",
        ),
        *(
            "nullable",
            "example",
            "examples",
            "$ref",
            "$defs",
            "allOf",
            "not",
            "dependencies",
            "pattern",
            "format",
            "$id",
        ),
        *("additionalProperties", "discriminator", "prefixItems", "uniqueItems", "default", "$schema", "$anchor", "if"),
        *("divisibleBy", "disallow", "extends", "title", "additionalItems", "patternProperties", "multipleOf"),
    ]
)


def sound(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {},
        optional={
            "type": TYPES | st.lists(TYPES, min_size=1, max_size=3, unique=True),
            "properties": st.dictionaries(NAMES, inner, max_size=3),
            "required": st.lists(NAMES, max_size=2, unique=True),
            "items": inner,
            "additionalProperties": inner | st.booleans(),
            "anyOf": st.lists(inner, min_size=1, max_size=2),
            "oneOf": st.lists(inner, min_size=1, max_size=2),
            "not": inner,
            "enum": st.lists(SCALARS, min_size=1, max_size=3),
            "minimum": st.integers(-2, 5),
            "maxLength": st.integers(0, 5),
            "minItems": st.integers(0, 2),
            "pattern": st.sampled_from(["^a", r"\d", "(a+)+$"]),
            "format": st.sampled_from(["date", "uuid", "email", "of our own"]),
            "$ref": st.sampled_from(["#", "#/$defs/p"]),
        },
    )


SCHEMAS = st.recursive(sound(st.just({})), sound, max_leaves=6)
ROOTS = sound(SCHEMAS).map(lambda schema: {**schema, "type": "object", "$defs": {"p": {"type": ["integer", "object"]}}})
ANY_SCHEMA = st.recursive(
    SCALARS | TYPES | NEAR_TYPES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYWORDS | NAMES, inner, max_size=4),
    max_leaves=15,
)


def value_at(pointer: str, value: Any) -> Any:
    for token in pointer.split("/")[1:]:
        name = token.replace("~1", "/").replace("~0", "~")
        value = value[int(name)] if isinstance(value, list) else value[name]
    return value


def refusal_of(schema: Any) -> BadSchema | None:
    try:
        JsonSchema(schema)
    except BadSchema as refused:
        return refused
    return None


@pytest.mark.requirement("D3")
@SLOW
@given(ANY_SCHEMA | st.dictionaries(KEYWORDS, ANY_SCHEMA))
def test_any_json_is_a_schema_or_refused_with_a_place(schema: Any) -> None:
    refused = refusal_of(schema)
    if refused is not None:
        assert refused.problems
        assert refused.pointer == refused.problems[0][0]
        assert refused.pointer == "" or refused.pointer.startswith("/")
    before = json.dumps(schema)
    mended, changes = normalize_schema(schema)
    assert json.dumps(schema) == before
    assert (mended == json.loads(before)) or changes
    again, more = normalize_schema(mended)
    assert (again, more) == (mended, [])


@pytest.mark.requirement("D4")
@SLOW
@given(ROOTS, st.dictionaries(NAMES, VALUES, max_size=3))
def test_any_arguments_fit_or_are_refused_with_places_in_them(schema: dict[str, Any], args: dict[str, Any]) -> None:
    registry = Registry()
    spec = registry.add_tool("tool", print, input_schema=schema)
    compiled = JsonSchema(schema)
    problems = registry.validate("tool", args)
    assert compiled.fits(args) == (problems == [])
    assert registry.validate("tool", json.dumps(args).encode()) == problems
    for problem in problems:
        assert problem.message
        assert problem.expected
        if problem.keyword != "required":
            value_at(problem.pointer, args)
    if not problems:
        assert spec.check(args).value == args


@pytest.mark.requirement("D5")
@SLOW
@given(ROOTS, st.dictionaries(NAMES, VALUES, max_size=3))
def test_repairs_make_what_does_not_fit_fit_and_leave_what_does(schema: dict[str, Any], args: dict[str, Any]) -> None:
    registry = Registry()
    spec = registry.add_tool("tool", print, input_schema=schema)
    fitted = registry.validate("tool", args) == []
    try:
        checked = spec.check(args, repair=True)
    except ArgumentsMisfit:
        assert not fitted
        return
    assert registry.validate("tool", checked.raw) == []
    assert (checked.repairs == ()) == fitted
    if fitted:
        assert checked.value == args
    for repair in checked.repairs:
        assert repair.before is None or isinstance(repair.before, str)
