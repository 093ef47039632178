"""Completion: what a prompt or a resource template suggests for its arguments, while they are being typed.

A suggestion is one of a list that is known when the function is described, or what a completer returns: a function of
`(value: str)`, or `(value: str, arguments: dict[str, str])`, that runs as any call does. Parameters of a Literal or an
Enum complete by themselves.
"""

from __future__ import annotations

import enum
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import msgspec

from callyard.functions.function import Function, check_target

SUGGESTIONS_MAX: Final = 100
"""Most suggestions of one answer."""
VALUES_MAX: Final = 10_000
"""Most values of one parameter's list."""


class Completion(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one parameter is completed: by a list, or by a function of the same registry."""

    values: tuple[str, ...] = ()
    function: str = ""
    """The name of a completer, which returns a list of texts; empty: `values` are all."""


_COMPLETIONS: Final = msgspec.json.Decoder(dict[str, Completion])
_TEXTS: Final = msgspec.json.Decoder(list[str])


def read_completions(raw: bytes | msgspec.Raw) -> dict[str, Completion]:
    """From a description. Raises `msgspec.DecodeError`."""
    return _COMPLETIONS.decode(raw)


def suggest(values: tuple[str, ...] | list[str], value: str) -> list[str]:
    """Those that begin with `value` in any case, then those that hold it elsewhere; each in their own order."""
    wanted = value.casefold()
    first = [one for one in values if one.casefold().startswith(wanted)]
    return first + [one for one in values if wanted in one.casefold()[1:] and not one.casefold().startswith(wanted)]


def read_suggestions(output: bytes | msgspec.Raw) -> list[str] | None:
    """What a completer returned; None: no list of texts."""
    try:
        return _TEXTS.decode(output)
    except msgspec.DecodeError:
        return None


def completer_arguments(input_schema: bytes | msgspec.Raw, value: str, arguments: Mapping[str, str]) -> dict[str, Any]:
    """What a completer is called with. `input_schema`: its own; `arguments`: what is known of the others."""
    takes = msgspec.json.decode(input_schema).get("properties", {})
    return {"value": value, "arguments": dict(arguments)} if "arguments" in takes else {"value": value}


def check_complete(who: str, complete: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter]) -> None:
    """Raises `TypeError` or `ValueError` for a `complete=` that cannot be."""
    if not isinstance(complete, Mapping):
        raise TypeError(f"{who}: complete= takes a dict by parameter, got {type(complete).__name__}")
    for name, source in complete.items():
        if name not in parameters:
            known = ", ".join(parameters) or "none"
            raise ValueError(f"{who}: complete= names {name!r}, which is no parameter; there are: {known}")
        if isinstance(source, str | Function):
            continue
        if callable(source):
            check_target(source, f"complete[{name!r}]")
            if source.__name__ == "<lambda>":
                raise TypeError(f"{who}: complete[{name!r}] needs a function with a name: write it with def")
        elif not isinstance(source, list | tuple) or not all(isinstance(value, str) for value in source):
            raise TypeError(
                f"{who}: complete[{name!r}] takes a list of texts, a function of (value: str), or its name,"
                f" got {source!r}"
            )
        elif len(source) > VALUES_MAX:
            raise ValueError(f"{who}: complete[{name!r}] has {len(source)} values, expected at most {VALUES_MAX}")


def completers(complete: Mapping[str, Any]) -> Iterator[Any]:
    """The functions, declared or plain, that a `complete=` names by themselves."""
    for source in complete.values():
        if callable(source):
            yield source


def build_completions(
    complete: Mapping[str, Any],
    hints: Mapping[str, Any],
    parameters: Mapping[str, inspect.Parameter],
    find_name: Callable[[object], str | None],
) -> dict[str, Completion]:
    """By parameter: what was declared, and what its type says."""
    found: dict[str, Completion] = {}
    for name in parameters:
        source = complete.get(name)
        if source is None:
            values = tuple(_values_of(hints.get(name)))
            if values:
                found[name] = Completion(values)
        elif isinstance(source, str):
            found[name] = Completion(function=source)
        elif callable(source):
            plain = source.target if isinstance(source, Function) else source
            found[name] = Completion(function=find_name(plain) or plain.__name__)
        else:
            found[name] = Completion(tuple(source))
    return found


def _values_of(annotation: Any) -> Iterator[str]:
    """Of a Literal or an Enum, also inside of a union or an Annotated: the texts that its values are written as."""
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        yield from (_written(value) for value in typing.get_args(annotation) if value is not None)
    elif origin in (typing.Union, types.UnionType):
        for member in typing.get_args(annotation):
            yield from _values_of(member)
    elif origin is typing.Annotated:
        yield from _values_of(typing.get_args(annotation)[0])
    elif isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        yield from (_written(member) for member in annotation)


def _written(value: Any) -> str:
    value = value.value if isinstance(value, enum.Enum) else value
    return str(value).lower() if isinstance(value, bool) else str(value)
