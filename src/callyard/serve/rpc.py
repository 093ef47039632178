"""JSON-RPC 2.0 over HTTP: the method is the tool's name, `params` its arguments by name.

Methods of our own begin with `rpc.`, which JSON-RPC reserves: `rpc.discover`, `rpc.tools.list`, `rpc.tools.call` (for a
tool whose name begins so) and `rpc.calls.cancel`. A request may carry options beside its params, in a member that
JSON-RPC ignores: `"callyard": {"idempotency_key": "order-7", "owner": "ada", "deadline_ms": 2000}`.

A batch is 1:N (R110): its first call has the permit of the body, each further one waits for its own, in turn; answers
stand in the order of the requests. A notification runs like any other call, and nothing is said of it.

| what came | code |
| --- | --- |
| no JSON | -32700 |
| no request, a key twice in it, an empty batch, too many | -32600 |
| arguments that do not fit; a key twice, NaN, too deep inside of them | -32602 |
| all else | as `errors.KIND_RULES` says |

Source: tool-dispatch D23, D36; job-queue R110.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from callyard.dispatch.outcomes import DispatchError, DispatchResult
from callyard.errors import KIND_RULES, CallFailure, ErrorKind, fail
from callyard.functions.encoding import is_deeper_than
from callyard.functions.misfits import ArgumentsMisfit
from callyard.functions.strict_json import decode_json
from callyard.ids import CallId
from callyard.serve.guard import Lost, Refusal, admit, to_envelope

if TYPE_CHECKING:
    from callyard.host.jobs import Permit
    from callyard.serve.gateway import Caller, Gateway, ToolRequest

PARSE_ERROR: Final = -32700
INVALID_REQUEST: Final = -32600
_OURS: Final = "rpc."
_LEVELS_MAX: Final = 512
"""Of a whole body, so that no parser meets its own end; arguments have a bound of their own."""
_ID_BYTES_MAX: Final = 1_024
_LARGE_BYTES: Final = 1_024
_NULL: Final = msgspec.Raw(b"null")
_ID: Final = re.compile(rb'null|-?\d+|".*"', re.DOTALL)
_MEMBERS: Final = msgspec.json.Decoder(list[msgspec.Raw])
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


class CallOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a client may say of a call beside its arguments, by headers or in the member `callyard`."""

    idempotency_key: str | None = None
    owner: str | None = None
    deadline_ms: int | None = None
    timeout_ms: int | None = None
    tags: dict[str, str] = {}
    trace: dict[str, str] = {}

    def __post_init__(self) -> None:
        """Empty is not absent: a client whose key got lost must not call without one."""
        for name in ("idempotency_key", "owner"):
            if getattr(self, name) == "":
                raise ValueError(f"{name} is empty: leave it out, or say which")

    def over(self, below: CallOptions) -> CallOptions:
        """These, and where they say nothing those."""
        if below == _NO_OPTIONS:
            return self
        said = {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) not in (None, {})}
        return msgspec.structs.replace(below, **said) if said else below


_NO_OPTIONS: Final = CallOptions()
_OPTIONS: Final = msgspec.json.Decoder(CallOptions)


class RpcError(Exception):
    """What is answered with an error of JSON-RPC itself, or of arguments."""

    def __init__(self, code: int, failure: CallFailure) -> None:
        super().__init__(failure.message)
        self.code = code
        self.failure = failure


class RpcRequest(msgspec.Struct, frozen=True):
    """One request of a body, or what is wrong with it."""

    id: msgspec.Raw | None = None
    """JSON, as it came; None: a notification."""
    method: str = ""
    params: bytes = b""
    """JSON of an object; empty: none."""
    options: CallOptions = _NO_OPTIONS
    error: RpcError | None = None


def read_body(body: bytes, batch_max: int) -> tuple[list[RpcRequest], bool]:
    """The requests, and whether they are a batch. Raises RpcError where there is nothing to answer one by one."""
    if is_deeper_than(body, _LEVELS_MAX):
        raise _invalid(f"nested too deeply: expected at most {_LEVELS_MAX} levels")
    is_batch = body.lstrip(b" \t\r\n")[:1] == b"["
    try:
        _ = body.isascii() or body.decode()  # the parser looks at text that it decodes only
        members = _MEMBERS.decode(body) if is_batch else [msgspec.json.decode(body, type=msgspec.Raw)]
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise RpcError(PARSE_ERROR, fail(ErrorKind.SCHEMA, f"the body is not JSON: {error}"[:300])) from None
    if not 1 <= len(members) <= batch_max:
        raise _invalid(f"a batch holds 1 to {batch_max} requests, got {len(members)}")
    return [_read_request(bytes(member)) for member in members], is_batch


def _read_request(raw: bytes) -> RpcRequest:
    """Never raises: what is wrong with a request is its answer."""
    try:
        fields = _FIELDS.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return RpcRequest(_NULL, error=_invalid("expected a request object"))
    request_id = fields.get("id")
    known_id = _NULL if request_id is None else request_id
    if request_id is not None and (len(request_id) > _ID_BYTES_MAX or _ID.fullmatch(bytes(request_id)) is None):
        text = f"id must be text, a whole number or null, of at most {_ID_BYTES_MAX} bytes"
        return RpcRequest(_NULL, error=_invalid(text))
    params = bytes(fields.get("params", b""))
    try:
        _check_strict(raw, params)
        method = _read_envelope(fields)
        params = _read_params(params)
        options = _read_options(fields)
    except RpcError as error:
        return RpcRequest(known_id, error=error)
    return RpcRequest(request_id, method, params, options)


def _check_strict(raw: bytes, params: bytes) -> None:
    """Duplicate keys, numbers that no float holds: in the arguments they are the arguments' fault.

    Large arguments are left to the check of the tool, which looks for the same: twice would cost twice.
    """
    if len(params) > _LARGE_BYTES and params[:1] == b"{":
        at = raw.rindex(params)
        raw = raw[:at] + b"0" + raw[at + len(params) :]
    try:
        decode_json(raw)
    except ArgumentsMisfit as misfit:
        if params:
            try:
                decode_json(params)
            except ArgumentsMisfit as inner:
                raise RpcError(*_schema(inner.message, inner.details)) from None
        raise _invalid(misfit.message) from None


def _read_envelope(fields: Mapping[str, msgspec.Raw]) -> str:
    if bytes(fields.get("jsonrpc", b"")) != b'"2.0"':
        raise _invalid('expected "jsonrpc": "2.0"')
    try:
        method = msgspec.json.decode(fields.get("method", b"null"), type=str)
    except msgspec.ValidationError:
        raise _invalid('expected "method": the name of a tool, as text') from None
    if not method:
        raise _invalid('expected "method": the name of a tool, got empty text')
    return method


def _read_params(params: bytes) -> bytes:
    if params[:1] in (b"{", b""):
        return params
    if params[:1] == b"[" and not params[1:-1].strip():
        return b""  # what some clients send for none
    raise RpcError(*_schema('expected "params": an object, arguments by name', {}))


def _read_options(fields: Mapping[str, msgspec.Raw]) -> CallOptions:
    raw = fields.get("callyard")
    if raw is None:
        return _NO_OPTIONS
    try:
        return _OPTIONS.decode(raw)
    except msgspec.ValidationError as error:
        raise _invalid(f'"callyard": {error}') from None


class Rpc:
    """Answers bodies. `tell_tools` gives what `rpc.tools.list` answers, `discover` what `rpc.discover` does."""

    def __init__(
        self,
        gateway: Gateway,
        *,
        batch_max: int,
        tell_tools: Callable[[Caller], Any],
        discover: Callable[[Caller], Any],
        run: Callable[[ToolRequest, Permit], Awaitable[DispatchResult]],
        finish: Callable[[ToolRequest, DispatchResult], Awaitable[bytes | CallFailure]],
    ) -> None:
        """`finish` makes of an answer what goes out: a result that is too large is kept, and a link stands for it."""
        self._gateway = gateway
        self._batch_max = batch_max
        self._tell_tools = tell_tools
        self._discover = discover
        self._run = run
        self._finish = finish

    async def answer(
        self,
        body: bytes,
        make_request: Callable[[str, bytes, CallOptions], ToolRequest],
        permit: Permit,
        connection: Lost,
    ) -> tuple[int, bytes]:
        """HTTP status and JSON; no JSON: there was nothing to answer. Takes the permit."""
        try:
            requests, is_batch = read_body(body, self._batch_max)
        except RpcError as error:
            return 400, _encode_error(_NULL, error.code, to_envelope(error.failure))
        if not is_batch:
            answer = await self._answer_one(requests[0], make_request, permit)
            return (200, answer) if requests[0].id is not None or requests[0].error is not None else (204, b"")
        answers = await self._answer_batch(requests, make_request, permit, connection)
        told = [answer for answer, one in zip(answers, requests, strict=True) if one.id is not None or one.error]
        return (200, b"[" + b",".join(told) + b"]") if told else (204, b"")

    async def _answer_batch(
        self,
        requests: list[RpcRequest],
        make_request: Callable[[str, bytes, CallOptions], ToolRequest],
        permit: Permit,
        connection: Lost,
    ) -> list[bytes]:
        """Of each request; what a notification gives is there and not told."""
        answers: list[bytes] = [b""] * len(requests)
        permits = [permit]

        async def run(at: int, own: Permit) -> None:
            answers[at] = await self._answer_one(requests[at], make_request, own)

        async with asyncio.TaskGroup() as group:
            for at, one in enumerate(requests):
                if one.error is not None or (one.method.startswith(_OURS) and one.method != _CALL):
                    answers[at] = await self._answer_one(one, make_request, permit)
                    continue
                try:
                    own = permits.pop() if permits else await admit(self._gateway, connection, self._gateway.now_ms())
                except Refusal as refusal:
                    answers[at] = _encode_failure(one.id, refusal.failure)
                    continue
                group.create_task(run(at, own)).add_done_callback(partial(_give_back, own))
        return answers

    async def _answer_one(
        self,
        one: RpcRequest,
        make_request: Callable[[str, bytes, CallOptions], ToolRequest],
        permit: Permit,
    ) -> bytes:
        if one.error is not None:
            return _encode_error(one.id, one.error.code, to_envelope(one.error.failure))
        try:
            request = make_request(one.method, one.params, one.options)
            if one.method == _CALL:
                name, arguments = _read_call(one.params)
                request = make_request(name, arguments, one.options)
            elif one.method.startswith(_OURS):
                return _encode_result(one.id, msgspec.json.encode(self._answer_ours(one, request.caller)))
        except RpcError as error:
            return _encode_error(one.id, error.code, to_envelope(error.failure))
        result = await self._run(request, permit)
        finished = await self._finish(request, result)
        if isinstance(finished, bytes):
            return _encode_result(one.id, finished)
        return _encode_failure(one.id, finished, result.call_id, deduplicated=result.deduplicated)

    def _answer_ours(self, one: RpcRequest, caller: Caller) -> Any:
        match one.method:
            case "rpc.discover":
                return self._discover(caller)
            case "rpc.tools.list":
                return self._tell_tools(caller)
            case "rpc.calls.cancel":
                call_id = _read_text(one.params, "call_id")
                return {"cancelled": self._gateway.cancel(caller, CallId(call_id))}
        raise RpcError(
            KIND_RULES[ErrorKind.NOT_FOUND].jsonrpc_code,
            fail(ErrorKind.NOT_FOUND, f"no method {one.method[:100]!r} of our own; rpc.discover lists what there is"),
        )


def _give_back(permit: Permit, _: object) -> None:
    """Also of a task that was cancelled before its first step."""
    permit.release()


_CALL: Final = "rpc.tools.call"


class _CallParams(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


def _read_call(params: bytes) -> tuple[str, bytes]:
    try:
        decode_json(params or b"{}")
        call = msgspec.json.decode(params or b"{}", type=_CallParams)
    except ArgumentsMisfit as misfit:
        raise RpcError(*_schema(misfit.message, misfit.details)) from None
    except msgspec.ValidationError as error:
        raise RpcError(*_schema(f"{_CALL}: {error}", {})) from None
    return call.name, bytes(call.arguments)


def _read_text(params: bytes, name: str) -> str:
    value = msgspec.json.decode(params or b"{}").get(name)
    if not isinstance(value, str) or not value:
        raise RpcError(*_schema(f"expected {name}: text", {}))
    return value


def _invalid(text: str) -> RpcError:
    return RpcError(INVALID_REQUEST, fail(ErrorKind.SCHEMA, text))


def _schema(text: str, details: Mapping[str, Any]) -> tuple[int, CallFailure]:
    return KIND_RULES[ErrorKind.SCHEMA].jsonrpc_code, fail(ErrorKind.SCHEMA, text, **details)


def _encode_result(request_id: msgspec.Raw | None, output: bytes) -> bytes:
    return b'{"jsonrpc":"2.0","id":%b,"result":%b}' % (bytes(_NULL if request_id is None else request_id), output)


def _encode_failure(
    request_id: msgspec.Raw | None, failure: CallFailure, call_id: str = "", *, deduplicated: bool = False
) -> bytes:
    envelope = DispatchError(CallId(call_id), failure, deduplicated).to_json(remote=True)
    return _encode_error(request_id, envelope["jsonrpc_code"], envelope)


def _encode_error(request_id: msgspec.Raw | None, code: int, envelope: dict[str, Any]) -> bytes:
    """The envelope is the error's data, with its waiting time where a client looks first."""
    data = {**envelope, "jsonrpc_code": code}
    if (wait_ms := envelope["details"].get("retry_after_ms")) is not None:
        data["retry_after_ms"] = wait_ms
    error = msgspec.json.encode({"code": code, "message": envelope["message"], "data": data})
    return b'{"jsonrpc":"2.0","id":%b,"error":%b}' % (bytes(_NULL if request_id is None else request_id), error)
