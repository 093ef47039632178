"""Function code: asked for once, loaded once, described, and what is told when it cannot be used."""

from __future__ import annotations

import msgspec
import pytest

from callyard.errors import ErrorKind, Outcome
from callyard.ids import Digest, RequestId
from callyard.wire.messages import (
    CallFailed,
    Describe,
    Described,
    DescribePayload,
    ResumeCall,
    ResumeCallPayload,
    WaitKind,
    WireError,
)
from tests.e2e.executor.driver import DIGEST, MODULE, Driver, output_of

TWO = "def one() -> int:\n    return 1\n\nasync def two(x: int) -> int:\n    return 2 * x\n"


def describe(driver: Driver, digest: Digest = DIGEST) -> Described:
    driver.send(Describe(RequestId("r-1"), DescribePayload(digest, str(driver.bundle), MODULE)))
    return driver.wait_other(Described)


@pytest.mark.requirement("X40")
def test_code_is_asked_for_once() -> None:
    with Driver(TWO) as driver:
        driver.answer_code_requests = False
        calls = [driver.start("one") for _ in range(20)]
        driver.wait_until(lambda: driver.code_requests, "request for code")
        request = driver.code_requests[0]
        assert request.call_id == calls[0]
        assert request.payload.function_code is not None
        assert request.payload.function_code.digest == DIGEST
        assert (request.payload.task_id, request.payload.attempt_seq) == ("task-1", 1)
        driver.answer_code(request.request_id, request.call_id)
        assert [output_of(driver.wait_end(call)) for call in calls] == [1] * 20
        driver.answer_code(request.request_id, request.call_id)  # a second answer is counted and dropped
        assert driver.value("one") == 1
        assert len(driver.code_requests) == 1


@pytest.mark.requirement("X40")
def test_refused_code_fails_the_waiting_calls() -> None:
    with Driver(TWO) as driver:
        driver.answer_code_requests = False
        calls = [driver.start("one"), driver.start("one")]
        driver.wait_until(lambda: driver.code_requests, "request for code")
        error = WireError(ErrorKind.DENIED, "the audit says no", details={"audit": "a-1"})
        driver.send(
            ResumeCall(
                calls[0],
                driver.code_requests[0].request_id,
                ResumeCallPayload(WaitKind.FUNCTION_CODE, 1, error=error),
            )
        )
        for call in calls:
            end = driver.wait_end(call)
            assert isinstance(end, CallFailed)
            assert (end.payload.error_kind, end.payload.error_message) == ("denied", "the audit says no")
            assert (end.payload.outcome, end.payload.details) == (Outcome.NOT_RUN, {"audit": "a-1"})
        # Nothing was bound by it: the next call asks again.
        driver.answer_code_requests = True
        assert driver.value("one") == 1


@pytest.mark.requirement("X84")
@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("x = 1\ny = x + undefined\n", "functions.py:2: NameError"),
        ("def broken(:\n", "functions.py:1: SyntaxError"),
        ("import sys\nsys.exit(3)\n", "functions.py:2: SystemExit"),
        ("def f():\n    raise KeyboardInterrupt\nf()\n", "functions.py:2: KeyboardInterrupt"),
    ],
)
def test_import_error_is_each_calls_final_failure(source: str, told: str) -> None:
    with Driver(source) as driver:
        calls = [driver.start("one"), driver.start("one")]
        for call in [*calls, driver.start("one")]:
            end = driver.wait_end(call)
            assert isinstance(end, CallFailed)
            assert told in end.payload.error_message
            assert (end.payload.error_kind, end.payload.outcome) == ("internal", Outcome.NOT_RUN)
            assert not end.payload.retryable
        assert len(driver.code_requests) == 1


@pytest.mark.requirement("X84")
def test_unknown_function_is_not_found() -> None:
    with Driver(TWO) as driver:
        failed = driver.failure("three").payload
        assert (failed.error_kind, failed.outcome) == ("not_found", Outcome.NOT_RUN)
        assert "functions:three" in failed.error_message
        assert driver.value("two", 4) == 8


def test_an_executor_serves_one_bundle() -> None:
    other = Digest("e" * 64)
    with Driver(TWO) as driver:
        assert driver.value("one") == 1
        failed = driver.failure("one", digest=other).payload
        assert (failed.error_kind, failed.outcome) == ("internal", Outcome.NOT_RUN)
        assert DIGEST in failed.error_message
        assert other in failed.error_message
        described = describe(driver, other)
        assert described.payload.error is not None
        assert driver.value("one") == 1


def test_describe_tells_what_is_in_a_bundle_and_binds_to_it() -> None:
    with Driver(TWO) as driver:
        described = describe(driver).payload
        assert described.error is None
        assert described.function_code_digest == DIGEST
        one, two = described.functions
        assert (one.name, one.entry_selector, one.is_async) == ("one", f"{MODULE}:one", False)
        assert (two.name, two.is_async) == ("two", True)
        assert "integer" in msgspec.json.encode(msgspec.json.decode(two.input_schema)).decode()
        assert driver.value("two", 5) == 10
        assert driver.code_requests == []
        assert len(describe(driver).payload.functions) == 2  # and again, from what is loaded


def test_describe_tells_why_a_bundle_cannot_be_loaded() -> None:
    with Driver("import nowhere_to_be_found\n") as driver:
        error = describe(driver).payload.error
        assert error is not None
        assert error.kind is ErrorKind.INTERNAL
        assert "functions.py:1: ModuleNotFoundError" in error.message


def test_describe_overtakes_an_unanswered_request_for_code() -> None:
    with Driver(TWO) as driver:
        driver.answer_code_requests = False
        call = driver.start("one")
        driver.wait_until(lambda: driver.code_requests, "request for code")
        assert describe(driver).payload.error is None
        assert output_of(driver.wait_end(call)) == 1
        request = driver.code_requests[0]
        driver.answer_code(request.request_id, request.call_id)  # late: counted and dropped
        assert driver.value("one") == 1


def test_heartbeats_go_on_while_a_module_is_imported() -> None:
    source = "import time\ntime.sleep(1)\ndef one():\n    return 1"
    with Driver(source, heartbeat_interval_ms=20) as driver:
        driver.start("one")
        driver.wait_until(lambda: len(driver.heartbeats) >= 10, "heartbeats")
        assert driver.heartbeats[-1].payload.running_call_id == ""
        assert driver.value("one") == 1
