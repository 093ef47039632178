"""The provider `jsonrpc`: JSON-RPC 2.0 over HTTP to endpoints that the operator named.

Functions name an endpoint, a method and its parameters. They see neither the URL nor the endpoint's headers, and cannot
lead the worker anywhere else: redirects are not followed. `params` and the result pass through as bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import ClassVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

from callyard.errors import ErrorKind
from callyard.worker.io.addresses import HostRules
from callyard.worker.io.config import ANYWHERE, EndpointConfig
from callyard.worker.io.http_client import HttpClient
from callyard.worker.io.port import IoFailure, IoScope, Provider, Reply, decode_request

_ANY_HOST = HostRules(("*",))


class _Request(msgspec.Struct, forbid_unknown_fields=True):
    endpoint: str
    method: str
    params: Raw | UnsetType = UNSET


class _Sent(msgspec.Struct, omit_defaults=True):
    jsonrpc: str
    method: str
    params: Raw | UnsetType = UNSET
    id: int | UnsetType = UNSET


class _Error(msgspec.Struct):
    code: int
    message: str
    data: Raw = Raw(b"null")


class _Received(msgspec.Struct):
    id: int | str | float | None = None
    result: Raw | UnsetType = UNSET
    error: _Error | None = None


class JsonRpcProvider(Provider):
    """`call` waits for the result; `notify` only for the endpoint to take it."""

    read_only: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, endpoints: Mapping[str, EndpointConfig]) -> None:
        self._endpoints = endpoints
        self._client = HttpClient(ANYWHERE)  # the operator chose the URLs: an inner address is no surprise
        self._ids = itertools.count(1)

    async def close(self) -> None:
        await self._client.close()

    def is_read_only(self, operation: str, request: bytes) -> bool:
        """By the endpoint's list of methods."""
        if operation != "call":
            return False
        try:
            asked = decode_request(request, _Request, operation)
        except IoFailure:
            return False  # `perform` will say what is wrong
        endpoint = self._endpoints.get(asked.endpoint)
        return endpoint is not None and asked.method in endpoint.read_only

    async def perform(self, operation: str, request: bytes, body: bytes | None, scope: IoScope) -> Reply:
        if operation not in ("call", "notify"):
            raise IoFailure(ErrorKind.SCHEMA, f"jsonrpc has call and notify, not {operation!r}")
        asked = decode_request(request, _Request, operation)
        endpoint = self._find_endpoint(asked.endpoint, scope)
        if asked.params is not UNSET and bytes(asked.params).lstrip()[:1] not in (b"[", b"{"):
            raise IoFailure(ErrorKind.SCHEMA, "params must be an array or an object")
        sent = _Sent("2.0", asked.method, asked.params, UNSET if operation == "notify" else next(self._ids))
        found = await self._client.fetch(
            "POST",
            endpoint.url,
            [("Content-Type", "application/json"), ("Accept", "application/json"), *endpoint.headers],
            msgspec.json.encode(sent),
            hosts=(_ANY_HOST,),
            timeout_ms=endpoint.timeout_ms,
            redirects_max=0,
            max_bytes=endpoint.max_bytes,
        )
        if operation == "notify" and found.status < 300:
            return Reply()
        return Reply(_read_result(asked.endpoint, sent, found.status, found.body))

    def _find_endpoint(self, name: str, scope: IoScope) -> EndpointConfig:
        endpoint = self._endpoints.get(name)
        if endpoint is None:
            message = (
                f'no JSON-RPC endpoint {name!r}; whoever runs the worker may add it: [io.jsonrpc] {name} = "https://…"'
            )
            raise IoFailure(ErrorKind.NOT_FOUND, message, endpoints=sorted(self._endpoints))
        if not scope.permits(name):
            raise IoFailure(ErrorKind.DENIED, f"this task may not use the endpoint {name!r}")
        return endpoint


def _read_result(endpoint: str, sent: _Sent, status: int, body: bytes) -> bytes:
    try:
        received = msgspec.json.decode(body, type=_Received)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        message = f"{endpoint} answered with HTTP status {status} and no JSON-RPC"
        kind = ErrorKind.UNAVAILABLE if status >= 300 else ErrorKind.RESULT
        raise IoFailure(kind, message, status=status) from error
    if received.error is not None:
        # What the endpoint's method reports is its answer, not a failure of ours.
        message = f"{endpoint} {sent.method}: {received.error.message}"
        data = msgspec.json.decode(received.error.data)
        raise IoFailure(ErrorKind.TOOL_ERROR, message, code=received.error.code, data=data)
    if received.result is UNSET or received.id != sent.id:
        raise IoFailure(ErrorKind.RESULT, f"{endpoint}: expected the result of id {sent.id}, got id {received.id!r}")
    return bytes(received.result)
