"""What an executor must fit before a call may be placed on it: the one rule behind bundles, tenants and named pools.

*A call may only be placed on an executor whose placement fits.* A call has its placement from its function and its
task. An executor is of one pool for life; the first call that is placed on it fixes the rest, and from then on it takes
only calls of the same placement. To serve another it is replaced, never reused. Source: call-execution X92, issue 3.
"""

from __future__ import annotations

from typing import Final, NewType

import msgspec

from callyard.ids import Digest, Tenant

PoolName = NewType("PoolName", str)
DEFAULT_POOL: Final = PoolName("default")


class Placement(msgspec.Struct, frozen=True, order=True, gc=False, cache_hash=True):
    """Equal placements share executors."""

    pool: PoolName
    digest: Digest
    tenant: Tenant | None = None
    """None: tenants share the executors of this pool."""
