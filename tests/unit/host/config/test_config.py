"""Settings: two profiles that are two types, limits from profile and processors, timeouts."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest

from callyard.host.config import (
    JOBS_PER_PROCESSOR,
    CoreHwmProfile,
    HostConfig,
    JobProfile,
    JobQueueConfig,
    ProcessorFigures,
    SendFamily,
    whole_timeout_ms,
)
from callyard.host.jobs import JOBS_MAX
from callyard.transport.port import CoreHwmOptions

EIGHT = ProcessorFigures(logical=8)


@pytest.mark.requirement("R10")
def test_both_profiles_are_balanced_by_default_and_set_apart() -> None:
    config = HostConfig()
    assert (config.jobs.profile, config.core_hwm.profile) == (JobProfile.BALANCED, CoreHwmProfile.BALANCED)
    config = HostConfig(jobs=JobQueueConfig(profile=JobProfile.COMPACT))
    assert (config.jobs.profile, config.core_hwm.profile) == (JobProfile.COMPACT, CoreHwmProfile.BALANCED)
    config = HostConfig(core_hwm=CoreHwmOptions(profile=CoreHwmProfile.THROUGHPUT))
    assert (config.jobs.profile, config.core_hwm.profile) == (JobProfile.BALANCED, CoreHwmProfile.THROUGHPUT)


@pytest.mark.requirement("R10")
def test_one_profile_is_never_taken_for_the_other() -> None:
    job: Any = JobProfile.BALANCED
    core: Any = CoreHwmProfile.BALANCED
    assert job != core
    assert [profile.value for profile in JobProfile] == [profile.value for profile in CoreHwmProfile]
    for wrong in (core, "balanced"):
        with pytest.raises(ValueError, match=r"must be one of JobProfile\.COMPACT, .*, got"):
            JobQueueConfig(profile=wrong)
    for wrong in (job, "balanced"):
        with pytest.raises(ValueError, match="must be a CoreHwmProfile, got"):
            CoreHwmOptions(profile=wrong)
    swapped: Any = {"jobs": CoreHwmOptions()}
    with pytest.raises(ValueError, match="jobs must be of class JobQueueConfig"):
        HostConfig(**swapped)


@pytest.mark.requirement("R11")
@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({}, 1),
        ({"logical": 8}, 8),
        ({"logical": 8, "affinity": 3}, 3),
        ({"logical": 8, "affinity": 0}, 8),
        ({"logical": 8, "affinity": -2}, 8),
        ({"logical": 8, "quota_us": 250_000, "period_us": 100_000}, 2),
        ({"logical": 8, "quota_us": 50_000, "period_us": 100_000}, 1),
        ({"logical": 8, "quota_us": -1, "period_us": 100_000}, 8),
        ({"logical": 8, "quota_us": 200_000, "period_us": 0}, 8),
        ({"logical": 8, "quota_us": 200_000}, 8),
        ({"logical": 8, "affinity": 6, "quota_us": 500_000, "period_us": 100_000, "executors_max": 4}, 4),
        ({"executors_max": 16}, 16),
        ({"logical": 0, "affinity": 0, "executors_max": 0}, 1),
    ],
)
def test_effective_processors(figures: dict[str, int], expected: int) -> None:
    assert ProcessorFigures(**figures).effective == expected


@pytest.mark.requirement("R11")
def test_jobs_per_processor() -> None:
    made = {profile.value: JobQueueConfig(profile=profile).resolve(EIGHT).jobs_max for profile in JOBS_PER_PROCESSOR}
    assert made == {"compact": 256, "low_latency": 512, "balanced": 1_024, "throughput": 2_048}


@pytest.mark.requirement("R11")
@pytest.mark.parametrize("jobs_max", [1, 1_000, JOBS_MAX])
@pytest.mark.parametrize("profile", JobProfile)
def test_a_maximum_replaces_what_the_profile_comes_to(jobs_max: int, profile: JobProfile) -> None:
    limits = JobQueueConfig(profile=profile, jobs_max=jobs_max).resolve(EIGHT)
    assert (limits.jobs_max, limits.processor_count) == (jobs_max, 8)
    # ... also where the profile alone would come to too many.
    assert JobQueueConfig(jobs_max=7).resolve(ProcessorFigures(logical=JOBS_MAX)).jobs_max == 7


@pytest.mark.requirement("R11")
@pytest.mark.parametrize("jobs_max", [0, -1, JOBS_MAX + 1, 1.0, True, "8", math.inf])
def test_a_wrong_maximum_is_refused(jobs_max: Any) -> None:
    with pytest.raises(ValueError, match="jobs_max must be a whole number from 1 to 2147483647"):
        JobQueueConfig(jobs_max=jobs_max)


@pytest.mark.requirement("R11")
def test_more_jobs_than_can_be_counted_are_refused() -> None:
    most = JOBS_MAX // 128
    assert JobQueueConfig().resolve(ProcessorFigures(logical=most)).jobs_max == most * 128
    with pytest.raises(ValueError, match="set jobs_max"):
        JobQueueConfig().resolve(ProcessorFigures(logical=most + 1))


@pytest.mark.requirement("R61")
def test_limits_hold_the_thresholds() -> None:
    limits = JobQueueConfig(jobs_max=10).resolve(EIGHT)
    assert (limits.pause_permits, limits.resume_permits) == (8, 6)


@pytest.mark.requirement("R62")
@pytest.mark.parametrize(
    ("pause", "resume"), [(0, 0), (101, 60), (80, -1), (80, 100), (60, 60), (60, 80), (50.0, 10), (None, 10)]
)
def test_thresholds_are_checked_when_the_settings_are_built(pause: Any, resume: Any) -> None:
    assert (JobQueueConfig().pause_percent, JobQueueConfig().resume_percent) == (80, 60)
    with pytest.raises(ValueError, match="_percent must be"):
        JobQueueConfig(pause_percent=pause, resume_percent=resume)


@pytest.mark.requirement("R12")
def test_byte_figures_go_on_as_they_came() -> None:
    """The very record, and nothing in it or the limits was computed of it."""
    options = CoreHwmOptions(
        memory_limit_bytes=123_456_789, budget_bytes=987_654_321, profile=CoreHwmProfile.LOW_LATENCY
    )
    config = HostConfig(core_hwm=options)
    before = config.resolve(EIGHT)
    assert config.core_hwm is options
    assert (options.memory_limit_bytes, options.budget_bytes) == (123_456_789, 987_654_321)
    assert HostConfig().resolve(EIGHT) == before
    assert {field.name for field in fields(CoreHwmOptions)} == {"memory_limit_bytes", "budget_bytes", "profile"}
    with pytest.raises(FrozenInstanceError):
        options.budget_bytes = 1  # type: ignore[misc]


@pytest.mark.requirement("R12")
@pytest.mark.parametrize("name", ["memory_limit_bytes", "budget_bytes"])
def test_byte_figures_above_the_memory_are_refused_before_anything_is_bound(name: str) -> None:
    figures: dict[str, Any] = {name: 1_000}
    config = HostConfig(core_hwm=CoreHwmOptions(**figures))
    config.resolve(EIGHT)
    config.resolve(EIGHT, memory_hard_limit_bytes=1_000)
    with pytest.raises(ValueError, match=f"{name}=1000 is above the hard limit of 999 bytes"):
        config.resolve(EIGHT, memory_hard_limit_bytes=999)
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match=f"{name} must be a positive whole number"):
            CoreHwmOptions(**{name: wrong})  # type: ignore[arg-type]


@pytest.mark.requirement("R1")
def test_jobs_and_bytes_share_no_setting() -> None:
    jobs = {field.name for field in fields(JobQueueConfig)} - {"profile"}
    core = {field.name for field in fields(CoreHwmOptions)} - {"profile"}
    assert not jobs & core
    assert all(name.endswith("_bytes") for name in core)
    assert not any("byte" in name for name in jobs)
    plain = HostConfig()
    for options in (
        CoreHwmOptions(memory_limit_bytes=1),
        CoreHwmOptions(budget_bytes=1),
        CoreHwmOptions(profile=CoreHwmProfile.COMPACT),
    ):
        assert replace(plain, core_hwm=options).resolve(EIGHT) == plain.resolve(EIGHT)
    for changed in (
        JobQueueConfig(jobs_max=1),
        JobQueueConfig(profile=JobProfile.COMPACT),
        JobQueueConfig(pause_percent=99, resume_percent=1),
    ):
        assert replace(plain, jobs=changed).core_hwm == plain.core_hwm


@pytest.mark.requirement("R118")
@pytest.mark.parametrize(
    ("given", "whole"),
    [
        *[(1, 1), (1_000, 1_000), (0.001, 1), (5e-324, 1), (1.0, 1), (1.2, 2), (999.5, 1_000)],
        *[(2**31 - 1, 2**31 - 1), (2**31 - 1.5, 2**31 - 1)],
    ],
)
def test_a_timeout_is_rounded_up_to_a_millisecond(given: float, whole: int) -> None:
    assert whole_timeout_ms("send_timeout_ms", given) == whole
    assert type(whole_timeout_ms("send_timeout_ms", given)) is int


@pytest.mark.requirement("R118")
@pytest.mark.parametrize("wrong", [0, 0.0, -0.0, -1, -0.5, math.inf, -math.inf, math.nan, 2**31, 2**31 - 0.5])
@pytest.mark.parametrize("name", ["send_timeout_ms", "request_timeout_ms", "shutdown_timeout_ms", "family"])
def test_a_wrong_timeout_is_refused_at_the_start(wrong: float, name: str) -> None:
    settings: dict[str, Any] = {name: wrong} if name != "family" else {"send_timeouts_ms": {SendFamily.STREAM: wrong}}
    with pytest.raises(ValueError, match="must be a number of milliseconds above 0 and up to 2147483647"):
        HostConfig(**settings)


@pytest.mark.parametrize("wrong", [None, "1", True, 1j])
def test_a_timeout_that_is_no_number_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="must be a number of milliseconds"):
        HostConfig(send_timeout_ms=wrong)


@pytest.mark.requirement("R118")
def test_families_have_timeouts_of_their_own_and_places_of_their_own() -> None:
    config = HostConfig()
    assert [family.value for family in SendFamily] == [
        *("mesh", "channel", "spot", "client_server"),
        *("multicast", "fanout", "bound_session", "stream"),
    ]
    assert {config.send_timeout_of(family) for family in SendFamily} == {1_000}
    assert config.outbound_waiter_slots == 256
    config = HostConfig(send_timeout_ms=1.5, send_timeouts_ms={SendFamily.STREAM: 250})
    assert config.send_timeout_of(SendFamily.STREAM) == 250
    assert config.send_timeout_of(SendFamily.SPOT) == 2


@pytest.mark.requirement("R119")
def test_bounds_of_requests() -> None:
    config = HostConfig()
    assert (config.request_timeout_ms, config.requests_max, config.shutdown_timeout_ms) == (5_000, 4_096, 30_000)


@pytest.mark.parametrize("name", ["outbound_waiter_slots", "requests_max"])
@pytest.mark.parametrize("wrong", [0, -1, 1.0, True, None, 1 << 30])
def test_wrong_bounds_are_refused(name: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a whole number"):
        HostConfig(**{name: wrong})


def test_what_was_handed_in_can_change_without_the_settings() -> None:
    timeouts: dict[SendFamily, float] = {SendFamily.MESH: 5}
    config = HostConfig(send_timeouts_ms=timeouts)
    timeouts[SendFamily.MESH] = 99
    assert config.send_timeout_of(SendFamily.MESH) == 5
    wrong: Any = {"mesh!": 5}
    with pytest.raises(ValueError, match=r"by SendFamily\.MESH, .*, got 'mesh!'"):
        HostConfig(send_timeouts_ms=wrong)
