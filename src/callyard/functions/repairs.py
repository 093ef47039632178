"""Arguments that nearly fit, made to fit: opt-in, and only what does not fit is touched.

Three repairs are known: a text that is a number, where only numbers fit; a text that is JSON, where only an object or
an array fits; null for an argument that may be left out and may not be null. Source: tool-dispatch D5.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from callyard.functions.encoding import to_pointer
from callyard.functions.misfits import ArgumentsMisfit
from callyard.functions.strict_json import decode_json

if TYPE_CHECKING:
    from callyard.functions.json_schema import JsonSchema

RepairKind = Literal["number_from_text", "json_from_text", "absent_from_null"]

_ROUNDS_MAX: Final = 8
"""JSON in a text may hold texts that want repair, and so on: each round goes one text deeper."""
_TRIALS_MAX: Final = 200
"""Each costs a check of the whole."""
_ABSENT: Final = object()
_EMPTY_KEY: Final = re.compile(rb'[{,]\s*""\s*:')
_WITH_DECIMALS: Final = msgspec.json.Encoder(decimal_format="number")


class Repair(msgspec.Struct, frozen=True):
    """One change that made an argument fit (D5)."""

    pointer: str
    kind: RepairKind
    before: Any
    after: Any = None


def repair_arguments(schema: JsonSchema, raw: bytes) -> tuple[bytes, tuple[Repair, ...]]:
    """`raw`, JSON, with all repairs that make a place fit. It may still not fit; without repairs it is as it was.

    Raises `ArgumentsMisfit` for what is no strict JSON. Numbers keep all their digits.
    """
    if _EMPTY_KEY.search(raw):  # the validator's places are wrong below one
        return raw, ()
    repairer = _Repairer(schema, decode_json(raw, floats="decimal"))
    repairs = repairer.run()
    return (_WITH_DECIMALS.encode(repairer.value), repairs) if repairs else (raw, ())


class _Repairer:
    def __init__(self, schema: JsonSchema, value: Any) -> None:
        self._schema = schema
        self.value = value
        self._repairs: dict[str, Repair] = {}
        self._trials = 0

    def run(self) -> tuple[Repair, ...]:
        for _ in range(_ROUNDS_MAX):
            errors, _complete = self._schema.list_errors(self.value)
            if sum(self._repair(error) for error in errors) == 0:
                break
        return tuple(self._repairs.values())

    def _repair(self, error: Any) -> bool:
        """Repair what one error of the whole is about. True: something was repaired."""
        if error.kind.name not in ("anyOf", "oneOf"):
            return self._repair_type(error)
        place: list[str | int] = list(error.instance_path)
        if not _is_there(self.value, place):
            return False
        kept, known = copy.deepcopy(_at(self.value, place)), dict(self._repairs)
        for position in range(len(error.kind.context)):
            if self._repair_form(error, position):
                return True
            self._repairs = dict(known)
            self.value = _put(self.value, place, copy.deepcopy(kept))
        return False

    def _repair_form(self, error: Any, position: int) -> bool:
        """Make a value fit one of several forms. False: repairs alone do not."""
        failing: Any = error
        for _ in range(_ROUNDS_MAX):
            wanted = list(_type_errors(failing.kind.context[position]))
            if sum(self._repair_type(inner) for inner in wanted) == 0 or self._trials >= _TRIALS_MAX:
                return False
            failing = self._find_again(error)
            if failing is None:
                return True
        return False

    def _repair_type(self, error: Any) -> bool:
        if error.kind.name != "type":
            return False
        place: list[str | int] = list(error.instance_path)
        if not _is_there(self.value, place):
            return False
        before = _at(self.value, place)
        found = _read(before, set(error.kind.types), place)
        if found is None:
            return False
        kind, after = found
        if after is _ABSENT and not self._may_be_absent(place):
            return False
        pointer = to_pointer(place)
        if after is _ABSENT:
            del _at(self.value, place[:-1])[place[-1]]
            self._repairs[pointer] = Repair(pointer, kind, before)
        else:
            self.value = _put(self.value, place, after)
            self._repairs[pointer] = Repair(pointer, kind, before, after)
        return True

    def _may_be_absent(self, place: list[str | int]) -> bool:
        owner = _at(self.value, place[:-1])
        if not isinstance(owner, dict):
            return False
        without = copy.copy(owner)
        del without[str(place[-1])]
        self._trials += 1
        trial = _put(_shallow(self.value, place[:-1]), place[:-1], without)
        errors, _ = self._schema.list_errors(trial)
        return not any(
            inner.kind.name == "required" and inner.kind.property == place[-1] and inner.instance_path == place[:-1]
            for error in errors
            for inner in _flatten(error)
        )

    def _find_again(self, error: Any) -> Any:
        """The same error, of the value as it is now; None: it is gone."""
        self._trials += 1
        for other in self._schema.list_errors(self.value)[0]:
            if other.instance_path == error.instance_path and other.schema_path == error.schema_path:
                return other
        return None


def _read(value: Any, types: set[str], place: list[str | int]) -> tuple[RepairKind, Any] | None:
    """The repair of one value that is of none of `types`; None: there is none."""
    if value is None:
        return ("absent_from_null", _ABSENT) if place and isinstance(place[-1], str) else None
    if not isinstance(value, str):
        return None
    try:
        raw = value.strip().encode()
        parsed = None if _EMPTY_KEY.search(raw) else decode_json(raw, floats="decimal")
    except (ArgumentsMisfit, UnicodeEncodeError):
        return None
    if isinstance(parsed, dict | list):
        return ("json_from_text", parsed) if ("object" if isinstance(parsed, dict) else "array") in types else None
    if isinstance(parsed, bool) or parsed is None or isinstance(parsed, str):
        return None
    if "number" in types or ("integer" in types and parsed == int(parsed)):
        whole = "number" not in types and not isinstance(parsed, int)
        return "number_from_text", int(parsed) if whole else parsed
    return None


def _type_errors(form: list[Any]) -> Iterator[Any]:
    for error in form:
        yield from (inner for inner in _flatten(error) if inner.kind.name == "type")


def _flatten(error: Any) -> Iterator[Any]:
    if error.kind.name in ("anyOf", "oneOf"):
        for form in error.kind.context:
            for inner in form:
                yield from _flatten(inner)
    else:
        yield error


def _at(value: Any, place: list[str | int]) -> Any:
    for token in place:
        value = value[token]
    return value


def _is_there(value: Any, place: list[str | int]) -> bool:
    """Whether a place is still there: another repair may have taken it away, or put something else there."""
    try:
        _at(value, place)
    except (KeyError, IndexError, TypeError):
        return False
    return True


def _put(root: Any, place: list[str | int], value: Any) -> Any:
    """`root` with `value` at `place`, changed where it stands."""
    if not place:
        return value
    _at(root, place[:-1])[place[-1]] = value
    return root


def _shallow(root: Any, place: list[str | int]) -> Any:
    """A copy of the containers on the way to `place`, so that a trial there leaves the value alone."""
    top = copy.copy(root)
    here = top
    for token in place[:-1]:
        here[token] = copy.copy(here[token])
        here = here[token]
    return top
