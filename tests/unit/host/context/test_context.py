"""Markers: what kind of code runs here, and what child tasks inherit."""

from __future__ import annotations

import asyncio
import contextvars

import pytest

from callyard.host import context
from callyard.host.errors import HostError, HostErrorKind


class FakeTurn:
    owner = "cart/42"
    holds_gate = True
    is_over = False


def in_turn() -> contextvars.Context:
    inside = contextvars.copy_context()
    inside.run(context.enter_turn, FakeTurn())
    return inside


def test_unmarked_code_may_do_everything() -> None:
    assert context.current_marker() is context.Place.INFRASTRUCTURE
    assert context.current_turn() is None
    context.forbid_under_gate("waiting")
    context.forbid_in_turn("stopping")
    context.forbid_in_receive_callback("a handler")


@pytest.mark.requirement("R50")
def test_a_turn_may_not_wait_for_permits_while_it_holds_its_gate() -> None:
    inside = in_turn()
    with pytest.raises(HostError, match="'cart/42', which holds its gate") as caught:
        inside.run(context.forbid_under_gate, "waiting for a permit")
    assert caught.value.kind is HostErrorKind.INVALID_OPERATION
    turn = inside.run(context.current_turn)
    assert isinstance(turn, FakeTurn)
    turn.holds_gate = False
    inside.run(context.forbid_under_gate, "waiting for a permit")
    with pytest.raises(HostError, match="only from outside"):
        inside.run(context.forbid_in_turn, "stop")


def test_infrastructure_inside_a_turn_is_none_of_it() -> None:
    def look() -> None:
        with context.infrastructure():
            context.forbid_in_turn("stop")
            context.forbid_under_gate("waiting")
        with pytest.raises(HostError):
            context.forbid_under_gate("waiting")
        context.infrastructure_context().run(context.forbid_under_gate, "waiting")
        with pytest.raises(HostError):
            context.forbid_under_gate("waiting")

    in_turn().run(look)


async def test_child_tasks_carry_the_marker_unless_it_is_cleared() -> None:
    async def look() -> bool:
        return context.current_turn() is not None

    async def handler() -> list[bool]:
        return [
            await asyncio.create_task(look()),
            await asyncio.create_task(look(), context=context.infrastructure_context()),
        ]

    assert await asyncio.create_task(handler(), context=in_turn()) == [True, False]
    assert not await look()


@pytest.mark.requirement("R59")
def test_a_receive_callback_is_left_as_it_was_entered() -> None:
    def callback() -> None:
        with context.receive_callback():
            with pytest.raises(HostError, match="takes ownership of the record and returns"):
                context.forbid_in_receive_callback("a handler")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        callback()
    context.forbid_in_receive_callback("a handler")
