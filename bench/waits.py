"""A thousand plain functions that wait: in `sleep`, and for an HTTP server, side by side with aiohttp alone.

    python -m bench.waits [--json]

1,000 calls of a `def` that waits 50 ms run on 2 executors with 512 contexts each; 50 ms is the least it can take. Then
as many GET a loopback server that answers after 50 ms, by `callyard.http` through the worker, and by aiohttp in this
process; rounds of both follow one another. The server is a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import aiohttp
import uvloop
from aiohttp import web

from bench import median, print_table
from callyard import Worker

CALLS: Final = 1_000
WAIT_S: Final = 0.05
ROUNDS: Final = 5
FUNCTIONS: Final = f"""
from callyard import function, http, sleep


@function(idempotent=True)
def nap(i: int) -> int:
    sleep({WAIT_S})
    return i


@function(idempotent=True)
def fetch(url: str) -> int:
    return http.get(url).status
"""


async def serve() -> None:
    """A loopback server that answers each GET after `WAIT_S`; prints its port, and ends with standard input."""

    async def answer(_: web.Request) -> web.Response:
        await asyncio.sleep(WAIT_S)
        return web.Response(text="ok")

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=2_048)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


@contextmanager
def server() -> Iterator[int]:
    """The port of a server process, which is gone when the block ends."""
    command = [sys.executable, "-m", "bench.waits", "--serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            yield int(child.stdout.readline())
        finally:
            child.stdin.close()
            child.wait(timeout=10)


async def time_map(worker: Worker, function: str, rows: list[object]) -> float:
    started = time.perf_counter()
    results = [result.unwrap() async for result in worker.map(function, rows)]
    assert len(results) == len(rows)
    return time.perf_counter() - started


async def time_aiohttp(session: aiohttp.ClientSession, urls: list[str]) -> float:
    async def get(url: str) -> int:
        async with session.get(url) as response:
            await response.read()
            return response.status

    started = time.perf_counter()
    assert set(await asyncio.gather(*map(get, urls))) == {200}
    return time.perf_counter() - started


async def measure() -> dict[str, float]:
    naps, fetches, bare = [], [], []
    with server() as port, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "functions.py"
        path.write_text(FUNCTIONS, encoding="utf-8")
        io = {"requests_at_once": CALLS, "http": {"allow": ["127.0.0.1"], "allow_private": True}}
        settings = {"executor_max_inflight": 512, "executor_max_runnable": 512}
        async with (
            Worker(path, executors=2, io=io, **settings) as worker,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=CALLS)) as session,
        ):
            for round_number in range(ROUNDS + 1):
                urls = [f"http://127.0.0.1:{port}/{round_number}/{i}" for i in range(CALLS)]
                naps.append(await time_map(worker, "nap", list(range(CALLS))))
                bare.append(await time_aiohttp(session, urls))
                fetches.append(await time_map(worker, "fetch", list(urls)))
    return {  # the first round opens connections and loads code
        "sleep_s": median(naps[1:]),
        "http_s": median(fetches[1:]),
        "aiohttp_s": median(bare[1:]),
        "http_ratio": median([ours / theirs for ours, theirs in zip(fetches[1:], bare[1:], strict=True)]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve())
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(measure())
    if arguments.json:
        print(json.dumps(found))
        return
    print_table(
        f"{CALLS:,} calls that wait {WAIT_S * 1e3:.0f} ms each, 2 executors",
        ["", "all done after", "/ aiohttp"],
        [
            ["sleep", f"{found['sleep_s'] * 1e3:.0f} ms", ""],
            ["callyard.http", f"{found['http_s'] * 1e3:.0f} ms", f"{found['http_ratio']:.2f}"],
            ["aiohttp alone", f"{found['aiohttp_s'] * 1e3:.0f} ms", ""],
        ],
    )


if __name__ == "__main__":
    main()
