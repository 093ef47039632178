"""Arguments and results against a JSON Schema: compiled once, every error reported, in the words of `misfits`.

The schema is checked when it is given: an object at the root, no reference that leaves it, no pattern that a
linear-time engine cannot run, nothing that is only almost JSON Schema. Nothing is ever fetched.
Source: tool-dispatch D1, D3, D4.

Cost: listing errors costs some 20 µs each, and the validator lists all or none. So of a large value only a part is
looked through for its errors, and a whole one only for the first (`_list_errors`).
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import jsonschema_rs

from callyard.functions.encoding import describe_value, escape_token, to_pointer
from callyard.functions.misfits import Problem, combine, either, missing, unknown, value_at
from callyard.functions.schema_text import (
    LATEST,
    BadSchema,
    SchemaChange,
    draft_of,
    normalize_schema,
    subschemas,
    to_plain,
)

__all__ = ["BadSchema", "JsonSchema", "SchemaChange", "normalize_schema"]

_VALIDATORS: Final[Mapping[int, Any]] = {
    4: jsonschema_rs.Draft4Validator,
    6: jsonschema_rs.Draft6Validator,
    7: jsonschema_rs.Draft7Validator,
    2019: jsonschema_rs.Draft201909Validator,
    LATEST: jsonschema_rs.Draft202012Validator,
}
_PARTS_LOOKED_THROUGH_MAX: Final = 2_000
"""Of a value with more parts than this, errors are listed for these first ones only."""
_TEXT_SHOWN_MAX: Final = 200
_FORMS_SHOWN_MAX: Final = 4
_IN_PLACE: Final = ("$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas")
_CLOSING: Final = ("additionalProperties", "unevaluatedProperties")
_NOT_LINEAR: Final[Mapping[str, str]] = {
    **dict.fromkeys(("(?=", "(?!", "(?<=", "(?<!"), "look-around"),
    **dict.fromkeys((*(rf"\{digit}" for digit in range(1, 10)), r"\k<"), "back-references"),
    **dict.fromkeys(("(?>", "(?("), "atomic groups and conditions"),
}

Formats = Mapping[str, Callable[[str], bool]]


class JsonSchema:
    """A compiled schema. Raises `BadSchema` when built of one that cannot be used."""

    def __init__(self, schema: Any, *, object_root: bool = True, subject: str = "schema") -> None:
        """`object_root`: it describes arguments, or a result that is an object. `subject` names it in messages."""
        plain = to_plain(schema, subject)
        mended, changes = normalize_schema(plain, object_root=object_root)
        if changes:
            problems = [(change.pointer, _refusal(plain, change)) for change in changes]
            raise BadSchema(problems, subject, "; normalize_schema(…) mends this and lists its changes")
        expected = 'expected a schema of an object, {"type": "object", …}'
        if not isinstance(mended, dict):
            raise BadSchema([("", f"{expected}, got {_shorten(repr(mended))}")], subject)
        if object_root and mended.get("type") != "object":
            raise BadSchema([("/type", f"{expected}, got {_shorten(repr(mended.get('type')))}")], subject)
        self.schema: dict[str, Any] = mended
        draft = draft_of(mended) or LATEST
        dangling = list(_find_dangling(mended, draft))
        if dangling:
            raise BadSchema(dangling, subject)
        self._validator = _compile(_close(mended, draft) if object_root else mended, draft, subject)

    @classmethod
    def described(cls, schema: dict[str, Any], formats: Formats, keywords: Mapping[str, Any]) -> JsonSchema:
        """Of a function's own signature: `schema` comes from our generator, formats and patterns are pydantic's.

        Raises `BadSchema`.
        """
        made = cls.__new__(cls)
        made.schema = schema
        made._validator = _compile(schema, LATEST, "described schema", formats=formats, keywords=keywords)
        return made

    def fits(self, value: Any) -> bool:
        """`value`: plain JSON values."""
        fits: bool = self._validator.is_valid(value)
        return fits

    def check(self, value: Any) -> None:
        """Raises `ArgumentsMisfit` with every error."""
        if not self._validator.is_valid(value):
            errors, complete = self.list_errors(value)
            raise combine(self._find_problems(errors, value), complete=complete)

    def _find_problems(self, errors: list[Any], value: Any) -> list[Problem]:
        told = [error for error in errors if error.kind.name != "unevaluatedProperties"]
        problems = [problem for error in told or errors for problem in self._explain(error, value)]
        return _merge(problems)  # what failed beside it may be why a property was not evaluated

    def list_errors(self, value: Any) -> tuple[list[Any], bool]:
        """The validator's own errors, and whether they are all there are.

        The validator leaves keys that are empty texts out of its places, so below such a key a pointer is too short.
        """
        cut: list[tuple[str | int, ...]] = []
        part = _cut(value, cut)
        errors = list(self._validator.iter_errors(part))
        if not cut:
            return errors, True
        errors = [error for error in errors if not _is_doubtful(tuple(error.instance_path), cut)]
        if not errors:
            try:
                self._validator.validate(value)
            except jsonschema_rs.ValidationError as error:
                return [error], False
        return errors, False

    def _explain(self, error: Any, value: Any) -> Iterator[Problem]:
        place: list[str | int] = error.instance_path
        pointer = to_pointer(place)
        kind = error.kind
        name: str = kind.name
        if name == "required":
            yield missing(f"{pointer}/{escape_token(kind.property)}")
        elif name in _CLOSING:
            for extra in kind.unexpected:
                known = tuple(self.schema.get("properties", ())) if not place else None
                yield unknown(f"{pointer}/{escape_token(extra)}", extra, known)
        elif name in ("anyOf", "oneOf") and getattr(kind, "context", None):
            yield from self._explain_forms(error, value)
        elif name == "propertyNames":
            inner = list(self._explain(kind.error, value))
            for problem in inner[:1]:
                yield Problem(pointer, name, f"a key does not fit: {problem.message}", problem.expected)
        else:
            found = _value_at(place, value)
            expected = _expect(name, kind, error)
            yield Problem(pointer, name, f"expected {expected}, got {describe_value(found)}", expected)

    def _explain_forms(self, error: Any, value: Any) -> Iterator[Problem]:
        """A value that fits none of several forms: the errors of the one it was meant to have, if that is clear."""
        place: list[str | int] = error.instance_path
        forms: list[list[Any]] = [form for form in error.kind.context if form]
        if not forms:  # oneOf, and more than one fits
            expected = "exactly one of its forms"
            text = f"expected {expected}, got {describe_value(_value_at(place, value))}, which fits several"
            yield Problem(to_pointer(place), error.kind.name, text, expected)
            return
        meant = [form for form in forms if not any(_is_of_another_form(inner, len(place)) for inner in form)]
        if len(meant) == 1:
            for inner in meant[0]:
                yield from self._explain(inner, value)
            return
        choices = [_merge(problem for inner in form for problem in self._explain(inner, value)) for form in forms]
        pointer = to_pointer(place)
        if all(len(choice) == 1 and choice[0].pointer == pointer for choice in choices):
            joined = choices[0][0]
            for choice in choices[1:]:
                if choice[0].expected != joined.expected:
                    joined = either(joined, choice[0])
            yield joined
            return
        words = ["; ".join(_shown(problem, pointer) for problem in choice[:2]) for choice in choices[:_FORMS_SHOWN_MAX]]
        text = f"fits none of {len(forms)} forms: {' | '.join(words)}"
        yield Problem(pointer, error.kind.name, text[:1_000], f"one of {len(forms)} forms")


def _refusal(plain: Any, change: SchemaChange) -> str:
    return f"expected {change.why}, got {_shorten(repr(value_at(change.pointer, plain, None)))}"


def _compile(
    schema: dict[str, Any],
    draft: int,
    subject: str,
    *,
    formats: Formats | None = None,
    keywords: Mapping[str, Any] | None = None,
) -> Any:
    try:
        return _VALIDATORS[draft](
            schema,
            validate_formats=True,
            offline=True,
            pattern_options=jsonschema_rs.RegexOptions(),
            formats=None if formats is None else dict(formats),
            keywords=None if keywords is None else dict(keywords),
        )
    except jsonschema_rs.ValidationError as error:
        pointer = to_pointer(error.instance_path)
        raise BadSchema([(pointer, _explain_bad_schema(error, pointer))], subject) from None
    except jsonschema_rs.ReferencingError as error:
        raise BadSchema([("", str(error))], subject) from None
    except ValueError as error:  # too deep for it
        raise BadSchema([("", f"{error}: move parts of it to $defs")], subject) from None


def _explain_bad_schema(error: Any, pointer: str) -> str:
    found = error.instance
    if error.kind.name == "format" and error.kind.format == "regex":
        reason = next((why for sign, why in _NOT_LINEAR.items() if sign in str(found)), None)
        if reason is not None:
            return f"expected a pattern for a linear-time engine, which has no {reason}, got {_shorten(repr(found))}"
        return f"expected a regular expression of moderate size, got {_shorten(repr(found))}"
    if error.kind.name == "anyOf" and pointer.endswith("/type"):
        names = "object, array, string, number, integer, boolean, null"
        return f"expected one of {names}, or a list of these, got {_shorten(repr(found))}"
    if error.kind.name == "referencing":
        return str(error.message).partition("\n")[0]
    expected = _expect(error.kind.name, error.kind, error)
    return f"expected {expected}, got {_shorten(repr(found))}"


def _close(schema: dict[str, Any], draft: int) -> dict[str, Any]:
    """A root that names its properties and does not say what becomes of others takes no others (D4).

    What stands in place beside them (allOf, $ref, …) may name some as well; drafts before 2019-09 cannot say so.
    """
    if "properties" not in schema or any(keyword in schema for keyword in (*_CLOSING, "patternProperties")):
        return schema
    if draft <= 7 and "$ref" in schema:
        return schema
    if not any(keyword in schema for keyword in (*_IN_PLACE, "dependencies")):
        return {**schema, "additionalProperties": False}
    return {**schema, "unevaluatedProperties": False} if draft >= 2019 else schema


# --- references -----------------------------------------------------------------------------------------------------


def _find_dangling(schema: dict[str, Any], draft: int) -> Iterator[tuple[str, str]]:
    """References that lead nowhere, or out of the schema."""
    id_keyword = "id" if draft <= 4 else "$id"
    resources: dict[str, dict[str, Any]] = {}
    anchors: set[tuple[str, str]] = set()
    references: list[tuple[str, str, str]] = []  # pointer, base, reference
    waiting: list[tuple[str, str, dict[str, Any]]] = [("", "", schema)]
    while waiting:
        pointer, base, part = waiting.pop()
        own = part.get(id_keyword)
        if isinstance(own, str) and not (draft <= 7 and "$ref" in part):
            if own.startswith("#"):
                anchors.add((base, own[1:]))
            else:
                base = urllib.parse.urljoin(base, own).rstrip("#")
                resources[base] = part
        if not pointer:
            resources.setdefault(base, part)
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(part.get(keyword), str):
                anchors.add((base, part[keyword]))
        for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
            if isinstance(part.get(keyword), str):
                references.append((f"{pointer}/{keyword}", base, part[keyword]))
        waiting += [(pointer + below, base, inner) for below, inner in subschemas(part)]
    for pointer, base, reference in references:
        target, _, fragment = urllib.parse.urljoin(base, reference).partition("#")
        if target == "" or reference.startswith("#"):
            target = base
        fragment = urllib.parse.unquote(fragment)
        resource = resources.get(target)
        if resource is None:
            if target.partition("://")[2].startswith("json-schema.org/"):
                continue  # the meta-schemas, which the validator holds
            yield pointer, f"expected a place in this schema, such as #/$defs/…, got {_shorten(repr(reference))}"
        elif fragment.startswith("/"):
            if not _leads_somewhere(resource, fragment):
                yield pointer, f"leads nowhere: there is no {_shorten(fragment)}"
        elif fragment and (target, fragment) not in anchors:
            yield pointer, f"leads nowhere: there is no anchor {_shorten(fragment)}"


def _leads_somewhere(root: Any, fragment: str) -> bool:
    for token in fragment.split("/")[1:]:
        name = token.replace("~1", "/").replace("~0", "~")
        if isinstance(root, dict) and name in root:
            root = root[name]
        elif isinstance(root, list) and name.isdigit() and int(name) < len(root):
            root = root[int(name)]
        else:
            return False
    return isinstance(root, dict | bool)


# --- errors ---------------------------------------------------------------------------------------------------------

_TYPE_WORDS: Final[Mapping[str, str]] = {
    "object": "an object",
    "array": "an array",
    "string": "a string",
    "number": "a number",
    "integer": "an integer",
    "boolean": "true or false",
    "null": "null",
}
_LIMITS: Final[Mapping[str, str]] = {
    "minimum": "a number greater than or equal to {}",
    "maximum": "a number less than or equal to {}",
    "exclusiveMinimum": "a number greater than {}",
    "exclusiveMaximum": "a number less than {}",
    "minLength": "text of at least {} characters",
    "maxLength": "text of at most {} characters",
    "minItems": "an array of at least {}",
    "maxItems": "an array of at most {}",
    "minProperties": "an object of at least {}",
    "maxProperties": "an object of at most {}",
}


def _expect(keyword: str, kind: Any, error: Any) -> str:
    """What a keyword asks for, in words."""
    if keyword == "type":
        names: Sequence[str] = sorted(kind.types, key=lambda name: name == "null")  # null reads best as the last
        return " or ".join(_TYPE_WORDS.get(name, name) for name in names)
    if keyword in _LIMITS:
        return _LIMITS[keyword].format(kind.limit)
    if keyword == "enum":
        return f"one of {_shorten(', '.join(_word(option) for option in kind.options))}"
    if keyword == "const":
        return _shorten(_word(kind.expected_value))
    if keyword == "multipleOf":
        return f"a multiple of {kind.multiple_of}"
    if keyword == "pattern":
        pattern = getattr(kind, "pattern", None) or getattr(kind, "message", "")
        return f"text that matches {_shorten(repr(pattern))}"
    if keyword == "format":
        return f"text in the form of a {kind.format}"
    if keyword == "uniqueItems":
        return "an array in which nothing stands twice"
    if keyword == "contains":
        return "an array with such items as its schema asks for"
    if keyword == "falseSchema":
        return "nothing here"
    if keyword == "not":
        return "anything but what its schema excludes"
    if keyword in ("additionalItems", "unevaluatedItems"):
        return "fewer items"
    return str(error.message).partition("\n")[0][:_TEXT_SHOWN_MAX]


def _is_of_another_form(error: Any, depth: int) -> bool:
    """Whether it says that the value is of another type, or carries another tag, than this form has."""
    below = len(error.instance_path) - depth
    return (below == 0 and error.kind.name in ("type", "const", "enum")) or (below == 1 and error.kind.name == "const")


def _merge(problems: Iterable[Problem]) -> list[Problem]:
    """One problem for each place."""
    found: dict[str, Problem] = {}
    for problem in problems:
        same = found.get(problem.pointer)
        if same is None:
            found[problem.pointer] = problem
        elif problem.message not in same.message:
            text = f"{same.message}; {problem.message}"
            found[problem.pointer] = Problem(
                same.pointer, same.keyword, text, f"{same.expected}, and {problem.expected}"
            )
    return list(found.values())


def _cut(value: Any, cut: list[tuple[str | int, ...]]) -> Any:
    """The first `_PARTS_LOOKED_THROUGH_MAX` parts of `value`; `cut`: the places where something was left out."""
    left = _PARTS_LOOKED_THROUGH_MAX

    def copy(part: Any, place: tuple[str | int, ...]) -> Any:
        nonlocal left
        if isinstance(part, dict):
            kept: dict[str, Any] = {}
            for name, inner in part.items():
                if left <= 0:
                    cut.append(place)
                    break
                left -= 1
                kept[name] = copy(inner, (*place, name))
            return kept
        if isinstance(part, list):
            items: list[Any] = []
            for position, inner in enumerate(part):
                if left <= 0:
                    cut.append(place)
                    break
                left -= 1
                items.append(copy(inner, (*place, position)))
            return items
        return part

    return copy(value, ())


def _is_doubtful(place: tuple[str | int, ...], cut: Iterable[tuple[str | int, ...]]) -> bool:
    """An error at or above a place that lost parts may be one of the cut, not of the value."""
    return any(other[: len(place)] == place for other in cut)


def _value_at(place: Iterable[str | int], value: Any) -> Any:
    for token in place:
        try:
            value = value[token]
        except (KeyError, IndexError, TypeError):  # a key itself, which propertyNames looks at
            return token
    return value


def _shown(problem: Problem, above: str) -> str:
    below = problem.pointer.removeprefix(above)
    return f"{below}: {problem.message}" if below else problem.message


def _word(value: Any) -> str:
    return repr(value) if isinstance(value, str) else "null" if value is None else str(value)


def _shorten(text: str) -> str:
    return text if len(text) <= _TEXT_SHOWN_MAX else f"{text[: _TEXT_SHOWN_MAX - 1]}…"
