"""Contexts: pooled greenlets in which calls run, and the record of a running call.

A greenlet costs about 8 us to make and 0.4 us to switch to and back, so they are made once and reused. Whatever runs in
one is a *job*: a call, or a child task of an `async def` call. A job runs until it switches to the hub with one of the
handovers below; an `async def` job also switches there with each future that it waits for.

The engine's own clean-up always runs in the hub, since an interruption may hit anything in a user's greenlet except the
engine's own frames (`budget.Alarm`). Source: call-execution X52.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]

from callyard.ids import CallId
from callyard.wire.messages import ExecuteCallPayload

if TYPE_CHECKING:
    from callyard.executor.budget import Stop
    from callyard.executor.code import Code
    from callyard.executor.failures import Fault
    from callyard.executor.tasks import Family
    from callyard.executor.threads import ThreadJob
    from callyard.functions.packing import Packed
    from callyard.functions.signature import Invocable


NOTES_MAX: Final = 50
NOTE_CHARACTERS_MAX: Final = 500


class Handover:
    """Why a greenlet switched to the hub. Compared by identity."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


FINISHED: Final = Handover("FINISHED")
SLEEPING: Final = Handover("SLEEPING")
LOOK: Final = Handover("LOOK")
"""The alarm's handler asks the hub to read the link, and to be switched back to."""
SLICE: Final = Handover("SLICE")
"""The same, once a call has run for a slice: the hub goes on with others first, if there are any."""
QUARANTINE: Final = Handover("QUARANTINE")
"""The job swallowed every interruption: it must never be switched to again."""


class Call:
    """One call in this process, from its ExecuteCall to its terminal frame. Times are nanoseconds."""

    __slots__ = (
        "batched",
        "begun",
        "begun_ns",
        "budget_ns",
        "call_id",
        "code",
        "family",
        "fault",
        "fetch",
        "invocable",
        "jobs",
        "notes",
        "output",
        "over",
        "payload",
        "queued_ns",
        "raised_ns",
        "raises",
        "received_ns",
        "run_ns",
        "slice_ns",
        "sliced",
        "slot",
        "stop",
        "threads",
        "wait_ns",
    )

    def __init__(self, call_id: CallId, payload: ExecuteCallPayload, slot: int, received_ns: int) -> None:
        self.call_id = call_id
        self.payload = payload
        self.slot = slot
        self.received_ns = received_ns
        self.budget_ns = payload.call_budget_ms * 1_000_000
        self.begun = False
        self.batched = False
        """It came with others, and its end may leave with theirs."""
        self.over = False
        """Answered: nothing of it may run any more."""
        self.sliced = False
        """It gives way to others after `budget.SLICE_NS` of running."""
        self.slice_ns = 0
        """When its present slice began; 0: it is in none."""
        self.run_ns = 0
        """Running time of its finished slices."""
        self.wait_ns = 0
        """What is charged to it beside its own running: sleep, and what its requests used."""
        self.queued_ns = 0
        """Time in which it could have run, but others did."""
        self.stop: Stop | None = None
        """Why it is being stopped; whatever it does now, this is its end."""
        self.raises = 0
        """Interruptions delivered so far, the last at `raised_ns`."""
        self.raised_ns = 0
        self.fault: Fault | None = None
        self.fetch: Callable[[], bytes | Packed] | None = None
        """Its arguments where the payload has not all of them; None: it has."""
        self.output: bytes = b"null"
        """An encoded value (`wire.values`)."""
        self.notes: list[str] | None = None
        self.threads: list[Any] | None = None
        """Threads that came into being while it ran."""
        self.jobs: list[ThreadJob] | None = None
        """What it handed to `asyncio.to_thread`."""
        self.family: Family | None = None
        """Only a call of an `async def` has one: its tasks."""

    # Set when it begins:
    begun_ns: int
    code: Code
    invocable: Invocable

    def used_ns(self, now: int, busy_ns: int) -> int:
        """Budget used so far: running, sleeping, what requests used; not waiting for a turn. `busy_ns`: the hub's.

        A call with tasks waits in ways that the hub does not see: it is charged for all its time but that in which
        others ran, or in which it only waited while a request was open.
        """
        family = self.family
        if family is not None:
            running_ns = now - self.slice_ns if self.slice_ns else 0
            others_ns = busy_ns - family.busy_before_ns - self.run_ns
            return now - self.begun_ns - others_ns - family.free_ns(now, busy_ns + running_ns) + self.wait_ns
        return self.run_ns + self.wait_ns + (now - self.slice_ns if self.slice_ns else 0)

    @property
    def is_exclusive(self) -> bool:
        """It has begun, and no neighbours but calls of its own."""
        return self.code.is_exclusive(self.payload.entry_selector)

    def note(self, text: str) -> None:
        """Tell something with the call's end; at most `NOTES_MAX` times."""
        if self.notes is None:
            self.notes = []
        if len(self.notes) < NOTES_MAX:
            self.notes.append(text.encode("utf-8", "backslashreplace").decode()[:NOTE_CHARACTERS_MAX])

    def run(self) -> None:
        """Run the user's function, in a context's greenlet: validators before it, encoders after it.

        Leaves `output` or `fault`, and lets nothing out. Errors are described here and not in the hub, since `__str__`
        and `__repr__` are the user's code too, and are to run under the budget.
        """
        RUNNING.set(self)
        payload, invocable, code = self.payload, self.invocable, self.code
        try:
            if self.fetch is None:
                args, kwargs = invocable.bind(payload.args, row=payload.row, strings=payload.strings)
            else:
                args, kwargs = self._bind_fetched(self.fetch)
        except BaseException as error:  # noqa: BLE001 - a contained call: every exception is its failure (X57)
            self.fault = code.describe_misfit(error)
            return
        if payload.check_only:
            return
        try:
            value = invoke(invocable.target, args, kwargs)
            if self.family is not None:
                self.family.coroutine = value
                value = drive(value)
        except BaseException as error:  # noqa: BLE001
            idempotent = payload.promises.idempotent
            self.fault = code.describe(error, function=payload.function_id, idempotent=idempotent)
            return
        try:
            self.output = invocable.encode_as(value, payload.result_form)
        except BaseException as error:  # noqa: BLE001
            self.fault = code.describe_result(error)

    def _bind_fetched(self, fetch: Callable[[], bytes | Packed]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        payload = self.payload
        value = fetch()
        self.fetch = None
        if isinstance(value, bytes):
            return self.invocable.bind(value, row=payload.row, strings=payload.strings)
        return self.invocable.bind_packed(value, row=payload.row)


RUNNING: Final[contextvars.ContextVar[Call]] = contextvars.ContextVar("callyard_running_call")
"""The running call, wherever its code runs: child tasks, callbacks and `to_thread` inherit it."""


def invoke(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the user's function.

    A function of its own, since the alarm tells user code from the engine's by the interrupted frame: a target written
    in C has no frame but this one.
    """
    return target(*args, **kwargs)


def drive(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end inside a greenlet, handing each future it waits for to the hub."""
    to_hub = getcurrent().parent.switch
    send, throw = coroutine.send, coroutine.throw
    error: BaseException | None = None
    while True:
        try:
            waited_for = send(None) if error is None else throw(error)
        except StopIteration as stop:
            return stop.value
        finally:
            error = None
        try:
            to_hub(waited_for)
        except BaseException as thrown:  # noqa: BLE001 - CancelledError and the like, on their way into the coroutine
            error = thrown


class Job(Protocol):
    def run(self) -> None: ...


class Greenlet(Protocol):
    """What we use of an (untyped) greenlet."""

    gr_context: contextvars.Context | None
    gr_frame: Any
    parent: Greenlet | None

    def switch(self, value: object = None) -> object: ...

    def throw(self, error: BaseException) -> object: ...


class Context:
    """One seat: a greenlet and what runs in it."""

    __slots__ = ("at", "call", "greenlet", "job", "looped", "sleep_from_ns", "sleep_number")

    call: Call
    job: Job

    def __init__(self, hub: Greenlet) -> None:
        self.greenlet: Greenlet = greenlet(self._serve, hub)
        self.at = self.greenlet
        """Where to switch to: another greenlet when the user's code made some of its own and suspended in one."""
        self.looped = False
        """It runs a task of the event loop: it waits by handing a future to the hub."""
        self.sleep_from_ns = 0
        self.sleep_number = 0
        """Which entry of the hub's sleepers is its own; 0: none."""

    def _serve(self, job: Job) -> None:
        to_hub = self.greenlet.parent.switch  # type: ignore[union-attr]
        while True:
            job.run()
            job = cast(Job, to_hub(FINISHED))


class Pool:
    """Idle contexts. Bounded: child tasks may need far more contexts for a moment than calls ever do."""

    def __init__(self, hub: Greenlet, idle_max: int) -> None:
        self._hub = hub
        self._idle: list[Context] = []
        self._idle_max = idle_max

    def take(self, call: Call, job: Job, variables: contextvars.Context) -> Context:
        """A context in which `job` will start with the given context variables."""
        context = self._idle.pop() if self._idle else Context(self._hub)
        context.call = call
        context.job = job
        context.greenlet.gr_context = variables
        return context

    def give_back(self, context: Context) -> None:
        """Its job is finished. Above the bound the greenlet is dropped, which ends it."""
        if len(self._idle) < self._idle_max:
            context.greenlet.gr_context = None
            context.at = context.greenlet
            context.looped = False
            del context.call, context.job
            self._idle.append(context)


def this_greenlet() -> Greenlet:
    current: Greenlet = getcurrent()
    return current
