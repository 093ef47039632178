"""`callyard serve`, `token` and `keys` as a shell runs them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from callyard.serve.config import ServeConfig
from callyard.serve.tokens import Tokens
from tests.e2e.cli.shell import CALLYARD, ENVIRONMENT, TIMEOUT_S, run
from tests.e2e.processes import children_of, wait_gone, wait_until

SOURCE = """
import os, signal, time
from callyard import function

@function(idempotent=True)
def version() -> int:
    return 1

@function
def wait(seconds: float, mark: str) -> int:
    open(mark, "a").close()
    time.sleep(seconds)
    return 1

@function
def charge(order: int, book: str) -> int:
    with open(book, "a") as file:
        file.write(f"{order}\\n")
    time.sleep(0.02)
    return order

@function(idempotent=True)
def look(order: int) -> int:
    time.sleep(0.02)
    return order

@function
def stubborn(mark: str) -> None:
    open(mark, "a").close()
    while True:
        try:
            while True:
                time.sleep(0.05)
        except BaseException:
            pass
"""


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "functions.py"
    path.write_text(SOURCE)
    return path


class Served:
    """A server on HTTP."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self._pool = ThreadPoolExecutor(8)
        self.children: list[int] = []

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)

    def wait_said(self, pattern: str) -> re.Match[str]:
        def look() -> bool:
            assert self.process.poll() is None or re.search(pattern, "".join(self.said)), "".join(self.said)
            return re.search(pattern, "".join(self.said)) is not None

        end = time.monotonic() + TIMEOUT_S
        while not look():
            assert time.monotonic() < end, f"{pattern} in {self.said}"
            time.sleep(0.02)
        found = re.search(pattern, "".join(self.said))
        assert found is not None
        return found

    def open(self) -> None:
        self.url = self.wait_said(r"HTTP on (http://\S+?),")[1]
        self.children = children_of(self.process.pid)
        assert self.children

    def call(self, tool: str, *, token: str = "", key: str = "", **args: Any) -> Future[tuple[int, Any]]:
        headers = {"content-type": "application/json"}
        headers |= {"authorization": f"Bearer {token}"} if token else {}
        headers |= {"idempotency-key": key} if key else {}
        request = urllib.request.Request(f"{self.url}/tools/{tool}", json.dumps(args).encode(), headers)

        def send() -> tuple[int, Any]:
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                    return answer.status, json.loads(answer.read())
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, json.loads(error.read())
            except (OSError, ValueError) as error:
                return 0, str(error)

        return self._pool.submit(send)

    def end(self) -> int:
        """Its exit status; nothing of it is left."""
        status = self.process.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        wait_gone(self.children)
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        self._pool.shutdown()
        assert self.process.stderr is not None
        self.process.stderr.close()


@contextmanager
def served(target: Path, *words: str | Path) -> Iterator[Served]:
    process = subprocess.Popen(
        [CALLYARD, "serve", target, "--http", "127.0.0.1:0", "--state-dir", target.parent / "state", *words],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    server = Served(process)
    try:
        server.open()
        yield server
    finally:
        server.close()


@pytest.mark.requirement("D46")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_drains_and_the_status_says_which(target: Path, number: int, status: int) -> None:
    mark = target.parent / "mark"
    with served(target, "--drain", "60s") as server:
        assert server.call("version").result(TIMEOUT_S) == (200, 1)
        running = server.call("wait", seconds=1.0, mark=str(mark))
        wait_until(mark.exists, "the call runs")
        server.process.send_signal(number)
        assert running.result(TIMEOUT_S) == (200, 1)
        assert server.end() == status
        assert "stopping: 1 call has" in "".join(server.said)


@pytest.mark.requirement("D46")
@pytest.mark.parametrize("hurries", [False, True])
def test_a_handler_that_hangs_is_left_behind(target: Path, hurries: bool) -> None:
    mark = target.parent / "mark"
    with served(target, "--drain", "60s" if hurries else "200ms") as server:
        running = server.call("stubborn", mark=str(mark))
        wait_until(mark.exists, "the call runs")
        server.process.send_signal(signal.SIGTERM)
        if hurries:
            server.wait_said("stopping: 1 call has")
            wait_until(lambda: _again(server), "the second signal is heard")
        assert server.end() == 143
        status, _ = running.result(TIMEOUT_S)
        assert status != 200


def _again(server: Served) -> bool:
    """Signals that come close together count as one."""
    if "stopping now" not in "".join(server.said):
        server.process.send_signal(signal.SIGTERM)
        return False
    return True


def test_new_code_and_new_tokens_by_sighup(target: Path) -> None:
    config = target.parent / "serve.toml"
    first = run("token", "new", "--tenant", "acme", "--name", "first", "--config", config).out.strip()
    with served(target, "--config", config) as server:
        assert server.call("version").result(TIMEOUT_S)[0] == 401
        assert server.call("version", token=first).result(TIMEOUT_S) == (200, 1)
        second = run("token", "new", "--tenant", "acme", "--tools", "w*", "--config", config).out.strip()
        target.write_text(SOURCE.replace("return 1", "return 2"))
        server.process.send_signal(signal.SIGHUP)
        server.wait_said("reloaded: 5 functions")
        assert server.call("version", token=first).result(TIMEOUT_S) == (200, 2)
        assert server.call("version", token=second).result(TIMEOUT_S)[0] == 404
        target.write_text("def version(:\n")
        server.process.send_signal(signal.SIGHUP)
        server.wait_said("reload failed, the old version goes on: .*functions.py")
        assert server.call("version", token=first).result(TIMEOUT_S) == (200, 2)
        config.write_text("")  # an editor that has begun to write
        server.process.send_signal(signal.SIGHUP)
        server.wait_said("there is no token any more: nobody is let in")
        assert server.call("version").result(TIMEOUT_S)[0] == 401
        server.process.terminate()
        assert server.end() == 143
        assert first not in "".join(server.said)


@pytest.mark.requirement("D21", "D55")
def test_a_killed_servers_unknown_outcomes_are_listed_and_resolved(target: Path) -> None:
    state, mark, log = target.parent / "state", target.parent / "mark", target.parent / "calls.jsonl"
    with served(target) as server:
        server.call("wait", key="order-7", seconds=60, mark=str(mark))
        wait_until(mark.exists, "the call runs")
        listed = run("keys", "list", "--state-dir", state, "--json")
        assert [(key["key"], key["state"]) for key in json.loads(listed.out)] == [("order-7", "running")]
        server.process.kill()
        server.end()
    mark.unlink()
    with served(target) as server:
        again = server.call("wait", key="order-7", seconds=60, mark=str(mark)).result(TIMEOUT_S)
        assert again[0] != 200
        assert not mark.exists()  # it was not run again
        table = run("keys", "list", "--unknown", "--state-dir", state).out.splitlines()
        assert table[0].split()[:4] == ["TENANT", "TOOL", "KEY", "STATE"]
        assert table[1].split()[:4] == ["default", "wait", "order-7", "unknown"]
        words: list[str | Path] = ["default", "wait", "order-7", "--state-dir", state, "--calls-log", log]
        assert run("keys", "resolve", *words).status == 2
        assert run("keys", "resolve", *words, "--result", "7", "--retry").status == 2
        assert run("keys", "resolve", *words, "--result", "{oops").status == 2
        assert run("keys", "resolve", *words, "--result", "7").status == 0
        assert run("keys", "resolve", *words, "--retry").status == 1
        answer = server.call("wait", key="order-7", seconds=60, mark=str(mark)).result(TIMEOUT_S)
        assert answer == (200, 7)
    (line,) = [json.loads(line) for line in log.read_text().splitlines()]
    assert (line["event"], line["key"], line["by"]) == (
        "key.resolved",
        "order-7",
        f"callyard keys resolve, user {os.getuid()}",
    )


@pytest.mark.requirement("D19", "D21", "D55")
@pytest.mark.parametrize("kill_after", [1, 20, 60])
def test_a_server_that_is_killed_amid_keyed_calls_charges_nobody_twice(target: Path, kill_after: int) -> None:
    book, orders = target.parent / "book", range(100)

    def lines() -> list[int]:
        return [int(line) for line in book.read_text().split()] if book.exists() else []

    def ask(server: Served) -> list[tuple[Future[tuple[int, Any]], Future[tuple[int, Any]]]]:
        return [
            (
                server.call("charge", key=f"pay-{order}", order=order, book=str(book)),
                server.call("look", key=f"look-{order}", order=order),
            )
            for order in orders
        ]

    with served(target) as server:
        asked = ask(server)
        wait_until(lambda: len(lines()) >= kill_after, "calls run")
        server.process.kill()
        server.end()
        told = [order for order in orders if asked[order][0].result(TIMEOUT_S) == (200, order)]
        [look.result(TIMEOUT_S) for _, look in asked]
    charged = lines()
    assert set(told) <= set(charged)
    with served(target) as server:
        unknown = 0
        for order, (charge, look) in zip(orders, ask(server), strict=True):
            assert look.result(TIMEOUT_S) == (200, order)
            status, answer = charge.result(TIMEOUT_S)
            if order in told:
                assert (status, answer) == (200, order), "an answer that was given stays"
            elif status != 200:
                assert answer["error"]["outcome"] == "unknown"
                unknown += 1
            else:
                assert answer == order
        assert sorted(set(lines())) == sorted(lines()), "nothing is charged twice"
        assert len(lines()) >= len(orders) - unknown
        listed = json.loads(run("keys", "list", "--unknown", "--state-dir", target.parent / "state", "--json").out)
        assert len(listed) == unknown
        assert {key["tool"] for key in listed} <= {"charge"}


@pytest.mark.requirement("D46")
@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.3])
def test_a_stop_in_the_middle_of_a_reload_is_a_stop(target: Path, delay_s: float) -> None:
    mark = target.parent / "mark"
    with served(target, "--drain", "60s") as server:
        running = server.call("wait", seconds=1.5, mark=str(mark))
        wait_until(mark.exists, "the call runs")
        target.write_text("import time\ntime.sleep(0.5)\n" + SOURCE.replace("return 1", "return 2"))
        server.process.send_signal(signal.SIGHUP)
        time.sleep(delay_s)  # at any time of the reload
        server.process.terminate()
        assert running.result(TIMEOUT_S) == (200, 1)
        assert server.end() == 143
        assert "Traceback" not in "".join(server.said)


@pytest.mark.requirement("D36")
def test_no_other_machine_is_listened_to_without_a_token(target: Path) -> None:
    refused = run("serve", target, "--http", "0.0.0.0:0")
    assert refused.status == 2
    assert "there is no token" in refused.err
    assert "callyard token new" in refused.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--http", "nonsense:port"], "expected an address"),
        (["--store", ""], "store"),
        (["--config", "none.toml"], "cannot read none.toml"),
        (["--tls-cert", "c.pem", "--http"], "both a certificate and its key"),
        (["--admin", "localhost"], "expected an address"),
    ],
)
def test_a_wrong_command_is_told(target: Path, words: list[str], says: str) -> None:
    refused = run("serve", target, *words)
    assert refused.status == 2
    assert says in " ".join(refused.err.split())


def test_stdio_ends_with_its_client_and_two_may_run(target: Path, tmp_path: Path) -> None:
    environment = {**ENVIRONMENT, "XDG_STATE_HOME": str(tmp_path / "home")}
    processes = [
        subprocess.Popen(
            [CALLYARD, "serve", target],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for _ in range(2)
    ]
    outs = [process.communicate("", timeout=TIMEOUT_S) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outs
    assert [out for out, _ in outs] == ["", ""]  # the protocol's, and nobody asked
    assert all("MCP on stdio" in err for _, err in outs)
    assert run("keys", "list", target, env=environment).status in (0, 2)


def test_a_token_goes_to_stdout_once_and_its_table_elsewhere(tmp_path: Path) -> None:
    made = run("token", "new", "--tenant", "acme", "--tools", "read_*", "--rate", "10/s", "--running-max", "5")
    token = made.out.strip()
    assert made.status == 0
    assert token not in made.err
    config = tmp_path / "serve.toml"
    config.write_text("# mine\n[serve]\njobs_max = 9")
    config.chmod(0o640)
    config.write_text(config.read_text())
    kept = run("token", "new", "--tenant", "acme", "--name", "ci", "--config", config)
    text = config.read_text()
    assert text.startswith("# mine\n[serve]\njobs_max = 9\n")
    assert kept.out.strip() not in text
    assert config.stat().st_mode & 0o777 == 0o640
    tokens = Tokens(ServeConfig.read(config).tokens.values())
    caller = tokens.find(kept.out.strip())
    assert caller is not None
    assert (caller.tenant, caller.token) == ("acme", "ci")
    again = run("token", "new", "--tenant", "acme", "--name", "ci", "--config", config)
    assert (again.status, again.out, config.read_text()) == (2, "", text)
    config.write_text("[serve]\nspeed = 1\n")
    assert run("token", "new", "--tenant", "a", "--config", config).status == 2
    assert config.read_text() == "[serve]\nspeed = 1\n"
    assert [path.name for path in tmp_path.iterdir()] == ["serve.toml"]


@pytest.mark.parametrize("words", [["--rate", "fast"], ["--tenant", ""], ["--name", "a.b"]])
def test_a_wrong_token_is_none(words: list[str]) -> None:
    made = run("token", "new", "--tenant", "acme", *words)
    assert (made.status, made.out) == (2, "")
