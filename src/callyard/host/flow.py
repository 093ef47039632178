"""Who is told of pressure: the registered sockets, each with one cell for the latest wanted state and one applier.

A transition is written into every cell; an applier goes on while wanted is not what it applied. So the latest state
wins, states that were over meanwhile are never applied, and the same one is not applied twice. A socket is registered
once its applier has caught up for the first time; closing takes it out first. Appliers are tasks of their own, woken
through the loop: no setter ever runs inside a step of the job queue, of the registry or of a callback, so it may call
any of them. Setters that fail are counted and logged, and not tried again before the next transition.
Source: job-queue §6, §11.3, R14, R64, R69-R72, R75-R77.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from callyard.clock import Timers
from callyard.host.context import infrastructure_context
from callyard.host.errors import HostError, HostErrorKind
from callyard.host.jobs import Transition
from callyard.transport.port import FlowResult, FlowState, FlowTarget

_log = logging.getLogger("callyard.host.flow")


class _Cell:
    """One target. Its applier is the only one that calls it."""

    __slots__ = (
        "applied",
        "is_applying",
        "is_closed",
        "name",
        "registrants",
        "seen",
        "settled",
        "target",
        "task",
        "wake",
        "wanted",
    )

    def __init__(self, target: FlowTarget, wanted: Transition) -> None:
        self.target = target
        self.name = target.name
        self.wanted = wanted
        self.seen = -1
        """The number of the last transition that was dealt with; those up to it are never applied."""
        self.applied: FlowState | None = None
        """What the target was told last; None: nothing yet, or the last setter failed and nobody knows."""
        self.is_applying = False
        self.is_closed = False
        self.registrants = 0
        """Who waits for the registration to be over."""
        self.wake = asyncio.Event()
        self.settled: asyncio.Future[FlowResult] = asyncio.get_running_loop().create_future()
        """OK: it is registered. Else why not."""
        self.task: asyncio.Task[None] | None = None


class FlowTargets:
    """The registry. `on_transition` of the job queue is `publish`; all else is called on the loop's thread too."""

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self._latest = Transition(0, FlowState.RUNNING)
        self._cells: dict[str, _Cell] = {}
        """By name; registered, or on the way to it."""
        self._leaving: dict[str, _Cell] = {}
        """Taken out, and their last setter is not over."""
        self._coming: list[FlowTarget] = []
        """They wait for the one that leaves and has their name."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._failures = 0

    # --- what is wanted ---

    def publish(self, transition: Transition) -> None:
        """Want a state of every target. An older or equal transition is ignored. Calls nobody."""
        if transition.number <= self._latest.number:
            return
        self._latest = transition
        for cell in self._cells.values():
            cell.wanted = transition
            cell.wake.set()

    # --- who is told ---

    async def register(self, target: FlowTarget) -> None:
        """Apply the current state, RUNNING included, then list the target. One that is listed is listed once.

        Cancelled while nobody else registers the same target, it is taken out again.
        Raises `HostError`: SHUTTING_DOWN, ALREADY_EXISTS when another target has the name, UNAVAILABLE when the socket
        is closing, INVALID_OPERATION when it takes no flow state, INTERNAL_FAILURE.
        """
        name = target.name
        if name in self._leaving:
            await self._wait_for_leaving(target)
        if self._is_closed:
            raise HostError(HostErrorKind.SHUTTING_DOWN, f"the host tells no more sockets: {name!r} is not registered")
        cell = self._cells.get(name)
        if cell is None:
            cell = self._cells[name] = _Cell(target, self._latest)
            cell.task = asyncio.get_running_loop().create_task(
                self._apply(cell), name=f"flow state of {name}", context=infrastructure_context()
            )
            self._tasks.add(cell.task)
            cell.task.add_done_callback(self._tasks.discard)
        elif cell.target is not target and cell.target != target:
            raise HostError(
                HostErrorKind.ALREADY_EXISTS, f"another socket is registered as {name!r}: deregister it first"
            )
        if not cell.settled.done():
            _check_not_inside(cell)
        cell.registrants += 1
        try:
            result = await asyncio.shield(cell.settled)
        except asyncio.CancelledError:
            if cell.registrants == 1 and not cell.settled.done():
                self._take_out(cell)
            raise
        finally:
            cell.registrants -= 1
        if result is not FlowResult.OK and self._is_closed:
            raise HostError(HostErrorKind.SHUTTING_DOWN, f"the host was closed while {name!r} was registered")
        if result is not FlowResult.OK:
            raise HostError(_REFUSALS[result], f"socket {name!r} did not take the flow state: {result}")

    async def _wait_for_leaving(self, target: FlowTarget) -> None:
        """The last setter of the one that had the name must not come after our first."""
        name = target.name
        self._coming.append(target)
        try:
            while name in self._leaving and target in self._coming:
                _check_not_inside(self._leaving[name])
                await asyncio.wait([_task_of(self._leaving[name])])
            if target not in self._coming:
                raise HostError(HostErrorKind.UNAVAILABLE, f"{name!r} was deregistered before it was registered")
        finally:
            if target in self._coming:
                self._coming.remove(target)

    async def deregister(self, target: FlowTarget) -> None:
        """Take it out of the list, then wait for a setter of its that is under way. No later one is called.

        Safe to cancel. Called out of that setter itself, it does not wait.
        """
        self._coming = [each for each in self._coming if each is not target and each != target]
        cell = self._cells.get(target.name)
        if cell is None or (cell.target is not target and cell.target != target):
            cell = self._leaving.get(target.name)
            if cell is None:
                return
        else:
            self._take_out(cell)
        task = _task_of(cell)
        if cell.is_applying and task is not asyncio.current_task():
            await asyncio.wait([task])

    async def close(self, *, timeout_ms: int) -> None:
        """Take all out. A setter under way is cancelled, and left alone if it is not over in time. Source: R72."""
        self._is_closed = True
        for cell in list(self._cells.values()):
            self._take_out(cell)
        here = asyncio.current_task()
        left = {task for task in self._tasks if task is not here}
        for task in left:
            task.cancel()
        if not await wait_until_done(left, self._timers, self._timers.now_ms() + timeout_ms):
            names = sorted(task.get_name() for task in left if not task.done())
            _log.warning("left behind at close, after %d ms: %s", timeout_ms, ", ".join(names))

    # --- seeing ---

    @property
    def config_failures(self) -> int:
        """Setters that failed since the last reset; of sockets that were closing none is counted. Source: R77."""
        return self._failures

    def reset_metrics(self) -> None:
        self._failures = 0

    def states(self) -> dict[str, FlowState | None]:
        """The registered targets, and the state that each was told last; None: the last setter failed."""
        return {name: cell.applied for name, cell in self._cells.items() if cell.settled.done()}

    def check_invariants(self) -> None:
        for name, cell in self._cells.items():
            assert not cell.is_closed, f"latest_state: {name} is closed, and listed"
            assert cell.wanted == self._latest, f"latest_state: {name} wants {cell.wanted}, not {self._latest}"
            assert cell.seen <= cell.wanted.number, f"latest_state: {name} is ahead: {cell.seen}"
            is_told = cell.applied in (cell.wanted.state, None)
            under_way = cell.is_applying or cell.wake.is_set() or not cell.settled.done()
            assert is_told or under_way, f"latest_state: {name} was told {cell.applied}, wanted is {cell.wanted}"

    # --- the applier ---

    def _take_out(self, cell: _Cell) -> None:
        cell.is_closed = True
        if self._cells.get(cell.name) is cell:
            del self._cells[cell.name]
            if cell.is_applying:
                self._leaving[cell.name] = cell
        if not cell.settled.done():
            cell.settled.set_result(FlowResult.INVALID_STATE)
        cell.wake.set()

    async def _apply(self, cell: _Cell) -> None:
        try:
            while not cell.is_closed:
                wanted = cell.wanted
                if cell.seen == wanted.number:
                    if not cell.settled.done():
                        cell.settled.set_result(FlowResult.OK)  # the same step in which nothing newer was wanted
                    cell.wake.clear()
                    await cell.wake.wait()
                    continue
                if cell.applied is not wanted.state:
                    await self._set(cell, wanted.state)
                cell.seen = wanted.number
        finally:
            self._take_out(cell)
            if self._leaving.get(cell.name) is cell:
                del self._leaving[cell.name]

    async def _set(self, cell: _Cell, state: FlowState) -> None:
        cell.applied = None
        cell.is_applying = True
        try:
            result = await cell.target.set_receive_flow_state(state)
        except asyncio.CancelledError:
            if self._is_closed:
                raise
            _task_of(cell).uncancel()  # nobody but `close` cancels an applier: the setter did it to itself
            result = self._fail(cell, state, FlowResult.FAILED, "it was cancelled")
        except Exception:  # noqa: BLE001 - another's code: told, counted, and the applier goes on
            _log.exception("socket %r did not take %s", cell.name, state.name)
            self._failures += 1
            result = FlowResult.FAILED
        else:
            if result is FlowResult.OK:
                cell.applied = state
            elif result is not FlowResult.INVALID_STATE:  # that one is closing: expected
                self._fail(cell, state, result, result)
        finally:
            cell.is_applying = False
        if result is not FlowResult.OK and not cell.settled.done():
            cell.settled.set_result(result)
            self._take_out(cell)

    def _fail(self, cell: _Cell, state: FlowState, result: FlowResult, why: str) -> FlowResult:
        self._failures += 1
        _log.warning("socket %r did not take %s: %s", cell.name, state.name, why)
        return result


_REFUSALS = {
    FlowResult.INVALID_STATE: HostErrorKind.UNAVAILABLE,
    FlowResult.NOT_SUPPORTED: HostErrorKind.INVALID_OPERATION,
    FlowResult.FAILED: HostErrorKind.INTERNAL_FAILURE,
}


def _check_not_inside(cell: _Cell) -> None:
    if _task_of(cell) is asyncio.current_task():
        raise HostError(
            HostErrorKind.INVALID_OPERATION, f"the setter of {cell.name!r} registers it: it would wait for itself"
        )


def _task_of(cell: _Cell) -> asyncio.Task[None]:
    assert cell.task is not None, "a cell has its applier from the step in which it is made"
    return cell.task


async def wait_until_done(tasks: Iterable[asyncio.Task[None]], timers: Timers, at_ms: int) -> bool:
    """Wait until all are done, or an instant has come. Returns whether they are."""
    left = {task for task in tasks if not task.done()}
    if not left:
        return True
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def done(task: asyncio.Task[None]) -> None:
        left.discard(task)
        if not left and not over.done():
            over.set_result(None)

    timer = timers.call_at(at_ms, lambda: None if over.done() else over.set_result(None))
    for task in list(left):
        task.add_done_callback(done)
    try:
        await over
    finally:
        timer.cancel()
        for task in list(left):
            task.remove_done_callback(done)
    return not left
