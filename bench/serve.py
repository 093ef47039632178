"""Requests a second of `callyard serve` against the official MCP SDK's bare server with the same tool.

    python -m bench.serve [--quick] [--json] [--connections N]

Each server is a process of its own: `callyard serve FILE --http` with its executors, an `MCPServer` and a lowlevel
`Server` of the SDK on uvicorn, which run the tool inside themselves. One load generator asks all of them in turns, over
as many keep-alive connections: `tools/call` of `add` by MCP 2026-07-28 without a session, by 2025-11-25 in a session of
each connection, and of ours also `/tools/add` and `/rpc`. Ratios are of medians over the rounds; CPU is that of the
server's own process, and of its executors beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, Final

from bench import median, microseconds, print_table
from bench.http_load import Answer, Client, Seen, Stream, build, drive

OURS: Final = "callyard serve"
MCP_SERVER: Final = "SDK, MCPServer"
LOWLEVEL: Final = "SDK, lowlevel Server"
MODERN: Final = "MCP 2026-07-28"
SESSIONS: Final = "MCP 2025-11-25, sessions"
TOOLS: Final = "POST /tools/add"
RPC: Final = "POST /rpc"
FUNCTIONS: Final = """
from callyard import function


@function(idempotent=True)
def add(a: int, b: int) -> int:
    return a + b
"""
NUMBERS: Final = tuple(range(1_000, 2_000))
"""What is added to 1, request by request: an answer of another request would show."""
STARTED_S: Final = 60.0


# --- servers ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Served:
    """A server process that answers on `port`."""

    process: subprocess.Popen[bytes]
    port: int

    def tree(self) -> list[int]:
        """The process and all that it started."""
        found = [self.process.pid]
        for pid in found:
            for task in _read_lines(f"/proc/{pid}/task"):
                found += map(int, _read_text(f"/proc/{pid}/task/{task}/children").split())
        return found

    def cpu_s(self) -> tuple[float, float]:
        """CPU seconds of the server's process, and of its children, so far."""
        own, *others = (_cpu_of(pid) for pid in self.tree())
        return own, sum(others)

    def rss_bytes(self) -> list[int]:
        """Resident memory, the server's own first."""
        page = os.sysconf("SC_PAGE_SIZE")
        texts = (_read_text(f"/proc/{pid}/statm") for pid in self.tree())
        return [int(text.split()[1]) * page for text in texts if text]


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError:
        return ""  # it has ended


def _read_lines(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _cpu_of(pid: int) -> float:
    """Also of the children that it has buried."""
    text = _read_text(f"/proc/{pid}/stat")
    if not text:
        return 0.0
    fields = text.rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    with socket.socket() as endpoint:
        endpoint.bind(("127.0.0.1", 0))
        port: int = endpoint.getsockname()[1]
        return port


@contextmanager
def started(command: Sequence[str], port: int) -> Iterator[Served]:
    """Until it answers; ended by SIGTERM when the block ends. What it says is shown when it does not start."""
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        try:
            until = time.monotonic() + STARTED_S
            while not _listens(port):
                if process.poll() is not None or time.monotonic() > until:
                    said.seek(0)
                    raise RuntimeError(f"{command} does not serve:\n{said.read().decode(errors='replace')}")
                time.sleep(0.05)
            yield Served(process, port)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


@contextmanager
def callyard_server(functions: str, *options: str) -> Iterator[Served]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "functions.py"
        path.write_text(functions, encoding="utf-8")
        port = free_port()
        program = "from callyard.cli import main; main()"
        command = [sys.executable, "-c", program, "serve", str(path), "--http", f"127.0.0.1:{port}"]
        with started([*command, "--state-dir", str(Path(folder) / "state"), *options], port) as served:
            yield served


@contextmanager
def sdk_server(kind: str) -> Iterator[Served]:
    port = free_port()
    with started([sys.executable, "-m", "bench.serve", "--bare", kind, "--port", str(port)], port) as served:
        yield served


def run_bare(kind: str, port: int) -> None:
    """The SDK's server as its README has it, with uvicorn's own choice of loop and parser, and no access log."""
    import uvicorn

    app = _mcp_server_app() if kind == MCP_SERVER else _lowlevel_app()
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


def _mcp_server_app() -> Any:
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("bench", log_level="WARNING")

    @server.tool()
    def add(a: int, b: int) -> int:
        return a + b

    return server.streamable_http_app()


def _lowlevel_app() -> Any:
    import mcp_types as types
    from mcp.server.lowlevel import Server

    whole = {"type": "integer"}
    schema = {"type": "object", "properties": {"a": whole, "b": whole}, "required": ["a", "b"]}
    output = {"type": "object", "properties": {"result": whole}, "required": ["result"]}
    tool = types.Tool(name="add", input_schema=schema, output_schema=output)

    async def list_tools(_: Any, __: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[tool])

    async def call_tool(_: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        given = params.arguments or {}
        total = int(given["a"]) + int(given["b"])
        return types.CallToolResult(content=[types.TextContent(text=str(total))], structured_content={"result": total})

    return Server("bench", on_list_tools=list_tools, on_call_tool=call_tool).streamable_http_app()


# --- requests -----------------------------------------------------------------------------------------------------


def mcp_call(tool: str, arguments: Mapping[str, Any], *, session: str = "", number: int = 1) -> bytes:
    """`tools/call`, in a session of 2025-11-25 or else by 2026-07-28."""
    params: dict[str, Any] = {"name": tool, "arguments": arguments}
    headers = {"Accept": "application/json, text/event-stream"}
    if session:
        headers |= {"Mcp-Protocol-Version": "2025-11-25", "Mcp-Session-Id": session}
    else:
        headers |= {"Mcp-Protocol-Version": "2026-07-28", "Mcp-Method": "tools/call", "Mcp-Name": tool}
        prefix = "io.modelcontextprotocol/"
        params["_meta"] = {
            f"{prefix}protocolVersion": "2026-07-28",
            f"{prefix}clientInfo": {"name": "bench", "version": "1"},
            f"{prefix}clientCapabilities": {},
        }
    body = {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}
    return build("/mcp", json.dumps(body).encode(), headers)


def open_session(port: int) -> str:
    headers = {"Accept": "application/json, text/event-stream"}
    params = {
        "protocolVersion": "2025-11-25",
        "capabilities": {},
        "clientInfo": {"name": "bench", "version": "1"},
    }
    body = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}
    with Client(port) as client:
        answer = client.ask(build("/mcp", json.dumps(body).encode(), headers))
        session = answer.headers[b"mcp-session-id"].decode()
        headers |= {"Mcp-Protocol-Version": "2025-11-25", "Mcp-Session-Id": session}
        client.ask(build("/mcp", b'{"jsonrpc":"2.0","method":"notifications/initialized"}', headers))
    return session


def tool_call(tool: str, arguments: Mapping[str, Any]) -> bytes:
    return build(f"/tools/{tool}", json.dumps(arguments).encode())


def rpc_call(tool: str, arguments: Mapping[str, Any]) -> bytes:
    return build("/rpc", json.dumps({"jsonrpc": "2.0", "id": 1, "method": tool, "params": arguments}).encode())


def requests_of(way: str, port: int, connections: int) -> list[list[bytes]]:
    """What each connection asks, over and over."""
    shares = [NUMBERS[index::connections] for index in range(connections)]
    if way == SESSIONS:
        sessions = [open_session(port) for _ in shares]
        return [
            [mcp_call("add", {"a": 1, "b": b}, session=session) for b in share]
            for session, share in zip(sessions, shares, strict=True)
        ]
    make: Callable[[str, Mapping[str, Any]], bytes] = {MODERN: mcp_call, TOOLS: tool_call, RPC: rpc_call}[way]
    return [[make("add", {"a": 1, "b": b}) for b in share] for share in shares]


class Asker:
    """One connection's requests, and whether each answer is of its own request."""

    def __init__(self, requests: list[bytes], numbers: Sequence[int]) -> None:
        self._next = cycle(zip(requests, (str(b + 1).encode() for b in numbers), strict=True))
        self._expected = b""

    def ask(self) -> bytes:
        request, self._expected = next(self._next)
        return request

    def judge(self, answer: Answer) -> str:
        return "ok" if answer.status == 200 and self._expected in answer.body else "wrong"


# --- measuring ----------------------------------------------------------------------------------------------------


class Case:
    """One server asked in one way."""

    def __init__(self, served: Served, way: str, connections: int) -> None:
        self._served = served
        requests = requests_of(way, served.port, connections)
        self._askers = [Asker(own, NUMBERS[index::connections]) for index, own in enumerate(requests)]
        self.rates: list[float] = []
        self.cpu_s: list[float] = []
        self.executors_cpu_s: list[float] = []

    def take_turn(self, seconds: float, *, counts: bool = True) -> None:
        seen = Seen()
        streams = [Stream(asker.ask, asker.judge, seen) for asker in self._askers]
        before = self._served.cpu_s()
        took = drive(self._served.port, streams, seconds=seconds)
        after = self._served.cpu_s()
        if set(seen.answers) != {"ok"} or seen.answered != seen.sent:
            raise RuntimeError(f"{seen.sent} requests got {dict(seen.answers)}")
        if counts:
            self.rates.append(seen.sent / took)
            self.cpu_s.append((after[0] - before[0]) / seen.sent)
            self.executors_cpu_s.append((after[1] - before[1]) / seen.sent)


def compare(*, rounds: int, seconds: float, connections: int) -> dict[str, dict[str, dict[str, float]]]:
    """By way and server: requests a second, and CPU seconds of a request."""
    ways = {MODERN: (OURS, MCP_SERVER, LOWLEVEL), SESSIONS: (OURS, MCP_SERVER, LOWLEVEL), TOOLS: (OURS,), RPC: (OURS,)}
    with ExitStack() as stack:
        servers = {OURS: stack.enter_context(callyard_server(FUNCTIONS))}
        servers |= {kind: stack.enter_context(sdk_server(kind)) for kind in (MCP_SERVER, LOWLEVEL)}
        cases = {(way, name): Case(servers[name], way, connections) for way, names in ways.items() for name in names}
        for case in cases.values():
            case.take_turn(min(seconds, 1.0), counts=False)
        for _ in range(rounds):
            for case in cases.values():
                case.take_turn(seconds)
    found: dict[str, dict[str, dict[str, float]]] = {way: {} for way in ways}
    for (way, name), case in cases.items():
        found[way][name] = {
            "rate": median(case.rates),
            "cpu_s": median(case.cpu_s),
            "executors_cpu_s": median(case.executors_cpu_s),
        }
    return found


def show(found: dict[str, dict[str, dict[str, float]]], connections: int) -> None:
    rows = []
    for way, servers in found.items():
        for name, figures in servers.items():
            ratios = [
                f"{figures['rate'] / servers[base]['rate']:.2f}" if base in servers else ""
                for base in (MCP_SERVER, LOWLEVEL)
            ]
            cpu = [microseconds(figures[key]) if figures[key] else "" for key in ("cpu_s", "executors_cpu_s")]
            rows.append([f"{way}: {name}", f"{figures['rate']:,.0f}/s", *ratios, *cpu])
    print_table(
        f"add(a, b), {connections} connections",
        ["", "requests", "/ MCPServer", "/ lowlevel", "server CPU", "executors' CPU"],
        rows,
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.serve", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few and short rounds")
    parser.add_argument("--json", action="store_true", help="figures as one JSON object, a second and in seconds")
    parser.add_argument("--connections", type=int, default=24, help="that each server is asked over (24)")
    parser.add_argument("--bare", choices=(MCP_SERVER, LOWLEVEL), help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.bare is not None:
        run_bare(options.bare, options.port)
        return 0
    rounds, seconds = (6, 0.4) if options.quick else (30, 0.5)  # short turns: all see the same of what else runs
    found = compare(rounds=rounds, seconds=seconds, connections=options.connections)
    if options.json:
        print(json.dumps(found))
    else:
        show(found, options.connections)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
