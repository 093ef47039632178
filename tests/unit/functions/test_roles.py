"""Prompts, resources, completers, input schemas of one's own: declared, described, and the same in this process."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import Any, Literal, Optional

import msgspec
import pytest

from callyard import Message, function, prompt, resource
from callyard.errors import ProtocolError, UsageError
from callyard.functions.bundle import Bundle
from callyard.functions.completion import Completion, completer_arguments, read_suggestions, suggest
from callyard.functions.contents import read_contents, read_messages
from callyard.functions.function import Declared, Promises
from callyard.functions.loading import LoadedBundle, LoadFailure, load_bundle
from callyard.functions.misfits import ArgumentsMisfit
from callyard.functions.registry import Argument, FunctionSpec, Registry
from callyard.wire.messages import DescribedFunction, DescribedPayload
from tests.unit.functions.conftest import WriteFiles


class Size(enum.Enum):
    SMALL = 1
    LARGE = 2


FIXTURE: dict[str, str | bytes] = {
    "desk_under_test.py": '''
        from typing import Literal
        from callyard import Message, function, prompt, resource

        SCHEMA = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "$defs": {"address": {"$anchor": "at", "type": "object", "properties": {"city": {"type": "string"}}}},
            "properties": {
                "name": {"type": "string"},
                "age": {"type": "integer"},
                "address": {"$ref": "#/$defs/address"},
                "contact": {"type": "string", "enum": ["phone", "email"]},
            },
            "allOf": [{"anyOf": [{"required": ["name"]}, {"required": ["age"]}]}],
            "if": {"properties": {"contact": {"const": "phone"}}, "required": ["contact"]},
            "then": {"required": ["age"]},
            "else": {"required": ["name"]},
            "additionalProperties": False,
        }

        @function(title="Save a person", description="Saves.", input_schema=SCHEMA, destructive=False)
        def save(**arguments: object) -> dict[str, object]:
            """Not this."""
            return arguments

        def languages(value: str, arguments: dict[str, str]) -> list[str]:
            return [value + "thon", *arguments]

        @function
        def cities(value: str) -> list[str]:
            return ["paris"]

        @prompt(title="Review", complete={"language": languages, "city": "cities", "note": ["short", "long"]})
        def review(language: str, city: str = "", count: int = 1, note: str = "", level: Literal["a", "b"] = "a"):
            """Review some code.

            Args:
                language: Which one.
            """
            return [f"{language} {count + 1} {level}", Message("assistant", "ok")]

        @prompt
        async def plain() -> str:
            return "hello"

        @resource("config://app", mime_type="application/json", title="Settings")
        def config() -> dict[str, int]:
            return {"a": 1}

        @resource("test://items/{id}/data", complete={"id": ["1", "12"]}, read_only=False)
        def item(id: int, verbose: bool = False) -> str | None:
            return f"item {id + 1}" if id else None
    ''',
}


@pytest.fixture
def bundle(project: WriteFiles, forgetful: None) -> LoadedBundle:
    return load_bundle(project(FIXTURE), "desk_under_test")


@pytest.fixture(params=["described", "local"])
def registry(request: pytest.FixtureRequest, project: WriteFiles, forgetful: None) -> Registry:
    """The same file, described by an executor, and imported by this process."""
    path = project(FIXTURE)
    loaded = load_bundle(path, "desk_under_test")
    if request.param == "local":
        return Registry.from_module(loaded.module)
    collected = Bundle.collect(path / "desk_under_test.py")
    functions, _ = loaded.describe()
    payload = DescribedPayload(collected.digest, functions)
    wired = msgspec.json.decode(msgspec.json.encode(payload), type=DescribedPayload)
    return Registry.from_description(collected, wired)


# --- what is described ------------------------------------------------------------------------------------------------


def test_roles_of_a_file(registry: Registry) -> None:
    assert {spec.name: spec.role for spec in registry} == {
        "save": "tool",
        "cities": "tool",
        "review": "prompt",
        "plain": "prompt",
        "config": "resource",
        "item": "resource",
        "languages": "completer",
    }
    save, review, config = (registry.get(name) for name in ("save", "review", "config"))
    assert (save.title, save.description) == ("Save a person", "Saves.")
    assert (review.title, review.description) == ("Review", "Review some code.")
    assert (config.uri, config.mime_type, config.title) == ("config://app", "application/json", "Settings")
    assert config.output_schema == review.output_schema == msgspec.Raw(b"{}")
    assert registry.get("plain").is_async


@pytest.mark.requirement("D34")
def test_promises_of_roles(registry: Registry) -> None:
    assert registry.get("save").promises == Promises(destructive=False)
    for name in ("review", "plain", "config", "languages"):
        assert registry.get(name).promises == Promises(read_only=True, idempotent=True)
    assert registry.get("item").promises == Promises(read_only=False, idempotent=True)


def test_the_arguments_of_a_prompt_are_texts(registry: Registry) -> None:
    review = registry.get("review")
    assert review.arguments() == [
        Argument("language", "Which one.", required=True),
        *(Argument(name) for name in ("city", "count", "note", "level")),
    ]
    properties = msgspec.json.decode(review.input_schema)["properties"]
    assert {part["type"] for part in properties.values()} == {"string"}
    assert properties["level"]["enum"] == ["a", "b"]
    for args in ({"language": "py", "count": "4", "level": "b", "city": ""}, {"language": "py", "count": 4}):
        review.check(args)


def test_completions(registry: Registry) -> None:
    assert registry.get("review").completions == {
        "language": Completion(function="languages"),
        "city": Completion(function="cities"),
        "note": Completion(("short", "long")),
        "level": Completion(("a", "b")),
    }
    assert registry.get("item").completions == {"id": Completion(("1", "12"))}
    languages, cities = registry.get("languages"), registry.get("cities")
    both = completer_arguments(languages.input_schema, "py", {"city": "x"})
    assert both == {"value": "py", "arguments": {"city": "x"}}
    assert completer_arguments(cities.input_schema, "p", {"language": "x"}) == {"value": "p"}
    languages.check(both)


def test_resources_are_found_by_uri(registry: Registry) -> None:
    config, item = registry.get("config"), registry.get("item")
    assert registry.find_resource("config://app") == (config, {})
    assert registry.find_resource("test://items/a%2Fb/data") == (item, {"id": "a/b"})
    assert registry.find_resource("test://items/1") is None
    assert (config.is_template, item.is_template, registry.get("save").is_template) == (False, True, False)
    assert registry.get("save").match("config://app") is None


def test_an_input_schema_of_ones_own_arrives_unchanged(registry: Registry, bundle: LoadedBundle) -> None:
    shown = msgspec.json.decode(registry.get("save").input_schema)
    assert shown == bundle.module.SCHEMA
    assert list(shown) == list(bundle.module.SCHEMA)
    save = registry.get("save")
    save.check({"name": "x", "age": 3, "contact": "phone"})
    for wrong in ({}, {"name": "x", "contact": "phone"}, {"name": "x", "more": 1}, {"name": 5}):
        with pytest.raises(ArgumentsMisfit):
            save.check(wrong)


# --- what is run ------------------------------------------------------------------------------------------------------


def test_a_schema_of_ones_own_is_checked_where_it_runs(bundle: LoadedBundle) -> None:
    save = bundle.get("desk_under_test:save")
    assert save.bind(b'{"name":"x"}') == ((), {"name": "x"})
    assert save.bind(b'{"name":"x","age":"7"}', strings=True) == ((), {"name": "x", "age": 7})
    assert not save.takes_row
    for wrong in (b"{}", b'{"name":5}', b'["x"]', b'{"name":"x","name":"y"}', b'{"age":3}'):
        with pytest.raises(ArgumentsMisfit):
            save.bind(wrong)


def test_texts_are_parsed_by_the_signature(bundle: LoadedBundle) -> None:
    review, item = bundle.get("desk_under_test:review"), bundle.get("desk_under_test:item")
    args, kwargs = review.bind(b'{"language":"py","count":"4","city":""}')
    messages = read_messages(review.encode(review.target(*args, **kwargs)))
    assert messages is not None
    assert [(m.role, m.content.text) for m in messages] == [("user", "py 5 a"), ("assistant", "ok")]
    args, kwargs = item.bind(b'{"id":"7"}', row=True)
    blocks = read_contents(item.encode(item.target(*args, **kwargs)))
    assert blocks is not None
    assert [(b.type, b.text, b.mime_type) for b in blocks] == [("file", "item 8", "text/plain")]
    assert item.encode(item.target(id=0)) == b"null"
    with pytest.raises(ArgumentsMisfit, match="/id: expected an integer"):
        item.bind(b'{"id":"x"}')


def test_a_prompt_of_this_process_runs_as_one_of_an_executor() -> None:
    registry = Registry()

    @registry.prompt(title="Hi", complete={"name": ["ann", "bob"]})
    def greet(name: str, times: int = 1) -> list[str]:
        return [f"hi {name}"] * times

    @registry.resource("count://{n}")
    def count(n: int) -> int:
        return n

    @registry.prompt
    def bare() -> Message:
        return Message("assistant", "x")

    def run(spec: FunctionSpec, args: dict[str, Any]) -> bytes:
        assert spec.handler is not None
        bound, keywords = spec.handler.bind(spec.check(args))
        return spec.handler.encode(spec.handler.target(*bound, **keywords))

    messages = read_messages(run(registry.get("greet"), {"name": "ann", "times": "2"}))
    assert messages is not None
    assert len(messages) == 2
    assert run(registry.get("count"), {"n": "5"}) == (
        b'{"callyard.content":[{"type":"file","text":"5","mime_type":"application/json"}]}'
    )
    assert read_messages(run(registry.get("bare"), {}))
    with pytest.raises(ArgumentsMisfit, match="expected an integer"):
        registry.get("greet").check({"name": "a", "times": "many"})
    with pytest.raises(UsageError, match="there is a function 'greet' already"):  # one namespace for all roles
        registry.tool(greet)
    with pytest.raises(UsageError, match=r"there is a resource at count://\{n\} already"):
        registry.resource("count://{n}", name="other")(count)
    registry.resource("count://{n}", name="count", override=True)(count)


def test_declared_functions_stay_plain_functions() -> None:
    @prompt(description="x")
    def hello(name: str) -> str:
        return f"hello {name}"

    assert hello("ann") == "hello ann"
    assert hello.declared == Declared(role="prompt", description="x")
    assert function(title="T")(hello.target).declared.title == "T"


def test_a_completer_of_this_process_is_added_with_its_prompt() -> None:
    registry = Registry()

    def names(value: str) -> list[str]:
        return [value]

    @registry.prompt(complete={"name": names})
    def greet(name: str) -> str:
        return name

    @registry.prompt(complete={"name": names})
    def again(name: str) -> str:
        return name

    assert [(spec.name, spec.role) for spec in registry] == [
        ("greet", "prompt"),
        ("names", "completer"),
        ("again", "prompt"),
    ]
    assert registry.get("again").completions["name"].function == "names"


# --- what is refused --------------------------------------------------------------------------------------------------


def takes_a(a: str) -> str:
    return a


@pytest.mark.parametrize(
    ("decorate", "message"),
    [
        (lambda: resource("config://app")(takes_a), r"takes_a needs 'a', and @resource\('config://app'\) has no {a}"),
        (lambda: resource("config://{b}")(takes_a), "names {b}, which takes_a has no parameter for"),
        (lambda: resource("app")(takes_a), "expected a URI"),
        (lambda: resource(takes_a), "@resource takes the URI first"),  # type: ignore[arg-type]
        (lambda: prompt(complete={"b": []})(takes_a), "names 'b', which is no parameter; there are: a"),
        (lambda: prompt(complete={"a": [1]})(takes_a), r"takes a list of texts, a function of \(value: str\)"),
        (lambda: prompt(complete={"a": lambda value: []})(takes_a), "needs a function with a name"),
        (lambda: prompt(complete={"a": ["x"] * 10_001})(takes_a), "10001 values, expected at most 10000"),
        (lambda: prompt(lambda *a: ""), r"each parameter of .* needs a name of its own, got \*a"),
        (lambda: prompt(5), "@prompt takes a plain function"),  # type: ignore[call-overload]
        (lambda: prompt(title=5)(takes_a), "title must be a text, got 5"),  # type: ignore[call-overload]
        (lambda: prompt(timeout=5)(takes_a), "@prompt does not know timeout"),  # type: ignore[call-overload]
        (lambda: function(read_only=True, destructive=True)(takes_a), "read_only and destructive exclude each other"),
        (lambda: function(pure=True, destructive=True)(takes_a), "pure and destructive exclude each other"),
        (lambda: function(destructive=1)(takes_a), "destructive must be True, False or None"),  # type: ignore[call-overload]
        (lambda: function(on_disconnect="wait")(takes_a), "on_disconnect must be one of stop, finish"),  # type: ignore[call-overload]
    ],
)
def test_a_declaration_that_means_nothing_is_refused(decorate: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        decorate()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('@prompt(complete={"a": "nobody"})\ndef f(a: str): ...', r"x_under_test.py:2: f: complete= names 'nobody'"),
        (
            "def g(value: str): ...\nfirst = g\ndef g(value: str): ...\n"
            '@prompt(complete={"a": first, "b": g})\ndef f(a: str, b: str): ...',
            "two functions have the name 'g'",
        ),
        (
            '@function(input_schema={"type": "object", "properties": {"a": {"type": "str"}}})\ndef f(a): ...',
            r"x_under_test.py:2: input schema of 'f': /properties/a/type",
        ),
    ],
)
def test_a_file_that_means_nothing_is_refused_with_its_line(
    project: WriteFiles, forgetful: None, source: str, message: str
) -> None:
    path = project({"x_under_test.py": f"from callyard import function, prompt\n{source}\n"})
    with pytest.raises(LoadFailure, match=message):
        load_bundle(path, "x_under_test").describe()


@pytest.mark.parametrize(
    "wrong",
    [
        {"role": "boss"},
        {"completions": msgspec.Raw(b'{"a":5}')},
        {"role": "resource", "uri": "none"},
        {"role": "resource"},
    ],
)
def test_a_description_that_cannot_be_true_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    (tmp_path / "m.py").write_text("def f(): ...\n")
    bundle = Bundle.collect(tmp_path / "m.py")
    described = DescribedFunction("f", "m:f", "f()", **wrong)  # type: ignore[arg-type]
    with pytest.raises(ProtocolError):
        Registry.from_description(bundle, DescribedPayload(bundle.digest, [described]))


def test_a_module_without_the_completer_that_it_names_is_refused(project: WriteFiles, forgetful: None) -> None:
    path = project(
        {"y_under_test.py": 'from callyard import prompt\n@prompt(complete={"a": "nobody"})\ndef f(a: str): ...\n'}
    )
    sys.path.insert(0, str(path))
    with pytest.raises(UsageError, match="complete= names 'nobody', and there is no such function"):
        Registry.from_module("y_under_test")


# --- suggestions ----------------------------------------------------------------------------------------------------


def test_suggestions_begin_with_what_is_typed_then_hold_it() -> None:
    assert suggest(("Go", "Python", "Cython", "Jython"), "py") == ["Python"]
    assert suggest(("Cython", "thorn", "python"), "TH") == ["thorn", "Cython", "python"]
    assert suggest(["b", "a"], "") == ["b", "a"]
    assert read_suggestions(b'["a"]') == ["a"]
    assert read_suggestions(b'{"a":1}') is read_suggestions(b"[1]") is read_suggestions(b"") is None


def test_values_of_types() -> None:
    registry = Registry()

    @registry.prompt
    def f(a: Size, b: Literal["x", "y"] | None = None, c: Optional[Literal[True]] = None, d: str = "") -> str:  # noqa: UP045
        return f"{a.name}{b}{c}{d}"

    assert {name: list(part.values) for name, part in registry.get("f").completions.items()} == {
        "a": ["1", "2"],
        "b": ["x", "y"],
        "c": ["true"],
    }
    bound, keywords = registry.get("f").handler.bind(registry.get("f").check({"a": "2", "c": "true"}))  # type: ignore[union-attr]
    assert f(*bound, **keywords) == "LARGENoneTrue"
