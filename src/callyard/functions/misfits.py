"""Arguments that do not fit: what a validator found, told in the words of the caller.

One form for every validator: a JSON Pointer into the arguments as they came, the keyword of JSON Schema that says no,
what was expected, what came. Pydantic's errors are turned into it here, those of a JSON Schema in `json_schema`.
Source: tool-dispatch D4.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import jiter
import msgspec

from callyard.errors import CallyardError
from callyard.functions.encoding import describe_value, escape_token

if TYPE_CHECKING:  # a worker has arguments that do not fit as well, and no pydantic
    from pydantic_core import ErrorDetails, ValidationError

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
    "bytes_type": "base64 text",
    "bytes_invalid_encoding": "base64 text",
}
_EXAMPLES: Final[Mapping[str, str]] = {
    "date_parsing": "a date such as 2024-05-31",
    "date_from_datetime_parsing": "a date such as 2024-05-31",
    "datetime_parsing": "a date and time such as 2024-05-31T08:30:00",
    "datetime_from_date_parsing": "a date and time such as 2024-05-31T08:30:00",
    "time_parsing": "a time such as 08:30:00",
    "time_delta_parsing": "a duration such as PT5M or 00:05:00",
}
"""What a text should look like; what pydantic found wrong with it follows."""
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
_WITHOUT_VALUE: Final = frozenset({"value_error", "assertion_error", "crossing"})
_ANY_VALUE: Final = "a value"
_KEYWORDS: Final[Mapping[str, str]] = {
    **dict.fromkeys(_MISSING, "required"),
    **dict.fromkeys(_UNKNOWN, "additionalProperties"),
    **dict.fromkeys(_EXPECTED, "type"),
    **dict.fromkeys(("datetime_parsing", "datetime_from_date_parsing", "date_parsing"), "format"),
    **dict.fromkeys(("date_from_datetime_parsing", "date_from_datetime_inexact", "time_parsing"), "format"),
    **dict.fromkeys(("time_delta_parsing", "uuid_parsing", "uuid_version", "url_parsing", "url_scheme"), "format"),
    "literal_error": "enum",
    "enum": "enum",
    "greater_than": "exclusiveMinimum",
    "greater_than_equal": "minimum",
    "less_than": "exclusiveMaximum",
    "less_than_equal": "maximum",
    "multiple_of": "multipleOf",
    "string_too_short": "minLength",
    "string_too_long": "maxLength",
    "bytes_too_short": "minLength",
    "bytes_too_long": "maxLength",
    "string_pattern_mismatch": "pattern",
    "too_short": "minItems",
    "too_long": "maxItems",
    "unexpected_positional_argument": "maxItems",
    "union_tag_invalid": "oneOf",
    "union_tag_not_found": "oneOf",
    "struct": "type",
    **dict.fromkeys(("value_error", "assertion_error"), "validator"),
    "crossing": "type",
}
"""Pydantic's kinds by the keyword of JSON Schema that says the same. The others keep their own name."""


class Problem(msgspec.Struct, frozen=True):
    """One thing that does not fit."""

    pointer: str
    """JSON Pointer into the arguments as they came; empty: the whole."""
    keyword: str
    """Of JSON Schema: `type`, `required`, `additionalProperties`, …; where it has none, a word of ours: `json`,
    `duplicate_key`, `too_deep`, `too_large`, `validator`."""
    message: str
    expected: str
    """What would have fitted, in words."""


class ArgumentsMisfit(CallyardError):
    """Arguments that the function does not take: kind `schema`, and it did not run.

    `details`: `errors`, a list of `{pointer, keyword, message, expected}` (at most `ERRORS_MAX`), `pointer`, the first
    one's, and `errors_total` when there are more.
    """

    def __init__(self, message: str, details: dict[str, Any]) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    @property
    def problems(self) -> list[Problem]:
        return [Problem(**error) for error in self.details["errors"]]


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


def misfit(message: str, keyword: str, pointer: str = "", *, expected: str = "") -> ArgumentsMisfit:
    """One error."""
    return combine([Problem(pointer, keyword, message, expected or _expectation(message))])


def loose_json(raw: bytes, error: ValueError) -> ArgumentsMisfit:
    """What a JSON parser refused: no JSON at all, or a key that stands twice."""
    problem = str(error)
    if problem.startswith("Detected duplicate key"):
        text = f"a key stands twice: {problem.removeprefix('Detected duplicate key ')}"
        return misfit(text, "duplicate_key", expected="each key once")
    if "recursion limit" in problem:
        return misfit(f"nested too deeply: {problem.partition(' at ')[2]}", "too_deep", expected="fewer levels")
    if not raw.strip():
        return misfit("expected JSON, got nothing", "json")
    advice = "; NaN and Infinity are not JSON: use null" if b"NaN" in raw or b"Infinity" in raw else ""
    return misfit(f"not JSON: {problem}{advice}", "json", expected="JSON")


def raised_in_check(error: Exception) -> ArgumentsMisfit:
    """A validator of the user's raised something else than a ValueError."""
    if isinstance(error, RecursionError):
        return misfit("nested too deeply", "too_deep", expected="fewer levels")
    try:
        text = f": {error}"
    except Exception:  # noqa: BLE001 - __str__ is user code
        text = ""
    message = f"checking the arguments raised {type(error).__name__}{text}"
    return misfit(message, "validator", expected="arguments that its own checks take")


def explain(error: ValidationError, raw: bytes, parameters: Parameters, *, empty: str = "") -> ArgumentsMisfit:
    """Turn pydantic's errors on the arguments `raw` into ours. `empty`: what to say of a value without text."""
    count = error.error_count()
    if count > _ERRORS_LISTED_MAX:
        return misfit(f"{count} values do not fit: too many to list", "too_many_errors", expected="values that fit")
    try:
        data = jiter.from_json(raw)
    except ValueError as broken:
        return loose_json(raw, broken)
    details = error.errors(include_url=False)
    problems: dict[str, Problem] = {}
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
            problems[problem.pointer] = either(same, problem)
    return combine(list(problems.values()))


def combine(problems: list[Problem], *, complete: bool = True) -> ArgumentsMisfit:
    """Several errors as one exception. An unknown name stands first: it is often what is missing, misspelt.

    `complete`: there are no others; else `errors_total` counts those that were found, and `errors_complete` is false.
    """
    total = len(problems)
    problems = sorted(problems, key=lambda one: one.keyword != "additionalProperties" or one.pointer.count("/") > 1)
    first = problems[0]
    shown = problems if total <= _ERRORS_SHOWN_MAX else [first]
    message = "; ".join(f"{one.pointer}: {one.message}" if one.pointer else one.message for one in shown)
    if total > len(shown):
        message += f" (and {total - 1} more)"
    details: dict[str, Any] = {
        "errors": [msgspec.to_builtins(problem) for problem in problems[:ERRORS_MAX]],
        "pointer": first.pointer,
    }
    if total > ERRORS_MAX or not complete:
        details["errors_total"] = total
    if not complete:
        message += "; there may be more"
        details["errors_complete"] = False
    return ArgumentsMisfit(message, details)


def retell(error: ArgumentsMisfit, tell: Callable[[str], str]) -> ArgumentsMisfit:
    """The same misfit with its texts as `tell` says them."""
    problems = [Problem(one.pointer, one.keyword, tell(one.message), tell(one.expected)) for one in error.problems]
    told = combine(problems)
    return ArgumentsMisfit(told.message, {**error.details, "errors": told.details["errors"]})


def _take_arity(
    details: list[ErrorDetails], data: list[Any], parameters: Parameters
) -> tuple[list[ErrorDetails], Problem | None]:
    """Positional arguments: too many or too few is one error, not one per argument."""
    known = ", ".join(parameters.positional)
    rest = [detail for detail in details if detail["type"] != "unexpected_positional_argument"]
    if len(rest) < len(details):
        most = len(parameters.positional)
        least = sum(name in parameters.required for name in parameters.positional)
        wanted = "no arguments" if most == 0 else f"{'' if least == most else 'at most '}{_plural(most)} ({known})"
        return rest, Problem(f"/{most}", "maxItems", f"expected {wanted}, got {len(data)}", wanted)
    missing = [str(detail["loc"][-1]) for detail in details if detail["type"] in _MISSING and len(detail["loc"]) == 1]
    if not missing:
        return details, None
    rest = [detail for detail in details if not (detail["type"] in _MISSING and len(detail["loc"]) == 1)]
    least = len(parameters.required)
    every = "" if least == len(parameters.names) and not parameters.takes_any_number else "at least "
    wanted = f"{every}{_plural(least)} ({', '.join(parameters.required)})"
    message = f"expected {wanted}, got {len(data)}; missing: {', '.join(missing)}"
    return rest, Problem("", "required", message, wanted)


def _describe(detail: ErrorDetails, data: Any, parameters: Parameters, empty: str) -> Problem:
    kind = detail["type"]
    keyword = _KEYWORDS.get(kind, kind)
    location = list(detail["loc"])
    if kind == "struct":
        from callyard.functions.type_hooks import struct_pointer  # with pydantic, which found the error

        location += struct_pointer(detail.get("ctx"))
    pointer = _pointer(location, data, keep_last=kind in _MISSING or kind in _UNKNOWN)
    if kind in _MISSING:
        return missing(pointer)
    if kind in _UNKNOWN:
        named = kind == "unexpected_keyword_argument"
        return unknown(pointer, str(location[-1]), parameters.names if named else None, parameters.hint)
    value = value_at(pointer, data, detail["input"])  # as it was sent; `input` may be the work of a validator
    if empty and value == "" and pointer.count("/") == 1 and not kind.startswith("string"):
        return Problem(pointer, "required", f"required, but {empty}", _ANY_VALUE)  # an optional one had been left out
    text = _phrase(kind, detail["msg"])
    if kind in _WITHOUT_VALUE:
        return Problem(pointer, keyword, text, text)
    return Problem(pointer, keyword, f"{text}, got {describe_value(value)}", _expectation(text))


def missing(pointer: str) -> Problem:
    """A value that must be there."""
    return Problem(pointer, "required", "required, but missing", _ANY_VALUE)


def unknown(pointer: str, name: str, known: Sequence[str] | None, hint: str = "") -> Problem:
    """A name that nothing takes. `known`: those of the function's arguments; None: it is a field of some value."""
    if known is None:
        return Problem(pointer, "additionalProperties", f"unknown field {name!r}", "no such field")
    close = difflib.get_close_matches(name, known, n=1)
    guess = f" (did you mean {close[0]}?)" if close else ""
    names = ", ".join(known)
    told = f"known: {names}" if known else "the function takes no arguments"
    message = f"unknown argument {name!r}{guess}; {told}{hint}"
    return Problem(pointer, "additionalProperties", message, f"one of {names}" if known else "no arguments")


def _expectation(text: str) -> str:
    """What `expected …, got …` says was expected; a text of another form as a whole."""
    wanted = text.rpartition(", got ")[0] or text
    return wanted.removeprefix("expected ")


def _phrase(kind: str, message: str) -> str:
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind]}"
    message = message.removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if kind.startswith(("greater_than", "less_than", "multiple_of")):
        message = message.replace("Input should be ", "Input should be a number ")
    if kind in _EXAMPLES:
        return f"expected {_EXAMPLES[kind]} ({message.partition(', ')[2]})"
    if message.startswith("Input should be "):
        return f"expected {message.removeprefix('Input should be ')}"
    if kind == "struct" and message.startswith("Expected "):
        wanted = message.removeprefix("Expected ").partition(", got ")[0]
        return f"expected {_WORDS.sub(lambda word: _STRUCT_WORDS[word[0]], wanted)}"
    return message if kind in _WITHOUT_VALUE else message[:1].lower() + message[1:]


def either(first: Problem, second: Problem) -> Problem:
    """Two errors at one place as one: what either of two forms would have taken."""
    head, comma, got = first.message.rpartition(", got ")
    wanted = second.message.rpartition(", got ")[0]
    if comma and head.startswith("expected ") and wanted.startswith("expected "):
        message = f"{head} or {wanted.removeprefix('expected ')}, got {got}"
    else:
        message = f"{first.message}; {second.message}"
    keyword = first.keyword if first.keyword == second.keyword else "anyOf"
    return Problem(first.pointer, keyword, message, f"{first.expected} or {second.expected}")


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


def value_at(pointer: str, data: Any, default: Any) -> Any:
    """What stands at a place of `data`; `default`: there is no such place."""
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
