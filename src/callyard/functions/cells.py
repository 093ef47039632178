"""Text values, as CSV cells and `key=value` give them, made ready for the validator.

Most cells need nothing: the validator parses text by each parameter's type. What it cannot know from text is done
here: an empty cell is an absent argument, and arrays, objects, numbers in an enum are JSON inside the cell. The choice
is made by column, never by what a cell happens to hold in a text column. Source: tool-dispatch D49.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from callyard.functions.encoding import escape_token
from callyard.functions.misfits import misfit

_CELLS: Final = msgspec.json.Decoder(dict[str, Any])
_SYNTAX: Final = msgspec.json.Decoder(msgspec.Raw)
_NUMBER_STARTS: Final = "-0123456789"
_MANY_ZEROS: Final = re.compile(r"\s*[+-]?[0-9]+\.0{2,}\s*")


class Column(msgspec.Struct, frozen=True):
    """How the cells of one parameter or field are read."""

    empty: str = "text"
    """What an empty cell is: `absent`, `null`, or `text`."""
    json_starts: str = ""
    """A cell that begins with one of these characters and is JSON is taken as JSON."""
    whole: bool = False
    """Whole numbers alone: `5.0` is one, `1.000` may be a thousand of those who write it so."""


PLAIN: Final = Column()


class Columns:
    """The columns of one object, worked out from its JSON Schema."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._parts: Mapping[str, Any] = schema.get("$defs", {})
        schema = self._resolve(schema)
        required = set(schema.get("required", ()))
        self.named: dict[str, Column] = {
            name: self._column(part, required=name in required) for name, part in schema.get("properties", {}).items()
        }
        self.others = self._other_columns(schema.get("additionalProperties"))
        columns = (*self.named.values(), self.others)
        self._all_plain = not any(column.json_starts for column in columns)
        self._any_whole = any(column.whole for column in columns)

    def prepare(self, raw: bytes) -> bytes:
        """`raw`, an object of texts, with empty cells and JSON cells resolved. Raises `ArgumentsMisfit`."""
        if self._all_plain and b'""' not in raw and not (self._any_whole and b".00" in raw):
            return raw
        try:
            cells = _CELLS.decode(raw)
        except (msgspec.DecodeError, RecursionError):
            return raw  # the validator says what is wrong with it
        prepared: dict[str, Any] = {}
        for name, cell in cells.items():
            column = self.named.get(name, self.others)
            if cell == "" and column.empty != "text":
                if column.empty == "null":
                    prepared[name] = None
            elif column.json_starts and isinstance(cell, str) and cell.lstrip()[:1] in tuple(column.json_starts):
                prepared[name] = _json_or_text(cell)
            elif column.whole and isinstance(cell, str) and _MANY_ZEROS.fullmatch(cell):
                text = f'expected an integer, got text ("{cell}"): with 5.0 for 5, more zeros may mean thousands'
                raise misfit(text, "type", f"/{escape_token(name)}", expected="an integer")
            else:
                prepared[name] = cell
        return msgspec.json.encode(prepared)

    def _column(self, schema: Any, *, required: bool) -> Column:
        types = self._types(schema)
        empty = "absent" if not required else "null" if "null" in types else "text"
        return self._column_of(types, empty)

    def _other_columns(self, schema: Any) -> Column:
        """Columns without a name in the schema: the keys of a mapping."""
        if not isinstance(schema, dict) or not schema:
            return PLAIN
        types = self._types(schema)
        empty = "null" if "null" in types else "text" if "string" in types else "absent"
        return self._column_of(types, empty)

    def _column_of(self, types: set[str], empty: str) -> Column:
        return Column(empty, self._json_starts(types), whole=types - {"null"} == {"integer"})

    def _json_starts(self, types: set[str]) -> str:
        starts = "[" * ("array" in types) + "{" * ("object" in types)
        if "choice" in types or "string" in types:  # with text beside it, a number must be told apart here
            starts += _NUMBER_STARTS if types & {"integer", "number"} else ""
            starts += "tf" if "boolean" in types else ""
        return starts

    def _types(self, schema: Any) -> set[str]:
        """JSON types that a value may have. `string` means free text; `choice`, a value of an enum."""
        schema = self._resolve(schema)
        if not isinstance(schema, dict):
            return set()
        types: set[str] = set()
        for branch in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())):
            types |= self._types(branch)
        values = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else [])]
        if values:
            types.add("choice")
            return types | {_json_type(value) for value in values}
        named = schema.get("type")
        for kind in [named] if isinstance(named, str) else named or ():
            if kind == "string" and ("format" in schema or "pattern" in schema):
                kind = "formatted"  # a date or a decimal number: its text is its form, also beside a number
            types.add(kind)
        if not types and not schema.keys() - {"title", "description", "default"}:
            types.add("string")  # anything goes, so text does
        return types

    def _resolve(self, schema: Any) -> Any:
        seen = 0
        while isinstance(schema, dict) and "$ref" in schema and seen < 8:
            schema = self._parts.get(str(schema["$ref"]).rpartition("/")[2], {})
            seen += 1
        return schema


def may_hold_non_finite(raw: bytes) -> bool:
    """Whether a cell might be a text that a float parameter reads as NaN or infinity, beside `1e999`."""
    lower = raw.lower()
    return b"nan" in lower or b"inf" in lower


def _json_or_text(cell: str) -> Any:
    try:
        return _SYNTAX.decode(cell)
    except (msgspec.DecodeError, RecursionError):
        return cell


def _json_type(value: Any) -> str:
    if isinstance(value, str):
        return "word"
    return {bool: "boolean", int: "integer", float: "number", type(None): "null"}.get(type(value), "object")
