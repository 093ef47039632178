"""Typed messages: who handles what, what comes back, and what does not fit."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import pytest

from callyard.host.errors import HostError, HostErrorKind
from callyard.host.host import Host, SpotTurn
from callyard.testing.scripted_transport import ScriptedTransport
from callyard.testing.virtual_time import virtual_time
from callyard.transport.port import OutgoingKind
from tests.runtime.host.kit import Add, Counter, Fail, Total, add, drops, kind_of, make_host, serving, until


class Point(msgspec.Struct):
    x: int
    y: int


@dataclass
class Shift:
    by: int


@virtual_time
async def test_an_object_takes_what_its_methods_are_marked_for() -> None:
    async with serving() as host:
        host.spot("a", Counter())
        await host.send("a", Add(2))
        assert await host.request("a", Add(3), int) == 5
        assert await host.request("a", Total()) == 5


@virtual_time
async def test_functions_and_dataclasses_plain_values_and_replies_of_a_type() -> None:
    async with serving() as host:

        @host.on("points/*")
        def shift(turn: SpotTurn, message: Shift) -> Point:
            return Point(message.by, len(turn.spot))

        @host.on("points/*", dict)
        async def swap(message: dict[str, int]) -> dict[int, str]:
            return {value: key for key, value in message.items()}

        assert await host.request("points/1", Shift(7), Point) == Point(7, 8)
        assert await host.request("points/1", Shift(7)) == {"x": 7, "y": 8}
        assert await host.request("points/1", {"a": 1}) == {"1": "a"}
        assert await kind_of(host.request("points/1", Shift(7), int)) is HostErrorKind.PROTOCOL_ERROR


@virtual_time
async def test_unions_generics_and_optional_values_are_taken_by_each_of_their_names() -> None:
    class Mixed:
        @Host.handler
        def one(self, message: Point | Shift) -> str:
            return f"one {message}"

        @Host.handler(dict[str, int] | None | Annotated[str, msgspec.Meta(max_length=3)])
        def other(self, message: Any) -> str:
            return f"other {message}"

    async with serving() as host:
        host.spot("a", Mixed())
        assert await host.request("a", Point(1, 2)) == "one Point(x=1, y=2)"
        assert (await host.request("a", Shift(1))).endswith("Shift(by=1)")
        assert await host.request("a", {"b": 1}) == "other {'b': 1}"
        assert await host.request("a", None) == "other None"
        assert await host.request("a", "abc") == "other abc"
        for bad in ("abcd", {"b": "c"}, [1]):
            assert await kind_of(host.request("a", bad)) is HostErrorKind.PROTOCOL_ERROR


@virtual_time
async def test_a_function_is_a_spot_and_takes_what_it_can_read() -> None:
    seen: list[Any] = []

    def echo(turn: SpotTurn, message: Any) -> Any:
        seen.append((turn.spot, turn.state, turn.is_current, turn.number))
        return message

    async with serving() as host:
        host.spot("echo", echo)
        assert await host.request("echo", [1, "a", None]) == [1, "a", None]
        assert await host.request("echo", Add(1)) == {"count": 1}
    (first, second) = seen
    assert first[:3] == ("echo", None, True)
    assert second[3] > first[3], "numbers of turns rise"


@virtual_time
async def test_the_most_telling_pattern_wins_and_an_exact_one_most_of_all() -> None:
    async with serving() as host:
        for pattern in ("*", "cart/*", "cart/*/items", "cart/1/items"):
            host.on(pattern)(lambda message, pattern=pattern: pattern)
        for spot, pattern in (
            ("cart/1/items", "cart/1/items"),
            ("cart/2/items", "cart/*/items"),
            ("cart/2", "cart/*"),
            ("wagon", "*"),
        ):
            assert await host.request(spot, None) == pattern


@virtual_time
async def test_a_payload_is_copied_on_its_way() -> None:
    kept: list[Any] = []
    async with serving() as host:
        host.spot("a", lambda message: kept.append(message))
        sent = {"items": [1]}
        await host.send("a", sent)
        sent["items"].append(2)
        await until(lambda: bool(kept))
    assert kept == [{"items": [1]}]


@virtual_time
async def test_what_cannot_be_sent_is_refused_before_anything() -> None:
    async with serving() as host:
        host.spot("a", Counter())
        with pytest.raises(HostError, match="object cannot be sent as JSON") as caught:
            host.send("a", object())
        assert caught.value.kind is HostErrorKind.TYPE_MISMATCH
        for bad in ("", "a*", "x" * 256, "é" * 128):
            with pytest.raises(ValueError, match="1 to 255 bytes"):
                host.send(bad, Add(1))


@pytest.mark.requirement("R42")
@virtual_time
async def test_a_request_is_told_why() -> None:
    async with serving() as host:
        host.spot("a", Counter())
        assert await kind_of(host.request("nobody", Add(1))) is HostErrorKind.NOT_FOUND
        assert await kind_of(host.request("a", Shift(1))) is HostErrorKind.NOT_FOUND
        assert await kind_of(host.request("a", Fail())) is HostErrorKind.INTERNAL_FAILURE
        with pytest.raises(HostError, match="ValueError: bad"):
            await host.request("a", Fail())
        assert await host.request("a", Add(1), int) == 1, "a failure ends its own turn and no other"


@pytest.mark.requirement("R60")
@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"payload": b"{", "message_type": "Add"}, "protocol_error"),
        ({"payload": b'{"count":"many"}', "message_type": "Add"}, "protocol_error"),
        ({"payload": add(), "message_type": "Add", "content_type": "msgpack"}, "protocol_error"),
        ({"payload": add(), "message_type": "Shift"}, "not_found"),
    ],
    ids=["no JSON", "not of its type", "unknown content type", "no handler"],
)
def test_what_cannot_be_read_reaches_no_handler(fields: dict[str, Any], kind: str) -> None:
    @virtual_time
    async def run() -> None:
        transport = ScriptedTransport()
        source = transport.add_source("peer")
        counter = Counter()
        async with serving(transport, jobs_max=1) as host:
            host.spot("a", counter)
            source.one_way("a", **fields)
            source.request("a", operation_id=9, **fields)
            source.request("a", add(4), operation_id=10, message_type="Add")
            await until(lambda: len(transport.accepted()) == 2)
            refused, answered = transport.accepted()
            assert (refused.operation_id, refused.error) == (9, kind)
            assert (answered.operation_id, answered.error, answered.payload) == (10, "", b"4")
            reason = "no_handler" if kind == "not_found" else "decode_error"
            assert drops(host) == {("one_way", reason): 1, ("request", reason): 1}
        assert counter.seen == [4]

    run()


@virtual_time
async def test_a_publish_reaches_the_spots_of_a_pattern() -> None:
    async with serving() as host:
        counters = {spot: Counter(spot) for spot in ("cart/1", "cart/2", "wagon/1")}
        for spot, counter in counters.items():
            host.spot(spot, counter)
        host.spots("cart/new", Counter)  # not made yet, and reached
        await host.publish("cart/*", Add(1))
        await host.publish("wagon/1", Add(5))
        await host.publish("nobody/*", Add(9))
        assert await host.request("cart/new", Total()) == 1
        assert [await host.request(spot, Total()) for spot in counters] == [1, 1, 5]


@virtual_time
async def test_what_is_not_here_goes_by_the_transport() -> None:
    transport = ScriptedTransport()
    source = transport.add_source("peer")
    async with serving(transport) as host:
        host.spot("here", Counter())
        await host.send("there", Add(1))
        await host.publish("*", Add(2))
        asked = asyncio.ensure_future(host.request("there", Total(), int))
        await until(lambda: len(transport.accepted()) == 3)
        sent, published, request = transport.accepted()
        assert (sent.kind, sent.target, sent.message_type, sent.payload) == (
            OutgoingKind.ONE_WAY,
            "there",
            "Add",
            add(1),
        )
        assert (published.kind, published.target) == (OutgoingKind.PUBLISH, "*")
        source.complete(request.operation_id, b"7")
        assert await asked == 7
        transport.on_start = lambda outgoing: "not_found"
        assert await kind_of(host.send("there", Add(1))) is HostErrorKind.NOT_FOUND
        assert await kind_of(host.request("there", Add(1))) is HostErrorKind.NOT_FOUND


def test_mistakes_of_set_up_are_told() -> None:
    class Twice:
        @Host.handler
        def one(self, message: Add) -> None: ...

        @Host.handler
        def two(self, message: Add) -> None: ...

    class Nothing:
        pass

    host = make_host()
    with pytest.raises(ValueError, match=r"has two handlers: .*one and .*two"):
        host.spot("a", Twice())
    with pytest.raises(ValueError, match=r"no method marked with @Host\.handler"):
        host.spot("a", Nothing())
    with pytest.raises(ValueError, match=r"Counter is a class: host.spots\('a', Counter\)"):
        host.spot("a", Counter)
    with pytest.raises(ValueError, match=r"takes \(message\) or \(turn, message\)"):
        host.on("a")(lambda: None)
    with pytest.raises(ValueError, match="is no Struct, no dataclass and no plain value"):
        host.on("a", Twice)(lambda message: None)
    with pytest.raises(ValueError, match="annotate the class that it returns"):
        host.spots("a", lambda spot: Counter())
    with pytest.raises(ValueError, match="has no setting 'jobs_maximum'"):
        make_host(jobs_maximum=3)
    host.spot("a", Counter())
    with pytest.raises(HostError, match="there is a spot 'a' already"):
        host.spot("a", Counter())
    with pytest.raises(ValueError, match="has a handler for Add already"):
        host.on("a", Add)(lambda message: None)
