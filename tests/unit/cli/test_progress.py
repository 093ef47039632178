"""What is said while a run goes on, from counts and times handed in."""

from __future__ import annotations

import pytest

from callyard.cli.progress import SLOW_NOTE_MS, Pace, Watch, describe_counts, describe_load, find_fraction
from callyard.worker.pool import SlotView
from callyard.worker.results import RunningCall, RunProgress


def progress(finished: int, elapsed_ms: int, *, inflight: int = 1, failed: int = 0, **more: object) -> RunProgress:
    values = {"committed": finished + inflight, "total": None, "read_fraction": None, **more}
    return RunProgress(finished=finished, failed=failed, inflight=inflight, elapsed_ms=elapsed_ms, **values)  # type: ignore[arg-type]


def slot(state: str, inflight: int = 0) -> SlotView:
    executor_id = "exec-1" if state == "RUNNING" else ""
    return SlotView(index=0, state=state, executor_id=executor_id, pid=1, inflight=inflight, memory_bytes=0)


class FakeWorker:
    last_loss = "exec-7 was killed by SIGSEGV"

    def __init__(self) -> None:
        self.states = ["RUNNING", "RUNNING"]
        self.calls = [
            RunningCall(17, "crawl", "exec-2"),
            RunningCall(4, "crawl", "exec-1"),
            RunningCall(5, "x", "exec-1"),
        ]

    def slots(self) -> list[SlotView]:
        return [slot(state) for state in self.states]

    def running(self) -> list[RunningCall]:
        return self.calls


@pytest.mark.requirement("X89")
def test_after_30_s_without_an_end_the_longest_call_is_named() -> None:
    watch = Watch(FakeWorker())
    assert list(watch.look(progress(3, 1_000))) == []
    assert list(watch.look(progress(3, 1_000 + SLOW_NOTE_MS - 1))) == []
    (note,) = watch.look(progress(3, 1_000 + SLOW_NOTE_MS))
    assert note == (
        "no call has ended for 30 s: 2 of crawl, 1 of x run; the longest is call 17 (crawl, exec-2)."
        " --budget 30s would end such calls; Ctrl-C ends the run"
    )
    assert list(watch.look(progress(3, 50_000))) == [], "said once"
    (again,) = watch.look(progress(3, 61_000))
    assert again.startswith("no call has ended for 1 min 00 s"), "and again after twice as long"
    assert list(watch.look(progress(4, 100_000))) == [], "an end begins it anew"
    assert list(watch.look(progress(4, 129_999))) == []
    assert len(list(watch.look(progress(4, 130_000)))) == 1


def test_waiting_for_rows_is_not_slow() -> None:
    watch = Watch(FakeWorker())
    assert list(watch.look(progress(3, 0))) == []
    assert list(watch.look(progress(3, 60_000, inflight=0))) == []
    assert list(watch.look(progress(3, 61_000))) == [], "the time counts from when there was something to do"


def test_sent_but_not_begun() -> None:
    worker = FakeWorker()
    worker.calls = []
    watch = Watch(worker)
    list(watch.look(progress(0, 0)))
    assert list(watch.look(progress(0, 30_000))) == ["no call has ended for 30 s: none runs yet"]


def test_a_pause_of_the_pool_is_said_once_each_time() -> None:
    worker = FakeWorker()
    watch = Watch(worker)
    assert list(watch.look(progress(0, 0))) == []
    worker.states = ["BACKOFF", "RUNNING"]
    (note,) = watch.look(progress(1, 500))
    assert note.startswith("1 of 2 executors pause before they start again")
    assert "The last one: exec-7 was killed by SIGSEGV." in note
    worker.states = ["BACKOFF", "BACKOFF"]
    assert list(watch.look(progress(1, 1_000))) == []
    worker.states = ["RUNNING", "WAITING"]
    assert list(watch.look(progress(2, 1_500))) == []
    worker.states = ["RUNNING", "BACKOFF"]
    assert len(list(watch.look(progress(3, 2_000)))) == 1


def test_the_part_done() -> None:
    assert find_fraction(progress(25, 0, total=100)) == 0.25
    assert find_fraction(progress(0, 0, total=0)) is None
    assert find_fraction(progress(30, 0, inflight=30, read_fraction=0.5)) == 0.25
    assert find_fraction(progress(0, 0, inflight=0, read_fraction=0.5)) is None
    assert find_fraction(progress(30, 0)) is None


def test_counts() -> None:
    assert describe_counts(progress(0, 0), 0.0) == "0 ok, 0/s"
    assert describe_counts(progress(12_345, 9_000, failed=45), 8_900.4) == "12,300 ok, 45 failed, 8,900/s"
    assert describe_counts(progress(25, 4_000, total=100), 2.5) == "25 ok, 2.5/s, about 12 s left"
    assert describe_counts(progress(25, 4_000, total=100), 0.0) == "25 ok, 0/s", "no guess while nothing ends"
    assert describe_counts(progress(100, 4_000, total=100), 25.0) == "100 ok, 25/s"


def test_load() -> None:
    assert describe_load([slot("RUNNING", 128), slot("RUNNING", 7)]) == "load 128 7"
    assert describe_load([slot("RUNNING", 3), slot("WAITING"), slot("BACKOFF")]) == "load 3, 1 restarting, 1 paused"
    assert describe_load([slot("BACKOFF")]) == "1 paused"
    assert describe_load([slot("RUNNING", 100)] * 12) == "load 1,200 at 12 executors"


def test_the_rate_is_that_of_the_last_seconds() -> None:
    pace = Pace()
    assert pace.measure(progress(0, 0)) == 0
    assert pace.measure(progress(100, 1_000)) == 100
    for second in range(2, 10):
        rate = pace.measure(progress(100, second * 1_000))
    assert rate == 0
