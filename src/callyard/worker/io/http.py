"""The provider `http`. Operations are methods; the body of a request and of its response travel as sidecars."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from callyard.errors import ErrorKind
from callyard.worker.io.addresses import HostRules
from callyard.worker.io.config import TIMEOUT_MS_MAX, HttpConfig
from callyard.worker.io.http_client import METHODS, READ_ONLY_METHODS, HttpClient
from callyard.worker.io.port import IoFailure, IoScope, Provider, Reply, decode_request


class _Request(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    url: str
    headers: list[tuple[str, str]] = []
    timeout_ms: Annotated[int, Meta(ge=1, le=TIMEOUT_MS_MAX)] | None = None
    redirects_max: Annotated[int, Meta(ge=0, le=100)] | None = None
    """Narrows the worker's; 0: a redirect is the answer."""
    max_bytes: Annotated[int, Meta(ge=0)] | None = None
    """Narrows the worker's."""


_rules_of = lru_cache(256)(HostRules)
"""A task's, for its many requests."""


class _Response(msgspec.Struct, gc=False):
    status: int
    url: str
    headers: list[tuple[str, str]]


class HttpProvider(Provider):
    read_only: ClassVar[frozenset[str]] = READ_ONLY_METHODS

    def __init__(self, config: HttpConfig, *, sandboxed: bool = False) -> None:
        self._config = config
        self._hosts = (config.hosts(sandboxed=sandboxed),)
        self._client = HttpClient(config.allow_private)

    async def close(self) -> None:
        await self._client.close()

    async def perform(self, operation: str, request: bytes, body: bytes | None, scope: IoScope) -> Reply:
        if operation not in METHODS:
            raise IoFailure(ErrorKind.SCHEMA, f"http has no method {operation!r}; it has {', '.join(sorted(METHODS))}")
        asked = decode_request(request, _Request, operation)
        config = self._config
        hosts = self._hosts if scope.names is None else (*self._hosts, _rules_of(scope.names))
        found = await self._client.fetch(
            operation,
            asked.url,
            asked.headers,
            body,
            hosts=hosts,
            timeout_ms=config.timeout_ms if asked.timeout_ms is None else asked.timeout_ms,
            redirects_max=_least(config.redirects_max, asked.redirects_max),
            max_bytes=_least(config.max_bytes, asked.max_bytes),
        )
        head = msgspec.json.encode(_Response(found.status, found.url, found.headers))
        return Reply(head, found.body, keep=found.status < 400 and not found.no_store)


def _least(configured: int, asked: int | None) -> int:
    return configured if asked is None else min(configured, asked)
