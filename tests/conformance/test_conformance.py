"""The official MCP conformance suite against `callyard serve --http`, for both revisions. Source: D33, D34."""

from __future__ import annotations

import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conformance.node import CALLYARD, HERE, find_packages, node_command, node_environment

TIMEOUT_S = 280
FUNCTIONS = HERE / "functions.py"
_URL = re.compile(rb"http://[^ ]+/mcp")
_TRIGGER = re.compile(rb'"tool":"test_trigger_(tool|prompt)_change"')


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The URL of a server of its own. Where the suite calls for a change of the list, its file gets one more, and is
    read again."""
    functions = folder / FUNCTIONS.name
    functions.write_text(FUNCTIONS.read_text())
    command = [*CALLYARD, "serve", str(functions), "--http", "127.0.0.1:0"]
    command += ["--state-dir", str(folder / "state"), "--store", "memory"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as server:
        assert server.stderr is not None
        said = []
        watchdog = threading.Timer(TIMEOUT_S, server.kill)
        watchdog.start()
        try:
            for line in server.stderr:
                said.append(line)
                if url := _URL.search(line):
                    break
            else:
                pytest.fail(f"the server did not start: {b''.join(said).decode()}")

            def read_on() -> None:
                for number, line in enumerate(server.stderr or ()):
                    said.append(line)
                    if asked := _TRIGGER.search(line):
                        decorator = {b"tool": "function", b"prompt": "prompt"}[asked.group(1)]
                        with functions.open("a") as file:
                            file.write(
                                f"\n\n@{decorator}\ndef added_{number}() -> str:\n    'Added.'\n    return 'added'\n"
                            )
                        server.send_signal(signal.SIGHUP)

            threading.Thread(target=read_on, daemon=True).start()
            yield url.group().decode()
        finally:
            watchdog.cancel()
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
            print(b"".join(said).decode(errors="replace"))


@pytest.mark.slow
@pytest.mark.requirement("D33")
@pytest.mark.requirement("D34")
@pytest.mark.parametrize("revision", ["2026-07-28", "2025-11-25"])
def test_the_official_suite_passes(revision: str, tmp_path: Path) -> None:
    packages = find_packages()
    with served(tmp_path) as url:
        command = [*node_command(packages, "conformance"), "server", "--url", url, "--requirements", revision]
        command += ["--expected-failures", str(HERE / f"expected-failures-{revision}.yaml")]
        command += ["-o", str(tmp_path / "results")]
        done = subprocess.run(
            command, capture_output=True, env=node_environment(tmp_path), timeout=TIMEOUT_S, check=False
        )
    output = done.stdout.decode() + done.stderr.decode()
    assert done.returncode == 0, output[output.find("=== SUMMARY ===") :]
    assert "=== SUMMARY ===" in output
    assert re.search(r"Total: [1-9]\d* passed", output)


def test_nothing_is_excepted() -> None:
    for path in HERE.glob("expected-failures-*.yaml"):
        lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        assert lines == ["server: []"], path.name


def test_the_lock_names_no_registry() -> None:
    text = (HERE / "package-lock.json").read_text()
    assert '"resolved"' not in text
    assert '"integrity"' in text
