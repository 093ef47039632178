"""What a function tells of itself: JSON Schemas, signature, docstring."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Literal, Optional, Union

import msgspec
import pytest
from pydantic import BaseModel, Field

from callyard.functions.docstrings import Docstring, read_docstring
from callyard.functions.signature import Invocable, UnfitSignature


@dataclass
class Node:
    name: str
    children: list[Node]


class Inner(msgspec.Struct):
    at: dt.datetime
    more: list[Inner] = []


class Outer(msgspec.Struct, tag=True):
    inner: Inner
    discriminator: str = ""


class Model(BaseModel):
    level: Annotated[int, Field(ge=1, le=5)] = 1


def search(query: str, /, limit: int = 10, *, exact: bool = False) -> list[str]:
    """Find what was asked for.

    Goes through all of it.

    Args:
        query: What to look for,
            in plain words.
        limit (int): Most results.

    Returns:
        The names.
    """
    return [query] * limit if exact else []


@pytest.mark.requirement("D2")
def test_the_input_schema_is_an_object_by_name() -> None:
    assert Invocable("search", search).input_schema() == {
        "type": "object",
        "properties": {
            "query": {"title": "Query", "type": "string", "description": "What to look for, in plain words."},
            "limit": {"title": "Limit", "type": "integer", "default": 10, "description": "Most results."},
            "exact": {"title": "Exact", "type": "boolean", "default": False},
        },
        "required": ["query"],
        "additionalProperties": False,
    }


def test_the_input_schema_of_variadic_parameters() -> None:
    def gather(*names: str, **limits: int) -> None: ...

    schema = Invocable("gather", gather).input_schema()
    assert schema["additionalProperties"] == {"type": "integer"}
    assert schema["properties"] == {}


@pytest.mark.requirement("D2")
def test_recursive_types_and_structs_in_the_input_schema() -> None:
    def grow(node: Node, outer: Outer | None = None) -> None: ...

    schema = Invocable("grow", grow).input_schema()
    assert schema["$defs"]["Node"]["properties"]["children"]["items"] == {"$ref": "#/$defs/Node"}
    outer = next(branch for branch in schema["properties"]["outer"]["anyOf"] if branch.get("title") == "Outer")
    assert outer["properties"]["inner"]["properties"]["at"]["type"] == "string"
    assert outer["properties"]["inner"]["properties"]["more"]["items"] == {"type": "object", "title": "Inner"}
    assert outer["properties"]["discriminator"]["type"] == "string"
    assert outer["properties"]["type"] == {"enum": ["Outer"]}


def test_a_default_that_is_no_json_is_left_out_without_a_warning() -> None:
    def late(zone: Any = object(), at: dt.datetime = dt.datetime(2013, 1, 1)) -> None: ...  # noqa: B008

    properties = Invocable("late", late).input_schema()["properties"]
    assert "default" not in properties["zone"]
    assert properties["at"]["default"] == "2013-01-01T00:00:00"


def test_a_parameter_without_a_json_schema_is_refused() -> None:
    def hook(callback: Callable[[], int]) -> None: ...

    with pytest.raises(UnfitSignature, match=r"hook: .*Cannot generate a JsonSchema"):
        Invocable("hook", hook).input_schema()


@pytest.mark.parametrize(
    ("annotation", "schema"),
    [
        (float, {"type": "number"}),
        (None, {"type": "null"}),
        (dict[str, int], {"type": "object", "additionalProperties": {"type": "integer"}}),
        (Any, {}),
        (object, {}),
        (msgspec.Raw, {}),
    ],
    ids=str,
)
def test_the_output_schema(annotation: Any, schema: dict[str, Any]) -> None:
    def give() -> Any: ...

    give.__annotations__["return"] = annotation
    assert Invocable("give", give).output_schema() == schema


def test_no_return_annotation_promises_nothing() -> None:
    def give(): ...  # type: ignore[no-untyped-def]

    assert Invocable("give", give).output_schema() == {}


ANCHOR = object()


def signatures() -> dict[str, Callable[..., Any]]:
    def plain(origin: str, dest: str = "LAX") -> float:
        return 0.0

    def bare(a, b=1, *c, **d): ...  # type: ignore[no-untyped-def]
    def kinds(a: int, /, b: Node, *, c: Model) -> None: ...
    def defaults(a: Any = ANCHOR, b: str = "x" * 100, c: Decimal = Decimal(1)) -> None: ...

    return {"plain": plain, "bare": bare, "kinds": kinds, "defaults": defaults}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("plain", "plain(origin: str, dest: str = 'LAX') -> float"),
        ("bare", "bare(a, b=1, *c, **d)"),
        ("kinds", "kinds(a: int, /, b: Node, *, c: Model) -> None"),
        ("defaults", "defaults(a: Any = ..., b: str = ..., c: Decimal = Decimal('1')) -> None"),
    ],
)
def test_the_signature_as_text(name: str, text: str) -> None:
    assert Invocable(name, signatures()[name]).signature_text() == text


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (int, "int"),
        (None, "None"),
        (Optional[int], "int | None"),  # noqa: UP045
        (Union[int, str], "int | str"),  # noqa: UP007
        (int | None, "int | None"),
        (list[Model], "list[Model]"),
        (Mapping[str, list[int]], "Mapping[str, list[int]]"),
        (tuple[int, ...], "tuple[int, ...]"),
        (Annotated[int, Field(ge=1)], "int"),
        (Literal["a", 1], "Literal['a', 1]"),
        (Any, "Any"),
        (Model, "Model"),
    ],
    ids=str,
)
def test_annotations_as_text(annotation: Any, text: str) -> None:
    def take(value: Any) -> None: ...

    take.__annotations__["value"] = annotation
    assert Invocable("take", take).signature_text() == f"take(value: {text}) -> None"


NUMPY = """Adds.

    Parameters
    ----------
    a, b : int
        The terms.
    *rest
        More
        of them.

    Returns
    -------
    int
        The sum.
    """

REST = """Adds.

    :param a: The first term,
        a whole number.
    :param int b: The second.
    :type a: int
    :returns: The sum.
    """


@pytest.mark.requirement("D2")
@pytest.mark.parametrize(
    ("text", "summary", "parameters"),
    [
        (None, "", {}),
        ("", "", {}),
        ("One line.", "One line.", {}),
        ("Adds: two numbers.\n\nNote well: it rounds.", "Adds: two numbers.\n\nNote well: it rounds.", {}),
        (
            search.__doc__,
            "Find what was asked for.\n\nGoes through all of it.",
            {"query": "What to look for, in plain words.", "limit": "Most results."},
        ),
        (NUMPY, "Adds.", {"a": "The terms.", "b": "The terms.", "rest": "More of them."}),
        (REST, "Adds.", {"a": "The first term, a whole number.", "b": "The second."}),
        ("Adds.\n\nArgs:\n    **more: Others.\n    nothing:\n", "Adds.", {"more": "Others."}),
        ("Adds.\n\nRaises:\n    ValueError: Never.\n", "Adds.", {}),
    ],
)
def test_docstrings(text: str | None, summary: str, parameters: dict[str, str]) -> None:
    assert read_docstring(text) == Docstring(summary, parameters)


def test_the_description_is_the_docstring_without_its_sections() -> None:
    invocable = Invocable("search", search)
    assert invocable.description() == "Find what was asked for.\n\nGoes through all of it."
    assert invocable.line == search.__code__.co_firstlineno
