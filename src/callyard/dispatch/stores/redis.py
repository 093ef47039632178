"""Keys that several processes share, in Redis: a claim is a lease that its holder renews, with a fencing number.

Every step is one script (`redis_scripts`) and goes by the server's clock. A claim whose lease lapsed is lost: what its
holder writes later is refused, and the key is free if its tool is idempotent, unknown if not. The fence protects the
record, not the effect: a holder that is cut off goes on until somebody stops it. One server (with replicas), not Redis
Cluster. Source: tool-dispatch D21, D55.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import msgspec

from callyard.dispatch.stores import redis_scripts
from callyard.dispatch.stores.port import (
    Claim,
    Claimed,
    Conflicting,
    InFlight,
    Kept,
    KeyEnd,
    KeyRecord,
    KeyScope,
    SharedPlace,
    StoreUnavailable,
)
from callyard.dispatch.stores.records import (
    LOST_END,
    OUTPUT_BYTES_MAX,
    decode_end,
    encode_end,
    is_too_large,
    is_unknown,
)
from callyard.dispatch.stores.redis_link import AGAIN, RedisLink, Refused
from callyard.dispatch.stores.waiters import Waiters
from callyard.errors import UsageError
from callyard.ids import CallId, Tenant
from callyard.policy.rate import Rate

logger = logging.getLogger(__name__)

PREFIX: Final = "callyard:"
VERSION_MIN: Final = 6
_SCRIPTS: Final = (
    "CLAIM",
    "RELEASE",
    "SETTLE",
    "RESOLVE",
    "WATCH",
    "RENEW",
    "FIND",
    "LIST_UNKNOWN",
    "TAKE_PLACE",
    "GIVE_PLACE_BACK",
)
_RENEWED_PER_SCRIPT: Final = 200
_LISTED_PER_SCRIPT: Final = 200
_STREAM_ENTRIES_MAX: Final = 10_000
"""About how many ends of watched claims are remembered for processes that read them late; one that comes later still
sees its claim's end when the lease would have lapsed."""
_DOUBTFUL_MAX: Final = 10_000
_READ_BLOCK_MS: Final = 2_000
_READ_COUNT: Final = 500


class RedisKeyStore:
    """`lease_ms`: how long a claim outlives its holder; renewed every `renew_ms`. `timeout_ms` bounds each exchange
    with the server. Belongs to the loop that opened it."""

    def __init__(
        self,
        url: str,
        *,
        prefix: str = PREFIX,
        lease_ms: int = 30_000,
        renew_ms: int = 10_000,
        timeout_ms: int = 5_000,
        output_bytes_max: int = OUTPUT_BYTES_MAX,
    ) -> None:
        if not 0 < 2 * renew_ms <= lease_ms:
            raise UsageError(f"a lease must outlast two renewals: lease_ms={lease_ms}, renew_ms={renew_ms}")
        if timeout_ms < 1 or output_bytes_max < 0:
            raise UsageError(f"need a timeout_ms above 0, got {timeout_ms}, and output_bytes_max={output_bytes_max}")
        scripts = {name: getattr(redis_scripts, name) for name in _SCRIPTS}
        self._link = RedisLink(url, scripts, timeout_ms / 1_000)
        self._prefix = prefix
        self._lease_ms = lease_ms
        self._renew_ms = renew_ms
        self._output_bytes_max = output_bytes_max
        self._holder = os.urandom(8).hex()
        self._asked = 0
        self._held: dict[str, int] = {}
        """Fence by record name, of the claims that are renewed."""
        self._doubtful: dict[str, KeyScope] = {}
        """By holder: claims that may have been made and are to be given back."""
        self._unsettled: dict[str, tuple[KeyScope, list[Any]]] = {}
        """By record name: ends that found no way to the server; tried again while their leases last."""
        self._work_rose = asyncio.Event()
        self._renewing: asyncio.Task[None] | None = None
        self._waiters = Waiters()
        self._reading: asyncio.Task[None] | None = None
        self._read_up_to = b"0-0"

    def __repr__(self) -> str:
        return f"RedisKeyStore({self._link.place!r})"

    async def open(self) -> None:
        """Raises UsageError for an address or a password that cannot be right, StoreUnavailable if nobody answers. What
        may lose keys is logged as a warning. Leases of dead holders lapse by themselves: nothing is searched for."""
        if self._link.is_open:
            return
        await self._link.open()
        try:
            for warning in await self.find_risks():
                logger.warning("%s: %s", self._link.place, warning)
        except BaseException:
            await self._link.close()
            raise

    async def close(self) -> None:
        if not self._link.is_open:
            return
        tasks = [task for task in (self._renewing, self._reading) if task is not None]
        self._renewing = self._reading = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._link.close()
        self._waiters.fail_all(StoreUnavailable("the key store is closed"))
        self._held.clear()
        self._unsettled.clear()
        self._doubtful.clear()

    async def find_risks(self) -> list[str]:
        """How this server may lose keys, in words. Raises UsageError for a server that is too old."""
        from redis.exceptions import NoPermissionError

        try:
            facts = await self._link.ask(lambda client: client.info())
        except StoreUnavailable as error:
            if isinstance(error.__cause__, NoPermissionError):
                return ["INFO is not permitted here, so whether keys outlive the server's restart is not known"]
            raise
        version = str(facts.get("redis_version", ""))
        if version.partition(".")[0].isdecimal() and int(version.partition(".")[0]) < VERSION_MIN:
            raise UsageError(f"{self._link.place} is Redis {version}: version {VERSION_MIN} or newer is needed")
        risks = []
        if facts.get("loading"):
            raise StoreUnavailable(f"{self._link.place} is still loading its data")
        if not facts.get("aof_enabled"):
            risks.append(
                "appendonly is off: a restart of the server forgets keys, and calls may then run twice. "
                "Set `appendonly yes`, and `appendfsync always` to lose not even a second"
            )
        policy = str(facts.get("maxmemory_policy", "noeviction"))
        if facts.get("maxmemory") and policy != "noeviction":
            risks.append(
                f"maxmemory-policy is {policy}: keys are forgotten when memory is short, and calls may then run twice. "
                "Set `maxmemory-policy noeviction`"
            )
        return risks

    async def claim(
        self, scope: KeyScope, fingerprint: str, call_id: CallId, *, idempotent: bool, unknown_ttl_ms: int
    ) -> Claim:
        holder = self._next_id()
        claiming = asyncio.ensure_future(self._claim(scope, fingerprint, call_id, holder, idempotent, unknown_ttl_ms))
        try:
            return await asyncio.shield(claiming)
        except asyncio.CancelledError:
            claiming.add_done_callback(partial(self._doubt, scope, holder))
            raise

    async def settle(self, scope: KeyScope, fence: int, end: KeyEnd | None, ttl_ms: int) -> bool:
        name = self._name(scope)
        if self._held.get(name) == fence:
            del self._held[name]
        args = [fence, *self._end_args(end, ttl_ms), _STREAM_ENTRIES_MAX]
        try:
            return bool(await self._run("SETTLE", scope, args, [self._prefix + "ended"]))
        except StoreUnavailable:
            if self._renewing is not None:
                self._unsettled[name] = (scope, args)
                self._work_rose.set()
            raise

    async def wait(self, scope: KeyScope, fence: int) -> None:
        name = self._name(scope)
        while True:
            with self._waiters.waiting((name, fence)) as woken:
                await self._start_reading()
                left_ms = await self._run("WATCH", scope, [fence])
                if left_ms < 0:
                    return None
                # Nobody tells of a lease that lapses. It may have been renewed: then the next turn waits on.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout((left_ms + 1) / 1_000):
                        return await woken

    async def resolve(self, scope: KeyScope, end: KeyEnd | None, ttl_ms: int) -> bool:
        return bool(await self._run("RESOLVE", scope, self._end_args(end, ttl_ms)))

    async def find(self, scope: KeyScope) -> KeyEnd | None:
        found = await self._run("FIND", scope, [])
        return None if found is None else decode_end(CallId(found[0].decode()), found[1])

    async def unknown(self, tenant: Tenant | None = None, limit: int = 1_000) -> list[KeyRecord]:
        records: list[KeyRecord] = []
        start = 0
        while len(records) < limit:
            args = [start, _LISTED_PER_SCRIPT, tenant or ""]
            lapsed, looked_at, stay, found = await self._run("LIST_UNKNOWN", None, args)
            if lapsed == _LISTED_PER_SCRIPT:
                continue  # more may have: they come first, so that none shifts what was listed
            records += [_read_record(fields) for fields in found]
            start += stay
            if looked_at < _LISTED_PER_SCRIPT:
                break
        return records[:limit]

    # ---- rates

    async def take_place(self, name: str, tenant: Tenant, rate: Rate, wait_ms_max: int) -> SharedPlace:
        key = f"{self._prefix}rate:{rate}:{_escape(tenant)}:{name}"
        wait_ms, mark = await self._run("TAKE_PLACE", None, [rate.count, rate.per_ms, wait_ms_max], record=key)
        return SharedPlace(wait_ms, bool(mark), key, f"{rate.per_ms}:{mark.decode()}")

    async def give_place_back(self, place: SharedPlace) -> None:
        per_ms, _, mark = place.mark.partition(":")
        await self._run("GIVE_PLACE_BACK", None, [mark, per_ms], record=place.name)

    # ---- claims

    async def _claim(
        self, scope: KeyScope, fingerprint: str, call_id: CallId, holder: str, idempotent: bool, unknown_ttl_ms: int
    ) -> Claim:
        args = [fingerprint, call_id, holder, int(idempotent), unknown_ttl_ms, self._lease_ms]
        args.append(msgspec.json.encode((scope.tenant, scope.tool, scope.key)))
        try:
            kind, *answer = await self._run("CLAIM", scope, args, [self._prefix + "fence"])
        except Refused:
            raise
        except StoreUnavailable:
            self._doubt(scope, holder)
            raise
        if kind == b"claimed":
            self._held[self._name(scope)] = answer[0]
            self._start_renewing()
            return Claimed(answer[0])
        first_call = CallId(answer[0].decode())
        if kind == b"in_flight":
            return InFlight(first_call, answer[1])
        return Kept(decode_end(first_call, answer[1])) if kind == b"kept" else Conflicting(first_call)

    def _doubt(self, scope: KeyScope, holder: str, claiming: asyncio.Future[Claim] | None = None) -> None:
        """A claim that may have been made, but whose caller knows nothing of it: it never runs. It is given back, lest
        the key be found unknown."""
        if claiming is not None:
            if claiming.cancelled() or claiming.exception() is not None or not isinstance(claiming.result(), Claimed):
                return
            self._held.pop(self._name(scope), None)
        if len(self._doubtful) < _DOUBTFUL_MAX and self._link.is_open:
            self._doubtful[holder] = scope
            self._start_renewing()
            self._work_rose.set()

    def _start_renewing(self) -> None:
        if self._renewing is None and self._link.is_open:
            self._renewing = asyncio.create_task(self._keep_renewing(), name="callyard-key-leases")

    async def _keep_renewing(self) -> None:
        """One task for all claims that are held, and for what could not be told when it was asked."""
        loop = asyncio.get_running_loop()
        renew_at_s = loop.time() + self._renew_ms / 1_000
        pause_s = 0.0
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(renew_at_s):
                    await asyncio.sleep(pause_s)
                    await self._work_rose.wait()
            self._work_rose.clear()
            try:
                if loop.time() >= renew_at_s:
                    await self._renew()
                    renew_at_s = loop.time() + self._renew_ms / 1_000
                for name, (scope, args) in list(self._unsettled.items()):
                    with contextlib.suppress(Refused):
                        await self._run("SETTLE", scope, args, [self._prefix + "ended"])
                    del self._unsettled[name]
                for holder, scope in list(self._doubtful.items()):
                    with contextlib.suppress(Refused):
                        await self._run("RELEASE", scope, [holder])
                    del self._doubtful[holder]
                pause_s = 0.0
            except StoreUnavailable as error:
                pause_s = min(self._renew_ms, 1_000) / 1_000
                renew_at_s = loop.time() + pause_s
                logger.warning(
                    "%s: the leases of %d keys cannot be renewed now: %s", self._link.place, len(self._held), error
                )

    async def _renew(self) -> None:
        held = list(self._held.items())
        for first in range(0, len(held), _RENEWED_PER_SCRIPT):
            part = held[first : first + _RENEWED_PER_SCRIPT]
            lost = await self._run(
                "RENEW", None, [self._lease_ms, *(fence for _, fence in part)], [name for name, _ in part]
            )
            for position in lost:
                name, fence = part[position]
                if self._held.get(name) == fence:  # and not settled meanwhile
                    del self._held[name]
                    logger.warning(
                        "%s: the lease of a key was lost: its end will not be kept (%s)", self._link.place, name
                    )

    # ---- waiting

    async def _start_reading(self) -> None:
        """Returns when every end from now on will be seen."""
        if self._reading is not None:
            return
        newest = await self._link.ask(lambda client: client.xrevrange(self._prefix + "ended", count=1))
        if self._reading is None:  # nobody else started it meanwhile
            self._read_up_to = newest[0][0] if newest else b"0-0"
            self._reading = asyncio.create_task(self._read_ends(), name="callyard-key-waits")

    async def _read_ends(self) -> None:
        """One connection for all who wait, while anybody does."""
        stream = self._prefix + "ended"
        try:
            while self._waiters:
                answer = await self._link.ask(
                    lambda client: client.xread({stream: self._read_up_to}, count=_READ_COUNT, block=_READ_BLOCK_MS),
                    longer_s=_READ_BLOCK_MS / 1_000,
                )
                for _, entries in answer or ():
                    for entry_id, fields in entries:
                        self._read_up_to = entry_id
                        self._waiters.wake((fields[b"record"].decode(), int(fields[b"fence"])))
        except StoreUnavailable as error:
            self._waiters.fail_all(error)
        finally:
            self._reading = None  # in the step in which nobody was found waiting: who comes next starts another

    # ---- steps

    async def _run(
        self, script: str, scope: KeyScope | None, args: Sequence[Any], keys: Sequence[str] = (), *, record: str = ""
    ) -> Any:
        """`record`: the first key, where it is no scope's."""
        fixed = (self._prefix + "leases", self._prefix + "unknown")
        return await self._link.run(
            script, [record if scope is None else self._name(scope), *fixed, *keys], [LOST_END, *args]
        )

    def _name(self, scope: KeyScope) -> str:
        """No two scopes have one name: the tenant's own colons are escaped, a tool's name has none."""
        return f"{self._prefix}key:{_escape(scope.tenant)}:{scope.tool}:{scope.key}"

    def _end_args(self, end: KeyEnd | None, ttl_ms: int) -> list[Any]:
        """state, call, end, ttl, id of this step, whether the output was too large to keep, whether asked again."""
        if end is None:
            return ["free", "", b"", ttl_ms, self._next_id(), 0, AGAIN]
        encoded = encode_end(end, self._output_bytes_max)
        large = int(is_too_large(end, self._output_bytes_max))
        return ["u" if is_unknown(end) else "e", end.call_id, encoded, ttl_ms, self._next_id(), large, AGAIN]

    def _next_id(self) -> str:
        self._asked += 1
        return f"{self._holder}-{self._asked}"


def _escape(tenant: Tenant) -> str:
    return tenant.replace("%", "%25").replace(":", "%3A")


def _read_record(fields: list[bytes]) -> KeyRecord:
    scope, call_id, encoded, ended_at_ms, expires_at_ms = fields
    tenant, tool, key = msgspec.json.decode(scope)
    end = decode_end(CallId(call_id.decode()), encoded)
    return KeyRecord(KeyScope(tenant, tool, key), end, int(ended_at_ms), int(expires_at_ms))
