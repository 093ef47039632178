"""The gate before a bundle: asked once, outside the loop, in time, logged; and what a worker makes of a refusal."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from pathlib import Path

import pytest

from callyard import CallError
from callyard.errors import ErrorKind, Outcome, UsageError
from callyard.functions.audit.log import AuditLog
from callyard.functions.audit.policies import AllowPolicy, AstPolicy, BundleView, CommandPolicy, to_policy
from callyard.functions.audit.verdict import Verdict
from callyard.functions.registry import Registry
from callyard.ids import Digest, ExecutorId
from callyard.wire.messages import Describe
from callyard.worker.audit_gate import AuditGate, AuditRefused
from callyard.worker.worker import Worker
from tests.e2e.processes import is_alive

from .conftest import MakeWorker
from .fakes import WAIT_S, FakeSpawner
from .test_code_view import complete, edit, folders, wait_until

pytestmark = pytest.mark.requirement("X41")

LONG_MS = 60_000


def view(digest: str = "d", folder: Path = Path("/nowhere")) -> BundleView:
    return BundleView(digest=Digest(digest), target="m.py", files={"m.py": b"import subprocess\n"}, folder=folder)


def gate(audit: object, log: Path | None = None, *, timeout_ms: int = LONG_MS) -> AuditGate:
    opened = None if log is None else AuditLog(log)
    return AuditGate(to_policy(audit), opened, timeout_ms=timeout_ms, base_backoff_ms=1, name="m.py")


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- the gate -----------------------------------------------------------------------------------------------------


async def test_asked_once_however_many_wait() -> None:
    asked: list[str] = []
    go = threading.Event()

    def judge(bundle: BundleView) -> bool:
        asked.append(bundle.digest)
        return go.wait(WAIT_S)

    judging = gate(judge)
    waiting = [asyncio.ensure_future(judging.admit(view())) for _ in range(20)]
    await wait_until(lambda: bool(asked))
    waiting[0].cancel()  # one who gives up takes nothing from the others
    go.set()
    first, *others = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(first, asyncio.CancelledError)
    assert len(set(map(id, others))) == 1
    assert (await judging.admit(view())).refusal is None
    assert asked == ["d"]
    await judging.admit(view("e"))
    assert asked == ["d", "e"]


async def test_a_sync_policy_never_blocks_the_loop() -> None:
    loop_ran = threading.Event()

    def judge(bundle: BundleView) -> bool:
        return loop_ran.wait(WAIT_S)

    admitting = asyncio.ensure_future(gate(judge).admit(view()))
    await asyncio.sleep(0.01)
    loop_ran.set()
    assert (await admitting).refusal is None


async def test_no_policy_lets_everything_pass() -> None:
    admission = await gate(None).admit(view())
    assert (admission.audit_id, admission.refusal) == ("", None)


async def test_a_refusal_says_why(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    judging = gate(AstPolicy(), path)
    admission = await judging.admit(view())
    failure = admission.refusal
    assert failure is not None
    assert (failure.kind, failure.outcome, failure.attempts) == (ErrorKind.DENIED, Outcome.NOT_RUN, 0)
    assert "m.py:1: imports subprocess, which is denied" in failure.message
    assert failure.details["reason"] == "audit"
    assert failure.details["audit"] == admission.audit_id
    assert await judging.admit(view()) is admission
    (line,) = lines_of(path)
    assert (line["verdict"], line["digest"], line["target"]) == ("refused", "d", "m.py")
    assert (line["policy"], line["audit"]) == (AstPolicy().policy_id, admission.audit_id)
    assert line["reasons"] == ["m.py:1: imports subprocess, which is denied"]


async def test_an_async_policy() -> None:
    async def judge(bundle: BundleView) -> Verdict:
        await asyncio.sleep(0)
        return Verdict(accepted=bundle.target == "m.py")

    assert (await gate(judge).admit(view())).refusal is None


def raising(bundle: BundleView) -> bool:
    raise RuntimeError("no licence")


def leaving(bundle: BundleView) -> bool:
    sys.exit(0)


def forgetful(bundle: BundleView) -> None:
    return None


async def raising_async(bundle: BundleView) -> bool:
    raise RuntimeError("no licence")


@pytest.mark.parametrize(
    ("judge", "told"),
    [
        (raising, "RuntimeError: no licence"),
        (leaving, "SystemExit"),
        (forgetful, "expected a Verdict or a bool, got None"),
        (raising_async, "RuntimeError: no licence"),
        (["/nowhere/review"], "cannot be started"),
        ([sys.executable, "-c", "exit(3)"], "ended with status 3"),
    ],
)
@pytest.mark.requirement("X70")
async def test_what_gives_no_verdict_three_times_is_a_refusal(judge: object, told: str, tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    failure = (await gate(judge, path).admit(view())).refusal
    assert failure is not None
    assert failure.kind is ErrorKind.DENIED
    assert "no verdict in 3 tries" in failure.message
    assert told in failure.message
    assert [line["verdict"] for line in lines_of(path)] == ["refused"]


@pytest.mark.requirement("X70")
async def test_no_verdict_is_tried_again_and_a_late_one_counts_for_nothing() -> None:
    tries: list[int] = []
    release = threading.Event()

    def judge(bundle: BundleView) -> bool:
        tries.append(len(tries))
        if len(tries) < 3:
            release.wait(WAIT_S)
            return False
        return True

    judging = gate(judge, timeout_ms=200)
    assert (await judging.admit(view())).refusal is None
    assert tries == [0, 1, 2]
    release.set()
    await asyncio.sleep(0.01)
    assert (await judging.admit(view())).refusal is None


async def test_half_a_look_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """The review ends early when its time is up; what it had not found by then is no acceptance."""

    def review_slowly(self: AstPolicy, bundle: BundleView, stop: threading.Event) -> Verdict:
        assert stop.wait(WAIT_S)
        return Verdict(accepted=True)

    monkeypatch.setattr(AstPolicy, "judge", review_slowly)
    assert (await gate("ast", timeout_ms=20).admit(view())).refusal is not None


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.requirement("X70")
async def test_silence_is_a_refusal_in_the_end(is_async: bool) -> None:
    release = threading.Event()
    tries: list[int] = []

    def judge(bundle: BundleView) -> bool:
        tries.append(1)
        return release.wait(WAIT_S)

    async def judge_async(bundle: BundleView) -> bool:
        tries.append(1)
        await asyncio.sleep(LONG_MS)
        return True

    judging = gate(judge_async if is_async else judge, timeout_ms=30)
    failure = (await judging.admit(view())).refusal
    assert failure is not None
    assert "none within audit_timeout_ms=30" in failure.message
    assert len(tries) == 3
    release.set()
    await judging.admit(view())
    assert len(tries) > 3, "silence is no verdict, so it is not kept"


def sleeper(folder: Path) -> list[str]:
    source = f"import os, time; open({str(folder / 'pid')!r}, 'a').write(f'{{os.getpid()}}\\n'); time.sleep(600)"
    return [sys.executable, "-I", "-c", source]


async def test_a_command_that_is_late_is_killed(tmp_path: Path) -> None:
    failure = (await gate(sleeper(tmp_path), timeout_ms=1_000).admit(view())).refusal
    assert failure is not None
    assert "none within audit_timeout_ms=1000" in failure.message
    pids = (tmp_path / "pid").read_text().split() if (tmp_path / "pid").exists() else []
    await wait_until(lambda: not any(is_alive(int(pid)) for pid in pids))


async def test_closing_stops_what_is_asked(tmp_path: Path) -> None:
    judging = gate(sleeper(tmp_path))
    admitting = asyncio.ensure_future(judging.admit(view()))
    await wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith("\n"))
    pid = int((tmp_path / "pid").read_text())
    await judging.close()
    with pytest.raises(UsageError, match="closed"):
        await admitting
    assert not is_alive(pid)
    with pytest.raises(UsageError, match="closed"):
        await judging.admit(view())


async def test_what_cannot_be_logged_is_not_admitted(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    judging = gate(AllowPolicy(), path)
    path.unlink()
    path.mkdir()
    with pytest.raises(UsageError, match="cannot be written"):
        await judging.admit(view())
    path.rmdir()
    assert (await judging.admit(view())).refusal is None
    assert len(lines_of(path)) == 1


# --- the worker ---------------------------------------------------------------------------------------------------


def received_describes(spawner: FakeSpawner) -> int:
    return sum(isinstance(message, Describe) for process in spawner.processes for message in process.received)


@pytest.mark.requirement("D50")
async def test_nothing_is_described_before_it_is_accepted(make_worker: MakeWorker) -> None:
    spawner = FakeSpawner(answers=complete)
    seen: list[tuple[int, bytes, str]] = []

    def judge(bundle: BundleView) -> bool:
        time.sleep(0)
        (name,) = bundle.files
        seen.append((received_describes(spawner), bundle.files[name], bundle.target))
        assert (bundle.folder / name).read_bytes() == bundle.files[name]
        return True

    async with make_worker(spawner, audit=judge) as worker:
        assert await worker.call("effect", []) == 1
    assert seen == [(0, b"def effect(): ...\n", "m.py")]
    assert received_describes(spawner) == 1


async def test_a_refused_bundle_is_not_described(target: Path, tmp_path: Path) -> None:
    spawner = FakeSpawner()
    target.write_text("import subprocess\ndef effect(): ...\n")
    log = tmp_path / "audit.jsonl"
    worker = Worker(target, executors=1, spare_executors=0, spawner=spawner, audit="ast", audit_log=log)
    with pytest.raises(
        AuditRefused, match=r"m\.py is refused by the audit policy 'ast:\w+':\n    m\.py:1: imports"
    ) as e:
        await worker.start()
    assert e.value.failure.kind is ErrorKind.DENIED
    assert received_describes(spawner) == 0
    assert all(process.returncode is not None for process in spawner.processes)
    assert [line["verdict"] for line in lines_of(log)] == ["refused"]


async def test_calls_of_a_refused_bundle_are_denied_and_never_sent(
    make_worker: MakeWorker, target: Path, tmp_path: Path
) -> None:
    """Described before, under no policy: the names are known, and each call gets its own refusal."""
    spawner = FakeSpawner(answers=complete)
    target.write_text("import subprocess\ndef effect(): ...\n")
    registry = Registry.for_target(target)
    plain = Worker(registry, executors=1, spare_executors=0, spawner=FakeSpawner())
    await plain.start()
    await plain.close(drain=False)
    assert registry.is_described
    worker = Worker(registry, executors=1, spare_executors=0, spawner=spawner, audit="ast")
    await worker.start()
    try:
        with pytest.raises(CallError) as caught:
            await worker.call("effect", [])
        failure = caught.value.failure
        assert (failure.kind, failure.attempts, failure.outcome) == (ErrorKind.DENIED, 0, Outcome.NOT_RUN)
        assert failure.details["reasons"] == ["m.py:1: imports subprocess, which is denied"]
        results = [result async for result in worker.map("effect", [[], [], [float("nan")]])]
        errors = [result.error for result in results]
        assert [error.kind for error in errors if error] == [ErrorKind.DENIED, ErrorKind.DENIED, ErrorKind.SCHEMA]
        assert [error.attempts for error in errors if error] == [0, 0, 0]
        assert not any(process.executes for process in spawner.processes)
    finally:
        await worker.close(drain=False)


async def test_a_refused_version_leaves_the_old_one_in_force(
    make_worker: MakeWorker, target: Path, tmp_path: Path
) -> None:
    spawner = FakeSpawner(answers=complete)
    log = tmp_path / "audit.jsonl"
    async with make_worker(spawner, audit="ast", audit_log=log) as worker:
        old = worker.registry.bundle.digest
        target.write_text("import subprocess\ndef effect(): ...\n")
        for _ in range(2):
            with pytest.raises(AuditRefused, match="imports subprocess"):
                await worker.reload()
        assert await worker.call("effect", []) == 1
        assert received_describes(spawner) == 1
        await wait_until(lambda: folders(worker) == {old})
        edit(target, "harmless")
        assert await worker.reload()
        assert await worker.call("effect", []) == 1
    assert [line["verdict"] for line in lines_of(log)] == ["accepted", "refused", "accepted"]


async def test_views_carry_the_verdicts_id(make_worker: MakeWorker, tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    async with make_worker(FakeSpawner(answers=complete), audit_log=log) as worker:
        digest = worker.registry.bundle.digest
        (line,) = lines_of(log)
        assert (line["policy"], line["digest"]) == ("allow", digest)
        assert worker._view.audits == {digest: line["audit"]}
        for function in ("effect", "safe"):
            await worker.call(function, [])
        process = worker._pool._executors[ExecutorId("exec-1")].process
        assert [execute.payload.audit for execute in process.executes] == [line["audit"]] * 2
    async with make_worker(FakeSpawner()) as worker:
        assert worker._view.audits == {}


async def test_closing_while_the_first_audit_runs(target: Path, tmp_path: Path) -> None:
    worker = Worker(
        target, executors=1, spare_executors=0, spawner=FakeSpawner(), audit=CommandPolicy(sleeper(tmp_path))
    )
    starting = asyncio.ensure_future(worker.start())
    await wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith("\n"))
    pid = int((tmp_path / "pid").read_text())
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not is_alive(pid)


def test_a_bad_policy_is_refused_at_once(target: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown audit policy"):
        Worker(target, audit="strict")
    with pytest.raises(UsageError, match="cannot be written"):
        Worker(target, audit_log=tmp_path)
    with pytest.raises(UsageError, match="audit_timeout_ms"):
        Worker(target, audit_timeout_ms=0)
