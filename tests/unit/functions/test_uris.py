"""URIs of resources and templates of them."""

from __future__ import annotations

import urllib.parse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callyard.functions.uris import match_uri, parse_uri


@pytest.mark.parametrize(
    ("template", "uri", "values"),
    [
        ("config://app", "config://app", {}),
        ("config://app", "config://app/", None),
        ("test://template/{id}/data", "test://template/123/data", {"id": "123"}),
        ("test://template/{id}/data", "test://template//data", None),
        ("test://template/{id}/data", "test://template/1/2/data", None),
        ("test://template/{id}/data", "test://template/1/data/", None),
        ("test://{id}", "test://a%20b%2Fc", {"id": "a b/c"}),
        ("test://{id}", "test://a?b", None),
        ("test://{id}", "test://a%zz", None),
        ("test://{id}", "test://a%ff", None),
        ("test://{id}", "test://é", {"id": "é"}),
        ("test://{id}", "test://a b", None),
        ("test://{a}-{b}.txt", "test://1-2-3.txt", {"a": "1", "b": "2-3"}),
        ("test://{a}-{b}.txt", "test://--x.txt", {"a": "-", "b": "x"}),
        ("test://{a}-{b}", "test://1-", None),
        ("test://{a}x/y{b}", "test://ax/yx/yb", None),
        ("test://a?q={q}", "test://a?q=1", {"q": "1"}),
    ],
)
def test_matching(template: str, uri: str, values: dict[str, str] | None) -> None:
    assert match_uri(template, uri) == values


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("app", "expected a URI such as config://app"),
        ("test://a b", "expected a URI"),
        ("", "expected a URI"),
        ("{scheme}://a", "expected a URI|scheme"),
        ("test://{}", "expected {name} of a parameter"),
        ("test://{+path}", r"got \{\+path\}"),
        ("test://{a", "brace"),
        ("test://a}", "brace"),
        ("test://{a}{b}", "need text between"),
        ("test://{a}/{a}", "stands twice"),
        ("test://" + "a" * 9_000, "at most 8192 characters"),
    ],
)
def test_what_is_no_template_is_refused(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_uri(template)


_VALUES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)


@given(_VALUES, _VALUES)
def test_what_was_filled_in_comes_out(a: str, b: str) -> None:
    uri = f"test://{urllib.parse.quote(a, safe='')}/x/{urllib.parse.quote(b, safe='')}"
    assert match_uri("test://{a}/x/{b}", uri) == {"a": a, "b": b}


@given(st.text("a-./%2", max_size=12))
def test_a_match_is_found_where_there_is_one(uri: str) -> None:
    """Against all ways to cut it."""
    template = parse_uri("t:{a}-.{b}.")
    cuts = [i for i in range(1, len(uri)) if uri.startswith("-.", i)]
    some = any(match_uri("t:{x}", f"t:{uri[:i]}") and match_uri("t:{x}", f"t:{uri[i + 2 : -1]}") for i in cuts)
    assert (template.match(f"t:{uri}") is not None) == (some and uri.endswith("."))


def test_a_hostile_uri_costs_little() -> None:
    template = "test://" + "".join(f"{{v{number}}}-" for number in range(100)) + "end"
    assert match_uri(template, "test://" + "a-" * 4_000) is None
    assert match_uri("test://{a}", "test://" + "a" * 9_000) is None
