"""Which code a task may call: views, the bundles behind them, and which executors give way to another placement.

A view is pinned when a task begins and never changes. A bundle's folder lies in the run folder while a view of it is
pinned: the worker's own newest one, and those of tasks that began before a reload. When the last pin goes, nothing may
be sent from the bundle any more, executors that serve it are replaced, and the folder is removed after them.
Source: call-execution X40, X84, X92.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Final

import msgspec

from callyard.errors import CallFailure, UsageError
from callyard.functions.bundle import Bundle, remove_tree
from callyard.ids import Digest, ExecutorId
from callyard.scheduler import FunctionTarget
from callyard.scheduler.placement import Placement

PATIENCE_MS: Final = 1_000
"""How long ready calls of a placement wait before executors that others could use are drained for them. It bounds how
often executors are exchanged when there are more busy placements than executors."""


class CodeView(Mapping[str, FunctionTarget]):
    """The functions of one version, by name. Immutable."""

    def __init__(
        self,
        digest: Digest,
        targets: Mapping[str, FunctionTarget],
        *,
        audit_id: str = "",
        refusal: CallFailure | None = None,
    ) -> None:
        self.digest = digest
        self.audits: Mapping[Digest, str] = {digest: audit_id} if audit_id else {}
        """Ids of the verdicts that let the bundles of this view through, for `ExecuteCall.audit`."""
        self.refusal = refusal
        """What each call ends with when the policy refused the bundle."""
        self._targets = dict(targets)

    def get(self, name: str, default: FunctionTarget | None = None) -> FunctionTarget | None:  # type: ignore[override]
        return self._targets.get(name, default)  # not the mixin's: this runs for every call

    def __getitem__(self, name: str) -> FunctionTarget:
        return self._targets[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)

    def with_budget(self, budget_ms: int) -> CodeView:
        """The same code, with another budget for every function."""
        return self._with(budget_ms=budget_ms)

    def only_checking(self) -> CodeView:
        """The same code, of which nothing is called: a call ends once its arguments were bound. That may be done again,
        and beside anything."""
        return self._with(check_only=True, idempotent=True, pure=False, exclusive=False, max_concurrency=None)

    def _with(self, **changes: Any) -> CodeView:
        targets = {name: msgspec.structs.replace(target, **changes) for name, target in self._targets.items()}
        return CodeView(self.digest, targets, audit_id=self.audits.get(self.digest, ""), refusal=self.refusal)


class _Held(msgspec.Struct, eq=False):
    module: str
    pins: int
    path: Path | None = None
    """None: it is being written."""


class BundleShelf:
    """The folders `bundles/<digest>/` of a worker, counted by who needs them."""

    def __init__(self, folder: Path, retire: Callable[[Digest], Awaitable[None]]) -> None:
        """`retire` replaces the executors that serve a bundle, and returns once they are gone."""
        self._folder = folder
        self._retire = retire
        self._held: dict[Digest, _Held] = {}
        self._busy: set[asyncio.Future[Any]] = set()
        """What writes to the folder, or removes from it."""
        self._left = 0

    def find(self, digest: Digest) -> tuple[Path, str] | None:
        """Folder and module of a bundle that somebody has pinned."""
        held = self._held.get(digest)
        return None if held is None or held.path is None else (held.path, held.module)

    def __len__(self) -> int:
        """Bundles in force: with one, no executor can be bound to another."""
        return len(self._held)

    async def put(self, bundle: Bundle) -> Path:
        """Write a bundle, outside the loop, and pin it. Raises UsageError when there is no room for it."""
        held = self._held.get(bundle.digest)
        if held is None:
            held = self._held[bundle.digest] = _Held(bundle.module, 0)
        held.pins += 1
        writing = asyncio.ensure_future(asyncio.to_thread(bundle.write_to, self._folder))
        self._keep_busy(writing)
        try:
            held.path = await asyncio.shield(writing)
        except BaseException as error:
            await asyncio.wait({writing})  # one who is cancelled leaves no half of it behind
            self.unpin(bundle.digest)
            if isinstance(error, OSError):
                raise UsageError(f"the bundle cannot be written to {self._folder}: {error.strerror}") from error
            raise
        return held.path

    def pin(self, digest: Digest) -> None:
        """Keep a bundle that is pinned already."""
        self._held[digest].pins += 1

    def unpin(self, digest: Digest) -> None:
        """Give back one pin. With the last one the bundle is out of force at once."""
        held = self._held[digest]
        held.pins -= 1
        if held.pins == 0:
            del self._held[digest]
            self._keep_busy(asyncio.ensure_future(self._leave(digest)))

    def _keep_busy(self, work: asyncio.Future[Any]) -> None:
        self._busy.add(work)
        work.add_done_callback(self._busy.discard)

    async def _leave(self, digest: Digest) -> None:
        await self._retire(digest)
        path = self._folder / digest
        if digest in self._held or not path.exists():
            return  # the same version came back
        self._left += 1
        gone = path.with_name(f".gone-{self._left}")
        path.rename(gone)  # in one step with the look above: a writer finds the folder, or finds none
        await asyncio.to_thread(remove_tree, gone)

    async def wait_idle(self) -> None:
        """Until no bundle is being written, or on its way out."""
        while self._busy:
            await asyncio.wait(set(self._busy))


class Standing(msgspec.Struct, frozen=True):
    """One attached executor that takes calls, as far as its placement is concerned."""

    executor_id: ExecutorId
    placement: Placement | None
    """None: bound to nothing yet."""
    load: int
    """Attempts that it holds."""


def choose_replaced(
    standings: Sequence[Standing],
    unmet_ms: Mapping[Placement, int],
    coming: int,
    stranded: Set[Placement] = frozenset(),
) -> list[ExecutorId]:
    """Which executors of a pool give way, one for each placement whose ready calls no executor may take.

    `unmet_ms` says how long such calls have waited, by placement. `coming` executors are starting and bound to nothing.
    A placement without any executor is served first: by an idle executor that its own placement does not need, by a
    busy one whose placement has nothing ready, or after `PATIENCE_MS` by the least loaded one of the placement that has
    the most. A placement that has executors, but too few, gets idle ones only, and after the same time. For subcalls
    that are `stranded` no busy one is drained, which might wait for them. Source: X92, X17.
    """
    serving: Counter[Placement | None] = Counter(standing.placement for standing in standings)
    free = coming + serving[None]
    chosen: list[ExecutorId] = []
    for wanted in sorted(unmet_ms, key=lambda placement: (serving[placement] > 0, -unmet_ms[placement], placement)):
        if free > 0:
            free -= 1
            continue
        is_patient = unmet_ms[wanted] < PATIENCE_MS
        starves = serving[wanted] == 0
        if is_patient and not starves:
            continue
        others = [
            standing
            for standing in standings
            if standing.placement not in (None, wanted) and standing.executor_id not in chosen
        ]
        unneeded = [standing for standing in others if standing.placement not in unmet_ms]
        candidates = [standing for standing in unneeded if standing.load == 0]
        if not candidates and starves and wanted not in stranded:
            candidates = unneeded or ([] if is_patient else others)
        if not candidates and starves and wanted not in stranded:
            break  # nor is there one for those that have waited less
        if candidates:
            best = min(
                candidates, key=lambda standing: (-serving[standing.placement], standing.load, standing.executor_id)
            )
            serving[best.placement] -= 1
            chosen.append(best.executor_id)
    return chosen
