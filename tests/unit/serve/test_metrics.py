"""What `/metrics` shows: the documented names and no others, counted from events, bounded."""

from __future__ import annotations

import re
from typing import Any

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families
from tools.metrics_table import PAGE, build_page

from callyard import Registry
from callyard.dispatch.events import DispatchEvent
from callyard.serve.listener import ListenerStatistics
from callyard.serve.metrics import BUCKETS_S, FAMILIES, OTHER, TOOLS_MAX, Metrics
from tests.unit.serve.fakes_ops import FakeServer, opened_server

Figures = dict[tuple[str, frozenset[tuple[str, str]]], float]


def read(metrics: Metrics) -> Figures:
    """By the sample's name and its labels."""
    text, _ = metrics.render()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def figure(figures: Figures, name: str, **labels: str) -> float:
    return figures.get((name, frozenset(labels.items())), 0.0)


class Watched:
    def statistics(self) -> ListenerStatistics:
        return ListenerStatistics(connections=3, requests=40, refused=1, timed_out=2, malformed=4, vanished=5)


class Dropping:
    dropped = 9
    required = False


def fill(server: FakeServer) -> None:
    """Something of everything that a server may have."""
    server.listeners["http"] = Watched()
    server.audit = server.logs = Dropping()
    server.gateway.refused_by_status[401] += 2


async def test_calls_are_counted_by_tool_kind_and_outcome() -> None:
    async with opened_server() as server:
        metrics = Metrics(server)  # type: ignore[arg-type]
        server.gateway.subscribe(metrics)
        for _ in range(3):
            await server.call("add", {"a": 1, "b": 2})
        await server.call("add", {"a": "one"})
        await server.call("fail")
        await server.call("made up by a client")
        for _ in range(2):
            await server.call("add", {"a": 1, "b": 2}, key="step-1")
        figures = read(metrics)
    calls = "callyard_calls_total"
    assert figure(figures, calls, tool="add", kind="ok", outcome="ran") == 5
    assert figure(figures, calls, tool="add", kind="schema", outcome="not_run") == 1
    assert figure(figures, calls, tool="fail", kind="tool_error", outcome="ran") == 1
    assert figure(figures, calls, tool=OTHER, kind="not_found", outcome="not_run") == 1
    assert figure(figures, "callyard_calls_deduplicated_total", tool="add") == 1
    assert figure(figures, "callyard_attempts_total", tool="add") == 4
    assert figure(figures, "callyard_call_duration_seconds_count", tool="add") == 6
    assert figure(figures, "callyard_call_duration_seconds_bucket", tool="add", le="+Inf") == 6
    assert figure(figures, "callyard_permits_in_use") == 0
    assert "made up" not in metrics.render()[0].decode()


async def test_durations_fall_into_their_buckets() -> None:
    async with opened_server() as server:
        metrics = Metrics(server)  # type: ignore[arg-type]
        for duration_ms in (0, 5, 6, 299_999, 300_001):
            metrics(DispatchEvent("dispatch.success", 0, "add", duration_ms=duration_ms))
        figures = read(metrics)
    name = "callyard_call_duration_seconds"
    counts = [figure(figures, f"{name}_bucket", tool="add", le=str(bound)) for bound in (*BUCKETS_S, "+Inf")]
    assert counts == [2, *[3] * 12, 4, 5]
    assert figure(figures, f"{name}_sum", tool="add") == 600.011


async def test_nested_calls_are_counted_apart() -> None:
    async with opened_server() as server:
        metrics = Metrics(server)  # type: ignore[arg-type]
        metrics(DispatchEvent("dispatch.success", 0, "add", parent_id="c1"))  # type: ignore[arg-type]
        metrics(DispatchEvent("dispatch.retry", 0, "add"))
        metrics(DispatchEvent("circuit.opened", 0, "add"))
        figures = read(metrics)
    assert figure(figures, "callyard_subcalls_total", tool="add", kind="ok", outcome="ran") == 1
    assert figure(figures, "callyard_calls_total", tool="add", kind="ok", outcome="ran") == 0
    assert figure(figures, "callyard_retries_total", tool="add") == 1
    assert figure(figures, "callyard_breaker_opened_total", tool="add") == 1


async def test_what_there_is_now_is_read_from_its_owner() -> None:
    async with opened_server(jobs_max=4) as server:
        fill(server)
        metrics = Metrics(server)  # type: ignore[arg-type]
        permits = [await server.gateway.admit(number) for number in range(4)]
        figures = read(metrics)
        for permit in permits:
            permit.release()
        after = read(metrics)
    assert figure(figures, "callyard_permits_limit") == 4
    assert (figure(figures, "callyard_permits_in_use"), figure(after, "callyard_permits_in_use")) == (4, 0)
    assert (figure(figures, "callyard_permits_paused"), figure(after, "callyard_permits_paused")) == (1, 0)
    assert figure(after, "callyard_permits_peak") == 4
    assert figure(figures, "callyard_executors", pool="default", state="running") == 2
    assert figure(figures, "callyard_executor_restarts_total", pool="default") == 3
    assert figure(figures, "callyard_io_requests_open", provider="http", state="waiting") == 2
    assert figure(figures, "callyard_io_saved_total", provider="http") == 9
    assert figure(figures, "callyard_kept_bytes") == 2_048
    assert figure(figures, "callyard_connections_closed_total", listener="http", reason="malformed") == 4
    assert figure(figures, "callyard_http_requests_refused_total", status="401") == 2
    assert figure(figures, "callyard_records_dropped_total", to="audit") == 9


async def test_a_worker_that_failed_takes_only_its_own_figures_away() -> None:
    async with opened_server() as server:
        server.worker.failure = "a fault"
        figures = read(Metrics(server))  # type: ignore[arg-type]
    assert figure(figures, "callyard_permits_limit") == 256
    assert ("callyard_worker_calls", frozenset()) not in figures


async def test_only_so_many_tools_have_series_of_their_own() -> None:
    registry = Registry()

    async def nothing(arguments: dict[str, Any]) -> None: ...

    for number in range(TOOLS_MAX + 50):
        registry.add_tool(f"tool_{number}", nothing, input_schema={"type": "object"})
    async with opened_server(registry) as server:
        metrics = Metrics(server)  # type: ignore[arg-type]
        for number in range(TOOLS_MAX + 50):
            metrics(DispatchEvent("dispatch.success", 0, f"tool_{number}"))
        figures = read(metrics)
    counted = [labels for name, labels in figures if name == "callyard_calls_total"]
    assert len(counted) == TOOLS_MAX + 1
    assert figure(figures, "callyard_calls_total", tool=OTHER, kind="ok", outcome="ran") == 50


async def test_nothing_is_global() -> None:
    before = set(REGISTRY._names_to_collectors)
    async with opened_server() as one, opened_server() as other:
        first, second = Metrics(one), Metrics(other)  # type: ignore[arg-type]
        first(DispatchEvent("dispatch.success", 0, "add"))
        assert figure(read(second), "callyard_calls_total", tool="add", kind="ok", outcome="ran") == 0
    assert set(REGISTRY._names_to_collectors) == before


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
async def test_every_form_that_a_scraper_asks_for_can_be_read(accept: str) -> None:
    async with opened_server() as server:
        fill(server)
        text, content_type = Metrics(server).render(accept)  # type: ignore[arg-type]
    assert content_type.startswith(accept.partition(";")[0] or "text/plain")
    assert b"callyard_permits_limit" in text


# --- the page ---------------------------------------------------------------------------------------------------


def test_names_follow_one_rule() -> None:
    bases: list[str] = []
    for family in FAMILIES:
        assert re.fullmatch(r"callyard(_[a-z]+)+", family.name)
        assert family.name.endswith("_total") == (family.type == "counter"), family.name
        assert not re.search(r"_(ms|milliseconds|kib|mib)\b", family.name)
        assert not {"tenant", "owner", "key", "call_id"} & set(family.labels)
        bases.append(family.name.removesuffix("_total"))
    assert len(set(bases)) == len(bases), "OpenMetrics knows a counter by its name without _total"


def test_the_page_is_the_generated_table() -> None:
    assert PAGE.read_text() == build_page(), "run: python tools/metrics_table.py > docs/reference/metrics.md"


async def test_the_page_and_the_registry_say_the_same() -> None:
    row = r"^\| `(callyard_\w+)` \| (\w+) \| (.*?) \| (.+?) \|$"
    told = {
        name: (kind, tuple(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels, _ in re.findall(row, PAGE.read_text(), re.M)
    }
    async with opened_server() as server:
        fill(server)
        metrics = Metrics(server)  # type: ignore[arg-type]
        server.gateway.subscribe(metrics)
        await server.call("add", {"a": 1, "b": 2})
        for name in ("dispatch.retry", "dispatch.deduplicated", "circuit.opened"):
            metrics(DispatchEvent(name, 0, "add", deduplicated=True))  # type: ignore[arg-type]
        metrics(DispatchEvent("dispatch.success", 0, "add", parent_id="c1"))  # type: ignore[arg-type]
        shown: dict[str, Any] = {}
        for family in metrics.registry.collect():
            if family.name.startswith("callyard_"):
                name = f"{family.name}_total" if family.type == "counter" else family.name
                labels = [key for key in family.samples[0].labels if key != "le"] if family.samples else None
                shown[name] = (family.type, None if labels is None else tuple(labels))
    assert shown == told, "every name has samples here, with the labels of its row"
