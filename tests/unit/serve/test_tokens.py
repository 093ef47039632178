"""Tokens: made once, kept as a hash, found by what was shown."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from callyard.errors import UsageError
from callyard.ids import Tenant
from callyard.serve.gateway import Caller
from callyard.serve.tokens import PREFIX, Tokens, hash_token, new_token, read_token, show_table


def test_a_token_is_long_random_and_ours_by_its_look() -> None:
    made = {new_token() for _ in range(100)}
    assert len(made) == 100
    assert all(token.startswith(PREFIX) and len(token) == len(PREFIX) + 43 for token in made)


@pytest.mark.requirement("D36")
def test_what_is_printed_for_the_config_lets_the_token_in_and_does_not_hold_it() -> None:
    token = new_token()
    caller = Caller(
        tenant=Tenant('a "quoted" one'), token="ci", tools=("read_*", "a'b"), owner="o", rate="10/s", running_max=5
    )
    table = show_table(token, caller)
    assert token not in table
    read = tomllib.loads(table)["serve"]["tokens"]
    tokens = Tokens(read_token(name, settings) for name, settings in read.items())
    assert tokens.are_asked_for
    assert tokens.find(token) == caller
    assert tokens.find_bearer(f"Bearer {token}") == caller
    assert tokens.find_bearer(f"bearer   {token} ") == caller
    for wrong in ("", token[:-1], token + "x", token.upper(), "\ud800", "x" * 10_000, hash_token(token).hex()):
        assert tokens.find(wrong) is None
    for header in (None, "", token, f"Basic {token}", "Bearer", "Bearer "):
        assert tokens.find_bearer(header) is None


def test_any_text_can_stand_in_the_table_that_is_printed() -> None:
    caller = Caller(
        tenant=Tenant("t"), token="ci", tools=("a\x7f", "b\n\t\\é", "\N{NO-BREAK SPACE}"), claims={"a b": [1, "x"]}
    )
    token = new_token()
    read = tomllib.loads(show_table(token, caller))["serve"]["tokens"]["ci"]
    assert read_token("ci", read).caller == caller


def test_without_tokens_everybody_is_anonymous() -> None:
    tokens = Tokens()
    assert not tokens.are_asked_for
    assert tokens.find_bearer(None) == tokens.find_bearer("Bearer x") == Caller()
    assert tokens.find("x") is None


GOOD: dict[str, Any] = {"hash": "sha256:" + "0" * 64, "tenant": "t"}


@pytest.mark.parametrize(
    ("settings", "setting", "says"),
    [
        ({"hash": "plain text"}, "hash", "64 hexadecimal"),
        ({"hash": "sha256:" + "Z" * 64}, "hash", "64 hexadecimal"),
        ({"tenant": ""}, "tenant", "printable"),
        ({"tenant": None}, "tenant", "missing"),
        ({"tools": "read_*"}, "tools", "list"),
        ({"tools": []}, "tools", "names or patterns"),
        ({"tools": [3]}, "tools", "patterns"),
        ({"rate": "fast"}, "rate", "10/s"),
        ({"running_max": 0}, "running_max", "whole number"),
        ({"running_max": True}, "running_max", "whole number"),
        ({"claims": [1]}, "claims", "table"),
        ({"speed": 1}, "speed", "there are: hash, tenant"),
    ],
)
def test_a_table_that_does_not_fit_says_what_of_it(settings: dict[str, Any], setting: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as wrong:
        read_token("ci", {**GOOD, **settings})
    assert wrong.value.setting == (setting,)  # type: ignore[attr-defined]
    assert "serve.tokens.ci" in str(wrong.value)


@pytest.mark.parametrize("name", ["", "a.b", "ä", "x" * 65, 'a"b'])
def test_a_tokens_name_is_a_plain_word(name: str) -> None:
    with pytest.raises(UsageError, match="name of a token"):
        read_token(name, GOOD)


@pytest.mark.requirement("D47")
@pytest.mark.parametrize(
    ("globs", "seen", "not_seen"),
    [
        (("*",), ("a", "b.c", "A"), ()),
        (("read_*",), ("read_", "read_x.y"), ("Read_x", "xread_", "read")),
        (("a", "b?"), ("a", "bc"), ("aa", "b", "bcd")),
        (("a*a*a*a*b",), ("aaaab",), ("a" * 256,)),
    ],
)
def test_globs(globs: tuple[str, ...], seen: tuple[str, ...], not_seen: tuple[str, ...]) -> None:
    caller = Caller(tools=globs)
    assert all(caller.sees(name) for name in seen)
    assert not any(caller.sees(name) for name in not_seen)
    assert caller.is_limited == ("*" not in globs)


@pytest.mark.requirement("D36", "D44")
def test_once_a_token_is_asked_for_nobody_is_anonymous_again() -> None:
    """A file that was emptied, or is just being written, opens nothing."""
    token = new_token()
    known = read_token("ci", {"hash": f"sha256:{hash_token(token).hex()}", "tenant": "acme"})
    tokens = Tokens()
    assert tokens.find_bearer(None) == tokens.anonymous
    tokens.replace([known])
    assert tokens.find_bearer(None) is None
    tokens.replace([])
    assert tokens.are_asked_for
    assert (tokens.find_bearer(None), tokens.find(token)) == (None, None)
    tokens.replace([known])
    assert tokens.find(token) == known.caller
