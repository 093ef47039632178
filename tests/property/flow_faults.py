"""Faults to plant in the registry of flow targets, each a class that differs from the right one in one place.

A stale state that overwrites a newer one, a late one that comes after the close, one that is lost between attach and
registration: projects like this one really had them. For property tests and simulations.
"""

from __future__ import annotations

from typing import Any, Final

from callyard.host.flow import FlowTargets, _Cell
from callyard.host.jobs import Transition
from callyard.transport.port import FlowResult, FlowState, FlowTarget


class LetsStaleTransitionsIn(FlowTargets):
    def publish(self, transition: Transition) -> None:
        self._latest = Transition(transition.number - 1, transition.state)
        super().publish(transition)


class AppliesAfterTheClose(FlowTargets):
    """What was wanted before the socket left is still applied when its setter is over."""

    def _take_out(self, cell: _Cell) -> None:
        super()._take_out(cell)
        cell.is_closed = not cell.is_applying


class ListsBeforeItHasApplied(FlowTargets):
    async def _apply(self, cell: _Cell) -> None:
        cell.settled.set_result(FlowResult.OK)
        await super()._apply(cell)


class LosesWhatComesDuringARegistration(FlowTargets):
    def publish(self, transition: Transition) -> None:
        listed = {name: cell for name, cell in self._cells.items() if cell.settled.done()}
        kept, self._cells = self._cells, listed
        super().publish(transition)
        self._cells = kept


class TellsTheSameStateAgain(FlowTargets):
    async def _set(self, cell: _Cell, state: FlowState) -> None:
        await super()._set(cell, state)
        cell.applied = None


class AppliesEveryTransition(FlowTargets):
    """A queue of what was wanted, where the latest would do."""

    def publish(self, transition: Transition) -> None:
        super().publish(transition)
        for cell in self._cells.values():
            backlog: list[Transition] = cell.target.__dict__.setdefault("backlog", [])
            backlog.append(transition)

    async def _set(self, cell: _Cell, state: FlowState) -> None:
        backlog: list[Transition] = cell.target.__dict__.get("backlog", [])
        while backlog:
            await super()._set(cell, backlog.pop(0).state)
        if cell.applied is not state:
            await super()._set(cell, state)


class CallsOutOfTheStep(FlowTargets):
    def publish(self, transition: Transition) -> None:
        super().publish(transition)
        for cell in list(self._cells.values()):
            if cell.settled.done() and not cell.is_applying:
                setter: Any = cell.target.set_receive_flow_state(transition.state)
                try:
                    setter.send(None)
                finally:
                    setter.close()


class LeavesWithoutItsSetter(FlowTargets):
    async def deregister(self, target: FlowTarget) -> None:
        cell = self._cells.get(target.name)
        if cell is not None and cell.target is target:
            self._take_out(cell)


class TakesAFailureForNoChange(FlowTargets):
    """The setter failed, so the old state holds: nobody knows that."""

    async def _set(self, cell: _Cell, state: FlowState) -> None:
        before = cell.applied
        await super()._set(cell, state)
        cell.applied = cell.applied if cell.applied is not None else before


class KeepsWhatFailedAtFirst(FlowTargets):
    def _take_out(self, cell: _Cell) -> None:
        if cell.settled.done() and cell.settled.result() is FlowResult.FAILED and not cell.is_closed:
            return
        super()._take_out(cell)


FAULTS: Final = (
    LetsStaleTransitionsIn,
    AppliesAfterTheClose,
    ListsBeforeItHasApplied,
    LosesWhatComesDuringARegistration,
    TellsTheSameStateAgain,
    AppliesEveryTransition,
    CallsOutOfTheStep,
    LeavesWithoutItsSetter,
    TakesAFailureForNoChange,
    KeepsWhatFailedAtFirst,
)
