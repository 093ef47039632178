"""Schemas as real tools have them: their calls, the ways in which they are almost right, and what becomes of those."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from callyard.functions.json_schema import BadSchema, JsonSchema, normalize_schema
from callyard.functions.misfits import ArgumentsMisfit
from callyard.functions.registry import Registry
from tests.unit.functions.tools_data import TOOLS, Bad, Tool

GOOD = [(tool, args) for tool in TOOLS for args in tool.good]
BAD = [(tool, bad) for tool in TOOLS for bad in tool.bad]


def case(value: Any) -> str:
    return value.name if isinstance(value, Tool) else json.dumps(value)[:40]


def registry_of(tool: Tool) -> Registry:
    registry = Registry()
    registry.add_tool(tool.name, lambda args: args, input_schema=tool.schema)
    return registry


@pytest.mark.requirement("D2", "D4")
@pytest.mark.parametrize(("tool", "args"), GOOD, ids=case)
def test_a_call_that_fits(tool: Tool, args: dict[str, Any]) -> None:
    registry = registry_of(tool)
    assert registry.validate(tool.name, args) == []
    assert registry.validate(tool.name, json.dumps(args).encode()) == []
    checked = registry.get(tool.name).check(args)
    handler = registry.get(tool.name).handler
    assert handler is not None
    assert handler.bind(checked) == ((args,), {})


@pytest.mark.requirement("D4")
@pytest.mark.parametrize(("tool", "bad"), BAD, ids=case)
def test_a_call_that_does_not_fit_names_the_place(tool: Tool, bad: Bad) -> None:
    args, pointer, keyword = bad
    (problem,) = registry_of(tool).validate(tool.name, args)
    assert (problem.pointer, problem.keyword) == (pointer, keyword)
    assert problem.message
    assert problem.expected


def places(schema: Any, keyword: str) -> Iterator[dict[str, Any]]:
    """The schemas of named properties, at any depth, that have `keyword`; values of enums and the like are none."""
    if isinstance(schema, list):
        for part in schema:
            yield from places(part, keyword)
    elif isinstance(schema, dict):
        for part in schema.get("properties", {}).values():
            if isinstance(part, dict) and keyword in part:
                yield part
        for name, part in schema.items():
            if name not in ("enum", "const", "default"):
                yield from places(part, keyword)


def misname(names: dict[str, str]) -> Callable[[dict[str, Any]], bool]:
    def mess(schema: dict[str, Any]) -> bool:
        found = [part for part in places(schema, "type") if isinstance(part["type"], str) and part["type"] in names]
        for part in found:
            part["type"] = names[part["type"]]
        return bool(found)

    return mess


def misname_root(schema: dict[str, Any]) -> bool:
    schema["type"] = "dict"
    return True


def drop_root_type(schema: dict[str, Any]) -> bool:
    del schema["type"]
    return "properties" in schema


def required_on_properties(schema: dict[str, Any]) -> bool:
    wanted = schema.pop("required", [])
    if not wanted or any(name not in schema["properties"] for name in wanted):
        return False
    for name in wanted:
        if "required" in schema["properties"][name]:
            return False  # an object with a list of its own
    for name, part in schema["properties"].items():
        if "required" not in part:
            part["required"] = name in wanted
    return True


def nullable(schema: dict[str, Any]) -> bool:
    found = [part for part in places(schema, "type") if isinstance(part["type"], list) and "null" in part["type"]]
    for part in found:
        part["type"] = next(kind for kind in part["type"] if kind != "null")
        part["nullable"] = True
        if "enum" in part:
            part["enum"] = [value for value in part["enum"] if value is not None]
    return bool(found) and all("null" not in json.dumps(part["type"]) for part in found) and _few_types(schema)


def _few_types(schema: dict[str, Any]) -> bool:
    return "boolean" not in json.dumps([part["type"] for part in places(schema, "items")])


def not_nullable(schema: dict[str, Any]) -> bool:
    found = list(places(schema, "type"))
    for part in found:
        part["nullable"] = False
    return bool(found)


def exclusive_switch(schema: dict[str, Any]) -> bool:
    found = list(places(schema, "exclusiveMinimum"))
    for part in found:
        part["minimum"] = part["exclusiveMinimum"]
        part["exclusiveMinimum"] = True
    return bool(found)


def inclusive_switch(schema: dict[str, Any]) -> bool:
    found = list(places(schema, "minimum"))
    for part in found:
        part["exclusiveMinimum"] = False
    return bool(found)


def examples(schema: dict[str, Any]) -> bool:
    found = list(places(schema, "type"))
    for part in found:
        part["example"] = "x"
    return bool(found)


def openapi_words(schema: dict[str, Any]) -> bool:
    schema |= {"xml": {"name": "x"}, "externalDocs": {"url": "http://a.b"}, "discriminator": {"propertyName": "type"}}
    return True


def nulls(schema: dict[str, Any]) -> bool:
    found = list(places(schema, "type"))
    for part in found:
        part |= {"description": None, "title": None, "format": part.get("format"), "pattern": part.get("pattern")}
    return bool(found)


def numbers_as_text(schema: dict[str, Any]) -> bool:
    found = [*places(schema, "minimum"), *places(schema, "maximum"), *places(schema, "minLength")]
    for part in found:
        for keyword in ("minimum", "maximum", "minLength"):
            if keyword in part:
                part[keyword] = str(part[keyword])
    return bool(found)


def switches_as_text(schema: dict[str, Any]) -> bool:
    if not isinstance(schema.get("additionalProperties"), bool):
        return False
    schema["additionalProperties"] = str(schema["additionalProperties"])
    return True


def older_tuples(schema: dict[str, Any]) -> bool:
    found = list(places(schema, "prefixItems"))
    for part in found:
        part["additionalItems"] = part.pop("items")
        part["items"] = part.pop("prefixItems")
    return bool(found)


def older_dependencies(schema: dict[str, Any]) -> bool:
    schema["dependencies"] = schema.pop("dependentRequired", None)
    return schema["dependencies"] is not None


def unknown_dialect(schema: dict[str, Any]) -> bool:
    schema["$schema"] = "https://spec.openapis.org/oas/3.1/dialect/base"
    return "definitions" not in schema


MESSES: dict[str, Callable[[dict[str, Any]], bool]] = {
    "python type names": misname(
        {"object": "dict", "array": "list", "string": "str", "integer": "int", "number": "float", "boolean": "bool"}
    ),
    "other type names": misname(
        {
            "object": "Mapping",
            "array": "tuple",
            "string": "text",
            "integer": "int64",
            "number": "double",
            "boolean": "Boolean",
        }
    ),
    "upper case": misname(
        {kind: kind.upper() for kind in ("object", "array", "string", "integer", "number", "boolean")}
    ),
    "root named dict": misname_root,
    "no root type": drop_root_type,
    "required on properties": required_on_properties,
    "nullable": nullable,
    "nullable false": not_nullable,
    "exclusiveMinimum true": exclusive_switch,
    "exclusiveMinimum false": inclusive_switch,
    "example": examples,
    "xml and others": openapi_words,
    "nulls": nulls,
    "numbers as text": numbers_as_text,
    "switches as text": switches_as_text,
    "items as a list": older_tuples,
    "dependencies": older_dependencies,
    "unknown dialect": unknown_dialect,
}


def messed() -> Iterator[Any]:
    for name, mess in MESSES.items():
        for tool in TOOLS:
            schema = json.loads(json.dumps(tool.schema))  # no part of it stands in two places
            if mess(schema) and schema != tool.schema:
                yield pytest.param(tool, schema, id=f"{name}: {tool.name}")


CASES = list(messed())


def test_there_are_some_hundreds() -> None:
    assert len(CASES) > 200
    assert len(GOOD) + len(BAD) > 100
    assert len({case.id.partition(":")[0] for case in CASES if case.id}) == len(MESSES)


@pytest.mark.requirement("D3")
@pytest.mark.parametrize(("tool", "schema"), CASES)
def test_a_schema_that_is_almost_right_is_refused_or_mended(tool: Tool, schema: dict[str, Any]) -> None:
    before = copy.deepcopy(schema)
    with pytest.raises(BadSchema, match="normalize_schema") as refused:
        JsonSchema(schema)
    mended, changes = normalize_schema(schema)
    assert schema == before
    assert changes
    assert [pointer for pointer, _ in refused.value.problems] == [change.pointer for change in changes]
    assert refused.value.pointer == changes[0].pointer
    assert all(change.what and change.why for change in changes)
    assert normalize_schema(mended) == (mended, [])
    compiled = JsonSchema(mended)
    for args in tool.good:
        compiled.check(args)
    for args, pointer, _ in tool.bad:
        with pytest.raises(ArgumentsMisfit) as misfit:
            compiled.check(args)
        assert misfit.value.details["pointer"] == pointer


@pytest.mark.parametrize("tool", TOOLS, ids=case)
def test_a_schema_that_is_right_is_left_as_it_is(tool: Tool) -> None:
    assert normalize_schema(tool.schema) == (tool.schema, [])
