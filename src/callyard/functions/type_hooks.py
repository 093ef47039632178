"""Types of user functions that pydantic does not take as they are.

`msgspec.Struct` is unknown to pydantic, and it refuses `typing.TypedDict` before Python 3.12. Both get pydantic's own
hook method, set on the class where it stands in an annotation, so that they work at any depth: in lists, unions,
dataclass fields. The class is otherwise untouched. Source: tool-dispatch D2.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import typing
from typing import Any, Final, is_typeddict

import msgspec
import typing_extensions
from pydantic_core import PydanticCustomError, core_schema

from callyard.functions import foreign
from callyard.functions.described import mark
from callyard.functions.encoding import describe_value
from callyard.functions.packing import NotReadable, Tokens

_CORE_HOOK: Final = "__get_pydantic_core_schema__"
_JSON_HOOK: Final = "__get_pydantic_json_schema__"
TEXT_CELLS: Final = "callyard: values are text"
"""The validation context under which texts are parsed: CSV cells and `key=value`."""


def prepare_types(annotations: typing.Iterable[Any]) -> None:
    """Make every type reachable from `annotations` known to pydantic. What cannot be resolved is left to it."""
    seen: set[int] = set()
    waiting = list(annotations)
    while waiting:
        annotation = waiting.pop()
        if annotation is None or isinstance(annotation, str) or id(annotation) in seen:
            continue
        seen.add(id(annotation))
        waiting += typing.get_args(annotation)
        waiting.append(typing.get_origin(annotation))
        value = getattr(annotation, "__value__", None)  # `type X = …` of Python 3.12
        if value is not None:
            waiting.append(value)
        if not isinstance(annotation, type):
            continue
        if issubclass(annotation, msgspec.Struct):
            _prepare_struct(annotation)
        elif is_typeddict(annotation):
            _prepare_typed_dict(annotation)
            waiting += _hints(annotation)
        elif dataclasses.is_dataclass(annotation) or hasattr(annotation, "_fields"):
            waiting += _hints(annotation)


def struct_pointer(context: dict[str, Any] | None) -> list[str | int]:
    """The place inside a Struct that an error of ours names."""
    path = (context or {}).get("path", "")
    parts = re.findall(r"\.([^.\[\]]+)|\[(\d+)\]", path)
    return [name if name else int(index) for name, index in parts]


def _hints(owner: type) -> list[Any]:
    try:
        return list(typing_extensions.get_type_hints(owner, include_extras=True).values())
    except Exception:  # noqa: BLE001 - annotations are user code; pydantic reports the same place, with its name
        return []


def _prepare_typed_dict(owner: Any) -> None:
    if sys.version_info >= (3, 12) or type(owner).__module__ != "typing" or _CORE_HOOK in vars(owner):
        return
    rebuilt: list[Any] = []  # made once, at the first use, when names later in the module are known

    def core(source: Any, handler: Any) -> Any:
        if not rebuilt:
            make: Any = typing_extensions.TypedDict
            hints = typing_extensions.get_type_hints(owner, include_extras=True)
            twin = make(owner.__name__, hints, total=owner.__total__)
            twin.__module__, twin.__doc__ = owner.__module__, owner.__doc__
            rebuilt.append(twin)
        return handler.generate_schema(rebuilt[0])

    setattr(owner, _CORE_HOOK, core)


def _prepare_struct(owner: type[msgspec.Struct]) -> None:
    if _CORE_HOOK in vars(owner):
        return

    def core(source: Any, handler: Any) -> Any:
        msgspec.json.Decoder(source)  # a field that msgspec cannot read is an error now, not at the first call

        def convert(value: Any, info: core_schema.ValidationInfo) -> Any:
            if isinstance(value, owner):
                return value
            if isinstance(info.context, Tokens):
                try:
                    value = info.context.resolve(value)
                except NotReadable as error:
                    raise PydanticCustomError("crossing", "{reason}", {"reason": str(error)}) from error
            try:
                strict = info.context is not TEXT_CELLS
                return msgspec.convert(value, source, strict=strict, str_keys=True, dec_hook=_from_json)
            except msgspec.ValidationError as error:
                reason, _, path = str(error).partition(" - at `")
                context = {"reason": reason.replace("`", ""), "path": path.rstrip("`").removeprefix("$")}
                raise PydanticCustomError("struct", "{reason}", context) from error

        convert.struct = owner  # type: ignore[attr-defined]  # told by `signature_schema.runs_user_code`
        return core_schema.with_info_plain_validator_function(convert)

    def json_schema(schema: Any, handler: Any) -> Any:
        (top,), parts = msgspec.json.schema_components((owner,), ref_template="{name}", schema_hook=_describe_foreign)
        described: dict[str, Any] = _inline(top, parts, ())
        tag = owner.__struct_config__.tag_field  # where the type is known, the tag may be missing
        if tag is not None and tag in described.get("required", ()):
            described["required"] = [name for name in described["required"] if name != tag]
        return described

    setattr(owner, _CORE_HOOK, staticmethod(core))
    setattr(owner, _JSON_HOOK, staticmethod(json_schema))


def _from_json(kind: type, value: Any) -> Any:
    """An array or a table inside a Struct."""
    library = foreign.library_of_type(kind)
    if library is None:
        raise NotImplementedError(f"no value of JSON is a {kind.__name__}")
    if isinstance(value, kind):
        return value
    if library == "numpy" and isinstance(value, list):
        return foreign.array_from_json(value, None)
    if library != "numpy" and isinstance(value, list | dict):
        return foreign.frame_from_json(value, library)
    raise ValueError(f"expected a {foreign.shown_name(library)}, got {describe_value(value)}")


def _describe_foreign(kind: type) -> dict[str, Any]:
    library = foreign.library_of_type(kind)
    if library is None:
        raise NotImplementedError
    return foreign.json_schema(library)


def _inline(schema: Any, parts: dict[str, Any], above: tuple[str, ...]) -> Any:
    """Put referenced parts in place; a recursive one ends as a plain object, or array."""
    if isinstance(schema, list):
        return [_inline(part, parts, above) for part in schema]
    if not isinstance(schema, dict):
        return schema
    name = schema.get("$ref")
    if isinstance(name, str):
        if name in above:
            return {"type": parts[name].get("type", "object"), "title": name}
        return _inline(parts[name], parts, (*above, name))
    if "propertyName" in schema and "mapping" in schema:  # a discriminator: names the parts that are now in place
        return {"propertyName": schema["propertyName"]}
    inlined = {key: _inline(part, parts, above) for key, part in schema.items()}
    if isinstance(schema.get("pattern"), str):  # msgspec runs it on Python's own engine
        return mark(inlined, "pattern")
    if schema.get("format") == "decimal":  # it takes numbers as well
        return {"anyOf": [{"type": "number"}, inlined]}
    return inlined
