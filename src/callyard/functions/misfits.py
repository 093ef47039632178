"""Arguments that do not fit: what pydantic found, told in the words of the caller.

Each error has a JSON Pointer into the arguments as they came, what was expected and what came.
Source: tool-dispatch D4.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, Final

import jiter
import msgspec
from pydantic_core import ErrorDetails, ValidationError

from callyard.errors import CallyardError
from callyard.functions.encoding import describe_value, escape_token
from callyard.functions.type_hooks import struct_pointer

ERRORS_MAX: Final = 100
"""Most errors reported of one call (D4)."""
_ERRORS_SHOWN_MAX: Final = 5
"""So many errors stand in the message itself; of more, the first."""
_ERRORS_LISTED_MAX: Final = 20_000
"""Above it the errors are only counted: listing them would cost more memory than the arguments."""

_EXPECTED: Final[Mapping[str, str]] = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "int_parsing": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "decimal_type": "a decimal number",
    "decimal_parsing": "a decimal number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "none_required": "null",
    "list_type": "an array",
    "tuple_type": "an array",
    "set_type": "an array",
    "frozen_set_type": "an array",
    "dict_type": "an object",
    "mapping_type": "an object",
    "dataclass_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "arguments_type": "an object (keywords) or an array (positional)",
    "datetime_type": "a date and time",
    "date_type": "a date",
    "time_type": "a time",
    "time_delta_type": "a duration",
    "uuid_type": "a UUID",
    "uuid_parsing": "a UUID",
    "bytes_type": "text",
}
_STRUCT_WORDS: Final[Mapping[str, str]] = {
    "int": "an integer",
    "str": "a string",
    "float": "a number",
    "bool": "true or false",
    "array": "an array",
    "object": "an object",
}
_WORDS: Final = re.compile(rf"\b(?:{'|'.join(_STRUCT_WORDS)})\b")
_MISSING: Final = frozenset(
    {
        *("missing", "missing_argument", "missing_keyword_only_argument", "missing_positional_only_argument"),
    }
)
_UNKNOWN: Final = frozenset({"unexpected_keyword_argument", "extra_forbidden"})
_WITHOUT_VALUE: Final = frozenset({"value_error", "assertion_error"})


class ArgumentsMisfit(CallyardError):
    """Arguments that the function does not take: kind `schema`, and it did not run.

    `details`: `errors`, a list of `{pointer, message, type}` (at most `ERRORS_MAX`), `pointer`, the first one's, and
    `errors_total` when there are more.
    """

    def __init__(self, message: str, details: dict[str, Any]) -> None:
        super().__init__(message)
        self.message = message
        self.details = details


class Parameters(msgspec.Struct, frozen=True):
    """What a message may say of the function."""

    names: tuple[str, ...]
    """All that can be given by name."""
    positional: tuple[str, ...]
    required: tuple[str, ...]
    takes_any_number: bool = False
    """It has `*args`."""
    hint: str = ""
    """Added to an unknown name."""


class _Problem(msgspec.Struct):
    pointer: str
    message: str
    type: str


def misfit(message: str, kind: str, pointer: str = "") -> ArgumentsMisfit:
    """One error."""
    return _combine([_Problem(pointer, message, kind)], 1)


def loose_json(raw: bytes, error: ValueError) -> ArgumentsMisfit:
    """What a JSON parser refused: no JSON at all, or a key that stands twice."""
    problem = str(error)
    if problem.startswith("Detected duplicate key"):
        return misfit(f"a key stands twice: {problem.removeprefix('Detected duplicate key ')}", "duplicate_key")
    if "recursion limit" in problem:
        return misfit(f"nested too deeply: {problem.partition(' at ')[2]}", "too_deep")
    if not raw.strip():
        return misfit("expected JSON, got nothing", "json_invalid")
    advice = "; NaN and Infinity are not JSON: use null" if b"NaN" in raw or b"Infinity" in raw else ""
    return misfit(f"not JSON: {problem}{advice}", "json_invalid")


def raised_in_check(error: Exception) -> ArgumentsMisfit:
    """A validator of the user's raised something else than a ValueError."""
    if isinstance(error, RecursionError):
        return misfit("nested too deeply", "too_deep")
    try:
        text = f": {error}"
    except Exception:  # noqa: BLE001 - __str__ is user code
        text = ""
    return misfit(f"checking the arguments raised {type(error).__name__}{text}", "validator_raised")


def explain(error: ValidationError, raw: bytes, parameters: Parameters, *, empty: str = "") -> ArgumentsMisfit:
    """Turn pydantic's errors on the arguments `raw` into ours. `empty`: what to say of a value without text."""
    count = error.error_count()
    if count > _ERRORS_LISTED_MAX:
        return misfit(f"{count} values do not fit: too many to list", "too_many_errors")
    try:
        data = jiter.from_json(raw)
    except ValueError as broken:
        return loose_json(raw, broken)
    details = error.errors(include_url=False)
    problems: dict[str, _Problem] = {}
    if isinstance(data, list):
        details, arity = _take_arity(details, data, parameters)
        if arity is not None:
            problems[arity.pointer] = arity
    for detail in details:
        problem = _describe(detail, data, parameters, empty)
        same = problems.get(problem.pointer)
        if same is None:
            problems[problem.pointer] = problem
        elif problem.message not in same.message:  # the branches of a union fail at one place
            same.message = _either(same.message, problem.message)
    ordered = sorted(problems.values(), key=lambda problem: problem.type != "unexpected_keyword_argument")
    return _combine(ordered, len(problems))  # an unknown name first: it is often what is missing, misspelt


def _combine(problems: list[_Problem], total: int) -> ArgumentsMisfit:
    first = problems[0]
    shown = problems if total <= _ERRORS_SHOWN_MAX else [first]
    message = "; ".join(f"{one.pointer}: {one.message}" if one.pointer else one.message for one in shown)
    if total > len(shown):
        message += f" (and {total - 1} more)"
    details: dict[str, Any] = {
        "errors": [msgspec.to_builtins(problem) for problem in problems[:ERRORS_MAX]],
        "pointer": first.pointer,
    }
    if total > ERRORS_MAX:
        details["errors_total"] = total
    return ArgumentsMisfit(message, details)


def _take_arity(
    details: list[ErrorDetails], data: list[Any], parameters: Parameters
) -> tuple[list[ErrorDetails], _Problem | None]:
    """Positional arguments: too many or too few is one error, not one per argument."""
    known = ", ".join(parameters.positional)
    rest = [detail for detail in details if detail["type"] != "unexpected_positional_argument"]
    if len(rest) < len(details):
        most = len(parameters.positional)
        least = sum(name in parameters.required for name in parameters.positional)
        wanted = "no arguments" if most == 0 else f"{'' if least == most else 'at most '}{_plural(most)} ({known})"
        return rest, _Problem(f"/{most}", f"expected {wanted}, got {len(data)}", "unexpected_positional_argument")
    missing = [str(detail["loc"][-1]) for detail in details if detail["type"] in _MISSING and len(detail["loc"]) == 1]
    if not missing:
        return details, None
    rest = [detail for detail in details if not (detail["type"] in _MISSING and len(detail["loc"]) == 1)]
    least = len(parameters.required)
    every = "" if least == len(parameters.names) and not parameters.takes_any_number else "at least "
    message = f"expected {every}{_plural(least)} ({', '.join(parameters.required)}), got {len(data)}"
    return rest, _Problem("", f"{message}; missing: {', '.join(missing)}", "missing_argument")


def _describe(detail: ErrorDetails, data: Any, parameters: Parameters, empty: str) -> _Problem:
    kind = detail["type"]
    location = list(detail["loc"])
    if kind == "struct":
        location += struct_pointer(detail.get("ctx"))
    pointer = _pointer(location, data, keep_last=kind in _MISSING or kind in _UNKNOWN)
    if kind in _MISSING:
        return _Problem(pointer, "required, but missing", kind)
    if kind in _UNKNOWN:
        name = str(location[-1])
        if kind != "unexpected_keyword_argument":
            return _Problem(pointer, f"unknown field {name!r}", kind)
        close = difflib.get_close_matches(name, parameters.names, n=1)
        guess = f" (did you mean {close[0]}?)" if close else ""
        known = f"known: {', '.join(parameters.names)}" if parameters.names else "the function takes no arguments"
        return _Problem(pointer, f"unknown argument {name!r}{guess}; {known}{parameters.hint}", kind)
    value = _value_at(pointer, data, detail["input"])
    if empty and value == "" and pointer.count("/") == 1 and not kind.startswith("string"):
        return _Problem(pointer, f"required, but {empty}", kind)  # an optional one had been left out
    text = _phrase(kind, detail["msg"])
    if kind not in _WITHOUT_VALUE:
        text += f", got {describe_value(value)}"
    return _Problem(pointer, text, kind)


def _phrase(kind: str, message: str) -> str:
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind]}"
    message = message.removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if kind.startswith(("greater_than", "less_than", "multiple_of")):
        message = message.replace("Input should be ", "Input should be a number ")
    if message.startswith("Input should be "):
        return f"expected {message.removeprefix('Input should be ')}"
    if kind == "struct" and message.startswith("Expected "):
        wanted = message.removeprefix("Expected ").partition(", got ")[0]
        return f"expected {_WORDS.sub(lambda word: _STRUCT_WORDS[word[0]], wanted)}"
    return message if kind in _WITHOUT_VALUE else message[:1].lower() + message[1:]


def _either(first: str, second: str) -> str:
    head, comma, got = first.rpartition(", got ")
    wanted = second.rpartition(", got ")[0]
    if comma and head.startswith("expected ") and wanted.startswith("expected "):
        return f"{head} or {wanted.removeprefix('expected ')}, got {got}"
    return f"{first}; {second}"


def _pointer(location: list[str | int], data: Any, *, keep_last: bool) -> str:
    """JSON Pointer of a pydantic location, which also names union branches: what is not in the data is left out."""
    tokens: list[str] = []
    last = len(location) - 1
    for position, part in enumerate(location):
        if isinstance(data, dict) and str(part) in data:
            data = data[str(part)]
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        elif not (keep_last and position == last):
            continue
        tokens.append(f"/{escape_token(part)}")
    return "".join(tokens)


def _value_at(pointer: str, data: Any, default: Any) -> Any:
    """The value as it was sent; pydantic's `input` may already be the work of a validator."""
    for token in pointer.split("/")[1:]:
        name = token.replace("~1", "/").replace("~0", "~")
        if isinstance(data, dict) and name in data:
            data = data[name]
        elif isinstance(data, list) and name.isdigit() and int(name) < len(data):
            data = data[int(name)]
        else:
            return default
    return data


def _plural(count: int) -> str:
    return f"{count} argument" if count == 1 else f"{count} arguments"
