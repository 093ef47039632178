"""Faults put into the pump one at a time, each found by the tests beside this one.

The first ones are of the kind that such hosts really had: a record taken before there is room for it, work lost between
attach and look, completions held up by application records. Source: job-queue §9.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from callyard.host.errors import HostErrorKind
from callyard.host.jobs import Permit
from callyard.host.pump import Pump, _Entry, _FanOut, _Rotation
from callyard.testing.scripted_transport import ScriptedTransport
from callyard.transport.port import HeadKind, Record, SourceId, SourceKind
from tests.unit.host.pump import kit, test_ends, test_permits, test_publish, test_rotations, test_saturation


class ReceivesFirst(Pump):
    """Takes a record, then waits for its permit."""

    def _look_at(self, entry: _Entry) -> None:
        if not entry.closed and self._transport.head_kind(entry.source) is HeadKind.ORDINARY:
            self._transport.take(entry.source)
        super()._look_at(entry)


class WaitsAtEverySignal(Pump):
    def _on_readable(self, source: SourceId) -> None:
        self._jobs.wait(object(), lambda permit: permit.release())
        super()._on_readable(source)


class GoesToTheHead(Pump):
    """A source that was cut is served again before its neighbours."""

    def _serve(self, entry: _Entry, rotation: _Rotation) -> None:
        super()._serve(entry, rotation)
        if self._granted.pop(entry, 0) is None:
            self._granted = {entry: None, **self._granted}


class ForgetsTheCursor(Pump):
    """A source that closes makes the next rotation begin anew."""

    def _on_closed(self, source: SourceId) -> None:
        super()._on_closed(source)
        self._granted = dict.fromkeys(sorted(self._granted, key=lambda entry: entry.source))


class KeepsPermitOfControl(Pump):
    def _receive(self, entry: _Entry, record: Record, permit: Permit) -> bool:
        return super()._receive(entry, record, permit) or record.kind == "control"


class KeepsPermitOfRefused(Pump):
    def _commit(self, record: Record, permit: Permit) -> bool:
        return super()._commit(record, permit) or True


class WaitsForCompletions(Pump):
    """A completion needs a permit as all else does."""

    def _look_at(self, entry: _Entry) -> None:
        if not entry.closed and self._transport.head_kind(entry.source) is not HeadKind.NONE:
            self._line_up(entry)


class MissesCompletionsInLine(Pump):
    """A signal of a source that waits is a no-op even when a completion came by its own line."""

    def _on_readable(self, source: SourceId) -> None:
        if self._entries.get(source) not in self._line:
            super()._on_readable(source)


class ForgetsLeftovers(Pump):
    def _serve(self, entry: _Entry, rotation: _Rotation) -> None:
        super()._serve(entry, rotation)
        if rotation.is_cut:
            self._leave(entry)


class StartsBlind(Pump):
    """What was readable before the attach is never seen."""

    def start(self) -> None:
        transport = self._transport
        assert isinstance(transport, ScriptedTransport)
        present, transport._sources = transport._sources, {}
        super().start()
        transport._sources = present


class NeverYields(Pump):
    def _step(self) -> None:
        super()._step()
        while self._granted and not self._closed:
            self._rotate(self._granted, self._serve)


class Spins(Pump):
    def _step(self) -> None:
        super()._step()
        if self._line:
            self._wake()


class Polls(Pump):
    def _step(self) -> None:
        super()._step()
        if self._line and self._loop is not None:
            self._loop.call_later(0.01, self._wake)


class DropsRefusedSilently(Pump):
    def _refuse(self, record: Record, kind: HostErrorKind) -> None:
        self._refused += 1


class CopiesChildren(Pump):
    """A publish is queued for all its targets for the permit of the first."""

    def _publish_next(self, entry: _Entry, fan_out: _FanOut, permit: Permit) -> bool:
        committed = super()._publish_next(entry, fan_out, permit)
        while entry.fan_out is not None:
            super()._publish_next(entry, fan_out, Permit(self._jobs))
        return committed


class ForgetsClosedPublish(Pump):
    def _on_closed(self, source: SourceId) -> None:
        entry = self._entries.get(source)
        if entry is not None:
            entry.fan_out = None
        super()._on_closed(source)


class WaitsForClosed(Pump):
    """The waiter of a lost source stays in the line."""

    def _on_closed(self, source: SourceId) -> None:
        entry = self._entries.pop(source, None)
        if entry is not None:
            entry.closed = True
        self._ingress.lost(source)


class RunsInTheWakersContext(Pump):
    def _wake(self) -> None:
        if self._wake_handle is None and not self._closed:
            assert self._loop is not None
            self._wake_handle = self._loop.call_soon(self._step)


class RunsUnmarked(Pump):
    def start(self) -> None:
        super().start()
        self._receive_context = self._context.copy()


class HandlesInTheCallback(Pump):
    """The readable signal does the work itself."""

    def _on_readable(self, source: SourceId) -> None:
        super()._on_readable(source)
        self._step()


class CountsNoItems(Pump):
    def _rotate(self, line: dict[_Entry, None], serve: Callable[[_Entry, _Rotation], None]) -> None:
        real = _Rotation.add

        def add(rotation: _Rotation, payload: bytes) -> None:
            real(rotation, payload)
            rotation._items_left = 2

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_Rotation, "add", add)
            super()._rotate(line, serve)


FOUND_BY: dict[type[Pump], Callable[[], Any]] = {
    ReceivesFirst: test_permits.test_without_a_permit_nothing_is_received,
    WaitsAtEverySignal: partial(test_permits.test_a_source_has_one_waiter, 100),
    GoesToTheHead: test_rotations.test_two_floods_with_permits_enough_take_turns_by_whole_batches,
    ForgetsTheCursor: test_rotations.test_a_source_that_closes_at_the_cursor_does_not_reset_it,
    KeepsPermitOfControl: partial(test_permits.test_what_reaches_no_turn_gives_its_permit_back, "control"),
    KeepsPermitOfRefused: partial(test_permits.test_what_reaches_no_turn_gives_its_permit_back, "refused"),
    WaitsForCompletions: partial(test_permits.test_completion_at_the_head_needs_no_permit, SourceKind.CLIENT_SERVER),
    MissesCompletionsInLine: test_permits.test_completion_of_a_mesh_peer_passes_its_waiting_records,
    ForgetsLeftovers: test_rotations.test_leftover_work_goes_on_without_a_new_arrival,
    StartsBlind: test_ends.test_what_came_before_the_start_is_seen,
    NeverYields: test_rotations.test_other_work_of_the_loop_runs_between_two_rotations,
    Spins: test_saturation.test_a_saturated_pump_is_not_scheduled,
    Polls: test_permits.test_without_a_permit_nothing_is_received,
    DropsRefusedSilently: test_ends.test_saturation_and_a_full_owner_look_different,
    CopiesChildren: test_publish.test_a_publish_never_queues_more_than_there_are_permits,
    ForgetsClosedPublish: partial(test_publish.test_a_publish_that_has_begun_reaches_all, "source"),
    WaitsForClosed: partial(test_ends.test_a_lost_source_ends_its_waiter_without_a_permit, SourceKind.MESH),
    RunsInTheWakersContext: test_ends.test_a_rotation_never_runs_in_the_context_of_who_woke_the_pump,
    RunsUnmarked: test_ends.test_the_ingress_runs_as_a_receive_callback,
    HandlesInTheCallback: test_permits.test_a_readable_signal_takes_note_and_returns,
    CountsNoItems: test_rotations.test_items_cut_a_rotation,
}


@pytest.mark.parametrize("fault", FOUND_BY, ids=lambda fault: fault.__name__)
def test_fault_is_found(fault: type[Pump]) -> None:
    check = FOUND_BY[fault]
    check()
    token = kit.PUMP_TYPE.set(fault)
    try:
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            check()
    finally:
        kit.PUMP_TYPE.reset(token)
