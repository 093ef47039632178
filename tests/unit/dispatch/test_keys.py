"""Idempotency keys: the same everywhere, and of good form."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callyard.dispatch.keys import KEY_CHARACTERS_MAX, check_key, derive_key, fingerprint
from callyard.errors import UsageError

# Written down, not computed: they must never change, since callers of other languages derive the same.
VECTORS = [
    ({}, "{}"),
    ({"cents": 500, "account": "a-1"}, '{"account":"a-1","cents":500}'),
    ({"x": 1.0, "y": -0.0, "z": 1e21}, '{"x":1,"y":0,"z":1e+21}'),
    ({"x": [0.1, 1e-7, 1e-6, 123456789.5, 1e20]}, '{"x":[0.1,1e-7,0.000001,123456789.5,100000000000000000000]}'),
    (
        {"n": 10**30, "t": "1.0", "u": None, "b": True},
        '{"b":true,"n":1000000000000000000000000000000,"t":"1.0","u":null}',
    ),
    ({"é": "ü\n\u2028/", "z": {"b": 1, "a": [3, 1, 2]}}, '{"z":{"a":[3,1,2],"b":1},"é":"ü\\n\u2028/"}'),
]


@pytest.mark.requirement("D15")
@pytest.mark.parametrize(("args", "canonical"), VECTORS)
def test_a_derived_key_is_the_hash_of_canonical_json(args: dict[str, Any], canonical: str) -> None:
    expected = hashlib.sha256(canonical.encode()).hexdigest()[:16]
    assert derive_key("step-3", "payments.charge", args) == f"step-3:payments.charge:{expected}"


@pytest.mark.requirement("D15")
def test_derived_keys_written_down() -> None:
    assert derive_key("s1", "charge", {"a": 2, "b": 1}) == "s1:charge:d3626ac30a87e6f7"
    assert derive_key("s1", "charge", {}) == "s1:charge:44136fa355b3678a"


@pytest.mark.requirement("D15")
def test_the_same_in_every_process() -> None:
    program = (
        "from callyard.dispatch.keys import derive_key\n"
        "print(derive_key('s', 't', {'tags': {'x', 'y', 'z'}, 'n': 0.1, 'm': {'k2': 2, 'k1': 1}}))"
    )
    keys = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(keys) == 1


@pytest.mark.requirement("D15")
def test_order_of_names_and_way_of_writing_numbers_do_not_count() -> None:
    base = derive_key("s", "t", {"a": 1, "b": 2})
    assert derive_key("s", "t", OrderedDict([("b", 2.0), ("a", 1)])) == base
    others = [
        derive_key("s2", "t", {"a": 1, "b": 2}),
        derive_key("s", "t2", {"a": 1, "b": 2}),
        derive_key("s", "t", {"a": 1, "b": 3}),
        derive_key("s", "t", {"a": 1, "b": "2"}),
        derive_key("s", "t", {"a": True, "b": 2}),
        derive_key("s", "t", [1, 2]),
    ]
    assert len({base, *others}) == 7


@pytest.mark.requirement("D16")
@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (b'{"a":1,"b":2}', b' { "b" : 2.0, "a" : 1e0 } ', True),
        (b'{"a":"\\u00e9"}', '{"a":"é"}'.encode(), True),
        (b"[0]", b"[-0.0]", True),
        (b"[1]", b"[true]", False),
        (b"[1]", b'["1"]', False),
        (b"[1,2]", b"[2,1]", False),
        (b'{"a":null}', b"{}", False),
        (b"[9007199254740993]", b"[9007199254740992]", False),
        (b"[9007199254740992.0]", b"[9007199254740992]", True),
    ],
)
def test_fingerprints(one: bytes, other: bytes, same: bool) -> None:
    assert (fingerprint(one) == fingerprint(other)) is same
    assert len(fingerprint(one)) == 64


@pytest.mark.requirement("D15")
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_is_its_double(number: float) -> None:
    assert fingerprint(repr(number).encode()) == fingerprint(f"{number:.17e}".encode())
    if number.is_integer() and abs(number) <= 2**53:  # above, integers have digits that doubles have not
        assert fingerprint(repr(number).encode()) == fingerprint(str(int(number)).encode())


@pytest.mark.requirement("D15")
@pytest.mark.parametrize("key", ["a", "order-7", "k" * KEY_CHARACTERS_MAX, "Заказ 7 ✓", " "])
def test_good_keys(key: str) -> None:
    assert check_key(key) == key


@pytest.mark.requirement("D15")
@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("", "1 to 256 characters, this one 0"),
        ("k" * 257, "this one 257"),
        ("a\nb", r"U\+000A \(character 2\)"),
        ("a\x00", r"U\+0000"),
        ("\ud800", r"U\+D800"),
        ("a\u202eb", r"U\+202E"),
        (7, "text, not int"),
        (None, "text, not NoneType"),
    ],
)
def test_bad_keys(key: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told) as refused:
        check_key(key)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 200


@pytest.mark.requirement("D15")
def test_what_no_key_is_derived_from() -> None:
    with pytest.raises(UsageError, match="/x"):
        derive_key("s", "t", {"x": float("nan")})
    with pytest.raises(UsageError, match="1 to 256 characters"):
        derive_key("s" * 300, "t", {})
    with pytest.raises(UsageError, match="printable"):
        derive_key("s\n", "t", {})
    for raw in (b"{", b"", b"[1e400]", b'["\xff"]', b"[" * 100_000):
        with pytest.raises(UsageError):
            fingerprint(raw)


def test_no_hash_library_is_loaded_before_a_key_is_used() -> None:
    program = "import sys, callyard.dispatch.keys\nprint('_hashlib' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.strip() == "False"
