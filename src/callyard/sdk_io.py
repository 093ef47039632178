"""IO for user functions: `http`, `files`, `sql` and `jsonrpc`, each done by the worker on the function's behalf.

A call that waits for one of them blocks that call and no other, in a `def` and in an `async def` alike; the form with
an `a` (`aget`, `aread`, `aquery`, `acall`) is awaited. Reads are kept for the task: asking twice asks once, unless
`fresh=True`. What fails raises `CallError` with a kind: `denied` (not allowed here), `timeout`, `unavailable`,
`result` (too large), `not_found`, `schema`, `tool_error` (the other side's own answer).

Outside an executor there is no worker to ask; a test says what the answers are with `fake_io`.
Source: call-execution X42, X52.
"""

from __future__ import annotations

import json as json_module
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol, TypedDict, TypeVar, cast

import msgspec

from callyard import sdk
from callyard.errors import CallyardError, UsageError
from callyard.sdk import IoReply

if TYPE_CHECKING:
    from typing import Unpack

T = TypeVar("T")

FRESH: Final = ".fresh"
"""At the end of an operation: neither kept nor joined with equal requests."""
Parameters = Sequence[Any] | Mapping[str, Any]


class IoRuntime(Protocol):
    """What an executor gives this module: the part of `sdk.Runtime` that does IO."""

    def io(self, provider: str, operation: str, request: bytes, body: bytes | None = None) -> IoReply: ...
    async def aio(self, provider: str, operation: str, request: bytes, body: bytes | None = None) -> IoReply: ...


# --- asking -------------------------------------------------------------------------------------------------------


class Question:
    """One request to a provider, ready to be sent."""

    __slots__ = ("body", "operation", "provider", "request")

    def __init__(self, provider: str, operation: str, request: Any, body: bytes | None, fresh: bool) -> None:
        from callyard.functions.encoding import encode_canonical  # not for those who never ask

        self.provider = provider
        self.operation = operation + FRESH if fresh else operation
        # equal requests are equal bytes; what is encoded already keeps the order of its fields
        self.request = request if isinstance(request, bytes) else encode_canonical(request)
        self.body = body

    def ask(self, read: Callable[[IoReply], T]) -> T:
        return read(self._find_runtime().io(self.provider, self.operation, self.request, self.body))

    async def aask(self, read: Callable[[IoReply], T]) -> T:
        return read(await self._find_runtime().aio(self.provider, self.operation, self.request, self.body))

    def _find_runtime(self) -> IoRuntime:
        found = _fake or sdk.runtime() or self._find_here()
        if found is None:
            raise UsageError(
                f"{self.provider} {self.operation.removesuffix(FRESH)}: there is no worker here to do it. Run the "
                "function with `callyard call FILE:FUNCTION …` or `Yard(FILE).call(…)`; in a test, say what is "
                "answered: `with callyard.sdk_io.fake_io(answer): …`"
            )
        return found

    def _find_here(self) -> IoRuntime | None:
        """Who does it where no worker is; None: nobody."""
        return None


def ask(
    provider: str, operation: str, request: Any = None, body: bytes | None = None, *, fresh: bool = False
) -> tuple[Any, bytes | None]:
    """Ask any provider of the worker, such as one that a package brings: its result, and the body beside it.

    `request` is anything that JSON holds.
    """
    return Question(provider, operation, request, body, fresh).ask(_read_both)


async def aask(
    provider: str, operation: str, request: Any = None, body: bytes | None = None, *, fresh: bool = False
) -> tuple[Any, bytes | None]:
    """As `ask`."""
    return await Question(provider, operation, request, body, fresh).aask(_read_both)


def _read_both(reply: IoReply) -> tuple[Any, bytes | None]:
    return _decode(reply), reply.body


def _decode(reply: IoReply) -> Any:
    return msgspec.json.decode(reply.result)


def _body_of(reply: IoReply) -> bytes:
    return reply.body or b""


# --- http ---------------------------------------------------------------------------------------------------------


class HttpStatusError(CallyardError):
    """`raise_for_status` met a status from 400. `response` is what came."""

    def __init__(self, response: Response) -> None:
        super().__init__(f"HTTP status {response.status} from {response.url.partition('?')[0]}")
        self.response = response

    def __reduce__(self) -> tuple[type[HttpStatusError], tuple[Response]]:
        return type(self), (self.response,)


class Headers(Mapping[str, str]):
    """Names in any case. One that came several times gives its values joined by `, `; `get_all` gives each."""

    __slots__ = ("_values",)

    def __init__(self, pairs: Sequence[tuple[str, str]] = ()) -> None:
        self._values: dict[str, list[str]] = {}
        for name, value in pairs:
            self._values.setdefault(name.lower(), []).append(value)

    def __getitem__(self, name: str) -> str:
        return ", ".join(self._values[name.lower()])

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def get_all(self, name: str) -> list[str]:
        return list(self._values.get(name.lower(), ()))

    def __repr__(self) -> str:
        return f"Headers({dict(self)!r})"


class Response:
    """An HTTP response, read to its end. A status of 400 and more is a response too: see `raise_for_status`."""

    __slots__ = ("body", "headers", "status", "url")

    def __init__(
        self,
        status: int = 200,
        body: bytes | str = b"",
        headers: Mapping[str, str] | Sequence[tuple[str, str]] = (),
        url: str = "",
    ) -> None:
        self.status = status
        self.body = body.encode() if isinstance(body, str) else body
        pairs = headers if isinstance(headers, list) else headers.items() if isinstance(headers, Mapping) else headers
        self.headers = Headers(list(pairs))
        self.url = url
        """Where it came from, after redirects."""

    @property
    def ok(self) -> bool:
        return self.status < 400

    @property
    def text(self) -> str:
        """The body by the charset of its content type, else UTF-8; what does not decode becomes U+FFFD."""
        _, _, rest = self.headers.get("content-type", "").partition("charset=")
        charset = rest.split(";")[0].strip().strip("\"'") or "utf-8"
        try:
            return self.body.decode(charset, "replace")
        except LookupError:
            return self.body.decode("utf-8", "replace")

    def json(self) -> Any:
        """The body as JSON. Raises ValueError."""
        return json_module.loads(self.body)

    def raise_for_status(self) -> Response:
        """Itself, or `HttpStatusError` for a status from 400."""
        if self.status >= 400:
            raise HttpStatusError(self)
        return self

    def __repr__(self) -> str:
        return f"Response({self.status}, {len(self.body)} bytes, {self.url!r})"


class HttpOptions(TypedDict, total=False):
    """Keywords of every method of `http`."""

    params: Mapping[str, Any] | Sequence[tuple[str, Any]]
    """Added to the URL's query; a list gives its name several times, None is left out."""
    headers: Mapping[str, str]
    json: Any
    """The body, as JSON; sets Content-Type."""
    data: bytes | str | Mapping[str, Any]
    """The body as it is, or a form."""
    timeout_s: float
    """For the whole answer, redirects included."""
    redirects_max: int
    """At most the worker's; 0: a redirect is the answer."""
    max_bytes: int
    """At most the worker's; a larger body raises `CallError` of kind `result`."""
    fresh: bool
    """Ask again though the task has an answer: for polling."""


class Http:
    """`http.get(url)` and its kin; `aget(url)` and its kin are awaited."""

    def request(self, method: str, url: str, **options: Unpack[HttpOptions]) -> Response:
        return _http_question(method, url, **options).ask(_read_response)

    async def arequest(self, method: str, url: str, **options: Unpack[HttpOptions]) -> Response:
        return await _http_question(method, url, **options).aask(_read_response)

    def get(self, url: str, **options: Unpack[HttpOptions]) -> Response:
        return self.request("GET", url, **options)

    def head(self, url: str, **options: Unpack[HttpOptions]) -> Response:
        return self.request("HEAD", url, **options)

    def post(self, url: str, **options: Unpack[HttpOptions]) -> Response:
        return self.request("POST", url, **options)

    def put(self, url: str, **options: Unpack[HttpOptions]) -> Response:
        return self.request("PUT", url, **options)

    def patch(self, url: str, **options: Unpack[HttpOptions]) -> Response:
        return self.request("PATCH", url, **options)

    def delete(self, url: str, **options: Unpack[HttpOptions]) -> Response:
        return self.request("DELETE", url, **options)

    async def aget(self, url: str, **options: Unpack[HttpOptions]) -> Response:
        return await self.arequest("GET", url, **options)

    async def ahead(self, url: str, **options: Unpack[HttpOptions]) -> Response:
        return await self.arequest("HEAD", url, **options)

    async def apost(self, url: str, **options: Unpack[HttpOptions]) -> Response:
        return await self.arequest("POST", url, **options)

    async def aput(self, url: str, **options: Unpack[HttpOptions]) -> Response:
        return await self.arequest("PUT", url, **options)

    async def apatch(self, url: str, **options: Unpack[HttpOptions]) -> Response:
        return await self.arequest("PATCH", url, **options)

    async def adelete(self, url: str, **options: Unpack[HttpOptions]) -> Response:
        return await self.arequest("DELETE", url, **options)


_UNSET: Final = msgspec.UNSET


def _http_question(
    method: str,
    url: str,
    *,
    params: Mapping[str, Any] | Sequence[tuple[str, Any]] | None = None,
    headers: Mapping[str, str] | None = None,
    json: Any = _UNSET,
    data: bytes | str | Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    redirects_max: int | None = None,
    max_bytes: int | None = None,
    fresh: bool = False,
) -> Question:
    pairs = [(str(name), str(value)) for name, value in (headers or {}).items()]
    body: bytes | None = None
    content_type = ""
    if json is not _UNSET:
        if data is not None:
            raise ValueError("a request has one body: pass json or data, not both")
        from callyard.functions.encoding import encode_value

        body, content_type = encode_value(json), "application/json"
    elif isinstance(data, str):
        body, content_type = data.encode(), "text/plain; charset=utf-8"
    elif isinstance(data, Mapping):
        body, content_type = _urlencode(data).encode(), "application/x-www-form-urlencoded"
    elif data is not None:
        body = bytes(data)
    if content_type and not any(name.lower() == "content-type" for name, _ in pairs):
        pairs.append(("Content-Type", content_type))
    request: dict[str, Any] = {"url": _with_params(url, params), "headers": pairs}
    if timeout_s is not None:
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be a number above 0, got {timeout_s!r}")
        request["timeout_ms"] = max(1, round(timeout_s * 1_000))
    for name, value in (("redirects_max", redirects_max), ("max_bytes", max_bytes)):
        if value is not None:
            request[name] = value
    return Question("http", method.upper(), request, body, fresh)


def _with_params(url: str, params: Mapping[str, Any] | Sequence[tuple[str, Any]] | None) -> str:
    query = _urlencode(params) if params else ""
    if not query:
        return url
    address, mark, fragment = url.partition("#")
    joint = "" if address.endswith(("?", "&")) else "&" if "?" in address else "?"
    return f"{address}{joint}{query}{mark}{fragment}"


def _urlencode(params: Mapping[str, Any] | Sequence[tuple[str, Any]]) -> str:
    from urllib.parse import urlencode

    pairs = params.items() if isinstance(params, Mapping) else params
    flat: list[tuple[str, str]] = []
    for name, value in pairs:
        values = value if isinstance(value, list | tuple) else [value]
        flat += [(str(name), _query_text(one)) for one in values if one is not None]
    return urlencode(flat)


def _query_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read_response(reply: IoReply) -> Response:
    head = msgspec.json.decode(reply.result, type=_ResponseHead)
    return Response(head.status, _body_of(reply), head.headers, head.url)


class _ResponseHead(msgspec.Struct, gc=False):
    status: int
    url: str
    headers: list[tuple[str, str]]


# --- files --------------------------------------------------------------------------------------------------------


class FileInfo(msgspec.Struct, frozen=True):
    name: str
    kind: str
    """`file`, `folder`, `link` or `other`."""
    size: int
    """Bytes."""
    modified_s: float
    """Seconds since 1970."""


_Entries = list[FileInfo]
"""In `Files` the word `list` is a method."""


class Files:
    """Reading below the worker's named folders. `data/reports/x.csv`: the first part is the folder's name."""

    def read(self, path: str, *, offset: int = 0, length: int | None = None, fresh: bool = False) -> bytes:
        """The file, or `length` bytes of it from `offset`; fewer at its end."""
        return _read_question(path, offset, length, fresh).ask(_body_of)

    async def aread(self, path: str, *, offset: int = 0, length: int | None = None, fresh: bool = False) -> bytes:
        return await _read_question(path, offset, length, fresh).aask(_body_of)

    def read_text(self, path: str, *, encoding: str = "utf-8", errors: str = "strict", fresh: bool = False) -> str:
        return self.read(path, fresh=fresh).decode(encoding, errors)

    async def aread_text(
        self, path: str, *, encoding: str = "utf-8", errors: str = "strict", fresh: bool = False
    ) -> str:
        return (await self.aread(path, fresh=fresh)).decode(encoding, errors)

    def list(self, path: str = "", *, fresh: bool = False) -> _Entries:
        """What is in a folder, by name; of "" the folders that the worker has."""
        return Question("files", "list", {"path": path}, None, fresh).ask(_read_entries)

    async def alist(self, path: str = "", *, fresh: bool = False) -> _Entries:
        return await Question("files", "list", {"path": path}, None, fresh).aask(_read_entries)

    def stat(self, path: str, *, fresh: bool = False) -> FileInfo:
        return Question("files", "stat", {"path": path}, None, fresh).ask(_read_entry)

    async def astat(self, path: str, *, fresh: bool = False) -> FileInfo:
        return await Question("files", "stat", {"path": path}, None, fresh).aask(_read_entry)


def _read_question(path: str, offset: int, length: int | None, fresh: bool) -> Question:
    if offset < 0 or (length is not None and length < 0):
        raise ValueError(f"offset and length must be numbers from 0, got {offset!r} and {length!r}")
    request: dict[str, Any] = {"path": path}
    if offset:
        request["offset"] = offset
    if length is not None:
        request["length"] = length
    return Question("files", "read", request, None, fresh)


def _read_entries(reply: IoReply) -> list[FileInfo]:
    return msgspec.json.decode(reply.result, type=list[FileInfo])


def _read_entry(reply: IoReply) -> FileInfo:
    return msgspec.json.decode(reply.result, type=FileInfo)


# --- sql ----------------------------------------------------------------------------------------------------------


class Sql:
    """Reading from the worker's named databases: one SELECT, its values as parameters and never in the text.

    `$1`, `$2`, … and a list of parameters work for every kind of database; `?` and, with a mapping, `:name` (SQLite) or
    `$name` (DuckDB) as well where the database knows them. Dates, decimals and UUIDs come as text, bytes as base64.
    """

    def query(
        self, database: str, sql: str, params: Parameters = (), *, rows_max: int | None = None, fresh: bool = False
    ) -> list[dict[str, Any]]:
        """Rows as dictionaries. More than `rows_max` raise `CallError` of kind `result`. ValueError: equal names."""
        return _query_question(database, sql, params, rows_max, fresh).ask(_read_dictionaries)

    async def aquery(
        self, database: str, sql: str, params: Parameters = (), *, rows_max: int | None = None, fresh: bool = False
    ) -> list[dict[str, Any]]:
        return await _query_question(database, sql, params, rows_max, fresh).aask(_read_dictionaries)

    def rows(
        self, database: str, sql: str, params: Parameters = (), *, rows_max: int | None = None, fresh: bool = False
    ) -> list[tuple[Any, ...]]:
        """Rows as tuples."""
        return _query_question(database, sql, params, rows_max, fresh).ask(_read_tuples)

    async def arows(
        self, database: str, sql: str, params: Parameters = (), *, rows_max: int | None = None, fresh: bool = False
    ) -> list[tuple[Any, ...]]:
        return await _query_question(database, sql, params, rows_max, fresh).aask(_read_tuples)


def _query_question(database: str, sql: str, params: Parameters, rows_max: int | None, fresh: bool) -> Question:
    if isinstance(params, str | bytes):
        raise TypeError("params must be a list or a mapping: write [value] for one")
    known: Any = (
        {name: _parameter(value) for name, value in params.items()}
        if isinstance(params, Mapping)
        else [_parameter(value) for value in params]
    )
    request: dict[str, Any] = {"database": database, "sql": sql, "params": known}
    if rows_max is not None:
        request["rows_max"] = rows_max
    return Question("sql", "query", request, None, fresh)


def _parameter(value: Any) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return {"$bytes": bytes(value)}  # encoded as base64
    return value


def _read_tuples(reply: IoReply) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in _decode(reply)["rows"]]


def _read_dictionaries(reply: IoReply) -> list[dict[str, Any]]:
    found = _decode(reply)
    columns: list[str] = found["columns"]
    if len(set(columns)) < len(columns):
        twice = sorted({name for name in columns if columns.count(name) > 1})
        raise ValueError(f"several columns are named {', '.join(twice)}: give them names with AS, or use sql.rows")
    return [dict(zip(columns, row, strict=True)) for row in found["rows"]]


# --- jsonrpc ------------------------------------------------------------------------------------------------------


class JsonRpc:
    """JSON-RPC 2.0 at the worker's named endpoints. An error of the method raises `CallError` of kind `tool_error`
    whose details hold `code` and `data`."""

    def call(self, endpoint: str, method: str, params: Parameters | None = None, *, fresh: bool = False) -> Any:
        return _rpc_question("call", endpoint, method, params, fresh).ask(_decode)

    async def acall(self, endpoint: str, method: str, params: Parameters | None = None, *, fresh: bool = False) -> Any:
        return await _rpc_question("call", endpoint, method, params, fresh).aask(_decode)

    def notify(self, endpoint: str, method: str, params: Parameters | None = None) -> None:
        """Send it; there is no result."""
        _rpc_question("notify", endpoint, method, params, False).ask(_decode)

    async def anotify(self, endpoint: str, method: str, params: Parameters | None = None) -> None:
        await _rpc_question("notify", endpoint, method, params, False).aask(_decode)


def _rpc_question(operation: str, endpoint: str, method: str, params: Parameters | None, fresh: bool) -> Question:
    request: dict[str, Any] = {"endpoint": endpoint, "method": method}
    if params is not None:
        request["params"] = params
    return Question("jsonrpc", operation, request, None, fresh)


http: Final = Http()
files: Final = Files()
sql: Final = Sql()
jsonrpc: Final = JsonRpc()


# --- tests of user functions --------------------------------------------------------------------------------------


class FakeRequest(msgspec.Struct, frozen=True):
    """What a function asked for, for the `answer` of `fake_io`."""

    provider: str
    """`http`, `files`, `sql`, `jsonrpc`, or another's."""
    operation: str
    """`GET`, `read`, `query`, `call`, …"""
    request: Any
    """`url` and `headers`; `path`; `database`, `sql` and `params`; `endpoint`, `method` and `params`."""
    body: bytes | None = None


Fake = Callable[[FakeRequest], object]


class _FakeRuntime:
    def __init__(self, answer: Fake) -> None:
        self._answer = answer

    def io(self, provider: str, operation: str, request: bytes, body: bytes | None = None) -> IoReply:
        asked = FakeRequest(provider, operation.removesuffix(FRESH), msgspec.json.decode(request), body)
        return _to_reply(asked, self._answer(asked))

    async def aio(self, provider: str, operation: str, request: bytes, body: bytes | None = None) -> IoReply:
        return self.io(provider, operation, request, body)


_fake: _FakeRuntime | None = None


@contextmanager
def fake_io(answer: Fake) -> Iterator[None]:
    """For tests of user functions: in this block every IO request is answered by `answer`, and nothing is done.

        def answer(asked: FakeRequest) -> object:
            return Response(200, '{"km": 3983}')

        with fake_io(answer):
            assert distance("JFK", "LAX") == 3983

    It returns a `Response` for `http`, bytes or text for a file, rows (dictionaries or sequences) for `sql`, a value
    for `jsonrpc`, or an `IoReply` for anything; what it raises, the function sees.
    """
    global _fake
    before, _fake = _fake, _FakeRuntime(answer)
    try:
        yield
    finally:
        _fake = before


def _to_reply(asked: FakeRequest, value: object) -> IoReply:
    from callyard.functions.encoding import encode_value

    if isinstance(value, IoReply):
        return value
    if isinstance(value, Response):
        pairs = [(name, one) for name in value.headers for one in value.headers.get_all(name)]
        url = value.url or asked.request.get("url", "")
        return IoReply(encode_value({"status": value.status, "url": url, "headers": pairs}), value.body)
    if asked.provider == "http":
        raise TypeError(f"fake_io: http is answered by a Response, got {type(value).__name__}")
    if asked.provider == "files" and asked.operation == "read":
        body = value.encode() if isinstance(value, str) else bytes(cast(bytes, value))
        return IoReply(b'{"size":%d}' % len(body), body)
    if asked.provider == "sql" and isinstance(value, list):
        named = [row for row in value if isinstance(row, Mapping)]
        columns = list(named[0]) if named else [f"column{n}" for n in range(len(value[0]) if value else 0)]
        rows = [[row[name] for name in columns] if isinstance(row, Mapping) else list(row) for row in value]
        return IoReply(encode_value({"columns": columns, "rows": rows}))
    return IoReply(encode_value(value))
