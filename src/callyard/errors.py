"""Why a call did not succeed: one enum of kinds, one table, and the exceptions of the public edge.

Work that failed is a value (`CallFailure`) until the edge; only there does it become a `CallError`. A bug of
ours is an `assert` or an `InvalidTransition`; a peer that broke the protocol is a `ProtocolError` and costs
its connection.
Source: tool-dispatch D22, D23, D38.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final, final

import msgspec


class ErrorKind(StrEnum):
    """Every way a call can fail, in all layers. This list only grows."""

    NOT_FOUND = "not_found"
    SCHEMA = "schema"
    CONFLICT = "conflict"
    DENIED = "denied"
    BUDGET_EXCEEDED = "budget_exceeded"
    CIRCUIT_OPEN = "circuit_open"
    DEADLINE = "deadline"
    SHUTTING_DOWN = "shutting_down"
    UNAVAILABLE = "unavailable"
    RATE_LIMITED = "rate_limited"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    RESOURCE_LIMIT = "resource_limit"
    TRANSIENT = "transient"
    TOOL_ERROR = "tool_error"
    INTERNAL = "internal"
    RESULT = "result"
    CANCELLED = "cancelled"


class Outcome(StrEnum):
    """What is known of the effect of a call that failed."""

    NOT_RUN = "not_run"
    RAN = "ran"
    UNKNOWN = "unknown"


class Retried(StrEnum):
    """Who may run a failed call again."""

    NEVER = "never"
    IF_IDEMPOTENT = "if_idempotent"
    ALWAYS = "always"
    BY_CALLER = "by_caller"


class KindRule(msgspec.Struct, frozen=True, gc=False):
    """What every surface makes of one kind."""

    outcome: Outcome
    retried: Retried
    jsonrpc_code: int
    http_status: int
    summary: str
    """The kind in plain words, as the command line shows it."""


_N, _R, _U = Outcome.NOT_RUN, Outcome.RAN, Outcome.UNKNOWN
_SERVER: Final = -32603

KIND_RULES: Final[Mapping[ErrorKind, KindRule]] = {
    ErrorKind.NOT_FOUND: KindRule(_N, Retried.NEVER, -32601, 404, "no such function"),
    ErrorKind.SCHEMA: KindRule(_N, Retried.NEVER, -32602, 422, "arguments do not fit the function"),
    ErrorKind.CONFLICT: KindRule(_N, Retried.NEVER, -32602, 409, "key already used with other arguments"),
    ErrorKind.DENIED: KindRule(_N, Retried.NEVER, _SERVER, 403, "refused by policy"),
    ErrorKind.BUDGET_EXCEEDED: KindRule(_N, Retried.NEVER, _SERVER, 429, "no tool calls left"),
    ErrorKind.CIRCUIT_OPEN: KindRule(_N, Retried.NEVER, _SERVER, 503, "circuit open"),
    ErrorKind.DEADLINE: KindRule(_N, Retried.NEVER, _SERVER, 504, "deadline passed before it ran"),
    ErrorKind.SHUTTING_DOWN: KindRule(_N, Retried.NEVER, _SERVER, 503, "shutting down"),
    ErrorKind.UNAVAILABLE: KindRule(_N, Retried.BY_CALLER, _SERVER, 503, "no executor or no room"),
    ErrorKind.RATE_LIMITED: KindRule(_N, Retried.BY_CALLER, _SERVER, 429, "over its rate"),
    ErrorKind.TIMEOUT: KindRule(_U, Retried.IF_IDEMPOTENT, _SERVER, 504, "ran out of time"),
    ErrorKind.CRASHED: KindRule(_U, Retried.IF_IDEMPOTENT, _SERVER, 502, "its process died"),
    ErrorKind.RESOURCE_LIMIT: KindRule(_U, Retried.NEVER, _SERVER, 507, "hit a memory or process limit"),
    ErrorKind.TRANSIENT: KindRule(_N, Retried.ALWAYS, _SERVER, 503, "failed for the moment"),
    ErrorKind.TOOL_ERROR: KindRule(_R, Retried.NEVER, _SERVER, 400, "the function reported an error"),
    ErrorKind.INTERNAL: KindRule(_R, Retried.NEVER, _SERVER, 500, "the function raised"),
    ErrorKind.RESULT: KindRule(_R, Retried.NEVER, _SERVER, 500, "its result cannot be sent"),
    ErrorKind.CANCELLED: KindRule(_U, Retried.NEVER, _SERVER, 499, "stopped, or never begun"),
}


def may_retry(kind: ErrorKind, *, idempotent: bool, begun: bool = True) -> bool:
    """Whether a failed attempt may be run again by the layer that holds the retries.

    A timeout of a call that had not begun is safe for any function. Source: tool-dispatch D12, D23.
    """
    rule = KIND_RULES[kind].retried
    if rule is Retried.ALWAYS:
        return True
    return rule is Retried.IF_IDEMPOTENT and (idempotent or not begun)


@final
class CallFailure(msgspec.Struct, frozen=True, omit_defaults=True):
    """Work that failed, as a value."""

    kind: ErrorKind
    message: str
    retryable: bool = False
    attempts: int = 0
    """How many attempts had begun; 0: the call never ran."""
    outcome: Outcome = Outcome.NOT_RUN
    details: Mapping[str, Any] = {}
    """`pointer`, `limit`, `cause`, `exit_code`, `line`, … by kind; plain JSON values."""
    stack: str = ""
    """The user's traceback, without Callyard's own frames."""
    local_variables: Mapping[str, str] = {}

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


def fail(
    kind: ErrorKind,
    message: str,
    *,
    attempts: int = 0,
    outcome: Outcome | None = None,
    retryable: bool = False,
    stack: str = "",
    local_variables: Mapping[str, str] | None = None,
    **details: Any,
) -> CallFailure:
    """Build a failure whose outcome is the kind's own unless the caller knows better."""
    return CallFailure(
        kind=kind,
        message=message,
        retryable=retryable,
        attempts=attempts,
        outcome=KIND_RULES[kind].outcome if outcome is None else outcome,
        details=details,
        stack=stack,
        local_variables=local_variables or {},
    )


class CallyardError(Exception):
    """The base of every exception that Callyard raises on purpose."""


class CallError(CallyardError):
    """A call failed; raised at the public edge only."""

    def __init__(self, failure: CallFailure) -> None:
        super().__init__(str(failure))
        self.failure = failure
        if failure.stack:
            self.add_note(f"In the executor:\n{failure.stack.rstrip()}")

    def __reduce__(self) -> tuple[type[CallError], tuple[CallFailure]]:
        return type(self), (self.failure,)

    @property
    def kind(self) -> ErrorKind:
        return self.failure.kind

    @property
    def outcome(self) -> Outcome:
        return self.failure.outcome

    @property
    def attempts(self) -> int:
        return self.failure.attempts


class UsageError(CallyardError):
    """The request itself was wrong: a file, a flag, a setting.

    It says what was expected, what came, and what to do.
    """


class ProtocolError(CallyardError):
    """A peer broke the wire protocol. It costs that one connection."""


class InvalidTransition(CallyardError):
    """Our own code asked a state machine for a move that its table does not have."""


class TransientError(CallyardError):
    """Raised by user code: nothing was done, trying again is safe.

    `retry_after_ms` asks the retrying layer to wait at least that long.
    """

    def __init__(self, message: str = "", *, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class ToolError(CallyardError):
    """Raised by user code: the function's own answer is an error, shown as written and never retried."""
