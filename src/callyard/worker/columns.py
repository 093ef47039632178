"""Which columns of a call list a function takes, and what of a row goes into its result.

A column that the function has no place for stops the run before its first call, in one message, unless it is left out
by name or all such are. Where names stand at the head of a file they are looked at before anything is written; where
each row has its own, the first row stands for all, and the function judges the others. Source: call-execution X43, X87.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, get_args

import msgspec

from callyard.errors import UsageError
from callyard.functions.described import UNCHECKED
from callyard.functions.encoding import encode_value
from callyard.functions.packing import decode_crossing, encode_crossing
from callyard.functions.registry import FunctionSpec
from callyard.wire.values import is_packed, json_of
from callyard.worker.builders import CallSource, Row, shorten_names

Extra = Literal["refuse", "ignore"]
_CELLS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENCODE: Final = msgspec.json.Encoder().encode
_NULL: Final = msgspec.Raw(b"null")
_ALIKE_RATIO: Final = 0.7
"""From here on another name is taken for a slip."""


def names_taken(spec: FunctionSpec) -> tuple[str, ...] | None:
    """Names of the columns that fill arguments, or fields of the one object; None: any name does, or nobody knows."""
    schema = msgspec.json.decode(spec.input_schema)
    parts = schema.get("$defs", {})
    if _takes_others(schema):
        return None
    if not spec.takes_row:
        # Without the word JSON Schema allows any further name; a signature without **kwargs says false.
        return tuple(schema.get("properties", {})) if schema.get("additionalProperties") is False else None
    name = _only_parameter(schema)
    return None if name is None else _fields(schema["properties"].get(name), parts)


def row_parameter(spec: FunctionSpec) -> str | None:
    """The one parameter that takes a whole row; None: the function has none, or nobody knows."""
    return _only_parameter(msgspec.json.decode(spec.input_schema)) if spec.takes_row else None


def _only_parameter(schema: Mapping[str, Any]) -> str | None:
    names: list[str] = schema.get("required") or list(schema.get("properties", {}))
    return names[0] if len(names) == 1 else None


class FittedRows:
    """A source whose rows have the columns that a function takes, and carry what their results shall repeat.

    `columns`: only these are arguments. `extra`: what becomes of one that the function has no place for. `id`: the
    column that each result repeats; it is no argument unless the function takes it. `with_args`: a result repeats its
    row. Raises `UsageError` at once where the names are known, else where the first row is asked for.
    """

    def __init__(
        self,
        source: CallSource,
        spec: FunctionSpec | None,
        *,
        columns: Sequence[str] | None = None,
        extra: Extra = "refuse",
        id: str | None = None,
        with_args: bool = False,
    ) -> None:
        self.name = source.name
        self.total = source.total
        self.may_block = source.may_block
        self._source = source
        self._function = "" if spec is None else str(spec.name)
        self._taken = None if spec is None else names_taken(spec)
        self._wanted = None if columns is None else frozenset(columns)
        self._extra = extra
        self._id = id
        self._with_args = with_args
        self._drops = False
        """Some column is to be left out of the arguments."""
        self._checked = False
        try:
            if extra not in get_args(Extra):
                raise UsageError(f"extra must be 'refuse' or 'ignore', got {extra!r}")
            if isinstance(columns, str) or (columns is not None and not columns):
                raise UsageError(f"columns must be a list of one name or more, got {columns!r}")
            known = getattr(source, "columns", None)
            if known is not None:
                self._check(known)
        except UsageError:
            self.close()
            raise

    @property
    def repeated(self) -> tuple[str, ...]:
        """What results repeat."""
        return ("id",) * (self._id is not None) + ("args",) * self._with_args

    @property
    def line_number(self) -> int:
        return getattr(self._source, "line_number", 0)

    @property
    def read_fraction(self) -> float | None:
        return self._source.read_fraction

    def close(self) -> None:
        close = getattr(self._source, "close", None)
        if close is not None:
            close()

    def rows(self) -> Iterator[Row]:
        rows = self._source.rows()
        try:
            for row in rows:
                yield row if row.failure is not None else self._fit(row)
        finally:
            close = getattr(rows, "close", None)
            if close is not None:
                close()

    def _fit(self, row: Row) -> Row:
        if self._checked and not self._drops and self._id is None:
            return self._repeating(row, None) if self._with_args else row
        named = json_of(row.args)  # what is binary is null there
        if named[:1] != b"{":
            if not self._checked and (self._id is not None or self._wanted is not None):
                option = "id" if self._id is not None else "columns"
                raise UsageError(f"{self.name}: {option} names a column, but the first row is an array, without names")
            self._checked = True
            return self._repeating(row, None)
        cells = _CELLS.decode(named)
        if not self._checked:
            self._check(tuple(cells))
            if self._wanted is not None or self._extra == "ignore":
                self._drops = True  # the next row may have others
        id = None if self._id is None else cells.get(self._id, _NULL)
        if self._drops:
            kept = {name: cell for name, cell in cells.items() if self._keeps(name)}
            if len(kept) < len(cells):
                row = msgspec.structs.replace(row, args=_keep(row.args, kept))
        return self._repeating(row, id)

    def _keeps(self, name: str) -> bool:
        if self._wanted is not None and name not in self._wanted:
            return False
        if self._taken is None or name in self._taken:
            return True
        return self._extra == "refuse" and name != self._id  # the function is to say it

    def _repeating(self, row: Row, id: msgspec.Raw | None) -> Row:
        members = [] if self._id is None else [b'"id":' + bytes(_NULL if id is None else id)]
        if self._with_args:
            args = row.args if not is_packed(row.args) else encode_value(decode_crossing(row.args))
            members.append(b'"args":' + args.replace(b"\n", b" ").replace(b"\r", b" "))
        return msgspec.structs.replace(row, echo=b",".join(members)) if members else row

    def _check(self, names: Sequence[str]) -> None:
        """Raises `UsageError` with all that is wrong with the names."""
        self._checked = True
        if not names:
            return
        for option, asked in (("id", [self._id] if self._id is not None else []), ("columns", self._wanted or ())):
            for name in sorted(asked):
                if name not in names:
                    raise UsageError(
                        f"{self.name}: there is no column {name!r} for {option};{_suggest(name, names)}"
                        f" it has {shorten_names(names)}"
                    )
        taken = self._taken
        named = [name for name in names if self._wanted is None or name in self._wanted]
        unknown = [] if taken is None else [name for name in named if name not in taken and name != self._id]
        if unknown and self._extra == "refuse":
            assert taken is not None
            fitting = [name for name in named if name in taken]
            close = "".join(_suggest(name, [n for n in taken if n not in names]) for name in unknown[:3])
            one = "column" if len(unknown) == 1 else "columns"
            chosen = f"--columns {','.join(fitting)}" if fitting else "--columns with the names of those it takes"
            raise UsageError(
                f"{self.name}: unknown {one} {shorten_names(unknown)}: {self._function} takes"
                f" {shorten_names(taken) or 'none'};{close} nothing was run: rename the {one}, or choose with {chosen},"
                " or leave out what it does not take with --extra=ignore (in Python: columns=[…], extra='ignore')"
            )
        self._drops = any(not self._keeps(name) for name in names)


def _fields(schema: Any, parts: Mapping[str, Any], levels: int = 8) -> tuple[str, ...] | None:
    """Names of an object's fields, of all objects that it may be; None: it takes any."""
    while isinstance(schema, dict) and "$ref" in schema and levels:
        schema = parts.get(str(schema["$ref"]).rpartition("/")[2])
        levels -= 1
    if not isinstance(schema, dict) or not levels:
        return None
    if _takes_others(schema):
        return None
    branches = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    if branches:
        found = [_fields(branch, parts, levels - 1) for branch in branches if branch.get("type") != "null"]
        names = [names for names in found if names is not None]
        return tuple(dict.fromkeys(name for some in names for name in some)) if len(names) == len(found) else None
    if schema.get("additionalProperties", False) is not False or "patternProperties" in schema or "allOf" in schema:
        return None
    return tuple(schema.get("properties", {})) or None


def _takes_others(schema: Mapping[str, Any]) -> bool:
    """Whether there are names that the schema does not show."""
    unchecked = schema.get(UNCHECKED)
    return unchecked is True or (isinstance(unchecked, list) and "additionalProperties" in unchecked)


def _keep(args: bytes, kept: Mapping[str, msgspec.Raw]) -> bytes:
    """`args`, an object, with these of its members."""
    if not is_packed(args):
        return _ENCODE(kept)
    whole = decode_crossing(args)
    return encode_crossing({name: whole[name] for name in kept}, canonical=True)


def _suggest(name: str, names: Sequence[str]) -> str:
    alike = {other.casefold(): other for other in reversed(names)}  # upper case is as far as another word, by the ratio
    close = [alike[found] for found in difflib.get_close_matches(name.casefold(), alike, 1, _ALIKE_RATIO)]
    return f" is {name!r} meant to be {close[0]!r}?" if close else ""
