"""JSON Schemas as people write them: what is almost right, and how it is mended.

One walk finds and mends: a schema that brings its own text is refused when there is anything to mend
(`json_schema.JsonSchema`), and `normalize_schema` gives what came out, with its list of changes.
Source: tool-dispatch D3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import msgspec

from callyard.errors import UsageError
from callyard.functions.encoding import ResultMisfit, encode_value, escape_token, is_deeper_than
from callyard.functions.misfits import ArgumentsMisfit
from callyard.functions.strict_json import decode_json

SCHEMA_BYTES_MAX: Final = 4 * 1024 * 1024
SCHEMA_LEVELS_MAX: Final = 120
"""Levels of JSON. The validator's own limit is 128 levels of nested values."""
_SHOWN_MAX: Final = 5

LATEST: Final = 2020
DRAFTS: Final[Mapping[str, int]] = {
    "json-schema.org/draft-04/schema": 4,
    "json-schema.org/draft-06/schema": 6,
    "json-schema.org/draft-07/schema": 7,
    "json-schema.org/draft/2019-09/schema": 2019,
    "json-schema.org/draft/2020-12/schema": LATEST,
}
"""What `$schema` may say, without its scheme and its empty fragment. Numbers grow with the drafts."""

_MAPS: Final = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_LISTS: Final = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_SINGLE: Final = frozenset(
    {
        *("items", "additionalItems", "unevaluatedItems", "contains", "additionalProperties", "unevaluatedProperties"),
        *("propertyNames", "not", "if", "then", "else", "contentSchema"),
    }
)
_TYPES: Final = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
_TYPE_NAMES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("dict", "dictionary", "map", "mapping", "struct", "record", "hash", "json"), "object"),
    **dict.fromkeys(("list", "tuple", "set", "frozenset", "sequence", "iterable", "vector"), "array"),
    **dict.fromkeys(("str", "text", "char", "varchar", "bytes", "file", "uuid", "date", "datetime", "time"), "string"),
    **dict.fromkeys(("date-time", "timestamp", "url", "uri", "email"), "string"),
    **dict.fromkeys(("float", "double", "decimal", "real", "float32", "float64"), "number"),
    **dict.fromkeys(("int", "long", "short", "int32", "int64", "bigint", "uint"), "integer"),
    **dict.fromkeys(("bool",), "boolean"),
    **dict.fromkeys(("none", "nonetype", "nil", "undefined", "void"), "null"),
}
_FORMATS_OF_NAMES: Final[Mapping[str, str]] = {
    **{name: name for name in ("uuid", "date", "time", "date-time", "uri", "email")},
    "datetime": "date-time",
    "timestamp": "date-time",
    "url": "uri",
}
_ANYTHING: Final = frozenset({"any", "mixed", "unknown", "variant"})
_NUMBERS: Final = frozenset(
    {
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength"),
        *("minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains"),
    }
)
_SWITCHES: Final = frozenset({"uniqueItems", "additionalProperties", "readOnly", "writeOnly", "deprecated"})
_NEVER_NULL: Final = frozenset(
    {
        *(_MAPS | _LISTS | _SINGLE | _NUMBERS | _SWITCHES),
        *("title", "description", "format", "pattern", "enum", "required", "$ref", "$schema", "$id", "examples"),
        *("dependencies", "divisibleBy", "disallow", "extends"),
    }
)
_DROPPED: Final[Mapping[str, str]] = {
    "xml": "it says how OpenAPI writes XML",
    "externalDocs": "it is OpenAPI's: put the link into the description",
    "discriminator": "it is OpenAPI's: a `const` in each branch of oneOf says the same",
}


class SchemaChange(msgspec.Struct, frozen=True):
    """One thing that was not JSON Schema, and what became of it."""

    pointer: str
    what: str
    """From what to what."""
    why: str
    """What was expected."""


class BadSchema(UsageError):
    """A schema that cannot be used: `pointer` is the first bad place in it, `problems` all that were found."""

    def __init__(self, problems: list[tuple[str, str]], subject: str = "schema", advice: str = "") -> None:
        self.pointer = problems[0][0]
        self.problems = problems
        shown = "; ".join(f"{pointer or '(root)'}: {text}" for pointer, text in problems[:_SHOWN_MAX])
        more = f" (and {len(problems) - _SHOWN_MAX} more)" if len(problems) > _SHOWN_MAX else ""
        super().__init__(f"{subject}: {shown}{more}{advice}")


def normalize_schema(schema: Any, *, object_root: bool = True) -> tuple[Any, list[SchemaChange]]:
    """`schema` with what is almost right mended, and the list of changes; the schema given is left as it is.

    `object_root`: it describes arguments, so it must be one of an object. Raises `BadSchema` for what cannot be read as
    JSON; what it did not know how to mend is refused when the schema is used.
    """
    plain = to_plain(schema)
    mender = _Mender(draft_of(plain) or LATEST)
    mended = mender.mend_root(plain, object_root=object_root)
    return mended, mender.changes


def to_plain(schema: Any, subject: str = "schema") -> Any:
    """A copy in plain JSON values. Raises `BadSchema`."""
    try:
        raw = encode_value(schema)
        if len(raw) > SCHEMA_BYTES_MAX:
            raise BadSchema([("", f"of {len(raw)} bytes exceeds schema_bytes_max={SCHEMA_BYTES_MAX}")], subject)
        if is_deeper_than(raw, SCHEMA_LEVELS_MAX):
            raise BadSchema([("", f"nested deeper than {SCHEMA_LEVELS_MAX} levels: move parts to $defs")], subject)
        return decode_json(raw)
    except ResultMisfit as error:
        pointer = error.details.get("pointer", "")
        raise BadSchema([(pointer, error.message.removeprefix(f"{pointer}: "))], subject) from None
    except ArgumentsMisfit as error:
        raise BadSchema([(error.details["pointer"], error.message)], subject) from None


def draft_of(schema: Any) -> int | None:
    """The draft that `$schema` names, or the latest when it names none; None: a name that we do not know."""
    named = schema.get("$schema") if isinstance(schema, dict) else None
    if named is None:
        return LATEST
    return DRAFTS.get(str(named).partition("://")[2].rstrip("#"))


def subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas that stand in `schema`, each with its pointer from there. Values (enum, default, …) are none."""
    for keyword, value in schema.items():
        if keyword in _MAPS or keyword == "dependencies":
            if isinstance(value, dict):
                for name, part in value.items():
                    if isinstance(part, dict):
                        yield f"/{escape_token(keyword)}/{escape_token(name)}", part
        elif keyword in _LISTS or (keyword in _SINGLE and isinstance(value, list)):
            if isinstance(value, list):
                for position, part in enumerate(value):
                    if isinstance(part, dict):
                        yield f"/{keyword}/{position}", part
        elif keyword in _SINGLE and isinstance(value, dict):
            yield f"/{keyword}", value


class _Mender:
    """Walks one schema. Each rule looks at one schema object, already copied, and may change it."""

    def __init__(self, draft: int) -> None:
        self.changes: list[SchemaChange] = []
        self._draft = draft
        self._pointer = ""

    def mend_root(self, schema: Any, *, object_root: bool) -> Any:
        if isinstance(schema, dict) and draft_of(schema) is None:
            named = schema["$schema"]
            schema = {key: value for key, value in schema.items() if key != "$schema"}
            self._tell(f"{_show(named)} removed", "2020-12, or one of drafts 4, 6, 7 and 2019-09", "/$schema")
        if object_root and schema in (True, {}, None):
            self._tell(f"{_show(schema)} to an object of any arguments", 'a schema of an object: {"type": "object"}')
            return {"type": "object"}
        if not isinstance(schema, dict):
            return schema
        schema = self._mend(schema, "")
        if object_root and schema.get("type") != "object":
            self._mend_root_type(schema)
        return schema

    def _mend_root_type(self, schema: dict[str, Any]) -> None:
        self._pointer = ""
        kind = schema.get("type")
        if kind is None:
            schema["type"] = "object"
            self._tell("added", '"object", since arguments are an object', "/type")
        elif isinstance(kind, list) and "object" in kind:
            schema["type"] = "object"
            self._tell(f"{_show(kind)} to 'object'", '"object" alone, since arguments are an object', "/type")

    def _mend(self, schema: dict[str, Any], pointer: str) -> dict[str, Any]:
        mended = dict(schema)
        for keyword in [key for key in mended if mended[key] is None and key in _NEVER_NULL]:
            self._pointer = pointer
            del mended[keyword]
            self._tell("null removed", f"a value, or no {keyword} at all", f"/{escape_token(keyword)}")
        for rule in _RULES:
            self._pointer = pointer
            rule(self, mended)
        for keyword, value in list(mended.items()):
            below = f"{pointer}/{escape_token(keyword)}"
            if (keyword in _MAPS or keyword == "dependencies") and isinstance(value, dict):
                mended[keyword] = {
                    name: self._mend_part(part, f"{below}/{escape_token(name)}") for name, part in value.items()
                }
            elif (keyword in _LISTS or keyword in _SINGLE) and isinstance(value, list):
                mended[keyword] = [self._mend_part(part, f"{below}/{position}") for position, part in enumerate(value)]
            elif keyword in _SINGLE:
                mended[keyword] = self._mend_part(value, below)
        return self._mend_nullable(mended, pointer)

    def _mend_part(self, part: Any, pointer: str) -> Any:
        if isinstance(part, str) and _read_type(part) is not None:  # {"name": "string"}
            self._pointer = pointer
            self._tell(f"{_show(part)} to an object with that type", 'a schema, such as {"type": "string"}')
            part = {"type": part}
        return self._mend(part, pointer) if isinstance(part, dict) else part

    def _mend_type(self, schema: dict[str, Any]) -> None:
        if "type" not in schema:
            return
        kind = schema["type"]
        if isinstance(kind, list) and any(isinstance(one, dict) for one in kind):
            branches = [one if isinstance(one, dict) else {"type": one} for one in kind]
            del schema["type"]
            schema["allOf" if "anyOf" in schema else "anyOf"] = (
                [*schema.get("allOf", ()), {"anyOf": branches}] if "anyOf" in schema else branches
            )
            self._tell("a list with schemas to anyOf", f"names out of {_TYPE_LIST}; schemas stand in anyOf", "/type")
            return
        names = kind if isinstance(kind, list) else [kind]
        read = [_read_type(name) for name in names]
        if all(name == new for name, new in zip(names, read, strict=True)) or None in read:
            return  # right, or nothing that we could mend
        if "" in read:
            del schema["type"]
            self._tell(f"{_show(kind)} removed", f"no type, which means any, or one of {_TYPE_LIST}", "/type")
            return
        unique = list(dict.fromkeys(str(name) for name in read))
        schema["type"] = unique if isinstance(kind, list) else unique[0]
        self._tell(f"{_show(kind)} to {_show(schema['type'])}", f"one of {_TYPE_LIST}", "/type")
        named = _FORMATS_OF_NAMES.get(str(kind).lower())
        if named is not None and "format" not in schema:
            schema["format"] = named
            self._tell(f"{named!r} added", f"what {_show(kind)} means stands in format", "/format")

    def _mend_required(self, schema: dict[str, Any]) -> None:
        """`required` on a property, as drafts 3 and OpenAPI parameters have it, belongs to the object."""
        own = schema.get("required")
        if isinstance(own, bool):
            del schema["required"]
            if self._pointer.split("/")[-2:-1] != ["properties"]:  # of a property: its object has taken it already
                self._tell(f"{_show(own)} removed", "a list of property names", "/required")
        elif isinstance(own, str):
            schema["required"] = [own]
            self._tell(f"{_show(own)} to [{_show(own)}]", "a list of property names", "/required")
        properties = schema.get("properties")
        if not isinstance(properties, dict):
            return
        wanted = [name for name, part in properties.items() if isinstance(part, dict) and part.get("required") is True]
        for name, part in properties.items():
            if isinstance(part, dict) and isinstance(part.get("required"), bool):
                pointer = f"/properties/{escape_token(name)}/required"
                what = "true to the object's own list" if part["required"] else "false removed"
                self._tell(what, "a list of property names, on the object that has them", pointer)
        present = schema.get("required", [])
        if wanted and isinstance(present, list):
            schema["required"] = [*present, *(name for name in wanted if name not in present)]

    def _mend_bounds(self, schema: dict[str, Any]) -> None:
        for keyword, plain in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            switch = schema.get(keyword)
            if isinstance(switch, bool) and self._draft > 4:
                del schema[keyword]
                what = f"{_show(switch)} removed"
                if switch and plain in schema:
                    schema[keyword] = schema.pop(plain)
                    what = f"true with {plain} to {_show(schema[keyword])}"
                self._tell(what, f"the bound itself, a number: {keyword} takes the place of {plain}", f"/{keyword}")
        for keyword in _NUMBERS & schema.keys():
            number = _read_number(schema[keyword])
            if number is not None:
                self._tell(f"{_show(schema[keyword])} to {number}", "a number", f"/{keyword}")
                schema[keyword] = number
        for keyword in _SWITCHES & schema.keys():
            if isinstance(schema[keyword], str) and schema[keyword].lower() in {"true", "false"}:
                switch = schema[keyword].lower() == "true"
                self._tell(f"{_show(schema[keyword])} to {str(switch).lower()}", "true or false", f"/{keyword}")
                schema[keyword] = switch

    def _mend_openapi(self, schema: dict[str, Any]) -> None:
        if "example" in schema:
            example = schema.pop("example")
            if "examples" not in schema:
                schema["examples"] = [example]
            self._tell("moved to examples", "examples, a list", "/example")
        if isinstance(schema.get("examples"), dict):
            values = schema["examples"].values()
            schema["examples"] = [one["value"] if isinstance(one, dict) and "value" in one else one for one in values]
            self._tell("an object to a list", "a list of values", "/examples")
        for keyword, why in _DROPPED.items():
            if keyword in schema:
                del schema[keyword]
                self._tell("removed", f"no {keyword}: {why}", f"/{keyword}")

    def _mend_older(self, schema: dict[str, Any]) -> None:
        """Keywords of older drafts, which a newer one would pass over in silence."""
        if "divisibleBy" in schema:
            schema.setdefault("multipleOf", schema.pop("divisibleBy"))
            self._tell("to multipleOf", "multipleOf, its name since draft 4", "/divisibleBy")
        if "disallow" in schema and "not" not in schema:
            schema["not"] = {"type": schema.pop("disallow")}
            self._tell("to not", "not, with a schema", "/disallow")
        if "extends" in schema:
            base = schema.pop("extends")
            schema["allOf"] = [*schema.get("allOf", ()), *(base if isinstance(base, list) else [base])]
            self._tell("to allOf", "allOf, with a list of schemas", "/extends")
        for keyword in ("allOf", "anyOf", "oneOf"):
            if isinstance(schema.get(keyword), dict):
                schema[keyword] = [schema[keyword]]
                self._tell("a schema to a list of one", "a list of schemas", f"/{keyword}")
        if isinstance(schema.get("items"), list) and self._draft >= LATEST:
            schema["prefixItems"] = schema.pop("items")
            self._tell("a list to prefixItems", "one schema for every item; a list stands in prefixItems", "/items")
            if "additionalItems" in schema:
                schema["items"] = schema.pop("additionalItems")
                self._tell("to items", "items, for those after prefixItems", "/additionalItems")
        if isinstance(schema.get("dependencies"), dict) and self._draft >= 2019:
            for name, needed in schema.pop("dependencies").items():
                keyword = "dependentRequired" if isinstance(needed, list) else "dependentSchemas"
                schema[keyword] = {**schema.get(keyword, {}), name: needed}
            self._tell("taken apart", "dependentRequired for names, dependentSchemas for schemas", "/dependencies")

    def _mend_nullable(self, schema: dict[str, Any], pointer: str) -> dict[str, Any]:
        if "nullable" not in schema:
            return schema
        self._pointer = pointer
        nullable = schema.pop("nullable")
        expected = 'a type with "null" beside it: ["string", "null"]'
        if nullable is not True and str(nullable).lower() != "true":
            self._tell(f"{_show(nullable)} removed", expected, "/nullable")
            return schema
        self._tell("true to null among what is allowed", expected, "/nullable")
        kind = schema.get("type")
        if kind is None and not schema.keys() & _CONSTRAINING:
            return schema
        if kind is None or "const" in schema:
            return {"anyOf": [schema, {"type": "null"}]}
        kinds = kind if isinstance(kind, list) else [kind]
        schema["type"] = [*kinds, *(["null"] if "null" not in kinds else [])]
        if isinstance(schema.get("enum"), list) and None not in schema["enum"]:
            schema["enum"] = [*schema["enum"], None]
        return schema

    def _tell(self, what: str, why: str, below: str = "") -> None:
        self.changes.append(SchemaChange(self._pointer + below, what, why))


_RULES: Final[tuple[Callable[[_Mender, dict[str, Any]], None], ...]] = (
    _Mender._mend_type,
    _Mender._mend_required,
    _Mender._mend_bounds,
    _Mender._mend_openapi,
    _Mender._mend_older,
)
_CONSTRAINING: Final = frozenset({"$ref", "$dynamicRef", "enum", "const", "not", "if"} | _LISTS)
_TYPE_LIST: Final = "object, array, string, number, integer, boolean, null"


def _read_type(name: Any) -> str | None:
    """The type that a name stands for; empty: any; None: none that we know."""
    if name is None:
        return "null"
    if not isinstance(name, str):
        return None
    if name in _TYPES:
        return name
    lower = name.lower()
    if lower in _ANYTHING:
        return ""
    return lower if lower in _TYPES else _TYPE_NAMES.get(lower)


def _read_number(value: Any) -> int | float | None:
    """The number that a text is; None: it is none."""
    if not isinstance(value, str):
        return None
    try:
        number = decode_json(value.strip().encode())
    except (ArgumentsMisfit, UnicodeEncodeError):
        return None
    return number if isinstance(number, int | float) and not isinstance(number, bool) else None


def _show(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
