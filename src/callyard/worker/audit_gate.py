"""The gate that a bundle passes before it is described or sent: once per digest, outside the actor.

A policy runs in a thread of its own (an async one as a task), so the loop goes on whatever it does. No verdict in time
is tried again, the third time in a row it is a refusal. Verdicts are kept by digest and logged before they count.
Source: call-execution X41, X70.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from typing import Final

import msgspec

from callyard.errors import CallFailure, ErrorKind, UsageError, fail
from callyard.functions.audit.log import AuditLog, AuditRecord, now_text
from callyard.functions.audit.policies import BundleView, Policy, audit_id_of
from callyard.functions.audit.verdict import NoVerdict, Verdict, cut_reasons
from callyard.ids import Digest
from callyard.policy.backoff import compute_refusal_delay_ms

TRIES_MAX: Final = 3
STOP_WAIT_S: Final = 5.0
"""How long the end of a policy that heeds `stop` is waited for."""
SHOWN_REASONS: Final = 10


class Admission(msgspec.Struct, frozen=True):
    """What the gate made of a bundle."""

    audit_id: str = ""
    """Empty: there is no policy."""
    refusal: CallFailure | None = None
    """What each of its calls ends with: `denied`, never run. None: it may run."""


class AuditRefused(UsageError):
    """A bundle was refused, so nothing of it can be described or run. `failure` has the policy and its reasons."""

    def __init__(self, failure: CallFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class AuditGate:
    """Asks one policy. With none every bundle passes."""

    def __init__(
        self, policy: Policy | None, log: AuditLog | None, *, timeout_ms: int, base_backoff_ms: int, name: str = ""
    ) -> None:
        """`name`: the target as messages call it."""
        self._policy = policy
        self._log = log
        self._timeout_s = timeout_ms / 1_000
        self._base_backoff_ms = base_backoff_ms
        self._name = name
        self._kept: dict[Digest, Admission] = {}
        self._asking: dict[Digest, asyncio.Task[Admission]] = {}
        """One per digest, however many wait for it."""
        self._closed = False

    async def admit(self, bundle: BundleView) -> Admission:
        """The verdict on a bundle, asked for once. Cancelling one who waits leaves the question alone.

        Raises UsageError when the verdict cannot be logged, or the gate is closed.
        """
        if self._policy is None:
            return Admission()
        kept = self._kept.get(bundle.digest)
        if kept is not None:
            return kept
        asking = self._asking.get(bundle.digest)
        if asking is None:
            self._check_open()
            asking = asyncio.ensure_future(self._decide(self._policy, bundle))
            self._asking[bundle.digest] = asking
            asking.add_done_callback(lambda done: self._finish(bundle.digest, done))
        await asyncio.wait({asking})
        if asking.cancelled():
            raise UsageError("the worker was closed while a bundle was audited")
        return asking.result()

    async def close(self) -> None:
        """Ask nobody any more; what is being asked is stopped, and a command's processes are killed."""
        self._closed = True
        asking = list(self._asking.values())
        for task in asking:
            task.cancel()
        if asking:
            await asyncio.wait(asking)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the worker is closed")

    def _finish(self, digest: Digest, done: asyncio.Task[Admission]) -> None:
        del self._asking[digest]
        if not done.cancelled():
            done.exception()  # looked at here: everybody who waited may have been cancelled

    async def _decide(self, policy: Policy, bundle: BundleView) -> Admission:
        verdict, is_final = await self._ask_until_answered(policy, bundle)
        reasons = cut_reasons(verdict.reasons)
        audit_id = audit_id_of(policy, bundle.digest)
        if self._log is not None:
            record = AuditRecord(
                time=now_text(),
                audit=audit_id,
                digest=bundle.digest,
                target=bundle.target,
                policy=policy.policy_id,
                verdict="accepted" if verdict.accepted else "refused",
                reasons=reasons,
            )
            await asyncio.to_thread(self._log.append, record)
        refusal = None if verdict.accepted else self._refuse(policy, audit_id, reasons)
        admission = Admission(audit_id, refusal)
        if is_final:
            self._kept[bundle.digest] = admission
        return admission

    async def _ask_until_answered(self, policy: Policy, bundle: BundleView) -> tuple[Verdict, bool]:
        """The verdict, and whether the policy itself gave it: silence is asked about anew by a later admission."""
        refusals: list[str] = []
        while True:
            try:
                return await self._ask(policy, bundle), True
            except NoVerdict as error:
                refusals.append(str(error))
            if len(refusals) == TRIES_MAX:
                return Verdict(False, (f"no verdict in {TRIES_MAX} tries: {refusals[-1]}",)), False
            await asyncio.sleep(compute_refusal_delay_ms(len(refusals), self._base_backoff_ms) / 1_000)

    async def _ask(self, policy: Policy, bundle: BundleView) -> Verdict:
        """One try. Raises NoVerdict for everything that is none."""
        stop = threading.Event()
        asked = asyncio.ensure_future(
            _in_task(policy, bundle, stop) if policy.is_async else _in_thread(policy, bundle, stop)
        )
        try:
            in_time, _ = await asyncio.wait({asked}, timeout=self._timeout_s)
        finally:
            stop.set()
            await self._stop(policy, asked)
        if not in_time or asked.cancelled():  # an answer to `stop` is none: it may be half a look
            raise NoVerdict(f"it gave none within audit_timeout_ms={round(self._timeout_s * 1_000)}")
        error = asked.exception()
        if isinstance(error, NoVerdict):
            raise error
        if error is not None:
            raise NoVerdict(f"{type(error).__name__}: {error}") from error
        return asked.result()

    async def _stop(self, policy: Policy, asked: asyncio.Future[Verdict]) -> None:
        """Its time is up, or its answer there. What heeds it has ended when this returns; the rest is left alone."""
        if asked.done():
            return
        if policy.is_async:
            asked.cancel()
            await asyncio.sleep(0)
        elif policy.heeds_stop:
            await asyncio.wait({asked}, timeout=STOP_WAIT_S)
        asked.add_done_callback(_look_at)

    def _refuse(self, policy: Policy, audit_id: str, reasons: tuple[str, ...]) -> CallFailure:
        shown = "".join(f"\n    {reason}" for reason in reasons[:SHOWN_REASONS])
        more = len(reasons) - SHOWN_REASONS
        if more > 0:
            shown += f"\n    and {more} more"
        return fail(
            ErrorKind.DENIED,
            f"{self._name or 'the bundle'} is refused by the audit policy {policy.policy_id!r}:{shown}",
            reason="audit",
            policy=policy.policy_id,
            audit=audit_id,
            reasons=list(reasons),
        )


def _look_at(asked: asyncio.Future[Verdict]) -> None:
    """A late answer interests nobody, and its error is no news."""
    if not asked.cancelled():
        asked.exception()


async def _in_task(policy: Policy, bundle: BundleView, stop: threading.Event) -> Verdict:
    answer = policy.judge(bundle, stop)
    assert isinstance(answer, Awaitable), f"{policy.policy_id} says that it is async"
    return await answer


def _in_thread(policy: Policy, bundle: BundleView, stop: threading.Event) -> asyncio.Future[Verdict]:
    """Ask in a thread of its own: one that never returns costs a daemon thread, not a place in a pool."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Verdict] = loop.create_future()

    def settle(verdict: Verdict | None, error: BaseException | None) -> None:
        if future.done():
            return
        if verdict is not None:
            future.set_result(verdict)
        else:
            future.set_exception(error or NoVerdict("it returned nothing"))

    def ask() -> None:
        verdict: Verdict | None = None
        error: BaseException | None = None
        try:
            answer = policy.judge(bundle, stop)
            if isinstance(answer, Verdict):
                verdict = answer
            else:
                error = NoVerdict(f"expected a Verdict, got {answer!r:.200}")
        except BaseException as raised:  # noqa: BLE001  # the policy's own: no verdict, told where it is asked
            error = NoVerdict(f"{type(raised).__name__}: {raised}") if not isinstance(raised, NoVerdict) else raised
        try:
            loop.call_soon_threadsafe(settle, verdict, error)
        except RuntimeError:
            return  # the loop is closed: nobody waits any more

    threading.Thread(target=ask, name="callyard-audit", daemon=True).start()
    return future
