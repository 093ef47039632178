"""Gates: who may change the state of an owner, or of several that share it. One holder; the others wait in order.

Explicit rather than an `asyncio.Lock`: a turn that yields comes in again at the tail, as a new turn with a new number,
and a continuation with an old number is found out. Pure: who waits is told by a callback. Source: job-queue §2.1,
§11.3.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from callyard.host.context import forbid_in_receive_callback
from callyard.host.errors import HostError, HostErrorKind


class Hold:
    """The token of one turn on one gate."""

    __slots__ = ("gate", "number")

    def __init__(self, gate: Gate, number: int) -> None:
        self.gate = gate
        self.number = number
        """Fencing number: rises with each turn, never used twice by the numbers' giver."""

    @property
    def is_current(self) -> bool:
        return self.gate.holder is self


class GateWaiter:
    __slots__ = ("_gate", "granted")

    def __init__(self, gate: Gate, granted: Callable[[Hold], None]) -> None:
        self._gate = gate
        self.granted = granted

    def cancel(self) -> None:
        """Leave the line; nothing when it was granted already."""
        self._gate.waiters.pop(self, None)


class Gate:
    """`numbers` gives fencing numbers; all gates of a host share it."""

    __slots__ = ("_numbers", "holder", "may_yield", "waiters")

    def __init__(self, numbers: Iterator[int], *, may_yield: bool = True) -> None:
        self.holder: Hold | None = None
        self.waiters: OrderedDict[GateWaiter, None] | dict[GateWaiter, None] = _NOBODY
        self.may_yield = may_yield
        self._numbers = numbers

    def try_enter(self) -> Hold | None:
        """None: it is held. Nobody waits at a free gate, so nobody is overtaken."""
        forbid_in_receive_callback("entering a gate")
        if self.holder is not None:
            return None
        hold = self.holder = Hold(self, next(self._numbers))
        return hold

    def wait(self, granted: Callable[[Hold], None]) -> GateWaiter:
        """At the tail. `granted` is called once, inside the `leave` of the one before."""
        assert self.holder is not None, "waits at a free gate"
        if self.waiters is _NOBODY:
            self.waiters = OrderedDict()
        waiter = GateWaiter(self, granted)
        self.waiters[waiter] = None
        return waiter

    def renew(self, hold: Hold) -> Hold:
        """The next turn of the same holder, where nobody waits."""
        assert not self.waiters, "the gate belongs to who waits"
        self._check(hold)
        new = self.holder = Hold(self, next(self._numbers))
        return new

    def leave(self, hold: Hold) -> None:
        """Out, and in with who has waited longest. Raises `HostError(INVALID_OPERATION)` for a hold that is over."""
        self._check(hold)
        if not self.waiters:
            self.holder = None
            return
        waiter = next(iter(self.waiters))
        del self.waiters[waiter]
        new = self.holder = Hold(self, next(self._numbers))
        waiter.granted(new)

    def _check(self, hold: Hold) -> None:
        if self.holder is not hold:
            now = "nobody" if self.holder is None else f"turn {self.holder.number}"
            raise HostError(HostErrorKind.INVALID_OPERATION, f"turn {hold.number} is over, the gate is held by {now}")


_NOBODY: dict[GateWaiter, None] = {}
"""What most gates have in line: shared, and never written to."""
