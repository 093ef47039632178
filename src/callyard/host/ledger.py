"""What one owner has accepted and not yet finished: items and bytes, in two lanes that never lend to one another.

One ledger per owner, one cap per lane over both columns: *mailbox*, from acceptance to claim, and *execution*, from
claim to the handler's terminal. Only the total and the execution column are kept; the mailbox is what is left. So a
claim changes one column and never the total, and cannot be refused: there is nothing left to ask. Source: job-queue §0,
§2.1, R45, R94-R98, R117.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class Lane(IntEnum):
    APPLICATION = 0
    LIFECYCLE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerLimits:
    """Of each owner apart."""

    application_items_max: int = 1_024
    application_bytes_max: int = 64 * 1_024 * 1_024
    lifecycle_items_max: int = 128
    lifecycle_bytes_max: int = 4 * 1_024 * 1_024
    fixed_work_bytes: int = 256
    """What an item costs beside its payload."""
    lifecycle_burst_max: int = 8
    """So many lifecycle turns in a row, then one application turn is owed."""
    owner_budget_ms: int = 10
    """How long an owner keeps its place from turn to turn while others are ready. Looked at between turns only."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value, least = getattr(self, name), 0 if name == "fixed_work_bytes" else 1
            if type(value) is not int or value < least:
                raise ValueError(f"{name}: expected a whole number, {least} or more, got {value!r}")
        for name in ("application_bytes_max", "lifecycle_bytes_max"):
            if getattr(self, name) < self.fixed_work_bytes:
                raise ValueError(
                    f"{name}: expected {self.fixed_work_bytes} or more, got {getattr(self, name)}: every item costs "
                    "fixed_work_bytes, so none would ever fit"
                )


class Column(NamedTuple):
    items: int
    bytes: int


class LaneLedger:
    """One lane's two columns. A charge is payload plus fixed cost, in bytes, as `OwnerLedger.charge` gives it."""

    __slots__ = ("bytes", "bytes_max", "execution_bytes", "execution_items", "items", "items_max")

    def __init__(self, items_max: int, bytes_max: int) -> None:
        self.items_max = items_max
        self.bytes_max = bytes_max
        self.items = 0
        self.bytes = 0
        self.execution_items = 0
        self.execution_bytes = 0

    @property
    def mailbox(self) -> Column:
        return Column(self.items - self.execution_items, self.bytes - self.execution_bytes)

    @property
    def execution(self) -> Column:
        return Column(self.execution_items, self.execution_bytes)

    def try_reserve(self, charge: int) -> bool:
        """Into the mailbox column, if both the count and the bytes have room; else nothing changes."""
        if self.items >= self.items_max or self.bytes + charge > self.bytes_max:
            return False
        self.items += 1
        self.bytes += charge
        return True

    def claim(self, charge: int) -> None:
        """Mailbox to execution. Never refused, and the total does not move (R95, R96)."""
        self.execution_items += 1
        self.execution_bytes += charge

    def give_back(self, charge: int, *, claimed: bool) -> None:
        """The end of a charge, once: at the handler's terminal, or (`claimed=False`) before it was claimed."""
        if claimed:
            self.execution_items -= 1
            self.execution_bytes -= charge
        self.items -= 1
        self.bytes -= charge

    def check_invariants(self, fixed_work_bytes: int) -> None:
        """`one_charge`, as far as the ledger alone can see it."""
        assert 0 <= self.execution_items <= self.items <= self.items_max, f"one_charge: {self.mailbox} {self.execution}"
        assert 0 <= self.execution_bytes <= self.bytes <= self.bytes_max, f"one_charge: {self.mailbox} {self.execution}"
        for column in (self.mailbox, self.execution):
            assert column.bytes >= column.items * fixed_work_bytes, f"one_charge: {column} costs too little"


class OwnerLedger:
    __slots__ = ("lanes", "limits")

    def __init__(self, limits: OwnerLimits, lanes: tuple[LaneLedger, LaneLedger] | None = None) -> None:
        """`lanes`, by `Lane`: an owner's own, which hold the work itself, too."""
        self.limits = limits
        self.lanes = lanes or (
            LaneLedger(limits.application_items_max, limits.application_bytes_max),
            LaneLedger(limits.lifecycle_items_max, limits.lifecycle_bytes_max),
        )

    @property
    def application(self) -> LaneLedger:
        return self.lanes[Lane.APPLICATION]

    @property
    def lifecycle(self) -> LaneLedger:
        return self.lanes[Lane.LIFECYCLE]

    def charge(self, payload_bytes: int) -> int:
        return payload_bytes + self.limits.fixed_work_bytes

    def fits(self, lane: Lane, charge: int) -> bool:
        """Whether `try_reserve` would take it now."""
        entry = self.lanes[lane]
        return entry.items < entry.items_max and entry.bytes + charge <= entry.bytes_max

    @property
    def is_empty(self) -> bool:
        return not any(lane.items for lane in self.lanes)

    def check_invariants(self) -> None:
        for lane in self.lanes:
            lane.check_invariants(self.limits.fixed_work_bytes)
