"""A publish to many: one permit for each turn, taken one after the other."""

from __future__ import annotations

import pytest

from callyard.host.errors import HostErrorKind
from callyard.transport.port import RecordKind, SourceKind
from tests.unit.host.pump.kit import names, world

SPOTS = ["s1", "s2", "s3", "s4", "s5"]


@pytest.mark.requirement("R7")
def test_each_target_is_a_job() -> None:
    with world() as w:
        w.ingress.subscribers = SPOTS[:3]
        (source,) = w.add("a")
        source.publish("news", b"{}")
        w.settle()
        assert w.in_use == (0, 3)
        assert [(record.kind, record.target, record.payload) for record in w.ingress.committed] == [
            (RecordKind.PUBLISH, spot, b"{}") for spot in SPOTS[:3]
        ]
        assert w.transport.counts["take"] == 1


@pytest.mark.requirement("R7")
def test_a_publish_for_nobody_is_no_job() -> None:
    with world(jobs_max=1) as w:
        (source,) = w.add("a")
        source.publish("news")
        source.one_way("spot")
        w.settle()
        assert [record.target for record in w.ingress.committed] == ["spot"]
        assert w.in_use == (0, 1)


@pytest.mark.requirement("R29")
def test_a_publish_never_queues_more_than_there_are_permits() -> None:
    with world(jobs_max=2) as w:
        w.ingress.subscribers = SPOTS
        (source,) = w.add("a")
        source.publish("news")
        source.one_way("next")
        w.settle()
        while w.ingress.queued:
            assert w.jobs.in_use <= 2
            assert len(w.ingress.queued) <= 2
            w.begin()
            w.settle()
        assert [record.target for record in w.ingress.begun] == [*SPOTS, "next"]
        assert w.in_use == (0, 0)


@pytest.mark.requirement("R29", "R49")
def test_a_publish_to_more_targets_than_permits_ends() -> None:
    with world(jobs_max=1) as w:
        w.ingress.subscribers = [f"s{n}" for n in range(500)]
        a, b = w.add("a", "b")
        a.publish("news")
        b.publish("news")
        w.drain()
        assert len(w.ingress.begun) == 1_000
        # Each waits for its next target at its source's place in the line.
        assert set(names(w.ingress.begun[0::2])) == {"a"}
        assert set(names(w.ingress.begun[1::2])) == {"b"}


@pytest.mark.requirement("R29", "R52")
def test_a_publish_to_very_many_is_cut_as_any_batch() -> None:
    with world(jobs_max=100_000) as w:
        w.ingress.subscribers = [f"s{n}" for n in range(200)]
        (source,) = w.add("a")
        source.publish("news")
        w.turn()
        assert len(w.ingress.committed) == 64
        assert w.pump.statistics().publishing == 1
        w.settle()
        assert len(w.ingress.committed) == 200
        assert w.pump.statistics().publishing == 0


@pytest.mark.requirement("R87")
def test_a_full_target_is_passed_over() -> None:
    with world(jobs_max=2) as w:
        w.ingress.subscribers = SPOTS
        w.ingress.verdict = lambda record: HostErrorKind.CAPACITY_EXCEEDED if record.target == "s2" else None
        (source,) = w.add("a")
        source.publish("news")
        w.drain()
        assert [record.target for record in w.ingress.begun] == ["s1", "s3", "s4", "s5"]
        assert [(record.target, kind) for record, kind in w.ingress.refusals] == [
            ("s2", HostErrorKind.CAPACITY_EXCEEDED)
        ]


@pytest.mark.parametrize("how", ["source", "stop"])
def test_a_publish_that_has_begun_reaches_all(how: str) -> None:
    with world(jobs_max=1) as w:
        w.ingress.subscribers = SPOTS
        (source,) = w.add("a")
        source.publish("news")
        source.one_way("next")
        w.settle()
        if how == "source":
            source.close()
        else:
            w.pump.stop_receiving()
        w.pump.cancel_wait(source.id)
        w.drain()
        assert [record.target for record in w.ingress.begun] == SPOTS
        assert w.in_use == (0, 0)
        assert w.jobs.status().waiters == 0


def test_a_source_that_comes_back_does_not_mix_with_its_old_publish() -> None:
    with world(jobs_max=1) as w:
        w.ingress.subscribers = SPOTS
        (old,) = w.add("a")
        old.publish("news")
        w.settle()
        old.close()
        (new,) = w.add("a")
        new.one_way("new")
        w.drain()
        assert sorted(record.target for record in w.ingress.begun) == sorted([*SPOTS, "new"])
        assert w.pump.statistics().sources == 1


@pytest.mark.parametrize("how", ["pump", "jobs"])
def test_what_a_publish_has_left_at_the_end_is_seen(how: str) -> None:
    with world(jobs_max=1) as w:
        w.ingress.subscribers = SPOTS
        (source,) = w.add("a")
        source.publish("news")
        w.settle()
        (w.pump if how == "pump" else w.jobs).close()
        w.settle()
        assert [(record.target, kind) for record, kind in w.ingress.refusals] == [
            (spot, HostErrorKind.SHUTTING_DOWN) for spot in SPOTS[1:]
        ]
        w.begin()
        w.settle()
        assert w.in_use == (0, 0)
        assert len(w.ingress.begun) == 1


@pytest.mark.requirement("R23")
def test_a_completion_does_not_wait_for_the_targets_of_a_publish_before_it() -> None:
    with world(jobs_max=1) as w:
        w.ingress.subscribers = SPOTS
        (source,) = w.add("a", kind=SourceKind.CLIENT_SERVER)
        source.publish("news")
        source.complete(11)
        source.one_way("next")
        w.settle()
        assert [completion.operation_id for completion in w.ingress.completed] == [11]
        source.signal()
        w.drain()
        assert [record.target for record in w.ingress.begun] == [*SPOTS, "next"]
