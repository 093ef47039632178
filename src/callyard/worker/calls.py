"""The ways to call: by name or by function object, one call or a list of them.

By name, arguments are one mapping or sequence, options stand beside it, and values are plain JSON. By function object,
arguments are written as for the function itself, so that type checkers see them, and values are what its annotation
says; where options are wanted, `bind` makes one value of function and arguments. A list has rows and not arguments, so
its options are always beside it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, ParamSpec, TypedDict, TypeVar, Unpack, overload

import msgspec

from callyard.errors import UsageError
from callyard.functions.calling import BoundCall, encode_for
from callyard.functions.encoding import ResultMisfit
from callyard.functions.function import NANS, Nan
from callyard.functions.packing import encode_crossing
from callyard.functions.registry import Registry
from callyard.scheduler.tasks import CachePolicy
from callyard.worker.columns import Extra
from callyard.worker.results import EventCallback, Result

if TYPE_CHECKING:
    from callyard.functions.outgoing import Outgoing
    from callyard.worker.worker import Worker

P = ParamSpec("P")
R = TypeVar("R")
NamedArguments = Mapping[str, Any] | Sequence[Any]
"""Of a call by name: a mapping is keywords, a sequence positional."""


class CallOptions(TypedDict, total=False):
    """What may stand beside the arguments of one call."""

    max_attempts: int | None
    budget_ms: int | None
    deadline_ms: int | None
    """A duration from now for queueing and running together."""
    tenant: str
    on_event: EventCallback | None
    """Gets the call's progress, log and output while it runs."""
    nan: Nan
    """"null": NaN and infinities are null, in the arguments and in the result. Arrays and tables keep theirs."""


class ResultOptions(CallOptions, total=False):
    """What may stand beside the arguments of a call that gives a `Result`."""

    binary: bool
    """False: a result that is all JSON, of bytes, arrays and tables too."""
    strings: bool
    """The values are text, parsed by each parameter's type."""
    row: bool
    """The arguments are a row, as `map` has them: a function with one object parameter takes it whole."""
    capture: bool
    """The Result has in `printed` what the call printed and logged."""


class MapOptions(CallOptions, total=False):
    """What may stand beside the rows of a list."""

    ordered: bool
    fail_fast: bool
    cache: CachePolicy
    columns: Sequence[str] | None
    extra: Extra
    capture: bool


class AskedCall(msgspec.Struct, frozen=True):
    """One call as it was asked for."""

    name: str
    args: bytes
    """Encoded (`functions.packing`)."""
    outgoing: Outgoing | None
    """How its result is read; None: as it came."""
    options: Mapping[str, Any]


def read_call(
    method: str, options: type, registry: Registry, function: object, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> AskedCall:
    """What the arguments of `method` ask for. `options`: the TypedDict of those that it has.

    Raises `UsageError` for a function that is not the registry's and for arguments by name that have no JSON,
    `TypeError` for an unknown option and for arguments that do not fit the function, `CallError` (schema) for those
    that JSON cannot hold.
    """
    known = options.__annotations__
    if isinstance(function, str):
        if len(args) > 1:
            raise TypeError(
                f"{method}({function!r}, …) takes one mapping or sequence with the arguments, and options by name; to"
                " write arguments as for the function itself, give it the function"
            )
        arguments, asked = (args[0] if args else None), {**kwargs}
        if "args" in asked and not args:
            arguments = asked.pop("args")
        of_one = "" if args else f"; arguments of a function by name are one value: {method}({function!r}, {{…}})"
        check_options(method, asked, known, of_one)
        return AskedCall(function, _encode_args(arguments, wants_null(asked.get("nan", "refuse"))), None, asked)
    if isinstance(function, BoundCall):
        if args:
            raise TypeError(f"{method}(bind(…), …) takes options by name only: arguments are those of bind")
        check_options(method, kwargs, known)
        outgoing = registry.outgoing(function.function)
        encoded = outgoing.encode_call(function.args, function.kwargs, nan_null=wants_null(kwargs.get("nan", "refuse")))
        return AskedCall(outgoing.name, encoded, outgoing, kwargs)
    outgoing = registry.outgoing(function)
    return AskedCall(outgoing.name, encode_for(method, outgoing, tuple(args), kwargs, known), outgoing, {})


def wants_null(nan: object) -> bool:
    """Whether NaN is to be null, by an option `nan`. Raises `UsageError` for one that is none."""
    if nan == "refuse":
        return False
    if nan not in NANS:
        raise UsageError(f"nan must be one of {', '.join(NANS)}, got {nan!r}")
    return True


def check_options(method: str, given: Collection[str], known: Iterable[str], advice: str = "") -> None:
    """Raises `TypeError`, as Python does for its own."""
    if given and (unknown := [name for name in given if name not in known]):
        raise TypeError(f"{method}() has no option {unknown[0]!r}; it has {', '.join(known)}{advice}")


def _encode_args(args: object, nan_null: bool) -> bytes:
    """Arguments, encoded. Raises UsageError for what is neither a mapping nor a sequence, or cannot cross."""
    if args is None:
        return b"[]"
    if not isinstance(args, list | dict) and (
        isinstance(args, str | bytes) or not isinstance(args, Mapping | Sequence)
    ):
        raise UsageError(f"args must be a mapping or a sequence of arguments, got {type(args).__name__}")
    try:
        return encode_crossing(args, canonical=True, nan_null=nan_null)
    except ResultMisfit as error:
        raise UsageError(f"args cannot cross: {error.message}") from error


class Calls:
    """`call`, `call_result` and `map`: of a `Worker`, and of a `Yard` for its worker."""

    def _callee(self) -> Worker:
        """Who runs them."""
        raise NotImplementedError

    @overload
    async def call(self, function: BoundCall[R], /, **options: Unpack[CallOptions]) -> R: ...
    @overload
    async def call(self, function: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    async def call(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    async def call(
        self, function: str, /, args: NamedArguments | None = None, **options: Unpack[CallOptions]
    ) -> Any: ...
    async def call(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run one call and return its value.

            km = await worker.call("distance", {"origin": "JFK", "dest": "LAX"})  # plain JSON
            km = await worker.call(distance, origin="JFK", dest="LAX")  # what its annotation says
            km = await worker.call(bind(distance, origin="JFK", dest="LAX"), deadline_ms=500)

        By name a mapping is keywords, a sequence positional arguments. Raises CallError when the call fails, and where
        a result is not what the function's annotation says (kind `result`). Cancelling the caller cancels the call.
        Options: `CallOptions`.
        """
        worker = self._callee()
        asked = read_call("call", CallOptions, worker.started_registry, function, args, kwargs)
        return (await worker.call_asked(asked)).value

    @overload
    async def call_result(self, function: BoundCall[R], /, **options: Unpack[ResultOptions]) -> Result[R]: ...
    @overload
    async def call_result(
        self, function: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Result[R]: ...
    @overload
    async def call_result(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Result[R]: ...
    @overload
    async def call_result(
        self, function: str, /, args: NamedArguments | None = None, **options: Unpack[ResultOptions]
    ) -> Result[Any]: ...
    async def call_result(self, function: Any, /, *args: Any, **kwargs: Any) -> Result[Any]:
        """Like `call`, but a failed call is a Result that is not ok. Options: `ResultOptions`."""
        worker = self._callee()
        asked = read_call("call_result", ResultOptions, worker.started_registry, function, args, kwargs)
        return await worker.call_asked(asked)

    @overload
    def map(
        self, function: Callable[..., Coroutine[Any, Any, R]], rows: Iterable[Any], **options: Unpack[MapOptions]
    ) -> AsyncGenerator[Result[R], None]: ...
    @overload
    def map(
        self, function: Callable[..., R], rows: Iterable[Any], **options: Unpack[MapOptions]
    ) -> AsyncGenerator[Result[R], None]: ...
    @overload
    def map(
        self, function: str, rows: Iterable[Any], **options: Unpack[MapOptions]
    ) -> AsyncGenerator[Result[Any], None]: ...
    async def map(self, function: Any, rows: Iterable[Any], **options: Any) -> AsyncGenerator[Result[Any], None]:
        """Run one call per row and yield each Result, in the order of the rows unless `ordered` is False.

        A row is a mapping (keywords, or the whole row for a function with one object parameter), a list or tuple
        (positional), or any other value (the only argument). Memory is bounded however long the list: rows are read
        as results are taken. Leaving the loop early cancels the rest. Raises what `rows` raises.

        `rows` may be a pandas or Polars DataFrame or an Arrow table: a row is then a mapping by column, a cell that is
        empty or NaN None. A column that the function has no place for is a UsageError before the first call, unless
        `columns` names those to take, or `extra` is "ignore".

        With `fail_fast` the first final failure stops the list: calls that run still end, and what never ran is
        `cancelled`. `cache` says whose results are kept and shared among equal calls of this list, subcalls included:
        of `pure` functions ("promised"), of all, or of none ("off"). `on_event` gets progress, log and output while
        calls run; with `capture` each Result has in `printed` what its call printed and logged.
        """
        check_options("map", options, MapOptions.__annotations__)
        async with aclosing(self._callee().map_batches(function, rows, **options)) as batches:
            async for batch in batches:
                for result in batch:
                    yield result
