"""Pinned views, bundles that come and go, and which executors change their bundle: by fakes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from callyard.errors import ErrorKind, UsageError
from callyard.functions.bundle import Bundle
from callyard.ids import CallId, Digest, ExecutorId, RequestId, Tenant
from callyard.scheduler import FunctionTarget
from callyard.scheduler.placement import DEFAULT_POOL, Placement
from callyard.wire.messages import (
    CallWaiting,
    CallWaitingPayload,
    CodeRequest,
    Describe,
    Described,
    DescribedPayload,
    ResumeCall,
    WaitKind,
    WireError,
)
from callyard.worker.code_view import PATIENCE_MS, BundleShelf, CodeView, Standing, choose_replaced
from callyard.worker.worker import Worker

from .conftest import MakeWorker
from .fakes import WAIT_S, ExecuteCall, FakeProcess, FakeSpawner, begin

A, B, C = Digest("a"), Digest("b"), Digest("c")


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)


def edit(target: Path, text: str) -> None:
    target.write_text(f"def effect(): ...\n# {text}\n")


def folders(worker: Worker) -> set[str]:
    assert worker._folder is not None
    return {path.name for path in (worker._folder.path / "bundles").iterdir()}


# --- views --------------------------------------------------------------------------------------------------------


def target(name: str, digest: Digest = A) -> FunctionTarget:
    return FunctionTarget(function_id=name, digest=digest, entry_selector=f"m:{name}")  # type: ignore[arg-type]


@pytest.mark.requirement("X40")
def test_a_view_is_a_copy() -> None:
    targets = {"f": target("f")}
    view = CodeView(A, targets, audit_id="audit-1")
    targets["g"] = target("g")
    assert list(view) == ["f"]
    assert len(view) == 1
    assert "g" not in view
    assert view.get("f") is view["f"]
    assert view.get("g") is None
    hurried = view.with_budget(50)
    assert (hurried["f"].budget_ms, view["f"].budget_ms) == (50, None)
    assert (hurried.digest, hurried.audits, hurried.refusal) == (A, {A: "audit-1"}, None)
    assert CodeView(A, {}).audits == {}


# --- the shelf ----------------------------------------------------------------------------------------------------


class Retired:
    """Executors that go when the test says so."""

    def __init__(self) -> None:
        self.asked: list[Digest] = []
        self.gone = asyncio.Event()

    async def __call__(self, digest: Digest) -> None:
        self.asked.append(digest)
        await self.gone.wait()


@pytest.mark.requirement("X40")
async def test_a_folder_goes_with_the_last_pin_and_after_its_executors(tmp_path: Path) -> None:
    retired = Retired()
    shelf = BundleShelf(tmp_path / "bundles", retired)
    bundle = Bundle("m", {"m.py": b"x = 1\n"})
    path = await shelf.put(bundle)
    assert (path / "m.py").stat().st_mode & 0o222 == 0, "read-only"
    shelf.pin(bundle.digest)
    shelf.unpin(bundle.digest)
    assert shelf.find(bundle.digest) == (path, "m")
    shelf.unpin(bundle.digest)
    assert shelf.find(bundle.digest) is None
    assert len(shelf) == 0
    await asyncio.sleep(0)
    assert retired.asked == [bundle.digest]
    assert path.exists(), "its executors have not gone yet"
    retired.gone.set()
    await shelf.wait_idle()
    assert list((tmp_path / "bundles").iterdir()) == []


@pytest.mark.requirement("X40")
async def test_a_version_that_comes_back_while_it_leaves_stays(tmp_path: Path) -> None:
    retired = Retired()
    shelf = BundleShelf(tmp_path / "bundles", retired)
    bundle = Bundle("m", {"m.py": b"x = 1\n"})
    await shelf.put(bundle)
    shelf.unpin(bundle.digest)
    again = await shelf.put(bundle)
    retired.gone.set()
    await shelf.wait_idle()
    assert (again / "m.py").read_bytes() == b"x = 1\n"
    assert shelf.find(bundle.digest) == (again, "m")


async def test_a_bundle_that_cannot_be_written_is_not_held(tmp_path: Path) -> None:
    retired = Retired()
    retired.gone.set()
    (tmp_path / "bundles").write_text("a file")
    shelf = BundleShelf(tmp_path / "bundles", retired)
    with pytest.raises(UsageError, match="cannot be written"):
        await shelf.put(Bundle("m", {"m.py": b"x = 1\n"}))
    assert len(shelf) == 0
    await shelf.wait_idle()


# --- who gives way ------------------------------------------------------------------------------------------------


def place(digest: Digest) -> Placement:
    return Placement(DEFAULT_POOL, digest)


def stand(*standings: tuple[Digest | None, int]) -> list[Standing]:
    return [
        Standing(ExecutorId(f"exec-{n}"), digest and place(digest), load)
        for n, (digest, load) in enumerate(standings, 1)
    ]


@pytest.mark.requirement("X92")
@pytest.mark.parametrize(
    ("standings", "unmet_ms", "coming", "chosen"),
    [
        pytest.param(stand((A, 0)), {}, 0, [], id="nobody waits"),
        pytest.param(stand((A, 0)), {B: 0}, 0, ["exec-1"], id="idle, and not needed"),
        pytest.param(stand((A, 3)), {B: 0}, 0, ["exec-1"], id="busy, but nothing of its bundle is ready: drained"),
        pytest.param(stand((A, 3)), {A: 9, B: 0}, 0, [], id="its bundle has calls ready: not yet"),
        pytest.param(stand((A, 3)), {A: 9, B: PATIENCE_MS}, 0, ["exec-1"], id="waited long enough"),
        pytest.param(stand((A, 0), (None, 0)), {B: 0}, 0, [], id="one is bound to none"),
        pytest.param(stand((A, 0)), {B: 0}, 1, [], id="one is coming"),
        pytest.param(stand((A, 0), (A, 0)), {B: 0, C: 0}, 1, ["exec-1"], id="one is coming, two bundles wait"),
        pytest.param(stand((A, 0), (B, 9)), {B: 0}, 0, [], id="it has an executor: no hurry"),
        pytest.param(stand((A, 0), (B, 9)), {B: PATIENCE_MS}, 0, ["exec-1"], id="too few for too long: an idle one"),
        pytest.param(stand((A, 1), (B, 9)), {B: 9_999}, 0, [], id="too few, but nobody is idle"),
        pytest.param(stand((A, 5), (A, 2), (C, 1)), {B: 0}, 0, ["exec-2"], id="of the bundle with the most"),
        pytest.param(stand((A, 1), (C, 0)), {B: 0}, 0, ["exec-2"], id="idle before busy"),
        pytest.param(
            stand((A, 1)), {B: 5_000, C: 2_000, A: 0}, 0, ["exec-1"], id="one for two: no more than there are"
        ),
    ],
)
def test_who_gives_way(
    standings: list[Standing], unmet_ms: dict[Digest, int], coming: int, chosen: list[ExecutorId]
) -> None:
    unmet = {place(digest): waited_ms for digest, waited_ms in unmet_ms.items()}
    assert choose_replaced(standings, unmet, coming) == chosen


@pytest.mark.requirement("X80", "X92")
def test_no_busy_executor_is_drained_for_subcalls() -> None:
    """It may hold calls that wait for them: it would never be empty."""
    unmet = {place(B): PATIENCE_MS}
    assert choose_replaced(stand((A, 3)), unmet, 0) == ["exec-1"]
    assert choose_replaced(stand((A, 3)), unmet, 0, {place(B)}) == []
    assert choose_replaced(stand((A, 3), (A, 0)), unmet, 0, {place(B)}) == ["exec-2"]


@pytest.mark.requirement("X92")
def test_tenants_give_way_as_bundles_do() -> None:
    a, b = (Placement(DEFAULT_POOL, A, Tenant(name)) for name in "ab")
    standings = [Standing(ExecutorId("exec-1"), a, 2), Standing(ExecutorId("exec-2"), a, 1)]
    assert choose_replaced(standings, {a: 5, b: 5}, 0) == []
    assert choose_replaced(standings, {a: 5, b: PATIENCE_MS}, 0) == ["exec-2"]


# --- the worker ---------------------------------------------------------------------------------------------------


def complete(process: FakeProcess, execute: ExecuteCall) -> None:
    process.complete(execute)


@pytest.mark.requirement("X40")
@pytest.mark.requirement("D6")
async def test_a_new_version_is_described_apart_and_the_old_one_leaves(make_worker: MakeWorker, target: Path) -> None:
    spawner = FakeSpawner(answers=complete)
    async with make_worker(spawner) as worker:
        assert await worker.call("effect", []) == 1
        old = worker.registry.bundle.digest
        edit(target, "two")
        assert await worker.reload() is True
        new = worker.registry.bundle.digest
        assert new != old
        first, apart = spawner.processes[:2]
        assert [m.payload.function_code_digest for m in apart.received if isinstance(m, Describe)] == [new]
        await wait_until(lambda: apart.returncode is not None and first.returncode is not None)
        assert await worker.call("effect", []) == 1
        await wait_until(lambda: folders(worker) == {new})
        assert await worker.reload() is False, "nothing changed"
        served = [{e.payload.function_code_digest for e in process.executes} for process in spawner.processes]
        assert served[:2] == [{old}, set()]
        assert {digest for digests in served[2:] for digest in digests} == {new}


@pytest.mark.requirement("X40")
@pytest.mark.requirement("X84")
async def test_a_task_keeps_its_view_while_another_version_runs(make_worker: MakeWorker, target: Path) -> None:
    """Two versions at once: the running task's next calls are the old version's, a new task's the new one's."""
    spawner = FakeSpawner()
    async with make_worker(spawner, executors=2, task_max_inflight_calls=1) as worker:
        old = worker.registry.bundle.digest
        results = []

        async def run_list() -> None:
            async for result in worker.map("effect", range(3)):
                results.append(result.value)

        running = asyncio.ensure_future(run_list())
        serving = spawner.processes
        await wait_until(lambda: any(process.executes for process in serving))
        (busy,) = [process for process in serving if process.executes]
        edit(target, "two")
        assert await worker.reload()
        new = worker.registry.bundle.digest
        call = asyncio.ensure_future(worker.call("effect", []))
        await wait_until(lambda: any(e.payload.function_code_digest == new for p in serving for e in p.executes))
        assert folders(worker) == {old, new}, "both in force"
        for count in (1, 2, 3):
            executes = await busy.wait_executes(count)
            busy.complete(executes[-1], b"%d" % count)
        await running
        assert results == [1, 2, 3]
        assert {e.payload.function_code_digest for e in busy.executes} == {old}
        await wait_until(lambda: folders(worker) == {new})
        await wait_until(lambda: busy.returncode is not None)
        (other,) = [p for p in serving if any(e.payload.function_code_digest == new for e in p.executes)]
        other.complete(other.executes[-1], b"5")
        assert await call == 5


@pytest.mark.requirement("X40")
async def test_a_list_that_was_opened_keeps_its_version_until_it_is_stopped(
    make_worker: MakeWorker, target: Path
) -> None:
    from callyard.worker.builders import IterableSource
    from callyard.worker.outputs import MemoryOutput

    async with make_worker(FakeSpawner(answers=complete)) as worker:
        old = worker.registry.bundle.digest
        run = worker.open_run("effect", IterableSource([[]]), MemoryOutput())
        edit(target, "two")
        assert await worker.reload()
        new = worker.registry.bundle.digest
        assert folders(worker) == {old, new}
        run.stop()
        run.stop()
        await wait_until(lambda: folders(worker) == {new})


@pytest.mark.requirement("X40")
async def test_a_version_that_does_not_load_leaves_the_old_one_in_force(make_worker: MakeWorker, target: Path) -> None:
    spawner = FakeSpawner(answers=complete)
    async with make_worker(spawner) as worker:
        old = worker.registry.bundle.digest

        def refuse(self: FakeProcess, request_id: RequestId, message: Describe) -> None:
            error = WireError(ErrorKind.INTERNAL, "m.py:2: NameError: name 'x' is not defined")
            self.send(Described(request_id, DescribedPayload(message.payload.function_code_digest, [], error)))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FakeProcess, "_describe", refuse)
            edit(target, "bad")
            with pytest.raises(UsageError, match=r"m\.py:2: NameError"):
                await worker.reload()
        target.write_text("def effect(:\n")
        with pytest.raises(UsageError, match=r"m\.py:1: SyntaxError"):
            await worker.reload()
        target.unlink()
        with pytest.raises(UsageError, match="cannot read"):
            await worker.reload()
        await wait_until(lambda: folders(worker) == {old})
        assert worker.registry.bundle.digest == old
        assert await worker.call("effect", []) == 1
        assert {e.payload.function_code_digest for p in spawner.processes for e in p.executes} == {old}


@pytest.mark.requirement("X40")
async def test_an_executor_that_dies_while_it_describes_leaves_the_old_one(
    make_worker: MakeWorker, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawner = FakeSpawner(answers=complete)
    async with make_worker(spawner) as worker:
        monkeypatch.setattr(FakeProcess, "_describe", lambda self, request_id, message: self.exit(3))
        edit(target, "two")
        with pytest.raises(UsageError, match="exited with status 3"):
            await worker.reload()
        assert await worker.call("effect", []) == 1


async def test_reload_of_a_worker_that_is_not_there(target: Path, make_worker: MakeWorker) -> None:
    with pytest.raises(UsageError, match="not started"):
        await Worker(target).reload()
    async with make_worker(FakeSpawner()) as worker:
        pass
    with pytest.raises(UsageError, match="closing"):
        await worker.reload()


async def test_closing_while_a_new_version_is_described(
    make_worker: MakeWorker, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawner = FakeSpawner()
    async with make_worker(spawner) as worker:
        monkeypatch.setattr(FakeProcess, "_describe", lambda self, request_id, message: None)
        edit(target, "two")
        reloading = asyncio.ensure_future(worker.reload())
        await (await spawner.wait_spawned(2)).wait_for(
            lambda: any(isinstance(message, Describe) for message in spawner.processes[1].received)
        )
        folder = worker._folder
        assert folder is not None
        await worker.close(drain=False)
        with pytest.raises(UsageError, match="closed"):
            await reloading
        assert not folder.path.exists()
        assert all(process.returncode is not None for process in spawner.processes)


@pytest.mark.requirement("X92")
async def test_one_executor_serves_two_bundles_in_turn_by_being_replaced(make_worker: MakeWorker, target: Path) -> None:
    """A long list of the old version and calls of the new one, on one executor: all end, and each process saw one."""
    spawner = FakeSpawner(answers=complete)
    async with make_worker(spawner, spare_executors=1) as worker:
        old = worker.registry.bundle.digest
        gate = asyncio.Event()

        async def collect() -> list[object]:
            rows = iter(range(50))
            values = []
            async for result in worker.map("effect", rows):
                values.append(result.value)
                await gate.wait()
            return values

        listing = asyncio.ensure_future(collect())
        await wait_until(lambda: any(process.executes for process in spawner.processes))
        edit(target, "two")
        assert await worker.reload()
        for _ in range(3):
            assert await worker.call("effect", []) == 1
        gate.set()
        assert await listing == [1] * 50
        for _ in range(3):
            assert await worker.call("effect", []) == 1
        served = [{e.payload.function_code_digest for e in process.executes} for process in spawner.processes]
        assert all(len(digests) <= 1 for digests in served)
        assert {digest for digests in served for digest in digests} == {old, worker.registry.bundle.digest}


@pytest.mark.requirement("X92")
async def test_a_busy_executor_is_drained_and_not_killed(make_worker: MakeWorker, target: Path) -> None:
    spawner = FakeSpawner()
    async with make_worker(spawner) as worker:
        call, busy, execute = await begin(worker, spawner)
        edit(target, "two")
        assert await worker.reload()
        other = asyncio.ensure_future(worker.call("effect", []))
        await wait_until(lambda: worker._pool is not None and any(x.retiring for x in worker._pool._executors.values()))
        assert busy.returncode is None
        busy.complete(execute, b"7")
        assert await call == 7
        new = await spawner.wait_spawned(3)  # the first, the one that described, and the replacement
        (second,) = await new.wait_executes(1)
        new.complete(second, b"8")
        assert await other == 8
        assert len(busy.executes) == 1


@pytest.mark.requirement("X92")
@pytest.mark.requirement("X65")
async def test_code_of_another_bundle_is_not_handed_out(make_worker: MakeWorker) -> None:
    spawner = FakeSpawner()
    async with make_worker(spawner) as worker:
        call, process, execute = await begin(worker, spawner)

        def ask(digest: Digest, number: int) -> None:
            payload = CallWaitingPayload(
                wait_kind=WaitKind.FUNCTION_CODE,
                task_id=execute.payload.task_id,
                attempt_seq=execute.payload.attempt_seq,
                function_code=CodeRequest(digest),
            )
            process.send(CallWaiting(CallId(execute.call_id), RequestId(f"code-{number}"), payload))

        ask(Digest("f" * 64), 1)
        ask(execute.payload.function_code_digest, 2)
        await process.wait_for(lambda: sum(isinstance(m, ResumeCall) for m in process.received) == 2)
        refused, answered = [m.payload for m in process.received if isinstance(m, ResumeCall)]
        assert refused.error is not None
        assert refused.error.kind is ErrorKind.NOT_FOUND
        place = msgspec.json.decode(answered.result)
        assert Path(place["path"]).name == worker.registry.bundle.digest
        process.complete(execute)
        assert await call == 1
