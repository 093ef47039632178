"""IO through the hub and the provider `http` against aiohttp alone, side by side in one run.

    python -m bench.io [--quick] [--json]

A server in a process of its own answers each GET after 50 ms. Rounds follow one another and the median of the ratios is
shown, at the default of 64 requests at once and with all of them at once: at 64 the ideal is requests / 64 x 50 ms,
whoever asks. Every GET has its own URL, so that none is answered from the cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from typing import Any, Final

import aiohttp
import uvloop
from aiohttp import web
from msgspec import Raw

from bench import median, print_table
from callyard.clock import SYSTEM_CLOCK
from callyard.ids import CallId, RequestId, TaskId, Tenant
from callyard.wire.messages import IoRequest
from callyard.worker.io.config import IoConfig
from callyard.worker.io.hub import IoAnswer, IoHub
from callyard.worker.io.registry import build_providers

DELAY_S: Final = 0.05
REQUESTS: Final = 1_000
AT_ONCE: Final = (64, REQUESTS)
ROUNDS: Final = 5


def serve(ready: Connection) -> None:
    """In a child: answer every GET after the delay, until the parent is gone."""

    async def answer(request: web.Request) -> web.Response:
        await asyncio.sleep(DELAY_S)
        return web.Response(text="x" * 100)

    async def run() -> None:
        app = web.Application()
        app.router.add_get("/{number}", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4_096)
        await site.start()
        ready.send(runner.addresses[0][1])
        while not ready.poll():
            await asyncio.sleep(0.1)

    uvloop.run(run())


async def through_hub(hub: IoHub, port: int, round_: str) -> float:
    """Seconds for all requests, each a call's, from the first submit to the last answer."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    left = REQUESTS
    task_id = TaskId(round_)
    hub.start_task(task_id, Tenant("default"))

    def on_done(answer: IoAnswer) -> None:
        nonlocal left
        assert answer.error is None, answer.error
        left -= 1
        if not left:
            done.set_result(None)

    started = time.perf_counter()
    for number in range(REQUESTS):
        request = IoRequest("http", "GET", Raw(b'{"url":"http://127.0.0.1:%d/%d"}' % (port, number)))
        hub.submit(task_id, CallId(f"{round_}-{number}"), 1, RequestId("1"), request, None, on_done)
    await done
    taken = time.perf_counter() - started
    hub.end_task(task_id)
    return taken


async def alone(session: aiohttp.ClientSession, port: int) -> float:
    async def get(number: int) -> None:
        async with session.get(f"http://127.0.0.1:{port}/{number}") as response:
            assert len(await response.read()) == 100

    started = time.perf_counter()
    await asyncio.gather(*(get(number) for number in range(REQUESTS)))
    return time.perf_counter() - started


async def measure(port: int, at_once: int, rounds: int) -> dict[str, float]:
    config = IoConfig.from_mapping({"requests_at_once": at_once, "http": {"allow_private": ["127.0.0.0/8"]}})
    hub = IoHub(build_providers(config, sandboxed=False), SYSTEM_CLOCK, config.limits)
    await hub.open()
    ours: list[float] = []
    theirs: list[float] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=at_once)) as session:
        for round_ in range(rounds + 1):
            mine, other = await through_hub(hub, port, f"r{round_}"), await alone(session, port)
            if round_:  # the first opens the connections
                ours.append(mine)
                theirs.append(other)
    await hub.close()
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    return {"hub_s": median(ours), "aiohttp_s": median(theirs), "ratio": median(ratios)}


async def measure_all(port: int, rounds: int) -> dict[str, Any]:
    return {str(at_once): await measure(port, at_once, rounds) for at_once in AT_ONCE}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.io", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--json", action="store_true", help="figures as one JSON object, in seconds")
    options = parser.parse_args(arguments)
    here, there = multiprocessing.get_context("spawn").Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(there,), daemon=True)
    server.start()
    try:
        found = uvloop.run(measure_all(here.recv(), 1 if options.quick else ROUNDS))
    finally:
        here.send(None)
        server.join()
    if options.json:
        print(json.dumps(found))
    else:
        rows = [
            [name, f"{one['hub_s']:.3f} s", f"{one['aiohttp_s']:.3f} s", f"{one['ratio']:.2f}"]
            for name, one in found.items()
        ]
        title = f"{REQUESTS:,} GETs of {DELAY_S * 1_000:.0f} ms"
        print_table(title, ["at once", "hub and provider", "aiohttp alone", "ratio"], rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
