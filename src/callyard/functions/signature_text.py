"""A signature as its author would write it: without module paths, addresses or long defaults."""

from __future__ import annotations

import collections.abc
import inspect
import types
import typing
from typing import Any, Final

_DEFAULT_TEXT_MAX: Final = 40
_STARS: Final[dict[Any, str]] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def format_signature(signature: inspect.Signature) -> str:
    parts: list[str] = []
    kinds = [p.kind for p in signature.parameters.values()]
    for position, p in enumerate(signature.parameters.values()):
        first_keyword = (
            p.kind is inspect.Parameter.KEYWORD_ONLY and inspect.Parameter.KEYWORD_ONLY not in kinds[:position]
        )
        if first_keyword and inspect.Parameter.VAR_POSITIONAL not in kinds:
            parts.append("*")
        text = _STARS.get(p.kind, "") + p.name
        annotated = p.annotation is not inspect.Parameter.empty
        if annotated:
            text += f": {format_annotation(p.annotation)}"
        if p.default is not inspect.Parameter.empty:
            text += f" = {_format_default(p.default)}" if annotated else f"={_format_default(p.default)}"
        parts.append(text)
        next_kind = kinds[position + 1] if position + 1 < len(kinds) else None
        if p.kind is inspect.Parameter.POSITIONAL_ONLY and next_kind is not inspect.Parameter.POSITIONAL_ONLY:
            parts.append("/")
    result = signature.return_annotation
    arrow = "" if result is inspect.Signature.empty else f" -> {format_annotation(result)}"
    return f"({', '.join(parts)}){arrow}"


def format_annotation(annotation: Any) -> str:
    if isinstance(annotation, str):
        return annotation
    if annotation is None or annotation is types.NoneType:
        return "None"
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " | ".join(format_annotation(argument) for argument in arguments)
    if typing.get_origin(annotation) is typing.Annotated:
        return format_annotation(arguments[0])
    if isinstance(annotation, type) and not arguments:
        return annotation.__qualname__
    origin: Any = typing.get_origin(annotation)
    if arguments and isinstance(origin, type) and origin is not collections.abc.Callable:
        inside = ", ".join("..." if argument is Ellipsis else format_annotation(argument) for argument in arguments)
        return f"{origin.__name__}[{inside}]"
    return _without_address(repr(annotation)).replace("typing.", "").replace("typing_extensions.", "")


def _format_default(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - __repr__ is user code
        return "..."
    return text if len(text) <= _DEFAULT_TEXT_MAX and " at 0x" not in text and "\n" not in text else "..."


def _without_address(text: str) -> str:
    return text if " at 0x" not in text else "..."
