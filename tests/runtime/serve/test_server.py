"""The assembly on real executors: start, calls, new code, and the one stop."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from callyard.dispatch.outcomes import DispatchResult
from callyard.errors import CallError, ErrorKind, Outcome, UsageError
from callyard.ids import Tenant
from callyard.serve.config import ServeConfig
from callyard.serve.gateway import Caller, ToolRequest
from callyard.serve.server import Server
from callyard.serve.tokens import hash_token, new_token, read_token
from tests.e2e.processes import is_alive

SOURCE = """
import os, signal, time
from callyard import function

@function(idempotent=True)
def version() -> int:
    return 1

@function
def wait(seconds: float, mark: str = "") -> int:
    if mark:
        open(mark, "a").close()
    time.sleep(seconds)
    return 1

@function
def large(size: int) -> str:
    return "x" * size

@function
def stubborn(mark: str) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    open(mark, "a").close()
    while True:
        try:
            while True:
                time.sleep(0.05)
        except BaseException:
            pass

@function
def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
"""
WAIT_S = 60


class Running:
    def __init__(self, server: Server, said: list[str]) -> None:
        self.server = server
        self.said = said

    async def call(self, tool: str, **fields: Any) -> DispatchResult:
        caller = fields.pop("caller", Caller())
        key, args = fields.pop("key", None), fields
        permit = await self.server.gateway.admit("test")
        try:
            return await self.server.gateway.call(ToolRequest(tool=tool, args=args, caller=caller, key=key), permit)
        finally:
            permit.release()

    def children(self) -> list[int]:
        """Executors that are alive."""
        return [slot.pid for slot in self.server.worker.slots() if slot.pid and is_alive(slot.pid)]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "functions.py"
    path.write_text(SOURCE)
    return path


@asynccontextmanager
async def started(target: Path, **settings: Any) -> AsyncIterator[Running]:
    said: list[str] = []
    options = {name: settings.pop(name) for name in ("watch", "read_config", "next_folder") if name in settings}
    settings = {"state_dir": target.parent / "state", "drain_deadline_ms": 5_000, **settings}
    server = Server(
        target,
        ServeConfig(**settings),
        given={"executor_count": 1, "spare_executors": 0},
        environ={},
        on_output=lambda *_: None,
        say=said.append,
        **options,
    )
    async with server:
        yield Running(server, said)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.requirement("D57")
@pytest.mark.parametrize(("worker", "nice"), [({}, 5), ({"executor_nice": 0}, 0)])
async def test_executors_step_back_behind_the_server(target: Path, worker: dict[str, int], nice: int) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    async with started(target, worker=worker) as running:
        assert (await running.call("version")).ok
        assert [os.getpriority(os.PRIO_PROCESS, pid) for pid in running.children()] == [min(19, own + nice)]


async def test_a_call_goes_all_the_way_and_a_large_result_is_kept(target: Path) -> None:
    async with started(target, max_result_bytes=2_048) as running:
        assert (await running.call("version")).unwrap() == 1
        result = await running.call("large", size=5_000)
        preview = await running.server.kept.shorten(Caller(), result)
        assert preview is not None
        assert msgspec.json.decode(await running.server.kept.read(Caller(), preview.kept_id) or b"") == "x" * 5_000
    assert sorted(path.name for path in (target.parent / "state" / "kept").iterdir()) == []


@pytest.mark.parametrize("given", ["shop.jobs", "shop", "shop/jobs.py", "."])
async def test_a_module_or_a_folder_is_served_watched_and_has_one_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    shop = tmp_path / "project" / "shop"
    shop.mkdir(parents=True)
    monkeypatch.chdir(shop.parent)
    (shop / "__init__.py").write_text("from shop.jobs import price\n")
    (shop / "jobs.py").write_text(
        "from callyard import function\nfrom shop.prices import PRICES\n\n"
        "@function(idempotent=True)\ndef price(item: str) -> int:\n    return PRICES[item]\n"
    )
    prices = shop / "prices.py"
    prices.write_text("PRICES = {'tea': 250}\n")
    async with started(Path(given), watch=True, state_dir=tmp_path / "state") as running:
        server = running.server
        assert (await running.call("price", item="tea")).unwrap() == 250
        assert set(server._look()) == set(server.worker.registry.bundle.files)
        serving = asyncio.ensure_future(server.run(serve_until_stopped))
        prices.write_text("PRICES = {'tea': 300}\n")
        await until(lambda: any("reloaded" in line for line in running.said))
        assert (await running.call("price", item="tea")).unwrap() == 300
        server.request_stop()
        await serving
    where = ServeConfig().folder_of(server.target.path, {"HOME": str(tmp_path)})
    file = shop / ("__init__.py" if given in ("shop", ".") else "jobs.py")
    assert where == ServeConfig().folder_of(file, {"HOME": str(tmp_path)})


async def test_two_servers_do_not_share_a_folder(target: Path) -> None:
    async with started(target):
        with pytest.raises(UsageError, match=rf"in use by another server \(process {os.getpid()}\)"):
            async with started(target):
                pass


async def test_a_start_that_fails_leaves_nothing(target: Path) -> None:
    target.write_text("def broken(:\n")
    with pytest.raises(UsageError, match=r"functions\.py"):
        async with started(target):
            pass
    target.write_text("raise RuntimeError('not today')\n")
    with pytest.raises(UsageError, match="not today"):
        async with started(target):
            pass
    target.write_text(SOURCE)
    async with started(target) as running:  # the folder was given back
        assert (await running.call("version")).ok


# --- new code -----------------------------------------------------------------------------------------------------


async def test_new_code_is_taken_and_what_runs_goes_on_with_the_old(target: Path) -> None:
    async with started(target) as running:
        changed: list[int] = []
        running.server.gateway.on_changed(lambda: changed.append(1))
        mark = target.parent / "mark"
        old = asyncio.ensure_future(running.call("wait", seconds=1.0, mark=str(mark)))
        await until(mark.exists)
        source = SOURCE.replace("return 1", "return 2") + "\n@function\ndef added() -> int:\n    return 3\n"
        target.write_text(source.replace("def die(", "def dies("))
        assert await running.server.reload()
        assert changed == [1]
        assert "new: dies, added; gone: die" in running.said[-1]
        assert (await running.call("version")).unwrap() == 2
        assert (await running.call("added")).unwrap() == 3
        assert (await old).unwrap() == 1
        assert not await running.server.reload()
        assert changed == [1]


@pytest.mark.parametrize("broken", ["def version(:\n", "raise RuntimeError('at import')\n", ""])
async def test_new_code_that_does_not_work_changes_nothing_and_is_told(target: Path, broken: str) -> None:
    async with started(target) as running:
        changed: list[int] = []
        running.server.gateway.on_changed(lambda: changed.append(1))
        target.write_text(broken)
        assert not await running.server.reload()
        assert "reload failed, the old version goes on" in running.said[-1]
        assert "functions.py" in running.said[-1]
        assert (await running.call("version")).unwrap() == 1
        assert changed == []
        target.write_text(SOURCE.replace("return 1", "return 2"))
        assert await running.server.reload()
        assert (await running.call("version")).unwrap() == 2


async def test_a_watched_file_is_taken_when_it_changes(target: Path) -> None:
    async with started(target, watch=True) as running:
        serving = asyncio.ensure_future(running.server.run(serve_until_stopped))
        await asyncio.sleep(0)
        target.write_text("def version(:\n")
        await until(lambda: any("reload failed" in line for line in running.said))
        target.write_text(SOURCE.replace("return 1", "return 22"))
        await until(lambda: any("reloaded" in line for line in running.said))
        assert (await running.call("version")).unwrap() == 22
        running.server.request_stop()
        await serving


async def test_a_reload_takes_new_tokens_too(target: Path) -> None:
    def table(token: str) -> dict[str, Any]:
        return {"ci": read_token("ci", {"hash": f"sha256:{hash_token(token).hex()}", "tenant": "acme"})}

    old, new = new_token(), new_token()
    fresh = [ServeConfig(tokens=table(old))]

    def read() -> ServeConfig:
        if not fresh:
            raise UsageError("serve.toml:3: no setting")
        return fresh[-1]

    async with started(target, tokens=table(old), read_config=read) as running:
        tokens = running.server.tokens
        assert not await running.server.reload()
        fresh.append(ServeConfig(tokens=table(new)))
        assert await running.server.reload()
        assert running.server.tokens is tokens
        assert (tokens.find(old), tokens.find(new) is not None) == (None, True)
        fresh.clear()
        assert not await running.server.reload()
        assert "serve.toml:3" in running.said[-1]
        assert tokens.find(new) is not None


# --- the stop -----------------------------------------------------------------------------------------------------


async def serve_until_stopped(server: Server) -> None:
    await server.stopping.wait()


@pytest.mark.requirement("D46")
async def test_what_runs_ends_and_new_calls_are_told(target: Path) -> None:
    async with started(target, drain_deadline_ms=30_000) as running:
        serving = asyncio.ensure_future(running.server.run(serve_until_stopped))
        mark = target.parent / "mark"
        calling = asyncio.ensure_future(running.call("wait", seconds=0.5, mark=str(mark)))
        await until(mark.exists)
        running.server.request_stop()
        with pytest.raises(CallError) as refused:
            await running.call("version")
        assert refused.value.kind is ErrorKind.SHUTTING_DOWN
        assert (await calling).ok
        await serving
        assert running.children() == []
        assert_at_rest(running.server)
    assert (await asyncio.to_thread(_tables, target.parent / "state" / "keys.db")) == ["keys"]


@pytest.mark.requirement("D46")
@pytest.mark.parametrize("hurries", [False, True])
async def test_the_deadline_holds_although_a_handler_a_gate_and_a_subscriber_hang(target: Path, hurries: bool) -> None:
    async with started(target, drain_deadline_ms=60_000 if hurries else 300) as running:
        server = running.server

        async def stubborn_gate(server: Server) -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await asyncio.sleep(0.1)
                raise

        def failing(event: object) -> None:
            raise RuntimeError("a subscriber's own fault")

        server.gateway.subscribe(failing)
        serving = asyncio.ensure_future(server.run(stubborn_gate))
        mark = target.parent / "mark"
        calling = asyncio.ensure_future(running.call("stubborn", mark=str(mark)))
        await until(mark.exists)
        pids = running.children()
        began_s = time.monotonic()
        server.request_stop()
        if hurries:
            server.request_stop()
        result = await calling
        assert not result.ok
        assert result.kind in (ErrorKind.SHUTTING_DOWN, ErrorKind.CANCELLED)
        assert result.outcome is Outcome.UNKNOWN
        await serving
        assert time.monotonic() - began_s < 30  # well before the one minute that it had
        assert running.children() == []
        assert not [pid for pid in pids if is_alive(pid)]
        assert_at_rest(server)


async def test_a_gate_whose_client_has_gone_ends_the_server(target: Path) -> None:
    async def short(server: Server) -> None:
        return

    async with started(target) as running:
        async with asyncio.timeout(WAIT_S):
            await running.server.run(short, serve_until_stopped)
        assert running.server.stopping.is_set()


async def test_what_a_gate_raises_is_raised_after_the_stop(target: Path) -> None:
    async def taken(server: Server) -> None:
        raise UsageError("the port is taken")

    async with started(target) as running:
        with pytest.raises(UsageError, match="the port is taken"):
            await running.server.run(taken, serve_until_stopped)
        assert running.children() == []


def assert_at_rest(server: Server) -> None:
    seen = server.gateway.statistics()
    assert (seen.permits, seen.waiting, seen.calls, seen.adrift, seen.lanes) == (0, 0, 0, 0, 0), seen
    left = server.dispatcher.statistics()
    assert (left.calls, left.running, left.queued, left.flights, left.owners) == (0, 0, 0, 0, 0), left


# --- keys ---------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("D55")
async def test_an_unknown_outcome_is_kept_through_a_restart_and_resolved(target: Path) -> None:
    audit = target.parent / "calls.jsonl"
    acme = Caller(tenant=Tenant("acme"), token="ci")
    async with started(target, audit_file=audit) as running:
        result = await running.call("die", key="order-7", caller=acme)
        assert not result.ok
        assert (result.kind, result.outcome) == (ErrorKind.CRASHED, Outcome.UNKNOWN)
    async with started(target, audit_file=audit) as running:
        again = await running.call("die", key="order-7", caller=acme)
        assert not again.ok
        assert again.deduplicated  # not run again
        keys = running.server.keys
        (found,) = await keys.list_unknown(Tenant("acme"))
        assert (found["tool"], found["key"], found["state"]) == ("die", "order-7", "unknown")
        assert await keys.list_unknown(Tenant("other")) == []
        assert not await keys.resolve(Tenant("other"), "die", "order-7", result=1)
        assert await keys.resolve(Tenant("acme"), "die", "order-7", result={"paid": True}, by="test")
        assert not await keys.resolve(Tenant("acme"), "die", "order-7", retry=True)
        assert (await running.call("die", key="order-7", caller=acme)).unwrap() == {"paid": True}
    lines = [msgspec.json.decode(line) for line in audit.read_bytes().splitlines()]
    resolved = [line for line in lines if line.get("event") == "key.resolved"]
    assert [(line["tenant"], line["tool"], line["key"], line["by"]) for line in resolved] == [
        ("acme", "die", "order-7", "test")
    ]
    assert sum(line.get("tool") == "die" and "ok" in line for line in lines) == 3


@pytest.mark.requirement("D55")
async def test_memory_is_used_on_request_and_with_a_warning(target: Path) -> None:
    async with started(target, store="memory") as running:
        assert any("kept in memory" in line for line in running.said)
        assert not (target.parent / "state" / "keys.db").exists()


@pytest.mark.requirement("D58")
@pytest.mark.parametrize("rate", ["", "10/s"])
async def test_rates_that_no_store_shares_are_said_to_be_this_processs_own(target: Path, rate: str) -> None:
    if rate:
        target.write_text(target.read_text() + f"\n\n@function(rate='{rate}')\ndef rated() -> int:\n    return 1\n")
    async with started(target) as running:
        assert any("rates are kept in this process" in line for line in running.said) is bool(rate)


def _tables(path: Path) -> list[str]:
    connection = sqlite3.connect(path)
    try:
        return [
            name
            for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")
            if name != "sqlite_sequence"
        ]
    finally:
        connection.close()
