"""Health and metrics: what is alive, what is ready, and that it can be asked while the server has no room left."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import msgspec
import pytest

from callyard.dispatch.stores.port import StoreUnavailable
from callyard.errors import UsageError
from callyard.serve import admin as module
from callyard.serve.admin import BEAT_MS, CONNECTIONS_MAX, LATE_MS, Admin, Health, Probe, Pulse
from callyard.serve.config import Address
from callyard.worker.config import WorkerConfig
from callyard.worker.sandbox.levels import Level, Sandbox
from tests.unit.serve.fakes_ops import FakeServer, opened_server, slot

LOOPBACK = Address("127.0.0.1", 0)


@asynccontextmanager
async def opened_admin(server: FakeServer, **options: Any) -> AsyncIterator[tuple[Admin, httpx2.AsyncClient]]:
    admin = Admin(server, **options)  # type: ignore[arg-type]
    try:
        address = await admin.start(LOOPBACK)
        async with httpx2.AsyncClient(base_url=f"http://{address}", timeout=30) as client:
            yield admin, client
    finally:
        await admin.close()


def checks(response: httpx2.Response) -> list[str]:
    return [reason.check for reason in msgspec.json.decode(response.content, type=Health).reasons]


async def test_a_healthy_server() -> None:
    async with opened_server() as server, opened_admin(server) as (_, client):
        for path in ("/livez", "/readyz"):
            response = await client.get(path)
            assert (response.status_code, response.json()) == (200, {"ok": True, "reasons": []})
            assert response.headers["cache-control"] == "no-store"
        metrics = await client.get("/metrics")
        assert metrics.status_code == 200
        assert 'callyard_connections{listener="admin"} 1.0' in metrics.text
        assert (await client.head("/metrics")).content == b""
        assert (await client.get("/")).status_code == 404
        assert (await client.post("/livez", content=b"x" * 100)).status_code == 405
    assert server.listeners == {}


async def test_at_first_all_executors_then_one_of_each_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EMPTY_MS", 0)
    async with opened_server() as server:
        server.worker.seats = [slot(0), slot(1, up=False), slot(0, pool="gpu")]
        async with opened_admin(server) as (_, client):
            response = await client.get("/readyz")
            assert (response.status_code, checks(response)) == (503, ["executors"])
            assert response.json()["reasons"][0]["message"] == "1 of the 2 executors of pool default are up"
            server.worker.seats = [slot(0), slot(1), slot(0, pool="gpu")]
            assert (await client.get("/readyz")).status_code == 200
            server.worker.seats = [slot(0, up=False), slot(1), slot(0, pool="gpu")]
            assert (await client.get("/readyz")).status_code == 200
            server.worker.seats = [slot(0), slot(1), slot(0, pool="gpu", up=False)]
            response = await client.get("/readyz")
            assert response.json()["reasons"][0]["message"] == "0 of the 1 executors of pool gpu are up"
            assert (await client.get("/livez")).status_code == 200


async def test_a_pool_may_be_empty_for_a_moment() -> None:
    async with opened_server() as server, opened_admin(server) as (_, client):
        server.worker.seats = [slot(0, up=False), slot(1, up=False)]
        assert (await client.get("/readyz")).status_code == 200


async def test_a_weaker_sandbox_than_asked_for_is_not_ready() -> None:
    async with opened_server() as server, opened_admin(server) as (_, client):
        server.worker.config = WorkerConfig(sandbox="auto", sandbox_min="bwrap")
        for level, status in ((Level.OFF, 503), (Level.LANDLOCK, 503), (Level.BWRAP, 200)):
            server.worker.sandboxes = {"default": Sandbox(level=level, asked="auto")}
            response = await client.get("/readyz")
            assert (response.status_code, checks(response)) == (status, ["sandbox"] if status == 503 else [])


@pytest.mark.requirement("D46")
async def test_a_server_that_drains_is_alive_and_not_ready() -> None:
    async with opened_server() as server, opened_admin(server) as (_, client):
        server.gateway.seal()
        response = await client.get("/readyz")
        assert (response.status_code, checks(response)) == (503, ["draining"])
        assert (await client.get("/livez")).status_code == 200


async def test_a_store_out_of_reach_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ASK_MS", 10)
    answers = True

    async def ask() -> None:
        if not answers:
            raise StoreUnavailable("no disk")

    async with opened_server() as server, opened_admin(server, ask_store=ask) as (admin, client):
        assert (await client.get("/readyz")).status_code == 200
        answers = False
        await until(lambda: bool(admin.store.failure))
        response = await client.get("/readyz")
        assert (response.status_code, checks(response)) == (503, ["store"])
        assert "no disk" in response.json()["reasons"][0]["message"]
        answers = True
        await until(lambda: not admin.store.failure)


async def test_a_store_that_hangs_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_MS", 10)
    probe = Probe(asyncio.Event().wait)
    await probe.start()
    assert "did not answer" in probe.failure
    await probe.stop()


@pytest.mark.requirement("D54")
async def test_an_audit_file_that_must_be_written_and_cannot() -> None:
    class Failing:
        dropped = 0
        required = True
        writer = type("Writer", (), {"is_failing": True})

    async with opened_server() as server, opened_admin(server) as (_, client):
        server.audit = Failing()
        assert checks(await client.get("/readyz")) == ["audit"]


async def test_a_worker_that_failed_is_not_alive() -> None:
    async with opened_server() as server, opened_admin(server) as (_, client):
        server.worker.failure = "the worker failed by a fault of its own"
        response = await client.get("/livez")
        assert (response.status_code, checks(response)) == (503, ["worker"])
        server.stopping.set()
        assert (await client.get("/livez")).status_code == 200, "a stop is no fault"


async def test_the_pulse_says_how_late_the_loop_is() -> None:
    now_s = 100.0
    beats = 0

    def count() -> None:
        nonlocal beats
        beats += 1

    pulse = Pulse(count, lambda: now_s)
    pulse.start()
    assert pulse.lag_s() == 0.0
    now_s += 3 + BEAT_MS / 1_000
    assert pulse.lag_s() == pytest.approx(3.0), "a beat that is due and has not come counts"
    await until(lambda: beats == 1)
    now_s += 0.1
    assert pulse.lags_s() == pytest.approx((3.0, 3.0))
    pulse.stop()


async def test_a_loop_that_stands_still_is_not_alive() -> None:
    async with opened_server() as server:
        admin = Admin(server)  # type: ignore[arg-type]
        now_s = 0.0
        admin.pulse = Pulse(lambda: None, lambda: now_s)
        now_s = (BEAT_MS + LATE_MS) / 1_000 + 0.5
        assert [reason.check for reason in admin.look_alive().reasons] == ["loop"]


async def test_a_name_that_points_here_reads_nothing() -> None:
    async with opened_server() as server, opened_admin(server) as (_, client):
        for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", ""):
            assert (await client.get("/metrics", headers={"host": host})).status_code in (400, 403), host
        for host in ("localhost:1", "127.0.0.1", "[::1]:8701", "LOCALHOST"):
            assert (await client.get("/livez", headers={"host": host})).status_code == 200, host


async def test_it_answers_while_every_permit_is_out_and_connections_wait() -> None:
    async with opened_server(jobs_max=1) as server, opened_admin(server) as (_, client):
        held = await server.gateway.admit("one")
        line = [asyncio.ensure_future(server.gateway.admit(number)) for number in range(200)]
        await until(lambda: server.gateway.statistics().waiting == 200)
        assert (await client.get("/livez")).status_code == 200
        assert "callyard_permit_waiters 200.0" in (await client.get("/metrics")).text
        held.release()
        for waiting in line:
            (await waiting).release()


async def test_only_so_many_connections() -> None:
    async with opened_server() as server, opened_admin(server) as (admin, client):
        assert admin.listener is not None
        opened = [await asyncio.open_connection("127.0.0.1", admin.listener.port) for _ in range(CONNECTIONS_MAX + 5)]
        await until(lambda: admin.listener is not None and admin.listener.dropped >= 5)
        assert admin.listener.connections <= CONNECTIONS_MAX + 1
        assert (await client.get("/livez")).status_code == 200  # a probe makes room for itself
        for _, writer in opened:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def test_the_gate_stays_until_the_drain_is_over() -> None:
    async with opened_server() as server:
        bound: asyncio.Future[Address] = asyncio.get_running_loop().create_future()
        gate = asyncio.ensure_future(module.serve(server, LOOPBACK, bound.set_result))  # type: ignore[arg-type]
        address = await bound
        started, end = asyncio.Event(), asyncio.Event()

        @server.dispatcher.registry.tool
        async def slow() -> int:
            started.set()
            await end.wait()
            return 1

        call = asyncio.ensure_future(server.call("slow"))
        await started.wait()
        server.stopping.set()
        server.gateway.seal()
        async with httpx2.AsyncClient(base_url=f"http://{address}", timeout=30) as client:
            response = await client.get("/readyz")
            assert (response.status_code, checks(response)) == (503, ["draining"])
            assert "callyard_calls_open 1.0" in (await client.get("/metrics")).text
        assert not gate.done()
        end.set()
        assert (await call).ok
        await asyncio.wait_for(gate, 30)


async def test_an_address_that_is_taken_is_a_clear_error() -> None:
    async with opened_server() as server, opened_admin(server) as (admin, _):
        assert admin.listener is not None
        with pytest.raises(UsageError, match="cannot listen"):
            await module.serve(server, at_port(admin.listener.port), lambda _: None)  # type: ignore[arg-type]


def at_port(port: int) -> Address:
    return LOOPBACK._replace(port=port)


async def until(condition: Any, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to be"
        await asyncio.sleep(0.005)
