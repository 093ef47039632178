"""The failure of a call that did not catch the failure of another one: in an executor, and where functions run as plain
Python. Source: tool-dispatch D38, call-execution X28.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from callyard.errors import CallFailure, ErrorKind, Outcome, fail, may_retry
from callyard.functions.current import ASK_PROVIDER

_HANDED_ON: Final = ("limit", "retry_after_ms")
"""Details that say something of a kind, so they stay with it."""


def hand_on(failure: CallFailure, function: str, *, idempotent: bool) -> CallFailure:
    """What a call of `function` ends with that did not catch the `CallError` of a subcall, or of a request.

    The reason itself comes first, however many calls handed it on: `ValueError: no fuel (in plan → leg → price)`.
    `details.path` has their names, this call's first and last the one that failed; `details.cause` has that one's kind,
    message and details. A subfunction's own answer stays one. A failure after which an idempotent function may run
    again stays one if this one is idempotent, too, whatever it did before being done again then. That a client would
    not answer a question (`denied`) is no fault of any function's. Every other failure is `internal`, as of any
    exception of the user's. Source: tool-dispatch D38.
    """
    known = failure.details
    path, cause = known.get("path"), known.get("cause")
    if not isinstance(path, list) or not isinstance(cause, Mapping):  # it is the place itself
        path = [known["function"]] if isinstance(known.get("function"), str) else []
        cause = {"kind": failure.kind.value, "message": failure.message, "details": dict(known)}
    path = [function, *path]
    kind = ErrorKind.INTERNAL
    if failure.kind is ErrorKind.TOOL_ERROR or (failure.kind is ErrorKind.DENIED and _is_of_client(cause)):
        kind = failure.kind
    elif idempotent and failure.retryable:
        kind = failure.kind if may_retry(failure.kind, idempotent=True) else ErrorKind.TRANSIENT
    text = str(cause.get("message", ""))
    if kind is not ErrorKind.TOOL_ERROR:  # which is shown as it was written
        if cause.get("kind") not in (kind, ErrorKind.INTERNAL):
            text = f"{cause.get('kind')}: {text}"
        if len(path) > 1:
            text = f"{text} (in {' → '.join(map(str, path))})"
    details: dict[str, Any] = {"path": path, "cause": cause}
    if kind is failure.kind:
        details |= {name: known[name] for name in _HANDED_ON if name in known}
    outcome = None if kind in (ErrorKind.TRANSIENT, ErrorKind.TOOL_ERROR) else Outcome.RAN
    return fail(kind, text, outcome=outcome, **details)


def _is_of_client(cause: Mapping[str, Any]) -> bool:
    details = cause.get("details")
    return isinstance(details, Mapping) and details.get("provider") == ASK_PROVIDER
