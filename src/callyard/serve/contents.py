"""What functions return, as MCP's blocks and as the body of an HTTP answer. Pure.

| `functions.contents.Block` | in a tool's result, in a prompt | read as a resource |
| --- | --- | --- |
| `text` | text | text |
| `image`, `audio` | image, audio | blob |
| `file` | embedded resource, by its own URI or one made of its name | text or blob, by the URI that was read |
| `resource_link` | resource link | |

Source: tool-dispatch D33, D36.
"""

from __future__ import annotations

import urllib.parse
from typing import NamedTuple

import mcp_types as types
import msgspec

from callyard.functions.contents import Block, read_contents, read_messages

JSON_TYPE = "application/json"
BYTES_TYPE = "application/octet-stream"


def to_blocks(output: bytes) -> list[types.ContentBlock] | None:
    """The contents of a tool's result; None: it is a JSON value like any other."""
    blocks = read_contents(output)
    return None if blocks is None else [_to_block(block) for block in blocks]


def to_messages(output: bytes) -> list[types.PromptMessage]:
    """The messages of a prompt's result. What is none is shown as its JSON."""
    messages = read_messages(output)
    if messages is None:
        return [types.PromptMessage(role="user", content=types.TextContent(text=output.decode()))]
    return [types.PromptMessage(role=one.role, content=_to_block(one.content)) for one in messages]


def to_resource(uri: str, output: bytes) -> list[types.TextResourceContents | types.BlobResourceContents]:
    """What is in a resource, read as `uri`."""
    blocks = read_contents(output)
    if blocks is None:
        return [types.TextResourceContents(uri=uri, mime_type=JSON_TYPE, text=output.decode())]
    return [_to_contents(block.uri or uri, block) for block in blocks]


class Body(NamedTuple):
    """An answer over HTTP."""

    data: bytes
    mime_type: str
    name: str = ""
    """Of the file; empty: it has none."""


def to_body(output: bytes) -> Body:
    """The one content as its own bytes; several, a link, and any other value as JSON."""
    blocks = read_contents(output)
    if blocks is not None and len(blocks) == 1 and blocks[0].type != "resource_link":
        block = blocks[0]
        return Body(block.to_bytes(), block.mime_type or "text/plain; charset=utf-8", block.name)
    return Body(output, JSON_TYPE)


def _to_block(block: Block) -> types.ContentBlock:
    match block.type:
        case "text":
            return types.TextContent(text=block.text or "")
        case "image":
            return types.ImageContent(data=block.base64, mime_type=block.mime_type)
        case "audio":
            return types.AudioContent(data=block.base64, mime_type=block.mime_type)
        case "file":
            name = urllib.parse.quote(block.name or "result", safe="")
            return types.EmbeddedResource(resource=_to_contents(block.uri or f"file:///{name}", block))
        case "resource_link":
            return types.ResourceLink(
                uri=block.uri,
                name=block.name,
                title=block.title or None,
                description=block.description or None,
                mime_type=block.mime_type or None,
                size=block.size,
            )


def _to_contents(uri: str, block: Block) -> types.TextResourceContents | types.BlobResourceContents:
    if block.text is not None:
        return types.TextResourceContents(uri=uri, mime_type=block.mime_type or "text/plain", text=block.text)
    return types.BlobResourceContents(uri=uri, mime_type=block.mime_type or BYTES_TYPE, blob=block.base64)


def is_text(output: bytes) -> str | None:
    """The text that a function returned; None: it returned another value."""
    return msgspec.json.decode(output, type=str) if output.startswith(b'"') else None
