"""Who is told of calls, and what becomes of a subscriber that fails."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from callyard.dispatch.events import DispatchEvent, EventHub

START = DispatchEvent("dispatch.start", 0, "add")


def at(at_ms: int) -> DispatchEvent:
    return DispatchEvent("dispatch.start", at_ms, "add")


@pytest.mark.requirement("D29")
def test_nothing_is_wanted_while_nobody_subscribes() -> None:
    hub = EventHub()
    assert not hub.wanted
    stop, stop_other = hub.subscribe(print), hub.subscribe(print)
    assert hub.wanted
    stop()
    stop()
    assert hub.wanted
    stop_other()
    assert not hub.wanted


@pytest.mark.requirement("D29")
def test_subscribers_are_told_in_order_until_they_leave() -> None:
    hub, told = EventHub(), []
    stop = hub.subscribe(lambda event: told.append(("first", event)))
    hub.subscribe(lambda event: told.append(("second", event)))
    hub.emit(START)
    stop()
    hub.emit(at(1))
    assert told == [("first", START), ("second", START), ("second", at(1))]


@pytest.mark.requirement("D29")
def test_one_may_leave_or_come_while_it_is_told() -> None:
    hub, told = EventHub(), []

    def once(event: DispatchEvent) -> None:
        told.append(event.at_ms)
        stop()
        hub.subscribe(lambda event: told.append(-event.at_ms))

    stop = hub.subscribe(once)
    hub.emit(at(1))
    hub.emit(at(2))
    assert told == [1, -2]


@pytest.mark.requirement("D29")
@pytest.mark.parametrize(
    "error", [ValueError("no"), asyncio.CancelledError(), SystemExit(3), GeneratorExit(), MemoryError()]
)
def test_a_failing_subscriber_changes_nothing(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    hub, told = EventHub(), []

    def failing(event: DispatchEvent) -> None:
        raise error

    hub.subscribe(failing)
    hub.subscribe(told.append)
    hub.emit(START)
    assert told == [START]
    assert hub.subscriber_failures == 1
    assert "a subscriber failed at dispatch.start of add" in caplog.text


@pytest.mark.requirement("D29")
def test_ctrl_c_passes() -> None:
    hub = EventHub()

    def interrupted(event: DispatchEvent) -> None:
        raise KeyboardInterrupt

    hub.subscribe(interrupted)
    with pytest.raises(KeyboardInterrupt):
        hub.emit(START)


@pytest.mark.requirement("D29")
def test_each_failing_subscriber_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    hub = EventHub()

    def failing(event: DispatchEvent) -> None:
        raise ValueError("no")

    def failing_too(event: DispatchEvent) -> None:
        raise ValueError("neither")

    hub.subscribe(failing)
    hub.subscribe(failing_too)
    for at_ms in range(0, 60_001, 1_000):
        hub.emit(at(at_ms))
    assert hub.subscriber_failures == 122
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 4


def test_what_would_have_to_be_awaited_is_refused() -> None:
    class Awaited:
        async def __call__(self, event: DispatchEvent) -> None: ...

    async def subscriber(event: DispatchEvent) -> None: ...

    given: Any
    for given in (subscriber, Awaited()):
        with pytest.raises(TypeError, match="a subscriber is called and not awaited"):
            EventHub().subscribe(given)
