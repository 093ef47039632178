"""Load and faults against `callyard serve`: what is lost, what is slowed down, what it costs in memory.

    python -m bench.serve_load [--quick] [--seconds N] [--only overload|faults|idle] [--json]

- overload: 200 connections, by MCP and by HTTP, keep a tool busy that runs 16 at a time for 100 ms each: over 12 times
  what it can run. Every call gets one answer; the rate is that of the unloaded server; and the admin port answers.
- faults: a tool that spins, sleeps, exits, crashes, eats memory, prints, returns 30 MB, or ignores its cancellation is
  called 200 times, 4 at once, while a healthy one is called beside it.
- idle: 1,000 connections that say nothing.

What is called beside a load is called by a process of its own, one call after another with a pause between them.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from bench import median, p99, print_table
from bench.http_load import Answer, Broken, Client, Seen, Stream, build, drive
from bench.serve import Served, callyard_server, free_port, mcp_call, open_session, rpc_call, tool_call

AT_ONCE: Final = 16
TAKES_S: Final = 0.1
CONNECTIONS: Final = 200
PAUSE_S: Final = 0.02
IDLE: Final = 1_000
JOBS_MAX: Final = 256
BODY_BYTES_MAX: Final = 4 * 1024 * 1024
FAULTS: Final = ("spin", "nap", "leave", "crash", "hoard", "shout", "large", "deaf")
FUNCTIONS: Final = f"""
import asyncio
import os
import signal
import sys
import time

from callyard import function


@function(idempotent=True)
def add(a: int, b: int) -> int:
    return a + b


@function(idempotent=True, max_concurrency={AT_ONCE})
async def work(number: int) -> int:
    await asyncio.sleep({TAKES_S})
    return number


@function(timeout_ms=200)
def spin() -> None:
    while True:
        pass


@function(timeout_ms=200)
def nap() -> None:
    time.sleep(3_600)


@function
def leave() -> None:
    os._exit(3)


@function
def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


@function(timeout_ms=300)
def hoard() -> int:
    held = []
    while True:
        held.append(b"x" * (16 << 20))
        time.sleep(0.02)


@function
def shout() -> int:
    for number in range(1_000):
        print("line", number)
    sys.stdout.flush()
    return 1_000


@function(timeout_ms=10_000)
def large() -> str:
    return "x" * 30_000_000


@function(timeout_ms=200)
async def deaf() -> None:
    while True:
        try:
            await asyncio.sleep(3_600)
        except asyncio.CancelledError:
            pass
"""


# --- what is called beside ----------------------------------------------------------------------------------------


def run_probe(port: int, what: str) -> None:
    """Until standard input ends; prints when each call began and what it took, in seconds, and what failed."""
    request = build("/livez", b"", method="GET") if what == "livez" else mcp_call("add", {"a": 1, "b": 2})
    ended = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    began: list[float] = []
    took: list[float] = []
    bad: list[str] = []
    with Client(port) as client:
        client.ask(request)  # whatever is loaded at the first call
        print("ready", flush=True)
        while not ended.wait(PAUSE_S):
            at = time.perf_counter()
            try:
                answer = client.ask(request)
            except (OSError, Broken) as error:
                bad.append(repr(error))
                break
            took.append(time.perf_counter() - at)
            began.append(at)
            if answer.status != 200 or b'"isError":true' in answer.body:
                bad.append(f"{answer.status} {answer.body[:200]!r}")
    print(json.dumps({"began": began, "took": took, "bad": bad}))


class Probe:
    """Calls beside a load, in a process of its own."""

    def __init__(self, port: int, what: str) -> None:
        command = [sys.executable, "-m", "bench.serve_load", "--probe", what, "--port", str(port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"
        self.took: list[float] = []
        self.bad: list[str] = []

    def end(self) -> None:
        said, _ = self._process.communicate("", timeout=120)
        found = json.loads(said)
        self.took, self.bad = found["took"], found["bad"]


@contextmanager
def probing(port: int, what: str) -> Iterator[Probe]:
    probe = Probe(port, what)
    try:
        yield probe
    finally:
        probe.end()


class Memory:
    """The most that the server, and its executors together, were seen to hold."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self.server_bytes = self.executors_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(0.2):
            self.look()

    def look(self) -> None:
        own, *others = self._served.rss_bytes()
        self.server_bytes = max(self.server_bytes, own)
        self.executors_bytes = max(self.executors_bytes, sum(others))

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


# --- overload -----------------------------------------------------------------------------------------------------


class Caller:
    """One connection that calls one tool over and over, by one way."""

    def __init__(self, way: str, tool: str, *, session: str = "", calls: int | None = None) -> None:
        self._way = way
        self._tool = tool
        self._session = session
        self._left = calls
        self._number = 0

    def ask(self) -> bytes | None:
        if self._left is not None:
            if not self._left:
                return None
            self._left -= 1
        self._number += 1
        arguments = {"number": self._number} if self._tool == "work" else {}
        if self._way == "/tools":
            return tool_call(self._tool, arguments)
        if self._way == "/rpc":
            return rpc_call(self._tool, arguments)
        return mcp_call(self._tool, arguments, session=self._session, number=self._number)

    def judge(self, answer: Answer) -> str:
        """`ok`, or the kind of the failure."""
        try:
            found = answer.json()
        except ValueError:
            return "no JSON"
        if self._way != "/tools":
            if found.get("id") not in (self._number, 1 if self._way == "/rpc" else None):
                return "of another call"
            result = found.get("result")
            if result is not None and not (isinstance(result, dict) and result.get("isError")):
                return "ok"
            found = found.get("error", {}).get("data") if result is None else result.get("structuredContent")
        elif answer.status == 200:
            return "ok"
        else:
            found = found.get("error")
        return str(found.get("kind")) if isinstance(found, dict) else f"status {answer.status}"


def streams_of(port: int, count: int, tool: str) -> dict[str, tuple[Seen, list[Stream]]]:
    """As many connections, divided among the ways."""
    ways: dict[str, tuple[Seen, list[Stream]]] = {}
    for index in range(count):
        way = ("MCP 2026-07-28", "MCP 2025-11-25", "/tools", "/rpc")[index % 4]
        session = open_session(port) if way == "MCP 2025-11-25" else ""
        caller = Caller(way, tool, session=session)
        seen, streams = ways.setdefault(way, (Seen(), []))
        streams.append(Stream(caller.ask, caller.judge, seen))
    return ways


def measure_overload(seconds: float) -> dict[str, Any]:
    admin = free_port()
    with callyard_server(FUNCTIONS, "--admin", f"127.0.0.1:{admin}", "--log-level", "warning") as served:
        port = served.port
        unloaded, _ = _load(port, AT_ONCE, min(seconds, 10.0))
        with Client(port) as client:
            quiet = [_time(client, mcp_call("work", {"number": 1})) for _ in range(20)]
        with probing(admin, "livez") as calm:
            time.sleep(min(seconds, 5.0))
        memory = Memory(served)
        memory.look()
        before = memory.server_bytes
        with probing(admin, "livez") as livez:
            rate, ways = _load(port, CONNECTIONS, seconds)
        memory.end()
        with Client(port) as client:  # the load is over in this moment
            ended = time.perf_counter()
            after = []
            while time.perf_counter() - ended < 2.0:
                after.append((time.perf_counter() - ended, _time(client, mcp_call("work", {"number": 1}))))
    normal = max(quiet) * 1.25
    late = [at + took for at, took in after if took > normal]
    return {
        "unloaded_rate": unloaded,
        "rate": rate,
        "ways": {
            way: {
                "sent": seen.sent,
                "answers": dict(seen.answers),
                "median_s": median(seen.seconds),
                "p99_s": p99(seen.seconds),
            }
            for way, seen in ways.items()
        },
        "quiet_s": median(quiet),
        "normal_again_s": max(late, default=0.0),
        "admin_quiet_p99_s": p99(calm.took),
        "admin_p99_s": p99(livez.took),
        "admin_calls": len(livez.took),
        "admin_bad": livez.bad,
        "before_bytes": before,
        "server_bytes": memory.server_bytes,
        "executors_bytes": memory.executors_bytes,
        "bound_bytes": before + JOBS_MAX * BODY_BYTES_MAX,
    }


def _load(port: int, connections: int, seconds: float) -> tuple[float, dict[str, Seen]]:
    """Calls of `work` that succeeded a second, but for the first and last second."""
    ways = streams_of(port, connections, "work")
    started = time.perf_counter()
    drive(port, [stream for _, streams in ways.values() for stream in streams], seconds=seconds)
    edge = min(1.0, seconds / 4)
    ended_at = [at - started for seen, _ in ways.values() for at in seen.ended_at]
    steady = [at for at in ended_at if edge <= at < seconds]
    failed = sum(seen.answered - seen.answers["ok"] for seen, _ in ways.values())
    answered = sum(seen.answered for seen, _ in ways.values())
    share = (answered - failed) / answered
    return len(steady) * share / (seconds - edge), {way: seen for way, (seen, _) in ways.items()}


def _time(client: Client, request: bytes) -> float:
    started = time.perf_counter()
    answer = client.ask(request)
    assert answer.status == 200, answer
    return time.perf_counter() - started


def show_overload(found: dict[str, Any]) -> None:
    rows = [
        [
            way,
            f"{of['sent']:,}",
            ", ".join(f"{kind} {count:,}" for kind, count in sorted(of["answers"].items())),
            str(of["sent"] - sum(of["answers"].values())),
            f"{of['median_s'] * 1e3:,.0f} ms",
            f"{of['p99_s'] * 1e3:,.0f} ms",
        ]
        for way, of in found["ways"].items()
    ]
    title = f"{CONNECTIONS} connections call what runs {AT_ONCE} at once for {TAKES_S * 1e3:.0f} ms"
    print_table(title, ["", "calls", "answers", "without", "median", "p99"], rows)
    mb = {key: f"{found[key] / 1e6:,.0f} MB" for key in found if key.endswith("_bytes")}
    print_table(
        "And the server",
        ["", "unloaded", "loaded", ""],
        [
            [
                "rate",
                f"{found['unloaded_rate']:.0f}/s",
                f"{found['rate']:.0f}/s",
                f"{found['rate'] / found['unloaded_rate']:.2f}",
            ],
            [
                "admin /livez, p99",
                f"{found['admin_quiet_p99_s'] * 1e3:.1f} ms",
                f"{found['admin_p99_s'] * 1e3:.1f} ms",
                f"{found['admin_calls']} calls, {len(found['admin_bad'])} bad",
            ],
            ["memory of the server", mb["before_bytes"], mb["server_bytes"], f"bound {mb['bound_bytes']}"],
            ["memory of its executors", "", mb["executors_bytes"], ""],
            [
                "a call as before again",
                f"{found['quiet_s'] * 1e3:.0f} ms",
                "",
                f"after {found['normal_again_s']:.2f} s",
            ],
        ],
    )


# --- faults -------------------------------------------------------------------------------------------------------


def measure_faults(calls: int, quiet_s: float) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        config = Path(folder) / "callyard.toml"
        # Each of the calls runs: neither the breaker nor the wait after many restarts ends them early.
        config.write_text("[serve]\nbreaker_failures = 0\n[worker]\nmax_restarts = 1000000\n", encoding="utf-8")
        settings = ("--executors", "2", "--log-level", "error", "--config", str(config))
        served = stack.enter_context(callyard_server(FUNCTIONS, *settings))
        _load(served.port, AT_ONCE, 2.0)  # every executor has loaded the file then
        for tool in FAULTS:
            with probing(served.port, "add") as quiet:
                time.sleep(quiet_s)
            memory = Memory(served)
            seen = Seen()
            callers = [Caller("MCP 2026-07-28", tool, calls=calls // 4) for _ in range(4)]
            with probing(served.port, "add") as healthy:
                time.sleep(0.5)
                took = drive(served.port, [Stream(caller.ask, caller.judge, seen) for caller in callers])
            memory.end()
            print(f"{tool}: {took:.0f} s", file=sys.stderr, flush=True)
            found[tool] = {
                "sent": seen.sent,
                "answers": dict(seen.answers),
                "took_s": took,
                "quiet_p99_s": p99(quiet.took),
                "healthy_calls": len(healthy.took),
                "healthy_median_s": median(healthy.took),
                "healthy_p99_s": p99(healthy.took),
                "healthy_max_s": max(healthy.took),
                "healthy_bad": healthy.bad,
                "server_bytes": memory.server_bytes,
            }
    return found


def show_faults(found: dict[str, dict[str, Any]]) -> None:
    rows = [
        [
            tool,
            str(of["sent"]),
            ", ".join(f"{kind} {count}" for kind, count in sorted(of["answers"].items())),
            str(of["sent"] - sum(of["answers"].values())),
            f"{of['took_s']:.1f} s",
            f"{of['healthy_calls']} ({len(of['healthy_bad'])} bad)",
            f"{of['quiet_p99_s'] * 1e3:.1f} ms",
            f"{of['healthy_p99_s'] * 1e3:.1f} ms",
            f"{of['healthy_max_s'] * 1e3:.0f} ms",
            f"{of['server_bytes'] / 1e6:,.0f} MB",
        ]
        for tool, of in found.items()
    ]
    columns = ["", "calls", "answers", "without", "took", "healthy", "quiet p99", "p99", "max", "server"]
    print_table("A bad tool beside a healthy one", columns, rows)


# --- idle ---------------------------------------------------------------------------------------------------------


def measure_idle(quiet_s: float) -> dict[str, Any]:
    with callyard_server(FUNCTIONS) as served:
        with probing(served.port, "add") as quiet:
            time.sleep(quiet_s)
        before = served.rss_bytes()[0]
        cpu = served.cpu_s()[0]
        endpoints = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(IDLE)]
        with probing(served.port, "add") as beside:
            time.sleep(quiet_s)
        after = served.rss_bytes()[0]
        found = {
            "quiet_p99_s": p99(quiet.took),
            "p99_s": p99(beside.took),
            "bad": beside.bad,
            "before_bytes": before,
            "after_bytes": after,
            "cpu_s": served.cpu_s()[0] - cpu,
        }
        for endpoint in endpoints:
            endpoint.close()
    return found


def show_idle(found: dict[str, Any]) -> None:
    rows = [
        ["add, p99", f"{found['quiet_p99_s'] * 1e3:.1f} ms", f"{found['p99_s'] * 1e3:.1f} ms"],
        ["memory of the server", f"{found['before_bytes'] / 1e6:.0f} MB", f"{found['after_bytes'] / 1e6:.0f} MB"],
        ["failed", "", str(len(found["bad"]))],
    ]
    print_table(f"{IDLE:,} idle connections", ["", "without", "with"], rows)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.serve_load", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="10 s of overload, 20 calls of each bad tool")
    parser.add_argument("--seconds", type=float, help="of overload (60)")
    parser.add_argument("--only", choices=("overload", "faults", "idle"))
    parser.add_argument("--json", action="store_true", help="one JSON object, in seconds and bytes")
    parser.add_argument("--probe", choices=("livez", "add"), help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.probe is not None:
        run_probe(options.port, options.probe)
        return 0
    seconds = options.seconds or (10.0 if options.quick else 60.0)
    quiet_s = 2.0 if options.quick else 5.0
    parts: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[dict[str, Any]], None]]] = {
        "overload": (lambda: measure_overload(seconds), show_overload),
        "faults": (lambda: measure_faults(20 if options.quick else 200, quiet_s), show_faults),
        "idle": (lambda: measure_idle(quiet_s), show_idle),
    }
    found = {}
    for name, (measure, show) in parts.items():
        if options.only in (None, name):
            found[name] = measure()
            if not options.json:
                show(found[name])
    if options.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
