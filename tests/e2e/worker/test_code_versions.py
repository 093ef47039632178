"""Versions of one file with real executors: pinned, two at once, reloaded, refused; the worker imports none of it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from callyard import CallError, ErrorKind, UsageError, Worker, Yard
from callyard.functions.audit.policies import BundleView
from callyard.ids import ExecutorId
from callyard.wire.messages import WorkerMessage
from callyard.worker.audit_gate import AuditRefused
from callyard.worker.link import ExecutorLink
from callyard.worker.loading import Registry
from tests.e2e.processes import WAIT_S, children_of, is_alive

SOURCE = """
import os
from pathlib import Path
from callyard import function, sleep
from part import VERSION

@function(idempotent=True)
def look(n: int = 0, seconds: float = 0.0, until: str = "") -> list:
    "What a call sees of its own version, some of it only when it runs."
    sleep(seconds)
    while until and not os.path.exists(until):
        sleep(0.01)
    from late import LATE
    data = (Path(__file__).parent / "data.txt").read_text()
    return [VERSION, LATE, data, os.getpid(), str(Path(__file__).parent)]
"""


def write(folder: Path, version: str) -> Path:
    (folder / "part.py").write_text(f"VERSION = {version!r}\n")
    (folder / "late.py").write_text(f"LATE = {version!r}\n")
    (folder / "data.txt").write_text(version)
    path = folder / "tools.py"
    path.write_text(SOURCE)
    return path


def quiet(*_: object) -> None:
    """Drop what executors print."""


def registry_of(path: Path) -> Registry:
    return Registry.for_target(path, include=["data.txt"])


async def wait_until(condition: Any) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


def folders(worker: Worker) -> set[str]:
    assert worker._folder is not None
    return {path.name for path in (worker._folder.path / "bundles").iterdir()}


def count_code_sent(worker: Worker) -> Counter[tuple[ExecutorId, str]]:
    """How often code goes out, by executor and digest, from now on: because it was asked for, or before calls come."""
    pool = worker._pool
    assert pool is not None
    sent: Counter[tuple[ExecutorId, str]] = Counter()
    send = pool._send_after_code

    def send_after_code(link: ExecutorLink, path: Path, last: WorkerMessage) -> None:
        sent[link.executor_id, path.name] += 1
        send(link, path, last)

    pool._send_after_code = send_after_code  # type: ignore[method-assign]
    return sent


@pytest.mark.requirement("X40")
@pytest.mark.requirement("X84")
async def test_an_edit_changes_nothing_in_a_running_task(tmp_path: Path) -> None:
    path = write(tmp_path, "one")
    async with Worker(registry_of(path), executors=2, on_output=quiet) as worker:
        sent = count_code_sent(worker)
        old = worker.registry.bundle.digest
        seen: list[list[Any]] = []
        results = worker.map("look", ({"n": n, "seconds": 0.002} for n in range(1_500)))
        async with aclosing(results):
            async for result in results:
                seen.append(result.value)
                if len(seen) == 100:
                    write(tmp_path, "two")
                    assert await worker.reload()
                if len(seen) == 200:
                    fresh = await worker.call("look")
        new = worker.registry.bundle.digest
        assert len(seen) == 1_500
        assert {tuple(values[:3]) for values in seen} == {("one",) * 3}
        assert {Path(values[4]).name for values in seen} == {old}
        assert fresh[:3] == ["two"] * 3
        assert Path(fresh[4]).name == new
        assert fresh[3] not in {values[3] for values in seen}, "two versions never share a process"
        # The executor that described the first version at the start never had to be sent it again.
        assert set(sent.values()) == {1}
        assert {digest for _, digest in sent} <= {old, new}
        await wait_until(lambda: folders(worker) == {new})
        pids = {values[3] for values in seen}
        await wait_until(lambda: not any(is_alive(pid) for pid in pids))
    assert not hasattr(sys.modules.get("tools"), "look"), "the worker never imports it"
    assert "part" not in sys.modules


@pytest.mark.requirement("X40")
async def test_two_versions_run_at_once_and_read_their_own_folder(tmp_path: Path) -> None:
    path = write(tmp_path, "one")
    async with Worker(registry_of(path), executors=2, on_output=quiet) as worker:
        slow = asyncio.ensure_future(worker.call("look", {"until": str(tmp_path / "go")}))
        await wait_until(lambda: worker.running())
        write(tmp_path, "two")
        assert await worker.reload()
        assert len(folders(worker)) == 2
        fast = await worker.call("look")
        assert not slow.done(), "both are in force at once"
        assert fast[:3] == ["two"] * 3
        (tmp_path / "go").touch()
        old = await slow
        assert old[:3] == ["one"] * 3, "the old one still imports and reads its own files"
        assert old[3] != fast[3]
        assert not os.path.exists(old[4]) or os.stat(old[4]).st_mode & 0o222 == 0


@pytest.mark.requirement("X40")
async def test_code_is_asked_for_once_per_digest_and_executor(tmp_path: Path) -> None:
    path = write(tmp_path, "one")
    async with Worker(registry_of(path), executors=3, spare_executors=0, on_output=quiet) as worker:
        sent = count_code_sent(worker)

        async def use_all() -> None:
            """Lists, until each of the three executors has run calls of the newest version, and once more."""
            pids: set[int] = set()
            async with asyncio.timeout(WAIT_S):
                while len(pids) < 3:
                    async for result in worker.map("look", ({"seconds": 0.01} for _ in range(300))):
                        pids.add(result.value[3])
                async for result in worker.map("look", ({"seconds": 0.01} for _ in range(300))):
                    pids.add(result.value[3])

        await use_all()
        described = 1
        assert sorted(sent.values()) == [1] * (3 - described)
        write(tmp_path, "two")
        assert await worker.reload()
        await use_all()
        assert set(sent.values()) == {1}
        new = worker.registry.bundle.digest
        assert sum(digest == new for _, digest in sent) == 3 + described


@pytest.mark.requirement("X40")
async def test_a_version_that_does_not_load_leaves_the_old_one(tmp_path: Path) -> None:
    path = write(tmp_path, "one")
    async with Yard(registry_of(path), executors=1, on_output=quiet) as yard:
        for text, message in (
            (SOURCE + "\nundefined_name\n", r"tools\.py:1\d: NameError: name 'undefined_name'"),
            (SOURCE + "\ndef broken(:\n", r"tools\.py:1\d: SyntaxError"),
            (SOURCE + "\nimport os; os._exit(3)\n", "ended its process: it exited with status 3"),
            ("x = 1\n", "no functions"),
        ):
            path.write_text(text)
            with pytest.raises(UsageError, match=message):
                await yard.reload()
            assert (await yard.call("look"))[0] == "one"
        write(tmp_path, "two")
        assert await yard.reload() is True
        assert await yard.reload() is False
        assert (await yard.call("look"))[0] == "two"
        assert [spec.name for spec in yard.worker.functions()] == ["look"]
        path.write_text(SOURCE.replace("def look", "def watch"))
        assert await yard.reload()
        with pytest.raises(UsageError, match="watch"):
            await yard.call("look")
        assert (await yard.call("watch"))[0] == "two"


@pytest.mark.requirement("X92")
async def test_one_executor_and_two_versions_that_both_have_calls(tmp_path: Path) -> None:
    """A long task of the old version and short ones of the new, in turn on the only executor: all end, by processes
    that each served one version."""
    path = write(tmp_path, "one")
    settings: dict[str, Any] = {"executors": 1, "task_max_inflight_calls": 4, "max_outstanding_batches": 8}
    async with Worker(registry_of(path), on_output=quiet, **settings) as worker:
        served: dict[int, set[str]] = {}

        def note(value: list[Any]) -> str:
            served.setdefault(value[3], set()).add(value[0])
            return str(value[0])

        enough = threading.Event()

        def rows() -> Iterator[dict[str, float]]:
            while not enough.is_set():
                yield {"seconds": 0.02}

        async def collect() -> list[str]:
            return [note(result.value) async for result in worker.map("look", rows())]

        listing = asyncio.ensure_future(collect())
        await wait_until(lambda: worker.running())
        write(tmp_path, "two")
        assert await worker.reload()
        assert not listing.done()
        # It has calls ready all the time, and the new version's turn comes all the same.
        assert note(await worker.call("look")) == "two"
        assert note(await worker.call("look")) == "two"
        enough.set()
        assert set(await listing) == {"one"}
        assert note(await worker.call("look")) == "two"
        assert all(len(versions) == 1 for versions in served.values()), served
        assert {next(iter(versions)) for versions in served.values()} == {"one", "two"}
        assert len(served) <= 20, "exchanged when needed, and not at every call"


@pytest.mark.requirement("X92")
async def test_two_versions_alternate_on_one_executor(tmp_path: Path) -> None:
    """Edited back and forth, with a task of each version at a time."""
    path = write(tmp_path, "zero")
    async with Worker(registry_of(path), executors=1, spare_executors=1, on_output=quiet) as worker:
        pids = []
        for turn in range(4):
            version = f"v{turn % 2}"
            write(tmp_path, version)
            assert await worker.reload()
            value = await worker.call("look")
            assert value[:3] == [version] * 3
            pids.append(value[3])
        assert len(set(pids)) == 4
        await wait_until(lambda: len(folders(worker)) == 1)


# --- describing without a worker ----------------------------------------------------------------------------------


@pytest.mark.requirement("D6")
@pytest.mark.requirement("D50")
async def test_load_describes_in_an_executor(tmp_path: Path) -> None:
    path = write(tmp_path, "one")
    marker = tmp_path / "imported_by"
    path.write_text(f"import os\nopen({str(marker)!r}, 'a').write(f'{{os.getpid()}}\\n')\n{SOURCE}")
    seen: list[BundleView] = []

    def judge(bundle: BundleView) -> bool:
        assert not marker.exists(), "it is judged before it is imported"
        seen.append(bundle)
        return True

    registry = await Registry.aload(path, audit=judge, include=["data.txt"], on_output=quiet)
    assert registry.names() == ["look"]
    assert registry.get("look").promises.idempotent
    assert set(seen[0].files) == {"data.txt", "late.py", "part.py", "tools.py"}
    pids = {int(pid) for pid in marker.read_text().split()}
    assert len(pids) == 1
    assert os.getpid() not in pids
    assert not any(is_alive(pid) for pid in pids)
    async with Worker(registry, executors=1, on_output=quiet) as worker:
        assert (await worker.call("look"))[0] == "one"
        write(tmp_path, "two")
        assert await worker.reload()
        assert (await worker.call("look"))[0] == "two"
    with pytest.raises(UsageError, match="aload"):
        Registry.load(path)


@pytest.mark.requirement("D50")
def test_load_without_an_event_loop(tmp_path: Path) -> None:
    path = write(tmp_path, "one")
    assert Registry.load(path, include=["data.txt"], on_output=quiet).names() == ["look"]
    path.write_text("import subprocess\n" + SOURCE)
    with pytest.raises(AuditRefused, match=r"tools\.py:1: imports subprocess"):
        Registry.load(path, audit="ast", on_output=quiet)
    path.write_text("undefined_name\n")
    with pytest.raises(UsageError, match=r"tools\.py:1: NameError"):
        Registry.load(path, on_output=quiet)
    assert children_of(os.getpid()) == []


# --- audit --------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X41")
async def test_a_command_judges_before_anything_is_imported(tmp_path: Path) -> None:
    path = write(tmp_path, "one")
    marker = tmp_path / "imported"
    path.write_text(f"open({str(marker)!r}, 'w')\n{SOURCE}")
    review = tmp_path / "review.py"
    review.write_text(
        "import json, pathlib, sys\n"
        "text = (pathlib.Path(sys.argv[1]) / 'part.py').read_text()\n"
        "print(json.dumps({'verdict': 'refuse', 'reasons': ['part.py:1: two']} if 'two' in text else"
        " {'verdict': 'accept'}))\n"
    )
    log = tmp_path / "audit.jsonl"
    policy = [sys.executable, "-I", review]
    async with Worker(registry_of(path), executors=1, audit=policy, audit_log=log, on_output=quiet) as worker:
        assert marker.exists()
        assert (await worker.call("look"))[0] == "one"
        write(tmp_path, "two")
        path.write_text(f"open({str(marker)!r} + '2', 'w')\n{SOURCE}")
        with pytest.raises(AuditRefused, match=r"part\.py:1: two"):
            await worker.reload()
        assert not (tmp_path / "imported2").exists()
        assert (await worker.call("look"))[0] == "one"
    verdicts = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(v["verdict"], v["reasons"]) for v in verdicts] == [("accepted", []), ("refused", ["part.py:1: two"])]


@pytest.mark.requirement("X41")
async def test_refused_calls_are_denied(tmp_path: Path) -> None:
    path = tmp_path / "tools.py"
    path.write_text("import subprocess\ndef f(x: int = 1) -> int: return x\n")
    registry = await Registry.aload(path, on_output=quiet)
    async with Worker(registry, executors=1, audit="ast", on_output=quiet) as worker:
        results = [result async for result in worker.map("f", range(100))]
        assert {(r.error.kind, r.error.attempts) for r in results if r.error} == {(ErrorKind.DENIED, 0)}
        assert len(results) == 100
        with pytest.raises(CallError, match="imports subprocess"):
            await worker.call("f")


def callyard(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("callyard")), *map(str, words)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.mark.requirement("X41")
def test_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "tools.py"
    path.write_text("import subprocess\nprint('imported')\ndef f(x: int = 1) -> int: return x\n")
    (tmp_path / "rows.jsonl").write_text("[1]\n")
    log = tmp_path / "audit.jsonl"
    for words in (["call", "tools.py:f"], ["list", "tools.py"], ["run", "tools.py:f", "rows.jsonl"]):
        refused = callyard(*words, "--audit", "ast", "--audit-log", log, cwd=tmp_path)
        assert refused.returncode == 2, refused.stderr
        assert "tools.py:1: imports subprocess, which is denied" in refused.stderr
        assert "imported" not in refused.stderr + refused.stdout
    allowed = callyard("call", "tools.py:f", "--audit", "ast: allow=subprocess", "--audit-log", log, cwd=tmp_path)
    assert (allowed.returncode, allowed.stdout) == (0, "1\n"), allowed.stderr
    by_command = callyard("call", "tools.py:f", "--audit", f"cmd: {sys.executable} -c exit(1)", cwd=tmp_path)
    assert by_command.returncode == 2
    assert "refused by" in by_command.stderr
    wrong = callyard("call", "tools.py:f", "--audit", "strict", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "unknown audit policy 'strict'" in wrong.stderr
    verdicts = [json.loads(line)["verdict"] for line in log.read_text().splitlines()]
    assert verdicts == ["refused", "refused", "refused", "accepted"]


@pytest.mark.requirement("X63")
async def test_an_executor_that_takes_anothers_place_loads_the_code_before_it_takes_calls(tmp_path: Path) -> None:
    """A call that is bound where the code still loads cannot be stopped in time, which would cost that process, too."""
    path = tmp_path / "tools.py"
    path.write_text(
        "import time\nfrom callyard import function, sleep\ntime.sleep(1)\n@function\ndef look(): return 1\n"
        "@function\ndef stay(): sleep(60)\n"
    )
    async with Worker(path, executors=1, spare_executors=0, on_output=quiet) as worker:
        stopped = await worker.call_result("stay", deadline_ms=100)
        assert stopped.error is not None
        await wait_until(lambda: [slot.executor_id for slot in worker.slots()] == ["exec-2"])
        while not (result := await worker.call_result("look", deadline_ms=50)).ok:
            assert result.attempts == 0
        assert [slot.executor_id for slot in worker.slots()] == ["exec-2"], "none of them cost it its life"
