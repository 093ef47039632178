"""The memory store's bounds, and a stateful test of it against a naive model."""

from __future__ import annotations

import gc
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from callyard.dispatch.stores.memory import MemoryKeyStore
from callyard.dispatch.stores.port import Claim, Claimed, Conflicting, Full, InFlight, Kept, KeyEnd, KeyScope
from callyard.errors import UsageError
from callyard.ids import CallId, Tenant

from .key_stores import MINUTE_MS, MONTH_MS, FakeWall, claim, ran_end, scope, success, unknown_end

T = TypeVar("T")


async def keep(
    store: MemoryKeyStore, key: str, end: KeyEnd | None, *, idempotent: bool, ttl_ms: int = MINUTE_MS
) -> None:
    got = await claim(store, scope(key), idempotent=idempotent)
    assert isinstance(got, Claimed), got
    assert await store.settle(scope(key), got.fence, end, ttl_ms)


@pytest.mark.requirement("D20")
async def test_only_ends_of_idempotent_tools_are_evicted_the_oldest_first() -> None:
    wall = FakeWall()
    store = MemoryKeyStore(entries_max=6, now_ms=wall.now_ms)
    await keep(store, "a", success(), idempotent=True)
    await keep(store, "charged", success(), idempotent=False)
    await keep(store, "b", success(), idempotent=True)
    await keep(store, "unknown", unknown_end(), idempotent=False, ttl_ms=MONTH_MS)
    await keep(store, "unknown too", unknown_end(), idempotent=True, ttl_ms=MONTH_MS)
    running = await claim(store, scope("running"), idempotent=True)
    assert isinstance(running, Claimed)
    assert len(store) == 6

    assert isinstance(await claim(store, scope("new 1")), Claimed)
    assert isinstance(await claim(store, scope("b")), Kept)
    assert isinstance(await claim(store, scope("new 2")), Claimed)
    assert await claim(store, scope("new 3")) == Full(retry_after_ms=MINUTE_MS), "until the first that expires"
    wall.ms += MINUTE_MS - 1
    assert await claim(store, scope("new 3")) == Full(retry_after_ms=1)
    wall.ms += 1
    assert isinstance(await claim(store, scope("new 3")), Claimed)
    for key in ("unknown", "unknown too"):
        assert isinstance(await claim(store, scope(key)), Kept)
    assert await claim(store, scope("running")) == InFlight(CallId("c-0"), running.fence)
    assert await store.settle(scope("running"), running.fence, success(), MINUTE_MS)
    assert isinstance(await claim(store, scope("new 4")), Claimed), "an end that may be forgotten makes room"
    full = await claim(store, scope("new 5"))
    assert isinstance(full, Full)
    assert full.retry_after_ms == MONTH_MS - MINUTE_MS


@pytest.mark.requirement("D20")
async def test_full_of_runs_says_when_to_ask_again() -> None:
    store = MemoryKeyStore(entries_max=1)
    await claim(store, scope("a"))
    assert await claim(store, scope("b")) == Full(retry_after_ms=1_000)
    assert isinstance(await claim(store, scope("a")), InFlight), "keys that are there are answered all the same"


@pytest.mark.requirement("D20")
async def test_bytes_are_bounded() -> None:
    store = MemoryKeyStore(bytes_max=100_000)
    for number in range(50):
        await keep(store, f"k{number}", success(output=b"1" * 10_000), idempotent=True)
        assert store.held_bytes <= 100_000
    assert len(store) == 9
    assert isinstance(await claim(store, scope("k49")), Kept)
    # What ran is kept, also above the bound: by one output for each key in flight. No further key is taken then.
    fences = [await claim(store, scope(f"charge {number}")) for number in range(2)]
    for number, got in enumerate(fences):
        assert isinstance(got, Claimed)
        await store.settle(scope(f"charge {number}"), got.fence, success(output=b"1" * 90_000), MINUTE_MS)
    assert 180_000 < store.held_bytes < 190_000
    assert isinstance(await claim(store, scope("one more")), Full)
    assert isinstance(await claim(store, scope("charge 0")), Kept)


@pytest.mark.requirement("D20")
@pytest.mark.parametrize("freed", [True, False])
async def test_a_hundred_thousand_keyed_calls_leave_memory_flat(freed: bool) -> None:
    """Nothing expires meanwhile: what is forgotten early leaves nothing behind."""
    store = MemoryKeyStore(entries_max=500, now_ms=FakeWall().now_ms)

    async def run(first: int, count: int) -> int:
        for number in range(first, first + count):
            got = await store.claim(scope(f"{number:08}"), "f", CallId("c"), idempotent=True, unknown_ttl_ms=MONTH_MS)
            assert isinstance(got, Claimed)
            await store.settle(scope(f"{number:08}"), got.fence, None if freed else success(), MINUTE_MS)
        gc.collect()
        return sys.getallocatedblocks()

    before = await run(0, 5_000)
    after = await run(5_000, 95_000)
    assert after - before < 3_000, "a few for each of 500 entries at most"


@pytest.mark.parametrize("options", [{"entries_max": 0}, {"bytes_max": 0}, {"output_bytes_max": -1}])
def test_a_store_without_room_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        MemoryKeyStore(**options)


# ---- the model: a list of records that is searched and sorted from scratch at each step

ENTRIES_MAX = 4
KEYS = st.sampled_from([scope(key, tenant=tenant) for key in "pqr" for tenant in "ab"])
ENDS = st.sampled_from([success(), ran_end(), unknown_end(), None])
TTLS = st.sampled_from([5, 20, 1_000])


class Naive:
    """One key of the model."""

    def __init__(self, where: KeyScope, fingerprint: str, call_id: str, fence: int, idempotent: bool) -> None:
        self.scope, self.fingerprint, self.call_id, self.fence = where, fingerprint, call_id, fence
        self.idempotent = idempotent
        self.end: KeyEnd | None = None
        self.expires_at_ms = 0
        self.ended_at_ms = 0
        self.ended_as = 0

    @property
    def is_unknown(self) -> bool:
        return self.end is not None and self.end.failure is not None and self.end.failure.outcome == "unknown"

    @property
    def may_go(self) -> bool:
        return self.end is not None and self.idempotent and not self.is_unknown


class MemoryStoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.wall = FakeWall()
        self.store = MemoryKeyStore(entries_max=ENTRIES_MAX, now_ms=self.wall.now_ms)
        self.records: list[Naive] = []
        self.fences: list[tuple[KeyScope, int]] = []
        self.calls = 0
        self.ends = 0

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The store never waits for anything: one step ends it."""
        try:
            work.send(None)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        raise AssertionError("it waited")

    def expire(self) -> None:
        self.records = [r for r in self.records if r.end is None or r.expires_at_ms > self.wall.ms]

    def find(self, where: KeyScope) -> Naive | None:
        return next((record for record in self.records if record.scope == where), None)

    def expected(self, where: KeyScope, fingerprint: str) -> Claim | None:
        """None: the key is ours."""
        self.expire()
        record = self.find(where)
        if record is not None:
            if record.fingerprint != fingerprint:
                return Conflicting(CallId(record.call_id))
            if record.end is None:
                return InFlight(CallId(record.call_id), record.fence)
            return Kept(record.end)
        if len(self.records) == ENTRIES_MAX:
            goers = sorted((r for r in self.records if r.may_go), key=lambda r: r.ended_as)
            if not goers:
                ended = [r.expires_at_ms for r in self.records if r.end is not None]
                return Full(min(ended) - self.wall.ms if ended else 1_000)
            self.records.remove(goers[0])
        return None

    @rule(where=KEYS, fingerprint=st.sampled_from("fffg"), idempotent=st.booleans())
    def claim(self, where: KeyScope, fingerprint: str, idempotent: bool) -> None:
        self.calls += 1
        call_id = f"c-{self.calls}"
        expected = self.expected(where, fingerprint)
        got = self.run(claim(self.store, where, fingerprint, call_id, idempotent=idempotent))
        if expected is not None:
            assert got == expected
            return
        assert isinstance(got, Claimed)
        assert all(got.fence > fence for _, fence in self.fences), "fences only grow"
        self.fences.append((where, got.fence))
        self.records.append(Naive(where, fingerprint, call_id, got.fence, idempotent))

    @rule(which=st.integers(0, 3), end=ENDS, ttl_ms=TTLS, elsewhere=st.sampled_from([None, None, None, "p"]))
    def settle(self, which: int, end: KeyEnd | None, ttl_ms: int, elsewhere: str | None) -> None:
        if len(self.fences) <= which:
            return
        where, fence = self.fences[-1 - which]  # of late ones some are held, some over
        if elsewhere is not None:
            where = scope(elsewhere, tenant="a")
        record = self.find(where)
        held = record is not None and record.fence == fence and record.end is None
        assert self.run(self.store.settle(where, fence, end, ttl_ms)) is held
        if held and record is not None:
            self.put(record, end, ttl_ms)

    @rule(where=KEYS, end=ENDS, ttl_ms=TTLS)
    def resolve(self, where: KeyScope, end: KeyEnd | None, ttl_ms: int) -> None:
        self.expire()
        record = self.find(where)
        found = record is not None and record.is_unknown
        assert self.run(self.store.resolve(where, end, ttl_ms)) is found
        if found and record is not None:
            self.put(record, end, ttl_ms)

    def put(self, record: Naive, end: KeyEnd | None, ttl_ms: int) -> None:
        if end is None:
            self.records.remove(record)
            return
        self.ends += 1
        record.end, record.call_id, record.ended_as = end, end.call_id, self.ends
        record.ended_at_ms, record.expires_at_ms = self.wall.ms, self.wall.ms + ttl_ms

    @rule(ms=st.sampled_from([1, 5, 50]))
    def pass_time(self, ms: int) -> None:
        self.wall.ms += ms

    @rule(tenant=st.sampled_from([None, "a"]), limit=st.sampled_from([1, 100]))
    def list_unknown(self, tenant: str | None, limit: int) -> None:
        self.expire()
        mine = [r for r in self.records if r.is_unknown and tenant in (None, r.scope.tenant)]
        mine.sort(key=lambda r: (r.ended_at_ms, r.fence))
        listed = self.run(self.store.unknown(None if tenant is None else Tenant(tenant), limit))
        assert [(r.scope, r.end, r.ended_at_ms, r.expires_at_ms) for r in mine[:limit]] == [
            (record.scope, record.end, record.ended_at_ms, record.expires_at_ms) for record in listed
        ]

    @invariant()
    def bounded(self) -> None:
        assert len(self.store) <= ENTRIES_MAX
        assert (self.store.held_bytes > 0) == (len(self.store) > 0)


class TestMemoryStore(MemoryStoreMachine.TestCase):  # type: ignore[misc]
    settings = settings(max_examples=150, stateful_step_count=40)


TestMemoryStore.pytestmark = [pytest.mark.requirement("D16", "D18", "D19", "D20")]
