"""`callyard serve` on stdio, as the official inspector drives it. Source: D33, D34."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters

from tests.conformance.node import CALLYARD, HERE, find_packages, node_command, node_environment

SERVER = [*CALLYARD[1:], "serve", str(HERE / "functions.py"), "--quiet", "--store", "memory", "--state-dir"]


def inspect(tmp_path: Path, *arguments: str) -> Any:
    command = [*node_command(find_packages(), "mcp-inspector"), "--cli", sys.executable, *SERVER, str(tmp_path / "s")]
    done = subprocess.run(
        [*command, *arguments], capture_output=True, env=node_environment(tmp_path), timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr.decode() + done.stdout.decode()
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.requirement("D33")
def test_the_inspector_lists_and_calls_tools_over_stdio(tmp_path: Path) -> None:
    listed = inspect(tmp_path, "--method", "tools/list")
    assert "test_simple_text" in [tool["name"] for tool in listed["tools"]]
    called = inspect(tmp_path, "--method", "tools/call", "--tool-name", "test_simple_text")
    assert called["content"][0]["text"] == "This is a simple text response for testing."


@pytest.mark.slow
@pytest.mark.requirement("D33")
@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_the_sdks_own_client_drives_stdio(mode: str, tmp_path: Path) -> None:
    parameters = StdioServerParameters(command=sys.executable, args=[*SERVER, str(tmp_path / "state")])
    async with Client(parameters, mode=mode) as client:
        tools = await client.list_tools()
        assert "test_image_content" in [tool.name for tool in tools.tools]
        result = await client.call_tool("test_image_content", {})
        prompt = await client.get_prompt("test_prompt_with_arguments", {"arg1": "a", "arg2": "b"})
        resource = await client.read_resource("test://template/42/data")
        missing = await client.call_tool("test_custom_header_server", {"region": 5})
    assert result.content[0].type == "image"
    assert "arg1='a'" in prompt.messages[0].content.text  # type: ignore[union-attr]
    assert '"id":"42"' in resource.contents[0].text  # type: ignore[union-attr]
    assert missing.is_error
