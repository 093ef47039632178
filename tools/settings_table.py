"""Write the table of settings, as docs/reference/settings.md shows it, to standard output."""

from __future__ import annotations

from dataclasses import fields

from callyard.worker.config import ENVIRONMENT, WorkerConfig, setting_range

HEAD = """# Settings

By name to `Worker(…, name=value)` and `Yard(…)`; the command line also reads the variables. A value outside its range
is refused with the range. `EXECUTOR_COUNT` 0 means the CPUs this process may use (affinity and cgroup quota).

| setting | default | range | variable |
| --- | --- | --- | --- |
"""


def build_table() -> str:
    variables = {name: f"`CALLYARD_{variable}`" for variable, name in ENVIRONMENT.items()}
    rows = []
    for field in fields(WorkerConfig):
        low_high = setting_range(field.name)
        shown = "" if low_high is None else f"{low_high[0]:,} … {low_high[1]:,}"
        default = (
            "derived" if field.default is None else f"{field.default:,}" if _is_number(field.default) else field.default
        )
        rows.append(f"| `{field.name}` | {default} | {shown} | {variables.get(field.name, '')} |")
    return HEAD + "\n".join(rows) + "\n"


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


if __name__ == "__main__":
    print(build_table(), end="")
