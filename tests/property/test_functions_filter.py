"""What the executor's validator takes, the filter made of the described JSON Schema takes too."""

from __future__ import annotations

import collections
import datetime as dt
import enum
import ipaddress
import json
import pathlib
import re
import typing
import uuid
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, TypedDict

import msgspec
import pydantic
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from callyard.functions.checking import check_result, compile_described
from callyard.functions.encoding import ResultMisfit, encode_value
from callyard.functions.misfits import ArgumentsMisfit
from callyard.functions.signature import Invocable
from callyard.functions.strict_json import decode_json


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Mixed(enum.Enum):
    A = "a"
    B = 2
    C = 2.5


class Lenient(enum.Enum):
    A = "a"

    @classmethod
    def _missing_(cls, value: object) -> Lenient:
        return cls.A


class Letter(enum.StrEnum):
    A = "a"


@dataclass
class Point:
    x: int
    y: float = 0.0
    at: dt.datetime | None = None
    tags: list[str] = field(default_factory=list)


@dataclass
class Tree:
    name: str
    children: list[Tree] = field(default_factory=list)


class Movie(TypedDict):
    title: str
    year: NotRequired[int]


class Pair(NamedTuple):
    left: int
    right: str = "r"


class Flat(msgspec.Struct):
    name: str
    count: int = 0
    at: dt.datetime | None = None
    raw: bytes = b""
    key: uuid.UUID | None = None
    wait: dt.timedelta | None = None
    price: Decimal | None = None
    code: Annotated[str, msgspec.Meta(pattern=r"^[a-z]+$", min_length=1)] = "a"


class Row(msgspec.Struct, array_like=True):
    value: int
    below: Row | None = None


class Cat(msgspec.Struct, tag=True):
    lives: int


class Dog(msgspec.Struct, tag=True):
    name: str


class Wide(msgspec.Struct):
    colours: set[Colour] = set()
    by_number: dict[int, float] = {}
    choice: Literal["a", 5] | None = None
    level: Level | None = None
    small: Annotated[int, msgspec.Meta(ge=0, lt=10, multiple_of=2)] = 0
    ratio: Annotated[float, msgspec.Meta(multiple_of=0.1)] | None = None
    pair: tuple[int, str] | None = None
    point: Point | None = None
    pet: Cat | Dog | None = None
    movie: Movie | None = None
    anything: Any = None
    day: dt.date | None = None
    hour: dt.time | None = None
    digits: Annotated[list[int], msgspec.Meta(min_length=1, max_length=2)] = msgspec.field(default_factory=lambda: [1])


class Renamed(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    first_name: str
    last_name: str | None = None


class Linked(msgspec.Struct):
    value: int
    next: Linked | None = None


class Model(pydantic.BaseModel):
    name: str
    size: Annotated[int, pydantic.Field(ge=0, lt=100)] = 1
    nested: Model | None = None


class Forbidding(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    a: int


class Aliased(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(populate_by_name=True, extra="forbid")
    name: Annotated[str, pydantic.Field(alias="theName")]


class OnlyAlias(pydantic.BaseModel):
    name: Annotated[str, pydantic.Field(alias="theName")]
    data: bytes = b""

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def size(self) -> int:
        return len(self.name)


class Choices(pydantic.BaseModel):
    name: Annotated[str, pydantic.Field(validation_alias=pydantic.AliasChoices("one", "two"))]


class Stripped(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(str_strip_whitespace=True, str_max_length=3)
    name: str


class Before(pydantic.BaseModel):
    size: int

    @pydantic.field_validator("size", mode="before")
    @classmethod
    def read(cls, value: Any) -> Any:
        return int(value) if isinstance(value, str) and value.isdecimal() else value


class Circle(pydantic.BaseModel):
    kind: Literal["circle"]
    radius: float


class Square(pydantic.BaseModel):
    kind: Literal["square"]
    side: float


Shape = Annotated[Circle | Square, pydantic.Field(discriminator="kind")]
Typed = tuple[Any, st.SearchStrategy[Any]]
"""An annotation, and JSON values of which many fit it."""

INTEGERS = st.integers() | st.integers(-5, 120) | st.just(10**40)
FLOATS = st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([0.3, 5.0, 1e2, -0.0])
NUMBERS = INTEGERS | FLOATS
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.sampled_from(
    ["a", "5", "5.0", "null", "red", "٣", "é", " a ", "abc\n", "A1", "true", "{}", "[1]", "YQ==", "YQ", "1e5", "-0"]
)
MOMENTS = st.sampled_from(
    [
        *("2020-01-01T00:00:00", "2020-01-01T00:00:00Z", "2020-01-01 10:00", "2020-01-01T10:00:00.123456789+02:00"),
        *("2020-01-01", "2020-01-01t10:00:00z", "2020-01-01_10:00:00", "10:00", "10:00:00", "10:00:00.5Z"),
        *("23:59:60", "24:00:00", "P1D", "PT5S", "P1W", "-P1DT2H", "1 day, 00:00:01", "00:00:05", "1577836800"),
        *("2020-02-30", "2020-1-1", "2020-01-01T00:00:00+0200", "2020-01-01T00:00:00,5Z", "P1Y2M", "+PT1.5S", "3 days"),
    ]
)
IDS = st.uuids().map(str) | st.sampled_from(
    ["0" * 32, "urn:uuid:12345678-1234-5678-1234-567812345678", "{12345678-1234-5678-1234-567812345678}", "1234"]
)
DECIMALS = st.sampled_from(["1.5", "1e5", "-0", "1_000", ".5", "5.", "+1", " 1 ", "NaN", "Infinity", "1.50"]) | NUMBERS
ADDRESSES = st.sampled_from(
    ["127.0.0.1", "::1", "10.0.0.0/8", "localhost", "http://a.b/c?d=e#f", "HTTP://A", "mailto:a@b.c", "fe80::1%eth0"]
)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS | MOMENTS | IDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


def objects(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries({}, optional=fields)


TREES = st.recursive(
    objects(name=TEXTS), lambda inner: objects(name=TEXTS, children=st.lists(inner, max_size=2)), max_leaves=4
)
MODELS = st.recursive(
    objects(name=TEXTS, size=NUMBERS), lambda inner: objects(name=TEXTS, size=INTEGERS, nested=inner), max_leaves=3
)
LINKS = st.recursive(
    objects(value=NUMBERS), lambda inner: objects(value=INTEGERS, next=inner | st.none()), max_leaves=3
)
SHAPES = objects(kind=st.sampled_from(["circle", "square"]), radius=NUMBERS, side=NUMBERS)
PATTERNED = Annotated[str, pydantic.Field(pattern=r"^\w\d?$")]

LEAVES: list[Typed] = [
    *((int, NUMBERS), (float, NUMBERS), (str, TEXTS), (bool, st.booleans() | NUMBERS), (None, st.none())),
    *((Any, JSON), (object, JSON), (bytes, TEXTS), (complex, TEXTS | NUMBERS), (Fraction, DECIMALS)),
    *((dt.datetime, MOMENTS | NUMBERS), (dt.date, MOMENTS), (dt.time, MOMENTS | NUMBERS), (uuid.UUID, IDS)),
    *((dt.timedelta, MOMENTS | NUMBERS), (Decimal, DECIMALS), (pathlib.Path, TEXTS), (re.Pattern, TEXTS)),
    *((pydantic.AwareDatetime, MOMENTS), (pydantic.NaiveDatetime, MOMENTS), (pydantic.PastDate, MOMENTS)),
    *(
        (pydantic.UUID4, IDS | st.uuids(version=4).map(str)),
        (pydantic.AnyUrl, ADDRESSES),
        (pydantic.HttpUrl, ADDRESSES),
        (pydantic.Json, TEXTS),
    ),
    *((ipaddress.IPv4Address, ADDRESSES), (ipaddress.IPv6Address, ADDRESSES), (ipaddress.IPv4Network, ADDRESSES)),
    *((pydantic.IPvAnyAddress, ADDRESSES), (pydantic.Base64Bytes, TEXTS), (pydantic.ByteSize, TEXTS | NUMBERS)),
    *((pydantic.SecretStr, TEXTS), (pydantic.StrictInt, NUMBERS), (pydantic.PositiveInt, NUMBERS)),
    *(
        (Colour, TEXTS),
        (Level, NUMBERS | st.integers(0, 2) | st.booleans()),
        (Mixed, TEXTS | NUMBERS | st.sampled_from(["a", 2, 2.5])),
        (Letter, TEXTS),
        (Lenient, TEXTS),
    ),
    *((Literal["a", 5, True, None], JSON), (Literal[1], NUMBERS | st.booleans() | st.just(1.0)), (Literal["a"], TEXTS)),
    (Annotated[int, pydantic.Field(ge=0, le=100)], NUMBERS),
    (Annotated[int, pydantic.Field(gt=0, multiple_of=5)], NUMBERS),
    (Annotated[float, pydantic.Field(gt=0.1, lt=1e9)], NUMBERS),
    (Annotated[float, pydantic.Field(multiple_of=0.1)], NUMBERS | st.integers(0, 50).map(lambda n: n * 0.1)),
    (Annotated[Decimal, pydantic.Field(gt=0, max_digits=4, decimal_places=2)], DECIMALS),
    (Annotated[Decimal, pydantic.Field(multiple_of=Decimal("0.1"))], DECIMALS),
    (Annotated[str, pydantic.Field(min_length=1, max_length=3)], TEXTS),
    (Annotated[str, pydantic.StringConstraints(strip_whitespace=True, max_length=1)], TEXTS),
    (Annotated[str, pydantic.StringConstraints(to_lower=True, pattern="^[a-z0-9]*$")], TEXTS),
    (Annotated[bytes, pydantic.Field(min_length=2, max_length=3)], TEXTS),
    (PATTERNED, TEXTS),
    (Annotated[str, pydantic.Field(pattern=re.compile(r"^(?=a).*$"))], TEXTS),
    (Annotated[int, pydantic.BeforeValidator(lambda value: len(value) if isinstance(value, str) else value)], JSON),
    (Annotated[int, pydantic.WrapValidator(lambda value, inner: 0 if value is None else inner(value))], JSON),
    (Annotated[str, pydantic.AfterValidator(str.strip)], TEXTS),
    (Annotated[Any, pydantic.PlainValidator(str, json_schema_input_type=Any)], JSON),
    (Point, objects(x=NUMBERS, y=NUMBERS, at=MOMENTS | st.none(), tags=st.lists(TEXTS, max_size=2), more=JSON)),
    *((Tree, TREES), (Model, MODELS), (Linked, LINKS), (Shape, SHAPES), (Circle | Square, SHAPES)),
    (Movie, objects(title=TEXTS, year=NUMBERS, more=JSON)),
    (Pair, st.tuples(NUMBERS, TEXTS).map(list) | objects(left=INTEGERS, right=TEXTS)),
    (
        Flat,
        objects(
            name=TEXTS, count=NUMBERS, at=MOMENTS, raw=TEXTS, key=IDS, wait=MOMENTS, price=DECIMALS, code=TEXTS
        ).filter(lambda value: "name" in value),
    ),
    (
        Wide,
        objects(
            colours=st.lists(st.sampled_from(["red", "green", "x"]), max_size=3),
            by_number=st.dictionaries(NUMBERS.map(str), NUMBERS, max_size=2),
            choice=st.sampled_from(["a", 5, 5.0, "b", None]),
            level=st.sampled_from([1, 2, 1.0, 3, True]),
            small=NUMBERS,
            ratio=NUMBERS,
            pair=st.tuples(NUMBERS, TEXTS).map(list),
            point=objects(x=INTEGERS, y=NUMBERS).filter(lambda point: "x" in point),
            pet=objects(type=st.sampled_from(["Cat", "Dog"]), lives=INTEGERS, name=TEXTS),
            movie=objects(title=TEXTS),
            anything=JSON,
            day=MOMENTS,
            hour=MOMENTS,
            digits=st.lists(NUMBERS, max_size=3),
        ),
    ),
    (Row, st.recursive(st.tuples(INTEGERS).map(list), lambda row: st.tuples(INTEGERS, row).map(list), max_leaves=3)),
    (Renamed, objects(firstName=TEXTS, lastName=TEXTS | st.none(), first_name=TEXTS)),
    (Cat | Dog, objects(type=st.sampled_from(["Cat", "Dog"]), lives=NUMBERS, name=TEXTS)),
    (Forbidding, objects(a=NUMBERS, b=JSON)),
    (Aliased, objects(theName=TEXTS, name=TEXTS)),
    (OnlyAlias, objects(theName=TEXTS, data=TEXTS)),
    (Choices, objects(one=TEXTS, two=TEXTS)),
    (Stripped, objects(name=TEXTS)),
    (Before, objects(size=NUMBERS | TEXTS)),
    *((dict, JSON), (list, JSON), (tuple, JSON), (set, JSON), (frozenset, JSON), (collections.deque, JSON)),
]
HASHABLE: list[Typed] = [
    *((int, INTEGERS), (str, TEXTS), (Colour, TEXTS), (dt.date, MOMENTS), (uuid.UUID, IDS), (float, NUMBERS)),
    *(
        (Decimal, DECIMALS),
        (bool, st.booleans()),
        (Level, NUMBERS | st.integers(0, 2) | st.booleans()),
        (PATTERNED, TEXTS),
        (Literal["a", "5"], TEXTS),
    ),
]


def lists(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, max_size=3)


@st.composite
def typed(draw: st.DrawFn, depth: int = 2) -> Typed:
    if depth == 0 or draw(st.booleans()):
        return draw(st.sampled_from(LEAVES))
    annotation, values = draw(typed(depth - 1))
    other, others = draw(typed(depth - 1))
    key, keys = draw(st.sampled_from(HASHABLE))
    named = st.dictionaries(keys.map(lambda value: value if isinstance(value, str) else json.dumps(value)), values)
    made: list[Typed] = [
        (list[annotation], lists(values)),
        (Annotated[list[annotation], pydantic.Field(min_length=1, max_length=2)], lists(values)),
        (dict[str, annotation], st.dictionaries(TEXTS, values, max_size=3)),
        (dict[key, annotation], named),
        (typing.Optional[annotation], values | st.none()),  # noqa: UP045 - one of the two may be a text
        (typing.Union[annotation, other], values | others),  # noqa: UP007
        (tuple[annotation, other], st.tuples(values, others).map(list)),
        (tuple[annotation, ...], lists(values)),
        (tuple[()], st.just([])),
        (set[key], lists(keys)),
        (Annotated[set[key], pydantic.Field(min_length=1, max_length=1)], lists(keys)),
        (frozenset[key], lists(keys)),
        (collections.deque[annotation], lists(values)),
        (collections.Counter[key], st.dictionaries(TEXTS, INTEGERS, max_size=2)),
        (collections.OrderedDict[str, annotation], st.dictionaries(TEXTS, values, max_size=2)),
        (collections.defaultdict[str, list[annotation]], st.dictionaries(TEXTS, lists(values), max_size=2)),
        (collections.abc.Sequence[annotation], lists(values)),
        (collections.abc.Mapping[str, annotation], st.dictionaries(TEXTS, values, max_size=2)),
    ]
    return draw(st.sampled_from(made))


def build(annotation: Any, *, result: bool = False) -> Invocable:
    def take(x: Any, more: Any = 0) -> Any: ...

    take.__annotations__ = {"x": annotation, "more": int, **({"return": annotation} if result else {})}
    return Invocable("take", take)


def dump(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def fits(invocable: Invocable, raw: bytes) -> bool:
    try:
        invocable.bind(raw)
    except ArgumentsMisfit:
        return False
    return True


def assert_filter_takes(annotation: Any, value: Any, more: Any = 1) -> bool:
    """False: the validator refuses it, so that nothing was shown."""
    invocable = build(annotation)
    raw = dump({"x": value, "more": more})
    if not fits(invocable, raw):
        return False
    schema = invocable.input_schema()
    described = compile_described(msgspec.json.encode(schema))
    assert described is not None, schema
    described.check(decode_json(raw))
    return True


@pytest.mark.requirement("D49")
@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: str(leaf[0])[:60])
def test_the_filter_takes_what_binds_of_each_type(leaf: Typed) -> None:
    annotation, values = leaf
    shown = 0

    @settings(max_examples=100, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(values)
    def check(value: Any) -> None:
        nonlocal shown
        shown += assert_filter_takes(annotation, value)

    check()
    assert shown, "no value was accepted: the strategy shows nothing"


@pytest.mark.requirement("D49")
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(typed(), st.data())
def test_the_filter_takes_what_binds_of_any_type(pair: Typed, data: st.DataObject) -> None:
    annotation, values = pair
    assume(assert_filter_takes(annotation, data.draw(values)))


@pytest.mark.requirement("D49")
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(LEAVES), JSON, st.data())
def test_the_filter_takes_what_binds_of_any_value(leaf: Typed, value: Any, data: st.DataObject) -> None:
    assert_filter_takes(leaf[0], value, data.draw(INTEGERS | TEXTS))


def assert_result_fits(annotation: Any, value: Any) -> bool:
    invocable = build(annotation, result=True)
    raw = dump({"x": value})
    if not fits(invocable, raw):
        return False
    args, kwargs = invocable.bind(raw)
    try:
        output = encode_value([*args, *kwargs.values()][0])
    except ResultMisfit:
        return False
    schema = invocable.output_schema()
    check_result(compile_described(msgspec.json.encode(schema)), output, 10**6)
    return True


@pytest.mark.requirement("D26")
@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: str(leaf[0])[:60])
def test_a_result_of_its_own_type_fits_the_output_schema(leaf: Typed) -> None:
    annotation, values = leaf

    @settings(max_examples=40, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(values)
    def check(value: Any) -> None:
        assert_result_fits(annotation, value)

    check()


@pytest.mark.requirement("D26")
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(typed(), st.data())
def test_a_result_of_any_type_fits_the_output_schema(pair: Typed, data: st.DataObject) -> None:
    annotation, values = pair
    assert_result_fits(annotation, data.draw(values))
