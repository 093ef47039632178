from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import jsonschema_rs
import pytest
import schemathesis

from callyard.errors import KIND_RULES
from callyard.functions.registry import Registry
from callyard.serve.openapi import build_openapi, build_openrpc, embed, escape


@dataclass
class Node:
    value: int
    children: list[Node]


def registry() -> Registry:
    tools = Registry()

    @tools.tool()
    async def add(a: int, b: int = 1) -> int:
        """Adds.

        At length."""
        return a + b

    @tools.tool(name="grow.tree-1")
    async def grow(root: Node) -> Node:
        return root

    @tools.tool()
    async def nothing() -> None: ...

    return tools


def openapi(**given: Any) -> dict[str, Any]:
    document = build_openapi(registry().specs(), version="1.2.3", has_tokens=True, **given)
    return json.loads(json.dumps(document, default=str))


def resolve(document: dict[str, Any], reference: str) -> Any:
    place: Any = document
    for part in reference.removeprefix("#/").split("/"):
        place = place[part.replace("~1", "/").replace("~0", "~")]
    return place


def references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [found for part in value.values() for found in references(part)]
    return [found for part in value for found in references(part)] if isinstance(value, list) else []


@pytest.mark.requirement("D36")
def test_the_document_is_openapi_3_1_and_complete() -> None:
    document = openapi()
    schemathesis.openapi.from_dict(document).validate()
    assert set(document["paths"]) == {"/tools/add", "/tools/grow.tree-1", "/tools/nothing"}
    assert document["security"] == [{"token": []}]
    for reference in references(document):
        resolve(document, reference)


@pytest.mark.requirement("D23")
def test_each_status_of_the_table_is_described() -> None:
    responses = openapi()["paths"]["/tools/add"]["post"]["responses"]
    assert {str(rule.http_status) for rule in KIND_RULES.values()} <= set(responses)
    assert {"400", "401", "413", "415", "421", "431"} <= set(responses)


def test_recursive_schemas_are_found_from_the_document() -> None:
    document = openapi()
    schema = {"$ref": "#/components/schemas/grow.tree-1.arguments", "components": document["components"]}
    validator = jsonschema_rs.Draft202012Validator(schema)
    good = {"root": {"value": 1, "children": [{"value": 2, "children": []}]}}
    assert validator.is_valid(good)
    good["root"]["children"][0]["value"] = "two"
    assert not validator.is_valid(good)


def test_only_references_are_lengthened() -> None:
    import msgspec

    schema = {
        "$id": "https://example.test/x",
        "properties": {"$ref": {"$ref": "#/$defs/a"}, "whole": {"$ref": "#"}, "far": {"$ref": "other.json"}},
        "enum": [{"$ref": "#/$defs/a"}],
        "default": {"$ref": "#"},
        "$defs": {"a": {"const": {"$ref": "#"}}},
    }
    assert embed(msgspec.Raw(json.dumps(schema).encode()), "t.arguments") == {
        "properties": {
            "$ref": {"$ref": "#/components/schemas/t.arguments/$defs/a"},
            "whole": {"$ref": "#/components/schemas/t.arguments"},
            "far": {"$ref": "other.json"},
        },
        "enum": [{"$ref": "#/$defs/a"}],
        "default": {"$ref": "#"},
        "$defs": {"a": {"const": {"$ref": "#"}}},
    }


def test_openrpc_lists_the_methods() -> None:
    document = json.loads(json.dumps(build_openrpc(registry().specs(), version="1")))
    add = document["methods"][0]
    assert (add["name"], [(one["name"], one["required"]) for one in add["params"]]) == (
        "add",
        [("a", True), ("b", False)],
    )
    for reference in references(document):
        resolve(document, reference)
    assert escape("a/b~c d") == "a~1b~0c%20d"
