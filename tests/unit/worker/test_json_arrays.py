"""Rows from one JSON array: cut as it comes, each element a row or the failure of one."""

from __future__ import annotations

import io
import json
import tracemalloc
from typing import IO, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from callyard.errors import UsageError
from callyard.worker.builders import LINE_BYTES_MAX, Row
from callyard.worker.json_array import JsonArraySource


class Trickle(io.RawIOBase):
    def __init__(self, content: bytes, step: int) -> None:
        self._content = content
        self._step = step

    def read(self, size: int = -1) -> bytes:
        part, self._content = self._content[: self._step], self._content[self._step :]
        return part


def rows(content: bytes, step: int = 1 << 18, *, named: bool = False) -> list[Row]:
    stream: IO[bytes] = Trickle(content, step)  # type: ignore[assignment]
    return list(JsonArraySource("rows.json", named=named, stream=stream).rows())


def shown(found: list[Row]) -> list[Any]:
    return [msgspec.json.decode(row.args) if row.failure is None else row.failure.message for row in found]


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1 << 18])
def test_elements_are_rows_as_they_stand(step: int) -> None:
    content = b'\xef\xbb\xbf\n[{"a": "x,]}\\"[{\\\\"},\r\n  [1, [2]] ,{\n"b": {"c": []}}\n]\n'
    found = rows(content, step)
    assert [row.args for row in found] == [b'{"a": "x,]}\\"[{\\\\"}', b"[1, [2]]", b'{\n"b": {"c": []}}']
    assert [row.index for row in found] == [0, 1, 2]


@pytest.mark.parametrize("content", [b"[]", b" [ \n ] ", b""])
def test_no_rows(content: bytes) -> None:
    assert rows(content) == []


@pytest.mark.parametrize("step", [1, 5, 1 << 18])
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'[{"a":1},\n5,\n{"a":2}]', [{"a": 1}, "line 2: expected a JSON object (by name) or array", {"a": 2}]),
        (b'[{"a":1},\n{"a":},\n{"a":2}]', [{"a": 1}, "line 2 is not JSON: ", {"a": 2}]),
        (b'[{"a":1},\n{"a":1}},\n{"a":2}]', [{"a": 1}, "line 2 is not JSON: ", {"a": 2}]),
        (b'[{"a":NaN},\n[2]]', ["line 1 is not JSON: ", [2]]),
        (b"[[1],\n\n,[2]]", [[1], "line 3 is not JSON: ", [2]]),
        (b"[[1],\n[2],\n]", [[1], [2], "line 3 is not JSON: "]),
        (b'[[1],\n["\xff"],\n[2]]', [[1], "line 2 is not UTF-8: byte 0xff at byte 8", [2]]),
    ],
)
def test_an_element_that_is_no_row_is_its_own_failure(content: bytes, expected: list[Any], step: int) -> None:
    found = shown(rows(content, step))
    assert len(found) == len(expected)
    for got, wanted in zip(found, expected, strict=True):
        assert got.startswith(wanted) if isinstance(wanted, str) else got == wanted


@pytest.mark.parametrize("content", [b"[[1],\n[2", b"[[1],\n", b'[[1],\n{"a":"x', b"[[1],\n[2]", b'[[1],\n["\\'])
def test_an_array_that_is_cut_off_says_so(content: bytes) -> None:
    *good, last = rows(content, 3)
    assert all(row.failure is None for row in good)
    assert last.failure is not None
    assert "the file ends inside this line: it was cut off" in last.failure.message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'\n{"a": 1}\n', r"rows\.json: line 2: expected a JSON array of rows, got '\{'; rows on lines are JSON Lines"),
        (b"5", r"line 1: expected a JSON array of rows, got '5'"),
        (b"[[1]]\n[2]", r"line 2: expected nothing after the end of the array"),
        (b"  ", "got nothing but blanks"),
    ],
)
def test_what_is_no_array(content: bytes, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        rows(content)


def test_elements_that_name_their_function() -> None:
    assert rows(b'[{"function": "f", "args": [1]}]', named=True) == [Row(0, b"[1]", "f")]


def test_a_large_element_fails_alone_and_is_not_held() -> None:
    class Large(io.RawIOBase):
        parts = iter([b'[[1],\n["', *[b"x" * (1 << 20)] * 64, b'"],\n[2]]'])

        def read(self, size: int = -1) -> bytes:
            return next(self.parts, b"")

    source = JsonArraySource("rows.json", stream=Large())  # type: ignore[arg-type]
    tracemalloc.start()
    try:
        found = list(source.rows())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert shown(found)[0] == [1]
    assert shown(found)[2] == [2]
    assert found[1].failure is not None
    assert f"line 2 of {(64 << 20) + 4} bytes exceeds line_bytes_max={LINE_BYTES_MAX}" in found[1].failure.message
    assert peak < 4 * LINE_BYTES_MAX


def test_memory_does_not_grow_with_the_array() -> None:
    class Endless(io.RawIOBase):
        parts = iter([b"[[0]", *[b',\n{"x": "yyyyyyyyyyyyyyyyyyyy"}' * 2_000] * 100, b"]"])

        def read(self, size: int = -1) -> bytes:
            return next(self.parts, b"")

    source = JsonArraySource("rows.json", stream=Endless())  # type: ignore[arg-type]
    tracemalloc.start()
    try:
        assert sum(row.failure is None for row in source.rows()) == 200_001
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 40), 1 << 40) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.lists(_JSON) | st.dictionaries(st.text(), _JSON)), st.integers(1, 40), st.booleans())
def test_any_array_gives_its_elements(values: list[Any], step: int, pretty: bool) -> None:
    content = json.dumps(values, indent=2 if pretty else None, ensure_ascii=not pretty).encode()
    assert shown(rows(content, step)) == values
