"""From an exception to what a CallFailed says: kind, message, stack, local variables (X56, X57).

Everything here may run user code (`__str__`, `__repr__`), so it runs in the user's greenlet, under the budget, and an
exception inside is one more thing to tell.
"""

from __future__ import annotations

import os
import reprlib
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from callyard.errors import ErrorKind, Outcome
from callyard.executor.budget import ENGINE_FILES, CallInterrupted
from callyard.functions.loading import explain_missing, explain_unsent
from callyard.functions.raised import (
    MESSAGE_CHARACTERS_MAX,
    clean_text,
    cut_chain,
    cut_stack,
    cut_text,
    drop_frames,
    judge,
    name_of,
)
from callyard.wire.messages import WireError

if TYPE_CHECKING:
    from callyard.executor.contexts import Call, Context

LOCALS_BYTES_MAX: Final = 8 * 1024
LOCAL_CHARACTERS_MAX: Final = 500
_STOPPED_HERE: Final = "Stopped here (most recent call last):\n"
MASK: Final = "<masked>"
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


def describe(
    error: BaseException, *, root: str, with_locals: bool, function: str = "", idempotent: bool = False
) -> Fault:
    """What the user's function raised. `root` is the bundle's folder, `function` its name, `idempotent` its promise."""
    verdict = judge(error, function, idempotent=idempotent)
    message = cut_root(verdict.message + _not_found(error, root), root)
    return Fault(
        verdict.kind,
        cut_text(clean_text(message), MESSAGE_CHARACTERS_MAX),
        verdict.outcome,
        verdict.details,
        stack=stack_of(error, root),
        local_variables=locals_of(error.__traceback__, root) if with_locals else {},
    )


def _not_found(error: BaseException, root: str) -> str:
    """What mends that a file of the project, or a package, was not found; empty: it is no such thing."""
    if root and issubclass(type(error), ModuleNotFoundError):
        module = getattr(error, "name", None)
        return explain_missing(Path(root), module) if type(module) is str and module else ""
    if not root or not issubclass(type(error), FileNotFoundError):
        return ""
    name = getattr(error, "filename", None)
    if type(name) is not str or not name.startswith(root.rstrip(os.sep) + os.sep):
        return ""
    return explain_unsent(Path(root), name)


def describe_unreadable(error: BaseException, second: BaseException) -> Fault:
    """For an exception whose looking at raised `second`: nothing here asks either of them."""
    return Fault(ErrorKind.INTERNAL, f"{name_of(error)} <describing it raised {name_of(second)}>")


def cut_root(text: str, root: str) -> str:
    """Paths of the bundle, relative to it, as its author knows them: its folder here is the run's own."""
    return text.replace(root.rstrip(os.sep) + os.sep, "") if root else text


def stack_of(error: BaseException, root: str = "") -> str:
    """The traceback without the engine's frames, causes included, cut in the middle to `STACK_BYTES_MAX`."""
    import traceback

    try:
        cut_chain(error)
        told = traceback.TracebackException.from_exception(error)
        drop_frames(told, ENGINE_FILES)
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
