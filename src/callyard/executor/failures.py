"""From an exception to what a CallFailed says: kind, message, stack, local variables (X56, X57).

Everything here may run user code (`__str__`, `__repr__`), so it runs in the user's greenlet, under the budget, and an
exception inside is one more thing to tell.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from callyard.errors import CallError, ErrorKind, Outcome, ToolError, TransientError
from callyard.executor.budget import ENGINE_FILES, CallInterrupted
from callyard.wire.messages import WireError

if TYPE_CHECKING:
    from callyard.executor.contexts import Call, Context

CHAIN_MAX: Final = 50
STACK_BYTES_MAX: Final = 16 * 1024
STACK_HEAD_BYTES: Final = 4 * 1024
LOCALS_BYTES_MAX: Final = 8 * 1024
LOCAL_CHARACTERS_MAX: Final = 500
MESSAGE_CHARACTERS_MAX: Final = 8 * 1024
_STOPPED_HERE: Final = "Stopped here (most recent call last):\n"
NAME_CHARACTERS_MAX: Final = 200
MASK: Final = "<masked>"
_REAL_NAME: Final[Callable[[type], str]] = type.__dict__["__name__"].__get__
_SECRETS: Final = ("passw", "passphrase", "pwd", "secret", "token", "apikey", "api_key", "credential", "private")
_SECRET_WORDS: Final = frozenset({"auth", "authorization", "cookie", "key", "pin", "session"})


class Fault(msgspec.Struct):
    """Why a call has no output."""

    kind: ErrorKind
    message: str
    outcome: Outcome | None = None
    """None: the kind's own."""
    details: dict[str, Any] = {}
    stack: str = ""
    local_variables: dict[str, str] = {}


def fault_of(error: WireError) -> Fault:
    return Fault(error.kind, error.message, Outcome.NOT_RUN, error.details)


def describe(error: BaseException, *, root: str, with_locals: bool, idempotent: bool = False) -> Fault:
    """What the user's function raised. `root` is the bundle's folder, `idempotent` the function's promise."""
    details: dict[str, Any] = {}
    text = text_of(error)
    named = name_of(error) + (f": {text}" if text else "")
    if isinstance(error, TransientError):
        kind, message = ErrorKind.TRANSIENT, text or named
        if type(error.retry_after_ms) is int and 0 <= error.retry_after_ms < 1 << 53:
            details["retry_after_ms"] = error.retry_after_ms
    elif isinstance(error, ToolError):
        kind, message = ErrorKind.TOOL_ERROR, text or named
    elif isinstance(error, MemoryError):
        kind, message = ErrorKind.RESOURCE_LIMIT, named
    elif isinstance(error, CallError):
        kind, message = _kind_for_parent(error, idempotent=idempotent), named
        failure = error.failure
        details["cause"] = {"kind": failure.kind, "message": failure.message, "details": dict(failure.details)}
    else:
        kind, message = ErrorKind.INTERNAL, named
    if isinstance(error, SystemExit):
        details["exit_code"] = exit_code_of(error)
    return Fault(
        kind,
        cut_text(cut_root(message, root), MESSAGE_CHARACTERS_MAX),
        details=details,
        stack=stack_of(error, root),
        local_variables=locals_of(error.__traceback__, root) if with_locals else {},
    )


def _kind_for_parent(error: CallError, *, idempotent: bool) -> ErrorKind:
    """Of a call that did not catch the failure of a subcall, or of a request.

    A subfunction's own answer stays one. What may be tried again may be tried with the parent, if that is safe to run
    again itself: whatever it did before is then done again.
    """
    if error.kind is ErrorKind.TOOL_ERROR:
        return ErrorKind.TOOL_ERROR
    return ErrorKind.TRANSIENT if idempotent and error.failure.retryable else ErrorKind.INTERNAL


def describe_unreadable(error: BaseException, second: BaseException) -> Fault:
    """For an exception whose looking at raised `second`: nothing here asks either of them."""
    return Fault(ErrorKind.INTERNAL, f"{name_of(error)} <describing it raised {name_of(second)}>")


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
        return clean_text(str(error))
    except BaseException as second:  # noqa: BLE001 - contained (X57)
        return f"<its __str__ raised {name_of(second)}>"


def clean_text(text: str) -> str:
    """Text that a frame can carry: UTF-8 has no lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode()


def cut_text(text: str, characters_max: int) -> str:
    if len(text) <= characters_max:
        return text
    return f"{text[:characters_max]}… ({len(text) - characters_max} more characters)"


def cut_root(text: str, root: str) -> str:
    """Paths of the bundle, relative to it, as its author knows them: its folder here is the run's own."""
    return text.replace(root.rstrip(os.sep) + os.sep, "") if root else text


def stack_of(error: BaseException, root: str = "") -> str:
    """The traceback without the engine's frames, causes included, cut in the middle to `STACK_BYTES_MAX`."""
    import traceback

    try:
        _cut_chain(error)
        told = traceback.TracebackException.from_exception(error)
        _drop_engine_frames(told, set())
        if issubclass(type(error), CallInterrupted):  # ours: of interest is only where it hit
            return cut_stack(cut_root(_STOPPED_HERE + "".join(told.stack.format()), root))
        return cut_stack(cut_root("".join(told.format()), root))
    except BaseException as second:  # noqa: BLE001 - user code in it may raise or run out of its budget
        return f"<no stack: {name_of(second)}>"


def stack_of_suspended(call: Call, context: Context) -> str:
    """Where a call was that will never go on: in its greenlet, or in the coroutines that its function waits in."""
    import traceback

    entries = list(traceback.extract_stack(context.at.gr_frame))
    waiting = call.family.coroutine if call.family is not None else None
    while waiting is not None:
        frame = getattr(waiting, "cr_frame", None)
        entries += traceback.extract_stack(frame, limit=1) if frame is not None else []
        waiting = getattr(waiting, "cr_await", None)
    kept = [entry for entry in entries if not entry.filename.startswith(ENGINE_FILES)]
    told = _STOPPED_HERE + "".join(traceback.format_list(kept))
    return cut_stack(cut_root(told, call.code.path))


def _cut_chain(error: BaseException) -> None:
    """Forget causes beyond `CHAIN_MAX`: to tell tens of thousands of them takes seconds, and nobody reads them."""
    link: BaseException | None = error
    for _ in range(CHAIN_MAX):
        if link is None:
            return
        link = link.__cause__ or link.__context__
    if link is not None:
        link.__cause__ = link.__context__ = None


def _drop_engine_frames(told: Any, seen: set[int]) -> None:
    """`told`: a TracebackException, whose chain may be long and, made by hand, even cyclic."""
    pending = [told]
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        kept = [entry for entry in one.stack if not entry.filename.startswith(ENGINE_FILES)]
        one.stack[:] = kept
        pending += [one.__cause__, one.__context__, *(getattr(one, "exceptions", None) or ())]


def cut_stack(text: str) -> str:
    """Keep the beginning, and of the rest the end: the innermost frames and the exception itself."""
    raw = text.encode("utf-8", "backslashreplace")
    if len(raw) <= STACK_BYTES_MAX:
        return raw.decode()
    marker = f"\n… {len(raw) - STACK_BYTES_MAX} bytes and more cut …\n"
    tail_bytes = STACK_BYTES_MAX - STACK_HEAD_BYTES - len(marker.encode())
    return raw[:STACK_HEAD_BYTES].decode(errors="ignore") + marker + raw[-tail_bytes:].decode(errors="ignore")


def locals_of(trace: TracebackType | None, root: str) -> dict[str, str]:
    """Names and shortened reprs of the innermost frame of the bundle's own code; secrets masked by their name."""
    frame = _innermost_user_frame(trace, root)
    if frame is None:
        return {}
    shown: dict[str, str] = {}
    used = 0
    for name, value in list(frame.f_locals.items()):
        text = MASK if is_secret(name) else _repr_of(value)
        used += len(name.encode()) + len(text.encode())
        if used > LOCALS_BYTES_MAX:
            shown["…"] = f"{len(frame.f_locals) - len(shown)} more, cut"
            break
        shown[clean_text(name)] = text
    return shown


def _innermost_user_frame(trace: TracebackType | None, root: str) -> FrameType | None:
    inside = root.rstrip(os.sep) + os.sep
    own = other = None
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file.startswith(inside):
            own = trace.tb_frame
        elif not file.startswith(ENGINE_FILES):
            other = trace.tb_frame
        trace = trace.tb_next
    return own or other


def is_secret(name: str) -> bool:
    """Whether a name looks like that of a secret: `db_password`, `AUTH_TOKEN`, `apiKey`."""
    low = name.lower()
    return any(part in low for part in _SECRETS) or not _SECRET_WORDS.isdisjoint(low.split("_"))


class _ShortRepr(reprlib.Repr):
    """Bounded reprs that mask secrets in dictionaries, too."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = LOCAL_CHARACTERS_MAX
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = 20

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        return super().repr_dict(
            {key: _MASKED if isinstance(key, str) and is_secret(key) else value for key, value in x.items()}, level
        )

    def repr_instance(self, x: object, level: int) -> str:
        return repr(x)


def _repr_of(value: object) -> str:
    try:
        return cut_text(clean_text(_SHORT_REPR.repr(value)), LOCAL_CHARACTERS_MAX)
    except BaseException as error:  # noqa: BLE001 - __repr__ is user code
        return f"<its __repr__ raised {name_of(error)}>"


class _Masked:
    def __repr__(self) -> str:
        return MASK


_MASKED: Final = _Masked()
_SHORT_REPR: Final = _ShortRepr()
