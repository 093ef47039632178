"""What handlers do wrong, and what ends around them: their own turn ends, once, and everybody else goes on."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
from typing import Any

import pytest

from callyard.host.context import current_turn, forbid_under_gate
from callyard.host.errors import HostError, HostErrorKind
from callyard.host.ledger import Lane, OwnerLimits
from callyard.host.owners import Callback
from callyard.host.turns import ABANDON_MS, STRETCH_TURNS_MAX, Turn
from callyard.testing.virtual_time import run_virtual, virtual_time
from callyard.transport.port import SourceId
from tests.unit.host.turns.kit import Gatekeeper, World, one_way, rest, spend


async def cancels_itself(turn: Any, value: Any) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(1)


async def cancels_itself_and_returns(turn: Any, value: Any) -> str:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    return "returned"


def cancels_from_a_plain_function(turn: Any, value: Any) -> str:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    return "returned"


async def raises(turn: Any, value: Any) -> None:
    raise ValueError("broken")


async def raises_later(turn: Any, value: Any) -> None:
    await asyncio.sleep(1)
    raise ValueError("broken")


def raises_at_once(turn: Any, value: Any) -> None:
    raise StopIteration


def raises_cancelled(turn: Any, value: Any) -> None:
    raise asyncio.CancelledError


def takes_nothing() -> None: ...


async def refuses(turn: Any, value: Any) -> None:
    raise HostError(HostErrorKind.REJECTED, "not today")


INTERNAL = HostErrorKind.INTERNAL_FAILURE


@pytest.mark.parametrize(
    ("handler", "outcome"),
    [
        (cancels_itself, INTERNAL),
        (cancels_itself_and_returns, "returned"),
        (cancels_from_a_plain_function, "returned"),
        (raises, INTERNAL),
        (raises_later, INTERNAL),
        (raises_at_once, INTERNAL),
        (raises_cancelled, INTERNAL),
        (takes_nothing, INTERNAL),
        (refuses, HostErrorKind.REJECTED),
    ],
)
@virtual_time
async def test_a_bad_handler_ends_its_own_turn_only(handler: Any, outcome: Any) -> None:
    world = World(jobs_max=10)
    world.add("bad", handler)
    world.add("good", lambda turn, value: value.decode())
    for number in range(3):
        world.ask("bad", operation_id=number)
        world.ask("good", b"fine", operation_id=10 + number)
    await asyncio.sleep(10)
    assert sorted(world.replies.sent) == sorted(
        [(number, outcome) for number in range(3)] + [(10 + number, "fine") for number in range(3)], key=str
    ) or dict(world.replies.sent) == dict.fromkeys(range(3), outcome) | {10 + n: "fine" for n in range(3)}
    assert len(world.replies.sent) == 6
    assert world.turns.statistics().failed == (0 if outcome == "returned" else 3)
    world.check_empty()


class OfNobody(BaseException):
    pass


@pytest.mark.parametrize("kind", [OfNobody, GeneratorExit, StopIteration, StopAsyncIteration, MemoryError])
@pytest.mark.parametrize("when", ["plain", "at once", "later"])
@virtual_time
async def test_whatever_a_handler_raises_ends_its_turn_and_nobody_else_hears_of_it(
    when: str, kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    ran: list[bytes] = []
    world.add("a", lambda turn, value: ran.append(value))
    caught: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: caught.append(context))

    def plain(turn: Any, value: Any) -> None:
        raise kind

    async def ends(turn: Any, value: Any) -> None:
        if when == "later":
            await asyncio.sleep(0.001)
        raise kind

    world.add("bad", plain if when == "plain" else ends)
    for operation_id in (1, 2):
        world.ask("bad", operation_id=operation_id)
    world.send("a", b"x")
    await asyncio.sleep(0.01)
    assert world.replies.sent == [(1, INTERNAL), (2, INTERNAL)]
    assert ran == [b"x"]
    world.check_empty()
    gc.collect()
    await rest()
    assert (caught, caplog.text.count("a handler of 'bad' failed")) == ([], 2)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_a_handler_that_ends_the_process_ends_its_turn_first(kind: type[BaseException]) -> None:
    ran: list[Any] = []

    async def run() -> None:
        world = World()
        ran.append(world)

        async def ends(turn: Any, value: Any) -> None:
            await asyncio.sleep(0)
            raise kind

        world.add("bad", ends)
        world.ask("bad", operation_id=1)
        await asyncio.sleep(60)

    with pytest.raises(kind):
        run_virtual(run())
    (world,) = ran
    assert world.replies.sent == [(1, INTERNAL)]
    assert world.owners.is_quiet
    assert world.owners.is_empty


@virtual_time
async def test_an_exception_that_has_no_text_ends_its_turn_like_any_other() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    world = World()

    def fail(turn: Any, value: Any) -> None:
        raise HostError(HostErrorKind.DATA_LOST, "x" * 1_000_000) if value == b"long" else Mute

    world.add("bad", fail)
    texts: list[str] = []
    world.replies.on_reply = lambda record, outcome: texts.append(str(outcome))
    for operation_id in (1, 2):
        world.ask("bad", operation_id=operation_id)
    world.ask("bad", b"long", operation_id=3)
    await rest()
    assert texts[:2] == ["INTERNAL_FAILURE: a handler of 'bad' failed: Mute: (its text cannot be read)"] * 2
    assert len(texts[2]) < 3_000
    world.check_empty()


@pytest.mark.parametrize("when", ["before", "after"])
@virtual_time
async def test_a_reply_that_cannot_be_sent_is_answered_by_an_error(when: str, caplog: pytest.LogCaptureFixture) -> None:
    world = World()

    async def fail() -> None:
        raise OSError("gone")

    def on_reply(record: Any, outcome: Any) -> Any:
        if isinstance(outcome, HostError):
            return None
        if when == "before":
            raise TypeError("no codec for object")
        return fail()

    world.replies.on_reply = on_reply
    world.add("a", lambda turn, value: object())
    world.ask("a", operation_id=1)
    await rest()
    assert [(number, outcome) for number, outcome in world.replies.sent if isinstance(outcome, HostErrorKind)] == (
        [(1, INTERNAL)] if when == "before" else []
    )
    assert "reply" in caplog.text
    world.check_empty()


@virtual_time
async def test_one_answer_for_one_request() -> None:
    world = World()
    errors: list[HostErrorKind] = []
    turns: list[Turn] = []

    async def answer(turn: Turn, value: bytes) -> str:
        turns.append(turn)
        for number in range(2):
            try:
                await turn.reply(number)
            except HostError as error:
                errors.append(error.kind)
        return "nobody's"

    world.add("a", answer)
    world.ask("a", operation_id=5)
    await rest()
    assert world.replies.sent == [(5, 0)]
    world.send("a")
    await rest()
    assert world.replies.sent == [(5, 0)]
    with pytest.raises(HostError, match="it is over"):
        await turns[0].reply(1)
    assert errors == [HostErrorKind.INVALID_OPERATION] * 3


@pytest.mark.requirement("R38", "R112")
@virtual_time
async def test_the_loop_gets_its_turn_while_turns_go_on() -> None:
    """Work that never waits, and never takes time either, as on a clock that stands still."""
    world = World(limits=OwnerLimits(application_items_max=10_000))
    ran: list[bytes] = []
    world.add("a", lambda turn, value: ran.append(value))
    for number in range(1_000):
        assert world.owners.submit_local("a", one_way("a", str(number).encode())) is None
    completed_after: list[int] = []
    loop = asyncio.get_running_loop()
    await asyncio.sleep(0)
    while len(ran) < 1_000:
        before = len(ran)
        loop.call_soon(lambda: completed_after.append(len(ran)))
        await asyncio.sleep(0)
        assert len(ran) - before <= STRETCH_TURNS_MAX
    assert max(b - a for a, b in itertools.pairwise(completed_after)) <= 2 * STRETCH_TURNS_MAX
    assert ran == [str(number).encode() for number in range(1_000)]
    world.check_empty()


@virtual_time
async def test_a_handler_that_feeds_itself_starves_nobody() -> None:
    world = World()
    ran = {"a": 0, "b": 0}
    stop = asyncio.Event()

    def feed(turn: Turn, value: Any) -> None:
        ran["a"] += 1
        spend(3)
        if not stop.is_set():
            assert world.owners.submit_local("a", one_way("a")) is None

    def other(turn: Turn, value: Any) -> None:
        ran["b"] += 1
        stop.set()

    world.add("a", feed)
    world.add("b", other)
    world.send("a")
    for _ in range(10):
        await asyncio.sleep(0)
    world.send("b")
    before = ran["a"]
    await rest()
    assert ran["b"] == 1
    assert ran["a"] - before <= 5  # 10 ms, 3 ms each, and the one that was in
    world.check_empty()


@pytest.mark.requirement("R49")
@virtual_time
async def test_local_work_needs_no_permit() -> None:
    """At M=1, with the one permit held by somebody else for ever: relay, publish to oneself, lifecycle work."""
    world = World(jobs_max=1)
    ran: list[str] = []

    async def relay(turn: Turn, value: Any) -> None:
        blocker = None if current_turn() is None else world.in_use
        ran.append(f"a {blocker}")
        assert world.owners.submit_local("b", one_way("b", b"relayed")) is None
        assert world.owners.submit_local("a", one_way("a", b"to itself")) is None
        moved = Callback(lambda turn: ran.append(f"moves {turn.owner}"))
        assert world.owners.submit_local("b", moved, Lane.LIFECYCLE) is None

    world.add("a", lambda turn, value: relay(turn, value) if value == b"first" else ran.append(value.decode()))
    world.add("b", lambda turn, value: ran.append(value.decode()))
    world.send("a", b"first")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    blocker = world.jobs.try_acquire()
    await rest()
    assert sorted(ran) == sorted(["a (0, 0)", "relayed", "to itself", "moves b"])
    assert blocker is not None
    blocker.release()
    world.check_empty()


@pytest.mark.requirement("R50")
@virtual_time
async def test_waiting_for_a_permit_inside_a_turn_is_an_error_at_once() -> None:
    world = World(jobs_max=2)
    world.jobs._may_wait = lambda: forbid_under_gate("waiting for a permit")
    outcomes: list[str] = []

    def attempt(name: str) -> None:
        for what in (world.jobs.try_acquire, lambda: world.jobs.wait(name, lambda permit: permit.release())):
            try:
                got = what()
            except HostError as error:
                outcomes.append(f"{name} {error.kind.name}")
            else:
                outcomes.append(f"{name} may")
                if got is not None and hasattr(got, "release"):
                    got.release()

    async def handler(turn: Turn, value: Any) -> None:
        attempt("handler")
        child = asyncio.create_task(later("child inside"))
        await child
        await turn.yield_while(later("yielded"))
        children.append(asyncio.create_task(later("child after", 5)))

    async def later(name: str, delay_s: float = 0) -> None:
        await asyncio.sleep(delay_s)
        attempt(name)

    children: list[asyncio.Task[None]] = []
    world.add("a", handler)
    world.send("a")
    await asyncio.sleep(10)
    assert outcomes == [
        *["handler INVALID_OPERATION"] * 2,
        *["child inside INVALID_OPERATION"] * 2,
        *["yielded may"] * 2,
        *["child after may"] * 2,
    ]
    world.check_empty()


@virtual_time
async def test_a_grant_that_a_turn_sets_off_is_no_part_of_the_turn() -> None:
    world = World(jobs_max=1)
    markers: list[Any] = []

    def destroys(turn: Turn, value: Any) -> None:
        world.owners.remove("queued")

    keeper = Gatekeeper()
    world.add("queued", keeper)
    world.add("a", destroys)
    assert world.owners.submit_local("queued", one_way("queued")) is None
    await rest()
    world.send("queued")  # holds the permit behind the first
    world.jobs.wait("source", lambda permit: (markers.append(current_turn()), permit.release()))  # type: ignore[func-returns-value]
    assert world.owners.submit_local("a", one_way("a")) is None
    await rest()
    assert markers == [None]
    keeper.let_go()
    await rest()
    world.check_empty()


@virtual_time
async def test_an_owner_destroyed_in_its_turn_ends_it_and_drops_the_rest() -> None:
    world = World()
    current: list[bool] = []

    async def handler(turn: Turn, value: bytes) -> str:
        current.append(turn.is_current)
        if value == b"destroy":
            world.owners.remove("a")
        await asyncio.sleep(1)
        current.append(turn.is_current)
        return "ended"

    world.add("a", handler)
    world.ask("a", b"destroy", operation_id=1)
    world.ask("a", b"next", operation_id=2)
    await rest()
    assert world.replies.sent == [(2, HostErrorKind.NOT_FOUND)]
    assert world.removed == ["a"]
    assert world.in_use == (0, 0)
    assert world.ask("a", operation_id=3) is HostErrorKind.NOT_FOUND
    await asyncio.sleep(2)
    assert world.replies.sent[1:] == [(1, "ended")]
    assert current == [True, False]
    assert "a" not in world.rooms  # its lines ended with it
    world.check_empty()


@virtual_time
async def test_a_new_owner_of_the_same_key_waits_for_the_old_ones_turn() -> None:
    world = World()
    old, new = Gatekeeper(), Gatekeeper()
    world.add("a", old)
    world.send("a", b"old")
    await rest()
    world.owners.remove("a")
    world.add("a", new)
    world.send("a", b"new")
    await rest()
    assert (old.inside, new.began) == (1, [])
    new.let_go()
    old.let_go()
    await rest()
    assert (old.ended, new.ended) == ([b"old"], [b"new"])
    world.check_empty()


@virtual_time
async def test_stop_lets_what_was_accepted_run() -> None:
    world = World()

    async def slow(turn: Turn, value: Any) -> str:
        await asyncio.sleep(1)
        return "done"

    world.add("a", slow)
    for number in range(5):
        world.ask("a", operation_id=number)
    await world.turns.stop(world.timers.now_ms() + 30_000)
    assert world.replies.sent == [(number, "done") for number in range(5)]
    assert world.timers.now_ms() < 6_000
    world.check_empty()


@pytest.mark.parametrize(
    ("handler", "took_ms"),
    [
        ("obeys", 30_000),
        ("swallows", 30_000),
        ("for ever", 30_000 + ABANDON_MS),
        ("whatever comes", 30_000 + ABANDON_MS),
        ("yields", 30_000 + ABANDON_MS),
    ],
)
@virtual_time
async def test_stop_ends_by_its_deadline_whatever_handlers_do(
    handler: str, took_ms: int, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    never = asyncio.Event()
    errors: list[Any] = []

    async def obeys(turn: Turn, value: Any) -> None:
        await never.wait()

    async def swallows(turn: Turn, value: Any) -> str:
        try:
            await never.wait()
        except asyncio.CancelledError:
            return "in the end"
        return ""

    swallowed: type[BaseException] = BaseException if "whatever" in handler else asyncio.CancelledError
    ended: list[Turn] = []

    async def for_ever(turn: Turn, value: Any) -> None:
        while not never.is_set():
            try:
                await never.wait()
            except swallowed:
                continue
        ended.append(turn)

    async def yields(turn: Turn, value: Any) -> None:
        try:
            await turn.yield_while(for_ever(turn, value))
        except HostError as error:
            errors.append(error.kind)

    handlers: dict[str, Any] = {"obeys": obeys, "swallows": swallows, "yields": yields}
    world.add("a", handlers.get(handler.partition(" ")[0], for_ever))
    world.ask("a", operation_id=1)
    await rest()
    world.ask("a", operation_id=2)
    await rest()
    permit_held = world.in_use
    began_at_ms = world.timers.now_ms()
    await world.turns.stop(began_at_ms + 30_000)
    assert world.timers.now_ms() - began_at_ms == took_ms
    shutting = HostErrorKind.SHUTTING_DOWN
    assert dict(world.replies.sent) == {1: "in the end" if handler == "swallows" else shutting, 2: shutting}
    assert len(world.replies.sent) == 2
    has_yielded = handler.startswith("yields")
    assert permit_held == ((0, 0) if has_yielded else (0, 1))
    world.check_empty()
    abandoned = 0 if took_ms == 30_000 else 2 if has_yielded else 1
    is_left = "whatever" in handler
    assert world.turns.statistics().abandoned == abandoned
    assert caplog.text.count("it is left behind") == (abandoned if is_left else 0)
    assert caplog.text.count("it was closed where it waited") == (0 if is_left else abandoned)
    assert world.turns.left_behind == ({"a"} if is_left else set())
    await rest()
    never.set()  # what was left behind comes to its end: late, and nothing happens
    await rest()
    assert len(world.replies.sent) == 2
    assert len(ended) == (abandoned if is_left else 0)
    assert errors == [], "no turn goes on after the stop has ended it"
    if not is_left:
        assert asyncio.all_tasks() == {asyncio.current_task()}, "nothing keeps the loop from ending"
    world.check_empty()


@virtual_time
async def test_stop_from_inside_a_handler_is_an_error() -> None:
    world = World()
    kinds: list[HostErrorKind] = []

    async def handler(turn: Turn, value: Any) -> None:
        try:
            await world.turns.stop(0)
        except HostError as error:
            kinds.append(error.kind)

    world.add("a", handler)
    world.send("a")
    await rest()
    assert kinds == [HostErrorKind.INVALID_OPERATION]


@virtual_time
async def test_nothing_begins_after_the_stop() -> None:
    world = World()
    ran: list[Any] = []
    told: list[Any] = []
    world.add("a", lambda turn, value: ran.append(value))
    await world.turns.stop(world.timers.now_ms())
    world.send("a")
    assert world.owners.submit_local("a", Callback(ran.append, on_end=told.append), Lane.LIFECYCLE) is None
    await rest()
    assert ran == []
    await world.turns.stop(world.timers.now_ms())
    assert [error.kind for error in told] == [HostErrorKind.SHUTTING_DOWN]
    world.check_empty()


@virtual_time
async def test_a_failing_listener_ends_no_runner(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    world = World()
    ran: list[Any] = []

    def broken(outcome: Any) -> None:
        raise ValueError("listener")

    world.add("a", lambda turn, value: ran.append(value))
    assert world.owners.submit_local("a", Callback(lambda turn: 1, on_end=broken)) is None
    world.send("a", b"next")
    await rest()
    assert ran == [b"next"]
    assert "on_end of a callback failed" in caplog.text
    world.check_empty()


@virtual_time
async def test_a_clock_that_jumps_moves_nothing_but_deadlines() -> None:
    world = World()
    ran: list[bytes] = []
    keeper = Gatekeeper()
    world.add("a", lambda turn, value: keeper(turn, value) if value == b"first" else ran.append(value))
    world.send("a", b"first")
    await rest()
    world.ask("a", b"short", operation_id=1, deadline_at_ms=world.timers.now_ms() + 1_000)
    world.ask("a", b"long", operation_id=2, deadline_at_ms=10**12)
    world.send("a", b"old", deadline_at_ms=0)  # an accepted one-way is not cancelled
    await asyncio.sleep(10**5)
    keeper.let_go()
    await rest()
    assert ran == [b"long", b"old"]
    assert world.replies.sent == [(1, HostErrorKind.DEADLINE_EXCEEDED), (2, None)]
    assert world.turns.statistics().expired == 1
    assert not world.owners.cancel(SourceId("peer"), 1)
    world.check_empty()


@virtual_time
async def test_a_fault_of_ours_in_the_queues_is_told_once_and_begins_nothing_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    told: list[Exception] = []
    seen: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    world.turns._on_failure = told.append
    world.add("a", lambda turn, value: seen.append(value))

    def fail(now_ms: int) -> None:
        raise KeyError("ours")

    monkeypatch.setattr(world.owners, "begin_next", fail)
    assert world.send("a") is None
    await rest()
    assert world.send("a") is None
    await rest()
    assert [type(error) for error in told] == [KeyError]
    assert world.turns.failure is told[0]
    assert not seen
    gc.collect()
