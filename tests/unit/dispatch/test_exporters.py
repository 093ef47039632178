"""Log lines, the audit file, OpenTelemetry, and the queue that two of them stand on."""

from __future__ import annotations

import contextvars
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from callyard.dispatch.events import DispatchEvent, EventHub, EventName
from callyard.dispatch.exporters.audit import AuditExporter
from callyard.dispatch.exporters.log import LogExporter, level_of, line_of
from callyard.dispatch.exporters.masking import is_secret, mask_secrets
from callyard.dispatch.exporters.writer import BoundedWriter
from callyard.errors import ErrorKind, Outcome, UsageError
from callyard.ids import CallId, Owner, Tenant

LIMIT_S = 30.0


def wait_until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s, "not within the limit"
        time.sleep(0.005)


def started(call_id: str = "c-1", arguments: bytes = b'{"a":1}', **fields: Any) -> DispatchEvent:
    return DispatchEvent("dispatch.start", 10, "add", CallId(call_id), arguments=arguments, **fields)


def succeeded(call_id: str = "c-1", **fields: Any) -> DispatchEvent:
    return DispatchEvent("dispatch.success", 52, "add", CallId(call_id), attempt=1, duration_ms=42, **fields)


def failed(
    call_id: str = "c-1", kind: ErrorKind = ErrorKind.TIMEOUT, outcome: Outcome = Outcome.UNKNOWN, **fields: Any
) -> DispatchEvent:
    return DispatchEvent(
        *("dispatch.error", 52, "add", CallId(call_id)),
        **{"attempt": 2, "duration_ms": 42, "kind": kind, "outcome": outcome, "message": "too late", **fields},
    )


class TestWriter:
    @pytest.mark.requirement("D54")
    def test_in_order_and_all_of_it_by_the_time_it_is_closed(self) -> None:
        written: list[int] = []
        writer: BoundedWriter[int] = BoundedWriter("test", written.extend)
        assert all(writer.offer(number) for number in range(5_000))
        assert writer.close(LIMIT_S)
        assert written == list(range(5_000))
        assert (len(writer), writer.held_bytes, writer.dropped) == (0, 0, 0)

    @pytest.mark.requirement("D54")
    def test_what_does_not_fit_is_dropped_and_counted_and_offering_never_waits(self) -> None:
        go, written = threading.Event(), list[int]()

        def write(batch: list[int]) -> None:
            assert go.wait(LIMIT_S)
            written.extend(batch)

        writer: BoundedWriter[int] = BoundedWriter("test", write, items_max=3)
        assert [writer.offer(number) for number in range(5)] == [True] * 3 + [False] * 2
        assert (writer.dropped, len(writer)) == (2, 3)
        go.set()
        assert writer.flush(LIMIT_S)
        assert writer.offer(9)
        assert writer.close(LIMIT_S)
        assert written == [0, 1, 2, 9]

    @pytest.mark.requirement("D54")
    def test_the_bound_is_in_bytes_too(self) -> None:
        go = threading.Event()
        writer: BoundedWriter[str] = BoundedWriter("test", lambda batch: [go.wait(LIMIT_S)], bytes_max=2_000)  # type: ignore[arg-type, return-value]
        assert [writer.offer("x", 600) for _ in range(2)] == [True, False]
        assert writer.offer("y", 100)
        go.set()
        assert writer.close(LIMIT_S)

    @pytest.mark.requirement("D54")
    def test_a_batch_that_cannot_be_written_is_dropped_and_logged_once(self, caplog: pytest.LogCaptureFixture) -> None:
        written: list[int] = []

        def write(batch: list[int]) -> None:
            if batch[0] < 3:
                raise OSError("no space left")
            written.extend(batch)

        writer: BoundedWriter[int] = BoundedWriter("the test", write)
        for number in range(4):
            assert writer.offer(number)
            assert writer.flush(LIMIT_S)
        assert writer.close(LIMIT_S)
        assert (written, writer.dropped, writer.failures) == ([3], 3, 3)
        assert caplog.text.count("the test: 1 records could not be written and are dropped") == 1

    @pytest.mark.requirement("D54")
    def test_one_that_keeps_tries_again(self) -> None:
        written, tries = list[int](), list[int]()

        def write(batch: list[int]) -> None:
            tries.append(len(batch))
            if len(tries) < 2:
                raise OSError("no space left")
            written.extend(batch)

        writer: BoundedWriter[int] = BoundedWriter("test", write, keeps=True)
        assert writer.offer(1)
        wait_until(lambda: written == [1])
        assert writer.close(LIMIT_S)
        assert (writer.dropped, writer.failures, writer.is_failing) == (0, 1, False)

    @pytest.mark.requirement("D46", "D54")
    def test_a_hanging_sink_holds_up_the_close_no_longer_than_it_is_told(self) -> None:
        go, entered = threading.Event(), threading.Event()

        def write(batch: list[int]) -> None:
            entered.set()
            assert go.wait(LIMIT_S)

        writer: BoundedWriter[int] = BoundedWriter("test", write)
        assert writer.offer(1)
        assert entered.wait(LIMIT_S)
        assert not writer.close(timeout_s=0.01)
        assert not writer.offer(2)
        go.set()
        assert writer.close(LIMIT_S)

    def test_closing_one_that_keeps_and_still_fails_says_so(self) -> None:
        def write(batch: list[int]) -> None:
            raise OSError("no space left")

        writer: BoundedWriter[int] = BoundedWriter("test", write, keeps=True)
        assert writer.offer(1)
        assert not writer.close(LIMIT_S)
        assert writer.dropped == 1


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def lines(request: pytest.FixtureRequest) -> Iterator[tuple[str, Lines]]:
    name = f"callyard.test.{request.node.name}"
    logger, handler = logging.getLogger(name), Lines()
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    yield name, handler
    logger.removeHandler(handler)


class TestLog:
    @pytest.mark.requirement("D29")
    def test_a_line_for_people_and_the_same_fields_for_machines(self, lines: tuple[str, Lines]) -> None:
        name, handler = lines
        exporter = LogExporter(name)
        exporter(failed(tenant=Tenant("acme"), message='said "no"\nFAKE LINE'))
        assert exporter.close(LIMIT_S)
        (record,) = handler.records
        assert record.levelno == logging.ERROR
        assert record.getMessage() == (
            "dispatch.error tool=add call_id=c-1 tenant=acme attempt=2 duration_ms=42 kind=timeout outcome=unknown"
            ' error="said \\"no\\"\\nFAKE LINE"'
        )
        fields = {key: value for key, value in vars(record).items() if key in ("event", "kind", "duration_ms", "error")}
        assert json.loads(json.dumps(fields)) == {
            "event": "dispatch.error",
            "kind": "timeout",
            "duration_ms": 42,
            "error": 'said "no"\nFAKE LINE',
        }

    @pytest.mark.requirement("D29")
    def test_arguments_are_not_logged(self, lines: tuple[str, Lines]) -> None:
        name, handler = lines
        exporter = LogExporter(name)
        exporter(started(arguments=b'{"pin":"4711"}'))
        assert exporter.close(LIMIT_S)
        assert "4711" not in str(vars(handler.records[0]))

    @pytest.mark.requirement("D29")
    @pytest.mark.parametrize(
        ("event", "level"),
        [
            (started(), logging.DEBUG),
            (succeeded(), logging.INFO),
            (failed(kind=ErrorKind.SCHEMA, outcome=Outcome.NOT_RUN), logging.WARNING),
            (failed(kind=ErrorKind.INTERNAL, outcome=Outcome.RAN), logging.ERROR),
            (failed(), logging.ERROR),
            (DispatchEvent("dispatch.attempt", 0, "add"), logging.DEBUG),
            (DispatchEvent("dispatch.retry", 0, "add"), logging.WARNING),
            (DispatchEvent("dispatch.deduplicated", 0, "add"), logging.INFO),
            (
                DispatchEvent("dispatch.deduplicated", 0, "add", kind=ErrorKind.TIMEOUT, outcome=Outcome.UNKNOWN),
                logging.ERROR,
            ),
            (DispatchEvent("circuit.opened", 0, "add"), logging.WARNING),
            (DispatchEvent("circuit.half_open", 0, "add"), logging.INFO),
            (DispatchEvent("circuit.closed", 0, "add"), logging.INFO),
        ],
    )
    def test_level_by_outcome(self, event: DispatchEvent, level: int) -> None:
        assert level_of(event) == level

    def test_what_the_level_leaves_out_is_not_even_queued(self, lines: tuple[str, Lines]) -> None:
        name, handler = lines
        logging.getLogger(name).setLevel(logging.WARNING)
        exporter = LogExporter(name, items_max=1)
        for number in range(100):
            exporter(succeeded(str(number)))
        exporter(failed())
        assert exporter.close(LIMIT_S)
        assert [record.levelno for record in handler.records] == [logging.ERROR]
        assert exporter.writer.dropped == 0

    def test_the_time_is_that_of_the_event(self, lines: tuple[str, Lines]) -> None:
        name, handler = lines
        before_s = time.time()
        exporter = LogExporter(name)
        exporter(succeeded())
        after_s = time.time()
        assert exporter.close(LIMIT_S)
        assert before_s <= handler.records[0].created <= after_s
        assert handler.records[0].msecs == int(handler.records[0].created % 1 * 1_000)

    def test_text_of_any_kind_stays_in_its_place(self) -> None:
        assert line_of({"event": "e", "tool": "a b=c"}) == 'e tool="a b=c"'
        assert line_of({"event": "e", "tool": "\x1b[31m\ud800\u2028"}) == 'e tool="\\u001b[31m\\ud800\\u2028"'
        assert line_of({"event": "e", "tool": ""}) == 'e tool=""'


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class TestAudit:
    @pytest.mark.requirement("D29")
    def test_one_record_per_call_refusals_too(self, tmp_path: Path) -> None:
        path = tmp_path / "calls.jsonl"
        exporter = AuditExporter(path, wall_ns=lambda: 1_700_000_000_123_000_000)
        exporter(started(tenant=Tenant("acme")))
        exporter(DispatchEvent("dispatch.attempt", 11, "add", CallId("c-1"), attempt=1))
        exporter(succeeded(tenant=Tenant("acme"), owner=Owner("ann"), parent_id=CallId("p-1")))
        exporter(failed("c-2", ErrorKind.SHUTTING_DOWN, Outcome.NOT_RUN, attempt=0, message="closing"))
        exporter(DispatchEvent("circuit.opened", 60, "add"))
        assert exporter.close(LIMIT_S)
        time_text = "2023-11-14T22:13:20.123Z"
        assert read(path) == [
            {
                "time": time_text,
                "call": "c-1",
                "tool": "add",
                "tenant": "acme",
                "owner": "ann",
                "parent": "p-1",
                "ok": True,
                "attempts": 1,
                "duration_ms": 42,
                "arguments": {"a": 1},
            },
            {
                "time": time_text,
                "call": "c-2",
                "tool": "add",
                "tenant": "default",
                "ok": False,
                "attempts": 0,
                "duration_ms": 42,
                "kind": "shutting_down",
                "outcome": "not_run",
                "message": "closing",
            },
        ]
        assert stat.S_IMODE(path.stat().st_mode) == 0o600

    @pytest.mark.requirement("D29")
    def test_arguments_are_masked(self, tmp_path: Path) -> None:
        exporter = AuditExporter(tmp_path / "calls.jsonl")
        exporter(started(arguments=b'{"user":"ann","login":{"Password":"hunter2"},"omitted_bytes":1}'))
        exporter(succeeded())
        assert exporter.close(LIMIT_S)
        (record,) = read(tmp_path / "calls.jsonl")
        assert record["arguments"] == {"user": "ann", "login": {"Password": "***"}, "omitted_bytes": 1}

    @pytest.mark.requirement("D29")
    def test_masking_by_a_callable_and_one_that_fails_shows_nothing(self, tmp_path: Path) -> None:
        def mask(tool: str, arguments: Any) -> Any:
            return {key: len(value) for key, value in arguments.items()}

        exporter = AuditExporter(tmp_path / "calls.jsonl", mask=mask)
        for call_id, arguments in [("c-1", b'{"a":"secret"}'), ("c-2", b'{"a":5,"b":"secret"}'), ("c-3", b"{broken")]:
            exporter(started(call_id, arguments))
            exporter(succeeded(call_id))
        assert exporter.close(LIMIT_S)
        omitted = {"omitted": "they could not be masked"}
        assert [record["arguments"] for record in read(tmp_path / "calls.jsonl")] == [{"a": 6}, omitted, omitted]
        assert exporter.mask_failures == 2
        assert "secret" not in (tmp_path / "calls.jsonl").read_text()

    def test_long_arguments_and_odd_texts(self, tmp_path: Path) -> None:
        exporter = AuditExporter(tmp_path / "calls.jsonl", arguments_bytes_max=20)
        exporter(started(arguments=b'{"a":"%s"}' % (b"x" * 100)))
        exporter(failed(message="\ud800" + "y" * 5_000))
        assert exporter.close(LIMIT_S)
        (record,) = read(tmp_path / "calls.jsonl")
        assert record["arguments"] == {"omitted_bytes": 108}
        assert record["message"] == "?" + "y" * 1_999

    @pytest.mark.requirement("D29")
    def test_an_existing_file_goes_on_and_a_cut_line_is_closed(self, tmp_path: Path) -> None:
        path = tmp_path / "calls.jsonl"
        path.write_text('{"time":"earlier"}\n{"time":"cut o')
        exporter = AuditExporter(path, fsync=True)
        exporter(started())
        exporter(succeeded())
        assert exporter.close(LIMIT_S)
        lines = path.read_text().splitlines()
        assert lines[:2] == ['{"time":"earlier"}', '{"time":"cut o']
        assert json.loads(lines[2])["call"] == "c-1"
        AuditExporter(path).close(LIMIT_S)
        assert path.read_text().splitlines() == lines

    @pytest.mark.requirement("D54")
    def test_a_file_that_cannot_be_written_is_refused_at_once(self, tmp_path: Path) -> None:
        for path in (tmp_path, tmp_path / "not" / "there", Path(os.devnull)):
            with pytest.raises(UsageError, match="cannot be written"):
                AuditExporter(path)

    @pytest.mark.requirement("D54")
    def test_by_default_what_cannot_be_written_is_dropped_and_calls_go_on(self, tmp_path: Path) -> None:
        folder = tmp_path / "audit"
        folder.mkdir()
        exporter = AuditExporter(folder / "calls.jsonl")
        folder.rename(tmp_path / "away")
        exporter(started())
        exporter(succeeded())
        assert exporter.writer.flush(LIMIT_S)
        assert (exporter.dropped, exporter.admits()) == (1, True)
        (tmp_path / "away").rename(folder)
        exporter(succeeded("c-2"))
        assert exporter.close(LIMIT_S)
        assert [record["call"] for record in read(folder / "calls.jsonl")] == ["c-2"]

    @pytest.mark.requirement("D54")
    def test_required_stops_admission_while_it_cannot_be_written_and_loses_nothing(self, tmp_path: Path) -> None:
        folder = tmp_path / "audit"
        folder.mkdir()
        exporter = AuditExporter(folder / "calls.jsonl", required=True)
        assert exporter.admits()
        exporter(started())
        folder.rename(tmp_path / "away")
        exporter(succeeded())
        wait_until(lambda: not exporter.admits())
        (tmp_path / "away").rename(folder)
        wait_until(exporter.admits)
        assert exporter.close(LIMIT_S)
        assert [record["call"] for record in read(folder / "calls.jsonl")] == ["c-1"]
        assert exporter.dropped == 0

    @pytest.mark.requirement("D54")
    def test_required_keeps_a_place_for_each_call_that_was_let_in(self, tmp_path: Path) -> None:
        exporter = AuditExporter(tmp_path / "calls.jsonl", required=True, items_max=3)
        for call_id in ("c-1", "c-2", "c-3"):
            assert exporter.admits()
            exporter(started(call_id))
        assert not exporter.admits()
        exporter(failed("c-4", ErrorKind.UNAVAILABLE, Outcome.NOT_RUN))  # a refusal finds no place: it is counted
        assert exporter.dropped == 1
        for call_id in ("c-1", "c-2", "c-3"):
            exporter(succeeded(call_id))
        assert exporter.writer.flush(LIMIT_S)
        assert exporter.admits()
        assert exporter.close(LIMIT_S)
        assert [record["call"] for record in read(tmp_path / "calls.jsonl")] == ["c-1", "c-2", "c-3"]

    @pytest.mark.requirement("D54")
    def test_a_call_that_was_told_of_and_found_no_place_is_not_let_in(self, tmp_path: Path) -> None:
        exporter = AuditExporter(tmp_path / "calls.jsonl", required=True, items_max=2)
        exporter(started("c-1"))
        assert exporter.admits()
        exporter(started("c-2"))
        exporter(started("c-3"))
        exporter(succeeded("c-1"))
        exporter(succeeded("c-2"))
        assert exporter.writer.flush(LIMIT_S)  # there is room now, but c-3 has no place of its own
        assert not exporter.admits()
        assert exporter.admits()
        assert exporter.close(LIMIT_S)

    @pytest.mark.requirement("D54")
    def test_a_refusal_that_found_no_place_leaves_nothing_behind(self, tmp_path: Path) -> None:
        exporter = AuditExporter(tmp_path / "calls.jsonl", required=True, items_max=1)
        exporter(started("c-1"))
        exporter(started("c-2"))
        exporter(failed("c-2", ErrorKind.SCHEMA, Outcome.NOT_RUN))
        exporter(succeeded("c-1"))
        assert exporter.writer.flush(LIMIT_S)
        assert exporter.admits()
        assert exporter.close(LIMIT_S)

    @pytest.mark.requirement("D29", "D43")
    def test_anothers_answer_is_an_end_too(self, tmp_path: Path) -> None:
        exporter = AuditExporter(tmp_path / "calls.jsonl")
        told = {"call_id": CallId("c-1"), "deduplicated": True}
        exporter(DispatchEvent("dispatch.deduplicated", 0, "add", **told))
        exporter(DispatchEvent("dispatch.deduplicated", 0, "add", kind=ErrorKind.TIMEOUT, **told))
        assert exporter.close(LIMIT_S)
        records = [(record["ok"], record["deduplicated"]) for record in read(tmp_path / "calls.jsonl")]
        assert records == [(True, True), (False, True)]

    @pytest.mark.requirement("D54")
    def test_places_are_counted_in_bytes_too(self, tmp_path: Path) -> None:
        exporter = AuditExporter(
            tmp_path / "calls.jsonl", required=True, arguments_bytes_max=1_000, bytes_max=2 * (1_000 + 4_096 + 512)
        )
        for call_id in ("c-1", "c-2"):
            assert exporter.admits()
            exporter(started(call_id, b'"%s"' % (b"x" * 998)))
        assert not exporter.admits()
        exporter(succeeded("c-1"))
        assert exporter.writer.flush(LIMIT_S)
        assert exporter.admits()
        exporter(succeeded("c-2"))
        assert exporter.close(LIMIT_S)
        assert (len(read(tmp_path / "calls.jsonl")), exporter.dropped) == (2, 0)


class TestMasking:
    @pytest.mark.requirement("D29")
    @pytest.mark.parametrize(
        "name",
        [
            *["password", "PASSWORD", "db_password", "userPassword", "passwd", "client_secret", "secrets", "tokens"],
            *["token", "authToken", "access-token", "Authorization", "X-Api-Key", "apikey", "private_key"],
            *["Set-Cookie", "credentials"],
        ],
    )
    def test_names_of_secrets(self, name: str) -> None:
        assert is_secret(name)

    @pytest.mark.requirement("D29")
    @pytest.mark.parametrize(
        "name", ["user", "key", "max_tokens", "input_tokens", "tokenizer", "secretary", "password_hint", "author", ""]
    )
    def test_names_of_other_things(self, name: str) -> None:
        assert not is_secret(name)

    @pytest.mark.requirement("D29")
    def test_at_any_depth_and_whatever_the_value(self) -> None:
        given = {
            "list": [{"token": {"a": 1}}, [{"token": 5}]],
            "headers": [{"name": "Authorization", "value": "Bearer x"}, {"name": "Accept", "value": "text/plain"}],
            "token": None,
        }
        assert mask_secrets("tool", given) == {
            "list": [{"token": "***"}, [{"token": "***"}]],
            "headers": [{"name": "Authorization", "value": "***"}, {"name": "Accept", "value": "text/plain"}],
            "token": "***",
        }
        assert mask_secrets("tool", ["a", 1, None]) == ["a", 1, None]


class Telemetry:
    """The exporter over providers that keep everything in memory."""

    def __init__(self) -> None:
        pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        from callyard.dispatch.exporters.otel import OtelExporter

        self.memory, self.reader = InMemorySpanExporter(), InMemoryMetricReader()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.memory))
        self.tracer = provider.get_tracer("test")
        self.exporter = OtelExporter(provider, MeterProvider([self.reader], shutdown_on_exit=False))
        self.hub = EventHub()
        self.hub.subscribe(self.exporter)

    def tell(self, *events: DispatchEvent) -> None:
        for event in events:
            self.hub.emit(event)
        assert self.hub.subscriber_failures == 0

    def spans(self) -> dict[str, Any]:
        return {span.name: span for span in self.memory.get_finished_spans()}

    def metrics(self) -> dict[str, list[Any]]:
        data = self.reader.get_metrics_data()
        return {
            metric.name: list(metric.data.data_points)
            for resource in data.resource_metrics  # type: ignore[union-attr]
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }


def of_attempt(name: EventName, attempt: int, **fields: Any) -> DispatchEvent:
    return DispatchEvent(name, 20, "add", CallId("c-1"), attempt=attempt, **fields)


class TestOtel:
    @pytest.mark.requirement("D29")
    def test_a_call_is_a_span_with_its_attempts(self) -> None:
        telemetry = Telemetry()
        from opentelemetry.trace import SpanKind, StatusCode

        telemetry.tell(
            started(tenant=Tenant("acme")),
            of_attempt("dispatch.attempt", 1),
            of_attempt("dispatch.retry", 2, kind=ErrorKind.TRANSIENT, duration_ms=120),
            of_attempt("dispatch.attempt", 2),
            failed(),
        )
        (span,) = telemetry.spans().values()
        assert (span.name, span.kind) == ("execute_tool add", SpanKind.INTERNAL)
        assert dict(span.attributes) == {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": "add",
            "gen_ai.tool.type": "function",
            "gen_ai.tool.call.id": "c-1",
            "callyard.tenant": "acme",
            "callyard.attempts": 2,
            "callyard.deduplicated": False,
            "callyard.outcome": "unknown",
            "error.type": "timeout",
        }
        assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "too late")
        assert [(event.name, dict(event.attributes)) for event in span.events] == [
            ("attempt", {"callyard.attempt": 1}),
            ("retry", {"callyard.attempt": 2, "error.type": "transient", "callyard.delay_ms": 120}),
            ("attempt", {"callyard.attempt": 2}),
        ]

    @pytest.mark.requirement("D29")
    def test_metrics(self) -> None:
        telemetry = Telemetry()
        telemetry.tell(
            *(started(), of_attempt("dispatch.retry", 2), succeeded()),
            *(started("c-2"), failed("c-2")),
            failed("c-3"),  # a refusal may come as an end alone
            DispatchEvent("circuit.opened", 60, "add"),
        )
        metrics = telemetry.metrics()
        labels = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "add", "gen_ai.tool.type": "function"}
        durations = {point.attributes.get("error.type"): point for point in metrics["gen_ai.execute_tool.duration"]}
        assert (durations[None].count, durations[None].sum, dict(durations[None].attributes)) == (1, 0.042, labels)
        assert durations["timeout"].count == 2
        assert durations[None].explicit_bounds[0] == 0.01
        assert sum(point.value for point in metrics["callyard.dispatch.calls"]) == 3
        assert [point.value for point in metrics["callyard.dispatch.retries"]] == [1]
        states = metrics["callyard.dispatch.breaker.state"]
        assert [(point.value, dict(point.attributes)) for point in states] == [(2, {"gen_ai.tool.name": "add"})]
        telemetry.tell(DispatchEvent("circuit.closed", 90, "add"))
        assert [point.value for point in telemetry.metrics()["callyard.dispatch.breaker.state"]] == [0]

    @pytest.mark.requirement("D29")
    def test_names_that_callers_made_up_make_no_series_and_no_span_names(self) -> None:
        telemetry = Telemetry()
        for number in range(3):
            call_id, tool = CallId(f"c-{number}"), f"made-up-{number}"
            telemetry.tell(
                DispatchEvent("dispatch.start", 0, tool, call_id),
                DispatchEvent("dispatch.error", 1, tool, call_id, kind=ErrorKind.NOT_FOUND, outcome=Outcome.NOT_RUN),
            )
        assert set(telemetry.spans()) == {"execute_tool"}
        (point,) = telemetry.metrics()["gen_ai.execute_tool.duration"]
        assert (point.count, point.attributes["gen_ai.tool.name"]) == (3, "_OTHER")

    @pytest.mark.requirement("D30")
    def test_the_parent_is_the_span_that_is_current_where_the_call_is_made(self) -> None:
        telemetry = Telemetry()
        with telemetry.tracer.start_as_current_span("agent"):
            telemetry.tell(started())
        telemetry.tell(succeeded())
        spans = telemetry.spans()
        assert spans["execute_tool add"].parent.span_id == spans["agent"].context.span_id

    @pytest.mark.requirement("D30")
    def test_a_nested_call_hangs_below_its_parent_or_below_the_handlers_own_span(self) -> None:
        telemetry = Telemetry()

        def nested(call_id: str, tool: str) -> tuple[DispatchEvent, DispatchEvent]:
            parent = CallId("c-1")
            return (
                DispatchEvent("dispatch.start", 1, tool, CallId(call_id), parent_id=parent),
                DispatchEvent("dispatch.success", 2, tool, CallId(call_id), parent_id=parent),
            )

        with telemetry.tracer.start_as_current_span("agent"):
            telemetry.tell(started())
            telemetry.tell(*nested("c-2", "bare"))

            def handler() -> None:
                telemetry.exporter.enter(CallId("c-1"))
                with telemetry.tracer.start_as_current_span("work"):
                    telemetry.tell(*nested("c-3", "inside"))

            contextvars.copy_context().run(handler)
            telemetry.tell(succeeded())
        spans = telemetry.spans()
        outer = spans["execute_tool add"].context.span_id
        assert spans["execute_tool bare"].parent.span_id == outer
        assert spans["work"].parent.span_id == outer
        assert spans["execute_tool inside"].parent.span_id == spans["work"].context.span_id

    @pytest.mark.requirement("D30")
    def test_the_carrier_for_another_process(self) -> None:
        telemetry = Telemetry()
        telemetry.tell(started())
        carrier = telemetry.exporter.carrier(CallId("c-1"))
        telemetry.tell(succeeded())
        span = telemetry.spans()["execute_tool add"]
        assert carrier["traceparent"].startswith(f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-")
        assert telemetry.exporter.carrier(CallId("c-1")) == {}

    def test_nothing_is_kept_of_calls_that_ended_and_closing_ends_the_others(self) -> None:
        telemetry = Telemetry()
        for number in range(100):
            telemetry.tell(started(str(number)), succeeded(str(number)))
        assert len(telemetry.exporter._spans) == 0
        telemetry.tell(started("open"))
        telemetry.exporter.close()
        assert len(telemetry.memory.get_finished_spans()) == 101
