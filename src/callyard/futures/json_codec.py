"""The codec `json`: nothing is pickled, and nothing changes on its way.

A function is named by module and name, and imported in the executor. Arguments and results are what JSON gives back as
it was: None, bool, int, float, str, lists, dictionaries with text keys; and bytes, numpy arrays and tables, which go
beside the JSON. Whatever would come back as something else is refused, with its place.
"""

from __future__ import annotations

import builtins
import importlib
import math
import sys
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from callyard.functions import foreign
from callyard.functions.encoding import ResultMisfit
from callyard.functions.function import Function
from callyard.functions.packing import decode_crossing, encode_crossing
from callyard.functions.raised import text_of
from callyard.futures.raised import INITIALIZER_RAISED, RAISED, VALUE, Raised, builtin_exception
from callyard.futures.setup import Call

DEPTH_MAX: Final = 200
_INT_MIN: Final = -(1 << 63)
_INT_MAX: Final = (1 << 64) - 1
_WHY: Final = {
    tuple: "a tuple would arrive as a list",
    set: "a set would arrive as a list",
    frozenset: "a frozenset would arrive as a list",
    bytearray: "a bytearray would arrive as bytes",
    memoryview: "a memoryview would arrive as bytes",
    complex: "JSON has no complex numbers",
}


class JsonCodec:
    """The caller's end."""

    name: Final = "json"

    def admit(self, call: Call) -> bytes:
        """Raises TypeError or ValueError for what would not arrive as it is."""
        called, args, kwargs = call
        _check_arguments(args)
        for name, value in kwargs.items():
            check_unchanged(value, f"argument {name!r}")
        return _encode([name_of(called), list(args), kwargs], "an argument")

    def make_chunk(self, called: Callable[..., Any], rows: list[tuple[Any, ...]]) -> Call:
        for args in rows:
            _check_arguments(args)
        return run_named, (name_of(called), [list(args) for args in rows]), {}

    def write_call(self, kept: bytes) -> bytes:
        return kept

    def read_answer(self, answer: memoryview) -> tuple[int, Any]:
        tag, value = decode_crossing(bytes(answer))
        if tag == VALUE:
            return VALUE, value
        raised = msgspec.convert(value, Raised)
        return tag, raised.to_exception(_read_exception(raised))


def run_named(name: str, rows: list[list[Any]]) -> list[Any]:
    """Many calls of a function as one."""
    called = find(name)
    return [called(*args) for args in rows]


class JsonServing:
    """The executor's end."""

    def __init__(self) -> None:
        self._found: dict[str, Callable[..., Any]] = {}

    def read_call(self, call: bytes) -> Call:
        name, args, kwargs = decode_crossing(call)
        found = self._found.get(name)
        if found is None:
            found = self._found[name] = find(name)
        return found, tuple(args), kwargs

    def write_value(self, value: Any) -> bytes:
        check_unchanged(value, "the result")
        return _encode([VALUE, value], "the result")

    def write_raised(self, error: BaseException, *, initializer: bool = False) -> bytes:
        tag = INITIALIZER_RAISED if initializer else RAISED
        raised = Raised.of(error, _write_exception(error))
        return _encode([tag, msgspec.to_builtins(raised, builtin_types=(bytes,))], "the exception")


def name_of(called: Callable[..., Any]) -> str:
    """`module:qualified name`. Raises TypeError for a function that cannot be found by it."""
    module = getattr(called, "__module__", None) or ""
    qualname = getattr(called, "__qualname__", "")
    if module == "__main__":
        raise TypeError(
            f"{qualname or called!r} is defined in the script or notebook that runs, which executors do not import:"
            " put it into a module, or use codec='pickle'"
        )
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if not qualname or found is not called:
        raise TypeError(
            f"codec='json' finds functions by module and name, and {called!r} is not found there: write it as a def at"
            " the top of a module, or use codec='pickle'"
        )
    return f"{module}:{qualname}"


def find(name: str) -> Callable[..., Any]:
    """The function of a name. Raises as an import does."""
    module, _, qualname = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    called: Callable[..., Any] = found.target if isinstance(found, Function) else found
    return called


def _check_arguments(args: tuple[Any, ...]) -> None:
    for index, value in enumerate(args):
        check_unchanged(value, f"argument {index}")


def check_unchanged(value: Any, at: str, depth: int = 0) -> None:
    """Raise TypeError or ValueError, with the place, for what JSON would not give back as it was."""
    kind = type(value)
    if kind is str:
        if not value.isascii():
            _check_text(value, at)
    elif kind is bool or value is None or kind is bytes:
        return
    elif kind is int:
        if not _INT_MIN <= value <= _INT_MAX:
            raise ValueError(f"{at}: an int of {value.bit_length()} bits does not fit into 64")
    elif kind is float:
        if not math.isfinite(value):
            raise ValueError(f"{at}: JSON has no {value}")
    elif depth > DEPTH_MAX:
        raise ValueError(f"{at}: nested more than {DEPTH_MAX} deep, or it holds itself")
    elif kind is list:
        _check_parts(((f"{at}[{index}]", part) for index, part in enumerate(value)), depth)
    elif kind is dict:
        for key in value:
            if type(key) is not str:
                raise TypeError(f"{at}: the key {key!r} ({type(key).__name__}) would arrive as text")
            _check_text(key, at)
        _check_parts(((f"{at}[{key!r}]", part) for key, part in value.items()), depth)
    elif not foreign.is_plain(value):
        raise TypeError(f"{at}: {_why(kind)}; pass what JSON has, or use codec='pickle'")
    elif foreign.library_of(value) == "numpy" and not value.dtype.isnative:
        raise TypeError(
            f"{at}: an array of {value.dtype.str} would arrive in the machine's own byte order: turn it first"
        )


def _check_parts(parts: Iterable[tuple[str, Any]], depth: int) -> None:
    for at, part in parts:
        check_unchanged(part, at, depth + 1)


def _check_text(text: str, at: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{at}: text with a lone surrogate at {error.start} is no UTF-8") from None


def _why(kind: type) -> str:
    return _WHY.get(kind) or f"a {kind.__module__}.{kind.__qualname__} would not arrive as one".replace("builtins.", "")


def _encode(value: Any, what: str) -> bytes:
    try:
        return encode_crossing(value)
    except ResultMisfit as error:
        raise TypeError(f"{what}: {error.message}") from error


def _write_exception(error: BaseException) -> bytes:
    """Arguments and notes of one of Python's own; those that JSON cannot give back are told by their text."""
    if type(error).__module__ != builtins.__name__:
        return b""
    args = list(error.args)
    try:
        check_unchanged(args, "args")
    except (TypeError, ValueError):
        args = [text_of(error)]
    notes = [note for note in getattr(error, "__notes__", ()) if isinstance(note, str)]
    return _encode([args, notes], "the exception")


def _read_exception(raised: Raised) -> BaseException | None:
    kind = builtin_exception(raised.type)
    if kind is None or not raised.body:
        return None
    args, notes = decode_crossing(raised.body)
    try:
        error = kind(*args)
    except TypeError:  # of those that want more than a text
        return None
    for note in notes:
        error.add_note(note)
    return error
