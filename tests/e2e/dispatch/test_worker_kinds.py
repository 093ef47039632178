"""What the ends of attempts in real executors are called, row by row."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from callyard.dispatch.config import DispatcherConfig
from callyard.dispatch.dispatcher import Dispatcher
from callyard.dispatch.outcomes import DispatchError
from callyard.errors import ErrorKind, Outcome, UsageError
from callyard.functions.audit.policies import BundleView
from callyard.ids import RequestId
from callyard.wire.messages import CallContext, CallEventKind, CallEventPayload
from callyard.worker.config import WorkerConfig
from callyard.worker.loading import Registry
from callyard.worker.worker import Worker
from tests.e2e.dispatch.yards import ONCE, QUICK, TOOLS, lines, open_yard, quiet, wait_for

K, NOT_RUN, RAN, UNKNOWN = ErrorKind, Outcome.NOT_RUN, Outcome.RAN, Outcome.UNKNOWN
NOTHING: dict[str, Any] = {}
ALLOWED = DispatcherConfig(retry=ONCE, breaker=None)

ROWS: list[tuple[str, dict[str, Any], ErrorKind, Outcome, int, dict[str, Any], str]] = [
    # tool, arguments, kind, outcome, attempts, some of the details, part of the message
    ("transient", NOTHING, K.TRANSIENT, NOT_RUN, 1, {"retry_after_ms": 7}, "^later$"),
    ("tool_error", NOTHING, K.TOOL_ERROR, RAN, 1, {}, "^there is no such flight$"),
    ("raises", NOTHING, K.INTERNAL, RAN, 1, {}, "^ValueError: no fuel$"),
    ("raises_timeout", NOTHING, K.INTERNAL, RAN, 1, {}, "^TimeoutError: its own$"),
    ("exits", NOTHING, K.INTERNAL, RAN, 1, {"exit_code": 4}, "SystemExit"),
    ("wants_even", {"n": 3}, K.SCHEMA, NOT_RUN, 0, {"pointer": "/n"}, "odd"),
    ("overruns", NOTHING, K.TIMEOUT, UNKNOWN, 1, {"limit": "budget_ms"}, "50"),
    ("leaves", NOTHING, K.CRASHED, UNKNOWN, 1, {"cause": "exited", "exit_code": 3}, "status 3"),
    ("dies", NOTHING, K.CRASHED, UNKNOWN, 1, {"cause": "signal"}, "SIGKILL"),
    ("hangs_up", NOTHING, K.CRASHED, UNKNOWN, 1, {"cause": "eof"}, ""),
    ("babbles", NOTHING, K.CRASHED, UNKNOWN, 1, {"cause": "malformed_frame"}, ""),
    ("no_memory", NOTHING, K.RESOURCE_LIMIT, UNKNOWN, 1, {}, "MemoryError"),
    ("no_json", NOTHING, K.RESULT, RAN, 1, {}, "object"),
    ("not_a_number", NOTHING, K.RESULT, RAN, 1, {"pointer": ""}, ""),
    ("too_large", NOTHING, K.RESULT, RAN, 1, {"limit": 1_000}, ""),
    ("never_heard_of", NOTHING, K.NOT_FOUND, NOT_RUN, 0, {}, "never_heard_of"),
]


@pytest.mark.requirement("D38")
@pytest.mark.requirement("D52")
async def test_each_end_has_its_kind(tmp_path: Path) -> None:
    wrong = []
    async with open_yard(executors=2, dispatching=ALLOWED) as yard:
        for tool, arguments, kind, outcome, attempts, details, message in ROWS:
            args = {**arguments, "path": str(tmp_path / tool)} if tool == "wants_even" else arguments
            done = await yard.dispatch(tool, args)
            if not isinstance(done, DispatchError):
                wrong.append(f"{tool}: {done}")
                continue
            seen = (done.kind, done.outcome, done.attempts)
            known = {name: done.details.get(name) for name in details}
            if seen != (kind, outcome, attempts) or known != details or not re.search(message, done.message):
                wrong.append(f"{tool}: {seen}, {dict(done.details)}, {done.message!r}")
        assert (await yard.dispatch("add", {"a": 1, "b": 2})).unwrap() == 3, "it goes on after all of them"
    assert not wrong, "\n".join(wrong)
    assert lines(tmp_path / "wants_even") == [], "what does not fit has not run"


@pytest.mark.requirement("D38")
@pytest.mark.requirement("D48")
async def test_a_subcall_that_is_refused_says_why() -> None:
    """The caller that did not catch it is `internal`; what it did not catch is in its details."""
    async with open_yard(dispatching=ALLOWED, max_subcall_depth=3) as yard:
        for tool, reason in (("too_deep", "depth"), ("in_a_ring", "cycle")):
            done = await yard.dispatch(tool)
            assert isinstance(done, DispatchError)
            assert done.kind is K.INTERNAL
            assert done.details["cause"]["kind"] == "denied"
            assert done.details["cause"]["details"]["reason"] == reason


@pytest.mark.requirement("D38")
async def test_an_audit_verdict_denies_with_its_reason() -> None:
    registry = await Registry.aload(TOOLS, on_output=quiet)

    def refuse(bundle: BundleView) -> str:
        return "it is not for today"

    async with open_yard(registry, audit=refuse) as yard:
        done = await yard.dispatch("add", {"a": 1, "b": 2})
        assert isinstance(done, DispatchError)
        assert (done.kind, done.outcome, done.attempts) == (K.DENIED, NOT_RUN, 0)
        assert "it is not for today" in str(done.details["reason"]) + done.message


@pytest.mark.requirement("D38")
@pytest.mark.requirement("D52")
async def test_without_an_executor_it_is_unavailable() -> None:
    async with open_yard(
        dispatching=DispatcherConfig(retry=QUICK),
        spare_executors=0,
        max_restarts=0,
        backoff_ms=600_000,
        no_executor_timeout_ms=100,
    ) as yard:
        lost = await yard.dispatch("leaves")
        assert isinstance(lost, DispatchError)
        done = await yard.dispatch("add", {"a": 1, "b": 2})
        assert isinstance(done, DispatchError)
        assert (done.kind, done.outcome, done.attempts) == (K.UNAVAILABLE, NOT_RUN, 0)
        assert done.retryable, "by the caller"
        assert done.details["retry_after_ms"] > 0
        assert "no executor" in done.message
        assert "status 3" in done.message, "how the last one ended"


@pytest.mark.slow
@pytest.mark.requirement("D38")
async def test_a_wedge_is_a_crash_with_its_cause(tmp_path: Path) -> None:
    """A C loop under a budget of its own, whose process is silent: the worker judges, long before the timeout."""
    settings = {"call_deadline_ms": 0, "scheduler_stall_timeout_ms": 1_000, "heartbeat_timeout_ms": 1_000}
    source = "from callyard import function\n@function(budget_ms=100)\ndef grind() -> int: return sum(range(10**15))\n"
    path = tmp_path / "grinds.py"
    path.write_text(source)
    async with open_yard(path, dispatching=ALLOWED, **settings) as yard:
        done = await yard.dispatch("grind", timeout_ms=600_000)
        assert isinstance(done, DispatchError)
        assert (done.kind, done.outcome, done.attempts) == (K.CRASHED, UNKNOWN, 1)
        assert done.details["cause"] in ("wedge", "heartbeat")


@pytest.mark.requirement("D49")
async def test_the_executor_has_the_last_word_and_the_key_is_free_again(tmp_path: Path) -> None:
    effects = tmp_path / "effects"
    async with open_yard() as yard:
        refused = await yard.dispatch("wants_even", {"n": 3, "path": str(effects)}, key="k")
        assert isinstance(refused, DispatchError)
        assert (refused.kind, refused.outcome, refused.attempts) == (K.SCHEMA, NOT_RUN, 0)
        assert refused.details["pointer"] == "/n"
        assert not refused.deduplicated
        done = await yard.dispatch("wants_even", {"n": 4, "path": str(effects)}, key="k")
        assert done.unwrap() == 4, "other arguments under the same key: nothing was kept"
        again = await yard.dispatch("wants_even", {"n": 3, "path": str(effects)}, key="k")
        assert isinstance(again, DispatchError)
        assert again.kind is K.CONFLICT
    assert lines(effects) == ["ran"]


@pytest.mark.requirement("D7")
@pytest.mark.requirement("D38")
async def test_a_worker_that_was_not_started_or_is_closed_is_no_exception() -> None:
    registry = await Registry.aload(TOOLS, on_output=quiet)
    worker = Worker(registry, executors=1, on_output=quiet)
    async with Dispatcher(registry, worker=worker) as dispatcher:
        early = await dispatcher.dispatch("add", {"a": 1, "b": 2})
        assert isinstance(early, DispatchError)
        assert (early.kind, early.outcome, early.attempts) == (K.UNAVAILABLE, NOT_RUN, 0)
        async with worker:
            assert (await dispatcher.dispatch("add", {"a": 1, "b": 2})).unwrap() == 3
        late = await dispatcher.dispatch("add", {"a": 1, "b": 2})
        assert isinstance(late, DispatchError)
        assert (late.kind, late.outcome, late.attempts) == (K.SHUTTING_DOWN, NOT_RUN, 0)


@pytest.mark.requirement("D38")
@pytest.mark.requirement("D46")
async def test_a_worker_closed_under_its_calls(tmp_path: Path) -> None:
    """What runs is cut off, and what waits says that it never ran."""
    held, other = tmp_path / "held", tmp_path / "other"
    config = WorkerConfig(executor_count=1, executor_max_runnable=1, spare_executors=0)
    async with Worker(TOOLS, config=config, on_output=quiet) as worker:  # noqa: SIM117  the dispatcher goes first
        async with Dispatcher(worker.registry, worker=worker) as dispatcher:
            args = {"path": str(held), "gate": str(tmp_path / "never")}
            running = asyncio.ensure_future(dispatcher.dispatch("hold", args))
            await wait_for(lambda: lines(held), "it runs")
            waiting = asyncio.ensure_future(dispatcher.dispatch("marks", {"path": str(other), "text": "ran"}))
            await wait_for(lambda: worker.statistics().calls == 2, "another waits in the worker")
            await worker.close(drain=False)
            cut, refused = await running, await waiting
            assert isinstance(cut, DispatchError)
            assert isinstance(refused, DispatchError)
            assert (cut.kind, cut.outcome, cut.attempts) == (K.CANCELLED, UNKNOWN, 1)
            assert (refused.kind, refused.outcome, refused.attempts) == (K.SHUTTING_DOWN, NOT_RUN, 0)
    assert lines(other) == []


@pytest.mark.requirement("D7")
@pytest.mark.requirement("D24")
@pytest.mark.parametrize(
    "options", [{"owner": "\ud800"}, {"tenant": "a\nb"}, {"tags": {"a": "\ud800"}}, {"trace": {"\ud800": "a"}}]
)
async def test_what_cannot_be_sent_is_refused_where_it_came_from(options: dict[str, Any]) -> None:
    """It must never come as far as the worker, which others use."""
    async with open_yard() as yard:
        with pytest.raises(UsageError):
            await yard.dispatch("seen", **options)
        assert (await yard.dispatch("add", {"a": 1, "b": 2})).unwrap() == 3


@pytest.mark.requirement("D38")
async def test_a_context_that_cannot_be_sent_costs_its_call_only() -> None:
    """At the port itself, whoever uses it."""
    async with open_yard() as yard:
        runner = yard.worker.runner
        spec, unpin = runner.pin("seen")
        for n, context in enumerate((CallContext(owner="\ud800"), CallContext(tags={"a": "x" * 20_000_000}))):
            outcome = await runner.call(RequestId(f"r-{n}"), spec, b"{}", budget_ms=10_000, context=context)
            assert outcome.failure is not None
            assert (outcome.failure.kind, outcome.failure.attempts) == (K.SCHEMA, 0)
        assert (await yard.dispatch("add", {"a": 1, "b": 2})).unwrap() == 3
        unpin()


@pytest.mark.requirement("D24")
@pytest.mark.requirement("D38")
@pytest.mark.parametrize("value", [b"[]", b"{}", b'"x"', b'{"done":"all"}', b'{"done":1,"message":3}', b"null"])
async def test_progress_that_is_none_is_dropped(value: bytes) -> None:
    """What an executor says is not believed."""
    heard: list[tuple[float, float | None, str]] = []
    async with open_yard() as yard:
        opened = yard.worker.open_attempt

        def forge(view: Any, call: Any, context: Any, budget_ms: int, on_event: Any, *rest: Any) -> Any:
            on_event(CallEventPayload(1, CallEventKind.PROGRESS, value=msgspec.Raw(value)))
            return opened(view, call, context, budget_ms, on_event, *rest)

        yard.worker.open_attempt = forge  # type: ignore[method-assign]
        assert (await yard.dispatch("seen", on_progress=lambda *told: heard.append(told))).ok
    assert heard == [(1, 2, "half")]
