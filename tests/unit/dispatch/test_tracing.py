"""A call's span is current in its handler, and goes to executors as trace context."""

from __future__ import annotations

from typing import Any

import pytest

from callyard.dispatch.dispatcher import Dispatcher
from callyard.functions.registry import Registry
from callyard.testing.virtual_time import VirtualTimers, virtual_time

sdk_trace = pytest.importorskip("opentelemetry.sdk.trace", reason="the extra otel is not installed")


def make_exporter() -> tuple[Any, Any, Any]:
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from callyard.dispatch.exporters.otel import OtelExporter

    memory = InMemorySpanExporter()
    provider = sdk_trace.TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    return OtelExporter(provider), provider.get_tracer("test"), memory


@pytest.mark.requirement("D29")
@pytest.mark.requirement("D30")
@virtual_time
async def test_spans_of_a_handler_hang_below_its_call() -> None:
    exporter, tracer, memory = make_exporter()
    registry = Registry()

    @registry.tool
    async def outer() -> int:
        with tracer.start_as_current_span("own work"):
            await dispatcher.dispatch("inner")
        return 1

    @registry.tool
    async def inner() -> int:
        return 2

    async with Dispatcher(registry, clock=VirtualTimers()) as dispatcher:
        unsubscribe = dispatcher.subscribe(exporter)
        with tracer.start_as_current_span("request"):
            assert (await dispatcher.dispatch("outer")).ok
        spans = {span.name: span for span in memory.get_finished_spans()}
        parents = {name: span.parent.span_id if span.parent else None for name, span in spans.items()}
        ids = {name: span.context.span_id for name, span in spans.items()}
        assert parents["execute_tool outer"] == ids["request"]
        assert parents["own work"] == ids["execute_tool outer"]
        assert parents["execute_tool inner"] == ids["own work"]
        unsubscribe()
        memory.clear()
        assert (await dispatcher.dispatch("inner")).ok
        assert not memory.get_finished_spans()
