"""A process that makes one keyed call over a SQLite store: `python -m tests.e2e.dispatch.till STORE EFFECTS TOOL MODE`.

Each run of a tool appends one line to the file EFFECTS. MODE `hang`: it never comes back from it; `finish`: it does,
and the result is printed as JSON; `resolve`: as `finish`, after the key was resolved.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

import callyard
from callyard.dispatch.dispatcher import Dispatcher
from callyard.dispatch.stores.sqlite import SqliteKeyStore
from callyard.functions.registry import Registry

KEY = "order-7"


async def main(store: str, effects: str, tool: str, mode: str) -> None:
    registry = Registry()

    async def act(cents: int) -> dict[str, int]:
        info = callyard.context()
        line = f"{tool} {cents} {info.idempotency_key} {info.attempt}\n".encode()
        file = os.open(effects, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, line)
        os.close(file)
        if mode == "hang":
            await asyncio.Event().wait()
        return {"paid": cents}

    registry.add_function(act, name="charge", timeout_ms=600_000)
    registry.add_function(act, name="search", idempotent=True, timeout_ms=600_000)
    async with Dispatcher(registry, store=SqliteKeyStore(store, lock_wait_ms=20_000)) as dispatcher:
        if mode == "resolve":
            assert await dispatcher.resolve("default", tool, KEY, {"paid": -1})
        result = await dispatcher.dispatch(tool, {"cents": 500}, key=KEY)
        told = {"value": result.value} if result.ok else result.to_json()
        print(json.dumps(told | {"deduplicated": result.deduplicated, "call_id": result.call_id}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
