"""A worker's end of the link, as small as tests can do with: it drives one real executor process.

Everything that waits has a bound, `WAIT_S`, which is far above what a loaded machine needs; nothing waits for luck.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from callyard.ids import CallId, CallNumber, Digest, FunctionId, RequestId, TaskId
from callyard.wire.codec import decode_executor_message, encode_message
from callyard.wire.frames import FrameReader
from callyard.wire.messages import (
    PROTOCOL_VERSION,
    CallCompleted,
    CallCompletedPayload,
    CallContext,
    CallFailed,
    CallsSettled,
    CallWaiting,
    CancelCall,
    CancelCallPayload,
    CancelReason,
    ExecuteCall,
    ExecuteCallPayload,
    Heartbeat,
    Promises,
    ResumeCall,
    ResumeCallPayload,
    WaitKind,
    WorkerMessage,
)

WAIT_S = 60.0
DIGEST = Digest("d" * 64)
MODULE = "functions"
TASK = TaskId("task-1")

End = CallCompleted | CallFailed
M = TypeVar("M")


class Driver:
    """Starts an executor on construction; a context manager that leaves no process behind."""

    def __init__(
        self,
        source: str = "",
        *flags: str,
        folder: Path | None = None,
        mark_slots: int = 0,
        protocol: int = PROTOCOL_VERSION,
        heartbeat_interval_ms: int = 500,
        python: str = sys.executable,
        env: dict[str, str] | None = None,
    ) -> None:
        """`source`: the bundle, one module. `mark_slots`: 0 for no page."""
        self._temporary = None if folder else tempfile.TemporaryDirectory()
        self.folder = folder or Path(self._temporary.name if self._temporary else "")
        self.bundle = self.folder / "bundle"
        self.bundle.mkdir(exist_ok=True)
        (self.bundle / f"{MODULE}.py").write_text(source, encoding="utf-8")
        self.heartbeats: list[Heartbeat] = []
        self.ends: dict[CallId, End] = {}
        self._came: deque[bytes] = deque()
        """Read, and not taken in yet."""
        self._ended = False
        """There is nothing more to read."""
        self.others: deque[Any] = deque()
        self.settled_frames: list[int] = []
        """How many ends each CallsSettled held."""
        self.code_requests: list[CallWaiting] = []
        self.answer_code_requests = True
        self.at_eof = False
        self.last_sidecar: bytes | None = None
        """What came beside the message that is being taken."""
        self.mark_file = self.folder / "marks"
        self._reader = FrameReader("executor")
        self._numbers = 0
        self._socket, theirs = socket.socketpair()
        argv = [python, "-m", "callyard.executor", "--executor-id", "exec-1", f"--socket-fd={theirs.fileno()}"]
        argv += ["--executor-max-inflight", "128", "--executor-max-runnable", "128", "--protocol", str(protocol)]
        argv += ["--heartbeat-interval-ms", str(heartbeat_interval_ms), *flags]
        passed = [theirs.fileno()]
        if mark_slots:
            self.mark_file.write_bytes(bytes(8 * (2 * mark_slots + 1)))
            mark_fd = os.open(self.mark_file, os.O_RDWR)
            passed.append(mark_fd)
            argv += ["--mark-fd", str(mark_fd)]
        self.stdout = open(self.folder / "stdout", "w+b")  # noqa: SIM115 - closed by close()
        self.stderr = open(self.folder / "stderr", "w+b")  # noqa: SIM115
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=self.stdout,
            stderr=self.stderr,
            pass_fds=passed,
            start_new_session=True,
            env={**os.environ, **(env or {})},
        )
        theirs.close()
        if mark_slots:
            os.close(mark_fd)

    def __enter__(self) -> Driver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if error is not None:
            error.add_note(f"stderr of the executor:\n{self.read_stderr()}")
        self.stdout.close()
        self.stderr.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    def close(self) -> None:
        self._socket.close()
        if self.process.poll() is None:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()

    # --- sending --------------------------------------------------------------------------------------------------

    def send(self, *messages: WorkerMessage) -> None:
        self.send_bytes(b"".join(map(encode_message, messages)))

    def send_with_body(self, message: WorkerMessage, body: bytes | None) -> None:
        self.send_bytes(encode_message(message, body))

    def send_bytes(self, data: bytes) -> None:
        """Send all of it, and read meanwhile, as a worker does: the executor may be sending to us just as much."""
        left = memoryview(data)
        while left:
            readable, writable, _ = select.select([] if self._ended else [self._socket], [self._socket], [])
            if readable:
                self._receive()
            if writable:
                left = left[self._socket.send(left, socket.MSG_DONTWAIT) :]

    def make_call(
        self,
        function: str,
        *args: Any,
        raw: bytes | None = None,
        row: bool = False,
        strings: bool = False,
        budget_ms: int = 0,
        idempotent: bool = True,
        attempt_seq: int = 1,
        digest: Digest = DIGEST,
        context: CallContext | None = None,
        call_id: str = "",
        parent: str = "",
        events: bool = False,
    ) -> ExecuteCall:
        self._numbers += 1
        return ExecuteCall(
            CallId(call_id or f"{TASK}-{self._numbers}"),
            ExecuteCallPayload(
                task_id=TASK,
                function_id=FunctionId(function),
                function_code_digest=digest,
                attempt_seq=attempt_seq,
                args=msgspec.Raw(msgspec.json.encode(args) if raw is None else raw),
                call_number=CallNumber(self._numbers),
                row=row,
                strings=strings,
                entry_selector=f"{MODULE}:{function}",
                parent_call_id=CallId(parent),
                events=events,
                call_budget_ms=budget_ms,
                promises=Promises(idempotent=idempotent),
                context=context or CallContext(),
            ),
        )

    def start(self, function: str, *args: Any, **options: Any) -> CallId:
        call = self.make_call(function, *args, **options)
        self.send(call)
        return call.call_id

    def cancel(self, call_id: CallId, reason: CancelReason = CancelReason.CANCELLED, *, attempt_seq: int = 1) -> None:
        self.send(CancelCall(call_id, CancelCallPayload(reason, attempt_seq)))

    def answer_code(self, request_id: RequestId, call_id: CallId) -> None:
        place = msgspec.Raw(msgspec.json.encode({"path": str(self.bundle), "module": MODULE}))
        self.send(ResumeCall(call_id, request_id, ResumeCallPayload(WaitKind.FUNCTION_CODE, 1, place)))

    # --- receiving ------------------------------------------------------------------------------------------------

    def pump(self, timeout_s: float) -> bool:
        """Take in what has come, waiting for at most `timeout_s`. False: nothing came."""
        if not self._came and not self._ended and select.select([self._socket], [], [], max(0.0, timeout_s))[0]:
            self._receive()
        if not self._came:
            self.at_eof = self._ended
            return False
        for body in self._reader.feed(self._came.popleft()):
            message, self.last_sidecar = decode_executor_message(body)
            self._take(message)
        return True

    def _receive(self) -> None:
        """Keep what can be read now, for `pump` to take in."""
        try:
            data = self._socket.recv(1 << 18)
        except ConnectionResetError:
            data = b""
        if data:
            self._came.append(data)
        else:
            self._ended = True

    def _take(self, message: Any) -> None:
        match message:
            case Heartbeat():
                self.heartbeats.append(message)
            case CallCompleted() | CallFailed():
                assert message.call_id not in self.ends, f"two terminal frames: {message}"
                self.ends[message.call_id] = message
            case CallsSettled():
                self.settled_frames.append(len(message.payload.calls))
                for one in message.payload.calls:  # anything but a short output comes in a frame of its own
                    assert one.failure is None, message
                    payload = CallCompletedPayload(
                        one.attempt_seq, one.output, budget_used_ms=one.budget_used_ms, timing=one.timing
                    )
                    self._take(CallCompleted(one.call_id, payload))
            case CallWaiting(payload=payload) if payload.wait_kind == WaitKind.FUNCTION_CODE:
                self.code_requests.append(message)
                if self.answer_code_requests:
                    self.answer_code(message.request_id, message.call_id)
            case _:
                self.others.append(message)

    def wait_until(self, condition: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            assert not self.at_eof, f"the executor's link ended while waiting for {what}: {self.read_stderr()}"
            # A condition may be about a file: look again soon, though nothing comes.
            self.pump(min(0.05, end - time.monotonic()))
            assert time.monotonic() < end, f"no {what} in {timeout_s} s"

    def wait_end(self, call_id: CallId) -> End:
        self.wait_until(lambda: call_id in self.ends, f"end of {call_id}")
        return self.ends[call_id]

    def wait_other(self, kind: type[M]) -> M:
        self.wait_until(lambda: any(isinstance(one, kind) for one in self.others), kind.__name__)
        found = next(one for one in self.others if isinstance(one, kind))
        self.others.remove(found)
        return found

    def wait_file(self, path: Path, text: str = "") -> str:
        """Wait until a file is there and holds `text`."""
        self.wait_until(lambda: path.exists() and text in path.read_text(), f"{text!r} in {path.name}")
        return path.read_text()

    def wait_exit(self) -> int:
        return self.process.wait(WAIT_S)

    def run(self, function: str, *args: Any, **options: Any) -> End:
        return self.wait_end(self.start(function, *args, **options))

    def value(self, function: str, *args: Any, **options: Any) -> Any:
        end = self.run(function, *args, **options)
        assert isinstance(end, CallCompleted), end
        return output_of(end)

    def failure(self, function: str, *args: Any, **options: Any) -> CallFailed:
        end = self.run(function, *args, **options)
        assert isinstance(end, CallFailed), end
        return end

    # --- looking --------------------------------------------------------------------------------------------------

    def marks(self) -> list[int]:
        return self._page()[:-1]

    def running_mark(self) -> int:
        """The number of the call whose code runs; 0: none does."""
        return self._page()[-1]

    def _page(self) -> list[int]:
        data = self.mark_file.read_bytes()
        return list(struct.unpack(f"={len(data) // 8}Q", data))

    def read_stderr(self) -> str:
        return (self.folder / "stderr").read_text(errors="replace")

    def read_stdout(self) -> str:
        return (self.folder / "stdout").read_text(errors="replace")

    def is_draining(self) -> str:
        return self.heartbeats[-1].payload.draining if self.heartbeats else ""


def output_of(end: End) -> Any:
    assert isinstance(end, CallCompleted), end
    return msgspec.json.decode(end.payload.output)
