"""A function as its executor calls it: JSON arguments in, JSON result out.

One pydantic-core validator per function takes the raw bytes, in strict JSON mode: `"5"` is no integer, a boolean is no
integer, ISO text is a datetime. What JSON libraries let pass is refused before: duplicate keys, NaN, infinities,
numbers beyond a float (`strict_json`). Source: tool-dispatch D2, D4, D26, D49.
"""

from __future__ import annotations

import collections.abc
import copy
import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, is_typeddict

import msgspec
import typing_extensions
from pydantic import BaseModel, RootModel
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticUserError
from pydantic_core import SchemaValidator, ValidationError

from callyard.errors import CallyardError
from callyard.functions.cells import Columns, may_hold_non_finite
from callyard.functions.completion import Completion, build_completions
from callyard.functions.contents import NO_LIMIT, encode_result
from callyard.functions.crossing_types import (
    SharedReader,
    build_core,
    make_validator,
    may_hold_binary,
    with_shared,
)
from callyard.functions.docstrings import read_docstring
from callyard.functions.encoding import ResultMisfit
from callyard.functions.function import NO_PROMISES, RESULT_BYTES_MAX, TOOL, Declared, Promises
from callyard.functions.misfits import ArgumentsMisfit, Parameters, explain, misfit, raised_in_check, retell
from callyard.functions.packing import NotReadable, Packed, Tokens
from callyard.functions.signature_schema import QuietJsonSchema, runs_user_code
from callyard.functions.signature_text import format_annotation, format_signature
from callyard.functions.strict_json import check_json, decode_json, refuse_non_finite
from callyard.functions.type_hooks import TEXT_CELLS, prepare_types
from callyard.wire.messages import ResultForm

if TYPE_CHECKING:
    from callyard.functions.json_schema import JsonSchema

__all__ = ["ArgumentsMisfit", "Invocable", "ResultMisfit", "UnfitSignature"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_BY_NAME: Final = frozenset({inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY})
_POSITIONAL: Final = frozenset({inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD})
_MAPPINGS: Final = (dict, collections.abc.Mapping)


class UnfitSignature(CallyardError):
    """A function whose parameters or result JSON cannot carry. It cannot be called through Callyard."""


class _Reader:
    """Validates one JSON text against one core schema."""

    def __init__(self, core: dict[str, Any], definitions: list[Any], keys_sure: int, parameters: Parameters) -> None:
        self.core = {"type": "definitions", "schema": core, "definitions": definitions} if definitions else core
        self._validator = make_validator(self.core)
        self.read_sure: Callable[[bytes], Any] = functools.partial(self._validator.validate_json, strict=True)
        """`read` for JSON that holds a few plain values and no key twice: nothing needs a second look. Raises
        pydantic's own error."""
        self._shared_readers: dict[str, SharedReader] = {}
        self._shared_validators: dict[frozenset[str], SchemaValidator] = {}
        self._keys_sure = max(1, keys_sure)
        self._parameters = parameters

    @functools.cached_property
    def json_schema(self) -> dict[str, Any]:
        return QuietJsonSchema().generate(typing.cast(Any, _by_name(self.core)))

    @functools.cached_property
    def columns(self) -> Columns:
        return Columns(self.json_schema)

    def read(self, raw: bytes, *, texts: bool = False, cells: bool = False) -> Any:
        """The validated value; `texts`: values are text, to be parsed; `cells`: of a CSV row.

        Raises `ArgumentsMisfit`.
        """
        if texts:
            raw = self.columns.prepare(raw)
        may_overflow = check_json(raw, self._keys_sure)
        try:
            if texts:
                value = self._validator.validate_json(raw, strict=False, context=TEXT_CELLS)
            else:
                value = self._validator.validate_json(raw, strict=True)
        except ValidationError as error:
            empty = "" if not texts else "the cell is empty" if cells else "its value is empty"
            raise explain(error, raw, self._parameters, empty=empty) from None
        except MemoryError:
            raise
        except Exception as error:  # a validator or __post_init__ of the user's
            raise raised_in_check(error) from error
        if may_overflow or (texts and may_hold_non_finite(raw)):
            refuse_non_finite(value)
        return value

    def read_packed(self, packed: Packed) -> Any:
        """As `read`, of JSON with binary parts."""
        may_overflow = check_json(packed.value, self._keys_sure)
        try:
            whole = self._find_shared(packed) if packed.has_shared else {}
            tokens = Tokens(packed, whole)
        except NotReadable as error:
            raise misfit(str(error), "type") from error
        try:
            validator = self._shared_validator(frozenset(whole.values())) if whole else self._packed_validator
            value = validator.validate_json(tokens.json, strict=True, context=tokens)
        except ValidationError as error:
            raise retell(explain(error, tokens.json, self._parameters), tokens.describe) from None
        except MemoryError:
            raise
        except Exception as error:  # a validator or __post_init__ of the user's
            raise raised_in_check(error) from error
        if may_overflow:
            refuse_non_finite(value)
        return value

    @functools.cached_property
    def _packed_validator(self) -> SchemaValidator:
        return make_validator(self.core, packed=True)

    def _find_shared(self, packed: Packed) -> dict[tuple[str | int, ...], str]:
        """Shared values that are an argument each, and no binary value: their places and parameters. Raises
        `NotReadable`."""
        places = [crossed.part.at for crossed in packed.objects() if crossed.part.kind == "shared"]
        named = {place: self._parameter_of(place) for place in places}
        return {place: name for place, name in named.items() if name is not None}

    def _parameter_of(self, place: tuple[str | int, ...]) -> str | None:
        if len(place) != 1:
            return None
        if isinstance(place[0], int):
            positional = self._parameters.positional
            return positional[place[0]] if place[0] < len(positional) else None
        return place[0] if place[0] in self._parameters.names else None

    def _shared_validator(self, names: frozenset[str]) -> SchemaValidator:
        """For shared values at these parameters."""
        validator = self._shared_validators.get(names)
        if validator is None:
            core: dict[str, Any] = self.core
            definitions = core["definitions"] if core["type"] == "definitions" else []
            arguments = core["schema"] if core["type"] == "definitions" else core
            cores = {one["name"]: one["schema"] for one in arguments["arguments_schema"]}
            for name in names - self._shared_readers.keys():
                self._shared_readers[name] = SharedReader(cores[name], definitions)
            readers = {name: self._shared_readers[name] for name in names}
            validator = self._shared_validators[names] = make_validator(with_shared(self.core, readers), packed=True)
        return validator


class Invocable:
    """A function, ready to be called with JSON.

    Raises `UnfitSignature` when built of one that JSON cannot reach, `BadSchema` for an input schema of its own that is
    none.
    """

    def __init__(
        self, name: str, target: Callable[..., Any], promises: Promises = NO_PROMISES, declared: Declared = TOOL
    ) -> None:
        self.name = name
        self.target = target
        self.promises = promises
        self.declared = declared
        self.takes_texts = declared.role in ("prompt", "resource")
        """Its arguments are text by nature, whoever sends them."""
        plain = inspect.unwrap(target)
        self._plain: types.FunctionType = typing.cast(types.FunctionType, plain)
        self.is_async = inspect.iscoroutinefunction(plain)
        self.line: int = self._plain.__code__.co_firstlineno
        self._result_bytes_max = promises.max_result_bytes or RESULT_BYTES_MAX
        self._nan_null = promises.nan == "null"
        self._signature = inspect.signature(plain)
        self._hints = _resolve_hints(name, plain)
        prepare_types(self._hints.values())
        arguments, definitions = _build_core(name, plain, self._signature, self._hints)
        parameters = _describe_parameters(self._signature, self._hints)
        self._arguments = _Reader(arguments, definitions, _keys_of_arguments(arguments), parameters)
        self._positional_only = tuple(
            p.name for p in self._signature.parameters.values() if p.kind is inspect.Parameter.POSITIONAL_ONLY
        )
        self._own_schema = None if declared.input_schema is None else _compile_own(name, declared.input_schema)
        by_name = self.takes_texts or self._own_schema is not None
        self._row_parameter = None if by_name else _find_row_parameter(self._signature, self._hints)
        self._row: _Reader | None = None
        if self._row_parameter is not None:
            core = next(p["schema"] for p in arguments["arguments_schema"] if p["name"] == self._row_parameter.name)
            core = core["schema"] if core["type"] == "default" else core
            fields = _keys_of_object(core, definitions)
            self._row = _Reader(core, definitions, fields, Parameters((), (), ()))

    @property
    def plain_result(self) -> type | None:
        """The type of its results where that is a plain one: no other says as much as its name does."""
        returned = self._hints.get("return")
        return returned if returned in (int, float, str, bool, type(None)) else None

    @functools.cached_property
    def may_return_binary(self) -> bool:
        """Whether bytes, an array or a table may stand in its results, by its annotation."""
        if self.takes_texts:
            return False  # contents are JSON
        return self._result_core is None or may_hold_binary(self._result_core)

    @functools.cached_property
    def _result_core(self) -> dict[str, Any] | None:
        """Of what it says it returns; None: it does not say, or JSON cannot reach that."""
        if "return" not in self._hints:
            return None
        try:
            return build_core(self._hints["return"])
        except (PydanticUserError, NameError, TypeError):
            return None

    @property
    def takes_row(self) -> bool:
        """Whether a row's object is the whole value of its one object parameter."""
        return self._row is not None

    @property
    def row_parameter(self) -> inspect.Parameter | None:
        """The object parameter that takes a whole row; None: none does."""
        return self._row_parameter

    @functools.cached_property
    def runs_user_code(self) -> bool:
        """Whether `bind` may run code of the user's: a validator, `__post_init__`, a default factory."""
        return runs_user_code(self._arguments.core)

    def bind(self, args: bytes | msgspec.Raw, *, row: bool = False, strings: bool = False) -> Arguments:
        """Positional and keyword arguments for `target`, from JSON: an object by name, an array by position.

        `row`: `args` is a row of a call list, which a function with one object parameter takes whole. `strings`: its
        values are text, parsed by each parameter's type; an empty text is an absent argument where that means
        something. Raises `ArgumentsMisfit`.
        """
        raw = args if type(args) is bytes else bytes(args)
        if self._own_schema is not None:
            raw = self._check_own(self._own_schema, raw, strings=strings)
            strings = False
        strings = strings or self.takes_texts
        if row and self._row is not None and (raw[:1] == b"{" or raw.lstrip()[:1] == b"{"):
            value = self._row.read(raw, texts=strings, cells=True)
            parameter = self._row_parameter
            assert parameter is not None
            return ((), {parameter.name: value}) if parameter.kind in _BY_NAME else ((value,), {})
        bound: Arguments = self._arguments.read(raw, texts=strings, cells=row)
        return self._place_positional(bound) if self._positional_only else bound

    def bind_packed(self, packed: Packed, *, row: bool = False) -> Arguments:
        """As `bind`, of JSON with binary parts: from another Python process. Raises `ArgumentsMisfit`."""
        if self.takes_texts or self._own_schema is not None:
            reason = "takes texts" if self.takes_texts else "has an input schema of its own, which is for JSON"
            raise misfit(f"{self.name} {reason}: bytes, arrays and tables cannot be passed to it", "type")
        if row and self._row is not None and packed.value.lstrip()[:1] == b"{":
            value = self._row.read_packed(packed)
            parameter = self._row_parameter
            assert parameter is not None
            return ((), {parameter.name: value}) if parameter.kind in _BY_NAME else ((value,), {})
        bound: Arguments = self._arguments.read_packed(packed)
        return self._place_positional(bound) if self._positional_only else bound

    @property
    def bind_sure(self) -> Callable[[bytes], Arguments] | None:
        """`bind` for JSON as `_Reader.read_sure` takes it, where there is such a short way."""
        looks_closer = self._positional_only or self.takes_texts or self._own_schema is not None
        return None if looks_closer else self._arguments.read_sure

    def encode(self, value: object) -> bytes:
        """The result as JSON, contents in their own form. Raises `ResultMisfit`."""
        return encode_result(
            value, self._result_bytes_max, self.declared.role, self.declared.mime_type, nan_null=self._nan_null
        )

    def encode_as(self, value: object, form: ResultForm) -> bytes:
        """The result in the form that is asked for: `binary` where the caller is Python. Raises `ResultMisfit`."""
        return encode_result(
            value,
            self.promises.max_result_bytes or form.bytes_max or NO_LIMIT,
            self.declared.role,
            self.declared.mime_type,
            nan_null=self._nan_null or form.nan_null,
            binary=form.binary,
        )

    def input_schema(self) -> dict[str, Any]:
        """JSON Schema (2020-12, or what the author's own says) of the arguments by name. Raises `UnfitSignature`."""
        if self._own_schema is not None:
            return self._own_schema.schema
        try:
            schema = copy.deepcopy(self._arguments.json_schema)
        except (PydanticInvalidForJsonSchema, PydanticUserError, TypeError) as error:  # msgspec's is a TypeError
            raise UnfitSignature(f"{self.name}: {_first_line(error)}") from error
        for name, text in read_docstring(self._plain.__doc__).parameters.items():
            described = schema.get("properties", {}).get(name)
            if isinstance(described, dict):
                described.setdefault("description", text)
        return _to_texts(schema) if self.takes_texts else schema

    def output_schema(self) -> dict[str, Any]:
        """JSON Schema of the result; empty: anything."""
        if self.takes_texts or self._result_core is None:
            return {}
        try:
            # Models leave by the names of their fields (`encoding`).
            generator = QuietJsonSchema(by_alias=False)
            return generator.generate(typing.cast(Any, self._result_core), mode="serialization")
        except (PydanticUserError, TypeError):
            return {}  # results are encoded by what they are, so a type without a schema is no fault

    def signature_text(self) -> str:
        """The signature as one would write it: `distance(origin: str, dest: str) -> float`."""
        return self.name + format_signature(self._signature)

    def description(self) -> str:
        """What the decorator or the docstring says of the function, without its list of parameters."""
        return self.declared.description or read_docstring(self._plain.__doc__).summary

    def completions(self, find_name: Callable[[object], str | None] = lambda _: None) -> dict[str, Completion]:
        """How the arguments of a prompt or a resource are completed, by parameter.

        `find_name`: under which name a completer is known; None: under its own.
        """
        if not self.takes_texts:
            return {}
        return build_completions(self.declared.complete, self._hints, self._signature.parameters, find_name)

    def _check_own(self, schema: JsonSchema, raw: bytes, *, strings: bool) -> bytes:
        """`raw`, which fits the author's schema; texts are made to fit. Raises `ArgumentsMisfit`."""
        if strings:
            from callyard.functions.repairs import repair_arguments

            raw, _ = repair_arguments(schema, raw)
        value = decode_json(raw)
        schema.check(value)
        return raw

    def _place_positional(self, bound: Arguments) -> Arguments:
        args, keywords = bound
        placed = [*args, *(keywords.pop(name) for name in self._positional_only[len(args) :])]
        return tuple(placed), keywords


def _compile_own(name: str, schema: Mapping[str, Any]) -> JsonSchema:
    from callyard.functions.json_schema import JsonSchema  # not for those that have none: it is large

    return JsonSchema(schema, subject=f"input schema of {name!r}")


def _to_texts(schema: dict[str, Any]) -> dict[str, Any]:
    """Of arguments that are texts: what each stands for is the function's own check."""
    parts = schema.get("$defs", {})
    schema["properties"] = {name: _to_text(part, parts) for name, part in schema.get("properties", {}).items()}
    schema.pop("$defs", None)
    return schema


def _to_text(part: dict[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    target = parts.get(str(part.get("$ref", "")).rpartition("/")[2], {})
    kept: dict[str, Any] = {key: part[key] for key in ("title", "description") if key in part}
    values = part.get("enum", target.get("enum", [part["const"]] if "const" in part else None))
    if values and all(isinstance(value, str) for value in values):
        kept["enum"] = values
    return {"type": "string", **kept}


def _by_name(core: dict[str, Any]) -> dict[str, Any]:
    """A core schema whose arguments are an object: JSON Schema has no word for those that may also be an array."""
    if core["type"] == "definitions":
        return {**core, "schema": _by_name(core["schema"])}
    if core["type"] != "arguments":
        return core
    parameters = [{**parameter, "mode": "keyword_only"} for parameter in core["arguments_schema"]]
    return {**{k: v for k, v in core.items() if k != "var_args_schema"}, "arguments_schema": parameters}


def _resolve_hints(name: str, plain: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing_extensions.get_type_hints(plain, include_extras=True)
    except NameError as error:
        raise UnfitSignature(
            f"{name}: {error}; its annotations must be importable at run time, not only under TYPE_CHECKING"
        ) from error
    except Exception as error:  # annotations are user code
        raise UnfitSignature(f"{name}: its annotations cannot be read: {type(error).__name__}: {error}") from error


def _build_core(
    name: str, plain: Callable[..., Any], signature: inspect.Signature, hints: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Any]]:
    """The arguments schema and its shared definitions. Positional-only parameters can be given by name as well."""
    try:
        core: Any = build_core(plain, hints)
    except (PydanticUserError, NameError, TypeError) as error:
        raise UnfitSignature(_name_culprit(name, signature, hints, error)) from error
    definitions = core["definitions"] if core["type"] == "definitions" else []
    call = core["schema"] if core["type"] == "definitions" else core
    arguments = dict(call["arguments_schema"])
    arguments["arguments_schema"] = [
        {**p, "mode": "positional_or_keyword"} if p.get("mode") == "positional_only" else p
        for p in arguments["arguments_schema"]
    ]
    return arguments, definitions


def _name_culprit(name: str, signature: inspect.Signature, hints: Mapping[str, Any], error: Exception) -> str:
    for parameter in signature.parameters:
        if parameter in hints:
            try:
                build_core(hints[parameter])
            except (PydanticUserError, NameError, TypeError) as culprit:
                shown = format_annotation(signature.parameters[parameter].annotation)
                return f"{name}: parameter {parameter}: {shown} has no JSON form ({_first_line(culprit)})"
    return f"{name}: {_first_line(error)}"


def _describe_parameters(signature: inspect.Signature, hints: Mapping[str, Any]) -> Parameters:
    parameters = list(signature.parameters.values())
    named = [p for p in parameters if p.kind in _BY_NAME or p.kind is inspect.Parameter.POSITIONAL_ONLY]
    hint = ""
    if len(parameters) == 1 and named and named[0].annotation is inspect.Parameter.empty:
        hint = f" (write {named[0].name}: dict to take a whole row)"
    elif (row := _find_row_parameter(signature, hints)) is not None:
        hint = f' (an object, with its fields in it: {{"{row.name}": {{…}}}})' if len(parameters) == 1 else ""
    return Parameters(
        names=tuple(p.name for p in named),
        positional=tuple(p.name for p in named if p.kind in _POSITIONAL),
        required=tuple(p.name for p in named if p.default is inspect.Parameter.empty),
        takes_any_number=any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters),
        hint=hint,
    )


def _find_row_parameter(signature: inspect.Signature, hints: Mapping[str, Any]) -> inspect.Parameter | None:
    """The only parameter, or the only required one, when its type is an object."""
    named = [p for p in signature.parameters.values() if p.kind in _BY_NAME or p.kind in _POSITIONAL]
    required = [p for p in named if p.default is inspect.Parameter.empty]
    if len(named) != len(signature.parameters):  # *args or **kwargs take what is left
        return None
    candidates = required if required else named
    if len(candidates) != 1 or candidates[0].name not in hints:
        return None
    return candidates[0] if _is_object_type(hints[candidates[0].name]) else None


def _is_object_type(annotation: Any) -> bool:
    annotation = getattr(annotation, "__value__", annotation)
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _is_object_type(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(annotation) if member is not types.NoneType]
        return all(_is_object_type(member) for member in members)
    kind = origin if origin is not None else annotation
    if not isinstance(kind, type):
        return False
    if is_typeddict(kind) or typing_extensions.is_typeddict(kind) or dataclasses.is_dataclass(kind):
        return True
    if issubclass(kind, BaseModel):
        return not issubclass(kind, RootModel)
    return issubclass(kind, (*_MAPPINGS, msgspec.Struct)) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))


def _keys_of_arguments(arguments: Mapping[str, Any]) -> int:
    return sum(_is_sure(p["schema"]) for p in arguments["arguments_schema"])


def _keys_of_object(core: Mapping[str, Any], definitions: list[Any]) -> int:
    """How many different keys an object is sure to hold once it is validated; 0: unknown."""
    while core["type"] == "definition-ref":
        core = next(part for part in definitions if part.get("ref") == core["schema_ref"])
    if core["type"] == "dataclass":
        fields = core["schema"].get("fields", ()) if core["schema"]["type"] == "dataclass-args" else ()
        return sum(_is_sure(field["schema"]) and field.get("init", True) for field in fields)
    if core["type"] == "typed-dict":
        total = core.get("total", True)
        return sum(field.get("required", total) for field in core["fields"].values())
    if core["type"] == "model" and core["schema"]["type"] == "model-fields":
        return sum(_is_sure(field["schema"]) for field in core["schema"]["fields"].values())
    return 0


def _is_sure(core: Mapping[str, Any]) -> bool:
    """Whether a value of this schema must be given; a validator function around it might make one up."""
    return core["type"] != "default" and not core["type"].startswith("function")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].partition(". Set `")[0]
