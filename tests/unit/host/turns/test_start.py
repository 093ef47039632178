"""From the permit to the handler's first instruction: where it goes back, and what is decoded when."""

from __future__ import annotations

import asyncio
import logging
import weakref
from contextvars import ContextVar
from typing import Any

import pytest

from callyard.host.errors import HostErrorKind
from callyard.host.ledger import Lane
from callyard.host.owners import Callback
from callyard.testing.virtual_time import virtual_time
from callyard.transport.port import Record, SourceId
from tests.unit.host.turns.kit import Gatekeeper, World, one_way, request, rest

FORMS = ["coroutine", "plain", "object", "lambda"]


def handler_of(form: str, seen: list[Any], look: Any) -> Any:
    """The same first statement in each form that a handler can have."""

    async def coroutine(turn: Any, value: Any) -> str:
        seen.append(look())
        await asyncio.sleep(0)
        return "done"

    def plain(turn: Any, value: Any) -> str:
        seen.append(look())
        return "done"

    class Callable_:
        async def __call__(self, turn: Any, value: Any) -> str:
            seen.append(look())
            return "done"

    return {
        "coroutine": coroutine,
        "plain": plain,
        "object": Callable_(),
        "lambda": lambda turn, value: plain(turn, value),
    }[form]


@pytest.mark.requirement("R19")
@pytest.mark.parametrize("form", FORMS)
@virtual_time
async def test_first_statement_finds_its_own_permit_returned(form: str) -> None:
    world = World(jobs_max=1)
    seen: list[Any] = []
    world.add("a", handler_of(form, seen, lambda: world.in_use))
    world.ask("a")
    assert world.in_use == (0, 1)
    await rest()
    assert seen == [(0, 0)]
    assert world.replies.sent == [(1, "done")]
    world.check_empty()


@pytest.mark.requirement("R19")
@pytest.mark.parametrize("end", ["returns", "raises", "cancelled"])
@virtual_time
async def test_nothing_gives_a_permit_back_twice(end: str) -> None:
    world = World(jobs_max=2)

    async def handler(turn: Any, value: Any) -> None:
        if end == "raises":
            raise ValueError("no")
        if end == "cancelled":
            raise asyncio.CancelledError

    world.add("a", handler)
    other = world.jobs.try_acquire()
    world.send("a")
    await rest()
    assert other is not None
    assert world.in_use == (1, 0)  # the other one's: a second release would have taken it
    other.release()
    world.check_empty()


@pytest.mark.requirement("R19")
@virtual_time
async def test_no_other_code_runs_between_release_and_first_instruction() -> None:
    world = World(jobs_max=1)
    order: list[str] = []

    async def handler(turn: Any, value: Any) -> None:
        order.append("handler")

    world.add("a", handler)
    permit = world.jobs.try_acquire()
    assert permit is not None
    release = permit.release

    class Watched:
        def to_queued(self) -> None:
            permit.to_queued()

        def release(self) -> None:
            release()
            order.append("released")
            asyncio.get_running_loop().call_soon(order.append, "loop")

    world.owners.commit(one_way("a"), Watched())  # type: ignore[arg-type]
    await rest()
    assert order == ["released", "handler", "loop"]


@pytest.mark.requirement("R17")
@virtual_time
async def test_the_permit_stays_with_its_record_while_the_gate_is_busy() -> None:
    world = World(jobs_max=3)
    keeper = Gatekeeper()
    world.add("a", keeper)
    for payload in (b"1", b"2", b"3"):
        world.send("a", payload)
    assert world.in_use == (0, 3)
    await rest()
    assert keeper.began == [b"1"]
    assert world.in_use == (0, 2)
    await asyncio.sleep(60)
    assert world.in_use == (0, 2)
    keeper.let_go()
    await rest()
    assert keeper.ended == [b"1", b"2", b"3"]
    assert keeper.inside_max == 1
    world.check_empty()


@pytest.mark.requirement("R21")
@virtual_time
async def test_what_comes_after_the_start_takes_no_new_permit() -> None:
    world = World(jobs_max=1)
    began: list[str] = []
    acquired: list[str] = []
    world.jobs._may_wait = lambda: acquired.append("acquire")

    async def slow(turn: Any, value: Any) -> str:
        began.append("slow")
        await asyncio.sleep(10)
        await asyncio.sleep(10)
        began.append("slow ends")
        return "late"

    def quick(turn: Any, value: Any) -> None:
        began.append("quick")

    world.add("slow", slow)
    world.add("quick", quick)
    world.replies.on_reply = lambda record, outcome: asyncio.sleep(5)
    world.ask("slow")
    await rest()
    world.send("quick")  # by the one permit that there is
    await rest()
    blocker = world.jobs.try_acquire()
    await asyncio.sleep(60)
    assert began == ["slow", "quick", "slow ends"]
    assert len(acquired) == 3  # two records and the blocker
    assert blocker is not None
    blocker.release()
    world.check_empty()


@pytest.mark.requirement("R44")
@virtual_time
async def test_a_payload_is_decoded_once_and_only_in_its_turn() -> None:
    world = World()
    keeper = Gatekeeper()
    decoded: list[bytes] = []
    in_span: list[bool] = []

    def decode(record: Record) -> bytes:
        decoded.append(record.payload)
        in_span.append(world.owners._in_span)
        return record.payload

    world.decode = decode
    world.add("a", keeper)
    world.send("a", b"1")
    world.send("a", b"2")
    assert decoded == []
    await rest()
    assert decoded == [b"1"]  # the gate is the first one's
    keeper.let_go()
    await rest()
    assert decoded == [b"1", b"2"]
    assert in_span == [False, False]


@pytest.mark.requirement("R47", "R20")
@virtual_time
async def test_records_of_every_source_release_at_the_same_point() -> None:
    world = World(jobs_max=5)
    seen: list[Any] = []
    world.add("a", lambda turn, value: seen.append(world.in_use))
    for source in ("stream", "mesh", "client", "fanout", "service"):
        world.commit(Record(one_way("a").kind, SourceId(source), "a"))
    await rest()
    assert seen == [(0, 4), (0, 3), (0, 2), (0, 1), (0, 0)]


@pytest.mark.requirement("R99")
@pytest.mark.parametrize("size", [0, 8 * 1_024 * 1_024])
@virtual_time
async def test_payloads_of_any_size_are_one_job(size: int) -> None:
    world = World()
    keeper = Gatekeeper()
    world.add("busy", keeper)
    world.send("busy")
    await rest()
    world.send("busy", bytes(size))
    assert world.in_use == (0, 1)
    keeper.let_go()
    await rest()
    world.check_empty()


@pytest.mark.parametrize("end", ["returns", "raises", "refuses", "cancelled"])
@virtual_time
async def test_a_payload_is_freed_at_the_end_of_its_turn(end: str, caplog: pytest.LogCaptureFixture) -> None:
    class Value:
        pass

    caplog.set_level(logging.CRITICAL, "callyard.host")  # a record that a log keeps holds the frames of the failure
    world = World()
    alive: list[weakref.ref[Value]] = []
    kept: list[Any] = []

    def decode(record: Record) -> Value:
        value = Value()
        alive.append(weakref.ref(value))
        return value

    async def handler(turn: Any, value: Value) -> None:
        kept.append(turn)
        await asyncio.sleep(0)
        if end == "raises":
            raise ValueError(str(value))
        if end == "cancelled":
            raise asyncio.CancelledError

    world.decode = decode
    world.add("a", handler)
    world.ask("a", b"x", operation_id=7)
    await rest()
    assert [ref() for ref in alive] == [None]
    assert kept[0].is_over
    assert kept[0].record is None


@virtual_time
async def test_each_turn_has_a_context_of_its_own() -> None:
    world = World()
    variable: ContextVar[str] = ContextVar("variable", default="nobody's")
    seen: list[str] = []

    def plain(turn: Any, value: bytes) -> None:
        seen.append(variable.get())
        variable.set(value.decode())

    async def waits(turn: Any, value: bytes) -> None:
        seen.append(variable.get())
        variable.set(value.decode())
        await asyncio.sleep(1)
        seen.append(variable.get())

    world.add("plain", plain)
    world.add("waits", waits)
    for payload in (b"1", b"2"):
        world.send("plain", payload)
    await rest()
    assert seen == ["nobody's", "nobody's"]
    seen.clear()
    for payload in (b"1", b"2"):
        world.send("waits", payload)
    await asyncio.sleep(10)
    assert seen == ["nobody's", "1", "nobody's", "2"]


@virtual_time
async def test_lifecycle_work_is_told_its_value_once() -> None:
    world = World()
    world.add("a", lambda turn, value: None)
    told: list[Any] = []

    async def dump(turn: Any) -> str:
        assert turn.record is None
        assert turn.holds_gate
        return f"state of {turn.owner}"

    assert world.owners.submit_local("a", Callback(dump, on_end=told.append), Lane.LIFECYCLE) is None
    await rest()
    assert told == ["state of a"]
    world.check_empty()


@pytest.mark.requirement("R46", "R37")
@virtual_time
async def test_a_swallowed_wake_up_loses_no_work() -> None:
    world = World()
    ran: list[bytes] = []
    world.add("a", lambda turn, value: ran.append(value))
    world.add("b", lambda turn, value: ran.append(value))
    await rest()
    told = world.turns.on_ready
    world.turns.on_ready = lambda: None  # type: ignore[method-assign]
    world.send("a", b"a")
    world.turns.on_ready = told  # type: ignore[method-assign]
    await asyncio.sleep(1)
    assert ran == []
    world.send("b", b"b")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert ran == [b"a", b"b"]  # and no timer was needed
    world.check_empty()


@pytest.mark.requirement("R107")
@pytest.mark.parametrize("cause", ["cancelled", "expired", "destroyed", "undecodable", "refuses to decode"])
@virtual_time
async def test_an_end_before_the_handler_gives_the_permit_back_once(cause: str) -> None:
    world = World(jobs_max=1)
    keeper = Gatekeeper()
    world.add("a", keeper)
    world.add("b", keeper)
    world.send("b", b"other")
    await rest()
    if cause == "undecodable":
        world.decode = lambda record: record.payload.decode("ascii")
    if cause in ("cancelled", "destroyed", "expired"):  # it is queued behind a turn
        world.send("a", b"first")
        await rest()
    world.ask("a", b"\xff", operation_id=7, deadline_at_ms=world.timers.now_ms() + 50 if cause == "expired" else None)
    if cause == "cancelled":
        assert world.owners.cancel(SourceId("peer"), 7)
        assert not world.owners.cancel(SourceId("peer"), 7)
    elif cause == "destroyed":
        assert world.owners.remove("a")
    elif cause == "refuses to decode":
        world.decode = lambda record: (_ for _ in ()).throw(ValueError("no"))
    elif cause == "expired":
        await asyncio.sleep(0.2)
        assert world.in_use == (0, 1)
        keeper.let_go()
    await rest()
    assert world.in_use == (0, 0)
    expected = {"cancelled": None, "expired": HostErrorKind.DEADLINE_EXCEEDED, "destroyed": HostErrorKind.NOT_FOUND}
    kind = expected.get(cause, HostErrorKind.PROTOCOL_ERROR)
    assert world.replies.sent == ([] if kind is None else [(7, kind)])
    assert b"\xff" not in keeper.began
    world.decode = lambda record: record.payload
    world.send("b", b"next")  # by the one permit that there is
    keeper.let_go()
    await rest()
    assert keeper.ended[-1] == b"next"
    world.check_empty()


@pytest.mark.requirement("R60")
@pytest.mark.parametrize("is_request", [True, False])
@pytest.mark.parametrize("fault", ["bad header", "bad codec", "bad payload"])
@virtual_time
async def test_malformed_never_reaches_a_handler(fault: str, is_request: bool) -> None:
    world = World()
    began: list[Any] = []

    def decode(record: Record) -> Any:
        if record.content_type != "json":
            raise LookupError(f"no codec for {record.content_type!r}")
        if not record.message_type:
            raise KeyError("message_type")
        return record.payload.decode("ascii")

    world.decode = decode
    world.add("a", lambda turn, value: began.append(value))
    fields: dict[str, Any] = {"message_type": "m", "payload": b"ok"}
    fields |= {
        "bad header": {"message_type": ""},
        "bad codec": {"content_type": "xml"},
        "bad payload": {"payload": b"\xff"},
    }[fault]
    record = request("a", operation_id=7, **fields) if is_request else one_way("a", **fields)
    world.commit(record)
    await rest()
    assert began == []
    assert world.turns.statistics().decode_errors == 1
    assert world.lost == [(record.kind, HostErrorKind.PROTOCOL_ERROR)]
    assert world.replies.sent == ([(7, HostErrorKind.PROTOCOL_ERROR)] if is_request else [])
    world.check_empty()
