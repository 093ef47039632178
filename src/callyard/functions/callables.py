"""Any callable as a plain function of the same signature: a class, a partial, a bound method, an instance.

Arguments are validated by a function's signature and annotations, which only functions have for certain.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import typing_extensions


def as_function(name: str, found: Callable[..., Any]) -> Callable[..., Any]:
    """`found` itself where it is a function. Raises `ValueError` for what has no signature, or yields its results."""
    plain = inspect.unwrap(found)
    if inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain):
        raise ValueError(f"{name} is a generator function: return a list")
    if inspect.isfunction(plain):
        return found
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} has no signature that can be read: write a function that calls it") from error
    hints = _resolve_hints(found)
    parameters = [_annotate(parameter, hints) for parameter in signature.parameters.values()]
    returns = found if isinstance(found, type) else hints.get("return", signature.return_annotation)
    wrapper = _wrap(found)
    annotations = {p.name: p.annotation for p in parameters if p.annotation is not inspect.Parameter.empty}
    if returns is not inspect.Signature.empty and not isinstance(returns, str):
        annotations["return"] = returns
    else:
        returns = inspect.Signature.empty
    wrapper.__name__ = wrapper.__qualname__ = name
    wrapper.__module__ = getattr(found, "__module__", wrapper.__module__)
    wrapper.__doc__ = found.__doc__
    wrapper.__annotations__ = annotations
    wrapper.__signature__ = signature.replace(parameters=parameters, return_annotation=returns)  # type: ignore[attr-defined]
    return wrapper


def _wrap(found: Callable[..., Any]) -> Callable[..., Any]:
    called = found if inspect.isroutine(found) or isinstance(found, functools.partial) else type(found).__call__
    if inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(called):

        async def wrapper(*args: Any, **keywords: Any) -> Any:
            return await found(*args, **keywords)

        return wrapper

    def plain_wrapper(*args: Any, **keywords: Any) -> Any:
        return found(*args, **keywords)

    return plain_wrapper


def _resolve_hints(found: Callable[..., Any]) -> dict[str, Any]:
    """Annotations of what a call runs, evaluated where they are names."""
    if isinstance(found, functools.partial):
        places: list[Any] = [found.func]
    elif isinstance(found, type):
        places = [found, vars(found).get("__init__", found)]
    else:
        places = [found if inspect.isroutine(found) else type(found).__call__]
    hints: dict[str, Any] = {}
    for place in places:
        try:
            hints |= typing_extensions.get_type_hints(place, include_extras=True)
        except Exception:  # noqa: BLE001 - annotations are user code; a parameter without one takes anything
            continue
    return hints


def _annotate(parameter: inspect.Parameter, hints: dict[str, Any]) -> inspect.Parameter:
    if isinstance(parameter.annotation, str):
        return parameter.replace(annotation=hints.get(parameter.name, Any))
    return parameter
