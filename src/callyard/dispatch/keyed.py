"""Calls with a key: one run for all who bring it. Source: tool-dispatch D16-D19, D42, D43, D55."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable
from typing import Final, Literal

import msgspec

from callyard.clock import Timers
from callyard.dispatch.admission import Admission
from callyard.dispatch.call import Alarm, Call
from callyard.dispatch.config import DispatcherConfig
from callyard.dispatch.flights import Answer, Flight, Seat
from callyard.dispatch.keys import fingerprint
from callyard.dispatch.lines import can_wait
from callyard.dispatch.plan import NEVER, Limit
from callyard.dispatch.refusals import NOBODY_WAITS, conflict, cycle, unavailable
from callyard.dispatch.stores.port import (
    Claimed,
    Conflicting,
    Full,
    Kept,
    KeyEnd,
    KeyScope,
    KeyStore,
    StoreUnavailable,
)
from callyard.errors import KIND_RULES, CallFailure, ErrorKind, Outcome, Retried, fail, may_retry
from callyard.functions.ports import CallOutcome
from callyard.functions.registry import FunctionSpec

_log: Final = logging.getLogger("callyard.dispatch")
_CLOSE_MS_MAX: Final = 1_000
"""How long the stop waits for the store."""
_ABANDONED: Final = Answer(None, NOBODY_WAITS)
_NO_PRINT: Final = ""
"""The fingerprint under a call's own id: of no arguments, so that nobody who takes it for a key joins or gets it."""
_OURS: Final = fail(ErrorKind.INTERNAL, "it failed inside the dispatcher", outcome=Outcome.UNKNOWN)


class KeyedRuns:
    """The runs that belong to keys, and the store that remembers how they ended."""

    def __init__(
        self,
        config: DispatcherConfig,
        clock: Timers,
        store: KeyStore,
        admission: Admission,
        run: Callable[[Call], Awaitable[CallOutcome]],
        on_idle: Callable[[], None],
    ) -> None:
        """`run` brings one call to its end; `on_idle` hears when a run has ended."""
        self.flights: dict[KeyScope, Flight] = {}
        self.lost: set[asyncio.Task[None]] = set()
        """Of runs without a key whose connections are gone: they see to their ends."""
        self.lost_claims = 0
        self.store = store
        self._config = config
        self._clock = clock
        self._admission = admission
        self._run = run
        self._on_idle = on_idle
        self._opening: asyncio.Task[None] | None = None

    async def open_store(self) -> None:
        """Before its first use. Raises `StoreUnavailable`; the next one who asks tries again."""
        if self._opening is None:
            self._opening = asyncio.ensure_future(self.store.open())
        opening = self._opening
        try:
            await asyncio.shield(opening)
        except BaseException:
            if self._opening is opening and opening.done():
                self._opening = None
            raise

    async def close_store(self) -> None:
        """A store that does not end holds nothing up."""
        if self._opening is None:
            return
        closing = asyncio.ensure_future(self.store.close())
        alarm = Alarm(self._clock)
        closing.add_done_callback(alarm.wake)
        until_ms = self._clock.now_ms() + _CLOSE_MS_MAX
        while not closing.done() and self._clock.now_ms() < until_ms:
            await alarm.pause(until_ms)
        if not closing.done():
            closing.cancel()
            _log.warning("the store of idempotency keys did not close within %d ms", _CLOSE_MS_MAX)
        elif (error := closing.exception()) is not None:
            _log.warning("the store of idempotency keys did not close: %s", error)

    async def answer(self, call: Call) -> Answer:
        """Make the run of the call's key, or wait for the one that is under way. Cancelling the caller ends its wait at
        once; what becomes of the run is up to the others who wait for it, and to the tool."""
        scope = KeyScope(call.tenant, call.spec.name, call.key)
        print_of_args = fingerprint(call.checked.raw)
        flight = self.flights.get(scope)
        if flight is not None and (refusal := self._may_join(call, flight, print_of_args)) is not None:
            return Answer(None, refusal)
        call.context = contextvars.copy_context()
        if flight is None:
            flight = self.flights[scope] = Flight(scope, print_of_args)
            flight.task = asyncio.ensure_future(self._fly(flight))
        seat = flight.join(call, self._clock)
        call.on_stop = seat.alarm.wake
        try:
            await self._wait_seated(call, flight, seat)
        except asyncio.CancelledError:
            self._leave(call, flight)
            raise
        if seat.answer is None:  # it gave up before the run ended
            self._leave(call, flight)
            return Answer(None, self._gave_up(call, flight))
        return seat.answer

    def cancel(self, call: Call) -> bool:
        """Somebody asked to stop this call: a run that others wait for is theirs, and its own wait ends at once.

        False: the call itself is to be stopped. Source: tool-dispatch D17, D41, D56.
        """
        flight = self.flights.get(KeyScope(call.tenant, call.spec.name, call.key))
        if flight is None or call not in flight:
            return False
        if len(flight) > 1:
            flight.answer(call, Answer(None, _stopped(ErrorKind.CANCELLED)))
            self._leave(call, flight)
            return True
        if flight.holder is not None and flight.holder is not call:
            flight.holder.stop(ErrorKind.CANCELLED)
        return False

    def disconnect(self, call: Call) -> bool:
        """The caller's connection is gone: as when it was cancelled (D17), but that its own run, where that goes on,
        is its own still. False: it waits for no run."""
        flight = self.flights.get(KeyScope(call.tenant, call.spec.name, call.key))
        if flight is None or call not in flight:
            return False
        holds = flight.holder is call
        if holds and call.tries == 0:
            call.stop(ErrorKind.CANCELLED)  # it had not begun: the next in line takes the claim
        elif holds and _on_abandon(call.spec) == "finish":
            call.silence()
        else:
            flight.answer(call, Answer(None, _stopped(ErrorKind.CANCELLED)))
            self._leave(call, flight)
        return True

    def adopt(self, call: Call) -> None:
        """A run without a key whose connection is gone: its call id stands for one from now on, so that its end is
        kept, and is unknown when this process dies before it. Source: tool-dispatch D56."""
        lost = call.lost = LostRun(asyncio.get_running_loop().create_future())
        lost.keeping = asyncio.ensure_future(self._keep_lost(call, lost.end))
        self.lost.add(lost.keeping)
        lost.keeping.add_done_callback(self._forget_lost)

    async def finish_adopted(self, call: Call, outcome: CallOutcome) -> None:
        """Keep its end."""
        lost = call.lost
        assert lost is not None
        assert lost.keeping is not None
        failure = None if outcome.failure is None else finish(call, outcome.failure)
        if not lost.end.done():
            lost.end.set_result(KeyEnd(call.id, call.plan.attempts, outcome.output, failure))
        await asyncio.wait((lost.keeping,))

    async def _keep_lost(self, call: Call, ending: asyncio.Future[KeyEnd]) -> None:
        scope = KeyScope(call.tenant, call.spec.name, call.id)
        unknown_ttl_ms = self._config.unknown_ttl_ms
        try:
            await self.open_store()
            claim = await self.store.claim(scope, _NO_PRINT, call.id, idempotent=False, unknown_ttl_ms=unknown_ttl_ms)
        except StoreUnavailable as error:
            _log.warning("the end of call %s of %s will not be kept: %s", call.id, call.spec.name, error)
            return
        if not isinstance(claim, Claimed):
            _log.warning(
                "the end of call %s of %s will not be kept: no room, or its id is in use", scope.key, scope.tool
            )
            return
        end = await ending
        is_unknown = end.failure is not None and end.failure.outcome is Outcome.UNKNOWN
        await self._put_end(scope, claim.fence, end, unknown_ttl_ms if is_unknown else self._config.lost_ttl_ms)

    def _forget_lost(self, keeping: asyncio.Task[None]) -> None:
        self.lost.discard(keeping)
        if not keeping.cancelled() and (error := keeping.exception()) is not None:
            _log.error("the end of a call could not be kept", exc_info=error)
        self._on_idle()

    def abort(self) -> None:
        """What still hangs when all should have ended: in a store that does not answer."""
        for keeping in self.lost:
            keeping.cancel()
        for flight in self.flights.values():
            assert flight.task is not None
            flight.task.cancel()

    def _may_join(self, call: Call, flight: Flight, print_of_args: str) -> CallFailure | None:
        if flight.fingerprint != print_of_args:
            return conflict("its arguments are others")
        if flight.holder is not None and flight.holder in call.ancestors():
            return conflict("it belongs to a call that this one is nested in")
        if not can_wait(call, flight):
            return cycle(f"the run under the key {call.key!r}")
        if flight.joiners >= self._config.key_joiners_max:
            return unavailable(f"{flight.joiners} calls wait for the run under that key already")
        return None

    async def _wait_seated(self, call: Call, flight: Flight, seat: Seat) -> None:
        """Until there is an answer, or the caller's own limit; whoever holds the run has its limits there."""
        while seat.answer is None:
            holds = flight.holder is call
            limit_ms = _patience(call, flight).at_ms
            if not holds and (call.stopping is not None or self._clock.now_ms() >= limit_ms):
                return
            if not holds:  # what a run waits for is its own affair
                call.waits_for = flight
                if call.on_begin is not None and not flight.is_claiming:
                    call.begin()
            try:
                await seat.alarm.pause(NEVER if holds else limit_ms)
            finally:
                if call.waits_for is flight:  # else the run is this call's by now
                    call.waits_for = None

    def _gave_up(self, call: Call, flight: Flight) -> CallFailure:
        runs_never = flight.is_abandoned and flight.holder is None and flight.elsewhere is None
        if call.stopping is not None:
            return call.stopped() if runs_never else _stopped(call.stopping)
        limit = _patience(call, flight).name
        kind = ErrorKind.DEADLINE if limit == "deadline_ms" else ErrorKind.TIMEOUT
        if runs_never:
            message = "gave up waiting for the store of idempotency keys: it did not run"
            return fail(kind, message, outcome=Outcome.NOT_RUN, limit=limit)
        message = "gave up waiting for the run under the same key, which goes on"
        return fail(kind, message, outcome=Outcome.UNKNOWN, limit=limit)

    def _leave(self, call: Call, flight: Flight) -> None:
        """A caller waits no more: the run goes on for the others, or ends, or goes on by itself."""
        flight.leave(call)
        holder = flight.holder
        if holder is call and not call.ended:
            self._set_adrift(call)
        if holder is None:
            if flight.is_abandoned and flight.elsewhere is not None:
                flight.elsewhere.cancel()
            return
        if holder.tries == 0:
            if holder is call or flight.is_abandoned:
                holder.stop(ErrorKind.CANCELLED)  # it had not begun: the next in line takes the claim
        elif flight.is_abandoned and _on_abandon(holder.spec) == "cancel":
            holder.stop(ErrorKind.CANCELLED)

    def _set_adrift(self, call: Call) -> None:
        call.adrift = True
        call.silence()
        above = call.caller
        while above is not None:
            above.adrift_below += 1
            above = above.caller

    def _end_adrift(self, call: Call) -> None:
        above = call.caller
        if above is not None:
            above.drop_nested(call)
        while above is not None:
            above.adrift_below -= 1
            if above.holds_on and above.adrift_below == 0:
                above.holds_on = False
                self._admission.give_back(above)
            above = above.caller

    async def _fly(self, flight: Flight) -> None:
        """The task of a key: claim it, run it, keep its end, answer everybody."""
        answer = Answer(None, _OURS)
        try:
            while True:
                claimed = await self._claim(flight)
                answer = claimed if isinstance(claimed, Answer) else await self._run_claimed(flight, claimed.fence)
                if answer is not _ABANDONED or flight.is_abandoned:
                    break  # else somebody came while the claim was given back
        except Exception:  # noqa: BLE001 - a store's or our own: those who wait are answered all the same
            _log.exception("the run of key %r of %s failed inside the dispatcher", flight.scope.key, flight.scope.tool)
        finally:
            del self.flights[flight.scope]
            flight.answer_all(answer)
            self._on_idle()

    async def _claim(self, flight: Flight) -> Claimed | Answer:
        call = flight.oldest()
        if call is None:
            return _ABANDONED
        promises = call.spec.promises
        try:
            await self.open_store()
            while True:
                claim = await self.store.claim(
                    flight.scope,
                    flight.fingerprint,
                    call.id,
                    idempotent=promises.idempotent,
                    unknown_ttl_ms=self._config.unknown_ttl_ms,
                )
                if isinstance(claim, Claimed):
                    return claim
                if isinstance(claim, Kept):
                    return Answer(claim.end)
                if isinstance(claim, Conflicting):
                    return Answer(None, conflict(f"its arguments are others than those of call {claim.call_id}"))
                if isinstance(claim, Full):
                    message = "no room for another idempotency key: none of those that are kept may be forgotten"
                    return Answer(None, unavailable(message, claim.retry_after_ms))
                if not await self._wait_elsewhere(flight, claim.fence):
                    return _ABANDONED
        except StoreUnavailable as error:
            failure = unavailable(f"the store of idempotency keys is out of reach: {error}")
            if flight.elsewhere is not None:  # whoever has the key may be running it
                failure = msgspec.structs.replace(failure, outcome=Outcome.UNKNOWN)
            return Answer(None, failure)

    async def _wait_elsewhere(self, flight: Flight, fence: int) -> bool:
        """Until another holder's claim has ended. False: nobody waits for it here any more."""
        waiting = flight.elsewhere = asyncio.ensure_future(self.store.wait(flight.scope, fence))
        flight.wake_all()
        try:
            await asyncio.wait((waiting,))
        finally:
            waiting.cancel()
        if waiting.cancelled():
            return False
        waiting.result()
        return not flight.is_abandoned

    async def _run_claimed(self, flight: Flight, fence: int) -> Answer:
        """Run for the oldest caller; one that ends without having begun hands the claim on (D43)."""
        while (call := flight.oldest()) is not None:
            flight.begin(call)
            outcome = await self._run_contained(call)
            failure = outcome.failure
            if failure is not None:
                failure = finish(call, failure)
                if _hands_on(call, failure, waits=call in flight):
                    flight.holder = None
                    flight.answer(call, Answer(None, failure))
                    continue
            end = KeyEnd(call.id, call.plan.attempts, outcome.output, failure)
            answer = Answer(end, runner=call)
            try:
                await self._settle(flight, fence, end, safe_again=call.plan.idempotent)
            finally:  # a store that hangs when all is to end takes nobody's answer away
                flight.answer_all(answer)
            return answer
        await self._settle(flight, fence, None)
        return _ABANDONED

    async def _run_contained(self, call: Call) -> CallOutcome:
        try:
            return await self._run(call)
        except Exception:  # noqa: BLE001 - ours: the claim must not stay in flight for ever
            _log.exception("call %s of %s failed inside the dispatcher", call.id, call.spec.name)
            return CallOutcome(None, _OURS)
        finally:
            call.ended = True
            if call.adrift:
                self._end_adrift(call)

    async def _settle(self, flight: Flight, fence: int, end: KeyEnd | None, *, safe_again: bool = False) -> None:
        """Keep an end unless running again is safe (D18)."""
        ttl_ms = self._config.ttl_ms
        failure = None if end is None else end.failure
        if failure is not None:
            if safe_again or failure.outcome is Outcome.NOT_RUN:
                end = None
            elif failure.outcome is Outcome.UNKNOWN:
                ttl_ms = self._config.unknown_ttl_ms
        await self._put_end(flight.scope, fence, end, ttl_ms)

    async def _put_end(self, scope: KeyScope, fence: int, end: KeyEnd | None, ttl_ms: int) -> None:
        kept = False
        try:
            kept = await self.store.settle(scope, fence, end, ttl_ms)
            if not kept:
                _log.warning("the claim of key %r of %s was lost while it ran", scope.key, scope.tool)
        except StoreUnavailable as error:
            _log.warning("the end of key %r of %s was not kept: %s", scope.key, scope.tool, error)
        finally:
            self.lost_claims += not kept


def finish(call: Call, failure: CallFailure) -> CallFailure:
    """What is the dispatcher's to say of a failure: how many attempts had begun, and whether to come again."""
    retryable = _is_retryable(failure, idempotent=call.plan.idempotent)
    if failure.attempts == call.plan.attempts and failure.retryable is retryable:
        return failure
    return msgspec.structs.replace(failure, attempts=call.plan.attempts, retryable=retryable)


def _is_retryable(failure: CallFailure, *, idempotent: bool) -> bool:
    """Whether the caller may make the same call again without harm (D22, D23)."""
    if KIND_RULES[failure.kind].retried is Retried.BY_CALLER:
        return True
    return may_retry(failure.kind, idempotent=idempotent, begun=failure.outcome is not Outcome.NOT_RUN)


def _hands_on(call: Call, failure: CallFailure, *, waits: bool) -> bool:
    """Whether that end is its holder's alone, and the next who waits makes the run anew: it had not begun (D43), or it
    was stopped because nobody waited, and is safe to run again for those who came meanwhile."""
    if failure.outcome is Outcome.NOT_RUN and not call.has_begun:
        return True
    return not waits and call.stopping is ErrorKind.CANCELLED and call.plan.idempotent


def _patience(call: Call, flight: Flight) -> Limit:
    """When a caller waits no more for the run of another, and what says so. Its timeout is that of a run: while the key
    is being claimed there is none yet."""
    limit = Limit(call.plan.deadline_at_ms, "deadline_ms")
    if call.asked_timeout_ms is not None and not flight.is_claiming:
        limit = min(limit, Limit(call.started_ms + call.asked_timeout_ms, "timeout_ms"), key=_instant)
    if call.allowance is not None and call.allowance.ends_at_ms is not None:
        limit = min(limit, Limit(call.allowance.ends_at_ms, "allowance_wall_ms"), key=_instant)
    return limit


def _instant(limit: Limit) -> int:
    return limit.at_ms


def _stopped(kind: ErrorKind) -> CallFailure:
    """Of a caller that is stopped while a run that may be under way is not."""
    message = f"{kind.value} while it waited for the run under the same key"
    return fail(kind, message, outcome=Outcome.UNKNOWN)


def _on_abandon(spec: FunctionSpec) -> Literal["cancel", "finish"]:
    """What becomes of a keyed run that nobody waits for (D17)."""
    return spec.promises.on_abandon or ("cancel" if stops_when_lost(spec) else "finish")


def stops_when_lost(spec: FunctionSpec) -> bool:
    """Whether a run that has begun stops when its connection is gone (D56)."""
    promises = spec.promises
    return promises.idempotent if promises.on_disconnect is None else promises.on_disconnect == "stop"


class LostRun:
    """A run without a key whose connection is gone."""

    __slots__ = ("end", "keeping")

    def __init__(self, end: asyncio.Future[KeyEnd]) -> None:
        self.end = end
        self.keeping: asyncio.Task[None] | None = None
