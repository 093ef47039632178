"""The provider `client`: a running call puts a question to whoever made it, and waits for the answer.

What travels is opaque here: the SDK writes the question, a gate answers it. Never kept, never joined.
"""

from __future__ import annotations

from typing import Any, ClassVar

from callyard.errors import ErrorKind
from callyard.functions.encoding import ResultMisfit, encode_value
from callyard.functions.ports import AskRefused, nobody_to_ask
from callyard.worker.io.port import IoFailure, IoScope, Provider, Reply, decode_request


class ClientProvider(Provider):
    is_interactive: ClassVar[bool] = True

    async def perform(self, operation: str, request: bytes, body: bytes | None, scope: IoScope) -> Reply:
        params = decode_request(request, dict[str, Any], operation)
        try:
            if scope.ask is None:
                raise nobody_to_ask(operation)
            answer = await scope.ask(operation, params)
        except AskRefused as refused:
            raise IoFailure(refused.kind, str(refused), retryable=refused.retryable) from None
        try:
            return Reply(encode_value(answer), keep=False)
        except ResultMisfit as misfit:
            raise IoFailure(ErrorKind.RESULT, f"{operation}: the client's answer: {misfit}") from misfit
