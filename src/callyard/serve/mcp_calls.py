"""One request of an MCP client that runs a function: what it tells meanwhile, what it asks, how it ends.

    request -> Calls.make -> Gateway.call, in a task of its own: a Run
                 |              |  on_progress, on_log -> Teller -> notifications of this request
                 |              |  on_ask -> up to 2025-11-25 a request to the client, on its stream
                 |              v            from 2026-07-28 an open question of the run
              the answer, or "input required" with the open questions: the run waits in its executor, and the
              retry that brings the answers and the sealed state goes on with the same run

A run that waits is never run again: its state names it, and a round that is over is refused. What nobody comes back for
ends when its questions have been open for too long, or with its deadline.

| the request ends by | the run |
| --- | --- |
| `notifications/cancelled` | stops, whatever it promises (`Gateway.cancel`) |
| its stream, session or connection being gone | stops, or runs on to its own limit: D56, the gateway's rule |

Source: tool-dispatch D33, D34, D41, D56.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Final, NamedTuple, cast, get_args

import mcp_types as types
from mcp.server.connection import Connection
from mcp.server.context import ServerRequestContext
from mcp.shared.dispatcher import DispatchContext
from mcp.shared.exceptions import MCPError, NoBackChannelError
from mcp.shared.message import ServerMessageMetadata
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import BaseModel, ValidationError

from callyard.dispatch.outcomes import DispatchError, DispatchResult
from callyard.errors import CallError, ErrorKind
from callyard.functions.ports import AskRefused
from callyard.host.jobs import Permit
from callyard.ids import CallId
from callyard.serve.gateway import Caller, Gateway, ToolRequest
from callyard.serve.guard import TOKENS_SHARE
from callyard.serve.mcp_tools import PREFIX

Context = ServerRequestContext[Any, Any]

SUSPENDED_MAX: Final = 256
"""Most runs that wait for answers from outside at once, of all clients together."""
ASK_WAIT_S: Final = 300.0
"""How long a question stays open."""
KEPT_S: Final = 60.0
"""How long the end of a run is kept for a client that was to come back for it."""
TOGETHER_S: Final = 0.01
"""Questions that come within this time of each other go to the client together."""
PROGRESS_BURST: Final = 10
PROGRESS_PER_S: Final = 20
LOG_MAX: Final = 256
"""Most log messages that wait for a client to read; what does not fit is counted, and told at the end."""

LEVELS: Final[tuple[types.LoggingLevel, ...]] = get_args(types.LoggingLevel)
"""From debug to emergency."""
_LEVEL_NAMES: Final[Mapping[str, types.LoggingLevel]] = {
    **{level: level for level in LEVELS},
    "warn": "warning",
    "fatal": "critical",
}
_TRACE: Final = ("traceparent", "tracestate", "baggage")


# --- what the transports say of a request ---------------------------------------------------------------------------


class Arrival:
    """What a transport knows of one request: `ctx.request.state` has it as `arrival`."""

    __slots__ = ("arguments", "caller", "connection", "permit", "received_at_ms", "runs", "when_out")

    def __init__(
        self,
        caller: Caller,
        permit: Permit | None,
        *,
        arguments: bytes | None = None,
        received_at_ms: int | None = None,
        connection: object = None,
    ) -> None:
        self.caller = caller
        self.permit = permit
        self.arguments = arguments
        """Those of a `tools/call`, as they were sent: JSON keeps what a parser would lose (D26)."""
        self.received_at_ms = received_at_ms
        self.when_out: list[Callable[[], None]] | None = None
        """What to call once its answer is out; None: the transport does not say when that is."""
        self.connection = connection
        """What takes its turn with others for a permit (R16)."""
        self.runs: set[Run] = set()
        """Of this request. A transport that sees its connection go calls `lose` on each."""

    def begin_stream(self) -> None:
        """It lives long and runs nothing: its permit goes back now."""
        if self.permit is not None:
            self.permit.release()

    def lose(self) -> None:
        for run in list(self.runs):
            run.lose()

    def end(self) -> None:
        """Its answer is out, or nobody is there to have it."""
        self.lose()
        while self.when_out:
            self.when_out.pop()()


_NOBODY: Final = Caller()


def arrival_of(ctx: Context) -> Arrival:
    state = getattr(ctx.request, "state", None)
    found = getattr(state, "arrival", None)
    return found if isinstance(found, Arrival) else Arrival(_NOBODY, None)


def connection_of(ctx: Context) -> Connection:
    """The connection of a request, which lives longer than the request: the SDK shows it to no handler."""
    return ctx.session._connection


def was_cancelled(ctx: Context) -> bool:
    """Whether the client sent `notifications/cancelled` for this request, rather than went away."""
    outbound: DispatchContext[Any] = ctx.session._request_outbound
    return outbound.cancel_requested.is_set()


def is_modern(ctx: Context) -> bool:
    return ctx.protocol_version in MODERN_PROTOCOL_VERSIONS


# --- notifications --------------------------------------------------------------------------------------------------


class Teller:
    """Sends what a run tells as notifications of one request, in order, from a task that there is only while needed.

    Progress rises strictly and is throttled: of what comes too fast, the newest waits. Source: D33.
    """

    def __init__(self, ctx: Context, logger: str) -> None:
        self._ctx = ctx
        self._logger = logger
        self._progress_wanted = (ctx.meta or {}).get("progress_token") is not None
        self._level = _log_level(ctx)
        self._queue: deque[Callable[[], Awaitable[None]]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._ending = asyncio.Event()
        self._done = -math.inf
        self._late: tuple[float, float | None, str] | None = None
        self._tokens = float(PROGRESS_BURST)
        self._tokens_at = asyncio.get_running_loop().time()
        self._dropped = 0

    def progress(self, done: float, total: float | None, message: str) -> None:
        if not self._progress_wanted or not done > self._done or not math.isfinite(done):
            return
        self._done = done
        self._late = (done, total if total is not None and math.isfinite(total) else None, message)
        if self._take_token():
            self._send_late()
        self._wake()

    def log(self, level: str, message: str, fields: Mapping[str, Any]) -> None:
        named = _LEVEL_NAMES.get(level.lower(), "info")
        if self._level is None or LEVELS.index(named) < LEVELS.index(self._level):
            return
        if len(self._queue) >= LOG_MAX:
            self._dropped += 1
            return
        data: Any = {"message": message, **fields} if fields else message
        self._queue.append(lambda: self._send_log(named, data))
        self._wake()

    async def finish(self) -> None:
        """Until all is sent."""
        if self._dropped:
            self._queue.append(lambda: self._send_log("warning", f"{self._dropped} log messages were dropped"))
            self._wake()
        self._ending.set()
        if self._task is not None:
            await self._task

    def close(self) -> None:
        """Send nothing more."""
        self._queue.clear()
        self._late = None
        if self._task is not None:
            self._task.cancel()

    def _wake(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="mcp notifications")

    async def _run(self) -> None:
        while True:
            while self._queue:
                await self._queue.popleft()()
            if self._late is None:
                return
            if not self._ending.is_set():
                try:
                    await asyncio.wait_for(self._ending.wait(), 1 / PROGRESS_PER_S)
                except TimeoutError:
                    pass
            self._take_token()
            self._send_late()

    def _take_token(self) -> bool:
        now = asyncio.get_running_loop().time()
        self._tokens = min(PROGRESS_BURST, self._tokens + (now - self._tokens_at) * PROGRESS_PER_S)
        self._tokens_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def _send_late(self) -> None:
        if self._late is not None:
            done, total, message = self._late
            self._late = None
            self._queue.append(lambda: self._ctx.session.report_progress(done, total, message or None))

    async def _send_log(self, level: types.LoggingLevel, data: Any) -> None:
        params = types.LoggingMessageNotificationParams(level=level, logger=self._logger, data=data)
        await self._ctx.session.send_notification(
            types.LoggingMessageNotification(params=params), related_request_id=self._ctx.request_id
        )


def _log_level(ctx: Context) -> types.LoggingLevel | None:
    """From which level on this request wants log messages; None: it wants none."""
    if is_modern(ctx):
        level = (ctx.meta or {}).get(types.LOG_LEVEL_META_KEY)
        return level if level in LEVELS else None
    return cast("types.LoggingLevel", connection_of(ctx).state.get("callyard.level", "info"))


# --- questions ------------------------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    method: str
    capability: str
    request: type[BaseModel]
    answers: tuple[type[BaseModel], ...]


_KINDS: Final[Mapping[str, _Kind]] = {
    "elicit": _Kind("elicitation/create", "elicitation", types.ElicitRequest, (types.ElicitResult,)),
    "sample": _Kind(
        "sampling/createMessage",
        "sampling",
        types.CreateMessageRequest,
        (types.CreateMessageResult, types.CreateMessageResultWithTools),
    ),
    "list_roots": _Kind("roots/list", "roots", types.ListRootsRequest, (types.ListRootsResult,)),
}


class Question:
    """One that a run has put to its client."""

    __slots__ = ("answer", "kind", "request", "schema")

    def __init__(self, kind: _Kind, params: Mapping[str, Any]) -> None:
        self.kind = kind
        self.schema = params.get("requestedSchema")
        try:
            self.request = kind.request.model_validate({"method": kind.method, "params": dict(params)}, by_name=False)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            where = "/".join(map(str, problem["loc"]))
            raise AskRefused(ErrorKind.SCHEMA, f"{kind.method} cannot be asked so: {where}: {problem['msg']}") from None
        self.answer: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()

    def read(self, raw: Any) -> dict[str, Any] | None:
        """The client's answer; None: it is none to this question."""
        for model in self.kind.answers:
            try:
                answer = model.model_validate(raw, by_name=False)
            except ValidationError:
                continue
            read: dict[str, Any] = answer.model_dump(by_alias=True, mode="json", exclude_none=True)
            return read if self._fits(read) else None
        return None

    def _fits(self, answer: Mapping[str, Any]) -> bool:
        if answer.get("action") != "accept" or not isinstance(self.schema, Mapping):
            return True
        from callyard.functions.json_schema import BadSchema, JsonSchema

        try:
            form = JsonSchema(self.schema)
        except BadSchema:  # a form may say more than JSON Schema does; the asking function reads the answer itself
            return True
        return form.fits(answer.get("content") or {})


def lacks(ctx: Context, kind: _Kind) -> bool:
    """Whether the client did not say that it answers such questions."""
    given = ctx.session.client_capabilities
    found = getattr(given, kind.capability, None)
    if kind.capability == "elicitation" and found is not None:
        return found.form is None and found.url is not None
    return found is None


async def _ask_at_once(ctx: Context, question: Question) -> dict[str, Any]:
    """Up to 2025-11-25: a request to the client, on the stream of the one that runs."""
    try:
        raw = await ctx.session.send_request(
            cast("types.ServerRequest", question.request),
            _Raw,
            metadata=ServerMessageMetadata(related_request_id=ctx.request_id),
        )
    except NoBackChannelError:
        raise AskRefused(ErrorKind.DENIED, "this client cannot be asked: it takes no requests") from None
    except MCPError as error:
        kind = ErrorKind.UNAVAILABLE if error.error.code in _GONE else ErrorKind.DENIED
        raise AskRefused(kind, f"the client refused {question.kind.method}: {error.error.message}") from None
    except ValidationError:
        raise AskRefused(ErrorKind.SCHEMA, f"the client's answer to {question.kind.method} is none") from None
    answer = question.read(raw.model_dump(by_alias=True, mode="json"))
    if answer is None:
        raise AskRefused(ErrorKind.SCHEMA, f"the client's answer to {question.kind.method} does not fit the question")
    return answer


class _Raw(BaseModel, extra="allow"):
    """Any answer, as it came: `Question.read` judges it."""


_GONE: Final = (types.CONNECTION_CLOSED, types.REQUEST_TIMEOUT)


# --- runs -----------------------------------------------------------------------------------------------------------


class Run:
    """A call under way for a client, which may wait for its answers between two requests."""

    def __init__(self, calls: Calls, call_id: CallId, caller: Caller) -> None:
        self.id = call_id
        self.caller = caller
        self.whose = (caller.tenant, caller.token)
        self.round = 0
        """Counts how often questions went out: only the newest state is good."""
        self.questions: dict[str, Question] = {}
        """Open, by the name that the client knows each by."""
        self.supplied: dict[str, Any] = {}
        """Answers that came before their questions."""
        self.refusals: dict[str, str] = {}
        """What the client lacks to be asked, and what the function was told."""
        self.teller: Teller | None = None
        """None: no request waits for this run."""
        self.task: asyncio.Task[DispatchResult] | None = None
        self._calls = calls
        self._changed = asyncio.Event()
        self._names: dict[str, int] = {}

    def start(self, made: Callable[[], Awaitable[DispatchResult]]) -> None:
        async def run() -> DispatchResult:
            return await made()

        self.task = asyncio.create_task(run(), name=f"mcp call {self.id}")
        self.task.add_done_callback(self._on_end)

    def _on_end(self, task: asyncio.Task[DispatchResult]) -> None:
        self._changed.set()
        if not task.cancelled():
            task.exception()  # told to whoever waits, and to nobody when nobody does
        if self.id in self._calls.runs:  # a client was to come back for it
            asyncio.get_running_loop().call_later(self._calls.kept_s, self._calls.runs.pop, self.id, None)

    def lose(self) -> None:
        """Nobody waits for it any more: its connection is gone (D56)."""
        if self.task is not None:
            self.task.cancel()

    def tell_progress(self, done: float, total: float | None, message: str) -> None:
        if self.teller is not None:
            self.teller.progress(done, total, message)

    def tell_log(self, level: str, message: str, fields: Mapping[str, Any]) -> None:
        if self.teller is not None:
            self.teller.log(level, message, fields)

    async def until_end(self) -> DispatchResult | None:
        """None: it has open questions."""
        assert self.task is not None
        while not self.task.done():
            if self.questions:
                self._changed.clear()
                try:
                    await asyncio.wait_for(self._changed.wait(), TOGETHER_S)
                except TimeoutError:
                    if self.questions and not self.task.done():
                        return None
                continue
            self._changed.clear()
            await self._changed.wait()
        if self.task.cancelled():
            raise MCPError(types.CONNECTION_CLOSED, "the connection was lost, or the server stopped, before the end")
        return self.task.result()

    async def open(self, question: Question, name: str) -> dict[str, Any]:
        """Until the client has answered. Raises `AskRefused`."""
        self._names[name] = count = self._names.get(name, 0) + 1
        named = name if count == 1 else f"{name}_{count}"
        if named in self.supplied:
            early = question.read(self.supplied.pop(named))
            if early is not None:
                return early
        self._calls.suspend(self)
        self.questions[named] = question
        self._changed.set()
        try:
            async with asyncio.timeout(self._calls.ask_wait_s):
                return dict(await question.answer)
        except TimeoutError:
            wait_s = self._calls.ask_wait_s
            raise AskRefused(ErrorKind.DEADLINE, f"{question.kind.method} was not answered in {wait_s:g} s") from None
        finally:
            self.questions.pop(named, None)

    def take(self, responses: Mapping[str, Any]) -> None:
        """Answers for the open questions. Names that nobody asked for are left out; a misfit is asked again."""
        for name, question in list(self.questions.items()):
            answer = question.read(responses[name]) if name in responses else None
            if answer is not None and not question.answer.done():
                question.answer.set_result(answer)
                del self.questions[name]

    def refuse_all(self, failure: AskRefused) -> None:
        for question in self.questions.values():
            if not question.answer.done():
                question.answer.set_exception(failure)

    def to_input_required(self) -> types.InputRequiredResult:
        self.round += 1
        return types.InputRequiredResult(
            input_requests={
                name: cast("types.InputRequest", question.request) for name, question in self.questions.items()
            },
            request_state=f"{self.round} {self.id}",
        )


class Calls:
    """The runs of all clients. `headers` and `meta`: names of those that functions may see."""

    def __init__(
        self,
        gateway: Gateway,
        *,
        headers: Collection[str] = (),
        meta: Collection[str] = (),
        owner_by_session: bool = False,
        suspended_max: int = SUSPENDED_MAX,
        ask_wait_s: float = ASK_WAIT_S,
        kept_s: float = KEPT_S,
    ) -> None:
        self.gateway = gateway
        self.runs: dict[CallId, Run] = {}
        """Those that have asked: a client may come back for each."""
        self.ask_wait_s = ask_wait_s
        self.kept_s = kept_s
        self._headers = tuple(name.lower() for name in headers)
        self._meta = tuple(meta)
        self._owner_by_session = owner_by_session
        self._suspended_max = suspended_max
        self._asking: Counter[Run] = Counter()
        """Open questions of runs that ask at once, on the stream of their request."""
        self._is_closed = False

    def close(self) -> None:
        """Nobody is asked any more: whoever waits for an answer goes on without."""
        self._is_closed = True
        for run in list(self.runs.values()):
            run.refuse_all(AskRefused(ErrorKind.SHUTTING_DOWN, "the server is shutting down and asks no more"))

    async def make(
        self,
        ctx: Context,
        tool: str,
        args: bytes | Mapping[str, Any] | None,
        params: types.InputResponseRequestParams,
        caller: Caller | None = None,
    ) -> DispatchResult | types.InputRequiredResult:
        """Run `tool`, or go on with the run that `params` names. `caller`: in place of the request's own. Raises
        `MCPError`."""
        arrival = arrival_of(ctx)
        responses = (ctx.params or {}).get("inputResponses") or {}
        if params.request_state is not None:
            run = self._find(arrival, params.request_state)
            run.take(responses)
        else:
            try:
                run = await self._start(ctx, arrival, caller or arrival.caller, tool, args, responses)
            except CallError as refused:
                return DispatchError(self.gateway.next_id(), refused.failure)
        teller = run.teller = Teller(ctx, tool)
        arrival.runs.add(run)
        is_done = False
        try:
            result = await run.until_end()
            if result is not None:
                self.runs.pop(run.id, None)
                await teller.finish()
            is_done = True
        except asyncio.CancelledError:
            if was_cancelled(ctx):
                self.gateway.cancel(run.caller, run.id)
            else:
                run.lose()
            raise
        finally:
            arrival.runs.discard(run)
            run.teller = None
            if not is_done or result is None:
                teller.close()
        if result is None:
            return run.to_input_required()
        if isinstance(result, DispatchError):
            self._check_capabilities(ctx, run, result)
        return result

    def _find(self, arrival: Arrival, state: str) -> Run:
        """Only the newest round of a run that its own caller may go on with; the seal was checked before."""
        round_, _, call_id = state.partition(" ")
        run = self.runs.get(CallId(call_id))
        if run is None or run.whose != (arrival.caller.tenant, arrival.caller.token):
            raise _bad_state("the call that this requestState belongs to has ended")
        if round_ != str(run.round) or run.teller is not None:
            raise _bad_state("this requestState was used already: its call has gone on")
        arrival.begin_stream()
        return run

    async def _start(
        self,
        ctx: Context,
        arrival: Arrival,
        caller: Caller,
        tool: str,
        args: bytes | Mapping[str, Any] | None,
        responses: Mapping[str, Any],
    ) -> Run:
        said = _Said(ctx.meta or {})
        run = Run(self, self.gateway.next_id(), caller)
        run.supplied = dict(responses)
        request = ToolRequest(
            tool=tool,
            args=args,
            caller=caller,
            key=said.text("idempotencyKey"),
            owner=said.text("owner") or self._session_owner(ctx),
            deadline_ms=said.whole("deadlineMs"),
            timeout_ms=said.whole("timeoutMs"),
            received_at_ms=arrival.received_at_ms,
            call_id=run.id,
            trace={name: value for name in _TRACE if isinstance(value := said.meta.get(name), str)},
            headers=self._pick_headers(ctx),
            meta={name: said.meta[name] for name in self._meta if name in said.meta},
            on_progress=run.tell_progress,
            on_log=run.tell_log,
            on_ask=self._asker(ctx, run),
        )
        permit = arrival.permit or await self.gateway.admit(arrival.connection or ctx.session)
        run.start(lambda: self.gateway.call(request, permit))
        return run

    def _session_owner(self, ctx: Context) -> str | None:
        session_id = connection_of(ctx).session_id
        return f"session:{session_id}" if self._owner_by_session and session_id else None

    def _pick_headers(self, ctx: Context) -> dict[str, str]:
        given = getattr(ctx.request, "headers", {}) if self._headers else {}
        return {name: given[name] for name in self._headers if name in given}

    # --- questions ----------------------------------------------------------------------------------------------------

    def _asker(self, ctx: Context, run: Run) -> Callable[[str, Mapping[str, Any]], Awaitable[dict[str, Any]]]:
        async def ask(kind: str, params: Mapping[str, Any]) -> dict[str, Any]:
            asked = _KINDS.get(kind)
            if asked is None:
                raise AskRefused(ErrorKind.DENIED, f"an MCP client cannot be asked {kind!r}; only {', '.join(_KINDS)}")
            if lacks(ctx, asked):
                text = f"the client did not declare the capability {asked.capability!r}, so {kind} cannot be asked"
                run.refusals[asked.capability] = text
                raise AskRefused(ErrorKind.DENIED, text)
            plain = dict(params)
            name = plain.pop("name", None)
            question = Question(asked, plain)
            if is_modern(ctx):
                return await run.open(question, name or kind)
            self._check_room(run)
            self._asking[run] += 1
            try:
                return await _ask_at_once(ctx, question)
            finally:
                self._asking -= Counter((run,))

        return ask

    def _check_room(self, run: Run) -> None:
        """Whoever waits for an answer keeps its place in an executor meanwhile. Raises `AskRefused`."""
        waiting = {*self.runs.values(), *self._asking}
        if run in waiting:
            return
        if len(waiting) >= self._suspended_max:
            raise AskRefused(ErrorKind.UNAVAILABLE, f"{len(waiting)} calls wait for answers of clients already")
        if run.caller.token:
            own = sum(one.whose == run.whose for one in waiting)
            if own >= max(1, self._suspended_max // TOKENS_SHARE):
                raise AskRefused(ErrorKind.UNAVAILABLE, f"{own} calls of this token wait for answers already")

    def suspend(self, run: Run) -> None:
        """A client is to come back for this run."""
        if self._is_closed:
            raise AskRefused(ErrorKind.SHUTTING_DOWN, "the server is shutting down and asks no more")
        self._check_room(run)
        self.runs[run.id] = run

    def _check_capabilities(self, ctx: Context, run: Run, error: DispatchError) -> None:
        """A function that failed since its client cannot be asked: from 2026-07-28 that is the client's to know."""
        for capability, text in run.refusals.items():
            if is_modern(ctx) and text in error.message:
                data: dict[str, Any] = {"requiredCapabilities": {capability: {}}}
                raise MCPError(types.MISSING_REQUIRED_CLIENT_CAPABILITY, text, data)


def suspended_max_of(capacity: int, slots: int) -> int:
    """For executors that hold so many calls: half of the places are for those that run."""
    return max(1, min(SUSPENDED_MAX, capacity // 2, slots // 2))


def _bad_state(reason: str) -> MCPError:
    return MCPError(
        types.INVALID_PARAMS, f"Invalid or expired requestState: {reason}", {"reason": "invalid_request_state"}
    )


class _Said:
    """What a request's `_meta` says under our prefix. Raises `MCPError` for what is of another type."""

    def __init__(self, meta: Mapping[str, Any]) -> None:
        self.meta = meta

    def text(self, name: str) -> str | None:
        value = self.meta.get(PREFIX + name)
        if value is None or isinstance(value, str):
            return value
        raise self._misfit(name, "a text", value)

    def whole(self, name: str) -> int | None:
        value = self.meta.get(PREFIX + name)
        if value is None or type(value) is int:
            return value
        raise self._misfit(name, "a whole number of milliseconds", value)

    @staticmethod
    def _misfit(name: str, expected: str, value: object) -> MCPError:
        return MCPError(types.INVALID_PARAMS, f"_meta: {PREFIX}{name} must be {expected}, got {type(value).__name__}")
