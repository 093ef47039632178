"""What a user of a host is told: by an error, a count, a line in the log. And what an end leaves saved."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest

from callyard.host.config import ProcessorFigures
from callyard.host.errors import HostError, HostErrorKind
from callyard.host.host import Host
from callyard.host.ledger import OwnerLimits
from callyard.testing.scripted_transport import ScriptedTransport
from callyard.testing.virtual_time import virtual_time
from tests.runtime.host.kit import Add, Counter, Total, Wait, add, drops, kind_of, make_host, serving, until

SMALL = OwnerLimits(application_items_max=5)


class Shift(msgspec.Struct):
    by: int


class Nothing:
    pass


class Shelf:
    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.stuck: set[str] = set()

    async def load(self, spot: str) -> bytes | None:
        return self.kept.get(spot)

    async def save(self, spot: str, state: bytes) -> None:
        if spot in self.stuck:
            await asyncio.Event().wait()
        self.kept[spot] = state


def now_ms() -> int:
    return round(asyncio.get_running_loop().time() * 1_000)


async def message_of(call: Callable[[], Any]) -> str:
    """The text of the `HostError` that a call, or awaiting it, ends with."""
    with pytest.raises(HostError) as caught:
        await call()
    return str(caught.value)


def lines(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if part in record.getMessage()]


# --- spots that were not there yet, under load -----------------------------------------------------------------------


@pytest.mark.requirement("R22")
@pytest.mark.parametrize("how", ["made", "moved"])
def test_what_a_host_sends_to_itself_never_pauses_its_sockets_and_the_spot_opens(how: str) -> None:
    """The steady load of a hundred senders on ten spots: held or not it takes no permit, and holds come to an end."""

    class Slow(Counter):
        @Host.handler
        async def add(self, message: Add) -> int:
            await asyncio.sleep(0.001)
            return message.count

    @virtual_time
    async def run() -> None:
        async with serving(jobs_max=16, owners=SMALL, outbound_waiter_slots=100) as host:
            host.spots("cart/*", Slow)
            if how == "moved":
                for number in range(10):
                    await host.request(f"cart/{number}", Total())

            async def send_for_ever(number: int) -> None:
                while True:
                    await host.send(f"cart/{number % 10}", Add(1))

            senders = [asyncio.ensure_future(send_for_ever(number)) for number in range(100)]
            if how == "moved":
                await asyncio.sleep(0.01)
                for number in range(10):
                    await host.move(f"cart/{number}")
            await asyncio.sleep(0.2)
            assert host.statistics().moving.units == 0
            assert host.status().capacity.peak_permits_in_use == 0
            assert host.statistics().moving.dropped == 0
            for sender in senders:
                sender.cancel()
            await asyncio.gather(*senders, return_exceptions=True)

    run()


@pytest.mark.requirement("R22")
@virtual_time
async def test_what_came_by_a_transport_takes_a_permit_again_and_what_did_not_takes_none() -> None:
    transport = ScriptedTransport()
    source = transport.add_source("peer")
    async with serving(transport, jobs_max=1, owners=OwnerLimits(application_items_max=100)) as host:
        host.spot("a", counter := Counter())
        host.parts.moving.seal("a")
        await host.send("a", Add(1))
        source.one_way("a", add(2), message_type="Add", count=3)
        await until(lambda: host.parts.moving.held("a") == 4)
        await host.send("a", Add(3))
        host.parts.moving.open("a")
        await until(lambda: len(counter.seen) == 5)
        assert counter.seen == [1, 2, 2, 2, 3], "in order, under one permit"
        assert host.status().capacity.peak_permits_in_use == 1


# --- the end ---------------------------------------------------------------------------------------------------------


class LetsNothingThrough(Counter):
    """Its handler changes it until the end of time."""

    @Host.handler
    async def wait(self, message: Wait) -> str:
        while self.gate is not None and not self.gate.is_set():
            try:
                await self.gate.wait()
            except BaseException:  # noqa: BLE001 - the worst that a handler does
                continue
        return "at last"


@pytest.mark.parametrize("end", ["a handler that is stuck", "an error", "no time", "a store that is stuck"])
def test_what_is_idle_is_saved_however_the_host_ends_and_the_rest_is_named(
    end: str, caplog: pytest.LogCaptureFixture
) -> None:
    @virtual_time
    async def run() -> None:
        shelf, gate = Shelf(), asyncio.Event()
        host = make_host(states=shelf, shutdown_timeout_ms=500)
        host.spots("cart/*", Counter)
        host.spots("stuck/*", LetsNothingThrough)
        wanted = {f"cart/{number}": b"[%d]" % number for number in range(40)}
        try:
            async with host:
                for number in range(40):
                    await host.request(f"cart/{number}", Add(number))
                if end == "an error":
                    raise LookupError
                if end == "no time":
                    await host.close(drain_deadline_ms=0)
                if end == "a store that is stuck":
                    shelf.stuck.add("cart/3")
                    del wanted["cart/3"]
                if end == "a handler that is stuck":
                    host.parts.spots.spots["cart/0"].state.gate = None  # type: ignore[attr-defined]
                    await host.request("stuck/1", Total())
                    host.parts.spots.spots["stuck/1"].state.gate = gate  # type: ignore[attr-defined]
                    await host.send("stuck/1", Wait())
                    await asyncio.sleep(0.01)
        except LookupError:
            pass
        assert shelf.kept == wanted
        unsaved = lines(caplog, "were not saved")
        if end in ("an error", "no time"):
            assert unsaved == []
        else:
            (line,) = unsaved
            assert ("stuck/1" in line) == (end == "a handler that is stuck")
            assert ("cart/3" in line) == (end == "a store that is stuck")
            assert "1 of " in line
        assert now_ms() <= 500 + 1_000 + 5_000 + 1_000
        gate.set()

    run()


@pytest.mark.parametrize("catches", [asyncio.CancelledError, BaseException])
def test_a_handler_that_swallows_its_cancellation_is_named_and_keeps_nothing_alive(
    catches: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    over = asyncio.Event()

    @virtual_time
    async def run() -> None:
        host = make_host(shutdown_timeout_ms=100)

        @host.on("a", Wait)
        async def stubborn(message: Wait) -> None:
            while not over.is_set():
                try:
                    await over.wait()
                except catches:
                    continue

        async with host:
            await host.send("a", Wait())
            await until(lambda: host.statistics().turns.active == 1)
        await asyncio.sleep(0)
        (line,) = lines(caplog, "did not end when it was cancelled")
        assert "'a'" in line
        assert "one_way Wait" in line
        is_left = catches is BaseException
        assert ("left behind" in line) == is_left
        if is_left:
            over.set()
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run()


# --- what is lost ----------------------------------------------------------------------------------------------------


@virtual_time
async def test_a_send_that_fails_in_its_call_counts_unless_somebody_awaits_it(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as host:
        host.spots("cart/*", Counter)
        assert await kind_of(host.send("carte/1", Add(1))) is HostErrorKind.NOT_FOUND
        given = await asyncio.gather(host.send("carte/1", Add(1)), return_exceptions=True)
        assert isinstance(given[0], HostError)
        for _ in range(5):
            await asyncio.sleep(0)
        assert (drops(host), lines(caplog, "lost")) == ({}, []), "those were told"
        host.send("carte/1", Add(1))
        await until(lambda: bool(drops(host)))
        assert drops(host) == {("one_way", "stale_target"): 1}
        (line,) = lines(caplog, "lost")
        assert "'carte/1'" in line
        assert "cart/*" in line
    host.send("cart/1", Add(1))
    await until(lambda: ("one_way", "shutdown") in drops(host))


@virtual_time
async def test_the_first_of_a_kind_is_logged_then_one_line_a_second_and_the_rest_at_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving() as host:
        host.spots("cart/*", Counter)
        for number in range(300):
            await host.send(f"cart/{number % 3}", Shift(1))
            await host.send("cart/1", Add("many"))  # type: ignore[arg-type]
            await asyncio.sleep(0.01)
        assert await kind_of(host.request("cart/1", Shift(1))) is HostErrorKind.NOT_FOUND
        unhandled, misfits = lines(caplog, "no_handler"), lines(caplog, "decode_error")
        assert len(unhandled) == len(misfits) == 3
        assert unhandled[0].startswith(
            "a one_way message was lost (no_handler) for 'cart/0': 'cart/0' has no handler for"
        )
        assert "Add, Fail, Total, Wait" in unhandled[0], "it has for"
        assert unhandled[1].startswith("100 one_way messages were lost")
        assert "Expected `int`, got `str`" in misfits[0]
    assert lines(caplog, "no_handler")[3].startswith("99 one_way messages were lost"), "and no request: that was told"
    assert drops(host)["one_way", "no_handler"] == 300


@virtual_time
async def test_what_is_queued_at_the_end_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as host:
        host.spot("a", Counter())
        await host.send("a", Wait(60_000))
        for _ in range(4):
            await host.send("a", Add(1))
        await asyncio.sleep(0.01)
        await host.close(drain_deadline_ms=0)
    first, rest = lines(caplog, "shutdown")
    assert "'a'" in first
    assert rest.startswith("3 one_way messages were lost")


@virtual_time
async def test_a_handler_that_is_cancelled_from_within_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as host:

        @host.on("a", int)
        async def cancels(message: int) -> None:
            raise asyncio.CancelledError

        await host.send("a", 1)
        await until(lambda: host.statistics().turns.failed == 1)
        assert lines(caplog, "a handler of 'a' was cancelled (one_way of a plain value)")


# --- errors ----------------------------------------------------------------------------------------------------------


def test_an_error_shows_its_kind_and_can_be_copied() -> None:
    error = HostError(HostErrorKind.NOT_FOUND, "there is no spot 'a'")
    assert str(error) == "NOT_FOUND: there is no spot 'a'"
    assert repr(error) == "HostError(NOT_FOUND, \"there is no spot 'a'\")"
    assert f"{error.kind} {error.kind!s:>10}" == "NOT_FOUND  NOT_FOUND"
    other = copy.copy(error)
    assert (other.kind, other.message) == (error.kind, error.message)
    with pytest.raises(ValueError, match="99"):
        HostError(99, "no kind")  # type: ignore[arg-type]


class Bare:
    """It has a `dump`, and nothing takes what that gives."""

    def __init__(self, spot: str) -> None: ...

    @Host.handler
    def add(self, message: Add) -> None: ...

    def dump(self) -> int:
        return 1


class Broken(Bare):
    def __init__(self, spot: str) -> None:
        raise OSError("no disk")

    def load(self, state: int) -> None: ...


@virtual_time
async def test_a_refusal_says_what_is_wrong_and_where() -> None:
    host = make_host(owners=OwnerLimits(application_items_max=1, application_bytes_max=2_000), spots_max=3)
    host.spots("cart/*", Counter)
    host.spots("bare/*", Bare)
    host.spots("broken/*", Broken)
    started = await message_of(lambda: host.request("cart/1", Total()))
    assert started.startswith("UNAVAILABLE: the host has not started, so 'cart/1' takes nothing")
    async with host:
        await host.request("cart/1", Total())
        await host.request("bare/1", Add(1))
        said = {
            "no spot": await message_of(lambda: host.send("carte/1", Add(1))),
            "large": await message_of(lambda: host.send("cart/1", {"text": "x" * 3_000})),
            "misfit": await message_of(lambda: host.request("cart/1", Add("many"))),  # type: ignore[arg-type]
            "no handler": await message_of(lambda: host.request("cart/1", Shift(1))),
            "reply": await message_of(lambda: host.request("cart/1", Total(), str)),
            "broken": await message_of(lambda: host.request("broken/1", Add(1))),
            "move": await message_of(lambda: host.move("bare/1")),
            "move broken": await message_of(lambda: host.move("cart/1", lambda spot: Nothing())),
            "move none": await message_of(lambda: host.move("cart/9")),
            "class": await message_of(lambda: host.request("cart/1", Add)),
        }
        await host.request("cart/2", Total())
        said["spots"] = await message_of(lambda: host.request("cart/3", Total()))
        await host.send("cart/1", Wait())
        said["full"] = await message_of(lambda: host.request("cart/1", Total()))
        host.remove("cart/1")
    parts = {
        "no spot": ("NOT_FOUND: there is no spot 'carte/1'", "cart/*", "bare/*"),
        "large": ("REJECTED:", "'cart/1'", "3267 bytes", "2000", "application_bytes_max"),
        "misfit": ("PROTOCOL_ERROR: 'cart/1' could not read its payload as Add", "Expected `int`, got `str`"),
        "no handler": ("NOT_FOUND: 'cart/1' has no handler for Shift", "Add, Fail, Total, Wait"),
        "reply": ("PROTOCOL_ERROR: the reply of 'cart/1' is no str",),
        "broken": ("INTERNAL_FAILURE: 'broken/1' could not be made: its factory Broken failed: OSError: no disk",),
        "move": ("INVALID_OPERATION: 'bare/1' cannot be moved to a Bare", "`load(state)`"),
        "move broken": ("INVALID_OPERATION: 'cart/1' cannot be moved to a Nothing", "`load(state)`"),
        "move none": ("NOT_FOUND: there is no spot 'cart/9' here to move",),
        "class": ("TYPE_MISMATCH: the class Add cannot be sent as JSON", "Add(...)"),
        "spots": ("CAPACITY_EXCEEDED: 'cart/3' was not made: there are 3 spots", "spots_max"),
        "full": ("CAPACITY_EXCEEDED: 'cart/1' has no room", "1 messages"),
    }
    for what, wanted in parts.items():
        assert [part for part in wanted if part not in said[what]] == [], said[what]
    assert (await message_of(lambda: host.request("cart/1", Total()))).startswith("SHUTTING_DOWN: the host is closing")


@virtual_time
async def test_who_waits_is_told_what_became_of_the_spot() -> None:
    host = make_host(shutdown_timeout_ms=100)
    async with host:
        host.spot("a", Counter())
        host.spot("b", Counter())
        for spot in ("a", "b"):
            await host.send(spot, Wait(60_000))
        asked = [asyncio.ensure_future(message_of(partial(host.request, spot, Total()))) for spot in ("a", "b")]
        await asyncio.sleep(0.01)
        host.remove("a")
    assert await asked[0] == "NOT_FOUND: 'a' was removed before this message's turn began"
    assert await asked[1] == "SHUTTING_DOWN: the host was closed before this message's turn of 'b' began"


@virtual_time
async def test_a_spot_that_cannot_be_made_is_logged_as_that_and_once(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as host:
        host.spots("broken/*", Broken)
        await host.send("broken/1", Add(1))
        await until(lambda: bool(drops(host)))
    failures = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert failures == ["'broken/1' could not be made: its factory Broken failed"]
    assert "no disk" in caplog.text
    (line,) = lines(caplog, "lost")
    assert line.endswith("'broken/1' could not be made: its factory Broken failed: OSError: no disk")


@virtual_time
async def test_a_turn_that_runs_ends_on_the_old_object_and_what_is_queued_runs_on_the_new_one() -> None:
    ran: list[str] = []

    class Old(Counter):
        @Host.handler
        async def wait(self, message: Wait) -> str:
            await asyncio.sleep(message.ms / 1_000)
            ran.append(type(self).__name__)
            return ""

    class New(Old):
        pass

    async with serving() as host:
        host.spots("cart/*", Old)
        await host.request("cart/1", Total())
        for _ in range(3):
            await host.send("cart/1", Wait(10))
        await asyncio.sleep(0.005)
        await host.move("cart/1", New)
        await host.request("cart/1", Total())
    assert ran == ["Old", "New", "New"]


def test_mistakes_of_set_up_name_what_to_do() -> None:
    host = make_host()
    for call, said in (
        (lambda: host.spots("a/*", Nothing), r"Nothing has no method marked with @Host\.handler.*'a/\*'"),
        (lambda: host.spots(Nothing), r"a pattern is text.*@host\.spots\('cart/\*'\)"),  # type: ignore[call-overload]
        (lambda: host.on(lambda message: None), "a pattern is text.*say it first"),  # type: ignore[arg-type]
        (lambda: host.spots("a/*", 5), r"host\.spots\('a/\*', \.\.\.\) takes a class"),  # type: ignore[call-overload]
        (lambda: host.on("a", int)(5), "a handler is a function, got 5"),  # type: ignore[type-var]
        (lambda: Host.handler(staticmethod(print)), "for a plain method"),
        (lambda: Host(clock=5), "clock must have the methods call_at, now_ms: 5 has no `call_at`"),  # type: ignore[arg-type]
        (lambda: Host(states=Shelf), r"states .* is a class: give one of it, Shelf\(\)"),  # type: ignore[arg-type]
        (lambda: Host(processors="x"), "processors must be ProcessorFigures"),  # type: ignore[arg-type]
        (lambda: Host(transport="tcp://x"), "transport must have the methods attach, .*no `attach`"),  # type: ignore[arg-type]
        (lambda: Host(profile="balanced"), r"one of JobProfile\.COMPACT, .*got 'balanced'"),
        (lambda: Host(owners={}), "owners must be of class OwnerLimits"),
        (lambda: Host(send_timeouts_ms={"spot": 5}), r"by SendFamily\.MESH, .*got 'spot'"),
    ):
        with pytest.raises(ValueError, match=said):
            call()
    assert Host(processors=ProcessorFigures(logical=2)).status().capacity.effective_processor_count == 2

    class Twice:
        @Host.handler
        def one(self, message: int) -> None: ...

        @Host.handler
        def two(self, message: str) -> None: ...

    with pytest.raises(ValueError, match=r"plain values have two handlers: .*one and .*two.*`int \| str`"):
        host.spot("a", Twice())


@virtual_time
async def test_a_class_without_handlers_may_have_functions_for_its_pattern() -> None:
    async with serving() as host:

        @host.on("note/*", int)
        def add(turn: Any, message: int) -> str:
            return type(turn.state).__name__

        host.spots("note/*", lambda_of(Nothing))
        assert await host.request("note/1", 1) == "Nothing"
        with pytest.raises(ValueError, match=r"host\.move takes a class"):
            await host.move("note/1", 5)  # type: ignore[arg-type]


def lambda_of(kind: type) -> Callable[[str], Any]:
    def make(spot: str) -> Any:
        return kind()

    make.__annotations__["return"] = kind
    return make
