"""What an exception of user code says: its kind, a message that can be sent, a traceback without our own frames.

Looking at an exception may run user code (`__str__`), which may raise in turn: that is one more thing to tell.
Source: tool-dispatch D24, D38; call-execution X56, X57.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from callyard.errors import CallError, ErrorKind, Outcome, ToolError, TransientError
from callyard.functions.handed_on import hand_on

MESSAGE_CHARACTERS_MAX: Final = 8 * 1024
NAME_CHARACTERS_MAX: Final = 200
CHAIN_MAX: Final = 50
STACK_BYTES_MAX: Final = 16 * 1024
STACK_HEAD_BYTES: Final = 4 * 1024
LEAVES_LISTED_MAX: Final = 20
OWN_FILES: Final = os.path.dirname(os.path.dirname(__file__)) + os.sep
"""Code below this folder is never shown in a stack."""
_ADDRESS: Final = re.compile(r" at 0x[0-9A-Fa-f]+\b")
_REAL_NAME: Final[Callable[[type], str]] = type.__dict__["__name__"].__get__


class Verdict(NamedTuple):
    """What an exception means for its call."""

    kind: ErrorKind
    message: str
    """As long as its author made it."""
    outcome: Outcome | None
    """None: the kind's own."""
    details: dict[str, Any]


def judge(error: BaseException, function: str, *, idempotent: bool = False) -> Verdict:
    """What `function` raised, `idempotent` being its promise."""
    details: dict[str, Any] = {}
    leaves = list(_leaves(error)) if isinstance(error, BaseExceptionGroup) else []
    if leaves:
        details["exceptions"] = [_named(leaf) for leaf in leaves[:LEAVES_LISTED_MAX]]
        if len(leaves) > LEAVES_LISTED_MAX:
            details["exceptions_total"] = len(leaves)
        more = f" (and {len(leaves) - 1} more)" if len(leaves) > 1 else ""
        return Verdict(ErrorKind.INTERNAL, _named(leaves[0]) + more, None, details)
    if isinstance(error, CallError):
        failure = hand_on(error.failure, function, idempotent=idempotent)
        return Verdict(failure.kind, failure.message, failure.outcome, dict(failure.details))
    kind, message = ErrorKind.INTERNAL, _named(error)
    if isinstance(error, TransientError):
        kind, message = ErrorKind.TRANSIENT, text_of(error) or message
        if type(error.retry_after_ms) is int and 0 <= error.retry_after_ms < 1 << 53:
            details["retry_after_ms"] = error.retry_after_ms
    elif isinstance(error, ToolError):
        kind, message = ErrorKind.TOOL_ERROR, text_of(error) or message
    elif isinstance(error, MemoryError):
        kind = ErrorKind.RESOURCE_LIMIT
    elif isinstance(error, SystemExit):
        details["exit_code"] = exit_code_of(error)
    return Verdict(kind, message, None, details)


def exit_code_of(error: SystemExit) -> int:
    """The status with which a process that raised it would end."""
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def name_of(error: BaseException) -> str:
    """The name of its class, from the slot itself: a metaclass may answer for `__name__` with code of its own."""
    return cut_text(clean_text(_REAL_NAME(type(error))), NAME_CHARACTERS_MAX)


def text_of(error: BaseException) -> str:
    """`str(error)`, which is user code and may raise, or return what is no text."""
    try:
        return clean_text(_ADDRESS.sub(" at 0x…", str(error)))  # the same in every process (call-execution X88)
    except BaseException as second:  # noqa: BLE001 - contained (X57)
        return f"<its __str__ raised {name_of(second)}>"


def clean_text(text: str) -> str:
    """Text that a frame can carry: UTF-8 has no lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode()


def cut_text(text: str, characters_max: int) -> str:
    if len(text) <= characters_max:
        return text
    return f"{text[:characters_max]}… ({len(text) - characters_max} more characters)"


def stack_of(error: BaseException, own_files: str = OWN_FILES) -> str:
    """The traceback without frames below `own_files`, causes included, cut in the middle to `STACK_BYTES_MAX`."""
    import traceback  # costs a process that never needs it 10 ms

    try:
        cut_chain(error)
        told = traceback.TracebackException.from_exception(error)
        drop_frames(told, own_files)
        return cut_stack("".join(told.format()))
    except BaseException as second:  # noqa: BLE001 - user code in it may raise
        return f"<no stack: {name_of(second)}>"


def _named(error: BaseException) -> str:
    text = text_of(error)
    return name_of(error) + (f": {text}" if text else "")


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """In order, without recursion: groups nest as deep as their author likes."""
    pending: list[BaseException] = [group]
    while pending:
        one = pending.pop()
        if isinstance(one, BaseExceptionGroup):
            pending.extend(reversed(one.exceptions))
        else:
            yield one


def cut_chain(error: BaseException) -> None:
    """Forget causes beyond `CHAIN_MAX`: to tell tens of thousands of them takes seconds, and nobody reads them."""
    link: BaseException | None = error
    for _ in range(CHAIN_MAX):
        if link is None:
            return
        link = link.__cause__ or link.__context__
    if link is not None:
        link.__cause__ = link.__context__ = None


def drop_frames(told: Any, own_files: str) -> None:
    """`told`: a TracebackException, whose chain may be long and, made by hand, even cyclic."""
    pending, seen = [told], set()
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.stack[:] = [entry for entry in one.stack if not entry.filename.startswith(own_files)]
        pending += [one.__cause__, one.__context__, *(getattr(one, "exceptions", None) or ())]


def cut_stack(text: str) -> str:
    """Keep the beginning, and of the rest the end: the innermost frames and the exception itself."""
    raw = text.encode("utf-8", "backslashreplace")
    if len(raw) <= STACK_BYTES_MAX:
        return raw.decode()
    marker = f"\n… {len(raw) - STACK_BYTES_MAX} bytes and more cut …\n"
    tail_bytes = STACK_BYTES_MAX - STACK_HEAD_BYTES - len(marker.encode())
    return raw[:STACK_HEAD_BYTES].decode(errors="ignore") + marker + raw[-tail_bytes:].decode(errors="ignore")
