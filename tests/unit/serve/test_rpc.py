from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from callyard.serve.rpc import CallOptions, RpcError, RpcRequest, read_body

BATCH_MAX = 100


def read_one(body: bytes | str) -> RpcRequest:
    requests, is_batch = read_body(body if isinstance(body, bytes) else body.encode(), BATCH_MAX)
    assert not is_batch
    assert len(requests) == 1
    return requests[0]


def codes(body: bytes | str) -> list[int | None]:
    try:
        requests, _ = read_body(body if isinstance(body, bytes) else body.encode(), BATCH_MAX)
    except RpcError as error:
        return [error.code]
    return [None if one.error is None else one.error.code for one in requests]


def request(**members: Any) -> str:
    return json.dumps({"jsonrpc": "2.0", "id": 1, "method": "add", **members})


@pytest.mark.requirement("D36")
def test_a_request_is_read_and_its_params_stay_bytes() -> None:
    one = read_one('{"jsonrpc": "2.0", "method": "add", "params": {"a": 1e2}, "id": "x"}')
    assert (one.method, one.params, one.error) == ("add", b'{"a": 1e2}', None)
    assert bytes(one.id or b"") == b'"x"'


@pytest.mark.parametrize("request_id", ["1", "-7", '"a"', '""', "null", str(10**30)])
def test_ids_that_are_taken(request_id: str) -> None:
    one = read_one(f'{{"jsonrpc":"2.0","method":"add","id":{request_id}}}')
    assert one.error is None
    assert bytes(one.id or b"") == request_id.encode()


@pytest.mark.parametrize("request_id", ["1.5", "1e3", "true", "{}", "[1]", json.dumps("x" * 2_000)])
def test_ids_that_are_not(request_id: str) -> None:
    one = read_one(f'{{"jsonrpc":"2.0","method":"add","id":{request_id}}}')
    assert one.error is not None
    assert (one.error.code, bytes(one.id or b"")) == (-32600, b"null")


def test_what_has_no_id_is_a_notification() -> None:
    assert read_one('{"jsonrpc":"2.0","method":"add"}').id is None


@pytest.mark.requirement("D36", "D26")
@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("", -32700),
        ("{", -32700),
        ("nonsense", -32700),
        ('{"jsonrpc":"2.0","method":"add","id":NaN}', -32700),
        ('{"jsonrpc":"2.0","method":"add","id":1,"params":{"a":NaN}}', -32700),
        (b'{"jsonrpc":"2.0","method":"\xff","id":1}', -32700),
        ("[]", -32600),
        ("5", -32600),
        ("null", -32600),
        ('"add"', -32600),
        ('{"method":"add","id":1}', -32600),
        ('{"jsonrpc":"1.0","method":"add","id":1}', -32600),
        ('{"jsonrpc":2.0,"method":"add","id":1}', -32600),
        ('{"jsonrpc":"2.0","id":1}', -32600),
        ('{"jsonrpc":"2.0","method":5,"id":1}', -32600),
        ('{"jsonrpc":"2.0","method":"","id":1}', -32600),
        ('{"jsonrpc":"2.0","method":"add","method":"charge","id":1}', -32600),
        ('{"jsonrpc":"2.0","method":"add","params":{},"params":{},"id":1}', -32600),
        ('{"jsonrpc":"2.0","method":"add","id":1,"id":2}', -32600),
        ('{"jsonrpc":"2.0","method":"add","id":1,"params":5}', -32602),
        ('{"jsonrpc":"2.0","method":"add","id":1,"params":"a"}', -32602),
        ('{"jsonrpc":"2.0","method":"add","id":1,"params":[1]}', -32602),
        ('{"jsonrpc":"2.0","method":"add","id":1,"params":{"a":1,"a":2}}', -32602),
        ('{"jsonrpc":"2.0","method":"add","id":1,"params":{"a":1e999}}', -32602),
        ('{"jsonrpc":"2.0","method":"add","id":1,"params":{"a":"\\ud800"}}', -32700),
        ('{"jsonrpc":"2.0","method":"add","id":1,"params":{"a":' + "[" * 300 + "]" * 300 + "}}", -32602),
        ('{"jsonrpc":"2.0","method":"add","id":1,"params":{"a":' + "[" * 600 + "]" * 600 + "}}", -32600),
        ("[" * 100_000, -32600),
        ("[" * 2_000_000 + "]" * 2_000_000, -32600),
        ("[" + ",".join(["{}"] * 101) + "]", -32600),
        ('{"jsonrpc":"2.0","method":"add","id":1,"callyard":{"deadline_ms":"soon"}}', -32600),
        ('{"jsonrpc":"2.0","method":"add","id":1,"callyard":{"colour":"red"}}', -32600),
    ],
)
def test_what_is_no_request_has_its_code(body: str | bytes, code: int) -> None:
    assert codes(body) == [code]


@pytest.mark.requirement("D36")
def test_one_wrong_request_of_a_batch_is_its_own_answer() -> None:
    batch = f"[{request()}, 5, {request(method=1)}, {request(params={'a': 1})}]"
    assert codes(batch) == [None, -32600, -32600, None]


def test_no_params_may_be_an_empty_array() -> None:
    assert read_one(request(params=[])).params == b""


def test_options_beside_the_params() -> None:
    given_options = {"idempotency_key": "order-7", "owner": "ada", "deadline_ms": 20, "tags": {"team": "blue"}}
    options = read_one(request(callyard=given_options)).options
    assert options == CallOptions(idempotency_key="order-7", owner="ada", deadline_ms=20, tags={"team": "blue"})
    below = CallOptions(owner="bob", timeout_ms=5)
    assert options.over(below) == msgspec.structs.replace(options, timeout_ms=5)
    assert CallOptions().over(below) == below


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.sampled_from(["jsonrpc", "id", "method", "params", "callyard", "x"]),
        JSON_VALUES | st.just("2.0"),
        max_size=6,
    )
    | JSON_VALUES
)
def test_any_json_is_read_or_has_a_code(value: Any) -> None:
    for code in codes(json.dumps(value)):
        assert code in (None, -32600, -32602, -32700)


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_have_a_code(body: bytes) -> None:
    for code in codes(body):
        assert code in (None, -32600, -32602, -32700)


@pytest.mark.parametrize("padding", [0, 5_000])
def test_large_arguments_hide_no_key_of_the_envelope(padding: int) -> None:
    params = '{"a":"' + "x" * padding + '"}'
    assert codes(f'{{"jsonrpc":"2.0","method":"add","id":1,"params":{params}}}') == [None]
    assert codes(f'{{"jsonrpc":"2.0","method":"add","id":1,"params":{params},"params":{params}}}') == [-32600]
    assert codes(f'{{"jsonrpc":"2.0","params":{params},"method":"add","method":"charge","id":1}}') == [-32600]
    assert codes(f'{{"jsonrpc":"2.0","params":{params},"method":"add","id":1,"x":{params}}}') == [None]


def test_infinities_of_python_are_no_json() -> None:
    assert codes(request(params={"a": math.inf})) == [-32700]
