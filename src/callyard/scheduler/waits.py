"""Who waits for whom, followed to the end: whether a wait that is about to begin can ever be over.

A call waits for all its subcalls; a call that shares another's run waits for its leader; one without a seat waits for
any of those who hold one. A wait that closes a ring of these would never end, so it does not begin. Root calls that
wait hold nothing, hence only the waits of subcalls are asked about. Costs what hangs on the calls waited for, and
nothing more when one of them can end by itself. Source: call-execution X67, X81.
"""

from __future__ import annotations

from collections.abc import Sequence

from callyard.policy import waits
from callyard.scheduler.calls import DONE, READY, Call


def groups_of(call: Call) -> waits.Groups[Call]:
    """What the call waits for now; what is being stopped, or will never run since its task is, ends anyway."""
    ties = call.ties
    if ties is None or call.state is DONE or call.stopping is not None:
        return ()
    if call.state is not READY:
        return [(child,) for child in ties.children.values()]
    if call.parent is None and call.task.stop_reason is not None:
        return ()
    if ties.line is not None:
        return () if ties.line.drains else (ties.line.holders,)
    if ties.flight is not None and ties.flight.leader is not call:
        return ((ties.flight.leader,),)
    return ()


def can_end(call: Call, any_of: Sequence[Call]) -> bool:
    """Whether `call` comes to its end if it waits for any one of these."""
    return waits.can_end(call, any_of, groups_of)
