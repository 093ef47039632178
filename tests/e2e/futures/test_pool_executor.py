"""A pool with real executors: what comes back, what is lost, what is cancelled."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, as_completed, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from callyard import CallError, ErrorKind, ExecutorCrashed, PoolExecutor, RemoteError, UsageError
from tests.e2e.futures import functions as f
from tests.e2e.processes import is_alive, wait_gone, wait_until

LONG_S = 120.0


@pytest.fixture(scope="module")
def pool() -> Iterator[PoolExecutor]:
    with PoolExecutor(2) as started:
        yield started


@pytest.fixture(scope="module")
def json_pool() -> Iterator[PoolExecutor]:
    with PoolExecutor(1, codec="json") as started:
        yield started


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X95")
def test_values_come_back_as_they_went(pool: PoolExecutor) -> None:
    plus = 5
    array = np.arange(3_000_000, dtype="f8").reshape(3, -1)  # 24 MB: above a frame
    assert pool.submit(lambda n: n + plus, 1).result(LONG_S) == 6
    assert pool.submit(f.echo, {1: (2, {3}), "f": f.OfItsOwn}).result(LONG_S) == {1: (2, {3}), "f": f.OfItsOwn}
    found = pool.submit(f.echo, array).result(LONG_S)
    assert (found.dtype, found.shape, found.flags.writeable) == (array.dtype, array.shape, True)
    assert bool((found == array).all())
    text = "x" * (40 << 20)
    assert pool.submit(f.echo, text).result(LONG_S) == text
    made: Callable[[], int] = pool.submit(lambda: lambda: plus).result(LONG_S)
    assert made() == 5


def test_an_executor_stands_where_the_caller_does(pool: PoolExecutor) -> None:
    assert pool.submit(f.where).result(LONG_S) == (os.getcwd(), sys.argv)


@pytest.mark.parametrize("name", ["value", "key", "os", "own", "group", "exit", "interrupt"])
def test_an_exception_comes_back_as_itself(pool: PoolExecutor, name: str) -> None:
    error = pool.submit(f.fail, name).exception(LONG_S)
    expected = f.RAISES[name]
    assert (type(error), str(error), vars(error)) == (type(expected), str(expected), vars(expected))
    if name == "group":
        assert repr(error) == repr(expected)
    else:
        assert error is not None
        assert error.args == expected.args
    told = str(error.__cause__)
    assert "raise RAISES[name]" in told
    assert "functions.py" in told
    assert "callyard" not in told.replace("callyard_tests", "").split("Error")[0].replace(os.getcwd(), "")


@pytest.mark.parametrize(
    ("name", "type_", "message"),
    [
        ("wants more", "tests.e2e.futures.functions.WantsMore", "x at 7"),
        ("unwritable", "tests.e2e.futures.functions.Unwritable", "u"),
    ],
)
def test_what_cannot_come_back_is_told(pool: PoolExecutor, name: str, type_: str, message: str) -> None:
    error = pool.submit(f.fail, name).exception(LONG_S)
    assert isinstance(error, RemoteError)
    assert (error.type, error.message, str(error)) == (type_, message, f"{type_}: {message}")
    assert "raise RAISES[name]" in error.traceback
    assert error.traceback in str(error.__cause__)
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    assert (type(again), str(again), again.traceback) == (RemoteError, str(error), error.traceback)


def test_what_cannot_be_pickled_is_that_call_s_failure(pool: PoolExecutor) -> None:
    lock = threading.Lock()
    there, back = pool.submit(f.echo, lock), pool.submit(f.make_lock)
    for future in (there, back):
        with pytest.raises(TypeError, match="cannot pickle"):
            future.result(LONG_S)
    assert pool.submit(f.echo, 1).result(LONG_S) == 1


def test_code_that_exits_while_it_is_pickled_is_that_call_s_failure(pool: PoolExecutor) -> None:
    there, back = pool.submit(f.echo, f.ExitsWhenWritten()), pool.submit(f.make_exiting)
    for future in (there, back):
        assert isinstance(future.exception(LONG_S), SystemExit)
    assert pool.submit(f.echo, 1).result(LONG_S) == 1


# --- losses -----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X62")
def test_a_kill_costs_one_call_and_nothing_runs_twice(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    with PoolExecutor(2) as pool:
        before = [pool.submit(f.note, notes, number) for number in range(30)]
        dead = pool.submit(f.note_and_die, notes)
        after = [pool.submit(f.note, notes, number) for number in range(30, 200)]
        done, _ = wait([dead, *before, *after], LONG_S)
        assert len(done) == 201
        error = dead.exception()
        assert isinstance(error, ExecutorCrashed)
        assert isinstance(error, BrokenProcessPool)
        assert error.failure.kind is ErrorKind.CRASHED
        assert "SIGKILL" in str(error)
        assert [future.result() for future in (*before, *after)] == list(range(200))
        assert sorted(notes.read_text().splitlines()) == sorted([*map(str, range(200)), "die"])


@pytest.mark.requirement("X12")
@pytest.mark.requirement("X89")
def test_promises_of_a_function_hold(pool: PoolExecutor, tmp_path: Path) -> None:
    assert pool.submit(f.die_once, tmp_path / "begun").result(LONG_S) == "done"
    with pytest.raises(CallError, match="budget of 200 ms") as caught:
        pool.submit(f.spin).result(LONG_S)
    assert caught.value.kind is ErrorKind.TIMEOUT


# --- cancelling -------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X54")
@pytest.mark.parametrize("busy", [f.mark_and_spin, f.mark_and_sleep])
def test_a_call_that_runs_is_stopped(tmp_path: Path, busy: Callable[..., None]) -> None:
    told: list[Future[Any]] = []
    marked = tmp_path / "marked"
    args = (LONG_S * 10,) if busy is f.mark_and_sleep else ()
    with PoolExecutor(1) as pool:
        future = pool.submit(busy, marked, *args)
        future.add_done_callback(told.append)
        wait_until(marked.exists, "the call has begun")
        assert future.running()
        assert future.cancel()
        assert (future.cancelled(), future.done(), future.running(), told) == (True, True, False, [future])
        assert wait([future], 0).done == {future}
        assert next(as_completed([future], LONG_S)) is future
        with pytest.raises(CancelledError):
            future.result()
        assert pool.submit(f.echo, 1).result(LONG_S) == 1
        assert future.cancel()
        ended = pool.submit(f.echo, 2)
        ended.result(LONG_S)
        assert not ended.cancel()


def test_shutdown_cancels_what_is_pending_only(tmp_path: Path) -> None:
    pool = PoolExecutor(1)
    marked = tmp_path / "marked"
    running = pool.submit(f.mark_and_sleep, marked, 1.0)
    rest = [pool.submit(f.note, tmp_path / "notes", number) for number in range(50)]
    wait_until(marked.exists, "the call has begun")
    pool.shutdown(wait=False, cancel_futures=True)
    with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
        pool.submit(f.echo, 1)
    pool.shutdown()
    assert running.result(0) is None
    ran = [future.result() for future in rest if not future.cancelled()]
    assert ran == list(range(len(ran)))
    assert len(ran) <= 1, "as many as were with the executor already"
    wait_gone([int(marked.read_text())])


def test_terminate_workers(tmp_path: Path) -> None:
    marked, cleaned = tmp_path / "marked", tmp_path / "cleaned"
    pool = PoolExecutor(1, cancel_grace_ms=60_000)
    running = pool.submit(f.mark_and_clean, marked, cleaned)
    rest = [pool.submit(f.note, tmp_path / "notes", number) for number in range(50)]
    wait_until(marked.exists, "the call has begun")
    pool.terminate_workers()
    with pytest.raises(RuntimeError):
        pool.submit(f.echo, 1)
    with pytest.raises(BrokenProcessPool, match=r"terminate_workers\(\) ended its processes"):
        running.result(LONG_S)
    wait(rest, LONG_S)
    assert rest[-1].cancelled()
    assert all(future.cancelled() or isinstance(future.exception(), BrokenProcessPool) for future in rest)
    pool.terminate_workers()
    pool.shutdown()
    pool.terminate_workers()
    assert cleaned.exists(), "it was interrupted, not killed"
    assert not (tmp_path / "notes").exists()
    wait_gone([int(marked.read_text())])


@pytest.mark.parametrize("before", [[], ["terminate_workers"], ["kill_workers"]])
def test_kill_workers(tmp_path: Path, before: list[str]) -> None:
    """At once, whatever grace there is."""
    marked = tmp_path / "marked"
    pool = PoolExecutor(1, cancel_grace_ms=600_000)
    running = pool.submit(f.mark_and_stay, marked)
    wait_until(marked.exists, "the call has begun")
    for name in before:
        getattr(pool, name)()
        assert isinstance(running.exception(LONG_S), BrokenProcessPool)
    pool.kill_workers()
    assert isinstance(running.exception(LONG_S), BrokenProcessPool)
    shutting_down = threading.Thread(target=pool.shutdown, daemon=True)
    shutting_down.start()
    shutting_down.join(LONG_S)
    assert not shutting_down.is_alive()
    wait_gone([int(marked.read_text())])


@pytest.mark.parametrize("name", ["terminate_workers", "kill_workers"])
def test_workers_are_ended_before_they_are_there(name: str) -> None:
    unused, starting = PoolExecutor(1), PoolExecutor(1)
    future = starting.submit(f.echo, 1)
    for pool in (unused, starting):
        getattr(pool, name)()
        with pytest.raises(RuntimeError):
            pool.submit(f.echo, 1)
        pool.shutdown()
    assert future.done()


def test_map_left_early_stops_what_runs(tmp_path: Path) -> None:
    marked = tmp_path / "marked"
    with PoolExecutor(1) as pool:
        with pytest.raises(TimeoutError):
            next(pool.map(f.mark_and_spin, [marked], timeout=0.2))
        assert pool.submit(f.echo, 1).result(LONG_S) == 1


# --- map --------------------------------------------------------------------------------------------------------------


def test_map_in_order_with_chunks_and_several_iterables(pool: PoolExecutor) -> None:
    assert list(pool.map(pow, range(50), [2] * 60, chunksize=7)) == [n**2 for n in range(50)]
    assert list(pool.map(f.echo, [])) == []
    assert list(pool.map(f.fail, [], chunksize=3)) == []
    results = pool.map(lambda n: 1 // n, [1, 0, 1])
    assert next(results) == 1
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_map_submits_by_the_method_of_a_subclass() -> None:
    class Counting(PoolExecutor):
        submitted = 0

        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            self.submitted += 1
            return super().submit(fn, *args, **kwargs)

    with Counting(1) as pool:
        assert list(pool.map(f.echo, range(4))) == [0, 1, 2, 3]
    assert pool.submitted == 4


def test_buffersize_reads_as_results_are_taken(pool: PoolExecutor) -> None:
    read: list[int] = []

    def numbers() -> Iterator[int]:
        for number in range(10_000_000):
            read.append(number)
            yield number

    results = pool.map(f.echo, numbers(), buffersize=3, chunksize=2)
    assert len(read) == 6
    assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
    assert len(read) <= 12
    results.close()  # type: ignore[attr-defined]
    assert len(read) <= 12


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"chunksize": 0}, ValueError),
        ({"buffersize": 0}, ValueError),
        ({"buffersize": "3"}, TypeError),
    ],
)
def test_map_refuses(pool: PoolExecutor, options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        pool.map(f.echo, [1], **options)


# --- a pool's own -----------------------------------------------------------------------------------------------------


def test_an_initializer_runs_once_in_each_process() -> None:
    with PoolExecutor(2, initializer=f.load, initargs=("m",)) as pool:
        assert all(found == ["m"] for found in pool.map(lambda _: f.get_loaded(), range(40)))


def test_an_initializer_that_raises_breaks_the_pool() -> None:
    pool = PoolExecutor(1, initializer=f.fail_to_load)
    futures = [pool.submit(f.echo, number) for number in range(10)]
    for future in futures:
        assert isinstance(future.exception(LONG_S), BrokenProcessPool)
    cause = futures[0].exception()
    assert cause is not None
    assert isinstance(cause.__cause__, LookupError)
    assert "no model here" in str(cause.__cause__.__cause__)
    with pytest.raises(BrokenProcessPool, match="initializer raised"):
        pool.submit(f.echo, 1)
    pool.shutdown()


def test_a_pool_that_cannot_start_breaks() -> None:
    for cannot in (threading.Lock(), f.ExitsWhenWritten()):
        pool = PoolExecutor(1, initializer=print, initargs=(cannot,))
        futures = [pool.submit(f.echo, number) for number in range(3)]
        for future in futures:
            error = future.exception(LONG_S)
            assert isinstance(error, BrokenProcessPool)
            assert isinstance(error.__cause__, TypeError | SystemExit)
        pool.shutdown()


def test_every_future_ends_when_a_callback_ends_the_loop_s_thread(tmp_path: Path) -> None:
    """One that was cancelled a moment before too, and callbacks that do the same again."""
    marked = tmp_path / "marked"
    pool = PoolExecutor(2)
    running = pool.submit(f.mark_and_spin, marked)
    wait_until(marked.exists, "the call has begun")
    rest: list[Future[Any]] = []

    def leave(_: Future[Any]) -> NoReturn:
        running.cancel()
        sys.exit(3)

    first = pool.submit(f.mark_and_sleep, tmp_path / "first", 0.3)
    rest += [pool.submit(f.mark_and_sleep, tmp_path / "rest", LONG_S) for _ in range(10)]
    for future in (first, *rest):
        future.add_done_callback(leave)
    assert first.result(LONG_S) is None
    for future in rest:
        assert isinstance(future.exception(LONG_S), BrokenProcessPool)
    assert running.cancelled()
    with pytest.raises(BrokenProcessPool, match="takes no new calls"):
        pool.submit(f.echo, 1)
    pool.shutdown()
    assert not is_alive(int(marked.read_text()))


@pytest.mark.requirement("X47")
def test_max_tasks_per_child() -> None:
    with PoolExecutor(1, max_tasks_per_child=3) as pool:
        pids = [pool.submit(f.pid).result(LONG_S) for _ in range(12)]
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [3, 3, 3, 3]


@pytest.mark.requirement("X47")
@pytest.mark.parametrize("most", [1, 4])
def test_max_tasks_per_child_holds_for_calls_that_wait_too(most: int) -> None:
    """Who says 1 wants a process of its own for each call."""
    with PoolExecutor(2, max_tasks_per_child=most) as pool:
        pids = [future.result(LONG_S) for future in [pool.submit(f.pid) for _ in range(10 * most)]]
    assert max(pids.count(pid) for pid in pids) == most


def test_a_pool_that_is_forgotten_ends_after_its_calls(tmp_path: Path) -> None:
    marked = tmp_path / "marked"
    future = PoolExecutor(1).submit(f.mark_and_sleep, marked, 0.3)
    assert future.result(LONG_S) is None
    wait_gone([int(marked.read_text())])


def test_a_pool_without_calls_starts_nothing() -> None:
    threads = threading.active_count()
    with PoolExecutor(2):
        assert threading.active_count() == threads
    PoolExecutor(2)
    assert threading.active_count() == threads


def test_a_callback_may_submit_and_shut_down() -> None:
    pool = PoolExecutor(1)
    more: list[Future[int]] = []

    def then(done: Future[int]) -> None:
        more.append(pool.submit(f.echo, done.result() + 1))
        pool.shutdown()

    pool.submit(f.echo, 1).add_done_callback(then)
    wait_until(lambda: bool(more), "the callback ran")
    assert more[0].result(LONG_S) == 2
    pool.shutdown()


def test_a_forked_child_has_no_pool(pool: PoolExecutor) -> None:
    assert pool.submit(f.echo, 1).result(LONG_S) == 1
    child = os.fork()
    if child == 0:
        try:
            pool.submit(f.echo, 1)
        except RuntimeError:
            os._exit(7)
        finally:
            os._exit(8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert pool.submit(f.echo, 1).result(LONG_S) == 1


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"max_workers": 0}, ValueError, "greater than 0"),
        ({"max_workers": -1}, ValueError, "greater than 0"),
        ({"max_workers": 1.5}, TypeError, "integer"),
        ({"initializer": 3}, TypeError, "callable"),
        ({"max_tasks_per_child": "3"}, TypeError, "integer"),
        ({"max_tasks_per_child": 0}, ValueError, ">= 1"),
        ({"mp_context": multiprocessing.get_context("fork")}, ValueError, "start anew"),
        ({"codec": "xml"}, ValueError, "'pickle' or 'json'"),
        ({"sandbox": "auto"}, UsageError, "no sandbox"),
        ({"spare": 1}, UsageError, "no setting 'spare'"),
        ({"max_worker": 1}, UsageError, "no setting 'max_worker'; did you mean max_workers"),
        ({"n_jobs": -1}, UsageError, "no setting 'n_jobs'; did you mean max_workers"),
    ],
)
def test_what_a_pool_cannot_be(given: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        PoolExecutor(**given)


def test_a_context_that_starts_anew_is_taken() -> None:
    with PoolExecutor(True, multiprocessing.get_context("spawn")) as pool:  # a bool is a number here as there
        assert pool.submit(f.echo, 1).result(LONG_S) == 1


# --- json -------------------------------------------------------------------------------------------------------------


def test_json_gives_back_what_it_has(json_pool: PoolExecutor) -> None:
    value = {"a": [1, 2.5, None, True, "é", {"b": b"\0\xff"}], "n": 1 << 63}
    assert json_pool.submit(f.echo, value=value).result(LONG_S) == value
    array = np.ones((2, 3))
    assert bool((json_pool.submit(f.echo, array).result(LONG_S) == array).all())
    assert list(json_pool.map(f.echo, range(10), chunksize=4)) == list(range(10))
    with pytest.raises(TypeError, match="argument 0: a tuple"):
        json_pool.map(f.echo, [1, (2, 3)], chunksize=2)
    assert list(json_pool.map(f.pid, range(4))) == [json_pool.submit(f.pid).result(LONG_S)] * 4
    assert json_pool.submit(f.echo, b"x" * (20 << 20)).result(LONG_S) == b"x" * (20 << 20)


@pytest.mark.parametrize(
    ("args", "error", "text"),
    [
        (((1, 2),), TypeError, r"argument 0: a tuple would arrive as a list"),
        (([0, {"a": {1: 2}}],), TypeError, r"argument 0\[1\]\['a'\]: the key 1 \(int\) would arrive as text"),
        (({"x": {1, 2}},), TypeError, r"argument 0\['x'\]: a set would arrive as a list"),
        (([float("nan")],), ValueError, r"argument 0\[0\]: JSON has no nan"),
        ((f.OfItsOwn("a", 1),), TypeError, r"argument 0: a tests.e2e.futures.functions.OfItsOwn would not arrive"),
        ((1 << 70,), ValueError, r"argument 0: an int of 71 bits"),
        (("\ud800",), ValueError, r"argument 0: text with a lone surrogate"),
        ((Path("x"),), TypeError, r"argument 0: a pathlib"),
        (([np.arange(2).view(np.recarray)],), TypeError, r"argument 0\[0\]: a numpy.*recarray would not arrive as one"),
        ((np.arange(2, dtype=">i4"),), TypeError, r"argument 0: an array of >i4 would arrive in the machine's own"),
    ],
)
def test_json_refuses_at_submit(
    json_pool: PoolExecutor, args: tuple[Any, ...], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        json_pool.submit(f.echo, *args)


def test_json_refuses_functions_without_a_name(json_pool: PoolExecutor) -> None:
    for unnamed in (lambda: 1, test_json_refuses_at_submit.__get__(1)):
        with pytest.raises(TypeError, match="module and name"):
            json_pool.submit(unnamed)


def test_json_results_do_not_change_either(json_pool: PoolExecutor) -> None:
    for name, text in (("tuple", "a tuple"), ("keys", "the key 1"), ("nan", "no nan"), ("set", "a set")):
        with pytest.raises((TypeError, ValueError), match=f"the result: .*{text}"):
            json_pool.submit(f.forbidden, name).result(LONG_S)


@pytest.mark.parametrize("name", ["value", "key", "os", "exit"])
def test_json_builtin_exceptions_come_back_as_themselves(json_pool: PoolExecutor, name: str) -> None:
    error = json_pool.submit(f.fail, name).exception(LONG_S)
    assert error is not None
    assert (type(error), error.args) == (type(f.RAISES[name]), f.RAISES[name].args)
    assert "raise RAISES[name]" in str(error.__cause__)


@pytest.mark.parametrize(
    ("name", "type_"), [("own", "tests.e2e.futures.functions.OfItsOwn"), ("group", "ExceptionGroup")]
)
def test_json_others_are_told(json_pool: PoolExecutor, name: str, type_: str) -> None:
    error = json_pool.submit(f.fail, name).exception(LONG_S)
    assert isinstance(error, RemoteError)
    assert error.type == type_


def test_running_is_told_and_pending_is_cancelled_at_no_cost(tmp_path: Path) -> None:
    with PoolExecutor(1) as pool:
        marked = tmp_path / "marked"
        first = pool.submit(f.mark_and_spin, marked)
        rest = [pool.submit(f.note, tmp_path / "notes", number) for number in range(20)]
        wait_until(marked.exists, "the call has begun")
        assert not rest[-1].running()
        assert all(future.cancel() for future in rest)
        first.cancel()
    assert not (tmp_path / "notes").exists()
    assert not is_alive(int(marked.read_text()))
