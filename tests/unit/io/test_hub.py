"""The way of a request: kept, joined, queued, charged, cancelled."""

from __future__ import annotations

import asyncio

import pytest

from callyard.errors import ErrorKind, UsageError
from callyard.ids import TaskId
from callyard.testing.clock import FakeClock
from callyard.wire.frames import FRAME_BYTES_MAX
from callyard.worker.io.hub import IoHub, IoLimits, TaskIoOptions
from callyard.worker.io.port import REPLY_BYTES_MAX, IoFailure

from .harness import ScriptedProvider, Stage, settle


@pytest.fixture
async def stage() -> Stage:
    made = Stage()
    made.start()
    return made


def error_of(stage: Stage, request_id: str) -> tuple[ErrorKind, str]:
    error = stage.answers[request_id].error
    assert error is not None
    return error.kind, error.message


# --- kept -----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X42")
async def test_a_read_is_kept_for_the_task(stage: Stage) -> None:
    stage.ask("1")
    (first,) = await stage.performing(1)
    first.finish(b'{"a":1}', b"raw")
    await stage.answer_of("1")
    stage.ask("2", call="other")
    second = await stage.answer_of("2")
    assert (second.result, second.body, second.error) == (b'{"a":1}', b"raw", None)
    assert len(stage.provider.performances) == 1
    assert stage.statistics.hits == 1


@pytest.mark.requirement("X42")
@pytest.mark.parametrize(
    "other",
    [
        {"operation": "write"},
        {"operation": "read.fresh"},
        {"request": b"{ }"},
        {"body": b""},
        {"body": b"x"},
    ],
)
async def test_only_the_same_bytes_of_a_read_are_equal(stage: Stage, other: dict[str, object]) -> None:
    stage.ask("1")
    (first,) = await stage.performing(1)
    first.finish()
    await stage.answer_of("1")
    stage.ask("2", **other)  # type: ignore[arg-type]
    assert (await stage.performing(2))[1].operation == str(other.get("operation", "read")).removesuffix(".fresh")


@pytest.mark.requirement("X42")
async def test_a_second_write_is_a_second_write(stage: Stage) -> None:
    stage.ask("1", "write")
    stage.ask("2", "write")
    for performance in await stage.performing(2):
        performance.finish()
    await stage.answer_of("2")
    stage.ask("3", "write")
    await stage.performing(3)


@pytest.mark.requirement("X42", "X65")
async def test_tasks_share_nothing(stage: Stage) -> None:
    stage.start("u", "another tenant")
    stage.ask("1")
    (first,) = await stage.performing(1)
    first.finish(b'"secret"')
    await stage.answer_of("1")
    stage.ask("2", task="u")
    _, second = await stage.performing(2)
    assert (second.scope.task_id, second.scope.tenant) == ("u", "another tenant")
    assert "2" not in stage.answers


@pytest.mark.requirement("X42")
async def test_errors_are_never_kept(stage: Stage) -> None:
    stage.ask("1")
    (first,) = await stage.performing(1)
    first.fail(IoFailure(ErrorKind.UNAVAILABLE, "no", retryable=True, cause="dns"))
    error = (await stage.answer_of("1")).error
    assert error is not None
    assert (error.kind, error.message, error.retryable, error.details) == ("unavailable", "no", True, {"cause": "dns"})
    stage.ask("2")
    await stage.performing(2)


async def test_a_reply_not_to_be_kept_is_not(stage: Stage) -> None:
    stage.ask("1")
    (first,) = await stage.performing(1)
    first.finish(keep=False)
    await stage.answer_of("1")
    stage.ask("2")
    await stage.performing(2)


@pytest.mark.requirement("X42", "X15")
async def test_the_cache_is_bounded_by_entries_and_the_least_recently_used_goes() -> None:
    stage = Stage(IoLimits(cache_entries=2))
    stage.start()
    count = 0

    async def read(request: bytes, *, performed: bool) -> None:
        nonlocal count
        count += 1
        before = len(stage.provider.performances)
        stage.ask(str(count), request=request)
        if performed:
            (await stage.performing(before + 1))[-1].finish()
        await stage.answer_of(str(count))
        assert len(stage.provider.performances) == before + performed

    await read(b"1", performed=True)
    await read(b"2", performed=True)
    await read(b"1", performed=False)
    await read(b"3", performed=True)  # 2 goes
    await read(b"1", performed=False)
    await read(b"2", performed=True)


# --- joined ---------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X42", "X85")
async def test_equal_reads_in_flight_are_joined_and_the_first_pays(stage: Stage) -> None:
    for number in range(5):
        stage.ask(str(number), call=f"c{number}")
    (only,) = await stage.performing(1)
    assert stage.statistics.joined == 4
    stage.clock.advance(70)
    only.finish(b'"x"')
    await stage.until(lambda: len(stage.answers) == 5)
    assert {answer.result for answer in stage.answers.values()} == {b'"x"'}
    assert [stage.answers[str(number)].budget_used_ms for number in range(5)] == [70, 0, 0, 0, 0]
    assert (stage.statistics.joined, stage.statistics.running) == (0, 0)


@pytest.mark.requirement("X42")
async def test_joined_reads_share_the_error(stage: Stage) -> None:
    stage.ask("1")
    stage.ask("2", call="d")
    (only,) = await stage.performing(1)
    only.fail(IoFailure(ErrorKind.NOT_FOUND, "gone"))
    await stage.answer_of("2")
    assert error_of(stage, "1") == error_of(stage, "2") == ("not_found", "gone")


@pytest.mark.requirement("X42")
@pytest.mark.parametrize("cancelled", ["first", "second"])
async def test_a_cancelled_waiter_leaves_the_rest_alone(stage: Stage, cancelled: str) -> None:
    stage.ask("first", call="first")
    stage.ask("second", call="second")
    (only,) = await stage.performing(1)
    stage.cancel(cancelled)
    await settle()
    assert not only.cancelled
    only.finish()
    left = "second" if cancelled == "first" else "first"
    await stage.answer_of(left)
    assert list(stage.answers) == [left]


@pytest.mark.requirement("X42")
async def test_nobody_waits_so_the_request_is_cancelled_and_joined_no_more(stage: Stage) -> None:
    stage.ask("1", call="a")
    stage.ask("2", call="b")
    (dying,) = await stage.performing(1)
    stage.cancel("a")
    stage.cancel("b")
    stage.ask("3", call="c")  # must not join what is being cancelled
    await stage.until(lambda: dying.cancelled)
    _, second = await stage.performing(2)
    second.finish()
    await stage.answer_of("3")
    assert list(stage.answers) == ["3"]


@pytest.mark.requirement("X82")
async def test_joined_reads_are_bounded() -> None:
    stage = Stage(IoLimits(joined_max=2))
    stage.start()
    for number in range(4):
        stage.ask(str(number), call=f"c{number}")
    await stage.answer_of("3")
    assert error_of(stage, "3")[0] == "unavailable"
    (only,) = await stage.performing(1)
    only.finish()
    await stage.until(lambda: len(stage.answers) == 4)


# --- queued ---------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X42", "X82")
async def test_64_run_1024_wait_and_the_next_is_refused(stage: Stage) -> None:
    for number in range(64 + 1_024):
        stage.ask(str(number), "write", call=f"c{number}")
    await stage.performing(64)
    assert (stage.statistics.running, stage.statistics.waiting) == (64, 1_024)
    stage.ask("more", "write", call="more")
    await stage.answer_of("more")
    kind, message = error_of(stage, "more")
    assert kind == "unavailable"
    assert "1024 requests wait" in message
    assert list(stage.answers) == ["more"]
    while len(stage.answers) < 64 + 1_024 + 1:
        for performance in stage.running:
            performance.finish()
        await asyncio.sleep(0)
        assert len(stage.running) <= 64
    assert all(answer.error is None for name, answer in stage.answers.items() if name != "more")


@pytest.mark.requirement("X85")
async def test_the_queue_is_not_charged() -> None:
    stage = Stage(IoLimits(requests_at_once=1))
    stage.start()
    stage.ask("1", "write")
    stage.ask("2", "write")
    (first,) = await stage.performing(1)
    stage.clock.advance(1_000)
    first.finish()
    _, second = await stage.performing(2)
    stage.clock.advance(30)
    second.finish()
    assert (await stage.answer_of("2")).budget_used_ms == 30
    assert stage.answers["1"].budget_used_ms == 1_000


@pytest.mark.requirement("X85")
async def test_what_each_kind_of_answer_costs(stage: Stage) -> None:
    stage.ask("read")
    stage.ask("waiter", call="w")
    (read,) = await stage.performing(1)
    stage.clock.advance(40)
    read.finish()
    await stage.answer_of("waiter")
    stage.ask("hit")
    stage.ask("failed", "write")
    stage.ask("unknown", provider="q")
    _, failed = await stage.performing(2)
    stage.clock.advance(5)
    failed.fail(IoFailure(ErrorKind.TOOL_ERROR, "no"))
    await stage.answer_of("failed")
    used = {name: answer.budget_used_ms for name, answer in stage.answers.items()}
    assert used == {"read": 40, "waiter": 0, "hit": 0, "failed": 5, "unknown": 0}


@pytest.mark.requirement("X42")
async def test_a_request_cancelled_in_the_queue_never_runs() -> None:
    stage = Stage(IoLimits(requests_at_once=1))
    stage.start()
    stage.ask("1", "write", call="a")
    stage.ask("2", "write", call="b")
    stage.ask("3", "write", call="c")
    stage.cancel("b")
    (first,) = await stage.performing(1)
    first.finish()
    _, third = await stage.performing(2)
    third.finish()
    await stage.answer_of("3")
    assert list(stage.answers) == ["1", "3"]


@pytest.mark.requirement("X82")
async def test_request_bytes_are_bounded() -> None:
    stage = Stage(IoLimits(request_bytes_max=10_000))
    stage.start()
    stage.ask("1", "write", body=b"x" * 8_000, call="a")
    stage.ask("2", "write", body=b"x" * 8_000, call="b")
    await stage.answer_of("2")
    assert error_of(stage, "2")[0] == "unavailable"
    (first,) = await stage.performing(1)
    first.finish()
    await stage.answer_of("1")
    stage.ask("3", "write", body=b"x" * 8_000, call="b")
    await stage.performing(2)


# --- ends -----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X42")
async def test_a_late_result_is_dropped_and_not_kept(stage: Stage) -> None:
    stage.ask("1")
    (first,) = await stage.performing(1)
    first.finish()
    stage.cancel()
    await settle()
    assert stage.answers == {}
    stage.ask("2")
    await stage.performing(2)


@pytest.mark.requirement("X42")
async def test_only_the_named_attempt_is_cancelled(stage: Stage) -> None:
    stage.ask("1", "write", seq=1)
    stage.ask("2", "write", seq=2)
    first, second = await stage.performing(2)
    stage.cancel("c", 1)
    await stage.until(lambda: first.cancelled)
    second.finish()
    await stage.answer_of("2")


async def test_a_hit_cancelled_before_it_is_told_is_not_told(stage: Stage) -> None:
    stage.ask("1")
    (first,) = await stage.performing(1)
    first.finish()
    await stage.answer_of("1")
    stage.ask("2", call="d")
    stage.cancel("d")
    await settle()
    assert list(stage.answers) == ["1"]


async def test_an_answer_never_comes_inside_submit(stage: Stage) -> None:
    stage.ask("1", provider="nothing")
    assert stage.answers == {}
    await stage.answer_of("1")


async def test_an_ended_task_cancels_and_forgets(stage: Stage) -> None:
    stage.ask("1", call="a")
    stage.ask("2", "write", call="b")
    performances = await stage.performing(2)
    stage.hub.end_task(TaskId("t"))
    stage.hub.end_task(TaskId("t"))
    await stage.until(lambda: all(one.cancelled for one in performances))
    stage.ask("3")
    await stage.answer_of("3")
    assert error_of(stage, "3")[0] == "cancelled"
    assert list(stage.answers) == ["3"]


async def test_a_repeated_request_id_is_counted_and_dropped(stage: Stage) -> None:
    stage.ask("1", "write")
    stage.ask("1", "write")
    (only,) = await stage.performing(1)
    assert stage.hub.repeated_requests == 1
    only.finish()
    await stage.answer_of("1")


async def test_cancelled_before_its_first_step_the_place_is_free_again() -> None:
    stage = Stage(IoLimits(requests_at_once=1))
    stage.start()
    stage.ask("1", "write", call="a")
    stage.cancel("a")
    stage.ask("2", "write", call="b")
    await stage.until(lambda: len(stage.running) == 1)
    stage.running[0].finish()
    await stage.answer_of("2")


@pytest.mark.requirement("X53")
async def test_a_budget_ends_the_request_of_the_one_who_pays(stage: Stage) -> None:
    stage.ask("1", call="a", budget_ms=20)
    stage.ask("2", call="b", budget_ms=20)
    (only,) = await stage.performing(1)
    first = await stage.answer_of("1")
    assert first.error is not None
    assert (first.error.kind, first.error.details["limit"]) == ("timeout", "budget_ms")
    assert first.budget_used_ms >= 20
    assert not only.cancelled
    only.finish()
    assert (await stage.answer_of("2")).budget_used_ms == 0


async def test_a_budget_ends_a_request_that_nobody_else_waits_for(stage: Stage) -> None:
    stage.ask("1", "write", budget_ms=10)
    (only,) = await stage.performing(1)
    await stage.answer_of("1")
    await stage.until(lambda: only.cancelled)


# --- refusals and failures ------------------------------------------------------------------------------------------


@pytest.mark.requirement("X42")
async def test_an_unknown_provider_is_an_answer(stage: Stage) -> None:
    stage.ask("1", provider="redis")
    await stage.answer_of("1")
    assert error_of(stage, "1") == ("not_found", "no IO provider 'redis'; there are: p")


@pytest.mark.requirement("X42")
async def test_a_task_may_be_given_less_than_there_is() -> None:
    stage = Stage()
    stage.start("none", options=TaskIoOptions(allow={}))
    stage.start("some", options=TaskIoOptions(allow={"p": ("a",)}))
    stage.ask("1", task="none")
    await stage.answer_of("1")
    kind, message = error_of(stage, "1")
    assert kind == "denied"
    assert "may use: none" in message
    stage.ask("2", task="some")
    (only,) = await stage.performing(1)
    assert only.scope.names == ("a",)
    assert only.scope.permits("a")
    assert not only.scope.permits("b")


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (TimeoutError(), "timeout", "too long"),
        (ZeroDivisionError("x"), "internal", "ZeroDivisionError: x"),
        (asyncio.CancelledError(), "internal", "cancelled itself"),
    ],
)
async def test_what_a_provider_raises(stage: Stage, error: BaseException, kind: str, text: str) -> None:
    stage.ask("1")
    (only,) = await stage.performing(1)
    only.fail(error)
    await stage.answer_of("1")
    found, message = error_of(stage, "1")
    assert found == kind
    assert text in message


@pytest.mark.parametrize("result", [b"", b"{", b"nul", b'"\xff"', b"1 2"])
async def test_a_result_that_is_no_json_never_reaches_a_frame(stage: Stage, result: bytes) -> None:
    stage.ask("1")
    (only,) = await stage.performing(1)
    only.finish(result)
    await stage.answer_of("1")
    assert error_of(stage, "1")[0] == "internal"


@pytest.mark.requirement("X48")
async def test_a_reply_that_no_frame_holds_is_an_error(stage: Stage) -> None:
    assert REPLY_BYTES_MAX < FRAME_BYTES_MAX
    stage.ask("1", "write")
    stage.ask("2", "write")
    first, second = await stage.performing(2)
    first.finish(b"1", bytes(REPLY_BYTES_MAX))
    second.finish(b"1", bytes(REPLY_BYTES_MAX - 1))
    await stage.until(lambda: len(stage.answers) == 2)
    kind, message = error_of(stage, "1")
    assert kind == "result"
    assert str(REPLY_BYTES_MAX) in message
    assert stage.answers["2"].error is None


async def test_errors_are_cut_to_what_travels(stage: Stage) -> None:
    stage.ask("1", "write")
    stage.ask("2", "write")
    first, second = await stage.performing(2)
    first.fail(IoFailure(ErrorKind.TOOL_ERROR, "x" * 100_000, data="y" * 100_000))
    second.fail(IoFailure(ErrorKind.TOOL_ERROR, "\ud800", data=object()))
    await stage.until(lambda: len(stage.answers) == 2)
    for answer in stage.answers.values():
        assert answer.error is not None
        assert len(answer.error.message.encode()) < 5_000
        assert "left out" in answer.error.details["details"]


# --- the hub's life -------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X42")
async def test_providers_open_and_close_with_the_hub() -> None:
    provider = ScriptedProvider()
    hub = IoHub({"p": provider}, FakeClock())
    await hub.open()
    await hub.close()
    await hub.close()
    assert (provider.opened, provider.closed) == (1, 1)


async def test_one_that_cannot_open_closes_the_others() -> None:
    class Broken(ScriptedProvider):
        async def open(self) -> None:
            raise UsageError("no such folder")

    good = ScriptedProvider()
    hub = IoHub({"good": good, "broken": Broken()}, FakeClock())
    with pytest.raises(UsageError, match="no such folder"):
        await hub.open()
    assert (good.opened, good.closed) == (1, 1)


async def test_close_cancels_what_runs_and_refuses_what_comes() -> None:
    stage = Stage()
    await stage.hub.open()
    stage.start()
    stage.ask("1", "write")
    (only,) = await stage.performing(1)
    await stage.hub.close()
    assert only.cancelled
    assert stage.provider.closed == 1
    stage.ask("2", "write")
    await stage.answer_of("2")
    assert error_of(stage, "2")[0] == "shutting_down"
    assert list(stage.answers) == ["2"]
