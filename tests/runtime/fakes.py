"""A fake executor process: the worker's shell talks to it over a real socket, and the test decides what it does."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from callyard.clock import SYSTEM_CLOCK
from callyard.errors import ErrorKind
from callyard.executor.hub import expand
from callyard.ids import CallId, ExecutorId, FunctionId, RequestId
from callyard.wire.codec import decode_worker_message, encode_message
from callyard.wire.frames import FrameReader
from callyard.wire.messages import (
    PROTOCOL_VERSION,
    CallCompleted,
    CallCompletedPayload,
    CallFailed,
    CallFailedPayload,
    CancelCall,
    Describe,
    Described,
    DescribedFunction,
    DescribedPayload,
    ExecuteCall,
    ExecuteCalls,
    ExecutorMessage,
    Heartbeat,
    HeartbeatPayload,
)
from callyard.worker.spawner import OutputCallback, SpawnOrder
from callyard.worker.worker import Worker

PROMISES: dict[str, dict[str, object]] = {
    "effect": {},
    "safe": {"idempotent": True},
    "quick": {"budget_ms": 50},
    "slow": {"budget_ms": 90_000},
    "endless": {"budget_ms": 0},
}
"""What every fake process describes: functions of the module `m`."""

WAIT_S = 20.0
"""Longest wait for a condition; a loaded machine may need much of it, a healthy run needs none."""


class FakeProcess:
    """Satisfies `ExecutorProcess` and speaks the executor's side of the protocol."""

    def __init__(self, order: SpawnOrder, sock: socket.socket, number: int) -> None:
        self.order = order
        self.executor_id: ExecutorId = order.executor_id
        self.sock = sock
        self.sock.setblocking(False)
        self.pid = 1_000_000 + number
        self.tail: Sequence[str] = deque(["last words"], maxlen=20)
        self.returncode: int | None = None
        self.received: list[object] = []
        self.executes: list[ExecuteCall] = []
        self.cancels: list[CancelCall] = []
        self.heartbeat_seq = 0
        self.stopped = False
        self.ticks = 0
        self.answers: Callable[[FakeProcess, ExecuteCall], None] | None = None
        """Called for each ExecuteCall; None: the test answers itself."""
        self._mark_fd = os.dup(order.mark_fd)
        self._exited = asyncio.Event()
        self._callback: Callable[[], None] | None = None
        self._news = asyncio.Event()
        self._reader = FrameReader("worker")
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._read)

    # --- ExecutorProcess ---

    def on_exit(self, callback: Callable[[], None]) -> None:
        self._callback = callback

    async def wait_exited(self) -> None:
        await self._exited.wait()

    async def wait_output_ended(self, timeout_s: float) -> None:
        return None

    def kill(self) -> None:
        self.exit(-9)

    def is_stopped(self) -> bool:
        return self.stopped

    def is_exiting(self) -> bool:
        return self.returncode is not None

    def cpu_ticks(self) -> int:
        return self.ticks

    # --- the test's side ---

    def exit(self, returncode: int) -> None:
        """Die: the socket closes, the worker sees the exit."""
        if self.returncode is not None:
            return
        self.returncode = returncode
        self.stop_reading()
        with suppress(OSError):  # the test may have closed it
            self.sock.shutdown(socket.SHUT_WR)  # wakes a thread that sends
        self.sock.close()
        os.close(self._mark_fd)
        self._loop.call_soon(self._report_exit)

    def stop_reading(self) -> None:
        if self.sock.fileno() >= 0:
            self._loop.remove_reader(self.sock)

    def _report_exit(self) -> None:
        self._exited.set()
        if self._callback is not None:
            self._callback()

    def send(self, message: ExecutorMessage) -> None:
        self.send_bytes(encode_message(message))

    def send_bytes(self, data: bytes) -> None:
        self.sock.setblocking(True)
        try:
            self.sock.sendall(data)
        finally:
            self.sock.setblocking(False)

    def heartbeat(self, **fields: object) -> None:
        self.heartbeat_seq += 1
        first = self.heartbeat_seq == 1
        payload = {
            "executor_id": self.executor_id,
            "heartbeat_seq": self.heartbeat_seq,
            "available_contexts": self.order.executor_max_inflight,
            "last_scheduler_active_at_ms": SYSTEM_CLOCK.now_ms(),
            **({"protocol": PROTOCOL_VERSION, "token": self.order.token} if first else {}),
            **fields,
        }
        self.send(Heartbeat(msgspec.convert(payload, HeartbeatPayload)))

    def mark(self, execute: ExecuteCall, slot: int = 0) -> None:
        """Say, in the page, that the call has begun."""
        os.pwrite(self._mark_fd, int(execute.payload.call_number).to_bytes(8, "little"), slot * 8)

    def complete(self, execute: ExecuteCall, output: bytes = b"1") -> None:
        payload = CallCompletedPayload(attempt_seq=execute.payload.attempt_seq, output=msgspec.Raw(output))
        self.send(CallCompleted(execute.call_id, payload))

    def fail(self, call_id: CallId, attempt_seq: int, kind: ErrorKind | str, message: str = "", **more: object) -> None:
        payload = msgspec.convert(
            {"attempt_seq": attempt_seq, "error_kind": str(kind), "error_message": message, **more}, CallFailedPayload
        )
        self.send(CallFailed(call_id, payload))

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Until the condition holds; looked at after each frame."""
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def wait_executes(self, count: int) -> list[ExecuteCall]:
        await self.wait_for(lambda: len(self.executes) >= count)
        return self.executes

    def _read(self) -> None:
        try:
            data = self.sock.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.stop_reading()
            return
        for body in self._reader.feed(data):
            message, _ = decode_worker_message(body)
            self.received.append(message)
            if isinstance(message, ExecuteCalls):
                for call in message.payload.calls:
                    self._execute(ExecuteCall(call.call_id, expand(message.payload, call)))
            elif isinstance(message, ExecuteCall):
                self._execute(message)
            elif isinstance(message, CancelCall):
                self.cancels.append(message)
            elif isinstance(message, Describe):
                self._describe(message.request_id, message)
        self._news.set()

    def _execute(self, message: ExecuteCall) -> None:
        self.executes.append(message)
        if self.answers is not None:
            self.answers(self, message)

    def _describe(self, request_id: RequestId, message: Describe) -> None:
        functions = [
            DescribedFunction(
                name=FunctionId(name),
                entry_selector=f"m:{name}",
                signature=f"{name}()",
                promises=msgspec.Raw(msgspec.json.encode(promises)),
            )
            for name, promises in PROMISES.items()
        ]
        self.send(Described(request_id, DescribedPayload(message.payload.function_code_digest, functions)))


class FakeSpawner:
    """Spawns `FakeProcess`es and lets the test see them."""

    sends_code = False

    def __init__(
        self, *, attach: bool = True, answers: Callable[[FakeProcess, ExecuteCall], None] | None = None
    ) -> None:
        self.processes: list[FakeProcess] = []
        self.attach = attach
        self.answers = answers
        self._news = asyncio.Event()

    def spawn(self, order: SpawnOrder, on_output: OutputCallback) -> FakeProcess:
        if order.socket_fd is not None:
            sock = socket.socket(fileno=os.dup(order.socket_fd))
        else:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.connect(str(order.socket_path))
        process = FakeProcess(order, sock, len(self.processes))
        process.answers = self.answers
        self.processes.append(process)
        if self.attach:
            process.heartbeat()
        self._news.set()
        return process

    async def wait_spawned(self, count: int) -> FakeProcess:
        """The `count`-th process, from 1."""
        async with asyncio.timeout(WAIT_S):
            while len(self.processes) < count:
                self._news.clear()
                await self._news.wait()
        return self.processes[count - 1]


async def read_until(sock: socket.socket, end: bytes) -> bytes:
    """What a socket that does not block sends until `end`, or until it is closed."""
    loop = asyncio.get_running_loop()
    data = b""
    async with asyncio.timeout(WAIT_S):
        while chunk := await loop.sock_recv(sock, 65_536):
            data += chunk
            if end and data.endswith(end):
                break
    return data


async def begin(
    worker: Worker, spawner: FakeSpawner, function: str = "effect"
) -> tuple[asyncio.Task[object], FakeProcess, ExecuteCall]:
    """Start the one call of the first process, and have it begun there: its task, the process, its frame."""
    call = asyncio.ensure_future(worker.call(function, []))
    process = spawner.processes[0]
    (execute,) = await process.wait_executes(1)
    process.mark(execute)
    return call, process, execute
