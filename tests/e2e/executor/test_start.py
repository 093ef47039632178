"""Start: command line, first heartbeat, versions, the dialled path, and what is imported before that."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from callyard import __version__
from callyard.executor.options import EXIT_PROTOCOL, EXIT_USAGE, EXIT_VERSION
from callyard.wire.codec import decode_executor_message
from callyard.wire.frames import FrameReader
from callyard.wire.messages import PROTOCOL_VERSION, Heartbeat
from tests.e2e.executor.driver import WAIT_S, Driver


def run_executor(*flags: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "callyard.executor", *flags],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        env={**os.environ, **(env or {})},
    )


@pytest.mark.requirement("X51")
def test_first_heartbeat_says_who_speaks() -> None:
    with Driver(heartbeat_interval_ms=10) as driver:
        driver.wait_until(lambda: len(driver.heartbeats) >= 2, "two heartbeats")
        first, second = (one.payload for one in driver.heartbeats[:2])
        assert (first.executor_id, first.heartbeat_seq) == ("exec-1", 1)
        assert (first.callyard_version, first.protocol) == (__version__, PROTOCOL_VERSION)
        assert first.python_version == platform.python_version()
        assert first.available_contexts == 128
        assert (second.heartbeat_seq, second.callyard_version, second.protocol) == (2, "", 0)


@pytest.mark.requirement("X51")
def test_another_protocol_is_refused_with_the_command_that_mends_it() -> None:
    # An unknown flag does not hide the reason: a worker of another version may well have flags of its own.
    done = run_executor("--executor-id=e", "--socket-fd=0", "--protocol=77", "--flag-of-the-future", "yes")
    assert done.returncode == EXIT_VERSION
    assert "protocol 77" in done.stderr
    assert f"callyard {__version__}" in done.stderr
    assert f"speaks {PROTOCOL_VERSION}" in done.stderr
    assert f"{sys.executable} -m pip install 'callyard==" in done.stderr


@pytest.mark.requirement("X51")
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--executor-id=e", f"--protocol={PROTOCOL_VERSION}"], "exactly one of --socket-fd and --socket-path"),
        (["--executor-id=e", f"--protocol={PROTOCOL_VERSION}", "--socket-fd=0", "--socket-path=/x"], "exactly one of"),
        ([f"--protocol={PROTOCOL_VERSION}", "--socket-fd=0"], "--executor-id is missing"),
        (["--executor-id=e", "--socket-fd=0"], "--protocol is missing"),
        (
            ["--executor-id=e", f"--protocol={PROTOCOL_VERSION}", "--socket-fd=many"],
            "--socket-fd: expected a whole number",
        ),
        (["--executor-id=e", f"--protocol={PROTOCOL_VERSION}", "--socket-fd"], "--socket-fd: expected a value"),
        (["--executor-id=e", f"--protocol={PROTOCOL_VERSION}", "--no-such", "1"], "unknown flag --no-such"),
        (["stray"], "expected a flag, got 'stray'"),
        (["--executor-id=e", f"--protocol={PROTOCOL_VERSION}", "--socket-path=/nonexistent/socket"], "No such file"),
    ],
)
def test_wrong_arguments_are_told(flags: list[str], told: str) -> None:
    done = run_executor(*flags)
    assert (done.returncode, told in done.stderr) == (EXIT_USAGE, True), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.requirement("X62")
def test_a_mark_file_that_is_no_page_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "marks"
    file.write_bytes(b"12345")
    ours, theirs = socket.socketpair()
    with file.open("r+b") as marks, ours, theirs:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "callyard.executor", "--executor-id=e", f"--protocol={PROTOCOL_VERSION}"),
                *(f"--socket-fd={theirs.fileno()}", f"--mark-fd={marks.fileno()}"),
            ],
            capture_output=True,
            text=True,
            pass_fds=[theirs.fileno(), marks.fileno()],
            timeout=WAIT_S,
            check=False,
        )
    assert done.returncode == EXIT_USAGE
    assert "expected a file of 24 bytes or more, a multiple of 8, got 5" in done.stderr


@pytest.mark.requirement("X51")
@pytest.mark.requirement("X32")
def test_dialled_path_carries_the_token_once(tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        listener.settimeout(WAIT_S)
        child = subprocess.Popen(
            [
                *(sys.executable, "-m", "callyard.executor", "--executor-id=exec-7", f"--protocol={PROTOCOL_VERSION}"),
                f"--socket-path={tmp_path / 's'}",
            ],
            env={**os.environ, "CALLYARD_LINK_TOKEN": "one-time"},
            start_new_session=True,
        )
        try:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(WAIT_S)
                reader = FrameReader()
                bodies: list[bytes] = []
                while not bodies:
                    bodies = list(reader.feed(connection.recv(65536)))
                first = decode_executor_message(bodies[0])[0]
                assert isinstance(first, Heartbeat)
                assert (first.payload.executor_id, first.payload.token) == ("exec-7", "one-time")
            child.wait(WAIT_S)  # EOF ends it
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()


@pytest.mark.requirement("X51")
def test_user_code_does_not_see_the_token() -> None:
    source = "import os\ndef token():\n    return os.environ.get('CALLYARD_LINK_TOKEN')"
    with Driver(source, env={"CALLYARD_LINK_TOKEN": "secret"}) as driver:
        assert driver.value("token") is None
        assert driver.heartbeats[0].payload.token == "secret"


@pytest.mark.requirement("X60")
def test_start_imports_nothing_that_it_can_do_without() -> None:
    # The figures are in docs/design/executor.md; a test of times would be luck on a loaded machine.
    listing = subprocess.run(
        [sys.executable, "-c", "import sys, callyard.executor.__main__; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=WAIT_S,
    ).stdout.split()
    heavy = {
        "hashlib",
        "asyncio",
        "pydantic",
        "threading",
        "socket",
        "logging",
        "argparse",
        "ctypes",
        "dataclasses",
        "subprocess",
    }
    assert heavy.isdisjoint(listing)


@pytest.mark.requirement("X49")
@pytest.mark.requirement("X50")
def test_unknown_messages_are_dropped_and_malformed_ones_end_it() -> None:
    with Driver("def one():\n    return 1") as driver:
        body = b'{"message_type":"FromTheFuture","payload":{"x":1}}'
        driver.send_bytes(len(body).to_bytes(4, "big") + body)
        assert driver.value("one") == 1
        driver.send_bytes(b"\x00\x00\x00\x02{]")
        assert driver.wait_exit() == EXIT_PROTOCOL
        assert "the worker broke the protocol" in driver.read_stderr()
