"""`@prompt` and `@resource`: functions that are there to be read.

Their arguments are text by nature (a URI's, a form's), parsed by each parameter's type as `key=value` is on the command
line. Reading changes nothing, so both have the promise `read_only` unless they say `read_only=False`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, Unpack, overload

from callyard.functions.completion import check_complete
from callyard.functions.function import (
    READ_ONLY,
    Declared,
    Function,
    P,
    PromiseArguments,
    R,
    build_promises,
    check_target,
)
from callyard.functions.uris import parse_uri

_NAMED: Final = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
)


@overload
def prompt(target: Callable[P, R], /) -> Function[P, R]: ...
@overload
def prompt(
    *,
    title: str = ...,
    description: str = ...,
    complete: Mapping[str, Any] = ...,
    **promises: Unpack[PromiseArguments],
) -> Callable[[Callable[P, R]], Function[P, R]]: ...
def prompt(
    target: Callable[..., Any] | None = None,
    /,
    *,
    title: str = "",
    description: str = "",
    complete: Mapping[str, Any] | None = None,
    **promises: Any,
) -> Any:
    """Declare a prompt: a function whose parameters are the prompt's arguments, and which returns text, a `Message`, a
    content, or a list of these.

    `complete`: suggestions by parameter, each a list of texts, a function of `(value: str)`, or the name of one. Raises
    `TypeError` or `ValueError`.
    """
    kept = build_promises("@prompt", promises, READ_ONLY)
    declared = Declared(role="prompt", title=title, description=description, complete=complete or {})

    def declare(plain: Callable[..., Any]) -> Function[..., Any]:
        check_target(plain, "@prompt")
        return Function(plain, kept, check_role(plain, declared), "@prompt")

    return declare if target is None else declare(target)


def resource(
    uri: str,
    *,
    title: str = "",
    description: str = "",
    mime_type: str = "",
    complete: Mapping[str, Any] | None = None,
    **promises: Unpack[PromiseArguments],
) -> Callable[[Callable[P, R]], Function[P, R]]:
    """Declare a resource: a function that returns what is at `uri`, as text, bytes, a content, or any other value as
    JSON. None: there is nothing.

    Each `{name}` in `uri` is a parameter of the function. `mime_type`: default by what it returns. Raises `TypeError`
    or `ValueError`.
    """
    if callable(uri):
        raise TypeError('@resource takes the URI first: @resource("config://app")')
    kept = build_promises("@resource", promises, READ_ONLY)
    declared = Declared(
        role="resource", title=title, description=description, uri=uri, mime_type=mime_type, complete=complete or {}
    )

    def declare(plain: Callable[P, R]) -> Function[P, R]:
        check_target(plain, "@resource")
        return Function(plain, kept, check_role(plain, declared), "@resource")

    return declare


def check_role(target: Any, declared: Declared) -> Declared:
    """`declared`, which fits the function's parameters. Raises `TypeError` or `ValueError`."""
    who = f"@{declared.role}"
    parameters = inspect.signature(target).parameters
    for parameter in parameters.values():
        if parameter.kind not in _NAMED:
            raise TypeError(f"{who}: each parameter of {target.__qualname__} needs a name of its own, got {parameter}")
    if declared.role == "resource":
        _check_uri(declared.uri, target, parameters)
    check_complete(who, declared.complete, parameters)
    return declared


def _check_uri(uri: str, target: Any, parameters: Mapping[str, inspect.Parameter]) -> None:
    names = parse_uri(uri).names
    for name in names:
        if name not in parameters:
            raise ValueError(f"@resource({uri!r}) names {{{name}}}, which {target.__qualname__} has no parameter for")
    for name, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and name not in names:
            raise ValueError(f"{target.__qualname__} needs {name!r}, and @resource({uri!r}) has no {{{name}}}")
