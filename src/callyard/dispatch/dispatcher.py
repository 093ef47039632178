"""`Dispatcher`: the layer between an agent's loop and its tools.

    registry = Registry()

    @registry.tool(idempotent=True, timeout_ms=2_000)
    async def search(query: str) -> list[str]: ...

    async with Dispatcher(registry) as dispatcher:
        done = await dispatcher.dispatch("search", {"query": "ferries"})
        print(done.value if done.ok else done.error.kind)

The steps of a call stand in `Dispatcher.dispatch`, `Attempts.run` and `Admission.enter`, in their order (D8).
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from pathlib import Path
from random import Random
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from callyard.clock import Timers
from callyard.dispatch.admission import Admission
from callyard.dispatch.allowance import Allowance
from callyard.dispatch.attempts import Attempts
from callyard.dispatch.breakers import Breakers
from callyard.dispatch.call import Call, ProgressCallback
from callyard.dispatch.caller_side import CallerSide, check_side
from callyard.dispatch.config import DispatcherConfig
from callyard.dispatch.dispatching import Dispatching
from callyard.dispatch.events import Subscriber
from callyard.dispatch.fan_out import ToolCall, gather_bounded
from callyard.dispatch.flights import Answer
from callyard.dispatch.handlers import Handlers, Straggler
from callyard.dispatch.keyed import KeyedRuns, finish, stops_when_lost
from callyard.dispatch.keys import check_key
from callyard.dispatch.options import NAMES_MAX, check_name, check_options, check_texts, one_key
from callyard.dispatch.outcomes import DispatchError, DispatchResult, Ok
from callyard.dispatch.plan import NEVER, AttemptPlan
from callyard.dispatch.policies import Policy, ask_policy
from callyard.dispatch.rates import Rates
from callyard.dispatch.refusals import SHUTTING_DOWN, deadline_passed, unavailable
from callyard.dispatch.running import current_call
from callyard.dispatch.stores import open_key_store
from callyard.dispatch.stores.memory import MemoryKeyStore
from callyard.dispatch.stores.port import KeyEnd, KeyScope, KeyStore, SharedRates
from callyard.dispatch.telling import Teller
from callyard.errors import CallFailure, ErrorKind, Outcome, UsageError, fail
from callyard.functions.encoding import ResultMisfit, encode_value
from callyard.functions.misfits import ArgumentsMisfit
from callyard.functions.misfits import misfit as to_misfit
from callyard.functions.ports import CallOutcome, CallRunner, HasRunner
from callyard.functions.raised import clean_text, cut_text, name_of
from callyard.functions.registry import FunctionSpec, Registry
from callyard.ids import CallId, Owner, Tenant
from callyard.policy.breaker import BreakerState
from callyard.timers import LoopTimers

if TYPE_CHECKING:
    from typing import Unpack

_log: Final = logging.getLogger("callyard.dispatch")


class DispatcherStatistics(msgspec.Struct, frozen=True):
    """A snapshot."""

    calls: int
    """Under way, nested ones included."""
    running: int
    """Holders of a slot."""
    queued: int
    flights: int
    owners: int
    stragglers: tuple[Straggler, ...]
    stragglers_total: int
    subscriber_failures: int
    lost_claims: int
    """Ends that a store did not take: the claim was lost, or the store was out of reach."""


class Dispatcher(Dispatching):
    """Dispatches calls to the tools of a registry. Use it as an async context manager, from one event loop.

    `worker` runs the functions that were described and not imported; without it every tool needs a handler in this
    process. `store` keeps idempotency keys: "memory", the path of a SQLite file, a redis:// URL, or a store of yours.
    `policy` may deny calls. Each setting of `DispatcherConfig` may be given by name. `clock` and `rng` are for tests
    and simulations.

    Raises UsageError for a setting out of range, and for a registry of described functions without a worker.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        worker: HasRunner | None = None,
        store: KeyStore | str | Path = "memory",
        policy: Policy | None = None,
        config: DispatcherConfig | None = None,
        clock: Timers | None = None,
        rng: Random | None = None,
        **settings: Any,
    ) -> None:
        self.registry = registry
        self.config = config = (config or DispatcherConfig()).with_settings(**settings)
        runner: CallRunner | None = None if worker is None else worker.runner
        _check_reachable(registry, runner)
        self._clock = clock = clock or LoopTimers()
        self._rng = rng or Random()
        self._policy = policy
        self._teller = Teller(clock)
        self._breakers = Breakers(config.breaker, clock, self._teller, config.timeout_ms)
        slots = config.slots if runner is None else max(1, min(config.slots, runner.capacity))
        keys = open_key_store(store)
        if keys is None:  # an empty one is false
            keys = MemoryKeyStore(now_ms=clock.now_ms)
        self.rates = Rates(clock, keys if isinstance(keys, SharedRates) else None, lambda: self._keyed.open_store())
        self._admission = Admission(config, slots, clock, self._breakers, self.rates)
        self._handlers = Handlers(clock, runner, config.cancel_grace_ms, self._let_go, self._teller)
        self._attempts = Attempts(clock, self._admission, self._breakers, self._handlers, self._teller)
        self._keyed = KeyedRuns(config, clock, keys, self._admission, self._attempts.run, self._on_idle)
        self._calls: dict[CallId, Call] = {}
        self.id_prefix = f"{self._rng.getrandbits(40):010x}-"
        self.next_id = (CallId(f"{self.id_prefix}{number}") for number in count(1)).__next__
        """A name of our own for a call."""
        self._sealed = False
        self._idle = asyncio.Event()
        """Set when a call or a key's run was the last one under way."""
        self._gates: list[Callable[[], bool]] = []

    # --- life -----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Dispatcher:
        await self._keyed.open_store()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(drain_deadline_ms=0 if error is not None else None)

    async def close(self, *, drain_deadline_ms: int | None = None) -> None:
        """Take no new calls, let those under way end within `drain_deadline_ms` (default: the setting), then stop them.

        No retry starts meanwhile. Idempotent. Source: tool-dispatch D46.
        """
        self._sealed = True
        self._attempts.seal()
        for call in self._calls.values():
            call.wake()  # those that wait for a retry wait no more
        drain_ms = self.config.drain_deadline_ms if drain_deadline_ms is None else drain_deadline_ms
        await self._wait_idle(self._clock.now_ms() + drain_ms)
        for call in list(self._calls.values()):
            call.stop(ErrorKind.SHUTTING_DOWN)
        for flight in list(self._keyed.flights.values()):  # runs that go on although nobody waits
            if flight.holder is not None:
                flight.holder.stop(ErrorKind.SHUTTING_DOWN)
        await self._wait_idle(self._clock.now_ms() + 2 * self.config.cancel_grace_ms)
        self._keyed.abort()
        await self._wait_idle(self._clock.now_ms() + self.config.cancel_grace_ms)
        self._handlers.close()
        await self._keyed.close_store()

    async def _wait_idle(self, until_ms: int) -> None:
        while not self._is_idle and self._clock.now_ms() < until_ms:
            self._idle.clear()
            timer = self._clock.call_at(until_ms, self._idle.set)
            try:
                await self._idle.wait()
            finally:
                timer.cancel()

    @property
    def _is_idle(self) -> bool:
        return not (self._calls or self._keyed.flights or self._keyed.lost or self._admission.lingering)

    def _on_idle(self) -> None:
        if self._is_idle:
            self._idle.set()

    # --- calls ----------------------------------------------------------------------------------------------------

    def _dispatcher(self) -> Dispatcher:
        return self

    async def dispatch_named(
        self,
        name: str,
        args: Mapping[str, Any] | bytes | None = None,
        *,
        timeout_ms: int | None = None,
        idempotency_key: str | None = None,
        key: str | None = None,
        allowance: Allowance | None = None,
        owner: str | None = None,
        deadline_ms: int | None = None,
        tenant: str = "default",
        repair: bool = False,
        tags: Mapping[str, str] | None = None,
        trace: Mapping[str, str] | None = None,
        call_id: str | None = None,
        on_progress: ProgressCallback | None = None,
        **side: Unpack[CallerSide],
    ) -> DispatchResult:
        """`dispatch` by name."""
        parent = current_call()
        if parent is not None:
            tenant = parent.tenant  # that of the call it belongs to, whatever the handler says (D14, D44)
            if parent.ended:
                parent = None  # in a task that a handler left behind
        key = one_key(idempotency_key, key) if idempotency_key is not None or key is not None else ""
        is_limited = timeout_ms is not None or deadline_ms is not None or allowance is not None
        if is_limited or owner is not None or tenant != "default":
            check_options(timeout_ms, deadline_ms, allowance, owner, tenant)
        tags = None if tags is None else check_texts("tags", tags)
        trace = None if trace is None else check_texts("trace", trace)
        told = check_side(**side) if side else None
        named = self.next_id() if call_id is None else self._check_id(call_id)
        spec = self._find(name, parent)
        if type(spec) is CallFailure:
            tool = _show_name(name)
            self._teller.rejected(named, tool, Tenant(tenant), Owner(owner or ""), parent, spec)
            return DispatchError(named, spec)
        call = self._open_call(named, spec, parent, timeout_ms, deadline_ms, allowance)
        if tenant != call.tenant:
            call.tenant = Tenant(tenant)
        if owner is not None:
            call.owner = Owner(owner)
        call.key = key
        if on_progress is not None:
            call.on_progress = on_progress
        if told is not None:
            told.give_to(call, self.config.ask_timeout_ms)
        if tags is not None:
            call.tags = tags
        if trace is not None:
            call.trace = trace
        try:
            refusal = self._check(call, args, repair=repair)
            if refusal is None and self._policy is not None:
                refusal = await self._ask_policy(call, self._policy)
            if refusal is not None:
                return self._conclude(call, CallOutcome(None, refusal))
            if call.key:
                return self._conclude_by(call, await self._keyed.answer(call))
            outcome = await self._attempts.run(call)
            if call.lost is not None:
                await self._keyed.finish_adopted(call, outcome)
            return self._conclude(call, outcome)
        except asyncio.CancelledError:
            begun = Outcome.UNKNOWN if call.tries > 0 else Outcome.NOT_RUN
            failure = fail(ErrorKind.CANCELLED, "its caller was cancelled", outcome=begun)
            if call.lost is not None and not call.lost.end.done():
                call.lost.end.set_result(KeyEnd(call.id, call.plan.attempts, failure=failure))
            self._teller.end(call, failure, call.plan.attempts)
            raise
        finally:
            self._close_call(call)

    def cancel(self, call_id: CallId) -> bool:
        """Stop a call that waits or runs: its answer is `cancelled`, once its code has ended. False: it has ended."""
        call = self._calls.get(call_id)
        if call is None:
            return False
        if not (call.key and self._keyed.cancel(call)):
            call.stop(ErrorKind.CANCELLED)
        return True

    def disconnect(self, call_id: CallId) -> bool:
        """The connection that a call came by is gone, and nothing more is told or asked. False: it has ended.

        A call stops that has not begun, or whose tool is promised to be idempotent; another runs on to its own limits,
        and its end is kept, under its key, or under its call id (`find_end`). A tool's `on_disconnect` may say the
        other. A run that others wait for is theirs. Source: tool-dispatch D56.
        """
        call = self._calls.get(call_id)
        if call is None:
            return False
        if call.lost is not None or (call.key and self._keyed.disconnect(call)):
            return True
        if call.key or call.tries == 0 or stops_when_lost(call.spec):
            call.stop(ErrorKind.CANCELLED)
        else:
            call.silence()
            self._keyed.adopt(call)
        return True

    async def find_end(self, tenant: str, tool: str, key: str) -> DispatchResult | None:
        """How the last call under that key ended, as long as that is kept; of a call without a key whose connection was
        lost, the key is its call id. Raises StoreUnavailable."""
        await self._keyed.open_store()
        end = await self._keyed.store.find(KeyScope(Tenant(tenant), tool, check_key(key)))
        if end is None:
            return None
        if end.failure is not None:
            return DispatchError(end.call_id, end.failure, deduplicated=True)
        assert end.output is not None
        return Ok(end.call_id, end.output, end.attempts, deduplicated=True)

    async def resolve(self, tenant: str, tool: str, key: str, result: Any = None, *, retry: bool = False) -> bool:
        """Say how a call of unknown outcome ended: `result` answers its key from now on; with `retry` the key is free.

        False: nothing unknown is kept under that key. Raises UsageError for a result that JSON cannot hold.
        Source: tool-dispatch D19.
        """
        scope = KeyScope(Tenant(tenant), tool, check_key(key))
        await self._keyed.open_store()
        try:
            end = None if retry else KeyEnd(self.next_id(), 0, encode_value(result))
        except ResultMisfit as misfit:
            raise UsageError(f"a result that JSON can hold: {misfit}") from misfit
        return await self._keyed.store.resolve(scope, end, self.config.ttl_ms)

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Hear every event from now on; returns what ends it. A `Tracing` one also has its spans current in handlers.

        See `callyard.dispatch.events`.
        """
        return self._teller.subscribe(subscriber)

    def require(self, admits: Callable[[], bool]) -> None:
        """Admit calls only while `admits()` is true: an audit file that must be written, say (D54)."""
        self._gates.append(admits)

    def breaker_state(self, tool: str, tenant: str | None = None) -> BreakerState:
        """A tenant's; None: of all tenants' the one that lets the least through."""
        return self._breakers.state(tool, None if tenant is None else Tenant(tenant))

    def statistics(self) -> DispatcherStatistics:
        return DispatcherStatistics(
            calls=len(self._calls),
            running=len(self._admission.slots.holders),
            queued=self._admission.queued,
            flights=len(self._keyed.flights),
            owners=len(self._admission.turns),
            stragglers=tuple(self._handlers.stragglers),
            stragglers_total=self._handlers.stragglers_total,
            subscriber_failures=self._teller.hub.subscriber_failures,
            lost_claims=self._keyed.lost_claims,
        )

    async def gather_bounded(
        self, calls: Iterable[ToolCall], *, limit: int = 8, fail_fast: bool = False
    ) -> list[DispatchResult]:
        """Dispatch many, at most `limit` at once, and return their results in order. A failure leaves the others alone.

        With `fail_fast` the first failure stops the rest: what runs ends `cancelled`, what had not begun never does,
        and nothing is left running. Cancelling the caller ends all. Source: tool-dispatch D27.
        """
        return await gather_bounded(self, calls, limit=limit, fail_fast=fail_fast)

    # --- a call's steps -------------------------------------------------------------------------------------------

    def _find(self, name: object, parent: Call | None) -> FunctionSpec | CallFailure:
        if self._sealed and parent is None:
            return SHUTTING_DOWN
        if not isinstance(name, str) or len(name) > NAMES_MAX:
            message = f"expected a name of at most {NAMES_MAX} characters, got {cut_text(repr(name), 60)}"
            return fail(ErrorKind.NOT_FOUND, message)
        try:
            return self.registry.get(name)
        except UsageError as error:
            return fail(ErrorKind.NOT_FOUND, str(error), tool=name)

    def _check_id(self, call_id: str) -> CallId:
        check_name("call_id", call_id)
        if call_id in self._calls:
            raise UsageError(f"a call {call_id!r} is under way: give each its own call_id")
        return CallId(call_id)

    def _open_call(
        self,
        call_id: CallId,
        spec: FunctionSpec,
        parent: Call | None,
        timeout_ms: int | None,
        deadline_ms: int | None,
        allowance: Allowance | None,
    ) -> Call:
        config, promises = self.config, spec.promises
        call = Call(call_id, spec, self._clock, parent)
        deadline_at_ms = NEVER if deadline_ms is None else call.started_ms + deadline_ms
        call.allowance = allowance
        if parent is not None:
            call.trace = parent.trace
            call.client = parent.client
            call.claims, call.headers, call.meta = parent.claims, parent.headers, parent.meta
            call.allowance = allowance or parent.allowance
            deadline_at_ms = min(deadline_at_ms, parent.plan.deadline_at_ms)
            parent.add_nested(call)
        if timeout_ms is not None:
            call.asked_timeout_ms = timeout_ms
        call.plan = AttemptPlan(
            promises.retry or config.retry,
            self._rng,
            promises.idempotent,
            timeout_ms or promises.timeout_ms or config.timeout_ms,
            config.attempt_min_ms,
            deadline_at_ms,
        )
        self._calls[call_id] = call
        return call

    def _close_call(self, call: Call) -> None:
        del self._calls[call.id]
        if call.ended or not call.adrift:  # else its run says when
            call.ended = True
            if call.parent is not None:
                call.parent.drop_nested(call)
        if self._sealed:
            self._on_idle()

    def _check(self, call: Call, args: Mapping[str, Any] | bytes | None, *, repair: bool) -> CallFailure | None:
        """The arguments; the start is told with them."""
        try:
            if type(args) is not dict:
                args = {} if args is None else _plain(args)
            call.checked = call.spec.checker.check(args, repair=repair)
        except ArgumentsMisfit as misfit:
            self._teller.start(call, b"")
            return fail(ErrorKind.SCHEMA, misfit.message, **misfit.details)
        self._teller.start(call, call.checked.raw)
        if self._gates and not self._admits():
            return unavailable("calls are not admitted: what must record them cannot")
        return None

    def _admits(self) -> bool:
        try:
            return all(admits() for admits in self._gates)
        except Exception:  # noqa: BLE001 - logged, and it admits nothing
            _log.exception("what must say whether calls are admitted failed: they are not")
            return False

    async def _ask_policy(self, call: Call, policy: Policy) -> CallFailure | None:
        asking = asyncio.ensure_future(ask_policy(policy, call.tenant, call.spec.name, call.checked.value))
        asking.add_done_callback(call.wake)
        try:
            while not asking.done():
                now_ms = self._clock.now_ms()
                if call.stopping is not None:
                    return call.stopped()
                if now_ms >= call.plan.deadline_at_ms:
                    return deadline_passed()
                await call.pause(call.plan.deadline_at_ms)
        finally:
            asking.cancel()
        return asking.result()

    def _let_go(self, call: Call) -> None:
        """The code of a call whose caller has gone has ended, or is a straggler."""
        self._admission.give_back(call)
        if self._sealed:
            self._on_idle()

    # --- ends -----------------------------------------------------------------------------------------------------

    def _conclude(self, call: Call, outcome: CallOutcome) -> DispatchResult:
        attempts = call.plan.attempts
        if outcome.failure is None:
            assert outcome.output is not None
            self._teller.end(call, None, attempts)
            return Ok(call.id, outcome.output, attempts, False, call.enforced, call.checked.repairs)
        failure = finish(call, outcome.failure)
        self._teller.end(call, failure, attempts)
        return DispatchError(call.id, failure, enforced=call.enforced, repairs=call.checked.repairs)

    def _conclude_by(self, call: Call, answer: Answer) -> DispatchResult:
        """By the end of a key's run, the call's own or another's."""
        end = answer.end
        if end is None:
            return self._conclude(call, CallOutcome(None, answer.refusal))
        deduplicated = answer.runner is not call
        self._teller.end(call, end.failure, end.attempts, deduplicated=deduplicated)
        repairs = call.checked.repairs
        enforced = call.enforced if answer.runner is None else answer.runner.enforced
        if end.failure is None:
            assert end.output is not None
            return Ok(end.call_id, end.output, end.attempts, deduplicated, enforced, repairs)
        failure = end.failure
        if deduplicated:  # what one caller does to its details no other caller sees (D20)
            failure = msgspec.structs.replace(failure, details=copy.deepcopy(dict(failure.details)))
        return DispatchError(end.call_id, failure, deduplicated, enforced, repairs)


def _plain(args: Mapping[str, Any] | bytes) -> Mapping[str, Any] | bytes:
    """A mapping of a caller's own class as a dict: reading it may run code that raises. Raises `ArgumentsMisfit`."""
    if not isinstance(args, Mapping):
        return args
    try:
        return dict(args)
    except Exception as error:
        raise to_misfit(f"reading the arguments raised {name_of(error)}", "type", expected="an object") from error


def _show_name(name: object) -> str:
    """Of a tool that nobody knows: whatever a model made up."""
    return cut_text(clean_text(name if isinstance(name, str) else repr(name)), NAMES_MAX)


def _check_reachable(registry: Registry, runner: CallRunner | None) -> None:
    """Source: tool-dispatch D50."""
    if runner is not None:
        return
    described = [spec.name for spec in registry if spec.handler is None]
    if described or (registry.has_bundle and not registry.is_described):
        what = f"{described[0]!r}" if described else "the functions of this registry"
        raise UsageError(
            f"{what} can run in an executor only: the file was described and not imported. Give the dispatcher a "
            "worker (Dispatcher(registry, worker=worker)), or import the functions into this process "
            "(Registry.from_module(module))"
        )
