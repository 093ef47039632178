"""A run whose results go to a file, so that whatever ends it, it can go on.

    rows ─▶ RemainingRows ─▶ the task ─▶ MergedOutput ─▶ the output
              │ not: what stands, is lost                  ▲ what stands, what is lost, each at its place
              ▼
    admit: opened on disk, then sent             settle: output on disk, then noted        (one thread, both in one go)

`prepare` takes the output for this process and reads what an earlier process left, before any executor starts; `begin`
compares and plans; nothing on disk changes until the first rows are opened. Source: call-execution X87, X88.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from callyard.errors import UsageError
from callyard.functions.registry import Registry
from callyard.scheduler import CallResult
from callyard.worker.begun import BegunRows, read_begun
from callyard.worker.builders import CallSource
from callyard.worker.disk import DISK, Disk
from callyard.worker.feeds import close_rows
from callyard.worker.journal import Journal, Notes, Range, RunHeader, read_boot, read_journal, to_ranges
from callyard.worker.merged_output import MergedOutput
from callyard.worker.output_lock import OutputLock
from callyard.worker.outputs import (
    DurableOutput,
    Existing,
    OutputError,
    OutputSink,
    Place,
    check_format,
    check_output,
    follow_link,
    name_state,
    open_output,
    state_of,
)
from callyard.worker.remaining_rows import Ranges, RemainingRows
from callyard.worker.resume_plan import Plan, Planner
from callyard.worker.run_folder import RunFolder, find_run_folder
from callyard.worker.run_input import RunInput, is_stored

SETTLE_AFTER_S: Final = 0.1
"""Results are on disk, and noted, at most so long after they were written."""
COMMIT_AFTER_S: Final = 0.005
"""Between two notes; what is to be opened meanwhile goes into one."""
_TABLES: Final = "rows"
_CODE_CHANGED: Final = "the functions' files have changed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """What a run does about an output that is there."""

    existing: Existing = "refuse"
    resume: bool = False
    """Run the rows that have no result."""
    retry_failed: bool = False
    """Run the rows that failed."""
    accept_changes: bool = False
    """Go on though the rows or the functions are not those that the run began with."""

    def __post_init__(self) -> None:
        if self.goes_on and self.existing != "refuse":
            raise UsageError("resume and retry_failed go on with an output, so existing cannot say otherwise")

    @property
    def goes_on(self) -> bool:
        return self.resume or self.retry_failed


class Host(Protocol):
    """The worker that a run begins on."""

    @property
    def run_folder(self) -> RunFolder: ...

    registry: Registry


class FileRun:
    """One run to one file. Made by `prepare`; `close` gives everything back, whatever was done with it."""

    def __init__(self, path: Path, rerun: Rerun, format: str, source: str | None, disk: Disk) -> None:
        self.path = path
        self.state_path = state_of(path)
        self.plan = Plan()
        self.begun: BegunRows | None = None
        """Where the actor notes what it sends; from `begin` on."""
        self.is_finished = False
        """Nothing is left to go on with."""
        self.is_complete = False
        """Every row has its result, a failure maybe."""
        self._rerun = rerun
        self._format = format
        self._source = source
        self._input = None if source is None else RunInput(Path(source))
        self._disk = disk
        self._lock: OutputLock | None = None
        self._old: Notes | None = None
        self._lost: list[Range] = []
        self._doubtful: list[Range] = []
        self._doubtful_effects = False
        self._header: RunHeader | None = None
        self._journal: Journal | None = None
        self._writing = threading.Lock()
        """Held while the journal is written."""
        self._rows: RemainingRows | None = None
        self._output: DurableOutput | None = None
        self._sink: MergedOutput | None = None
        self._digest_noted = False
        self._waiting: list[tuple[int, Callable[[], None]]] = []
        """Batches that are to be opened: the row behind each, and what sends it."""
        self._wanted = asyncio.Event()
        self._working: asyncio.Task[None] | None = None
        self._settled: Place = (0, 0)
        self._settled_at_s = 0.0
        self.on_failed: Callable[[Exception], None] = lambda error: None
        """Told when the journal or the output cannot be written; nothing is sent from then on."""
        self._failed = False
        self._stopping = False
        self._aborted = False
        self._dirty = False
        """Results were taken since the last settling."""
        given = os.environ.get("PYTHONHASHSEED", "")
        self._drawn_seed = int(given) if given.isdecimal() else 1 + secrets.randbelow(2**32 - 2)
        self._folder: RunFolder | None = None

    # --- before the worker ---------------------------------------------------------------------------------------

    @classmethod
    def prepare(
        cls,
        output: str | os.PathLike[str],
        rerun: Rerun,
        *,
        source: str | os.PathLike[str] | None = None,
        disk: Disk = DISK,
    ) -> FileRun | None:
        """Take the output, and read what is known of it. None: it is no file of its own, so there is no going on.

        Raises UsageError for an output that is in use, that must not be replaced, or has nothing to go on with.
        """
        path = Path(output)
        format = check_format(output)
        existing: Existing = "append" if rerun.goes_on else rerun.existing
        check_output(output, existing=existing, source=source)
        if str(output) == "-" or (path.exists() and not (path.is_file() or format == "parquet")):
            if rerun.goes_on:
                raise UsageError(f"{output} is no file: there is nothing to resume there")
            return None
        run = cls(path, rerun, format, None if source is None or not is_stored(source) else str(source), disk)
        try:
            run._lock = OutputLock(follow_link(path), is_folder=format == "parquet")
            run._read()
        except BaseException:
            run.close()
            raise
        return run

    def _read(self) -> None:
        rerun = self._rerun
        notes = None
        if rerun.goes_on or rerun.existing == "append":
            notes = read_journal(self.state_path)
        if not rerun.goes_on:
            if notes is not None and not notes.complete:
                raise OutputError(
                    f"{self.path} has a run that was not finished, which --append would leave so: go on with it by"
                    f" --resume (in Python: resume=True), or remove {name_state(self.path)} to give it up"
                )
            return
        if notes is None:
            if self._is_empty():
                return  # a run that has not begun: it does now
            raise OutputError(
                f"{self.path} has no {name_state(self.path)}, so there is nothing to resume: its run has succeeded, or"
                " it is not of a run. Give --force to replace it, --append to add to it, or another name (in Python:"
                ' existing="overwrite" or "append")'
            )
        self._old = notes
        self._find_begun(notes)

    def _is_empty(self) -> bool:
        if self._format == "parquet":
            return not any(self.path.glob("*.parquet"))
        return self.path.stat().st_size == 0

    def _find_begun(self, notes: Notes) -> None:
        """Rows that were opened and not settled: which of them had begun?"""
        header = notes.run
        self._lost = list(header.lost)
        self._doubtful = list(header.doubtful)
        self._doubtful_effects = header.effects
        first, end = notes.settled_place[1], notes.opened
        if notes.ended or first >= end:
            return
        if notes.begun is not None:
            self._lost += notes.begun
            return
        folder = find_run_folder(header.folder) if header.boot and header.boot == read_boot() else None
        found = None if folder is None else read_begun(folder / _TABLES / header.run_id, folder / "marks", first, end)
        if found is None:
            self._doubtful.append((first, end))
            self._doubtful_effects |= bool(notes.effects)
        else:
            self._lost += to_ranges(found)

    @property
    def hash_seed(self) -> int:
        """`PYTHONHASHSEED` of the run's executors: the earlier generation's, the environment's, or a new one."""
        return self._drawn_seed if self._old is None else self._old.run.hash_seed

    @property
    def environment(self) -> dict[str, str]:
        """What executors are to be started with."""
        return {"PYTHONHASHSEED": str(self.hash_seed)}

    @property
    def is_resumed(self) -> bool:
        return self._old is not None

    # --- beginning -----------------------------------------------------------------------------------------------

    async def begin(
        self,
        worker: Host,
        rows: CallSource,
        function: str | None,
        shape: Mapping[str, Any],
        *,
        repeated: Sequence[str] = (),
        with_printed: bool = False,
        in_front: Callable[[OutputSink], OutputSink] = lambda output: output,
    ) -> tuple[CallSource, OutputSink]:
        """The rows to run, and where their results go. `shape`: options that the lines depend on, of JSON values.

        `in_front` gives a sink before the output, which sees new results and not those that stand. Raises UsageError
        for a run that is not the one that began, and closes the rows then.
        """
        try:
            return await self._begin(worker, rows, function, shape, repeated, with_printed, in_front)
        except BaseException:
            close_rows(rows)
            raise

    async def _begin(
        self,
        worker: Host,
        rows: CallSource,
        function: str | None,
        shape: Mapping[str, Any],
        repeated: Sequence[str],
        with_printed: bool,
        in_front: Callable[[OutputSink], OutputSink],
    ) -> tuple[CallSource, OutputSink]:
        rerun, old, folder, registry = self._rerun, self._old, worker.run_folder, worker.registry
        digest = str(registry.bundle.digest)
        shape = msgspec.json.decode(msgspec.json.encode(shape))  # as the journal gives it back: a tuple is a list there
        schema = b"{}" if function is None else bytes(registry.get(function).output_schema)

        def may_run_again(name: str) -> bool:
            if name not in registry:
                return True  # it never runs
            return registry.get(name).promises.idempotent

        def open_it(existing: Existing, start: Place | None) -> DurableOutput:
            return open_output(
                self.path,
                existing=existing,
                source=self._source,
                with_printed=with_printed,
                output_schema=schema,
                repeated=repeated,
                start=start,
                disk=self._disk,
            )

        self._folder = folder
        if self._input is not None:
            self._input.begin()
        if old is not None:
            await self._compare(old, function or "", digest, shape)
            planner = Planner(
                self.path,
                self._kept_path,
                old,
                self._disk,
                is_parquet=self._format == "parquet",
                output_schema=schema,
                repeated=repeated,
                with_printed=with_printed,
                resume=rerun.resume,
                retry_failed=rerun.retry_failed,
                function=function,
                may_run_again=may_run_again,
            )
            self.plan = await asyncio.to_thread(planner.plan)
            self._output = open_it("append", self.plan.start)
        else:
            self._output = open_it("overwrite" if rerun.goes_on else rerun.existing, None)
            self.plan.start = self._output.place
        self._settled = self.plan.start
        self._header = RunHeader(
            run_id=secrets.token_hex(8),
            generation=self._next_generation,
            function=function or "",
            digest=digest,
            shape=shape,
            input=None if self._input is None else self._input.mark(),
            hash_seed=self.hash_seed,
            boot=read_boot(),
            folder=folder.path.name,
            base=self.plan.start[0] if old is None else old.run.base,
            start=self.plan.start,
            kept="" if self.plan.kept is None else self.plan.kept.name,
            lost=tuple(self._lost),
            doubtful=tuple(self._doubtful),
            effects=self._doubtful_effects,
        )
        self.begun = BegunRows(folder.keep_for(self.state_path) / self._header.run_id, self._note_effects)
        lost: deque[CallResult] = deque()
        self._rows = RemainingRows(
            rows,
            self.plan,
            lost,
            in_ranges=(Ranges(self._lost), Ranges(self._doubtful)),
            may_run_again=lambda name: may_run_again(name) and not self._doubtful_effects,
            function=function,
            only_failed=old is not None and not rerun.resume,
            hashed=self._source is None,
            expected=None if old is None or rerun.accept_changes else old.rows_digest,
        )
        self._sink = MergedOutput(self._output, in_front, self.plan.kept, lost, self._note_written)
        return self._rows, self._sink

    @property
    def _kept_path(self) -> Path:
        return self.state_path.with_name(f"{self.state_path.name}.kept{self._next_generation % 2}")

    @property
    def _next_generation(self) -> int:
        return 1 if self._old is None else self._old.run.generation + 1

    async def _compare(self, old: Notes, function: str, digest: str, shape: Mapping[str, Any]) -> None:
        """Raises UsageError with all that is not as it was when the run began."""
        header = old.run
        if self._rerun.accept_changes:
            return
        changes: list[str] = []
        if header.function != function:
            changes.append(f"it called {header.function or 'a function named by each row'}, not {function or 'those'}")
        if header.digest != digest and not self._rerun.retry_failed:
            changes.append(_CODE_CHANGED)
        for name in sorted({*header.shape, *shape}):
            before, now = header.shape.get(name), shape.get(name)
            if before != now:
                changes.append(f"{name} was {_show(before)} and is {_show(now)}")
        if (header.input is None) != (self._input is None):
            changes.append(f"its rows came {'from a file' if header.input else 'from no file'}, unlike these")
        elif self._input is not None and header.input is not None:
            problem = await self._input.compare(header.input, old)
            changes += [problem] if problem else []
        if changes:
            only_code = changes == [_CODE_CHANGED]
            code = " or, after a change of the code, --retry-failed" if only_code else ""
            word = ", retry_failed=True" if only_code else ""
            raise UsageError(
                f"{self.path} cannot be resumed: {'; '.join(changes)}. Give --accept-changes{code} to go on all the"
                f' same, or --force to start anew (in Python: accept_changes=True{word}, existing="overwrite")'
            )

    # --- while it runs -------------------------------------------------------------------------------------------

    def admit(self, end_row: int, send: Callable[[], None]) -> None:
        """Have the rows before `end_row` noted as open, then send the batch that ends with them."""
        self._waiting.append((end_row, send))
        self._wanted.set()
        if self._working is None:
            self._working = asyncio.ensure_future(self._work())

    def _note_written(self) -> None:
        if not self._dirty:
            self._dirty = True
            self._wanted.set()

    async def _work(self) -> None:
        """Note what is opened at once, together with all that came meanwhile; what is settled now and then."""
        loop = asyncio.get_running_loop()
        committed_at_s = 0.0
        try:
            while not self._failed and not self._stopping:
                if not self._dirty:
                    await self._wanted.wait()
                if (pause_s := committed_at_s + COMMIT_AFTER_S - loop.time()) > 0:
                    await asyncio.sleep(pause_s)
                left_s = self._settled_at_s + SETTLE_AFTER_S - loop.time()
                if left_s > 0:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(left_s):
                            while not self._waiting and not self._stopping:
                                self._wanted.clear()
                                await self._wanted.wait()
                committed_at_s = loop.time()
                self._wanted.clear()
                await self._commit(settling=self._settled_at_s + SETTLE_AFTER_S <= loop.time())
        except Exception as error:  # noqa: BLE001  # whatever it is: the run ends by it
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failed = True
        self._waiting.clear()
        self.on_failed(error)

    async def _commit(self, *, settling: bool) -> None:
        assert self._sink is not None
        assert self._output is not None
        record = Notes()
        waiting, self._waiting = self._waiting, []
        if waiting:
            record.open_row = waiting[-1][0]
        if settling and self._dirty:
            self._dirty = False
            self._settled_at_s = asyncio.get_running_loop().time()
            self._sink.flush()
            if self._output.place != self._settled:
                record.settled = self._output.place
        if self._journal is not None and record.open_row is None and record.settled is None:
            return
        await asyncio.to_thread(self._note, record)
        if record.settled is not None:
            self._settled = record.settled
            if self.begun is not None:
                self.begun.forget_before(record.settled[1])
        for _, send in waiting:
            send()

    def _note(self, record: Notes, *, last: bool = False) -> None:
        """From any thread. Raises OutputError."""
        assert self._output is not None
        assert self._header is not None
        assert self._rows is not None
        if record.settled is not None:
            self._output.sync()
            record.rows_digest = self._rows.digest_before(record.settled[1])
        if self._input is not None and not self._digest_noted and (digest := self._input.digest):
            record.input_digest, self._digest_noted = digest, True
        with self._writing:
            if self._aborted and not last:
                return  # by a thread that was late
            try:
                if self._journal is None:
                    known = None if self._old is None or self._rerun.accept_changes else self._old.rows_digest
                    self._journal = Journal(self.state_path, self._header, disk=self._disk, rows_digest=known)
                    self._remove_kept(but=self._header.kept)
                self._journal.append(record)
            except OSError as error:
                advice = "make room, or write elsewhere"
                raise OutputError(f"cannot write {self.state_path}: {error.strerror}: {advice}") from error

    def _note_effects(self) -> None:
        """Once in a run, and waited for: what follows must be known after a power cut too."""
        try:
            self._note(Notes(effects=True))
        except OutputError as error:
            self._fail(error)

    # --- the end -------------------------------------------------------------------------------------------------

    async def finish(self, *, stopped: bool) -> None:
        """The task is over, and its results were taken: write the rest, and close. Raises as a sink does."""
        assert self._rows is not None
        assert self._sink is not None
        assert self._output is not None
        await self._stop_working()
        complete = self.is_complete = not stopped and self.has_all_rows
        if self._journal is None and self._old is None and not self._sink.wrote:  # there were no rows
            self._sink.close()
            self._remove_state()
            return
        if self._journal is None:
            await asyncio.to_thread(self._note, Notes())
        for _ in self._sink.splice_rest():
            await asyncio.sleep(0)
        self._output.drain()
        if self._input is not None and not stopped:
            await self._input.wait()
        record = Notes(settled=self._output.place, ended=True, complete=complete)
        await asyncio.to_thread(self._note, record)
        self._sink.close()
        self._remove_kept(but="")
        if complete and not self.failed:
            self._remove_state()

    def abort(self) -> None:
        """The run failed: keep what there is, and note what had begun. Never raises."""
        if self._working is not None:
            self._working.cancel()
        with self._writing:  # what a thread writes is to be over: it may be the journal's first record
            self._aborted = True
        sink, output = self._sink, self._output
        if sink is None or output is None:
            return
        if self._journal is None:  # nothing was sent, and nothing has changed
            sink.abort()
            return
        assert self._header is not None
        with contextlib.suppress(OSError, UsageError):
            with contextlib.suppress(OutputError):
                output.drain()
            record = Notes(settled=output.place)
            notes = self._journal.notes
            assert self._folder is not None
            first, end = output.place[1], max(notes.opened, output.place[1])
            table = self._folder.path / _TABLES / self._header.run_id
            begun = read_begun(table, self._folder.path / "marks", first, end)
            record.begun = None if begun is None else tuple(to_ranges(begun))
            self._note(record, last=True)
        sink.abort()

    def close(self) -> None:
        """Let go of the output. Idempotent."""
        if self._input is not None:
            self._input.close()
        if self._journal is not None:
            self._journal.close()
        elif self.plan.kept is not None:
            with contextlib.suppress(OSError):
                self._disk.remove(self.plan.kept)
        if self.begun is not None:
            with contextlib.suppress(OSError):
                self.begun.close()
            self.begun = None
        if self._lock is not None:
            self._lock.release(unused=self._journal is None and not self.is_finished)

    async def _stop_working(self) -> None:
        """Not by cancelling it: what its thread writes is to be over."""
        self._stopping = True
        self._wanted.set()
        if self._working is not None:
            await self._working

    @property
    def can_go_on(self) -> bool:
        """There is a journal of it."""
        return self._journal is not None and not self.is_finished

    @property
    def failed(self) -> int:
        """Failures in the output, whenever they came."""
        counted = 0 if self._sink is None else self._sink.failed
        return self.plan.failed_before + self.plan.kept_failed + counted

    @property
    def unreplaced(self) -> int:
        """Rows that were to run again, and keep the failure that they had, since the run was stopped."""
        return 0 if self._sink is None else self._sink.unreplaced

    @property
    def next_row(self) -> int:
        """The row behind the last one in the output."""
        return 0 if self._output is None else self._output.place[1]

    @property
    def has_all_rows(self) -> bool:
        return self._rows is not None and self._rows.ended and not self._rows.passed_over

    @property
    def lost_results(self) -> Sequence[CallResult]:
        """Rows that had begun when an earlier generation was ended, reported as lost by this one."""
        return () if self._sink is None else self._sink.lost_results

    @property
    def standing(self) -> int:
        """Results that earlier generations wrote."""
        return self.plan.before + self.plan.kept_standing

    def _remove_kept(self, but: str) -> None:
        for name in (f"{self.state_path.name}.kept0", f"{self.state_path.name}.kept1"):
            if name != but:
                with contextlib.suppress(OSError):
                    self._disk.remove(self.state_path.with_name(name))

    def _remove_state(self) -> None:
        self.is_finished = True
        with contextlib.suppress(OSError):
            self._disk.remove(self.state_path)


def _show(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "given" if value else "not given"
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
