"""Functions for the tests of a sandbox's life."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from callyard import function, sleep

BALLAST = Path(__file__).parent / "ballast.bin"


@function
def who() -> dict[str, object]:
    return {
        "uid": os.getuid(),
        "file": __file__,
        "ballast": BALLAST.stat().st_size if BALLAST.exists() else 0,
        "variables": sorted(os.environ),
        "folder": os.getcwd(),
        "tmp": sorted(os.listdir(os.environ.get("TMPDIR", os.curdir))),
    }


@function
def remember(text: str) -> None:
    """Leave something for whoever comes after."""
    Path(os.environ["TMPDIR"], "left").write_text(text)
    sys.modules["left_behind"] = text  # type: ignore[assignment]


@function
def recall() -> list[str]:
    """What somebody before left in this process, or in its folder."""
    return sorted({"left", "left_behind"} & {*os.listdir(os.environ["TMPDIR"]), *sys.modules})


KEPT: list[object] = []


@function
def keep(secret: dict[str, str]) -> int:
    """Leaves its argument in memory."""
    KEPT.append(secret)
    return len(KEPT)


@function
def search(parts: list[str]) -> list[str]:
    """Texts in this process's memory that have the joined parts in them; our own argument has not."""
    wanted = "".join(parts)
    gc.unfreeze()
    found, seen, held = set(), set(), gc.get_objects()
    while held:
        one = held.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, str) and wanted in one and one != wanted:
            found.add(one)
        held += gc.get_referents(one)  # a dict of texts is no object of the collector's own
    return sorted(found)


@function
def wait(seconds: float) -> int:
    sleep(seconds)
    return os.getpid()


@function
async def wait_async(value: int) -> int:
    import asyncio

    await asyncio.sleep(0.01)
    return value


@function
def leave(status: int) -> None:
    os._exit(status)


@function
def kill_self(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    time.sleep(60)


@function
def use_files() -> str:
    import shutil
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        first = Path(folder, "first")
        first.write_text("text")
        shutil.copy2(first, Path(folder, "second"))
        (Path(folder) / "inner").mkdir()
        shutil.move(Path(folder, "second"), Path(folder, "inner", "third"))
        return Path(folder, "inner", "third").read_text()


@function
def use_libraries() -> list[str]:
    """What functions commonly do, and must not be refused."""
    import decimal
    import json
    import sqlite3
    import threading
    import zoneinfo
    from concurrent.futures import ThreadPoolExecutor

    done = []
    with ThreadPoolExecutor(4) as pool:
        done.append(str(sum(pool.map(int, ["1", "2", "3"]))))
    with sqlite3.connect(":memory:") as database:
        done.append(str(database.execute("select 1 + 1").fetchone()[0]))
    done.append(json.dumps({"a": str(decimal.Decimal("1.10"))}))
    done.append(str(zoneinfo.ZoneInfo("UTC")))
    done.append(threading.current_thread().name)
    done.append(os.urandom(2).hex() and "random")
    return done


@function
def start_program(seconds: float) -> int:
    """A program that leaves its starter's session."""
    program = [sys.executable, "-c", f"import time; time.sleep({seconds})"]
    return subprocess.Popen(program, start_new_session=True).pid


@function
def run_program() -> str:
    return subprocess.run([sys.executable, "-c", "print('ran')"], check=True, capture_output=True, text=True).stdout


@function
def fill_memory(count: int, mebibytes: int) -> list[int]:
    """Programs that hold memory all at once; their exit statuses."""
    text = f"import time; x = bytearray({mebibytes} << 20); print(len(x), flush=True); time.sleep(60)"
    programs = [subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE) for _ in range(count)]
    for program in programs:
        assert program.stdout is not None
        program.stdout.readline()
    for program in programs:
        program.kill()
    return [program.wait() for program in programs]
