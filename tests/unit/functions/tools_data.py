"""Tools in the shape of real ones, each with calls that fit and calls that do not.

Of a call that does not fit the pointer and the keyword of its only error are given.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Bad = tuple[dict[str, Any], str, str]


class Tool(NamedTuple):
    name: str
    schema: dict[str, Any]
    good: list[dict[str, Any]]
    bad: list[Bad]


def obj(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    wanted = {"required": list(required)} if required else {}
    return {"type": "object", "properties": properties, **wanted, **more}


TEXT = {"type": "string"}
WHOLE = {"type": "integer"}
NUMBER = {"type": "number"}
FLAG = {"type": "boolean"}


def texts(**more: Any) -> dict[str, Any]:
    return {"type": "array", "items": TEXT, **more}


TOOLS: list[Tool] = [
    # Servers of files, repositories, browsers: flat arguments, few constraints.
    Tool(
        "read_file",
        obj({"path": {**TEXT, "description": "Where it is."}, "head": WHOLE, "tail": WHOLE}, "path"),
        [{"path": "a.txt"}, {"path": "", "head": 5}, {"path": "a", "tail": 10**20}],
        [
            ({}, "/path", "required"),
            ({"path": 5}, "/path", "type"),
            ({"path": "a", "head": "5"}, "/head", "type"),
            ({"path": "a", "head": 1.5}, "/head", "type"),
            ({"path": "a", "head": True}, "/head", "type"),
            ({"path": "a", "encoding": "utf8"}, "/encoding", "additionalProperties"),
        ],
    ),
    Tool(
        "edit_file",
        obj(
            {
                "path": TEXT,
                "edits": {
                    "type": "array",
                    "items": obj({"old": TEXT, "new": TEXT}, "old", "new", additionalProperties=False),
                },
                "dry_run": {**FLAG, "default": False},
            },
            "path",
            "edits",
            additionalProperties=False,
            **{"$schema": "http://json-schema.org/draft-07/schema#"},
        ),
        [{"path": "a", "edits": []}, {"path": "a", "edits": [{"old": "x", "new": "y"}], "dry_run": True}],
        [
            ({"path": "a", "edits": [{"old": "x"}]}, "/edits/0/new", "required"),
            ({"path": "a", "edits": [{"old": "x", "new": "", "at": 1}]}, "/edits/0/at", "additionalProperties"),
            ({"path": "a", "edits": {"old": "x", "new": "y"}}, "/edits", "type"),
            ({"path": "a", "edits": [], "dry_run": "yes"}, "/dry_run", "type"),
        ],
    ),
    Tool(
        "search_files",
        obj({"path": TEXT, "pattern": TEXT, "exclude": texts(default=[])}, "path", "pattern"),
        [{"path": ".", "pattern": "*.py"}, {"path": ".", "pattern": "*", "exclude": ["a", "b"]}],
        [
            ({"path": ".", "pattern": "*", "exclude": "a"}, "/exclude", "type"),
            ({"path": ".", "pattern": "*", "exclude": ["a", 5]}, "/exclude/1", "type"),
        ],
    ),
    Tool(
        "git_log",
        obj(
            {"repo": TEXT, "max_count": {**WHOLE, "default": 10, "minimum": 1}, "since": {**TEXT, "format": "date"}},
            "repo",
        ),
        [{"repo": "."}, {"repo": ".", "max_count": 1, "since": "2024-02-29"}],
        [
            ({"repo": ".", "max_count": 0}, "/max_count", "minimum"),
            ({"repo": ".", "since": "2023-02-29"}, "/since", "format"),
            ({"repo": ".", "since": "yesterday"}, "/since", "format"),
        ],
    ),
    Tool("git_status", obj({"repo": TEXT}, "repo"), [{"repo": "."}], [({"repo": None}, "/repo", "type")]),
    Tool(
        "fetch",
        obj(
            {
                "url": {**TEXT, "format": "uri", "minLength": 1},
                "max_length": {**WHOLE, "exclusiveMinimum": 0, "exclusiveMaximum": 1_000_000, "default": 5000},
                "raw": {**FLAG, "default": False},
            },
            "url",
        ),
        [{"url": "https://example.org/a?b=c#d"}, {"url": "ftp://example.org", "max_length": 1}],
        [
            ({"url": "not a url"}, "/url", "format"),
            ({"url": "http://a.b", "max_length": 0}, "/max_length", "exclusiveMinimum"),
            ({"url": "http://a.b", "max_length": 1_000_000}, "/max_length", "exclusiveMaximum"),
        ],
    ),
    Tool(
        "browser_click",
        obj(
            {"element": TEXT, "ref": {**TEXT, "pattern": r"^e\d+$"}, "button": {"enum": ["left", "right", "middle"]}},
            "ref",
        ),
        [{"ref": "e12"}, {"ref": "e1", "button": "left", "element": "Save"}],
        [
            ({"ref": "12"}, "/ref", "pattern"),
            ({"ref": "e٣"}, "/ref", "pattern"),
            ({"ref": "e1", "button": "up"}, "/button", "enum"),
        ],
    ),
    Tool(
        "think",
        obj(
            {
                "thought": TEXT,
                "next": FLAG,
                "number": {**WHOLE, "minimum": 1},
                "total": {**WHOLE, "minimum": 1},
                "branch": TEXT,
            },
            "thought",
            "next",
            "number",
            "total",
        ),
        [{"thought": "", "next": False, "number": 1, "total": 1}],
        [({"thought": "", "next": 0, "number": 1, "total": 1}, "/next", "type")],
    ),
    Tool(
        "create_entities",
        obj(
            {
                "entities": {
                    "type": "array",
                    "items": obj({"name": TEXT, "kind": TEXT, "facts": texts()}, "name", "kind", "facts"),
                }
            },
            "entities",
        ),
        [{"entities": [{"name": "a", "kind": "b", "facts": []}]}, {"entities": []}],
        [
            ({"entities": [{"name": "a", "kind": "b"}]}, "/entities/0/facts", "required"),
            ({"entities": [{"name": "a", "kind": "b", "facts": [None]}]}, "/entities/0/facts/0", "type"),
            ({"entities": '[{"name": "a"}]'}, "/entities", "type"),
        ],
    ),
    Tool("no_arguments", obj({}), [{}], [({"random": "x"}, "/random", "additionalProperties")]),
    Tool("anything", {"type": "object"}, [{}, {"a": {"b": [1, None]}}], []),
    Tool("open_ended", obj({"a": TEXT}, additionalProperties=True), [{"a": "x", "b": 1}], [({"a": 1}, "/a", "type")]),
    # Derived from HTTP APIs: path, query and body in one object, references, unions.
    Tool(
        "create_issue",
        obj(
            {
                "owner": TEXT,
                "repo": TEXT,
                "title": {**TEXT, "minLength": 1, "maxLength": 256},
                "body": {"type": ["string", "null"]},
                "labels": {
                    "type": "array",
                    "items": {
                        "anyOf": [TEXT, obj({"name": TEXT, "color": {**TEXT, "pattern": "^[0-9a-f]{6}$"}}, "name")]
                    },
                },
                "assignees": texts(maxItems=10, uniqueItems=True),
                "milestone": {"oneOf": [WHOLE, {"type": "null"}]},
            },
            "owner",
            "repo",
            "title",
            additionalProperties=False,
        ),
        [
            {"owner": "o", "repo": "r", "title": "t"},
            {
                "owner": "o",
                "repo": "r",
                "title": "t",
                "body": None,
                "labels": ["bug", {"name": "x", "color": "00ff00"}],
            },
            {"owner": "o", "repo": "r", "title": "t", "milestone": None, "assignees": ["a", "b"]},
        ],
        [
            ({"owner": "o", "repo": "r", "title": ""}, "/title", "minLength"),
            ({"owner": "o", "repo": "r", "title": "x" * 257}, "/title", "maxLength"),
            ({"owner": "o", "repo": "r", "title": "t", "assignees": ["a", "a"]}, "/assignees", "uniqueItems"),
            (
                {"owner": "o", "repo": "r", "title": "t", "labels": [{"name": "x", "color": "red"}]},
                "/labels/0/color",
                "pattern",
            ),
            ({"owner": "o", "repo": "r", "title": "t", "milestone": "1"}, "/milestone", "type"),
            ({"owner": "o", "repo": "r", "title": "t", "labels": [5]}, "/labels/0", "type"),
        ],
    ),
    Tool(
        "charge",
        obj(
            {
                "amount": {**WHOLE, "minimum": 1, "maximum": 99_999_999},
                "currency": {**TEXT, "enum": ["usd", "eur", "jpy"]},
                "method": {
                    "oneOf": [
                        obj(
                            {"type": {"const": "card"}, "number": {**TEXT, "pattern": r"^\d{12,19}$"}}, "type", "number"
                        ),
                        obj({"type": {"const": "bank"}, "iban": TEXT}, "type", "iban"),
                    ]
                },
                "metadata": {"type": "object", "additionalProperties": TEXT, "maxProperties": 3},
                "receipt_email": {**TEXT, "format": "email"},
            },
            "amount",
            "currency",
            "method",
        ),
        [
            {"amount": 1, "currency": "usd", "method": {"type": "card", "number": "4" * 16}},
            {"amount": 500, "currency": "eur", "method": {"type": "bank", "iban": "X"}, "metadata": {"k": "v"}},
            {"amount": 500.0, "currency": "eur", "method": {"type": "bank", "iban": "X"}, "receipt_email": "a@b.co"},
        ],
        [
            ({"amount": 0, "currency": "usd", "method": {"type": "bank", "iban": "X"}}, "/amount", "minimum"),
            ({"amount": 1, "currency": "USD", "method": {"type": "bank", "iban": "X"}}, "/currency", "enum"),
            ({"amount": 1, "currency": "usd", "method": {"type": "card", "number": "4"}}, "/method/number", "pattern"),
            ({"amount": 1, "currency": "usd", "method": {"type": "bank"}}, "/method/iban", "required"),
            (
                {"amount": 1, "currency": "usd", "method": {"type": "bank", "iban": "X"}, "metadata": {"k": 1}},
                "/metadata/k",
                "type",
            ),
            (
                {
                    "amount": 1,
                    "currency": "usd",
                    "method": {"type": "bank", "iban": "X"},
                    "metadata": dict.fromkeys("abcd", ""),
                },
                "/metadata",
                "maxProperties",
            ),
            (
                {"amount": 1, "currency": "usd", "method": {"type": "bank", "iban": "X"}, "receipt_email": "nobody"},
                "/receipt_email",
                "format",
            ),
        ],
    ),
    Tool(
        "create_event",
        obj(
            {
                "start": {"$ref": "#/$defs/Moment"},
                "end": {"$ref": "#/$defs/Moment"},
                "attendees": {"type": "array", "items": {"$ref": "#/$defs/Person"}, "maxItems": 3},
                "recurrence": texts(minItems=1),
            },
            "start",
            "end",
            **{
                "$defs": {
                    "Moment": obj({"at": {**TEXT, "format": "date-time"}, "zone": TEXT}, "at"),
                    "Person": obj({"email": {**TEXT, "format": "email"}, "optional": FLAG}, "email"),
                }
            },
        ),
        [
            {"start": {"at": "2025-01-01T09:00:00Z"}, "end": {"at": "2025-01-01T10:00:00+02:00", "zone": "UTC"}},
            {
                "start": {"at": "2025-01-01T09:00:00.5Z"},
                "end": {"at": "2025-01-01T10:00:00Z"},
                "attendees": [{"email": "a@b.c"}],
            },
        ],
        [
            ({"start": {"at": "2025-01-01 9am"}, "end": {"at": "2025-01-01T10:00:00Z"}}, "/start/at", "format"),
            ({"start": {"at": "2025-01-01T09:00:00"}, "end": {"at": "2025-01-01T10:00:00Z"}}, "/start/at", "format"),
            ({"start": {}, "end": {"at": "2025-01-01T10:00:00Z"}}, "/start/at", "required"),
            (
                {"start": {"at": "2025-01-01T09:00:00Z"}, "end": {"at": "2025-01-01T10:00:00Z"}, "recurrence": []},
                "/recurrence",
                "minItems",
            ),
        ],
    ),
    Tool(
        "list_orders",
        obj(
            {
                "limit": {**WHOLE, "minimum": 1, "maximum": 100, "default": 10},
                "created": {"anyOf": [WHOLE, obj({"gt": WHOLE, "lt": WHOLE}, additionalProperties=False)]},
                "expand": texts(),
                "status": {"type": ["string", "null"], "enum": ["open", "closed", None]},
            }
        ),
        [{}, {"limit": 100, "created": 5}, {"created": {"gt": 5}, "status": None}, {"status": "open", "expand": []}],
        [
            ({"limit": 101}, "/limit", "maximum"),
            ({"created": {"gte": 5}}, "/created/gte", "additionalProperties"),
            ({"created": {"gt": "5"}}, "/created/gt", "type"),
            ({"status": "lost"}, "/status", "enum"),
            ({"status": 5}, "/status", "type"),
        ],
    ),
    Tool(
        "geocode",
        obj(
            {
                "address": TEXT,
                "bounds": {
                    "type": "array",
                    "prefixItems": [NUMBER, NUMBER, NUMBER, NUMBER],
                    "items": False,
                    "minItems": 4,
                },
                "point": obj({"lat": {**NUMBER, "minimum": -90, "maximum": 90}, "lng": NUMBER}, "lat", "lng"),
            },
            anyOf=[{"required": ["address"]}, {"required": ["point"]}],
        ),
        [{"address": "x"}, {"point": {"lat": 90, "lng": 1e3}}, {"address": "x", "bounds": [0, 0.5, 1, 2]}],
        [
            ({"point": {"lat": 90.1, "lng": 0}}, "/point/lat", "maximum"),
            ({"address": "x", "bounds": [0, 0, 0]}, "/bounds", "minItems"),
            ({"address": "x", "bounds": [0, 0, 0, "0"]}, "/bounds/3", "type"),
            ({"address": "x", "country": "NL"}, "/country", "additionalProperties"),
        ],
    ),
    Tool(
        "send_message",
        obj(
            {
                "channel": {**TEXT, "pattern": "^[CGD][A-Z0-9]{8,}$"},
                "text": {**TEXT, "maxLength": 40},
                "thread": TEXT,
                "blocks": {"type": "array", "items": {"type": "object"}},
            },
            "channel",
            dependentRequired={"thread": ["text"]},
            minProperties=2,
        ),
        [{"channel": "C12345678", "text": "é" * 40}, {"channel": "C12345678", "blocks": [{}]}],
        [
            ({"channel": "general", "text": "x"}, "/channel", "pattern"),
            ({"channel": "C12345678"}, "", "minProperties"),
            ({"channel": "C12345678", "text": "x" * 41}, "/text", "maxLength"),
        ],
    ),
    Tool(
        "run_query",
        obj(
            {
                "sql": {**TEXT, "minLength": 1},
                "params": {"type": "array", "items": {"type": ["string", "number", "boolean", "null"]}},
                "timeout_s": {**NUMBER, "exclusiveMinimum": 0, "maximum": 300},
                "format": {"const": "json"},
            },
            "sql",
        ),
        [{"sql": "select 1"}, {"sql": "x", "params": ["a", 1, 1.5, True, None], "timeout_s": 0.1, "format": "json"}],
        [
            ({"sql": "x", "params": [[]]}, "/params/0", "type"),
            ({"sql": "x", "timeout_s": 0}, "/timeout_s", "exclusiveMinimum"),
            ({"sql": "x", "format": "csv"}, "/format", "const"),
        ],
    ),
    Tool(
        "filter_rows",
        obj(
            {"where": {"$ref": "#/$defs/Expr"}},
            "where",
            **{
                "$defs": {
                    "Expr": {
                        "anyOf": [
                            obj({"field": TEXT, "is": TEXT}, "field", "is", additionalProperties=False),
                            obj({"not": {"$ref": "#/$defs/Expr"}}, "not", additionalProperties=False),
                            obj(
                                {"all": {"type": "array", "items": {"$ref": "#/$defs/Expr"}, "minItems": 1}},
                                "all",
                                additionalProperties=False,
                            ),
                        ]
                    }
                }
            },
        ),
        [
            {"where": {"field": "a", "is": "b"}},
            {"where": {"not": {"all": [{"field": "a", "is": "b"}, {"not": {"field": "a", "is": "b"}}]}}},
        ],
        [({"where": {"not": {"all": []}}}, "/where", "anyOf"), ({"where": []}, "/where", "type")],
    ),
    Tool(
        "apply_manifest",
        obj(
            {
                "kind": {"enum": ["Deployment", "Service"]},
                "metadata": obj(
                    {
                        "name": {**TEXT, "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63},
                        "labels": {"type": "object", "additionalProperties": TEXT},
                    },
                    "name",
                ),
                "spec": {"type": "object"},
                "replicas": {**WHOLE, "minimum": 0},
            },
            "kind",
            "metadata",
            allOf=[{"if": {"properties": {"kind": {"const": "Deployment"}}}, "then": {"required": ["replicas"]}}],
        ),
        [
            {"kind": "Service", "metadata": {"name": "web"}},
            {"kind": "Deployment", "metadata": {"name": "a-b", "labels": {"x": "y"}}, "replicas": 0},
        ],
        [
            ({"kind": "Deployment", "metadata": {"name": "web"}}, "/replicas", "required"),
            ({"kind": "Service", "metadata": {"name": "Web"}}, "/metadata/name", "pattern"),
            ({"kind": "Service", "metadata": {"name": "w", "labels": {"a": 1}}}, "/metadata/labels/a", "type"),
        ],
    ),
    Tool(
        "upload",
        obj(
            {
                "bucket": TEXT,
                "parts": {"type": "array", "items": {**WHOLE, "multipleOf": 4}, "contains": {"const": 0}},
                "sha256": {**TEXT, "pattern": "^[0-9a-f]{64}$"},
                "ttl": {**TEXT, "format": "duration"},
                "id": {**TEXT, "format": "uuid"},
            },
            "bucket",
        ),
        [
            {
                "bucket": "b",
                "parts": [0, 4],
                "ttl": "P1DT2H",
                "id": "12345678-1234-5678-1234-567812345678",
                "sha256": "0" * 64,
            }
        ],
        [
            ({"bucket": "b", "parts": [0, 5]}, "/parts/1", "multipleOf"),
            ({"bucket": "b", "parts": [4]}, "/parts", "contains"),
            ({"bucket": "b", "ttl": "1 day"}, "/ttl", "format"),
            ({"bucket": "b", "id": "1234"}, "/id", "format"),
            ({"bucket": "b", "sha256": "0" * 63}, "/sha256", "pattern"),
        ],
    ),
    Tool(
        "get_weather",
        obj(
            {
                "city": TEXT,
                "days": {**WHOLE, "minimum": 1, "maximum": 16},
                "units": {"enum": ["metric", "imperial"], "default": "metric"},
            },
            "city",
        ),
        [{"city": "Oslo"}, {"city": "Oslo", "days": 16, "units": "imperial"}],
        [({"city": ["Oslo"]}, "/city", "type"), ({"city": "Oslo", "days": -1}, "/days", "minimum")],
    ),
    Tool(
        "set_light",
        obj(
            {
                "id": WHOLE,
                "on": FLAG,
                "rgb": {
                    "type": "array",
                    "items": {**WHOLE, "minimum": 0, "maximum": 255},
                    "minItems": 3,
                    "maxItems": 3,
                },
            },
            "id",
        ),
        [{"id": 1, "on": True, "rgb": [0, 128, 255]}, {"id": -1}],
        [
            ({"id": 1, "rgb": [0, 0, 256]}, "/rgb/2", "maximum"),
            ({"id": 1, "rgb": [0, 0, 0, 0]}, "/rgb", "maxItems"),
            ({"id": "1"}, "/id", "type"),
            ({"id": 1, "on": 1}, "/on", "type"),
        ],
    ),
    Tool(
        "translate",
        obj(
            {
                "text": texts(minItems=1),
                "target": {**TEXT, "pattern": "^[a-z]{2}(-[A-Z]{2})?$"},
                "glossary": {"type": "object", "propertyNames": {"maxLength": 3}},
            },
            "text",
            "target",
        ),
        [{"text": ["a"], "target": "pt-BR"}, {"text": ["a"], "target": "de", "glossary": {"abc": 1}}],
        [
            ({"text": "a", "target": "de"}, "/text", "type"),
            ({"text": ["a"], "target": "german"}, "/target", "pattern"),
            ({"text": ["a"], "target": "de", "glossary": {"abcd": 1}}, "/glossary", "propertyNames"),
        ],
    ),
    Tool(
        "tree",
        obj(
            {"root": {"$ref": "#/definitions/node"}},
            "root",
            definitions={
                "node": obj(
                    {"name": TEXT, "children": {"type": "array", "items": {"$ref": "#/definitions/node"}}}, "name"
                )
            },
        ),
        [{"root": {"name": "a", "children": [{"name": "b", "children": []}]}}],
        [
            (
                {"root": {"name": "a", "children": [{"name": "b", "children": [{}]}]}},
                "/root/children/0/children/0/name",
                "required",
            )
        ],
    ),
    Tool(
        "page",
        obj(
            {
                "cursor": {"anyOf": [TEXT, {"type": "null"}], "default": None},
                "filter": {"type": "object", "patternProperties": {"^x-": TEXT}, "additionalProperties": False},
            }
        ),
        [{}, {"cursor": None}, {"cursor": "a", "filter": {"x-a": "b"}}],
        [
            ({"cursor": 5}, "/cursor", "type"),
            ({"filter": {"y": "b"}}, "/filter/y", "additionalProperties"),
            ({"filter": {"x-a": 5}}, "/filter/x-a", "type"),
        ],
    ),
    Tool(
        "composed",
        {
            "type": "object",
            "allOf": [obj({"id": WHOLE}, "id"), {"$ref": "#/$defs/Named"}],
            "properties": {"extra": TEXT},
            "$defs": {"Named": obj({"name": TEXT}, "name")},
        },
        [{"id": 1, "name": "a"}, {"id": 1, "name": "a", "extra": "b"}],
        [({"id": 1}, "/name", "required"), ({"id": 1, "name": "a", "other": 1}, "/other", "additionalProperties")],
    ),
]
