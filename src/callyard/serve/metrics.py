"""What `/metrics` shows, in the text format of Prometheus: one list of names, one subscriber that counts, one reading.

What is counted comes from events and stands in plain dictionaries: a call costs a few of their steps, and no lock. What
is there now is read from the statistics of its owner when somebody looks. Everything runs on the server's loop, so the
figures of one answer belong together. Nothing here is global: two servers in one process share nothing.

The series are bounded: `tool` is a name that the registry has, and only the first `TOOLS_MAX` of them; a tenant is no
label, for there may be as many as there are customers. Source: tool-dispatch D29, D36; job-queue R68, R115.
"""

from __future__ import annotations

import math
import platform
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Final, Literal

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

import callyard
from callyard.dispatch.events import DispatchEvent
from callyard.errors import CallyardError
from callyard.host.jobs import JobQueueStatus
from callyard.policy.breaker import BreakerState
from callyard.transport.port import FlowState

if TYPE_CHECKING:
    from callyard.serve.server import Server

TOOLS_MAX: Final = 200
"""Tools with series of their own."""
OTHER: Final = "_other"
"""In place of names that are not known, or are too many."""
OK: Final = "ok"
BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_BREAKER: Final[Mapping[BreakerState, int]] = {
    BreakerState.CLOSED: 0,
    BreakerState.HALF_OPEN: 1,
    BreakerState.OPEN: 2,
}

FamilyType = Literal["counter", "gauge", "histogram"]
Labels = tuple[str, ...]


class Family(msgspec.Struct, frozen=True):
    """One documented name."""

    name: str
    type: FamilyType
    labels: Labels
    help: str


def _counter(name: str, text: str, *labels: str) -> Family:
    assert name.endswith("_total"), name
    return Family(name, "counter", labels, text)


def _gauge(name: str, text: str, *labels: str) -> Family:
    return Family(name, "gauge", labels, text)


FAMILIES: Final[tuple[Family, ...]] = (
    _gauge("callyard_build_info", "always 1; the versions are in its labels", "version", "python"),
    _counter(
        "callyard_calls_total",
        "calls that ended, refused ones included; kind is ok or a kind of error, outcome not_run, ran or unknown",
        *("tool", "kind", "outcome"),
    ),
    Family("callyard_call_duration_seconds", "histogram", ("tool",), "from a call's start to its end, waits included"),
    _counter("callyard_subcalls_total", "calls that other calls made, as they ended", "tool", "kind", "outcome"),
    _counter("callyard_attempts_total", "attempts that began", "tool"),
    _counter("callyard_retries_total", "attempts that were decided on after a failed one", "tool"),
    _counter("callyard_calls_deduplicated_total", "calls that got the answer of another with their key", "tool"),
    _gauge("callyard_breaker_state", "0 closed, 1 half open, 2 open, of any tenant", "tool"),
    _counter("callyard_breaker_opened_total", "how often the tool's breaker opened", "tool"),
    _gauge("callyard_calls_open", "calls under way in the dispatcher, nested ones included"),
    _gauge("callyard_calls_running", "of these: they hold a slot"),
    _gauge("callyard_calls_queued", "of these: they wait for a slot, an owner's turn or a rate"),
    _gauge("callyard_calls_adrift", "calls whose connection is gone and that run on"),
    _gauge("callyard_owners", "owners with calls under way"),
    _gauge("callyard_key_flights", "keys whose call is under way"),
    _counter("callyard_key_claims_lost_total", "ends that the key store did not take"),
    _gauge("callyard_stragglers_running", "handlers that did not end when they were stopped, and still run"),
    _counter("callyard_stragglers_total", "handlers that did not end when they were stopped"),
    _counter("callyard_subscriber_failures_total", "events whose subscriber raised"),
    _counter("callyard_calls_refused_total", "calls that ended at the gateway: names, rates, owners, draining"),
    _counter("callyard_http_requests_refused_total", "HTTP requests that no call was made for, by status", "status"),
    _counter("callyard_calls_lost_total", "calls whose connection went before their answer"),
    _gauge("callyard_permits_limit", "calls that may be taken in and have not begun (M)"),
    _gauge("callyard_permits_in_use", "permits out"),
    _gauge("callyard_permits_peak", "most permits out at once"),
    _gauge("callyard_permits_paused", "1 while the pressure is above its threshold"),
    _gauge("callyard_permit_waiters", "connections in line for a permit"),
    _counter("callyard_permit_waits_total", "requests that had to wait for a permit"),
    _counter("callyard_permit_wait_seconds_total", "how long those waited whose wait is over"),
    _counter("callyard_pauses_total", "how often the pressure rose above its threshold"),
    _counter("callyard_pause_seconds_total", "how long it was there"),
    _gauge("callyard_executors", "places for executor processes, by what is in them", "pool", "state"),
    _gauge("callyard_executor_calls", "calls at the executors", "pool"),
    _gauge("callyard_executor_memory_bytes", "resident size of all executors by their last heartbeats", "pool"),
    _counter("callyard_executor_restarts_total", "executors that took the place of another", "pool"),
    _gauge("callyard_worker_calls", "calls that the worker holds, subcalls included"),
    _gauge("callyard_worker_calls_waiting", "of these: they wait for IO, a subcall or a sleep"),
    _counter("callyard_worker_stale_total", "messages of attempts that were over"),
    _gauge("callyard_io_requests_open", "IO requests on their way, running or waiting", "provider", "state"),
    _counter("callyard_io_requests_total", "IO requests that were performed", "provider"),
    _counter("callyard_io_failures_total", "of these: they failed", "provider"),
    _counter("callyard_io_refused_total", "IO requests that may not be made, or found no room", "provider"),
    _counter("callyard_io_saved_total", "IO requests that were answered from a cache or by an equal one", "provider"),
    _gauge("callyard_kept_results", "results too large for an answer, kept to be read"),
    _gauge("callyard_kept_bytes", "their size"),
    _counter("callyard_kept_dropped_total", "kept results that went before their time, for newer ones"),
    _gauge("callyard_connections", "connections by listener", "listener"),
    _counter("callyard_http_requests_total", "HTTP requests that were answered", "listener"),
    _counter(
        "callyard_connections_closed_total",
        "connections that the listener ended: too many (refused), too slow (timed_out), no HTTP (malformed);"
        " or whose peer went while it was answered (vanished)",
        *("listener", "reason"),
    ),
    _counter("callyard_records_dropped_total", "log and audit records that did not fit or could not be written", "to"),
    _gauge("callyard_loop_lag_seconds", "how late the event loop's last heartbeat was"),
    _gauge("callyard_loop_lag_peak_seconds", "the latest heartbeat of the last minute"),
)

Sample = tuple[str, Labels, float]
"""A family's name, the values of its labels, the figure."""


class _Durations:
    """A histogram of milliseconds."""

    __slots__ = ("counts", "sum_ms")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.sum_ms = 0

    def add(self, ms: int) -> None:
        self.counts[bisect_left(_BUCKETS_MS, ms)] += 1
        self.sum_ms += ms


_BUCKETS_MS: Final = [round(bound * 1_000) for bound in BUCKETS_S]
_BOUNDS: Final = [*map(str, BUCKETS_S), "+Inf"]


class Metrics:
    """Of one server. It is a subscriber of the gateway's events; call it on the loop only."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(_Reader(self))
        ProcessCollector(registry=self.registry)
        self._tools: set[str] = set()
        """Those with series of their own."""
        self._calls: Counter[Labels] = Counter()
        self._subcalls: Counter[Labels] = Counter()
        self._attempts: Counter[Labels] = Counter()
        self._retries: Counter[Labels] = Counter()
        self._deduplicated: Counter[Labels] = Counter()
        self._opened: Counter[Labels] = Counter()
        self._durations: dict[str, _Durations] = {}
        self.lags_s: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)
        """The loop's: last, and the latest of the last minute."""

    def __call__(self, event: DispatchEvent) -> None:
        name = event.name
        if name == "dispatch.start":
            return
        tool = event.tool if event.tool in self._tools else self._name_tool(event.tool)
        if name == "dispatch.attempt":
            self._attempts[(tool,)] += 1
        elif name == "dispatch.retry":
            self._retries[(tool,)] += 1
        elif name == "circuit.opened":
            self._opened[(tool,)] += 1
        elif name.startswith("dispatch."):
            self._count_end(event, tool)

    def _count_end(self, event: DispatchEvent, tool: str) -> None:
        kind = OK if event.kind is None else event.kind.value
        outcome = "ran" if event.outcome is None else event.outcome.value
        if event.parent_id:
            self._subcalls[(tool, kind, outcome)] += 1
            return
        self._calls[(tool, kind, outcome)] += 1
        if event.deduplicated:
            self._deduplicated[(tool,)] += 1
        durations = self._durations.get(tool)
        if durations is None:
            durations = self._durations[tool] = _Durations()
        durations.add(event.duration_ms)

    def _name_tool(self, name: str) -> str:
        """The value of the label: what a client made up is no name."""
        if len(self._tools) >= TOOLS_MAX or name not in self._server.dispatcher.registry:
            return OTHER
        self._tools.add(name)
        return name

    # --- what is shown --------------------------------------------------------------------------------------------

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The text, in the form that the header Accept asks for, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def collect(self) -> Iterator[Metric]:
        """Every family, in the order of the list, those without a sample too."""
        samples: dict[str, list[tuple[Labels, float]]] = {family.name: [] for family in FAMILIES}
        for name, labels, value in self._read():
            samples[name].append((labels, value))
        for family in FAMILIES:
            if family.type == "histogram":
                yield self._histogram(family)
            else:
                yield _plain(family, samples[family.name])

    def _histogram(self, family: Family) -> Metric:
        metric = HistogramMetricFamily(family.name, family.help, labels=family.labels)
        for tool, durations in self._durations.items():
            counts = [float(count) for count in accumulate(durations.counts)]
            metric.add_metric([tool], list(zip(_BOUNDS, counts, strict=True)), durations.sum_ms / 1_000)
        return metric

    def _read(self) -> Iterator[Sample]:
        yield "callyard_build_info", (callyard.__version__, platform.python_version()), 1
        yield from self._read_counts()
        yield from self._read_dispatcher()
        yield from self._read_gateway()
        yield from self._read_executors()
        yield from self._read_io()
        yield from self._read_kept()
        yield from self._read_listeners()
        if self._server.audit is not None:
            yield "callyard_records_dropped_total", ("audit",), self._server.audit.dropped
        if self._server.logs is not None:
            yield "callyard_records_dropped_total", ("log",), self._server.logs.dropped
        last_s, peak_s = self.lags_s()
        yield "callyard_loop_lag_seconds", (), last_s
        yield "callyard_loop_lag_peak_seconds", (), peak_s

    def _read_counts(self) -> Iterator[Sample]:
        for name, counts in (
            ("callyard_calls_total", self._calls),
            ("callyard_subcalls_total", self._subcalls),
            ("callyard_attempts_total", self._attempts),
            ("callyard_retries_total", self._retries),
            ("callyard_calls_deduplicated_total", self._deduplicated),
            ("callyard_breaker_opened_total", self._opened),
        ):
            for labels, count in counts.items():
                yield name, labels, count

    def _read_dispatcher(self) -> Iterator[Sample]:
        dispatcher = self._server.dispatcher
        for tool in self._tools:
            yield "callyard_breaker_state", (tool,), _BREAKER[dispatcher.breaker_state(tool)]
        statistics = dispatcher.statistics()
        yield "callyard_calls_open", (), statistics.calls
        yield "callyard_calls_running", (), statistics.running
        yield "callyard_calls_queued", (), statistics.queued
        yield "callyard_key_flights", (), statistics.flights
        yield "callyard_key_claims_lost_total", (), statistics.lost_claims
        yield "callyard_stragglers_running", (), len(statistics.stragglers)
        yield "callyard_stragglers_total", (), statistics.stragglers_total
        yield "callyard_subscriber_failures_total", (), statistics.subscriber_failures

    def _read_gateway(self) -> Iterator[Sample]:
        statistics = self._server.gateway.statistics()
        yield "callyard_calls_adrift", (), statistics.adrift
        yield "callyard_owners", (), statistics.lanes
        yield "callyard_calls_refused_total", (), statistics.refused_total
        for status, count in self._server.gateway.refused_by_status.items():
            yield "callyard_http_requests_refused_total", (str(status),), count
        yield "callyard_calls_lost_total", (), statistics.lost_total
        yield "callyard_permit_waiters", (), statistics.waiting
        yield from _read_permits(self._server.gateway.jobs.status())

    def _read_executors(self) -> Iterator[Sample]:
        worker = self._server.worker
        states: Counter[Labels] = Counter()
        calls: Counter[str] = Counter()
        memory: Counter[str] = Counter()
        for slot in worker.slots():
            states[(slot.pool, slot.state.lower())] += 1
            calls[slot.pool] += slot.inflight
            memory[slot.pool] += slot.memory_bytes
        for labels, count in states.items():
            yield "callyard_executors", labels, count
        for pool, count in calls.items():
            yield "callyard_executor_calls", (pool,), count
            yield "callyard_executor_memory_bytes", (pool,), memory[pool]
        for pool, count in worker.restarts().items():
            yield "callyard_executor_restarts_total", (pool,), count
        try:
            statistics = worker.statistics()
        except CallyardError:  # it has failed, which `/livez` says, and what there is else is still of use
            return
        yield "callyard_worker_calls", (), statistics.calls
        yield "callyard_worker_calls_waiting", (), statistics.waiting
        yield "callyard_worker_stale_total", (), statistics.stale

    def _read_io(self) -> Iterator[Sample]:
        for provider, io in self._server.worker.io_statistics().items():
            yield "callyard_io_requests_open", (provider, "running"), io.running
            yield "callyard_io_requests_open", (provider, "waiting"), io.waiting
            yield "callyard_io_requests_total", (provider,), io.performed
            yield "callyard_io_failures_total", (provider,), io.failed
            yield "callyard_io_refused_total", (provider,), io.refused
            yield "callyard_io_saved_total", (provider,), io.hits + io.joins

    def _read_kept(self) -> Iterator[Sample]:
        kept = self._server.kept
        yield "callyard_kept_results", (), len(kept)
        yield "callyard_kept_bytes", (), kept.held_bytes
        yield "callyard_kept_dropped_total", (), kept.dropped_total

    def _read_listeners(self) -> Iterator[Sample]:
        for name, listener in self._server.listeners.items():
            statistics = listener.statistics()
            yield "callyard_connections", (name,), statistics.connections
            yield "callyard_http_requests_total", (name,), statistics.requests
            for reason in ("refused", "timed_out", "malformed", "vanished"):
                yield "callyard_connections_closed_total", (name, reason), getattr(statistics, reason)


def _read_permits(jobs: JobQueueStatus) -> Iterator[Sample]:
    yield "callyard_permits_limit", (), jobs.limit
    yield "callyard_permits_in_use", (), jobs.in_use
    yield "callyard_permits_peak", (), jobs.peak
    yield "callyard_permits_paused", (), int(jobs.transition.state is FlowState.PAUSED)
    yield "callyard_permit_waits_total", (), jobs.waits
    yield "callyard_permit_wait_seconds_total", (), jobs.wait_ms / 1_000
    yield "callyard_pauses_total", (), jobs.to_paused
    yield "callyard_pause_seconds_total", (), jobs.pause_cumulative_ms / 1_000


def _plain(family: Family, samples: Iterable[tuple[Labels, float]]) -> Metric:
    build = CounterMetricFamily if family.type == "counter" else GaugeMetricFamily
    metric = build(family.name, family.help, labels=family.labels)
    for labels, value in samples:
        assert len(labels) == len(family.labels), family.name
        assert not math.isnan(value), family.name
        metric.add_metric(labels, value)
    return metric


class _Reader(Collector):
    """What the registry asks."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics.collect()
