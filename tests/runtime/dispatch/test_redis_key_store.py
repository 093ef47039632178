"""The Redis store against real servers: leases, lost connections, servers that die, hang or forget."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import sys
import traceback
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from callyard.dispatch.dispatcher import Dispatcher
from callyard.dispatch.stores.port import Claimed, Conflicting, InFlight, Kept, StoreUnavailable
from callyard.dispatch.stores.redis import PREFIX, RedisKeyStore
from callyard.dispatch.stores.redis_link import mask_url
from callyard.errors import ErrorKind, Outcome, UsageError
from callyard.functions.registry import Registry
from callyard.ids import CallId, Tenant
from callyard.policy.rate import Rate
from tests.contract.key_stores import (
    BOUND_S,
    MINUTE_MS,
    MONTH_MS,
    RedisBacking,
    RedisServer,
    claim,
    eventually,
    find_free_port,
    run_redis,
    scope,
    success,
    unknown_end,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with run_redis(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RedisServer]:
    """For tests that stop it."""
    with run_redis(tmp_path, "--appendonly", "yes", "--appendfsync", "always") as running:
        yield running


@pytest.fixture
async def backing(server: RedisServer) -> AsyncIterator[RedisBacking]:
    made = RedisBacking(server)
    yield made
    await made.close()


async def lapse_all(backing: RedisBacking) -> None:
    """As if time had passed in which nobody renewed."""
    store = await backing.open()
    await backing.die(store)


async def fence_of(store: RedisKeyStore, key: str, *, idempotent: bool = False) -> int:
    got = await claim(store, scope(key), idempotent=idempotent)
    assert isinstance(got, Claimed), got
    return got.fence


@pytest.mark.requirement("D21")
async def test_a_lost_lease_of_one_holder_seen_by_the_other(backing: RedisBacking) -> None:
    cut_off, other = await backing.open(), await backing.open()
    charge = await fence_of(cut_off, "charge")
    look_up = await fence_of(cut_off, "look-up", idempotent=True)
    await lapse_all(backing)
    got = await claim(other, scope("charge"), call_id="c-9")
    assert isinstance(got, Kept), "never claimable"
    assert got.end.failure is not None
    assert got.end.failure.outcome is Outcome.UNKNOWN
    again = await fence_of(other, "look-up", idempotent=True)
    assert again > look_up
    # The one that was cut off comes back: it may have done its work, but it writes nothing.
    assert await cut_off.settle(scope("charge"), charge, success(), MINUTE_MS) is False
    assert await cut_off.settle(scope("look-up"), look_up, success(), MINUTE_MS) is False
    assert await claim(other, scope("look-up")) == InFlight(CallId("c-0"), again)
    assert await other.settle(scope("look-up"), again, success(), MINUTE_MS) is True


@pytest.mark.requirement("D21")
async def test_a_late_settle_is_refused_though_nobody_looked_meanwhile(backing: RedisBacking) -> None:
    store = await backing.open()
    fence = await fence_of(store, "charge")
    await lapse_all(backing)
    assert await store.settle(scope("charge"), fence, success(), MINUTE_MS) is False
    got = await claim(store, scope("charge"))
    assert isinstance(got, Kept)
    assert got.end.failure is not None
    assert [record.scope for record in await store.unknown()] == [scope("charge")]


@pytest.mark.requirement("D21", "D55")
async def test_lapsed_leases_are_listed_and_resolved_though_nobody_looked(backing: RedisBacking) -> None:
    store, operator = await backing.open(), await backing.open()
    keys = [f"k{number:03}" for number in range(450)]  # more than one script looks at
    await asyncio.gather(*(claim(store, scope(key)) for key in keys))
    await claim(store, scope("resolved blind"))
    await lapse_all(backing)
    assert await operator.resolve(scope("resolved blind"), None, 0) is True
    assert isinstance(await claim(operator, scope("resolved blind")), Claimed)
    listed = await operator.unknown()
    assert sorted(record.scope.key for record in listed) == keys
    assert len({record.scope.key for record in await operator.unknown(limit=230)}) == 230


@pytest.mark.requirement("D21")
async def test_one_task_renews_all_claims_that_are_held(backing: RedisBacking) -> None:
    store = await backing.open(renew_ms=10)
    fences = [await fence_of(store, f"k{number}", idempotent=number % 2 == 0) for number in range(250)]
    assert len([task for task in asyncio.all_tasks() if task.get_name() == "callyard-key-leases"]) == 1
    await store.settle(scope("k0"), fences[0], success(), MINUTE_MS)
    assert len(await backing.leases()) == 249
    await backing.let_holders_live(0)
    async with backing.server.client() as client:
        left = await client.pttl(f"{backing.prefix}key:default:charge:k2")
        assert 0 < left <= 30_000, "of an idempotent key: until the lease lapses"
        left = await client.pttl(f"{backing.prefix}key:default:charge:k1")
        assert MONTH_MS < left <= MONTH_MS + 30_000, "of another: as long as it would be unknown"
    await store.close()
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("callyard-key")]


@pytest.mark.requirement("D21")
async def test_a_lease_found_lost_is_renewed_no_more(backing: RedisBacking, caplog: pytest.LogCaptureFixture) -> None:
    store = await backing.open(renew_ms=10)
    await fence_of(store, "lost")
    await fence_of(store, "held")
    async with backing.server.client() as client:
        await client.delete(f"{backing.prefix}key:default:charge:lost")

    async def is_told() -> bool:
        return "lease of a key was lost" in caplog.text

    await eventually(is_told)
    await backing.let_holders_live(0)
    assert caplog.text.count("was lost") == 1
    assert list(await backing.leases()) == [f"{backing.prefix}key:default:charge:held".encode()]


@pytest.mark.requirement("D17", "D21")
async def test_who_waits_for_a_dead_holder_wakes_when_its_lease_ends(backing: RedisBacking) -> None:
    holder, other = await backing.open(lease_ms=400, renew_ms=200), await backing.open()
    fence = await fence_of(holder, "charge")
    waiting = asyncio.create_task(other.wait(scope("charge"), fence))
    await holder.close()  # nobody tells of it
    async with asyncio.timeout(BOUND_S):
        await waiting
    assert isinstance(await claim(other, scope("charge")), Kept)


@pytest.mark.requirement("D17", "D21")
async def test_who_waits_longer_than_a_lease_waits_on_while_it_is_renewed(backing: RedisBacking) -> None:
    holder, other = await backing.open(renew_ms=10), await backing.open()
    fence = await fence_of(holder, "charge")

    async def wait_is_on(waiting: asyncio.Task[None]) -> bool:
        async with backing.server.client() as client:
            return await client.hexists(f"{backing.prefix}key:default:charge:charge", "watch") and not waiting.done()

    waiting = asyncio.create_task(other.wait(scope("charge"), fence))
    await eventually(lambda: wait_is_on(waiting))
    await backing.let_holders_live(0)
    assert not waiting.done()
    await holder.settle(scope("charge"), fence, success(), MINUTE_MS)
    async with asyncio.timeout(BOUND_S):
        await waiting


@pytest.mark.requirement("D17", "D21")
async def test_many_who_wait_share_one_connection(backing: RedisBacking) -> None:
    holder, other = await backing.open(), await backing.open()
    fences = {f"k{number}": await fence_of(holder, f"k{number}") for number in range(100)}
    waits = [asyncio.create_task(other.wait(scope(key), fence)) for key, fence in fences.items()]

    async def all_wait() -> bool:
        async with backing.server.client() as client:
            names = [f"{backing.prefix}key:default:charge:{key}" for key in fences]
            return all([await client.hexists(name, "watch") for name in names])

    await eventually(all_wait)
    assert isinstance(await claim(other, scope("beside")), Claimed), "waiting takes no connection from others"
    for key, fence in fences.items():
        await holder.settle(scope(key), fence, success(), MINUTE_MS)
    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(*waits)

    async def reader_ended() -> bool:
        return other._reading is None

    await eventually(reader_ended)


@pytest.mark.requirement("D21")
async def test_only_watched_claims_tell_of_their_end(backing: RedisBacking) -> None:
    store = await backing.open()
    await store.settle(scope("a"), await fence_of(store, "a"), success(), MINUTE_MS)
    async with backing.server.client() as client:
        assert await client.xlen(f"{backing.prefix}ended") == 0


@pytest.mark.requirement("D21")
async def test_steps_go_together_and_one_that_fails_fails_alone(backing: RedisBacking) -> None:
    store = await backing.open()
    async with backing.server.client() as client:
        await client.set(f"{backing.prefix}key:default:charge:k7", "no record")
        before = (await client.info("stats"))["total_reads_processed"]
    answers = await asyncio.gather(
        *(claim(store, scope("\ud800" if number == 5 else f"k{number}")) for number in range(300)),
        return_exceptions=True,
    )
    async with backing.server.client() as client:
        reads = (await client.info("stats"))["total_reads_processed"] - before
    assert [number for number, answer in enumerate(answers) if not isinstance(answer, Claimed)] == [5, 7]
    assert isinstance(answers[5], UnicodeEncodeError)
    assert isinstance(answers[7], StoreUnavailable)
    assert "WRONGTYPE" in str(answers[7])
    assert reads < 150


@pytest.mark.requirement("D21")
async def test_a_server_that_forgot_its_scripts_is_told_them_again(backing: RedisBacking) -> None:
    store = await backing.open()
    async with backing.server.client() as client:
        await client.script_flush()
    answers = await asyncio.gather(*(claim(store, scope(f"k{number}")) for number in range(20)))
    assert all(isinstance(answer, Claimed) for answer in answers)


@pytest.mark.requirement("D21")
async def test_a_killed_process_frees_or_leaves_unknown(backing: RedisBacking) -> None:
    program = f"""
import asyncio
from callyard.dispatch.stores.port import KeyScope
from callyard.dispatch.stores.redis import PREFIX, RedisKeyStore

async def main():
    store = RedisKeyStore({backing.server.url!r}, prefix={backing.prefix!r})
    await store.open()
    for key, idempotent in (("charge", False), ("look-up", True)):
        await store.claim(KeyScope("default", "charge", key), "f", "c-1", idempotent=idempotent, unknown_ttl_ms=60_000)
    print("claimed", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == "claimed\n"
    finally:
        process.kill()
        process.communicate(timeout=BOUND_S)
    store = await backing.open()
    assert isinstance(await claim(store, scope("charge")), InFlight), "until the lease lapses nobody knows"
    assert await claim(store, scope("charge"), "g") == Conflicting(CallId("c-1"))
    await lapse_all(backing)
    got = await claim(store, scope("charge"))
    assert isinstance(got, Kept)
    assert got.end.call_id == "c-1"
    assert isinstance(await claim(store, scope("look-up")), Claimed)


# ---- servers that fail


@pytest.mark.requirement("D21")
async def test_a_server_that_restarts_keeps_its_keys_and_is_found_again(own_server: RedisServer) -> None:
    backing = RedisBacking(own_server)
    store = await backing.open()
    held = await fence_of(store, "held")
    await store.settle(scope("done"), await fence_of(store, "done"), success(), MINUTE_MS)
    own_server.kill()
    for step in (
        claim(store, scope("x")),
        store.settle(scope("held"), held, success(), MINUTE_MS),
        store.unknown(),
        store.resolve(scope("held"), None, 0),
        store.wait(scope("held"), held),
    ):
        with pytest.raises(StoreUnavailable, match="cannot be reached"):
            await step
    own_server.start()
    assert await claim(store, scope("done")) == Kept(success())

    async def is_settled() -> bool:
        return await claim(store, scope("held")) == Kept(success())

    await eventually(is_settled)  # by the store itself: its caller is told but once
    assert await fence_of(store, "next") > held
    await backing.close()


@pytest.mark.requirement("D17", "D21")
async def test_who_waits_when_the_server_dies_is_told(own_server: RedisServer) -> None:
    backing = RedisBacking(own_server)
    holder, other = await backing.open(), await backing.open()
    fence = await fence_of(holder, "charge")
    waiting = asyncio.create_task(other.wait(scope("charge"), fence))

    async def watched() -> bool:
        async with own_server.client() as client:
            return bool(await client.hexists(f"{backing.prefix}key:default:charge:charge", "watch"))

    await eventually(watched)
    own_server.kill()
    async with asyncio.timeout(BOUND_S):
        with pytest.raises(StoreUnavailable):
            await waiting
    await backing.close()


class SilentServer:
    """Takes connections and never answers; or a relay that loses the answer to one step."""

    def __init__(self, target: tuple[str, int] | None = None) -> None:
        self._target = target
        self.losing = False
        self.lost = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> SilentServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if self._target is None:
                await asyncio.Event().wait()
            else:
                await self._relay(reader, writer)
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self._target is not None
        up_reader, up_writer = await asyncio.open_connection(*self._target)
        try:
            while asked := await reader.read(1 << 20):
                up_writer.write(asked)
                answer = await up_reader.read(1 << 20)
                if self.losing and b"EVALSHA" in asked:
                    self.losing = False
                    self.lost += 1
                    return  # it was done, but nobody learns of it
                writer.write(answer)
        finally:
            up_writer.close()


@pytest.mark.requirement("D21")
async def test_a_step_whose_answer_is_lost_is_asked_again_and_done_once(backing: RedisBacking) -> None:
    async with SilentServer(("127.0.0.1", backing.server.port)) as relay:
        store = RedisKeyStore(f"redis://127.0.0.1:{relay.port}", prefix=backing.prefix)
        await store.open()
        await store.unknown()  # each script is known from here on
        fences = {}
        for key in ("kept", "freed", "late"):
            await store.settle(scope("warm"), await fence_of(store, "warm"), None, 0)
            relay.losing = True
            fences[key] = await fence_of(store, key)
        assert relay.lost == 3, "the second asking found its own claim"
        await store.resolve(scope("warm"), None, 0)
        for key, end in (("kept", unknown_end()), ("freed", None)):
            relay.losing = True
            assert await store.settle(scope(key), fences[key], end, MINUTE_MS) is True
        relay.losing = True
        assert await store.resolve(scope("kept"), success(), MINUTE_MS) is True
        assert relay.lost == 6
        assert await claim(store, scope("kept")) == Kept(success())
        assert isinstance(await claim(store, scope("freed")), Claimed)
        await store.close()


@pytest.mark.requirement("D21")
async def test_a_claim_that_nobody_learnt_of_is_given_back(backing: RedisBacking) -> None:
    """Else its key would be unknown, for 30 days, though nothing ran."""
    async with SilentServer(("127.0.0.1", backing.server.port)) as relay:
        store = RedisKeyStore(f"redis://127.0.0.1:{relay.port}", prefix=backing.prefix)
        await store.open()
        await store.settle(scope("warm"), await fence_of(store, "warm"), None, 0)
        run = store._run

        async def asked_once(script: str, *args: object, **kwargs: object) -> object:
            if script == "CLAIM":
                relay.losing = True
                got = await run(script, *args, **kwargs)  # type: ignore[arg-type]
                raise StoreUnavailable(f"as if the second answer had been lost too: {got}")
            return await run(script, *args, **kwargs)  # type: ignore[arg-type]

        store._run = asked_once  # type: ignore[assignment]
        with pytest.raises(StoreUnavailable, match="claimed"):
            await claim(store, scope("charge"))
        store._run = run  # type: ignore[method-assign]

        async def is_free() -> bool:
            return isinstance(await claim(store, scope("charge"), "g"), Claimed)

        await eventually(is_free)
        await store.close()


@pytest.mark.requirement("D21")
async def test_a_server_that_never_answers_is_waited_for_no_longer_than_the_bound() -> None:
    pytest.importorskip("redis")
    async with SilentServer() as server:
        store = RedisKeyStore(f"redis://127.0.0.1:{server.port}", timeout_ms=100)
        async with asyncio.timeout(BOUND_S):
            with pytest.raises(StoreUnavailable, match=r"did not answer within 0\.1 s"):
                await store.open()
        with pytest.raises(StoreUnavailable, match="not open"):
            await claim(store, scope())


@pytest.mark.requirement("D21")
async def test_a_server_that_hangs_while_it_is_used(own_server: RedisServer) -> None:
    """Stopped as by SIGSTOP: connections stand, nothing comes."""
    import signal

    store = RedisKeyStore(own_server.url, timeout_ms=300)
    for _ in range(20):  # a loaded machine may be slower than that bound
        with contextlib.suppress(StoreUnavailable):
            await store.open()
            break
    assert own_server.process is not None
    own_server.process.send_signal(signal.SIGSTOP)
    try:
        async with asyncio.timeout(BOUND_S):
            answers = await asyncio.gather(*(claim(store, scope(f"k{n}")) for n in range(50)), return_exceptions=True)
        assert all(isinstance(answer, StoreUnavailable) for answer in answers), answers
        async with asyncio.timeout(BOUND_S):
            await store.close()
    finally:
        own_server.process.send_signal(signal.SIGCONT)
    backing = RedisBacking(own_server)
    backing.prefix = PREFIX
    later = await backing.open()
    for number in range(60):  # no answer goes to another's question
        got = await claim(later, scope(f"k{number}"), "f", f"c-{number}")
        assert isinstance(got, Claimed) or (isinstance(got, InFlight) and got.call_id == "c-0"), got
    await backing.close()


@pytest.mark.requirement("D21")
async def test_nobody_listens() -> None:
    pytest.importorskip("redis")
    store = RedisKeyStore(f"redis://127.0.0.1:{find_free_port()}")
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        await store.open()


# ---- what is told at the start


@pytest.mark.requirement("D21")
async def test_a_server_without_appendonly_is_warned_of(
    backing: RedisBacking, own_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    await backing.open()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "appendonly is off" in caplog.text
    caplog.clear()
    store = RedisKeyStore(own_server.url)
    await store.open()
    assert caplog.records == []
    async with own_server.client() as client:
        await client.config_set("maxmemory", 64 << 20)
        await client.config_set("maxmemory-policy", "allkeys-lru")
    (risk,) = await store.find_risks()
    assert "noeviction" in risk
    async with own_server.client() as client:
        await client.execute_command("ACL", "SETUSER", "narrow", "on", ">pw", "~*", "+@all", "-info")
    narrow = RedisKeyStore(own_server.url.replace("redis://", "redis://narrow:pw@"))
    await narrow.open()
    assert "INFO is not permitted" in caplog.text
    assert isinstance(await claim(narrow, scope("x")), Claimed)
    await narrow.close()
    await store.close()


@pytest.mark.requirement("D21")
async def test_no_password_is_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret = "hunter2-secret"
    with run_redis(tmp_path, password=secret) as server:
        store = RedisKeyStore(server.url)
        await store.open()
        assert isinstance(await claim(store, scope()), Claimed)
        told = [caplog.text, repr(store)]
        assert "appendonly is off" in caplog.text
        wrong = RedisKeyStore(f"redis://:{secret}-wrong@127.0.0.1:{server.port}/0")
        with pytest.raises(UsageError, match="refused the user or password") as refused:
            await wrong.open()
        told += traceback.format_exception(refused.value)
        server.kill()
        with pytest.raises(StoreUnavailable) as lost:
            await claim(store, scope())
        told += traceback.format_exception(lost.value)
        await store.close()
    for url in (f"rediss://user:{secret}@h:1/0?no_such_option=1", f"http://:{secret}@h", f"redis://:{secret}@h:port/0"):
        with pytest.raises(UsageError, match="not an address of Redis") as bad:
            await RedisKeyStore(url).open()
        told += traceback.format_exception(bad.value)
    assert secret not in "".join(told)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:pw@host:6380/2?password=pw", "redis://host:6380/2"),
        ("redis://host", "redis://host"),
        ("unix:///run/redis.sock?password=pw", "unix:///run/redis.sock"),
        ("redis://:pw@host:x/0", "(an address that cannot be read)"),
    ],
)
def test_masked_addresses(url: str, shown: str) -> None:
    assert mask_url(url) == shown


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"lease_ms": 1_000, "renew_ms": 600}, "outlast two renewals"),
        ({"renew_ms": 0}, "outlast"),
        ({"timeout_ms": 0}, "timeout_ms"),
    ],
)
def test_settings_that_cannot_work(options: dict[str, int], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        RedisKeyStore("redis://h", **options)


def test_the_client_is_imported_when_it_is_used() -> None:
    program = "import sys, callyard.dispatch.stores.redis\nprint('redis' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.strip() == "False"


# --- rates ----------------------------------------------------------------------------------------------------------


TENANT = Tenant("a")


@pytest.mark.requirement("D58")
async def test_two_processes_share_a_rate(backing: RedisBacking) -> None:
    first, second = await backing.open(), await backing.open()
    rate = Rate.parse("3/h")
    taken = [await store.take_place("tool:pay", TENANT, rate, 0) for store in (first, second, first)]
    assert [(place.wait_ms, place.is_taken) for place in taken] == [(0, True)] * 3
    over = await second.take_place("tool:pay", TENANT, rate, 1_000)
    assert not over.is_taken
    assert 1_100_000 < over.wait_ms <= 1_200_000
    assert (await second.take_place("tool:pay", Tenant("b"), rate, 0)).is_taken
    assert (await second.take_place("tool:other", TENANT, rate, 0)).is_taken


@pytest.mark.requirement("D58")
async def test_places_are_handed_out_in_order_and_the_newest_comes_back(backing: RedisBacking) -> None:
    store = await backing.open()
    rate = Rate.parse("1/h")
    hour_ms = 3_600_000
    places = [await store.take_place("tool:pay", TENANT, rate, 10 * hour_ms) for _ in range(3)]
    assert [round(place.wait_ms / hour_ms) for place in places] == [0, 1, 2]
    await store.give_place_back(places[1])  # not the newest: spent
    await store.give_place_back(places[2])
    await store.give_place_back(places[2])  # once is enough
    again = await store.take_place("tool:pay", TENANT, rate, 10 * hour_ms)
    assert round(again.wait_ms / hour_ms) == 2


@pytest.mark.requirement("D58")
async def test_a_rate_that_is_idle_is_forgotten_and_its_burst_is_whole_again(backing: RedisBacking) -> None:
    store = await backing.open()
    rate = Rate.parse("2/100ms")
    assert [(await store.take_place("tool:quick", TENANT, rate, 0)).is_taken for _ in range(2)] == [True, True]

    async def is_whole() -> bool:
        return all([(await store.take_place("tool:quick", TENANT, rate, 0)).is_taken for _ in range(2)])

    async with asyncio.timeout(BOUND_S):
        await asyncio.sleep(0.2)
        while not await is_whole():
            await asyncio.sleep(0.2)


@pytest.mark.requirement("D58")
async def test_two_dispatchers_over_one_server_keep_one_rate(backing: RedisBacking) -> None:
    registry = Registry()
    registry.add_tool("pay", lambda _: 1, input_schema={"type": "object"}, rate="2/h", isolation="inline")
    one, other = Dispatcher(registry, store=await backing.open()), Dispatcher(registry, store=await backing.open())
    async with one, other:
        ends = [await dispatcher.dispatch("pay") for dispatcher in (one, other, one, other)]
    assert [end.ok for end in ends] == [True, True, False, False]
    assert ends[3].error is not None
    assert ends[3].error.kind is ErrorKind.RATE_LIMITED
    assert ends[3].error.details["retry_after_ms"] > 1_000_000


@pytest.mark.requirement("D58")
async def test_while_the_server_is_out_of_reach_each_process_counts_for_itself(
    own_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    registry = Registry()
    registry.add_tool("pay", lambda _: 1, input_schema={"type": "object"}, rate="1/h", isolation="inline")
    store = RedisKeyStore(own_server.url, timeout_ms=500)
    async with Dispatcher(registry, store=store) as dispatcher:
        own_server.stop()
        assert [(await dispatcher.dispatch("pay")).ok for _ in range(3)] == [True, False, False]
        assert caplog.text.count("rates are kept in this process alone") == 1
