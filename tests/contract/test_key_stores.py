"""What every key store does, whatever it stands on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest

from callyard.dispatch.stores.port import Claimed, Conflicting, InFlight, Kept, KeyEnd, KeyRecord
from callyard.errors import ErrorKind, Outcome
from callyard.ids import CallId, Tenant

from .key_stores import (
    BOUND_S,
    MINUTE_MS,
    MONTH_MS,
    Backing,
    MemoryBacking,
    RedisBacking,
    RedisServer,
    SqliteBacking,
    claim,
    eventually,
    ran_end,
    run_redis,
    scope,
    success,
    unknown_end,
)


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with run_redis(tmp_path_factory.mktemp("redis"), "--appendonly", "yes") as server:
        yield server


@pytest.fixture(params=["memory", "sqlite", "redis"])
async def backing(request: pytest.FixtureRequest, tmp_path: object) -> AsyncIterator[Backing]:
    made: Backing
    match request.param:
        case "memory":
            made = MemoryBacking()
        case "sqlite":
            made = SqliteBacking(request.getfixturevalue("tmp_path"))
        case _:
            made = RedisBacking(request.getfixturevalue("redis_server"))
    yield made
    await made.close()


async def claimed(store: object, *args: object, **kwargs: object) -> int:
    got = await claim(store, *args, **kwargs)  # type: ignore[arg-type]
    assert isinstance(got, Claimed), got
    return got.fence


@pytest.mark.requirement("D16", "D17", "D18")
@pytest.mark.parametrize("end", [success(), ran_end(), unknown_end(), success(output=b"null", attempts=3)])
@pytest.mark.parametrize("idempotent", [False, True])
async def test_life_of_a_key(backing: Backing, end: KeyEnd, idempotent: bool) -> None:
    store = await backing.open()
    got = await claim(store, scope(), "f", "c-0", idempotent=idempotent)
    assert isinstance(got, Claimed)
    assert await claim(store, scope(), "f", "c-1") == InFlight(CallId("c-0"), got.fence)
    assert await store.settle(scope(), got.fence, end, MINUTE_MS) is True
    assert await claim(store, scope(), "f", "c-2") == Kept(end)


@pytest.mark.requirement("D18")
async def test_a_freed_key_is_claimed_again_under_a_larger_fence(backing: Backing) -> None:
    store = await backing.open()
    first = await claimed(store, scope())
    assert await store.settle(scope(), first, None, 0) is True
    assert await claimed(store, scope(), "other arguments") > first


@pytest.mark.requirement("D16")
@pytest.mark.parametrize("end", [None, success(), unknown_end()])
async def test_other_arguments_conflict(backing: Backing, end: KeyEnd | None) -> None:
    store = await backing.open()
    fence = await claimed(store, scope(), "f", "c-0")
    if end is not None:
        await store.settle(scope(), fence, end, MINUTE_MS)
    assert await claim(store, scope(), "g", "c-1") == Conflicting(CallId("c-0"))


@pytest.mark.requirement("D16", "D44")
async def test_a_key_belongs_to_tenant_and_tool(backing: Backing) -> None:
    store = await backing.open()
    scopes = [
        scope("k", "charge", "a"),
        scope("k", "charge", "b"),
        scope("k", "refund", "a"),
        scope("charge:k", "x", "a"),  # no two scopes are one when their parts are put together
        scope("k", "charge", "a:x"),
        scope("k", "charge", "a%3Ax"),
        scope("Ключ 7 ✓", "charge", "a"),
    ]
    fences = [await claimed(store, where, f"f-{where}") for where in scopes]
    for where, fence in zip(scopes, fences, strict=True):
        assert await store.settle(where, fence, success(f"c-{fence}"), MINUTE_MS)
    for where, fence in zip(scopes, fences, strict=True):
        assert await claim(store, where, f"f-{where}") == Kept(success(f"c-{fence}"))


@pytest.mark.requirement("D21")
async def test_an_old_fence_writes_nothing(backing: Backing) -> None:
    store = await backing.open()
    old = await claimed(store, scope())
    await store.settle(scope(), old, None, 0)
    new = await claimed(store, scope(), "f", "c-1")
    assert await store.settle(scope(), old, success("c-0"), MINUTE_MS) is False
    assert await store.settle(scope(), old, None, 0) is False
    assert await claim(store, scope()) == InFlight(CallId("c-1"), new)
    assert await store.settle(scope(), new, success("c-1"), MINUTE_MS) is True
    assert await store.settle(scope(), new, success("c-9"), MINUTE_MS) is False, "an end is written once"
    assert await store.settle(scope(), new, None, 0) is False
    assert await claim(store, scope()) == Kept(success("c-1"))
    assert await store.settle(scope("never"), new, success(), MINUTE_MS) is False


@pytest.mark.requirement("D18", "D20")
async def test_an_end_is_kept_for_its_time(backing: Backing) -> None:
    store = await backing.open()
    for key, ttl_ms in (("short", 30), ("long", MINUTE_MS)):
        await store.settle(scope(key), await claimed(store, scope(key)), success(), ttl_ms)
    await backing.let_pass(31)
    assert isinstance(await claim(store, scope("short"), "g"), Claimed)
    assert isinstance(await claim(store, scope("long")), Kept)


@pytest.mark.requirement("D18", "D20")
async def test_a_run_does_not_expire(backing: Backing) -> None:
    store = await backing.open(**({"renew_ms": 10} if backing.shared else {}))
    fences = [await claimed(store, scope(str(idempotent)), idempotent=idempotent) for idempotent in (True, False)]
    await backing.let_holders_live(MONTH_MS)
    for idempotent, fence in zip((True, False), fences, strict=True):
        assert await claim(store, scope(str(idempotent))) == InFlight(CallId("c-0"), fence)
        assert await store.settle(scope(str(idempotent)), fence, success(), MINUTE_MS)


@pytest.mark.requirement("D20")
async def test_nothing_is_shared_with_a_caller(backing: Backing) -> None:
    store = await backing.open()
    details = {"pointers": ["/a"]}
    failure = msgspec.structs.replace(unknown_end().failure, details=details)  # type: ignore[type-var]
    await store.settle(scope(), await claimed(store, scope()), KeyEnd(CallId("c-0"), 1, failure=failure), MINUTE_MS)
    details["pointers"].append("/mine")
    for _ in range(2):
        got = await claim(store, scope())
        assert isinstance(got, Kept)
        assert got.end.failure is not None
        assert got.end.failure.details == {"pointers": ["/a"]}
        got.end.failure.details["pointers"].append("/theirs")


@pytest.mark.requirement("D19", "D55")
async def test_unknown_ends_are_listed_and_resolved(backing: Backing) -> None:
    store = await backing.open()
    before_ms = await backing.now_ms()
    for tenant, key, end in (
        ("a", "k1", unknown_end("c-1")),
        ("b", "k1", unknown_end("c-2")),
        ("a", "k2", success("c-3")),
        ("a", "k3", ran_end("c-4")),
        ("a", "k4", unknown_end("c-5")),
    ):
        where = scope(key, tenant=tenant)
        await store.settle(where, await claimed(store, where), end, MONTH_MS)
        await backing.let_pass(2)
    listed = await store.unknown()
    assert [(record.scope, record.end) for record in listed] == [
        (scope("k1", tenant="a"), unknown_end("c-1")),
        (scope("k1", tenant="b"), unknown_end("c-2")),
        (scope("k4", tenant="a"), unknown_end("c-5")),
    ]
    assert all(before_ms <= record.ended_at_ms == record.expires_at_ms - MONTH_MS for record in listed)
    assert await store.unknown(Tenant("b")) == listed[1:2]
    assert await store.unknown(limit=2) == listed[:2]
    assert await store.unknown(Tenant("c")) == []

    answer = success("c-1", b"42")
    assert await store.resolve(scope("k1", tenant="a"), answer, MINUTE_MS) is True
    assert await claim(store, scope("k1", tenant="a")) == Kept(answer)
    assert await store.resolve(scope("k1", tenant="b"), None, 0) is True
    assert isinstance(await claim(store, scope("k1", tenant="b"), "other arguments"), Claimed)
    assert await store.unknown() == listed[2:]

    for key in ("k1", "k2", "k3", "none"):
        assert await store.resolve(scope(key, tenant="a"), None, 0) is False, "only unknown ends are resolved"
    assert await store.resolve(scope("k1", tenant="b"), None, 0) is False, "a run is not"
    assert await claim(store, scope("k2", tenant="a")) == Kept(success("c-3"))


@pytest.mark.requirement("D56")
async def test_an_end_is_found_by_its_key_and_nothing_else_is(backing: Backing) -> None:
    store = await backing.open()
    assert await store.find(scope()) is None
    fence = await claimed(store, scope())
    assert await store.find(scope()) is None, "in flight"
    await store.settle(scope(), fence, success("c-1"), 30)
    assert await store.find(scope()) == success("c-1")
    assert await store.find(scope(tenant="other")) is None
    assert await store.find(scope(tool="other")) is None
    await store.settle(scope("u"), await claimed(store, scope("u")), unknown_end("c-2"), MONTH_MS)
    assert await store.find(scope("u")) == unknown_end("c-2")
    await backing.let_pass(31)
    assert await store.find(scope()) is None, "its time is over"


@pytest.mark.requirement("D55")
async def test_an_unknown_end_expires_by_its_own_time(backing: Backing) -> None:
    store = await backing.open()
    await store.settle(scope("k"), await claimed(store, scope("k")), unknown_end(), 30)
    await store.settle(scope("later"), await claimed(store, scope("later")), unknown_end(), MINUTE_MS)
    await backing.let_pass(31)
    assert [record.scope for record in await store.unknown()] == [scope("later")]
    assert await store.resolve(scope("k"), None, 0) is False
    assert isinstance(await claim(store, scope("k")), Claimed)


@pytest.mark.requirement("D55")
async def test_a_resolved_end_expires_by_its_new_time(backing: Backing) -> None:
    store = await backing.open()
    for key, ttl_ms in (("shorter", 30), ("longer", MONTH_MS)):
        await store.settle(scope(key), await claimed(store, scope(key)), unknown_end(), MINUTE_MS)
        await store.resolve(scope(key), success(), ttl_ms)
    await backing.let_pass(31)
    assert isinstance(await claim(store, scope("shorter")), Claimed)
    assert isinstance(await claim(store, scope("longer")), Kept)


@pytest.mark.requirement("D17", "D21")
async def test_of_a_hundred_claims_one_runs(backing: Backing) -> None:
    store = await backing.open()
    stores = [store, await backing.open()] if backing.shared else [store]
    answers = await asyncio.gather(*(claim(stores[n % len(stores)], scope(), "f", f"c-{n}") for n in range(100)))
    winners = [answer for answer in answers if isinstance(answer, Claimed)]
    assert len(winners) == 1
    holder = CallId(f"c-{answers.index(winners[0])}")
    others = [answer for answer in answers if not isinstance(answer, Claimed)]
    assert others == [InFlight(holder, winners[0].fence)] * 99


@pytest.mark.requirement("D16", "D17")
async def test_a_hundred_keys_at_once(backing: Backing) -> None:
    store = await backing.open()

    async def run(number: int) -> int:
        fence = await claimed(store, scope(f"k{number}"), f"f{number}", f"c-{number}", idempotent=number % 2 == 0)
        assert await store.settle(scope(f"k{number}"), fence, success(f"c-{number}"), MINUTE_MS)
        return fence

    fences = await asyncio.gather(*map(run, range(100)))
    assert len(set(fences)) == 100
    for number in range(100):
        assert await claim(store, scope(f"k{number}"), f"f{number}") == Kept(success(f"c-{number}"))


@pytest.mark.requirement("D17")
@pytest.mark.parametrize("end", [success(), unknown_end(), None])
async def test_wait_ends_with_the_claim(backing: Backing, end: KeyEnd | None) -> None:
    store = await backing.open()
    other = await backing.open() if backing.shared else store
    fence = await claimed(store, scope())
    mine = await claimed(store, scope("mine"))
    waits = [asyncio.create_task(other.wait(scope(), fence)) for _ in range(5)]
    beside = asyncio.create_task(other.wait(scope("mine"), mine))
    dropped = asyncio.create_task(other.wait(scope(), fence))
    await asyncio.sleep(0)
    dropped.cancel()
    await store.settle(scope(), fence, end, MINUTE_MS)
    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(*waits)
        await other.wait(scope(), fence)  # over already
        await other.wait(scope("never"), 7)
    assert not beside.done()
    beside.cancel()
    await asyncio.gather(beside, dropped, return_exceptions=True)
    assert dropped.cancelled()


@pytest.mark.requirement("D42")
async def test_the_claim_of_a_cancelled_caller_is_given_back(backing: Backing) -> None:
    if isinstance(backing, MemoryBacking):
        pytest.skip("its claim never waits, so no cancellation comes between")
    store = await backing.open()
    task = asyncio.create_task(claim(store, scope()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    async def is_free() -> bool:
        return isinstance(await claim(store, scope(), "g"), Claimed)

    await eventually(is_free)


@pytest.mark.requirement("D26")
async def test_an_output_above_the_limit(backing: Backing) -> None:
    store = await backing.open(output_bytes_max=1_000)
    for key, idempotent in (("again", True), ("once", False)):
        fence = await claimed(store, scope(key), idempotent=idempotent)
        assert await store.settle(scope(key), fence, success(output=b"1" * 1_001), MINUTE_MS) is True
    assert isinstance(await claim(store, scope("again")), Claimed), "running again is safe"
    got = await claim(store, scope("once"))
    assert isinstance(got, Kept)
    assert got.end.failure is not None
    assert (got.end.failure.kind, got.end.failure.outcome) == (ErrorKind.RESULT, Outcome.RAN)
    assert got.end.failure.details == {"size": 1_001, "limit": 1_000}


@pytest.mark.requirement("D20", "D24")
async def test_failures_that_have_no_json_or_are_large_are_kept_all_the_same(backing: Backing) -> None:
    store = await backing.open()
    for key, changes in {
        "surrogate": {"message": "bad \ud800 text"},
        "object": {"details": {"x": object()}},
        "large": {"stack": "x" * 1_000_000, "message": "m" * 10_000},
        "secret": {"local_variables": {"password": "hunter2"}},
    }.items():
        failure = msgspec.structs.replace(unknown_end().failure, **changes)  # type: ignore[type-var]
        await store.settle(
            scope(key), await claimed(store, scope(key)), KeyEnd(CallId("c"), 2, failure=failure), MINUTE_MS
        )
        got = await claim(store, scope(key))
        assert isinstance(got, Kept)
        kept = got.end.failure
        assert kept is not None
        assert (kept.kind, kept.outcome, kept.attempts) == (ErrorKind.TIMEOUT, Outcome.UNKNOWN, 2)
        assert len(kept.message) <= 4_096
        assert kept.local_variables == {}
    assert len(await store.unknown()) == 4


@pytest.mark.requirement("D19", "D21", "D55")
async def test_what_a_dead_holder_leaves(backing: Backing) -> None:
    if not backing.survives:
        pytest.skip("a memory store ends with its process: nothing is left to find")
    first = await backing.open()
    lost = await claimed(first, scope("charge"), "f", "c-1", unknown_ttl_ms=MINUTE_MS)
    freed = await claimed(first, scope("look-up"), "f", "c-2", idempotent=True)
    await first.settle(scope("done"), await claimed(first, scope("done"), "f", "c-3"), success("c-3"), MINUTE_MS)
    await backing.die(first)

    store = await backing.open()
    now_ms = await backing.now_ms()
    assert await claim(store, scope("charge"), "other arguments", "c-9") == Conflicting(CallId("c-1"))
    got = await claim(store, scope("charge"), "f", "c-9")
    assert isinstance(got, Kept), "never run again silently"
    assert got.end.failure is not None
    assert (got.end.call_id, got.end.failure.kind, got.end.failure.outcome) == (
        "c-1",
        ErrorKind.CRASHED,
        Outcome.UNKNOWN,
    )
    record: KeyRecord
    (record,) = await store.unknown()
    assert (record.scope, record.end) == (scope("charge"), got.end)
    assert record.ended_at_ms <= now_ms
    assert record.expires_at_ms == record.ended_at_ms + MINUTE_MS
    assert await store.settle(scope("charge"), lost, success("c-1"), MINUTE_MS) is False, "a late write is refused"
    assert await store.settle(scope("look-up"), freed, success("c-2"), MINUTE_MS) is False
    again = await claimed(store, scope("look-up"), "f", "c-8", idempotent=True)
    assert again > freed
    assert await claim(store, scope("done")) == Kept(success("c-3"))

    assert await store.resolve(scope("charge"), success("c-1"), MINUTE_MS) is True
    assert await claim(store, scope("charge")) == Kept(success("c-1"))


@pytest.mark.requirement("D20")
async def test_ends_survive_a_restart(backing: Backing) -> None:
    if not backing.survives:
        pytest.skip("a memory store ends with its process: nothing is left to find")
    first = await backing.open()
    fence = await claimed(first, scope())
    await first.settle(scope(), fence, ran_end(), MINUTE_MS)
    await first.close()
    await first.close()
    store = await backing.open()
    assert await claim(store, scope()) == Kept(ran_end())
    assert await claimed(store, scope("next")) > fence, "fences grow over restarts"


@pytest.mark.requirement("D21", "D43")
async def test_open_and_close_may_be_repeated(backing: Backing) -> None:
    store = await backing.open()
    await store.open()
    await claimed(store, scope())
    await store.close()
    await store.close()
