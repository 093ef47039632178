"""The raw limit of this machine: what any Python worker with Python executors can reach here, and what a pool does.

    python -m bench.limits [--quick] [--json]

`raw_limit()`: one uvloop parent and two children, Unix socketpairs, frames of about 290 bytes of JSON, a window of 128
to each child. The parent cuts the answers into frames and sends as many again; a child reads a chunk, cuts it, decodes
and encodes each frame with msgspec and answers with one write. Nothing schedules, validates or runs anything: a full
path is measured as a part of this. `process_pool()`: the standard library's ProcessPoolExecutor, no-op calls, one a
chunk. Both are bounded in time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from struct import Struct
from typing import Final

import msgspec
import uvloop

from bench import median, microseconds, p99, pinned, print_table, thousands, usable_cpus

CHILDREN: Final = 2
WINDOW: Final = 128
READ_BYTES: Final = 65_536
SECONDS: Final = 2.0
SECONDS_QUICK: Final = 0.4
SLICES: Final = 5

_LENGTH: Final = Struct(">I")

CALL: Final = {
    "message_type": "ExecuteCall",
    "call_id": "run-1-123456",
    "payload": {
        "task_id": "run-1",
        "function_id": "assess",
        "attempt_seq": 1,
        "args": {
            "year": 2013,
            "month": 1,
            "day": 1,
            "dep_time": 517,
            "dep_delay": 2,
            "arr_delay": 11,
            "carrier": "UA",
            "flight": 1545,
            "origin": "EWR",
            "dest": "IAH",
            "air_time": 227,
            "distance": 1400,
        },
    },
}


class RawLimit(msgspec.Struct, frozen=True):
    pipelined_per_s: float
    """Round trips a second, counted only."""
    with_future_per_s: float
    """The same with a future awaited for each call."""
    ping_s: float
    """Seconds of one round trip with nothing else under way, median, parent and child on one CPU."""
    ping_p99_s: float
    ping_two_cpus_s: float | None
    """The same on two CPUs; None: this process has one."""


class ProcessPool(msgspec.Struct, frozen=True):
    map_per_s: float
    """No-op calls a second by `map` with chunksize 1."""
    single_s: float
    """Seconds of one `submit` and `result`, median."""
    single_p99_s: float


# --- the child ------------------------------------------------------------------------------------


def echo(sock: socket.socket) -> None:
    """Answer each frame with its JSON, decoded and encoded again, until the other end closes."""
    decode = msgspec.json.Decoder().decode
    encode = msgspec.json.Encoder().encode
    pending = b""
    while chunk := sock.recv(READ_BYTES):
        data = pending + chunk if pending else chunk
        start, end, answers = 4, len(data), []
        while start <= end:
            (size,) = _LENGTH.unpack_from(data, start - 4)
            if start + size > end:
                break
            body = encode(decode(data[start : start + size]))
            answers.append(_LENGTH.pack(len(body)))
            answers.append(body)
            start += size + 4
        pending = data[start - 4 :]
        if answers:
            sock.sendall(b"".join(answers))


@contextmanager
def echo_child() -> Iterator[tuple[socket.socket, int]]:
    """A child that echoes, as the socket to it and its process id; gone when the block ends."""
    ours, theirs = socket.socketpair()
    child = subprocess.Popen(
        [sys.executable, "-m", "bench.limits", "--echo", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        cwd=os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
    )
    theirs.close()
    try:
        yield ours, child.pid
    finally:
        ours.close()  # end of file is what ends the child
        child.wait(timeout=10)


# --- the parent -----------------------------------------------------------------------------------


class FrameProtocol(asyncio.Protocol):
    """Cuts what arrives into frames, and hands on how many a chunk completed."""

    def __init__(self, on_frames: Callable[[int], None]) -> None:
        self._on_frames = on_frames
        self._pending = b""

    def data_received(self, chunk: bytes) -> None:
        data = self._pending + chunk if self._pending else chunk
        start, end, count = 4, len(data), 0
        while start <= end:
            (size,) = _LENGTH.unpack_from(data, start - 4)
            if start + size > end:
                break
            count += 1
            start += size + 4
        self._pending = data[start - 4 :]
        if count:
            self._on_frames(count)


class Peer:
    """One child and the window of calls under way in it."""

    def __init__(self, frame: bytes) -> None:
        self._frame = frame
        self._transport: asyncio.WriteTransport | None = None
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._unsent = 0
        self.answered = 0

    async def connect(self, sock: socket.socket, on_frames: Callable[[int], None]) -> None:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_connection(lambda: FrameProtocol(on_frames), sock=sock)

    def close(self) -> None:
        assert self._transport is not None
        self._transport.close()

    def send(self, count: int) -> None:
        assert self._transport is not None
        self._transport.write(self._frame * count)

    def count_and_send_again(self, count: int) -> None:
        self.answered += count
        self.send(count)

    def call(self) -> asyncio.Future[None]:
        """One call; those of one turn of the loop leave in one write."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._waiters.append(future)
        if self._unsent == 0:
            loop.call_soon(self._flush)
        self._unsent += 1
        return future

    def call_again(self, _done: asyncio.Future[None]) -> None:
        self.call().add_done_callback(self.call_again)

    def _flush(self) -> None:
        count, self._unsent = self._unsent, 0
        self.send(count)

    def resolve(self, count: int) -> None:
        self.answered += count
        for _ in range(count):
            self._waiters.popleft().set_result(None)


def call_frame() -> bytes:
    body = msgspec.json.encode(CALL)
    return _LENGTH.pack(len(body)) + body


def run(main: Coroutine[None, None, float]) -> float:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


async def rate_of(peers: list[Peer], seconds: float) -> float:
    """Answers a second: the median of slices of `seconds`, after one to warm up; a busy neighbour spoils a slice."""
    async with asyncio.timeout(10):
        while not all(peer.answered for peer in peers):  # a child starts in about 0.1 s
            await asyncio.sleep(0.01)
    rates = []
    for _ in range(1 + SLICES):
        before, started = sum(peer.answered for peer in peers), time.perf_counter()
        await asyncio.sleep(seconds / SLICES)
        rates.append((sum(peer.answered for peer in peers) - before) / (time.perf_counter() - started))
    return median(rates[1:])


async def measure_pipelined(socks: list[socket.socket], seconds: float) -> float:
    peers = [Peer(call_frame()) for _ in socks]
    for peer, sock in zip(peers, socks, strict=True):
        await peer.connect(sock, peer.count_and_send_again)
        peer.send(WINDOW)
    rate = await rate_of(peers, seconds)
    for peer in peers:
        peer.close()
    return rate


async def measure_with_future(socks: list[socket.socket], seconds: float) -> float:
    peers = [Peer(call_frame()) for _ in socks]
    for peer, sock in zip(peers, socks, strict=True):
        await peer.connect(sock, peer.resolve)
        for _ in range(WINDOW):
            peer.call().add_done_callback(peer.call_again)
    rate = await rate_of(peers, seconds)
    for peer in peers:
        peer.close()
    return rate


async def measure_pings(sock: socket.socket, seconds: float, times: list[float]) -> float:
    """Fill `times` with the seconds of single round trips; the median."""
    peer = Peer(call_frame())
    await peer.connect(sock, peer.resolve)
    await peer.call()
    until = time.perf_counter() + seconds
    while (started := time.perf_counter()) < until:
        await peer.call()
        times.append(time.perf_counter() - started)
    peer.close()
    return median(times)


def measure_ping(seconds: float, cpus: tuple[int, int]) -> list[float]:
    times: list[float] = []
    with echo_child() as (sock, child), pinned((0, cpus[0]), (child, cpus[1])):
        run(measure_pings(sock, seconds, times))
    return times


def raw_limit(seconds: float = SECONDS) -> RawLimit:
    """Measure all four, `seconds` each."""
    rates = []
    for measure in (measure_pipelined, measure_with_future):
        with echo_child() as (first, _), echo_child() as (second, _):
            rates.append(run(measure([first, second], seconds)))
    cpus = usable_cpus()
    one = measure_ping(seconds, (cpus[0], cpus[0]))
    two = median(measure_ping(seconds, (cpus[0], cpus[1]))) if len(cpus) > 1 else None
    return RawLimit(rates[0], rates[1], median(one), p99(one), two)


# --- the standard library's pool ------------------------------------------------------------------


def no_op(value: int) -> int:
    return value


def process_pool(seconds: float = SECONDS, processes: int = CHILDREN) -> ProcessPool:
    """Measure ProcessPoolExecutor with `processes` workers, `seconds` each for `map` and for single calls."""
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(no_op, range(processes * 50)))  # starts every process
        batch, done, spent = 2_000, 0, 0.0
        while spent < seconds:
            started = time.perf_counter()
            for _ in pool.map(no_op, range(batch), chunksize=1):
                done += 1
            spent += time.perf_counter() - started
        times: list[float] = []
        until = time.perf_counter() + seconds
        while (started := time.perf_counter()) < until:
            pool.submit(no_op, 1).result()
            times.append(time.perf_counter() - started)
    return ProcessPool(done / spent, median(times), p99(times))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.limits", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"{SECONDS_QUICK} s a figure instead of {SECONDS}")
    parser.add_argument("--json", action="store_true", help="figures as one JSON object, in seconds")
    parser.add_argument("--echo", type=int, metavar="FD", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.echo is not None:
        with socket.socket(fileno=options.echo) as sock, suppress(BrokenPipeError, ConnectionResetError):
            echo(sock)
        return 0
    seconds = SECONDS_QUICK if options.quick else SECONDS
    raw, pool = raw_limit(seconds), process_pool(seconds)
    if options.json:
        print(json.dumps({"raw_limit": msgspec.to_builtins(raw), "process_pool": msgspec.to_builtins(pool)}))
        return 0
    two_cpus = "one CPU only" if raw.ping_two_cpus_s is None else microseconds(raw.ping_two_cpus_s)
    print_table(
        f"The raw limit: {len(call_frame())}-byte frames, {CHILDREN} children, window {WINDOW}",
        ["", "raw echo", "ProcessPoolExecutor", "ratio"],
        [
            [
                "calls, pipelined",
                thousands(raw.pipelined_per_s),
                thousands(pool.map_per_s),
                f"{raw.pipelined_per_s / pool.map_per_s:,.1f}",
            ],
            [
                "calls, a future each",
                thousands(raw.with_future_per_s),
                "",
                f"{raw.with_future_per_s / pool.map_per_s:,.1f}",
            ],
            [
                "single call p50, one CPU",
                microseconds(raw.ping_s),
                microseconds(pool.single_s),
                f"{pool.single_s / raw.ping_s:,.1f}",
            ],
            ["single call p99, one CPU", microseconds(raw.ping_p99_s), microseconds(pool.single_p99_s), ""],
            ["single call p50, two CPUs", two_cpus, "", ""],
        ],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
