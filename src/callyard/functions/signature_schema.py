"""From pydantic's core schema of a function: its JSON Schema, and whether checking arguments runs code of the user's.

What the JSON Schema cannot say of a signature is marked in it (`described.UNCHECKED`), so that the filter made of it
takes all that the function takes. Source: tool-dispatch D2, D6, D49.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec.inspect
from pydantic.json_schema import GenerateJsonSchema

from callyard.functions.described import mark

_PYDANTIC: Final = ("pydantic.", "pydantic_core")
_CHANGES_TEXT: Final = ("strip_whitespace", "to_lower", "to_upper")
_BY_NAME_TOO: Final = ("populate_by_name", "validate_by_name")


class QuietJsonSchema(GenerateJsonSchema):
    """JSON Schema without warnings: what cannot be shown, such as a default that is no JSON, is left out."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}

    def get_decimal_pattern(self, schema: Any) -> str | None:
        """None: it would look ahead, and refuse exponents, which the validator takes."""
        return None

    def decimal_schema(self, schema: Any) -> dict[str, Any]:
        """The text form is marked as such: `Columns` must tell it from free text."""
        described = super().decimal_schema(schema)
        for branch in described.get("anyOf", (described,)):
            if branch.get("type") == "string":
                branch.setdefault("format", "decimal")
        return described

    def bytes_schema(self, schema: Any) -> dict[str, Any]:
        """Bytes are base64 in JSON, both ways. What is said of their length is of the bytes, not of the text."""
        return {"type": "string", "contentEncoding": "base64"}

    def str_schema(self, schema: Any) -> dict[str, Any]:
        described = super().str_schema(schema)
        engine = schema.get("regex_engine") or self._config.regex_engine
        if isinstance(schema.get("pattern"), re.Pattern) or ("pattern" in described and engine == "python-re"):
            described = mark(described, "pattern")
        if any(schema.get(change) or getattr(self._config, f"str_{change}", False) for change in _CHANGES_TEXT):
            described = mark(described, "maxLength", "pattern")
        return described

    def enum_schema(self, schema: Any) -> dict[str, Any]:
        described = super().enum_schema(schema)
        return mark(described) if _has_own_missing(schema["cls"]) else described

    def function_before_schema(self, schema: Any) -> dict[str, Any]:
        return self._mark_function(schema, super().function_before_schema(schema))

    def function_wrap_schema(self, schema: Any) -> dict[str, Any]:
        return self._mark_function(schema, super().function_wrap_schema(schema))

    def call_schema(self, schema: Any) -> dict[str, Any]:
        """Its arguments may come by name as well as by position."""
        return mark(super().call_schema(schema))

    def named_tuple_schema(self, schema: Any) -> dict[str, Any]:
        """An array, as shown, or an object by name."""
        return mark(super().named_tuple_schema(schema))

    def model_schema(self, schema: Any) -> dict[str, Any]:
        return self._mark_names(schema, super().model_schema(schema))

    def dataclass_schema(self, schema: Any) -> dict[str, Any]:
        return self._mark_names(schema, super().dataclass_schema(schema))

    def _mark_function(self, schema: Any, described: dict[str, Any]) -> dict[str, Any]:
        """The user's code stands before the type's own check, so it may take anything."""
        if self.mode != "validation" or schema.get("json_schema_input_schema") or is_pydantics(_function_of(schema)):
            return described
        return mark(described)

    def _mark_names(self, schema: Any, described: dict[str, Any]) -> dict[str, Any]:
        """Fields that have more than one name: the schema shows one."""
        if self.mode != "validation":
            return described
        fields = schema["schema"].get("fields", {})
        fields = fields.values() if isinstance(fields, dict) else fields
        config = schema.get("config", {})
        if any(config.get(name) for name in _BY_NAME_TOO) or any(
            isinstance(field.get("validation_alias"), list) for field in fields
        ):
            return mark(described, "required", "additionalProperties", "unevaluatedProperties")
        return described


def runs_user_code(core: Any) -> bool:
    """Whether validating by this core schema may run code of the user's: a validator, `__post_init__`, a factory."""
    if isinstance(core, Mapping):
        if _is_user_code(core):
            return True
        return any(runs_user_code(part) for key, part in core.items() if key not in _NO_SCHEMAS)
    return isinstance(core, list | tuple) and any(runs_user_code(part) for part in core)


_NO_SCHEMAS: Final = frozenset({"metadata", "serialization", "config", "default", "expected", "members"})
_CLASSES: Final = frozenset({"model", "dataclass", "call", "named-tuple", "definition-ref"})


def _is_user_code(core: Mapping[str, Any]) -> bool:
    kind = core.get("type")
    if not isinstance(kind, str):
        return False
    if kind.startswith("function-"):
        return _function_is_users(_function_of(core))
    if kind == "default":
        factory = core.get("default_factory")
        return factory is not None and not _is_builtin(factory)
    if kind in ("model", "dataclass"):
        made = core["cls"].__new__
        plain = made is object.__new__ or getattr(made, "__module__", "").startswith((*_PYDANTIC, "typing"))
        return bool(core.get("custom_init") or core.get("post_init")) or not plain
    if kind == "call":
        return not is_pydantics(core["function"])
    if kind == "named-tuple":  # its own constructor is generated
        return not getattr(core["cls"].__new__, "__module__", "").startswith("namedtuple_")
    if kind == "enum":
        return _has_own_missing(core["cls"])
    if kind == "tagged-union":
        return callable(core.get("discriminator"))
    if kind in ("set", "frozenset"):  # an item's hash may be the user's
        return _inner_kind(core.get("items_schema")) in _CLASSES
    if kind == "dict":
        return _inner_kind(core.get("keys_schema")) in _CLASSES
    return False


def _inner_kind(core: Any) -> str:
    return str(core.get("type", "")) if isinstance(core, Mapping) else ""


def _function_of(core: Mapping[str, Any]) -> Any:
    function = core["function"]
    function = function.get("function") if isinstance(function, Mapping) else function
    while isinstance(function, functools.partial):
        function = function.func
    return function


def is_pydantics(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith(_PYDANTIC)


def _function_is_users(function: Any) -> bool:
    if getattr(function, "built_in", False):  # our own, of `crossing_types`
        return False
    struct = getattr(function, "struct", None)  # our own, of `type_hooks`
    return _struct_runs_user_code(struct) if struct is not None else not is_pydantics(function)


def _struct_runs_user_code(struct: type[msgspec.Struct]) -> bool:
    seen: set[int] = set()
    waiting: list[Any] = [msgspec.inspect.type_info(struct)]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list | tuple):
            waiting += part
            continue
        if not isinstance(part, msgspec.inspect.Type | msgspec.inspect.Field) or id(part) in seen:
            continue
        seen.add(id(part))
        owner = getattr(part, "cls", None)
        if owner is not None and hasattr(owner, "__post_init__"):
            return True
        if isinstance(part, msgspec.inspect.EnumType) and _has_own_missing(part.cls):
            return True
        if isinstance(part, msgspec.inspect.CustomType):
            return True
        factory = getattr(part, "default_factory", msgspec.NODEFAULT)
        if factory is not msgspec.NODEFAULT and not _is_builtin(factory):
            return True
        waiting += [getattr(part, name) for name in part.__struct_fields__ if name != "cls"]
    return False


def _has_own_missing(cls: type[enum.Enum]) -> bool:
    """Whether an enum makes members of values that it does not list."""
    return str(getattr(cls._missing_, "__module__", "")) != "enum"


def _is_builtin(factory: Any) -> bool:
    return isinstance(factory, type) and factory.__module__ == "builtins"
