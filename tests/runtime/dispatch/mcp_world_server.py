"""A server of the official SDK on stdio, which knows nothing of Callyard. `python mcp_world_server.py FILE`: what its
tools do stands in the file."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import mcp_types as types
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError


def build(book: Path) -> MCPServer:
    server = MCPServer("world")

    def note(line: str) -> None:
        with book.open("a") as file:
            file.write(f"{line}\n")

    @server.tool(annotations=types.ToolAnnotations(idempotent_hint=True, destructive_hint=False))
    async def hang(seconds: float) -> str:
        """Says that it was stopped, if it is."""
        note("begun")
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            note("stopped")
            raise
        return "slept"

    @server.tool(annotations=types.ToolAnnotations(read_only_hint=True))
    async def add(a: int, b: int) -> int:
        return a + b

    @server.tool(structured_output=False)
    async def greet(name: str) -> str:
        return f"hello {name}"

    @server.tool(structured_output=False)
    async def picture() -> list[types.TextContent | types.ImageContent]:
        return [types.TextContent(text="a dot"), types.ImageContent(data="AQID", mime_type="image/png")]

    @server.tool()
    async def refuse(why: str) -> str:
        raise ToolError(why)

    @server.tool(structured_output=False)
    async def count(to: int, context: Context) -> str:
        for number in range(1, to + 1):
            await context.report_progress(number, to, f"at {number}")
        return "done"

    @server.tool(annotations=types.ToolAnnotations(idempotent_hint=True))
    async def die(at: str) -> str:
        note(at)
        os._exit(3)

    return server


if __name__ == "__main__":
    build(Path(sys.argv[1])).run()
