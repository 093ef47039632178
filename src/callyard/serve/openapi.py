"""What machines read of the HTTP gate: an OpenAPI 3.1 document with one path per tool, and OpenRPC, JSON-RPC's own.

The schemas of a tool stand whole under `components/schemas`, and their references are lengthened to where they stand:
`#/$defs/Flight` becomes `#/components/schemas/assess.arguments/$defs/Flight`. Pure. Source: tool-dispatch D36.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final
from urllib.parse import quote

import msgspec

from callyard.errors import KIND_RULES, ErrorKind, Outcome
from callyard.functions.function import MILLISECONDS_MAX
from callyard.functions.registry import FunctionSpec

_NOT_SCHEMAS: Final = frozenset({"const", "enum", "default", "examples", "example"})
_NAMED_SCHEMAS: Final = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_GATE_STATUSES: Final = {
    400: "no JSON, or no HTTP that we take",
    401: "no token, or not one of ours",
    408: "the body took too long",
    413: "the body is too large",
    415: "not JSON, or compressed",
    421: "this Host is not served here",
    431: "the headers are too large",
}
_TEXT: Final = {"type": "string", "pattern": "^[!-~]([ -~]{0,254}[!-~])?$"}
_MILLISECONDS: Final = {"type": "integer", "minimum": 1, "maximum": MILLISECONDS_MAX}
_HEADERS: Final = (
    ("Idempotency-Key", "The caller's name for the effect: one key and arguments never run twice.", _TEXT),
    ("X-Callyard-Owner", "Calls of one owner run one at a time, in order.", _TEXT),
    ("X-Callyard-Deadline-Ms", "From receipt, over queue and all attempts.", _MILLISECONDS),
    ("X-Callyard-Timeout-Ms", "Of each attempt, in place of the tool's own.", _MILLISECONDS),
)


def build_openapi(specs: Iterable[FunctionSpec], *, version: str, has_tokens: bool) -> dict[str, Any]:
    """`version`: of the server. `has_tokens`: calls need a bearer token."""
    schemas: dict[str, Any] = {"Error": _error_schema(), "Kept": _KEPT_SCHEMA}
    paths: dict[str, Any] = {}
    for spec in specs:
        arguments, result = f"{spec.name}.arguments", f"{spec.name}.result"
        schemas[arguments] = embed(spec.input_schema, arguments)
        schemas[result] = embed(spec.output_schema, result)
        paths[f"/tools/{spec.name}"] = {"post": _operation(spec, arguments, result)}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Callyard", "version": version},
        "jsonSchemaDialect": "https://json-schema.org/draft/2020-12/schema",
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": {f"Status{status}": _error_response(text) for status, text in _statuses().items()},
            "parameters": {
                name: {"name": name, "in": "header", "description": text, "schema": schema}
                for name, text, schema in _HEADERS
            },
        },
    }
    if has_tokens:
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]
    return document


def build_openrpc(specs: Iterable[FunctionSpec], *, version: str) -> dict[str, Any]:
    """What `rpc.discover` answers."""
    schemas: dict[str, Any] = {}
    methods = []
    for spec in specs:
        arguments, result = f"{spec.name}.arguments", f"{spec.name}.result"
        schemas[arguments] = schema = embed(spec.input_schema, arguments)
        schemas[result] = embed(spec.output_schema, result)
        required = schema.get("required", ()) if isinstance(schema, dict) else ()
        properties = schema.get("properties", {}) if isinstance(schema, dict) else {}
        methods.append(
            {
                "name": spec.name,
                "description": spec.description,
                "paramStructure": "by-name",
                "params": [
                    {
                        "name": name,
                        "required": name in required,
                        "schema": {"$ref": f"#/components/schemas/{arguments}/properties/{escape(name)}"},
                    }
                    for name in properties
                ],
                "result": {"name": "result", "schema": {"$ref": f"#/components/schemas/{result}"}},
            }
        )
    return {
        "openrpc": "1.3.2",
        "info": {"title": "Callyard", "version": version},
        "methods": methods,
        "components": {"schemas": schemas},
    }


def embed(schema: msgspec.Raw, name: str) -> Any:
    """A tool's schema as it stands at `#/components/schemas/{name}`."""
    decoded = msgspec.json.decode(schema)
    if isinstance(decoded, dict):
        decoded.pop("$id", None)  # its references are to be found from the document
    return _lengthen(decoded, f"#/components/schemas/{name}")


def escape(name: str) -> str:
    """One part of a JSON Pointer in a URI's fragment."""
    return quote(name.replace("~", "~0").replace("/", "~1"), safe="~")


def _lengthen(schema: Any, root: str) -> Any:
    if isinstance(schema, list):
        return [_lengthen(part, root) for part in schema]
    if not isinstance(schema, dict):
        return schema
    longer: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NOT_SCHEMAS:
            longer[key] = value
        elif key in _NAMED_SCHEMAS and isinstance(value, dict):
            longer[key] = {name: _lengthen(part, root) for name, part in value.items()}
        elif key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            longer[key] = root + value[1:]
        else:
            longer[key] = _lengthen(value, root)
    return longer


def _operation(spec: FunctionSpec, arguments: str, result: str) -> dict[str, Any]:
    summary = spec.description.strip().partition("\n")[0]
    return {
        "operationId": spec.name,
        "summary": summary or spec.name,
        **({"description": spec.description} if spec.description.strip() != summary else {}),
        "parameters": [{"$ref": f"#/components/parameters/{name}"} for name, _, _ in _HEADERS],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{arguments}"}}},
        },
        "responses": {
            "200": {
                "description": "What it returned. Images, audio and files come as their own bytes; of what is too"
                " large a preview, and where the whole can be read.",
                "content": {
                    "application/json": {
                        "schema": {
                            "anyOf": [
                                {"$ref": f"#/components/schemas/{result}"},
                                {"$ref": "#/components/schemas/Kept"},
                            ]
                        }
                    },
                    "text/event-stream": {"schema": {"type": "string"}},
                    "*/*": {"schema": {}},
                },
            },
            **{str(status): {"$ref": f"#/components/responses/Status{status}"} for status in _statuses()},
        },
    }


def _statuses() -> Mapping[int, str]:
    texts: dict[int, list[str]] = {status: [text] for status, text in _GATE_STATUSES.items()}
    for kind, rule in KIND_RULES.items():
        texts.setdefault(rule.http_status, []).append(f"{kind.value}: {rule.summary}")
    return {status: "; ".join(texts[status]) for status in sorted(texts)}


def _error_response(text: str) -> dict[str, Any]:
    return {
        "description": text,
        "headers": {"Retry-After": {"description": "Seconds, where it is known.", "schema": {"type": "integer"}}},
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }


_KEPT_SCHEMA: Final = {
    "type": "object",
    "required": ["kept"],
    "additionalProperties": False,
    "properties": {
        "kept": {
            "type": "object",
            "required": ["size_bytes", "preview"],
            "properties": {
                "uri": {"type": "string"},
                "size_bytes": {"type": "integer"},
                "kept_ms": {"type": "integer"},
                "preview": {"type": "string"},
            },
        }
    },
}


def _error_schema() -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["kind", "message", "attempts", "jsonrpc_code", "retryable", "outcome", "details"],
                "properties": {
                    "kind": {"enum": [kind.value for kind in ErrorKind]},
                    "message": {"type": "string"},
                    "attempts": {"type": "integer", "minimum": 0},
                    "jsonrpc_code": {"type": "integer"},
                    "retryable": {"type": "boolean"},
                    "outcome": {"enum": [outcome.value for outcome in Outcome]},
                    "details": {"type": "object"},
                    "call_id": {"type": "string"},
                    "deduplicated": {"type": "boolean"},
                },
            }
        },
    }
