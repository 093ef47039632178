"""What user functions import: `call` and its kin, `sleep`, `progress`, `log`, `context`.

Outside an executor (a test, a script, a notebook) each has a plain meaning of its own, so that a functions file can be
imported and its functions called anywhere. Importing this module costs next to nothing.

`call` blocks the call that it stands in, and no other, in a `def` and in an `async def` alike; `acall` is awaited, so
that an `async def` can have several under way, or do something else meanwhile. Source: call-execution X30, X52.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final, Generic, Literal, ParamSpec, Protocol, TypeVar, cast, overload

import msgspec

from callyard.errors import (
    KIND_RULES,
    CallError,
    CallFailure,
    ErrorKind,
    Outcome,
    ToolError,
    TransientError,
    UsageError,
    fail,
    may_retry,
)
from callyard.functions.current import RUNNING
from callyard.functions.current import CallInfo as CallInfo
from callyard.functions.handed_on import hand_on

P = ParamSpec("P")
R = TypeVar("R")

Level = Literal["debug", "info", "warning", "error", "critical"]
LEVELS: Final[Mapping[str, int]] = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
"""The levels of `log`, with their numbers in `logging`."""
LOGGER: Final = "callyard.functions"
"""The logger that `log` writes to outside an executor."""


class IoReply(msgspec.Struct, frozen=True):
    """What a provider of the worker answered."""

    result: bytes
    """JSON."""
    body: bytes | None = None
    """Raw bytes that came beside it; None: none did."""


class Answer(Generic[R]):
    """How one call of `call_many(…, return_errors=True)` ended."""

    __slots__ = ("_cause", "_value", "error", "index")

    def __init__(
        self, index: int, value: R | None, error: CallFailure | None, cause: BaseException | None = None
    ) -> None:
        """`cause`: what the function raised, where it ran as plain Python."""
        self.index: Final = index
        """The row's place, from 0."""
        self.error: Final = error
        """None: it succeeded."""
        self._value = value
        self._cause = cause

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def value(self) -> R:
        """What the function returned. Raises `CallError` when the call failed."""
        if self.error is not None:
            raise CallError(self.error) from self._cause
        return cast(R, self._value)

    def unwrap(self) -> R:
        """The value, or `CallError`: `value` as a call."""
        return self.value

    def __repr__(self) -> str:
        if self.error is None:
            return f"Answer(index={self.index}, ok=True, value={self._value!r})"
        return f"Answer(index={self.index}, ok=False, error={self.error})"


Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Of one call: by position and by name."""


class Runtime(Protocol):
    """What an executor gives this module, and `sdk_io`.

    What waits has two forms: one blocks the call that runs here, the other, with an `a`, is awaited. Both end with the
    call's interruption.
    """

    def sleep(self, seconds: float) -> None: ...

    def call_info(self) -> CallInfo | None: ...

    def io(self, provider: str, operation: str, request: bytes, body: bytes | None = None) -> IoReply:
        """Ask a provider of the worker. `request` is JSON. Raises `CallError` with the provider's failure."""

    async def aio(self, provider: str, operation: str, request: bytes, body: bytes | None = None) -> IoReply:
        """As `io`."""

    def subcalls(
        self, function: object, calls: Sequence[Arguments], *, spread: bool, lenient: bool
    ) -> list[Answer[Any]]:
        """Call a function, or a name, of this bundle once for each of `calls`, all at once; answers in their order.

        `lenient`: arguments that do not fit the signature are that one's failure, and no TypeError.
        """

    async def asubcalls(
        self, function: object, calls: Sequence[Arguments], *, spread: bool, lenient: bool
    ) -> list[Answer[Any]]:
        """As `subcalls`."""

    def read_rows(self, function: object, rows: Iterable[Any]) -> list[Arguments]:
        """What each row stands for as arguments."""

    def progress(self, done: float, total: float | None, message: str) -> None: ...

    def log(self, level: str, message: str, fields: Mapping[str, Any]) -> None: ...


_runtime: Runtime | None = None


def set_runtime(runtime: Runtime | None) -> None:
    """For the executor: what this module does from now on; None: as outside an executor."""
    global _runtime
    _runtime = runtime


def runtime() -> Runtime | None:
    """What the executor gives; None: there is none, this is a test, a script, a notebook."""
    return _runtime


def sleep(seconds: float) -> None:
    """Wait without holding up other calls of the process; in a `def` and in an `async def` alike.

    The time counts against the call's budget, and ends with it. In an `async def` it blocks the task that calls it, and
    no other. Raises `ValueError` for a negative duration.
    """
    if not seconds >= 0:
        raise ValueError(f"sleep length must be a number from 0, got {seconds!r}")
    if _runtime is None:
        time.sleep(seconds)
    else:
        _runtime.sleep(seconds)


def context() -> CallInfo:
    """The call that is running here; in its child tasks and `asyncio.to_thread` too."""
    running = RUNNING.get() if _runtime is None else _runtime
    found = None if running is None else running.call_info()
    return CallInfo() if found is None else found


# --- calls inside calls -----------------------------------------------------------------------------------------------


@overload
def call(function: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
@overload
def call(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
@overload
def call(function: str, arguments: Mapping[str, Any] | Sequence[Any] = ..., /) -> Any: ...
@overload
def call(function: str, /, **kwargs: Any) -> Any: ...
def call(function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Run another function of this file as a call of its own, and wait for its result.

    `call(distance, origin="JFK", dest="LAX")`: arguments travel as JSON, are validated by the function's signature, and
    the result comes back as what its annotation says. By name, `call("distance", {"origin": …})`, it is plain JSON.
    Only this call waits; the time that `function` runs counts against this call's budget, the wait does not. What
    `function` is promised to be decides whether it is cached, shared, or placed with others.

    Raises `CallError` when that call fails. Outside an executor the plain function runs, here and now, and what it
    raises is the `__cause__` of the `CallError`.
    """
    if _runtime is None:
        return _run_here(function, args, kwargs)
    return _runtime.subcalls(function, [_arguments_of(function, args, kwargs)], spread=False, lenient=False)[0].value


@overload
async def acall(function: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
@overload
async def acall(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
@overload
async def acall(function: str, arguments: Mapping[str, Any] | Sequence[Any] = ..., /) -> Any: ...
@overload
async def acall(function: str, /, **kwargs: Any) -> Any: ...
async def acall(function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """As `call`, awaited: other tasks of the calling function run meanwhile."""
    if _runtime is None:
        return await _arun_here(function, args, kwargs)
    answers = await _runtime.asubcalls(function, [_arguments_of(function, args, kwargs)], spread=False, lenient=False)
    return answers[0].value


@overload
def call_many(
    function: Callable[..., Coroutine[Any, Any, R]],
    rows: Iterable[Any],
    *,
    spread: bool = ...,
    return_errors: Literal[False] = ...,
) -> list[R]: ...
@overload
def call_many(
    function: Callable[..., R], rows: Iterable[Any], *, spread: bool = ..., return_errors: Literal[False] = ...
) -> list[R]: ...
@overload
def call_many(
    function: Callable[..., Coroutine[Any, Any, R]],
    rows: Iterable[Any],
    *,
    spread: bool = ...,
    return_errors: Literal[True],
) -> list[Answer[R]]: ...
@overload
def call_many(
    function: Callable[..., R], rows: Iterable[Any], *, spread: bool = ..., return_errors: Literal[True]
) -> list[Answer[R]]: ...
@overload
def call_many(
    function: str, rows: Iterable[Any], *, spread: bool = ..., return_errors: Literal[False] = ...
) -> list[Any]: ...
@overload
def call_many(
    function: str, rows: Iterable[Any], *, spread: bool = ..., return_errors: Literal[True]
) -> list[Answer[Any]]: ...
def call_many(function: Any, rows: Iterable[Any], *, spread: bool = False, return_errors: bool = False) -> list[Any]:
    """Call a function once for each row, all at once, and wait for all of them; results in the order of the rows.

    A row is what a line of a call list is: a mapping is arguments by name (or the whole object, for a function with one
    object parameter), a list or tuple is arguments by position, anything else is the only argument. `spread`: the calls
    may run on other executors, too, where there is room. Each is granted an equal share of what is left of this call's
    budget, and this call pays for what they use together.

    When some fail, the `CallError` of the first row that did is raised, once all have ended; with `return_errors` you
    get an `Answer` for each row instead (`ok`, `value`, `error`).
    """
    if _runtime is None:
        return _settle(_run_rows_here(function, rows), return_errors)
    calls = _runtime.read_rows(function, rows)
    return _settle(_runtime.subcalls(function, calls, spread=spread, lenient=True), return_errors)


@overload
async def acall_many(
    function: Callable[..., Coroutine[Any, Any, R]],
    rows: Iterable[Any],
    *,
    spread: bool = ...,
    return_errors: Literal[False] = ...,
) -> list[R]: ...
@overload
async def acall_many(
    function: Callable[..., R], rows: Iterable[Any], *, spread: bool = ..., return_errors: Literal[False] = ...
) -> list[R]: ...
@overload
async def acall_many(
    function: Callable[..., Coroutine[Any, Any, R]],
    rows: Iterable[Any],
    *,
    spread: bool = ...,
    return_errors: Literal[True],
) -> list[Answer[R]]: ...
@overload
async def acall_many(
    function: Callable[..., R], rows: Iterable[Any], *, spread: bool = ..., return_errors: Literal[True]
) -> list[Answer[R]]: ...
@overload
async def acall_many(
    function: str, rows: Iterable[Any], *, spread: bool = ..., return_errors: Literal[False] = ...
) -> list[Any]: ...
@overload
async def acall_many(
    function: str, rows: Iterable[Any], *, spread: bool = ..., return_errors: Literal[True]
) -> list[Answer[Any]]: ...
async def acall_many(
    function: Any, rows: Iterable[Any], *, spread: bool = False, return_errors: bool = False
) -> list[Any]:
    """As `call_many`, awaited: other tasks of the calling function run meanwhile."""
    if _runtime is None:
        return _settle(await _arun_rows_here(function, rows), return_errors)
    calls = _runtime.read_rows(function, rows)
    return _settle(await _runtime.asubcalls(function, calls, spread=spread, lenient=True), return_errors)


def _arguments_of(function: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
    """By name, the only positional argument may hold them all."""
    if not isinstance(function, str) or not args:
        return args, kwargs
    if len(args) > 1 or kwargs or not isinstance(args[0], Mapping | list | tuple):
        raise UsageError(
            f"call({function!r}, …) takes one mapping or list with the arguments, or arguments by name; for arguments "
            f"by position give it the function itself"
        )
    return ((), args[0]) if isinstance(args[0], Mapping) else (tuple(args[0]), {})


def _settle(answers: list[Answer[Any]], return_errors: bool) -> list[Any]:
    return answers if return_errors else [answer.value for answer in answers]


# --- progress and log -------------------------------------------------------------------------------------------------


def progress(done: float, total: float | None = None, message: str = "") -> None:
    """Tell whoever made this call how far it is. Cheap: the latest value is told at most 20 times a second.

    Raises `ValueError` for what is no amount. Where nothing of Callyard's runs the function it does nothing.
    """
    for name, value in (("done", done), ("total", total)):
        if value is not None and not 0 <= value < float("inf"):
            raise ValueError(f"progress: {name} must be a number from 0, got {value!r}")
    running = RUNNING.get() if _runtime is None else _runtime
    if running is not None:
        running.progress(done, total, str(message))


def log(message: str, level: Level = "info", **fields: Any) -> None:
    """Tell whoever made this call something, with `fields` for machines to read; at most 64 KiB a call.

    Where more is logged and printed, the beginning and the end are kept. Raises `ValueError` for an unknown level.
    Outside an executor it goes to `logging`, where the caller does not listen.
    """
    if level not in LEVELS:
        raise ValueError(f"log: level must be one of {', '.join(LEVELS)}, got {level!r}")
    if _runtime is not None:
        _runtime.log(level, str(message), fields)
        return
    running = RUNNING.get()
    if running is not None and running.log(level, str(message), fields):
        return
    import logging

    text = f"{message} {' '.join(f'{name}={value!r}' for name, value in fields.items())}" if fields else message
    logging.getLogger(LOGGER).log(LEVELS[level], "%s", text)


# --- outside an executor ----------------------------------------------------------------------------------------------


def _run_here(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    _check_call(function, args, kwargs)
    try:
        value = function(*args, **kwargs)
        if not inspect.iscoroutine(value):
            return value
        if not _in_loop():
            import asyncio

            return asyncio.run(value)
    except (Exception, SystemExit) as error:
        raise CallError(_failure_of(function, error)) from error
    value.close()
    raise UsageError(
        f"call({function.__name__}) of an async def, where an event loop runs already and there is no executor: "
        f"await acall({function.__name__}, …) instead"
    )


async def _arun_here(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    _check_call(function, args, kwargs)
    try:
        value = function(*args, **kwargs)
        return await value if inspect.isawaitable(value) else value
    except (Exception, SystemExit) as error:
        raise CallError(_failure_of(function, error)) from error


def _in_loop() -> bool:
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _check_call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """As in an executor: what is wrong with the call itself is no failure of the function."""
    if isinstance(function, str):
        raise UsageError(
            f"call({function!r}): outside an executor there is no bundle to look a name up in: give the function"
        )
    try:
        signature = inspect.signature(function)
    except ValueError:  # of a function in C that does not say
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{function.__name__}() {error}") from None


def _run_rows_here(function: Any, rows: Iterable[Any]) -> list[Answer[Any]]:
    answers: list[Answer[Any]] = []
    for index, row in enumerate(rows):
        try:
            args, kwargs = _read_row(function, row)
            answers.append(Answer(index, _run_here(function, args, kwargs), None))
        except CallError as error:
            answers.append(_failed(index, error))
    return answers


async def _arun_rows_here(function: Any, rows: Iterable[Any]) -> list[Answer[Any]]:
    answers: list[Answer[Any]] = []
    for index, row in enumerate(rows):
        try:
            args, kwargs = _read_row(function, row)
            answers.append(Answer(index, await _arun_here(function, args, kwargs), None))
        except CallError as error:
            answers.append(_failed(index, error))
    return answers


def _failed(index: int, error: CallError) -> Answer[Any]:
    return Answer(index, None, error.failure, error.__cause__)


def _read_row(function: Any, row: Any) -> Arguments:
    """As in an executor: a mapping for a function with one object parameter becomes that object, and a row that does
    not fit is that row's failure."""
    if isinstance(function, str):
        return (), {}  # refused when it is to be run
    from callyard.functions.encoding import encode_value
    from callyard.functions.outgoing import read_row
    from callyard.functions.signature import ArgumentsMisfit, Invocable, ResultMisfit

    invocable = Invocable(function.__name__, function)
    try:
        if invocable.takes_row and isinstance(row, Mapping):
            return invocable.bind(encode_value(row), row=True)
        args, kwargs = read_row(row, invocable.row_parameter)
        _check_call(function, args, kwargs)
    except (ArgumentsMisfit, ResultMisfit) as error:
        failure = fail(ErrorKind.SCHEMA, error.message, function=function.__name__, **error.details)
        raise CallError(failure) from error
    except TypeError as error:
        raise CallError(fail(ErrorKind.SCHEMA, str(error), function=function.__name__)) from error
    return args, kwargs


def _failure_of(function: Any, error: BaseException) -> CallFailure:
    """What an executor says of a subcall of `function` that raised `error`."""
    name = function.__name__
    idempotent = bool(getattr(getattr(function, "promises", None), "idempotent", False))
    text = str(error)
    named = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, CallError):
        failure = hand_on(error.failure, name, idempotent=idempotent)
    elif isinstance(error, TransientError):
        failure = fail(ErrorKind.TRANSIENT, text or named)
    elif isinstance(error, ToolError):
        failure = fail(ErrorKind.TOOL_ERROR, text or named)
    else:
        failure = fail(ErrorKind.RESOURCE_LIMIT if isinstance(error, MemoryError) else ErrorKind.INTERNAL, named)
    return msgspec.structs.replace(
        failure,
        retryable=may_retry(failure.kind, idempotent=idempotent),
        attempts=0 if KIND_RULES[failure.kind].outcome is Outcome.NOT_RUN else 1,
        details={"function": name, **failure.details},
    )
