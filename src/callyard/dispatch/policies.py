"""Who may call what: one callable, asked after the arguments were checked and before the key.

A policy answers `Allow()` or True, or `Deny(reason)`, a reason as text, or False. One that raises, or answers anything
else, denies. Source: tool-dispatch D47.
"""

from __future__ import annotations

import asyncio
import fnmatch
import inspect
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import msgspec

from callyard.errors import CallFailure, ErrorKind, fail
from callyard.ids import Tenant

POLICY_FAILED: Final = "policy_failed"
"""`details.reason` where the policy did not decide."""
_REASON_CHARS_MAX: Final = 1_000
_NO_REASON: Final = "not_allowed"

_log = logging.getLogger("callyard.dispatch")


class Allow(msgspec.Struct, frozen=True):
    """The call may go on."""


class Deny(msgspec.Struct, frozen=True):
    """The call ends `denied`. The caller reads the reason."""

    reason: str = _NO_REASON


Decision = Allow | Deny | bool | str
Policy = Callable[[Tenant, str, Mapping[str, Any]], Decision | Awaitable[Decision]]
"""Called with the tenant, the tool's name and the checked arguments, which it must not change. Async: it is awaited
inside the call's deadline; sync: it must not wait."""


async def ask_policy(policy: Policy, tenant: Tenant, tool: str, arguments: Mapping[str, Any]) -> CallFailure | None:
    """None: the call may go on. Raises nothing but the caller's own cancellation.

    What a policy raised is for the log alone: it may name hosts and secrets.
    """
    try:
        answer = policy(tenant, tool, arguments)
        if inspect.isawaitable(answer):
            answer = await answer
        return _read(answer, tool)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # an exit, too: it would end the loop
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        _log.error("the policy failed on %s for tenant %s: the call is denied", tool, tenant, exc_info=error)
        return fail(ErrorKind.DENIED, f"{tool} is denied: the policy could not decide", reason=POLICY_FAILED)


def _read(answer: object, tool: str) -> CallFailure | None:
    if answer is True or isinstance(answer, Allow):
        return None
    if isinstance(answer, Deny):
        reason = str(answer.reason)
    elif isinstance(answer, str):
        reason = answer
    elif answer is False:
        reason = _NO_REASON
    else:
        raise TypeError(f"a policy answers Allow(), Deny(reason), a bool or a reason as text, not {answer!r}")
    reason = reason[:_REASON_CHARS_MAX] or _NO_REASON
    return fail(ErrorKind.DENIED, f"{tool} is denied: {reason}", reason=reason)


def allow_tools(*globs: str) -> Policy:
    """Only the tools whose name one of `globs` matches (`search`, `files.*`); case matters. None given: no tool."""
    given: tuple[object, ...] = globs
    for glob in given:
        if not isinstance(glob, str) or not glob:
            raise TypeError(f"allow_tools takes names or patterns such as 'files.*' one by one, got {glob!r}")
    allowed = re.compile("|".join(fnmatch.translate(glob) for glob in globs) or r"(?!)")

    def policy(tenant: Tenant, tool: str, arguments: Mapping[str, Any]) -> Decision:
        return Allow() if allowed.match(tool) else Deny("not among the tools that are allowed here")

    return policy
