"""Runs every attempt through a worker at one level, and prints what became of each as JSON lines.

A program of its own, so that it can be run as another user: `python -m tests.e2e.sandbox.runner LEVEL FOLDER`.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from callyard import ErrorKind, Result, Worker
from callyard.worker.run_folder import PREFIX
from callyard.worker.worker import peak_memory_bytes
from tests.e2e.sandbox.expected import EXPECTED, Outcome

MIB = 1 << 20
SECRET = "CALLYARD_TEST_SECRET"
TENANT_SECRET = "other-tenant-password"
SETTINGS: dict[str, Any] = {
    "sandbox_memory_bytes": 1024 * MIB,
    "sandbox_tmp_bytes": 16 * MIB,
    "sandbox_processes": 40,
    "sandbox_open_files": 100,
}
NEIGHBOUR_STEPS = 60_000
BUDGET_MS = 30_000
CONTAINED_KINDS = {ErrorKind.CRASHED, ErrorKind.RESOURCE_LIMIT, ErrorKind.TIMEOUT}
WORKER_BYTES_MAX = 512 * MIB
"""The worker's own memory, whatever its executors send."""


def quiet(*_: object) -> None:
    pass


class Machine:
    """Real targets: files, sockets and processes that the worker's user may reach, and a sandboxed call may not."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.secret = folder / "secret.txt"
        self.secret.write_text("secret")
        name = f"callyard-test-{os.getpid()}"
        self.targets: dict[str, Any] = {
            "port": self._listen(stack, socket.AF_INET, ("127.0.0.1", 0)).getsockname()[1],
            "socket": str(folder / "door"),
            "abstract": name,
            "datagram": str(folder / "letters"),
            "datagram_abstract": f"{name}-letters",
            "secret_files": [str(self.secret), "/etc/passwd", "/etc/shadow", "/etc/hostname"],
            "secret_folders": [str(folder), str(Path.cwd()), os.path.expanduser("~"), "/var", "/root"],
            "folders": [str(folder)],
            "own_files": [str(self.secret)],
            "worker": os.getpid(),
            "secret_variable": SECRET,
            "other_tenant": ["other-tenant-", "pass"],
            "threads_max": SETTINGS["sandbox_processes"],
            "memory_max": SETTINGS["sandbox_memory_bytes"],
            "tmp_max": SETTINGS["sandbox_tmp_bytes"],
            "files_max": SETTINGS["sandbox_open_files"],
        }
        self._listen(stack, socket.AF_UNIX, self.targets["socket"])
        os.chmod(self.targets["socket"], 0o777)
        self._listen(stack, socket.AF_UNIX, f"\0{name}")
        for address in (self.targets["datagram"], f"\0{name}-letters"):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            sock.bind(address)
        os.chmod(self.targets["datagram"], 0o777)
        leaked = os.open(self.secret, os.O_RDONLY)
        os.set_inheritable(leaked, True)
        stack.callback(os.close, leaked)

    def _listen(self, stack: ExitStack, family: int, address: Any) -> socket.socket:
        sock = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        sock.bind(address)
        sock.listen()
        return sock

    def for_worker(self, worker: Worker) -> dict[str, Any]:
        folder = str(_run_folder(worker))
        siblings = [slot.pid for slot in worker.slots() if slot.pid]
        targets = {**self.targets, "run_folder": folder, "siblings": siblings, "level": str(worker.sandbox.level)}
        targets["own_files"] = [*targets["own_files"], os.path.join(folder, "lock")]
        targets["secret_folders"] = [*targets["secret_folders"], folder, os.path.join(folder, "bundles")]
        return targets


def _run_folder(worker: Worker) -> Path:
    assert worker._folder is not None
    assert worker._folder.path.name.startswith(PREFIX)
    return worker._folder.path


async def run_all(level: str, folder: Path) -> None:
    source = folder / "attempts.py"
    source.write_text((Path(__file__).parent / "attempts.py").read_text())
    os.environ[SECRET] = "secret"
    expected = sum(step * step for step in range(NEIGHBOUR_STEPS))
    with ExitStack() as stack:
        machine = Machine(folder, stack)
        async with Worker(
            source, executors=2, sandbox=level, executor_max_inflight=1, on_output=quiet, **SETTINGS
        ) as worker:
            assert worker.sandbox.level == level, worker.sandbox
            for row in EXPECTED:
                if row.attempt == "other_tenant":
                    await asyncio.gather(*(worker.call("keep", [TENANT_SECRET], tenant="other") for _ in range(4)))
                beside = asyncio.create_task(worker.call_result("neighbour", [NEIGHBOUR_STEPS], max_attempts=1))
                arguments = [row.attempt, machine.for_worker(worker)]
                result = await worker.call_result("run_attempt", arguments, max_attempts=1, budget_ms=BUDGET_MS)
                outcome, detail = judge(result)
                after = await worker.call_result("neighbour", [1_000], max_attempts=1)
                neighbour = await beside
                fine = neighbour.ok and neighbour.value == expected and after.ok
                print(
                    json.dumps(
                        {
                            "attempt": row.attempt,
                            "outcome": outcome,
                            "detail": detail,
                            "neighbours": "fine" if fine else f"{neighbour.error} {after.error}",
                        }
                    ),
                    flush=True,
                )
            peak = peak_memory_bytes()
            print(json.dumps({"secret": machine.secret.read_text(), "peak_bytes": peak}), flush=True)


def judge(result: Result) -> tuple[str, str]:
    if result.ok:
        got = result.value if isinstance(result.value, str) else ""  # a forged end of its own call is its own affair
        return (Outcome.OPEN if got else Outcome.REFUSED), got
    error = result.error
    assert error is not None
    if error.kind in CONTAINED_KINDS:
        return Outcome.CONTAINED, str(error)
    if "forged" in error.message:
        return Outcome.REFUSED, ""
    return f"failed: {error.kind}", f"{error.message}\n{error.stack}"


if __name__ == "__main__":
    asyncio.run(run_all(sys.argv[1], Path(sys.argv[2])))
