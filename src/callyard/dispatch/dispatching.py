"""`dispatch`, by name or by function object: of a `Dispatcher`, and of what stands before one."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack, overload

from callyard.dispatch.allowance import Allowance
from callyard.dispatch.call import ProgressCallback
from callyard.dispatch.caller_side import CallerSide
from callyard.dispatch.outcomes import DispatchError, DispatchResult, read_as
from callyard.errors import CallError
from callyard.functions.calling import BoundCall, encode_for

if TYPE_CHECKING:
    from callyard.dispatch.dispatcher import Dispatcher

P = ParamSpec("P")
R = TypeVar("R")


class DispatchOptions(CallerSide, total=False):
    """What may stand beside the arguments of a dispatch; see `Dispatching.dispatch`."""

    timeout_ms: int | None
    idempotency_key: str | None
    key: str | None
    allowance: Allowance | None
    owner: str | None
    deadline_ms: int | None
    tenant: str
    repair: bool
    tags: Mapping[str, str] | None
    trace: Mapping[str, str] | None
    call_id: str | None
    on_progress: ProgressCallback | None


class Dispatching:
    """`dispatch`: of a `Dispatcher`, and of a `Yard` for its dispatcher."""

    def _dispatcher(self) -> Dispatcher:
        raise NotImplementedError

    @overload
    async def dispatch(self, tool: BoundCall[R], /, **options: Unpack[DispatchOptions]) -> DispatchResult[R]: ...
    @overload
    async def dispatch(
        self, tool: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> DispatchResult[R]: ...
    @overload
    async def dispatch(self, tool: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> DispatchResult[R]: ...
    @overload
    async def dispatch(
        self, tool: str, /, args: Mapping[str, Any] | bytes | None = None, **options: Unpack[DispatchOptions]
    ) -> DispatchResult[Any]: ...
    def dispatch(self, tool: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a tool; a failed call is a `DispatchError`, never an exception.

            done = await yard.dispatch("charge", {"cents": 500}, key="order-7")  # plain JSON
            done = await yard.dispatch(charge, cents=500)  # what its annotation says
            done = await yard.dispatch(bind(charge, cents=500), key="order-7")

        By name, `args` is a mapping, or a JSON object as bytes. Options: `timeout_ms` limits each attempt, in place of
        the tool's own. `deadline_ms` is a duration from now that covers queueing and all attempts. `idempotency_key`
        (short: `key`) is the caller's name for the effect: the same key and arguments never run it twice. `allowance`
        is the caller's budget of tool calls. Calls of one `owner` run one at a time, in order. `repair` lets arguments
        be mended (D5). `call_id` names the call for `cancel` and in events (default: one of our own); no other call of
        that name may be under way. `on_progress` gets done, total and message while the tool runs, `on_log` the level,
        message and fields of what it logs. `on_begin` is called once: directly before the first attempt begins, or when
        the call waits for another's run under its key. `on_ask` answers the tool's questions (`elicit`, `sample`,
        `list_roots`); while one is open no time of the call runs. `claims`, `headers` and `meta`, a JSON object, are
        what its code finds in `callyard.context()`.

        A dispatch made inside a handler is nested: it inherits deadline, allowance and tenant, and takes no slot.
        Cancelling the caller raises CancelledError at once. Raises UsageError for an option out of range and for a
        function that is none of the tools, TypeError for arguments that do not fit the function.
        Source: tool-dispatch D7-D9, D11, D13, D14, D44.
        """
        dispatcher = self._dispatcher()
        if type(tool) is not str and (isinstance(tool, BoundCall) or callable(tool)):
            return _dispatch_function(dispatcher, tool, args, kwargs)
        if len(args) > 1:
            raise TypeError(
                f"dispatch({tool!r}, …) takes one mapping with the arguments, and options by name; to write arguments"
                " as for the function itself, give it the function"
            )
        return dispatcher.dispatch_named(tool, *args, **kwargs)


async def _dispatch_function(
    dispatcher: Dispatcher, tool: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> DispatchResult[Any]:
    options: Mapping[str, Any] = {}
    if isinstance(tool, BoundCall):
        if args:
            raise TypeError("dispatch(bind(…), …) takes options by name only: arguments are those of bind")
        tool, args, kwargs, options = tool.function, tool.args, tool.kwargs, kwargs
    outgoing = dispatcher.registry.outgoing(tool)
    try:
        raw = encode_for("dispatch", outgoing, args, kwargs, DispatchOptions.__annotations__, binary=False)
    except CallError as error:
        return DispatchError(dispatcher.next_id(), error.failure)
    result = await dispatcher.dispatch_named(outgoing.name, raw, **options)
    return result if isinstance(result, DispatchError) else read_as(result, outgoing)
