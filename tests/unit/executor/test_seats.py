"""Seats for subcalls: whatever families ask for, somebody can always go on (X80)."""

from __future__ import annotations

import random

import pytest
from msgspec import Raw

from callyard.executor.contexts import Call
from callyard.executor.seats import DEPTH_MAX, Seats, ancestry_of, depth_of
from callyard.ids import CallId, Digest, FunctionId, TaskId
from callyard.wire.messages import ExecuteCallPayload

PAYLOAD = ExecuteCallPayload(TaskId("t"), FunctionId("f"), Digest("d"), 1, Raw(b"[]"))


def make_call(call_id: str) -> Call:
    return Call(CallId(call_id), PAYLOAD, -1, 0)


def test_depth_and_ancestry_are_read_from_the_id() -> None:
    assert depth_of(CallId("run-1-7")) == 0
    assert depth_of(CallId("run-1-7/sub-4/sub-9")) == 2
    assert depth_of(CallId("/sub-" * 100)) == DEPTH_MAX
    assert ancestry_of(CallId("run-1-7/sub-4/sub-9")) == ["run-1-7", "run-1-7/sub-4", "run-1-7/sub-4/sub-9"]


@pytest.mark.requirement("X80")
def test_a_seat_is_given_back_once() -> None:
    seats = Seats(DEPTH_MAX)
    first, second, third = (make_call(f"a/sub-{n}") for n in range(3))
    assert seats.admit(first)
    assert not seats.admit(second)
    assert not seats.admit(third)
    assert seats.leave(second) is None  # taken back before it had one
    assert seats.leave(first) is third
    assert seats.leave(third) is None
    assert seats.calls == {}


def test_a_page_that_holds_no_chain_is_too_small() -> None:
    assert Seats(DEPTH_MAX - 1).is_too_small
    assert Seats(-1).is_too_small
    assert not Seats(DEPTH_MAX).is_too_small


@pytest.mark.requirement("X80")
@pytest.mark.parametrize("seed", range(20))
def test_random_families_end(seed: int) -> None:
    """Families that ask for far more at once than there are seats. Only a seated call may begin, and it ends once its
    own subcalls have; they may be seated on either of two executors, as with `spread`.
    """
    rng = random.Random(seed)
    executors = [Seats(DEPTH_MAX + rng.randrange(6)) for _ in range(2)]
    where: dict[str, Seats] = {}
    calls: dict[str, Call] = {}
    left: dict[str, int] = {}
    runnable: list[str] = []
    ended = 0
    total = 0

    def ask(parent: str, depth: int) -> None:
        nonlocal total
        count = rng.randrange(1, 6) if depth < 6 else 0
        left[parent] = count
        for number in range(count):
            total += 1
            child = f"{parent}/sub-{number}"
            seats = where[child] = rng.choice(executors)
            calls[child] = make_call(child)
            if seats.admit(calls[child]):
                runnable.append(child)

    def end(call_id: str) -> None:
        nonlocal ended
        ended += 1
        freed = where[call_id].leave(calls[call_id])
        if freed is not None:
            runnable.append(freed.call_id)
        parent = call_id.rpartition("/sub-")[0]
        left[parent] -= 1
        if left[parent] == 0 and parent in calls:
            end(parent)

    for root in range(5):
        ask(f"root-{root}", 0)
    while runnable:
        call_id = runnable.pop(rng.randrange(len(runnable)))
        ask(call_id, call_id.count("/sub-"))
        if left[call_id] == 0:
            end(call_id)
    assert ended == total
