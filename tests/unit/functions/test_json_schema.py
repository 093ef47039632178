"""A JSON Schema compiled: what it refuses of itself, and of values; by draft, and within bounds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from callyard.functions.json_schema import BadSchema, JsonSchema, normalize_schema
from callyard.functions.misfits import ERRORS_MAX, ArgumentsMisfit

DRAFTS = {
    4: "http://json-schema.org/draft-04/schema#",
    6: "http://json-schema.org/draft-06/schema#",
    7: "http://json-schema.org/draft-07/schema#",
    2019: "https://json-schema.org/draft/2019-09/schema",
    2020: "https://json-schema.org/draft/2020-12/schema",
}
ALL, SINCE_6, SINCE_7, SINCE_2019, LATEST = (
    list(DRAFTS),
    [6, 7, 2019, 2020],
    [7, 2019, 2020],
    [2019, 2020],
    [2020],
)

KEYWORDS: list[tuple[list[int], dict[str, Any], list[Any], list[Any]]] = [
    (ALL, {"type": "integer"}, [1, -1, 0, 10**40], [1.5, "1", True, None, [], {}]),
    (ALL, {"type": "number"}, [1, 1.5, -1e300, 10**400], ["1", True, None]),
    (ALL, {"type": "string"}, ["", "é", "\U0001f600"], [1, None, ["a"]]),
    (ALL, {"type": "boolean"}, [True, False], [0, 1, "true", None]),
    (ALL, {"type": "null"}, [None], [0, "", False, "null"]),
    (ALL, {"type": "array"}, [[], [1]], [{}, "[]"]),
    (ALL, {"type": "object"}, [{}, {"a": 1}], [[], "{}"]),
    (ALL, {"type": ["integer", "string"]}, [1, "1"], [1.5, None, True]),
    (ALL, {"enum": [1, "a", None, [1], {"a": 1}]}, [1, "a", None, [1], {"a": 1}], [2, "b", True, [], [2]]),
    (ALL, {"minimum": 1, "maximum": 3}, [1, 3, 2.5, "9"], [0.999, 3.0001, -(10**40), 10**40]),
    (ALL, {"multipleOf": 3}, [0, 3, -6, "x"], [1, 4]),
    (ALL, {"multipleOf": 0.01}, [0.07, 4.35, 1], [0.075]),
    (ALL, {"minLength": 2, "maxLength": 3}, ["ab", "é\U0001f600", 5], ["a", "abcd", "\U0001f600"]),
    (ALL, {"pattern": "^a+$"}, ["a", "aaa", 5], ["", "ab", "a\n"]),
    (ALL, {"pattern": "b"}, ["abc"], ["ac"]),
    (ALL, {"items": {"type": "integer"}}, [[], [1, 2], "x"], [[1, "2"], [None]]),
    (ALL, {"minItems": 1, "maxItems": 2}, [[1], [1, 2], {}], [[], [1, 2, 3]]),
    (ALL, {"uniqueItems": True}, [[1, True], [1, 2], [[1], [2]]], [[1, 1], [1, 1.0], [{"a": 1}, {"a": 1}]]),
    (ALL, {"properties": {"a": {"type": "integer"}}}, [{}, {"a": 1}, {"b": "x"}, 5], [{"a": "1"}]),
    (ALL, {"required": ["a", "b"]}, [{"a": 1, "b": None}, "x"], [{}, {"a": 1}]),
    (ALL, {"properties": {"a": {}}, "additionalProperties": False}, [{}, {"a": 1}], [{"b": 1}]),
    (ALL, {"additionalProperties": {"type": "integer"}}, [{"a": 1}], [{"a": "1"}]),
    (ALL, {"patternProperties": {"^x": {"type": "integer"}}}, [{"x": 1, "y": "a"}], [{"xy": "1"}]),
    (ALL, {"minProperties": 1, "maxProperties": 2}, [{"a": 1}], [{}, {"a": 1, "b": 2, "c": 3}]),
    (ALL, {"allOf": [{"minimum": 1}, {"maximum": 2}]}, [1, 2], [0, 3]),
    (ALL, {"anyOf": [{"type": "integer"}, {"minLength": 2}]}, [1, "ab", None], ["a"]),
    (ALL, {"oneOf": [{"type": "integer"}, {"minimum": 2}]}, [1, 2.5, "x"], [3, 1.5]),
    (ALL, {"not": {"type": "string"}}, [1, None], ["a"]),
    (
        ALL,
        {"definitions": {"p": {"minimum": 1}}, "properties": {"a": {"$ref": "#/definitions/p"}}},
        [{"a": 1}],
        [{"a": 0}],
    ),
    (ALL, {"properties": {"a": {"$ref": "#/properties/b"}, "b": {"type": "null"}}}, [{"a": None}], [{"a": 1}]),
    (ALL, {"format": "ipv4"}, ["127.0.0.1", 5], ["127.0.0.256", "0x7f.1", "127.1"]),
    (ALL, {"format": "ipv6"}, ["::1", "fe80::1"], ["12345::", "::1%eth0"]),
    (
        ALL,
        {"format": "date-time"},
        ["1990-12-31T23:59:59Z", "1990-12-31t15:59:59.1-08:00"],
        ["1990-02-31T15:59:59Z", "1990-12-31"],
    ),
    (ALL, {"format": "email"}, ["a@b.c", "a.b+c@d.e"], ["a", "@b.c"]),
    (ALL, {"format": "uri"}, ["http://a.b/c", "urn:a:b"], ["//a.b", "a b", "/a"]),
    (ALL, {"format": "hostname"}, ["a.b", "a-b.c1"], ["-a.b", "a..b", "a_b"]),
    (ALL, {"format": "of our own"}, ["anything"], []),
    ([4], {"minimum": 1, "exclusiveMinimum": True}, [2], [1]),
    ([4, 6, 7], {"dependencies": {"a": ["b"]}}, [{}, {"a": 1, "b": 1}], [{"a": 1}]),
    ([4, 6, 7, 2019], {"items": [{"type": "integer"}], "additionalItems": False}, [[], [1]], [["a"], [1, 2]]),
    (SINCE_6, {"exclusiveMinimum": 1, "exclusiveMaximum": 3}, [2, 1.01], [1, 3]),
    (SINCE_6, {"const": {"a": [1]}}, [{"a": [1]}, {"a": [1.0]}], [{"a": [2]}, {}, None]),
    (SINCE_6, {"contains": {"minimum": 5}}, [[1, 5], "x"], [[], [4]]),
    (SINCE_6, {"propertyNames": {"maxLength": 2}}, [{"ab": 1}, {}], [{"abc": 1}]),
    (SINCE_6, {"properties": {"a": False, "b": True}}, [{}, {"b": 1}], [{"a": 1}]),
    (SINCE_6, {"format": "json-pointer"}, ["", "/a/b"], ["a", "/~2"]),
    (SINCE_7, {"if": {"minimum": 5}, "then": {"multipleOf": 5}, "else": {"const": 1}}, [5, 10, 1], [6, 2]),
    (SINCE_7, {"format": "date"}, ["2024-02-29"], ["2023-02-29", "24-01-01", "2024-1-1"]),
    (SINCE_7, {"format": "time"}, ["10:00:00Z", "23:59:60Z"], ["10:00", "25:00:00Z"]),
    (SINCE_7, {"format": "idn-email"}, ["é@b.c"], ["é"]),
    (SINCE_2019, {"dependentRequired": {"a": ["b"]}}, [{}, {"a": 1, "b": 1}], [{"a": 1}]),
    (SINCE_2019, {"dependentSchemas": {"a": {"required": ["b"]}}}, [{"b": 1}], [{"a": 1}]),
    (SINCE_2019, {"contains": {"const": 1}, "minContains": 2, "maxContains": 3}, [[1, 1]], [[1], [1] * 4]),
    (SINCE_2019, {"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False}, [{"a": 1}], [{"b": 1}]),
    (SINCE_2019, {"$defs": {"p": {"$anchor": "here", "type": "null"}}, "items": {"$ref": "#here"}}, [[None]], [[1]]),
    (SINCE_2019, {"format": "uuid"}, ["12345678-1234-5678-1234-567812345678"], ["1234", "0" * 32]),
    (SINCE_2019, {"format": "duration"}, ["P1D", "PT1H", "P1W"], ["1D", "P", "P1D1W"]),
    (LATEST, {"prefixItems": [{"type": "integer"}], "items": {"type": "string"}}, [[], [1, "a"]], [["a"], [1, 1]]),
    (LATEST, {"prefixItems": [{}], "items": False}, [[], [1]], [[1, 2]]),
    (
        LATEST,
        {"$defs": {"a": {"$dynamicAnchor": "n", "type": "null"}}, "items": {"$dynamicRef": "#n"}},
        [[None]],
        [[1]],
    ),
    (
        LATEST,
        {"$defs": {"b": {"$id": "http://a.b/c", "type": "null"}}, "items": {"$ref": "http://a.b/c"}},
        [[None]],
        [[1]],
    ),
]


def by_draft() -> list[Any]:
    return [
        pytest.param(draft, part, good, bad, id=f"{draft}: {json.dumps(part)[:50]}")
        for drafts, part, good, bad in KEYWORDS
        for draft in drafts
    ]


def wrap(part: dict[str, Any], draft: int = 2020) -> dict[str, Any]:
    """An object with one property, `x`; what is named by reference stands at the root."""
    shared = {key: part[key] for key in ("definitions", "$defs") if key in part}
    inner = {key: value for key, value in part.items() if key not in shared}
    text = json.dumps(inner)
    if "#/properties/" in text:
        inner = json.loads(text.replace("#/properties/", "#/properties/x/properties/"))
    return {"$schema": DRAFTS[draft], "type": "object", "properties": {"x": inner}, **shared}


@pytest.mark.requirement("D4")
@pytest.mark.parametrize(("draft", "part", "good", "bad"), by_draft())
def test_keywords_by_draft(draft: int, part: dict[str, Any], good: list[Any], bad: list[Any]) -> None:
    schema = JsonSchema(wrap(part, draft))
    for value in good:
        schema.check({"x": value})
    for value in bad:
        with pytest.raises(ArgumentsMisfit) as misfit:
            schema.check({"x": value})
        for error in misfit.value.details["errors"]:
            assert error["pointer"].startswith("/x")
            assert all(error.values()), error


@pytest.mark.requirement("D3")
@pytest.mark.parametrize(
    ("schema", "pointer", "message"),
    [
        (None, "", "expected a schema of an object"),
        (True, "", "expected a schema of an object"),
        ("object", "", "expected a schema of an object"),
        ([], "", "expected a schema of an object"),
        ({"type": "array"}, "/type", "expected a schema of an object"),
        (wrap({"type": "quux"}), "/properties/x/type", "expected one of object, array, string"),
        (wrap({"type": []}), "/properties/x/type", "expected"),
        (wrap({"minimum": "low"}), "/properties/x/minimum", "expected a number, got 'low'"),
        (wrap({"minLength": -1}), "/properties/x/minLength", "greater than or equal to 0"),
        (wrap({"required": [1]}), "/properties/x/required/0", "expected a string"),
        (wrap({"required": ["a", "a"]}), "/properties/x/required", "nothing stands twice"),
        (wrap({"enum": "a"}), "/properties/x/enum", "expected an array"),
        (wrap({"properties": []}), "/properties/x/properties", "expected an object"),
        (wrap({"anyOf": []}), "/properties/x/anyOf", "at least 1"),
        (wrap({"items": 5}), "/properties/x/items", "expected"),
        (wrap({"multipleOf": 0}), "/properties/x/multipleOf", "greater than 0"),
        (wrap({"pattern": "("}), "/properties/x/pattern", "expected a regular expression"),
        (wrap({"pattern": "(a{1000}){1000}"}), "/properties/x/pattern", "moderate size"),
        (wrap({"pattern": "a(?=b)"}), "/properties/x/pattern", "look-around"),
        (wrap({"pattern": "(?<!a)b"}), "/properties/x/pattern", "look-around"),
        (wrap({"pattern": r"(a)\1"}), "/properties/x/pattern", "back-references"),
        (wrap({"patternProperties": {"(?!a)": {}}}), "/properties/x/patternProperties/(?!a)", "look-around"),
        (wrap({"$ref": "#/$defs/none"}), "/properties/x/$ref", "there is no /$defs/none"),
        (wrap({"$ref": "#none"}), "/properties/x/$ref", "there is no anchor none"),
        (wrap({"$ref": "#/properties/x/title", "title": "t"}), "/properties/x/$ref", "leads nowhere"),
        (wrap({"$ref": "#/components/schemas/Pet"}), "/properties/x/$ref", "there is no /components/schemas/Pet"),
        (wrap({"$ref": "http://127.0.0.1:1/x.json"}), "/properties/x/$ref", "a place in this schema"),
        (wrap({"$ref": "https://example.org/x#/a"}), "/properties/x/$ref", "a place in this schema"),
        (wrap({"$ref": "file:///etc/passwd"}), "/properties/x/$ref", "a place in this schema"),
        (wrap({"$ref": "other.json"}), "/properties/x/$ref", "a place in this schema"),
        (wrap({"$dynamicRef": "x.json#a"}), "/properties/x/$dynamicRef", "a place in this schema"),
        (wrap({"default": float("nan")}), "/properties/x/default", "nan is not JSON"),
        (wrap({"const": "\ud800"}), "/properties/x/const", "lone surrogate"),
        ({"type": "object", "properties": {"x": {"const": print}}}, "/properties/x/const", "no JSON form"),
        ({"type": "object", "properties": {"a/b~": {"type": "quux"}}}, "/properties/a~1b~0/type", "quux"),
    ],
    ids=lambda value: json.dumps(value, default=str)[:50],
)
def test_a_bad_schema_is_refused_with_its_place(schema: Any, pointer: str, message: str) -> None:
    with pytest.raises(BadSchema) as refused:
        JsonSchema(schema, subject="input schema of 'tool'")
    assert refused.value.pointer == pointer
    assert message in str(refused.value)
    assert str(refused.value).startswith(f"input schema of 'tool': {pointer or '(root)'}: ")


@pytest.mark.requirement("D3")
@pytest.mark.parametrize(
    ("name", "type_", "more"),
    [
        *(("dict", "object", {}), ("list", "array", {}), ("tuple", "array", {}), ("set", "array", {})),
        *(("float", "number", {}), ("int", "integer", {}), ("str", "string", {}), ("bool", "boolean", {})),
        *(("None", "null", {}), ("NoneType", "null", {}), ("STRING", "string", {}), ("Integer", "integer", {})),
        *(("datetime", "string", {"format": "date-time"}), ("date", "string", {"format": "date"})),
        *((None, "null", {}), (["str", "None"], ["string", "null"], {}), (["int", "float"], ["integer", "number"], {})),
    ],
)
def test_names_of_types_are_mended(name: Any, type_: Any, more: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"x": {"type": name}}}
    with pytest.raises(BadSchema, match="expected one of object, array, string, number"):
        JsonSchema(schema)
    mended, changes = normalize_schema(schema)
    assert mended["properties"]["x"] == {"type": type_, **more}
    assert changes[0].pointer == "/properties/x/type"
    JsonSchema(mended)


@pytest.mark.requirement("D3")
@pytest.mark.parametrize(
    ("part", "mended"),
    [
        ({"type": "any"}, {}),
        ({"type": ["any", "null"]}, {}),
        ({"type": ["string", {"type": "int"}]}, {"anyOf": [{"type": "string"}, {"type": "integer"}]}),
        ({"$ref": "#/$defs/p", "nullable": True}, {"anyOf": [{"$ref": "#/$defs/p"}, {"type": "null"}]}),
        (
            {"type": "string", "nullable": True, "const": "a"},
            {"anyOf": [{"type": "string", "const": "a"}, {"type": "null"}]},
        ),
        ({"type": "string", "enum": ["a"], "nullable": True}, {"type": ["string", "null"], "enum": ["a", None]}),
        ({"nullable": True}, {}),
        ({"exclusiveMaximum": True, "maximum": 5}, {"exclusiveMaximum": 5}),
        ({"exclusiveMaximum": True}, {}),
        ({"example": 1, "examples": [2]}, {"examples": [2]}),
        ({"examples": {"a": {"value": 1}, "b": 2}}, {"examples": [1, 2]}),
        ({"divisibleBy": 2}, {"multipleOf": 2}),
        ({"disallow": "string"}, {"not": {"type": "string"}}),
        ({"extends": {"type": "int"}}, {"allOf": [{"type": "integer"}]}),
        ({"allOf": {"minimum": 1}}, {"allOf": [{"minimum": 1}]}),
        ({"properties": {"a": "str"}}, {"properties": {"a": {"type": "string"}}}),
        ({"items": "int"}, {"items": {"type": "integer"}}),
        ({"required": "a"}, {"required": ["a"]}),
        ({"items": {"type": "string", "required": True}}, {"items": {"type": "string"}}),
        (
            {"dependencies": {"a": ["b"], "c": {"minProperties": 2}}},
            {"dependentRequired": {"a": ["b"]}, "dependentSchemas": {"c": {"minProperties": 2}}},
        ),
        ({"title": None, "default": None, "items": None}, {"default": None}),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_what_is_almost_right_is_mended(part: dict[str, Any], mended: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"x": part}, "$defs": {"p": {}}}
    with pytest.raises(BadSchema, match="normalize_schema"):
        JsonSchema(schema)
    found, changes = normalize_schema(schema)
    assert found["properties"]["x"] == mended
    assert all(change.pointer.startswith("/properties/x") for change in changes)
    JsonSchema(found)


@pytest.mark.requirement("D3")
def test_a_root_is_mended() -> None:
    for root in (True, {}, None):
        assert normalize_schema(root)[0] == {"type": "object"}
    assert normalize_schema({"type": ["object", "null"]})[0] == {"type": "object"}
    assert normalize_schema({"type": "array"}) == ({"type": "array"}, [])  # there is no telling what was meant
    assert normalize_schema({"type": "array"}, object_root=False) == ({"type": "array"}, [])
    assert JsonSchema({"type": "array", "items": {"type": "integer"}}, object_root=False).fits([1])


@pytest.mark.requirement("D4")
def test_a_root_that_names_its_properties_takes_no_others() -> None:
    closed = JsonSchema({"type": "object", "properties": {"origin": {}, "dest": {}}})
    with pytest.raises(ArgumentsMisfit) as misfit:
        closed.check({"orign": 1, "dest": 2})
    assert misfit.value.message == "/orign: unknown argument 'orign' (did you mean origin?); known: origin, dest"
    for opened in ({"additionalProperties": True}, {"patternProperties": {"^x": {}}}, {"unevaluatedProperties": True}):
        JsonSchema({"type": "object", "properties": {"a": {}}, **opened}).check({"b": 1})
    JsonSchema({"type": "object"}).check({"b": 1})


@pytest.mark.requirement("D4")
def test_every_error_is_reported_with_four_fields() -> None:
    schema = JsonSchema(
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "string", "minLength": 2}, "c": {"enum": [1, "x"]}},
            "required": ["d"],
        }
    )
    with pytest.raises(ArgumentsMisfit) as misfit:
        schema.check({"a": True, "b": "x", "c": None, "e": 1})
    errors = misfit.value.details["errors"]
    assert errors[0]["pointer"] == "/e"  # an unknown name first
    assert sorted(errors, key=lambda error: error["pointer"]) == [
        {
            "pointer": "/a",
            "keyword": "type",
            "message": "expected an integer, got a boolean (true)",
            "expected": "an integer",
        },
        {
            "pointer": "/b",
            "keyword": "minLength",
            "message": 'expected text of at least 2 characters, got text ("x")',
            "expected": "text of at least 2 characters",
        },
        {
            "pointer": "/c",
            "keyword": "enum",
            "message": "expected one of 1, 'x', got null",
            "expected": "one of 1, 'x'",
        },
        {"pointer": "/d", "keyword": "required", "message": "required, but missing", "expected": "a value"},
        {
            "pointer": "/e",
            "keyword": "additionalProperties",
            "message": "unknown argument 'e'; known: a, b, c",
            "expected": "one of a, b, c",
        },
    ]


@pytest.mark.requirement("D4")
def test_at_most_a_hundred_errors_are_listed_and_of_a_large_value_only_a_part_is_looked_through() -> None:
    schema = JsonSchema(wrap({"items": {"type": "string"}}))
    with pytest.raises(ArgumentsMisfit) as misfit:
        schema.check({"x": list(range(150))})
    assert len(misfit.value.details["errors"]) == ERRORS_MAX
    assert misfit.value.details["errors_total"] == 150
    with pytest.raises(ArgumentsMisfit, match="there may be more") as misfit:
        schema.check({"x": list(range(500_000))})
    assert misfit.value.details["errors_complete"] is False
    assert len(misfit.value.details["errors"]) == ERRORS_MAX


@pytest.mark.requirement("D4")
def test_an_error_behind_the_part_that_is_looked_through_is_found() -> None:
    schema = JsonSchema(wrap({"items": {"type": "integer"}, "minItems": 5_000}))
    schema.check({"x": [1] * 5_000})
    with pytest.raises(ArgumentsMisfit) as misfit:
        schema.check({"x": [*[1] * 8_000, "a"]})
    assert misfit.value.details["pointer"] == "/x/8000"
    with pytest.raises(ArgumentsMisfit) as misfit:
        schema.check({"x": [1] * 4_000})
    assert misfit.value.details["pointer"] == "/x"


@pytest.mark.requirement("D4")
@pytest.mark.parametrize("pattern", ["^(a+)+$", "^(a|a)*b$", "(x+x+)+y", "^([a-zA-Z0-9]+)*@$"])
def test_patterns_take_linear_time(pattern: str) -> None:
    schema = JsonSchema(wrap({"pattern": pattern}))
    # An engine that tries all ways would not come back from these.
    assert not schema.fits({"x": "a" * 200_000 + "!"})
    assert not schema.fits({"x": "x" * 200_000})


@pytest.mark.requirement("D4")
def test_recursive_schemas_of_any_depth() -> None:
    tree = JsonSchema(
        {
            "type": "object",
            "properties": {"tree": {"$ref": "#/$defs/node"}},
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {"left": {"$ref": "#/$defs/node"}, "right": {"$ref": "#/$defs/node"}},
                    "additionalProperties": False,
                }
            },
        }
    )
    deep: dict[str, Any] = {}
    for _ in range(120):
        deep = {"left": deep, "right": {}}
    tree.check({"tree": deep})
    with pytest.raises(ArgumentsMisfit) as misfit:
        tree.check({"tree": {"left": {"right": {"middle": 1}}}})
    assert misfit.value.details["pointer"] == "/tree/left/right/middle"
    itself = JsonSchema({"type": "object", "properties": {"next": {"$ref": "#"}}})
    with pytest.raises(ArgumentsMisfit):
        itself.check({"next": {"next": {"next": 5}}})
    JsonSchema({"type": "object", "allOf": [{"$ref": "#"}]}).check({})  # leads to itself and asks for nothing
    doubled = {"properties": {"x": {"allOf": [{"$ref": "#/$defs/d"}, {"$ref": "#/$defs/d"}]}}, "required": ["y"]}
    exponential = JsonSchema({"type": "object", "$defs": {"d": doubled}, "$ref": "#/$defs/d"})
    value: dict[str, Any] = {"y": 1}
    for _ in range(60):
        value = {"x": value, "y": 1}
    assert exponential.fits(value)


@pytest.mark.requirement("D3")
def test_schemas_are_bounded() -> None:
    deep: dict[str, Any] = {}
    for _ in range(200):
        deep = {"not": deep}
    with pytest.raises(BadSchema, match="nested deeper than 120 levels"):
        JsonSchema(wrap(deep))
    deep = {}
    for _ in range(100):
        deep = {"not": deep}
    JsonSchema(wrap(deep))
    with pytest.raises(BadSchema, match="exceeds schema_bytes_max"):
        JsonSchema(wrap({"description": "x" * 5_000_000}))


def test_a_schema_is_kept_as_it_was_given() -> None:
    given = {"type": "object", "properties": {"a": {"type": "integer"}}}
    schema = JsonSchema(given)
    given["properties"] = {}
    assert schema.schema == {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert not schema.fits({"a": "x"})
