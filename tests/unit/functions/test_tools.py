"""Tools of this process: how they are added, what they are checked by, and whose code runs when."""

import enum
import functools
import re
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import pydantic
import pytest

from callyard.errors import UsageError
from callyard.functions.bundle import Bundle
from callyard.functions.checking import LocalHandler
from callyard.functions.contents import Image, encode_result, read_contents
from callyard.functions.encoding import ResultMisfit
from callyard.functions.function import Promises, function
from callyard.functions.json_schema import BadSchema
from callyard.functions.misfits import ArgumentsMisfit
from callyard.functions.registry import FunctionSpec, Registry, UnknownFunction
from callyard.functions.signature import Invocable, UnfitSignature
from callyard.functions.strict_json import ARGUMENTS_BYTES_MAX, ARGUMENTS_LEVELS_MAX
from callyard.ids import Digest, FunctionId
from callyard.policy.retry import RetryPolicy

OBJECT = {"type": "object"}


def add(a: int, b: int = 1) -> int:
    """Add.

    Args:
        a: The first.
    """
    return a + b


def handler_of(spec: FunctionSpec) -> LocalHandler:
    assert spec.handler is not None
    return spec.handler


# --- adding ---------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("D1")
def test_a_decorated_function_is_a_tool_and_stays_a_function() -> None:
    registry = Registry()

    @registry.tool
    def double(x: int) -> int:
        return 2 * x

    @registry.tool(name="ns.triple-x", idempotent=True, timeout_ms=5, tags=("maths",))
    async def triple(x: int) -> int:
        return 3 * x

    assert double(4) == 8
    assert registry.names() == ["double", "ns.triple-x"]
    spec = registry.get("ns.triple-x")
    assert spec.promises == Promises(idempotent=True, timeout_ms=5, tags=("maths",))
    assert spec.is_async
    assert spec.signature == "ns.triple-x(x: int) -> int"
    assert [registry.get(name).isolation for name in registry.names()] == ["thread", "inline"]
    assert handler_of(spec).target is triple


@pytest.mark.requirement("D1")
def test_a_tool_has_schemas_and_a_description() -> None:
    spec = Registry().add_function(add)
    assert spec.description == "Add."
    schema = msgspec.json.decode(spec.input_schema)
    assert schema["properties"]["a"] == {"title": "A", "type": "integer", "description": "The first."}
    assert schema["required"] == ["a"]
    assert schema["type"] == "object"
    assert msgspec.json.decode(spec.output_schema) == {"type": "integer"}


@pytest.mark.requirement("D1")
def test_a_second_tool_of_one_name_is_refused_unless_it_overrides() -> None:
    registry = Registry()
    registry.add_function(add)
    registry.add_tool("raw", print, input_schema=OBJECT)
    with pytest.raises(UsageError, match="'add' already: pass override=True"):
        registry.add_tool("add", print, input_schema=OBJECT)
    with pytest.raises(UsageError, match="already"):
        registry.add_function(add)
    registry.add_tool("add", print, description="new", input_schema=OBJECT, override=True)
    assert registry.get("add").description == "new"
    assert registry.names() == ["add", "raw"]  # in the order of registration


@pytest.mark.requirement("D1")
@pytest.mark.parametrize("name", ["", "a b", "a/b", "é", "a" * 129, "a\n", "<lambda>"])
def test_names_are_letters_digits_and_three_signs(name: str) -> None:
    with pytest.raises(UsageError, match="a name is 1 to 128 letters"):
        Registry().add_tool(name, print, input_schema=OBJECT)
    Registry().add_tool("A.b-c_9" + "x" * 121, print, input_schema=OBJECT)


@pytest.mark.requirement("D1")
def test_names_are_case_sensitive() -> None:
    registry = Registry()
    registry.add_tool("add", print, input_schema=OBJECT)
    registry.add_tool("ADD", print, input_schema=OBJECT)
    assert len(registry) == 2


@pytest.mark.requirement("D1", "D12", "D17", "D50", "D58")
def test_the_promises_of_a_tool() -> None:
    policy = RetryPolicy(max_attempts=2, base_ms=5)
    spec = Registry().add_function(
        add, retry=policy, on_abandon="finish", rate="10/s", budget_ms=5, exclusive=True, preempt=True, pure=True
    )
    assert spec.promises.retry == policy
    assert spec.promises.idempotent
    assert spec.promises.max_concurrency is None
    assert spec.result_bytes_max == 8 * 1024 * 1024
    wire = msgspec.json.encode(spec.promises)
    assert msgspec.json.decode(wire, type=Promises) == spec.promises
    for wrong in ({"on_abandon": "wait"}, {"rate": "ten a second"}, {"rate": "0/s"}, {"timeout_ms": 0}):
        with pytest.raises(ValueError):
            Registry().add_function(add, **wrong)
    for odd in ({"retry": 3}, {"rate": 10}, {"idempotent": 1}, {"timeout": 5}):
        with pytest.raises(TypeError):
            Registry().add_function(add, **odd)


def test_the_promises_of_a_declared_function_hold_unless_given_anew() -> None:
    declared = function(idempotent=True, timeout_ms=5)(add)
    assert Registry().add_function(declared).promises == Promises(idempotent=True, timeout_ms=5)
    assert Registry().add_function(declared, timeout_ms=6).promises == Promises(idempotent=True, timeout_ms=6)


@pytest.mark.requirement("D50")
def test_where_a_tool_runs() -> None:
    async def aside(x: int) -> int:
        return x

    registry = Registry()
    assert registry.add_function(add, isolation="inline").isolation == "inline"
    assert registry.add_function(aside, isolation="thread").isolation == "thread"
    assert registry.add_function(aside, name="other", isolation="executor").isolation == "inline"
    described = FunctionSpec(
        FunctionId("f"), Digest("d"), "m:f", promises=Promises(isolation="inline")
    )  # a described function is never inline
    assert described.isolation == "executor"
    assert described.handler is None


def test_methods_and_wrapped_functions_are_tools_as_well() -> None:
    class Counter:
        def __init__(self) -> None:
            self.total = 0

        def count(self, by: int) -> int:
            self.total += by
            return self.total

        async def later(self, by: int) -> int:
            return self.count(by)

    counter = Counter()
    registry = Registry()
    spec = registry.add_function(counter.count)
    assert registry.add_function(counter.later).is_async
    args, kwargs = handler_of(spec).bind(spec.check({"by": 3}))
    assert handler_of(spec).target(*args, **kwargs) == 3
    assert counter.total == 3
    cached = registry.add_function(functools.lru_cache(add), name="cached")
    assert cached.check({"a": 1}).bound == ((), {"a": 1, "b": 1})


@pytest.mark.parametrize("target", [print, 5, "add", int, functools.partial(add, 1), object()])
def test_what_is_no_function_is_refused(target: Any) -> None:
    with pytest.raises(UsageError, match="expected a function or a bound method"):
        Registry().add_function(target)


def test_generators_and_signatures_that_json_cannot_reach_are_refused() -> None:
    def numbers(n: int) -> Any:
        yield n

    def hook(callback: Callable[[], int]) -> None: ...

    with pytest.raises(UsageError, match="generator"):
        Registry().add_function(numbers)
    with pytest.raises(UnfitSignature):
        Registry().add_function(hook)
    with pytest.raises(UsageError, match="one dict, the arguments"):
        Registry().add_tool("x", 5, input_schema=OBJECT)  # type: ignore[arg-type]


@pytest.mark.requirement("D3")
def test_a_tool_with_a_bad_schema_is_not_added() -> None:
    registry = Registry()
    with pytest.raises(BadSchema, match="input schema of 'x': /type: expected one of object, array") as refused:
        registry.add_tool("x", print, input_schema={"type": "dict"})
    assert refused.value.pointer == "/type"
    with pytest.raises(BadSchema, match="output schema of 'x': /type"):
        registry.add_tool("x", print, input_schema=OBJECT, output_schema={"type": "array"})
    assert len(registry) == 0


@pytest.mark.requirement("D4")
def test_a_pattern_on_an_engine_without_a_bound_is_refused_in_this_process() -> None:
    def look(x: Annotated[str, pydantic.Field(pattern=re.compile(r"^(a+)+$"))]) -> None: ...

    class Code(msgspec.Struct):
        text: Annotated[str, msgspec.Meta(pattern="^(a+)+$")]

    def struct(x: list[Code]) -> None: ...

    def linear(x: Annotated[str, pydantic.Field(pattern=r"^(a+)+$")]) -> None: ...

    for target in (look, struct):
        with pytest.raises(BadSchema, match="linear-time engine") as refused:
            Registry().add_function(target)
        assert refused.value.pointer.endswith("/pattern")
    spec = Registry().add_function(linear)
    with pytest.raises(ArgumentsMisfit, match="match"):
        spec.check({"x": "a" * 100_000 + "!"})


# --- looking up -----------------------------------------------------------------------------------------------------


def test_an_unknown_name_is_told_with_close_ones() -> None:
    registry = Registry()
    with pytest.raises(UnknownFunction, match="no function 'add'; the registry is empty"):
        registry.get("add")
    registry.add_function(add)
    with pytest.raises(UnknownFunction, match="did you mean 'add'"):
        registry.get("ad")
    with pytest.raises(UnknownFunction):
        registry.validate("ad", {})


def test_a_registry_without_files_has_no_bundle() -> None:
    registry = Registry()
    assert not registry.has_bundle
    with pytest.raises(UsageError, match="no file of functions"):
        registry.bundle
    with pytest.raises(UsageError):
        registry.read_again()


def test_tools_of_this_process_stay_when_files_are_read_again(tmp_path: Any) -> None:
    file = tmp_path / "functions_of_mine.py"
    file.write_text("def f(x: int) -> int: ...\n")
    registry = Registry.for_target(file)
    registry.add_function(add)
    file.write_text("def g(x: int) -> int: ...\n")
    fresh = registry.read_again()
    assert fresh.names() == ["add"]
    with pytest.raises(UsageError, match="'add' already"):
        fresh.add(FunctionSpec(FunctionId("add"), Digest("d"), "m:add"))
    fresh.add(FunctionSpec(FunctionId("g"), Digest("d"), "m:g"))
    registry.become(fresh)
    assert registry.names() == ["add", "g"]
    assert registry.bundle is fresh.bundle


@pytest.mark.requirement("D6")
def test_from_a_module() -> None:
    module = types.ModuleType("tools_of_mine")
    code = """
from callyard import function
@function(pure=True)
def declared(x: int) -> int: return x
again = declared
def plain(x: int) -> int: return x
"""
    exec(compile(code, "tools_of_mine.py", "exec"), vars(module))
    assert Registry.from_module(module).names() == ["declared"]
    del module.declared, module.again
    assert Registry.from_module(module).names() == ["plain"]
    del module.plain
    with pytest.raises(UsageError, match="tools_of_mine has no functions"):
        Registry.from_module(module)
    assert "add" in Registry.from_module(sys.modules[__name__]).names()
    assert "add" in Registry.from_module(__name__).names()


# --- checking -------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("D4")
def test_the_bound_values_of_the_check_serve_one_attempt() -> None:
    def take(values: list[int]) -> None: ...

    spec = Registry().add_function(take)
    checked = spec.check({"values": [1]})
    first, second = handler_of(spec).bind(checked), handler_of(spec).bind(checked)
    assert first == second == ((), {"values": [1]})
    assert first[1]["values"] is not second[1]["values"]  # what one attempt does to it, the next does not see
    raw = Registry().add_tool("raw", print, input_schema=OBJECT)
    checked = raw.check({"values": [1]})
    (one,), (two,) = handler_of(raw).bind(checked)[0], handler_of(raw).bind(checked)[0]
    assert one == two == checked.value
    assert one is not two


@pytest.mark.requirement("D4")
@pytest.mark.parametrize(
    ("args", "pointer", "keyword"),
    [
        ({"n": True}, "/n", "type"),
        ({"n": "1"}, "/n", "type"),
        ({"n": float("nan")}, "/n", "json"),
        ({"n": float("inf")}, "/n", "json"),
        ({"n": 1, "m": "\ud800"}, "/m", "json"),
        ({"n": 1, "m": {1, 2}}, "/m", "additionalProperties"),
        ({"n": object()}, "/n", "json"),
        ({}, "/n", "required"),
        (b"", "", "json"),
        (b"{", "", "json"),
        (b'{"n": NaN}', "", "json"),
        (b'{"n": Infinity}', "", "json"),
        (b'{"n": 1e999}', "/n", "type"),
        (b'{"n": 1, "n": 1}', "", "duplicate_key"),
        (b'{"n": 1, "m": {"a": 1, "a": 2}}', "", "duplicate_key"),
        (b'{"n": "\\ud800"}', "", "json"),
        (b"\xff", "", "json"),
        (b"[1]", "", "type"),
        (b"null", "", "type"),
        (b"5", "", "type"),
    ],
)
def test_one_form_of_error_for_every_kind_of_tool(args: Any, pointer: str, keyword: str) -> None:
    def by_signature(n: int) -> None: ...

    def by_validator(n: Annotated[int, pydantic.AfterValidator(lambda n: n)]) -> None: ...

    registry = Registry()
    registry.add_function(by_signature)
    registry.add_function(by_validator)
    registry.add_tool(
        "raw", print, input_schema={**OBJECT, "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    )
    described = registry.get("by_signature")
    registry.add(FunctionSpec(FunctionId("described"), Digest("d"), "m:f", input_schema=described.input_schema))
    for spec in registry:
        problems = registry.validate(spec.name, args)
        assert problems, spec.name
        assert (problems[0].pointer, problems[0].keyword) == (pointer, keyword), spec.name
        assert all(problem.message and problem.expected for problem in problems)
        with pytest.raises(ArgumentsMisfit) as misfit:
            spec.check(args)
        assert misfit.value.problems == problems
        assert misfit.value.details["pointer"] == pointer


@pytest.mark.requirement("D4")
def test_integers_of_any_size_pass_unchanged() -> None:
    registry = Registry()
    registry.add_tool("raw", print, input_schema={**OBJECT, "properties": {"n": {"type": "integer"}}})
    registry.add_function(lambda n: n, name="any")
    registry.add_function(add)
    for number in (2**63, -(2**64), 10**400):
        for spec, name in ((registry.get("raw"), "n"), (registry.get("any"), "n"), (registry.get("add"), "a")):
            checked = spec.check({name: number})
            assert checked.value[name] == number
            args, kwargs = handler_of(spec).bind(checked)
            assert (args[0] if args else kwargs)[name] == number


@pytest.mark.requirement("D4")
def test_arguments_are_bounded() -> None:
    registry = Registry()
    registry.add_function(lambda x: x, name="any")
    registry.add_tool("raw", print, input_schema=OBJECT)
    for spec in registry:
        spec.check({"x": "a" * (ARGUMENTS_BYTES_MAX - 8)})
        with pytest.raises(ArgumentsMisfit, match="arguments_bytes_max") as misfit:
            spec.check({"x": "a" * (ARGUMENTS_BYTES_MAX - 7)})
        assert misfit.value.problems[0].keyword == "too_large"
        deep = b'{"x":' + b"[" * (ARGUMENTS_LEVELS_MAX - 1) + b"]" * (ARGUMENTS_LEVELS_MAX - 1) + b"}"
        spec.check(deep)
        spec.check(b'{"x":"' + b"[" * 500 + b'"}')  # brackets in a text are no levels
        for levels in (ARGUMENTS_LEVELS_MAX, 10_000):
            with pytest.raises(ArgumentsMisfit) as misfit:
                spec.check(b'{"x":' + b"[" * levels + b"]" * levels + b"}")
            assert misfit.value.problems[0].keyword == "too_deep"


@pytest.mark.requirement("D49")
def test_python_values_are_checked_as_their_json() -> None:
    """Strict Python mode would refuse ISO text and the like; here both come as JSON."""
    import datetime as dt
    import uuid
    from decimal import Decimal

    class Colour(enum.Enum):
        RED = "red"

    def take(
        at: dt.datetime,
        id: uuid.UUID,
        price: Decimal,
        colour: Colour,
        pair: tuple[int, str],
        names: set[str],
        raw: bytes,
    ) -> None: ...

    spec = Registry().add_function(take)
    id = uuid.uuid4()
    at = dt.datetime(2025, 1, 1, tzinfo=dt.UTC)
    plain = {"at": "2025-01-01T00:00:00Z", "id": str(id), "price": "1.50", "colour": "red", "pair": [1, "a"]}
    plain["raw"] = "eA=="
    typed = {"at": at, "id": id, "price": Decimal("1.50"), "colour": Colour.RED, "pair": (1, "a"), "raw": b"x"}
    for args in (plain, typed):
        _, kwargs = handler_of(spec).bind(spec.check({**args, "names": {"a"}}))
        assert kwargs == {**typed, "names": {"a"}}


# --- whose code runs ------------------------------------------------------------------------------------------------

ran: list[str] = []


@dataclass
class Plain:
    x: int
    more: list[int] = field(default_factory=list)


@dataclass
class PostInit:
    x: int

    def __post_init__(self) -> None:
        ran.append("dataclass")


@dataclass
class Factory:
    x: int = field(default_factory=lambda: ran.append("factory") or 1)  # type: ignore[func-returns-value]


class PlainStruct(msgspec.Struct):
    x: int
    more: list[int] = []


class PostInitStruct(msgspec.Struct):
    x: int

    def __post_init__(self) -> None:
        ran.append("struct")


class HoldsStruct(msgspec.Struct):
    inner: list[PostInitStruct]


class PlainModel(pydantic.BaseModel):
    x: int


class ValidatingModel(pydantic.BaseModel):
    x: int

    @pydantic.field_validator("x")
    @classmethod
    def check(cls, value: int) -> int:
        ran.append("model")
        return value


class InitModel(pydantic.BaseModel):
    x: int

    def __init__(self, **data: Any) -> None:
        ran.append("init")
        super().__init__(**data)


class NewModel(pydantic.BaseModel):
    x: int

    def __new__(cls, *args: Any, **kwargs: Any) -> "NewModel":
        ran.append("new")
        return super().__new__(cls)


class Missing(enum.Enum):
    A = 1

    @classmethod
    def _missing_(cls, value: object) -> "Missing":
        ran.append("missing")
        return cls.A


def note(value: Any) -> Any:
    ran.append("validator")
    return value


PLAIN_TYPES = [int, list[Plain], PlainStruct, PlainModel, dict[str, PlainModel | None], enum.Enum("E", {"A": 1})]
TYPES_WITH_CODE: list[tuple[Any, Any]] = [
    (PostInit, {"x": 1}),
    (list[PostInit], [{"x": 1}]),
    (Factory, {}),
    (PostInitStruct, {"x": 1}),
    (HoldsStruct, {"inner": [{"x": 1}]}),
    (ValidatingModel, {"x": 1}),
    (dict[str, ValidatingModel], {"a": {"x": 1}}),
    (InitModel, {"x": 1}),
    (NewModel, {"x": 1}),
    (Missing, 5),
    (Annotated[int, pydantic.AfterValidator(note)], 1),
    (Annotated[int, pydantic.BeforeValidator(note)], 1),
    (Annotated[Any, pydantic.PlainValidator(note, json_schema_input_type=Any)], 1),
    (Annotated[int, pydantic.WrapValidator(lambda value, inner: note(inner(value)))], 1),
]


@pytest.mark.parametrize("annotation", PLAIN_TYPES)
def test_a_signature_without_code_is_bound_at_once(annotation: Any) -> None:
    def take(x) -> None: ...  # type: ignore[no-untyped-def]

    take.__annotations__["x"] = annotation
    assert not Invocable("take", take).runs_user_code


@pytest.mark.requirement("D6")
@pytest.mark.parametrize(("annotation", "value"), TYPES_WITH_CODE)
def test_checking_runs_no_code_of_the_users(annotation: Any, value: Any) -> None:
    def take(x) -> None: ...  # type: ignore[no-untyped-def]

    take.__annotations__["x"] = annotation
    assert Invocable("take", take).runs_user_code
    registry = Registry()
    spec = registry.add_function(take)
    ran.clear()
    registry.validate("take", {"x": value})
    registry.validate("take", {"x": "other", "more": 1})
    registry.get("take")
    checked = spec.check({"x": value}, repair=True)
    assert ran == []
    handler_of(spec).bind(checked)
    assert ran  # at the attempt


@pytest.mark.requirement("D49")
def test_the_last_word_is_the_signatures_at_the_attempt() -> None:
    def even(n: int) -> int:
        if n % 2:
            raise ValueError("expected an even number")
        return n

    def take(n: Annotated[int, pydantic.AfterValidator(even)]) -> None: ...

    spec = Registry().add_function(take)
    with pytest.raises(ArgumentsMisfit, match="/n: expected an integer"):
        spec.check({"n": "x"})
    checked = spec.check({"n": 3})
    with pytest.raises(ArgumentsMisfit, match="expected an even number") as misfit:
        handler_of(spec).bind(checked)
    (problem,) = misfit.value.problems
    assert (problem.pointer, problem.keyword) == ("/n", "validator")


# --- results --------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("D26")
def test_results_are_checked_for_size_and_by_their_schema() -> None:
    registry = Registry()
    schema = {**OBJECT, "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    spec = registry.add_tool("raw", print, input_schema=OBJECT, output_schema=schema, max_result_bytes=100)
    spec.check_result(b'{"n": 1}')
    with pytest.raises(ResultMisfit, match="/n: expected an integer") as misfit:
        spec.check_result(b'{"n": "1"}')
    assert misfit.value.details["pointer"] == "/n"
    with pytest.raises(ResultMisfit, match="101 bytes exceeds max_result_bytes=100") as misfit:
        spec.check_result(b'"' + b"x" * 99 + b'"')
    assert misfit.value.details["limit"] == 100
    with pytest.raises(ResultMisfit, match="output schema"):
        registry.add_function(add).check_result(b'"x"')
    registry.add_function(lambda: None, name="free").check_result(b'"x"')
    with pytest.raises(ResultMisfit, match="nan is not JSON"):
        handler_of(spec).encode({"n": float("nan")})
    with pytest.raises(ResultMisfit, match="max_result_bytes"):
        handler_of(spec).encode("x" * 200)


@pytest.mark.requirement("D26")
def test_contents_pass_whatever_schema_a_result_has() -> None:
    def mixed() -> list[Any]: ...

    spec = Registry().add_function(mixed)
    output = encode_result(["a text", Image(b"\x89PNG", "image/png")], 10_000)
    assert read_contents(output) is not None
    spec.check_result(output)
    with pytest.raises(ResultMisfit, match="output schema"):  # what only looks like contents is a value like any other
        spec.check_result(output.replace(b'"type"', b'"typ"', 1))


@pytest.mark.requirement("D26")
def test_a_result_of_many_levels_or_digits_passes_its_schema() -> None:
    def nest() -> list[Any]: ...

    spec = Registry().add_function(nest)
    spec.check_result(b"[" * 500 + b"]" * 500)
    spec.check_result(b"[" + b"9" * 400 + b"]")


# --- described ------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("D49")
def test_a_described_schema_that_cannot_be_compiled_refuses_nothing() -> None:
    """The executor has the last word; what it described may be anything."""
    for schema in (b"{}", b"[]", b"5", b'{"type":"dict"}', b'{"$ref":"http://a.b/c"}', b"not json"):
        spec = FunctionSpec(FunctionId("f"), Digest("d"), "m:f", input_schema=msgspec.Raw(schema))
        assert spec.check({"a": 1}).value == {"a": 1}
        with pytest.raises(ArgumentsMisfit):
            spec.check(b'{"a": 1, "a": 2}')


def test_a_bundle_without_a_description_says_so(tmp_path: Any) -> None:
    (tmp_path / "mine.py").write_text("def f(): ...\n")
    registry = Registry(Bundle.collect(tmp_path / "mine.py"))
    assert registry.has_bundle
    with pytest.raises(UsageError, match="not known yet"):
        registry.get("f")
