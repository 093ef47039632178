"""Host states by what asks to come in, each cell a case; and the moves between the states."""

from __future__ import annotations

from itertools import product

import pytest

from callyard.errors import InvalidTransition
from callyard.host.errors import HostErrorKind
from callyard.host.states import ADMISSION, TRANSITIONS, Admission, Asking, HostLife, HostState

# One line a state; columns: new payload, existing owner, sealed unit, new session, reply route, control.
EXPECTED = """
preparing   unavailable unavailable unavailable unavailable admit admit
serving     admit admit hold admit admit admit
relocating  unavailable admit hold unavailable admit admit
relocated   unavailable unavailable unavailable unavailable admit admit
draining    shutting_down shutting_down shutting_down shutting_down admit admit
stopped     shutting_down shutting_down shutting_down shutting_down shutting_down shutting_down
error       unavailable unavailable unavailable unavailable admit       admit
"""
CELLS = [
    (HostState(words[0]), asking, answer)
    for words in (line.split() for line in EXPECTED.strip().splitlines())
    for asking, answer in zip(Asking, words[1:], strict=True)
]


def walk(*states: HostState) -> HostLife:
    life = HostLife()
    for state in states:
        life.move_to(state)
    return life


WAYS = {
    HostState.PREPARING: (),
    HostState.SERVING: (HostState.SERVING,),
    HostState.RELOCATING: (HostState.SERVING, HostState.RELOCATING),
    HostState.RELOCATED: (HostState.SERVING, HostState.RELOCATING, HostState.RELOCATED),
    HostState.DRAINING: (HostState.SERVING, HostState.DRAINING),
    HostState.STOPPED: (HostState.SERVING, HostState.DRAINING, HostState.STOPPED),
    HostState.ERROR: (HostState.SERVING, HostState.ERROR),
}


def say(answer: Admission | HostErrorKind) -> str:
    return answer.name.lower()


@pytest.mark.requirement("R120", "R39")
@pytest.mark.parametrize(("state", "asking", "answer"), CELLS, ids=lambda value: str(value))
def test_cell(state: HostState, asking: Asking, answer: str) -> None:
    assert say(walk(*WAYS[state]).admit(asking)) == answer


@pytest.mark.requirement("R120")
def test_the_table_is_whole() -> None:
    assert set(ADMISSION) == set(product(HostState, Asking)) == {(state, asking) for state, asking, _ in CELLS}
    assert set(TRANSITIONS) == set(WAYS) == set(HostState)


@pytest.mark.requirement("R120")
@pytest.mark.parametrize("state", HostState)
def test_ready_while_serving_only_and_accepting_apart(state: HostState) -> None:
    life = walk(*WAYS[state])
    assert life.is_ready is (state is HostState.SERVING)
    assert life.is_accepting_work is (state in (HostState.SERVING, HostState.RELOCATING))
    life.seal()
    assert life.is_ready is (state is HostState.SERVING)
    assert not life.is_accepting_work


@pytest.mark.requirement("R120", "R42")
@pytest.mark.parametrize(
    "state", [HostState.PREPARING, HostState.SERVING, HostState.RELOCATING, HostState.RELOCATED, HostState.DRAINING]
)
@pytest.mark.parametrize("asking", Asking)
def test_sealed_is_answered_as_draining(state: HostState, asking: Asking) -> None:
    life = walk(*WAYS[state])
    life.seal()
    assert life.admit(asking) is ADMISSION[HostState.DRAINING, asking]


@pytest.mark.parametrize(("before", "after"), list(product(HostState, HostState)))
def test_moves(before: HostState, after: HostState) -> None:
    life = walk(*WAYS[before])
    if after is before or after in TRANSITIONS[before]:
        life.move_to(after)
        assert life.state is after
    else:
        with pytest.raises(InvalidTransition, match=f"that is {before} cannot become {after}"):
            life.move_to(after)
        assert life.state is before
