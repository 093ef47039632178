"""Faults to plant in a job queue, each a class that differs from the right one in one place.

Those that projects like this one really had are among them: a lost wake-up, a resume in spite of somebody in line, a
permit that comes back twice or never, a number that starts again. For property tests and simulations.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final

from callyard.host.jobs import JobQueue, JobWaiter, Permit, PermitState, Transition, WaiterState
from callyard.transport.port import FlowState


class LosesWakeups(JobQueue):
    """The permit comes back, and nobody in line hears of it."""

    __slots__ = ()

    def _take_back(self, permit: Permit) -> None:
        line, self._line = self._line, type(self._line)()
        super()._take_back(permit)
        self._line = line


class ServesTheNewestFirst(JobQueue):
    __slots__ = ()

    def _take_back(self, permit: Permit) -> None:
        if self._line:
            self._line.move_to_end(next(reversed(self._line)), last=False)
        super()._take_back(permit)


class LetsNewcomersIn(JobQueue):
    """What comes back is free for whoever asks first; those in line look only later."""

    __slots__ = ()

    def try_acquire(self) -> Permit | None:
        return self._reserve() if self._line else super().try_acquire()


class ResumesBeforeHandingOver(JobQueue):
    """Pressure is looked at before the oldest waiter has the permit."""

    __slots__ = ()

    def _take_back(self, permit: Permit) -> None:
        if self._line and self.in_use - 1 <= self.resume_permits and self.transition.state is FlowState.PAUSED:
            self._turn_to(FlowState.RUNNING)
        super()._take_back(permit)


class ForgetsAGrantThatIsCancelled(JobQueue):
    """Granted, cancelled before it was told: the permit stays out for ever."""

    __slots__ = ()

    def _cancel(self, waiter: JobWaiter) -> bool:
        if waiter.state is WaiterState.GRANTED:
            del self._granted[waiter.key]
            waiter.state = WaiterState.CANCELLED
            return True
        return super()._cancel(waiter)


class TellsWhoWasCancelled(JobQueue):
    """Cancelled, and handed a permit all the same."""

    __slots__ = ()

    def _cancel(self, waiter: JobWaiter) -> bool:
        return waiter.state is WaiterState.WAITING or super()._cancel(waiter)


class TakesPermitsBackTwice(JobQueue):
    __slots__ = ()

    def _take_back(self, permit: Permit) -> None:
        super()._take_back(permit)
        permit.state = PermitState.RESERVED


class CountsAQueuedPermitAsReserved(JobQueue):
    """At the release, the wrong column goes down."""

    __slots__ = ()

    def _take_back(self, permit: Permit) -> None:
        permit.state = PermitState.RESERVED
        super()._take_back(permit)


class HasNoGap(JobQueue):
    """Goes back to RUNNING as soon as it is below the pause threshold."""

    __slots__ = ()

    def _take_back(self, permit: Permit) -> None:
        kept, self.resume_permits = self.resume_permits, self.pause_permits - 1
        super()._take_back(permit)
        self.resume_permits = kept


class RepeatsTheState(JobQueue):
    __slots__ = ()

    def _reserve(self) -> Permit:
        permit = super()._reserve()
        if self.in_use > self.pause_permits:
            self._turn_to(FlowState.PAUSED)
        return permit


class NumbersFromOneAfterAReset(JobQueue):
    """Then a target takes the next transition for one that it has seen."""

    __slots__ = ()

    def reset_metrics(self) -> None:
        super().reset_metrics()
        self.transition = Transition(0, self.transition.state)


class ForgetsThePauseAtAReset(JobQueue):
    __slots__ = ()

    def reset_metrics(self) -> None:
        super().reset_metrics()
        if self._paused_at_ms is not None:
            self._paused_at_ms = self._clock.now_ms()


class CountsOldWaitsAfterAReset(JobQueue):
    __slots__ = ()

    def _count_wait(self, waiter: JobWaiter) -> None:
        waiter._epoch = self._epoch
        super()._count_wait(waiter)


class LeavesItsLineAtTheClose(JobQueue):
    __slots__ = ()

    def close(self) -> None:
        self.is_closed = True


class GivesASourceTwoPlaces(JobQueue):
    """A second signal of a source that waits is a second wait."""

    __slots__ = ()

    def wait(
        self, key: Hashable, granted: Callable[[Permit], None], *, closed: Callable[[], None] | None = None
    ) -> JobWaiter:
        return super().wait((key, object()) if self.is_in_line(key) else key, granted, closed=closed)


FAULTS: Final = (
    LosesWakeups,
    ServesTheNewestFirst,
    LetsNewcomersIn,
    ResumesBeforeHandingOver,
    ForgetsAGrantThatIsCancelled,
    TellsWhoWasCancelled,
    TakesPermitsBackTwice,
    CountsAQueuedPermitAsReserved,
    HasNoGap,
    RepeatsTheState,
    NumbersFromOneAfterAReset,
    ForgetsThePauseAtAReset,
    CountsOldWaitsAfterAReset,
    LeavesItsLineAtTheClose,
    GivesASourceTwoPlaces,
)
