"""Calls as OpenTelemetry spans and metrics, by the conventions for generative AI (tool execution). Extra: `otel`.

A call is a span `execute_tool {tool}` from its start to its end; attempts and retries are events of it. The SDK's own
processors queue and drop, so this subscriber keeps nothing but the spans of calls that have not ended.
Source: tool-dispatch D29, D30.
"""

from __future__ import annotations

from typing import Final

import callyard
from callyard.dispatch.events import DispatchEvent
from callyard.errors import ErrorKind
from callyard.extras import needs
from callyard.ids import CallId, Tenant

with needs("otel", "OtelExporter"):
    from opentelemetry import context as otel_context
    from opentelemetry import metrics, propagate, trace
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
    from opentelemetry.trace import Span, SpanContext, SpanKind, Status, StatusCode, TracerProvider

OPEN_MAX: Final = 100_000
"""Calls with a span at one time; a further call has none, and is counted in `dropped`."""
_SCOPE: Final = "callyard.dispatch"
_SECONDS: Final = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
"""The bounds that the conventions give."""
_OPERATION: Final = "execute_tool"
_UNKNOWN_TOOL: Final = "_OTHER"
"""In metrics, a tool that is not there: callers could else make a series with each name."""
_BREAKER_STATES: Final = {"circuit.closed": 0, "circuit.half_open": 1, "circuit.opened": 2}


class OtelExporter:
    """A subscriber. Called on the loop, in the context of whoever dispatches: that is where a span finds its parent."""

    def __init__(
        self, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
    ) -> None:
        """The process's own providers unless others are given."""
        self.dropped = 0
        self._tracer = trace.get_tracer(_SCOPE, callyard.__version__, tracer_provider)
        self._spans: dict[CallId, tuple[Span, SpanContext]] = {}
        """Of calls that have not ended: the span, and the one that was current around it."""
        self._breakers: dict[str, dict[Tenant, int]] = {}
        """By tool: of the tenants for whom it is not closed."""
        meter = metrics.get_meter(_SCOPE, callyard.__version__, meter_provider)
        self._duration = meter.create_histogram(
            "gen_ai.execute_tool.duration",
            unit="s",
            description="The duration of one tool call, from dispatch to its end.",
            explicit_bucket_boundaries_advisory=_SECONDS,
        )
        self._calls = meter.create_counter("callyard.dispatch.calls", unit="{call}", description="Calls that ended.")
        self._retries = meter.create_counter(
            "callyard.dispatch.retries", unit="{attempt}", description="Attempts after a call's first."
        )
        meter.create_observable_gauge(
            "callyard.dispatch.breaker.state",
            callbacks=[self._observe_breakers],
            description="0: closed, 1: half open, 2: open, of any tenant; of tools whose breaker has opened once.",
        )

    def __call__(self, event: DispatchEvent) -> None:
        match event.name:
            case "dispatch.start":
                self._start(event)
            case "dispatch.attempt":
                self._add(event, "attempt")
            case "dispatch.retry":
                self._add(event, "retry")
                self._retries.add(1, {"gen_ai.tool.name": event.tool})
            case "dispatch.success" | "dispatch.error" | "dispatch.deduplicated":
                self._end(event)
            case "circuit.opened" | "circuit.half_open" | "circuit.closed":
                states = self._breakers.setdefault(event.tool, {})
                states.pop(event.tenant, None)
                if event.name != "circuit.closed":
                    states[event.tenant] = _BREAKER_STATES[event.name]

    def enter(self, call_id: CallId) -> None:
        """Make the call's span the current one from here on: for the context (`contextvars`) of its handler alone."""
        entry = self._spans.get(call_id)
        if entry is not None:
            otel_context.attach(trace.set_span_in_context(entry[0]))

    def carrier(self, call_id: CallId) -> dict[str, str]:
        """The call's trace context as headers (`traceparent`, …), for a handler in another process."""
        carrier: dict[str, str] = {}
        entry = self._spans.get(call_id)
        if entry is not None:
            propagate.inject(carrier, trace.set_span_in_context(entry[0]))
        return carrier

    def close(self) -> None:
        """End the spans that are still open, as they are. The providers are whoever's made them."""
        for span, _ in self._spans.values():
            span.end()
        self._spans.clear()

    def _start(self, event: DispatchEvent) -> None:
        if len(self._spans) >= OPEN_MAX:
            self.dropped += 1
            return
        around = trace.get_current_span().get_span_context()
        context = None
        above = self._spans.get(event.parent_id) if event.parent_id else None
        if above is not None and around == above[1]:  # nothing is nearer: its handler made no span of its own
            context = trace.set_span_in_context(above[0])
        attributes: dict[str, str] = {
            "gen_ai.operation.name": _OPERATION,
            "gen_ai.tool.name": event.tool,
            "gen_ai.tool.type": "function",
            "gen_ai.tool.call.id": event.call_id,
            "callyard.tenant": event.tenant,
        }
        if event.owner:
            attributes["callyard.owner"] = event.owner
        span = self._tracer.start_span(
            f"{_OPERATION} {event.tool}", context, kind=SpanKind.INTERNAL, attributes=attributes
        )
        self._spans[event.call_id] = span, around

    def _add(self, event: DispatchEvent, name: str) -> None:
        entry = self._spans.get(event.call_id)
        if entry is None or not entry[0].is_recording():
            return
        attributes: dict[str, str | int] = {"callyard.attempt": event.attempt}
        if event.kind is not None:
            attributes["error.type"] = event.kind.value
        if name == "retry":
            attributes["callyard.delay_ms"] = event.duration_ms
        entry[0].add_event(name, attributes)

    def _end(self, event: DispatchEvent) -> None:
        labels = {
            "gen_ai.operation.name": _OPERATION,
            "gen_ai.tool.name": _UNKNOWN_TOOL if event.kind is ErrorKind.NOT_FOUND else event.tool,
            "gen_ai.tool.type": "function",
        }
        if event.kind is not None:
            labels["error.type"] = event.kind.value
        entry = self._spans.pop(event.call_id, None)
        around = None
        if entry is not None:
            span = entry[0]
            around = trace.set_span_in_context(span)  # so that a measurement can name its trace
            span.set_attribute("callyard.attempts", event.attempt)
            span.set_attribute("callyard.deduplicated", event.deduplicated)
            if event.kind is not None:
                span.set_attribute("error.type", event.kind.value)
                span.set_status(Status(StatusCode.ERROR, event.message))
            if event.outcome is not None and event.kind is not None:
                span.set_attribute("callyard.outcome", event.outcome.value)
            if event.kind is ErrorKind.NOT_FOUND:
                span.update_name(_OPERATION)
            span.end()
        self._duration.record(event.duration_ms / 1_000, labels, around)
        self._calls.add(1, {**labels, "callyard.deduplicated": event.deduplicated}, around)

    def _observe_breakers(self, options: CallbackOptions) -> list[Observation]:
        return [
            Observation(max(states.values(), default=0), {"gen_ai.tool.name": tool})
            for tool, states in ((tool, states.copy()) for tool, states in self._breakers.copy().items())
        ]
