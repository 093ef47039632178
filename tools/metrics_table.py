"""Write the page of metrics, docs/reference/metrics.md, to standard output."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from callyard.serve.metrics import BUCKETS_S, FAMILIES, OTHER, TOOLS_MAX, Family

PAGE: Final = Path(__file__).parent.parent / "docs" / "reference" / "metrics.md"
HEAD: Final = f"""# Metrics

`callyard serve functions.py --admin 127.0.0.1:8701` shows these at `/metrics`, in the text format of Prometheus, or as
OpenMetrics for who asks for that. Units are seconds and bytes. `process_*` come with them, of the server's own process.

A tenant is no label: there may be as many as there are customers. `tool` is a function's name; names that there are
not, and those beyond the first {TOOLS_MAX} that were called, are `{OTHER}`. Counters begin at 0 with the process.

| name | type | labels | what |
| --- | --- | --- | --- |
"""
BUCKET: Final = "callyard_call_duration_seconds_bucket"
TAIL: Final = f"""
Durations fall into buckets up to {", ".join(f"{bound:g}" for bound in BUCKETS_S)} seconds, and more.

## What to watch

| question | expression |
| --- | --- |
| calls a second that fail, by tool | `sum by (tool) (rate(callyard_calls_total{{kind!="ok"}}[5m]))` |
| calls of which nobody knows whether they took effect | `sum(rate(callyard_calls_total{{outcome="unknown"}}[5m]))` |
| 99 of 100 calls are faster than | `histogram_quantile(0.99, sum by (le) (rate({BUCKET}[5m])))` |
| is it full? | `callyard_permits_in_use / callyard_permits_limit`, `callyard_permit_waiters` |
| functions that kill their process | `rate(callyard_executor_restarts_total[5m])` |
| does the loop turn? | `callyard_loop_lag_peak_seconds` |
"""


def show_row(family: Family) -> str:
    labels = ", ".join(f"`{label}`" for label in family.labels)
    return f"| `{family.name}` | {family.type} | {labels} | {family.help} |\n"


def build_page() -> str:
    return HEAD + "".join(map(show_row, FAMILIES)) + TAIL


if __name__ == "__main__":
    print(build_page(), end="")
