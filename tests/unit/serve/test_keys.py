"""Keys as an operator reads them from a store's file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from callyard.dispatch.stores.port import KeyScope
from callyard.dispatch.stores.sqlite import SqliteKeyStore
from callyard.ids import CallId, Tenant
from callyard.serve.keys import list_keys
from callyard.serve.state_folder import LOCK_FILE


def ended_process() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


@pytest.mark.requirement("D55")
@pytest.mark.parametrize(("owner", "charged"), [("alive", "running"), ("gone", "unknown"), ("nobody", "running")])
async def test_a_key_in_flight_is_unknown_once_its_server_is_gone(tmp_path: Path, owner: str, charged: str) -> None:
    store = SqliteKeyStore(tmp_path / "keys.db")
    await store.open()
    for tool, idempotent in (("charge", False), ("search", True)):
        scope = KeyScope(Tenant("default"), tool, "order-7")
        await store.claim(scope, "print", CallId("c-1"), idempotent=idempotent, unknown_ttl_ms=60_000)
    if owner != "nobody":
        pid = os.getpid() if owner == "alive" else ended_process()
        (tmp_path / LOCK_FILE).write_text(f"{pid}\n")
    seen = {view.tool: view.state for view in list_keys(tmp_path / "keys.db")}
    assert seen == {"charge": charged, "search": "running"}, "an idempotent one runs again, whoever asks next"
    unknown = [view.tool for view in list_keys(tmp_path / "keys.db", unknown=True)]
    assert unknown == (["charge"] if charged == "unknown" else [])
    await store.close()
