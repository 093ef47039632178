"""`keys resolve`: what is said of a key that has no unknown outcome."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from pathlib import Path

import pytest

from callyard.cli.keys import Place, resolve_one, show_settings
from callyard.cli.screen import Screen
from callyard.dispatch.stores.sqlite import SqliteKeyStore
from callyard.ids import CallId
from callyard.serve.keys import scope_of
from callyard.serve.state_folder import KEYS_FILE, LOCK_FILE


@pytest.mark.requirement("D21", "D55")
@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("order-7", "kept for acme, charge, 'order-7': its call is still running"),
        ("order-8", "kept for acme, charge, 'order-8'"),
    ],
)
async def test_a_key_whose_call_runs_is_not_resolved(
    tmp_path: Path, key: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = SqliteKeyStore(tmp_path / KEYS_FILE)
    await store.open()
    (tmp_path / LOCK_FILE).write_text(f"{os.getpid()}\n")
    scope = scope_of("acme", "charge", "order-7")
    await store.claim(scope, "print", CallId("c-1"), idempotent=False, unknown_ttl_ms=60_000)
    place = Place(None, tmp_path, Path(os.devnull))
    resolve = partial(resolve_one, place, Screen(), "acme", "charge", key)
    assert await asyncio.to_thread(resolve, retry=True, result=None, audit=None, as_json=False) == 1
    assert capsys.readouterr().err == f"nothing of unknown outcome is {says}\n"
    await store.close()


@pytest.mark.requirement("D55")
def test_the_settings_that_count_are_shown(tmp_path: Path) -> None:
    file = tmp_path / "callyard.toml"
    secret = f"sha256:{'0' * 64}"
    file.write_text(f"[serve]\nstate_dir = 'st'\n[serve.tokens.ci]\nhash = '{secret}'\ntenant = 'acme'\n")
    target = tmp_path / "functions.py"
    target.write_text("def f() -> int:\n    return 1\n")
    shown = show_settings(str(target), None, None)
    assert f'state_dir = "{tmp_path / "st"}"  # ' in shown
    assert "callyard.toml:2\n" in shown
    assert 'store = "sqlite"  # default\n' in shown
    assert secret not in shown
    assert f'state_dir = "{tmp_path}"  # --state-dir\n' in show_settings(str(target), tmp_path, file)
    assert show_settings(None, None, Path(os.devnull)).startswith(f"# settings file: {os.devnull}\n")
