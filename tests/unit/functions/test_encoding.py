"""Python values to JSON, and what JSON cannot hold."""

from __future__ import annotations

import asyncio
import base64
import collections
import dataclasses
import datetime as dt
import decimal
import enum
import ipaddress
import json
import pathlib
import re
import subprocess
import sys
import types
import uuid
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from pydantic import AnyUrl, BaseModel, RootModel, SecretStr, computed_field

from callyard.functions.encoding import LEVELS_MAX, ResultMisfit, encode_canonical, encode_value
from callyard.functions.function import Promises
from callyard.functions.signature import Invocable


class Colour(enum.Enum):
    RED = "red"
    PAIR = (1, 2)


@dataclass
class Leg:
    origin: str
    km: float | None = None
    stops: list[Any] = field(default_factory=list)


@dataclass(slots=True)
class Slim:
    km: float | None


class LegStruct(msgspec.Struct, rename="camel"):
    total_km: float


class LegModel(BaseModel):
    km: float
    raw: bytes = b"\xff"
    at: dt.date = dt.date(2013, 1, 1)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def miles(self) -> float:
        return self.km / 2


class Point(NamedTuple):
    x: int
    y: int


class Text(str):
    __slots__ = ()


class Whole(int):
    pass


class Moment(dt.datetime):
    pass


@pytest.mark.requirement("D26")
@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (None, "null"),
        ({"a": None, "b": [None, 1.5]}, '{"a":null,"b":[null,1.5]}'),
        ((1, "a"), '[1,"a"]'),
        ({1}, "[1]"),
        (frozenset("a"), '["a"]'),
        (b"\xff\x00", '"/wA="'),
        (bytearray(b"ab"), '"YWI="'),
        (10**40, "1" + "0" * 40),
        (-(2**70), str(-(2**70))),
        (decimal.Decimal("1.50"), '"1.50"'),
        (uuid.UUID(int=1), '"00000000-0000-0000-0000-000000000001"'),
        (dt.datetime(2013, 1, 1, tzinfo=dt.UTC), '"2013-01-01T00:00:00Z"'),
        (dt.date(2013, 1, 1), '"2013-01-01"'),
        (dt.timedelta(seconds=90), '"PT90S"'),
        (Moment(2013, 1, 1), '"2013-01-01T00:00:00"'),
        (Colour.RED, '"red"'),
        (Colour.PAIR, "[1,2]"),
        (Leg("JFK"), '{"origin":"JFK","km":null,"stops":[]}'),
        (Slim(None), '{"km":null}'),
        (LegStruct(1.5), '{"totalKm":1.5}'),
        (LegModel(km=2), '{"km":2.0,"raw":"/w==","at":"2013-01-01","miles":1.0}'),
        ([LegModel(km=2, raw=b"")], '[{"km":2.0,"raw":"","at":"2013-01-01","miles":1.0}]'),
        (RootModel[list[int]]([1]), "[1]"),
        (Point(1, 2), "[1,2]"),
        (Text("x"), '"x"'),
        (Whole(5), "5"),
        ({Text("k"): Whole(1)}, '{"k":1}'),
        (pathlib.Path("a/b"), '"a/b"'),
        (collections.deque([1, 2]), "[1,2]"),
        (collections.Counter("aab"), '{"a":2,"b":1}'),
        (types.MappingProxyType({"a": 1}), '{"a":1}'),
        (range(3), "[0,1,2]"),
        ({"a": 1}.keys(), '["a"]'),
        ({"a": 1}.values(), "[1]"),
        (ipaddress.ip_address("127.0.0.1"), '"127.0.0.1"'),
        (AnyUrl("http://localhost/"), '"http://localhost/"'),
        (SecretStr("hidden"), '"**********"'),
        ({1: "a", 1.5: "b", 10**30: "c"}, '{"1":"a","1.5":"b","1' + "0" * 30 + '":"c"}'),
        ({dt.date(2013, 1, 1): 1, uuid.UUID(int=1): 2}, '{"2013-01-01":1,"00000000-0000-0000-0000-000000000001":2}'),
        (np.float64(1.5), "1.5"),
        (np.float32(0.5), "0.5"),
        (np.longdouble(0.5), "0.5"),
        (np.int64(2**62), str(2**62)),
        (np.uint8(255), "255"),
        (np.bool_(True), "true"),
        (np.timedelta64(5, "s"), '"PT5S"'),
        (np.array([[5_000]], "m8[ns]"), '[["PT0.000005S"]]'),
        (np.str_("x"), '"x"'),
        (np.array([[1.0, 2.0]]), "[[1.0,2.0]]"),
        (np.array([1, 2], dtype=np.int16), "[1,2]"),
        (np.array(5), "5"),
        (np.array(["2013-01-01"], dtype="datetime64[D]"), '["2013-01-01"]'),
        (np.datetime64("2013-01-01T05:00"), '"2013-01-01T05:00"'),
        ({np.int64(1): np.float64(2)}, '{"1":2.0}'),
        ("naïve 東京 \U0001f6eb", '"naïve 東京 \U0001f6eb"'),
        ([[1]] * 1000, "[" + ",".join(["[1]"] * 1000) + "]"),
        (["[[[[{{{{"] * 1000, "[" + ",".join(['"[[[[{{{{"'] * 1000) + "]"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values(value: Any, encoded: str) -> None:
    assert encode_value(value).decode() == encoded


def cyclic_list() -> Any:
    value: list[Any] = []
    value.append({"self": value})
    return value


def cyclic_object() -> Any:
    leg = Leg("JFK")
    leg.stops.append(leg)
    return leg


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


class Silent:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class Faulty(BaseModel):
    def model_dump(self, **_: Any) -> Any:
        raise LookupError("lost")


NAN = float("nan")
KEYS = "a key must be text or a number, got "


@pytest.mark.requirement("D26")
@pytest.mark.parametrize(
    ("value", "pointer", "message"),
    [
        (NAN, "", "nan is not JSON: use None, or text, instead; nan='null' makes it null"),
        (float("-inf"), "", "-inf is not JSON"),
        ({"a": [1.0, {"b/c": NAN}]}, "/a/1/b~1c", "/a/1/b~1c: nan is not JSON"),
        ({"a": None, "b": {"c": (None, float("inf"))}}, "/b/c/1", "/b/c/1: inf is not JSON"),
        (Leg("JFK", NAN), "/km", "/km: nan is not JSON"),
        (Slim(NAN), "/km", "/km: nan is not JSON"),
        (LegStruct(NAN), "/totalKm", "/totalKm: nan is not JSON"),
        ([LegModel(km=float("inf"))], "/0/km", "/0/km: inf is not JSON"),
        (np.float64("nan"), "", "nan is not JSON"),
        (np.array([[1.0, np.nan]]), "/0/1", "/0/1: nan is not JSON"),
        (np.datetime64("NaT", "s"), "", "NaT is not JSON: use None instead"),
        ("\ud800", "", "text with a lone surrogate (U+D800 at character 0) is not Unicode"),
        ({"a": ["ok", "x\udfff"]}, "/a/1", "/a/1: text with a lone surrogate (U+DFFF at character 1)"),
        ({"\ud800": 1}, "", "text with a lone surrogate"),
        (cyclic_list(), "/0/self", "/0/self: the value holds itself: JSON has no cycles"),
        (cyclic_object(), "/stops/0", "/stops/0: the value holds itself"),
        (nested(LEVELS_MAX + 1), "", "more than 512 levels"),
        (nested(100_000), "/0/0/0/0/0/0/0", "/0/0/0/0/0/0/0: more than 512 levels"),
        ({(1, 2): 1}, "", KEYS + "tuple"),
        ({"a": {None: 1}}, "/a", "/a: " + KEYS + "NoneType"),
        ({True: 1}, "", KEYS + "bool"),
        ({frozenset(): 1}, "", KEYS + "frozenset"),
        ({Leg: 1}, "", "type has no JSON form"),
        (1j, "", "complex has no JSON form: use [z.real, z.imag] instead"),
        (np.complex64(1j), "", "complex has no JSON form"),
        ((n for n in range(3)), "", "generator has no JSON form: use list(...) of it instead"),
        (ValueError("x"), "", "ValueError has no JSON form: raise it, or use its text, instead"),
        (len, "", "builtin_function_or_method has no JSON form: call it and use what it gives"),
        ({"a": [object()]}, "/a/0", "/a/0: object has no JSON form: use a dict, list, text"),
        ([Silent()], "/0", f"/0: {__name__}.Silent has no JSON form"),
        (Faulty(), "", "encoding it raised LookupError: lost"),
        (re.compile("x").match("x"), "", "re.Match has no JSON form"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_json_cannot_hold(value: Any, pointer: str, message: str) -> None:
    with pytest.raises(ResultMisfit) as caught:
        encode_value(value)
    assert caught.value.message.startswith(message)
    assert caught.value.details["pointer"] == pointer


def test_a_coroutine_says_that_it_must_be_awaited() -> None:
    coroutine = asyncio.sleep(0)
    try:
        with pytest.raises(ResultMisfit, match="coroutine has no JSON form: await it"):
            encode_value(coroutine)
    finally:
        coroutine.close()


def test_the_deepest_value_that_passes() -> None:
    assert encode_value(nested(LEVELS_MAX)) == b"[" * LEVELS_MAX + b"1" + b"]" * LEVELS_MAX


def test_a_deep_value_beside_text_with_brackets() -> None:
    with pytest.raises(ResultMisfit, match="more than 512 levels"):
        encode_value(['"[[', nested(LEVELS_MAX)])


def test_dictionaries_keep_their_order_and_canonical_json_does_not() -> None:
    value = {"b": {3, 1, 2}, "a": 1}
    assert encode_value(value).startswith(b'{"b":')
    assert encode_canonical(value) == b'{"a":1,"b":[1,2,3]}'
    assert encode_canonical({"x": 1, "y": 2}) == encode_canonical({"y": 2, "x": 1})


@pytest.mark.requirement("X88")
def test_sets_are_sorted_wherever_they_are() -> None:
    @dataclasses.dataclass
    class Tagged:
        z: set[str]
        a: int

    words = {f"word{number}" for number in range(50)}
    expected = json.dumps(sorted(words), separators=(",", ":")).encode()
    assert encode_value(words) == encode_value(frozenset(words)) == expected
    assert encode_value({"b": [1, {"x": words}], "a": {"z": 1, "y": 2}}) == (
        b'{"b":[1,{"x":%b}],"a":{"z":1,"y":2}}' % expected
    )
    assert encode_value([Tagged(words, 1)]) == b'[{"z":%b,"a":1}]' % expected


@pytest.mark.requirement("D26")
def test_a_result_above_its_limit_shows_size_limit_and_head() -> None:
    def bulky() -> str:
        return "x"

    invocable = Invocable("bulky", bulky, Promises(max_result_bytes=2_000))
    assert invocable.encode("y" * 1_998) == b'"' + b"y" * 1_998 + b'"'
    with pytest.raises(ResultMisfit, match=r"result of 2001 bytes exceeds max_result_bytes=2000") as caught:
        invocable.encode("y" * 1_999)
    assert caught.value.details == {"pointer": "", "size": 2001, "limit": 2000, "head": '"' + "y" * 1023}
    with pytest.raises(ResultMisfit, match="max_result_bytes=8388608"):
        Invocable("bulky", bulky).encode("y" * 8_388_607)


def test_bytes_come_back_as_they_were() -> None:
    assert base64.b64decode(msgspec.json.decode(encode_value(bytes(range(256))))) == bytes(range(256))


def test_encoding_imports_neither_numpy_nor_pydantic() -> None:
    code = (
        "import sys\nfrom callyard.functions.encoding import ResultMisfit, encode_value\n"
        "encode_value({'a': [1.5, None, {1}]})\n"
        "try:\n    encode_value(object())\nexcept ResultMisfit:\n    pass\n"
        "print(sorted({'numpy', 'pydantic', 'pydantic_core', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_sets_without_an_order_of_their_own_are_sorted_by_their_json() -> None:
    assert (
        encode_value([{None, True, "a", 3}, frozenset({(1, None), (1, 2)})]) == b'[["a",3,null,true],[[1,2],[1,null]]]'
    )
