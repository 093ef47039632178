"""Core schemas in which arrays, tables and bytes have a place: of annotations, for JSON and for packed values.

pydantic knows no arrays and no tables. Where one stands in an annotation, its place in the core schema gets a validator
of ours, which takes lists (an array) or rows (a table) as JSON and the thing itself from a packed value. In JSON, bytes
are base64, at any depth, in arguments as in results.

A packed value is validated as JSON as well, with a text in the place of each part (`packing.Tokens`); `for_packed`
makes the schema that reads those texts. Source: call-execution X95.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from pydantic import ConfigDict, TypeAdapter
from pydantic.errors import PydanticUserError
from pydantic_core import PydanticCustomError, SchemaValidator, ValidationError, core_schema

from callyard.functions import foreign
from callyard.functions.encoding import describe_value, to_pointer
from callyard.functions.foreign import Library, NotReadable
from callyard.functions.packing import Crossed, Tokens

NO_SCHEMAS: Final = frozenset({"metadata", "serialization", "config", "default", "expected", "members"})
"""Keys of a core schema under which there are no others."""
_PYTHON_ONLY: Final = frozenset({"python_schema", "strict_schema", *NO_SCHEMAS})
_BASE64: Final = {"val_json_bytes": "base64"}


def make_validator(core: Any, *, packed: bool = False) -> SchemaValidator:
    """Of a core schema from `build_core`, for its JSON; `packed`: for that of a packed value.

    Models bring validators of their own, made of schemas that know nothing of ours; where that matters they are built
    again.
    """
    if packed:
        core = _replace(core, _packed_node, {})
    make: Any = SchemaValidator
    validator: SchemaValidator = make(core, _BASE64, _use_prebuilt=not packed and not _reads_binary(core))
    return validator


def build_core(source: Any, hints: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The core schema of a type, or of a function whose annotations are `hints`.

    Raises `PydanticUserError`, `NameError` or `TypeError` for a type that JSON cannot reach.
    """
    try:
        core: Any = TypeAdapter(source).core_schema
    except PydanticUserError:
        if not foreign.any_loaded() and not _may_be_bytearray(source, hints):
            raise
        core = _build_lenient(source, hints)
        if any(_is_unknown(found) for found in _instances(core)):
            raise
    dtypes = _dtypes(hints if hints is not None else {"": source})
    core = _replace(core, lambda node: _foreign_node(node, dtypes.get("")), dtypes)
    return typing.cast(dict[str, Any], core)


def _build_lenient(source: Any, hints: Mapping[str, Any] | None) -> Any:
    """With an `is-instance` for each type that pydantic does not know."""
    if hints is not None:  # of a function
        return TypeAdapter(source, config=_LENIENT).core_schema
    # In a tuple, since a dataclass or the like takes no settings from outside, and what is around it may have some.
    core: Any = TypeAdapter(tuple[source], config=_LENIENT).core_schema
    if core["type"] == "definitions":
        return {**core, "schema": core["schema"]["items_schema"][0]}
    return core["items_schema"][0]


_LENIENT: Final = ConfigDict(arbitrary_types_allowed=True)


# --- walking ----------------------------------------------------------------------------------------------------------


def _replace(node: Any, change: Callable[[Mapping[str, Any]], Any], dtypes: Mapping[str, Any]) -> Any:
    """A copy in which `change` has put other schemas in their places (None: as it was)."""
    if isinstance(node, list):
        return [_replace(part, change, dtypes) for part in node]
    if isinstance(node, tuple):  # a union's choice with its label
        return tuple(_replace(part, change, dtypes) for part in node)
    if not isinstance(node, dict):
        return node
    changed = change(node)
    if changed is not None:
        return changed
    if "mode" in node and node.get("name") in dtypes and isinstance(node.get("schema"), dict):  # a parameter
        dtype = dtypes[node["name"]]
        return {**node, "schema": _replace(node["schema"], lambda part: _foreign_node(part, dtype), {})}
    copied = {key: part if key in NO_SCHEMAS else _replace(part, change, dtypes) for key, part in node.items()}
    if node.get("type") in ("model", "dataclass", "typed-dict") and isinstance(node.get("config"), dict):
        copied["config"] = {**_BASE64, **node["config"]}  # a model's own settings go before those around it
    return copied


def _reads_binary(node: Any) -> bool:
    """Whether bytes, an array or a table may stand somewhere."""
    if isinstance(node, Mapping):
        function = node.get("function")
        if node.get("type") == "bytes" or (isinstance(function, Mapping) and _is_ours(function.get("function"))):
            return True
        return any(_reads_binary(part) for key, part in node.items() if key not in NO_SCHEMAS)
    return isinstance(node, list | tuple) and any(map(_reads_binary, node))


def may_hold_binary(node: Any) -> bool:
    """Whether a value that this schema describes may hold bytes, an array or a table."""
    if isinstance(node, list | tuple):
        return any(map(may_hold_binary, node))
    if not isinstance(node, Mapping):
        return False
    kind = node.get("type")
    if kind in _OPEN_KINDS or (kind in _OPEN_PARTS and _OPEN_PARTS[kind] not in node):
        return True
    return any(may_hold_binary(part) for key, part in node.items() if key not in _PYTHON_ONLY)


_OPEN_KINDS: Final = frozenset({"any", "bytes", "is-instance", "function-plain"})
_OPEN_PARTS: Final = {
    "list": "items_schema",
    "set": "items_schema",
    "frozenset": "items_schema",
    "dict": "values_schema",
}


def _is_ours(function: object) -> bool:
    return isinstance(function, _ArrayReader | _FrameReader)


def _instances(node: Any) -> Iterator[type]:
    """Classes that a value from JSON would have to be an instance of."""
    if isinstance(node, Mapping):
        if node.get("type") == "is-instance":
            yield node["cls"]
        for key, part in node.items():
            if key not in _PYTHON_ONLY:
                yield from _instances(part)
    elif isinstance(node, list | tuple):
        for part in node:
            yield from _instances(part)


def _is_unknown(kind: Any) -> bool:
    return kind is not bytearray and foreign.library_of_type(kind) is None


def _may_be_bytearray(source: Any, hints: Mapping[str, Any] | None) -> bool:
    return "bytearray" in repr(source if hints is None else hints)


def _dtypes(hints: Mapping[str, Any]) -> dict[str, Any]:
    """By parameter: the type of the numbers of its arrays, where its annotation names one."""
    found: dict[str, Any] = {}
    for name, hint in hints.items():
        named = {dtype.str: dtype for dtype in _find_dtypes(hint)}
        if len(named) == 1:
            found[name] = next(iter(named.values()))
    return found


def _find_dtypes(hint: Any) -> Iterator[Any]:
    arguments = typing.get_args(hint)
    if foreign.library_of_type(typing.get_origin(hint)) == "numpy":
        import numpy

        for scalar in typing.get_args(arguments[-1]) if arguments else ():
            if isinstance(scalar, type) and issubclass(scalar, numpy.generic):
                try:
                    yield numpy.dtype(scalar)
                except TypeError:  # an abstract one, such as np.floating
                    continue
        return
    for part in arguments:
        yield from _find_dtypes(part)


# --- arrays and tables ------------------------------------------------------------------------------------------------


def _foreign_node(node: Mapping[str, Any], dtype: Any) -> Any:
    if node.get("type") != "is-instance":
        return None
    kind = node["cls"]
    if kind is bytearray:
        return core_schema.no_info_after_validator_function(bytearray, core_schema.bytes_schema())
    library = foreign.library_of_type(kind)
    if library is None:
        return None
    described = foreign.json_schema(library)
    if library != "numpy":
        return _plain(_FrameReader(library), described)
    if dtype is not None:
        described["description"] = f"nested arrays: a numpy array of {dtype}"
    return _plain(_ArrayReader(dtype), described)


def _plain(read: Callable[..., Any], described: dict[str, Any]) -> Any:
    metadata = {"pydantic_js_functions": [lambda schema, handler: dict(described)]}
    return core_schema.with_info_plain_validator_function(read, metadata=metadata)


class _ArrayReader:
    """A validator function. `built_in`: it runs no code of the user's."""

    built_in = True

    def __init__(self, dtype: Any) -> None:
        self._dtype = dtype

    def __call__(self, value: Any, info: core_schema.ValidationInfo[Any]) -> Any:
        crossed = claim(info, value)
        if crossed is None:
            if not isinstance(value, list):
                raise _expected("an array", value)
            try:
                return foreign.array_from_json(value, self._dtype)
            except ValueError as error:
                raise _misfit(f"no numpy array: {error}") from error
        if crossed.part.kind != "array":
            raise _misfit(f"expected a numpy array, got {crossed.describe()}")
        array = _read(crossed)
        if self._dtype is None or array.dtype == self._dtype:
            return array
        import numpy

        if not numpy.can_cast(array.dtype, self._dtype, "safe"):
            raise _misfit(f"expected a numpy array of {self._dtype}, got one of {array.dtype}")
        return array.astype(self._dtype)


class _FrameReader:
    built_in = True

    def __init__(self, library: Library) -> None:
        self._library = library

    def __call__(self, value: Any, info: core_schema.ValidationInfo[Any]) -> Any:
        crossed = claim(info, value)
        if crossed is None:
            if not isinstance(value, list | dict):
                raise _expected("an array of rows, or an object of columns", value)
            try:
                return foreign.frame_from_json(value, self._library)
            except ValueError as error:
                raise _misfit(f"no {foreign.shown_name(self._library)}: {error}") from error
        if crossed.part.kind != "frame":
            raise _misfit(f"expected a {foreign.shown_name(self._library)}, got {crossed.describe()}")
        try:
            return crossed.to_frame(self._library)  # of whatever library it was
        except NotReadable as error:
            raise _misfit(str(error)) from error


# --- packed values ----------------------------------------------------------------------------------------------------


def _packed_node(node: Mapping[str, Any]) -> Any:
    kind = node.get("type")
    if kind == "any":
        return core_schema.with_info_plain_validator_function(_resolve)
    if kind == "bytes":
        return core_schema.with_info_wrap_validator_function(_read_bytes, typing.cast(Any, node))
    if kind == "str":
        return core_schema.with_info_wrap_validator_function(_refuse_part, typing.cast(Any, node))
    return None


class SharedReader:
    """Reads a shared value that is an argument by itself: once, for all calls to come."""

    def __init__(self, core: Any, definitions: list[Any]) -> None:
        """`core`: of its parameter."""
        core = _replace(core, _packed_node, {})
        if definitions:
            core = {"type": "definitions", "schema": core, "definitions": _replace(definitions, _packed_node, {})}
        self._core = core

    def __call__(self, value: Any, info: core_schema.ValidationInfo[Any]) -> Any:
        crossed = claim(info, value)
        assert crossed is not None, "only where one stands"
        assert crossed.kept is not None
        kept = crossed.kept
        try:
            return kept.once(self, lambda: kept.read(self._validate))
        except NotReadable as error:
            raise _misfit(str(error)) from error
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            at = f"in the shared value, at {to_pointer(first['loc'])}: " if first["loc"] else "a shared value: "
            raise _misfit(f"{at}{first['msg']}") from error

    def _validate(self, json: bytes, tokens: Tokens | None) -> Any:
        return self._validator.validate_json(json, strict=True, context=tokens)

    @functools.cached_property
    def _validator(self) -> SchemaValidator:
        make: Any = SchemaValidator
        validator: SchemaValidator = make(self._core, _BASE64, _use_prebuilt=False)
        return validator


def with_shared(core: dict[str, Any], readers: Mapping[str, SharedReader]) -> dict[str, Any]:
    """The core schema of arguments in which shared values stand for some parameters."""
    if core["type"] == "definitions":
        return {**core, "schema": with_shared(core["schema"], readers)}
    parameters = [
        {**one, "schema": core_schema.with_info_plain_validator_function(readers[one["name"]])}
        if one["name"] in readers
        else one
        for one in core["arguments_schema"]
    ]
    return {**core, "arguments_schema": parameters}


def _resolve(value: Any, info: core_schema.ValidationInfo[Any]) -> Any:
    tokens = info.context
    if not isinstance(tokens, Tokens):
        return value
    try:
        return tokens.resolve(value)
    except NotReadable as error:
        raise _misfit(str(error)) from error


def _read_bytes(value: Any, handler: Callable[[Any], Any], info: core_schema.ValidationInfo[Any]) -> Any:
    crossed = claim(info, value)
    if crossed is None:
        return handler(value)
    if crossed.part.kind != "bytes":
        raise _misfit(f"expected bytes, got {crossed.describe()}")
    return handler(_read(crossed))


def _refuse_part(value: Any, handler: Callable[[Any], Any], info: core_schema.ValidationInfo[Any]) -> Any:
    crossed = claim(info, value)
    if crossed is not None:
        raise _misfit(f"expected a string, got {crossed.describe()}")
    return handler(value)


def claim(info: core_schema.ValidationInfo[Any], value: Any) -> Crossed | None:
    """The binary part that a value stands for; None: it is a value like any other."""
    tokens = info.context
    return tokens.claim(value) if isinstance(tokens, Tokens) else None


def _read(crossed: Crossed) -> Any:
    try:
        return crossed.to_python()
    except NotReadable as error:
        raise _misfit(str(error)) from error


def _expected(what: str, value: Any) -> PydanticCustomError:
    return _misfit(f"expected {what}, got {describe_value(value)}")


def _misfit(reason: str) -> PydanticCustomError:
    return PydanticCustomError("crossing", "{reason}", {"reason": reason})
