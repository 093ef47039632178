"""A simulation that cannot fail shows nothing: each fault is planted, and the host's simulation finds it.

Of the faults that projects like this one really had, those of a wire are for the transport's tests: a resume at a full
byte queue that loses the wake-up, a pause that splits a message of several parts, a flow frame on the wrong lane or
read as an empty reply, readiness to write that does not show a pause, an epoch on the wire that wraps, an oversize
message stuck on old credit.
"""

from __future__ import annotations

import pytest

from callyard.testing import SimulationFailed, run_world
from callyard.testing.host_world import HostWorld
from tests.property import flow_faults, jobs_faults, outbound_faults
from tests.simulation import host_faults
from tests.simulation.host_faults import Plant, part
from tests.unit.host.pump import test_faults as pump_faults

SEEDS = 100

RECORDED: dict[Plant, str] = {
    part("Owners", host_faults.RunsInPlaceWhenFull): "nothing_late",
    part("Replies", host_faults.ThrowsAReplyAway): "no answer",
    part("RequestTable", outbound_faults.KeepsThePlaceOfAWithdrawnRequest): "",
    host_faults.a_cancellation_is_told_by_its_text: "nothing_late",
    part("FlowTargets", host_faults.LetsAnOldStateWin): "latest_state",
    part("Pump", pump_faults.StartsBlind): "oldest_first",
    part("JobQueue", host_faults.NumbersWrap): "hysteresis",
    part("JobQueue", jobs_faults.LosesWakeups): "oldest_first",
    part("FlowTargets", flow_faults.AppliesAfterTheClose): "",
    part("FlowTargets", flow_faults.LeavesWithoutItsSetter): "latest_state",
    part("FlowTargets", flow_faults.LosesWhatComesDuringARegistration): "latest_state",
    part("Moving", host_faults.HoldsForASessionWithoutAPermit): "NoneType",
    part("Pump", pump_faults.WaitsForCompletions): "completion",
    part("Pump", host_faults.RejectsAtSaturation): "permits_bounded",
    part("Owners", host_faults.OwnersWithoutOptions): "one_charge",
    part("Waiters", host_faults.WaitersWithoutOptions): "first_terminal",
    part("RequestTable", host_faults.RequestsWithoutOptions): "first_terminal",
    part("Outbound", host_faults.OutboundWithoutOptions): "first_terminal",
}
OF_INVARIANTS: dict[Plant, str] = {
    host_faults.permits_come_back_after_the_handler: "",
    host_faults.a_dropped_record_keeps_its_permit: "permit_once",
    part("JobQueue", jobs_faults.TakesPermitsBackTwice): "permit_once",
    part("JobQueue", jobs_faults.CountsAQueuedPermitAsReserved): "permit_once",
    part("JobQueue", jobs_faults.ServesTheNewestFirst): "oldest_first",
    part("JobQueue", jobs_faults.LetsNewcomersIn): "oldest_first",
    part("JobQueue", jobs_faults.TellsWhoWasCancelled): "",
    part("JobQueue", jobs_faults.ResumesBeforeHandingOver): "hysteresis",
    part("JobQueue", jobs_faults.HasNoGap): "hysteresis",
    part("JobQueue", jobs_faults.RepeatsTheState): "hysteresis",
    part("JobQueue", jobs_faults.ForgetsThePauseAtAReset): "hysteresis",
    part("FlowTargets", flow_faults.TellsTheSameStateAgain): "latest_state",
    part("FlowTargets", flow_faults.TakesAFailureForNoChange): "latest_state",
    host_faults.a_refused_item_has_a_number: "all_or_nothing",
    host_faults.count_and_bytes_are_reserved_apart: "all_or_nothing",
    host_faults.a_claim_is_a_second_charge: "one_charge",
    host_faults.a_charge_ends_at_the_claim: "one_charge",
    host_faults.two_are_inside_a_gate: "",
    host_faults.who_yields_comes_in_again_unasked: "one_turn",
    host_faults.the_debt_between_lanes_is_forgotten: "",
    host_faults.application_work_goes_first: "",
    host_faults.a_wake_is_lost: "ready_once",
    host_faults.an_owner_with_work_is_not_ready_again: "ready_once",
    host_faults.a_permit_may_be_waited_for_under_a_gate: "no_wait_under_gate",
    host_faults.a_turn_may_wait_for_itself: "one_turn",
    host_faults.room_is_told_to_nobody: "",
    host_faults.an_owner_takes_no_notice_of_its_seal: "",
    host_faults.a_handler_that_raises_keeps_its_gate: "",
    part("Waiters", outbound_faults.ServesTheNewestFirst): "",
    part("Waiters", outbound_faults.LetsNewcomersIn): "oldest_first",
    part("Waiters", outbound_faults.AdmitsThePast): "nothing_late",
    part("Moving", outbound_faults.LetsNewcomersPastTheHold): "hold_in_order",
    part("Moving", outbound_faults.PutsTheBacklogBehind): "hold_in_order",
    part("Moving", outbound_faults.HoldsWithItsPermit): "permit_once",
    part("Pump", pump_faults.ReceivesFirst): "permits_bounded",
    part("Pump", pump_faults.KeepsPermitOfControl): "permit_once",
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:coroutine:RuntimeWarning")
@pytest.mark.parametrize("plant", [*RECORDED, *OF_INVARIANTS], ids=lambda plant: plant.__name__)
def test_what_is_broken_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    said = (RECORDED | OF_INVARIANTS)[plant]
    heard: list[str] = []
    for seed in range(SEEDS):
        failure = fails(seed)
        if failure is not None:
            heard.append(failure.partition("\n")[0])
            if said in heard[-1]:
                return
    pytest.fail(f"not found in {SEEDS} seeds; what was: {heard[:5]}")


def fails(seed: int) -> str | None:
    try:
        run_world(HostWorld, seed, steps_max=5_000, quiet_ms_max=600_000)
    except SimulationFailed as failure:
        return str(failure)
    return None
