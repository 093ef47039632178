"""The folder of one server's state, also when somebody takes it away meanwhile."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from callyard.dispatch.stores.port import Claimed, KeyScope, StoreUnavailable
from callyard.ids import CallId, Tenant
from callyard.serve.admin import ask_key_store
from callyard.serve.state_folder import FolderKeyStore, StateFolder


def scope(key: str) -> KeyScope:
    return KeyScope(Tenant("acme"), "charge", key)


async def claim(store: FolderKeyStore, key: str) -> object:
    return await store.claim(scope(key), "", CallId("c-1"), idempotent=False, unknown_ttl_ms=1_000)


def lose_folder(path: Path) -> None:
    shutil.rmtree(path)


def lose_keys(path: Path) -> None:
    (path / "keys.db").unlink()


def replace_folder(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    StateFolder.take(path)  # another server finds it free


@pytest.mark.requirement("D20", "D55")
@pytest.mark.parametrize("lose", [lose_folder, lose_keys, replace_folder])
async def test_no_key_is_claimed_in_a_folder_that_was_taken_away(
    tmp_path: Path, lose: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Who comes back with it, to the server that is started next, would be charged a second time."""
    folder = StateFolder.take(tmp_path / "state")
    store = FolderKeyStore(folder)
    await store.open()
    try:
        held = await claim(store, "before")
        assert isinstance(held, Claimed)
        lose(folder.path)
        with caplog.at_level(logging.ERROR, "callyard.serve"):
            for key in ("one", "two"):
                with pytest.raises(StoreUnavailable) as refused:
                    await claim(store, key)
                assert str(tmp_path) not in str(refused.value)  # a caller reads it
        assert [str(tmp_path) in record.getMessage() for record in caplog.records] == [True]
        await store.settle(scope("before"), held.fence, None, 0)  # what has begun ends
    finally:
        await store.close()
        folder.release()


@pytest.mark.requirement("D36")
async def test_the_probe_asks_for_what_a_call_needs(tmp_path: Path) -> None:
    folder = StateFolder.take(tmp_path / "state")
    store = FolderKeyStore(folder)
    await store.open()
    server: Any = type("Server", (), {"store": store})
    try:
        for _ in range(3):  # it leaves nothing behind
            await ask_key_store(server)
        store._bytes_max = 1
        with pytest.raises(StoreUnavailable, match="no room"):
            await ask_key_store(server)
        store._bytes_max = 1 << 30
        lose_folder(folder.path)
        with pytest.raises(StoreUnavailable):
            await ask_key_store(server)
    finally:
        await store.close()
        folder.release()
