"""Calls inside calls, as user code sees them: values, failures, waiting, budgets, seats (X24-X30, X66, X74, X80)."""

from __future__ import annotations

import pytest

from callyard.errors import ErrorKind, Outcome
from callyard.wire.messages import CallCompleted, CallFailed, WireError
from tests.e2e.executor.driver import output_of
from tests.e2e.executor.family import FamilyDriver

SOURCE = """
import asyncio, dataclasses, datetime, time
from callyard import CallError, UsageError, acall, acall_many, call, call_many, function, sleep

@dataclasses.dataclass
class Flight:
    origin: str
    at: datetime.datetime

@function(pure=True)
def double(x: int) -> int:
    return 2 * x

@function(pure=True)
def depart(flight: Flight, late: int = 0) -> Flight:
    return Flight(flight.origin, flight.at + datetime.timedelta(minutes=late))

@function
def raw_bytes() -> bytes:
    return b"\\xff\\xfe"

@function
def liar() -> int:
    return "seven"

@function
def fails(text: str) -> None:
    raise ValueError(text)

@function
async def a_double(x: int) -> int:
    await asyncio.sleep(0)
    return 2 * x

@function
def parent(x: int) -> int:
    return call(double, x=x) + 1

@function
def parent_by_name(x: int) -> list[int]:
    return [call("double", {"x": x}), call("double", [x + 1]), call("double", x=x + 2)]

@function
def parent_of_async(x: int) -> int:
    return call(a_double, x)

@function
def typed() -> list[str]:
    at = datetime.datetime(2013, 1, 1, 5, 15)
    later = call(depart, Flight("JFK", at), late=30)
    plain = call("depart", {"flight": {"origin": "JFK", "at": at}})
    return [type(later).__name__, later.at.isoformat(), type(plain).__name__, repr(call(raw_bytes))]

@function
def many(n: int) -> list[int]:
    return call_many(double, range(n))

@function
def many_rows() -> list[str]:
    rows = [{"origin": "JFK", "at": "2013-01-01T05:15:00"}, Flight("LAX", datetime.datetime(2013, 1, 1))]
    doubled = call_many("double", [[1], {"x": 2}, 3])
    return [flight.origin for flight in call_many(depart, rows)] + [str(x) for x in doubled]

@function
def many_errors() -> list[str]:
    answers = call_many(double, [1, "two", 3, {"y": 1}, object()], return_errors=True)
    shown = [str(answer.value) if answer.ok else str(answer.error.kind) for answer in answers]
    try:
        call_many(double, [1, "two", "three"])
    except CallError as error:
        shown.append(error.kind + " " + str(error.failure.details["function"]))
    return shown

@function
def many_none() -> list[int]:
    return call_many(double, [])

@function
def uncaught() -> None:
    call(fails, text="spoilt")

@function
def caught() -> list[str]:
    try:
        call(fails, text="spoilt")
    except CallError as error:
        return [error.kind, error.failure.message, str(error.failure.retryable)]
    return []

@function
def lying() -> str:
    try:
        return str(call(liar))
    except CallError as error:
        return error.kind + ": " + error.failure.message

def helper(x: int) -> int:
    return x

@function
def strangers() -> list[str]:
    told = []
    for wrong in (helper, lambda x: x, len, 7):
        try:
            call(wrong, 1)
        except UsageError as error:
            told.append(str(error))
    return told

@function
def bad_arguments() -> list[str]:
    told = []
    try:
        call(double, y=1)
    except TypeError as error:
        told.append(str(error))
    try:
        call(double, object())
    except CallError as error:
        told.append(error.kind + ": " + error.failure.message)
    return told

@function
def nap(seconds: float) -> float:
    sleep(seconds)
    return seconds

@function
def chain(depth: int) -> int:
    return 1 + call(chain, depth=depth - 1) if depth else 0

@function
def wide(depth: int, width: int) -> int:
    return 1 + sum(call_many(wide, [{"depth": depth - 1, "width": width}] * width)) if depth else 1

@function
async def gathers(n: int) -> list[int]:
    return await asyncio.gather(*(acall(double, x) for x in range(n)))

@function
async def agathers(n: int) -> list[int]:
    return await acall_many(a_double, range(n))

@function
async def blocks_its_task_only() -> list[str]:
    seen = []
    async def blocking():
        seen.append("asked")
        seen.append(str(call(double, 4)))
    async def other():
        while "8" not in seen:
            if seen[-1] != "meanwhile":
                seen.append("meanwhile")
            await asyncio.sleep(0.001)
    await asyncio.gather(blocking(), other())
    return seen

@function
async def gives_up(seconds: float) -> str:
    try:
        async with asyncio.timeout(seconds):
            await acall(double, 1)
    except TimeoutError:
        return "gave up"
    return "answered"

@function
def asyncio_run_inside() -> list[int]:
    async def body():
        return [await acall(double, 1), call(double, 2)]
    return asyncio.run(body())

@function
def in_a_thread() -> str:
    import threading
    told = []
    def body():
        try:
            call(double, 1)
        except RuntimeError as error:
            told.append(str(error))
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return told[0]

@function
async def too_many() -> str:
    try:
        await asyncio.gather(*(acall(double, x) for x in range(1025)))
    except UsageError as error:
        return str(error)
    return ""

@function
def spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass

@function
def spin_then_ask(seconds: float) -> int:
    spin(seconds)
    return call(double, 1)

@function
def ask_twice() -> int:
    return call(double, 1) + call(double, 2)

@function
async def a_ask_twice() -> int:
    return call(double, 1) + await acall(double, 2)

@function
def stubborn(path: str) -> None:
    try:
        call(double, 1)
    finally:
        with open(path, "w") as file:
            file.write("cleaned up")

@function
async def a_stubborn(path: str) -> None:
    try:
        await acall(double, 1)
    finally:
        with open(path, "w") as file:
            file.write("cleaned up")

@function
def asks_while_stopped(path: str) -> None:
    try:
        call(double, 1)
    finally:
        with open(path, "a") as file:
            try:
                call(double, 2)
            except BaseException as error:
                file.write(type(error).__name__)
                raise
"""
PLAIN = SOURCE.replace("async def a_double", "def a_double").replace(
    "    await asyncio.sleep(0)\n    return 2 * x", "    return 2 * x"
)
PLAIN = "\n\n".join(part for part in PLAIN.split("\n\n") if not part.startswith("@function\nasync def"))


@pytest.fixture(params=[PLAIN, SOURCE], ids=["hub waits", "loop waits"])
def source(request: pytest.FixtureRequest) -> str:
    """A bundle without any async function, and the same with some: two ways of waiting in the executor."""
    assert isinstance(request.param, str)
    return request.param


@pytest.mark.requirement("X24", "X28", "X52")
def test_a_subcall_gives_its_value(source: str) -> None:
    with FamilyDriver(source) as driver:
        assert driver.value("parent", 20) == 41
        assert driver.value("parent_by_name", 1) == [2, 4, 6]
        assert driver.value("parent_of_async", 4) == 8


@pytest.mark.requirement("X15", "X78")
def test_a_subcall_says_who_asks_and_what(source: str) -> None:
    with FamilyDriver(source) as driver:
        driver.serves_subcalls = False
        call_id = driver.start("parent", 3, budget_ms=50_000, call_id="run-1-7/sub-4/sub-9")
        (request,) = driver.wait_requests(1)
        asked = request.payload.subcall
        assert asked is not None
        assert (request.call_id, asked.function_id, bytes(asked.args)) == (call_id, "double", b'{"x":3}')
        assert asked.ancestry == ["run-1-7", "run-1-7/sub-4", call_id]
        assert 40_000 < asked.granted_budget_ms <= 50_000
        assert not asked.spread
        driver.resume(request, 6)
        assert output_of(driver.wait_end(call_id)) == 7


@pytest.mark.requirement("X15")
def test_equal_calls_are_equal_bytes_however_they_are_written() -> None:
    source = """
from callyard import call, function

@function(pure=True)
def add(a: int, b: dict, /, c: int = 0, *more: int, **named: int) -> int:
    return a

@function
def ask() -> int:
    one, other = {"y": 1, "x": 2}, {"x": 2, "y": 1}
    return (call(add, 1, one, c=3) + call(add, 1, other, 3) + call("add", {"c": 3, "b": one, "a": 1})
            + call(add, 1, one, 3, 4) + call(add, 1, one, z=5))
"""
    with FamilyDriver(source) as driver:
        assert driver.value("ask") == 5
        sent = [bytes(one.payload.subcall.args) for one in driver.waiting if one.payload.subcall]
        assert sent[:3] == [b'{"a":1,"b":{"x":2,"y":1},"c":3}'] * 3
        assert sent[3:] == [b'[1,{"x":2,"y":1},3,4]', b'{"a":1,"b":{"x":2,"y":1},"z":5}']


@pytest.mark.requirement("X28")
def test_results_are_what_the_annotation_says(source: str) -> None:
    with FamilyDriver(source) as driver:
        assert driver.value("typed") == ["Flight", "2013-01-01T05:45:00", "dict", repr(b"\xff\xfe")]
        assert driver.value("lying").startswith("result: the result of liar is not what its annotation -> int says")


@pytest.mark.requirement("X30", "X66")
def test_many_are_under_way_at_once_and_keep_their_order(source: str) -> None:
    with FamilyDriver(source) as driver:
        driver.serves_subcalls = False
        call_id = driver.start("many", 5, budget_ms=100_000)
        requests = driver.wait_requests(5)
        grants = [one.payload.subcall.granted_budget_ms for one in requests if one.payload.subcall]
        assert len(set(grants)) == 1
        assert 15_000 < grants[0] <= 20_000
        for request in reversed(requests):
            assert call_id not in driver.ends
            assert request.payload.subcall is not None
            driver.resume(request, int(bytes(request.payload.subcall.args)[5:-1]) * 10)
        assert output_of(driver.wait_end(call_id)) == [0, 10, 20, 30, 40]


@pytest.mark.requirement("X30")
def test_rows_are_read_as_those_of_a_call_list(source: str) -> None:
    with FamilyDriver(source) as driver:
        assert driver.value("many_rows") == ["JFK", "LAX", "2", "4", "6"]
        assert driver.value("many_none") == []
        assert driver.value("many_errors") == ["2", "schema", "6", "schema", "schema", "schema double"]


@pytest.mark.requirement("X30", "X66", "X82")
def test_more_rows_than_may_be_open_go_one_load_after_the_other(source: str) -> None:
    with FamilyDriver(source) as driver:
        driver.serves_subcalls = False
        call_id = driver.start("many", 1500)
        first = driver.wait_requests(1024)
        for request in first:
            assert not driver.waiting
            driver.resume(request, 1)
        for request in driver.wait_requests(1500 - 1024):
            driver.resume(request, 2)
        assert output_of(driver.wait_end(call_id)) == [1] * 1024 + [2] * 476


@pytest.mark.requirement("X28")
def test_a_failure_is_raised_in_the_parent(source: str) -> None:
    with FamilyDriver(source) as driver:
        assert driver.value("caught") == ["internal", "ValueError: spoilt", "False"]
        failed = driver.failure("uncaught").payload
        assert failed.error_kind == ErrorKind.INTERNAL
        assert failed.error_message == "ValueError: spoilt (in uncaught → fails)"
        assert failed.details["path"] == ["uncaught", "fails"]
        assert failed.details["cause"] == {
            "kind": "internal",
            "message": "ValueError: spoilt",
            "details": {"function": "fails"},
        }
        assert 'call(fails, text="spoilt")' in failed.error_stack


@pytest.mark.requirement("X28", "X64")
@pytest.mark.parametrize(
    ("kind", "retryable", "idempotent", "expected"),
    [
        (ErrorKind.TOOL_ERROR, False, False, ErrorKind.TOOL_ERROR),
        (ErrorKind.TRANSIENT, True, True, ErrorKind.TRANSIENT),
        (ErrorKind.TRANSIENT, True, False, ErrorKind.INTERNAL),
        (ErrorKind.TIMEOUT, True, True, ErrorKind.TIMEOUT),
        (ErrorKind.TIMEOUT, True, False, ErrorKind.INTERNAL),
        (ErrorKind.CRASHED, True, True, ErrorKind.CRASHED),
        (ErrorKind.CRASHED, False, True, ErrorKind.INTERNAL),
        (ErrorKind.UNAVAILABLE, True, True, ErrorKind.TRANSIENT),
    ],
)
def test_kind_of_a_parent_that_does_not_catch(
    kind: ErrorKind, retryable: bool, idempotent: bool, expected: ErrorKind
) -> None:
    with FamilyDriver(PLAIN) as driver:
        driver.serves_subcalls = False
        call_id = driver.start("parent", 1, idempotent=idempotent)
        (request,) = driver.wait_requests(1)
        driver.resume(request, error=WireError(kind, "it is so", retryable, {"stack": "deep down"}))
        end = driver.wait_end(call_id)
        assert isinstance(end, CallFailed)
        assert end.payload.error_kind == expected
        assert end.payload.outcome == (Outcome.NOT_RUN if expected is ErrorKind.TRANSIENT else Outcome.RAN)
        assert "it is so" in end.payload.error_message
        assert "deep down" in end.payload.error_stack


def test_what_cannot_be_called_is_told_before_anything_is_sent(source: str) -> None:
    with FamilyDriver(source) as driver:
        helper, unnamed, builtin, number = driver.value("strangers")
        assert "functions.helper is not among the functions" in helper
        assert "has no name to call it by" in unnamed
        assert "builtins.len is not among" in builtin
        assert "got int" in number
        missing, unsendable = driver.value("bad_arguments")
        assert missing.startswith("double() ")
        assert unsendable.startswith("schema: arguments of double: /x: ")
        assert driver.waiting == []
        assert "in the call's own thread only" in driver.value("in_a_thread")


@pytest.mark.requirement("X84")
def test_an_unknown_name_is_for_the_worker_to_refuse() -> None:
    source = "from callyard import call\ndef ask() -> int:\n    return call('nobody', {'x': 1})\n"
    with FamilyDriver(source) as driver:
        driver.serves_subcalls = False
        call_id = driver.start("ask")
        (request,) = driver.wait_requests(1)
        driver.resume(request, error=WireError(ErrorKind.NOT_FOUND, "no function 'nobody'"))
        end = driver.wait_end(call_id)
        assert isinstance(end, CallFailed)
        assert "not_found: no function 'nobody'" in end.payload.error_message


# --- waiting ----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X10", "X52")
def test_a_waiting_call_holds_up_nobody_and_shows_as_suspended(source: str) -> None:
    with FamilyDriver(source, heartbeat_interval_ms=20) as driver:
        driver.serves_subcalls = False
        waiting = [driver.start("parent", x) for x in range(100)]
        requests = driver.wait_requests(100)
        assert driver.value("double", 4) == 8
        driver.wait_until(lambda: driver.heartbeats[-1].payload.inflight_count == 100, "100 calls in flight")
        driver.wait_until(lambda: driver.heartbeats[-1].payload.runnable_count == 0, "none of them runnable")
        for request in requests:
            driver.resume(request, 1)
        assert [output_of(driver.wait_end(call_id)) for call_id in waiting] == [2] * 100
        driver.wait_until(lambda: driver.heartbeats[-1].payload.inflight_count == 0, "an idle heartbeat")
        assert driver.heartbeats[-1].payload.runnable_count == 0


@pytest.mark.requirement("X52", "X66")
def test_async_forms() -> None:
    with FamilyDriver(SOURCE) as driver:
        assert driver.value("gathers", 20) == [2 * x for x in range(20)]
        assert driver.value("agathers", 20) == [2 * x for x in range(20)]
        assert "at once: 1024 are open, 1 more were asked for" in driver.value("too_many")


@pytest.mark.requirement("X52")
def test_the_blocking_form_in_an_async_def_blocks_one_task() -> None:
    with FamilyDriver(SOURCE) as driver:
        driver.serves_subcalls = False
        call_id = driver.start("blocks_its_task_only")
        (request,) = driver.wait_requests(1)
        assert driver.value("double", 1) == 2
        driver.resume(request, 8)
        assert output_of(driver.wait_end(call_id)) == ["asked", "meanwhile", "8"]


@pytest.mark.requirement("X52")
def test_a_loop_of_the_calls_own_waits_as_a_whole(source: str) -> None:
    with FamilyDriver(source) as driver:
        assert driver.value("asyncio_run_inside") == [2, 4]


@pytest.mark.requirement("X66")
def test_answers_that_nobody_waits_for_are_dropped(source: str) -> None:
    with FamilyDriver(source) as driver:
        driver.serves_subcalls = False
        call_id = driver.start("parent", 1)
        (request,) = driver.wait_requests(1)
        driver.resume(request, 100, request_id="77", body=b"orphan")
        driver.resume(request, 2)
        driver.resume(request, 200)  # a second time
        assert output_of(driver.wait_end(call_id)) == 3
        driver.resume(request, 300)  # and after its end
        assert driver.value("double", 2) == 4


@pytest.mark.requirement("X66")
def test_a_request_given_up_is_paid_for_when_it_is_answered() -> None:
    with FamilyDriver(SOURCE) as driver:
        driver.serves_subcalls = False
        call_id = driver.start("gives_up", 0.05)
        (request,) = driver.wait_requests(1)
        assert output_of(driver.wait_end(call_id)) == "gave up"
        driver.resume(request, 2)
        assert driver.value("double", 2) == 4


@pytest.mark.requirement("X54", "X29")
@pytest.mark.parametrize("function", ["stubborn", "a_stubborn"])
def test_cancelling_a_waiting_call(function: str, tmp_path: object) -> None:
    with FamilyDriver(SOURCE) as driver:
        driver.serves_subcalls = False
        file = driver.folder / "log"
        call_id = driver.start(function, str(file))
        (request,) = driver.wait_requests(1)
        driver.cancel(call_id)
        end = driver.wait_end(call_id)
        assert isinstance(end, CallFailed)
        assert (end.payload.error_kind, end.payload.outcome) == (ErrorKind.CANCELLED, Outcome.UNKNOWN)
        assert file.read_text() == "cleaned up"
        driver.resume(request, 1)
        assert driver.value("double", 2) == 4
        assert driver.is_draining() == ""


@pytest.mark.requirement("X54")
def test_a_call_that_is_stopped_can_ask_for_nothing_more(source: str) -> None:
    with FamilyDriver(source) as driver:
        driver.serves_subcalls = False
        file = driver.folder / "log"
        call_id = driver.start("asks_while_stopped", str(file))
        driver.wait_requests(1)
        driver.cancel(call_id)
        assert isinstance(driver.wait_end(call_id), CallFailed)
        assert file.read_text() == "CallCancelled"
        assert driver.waiting == []


# --- budgets ----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X27", "X85")
@pytest.mark.parametrize("function", ["ask_twice", "a_ask_twice"])
def test_the_parent_pays_what_its_subcalls_used_and_not_for_the_wait(function: str) -> None:
    with FamilyDriver(SOURCE) as driver:
        driver.serves_subcalls = False
        call_id = driver.start(function, budget_ms=1000)
        (request,) = driver.wait_requests(1)
        driver.value("nap", 1.2)  # longer than the waiting call's budget
        assert call_id not in driver.ends
        driver.resume(request, 1, used_ms=400)
        (request,) = driver.wait_requests(1)
        assert request.payload.subcall is not None
        assert 0 < request.payload.subcall.granted_budget_ms <= 600
        driver.value("nap", 1.2)
        driver.resume(request, 2, used_ms=100)
        end = driver.wait_end(call_id)
        assert isinstance(end, CallCompleted), end
        assert end.payload.budget_used_ms >= 500
        assert end.payload.timing is not None
        assert end.payload.timing.wait_ms >= 500


@pytest.mark.requirement("X27", "X53")
@pytest.mark.parametrize("function", ["ask_twice", "a_ask_twice"])
def test_subcalls_that_used_it_up_end_the_parent(function: str) -> None:
    with FamilyDriver(SOURCE) as driver:
        driver.serves_subcalls = False
        call_id = driver.start(function, budget_ms=60_000)
        (request,) = driver.wait_requests(1)
        driver.resume(request, 1, used_ms=60_000)
        end = driver.wait_end(call_id)
        assert isinstance(end, CallFailed)
        assert end.payload.error_kind == ErrorKind.TIMEOUT
        assert end.payload.details["limit"] == "budget_ms"
        assert driver.waiting == []


@pytest.mark.requirement("X74")
def test_a_parent_with_nothing_left_asks_for_nothing(source: str) -> None:
    """The last millisecond of a budget is less than the least that can be granted."""
    spinner = source.replace(
        "    return call(double, 1)\n",
        """    import signal
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])  # so that it gets beyond its budget
    spin(0.05)
    return call(double, 1)
""",
    )
    with FamilyDriver(spinner) as driver:
        end = driver.run("spin_then_ask", 0.001, budget_ms=20)
        assert isinstance(end, CallFailed)
        assert (end.payload.error_kind, end.payload.details["limit"]) == (ErrorKind.TIMEOUT, "budget_ms")
        assert driver.waiting == []


@pytest.mark.requirement("X74")
def test_an_unlimited_parent_grants_no_limit(source: str) -> None:
    with FamilyDriver(source) as driver:
        assert driver.value("parent", 1) == 3
        (request,) = driver.waiting
        assert request.payload.subcall is not None
        assert request.payload.subcall.granted_budget_ms == 0


@pytest.mark.requirement("X74", "X85")
def test_no_share_of_a_bounded_parent_is_unlimited(source: str) -> None:
    with FamilyDriver(source) as driver:
        call_id = driver.start("many", 1000, budget_ms=900)
        requests = driver.wait_requests(1000)
        assert {one.payload.subcall.granted_budget_ms for one in requests if one.payload.subcall} == {1}
        driver.wait_end(call_id)


# --- seats ------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X26", "X80")
@pytest.mark.parametrize("max_inflight", [1, 128])
def test_chains_on_a_full_executor_end(source: str, max_inflight: int) -> None:
    flags = ("--executor-max-inflight", str(max_inflight))
    with FamilyDriver(source, *flags, mark_slots=max_inflight * 9 + 64, heartbeat_interval_ms=20) as driver:
        calls = [driver.start("chain", 8) for _ in range(max_inflight)]
        assert [output_of(driver.wait_end(call_id)) for call_id in calls] == [8] * max_inflight
        driver.wait_until(
            lambda: driver.heartbeats[-1].payload.available_contexts == max_inflight, "all contexts available"
        )


@pytest.mark.requirement("X80")
def test_wide_families_share_few_seats(source: str) -> None:
    """4 ** 5 leaves below each of 4 roots, on 80 seats: whoever came first could hold them all, and none would end."""
    with FamilyDriver(source, "--executor-max-inflight", "4", mark_slots=4 + 1 + 80) as driver:
        calls = [driver.start("wide", 5, 4) for _ in range(4)]
        for call_id in calls:
            assert output_of(driver.wait_end(call_id)) == sum(4**level for level in range(6))


@pytest.mark.requirement("X80")
def test_contexts_in_a_heartbeat_are_for_roots(source: str) -> None:
    with FamilyDriver(source, "--executor-max-inflight", "2", heartbeat_interval_ms=20) as driver:
        driver.serves_subcalls = False
        call_id = driver.start("parent", 1)
        (request,) = driver.wait_requests(1)
        nap = driver.make_call("nap", 60, call_id=f"{call_id}/sub-1", parent=call_id)
        driver.send(nap)
        driver.wait_until(lambda: driver.heartbeats[-1].payload.inflight_count == 2, "two calls in flight")
        assert driver.heartbeats[-1].payload.available_contexts == 1
        assert driver.value("double", 3) == 6
        driver.cancel(nap.call_id)
        driver.wait_end(nap.call_id)
        driver.resume(request, 1)
        assert output_of(driver.wait_end(call_id)) == 2


@pytest.mark.requirement("X80")
def test_a_page_without_room_for_subcalls_is_told(source: str) -> None:
    with FamilyDriver(source, "--executor-max-inflight", "8", mark_slots=8) as driver:
        failed = driver.failure("parent", 1).payload
        assert "no room for subcalls: the begun-mark page has 8 slots" in failed.error_message


@pytest.mark.requirement("X62", "X80")
def test_a_process_that_drains_still_runs_what_its_calls_wait_for(source: str) -> None:
    leaver = (
        source
        + """
@function
def leaves_a_thread() -> None:
    import threading
    threading.Thread(target=time.sleep, args=(600,)).start()
"""
    )
    with FamilyDriver(leaver) as driver:
        driver.serves_subcalls = False
        call_id = driver.start("parent", 1)
        (request,) = driver.wait_requests(1)
        driver.value("leaves_a_thread")
        driver.wait_until(driver.is_draining, "a process that drains")
        assert driver.failure("double", 1).payload.error_kind == "recalled"
        driver.start_subcall(request)
        assert output_of(driver.wait_end(call_id)) == 3
