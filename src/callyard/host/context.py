"""What kind of code runs here: a turn of an owner, the host itself, or the callback of a receive.

A marker in a `ContextVar`, so that child tasks and callbacks of a handler carry it. A turn's marker asks the turn: once
it has ended or given its gate away, what it left behind holds nothing. Source: job-queue §2.1, §11.3, R49, R50, R59.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Final, Protocol

from callyard.host.errors import HostError, HostErrorKind


class CurrentTurn(Protocol):
    """The marker of application code: its owner, and whether it holds the gate at this moment."""

    @property
    def owner(self) -> str: ...

    @property
    def holds_gate(self) -> bool: ...

    @property
    def is_over(self) -> bool: ...


class Place(Enum):
    INFRASTRUCTURE = "infrastructure"
    RECEIVE_CALLBACK = "receive callback"


Marker = CurrentTurn | Place

_marker: Final[contextvars.ContextVar[Marker]] = contextvars.ContextVar("callyard_host_marker")


def current_marker() -> Marker:
    """Code that nobody marked is the host's own, or its user's outside of any turn."""
    return _marker.get(Place.INFRASTRUCTURE)


def current_turn() -> CurrentTurn | None:
    """The turn that this code belongs to; None also once it has ended: what it left behind is no part of it."""
    marker = _marker.get(Place.INFRASTRUCTURE)
    return None if isinstance(marker, Place) or marker.is_over else marker


def enter_turn(turn: CurrentTurn) -> None:
    """For the rest of this context, which is the turn's own."""
    _marker.set(turn)


@contextmanager
def infrastructure() -> Iterator[None]:
    """Work of the host's inside code of an application: what it calls back is no part of the turn."""
    yield from _marked(Place.INFRASTRUCTURE)


@contextmanager
def receive_callback() -> Iterator[None]:
    """Takes ownership of what came and returns: no handler runs in it, no gate is entered (R58, R59)."""
    yield from _marked(Place.RECEIVE_CALLBACK)


def _marked(place: Place) -> Iterator[None]:
    token = _marker.set(place)
    try:
        yield
    finally:
        _marker.reset(token)


def infrastructure_context() -> contextvars.Context:
    """A copy of this context for a task of the host's: `create_task(..., context=infrastructure_context())`."""
    context = contextvars.copy_context()
    context.run(_marker.set, Place.INFRASTRUCTURE)
    return context


def forbid_under_gate(what: str) -> None:
    """Raises `HostError(INVALID_OPERATION)` where a turn holds its gate: to wait for a permit there could wait for
    itself.
    """
    turn = current_turn()
    if turn is not None and turn.holds_gate:
        raise HostError(
            HostErrorKind.INVALID_OPERATION,
            f"{what} inside a turn of {turn.owner!r}, which holds its gate: this could wait for itself for ever. "
            "Submit local work instead, or do it outside of handlers.",
        )


def forbid_in_turn(what: str) -> None:
    """For what only the host may do. Raises `HostError(INVALID_OPERATION)` in a turn's code, at once."""
    turn = current_turn()
    if turn is not None:
        raise HostError(HostErrorKind.INVALID_OPERATION, f"{what} from a handler of {turn.owner!r}: only from outside")


def forbid_in_receive_callback(what: str) -> None:
    if _marker.get(Place.INFRASTRUCTURE) is Place.RECEIVE_CALLBACK:
        raise HostError(
            HostErrorKind.INVALID_OPERATION,
            f"{what} inside a receive callback: it takes ownership of the record and returns",
        )
