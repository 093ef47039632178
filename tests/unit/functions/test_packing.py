"""The packed form: JSON with binary parts beside it, and what is no such form."""

from __future__ import annotations

import datetime as dt
import io
import pickle
from collections import ChainMap, UserList, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from pydantic import BaseModel, ConfigDict

from callyard.errors import CallError, ErrorKind, ProtocolError
from callyard.functions import foreign
from callyard.functions.encoding import LEVELS_MAX, ResultMisfit
from callyard.functions.foreign import NotReadable
from callyard.functions.misfits import ArgumentsMisfit
from callyard.functions.outgoing import Outgoing
from callyard.functions.packing import Packed, decode_crossing, encode_crossing, is_packed
from callyard.functions.signature import Invocable
from callyard.wire.frames import join_body
from callyard.wire.values import check_value, json_of


@dataclass
class Picture:
    name: str
    data: bytes


class Shelf(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    pixels: np.ndarray
    data: bytes = b""


class Crate(msgspec.Struct, rename="camel"):
    raw_bytes: bytes


def packed(value: str, parts: list[dict[str, Any]], raw: bytes) -> bytes:
    head = msgspec.json.encode({"value": msgspec.Raw(value.encode()), "parts": parts})
    return join_body(head, raw)


@pytest.mark.requirement("X95")
@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"abc",
        [b"a", [b"b", {"c": b"d"}]],
        {"a": {"b": [1, b"x", None]}},
        {"": b"", "a/b~c": b"slash"},
        [b"x"] * 300,
    ],
    ids=str,
)
def test_bytes_come_back_wherever_they_stand(value: Any) -> None:
    body = encode_crossing(value)
    assert is_packed(body)
    check_value(body)
    assert decode_crossing(body) == value


@pytest.mark.requirement("X95")
def test_objects_leave_by_the_names_that_json_has() -> None:
    value = {"p": Picture("cat", b"1"), "s": Shelf(pixels=np.ones(2)), "c": Crate(b"2"), "t": (b"3", {b"4"})}
    back = decode_crossing(encode_crossing(value))
    assert back["p"] == {"name": "cat", "data": b"1"}
    assert back["s"]["pixels"].tolist() == [1.0, 1.0]
    assert (back["c"], back["t"]) == ({"rawBytes": b"2"}, [b"3", [b"4"]])


@pytest.mark.requirement("X95")
@pytest.mark.parametrize(
    "value", [None, 1, "a", [1, "b"], {"a": [1.5]}, Crate, Picture("a", b"").name, range(3)], ids=str
)
def test_what_holds_nothing_binary_is_plain_json(value: Any) -> None:
    if not isinstance(value, type):
        assert not is_packed(encode_crossing(value))


@pytest.mark.requirement("X95")
def test_bytes_cross_as_they_are_in_every_kind_of_container() -> None:
    """Whatever JSON takes for an object or an array, and a container that stands there twice."""
    twice = [b"6"]
    value = {
        "proxy": MappingProxyType({"a": b"1"}),
        "chain": ChainMap({"a": b"2"}),
        "deque": deque([b"3"]),
        "values": {"a": b"4"}.values(),
        "user": UserList([b"5"]),
        "twice": [twice, twice],
    }
    assert decode_crossing(encode_crossing(value)) == {
        "proxy": {"a": b"1"},
        "chain": {"a": b"2"},
        "deque": [b"3"],
        "values": [b"4"],
        "user": [b"5"],
        "twice": [[b"6"], [b"6"]],
    }


@pytest.mark.requirement("D26")
@pytest.mark.parametrize("innermost", [1, b"x"], ids=["plain", "binary"])
def test_what_is_too_deep_or_holds_itself_is_a_misfit(innermost: Any) -> None:
    deep: Any = innermost
    for _ in range(LEVELS_MAX):
        deep = [deep]
    assert decode_crossing(encode_crossing(deep)) == deep
    for _ in range(5_000):
        deep = [deep]
    with pytest.raises(ResultMisfit, match=f"more than {LEVELS_MAX} levels"):
        encode_crossing(deep)
    endless = [innermost]
    endless.append([endless, endless])
    with pytest.raises(ResultMisfit, match="/1/0: the value holds itself"):
        encode_crossing(endless, canonical=True)


@pytest.mark.requirement("D26")
@pytest.mark.parametrize("canonical", [False, True])
@pytest.mark.parametrize("value", [float("nan"), [1, float("inf")], (float("-inf"),), {"x": float("nan"), "y": None}])
def test_what_is_flat_and_not_finite_is_a_misfit(value: Any, canonical: bool) -> None:
    with pytest.raises(ResultMisfit, match="is not JSON"):
        encode_crossing(value, canonical=canonical)
    assert b"null" in encode_crossing(value, canonical=canonical, nan_null=True)
    assert encode_crossing([1.5, None], canonical=canonical) == b"[1.5,null]"


@pytest.mark.requirement("X15")
def test_equal_values_are_equal_bytes() -> None:
    one = encode_crossing({"b": b"x", "a": {"d": np.ones(2), "c": 1}}, canonical=True)
    other = encode_crossing({"a": {"c": 1, "d": np.ones(2)}, "b": b"x"}, canonical=True)
    assert one == other


@pytest.mark.parametrize(
    "array",
    [
        np.array(5),
        np.empty((0, 3)),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(10)[::-2],
        np.array([1, 2], ">i4"),
        np.array([True, False]),
        np.array(["ab", "c"]),
        np.array([b"ab", b"c"]),
        np.array(["2024-05-01", "NaT"], "M8[D]"),
        np.array([1 + 2j]),
        np.array([1.5], "f2"),
        np.array([1], "m8[25us]"),
        np.arange(24).reshape(2, 3, 4).transpose(1, 0, 2),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_arrays_keep_shape_and_values(array: np.ndarray) -> None:
    back = decode_crossing(encode_crossing(array))
    assert back.shape == array.shape
    assert back.dtype == array.dtype.newbyteorder("=")
    assert np.array_equal(back, array, equal_nan=array.dtype.kind in "fcmM")
    assert back.flags.writeable
    assert back.flags.c_contiguous


def test_frames_keep_their_types_and_index() -> None:
    frame = pd.DataFrame({"a": [1, 2], "t": pd.to_datetime(["2024-05-01", None])}, index=pd.Index(["x", "y"], name="k"))
    back = decode_crossing(encode_crossing({"f": frame}))["f"]
    pd.testing.assert_frame_equal(back, frame)
    polars = pl.DataFrame({"s": ["a", None], "l": [[1], []]})
    assert decode_crossing(encode_crossing(polars)).equals(polars)
    table = pa.table({"m": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64()))})
    assert decode_crossing(encode_crossing(table)).equals(table)


@pytest.mark.parametrize(
    "frame",
    [
        pd.DataFrame({"a": [2**60 + 1, None]}, dtype=object),
        pd.DataFrame({"a": pd.array([2**60 + 1, None], "Int64")}),
        pd.DataFrame({"a": [b"x", None]}),
        pd.DataFrame({"a": [dt.date(2024, 5, 1), None]}),
        pd.DataFrame([[1, 2]], columns=[0, 1]),
        pd.DataFrame([[1, 2]], columns=[1.5, 2.5]),
        pd.DataFrame([[1, 2]], columns=pd.MultiIndex.from_tuples([("a", 1), ("b", 2)])),
        pd.DataFrame([[1, 2]], columns=pd.to_datetime(["2024-05-01", "2024-05-02"])),
        pd.DataFrame(index=range(3)),
    ],
    ids=lambda frame: f"{frame.dtypes.to_list()} {frame.columns.to_list()}"[:60],
)
def test_a_pandas_frame_keeps_its_values_and_names(frame: pd.DataFrame) -> None:
    back = decode_crossing(encode_crossing(frame))
    pd.testing.assert_frame_equal(back, frame)
    for name in frame.columns:
        assert list(map(type, back[name])) == list(map(type, frame[name]))


_NOON = dt.datetime(2024, 5, 1, 12)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (pd.DataFrame({"a": [b"x", "y"]}, dtype=object), "column 'a' of this pandas.DataFrame holds bytes and str"),
        (pd.DataFrame({"a": [1, 2]}, index=[b"x", "y"]), "the index of this pandas.DataFrame holds bytes and str"),
        (pd.DataFrame({"a": [_NOON.date(), _NOON]}, dtype=object), "holds date and datetime: only columns of one type"),
        (
            pd.DataFrame({"a": [_NOON, _NOON.replace(tzinfo=dt.UTC)]}, dtype=object),
            "holds datetime and datetime with a time zone",
        ),
        (pd.DataFrame({"a": [1, "x"]}, dtype=object), "Conversion failed for column a"),
        (
            pd.DataFrame({"a": [2**70]}, dtype=object),
            "this pandas.DataFrame cannot cross as Arrow: Python int too large",
        ),
        (pd.DataFrame([[1, 2]], columns=[True, False]), "column names of this pandas.DataFrame would not stay"),
        (pd.DataFrame([[1, 2]], columns=[1, "1"]), "column names of this pandas.DataFrame would not stay"),
        (pd.DataFrame([[1]], columns=[_NOON.date()]), "column names of this pandas.DataFrame would not stay"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), "Duplicate column names"),
        (
            pl.DataFrame({"a": [1], "b": pl.Series([object()], dtype=pl.Object)}),
            "column 'b' of this Polars frame holds Python objects",
        ),
        (
            np.array(["NaT"], "M8"),
            r"datetime64 cannot cross as bytes: give it a unit, as by array.astype\('M8\[us\]'\)",
        ),
        (np.zeros(2, "V4"), r"cannot cross as bytes: pass array.tolist\(\)"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else type(value).__name__,
)
def test_what_arrow_would_silently_change_is_a_misfit(frame: Any, message: str) -> None:
    with pytest.raises(ResultMisfit, match=message):
        encode_crossing(frame)


def test_bytes_without_any() -> None:
    assert decode_crossing(encode_crossing([memoryview(np.empty((0, 3))), memoryview(b"")])) == [b"", b""]


@dataclass
class Tagged:
    tags: set[str]
    data: bytes


@pytest.mark.requirement("X88")
def test_sets_beside_binary_parts_are_sorted() -> None:
    """As in plain JSON: their own order differs from process to process."""
    names = [f"name {number}" for number in range(20)]
    value = {"z": set(names), "a": [Tagged(set(names), b"x")], "mixed": [{None, True, "x"}, b"y"], "raw": {b"b", b"a"}}
    back = decode_crossing(encode_crossing(value))
    assert list(back) == list(value), "a dict keeps its own order"
    assert back["z"] == back["a"][0]["tags"] == sorted(names)
    assert back["mixed"] == [["x", None, True], b"y"]
    assert back["raw"] == [b"a", b"b"]


def test_a_part_is_told_by_what_it_is_where_it_does_not_fit() -> None:
    def take(n: int, text: str, data: bytes, array: np.ndarray, frame: pd.DataFrame) -> None: ...

    value = {"n": b"abc", "text": np.ones((2, 3)), "data": pd.DataFrame({"a": [1]}), "array": b"", "frame": np.ones(1)}
    with pytest.raises(ArgumentsMisfit) as caught:
        Invocable("take", take).bind_packed(Packed.read(encode_crossing(value)))
    assert caught.value.message == (
        "/n: expected an integer, got bytes (3); /text: expected a string, got a numpy array (<f8, 2 x 3 values);"
        " /data: expected bytes, got a pandas table; /array: expected a numpy array, got bytes (0);"
        " /frame: expected a pandas.DataFrame, got a numpy array (<f8, 1 values)"
    )


def test_a_text_cannot_pass_for_a_part() -> None:
    """What stands for a part while it is read is drawn anew each time."""

    def take(a: Any, b: Any) -> None: ...

    body = encode_crossing({"a": "callyard-0", "b": b"x"})
    _, arguments = Invocable("take", take).bind_packed(Packed.read(body))
    assert arguments == {"a": "callyard-0", "b": b"x"}


class Bomb:
    def __reduce__(self) -> Any:
        raise AssertionError("unpickled")


HOSTILE: dict[str, Callable[[], bytes]] = {
    "no such place": lambda: packed("{}", [{"at": ["a"], "size": 1}], b"x"),
    "a place that is taken": lambda: packed("[1]", [{"at": [0], "size": 1}], b"x"),
    "the place twice": lambda: packed("[null]", [{"at": [0], "size": 0}, {"at": [0], "size": 1}], b"x"),
    "beyond the end": lambda: packed("[null]", [{"at": [1], "size": 1}], b"x"),
    "from the end": lambda: packed("[null]", [{"at": [-1], "size": 1}], b"x"),
    "a key of an array": lambda: packed("[null]", [{"at": ["0"], "size": 1}], b"x"),
    "below a number": lambda: packed("[1]", [{"at": [0, 0], "size": 1}], b"x"),
    "a wrong shape": lambda: packed(
        "null", [{"at": [], "size": 1, "kind": "array", "dtype": "<f8", "shape": [1]}], b"x"
    ),
    "a huge shape": lambda: packed(
        "null", [{"at": [], "size": 0, "kind": "array", "dtype": "<f8", "shape": [2**62, 0, 2**62]}], b""
    ),
    "objects": lambda: packed("null", [{"at": [], "size": 8, "kind": "array", "dtype": "|O", "shape": [1]}], b"x" * 8),
    "a record": lambda: packed(
        "null", [{"at": [], "size": 8, "kind": "array", "dtype": "i4,i4", "shape": [1]}], b"x" * 8
    ),
    "text of no length": lambda: packed(
        "null", [{"at": [], "size": 0, "kind": "array", "dtype": "|S0", "shape": [2**40]}], b""
    ),
    "a unit of nothing": lambda: packed(
        "null", [{"at": [], "size": 8, "kind": "array", "dtype": "<M8[0s]", "shape": [1]}], bytes(8)
    ),
    "characters that are none": lambda: packed(
        "null", [{"at": [], "size": 4, "kind": "array", "dtype": "<U1", "shape": [1]}], b"\xff\xff\xff\x7f"
    ),
    "truth values that are none": lambda: packed(
        "null", [{"at": [], "size": 2, "kind": "array", "dtype": "|b1", "shape": [2]}], b"\x01\x02"
    ),
    "a number beyond all floats": lambda: b"[1e999]",
    "a number of too many digits": lambda: b"1" * 100_000,
    "no Arrow": lambda: packed("null", [{"at": [], "size": 3, "kind": "frame", "library": "pandas"}], b"abc"),
    "no Arrow for Polars": lambda: packed(
        "null", [{"at": [], "size": 3, "kind": "frame", "library": "polars"}], b"abc"
    ),
    "another library": lambda: packed("null", [{"at": [], "size": 3, "kind": "frame", "library": "pickle"}], b"abc"),
    "a pickle": lambda: packed("null", [{"at": [], "size": 4, "kind": "frame", "library": "pyarrow"}], b"\x80\x04N."),
}


@pytest.mark.requirement("X95")
@pytest.mark.parametrize("how", HOSTILE)
def test_what_a_hostile_executor_makes_up_is_not_readable(how: str) -> None:
    body = HOSTILE[how]()
    check_value(body)  # well-formed as far as the link looks
    with pytest.raises(NotReadable):
        decode_crossing(body)

    def make() -> Any: ...

    with pytest.raises(CallError) as caught:
        Outgoing("make", Invocable("make", make), typed=True).decode(body)
    assert caught.value.failure.kind is ErrorKind.RESULT


MALFORMED = {
    "too few bytes": packed("null", [{"at": [], "size": 3}], b"ab"),
    "too many bytes": packed("null", [{"at": [], "size": 1}], b"ab"),
    "no parts": packed("null", [], b""),
    "a negative size": packed("null", [{"at": [], "size": -1}], b""),
    "an unknown kind": packed("null", [{"at": [], "size": 0, "kind": "pickle"}], b""),
    "no JSON": join_body(b"{", b""),
    "an empty head": join_body(b"", b""),
    "NaN in it": packed("[NaN,null]", [{"at": [1], "size": 0}], b""),
    "a cut head": b"BXB1\x00\x00",
    "no UTF-8": packed("null", [{"at": [], "size": 1}], b"a").replace(b"null", b'"\xff"'),
}


@pytest.mark.requirement("X95")
@pytest.mark.parametrize("how", MALFORMED)
def test_what_is_malformed_breaks_the_protocol(how: str) -> None:
    with pytest.raises(ProtocolError):
        check_value(MALFORMED[how])
    with pytest.raises(ProtocolError):
        Packed.read(MALFORMED[how])


def test_arrow_streams_are_checked_before_they_are_used() -> None:
    """An offset that points out of its buffer would be read past its end."""
    data = bytearray(foreign.frame_bytes(pa.table({"s": ["aa", "bb"]}), "pyarrow"))
    at = data.rindex(b"aabb")
    offsets = data.rindex((2).to_bytes(4, "little") + (4).to_bytes(4, "little"), 0, at)
    data[offsets + 4 : offsets + 8] = (1 << 30).to_bytes(4, "little")
    with pytest.raises(NotReadable):
        foreign.read_frame(data, "pyarrow")


def test_nothing_is_unpickled() -> None:
    frame = io.BytesIO()
    table = pa.table({"a": [1]}).replace_schema_metadata({"pandas": pickle.dumps(1).decode("latin-1")})
    with pa.ipc.new_stream(frame, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(NotReadable):
        foreign.read_frame(bytearray(frame.getvalue()), "pandas")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    body = encode_crossing(np.ones(2))
    monkeypatch.setitem(__import__("sys").modules, "numpy", None)
    with pytest.raises(NotReadable, match="numpy is not installed here: pip install numpy"):
        decode_crossing(body)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([b"x", float("nan")], "/1: nan is not JSON"),
        ({"a": b"x", "rows": [{"when": object()}]}, "/rows/0/when: object has no JSON form"),
        ({"a": [np.array([object()])]}, "/a/0: a numpy array of dtype object cannot cross as bytes"),
        ({"a": [np.zeros(2, [("x", "i4")])]}, "/a/0: a numpy array of dtype"),
    ],
)
def test_a_misfit_beside_binary_parts_has_its_place(value: Any, message: str) -> None:
    with pytest.raises(ResultMisfit) as caught:
        encode_crossing(value)
    assert caught.value.message.startswith(message)


def test_whoever_looks_from_outside_sees_nulls() -> None:
    assert json_of(encode_crossing({"a": b"secret", "b": 1}, canonical=True)) == b'{"a":null,"b":1}'
    assert json_of(b"[1]") == b"[1]"
