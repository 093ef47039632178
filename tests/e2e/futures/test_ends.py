"""Scripts with a pool: the names of their `__main__`, and how they end. No process is left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.e2e.processes import children_of, wait_gone, wait_until

LONG_S = 120

HEAD = """
import os, sys, time
from pathlib import Path
from callyard import PoolExecutor, function

folder = Path(sys.argv[1])

def note(number):
    with (folder / "notes").open("a") as file:
        file.write(f"{number}\\n")

def mark_and_spin():
    (folder / "pid").write_text(str(os.getpid()))
    while True:
        pass
"""


def start(text: str, folder: Path) -> subprocess.Popen[str]:
    script = folder / "script.py"
    script.write_text(HEAD + textwrap.dedent(text))
    return subprocess.Popen(
        [sys.executable, script, folder], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(text: str, folder: Path) -> list[str]:
    process = start(text, folder)
    printed, errors = process.communicate(timeout=LONG_S)
    assert (process.returncode, errors) == (0, ""), printed
    return printed.splitlines()


def test_globals_of_the_script(tmp_path: Path) -> None:
    text = """
    factor, settings = 2, {"a": 1}

    class Box:
        kept = 5

    @function
    def times(x):
        return factor * x * helper()

    def helper():
        return 1

    def grow():
        global factor
        factor += 100
        settings["b"] = 2
        return times(1)

    def look():
        return factor, settings, Box.kept, __name__, sys.modules["__main__"].factor

    with PoolExecutor(1) as pool:
        ask = lambda f, *args: print(pool.submit(f, *args).result())
        ask(times, 3)       # 6
        factor = 3
        ask(times, 3)       # 9: the name has another object now
        ask(grow)           # 103: the executor's own
        ask(look)           # it stays
        ask(times, 1)       # 103
        factor = 4
        ask(times, 1)       # 4
        def helper():
            return 10
        ask(times, 1)       # 40
        print(factor, settings)
    """
    told = ["6", "9", "103", "(103, {'a': 1, 'b': 2}, 5, '__main__', 103)", "103", "4", "40", "4 {'a': 1}"]
    assert run(text, tmp_path) == told


def test_classes_of_the_script(tmp_path: Path) -> None:
    """What an executor does to one stays there, and is there for the next call; the caller's own is never touched."""
    text = """
    count, heard = 0, []

    class Heard:
        def __init_subclass__(cls):
            heard.append(cls.__name__)

    class Box(Heard):
        kept = 0
        def look(self):
            return count, Box.kept

    def load():
        Box.kept = 10

    def change(box):
        Box.kept += 1
        return box, Box.kept, len(heard)

    def fresh():
        return Box()

    own = Box.look
    with PoolExecutor(1, initializer=load) as pool:
        told = [pool.submit(change, Box()).result() for _ in range(3)]
        count = 5
        print([type(box) is Box for box, _, _ in told], [kept for _, kept, _ in told], len({n for _, _, n in told}))
        print(Box.look is own, Box().look(), told[0][0].look())
        old = Box
        class Box:
            kept = 1
        print([type(pool.submit(fresh).result()) is Box for _ in range(2)])
        print(type(pool.submit(change, old()).result()[0]) is old)
    """
    assert run(text, tmp_path) == [
        "[True, True, True] [11, 12, 13] 1",
        "True (5, 0) (5, 0)",
        "[True, True]",
        "True",
    ]


def test_what_is_found_by_name_elsewhere_travels_from_the_script(tmp_path: Path) -> None:
    text = """
    import functools
    from typing import Callable, NewType, ParamSpec, TypeVar, TypeVarTuple

    Number, P, T, Many = NewType("Number", int), ParamSpec("P"), TypeVar("T"), TypeVarTuple("Many")
    ran = []

    @functools.lru_cache(maxsize=5)
    def double(n: int) -> Number:
        ran.append(n)
        return Number(2 * n)

    @functools.cache
    def fib(n):
        return n if n < 2 else fib(n - 1) + fib(n - 2)

    def twice(called: Callable[P, T]) -> Callable[P, tuple[T, T]]:
        def both(*args: P.args, **kwargs: P.kwargs) -> tuple[T, T]:
            return called(*args, **kwargs), called(*args, **kwargs)
        return both

    @functools.singledispatch
    def kind(value):
        return "any"

    @kind.register
    def _(value: int):
        return "int"

    class Box:
        @functools.cached_property
        def size(self):
            ran.append("size")
            return 7

    def work(n):
        box = Box()
        return twice(double)(n), double.cache_info().maxsize, kind(n), kind(""), box.size + box.size, ran, Many.__name__

    kind(2)
    with PoolExecutor(1) as pool:
        print(pool.submit(work, 4).result())
        print(pool.submit(double, 4).result(), pool.submit(fib, 30).result(), pool.submit(kind, 1).result())
        print(pool.submit(work, 4).result()[5], pool.submit(Number, 3).result(), pool.submit(twice(double), 1).result())
    """
    assert run(text, tmp_path) == [
        "((8, 8), 5, 'int', 'any', 14, [4, 'size'], 'Many')",
        "8 832040 int",
        "[4, 'size', 4, 'size'] 3 (2, 2)",
    ]


def test_what_a_manager_shares(tmp_path: Path) -> None:
    text = """
    import multiprocessing

    def work(shared, queue, stop, number):
        shared[number] = number
        queue.put(number)
        return stop.is_set()

    if __name__ == "__main__":
        with multiprocessing.get_context("spawn").Manager() as manager:
            shared, queue, stop = manager.dict(), manager.Queue(), manager.Event()
            with PoolExecutor(2) as pool:
                print([pool.submit(work, shared, queue, stop, number).result() for number in range(3)])
                stop.set()
                print(pool.submit(work, shared, queue, stop, 3).result(), dict(shared), queue.qsize())
    """
    assert run(text, tmp_path) == ["[False, False, False]", "True {0: 0, 1: 1, 2: 2, 3: 3} 4"]


def test_a_traceback_names_the_script_s_lines(tmp_path: Path) -> None:
    text = """
    def divide():
        return 1 / 0  # this line

    with PoolExecutor(1) as pool:
        print(pool.submit(divide).exception().__cause__)
    """
    told = run(text, tmp_path)
    assert any("script.py" in line and "divide" in line for line in told)
    assert "    return 1 / 0  # this line" in told
    assert not any("pickling.py" in line or "target" in line or "callyard_pool" in line for line in told)


def test_what_a_call_prints(tmp_path: Path) -> None:
    text = """
    with PoolExecutor(1) as pool:
        pool.submit(print, "from a call").result()
    """
    assert run(text, tmp_path) == ["from a call"]


def test_a_module_that_starts_a_pool_when_it_is_imported(tmp_path: Path) -> None:
    (tmp_path / "unguarded.py").write_text(
        "from callyard import PoolExecutor\n"
        "def one():\n    return 1\n"
        "pool = PoolExecutor(1)\n"
        "future = pool.submit(one)\n"
    )
    told = run("import unguarded; print(unguarded.future.exception())\n", tmp_path)
    assert len(told) == 1
    assert 'put that part under `if __name__ == "__main__":`' in told[0]


def test_a_script_that_ends_without_shutdown(tmp_path: Path) -> None:
    text = """
    pool = PoolExecutor(2)
    for number in range(40):
        pool.submit(note, number)
    print("end")
    """
    assert run(text, tmp_path) == ["end"]
    assert sorted(map(int, (tmp_path / "notes").read_text().split())) == list(range(40))


WAITS = {
    "in with": """
    with PoolExecutor(1) as pool:
        futures = [pool.submit(mark_and_spin), *(pool.submit(note, n) for n in range(50))]
        futures[0].result()
    """,
    "at the end of with": """
    with PoolExecutor(1) as pool:
        futures = [pool.submit(mark_and_spin), *(pool.submit(note, n) for n in range(50))]
    """,
    "caught there": """
    try:
        with PoolExecutor(1) as pool:
            pool.submit(mark_and_spin)
    except KeyboardInterrupt:
        sys.exit(1)
    """,
    "without with": """
    pool = PoolExecutor(1)
    futures = [pool.submit(mark_and_spin), *(pool.submit(note, n) for n in range(50))]
    futures[0].result()
    """,
}


def start_waiting(text: str, folder: Path) -> tuple[subprocess.Popen[str], list[int]]:
    process = start(text, folder)
    wait_until(lambda: (folder / "pid").exists() and bool((folder / "pid").read_text()), "a call runs")
    return process, [*children_of(process.pid), int((folder / "pid").read_text())]


@pytest.mark.requirement("X44")
@pytest.mark.parametrize("waits", WAITS)
def test_ctrl_c(tmp_path: Path, waits: str) -> None:
    process, pids = start_waiting(WAITS[waits], tmp_path)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=LONG_S)
    assert process.returncode != 0
    wait_gone(pids)
    assert not (tmp_path / "notes").exists()


@pytest.mark.requirement("X44")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_caller_that_is_killed(tmp_path: Path, number: signal.Signals) -> None:
    process, pids = start_waiting(WAITS["in with"], tmp_path)
    process.send_signal(number)
    process.communicate(timeout=LONG_S)
    assert process.returncode == -number
    wait_gone(pids)
