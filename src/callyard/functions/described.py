"""The JSON Schema of a function's own signature, as a filter in front of its validator.

The validator's verdict is final, so the filter takes whatever the validator takes: where JSON Schema and pydantic
disagree it is loosened, formats and patterns run on pydantic's own engine, and what the schema cannot know of a
signature is marked by its generator with `UNCHECKED`. Source: tool-dispatch D49.

| they differ on | here |
| --- | --- |
| a date and time without zone, a UUID without hyphens, … | the format is asserted as pydantic and msgspec read it |
| what `\\d` and `\\w` mean | patterns run on pydantic's linear-time engine |
| sets: an item may stand twice | `uniqueItems` and `maxItems` are left out |
| `multipleOf` of a fraction | left out |
| bytes, counted by pydantic, against characters | `minLength` is left out |
| keys that stand for numbers, dates, … and have a pattern | left out |
| true and 1, which are one value of an enum or a Literal | both are taken |
| a user's own validator before pydantic's, names beside aliases | marked, and left out |
"""

from __future__ import annotations

import datetime as dt
import functools
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from callyard.functions.encoding import escape_token
from callyard.functions.schema_text import subschemas

UNCHECKED: Final = "x-callyard-unchecked"
"""In a schema: true, or the keywords that say more than the function asks for."""

_FORMAT_TYPES: Final[dict[str, tuple[str, Any]]] = {
    "date-time": ("datetime", dt.datetime),
    "date": ("date", dt.date),
    "time": ("time", dt.time),
    "duration": ("timedelta", dt.timedelta),
    **{f"uuid{version}": ("uuid", uuid.UUID) for version in ("", *range(1, 9))},
}
_ALIKE: Final = {0: (0, False), 1: (1, True)}
"""Equal in Python, so the validator finds one where the other stands. True and False are found here as 1 and 0."""
_NOT_ASSERTED: Final = (
    *("email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uri", "uri-reference", "iri"),
    *("iri-reference", "uri-template", "json-pointer", "relative-json-pointer", "regex"),
)
"""Formats that a signature's schema shows, and whose reading by pydantic is another."""


def loosen(schema: Any) -> Any:
    """A schema that takes all that the function's validator takes."""
    if not isinstance(schema, dict):
        return schema
    unchecked = schema.get(UNCHECKED)
    if unchecked is True:
        return {key: _loosen_parts(key, schema[key]) for key in ("$defs",) if key in schema}
    left_out = {UNCHECKED, *(unchecked if isinstance(unchecked, list) else ())}
    if schema.get("uniqueItems"):
        left_out |= {"uniqueItems", "maxItems"}
    if not isinstance(schema.get("multipleOf", 1), int):
        left_out.add("multipleOf")
    if schema.get("format") == "binary":
        left_out.add("minLength")
    if "patternProperties" in schema or "propertyNames" in schema:
        left_out |= {"patternProperties", "propertyNames", "additionalProperties", "maxProperties", "minProperties"}
    values = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())]
    alike = [_ALIKE[value] for value in values if isinstance(value, int) and value in _ALIKE]
    if alike:
        left_out |= {"enum", "const", "type"}
    kept = {key: _loosen_parts(key, value) for key, value in schema.items() if key not in left_out}
    if "oneOf" in kept and "anyOf" not in kept:
        kept["anyOf"] = kept.pop("oneOf")
    if alike:
        kept["enum"] = [value for value in values if not (isinstance(value, int) and value in _ALIKE)]
        kept["enum"] += [value for pair in alike for value in pair]
    return kept


def find_unchecked_patterns(schema: dict[str, Any], pointer: str = "") -> Iterator[str]:
    """Places of patterns that an engine without a bound on its time runs."""
    unchecked = schema.get(UNCHECKED)
    if isinstance(unchecked, list) and "pattern" in unchecked:
        yield f"{pointer}/pattern"
    for below, part in subschemas(schema):
        yield from find_unchecked_patterns(part, pointer + below)


def formats() -> dict[str, Callable[[str], bool]]:
    """Every format that a signature's schema can show, as the validator reads it."""
    return {
        **{name: functools.partial(_reads, core, kind) for name, (core, kind) in _FORMAT_TYPES.items()},
        **dict.fromkeys(_NOT_ASSERTED, _takes_any),
    }


class Pattern:
    """The keyword `pattern` on pydantic's own engine, by the port of the schema validator."""

    def __init__(self, parent_schema: dict[str, Any], value: Any, schema_path: list[str | int]) -> None:
        self._pattern = value
        self._validator = _build_pattern(value)

    def validate(self, instance: Any) -> None:
        if isinstance(instance, str) and self._validator and not self._validator.isinstance_python(instance):
            raise ValueError(self._pattern)


KEYWORDS: Final[dict[str, Any]] = {"pattern": Pattern}


def mark(schema: dict[str, Any], *keywords: str) -> dict[str, Any]:
    """Say that the function takes more than these keywords do, or than the whole schema does."""
    present = schema.get(UNCHECKED)
    if not keywords or present is True:
        return {**schema, UNCHECKED: True}
    return {**schema, UNCHECKED: sorted({*(present or ()), *keywords})}


def _loosen_parts(keyword: str, value: Any) -> Any:
    """Loosen what `keyword` holds, where that is schemas."""
    places = {below: loosen(part) for below, part in subschemas({keyword: value})}
    if not places:
        return value
    if isinstance(value, list):
        return [places.get(f"/{keyword}/{position}", part) for position, part in enumerate(value)]
    if f"/{keyword}" in places:
        return places[f"/{keyword}"]
    return {name: places.get(f"/{escape_token(keyword)}/{escape_token(name)}", part) for name, part in value.items()}


def _reads(core: str, kind: Any, text: str) -> bool:
    try:
        _core_validator(core).validate_json(msgspec.json.encode(text), strict=True)
    except ValueError:
        try:
            msgspec.convert(text, kind)
        except msgspec.ValidationError:
            return False
    return True


def _takes_any(text: str) -> bool:
    return True


@functools.cache
def _core_validator(core: str) -> Any:
    from pydantic_core import SchemaValidator  # not pydantic, which a worker does without

    schema: Any = {"type": core}
    return SchemaValidator(schema)


def _build_pattern(pattern: Any) -> Any:
    """None: this engine cannot run it, so the validator alone judges."""
    from pydantic_core import SchemaError, SchemaValidator

    try:
        return SchemaValidator({"type": "str", "pattern": pattern, "regex_engine": "rust-regex"})
    except SchemaError:
        return None
