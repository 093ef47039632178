"""What user functions import, over a runtime that the test plays."""

from __future__ import annotations

import datetime
import pickle
from typing import Any

import msgspec
import pytest

from callyard import sdk, sdk_io
from callyard.errors import CallError, ErrorKind, UsageError, fail
from callyard.sdk import IoReply
from callyard.sdk_io import FakeRequest, Headers, HttpStatusError, Response, fake_io, files, http, jsonrpc, sql


class Recorder:
    """Answers by `reply`; keeps what came."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Any, bytes | None]] = []
        self.raw: list[bytes] = []
        self.reply: IoReply | CallError = IoReply(b"null")

    def io(self, provider: str, operation: str, request: bytes, body: bytes | None = None) -> IoReply:
        self.asked.append((provider, operation, msgspec.json.decode(request), body))
        self.raw.append(request)
        if isinstance(self.reply, CallError):
            raise self.reply
        return self.reply

    async def aio(self, provider: str, operation: str, request: bytes, body: bytes | None = None) -> IoReply:
        return self.io(provider, operation, request, body)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(sdk, "_runtime", recorder)
    return recorder


OK = IoReply(b'{"status":200,"url":"https://h/x","headers":[["Content-Type","text/plain; charset=latin-1"]]}', b"\xe9")


async def test_http_both_forms(worker: Recorder) -> None:
    worker.reply = OK
    for response in (http.get("https://h/x"), await http.aget("https://h/x")):
        assert (response.status, response.text, response.url, response.ok) == (200, "é", "https://h/x", True)
    assert worker.asked == [("http", "GET", {"url": "https://h/x", "headers": []}, None)] * 2


async def test_every_method_and_its_awaited_form(worker: Recorder) -> None:
    worker.reply = OK
    for method in ("get", "head", "post", "put", "patch", "delete"):
        getattr(http, method)("u")
        await getattr(http, f"a{method}")("u")
        assert [asked[1] for asked in worker.asked[-2:]] == [method.upper()] * 2
    http.request("options", "u")
    assert worker.asked[-1][1] == "OPTIONS"


@pytest.mark.parametrize(
    ("url", "params", "expected"),
    [
        ("https://h/x", {"a": 1, "b": "ä &"}, "https://h/x?a=1&b=%C3%A4+%26"),
        ("https://h/x?y=1#z", {"a": [1, 2], "n": None, "t": True}, "https://h/x?y=1&a=1&a=2&t=true#z"),
        ("https://h/x?", [("a", 1), ("a", 2)], "https://h/x?a=1&a=2"),
        ("https://h/x", {"n": None}, "https://h/x"),
    ],
)
def test_params(worker: Recorder, url: str, params: Any, expected: str) -> None:
    worker.reply = OK
    http.get(url, params=params)
    assert worker.asked[0][2]["url"] == expected


@pytest.mark.parametrize(
    ("options", "body", "content_type"),
    [
        ({"json": {"day": datetime.date(2024, 1, 2)}}, b'{"day":"2024-01-02"}', "application/json"),
        ({"json": None}, b"null", "application/json"),
        ({"data": "ä"}, "ä".encode(), "text/plain; charset=utf-8"),
        ({"data": b"\0"}, b"\0", None),
        ({"data": {"a": 1}}, b"a=1", "application/x-www-form-urlencoded"),
        ({"data": b"<x/>", "headers": {"content-type": "text/xml"}}, b"<x/>", "text/xml"),
        ({"json": 1, "headers": {"content-type": "application/vnd.x+json"}}, b"1", "application/vnd.x+json"),
    ],
)
def test_bodies(worker: Recorder, options: Any, body: bytes, content_type: str | None) -> None:
    worker.reply = OK
    http.post("u", **options)
    _, _, request, sent = worker.asked[0]
    assert sent == body
    assert {name.lower(): value for name, value in request["headers"]}.get("content-type") == content_type


def test_options_of_a_request(worker: Recorder) -> None:
    worker.reply = OK
    http.get("u", timeout_s=1.5, redirects_max=0, max_bytes=10, fresh=True)
    assert worker.asked[0][1:3] == (
        "GET.fresh",
        {"url": "u", "headers": [], "timeout_ms": 1_500, "redirects_max": 0, "max_bytes": 10},
    )
    for wrong in ({"json": 1, "data": b""}, {"timeout_s": 0}, {"timeout_s": float("nan")}):
        with pytest.raises(ValueError):
            http.get("u", **wrong)
    with pytest.raises(TypeError, match="timeout"):
        http.get("u", timeout=3)  # type: ignore[call-arg]


@pytest.mark.requirement("X15", "X42")
def test_equal_requests_are_equal_bytes(worker: Recorder) -> None:
    worker.reply = IoReply(b'{"columns":[],"rows":[]}')
    sql.query("db", "select $a, $b", {"a": 1, "b": 2})
    sql.query("db", "select $a, $b", {"b": 2, "a": 1})
    assert worker.raw[0] == worker.raw[1]


def test_status_errors() -> None:
    response = Response(404, b"", url="https://h/x?key=secret")
    with pytest.raises(HttpStatusError, match="404") as caught:
        response.raise_for_status()
    assert "secret" not in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).response.status == 404  # noqa: S301 - our own bytes
    assert Response(204).raise_for_status().status == 204
    assert Response(200, '{"a":[1]}').json() == {"a": [1]}
    assert Response(200, b"\xff", {"Content-Type": "text/plain; charset=nonsense"}).text == "\N{REPLACEMENT CHARACTER}"


def test_headers_have_no_case_and_may_come_twice() -> None:
    headers = Headers([("Set-Cookie", "a"), ("set-cookie", "b"), ("X", "1")])
    assert (headers["SET-COOKIE"], headers.get_all("Set-cookie"), headers.get("y")) == ("a, b", ["a", "b"], None)
    assert "x" in headers
    assert len(headers) == 2
    assert headers.get_all("none") == []


async def test_files(worker: Recorder) -> None:
    worker.reply = IoReply(b'{"size":2}', "é".encode())
    assert files.read("data/x", offset=3, length=9) == b"\xc3\xa9"
    assert files.read_text("data/x") == await files.aread_text("data/x") == "é"
    assert worker.asked[0] == ("files", "read", {"path": "data/x", "offset": 3, "length": 9}, None)
    worker.reply = IoReply(b'[{"name":"a","kind":"file","size":1,"modified_s":2.5}]')
    assert [entry.name for entry in files.list("data")] == [entry.name for entry in await files.alist("data")] == ["a"]
    worker.reply = IoReply(b'{"name":"a","kind":"file","size":1,"modified_s":2.5}')
    assert files.stat("data/a") == await files.astat("data/a") == sdk_io.FileInfo("a", "file", 1, 2.5)
    with pytest.raises(ValueError):
        files.read("x", offset=-1)


async def test_sql(worker: Recorder) -> None:
    worker.reply = IoReply(b'{"columns":["a","b"],"rows":[[1,"x"],[2,null]]}')
    rows = [{"a": 1, "b": "x"}, {"a": 2, "b": None}]
    assert sql.query("db", "select", [b"\0", datetime.date(2024, 1, 2)], rows_max=5) == rows
    assert await sql.aquery("db", "select") == rows
    assert sql.rows("db", "select") == await sql.arows("db", "select") == [(1, "x"), (2, None)]
    assert worker.asked[0][2] == {
        "database": "db",
        "sql": "select",
        "params": [{"$bytes": "AA=="}, "2024-01-02"],
        "rows_max": 5,
    }
    worker.reply = IoReply(b'{"columns":["a","a"],"rows":[[1,2]]}')
    with pytest.raises(ValueError, match="several columns are named a"):
        sql.query("db", "select")
    assert sql.rows("db", "select") == [(1, 2)]
    with pytest.raises(TypeError, match="write \\[value\\]"):
        sql.query("db", "select", "x")


async def test_jsonrpc(worker: Recorder) -> None:
    worker.reply = IoReply(b'{"price":3}')
    assert jsonrpc.call("e", "get", [1]) == await jsonrpc.acall("e", "get", [1]) == {"price": 3}
    jsonrpc.notify("e", "log", {"a": 1})
    await jsonrpc.anotify("e", "log")
    assert [asked[1:3] for asked in worker.asked[1:]] == [
        ("call", {"endpoint": "e", "method": "get", "params": [1]}),
        ("notify", {"endpoint": "e", "method": "log", "params": {"a": 1}}),
        ("notify", {"endpoint": "e", "method": "log"}),
    ]


async def test_any_provider(worker: Recorder) -> None:
    worker.reply = IoReply(b"[1]", b"raw")
    assert sdk_io.ask("redis", "get", {"key": "a"}, b"x") == await sdk_io.aask("redis", "get") == ([1], b"raw")
    assert worker.asked == [("redis", "get", {"key": "a"}, b"x"), ("redis", "get", None, None)]


def test_what_the_worker_refuses_is_raised(worker: Recorder) -> None:
    worker.reply = CallError(fail(ErrorKind.DENIED, "not allowed"))
    with pytest.raises(CallError, match="not allowed"):
        http.get("u")


def test_outside_an_executor_the_error_says_what_to_do() -> None:
    assert sdk.runtime() is None
    with pytest.raises(UsageError, match=r"http GET: there is no worker here.*callyard call.*fake_io"):
        http.get("https://h/", fresh=True)


async def test_fake_io() -> None:
    asked: list[FakeRequest] = []
    answers: dict[str, object] = {
        "http": Response(200, '{"km":1}', {"X": "y"}),
        "files": "text",
        "sql": [{"a": 1}],
        "jsonrpc": 5,
        "other": IoReply(b"1", b"2"),
    }

    def answer(one: FakeRequest) -> object:
        asked.append(one)
        return answers[one.provider]

    with fake_io(answer):
        response = http.post("https://h/x", json=1, fresh=True)
        assert (response.json(), response.headers["x"], response.url) == ({"km": 1}, "y", "https://h/x")
        assert (await files.aread("d/x"), files.read_text("d/x")) == (b"text", "text")
        assert sql.query("d", "select") == [{"a": 1}]
        assert jsonrpc.call("e", "m") == 5
        assert sdk_io.ask("other", "x") == (1, b"2")
        with fake_io(lambda _: 3), pytest.raises(TypeError, match="answered by a Response"):
            http.get("u")
        answers["sql"] = [(1, 2)]
        assert sql.rows("d", "select") == [(1, 2)]
    assert (asked[0].operation, asked[0].body, asked[0].request["url"]) == ("POST", b"1", "https://h/x")
    with pytest.raises(UsageError):
        http.get("u")
