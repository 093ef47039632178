"""A function as another function of its bundle calls it: Python values out, JSON result in.

The mirror of `signature`: arguments leave as canonical JSON by name, so that equal calls are equal bytes however they
were written (X15), and a result comes back as what the function's annotation says it returns.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import typing_extensions
from pydantic.errors import PydanticUserError
from pydantic_core import SchemaValidator, ValidationError

from callyard.errors import CallError, ErrorKind, UsageError, fail
from callyard.functions.contents import read_returned
from callyard.functions.crossing_types import build_core, make_validator
from callyard.functions.encoding import ResultMisfit, encode_canonical
from callyard.functions.packing import NotReadable, Packed, Tokens, decode_json, encode_crossing, is_packed
from callyard.functions.signature import Invocable
from callyard.functions.signature_text import format_annotation
from callyard.functions.type_hooks import prepare_types

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Of one call: by position and by name."""

_PLAIN: Final = (Any, object, inspect.Parameter.empty)
_EXTRA_KINDS: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Outgoing:
    """How one function is called by others."""

    def __init__(self, name: str, invocable: Invocable | None, *, typed: bool) -> None:
        """`invocable`: None for a name that the bundle does not know, whose arguments leave as they stand.

        `typed`: results are converted to what the function's annotation says; else they are plain JSON values.
        """
        self.name = name
        self._invocable = invocable
        self._typed = typed

    def encode_call(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        lenient: bool = False,
        binary: bool = True,
        nan_null: bool = False,
    ) -> bytes:
        """The arguments of one call, encoded. Raises `CallError` (schema) for what JSON cannot hold.

        Arguments that do not fit the signature are a `TypeError`, as from the function itself. `lenient`: they are
        sent as they are, for the called side to refuse; so rows are, and what is called by name. `binary`: what is
        binary may stand beside the JSON (`packing`). `nan_null`: NaN and infinities are null.
        """
        try:
            value = self._arrange(args, kwargs, lenient=lenient or not self._typed)
            if binary:
                return encode_crossing(value, canonical=True, nan_null=nan_null)
            return encode_canonical(value, nan_null=nan_null)
        except ResultMisfit as error:
            message = f"arguments of {self.name}: {error.message}"
            raise CallError(fail(ErrorKind.SCHEMA, message, function=self.name, **error.details)) from None

    def _arrange(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, lenient: bool) -> Any:
        """The arguments by name where that says all, else by position."""
        if self._invocable is None:
            return args or kwargs
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            if lenient:  # one of the two is empty
                return args or kwargs
            raise TypeError(f"{self.name}() {error}") from None
        by_name: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            kind = self._signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL and value:
                if bound.kwargs:
                    raise UsageError(f"{self.name}: *{name} and arguments by name cannot both be sent as JSON")
                return bound.args
            if kind is inspect.Parameter.VAR_KEYWORD:
                by_name.update(value)
            elif kind not in _EXTRA_KINDS:
                by_name[name] = value
        return by_name

    def read_row(self, row: Any) -> Arguments:
        """What a row stands for as arguments.

        A mapping is arguments by name, or the whole object for a function with one object parameter; a list or tuple
        is arguments by position; anything else is the only argument.
        """
        return read_row(row, None if self._invocable is None else self._invocable.row_parameter)

    def decode(self, value: bytes | msgspec.Raw | Packed) -> Any:
        """What the function returned. Raises `CallError` (result) when that is not what its annotation says."""
        core = self._core
        try:
            if type(value) is bytes and is_packed(value):
                value = Packed.read(value)
            if isinstance(value, Packed):
                if core is None:
                    return value.decode()
                tokens = Tokens(value)
                return self._packed_validator.validate_json(
                    tokens.json, strict=True, context=tokens, by_alias=True, by_name=True
                )
            if self._typed and (returned := read_returned(value)) is not None:
                return returned
            if core is None:
                return decode_json(value)
            # models leave by the names of their fields, which their aliases may hide
            return self._validator.validate_json(bytes(value), strict=True, by_alias=True, by_name=True)
        except NotReadable as error:
            text = f"the result of {self.name} cannot be read: {error}"
            raise CallError(fail(ErrorKind.RESULT, text, attempts=1, function=self.name)) from None
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            pointer = "".join(f"/{part}" for part in first["loc"])
            message = (
                f"the result of {self.name} is not what its annotation -> {self._annotation_text} says: "
                f"{pointer + ': ' if pointer else ''}{first['msg']}; call({self.name!r}, …) gives it as it came"
            )
            raise CallError(fail(ErrorKind.RESULT, message, attempts=1, function=self.name, pointer=pointer)) from None

    @functools.cached_property
    def _signature(self) -> inspect.Signature:
        assert self._invocable is not None
        return inspect.signature(inspect.unwrap(self._invocable.target))

    @property
    def _annotation_text(self) -> str:
        return format_annotation(self._signature.return_annotation)

    @functools.cached_property
    def _validator(self) -> SchemaValidator:
        return make_validator(self._core)

    @functools.cached_property
    def _packed_validator(self) -> SchemaValidator:
        return make_validator(self._core, packed=True)

    @functools.cached_property
    def _core(self) -> dict[str, Any] | None:
        """None: results are taken as they came, since there is no annotation, or none that JSON can reach."""
        if self._invocable is None or not self._typed:
            return None
        try:
            hints = typing_extensions.get_type_hints(inspect.unwrap(self._invocable.target), include_extras=True)
            annotation = hints.get("return", inspect.Parameter.empty)
            if annotation in _PLAIN:
                return None
            prepare_types([annotation])
            return build_core(annotation)
        except (PydanticUserError, NameError, TypeError):
            return None


def read_row(row: Any, row_parameter: inspect.Parameter | None) -> Arguments:
    """The arguments, by position and by name, that a row stands for.

    `row_parameter`: the function's one object parameter, which takes a whole row.
    """
    if row_parameter is not None and (isinstance(row, Mapping) or hasattr(row, "_fields")):
        by_name = row_parameter.kind is inspect.Parameter.KEYWORD_ONLY
        return ((), {row_parameter.name: row}) if by_name else ((row,), {})
    if isinstance(row, Mapping):
        return (), row
    if isinstance(row, list | tuple):
        return tuple(row), {}
    return (row,), {}


def describe_stranger(function: object, module: str, known: list[str]) -> str:
    """Why `function` cannot be called by name here, in words."""
    shown = ", ".join(known[:10]) + (", …" if len(known) > 10 else "")
    qualname = getattr(function, "__qualname__", None)
    if not callable(function) or qualname is None:
        return f"expected a function of this bundle, or its name, got {type(function).__name__}; there are: {shown}"
    name = f"{getattr(function, '__module__', '?')}.{qualname}"
    if "<lambda>" in qualname or "<locals>" in qualname:
        return f"{name} has no name to call it by: define it at the top of {module}; there are: {shown}"
    return (
        f"{name} is not among the functions that can be called here: declare it with @function and have it, or import "
        f"it, in {module}; there are: {shown}"
    )
