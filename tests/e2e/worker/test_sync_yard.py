"""Synchronous code with real executors: scripts, running loops, notebooks, Ctrl-C; and what is left behind: nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest

from callyard import CallError, Ok, SyncYard, UsageError, bind
from tests.e2e import typed_file as f
from tests.e2e.processes import children_of, is_alive, wait_gone, wait_until

PROMPT_S = 120.0


def quiet(*_: object) -> None:
    """Drop what executors print."""


@pytest.fixture(scope="module")
def yard() -> Iterator[SyncYard]:
    with SyncYard(f.__file__, executors=1, spare_executors=0, on_output=quiet) as started:
        yield started


def test_calls_without_await(yard: SyncYard) -> None:
    assert yard.call(f.fare, 5) == f.Fare(cents=5)
    assert yard.call("fare", {"cents": 5}) == {"cents": 5}
    assert yard.call(bind(f.point), deadline_ms=60_000) == f.Point(1, 2)
    results = list(yard.map(f.fare, range(300)))
    assert [(result.index, result.value) for result in results] == [(n, f.Fare(cents=n)) for n in range(300)]
    done = yard.dispatch(f.distance, "JFK")
    assert (type(done).__mro__[1], done.value) == (Ok, 6.0)
    frame = pl.DataFrame({"cents": [5, 6]})
    assert yard.map_frame("fare", frame).to_dict(as_series=False) == {
        "cents": [5, 6],
        "output": [{"cents": 5}, {"cents": 6}],
        "output_error": [None, None],
    }
    assert yard.registry.get("fare").is_async
    assert not yard.reload()
    with pytest.raises(CallError, match="not what its annotation"):
        yard.call(f.liar, 3)
    with pytest.raises(UsageError, match="no function 'nothing'"):
        yard.call("nothing")
    with pytest.raises(TypeError, match=r"map\(\) has no option 'x'"):
        next(yard.map(f.fare, [], x=1))  # type: ignore[call-overload]


def test_calls_of_several_threads(yard: SyncYard) -> None:
    got: dict[int, object] = {}

    def work(n: int) -> None:
        got[n] = (yard.call(f.fare, n), [result.value for result in yard.map(f.fare, [n, n])])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got == {n: (f.Fare(cents=n), [f.Fare(cents=n)] * 2) for n in range(8)}


def test_in_a_running_loop() -> None:
    async def inside() -> list[object]:
        with SyncYard(f.__file__, executors=1, spare_executors=0, on_output=quiet) as yard:
            return [yard.call(f.point), [result.value for result in yard.map(f.fare, [1])]]

    assert asyncio.run(inside()) == [f.Point(1, 2), [f.Fare(cents=1)]]


def test_what_a_callback_must_not_do_is_told(yard: SyncYard) -> None:
    told: list[str] = []

    def rows() -> Iterator[int]:
        try:
            yard.call(f.fare, 1)
        except UsageError as error:
            told.append(str(error))
        yield 1

    async def on_loop() -> None:
        for wait in (lambda: yard.call(f.fare, 1), yard.close):
            try:
                wait()
            except UsageError as error:
                told.append(str(error))

    yard._thread.run(on_loop())
    assert told == ["a callback cannot wait for the loop that called it"] * 2
    assert [result.value for result in yard.map(f.fare, rows())] == [f.Fare(cents=1)]


def test_leaving_a_list_cancels_the_rest(yard: SyncYard, tmp_path: Path) -> None:
    gate, began = str(tmp_path / "gate"), str(tmp_path / "began")
    Path(f"{gate}0").touch()
    for result in yard.map(f.wait_for, [(gate, began, n) for n in range(50)]):
        assert result.value == 0
        break
    wait_until(lambda: yard._yard.worker.statistics().calls == 0, "the other calls are cancelled")
    assert yard.call(f.point) == f.Point(1, 2)


def test_close_leaves_no_process_and_takes_no_more_calls() -> None:
    yard = SyncYard(f.__file__, executors=1, spare_executors=0, on_output=quiet)
    pids = [slot.pid for slot in yard._yard.worker.slots()]
    assert pids
    assert all(is_alive(pid) for pid in pids)
    rest = yard.map(f.fare, range(10))
    assert next(rest).value == f.Fare(cents=0)
    yard.close(drain=False)
    yard.close()
    wait_gone(pids)
    with pytest.raises(UsageError, match="closed"):
        yard.call(f.point)
    rest.close()


FORKING = """
import os, sys
from callyard import SyncYard, UsageError
from work import twice

yard = SyncYard("work.py", executors=1, spare_executors=0)
rows = yard.map(twice, [1, 2])
next(rows)
if (child := os.fork()) == 0:
    try:
        yard.call(twice, 1)
    except UsageError as error:
        print(error, flush=True)
    rows.close()
    yard.close()
    sys.exit(7)  # with all that runs at the end of a process
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print(yard.call(twice, 4), [result.value for result in rows], flush=True)
"""


def test_a_forked_process_is_told_to_make_its_own(tmp_path: Path) -> None:
    work = "from callyard import function\n\n\n@function\ndef twice(n: int) -> int:\n    return 2 * n\n"
    (tmp_path / "work.py").write_text(work)
    (tmp_path / "main.py").write_text(FORKING)
    done = subprocess.run(
        [sys.executable, "main.py"], cwd=tmp_path, capture_output=True, text=True, timeout=PROMPT_S, check=False
    )
    told = "it was made before this process was forked off another: make one here\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{told}8 [4]\n", "")


def test_what_is_collected_on_the_loops_own_thread_ends_as_well() -> None:
    """A cycle is collected by whatever thread happens to allocate."""
    yard = SyncYard(f.__file__, executors=1, spare_executors=0, on_output=quiet)
    pids, thread = [slot.pid for slot in yard._yard.worker.slots()], yard._thread
    rows = yard.map(f.fare, range(1_000))
    next(rows)
    left: list[object] = [rows, yard]
    del rows, yard
    gone = threading.Event()

    def collect() -> None:
        left.clear()
        gone.set()

    thread.post(collect)
    assert gone.wait(PROMPT_S)
    thread._thread.join(PROMPT_S)
    assert not thread._thread.is_alive()
    wait_gone(pids)


def test_a_target_that_does_not_load_leaves_no_thread_and_no_process(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    before = set(threading.enumerate())
    children = set(children_of(os.getpid()))
    with pytest.raises(UsageError, match=r"broken\.py:1: ZeroDivisionError"):
        SyncYard(tmp_path / "broken.py", executors=1, spare_executors=0, on_output=quiet)
    assert {thread for thread in set(threading.enumerate()) - before if thread.name == "callyard-loop"} == set()
    wait_until(lambda: set(children_of(os.getpid())) <= children, "its executors end")


# --- scripts ----------------------------------------------------------------------------------------------------------


def test_a_script_that_is_its_own_target_and_one_that_is_not(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import asyncio\n"
        "from callyard import UsageError, Worker, function\n\n"
        "@function\ndef double(x: int) -> set[int]:\n    return {2 * x}\n\n"
        "async def main():\n"
        "    async with Worker(__file__, executors=1, spare_executors=0) as worker:\n"
        "        print(await worker.call(double, 21))\n"
        "    async with Worker('other.py', executors=1, spare_executors=0) as worker:\n"
        "        try:\n            await worker.call(double, 21)\n"
        "        except UsageError as error:\n            print(error)\n\n"
        "if __name__ == '__main__':\n    asyncio.run(main())\n"
    )
    (tmp_path / "other.py").write_text("def single(x: int) -> int:\n    return x\n")
    done = subprocess.run(
        [sys.executable, "own.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "{42}"
    assert second == (
        "double is defined in own.py, which is no part of other.py, the target here: start with own.py, or declare it"
        " with @function and import it in other.py; there are: single"
    )


WAITS = """
import time
from callyard import function, sleep

@function
def double(x: int) -> int:
    return 2 * x

@function
def forever(x: int, marker: str) -> int:
    open(marker, "w").close()
    while True:
        time.sleep(0.005)
"""


def run_script(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    (folder / "waits.py").write_text(WAITS)
    (folder / "script.py").write_text(source)
    return subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env=own_temporary(folder),
        capture_output=True,
        text=True,
        timeout=PROMPT_S,
        check=False,
    )


def own_temporary(folder: Path) -> dict[str, str]:
    (folder / "t").mkdir(exist_ok=True)
    return {**os.environ, "TMPDIR": str(folder / "t")}


def test_a_yard_that_nobody_closed_ends_with_the_process(tmp_path: Path) -> None:
    done = run_script(
        tmp_path,
        "from callyard import SyncYard\n"
        "import waits\n"
        "yard = SyncYard('waits.py', executors=2, spare_executors=0)\n"
        "print(yard.call(waits.double, 21), *[slot.pid for slot in yard._yard.worker.slots()])\n"
        "rest = yard.map(waits.double, [1, 2, 3])\n"
        "next(rest)\n",
    )
    assert (done.returncode, done.stderr) == (0, "")
    value, *pids = map(int, done.stdout.split())
    assert value == 42
    wait_gone(pids)
    assert list((tmp_path / "t").iterdir()) == []


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(
            "with SyncYard('waits.py', executors=1) as yard:\n    yard.call(waits.forever, 1, 'began')", id="call"
        ),
        pytest.param(
            "yard = SyncYard('waits.py', executors=1)\nyard.dispatch(waits.forever, 1, 'began')", id="dispatch"
        ),
        pytest.param(
            "with SyncYard('waits.py', executors=1) as yard:\n"
            "    list(yard.map(waits.forever, [(1, 'began'), (2, 'began')]))",
            id="map",
        ),
        pytest.param("callyard.run('waits.py:forever', [(1, 'began')], executors=1)", id="run"),
        pytest.param(
            "async def main():\n    callyard.run('waits.py:forever', [(1, 'began')], executors=1)\nasyncio.run(main())",
            id="run_in_a_loop",
        ),
        pytest.param(
            "async def main():\n"
            "    with SyncYard('waits.py', executors=1) as yard:\n"
            "        yard.call(waits.forever, 1, 'began')\n"
            "asyncio.run(main())",
            id="call_in_a_loop",
        ),
    ],
)
def test_ctrl_c_ends_what_is_waited_for_and_leaves_nothing_behind(source: str, tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    (tmp_path / "script.py").write_text(
        f"import asyncio, sys\nimport callyard, waits\nfrom callyard import SyncYard\n"
        f"try:\n{''.join(f'    {line}' + chr(10) for line in source.splitlines())}"
        "except KeyboardInterrupt:\n    print('interrupted', flush=True)\n    sys.exit(130)\n"
    )
    script = subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=own_temporary(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: (tmp_path / "began").exists() or script.poll() is not None, "the function runs")
        children = children_of(script.pid)
        script.send_signal(signal.SIGINT)
        out, err = script.communicate(timeout=PROMPT_S)
    finally:
        script.kill()
        script.wait()
    assert (script.returncode, out) == (130, "interrupted\n"), err
    assert "Traceback" not in err
    assert children
    wait_gone(children)
    assert list((tmp_path / "t").iterdir()) == []


@pytest.mark.slow
def test_cells_of_a_notebook(tmp_path: Path) -> None:
    pytest.importorskip("nbclient", reason="a dev dependency, with ipykernel")
    (tmp_path / "waits.py").write_text(WAITS)
    cells = [
        "import callyard, waits\nyard = callyard.SyncYard('waits.py', executors=1)\nyard.call(waits.double, 21)",
        "[result.value for result in yard.map(waits.double, [1, 2])]",
        "def cell(x: int) -> int:\n    return x\n\ntry:\n    yard.call(cell, 1)\n"
        "except callyard.UsageError as error:\n    print(error)",
        "await callyard.acall(waits.double, 4)",
        "yard.close()",
    ]
    (tmp_path / "cells.json").write_text(json.dumps(cells))
    code = (
        "import json, nbformat, nbclient\n"
        "cells = [nbformat.v4.new_code_cell(cell) for cell in json.load(open('cells.json'))]\n"
        "notebook = nbformat.v4.new_notebook(cells=cells)\n"
        "nbclient.NotebookClient(notebook, timeout=120, kernel_name='python3').execute()\n"
        "print(json.dumps([[output.get('text') or output['data']['text/plain'] for output in cell.outputs]"
        " for cell in notebook.cells]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    first, second, third, fourth, last = json.loads(done.stdout)
    assert (first, second, fourth, last) == (["42"], ["[2, 4]"], ["8"], [])
    assert third[0].startswith(
        "cell was defined in a notebook cell or at a prompt, where executors cannot find it: put"
    )


def test_a_yard_goes_on_after_an_interrupted_call(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    (tmp_path / "script.py").write_text(
        "import waits\nfrom callyard import SyncYard\n"
        "with SyncYard('waits.py', executors=1) as yard:\n"
        "    try:\n        yard.call(waits.forever, 1, 'began')\n"
        "    except KeyboardInterrupt:\n        print(yard.call(waits.double, 21))\n"
    )
    script = subprocess.Popen(
        [sys.executable, "script.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_until(lambda: (tmp_path / "began").exists() or script.poll() is not None, "the function runs")
        script.send_signal(signal.SIGINT)
        out, err = script.communicate(timeout=PROMPT_S)
    finally:
        script.kill()
        script.wait()
    assert (script.returncode, out) == (0, "42\n"), err
