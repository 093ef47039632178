"""Budgets and interruption: one-shot SIGALRM, raised into user code where it stands (X53, X54).

The timer is armed for the earliest end of what runs, and re-armed at a switch only when that end is earlier; nothing
disarms it, so a burst of calls with equal budgets costs one `setitimer` per budget and a handler run that finds nothing
over. The handler acts only on *user frames*: in the hub, or in a frame of this package, it comes again a millisecond
later. So the engine is never interrupted half-way, and needs no lock against its own signal handler.

A call of a function with the promise `preempt` gives way after a slice of 20 ms: the handler switches to the hub in the
middle of the user's frame, which goes on when its turn comes. Never inside an import, whose half-made module the next
call would find, and never in a `__del__` (X61).

An interruption that user code swallows is raised again every 10 ms; after the third the handler switches to the hub in
the middle of the user's frame, which is then never resumed (quarantine).
"""

from __future__ import annotations

import os
import signal
from time import monotonic_ns
from types import FrameType
from typing import TYPE_CHECKING, Final

import msgspec

from callyard.errors import ErrorKind
from callyard.executor import nested_loops
from callyard.executor.contexts import LOOK, QUARANTINE, SLICE, Context, Greenlet, invoke, this_greenlet
from callyard.executor.guards import KeptOpen

if TYPE_CHECKING:
    from callyard.executor.hub import Hub

NEVER: Final = 1 << 62
RAISES_MAX: Final = 3
"""Interruptions that user code may swallow before it is quarantined."""
RAISE_AGAIN_NS: Final = 10_000_000
SLICE_NS: Final = 20_000_000
IMPORT_FILES: Final = frozenset({"<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>"})
ENGINE_AGAIN_NS: Final = 1_000_000
ENGINE_FILES: Final = os.path.dirname(os.path.dirname(invoke.__code__.co_filename)) + os.sep
"""Code below this folder is never interrupted, and never shown in a stack."""
_OPEN_TO_INTERRUPTION: Final = frozenset({invoke.__code__, KeptOpen.write.__code__})
"""The engine's own frames that may be the innermost of user code: a target written in C, and endless printing."""
TELLING_FILES: Final = ("traceback.py", "linecache.py", "tokenize.py")
"""Modules of the standard library that describe a failure in the user's greenlet: not interrupted either."""


class CallInterrupted(BaseException):
    """Raised into user code to end its call; no `except Exception` catches it."""


class BudgetExceeded(CallInterrupted):
    """The call used up its budget."""


class CallCancelled(CallInterrupted):
    """The worker cancelled the call."""


class Stop(msgspec.Struct, frozen=True):
    """Why a call is stopped, and how its end is told."""

    error: type[CallInterrupted]
    begun_kind: ErrorKind
    """The kind when it had begun; the outcome is then unknown."""
    waiting_kind: ErrorKind
    """The kind when it had not."""
    limit: str = ""
    """`details.limit` of an overrun (X89)."""
    reason: str = ""
    """`details.reason` of a cancellation."""
    text: str = ""


BUDGET: Final = Stop(BudgetExceeded, ErrorKind.TIMEOUT, ErrorKind.TIMEOUT, limit="budget_ms", text="budget used up")
DEADLINE: Final = Stop(
    CallCancelled, ErrorKind.TIMEOUT, ErrorKind.DEADLINE, limit="deadline_ms", text="its deadline passed"
)
CANCELLED: Final = Stop(CallCancelled, ErrorKind.CANCELLED, ErrorKind.CANCELLED, reason="cancelled", text="cancelled")
SHUTTING_DOWN: Final = Stop(
    CallCancelled,
    ErrorKind.CANCELLED,
    ErrorKind.CANCELLED,
    reason="shutting_down",
    text="cancelled: shutting down",
)


class Alarm:
    """The timer and its handler."""

    def __init__(self, hub: Hub) -> None:
        self.armed_ns = NEVER
        """When the timer fires; `NEVER`: it is not armed."""
        self.slice_end_ns = NEVER
        """When the running call has had its slice, if it is `sliced`."""
        self.look_wanted = False
        """The watch thread saw a cancellation to be read while user code runs."""
        library = os.path.dirname(os.__file__)
        self.engine_files: tuple[str, ...] = (ENGINE_FILES, *(os.path.join(library, one) for one in TELLING_FILES))
        self._hub = hub
        self.install()

    def install(self) -> None:
        """Take SIGALRM (back), and forget what was armed: user code may have changed both.

        Unblocked, too: a mask is also inherited, from a host thread that blocks signals as threads often do.
        """
        _set_handler(signal.SIGALRM, self._on_alarm)
        _set_mask(signal.SIG_UNBLOCK, (signal.SIGALRM,))
        self.disarm()

    def arm(self, at_ns: int) -> None:
        self.armed_ns = at_ns
        _set_timer(signal.ITIMER_REAL, max(at_ns - monotonic_ns(), 50_000) / 1e9)

    def arm_slice(self, now: int) -> None:
        """The running call may run for a slice from now on."""
        self.slice_end_ns = now + SLICE_NS
        if self.slice_end_ns < self.armed_ns:
            self.arm(self.slice_end_ns)

    def disarm(self) -> None:
        self.armed_ns = NEVER
        _set_timer(signal.ITIMER_REAL, 0)

    def _on_alarm(self, signum: int, frame: FrameType | None) -> None:
        """Only this may raise into, or switch away from, code that did not ask for it."""
        hub = self._hub
        self.armed_ns = NEVER
        context = hub.running
        current = this_greenlet()
        if context is None:
            hub.interrupt_callback(frame)
            return
        if current is hub.greenlet or self.is_engine(frame):
            self.arm(monotonic_ns() + ENGINE_AGAIN_NS)
            return
        call = context.call
        if self.look_wanted:
            self.look_wanted = False
            context.at = current
            hub.greenlet.switch(LOOK)
            context.at = context.greenlet
        now = monotonic_ns()
        left_ns = call.budget_ns - call.used_ns(now, hub.busy_ns) if call.budget_ns else NEVER
        if call.stop is None and left_ns <= 0:
            call.stop = BUDGET
        if call.stop is None:
            if not call.sliced:
                if call.budget_ns:
                    self.arm(now + left_ns)
            elif now < self.slice_end_ns or not may_give_way(frame):
                self.slice_end_ns = max(self.slice_end_ns, now + ENGINE_AGAIN_NS)
                self.arm(min(now + left_ns, self.slice_end_ns))
            else:
                self._give_way(context, current)
            return
        if now < call.raised_ns + RAISE_AGAIN_NS:
            self.arm(call.raised_ns + RAISE_AGAIN_NS)
            return
        if call.raises >= RAISES_MAX:
            context.at = current
            hub.greenlet.switch(QUARANTINE)
        call.raises += 1
        call.raised_ns = now
        self.arm(now + RAISE_AGAIN_NS)
        raise call.stop.error(call.stop.text)

    def _give_way(self, context: Context, current: Greenlet) -> None:
        """The hub arms the timer again, for whoever goes on."""
        aside = None if context.looped else nested_loops.set_aside()
        context.at = current
        try:
            self._hub.greenlet.switch(SLICE)
        finally:
            context.at = context.greenlet
            nested_loops.put_back(aside)

    def is_engine(self, frame: FrameType | None) -> bool:
        if frame is None:
            return False
        code = frame.f_code
        return code.co_filename.startswith(self.engine_files) and code not in _OPEN_TO_INTERRUPTION


def may_give_way(frame: FrameType | None) -> bool:
    """Whether others may run while this frame stands still."""
    while frame is not None:
        code = frame.f_code
        if code.co_filename in IMPORT_FILES or code.co_name == "__del__":
            return False
        frame = frame.f_back
    return True


_set_handler: Final = signal.signal
_set_timer: Final = signal.setitimer
_set_mask: Final = signal.pthread_sigmask
