"""The cost of one record from a source to its handler and back to a free permit, against a bare `asyncio.Queue`.

    python -m bench.host [--quick] [--json]

The host takes records from a transport in memory, decodes each into a Struct, and runs a handler that counts. The bare
one puts the same records into an `asyncio.Queue` and makes one task for each, which decodes and counts: no bounds, no
order, no owners. Both take turns in short chunks, and the ratio is that of each one's fastest chunk: what else the
machine does then counts for little. The same again at 10 owners and at 100,000, each record to the next one.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
import uvloop

from bench import microseconds, print_table
from callyard.host.host import Host
from callyard.transport.port import (
    Completion,
    FlowTarget,
    HeadKind,
    Outgoing,
    Record,
    RecordKind,
    SourceId,
    SourceKind,
)

BARE: Final = "asyncio.Queue, a task each"
OURS: Final = "host"
OWNERS: Final = (10, 100_000)
CHUNK_RECORDS: Final = 400
"""Some 3 ms for either: short enough to be left alone now and then."""
SOURCES: Final = 4
RATIO_MAX: Final = 3.0
OWNERS_RATIO_MAX: Final = 1.5
LOOPS: Final[dict[str, Callable[[], asyncio.AbstractEventLoop]]] = {
    "uvloop": uvloop.new_event_loop,
    "asyncio": asyncio.new_event_loop,
}
Chunk = Callable[[], Awaitable[None]]


class Add(msgspec.Struct, gc=False):
    count: int


class ListTransport:
    """Sources that are lists of records: `callyard.transport.port.Transport`, as little of it as costs nothing."""

    def __init__(self) -> None:
        self.lists: dict[SourceId, list[Record]] = {SourceId(f"peer-{number}"): [] for number in range(SOURCES)}
        """Next is last."""
        self._on_readable: Callable[[SourceId], None] = lambda source: None

    def fill(self, records: list[Record]) -> None:
        for number, (source, waiting) in enumerate(self.lists.items()):
            waiting.extend(reversed(records[number::SOURCES]))
            self._on_readable(source)

    def attach(self, on_readable: Callable[[SourceId], None], on_closed: Callable[[SourceId], None]) -> None:
        self._on_readable = on_readable

    def sources(self) -> list[SourceId]:
        return list(self.lists)

    def kind_of(self, source: SourceId) -> SourceKind:
        return SourceKind.MESH

    def head_kind(self, source: SourceId) -> HeadKind:
        return HeadKind.ORDINARY if self.lists[source] else HeadKind.NONE

    def take(self, source: SourceId) -> Record:
        return self.lists[source].pop()

    def take_completion(self, source: SourceId) -> Completion:
        raise LookupError(source)

    def start(self, outgoing: Outgoing) -> Awaitable[None]:
        raise LookupError(outgoing.target)

    def flow_targets(self) -> list[FlowTarget]:
        return []

    def snapshot(self) -> dict[str, int]:
        return {}

    async def close(self) -> None:
        pass


class Counted:
    """How many have come, and who waits for all of a chunk."""

    def __init__(self) -> None:
        self.left = 0
        self.over = asyncio.Event()

    def begin(self, count: int) -> None:
        self.left = count
        self.over.clear()

    def add(self, message: Add) -> None:
        self.left -= message.count
        if not self.left:
            self.over.set()


def make_records(owners: int, first: int, count: int) -> list[Record]:
    return [
        Record(
            RecordKind.ONE_WAY,
            SourceId(f"peer-{number % SOURCES}"),
            f"spot/{(first + number) % owners}",
            "Add",
            b'{"count":1}',
        )
        for number in range(count)
    ]


async def measure(owners: int, rounds: int) -> dict[str, float]:
    """Seconds for one record, of each one's fastest chunk."""
    counted = Counted()
    transport = ListTransport()
    host = Host(transport=transport)
    host.on("spot/*", Add)(counted.add)
    queue: asyncio.Queue[Record] = asyncio.Queue(maxsize=CHUNK_RECORDS)
    tasks: set[asyncio.Task[None]] = set()
    read = msgspec.json.Decoder(Add).decode

    async def handle(record: Record) -> None:
        counted.add(read(record.payload))

    async def consume() -> None:
        while True:
            task = asyncio.create_task(handle(await queue.get()))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def bare(records: list[Record]) -> None:
        for record in records:
            await queue.put(record)
        await counted.over.wait()

    async def ours(records: list[Record]) -> None:
        transport.fill(records)
        await counted.over.wait()

    async with host:
        for first in range(0, owners, CHUNK_RECORDS):  # all of them are there
            records = make_records(owners, first, min(CHUNK_RECORDS, owners - first))
            counted.begin(len(records))
            await ours(records)
        consumer = asyncio.create_task(consume())
        fastest = dict.fromkeys((BARE, OURS), float("inf"))
        chunks: dict[str, Callable[[list[Record]], Awaitable[None]]] = {BARE: bare, OURS: ours}
        first = 0
        gc.collect()
        gc.freeze()
        for _ in range(rounds):
            for name, chunk in chunks.items():
                records = make_records(owners, first, CHUNK_RECORDS)
                counted.begin(CHUNK_RECORDS)
                began_at = time.perf_counter()
                await chunk(records)
                fastest[name] = min(fastest[name], (time.perf_counter() - began_at) / CHUNK_RECORDS)
            first += CHUNK_RECORDS
        gc.unfreeze()
        consumer.cancel()
        assert host.status().capacity.permits_in_use == 0
    return fastest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", action="store_true", help="figures as JSON, in seconds")
    options = parser.parse_args()
    rounds = 200 if options.quick else 1_000
    figures: dict[str, Any] = {}
    for loop, factory in LOOPS.items():
        with asyncio.Runner(loop_factory=factory) as runner:
            figures[loop] = {owners: runner.run(measure(owners, rounds)) for owners in OWNERS}
    if options.json:
        print(json.dumps(figures))
        return 0
    rows = []
    for loop, by_owners in figures.items():
        few = by_owners[OWNERS[0]][OURS]
        for owners, figure in by_owners.items():
            ratio, growth = figure[OURS] / figure[BARE], figure[OURS] / few
            names = f"{loop}, {owners:,} owners"
            rows.append(
                [names, microseconds(figure[BARE]), microseconds(figure[OURS]), f"{ratio:.2f}", f"{growth:.2f}"]
            )
    columns = ["", BARE, OURS, "ratio", f"to {OWNERS[0]} owners"]
    print_table("one record: source to handler and back to a free permit", columns, rows)
    few, many = OWNERS
    print(f"wanted: at most {RATIO_MAX} times the queue, {many:,} owners at most {OWNERS_RATIO_MAX} times {few}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
