"""How many requests run at a provider, and who waits for it in what order.

At most `requests_at_once` run. The others wait: tenants take turns, within a tenant its tasks do, within a task the
first come. At most `waiters_max` wait; when that is full, the newest waiter of the tenant with the most makes room for
one of a tenant with fewer, and is refused; else the newcomer is. So no tenant can keep the others out by filling the
queue. Pure bookkeeping: it starts nothing itself. Source: call-execution X42, X82.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from callyard.ids import TaskId, Tenant


class Waiter(Protocol):
    """What stands at a gate; hashed by identity."""

    @property
    def tenant(self) -> Tenant: ...
    @property
    def task_id(self) -> TaskId: ...
    @property
    def size_bytes(self) -> int: ...


W = TypeVar("W", bound=Waiter)


class Gate(Generic[W]):
    """One provider's. A waiter is handed in by `enter`, and later out by `next`, or taken out by `leave`."""

    __slots__ = ("_queues", "_waiting_of", "bytes_held", "bytes_max", "requests_at_once", "running", "waiters_max")

    def __init__(self, requests_at_once: int, waiters_max: int, bytes_max: int) -> None:
        self.requests_at_once = requests_at_once
        self.waiters_max = waiters_max
        self.bytes_max = bytes_max
        self.bytes_held = 0
        """Of what runs and what waits."""
        self.running: set[W] = set()
        self._queues: dict[Tenant, dict[TaskId, dict[W, None]]] = {}
        """Who waits; the order of each level is the order of turns. No level is ever empty."""
        self._waiting_of: dict[Tenant, int] = {}

    @property
    def waiting(self) -> int:
        return sum(self._waiting_of.values())

    def __contains__(self, waiter: W) -> bool:
        tasks = self._queues.get(waiter.tenant, {})
        return waiter in self.running or waiter in tasks.get(waiter.task_id, {})

    def enter(self, newcomer: W) -> W | None:
        """Let it wait; returns who is refused for it: nobody, the newcomer itself, or one who made room."""
        if self.bytes_held + newcomer.size_bytes > self.bytes_max:
            return newcomer
        refused = None
        # While a place is free nobody stays in the queue, so that its bound does not matter then.
        if len(self.running) >= self.requests_at_once and self.waiting >= self.waiters_max:
            refused = self._find_refused(newcomer)
            if refused is newcomer:
                return newcomer
            self.leave(refused)
        self.bytes_held += newcomer.size_bytes
        tenant = newcomer.tenant
        self._queues.setdefault(tenant, {}).setdefault(newcomer.task_id, {})[newcomer] = None
        self._waiting_of[tenant] = self._waiting_of.get(tenant, 0) + 1
        return refused

    def _find_refused(self, newcomer: W) -> W:
        if not self._waiting_of:
            return newcomer
        most = max(self._waiting_of, key=self._waiting_of.__getitem__)
        if self._waiting_of[most] <= self._waiting_of.get(newcomer.tenant, 0) + 1:
            return newcomer
        largest = max(self._queues[most].values(), key=len)
        return next(reversed(largest))

    def next(self) -> W | None:
        """Whose turn it is, now counted as running; None: nobody waits, or no place is free."""
        if not self._queues or len(self.running) >= self.requests_at_once:
            return None
        tenant, tasks = next(iter(self._queues.items()))
        task_id, queue = next(iter(tasks.items()))
        waiter = next(iter(queue))
        self._take_out(waiter)
        if task_id in tasks:
            tasks[task_id] = tasks.pop(task_id)
        if tenant in self._queues:
            self._queues[tenant] = self._queues.pop(tenant)
        self.running.add(waiter)
        return waiter

    def leave(self, waiter: W) -> None:
        """It has ended, or waits no more."""
        if waiter in self.running:
            self.running.discard(waiter)
        else:
            self._take_out(waiter)
        self.bytes_held -= waiter.size_bytes

    def _take_out(self, waiter: W) -> None:
        tenant, task_id = waiter.tenant, waiter.task_id
        tasks = self._queues[tenant]
        del tasks[task_id][waiter]
        if not tasks[task_id]:
            del tasks[task_id]
        if not tasks:
            del self._queues[tenant]
        self._waiting_of[tenant] -= 1
        if not self._waiting_of[tenant]:
            del self._waiting_of[tenant]
