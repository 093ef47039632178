"""An external command as a policy: the bundle's folder is its last argument, its answer an exit status or JSON.

| it ends with | and on stdout | verdict |
| --- | --- | --- |
| status 0 | anything else | accepted |
| status 0 or 1 | `{"verdict": "accept"}` or `{"verdict": "refuse", "reasons": ["…"]}` | that; status 1 never accepts |
| status 1 | anything else | refused, its lines are the reasons |
| another status, a signal, or not in time | | none |

It runs in a process group of its own, which is killed at its end whatever it left behind. Source: call-execution X41.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
from collections.abc import Sequence
from threading import Event
from typing import Final, Literal

import msgspec

from callyard.functions.audit.verdict import REASONS_MAX, NoVerdict, Verdict

OUTPUT_BYTES_MAX: Final = 256 * 1024
"""Of stdout, and of stderr; what comes after it is read and dropped."""
POLL_S: Final = 0.02
ACCEPTED, REFUSED = 0, 1


class _Answer(msgspec.Struct):
    verdict: Literal["accept", "refuse"]
    reasons: list[str] = []


def run_command(argv: Sequence[str], stop: Event) -> Verdict:
    """Run it to its end, or kill it when `stop` is set. Blocks. Raises NoVerdict."""
    try:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise NoVerdict(f"{argv[0]} cannot be started: {getattr(error, 'strerror', None) or error}") from error
    try:
        stdout, stderr = _collect(child, stop)
    finally:
        _end(child)
    if stop.is_set():
        raise NoVerdict(f"{argv[0]} was stopped")
    return read_verdict(argv[0], child.returncode, stdout, stderr)


def read_verdict(program: str, returncode: int, stdout: bytes, stderr: bytes) -> Verdict:
    """The table above. Raises NoVerdict."""
    if returncode not in (ACCEPTED, REFUSED):
        how = f"ended with status {returncode}" if returncode > 0 else f"was killed by signal {-returncode}"
        raise NoVerdict(f"{program} {how}: expected 0 (accepted) or 1 (refused){_last_line(stderr or stdout)}")
    answer = _read_json(program, stdout)
    if answer is not None:
        accepted = answer.verdict == "accept" and returncode == ACCEPTED
        reasons = tuple(answer.reasons) or (() if accepted else (f"refused by {program}",))
        return Verdict(accepted=accepted, reasons=reasons)
    if returncode == ACCEPTED:
        return Verdict(accepted=True)
    lines = [line for line in (stdout or stderr).decode(errors="replace").splitlines() if line.strip()]
    return Verdict(accepted=False, reasons=tuple(lines[: REASONS_MAX + 1]) or (f"refused by {program}",))


def _read_json(program: str, stdout: bytes) -> _Answer | None:
    """None: something else than a verdict, such as a linter's report."""
    if not stdout.lstrip().startswith(b"{") or b'"verdict"' not in stdout:
        return None
    try:
        return msgspec.json.decode(stdout, type=_Answer)
    except (msgspec.DecodeError, RecursionError) as error:
        raise NoVerdict(f"{program} printed a verdict that cannot be read: {error}") from error


def _collect(child: subprocess.Popen[bytes], stop: Event) -> tuple[bytes, bytes]:
    """What it prints until it has ended, or `stop` is set. A grandchild that holds the pipes open is not waited for."""
    assert child.stdout is not None
    assert child.stderr is not None
    kept = {child.stdout.fileno(): bytearray(), child.stderr.fileno(): bytearray()}
    with selectors.DefaultSelector() as selector:
        for fd in kept:
            os.set_blocking(fd, False)
            selector.register(fd, selectors.EVENT_READ)
        while not stop.is_set():
            has_ended = _has_ended(child)
            ready = selector.select(0 if has_ended else POLL_S) if selector.get_map() else []
            if not ready:
                if has_ended:
                    break
                if not selector.get_map():
                    stop.wait(POLL_S)
            for key, _ in ready:
                data = os.read(key.fd, 65_536)
                if not data:
                    selector.unregister(key.fd)
                elif len(kept[key.fd]) < OUTPUT_BYTES_MAX:
                    kept[key.fd] += data[: OUTPUT_BYTES_MAX - len(kept[key.fd])]
    return bytes(kept[child.stdout.fileno()]), bytes(kept[child.stderr.fileno()])


def _has_ended(child: subprocess.Popen[bytes]) -> bool:
    """Without reaping it: a zombie still holds its group's id."""
    return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def _end(child: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        child.kill()  # between fork and setsid it leads no group yet
    child.wait()
    for stream in (child.stdout, child.stderr):
        if stream is not None:
            stream.close()


def _last_line(output: bytes) -> str:
    lines = output.decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"; it said: {last[:200]}" if last else ""
