from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callyard.worker.io.cache import ENTRY_BYTES, KEY_BYTES, ReplyCache, make_key
from callyard.worker.io.hub import IoLimits
from callyard.worker.io.port import Reply


@pytest.mark.requirement("X15", "X42")
def test_default_bounds() -> None:
    assert (IoLimits().cache_entries, IoLimits().cache_bytes_max) == (65_536, 32 * 1024 * 1024)
    assert len(make_key("p", "o", b"r", None)) == KEY_BYTES == 16


@given(
    *[st.tuples(st.text(max_size=3), st.text(max_size=3), st.binary(max_size=3), st.none() | st.binary(max_size=6))] * 2
)
def test_keys_are_equal_only_for_equal_requests(
    one: tuple[str, str, bytes, bytes | None], two: tuple[str, str, bytes, bytes | None]
) -> None:
    assert (make_key(*one) == make_key(*two)) == (one == two)


def test_no_body_is_not_an_empty_one() -> None:
    assert len({make_key("p", "o", b"", body) for body in (None, b"", b"body")}) == 3


@pytest.mark.requirement("X15", "X42")
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 300), st.booleans()), max_size=60))
def test_bounds_and_order_against_a_plain_model(steps: list[tuple[int, int, bool]]) -> None:
    cache = ReplyCache(3, 4 * ENTRY_BYTES)
    model: dict[bytes, Reply] = {}  # in order of use
    for number, size, is_put in steps:
        key = b"%d" % number
        if is_put:
            reply = Reply(b"x" * (size // 2), b"y" * (size - size // 2))
            cache.put(key, reply)
            if size + ENTRY_BYTES <= 4 * ENTRY_BYTES:
                model.pop(key, None)
                model[key] = reply
            while len(model) > 3 or held(model) > 4 * ENTRY_BYTES:
                del model[next(iter(model))]
        else:
            found = cache.get(key)
            assert found is model.get(key)
            if found is not None:
                model[key] = model.pop(key)
        assert (len(cache), cache.held_bytes) == (len(model), held(model))
    assert cache.held_bytes <= 4 * ENTRY_BYTES


def held(model: dict[bytes, Reply]) -> int:
    return sum(len(reply.result) + len(reply.body or b"") + ENTRY_BYTES for reply in model.values())


def test_one_larger_than_all_is_not_kept_and_costs_the_others_nothing() -> None:
    cache = ReplyCache(10, 1_000)
    cache.put(b"small", Reply(b"1"))
    cache.put(b"large", Reply(b"1" * 1_000))
    assert cache.get(b"large") is None
    assert cache.get(b"small") is not None
