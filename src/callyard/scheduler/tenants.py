"""Whose calls are next with `instance_fairness`: the tenant with the fewest in flight.

Ties go to the least recently served, and a tenant's rings take turns. A turn is a quantum of binds in a row. So who has
nothing in flight waits for at most one turn of each other tenant with ready calls and the rest of one: as many binds
as tenants times quantum. Counts alone would starve a tenant whose calls take long beside others whose calls are over
at once; therefore every `AGED_TURNS`th turn goes to the tenant that was served longest ago, whatever it has in flight.
With weights, calls in flight count by a tenant's share. Source: call-execution X17, X23.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Final

from callyard.ids import FunctionId, Tenant
from callyard.scheduler.config import QUANTUM_MAX
from callyard.scheduler.placement import Placement

Ring = tuple[Placement, FunctionId | None, Tenant | None]
"""What names a ring; the function is None for call lists, the tenant without `instance_fairness`."""
AGED_TURNS: Final = 32
IDLE_MAX: Final = 4_096
"""So many tenants without calls are remembered; one that was forgotten counts as never served."""


@dataclass(eq=False, slots=True)
class Standing:
    """A tenant with ready calls, or calls in flight."""

    tenant: Tenant
    weight: int
    inflight: int = 0
    """Root calls RUNNING or WAITING."""
    served_at: int = 0
    """Number of its last bind; 0: there was none."""
    rings: dict[Ring, None] = field(default_factory=dict)
    """Those with its ready calls, in turn."""
    version: int = 0
    """Of its valid entry in the heap; 0: none is."""

    @property
    def order(self) -> tuple[float, int, Tenant]:
        """Smaller is sooner."""
        return self.inflight / self.weight, self.served_at, self.tenant


_Entry = tuple[float, int, Tenant, int, Standing]


class TenantTurns:
    def __init__(self, quantum: int, weights: Mapping[Tenant, int]) -> None:
        self._quantum = max(1, min(quantum, QUANTUM_MAX))
        self._weights = weights
        self.standings: dict[Tenant, Standing] = {}
        self._ready: dict[Tenant, Standing] = {}
        """Those with rings."""
        self._heap: list[_Entry] = []
        """One valid entry for each of `_ready`."""
        self._entered = 0
        self._idle: OrderedDict[Tenant, int] = OrderedDict()
        """When those without calls were served last."""
        self._binds = 0
        self._turns = 0
        self._holder: Standing | None = None
        """Whose turn it is."""
        self._left = 0
        """Binds left of that turn."""

    def add(self, ring: Ring) -> None:
        """A ring has calls now."""
        standing = self._of(_tenant_of(ring))
        standing.rings[ring] = None
        self._ready[standing.tenant] = standing
        self._enter(standing)

    def remove(self, ring: Ring) -> None:
        """It has none any more."""
        standing = self._of(_tenant_of(ring))
        del standing.rings[ring]
        if not standing.rings:
            del self._ready[standing.tenant]
            standing.version = 0
            self._leave_if_idle(standing)

    def count(self, tenant: Tenant, change: int) -> None:
        """A root call was bound, or is no more."""
        standing = self._of(tenant)
        standing.inflight += change
        if standing.rings:
            self._enter(standing)
        else:
            self._leave_if_idle(standing)

    def pass_on(self, ring: Ring) -> None:
        """A call of this ring took its turn."""
        standing = self._of(_tenant_of(ring))
        del standing.rings[ring]
        standing.rings[ring] = None
        self._binds += 1
        standing.served_at = self._binds
        self._enter(standing)
        if self._holder is standing and self._left > 0:
            self._left -= 1
        else:
            self._holder, self._left = standing, self._quantum - 1
            self._turns += 1

    def order(self) -> Iterator[Ring]:
        """Rings in the order of their turns; those after the first tenant's only if they are asked for."""
        if not self._ready:
            return
        first = self._first()
        yield from list(first.rings)
        others = sorted((one for one in self._ready.values() if one is not first), key=lambda standing: standing.order)
        for standing in others:
            yield from list(standing.rings)

    def _first(self) -> Standing:
        if self._left > 0 and self._holder is not None and self._holder.rings:
            return self._holder
        if self._turns % AGED_TURNS == AGED_TURNS - 1:
            return min(self._ready.values(), key=lambda standing: (standing.served_at, standing.tenant))
        while self._heap[0][3] != self._heap[0][4].version:
            heappop(self._heap)
        return self._heap[0][4]

    def _of(self, tenant: Tenant) -> Standing:
        standing = self.standings.get(tenant)
        if standing is None:
            served_at = self._idle.pop(tenant, 0)
            standing = Standing(tenant, self._weights.get(tenant, 1), served_at=served_at)
            self.standings[tenant] = standing
        return standing

    def _enter(self, standing: Standing) -> None:
        self._entered += 1
        standing.version = self._entered
        heappush(self._heap, (*standing.order, standing.version, standing))
        if len(self._heap) > 64 + 4 * len(self._ready):
            self._heap = [entry for entry in self._heap if entry[3] == entry[4].version]
            heapify(self._heap)

    def _leave_if_idle(self, standing: Standing) -> None:
        if standing.inflight or standing.rings:
            return
        del self.standings[standing.tenant]
        self._idle[standing.tenant] = standing.served_at
        if len(self._idle) > IDLE_MAX:
            self._idle.popitem(last=False)


def _tenant_of(ring: Ring) -> Tenant:
    tenant = ring[2]
    assert tenant is not None
    return tenant
