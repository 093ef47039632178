"""Host and transport know nothing of each other but the port; the host's pure modules do no IO."""

from __future__ import annotations

import ast
import asyncio
import inspect

import pytest

from callyard.host.flow import FlowTargets
from callyard.host.jobs import JobQueue, Permit
from callyard.testing.scripted_transport import ScriptedTransport
from callyard.testing.virtual_time import VirtualTimers, virtual_time
from callyard.transport import port
from callyard.transport.port import FlowState, Transport
from tests.unit.test_imports import FILES, IO, PACKAGE, folder_of, imports_of

PURE = {
    PACKAGE / "host" / f"{name}.py"
    for name in ("jobs", "config", "ledger", "owners", "gates", "requests", "states", "errors")
} | {PACKAGE / "transport" / "port.py"}
NAMES = ("name", "id", "attr", "arg")
"""Where a node of a syntax tree holds an identifier."""
TO_HOST, TO_TRANSPORT, TO_PORT = (f"callyard.{name}" for name in ("host", "transport", "transport.port"))


@pytest.mark.requirement("R2")
def test_neither_side_imports_the_other_and_both_know_the_port() -> None:
    from_host = [each for file in FILES if folder_of(file) == "host" for each in imports_of(file)]
    assert from_host
    beyond = [
        str(each)
        for each in from_host
        if f"{each.module}.".startswith(f"{TO_TRANSPORT}.") and not f"{each.module}.".startswith(f"{TO_PORT}.")
    ]
    assert [each for each in beyond if not each.endswith(f"imports {TO_TRANSPORT}")] == []
    from_transport = [each for file in FILES if folder_of(file) == "transport" for each in imports_of(file)]
    assert from_transport
    assert [str(each) for each in from_transport if f"{each.module}.".startswith(f"{TO_HOST}.")] == []


@pytest.mark.requirement("R2")
def test_the_port_speaks_of_no_permits_and_the_host_asks_for_no_bytes() -> None:
    named = {getattr(node, field, "") for node in ast.walk(ast.parse(inspect.getsource(port))) for field in NAMES}
    assert "head_kind" in named
    assert [
        name for name in named if isinstance(name, str) and ("permit" in name.lower() or "job" in name.lower())
    ] == []
    asked = {name for name in vars(Transport) if not name.startswith("_")}
    assert asked == {
        *("attach", "sources", "kind_of", "head_kind", "take", "take_completion", "start"),
        *("flow_targets", "snapshot", "close"),
    }
    # The one look at bytes is for status, which is handed the method; nobody else calls it.
    callers = [
        f"{file.name}:{node.lineno}"
        for file in FILES
        if folder_of(file) == "host"
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "snapshot"
        and "transport" in ast.unparse(node.func.value)
    ]
    assert callers == []


@pytest.mark.parametrize("file", sorted(PURE), ids=lambda file: file.stem)
def test_pure_modules_do_no_io(file: object) -> None:
    found = [path for path in FILES if path == file]
    assert found, f"{file} is not there"
    assert [str(each) for each in imports_of(found[0]) if each.module.split(".")[0] in IO] == []


@pytest.mark.requirement("R14")
@virtual_time
async def test_a_full_cycle_of_pressure_is_setter_calls_and_nothing_else() -> None:
    transport = ScriptedTransport()
    sockets = [transport.add_flow_target(name) for name in ("mesh", "server")]
    timers = VirtualTimers()
    flow = FlowTargets(timers)
    jobs = JobQueue(10, clock=timers, on_transition=flow.publish)
    for target in transport.flow_targets():
        await flow.register(target)
    transport.counts.clear()
    held: list[Permit] = []
    while (permit := jobs.try_acquire()) is not None:
        held.append(permit)
    await asyncio.sleep(1)
    while held:
        held.pop().release()
    await asyncio.sleep(1)
    assert dict(transport.counts) == {"set_receive_flow_state": 4}
    for socket in sockets:
        assert socket.applied == [FlowState.RUNNING, FlowState.PAUSED, FlowState.RUNNING]
    await flow.close(timeout_ms=1_000)
