"""Shopping carts, and a crowd that floods one of them: the others are served on, and nothing is lost.

    python examples/carts.py
    python examples/carts.py --plot carts.svg

Each cart is a spot: its messages come one at a time, in order, and each takes a moment, as a write to a database would.
Visitors send to carts of their own, at a steady pace; a second into the run a crowd sends 1,500 messages to one cart
at once. There is no network: visitors and crowd are sources of a transport in memory, which holds what the host
has no room for yet. Everything else is as in earnest, the clock included.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Final, NamedTuple

import msgspec

from callyard import Host
from callyard.testing.scripted_transport import ScriptedTransport

CARTS: Final = 20
JOBS_MAX: Final = 64
"""Messages that may be received before their turn begins."""
WORK_S: Final = 0.001
"""What a message costs its cart, in which the others go on."""
PACE_S: Final = 0.004
"""A visitor's message every so often, to the next cart."""
SAMPLE_S: Final = 0.01
FLOODED: Final = "cart/0"


class Add(msgspec.Struct):
    item: str
    sent_at_s: float


class Sample(NamedTuple):
    at_s: float
    permits: int
    is_paused: bool
    queue: int
    """Of all carts, in the host."""
    unread: int
    """Of the crowd's messages, in the transport."""


class Waited(NamedTuple):
    at_s: float
    waited_s: float


class Run(NamedTuple):
    samples: list[Sample]
    waits: list[Waited]
    """Of messages to the other carts, from the send to the start of the handler."""
    flood_from_s: float
    flood_to_s: float
    handled: int
    sent: int
    pause_permits: int


class Cart:
    handled = 0
    waits: list[Waited]
    """Of all carts but the flooded one."""

    def __init__(self, spot: str) -> None:
        self.spot = spot
        self.items: dict[str, int] = {}

    @Host.handler
    async def add(self, message: Add) -> None:
        now_s = time.perf_counter()
        if self.spot != FLOODED:
            Cart.waits.append(Waited(now_s, now_s - message.sent_at_s))
        await asyncio.sleep(WORK_S)
        self.items[message.item] = self.items.get(message.item, 0) + 1
        Cart.handled += 1


def message_of(item: str) -> bytes:
    return msgspec.json.encode(Add(item, time.perf_counter()))


async def run(seconds: float, flood: int) -> Run:
    transport = ScriptedTransport()
    crowd = transport.add_source("crowd")
    visitors = [transport.add_source(f"visitor-{number}") for number in range(1, CARTS)]
    host = Host(transport=transport, jobs_max=JOBS_MAX)
    host.spots("cart/*", Cart)
    Cart.handled, Cart.waits = 0, []
    samples: list[Sample] = []
    sent = 0
    started_at_s = time.perf_counter()
    flood_from_s = flood_to_s = 0.0

    async def visit() -> None:
        nonlocal sent
        while time.perf_counter() < started_at_s + seconds:
            visitor = visitors[sent % len(visitors)]
            visitor.one_way(f"cart/{1 + sent % len(visitors)}", message_of("tea"), message_type="Add")
            sent += 1
            await asyncio.sleep(PACE_S)

    async def look() -> None:
        while True:
            capacity = host.status().capacity
            samples.append(
                Sample(
                    time.perf_counter() - started_at_s,
                    capacity.permits_in_use,
                    capacity.pressure_state == "paused",
                    capacity.queued_application_jobs,
                    crowd.unread,
                )
            )
            await asyncio.sleep(SAMPLE_S)

    async with host:
        looking = asyncio.create_task(look())
        visiting = asyncio.create_task(visit())
        await asyncio.sleep(min(1.0, seconds / 4))
        flood_from_s = time.perf_counter() - started_at_s
        crowd.one_way(FLOODED, message_of("balloon"), message_type="Add", count=flood)
        while crowd.unread:
            await asyncio.sleep(SAMPLE_S)
        flood_to_s = time.perf_counter() - started_at_s
        await visiting
        while Cart.handled < sent + flood:
            await asyncio.sleep(SAMPLE_S)
        looking.cancel()
    waits = [Waited(wait.at_s - started_at_s, wait.waited_s) for wait in Cart.waits]
    pause_permits = host.status().capacity.pause_permit_count
    return Run(samples, waits, flood_from_s, flood_to_s, Cart.handled, sent + flood, pause_permits)


def tell(run: Run) -> None:
    def waits_of(is_flooded: bool) -> str:
        waits_ms = [
            wait.waited_s * 1_000
            for wait in run.waits
            if (run.flood_from_s <= wait.at_s < run.flood_to_s) == is_flooded
        ]
        if len(waits_ms) < 2:
            return "too few to tell"
        return f"median {median(waits_ms):6.1f} ms, p99 {quantiles(waits_ms, n=100)[-1]:6.1f} ms"

    print(f"sent {run.sent:,}, handled {run.handled:,}, lost {run.sent - run.handled}")
    print(f"permits: {JOBS_MAX}, most in use {max(sample.permits for sample in run.samples)}")
    print(f"most of the crowd's messages left in the transport: {max(sample.unread for sample in run.samples):,}")
    print(f"other carts, calm:    {waits_of(False)}")
    print(f"other carts, flooded: {waits_of(True)}")


# --- the plot ---------------------------------------------------------------------------------------------------------

WIDTH: Final = 860
LEFT: Final = 70
PANEL: Final = 150
GAP: Final = 52
TOP: Final = 58
INK, MUTED, GRID, PAUSED = "#1f2933", "#62707d", "#e3e8ec", "#fde8d4"
COLOURS: Final = ("#1f77b4", "#d1495b", "#2a9d8f")


class Line(NamedTuple):
    name: str
    points: Sequence[tuple[float, float]]


def draw(run: Run) -> str:
    end_s = max(run.samples[-1].at_s, 0.1)
    binned: dict[int, list[float]] = {}
    for wait in run.waits:
        binned.setdefault(int(wait.at_s / 0.05), []).append(wait.waited_s * 1_000)
    panels = [
        ("Permits in use", [Line("in use", [(one.at_s, one.permits) for one in run.samples])]),
        (
            "Messages",
            [
                Line("queued in the host", [(one.at_s, one.queue) for one in run.samples]),
                Line("of the crowd, in the transport", [(one.at_s, one.unread) for one in run.samples]),
            ],
        ),
        (
            "Wait of the other carts, ms",
            [
                Line("median", [(0.05 * at + 0.025, median(ms)) for at, ms in sorted(binned.items())]),
                Line("longest", [(0.05 * at + 0.025, max(ms)) for at, ms in sorted(binned.items())]),
            ],
        ),
    ]
    height = TOP + len(panels) * (PANEL + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12" fill="{INK}" role="img" aria-label="A flood on one cart: permits, messages, waits">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="26" font-size="16" font-weight="bold">A flood on one of {CARTS} carts</text>',
        f'<text x="{LEFT}" y="44" fill="{MUTED}">{run.sent:,} messages sent, {run.sent - run.handled} lost; '
        "shaded: senders are told to pause</text>",
    ]
    for number, (title, lines) in enumerate(panels):
        limits = [("limit", JOBS_MAX), ("pause", run.pause_permits)] if number == 0 else []
        parts += _draw_panel(TOP + number * (PANEL + GAP), title, lines, end_s, run.samples, limits)
    parts.append(f'<text x="{WIDTH - 20}" y="{height - 12}" text-anchor="end" fill="{MUTED}">seconds</text>')
    return "\n".join([*parts, "</svg>\n"])


def _draw_panel(
    top: float,
    title: str,
    lines: Sequence[Line],
    end_s: float,
    samples: Sequence[Sample],
    limits: Sequence[tuple[str, int]],
) -> list[str]:
    top += 18
    right, bottom = WIDTH - 20, top + PANEL - 18
    most = _round_up(max([1.0, *(y for line in lines for _, y in line.points), *(float(y) for _, y in limits)]))

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + (right - LEFT) * x / end_s, bottom - (bottom - top) * y / most

    parts = [f'<text x="{LEFT}" y="{top - 8}" font-weight="bold">{title}</text>']
    for from_s, to_s in _paused_spans(samples):
        x, until = at(from_s, 0)[0], at(to_s, 0)[0]
        parts.append(
            f'<rect x="{x:.1f}" y="{top:.1f}" width="{until - x:.1f}" height="{bottom - top:.1f}" fill="{PAUSED}"/>'
        )
    for share in (0.0, 0.5, 1.0):
        _, y = at(0, most * share)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="{GRID}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="{MUTED}">{most * share:g}</text>')
    for second in range(int(end_s) + 1):
        x, _ = at(second, 0)
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16:.1f}" text-anchor="middle" fill="{MUTED}">{second}</text>')
    for name, value in limits:
        _, y = at(0, value)
        parts.append(
            f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="{MUTED}" stroke-dasharray="4 4"/>'
            f'<text x="{LEFT + 6}" y="{y - 4:.1f}" fill="{MUTED}">{name} {value}</text>'
        )
    label = float(right)
    for line, colour in reversed(list(zip(lines, COLOURS, strict=False))):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in line.points))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(f'<text x="{label:.0f}" y="{top - 8}" text-anchor="end" fill="{colour}">{line.name}</text>')
        label -= 7 * len(line.name) + 16
    return parts


def _paused_spans(samples: Sequence[Sample]) -> list[tuple[float, float]]:
    spans: list[tuple[float, float]] = []
    for one, following in pairwise(samples):
        if one.is_paused:
            if spans and spans[-1][1] == one.at_s:
                spans[-1] = (spans[-1][0], following.at_s)
            else:
                spans.append((one.at_s, following.at_s))
    return spans


def _round_up(value: float) -> float:
    """To 1, 2 or 5 of a power of ten."""
    power = 10 ** (len(str(int(value))) - 1)
    return float(next(step * power for step in (1, 2, 5, 10) if step * power >= value))


def _seconds(text: str) -> float:
    try:
        if 0 < (value := float(text)) <= 3_600:
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"expected seconds above 0 and up to 3,600, got {text!r}")


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1_000_000:
        raise argparse.ArgumentTypeError(f"expected a number of messages from 1 to 1000000, got {text!r}")
    return int(text)


def _writable(text: str) -> Path:
    if not (path := Path(text)).absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}: make it first")
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=_seconds, default=5.0, help="how long the visitors come (default: 5)")
    parser.add_argument("--flood", type=_count, default=1_500, help="messages of the crowd (default: 1500)")
    parser.add_argument("--plot", type=_writable, help="write the run as an SVG file")
    options = parser.parse_args(arguments)
    done = asyncio.run(run(options.seconds, options.flood))
    tell(done)
    if options.plot is not None:
        options.plot.write_text(draw(done), encoding="utf-8")
        print(f"{options.plot} has the run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
