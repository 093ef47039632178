"""Host states by what asks to come in: one table, and the moves between the states.

    preparing -> serving -> relocating -> relocated -> draining -> stopped      error: from anywhere but stopped

A host is ready while it serves, and no longer. Whether it accepts work is a flag of its own: shutdown takes it away
first, and what asks then is answered as if the host were draining already. The state is looked at before the unit: a
sealed unit holds what may still come in. In error nothing new comes in; what was accepted is still moved, run and
answered. Source: job-queue §3 (last item), R39, R42, R120.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, StrEnum
from typing import Final, TypeAlias

from callyard.errors import InvalidTransition
from callyard.host.errors import HostErrorKind


class HostState(StrEnum):
    PREPARING = "preparing"
    SERVING = "serving"
    RELOCATING = "relocating"
    RELOCATED = "relocated"
    DRAINING = "draining"
    STOPPED = "stopped"
    ERROR = "error"


class Asking(StrEnum):
    """What asks to come in."""

    NEW_PAYLOAD = "new_payload"
    """For an owner that is to be made, or a new membership."""
    EXISTING_OWNER = "existing_owner"
    SEALED_UNIT = "sealed_unit"
    """For an owner that is sealed for a move."""
    NEW_SESSION = "new_session"
    REPLY_ROUTE = "reply_route"
    """A reply to what this host sent, or of a handler that has begun."""
    CONTROL = "control"
    """Infrastructure: heartbeat, topology, relocation."""


class Admission(Enum):
    ADMIT = "admit"
    HOLD = "hold"
    """In the ingress hold, until the move is over or its own deadline."""


_OK: Final = Admission.ADMIT
_HOLD: Final = Admission.HOLD
_NO: Final = HostErrorKind.UNAVAILABLE
_END: Final = HostErrorKind.SHUTTING_DOWN

_Answer: TypeAlias = Admission | HostErrorKind
_ROWS: Final[Mapping[HostState, tuple[_Answer, ...]]] = {
    # state: new payload, existing owner, sealed unit, new session, reply route, control
    HostState.PREPARING: (_NO, _NO, _NO, _NO, _OK, _OK),
    HostState.SERVING: (_OK, _OK, _HOLD, _OK, _OK, _OK),
    HostState.RELOCATING: (_NO, _OK, _HOLD, _NO, _OK, _OK),
    HostState.RELOCATED: (_NO, _NO, _NO, _NO, _OK, _OK),
    HostState.DRAINING: (_END, _END, _END, _END, _OK, _OK),
    HostState.STOPPED: (_END, _END, _END, _END, _END, _END),
    HostState.ERROR: (_NO, _NO, _NO, _NO, _OK, _OK),
}
ADMISSION: Final[Mapping[tuple[HostState, Asking], _Answer]] = {
    (state, asking): answer for state, row in _ROWS.items() for asking, answer in zip(Asking, row, strict=True)
}
"""A kind of error: refused with it."""

_S = HostState
TRANSITIONS: Final[Mapping[HostState, frozenset[HostState]]] = {
    _S.PREPARING: frozenset({_S.SERVING, _S.DRAINING, _S.STOPPED, _S.ERROR}),
    _S.SERVING: frozenset({_S.RELOCATING, _S.DRAINING, _S.ERROR}),
    _S.RELOCATING: frozenset({_S.RELOCATED, _S.SERVING, _S.DRAINING, _S.ERROR}),  # back: the move was given up
    _S.RELOCATED: frozenset({_S.DRAINING, _S.ERROR}),
    _S.DRAINING: frozenset({_S.STOPPED, _S.ERROR}),
    _S.ERROR: frozenset({_S.STOPPED}),
    _S.STOPPED: frozenset(),
}

_ACCEPTS: Final = frozenset({_S.SERVING, _S.RELOCATING})
_OVER: Final = frozenset({_S.STOPPED, _S.ERROR})


class HostLife:
    """Where a host is, and whether it accepts work."""

    __slots__ = ("_is_sealed", "state")

    def __init__(self) -> None:
        self.state = HostState.PREPARING
        self._is_sealed = False

    @property
    def is_ready(self) -> bool:
        return self.state is HostState.SERVING

    @property
    def is_accepting_work(self) -> bool:
        """Whether any payload is let in."""
        return self.state in _ACCEPTS and not self._is_sealed

    def seal(self) -> None:
        """Accept no more work, whatever the state is called meanwhile. For good: the first step of shutdown."""
        self._is_sealed = True

    def move_to(self, state: HostState) -> None:
        """Raises `InvalidTransition`. To be where one is, is no move."""
        if state is self.state:
            return
        if state not in TRANSITIONS[self.state]:
            raise InvalidTransition(f"a host that is {self.state} cannot become {state}")
        self.state = state

    def admit(self, asking: Asking) -> Admission | HostErrorKind:
        """ADMIT, HOLD, or the kind of error that it is refused with."""
        state = HostState.DRAINING if self._is_sealed and self.state not in _OVER else self.state
        return ADMISSION[state, asking]
