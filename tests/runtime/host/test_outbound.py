"""Sends, publishes and requests, from the caller to the owner's queue or the transport."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import permutations
from typing import Any

import pytest

import callyard.host.outbound
import callyard.host.waiters
from callyard.host.config import SendFamily
from callyard.host.drops import Dropped, DropReason
from callyard.host.errors import HostError, HostErrorKind
from callyard.host.outbound import Outbound, Sending
from callyard.host.waiters import Waiters
from callyard.testing.scripted_transport import HOLD
from callyard.transport.port import Completion, OutgoingKind, Record, RecordKind, TransportRefused
from tests.runtime.host.outbound_world import LOCAL, OutboundWorld, hosted, kind_of


async def full_world(**settings: Any) -> OutboundWorld:
    """A spot whose handler waits, and whose lane is full behind it."""
    world = OutboundWorld(**settings)
    world.spot("full", blocked=True)
    for n in range(world.owners.limits.application_items_max):
        await world.send("full", f"full-{n}")
    await world.settle()
    assert world.ran == ["full-0"]
    return world


# --- R78, R79: one operation ---


@pytest.mark.requirement("R78")
@hosted
async def test_one_operation_for_each_send_whatever_the_pressure() -> None:
    world = OutboundWorld()
    world.transport.on_start = lambda outgoing: HOLD
    sends = [asyncio.ensure_future(kind_of(world.send_remote("peer", str(n)))) for n in range(1_000)]
    await world.settle()
    assert [started.outgoing.message_type for started in world.transport.started] == [str(n) for n in range(1_000)]
    assert len(world.waiters) == 0  # bytes and paused peers are the operation's business
    for started in world.transport.started:
        started.accept()
    assert await asyncio.gather(*sends) == [None] * 1_000
    assert world.transport.counts["start"] == 1_000
    world.assert_quiet()


@pytest.mark.requirement("R79")
@hosted
async def test_after_the_start_no_other_member_is_picked() -> None:
    """Two members of a channel, the chosen one paused: the call waits, and ends with its operation."""
    world = OutboundWorld()
    members = iter(["paused", "free"])
    world.transport.on_start = lambda outgoing: HOLD if outgoing.target == "paused" else None

    def submit(deadline_at_ms: int) -> Awaitable[None]:
        return world.start(next(members))(deadline_at_ms)

    sending = asyncio.ensure_future(kind_of(world.outbound.send(SendFamily.CHANNEL, "channel", submit)))
    await world.settle()
    world.time_out(world.transport.started[0])
    assert await sending is HostErrorKind.DEADLINE_EXCEEDED
    assert [started.outgoing.target for started in world.transport.started] == ["paused"]
    assert next(members) == "free"


@hosted
async def test_before_the_start_another_member_may_be_picked() -> None:
    world = OutboundWorld()
    room = [False, False]

    def submit(deadline_at_ms: int) -> HostErrorKind | Awaitable[None]:
        free = [n for n in range(2) if room[n]]
        return world.start(f"member-{free[0]}")(deadline_at_ms) if free else HostErrorKind.CAPACITY_EXCEEDED

    sending = asyncio.ensure_future(kind_of(world.outbound.send(SendFamily.CHANNEL, "channel", submit)))
    await world.settle()
    room[1] = True
    world.waiters.admit("channel")
    assert await sending is None
    assert [outgoing.target for outgoing in world.transport.accepted()] == ["member-1"]


@pytest.mark.requirement("R80")
@hosted
async def test_there_is_no_send_ready_no_readiness_waiter_and_no_retry() -> None:
    names = [*dir(Outbound), *dir(Sending), *dir(Waiters), *dir(callyard.host.outbound), *dir(callyard.host.waiters)]
    words = ("ready", "retry", "resend", "writable")
    assert [name for name in names if any(word in name.lower() for word in words)] == []
    world = OutboundWorld()
    world.transport.on_start = lambda outgoing: HOLD
    sends = [world.send_remote("peer") for _ in range(1_000)]
    await asyncio.sleep(3_600)
    assert world.transport.counts["start"] == 1_000
    for started in world.transport.started:
        started.refuse("timeout")
    await world.settle()
    assert {await kind_of(sending) for sending in sends} == {HostErrorKind.DEADLINE_EXCEEDED}
    assert world.transport.counts["start"] == 1_000


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("not_found", HostErrorKind.NOT_FOUND),
        ("not_connected", HostErrorKind.UNAVAILABLE),
        ("timeout", HostErrorKind.DEADLINE_EXCEEDED),
        ("terminated", HostErrorKind.SHUTTING_DOWN),
        ("a reason of tomorrow", HostErrorKind.INTERNAL_FAILURE),
    ],
)
@pytest.mark.parametrize("is_raised", [False, True])
def test_why_an_operation_was_not_taken_is_told_by_type(reason: str, kind: HostErrorKind, is_raised: bool) -> None:
    @hosted
    async def run() -> None:
        world = OutboundWorld()

        def start(outgoing: object) -> str:
            if is_raised:
                raise TransportRefused(reason)
            return reason

        world.transport.on_start = start
        assert await kind_of(world.send_remote("peer")) is kind
        assert await kind_of(world.request_remote("peer")) is kind
        await world.outbound.publish(SendFamily.MULTICAST, [world.start("peer")])
        assert sum(world.drops.counts.values()) == 1
        world.assert_quiet()

    run()


# --- R83, R84: stages ---


@pytest.mark.requirement("R83", "R84")
@hosted
async def test_at_a_full_queue_a_send_waits_and_a_request_does_not() -> None:
    world = await full_world()
    sending = world.send("full", "waits")
    assert await kind_of(world.request("full", "request")) is HostErrorKind.CAPACITY_EXCEEDED
    assert world.timers.now_ms() == 0
    assert sending.state.value == "under_way"
    world.gates["full"].set()
    assert await kind_of(sending) is None
    await world.settle()
    assert world.ran == ["full-0", "full-1", "waits"]
    world.assert_quiet()


@pytest.mark.requirement("R84")
@hosted
async def test_another_node_s_full_queue_is_unavailable() -> None:
    world = OutboundWorld()
    asking = asyncio.ensure_future(kind_of(world.request_remote("peer")))
    await world.settle()
    operation_id = world.transport.started[0].outgoing.operation_id
    assert world.outbound.complete(Completion(operation_id, error="unavailable", message="its queue is full"))
    assert await asking is HostErrorKind.UNAVAILABLE


@pytest.mark.parametrize("name", [kind.name for kind in HostErrorKind])
def test_each_kind_of_error_reply_is_read(name: str) -> None:
    error = callyard.host.outbound.read_error(Completion(1, error=name.lower(), message="why"))
    assert (error.kind.name, error.message) == (name, "why")


def test_an_error_reply_of_an_unknown_kind_is_a_protocol_error() -> None:
    error = callyard.host.outbound.read_error(Completion(1, error="tired"))
    assert error.kind is HostErrorKind.PROTOCOL_ERROR


@pytest.mark.requirement("R85", "R86")
@pytest.mark.parametrize(("freed_at_ms", "expected"), [(500, None), (1_100, HostErrorKind.DEADLINE_EXCEEDED)])
def test_room_in_time_is_one_delivery_and_room_too_late_is_none(
    freed_at_ms: int, expected: HostErrorKind | None
) -> None:
    @hosted
    async def run() -> None:
        world = await full_world()
        asyncio.get_running_loop().call_later(freed_at_ms / 1_000, world.gates["full"].set)
        assert await kind_of(world.send("full", "sent")) is expected
        assert world.timers.now_ms() == min(freed_at_ms, 1_000)
        await asyncio.sleep(10)
        assert world.ran.count("sent") == (expected is None)
        world.assert_quiet()

    run()


@pytest.mark.requirement("R118")
@pytest.mark.parametrize(("timeout_ms", "ends_at_ms"), [(200, 200), (0.2, 1), (5_000, 1_000), (None, 1_000)])
def test_the_shorter_of_two_send_timeouts_holds(timeout_ms: float | None, ends_at_ms: int) -> None:
    @hosted
    async def run() -> None:
        world = await full_world()
        assert await kind_of(world.send("full", "sent", timeout_ms=timeout_ms)) is HostErrorKind.DEADLINE_EXCEEDED
        assert world.timers.now_ms() == ends_at_ms
        with pytest.raises(ValueError, match="timeout_ms"):
            world.send("full", "sent", timeout_ms=0)

    run()


@pytest.mark.requirement("R118")
@hosted
async def test_each_remote_operation_is_told_its_deadline() -> None:
    world = OutboundWorld()
    await asyncio.sleep(2)
    await world.send_remote("peer")
    await world.outbound.publish(SendFamily.MULTICAST, [world.start("a"), world.start("b")])
    assert [outgoing.deadline_at_ms for outgoing in world.transport.accepted()] == [3_000] * 3


# --- R81: the first terminal ---


ENDS: dict[str, HostErrorKind | str] = {
    "room": "taken",
    "deadline": HostErrorKind.DEADLINE_EXCEEDED,
    "cancel": "cancelled",
    "detach": HostErrorKind.UNAVAILABLE,
    "shutdown": HostErrorKind.SHUTTING_DOWN,
}


@pytest.mark.requirement("R81")
@pytest.mark.parametrize("ends", list(permutations(ENDS, 2)), ids="-".join)
@pytest.mark.parametrize("apart", [False, True])
def test_the_first_terminal_wins(ends: tuple[str, str], apart: bool) -> None:
    """Each pair, in one step of the loop and in two: one outcome, at most one delivery, nothing later."""

    @hosted
    async def run() -> None:
        world = OutboundWorld()
        world.spot("full", blocked=True)
        await world.send("full", "full-0")
        filler = Record(RecordKind.REQUEST, LOCAL, "full", "full-1", operation_id=1_000)
        assert world.moving.submit("full", filler) is None

        async def wait() -> str | HostErrorKind:
            try:
                return await kind_of(world.send("full", "sent")) or "taken"
            except asyncio.CancelledError:
                return "cancelled"

        task = asyncio.ensure_future(wait())
        await world.settle()

        def end(how: str) -> None:
            if how == "room":
                assert world.moving.cancel(LOCAL, 1_000)
            elif how == "cancel":
                task.cancel()
            elif how == "detach":
                world.outbound.detach("full", "full")
            else:
                world.outbound.seal()

        if "deadline" in ends:
            first, second = ends
            at_s = 0.999 if second == "deadline" else 1.001
            other = first if second == "deadline" else second
            asyncio.get_running_loop().call_later(at_s, end, other)
        else:
            for how in ends:
                end(how)
                if apart:
                    await world.settle()
        outcome = await task
        expected = ENDS[ends[0]]
        if set(ends) == {"room", "cancel"} and not apart:
            assert outcome == "cancelled"  # either way the caller is gone; what was taken first stays taken
        elif "cancel" in ends and not apart and "deadline" not in ends:
            assert outcome in (expected, "cancelled")
        else:
            assert outcome == expected
        world.gates["full"].set()
        await asyncio.sleep(10)
        assert world.ran.count("sent") == (ends[0] == "room")
        assert len(world.waiters) == 0

    run()


@hosted
async def test_cancelling_a_running_operation_ends_only_the_wait() -> None:
    world = OutboundWorld()
    world.transport.on_start = lambda outgoing: HOLD
    task = asyncio.ensure_future(kind_of(world.send_remote("peer", "sent")))
    await world.settle()
    task.cancel()
    await world.settle()
    assert task.cancelled()
    assert world.transport.started[0].outcome == "running"
    world.transport.started[0].accept()
    await world.settle()
    assert [outgoing.message_type for outgoing in world.transport.accepted()] == ["sent"]
    assert world.drops.counts == {}
    world.assert_quiet()


@hosted
async def test_a_call_that_is_cancelled_before_it_begins_starts_nothing() -> None:
    world = OutboundWorld()
    world.spot("cart")

    async def call() -> None:
        await world.send("cart", "one-way")

    tasks = [asyncio.ensure_future(call()), asyncio.ensure_future(world.request("cart", "request"))]
    for task in tasks:
        task.cancel()
    await world.settle()
    assert (world.ran, world.transport.started, world.requests.status().withdrawn) == ([], [], 0)


@hosted
async def test_a_send_that_is_cancelled_by_itself_is_never_sent() -> None:
    world = await full_world()
    sending = world.send("full", "sent")
    assert sending.cancel()
    assert not sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    world.gates["full"].set()
    await world.settle()
    assert "sent" not in world.ran
    world.assert_quiet()


# --- R87, R88: after completion, and without authority ---


@pytest.mark.requirement("R87")
@hosted
async def test_what_fails_after_a_call_completed_is_only_counted() -> None:
    world = await full_world()
    world.spot("free")
    world.transport.on_start = lambda outgoing: "not_connected" if outgoing.target == "gone" else None

    def to(key: str) -> Callable[[int], HostErrorKind | None]:
        record = world.record("published", key)
        return world.submit(key, record)

    await world.outbound.publish(SendFamily.MULTICAST, [to("full"), to("free"), to("nobody"), world.start("gone")])
    await world.settle()
    assert world.ran.count("published") == 1
    assert world.timers.now_ms() == 0
    assert world.drops.counts == {
        Dropped("publish", DropReason.BACKPRESSURE): 1,
        Dropped("publish", DropReason.STALE_TARGET): 2,
    }
    # A completed send that the other side refused: nothing comes back for it, whatever an error reply says.
    await world.send_remote("peer")
    assert not world.outbound.complete(Completion(1_000, error="unavailable"))
    # A reply that cannot be sent.
    world.transport.on_start = lambda outgoing: "terminated"
    world.outbound.reply(partial(world.start("peer", kind=OutgoingKind.REPLY), 0))
    await world.settle()
    assert world.drops.counts[Dropped("reply", DropReason.SHUTDOWN)] == 1


@pytest.mark.requirement("R88")
@hosted
async def test_waiting_work_holds_no_gate() -> None:
    world = await full_world()
    sends: list[Sending] = []

    def handler(turn: Any, name: str) -> str:
        if name == "relay":
            sends.append(world.send("full", "relayed"))
        return f"reply to {name}"

    world.spot("relay", handler)
    await world.send("relay", "relay")
    assert await world.request("relay", "question") == "reply to question"
    assert len(world.waiters) == 1
    world.gates["full"].set()
    await sends[0]
    await world.settle()
    assert world.ran[-1] == "relayed"
    world.assert_quiet()


@hosted
async def test_a_send_that_nobody_awaits_and_that_times_out_is_counted() -> None:
    world = await full_world()
    world.send("full", "left alone")
    await asyncio.sleep(2)
    assert world.drops.counts == {Dropped("one_way", DropReason.BACKPRESSURE): 1}


# --- R89, R90, R118: places, and what is never told ---


@pytest.mark.requirement("R89")
@hosted
async def test_one_more_than_the_places_fails_at_once() -> None:
    world = await full_world(slots=3)
    sends = [world.send("full", f"waits-{n}") for n in range(3)]
    assert await kind_of(world.send("full", "one more")) is HostErrorKind.DEADLINE_EXCEEDED
    assert world.timers.now_ms() == 0
    assert await kind_of(world.send("full", "of another family", family=SendFamily.STREAM, timeout_ms=1)) is not None
    world.gates["full"].set()
    for sending in sends:
        await sending
    assert world.drops.counts == {}


@pytest.mark.requirement("R90")
def test_backpressured_is_nothing_that_a_caller_is_told() -> None:
    names = [kind.name for kind in HostErrorKind] + [state.value for state in callyard.host.outbound.SendingState]
    assert [name for name in names if "pressure" in name.lower()] == []


# --- R103, R119: requests ---


@pytest.mark.requirement("R119")
@hosted
async def test_without_a_place_in_the_table_nothing_is_sent() -> None:
    world = OutboundWorld(requests_max=2)
    asking = [asyncio.ensure_future(kind_of(world.request_remote("peer"))) for _ in range(2)]
    await world.settle()
    assert await kind_of(world.request_remote("peer")) is HostErrorKind.CAPACITY_EXCEEDED
    assert (world.transport.counts["start"], world.timers.now_ms()) == (2, 0)
    assert await asyncio.gather(*asking) == [HostErrorKind.DEADLINE_EXCEEDED] * 2
    assert world.timers.now_ms() == 5_000
    world.assert_quiet()


@pytest.mark.requirement("R103")
@hosted
async def test_a_reply_behind_data_until_the_timeout_gives_one_terminal() -> None:
    world = OutboundWorld()
    asking = asyncio.ensure_future(kind_of(world.request_remote("peer")))
    assert await asking is HostErrorKind.DEADLINE_EXCEEDED
    operation_id = world.transport.started[0].outgoing.operation_id
    assert not world.outbound.complete(Completion(operation_id, b"late"))
    assert (world.requests.status().late, len(world.requests)) == (1, 0)
    world.assert_quiet()


@pytest.mark.requirement("R81", "R119")
@pytest.mark.parametrize(
    "ends", list(permutations(["reply", "refused", "detach", "shutdown", "cancel"], 2)), ids="-".join
)
def test_whoever_removes_a_request_owns_its_outcome(ends: tuple[str, str]) -> None:
    @hosted
    async def run() -> None:
        world = OutboundWorld()
        world.transport.on_start = lambda outgoing: HOLD
        task = asyncio.ensure_future(world.request_remote("peer"))
        await world.settle()
        started = world.transport.started[0]
        for how in ends:
            if how == "reply":
                world.outbound.complete(Completion(started.outgoing.operation_id, b"reply"))
            elif how == "refused":
                started.refuse("not_connected")
                await world.settle()
            elif how == "detach":
                world.outbound.detach("peer", "peer")
            elif how == "shutdown":
                world.outbound.close()
            else:
                task.cancel()
                await world.settle()
        expected = {"refused": HostErrorKind.UNAVAILABLE, "detach": HostErrorKind.UNAVAILABLE}
        outcome: Any
        try:
            outcome = (await task).payload
        except HostError as error:
            outcome = error.kind
        except asyncio.CancelledError:
            outcome = "cancelled"
        first = {"reply": b"reply", "shutdown": HostErrorKind.SHUTTING_DOWN, "cancel": "cancelled", **expected}[ends[0]]
        # A task that is cancelled before it has run again sees that; its outcome was delivered to nobody, once.
        assert outcome == first or (ends[1] == "cancel" and outcome == "cancelled")
        started.refuse("terminated")
        await world.settle()
        world.assert_quiet()

    run()


@hosted
async def test_a_local_request_is_answered_by_its_owner() -> None:
    world = OutboundWorld()
    world.spot("cart")
    assert await world.request("cart", "question") == "reply to question"
    assert await kind_of(world.request("nobody", "question")) is HostErrorKind.NOT_FOUND
    world.assert_quiet()


@hosted
async def test_a_sealed_host_refuses_sends_and_lets_requests_end() -> None:
    world = OutboundWorld()
    asking = asyncio.ensure_future(world.request_remote("peer"))
    await world.settle()
    world.outbound.seal()
    for call in (world.send_remote("peer"), world.request_remote("peer"), world.outbound.publish(SendFamily.MESH, [])):
        assert await kind_of(call) is HostErrorKind.SHUTTING_DOWN
    world.outbound.complete(Completion(world.transport.started[0].outgoing.operation_id, b"reply"))
    assert (await asking).payload == b"reply"
    world.outbound.close()
    world.assert_quiet()


# --- R92, R93, R104: four limits, four observations ---


def observe(world: OutboundWorld) -> dict[str, int]:
    waiting = world.waiters.status()[SendFamily.SPOT]
    return {
        "bytes": sum(started.outcome == "running" for started in world.transport.started),
        "jobs": world.jobs.status().waits,
        "owner": world.drops.of(DropReason.BACKPRESSURE),
        "waiters": waiting.refused,
    }


@pytest.mark.requirement("R92", "R104")
@pytest.mark.parametrize("limit", ["bytes", "jobs", "owner", "waiters"])
def test_each_of_four_limits_has_an_observation_of_its_own(limit: str) -> None:
    @hosted
    async def run() -> None:
        world = await full_world(slots=1, jobs_max=1)
        told: list[object] = []
        if limit == "bytes":  # the transport's queue: its one operation waits, and the call with it
            world.transport.on_start = lambda outgoing: HOLD
            world.send_remote("peer")
        elif limit == "jobs":  # the shared cap: who wants to receive waits, cancellably, without any error
            permit = world.jobs.try_acquire()
            assert permit is not None
            waiter = world.jobs.wait("source", lambda permit: None)
            assert waiter.cancel()
        elif limit == "owner":  # the structural limit: an error at once, and a publish skips it
            told.append(await kind_of(world.request("full", "request")))
            world.outbound.publish(SendFamily.MULTICAST, [world.submit("full", world.record("published", "full"))])
        else:  # places to wait: DeadlineExceeded at once
            world.send("full", "waits")
            told.append(await kind_of(world.send("full", "one more")))
        assert observe(world) == {name: int(name == limit) for name in ("bytes", "jobs", "owner", "waiters")}
        expected = {"owner": [HostErrorKind.CAPACITY_EXCEEDED], "waiters": [HostErrorKind.DEADLINE_EXCEEDED]}
        assert told == expected.get(limit, [])
        assert world.timers.now_ms() == 0

    run()


@pytest.mark.requirement("R93")
@hosted
async def test_with_everything_full_nothing_grows_polls_or_is_sent_again() -> None:
    world = await full_world(slots=8, jobs_max=1, requests_max=16)
    world.transport.on_start = lambda outgoing: HOLD
    assert world.jobs.try_acquire() is not None
    kinds: list[HostErrorKind | None] = []
    sends = [world.send("full", f"send-{n}", timeout_ms=1_000) for n in range(100)]
    asks = [asyncio.ensure_future(kind_of(world.request_remote("peer", timeout_ms=3_600_000))) for _ in range(100)]
    await world.settle()
    assert (len(world.waiters), len(world.requests), world.transport.counts["start"]) == (8, 16, 16)
    calls = 0
    loop = asyncio.get_running_loop()
    call_at = loop.call_at

    def counted(*arguments: Any, **settings: Any) -> Any:
        nonlocal calls
        calls += 1
        return call_at(*arguments, **settings)

    loop.call_at = counted  # type: ignore[method-assign]
    await asyncio.sleep(3_000)
    loop.call_at = call_at  # type: ignore[method-assign]
    assert calls == 1  # the test's own sleep
    for sending in sends:
        kinds.append(await kind_of(sending))
    assert kinds == [HostErrorKind.DEADLINE_EXCEEDED] * 100
    await asyncio.gather(*asks)
    assert world.transport.counts["start"] == 16
    world.gates["full"].set()
    await asyncio.sleep(1)
    assert world.ran == ["full-0", "full-1"]
