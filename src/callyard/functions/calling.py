"""Calls by function object: the function with its arguments as one value, and where a function of this process stands
in a bundle.

By name, arguments are one mapping or sequence and options stand beside it. By object, arguments are written as for the
function itself, so that type checkers see them; options then stand beside a `BoundCall`, where they cannot be taken for
arguments.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, overload

from callyard.functions.target import is_installed

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    from callyard.functions.bundle import Bundle
    from callyard.functions.outgoing import Outgoing

    R_co = TypeVar("R_co", covariant=True, default=Any)
    """What a call gives. A bare `Result` is one of `Any`."""
else:
    from typing import TypeVar

    R_co = TypeVar("R_co", covariant=True)

P = ParamSpec("P")
R = TypeVar("R")


class BoundCall(Generic[R_co]):
    """A function and the arguments of one call. Made by `bind`."""

    __slots__ = ("args", "function", "kwargs")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs

    def __repr__(self) -> str:
        shown = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.kwargs.items())]
        return f"{getattr(self.function, '__name__', self.function)}({', '.join(shown)})"


@overload
def bind(function: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs) -> BoundCall[R]: ...
@overload
def bind(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> BoundCall[R]: ...
def bind(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> BoundCall[Any]:
    """One call of `function` as a value, for calls with options: `worker.call(bind(assess, flight), budget_ms=500)`.

    Raises `TypeError` where the arguments do not fit the function's parameters, as calling it would.
    """
    if not callable(function):
        raise TypeError(f"bind takes a function, and options stand beside a name anyway; got {function!r}")
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except ValueError:  # of a function in C that does not say
        pass
    except TypeError as error:
        raise TypeError(f"{getattr(function, '__name__', function)}() {error}") from None
    return BoundCall(function, args, kwargs)


def encode_for(
    method: str,
    outgoing: Outgoing,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: Iterable[str],
    *,
    binary: bool = True,
) -> bytes:
    """The arguments of a call by function object, encoded. `options`: those of `method`; `binary`: see `encode_call`.

    Raises `TypeError` where they do not fit the function; an option among them is told where options stand. Raises
    `CallError` (schema) for what JSON cannot hold.
    """
    try:
        return outgoing.encode_call(args, kwargs, binary=binary)
    except TypeError as error:
        option = next((name for name in kwargs if name in options), None)
        if option is None:
            raise
        hint = f"options stand beside a bound call: {method}(bind({outgoing.name}, …), {option}=…)"
        raise TypeError(f"{error}; {hint}") from None


def find_home(function: Callable[..., Any], root: Path | None, bundle: Bundle | None) -> str:
    """`module:qualified name` of a function of this process, the module as executors name it.

    That of the bundle's file, below `root`, that it is written in, whatever leads to it. What is in none of them is by
    its module's own name, as executors import it from elsewhere too; no module where that name is another's: of another
    copy of a file, or of code that was made here and is in no file. Source: tool-dispatch D6.
    """
    qualname: str = getattr(function, "__qualname__", "")
    module: str = function.__module__
    file = find_file(function)
    if root is not None and bundle is not None:
        name = None if file is None else _find_bundled(file, root, bundle)
        if name is not None:
            module = name.partition(".")[0].replace("/", ".").removesuffix(".__init__")
        elif bundle.has_module(module):
            module = ""
    return f"{module}:{qualname}"


def _find_bundled(file: Path, root: Path, bundle: Bundle) -> str | None:
    """Which of the bundle's files it is, by links as well."""
    spelled = file.absolute()
    if spelled.is_relative_to(root) and (name := spelled.relative_to(root).as_posix()) in bundle.files:
        return name
    real = spelled.resolve()
    return next((name for name in bundle.files if name.endswith(real.suffix) and (root / name).resolve() == real), None)


def find_file(function: Callable[..., Any]) -> Path | None:
    """Where a function of this process is written; None: in no file that is there, as in a notebook's cell."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    module = sys.modules.get(function.__module__ or "")
    file = code.co_filename if code is not None else getattr(module, "__file__", None)
    return Path(file) if file is not None and os.path.isfile(file) and "ipykernel" not in file else None


def explain_no_function(given: object) -> str:
    """Why something is neither a function nor the name of one, and what to write instead."""
    if isinstance(given, BoundCall):
        return f"expected a function, and its arguments as rows, got the bound call of one: {given!r}"
    if isinstance(given, functools.partial):
        inner = getattr(given.func, "__name__", "the function")
        return (
            f"expected a function, or the name of one, got a partial of it: write bind({inner}, …) with all arguments"
        )
    return f"expected a function, or the name of one, got {given!r}"


def explain_stranger(function: Callable[..., Any], home: str, bundle: Bundle | None, names: Iterable[str]) -> str:
    """Why a function of this process is none of those that can be called, and what to do.

    `home`: by `find_home`. `bundle`: what a worker has; None: there are tools of this process only.
    """
    known = list(names)
    shown = f"there are: {', '.join(known[:10])}{', …' if len(known) > 10 else ''}" if known else "there are none"
    module, _, qualname = home.partition(":")
    if bundle is None:
        return f"{qualname} is none of the tools here: add it with @registry.tool; {shown}"
    if "<lambda>" in qualname or "<locals>" in qualname:
        return f"{qualname} has no name to be found by: write it as a def at the top of {bundle.name}; {shown}"
    file = find_file(function)
    if inspect.isbuiltin(function):
        return f"{qualname} is written in C, so that no signature or file says what it is: call it in a def of yours"
    if file is None:
        return (
            f"{qualname} was defined in a notebook cell or at a prompt, where executors cannot find it: put it into a"
            f" file (in a notebook: %%writefile functions.py), import it from there, and start with that file"
        )
    if not bundle.has_module(module):
        if is_installed(file):
            return f"{qualname} is of an installed package ({file}): call it in a def of {bundle.name}; {shown}"
        where = os.path.relpath(file)
        return (
            f"{qualname} is defined in {where}, which is no part of {bundle.name}, the target here: start with {where},"
            f" or declare it with @function and import it in {bundle.name}; {shown}"
        )
    return (
        f"{qualname} of {file.name} is not among the functions that can be called here: declare it with @function and"
        f" have it, or import it, in {bundle.name}; {shown}"
    )
