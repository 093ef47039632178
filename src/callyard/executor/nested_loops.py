"""An event loop that user code runs inside its call, set aside while the call is suspended.

`asyncio.run` in a `def` marks the thread as running a loop. When the call then sleeps by the SDK, another call on the
same thread must be able to do the same, so mark and current task leave with the call and come back with it.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple


class Aside(NamedTuple):
    loop: Any
    task: Any


def set_aside() -> Aside | None:
    """Unmark the thread. None: it runs no loop."""
    events = sys.modules.get("asyncio.events")
    if events is None:
        return None
    loop = events._get_running_loop()
    if loop is None:
        return None
    tasks = sys.modules["asyncio.tasks"]
    task = tasks.current_task(loop)
    if task is not None:
        tasks._leave_task(loop, task)
    events._set_running_loop(None)
    return Aside(loop, task)


def put_back(aside: Aside | None) -> None:
    if aside is None:
        return
    sys.modules["asyncio.events"]._set_running_loop(aside.loop)
    if aside.task is not None:
        sys.modules["asyncio.tasks"]._enter_task(aside.loop, aside.task)
